"""Figure of lesson 13: what its small run restores. The numbers are of `benchmarks.results.full_run`."""

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from plots import BENCHMARKS, image_row, plain, read_rows, where
from style import CARD, MUTED, PALETTE, diagram, main, title

ROWS = ("clean", "in fog", "untrained", "trained")  # of the image
SIDE = 64  # of its tiles, in pixels
BEHIND = {"facecolor": CARD, "edgecolor": "none", "pad": 1, "alpha": 0.8}  # of labels on lines
WITHOUT = (
    ("contrast stretch", "stretched"),
    ("best-of-4, untrained", "untrained, best-of-4"),
    ("in fog", "damaged"),
)


def restored() -> Figure:
    """Draw held-out images, and the fraction that the evaluator recognizes over the epochs of each seed."""
    rows = where(read_rows("results/full_run.csv"), learning_rate="0.002", penalty="40.0")  # the lesson's
    figure, axes = diagram(6, 5.1)
    pixels = np.asarray(Image.open(BENCHMARKS / "results" / "full_run.png"))
    for n, name in enumerate(ROWS):
        bottom = 4.42 - 0.63 * n
        title(axes, 0.1, bottom + 0.3, name)
        image_row(figure, pixels[SIDE * n : SIDE * (n + 1)], "", bottom, left=1.22, width=4.68)
    lower = figure.add_axes((0.09, 0.11, 0.89, 0.25))
    curves = []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        points = [row for row in where(rows, seed=seed) if row["what"].startswith("epoch ")]
        epochs = [int(row["what"].removeprefix("epoch ")) for row in points]
        curves.append([100 * float(row["second_judge"]) for row in points])
        lower.plot(epochs, curves[-1], color=PALETTE[0], linewidth=0.9, alpha=0.5)
    lower.plot(epochs, np.mean(curves, axis=0), "o-", color=PALETTE[0], linewidth=2.4)
    for name, what in WITHOUT:
        level = np.mean([100 * float(row["second_judge"]) for row in where(rows, what=what)])
        lower.axhline(level, color=MUTED, linestyle="--", linewidth=1.2)
        lower.text(
            epochs[-1], level + 1, name, ha="right", va="bottom", color=MUTED, fontsize=13, bbox=BEHIND
        )
    lower.set_title("images that the evaluator recognizes (%),\nfor five seeds (thin) and on average")
    lower.set_xticks(epochs)
    lower.set_xlabel("epoch")
    lower.set_ylim(0, None)
    plain(lower)
    return figure


if __name__ == "__main__":
    main({"13-restored": restored})
