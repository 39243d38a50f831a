"""`--reward`: names of the package, functions of the user's files, models by path, and weighted sums.

Nothing here imports torch. A file of the user's may, and everything else is checked before it is imported.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpo_lessons import own
from ddpo_lessons.tiny import HUB_NAME

if TYPE_CHECKING:
    from ddpo_lessons.data.folders import ImageFolder
    from ddpo_lessons.rewards import RewardFunction

# The registry, whose module loads torch, and the models that each reward asks; tests/test_reward_flag.py
# compares them.
REWARDS: dict[str, tuple[str, ...]] = {
    "jpeg_compressibility": (),
    "jpeg_incompressibility": (),
    "colourfulness": (),
    "prompt_alignment": (),
    "animal_alignment": (),
    "clip_score": ("CLIP",),
    "clip_margin": ("CLIP",),
    "clip_change": ("CLIP",),
    "aesthetic_score": ("CLIP", "HEAD"),
    "pick_score": ("MODEL", "PROCESSOR"),
    "distance_penalty": ("NETWORK",),
    "recolouring": (),
    "edit": ("CLIP", "NETWORK"),
}


def known() -> dict[str, tuple[str, ...]]:
    """Return the rewards by name, with those that a program registered which calls the command line."""
    registry = sys.modules.get("ddpo_lessons.rewards")
    mine = {} if registry is None else dict.fromkeys(registry.REWARDS, ())
    return {**mine, **REWARDS}


def help_text() -> str:
    """Return the flag's help."""
    asking = ", ".join("@".join((name, *models)) for name, models in REWARDS.items() if models)
    return (
        "What is trained for; the preset's if not given. A NAME; or FILE.py:FUNCTION or MODULE:FUNCTION, "
        "which is called with (images, prompts, metadata) and returns a reward for each image; or a weighted "
        f"sum, such as clip_score=1,my.py:red=0.2. NAMEs: {', '.join(known())}. After @ stands a folder of a "
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
    def registered(self) -> str:
        """The name in the registry; empty for a function of the user's."""
        return "" if self.place else self.name

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
            raise ValueError(f"--reward {text} names {name} twice: records tell rewards apart by their names")
    return terms


def _term(part: str) -> Term:
    written, equals, number = part.rpartition("=")
    text, weight = (written, _weight(part, number)) if equals else (part, None)
    if "@" in text:
        name, *models = text.split("@")
        _check_name(name)
        _check_models(text, name, models)
        return Term(name, weight, models=tuple(models))
    place, colon, function = text.rpartition(":")
    if colon:
        if not place or not function.isidentifier():
            raise ValueError(f"--reward {text}: write FILE.py:FUNCTION or MODULE:FUNCTION")
        return Term(function, weight, place)
    if text.endswith(".py"):
        raise ValueError(f"--reward {text} names no function of the file: write {text}:FUNCTION")
    _check_name(text)
    return Term(text, weight)


def _weight(part: str, number: str) -> float:
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise ValueError(f"--reward {part}: after = stands the weight, a finite number such as 0.2")
    return weight


def _check_name(name: str) -> None:
    names = known()
    if name not in names:
        similar = difflib.get_close_matches(name, names, n=1)
        meant = f"; perhaps you meant {similar[0]}" if similar else ""
        raise ValueError(
            f"--reward {name} does not exist{meant}. There are {', '.join(names)}; a function of your own is "
            "FILE.py:FUNCTION"
        )


def _check_models(text: str, name: str, models: Sequence[str]) -> None:
    asked = known()[name]
    if len(models) > len(asked):
        form = "@".join((name, *asked)) if asked else f"{name} alone, since it asks no model"
        raise ValueError(f"--reward {text}: write {form}")
    for model in models:
        if not Path(model).exists() and not HUB_NAME.fullmatch(model):
            raise ValueError(f"--reward {text}: {model!r} is neither a folder nor OWNER/NAME on the hub")


# ------------------------------------------------------------------------------------------ functions
def load_functions(terms: Sequence[Term]) -> dict[str, RewardFunction]:
    """Import the functions of the user's files and modules; return them by name.

    Raises ValueError if there is no such file, module or function, or it fails as it is imported; TypeError
    if it is no function of (images, prompts, metadata).
    """
    return {term.name: _load_function(term) for term in terms if term.place}


def _load_function(term: Term) -> RewardFunction:
    function: Any = own.load(f"--reward {term.text}", term.place, term.name, inspect.isfunction, "function")
    if not callable(function):
        raise TypeError(
            f"--reward {term.text} is {function!r:.60}, not a function of (images, prompts, metadata)"
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
            f"--reward {term.text} is not a function of (images, prompts, metadata): {remedy}"
        ) from error
    return function


# -------------------------------------------------------------------------------------------- rewards
def check(terms: Sequence[Term], images: ImageFolder, prompt: str | None) -> None:
    """Refuse rewards of the registry that lack labels or prompts, with a ValueError."""
    from ddpo_lessons.data.folders import check_needs, check_prompt

    for term in terms:
        check_needs(term.registered, images)
        check_prompt(term.registered, images, prompt)


def check_text(terms: Sequence[Term], prompts: Sequence[str], metadata: Mapping[str, Any]) -> None:
    """Refuse rewards of the registry that text-to-image with such prompts cannot have, with a ValueError."""
    from ddpo_lessons.data import folders

    for term in terms:
        folders.check_text(term.registered, prompts, metadata)


def make(
    terms: Sequence[Term], images: ImageFolder | None = None, damages: Sequence[str] = ()
) -> RewardFunction:
    """Make the reward function of the flag: that of a single term without a weight, or the weighted sum.

    Raises ValueError, TypeError as for `load_functions`; RuntimeError if a reward's model cannot be had.
    """
    from ddpo_lessons.data.folders import make_reward
    from ddpo_lessons.rewards import weighted_sum

    functions = load_functions(terms)
    made = {
        term.name: (
            functions[term.name] if term.place else make_reward(term.name, images, term.models, damages)
        )
        for term in terms
    }
    if len(terms) == 1 and terms[0].weight is None:
        return made[terms[0].name]
    weights = {term.name: 1.0 if term.weight is None else term.weight for term in terms}
    return weighted_sum({name: (weight, made[name]) for name, weight in weights.items()})


def describe(terms: Sequence[Term]) -> str | dict[str, float]:
    """Return what the record of a run says of its reward: its text, or those of a sum with their weights."""
    if len(terms) == 1 and terms[0].weight is None:
        return terms[0].text
    return {term.text: 1.0 if term.weight is None else term.weight for term in terms}
