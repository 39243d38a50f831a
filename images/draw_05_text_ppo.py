"""Draw the figures of lesson 05: two decision processes, the loop, a review in numbers, GAE, experiments."""

import base64
import json
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_hex
from matplotlib.figure import Figure
from plots import (
    BENCHMARKS,
    bar,
    mean_and_paths,
    minus,
    of_seeds,
    panels,
    plain,
    read_rows,
    show_image,
    where,
)
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main, note, title

from ddpo_lessons.text.text_ppo import clipped_value_loss

BLUE, ORANGE, GREEN, PURPLE = PALETTE[:4]
STRIP = json.loads((BENCHMARKS / "text/strip.json").read_text(encoding="utf-8"))
WEIGHTS = LinearSegmentedColormap.from_list("weights", [CARD, "#8fb3e6"])
SHADES = LinearSegmentedColormap.from_list("shades", ["#e8a27c", CARD, "#8fb3e6"])


def two_mdps() -> Figure:
    """Draw a text and an image as the same thing: states, actions with log-probs, a reward at the end."""
    figure, axes = diagram(9.6, 5.3)
    _text_row(axes, STRIP["text"])
    axes.plot([0.3, 9.3], [2.98, 2.98], color=MUTED, linewidth=0.6)
    _image_row(axes, STRIP["image"])
    return figure


def _text_row(axes: Axes, text: dict[str, Any]) -> None:
    title(axes, 0.3, 5.02, "Text PPO: an action is a token", 14.5, ink=BLUE)
    note(axes, 0.3, 4.62, "query", 11.5)
    note(axes, 2.35, 4.62, "response, which the policy ends itself", 11.5)
    assert " ".join(text["query"]) == "honestly , the faces were sloppy"
    box(axes, 0.3, 3.92, 1.95, 0.5, "honestly , the faces\nwere sloppy", edge=MUTED, size=11)
    note(axes, 2.2, 3.66, "log-prob", 11.5, "right")
    label(axes, 2.2, 3.34, "advantage", size=12, ink=BLUE, align="right", weight="bold")
    x = 2.35
    for token, log_prob, advantage in zip(text["tokens"], text["log_prob"], text["advantage"], strict=True):
        width = max(0.46, 0.2 + 0.085 * len(token))
        box(axes, x, 3.92, width, 0.5, token, color=BLUE, size=11)
        label(axes, x + width / 2, 3.66, one_digit(log_prob), size=11)
        label(axes, x + width / 2, 3.34, one_digit(advantage, "+"), size=11.5, weight="bold")
        x += width + 0.05
    arrow(axes, (x, 4.17), (x + 0.3, 4.17))
    label(axes, x + 0.68, 4.28, "reward", size=12, weight="bold")
    label(axes, x + 0.68, 4.02, f"{text['score']:+.2f}", size=12)


def one_digit(number: float, sign: str = "") -> str:
    """Write a number short, with a real minus and no -0.0."""
    return minus(f"{round(number, 1) + 0.0:{sign}.1f}")


def _image_row(axes: Axes, rollout: dict[str, Any]) -> None:
    title(axes, 0.3, 2.62, "DDPO: an action is a denoising step", 14.5, ink=ORANGE)
    note(axes, 9.3, 2.62, f"prompt: “{rollout['prompt']}”; the schedule ends it", 11, "right")
    raw = [np.frombuffer(base64.b64decode(state), dtype=np.uint8) for state in rollout["states"]]
    states = [pixels.reshape(rollout["size"], rollout["size"], 3) for pixels in raw]
    side, gap, low = 1.0, 0.46, 1.3
    names = [f"$x_{{{t}}}$" for t in rollout["timesteps"]] + ["$x_{199}$", "$x_0$"]
    for number, (name, state) in enumerate(zip(names, states, strict=True)):
        x = 0.3 + number * (side + gap)
        show_image(axes, x, low, side, state)
        label(axes, x + side / 2, low - 0.2, name, size=12.5)
        if number + 1 == len(states):
            break
        middle, acts = x + side + gap / 2, number < len(rollout["log_probs"])
        ink = INK if acts else MUTED
        arrow(axes, (x + side + 0.05, low + 0.5), (x + side + gap - 0.04, low + 0.5), ink=ink)
        text = one_digit(rollout["log_probs"][number]) if acts else "no\nnoise"
        label(axes, middle, low + (0.72 if acts else 0.8), text, size=10.5, ink=ink)
        if acts:
            label(axes, middle, 0.72, one_digit(rollout["advantage"], "+"), size=12, weight="bold")
    label(axes, 0.3, 0.72, "advantage", size=11, ink=ORANGE, align="left", weight="bold")
    label(axes, 6.3, 0.72, "the same for all steps", size=11.5, align="left")
    red, green, blue = states[-1].mean((0, 1)) / 255
    label(axes, 9.05, low + 0.62, "reward", size=12, weight="bold")
    label(axes, 9.05, low + 0.36, f"{blue - (red + green) / 2:+.2f}", size=12)
    rewarded = "Reward: how blue it is, compared with 32 images of this prompt."
    note(axes, 0.3, 0.3, f"On the arrows: log-probs (means over 256 elements). {rewarded}", 10.5)


def loop() -> Figure:
    """Draw one iteration: inputs and outputs of the four models, and what the gradient changes."""
    figure, axes = diagram(9.6, 4.9)
    title(axes, 0.3, 4.68, "One iteration of text PPO", 14)
    box(axes, 0.3, 3.5, 1.6, 0.75, "query\n“the plot”", edge=MUTED, size=11.5)
    box(axes, 2.65, 3.5, 1.85, 0.75, "policy\n(trained)", color=BLUE, weight="bold", size=12)
    box(axes, 5.2, 3.5, 4.1, 0.75, "query + response\n“the plot was not dull . <eos>”", edge=MUTED, size=11.5)
    arrow(axes, (1.9, 3.87), (2.65, 3.87))
    arrow(axes, (4.5, 3.87), (5.2, 3.87))
    note(axes, 4.85, 4.08, "sample", 11, "center")
    columns = (
        (0.75, "policy\nas it sampled", BLUE, "log-probs"),
        (2.9, "reference\n(frozen copy)", PURPLE, "its log-probs"),
        (5.05, "reward model\n(frozen)", ORANGE, "score per text"),
        (7.35, "value model\n(trained)", GREEN, "values"),
    )
    for x, name, color, gives in columns:
        box(axes, x, 2.3, 1.95, 0.72, name, color=color, size=11.5)
        arrow(axes, (x + 0.975, 2.3), (x + 0.975, 1.42))
        label(axes, x + 1.05, 1.88, gives, size=11, align="left")
        arrow(axes, (x + 0.975, 3.26), (x + 0.975, 3.02), ink=MUTED, width=0.9)
    axes.plot([1.725, 8.325], [3.26, 3.26], color=MUTED, linewidth=0.9)
    axes.plot([7.25, 7.25], [3.26, 3.5], color=MUTED, linewidth=0.9)
    rewards = "a reward for every token: − β · KL,\nplus the score for the last one"
    box(axes, 0.75, 0.72, 6.25, 0.7, rewards, edge=MUTED, size=11.5)
    box(axes, 7.35, 0.72, 1.95, 0.7, "GAE, then the\nclipped losses", edge=MUTED, size=11.5)
    arrow(axes, (7.0, 1.07), (7.35, 1.07))
    axes.plot([9.3, 9.45, 9.45, 3.575], [1.07, 1.07, 4.45, 4.45], color=BLUE, linewidth=1.6)
    arrow(axes, (3.575, 4.45), (3.575, 4.25), ink=BLUE, width=1.6)
    arrow(axes, (9.45, 2.66), (9.3, 2.66), ink=BLUE, width=1.6)
    what = "The gradient (blue) changes the policy and the value model. Then the next queries follow."
    note(axes, 4.8, 0.32, what, 11, "center")
    return figure


def strip() -> Figure:
    """Draw every number that text PPO makes of one review, token by token."""
    text = dict(STRIP["text"])
    text["before"] = [0.0] * (len(text["tokens"]) - 1) + [text["score"]]
    rows = (
        ("before", "$r_j$ before the first update"),
        ("log_prob", r"log $\pi_\theta$"), ("ref_log_prob", r"log $\pi_\mathrm{ref}$"),
        ("kl", "KL, their difference"), ("reward", r"$r_j$ = − KL, score at the end"),
        ("value", r"$V_j$, before the token"), ("delta", r"$\delta_j = r_j + V_{j+1} - V_j$"),
        ("advantage", r"$A_j = \delta_j + 0.95\, A_{j+1}$"), ("return", r"$R_j = A_j + V_j$"),
    )  # fmt: skip
    figure, axes = diagram(9.6, 5.27)
    left, width, height, top = 3.0, 0.645, 0.4, 4.07
    title(axes, 0.3, 4.97, f"query: {' '.join(text['query'])}", 13)
    note(axes, 9.45, 4.97, f"score of the whole review {text['score']:+.2f}", 11.5, "right")
    for column, token in enumerate(text["tokens"]):
        box(axes, left + column * width, top + 0.08, width, 0.44, token[:7], color=BLUE, size=10.5)
    for number, (name, meaning) in enumerate(rows):
        y = top - (number + 1) * height - 0.12 * ((number >= 1) + (number >= 5))
        label(axes, left - 0.12, y + height / 2, meaning, size=11.5, align="right")
        heavy = "bold" if name in ("value", "advantage") else "normal"
        for column, value in enumerate(text[name]):
            shade = SHADES(0.5 + 0.5 * max(-1.0, min(1.0, value / 3.6)))
            number = f"{value:+.2f}" if value else "0"
            _cell(axes, left + column * width, y, width, height, shade, number, weight=heavy)
    return figure


def _cell(
    axes: Axes, x: float, y: float, width: float, height: float, shade: Any, text: str, **style: Any
) -> None:
    bar(axes, x + 0.015, y + 0.015, width - 0.03, height - 0.03, to_hex(shade), edgecolor="none")
    label(axes, x + width / 2, y + height / 2, minus(text), size=10.5, **style)


def weights() -> Figure:
    """Draw how much of each TD error GAE gives to the strip's first token, for four λ."""
    text = STRIP["text"]
    figure, axes = diagram(9.6, 3.2)
    left, width, height, top = 2.0, 0.645, 0.4, 2.25
    title(axes, 0.3, 2.98, f"The advantage of the “,” after “{' '.join(text['query'])}”", 13)
    label(axes, left + 10 * width + 0.45, top + 0.3, "$A_1$", size=11, weight="bold")
    for column, token in enumerate(text["tokens"]):
        box(axes, left + column * width, top + 0.08, width, 0.44, token[:7], color=BLUE, size=10.5)
    rows = [(r"$\delta_j$, the TD errors", text["delta"], SHADES, 3.6)]
    for lam in (0.0, 0.5, 0.95, 1.0):
        rows.append((f"weights, λ = {lam:g}", [lam**step for step in range(10)], WEIGHTS, 1.0))
    for number, (name, values, shades, limit) in enumerate(rows):
        y = top - (number + 1) * height - (0.08 if number else 0)
        label(axes, left - 0.12, y + height / 2, name, size=11.5, align="right")
        for column, value in enumerate(values):
            share = value / limit if number else 0.5 + 0.5 * value / limit
            shown = (f"{value:.2f}" if number else f"{value:+.2f}") if value else "0"
            _cell(axes, left + column * width, y, width, height, shades(share), shown)
        if number:
            total = sum(weight * delta for weight, delta in zip(values, text["delta"], strict=True))
            x = left + 10 * width + 0.45
            label(axes, x, y + height / 2, f"{total:+.2f}", size=11, weight="bold")
    return figure


def hacking() -> Figure:
    """Plot the score and the positive reviews over the distance from the reference."""
    figure, plots = panels(2, (9.6, 3.6))
    plain(*plots, labelsize=12)
    names = {"beta 0": ("β = 0", ORANGE), "beta 0.3": ("β = 0.3", GREEN), "plain": ("β = 1", BLUE)}
    places = {"plain": (-0.1, "right"), "beta 0.3": (0.2, "left"), "beta 0": (0.2, "left")}
    for plot, column, scale in zip(plots, ("score", "positive"), (1, 100), strict=True):
        for variant, (text, color) in names.items():
            runs = of_seeds(where(read_rows("text/sweep.csv"), variant=variant), "kl", column)
            paths = [np.stack([kl**0.5, scale * value], axis=1) for kl, value in (run.T for run in runs)]
            x, y = mean_and_paths(plot, paths, color, thin=0.5, alpha=0.3, marker="o", markersize=4)[-1]
            aside, align = places[variant]
            plot.text(x + aside, y, text, color=color, fontsize=13, weight="bold", va="bottom", ha=align)
        plot.set_xlabel("√KL to the reference, per text (√nats)", fontsize=12)
        plot.set_xlim(0, 5.2)
    plots[0].set_title("score of the reward model", fontsize=13)
    plots[1].set_title("positive reviews by the grammar (%)", fontsize=13)
    plots[1].set_ylim(0, 80)
    return figure


def value_clip() -> Figure:
    """Plot the clipped value loss over the new value, for a return outside the clip range and one inside."""
    figure, plots = panels(2, (9.6, 3.4), sharey=True)
    plain(*plots, labelsize=12)
    values = torch.linspace(-2.2, 4.2, 200)
    for plot, returns in zip(plots, (2.0, 0.5), strict=True):
        target = torch.full_like(values, returns)
        squared = 0.5 * (values - target).square()
        clipped = clipped_value_loss(values, torch.zeros_like(values), target, clip_range=1.0)
        plot.axvspan(-1, 1, color="#8fb3e6", alpha=0.25, linewidth=0)
        plot.plot(values, squared, color=MUTED, linewidth=1.4, linestyle="--")
        plot.plot(values, clipped, color=ORANGE, linewidth=2.4)
        plot.axvline(returns, color=BLUE, linewidth=1.2)
        plot.text(returns + 0.08, 3.0, f"return {returns:g}", color=BLUE, fontsize=12.5)
        plot.set_ylim(-0.1, 3.8)
        plot.set_xlabel("new value $V_j$ (the old one is 0)", fontsize=12)
    plots[0].set_title("the return is outside the range", fontsize=13)
    plots[0].set_ylabel("loss", fontsize=12)
    plots[1].set_title("the return is inside the range", fontsize=13)
    plots[0].text(-0.95, 0.1, "old value ± 1", color=MUTED, fontsize=12)
    plots[0].text(1.05, 0.62, "no gradient", color=ORANGE, fontsize=12.5, weight="bold")
    plots[1].text(1.8, 0.2, "nothing changes", color=ORANGE, fontsize=12.5, weight="bold")
    return figure


def bridge() -> Figure:
    """Plot DDPO with four kinds of advantages: over epochs, over learning rates, and over steps."""
    figure, (left, middle, right) = panels(3, (9.6, 3.8))
    plain(left, middle, right, labelsize=11.5)
    names = {"one advantage": ("one advantage", BLUE), "value": ("value network, GAE", ORANGE)}
    names |= {"falling": ("fixed, falling", GREEN), "rising": ("fixed, rising", MUTED)}
    steps = range(1, 8)
    for variant, (_, color) in names.items():
        mine = where(read_rows("text/bridge.csv"), variant=variant)
        runs = of_seeds(where(mine, learning_rate="0.0002"), "epoch", "reward")
        mean_and_paths(left, runs, color)
        rates = sorted({float(row["learning_rate"]) for row in mine})
        ends = [late_redness(mine, rate) for rate in rates]
        middle.plot(
            rates, [np.mean(end) for end in ends], color=color, linewidth=2.2, marker="o", markersize=4
        )
        lows, highs = [min(end) for end in ends], [max(end) for end in ends]
        middle.fill_between(rates, lows, highs, color=color, alpha=0.15, linewidth=0)
        sizes = [[float(row[f"weight {step}"] or 1) for step in steps] for row in mine]  # empty: one for all
        right.plot(steps, np.mean(sizes, axis=0), color=color, linewidth=2.2)
    left.set(ylim=(-0.05, 0.8))
    middle.set(ylim=(-0.05, 0.8), xscale="log")
    middle.set_xticks([1e-4, 2e-4, 4e-4, 8e-4], ["1e-4", "2e-4", "4e-4", "8e-4"])
    middle.minorticks_off()
    for line, (text, color) in enumerate(names.values()):
        middle.text(1.05e-4, 0.21 - 0.07 * line, text, color=color, fontsize=12, weight="bold")
    right.set(xticks=list(steps), ylim=(0, 1.7))
    texts = {
        left: ("redness at 2e-4", "epoch"),
        middle: ("redness, epochs 8 to 10", "learning rate"),
        right: ("size of the advantages", "denoising step"),
    }
    for axes, (heading, under) in texts.items():
        axes.set_title(heading, fontsize=13)
        axes.set_xlabel(under, fontsize=12)
    return figure


def late_redness(rows: list[dict[str, str]], rate: float) -> list[float]:
    """Return the mean reward of epochs 8 to 10 of each seed at a learning rate."""
    mine = [row for row in rows if float(row["learning_rate"]) == rate and int(row["epoch"]) >= 8]
    return [float(run.mean()) for run in of_seeds(mine, "reward")]


if __name__ == "__main__":
    drawn = {"05-two-mdps": two_mdps, "05-loop": loop, "05-strip": strip, "05-gae": weights}
    main({**drawn, "05-value-clip": value_clip, "05-hacking": hacking, "05-bridge": bridge})
