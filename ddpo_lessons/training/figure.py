"""Plot one or several runs from the records in their folders, without pyplot."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from ddpo_lessons.config import RUN
from ddpo_lessons.training import grids, ticks
from ddpo_lessons.training.grids import DPI, LINE, TITLE
from ddpo_lessons.training.record import CONFIG
from ddpo_lessons.training.runlog import CHANGES, METRICS, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In pixels; at DPI pixels per inch, a phone still shows the letters. A run with two reward terms, four
# measures and images is about HEIGHT high, so that a screen shows all of it.
PIXELS, HEIGHT, EDGE = 900, 900, 16  # of the figure, and on its left and right
WIDTH = PIXELS - 2 * EDGE  # of two panels, and of the images
LEFT, RIGHT, GUTTER = 74, 10, 16  # beside the axes of a panel, for numbers, and between two panels
LOW, TALL = 79, 150  # height of axes, at least and at most
KEY, NUMBERS, BELOW = 23, 30, 10  # heights of a row of the legend, and below panels with epochs or without
FEW = 4  # runs, of which some images are shown if the figure still fits a screen
SYMBOL, NAME = 67, 12  # width of a symbol of the legend and of the gaps beside it; size of a run's name
# The same figure whatever the user has set; the place of titles is given, because finding it takes time.
SIZES = {
    "axes.titley": 1, "axes.titlesize": grids.HEADING, "axes.labelsize": grids.POINTS, "axes.labelpad": 0,
    "xtick.labelsize": grids.POINTS, "ytick.labelsize": grids.POINTS, "legend.fontsize": grids.POINTS,
}  # fmt: skip
STYLE: list[Any] = ["default", "ddpo_lessons.lessons.lesson", SIZES]
REWARD, MEDIAN, RATIO = "reward_mean", "reward_q50", "max_ratio_error"
TERM, EVALUATOR = "reward/", "reward/judge"
TITLES = {  # of the panels below those of the reward and its terms
    RATIO: "largest |ratio − 1|",
    "clip_fraction": "clip fraction",
    "approx_kl": "KL to the sampling policy",
    "kl_reference": "KL to the reference policy",
}
NO_UPDATE = (RATIO, "clip_fraction", "approx_kl")  # 0 before the first optimizer step of an epoch
DASHED = {REWARD: "validation_reward", RATIO: "first_replay_max_ratio_error"}  # in the same panel
FIRST_STEP = " (dashed: first step)"
STEPS = "optimizer_steps"  # of an epoch
REWARDS = ("reward", "reward_function")  # in a run's config.json: of the command line, and of all runs
GRAY, INK = "#5f636b", "#22262e"  # of the line below the panels, and of a single run's mean
INNER, OUTER = ("reward_q25", "reward_q75"), ("reward_q05", "reward_q95")
BANDS = {INNER: ("25% to 75% quantile", 0.34), OUTER: ("5% to 95%", 0.16)}  # and their opacity
MANY = 25  # points of a curve, beyond which it is thin and has no dots

Columns = dict[str, dict[int, float]]  # of each key of the records, the value of each epoch
Changes = dict[int, list[str]]  # what a resume changed, by the last epoch with the old settings


class Panel(NamedTuple):
    """A key of the records, and the numbers of the runs that are drawn."""

    key: str
    runs: Sequence[int]


def plot_run(*folders: str | Path) -> Figure:
    """Plot the records of one or several runs over their epochs, and some of their images.

    The panels show the reward (mean, validation, and of a single run the median and quantiles), the mean of
    each reward term, the error of the ratio, the clip fraction and the KL, as far as they were recorded; a
    line below them names those that are 0 in every epoch. Each run has one color. Runs of different rewards
    have a panel of the reward each, because such rewards cannot be compared. The images are an early and the
    latest ones of a single run, or the latest ones of each of up to four runs if these still fit a screen.
    They are of the same prompts or input images if there are such, and stand above their rewards and prompts;
    a prompt that is the same for all is in the title. If the wide band of a single run is cut off, the legend
    has its lowest and highest value. A run need not be finished. Raises ValueError if a folder is not that of
    a run, or a record is damaged.

        plot_run("runs/edit")  # as the last expression of a cell: shows the figure
        plot_run("runs/a", "runs/b").savefig("both.png")
    """
    if not folders:
        raise ValueError("plot_run needs the folder of a run, such as plot_run('runs/edit')")
    from matplotlib import style

    paths = [Path(folder) for folder in folders]
    runs = [_read(path) for path in paths]
    terms = sorted(_keys(runs, TERM), key=lambda key: key == EVALUATOR)
    keys = [key for key in (*terms, *TITLES) if _has(runs, key)]
    zeros = [key for key in keys if _is_zero(runs, key)]
    epochs = [epoch for run in runs for column in run.values() for epoch in column] or [1]
    marks = ticks.of_epochs(min(epochs), max(epochs))
    names, records = _names(paths), [_record(path) for path in paths]
    groups, known = _groups(records, runs), [_weights(record) for record in records]
    labels = [_label(name, run) for name, run in zip(names, runs, strict=True)]
    changed = [_changes(path) for path in paths]
    panels = [Panel(REWARD, group) for group in groups]
    panels += [Panel(key, range(len(runs))) for key in keys if key not in zeros]
    with style.context(STYLE):
        colors = _colors(len(runs))
        bands = [band for band in BANDS if len(runs) == 1 and _has(runs, band[0])]
        head = _Head(labels[0] if len(runs) == 1 else "", _symbols(labels, runs, colors, bands))
        page = _Page(panels, head.height, [_note(runs, zeros), *_change_notes(names, changed)])
        sheets = list[grids.Sheet]()
        if len(runs) == 1:
            sheets = grids.first_and_latest(paths[0], WIDTH)
        elif len(runs) <= FEW:
            sheets = grids.latest(paths, names, (WIDTH - GUTTER) // 2)
            sheets = sheets if page.least(sheets) <= HEIGHT else []
        figure, axes = page.lay_out(sheets, marks)
        head.draw(figure)
        for (key, numbers), axis in zip(panels, axes, strict=True):
            for number in numbers:
                _draw(axis, runs[number], key, colors[number], bands)
                for epoch in changed[number]:
                    axis.axvline(
                        epoch + 0.5, color=GRAY if len(runs) == 1 else colors[number], ls=":", lw=1.5
                    )
            named = {weights.get(key, "") for weights, run in zip(known, runs, strict=True) if key in run}
            title = _title(key) + (named.pop() if len(named) == 1 else "")
            if key == RATIO and _has(runs, DASHED[key]):
                title += FIRST_STEP
            if key == REWARD and len(runs) > 1:
                title = f"mean {title}"
            if key == REWARD and len(groups) > 1:
                title += f" of {', '.join(names[number] for number in numbers)}"
            _scale(axis, key, title)
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


def _changes(folder: Path) -> Changes:
    """Return what resumes changed; of a reward on the command line its name there is enough."""
    found = Changes()
    for record in read_metrics(folder, CHANGES):
        changes: list[str] = record["changes"]
        is_named = any(change.startswith("reward ") for change in changes)
        kept = [change for change in changes if not (is_named and change.startswith("reward_function "))]
        found[record["epoch"]] = [grids.drawable(change) for change in kept]
    return found


def _summary(key: str, values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    return max(finite) if key.startswith("max") else statistics.fmean(finite)


def _keys(runs: Sequence[Columns], start: str) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run if key.startswith(start)))


def _has(runs: Sequence[Columns], key: str) -> bool:
    return any(math.isfinite(value) for run in runs for value in run.get(key, {}).values())


def _is_zero(runs: Sequence[Columns], key: str) -> bool:
    """Return whether a measure is 0 in every epoch; NaN is not."""
    return not any(
        value for run in runs for name in (key, DASHED.get(key, "")) for value in run.get(name, {}).values()
    )


def _groups(records: Sequence[dict[str, Any]], runs: Sequence[Columns]) -> list[list[int]]:
    """Return the numbers of the runs that have the same reward, as far as their folders tell."""
    field = next((name for name in REWARDS if all(name in record for record in records)), "")
    groups: dict[str, list[int]] = {}
    empty = [number for number, run in enumerate(runs) if REWARD not in run]  # in any panel
    for number, (record, run) in enumerate(zip(records, runs, strict=True)):
        if number not in empty:
            terms = sorted(key for key in _keys([run], TERM) if key != EVALUATOR)
            groups.setdefault(json.dumps([record.get(field), terms], sort_keys=True), []).append(number)
    first, *rest = groups.values() if groups else [list[int]()]
    return [sorted([*first, *empty]), *rest]


def _weights(record: dict[str, Any]) -> dict[str, str]:
    """Name the weights of the reward terms FILE.py:NAME or NAME@MODEL of the command line."""
    weights = record.get("reward")
    named = weights.items() if isinstance(weights, dict) else ()
    terms = {text.partition("@")[0].rpartition(":")[2]: ticks.minus(f"{weight:g}") for text, weight in named}
    return {TERM + term: f" (weight {weight})" for term, weight in terms.items()}


def _cut(run: Columns) -> tuple[float, float, str] | None:
    """Return the limits of the reward's panel and the ends of its outer band, if the panel cuts that band.

    It is cut if the median, the inner band and the validation would otherwise have less than a third of the
    height, and then goes beyond them by at most their height. The mean is never cut. If it takes two thirds
    of the height anyway, then the band stays whole.
    """

    def extent(*names: str) -> tuple[float, float]:
        values = [value for name in names for value in run.get(name, {}).values() if math.isfinite(value)]
        return min(values, default=0), max(values, default=0)

    inside = MEDIAN, DASHED[REWARD], *INNER
    bottom, top = extent(*inside)
    low, high = extent(*inside, REWARD)
    lowest, highest = extent(*inside, REWARD, *OUTER)
    height = max(top - bottom, (high - low) / 2)
    if height == 0 or highest - lowest <= 3 * height:
        return None
    low, high = max(lowest, min(low, bottom - height)), min(highest, max(high, top + height))
    room = (high - low) / 20  # on a side that is not cut
    ends = " to ".join(grids.equal_decimals([str(end) for end in extent(*OUTER)]))
    return low - room * (low == lowest), high + room * (high == highest), ends


def _record(folder: Path) -> dict[str, Any]:
    """Return what config.json says of the run; nothing if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return dict(json.loads((folder / CONFIG).read_text(encoding="utf-8"))[RUN])
    return {}


# -------------------------------------------------------------------------------------------- words
def _names(folders: Sequence[Path]) -> list[str]:
    """Name the runs by their folders, or by paths if two folders have one name."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [grids.drawable(name) for name in names]


def _label(name: str, run: Columns) -> str:
    epoch = max(run.get(REWARD, ()), default=0)
    return f"{grids.cut(name, 650, NAME, keep_end=True)} (epoch {epoch})"


def _title(key: str) -> str:
    if key == REWARD:
        return "reward"
    if key == EVALUATOR:
        return "mean of the held-out evaluator"
    return TITLES.get(key) or f"mean reward term: {key.removeprefix(TERM)}"


def _note(runs: Sequence[Columns], zeros: Sequence[str]) -> str:
    """Name the measures that are 0 in every epoch, with the reason if it is known."""
    is_one_step = {count for run in runs for count in run[STEPS].values()} == {1}
    known = [key for key in zeros if is_one_step and key in NO_UPDATE]
    others = [key for key in zeros if key not in known]
    sentences = list[str]()
    for group, why in ((known, ", because each has one optimizer step"), (others, "")):
        if group:
            *before, last = map(_title, group)
            names = f"{', '.join(before)} and {last} are" if before else f"{last} is"
            sentences.append(f"{names[0].upper()}{names[1:]} 0 in every epoch{why}.")
    return " ".join(sentences)


def _change_notes(names: Sequence[str], changed: Sequence[Changes]) -> list[str]:
    """Say what each dotted line means: what a resume changed, and of several runs in which run."""
    return [
        f"Dotted line{f' of {name}' if len(names) > 1 else ''} after epoch {epoch}: {'; '.join(changes)}."
        for name, own in zip(names, changed, strict=True) for epoch, changes in own.items()
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------- layout
class _Page:
    """The places of panels, two per row, and of what is above and below them.

    If a cell would be empty otherwise, the reward has a row of its own, or the last panel if there are
    several of the reward.
    """

    def __init__(self, panels: Sequence[Panel], head: int, notes: Sequence[str]) -> None:
        rewards = [panel for panel in panels if panel.key == REWARD]
        first = 1 if len(panels) % 2 == 1 and len(rewards) == 1 else 2
        self.rows = [panels[:first], *(panels[n : n + 2] for n in range(first, len(panels), 2))]
        self.lines = [line for note in notes for line in grids.wrap(note, WIDTH, len(note))]
        self.head = head
        self.below = [NUMBERS if self._has_numbers(n) else BELOW for n in range(len(self.rows))]
        text = LINE * len(self.lines) + (BELOW if self.lines else 0)
        self.fixed = self.head + TITLE * len(self.rows) + sum(self.below) + text  # all but axes and images

    def _has_numbers(self, row: int) -> bool:
        return row == len(self.rows) - 1 or len(self.rows[row]) != len(self.rows[row + 1])

    def least(self, sheets: Sequence[grids.Sheet]) -> int:
        """Return the height of the figure if its axes are as low as they may be."""
        return self.fixed + LOW * len(self.rows) + sum(map(_height, _rows(sheets)))

    def lay_out(self, sheets: Sequence[grids.Sheet], marks: Sequence[int]) -> tuple[Any, list[Axes]]:
        """Make the figure with its images, and return it with the axes of the panels."""
        from matplotlib.figure import Figure

        images = sum(map(_height, _rows(sheets)))
        tall = min(TALL, max(LOW, (HEIGHT - self.fixed - images) // len(self.rows)))
        height = self.fixed + tall * len(self.rows) + images
        figure = Figure(figsize=(PIXELS / DPI, height / DPI), dpi=DPI)
        figure.set_layout_engine("none")

        def add(left: float, top: float, width: float, tall: float) -> Axes:
            return figure.add_axes((left / PIXELS, 1 - (top + tall) / height, width / PIXELS, tall / height))

        axes = list["Axes"]()
        top = self.head
        for number, row in enumerate(self.rows):
            cell = WIDTH if len(row) == 1 else (WIDTH - GUTTER) / 2
            for column in range(len(row)):
                left = EDGE + column * (cell + GUTTER) + LEFT
                axes.append(add(left, top + TITLE, cell - LEFT - RIGHT, tall))
                _mark_epochs(axes[-1], marks, self._has_numbers(number))
            top += TITLE + tall + self.below[number]
        for line in self.lines:
            top += LINE
            place = EDGE / PIXELS, 1 - top / height
            figure.text(*place, line, font=grids.font(), color=GRAY, parse_math=False)
        top += BELOW if self.lines else 0
        for images_row in _rows(sheets):
            for column, sheet in enumerate(images_row):
                left = EDGE + column * (sheet.image.width + GUTTER)
                _show(add(left, top + TITLE, sheet.image.width, sheet.image.height), sheet)
            top += _height(images_row)
        return figure, axes


def _rows(sheets: Sequence[grids.Sheet]) -> list[Sequence[grids.Sheet]]:
    """Put narrow images two per row, as the panels."""
    per_row = 2 if sheets and 2 * sheets[0].image.width < WIDTH else 1
    return [sheets[n : n + per_row] for n in range(0, len(sheets), per_row)]


def _height(row: Sequence[grids.Sheet]) -> int:
    return TITLE + max(sheet.image.height for sheet in row)


# ------------------------------------------------------------------------------------------ drawing
def _mark_epochs(axis: Axes, marks: Sequence[int], has_numbers: bool) -> None:
    """Set the ticks of the epochs, and name them if this is the lowest panel with these ticks."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    axis.set_xlim(marks[0] - 0.5, marks[-1] + 0.5)
    axis.xaxis.set_major_locator(FixedLocator(marks))
    axis.xaxis.set_major_formatter(FixedFormatter([str(mark) for mark in marks] if has_numbers else []))
    if has_numbers:  # its place is given, because finding it takes half of the time
        axis.set_xlabel("epoch", ha="right", va="top")
        axis.xaxis.set_label_coords(-14 / axis.bbox.width, -11 / axis.bbox.height)


def _draw(axis: Axes, run: Columns, key: str, color: str, bands: Sequence[tuple[str, str]]) -> None:
    """Plot the curves of a run in a panel, labeled with their keys."""
    looks = {key: "solid", DASHED.get(key, ""): "dashed"}
    if key == REWARD and bands:
        looks |= {MEDIAN: "solid", REWARD: "thin"}
    for name, look in looks.items():
        if name in run:
            x, y = list(run[name]), list(run[name].values())
            axis.plot(x, y, label=name, clip_on=False, **_look(look, color, len(x)))
    for low, high in bands if key == REWARD else ():
        if low in run and high in run:
            places: list[float] = list(run[key])
            bottom, top = ([run[name].get(epoch, math.nan) for epoch in run[key]] for name in (low, high))
            if len(places) == 1:  # as a bar
                places, bottom, top = [places[0] - 0.1, places[0] + 0.1], bottom * 2, top * 2
            axis.fill_between(places, bottom, top, color=color, alpha=BANDS[low, high][1], lw=0, label=low)
    if key == REWARD and OUTER in bands and (limits := _cut(run)):
        axis.set_ylim(limits[:2])


def _look(look: str, color: str, points: int = 2) -> dict[str, Any]:
    """Return the look of a curve with so many points: solid with dots, dashed with hollow ones, or thin."""
    if look == "thin":
        return {"color": INK, "lw": 0.8, "marker": "_" if points == 1 else ""}
    width, size = (1.5, 4 if points > 1 else 8) if points <= MANY else (1, 1)
    solid = {"color": color, "lw": width, "marker": ".", "ms": size}
    dashed = {"ls": "--", "ms": 4, "marker": "o" if points <= MANY else "", "mfc": "white"}
    return solid | dashed if look == "dashed" else solid


def _scale(axis: Axes, key: str, title: str) -> None:
    """Set the ticks of the values, and the title followed by their unit."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    if key in TITLES:
        axis.set_ylim(bottom=0)
    low, high = axis.get_ylim()
    unit = ""
    if key == RATIO and high > 1e-6:
        axis.set_yscale("symlog", linthresh=1e-7)
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylim(0, 3 * high)
        positions, labels = ticks.of_powers(high)
    else:
        positions, labels, unit = ticks.of_values(low, high)
    axis.yaxis.set_major_locator(FixedLocator(positions))
    axis.yaxis.set_major_formatter(FixedFormatter(labels))
    axis.grid(alpha=0.25)
    unit = f", {unit}" if unit else ""
    room = LEFT + axis.bbox.width - grids.measure(unit, grids.HEADING)
    short = grids.cut(grids.drawable(title), room, grids.HEADING)
    axis.set_title(short + unit, loc="left", x=-LEFT / axis.bbox.width, parse_math=False)


def _show(axis: Axes, sheet: grids.Sheet) -> None:
    """Show images with the text below them."""
    axis.imshow(sheet.image, aspect="auto", interpolation="nearest")
    axis.set_axis_off()
    axis.set_title(sheet.title, loc="left", parse_math=False)
    for x, y, line in sheet.lines:
        axis.text(x, y, line, ha="center", va="baseline", font=grids.font(), parse_math=False)


def _colors(count: int) -> list[str]:
    import matplotlib
    from matplotlib.colors import to_hex

    palette = list(matplotlib.rcParams["axes.prop_cycle"].by_key()["color"])
    many = matplotlib.colormaps["turbo"].resampled(count)
    return palette[:count] if count <= len(palette) else [to_hex(many(n)) for n in range(count)]


def _symbols(
    names: Sequence[str], runs: Sequence[Columns], colors: Sequence[str], bands: Sequence[tuple[str, str]]
) -> list[tuple[Any, str]]:
    """Return the symbols of the legend, each with its text: of several runs, and of curves and bands."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    color = colors[0] if len(runs) == 1 else INK
    curves = [("solid", each, name) for each, name in zip(colors, names, strict=True)]
    if len(runs) == 1:  # of several, the title of a panel says that the curves are means
        centers = {"solid": "median", "thin": "mean"} if bands else {"solid": "mean"}
        curves = [(look, color, name) for look, name in centers.items()]
    symbols = list[tuple[Any, str]]()
    symbols += [(Line2D([], [], **_look(look, each)), name) for look, each, name in curves]
    for n, band in enumerate(bands):
        clear = math.prod(1 - BANDS[each][1] for each in bands[n:])  # a band is above those that are wider
        limits = _cut(runs[0]) if band == OUTER else None
        ends = f" ({limits[2]})" if limits else ""
        symbols.append((Patch(facecolor=color, alpha=1 - clear, lw=0), BANDS[band][0] + ends))
    if _has(runs, DASHED[REWARD]):
        symbols.append((Line2D([], [], **_look("dashed", color)), "validation"))
    return symbols


class _Head:
    """What is above the panels: the name of a single run, and the rows of the legend."""

    def __init__(self, title: str, symbols: Sequence[tuple[Any, str]]) -> None:
        self.title = title
        self.rows, room = list[list[tuple[Any, str]]](), 0.0
        for symbol, text in symbols:
            room -= SYMBOL + grids.measure(text)
            if room < 0:
                self.rows.append([])
                room = WIDTH - SYMBOL - grids.measure(text)
            self.rows[-1].append((symbol, text))
        self.height = EDGE // 2 + (TITLE if title else 0) + KEY * len(self.rows)

    def draw(self, figure: Figure) -> None:
        """Write the name and the legend at the top of a figure."""
        height = figure.bbox.height
        top = EDGE // 2
        if self.title:
            place = EDGE / PIXELS, 1 - top / height
            figure.text(*place, self.title, font=grids.font(NAME), va="top", parse_math=False)
            top += TITLE
        for row in self.rows:
            legend = figure.legend(
                handles=[symbol for symbol, _ in row], labels=[""] * len(row), loc="upper left",
                ncols=len(row), bbox_to_anchor=(EDGE / PIXELS, 1 - top / height), borderaxespad=0,
                borderpad=0.25,
            )  # fmt: skip
            for text, (_, name) in zip(legend.get_texts(), row, strict=True):
                text.set(text=name, parse_math=False)  # as a label it might not begin with _
            top += KEY
