"""Figures of lesson 11: moments of a climb, the last K steps, reward against diversity along training."""

import itertools
from statistics import mean
from typing import Any

from matplotlib import image as mpl_image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import BENCHMARKS, minus, picture, plain, read_rows, where
from style import INK, MUTED, PALETTE, arrow, box, diagram, label, main, note

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
COLORS = {"DRaFT-10": RED, "DRaFT-3": ORANGE, "ReFL": PURPLE, "Flow-GRPO": BLUE}
MEASURES = ("reward", "judge", "second_judge", "diversity", "frechet")
READINGS = (0, 64, 128, 256, 512)  # queries; rows of slope/*.png without the first
CLIMB, MOMENTS = "DRaFT-10", (0, 128, 512)  # of the cover
Row = dict[str, float]


def _points() -> dict[str, Row]:
    """Return what needs no training, by name."""
    rows = read_rows("results/slope_points.csv")
    return {row["point"]: {name: float(row[name]) for name in MEASURES} for row in rows}


def _paths(method: str) -> list[list[Row]]:
    """Return a method's readings, a list for each seed; all of them begin untrained."""
    rows = where(read_rows("results/slope.csv"), method=method)
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
    """Return a row of one of the experiment's pictures."""
    pixels = mpl_image.imread(BENCHMARKS / f"results/slope/{name}.png")
    return pixels[32 * row : 32 * (row + 1)]


def _seen(method: str, queries: int) -> Any:
    """Return what seed 0 of a method drew after so many queries."""
    return _strip(method, READINGS.index(queries) - 1) if queries else _strip("points", 0)


def _number(value: float, digits: int = 2) -> str:
    return minus(f"{value:.{digits}f}")


def question() -> Figure:
    """Draw three rows of pictures of one run, and what is said of 150 pictures."""
    figure, axes = diagram(10, 2.75)
    for x, text, ink in ((7.75, "reward", BLUE), (8.55, "judge", GREEN), (9.4, "second judge", GREEN)):
        label(axes, x, 2.52, text, ink=ink, size=9.5)
    run = _paths(CLIMB)[0]
    for row, (letter, queries) in enumerate(zip("ABC", MOMENTS, strict=True)):
        y, found, pixels = 1.77 - 0.64 * row, run[READINGS.index(queries)], _seen(CLIMB, queries)
        label(axes, 0.3, y + 0.28, letter, size=13, weight="bold")
        for place, digit in enumerate((1, 2, 4, 5, 7, 8)):
            two = pixels[:, 64 * digit : 64 * (digit + 1)]
            picture(axes, 0.6 + 1.12 * place, y, 1.12, two, height=0.56)
        label(axes, 7.75, y + 0.28, _number(found["reward"]), ink=BLUE, size=12)
        label(axes, 8.55, y + 0.28, f"{found['judge']:.0%}", ink=GREEN, size=12)
        label(axes, 9.4, y + 0.28, f"{found['second_judge']:.0%}", ink=GREEN, size=12)
    what = "Two pictures of each prompt, in every row from the same noise; the numbers are of 150 pictures."
    note(axes, 0.3, 0.22, what)
    return figure


def _style(axes: Axes, title: str, below: str) -> None:
    plain(axes, labelsize=9, colors=INK)
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    axes.set_xlabel(below, fontsize=9.5, color=INK)


def plane() -> Figure:
    """Draw reward against diversity, the distance to handwriting along training, and final pictures."""
    figure, axes = diagram(10, 8.1)
    points = _points()
    written = [row for name, row in points.items() if name.startswith("handwriting")]
    goal = _mean(written)
    left, right = figure.add_axes((0.075, 0.5, 0.42, 0.44)), figure.add_axes((0.57, 0.5, 0.4, 0.44))
    rewards = [row["reward"] for row in written]
    left.axhspan(min(rewards), max(rewards), color=GREEN, alpha=0.15, linewidth=0)
    left.plot(*_columns(written, "diversity", "reward"), "*", color=GREEN, markersize=11)
    right.axhline(goal["frechet"], color=GREEN, linewidth=1.2)
    right.text(0.03, goal["frechet"] + 0.08, "handwriting of the test split", fontsize=8.5, color=GREEN)
    settings = ("guidance 1.5", "guidance 2", "guidance 4"), ("best of 2", "best of 3", "best of 4")
    sides = (((-6, -11), "right"), ((8, -3), "left"))  # off the paths
    for names, (place, side) in zip(settings, sides, strict=True):
        found = [points[name] for name in ("untrained", *names)]
        left.plot(*_columns(found, "diversity", "reward"), "s:", color=MUTED, ms=4)
        for name, row in zip(names, found[1:], strict=True):
            text = name if name == names[-1] else name.split()[-1]
            left.annotate(text, (row["diversity"], row["reward"]), place, fontsize=8, color=MUTED, ha=side,
                          textcoords="offset points")  # fmt: skip
    for name in ("guidance 1.5", "best of 2", "best of 4"):
        right.axhline(points[name]["frechet"], color=MUTED, linewidth=0.9, linestyle=":")
        right.text(0.03, points[name]["frechet"] + 0.06, name, fontsize=8, color=MUTED)
    for method, color in COLORS.items():
        seeds = _paths(method)
        middle = [_mean(list(rows)) for rows in zip(*seeds, strict=True)]
        for rows in (*seeds, middle):
            style = {"lw": 2.2, "marker": "o", "ms": 4} if rows is middle else {"lw": 0.6}
            left.plot(*_columns(rows, "diversity", "reward"), color=color, **style)
            right.plot([row["frechet"] for row in rows], color=color, **style)
        for n, (before, after) in enumerate(itertools.pairwise(middle)):
            if before["reward"] < goal["reward"] <= after["reward"]:  # a ring where it passes handwriting's
                part = (goal["reward"] - before["reward"]) / (after["reward"] - before["reward"])
                y = before["frechet"] + part * (after["frechet"] - before["frechet"])
                right.plot(n + part, y, "o", mfc="none", mec=color, ms=11, mew=1.6)
        above = {"ReFL": 0.12, "DRaFT-3": -0.25}.get(method, 0)
        right.text(4.06, middle[-1]["frechet"] + above, method, fontsize=8.5, color=color, va="center")
    _style(left, "reward", "diversity: how far pictures of a prompt are apart")
    _style(right, "Fréchet distance to handwriting", "queries")
    right.set(xticks=range(len(READINGS)), xticklabels=READINGS, xlim=(0, 4.6), ylim=(0, None))
    right.spines["bottom"].set_bounds(0, 4)
    _table(axes, points, goal)
    return figure


def _table(axes: Axes, points: dict[str, Row], written: Row) -> None:
    """Draw pictures and numbers where the paths end, and of points."""
    names = list(points)
    rows = [("untrained", INK, _strip("points", 0), points["untrained"])]
    for method, color in COLORS.items():
        last = _mean([path[-1] for path in _paths(method)])
        rows.append((method, color, _seen(method, READINGS[-1]), last))
    for name in ("best of 4", "guidance 4"):
        rows.append((name, INK, _strip("points", names.index(name)), points[name]))
    rows.append(("handwriting", GREEN, _strip("points", names.index("handwriting 0")), written))
    places = (7.55, 8.2, 8.72, 9.24, 9.76)
    for x, text in zip(places, ("reward", "judge", "second", "divers.", "Fréchet"), strict=True):
        note(axes, x, 3.45, text, 8.5, "center")
    for number, (name, ink, pixels, found) in enumerate(rows):
        y = 2.98 - 0.385 * number
        label(axes, 1.05, y + 0.16, name, ink=ink, size=9.5, align="right")
        picture(axes, 1.15, y, 6.0, pixels, height=0.3)
        cells = (_number(found["reward"]), f"{found['judge']:.0%}", f"{found['second_judge']:.0%}",
                 _number(found["diversity"], 3), _number(found["frechet"], 1))  # fmt: skip
        for x, text in zip(places, cells, strict=True):
            label(axes, x, y + 0.16, text, ink=ink, size=9.5)


def through() -> Figure:
    """Draw the rollout that is recorded, and the last steps that are taken again with a gradient."""
    figure, axes = diagram(9.4, 3.3)
    upper = ("$x_{10}$", "…", "$x_3$", "$x_2$", "$x_1$", "$x_0$")
    places = [0.4 + 1.0 * n for n in range(len(upper))]
    label(axes, 0.4, 3.0, "sampled and recorded: all ten steps, no gradient", align="left", ink=MUTED)
    for n, (x, name) in enumerate(zip(places, upper, strict=True)):
        box(axes, x, 2.2, 0.65, 0.5, name, edge=MUTED, ink=MUTED, size=12)
        if n:
            arrow(axes, (x - 0.36, 2.45), (x, 2.45), ink=MUTED)
    arrow(axes, (places[3] + 0.32, 2.2), (places[3] + 0.32, 1.45), ink=INK)
    label(axes, places[3] + 0.2, 1.83, "a constant", align="right", ink=INK, size=9)
    lower = ["$x_2$", "$x_1$", "$x_0$", "picture", "$r$"]
    ends = [places[3], places[4], places[5], places[5] + 1.05, places[5] + 2.55]
    widths = [0.65, 0.65, 0.65, 1.0, 0.65]
    for n, (x, name, width) in enumerate(zip(ends, lower, widths, strict=True)):
        box(axes, x, 0.95, width, 0.5, name, edge=BLUE if n else MUTED, ink=BLUE if n else MUTED, size=12)
        if n:
            arrow(axes, (ends[n - 1] + widths[n - 1], 1.28), (x, 1.28), ink=BLUE)
            arrow(axes, (x, 1.08), (ends[n - 1] + widths[n - 1], 1.08), ink=ORANGE)
    label(axes, 0.4, 1.38, "taken again (K = 2), with a gradient", align="left", ink=BLUE, size=9.5)
    label(axes, 0.4, 1.04, "and the way back", align="left", ink=ORANGE, size=9.5)
    axes.plot([places[3] + 0.68, places[3] + 0.68], [0.45, 0.9], color=ORANGE, linewidth=2.2)
    label(axes, places[3] + 0.68, 0.28, "ends here: nothing before $x_2$ is reached", ink=ORANGE, size=9)
    return figure


if __name__ == "__main__":
    main({"11-question": question, "11-through": through, "11-plane": plane})
