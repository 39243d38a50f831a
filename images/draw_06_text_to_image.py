"""Figures of lesson 06: fog that goes, the loop, four methods, a hacked reward, two baselines, guidance.

Pictures and numbers are those that `python -m benchmarks.results.algorithms` measured.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

from ddpo_lessons.data.prompts import digit_world_prompts
from ddpo_lessons.tiny import load_judge
from ddpo_lessons.tiny.world import DIGITS

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
RESULTS = Path(__file__).parents[1] / "benchmarks/results/algorithms.csv"
PICTURES = RESULTS.with_suffix("")  # a folder
METHODS = {"DDPO-IS": BLUE, "DDPO-SF": PURPLE, "RWR": BROWN, "sparse RWR": ORANGE}
STATISTICS = {"per prompt": BLUE, "global": ORANGE}
TITLES = {"alignment": "alignment, fog asked for", "compressibility": "compressibility (minus kB)"}
SCALES = {"1": BLUE, "3": ORANGE}  # of guidance
BEFORE = {"1": -2.184, "3": -1.998}  # rewards of the test pictures before training, as the lesson prints them
SWEPT = {  # name, colour, and a shift aside
    "at 1": ("$w$ = 1", BLUE, 0.93),
    "at 3": ("$w$ = 3", ORANGE, 1.0),
}
SNAPSHOTS = {0: "before", 4: "after 4 epochs", 8: "after 8", 12: "after 12"}
COUNT, TILE = 10, 32  # pictures in a row, and their pixels


# ------------------------------------------------------------------------------------------ pictures
def fog() -> Figure:
    """Draw the same ten prompts from the same noise, as training goes on."""
    ask, width, left = digit_world_prompts(1_000, "seen", "foggy"), 0.72, 1.6
    said = [ask()[1] for _ in range(COUNT)]
    figure, axes = diagram(10, 4.1)
    label(axes, left - 0.12, 3.8, "“a foggy …", size=9.5, ink=MUTED, align="right")
    for column, words in enumerate(said):
        lines = (f"{words['ink']}", DIGITS[words["digit"]], f"on {words['background']}”")
        for number, line in enumerate(lines):
            label(axes, left + width * (column + 0.5), 3.94 - 0.16 * number, line, size=8)
    for row, (epoch, name) in enumerate(SNAPSHOTS.items()):
        pixels = read_picture(f"pictures_DDPO-IS_alignment_{epoch:02d}.png")  # (32, 320, 3)
        bottom = 2.72 - 0.8 * row
        label(axes, left - 0.12, bottom + width / 2, name, size=10, align="right")
        for column in range(COUNT):
            tile = pixels[:, TILE * column : TILE * (column + 1)]
            show(axes, tile, left + width * column, bottom, width - 0.04)
        right = readable(pixels, [words["digit"] for words in said])
        label(
            axes, left + width * COUNT + 0.08, bottom + 0.34, f"{right} of 10\nread", size=9.5, align="left"
        )
    return figure


def loop() -> Figure:
    """Draw one epoch with three of its samples: the states, the picture, its reward, its advantage."""
    figure, axes = diagram(10, 5.6)
    epoch, pixels = json.loads((PICTURES / "loop.json").read_text()), read_picture("loop.png")
    heads = (
        (0.82, "1  ask", BLUE, 1.36),
        (4.05, "2  sample, and record", BLUE, 4.7),
        (7.22, "3  score", GREEN, 1.2),
        (8.85, "4  advantage", GREEN, 1.7),
    )
    for x, text, color, width in heads:
        box(axes, x - width / 2, 5.05, width, 0.4, text, color=color, size=10.5)
    size = 0.72
    xs = [1.75 + 0.83 * n for n in range(6)]
    for row, sample in enumerate(epoch["shown"]):
        bottom = 4.1 - 0.86 * row
        words = sample["prompt"].removeprefix("a foggy ").removesuffix(" background").split(" on a ")
        lines = f"“a foggy\n{words[0]}\non {words[1]}”"
        label(axes, 0.12, bottom + 0.36, lines, size=9.5, align="left")
        for column, x in enumerate(xs):
            tile = pixels[TILE * row : TILE * (row + 1), TILE * column : TILE * (column + 1)]
            show(axes, tile, x, bottom, size)
            if column:
                arrow(axes, (x - 0.12, bottom + 0.36), (x + 0.01, bottom + 0.36), width=0.9)
        label(axes, 7.22, bottom + 0.36, signed(sample["reward"]), size=12)
        color = BLUE if sample["advantage"] > 0 else RED
        label(axes, 8.85, bottom + 0.36, signed(sample["advantage"], True), size=14, weight="bold", ink=color)
    for x, text in zip(xs, ("noise", "", "", "", "", "picture"), strict=True):
        label(axes, x + size / 2, 2.22, text, size=9.5, ink=MUTED)
    label(
        axes,
        (xs[1] + xs[4] + size) / 2,
        2.22,
        "four actions, each with its log-probability",
        size=9,
        ink=MUTED,
    )
    label(axes, 7.22, 2.22, f"mean {signed(epoch['mean'])}", size=9, ink=MUTED)
    label(axes, 8.85, 2.22, "in standard deviations", size=9, ink=MUTED)
    lower = (
        (
            7.0,
            2.85,
            "5  shuffle the pairs",
            "256 pairs (sample, timestep),\n64 for each optimizer step",
            ORANGE,
        ),
        (
            3.3,
            3.0,
            "6  replay, clip, update",
            "the recorded actions again: weights\nchange, and ratios leave 1",
            ORANGE,
        ),
        (0.15, 2.45, "7  report", "reward, judge, ratios", PURPLE),
    )
    for x, width, head, text, color in lower:
        box(axes, x, 1.08, width, 0.4, head, color=color, size=10.5)
        label(axes, x + width / 2, 0.78, text, size=9, ink=MUTED)
    arrow(axes, (8.85, 2.05), (8.85, 1.5))
    arrow(axes, (7.0, 1.28), (6.32, 1.28))
    arrow(axes, (3.3, 1.28), (2.62, 1.28))
    arrow(axes, (4.05, 1.5), (4.05, 2.05), ink=ORANGE)
    label(axes, 4.2, 1.78, "the new weights sample the next epoch", size=9.5, ink=ORANGE, align="left")
    what = f"Three of {epoch['samples']} samples of untrained tiny-sd: highest, median and lowest reward."
    label(axes, 0.15, 0.25, f"{what} Latents: three of four channels.", size=9, ink=MUTED, align="left")
    return figure


def read_picture(name: str) -> np.ndarray:
    """Return a picture that a benchmark kept, (H, W, 3)."""
    return np.asarray(Image.open(PICTURES / name))


def show(axes: Axes, tile: np.ndarray, x: float, y: float, size: float) -> None:
    """Put a picture into a square, each of its pixels as a block."""
    blocks = tile.repeat(4, axis=0).repeat(4, axis=1)
    axes.imshow(blocks, extent=(x, x + size, y, y + size), interpolation="none", zorder=2, aspect="auto")
    axes.set(xlim=(0, axes.figure.get_figwidth()), ylim=(0, axes.figure.get_figheight()))


def readable(pixels: np.ndarray, digits: list[int]) -> int:
    """Count the pictures of a row whose digit the judge reads as it was asked for."""
    pictures = torch.from_numpy(pixels.copy()).float().div(255).view(TILE, len(digits), TILE, 3)
    with torch.no_grad():
        seen = load_judge()(pictures.permute(1, 3, 0, 2).contiguous()).argmax(dim=1)  # (10,)
    return int((seen == torch.tensor(digits)).sum())


def signed(number: float, plus: bool = False) -> str:
    """Write a number with a true minus."""
    return f"{number:{'+' if plus else ''}.2f}".replace("-", "−")


# ------------------------------------------------------------------------------------------- numbers
def algorithms() -> Figure:
    """Draw the reward over the queries: mean of the seeds, band from the lowest to the highest seed."""
    rows = rows_of("methods")
    figure = Figure(figsize=(9, 3.6), facecolor=CARD, layout="constrained")
    for axes, reward in zip(figure.subplots(1, 2), TITLES, strict=True):
        _bands(axes, [row for row in rows if row["reward"] == reward], METHODS)
        axes.set_title(TITLES[reward], fontsize=11, color=INK)
        if reward == "compressibility":
            axes.legend(fontsize=9.5, frameon=False, labelcolor=INK)
    return figure


def hacking() -> Figure:
    """Draw the judge against the reward for every price of the KL, with the distance beside it."""
    figure = Figure(figsize=(9, 3.9), facecolor=CARD, layout="constrained")
    axes = figure.subplots()
    ends = [row for row in rows_of("kl") if row["test_reward"]]
    kinds = {"test": ("prompts as in training", BLUE, BLUE), "left_out": ("left-out prompts", ORANGE, CARD)}
    for prefix, (name, color, filling) in kinds.items():
        points = [(float(row[f"{prefix}_reward"]), 100 * float(row[f"{prefix}_judge"])) for row in ends]
        style = {"color": color, "markerfacecolor": filling, "markersize": 8, "linestyle": "none"}
        axes.plot(*zip(*points, strict=True), "o", label=name, **style)
    far = {row["variant"]: row for row in ends}
    texts = {
        "1": ("β = 1 and 10\ndistance below 0.001", (-30, 10)),
        "0.1": ("β = 0.1\ndistance 0.004", (16, 10)),
        "0": ("β = 0: free\ndistance 0.10", (0, -36)),
    }
    for beta, (text, away) in texts.items():
        place = (float(far[beta]["test_reward"]), 100 * float(far[beta]["test_judge"]))
        axes.annotate(text, place, away, textcoords="offset points", ha="center", fontsize=9.5, color=INK)
    for beta, away in (("0.1", (8, -4)), ("0", (-8, -4))):  # the left-out points that are alone
        place = (float(far[beta]["left_out_reward"]), 100 * float(far[beta]["left_out_judge"]))
        side = "left" if away[0] > 0 else "right"
        axes.annotate(
            f"β = {beta}", place, away, textcoords="offset points", ha=side, fontsize=9.5, color=INK
        )
    axes.set_xlabel("reward of the test pictures (minus kB): smaller files to the right", color=INK)
    axes.set_ylabel("judge reads (%)", color=INK)
    axes.set(ylim=(0, 122), yticks=range(0, 101, 20), xlim=(-1.1, -0.92))
    axes.legend(loc="lower left", fontsize=9.5, frameon=False, labelcolor=INK)
    _plain(axes)
    return figure


def statistics() -> Figure:
    """Draw reward and judge over the queries, for statistics of all prompts and of each prompt."""
    rows = rows_of("statistics")
    figure = Figure(figsize=(9, 3.3), facecolor=CARD, layout="constrained")
    left, right = figure.subplots(1, 2)
    _bands(left, rows, STATISTICS)
    _bands(right, rows, STATISTICS, "judge", 100)
    left.set_title("reward: colourfulness", fontsize=11, color=INK)
    right.set_title("judge reads (%)", fontsize=11, color=INK)
    right.set_ylim(0, 104)
    left.legend(fontsize=9.5, frameon=False, labelcolor=INK)
    return figure


def guidance() -> Figure:
    """Draw where runs end, and how far they have moved, by guidance and learning rate."""
    figure = Figure(figsize=(9, 3.5), facecolor=CARD, layout="constrained")
    left, right = figure.subplots(1, 2)
    ends = [row for row in rows_of("guidance") if row["variant"].startswith("at") and row["test_reward"]]
    for variant, (name, color, shift) in SWEPT.items():
        own = [row for row in ends if row["variant"] == variant]
        rates = [shift * float(row["learning_rate"]) for row in own]
        style = {"color": color, "markersize": 6, "alpha": 0.85, "linestyle": "none"}
        left.plot(rates, [float(row["test_reward"]) for row in own], "o", label=name, **style)
        right.plot(rates, [float(row["distance"]) for row in own], "o", **style)
    for scale, before in BEFORE.items():
        left.axhline(before, color=SCALES[scale], linewidth=1, linestyle="--")
    for scale, gap, side in (("1", -0.05, "top"), ("3", 0.05, "bottom")):
        style = {"fontsize": 8.5, "color": MUTED, "ha": "right", "va": side}
        left.text(4.8e-2, BEFORE[scale] + gap, f"before, $w$ = {scale}", **style)
    left.set_title("reward after 512 queries", fontsize=11, color=INK)
    right.set_title("distance", fontsize=11, color=INK)
    right.set_yscale("log")
    right.set_ylim(4e-4, 0.4)
    right.set_yticks([1e-3, 1e-2, 1e-1], ["0.001", "0.01", "0.1"])
    left.legend(fontsize=8.5, frameon=False, labelcolor=INK, loc="lower left")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlim(7e-4, 5e-2)
        axes.set_xticks([1e-3, 3e-3, 1e-2, 3e-2], ["0.001", "0.003", "0.01", "0.03"])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("learning rate", color=INK)
        _plain(axes)
    return figure


def rows_of(experiment: str) -> list[dict[str, str]]:
    """Return the rows of one experiment."""
    with open(RESULTS, newline="") as file:
        return [row for row in csv.DictReader(file) if row["experiment"] == experiment]


def _bands(
    axes: Axes,
    rows: list[dict[str, str]],
    colors: dict[str, str],
    column: str = "reward_mean",
    scale: float = 1,
) -> None:
    """Draw a column of each variant over the queries: the seeds' mean, lowest and highest."""
    for name, color in colors.items():
        points: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            if row["variant"] == name:
                points[int(row["queries"])].append(scale * float(row[column]))
        queries = sorted(points)
        mean = [sum(points[q]) / len(points[q]) for q in queries]
        style = "--" if name == "sparse RWR" else "-"  # it lies on RWR's line
        axes.plot(queries, mean, style, color=color, label=name, linewidth=1.8)
        low, high = ([pick(points[q]) for q in queries] for pick in (min, max))
        axes.fill_between(queries, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xlabel("queries", fontsize=10, color=INK)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.set_facecolor(CARD)
    axes.tick_params(labelsize=9.5, colors=INK)
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(
        {
            "06-fog": fog,
            "06-loop": loop,
            "06-algorithms": algorithms,
            "06-hacking": hacking,
            "06-statistics": statistics,
            "06-guidance": guidance,
        }
    )
