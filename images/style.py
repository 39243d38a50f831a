"""The look that all diagrams share: a light card, so that they read the same on dark pages.

Each `images/draw_*.py` draws the SVGs of one lesson: `python images/draw_01_batching.py` writes them beside
itself, and `--png FOLDER` also writes PNGs of them, to look at.
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

TEXT = 13  # points: what is 6 inches wide and shown 400 pixels wide then has 9 points

mpl.rcParams.update({"svg.hashsalt": "ddpo-lessons", "svg.fonttype": "path", "font.family": "DejaVu Sans"})
mpl.rcParams.update({"font.size": TEXT, "axes.titlesize": TEXT, "axes.labelsize": TEXT})
mpl.rcParams["axes.titlelocation"] = "left"  # as `title` writes
mpl.rcParams.update({"figure.constrained_layout.h_pad": 0.08, "figure.constrained_layout.w_pad": 0.08})


def diagram(width: float, height: float) -> tuple[Figure, Axes]:
    """Make an empty card, and axes in inches from (0, 0) at the lower left to (width, height)."""
    figure = Figure(figsize=(width, height), facecolor=CARD)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str = "", **style: Any) -> None:
    """Draw a rounded box with its lower left corner at (x, y) and a text of some lines in its middle.

    Style: `color` (of the box, default none), `edge`; `ink`, `size` and `weight` of the text.
    """
    color, pad = style.get("color", "none"), 0.04
    place = (x + pad, y + pad), width - 2 * pad, height - 2 * pad
    look = {"facecolor": color, "edgecolor": style.get("edge", INK), "linewidth": 1.1}
    axes.add_patch(FancyBboxPatch(*place, boxstyle=f"round,pad={pad},rounding_size=0.07", **look))
    text_style = {"ink": INK if color in ("none", CARD) else "white", **style}
    label(axes, x + width / 2, y + height / 2, text, **text_style)


def label(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Write a text around (x, y); style: `ink`, `size`, `weight`, `align` (left, center, right)."""
    look = {"fontsize": style.get("size", TEXT), "fontweight": style.get("weight", "normal")}
    look |= {"color": style.get("ink", INK), "ha": style.get("align", "center")}
    axes.text(x, y, text, va="center", **look)


def title(axes: Axes, x: float, y: float, text: str, size: float = TEXT, **style: Any) -> None:
    """Write a bold text that begins at (x, y)."""
    label(axes, x, y, text, size=size, weight="bold", align="left", **style)


def note(axes: Axes, x: float, y: float, text: str, size: float = TEXT, align: str = "left") -> None:
    """Write what explains, in gray; it begins at (x, y)."""
    label(axes, x, y, text, ink=MUTED, size=size, align=align)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    """Draw an arrow; style: `ink`, `bend` (of the curve, default straight), `width`."""
    look = {"color": style.get("ink", INK), "linewidth": style.get("width", 1.3), "shrinkA": 0, "shrinkB": 0}
    bend = f"arc3,rad={style.get('bend', 0)}"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, connectionstyle=bend, **look)
    )


def main(drawings: dict[str, Callable[[], Figure]]) -> None:
    """Write every drawing of a script, by name, as `images/NAME.svg`."""
    parser = argparse.ArgumentParser(description="draw the diagrams of a lesson")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder of the SVGs")
    parser.add_argument("--png", type=Path, help="also write PNGs to this folder")
    arguments = parser.parse_args()
    for name, draw in drawings.items():
        figure = draw()
        figure.savefig(arguments.output / f"{name}.svg", facecolor=CARD, metadata={"Date": None})
        if arguments.png:
            figure.savefig(arguments.png / f"{name}.png", facecolor=CARD, dpi=110)
