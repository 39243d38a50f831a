"""Figures of lesson 07: question, first state, tree of rollouts, credit, when to stop, the dilemma.

The images in the first are of one rollout of tiny-zoo that happened: `denoise` makes them, and
`07-frames.png` keeps them with the rewards of its group. Delete that file to make them again.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from plots import band, bar, by_seed, minus, panels, plain, read_rows, show_image, where
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main, note, title

from ddpo_lessons.lessons.plotting import CURVE_COLORS

BLUE, ORANGE, GREEN, PURPLE = PALETTE[:4]
FRAMES = Path(__file__).parent / "07-frames.png"
SHOWN, GROUP, CALLS = 3, 8, 5  # the validation image that is shown, its rollouts, network evaluations
UNUSED = "#d9d9d0"
NO_GAIN = 4096  # evaluations of the reward after which neither evaluator gains
NAMES = {"one advantage": "DDPO", "falling": "DDPO, falling weights", "branching": "branching"}
COLORS = {"one advantage": BLUE, "falling": GREEN, "branching": ORANGE}


@torch.no_grad()
def denoise() -> None:
    """Edit one image eight times; keep the first run's prediction after each evaluation, and all rewards."""
    from ddpo_lessons.lessons.demo import BACKGROUND_WEIGHT, POLICY, VALIDATION
    from ddpo_lessons.models import family_of
    from ddpo_lessons.rewards import animal_alignment
    from ddpo_lessons.rollout import from_images
    from ddpo_lessons.worlds import animals, load_tiny_zoo

    family, edits = family_of(load_tiny_zoo()), animals.draw_edits(SHOWN + 1, VALIDATION)
    schedule = family.schedule(POLICY.steps, POLICY.strength)
    images = edits.images[SHOWN:].repeat(GROUP, 1, 1, 1)  # (8, 3, 64, 64)
    prompts, generator = edits.prompts[SHOWN:] * GROUP, torch.Generator().manual_seed(0)
    conditioning = family.condition(prompts, "", POLICY.guidance)
    latents = from_images(family, images, schedule, generator=generator, group_size=GROUP)
    shown = [images[0]]
    for timestep in schedule.timesteps:
        timesteps = timestep.expand(GROUP)
        output = family.predict(family.denoiser, latents, timesteps, conditioning, POLICY.guidance)
        shown.append(family.decode(family.predict_clean(latents[:1], output[:1], timesteps[:1]))[0])
        noise = torch.randn(latents.shape, generator=generator)
        latents = schedule.step(output, timesteps, latents, noise=noise).prev_sample
    score = animal_alignment(background_weight=BACKGROUND_WEIGHT)
    rewards, _ = score(family.decode(latents), prompts, edits.metadata[SHOWN:] * GROUP)
    pixels = torch.cat(shown, dim=2).mul(255).round().byte().permute(1, 2, 0)  # (64, 6 * 64, 3)
    info = PngInfo()
    info.add_text("rewards", json.dumps([round(reward, 2) for reward in rewards.tolist()]))
    info.add_text("prompt", prompts[0])
    Image.fromarray(pixels.numpy()).save(FRAMES, optimize=True, pnginfo=info)


def frames() -> tuple[np.ndarray, dict[str, str]]:
    """Return the images of one rollout (6, 64, 64, 3), and its prompt and rewards."""
    if not FRAMES.exists():
        denoise()
    kept = Image.open(FRAMES)
    info: dict[str, str] = kept.text  # type: ignore[attr-defined]
    return np.asarray(kept).reshape(64, CALLS + 1, 64, 3).transpose(1, 0, 2, 3), info


def question() -> Figure:
    """Draw a rollout whose one reward belongs to four actions, and three ways to divide it, unnamed."""
    strip, info = frames()
    reward = json.loads(info["rewards"])[0]
    height = 5.3
    figure, axes = diagram(6, height)
    title(axes, 0.1, 5.08, minus(f"four actions, one reward: {reward:.1f}"))
    size, pitch, y = 0.72, 1.016, 4.13
    for n, pixels in enumerate(strip):
        x = 0.1 + n * pitch
        show_image(axes, x, y, size, pixels)
        name = "input" if n == 0 else f"after {n}" if n < CALLS else "result"
        note(axes, x + size / 2, y - 0.19, name, align="center")
        if 0 < n < CALLS:
            arrow(axes, (x + size + 0.02, y + 0.3), (x + pitch - 0.02, y + 0.3), ink=ORANGE)
            label(axes, x + size + 0.14, y + 0.57, "?", size=18, ink=ORANGE, weight="bold")
    inset = figure.add_axes((0.15, 1.85 / height, 0.81, 1.75 / height), facecolor=CARD)
    for name in ("falling", "branching", "one advantage"):
        x_values, values = epochs(name, "0.0001")
        inset.plot(x_values, values.mean(1), color=INK, linewidth=1.8)
        band(inset, x_values, values, MUTED, alpha=0.16)
    end = x_values[-1] + 0.12, values[-1].mean()  # of the last of them, the slowest
    inset.text(*end, "?", weight="bold", va="center", color=ORANGE, fontsize=18)
    inset.set(xlim=(1, 10.6))
    inset.set_xlabel("epoch")
    inset.set_ylabel("mean reward")
    tidy(inset)
    rules = {"A": [1.0] * 7, "B": [0, 0, 1.0, 0, 0, 0, 0], "C": [n / 20**0.5 for n in range(7, 0, -1)]}
    for n, (name, weights) in enumerate(rules.items()):
        left = 0.25 + 1.95 * n
        title(axes, left, 0.9, name, size=18)
        for step, weight in enumerate(weights):
            place = left + 0.35 + 0.18 * step, 0.45
            axes.add_patch(Rectangle(place, 0.13, 0.4 * weight, facecolor=INK))
        axes.plot([left + 0.3, left + 1.61], [0.45, 0.45], color=MUTED, linewidth=1)
        note(axes, left + 0.955, 0.22, "steps 1 to 7", align="center")
    return figure


def epochs(variant: str, rate: str) -> tuple[list[int], np.ndarray]:
    """Return epochs and rewards (epochs, seeds) of benchmarks/text/bridge.csv."""
    return by_seed(
        where(read_rows("text/bridge.csv"), variant=variant, learning_rate=rate), "epoch", "reward"
    )


def tidy(axes: Axes) -> None:
    """Give axes the look of the cards, and a grid."""
    axes.grid(alpha=0.25)
    plain(axes, labelsize=13, colors=INK)


def credit() -> Figure:
    """Plot rewards over epochs for three kinds of credit, at two learning rates."""
    figure, plots = panels(2, (6, 6), stacked=True, sharey=True)
    for axes, rate in zip(plots, ("0.0001", "0.0002"), strict=True):
        for variant, name in NAMES.items():
            x, values = epochs(variant, rate)
            axes.plot(x, values.mean(1), color=COLORS[variant], linewidth=2, label=name)
            band(axes, x, values, COLORS[variant], alpha=0.12)
        text = f"mean redness (the reward), learning rate {float(rate):.0e}"
        axes.set_title(text.replace("e-0", "e-"), fontsize=13, color=INK, loc="left")
        axes.set_xlabel("epoch of 32 images", color=INK, fontsize=13)
        tidy(axes)
    names = plots[0].get_legend_handles_labels()
    look = {"ncols": 3, "columnspacing": 1, "handlelength": 1.4, "labelcolor": "linecolor"}
    figure.legend(*names, loc="outside lower center", frameon=False, **look)
    return figure


def start() -> Figure:
    """Draw how an image becomes the first state, and which steps of two schedules are run from there."""
    strip, _ = frames()
    figure, axes = diagram(6, 6.35)
    title(axes, 0.1, 6.12, "The input image decides the first state", 14)
    show_image(axes, 0.1, 4.85, 0.9, strip[0])
    note(axes, 0.1, 4.63, "input (3, 64, 64)")
    box(axes, 2.0, 4.9, 1.5, 0.8, "clean latent x₀\n(4, 16, 16)", color=BLUE, size=12)
    box(axes, 4.2, 4.9, 1.75, 0.8, "first state\n√ᾱ x₀ + √(1 − ᾱ) ε", color=ORANGE, size=12)
    show_image(axes, 2.3, 3.6, 0.9, strip[-1])
    note(axes, 0.6, 4.05, "result (3, 64, 64)")
    ways = (1.02, 2.0, "encode,", "scale"), (3.5, 4.2, "add", "noise")
    for left, right, above, below in ways:
        arrow(axes, (left, 5.3), (right, 5.3))
        note(axes, (left + right) / 2, 5.5, above, align="center")
        note(axes, (left + right) / 2, 5.1, below, align="center")
    axes.plot([5.07, 5.07], [4.9, 4.05], color=INK, linewidth=1.3)
    arrow(axes, (5.07, 4.05), (3.22, 4.05))
    note(axes, 4.1, 4.25, "denoise,", align="center")
    note(axes, 4.1, 3.85, "decode", align="center")
    _schedule(axes, 2.25, 12, 5, "animals: strength 0.45 of 12 steps runs 5,", "4 of them actions")
    _schedule(axes, 0.45, 5, 2, "digits: strength 0.4 of 5 steps runs 2,", "1 of them an action")
    return figure


def _schedule(axes: Axes, y: float, steps: int, run: int, what: str, actions: str) -> None:
    cell = 5.8 / steps
    for k in range(steps):
        color = UNUSED if k < steps - run else MUTED if k == steps - 1 else ORANGE
        bar(axes, 0.1 + k * cell, y, cell, 0.42, color, edgecolor=CARD, linewidth=2)
        timestep = round(1000 - k * 1000 / steps) - 1
        ink = INK if k < steps - run else "white"
        label(axes, 0.1 + (k + 0.5) * cell, y + 0.2, str(timestep), ink=ink)
    label(axes, 0.1, y + 0.9, what, align="left")
    label(axes, 0.1, y + 0.62, actions, ink=ORANGE, align="left")
    note(axes, 0.1, y - 0.2, "not run: too much noise")
    note(axes, 5.9, y - 0.2, "last step: no noise, no action", align="right")


def tree() -> Figure:
    """Draw two branch points with four leaves: values are means of leaves, advantages differences."""
    figure, axes = diagram(6, 3.7)
    note(axes, 0.05, 3.35, "first\nstate")
    for x, step in ((1.42, 1), (3.07, 2)):
        label(axes, x, 3.35, f"branches\nat step {step}", ink=ORANGE)
    note(axes, 5.95, 3.35, "then shared\nnoise", align="right")
    root, nodes = (0.4, 1.6), ((2.05, 2.4), (2.05, 0.8))
    leaves = [(3.75, y) for y in (2.8, 2.0, 1.2, 0.4)]
    for node in nodes:
        arrow(axes, (root[0] + 0.33, root[1]), (node[0] - 0.33, node[1]), ink=ORANGE)
    for n, leaf in enumerate(leaves):
        node = nodes[n // 2]
        arrow(axes, (node[0] + 0.33, node[1]), (leaf[0] - 0.33, leaf[1]), ink=ORANGE)
        arrow(axes, (leaf[0] + 0.33, leaf[1]), (4.78, leaf[1]), ink=MUTED)
    for (x, y), value in zip((root, *nodes, *leaves), "4261366", strict=True):
        box(axes, x - 0.31, y - 0.25, 0.62, 0.5, value, color=BLUE, size=14)
        if (x, y) in leaves:
            box(axes, 4.8, y - 0.25, 1.12, 0.5, f"reward {value}", color=GREEN)
    for x, gains in ((1.1, {2.2: "−2", 0.97: "+2"}), (2.9, {2.87: "−1", 1.95: "+1", 1.27: "0", 0.33: "0"})):
        for y, text in gains.items():
            label(axes, x, y, text, size=14, weight="bold", ink=ORANGE)
    return figure


def stop() -> Figure:
    """Plot the reward and two evaluators over a run that is too long."""
    rows = where(read_rows("zoo/demo.csv"), algorithm="branching, too long", images="validation")
    figure, (above, below) = panels(2, (6, 6), stacked=True)
    done = [int(row["done"]) for row in rows]
    look = {"marker": ".", "linewidth": 1.8}
    above.plot(done, [float(row["reward"]) for row in rows], color=ORANGE, **look)
    for column, line, name in (("all", "-", "first"), ("second_judge", "--", "second")):
        correct = [100 * float(row[column]) for row in rows]
        below.plot(done, correct, line, color=ORANGE, label=f"{name} evaluator", **look)
    above.set_title("mean reward", color=INK)
    below.set_title("images correct (%)", color=INK)
    below.legend(loc="lower right", frameon=False)
    for axes in (above, below):
        axes.axvline(NO_GAIN, color=MUTED, linestyle=":", linewidth=1.2)
        axes.set_xlabel("evaluations of the reward", color=INK, fontsize=13)
        tidy(axes)
    above.text(NO_GAIN + 150, above.get_ylim()[0] + 0.6, "evaluators hardly gain", color=MUTED)
    return figure


def point(shares: dict[str, Any]) -> tuple[float, float]:
    """Return the place of a measurement, in percent: background and animal correct."""
    return 100 * float(shares["background"]), 100 * float(shares["animal"])


def dilemma() -> Figure:
    """Draw animals kept against backgrounds correct: tuning the strength, best-of-8, RL, and what else."""
    figure, (axes,) = panels(1, (6, 5.6))
    grid = where(read_rows("zoo/edit_grid.csv"), steps="8", eta="1.0")
    for guidance, color in zip(("1.0", "6.0"), CURVE_COLORS, strict=False):
        own = sorted(where(grid, guidance=guidance), key=lambda row: float(row["strength"]))
        places = [point(row) for row in own]
        axes.plot(*zip(*places, strict=True), "o-", color=color, markersize=3.5, linewidth=1.2)
        if guidance == "1.0":
            _name(axes, -2, 90, f"strength {float(own[0]['strength']):g}", MUTED)
            for row, (x, y) in zip(own[1:], places[1:], strict=True):
                shift, side = ((2, 1), "left") if row["strength"] == "0.75" else ((-1, -4), "right")
                _name(axes, x + shift[0], y + shift[1], f"{float(row['strength']):g}", MUTED, side)
    rows, trained = read_rows("zoo/edit.csv"), where(read_rows("zoo/demo.csv"), algorithm="branching")
    path = where(trained, images="validation")
    _, backgrounds = by_seed(path, "done", "background", 100)
    _, kept = by_seed(path, "done", "animal", 100)
    axes.plot(backgrounds.mean(1), kept.mean(1), ".-", color=ORANGE, linewidth=2)
    dot = {"markeredgecolor": INK, "linestyle": "none"}
    ends = [point(row) for row in where(trained, images="test")]
    axes.plot(*zip(*ends, strict=True), "*", color=ORANGE, markersize=13, **dot)
    for marker, what in zip("^DP", ("best-of-8", "supervised", "program"), strict=True):
        places = [point(row) for row in where(rows, what=what, animals="practised")]
        axes.plot(*zip(*places, strict=True), marker, color=GREEN, markersize=8, **dot)
    tidy(axes)
    axes.set(xlim=(-4, 103), ylim=(0, 103))
    axes.set_xlabel("backgrounds correct (%)", color=INK, fontsize=13)
    axes.set_ylabel("animals kept (%)", color=INK, fontsize=13)
    axes.set_title("Sampling settings move along curves; RL leaves them", color=INK)
    brown, purple, *_ = CURVE_COLORS
    _name(axes, 50, 36, "untrained,\nguidance 1", brown, "right")
    _name(axes, 60, 26, "untrained,\nguidance 6", purple)
    _name(axes, 7, 98.6, "a program for this world", GREEN)
    _name(axes, 101, 98.6, "supervised on pairs", GREEN, "right")
    _name(axes, 37, 90, "branching, along training", ORANGE)
    _name(axes, 102, 75, "5 seeds", ORANGE, "right")
    _name(axes, 72.6, 70, "best-of-8,\nuntrained", GREEN, "center")
    return figure


def _name(axes: Axes, x: float, y: float, text: str, ink: str, align: str = "left") -> None:
    axes.text(x, y, text, color=ink, ha=align, va="center")


if __name__ == "__main__":
    drawn = {"07-question": question, "07-start": start, "07-tree": tree}
    main({**drawn, "07-credit": credit, "07-stop": stop, "07-dilemma": dilemma})
