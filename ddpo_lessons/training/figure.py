"""Plot one or several runs from the records in their folders, without pyplot."""

from __future__ import annotations

import functools
import io
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from ddpo_lessons.image import grid_columns
from ddpo_lessons.training.runlog import INPUT, METRICS, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXELS, DPI = 900, 125  # of the width, and per inch: letters that a phone still shows
# The same figure whatever the user has set; the place of titles is given, for to find it takes time.
STYLE: list[Any] = ["default", "ddpo_lessons.lessons.lesson", {"axes.titley": 1.03}]
TILES = 4  # columns and rows of a grid of images that are shown
REWARD, RATIO = "reward_mean", "max_ratio_error"
TITLES = {  # of the panels below those of the reward and its terms
    RATIO: "largest |ratio − 1| (dashed: first step)",
    "clip_fraction": "fraction outside the clip range",
    "approx_kl": "KL to the policy that sampled",
    "kl_reference": "KL to the policy before training",
}
DASHED = {REWARD: "validation_reward", RATIO: "first_replay_max_ratio_error"}  # in the same panel
STEPS = "optimizer_steps"  # of an epoch
BANDS = (("reward_q25", "reward_q75"), ("reward_q05", "reward_q95"))

Columns = dict[str, dict[int, float]]  # of each key of the records, the value of each epoch


def plot_run(*folders: str | Path) -> Figure:
    """Plot the records of one or several runs over their epochs, and for a single run its images.

    The panels show the reward (mean, quantiles, validation), the mean of each reward term, the error of the
    ratio, the clip fraction and the KL, as far as they were recorded. Each run has one color. A run need not
    be finished. Raises ValueError if a folder is not that of a run, or a record is damaged.

        plot_run("runs/edit")  # as the last expression of a cell: shows the figure
        plot_run("runs/a", "runs/b").savefig("both.png")
    """
    if not folders:
        raise ValueError("plot_run needs the folder of a run, such as plot_run('runs/edit')")
    from matplotlib import style

    paths = [Path(folder) for folder in folders]
    runs = [_read(path) for path in paths]
    grids = _first_and_latest(paths[0]) if len(runs) == 1 else {}
    terms = dict.fromkeys(key for run in runs for key in run if key.startswith("reward/"))
    with style.context(STYLE):
        figure, axes = _lay_out([key for key in (*terms, *TITLES) if _has(runs, key)], grids, len(runs))
        colors = _colors(len(runs))
        bands = BANDS[: max(0, 3 - len(runs))]  # those of many runs would hide each other
        last = max((epoch for run in runs for column in run.values() for epoch in column), default=1)
        for key, axis in axes.items():
            for run, color in zip(runs, colors, strict=True):
                _draw(axis, run, key, color, bands)
            axis.set_xlim(min(axis.dataLim.x0, 1) - 0.5, last + 0.5)
            if key in TITLES:
                axis.set_ylim(bottom=0)
                _explain_zeros(axis, runs, key)
        axes[REWARD].set_title(_reward_title(runs, len(bands)))
        _legend(figure, paths, runs, colors)
    figure._repr_png_ = functools.partial(_png, figure)  # a notebook shows it, also without pyplot
    return figure


def _png(figure: Figure) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png", facecolor="auto")
    return image.getvalue()


def write(path: Path, *folders: str | Path) -> None:
    """Write the figure of runs to a file, whose ending sets the format; replace an older file at once."""
    aside = path.with_name(f".{path.name}.part")
    try:
        plot_run(*folders).savefig(aside, format=path.suffix[1:] or "png", facecolor="auto")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------ records
def _read(folder: Path) -> Columns:
    """Read the records, with the mean (or for max_ keys the maximum) of an epoch's optimizer steps."""
    if not (folder / METRICS).is_file():
        raise ValueError(f"{folder} holds no {METRICS}: give the folder of a run that has begun")
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in read_metrics(folder):
        if record["kind"] in ("step", "epoch", "validation"):
            for key, value in record.items():
                if value is None or isinstance(value, int | float):
                    found[key][record["epoch"]].append(math.nan if value is None else value)
    steps = {STEPS: {epoch: float(len(values)) for epoch, values in found.get("loss", {}).items()}}
    return steps | {
        key: {n: _summary(key, values) for n, values in column.items()} for key, column in found.items()
    }


def _summary(key: str, values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    return max(finite) if key.startswith("max") else statistics.fmean(finite)


def _has(runs: Sequence[Columns], key: str) -> bool:
    return any(math.isfinite(value) for run in runs for value in run.get(key, {}).values())


# ------------------------------------------------------------------------------------------- images
def _first_and_latest(folder: Path) -> dict[str, Image.Image]:
    """Return the first and the latest grid with titles, preferably of validation."""
    for kind, name in (("validation", "validation images"), ("epoch", "images")):
        found = sorted(path for path in folder.glob(f"images/{kind}-*") if path.suffix in (".png", ".jpg"))
        if found:
            ends = dict.fromkeys((found[0], found[-1]))
            return {_grid_title(name, path): _tiles(path) for path in ends}
    return {}


def _captions(path: Path) -> list[str]:
    """Read the captions of a grid's images; return none if they were not written."""
    file = path.with_suffix(".json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []


def _grid_title(name: str, path: Path) -> str:
    """Name the epoch of a grid, and what its pairs of images are."""
    epoch = int(path.stem.split("-")[-1])
    if _captions(path)[:1] == [INPUT]:
        return f"{name.removesuffix(' images')} of epoch {epoch} (input, result)"
    return f"{name} of epoch {epoch}"


def _tiles(path: Path) -> Image.Image:
    """Read the upper left tiles of a grid; return a grid without captions as it is."""
    captions = _captions(path)
    with Image.open(path) as grid:
        grid.draft("RGB", (PIXELS, 1))  # a JPEG of photographs is decoded at this width
        width, height = grid.size
        if captions:
            columns = grid_columns(len(captions))
            rows = -(-len(captions) // columns)
            width, height = width * min(TILES, columns) // columns, height * min(TILES, rows) // rows
        return grid.crop((0, 0, width, height))


# ------------------------------------------------------------------------------------------ drawing
def _lay_out(keys: Sequence[str], grids: dict[str, Image.Image], lines: int) -> tuple[Any, dict[str, Axes]]:
    """Make the figure with its images; return the axes, with the reward on top and two per row below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    pairs = [keys[n : n + 2] for n in range(0, len(keys), 2)]
    rows: Any = [[REWARD, REWARD], *([pair[0], pair[-1]] for pair in pairs)]  # the last may fill its row
    heights, gap, head, foot = [1.5] * len(rows), 0.75, 0.5 + 0.2 * lines, 0.55  # inches
    if grids:
        rows.append([*grids, "."][:2])
        heights.append(max(2.85 * grid.height / grid.width for grid in grids.values()))
        foot = 0.15
    height = sum(heights) + gap * (len(rows) - 1) + head + foot
    figure = Figure(figsize=(PIXELS / DPI, height), dpi=DPI)
    figure.set_layout_engine("none")
    place = {"left": 0.09, "right": 0.98, "top": 1 - head / height, "bottom": foot / height}
    place |= {"hspace": gap * len(rows) / sum(heights), "wspace": 0.25}
    axes: dict[str, Axes] = figure.subplot_mosaic(rows, height_ratios=heights, gridspec_kw=place)
    for title, grid in grids.items():
        axis = axes.pop(title)
        axis.imshow(grid)
        axis.set(xticks=[], yticks=[], title=title, anchor="N")
        axis.spines[:].set_visible(False)
    for key, axis in axes.items():
        # The places of title (in STYLE) and label are given: to find them takes half of the time.
        axis.set_title(TITLES.get(key, key), parse_math=False)
        axis.set_xlabel("epoch")
        axis.xaxis.set_label_coords(0.5, -0.17)
        axis.xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
        axis.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        if key == RATIO:
            axis.set_yscale("symlog", linthresh=1e-7)
        axis.yaxis.set_major_formatter("{x:.4g}")
        axis.grid(alpha=0.25)
    return figure, axes


def _draw(axis: Axes, run: Columns, key: str, color: str, bands: Sequence[tuple[str, str]]) -> None:
    """Plot the curves of a run in a panel, labeled with their keys."""
    for name, look, hollow in ((key, ".-", color), (DASHED.get(key, ""), "o--", axis.get_facecolor())):
        if name in run:
            x, y = list(run[name]), list(run[name].values())
            width, size = (1.5, 4) if len(x) <= 50 else (0.8, 1)
            axis.plot(x, y, look, color=color, label=name, lw=width, ms=size, mfc=hollow, clip_on=False)
    for low, high in bands if key == REWARD else ():
        if low in run and high in run:
            bottom, top = ([run[name].get(epoch, math.nan) for epoch in run[key]] for name in (low, high))
            axis.fill_between(list(run[key]), bottom, top, color=color, alpha=0.15, lw=0, label=low)


def _explain_zeros(axis: Axes, runs: Sequence[Columns], key: str) -> None:
    """Write the reason into a panel that is 0 because the epochs have one optimizer step each."""
    values = [value for run in runs for value in run.get(key, {}).values()]
    steps = {count for run in runs for count in run[STEPS].values()}
    if key != "kl_reference" and not any(values) and steps == {1}:
        axis.text(
            0.5, 0.5, "0, because an epoch has\none optimizer step", ha="center", va="center",
            transform=axis.transAxes,
        )  # fmt: skip


def _reward_title(runs: Sequence[Columns], bands: int) -> str:
    parts = ["reward (line: mean"]
    if bands and _has(runs, BANDS[0][0]):
        parts.append("band: middle 50%" if bands == 1 else "bands: middle 50% and 90%")
    if _has(runs, DASHED[REWARD]):
        parts.append("dashed: validation")
    return ", ".join(parts) + ")"


def _colors(count: int) -> list[str]:
    import matplotlib
    from matplotlib.colors import to_hex

    palette = list(matplotlib.rcParams["axes.prop_cycle"].by_key()["color"])
    many = matplotlib.colormaps["turbo"].resampled(count)
    return palette[:count] if count <= len(palette) else [to_hex(many(n)) for n in range(count)]


def _legend(figure: Figure, folders: Sequence[Path], runs: Sequence[Columns], colors: Sequence[str]) -> None:
    """Label the runs with their folders, or with their paths if two folders have the same name."""
    from matplotlib.lines import Line2D

    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    handles = [Line2D([], [], color=color, linewidth=3, label="run") for color in colors]
    legend = figure.legend(handles=handles, loc="upper left")
    for text, name, run in zip(legend.get_texts(), names, runs, strict=True):
        short = name if len(name) < 70 else f"…{name[-69:]}"
        epoch = max(run.get(REWARD, ()), default=0)
        text.set(text=f"{short} (epoch {epoch})", parse_math=False)  # as a label it might not begin with _
