"""Diagrams of lesson 08: what fills a card's memory, and which tensor has which precision."""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
TABLE = Path(__file__).parents[1] / "benchmarks/speed/budget.csv"  # `python -m benchmarks.speed.budget_table`
PARTS = {  # what is drawn as one piece: its colour and the columns that it adds up
    "frozen networks": (BLUE, ("frozen",)),
    "LoRA, gradients, moments": (RED, ("trained", "gradients", "moments")),
    "reward model (CLIP)": (PURPLE, ("reward",)),
    "the epoch's latents": (GREEN, ("latents",)),
    "its images and embeddings": (BROWN, ("images", "embeddings")),
    "activations, at their peak": (ORANGE, ("activations_sampling", "activations_training")),
}


def pieces(row: dict[str, str]) -> dict[str, float]:
    """Return GB of every part; of the two peaks of activations the larger."""
    sizes = {}
    for name, (_, columns) in PARTS.items():
        values = [float(row[column]) / 1e9 for column in columns]
        sizes[name] = max(values) if name.startswith("activations") else sum(values)
    return sizes


def memory() -> Figure:
    """Draw the parts of each card's memory, with a line at its end."""
    with open(TABLE, newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = diagram(10, 4.3)
    label(
        axes, 0.25, 4.05, "Camouflage at 512 px, worked out on paper", size=12.5, weight="bold", align="left"
    )
    explained = (
        "The line is the end of the card. LoRA, its gradients and moments (0.013 GB) are too thin to see."
    )
    label(axes, 0.25, 3.72, explained, ink=MUTED, size=9.5, align="left")
    left, width = 2.35, 6.3
    for number, row in enumerate(rows):
        y, card = 3.0 - 0.86 * number, float(row["gpu_memory"])
        at = left
        for name, size in pieces(row).items():
            length = width * size / card
            axes.barh(y, length, left=at, height=0.46, color=PARTS[name][0], edgecolor=CARD, linewidth=0.6)
            at += length
        total = sum(pieces(row).values())
        axes.plot([left + width] * 2, [y - 0.36, y + 0.36], color=INK, linewidth=2)
        label(axes, left + width + 0.12, y, f"{card:.0f} GB", weight="bold", align="left")
        label(axes, at + 0.1, y, f"{total:.1f} GB", ink=MUTED, size=9.5, align="left")
        recomputed = "checkpointing" if row["checkpointing"] == "True" else "no checkpointing"
        label(
            axes,
            0.25,
            y + 0.12,
            f"sample {row['sample_batch_size']}, train {row['train_batch_size']}",
            align="left",
        )
        label(axes, 0.25, y - 0.13, recomputed, ink=MUTED, size=9, align="left")
    for number, (name, (color, _)) in enumerate(PARTS.items()):
        x, y = 0.35 + 3.2 * (number % 3), 0.45 - 0.27 * (number // 3)
        axes.barh(y, 0.2, left=x, height=0.15, color=color)
        label(axes, x + 0.3, y, name, size=9.5, align="left")
    return figure


def precision() -> Figure:
    """Draw the way of a latent through the UNet and back, with the precision of every tensor."""
    figure, axes = diagram(10, 4.1)
    label(
        axes, 0.25, 3.85, "What is kept in float32, and what is not", size=12.5, weight="bold", align="left"
    )
    box(axes, 0.25, 2.0, 1.75, 0.95, "latent $x_t$\nfloat32", color=BLUE)
    box(axes, 3.0, 1.8, 2.3, 1.35, "frozen UNet\nbfloat16\nproducts: autocast", color=ORANGE)
    box(axes, 3.0, 0.55, 2.3, 0.85, "LoRA weights,\nmoments: float32", color=BLUE)
    box(axes, 6.3, 2.0, 1.5, 0.95, "noise $\\epsilon$\nfloat32", color=BLUE)
    box(axes, 8.3, 2.0, 1.5, 0.95, "mean, $\\sigma$\nfloat32", color=BLUE)
    box(axes, 8.3, 0.5, 1.5, 0.95, "action $x_{t-1}$\nfloat32", color=BLUE)
    box(axes, 6.3, 0.5, 1.5, 0.95, "log-prob\nfloat32", color=BLUE)
    arrow(axes, (2.0, 2.48), (3.0, 2.48))
    label(axes, 2.5, 2.72, "rounded", ink=ORANGE, size=9)
    arrow(axes, (5.3, 2.48), (6.3, 2.48))
    label(axes, 5.8, 2.72, ".float()", ink=MUTED, size=9)
    arrow(axes, (4.15, 1.4), (4.15, 1.8))
    arrow(axes, (7.8, 2.48), (8.3, 2.48))
    arrow(axes, (9.05, 2.0), (9.05, 1.45))
    arrow(axes, (8.3, 0.98), (7.8, 0.98))
    label(axes, 9.15, 1.73, "draw", ink=MUTED, size=9, align="left")
    arrow(axes, (1.12, 3.3), (1.12, 2.95))
    axes.plot([9.9, 9.9, 1.12], [0.98, 3.3, 3.3], color=INK, linewidth=1.3)
    axes.plot([9.8, 9.9], [0.98, 0.98], color=INK, linewidth=1.3)
    label(
        axes,
        5.5,
        3.48,
        "the same float32 numbers: the next state, and what training replays",
        ink=MUTED,
        size=9,
    )
    label(
        axes,
        0.25,
        0.18,
        "Rounding happens inside the UNet, the same way in sampling and in training.",
        size=9.5,
        align="left",
    )
    return figure


if __name__ == "__main__":
    main({"08-memory": memory, "08-precision": precision})
