"""Diagrams of lesson 08: three runs, faults and checks, memory and hours of a GPU, and what is in float32."""

import json
import textwrap
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import BENCHMARKS, minus, panels, read_rows, where
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main, title

from ddpo_lessons.lessons.run_sets import RUN_SETS

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
LESSONS = BENCHMARKS.parent / "ddpo_lessons" / "lessons"
RESULTS = BENCHMARKS / "results"  # python -m benchmarks.results.silent_faults
# `python -m benchmarks.speed.paper_run`
PAPER: dict[str, Any] = json.loads((LESSONS / "paper_run.json").read_text("utf-8"))
PARTS = {"networks": BLUE, "reward models": PURPLE, "the epoch's samples": GREEN, "activations": ORANGE}
HOPED, PUBLISHED = 0.3, 0.19  # fractions of a GPU's peak speed
RECORDS = {
    "|ρ − 1|, first step": ("first_ratio_error", ".0e"), "|ρ − 1|, last step": ("last_ratio_error", ".0e"),
    "clip fraction": ("clip_fraction", ".2f"), "gradient norm": ("grad_norm", ".3f"), "loss": ("loss", ".2f"),
}  # fmt: skip


def strip(axes: Axes, name: str, row: int) -> None:
    """Show a row of the images of a run: before, after, and from the saved file."""
    image = plt.imread(RESULTS / f"silent_{name}.png")
    height = len(image) // 3
    axes.imshow(image[height * row : height * (row + 1)], interpolation="nearest")
    axes.set(xticks=[], yticks=[])


def question() -> Figure:
    """Draw rewards, records and images of the three runs."""
    rows = read_rows("results/silent_runs.csv")
    figure = Figure(figsize=(7.6, 5.9), facecolor=CARD, layout="constrained")
    grid = figure.subplots(4, 3, height_ratios=[2.1, 1.7, 0.5, 0.5])
    places = [0.9 - 0.2 * number for number in range(len(RECORDS))]
    for column, (name, color) in zip(grid.T, zip("XYZ", (BLUE, GREEN, PURPLE), strict=True), strict=True):
        own = where(rows, run=name)
        epochs, rewards = ([float(row[key]) for row in own] for key in ("epoch", "reward"))
        column[0].plot(epochs, rewards, "o-", color=color)
        column[0].set(xticks=[1, 4, 7, 10], facecolor=CARD, ylim=(-0.25, 0.01), yticks=[-0.2, -0.1, 0])
        column[0].set_title(f"run {name}", fontsize=14)
        column[0].set_xlabel("epoch", fontsize=12)
        column[0].tick_params(labelsize=12, labelleft=name == "X")
        column[1].set(facecolor=CARD, xticks=[], yticks=[])
        column[1].spines[:].set_visible(False)
        for y, (key, form) in zip(places, RECORDS.values(), strict=True):
            value = abs(float(own[-1][key])) if key != "loss" else float(own[-1][key]) + 0.0
            words = minus(format(value, form)) if value else "0"
            column[1].text(0.5, y, words, fontsize=12.5, ha="center", va="center")
        for row in (0, 1):
            strip(column[2 + row], name, row)
    grid[0, 0].set_ylabel("reward (redness)", fontsize=12.5)
    grid[1, 0].set_yticks(places, RECORDS, fontsize=12.5)
    grid[1, 0].tick_params(length=0)
    grid[1, 0].set(ylim=(0, 1))
    for axes, text in ((grid[2, 0], "before"), (grid[3, 0], "after")):
        axes.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=12.5)
    return figure


def answer() -> Figure:
    """Draw images that are sampled with the saved files of the three runs."""
    figure, grid = panels(3, (7.6, 0.85))
    for axes, name in zip(grid, "XYZ", strict=True):
        strip(axes, name, 2)
        axes.set_title(f"run {name}, saved file", fontsize=12.5)
    return figure


def matrix() -> Figure:
    """Draw which check fails for which fault; the four healthy runs, for which none does, are left out."""
    found = json.loads((RESULTS / "silent_faults.json").read_text("utf-8"))
    checks = list(dict.fromkeys(check for run in found.values() for check in run))
    used = [check for check in checks if any(run.get(check) for run in found.values())]
    figure, axes = diagram(7.6, 7.4)
    left, top, wide, high = 2.3, 5.0, 0.46, 0.375
    letters = {fault: f" ({letter})" for runs in RUN_SETS for letter, (fault, _) in runs.items() if fault}
    for column, check in enumerate(used):
        x = left + wide * (column + 0.5)
        look = {"rotation": 50, "fontsize": 10.5, "color": INK, "ha": "left", "va": "center"}
        axes.text(x, top + 0.12, textwrap.fill(check, 32), rotation_mode="anchor", linespacing=1.0, **look)
    for number, (name, run) in enumerate(list(found.items())[4:]):
        y, seen = top - high * (number + 0.5), any(run.values())
        label(
            axes,
            left - 0.1,
            y,
            name + letters.get(name, ""),
            size=12,
            align="right",
            ink=INK if seen else RED,
        )
        for column, check in enumerate(used):
            color = ORANGE if run.get(check) else "#e6e6de" if check in run else CARD
            axes.bar(left + wide * (column + 0.5), high * 0.82, wide * 0.92, y - high * 0.41, color=color)
        if not seen:
            label(axes, left + wide * len(used) + 0.08, y, "not seen", size=12, align="left", ink=RED)
    return figure


def card() -> Figure:
    """Draw memory by the pairs of a forward pass, and hours by GPU."""
    figure = Figure(figsize=(6.8, 7.6), facecolor=CARD, layout="constrained")
    memory, hours = figure.subplots(2, 1, height_ratios=[1.2, 1])
    stations = [row for row in PAPER["memory"] if row["station"].startswith("train")]
    names = [row["station"].removeprefix("train ").replace(" pairs", "") for row in stations]
    at = [0.0] * len(stations)
    for part, color in PARTS.items():
        sizes = [row.get(part, 0) / 1e9 for row in stations]
        memory.bar(range(len(names)), sizes, 0.62, at, color=color, label=part)
        at = [low + size for low, size in zip(at, sizes, strict=True)]
    for size in (10, 16, 24):
        limit = 0.85 * size - 1
        memory.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        memory.text(4.5, limit, f"{size} GB GPU", fontsize=11.5, va="center", backgroundcolor=CARD)
    for x, total in enumerate(at):
        memory.text(x, total + 0.4, f"{total:.1f}", ha="center", fontsize=12, fontweight="bold")
    memory.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    memory.set(ylim=(0, 46), xlim=(-0.5, 5.9), facecolor=CARD)
    memory.set_ylabel("GB (estimated)", fontsize=12.5)
    memory.set_xlabel("pairs of a forward pass; dashed: what fits", fontsize=12.5)
    handles, texts = memory.get_legend_handles_labels()
    memory.legend(handles[::-1], texts[::-1], frameon=False, fontsize=12, loc="upper left")
    runs = [row for row in PAPER["runs"] if row["run"] == "edit"]
    for y, row in enumerate(reversed(runs)):
        low, high = row["hours"], row["hours"] * HOPED / PUBLISHED
        hours.barh(y, high - low, 0.5, low, color=BLUE)
        hours.text(high + 1.5, y, f"{low:.0f} to {high:.0f} h", va="center", fontsize=12)
    hours.set_yticks(range(len(runs)), [row["card"] for row in reversed(runs)])
    hours.set(xlim=(0, 140), facecolor=CARD)
    hours.set_xlabel(
        f"hours of 100 epochs, if a GPU reaches {HOPED} to {PUBLISHED} of its peak", fontsize=12.5
    )
    for axes in (memory, hours):
        axes.tick_params(labelsize=12)
    return figure


def precision() -> Figure:
    """Draw the way of a latent through the UNet and back, with the precision of every tensor."""
    figure, axes = diagram(10, 4.1)
    title(axes, 0.25, 3.85, "What is kept in float32, and what is not", 12.5)
    box(axes, 0.25, 2.0, 1.75, 0.95, "latent $x_t$\nfloat32", color=BLUE)
    box(axes, 3.0, 1.8, 2.3, 1.35, "frozen UNet\nbfloat16\nproducts: autocast", color=ORANGE)
    box(axes, 3.0, 0.55, 2.3, 0.85, "LoRA weights,\nmoments: float32", color=BLUE)
    box(axes, 6.2, 2.0, 1.5, 0.95, "noise $\\hat\\varepsilon$\nfloat32", color=BLUE)
    box(axes, 8.15, 2.0, 1.5, 0.95, "$\\mu$, $\\sigma$\nfloat32", color=BLUE)
    box(axes, 8.15, 0.5, 1.5, 0.95, "action $x_{t-1}$\nfloat32", color=BLUE)
    box(axes, 6.2, 0.5, 1.5, 0.95, "log-prob\nfloat32", color=BLUE)
    arrow(axes, (2.0, 2.48), (3.0, 2.48))
    label(axes, 2.5, 2.7, "rounded", ink=ORANGE, size=9.5)
    arrow(axes, (5.3, 2.48), (6.2, 2.48))
    label(axes, 5.75, 2.7, ".float()", ink=MUTED, size=9.5)
    arrow(axes, (4.15, 1.4), (4.15, 1.8))
    arrow(axes, (7.7, 2.48), (8.15, 2.48))
    arrow(axes, (8.9, 2.0), (8.9, 1.45))
    arrow(axes, (8.15, 0.98), (7.7, 0.98))
    label(axes, 9.0, 1.73, "draw", ink=MUTED, size=9.5, align="left")
    arrow(axes, (1.12, 3.3), (1.12, 2.95))
    axes.plot([9.65, 9.82, 9.82, 1.12], [0.98, 0.98, 3.3, 3.3], color=INK, linewidth=1.3)
    words = "the same float32 numbers: the next state, and what training replays"
    label(axes, 5.5, 3.48, words, ink=MUTED, size=9.5)
    words = "VAE and text encoder round too, but what they give is recorded once. "
    words += "Only the UNet is run again in training."
    label(axes, 0.25, 0.18, words, size=10, align="left")
    return figure


if __name__ == "__main__":
    drawn = {"08-question": question, "08-answer": answer, "08-matrix": matrix}
    main({**drawn, "08-card": card, "08-precision": precision})
