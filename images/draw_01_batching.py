"""Draw the figures of lesson 01: two runs and their records, the way of a sample, and stale samples."""

import math

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import minus, panels, plain, show_image
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main, note

from ddpo_lessons.batching import EpochPlan, Samples, minibatches, shuffle_samples
from ddpo_lessons.worlds.digits import COLORS, handwriting, render

BLUE, ORANGE, GREEN, RED = PALETTE[0], PALETTE[1], PALETTE[2], PALETTE[5]
PALE_BLUE, PALE_ORANGE = "#e6edf7", "#faebe0"
SEED = 0  # the notebook's: the same shuffle
# Settings (a) of the notebook.
NUMBERS = {"train_batch_size": 2, "gradient_accumulation_steps": 2, "num_inner_epochs": 1}
PLAN = EpochPlan(sample_batch_size=4, num_batches_per_epoch=2, num_timesteps=3, **NUMBERS)
# The notebook's toy: latents are numbers, the reward is minus the distance of the last one from GOAL.
STD, GOAL, STEPS, SAMPLES, EPOCHS, SEEDS = 0.5, 3.0, 3, 64, 20, 10


def card(width: float, height: float) -> tuple[Figure, Axes]:
    """Make an empty card that is shown smaller than its coordinates, so that texts are larger in it."""
    figure, axes = diagram(width, height)
    figure.set_size_inches(0.8 * width, 0.8 * height)
    return figure, axes


def _sample(shift: float, generator: torch.Generator, count: int = SAMPLES) -> Samples:
    states = [torch.randn(count, generator=generator)]
    for _ in range(STEPS):
        states.append(states[-1] + shift + STD * torch.randn(count, generator=generator))
    path = torch.stack(states, dim=1)  # (B, T + 1)
    rewards = -(path[:, -1] - GOAL).abs()
    advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
    return {"moves": path.diff(dim=1), "rewards": rewards, "advantages": advantages}


def _learn(seed: int, is_faulty: bool = False) -> list[float]:
    """Train the toy as the notebook does; return the epochs' rewards. Its gradient is written out here."""
    shift, generator, history = 0.0, torch.Generator().manual_seed(seed), []
    for _ in range(EPOCHS):
        samples, old = _sample(shift, generator), shift
        history.append(float(samples["rewards"].mean()))
        shuffled = shuffle_samples(samples, generator)
        if is_faulty:
            shuffled["advantages"] = samples["advantages"]
        for batch in minibatches(shuffled, 16):  # of an optimizer step
            now, then = batch["moves"] - shift, batch["moves"] - old
            ratio = ((then.square() - now.square()) / (2 * STD**2)).exp()  # (16, T)
            shift += 0.1 * float((batch["advantages"][:, None] * ratio * now / STD**2).mean())
    return history


def _digit(digit: int, strength: float) -> torch.Tensor:
    """Render handwriting as a red digit on blue, (32, 32, 3), blended with its background."""
    bitmaps, labels = handwriting("train")
    bitmap = bitmaps[labels == digit][4:5]
    ink, paper = torch.tensor([COLORS["red"]]), torch.tensor([COLORS["blue"]])
    ink = strength * ink + (1 - strength) * paper
    upright = torch.tensor([[[1.14, 0, 0], [0, 1.14, 0]]])  # with a margin
    return render(bitmap, ink, paper, upright)[0].permute(1, 2, 0)


def _signed(value: float) -> str:
    return minus(f"{value:+.1f}") if abs(value) > 0.05 else "0.0"


def draw_silent() -> Figure:
    """Rewards of ten healthy runs and of ten with one wrong line, and the records that both leave."""
    figure, axes = card(10, 3.5)
    left = figure.add_axes((0.06, 0.185, 0.46, 0.69))
    for is_faulty, color in ((False, BLUE), (True, RED)):
        for seed in range(SEEDS):
            means = [round(mean, 2) for mean in _learn(seed, is_faulty)]
            left.plot(range(1, EPOCHS + 1), means, color=color, linewidth=1.3, alpha=0.8)
    # E|x - GOAL| of a normal x around GOAL: the weight moves its mean, not its spread
    best = -math.sqrt(2 / math.pi * (1 + STEPS * STD**2))
    left.axhline(best, color=INK, linewidth=1.4, linestyle=(0, (5, 3)), zorder=3)
    left.text(20, -0.62, f"best possible: −{-best:.2f}", color=INK, fontsize=10, ha="right")
    left.text(20, -0.25, "correct, 10 runs", color=BLUE, fontsize=12, weight="bold", ha="right")
    left.text(2.2, -4.7, "one line wrong, 10 runs", color=RED, fontsize=12, weight="bold")
    left.set(xlim=(0.5, 20.5), ylim=(-5.2, 0), xticks=(1, 5, 10, 15, 20))
    left.set_xlabel("epoch", color=INK, fontsize=11)
    left.set_title("mean reward of an epoch", color=INK, fontsize=12, loc="left")
    plain(left, colors=INK, labelsize=10.5)
    label(axes, 5.7, 3.25, "records of an epoch", size=12, align="left")
    records = (  # section 5 of the notebook prints those of the red loop
        ("forward passes", "24"),
        ("optimizer steps", "4"),
        ("samples in each of them", "16"),
        ("ratios of 1 at first", "192 / 192"),
        ("gradient left over", "none"),
        ("mean of the advantages", "0.00"),
        ("errors, warnings", "none"),
    )
    for x, name, ink in ((8.35, "blue", BLUE), (9.4, "red", RED)):
        label(axes, x, 2.88, name, ink=ink, size=10.5, weight="bold")
    for row, (name, value) in enumerate(records):
        y = 2.52 - 0.35 * row
        label(axes, 5.7, y, name, size=10, align="left")
        for x, ink in ((8.35, BLUE), (9.4, RED)):
            label(axes, x, y, value, ink=ink, size=10)
    return figure


def draw_loop() -> Figure:
    """One epoch: prompts are denoised into images and scored, then the policy is trained on them."""
    figure, axes = card(10, 5.3)
    box(axes, 0.15, 1.0, 6.05, 4.1, color=PALE_BLUE, edge=BLUE)
    label(axes, 0.35, 4.82, "1  Sampling phase", ink=BLUE, size=13, weight="bold", align="left")
    note(axes, 6.0, 4.82, "no gradients; everything is recorded", 10, "right")
    for x, text in ((0.95, "prompt"), (3.05, "denoise, step by step"), (4.75, "reward"), (5.6, "advantage")):
        note(axes, x, 4.4, text, 10, "center")
    rewards = torch.tensor([0.9, 0.1, 0.5])
    advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
    images = (_digit(3, 1.0), _digit(8, 1.0), _digit(3, 0.45))
    generator = torch.Generator().manual_seed(SEED)
    for row, (clean, reward, advantage) in enumerate(zip(images, rewards, advantages, strict=True)):
        y = 3.35 - row * 1.07
        label(axes, 0.95, y + 0.38, "a red three on\na blue background", size=9)
        noise = torch.randn(clean.shape, generator=generator) * 0.3 + 0.5
        for column, share in enumerate((0.0, 0.35, 0.7, 1.0)):
            x = 1.87 + column * 0.64
            show_image(axes, x, y + 0.12, 0.52, (share * clean + (1 - share) * noise).clamp(0, 1).numpy())
            if column:
                arrow(axes, (x - 0.11, y + 0.38), (x - 0.005, y + 0.38), width=1)
        ink = GREEN if advantage > 0.1 else RED if advantage < -0.1 else MUTED
        label(axes, 4.75, y + 0.38, f"{reward:.1f}", size=11)
        label(axes, 5.6, y + 0.38, _signed(float(advantage)), ink=ink, size=12, weight="bold")
    box(axes, 6.75, 1.0, 3.1, 4.1, color=PALE_ORANGE, edge=ORANGE)
    label(axes, 6.95, 4.82, "2  Training phase", ink=ORANGE, size=13, weight="bold", align="left")
    steps = (
        "shuffle the samples,\ncut them into minibatches",
        "replay the denoising steps:\nhow likely are they now?",
        "advantage > 0: more likely\nadvantage < 0: less likely",
        "average the gradients of\nminibatches, then step",
    )
    for number, text in enumerate(steps):
        y = 3.83 - number * 0.9
        box(axes, 6.87, y, 2.5, 0.66, text, color=CARD, edge=ORANGE, size=10)
        if number:
            arrow(axes, (8.12, y + 0.9), (8.12, y + 0.68), ink=ORANGE)
    axes.plot([9.37, 9.52, 9.52], [1.46, 1.46, 3.26], color=ORANGE, linewidth=1.3)
    arrow(axes, (9.52, 3.26), (9.39, 3.26), ink=ORANGE)
    turned = {"rotation": 90, "ha": "center", "va": "center"}
    axes.text(9.68, 2.36, "next minibatches", color=ORANGE, fontsize=10, **turned)
    arrow(axes, (6.22, 3.0), (6.73, 3.0), width=2)
    axes.plot([8.3, 8.3, 3.2], [0.98, 0.42, 0.42], color=INK, linewidth=2)
    arrow(axes, (3.2, 0.42), (3.2, 0.98), width=2)
    label(axes, 5.75, 0.7, "next epoch: the changed policy samples again", size=10.5)
    label(axes, 5.75, 0.2, "the old samples are thrown away", ink=MUTED, size=10)
    return figure


def _shuffled_ids() -> list[int]:
    ids = {"id": torch.arange(PLAN.total_samples)}
    return shuffle_samples(ids, torch.Generator().manual_seed(SEED))["id"].tolist()


def draw_travel() -> Figure:
    """Eight numbered samples: sampled in two batches, shuffled, cut, trained on by two optimizer steps."""
    figure, axes = card(10, 5.35)
    order, steps, T = _shuffled_ids(), PLAN.optimizer_steps, PLAN.num_timesteps
    top, height = 4.45, 0.47
    center = [top - (row + 0.5) * height for row in range(8)]
    color = {n: PALETTE[row * steps // PLAN.total_samples] for row, n in enumerate(order)}  # by step
    for x, text in ((1.22, "sampled"), (2.98, "shuffled"), (6.87, "trained on: time runs to the right")):
        label(axes, x, 5.05, text, size=12, weight="bold")
    for batch in range(PLAN.num_batches_per_epoch):
        y = center[4 * batch] + 0.23
        note(axes, 0.45, y - 2 * height + 0.02, f"sample\nbatch {batch}", 10, "center")
        axes.plot([0.85, 0.85], [y - 4 * height + 0.08, y - 0.06], color=MUTED, linewidth=1.5)
    for sample in range(8):
        box(axes, 1.0, center[sample] - 0.19, 0.44, 0.38, str(sample), color=color[sample], size=11)
    for row, sample in enumerate(order):
        arrow(axes, (1.46, center[sample]), (2.72, center[row]), ink=color[sample], width=1.2)
        box(axes, 2.76, center[row] - 0.19, 0.44, 0.38, str(sample), color=color[sample], size=11)
    left, width, gap = 3.95, 0.475, 0.14
    for number, batch in enumerate(minibatches({"id": torch.tensor(order)}, PLAN.train_batch_size)):
        first = number * PLAN.train_batch_size
        upper, lower = top - first * height, top - (first + len(batch["id"])) * height
        label(axes, 3.55, (upper + lower) / 2, f"mini-\nbatch {number}", ink=MUTED, size=9)
        for j in range(T):
            x = left + (number * T + j) * width + gap * (number // PLAN.gradient_accumulation_steps)
            for row in range(first, first + PLAN.train_batch_size):
                place = x, center[row] - 0.19, width - 0.03, 0.38
                box(axes, *place, f"j={j}", color=color[order[row]], size=10)
    for column in range(PLAN.minibatches_per_inner_epoch * T):
        x = left + (column + 0.48) * width + gap * (column // (PLAN.gradient_accumulation_steps * T))
        label(axes, x, 4.62, str(column), ink=MUTED, size=9)
    label(axes, left - 0.12, 4.62, "forward\npass", ink=MUTED, size=9, align="right")
    for step in range(steps):
        calls = PLAN.gradient_accumulation_steps * T
        x0 = left + step * (calls * width + gap)
        x1 = x0 + calls * width
        axes.plot([x0 + 0.04, x1 - 0.06], [0.5, 0.5], color=PALETTE[step], linewidth=2.5)
        text = f"optimizer step {step + 1}"
        label(axes, (x0 + x1) / 2, 0.27, text, ink=PALETTE[step], size=10)
        end = x1 + gap / 2 - 0.02
        axes.plot([end, end], [0.45, 4.5], color=PALETTE[step], linewidth=1.5, linestyle=(0, (3, 2)))
        y = center[4 - 4 * step] - 0.75  # where the rows of the other step leave room
        label(axes, end - 0.35, y, "weights move here", ink=PALETTE[step], size=10, align="right")
        arrow(axes, (end - 0.3, y), (end - 0.03, y), ink=PALETTE[step])
    return figure


def draw_nesting() -> Figure:
    """The levels of an epoch inside each other: each with its line of the loop and the count so far."""
    figure, axes = card(10, 4.6)
    E, steps, batches = PLAN.num_inner_epochs, PLAN.optimizer_steps, PLAN.minibatches_per_inner_epoch
    passes = batches * PLAN.num_timesteps
    rows = (
        ("inner epoch", "for inner_epoch in range(E):", "1", f"{E} inner epoch", PALETTE[3]),
        ("optimizer step", "   for m minibatches at a time:", "× 2", f"{steps} steps", ORANGE),
        ("minibatch", "      for batch in these m:", "× 2", f"{batches} minibatches", BLUE),
        ("denoising step", "         for j in range(T):", "× 3", f"{passes} forward passes", GREEN),
        ("sample", "            b samples at once", "× 2", f"{PLAN.total_pairs} pairs", PALETTE[4]),
    )
    for x, text in ((0.35, "level"), (2.6, "the loop, in short"), (6.75, "times"), (7.75, "running product")):
        label(axes, x, 4.3, text, ink=MUTED, size=11, align="left")
    shades = ("#f0e6f2", "#faebe0", "#e6edf7", "#e3f0e8", "#f3eddd")
    for depth, ((name, code, times, product, color), shade) in enumerate(zip(rows, shades, strict=True)):
        x, bottom, top = 0.15 + 0.24 * depth, 0.12 + 0.11 * depth, 4.05 - 0.72 * depth
        box(axes, x, bottom, 9.85 - x - 0.11 * depth, top - bottom, color=shade, edge=color)
        y = top - 0.36
        label(axes, x + 0.18, y, name, ink=color, size=12, weight="bold", align="left")
        axes.text(2.6, y, code, color=INK, fontsize=11, family="DejaVu Sans Mono", va="center")
        label(axes, 7.1, y, times, ink=color, size=13, weight="bold")
        label(axes, 7.7, y, product, size=10.5, align="left")
    return figure


def draw_recut() -> Figure:
    """Two inner epochs: the same eight samples, shuffled and cut again."""
    figure, axes = card(10, 2.3)
    generator = torch.Generator().manual_seed(SEED)
    ids = {"id": torch.arange(PLAN.total_samples)}
    home = {n: (PALETTE[3], GREEN)[n // 4] for n in range(8)}  # not the colors of optimizer steps
    for row in range(2):
        y = 1.15 - 0.75 * row
        label(axes, 1.55, y + 0.22, f"inner epoch {row + 1}", size=11, weight="bold", align="right")
        for place, sample in enumerate(shuffle_samples(ids, generator)["id"].tolist()):
            x = 1.85 + 0.9 * place + 0.25 * (place // 4)
            box(axes, x, y, 0.8, 0.44, f"sample {sample}", color=home[sample], size=9.5)
    for step, name in enumerate(("first", "second")):
        label(axes, 3.6 + 3.85 * step, 1.95, f"its {name} optimizer step", ink=MUTED, size=10.5)
    label(axes, 5.6, 0.15, "color: sample batch", ink=MUTED, size=9.5)
    axes.plot([5.505, 5.505], [0.32, 1.75], color=INK, linewidth=1.4, linestyle=(0, (3, 2)))
    return figure


def draw_moments() -> Figure:
    """Twelve forward passes of four minibatches, and three rules for when to take an optimizer step."""
    figure, axes = card(10, 3.2)
    rules = (
        ("correct", lambda i, j: i % 2 == 1 and j == 2),
        ("off by one", lambda i, j: i % 2 == 0 and j == 2),
        ("passes counted", lambda i, j: (3 * i + j) % 2 == 1),
    )
    for row, (name, ends) in enumerate(rules):
        y, step = 1.95 - 0.85 * row, 0
        label(axes, 2.35, y + 0.22, name, size=10.5, weight="bold", align="right")
        last = max(3 * i + j for i in range(4) for j in range(3) if ends(i, j))
        for n in range(12):
            i, j = divmod(n, 3)
            x = 2.55 + 0.58 * n + 0.08 * i
            color = MUTED if n > last else PALETTE[step % 5]
            box(axes, x, y, 0.55, 0.44, f"j={j}", color=color, size=9)
            if ends(i, j):
                step += 1
                end = x + 0.56 if j < 2 else x + 0.6
                axes.plot([end, end], [y - 0.14, y + 0.58], color=INK, linewidth=2.2)
    for i in range(4):
        label(axes, 2.55 + 1.82 * i + 0.86, 2.72, f"minibatch {i}", ink=MUTED, size=10)
    legend = "one color: gradients that add up;  bar: the weights move;  gray: left over"
    label(axes, 6.1, 2.93, legend, size=10)
    return figure


def draw_wrong_line() -> Figure:
    """What the red loop multiplies: shuffled rows with advantages in the order of sampling."""
    figure, axes = card(10, 2.7)
    shuffled, unmoved = _shuffled_ids(), list(range(8))
    for x, title, ink, owners in ((0.3, "correct", BLUE, shuffled), (5.3, "red", RED, unmoved)):
        label(axes, x + 0.05, 2.4, title, ink=ink, size=12, weight="bold", align="left")
        for y, name in ((1.6, "samples"), (0.85, "advantages of")):
            label(axes, x + 0.98, y + 0.22, name, ink=MUTED, size=9.5, align="right")
        for place, (sample, owner) in enumerate(zip(shuffled, owners, strict=True)):
            left = x + 1.05 + 0.44 * place
            box(axes, left, 1.6, 0.41, 0.44, str(sample), color=PALETTE[0], size=11)
            is_right = sample == owner
            color = GREEN if is_right else RED
            box(axes, left, 0.85, 0.41, 0.44, str(owner), color=color, size=11)
    label(axes, 0.35, 0.4, "Both rows were moved by one order.", size=10.5, align="left")
    text = "The advantages are in the order of sampling."
    label(axes, 5.35, 0.4, text, size=10.5, align="left")
    return figure


def draw_stale() -> Figure:
    """What stale samples cost: the ESS ratio, and the error of the average gradient."""
    figure, (share, error) = panels(2, (8, 3.2))
    shifts = [n / 100 for n in range(101)]
    spread = math.sqrt(1 + STEPS * STD**2)

    def slope(distance: float) -> float:
        """The gradient at a distance from the goal, but for a factor: 2 Φ(distance / spread) - 1."""
        return math.erf(distance / spread / math.sqrt(2))

    for power, name, color in ((1, "ρ of each pair", BLUE), (STEPS, "product of\nthe three ρ", GREEN)):
        share.plot(shifts, [math.exp(-power * d**2) for d in shifts], color=color, linewidth=2)
        x, y = 0.62 if power == 1 else 0.1, math.exp(-power * 0.62**2) + 0.04
        share.text(x, y, name, color=color, weight="bold", fontsize=10)
    share.set_title("ESS ratio", color=INK, fontsize=12, loc="left")
    share.set(ylim=(0, 1.05), yticks=(0, 0.5, 1), yticklabels=("0", "50%", "100%"))
    for theta, color in ((0.0, PALETTE[4]), (0.8, RED)):
        goal = GOAL - STEPS * theta
        for moved, style in ((0, "-"), (1, (0, (4, 2)))):  # steps whose draw is weighted
            ends = [d for d in shifts if goal - STEPS * d * STD > 0.05]
            values = [slope(goal - moved * d * STD) / slope(goal - STEPS * d * STD) - 1 for d in ends]
            error.plot(ends, values, color=color, linewidth=2, linestyle=style)
    error.text(0.31, 1.3, "old policy near\nthe goal, θ = 0.8", color=RED, weight="bold", fontsize=10)
    error.text(0.52, 0.27, "far from it, θ = 0", color=PALETTE[4], weight="bold", fontsize=10)
    error.text(0.52, 0.75, "solid: no ρ\ndashed: ρ of each pair", color=INK, fontsize=10)
    error.set_title("gradient too large by", color=INK, fontsize=12, loc="left")
    error.set(ylim=(0, 1.6), yticks=(0, 0.5, 1, 1.5), yticklabels=("0", "50%", "100%", "150%"))
    plain(share, error, colors=INK, labelsize=10.5)
    for axes in (share, error):
        axes.set(xlim=(0, 1))
        axes.set_xlabel("d: how far the mean has moved, in σ", color=INK, fontsize=11)
    return figure


if __name__ == "__main__":
    drawn = {"01-silent": draw_silent, "01-loop": draw_loop, "01-travel": draw_travel, "01-recut": draw_recut}
    drawn |= {"01-nesting": draw_nesting, "01-moments": draw_moments, "01-wrong-line": draw_wrong_line}
    main({**drawn, "01-stale": draw_stale})
