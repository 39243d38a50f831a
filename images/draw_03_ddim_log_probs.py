"""Draw the figures of lesson 03: two networks, the denoising MDP, steps, Gaussians, and what teaches.

The images are from runs of tiny-sd: `denoise` makes them, and `03-frames.png` keeps them with their
log-probs, so that the figures are the same on every machine. Delete that file to run tiny-sd again.
"""

import json
import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from plots import bar, minus, of_seeds, plain, read_rows, show_image, where
from style import CARD, INK, MUTED, PALETTE, arrow, box, diagram, label, main, note, title

BLUE, ORANGE, GREEN, PURPLE = PALETTE[:4]
FRAMES = Path(__file__).parent / "03-frames.png"
PROMPT = "a red three on a blue background"
TIMES = (999, 899, 799, 699, 599, 499, 399, 299, 199, 99, 0)  # of the latents on the way

# The worked example of the lesson, with η = 1 and z = 1.
ALPHA_BAR, ALPHA_BAR_NEXT, X0, NOISE, Z, DRIFT = 0.36, 0.64, 1.0, -0.5, 1.0, 1.5
VARIANCE = (1 - ALPHA_BAR_NEXT) / (1 - ALPHA_BAR) * (1 - ALPHA_BAR / ALPHA_BAR_NEXT)
KEPT = 1 - ALPHA_BAR_NEXT - VARIANCE
STD, MEAN = math.sqrt(VARIANCE), math.sqrt(ALPHA_BAR_NEXT) * X0 + math.sqrt(KEPT) * NOISE


def denoise() -> None:
    """Run tiny-sd and a network of random weights with the same noise; keep images, log-probs and ᾱ."""
    import torch

    from ddpo_lessons.models import family_of
    from ddpo_lessons.rollout import SamplingSettings, text2img_rollout
    from ddpo_lessons.worlds import load_tiny_sd

    trained, untrained = load_tiny_sd(), load_tiny_sd()
    torch.manual_seed(0)
    for module in untrained.unet.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    rows, log_probs = [], []
    for pipeline in (trained, untrained):
        draws = torch.Generator().manual_seed(5)
        settings = SamplingSettings(num_inference_steps=10, guidance_scale=1.0)
        _, rolled = text2img_rollout(pipeline, [PROMPT], settings, generator=draws)
        states = torch.cat([rolled.latents[0], rolled.final_latents])  # (11, 4, 8, 8)
        rows.append(family_of(pipeline).decode(states))
        log_probs.append(rolled.log_probs[0].tolist())
    pixels = torch.stack(rows).mul(255).round().byte()  # (2, 11, 3, 32, 32)
    grid = pixels.permute(0, 3, 1, 4, 2).reshape(2 * 32, len(TIMES) * 32, 3)
    after = trained.scheduler.alphas_cumprod[list(TIMES[1:-1])].tolist()
    info = PngInfo()
    info.add_text("log_probs", json.dumps(log_probs))
    first = trained.scheduler.alphas_cumprod[TIMES[0]].item()
    info.add_text("alpha_bars", json.dumps([first, *after, 1.0]))
    Image.fromarray(grid.numpy()).save(FRAMES, optimize=True, pnginfo=info)


def frames() -> Image.Image:
    """Return the kept run: two strips of images, and as texts its log-probs and ᾱ."""
    if not FRAMES.exists():
        denoise()
    return Image.open(FRAMES)


def strips() -> np.ndarray:
    """Return the images (2, 11, 32, 32, 3), tiny-sd's first."""
    return np.asarray(frames()).reshape(2, 32, len(TIMES), 32, 3).transpose(0, 2, 1, 3, 4)


def card(width: float, height: float) -> tuple[Figure, Axes]:
    """Make an empty card that is shown smaller than its coordinates, so that texts are larger in it."""
    figure, axes = diagram(width, height)
    figure.set_size_inches(0.85 * width, 0.85 * height)
    return figure, axes


def same() -> Figure:
    """Two networks, the same noise: other images, and step by step the same log-prob."""
    figure, axes = card(9.4, 3.55)
    title(axes, 0.2, 3.3, "The log-probs that each network gives its own steps")
    size, pitch, left = 0.64, 0.685, 1.75
    rows = zip((2.3, 0.9), (BLUE, ORANGE), ("tiny-sd", "random\nweights"), strips(), strict=True)
    log_probs = json.loads(frames().text["log_probs"])
    for row, (y, color, name, strip) in enumerate(rows):
        label(axes, 0.9, y + size / 2, name, ink=color, size=11, weight="bold")
        label(axes, 0.9, y - 0.22, "log-prob", ink=color, size=9.5)
        for column, pixels in enumerate(strip):
            edge = color if column == len(TIMES) - 1 else None
            show_image(axes, left + column * pitch, y, size, pixels, edge=edge, line=2.5)
        for column, value in enumerate(log_probs[row]):
            x, text = left + (column + 1) * pitch - 0.02, minus(f"{value:.2f}")
            label(axes, x, y - 0.22, text, ink=color, size=10.5, weight="bold")
    for column, t in enumerate(TIMES):
        name = {0: "t = 999", len(TIMES) - 1: "image"}.get(column, str(t))
        note(axes, left + column * pitch + size / 2, 3.05, name, 9.5, "center")
    what = f"“{PROMPT}”; each latent is decoded; both networks get the same noise"
    note(axes, 4.7, 0.25, what, 9.5, "center")
    return figure


def mdp() -> Figure:
    """States are latents of a real rollout; between two of them stands the policy with its action."""
    figure, axes = card(9.4, 3.75)
    strip, size, y = strips()[0], 1.2, 1.55
    title(axes, 0.25, 3.48, "A rollout: states, actions, and one reward at the end")
    for x, t, above, name in (
        (0.3, 999, "first state", "noise,  t = 999"),
        (2.2, 499, "state", "x$_t$ ,  t = 499"),
        (5.75, 399, "next state", "x$_{t-1}$ ,  t = 399"),
        (7.65, 0, "the end", "x$_0$"),
    ):
        show_image(axes, x, y, size, strip[TIMES.index(t)])
        label(axes, x + size / 2, y + size + 0.2, above, weight="bold")
        label(axes, x + size / 2, y - 0.22, name, size=10.5)
    for x in (1.85, 7.3):
        label(axes, x, y + size / 2, "…", size=18)
    z = np.linspace(-2.7, 2.7, 101)
    center, floor = 4.57, y + 0.28
    axes.fill_between(center + 0.27 * z, floor, floor + 0.72 * np.exp(-(z**2) / 2), color=GREEN, alpha=0.25)
    axes.plot(center + 0.27 * z, floor + 0.72 * np.exp(-(z**2) / 2), color=GREEN, linewidth=1.8)
    at = center + 0.27
    axes.plot([at, at], [floor, floor + 0.72 * math.exp(-0.5)], color=INK, linewidth=1.3)
    axes.plot(at, floor, "o", color=INK, markersize=6)
    label(axes, center, y + size + 0.05, "policy: N(μ, σ² I)", ink=GREEN, weight="bold")
    label(axes, center + 0.3, floor - 0.22, "action: x$_{t-1}$", size=10)
    arrow(axes, (3.48, y + size / 2), (3.84, y + size / 2))
    arrow(axes, (5.3, y + size / 2), (5.7, y + size / 2))
    box(axes, 7.45, 0.3, 1.6, 0.6, "reward r", color=PURPLE, size=11)
    arrow(axes, (8.25, 1.2), (8.25, 0.9))
    notes = (
        f"The prompt c = “{PROMPT}” belongs to every state.",
        "The network decides μ, the schedule decides σ.",
    )
    for y, text in zip((0.75, 0.45), notes, strict=True):
        note(axes, 0.3, y, text, 10)
    return figure


def step_parts() -> Figure:
    """How a denoising step divides the variance 1 of a latent, in the lesson's numbers."""
    figure, axes = card(9.4, 3.75)
    before, after = r"$\bar{\alpha}_t$", r"$\bar{\alpha}_{t-1}$"
    title(axes, 0.25, 3.46, "What x$_{t-1}$ is made of")
    case = f"(worked example: {before} = {ALPHA_BAR}, {after} = {ALPHA_BAR_NEXT}, η = 1)"
    note(axes, 2.75, 3.46, case, 10)
    left, width = 1.6, 7.5
    first = [(ALPHA_BAR, BLUE, "image\n0.36"), (1 - ALPHA_BAR, ORANGE, "noise\n0.64")]
    then = [(ALPHA_BAR_NEXT, BLUE, "image\n0.64"), (KEPT, ORANGE, f"noise\nthat stays\n{KEPT:.3f}")]
    then += [(VARIANCE, GREEN, f"fresh noise\n{VARIANCE:.3f}")]
    for y, name, parts in ((2.35, "x$_t$", first), (0.95, "x$_{t-1}$", then)):
        label(axes, 1.15, y + 0.35, name, size=14)
        start = left
        for share, color, text in parts:
            bar(axes, start, y, share * width, 0.7, color, edgecolor=CARD, linewidth=2)
            label(axes, start + share * width / 2, y + 0.35, text, ink="white", size=9)
            start += share * width
    note(axes, 0.25, 2.7, "before", 10)
    note(axes, 0.25, 1.3, "after", 10)
    share = "fractions of the variance, for the true $x_0$ and ε"
    note(axes, left + width / 2, 2.0, share, 10, "center")
    formula = [
        (0.3, BLUE, r"$\sqrt{\bar{\alpha}_{t-1}}\;\hat{x}_0$"),
        (0.655, ORANGE, r"$+\;\sqrt{1-\bar{\alpha}_{t-1}-\sigma^2}\;\hat{\varepsilon}$"),
        (0.9, GREEN, r"$+\;\sigma z$"),
    ]
    for x, color, text in formula:
        label(axes, left + x * width, 0.58, text, ink=color, size=13)
    what = r"the network's estimates $\hat{x}_0$ and $\hat{\varepsilon}$, and noise z ~ N(0, I)"
    note(axes, left + width / 2, 0.2, what, 9.5, "center")
    return figure


def schedule() -> Figure:
    """What each latent of tiny-sd's ten steps is made of, from ᾱ before and after the step."""
    figure, axes = card(9.4, 3.3)
    title(axes, 0.25, 3.05, "The ten steps of a rollout")
    note(axes, 3.2, 3.05, "(tiny-sd, η = 1)", 10)
    bars = np.array(json.loads(frames().text["alpha_bars"]))
    before, after = bars[:-1], bars[1:]
    fresh = (1 - after) / (1 - before) * (1 - before / after)
    left, pitch, width, floor, height = 1.35, 0.62, 0.52, 0.75, 1.75
    for k in range(len(after)):
        start = floor
        for share, color in ((after[k], BLUE), (1 - after[k] - fresh[k], ORANGE), (fresh[k], GREEN)):
            bar(axes, left + k * pitch, start, width, share * height, color, linewidth=0)
            start += share * height
        x = left + k * pitch + width / 2
        label(axes, x, floor + height + 0.15, f"{math.sqrt(fresh[k]):.2f}", ink=GREEN, size=10)
        note(axes, x, floor - 0.17, f"{TIMES[k]}", 9.5, "center")
    label(axes, 0.75, floor + height + 0.15, "σ", ink=GREEN, size=12)
    note(axes, 0.75, floor - 0.17, "step at t =", 9.5, "center")
    note(axes, 0.75, floor + height / 2, "fraction of\nthe variance", 9.5, "center")
    names = ((GREEN, "fresh noise"), (ORANGE, "noise\nthat stays"), (BLUE, "image"))
    for y, (color, text) in zip((2.25, 1.7, 1.15), names, strict=True):
        title(axes, 7.8, y, text, 11, ink=color)
    kept = math.sqrt(1 - after[0] - fresh[0])
    what = f"The first step keeps {kept:.4f} of the noise that it starts from, and the last adds none."
    note(axes, 4.7, 0.22, what, 10, "center")
    return figure


def own() -> Figure:
    """The same noise under two Gaussians has one height; one action under two Gaussians has two."""
    figure, _ = card(9.4, 2.9)
    x = np.linspace(-3.2, 5.2, 301)
    titles = ("own steps: equal densities", "one step: different densities")
    for left, shared, name in ((0.03, False, titles[0]), (0.52, True, titles[1])):
        panel = figure.add_axes((left, 0.2, 0.45, 0.62), facecolor=CARD)
        for mean, color in ((0.0, BLUE), (2.0, ORANGE)):
            panel.plot(x, np.exp(-((x - mean) ** 2) / 2), color=color, linewidth=2)
            action = 1.0 - 0.3 if shared else mean + 0.7
            height = math.exp(-((action - mean) ** 2) / 2)
            panel.plot([action] * 2, [0, height], color=INK, linewidth=1.1, linestyle=":")
            panel.plot([-3.2, action], [height] * 2, color=color, linewidth=1.1, linestyle="--")
            panel.plot([action], [height], "o", color=color, markersize=8, zorder=4)
        ticks = {0.0: "μ", 0.7: "\nthe action" if shared else "\nμ + σz", 2.0: "other μ"}
        ticks |= {} if shared else {2.7: "\nother μ + σz"}
        panel.set_xticks(list(ticks), list(ticks.values()), fontsize=10)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.set(yticks=[], xlim=(-3.2, 5.2), ylim=(0, 1.08))
        panel.set_title(name, fontsize=11, color=INK, weight="bold", pad=6)
    return figure


def teaches() -> Figure:
    """Redness, threes and log-probs of fresh steps over optimizer steps: three actions, three seeds."""
    rows = read_rows("results/log_probs.csv")
    figure, axes = card(9.4, 3.6)
    title(axes, 0.25, 3.35, "Ten optimizer steps on redness (a line is a seed)")
    colors = {"stored": GREEN, "resampled": ORANGE, "attached": PURPLE}
    columns = {"redness": ("redness", (0, 0.7)), "threes": ("read as a three", (0, 1))}
    columns |= {"log_prob": ("log-prob of fresh steps", (-1, 0))}
    for left, (column, (name, limits)) in zip((0.06, 0.385, 0.71), columns.items(), strict=True):
        panel = figure.add_axes((left, 0.25, 0.265, 0.5))
        for action, color in colors.items():
            for run in of_seeds(where(rows, action=action), "steps", column):
                panel.plot(*run.T, color=color, linewidth=1.6)
        plain(panel, colors=MUTED, labelsize=9.5)
        panel.set(ylim=limits, xticks=[0, 5, 10])
        panel.set_title(name, fontsize=11, color=INK, pad=6)
        panel.set_xlabel("optimizer steps", fontsize=9.5, color=MUTED)
    panel.text(5, -0.52, "all nine runs", color=MUTED, fontsize=10, ha="center")
    names = ("stored", "redrawn", "attached")
    for x, name, color in zip((2.0, 4.7, 7.4), names, colors.values(), strict=True):
        label(axes, x, 0.2, name, ink=color, size=11, weight="bold")
    return figure


def replay() -> Figure:
    """Sampling stores an action; training computes the log-prob of the stored action."""
    figure, axes = card(9.4, 4.1)
    title(axes, 0.25, 3.85, "sampling: take an action", ink=BLUE)
    title(axes, 5.0, 3.85, "training: replay it", ink=ORANGE)
    old, new = r"log π$_{\theta_\mathrm{old}}$", r"log π$_\theta$"
    box(axes, 0.25, 2.75, 1.5, 0.75, "x$_t$, t, prompt", color=BLUE)
    box(axes, 2.35, 2.75, 2.0, 0.75, "μ$_{old}$, σ  with the\nold weights θ$_{old}$", color=MUTED)
    arrow(axes, (1.75, 3.13), (2.35, 3.13))
    box(axes, 2.35, 1.6, 2.0, 0.75, "x$_{t-1}$ = μ$_{old}$ + σ z", color=GREEN)
    arrow(axes, (3.35, 2.75), (3.35, 2.35))
    box(axes, 2.35, 0.45, 2.0, 0.75, old, color=PURPLE, size=12)
    arrow(axes, (3.35, 1.6), (3.35, 1.2))
    box(axes, 5.0, 2.75, 1.5, 0.75, "x$_t$, t, prompt", color=BLUE)
    box(axes, 7.1, 2.75, 2.0, 0.75, "μ, σ  with the\npresent weights θ", color=MUTED)
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
    """Two Gaussians and the stored action: heights are densities, and their logs differ by the log-ratio."""
    figure, axes = card(9.4, 4.3)
    title(axes, 0.25, 4.03, "The policy has moved, the stored action has not")
    action, moved = MEAN + STD * Z, MEAN + DRIFT * STD
    left_end, right_end = MEAN - 2.4 * STD, moved + 2.2 * STD
    x = np.linspace(left_end, right_end, 301)
    constant = -math.log(STD) - 0.5 * math.log(2 * math.pi)
    for left, log in ((0.03, False), (0.52, True)):
        panel = figure.add_axes((left, 0.22, 0.33, 0.58), facecolor=CARD)
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
            panel.text(right_end, y, minus(f" {height:.3f} {name}"), color=color, fontsize=11, va="center")
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.set(yticks=[], xlim=(left_end, right_end), ylim=(-2.2, 0.0) if log else (0, 0.86))
        ticks = {MEAN: "μ$_{old}$", action: "\nstored x$_{t-1}$", moved: "μ"}
        panel.set_xticks(list(ticks), list(ticks.values()), fontsize=11)
        low, high = heights[BLUE], heights[ORANGE]
        panel.plot([action, action], [panel.get_ylim()[0], low], color=INK, linewidth=1.1, linestyle=":")
        panel.annotate("", (action, high), (action, low), arrowprops={"arrowstyle": "<->", "color": INK})
        y, below = low - 0.2, f" ρ = now / then\n = {high / low:.3f}"
        if log:
            y, below = low - 0.62, f" gap = log ρ\n = d z − d²/2\n = {high - low:.3f}"
        panel.text(right_end, y, below, color=INK, fontsize=11, va="center")
        panel.set_title("height: density π" if not log else "height: log π", fontsize=11, color=MUTED, pad=4)
    old = "μ$_{old}$"
    what = f"z = {Z:g}: from {old} to the action;  d = {DRIFT:g}: from {old} to μ;  both in units of σ"
    note(axes, 4.7, 0.13, what, 10, "center")
    return figure


if __name__ == "__main__":
    drawn = {"03-same": same, "03-mdp": mdp, "03-step": step_parts, "03-schedule": schedule, "03-own": own}
    main({**drawn, "03-replay": replay, "03-log-ratio": log_ratio, "03-teaches": teaches})
