"""Draw the judge over seconds of training, this package beside imageddpo (benchmarks/time_to_result.py)."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, main

RESULTS = Path(__file__).parents[1] / "benchmarks" / "time_to_result.csv"
Rows = list[dict[str, str]]


def read_runs() -> dict[tuple[str, str], Rows]:
    """Return the rows of every variant and seed."""
    runs: dict[tuple[str, str], Rows] = {}
    with open(RESULTS, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            runs.setdefault((row["variant"], row["seed"]), []).append(row)
    return dict(sorted(runs.items()))


def time_to_result() -> Figure:
    """Draw a line for every seed, and where the judge started and has to get."""
    runs, about = read_runs(), json.loads(RESULTS.with_suffix(".json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(9, 4), facecolor=CARD, layout="constrained")
    axes = figure.subplots()
    colors = dict(zip(dict.fromkeys(variant for variant, _ in runs), PALETTE, strict=False))
    named = set()
    for (variant, _), rows in runs.items():
        seconds, judge = ([float(row[key]) for row in rows[1:]] for key in ("seconds", "judge"))
        name = variant if variant not in named else None
        axes.plot(seconds, judge, color=colors[variant], linewidth=1.6, label=name)
        axes.plot(seconds[-1:], judge[-1:], "o", color=colors[variant], markersize=5)
        named.add(variant)
    before = float(next(iter(runs.values()))[0]["judge"])
    goal = f"+{100 * about['gain']:.0f} points"
    for height, text in ((before, "before RL"), (before + about["gain"], goal)):
        axes.axhline(height, color=INK, linestyle=":", linewidth=1.2)
        place = axes.get_yaxis_transform()  # x in widths of the panel
        axes.text(1.01, height, text, transform=place, va="center", fontsize=9, color=MUTED)
    axes.set_xscale("log")
    axes.set_xticks([3, 10, 30, 100, 300, 1000], ["3", "10", "30", "100", "300", "1,000"])
    axes.minorticks_off()
    axes.set_xlabel("seconds of training, without the judge's time", fontsize=9, color=INK)
    axes.set_ylabel("share that the judge reads", fontsize=9, color=INK)
    axes.set_facecolor(CARD)
    axes.tick_params(labelsize=8.5, colors=INK)
    figure.legend(fontsize=8.5, frameon=False, ncols=3, loc="outside lower center")
    seeds = len({seed for _, seed in runs})
    title = f"Fog: the judge over seconds of training; a line ends at +15 points or the limit; seeds: {seeds}"
    axes.set_title(title, fontsize=10.5, color=INK)
    return figure


if __name__ == "__main__":
    main({"time_to_result": time_to_result})
