"""Diagrams of lesson 08: what fills a card's memory, and which tensor has which precision."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
# `python -m benchmarks.speed.paper_run`
PAPER = Path(__file__).parents[1] / "benchmarks/speed/paper_run.json"
PARTS = {"networks": BLUE, "reward models": PURPLE, "the epoch's samples": GREEN, "activations": ORANGE}
CARDS = (10, 16, 24)  # GB


def memory() -> Figure:
    """Draw what a card holds at each station of an epoch of `edit`, and the ends of three cards."""
    stations = json.loads(PAPER.read_text(encoding="utf-8"))["memory"]
    figure, axes = diagram(10, 5.2)
    label(axes, 0.3, 4.92, "What bursts a card", size=13, weight="bold", align="left")
    explained = "Preset edit, Stable Diffusion 1.5 at 512 pixels, in GB: worked out on paper, no GPU was used"
    label(axes, 0.3, 4.63, explained, ink=MUTED, size=10, align="left")
    left, bottom, unit, step = 0.75, 0.95, 3.4 / 44, 0.97  # inches: of a GB, and from bar to bar
    for card in CARDS:
        y = bottom + unit * card
        axes.plot([0.3, 9.75], [y, y], color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
        label(axes, 0.3, y + 0.11, f"a card of {card} GB", size=9.5, align="left")
    for number, station in enumerate(stations):
        x, at = left + step * number + 0.25, 0.0
        for name, color in PARTS.items():
            size = station.get(name, 0) / 1e9
            axes.bar(x, unit * size, 0.56, bottom + unit * at, color=color, edgecolor=CARD, linewidth=0.6)
            at += size
        fits = at + 1 < CARDS[-1]  # CUDA's own
        words = f"{at:.1f}" if fits else f"{at:.1f}: out of memory"
        axes.text(
            x,
            bottom + unit * at + 0.13,
            words,
            color=INK if fits else RED,
            fontsize=10,
            fontweight="bold",
            ha="center" if fits else "right",
            va="center",
            bbox={"facecolor": CARD, "edgecolor": "none", "pad": 1},
        )
        text = station["station"].replace(" pairs, checkpointing", ",\ncheckpoint-\ning")
        for word in ("models ", "samples ", "denoise ", "decode "):
            text = text.replace(word, word.strip() + "\n")
        text = text if "checkpoint" in text else text.replace("train ", "train\n")
        axes.text(x, bottom - 0.08, text, color=INK, fontsize=9.5, ha="center", va="top")
    for number, (name, color) in enumerate(reversed(PARTS.items())):
        y = 4.1 - 0.25 * number
        axes.bar(0.45, 0.15, 0.2, y - 0.075, color=color)
        note = " (LoRA with moments: 0.013)" if name == "networks" else ""
        label(axes, 0.65, y, name + note, size=10, align="left")
    words = "CUDA itself takes about 1 GB more. Sampling and training come one after the other."
    label(axes, 0.3, 0.2, words, ink=MUTED, size=10, align="left")
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
    box(axes, 6.2, 2.0, 1.5, 0.95, "noise $\\hat\\varepsilon$\nfloat32", color=BLUE)
    box(axes, 8.15, 2.0, 1.5, 0.95, "$\\mu$, $\\sigma$\nfloat32", color=BLUE)
    box(axes, 8.15, 0.5, 1.5, 0.95, "action $x_{t-1}$\nfloat32", color=BLUE)
    box(axes, 6.2, 0.5, 1.5, 0.95, "log-prob\nfloat32", color=BLUE)
    arrow(axes, (2.0, 2.48), (3.0, 2.48))
    label(axes, 2.5, 2.7, "rounded", ink=ORANGE, size=9.5)
    arrow(axes, (5.3, 2.48), (6.2, 2.48))
    label(axes, 5.75, 2.7, ".float()", ink=MUTED, size=9.5)
    arrow(axes, (4.15, 1.4), (4.15, 1.8))
    arrow(axes, (7.7, 2.48), (8.15, 2.48))
    arrow(axes, (8.9, 2.0), (8.9, 1.45))
    arrow(axes, (8.15, 0.98), (7.7, 0.98))
    label(axes, 9.0, 1.73, "draw", ink=MUTED, size=9.5, align="left")
    arrow(axes, (1.12, 3.3), (1.12, 2.95))
    axes.plot([9.65, 9.82, 9.82, 1.12], [0.98, 0.98, 3.3, 3.3], color=INK, linewidth=1.3)
    words = "the same float32 numbers: the next state, and what training replays"
    label(axes, 5.5, 3.48, words, ink=MUTED, size=9.5)
    words = "Only the UNet rounds. It rounds alike in sampling and in training if their passes have one size."
    label(axes, 0.25, 0.18, words, size=10, align="left")
    return figure


if __name__ == "__main__":
    main({"08-memory": memory, "08-precision": precision})
