"""Diagrams of lesson 03: the denoising MDP, the parts of one step, and sampling beside replaying."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from style import CARD, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE = PALETTE[:4]


def mdp() -> Figure:
    """States above, actions between them, the reward at the end."""
    figure, axes = diagram(9.4, 3.9)
    label(axes, 0.25, 3.62, "One rollout: T decisions, one reward", weight="bold", size=12, align="left")
    states = [(0.3, "s$_T$", "prompt, T, x$_T$"), (3.2, "s$_{t}$", "prompt, t, x$_t$")]
    states += [(6.1, "s$_{t-1}$", "prompt, t−1, x$_{t-1}$")]
    for x, name, content in states:
        box(axes, x, 2.15, 1.75, 0.95, f"state {name}\n{content}", color=BLUE)
    label(axes, 2.62, 2.63, "…", size=16)
    arrow(axes, (2.05, 2.63), (2.42, 2.63))
    arrow(axes, (2.83, 2.63), (3.2, 2.63))
    arrow(axes, (4.95, 2.63), (6.1, 2.63))
    arrow(axes, (7.85, 2.63), (8.15, 2.63))
    label(axes, 5.52, 2.92, "prompt stays,", ink=MUTED, size=9)
    label(axes, 5.52, 2.76, "t counts down", ink=MUTED, size=9)
    box(axes, 3.2, 0.85, 1.75, 0.85, "policy: UNet\nN(μ, σ² I)", color=ORANGE)
    arrow(axes, (4.08, 2.15), (4.08, 1.7))
    box(axes, 5.55, 0.85, 1.75, 0.85, "action x$_{t-1}$\ndrawn from it", color=GREEN)
    arrow(axes, (4.95, 1.28), (5.55, 1.28))
    arrow(axes, (6.7, 1.7), (6.7, 2.15))
    box(axes, 7.85, 0.85, 1.35, 0.85, "reward\nr(x$_0$, prompt)", color=PURPLE)
    arrow(axes, (8.55, 2.35), (8.55, 1.7))
    label(axes, 8.55, 2.63, "…  x$_0$", size=12)
    note = "The network decides μ; σ comes from the schedule. The reward is 0 at every step but the last."
    label(axes, 4.7, 0.38, note, ink=MUTED, size=10)
    label(axes, 1.18, 1.28, "x$_T$ ~ N(0, I) and the prompt\nare given, not chosen", ink=MUTED, size=9.5)
    arrow(axes, (1.18, 1.55), (1.18, 2.15), ink=MUTED)
    return figure


def step_parts() -> Figure:
    """How a step divides the variance 1 of its outcome, in the numbers that the lesson works out."""
    figure, axes = diagram(9.4, 3.7)
    label(axes, 0.25, 3.42, "What x$_{t-1}$ is made of", weight="bold", size=12, align="left")
    label(
        axes, 3.35, 3.42, "(the pencil case: ᾱ = 0.36, ᾱ$_{prev}$ = 0.64, σ = 0.36)", ink=MUTED, align="left"
    )
    left, width = 2.1, 7.0
    rows = [
        (2.3, "x$_t$", [(0.36, BLUE, "picture  ᾱ = 0.36"), (0.64, ORANGE, "noise  1 − ᾱ = 0.64")]),
        (
            0.95,
            "x$_{t-1}$",
            [
                (0.64, BLUE, "picture  ᾱ$_{prev}$ = 0.64"),
                (0.2304, ORANGE, "kept noise\n0.2304"),
                (0.1296, GREEN, "fresh\n0.1296"),
            ],
        ),
    ]
    for y, name, parts in rows:
        label(axes, left - 0.35, y + 0.35, name, size=13)
        start = left
        for share, color, text in parts:
            axes.add_patch(
                Rectangle((start, y), share * width, 0.7, facecolor=color, edgecolor=CARD, linewidth=2)
            )
            label(axes, start + share * width / 2, y + 0.35, text, ink="white", size=10)
            start += share * width
    label(
        axes,
        left + width / 2,
        1.97,
        "length of a bar = share of the variance; every row adds up to 1",
        ink=MUTED,
    )
    label(axes, 0.25, 2.65, "before", ink=MUTED, align="left")
    label(axes, 0.25, 1.3, "after", ink=MUTED, align="left")
    formula = [
        (left + 0.32 * width, BLUE, "√ᾱ$_{prev}$ · x0"),
        (left + 0.72 * width, ORANGE, "+ √(1 − ᾱ$_{prev}$ − σ²) · ε"),
        (left + 0.965 * width, GREEN, "+ σ · z"),
    ]
    for x, color, text in formula:
        label(axes, x, 0.62, text, ink=color, size=11, weight="bold")
    label(
        axes,
        left + 0.5 * width,
        0.24,
        "the network's two predictions, and a draw z ~ N(0, I)",
        ink=MUTED,
        size=9.5,
    )
    return figure


def replay() -> Figure:
    """Sampling draws an action and stores it; training scores the stored one."""
    figure, axes = diagram(9.4, 4.1)
    for x, title, color in ((0.25, "sampling: draw the action", BLUE), (5.0, "training: replay it", ORANGE)):
        label(axes, x, 3.85, title, weight="bold", size=12, align="left", ink=color)
    box(axes, 0.25, 2.75, 1.5, 0.75, "x$_t$, t, prompt", color=BLUE)
    box(axes, 2.35, 2.75, 2.0, 0.75, "μ, σ  with the\nold weights θ$_{old}$", color=MUTED)
    arrow(axes, (1.75, 3.13), (2.35, 3.13))
    box(axes, 2.35, 1.6, 2.0, 0.75, "x$_{t-1}$ = μ + σ z", color=GREEN)
    arrow(axes, (3.35, 2.75), (3.35, 2.35))
    box(axes, 2.35, 0.45, 2.0, 0.75, "log_prob$_{old}$", color=PURPLE)
    arrow(axes, (3.35, 1.6), (3.35, 1.2))
    box(axes, 5.0, 2.75, 1.5, 0.75, "x$_t$, t, prompt", color=BLUE)
    box(axes, 7.1, 2.75, 2.0, 0.75, "μ′, σ  with today's\nweights θ", color=MUTED)
    arrow(axes, (6.5, 3.13), (7.1, 3.13))
    box(axes, 7.1, 1.6, 2.0, 0.75, "how likely is the\nsame x$_{t-1}$ now?", color=GREEN)
    arrow(axes, (8.1, 2.75), (8.1, 2.35))
    box(axes, 7.1, 0.45, 2.0, 0.75, "log_prob$_{new}$", color=PURPLE)
    arrow(axes, (8.1, 1.6), (8.1, 1.2))
    arrow(axes, (4.35, 1.98), (7.1, 1.98), ink=GREEN, width=2.2)
    label(axes, 5.72, 2.22, "stored as prev_sample", ink=GREEN, size=10, weight="bold")
    label(axes, 5.72, 1.72, "(ddpo-pytorch: next_latents)", ink=MUTED, size=9)
    arrow(axes, (4.35, 0.83), (4.9, 0.83), ink=PURPLE)
    arrow(axes, (7.1, 0.83), (6.55, 0.83), ink=PURPLE)
    label(axes, 5.72, 0.95, "ratio =", size=11)
    label(axes, 5.72, 0.68, "exp(new − old)", size=11)
    label(axes, 1.2, 1.98, "z ~ N(0, I)", ink=MUTED)
    arrow(axes, (1.75, 1.98), (2.35, 1.98), ink=MUTED)
    return figure


if __name__ == "__main__":
    main({"03-mdp": mdp, "03-step": step_parts, "03-replay": replay})
