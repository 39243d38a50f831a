"""Figures of lesson 11: moments of a run, the last K steps, and diversity and distance along training."""

import itertools
from statistics import mean
from typing import Any

import numpy as np
from matplotlib import image as mpl_image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import BENCHMARKS, image_rows, minus, panels, plain, read_rows, where
from style import INK, MUTED, PALETTE, arrow, box, diagram, label, main, note

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
COLORS = {"DRaFT-10": RED, "DRaFT-3": ORANGE, "ReFL": PURPLE, "Flow-GRPO": BLUE}
MEASURES = ("reward", "judge", "second_judge", "diversity", "frechet")
READINGS = (0, 64, 128, 256, 512)  # reward evaluations; rows of reward_gradient/*.png without the first
DIGITS = (1, 2, 5, 8)  # of which images are shown
CLIMB, MOMENTS = "DRaFT-10", (0, 128, 512)  # of the cover
Row = dict[str, float]


def _points() -> dict[str, Row]:
    """Return what needs no training, by name."""
    rows = read_rows("results/reward_gradient_points.csv")
    return {row["point"]: {name: float(row[name]) for name in MEASURES} for row in rows}


def _paths(method: str) -> list[list[Row]]:
    """Return a method's readings, a list for each seed; all of them begin untrained."""
    rows = where(read_rows("results/reward_gradient.csv"), method=method)
    return [
        [_points()["untrained"]]
        + [{name: float(row[name]) for name in MEASURES} for row in rows if row["seed"] == seed]
        for seed in sorted({row["seed"] for row in rows})
    ]


def _mean(rows: list[Row]) -> Row:
    return {name: mean(row[name] for row in rows) for name in MEASURES}


def _columns(rows: list[Row], *names: str) -> list[list[float]]:
    return [[row[name] for row in rows] for name in names]


def _strip(name: str, row: int) -> Any:
    """Return images from a row of one of the experiment's files: two of each of four digits."""
    pixels = mpl_image.imread(BENCHMARKS / f"results/reward_gradient/{name}.png")
    two = [pixels[32 * row : 32 * (row + 1), 64 * digit : 64 * (digit + 1)] for digit in DIGITS]
    return np.concatenate(two, axis=1)


def _seen(method: str, queries: int) -> Any:
    """Return the images of a method's seed 0 after so many reward evaluations."""
    return _strip(method, READINGS.index(queries) - 1) if queries else _strip("points", 0)


def _number(value: float, digits: int = 2) -> str:
    return minus(f"{value:.{digits}f}")


def question() -> Figure:
    """Draw three rows of images of one run, and the measures of 150 images."""
    run, lines = _paths(CLIMB)[0], []
    for letter, queries in zip("ABC", MOMENTS, strict=True):
        found = run[READINGS.index(queries)]
        correct = f"evaluators {found['judge']:.0%} and {found['second_judge']:.0%}"
        lines.append((letter, f"reward {_number(found['reward'])}, {correct}", _seen(CLIMB, queries)))
    return image_rows(lines)


def _style(axes: Axes, below: str, beside: str) -> None:
    plain(axes, colors=INK)
    axes.set_xlabel(below, color=INK)
    axes.set_ylabel(beside, color=INK)


def _mean_path(method: str) -> list[Row]:
    return [_mean(list(rows)) for rows in zip(*_paths(method), strict=True)]


def _handwriting() -> list[Row]:
    return [row for name, row in _points().items() if name.startswith("handwriting")]


def diversity() -> Figure:
    """Draw reward against diversity: training, settings of the untrained policy, and handwriting."""
    figure, (axes,) = panels(1, (6, 4.9))
    points, written = _points(), _handwriting()
    rewards = [row["reward"] for row in written]
    axes.axhspan(min(rewards), max(rewards), color=GREEN, alpha=0.15, linewidth=0)
    axes.plot(*_columns(written, "diversity", "reward"), "*", color=GREEN, markersize=14)
    axes.text(0.1665, -0.156, "handwriting", fontsize=13, color=GREEN, ha="center")
    for method, color in COLORS.items():
        path = _mean_path(method)
        axes.plot(*_columns(path, "diversity", "reward"), "o-", color=color, lw=2.2, ms=6, label=method)
    settings = ("guidance 1.5", "guidance 2", "guidance 4"), ("best-of-2", "best-of-3", "best-of-4")
    names = {
        "guidance 1.5": (-32, -26, "right"),
        "guidance 2": (7, 6, "left"),
        "guidance 4": (4, -17, "right"),
        "best-of-4": (9, -4, "left"),
        "best-of-3": (9, -4, "left"),
        "best-of-2": (9, -4, "left"),
        "untrained": (10, -4, "left"),
    }
    for group in settings:
        found = [points[name] for name in ("untrained", *group)]
        axes.plot(*_columns(found, "diversity", "reward"), "s:", color=MUTED, ms=6, lw=1.3)
    for name, (x, y, side) in names.items():
        place = (points[name]["diversity"], points[name]["reward"])
        look = {"textcoords": "offset points", "fontsize": 13, "color": MUTED, "ha": side}
        line = {"arrowstyle": "-", "color": MUTED} if name == "guidance 1.5" else None  # it is not beside it
        axes.annotate(name, place, (x, y), arrowprops=line, **look)
    axes.set_xlim(left=0.056)
    axes.set_yticks([-0.4, -0.3, -0.2, -0.1])
    axes.legend(fontsize=13, frameon=False, loc="lower left")
    _style(axes, "diversity: difference between images of a prompt", "reward")
    return figure


def distance() -> Figure:
    """Draw the Fréchet distance to handwriting along training."""
    figure, (axes,) = panels(1, (6, 4.7))
    goal, rings = _mean(_handwriting()), dict[str, tuple[float, float]]()
    axes.axhline(goal["frechet"], color=GREEN, linewidth=1.6)
    axes.text(5.38, goal["frechet"] - 0.1, "handwriting of the test split", color=GREEN, ha="right", va="top")
    for method, color in COLORS.items():
        path, marker = _mean_path(method), "s" if method == "ReFL" else "o"
        axes.plot([row["frechet"] for row in path], marker, ls="-", color=color, lw=2.2, ms=6)
        for n, (before, after) in enumerate(itertools.pairwise(path)):
            if before["reward"] < goal["reward"] <= after["reward"]:  # a ring where it passes handwriting's
                part = (goal["reward"] - before["reward"]) / (after["reward"] - before["reward"])
                y = before["frechet"] + part * (after["frechet"] - before["frechet"])
                axes.plot(n + part, y, "o", mfc="none", mec=color, ms=14, mew=1.8)
                rings[method] = (n + part, y)
        shift = {"ReFL": 0.35, "DRaFT-3": -0.4}.get(method, 0)
        axes.text(4.12, path[-1]["frechet"] + shift, method, fontsize=13, color=color, va="center")
    text, line = (
        "ring: the reward of\nhandwriting is reached",
        {"arrowstyle": "-", "color": INK, "shrinkB": 9},
    )
    look = {"fontsize": 13, "color": INK, "va": "center", "arrowprops": line}
    axes.annotate(text, rings["DRaFT-10"], (0.05, 1.9), **look)
    axes.set(xticks=range(len(READINGS)), xticklabels=READINGS, xlim=(0, 5.4), ylim=(0, None))
    axes.spines["bottom"].set_bounds(0, 4)
    _style(axes, "reward evaluations", "Fréchet distance to handwriting")
    return figure


def rows() -> Figure:
    """Draw images and two measures of the trained policies, and of what needs no training."""
    points, names = _points(), list(_points())
    lines = [("untrained", INK, _strip("points", 0), points["untrained"])]
    for name in ("guidance 1.5", "best-of-4"):
        lines.append((name, INK, _strip("points", names.index(name)), points[name]))
    for method, color in COLORS.items():
        last = _mean([path[-1] for path in _paths(method)])
        lines.append((method, color, _seen(method, READINGS[-1]), last))
    written = _strip("points", names.index("handwriting 0"))
    lines.append(("handwriting", GREEN, written, _mean(_handwriting())))
    texts = [
        f"reward {_number(found['reward'])}, Fréchet distance {_number(found['frechet'], 1)}"
        for *_, found in lines
    ]
    return image_rows(
        [(name, text, pixels) for (name, _, pixels, _), text in zip(lines, texts, strict=True)],
        [ink for _, ink, *_ in lines],
    )


def through() -> Figure:
    """Draw the rollout that is recorded, and the last steps that are taken again with a gradient."""
    figure, axes = diagram(6, 3.75)
    upper = ("$x_{10}$", "…", "$x_3$", "$x_2$", "$x_1$", "$x_0$")
    places = [0.1 + 0.76 * n for n in range(len(upper))]
    note(axes, 0.1, 3.52, "recorded: all ten steps, without a gradient")
    for n, (x, name) in enumerate(zip(places, upper, strict=True)):
        box(axes, x, 2.78, 0.55, 0.48, name, edge=MUTED, ink=MUTED, size=14)
        if n:
            arrow(axes, (x - 0.21, 3.02), (x, 3.02), ink=MUTED)
    arrow(axes, (places[3] + 0.27, 2.78), (places[3] + 0.27, 1.93), ink=INK)
    label(axes, places[3] + 0.37, 2.35, "a constant", align="left", ink=INK)
    lower = ["$x_2$", "$x_1$", "$x_0$", "image", "$r$"]
    ends = [places[3], places[4], places[5], places[5] + 0.76, places[5] + 1.65]
    widths = [0.55, 0.55, 0.55, 0.68, 0.4]
    for n, (x, name, width) in enumerate(zip(ends, lower, widths, strict=True)):
        color = BLUE if n else MUTED
        box(axes, x, 1.45, width, 0.48, name, edge=color, ink=color, size=13 if name == "image" else 14)
        if n:
            arrow(axes, (ends[n - 1] + widths[n - 1], 1.77), (x, 1.77), ink=BLUE)
            arrow(axes, (x, 1.58), (ends[n - 1] + widths[n - 1], 1.58), ink=ORANGE)
    axes.plot([places[3] + 0.58] * 2, [1.0, 1.4], color=ORANGE, linewidth=2.2)
    label(axes, places[3] + 0.58, 0.83, "the gradient ends here", ink=ORANGE)
    label(axes, 0.1, 0.48, "blue: the last K = 2 steps again, with a gradient", align="left", ink=BLUE)
    label(axes, 0.1, 0.2, "orange: backward pass", align="left", ink=ORANGE)
    return figure


if __name__ == "__main__":
    figures = {"11-question": question, "11-through": through, "11-diversity": diversity}
    main({**figures, "11-distance": distance, "11-rows": rows})
