"""The look that all diagrams share: a light card, so that they read the same on dark pages.

Each `images/draw_*.py` draws the SVGs of one lesson: `python images/draw_01_batching.py` writes them beside
itself, and `--png FOLDER` writes pictures of them as well, to look at.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

CARD = "#fbfbf7"  # behind everything
INK = "#22262e"  # lines and text
MUTED = "#5c6370"  # what explains
PALETTE = ("#3568b0", "#c04f12", "#2e7d4f", "#8a3f96", "#86660f", "#b03050")  # dark enough for white text

mpl.rcParams.update({"svg.hashsalt": "ddpo-lessons", "svg.fonttype": "path", "font.family": "DejaVu Sans"})


def diagram(width: float, height: float) -> tuple[Figure, Axes]:
    """Make an empty card.

    Args:
        width: in inches, which are also the units of the axes.
        height: likewise.

    Returns:
        The figure, and axes from (0, 0) at the lower left to (width, height).
    """
    figure = Figure(figsize=(width, height), facecolor=CARD)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str = "", **style: Any) -> None:
    """Draw a rounded box with its lower left corner at (x, y) and a text in its middle.

    Args:
        axes: where.
        x: left edge.
        y: lower edge.
        width: of the box.
        height: of the box.
        text: may have several lines.
        **style: `color` (of the box, default none), `edge`; `ink`, `size` and `weight` of the text.
    """
    color, edge = style.get("color", "none"), style.get("edge", INK)
    pad = 0.04
    axes.add_patch(
        FancyBboxPatch(
            (x + pad, y + pad),
            width - 2 * pad,
            height - 2 * pad,
            boxstyle=f"round,pad={pad},rounding_size=0.07",
            facecolor=color,
            edgecolor=edge,
            linewidth=1.1,
        )
    )
    ink = style.get("ink", INK if color in ("none", CARD) else "white")
    label(
        axes,
        x + width / 2,
        y + height / 2,
        text,
        ink=ink,
        size=style.get("size", 10),
        weight=style.get("weight", "normal"),
    )


def label(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write a text around (x, y); style: `ink`, `size`, `weight`, `align` (left, center, right)."""
    axes.text(
        x,
        y,
        text,
        color=style.get("ink", INK),
        fontsize=style.get("size", 10),
        fontweight=style.get("weight", "normal"),
        ha=style.get("align", "center"),
        va="center",
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    """Draw an arrow; style: `ink`, `bend` (of the curve, default straight), `width`."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=11,
            color=style.get("ink", INK),
            linewidth=style.get("width", 1.3),
            connectionstyle=f"arc3,rad={style.get('bend', 0)}",
            shrinkA=0,
            shrinkB=0,
        )
    )


def main(drawings: dict[str, Callable[[], Figure]]) -> None:
    """Write every drawing of a script as `images/NAME.svg`.

    Args:
        drawings: for every name the function that draws it.
    """
    parser = argparse.ArgumentParser(description="draw the diagrams of a lesson")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of the SVGs")
    parser.add_argument("--png", type=Path, help="also write PNGs to this folder")
    arguments = parser.parse_args()
    for name, draw in drawings.items():
        figure = draw()
        figure.savefig(arguments.output / f"{name}.svg", facecolor=CARD, metadata={"Date": None})
        if arguments.png:
            figure.savefig(arguments.png / f"{name}.png", facecolor=CARD, dpi=110)
