"""Draw the diagrams of lesson 01: the loop, samples travelling through an epoch, the levels of an epoch."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

from ddpo_lessons.batching import EpochPlan, minibatches, shuffle_samples
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
        "shuffle the samples, cut them\ninto groups of minibatches",
        "replay the recorded steps:\nhow likely are they now?",
        "advantage above 0: more likely\nbelow 0: less likely",
        "average a group's gradients,\ntake an optimizer step",
    )
    for number, text in enumerate(steps):
        y = 3.83 - number * 0.9
        box(axes, 6.87, y, 2.5, 0.66, text, color=CARD, edge=ORANGE, size=10)
        if number:
            arrow(axes, (8.12, y + 0.9), (8.12, y + 0.68), ink=ORANGE)
    axes.plot([9.37, 9.52, 9.52], [1.46, 1.46, 3.26], color=ORANGE, linewidth=1.3)
    arrow(axes, (9.52, 3.26), (9.39, 3.26), ink=ORANGE)
    axes.text(
        9.68, 2.36, "repeat per group", color=ORANGE, fontsize=10, rotation=90, ha="center", va="center"
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
                    f"t{j}",
                    color=colour[order[row]],
                    size=10,
                )
    for column in range(PLAN.minibatches_per_inner_epoch * T):
        x = left + (column + 0.48) * width + gap * (column // (PLAN.gradient_accumulation_steps * T))
        label(axes, x, 4.62, str(column), ink=MUTED, size=9)
    label(axes, left - 0.12, 4.62, "call", ink=MUTED, size=9, align="right")
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
    """The levels of an epoch inside each other, with how often each runs and what it does."""
    figure, axes = diagram(9, 4.8)
    label(axes, 0.2, 4.5, "Settings (c) of the table below", size=12, weight="bold", align="left")
    rows = (
        ("epoch", "sample 2 sample batches of 4, then train on these 8 samples", "", MUTED),
        ("inner epoch", "shuffle all 8 samples, use each of them once", "× 1", PALETTE[3]),
        ("optimizer step", "average the gradients of 4 samples, then move the weights", "× 2", PALETTE[1]),
        ("minibatch", "2 samples that fit into memory together", "× 2", PALETTE[0]),
        ("timestep", "one call of the model, forward and backward", "× 3", PALETTE[2]),
    )
    for depth, (name, text, times, colour) in enumerate(rows):
        x, y = 0.2 + depth * 0.38, 0.2 + depth * 0.13
        top = 4.2 - depth * 0.72
        shade = ("#f1f2f4", "#f0e6f2", "#faebe0", "#e6edf7", "#e3f0e8")[depth]
        box(axes, x, y, 8.8 - x - depth * 0.1, top - y, color=shade, edge=colour)
        label(axes, x + 0.2, top - 0.33, name, ink=colour, size=12, weight="bold", align="left")
        label(axes, x + 1.95, top - 0.33, text, size=10.5, align="left")
        label(axes, 8.6 - depth * 0.1, top - 0.33, times, ink=colour, size=13, weight="bold", align="right")
    return figure


if __name__ == "__main__":
    main({"01-loop": draw_loop, "01-travel": draw_travel, "01-nesting": draw_nesting})
