"""Plot one or several runs from the records in their folders, without pyplot."""

from __future__ import annotations

import functools
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ddpo_lessons.training import grids
from ddpo_lessons.training.grids import DPI
from ddpo_lessons.training.runlog import METRICS, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In pixels; at DPI pixels per inch, a phone still shows the letters.
PIXELS, LEFT, WIDTH = 900, 90, 792  # widths of the figure, of the labels beside an axis, and of the panels
LETTERS = 7  # that fit beside an axis
HEAD, LEGEND, PANEL, BELOW, TITLE, MARGIN = 62, 25, 188, 94, 34, 8  # heights
# The same figure whatever the user has set; the place of titles is given, for to find it takes time.
SIZES = {"axes.titley": 1.03, "xtick.labelsize": 9, "ytick.labelsize": 9}
STYLE: list[Any] = ["default", "ddpo_lessons.lessons.lesson", SIZES]
REWARD, RATIO = "reward_mean", "max_ratio_error"
TITLES = {  # of the panels below those of the reward and its terms
    RATIO: "largest |ratio − 1| (dashed: first step)",
    "clip_fraction": "fraction outside the clip range",
    "approx_kl": "KL to the policy that sampled",
    "kl_reference": "KL to the policy before training",
}
# In the title of the one panel of those that are 0 because an epoch has one optimizer step.
ZEROS = {RATIO: "|ratio − 1|", "clip_fraction": "clip fraction", "approx_kl": "approx. KL"}
DASHED = {REWARD: "validation_reward", RATIO: "first_replay_max_ratio_error"}  # in the same panel
STEPS = "optimizer_steps"  # of an epoch
BANDS = (("reward_q25", "reward_q75"), ("reward_q05", "reward_q95"))

Columns = dict[str, dict[int, float]]  # of each key of the records, the value of each epoch


def plot_run(*folders: str | Path) -> Figure:
    """Plot the records of one or several runs over their epochs, and for a single run some of its images.

    The panels show the reward (mean, quantiles, validation), the mean of each reward term, the error of the
    ratio, the clip fraction and the KL, as far as they were recorded. Each run has one color. Below each of
    the first and latest images are its reward and prompt. A run need not be finished. Raises ValueError if a
    folder is not that of a run, or a record is damaged.

        plot_run("runs/edit")  # as the last expression of a cell: shows the figure
        plot_run("runs/a", "runs/b").savefig("both.png")
    """
    if not folders:
        raise ValueError("plot_run needs the folder of a run, such as plot_run('runs/edit')")
    from matplotlib import style

    paths = [Path(folder) for folder in folders]
    runs = [_read(path) for path in paths]
    sheets = grids.first_and_latest(paths[0], WIDTH) if len(runs) == 1 else []
    terms = dict.fromkeys(key for run in runs for key in run if key.startswith("reward/"))
    with style.context(STYLE):
        keys = [key for key in (*terms, *TITLES) if _has(runs, key)]
        zeros = [key for key in keys if key in ZEROS and _is_always_zero(runs, key)]
        figure, axes = _lay_out([key for key in keys if key not in zeros[1:]], sheets, len(runs))
        colors = _colors(len(runs))
        bands = BANDS[: max(0, 3 - len(runs))]  # those of many runs would hide each other
        last = max((epoch for run in runs for column in run.values() for epoch in column), default=1)
        for key, axis in axes.items():
            for run, color in zip(runs, colors, strict=True):
                _draw(axis, run, key, color, bands)
            axis.set_xlim(min(axis.dataLim.x0, 1) - 0.5, last + 0.5)
            if key in TITLES:
                axis.set_ylim(bottom=0)
            if key in zeros:
                _explain_zeros(axis, zeros)
            letters = max((len(_short(tick)) for tick in axis.get_yticks()), default=0)
            if letters > LETTERS:
                axis.tick_params("y", labelsize=SIZES["ytick.labelsize"] * LETTERS / letters)
        axes[REWARD].set_title(_reward_title(runs, len(bands)))
        _legend(figure, paths, runs, colors)
    figure._repr_png_ = functools.partial(_png, figure)  # a notebook shows it, also without pyplot
    return figure


def _png(figure: Figure) -> bytes:
    """Return the figure as a PNG, drawn once; `savefig` draws everything twice, to find what sticks out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas, png = FigureCanvasAgg(figure), io.BytesIO()
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    drawn.save(png, "png", dpi=(figure.dpi, figure.dpi), compress_level=3)
    return png.getvalue()


def write(path: Path, *folders: str | Path) -> None:
    """Write the figure of runs to a file, whose ending sets the format; replace an older file at once."""
    aside = path.with_name(f".{path.name}.part")
    try:
        figure, kind = plot_run(*folders), path.suffix[1:].lower() or "png"
        if kind == "png":
            aside.write_bytes(_png(figure))
        else:
            figure.savefig(aside, format=kind, facecolor="auto")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------ records
def _read(folder: Path) -> Columns:
    """Read the records, with the mean (or for max_ keys the maximum) of an epoch's optimizer steps."""
    if not (folder / METRICS).is_file():
        below = min(folder.glob(f"*/{METRICS}"), default=None)
        such = f", such as {below.parent}" if below else ""
        raise ValueError(f"{folder} holds no {METRICS}: give the folder of a run that has begun{such}")
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


# ------------------------------------------------------------------------------------------ drawing
def _lay_out(keys: Sequence[str], sheets: Sequence[grids.Sheet], lines: int) -> tuple[Any, dict[str, Axes]]:
    """Make the figure with its images; return the axes, with the reward on top and two per row below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = [[REWARD], *(keys[n : n + 2] for n in range(0, len(keys), 2))]
    head = HEAD + LEGEND * lines
    images = sum(TITLE + sheet.image.height for sheet in sheets)
    height = head + len(rows) * (PANEL + BELOW) + images - (TITLE - MARGIN)  # the last row has no title below
    figure = Figure(figsize=(PIXELS / DPI, height / DPI), dpi=DPI)
    figure.set_layout_engine("none")

    def add(left: float, top: float, width: float, tall: float) -> Axes:
        return figure.add_axes((left / PIXELS, 1 - (top + tall) / height, width / PIXELS, tall / height))

    axes: dict[str, Axes] = {}
    for n, row in enumerate(rows):
        width = WIDTH if row == [REWARD] else (WIDTH - LEFT) / 2
        for column, key in enumerate(row):
            axes[key] = add(LEFT + column * (width + LEFT), head + n * (PANEL + BELOW), width, PANEL)
    top = head + len(rows) * (PANEL + BELOW)
    for sheet in sheets:
        axis = add(LEFT, top, sheet.image.width, sheet.image.height)
        axis.imshow(sheet.image, aspect="auto", interpolation="nearest")
        axis.set_axis_off()
        axis.set_title(sheet.title, loc="left", y=1 + MARGIN / sheet.image.height)
        for x, y, line in sheet.lines:
            axis.text(x, y, line, ha="center", va="baseline", font=grids.font(), parse_math=False)
        top += TITLE + sheet.image.height
    for key, axis in axes.items():
        # The places of title (in STYLE) and label are given: to find them takes half of the time.
        axis.set_title(TITLES.get(key, key), parse_math=False)
        axis.set_xlabel("epoch")
        axis.xaxis.set_label_coords(0.5, -0.17)
        epochs = MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10], min_n_ticks=1)
        axis.xaxis.set_major_locator(epochs)
        axis.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        if key == RATIO:
            axis.set_yscale("symlog", linthresh=1e-7)
        axis.yaxis.set_major_formatter(_short)
        axis.grid(alpha=0.25)
    return figure, axes


def _short(value: float, position: float = 0) -> str:
    """Write the number of a tick in few letters: 0, 0.25, −12.5, 2.5e−7."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return grids.shorten(f"{value + 0.0:.6g}")
    mantissa, exponent = f"{value:.5e}".split("e")
    return grids.shorten(f"{float(mantissa):g}e{exponent}")


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


def _is_always_zero(runs: Sequence[Columns], key: str) -> bool:
    """Tell whether a measure is 0 because the epochs have one optimizer step each."""
    steps = {count for run in runs for count in run[STEPS].values()}
    return steps == {1} and not any(value for run in runs for value in run.get(key, {}).values())


def _explain_zeros(axis: Axes, zeros: Sequence[str]) -> None:
    """Write the reason into the panel of the measures that are always 0."""
    axis.set(yscale="linear", ylim=(0, 1), yticks=[0])
    if len(zeros) > 1:
        axis.set_title(", ".join(ZEROS[key] for key in zeros))
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
