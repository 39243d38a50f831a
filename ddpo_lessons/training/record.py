"""Describe the parts of a run, for config.json and checkpoints, so that a resume can compare them."""

import functools
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpo_lessons.config import RUN, DDPOConfig

CONFIG = "config.json"
METRICS = "metrics.jsonl"
# Fields that say where a run lies and how it is continued; another value of theirs is no news.
_SILENT = {"resume_from", "overwrite", "output_dir", "logdir", "run_name", "exp_name", "train_lora_from"}


def name_of(function: Any) -> str | None:
    """Return `module:qualname` of a function (also a wrapped one) or of an object's class."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", "builtins")  # which a bound method of a built-in class lacks
    return None if "<lambda>" in named.__qualname__ else f"{module}:{named.__qualname__}"


def changes(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Return the allowed changes of a resumed run as text: `name old → new`."""
    return [
        f"{name} {saved[name]} → {value}"
        for name, value in mine.items()
        if name in saved and name not in _SILENT and saved[name] != value
    ]


def read_run(folder: Path) -> tuple[DDPOConfig, dict[str, Any]]:
    """Read config and record from a run's config.json; raise a ValueError if it is damaged or missing."""
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return DDPOConfig.from_dict(values), dict(values.get(RUN, {}))
    except OSError as error:
        raise ValueError(f"{folder} holds no {CONFIG}: give the folder of a run") from error
    except (TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / CONFIG} is damaged ({error}): restore it") from error
