"""Lay out errors for the command line: with flags in the place of settings, and wrapped."""

import dataclasses
import re
import shutil
import textwrap
from typing import Any

QUOTED = r"`[^`]*`|(?<!\w)'(?:\\.|[^'\\])*'|(?<!\w)\"(?:\\.|[^\"\\])*\""
FIELD = r"""
(?<![\w./:,=-]) (?<!\w\()  # not within a word, a path or a flag, and not an argument of a function
(?P<name>{names})
(?: = (?: (?P<truth>True|False)\b | '(?P<word>[\w./@:,=-]+)' )?  # a word is written without its quotes
  | (?! [\w(/] | \.\w ) )
"""


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
    elif hasattr(flags, "steps"):  # of `sample`
        message = message.replace("sample_num_steps=", "steps=")

    def write(found: re.Match[str]) -> str:
        name, truth, word = found.group("name", "truth", "word")
        has_value = name is not None and "=" in found[0]
        if name is None or not (has_value or "_" in name):
            return found[0]
        flag = f"--{'no-' if truth == 'False' else ''}{name.replace('_', '-')}"
        return f"{flag} {word or ''}" if has_value and not truth else flag

    names = "|".join(sorted((spec.name for spec in fields), key=len, reverse=True))
    return re.sub(f"{QUOTED}|{FIELD.format(names=names)}", write, message, flags=re.VERBOSE)


def wrapped(text: str, indent: int = 2) -> str:
    """Wrap each line of a text for the terminal, but break no word, command or short quotation.

    Commands stand in backticks. The lines that a line is broken into are indented, except the first one.
    """
    width = terminal_width()
    layout = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    layout.subsequent_indent = " " * indent

    def keep(found: re.Match[str]) -> str:
        is_whole = found[0][0] == "`" or len(found[0]) < width
        return found[0].replace(" ", "\0") if is_whole else found[0]

    lines = (re.sub(QUOTED, keep, line) for line in text.splitlines())
    return "\n".join(map(layout.fill, lines)).replace("\0", " ")
