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
PROMPT = "a white four on a yellow background"
EPOCHS = (0, 5, 10, 15, 20, 30, 40)
ROWS = 4  # starts of the prompt


def climb() -> None:
    """Train tiny-sd3 by DRaFT-3 on the margin of the digit, as the lesson does, but longer."""
    import torch

    from ddpo_lessons.algorithms.draft import DRaFT
    from ddpo_lessons.config import DDPOConfig
    from ddpo_lessons.data.prompts import digit_world_prompts
    from ddpo_lessons.data.starts import FromNoise
    from ddpo_lessons.rewards import digit_margin
    from ddpo_lessons.rollout import sample_trajectory
    from ddpo_lessons.tiny import load_tiny_sd3, world
    from ddpo_lessons.trainer import Runner

    named = world.draw_pictures(15, "train", 0, pairs=world.SEEN + world.LEFT_OUT).descriptions
    asked = [description for description in named for _ in range(4)]
    prompts = [world.make_prompt(d.digit, d.ink, d.background) for d in asked]
    noise = torch.randn(60, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    pictures = {}
    with tempfile.TemporaryDirectory() as folder:
        config = DDPOConfig(
            sample_num_steps=10, sample_guidance_scale=1.0, sample_batch_size=32,
            sample_num_batches_per_epoch=1, train_batch_size=32, train_learning_rate=2e-2,
            num_epochs=EPOCHS[-1], save_freq=EPOCHS[-1], image_grid_freq=0, output_dir=folder,
        )  # fmt: skip
        task = config, digit_margin(), digit_world_prompts(0, "all"), load_tiny_sd3()
        runner = Runner(*task, algorithm=DRaFT(3), start=FromNoise())
        family = runner.family
        for epoch in range(EPOCHS[-1] + 1):
            if epoch in EPOCHS:
                conditioning = family.condition(prompts, "", 1.0)
                schedule = family.schedule(10, eta=0.0)
                pictures[epoch] = family.decode(
                    sample_trajectory(family, noise, schedule, conditioning, 1.0).final_latents
                )
            if epoch < EPOCHS[-1]:
                runner.step(epoch)
    keep(pictures, asked, prompts)


def keep(pictures: dict[int, Any], asked: list[Any], prompts: list[str]) -> None:
    """Write what the figure shows: pictures of one prompt, and what reward and judges say of all 60."""
    import torch

    from ddpo_lessons.rewards import digit_margin
    from ddpo_lessons.tiny import load_judge
    from ddpo_lessons.tiny.classifier import score_prompts

    reward, judge = digit_margin(), load_judge()
    digits = [{"digit": d.digit} for d in asked]
    numbers, columns = [], []
    for epoch in EPOCHS:
        images = pictures[epoch]
        apart = torch.cdist(images.flatten(1).view(15, 4, -1), images.flatten(1).view(15, 4, -1))
        numbers.append(
            {
                "epoch": epoch,
                "reward": round(reward(images, prompts, digits).mean().item(), 3),
                "judge": round(score_prompts(judge, images, asked)["all three"], 3),
                "diversity": round(apart.sum().item() / (15 * 12) / images[0].numel() ** 0.5, 4),
            }
        )
        columns.append(images[prompts.index(PROMPT) :][:ROWS])
    grid = torch.stack(columns).mul(255).round().byte()  # (epochs, rows, 3, 32, 32)
    pixels = grid.permute(1, 3, 0, 4, 2).reshape(ROWS * 32, len(EPOCHS) * 32, 3)
    Image.fromarray(pixels.numpy()).save(FRAMES, optimize=True)
    NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def frames(column: int, row: int) -> np.ndarray:
    """Return one picture of the run, (32, 32, 3)."""
    pixels = np.asarray(Image.open(FRAMES).convert("RGB"))
    return pixels[32 * row : 32 * (row + 1), 32 * column : 32 * (column + 1)]


def odd() -> Figure:
    """Draw pictures of one prompt over the epochs, and above them what is said of 60 pictures."""
    numbers: list[dict[str, Any]] = json.loads(NUMBERS.read_text("utf-8"))
    left, side, top = 1.75, 1.0, 4.1
    figure, axes = diagram(9.4, 5.5)
    rows = (("epoch", MUTED), ("reward", BLUE), ("judge", GREEN), ("diversity", ORANGE))
    for n, (text, ink) in enumerate(rows):
        label(axes, left - 0.2, top + 1.1 - 0.3 * n, text, align="right", ink=ink)
    text = "“" + PROMPT.replace(" on", "\non").replace(" background", "\nbackground") + "”,\nfour starts"
    label(axes, left - 0.2, top - 2.0, text, align="right", size=9)
    for column, found in enumerate(numbers):
        x = left + column * (side + 0.07)
        middle = x + side / 2 - 0.02
        values = (
            found["epoch"],
            f"{found['reward']:.1f}",
            f"{found['judge']:.0%}",
            f"{found['diversity']:.3f}",
        )
        for n, (value, (_, ink)) in enumerate(zip(values, rows, strict=True)):
            label(
                axes, middle, top + 1.1 - 0.3 * n, str(value), ink=ink, weight="bold" if n == 1 else "normal"
            )
        for row in range(ROWS):
            draw_picture(axes, x, top - (row + 1) * side, side - 0.04, frames(column, row))
    axes.set(xlim=(0, 9.4), ylim=(0, 5.5))
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
    label(axes, 0.4, 1.38, "taken again (K = 2), with a gradient", align="left", ink=BLUE, size=9.5)
    label(axes, 0.4, 1.04, "and the way back", align="left", ink=ORANGE, size=9.5)
    axes.plot([places[3] + 0.68, places[3] + 0.68], [0.45, 0.9], color=ORANGE, linewidth=2.2)
    label(axes, places[3] + 0.68, 0.28, "ends here: nothing before $x_2$ is reached", ink=ORANGE, size=9)
    return figure


if __name__ == "__main__":
    if not FRAMES.exists():
        climb()
    main({"11-odd": odd, "11-through": through})
