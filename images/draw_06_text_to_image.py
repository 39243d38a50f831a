"""Diagrams of lesson 06: the whole loop in seven stages, and four methods at equal queries."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE, BROWN, _ = PALETTE
RESULTS = Path(__file__).parents[1] / "benchmarks" / "algorithms.csv"
METHODS = {"RWR": BROWN, "sparse RWR": ORANGE, "DDPO-SF": PURPLE, "DDPO-IS": BLUE}
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
    with open(RESULTS, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["experiment"] == "methods"]
    figure = Figure(figsize=(9, 3.6), facecolor=CARD, layout="constrained")
    for axes, reward in zip(figure.subplots(1, 2), TITLES, strict=True):
        _draw_reward(axes, reward, rows)
    seeds = len({row["seed"] for row in rows})
    figure.suptitle(f"Equal queries, {seeds} seeds: mean, and lowest to highest seed", fontsize=11, color=INK)
    return figure


def is_complete() -> bool:
    """Return whether every method has three seeds on both rewards."""
    if not RESULTS.exists():
        return False
    with open(RESULTS, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["experiment"] == "methods"]
    return len({(row["variant"], row["reward"], row["seed"]) for row in rows}) >= 3 * len(METHODS) * len(
        TITLES
    )


def _draw_reward(axes: Axes, reward: str, rows: list[dict[str, str]]) -> None:
    for name, color in METHODS.items():
        points: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            if row["variant"] == name and row["reward"] == reward:
                points[int(row["queries"])].append(float(row["reward_mean"]))
        queries = sorted(points)
        mean = [sum(points[q]) / len(points[q]) for q in queries]
        axes.plot(queries, mean, color=color, label=name, linewidth=1.8)
        low, high = ([pick(points[q]) for q in queries] for pick in (min, max))
        axes.fill_between(queries, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_title(TITLES[reward], fontsize=10.5, color=INK)
    axes.set_xlabel("queries", fontsize=9.5, color=INK)
    axes.set_facecolor(CARD)
    axes.tick_params(labelsize=9, colors=INK)
    if reward == "compressibility":
        axes.legend(fontsize=9, frameon=False)


if __name__ == "__main__":
    drawings = {"06-loop": loop}
    if is_complete():  # what `python -m benchmarks.algorithms` writes, run by run
        drawings["06-algorithms"] = algorithms
    main(drawings)
