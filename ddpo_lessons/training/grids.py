"""Arrange the first and the latest images of a run for its figure, with their rewards and prompts."""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from ddpo_lessons.image import COLUMNS, grid_columns
from ddpo_lessons.training.runlog import INPUT

if TYPE_CHECKING:
    from matplotlib.font_manager import FontProperties

DPI = 125  # pixels per inch
SHOWN = 8  # images of an epoch, each beside its input image if there is one
GAP = 8  # pixels between samples
POINTS, LINE, LINES = 8, 17, 4  # size of the text, pixels from line to line, and most lines of a prompt
HEIGHT = 360  # pixels at most of a grid without captions


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
    """Return the first and the latest images of a run, preferably of validation, `width` pixels wide."""
    for kind, name in (("validation", "validation"), ("epoch", "training")):
        found = sorted(path for path in folder.glob(f"images/{kind}-*") if path.suffix in (".png", ".jpg"))
        if found:
            return [_read(name, path, width) for path in dict.fromkeys((found[0], found[-1]))]
    return []


def _read(name: str, path: Path, width: int) -> Sheet:
    """Arrange the images of a grid; show a grid whose captions were not written as it is."""
    title = f"{name} images of epoch {int(path.stem.split('-')[-1])}"
    captions = path.with_suffix(".json")
    with Image.open(path) as grid:
        grid.draft("RGB", (width, 1))  # a JPEG of photographs is decoded at about this width
        if captions.is_file():
            return _arrange(title, grid, json.loads(captions.read_text(encoding="utf-8")), width)
        scale = min(width / grid.width, HEIGHT / grid.height)
        return Sheet(title, grid.resize((round(scale * grid.width), round(scale * grid.height))), [])


def _arrange(title: str, grid: Image.Image, captions: list[str], width: int) -> Sheet:
    """Arrange samples in rows, each with its reward and prompt below."""
    samples = _choose(_samples(captions))
    per_sample = max(len(sample.tiles) for sample in samples)
    rows = -(-len(samples) * per_sample // COLUMNS)
    columns = max(-(-len(samples) // rows), COLUMNS // 2 // per_sample)
    pitch = (width + GAP) / columns  # pixels from sample to sample
    texts = [[_three_digits(sample.reward), *_wrap(sample.prompt, round(pitch - GAP))] for sample in samples]
    across = grid_columns(len(captions))
    tile = grid.width / across, grid.height / -(-len(captions) // across)  # width and height
    side = int((pitch - GAP) / per_sample)
    height = max(1, round(side * tile[1] / tile[0]))
    row_height = height + LINE * max(map(len, texts)) + 2 * GAP
    image = Image.new("RGBA", (width, rows * row_height))
    lines = list[tuple[float, float, str]]()
    for n, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        left, top = round(n % columns * pitch), n // columns * row_height
        for place, number in enumerate(sample.tiles):
            x, y = number % across * tile[0], number // across * tile[1]
            shown = grid.resize((side, height), box=(x, y, x + tile[0], y + tile[1]))
            image.paste(shown, (left + place * side, top))
        center = left + len(sample.tiles) * side / 2
        lines += [(center, top + height + LINE * (row + 1), line) for row, line in enumerate(text)]
    what = "input and result, " if per_sample > 1 else ""
    what += "reward and prompt" if any(sample.prompt for sample in samples) else "reward"
    return Sheet(f"{title} ({what} below)", image, lines)


def _samples(captions: list[str]) -> list[Sample]:
    samples, tiles = list[Sample](), list[int]()
    for number, caption in enumerate(captions):
        tiles.append(number)
        if caption != INPUT:
            reward, _, prompt = caption.partition(" · ")
            samples.append(Sample(tiles, reward, prompt))
            tiles = []
    return samples


def _choose(samples: list[Sample]) -> list[Sample]:
    """Choose samples of as many prompts as possible, because those of a group have the same prompt."""
    seen, ranks = Counter[str](), list[int]()
    for sample in samples:
        ranks.append(seen[sample.prompt])
        seen[sample.prompt] += 1
    first = sorted(range(len(samples)), key=lambda number: (ranks[number], number))[:SHOWN]
    return [samples[number] for number in sorted(first)]


# ---------------------------------------------------------------------------------------------- text
def _three_digits(reward: str) -> str:
    """Round a reward to three digits, and return other text as it is."""
    try:
        number = float(reward)
    except ValueError:
        return reward
    return shorten(f"{number:.0f}" if 999.5 <= abs(number) < 1e6 else f"{number:#.3g}".rstrip("."))


def shorten(number: str) -> str:
    """Write a number with a minus sign and without the zeros of its exponent."""
    return re.sub(r"e\+?(-?)0*", r"e\1", number).replace("-", "−")


@functools.lru_cache(maxsize=100)  # because validation has the same prompts each time
def _wrap(text: str, width: int) -> list[str]:
    """Break a prompt into lines of at most `width` pixels; an ellipsis stands for what does not fit."""
    lines = list[str]()
    for word in _drawable(text[:400]).split():
        if lines and _measure(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    shown = lines[:LINES]
    if len(lines) > LINES:
        shown[-1] += "…"
    return [_cut(line, width) for line in shown]


def _cut(line: str, width: int) -> str:
    while _measure(line) > width and line != "…":
        line = line.rstrip("…")[:-1] + "…"
    return line


def _measure(text: str) -> float:
    """Return the width of a line in pixels."""
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(text, font(), ismath=False)
    return float(width) * DPI / 72


def _drawable(text: str) -> str:
    """Replace characters that the font lacks by boxes, because matplotlib would warn of each."""
    from matplotlib.font_manager import findfont, get_font

    face = get_font(findfont(font()))
    return "".join(c if c.isspace() or face.get_char_index(ord(c)) else "□" for c in text)


@functools.cache
def font() -> FontProperties:
    """Return the font of the text, which comes with matplotlib."""
    from matplotlib.font_manager import FontProperties

    return FontProperties(family="DejaVu Sans", size=POINTS)
