"""Diagrams of lesson 09: eight runs by an ODE and by an SDE from one noise; what three steps do to the noise.

The pictures are of runs of tiny-sd3 that happened: `denoise` makes them, and `09-frames.png` keeps them, so
that the diagram is the same on every machine. Delete that file to run them again.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from style import INK, MUTED, PALETTE, arrow, diagram, label, main

from ddpo_lessons.advantages import normalize_groups
from ddpo_lessons.rewards import prompt_alignment

BLUE, ORANGE, GREEN = PALETTE[:3]
FRAMES = Path(__file__).parent / "09-frames.png"
PROMPT = "a white four on a blue background"
START, ACTIONS = 1, 2  # seeds of the first noise and of the draws on the way, as in the lesson
STEPS, ETA, COUNT = 10, 0.7, 8

# The step whose budget is drawn: half way, one of ten.
LEVEL, LENGTH = 0.6, 0.1


def denoise() -> None:
    """Run tiny-sd3 from one noise, eight times by the ODE and eight by the SDE, and keep the pictures."""
    from ddpo_lessons.families import family_of
    from ddpo_lessons.rollout import sample_trajectory
    from ddpo_lessons.tiny import load_tiny_sd3

    family = family_of(load_tiny_sd3())
    conditioning = family.condition([PROMPT] * COUNT, "", 1.0)
    start = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(START))
    rows = []
    for eta in (0.0, ETA):
        generator = torch.Generator().manual_seed(ACTIONS)
        schedule = family.schedule(STEPS, eta=eta)
        ends = sample_trajectory(
            family, start.expand(COUNT, -1, -1, -1), schedule, conditioning, 1.0, generator
        ).final_latents
        rows.append(family.decode(torch.cat([start, ends])))  # (9, 3, 32, 32)
    pixels = torch.stack(rows).mul(255).round().byte()  # (2, 9, 3, 32, 32)
    assert (pixels[0, 1:] == pixels[0, 1]).all(), "without noise all runs are one"
    grid = pixels.permute(0, 3, 1, 4, 2).reshape(2 * 32, (COUNT + 1) * 32, 3)
    Image.fromarray(grid.numpy()).save(FRAMES, optimize=True)


def frames() -> np.ndarray:
    """Return the kept pictures, (2, 9, 32, 32, 3): first noise and eight runs, by the ODE and the SDE."""
    if not FRAMES.exists():
        denoise()
    pixels = np.asarray(Image.open(FRAMES))
    return pixels.reshape(2, 32, COUNT + 1, 32, 3).transpose(0, 2, 1, 3, 4)


def picture(axes: Axes, x: float, y: float, size: float, pixels: np.ndarray, edge: str) -> None:
    """Show pixels (32, 32, 3) in a frame with the lower left corner at (x, y)."""
    axes.imshow(pixels, extent=(x, x + size, y, y + size), interpolation="none", zorder=3, aspect="auto")
    axes.add_patch(Rectangle((x, y), size, size, facecolor="none", edgecolor=edge, linewidth=1.6, zorder=4))


def signed(value: float) -> str:
    """Write a number with its sign; what rounds to zero has none."""
    return f"{value:+.1f}".replace("-", "−") if abs(value) >= 0.05 else "0"


def eight() -> Figure:
    """One noise, two samplers, eight runs each, with rewards and advantages."""
    figure, axes = diagram(9.4, 3.75)
    strips, score, size, pitch, left = frames(), prompt_alignment(), 0.82, 0.9, 2.1
    title = f"One first noise, one prompt, one network: “{PROMPT}”"
    label(axes, 0.2, 3.5, title, weight="bold", size=12, align="left")
    for pixels, y, color, name, note in (
        (strips[0], 2.2, BLUE, "ODE", "eight equal pictures: nothing to learn from"),
        (strips[1], 0.62, ORANGE, "SDE", "eight different ones: the better can be preferred"),
    ):
        images = torch.from_numpy(pixels[1:].copy()).permute(0, 3, 1, 2).float().div(255)
        values = torch.as_tensor(score(images, [PROMPT] * COUNT, [{}] * COUNT)[0])  # (8,)
        advantages = normalize_groups(values, COUNT).tolist()
        label(axes, 0.2, y + size + 0.16, f"{name}: {note}", ink=color, weight="bold", size=10, align="left")
        picture(axes, 0.2, y, size, pixels[0], MUTED)
        arrow(axes, (1.1, y + size / 2), (left - 0.1, y + size / 2), ink=color)
        label(axes, 1.55, y + size / 2 + 0.15, f"{STEPS} steps", ink=MUTED, size=9)
        label(axes, 0.2, y - 0.13, "first noise", ink=MUTED, size=9, align="left")
        label(axes, left - 0.08, y - 0.13, "reward", ink=MUTED, size=9, align="right")
        label(axes, left - 0.08, y - 0.33, "advantage", ink=MUTED, size=9, align="right")
        for n, (value, advantage) in enumerate(zip(values.tolist(), advantages, strict=True)):
            x = left + n * pitch
            picture(axes, x, y, size, pixels[n + 1], color)
            label(axes, x + size / 2, y - 0.13, f"{value:.1f}".replace("-", "−"), size=9.5)
            label(axes, x + size / 2, y - 0.33, signed(advantage), size=9.5, weight="bold", ink=color)
    axes.set(xlim=(0, 9.4), ylim=(0, 3.75))
    return figure


def budget() -> Figure:
    """Bars: how much noise a latent holds before a step and after it, kept and fresh, for three samplers."""
    figure, axes = diagram(9.4, 2.7)
    after = LEVEL - LENGTH
    level = 0.7 * math.sqrt(LEVEL / (1 - LEVEL))
    fresh = level**2 * LENGTH
    kept = after - level**2 / (2 * LEVEL) * LENGTH
    cps = (after * math.sin(0.8 * math.pi / 2)) ** 2
    rows = (
        ("ODE", after**2, 0.0, BLUE),
        ("flow, η = 0.7", kept**2, fresh, ORANGE),
        ("CPS, η = 0.8", after**2 - cps, cps, GREEN),
    )
    title = f"Variance of the noise after one step, from σ̄ = {LEVEL} to {after:.1f}"
    label(axes, 0.2, 2.45, title, weight="bold", size=12, align="left")
    left, scale = 1.7, 5.0 / 0.3
    for n, (name, old, new, color) in enumerate(rows):
        y = 1.55 - 0.55 * n
        label(axes, left - 0.15, y + 0.19, name, ink=color, weight="bold", align="right")
        axes.add_patch(Rectangle((left, y), old * scale, 0.38, facecolor=color, edgecolor=INK, linewidth=0.8))
        axes.add_patch(
            Rectangle(
                (left + old * scale, y), new * scale, 0.38, facecolor="none", edgecolor=color, hatch="///"
            )
        )
        place = left + (old + new) * scale + 0.15
        label(
            axes,
            place,
            y + 0.19,
            f"{old:.3f} kept + {new:.3f} fresh = {old + new:.3f}",
            size=9.5,
            align="left",
        )
    x = left + after**2 * scale
    axes.plot([x, x], [0.35, 2.05], color=INK, linewidth=1, linestyle="--")
    label(axes, x, 0.22, f"wanted: σ̄² = {after**2:.2f}", size=9.5)
    return figure


if __name__ == "__main__":
    main({"09-eight": eight, "09-budget": budget})
