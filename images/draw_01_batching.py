"""Draw the pictures of lesson 01: two runs, the loop, samples travelling through an epoch, its levels."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

from ddpo_lessons.batching import EpochPlan, Samples, minibatches, shuffle_samples
from ddpo_lessons.tiny.world import COLOURS, handwriting, render

BLUE, ORANGE, GREEN, RED = PALETTE[0], PALETTE[1], PALETTE[2], PALETTE[5]
PALE_BLUE, PALE_ORANGE = "#e6edf7", "#faebe0"
SEED = 0  # the notebook's: the same shuffle
# The seed settings with gradients accumulated over two minibatches.
PLAN = EpochPlan(
    sample_batch_size=4,
    num_batches_per_epoch=2,
    train_batch_size=2,
    gradient_accumulation_steps=2,
    num_inner_epochs=1,
    num_timesteps=3,
)
# The notebook's toy: latents are numbers, the reward is minus the distance of the last one from GOAL.
STD, GOAL, STEPS, SAMPLES, EPOCHS, SEEDS = 0.5, 3.0, 3, 64, 20, 10
Damage = Callable[[Samples, torch.Generator], Samples]


def _sample(shift: float, generator: torch.Generator) -> Samples:
    states = [torch.randn(SAMPLES, generator=generator)]
    for _ in range(STEPS):
        states.append(states[-1] + shift + STD * torch.randn(SAMPLES, generator=generator))
    path = torch.stack(states, dim=1)  # (B, T + 1)
    rewards = -(path[:, -1] - GOAL).abs()
    advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
    return {"moves": path.diff(dim=1), "last": path[:, -1], "rewards": rewards, "advantages": advantages}


def _tear(samples: Samples, generator: torch.Generator) -> Samples:
    """Shuffle the advantages alone: wrong."""
    order = torch.randperm(SAMPLES, generator=generator)
    return samples | {"advantages": samples["advantages"][order]}


def _learn(seed: int, damage: Damage | None = None) -> list[Samples]:
    """Train the toy as the notebook's `learn` does; its gradient is written out here."""
    shift, generator, history = 0.0, torch.Generator().manual_seed(seed), []
    for _ in range(EPOCHS):
        samples, old = _sample(shift, generator), shift
        history.append(samples)
        damaged = damage(samples, generator) if damage else samples
        for batch in minibatches(shuffle_samples(damaged, generator), 16):  # of an optimizer step
            now, then = batch["moves"] - shift, batch["moves"] - old
            ratio = ((then.square() - now.square()) / (2 * STD**2)).exp()  # (16, T)
            shift += 0.1 * float((batch["advantages"][:, None] * ratio * now / STD**2).mean())
    return history


def _digit(digit: int, strength: float) -> torch.Tensor:
    """Render handwriting as a red digit on blue, (32, 32, 3), blended with its background."""
    bitmaps, labels = handwriting("train")
    bitmap = bitmaps[labels == digit][4:5]
    ink, paper = torch.tensor([COLOURS["red"]]), torch.tensor([COLOURS["blue"]])
    ink = strength * ink + (1 - strength) * paper
    upright = torch.tensor([[[1.14, 0, 0], [0, 1.14, 0]]])  # with a margin
    return render(bitmap, ink, paper, upright)[0].permute(1, 2, 0)


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−") if abs(value) > 0.05 else "0.0"


def _picture(axes: Axes, x: float, y: float, size: float, image: torch.Tensor) -> None:
    pixels = image.clamp(0, 1).numpy()
    axes.imshow(pixels, extent=(x, x + size, y, y + size), interpolation="nearest", zorder=3)


def draw_silent() -> Figure:
    """Ten healthy runs and ten with one wrong line: rewards by epoch, and where the samples end."""
    figure, _ = diagram(10, 4.3)
    runs = {
        "healthy": ([_learn(seed) for seed in range(SEEDS)], BLUE),
        "one line wrong": ([_learn(seed, _tear) for seed in range(SEEDS)], RED),
    }
    left = figure.add_axes((0.075, 0.135, 0.42, 0.72), facecolor=CARD)
    for histories, colour in runs.values():
        for history in histories:
            means = [round(float(samples["rewards"].mean()), 2) for samples in history]
            left.plot(range(1, EPOCHS + 1), means, color=colour, linewidth=1.3, alpha=0.8)
    # E|x - GOAL| of a normal x around GOAL: the weight moves its mean, not its spread
    best = -math.sqrt(2 / math.pi * (1 + STEPS * STD**2))
    left.axhline(best, color=INK, linewidth=1.4, linestyle=(0, (5, 3)), zorder=3)
    left.text(20, -0.6, f"best that one weight can do: −{-best:.2f}", color=INK, fontsize=10.5, ha="right")
    left.text(20, -0.3, "healthy, 10 runs", color=BLUE, fontsize=12, weight="bold", ha="right")
    left.text(2.2, -4.45, "one line wrong, 10 runs", color=RED, fontsize=12, weight="bold")
    left.set(xlim=(0.5, 20.5), ylim=(-5.2, 0), xticks=(1, 5, 10, 15, 20))
    left.set_xlabel("epoch", color=INK, fontsize=11)
    left.set_title("mean reward of an epoch", color=INK, fontsize=12, loc="left")
    edges = [-4.5 + 0.5 * number for number in range(26)]
    for row, epoch in enumerate((1, 3, EPOCHS)):
        for column, (histories, colour) in enumerate(runs.values()):
            axes = figure.add_axes((0.6 + 0.2 * column, 0.65 - row * 0.2575, 0.18, 0.205), facecolor=CARD)
            last = torch.cat([history[epoch - 1]["last"] for history in histories])
            axes.hist(last.tolist(), bins=edges, color=colour, alpha=0.85)
            axes.axvline(GOAL, color=INK, linewidth=1.6, linestyle=(0, (3, 2)))
            axes.set(xlim=(-4.5, 8), ylim=(0, 125), yticks=[], xticks=(-3, 0, 3))
            axes.tick_params(labelbottom=row == 2)
            _bare(axes)
            if not column:
                label_style = {"color": MUTED, "fontsize": 11, "rotation": 0, "ha": "right", "va": "center"}
                axes.set_ylabel(f"epoch {epoch}", **label_style)
            if not row:
                axes.text(GOAL + 0.2, 108, "goal", color=INK, fontsize=10.5)
    figure.text(0.6, 0.885, "where the samples of the 10 runs end", color=INK, fontsize=12)
    _bare(left)
    return figure


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.get_yticks().size:
        axes.spines["left"].set_visible(False)
    axes.tick_params(colors=INK, labelsize=10.5)


def draw_loop() -> Figure:
    """One epoch: prompts are denoised into images and scored, then the policy is trained on them."""
    figure, axes = diagram(10, 5.3)
    box(axes, 0.15, 1.0, 6.05, 4.1, color=PALE_BLUE, edge=BLUE)
    label(axes, 0.35, 4.82, "1  Sampling phase", ink=BLUE, size=13, weight="bold", align="left")
    label(axes, 6.0, 4.82, "no gradients; everything is recorded", ink=MUTED, size=10, align="right")
    for x, text in ((0.95, "prompt"), (3.05, "denoise, step by step"), (4.85, "reward"), (5.65, "advantage")):
        label(axes, x, 4.4, text, ink=MUTED, size=10)
    rewards = torch.tensor([0.9, 0.1, 0.5])
    advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
    pictures = (_digit(3, 1.0), _digit(8, 1.0), _digit(3, 0.45))
    generator = torch.Generator().manual_seed(SEED)
    for row, (picture, reward, advantage) in enumerate(zip(pictures, rewards, advantages, strict=True)):
        y = 3.35 - row * 1.07
        label(axes, 0.95, y + 0.38, "a red three on\na blue background", size=9)
        noise = torch.randn(picture.shape, generator=generator) * 0.3 + 0.5
        for column, share in enumerate((0.0, 0.35, 0.7, 1.0)):
            x = 1.87 + column * 0.64
            _picture(axes, x, y + 0.12, 0.52, share * picture + (1 - share) * noise)
            if column:
                arrow(axes, (x - 0.11, y + 0.38), (x - 0.005, y + 0.38), width=1)
        ink = GREEN if advantage > 0.1 else RED if advantage < -0.1 else MUTED
        label(axes, 4.85, y + 0.38, f"{reward:.1f}", size=11)
        label(axes, 5.65, y + 0.38, _signed(float(advantage)), ink=ink, size=12, weight="bold")
    box(axes, 6.75, 1.0, 3.1, 4.1, color=PALE_ORANGE, edge=ORANGE)
    label(axes, 6.95, 4.82, "2  Training phase", ink=ORANGE, size=13, weight="bold", align="left")
    steps = (
        "shuffle the samples,\ncut them into minibatches",
        "replay the denoising steps:\nhow likely are they now?",
        "advantage above 0: more likely\nbelow 0: less likely",
        "average the gradients of some\nminibatches, move the weights",
    )
    for number, text in enumerate(steps):
        y = 3.83 - number * 0.9
        box(axes, 6.87, y, 2.5, 0.66, text, color=CARD, edge=ORANGE, size=10)
        if number:
            arrow(axes, (8.12, y + 0.9), (8.12, y + 0.68), ink=ORANGE)
    axes.plot([9.37, 9.52, 9.52], [1.46, 1.46, 3.26], color=ORANGE, linewidth=1.3)
    arrow(axes, (9.52, 3.26), (9.39, 3.26), ink=ORANGE)
    axes.text(
        9.68, 2.36, "next minibatches", color=ORANGE, fontsize=10, rotation=90, ha="center", va="center"
    )
    arrow(axes, (6.22, 3.0), (6.73, 3.0), width=2)
    axes.plot([8.3, 8.3, 3.2], [0.98, 0.42, 0.42], color=INK, linewidth=2)
    arrow(axes, (3.2, 0.42), (3.2, 0.98), width=2)
    label(axes, 5.75, 0.7, "next epoch: the changed model samples anew", size=10.5)
    label(axes, 5.75, 0.2, "the old samples are thrown away", ink=MUTED, size=10)
    axes.set(xlim=(0, 10), ylim=(0, 5.3), aspect="auto")
    return figure


def _shuffled_ids() -> list[int]:
    ids = {"id": torch.arange(PLAN.total_samples)}
    return shuffle_samples(ids, torch.Generator().manual_seed(SEED))["id"].tolist()


def draw_travel() -> Figure:
    """Eight numbered samples: sampled in two batches, shuffled, cut, trained on by two optimizer steps."""
    figure, axes = diagram(10, 5.35)
    order, steps, T = _shuffled_ids(), PLAN.optimizer_steps, PLAN.num_timesteps
    top, height = 4.45, 0.47
    centre = [top - (row + 0.5) * height for row in range(8)]
    colour = {
        sample: PALETTE[row * steps // PLAN.total_samples] for row, sample in enumerate(order)
    }  # by optimizer step
    for x, text in ((1.22, "sampled"), (2.98, "shuffled"), (6.87, "trained on: time runs to the right")):
        label(axes, x, 5.05, text, size=12, weight="bold")
    for batch in range(PLAN.num_batches_per_epoch):
        y = centre[4 * batch] + 0.23
        label(axes, 0.45, y - 2 * height + 0.02, f"sample\nbatch {batch}", ink=MUTED, size=10)
        axes.plot([0.85, 0.85], [y - 4 * height + 0.08, y - 0.06], color=MUTED, linewidth=1.5)
    for sample in range(8):
        box(axes, 1.0, centre[sample] - 0.19, 0.44, 0.38, str(sample), color=colour[sample], size=11)
    for row, sample in enumerate(order):
        arrow(axes, (1.46, centre[sample]), (2.72, centre[row]), ink=colour[sample], width=1.2)
        box(axes, 2.76, centre[row] - 0.19, 0.44, 0.38, str(sample), color=colour[sample], size=11)
    left, width, gap = 3.95, 0.475, 0.14
    for number, batch in enumerate(minibatches({"id": torch.tensor(order)}, PLAN.train_batch_size)):
        first = number * PLAN.train_batch_size
        upper, lower = top - first * height, top - (first + len(batch["id"])) * height
        label(axes, 3.58, (upper + lower) / 2, f"mini-\nbatch {number}", ink=MUTED, size=9)
        for j in range(T):
            x = left + (number * T + j) * width + gap * (number // PLAN.gradient_accumulation_steps)
            for row in range(first, first + PLAN.train_batch_size):
                box(
                    axes,
                    x,
                    centre[row] - 0.19,
                    width - 0.03,
                    0.38,
                    f"j={j}",
                    color=colour[order[row]],
                    size=10,
                )
    for column in range(PLAN.minibatches_per_inner_epoch * T):
        x = left + (column + 0.48) * width + gap * (column // (PLAN.gradient_accumulation_steps * T))
        label(axes, x, 4.62, str(column), ink=MUTED, size=9)
    label(axes, left - 0.12, 4.62, "forward\npass", ink=MUTED, size=9, align="right")
    for step in range(steps):
        calls = PLAN.gradient_accumulation_steps * T
        x0 = left + step * (calls * width + gap)
        x1 = x0 + calls * width
        axes.plot([x0 + 0.04, x1 - 0.06], [0.5, 0.5], color=PALETTE[step], linewidth=2.5)
        text = f"gradients add up: optimizer step {step + 1}"
        label(axes, (x0 + x1) / 2, 0.27, text, ink=PALETTE[step], size=10)
        end = x1 + gap / 2 - 0.02
        axes.plot([end, end], [0.45, 4.5], color=PALETTE[step], linewidth=1.5, linestyle=(0, (3, 2)))
        y = centre[4 - 4 * step] - 0.75  # where the rows of the other step leave room
        label(axes, end - 0.35, y, "weights move here", ink=PALETTE[step], size=10, align="right")
        arrow(axes, (end - 0.3, y), (end - 0.03, y), ink=PALETTE[step])
    return figure


def draw_nesting() -> Figure:
    """The levels of an epoch inside each other: each with its line of the loop and the count so far."""
    figure, axes = diagram(10, 4.6)
    plan = PLAN
    passes = plan.minibatches_per_inner_epoch * plan.num_timesteps
    rows = (
        (
            "inner epoch",
            "for inner_epoch in range(E):",
            "1",
            f"{plan.num_inner_epochs} inner epoch",
            PALETTE[3],
        ),
        (
            "optimizer step",
            "    for m minibatches at a time:",
            "× 2",
            f"{plan.optimizer_steps} steps",
            ORANGE,
        ),
        (
            "minibatch",
            "        for batch in these m:",
            "× 2",
            f"{plan.minibatches_per_inner_epoch} minibatches",
            BLUE,
        ),
        ("denoising step", "            for j in range(T):", "× 3", f"{passes} forward passes", GREEN),
        ("sample", "                b samples at once", "× 2", f"{plan.total_pairs} pairs", PALETTE[4]),
    )
    for x, text in ((0.35, "level"), (3.1, "line of the loop"), (6.75, "times"), (7.75, "running product")):
        label(axes, x, 4.3, text, ink=MUTED, size=11, align="left")
    shades = ("#f0e6f2", "#faebe0", "#e6edf7", "#e3f0e8", "#f3eddd")
    for depth, ((name, code, times, product, colour), shade) in enumerate(zip(rows, shades, strict=True)):
        x, bottom, top = 0.15 + 0.24 * depth, 0.12 + 0.11 * depth, 4.05 - 0.72 * depth
        box(axes, x, bottom, 9.85 - x - 0.11 * depth, top - bottom, color=shade, edge=colour)
        y = top - 0.36
        label(axes, x + 0.18, y, name, ink=colour, size=12, weight="bold", align="left")
        axes.text(3.1, y, code, color=INK, fontsize=11, family="DejaVu Sans Mono", va="center")
        label(axes, 7.0, y, times, ink=colour, size=13, weight="bold")
        label(axes, 7.75, y, product, size=11.5, align="left")
    return figure


if __name__ == "__main__":
    main(
        {
            "01-silent": draw_silent,
            "01-loop": draw_loop,
            "01-travel": draw_travel,
            "01-nesting": draw_nesting,
        }
    )
