"""Provide lists that are printed as one line per element, also in notebooks."""

from typing import TypeVar

T = TypeVar("T")


class Lines(list[T]):
    """A list that is shown as one line per element."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self))
