"""Lay out errors for the command line: with flags in the place of settings, and wrapped."""

import dataclasses
import re
import shutil
import textwrap
from typing import Any

QUOTED = r"`[^`]*`|(?<!\w)'[^']*'|(?<!\w)\"[^\"]*\""


def terminal_width() -> int:
    """Return the columns of the terminal, but 88 at most, and 80 if there is none."""
    return min(88, shutil.get_terminal_size().columns)


def in_flags(message: str, flags: Any) -> str:
    """Return a message with flags in the place of settings: `--num-epochs -1` instead of `num_epochs=-1`.

    What stands in quotes or backticks stays, and so do words without a value or an underscore.
    """
    fields = dataclasses.fields(flags)
    if hasattr(flags, "settings"):
        from ddpo_lessons.config import DDPOConfig

        fields += dataclasses.fields(DDPOConfig)
    elif hasattr(flags, "steps"):
        message = message.replace("sample_num_steps=", "steps=")

    def write(found: re.Match[str]) -> str:
        name, equals, truth, word = found.groups()
        if name is None or not (equals or "_" in name):
            return found[0]
        flag = f"--{'no-' if truth == 'False' else ''}{name.replace('_', '-')}"
        return flag if truth or not equals else f"{flag} {word or ''}"

    names = "|".join(sorted((spec.name for spec in fields), key=len, reverse=True))
    field = rf"(?<![\w./:,=-])(?<!\w\()({names})(?:(=)(?:(True|False)\b|'([\w./@:,=-]+)')?|(?![\w(/]|\.\w))"
    return re.sub(f"{QUOTED}|{field}", write, message)


def wrapped(text: str, indent: int = 2) -> str:
    """Wrap each line of a text for the terminal, but break no flag, path, command or short quotation.

    Commands stand in backticks. Later lines are indented.
    """
    width = terminal_width()
    layout = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    layout.subsequent_indent = " " * indent

    def keep(found: re.Match[str]) -> str:
        is_whole = found[0][0] == "`" or len(found[0]) < width
        return found[0].replace(" ", "\0") if is_whole else found[0]

    lines = (re.sub(QUOTED, keep, line) for line in text.splitlines())
    return "\n".join(map(layout.fill, lines)).replace("\0", " ")
