"""Diagrams of lesson 06: the loop in seven stages, four methods at equal queries, three further questions."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE, BROWN, _ = PALETTE
RESULTS = Path(__file__).parents[1] / "benchmarks/results/algorithms.csv"
METHODS = {"RWR": BROWN, "sparse RWR": ORANGE, "DDPO-SF": PURPLE, "DDPO-IS": BLUE}
KL = ("0", "0.1", "1", "10")
STATISTICS = {"global": ORANGE, "per prompt": BLUE}
TITLES = {"compressibility": "compressibility (minus kB)", "alignment": "alignment, prompts ask for fog"}


def loop() -> Figure:
    """Draw one epoch: what flows from stage to stage, and what goes back."""
    figure, axes = diagram(10, 4.5)
    label(axes, 0.25, 4.22, "One epoch of DDPO", size=12.5, weight="bold", align="left")
    top = (
        ("Stage 1\nask for prompts", BLUE, "prompts, metadata"),
        ("Stage 2\nsample pictures", BLUE, "images, trajectory\n(B, T+1, 4, 8, 8)"),
        ("Stage 3\nscore", GREEN, "rewards (B,)"),
        ("Stage 4\nadvantages", GREEN, "advantages (B,)"),
    )
    xs = (0.25, 2.75, 5.25, 7.75)
    for x, (text, color, what) in zip(xs, top, strict=True):
        box(axes, x, 2.95, 1.9, 0.85, text, color=color, size=10.5)
        label(axes, x + 0.95, 2.62, what, ink=MUTED, size=9)
    for x in xs[:-1]:
        arrow(axes, (x + 1.9, 3.38), (x + 2.5, 3.38))
    bottom = (
        (7.75, "Stage 5\nshuffle the pairs", ORANGE, "pairs (sample, step)"),
        (4.3, "Stage 6\nreplay, clipped loss, step", ORANGE, "once for each minibatch of pairs"),
        (0.25, "Stage 7\nreport", PURPLE, "reward, ratio, clip fraction"),
    )
    widths = (1.9, 2.6, 1.9)
    for (x, text, color, what), width in zip(bottom, widths, strict=True):
        box(axes, x, 0.75, width, 0.85, text, color=color, size=10.5)
        label(axes, x + width / 2, 0.5, what, ink=MUTED, size=9)
    arrow(axes, (8.7, 2.4), (8.7, 1.62))
    arrow(axes, (7.75, 1.18), (6.9, 1.18))
    arrow(axes, (4.3, 1.18), (2.15, 1.18))
    arrow(axes, (1.2, 1.62), (1.2, 2.4))
    label(axes, 1.35, 2.0, "next epoch", ink=MUTED, size=9, align="left")
    arrow(axes, (4.7, 1.62), (3.7, 2.28), ink=ORANGE)
    label(axes, 4.45, 2.0, "new weights sample the next epoch", ink=ORANGE, size=9, align="left")
    label(
        axes,
        0.25,
        0.16,
        "Queries are counted in stage 3: one for each picture.",
        ink=INK,
        size=9.5,
        align="left",
    )
    return figure


def algorithms() -> Figure:
    """Draw the reward over the queries: mean of the seeds, band from the lowest to the highest seed."""
    rows = rows_of("methods")
    figure = Figure(figsize=(9, 3.6), facecolor=CARD, layout="constrained")
    for axes, reward in zip(figure.subplots(1, 2), TITLES, strict=True):
        _bands(axes, [row for row in rows if row["reward"] == reward], METHODS)
        axes.set_title(TITLES[reward], fontsize=10.5, color=INK)
        if reward == "compressibility":
            axes.legend(fontsize=9, frameon=False)
    seeds = len({row["seed"] for row in rows})
    figure.suptitle(f"Equal queries, {seeds} seeds: mean, and lowest to highest seed", fontsize=11, color=INK)
    return figure


def further() -> Figure:
    """Draw the sweep of the KL's price, the two kinds of statistics, and guidance in training and test."""
    figure = Figure(figsize=(10.5, 3.8), facecolor=CARD, layout="constrained")
    grid = figure.add_gridspec(3, 3, width_ratios=(1, 1.25, 1))
    _kl_sweep([figure.add_subplot(grid[number, 0]) for number in range(3)])
    axes = figure.add_subplot(grid[:, 1])
    _bands(axes, rows_of("statistics"), STATISTICS)
    axes.set_title("B  colourfulness, half of the prompts grey, 3 seeds", fontsize=10, color=INK)
    axes.set_ylabel("reward", fontsize=9.5, color=INK)
    axes.legend(fontsize=9, frameon=False)
    _guidance(figure.add_subplot(grid[:, 2]))
    return figure


def rows_of(experiment: str) -> list[dict[str, str]]:
    """Return the rows of one experiment that `python -m benchmarks.results.algorithms` has measured."""
    with open(RESULTS, newline="") as file:
        return [row for row in csv.DictReader(file) if row["experiment"] == experiment]


def _bands(axes: Axes, rows: list[dict[str, str]], colors: dict[str, str]) -> None:
    """Draw each variant's reward over the queries."""
    for name, color in colors.items():
        points: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            if row["variant"] == name:
                points[int(row["queries"])].append(float(row["reward_mean"]))
        queries = sorted(points)
        mean = [sum(points[q]) / len(points[q]) for q in queries]
        style = "--" if name == "sparse RWR" else "-"  # it lies on RWR's line
        axes.plot(queries, mean, style, color=color, label=name, linewidth=1.8)
        low, high = ([pick(points[q]) for q in queries] for pick in (min, max))
        axes.fill_between(queries, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xlabel("queries", fontsize=9.5, color=INK)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.set_facecolor(CARD)
    axes.tick_params(labelsize=9, colors=INK)


def _kl_sweep(three: list[Axes]) -> None:
    """Draw reward, judge and distance of the test pictures over the coefficient."""
    ends = {row["variant"]: row for row in rows_of("kl") if row["test_reward"]}
    whats = (
        ("test_reward", "reward", BLUE),
        ("test_judge", "judge", GREEN),
        ("distance", "distance", ORANGE),
    )
    for axes, (column, name, color) in zip(three, whats, strict=True):
        axes.plot(KL, [float(ends[variant][column]) for variant in KL], "o-", color=color, markersize=4)
        axes.set_ylabel(name, fontsize=9.5, color=INK)
        axes.margins(y=0.25)
        _plain(axes)
        axes.tick_params(labelbottom=axes is three[-1])
    three[0].set_title("A  compressibility, 1 seed", fontsize=10, color=INK)
    three[-1].set_xlabel("KL coefficient β", fontsize=9.5, color=INK)


def _guidance(axes: Axes) -> None:
    """Write reward and judge of every pair of scales into a square each."""
    ends = {row["variant"]: row for row in rows_of("guidance") if row["test_reward"]}
    scales = ("1", "3")
    for y, trained in enumerate(scales):
        for x, tested in enumerate(scales):
            name = f"trained at {trained}" + ("" if trained == tested else f", tested at {tested}")
            reward, judge = (float(ends[name][column]) for column in ("test_reward", "test_judge"))
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=BLUE, alpha=0.15 + 0.4 * judge, edgecolor=CARD))
            text = f"reward {reward:.2f}\njudge {judge:.0%}".replace("-", "−")
            label(axes, x + 0.5, y + 0.5, text, size=9.5)
    axes.set(xlim=(0, 2), ylim=(2, 0), aspect="equal")
    axes.set_xticks([0.5, 1.5], scales)
    axes.set_yticks([0.5, 1.5], scales)
    axes.set_xlabel("tested at guidance", fontsize=9.5, color=INK)
    axes.set_ylabel("trained at guidance", fontsize=9.5, color=INK)
    axes.set_title("C  alignment, fog asked for, 1 seed", fontsize=10, color=INK)
    _plain(axes)


if __name__ == "__main__":
    main({"06-loop": loop, "06-algorithms": algorithms, "06-further": further})
