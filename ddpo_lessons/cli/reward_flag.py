"""`--reward`: names of the package, functions of the user's files, models by path, and weighted sums."""

import difflib
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpo_lessons import own
from ddpo_lessons.data import folders
from ddpo_lessons.embedded import HUB_NAME
from ddpo_lessons.rewards import REWARDS, RewardFunction, weighted_sum


def help_text() -> str:
    """Return the flag's help."""
    asking = ", ".join("@".join((name, *found.models)) for name, found in REWARDS.items() if found.models)
    return (
        "What is trained for; the preset's if not given. A NAME; or FILE.py:FUNCTION or MODULE:FUNCTION, "
        "which is called with (images, prompts, metadata) and returns a reward for each image; or a weighted "
        f"sum, such as clip_score=1,my.py:red=0.2. NAMEs: {', '.join(REWARDS)}. After @ stands a folder of a "
        f"model that is asked, or its name on the hub: {asking}."
    )


@dataclass(frozen=True)
class Term:
    """One reward of the flag."""

    name: str  #: of the registry, or of the function
    weight: float | None  #: in the sum; None where none was written
    place: str = ""  #: FILE.py or MODULE of the function; empty for a name of the registry
    #: folders or names on the hub of the models that it asks; as many as were given
    models: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The term as it is written, without its weight."""
        return f"{self.place}:{self.name}" if self.place else "@".join((self.name, *self.models))


def parse(text: str) -> tuple[Term, ...]:
    """Read the flag; a ValueError refuses names, weights and models that cannot be."""
    try:
        terms = tuple(_term(part.strip()) for part in text.split(","))
    except ValueError as error:
        if not (re.search(r"[/\\]|\.py\b", text) and re.search("[,=@]", text)):
            raise
        raise ValueError(f"{error}. If a path holds , = or @, rename it or link to it") from error
    names = [term.name for term in terms]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"reward={text} names {name} twice: records tell rewards apart by their names")
    return terms


def _term(part: str) -> Term:
    written, equals, number = part.rpartition("=")
    text, weight = (written, _weight(part, number)) if equals else (part, None)
    place, colon, function = text.rpartition(":")
    if colon and "@" not in text:
        if not place or not function.isidentifier():
            raise ValueError(f"reward={text}: write FILE.py:FUNCTION or MODULE:FUNCTION")
        return Term(function, weight, place)
    if text.endswith(".py"):
        raise ValueError(f"reward={text} names no function of the file: write {text}:FUNCTION")
    name, *models = text.split("@")
    _check(text, name, models)
    return Term(name, weight, models=tuple(models))


def _weight(part: str, number: str) -> float:
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ValueError(f"reward={part}: after = stands the weight, a finite number such as 0.2")
    return weight


def _check(text: str, name: str, models: Sequence[str]) -> None:
    if name not in REWARDS:
        similar = difflib.get_close_matches(name, REWARDS, n=1)
        meant = f"; perhaps you meant {similar[0]}" if similar else ""
        raise ValueError(
            f"reward={name} does not exist{meant}. There are {', '.join(REWARDS)}; a function of your own is "
            "FILE.py:FUNCTION"
        )
    asked = REWARDS[name].models
    if len(models) > len(asked):
        form = "@".join((name, *asked)) if asked else f"{name} alone, since it asks no model"
        raise ValueError(f"reward={text}: write {form}")
    for model in models:
        if not Path(model).exists() and not HUB_NAME.fullmatch(model):
            raise ValueError(f"reward={text}: {model!r} is neither a folder nor OWNER/NAME on the hub")


# ------------------------------------------------------------------------------------------ functions
def load_functions(terms: Sequence[Term]) -> dict[str, RewardFunction]:
    """Import the functions of the user's files and modules; return them by name.

    Raises ValueError if there is no such file, module or function, or it fails as it is imported; TypeError
    if it is no function of (images, prompts, metadata).
    """
    return {term.name: _load_function(term) for term in terms if term.place}


def _load_function(term: Term) -> RewardFunction:
    function: Any = own.load(f"reward={term.text}", term.place, term.name, inspect.isfunction, "function")
    if not callable(function):
        raise TypeError(
            f"reward={term.text} is {function!r:.60}, not a function of (images, prompts, metadata)"
        )
    try:
        inspect.signature(function).bind("images", "prompts", "metadata")
    except ValueError:  # not every callable says what it takes
        pass
    except TypeError as error:
        takes = inspect.signature(function)
        remedy = f"it takes {takes}; give it these three arguments"
        if len(takes.parameters) < 2 and "images" not in takes.parameters:
            line = f"`reward = {term.name}()`"
            remedy = f"if it makes one, add a line such as {line} and give {term.place}:reward"
        raise TypeError(
            f"reward={term.text} is not a function of (images, prompts, metadata): {remedy}"
        ) from error
    return function


# -------------------------------------------------------------------------------------------- rewards
def check(terms: Sequence[Term], images: folders.ImageFolder, prompt: str | None) -> None:
    """Refuse a prompt that does not go with the images, and rewards that lack labels or prompts."""
    folders.check_prompt(images, prompt)
    for term in terms:
        if not term.place:
            folders.check_reward(term.name, images, prompt)


def check_text(terms: Sequence[Term], prompts: Sequence[str], metadata: Mapping[str, Any]) -> None:
    """Refuse rewards of the registry that text-to-image with such prompts cannot have, with a ValueError."""
    for term in terms:
        if not term.place:
            folders.check_text(term.name, prompts, metadata)


def make(
    terms: Sequence[Term], images: folders.ImageFolder | None = None, damages: Sequence[str] = ()
) -> RewardFunction:
    """Make the reward function of the flag: that of a single term without a weight, or the weighted sum.

    Raises ValueError, TypeError as for `load_functions`; RuntimeError if a reward's model cannot be had.
    """
    made = load_functions(terms)
    made |= {t.name: folders.make_reward(t.name, images, t.models, damages) for t in terms if not t.place}
    if len(terms) == 1 and terms[0].weight is None:
        return made[terms[0].name]
    return weighted_sum({t.name: (1.0 if t.weight is None else t.weight, made[t.name]) for t in terms})


def describe(terms: Sequence[Term]) -> str | dict[str, float]:
    """Return what the record of a run says of its reward: its text, or those of a sum with their weights."""
    if len(terms) == 1 and terms[0].weight is None:
        return terms[0].text
    return {term.text: 1.0 if term.weight is None else term.weight for term in terms}
