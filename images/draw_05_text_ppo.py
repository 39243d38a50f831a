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
    figure, axes = diagram(6, 6.2)
    _text_row(axes, STRIP["text"])
    axes.plot([0.1, 5.9], [2.98, 2.98], color=MUTED, linewidth=0.6)
    _image_row(axes, STRIP["image"])
    return figure


def _text_row(axes: Axes, text: dict[str, Any]) -> None:
    title(axes, 0.1, 5.98, "Text PPO: an action is a token", 14, ink=BLUE)
    note(axes, 0.1, 5.66, f"query: “{' '.join(text['query'])}”")
    note(axes, 0.1, 5.38, "response, which the policy ends itself:")
    numbers = list(zip(text["tokens"], text["log_prob"], text["advantage"], strict=True))
    for line, top in enumerate((4.8, 3.73)):
        note(axes, 1.08, top - 0.17, "log-prob", align="right")
        label(axes, 1.08, top - 0.47, "advantage", ink=BLUE, align="right", weight="bold", size=12)
        for column, (token, log_prob, advantage) in enumerate(numbers[5 * line : 5 * line + 5]):
            x = 1.22 + 0.79 * column
            box(axes, x, top, 0.75, 0.4, token, color=BLUE)
            label(axes, x + 0.375, top - 0.17, one_digit(log_prob))
            label(axes, x + 0.375, top - 0.47, one_digit(advantage, "+"), weight="bold")
    arrow(axes, (5.17, 3.93), (5.37, 3.93))
    label(axes, 5.64, 3.93, "end", size=12.5)
    label(axes, 5.9, 5.38, f"reward {text['score']:+.2f}", weight="bold", align="right")


def one_digit(number: float, sign: str = "") -> str:
    """Write a number short, with a real minus and no -0.0."""
    return minus(f"{round(number, 1) + 0.0:{sign}.1f}")


def _image_row(axes: Axes, rollout: dict[str, Any]) -> None:
    title(axes, 0.1, 2.75, "DDPO: an action is a denoising step", 14, ink=ORANGE)
    note(axes, 0.1, 2.44, f"prompt: “{rollout['prompt']}”")
    raw = [np.frombuffer(base64.b64decode(state), dtype=np.uint8) for state in rollout["states"]]
    states = [pixels.reshape(rollout["size"], rollout["size"], 3) for pixels in raw]
    side, pitch, low = 0.6, 0.81, 1.63
    names = [f"$x_{{{t}}}$" for t in rollout["timesteps"]] + ["$x_{199}$", "$x_0$"]
    note(axes, 1.12, 1.1, "log-prob", align="right")
    label(axes, 1.12, 0.82, "advantage", ink=ORANGE, align="right", weight="bold", size=12)
    for number, (name, state) in enumerate(zip(names, states, strict=True)):
        x = 1.2 + number * pitch
        show_image(axes, x, low, side, state)
        label(axes, x + side / 2, low - 0.22, name, size=14)
        if number + 1 == len(states):
            break
        middle, acts = x + (side + pitch) / 2, number < len(rollout["log_probs"])
        arrow(axes, (x + side + 0.03, low + 0.3), (x + pitch - 0.02, low + 0.3), ink=INK if acts else MUTED)
        if acts:
            label(axes, middle, 1.1, one_digit(rollout["log_probs"][number]))
            label(axes, middle, 0.82, one_digit(rollout["advantage"], "+"), weight="bold")
    note(axes, 5.15, 0.98, "no\nnoise", align="center")
    red, green, blue = states[-1].mean((0, 1)) / 255
    label(axes, 5.9, 2.44, f"reward {blue - (red + green) / 2:+.2f}", weight="bold", align="right")
    note(axes, 0.1, 0.48, "log-probs: means over 256 elements")
    note(axes, 0.1, 0.2, "reward: how blue, compared with 32 images of the prompt", 12.5)


def loop() -> Figure:
    """Draw one iteration: inputs and outputs of the four models, and what the gradient changes."""
    figure, axes = diagram(6, 7.5)
    title(axes, 0.1, 7.27, "One iteration of text PPO", 14)
    box(axes, 0.65, 6.55, 3.0, 0.45, "query “the plot”", edge=MUTED)
    box(axes, 0.65, 5.8, 3.0, 0.5, "policy (trained)", color=BLUE, weight="bold")
    box(axes, 0.65, 4.8, 4.6, 0.67, "query + response\n“the plot was not dull . <eos>”", edge=MUTED)
    arrow(axes, (2.15, 6.55), (2.15, 6.3))
    arrow(axes, (2.15, 5.8), (2.15, 5.47))
    note(axes, 2.3, 5.63, "sample")
    rows = (
        ("policy as it sampled", BLUE, "log-probs"),
        ("reference (frozen copy)", PURPLE, "its log-probs"),
        ("reward model (frozen)", ORANGE, "score per text"),
        ("value model (trained)", GREEN, "values"),
    )
    axes.plot([0.42, 0.42, 0.65], [2.43, 5.13, 5.13], color=MUTED, linewidth=1)
    for number, (name, color, gives) in enumerate(rows):
        y = 4.02 - 0.6 * number
        box(axes, 0.65, y, 2.55, 0.46, name, color=color)
        arrow(axes, (0.42, y + 0.23), (0.65, y + 0.23), ink=MUTED, width=1)
        label(axes, 3.35, y + 0.23, gives, align="left")
        x = 5.1 if number < 3 else 5.5
        axes.plot([4.75, x] if number < 3 else [4.05, x], [y + 0.23] * 2, color=INK, linewidth=1.2)
    axes.plot([5.1, 5.1], [2.1, 4.25], color=INK, linewidth=1.2)
    arrow(axes, (5.1, 2.1), (5.1, 1.87))
    box(
        axes,
        0.65,
        1.2,
        4.6,
        0.67,
        "a reward for every token: − β · KL,\nplus the score for the last one",
        edge=MUTED,
    )
    box(axes, 0.65, 0.5, 5.0, 0.45, "GAE, then the clipped losses", edge=MUTED)
    arrow(axes, (3.0, 1.2), (3.0, 0.95))
    axes.plot([5.5, 5.5], [1.2, 2.45], color=INK, linewidth=1.2)
    arrow(axes, (5.5, 1.2), (5.5, 0.95))
    axes.plot([0.65, 0.18, 0.18], [0.72, 0.72, 6.05], color=BLUE, linewidth=1.6)
    arrow(axes, (0.18, 6.05), (0.65, 6.05), ink=BLUE, width=1.6)
    arrow(axes, (0.18, 2.33), (0.65, 2.33), ink=BLUE, width=1.6)
    note(axes, 0.1, 0.22, "Blue: the gradient changes policy and value model.")
    return figure


def strip() -> Figure:
    """Draw every number that text PPO makes of one review: a row for each token."""
    text = dict(STRIP["text"])
    text["before"] = [0.0] * (len(text["tokens"]) - 1) + [text["score"]]
    columns = (
        ("before", "$r_j$ at\nfirst"), ("log_prob", "log\n" + r"$\pi_\theta$"),
        ("ref_log_prob", "log\n" + r"$\pi_\mathrm{ref}$"), ("kl", "KL"), ("reward", "$r_j$"),
        ("value", "$V_j$"), ("delta", r"$\delta_j$"), ("advantage", "$A_j$"), ("return", "$R_j$"),
    )  # fmt: skip
    figure, axes = diagram(6, 6.35)
    left, width, height, top = 0.76, 0.572, 0.33, 4.95
    title(axes, 0.1, 6.13, f"query: {' '.join(text['query'])}")
    note(axes, 0.1, 5.82, f"score of the whole review {text['score']:+.2f}")
    for row, token in enumerate(text["tokens"]):
        box(axes, 0.05, top - (row + 1) * height, 0.67, height, token, color=BLUE, size=12)
    for number, (name, meaning) in enumerate(columns):
        x = left + number * width + 0.04 * ((number >= 1) + (number >= 5)) - 0.02
        label(axes, x + width / 2, top + 0.28, meaning, size=12.5)
        heavy = {"weight": "bold", "size": 11.5} if name in ("value", "advantage") else {}
        for row, value in enumerate(text[name]):
            shade = SHADES(0.5 + 0.5 * max(-1.0, min(1.0, value / 3.6)))
            number = f"{value:+.2f}" if value else "0"
            _cell(axes, x, top - (row + 1) * height, width, height, shade, number, **heavy)
    meanings = (
        "$r_j$ at first: rewards before the first update",
        r"KL = log $\pi_\theta$ − log $\pi_\mathrm{ref}$;  $r_j$ = − KL, plus the score at the end",
        r"$V_j$: value before the token;  $\delta_j = r_j + V_{j+1} - V_j$",
        r"$A_j = \delta_j + 0.95\, A_{j+1}$;  $R_j = A_j + V_j$",
    )
    for line, meaning in enumerate(meanings):
        note(axes, 0.1, 1.25 - 0.33 * line, meaning)
    return figure


def _cell(
    axes: Axes, x: float, y: float, width: float, height: float, shade: Any, text: str, **style: Any
) -> None:
    bar(axes, x + 0.01, y + 0.01, width - 0.02, height - 0.02, to_hex(shade), edgecolor="none")
    label(axes, x + width / 2, y + height / 2, minus(text), **{"size": 12, **style})


def weights() -> Figure:
    """Draw how much of each TD error GAE gives to the strip's first token, for four λ."""
    text = STRIP["text"]
    figure, axes = diagram(6, 5.15)
    left, width, height, top = 1.2, 0.94, 0.33, 3.75
    title(axes, 0.1, 4.95, f"Advantage of “,” after “{' '.join(text['query'])}”", 12)
    columns = [(r"$\delta_j$, the" "\nTD errors", text["delta"], SHADES, 3.6)]
    for lam in (0.0, 0.5, 0.95, 1.0):
        columns.append((f"λ = {lam:g}", [lam**step for step in range(10)], WEIGHTS, 1.0))
    note(axes, left + 3 * width, top + 0.62, "weights", align="center")
    for row, token in enumerate(text["tokens"]):
        box(axes, 0.1, top - (row + 1) * height, 0.95, height, token, color=BLUE)
    label(axes, 0.58, 0.2, "$A_1$", weight="bold", size=14)
    for number, (name, values, shades, limit) in enumerate(columns):
        x = left + number * width + (0.05 if number else 0)
        label(axes, x + width / 2, top + (0.25 if number else 0.35), name)
        for row, value in enumerate(values):
            share = value / limit if number else 0.5 + 0.5 * value / limit
            shown = (f"{value:.2f}" if number else f"{value:+.2f}") if value else "0"
            _cell(axes, x, top - (row + 1) * height, width, height, shades(share), shown, size=13)
        if number:
            total = sum(weight * delta for weight, delta in zip(values, text["delta"], strict=True))
            label(axes, x + width / 2, 0.2, f"{total:+.2f}", weight="bold")
    return figure


def hacking() -> Figure:
    """Plot the score and the positive reviews over the distance from the reference."""
    figure, plots = panels(2, (6, 6), stacked=True)
    plain(*plots, labelsize=13)
    names = {"beta 0": ("β = 0", ORANGE), "beta 0.3": ("β = 0.3", GREEN), "plain": ("β = 1", BLUE)}
    places = {"plain": (-0.1, "right"), "beta 0.3": (0.2, "left"), "beta 0": (0.2, "left")}
    for plot, column, scale in zip(plots, ("score", "positive"), (1, 100), strict=True):
        for variant, (text, color) in names.items():
            runs = of_seeds(where(read_rows("text/sweep.csv"), variant=variant), "kl", column)
            paths = [np.stack([kl**0.5, scale * value], axis=1) for kl, value in (run.T for run in runs)]
            x, y = mean_and_paths(plot, paths, color, thin=0.5, alpha=0.3, marker="o", markersize=4)[-1]
            aside, align = places[variant]
            plot.text(x + aside, y, text, color=color, weight="bold", va="bottom", ha=align)
        plot.set_xlabel("√KL to the reference, per text (√nats)")
        plot.set_xlim(0, 5.2)
    plots[0].set_title("score of the reward model")
    plots[1].set_title("positive reviews by the grammar (%)")
    plots[1].set_ylim(0, 80)
    return figure


def value_clip() -> Figure:
    """Plot the clipped value loss over the new value, for a return outside the clip range and one inside."""
    figure, plots = panels(2, (6, 5.6), stacked=True, sharex=True, sharey=True)
    plain(*plots, labelsize=13)
    values = torch.linspace(-2.2, 4.2, 200)
    for plot, returns in zip(plots, (2.0, 0.5), strict=True):
        target = torch.full_like(values, returns)
        squared = 0.5 * (values - target).square()
        clipped = clipped_value_loss(values, torch.zeros_like(values), target, clip_range=1.0)
        plot.axvspan(-1, 1, color="#8fb3e6", alpha=0.25, linewidth=0)
        plot.plot(values, squared, color=MUTED, linewidth=1.4, linestyle="--")
        plot.plot(values, clipped, color=ORANGE, linewidth=2.4)
        plot.axvline(returns, color=BLUE, linewidth=1.2)
        plot.text(returns + 0.08, 3.0, f"return {returns:g}", color=BLUE)
        plot.set_ylim(-0.1, 3.8)
        plot.set_xlabel("new value $V_j$ (the old one is 0)")
    plots[0].set_title("the return is outside the range")
    plots[0].set_ylabel("loss")
    plots[1].set_title("the return is inside the range")
    plots[0].text(-0.95, 0.1, "old value ± 1", color=MUTED)
    plots[0].text(1.05, 0.62, "no gradient", color=ORANGE, weight="bold")
    plots[1].text(1.8, 0.2, "nothing changes", color=ORANGE, weight="bold")
    return figure


def bridge() -> Figure:
    """Plot DDPO with four kinds of advantages: redness over learning rates, and their size over steps."""
    figure, (upper, lower) = panels(2, (6, 6.2), stacked=True, height_ratios=(3, 2))
    plain(upper, lower, labelsize=13)
    names = {"one advantage": ("one advantage", BLUE), "value": ("value, GAE", ORANGE)}
    names |= {"falling": ("fixed, falling", GREEN), "rising": ("fixed, rising", MUTED)}
    steps = range(1, 8)
    for variant, (name, color) in names.items():
        mine = where(read_rows("text/bridge.csv"), variant=variant)
        rates = sorted({float(row["learning_rate"]) for row in mine})
        ends = [np.mean(late_redness(mine, rate)) for rate in rates]
        sizes = [[float(row[f"weight {step}"] or 1) for step in steps] for row in mine]  # empty: one for all
        for axes, x, y in ((upper, rates, ends), (lower, list(steps), np.mean(sizes, axis=0))):
            axes.plot(x, y, "o-", color=color, linewidth=2.2, markersize=5)
        upper.text(0.94 * rates[0], ends[0], name, color=color, ha="right", va="center")
        lower.text(7.2, np.mean(sizes, axis=0)[-1], name, color=color, va="center")
    upper.set(xlim=(3.6e-5, 8.6e-4), ylim=(0, 0.8), xscale="log")
    upper.set_xticks([1e-4, 2e-4, 4e-4, 8e-4], ["1e-4", "2e-4", "4e-4", "8e-4"])
    upper.minorticks_off()
    lower.set(xticks=list(steps), xlim=(0.7, 9.4), ylim=(0, 1.7))
    for axes, heading, under in (
        (upper, "redness, epochs 8 to 10", "learning rate"),
        (lower, "size of the advantages", "denoising step"),
    ):
        axes.set_title(heading)
        axes.set_xlabel(under)
    return figure


def late_redness(rows: list[dict[str, str]], rate: float) -> list[float]:
    """Return the mean reward of epochs 8 to 10 of each seed at a learning rate."""
    mine = [row for row in rows if float(row["learning_rate"]) == rate and int(row["epoch"]) >= 8]
    return [float(run.mean()) for run in of_seeds(mine, "reward")]


if __name__ == "__main__":
    drawn = {"05-two-mdps": two_mdps, "05-loop": loop, "05-strip": strip, "05-gae": weights}
    main({**drawn, "05-value-clip": value_clip, "05-hacking": hacking, "05-bridge": bridge})
