"""Load a user's own function or class from a file or module."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load(written: str, place: str, name: str, is_such: Callable[[Any], bool], such: str) -> Any:
    """Import `name` from `place`, which is FILE.py or MODULE.

    Args:
        written: the beginning of error messages, such as "--reward my.py:red".
        place: a path that ends in .py, or the name of a module of the current folder or an installed one.
        name: the name of the function or class.
        is_such: returns whether a value is of the wanted kind. If the module has nothing called `name`, the
            error lists its values of this kind.
        such: a word for this kind, such as "function".

    Raises:
        ValueError: there is no such file, module or name, or the file fails as it is imported.
    """
    module = _import(written, place)
    if not hasattr(module, name):
        own = inspect.getmembers(module, lambda value: is_such(value) and value.__module__ == module.__name__)
        there = ", ".join(found for found, _ in own) or f"no {such}"
        raise ValueError(f"{written}: {place} has no {name!r}; it has {there}")
    return getattr(module, name)


def _import(written: str, place: str) -> Any:
    """Import a module as `python -m` would from its folder, or the current one, but after installed ones."""
    name, folder = place, Path.cwd()
    file = Path(name).resolve() if name.endswith(".py") else None
    if file is not None:
        if not file.is_file():
            raise ValueError(f"{written}: there is no file {name}")
        name, folder = file.stem, file.parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        module = importlib.import_module(name)
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"{written} cannot be imported: {_describe(error, place)}") from error
    if file is not None and Path(module.__file__ or "").resolve() != file:
        raise ValueError(f"{written}: another module is called {name} ({module.__file__}): rename the file")
    return module


def _describe(error: Exception, place: str) -> str:
    """Describe an error, with the last line of the user's file that was reached."""
    if isinstance(error, ModuleNotFoundError) and error.name == place:
        return f"there is no module {place} in {Path.cwd()}, and none is installed"
    frames = traceback.extract_tb(error.__traceback__)
    reached = [frame for frame in frames if Path(frame.filename).stem == Path(place).stem]
    line = f" (line {reached[-1].lineno} of {Path(reached[-1].filename).name})" if reached else ""
    return f"{type(error).__name__}: {error}{line}"
