"""Figures of lesson 07: the first state of img2img, and what benchmarks/results/img2img.py found."""

from __future__ import annotations

import csv
import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
FOLDER = Path(__file__).parents[1] / "benchmarks" / "results"
RESULTS = FOLDER / "img2img.csv"
TIMESTEPS = (999, 799, 599, 399, 199)  # five steps of tiny-sd
NUM_RUN = 2
UNUSED = "#d9d9d0"
SEEDS = ("0", "1", "2")
VARIANTS = {"tasks": 7, "rewards": 9, "baselines": 4, "strength": 5, "glasses": 4}  # of img2img.py there
TASKS = ("fog", "darkness", "fading", "camouflage", "blur", "four corruptions")
COMPARED = {  # of baselines.py there
    "untouched": (INK, ":"),
    "operation": (GREEN, "-"),
    "untrained": (BROWN, "--"),
    "supervised": (PURPLE, "-."),
}
BASELINES = {
    "groups from one noise": BLUE,
    "per image, by id": GREEN,
    "per image, id in the prompt": ORANGE,
    "global": PURPLE,
}
GLASSES = {
    "as gaussian-glasses": ORANGE,
    "less noise": BROWN,
    "new pictures": PURPLE,
    "groups from one noise": GREEN,
}
Rows = list[dict[str, str]]


# ----------------------------------------------------------------------------------------- the diagram
def start() -> Figure:
    """Draw the way of a picture to the first state, and the end of the schedule that is run from there."""
    figure, axes = diagram(9.4, 4.1)
    label(axes, 0.25, 3.82, "The picture is the first state", weight="bold", size=12.5, align="left")
    stages = (
        (0.25, 1.3, "picture\n(3, 32, 32)", BLUE),
        (2.45, 1.3, "clean latent x₀\n(4, 8, 8)", BLUE),
        (4.65, 1.8, "first state\n√ᾱ x₀ + √(1 − ᾱ) ε", ORANGE),
        (7.85, 1.3, "result\n(3, 32, 32)", GREEN),
    )
    for x, width, text, color in stages:
        box(axes, x, 2.6, width, 0.85, text, color=color, size=10.5)
    ways = (
        (1.55, 2.45, "encode,", "scale"),
        (3.75, 4.65, "add", "noise ε"),
        (6.45, 7.85, "two steps,", "decode"),
    )
    for left, right, above, below in ways:
        arrow(axes, (left, 3.03), (right, 3.03))
        label(axes, (left + right) / 2, 3.2, above, ink=MUTED, size=9)
        label(axes, (left + right) / 2, 2.85, below, ink=MUTED, size=9)
    _draw_schedule(axes, left=0.25, width=8.9, y=1.05)
    return figure


def _draw_schedule(axes: Axes, left: float, width: float, y: float) -> None:
    cell, skipped = width / len(TIMESTEPS), len(TIMESTEPS) - NUM_RUN
    for k, timestep in enumerate(TIMESTEPS):
        is_last = k == len(TIMESTEPS) - 1
        color = UNUSED if k < skipped else MUTED if is_last else ORANGE
        cut = Rectangle((left + k * cell, y), cell, 0.6, facecolor=color, edgecolor=CARD, linewidth=2)
        axes.add_patch(cut)
        ink = INK if k < skipped else "white"
        label(axes, left + (k + 0.5) * cell, y + 0.3, str(timestep), ink=ink, size=10)
    split = left + skipped * cell
    label(axes, left + cell * skipped / 2, y + 0.82, "5 steps from noise to picture", ink=MUTED, size=9.5)
    arrow(axes, (5.5, 2.6), (split + 0.1, y + 0.64), ink=ORANGE, bend=0.15)
    label(
        axes,
        left + cell * skipped / 2,
        y - 0.22,
        "not run: this much noise would hide it",
        ink=MUTED,
        size=9.5,
    )
    label(axes, split + 0.5 * cell, y - 0.22, "one action", ink=ORANGE, size=9.5)
    label(axes, split + 1.5 * cell, y - 0.22, "no noise", ink=MUTED, size=9.5)
    note = "noise_strength 0.4 of 5 steps: the last 2 are run. The last one adds no noise and is no action."
    label(axes, left, 0.3, note, size=9.5, align="left")


# ------------------------------------------------------------------------------------------- the tables
def read_rows(experiment: str) -> Rows:
    """Return the rows of an experiment, of those seeds that ran all of its variants."""
    if not RESULTS.exists():
        return []
    with open(RESULTS, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["experiment"] == experiment]
    variants = {seed: {row["variant"] for row in rows if row["seed"] == seed} for seed in SEEDS}
    return [row for row in rows if len(variants[row["seed"]]) == VARIANTS[experiment]]


def read_chosen(task: str, what: str) -> Rows:
    """Return what test pictures said of the settings that validation pictures chose."""
    with open(FOLDER / "baselines.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if (row["task"], row["what"]) == (task, what) and row["test"]]


def seeds_of(rows: Rows) -> str:
    """Return the number of seeds in words for a title."""
    count = len({row["seed"] for row in rows})
    return "one seed" if count == 1 else f"{count} seeds: mean, lowest to highest"


def by_samples(rows: Rows, variant: str, column: str) -> dict[int, list[float]]:
    """Collect the seeds' values of a column at each number of samples."""
    points: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row["variant"] == variant and not row["damage"] and row[column]:
            points[int(row["samples_seen"])].append(float(row[column]))
    return points


def at_end(rows: Rows, variant: str, column: str) -> list[float]:
    """Return the seeds' values of a column at the last reading."""
    points = by_samples(rows, variant, column)
    return points[max(points)]


# ------------------------------------------------------------------------------------------- the charts
def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _draw_band(axes: Axes, points: dict[int, list[float]], color: str, name: str = "") -> None:
    """Draw the mean of the seeds, and a band from the lowest to the highest."""
    samples = sorted(points)
    mean = [_mean(points[n]) for n in samples]
    axes.plot(samples, mean, color=color, linewidth=1.8, label=name or None)
    low, high = ([pick(points[n]) for n in samples] for pick in (min, max))
    axes.fill_between(samples, low, high, color=color, alpha=0.15, linewidth=0)


def _dress(axes: Axes, title: str, xlabel: str = "samples") -> None:
    axes.set_title(title, fontsize=10.5, color=INK)
    axes.set_xlabel(xlabel, fontsize=9, color=INK)
    axes.set_facecolor(CARD)
    axes.tick_params(labelsize=8.5, colors=INK)


def spread(heights: list[float], gap: float, top: float) -> list[float]:
    """Move heights apart until neighbours have `gap` between them and none lies above `top`."""
    order = sorted(range(len(heights)), key=lambda n: heights[n])
    placed = dict(zip(order, (heights[n] for n in order), strict=True))
    for below, above in itertools.pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    for rank, n in enumerate(reversed(order)):
        placed[n] = min(placed[n], top - rank * gap)
    return [placed[n] for n in range(len(heights))]


def _label_ends(axes: Axes, end: float, lines: dict[str, tuple[float, str]]) -> None:
    """Write name and value of each line to the right of its end; lines are {name: (value, colour)}."""
    heights = spread([value for value, _ in lines.values()], gap=0.085, top=1.0)
    for (name, (value, color)), height in zip(lines.items(), heights, strict=True):
        axes.plot([end, 1.05 * end], [value, height], color=color, linewidth=0.8)
        text = f"{name} {100 * value:.0f}"
        axes.text(1.07 * end, height, text, color=color, fontsize=8.5, va="center")


def _draw_task(axes: Axes, rows: Rows, name: str) -> None:
    """Draw RL of one task over its samples, and as level lines what does without it."""
    points = by_samples(rows, name, "judge")
    end = max(points)
    _draw_band(axes, points, BLUE)
    read = [float(row["judge"]) for row in rows if row["variant"] == name and row["damage"]]
    lines = {"RL": (_mean(read), BLUE)}
    for what, (color, style) in COMPARED.items():
        if chosen := read_chosen(name, what):
            value = _mean([float(row["test"]) for row in chosen])
            axes.plot([0, end], [value] * 2, color=color, linestyle=style, linewidth=1.3)
            lines[what] = (value, color)
    _label_ends(axes, end, lines)
    kinds = [row["setting"] for row in read_chosen(name, "operation")]
    operation = kinds[0] if len(kinds) == 1 else "the best of each kind"
    _dress(axes, f"{name}\noperation: {operation}" if kinds else name)
    axes.set(xlim=(0, 1.75 * end), ylim=(0, 1.04), xticks=[0, end / 2, end])  # labels stand on the right
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines["bottom"].set_bounds(0, end)
    axes.xaxis.label.set_x(0.5 / 1.75)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}")


def tasks() -> Figure:
    """Draw the judge over the samples of every task, beside what it reads without RL."""
    rows = read_rows("tasks")
    figure = Figure(figsize=(9.4, 6.4), facecolor=CARD, layout="constrained")
    for axes, name in zip(figure.subplots(2, 3).flat, TASKS, strict=True):
        _draw_task(axes, rows, name)
    title = f"What the judge reads of test pictures after RL ({seeds_of(rows)}) and without it, percent"
    figure.suptitle(title, fontsize=11, color=INK)
    return figure


def corruptions() -> Figure:
    """Draw the judge before and after RL for every damage and severity."""
    rows = [row for row in read_rows("tasks") if row["variant"] == "four corruptions" and row["damage"]]
    figure = Figure(figsize=(9, 2.9), facecolor=CARD, layout="constrained")
    damages = list(dict.fromkeys(row["damage"] for row in rows))
    columns = (("judge_damaged", INK, ":", "untouched"), ("judge_before", ORANGE, "-", "before RL"))
    for axes, damage in zip(figure.subplots(1, 4, sharey=True), damages, strict=True):
        for column, color, line, name in (*columns, ("judge", BLUE, "-", "after RL")):
            points: dict[int, list[float]] = defaultdict(list)
            for row in rows:
                if row["damage"] == damage:
                    points[int(row["severity"])].append(float(row[column]))
            steps = sorted(points)
            means = [_mean(points[severity]) for severity in steps]
            axes.plot(steps, means, marker="o", markersize=4, color=color, linestyle=line, label=name)
            low, high = ([pick(points[severity]) for severity in steps] for pick in (min, max))
            axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        _dress(axes, damage, "severity")
        axes.set(ylim=(0, 1.02), xticks=range(1, 6))
        if damage == damages[0]:
            axes.legend(fontsize=8.5, frameon=False, loc="lower left")
    figure.suptitle(f"One policy for four damages, {seeds_of(rows)}", fontsize=11, color=INK)
    return figure


def _draw_dots(axes: Axes, rows: Rows, names: list[str], column: str) -> None:
    """Draw a dot for every seed's end, and a bar at their mean, one line a variant."""
    for place, name in enumerate(reversed(names)):
        values = at_end(rows, name, column)
        axes.plot(values, [place] * len(values), "o", color=BLUE, markersize=5, alpha=0.7)
        axes.plot([_mean(values)] * 2, [place - 0.25, place + 0.25], color=INK, linewidth=1.8)


def rewards() -> Figure:
    """Draw what the judge reads and how far results move, for every reward."""
    rows = read_rows("rewards")
    names = list(dict.fromkeys(row["variant"] for row in rows))
    names.sort(key=lambda name: -_mean(at_end(rows, name, "judge")))
    figure = Figure(figsize=(9, 3.5), facecolor=CARD, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw_dots(left, rows, names, "judge")
    _draw_dots(right, rows, names, "distance")
    left.set_yticks(range(len(names)), reversed(names))
    left.axvline(_mean(at_end(rows, names[0], "judge_damaged")), color=INK, linestyle=":", linewidth=1.2)
    _dress(left, "judge; dotted: untouched input", "share read after 1,920 samples")
    _dress(right, "distance from the input", "mean squared change")
    figure.suptitle("Rewards on fog: a dot for each seed, a bar at their mean", fontsize=11, color=INK)
    return figure


def baselines() -> Figure:
    """Draw the four baselines on 32 pictures of fog."""
    rows = read_rows("baselines")
    figure = Figure(figsize=(9, 3.2), facecolor=CARD, layout="constrained")
    panels = (("judge", "judge, pictures never trained on"), ("judge_train", "judge, training pictures"))
    for axes, (column, title) in zip(figure.subplots(1, 2), panels, strict=True):
        for name, color in BASELINES.items():
            _draw_band(axes, by_samples(rows, name, column), color, name)
        _dress(axes, title)
        axes.set_ylim(0, 1)
        if column == "judge":
            axes.legend(fontsize=8.5, frameon=False, loc="lower right")
    figure.suptitle(f"Whose baseline? Fog, 32 training pictures, {seeds_of(rows)}", fontsize=11, color=INK)
    return figure


def strength() -> Figure:
    """Draw reward, judge and distance at the end of training, over the noise strength."""
    rows = read_rows("strength")
    names = sorted({row["variant"] for row in rows}, key=lambda name: int(name.split()[0]))
    steps = [int(name.split()[0]) for name in names]
    figure = Figure(figsize=(9, 2.9), facecolor=CARD, layout="constrained")
    panels = (
        ("reward_mean", "reward, last 5 epochs"),
        ("judge", "judge"),
        ("distance", "distance from input"),
    )
    for axes, (column, title) in zip(figure.subplots(1, 3), panels, strict=True):
        for place, color, name in ((max, BLUE, "after RL"), (min, ORANGE, "before RL")):
            points = [by_samples(rows, variant, column) for variant in names]
            values = [point[place(point)] for point in points]
            axes.plot(steps, [_mean(v) for v in values], "o-", markersize=4, color=color, label=name)
            axes.fill_between(
                steps,
                [min(v) for v in values],
                [max(v) for v in values],
                color=color,
                alpha=0.15,
                linewidth=0,
            )
        _dress(axes, title, "steps run, of 12")
        if column == "judge":
            axes.set_ylim(0, 1)
            axes.legend(fontsize=8.5, frameon=False)
    figure.suptitle(f"Strength sweep on fog, {seeds_of(rows)}", fontsize=11, color=INK)
    return figure


def glasses() -> Figure:
    """Draw gaussian-glasses' settings, one change at a time, and all changes together."""
    rows = read_rows("glasses")
    seeds = {row["seed"] for row in rows}
    mended = [row for row in read_rows("tasks") if row["seed"] in seeds]
    figure = Figure(figsize=(9, 3.6), facecolor=CARD, layout="constrained")
    panels = {
        "reward_mean": "reward: change of the logit",
        "judge": "judge, pictures not trained on",
        "judge_train": "judge, training pictures",
    }
    for axes, (column, title) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for name, color in GLASSES.items():
            _draw_band(axes, by_samples(rows, name, column), color, name)
        together = by_samples(mended, "camouflage", column)
        longest = max(by_samples(rows, "less noise", column))
        _draw_band(axes, {n: v for n, v in together.items() if n <= longest}, BLUE, "all three changes")
        _dress(axes, title)
        if column != "reward_mean":
            axes.set_ylim(0, 0.75)
    untouched = _mean(at_end(rows, "less noise", "judge_damaged"))
    figure.axes[1].axhline(untouched, color=INK, linestyle=":", linewidth=1.2, label="untouched input")
    figure.legend(
        *figure.axes[1].get_legend_handles_labels(),
        fontsize=8.5,
        frameon=False,
        ncols=3,
        loc="outside lower center",
    )
    figure.suptitle(f"Camouflage, {seeds_of(rows)}", fontsize=11, color=INK)
    return figure


if __name__ == "__main__":
    drawings: dict[str, Callable[[], Figure]] = {"07-start": start}
    charts = {  # what `python -m benchmarks.results.img2img` writes, run by run
        "07-tasks": (tasks, "tasks"),
        "07-corruptions": (corruptions, "tasks"),
        "07-rewards": (rewards, "rewards"),
        "07-baselines": (baselines, "baselines"),
        "07-strength": (strength, "strength"),
        "07-glasses": (glasses, "glasses"),
    }
    drawings |= {name: draw for name, (draw, experiment) in charts.items() if read_rows(experiment)}
    main(drawings)
