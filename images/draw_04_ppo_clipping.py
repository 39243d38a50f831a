"""Figures of lesson 04: what clipping decides, four rollouts from reward to gradient, an epoch's stages."""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path

from matplotlib import image as mpl_image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import INK, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE, _, _ = PALETTE
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COMPARED = {  # variants of clipping.py there
    "before training": "before training",
    "clipped": "trained, with clipping",
    "not clipped": "trained, without clipping",
}
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
CLIP_RANGE = 0.2
REWARDS, RATIOS = (17.0, 11.0, 9.0, 3.0), (1.5, 0.5, 1.1, 0.5)
VERDICTS = (
    "good, already 50% likelier:\nenough",
    "good, but it became rarer:\nraise it",
    "bad, and 10% likelier:\npush it down",
    "bad, already half as likely:\nenough",
)


def _signed(value: float, digits: int = 2) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def clipping() -> Figure:
    """Draw pictures before and after two trainings, and what their judges found."""
    figure, axes = diagram(10, 5.2)
    with open(RESULTS / "clipping.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    label(
        axes,
        0.2,
        4.95,
        "Reward: make it red. Every batch of samples is used four times.",
        size=12.5,
        weight="bold",
        align="left",
    )
    for column, digit in enumerate(DIGITS):
        label(axes, 2.05 + 0.61 * (column + 0.5), 4.53, digit, ink=MUTED, size=9)
    label(axes, 8.63, 4.53, "redness", ink=MUTED, size=9)
    label(axes, 9.43, 4.53, "readable", ink=MUTED, size=9)
    for place, (variant, name) in enumerate(COMPARED.items()):
        bottom = 3.15 - 1.3 * place
        pixels = mpl_image.imread(RESULTS / f"clipping_{variant.replace(' ', '_')}.png")
        axes.imshow(pixels, extent=(2.05, 8.15, bottom, bottom + 1.22), interpolation="none", zorder=3)
        label(axes, 1.9, bottom + 0.61, name.replace(", ", ",\n"), size=10.5, weight="bold", align="right")
        found = [row for row in rows if row["variant"] == variant]
        for x, what, form in ((8.63, "redness", "{:.2f}"), (9.43, "judge", "{:.0%}")):
            values = sorted(float(row[what]) for row in found)
            label(axes, x, bottom + 0.72, form.format(sum(values) / len(values)), size=14, weight="bold")
            if len(values) > 1:
                spread = f"{form.format(values[0])} to {form.format(values[-1])}"
                label(axes, x, bottom + 0.42, spread, ink=MUTED, size=8)
    axes.set(xlim=(0, 10), ylim=(0, 5.2), aspect="auto")
    seeds = len({row["seed"] for row in rows})
    notes = (
        f"Pictures: the first twenty of seed 0. Numbers: mean of {seeds} seeds, and lowest to highest. "
        "Yellow scores about 0.5.",
        "Readable: share of 100 pictures in which a judge, unused in training, names the right digit.",
    )
    for y, note in zip((0.38, 0.17), notes, strict=True):
        label(axes, 0.2, y, note, ink=MUTED, size=9, align="left")
    return figure


def rollouts() -> Figure:
    """Draw the table that sections 1 and 2 fill in, computed from rewards and ratios."""
    figure, axes = diagram(10, 4.15)
    mean = sum(REWARDS) / len(REWARDS)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in REWARDS) / len(REWARDS))
    columns = {
        "reward r": (0.95, 0.85),
        "advantage A": (1.95, 0.95),
        "ratio ρ": (3.05, 0.8),
        "−A ρ": (4.0, 0.85),
        "−A clip(ρ)": (4.9, 0.85),
        "loss": (5.9, 0.85),
        "gradient": (6.9, 0.85),
    }
    label(
        axes,
        0.2,
        3.85,
        "Four rollouts on their way from reward to gradient",
        size=12.5,
        weight="bold",
        align="left",
    )
    for name, (x, width) in columns.items():
        label(axes, x + width / 2, 3.4, name, size=10.5, weight="bold")
    label(axes, 4.87, 3.13, "the larger of the two is the loss", ink=MUTED, size=9)
    label(axes, 7.95, 3.4, "what it says", size=10.5, weight="bold", align="left")
    for row, (reward, ratio, verdict) in enumerate(zip(REWARDS, RATIOS, VERDICTS, strict=True)):
        y = 2.4 - 0.62 * row
        advantage = (reward - mean) / std
        plain = -advantage * ratio
        clipped = -advantage * min(max(ratio, 1 - CLIP_RANGE), 1 + CLIP_RANGE)
        loss = max(plain, clipped)
        is_dead = clipped > plain
        gradient = 0.0 if is_dead else plain
        color = GREEN if advantage > 0 else ORANGE
        label(axes, 0.5, y + 0.25, f"rollout {row + 1}", size=10)
        cells = {
            "reward r": (f"{reward:.0f}", "none", INK),
            "advantage A": (_signed(advantage, 1), color, "white"),
            "ratio ρ": (f"{ratio:.1f}", BLUE, "white"),
            "−A ρ": (_signed(plain), "none" if is_dead else "#dfe8f5", INK),
            "−A clip(ρ)": (_signed(clipped), "#dfe8f5" if is_dead else "none", INK),
            "loss": (_signed(loss), PURPLE, "white"),
            "gradient": (
                _signed(gradient) if gradient else "0",
                "none" if is_dead else PURPLE,
                INK if is_dead else "white",
            ),
        }
        for name, (text, fill, ink) in cells.items():
            x, width = columns[name]
            box(axes, x, y, width, 0.5, text, color=fill, ink=ink, size=10.5)
        label(axes, 7.95, y + 0.25, verdict, ink=MUTED, size=9.5, align="left")
    label(
        axes, 0.2, 0.2,
        "clip range 0.2; the gradient is that of a rollout's loss with respect to its log-probability",
        ink=MUTED, size=9, align="left",
    )  # fmt: skip
    return figure


def stages() -> Figure:
    """Draw one epoch of DDPO as the seven stages that the loop of section 5 marks."""
    figure, axes = diagram(10, 4.55)
    label(
        axes,
        0.2,
        4.25,
        "One epoch: the stages in the loop of this lesson",
        size=12.5,
        weight="bold",
        align="left",
    )
    width, height = 2.05, 0.95
    tops = [(0.2, 2.75), (2.65, 2.75), (5.1, 2.75), (7.55, 2.75)]
    names = [
        ("1  sample", "pictures, actions and\ntheir log-probs, kept", BLUE),
        ("2  score", "one reward\nper picture", GREEN),
        ("3  advantages", "rewards in standard\ndeviations", GREEN),
        ("4  shuffle", "(sample, timestep)\npairs, minibatches", BLUE),
    ]
    for (x, y), (name, text, color) in zip(tops, names, strict=True):
        _stage(axes, (x, y, width, height), name, text, color)
    for (x, y), (x_next, _) in itertools.pairwise(tops):
        arrow(axes, (x + width, y + height / 2), (x_next, y + height / 2))
    bottoms = [(7.55, 0.85), (5.1, 0.85), (2.65, 0.85)]
    names = [
        ("5  replay", "log-probs of the same\nactions, with gradient", PURPLE),
        ("6  clipped loss", "ratio to the kept\nlog-probs, clipped", PURPLE),
        ("7  optimizer step", "gradient, its norm\ncut, new weights", PURPLE),
    ]
    for (x, y), (name, text, color) in zip(bottoms, names, strict=True):
        _stage(axes, (x, y, width, height), name, text, color)
    arrow(axes, (8.9, 2.75), (8.9, 1.8))
    arrow(axes, (7.55, 1.325), (7.15, 1.325))
    arrow(axes, (5.1, 1.325), (4.7, 1.325))
    # Back to the next minibatch, to the next inner epoch, and to the next epoch.
    arrow(axes, (3.675, 0.85), (8.575, 0.85), bend=0.11, ink=MUTED)
    label(axes, 6.125, 0.3, "next minibatch; ρ is 1 in the very first only", ink=MUTED, size=9)
    arrow(axes, (3.675, 1.8), (8.2, 2.75), bend=-0.02, ink=MUTED)
    label(axes, 7.0, 2.1, "next inner epoch: shuffle again", ink=MUTED, size=9)
    arrow(axes, (2.65, 1.325), (1.225, 2.75), bend=-0.35, ink=MUTED)
    label(axes, 1.0, 1.5, "next epoch:\na new policy\nsamples", ink=MUTED, size=9)
    return figure


def _stage(axes: Axes, place: tuple[float, float, float, float], name: str, text: str, color: str) -> None:
    x, y, width, height = place
    box(axes, x, y, width, height, color=color)
    label(axes, x + width / 2, y + height - 0.22, name, ink="white", size=10.5, weight="bold")
    label(axes, x + width / 2, y + 0.33, text, ink="white", size=9.2)


if __name__ == "__main__":
    main({"04-clipping": clipping, "04-rollouts": rollouts, "04-stages": stages})
