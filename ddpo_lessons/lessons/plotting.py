"""Figures of the lessons, the demo and the docs: images in rows, and the trade-off of img2img."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of plot_dilemma. images/draw_07_img2img_ddpo.py imports them, so that both have the same colors.
CURVE_COLORS = ("#86660f", "#8a3f96", "#3568b0", "#b03050")
PATH_COLORS = ("#c04f12", "#2e7d4f", "#22262e")
# Of rows of images, in inches but for the points of the font: a line, an average letter, and between images.
FONT_SIZE, LINE, LETTER, GAP = 9, 0.17, 0.078, 0.06
# Without a frame, white images would have no edge on the light figure.
PAPER, FRAME, MUTED = "#fbfbf7", "#c9c9c1", "#5c6370"


def draw_image(axis: Axes, image: torch.Tensor) -> None:
    """Draw an image (3, H, W) without ticks, in a thin light frame."""
    axis.imshow(image.permute(1, 2, 0).cpu(), interpolation="none")
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set(visible=True, color=FRAME, linewidth=0.8)


def draw_row(
    figure: Figure, images: torch.Tensor, name: str, left: float, bottom: float, side: float, **style: Any
) -> None:
    """Draw images (N, 3, H, W) side by side, their name in bold above the first; lengths are in inches.

    `side` is that of an image and the gap beside it. Style: `size` and `color` of the name; `note`, which
    ends above the last image; `below`, a text for each image.
    """
    width, height = figure.get_size_inches()
    size, edge = style.get("size", FONT_SIZE), side - GAP
    over = (bottom + edge + GAP / 3) / height
    look = {"fontsize": size, "va": "bottom", "color": style.get("color")}
    figure.text(left / width, over, name, fontweight="bold", **look)
    if note := style.get("note"):
        end = (left + len(images) * side - GAP) / width
        figure.text(end, over, note, ha="right", **{**look, "color": MUTED})
    for n, image in enumerate(images):
        x = left + n * side
        draw_image(figure.add_axes((x / width, bottom / height, edge / width, edge / height)), image)
        if texts := style.get("below"):
            middle, under = (x + edge / 2) / width, (bottom - GAP / 2) / height
            figure.text(middle, under, texts[n], fontsize=size, ha="center", va="top")


def plot_strip(
    rows: Mapping[str, torch.Tensor],
    prompts: Sequence[str],
    count: int,
    width: float = 9.0,
    below: Mapping[str, Sequence[str]] | None = None,
) -> Figure:
    """Show the first `count` images of each row (N, 3, H, W), below their N prompts, if there are any.

    `below` has for each row a text for each image. The figure has at most this width in inches. JupyterLab
    shrinks one of 9 inches, which has 900 pixels, to 91% if its window is 1280 pixels wide and the sidebar is
    open. There the letters still have 11 pixels.
    """
    from matplotlib.figure import Figure

    count = min(count, len(prompts) or max(len(images) for images in rows.values()))
    side = min(1.25, width / count)  # of an image and the gap beside it, as all lengths in inches
    letters = int(side / LETTER)
    columns = [textwrap.fill(prompt, letters, break_long_words=False) for prompt in prompts[:count]]
    names = [textwrap.fill(name, int(count * side / LETTER)) for name in rows]
    above = LINE * max(_lines(text) for text in columns) + GAP if columns else 0
    under = LINE if below else 0
    height = above + sum(LINE * _lines(name) + side + under for name in names)
    figure = Figure(figsize=(count * side, height), facecolor=PAPER)
    figure.set_layout_engine("none")
    for n, prompt in enumerate(columns):
        middle = (n * side + (side - GAP) / 2) / (count * side)
        figure.text(middle, 1 - (above - GAP) / height, prompt, fontsize=FONT_SIZE, ha="center", va="bottom")
    top = height - above
    for name, (key, images) in zip(names, rows.items(), strict=True):
        top -= LINE * _lines(name) + side + under
        texts = below[key] if below else None
        draw_row(figure, images[:count], name, 0, top + GAP + under, side, below=texts)
    return figure


def _lines(text: str) -> int:
    return text.count("\n") + 1


def plot_dilemma(
    curves: Mapping[str, Sequence[Mapping[str, float]]],
    paths: Mapping[str, Sequence[Mapping[str, float]]],
    correct: str,
    kept: str,
) -> Figure:
    """Plot the fraction of images that keep the input against the fraction that follow the prompt.

    `curves` are points of an untrained pipeline, by name, each with its noise "strength"; `paths` are points
    of runs over their epochs. Every point has the two fractions, under the keys `correct` and `kept`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.2), layout="constrained")
    axes = figure.subplots()
    for color, (name, points) in zip(itertools.cycle(CURVE_COLORS), curves.items(), strict=False):
        x, y = ([100 * point[key] for point in points] for key in (correct, kept))
        axes.plot(x, y, "o-", markersize=4, linewidth=1.2, color=color, label=name)
        named: list[tuple[float, float]] = []  # places of the points that have a label
        for point, place in zip(points, zip(x, y, strict=True), strict=True):
            if all(math.dist(place, other) > 8 for other in named):
                text = f"{'' if named else 'strength '}{point['strength']:g}"
                axes.annotate(text, place, (7, 6), textcoords="offset points", fontsize=9, color=color)
                named.append(place)
    for color, (name, points) in zip(itertools.cycle(PATH_COLORS), paths.items(), strict=False):
        x, y = ([100 * point[key] for point in points] for key in (correct, kept))
        axes.plot(x, y, ".-", linewidth=2, color=color)
        star: dict[str, Any] = {"markersize": 16, "markeredgecolor": "black", "linestyle": "none"}
        axes.plot(x[-1], y[-1], "*", color=color, label=f"after {name}", **star)
    axes.set(xlim=(-3, 103), ylim=(-3, 103), xlabel=f"{correct} correct (%)", ylabel=f"{kept} kept (%)")
    axes.set_title("Noise strength moves along the curve", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=9, loc="lower left")
    axes.grid(alpha=0.25)
    return figure
