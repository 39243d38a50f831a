"""`ddpo-lessons demo · preflight · train · sample · plot · doctor`: words become a call, errors a line.

What a command does is imported when it runs: torch takes seconds to load, and `doctor` runs where it does not
load.
"""

import contextlib
import difflib
import importlib
import io
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from ddpo_lessons import __version__
from ddpo_lessons.app.config_file import expand
from ddpo_lessons.app.flags import in_flags
from ddpo_lessons.app.options import Demo, Doctor, Plot, Preflight, Sample, Train

Command = Demo | Preflight | Train | Sample | Plot | Doctor

# -------------------------------------------------------------------------------------------- parsing
# How values are written, where tyro's own way is another one.
RULES = ConstructorRegistry()
Spec = PrimitiveConstructorSpec | UnsupportedTypeAnnotationError


@RULES.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> Spec | None:
    """`X | None` is written as X: None is the flag that was not given."""
    kinds = [kind for kind in get_args(info.type) if kind is not NoneType]
    if len(kinds) != 1 or NoneType not in get_args(info.type):
        return None
    return ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))


@RULES.primitive_rule
def _number(info: PrimitiveTypeInfo) -> Spec | None:
    """Refuse what is no number in words, not in Python's."""
    kind = info.type
    if kind not in (int, float):
        return None

    def parse(words: list[str]) -> Any:
        try:
            return kind(words[0])
        except ValueError:
            whole = " whole" if kind is int else ""
            raise ValueError(f"{words[0]!r} is not a{whole} number") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.__name__.upper(),
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, int | float),
        str_from_instance=lambda value: [str(value)],
    )


@RULES.primitive_rule
def _comma_list(info: PrimitiveTypeInfo) -> Spec | None:
    """`tuple[X, ...]` is written A,B."""
    if info.type_origin is not tuple:
        return None
    of_one = ConstructorRegistry.get_primitive_spec(
        PrimitiveTypeInfo.make(get_args(info.type)[0], info.markers)
    )
    assert isinstance(of_one, PrimitiveConstructorSpec)

    def parse(words: list[str]) -> tuple[Any, ...]:
        parts = [part.strip() for part in words[0].split(",") if part.strip()]
        if not parts or (of_one.choices and not set(parts) <= set(of_one.choices)):
            raise ValueError(f"{words[0]!r}: use one or more of {', '.join(of_one.choices or ('A', 'B'))}")
        return tuple(of_one.instance_from_str([part]) for part in parts)

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{of_one.metavar},...",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [str(value)],
    )


def parse(argv: Sequence[str]) -> Command:
    """Parse the words after the program's name; a ValueError says what is wrong, and `--help` ends all."""
    kinds = {kind.__name__.lower(): kind for kind in get_args(Command)}
    if argv and argv[0] in kinds:
        words = expand(argv[1:]) if issubclass(kinds[argv[0]], Train) else argv[1:]
        return _parse(kinds[argv[0]], f"ddpo-lessons {argv[0]}", words)
    if argv and not argv[0].startswith("-"):
        raise ValueError(f"there is no command {argv[0]!r}: use one of {', '.join(kinds)}")
    return _parse(Command, "ddpo-lessons", argv)


def _parse(kind: Any, program: str, words: Sequence[str]) -> Any:
    """Let tyro parse; the box of several lines that it prints of an error becomes an exception of one."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                kind, prog=program, args=words, config=(tyro.conf.OmitArgPrefixes,), registry=RULES
            )
    except SystemExit as end:
        if not end.code:
            raise
    text = re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯]", " ", box.getvalue())  # without colours and sides
    _, *parts = re.split("[─-]{5,}", text)  # a title, then what is wrong, then hints
    raise ValueError(_plain(" ".join(" ".join(parts).split())))


def _plain(message: str) -> str:
    """Say what is wrong with a flag without its help, and which flag or choice may have been meant."""
    unknown = re.match(r"Unrecognized options: (.*?) Perhaps you meant: (.*)", message)
    if unknown is not None:  # each is "--flag" or "--short, --flag" or "--flag, --no-flag", then its help
        found = re.findall(r"(?:^|\) )(--[\w-]+)(?:, (?!--no-)(--[\w-]+))?", unknown[2])
        flags = ", ".join(long or first for first, long in found)
        return f"there is no {unknown[1].replace(', ', ' ')}: perhaps {flags}; --help has all flags"
    stray = re.match(r"Unrecognized options: (.*?) For full helptext", message)
    if stray is not None:
        return f"{stray[1]} belongs to no flag: --help has all; a switch such as --overwrite takes no value"
    message = re.sub(r" Argument helptext: .*?(?= For full helptext|$)", ".", message)
    choice = re.match(r"invalid choice '(.*?)' for argument '(.*?)'. Expected one of \((.*?)\)", message)
    if choice is None:
        return message
    names = re.findall(r"'(.*?)'", choice[3])
    close = difflib.get_close_matches(choice[1], names, n=1)
    perhaps = f" (perhaps {close[0]})" if close else ""
    return f"{choice[2]} {choice[1]} does not exist{perhaps}: use one of {', '.join(names)}"


def _own_line(error: BaseException) -> str:
    """Return where in the user's own code an error arose, such as " (mine.py, line 3)", or nothing."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    places = [Path(__file__).parents[1], *(Path(path).resolve() for path in libraries)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_file() and not any(path.is_relative_to(place) for place in places):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def run(command: Command) -> int:
    """Check a command's flags, then do it; return the exit status."""
    if isinstance(command, Demo | Train | Sample):
        command.check()
    status: int = importlib.import_module(f"ddpo_lessons.app.{type(command).__name__.lower()}").run(command)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, of the process's words if none are given, and return the exit status.

    Without a word it prints the help, as pip does. 0; 2 after an error, which is printed in one line; 130
    after Ctrl-C and 143 after SIGTERM, as shells count, also where what was done is saved.
    """
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if argv == ["--version"]:
        print(__version__)
        return 0
    warnings.formatwarning = lambda message, *place, **_: (
        f"warning: {message}\n"
    )  # without a path of the package
    warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks")  # by diffusers, of its own call
    # At import, transformers warns of image processors without torchvision, which nothing here uses.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return run(parse(argv))
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        message = in_flags(" ".join(str(error).split()), argv[0])
        print(f"error: {message}{_own_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # as shells count
    except (Exception, SystemExit) as end:
        place = _own_line(end)
        if not place:  # of --help, or a fault of ours, whose traceback is wanted
            raise
        did = "raised"
        if isinstance(end, KeyError) and end.args == ("image",):
            place += ": metadata has an image only with --images FOLDER"
        if isinstance(end, SystemExit):
            did, place = "ended the program by", f"{place}: raise an error instead"
        print(f"error: your code {did} {end!r}{place}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
