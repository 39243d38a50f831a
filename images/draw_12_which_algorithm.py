"""Figures of lesson 12: the comparison on equal terms, its pictures, and the guide.

The numbers are those of `python -m benchmarks.results.equal_terms`.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from plots import BENCHMARKS, mean_and_paths, of_seeds, panels, plain, read_rows, where
from style import INK, MUTED, PALETTE, arrow, box, diagram, label, main

from ddpo_lessons.lessons.demo import TEST
from ddpo_lessons.worlds.animals import draw_edits

RESULTS = BENCHMARKS / "results"
SHOWN = 8
STYLES = {  # one colour for a kind of method: log-probs, the forward process, the slope
    "DDPO": (PALETTE[0], "-"),
    "branching": (PALETTE[3], "-"),
    "Flow-GRPO": (PALETTE[0], "--"),
    "Flow-GRPO, window": (PALETTE[0], "-."),
    "Flow-GRPO, CPS in a window": (PALETTE[0], ":"),
    "RWR": (PALETTE[2], "-"),
    "AWM": (PALETTE[2], "--"),
    "AWM, visited states": (PALETTE[5], "--"),
    "DiffusionNFT": (PALETTE[2], ":"),
    "PEPG": (PALETTE[4], "-"),
    "online DPO": (PALETTE[2], "-."),
    "DRaFT": (PALETTE[1], "-"),
    "ReFL": (PALETTE[1], "--"),
}
TITLES = {
    "taste": "taste, animals from noise",
    "prompts": "prompts, digits from noise",
    "edit": "edit, animals out of confetti",
}
MEASURES = {"judge": "the judge finds what was asked for (%)", "diversity": "diversity"}
SCALES = {"judge": 100.0, "diversity": 1.0}
WITHOUT = {  # a part of the setting's name: marker and name
    "as the runs begin": ("o", "untrained"),
    "best of": ("x", "best of 2, 4, 8"),
    "handwriting": ("s", "handwriting"),
    "a program": ("P", "a program"),
    "": ("D", "a sentence or setting"),
}


def plane(*shown: tuple[str, str]) -> Figure:
    """Draw reward against what training does not see, along training, one panel for each (task, measure)."""
    rows, untrained = (read_rows(f"results/equal_terms{end}.csv") for end in ("", "_untrained"))
    figure, grid = panels(len(shown), (4.4 * len(shown), 5.4))
    found = dict[str, Artist]()
    for axes, (task, column) in zip(grid, shown, strict=True):
        for method, (color, style) in STYLES.items():
            seeds = of_seeds(where(rows, task=task, method=method), "reward", column)
            if len(seeds) == 3:
                paths = [path * (1, SCALES[column]) for path in seeds]
                look = {"label": method, "linewidth": 1.9, "linestyle": style, "marker": "o"}
                mean_and_paths(axes, paths, color, markersize=3.5, **look)
        _points(axes, where(untrained, task=task), column)
        plain(axes, colors=MUTED, labelsize=9)
        axes.set_title(f"{TITLES[task]}\n{MEASURES[column]}", fontsize=11, color=INK)
        axes.set_xlabel("reward of test questions", color=INK)
        found |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [*(name for name in STYLES if name in found), *(name for name in found if name not in STYLES)]
    legend = figure.legend(
        [found[name] for name in names], names, loc="outside lower center", ncols=2 * len(shown),
        frameon=False, fontsize=9, handlelength=3,
    )  # fmt: skip
    for line in legend.get_lines():
        if line.get_linestyle() != "None":
            line.set_marker("")  # a dot would hide how the line is dashed
    return figure


def _points(axes: Axes, rows: list[dict[str, str]], column: str) -> None:
    """Draw what there is without training."""
    for row in rows:
        kind = next(kind for kind in WITHOUT if kind in row["setting"])
        marker, name = WITHOUT[kind]
        x, y = float(row["reward"]), SCALES[column] * float(row[column])
        axes.plot(x, y, marker, color=INK, markersize=7, label=name, linestyle="none", zorder=3)


def pictures(task: str, judged: str) -> Figure:
    """Draw the first test pictures of seed 0 where its run ended, from the same noise, least reward first."""
    rows = where(read_rows("results/equal_terms.csv"), task=task, seed="0")
    length = max(int(row["queries"]) for row in rows)
    ends = {row["method"]: row for row in rows if int(row["queries"]) == length}
    strips = dict[str, tuple[np.ndarray, str]]()
    if task == "edit":
        inputs = draw_edits(200, TEST).images[:SHOWN]  # (8, 3, 64, 64), of the whole exam
        strips["what goes in"] = np.concatenate(list(inputs.permute(0, 2, 3, 1).numpy()), axis=1), ""
    for method in sorted(ends, key=lambda method: float(ends[method]["reward"])):
        file = RESULTS / "equal_terms" / f"{task}_{method.replace(',', '').replace(' ', '_')}.png"
        shown = np.asarray(Image.open(file))[-64:]  # the lowest row: the run's end
        row = ends[method]
        strips[method] = shown, f"reward {float(row['reward']):.2f}, {judged} {float(row['judge']):.0%}"
    width, height, left = 7.6, 0.95, 2.3
    figure, axes = diagram(left + width + 0.1, 0.1 + (height + 0.06) * len(strips))
    for n, (name, (shown, said)) in enumerate(reversed(strips.items())):
        bottom = 0.05 + (height + 0.06) * n
        axes.imshow(shown, extent=(left, left + width, bottom, bottom + height), interpolation="none")
        label(axes, left - 0.12, bottom + 0.62 * height, name, size=11, align="right", weight="bold")
        label(axes, left - 0.12, bottom + 0.28 * height, said, size=9.5, align="right", ink=MUTED)
    axes.set(xlim=(0, left + width + 0.1), ylim=(0, 0.1 + (height + 0.06) * len(strips)))
    return figure


QUESTIONS = (  # question, what to do if the answer is yes
    ("Does a sentence, a setting or the\nbest of a few pictures do?", "do not train"),
    ("Have you pairs of what goes in\nand what should come out?", "train on the pairs"),
    ("Has the reward a slope\nthat you trust?", "ReFL or DRaFT; for a taste\ntry the last answer, too"),
    ("Is it an edit of pictures?", "branching, over many queries"),
    ("Otherwise", "AWM, PEPG or NFT;\nlook at a judge often"),
)


def guide() -> Figure:
    """Draw the questions from top to bottom, each with its way out."""
    height = 0.98
    figure, axes = diagram(8.2, height * len(QUESTIONS) + 0.1)
    for n, (question, answer) in enumerate(QUESTIONS):
        bottom = height * (len(QUESTIONS) - 1 - n) + 0.15
        box(axes, 0.1, bottom, 4.0, 0.7, question, size=10)
        box(axes, 5.0, bottom, 3.1, 0.7, answer, color=PALETTE[n % len(PALETTE)], size=10)
        arrow(axes, (4.1, bottom + 0.35), (5.0, bottom + 0.35))
        if n < len(QUESTIONS) - 1:
            label(axes, 4.55, bottom + 0.47, "yes", size=8.5, ink=MUTED)
            arrow(axes, (2.1, bottom), (2.1, bottom - 0.28))
            label(axes, 2.32, bottom - 0.13, "no", size=8.5, ink=MUTED)
    return figure


if __name__ == "__main__":
    figures: dict[str, Callable[[], Figure]] = {"12-guide": guide}
    figures["12-plane"] = partial(plane, ("taste", "judge"), ("taste", "diversity"), ("edit", "judge"))
    figures["12-prompts"] = partial(plane, ("prompts", "judge"), ("prompts", "diversity"))
    figures["12-pictures"] = partial(pictures, "taste", "animals")
    figures["12-edits"] = partial(pictures, "edit", "all right")
    main(figures)
