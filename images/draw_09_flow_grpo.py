"""Figures of lesson 09: eight runs by three samplers, a step's budget of noise, learning curves, rounding.

The images are of real runs of tiny-sd3. `denoise` makes them, and `09-frames.png` keeps them, so that the
figure is the same on every machine. Delete that file to run them again. What was measured is in
`benchmarks/results/flow*.csv`.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from plots import band, bar, by_seed, minus, panels, plain, read_rows, show_image, signed, where
from style import INK, MUTED, PALETTE, arrow, diagram, label, main, note, title

from ddpo_lessons.advantages import normalize_groups
from ddpo_lessons.flow import flow_coefficients
from ddpo_lessons.rewards import prompt_alignment
from ddpo_lessons.worlds import digits

BLUE, ORANGE, GREEN, PURPLE, _, RED = PALETTE
FRAMES = Path(__file__).parent / "09-frames.png"
PROMPT = "a white four on a blue background"
START, ACTIONS = 1, 2  # seeds of the first noise and of the draws on the way, as in the lesson
STEPS, ETA, COUNT = 10, 0.7, 8

# The step whose budget is drawn: half way, one of ten.
LEVEL, LENGTH = 0.6, 0.1


@torch.no_grad()
def denoise() -> None:
    """Run tiny-sd3 from one noise, eight times by each of three samplers, and keep the images."""
    from ddpo_lessons.models import family_of
    from ddpo_lessons.worlds import load_tiny_sd3

    family: Any = family_of(load_tiny_sd3())
    conditioning, schedule = family.condition([PROMPT] * COUNT, "", 1.0), family.schedule(STEPS, eta=0.0)
    start = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(START))
    ode, sde = (flow_coefficients(schedule.sigmas, eta) for eta in (0.0, ETA))
    rows = []
    for table in (ode, torch.cat([ode[:2], sde[2:]]), sde):
        x, generator = start.expand(COUNT, -1, -1, -1), torch.Generator().manual_seed(ACTIONS)
        for t, (weight_x, weight_v, std) in zip(schedule.timesteps, table.T, strict=True):
            v = family.predict(family.denoiser, x, t.expand(COUNT), conditioning, 1.0)
            x = weight_x * x + weight_v * v + std * torch.randn(x.shape, generator=generator)
        rows.append(family.decode(torch.cat([start, x])))  # (9, 3, 32, 32)
    pixels = torch.stack(rows).mul(255).round().byte()  # (3, 9, 3, 32, 32)
    assert (pixels[0, 1:] == pixels[0, 1]).all(), "without noise all runs are one"
    grid = pixels.permute(0, 3, 1, 4, 2).reshape(3 * 32, (COUNT + 1) * 32, 3)
    Image.fromarray(grid.numpy()).save(FRAMES, optimize=True)


def frames() -> np.ndarray:
    """Return the kept images, (3, 9, 32, 32, 3): first noise and eight runs, by each sampler."""
    if not FRAMES.exists():
        denoise()
    pixels = np.asarray(Image.open(FRAMES))
    return pixels.reshape(3, 32, COUNT + 1, 32, 3).transpose(0, 2, 1, 3, 4)


def italics(images: torch.Tensor) -> torch.Tensor:
    """Return the lesson's reward of images of the prompt, (B,)."""
    asked = prompt_alignment()(images, [PROMPT] * len(images), [{}] * len(images))[0]
    return torch.as_tensor(asked) - 10 * (digits.lean(images) - 0.25).abs()


def eight() -> Figure:
    """Draw one noise, three samplers, eight runs each, with rewards and advantages."""
    figure, axes = diagram(6, 4.95)
    strips, size, pitch, left = frames(), 0.49, 0.52, 1.78
    for pixels, y, color, name in (
        (strips[0], 3.9, BLUE, "ODE: eight equal images"),
        (strips[1], 2.25, GREEN, "ODE, with noise added in every step"),
        (strips[2], 0.6, ORANGE, "SDE: the same noise added in every step"),
    ):
        values = italics(torch.from_numpy(pixels[1:].copy()).permute(0, 3, 1, 2).float().div(255))  # (8,)
        advantages = normalize_groups(values, COUNT).tolist()
        title(axes, 0.1, y + size + 0.22, name, ink=color)
        show_image(axes, 0.1, y, size, pixels[0], edge=MUTED)
        arrow(axes, (0.65, y + size / 2), (left - 0.08, y + size / 2), ink=color)
        note(axes, 1.18, y + size / 2 + 0.15, f"{STEPS} steps", align="center")
        label(axes, left - 0.1, y - 0.18, "reward", align="right")
        label(axes, left - 0.1, y - 0.43, "advantage", align="right")
        for n, (value, advantage) in enumerate(zip(values.tolist(), advantages, strict=True)):
            x = left + n * pitch
            show_image(axes, x, y, size, pixels[n + 1], edge=color)
            label(axes, x + size / 2, y - 0.18, minus(f"{value:.1f}"), size=12)
            label(axes, x + size / 2, y - 0.43, signed(advantage, 1), size=12, weight="bold", ink=color)
    return figure


def budget() -> Figure:
    """Draw bars: how much noise a latent contains after a step, kept and fresh, for three samplers."""
    figure, axes = diagram(6, 2.75)
    after, level = LEVEL - LENGTH, ETA * math.sqrt(LEVEL / (1 - LEVEL))
    fresh = level**2 * LENGTH
    kept = after - level**2 / (2 * LEVEL) * LENGTH
    title(axes, 0.1, 2.5, f"Variance of the noise after one step, from σ̄ = {LEVEL} to {after:.1f}")
    left, scale, height = 1.35, 6.5, 0.4
    for y, name, old, new, color in (
        (1.6, "ODE", after**2, 0.0, BLUE),
        (1.05, "noise added", after**2, fresh, GREEN),
        (0.5, "SDE", kept**2, fresh, ORANGE),
    ):
        label(axes, left - 0.12, y + 0.2, name, size=12, ink=color, weight="bold", align="right")
        for x, share, face, edge, hatch in (
            (left, old, color, INK, ""),
            (left + old * scale, new, "none", color, "///"),
        ):
            bar(axes, x, y, share * scale, height, face, edgecolor=edge, linewidth=0.8, hatch=hatch)
        sums = f"{old + new:.4f}" if new == 0 else f"{old:.4f} + {new:.4f} = {old + new:.4f}"
        label(axes, left + (old + new) * scale + 0.12, y + 0.2, sums, size=12, align="left")
    x = left + after**2 * scale
    axes.plot([x, x], [0.4, 2.1], color=INK, linewidth=1.2, linestyle="--")
    label(axes, x + 0.08, 0.2, f"room for {after**2:.2f}", align="right")
    note(axes, 5.9, 0.2, "full: kept, hatched: fresh", align="right")
    return figure


def titled(*titles: str, height: float) -> tuple[Figure, list[Axes]]:
    """Make a card with stacked plots."""
    figure, axes = panels(len(titles), (6, height), stacked=True)
    plain(*axes)
    for axis, text in zip(axes, titles, strict=True):
        axis.set_title(text)
    return figure, axes


def curves() -> Figure:
    """Draw reward and obedience over training, five seeds, beside baselines without training."""
    figure, axes = titled("mean reward", "images that obey the prompt (%)", height=6.6)
    rows = where(read_rows("results/flow.csv"), method="flow", learning_rate="0.003")
    settings = {row["setting"]: row for row in read_rows("results/flow_untrained.csv")}
    styles = {"best-of-8": (PURPLE, "--"), "guidance 4": (GREEN, "-."), "sheared": (RED, ":")}
    for axis, measure, scale in zip(axes, ("reward", "obeyed"), (1, 100), strict=True):
        queries, found = by_seed(rows, "queries", measure, scale)
        band(axis, queries, found, ORANGE, alpha=0.2)
        axis.plot(queries, found.mean(1), "o-", color=ORANGE, markersize=4.5, linewidth=2)
        for name, (color, style) in styles.items():
            value = scale * float(settings[name][measure])
            axis.axhline(value, color=color, linestyle=style, linewidth=1.6)
        axis.set(xlim=(-30, 1060), xticks=(0, 256, 512, 768, 1024))
        axis.set_xlabel("reward evaluations")
    reward, obeyed = axes
    reward.set_ylim(-3.25, -0.3)
    obeyed.set_ylim(40, 105)
    for axis, y, text, color in (
        (reward, -0.52, "digits sheared\nby a program", RED), (reward, -1.92, "best-of-8", PURPLE),
        (reward, -2.92, "guidance 4", GREEN), (obeyed, 103.5, "best-of-8", PURPLE),
        (obeyed, 97, "guidance 4", GREEN), (obeyed, 90.5, "sheared", RED), (obeyed, 61, "Flow-GRPO", ORANGE),
    ):  # fmt: skip
        axis.text(1.02, y, text, transform=axis.get_yaxis_transform(), color=color, va="center")
    reward.text(570, -2.66, "Flow-GRPO", color=ORANGE, va="center")
    return figure


def floor() -> Figure:
    """Draw the mean |Δ log p| before any update against the size of a latent, beside a fall as 1/√D."""
    figure, axes = titled("replayed with bfloat16 weights", "replayed in float32", height=5.6)
    rows = read_rows("results/flow_floor.csv")
    for axis, replayed in zip(axes, ("bfloat16 weights", "float32"), strict=True):
        for action, color in ((1, BLUE), (5, ORANGE), (9, GREEN)):
            mine = where(rows, replayed=replayed, action=str(action))
            dims, found = (np.array([float(row[name]) for row in mine]) for name in ("dims", "difference"))
            axis.plot(dims, found, "o-", color=color, markersize=4.5)
            axis.plot(dims, found[0] * np.sqrt(dims[0] / dims), ":", color=color, linewidth=1.2)
            axis.axhline(float(mine[0]["second_term"]), color=color, linestyle="--", linewidth=1)
        axis.set(xscale="log", yscale="log", ylim=(2e-7, 4e-3))
    axes[1].set_xlabel("elements D of a latent")
    axes[0].set_ylabel("mean |Δ log p|")
    for height, text, color in (
        (2.8e-4, "action 9", GREEN),
        (1.9e-5, "action 5", ORANGE),
        (7e-7, "action 1", BLUE),
    ):
        axes[0].text(8e4, height, text, color=color, va="center")
    axes[1].text(8e4, 1.05e-4, "dotted:\nas 1/√D", color=MUTED, va="center")
    axes[1].text(260, 8e-7, "dashed: mean of d²/2", color=MUTED, va="bottom")
    return figure


if __name__ == "__main__":
    main({"09-eight": eight, "09-budget": budget, "09-curves": curves, "09-floor": floor})
