"""Figures of lesson 06: foxes in training, the loop, learning curves, trade-offs, and six denoising steps.

Images and numbers are those that `python -m benchmarks.zoo.painter` measured.
"""

import itertools
import json

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from plots import (
    BENCHMARKS,
    Row,
    band,
    by_seed,
    image_row,
    image_rows,
    minus,
    of_seeds,
    panels,
    plain,
    read_rows,
    show_image,
    where,
)
from style import INK, MUTED, PALETTE, arrow, box, diagram, label, main, note

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
IMAGES = BENCHMARKS / "zoo/painter"  # a folder
COLORS = {"DDPO": BLUE, "KL 0.03": ORANGE, "KL 0.1": GREEN, "RWR": BROWN}
NAMES = {"DDPO": "DDPO", "KL 0.03": "β = 0.03", "KL 0.1": "β = 0.1", "RWR": "RWR"}
SHOWN = 8  # of ten images of a file
# Files of the first figure, and what selects their rows of the CSV.
ROWS = {
    "DDPO_00": ("before training", "DDPO", "0"),
    "DDPO_04": ("after 256 reward evaluations", "DDPO", "4"),
    "DDPO_06": ("after 384", "DDPO", "6"),
    "DDPO_10": ("after 640", "DDPO", "10"),
    "KL_0.1_10": ("after 640, with a KL penalty", "KL 0.1", "10"),
}
LEVEL = -1.9
TILE = 64  # pixels
TICKS = {"labelsize": 13, "colors": INK}
TEXT = {"fontsize": 13, "color": INK}


def read_image(name: str) -> np.ndarray:
    """Return images that a benchmark kept side by side, (H, W, 3)."""
    return np.asarray(Image.open(IMAGES / f"{name}.png"))


def measured(row: Row) -> str:
    """Return the measurements of all 48 images, of which a figure shows some."""
    return f"{abs(float(row['reward'])):.2f} kB, {100 * float(row['fox']):.0f}% foxes"


def shown(name: str) -> np.ndarray:
    """Return the first images of a file."""
    return read_image(name)[:, : SHOWN * TILE]


def question() -> Figure:
    """Draw eight foxes from the same noise, as training goes on."""
    mine, lines = where(read_rows("zoo/painter.csv"), seed="0"), []
    for name, (text, method, epoch) in ROWS.items():
        (line,) = where(mine, method=method, epoch=epoch)
        lines.append((text, measured(line), shown(name)))
    return image_rows(lines)


def loop() -> Figure:
    """Draw one epoch with three samples of a group: the states, the image, its reward, its advantage."""
    figure, axes = diagram(6, 6.45)
    epoch, pixels = json.loads((IMAGES / "loop.json").read_text()), read_image("loop")
    heads = (
        (0.1, "1 prompt", BLUE, 0.9), (1.05, "2 sample, and record", BLUE, 2.6),
        (3.7, "3 reward", GREEN, 0.97), (4.72, "4 advantage", GREEN, 1.23),
    )  # fmt: skip
    for x, text, color, width in heads:
        box(axes, x, 5.97, width, 0.4, text, color=color, size=12)
    size, xs = 0.42, [1.05 + 0.436 * n for n in range(6)]
    for row, sample in enumerate(epoch["shown"]):
        bottom = 5.47 - 0.48 * row
        label(axes, 0.55, bottom + size / 2, "“a fox”")
        for column, x in enumerate(xs):
            tile = pixels[TILE * row : TILE * (row + 1), TILE * column : TILE * (column + 1)]
            show_image(axes, x, bottom, size, tile)
        label(axes, 4.18, bottom + size / 2, minus(f"{sample['reward']:.2f}"))
        text, color = minus(f"{sample['advantage']:+.2f}"), BLUE if sample["advantage"] > 0 else RED
        label(axes, 5.33, bottom + size / 2, text, size=15, weight="bold", ink=color)
    notes = (
        (xs[0] + 0.1, "the same\nnoise"),
        ((xs[1] + xs[4] + size) / 2 + 0.05, "four actions, each\nwith its log-prob"),
        (xs[5] + size / 2 + 0.03, "final\nimage"),
        (4.3, minus(f"group mean\n{epoch['mean']:.2f}")),
        (5.4, "in standard\ndeviations"),
    )
    for x, text in notes:
        note(axes, x, 4.2, text, size=12, align="center")
    lower = (
        (2.8, "5 shuffle the pairs", "128 of 256 pairs,\n64 per optimizer step", ORANGE),
        (2.0, "6 replay, clip, update", "the same actions again:\nratios leave 1", ORANGE),
        (1.2, "7 report", "kB, foxes, ratios", PURPLE),
    )  # fmt: skip
    for y, head, text, color in lower:
        box(axes, 0.95, y, 2.4, 0.45, head, color=color)
        note(axes, 3.5, y + 0.22, text)
    axes.plot([5.4, 5.4, 2.6], [3.97, 3.48, 3.48], color=INK, linewidth=1.3)
    arrow(axes, (2.6, 3.48), (2.6, 3.25))
    arrow(axes, (2.6, 2.8), (2.6, 2.45))
    arrow(axes, (2.6, 2.0), (2.6, 1.65))
    axes.plot([0.95, 0.55, 0.55], [2.22, 2.22, 3.7], color=ORANGE, linewidth=1.3)
    arrow(axes, (0.55, 3.7), (0.55, 5.92 - 1.5), ink=ORANGE)
    label(axes, 0.65, 3.7, "the new weights sample the next epoch", size=12.5, ink=ORANGE, align="left")
    note(axes, 0.1, 0.75, "Three of a group's eight samples, before training.")
    note(axes, 0.1, 0.45, "Latents: three of four channels.")
    return figure


def kept_at(curve: np.ndarray, reward: float) -> float | None:
    """Return the fraction kept where a curve first reaches a reward, None if it never does."""
    for (before, kept_before), (there, kept) in itertools.pairwise(curve):
        if before < reward <= there:
            return kept_before + (reward - before) / (there - before) * (kept - kept_before)
    return None


def untrained(rows: list[Row], name: str) -> tuple[float, float]:
    """Return reward and percentage of foxes of a baseline without training."""
    (row,) = where(rows, method=name)
    return float(row["reward"]), 100 * float(row["fox"])


def curves() -> Figure:
    """Draw reward and foxes over reward evaluations, with two untrained baselines as lines."""
    rows = read_rows("zoo/painter.csv")
    figure, (upper, lower) = panels(2, (6, 5.8), stacked=True)
    for axes, column, scale in ((upper, "reward", 1), (lower, "fox", 100)):
        for method in ("DDPO", "RWR"):
            x, seeds = by_seed(where(rows, method=method), "queries", column, scale)
            axes.plot(x, seeds.mean(axis=1), color=COLORS[method], linewidth=2)
            band(axes, x, seeds, COLORS[method], alpha=0.15)
        for method, style in (("best-of-8", "--"), ("more words", ":")):
            value = untrained(rows, method)[column == "fox"]
            axes.axhline(value, color=PURPLE, linestyle=style, linewidth=1.5)
        axes.set_xlabel("reward evaluations", **TEXT)
        plain(axes, **TICKS)
    upper.set_title("reward (minus kB)", **TEXT)
    lower.set_title("images with a fox (%)", **TEXT)
    lower.set_ylim(0, 122)
    lower.set_yticks(range(0, 101, 25))
    lower.text(640, 105, "best-of-8 and longer prompt", color=PURPLE, fontsize=13, ha="right")
    for x, y, text, color in (
        (150, -1.4, "RWR", BROWN), (430, -1.52, "DDPO", BLUE),
    ):  # fmt: skip
        upper.text(x, y, text, color=color, fontsize=13)
    for method, text in (("more words", "longer\nprompt"), ("best-of-8", "best-of-8")):  # each at its line
        place = {"transform": upper.get_yaxis_transform(), "va": "center"}
        upper.text(1.02, untrained(rows, method)[0], text, color=PURPLE, fontsize=13, **place)
    return figure


def tradeoff() -> Figure:
    """Draw the mean trade-off curve of each method; beside it each seed's foxes at one file size."""
    rows = read_rows("zoo/painter.csv")
    figure, (plane, level) = panels(2, (6, 6), stacked=True, height_ratios=(3, 2), sharey=True)
    places = {"DDPO": (-1.5, 37), "KL 0.03": (-1.67, 70), "KL 0.1": (-2.29, 110), "RWR": (-2.03, 50)}
    for place, (method, color) in enumerate(COLORS.items()):
        found = [curve * (1, 100) for curve in of_seeds(where(rows, method=method), "reward", "fox")]
        plane.plot(*np.mean(found, axis=0).T, "o-", color=color, linewidth=2, markersize=4.5)
        plane.text(*places[method], NAMES[method], color=color, ha="center", fontsize=13)
        kept = [share for curve in found if (share := kept_at(curve, LEVEL)) is not None]
        beside = place + np.linspace(-0.12, 0.12, len(kept))  # so that each seed can be seen
        level.plot(beside, kept, "o", color=color, markersize=8, alpha=0.75)
        if not kept:
            level.text(place, 50, "not\nreached", color=color, ha="center", va="center", fontsize=13)
    look = {"ha": "center", "fontsize": 13, "color": PURPLE}
    for name, text, right in (("best-of-8", "best-of-8", 0.03), ("more words", "longer prompt", 0.13)):
        x, y = untrained(rows, name)
        plane.plot(x, y, "D", color=PURPLE, markersize=7)
        plane.text(x + right, 110, text, **look)
    plane.axvline(LEVEL, color=MUTED, linewidth=1, linestyle=":")
    plane.text(LEVEL - 0.02, 4, "1.9 kB", color=MUTED, ha="right", fontsize=13)
    plane.set(xlim=(-2.4, -1.05), ylim=(-4, 124), yticks=range(0, 101, 20))
    plane.set_xlabel("reward (minus kB)", **TEXT)
    plane.set_title("images with a fox (%), means", **TEXT)
    level.set(xlim=(-0.5, 3.5))
    level.set_xticks(range(4), NAMES.values())
    level.set_title(f"images with a fox (%) at {abs(LEVEL)} kB, each seed", **TEXT)
    plain(plane, level, **TICKS)
    return figure


def large() -> Figure:
    """Draw foxes before and after training for large files, and the size over reward evaluations."""
    rows = read_rows("zoo/painter.csv")
    mine = where(rows, method="large files", learning_rate="0.003")
    figure, _ = diagram(6, 4.75)
    moments = ("0", "before training", 3.77), ("16", "after 1,024 reward evaluations", 2.77)
    for epoch, text, bottom in moments:
        (line,) = where(mine, seed="3", epoch=epoch)
        pixels = shown(f"large_files_{int(epoch):02d}")
        image_row(figure, pixels, text, bottom, note=measured(line))
    below = figure.add_axes((0.13, 0.125, 0.59, 0.425))
    x, seeds = by_seed(mine, "queries", "reward")
    below.plot(x, seeds, color=BLUE, linewidth=1.3, alpha=0.7)
    below.text(x[-1] + 20, seeds[-1].mean(), "DDPO,\neach seed", color=BLUE, va="center", fontsize=13)
    for name, text, side, style in (
        ("best-of-8", "best-of-8", "top", "--"),
        ("more words", "longer prompt", "bottom", ":"),
    ):
        value = untrained(rows, f"{name}, large files")[0]
        below.axhline(value, color=PURPLE, linestyle=style, linewidth=1.5)
        below.text(x[-1] + 20, value, text, color=PURPLE, va=side, fontsize=13)
    below.set(xlim=(0, x[-1]), xticks=(0, 256, 512, 768, 1024))
    below.set_xlabel("reward evaluations", **TEXT)
    below.set_ylabel("size (kB)", **TEXT)
    plain(below, **TICKS)
    return figure


def six() -> Figure:
    """Draw the file size after six epochs in six denoising steps, with and without the last action.

    A line is a seed: green if its files are smaller without the last action, red if not.
    """
    rows = read_rows("zoo/painter.csv")
    figure, plots = panels(3, (6, 5.6), stacked=True, sharex=True)
    ways = {"six steps": "all six actions\ntrained", "six steps, five trained": "the last action\nleft out"}
    before = -float(where(rows, method="six steps", epoch="0")[0]["reward"])
    for axes, rate in zip(plots, ("0.001", "0.003", "0.01"), strict=True):
        ends = [where(rows, method=name, learning_rate=rate, epoch="6") for name in ways]
        paired = [sorted(way, key=lambda row: int(row["seed"])) for way in ends]
        sizes = np.array([[-float(row["reward"]) for row in way] for way in paired])  # (2, seeds)
        is_smaller = sizes[1] < sizes[0]
        for way, color in ((is_smaller, GREEN), (~is_smaller, RED)):
            axes.plot(sizes[:, way], [0, 1], "o-", color=color, linewidth=1.2, alpha=0.7, markersize=6)
        count = f"{is_smaller.sum()} of {len(is_smaller)}\nsmaller"
        axes.text(1.02, 0.5, count, transform=axes.transAxes, color=GREEN, va="center", fontsize=13)
        axes.axvline(before, color=PURPLE, linestyle="--", linewidth=1.5)
        axes.set_title(f"learning rate {rate}", **TEXT)
        axes.set_yticks([0, 1], ways.values())
        axes.set(ylim=(1.4, -0.4))
        plain(axes, **TICKS)
    plots[-1].set_xlabel("kB after 384 reward evaluations (dashed: before)", **TEXT)
    return figure


if __name__ == "__main__":
    figures = {"06-question": question, "06-loop": loop, "06-curves": curves}
    figures |= {"06-tradeoff": tradeoff, "06-large": large, "06-six": six}
    main(figures)
