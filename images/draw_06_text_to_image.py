"""Figures of lesson 06: a painter of foxes, the loop, curves and paths.

Pictures and numbers are those that `python -m benchmarks.zoo.painter` measured.
"""

import itertools
import json

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from plots import BENCHMARKS, Row, band, by_seed, minus, of_seeds, panels, picture, plain, read_rows, where
from style import INK, PALETTE, arrow, box, diagram, label, main, note, title

from ddpo_lessons.rewards import jpeg_compressibility
from ddpo_lessons.worlds import animals

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
PICTURES = BENCHMARKS / "zoo/painter"  # a folder
METHODS = {"DDPO": BLUE, "KL 0.03": ORANGE, "KL 0.1": GREEN, "RWR": BROWN}
NAMES = {"DDPO": "DDPO", "KL 0.03": "DDPO, β = 0.03", "KL 0.1": "DDPO, β = 0.1", "RWR": "RWR, τ = 0.2"}
UNTRAINED = ("best of 2", "best of 4", "best of 8", "more words")
ROWS = {  # files of the first figure
    "DDPO_00": "before",
    "DDPO_04": "256 queries",
    "DDPO_06": "384 queries",
    "DDPO_10": "640 queries",
    "KL_0.1_10": "640, with a\nprice on the KL",
}
LEVELS = (-2.1, -1.9)
TILE = 64  # pixels
TICKS = {"labelsize": 9.5, "colors": INK}


def read_picture(name: str) -> np.ndarray:
    """Return a picture that a benchmark kept, (H, W, 3)."""
    return np.asarray(Image.open(PICTURES / f"{name}.png"))


def question() -> Figure:
    """Draw ten foxes from the same noise, as training goes on, with their mean size and the judge's count."""
    figure, axes = diagram(9.6, 3.95)
    width, left = 6.9, 1.45
    for row, (name, text) in enumerate(ROWS.items()):
        pixels, bottom = read_picture(name), 3.18 - 0.77 * row
        label(axes, left - 0.1, bottom + 0.36, text, size=10, align="right")
        picture(axes, left, bottom, width, pixels, height=width / 10)
        tiles = torch.from_numpy(pixels.copy()).view(TILE, 10, TILE, 3).permute(1, 3, 0, 2) / 255
        size = -jpeg_compressibility()(tiles, [""] * 10, [{}] * 10).mean()
        with torch.no_grad():
            foxes = (animals.Judge.load()(tiles)[0].argmax(1) == animals.ANIMALS.index("fox")).sum()
        told = f"{size:.2f} kB\n{foxes} of 10 foxes"
        label(axes, left + width + 0.1, bottom + 0.36, told, size=10, align="left")
    return figure


def loop() -> Figure:
    """Draw one epoch with three samples of a group: the states, the picture, its reward, its advantage."""
    figure, axes = diagram(10, 5.6)
    epoch, pixels = json.loads((PICTURES / "loop.json").read_text()), read_picture("loop")
    heads = (
        (0.82, "1  ask", BLUE, 1.36), (4.05, "2  sample, and record", BLUE, 4.7),
        (7.22, "3  score", GREEN, 1.2), (8.85, "4  advantage", GREEN, 1.7),
    )  # fmt: skip
    for x, text, color, width in heads:
        box(axes, x - width / 2, 5.05, width, 0.4, text, color=color, size=10.5)
    size, xs = 0.72, [1.75 + 0.83 * n for n in range(6)]
    for row, sample in enumerate(epoch["shown"]):
        bottom = 4.1 - 0.86 * row
        label(axes, 0.82, bottom + 0.36, "“a fox”", size=10.5)
        for column, x in enumerate(xs):
            tile = pixels[TILE * row : TILE * (row + 1), TILE * column : TILE * (column + 1)]
            picture(axes, x, bottom, size, tile)
            if column:
                arrow(axes, (x - 0.12, bottom + 0.36), (x + 0.01, bottom + 0.36), width=0.9)
        label(axes, 7.22, bottom + 0.36, minus(f"{sample['reward']:.2f}"), size=12)
        text, color = minus(f"{sample['advantage']:+.2f}"), BLUE if sample["advantage"] > 0 else RED
        label(axes, 8.85, bottom + 0.36, text, size=14, weight="bold", ink=color)
    notes = (
        (xs[0] + size / 2, "noise, the same"),
        ((xs[1] + xs[4] + size) / 2, "four actions, each with its log-probability"),
        (xs[5] + size / 2, "picture"),
        (7.22, minus(f"mean of the\ngroup {epoch['mean']:.2f}")),
        (8.85, "in standard deviations"),
    )
    for x, text in notes:
        note(axes, x, 2.2, text, align="center")
    lower = (
        (7.0, 2.85, "5  shuffle the pairs", "128 of 256 pairs (sample, timestep),\n64 for each step", ORANGE),
        (3.3, 3.0, "6  replay, clip, update", "the same actions again:\nratios leave 1", ORANGE),
        (0.15, 2.45, "7  report", "kB, judge, ratios", PURPLE),
    )  # fmt: skip
    for x, width, head, text, color in lower:
        box(axes, x, 1.08, width, 0.4, head, color=color, size=10.5)
        note(axes, x + width / 2, 0.78, text, align="center")
    arrow(axes, (8.85, 2.0), (8.85, 1.5))
    arrow(axes, (7.0, 1.28), (6.32, 1.28))
    arrow(axes, (3.3, 1.28), (2.62, 1.28))
    arrow(axes, (4.05, 1.5), (4.05, 2.0), ink=ORANGE)
    label(axes, 4.2, 1.76, "the new weights sample the next epoch", size=9.5, ink=ORANGE, align="left")
    what = "Three of the eight samples of a group, by untrained tiny-zoo. Latents: three of four channels."
    note(axes, 0.15, 0.25, what)
    return figure


def kept_at(path: np.ndarray, reward: float) -> float | None:
    """Return the share kept where a path first reaches a reward, None if it never does."""
    for (before, kept_before), (there, kept) in itertools.pairwise(path):
        if before < reward <= there:
            return kept_before + (reward - before) / (there - before) * (kept - kept_before)
    return None


def untrained(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """Return reward and percent of foxes of the untrained ways."""
    own = [row for row in rows if row["method"] in UNTRAINED]
    return {row["method"]: (float(row["reward"]), 100 * float(row["fox"])) for row in own}


def curves() -> Figure:
    """Draw reward and foxes over queries, with two untrained ways as lines."""
    rows = read_rows("zoo/painter.csv")
    figure, (left, right) = panels(2, (9, 3.4))
    for axes, column, scale in ((left, "reward", 1), (right, "fox", 100)):
        for method in ("DDPO", "RWR"):
            x, seeds = by_seed(where(rows, method=method), "queries", column, scale)
            axes.plot(x, seeds.mean(axis=1), color=METHODS[method], label=NAMES[method], linewidth=1.8)
            band(axes, x, seeds, METHODS[method], alpha=0.15)
        for method, style in (("best of 8", "--"), ("more words", ":")):
            value = untrained(rows)[method][column == "fox"]
            axes.axhline(value, color=PURPLE, linestyle=style, linewidth=1.2, label=method)
        axes.set_xlabel("queries", fontsize=10, color=INK)
        plain(axes, **TICKS)
    left.set_title("reward of test pictures (minus kB)", fontsize=11, color=INK)
    right.set_title("judge sees a fox (%)", fontsize=11, color=INK)
    right.set_ylim(0, 104)
    left.legend(fontsize=9, frameon=False, labelcolor=INK)
    return figure


def paths() -> Figure:
    """Draw foxes kept against reward, a line for each seed; beside it what is kept at some rewards."""
    rows = read_rows("zoo/painter.csv")
    figure, (axes, table) = panels(2, (9.4, 4.3), width_ratios=(7, 3))
    table.axis("off")
    table.set(xlim=(0, 3), ylim=(0, 10))
    what = "foxes kept where a path first\nreaches this reward, each seed, %"
    label(table, 0, 9.4, what, size=9, align="left")
    for number, (method, color) in enumerate(METHODS.items()):
        found = [path * (1, 100) for path in of_seeds(where(rows, method=method), "reward", "fox")]
        for path in found:  # (E, 2)
            axes.plot(*path.T, "o-", color=color, linewidth=1.3, markersize=4, alpha=0.8, label=NAMES[method])
        title(table, 0, 8.1 - 1.9 * number, NAMES[method], 9.5, ink=color)
        for line, reward in enumerate(LEVELS):
            kept = [kept_at(path, reward) for path in found]
            text = ", ".join("–" if share is None else f"{share:.0f}" for share in kept)
            at, y = minus(f"at {reward}"), 7.5 - 1.9 * number - 0.5 * line
            label(table, 0.1, y, f"{at}:  {text}", size=9.5, align="left")
    for name, (x, y) in untrained(rows).items():
        axes.plot(x, y, "D", color=PURPLE, markersize=6)
        told = {"best of 4": "best of 2, 4, 8", "more words": "more words"}.get(name, "")
        look = {"textcoords": "offset points", "ha": "center", "fontsize": 9, "color": PURPLE}
        axes.annotate(told, (x, y), (0, 12), **look)
    axes.set(xlim=(-2.4, -1.0), ylim=(-2, 114), yticks=range(0, 101, 20))
    axes.set_xlabel("reward (minus kB): smaller files to the right", fontsize=10, color=INK)
    axes.set_ylabel("judge sees a fox (%)", fontsize=10, color=INK)
    lines, names = axes.get_legend_handles_labels()
    each = dict(zip(names, lines, strict=True))
    axes.legend(each.values(), each, loc="lower left", fontsize=9.5, frameon=False, labelcolor=INK)
    plain(axes, **TICKS)
    return figure


if __name__ == "__main__":
    main({"06-question": question, "06-loop": loop, "06-curves": curves, "06-paths": paths})
