"""Figures of lesson 12: the comparison on equal terms, its images, and the guide.

The numbers come from `python -m benchmarks.results.equal_terms`.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from plots import BENCHMARKS, Row, image_rows, minus, panels, plain, read_rows, where
from style import INK, MUTED, PALETTE, arrow, box, diagram, main, note

from ddpo_lessons.lessons.demo import TEST
from ddpo_lessons.worlds.animals import draw_edits

RESULTS = BENCHMARKS / "results"
SHOWN = 8
KINDS = {  # one color for a kind of method
    "log-probs of recorded actions": (PALETTE[0], ("DDPO", "branching")),
    "finished samples, re-noised": (
        PALETTE[2],
        ("RWR", "AWM", "AWM, visited states", "DiffusionNFT", "PEPG", "online DPO"),
    ),
    "gradient of the reward": (PALETTE[1], ("DRaFT", "ReFL")),
}
TITLES = {
    "preference": "animals from noise: reward on test images",
    "edit": "edits in confetti: correct test images (%)",
}
LIMITS = {"preference": (-0.4, 4.0), "edit": (0, 85)}
COLUMNS = {"preference": ("reward", 1.0), "edit": ("judge", 100.0)}
WITHOUT = {  # a part of the name of what one gets without training
    "as the runs begin": ("untrained", ":"),
    "best-of-8": ("best-of-8", "--"),
    "guidance": ("best sampling\nsetting", "-."),
    '"': ("best prompt", "-"),
}


def at_the_end(task: str) -> dict[str, list[Row]]:
    """Return the rows of equal_terms.csv at the chosen lengths, by method, without the details."""
    rows = where(read_rows("results/equal_terms.csv"), task=task)
    known = [method for _, methods in KINDS.values() for method in methods]
    found = {method: where(rows, method=method) for method in known}
    return {
        method: [row for row in own if row["evaluations"] == row["length"]]
        for method, own in found.items()
        if own
    }


def results() -> Figure:
    """Draw every seed of every method as a dot, its mean as a bar, and lines of what is there untrained."""
    figure, grid = panels(2, (6, 6.4), stacked=True, height_ratios=(9, 4.4))
    for axes, (task, (column, scale)) in zip(grid, COLUMNS.items(), strict=True):
        _dots(axes, at_the_end(task), column, scale)
        for row in where(read_rows("results/equal_terms_untrained.csv"), task=task):
            for part, (name, style) in WITHOUT.items():
                if part in row["setting"]:
                    x = scale * float(row[column])
                    axes.axvline(x, color=INK, linestyle=style, linewidth=1.3, zorder=1)
                    place = axes.get_xaxis_transform()  # y in heights of the panel
                    axes.text(x, 1.02, name, transform=place, color=INK, ha="center", va="bottom")
        axes.set_title(TITLES[task], color=INK, pad=24 if task == "preference" else 40)
        axes.set_xlim(LIMITS[task])
    marks = {"marker": "o", "linestyle": "none", "markersize": 8}
    key = [Line2D([], [], color=color, label=kind, **marks) for kind, (color, _) in KINDS.items()]
    figure.legend(handles=key, frameon=False, loc="outside lower left", title="color: what the method uses")
    return figure


def _dots(axes: Axes, ends: dict[str, list[Row]], column: str, scale: float) -> None:
    """Draw a row for each method, the best mean at the top."""
    values = {method: scale * np.array([float(row[column]) for row in rows]) for method, rows in ends.items()}
    order = sorted(values, key=lambda method: values[method].mean())
    for n, method in enumerate(order):
        color = next(color for color, methods in KINDS.values() if method in methods)
        axes.plot(values[method], np.full(len(values[method]), n), "o", color=color, markersize=5, alpha=0.55)
        axes.plot(values[method].mean(), n, "|", color=color, markersize=15, markeredgewidth=3)
    plain(axes, colors=MUTED)
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.set_yticks(range(len(order)), order, color=INK)


def images(task: str, judged: str) -> Figure:
    """Draw the first test images of the first seed at its end, from the same noise, least reward first."""
    ends = {method: rows[0] for method, rows in at_the_end(task).items() if rows[0]["length"] != "0"}
    lines = list[tuple[str, str, np.ndarray]]()
    if task == "edit":
        inputs = draw_edits(200, TEST).images[:SHOWN]  # (8, 3, 64, 64), of the whole test set
        lines.append(("input image", "", np.concatenate(list(inputs.permute(0, 2, 3, 1).numpy()), axis=1)))
    for method in sorted(ends, key=lambda method: float(ends[method]["reward"])):
        name = "".join(letter if letter.isalnum() else "_" for letter in f"{task}_{method}")
        shown, row = np.asarray(Image.open(RESULTS / "equal_terms" / f"{name}.png")), ends[method]
        text = f"reward {float(row['reward']):.2f}, {judged} {float(row['judge']):.0%}"
        lines.append((method, minus(text), shown))
    return image_rows(lines)


QUESTIONS = (  # question, what to do if the answer is yes
    ("Is a prompt, a sampling setting\nor best-of-n good enough?", "do not train"),
    ("Do you have pairs of input and\nwanted output?", "train on the pairs"),
    ("Is the reward differentiable,\nand do you trust its gradient?", "ReFL or DRaFT"),
    ("Do you edit images (img2img)?", "branching or DDPO,\nin small epochs"),
    ("Otherwise", "online DPO or\nbranching;\nwith several seeds"),
)


def guide() -> Figure:
    """Draw the questions from top to bottom, each with its way out."""
    height = 1.12
    figure, axes = diagram(6, height * len(QUESTIONS) - 0.1)
    for n, (question, answer) in enumerate(QUESTIONS):
        bottom = height * (len(QUESTIONS) - 1 - n) + 0.1
        box(axes, 0.1, bottom, 3.15, 0.8, question)
        box(axes, 3.85, bottom, 2.05, 0.8, answer, color=PALETTE[n % len(PALETTE)])
        arrow(axes, (3.25, bottom + 0.4), (3.85, bottom + 0.4))
        if n < len(QUESTIONS) - 1:
            note(axes, 3.53, bottom + 0.55, "yes", align="center")
            arrow(axes, (1.6, bottom), (1.6, bottom - 0.32))
            note(axes, 1.75, bottom - 0.16, "no")
    return figure


if __name__ == "__main__":
    figures: dict[str, Callable[[], Figure]] = {"12-guide": guide, "12-results": results}
    figures["12-pictures"] = partial(images, "preference", "animals")
    figures["12-edits"] = partial(images, "edit", "correct")
    main(figures)
