"""Figures of lesson 10: where losses lead on a line, what holds them, and the forward process in img2img.

The line, its policy, losses and training are the notebook's own: its cells with the tag "line" run here. The
cosines and rewards of img2img are those of `python -m benchmarks.results.forward_starts`.
"""

from types import SimpleNamespace
from typing import Any

import torch
from lessons import run_tagged
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import panels, plain, read_rows
from style import INK, MUTED, PALETTE, main
from torch import nn

from ddpo_lessons.advantages import normalize
from ddpo_lessons.algorithms.forward_process import Example
from ddpo_lessons.lessons import SEED, seeded
from ddpo_lessons.ppo import clipped_loss

BLUE, ORANGE, GREEN, PURPLE, BROWN, RED = PALETTE
COLOURS = {"RWR": BLUE, "signed": INK, "AWM": ORANGE, "NFT": GREEN, "PEPG": PURPLE, "penalty": RED}
NAMES = {"signed": "praise and blame", "AWM": "AWM's clip", "penalty": "penalty to a lag"}
TICKS: dict[str, Any] = {"length": 0, "labelsize": 9, "colors": INK}
SEEDS, EPOCHS, SHOWN = (0, 1, 2), 100, 60
RUNS: dict[str, dict[str, Any]] = {  # panel: what it changes
    "one batch, 100 steps": {"epochs": 1, "steps": EPOCHS},
    "one step an epoch": {"epochs": EPOCHS, "steps": 1},
    "one step an epoch, the old policy lags": {
        "epochs": EPOCHS,
        "steps": 1,
        "sampler_decay": 0.9,
        "center_decay": 0.9,
    },
}


USED = (torch, nn, SimpleNamespace, Example, seeded, normalize, clipped_loss)
NAMED = {"SEED": SEED, **{thing.__name__.split(".")[-1]: thing for thing in USED}}
LINE = run_tagged("10_without_log_probs", "line", NAMED)
LOSSES = {name: LINE[f"{name.lower()}_loss"] for name in COLOURS}


def draw_paths(axes: Axes, policy: Any, name: str) -> None:
    """Draw paths from noise to data, and how many end above 0."""
    states = LINE["paths"](policy, LINE["normals"](2, 2000))
    good = 100 * (states[:, -1] > 0).double().mean().item()
    across = torch.linspace(0, 1, states.shape[1]).tolist()
    for path in states[:SHOWN].round(decimals=2).tolist():  # rounded: the same drawing on every machine
        axes.plot(across, path, color=BLUE if path[-1] > 0 else RED, linewidth=0.8, alpha=0.75)
    for mean in LINE["MEANS"].tolist():
        axes.axhspan(mean - 2 * LINE["WIDTH"], mean + 2 * LINE["WIDTH"], color=MUTED, alpha=0.13, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_title(f"{name}\n{good:.0f}% good", fontsize=10, color=INK)
    axes.set(xlim=(0, 1), ylim=(-3, 6.5), xticks=[0.1, 0.9], xticklabels=["noise", "data"])
    plain(axes, **TICKS)


def push() -> Figure:
    """Draw the paths before training, and after a hundred epochs of five losses, a step each."""
    figure, grid = panels(6, (10, 3.7), sharey=True)
    draw_paths(grid[0], LINE["Policy"](), "before")
    for axes, name in zip(grid[1:], ("RWR", "signed", "AWM", "NFT", "PEPG"), strict=True):
        policy, _ = LINE["draft_train"](LOSSES[name], EPOCHS, 1)
        draw_paths(axes, policy, {"RWR": "RWR: only praise", **NAMES}.get(name, name))
    grid[0].set_ylabel("grey: where 95% of the data lie", color=INK, fontsize=9.5)
    return figure


def plane() -> Figure:
    """Draw the share of good samples against the distance from the data, a path for each loss and seed."""
    figure, grid = panels(3, (10, 4), sharex=True, sharey=True)
    for axes, (title, how) in zip(grid, RUNS.items(), strict=True):
        for name, loss_of in LOSSES.items():
            width = {"signed": 5, "AWM": 3}.get(name, 1.6) if "lags" not in title else 1.6
            for seed in SEEDS:
                _, looks = LINE["draft_train"](loss_of, **how, seed=seed)
                good, far = torch.tensor(looks).round(decimals=3).T.tolist()
                axes.plot(far, good, color=COLOURS[name], linewidth=width, alpha=0.6, solid_capstyle="round",
                          label=NAMES.get(name, name) if seed == 0 else None)  # fmt: skip
                axes.plot(far[-1], good[-1], "o", color=COLOURS[name], markersize=4)
        for count in (1, 2, 4, 8):
            axes.plot(0.03, 1 - 0.5**count, "k*", markersize=8, zorder=5)
            axes.text(0.026, 1 - 0.5**count, f"{count}", fontsize=8, ha="right", va="center", color=INK)
        axes.set(xscale="log", xlim=(0.015, 8), ylim=(0.45, 1.03), title=title)
        axes.set_xticks([0.03, 0.1, 0.3, 1, 3], ["0.03", "0.1", "0.3", "1", "3"])
        axes.minorticks_off()
        axes.title.set_fontsize(10)
        axes.set_xlabel("distance from the data", color=INK, fontsize=9.5)
        plain(axes, **TICKS)
        if "batch" in title:
            axes.set_ylabel("share of good samples", color=INK, fontsize=9.5)
        if "lags" in title:
            axes.legend(fontsize=8.5, frameon=False, loc="lower right")
    return figure


def trained(rows: list[dict[str, str]], method: str, examples: str) -> list[float]:
    """Return the test rewards of three seeds at the rate with the highest mean reward on validation."""
    ends: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if (row["method"], row["examples"], row["epoch"]) == (method, examples, "20"):
            ends.setdefault((row["split"], row["learning_rate"]), []).append(float(row["reward"]))
    rates = [rate for split, rate in ends if split == "validation" and len(ends[split, rate]) == 3]
    return ends["test", max(rates, key=lambda rate: sum(ends["validation", rate]))] if rates else []


def img2img() -> Figure:
    """Draw how far each loss's descent points where the mean reward rises, and where training ends."""
    rows, runs = read_rows("results/forward_starts.csv"), read_rows("results/forward_starts_runs.csv")
    kinds = {"noised anew": ("o", ORANGE), "visited timesteps": ("^", MUTED), "visited states": ("s", BLUE)}
    methods = ["AWM", "NFT", "RWR", "all alike", "PEPG", "DDPO"]
    figure, grid = panels(3, (11, 3.2), sharey=True)
    titles = {
        "2.0": "before, guidance 2", "1.0": "before, no guidance", "": "after 2,560 pictures, guidance 2",
    }  # fmt: skip
    for axes, (guidance, title) in zip(grid, titles.items(), strict=True):
        for place, method in enumerate(methods):
            for kind, (marker, colour) in {**kinds, "recorded actions": ("D", INK)}.items():
                examples = kind.removeprefix("recorded ")
                own = {"guidance": guidance, "method": method, "examples": examples}
                found = [float(row["cosine"]) for row in rows if own.items() <= row.items()]
                found = found if guidance else trained(runs, method, examples)
                label = kind if found and method in ("AWM", "DDPO") else None
                axes.plot(found, [-place] * len(found), marker, color=colour, alpha=0.7, label=label)
        axes.set_yticks([-n for n in range(len(methods))], methods)
        axes.set_ylim(0.6 - len(methods), 0.9)
        axes.set_title(title, fontsize=10)
        meaning = "cosine with the gradient of the reward" if guidance else "reward on test pictures"
        axes.set_xlabel(meaning, color=INK, fontsize=9.5)
        plain(axes, **TICKS)
    for axes in grid[:2]:
        axes.axvline(0, color=INK, linewidth=0.8, linestyle=":")
    for row in runs:
        if row["method"] == "untrained" and row["split"] == "test":
            grid[2].axvline(float(row["reward"]), color=INK, linewidth=0.8, linestyle=":")
            grid[2].text(
                float(row["reward"]), 0.5, row["examples"].replace("before training", "untrained"),
                fontsize=8, ha="center", color=INK,
            )  # fmt: skip
    below = {"fontsize": 8.5, "frameon": False, "loc": "outside lower center", "ncols": 4}
    figure.legend(*grid[0].get_legend_handles_labels(), **below)
    return figure


if __name__ == "__main__":
    main({"10-push": push, "10-plane": plane, "10-img2img": img2img})
