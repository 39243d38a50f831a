"""Provide lists that are printed as one line per element, also in notebooks, and wrap long lines."""

import textwrap
from typing import TypeVar

T = TypeVar("T")


class Lines(list[T]):
    """A list that is shown as one line per element."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self))


def wrap(text: str, indent: int, width: int = 88) -> str:
    """Wrap a line, by default as wide as a notebook's output; later lines are indented."""
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_long_words=False)
