"""Diagrams of lesson 09: eight runs by three samplers, a step's budget of noise, learning curves, rounding.

The pictures are of runs of tiny-sd3 that happened: `denoise` makes them, and `09-frames.png` keeps them, so
that the diagram is the same on every machine. Delete that file to run them again. What was measured is in
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
from plots import band, bar, by_seed, minus, panels, picture, plain, read_rows, where
from style import INK, MUTED, PALETTE, arrow, diagram, label, main, note, title

from ddpo_lessons.advantages import normalize_groups
from ddpo_lessons.flow import flow_coefficients
from ddpo_lessons.rewards import prompt_alignment
from ddpo_lessons.worlds import digits

BLUE, ORANGE, GREEN = PALETTE[:3]
FRAMES = Path(__file__).parent / "09-frames.png"
PROMPT = "a white four on a blue background"
START, ACTIONS = 1, 2  # seeds of the first noise and of the draws on the way, as in the lesson
STEPS, ETA, COUNT = 10, 0.7, 8

# The step whose budget is drawn: half way, one of ten.
LEVEL, LENGTH = 0.6, 0.1


@torch.no_grad()
def denoise() -> None:
    """Run tiny-sd3 from one noise, eight times by each of three samplers, and keep the pictures."""
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
    """Return the kept pictures, (3, 9, 32, 32, 3): first noise and eight runs, by each sampler."""
    if not FRAMES.exists():
        denoise()
    pixels = np.asarray(Image.open(FRAMES))
    return pixels.reshape(3, 32, COUNT + 1, 32, 3).transpose(0, 2, 1, 3, 4)


def italics(images: torch.Tensor) -> torch.Tensor:
    """The lesson's reward of pictures of the prompt, (B,)."""
    asked = prompt_alignment()(images, [PROMPT] * len(images), [{}] * len(images))[0]
    return torch.as_tensor(asked) - 10 * (digits.lean(images) - 0.25).abs()


def signed(value: float) -> str:
    """Write a number with its sign; what rounds to zero has none."""
    return minus(f"{value:+.1f}") if abs(value) >= 0.05 else "0"


def eight() -> Figure:
    """One noise, three samplers, eight runs each, with rewards and advantages."""
    figure, axes = diagram(9.4, 5.3)
    strips, size, pitch, left = frames(), 0.82, 0.9, 2.1
    title(axes, 0.2, 5.07, f"One first noise, one prompt, one network: “{PROMPT}”")
    for pixels, y, color, name in (
        (strips[0], 3.76, BLUE, "ODE: eight equal pictures"),
        (strips[1], 2.18, GREEN, "ODE, and noise added in every step"),
        (strips[2], 0.6, ORANGE, "SDE: the same noise added in every step"),
    ):
        values = italics(torch.from_numpy(pixels[1:].copy()).permute(0, 3, 1, 2).float().div(255))  # (8,)
        advantages = normalize_groups(values, COUNT).tolist()
        title(axes, 0.2, y + size + 0.16, name, 10, ink=color)
        picture(axes, 0.2, y, size, pixels[0], edge=MUTED)
        arrow(axes, (1.1, y + size / 2), (left - 0.1, y + size / 2), ink=color)
        note(axes, 1.55, y + size / 2 + 0.15, f"{STEPS} steps", align="center")
        note(axes, 0.2, y - 0.13, "first noise")
        note(axes, left - 0.08, y - 0.13, "reward", align="right")
        note(axes, left - 0.08, y - 0.33, "advantage", align="right")
        for n, (value, advantage) in enumerate(zip(values.tolist(), advantages, strict=True)):
            x = left + n * pitch
            picture(axes, x, y, size, pixels[n + 1], edge=color)
            label(axes, x + size / 2, y - 0.13, minus(f"{value:.1f}"), size=9.5)
            label(axes, x + size / 2, y - 0.33, signed(advantage), size=9.5, weight="bold", ink=color)
    return figure


def budget() -> Figure:
    """Bars: how much noise a latent holds after a step, kept and fresh, for three samplers."""
    figure, axes = diagram(9.4, 2.7)
    after, level = LEVEL - LENGTH, ETA * math.sqrt(LEVEL / (1 - LEVEL))
    fresh = level**2 * LENGTH
    kept = after - level**2 / (2 * LEVEL) * LENGTH
    title(axes, 0.2, 2.45, f"Variance of the noise after one step, from σ̄ = {LEVEL} to {after:.1f}")
    left, scale, height = 1.7, 15.0, 0.38
    for y, name, old, new, color in (
        (1.55, "ODE", after**2, 0.0, BLUE),
        (1.0, "noise added", after**2, fresh, GREEN),
        (0.45, "SDE", kept**2, fresh, ORANGE),
    ):
        label(axes, left - 0.15, y + 0.19, name, ink=color, weight="bold", align="right")
        for x, share, face, edge, hatch in (
            (left, old, color, INK, ""),
            (left + old * scale, new, "none", color, "///"),
        ):
            bar(axes, x, y, share * scale, height, face, edgecolor=edge, linewidth=0.8, hatch=hatch)
        sums = f"{old:.4f} kept + {new:.4f} fresh = {old + new:.4f}"
        label(axes, left + (old + new) * scale + 0.15, y + 0.19, sums, size=9.5, align="left")
    x = left + after**2 * scale
    axes.plot([x, x], [0.35, 2.05], color=INK, linewidth=1, linestyle="--")
    label(axes, x, 0.22, f"room for σ̄² = {after**2:.2f}", size=9.5)
    return figure


def titled(*titles: str) -> tuple[Figure, list[Axes]]:
    """Make a card with plots side by side."""
    figure, axes = panels(len(titles), (9.4, 3.5))
    plain(*axes)
    for axis, text in zip(axes, titles, strict=True):
        axis.set_title(text, fontsize=11, fontweight="bold")
    return figure, axes


def curves() -> Figure:
    """Reward, lean and obedience over training, three seeds, beside settings that were not trained."""
    figure, axes = titled("reward", "lean (0.25 wanted)", "obeyed")
    rows = read_rows("results/flow.csv")
    settings = {row["setting"]: row for row in read_rows("results/flow_untrained.csv")}
    styles = {"3 steps": ":", "guidance 4": "-.", "best of 8": "--", "sheared": (0, (1, 3))}
    for axis, measure in zip(axes, ("reward", "lean", "obeyed"), strict=True):
        for method, color in (("flow", ORANGE), ("CPS", GREEN)):
            epochs, found = by_seed(where(rows, method=method), "epoch", measure)
            band(axis, epochs, found, color, alpha=0.2)
            axis.plot(epochs, found.mean(1), "o-", color=color, markersize=3.5, label=method)
        for n, (name, style) in zip((0, 3, 4, 5), styles.items(), strict=True):
            value = float(settings[name][measure])
            axis.axhline(value, color=PALETTE[n], linestyle=style, linewidth=1.2, label=name)
        axis.set_xlabel("epoch of 64 queries")
    below = {"loc": "outside lower center", "ncols": 6, "fontsize": 9, "frameon": False}
    figure.legend(*axes[0].get_legend_handles_labels(), **below)
    return figure


def floor() -> Figure:
    """Mean |Δ log p| before any update against the size of a latent, and what 1/√D would say."""
    figure, axes = titled("replayed with bfloat16 weights", "replayed in float32")
    rows = read_rows("results/flow_floor.csv")
    for axis, replayed in zip(axes, ("bfloat16 weights", "float32"), strict=True):
        for action, color in ((1, BLUE), (5, ORANGE), (9, GREEN)):
            mine = where(rows, replayed=replayed, action=str(action))
            dims, found = (np.array([float(row[name]) for row in mine]) for name in ("dims", "difference"))
            axis.plot(dims, found, "o-", color=color, markersize=4, label=f"action {action}")
            axis.plot(dims, found[0] * np.sqrt(dims[0] / dims), ":", color=color, linewidth=1)
            axis.axhline(float(mine[0]["second_term"]), color=color, linestyle="--", linewidth=0.8)
        axis.set(xscale="log", yscale="log", ylim=(2e-7, 4e-3), xlabel="numbers D in a latent")
        axis.set_ylabel("mean |Δ log p|")
        axis.legend(fontsize=9, frameon=False, loc="upper right", ncols=3, columnspacing=1)
    return figure


if __name__ == "__main__":
    main({"09-eight": eight, "09-budget": budget, "09-curves": curves, "09-floor": floor})
