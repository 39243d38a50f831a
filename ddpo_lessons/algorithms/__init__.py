"""Algorithms: how rewards weigh samples, and the loss; one file each, to be read from top to bottom.

To add one, write a file with a subclass of `base.Algorithm` and register it here. Modules are imported when
an algorithm is made: the command line has the names before torch loads.
"""

from __future__ import annotations

import ast
import difflib
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddpo_lessons.algorithms.base import Algorithm

ALGORITHMS = {  # module: class
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


def settings_of(name: str) -> dict[str, str]:
    """Return an algorithm's settings and their types, read in its file: importing it would load torch."""
    tree = ast.parse(Path(__file__).with_name(f"{name}.py").read_text("utf-8"))
    made = [
        function.args.args[1:]  # without self
        for kind in tree.body
        if isinstance(kind, ast.ClassDef) and kind.name == ALGORITHMS[name]
        for function in kind.body
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
    ]
    return {
        argument.arg: ast.unparse(argument.annotation) if argument.annotation else "str"
        for arguments in made
        for argument in arguments
    }


def _similar(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (perhaps {close[0]})" if close else ""


def _check_settings(name: str, settings: Iterable[str]) -> None:
    known = settings_of(name)
    for key in settings:
        if key not in known:
            raise ValueError(
                f"algorithm={name!r} has no setting {key!r}{_similar(key, known)}: "
                f"it has {', '.join(known) or 'none'}"
            )


def parse_algorithm(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and settings of "nft" or "nft:beta=0.1,max_decay=0"; a ValueError names what there is."""
    name, _, listed = text.partition(":")
    if name not in ALGORITHMS:
        raise ValueError(
            f"algorithm={name!r} does not exist{_similar(name, ALGORITHMS)}: "
            f"use one of {', '.join(ALGORITHMS)}"
        )
    settings: dict[str, Any] = {}
    for item in filter(None, listed.split(",")):
        key, equals, value = item.partition("=")
        if not (equals and value):
            raise ValueError(f"algorithm={text!r}: write settings as {name}:KEY=VALUE,KEY=VALUE")
        settings[key.strip()] = value.strip()
    _check_settings(name, settings)
    kinds = settings_of(name)
    return name, {key: _read(key, value, kinds[key]) for key, value in settings.items()}


def _read(key: str, value: str, kind: str) -> Any:
    """Read a setting of a type such as "bool", "float | None" or "SDE"."""
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
    """Make an algorithm of a text as `parse_algorithm` reads it; a ValueError says what does not fit."""
    name, read = parse_algorithm(text)
    kind = getattr(importlib.import_module(f"{__name__}.{name}"), ALGORITHMS[name])
    _check_settings(name, settings)
    settings = {**read, **settings}
    try:
        return kind(**settings)
    except TypeError as error:  # a word in the place of a number
        raise ValueError(f"algorithm={name!r} does not take {settings}: {error}") from error
