"""Helpers that the figures share: images, panels and numbers."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from style import CARD, INK, TEXT, diagram

from ddpo_lessons.lessons.plotting import GAP, draw_row

Row = dict[str, str]
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LEFT, WIDTH, ABOVE = 0.1, 5.8, 0.27  # inches of a card of 6 with rows of images; the last for a row's name


def show_image(axes: Axes, x: float, y: float, width: float, pixels: Any, **style: Any) -> None:
    """Show pixels (H, W, 3) with the lower left corner at (x, y).

    Style: `height` (default: as wide), `edge` (the color of a frame, default none), `line` (its width).
    """
    height = style.get("height", width)
    extent = (x, x + width, y, y + height)
    axes.imshow(pixels, extent=extent, interpolation="none", zorder=3, aspect="auto")
    if edge := style.get("edge"):
        bar(axes, x, y, width, height, "none", edgecolor=edge, linewidth=style.get("line", 1.6), zorder=4)


def image_row(figure: Figure, pixels: Any, name: str, bottom: float, **style: Any) -> None:
    """Draw square images that lie side by side in pixels (H, N * H, 3), as the lessons' cells show them.

    Lengths are in inches. Style: `left`, `width` (default: all of a card of 6 inches), `color`, `note`.
    """
    tiles = torch.from_numpy(np.array(pixels)).unflatten(1, (-1, len(pixels))).permute(1, 3, 0, 2)
    left, width = style.pop("left", LEFT), style.pop("width", WIDTH)
    look = {"size": TEXT, "color": INK, **style}
    draw_row(figure, tiles, name, left, bottom, (width + GAP) / len(tiles), **look)


def image_rows(lines: Sequence[tuple[str, str, Any]], colors: Sequence[str] = ()) -> Figure:
    """Make a card with rows of images (see `image_row`), each with its name and a note above."""
    pitch = (WIDTH + GAP) / (lines[0][2].shape[1] // lines[0][2].shape[0]) + ABOVE
    figure, _ = diagram(6, LEFT + pitch * len(lines))
    for n, (name, note, pixels) in enumerate(lines):
        color = colors[n] if colors else INK
        image_row(figure, pixels, name, LEFT + pitch * (len(lines) - 1 - n), note=note, color=color)
    return figure


def bar(axes: Axes, x: float, y: float, width: float, height: float, color: Any, **look: Any) -> None:
    """Draw a filled rectangle with its lower left corner at (x, y)."""
    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, **look))


def plain(*panels: Axes, **ticks: Any) -> None:
    """Give panels the card's color, and no frame; ticks: of `tick_params`."""
    for axes in panels:
        axes.set_facecolor(CARD)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(**ticks)


def panels(
    count: int, size: tuple[float, float], stacked: bool = False, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """Make a card of a size in inches, with plots side by side or stacked."""
    figure = Figure(figsize=size, facecolor=CARD, layout="constrained")
    shape = (count, 1) if stacked else (1, count)
    return figure, list(figure.subplots(*shape, squeeze=False, **grid).flat)


def minus(text: str) -> str:
    """Return a number with a true minus."""
    return text.replace("-", "−")


def signed(value: float, digits: int = 2) -> str:
    """Return a number with its sign and a true minus; what rounds to zero is 0."""
    return minus(f"{value:+.{digits}f}") if round(value, digits) else "0"


def where(rows: Iterable[Row], **values: str) -> list[Row]:
    """Return the rows of a CSV with these values in these columns."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def by_seed(rows: Iterable[Row], x: str, y: str, scale: float = 1) -> tuple[list[int], np.ndarray]:
    """Return the places of a column, and of another all values there, times a scale: (E, seeds)."""
    points: dict[int, list[float]] = {}
    for row in rows:
        points.setdefault(int(row[x]), []).append(scale * float(row[y]))
    return list(points), np.array(list(points.values()))


def of_seeds(rows: Iterable[Row], *columns: str) -> list[np.ndarray]:
    """Return the numbers of each seed in some columns, (E, columns) each."""
    found: dict[str, list[list[float]]] = {}
    for row in rows:
        found.setdefault(row["seed"], []).append([float(row[name]) for name in columns])
    return [np.array(numbers) for numbers in found.values()]


def band(axes: Axes, x: Sequence[float], seeds: np.ndarray, color: str, **style: Any) -> None:
    """Fill from the lowest to the highest seed; seeds (E, seeds)."""
    axes.fill_between(x, seeds.min(axis=1), seeds.max(axis=1), color=color, linewidth=0, **style)


def mean_and_paths(
    axes: Axes, paths: Sequence[np.ndarray], color: str, thin: float = 0.6, alpha: float = 0.35, **line: Any
) -> np.ndarray:
    """Draw each seed's path (E, 2) thin and their mean bold; return the mean."""
    for path in paths:
        axes.plot(*path.T, color=color, linewidth=thin, alpha=alpha)
    mean = np.mean(paths, axis=0)
    axes.plot(*mean.T, color=color, **{"linewidth": 2.2, **line})
    return mean


def read_rows(name: str) -> list[Row]:
    """Return the rows of a CSV of benchmarks/."""
    with open(BENCHMARKS / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
