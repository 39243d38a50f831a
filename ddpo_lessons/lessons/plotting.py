"""Figures of the lessons, the demo and the docs: images in rows, and the trade-off of img2img."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of plot_dilemma. images/draw_07_img2img_ddpo.py imports them, so that both have the same colors.
CURVE_COLORS = ("#86660f", "#8a3f96", "#3568b0", "#b03050")
PATH_COLORS = ("#c04f12", "#2e7d4f", "#22262e")
# Of plot_strip, in inches but for the points of the font: a line, an average letter, and between two images.
FONT_SIZE, LINE, LETTER, GAP = 9, 0.17, 0.078, 0.06
PAPER, FRAME = "#fbfbf7", "#c9c9c1"  # without a frame, white images would have no edge on the light figure


def draw_image(axis: Axes, image: torch.Tensor) -> None:
    """Draw an image (3, H, W) without ticks, in a thin light frame."""
    axis.imshow(image.permute(1, 2, 0).cpu(), interpolation="nearest")
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set(visible=True, color=FRAME, linewidth=0.8)


def plot_strip(
    rows: Mapping[str, torch.Tensor], prompts: Sequence[str], count: int, width: float = 9.0
) -> Figure:
    """Show the first `count` images of each row (N, 3, H, W), below their N prompts.

    The figure has at most this width in inches. JupyterLab shrinks one of 9 inches, which has 900 pixels, to
    91% if its window is 1280 pixels wide and the sidebar is open. There the letters still have 11 pixels.
    """
    from matplotlib.figure import Figure

    count = min(count, len(prompts))
    side = min(1.25, width / count)  # of an image and the gap beside it, as all lengths in inches
    letters = int(side / LETTER)
    columns = [textwrap.fill(prompt, letters, break_long_words=False) for prompt in prompts[:count]]
    names = [textwrap.fill(name, int(count * side / LETTER)) for name in rows]
    above = LINE * max(_lines(text) for text in columns) + GAP
    height = above + sum(LINE * _lines(name) + side for name in names)
    figure = Figure(figsize=(count * side, height), facecolor=PAPER)
    figure.set_layout_engine("none")
    for n, prompt in enumerate(columns):
        middle = (n * side + (side - GAP) / 2) / (count * side)
        figure.text(middle, 1 - (above - GAP) / height, prompt, fontsize=FONT_SIZE, ha="center", va="bottom")
    top = height - above
    for name, images in zip(names, rows.values(), strict=True):
        top -= LINE * _lines(name)
        figure.text(0, (top + GAP / 3) / height, name, fontsize=FONT_SIZE, fontweight="bold", va="bottom")
        top -= side
        for n, image in enumerate(images[:count]):
            place = n / count, (top + GAP) / height, (1 - GAP / side) / count, (side - GAP) / height
            draw_image(figure.add_axes(place), image)
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
        for n, point in enumerate(points):
            place = (-5, -10) if n % 2 else (5, 4)  # because neighbors are close together
            side = "left" if n % 2 == 0 else "right" if x[n] > 15 else "center"
            axes.annotate(
                f"{point['strength']:g}", (x[n], y[n]), place, textcoords="offset points",
                fontsize=8, color=color, ha=side,
            )  # fmt: skip
    for color, (name, points) in zip(itertools.cycle(PATH_COLORS), paths.items(), strict=False):
        x, y = ([100 * point[key] for point in points] for key in (correct, kept))
        axes.plot(x, y, ".-", linewidth=2, color=color, label=name)
        axes.plot(x[-1], y[-1], "*", markersize=16, color=color, markeredgecolor="black")
    axes.set(xlim=(-3, 103), ylim=(-3, 103), xlabel=f"{correct} correct (%)", ylabel=f"{kept} kept (%)")
    axes.set_title("small numbers: noise strength; stars: the end of training", fontsize=10)
    axes.legend(fontsize=9, loc="lower left")
    axes.grid(alpha=0.25)
    return figure
