"""Diagrams of lesson 11: pictures of a policy that climbs its reward too long, and the last K steps.

The pictures are of a run that happened: `climb` trains tiny-sd3 by DRaFT, and `11-frames.png` and
`11-frames.json` keep what came of it, so that the figure is the same on every machine. Delete them to run it
again.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from style import INK, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN = PALETTE[:3]
FRAMES = Path(__file__).parent / "11-frames.png"
NUMBERS = FRAMES.with_suffix(".json")
PROMPT = "a red three on a blue background"
EPOCHS = (0, 5, 10, 20, 40, 60, 80)
ROWS = 3  # starts of the prompt
LEARNING_RATE = 1e-2


def climb() -> None:
    """Train tiny-sd3 by DRaFT-3 on the margin of the digit; keep pictures of one prompt, reward and judge."""
    import torch

    from ddpo_lessons.algorithms.draft import DRaFT
    from ddpo_lessons.config import DDPOConfig
    from ddpo_lessons.data.prompts import digit_world_prompts
    from ddpo_lessons.data.starts import FromNoise
    from ddpo_lessons.rewards import digit_margin
    from ddpo_lessons.rollout import play
    from ddpo_lessons.tiny import load_judge, load_tiny_sd3, world
    from ddpo_lessons.tiny.recipe import score_prompts
    from ddpo_lessons.trainer import Runner

    reward, judge = digit_margin(), load_judge()
    asked = [world.parse_prompt(PROMPT)] * ROWS + world.draw_pictures(200, "train", 0).descriptions
    prompts = [world.make_prompt(d.digit, d.ink, d.background) for d in asked]
    noise = torch.randn(len(asked), 4, 8, 8, generator=torch.Generator().manual_seed(1))
    columns, numbers = [], []
    with tempfile.TemporaryDirectory() as folder:
        config = DDPOConfig(
            sample_num_steps=10, sample_guidance_scale=1.0, sample_batch_size=32,
            sample_num_batches_per_epoch=1, train_batch_size=32, train_learning_rate=LEARNING_RATE,
            num_epochs=EPOCHS[-1], save_freq=EPOCHS[-1], image_grid_freq=0, output_dir=folder,
        )  # fmt: skip
        runner = Runner(
            config, reward, digit_world_prompts(0, "all"), load_tiny_sd3(),
            algorithm=DRaFT(3), start=FromNoise(),
        )  # fmt: skip
        family = runner.family
        for epoch in range(EPOCHS[-1] + 1):
            if epoch in EPOCHS:
                told = family.condition(prompts, "", 1.0)
                images = family.decode(
                    play(family, noise, family.schedule(10, eta=0.0), told, 1.0).final_latents
                )
                columns.append(images[:ROWS])
                digits = [{"digit": d.digit} for d in asked[ROWS:]]
                score = reward(images[ROWS:], prompts[ROWS:], digits)
                right = score_prompts(judge, images[ROWS:], asked[ROWS:])
                numbers.append({"epoch": epoch, "reward": score.mean().item(), **right})
            if epoch < EPOCHS[-1]:
                runner.step(epoch)
    grid = torch.stack(columns).mul(255).round().byte()  # (epochs, rows, 3, 32, 32)
    pixels = grid.permute(1, 3, 0, 4, 2).reshape(ROWS * 32, len(EPOCHS) * 32, 3)
    Image.fromarray(pixels.numpy()).save(FRAMES, optimize=True)
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def frames(column: int, row: int) -> np.ndarray:
    """Return one picture of the run, (32, 32, 3)."""
    pixels = np.asarray(Image.open(FRAMES).convert("RGB"))
    return pixels[32 * row : 32 * (row + 1), 32 * column : 32 * (column + 1)]


def odd() -> Figure:
    """Draw pictures of one prompt over the epochs, with reward and judge of other pictures above them."""
    numbers: list[dict[str, Any]] = json.loads(NUMBERS.read_text("utf-8"))
    width, left, side = 9.4, 1.35, 1.06
    figure, axes = diagram(width, ROWS * side + 1.25)
    top = ROWS * side + 0.12
    for n, text in enumerate(("epoch", "reward", "judge")):
        label(axes, left - 0.15, top + 0.85 - 0.3 * n, text, align="right", ink=(MUTED, BLUE, GREEN)[n])
    label(
        axes,
        left - 0.15,
        top - ROWS * side / 2,
        "“a red three\non a blue\nbackground”",
        align="right",
        size=9,
    )
    for column, found in enumerate(numbers):
        x = left + column * (side + 0.08)
        middle = x + side / 2
        label(axes, middle, top + 0.85, str(found["epoch"]), ink=MUTED)
        label(axes, middle, top + 0.55, f"{found['reward']:.1f}", ink=BLUE, weight="bold")
        label(axes, middle, top + 0.25, f"{found['all three']:.0%}", ink=GREEN)
        for row in range(ROWS):
            draw_picture(axes, x, top - (row + 1) * side, side - 0.06, frames(column, row))
    return figure


def draw_picture(axes: Axes, x: float, y: float, side: float, pixels: np.ndarray) -> None:
    """Draw a picture with its lower left corner at (x, y)."""
    axes.imshow(pixels, extent=(x, x + side, y, y + side), interpolation="nearest", aspect="auto", zorder=2)


def through() -> Figure:
    """Draw the rollout that is recorded, and the last steps that are taken again with a gradient."""
    figure, axes = diagram(9.4, 3.3)
    upper = ("$x_{10}$", "…", "$x_3$", "$x_2$", "$x_1$", "$x_0$")
    places = [0.4 + 1.0 * n for n in range(len(upper))]
    label(axes, 0.4, 3.0, "sampled and recorded: all ten steps, no gradient", align="left", ink=MUTED)
    for n, (x, name) in enumerate(zip(places, upper, strict=True)):
        box(axes, x, 2.2, 0.65, 0.5, name, edge=MUTED, ink=MUTED, size=12)
        if n:
            arrow(axes, (x - 0.36, 2.45), (x, 2.45), ink=MUTED)
    arrow(axes, (places[3] + 0.32, 2.2), (places[3] + 0.32, 1.45), ink=INK)
    label(axes, places[3] + 0.2, 1.83, "a constant", align="right", ink=INK, size=9)
    lower = ["$x_2$", "$x_1$", "$x_0$", "picture", "$r$"]
    ends = [places[3], places[4], places[5], places[5] + 1.05, places[5] + 2.55]
    widths = [0.65, 0.65, 0.65, 1.0, 0.65]
    for n, (x, name, width) in enumerate(zip(ends, lower, widths, strict=True)):
        box(axes, x, 0.95, width, 0.5, name, edge=BLUE if n else MUTED, ink=BLUE if n else MUTED, size=12)
        if n:
            arrow(axes, (ends[n - 1] + widths[n - 1], 1.28), (x, 1.28), ink=BLUE)
            arrow(axes, (x, 1.08), (ends[n - 1] + widths[n - 1], 1.08), ink=ORANGE)
    label(axes, 6.4, 2.45, "taken again (K = 2), with a gradient", align="left", ink=BLUE, size=9.5)
    label(axes, 6.4, 2.1, "and the way back", align="left", ink=ORANGE, size=9.5)
    axes.plot([places[3] + 0.68, places[3] + 0.68], [0.45, 0.9], color=ORANGE, linewidth=2.2)
    label(axes, places[3] + 0.68, 0.28, "ends here: nothing before $x_2$ is reached", ink=ORANGE, size=9)
    return figure


if __name__ == "__main__":
    if not FRAMES.exists():
        climb()
    main({"11-odd": odd, "11-through": through})
