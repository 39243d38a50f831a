"""Draw the diagrams of lesson 02: shuffled clocks, and pairs that index a trajectory."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

from ddpo_lessons.batching import Samples, minibatches, shuffle_samples, shuffle_time

SEED = 0  # the notebook's, so that its tables and these pictures show the same shuffles
WIDTH, HEIGHT = 0.84, 0.5  # of a card


def _recorded() -> Samples:
    """The notebook's four samples of three steps, with the number of each sample and step."""
    numbers, steps = torch.arange(4)[:, None], torch.arange(3)
    return {
        "id": numbers[:, 0],
        "step": steps.expand(4, 3),
        "timesteps": torch.tensor([[1000, 800, 100 * (n + 1)] for n in range(4)]),
        "latents": 100 * numbers + 10 * (steps + 1),
        "next_latents": 100 * numbers + 10 * (steps + 2),
    }


def _stages() -> tuple[Samples, Samples, Samples]:
    """The samples as recorded, in a new order, and with a new order of time in each."""
    recorded = _recorded()
    mixed = shuffle_samples(recorded, torch.Generator().manual_seed(SEED + 5))
    keys = ["step", "timesteps", "latents", "next_latents"]
    return recorded, mixed, shuffle_time(mixed, keys, torch.Generator().manual_seed(SEED + 30))


def _card(axes: Axes, x: float, y: float, samples: Samples, row: int, column: int) -> None:
    t, before, after = (samples[key][row, column].item() for key in ("timesteps", "latents", "next_latents"))
    color = PALETTE[int(samples["step"][row, column])]
    box(axes, x, y, WIDTH - 0.03, HEIGHT - 0.03, f"t = {t}\n{before} → {after}", color=color, size=9)


def draw_clocks() -> Figure:
    """Four samples: as recorded, whole samples shuffled, every clock shuffled, and the training order."""
    figure, axes = diagram(10, 6.1)
    titles = ("1  as recorded", "2  samples shuffled", "3  every clock shuffled")
    stages = _stages()
    for panel, (title, samples) in enumerate(zip(titles, stages, strict=True)):
        x = 0.72 + 3.33 * panel
        label(axes, x + 1.5 * WIDTH - 0.1, 5.83, title, size=12, weight="bold")
        for row in range(4):
            y = 5.02 - row * HEIGHT
            label(axes, x - 0.33, y + 0.23, f"sample\n{samples['id'][row]}", ink=MUTED, size=9)
            for column in range(3):
                _card(axes, x + column * WIDTH, y, samples, row, column)
        if panel:
            arrow(axes, (x - 0.8, 4.49), (x - 0.4, 4.49), width=2)
    left = "noisy"
    for x, text in ((1.1, left), (2.8, "almost clean")):
        label(axes, x, 5.6, text, ink=MUTED, size=9)
    arrow(axes, (1.4, 5.6), (2.3, 5.6), ink=MUTED)
    title = "4  cut into minibatches of two samples; one column is one forward pass"
    label(axes, 5.0, 3.18, title, size=12, weight="bold")
    for number, batch in enumerate(minibatches(stages[2], 2)):
        x = 1.55 + number * 4.0
        for row in range(2):
            label(
                axes, x - 0.33, 2.12 - row * HEIGHT + 0.23, f"sample\n{batch['id'][row]}", ink=MUTED, size=9
            )
            for column in range(3):
                _card(axes, x + column * WIDTH, 2.12 - row * HEIGHT, batch, row, column)
        for column in range(3):
            middle = x + (column + 0.5) * WIDTH - 0.015
            axes.plot([middle - 0.36, middle + 0.36], [1.5, 1.5], color=INK, linewidth=1.5)
            label(axes, middle, 1.33, f"pass {3 * number + column + 1}", size=9.5)
        label(axes, x + 1.5 * WIDTH, 2.8, f"minibatch {number}", ink=MUTED, size=10)
    notes = (
        "Colour: the place of the step in time. Hundreds of the latents: the sample.",
        "A card never comes apart: t, latents before and after, and log-prob (not shown) move together.",
        "After stage 2, a forward pass holds one noise level. After stage 3, it mixes them.",
    )
    for number, note in enumerate(notes):
        label(axes, 5.0, 0.88 - 0.3 * number, note, ink=MUTED, size=10)
    return figure


def draw_pairs() -> Figure:
    """A trajectory that stores T + 1 states once, and pairs (row, column) that point into it."""
    figure, axes = diagram(10, 4.5)
    row, column, x0, gap = 2, 1, 1.45, 1.45
    label(axes, 0.25, 4.2, "Trajectory: every state once", size=12, weight="bold", align="left")
    for r, y in ((1, 3.5), (2, 2.35), (3, 1.3)):
        chosen = r == row
        label(axes, 0.62, y, f"row {r}", ink=INK if chosen else MUTED, size=10)
        for k in range(4):
            used = chosen and k in (column, column + 1)
            box(
                axes,
                x0 + k * gap - 0.36,
                y - 0.24,
                0.72,
                0.48,
                str(100 * r + 10 * (k + 1)),
                color=PALETTE[column] if used else CARD,
                edge=INK if chosen else MUTED,
                ink=CARD if used else INK if chosen else MUTED,
            )
            if k < 3:
                this = chosen and k == column
                ink = PALETTE[column] if this else MUTED
                start, end = x0 + k * gap + 0.38, x0 + (k + 1) * gap - 0.38
                arrow(axes, (start, y), (end, y), ink=ink, width=2.5 if this else 1.1)
                if chosen:
                    t, log_prob = (1000, 800, 300)[k], f"{r}.{k + 1}"
                    label(axes, (start + end) / 2, y + 0.3, f"t = {t}", ink=ink, size=9.5)
                    label(axes, (start + end) / 2, y - 0.33, f"log p\n{log_prob}", ink=ink, size=9.5)
    for k in range(4):
        label(axes, x0 + k * gap, 0.82, f"latents[:, {k}]", ink=MUTED, size=9.5)
    label(
        axes,
        3.6,
        0.38,
        "3 steps lead through 4 states: (B, T + 1) instead of 2 × (B, T)",
        ink=MUTED,
        size=10,
    )
    axes.plot([6.6, 6.6], [0.3, 4.25], color=MUTED, linewidth=0.8)
    label(axes, 6.85, 4.2, "Pair (row 2, column 1) reads", size=12, weight="bold", align="left")
    lines = (
        ("state before", f"latents[{row}, {column}]", "220"),
        ("state after", f"latents[{row}, {column + 1}]", "230"),
        ("timestep", f"timesteps[{row}, {column}]", "800"),
        ("log-prob", f"log_probs[{row}, {column}]", "2.2"),
        ("advantage", f"advantages[{row}]", "−0.5"),
    )
    for number, (name, code, value) in enumerate(lines):
        y = 3.75 - number * 0.4
        label(axes, 6.85, y, name, ink=MUTED, size=9.5, align="left")
        label(axes, 7.85, y, code, size=9.5, align="left")
        label(axes, 9.75, y, value, ink=PALETTE[column], size=10.5, weight="bold", align="right")
    axes.plot([6.85, 9.75], [1.83, 1.83], color=MUTED, linewidth=0.8)
    text = (
        "Only pairs are shuffled: two integers.\n"
        "The latents stay where they are, so\n"
        "neighbours in time stay neighbours."
    )
    label(axes, 6.85, 1.2, text, size=10, align="left")
    return figure


if __name__ == "__main__":
    main({"02-clocks": draw_clocks, "02-pairs": draw_pairs})
