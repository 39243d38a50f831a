"""Prompt functions, which provide the contexts of training.

A prompt function has no arguments and returns `(prompt, metadata)`, or `(prompt, image, metadata)` for
img2img. Here each one is a `PromptSampler`, whose whole state is a seed and a count, so that a resumed
run gets the prompts of a run that never stopped.
"""

import contextlib
import csv
import functools
import io
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpo_lessons.words import ANIMALS

Prompt = tuple[str, dict[str, Any]]
ACTIVITIES = ("washing dishes", "riding a bike", "playing chess")


class PromptSampler:
    """Sample prompts at random; the same seed gives the same sequence.

    Call number n has its own generator, seeded by `(seed, n)`, from which `draw` makes `(prompt, metadata)`.
    The state is therefore two integers, and samplers of different seeds are independent. Every process has
    the same seed, makes the prompts that it needs of an epoch, and skips the others.
    """

    def __init__(self, draw: Callable[[random.Random], Prompt], seed: int) -> None:
        functools.update_wrapper(self, draw)  # records have the name of this function
        self._draw = draw
        self.seed = seed
        self.drawn = 0

    def __call__(self) -> Prompt:
        """Return the next `(prompt, metadata)`."""
        generator = self._generator(self.drawn)
        self.drawn += 1
        return self._draw(generator)

    def _generator(self, number: int) -> random.Random:
        return random.Random(f"{self.seed}-{number}")  # a string is hashed alike on every machine

    def skip(self) -> None:
        """Skip a call, for the sample of another process; later calls stay the same."""
        self.drawn += 1

    def state_dict(self) -> dict[str, int]:
        """Return the seed and the number of calls so far, for JSON."""
        return {"seed": self.seed, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a `state_dict`; raise a ValueError for anything else."""
        if set(state) != {"seed", "drawn"}:
            raise ValueError(f"state has the keys {sorted(state)}: pass what state_dict() returned")
        self.seed, self.drawn = state["seed"], state["drawn"]


def _with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def animals(seed: int) -> PromptSampler:
    """Sample one of 45 common animals, such as "an ant"; metadata: `label`, the animal."""

    def draw(generator: random.Random) -> Prompt:
        animal = generator.choice(ANIMALS)
        return _with_article(animal), {"label": animal}

    return PromptSampler(draw, seed)


def activities(seed: int) -> PromptSampler:
    """Sample an animal and an activity, as in section 6 of the DDPO paper; metadata: label, activity."""

    def draw(generator: random.Random) -> Prompt:
        animal, activity = generator.choice(ANIMALS), generator.choice(ACTIVITIES)
        return f"{_with_article(animal)} {activity}", {"label": animal, "activity": activity}

    return PromptSampler(draw, seed)


def from_file(path: str | Path, seed: int) -> PromptSampler:
    """Sample one of the prompts of a file, which `read_prompts` reads."""
    prompts = read_prompts(path)
    return PromptSampler(lambda generator: (generator.choice(prompts), {}), seed)


TABLES = (".json", ".jsonl", ".csv", ".tsv", ".parquet")  # endings of files that are no list of lines


def read_prompts(path: str | Path) -> list[str]:
    """Return the prompts of a UTF-8 file, whose format is detected from its content.

    The file is a JSON list, a JSON object or string per line, a table (with commas, semicolons or tabs) whose
    first line names its columns, or otherwise text with one prompt per line. Of an object or a row, "prompt"
    or "text" is read. Empty entries are skipped. Raises ValueError if there is no prompt, if the file cannot
    be read, or if its ending does not fit its content.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file: give a file with one prompt per line")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    entries = _entries(text)
    if entries is None and path.suffix.lower() in TABLES:
        first = text.strip().partition("\n")[0]
        raise ValueError(
            f'{path} begins with {first!r:.80}, which is neither JSON such as ["a cat"] nor names of columns '
            "with prompt among them: fix it, or write one prompt per line into a .txt file"
        )
    prompts = []
    for number, entry in enumerate(text.splitlines() if entries is None else entries, start=1):
        prompt = entry.get("prompt", entry.get("text")) if isinstance(entry, dict) else entry
        if not isinstance(prompt, str):
            raise ValueError(
                f'{path}, entry {number} is {entry!r:.80}: write "a cat" or {{"prompt": "a cat"}}'
            )
        prompts.append(prompt.strip())
    if not any(prompts):
        raise ValueError(f"{path} holds no prompt: write one prompt per line")
    return [prompt for prompt in prompts if prompt]


def _entries(text: str) -> list[Any] | None:
    """Read JSON, lines of JSON, or a table; return None for anything else, which is lines of text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    with contextlib.suppress(json.JSONDecodeError):
        if lines[0][0] in "[{":
            whole = json.loads(text)
            return whole if isinstance(whole, list) else [whole]
    with contextlib.suppress(json.JSONDecodeError):
        if all(line[0] in '{"' for line in lines):
            return [json.loads(line) for line in lines]
    names = re.fullmatch(r'["\w]+(?:([,;\t])["\w]+)*', lines[0])
    if names is None:
        return None
    header, *rows = csv.reader(io.StringIO(text.strip()), delimiter=names[1] or ",")
    columns = [name.lower() for name in header]
    if not {"prompt", "text"} & {*columns}:
        return None
    return [dict(zip(columns, row, strict=False)) for row in rows if row]
