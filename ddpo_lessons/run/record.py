"""What a run was made with: config.json and checkpoints keep it, a resume compares it, `sample` reads it.

Nothing here needs torch, so that the command line looks at a run before torch loads.
"""

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpo_lessons.config import RUN, DDPOConfig

CONFIG = "config.json"
METRICS = "metrics.jsonl"
# What a run got its samples and scores from: by its name, as the command line knows it, and by its function.
SOURCES = (("reward", "reward_function"), ("prompts", "prompt_function"), ("images", ""))
_PLACES = ("folder", "file")  # which say where something lies, not what it is
# Fields that say where a run lies and how it is continued; another value of theirs is no news.
_SILENT = {
    "resume_from", "resume_anyway", "overwrite", "output_dir", "logdir", "run_name", "exp_name",
    "train_lora_from",
}  # fmt: skip


def name_of(function: Any) -> str | None:
    """Return `module:qualname` of a function, what it wraps, or an object's class; a lambda has none."""
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return None if "<lambda>" in named.__qualname__ else f"{named.__module__}:{named.__qualname__}"


def changed_sources(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, str]:
    """Compare where samples and scores come from, as far as the records of both runs know it.

    Returns for each source that differs what is there and what is here.
    """
    changed = {}
    for name, function in SOURCES:
        both = [key for key in (name, function) if key in saved and key in mine]
        if both and not _is_same(saved[both[0]], mine[both[0]]):
            changed[name] = f"{name}: {_show(saved[both[0]])} there, {_show(mine[both[0]])} here"
    return changed


def _is_same(saved: Any, mine: Any) -> bool:
    if isinstance(saved, dict) and isinstance(mine, dict):  # a folder or file may have been moved
        return all(saved.get(key) == mine.get(key) for key in {*saved, *mine} - set(_PLACES))
    if isinstance(saved, str) and isinstance(mine, str):  # a function may have moved to another module
        return saved.rpartition(":")[2] == mine.rpartition(":")[2]
    return saved == mine


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {part!r}" for key, part in value.items())
    return str(value)


def continued(
    saved: Mapping[str, Any], mine: Mapping[str, Any], changed: Mapping[str, str]
) -> dict[str, Any]:
    """Return the record of a continued run: what it knows, and what its beginning knew and still holds."""
    gone = {key for name, function in SOURCES if name in changed for key in (name, function)}
    return {**{key: value for key, value in saved.items() if key not in gone}, **mine}


def changed_fields(saved: Mapping[str, Any], config: DDPOConfig) -> list[str]:
    """Return what a continuation does otherwise that it may: `field old → new`."""
    mine = config.to_dict()
    return [
        f"{name} {saved[name]} → {value}"
        for name, value in mine.items()
        if name in saved and name not in _SILENT and saved[name] != value
    ]


def read_run(folder: Path) -> tuple[DDPOConfig, dict[str, Any]]:
    """Read config and record, if any, from a run's config.json; a ValueError if it is damaged or missing."""
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return DDPOConfig.from_dict(values), dict(values.get(RUN, {}))
    except OSError as error:
        raise ValueError(f"{folder} holds no {CONFIG}: give the folder of a run") from error
    except (TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder / CONFIG} is damaged ({error}): restore it") from error


def digest_of(parts: Sequence[str]) -> str:
    """Return a short hash of some texts, in their order."""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=6).hexdigest()
