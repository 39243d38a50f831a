"""Arrange the first and the latest images of a run for its figure, with their rewards and prompts."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from ddpo_lessons.image import COLUMNS, grid_columns
from ddpo_lessons.training.runlog import INPUT, varied
from ddpo_lessons.training.ticks import minus

if TYPE_CHECKING:
    from matplotlib.font_manager import FontProperties

DPI = 112  # pixels per inch
GAP = 8  # pixels between samples
POINTS, HEADING = 9, 10  # sizes of the text and of titles
LINE, TITLE = 17, 26  # pixels from line to line, and of a title
LINES = 3  # of a prompt at most; one below an image beside its input
EARLY = 5  # grids among which the first images are chosen
SAME = 4.0  # of 255: input images that differ by less on average are one image, rounded by JPEG
HEIGHT = 240  # pixels at most of a grid without captions


@dataclass(frozen=True)
class Sample:
    """The numbers of the tiles of a sample in its grid, with its input image first, and its caption."""

    tiles: list[int]
    reward: str
    prompt: str


@dataclass(frozen=True)
class Grid:
    """The grid of an epoch as it was written; without samples if its captions were not."""

    image: Image.Image
    columns: int
    rows: int
    samples: list[Sample]

    def box(self, number: int) -> tuple[float, float, float, float]:
        """Return the place of a tile: left, top, right, bottom."""
        width, height = self.image.width / self.columns, self.image.height / self.rows
        x, y = number % self.columns * width, number // self.columns * height
        return x, y, x + width, y + height

    def thumbnail(self, number: int) -> Any:
        """Return a tile as 8 by 8 pixels, by which input images are compared."""
        tile = self.image.resize((8, 8), Image.Resampling.BOX, box=self.box(number))
        return np.asarray(tile, dtype=np.float32)


@dataclass(frozen=True)
class Sheet:
    """Images of an epoch, transparent between them, and lines of text: x of the center, y of the baseline."""

    title: str
    image: Image.Image
    lines: list[tuple[float, float, str]]


def first_and_latest(folder: Path, width: int) -> list[Sheet]:
    """Return the first and the latest images of a run, preferably of validation, `width` pixels wide.

    Of the first grids, which are at most EARLY, it is the one with the most prompts of the latest. Images of
    prompts, or for img2img of input images, that both grids have stand one above the other, and
    then no others are shown. The second title says which of the two it is, and does not repeat the first.
    """
    found = _found(folder)
    paths = list(dict.fromkeys((_early(found), found[-1]))) if found else []
    grids = [_read(path, width) for path in paths]
    titles = [
        f"{'validation' if _is_validation(path) else 'training'} images of epoch {_epoch(path)}"
        for path in paths
    ]
    if all(grid.samples for grid in grids):
        return _arrange(grids, titles, width)
    return [_as_it_is(grid, title, width) for grid, title in zip(grids, titles, strict=True)]


def latest(folders: Sequence[Path], names: Sequence[str], width: int) -> list[Sheet]:
    """Return the latest images of each of several runs, half as many as of a single run.

    They are of the same prompts or input images if all runs have such. There are none if a run has none or
    only some without captions, or if only some runs have input images.
    """
    newest = [_found(folder)[-1:] for folder in folders]
    grids = [_read(path, width) for paths in newest for path in paths]
    starts = [f"{cut(name, width / 3, HEADING, keep_end=True)}: " for name in names]
    titles = [
        start + "validation, " * _is_validation(path) + f"epoch {_epoch(path)}"
        for start, paths in zip(starts, newest, strict=True)
        for path in paths
    ]
    tiles = {max((len(sample.tiles) for sample in grid.samples), default=0) for grid in grids}
    if len(grids) < len(folders) or len(tiles) > 1 or tiles == {0}:
        return []
    return _arrange(grids, titles, width, are_of_runs=True)


def _found(folder: Path) -> list[Path]:
    """Return the grids of a run in the order of their epochs: of validation, or else of training."""
    for kind in ("validation", "epoch"):
        found = sorted(path for path in folder.glob(f"images/{kind}-*") if path.suffix in (".png", ".jpg"))
        if found:
            return found
    return []


def _is_validation(path: Path) -> bool:
    return path.stem.startswith("validation")


def _epoch(path: Path) -> int:
    return int(path.stem.split("-")[-1])


def _early(paths: list[Path]) -> Path:
    """Return the grid of the first eighth of the run that has the most prompts of the latest."""

    def prompts(path: Path) -> set[str]:
        return {text.partition(" · ")[2] for text in _captions(path)}

    latest = prompts(paths[-1])
    return max(paths[: max(1, min(EARLY, len(paths) // 8))], key=lambda path: len(prompts(path) & latest))


def _captions(path: Path) -> list[str]:
    captions = path.with_suffix(".json")
    return list(json.loads(captions.read_text(encoding="utf-8"))) if captions.is_file() else []


def _read(path: Path, width: int) -> Grid:
    texts = _captions(path)
    with Image.open(path) as opened:
        opened.draft("RGB", (width, 1))  # a JPEG of photographs is decoded at about this width
        image = opened.convert("RGB")
    columns = grid_columns(len(texts)) if texts else 1
    return Grid(image, columns, -(-len(texts) // columns), _samples(texts))


def _as_it_is(grid: Grid, title: str, width: int) -> Sheet:
    scale = min(width / grid.image.width, HEIGHT / grid.image.height)
    size = round(scale * grid.image.width), round(scale * grid.image.height)
    return Sheet(cut(title, width, HEADING), grid.image.resize(size), [])


def _samples(captions: list[str]) -> list[Sample]:
    samples, tiles = list[Sample](), list[int]()
    for number, caption in enumerate(captions):
        tiles.append(number)
        if caption != INPUT:
            reward, _, prompt = caption.partition(" · ")
            samples.append(Sample(tiles, reward, " ".join(drawable(prompt[:400]).split())))
            tiles = []
    return samples


# ------------------------------------------------------------------------------------------- samples
def _arrange(grids: list[Grid], titles: list[str], width: int, are_of_runs: bool = False) -> list[Sheet]:
    """Arrange the samples of each grid in a row, with their rewards and prompts below."""
    if not grids:
        return []
    per_sample = max(len(sample.tiles) for grid in grids for sample in grid.samples)
    most = (COLUMNS // 2 if are_of_runs else COLUMNS) // per_sample
    same = _of_all(grids, most) if len(grids) > 1 else []
    chosen = same or [
        [grid.samples[number] for number in varied([sample.prompt for sample in grid.samples], most)]
        for grid in grids
    ]
    columns = max(*map(len, chosen), most if are_of_runs else most * 3 // 4)
    pitch = (width + GAP) / columns  # pixels from sample to sample
    titles = _titles(titles, chosen, bool(same), are_of_runs)
    rewards, sheets = _rewards(chosen, are_of_runs), list[Sheet]()
    for grid, title, samples in zip(grids, titles, chosen, strict=True):
        are_below = len({sample.prompt for sample in samples}) > 1 and not (same and sheets)
        lines = LINES // per_sample if are_below else 0  # of the prompts
        texts = [[next(rewards), *wrap(sample.prompt, round(pitch - GAP), lines)] for sample in samples]
        sheets.append(_lay_out(grid, samples, texts, cut(title, width, HEADING), pitch, width))
    return sheets


def _rewards(rows: list[list[Sample]], are_of_runs: bool) -> Iterator[str]:
    """Write the rewards with equally many decimals: in both rows of a run, or in the row of each run."""
    texts = [[sample.reward for sample in row] for row in rows]
    alike = texts if are_of_runs else [[reward for row in texts for reward in row]]
    return (reward for group in alike for reward in equal_decimals(group))


def _titles(titles: list[str], rows: list[list[Sample]], is_same: bool, are_of_runs: bool) -> list[str]:
    """Add to each title what is below the images, and a prompt of all of them that is not in the first."""
    whole, shared = list[str](), ""
    for title, row in zip(titles, rows, strict=True):
        prompts = list(dict.fromkeys(sample.prompt for sample in row))
        has_inputs = len(row[0].tiles) > 1 and (bool(whole) or not are_of_runs)  # a run's name takes room
        about = _about(prompts, has_inputs, is_same if whole else None)
        if len(prompts) == 1 and prompts[0] not in ("", shared):
            shared = prompts[0]
            about += f", prompt: {shared}"
        whole.append(title + about)
    return whole


def _about(prompts: list[str], has_inputs: bool, is_same: bool | None) -> str:
    """Say what is below the first images, or for the latest ones whether they are of the same contexts."""
    if is_same is None:
        return f" ({'input and result, ' * has_inputs}reward{' and prompt' * (len(prompts) > 1)} below)"
    if prompts == [""] and not has_inputs:
        return ""
    what = "input image" if has_inputs else "prompt"
    return f" ({'same' if is_same else 'other'} {what}{'s' * (has_inputs or len(prompts) > 1)})"


def _of_all(grids: list[Grid], most: int) -> list[list[Sample]]:
    """Choose samples of contexts that all grids have, equally many and in one order; none if there are none.

    A context is a prompt, or a prompt and an input image.
    """
    seen = list[tuple[str, Any]]()
    known: list[dict[int, list[Sample]]] = [{} for _ in grids]  # of each, by the number of the context
    for grid, samples in zip(grids, known, strict=True):
        for sample in grid.samples:
            image = grid.thumbnail(sample.tiles[0]) if len(sample.tiles) > 1 else 0.0
            samples.setdefault(_number(sample.prompt, image, seen), []).append(sample)
    alike = [
        (number, of_one)
        for number in known[0]
        for of_one in zip(*(samples.get(number, []) for samples in known), strict=False)
    ]
    shown = [alike[place][1] for place in varied([number for number, _ in alike], most)]
    return [list(samples) for samples in zip(*shown, strict=True)]


def _number(prompt: str, image: Any, seen: list[tuple[str, Any]]) -> int:
    """Return the number of a context among those seen so far, to which a new one is added."""
    for number, (other_prompt, other) in enumerate(seen):
        if prompt == other_prompt and np.abs(image - other).mean() <= SAME:
            return number
    seen.append((prompt, image))
    return len(seen) - 1


def _lay_out(
    grid: Grid, samples: list[Sample], texts: list[list[str]], title: str, pitch: float, width: int
) -> Sheet:
    """Put samples side by side, with lines of text below each."""
    per_sample = max(len(sample.tiles) for sample in samples)
    _, top, right, bottom = grid.box(0)
    side = int((pitch - GAP) / per_sample)
    height = max(1, round(side * (bottom - top) / right))
    image = Image.new("RGBA", (width, height + LINE * max(map(len, texts)) + GAP))
    lines = list[tuple[float, float, str]]()
    for n, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        left = round(n * pitch)
        for place, number in enumerate(sample.tiles):
            image.paste(grid.image.resize((side, height), box=grid.box(number)), (left + place * side, 0))
        center = left + len(sample.tiles) * side / 2
        lines += [(center, height + LINE * (row + 1), line) for row, line in enumerate(text)]
    return Sheet(title, image, lines)


# ---------------------------------------------------------------------------------------------- text
def equal_decimals(rewards: list[str]) -> list[str]:
    """Write rewards with equally many decimals: three digits of the difference of the largest and smallest.

    They are fewer if no reward has so many. If all rewards are very small or very large, they have powers of
    ten. Other text stays as it is.
    """
    numbers = [_finite(reward) for reward in rewards]
    known = [number for number in numbers if number is not None]
    largest = max(map(abs, known), default=0.0)
    span = max(known, default=0.0) - min(known, default=0.0) or largest or 1.0
    written = [len(reward.partition(".")[2]) for reward in rewards if _finite(reward) is not None]
    shown = max(0, min(2 - math.floor(math.log10(span)), max(written, default=0)))

    def write(number: float) -> str:
        if largest and not 1e-3 <= largest < 1e6:
            return re.sub(r"e\+?(-?)0*(?=\d)", r"e\1", f"{number:.2e}")
        return f"{round(number, shown) + 0.0:.{shown}f}"

    return [
        text if number is None else minus(write(number))
        for text, number in zip(rewards, numbers, strict=True)
    ]


def _finite(reward: str) -> float | None:
    with contextlib.suppress(ValueError):
        if math.isfinite(number := float(reward)):
            return number
    return None


@functools.lru_cache(maxsize=100)  # because validation has the same prompts each time
def wrap(text: str, width: int, most: int = LINES) -> list[str]:
    """Break a text into at most `most` lines of `width` pixels; an ellipsis stands for what does not fit."""
    lines = list[str]()
    for word in drawable(text).split() if most else ():
        if lines and measure(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    if len(lines) > most:
        lines[most - 1 :] = [" ".join(lines[most - 1 :])]
    return [cut(line, width) for line in lines]


def cut(line: str, width: float, points: float = POINTS, keep_end: bool = False) -> str:
    """Shorten a line to at most `width` pixels; an ellipsis stands for its end, or for its beginning."""
    if measure(line, points) <= width:
        return line
    low, high = 0, len(line)  # letters that fit, and that do not
    while high - low > 1:
        middle = (low + high) // 2
        fits = measure(_keep(line, middle, keep_end), points) <= width
        low, high = (middle, high) if fits else (low, middle)
    return _keep(line, low, keep_end)


def _keep(line: str, letters: int, at_end: bool) -> str:
    return f"…{line[len(line) - letters :].lstrip()}" if at_end else f"{line[:letters].rstrip()}…"


def measure(text: str, points: float = POINTS) -> float:
    """Return the width of a line in pixels, as it is drawn."""
    width, _, _ = _renderer().get_text_width_height_descent(text, font(points), ismath=False)
    return float(width)


def drawable(text: str) -> str:
    """Replace characters that the font lacks by boxes, because matplotlib would warn of each."""
    from matplotlib.font_manager import findfont, get_font

    face = get_font(findfont(font()))
    return "".join(c if c.isspace() or face.get_char_index(ord(c)) else "□" for c in text)


@functools.cache
def _renderer() -> Any:
    from matplotlib.backends.backend_agg import RendererAgg

    return RendererAgg(1, 1, DPI)


@functools.cache
def font(points: float = POINTS) -> FontProperties:
    """Return the font of the text, which comes with matplotlib."""
    from matplotlib.font_manager import FontProperties

    return FontProperties(family="DejaVu Sans", size=points)
