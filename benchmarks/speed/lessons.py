"""Run a lesson from top to bottom, as Jupyter's "Run all" does, with IPython alone.

`make gpu` runs this file where there may be no Jupyter.
"""

import contextlib
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from benchmarks.common import ROOT

LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))


class Shell(InteractiveShell):
    """A shell without a terminal, a window and a history."""

    def __init__(self) -> None:
        super().__init__(config=Config({"HistoryManager": {"enabled": False}}))

    def enable_gui(self, gui: Any = None) -> None:
        """Do nothing: `%matplotlib inline` opens no window."""


def play(
    lesson: Path,
    changes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    last: str | None = None,
    only: Collection[str] = (),
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Run a lesson; return its variables. What a cell raises is raised, with a note that names the cell.

    After the cells whose ids are in `changes` variables get other values. The cell with the id `last` is the
    last one that runs, if given; if `only` has ids, only these cells run, and those in `without` do not.
    Raises a KeyError for an id that no code cell has.
    """
    cells = json.loads(lesson.read_text("utf-8"))["cells"]
    named = {*changes, *only, *without, *([] if last is None else [last])}
    if absent := named - {cell.get("id") for cell in cells if cell["cell_type"] == "code"}:
        raise KeyError(f"{lesson.name} has no code cell {', '.join(sorted(absent))}")
    main = sys.modules["__main__"]  # which a shell replaces by the lesson's variables
    shell = Shell.instance()  # what `get_ipython` returns
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(sys.modules.__setitem__, "__main__", main)
        at_the_end.callback(Shell.clear_instance)  # the caller's `get_ipython` returns None again
        at_the_end.enter_context(contextlib.chdir(lesson.parent))
        for number, cell in enumerate(cells):
            name = cell.get("id")
            if cell["cell_type"] != "code" or name in without or (only and name not in only):
                continue
            result = shell.run_cell("".join(cell["source"]))
            error = result.error_before_exec or result.error_in_exec
            if error is not None:
                error.add_note(f"cell {number}")
                raise error
            shell.user_ns.update(changes.get(name, {}))
            if last is not None and name == last:
                break
    return dict(shell.user_ns)


def first_failure(lesson: Path) -> str:
    """Run a lesson up to the first cell that raises; return in a line which and why, or "" if none does."""
    try:
        play(lesson)
    except Exception as error:
        (reason, *_) = [*str(error).splitlines(), ""]
        return f"{error.__notes__[-1]}: {type(error).__name__}: {reason}"
    return ""


if __name__ == "__main__":
    sys.exit(first_failure(Path(sys.argv[1])) or 0)
