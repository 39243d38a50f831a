"""Figures of lesson 11: every algorithm with equal budgets, of reward queries and of network passes.

The numbers are those of `python -m benchmarks.results.equal_terms`.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, main

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "equal_terms.csv"
UNTRAINED = RESULTS.with_name("equal_terms_untrained.csv")
TITLES = {
    "prompts": "prompts, from noise: digit and both colours right (%)",
    "edit": "edits of pictures: digit and both colours right (%)",
}
STYLES = {  # one colour for a kind of method
    "DDPO": (PALETTE[0], "-"),
    "Flow-GRPO": (PALETTE[0], "--"),
    "Flow-GRPO, CPS": (PALETTE[0], ":"),
    "Flow-GRPO, window": (PALETTE[0], "-."),
    "RWR": (PALETTE[2], "-"),
    "AWM": (PALETTE[2], "--"),
    "DiffusionNFT": (PALETTE[2], ":"),
    "online DPO": (PALETTE[2], "-."),
    "DRaFT-K": (PALETTE[1], "-"),
    "ReFL": (PALETTE[1], "--"),
}


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def curves(budget: str) -> Figure:
    """Draw what the judge finds right along a budget: the seeds' mean, lowest and highest."""
    rows = [row for row in read(RESULTS) if row["budget"] == budget]
    figure = Figure(figsize=(9, 4.4), facecolor=CARD, layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (task, title) in zip(panels, TITLES.items(), strict=True):
        for method, (color, line) in STYLES.items():
            own = [row for row in rows if (row["task"], row["method"]) == (task, method)]
            if own:
                _band(axes, own, budget, method, color, line)
        turned = max(100 * float(row["judge"]) for row in read(UNTRAINED) if row["task"] == task)
        axes.axhline(turned, color=MUTED, linewidth=1, label="best untrained setting")
        axes.set_title(title, fontsize=10.5, color=INK)
        axes.set_xlabel({"queries": "reward queries", "passes": "network passes"}[budget], color=INK)
        axes.set_facecolor(CARD)
        axes.tick_params(colors=MUTED, labelsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _band(axes: Axes, rows: list[dict[str, str]], budget: str, method: str, color: str, line: str) -> None:
    """Draw a method; runs of one point differ a little in where they stand, for epochs are whole."""
    points: dict[int, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        points[int(row["point"])].append(row)
    place = [sum(float(row[budget]) for row in at) / len(at) for at in points.values()]
    shares = [[100 * float(row["judge"]) for row in at] for at in points.values()]
    mean = [sum(at) / len(at) for at in shares]
    axes.plot(place, mean, line, color=color, label=method, linewidth=1.8)
    low, high = ([pick(at) for at in shares] for pick in (min, max))
    axes.fill_between(place, low, high, color=color, alpha=0.08, linewidth=0)


if __name__ == "__main__":
    main({"11-equal-queries": partial(curves, "queries"), "11-equal-passes": partial(curves, "passes")})
