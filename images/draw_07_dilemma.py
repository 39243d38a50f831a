"""Figure of lesson 07 and the README: digit kept against colours obeyed, without RL and with it."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, main

from ddpo_lessons.app.plotting import CURVE_COLORS

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
BLUE, GREEN = PALETTE[0], PALETTE[2]
GUIDANCES = dict(zip(("4.0", "7.5", "12.0", "30.0"), CURVE_COLORS, strict=True))
STEPS, ETA = "10", "1.0"  # of the curves; the grid has others
NAMED = {
    "untouched": "input, untouched",
    "program": "a program for this world",
    "supervised": "supervised on pairs",
}


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV of benchmarks/results/."""
    with open(RESULTS / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def point(shares: dict[str, Any]) -> tuple[float, float]:
    """Return the place of a verdict, in per cent."""
    return 100 * float(shares["colours"]), 100 * float(shares["digit"])


def draw_untrained(axes: Axes) -> None:
    """Draw a curve over the strength for every guidance."""
    rows = [row for row in read_rows("edit_grid.csv") if (row["steps"], row["eta"]) == (STEPS, ETA)]
    for guidance, color in GUIDANCES.items():
        own = sorted((r for r in rows if r["guidance"] == guidance), key=lambda row: float(row["strength"]))
        places = [point(row) for row in own]
        name = f"untrained, guidance {float(guidance):g}"
        axes.plot(*zip(*places, strict=True), "o-", color=color, markersize=3.5, linewidth=1, label=name)
        if color == CURVE_COLORS[0]:
            for row, place in zip(own, places, strict=True):
                text = f"{float(row['strength']):g}"
                offset = (-20, -3) if row is own[-1] else (-5, -10)  # the last two lie close together
                axes.annotate(text, place, offset, textcoords="offset points", fontsize=8, color=MUTED)


def draw_rl(axes: Axes) -> None:
    """Draw the way of every seed on validation pictures, and a star where its test pictures are."""
    for run in json.loads((RESULTS / "recolour.json").read_text())["runs"]:
        way = [point(shares) for shares in run["run"]["path"]]
        name = "RL over its epochs, three seeds" if run["seed"] == 0 else None
        axes.plot(
            *zip(*way, strict=True), ".-", color=BLUE, linewidth=1.6, markersize=4, alpha=0.8, label=name
        )
        star = "after RL, 500 test pictures" if run["seed"] == 0 else None
        axes.plot(
            *point(run["after"]),
            "*",
            color=BLUE,
            markersize=13,
            markeredgecolor=INK,
            linestyle="none",
            label=star,
        )


def draw_alternatives(axes: Axes) -> None:
    """Mark what else there is to do, on the test pictures."""
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in read_rows("edit.csv"):
        found[row["what"]].append(point(row))
    for marker, (what, name) in zip("sDP", NAMED.items(), strict=True):
        if found[what]:
            style = {"color": GREEN, "markersize": 7, "markeredgecolor": INK, "linestyle": "none"}
            axes.plot(*zip(*found[what], strict=True), marker, label=name, **style)


def dilemma() -> Figure:
    """Draw all of it, and the corner where RL ends once more, larger."""
    figure = Figure(figsize=(9.4, 5.4), facecolor=CARD, layout="constrained")
    axes, corner = figure.subplots(1, 2, width_ratios=(2.1, 1))
    draw_untrained(axes)
    for part in (axes, corner):
        draw_rl(part)
        draw_alternatives(part)
        part.set_facecolor(CARD)
        part.set_xlabel("colours obeyed (%)", color=INK)
        part.spines[["top", "right"]].set_visible(False)
        part.grid(alpha=0.25)
    axes.set(xlim=(-4, 104), ylim=(-2, 104))
    axes.set_ylabel("digit kept (%)", color=INK)
    axes.set_title("Turning the knobs moves along a curve; RL leaves it", fontsize=12, color=INK)
    axes.legend(loc="lower left", fontsize=8.5, frameon=False)
    axes.text(28, 97, f"small numbers: noise strength; {STEPS} steps, η = 1", fontsize=8.5, color=MUTED)
    corner.set(xlim=(93, 100.7), ylim=(80, 100.5))
    corner.set_title("the upper right corner, larger", fontsize=10, color=MUTED)
    return figure


if __name__ == "__main__":
    main({"07-dilemma": dilemma})
