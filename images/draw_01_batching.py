"""Draw the figures of lesson 01: two runs and their records, the way of a sample, and stale samples."""

import math

import torch
from matplotlib.figure import Figure
from plots import panels, plain, show_image, signed
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


def draw_silent() -> Figure:
    """Rewards of ten healthy runs and of ten with one wrong line, and the records that both leave."""
    figure, axes = diagram(6, 4.9)
    upper = figure.add_axes((0.09, 0.54, 0.88, 0.395))
    for is_faulty, color in ((False, BLUE), (True, RED)):
        for seed in range(SEEDS):
            means = [round(mean, 2) for mean in _learn(seed, is_faulty)]
            upper.plot(range(1, EPOCHS + 1), means, color=color, linewidth=1.3, alpha=0.8)
    # E|x - GOAL| of a normal x around GOAL: the weight moves its mean, not its spread
    best = -math.sqrt(2 / math.pi * (1 + STEPS * STD**2))
    upper.axhline(best, color=INK, linewidth=1.4, linestyle=(0, (5, 3)), zorder=3)
    upper.text(20, -0.78, f"best possible: −{-best:.2f}", color=INK, ha="right")
    upper.text(20, -0.2, "correct, 10 runs", color=BLUE, weight="bold", ha="right")
    upper.text(2.2, -4.8, "one line wrong, 10 runs", color=RED, weight="bold")
    upper.set(xlim=(0.5, 20.5), ylim=(-5.2, 0.2), xticks=(1, 5, 10, 15, 20))
    upper.set_xlabel("epoch", color=INK)
    upper.set_title("mean reward of an epoch", color=INK)
    plain(upper, colors=INK)
    records = (  # section 5 of the notebook prints those of the red loop
        ("forward passes", "24"),
        ("optimizer steps", "4"),
        ("samples in each of them", "16"),
        ("ratios of 1 at first", "192 / 192"),
        ("gradient left over", "none"),
        ("mean of the advantages", "0.00"),
        ("errors, warnings", "none"),
    )
    label(axes, 0.2, 2.0, "records of an epoch", align="left", weight="bold")
    for x, name, ink in ((3.9, "blue", BLUE), (5.2, "red", RED)):
        label(axes, x, 2.0, name, ink=ink, weight="bold")
    for row, (name, value) in enumerate(records):
        y = 1.74 - 0.26 * row
        label(axes, 0.2, y, name, align="left")
        for x, ink in ((3.9, BLUE), (5.2, RED)):
            label(axes, x, y, value, ink=ink)
    return figure


def draw_loop() -> Figure:
    """One epoch: prompts are denoised into images and scored, then the policy is trained on them."""
    figure, axes = diagram(6, 6.65)
    box(axes, 0.1, 3.5, 5.8, 3.05, color=PALE_BLUE, edge=BLUE)
    label(axes, 0.25, 6.27, "1  Sampling phase", ink=BLUE, weight="bold", align="left")
    note(axes, 5.75, 6.27, "no gradients", align="right")
    for x, text in ((1.0, "prompt"), (3.05, "denoise, step by step"), (4.55, "reward"), (5.4, "advantage")):
        note(axes, x, 5.78, text, 12, "center")
    rewards = torch.tensor([0.9, 0.1, 0.5])
    advantages = (rewards - rewards.mean()) / rewards.std(correction=0)
    images = (_digit(3, 1.0), _digit(8, 1.0), _digit(3, 0.45))
    generator = torch.Generator().manual_seed(SEED)
    for row, (clean, reward, advantage) in enumerate(zip(images, rewards, advantages, strict=True)):
        y = 4.98 - row * 0.68
        label(axes, 1.0, y + 0.27, "a red three on\na blue background", size=12)
        noise = torch.randn(clean.shape, generator=generator) * 0.3 + 0.5
        for column, share in enumerate((0.0, 0.35, 0.7, 1.0)):
            x = 1.93 + column * 0.6
            show_image(axes, x, y + 0.02, 0.5, (share * clean + (1 - share) * noise).clamp(0, 1).numpy())
            if column:
                arrow(axes, (x - 0.11, y + 0.27), (x - 0.005, y + 0.27), width=1)
        ink = GREEN if advantage > 0.1 else RED if advantage < -0.1 else MUTED
        label(axes, 4.55, y + 0.27, f"{reward:.1f}")
        label(axes, 5.4, y + 0.27, signed(float(advantage), 1), ink=ink, size=14, weight="bold")
    arrow(axes, (0.6, 3.48), (0.6, 2.87), width=2)
    arrow(axes, (1.2, 2.87), (1.2, 3.48), width=2)
    label(axes, 1.4, 3.32, "next epoch: the changed policy samples", align="left")
    label(axes, 1.4, 3.04, "again; the old samples are thrown away", align="left")
    box(axes, 0.1, 0.1, 5.8, 2.75, color=PALE_ORANGE, edge=ORANGE)
    label(axes, 0.25, 2.57, "2  Training phase", ink=ORANGE, weight="bold", align="left")
    steps = (
        "shuffle the samples, cut them into minibatches",
        "replay the steps: how likely are they now?",
        "advantage > 0: more likely; < 0: less likely",
        "average the minibatches' gradients, then step",
    )
    for number, text in enumerate(steps):
        y = 1.95 - number * 0.58
        box(axes, 0.25, y, 4.95, 0.4, text, color=CARD, edge=ORANGE, size=12.5)
        if number:
            arrow(axes, (2.7, y + 0.58), (2.7, y + 0.41), ink=ORANGE)
    axes.plot([5.2, 5.38, 5.38], [0.41, 0.41, 1.57], color=ORANGE, linewidth=1.3)
    arrow(axes, (5.38, 1.57), (5.22, 1.57), ink=ORANGE)
    turned = {"rotation": 90, "ha": "center", "va": "center"}
    axes.text(5.62, 1.3, "next minibatches", color=ORANGE, **turned)
    return figure


def _shuffled_ids() -> list[int]:
    ids = {"id": torch.arange(PLAN.total_samples)}
    return shuffle_samples(ids, torch.Generator().manual_seed(SEED))["id"].tolist()


def draw_travel() -> Figure:
    """Eight numbered samples: sampled in two batches, shuffled, cut, trained on by two optimizer steps."""
    figure, axes = diagram(6, 7.45)
    order, steps, T = _shuffled_ids(), PLAN.optimizer_steps, PLAN.num_timesteps
    color = {n: PALETTE[row * steps // PLAN.total_samples] for row, n in enumerate(order)}  # by step
    pitch = 0.565
    middle = [1.5 + pitch * n + 0.12 * (n // 4) for n in range(8)]
    for batch in range(PLAN.num_batches_per_epoch):
        first, last = middle[4 * batch], middle[4 * batch + 3]
        note(axes, (first + last) / 2, 7.27, f"sample batch {batch}", align="center")
        axes.plot([first - 0.22, last + 0.22], [7.1, 7.1], color=MUTED, linewidth=1.5)
    for y, text in ((6.82, "sampled"), (5.75, "shuffled")):
        label(axes, 0.1, y, text, weight="bold", align="left")
    for sample in range(8):
        box(axes, middle[sample] - 0.22, 6.63, 0.44, 0.38, str(sample), color=color[sample])
    for place, sample in enumerate(order):
        arrow(axes, (middle[sample], 6.61), (middle[place], 5.96), ink=color[sample], width=1.2)
        box(axes, middle[place] - 0.22, 5.56, 0.44, 0.38, str(sample), color=color[sample])
    label(axes, 0.1, 5.1, "trained on: time runs to the right", weight="bold", align="left")
    left, width, gap, top, height = 1.36, 0.36, 0.12, 4.2, 0.43
    center = [top - (row + 0.5) * height for row in range(8)]
    for row, sample in enumerate(order):
        box(axes, 0.88, center[row] - 0.18, 0.38, 0.36, str(sample), color=color[sample])
    for number, batch in enumerate(minibatches({"id": torch.tensor(order)}, PLAN.train_batch_size)):
        first = number * PLAN.train_batch_size
        upper, lower = top - first * height, top - (first + len(batch["id"])) * height
        label(axes, 0.47, (upper + lower) / 2, f"mini-\nbatch {number}", ink=MUTED, size=12)
        for j in range(T):
            x = left + (number * T + j) * width + gap * (number // PLAN.gradient_accumulation_steps)
            for row in range(first, first + PLAN.train_batch_size):
                box(axes, x, center[row] - 0.18, width - 0.03, 0.36, color=color[order[row]])
    for column in range(PLAN.minibatches_per_inner_epoch * T):
        x = left + (column + 0.48) * width + gap * (column // (PLAN.gradient_accumulation_steps * T))
        label(axes, x, 4.66, str(column))
        label(axes, x, 4.38, str(column % T), ink=MUTED)
    label(axes, left - 0.08, 4.66, "forward pass", align="right")
    note(axes, left - 0.08, 4.38, "step j", align="right")
    for step in range(steps):
        calls = PLAN.gradient_accumulation_steps * T
        x0 = left + step * (calls * width + gap)
        x1 = x0 + calls * width
        axes.plot([x0 + 0.04, x1 - 0.06], [0.55, 0.55], color=PALETTE[step], linewidth=2.5)
        text = f"optimizer step {step + 1}"
        label(axes, (x0 + x1) / 2, 0.27, text, ink=PALETTE[step])
        end = x1 + gap / 2 - 0.02
        axes.plot([end, end], [0.5, 4.3], color=PALETTE[step], linewidth=1.5, linestyle=(0, (3, 2)))
        y = center[4 - 4 * step] - 0.65  # where the rows of the other step leave room
        label(axes, end - 0.33, y, "weights move", ink=PALETTE[step], align="right")
        arrow(axes, (end - 0.3, y), (end - 0.03, y), ink=PALETTE[step])
    return figure


def draw_nesting() -> Figure:
    """The levels of an epoch inside each other: each with its line of the loop and the count so far."""
    figure, axes = diagram(6, 4.9)
    E, steps, batches = PLAN.num_inner_epochs, PLAN.optimizer_steps, PLAN.minibatches_per_inner_epoch
    passes = batches * PLAN.num_timesteps
    rows = (
        ("inner epoch", "for inner_epoch in range(E):", "× 1", f"{E} inner epoch", PALETTE[3]),
        ("optimizer step", "for m minibatches at a time:", "× 2", f"{steps} steps", ORANGE),
        ("minibatch", "for batch in these m:", "× 2", f"{batches} minibatches", BLUE),
        ("denoising step", "for j in range(T):", "× 3", f"{passes} forward passes", GREEN),
        ("sample", "b samples at once", "× 2", f"{PLAN.total_pairs} pairs", PALETTE[4]),
    )
    note(axes, 5.75, 4.72, "times, and the running product", align="right")
    shades = ("#f0e6f2", "#faebe0", "#e6edf7", "#e3f0e8", "#f3eddd")
    for depth, ((name, code, times, product, color), shade) in enumerate(zip(rows, shades, strict=True)):
        x, bottom, top = 0.1 + 0.18 * depth, 0.1 + 0.07 * depth, 4.52 - 0.83 * depth
        box(axes, x, bottom, 5.9 - x - 0.09 * depth, top - bottom, color=shade, edge=color)
        y = top - 0.24
        label(axes, x + 0.15, y, name, ink=color, weight="bold", align="left")
        axes.text(x + 0.15, y - 0.33, code, color=INK, family="DejaVu Sans Mono", va="center")
        label(axes, 3.38, y, times, ink=color, size=14, weight="bold")
        label(axes, 5.42, y, product, align="right")
    return figure


def draw_recut() -> Figure:
    """Two inner epochs: the same eight samples, shuffled and cut again."""
    figure, axes = diagram(6, 2.05)
    generator = torch.Generator().manual_seed(SEED)
    ids = {"id": torch.arange(PLAN.total_samples)}
    home = {n: (PALETTE[3], GREEN)[n // 4] for n in range(8)}  # not the colors of optimizer steps
    for row in range(2):
        y = 1.1 - 0.57 * row
        label(axes, 0.1, y + 0.2, f"inner epoch {row + 1}", weight="bold", align="left")
        for place, sample in enumerate(shuffle_samples(ids, generator)["id"].tolist()):
            x = 1.6 + 0.52 * place + 0.2 * (place // 4)
            box(axes, x, y, 0.44, 0.4, str(sample), color=home[sample])
    for step in range(2):
        label(axes, 2.6 + 2.28 * step, 1.8, f"optimizer step {step + 1}", ink=MUTED)
    label(axes, 3.74, 0.2, "number: sample, color: its sample batch", ink=MUTED)
    axes.plot([3.74, 3.74], [0.45, 1.7], color=INK, linewidth=1.4, linestyle=(0, (3, 2)))
    return figure


def draw_moments() -> Figure:
    """Twelve forward passes of four minibatches, and three rules for when to take an optimizer step."""
    figure, axes = diagram(6, 3.75)
    rules = (
        ("correct", lambda i, j: i % 2 == 1 and j == 2),
        ("off by one", lambda i, j: i % 2 == 0 and j == 2),
        ("passes counted", lambda i, j: (3 * i + j) % 2 == 1),
    )
    for row, (name, ends) in enumerate(rules):
        y, step = 2.4 - 0.84 * row, 0
        label(axes, 0.1, y + 0.6, name, weight="bold", align="left")
        last = max(3 * i + j for i in range(4) for j in range(3) if ends(i, j))
        for n in range(12):
            i, j = divmod(n, 3)
            x = 0.1 + 0.465 * n + 0.07 * i
            color = MUTED if n > last else PALETTE[step % 5]
            box(axes, x, y, 0.44, 0.4, f"j={j}", color=color)
            if ends(i, j):
                step += 1
                end = x + 0.455 if j < 2 else x + 0.5
                axes.plot([end, end], [y - 0.08, y + 0.47], color=INK, linewidth=2.2)
    for i in range(4):
        label(axes, 0.1 + 1.49 * i + 0.69, 3.55, f"minibatch {i}", ink=MUTED)
    label(axes, 3.0, 0.42, "one color: gradients that add up", ink=MUTED)
    label(axes, 3.0, 0.16, "bar: the weights move;  gray: left over", ink=MUTED)
    return figure


def draw_wrong_line() -> Figure:
    """What the red loop multiplies: shuffled rows with advantages in the order of sampling."""
    figure, axes = diagram(6, 3.3)
    shuffled, unmoved = _shuffled_ids(), list(range(8))
    cases = (
        (1.75, "correct", "Both rows were moved by one order.", BLUE, shuffled),
        (0.1, "red", "The advantages are in the order of sampling.", RED, unmoved),
    )
    for y, title, remark, ink, owners in cases:
        label(axes, 0.1, y + 1.28, title, ink=ink, weight="bold", align="left")
        label(axes, 1.1, y + 1.28, remark, align="left")
        for height, name in ((0.57, "samples"), (0.05, "advantages of")):
            label(axes, 1.5, y + height + 0.2, name, ink=MUTED, align="right")
        for place, (sample, owner) in enumerate(zip(shuffled, owners, strict=True)):
            left = 1.65 + 0.53 * place
            box(axes, left, y + 0.57, 0.46, 0.42, str(sample), color=PALETTE[0])
            color = GREEN if sample == owner else RED
            box(axes, left, y + 0.05, 0.46, 0.42, str(owner), color=color)
    return figure


def draw_stale() -> Figure:
    """What stale samples cost: the ESS ratio, and the error of the average gradient."""
    figure, (share, error) = panels(2, (6, 5.9), stacked=True)
    shifts = [n / 100 for n in range(101)]
    spread = math.sqrt(1 + STEPS * STD**2)

    def slope(distance: float) -> float:
        """The gradient at a distance from the goal, but for a factor: 2 Φ(distance / spread) - 1."""
        return math.erf(distance / spread / math.sqrt(2))

    for power, name, color in ((1, "ρ of each pair", BLUE), (STEPS, "product of\nthe three ρ", GREEN)):
        share.plot(shifts, [math.exp(-power * d**2) for d in shifts], color=color, linewidth=2)
        x, y = 0.62 if power == 1 else 0.18, math.exp(-power * 0.62**2) + 0.04
        share.text(x, y, name, color=color, weight="bold")
    share.set_title("ESS ratio", color=INK)
    share.set(ylim=(0, 1.05), yticks=(0, 0.5, 1), yticklabels=("0", "50%", "100%"))
    for theta, color in ((0.0, PALETTE[4]), (0.8, RED)):
        goal = GOAL - STEPS * theta
        for moved, style in ((0, "-"), (1, (0, (4, 2)))):  # steps whose draw is weighted
            ends = [d for d in shifts if goal - STEPS * d * STD > 0.05]
            values = [slope(goal - moved * d * STD) / slope(goal - STEPS * d * STD) - 1 for d in ends]
            error.plot(ends, values, color=color, linewidth=2, linestyle=style)
    error.text(0.31, 1.3, "old policy near\nthe goal, θ = 0.8", color=RED, weight="bold")
    error.text(0.6, 0.33, "far from it, θ = 0", color=PALETTE[4], weight="bold")
    error.text(0.6, 0.75, "solid: no ρ\ndashed: ρ of each pair", color=INK)
    error.set_title("gradient too large by", color=INK)
    error.set(ylim=(0, 1.6), yticks=(0, 0.5, 1, 1.5), yticklabels=("0", "50%", "100%", "150%"))
    plain(share, error, colors=INK)
    for axes in (share, error):
        axes.set(xlim=(0, 1))
        axes.set_xlabel("d: how far the mean has moved, in σ", color=INK)
    return figure


if __name__ == "__main__":
    drawn = {"01-silent": draw_silent, "01-loop": draw_loop, "01-travel": draw_travel, "01-recut": draw_recut}
    drawn |= {"01-nesting": draw_nesting, "01-moments": draw_moments, "01-wrong-line": draw_wrong_line}
    main({**drawn, "01-stale": draw_stale})
