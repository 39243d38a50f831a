"""Figures of the paper's four experiments: rewards, the evaluator's percentages, and images.

Numbers and images are those that `python -m benchmarks.zoo.paper` measured and kept.
"""

import itertools

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from plots import BENCHMARKS, band, by_seed, plain, read_rows, show_image, where
from style import CARD, INK, MUTED, PALETTE, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE, BROWN, _ = PALETTE
REWARDS = {  # name, meaning, and what the held-out evaluator measures
    "compressibility": ("jpeg_compressibility", "minus kB as a JPEG", "animal", "correct animal, %"),
    "incompressibility": ("jpeg_incompressibility", "kB as a JPEG", "animal", "correct animal, %"),
    "alignment": ("animal_alignment", "mean reward", "all", "animal, artist, background, %"),
    "preference": ("learned reward", "mean reward", "utility", "annotator's utility"),
}
METHODS = {"DDPO": BLUE, "branching": ORANGE, "RWR": BROWN}
LINES = {"best-of-8": ("best-of-8", GREEN, "--"), "turned": ("best without training", PURPLE, ":")}


def curves() -> Figure:
    """Draw reward and evaluator over reward evaluations: the seeds' mean, and their range."""
    rows = read_rows("zoo/paper.csv")
    figure = Figure(figsize=(11, 5.5), facecolor=CARD, layout="constrained")
    grid = figure.subplots(2, len(REWARDS), sharex=True)
    for upper, lower, (reward, names) in zip(*grid, REWARDS.items(), strict=True):
        title, meaning, column, measured = names
        own = where(rows, reward=reward)
        for axes, name, scale in ((upper, "score", 1), (lower, column, 1 if column == "utility" else 100)):
            draw(axes, own, name, scale)
            plain(axes, labelsize=8, colors=INK)
        upper.set_title(title, fontsize=11, color=INK)
        upper.set_ylabel(meaning, fontsize=9, color=INK)
        lower.set_ylabel(measured, fontsize=9, color=INK)
        lower.set_xlabel("reward evaluations", fontsize=9, color=INK)
        if column != "utility":
            lower.set_ylim(0, 103)
    lines, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), fontsize=9, frameon=False)
    return figure


def draw(axes: Axes, rows: list[dict[str, str]], column: str, scale: float) -> None:
    """Draw a column of the CSV."""
    for method, color in METHODS.items():
        x, seeds = by_seed(where(rows, method=method), "queries", column, scale)
        axes.plot(x, seeds.mean(axis=1), color=color, label=method)
        band(axes, x, seeds, color, alpha=0.2)
    for method, (name, color, style) in LINES.items():
        (value,) = (scale * float(row[column]) for row in where(rows, method=method))
        axes.axhline(value, color=color, linestyle=style, linewidth=1.2, label=name)


def images() -> Figure:
    """Draw the first seed's test images before training and after each method, from the same noise."""
    ways = ("before", *METHODS)
    width, height, gap, left = 8.0, 1.0, 0.15, 2.1
    figure, axes = diagram(left + width + 0.1, len(REWARDS) * (len(ways) * height + gap))
    bottom = gap / 2
    for reward, way in reversed(list(itertools.product(REWARDS, ways))):
        shown = np.asarray(Image.open(BENCHMARKS / f"zoo/paper/{reward}_{way}.png"))
        show_image(axes, left, bottom, width, shown, height=0.97)
        title, *_ = REWARDS[reward]
        name, ink = (f"{title}\n\nbefore", MUTED) if way == "before" else (f"after {way}", INK)
        label(axes, left - 0.12, bottom + height / 2, name, size=9.5, align="right", ink=ink)
        bottom += height + (gap if way == "before" else 0)
    return figure


if __name__ == "__main__":
    main({"paper-curves": curves, "paper-pictures": images})
