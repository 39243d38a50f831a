"""Figure of lesson 07: the first state of img2img."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN = PALETTE[:3]
TIMESTEPS = (999, 799, 599, 399, 199)  # five steps of tiny-sd
NUM_RUN = 2
UNUSED = "#d9d9d0"


def start() -> Figure:
    """Draw the way of a picture to the first state, and the end of the schedule that is run from there."""
    figure, axes = diagram(9.4, 4.1)
    label(axes, 0.25, 3.82, "The picture is the first state", weight="bold", size=12.5, align="left")
    stages = (
        (0.25, 1.3, "picture\n(3, 32, 32)", BLUE),
        (2.45, 1.3, "clean latent x₀\n(4, 8, 8)", BLUE),
        (4.65, 1.8, "first state\n√ᾱ x₀ + √(1 − ᾱ) ε", ORANGE),
        (7.85, 1.3, "result\n(3, 32, 32)", GREEN),
    )
    for x, width, text, color in stages:
        box(axes, x, 2.6, width, 0.85, text, color=color, size=10.5)
    ways = (
        (1.55, 2.45, "encode,", "scale"),
        (3.75, 4.65, "add", "noise ε"),
        (6.45, 7.85, "two steps,", "decode"),
    )
    for left, right, above, below in ways:
        arrow(axes, (left, 3.03), (right, 3.03))
        label(axes, (left + right) / 2, 3.2, above, ink=MUTED, size=9)
        label(axes, (left + right) / 2, 2.85, below, ink=MUTED, size=9)
    _draw_schedule(axes, left=0.25, width=8.9, y=1.05)
    return figure


def _draw_schedule(axes: Axes, left: float, width: float, y: float) -> None:
    cell, skipped = width / len(TIMESTEPS), len(TIMESTEPS) - NUM_RUN
    for k, timestep in enumerate(TIMESTEPS):
        is_last = k == len(TIMESTEPS) - 1
        color = UNUSED if k < skipped else MUTED if is_last else ORANGE
        cut = Rectangle((left + k * cell, y), cell, 0.6, facecolor=color, edgecolor=CARD, linewidth=2)
        axes.add_patch(cut)
        ink = INK if k < skipped else "white"
        label(axes, left + (k + 0.5) * cell, y + 0.3, str(timestep), ink=ink, size=10)
    split = left + skipped * cell
    label(axes, left + cell * skipped / 2, y + 0.82, "5 steps from noise to picture", ink=MUTED, size=9.5)
    arrow(axes, (5.5, 2.6), (split + 0.1, y + 0.64), ink=ORANGE, bend=0.15)
    label(
        axes,
        left + cell * skipped / 2,
        y - 0.22,
        "not run: this much noise would hide it",
        ink=MUTED,
        size=9.5,
    )
    label(axes, split + 0.5 * cell, y - 0.22, "one action", ink=ORANGE, size=9.5)
    label(axes, split + 1.5 * cell, y - 0.22, "no noise", ink=MUTED, size=9.5)
    note = "noise_strength 0.4 of 5 steps: the last 2 are run. The last one adds no noise and is no action."
    label(axes, left, 0.3, note, size=9.5, align="left")


if __name__ == "__main__":
    main({"07-start": start})
