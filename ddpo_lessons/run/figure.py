"""The figure of one or several runs, drawn from what their folders hold.

Import this module where a figure is drawn, because it loads matplotlib; it leaves pyplot alone.
"""

import io
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from PIL import Image

from ddpo_lessons.data.images import grid_columns
from ddpo_lessons.run.runlog import METRICS, read_metrics

PIXELS, DPI = 900, 125  # of the width, and per inch: letters that a phone still shows
STYLE: list[Any] = [
    "default",
    "ddpo_lessons.lesson",
    {"figure.constrained_layout.use": False, "axes.titlesize": 10},
]
TILES = 4  # columns and rows of a grid of images that are shown
REWARD, RATIO = "reward_mean", "max_ratio_error"
TITLES = {  # of the panels below those of the reward and its terms
    RATIO: "largest |ratio − 1| (dashed: first step)",
    "clip_fraction": "fraction of ratios that are clipped",
    "approx_kl": "KL to the policy that sampled",
    "kl_reference": "KL to the policy before training",
}
DASHED = {REWARD: "validation_reward", RATIO: "first_replay_max_ratio_error"}  # in the same panel
BANDS = (("reward_q25", "reward_q75"), ("reward_q05", "reward_q95"))

Columns = dict[str, dict[int, float]]  # of each key of the records, the value of each epoch


class RunFigure(Figure):
    """A figure that notebooks show as the last expression of a cell, also before pyplot is imported."""

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.savefig(image, format="png", facecolor="auto")
        return image.getvalue()


def plot_run(*folders: str | Path) -> Figure:
    """Draw the records of one or several runs over their epochs, and of one run its images.

    The panels show the reward (mean, quantiles, validation), the mean of each reward term, the error of
    the ratio, the clip fraction and the KL; what no run has recorded is left out. Each run has one color.
    A run may still be going on. Raises ValueError if a folder is not that of a run, or a record is damaged.

        plot_run("runs/edit")  # the last expression of a notebook's cell: shows the figure
        plot_run("runs/a", "runs/b").savefig("both.png")
    """
    if not folders:
        raise ValueError("plot_run needs the folder of a run, such as plot_run('runs/edit')")
    runs = [_read(Path(folder)) for folder in folders]
    grids = _first_and_latest(Path(folders[0])) if len(folders) == 1 else {}
    with style.context(STYLE):
        figure, axes = _lay_out(_panels(runs), grids, len(runs))
        colors = _colors(len(runs))
        last = max((epoch for run in runs for column in run.values() for epoch in column), default=1)
        for key, axis in axes.items():
            for run, color in zip(runs, colors, strict=True):
                _draw(axis, run, key, color, BANDS[: 1 if len(runs) > 1 else 2])
            axis.set_xlim(min(axis.dataLim.x0, 1) - 0.5, last + 0.5)
            if key in TITLES:
                axis.set_ylim(bottom=0)
        axes[REWARD].set_title(_reward_title(runs), y=1.03)
        _legend(figure, [Path(folder) for folder in folders], runs, colors)
    return figure


def write(path: Path, *folders: str | Path) -> None:
    """Write the figure of runs into a file, whose ending is its format; it replaces an older one at once."""
    aside = path.with_name(f".{path.name}.new")
    plot_run(*folders).savefig(aside, format=path.suffix[1:] or "png", facecolor="auto")
    aside.replace(path)


# ------------------------------------------------------------------------------------------ records
def _read(folder: Path) -> Columns:
    """Read the records: of an epoch's optimizer steps the mean, or the maximum if a key begins with max."""
    if not (folder / METRICS).is_file():
        raise ValueError(f"{folder} holds no {METRICS}: give the folder of a run that has begun")
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in read_metrics(folder):
        if record["kind"] in ("step", "epoch", "validation"):
            for key, value in record.items():
                if value is None or isinstance(value, int | float):
                    found[key][record["epoch"]].append(math.nan if value is None else value)
    return {
        key: {epoch: _summary(key, values) for epoch, values in column.items()}
        for key, column in found.items()
    }


def _summary(key: str, values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan
    return max(finite) if key.startswith("max") else statistics.fmean(finite)


def _has(runs: Sequence[Columns], key: str) -> bool:
    return any(math.isfinite(value) for run in runs for value in run.get(key, {}).values())


def _panels(runs: Sequence[Columns]) -> list[str]:
    terms = dict.fromkeys(key for run in runs for key in run if key.startswith("reward/"))
    return [REWARD, *(key for key in (*terms, *TITLES) if _has(runs, key))]


# ------------------------------------------------------------------------------------------- images
def _first_and_latest(folder: Path) -> dict[str, Image.Image]:
    """Return the first and the latest grid with a title; of validation if there are any."""
    for kind, name in (("validation", "validation images"), ("epoch", "images")):
        found = sorted(path for path in folder.glob(f"images/{kind}-*") if path.suffix in (".png", ".jpg"))
        if found:
            ends = dict.fromkeys((found[0], found[-1]))
            return {f"{name} of epoch {int(path.stem.split('-')[-1])}": _tiles(path) for path in ends}
    return {}


def _tiles(path: Path) -> Image.Image:
    """Read the upper left tiles of a grid; a grid without captions is shown as it is."""
    captions = path.with_suffix(".json")
    with Image.open(path) as grid:
        grid.draft("RGB", (PIXELS, 1))  # a JPEG of photographs is decoded at this width
        width, height = grid.size
        if captions.is_file():
            count = len(json.loads(captions.read_text(encoding="utf-8")))
            columns = grid_columns(count)
            rows = -(-count // columns)
            width, height = width * min(TILES, columns) // columns, height * min(TILES, rows) // rows
        return grid.crop((0, 0, width, height))


# ------------------------------------------------------------------------------------------ drawing
def _lay_out(
    panels: Sequence[str], grids: dict[str, Image.Image], lines: int
) -> tuple[RunFigure, dict[str, Axes]]:
    """Make the figure with its images; return the axes of the panels: the reward, then two in a row."""
    first, *others = panels
    pairs = [others[n : n + 2] for n in range(0, len(others), 2)]
    rows: Any = [[first, first], *([pair[0], pair[-1]] for pair in pairs)]  # the last may fill its row
    heights = [1.5] * len(rows)
    if grids:
        rows.append([*grids, "."][:2])
        heights.append(max(2.85 * grid.height / grid.width for grid in grids.values()))
    gap, head = 0.75, 0.5 + 0.2 * lines
    height = sum(heights) + gap * (len(rows) - 1) + head + 0.55
    figure = RunFigure(figsize=(PIXELS / DPI, height), dpi=DPI)
    place = {"left": 0.09, "right": 0.98, "top": 1 - head / height, "bottom": 0.55 / height}
    place |= {"hspace": gap * len(rows) / sum(heights), "wspace": 0.25}
    axes: dict[str, Axes] = figure.subplot_mosaic(rows, height_ratios=heights, gridspec_kw=place)
    for title, grid in grids.items():
        axis = axes.pop(title)
        axis.imshow(grid)
        axis.set(xticks=[], yticks=[], title=title, anchor="N")
        axis.spines[:].set_visible(False)
    for key, axis in axes.items():
        # A place of its own for every text: to look for places that are free takes half of the time.
        axis.set_title(TITLES.get(key, key), y=1.03, parse_math=False)
        axis.set_xlabel("epoch")
        axis.xaxis.set_label_coords(0.5, -0.17)
        axis.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        if key == RATIO:
            axis.set_yscale("symlog", linthresh=1e-7)
        axis.yaxis.set_major_formatter("{x:.4g}")
        axis.grid(alpha=0.25)
    return figure, axes


def _draw(axis: Axes, run: Columns, key: str, color: str, bands: Sequence[tuple[str, str]]) -> None:
    """Draw the curves of a run in a panel; each has its key as its label."""
    for name, look in ((key, ".-"), (DASHED.get(key, ""), "o--")):
        if name in run:
            x, y = list(run[name]), list(run[name].values())
            axis.plot(x, y, look, color=color, label=name, linewidth=1.5, markersize=4, clip_on=False)
    for low, high in bands if key == REWARD else ():
        if low in run and high in run:
            bottom, top = ([run[name].get(epoch, math.nan) for epoch in run[key]] for name in (low, high))
            axis.fill_between(list(run[key]), bottom, top, color=color, alpha=0.15, linewidth=0, label=low)


def _reward_title(runs: Sequence[Columns]) -> str:
    parts = ["reward (line: mean"]
    if _has(runs, BANDS[0][0]):
        parts.append("band: middle 50%" if len(runs) > 1 else "bands: middle 50% and 90%")
    if _has(runs, DASHED[REWARD]):
        parts.append("dashed: validation")
    return ", ".join(parts) + ")"


def _colors(count: int) -> list[str]:
    palette = list(matplotlib.rcParams["axes.prop_cycle"].by_key()["color"])
    if count <= len(palette):
        return palette[:count]
    return [matplotlib.colors.to_hex(matplotlib.colormaps["turbo"](n / (count - 1))) for n in range(count)]


def _legend(figure: Figure, folders: Sequence[Path], runs: Sequence[Columns], colors: Sequence[str]) -> None:
    """Name the runs by their folders, and by their paths where two folders have one name."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    handles = [Line2D([], [], color=color, linewidth=3) for color in colors]
    legend = figure.legend(handles, ["run"] * len(names), loc="upper left", fontsize=10)
    for text, name, run in zip(legend.get_texts(), names, runs, strict=True):
        epochs = max(run.get(REWARD, ()), default=0)
        shown = name if len(name) < 70 else f"…{name[-69:]}"
        text.set(text=f"{shown} (epoch {epochs})", parse_math=False)  # not as a label: names may begin with _
