"""Arrange the first and the latest images of a run for its figure, with their rewards and prompts."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from ddpo_lessons.image import COLUMNS, grid_columns
from ddpo_lessons.training.runlog import INPUT
from ddpo_lessons.training.ticks import minus

if TYPE_CHECKING:
    from matplotlib.font_manager import FontProperties

DPI = 112  # pixels per inch
GAP = 8  # pixels between samples
POINTS, HEADING = 9, 10  # sizes of the text and of titles
LINE, TITLE = 17, 26  # pixels from line to line, and of a title
LINES = 2  # of a prompt at most; one below an image beside its input
HEIGHT = 240  # pixels at most of a grid without captions


@dataclass(frozen=True)
class Sample:
    """The numbers of the tiles of a sample in its grid, with its input image first, and its caption."""

    tiles: list[int]
    reward: str
    prompt: str


@dataclass(frozen=True)
class Sheet:
    """Images of an epoch, transparent between them, and lines of text: x of the center, y of the baseline."""

    title: str
    image: Image.Image
    lines: list[tuple[float, float, str]]


def first_and_latest(folder: Path, width: int) -> list[Sheet]:
    """Return the first and the latest images of a run, preferably of validation, `width` pixels wide.

    The second title does not repeat what is below the images, or their prompt.
    """
    for kind, name in (("validation", "validation"), ("epoch", "training")):
        found = sorted(path for path in folder.glob(f"images/{kind}-*") if path.suffix in (".png", ".jpg"))
        if found:
            paths = list(dict.fromkeys((found[0], found[-1])))
            sheets = [_read(path, width) for path in paths]
            titles = [f"{name} images of epoch {int(path.stem.split('-')[-1])}" for path in paths]
            abouts = [sheet.title for sheet in sheets]
            if abouts[0] == abouts[-1]:
                abouts[1:] = [""] * (len(abouts) - 1)
            return [
                replace(sheet, title=cut(title + about, width, HEADING))
                for sheet, title, about in zip(sheets, titles, abouts, strict=True)
            ]
    return []


def _read(path: Path, width: int) -> Sheet:
    """Arrange the images of a grid; show a grid whose captions were not written as it is."""
    captions = path.with_suffix(".json")
    with Image.open(path) as grid:
        grid.draft("RGB", (width, 1))  # a JPEG of photographs is decoded at about this width
        if captions.is_file():
            return _arrange(grid, json.loads(captions.read_text(encoding="utf-8")), width)
        scale = min(width / grid.width, HEIGHT / grid.height)
        return Sheet("", grid.resize((round(scale * grid.width), round(scale * grid.height))), [])


def _arrange(grid: Image.Image, captions: list[str], width: int) -> Sheet:
    """Arrange samples in a row, each with its reward and prompt below."""
    samples = _samples(captions)
    per_sample = max(len(sample.tiles) for sample in samples)
    most = COLUMNS // per_sample
    samples = _choose(samples, most)
    prompts = list(dict.fromkeys(sample.prompt for sample in samples))
    most_lines = 0 if len(prompts) == 1 else LINES // per_sample
    pitch = (width + GAP) / max(len(samples), most * 3 // 4)  # pixels from sample to sample
    texts = [
        [_three_digits(sample.reward), *wrap(sample.prompt, round(pitch - GAP), most_lines)]
        for sample in samples
    ]
    across = grid_columns(len(captions))
    tile = grid.width / across, grid.height / -(-len(captions) // across)  # width and height
    side = int((pitch - GAP) / per_sample)
    height = max(1, round(side * tile[1] / tile[0]))
    image = Image.new("RGBA", (width, height + LINE * max(map(len, texts)) + GAP))
    lines = list[tuple[float, float, str]]()
    for n, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        left = round(n * pitch)
        for place, number in enumerate(sample.tiles):
            x, y = number % across * tile[0], number // across * tile[1]
            shown = grid.resize((side, height), box=(x, y, x + tile[0], y + tile[1]))
            image.paste(shown, (left + place * side, 0))
        center = left + len(sample.tiles) * side / 2
        lines += [(center, height + LINE * (row + 1), line) for row, line in enumerate(text)]
    what = "input and result, " if per_sample > 1 else ""
    what += "reward and prompt below" if len(prompts) > 1 else "reward below"
    shared = f", prompt: {prompts[0]}" if len(prompts) == 1 and prompts[0] else ""
    return Sheet(f" ({what}){shared}", image, lines)


def _samples(captions: list[str]) -> list[Sample]:
    samples, tiles = list[Sample](), list[int]()
    for number, caption in enumerate(captions):
        tiles.append(number)
        if caption != INPUT:
            reward, _, prompt = caption.partition(" · ")
            samples.append(Sample(tiles, reward, " ".join(drawable(prompt[:400]).split())))
            tiles = []
    return samples


def _choose(samples: list[Sample], count: int) -> list[Sample]:
    """Choose samples of as many prompts as possible, because those of a group have the same prompt."""
    seen, ranks = Counter[str](), list[int]()
    for sample in samples:
        ranks.append(seen[sample.prompt])
        seen[sample.prompt] += 1
    first = sorted(range(len(samples)), key=lambda number: (ranks[number], number))[:count]
    return [samples[number] for number in sorted(first)]


# ---------------------------------------------------------------------------------------------- text
def _three_digits(reward: str) -> str:
    """Round a reward to three digits, and return other text as it is."""
    try:
        number = float(reward)
    except ValueError:
        return reward
    text = f"{number:.0f}" if 999.5 <= abs(number) < 1e6 else f"{number:#.3g}".rstrip(".")
    return minus(re.sub(r"e\+?(-?)0*", r"e\1", text))


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
