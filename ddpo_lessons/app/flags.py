"""Messages of the package name fields of Python; on the command line they name flags."""

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Iterator

from ddpo_lessons.config import DDPOConfig

FIELDS = [spec.name for spec in dataclasses.fields(DDPOConfig)] + [
    "noise_strength",
    "resolution",
    "gpu_memory",
    "algorithm",
    "reward",
    "prompt",
    "prompts",
    "folder",
    "damages",
]
# `name=value`, or the name alone where it has an underscore, which no English word has; not in paths, code
_FIELD = re.compile(r"(?<![\w/\\.`-])([a-z]\w*)(?:=('[^']*'|[\w.+-]*[\w+-]))?(?![\w/\\=])")
_OF_SAMPLE = {"sample_num_steps": "--steps", "sample_guidance_scale": "--guidance-scale"}
_OTHERS = {"folder": "--images", "damages": "--damage"}


def in_flags(message: str, command: str) -> str:
    """Write a message of a command in flags: `resume_from='latest'` as `--resume-from latest`."""
    if command not in ("train", "preflight", "sample"):
        return message

    def replace(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in FIELDS or (value is None and "_" not in name):
            return match[0]
        others = {**_OTHERS, **(_OF_SAMPLE if command == "sample" else {})}
        flag = others.get(name, "--" + name.replace("_", "-"))
        if value in ("True", "False"):
            return flag if value == "True" else flag.replace("--", "--no-", 1)
        return flag if value is None else f"{flag} {shlex.quote(value.strip(chr(39)))}"

    return _FIELD.sub(replace, message)


@contextlib.contextmanager
def refused_by(**flags: str) -> Iterator[None]:
    """Write what a block refuses in train's flags; `reward="judge"` says --judge where it says --reward."""
    try:
        yield
    except (ValueError, TypeError) as error:
        message = in_flags(str(error), "train")
        for flag, other in flags.items():
            message = message.replace(f"--{flag}", f"--{other}")
        raise ValueError(message) from error
