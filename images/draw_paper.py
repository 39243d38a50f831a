"""Figures of the paper's four experiments: rewards, the evaluator's percentages, and images.

Numbers and images are those that `python -m benchmarks.zoo.paper` measured and kept.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from plots import BENCHMARKS, LEFT, band, by_seed, image_row, plain, read_rows, where
from style import CARD, INK, PALETTE, diagram, main, title

BLUE, ORANGE, GREEN, PURPLE, *_ = PALETTE
REWARDS = {  # name, meaning, and what the held-out evaluator measures
    "compressibility": ("jpeg_compressibility", "minus kB as a JPEG", "animal", "correct animal, %"),
    "incompressibility": ("jpeg_incompressibility", "kB as a JPEG", "animal", "correct animal, %"),
    "alignment": ("animal_alignment", "mean reward", "all", "animal, artist,\nbackground, %"),
    "preference": ("learned reward", "mean reward", "utility", "annotator's utility"),
}
METHODS = {"DDPO": BLUE, "branching": ORANGE, "RWR": GREEN}
LINES = {  # the dots are in the gaps of the dashes, because two lines nearly coincide in the first panel
    "best-of-8": ("best-of-8", INK, (0, (3.4, 2.6))),
    "turned": ("best without training", PURPLE, (1.95, (1.3, 4.7))),
}
SHOWN = 4  # of the eight test images


def curves() -> Figure:
    """Draw reward and evaluator over reward evaluations: the seeds' mean, and their range."""
    rows = read_rows("zoo/paper.csv")
    figure = Figure(figsize=(6, 10.5), facecolor=CARD, layout="constrained")
    grid = figure.subplots(len(REWARDS), 2, sharex=True)
    for (left, right), (reward, names) in zip(grid, REWARDS.items(), strict=True):
        name, meaning, column, measured = names
        own = where(rows, reward=reward)
        for axes, source, scale in ((left, "score", 1), (right, column, 1 if column == "utility" else 100)):
            draw(axes, own, source, scale)
            plain(axes, colors=INK)
        left.set_title(f"{name}\n{meaning}", color=INK)
        right.set_title(measured, color=INK)
        if column != "utility":
            right.set_ylim(0, 33 if column == "all" else 103)
    for axes in grid[-1]:
        axes.set_xlabel("reward evaluations", color=INK)
    lines, names = grid[0, 0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw(axes: Axes, rows: list[dict[str, str]], column: str, scale: float) -> None:
    """Draw a column of the CSV."""
    for method, color in METHODS.items():
        x, seeds = by_seed(where(rows, method=method), "queries", column, scale)
        axes.plot(x, seeds.mean(axis=1), color=color, label=method)
        band(axes, x, seeds, color, alpha=0.2)
    for method, (name, color, style) in LINES.items():
        (value,) = (scale * float(row[column]) for row in where(rows, method=method))
        axes.axhline(value, color=color, linestyle=style, linewidth=1.6, label=name)


def images() -> Figure:
    """Draw the first seed's test images before training and after each method, from the same noise."""
    ways = ("before", *METHODS)
    wide, pitch, head = 2.8, 0.98, 0.36
    block = head + pitch * len(ways)  # the rows of a reward; there are two rewards side by side
    figure, axes = diagram(6, 2 * block + LEFT)
    for number, reward in enumerate(REWARDS):
        left, top = LEFT + (number % 2) * (wide + 0.2), LEFT + (2 - number // 2) * block
        title(axes, left, top - 0.2, REWARDS[reward][0], ink=PURPLE)
        for n, way in enumerate(ways):
            shown = np.asarray(Image.open(BENCHMARKS / f"zoo/paper/{reward}_{way}.png"))
            name = "before" if way == "before" else f"after {way}"
            bottom = top - head - pitch * (n + 1)
            image_row(figure, shown[:, : SHOWN * len(shown)], name, bottom, left=left, width=wide)
    return figure


if __name__ == "__main__":
    main({"paper-curves": curves, "paper-pictures": images})
