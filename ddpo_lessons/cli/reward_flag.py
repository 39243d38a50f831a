"""Parse `--reward`: names of the package, users' functions, models by path, and weighted sums."""

import contextlib
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpo_lessons import own
from ddpo_lessons.data.contexts import other_arguments
from ddpo_lessons.data.folders import LABEL, ImageFolder, check_placeholders
from ddpo_lessons.embedded import HUB_NAME
from ddpo_lessons.rewards import REWARDS, RewardFunction, get_reward, weighted_sum
from ddpo_lessons.words import DIGITS, similar


def help_text() -> str:
    """Return the flag's help."""
    asking = ", ".join("@".join((name, *found.models)) for name, found in REWARDS.items() if found.models)
    return (
        "Reward that the run maximizes: a NAME, or FILE.py:FUNCTION or "
        "MODULE:FUNCTION, which is called with (images, prompts, metadata) and returns one reward per image, "
        f"or a weighted sum such as clip_score=1,my.py:red=0.2. NAMEs: {', '.join(REWARDS)}. Some take "
        f"models after @, each as a folder or a name on the hub: {asking}. If left out, the preset's reward."
    )


@dataclass(frozen=True)
class Term:
    """One reward of the flag."""

    name: str  #: of the registry, or of the function
    weight: float | None  #: in the sum; None where none was written
    place: str = ""  #: FILE.py or MODULE of the function; empty for a name of the registry
    #: the given models of the reward, each as a folder or a name on the hub
    models: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The term as it is written, without its weight."""
        return f"{self.place}:{self.name}" if self.place else "@".join((self.name, *self.models))


@contextlib.contextmanager
def called_judge() -> Iterator[None]:
    """Let errors about rewards name the flag `--judge`, which has the syntax of `--reward`."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(str(error).replace("reward=", "judge=")) from error


def parse(text: str) -> tuple[Term, ...]:
    """Parse the flag; raise a ValueError for wrong names, weights and models."""
    if not all(part.partition("=")[0].strip() for part in text.split(",")):
        raise ValueError(f"reward={text} has a term without a name: write NAME or NAME=WEIGHT between commas")
    try:
        terms = tuple(_term(part.strip()) for part in text.split(","))
    except ValueError as error:
        if not (re.search(r"[/\\]|\.py\b", text) and re.search("[,=@]", text)):
            raise
        raise ValueError(f"{error}. If a path holds , = or @, rename it or link to it") from error
    names = [term.name for term in terms]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"reward={text} names {name} twice, and each term is recorded under its name: give it once, "
                "with the sum of the weights, or rename one of two functions"
            )
    if all(term.weight == 0 for term in terms):
        raise ValueError(
            f"reward={text} is 0 for every image, so nothing can be learned: give a weight other than 0"
        )
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
        raise ValueError(f"reward={part}: the weight after = must be a finite number such as 0.2")
    return weight


def _check(text: str, name: str, models: Sequence[str]) -> None:
    if name not in REWARDS:
        raise ValueError(
            f"reward={name} does not exist{similar(name, REWARDS)}: use one of {', '.join(REWARDS)}; a "
            "function of your own is FILE.py:FUNCTION"
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
    """Import users' functions from files and modules; return them by name.

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
    if takes := other_arguments(function):
        remedy = f"it takes {takes}; give it these three arguments"
        if len(takes.parameters) < 2 and "images" not in takes.parameters:
            line = f"`reward = {term.name}()`"
            remedy = f"if it makes one, add a line such as {line} and give {term.place}:reward"
        raise TypeError(f"reward={term.text} is not a function of (images, prompts, metadata): {remedy}")
    return function


# -------------------------------------------------------------------------------------------- rewards
def check(terms: Sequence[Term], images: ImageFolder, prompt: str | None) -> None:
    """Raise a ValueError for a prompt that does not fit the images, or for missing labels or prompts.

    Rewards are those of the registry; what functions of users need is not declared. A ValueError names the
    remedy.
    """
    if prompt is not None:
        check_placeholders(prompt, images)
    if prompt is not None and images.captions is not None:
        raise ValueError(
            f"prompt={prompt!r} is one prompt for all images, but the folder {images.folder} has captions: "
            "drop the prompt, or take them out"
        )
    said = [line for lines in images.captions or () for line in lines]
    said = said or [(prompt or "").replace(LABEL, label) for label in images.classes or ("",)]
    for name in (term.name for term in terms if not term.place):
        _check_labels(name, images)
        if "prompt" in REWARDS[name].needs and not any(line.strip() for line in said):
            raise ValueError(
                f"reward={name!r} scores what the prompt says, but the folder {images.folder} has no "
                "captions: write the prompt of NAME.png into NAME.txt beside it, or give --prompt TEXT"
            )
        _check_words(name, said)


def wanted(terms: Sequence[Term], prompt: str | None) -> str:
    """Return the flags that rewards of img2img need."""
    needs = {need for term in terms if not term.place for need in REWARDS[term.name].needs}
    folder = f"--images FOLDER{' with class subfolders' if {'label', 'digit'} & needs else ''}"
    if prompt is not None or "prompt" not in needs:
        return folder
    return f"{folder}, and --prompt TEXT, or else the prompt of NAME.png in NAME.txt beside it"


def _check_labels(name: str, images: ImageFolder) -> None:
    needs = REWARDS[name].needs
    if {"label", "digit"} & set(needs) and images.labels is None:
        raise ValueError(
            f"reward={name!r} needs to know what the images show, but the folder {images.folder} has no "
            "class subfolders: sort the images into FOLDER/cat, FOLDER/dog, ..."
        )
    if "label" in needs and len(images.classes) < 2:
        raise ValueError(
            f"reward={name!r} compares classes, but the folder {images.folder} has one subfolder, "
            f"{images.classes[0]}: add another"
        )
    if "digit" in needs and (others := [label for label in images.classes if label not in DIGITS]):
        raise ValueError(
            f"reward={name!r} reads digits, but the folder {images.folder} has the subfolder {others[0]}: "
            f"name them {', '.join(DIGITS)}"
        )


def _check_words(name: str, prompts: Sequence[str]) -> None:
    """Raise a ValueError for prompts that a reward cannot read."""
    reads = REWARDS[name].reads
    try:
        if reads is not None:
            reads(prompts)
    except ValueError as error:
        raise ValueError(f"reward={name!r}: {error}") from error


def check_text(
    terms: Sequence[Term], prompts: Sequence[str], metadata: Mapping[str, Any], prompt: str | None
) -> None:
    """Raise a ValueError for rewards whose needs text-to-image with these prompts does not meet."""
    for name in (term.name for term in terms if not term.place):
        needs = REWARDS[name].needs
        if {"image", "target"} & set(needs):
            raise ValueError(f"reward={name!r} also looks at the input image: give {wanted(terms, prompt)}")
        if "label" in needs and "label" not in metadata:
            raise ValueError(
                f"reward={name!r} needs prompts that come with their label, as those of prompts='animals' do"
            )
        _check_words(name, prompts)


def make(terms: Sequence[Term], images: ImageFolder | None = None) -> RewardFunction:
    """Make the reward function of the flag: a single term without a weight, or the weighted sum.

    With images, rewards that compare classes compare the folder's. Raises ValueError, TypeError as for
    `load_functions`; RuntimeError if a reward's model cannot be had.
    """
    made = load_functions(terms)
    for term in terms:
        if term.place:
            continue
        settings: dict[str, Any] = {}
        if images is not None and "label" in REWARDS[term.name].needs:
            settings["classes"] = images.classes
        made[term.name] = get_reward(term.name, *term.models, **settings)
    if len(terms) == 1 and terms[0].weight is None:
        return made[terms[0].name]
    return weighted_sum({t.name: (1.0 if t.weight is None else t.weight, made[t.name]) for t in terms})


def describe(terms: Sequence[Term]) -> str | dict[str, float]:
    """Return the reward's description for the record of a run, with the weights of a sum."""
    if len(terms) == 1 and terms[0].weight is None:
        return terms[0].text
    return {term.text: 1.0 if term.weight is None else term.weight for term in terms}
