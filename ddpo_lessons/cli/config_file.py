"""Read `--config FILE`: flags in a YAML file, or the config.json of a run.

Both become words before the user's own. A value of the file is therefore parsed and checked like the flag of
its name, and a flag on the command line overrides it.
"""

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from ddpo_lessons.algorithms import ALGORITHMS
from ddpo_lessons.cli.options import Train
from ddpo_lessons.config import RUN, DDPOConfig

# Of a run's config.json: what says where that run lies and what it resumed.
_PLACES = {"output_dir", "logdir", "run_name", "exp_name", "resume_from", "overwrite"}
_KINDS = {**get_type_hints(Train), **get_type_hints(DDPOConfig)}
_LISTS = ("reward", "judge", "damage", "severity", "train_lora_target_modules")
FLAGS = {spec.name for spec in dataclasses.fields(Train)} - {"settings", "config"}
FIELDS = {spec.name for spec in dataclasses.fields(DDPOConfig)}


def expand(words: Sequence[str]) -> list[str]:
    """Return the words of a command with those of its `--config` file before them.

    Raises ValueError if the file is missing, holds no mapping, or a name that is no flag.
    """
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == "--config":
            if not equals and place + 1 == len(words):
                raise ValueError("--config needs a file: the config.json of a run, or YAML")
            path = Path(value if equals else words[place + 1])
            rest = [*words[:place], *words[place + (1 if equals else 2) :]]
            return [*_words(path, rest), *rest]
    return list(words)


def _words(path: Path, given: Sequence[str]) -> list[str]:
    values = _read(path)
    if RUN in values:
        try:
            values = _of_run(path, values, given)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"--config {path} is damaged: {RUN!r} is not what a run writes") from error
    if "lr" in values:  # as the flag --lr
        values = {"train_learning_rate": values.pop("lr"), **values}
    for name, value in values.items():
        if name not in FLAGS | FIELDS:
            close = difflib.get_close_matches(str(name), [*FLAGS, *FIELDS], n=1)
            hint = f": perhaps you meant `{close[0]}`" if close else ": use the names of train's flags"
            raise ValueError(f"--config {path} has {name!r}, which is no setting{hint}")
        if value is not None:
            _check_kind(path, name, value)
    flags = {word.partition("=")[0] for word in given}
    if flags & {"--prompt", "--prompts", "--images"}:  # one of them replaces any other
        values = {n: v for n, v in values.items() if n not in ("prompt", "prompts")}
    return [word for name, value in values.items() if value is not None for word in _written(name, value)]


def _check_kind(path: Path, name: str, value: Any) -> None:
    """Raise a ValueError for values that YAML changes, such as `no`, which becomes false."""
    if isinstance(value, bool) and _KINDS[name] is not bool:
        raise ValueError(
            f'--config {path}: {name} reads as {str(value).lower()}: write it in quotes, as "no"'
        )
    if _KINDS[name] is bool and not isinstance(value, bool):
        raise ValueError(f"--config {path}: {name} is {value!r}: write true or false")
    if isinstance(value, list) and name not in _LISTS:
        raise ValueError(f"--config {path}: {name} is a list, where one value belongs")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"--config {path} is not a file: give the config.json of a run, or YAML")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise ValueError(f"--config {path} is neither JSON nor YAML: {reason}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--config {path} holds no settings: write lines such as `num_epochs: 5`")
    return values


def _written(name: str, value: Any) -> list[str]:
    """Convert a setting to words of the command line."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    if isinstance(value, list):
        words = list(map(str, value))
        return [flag, ",".join(words)] if name in ("reward", "judge") else [flag, *words]
    return [flag, str(value)]


def _of_run(path: Path, values: Mapping[str, Any], given: Sequence[str]) -> dict[str, Any]:
    """Return the flags that repeat the run of a config.json."""
    record, asked = values[RUN], {word.partition("=")[0] for word in given}
    empty: tuple[Any, ...] = ("", {}, None)  # no words for these, and all are defaults
    settings = {n: v for n, v in values.items() if n not in {RUN, *_PLACES} and v not in empty}
    same = ("model", "preset", "judge", "noise_strength", "resolution")
    flags = {name: record[name] for name in same if name in record}
    if "reward" in record:
        reward = record["reward"]
        terms = (
            [reward] if isinstance(reward, str) else [f"{term}={weight}" for term, weight in reward.items()]
        )
        flags["reward"] = ",".join(terms)
    elif "--reward" not in asked:
        raise ValueError(f"--config {path}: a script gave that run its reward: give --reward")
    prompts, images = record.get("prompts", {}), record.get("images")
    if images is not None:
        flags |= {"images": images["folder"], "damage": images["damages"] or None}
        flags["severity"] = images["severities"] or None
    if prompts.get("prompt"):
        flags["prompt"] = prompts["prompt"]
    elif "name" in prompts or "file" in prompts:
        flags["prompts"] = prompts.get("file") or prompts["name"]
    if "--algorithm" not in asked:
        flags["algorithm"] = _algorithm_of_run(path, record)
    return {**settings, **flags}


def _algorithm_of_run(path: Path, record: Mapping[str, Any]) -> str | None:
    """Return the value of `--algorithm` for the algorithm of a run, or None if its record has none."""
    settings = dict(record.get("algorithm", {}))
    if "own_algorithm" in record or not settings:
        return record.get("own_algorithm")
    modules = {kind: module for module, kind in ALGORITHMS.items()}
    kind = settings.pop("name")
    if kind not in modules:
        raise ValueError(f"--config {path}: a script gave that run its algorithm: give --algorithm")
    return ":".join(filter(None, [modules[kind], ",".join(f"{n}={v}" for n, v in settings.items())]))
