"""Figures of lesson 10: where losses lead on a line, what an old policy does there, and img2img.

The line, its policy, losses and training are the notebook's own: its cells with the tag "line" run here. The
distances with old policies are those of `python -m benchmarks.results.lags`; the cosines and rewards of
img2img are those of `python -m benchmarks.results.forward_starts`.
"""

from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from lessons import run_tagged
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from plots import panels, plain, read_rows, where
from style import CARD, INK, MUTED, PALETTE, main
from torch import nn

from ddpo_lessons.advantages import normalize
from ddpo_lessons.algorithms.forward_process import Example
from ddpo_lessons.lessons import SEED, seeded
from ddpo_lessons.ppo import clipped_loss

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
TICKS: dict[str, Any] = {"length": 0, "labelsize": 13, "colors": INK}
EPOCHS, SHOWN = 100, 45
TRAINED = {"RWR": "rwr", "signed weights": "signed", "AWM": "awm", "DiffusionNFT": "nft", "PEPG": "pepg"}
USED = (torch, nn, SimpleNamespace, Example, seeded, normalize, clipped_loss)
NAMED = {"SEED": SEED, **{thing.__name__.split(".")[-1]: thing for thing in USED}}
LINE = run_tagged("10_without_log_probs", "line", NAMED)


def draw_paths(axes: Axes, policy: Any, name: str) -> None:
    """Draw paths from noise to data, and how many end above 0."""
    states = LINE["paths"](policy, LINE["normals"](2, 2000))
    good = 100 * (states[:, -1] > 0).double().mean().item()
    across = torch.linspace(0, 1, states.shape[1]).tolist()
    for path in states[:SHOWN].round(decimals=2).tolist():  # rounded: the same drawing on every machine
        axes.plot(across, path, color=BLUE if path[-1] > 0 else RED, linewidth=0.8, alpha=0.75)
    for center in LINE["MEANS"].tolist():
        low, high = center - 2 * LINE["WIDTH"], center + 2 * LINE["WIDTH"]
        axes.axhspan(low, high, color=MUTED, alpha=0.15, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_title(name, fontsize=13, color=INK)
    axes.text(0.95, -2.7, f"{good:.0f}% good", fontsize=13, color=INK, ha="right")
    axes.set(xlim=(0, 1), ylim=(-3, 5.5), xticks=[0.12, 0.88], xticklabels=["noise", "data"])
    plain(axes, **TICKS)


def push() -> Figure:
    """Draw the paths before training, and after a hundred epochs of five losses, with one step each."""
    figure = Figure(figsize=(6, 5.2), facecolor=CARD, layout="constrained")
    first, *others = figure.subplots(2, 3, sharex=True, sharey=True).flat
    draw_paths(first, LINE["Policy"](), "untrained")
    for axes, (name, loss) in zip(others, TRAINED.items(), strict=True):
        draw_paths(axes, LINE["draft_train"](LINE[f"{loss}_loss"], EPOCHS, 1), name)
    return figure


def lags() -> Figure:
    """Draw the distance from the data, by what is old: mean and range over seeds for each loss."""
    rows = read_rows("results/lags.csv")
    losses = {"signed": "signed weights", "AWM": "AWM's clip", "PEPG": "PEPG", "NFT": "NFT",
              "penalty": "penalty"}  # fmt: skip
    kinds = {"sampler": ("old sampler", "o", BLUE), "center": ("old center", "s", ORANGE),
             "both": ("both old", "D", GREEN)}  # fmt: skip
    figure, (axes,) = panels(1, (6, 4.3))
    for place, loss in enumerate(losses):
        for offset, (lag, (name, marker, color)) in enumerate(kinds.items()):
            found = [float(row["distance"]) for row in where(rows, loss=loss, lag=lag, learning_rate="0.003")]
            y = -place - 0.24 * (offset - 1)
            axes.plot([min(found), max(found)], [y, y], color=color, linewidth=2)
            label = None if place else name
            axes.plot(mean(found), y, marker, color=color, markersize=8, label=label, linestyle="none")
    axes.set_yticks([-n for n in range(len(losses))], losses.values())
    axes.set(xscale="log", xlim=(0.3, 30))
    axes.set_xticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    axes.minorticks_off()
    axes.set_xlabel("distance from the data after 100 epochs", color=INK, fontsize=13)
    plain(axes, **TICKS)
    axes.legend(fontsize=13, frameon=False, loc="lower right")
    return figure


def trained(rows: list[dict[str, str]], method: str, examples: str) -> list[float]:
    """Return the test rewards of the five new seeds, all at the learning rate that the search chose."""
    ends = where(rows, method=method, examples=examples, split="test", epoch="20")
    return [float(row["reward"]) for row in ends if int(row["seed"]) > 2]


def draw_seeds(axes: Axes, found: list[float], height: float, marker: str, color: str) -> None:
    """Draw a pale mark for each seed, and an upright tick at their mean."""
    axes.plot(found, [height] * len(found), marker, color=color, alpha=0.5, markersize=4.5, markeredgewidth=0)
    axes.plot([mean(found)] * 2, [height - 0.4, height + 0.4], color=color, linewidth=2.6, zorder=3)


def img2img() -> Figure:
    """Draw how far each loss's descent points where the mean reward rises, and where training ends."""
    rows, runs = read_rows("results/forward_starts.csv"), read_rows("results/forward_starts_runs.csv")
    kinds = {"re-noised": ("o", ORANGE), "visited timesteps": ("^", MUTED), "visited states": ("s", BLUE)}
    methods = {name: [*kinds] for name in ("AWM", "NFT", "RWR", "all alike", "PEPG")}
    methods["DDPO"] = ["recorded actions"]
    looks = {**kinds, "recorded actions": ("D", INK)}
    shown = {"all alike": "equal\nweights"}
    figure = Figure(figsize=(6, 9.8), facecolor=CARD, layout="constrained")
    grid = list(figure.subplots(3, 1, sharey=True))
    titles = {"2.0": "first step, guidance 2", "1.0": "first step, no guidance", "": "after training"}
    for axes, (guidance, title) in zip(grid, titles.items(), strict=True):
        middles, bottom = [], 0.0
        for place, (method, examples) in enumerate(methods.items()):
            top, bottom = bottom, bottom - len(examples) - 0.5  # a line for each kind of examples
            middles.append((top + bottom) / 2)
            if place % 2 == 0:
                axes.axhspan(bottom, top, color=MUTED, alpha=0.08, linewidth=0)
            for row, kind in enumerate(examples):
                start = {"PEPG": "NFT"}.get(method, method)  # their first steps are the same
                own = {"guidance": guidance, "method": start, "examples": kind.removeprefix("recorded ")}
                found = [float(row["cosine"]) for row in rows if own.items() <= row.items()]
                found = found if guidance else trained(runs, method, own["examples"])
                if found:
                    draw_seeds(axes, found, top - 0.75 - row, *looks[kind])
        axes.set_yticks(middles, [shown.get(name, name) for name in methods])
        axes.set_ylim(bottom, 0)
        axes.set_title(title)
        if guidance != "2.0":  # the second panel has the same axis
            about = "cosine with the exact gradient" if guidance else "reward on test images"
            axes.set_xlabel(about, color=INK)
        plain(axes, **TICKS)
    for axes in grid[:2]:
        axes.set(xlim=(-0.8, 0.8), xticks=(-0.5, 0, 0.5))
        axes.axvline(0, color=INK, linewidth=0.8, linestyle=":")
    grid[2].set_xticks((-20, -16, -12))
    grid[2].set_title(titles[""], pad=26)  # above the names of the lines
    for row in runs:
        if row["method"] == "untrained" and row["split"] == "test":
            name = {"before training": "untrained"}.get(row["examples"], "best settings")
            grid[2].axvline(float(row["reward"]), color=INK, linewidth=0.8, linestyle=":")
            grid[2].text(float(row["reward"]), 0.15, name, ha="center", va="bottom", color=INK)
    no_line: dict[str, Any] = {"xdata": [], "ydata": [], "linestyle": "none"}
    handles = [
        Line2D(marker=marker, color=ink, label=kind, **no_line) for kind, (marker, ink) in looks.items()
    ]
    tick = {"marker": "|", "markersize": 11, "markeredgewidth": 2.6, "label": "mean of the seeds"}
    handles.append(Line2D(color=INK, **tick, **no_line))
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    main({"10-push": push, "10-lags": lags, "10-img2img": img2img})
