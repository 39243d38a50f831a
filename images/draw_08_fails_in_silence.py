"""Diagrams of lesson 08: three runs, faults and checks, memory and hours of a GPU, and what is in float32."""

import json
from typing import Any

import numpy as np
from matplotlib import image as mpl_image
from matplotlib.figure import Figure
from plots import BENCHMARKS, LEFT, image_row, image_rows, minus, plain, read_rows, where
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main, note, title

from ddpo_lessons.lessons.run_sets import RUN_SETS

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
LESSONS = BENCHMARKS.parent / "ddpo_lessons" / "lessons"
RESULTS = BENCHMARKS / "results"  # python -m benchmarks.results.silent_faults
# `python -m benchmarks.speed.paper_run`
PAPER: dict[str, Any] = json.loads((LESSONS / "paper_run.json").read_text("utf-8"))
PARTS = {"networks": BLUE, "reward models": PURPLE, "the epoch's samples": GREEN, "activations": ORANGE}
HOPED, PUBLISHED = 0.3, 0.19  # fractions of a GPU's peak speed
RECORDS = {
    "|ρ − 1|, first step": ("first_ratio_error", ".2f"), "|ρ − 1|, last step": ("last_ratio_error", ".2f"),
    "clip fraction": ("clip_fraction", ".2f"), "gradient norm": ("grad_norm", ".3f"), "loss": ("loss", ".2f"),
}  # fmt: skip


def shown(name: str, row: int) -> np.ndarray:
    """Return a row of the images of a run: before, after, and from the saved file."""
    pixels = mpl_image.imread(RESULTS / f"silent_{name}.png")
    height = len(pixels) // 3
    return pixels[height * row : height * (row + 1)]


def question() -> Figure:
    """Draw rewards, records and images of the three runs."""
    rows = read_rows("results/silent_runs.csv")
    figure, axes = diagram(6, 5.55)
    place = {"left": 0.33, "right": 0.98, "bottom": 0.325, "top": 0.945}
    ratios = {"height_ratios": [1.9, 1.5], "hspace": 0.4, "wspace": 0.2}
    grid = figure.subplots(2, 3, gridspec_kw={**place, **ratios})
    places = [0.9 - 0.2 * number for number in range(len(RECORDS))]
    for column, (name, color) in zip(grid.T, zip("XYZ", (BLUE, GREEN, PURPLE), strict=True), strict=True):
        own = where(rows, run=name)
        epochs, rewards = ([float(row[key]) for row in own] for key in ("epoch", "reward"))
        column[0].plot(epochs, rewards, "o-", color=color)
        column[0].set(xticks=[1, 4, 7, 10], facecolor=CARD, ylim=(-0.25, 0.01), yticks=[-0.2, -0.1, 0])
        column[0].set_title(f"run {name}", fontsize=13.5)
        column[0].set_xlabel("epoch", fontsize=13)
        plain(column[0], labelsize=13, labelleft=name == "X")
        column[1].set(facecolor=CARD, xticks=[], yticks=[])
        column[1].spines[:].set_visible(False)
        for y, (key, form) in zip(places, RECORDS.values(), strict=True):
            value = abs(float(own[-1][key])) if key != "loss" else float(own[-1][key]) + 0.0
            words = minus(format(value, form)) if value else "0"
            column[1].text(0.5, y, words, fontsize=13, ha="center", va="center")
    grid[0, 0].set_ylabel("reward (redness)", fontsize=13)
    grid[1, 0].set_yticks(places, RECORDS, fontsize=13)
    grid[1, 0].tick_params(length=0)
    grid[1, 0].set(ylim=(0, 1))
    for row, (text, left) in enumerate((("before", 0.85), ("after", 3.45))):
        title(axes, left, 1.6, text)
        for number, name in enumerate("XYZ"):
            image_row(figure, shown(name, row), "", 1.05 - 0.46 * number, left=left, width=2.45)
            title(axes, LEFT, 1.25 - 0.46 * number, f"run {name}")
    return figure


def answer() -> Figure:
    """Draw images that are sampled with the saved files of the three runs."""
    return image_rows([(f"run {name}, saved file", "", shown(name, 2)) for name in "XYZ"])


def matrix() -> Figure:
    """Draw which check fails for which fault; the four healthy runs, for which none does, are left out."""
    found = json.loads((RESULTS / "silent_faults.json").read_text("utf-8"))
    checks = list(dict.fromkeys(check for run in found.values() for check in run))
    used = [check for check in checks if any(run.get(check) for run in found.values())]
    faults = list(found.items())[4:]
    left, wide, high, line = 1.95, 0.38, 0.33, 0.28
    below = line * len(used) + 0.2  # the checks' names
    top = below + high * len(faults)
    figure, axes = diagram(6, top + 0.4)
    letters = {fault: f" ({letter})" for runs in RUN_SETS for letter, (fault, _) in runs.items() if fault}
    note(axes, left - 0.1, top + 0.18, "check", align="right")
    for column, check in enumerate(used):
        label(axes, left + wide * (column + 0.5), top + 0.18, str(column + 1), weight="bold")
        label(axes, 0.1, below - 0.1 - line * (column + 0.5), f"{column + 1}  {check}", size=12, align="left")
    for number, (name, run) in enumerate(faults):
        y, seen = top - high * (number + 0.5), any(run.values())
        ink = INK if seen else RED
        label(axes, left - 0.1, y, name + letters.get(name, ""), align="right", ink=ink)
        for column, check in enumerate(used):
            color = ORANGE if run.get(check) else "#e6e6de" if check in run else CARD
            axes.bar(left + wide * (column + 0.5), high * 0.82, wide * 0.92, y - high * 0.41, color=color)
        if not seen:
            label(axes, left + wide * len(used) + 0.08, y, "not seen", align="left", ink=RED)
    return figure


def card() -> Figure:
    """Draw memory by the pairs of a forward pass, and hours by GPU."""
    figure = Figure(figsize=(6, 8.2), facecolor=CARD, layout="constrained")
    memory, hours = figure.subplots(2, 1, height_ratios=[1.45, 1])
    stations = [row for row in PAPER["memory"] if row["station"].startswith("train")]
    names = [row["station"].removeprefix("train ").replace(" pairs", "") for row in stations]
    at = [0.0] * len(stations)
    for part, color in PARTS.items():
        sizes = [row.get(part, 0) / 1e9 for row in stations]
        memory.bar(range(len(names)), sizes, 0.62, at, color=color, label=part)
        at = [low + size for low, size in zip(at, sizes, strict=True)]
    for size, shift in ((10, -0.8), (16, 0.6), (24, 0.6)):  # names of two lines each do not touch
        limit = 0.85 * size - 1
        memory.axhline(limit, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        memory.text(4.55, limit + shift, f"{limit:.1f} of\n{size} GB", va="center", linespacing=1)
    for x, total in enumerate(at):
        behind = {"facecolor": CARD, "edgecolor": "none", "pad": 1}  # a dashed line does not cross the number
        memory.text(x, total + 0.7, f"{total:.1f}", ha="center", va="bottom", fontweight="bold", bbox=behind)
    memory.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names])
    memory.set(ylim=(0, 46), xlim=(-0.45, 4.45))
    memory.set_ylabel("GB (estimated)")
    memory.set_xlabel("pairs of a forward pass (dashed: usable)")
    handles, texts = memory.get_legend_handles_labels()
    memory.legend(handles[::-1], texts[::-1], frameon=False, loc="upper left")
    runs = sorted((row for row in PAPER["runs"] if row["run"] == "edit"), key=lambda row: float(row["hours"]))
    for y, row in enumerate(reversed(runs)):
        low, high = row["hours"], row["hours"] * HOPED / PUBLISHED
        hours.barh(y, high - low, 0.5, low, color=BLUE)
        hours.text(high + 1.5, y, f"{low:.0f} to {high:.0f}", va="center")
    cards = [row["card"] + ("\n(checkpointing)" if row["checkpointing"] else "") for row in reversed(runs)]
    hours.set_yticks(range(len(runs)), cards)
    hours.set(xlim=(0, 130), xticks=range(0, 121, 20))
    hours.set_xlabel("hours (estimated)")
    plain(memory, hours)
    return figure


def precision() -> Figure:
    """Draw the way of a latent through the UNet and back, with the precision of every tensor."""
    figure, axes = diagram(6, 5.75)
    title(axes, 0.1, 5.52, "What is kept in float32, and what is not")
    box(axes, 0.1, 4.15, 1.6, 0.8, "latent $x_t$\nfloat32", color=BLUE)
    box(axes, 2.8, 4.0, 3.1, 1.1, "frozen UNet\nbfloat16\nproducts: autocast", color=ORANGE)
    box(axes, 4.3, 2.5, 1.6, 1.0, "LoRA weights,\nmoments:\nfloat32", color=BLUE)
    box(axes, 2.8, 2.6, 1.3, 0.75, "noise $\\hat\\varepsilon$\nfloat32", color=BLUE)
    box(axes, 2.8, 1.35, 1.3, 0.75, "$\\mu$, $\\sigma$\nfloat32", color=BLUE)
    box(axes, 0.1, 2.3, 1.6, 0.8, "action $x_{t-1}$\nfloat32", color=BLUE)
    box(axes, 0.1, 0.95, 1.6, 0.8, "log-prob\nfloat32", color=BLUE)
    arrow(axes, (1.7, 4.55), (2.8, 4.55))
    label(axes, 2.22, 4.75, "rounded", ink=ORANGE)
    arrow(axes, (3.3, 4.0), (3.3, 3.35))
    label(axes, 3.2, 3.7, ".float()", ink=MUTED, align="right")
    arrow(axes, (5.1, 3.5), (5.1, 4.0))
    arrow(axes, (3.45, 2.6), (3.45, 2.1))
    axes.plot([2.8, 2.2, 2.2], [1.72, 1.72, 2.7], color=INK, linewidth=1.3)
    arrow(axes, (2.2, 2.7), (1.7, 2.7))
    label(axes, 2.25, 2.87, "draw", ink=MUTED)
    arrow(axes, (0.6, 2.3), (0.6, 1.75))
    arrow(axes, (0.3, 3.1), (0.3, 4.15))
    label(axes, 0.42, 3.77, "next state, and", ink=MUTED, align="left")
    label(axes, 0.42, 3.48, "replayed in training", ink=MUTED, align="left")
    label(axes, 0.1, 0.48, "VAE and text encoder round too, but their output is", align="left")
    label(axes, 0.1, 0.2, "recorded once. Training runs only the UNet again.", align="left")
    return figure


if __name__ == "__main__":
    drawn = {"08-question": question, "08-answer": answer, "08-matrix": matrix}
    main({**drawn, "08-card": card, "08-precision": precision})
