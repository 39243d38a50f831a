"""What the exercises of the lessons answer with."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any


def check_mine(check: Callable[[Any], None], answer: Any) -> None:
    """Print "correct", or "not yet" and why: the stub is untouched, or which assertion of the check failed.

    Any other exception is the answer's own, and is raised as it is.

    Args:
        check: takes the answer and raises AssertionError where it is wrong.
        answer: the reader's function.
    """
    try:
        check(answer)
    except NotImplementedError as error:
        print(f"not yet: {error}")
    except AssertionError as error:
        failed = traceback.extract_tb(error.__traceback__)[-1].line
        print(f"not yet: {error or failed}")
    else:
        print("correct")
