"""Draw the figures of lesson 04: the effect of clipping, four rollouts, the stages of an epoch."""

import itertools
from statistics import mean, pstdev

from matplotlib import image as mpl_image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import (
    BENCHMARKS,
    Row,
    mean_and_paths,
    minus,
    of_seeds,
    panels,
    plain,
    read_rows,
    show_image,
    where,
)
from style import INK, MUTED, PALETTE, arrow, box, diagram, label, main, note, title

BLUE, ORANGE, GREEN, PURPLE, _, _ = PALETTE
ALL = read_rows("results/clipping.csv")
RESULTS = [row for row in ALL if int(row["seed"]) < 3]  # later seeds have four inner epochs alone
NEW = [row for row in ALL if int(row["seed"]) >= 3]
SEEDS = len({row["seed"] for row in RESULTS})
COLORS = {"clipped": BLUE, "not clipped": ORANGE}
SETTINGS = {  # columns of clipping.csv, as they stand there
    ("0.0002", "4"): "learning rate 2e-4\nfour inner epochs",
    ("5e-05", "4"): "learning rate 5e-5\nfour inner epochs",
    ("0.0002", "1"): "learning rate 2e-4\none inner epoch",
    ("5e-05", "1"): "learning rate 5e-5\none inner epoch",
}
MEASURES = {"redness": "redness", "readable": "readable digits"}
LOOKED_AT = (0, 1, 2, 3, 5, 7, 10)  # epochs: points of a curve, and rows of clipping_*.png
SHOWN = (0, 2, 4, 6)  # of these rows on the cover
CLIP_RANGE = 0.2
REWARDS, RATIOS = (17.0, 11.0, 9.0, 3.0), (1.5, 0.5, 1.1, 0.5)
VERDICTS = (
    "good, 50% more likely:\nstop", "good, but less likely:\nraise it",
    "bad, 10% more likely:\npush it down", "bad, half as likely:\nstop",
)  # fmt: skip


def _signed(value: float, digits: int = 2) -> str:
    return minus(f"{value:+.{digits}f}")


def _rows(variant: str, setting: tuple[str, str]) -> list[Row]:
    rate, inner_epochs = setting
    return where(RESULTS, variant=variant, learning_rate=rate, inner_epochs=inner_epochs)


def _curves(axes: Axes, setting: tuple[str, str], measure: str, size: float = 11.5) -> None:
    """Draw a line for every seed, and a thick one for their mean."""
    for name, color in COLORS.items():
        paths = of_seeds(_rows(name, setting), "epoch", measure)
        mean_and_paths(axes, paths, color, thin=0.8, alpha=0.55, linewidth=2.4, label=name)
    axes.set(xlim=(0, 10), ylim=(0, 1), xticks=(0, 5, 10), yticks=(0, 0.5, 1))
    if measure == "readable":
        axes.axhline(0.1, color=MUTED, linewidth=0.8, linestyle=":")
        axes.set(yticks=(0, 0.5, 1), yticklabels=("0", "50%", "100%"))
    plain(axes, labelsize=size, colors=INK)


def clipping() -> Figure:
    """Draw the setting that the lesson opens with: two curves, and images along them."""
    figure, axes = diagram(10, 5.3)
    title(axes, 0.2, 5.05, "The reward is red; each batch of samples is used four times.", 14)
    for place, (measure, name) in enumerate(MEASURES.items()):
        plot = figure.add_axes((0.06 + 0.255 * place, 0.21, 0.185, 0.62))
        _curves(plot, ("0.0002", "4"), measure)
        plot.set_title(name, fontsize=13, color=INK)
        plot.set_xlabel("epoch", fontsize=11.5, color=INK)
    plot.text(0.3, 0.025, "guessing: 10%", fontsize=10, color=MUTED)
    for (name, color), top in zip(COLORS.items(), (4.55, 2.5), strict=True):
        title(axes, 5.75, top, name, 13, ink=color)
        note(axes, 5.66, top - 0.02, "epoch", 11, align="right")
        pixels = mpl_image.imread(BENCHMARKS / f"results/clipping_{name.replace(' ', '_')}.png")
        size = len(pixels) // len(LOOKED_AT)
        for place, row in enumerate(SHOWN):
            bottom = top - 0.62 - 0.43 * place
            show_image(axes, 5.75, bottom, 4.1, pixels[row * size : (row + 1) * size], height=0.41)
            note(axes, 5.66, bottom + 0.2, f"{LOOKED_AT[row]}", 11, align="right")
    thin = f"Thin: {SEEDS} seeds; thick: their mean."
    where_red = "Redness: pure red 1, yellow about 0.5."
    note(axes, 0.2, 0.38, f"{thin} Images: zero to nine, one seed. {where_red}", 10.5)
    what = "Readable: a classifier that training does not use names the correct digit."
    note(axes, 0.2, 0.14, what, 10.5)
    return figure


def answer() -> Figure:
    """Draw the readable digits in four settings, clipped and not clipped."""
    figure, axes = diagram(9.6, 3.4)
    for (name, color), x in zip(COLORS.items(), (3.6, 4.7), strict=True):
        title(axes, x, 3.18, name, 13, ink=color)
    title(axes, 0.2, 3.18, "Readable digits over epochs:", 13)
    for column, (setting, name) in enumerate(SETTINGS.items()):
        plot = figure.add_axes((0.07 + 0.237 * column, 0.17, 0.195, 0.54))
        _curves(plot, setting, "readable")
        plot.set_title(name, fontsize=12, color=INK)
        plot.set_xlabel("epoch", fontsize=11.5, color=INK)
    return figure


def readable_at(run: list[Row], redness: float = 0.5) -> float | None:
    """Return the readable fraction where a run's redness first passes a value, between epochs by a line."""
    for before, after in itertools.pairwise(run):
        low, high = float(before["redness"]), float(after["redness"])
        if low < redness <= high:
            part = (redness - low) / (high - low)
            return (1 - part) * float(before["readable"]) + part * float(after["readable"])
    return None


def seeds() -> Figure:
    """Draw the readable digits at a redness of 0.5, for new seeds and three learning rates."""
    figure, (axes,) = panels(1, (8, 3.4))
    rates = sorted({row["learning_rate"] for row in NEW}, key=float)
    for place, rate in enumerate(rates):
        names = sorted({row["seed"] for row in where(NEW, learning_rate=rate)})
        for number, seed in enumerate(names):
            x = place + 0.13 * (number - (len(names) - 1) / 2)
            runs = {name: where(NEW, learning_rate=rate, seed=seed, variant=name) for name in COLORS}
            ends = {name: readable_at(run) for name, run in runs.items() if run}
            there = [end for end in ends.values() if end is not None]
            axes.plot([x] * len(there), there, color=MUTED, linewidth=0.9, zorder=1)
            for name, end in ends.items():
                marker, height = ("o", end) if end is not None else ("x", 0.03)
                axes.plot(x, height, marker, color=COLORS[name], markersize=7)
    axes.axhline(0.1, color=MUTED, linewidth=0.8, linestyle=":")
    axes.set(
        ylim=(0, 1), xlim=(-0.5, len(rates) - 0.35), yticks=(0, 0.5, 1), yticklabels=("0", "50%", "100%")
    )
    axes.set_xticks(
        range(len(rates)), [f"learning rate {float(rate):.0e}".replace("e-0", "e-") for rate in rates]
    )
    heading = "readable digits when redness first passes 0.5 (five new seeds)"
    axes.set_title(heading, fontsize=13, color=INK, loc="left")
    for (name, color), height in zip(COLORS.items(), (0.92, 0.82), strict=True):
        axes.text(-0.45, height, name, color=color, weight="bold", fontsize=12.5)
    axes.text(
        len(rates) - 0.36,
        0.035,
        "×: not reached",
        fontsize=11,
        color=MUTED,
        ha="right",
        va="center",
    )
    plain(axes, labelsize=12, colors=INK)
    return figure


def rollouts() -> Figure:
    """Draw the table that sections 1 and 2 fill in, computed from rewards and ratios."""
    figure, axes = diagram(10, 4.15)
    columns = {"reward r": (0.95, 0.85), "advantage A": (1.95, 0.95), "ratio ρ": (3.05, 0.8)}
    columns |= {"−A ρ": (4.0, 0.85), "−A clip(ρ)": (4.9, 0.85), "loss": (5.9, 0.85), "gradient": (6.9, 0.85)}
    title(axes, 0.2, 3.85, "Four rollouts, from reward to gradient", 14)
    for name, (x, width) in columns.items():
        label(axes, x + width / 2, 3.4, name, size=11, weight="bold")
    note(axes, 4.87, 3.13, "the larger one is the loss", 10.5, align="center")
    title(axes, 7.95, 3.4, "what it means", 11)
    for row, (reward, ratio, verdict) in enumerate(zip(REWARDS, RATIOS, VERDICTS, strict=True)):
        y = 2.4 - 0.62 * row
        advantage = (reward - mean(REWARDS)) / pstdev(REWARDS)
        unclipped = -advantage * ratio
        clipped = -advantage * min(max(ratio, 1 - CLIP_RANGE), 1 + CLIP_RANGE)
        is_dead, color = clipped > unclipped, GREEN if advantage > 0 else ORANGE
        gradient = ("0", "none", INK) if is_dead else (_signed(unclipped), PURPLE, "white")
        label(axes, 0.48, y + 0.25, f"rollout {row + 1}", size=11)
        cells = {
            "reward r": (f"{reward:.0f}", "none", INK),
            "advantage A": (_signed(advantage, 1), color, "white"),
            "ratio ρ": (f"{ratio:.1f}", BLUE, "white"),
            "−A ρ": (_signed(unclipped), "none" if is_dead else "#dfe8f5", INK),
            "−A clip(ρ)": (_signed(clipped), "#dfe8f5" if is_dead else "none", INK),
            "loss": (_signed(max(unclipped, clipped)), PURPLE, "white"),
            "gradient": gradient,
        }
        for name, (text, fill, ink) in cells.items():
            x, width = columns[name]
            box(axes, x, y, width, 0.5, text, color=fill, ink=ink, size=12.5)
        note(axes, 7.95, y + 0.25, verdict, 10.5)
    what = "Clip range 0.2. The gradient is that of the rollout's loss with respect to its log-probability."
    note(axes, 0.2, 0.2, what, 11)
    return figure


def stages() -> Figure:
    """Draw one epoch of DDPO as the seven stages that the loop of section 4 marks."""
    figure, axes = diagram(10, 4.55)
    title(axes, 0.2, 4.25, "One epoch of DDPO in seven stages", 14)
    _stage(axes, 0.2, 2.75, "1  sample", "images, actions and\ntheir log-probs, kept", BLUE)
    _stage(axes, 2.65, 2.75, "2  reward", "one number\nper image", GREEN)
    _stage(axes, 5.1, 2.75, "3  advantages", "rewards in standard\ndeviations", GREEN)
    _stage(axes, 7.55, 2.75, "4  shuffle", "(sample, timestep)\npairs, minibatches", BLUE)
    for x in (2.65, 5.1, 7.55):
        arrow(axes, (x - 0.4, 3.225), (x, 3.225))
    _stage(axes, 7.55, 0.85, "5  replay", "log-probs of the same\nactions, with gradient", PURPLE)
    _stage(axes, 5.1, 0.85, "6  clipped loss", "ratio to the kept\nlog-probs, clipped", PURPLE)
    _stage(axes, 2.65, 0.85, "7  optimizer step", "gradient, clipped by\nnorm; new weights", PURPLE)
    arrow(axes, (8.9, 2.75), (8.9, 1.8))
    arrow(axes, (7.55, 1.325), (7.15, 1.325))
    arrow(axes, (5.1, 1.325), (4.7, 1.325))
    # Back to the next minibatch, to the next inner epoch, and to the next epoch.
    arrow(axes, (3.675, 0.85), (8.575, 0.85), bend=0.11, ink=MUTED)
    note(axes, 6.125, 0.3, "next minibatch (ρ is 1 only in the first)", 11, align="center")
    arrow(axes, (3.675, 1.8), (8.2, 2.75), bend=-0.02, ink=MUTED)
    note(axes, 7.0, 2.1, "next inner epoch", 11, align="center")
    arrow(axes, (2.65, 1.325), (1.225, 2.75), bend=-0.35, ink=MUTED)
    note(axes, 1.0, 1.5, "next epoch:\nthe new policy\nsamples", 11, align="center")
    return figure


def _stage(axes: Axes, x: float, y: float, name: str, text: str, color: str) -> None:
    width, height = 2.05, 0.95
    box(axes, x, y, width, height, color=color)
    label(axes, x + width / 2, y + height - 0.22, name, ink="white", size=12.5, weight="bold")
    label(axes, x + width / 2, y + 0.33, text, ink="white", size=10.5)


if __name__ == "__main__":
    drawn = {"04-clipping": clipping, "04-answer": answer, "04-seeds": seeds}
    main({**drawn, "04-rollouts": rollouts, "04-stages": stages})
