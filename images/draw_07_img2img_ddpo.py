"""Figures of lesson 07: question, first state, tree of rollouts, credit, when to stop, the dilemma.

The pictures in the first are of one rollout of tiny-zoo that happened: `denoise` makes them, and
`07-frames.png` keeps them with the rewards of its group. Delete that file to make them again.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from plots import band, bar, by_seed, minus, panels, picture, plain, read_rows, where
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main, note, title

from ddpo_lessons.lessons.plotting import CURVE_COLORS

BLUE, ORANGE, GREEN, PURPLE = PALETTE[:4]
FRAMES = Path(__file__).parent / "07-frames.png"
SHOWN, GROUP, CALLS = 3, 8, 5  # the validation picture that is shown, rollouts of it, calls of the network
UNUSED = "#d9d9d0"
DEMO = 4096  # evaluations of the reward in branching's schedule
NAMES = {"one advantage": "DDPO: one for all", "falling": "fixed, falling", "branching": "branching"}
COLORS = {"one advantage": BLUE, "falling": GREEN, "branching": ORANGE}


@torch.no_grad()
def denoise() -> None:
    """Edit one picture eight times; keep what the first run showed after each call, and all rewards."""
    from ddpo_lessons.lessons.demo import GROUND_WEIGHT, POLICY, VALIDATION
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
    score = animal_alignment(ground_weight=GROUND_WEIGHT)
    rewards, _ = score(family.decode(latents), prompts, edits.metadata[SHOWN:] * GROUP)
    pixels = torch.cat(shown, dim=2).mul(255).round().byte().permute(1, 2, 0)  # (64, 6 * 64, 3)
    told = PngInfo()
    told.add_text("rewards", json.dumps([round(reward, 2) for reward in rewards.tolist()]))
    told.add_text("prompt", prompts[0])
    Image.fromarray(pixels.numpy()).save(FRAMES, optimize=True, pnginfo=told)


def question() -> Figure:
    """Draw a rollout whose one score belongs to four actions, and three ways to divide it, unnamed."""
    if not FRAMES.exists():
        denoise()
    kept = Image.open(FRAMES)
    told: dict[str, str] = kept.text  # type: ignore[attr-defined]
    strip = np.asarray(kept).reshape(64, CALLS + 1, 64, 3).transpose(1, 0, 2, 3)
    reward, *others = json.loads(told["rewards"])
    figure, axes = diagram(10.4, 4.9)
    title(axes, 0.25, 4.62, f"“{told['prompt']}”: five calls, four draws, one score", 12.5)
    size, pitch, y = 1.0, 1.42, 3.2
    for n, pixels in enumerate(strip):
        x = 0.25 + n * pitch
        picture(axes, x, y, size, pixels)
        name = "goes in" if n == 0 else f"guess {n}" if n < CALLS else "comes out"
        note(axes, x + size / 2, y - 0.17, name, align="center")
        if 0 < n < CALLS:
            arrow(axes, (x + size + 0.04, y + 0.5), (x + pitch - 0.04, y + 0.5), ink=ORANGE)
            label(axes, x + size + 0.21, y + 0.72, "?", size=17, ink=ORANGE, weight="bold")
    mean = (reward + sum(others)) / GROUP
    x = 0.25 + (CALLS + 1) * pitch - 0.3
    title(axes, x, y + 0.78, minus(f"score {reward:.1f}"), 11.5)
    label(axes, x, y + 0.48, minus(f"mean of eight {mean:.1f}"), size=9.5, align="left")
    asked = minus(f"{reward - mean:+.1f} for which step?")
    label(axes, x, y + 0.2, asked, size=10.5, ink=ORANGE, align="left")
    inset = figure.add_axes((0.075, 0.115, 0.5, 0.44), facecolor=CARD)
    for number, name in zip("123", ("falling", "branching", "one advantage"), strict=True):
        x_values, values = epochs(name, "0.0001")
        inset.plot(x_values, values.mean(1), color=INK, linewidth=1.8)
        band(inset, x_values, values, MUTED, alpha=0.16)
        end = x_values[-1] + 0.12, values[-1].mean()
        inset.text(*end, number, fontsize=11, weight="bold", va="center", color=INK)
    inset.set(xlabel="epoch", ylabel="mean score", xlim=(1, 10.5))
    tidy(inset)
    lines = (
        "Three rules that divide a score among steps,", "on another task, three seeds each:",
        "A praises or blames all steps of a picture alike.",
        "B lets one step differ, and praises or blames that one.",
        "C weighs the steps by a fixed rule: 7, 6, … 1.", "Which curve belongs to which rule?",
    )  # fmt: skip
    for n, text in enumerate(lines):
        label(axes, 6.25, 2.35 - 0.3 * n, text, size=10, align="left", weight="bold" if n == 5 else "normal")
    return figure


def epochs(variant: str, rate: str) -> tuple[list[int], np.ndarray]:
    """Return epochs and rewards (epochs, seeds) of benchmarks/text/bridge.csv."""
    rows = where(read_rows("text/bridge.csv"), variant=variant, learning_rate=rate)
    return by_seed((row for row in rows if row["seed"] in ("0", "1", "2")), "epoch", "reward")


def tidy(axes: Axes) -> None:
    """Give axes the look of the cards, and a grid."""
    axes.grid(alpha=0.25)
    plain(axes, labelsize=8.5, colors=INK)


def credit() -> Figure:
    """Plot rewards over epochs for three kinds of credit, at two learning rates."""
    figure, plots = panels(2, (9.2, 3.4), sharey=True)
    for axes, rate in zip(plots, ("0.0001", "0.0002"), strict=True):
        for line, (variant, name) in enumerate(NAMES.items()):
            x, values = epochs(variant, rate)
            axes.plot(x, values.mean(1), color=COLORS[variant], linewidth=2)
            band(axes, x, values, COLORS[variant], alpha=0.17)
            axes.text(1, 0.72 - 0.075 * line, name, color=COLORS[variant], fontsize=10.5, weight="bold")
        axes.set_title(f"learning rate {float(rate):.0e}".replace("e-0", "e-"), fontsize=11, color=INK)
        axes.set_xlabel("epoch of 32 pictures", color=INK)
        tidy(axes)
    plots[0].set_ylabel("redness", color=INK)
    return figure


def start() -> Figure:
    """Draw the way of a picture to the first state, and two schedules' ends that are run from there."""
    figure, axes = diagram(9.4, 4.6)
    title(axes, 0.25, 4.32, "The picture is the first state", 12.5)
    stages = (
        (0.25, 1.3, "picture\n(3, 64, 64)", BLUE), (2.45, 1.3, "clean latent x₀\n(4, 16, 16)", BLUE),
        (4.65, 1.8, "first state\n√ᾱ x₀ + √(1 − ᾱ) ε", ORANGE), (7.85, 1.3, "result\n(3, 64, 64)", GREEN),
    )  # fmt: skip
    for x, width, text, color in stages:
        box(axes, x, 3.1, width, 0.85, text, color=color, size=10.5)
    ways = ("encode,", "scale"), ("add", "noise ε"), ("denoise,", "decode")
    for left, right, (above, below) in zip((1.55, 3.75, 6.45), (2.45, 4.65, 7.85), ways, strict=True):
        arrow(axes, (left, 3.53), (right, 3.53))
        note(axes, (left + right) / 2, 3.7, above, align="center")
        note(axes, (left + right) / 2, 3.35, below, align="center")
    _schedule(axes, 1.75, 12, 5, "animals: strength 0.45 of 12 steps runs 5, of which 4 are actions")
    _schedule(axes, 0.5, 5, 2, "digits: strength 0.4 of 5 steps runs 2, of which 1 is an action")
    return figure


def _schedule(axes: Axes, y: float, steps: int, run: int, what: str) -> None:
    cell = 8.9 / steps
    for k in range(steps):
        color = UNUSED if k < steps - run else MUTED if k == steps - 1 else ORANGE
        bar(axes, 0.25 + k * cell, y, cell, 0.5, color, edgecolor=CARD, linewidth=2)
        timestep = round(1000 - k * 1000 / steps) - 1
        ink = INK if k < steps - run else "white"
        label(axes, 0.25 + (k + 0.5) * cell, y + 0.25, str(timestep), ink=ink, size=9.5)
    note(axes, 0.25, y + 0.7, what, 9.5)
    note(axes, 0.25, y - 0.18, "not run: this much noise would hide the picture")
    note(axes, 9.15, y - 0.18, "the last: no noise, no action", align="right")


def tree() -> Figure:
    """Draw two branch points with four leaves: values are means of leaves, advantages differences."""
    figure, axes = diagram(9.4, 3.5)
    note(axes, 0.3, 3.25, "first state", 10)
    for x, step in ((2.35, 1), (4.75, 2)):
        label(axes, x, 3.25, f"step {step} parts", ink=ORANGE, align="left")
    note(axes, 7.15, 3.25, "no branch: common noise", 10)
    root, nodes = (1.35, 1.6), ((3.7, 2.4), (3.7, 0.8))
    leaves = [(6.1, y) for y in (2.8, 2.0, 1.2, 0.4)]
    for node in nodes:
        arrow(axes, (root[0] + 0.45, root[1]), (node[0] - 0.45, node[1]), ink=ORANGE)
    for n, leaf in enumerate(leaves):
        node = nodes[n // 2]
        arrow(axes, (node[0] + 0.45, node[1]), (leaf[0] - 0.45, leaf[1]), ink=ORANGE)
        arrow(axes, (leaf[0] + 0.45, leaf[1]), (7.75, leaf[1]), ink=MUTED)
    for (x, y), value in zip((root, *nodes, *leaves), "4261366", strict=True):
        box(axes, x - 0.42, y - 0.25, 0.84, 0.5, value, color=BLUE, size=12)
        if (x, y) in leaves:
            box(axes, 7.8, y - 0.25, 1.2, 0.5, f"reward {value}", color=GREEN, size=10)
    for x, gains in ((2.3, {2.22: "−2", 0.92: "+2"}), (4.75, {2.83: "−1", 1.98: "+1", 1.23: "0", 0.38: "0"})):
        for y, text in gains.items():
            label(axes, x, y, text, size=12, weight="bold", ink=ORANGE)
    return figure


def stop() -> Figure:
    """Plot the reward and two evaluators over a run that is too long."""
    rows = where(read_rows("zoo/demo.csv"), algorithm="branching, too long", images="validation")
    figure, (above, below) = panels(2, (9.2, 3.4))
    done = [int(row["done"]) for row in rows]
    look = {"marker": ".", "linewidth": 1.8}
    above.plot(done, [float(row["reward"]) for row in rows], color=ORANGE, **look)
    for column, color, name in (("all", BLUE, "first"), ("second_judge", GREEN, "second")):
        correct = [100 * float(row[column]) for row in rows]
        below.plot(done, correct, color=color, label=f"{name} evaluator", **look)
    above.set_title("mean reward", fontsize=11, color=INK)
    below.set_title("images correct (%)", fontsize=11, color=INK)
    below.legend(loc="lower right", fontsize=9, frameon=False)
    for axes in (above, below):
        axes.axvline(DEMO, color=MUTED, linestyle=":", linewidth=1.2)
        axes.set_xlabel("evaluations of the reward", color=INK)
        tidy(axes)
    above.text(DEMO + 150, above.get_ylim()[0] + 0.6, "the demo's length", color=MUTED, fontsize=9)
    return figure


def point(shares: dict[str, Any]) -> tuple[float, float]:
    """Return the place of a verdict, in per cent."""
    return 100 * float(shares["ground"]), 100 * float(shares["animal"])


def dilemma() -> Figure:
    """Draw animal kept against ground obeyed: turning the knobs, the best of eight, RL, and what else."""
    figure, (axes,) = panels(1, (7.4, 5.4))
    grid = where(read_rows("zoo/edit_grid.csv"), steps="8", eta="1.0")
    for guidance, color in zip(("1.0", "3.0", "6.0", "12.0"), CURVE_COLORS, strict=True):
        own = sorted(where(grid, guidance=guidance), key=lambda row: float(row["strength"]))
        places = [point(row) for row in own]
        name = f"untrained, guidance {float(guidance):g}"
        axes.plot(*zip(*places, strict=True), "o-", color=color, markersize=3.5, linewidth=1, label=name)
        if guidance == "1.0":
            for row, place in zip(own, places, strict=True):
                look = {"textcoords": "offset points", "fontsize": 8, "color": MUTED}
                axes.annotate(f"{float(row['strength']):g}", place, (4, 5), **look)
    rows, trained = read_rows("zoo/edit.csv"), where(read_rows("zoo/demo.csv"), algorithm="branching")
    names = {"best of 8": "untrained, best of 8 by the score", "program": "a program for this world"}
    names |= {"supervised": "supervised on pairs, three seeds"}
    dot = {"markeredgecolor": INK, "linestyle": "none"}
    for marker, what in zip("^DP", ("best of 8", "supervised", "program"), strict=True):
        places = [point(row) for row in where(rows, what=what, animals="practised")]
        axes.plot(*zip(*places, strict=True), marker, color=GREEN, markersize=8, label=names[what], **dot)
    for n, seed in enumerate(dict.fromkeys(row["seed"] for row in trained)):
        own = where(trained, seed=seed)
        way = [point(row) for row in where(own, images="validation")]
        names = (
            [None, None] if n else ["branching over its epochs, five seeds", "after branching, test images"]
        )
        axes.plot(*zip(*way, strict=True), ".-", color=BLUE, linewidth=1.5, alpha=0.8, label=names[0])
        (end,) = where(own, images="test")
        axes.plot(*point(end), "*", color=BLUE, markersize=13, label=names[1], **dot)
    tidy(axes)
    axes.set(xlim=(-4, 103), ylim=(0, 103))
    axes.set_xlabel("ground obeyed (%)", color=INK)
    axes.set_ylabel("animal kept (%)", color=INK)
    axes.set_title("Sampling settings move along curves; RL leaves them", fontsize=12, color=INK)
    axes.legend(loc="lower left", fontsize=8.5, frameon=False)
    return figure


if __name__ == "__main__":
    drawn = {"07-question": question, "07-start": start, "07-tree": tree}
    main({**drawn, "07-credit": credit, "07-stop": stop, "07-dilemma": dilemma})
