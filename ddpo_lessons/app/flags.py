"""Messages of the package name fields of Python; on the command line they name flags."""

import dataclasses
import re

from ddpo_lessons.config import DDPOConfig

FIELDS = [spec.name for spec in dataclasses.fields(DDPOConfig)] + [
    "noise_strength",
    "resolution",
    "gpu_memory",
    "algorithm",
]
# `name=value`, or the name alone where it has an underscore, which no English word has; not in paths, code
_FIELD = re.compile(r"(?<![\w/\\.`-])([a-z]\w*)(?:=('[^']*'|[\w.+-]*[\w+-]))?(?![\w/\\=])")
_OF_SAMPLE = {"sample_num_steps": "--steps", "sample_guidance_scale": "--guidance-scale"}


def in_flags(message: str, command: str) -> str:
    """Write a message of a command in flags: `resume_from='latest'` as `--resume-from latest`."""
    if command not in ("train", "preflight", "sample"):
        return message

    def replace(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in FIELDS or (value is None and "_" not in name):
            return match[0]
        flag = (_OF_SAMPLE if command == "sample" else {}).get(name, "--" + name.replace("_", "-"))
        if value in ("True", "False"):
            return flag if value == "True" else flag.replace("--", "--no-", 1)
        return flag if value is None else f"{flag} {value.strip(chr(39)) or repr('')}"

    return _FIELD.sub(replace, message)
