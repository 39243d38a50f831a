"""Diagrams of lesson 03: rollouts with and without noise, the denoising MDP, a denoising step, the log-ratio.

The pictures are of runs of tiny-sd that happened: `denoise` makes them, and `03-frames.png` keeps them, so
that the diagrams are the same on every machine. Delete that file to run them again.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main

BLUE, ORANGE, GREEN, PURPLE = PALETTE[:4]
FRAMES = Path(__file__).parent / "03-frames.png"
PROMPT = "a red three on a blue background"
TIMES = (999, 899, 799, 699, 599, 499, 399, 299, 199, 99, 0)  # of the latents on the way
START = 5  # of the seeds 1 to 6, the one whose endings with noise differ most, chosen by eye

# The case that the lesson works out by pencil, with η = 1 and the draw z = 1.
ALPHA_BAR, ALPHA_BAR_NEXT, X0, NOISE, Z, DRIFT = 0.36, 0.64, 1.0, -0.5, 1.0, 1.5
VARIANCE = (1 - ALPHA_BAR_NEXT) / (1 - ALPHA_BAR) * (1 - ALPHA_BAR / ALPHA_BAR_NEXT)
KEPT = 1 - ALPHA_BAR_NEXT - VARIANCE
STD, MEAN = math.sqrt(VARIANCE), math.sqrt(ALPHA_BAR_NEXT) * X0 + math.sqrt(KEPT) * NOISE


def denoise() -> None:
    """Run tiny-sd from one start, twice with noise and twice without, and keep every latent's picture."""
    import torch

    from ddpo_lessons.families import family_of
    from ddpo_lessons.tiny import load_tiny_sd

    pipeline = load_tiny_sd()
    family, scheduler = family_of(pipeline), pipeline.scheduler
    conditioning = family.condition([PROMPT] * 2, negative_prompt="", guidance_scale=1.0)
    scheduler.set_timesteps(len(TIMES) - 1)
    rows = []
    for eta in (1.0, 0.0):
        generator = torch.Generator().manual_seed(100 + START)
        start = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(START))
        states = [start.repeat(2, 1, 1, 1)]  # (2, 4, 8, 8) each
        for t in scheduler.timesteps:
            with torch.no_grad():
                output = family.predict(pipeline.unet, states[-1], t.expand(2), conditioning, 1.0)
            step = scheduler.step(output, t, states[-1], eta=eta, generator=generator)
            states.append(step.prev_sample)
        rows += [torch.cat([family.decode(state[n : n + 1]) for state in states]) for n in (0, 1)]
    pixels = torch.stack(rows).mul(255).round().byte()  # (4, 11, 3, 32, 32)
    assert torch.equal(pixels[2], pixels[3]), "without noise both runs are one"
    grid = pixels.permute(0, 3, 1, 4, 2).reshape(4 * 32, len(TIMES) * 32, 3)
    Image.fromarray(grid.numpy()).save(FRAMES, optimize=True)


def frames() -> np.ndarray:
    """Return the kept pictures, (4, 11, 32, 32, 3): two rollouts with noise, two without."""
    if not FRAMES.exists():
        denoise()
    pixels = np.asarray(Image.open(FRAMES))
    return pixels.reshape(4, 32, len(TIMES), 32, 3).transpose(0, 2, 1, 3, 4)


def picture(axes: Axes, x: float, y: float, size: float, pixels: np.ndarray, edge: str | None = None) -> None:
    """Show pixels (32, 32, 3) with the lower left corner at (x, y)."""
    axes.imshow(pixels, extent=(x, x + size, y, y + size), interpolation="none", zorder=3, aspect="auto")
    if edge:
        frame = Rectangle((x, y), size, size, facecolor="none", edgecolor=edge, linewidth=2.5, zorder=4)
        axes.add_patch(frame)


def filmstrip() -> Figure:
    """Four rollouts from one start: endings differ with noise and agree without."""
    figure, axes = diagram(9.4, 4.15)
    strips = frames()
    title = "One start, one prompt, the same weights: four rollouts"
    label(axes, 0.2, 3.9, title, weight="bold", size=12, align="left")
    size, pitch, left = 0.64, 0.685, 1.75
    for column, t in enumerate(TIMES):
        name = {0: "t = 999", len(TIMES) - 1: "x$_0$"}.get(column, str(t))
        label(axes, left + column * pitch + size / 2, 3.55, name, ink=MUTED, size=9.5)
    for row, y in enumerate((2.73, 2.05, 1.15, 0.47)):
        for column, pixels in enumerate(strips[row]):
            last = column == len(TIMES) - 1
            edge = (ORANGE if row < 2 else BLUE) if last else None
            picture(axes, left + column * pitch, y, size, pixels, edge)
    for y, color, text in (
        (2.71, ORANGE, "with fresh noise\non the way\n(η = 1):\ntwo endings"),
        (1.13, BLUE, "no fresh noise\n(η = 0):\none ending,\ntwice"),
    ):
        label(axes, 0.9, y, text, ink=color, size=10, weight="bold")
    note = f"tiny-sd, “{PROMPT}”; every latent decoded on the way from noise to picture"
    label(axes, left + 5 * pitch + size / 2, 0.2, note, ink=MUTED, size=9.5)
    axes.set(xlim=(0, 9.4), ylim=(0, 4.15))
    return figure


def mdp() -> Figure:
    """States are latents of a real rollout; between two of them stands the policy with its action."""
    figure, axes = diagram(9.4, 3.75)
    strip, size, y = frames()[1], 1.2, 1.55
    title = "A rollout: state, action, next state; one reward, at the end"
    label(axes, 0.25, 3.48, title, weight="bold", size=12, align="left")
    for x, t, title, name in (
        (0.3, 999, "first state", "noise,  t = 999"),
        (2.2, 499, "state", "x$_t$ ,  t = 499"),
        (5.75, 399, "next state", "x$_{t-1}$ ,  t = 399"),
        (7.65, 0, "the end", "x$_0$"),
    ):
        picture(axes, x, y, size, strip[TIMES.index(t)])
        label(axes, x + size / 2, y + size + 0.2, title, weight="bold")
        label(axes, x + size / 2, y - 0.22, name, size=10.5)
    for x in (1.85, 7.3):
        label(axes, x, y + size / 2, "…", size=18)
    z = np.linspace(-2.7, 2.7, 101)
    center, floor = 4.57, y + 0.28
    axes.fill_between(center + 0.27 * z, floor, floor + 0.72 * np.exp(-(z**2) / 2), color=GREEN, alpha=0.25)
    axes.plot(center + 0.27 * z, floor + 0.72 * np.exp(-(z**2) / 2), color=GREEN, linewidth=1.8)
    axes.plot(
        [center + 0.27, center + 0.27], [floor, floor + 0.72 * math.exp(-0.5)], color=INK, linewidth=1.3
    )
    axes.plot(center + 0.27, floor, "o", color=INK, markersize=6)
    label(axes, center, y + size + 0.05, "policy: N(μ, σ² I)", ink=GREEN, weight="bold")
    label(axes, center + 0.3, floor - 0.22, "action: x$_{t-1}$ , drawn", size=10)
    arrow(axes, (3.48, y + size / 2), (3.84, y + size / 2))
    arrow(axes, (5.3, y + size / 2), (5.7, y + size / 2))
    box(axes, 7.45, 0.3, 1.6, 0.6, "reward r", color=PURPLE, size=11)
    arrow(axes, (8.25, 1.2), (8.25, 0.9))
    notes = (
        f"The prompt c = “{PROMPT}” belongs to every state.",
        "The network decides μ, the schedule σ. No reward before the end.",
    )
    for y, note in zip((0.75, 0.45), notes, strict=True):
        label(axes, 0.3, y, note, ink=MUTED, align="left")
    axes.set(xlim=(0, 9.4), ylim=(0, 3.75))
    return figure


def step_parts() -> Figure:
    """How a denoising step divides the variance 1 of its outcome, in the lesson's numbers."""
    figure, axes = diagram(9.4, 3.75)
    before, after = r"$\bar{\alpha}_t$", r"$\bar{\alpha}_{t-1}$"
    label(axes, 0.25, 3.46, "What x$_{t-1}$ is made of", weight="bold", size=12, align="left")
    case = f"(by pencil: {before} = {ALPHA_BAR}, {after} = {ALPHA_BAR_NEXT}, η = 1)"
    label(axes, 2.75, 3.46, case, ink=MUTED, align="left")
    left, width = 1.6, 7.5
    rows = [
        (2.35, "x$_t$", [(ALPHA_BAR, BLUE, "picture\n0.36"), (1 - ALPHA_BAR, ORANGE, "noise\n0.64")]),
        (
            0.95,
            "x$_{t-1}$",
            [
                (ALPHA_BAR_NEXT, BLUE, "picture\n0.64"),
                (KEPT, ORANGE, f"noise\nthat stays\n{KEPT:.3f}"),
                (VARIANCE, GREEN, f"fresh noise\n{VARIANCE:.3f}"),
            ],
        ),
    ]
    for y, name, parts in rows:
        label(axes, 1.15, y + 0.35, name, size=14)
        start = left
        for share, color, text in parts:
            bar = Rectangle((start, y), share * width, 0.7, facecolor=color, edgecolor=CARD, linewidth=2)
            axes.add_patch(bar)
            label(axes, start + share * width / 2, y + 0.35, text, ink="white", size=9.5)
            start += share * width
    label(axes, 0.25, 2.7, "before", ink=MUTED, align="left")
    label(axes, 0.25, 1.3, "after", ink=MUTED, align="left")
    share = "length of a bar = share of the variance; every row adds up to 1"
    label(axes, left + width / 2, 2.0, share, ink=MUTED)
    formula = [
        (0.3, BLUE, r"$\sqrt{\bar{\alpha}_{t-1}}\;\hat{x}_0$"),
        (0.655, ORANGE, r"$+\;\sqrt{1-\bar{\alpha}_{t-1}-\sigma^2}\;\hat{\varepsilon}$"),
        (0.9, GREEN, r"$+\;\sigma z$"),
    ]
    for x, color, text in formula:
        label(axes, left + x * width, 0.58, text, ink=color, size=13)
    note = r"the network's estimates $\hat{x}_0$ and $\hat{\varepsilon}$, and a draw z ~ N(0, I)"
    label(axes, left + width / 2, 0.2, note, ink=MUTED, size=9.5)
    return figure


def replay() -> Figure:
    """Sampling draws an action and stores it; training scores the stored one."""
    figure, axes = diagram(9.4, 4.1)
    for x, title, color in ((0.25, "sampling: draw the action", BLUE), (5.0, "training: replay it", ORANGE)):
        label(axes, x, 3.85, title, weight="bold", size=12, align="left", ink=color)
    old, new = r"log π$_{\theta_\mathrm{old}}$", r"log π$_\theta$"
    box(axes, 0.25, 2.75, 1.5, 0.75, "x$_t$, t, prompt", color=BLUE)
    box(axes, 2.35, 2.75, 2.0, 0.75, "μ$_{old}$, σ  with the\nold weights θ$_{old}$", color=MUTED)
    arrow(axes, (1.75, 3.13), (2.35, 3.13))
    box(axes, 2.35, 1.6, 2.0, 0.75, "x$_{t-1}$ = μ$_{old}$ + σ z", color=GREEN)
    arrow(axes, (3.35, 2.75), (3.35, 2.35))
    box(axes, 2.35, 0.45, 2.0, 0.75, old, color=PURPLE, size=12)
    arrow(axes, (3.35, 1.6), (3.35, 1.2))
    box(axes, 5.0, 2.75, 1.5, 0.75, "x$_t$, t, prompt", color=BLUE)
    box(axes, 7.1, 2.75, 2.0, 0.75, "μ, σ  with today's\nweights θ", color=MUTED)
    arrow(axes, (6.5, 3.13), (7.1, 3.13))
    box(axes, 7.1, 1.6, 2.0, 0.75, "how likely is the\nsame x$_{t-1}$ now?", color=GREEN)
    arrow(axes, (8.1, 2.75), (8.1, 2.35))
    box(axes, 7.1, 0.45, 2.0, 0.75, new, color=PURPLE, size=12)
    arrow(axes, (8.1, 1.6), (8.1, 1.2))
    arrow(axes, (4.35, 1.98), (7.1, 1.98), ink=GREEN, width=2.2)
    label(axes, 5.72, 2.2, "stored, then replayed", ink=GREEN, size=10, weight="bold")
    label(axes, 5.72, 1.74, "as prev_sample", ink=MUTED, size=9.5)
    arrow(axes, (4.35, 0.83), (4.85, 0.83), ink=PURPLE)
    arrow(axes, (7.1, 0.83), (6.6, 0.83), ink=PURPLE)
    label(axes, 5.72, 0.97, "ratio ρ =", size=11)
    label(axes, 5.72, 0.69, "exp(new − old)", size=11)
    label(axes, 1.2, 1.98, "z ~ N(0, I)", ink=MUTED)
    arrow(axes, (1.75, 1.98), (2.35, 1.98), ink=MUTED)
    return figure


def log_ratio() -> Figure:
    """Two bells and the stored action: heights are densities, on a log scale their gap is the log-ratio."""
    figure, axes = diagram(9.4, 4.3)
    title = "The policy has moved, the stored action has not"
    label(axes, 0.25, 4.03, title, weight="bold", size=12, align="left")
    action, moved = MEAN + STD * Z, MEAN + DRIFT * STD
    left_end, right_end = MEAN - 2.4 * STD, moved + 2.2 * STD
    x = np.linspace(left_end, right_end, 301)
    constant = -math.log(STD) - 0.5 * math.log(2 * math.pi)
    for left, log in ((0.03, False), (0.52, True)):
        panel = figure.add_axes((left, 0.2, 0.33, 0.6), facecolor=CARD)
        heights = {}
        for mean, color in ((MEAN, BLUE), (moved, ORANGE)):
            logs = constant - ((x - mean) / STD) ** 2 / 2
            panel.plot(x, logs if log else np.exp(logs), color=color, linewidth=2)
            at_action = constant - ((action - mean) / STD) ** 2 / 2
            heights[color] = height = at_action if log else math.exp(at_action)
            panel.plot([action], [height], "o", color=color, markersize=8, zorder=4)
            panel.plot([action, right_end], [height] * 2, color=color, linewidth=1.1, linestyle="--")
            name, shift = ("then", -0.05) if color is BLUE else ("now", 0.05)
            y = height + shift * (2.0 if log else 0.6)
            text = f" {height:.3f} {name}".replace("-", "−")
            panel.text(right_end, y, text, color=color, fontsize=11, va="center")
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.set(yticks=[], xlim=(left_end, right_end), ylim=(-2.2, 0.0) if log else (0, 0.86))
        ticks = {MEAN: "μ$_{old}$", action: "\nstored x$_{t-1}$", moved: "μ"}
        panel.set_xticks(list(ticks), list(ticks.values()), fontsize=11)
        low, high = heights[BLUE], heights[ORANGE]
        panel.plot([action, action], [panel.get_ylim()[0], low], color=INK, linewidth=1.1, linestyle=":")
        panel.annotate("", (action, high), (action, low), arrowprops={"arrowstyle": "<->", "color": INK})
        if log:
            below = f" gap = log ρ\n = d z − d²/2\n = {high - low:.3f}"
            panel.text(right_end, low - 0.62, below, color=INK, fontsize=11, va="center")
        else:
            below = f" ρ = now / then\n = {high / low:.3f}"
            panel.text(right_end, low - 0.2, below, color=INK, fontsize=11, va="center")
        panel.set_title("height: density π" if not log else "height: log π", fontsize=11, color=MUTED, pad=4)
    old = "μ$_{old}$"
    note = f"z = {Z:g}: from {old} to the action;  d = {DRIFT:g}: from {old} to μ;  both in units of σ"
    label(axes, 4.7, 0.2, note, ink=MUTED, size=10)
    return figure


if __name__ == "__main__":
    main(
        {
            "03-filmstrip": filmstrip,
            "03-mdp": mdp,
            "03-step": step_parts,
            "03-replay": replay,
            "03-log-ratio": log_ratio,
        }
    )
