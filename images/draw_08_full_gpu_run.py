"""Diagrams of lesson 08: what fills a card's memory, and which tensor has which precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
# `python -m benchmarks.speed.paper_run`
PAPER = Path(__file__).parents[1] / "ddpo_lessons/app/paper_run.json"
PARTS = {"networks": BLUE, "reward models": PURPLE, "the epoch's samples": GREEN, "activations": ORANGE}
CARDS = (10, 16, 24)  # GiB, as cards are sold
SPARE, OWN = 0.15, 1  # share of a card that a run should leave, and GB of CUDA itself
LEFT, BOTTOM, UNIT, STEP = 0.75, 0.95, 3.4 / 44, 0.97  # inches: of a GB, and from bar to bar


def card_lines(axes: Axes) -> None:
    """Draw where cards end."""
    for card in CARDS:
        y = BOTTOM + UNIT * card * 1.024**3
        axes.plot([0.3, 9.75], [y, y], color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
        label(axes, 0.3, y + 0.11, f"a card of {card} GB", size=9.5, align="left")


def number_above(axes: Axes, x: float, gigabytes: float) -> None:
    """Write what a bar holds, and whether the largest of the cards takes it."""
    size, words = CARDS[-1], f"{gigabytes:.1f}"
    if gigabytes + OWN > size * 1.024**3:
        words += "\ntoo much for 24"
    elif gigabytes + OWN > (1 - SPARE) * size:
        words += "\nno margin at 24"
    tight = "\n" in words
    axes.text(
        x,
        BOTTOM + UNIT * gigabytes + (0.22 if tight else 0.13),
        words,
        color=RED if tight else INK,
        fontsize=10,
        fontweight="bold",
        ha="center",
        va="center",
        bbox={"facecolor": CARD, "edgecolor": "none", "pad": 1},
    )


def stations() -> list[dict[str, Any]]:
    """Return what a card holds at each station of an epoch of `edit`, in bytes."""
    found: list[dict[str, Any]] = json.loads(PAPER.read_text(encoding="utf-8"))["memory"]
    return found


def question() -> Figure:
    """Draw the same epoch trained in five ways, without saying what differs."""
    figure, axes = diagram(10, 5.2)
    label(axes, 0.3, 4.92, "One epoch, five ways to train on it", size=13, weight="bold", align="left")
    words = "Stable Diffusion 1.5 at 512 pixels, GB on the card: worked out on paper, no GPU was used"
    label(axes, 0.3, 4.63, words, ink=MUTED, size=10, align="left")
    card_lines(axes)
    names = ("denoise", "decode", "train, A", "train, B", "train, C", "train, D", "train, E")
    for number, (name, station) in enumerate(zip(names, stations()[2:], strict=True)):
        x, total = LEFT + STEP * (number + 1) + 0.25, sum(station.get(part, 0) for part in PARTS) / 1e9
        color = ORANGE if name.startswith("train") else BLUE
        axes.bar(x, UNIT * total, 0.56, bottom=BOTTOM, color=color)
        number_above(axes, x, total)
        axes.text(x, BOTTOM - 0.08, name, color=INK, fontsize=10, ha="center", va="top")
    words = "A to E: the same samples and optimizer step, the same gradient up to rounding. What differs?"
    label(axes, 0.3, 0.3, words, size=10.5, align="left")
    return figure


def memory() -> Figure:
    """Draw what fills a card at each station of an epoch of `edit`, and the ends of three cards."""
    figure, axes = diagram(10, 5.2)
    label(axes, 0.3, 4.92, "What fills a card", size=13, weight="bold", align="left")
    explained = (
        "Preset edit, GB on paper. A pair is evaluated twice: with its sentence and without (guidance)"
    )
    label(axes, 0.3, 4.63, explained, ink=MUTED, size=10, align="left")
    card_lines(axes)
    for number, station in enumerate(stations()):
        x, at = LEFT + STEP * number + 0.25, 0.0
        for name, color in PARTS.items():
            size = station.get(name, 0) / 1e9
            axes.bar(
                x, UNIT * size, 0.56, bottom=BOTTOM + UNIT * at, color=color, edgecolor=CARD, linewidth=0.6
            )
            at += size
        number_above(axes, x, at)
        text = station["station"].replace(" pairs, checkpointing", " pairs,\ncheckpointing")
        for word in ("models ", "samples ", "denoise ", "decode ", "train "):
            text = text.replace(word, word.strip() + "\n")
        text += " pictures" if text.startswith("de") else ""
        axes.text(x, BOTTOM - 0.08, text, color=INK, fontsize=9, ha="center", va="top")
    for number, (name, color) in enumerate(reversed(PARTS.items())):
        y = 4.1 - 0.25 * number
        axes.bar(0.45, 0.15, 0.2, y - 0.075, color=color)
        note = " (LoRA with moments: 0.013)" if name == "networks" else ""
        label(axes, 0.65, y, name + note, size=10, align="left")
    words = "CUDA itself takes about 1 GB more. A card's GB are GiB, 1.07 of ours; 80 of them end far above."
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
    words = "VAE and text encoder round too, but what they give is recorded once. "
    words += "Only the UNet is run again in training."
    label(axes, 0.25, 0.18, words, size=10, align="left")
    return figure


if __name__ == "__main__":
    main({"08-question": question, "08-memory": memory, "08-precision": precision})
