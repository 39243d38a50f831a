"""Draw the figures of lesson 04: the effect of clipping, four rollouts, the stages of an epoch."""

import itertools
from statistics import mean, pstdev

from matplotlib import image as mpl_image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plots import (
    BENCHMARKS,
    LEFT,
    Row,
    image_row,
    mean_and_paths,
    of_seeds,
    panels,
    plain,
    read_rows,
    signed,
    where,
)
from style import INK, MUTED, PALETTE, arrow, box, diagram, label, main, note, title

BLUE, ORANGE, GREEN, PURPLE, _, _ = PALETTE
ALL = read_rows("results/clipping.csv")
RESULTS = [row for row in ALL if int(row["seed"]) < 3]
NEW = [row for row in ALL if int(row["seed"]) >= 3 and row["inner_epochs"] == "4"]
SEEDS = len({row["seed"] for row in RESULTS})
COLORS = {"clipped": BLUE, "not clipped": ORANGE}
# Columns of clipping.csv, as they stand there.
RATES = {"0.0002": "learning rate 2e-4", "5e-05": "learning rate 5e-5"}
INNER_EPOCHS = {"4": "four inner epochs", "1": "one inner epoch"}
MEASURES = {"redness": "redness", "readable": "readable digits"}
LOOKED_AT = (0, 1, 2, 3, 5, 7, 10)  # epochs: points of a curve, and rows of clipping_*.png
SHOWN, DIGITS = (0, 2, 4, 6), 6  # of these rows on the cover, and of the ten digits in each
CLIP_RANGE = 0.2
REWARDS, RATIOS = (17.0, 11.0, 9.0, 3.0), (1.5, 0.5, 1.1, 0.5)
VERDICTS = (
    "good, 50%\nmore likely:\nstop", "good, but\nless likely:\nraise it",
    "bad, 10%\nmore likely:\npush it down", "bad, half\nas likely:\nstop",
)  # fmt: skip


def _rows(variant: str, setting: tuple[str, str]) -> list[Row]:
    rate, inner_epochs = setting
    return where(RESULTS, variant=variant, learning_rate=rate, inner_epochs=inner_epochs)


def _curves(axes: Axes, setting: tuple[str, str], measure: str) -> None:
    """Draw a line for every seed, and a thick one for their mean."""
    for name, color in COLORS.items():
        paths = of_seeds(_rows(name, setting), "epoch", measure)
        mean_and_paths(axes, paths, color, thin=0.8, alpha=0.55, linewidth=2.4, label=name)
    axes.set(xlim=(0, 10), ylim=(0, 1), xticks=(0, 5, 10), yticks=(0, 0.5, 1))
    if measure == "readable":
        axes.axhline(0.1, color=MUTED, linewidth=0.8, linestyle=":")
        axes.set(yticks=(0, 0.5, 1), yticklabels=("0", "50%", "100%"))
    plain(axes, colors=INK)


def clipping() -> Figure:
    """Draw the setting that the lesson opens with: two curves, and images along them."""
    figure, axes = diagram(6, 5.8)
    title(axes, 0.1, 5.58, "The reward is red; each batch is used four times.")
    for place, (measure, name) in enumerate(MEASURES.items()):
        plot = figure.add_axes((0.075 + 0.515 * place, 0.645, 0.385, 0.241))
        _curves(plot, ("0.0002", "4"), measure)
        plot.set_title(name, color=INK)
        plot.set_xlabel("epoch", color=INK)
    for place, row in enumerate(SHOWN):
        note(axes, LEFT, 2.55 - 0.46 * place, f"epoch {LOOKED_AT[row]}")
    for (name, color), left in zip(COLORS.items(), (1.05, 3.6), strict=True):
        title(axes, left, 2.95, name, ink=color)
        pixels = mpl_image.imread(BENCHMARKS / f"results/clipping_{name.replace(' ', '_')}.png")
        size = len(pixels) // len(LOOKED_AT)
        for place, row in enumerate(SHOWN):
            digits = pixels[row * size : (row + 1) * size, : DIGITS * size]
            image_row(figure, digits, "", 2.35 - 0.46 * place, left=left, width=2.3)
    thin = f"Thin: {SEEDS} seeds; thick: their mean."
    where_red = "Redness: pure red 1, yellow about 0.5. Dotted: guessing."
    note(axes, 0.1, 0.74, f"{thin} Images: one seed.")
    note(axes, 0.1, 0.47, where_red)
    what = "Readable: a held-out classifier names the correct digit."
    note(axes, 0.1, 0.2, what)
    return figure


def answer() -> Figure:
    """Draw the readable digits in four settings, clipped and not clipped."""
    figure, axes = diagram(6, 5.0)
    title(axes, 0.1, 4.78, "Readable digits over epochs:")
    for (name, color), x in zip(COLORS.items(), (3.35, 4.35), strict=True):
        title(axes, x, 4.78, name, ink=color)
    for column, (rate, rate_name) in enumerate(RATES.items()):
        for row, (inner_epochs, epochs_name) in enumerate(INNER_EPOCHS.items()):
            plot = figure.add_axes((0.185 + 0.435 * column, 0.55 - 0.43 * row, 0.35, 0.3))
            _curves(plot, (rate, inner_epochs), "readable")
            plot.tick_params(labelleft=not column, labelbottom=bool(row))
            if row:
                plot.set_xlabel("epoch", color=INK)
            else:
                plot.set_title(rate_name, color=INK)
            if not column:
                plot.set_ylabel(epochs_name, color=INK)
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
    figure, (axes,) = panels(1, (6, 4))
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
    axes.set(ylim=(0, 1), xlim=(-0.5, len(rates) + 0.1), yticks=(0, 0.5, 1), yticklabels=("0", "50%", "100%"))
    axes.set_xticks(range(len(rates)), [f"{float(rate):.0e}".replace("e-0", "e-") for rate in rates])
    axes.set_xlabel("learning rate", color=INK)
    heading = "readable digits when redness\nfirst passes 0.5 (five new seeds)"
    axes.set_title(heading, color=INK)
    for (name, color), height in zip(COLORS.items(), (0.92, 0.82), strict=True):
        axes.text(-0.45, height, name, color=color, weight="bold")
    axes.text(
        len(rates) + 0.09,
        0.035,
        "×: not reached",
        color=MUTED,
        ha="right",
        va="center",
    )
    plain(axes, colors=INK)
    return figure


def rollouts() -> Figure:
    """Draw the table that sections 1 and 2 fill in, computed from rewards and ratios."""
    figure, axes = diagram(6, 5.6)
    title(axes, 0.1, 5.38, "Four rollouts, from reward to gradient")
    names = ("reward r", "advantage A", "ratio ρ", "−A ρ", "−A clip(ρ)", "loss", "gradient")
    heights = {name: 4.4 - 0.45 * row - 0.06 * (row > 4) for row, name in enumerate(names)}
    note(axes, 0.1, 5.02, "rollout")
    for name, y in heights.items():
        label(axes, 0.1, y + 0.2, name, weight="bold", align="left")
    note(axes, 0.1, 0.98, "what it\nmeans")
    for column, (reward, ratio, verdict) in enumerate(zip(REWARDS, RATIOS, VERDICTS, strict=True)):
        x = 1.5 + 1.12 * column
        advantage = (reward - mean(REWARDS)) / pstdev(REWARDS)
        unclipped = -advantage * ratio
        clipped = -advantage * min(max(ratio, 1 - CLIP_RANGE), 1 + CLIP_RANGE)
        is_dead, color = clipped > unclipped, GREEN if advantage > 0 else ORANGE
        gradient = ("0", "none", INK) if is_dead else (signed(unclipped), PURPLE, "white")
        note(axes, x + 0.5, 5.02, str(column + 1), align="center")
        cells = {
            "reward r": (f"{reward:.0f}", "none", INK),
            "advantage A": (signed(advantage, 1), color, "white"),
            "ratio ρ": (f"{ratio:.1f}", BLUE, "white"),
            "−A ρ": (signed(unclipped), "none" if is_dead else "#dfe8f5", INK),
            "−A clip(ρ)": (signed(clipped), "#dfe8f5" if is_dead else "none", INK),
            "loss": (signed(max(unclipped, clipped)), PURPLE, "white"),
            "gradient": gradient,
        }
        for name, (text, fill, ink) in cells.items():
            box(axes, x, heights[name], 1.0, 0.4, text, color=fill, ink=ink)
        note(axes, x + 0.5, 0.98, verdict, 12, align="center")
    note(axes, 0.1, 0.45, "Clip range 0.2; the loss is the larger of the two above.", 12.5)
    note(axes, 0.1, 0.18, "The gradient is that with respect to the log-probability.", 12.5)
    return figure


def stages() -> Figure:
    """Draw one epoch of DDPO as the seven stages that the loop of section 4 marks."""
    figure, axes = diagram(6, 5.75)
    title(axes, 0.1, 5.52, "One epoch of DDPO in seven stages")
    _stage(axes, 0.1, 4.2, "1  sample", "images, actions and\ntheir log-probs, kept", BLUE)
    _stage(axes, 0.1, 2.9, "2  reward", "one number\nper image", GREEN)
    _stage(axes, 0.1, 1.6, "3  advantages", "rewards in standard\ndeviations", GREEN)
    _stage(axes, 0.1, 0.3, "4  shuffle", "(sample, timestep)\npairs, minibatches", BLUE)
    _stage(axes, 3.1, 0.3, "5  replay", "log-probs of the same\nactions, with gradient", PURPLE)
    _stage(axes, 3.1, 1.6, "6  clipped loss", "ratio to the kept\nlog-probs, clipped", PURPLE)
    _stage(axes, 3.1, 2.9, "7  optimizer step", "gradient, clipped by\nnorm; new weights", PURPLE)
    for top in (4.2, 2.9, 1.6):
        arrow(axes, (1.2, top), (1.2, top - 0.35))
    arrow(axes, (2.3, 0.77), (3.1, 0.77))
    for bottom in (1.25, 2.55):
        arrow(axes, (4.2, bottom), (4.2, bottom + 0.35))
    # Back to the next minibatch, to the next inner epoch, and to the next epoch.
    turned = {"rotation": 90, "ha": "center", "va": "center", "color": MUTED}
    axes.plot([5.3, 5.48, 5.48], [3.2, 3.2, 0.77], color=MUTED, linewidth=1.3)
    arrow(axes, (5.48, 0.77), (5.3, 0.77), ink=MUTED)
    axes.text(5.72, 2.1, "next minibatch (ρ is 1 only in the first)", **turned)
    axes.plot([3.1, 2.88, 2.88], [3.2, 3.2, 1.0], color=MUTED, linewidth=1.3)
    arrow(axes, (2.88, 1.0), (2.3, 1.0), ink=MUTED)
    axes.text(2.63, 2.1, "next inner epoch", **turned)
    axes.plot([4.2, 4.2], [3.85, 4.5], color=MUTED, linewidth=1.3)
    arrow(axes, (4.2, 4.5), (2.3, 4.5), ink=MUTED)
    note(axes, 2.5, 4.98, "next epoch:")
    note(axes, 2.5, 4.7, "the new policy samples")
    return figure


def _stage(axes: Axes, x: float, y: float, name: str, text: str, color: str) -> None:
    width, height = 2.2, 0.95
    box(axes, x, y, width, height, color=color)
    label(axes, x + width / 2, y + height - 0.22, name, ink="white", weight="bold")
    label(axes, x + width / 2, y + 0.33, text, ink="white", size=12.5)


if __name__ == "__main__":
    drawn = {"04-clipping": clipping, "04-answer": answer, "04-seeds": seeds}
    main({**drawn, "04-rollouts": rollouts, "04-stages": stages})
