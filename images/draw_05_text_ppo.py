"""Draw the diagrams of lesson 05: the loop of the four models, and two decision processes side by side."""

from __future__ import annotations

import csv
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import CARD, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE = PALETTE[:4]


def loop() -> Figure:
    """Draw one iteration: what each of the four models receives and gives."""
    figure, axes = diagram(9.6, 5.0)
    label(axes, 0.3, 4.72, "One iteration of text PPO", weight="bold", size=12, align="left")
    box(axes, 0.3, 3.35, 1.75, 0.8, "query\n“the plot”", edge=MUTED)
    box(axes, 2.75, 3.35, 1.75, 0.8, "policy\n(trained)", color=BLUE, weight="bold")
    box(axes, 5.2, 3.35, 4.1, 0.8, "query + response\n“the plot was not dull . <eos>”", edge=MUTED)
    arrow(axes, (2.05, 3.75), (2.75, 3.75))
    arrow(axes, (4.5, 3.75), (5.2, 3.75))
    label(axes, 4.85, 3.98, "sample", size=9, ink=MUTED)

    columns = (
        (0.3, "policy\nas it sampled", BLUE, "log-probs"),
        (2.65, "reference\n(frozen copy)", PURPLE, "its log-probs"),
        (5.0, "reward model\n(frozen)", ORANGE, "one score a text"),
        (7.35, "value model\n(trained)", GREEN, "values"),
    )
    for x, name, color, gives in columns:
        box(axes, x, 2.15, 1.95, 0.72, name, color=color, size=9.5)
        arrow(axes, (x + 0.975, 2.15), (x + 0.975, 1.78))
        label(axes, x + 0.975, 1.64, gives, size=9.5)
        arrow(axes, (x + 0.975, 1.5), (x + 0.975, 1.24))
        arrow(axes, (7.25, 3.35), (x + 0.975, 2.87), ink=MUTED, width=0.9)
    rewards = "a reward for every token: − kl_coef · KL,\nand the score on the last one"
    box(axes, 0.3, 0.55, 6.65, 0.69, rewards, edge=MUTED, size=9.5)
    box(axes, 7.35, 0.55, 1.95, 0.69, "GAE, then the\nclipped losses", edge=MUTED, size=9.5)
    arrow(axes, (6.95, 0.9), (7.35, 0.9))
    label(
        axes,
        4.8,
        0.25,
        "the gradient goes to policy and value model; then the next queries",
        size=9.5,
        ink=MUTED,
    )
    return figure


def two_mdps() -> Figure:
    """Draw text and denoising as the same thing: states, actions, and a reward at the end."""
    figure, axes = diagram(9.6, 4.9)
    rows = (
        (
            2.62,
            BLUE,
            "Text: a token is an action",
            ("the plot", "the plot was", "… was fun .", "… fun . <eos>"),
            ("“was”", "… “.”", "“<eos>”"),
            "categorical over the vocabulary, the policy ends the episode, a KL price on every token",
        ),
        (
            0.25,
            ORANGE,
            "DDPO: a denoising step is an action",
            ("x₈\n(noise)", "x₇", "x₁", "x₀\n(image)"),
            ("x₇", "… x₁", "x₀"),
            "Gaussian around a predicted mean, the schedule ends the episode, no price but the clip range",
        ),
    )
    for y, color, title, states, actions, note in rows:
        label(axes, 0.3, y + 1.95, title, weight="bold", size=12, align="left", ink=color)
        for index, state in enumerate(states):
            x = 0.3 + 2.05 * index
            box(
                axes,
                x,
                y + 0.7,
                1.35,
                0.75,
                state,
                color=color if index in (0, 3) else CARD,
                edge=color,
                size=9,
            )
            if index < 3:
                arrow(axes, (x + 1.35, y + 1.07), (x + 2.05, y + 1.07))
                label(axes, x + 1.7, y + 1.62, "action", size=9, ink=MUTED)
                label(axes, x + 1.7, y + 1.3, actions[index], size=9)
        arrow(axes, (7.8, y + 1.07), (8.25, y + 1.07))
        label(axes, 8.85, y + 1.2, "reward", size=10, weight="bold")
        label(axes, 8.85, y + 0.92, "at the end", size=9, ink=MUTED)
        label(axes, 0.3, y + 0.35, note, size=9.5, ink=MUTED, align="left")
    axes.plot([0.3, 9.3], [2.55, 2.55], color=MUTED, linewidth=0.6)
    return figure


def read_rows(name: str) -> list[dict[str, str]]:
    """Read the points of an experiment."""
    path = Path(__file__).parents[1] / "benchmarks" / "text" / f"{name}.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def panels(count: int, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """Make a card with empty plots side by side."""
    figure = Figure(figsize=(9.6, height), facecolor=CARD, layout="constrained")
    axes = list(figure.subplots(1, count))
    for plot in axes:
        plot.set_facecolor(CARD)
        plot.spines[["top", "right"]].set_visible(False)
    return figure, axes


def kl_sweep() -> Figure:
    """Plot score and parse rate of every coefficient against its KL, and what was really wanted."""
    figure, (left, middle, right) = panels(3)
    rows = read_rows("kl_sweep")
    coefficients = sorted({row["kl_coef"] for row in rows}, key=float)
    for color, coefficient in zip(PALETTE, coefficients, strict=False):
        mine = [row for row in rows if row["kl_coef"] == coefficient]
        column = {name: [float(row[name]) for row in mine] for name in mine[0]}
        style = {"color": color, "marker": "o", "markersize": 4, "label": f"β = {float(coefficient):g}"}
        left.plot(column["kl"], column["score"], **style)
        middle.plot(column["kl"], [100 * share for share in column["parses"]], **style)
        right.plot(column["iteration"], [100 * share for share in column["positive"]], **style)
    left.set(title="score of the reward model", xlabel="KL per text (nats)")
    middle.set(title="texts that parse (%)", xlabel="KL per text (nats)", ylim=(0, 103))
    right.set(title="really positive reviews (%)", xlabel="iteration", ylim=(0, 103))
    left.legend(fontsize=9)
    return figure


def trl() -> Figure:
    """Plot TRL's run beside ours."""
    figure, (left, right) = panels(2)
    rows = read_rows("trl_ppo")
    for color, name in zip(PALETTE, ("ours", "TRL 1.12"), strict=False):
        mine = [row for row in rows if row["trainer"] == name]
        seconds = 1000 * float(mine[-1]["seconds"]) / float(mine[-1]["samples"])
        samples = [int(row["samples"]) for row in mine]
        style = {"color": color, "marker": "o", "markersize": 4}
        text = f"{name}: {seconds:.0f} CPU ms a sample"
        left.plot(samples, [float(row["score"]) for row in mine], label=text, **style)
        right.plot(samples, [100 * float(row["parses"]) for row in mine], **style)
    left.set(title="held-out score", xlabel="samples")
    right.set(title="texts that parse (%)", xlabel="samples", ylim=(0, 103))
    left.legend(fontsize=9)
    return figure


def bridge() -> Figure:
    """Plot DDPO with and without a value network: mean and range of the seeds, and what the value knew."""
    figure, (left, right) = panels(2)
    rows = read_rows("bridge")
    for color, variant in zip(PALETTE, dict.fromkeys(row["variant"] for row in rows), strict=False):
        mine = [row for row in rows if row["variant"] == variant]
        epochs = sorted({int(row["epoch"]) for row in mine})
        points = {e: [float(row["reward"]) for row in mine if int(row["epoch"]) == e] for e in epochs}
        left.plot(epochs, [sum(p) / len(p) for p in points.values()], color=color, label=variant)
        low, high = ([bound(p) for p in points.values()] for bound in (min, max))
        left.fill_between(epochs, low, high, color=color, alpha=0.12, linewidth=0)
        for name, dashes in (("first", ":"), ("last", "-")):
            known = [[float(r[name]) for r in mine if int(r["epoch"]) == e and r[name]] for e in epochs]
            if known[0] and variant.endswith("0.95"):
                means = [sum(k) / len(k) for k in known]
                right.plot(epochs, means, dashes, color=color, label=f"at the {name} step")
    left.set(title="redness of the images (mean and range of three seeds)", xlabel="epoch")
    right.set(title="share of the reward's variance that the value knows", xlabel="epoch", ylim=(-1.2, 1))
    left.legend(fontsize=9)
    right.legend(fontsize=9)
    return figure


if __name__ == "__main__":
    experiments = {"05-kl-sweep": kl_sweep, "05-trl": trl, "05-bridge": bridge}
    main({"05-loop": loop, "05-two-mdps": two_mdps, **experiments})
