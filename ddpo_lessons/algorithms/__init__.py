"""Find algorithms by name. Each one is a file that can be read from top to bottom.

To add one, write a file with a subclass of `algorithm.Algorithm` and register it in `ALGORITHMS`. Its module
is imported when the algorithm is made, because diffusers takes seconds to load.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddpo_lessons import own
from ddpo_lessons.words import similar

if TYPE_CHECKING:
    from ddpo_lessons.algorithms.algorithm import Algorithm

ALGORITHMS = {  # name of the algorithm and of its module: class
    "ddpo": "DDPO",
    "branching": "Branching",
    "rwr": "RWR",
    "flow_grpo": "FlowGRPO",
    "awm": "AWM",
    "nft": "NFT",
    "pepg": "PEPG",
    "dpo": "DPO",
    "draft": "DRaFT",
    "refl": "ReFL",
}


# FILE.py:CLASS:KEY=VALUE,KEY=VALUE. Settings follow a second colon, and a path may also contain colons.
_OWN = re.compile(r"(.+?):([^\W\d]\w*)(?::(.*))?")


def parse_algorithm(text: str) -> tuple[str, dict[str, str]]:
    """Split "nft" or "nft:beta=0.1,max_decay=0" into the name and the settings, which stay text.

    The name of a user's class is FILE.py:CLASS or MODULE:CLASS. Raises a ValueError for a wrong name or
    syntax.
    """
    name, _, listed = text.partition(":")
    if name not in ALGORITHMS:
        own_class = _OWN.fullmatch(text)
        if own_class is None and name.endswith(".py"):
            raise ValueError(f"algorithm={text!r} names no class of the file: write {name}:CLASS")
        if own_class is None:
            raise ValueError(
                f"algorithm={name!r} does not exist{similar(name, ALGORITHMS)}: "
                f"use one of {', '.join(ALGORITHMS)}; a class of your own is FILE.py:CLASS"
            )
        name, listed = f"{own_class[1]}:{own_class[2]}", own_class[3] or ""
    settings: dict[str, str] = {}
    for item in filter(None, listed.split(",")):
        key, equals, value = item.partition("=")
        if not (equals and value):
            raise ValueError(f"algorithm={text!r}: write settings as {name}:KEY=VALUE,KEY=VALUE")
        settings[key.strip()] = value.strip()
    return name, settings


def is_own(name: str) -> bool:
    """Return whether a name of `parse_algorithm` is that of a user's class."""
    return name not in ALGORITHMS


def _read(key: str, value: str, kind: str) -> Any:
    """Parse a setting of a type such as "bool", "float | None" or "SDE"."""
    kind, _, other = kind.partition(" | ")
    if value.lower() == "none" and other == "None":
        return None
    readers: dict[str, Callable[[str], Any]] = {"int": int, "float": float}
    readers["bool"] = {"true": True, "false": False}.__getitem__
    try:
        return readers[kind](value.lower()) if kind in readers else value
    except (KeyError, ValueError) as error:
        wanted = {"bool": "true or false", "int": "a whole number", "float": "a number"}[kind]
        raise ValueError(f"{key}={value} must be {wanted}") from error


def make_algorithm(text: str, **settings: Any) -> Algorithm:
    """Make an algorithm from text in the syntax of `parse_algorithm`; raise a ValueError if it is wrong."""
    name, written = parse_algorithm(text)
    kind: type[Algorithm] = (
        _load_own(name)
        if is_own(name)
        else getattr(importlib.import_module(f"{__name__}.{name}"), ALGORITHMS[name])
    )
    known = settings_of(kind)
    for key in (*written, *settings):
        if key not in known:
            raise ValueError(
                f"algorithm={name!r} has no setting {key!r}{similar(key, known)}: "
                f"it has {', '.join(known) or 'none'}"
            )
    settings = {key: _read(key, value, known[key]) for key, value in written.items()} | settings
    try:
        algorithm = kind(**settings)
        kept = algorithm.identity()
    except (TypeError, ValueError) as error:
        of_settings = f" of {settings}" if settings else ""
        raise ValueError(f"algorithm={name!r} cannot be made{of_settings}: {error}") from error
    for key in settings.keys() - kept.keys():
        raise ValueError(
            f"algorithm={name!r} leaves {key!r} out of what its identity() returns: put it in, for a resume "
            "compares what stands there"
        )
    return algorithm


def settings_of(kind: type[Algorithm]) -> dict[str, str]:
    """Return the types of the constructor's arguments, from annotations or else from defaults."""
    found = {}
    for name, argument in inspect.signature(kind).parameters.items():
        if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            annotation: Any = argument.annotation
            if annotation is argument.empty:
                annotation = type(argument.default)
            text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
            found[name] = re.sub(r"(?:typing\.)?Optional\[(\w+)\]", r"\1 | None", text)
    return found


def _load_own(name: str) -> type[Algorithm]:
    def is_algorithm(value: Any) -> bool:
        from ddpo_lessons.algorithms.algorithm import Algorithm

        return isinstance(value, type) and issubclass(value, Algorithm)

    place, _, called = name.rpartition(":")
    kind = own.load(f"algorithm={name!r}", place, called, is_algorithm, "subclass of Algorithm")
    if not is_algorithm(kind):
        raise ValueError(
            f"algorithm={name!r} is no subclass of ddpo_lessons.algorithms.algorithm.Algorithm, as DDPO is: "
            "let it be one"
        )
    if not hasattr(kind, "name"):
        raise ValueError(f"algorithm={name!r} has no name: begin the class with name = {called.lower()!r}")
    if called in ALGORITHMS.values() and not kind.__module__.startswith(f"{__name__}."):
        raise ValueError(
            f"algorithm={name!r} is called as one of the package is: rename the class, for records tell "
            "algorithms apart by their classes' names"
        )
    return kind
