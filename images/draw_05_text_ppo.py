"""Draw the pictures of lesson 05: two decision processes, the loop, one review in numbers, experiments."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE = PALETTE[:4]
DATA = Path(__file__).parents[1] / "benchmarks" / "text"
SHADES = LinearSegmentedColormap.from_list("shades", ["#e8a27c", CARD, "#8fb3e6"])


# --------------------------------------------------------------------------------- two decision processes
def two_mdps() -> Figure:
    """Draw a text and a picture as the same thing: states, actions with log-probs, a reward at the end."""
    figure, axes = diagram(9.6, 5.3)
    told = json.loads((DATA / "strip.json").read_text(encoding="utf-8"))
    _text_row(axes, told["text"])
    axes.plot([0.3, 9.3], [2.98, 2.98], color=MUTED, linewidth=0.6)
    _picture_row(axes, told["picture"])
    return figure


def _text_row(axes: Axes, text: dict[str, Any]) -> None:
    label(axes, 0.3, 5.02, "Text PPO: an action is a token", weight="bold", size=13, align="left", ink=BLUE)
    label(axes, 0.3, 4.62, "query", size=10, ink=MUTED, align="left")
    label(axes, 2.35, 4.62, "response: the policy ends it itself", size=10, ink=MUTED, align="left")
    assert " ".join(text["query"]) == "honestly , the faces were sloppy"
    box(axes, 0.3, 3.92, 1.95, 0.5, "honestly , the faces\nwere sloppy", edge=MUTED, size=9.5)
    label(axes, 2.2, 3.66, "log-prob", size=10, ink=MUTED, align="right")
    label(axes, 2.2, 3.34, "advantage", size=10.5, ink=BLUE, align="right", weight="bold")
    x = 2.35
    for token, log_prob, advantage in zip(text["tokens"], text["log_prob"], text["advantage"], strict=True):
        width = max(0.46, 0.2 + 0.085 * len(token))
        box(axes, x, 3.92, width, 0.5, token, color=BLUE, size=9.5)
        label(axes, x + width / 2, 3.66, one_digit(log_prob), size=9.5)
        label(axes, x + width / 2, 3.34, one_digit(advantage, "+"), size=10, weight="bold")
        x += width + 0.05
    arrow(axes, (x, 4.17), (x + 0.3, 4.17))
    label(axes, x + 0.68, 4.28, "reward", size=10.5, weight="bold")
    label(axes, x + 0.68, 4.02, f"{text['score']:+.2f}", size=10.5)


def one_digit(number: float, sign: str = "") -> str:
    """Write a number short, with a real minus and no -0.0."""
    return f"{round(number, 1) + 0.0:{sign}.1f}".replace("-", "−")


def _picture_row(axes: Axes, picture: dict[str, Any]) -> None:
    label(
        axes,
        0.3,
        2.62,
        "DDPO: an action is a denoising step",
        weight="bold",
        size=13,
        align="left",
        ink=ORANGE,
    )
    label(
        axes,
        9.3,
        2.62,
        f"prompt: “{picture['prompt']}”; the schedule ends the episode",
        size=10,
        ink=MUTED,
        align="right",
    )
    size, states = picture["size"], picture["states"]
    side, gap, low = 1.0, 0.46, 1.3
    names = [f"$x_{{{t}}}$" for t in picture["timesteps"]] + ["$x_{199}$", "$x_0$"]
    for number, (name, state) in enumerate(zip(names, states, strict=True)):
        pixels = np.frombuffer(base64.b64decode(state), dtype=np.uint8).reshape(size, size, 3)
        x = 0.3 + number * (side + gap)
        axes.imshow(pixels, extent=(x, x + side, low, low + side), interpolation="nearest", zorder=3)
        label(axes, x + side / 2, low - 0.2, name, size=11)
        if number + 1 == len(states):
            break
        middle, acts = x + side + gap / 2, number < len(picture["log_probs"])
        ink = INK if acts else MUTED
        arrow(axes, (x + side + 0.05, low + 0.5), (x + side + gap - 0.04, low + 0.5), ink=ink)
        told = one_digit(picture["log_probs"][number]) if acts else "no\nnoise"
        label(axes, middle, low + (0.72 if acts else 0.8), told, size=9.5, ink=ink)
        if acts:
            label(axes, middle, 0.72, one_digit(picture["advantage"], "+"), size=10.5, weight="bold")
    axes.set(xlim=(0, 9.6), ylim=(0, 5.3), aspect="auto")
    label(axes, 0.3, 0.72, "advantage", size=10.5, ink=ORANGE, align="left", weight="bold")
    label(axes, 6.15, 0.72, "the same for all steps", size=10, align="left")
    red, green, blue = (
        np.frombuffer(base64.b64decode(states[-1]), dtype=np.uint8).reshape(-1, 3).mean(0) / 255
    )
    label(axes, 9.05, low + 0.62, "reward", size=10.5, weight="bold")
    label(axes, 9.05, low + 0.36, f"{blue - (red + green) / 2:+.2f}", size=10.5)
    note = (
        "On the arrows: log-probs, means over 256 numbers. Reward: how blue the picture is; "
        "advantage: among 32 pictures of this prompt."
    )
    label(axes, 0.3, 0.3, note, size=9.5, ink=MUTED, align="left")


# -------------------------------------------------------------------------------------------------- loop
def loop() -> Figure:
    """Draw one iteration: what each of the four models receives and gives, and what the gradient changes."""
    figure, axes = diagram(9.6, 4.9)
    label(axes, 0.3, 4.68, "One iteration of text PPO", weight="bold", size=12, align="left")
    box(axes, 0.3, 3.5, 1.6, 0.75, "query\n“the plot”", edge=MUTED)
    box(axes, 2.65, 3.5, 1.85, 0.75, "policy\n(trained)", color=BLUE, weight="bold")
    box(axes, 5.2, 3.5, 4.1, 0.75, "query + response\n“the plot was not dull . <eos>”", edge=MUTED)
    arrow(axes, (1.9, 3.87), (2.65, 3.87))
    arrow(axes, (4.5, 3.87), (5.2, 3.87))
    label(axes, 4.85, 4.08, "sample", size=9.5, ink=MUTED)
    columns = (
        (0.75, "policy\nas it sampled", BLUE, "log-probs"),
        (2.9, "reference\n(frozen copy)", PURPLE, "its log-probs"),
        (5.05, "reward model\n(frozen)", ORANGE, "one score a text"),
        (7.35, "value model\n(trained)", GREEN, "values"),
    )
    for x, name, color, gives in columns:
        box(axes, x, 2.3, 1.95, 0.72, name, color=color, size=10)
        arrow(axes, (x + 0.975, 2.3), (x + 0.975, 1.42))
        label(axes, x + 1.05, 1.88, gives, size=9.5, align="left")
        arrow(axes, (x + 0.975, 3.26), (x + 0.975, 3.02), ink=MUTED, width=0.9)
    axes.plot([1.725, 8.325], [3.26, 3.26], color=MUTED, linewidth=0.9)
    axes.plot([7.25, 7.25], [3.26, 3.5], color=MUTED, linewidth=0.9)
    rewards = "a reward for every token: − β · KL,\nand the score on the last one"
    box(axes, 0.75, 0.72, 6.25, 0.7, rewards, edge=MUTED, size=10)
    box(axes, 7.35, 0.72, 1.95, 0.7, "GAE, then the\nclipped losses", edge=MUTED, size=10)
    arrow(axes, (7.0, 1.07), (7.35, 1.07))
    axes.plot([9.3, 9.45, 9.45, 3.575], [1.07, 1.07, 4.45, 4.45], color=BLUE, linewidth=1.6)
    arrow(axes, (3.575, 4.45), (3.575, 4.25), ink=BLUE, width=1.6)
    arrow(axes, (9.45, 2.66), (9.3, 2.66), ink=BLUE, width=1.6)
    note = "the gradient (blue) changes policy and value model; then come the next queries"
    label(axes, 4.8, 0.32, note, size=10, ink=MUTED)
    return figure


# -------------------------------------------------------------------------------------------------- strip
def strip() -> Figure:
    """Draw every number that text PPO makes of one review, token by token."""
    text = json.loads((DATA / "strip.json").read_text(encoding="utf-8"))["text"]
    rows = (
        ("log_prob", r"log $\pi_\theta$"),
        ("ref_log_prob", r"log $\pi_\mathrm{ref}$"),
        ("kl", "KL, their difference"),
        ("reward", r"$r_j$ = − KL (β = 1), score at the end"),
        ("value", r"$V_j$, before the token"),
        ("delta", r"$\delta_j = r_j + V_{j+1} - V_j$"),
        ("advantage", r"$A_j = \delta_j + 0.95\, A_{j+1}$"),
        ("return", r"$R_j = A_j + V_j$"),
    )
    figure, axes = diagram(9.6, 4.75)
    left, width, height, top = 3.0, 0.645, 0.4, 3.55
    query = " ".join(text["query"])
    label(axes, 0.3, 4.45, f"query: {query}", size=11, weight="bold", align="left")
    label(
        axes,
        9.45,
        4.45,
        f"score of the whole review {text['score']:+.2f}",
        size=10.5,
        align="right",
        ink=MUTED,
    )
    for column, token in enumerate(text["tokens"]):
        shown = token if len(token) < 8 else token[:7]
        box(axes, left + column * width, top + 0.08, width, 0.44, shown, color=BLUE, size=9.5)
    for number, (name, meaning) in enumerate(rows):
        y = top - (number + 1) * height - (0.12 if number >= 4 else 0)
        label(axes, left - 0.12, y + height / 2, meaning, size=10, align="right")
        limit = 3.6
        for column, value in enumerate(text[name]):
            shade = SHADES(0.5 + 0.5 * max(-1.0, min(1.0, value / limit)))
            x = left + column * width
            axes.add_patch(_cell(x, y, width, height, to_hex(shade)))
            heavy = "bold" if name in ("value", "advantage") else "normal"
            told = f"{value:+.2f}" if value else "0"
            label(axes, x + width / 2, y + height / 2, told.replace("-", "−"), size=9, weight=heavy)
    return figure


def _cell(x: float, y: float, width: float, height: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.015, y + 0.015), width - 0.03, height - 0.03, facecolor=color, edgecolor="none")


# -------------------------------------------------------------------------------------------- experiments
def read_rows(name: str) -> list[dict[str, str]]:
    """Read the points of an experiment."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def panels(count: int, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """Make a card with empty plots side by side."""
    figure = Figure(figsize=(9.6, height), facecolor=CARD, layout="constrained")
    axes = list(figure.subplots(1, count))
    for plot in axes:
        plot.set_facecolor(CARD)
        plot.spines[["top", "right"]].set_visible(False)
    return figure, axes


def seeds(plot: Axes, rows: Sequence[dict[str, str]], x: str, y: str, color: str, scale: float = 1) -> float:
    """Plot each seed thin and their mean bold; return where the mean ends."""
    runs: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        runs.setdefault(row["seed"], []).append((float(row[x]), scale * float(row[y])))
    for run in runs.values():
        plot.plot(*zip(*run, strict=True), color=color, linewidth=0.6, alpha=0.35)
    lines = np.array([[value for _, value in run] for run in runs.values()])
    plot.plot([at for at, _ in next(iter(runs.values()))], lines.mean(0), color=color, linewidth=2.4)
    return float(lines.mean(0)[-1])


def name_lines(plot: Axes, ends: Sequence[tuple[float, str, str]], at: float) -> None:
    """Write each line's name beside its end, apart from the others, and join the two."""
    low, high = plot.get_ylim()
    step, y = 0.085 * (high - low), -float("inf")
    for end, text, color in sorted(ends):
        lines = 1 + text.count("\n")
        y = max(end, y + step * (1 + lines) / 2)
        plot.plot([30, at], [end, y], color=color, linewidth=0.8, clip_on=False)
        plot.text(at + 0.2, y, text, color=color, fontsize=10, va="center")
        y += step * (lines - 1) / 2


def sweep(
    plots: Sequence[Axes],
    columns: Sequence[str],
    variants: dict[str, tuple[str, str]],
    shares: tuple[float, float],
) -> None:
    """Plot columns of the sweep for some variants, with their names beside the lines."""
    rows = read_rows("sweep")
    for plot, column in zip(plots, columns, strict=True):
        scale = 100 if column in ("parses", "positive") else 1
        ends = []
        for variant, (text, color) in variants.items():
            mine = [row for row in rows if row["variant"] == variant]
            ends.append((seeds(plot, mine, "iteration", column, color, scale), text, color))
        if column == "positive":
            plot.set(ylim=shares)
        plot.set(xlabel="iteration", xlim=(0, 30))
        name_lines(plot, ends, 31.2)


def lambdas() -> Figure:
    """Plot the score and the share of positive reviews for three λ and one advantage per text."""
    figure, (left, right) = panels(2)
    variants = {
        "plain": ("λ = 0.95", BLUE),
        "lambda 0": ("λ = 0", ORANGE),
        "lambda 1": ("λ = 1", GREEN),
        "same for every token": ("same for\nall tokens", PURPLE),
    }
    sweep((left, right), ("score", "positive"), variants, (28, 70))
    left.set(title="score of the reward model, test queries")
    right.set(title="positive reviews by the grammar (%)")
    return figure


def hacking() -> Figure:
    """Plot what the reward model says, what the grammar says, and the KL, for three prices of a nat."""
    figure, (left, middle, right) = panels(3)
    variants = {"beta 0": ("β = 0", ORANGE), "beta 0.3": ("β = 0.3", GREEN), "plain": ("β = 1", BLUE)}
    sweep((left, middle, right), ("score", "positive", "kl"), variants, (0, 100))
    left.set(title="score of the reward model")
    middle.set(title="positive by the grammar (%)")
    right.set(title="KL per text (nats)")
    return figure


def bridge() -> Figure:
    """Plot DDPO with and without a value network, and what that network knew."""
    figure, (left, right) = panels(2)
    rows = read_rows("bridge")
    plain, with_value = (
        [r for r in rows if r["variant"].startswith(name)] for name in ("DDPO", "value, λ = 0.95")
    )
    for mine, color in ((plain, BLUE), (with_value, ORANGE)):
        seeds(left, mine, "epoch", "reward", color)
    left.text(10, 0.12, "one advantage\nper picture", color=BLUE, fontsize=11, ha="right")
    left.text(4.9, 0.53, "value network\nand GAE", color=ORANGE, fontsize=11, ha="right")
    for name, color, y in (("first", MUTED, -0.85), ("last", ORANGE, 0.72)):
        seeds(right, with_value, "epoch", name, color)
        right.text(4.2, y, f"at the {name} denoising step", color=color, fontsize=11, ha="center", va="top")
    right.axhline(0, color=MUTED, linewidth=0.6)
    right.text(10, 0.03, "0 = a constant", color=MUTED, fontsize=9.5, ha="right", va="bottom")
    left.set(title="redness of the pictures", xlabel="epoch")
    right.set(title="share of the reward's variance that the value knows", xlabel="epoch", ylim=(-1.6, 1.05))
    return figure


if __name__ == "__main__":
    experiments = {"05-lambda": lambdas, "05-hacking": hacking, "05-bridge": bridge}
    main({"05-two-mdps": two_mdps, "05-loop": loop, "05-strip": strip, **experiments})
