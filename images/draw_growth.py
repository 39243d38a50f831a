"""How an epoch's time and memory grow, from speed/growth.csv: measured points, lines as expected."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from style import CARD, INK, MUTED, PALETTE, main

BLUE, ORANGE, GREEN, *_ = PALETTE
RESULTS = Path(__file__).parents[1] / "benchmarks/speed/growth.csv"  # `python -m benchmarks.speed.growth`
NAMES = {
    "samples": "samples per epoch",
    "steps": "denoising steps",
    "latent elements": "elements of a latent",
    "processes": "processes",
}
Rows = list[dict[str, str]]


def column(rows: Rows, name: str) -> list[float]:
    """Return a column's numbers."""
    return [float(row[name]) for row in rows]


def _dress(axes: Axes, x: list[float]) -> None:
    """Give a panel a logarithmic axis of x with a tick at each point."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(x))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(x[0] / 1.25, x[-1] * 1.25)
    axes.set_facecolor(CARD)
    axes.tick_params(labelsize=8.5, colors=INK)


def _draw_time(axes: Axes, rows: Rows, slope: dict[str, float]) -> None:
    """Draw seconds with the expected power through their geometric middle."""
    x, seconds = column(rows, "value"), column(rows, "seconds")
    spread = [
        [middle - low for middle, low in zip(seconds, column(rows, "low"), strict=True)],
        [high - middle for middle, high in zip(seconds, column(rows, "high"), strict=True)],
    ]
    power = slope["time_expected"]
    scale = 1.0
    for value, second in zip(x, seconds, strict=True):
        scale *= (second / value**power) ** (1 / len(x))
    axes.plot(x, [scale * value**power for value in x], color=MUTED, linewidth=1.3, label="expected slope")
    axes.errorbar(x, seconds, spread, fmt="o", color=BLUE, markersize=5, linewidth=1.3, label="measured")
    _dress(axes, x)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    title = f"slope {slope['time_measured']:.2f}, expected {power:.0f}"
    axes.set_title(title.replace("-", "−"), fontsize=9.5, color=INK)
    flops = f"slope of FLOPs {slope['time_by_flops']:.2f}".replace("-", "−")
    height = 0.05 if power > 0 else 0.9  # where there are no points
    axes.text(0.96, height, flops, transform=axes.transAxes, ha="right", fontsize=8.5, color=MUTED)


def _draw_memory(axes: Axes, rows: Rows) -> None:
    """Draw what a process takes above the loaded pipeline, what is counted, and what is stored."""
    x = column(rows, "value")
    ends = zip(column(rows, "loaded_mb"), column(rows, "peak_mb"), strict=True)
    grown = [peak - loaded for loaded, peak in ends]
    axes.plot(x, column(rows, "counted_mb"), color=MUTED, linewidth=1.3, label="counted on paper")
    axes.plot(x, column(rows, "stored_mb"), color=ORANGE, linewidth=1.6, label="of which stored samples")
    axes.plot(x, grown, "o", color=BLUE, markersize=5, label="measured")
    _dress(axes, x)


def growth() -> Figure:
    """Draw time above memory, a column for each number that is varied."""
    with open(RESULTS, newline="") as file:
        rows = list(csv.DictReader(file))
    slopes = {row["series"]: row for row in json.loads(RESULTS.with_suffix(".json").read_text())["slopes"]}
    figure = Figure(figsize=(9.4, 4.9), facecolor=CARD, layout="constrained")
    panels = figure.subplots(2, len(NAMES), sharey="row")
    for (above, below), (series, name) in zip(panels.T, NAMES.items(), strict=True):
        own = [row for row in rows if row["series"] == series]
        _draw_time(above, own, slopes[series])
        _draw_memory(below, own)
        below.set_xlabel(name, fontsize=9.5, color=INK)
    for axes, name in zip(panels[:, 0], ("seconds of an epoch", "MB above what is loaded"), strict=True):
        axes.set_ylabel(name, fontsize=9.5, color=INK)
    panels[1, 0].set_ylim(bottom=0)
    panels[0, 0].legend(fontsize=8.5, frameon=False, loc="upper left")
    panels[1, 0].legend(fontsize=8.5, frameon=False, loc="lower left", bbox_to_anchor=(0, 0.06))
    title = "How an epoch grows: tiny-sd, one thread for each process"
    figure.suptitle(title, fontsize=11, color=INK)
    return figure


if __name__ == "__main__":
    main({"growth": growth})
