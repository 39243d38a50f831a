"""Draw the figures of lesson 02: orders and what they learn, from orders.csv, and gradients."""

import json
import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
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
    signed,
    where,
)
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main, note, title

from ddpo_lessons.batching import Samples, minibatches, shuffle_samples, shuffle_time

SEED = 0  # the notebook's, so that its tables and these figures show the same shuffles
WIDTH, HEIGHT = 0.9, 0.55  # of the box of a step
RESULTS = BENCHMARKS / "results"  # clocks.py writes there
BLUE, ORANGE, GREEN, RED = PALETTE[0], PALETTE[1], PALETTE[2], PALETTE[5]
ORDERS = {"time order": ORANGE, "shuffled": BLUE}


def _recorded() -> Samples:
    """The notebook's four samples of three steps, with the number of each sample and step."""
    numbers, steps = torch.arange(4)[:, None], torch.arange(3)
    return {
        "id": numbers[:, 0], "step": steps.expand(4, 3),
        "timesteps": torch.tensor([[1000, 800, 100 * (n + 1)] for n in range(4)]),
        "latents": 100 * numbers + 10 * (steps + 1), "next_latents": 100 * numbers + 10 * (steps + 2),
    }  # fmt: skip


def _stages() -> tuple[Samples, Samples, Samples]:
    """The samples as recorded, in a new order, and with a new order of time in each."""
    recorded = _recorded()
    mixed = shuffle_samples(recorded, torch.Generator().manual_seed(SEED + 5))
    keys = ["step", "timesteps", "latents", "next_latents"]
    return recorded, mixed, shuffle_time(mixed, keys, torch.Generator().manual_seed(SEED + 30))


def _step(axes: Axes, x: float, y: float, samples: Samples, row: int, column: int) -> None:
    t, before, after = (samples[key][row, column].item() for key in ("timesteps", "latents", "next_latents"))
    color = PALETTE[int(samples["step"][row, column])]
    box(axes, x, y, WIDTH - 0.03, HEIGHT - 0.03, f"t = {t}\n{before}→{after}", color=color, size=12)


def _samples(axes: Axes, x: float, y: float, samples: Samples) -> None:
    """Draw the boxes of some samples, with their numbers before them."""
    label(axes, x - 0.2, y + HEIGHT + 0.13, "sample", ink=MUTED, size=12, align="left")
    for row in range(len(samples["id"])):
        below = y - row * HEIGHT
        label(axes, x - 0.13, below + 0.26, f"{samples['id'][row]}", ink=MUTED)
        for column in range(3):
            _step(axes, x + column * WIDTH, below, samples, row, column)


def draw_clocks() -> Figure:
    """Four samples: as recorded, whole samples shuffled, steps of each shuffled, and the training order."""
    figure, axes = diagram(6, 7.35)
    stages = _stages()
    titles = ("1  as recorded", "2  samples shuffled", "3  steps shuffled", "4  minibatches of two")
    for panel, name in enumerate(titles):
        x, top = 0.27 + 2.98 * (panel % 2), 7.12 - 3.25 * (panel // 2)
        label(axes, x - 0.2, top, name, weight="bold", align="left")
        if panel < 3:
            _samples(axes, x, top - 1.05, stages[panel])
            continue
        for number, batch in enumerate(minibatches(stages[2], 2)):
            bottom = top - 1.05 - 1.83 * number
            _samples(axes, x, bottom, batch)
            for column in range(3):
                middle = x + (column + 0.5) * WIDTH - 0.015
                low = bottom - HEIGHT - 0.1
                axes.plot([middle - 0.38, middle + 0.38], [low, low], color=INK, linewidth=1.5)
                label(axes, middle, low - 0.17, f"pass {3 * number + column + 1}", size=12)
    words = "A column of a\nminibatch is one\nforward pass."
    note(axes, 0.27, 0.5, words)
    return figure


def _read() -> dict[str, Any]:
    return json.loads((RESULTS / "clocks.json").read_text(encoding="utf-8"))


def _images() -> list[np.ndarray]:
    """The seven states of one sample, decoded, and the finished image, (32, 32, 3) each."""
    strip = np.asarray(Image.open(RESULTS / "clocks.png").convert("RGB"))
    return [strip[:, x : x + 32] for x in range(0, strip.shape[1], 32)]


def draw_torn() -> Figure:
    """Seven shuffled steps of one real sample: whole, with timesteps left behind, with a wrong advantage."""
    figure, axes = diagram(6, 5.15)
    torn, images, x0, pitch, size = _read()["torn"], _images(), 0.88, 0.635, 0.57
    whole = torn["whole"]
    rows = (
        ("whole", "whole sample", "seven steps of one sample"),
        ("timesteps", "timesteps left behind", "no error"),
        ("advantages", "advantage of another", "no error"),
    )
    for number, (case, name, remark) in enumerate(rows):
        y, here = 3.84 - number * 1.76, torn[case]
        title(axes, 0.1, y + 1.08, name)
        note(axes, 1.75 if case == "whole" else 2.65, y + 1.08, remark)
        note(axes, x0 - 0.1, y + size + 0.15, "t", align="right")
        note(axes, x0 - 0.1, y - 0.17, "|ρ − 1|", align="right")
        for place, step in enumerate(torn["order"]):
            x = x0 + place * pitch
            show_image(axes, x, y, size, images[step])
            t, distance = here["timesteps"][place], here["distance"][place]
            ink = INK if t == whole["timesteps"][place] else RED
            label(axes, x + size / 2, y + size + 0.15, str(t), ink=ink)
            ink = RED if distance > 1e-4 else GREEN
            label(axes, x + size / 2, y - 0.17, f"{distance:.2f}", weight="bold", ink=ink)
        x = x0 + 7 * pitch
        show_image(axes, x, y, size, images[-1])
        note(axes, x + size / 2, y + size + 0.15, "image", align="center")
        ink = INK if here["advantage"] == whole["advantage"] else RED
        text = f"A = {signed(here['advantage'], 1)}"
        label(axes, 5.9, y + 1.08, text, weight="bold", ink=ink, align="right")
    return figure


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return mean(values), stdev(values) / math.sqrt(len(values))


def _dots(axes: Axes, values: Sequence[float], place: int, half: float, color: str) -> float:
    """Draw a dot for each value in a row, and a bar at their mean, which is returned."""
    axes.plot(values, [-place] * len(values), "o", color=color, markersize=6, alpha=0.45)
    axes.plot([mean(values)] * 2, [-place - half, -place + half], color=color, linewidth=2.5)
    return mean(values)


def draw_directions() -> Figure:
    """Cosines of consecutive gradients, a dot for each rollout: DDPO, and ordinary denoising training."""
    figure, (axes,) = panels(1, (6, 3.1))
    plain(axes)
    rollouts = _read()["rollouts"]
    rows = [(loss, order) for loss in ("neighbors", "control") for order in ORDERS]
    names = {"neighbors": "DDPO", "control": "denoising (control)"}
    for place, (loss, order) in enumerate(rows):
        values = [rollout[order][loss] for rollout in rollouts if loss in rollout[order]]
        middle, error = _mean_and_error(values)
        color = ORDERS[order]
        _dots(axes, values, place, 0.3, color)
        text = minus(f"{middle:+.2f} ± {error:.2f}")
        axes.text(max(values) + 0.03, -place, text, color=color, va="center", weight="bold")
    axes.axvline(0, color=MUTED, linewidth=0.9, linestyle="--")
    axes.set_yticks([-place for place in range(len(rows))], [f"{names[a]},\n{b}" for a, b in rows])
    axes.set(xlim=(-0.25, 1.3), xticks=(0, 0.5, 1), ylim=(-len(rows) + 0.5, 0.5))
    axes.set_xlabel("mean cosine of neighboring gradients")
    return figure


def draw_lengths() -> Figure:
    """Lengths of the passes' gradients in time order; and the longest over the shortest, order by order."""
    figure, (along, ratios) = panels(2, (6, 5.5), stacked=True)
    result = _read()
    columns = zip(*(rollout["time order"]["lengths"] for rollout in result["rollouts"]), strict=True)
    means, errors = zip(*map(_mean_and_error, columns), strict=True)
    along.errorbar(range(7), means, errors, fmt="o-", color=ORANGE, capsize=3, markersize=5)
    along.set_xticks(range(7), result["timesteps"])
    along.set_xlabel("timestep")
    along.set(ylim=(0, 0.62))
    along.set_title("length of a pass's gradient")
    names = ("time order, or one shared order", "each sample's own order")
    for place, (name, (order, color)) in enumerate(zip(names, ORDERS.items(), strict=True)):
        lengths = [rollout[order]["lengths"] for rollout in result["rollouts"]]
        values = [max(one) / min(one) for one in lengths]
        middle = _dots(ratios, values, place, 0.2, color)
        ratios.text(middle, -place + 0.27, f"{middle:.1f}", color=color, weight="bold", ha="center")
        ratios.text(1, -place - 0.42, name, color=color, weight="bold")
    ratios.set(xlim=(0, 22), ylim=(-1.6, 0.6), yticks=[])
    ratios.set_title("longest over shortest pass")
    plain(along, ratios)
    ratios.spines["left"].set_visible(False)
    return figure


# The orders of orders.py: letter in the opening, color, short name.
KEPT = {
    "first three": ("B", ORANGE, "first three"), "last three": ("D", GREEN, "last three"),
    "three, shared order": ("E", PALETTE[3], "three, shared order"),
    "three, individual orders": ("A", BLUE, "three, own orders"), "all seven": ("C", INK, "all seven"),
}  # fmt: skip


def _curves(reward: str, rate: str) -> dict[str, list[np.ndarray]]:
    """Return epochs and mean rewards (E, 2) of each of the first three seeds, by order."""
    rows = where(read_rows("results/orders.csv"), reward=reward, learning_rate=rate)
    rows = [row for row in rows if int(row["seed"]) < 3]
    return {order: of_seeds(where(rows, order=order), "epoch", "mean_reward") for order in KEPT}


def _draw_curves(axes: Axes, curves: dict[str, list[np.ndarray]], named: bool, gap: float) -> None:
    """Thin lines for seeds, a thick one for their mean, and the letter or the name at its end."""
    plain(axes)
    ends = {}
    for order, seeds in curves.items():
        letter, color, name = KEPT[order]
        means = mean_and_paths(axes, seeds, color, thin=0.8, alpha=0.4, linewidth=2.6)
        ends[f"{letter}  {name}" if named else letter] = *means[-1], color
    height = -math.inf
    for name, (last, end, color) in sorted(ends.items(), key=lambda item: item[1][1]):
        height = max(end, height + gap)
        axes.annotate(
            name, (last, end), (last + 0.25, height), color=color, weight="bold", va="center",
            annotation_clip=False,
        )  # fmt: skip
    axes.set_xticks(range(len(means)))
    axes.set_xlabel("epochs of training")


def _strips(axes: Axes, x: float, y: float, steps: Sequence[Sequence[int]], color: str) -> None:
    """Four samples of seven steps; the steps that are trained on are filled."""
    for row, kept in enumerate(steps):
        for k in range(7):
            fill = color if k in kept else CARD
            bar(axes, x + 0.28 * k, y - 0.11 * row, 0.26, 0.09, fill, edgecolor=MUTED, linewidth=0.9)


def draw_question() -> Figure:
    """Five curves without names, and five orders without curves."""
    figure, card = diagram(6, 5.4)
    axes = figure.add_axes((0.09, 0.6, 0.85, 0.33), facecolor=CARD)
    _draw_curves(axes, _curves("redness", "0.003"), named=False, gap=0.09)
    axes.set_title("mean redness of 48 new images")
    title(card, 0.2, 2.5, "steps that are trained on (filled)")
    generator = torch.Generator().manual_seed(SEED + 5)

    def some() -> list[int]:
        return torch.randperm(7, generator=generator)[:3].tolist()

    shared = some()
    rows = (
        ("1  first three", [[0, 1, 2]] * 4), ("2  last three", [[4, 5, 6]] * 4),
        ("3  three, one shared order", [shared] * 4), ("4  three, own orders", [some() for _ in range(4)]),
        ("5  all seven", [list(range(7))] * 4),
    )  # fmt: skip
    for number, (name, steps) in enumerate(rows):
        x, y = 0.2 + 3.0 * (number % 2), 1.93 - 0.77 * (number // 2)
        label(card, x, y + 0.24, name, align="left")
        _strips(card, x, y, steps, MUTED)
    note(card, 3.2, 0.36, "rows: four samples\ncolumns: the seven steps,\nnoisiest first")
    return figure


def draw_orders() -> Figure:
    """The same curves with their names; and by letters the curves of the other reward, if all have run."""
    asked = (("redness", "mean redness", 0.07), ("compressibility", "mean compressibility, −kB", 0.035))
    drawn = [(panel, _curves(panel[0], "0.003")) for panel in asked]
    whole = drawn[:1] + [(p, c) for p, c in drawn[1:] if sum(map(len, c.values())) == 3 * len(KEPT)]
    figure, plots = panels(len(whole), (6, 3.2 * len(whole)), stacked=True)
    for axes, ((_, name, gap), curves) in zip(plots, whole, strict=True):
        _draw_curves(axes, curves, named=axes is plots[0], gap=gap)
        axes.set_title(name)
    return figure


def _of_steps(column: str, names: Sequence[str], reward: str) -> list[list[float]]:
    """Return a column of gradient_signal.csv: for each step or sum of steps the numbers of the seeds."""
    rows = where(read_rows("results/gradient_signal.csv"), reward=reward)
    return [[float(row[column]) for row in where(rows, steps=name)] for name in names]


def draw_signal() -> Figure:
    """Length of each step's gradient, its cosine with that of an independent batch, and that of sums."""
    figure, (lengths, cosines, sums) = panels(3, (6, 6.2), stacked=True, height_ratios=(3, 4, 5))
    steps = ["999", "874", "749", "624", "499", "374", "249"]
    names = ["first three", "last three", "all seven"]
    for reward, color, shift, height in (
        ("redness", RED, 0.06, 0.75),
        ("compressibility", BLUE, -0.06, 0.47),
    ):
        for axes, column in ((lengths, "length"), (cosines, "cosine")):  # dots are means, and dashes seeds
            seeds = _of_steps(column, steps, reward)
            axes.plot([mean(values) for values in seeds], "o-", color=color, markersize=5)
            for k, values in enumerate(seeds):
                axes.plot([k] * len(values), values, "_", color=color, markersize=10, alpha=0.5)
        cosines.text(1.4, height, reward, color=color, weight="bold")
        for place, values in enumerate(_of_steps("cosine", names, reward)):
            y = 4 * shift - place
            sums.plot(values, [y] * len(values), "|", color=color, markersize=9, alpha=0.5)
            sums.plot(mean(values), y, "o", color=color, markersize=5)
            text = minus(f"{mean(values):.2f}")
            sums.text(max(values) + 0.02, y, text, color=color, va="center")
    for axes in (lengths, cosines):
        axes.set_xticks(range(7), steps if axes is cosines else [])
    cosines.set_xlabel("timestep", labelpad=0)
    lengths.set_title("length of a step's gradient")
    lengths.set_ylim(0, 0.25)
    cosines.axhline(0, color=MUTED, linewidth=0.9, linestyle="--")
    cosines.set_title("its cosine with that of an independent batch")
    cosines.set_ylim(-0.1, 1)
    sums.axvline(0, color=MUTED, linewidth=0.9, linestyle="--")
    sums.set_title("the same cosine for sums of steps")
    sums.set_yticks([0, -1, -2], names)
    sums.set(xlim=(-0.05, 0.55), ylim=(-2.5, 0.5), xticks=(0, 0.2, 0.4))
    plain(lengths, cosines, sums)
    return figure


def draw_pairs() -> Figure:
    """A trajectory that stores T + 1 states once, and pairs (row, column) that point into it."""
    figure, axes = diagram(6, 6.7)
    row, column, x0, gap = 2, 1, 1.15, 1.47
    title(axes, 0.1, 6.5, "Trajectory: every state once")
    for r, y in ((1, 6.0), (2, 5.05), (3, 4.05)):
        chosen = r == row
        label(axes, 0.1, y, f"row {r}", ink=INK if chosen else MUTED, align="left")
        for k in range(4):
            used, edge = chosen and k in (column, column + 1), INK if chosen else MUTED
            look = {"color": PALETTE[column], "ink": CARD} if used else {"color": CARD, "ink": edge}
            number = str(100 * r + 10 * (k + 1))
            box(axes, x0 + k * gap - 0.36, y - 0.22, 0.72, 0.44, number, edge=edge, **look)
            if k < 3:
                this = chosen and k == column
                ink = PALETTE[column] if this else MUTED
                start, end = x0 + k * gap + 0.38, x0 + (k + 1) * gap - 0.38
                arrow(axes, (start, y), (end, y), ink=ink, width=2.5 if this else 1.1)
                if chosen:
                    t, log_prob = (1000, 800, 300)[k], f"{r}.{k + 1}"
                    label(axes, (start + end) / 2, y + 0.28, f"t = {t}", ink=ink)
                    label(axes, (start + end) / 2, y - 0.33, f"log π\n{log_prob}", ink=ink)
    note(axes, 0.1, 3.62, "latents")
    for k in range(4):
        note(axes, x0 + k * gap, 3.62, f"[:, {k}]", align="center")
    note(axes, 0.1, 3.2, "3 steps lead through 4 states:")
    note(axes, 0.1, 2.92, "(B, T + 1) instead of 2 × (B, T)")
    axes.plot([0.1, 5.9], [2.65, 2.65], color=MUTED, linewidth=0.8)
    title(axes, 0.1, 2.4, "Pair (2, 1) looks up")
    lines = (
        ("state before", f"latents[{row}, {column}]", "220"),
        ("state after", f"latents[{row}, {column + 1}]", "230"),
        ("timestep", f"timesteps[{row}, {column}]", "800"),
        ("log-prob", f"log_probs[{row}, {column}]", "2.2"),
        ("advantage", f"advantages[{row}]", "−0.5"),
    )
    for number, (name, code, value) in enumerate(lines):
        y = 2.08 - number * 0.29
        label(axes, 0.1, y, name, ink=MUTED, align="left")
        label(axes, 2.0, y, code, align="left")
        label(axes, 5.0, y, value, ink=PALETTE[column], weight="bold", align="right")
    axes.plot([0.1, 5.9], [0.7, 0.7], color=MUTED, linewidth=0.8)
    label(axes, 0.1, 0.48, "Only the pairs are shuffled. The latents stay in place,", align="left")
    label(axes, 0.1, 0.2, "so neighbors stay neighbors.", align="left")
    return figure


if __name__ == "__main__":
    drawn = {"02-question": draw_question, "02-orders": draw_orders, "02-torn": draw_torn}
    drawn |= {"02-clocks": draw_clocks, "02-directions": draw_directions, "02-lengths": draw_lengths}
    main({**drawn, "02-pairs": draw_pairs, "02-signal": draw_signal})
