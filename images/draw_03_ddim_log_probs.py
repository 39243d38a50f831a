"""Draw the figures of lesson 03: two networks, the denoising MDP, steps, Gaussians, and what teaches.

The images are from runs of tiny-sd: `denoise` makes them, and `03-frames.png` keeps them with their
log-probs, so that the figures are the same on every machine. Delete that file to run tiny-sd again.
"""

import json
import math
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from plots import bar, mean_and_paths, minus, of_seeds, plain, read_rows, show_image, where
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


def same() -> Figure:
    """Two networks, the same noise: other images, and step by step the same log-prob."""
    figure, axes = diagram(6, 5.35)
    size, pitch, top = 0.37, 0.385, 4.02
    columns = zip((1.1, 4.55), (2.4, 3.75), (BLUE, ORANGE), strips(), strict=True)
    log_probs = json.loads(frames().text["log_probs"])
    note(axes, 0.1, 5.17, f"“{PROMPT}”; the same noise for both")
    note(axes, 0.1, 4.89, "networks; each latent is decoded")
    label(axes, 1.1, top + 0.53, "tiny-sd", ink=BLUE, weight="bold", align="left")
    label(axes, 4.95, top + 0.53, "random weights", ink=ORANGE, weight="bold")
    note(axes, 3.02, top + 0.29, "log-prob of each step", align="center")
    for row, t in enumerate(TIMES):
        note(axes, 0.95, top - row * pitch + size / 2, f"t = {t}" if t else "image", align="right")
    for column, (x, beside, color, strip) in enumerate(columns):
        for row, pixels in enumerate(strip):
            edge = color if row == len(TIMES) - 1 else None
            show_image(axes, x, top - row * pitch, size, pixels, edge=edge, line=2.5)
        for row, value in enumerate(log_probs[column]):
            label(axes, beside, top - row * pitch - 0.01, minus(f"{value:.2f}"), ink=color, weight="bold")
    return figure


def mdp() -> Figure:
    """States are latents of a real rollout; between two of them stands the policy with its action."""
    figure, axes = diagram(6, 4.75)
    strip, size, y = strips()[0], 1.0, 2.95
    title(axes, 0.1, 4.55, "A rollout: states, actions, one reward at the end")
    for x, low, t, above, name in (
        (0.1, y, 999, "first state", "t = 999"),
        (1.55, y, 499, "state", "x$_t$,  t = 499"),
        (4.8, y, 399, "next state", "x$_{t-1}$,  t = 399"),
        (4.8, 0.85, 0, "", "x$_0$, the end"),
    ):
        show_image(axes, x, low, size, strip[TIMES.index(t)])
        label(axes, x + size / 2 + 0.05 * (x < 1), low + size + 0.18, above)
        label(axes, x + size / 2, low - 0.2, name)
    label(axes, 1.32, y + size / 2, "…", size=18)
    label(axes, 5.3, 2.28, "…", size=18)
    z = np.linspace(-2.7, 2.7, 101)
    center, floor = 3.68, y + 0.18
    axes.fill_between(center + 0.25 * z, floor, floor + 0.7 * np.exp(-(z**2) / 2), color=GREEN, alpha=0.25)
    axes.plot(center + 0.25 * z, floor + 0.7 * np.exp(-(z**2) / 2), color=GREEN, linewidth=1.8)
    at = center + 0.25
    axes.plot([at, at], [floor, floor + 0.7 * math.exp(-0.5)], color=INK, linewidth=1.3)
    axes.plot(at, floor, "o", color=INK, markersize=6)
    label(axes, center - 0.1, y + size + 0.18, "policy: N(μ, σ² I)", ink=GREEN, weight="bold")
    label(axes, center + 0.05, y - 0.2, "action: x$_{t-1}$")
    arrow(axes, (2.6, y + size / 2), (2.9, y + size / 2))
    arrow(axes, (4.45, y + size / 2), (4.76, y + size / 2))
    box(axes, 2.9, 1.1, 1.4, 0.5, "reward r", color=PURPLE)
    arrow(axes, (4.78, 1.35), (4.32, 1.35))
    note(axes, 0.1, 1.58, "The network decides μ,")
    note(axes, 0.1, 1.3, "the schedule decides σ.")
    note(axes, 0.1, 0.22, f"“{PROMPT}” belongs to every state.")
    return figure


def step_parts() -> Figure:
    """How a denoising step divides the variance 1 of a latent, in the lesson's numbers."""
    figure, axes = diagram(6, 4.5)
    before, after = r"$\bar{\alpha}_t$", r"$\bar{\alpha}_{t-1}$"
    title(axes, 0.1, 4.28, "What x$_{t-1}$ is made of")
    note(axes, 0.1, 3.96, f"worked example: {before} = {ALPHA_BAR}, {after} = {ALPHA_BAR_NEXT}, η = 1")
    left, width = 0.95, 4.95
    first = [(ALPHA_BAR, BLUE, "image\n0.36"), (1 - ALPHA_BAR, ORANGE, "noise\n0.64")]
    then = [(ALPHA_BAR_NEXT, BLUE, "image\n0.64"), (KEPT, ORANGE, "")]
    then += [(VARIANCE, GREEN, f"fresh noise\n{VARIANCE:.3f}")]
    for y, when, name, parts in ((3.1, "before", "x$_t$", first), (1.9, "after", "x$_{t-1}$", then)):
        note(axes, 0.1, y + 0.5, when)
        label(axes, 0.1, y + 0.18, name, size=15, align="left")
        start = left
        for share, color, text in parts:
            bar(axes, start, y, share * width, 0.65, color, edgecolor=CARD, linewidth=2)
            label(axes, start + share * width / 2, y + 0.32, text, ink="white")
            start += share * width
    middle = left + (ALPHA_BAR_NEXT + KEPT / 2) * width
    label(axes, middle, 1.68, f"noise that stays {KEPT:.3f}", ink=ORANGE)
    note(axes, left, 2.82, "fractions of the variance, for the true $x_0$ and ε")
    formula = [
        (0.7, BLUE, r"$\sqrt{\bar{\alpha}_{t-1}}\;\hat{x}_0$"),
        (2.95, ORANGE, r"$+\;\sqrt{1-\bar{\alpha}_{t-1}-\sigma^2}\;\hat{\varepsilon}$"),
        (5.1, GREEN, r"$+\;\sigma z$"),
    ]
    for x, color, text in formula:
        label(axes, x, 1.08, text, ink=color, size=17)
    note(axes, 0.1, 0.58, r"$\hat{x}_0$, $\hat{\varepsilon}$: the network's estimates")
    note(axes, 0.1, 0.25, "z ~ N(0, I): noise")
    return figure


def schedule() -> Figure:
    """What each latent of tiny-sd's ten steps is made of, from ᾱ before and after the step."""
    figure, axes = diagram(6, 4.05)
    title(axes, 0.1, 3.85, "The ten steps of a rollout")
    note(axes, 2.85, 3.85, "(tiny-sd, η = 1)")
    bars = np.array(json.loads(frames().text["alpha_bars"]))
    before, after = bars[:-1], bars[1:]
    fresh = (1 - after) / (1 - before) * (1 - before / after)
    left, pitch, width, floor, height = 0.62, 0.53, 0.45, 1.1, 1.75
    for k in range(len(after)):
        start = floor
        for share, color in ((after[k], BLUE), (1 - after[k] - fresh[k], ORANGE), (fresh[k], GREEN)):
            bar(axes, left + k * pitch, start, width, share * height, color, linewidth=0)
            start += share * height
        x = left + k * pitch + width / 2
        label(axes, x, floor + height + 0.17, f"{math.sqrt(fresh[k]):.2f}", ink=GREEN)
        note(axes, x, floor - 0.18, f"{TIMES[k]}", align="center")
    label(axes, 0.3, floor + height + 0.17, "σ", ink=GREEN, size=14)
    note(axes, 0.3, floor - 0.18, "t", align="center")
    note(axes, 0.1, 3.38, "fractions of the variance:")
    names = ((2.55, BLUE, "image"), (3.25, ORANGE, "noise that stays"), (4.85, GREEN, "fresh noise"))
    for x, color, text in names:
        label(axes, x, 3.38, text, ink=color, align="left")
    kept = math.sqrt(1 - after[0] - fresh[0])
    note(axes, 0.1, 0.52, f"The first step keeps {kept:.4f} of the noise that it")
    note(axes, 0.1, 0.22, "starts from, and the last adds none.")
    return figure


def own() -> Figure:
    """The same noise under two Gaussians has one height; one action under two Gaussians has two."""
    figure, _ = diagram(6, 4.7)
    x = np.linspace(-3.2, 5.2, 301)
    titles = ("own steps: equal densities", "one step: different densities")
    for bottom, shared, name in ((0.62, False, titles[0]), (0.12, True, titles[1])):
        panel = figure.add_axes((0.03, bottom, 0.94, 0.3), facecolor=CARD)
        for mean, color in ((0.0, BLUE), (2.0, ORANGE)):
            panel.plot(x, np.exp(-((x - mean) ** 2) / 2), color=color, linewidth=2)
            action = 1.0 - 0.3 if shared else mean + 0.7
            height = math.exp(-((action - mean) ** 2) / 2)
            panel.plot([action] * 2, [0, height], color=INK, linewidth=1.1, linestyle=":")
            panel.plot([-3.2, action], [height] * 2, color=color, linewidth=1.1, linestyle="--")
            panel.plot([action], [height], "o", color=color, markersize=8, zorder=4)
        ticks = {0.0: "μ", 0.7: "\nthe action" if shared else "\nμ + σz", 2.0: "other μ"}
        ticks |= {} if shared else {2.7: "\nother μ + σz"}
        panel.set_xticks(list(ticks), list(ticks.values()))
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.set(yticks=[], xlim=(-3.2, 5.2), ylim=(0, 1.08))
        panel.set_title(name, color=INK, weight="bold", pad=6)
    return figure


def teaches() -> Figure:
    """Redness and threes over optimizer steps: three actions, three seeds; the log-probs in words."""
    rows = read_rows("results/log_probs.csv")
    figure, axes = diagram(6, 5.55)
    title(axes, 0.1, 5.32, "Ten optimizer steps on redness")
    colors = {"stored": GREEN, "resampled": ORANGE, "attached": PURPLE}
    columns = {"redness": ("redness (thin: seeds, thick: their mean)", (0, 0.7))}
    columns |= {"threes": ("read as a three", (0, 1))}
    for bottom, (column, (name, limits)) in zip((0.575, 0.21), columns.items(), strict=True):
        panel = figure.add_axes((0.12, bottom, 0.84, 0.25))
        for action, color in colors.items():
            paths = of_seeds(where(rows, action=action), "steps", column)
            mean_and_paths(panel, paths, color, thin=1, alpha=0.45, linewidth=2.8)
        plain(panel, colors=MUTED)
        panel.set(ylim=limits, xticks=[0, 5, 10])
        panel.set_title(name, color=INK, pad=6)
    panel.set_xlabel("optimizer steps", color=MUTED)
    names = ("stored", "redrawn", "attached")
    label(axes, 0.1, 5.02, "trained on actions:", align="left")
    for x, name, color in zip((2.35, 3.65, 5.05), names, colors.values(), strict=True):
        label(axes, x, 5.02, name, ink=color, weight="bold")
    (fresh,) = {f"{float(row['log_prob']):.2f}" for row in rows}  # all nine runs have one value
    label(axes, 0.1, 0.22, f"log-prob of fresh steps: {minus(fresh)} in all nine runs", align="left")
    return figure


def replay() -> Figure:
    """Sampling stores an action; training computes the log-prob of the stored action."""
    figure, axes = diagram(6, 5.0)
    old, new = r"log π$_{\theta_\mathrm{old}}$", r"log π$_\theta$"
    width, height, lows = 2.3, 0.65, (3.85, 2.9, 1.95, 1.0)
    drawn, same = "x$_{t-1}$ = μ$_{old}$ + σ z,\nz ~ N(0, I)", "the same x$_{t-1}$:\nhow likely now?"
    then, now = "μ$_{old}$, σ  with the\nold weights θ$_{old}$", "μ, σ  with the\npresent weights θ"
    columns = (
        (0.1, "sampling: take an action", BLUE, then, drawn, old),
        (3.6, "training: replay it", ORANGE, now, same, new),
    )
    for x, name, ink, gaussian, action, log_prob in columns:
        title(axes, x, 4.75, name, ink=ink)
        texts = ("x$_t$, t, prompt", gaussian, action, log_prob)
        for low, text, color in zip(lows, texts, (BLUE, MUTED, GREEN, PURPLE), strict=True):
            box(axes, x, low, width, height, text, color=color)
            if low != lows[0]:
                arrow(axes, (x + width / 2, low + 0.95), (x + width / 2, low + height))
    arrow(axes, (2.4, 2.27), (3.6, 2.27), ink=GREEN, width=2.2)
    label(axes, 3.0, 2.64, "stored,\nreplayed", ink=GREEN, size=12.5, weight="bold")
    label(axes, 3.0, 1.93, "as\nprev_sample", ink=MUTED, size=12)
    box(axes, 1.5, 0.1, 3.0, 0.5, "ratio ρ = exp(new − old)")
    arrow(axes, (1.8, 1.0), (1.8, 0.6), ink=PURPLE)
    arrow(axes, (4.2, 1.0), (4.2, 0.6), ink=PURPLE)
    return figure


def log_ratio() -> Figure:
    """Two Gaussians and the stored action: heights are densities, and their logs differ by the log-ratio."""
    figure, axes = diagram(6, 6.6)
    title(axes, 0.1, 6.4, "The policy has moved, the stored action has not")
    action, moved = MEAN + STD * Z, MEAN + DRIFT * STD
    left_end, right_end = MEAN - 2.4 * STD, moved + 2.2 * STD
    x = np.linspace(left_end, right_end, 301)
    constant = -math.log(STD) - 0.5 * math.log(2 * math.pi)
    for bottom, log in ((0.6, False), (0.18, True)):
        panel = figure.add_axes((0.03, bottom, 0.66, 0.285), facecolor=CARD)
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
            panel.text(right_end, y, minus(f" {height:.3f} {name}"), color=color, va="center")
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.set(yticks=[], xlim=(left_end, right_end), ylim=(-2.2, 0.0) if log else (0, 0.86))
        ticks = {MEAN: "μ$_{old}$", action: "\nstored x$_{t-1}$", moved: "μ"}
        panel.set_xticks(list(ticks), list(ticks.values()))
        low, high = heights[BLUE], heights[ORANGE]
        panel.plot([action, action], [panel.get_ylim()[0], low], color=INK, linewidth=1.1, linestyle=":")
        panel.annotate("", (action, high), (action, low), arrowprops={"arrowstyle": "<->", "color": INK})
        y, below = low - 0.24, f" ρ = now / then\n = {high / low:.3f}"
        if log:
            y, below = low - 0.78, f" gap = log ρ\n = d z − d²/2\n = {high - low:.3f}"
        panel.text(right_end, y, below, color=INK, va="center")
        panel.set_title("height: density π" if not log else "height: log π", color=MUTED, pad=4)
    old = "μ$_{old}$"
    note(axes, 0.1, 0.48, f"z = {Z:g}: from {old} to the action;  d = {DRIFT:g}: from {old} to μ;")
    note(axes, 0.1, 0.18, "both in units of σ")
    return figure


if __name__ == "__main__":
    drawn = {"03-same": same, "03-mdp": mdp, "03-step": step_parts, "03-schedule": schedule, "03-own": own}
    main({**drawn, "03-replay": replay, "03-log-ratio": log_ratio, "03-teaches": teaches})
