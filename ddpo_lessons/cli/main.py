"""Run `ddpo-lessons demo · preflight · train · sample · plot · doctor`, and print errors.

A command imports what it needs when it runs, because torch takes a second to load and diffusers four, and
`doctor` must also run where they cannot be loaded.
"""

import functools
import importlib
import operator
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from ddpo_lessons import __version__
from ddpo_lessons.cli.messages import in_flags, wrapped
from ddpo_lessons.words import similar

PACKAGE = Path(__file__).resolve().parents[1]
# Each command has a module with the function `run(flags)`; its flags are a class of `options`.
COMMANDS = {
    "demo": "Train an img2img model to find an animal in confetti.",
    "preflight": "Run a first epoch, and check it for faults that raise no error.",
    "train": "Train a model on a reward.",
    "sample": "Generate images with a trained model, from prompts or images.",
    "plot": "Plot the rewards, other curves and images of runs.",
    "doctor": "Check what works on this machine.",
}
EXAMPLES = {
    "demo": "ddpo-lessons demo --epochs 2 --eval-images 100",
    "preflight": "ddpo-lessons preflight --reward colorfulness",
    "train": "ddpo-lessons train --reward colorfulness --num-epochs 20 --output-dir try",
    "sample": "ddpo-lessons sample --run try",
    "plot": "ddpo-lessons plot try",
    "doctor": "ddpo-lessons doctor",
}
HELP = "\n".join(
    ["usage: ddpo-lessons COMMAND [FLAGS]\n"]
    + [f"  {name:10} {about}" for name, about in COMMANDS.items()]
    + ["\n`ddpo-lessons COMMAND --help` shows the flags of a command. To begin, run"]
    + ["`ddpo-lessons doctor`, then `ddpo-lessons demo`, which takes some minutes."]
)
# Paragraphs of the help of train and preflight, of one line each, because tyro does not wrap them.
REQUIRED = "Give --reward or --preset. All other flags have defaults."
MORE = f"{REQUIRED} See all: --help-all"
SEVERAL_GPUS = "On several GPUs:\n  accelerate launch -m ddpo_lessons.cli"


def _flags(name: str) -> Any:
    module = "doctor" if name == "doctor" else "options"
    return getattr(importlib.import_module(f"ddpo_lessons.cli.{module}"), name.capitalize())


def parse(argv: Sequence[str]) -> Any:
    """Parse the command line, without the program's name, into a command's flags.

    Raises SystemExit with 0 after `--help`, SystemExit with 2 after tyro's message about words that it cannot
    parse, and a ValueError for an unknown command or a wrong `--config` file.
    """
    name, *words = argv
    config = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
    if name not in COMMANDS and not name.startswith("-"):
        known = ", ".join(COMMANDS)
        raise ValueError(f"there is no command {name!r}{similar(name, COMMANDS)}: use one of {known}")
    if name not in COMMANDS:  # shell completion, or a mistake that tyro reports
        return tyro.cli(
            functools.reduce(operator.or_, map(_flags, COMMANDS)),
            prog="ddpo-lessons",
            args=argv,
            config=config,
        )
    flags, about = _flags(name), f"{COMMANDS[name]}\n\nExample:\n  {EXAMPLES[name]}"
    if name in ("train", "preflight"):
        from ddpo_lessons.cli.config_file import expand
        from ddpo_lessons.cli.options import common_flags

        if "--help-all" in words:
            words, about = ["--help"], f"{about}\n\n{SEVERAL_GPUS} {name} FLAGS\n\n{REQUIRED}"
        elif {"--help", "-h"} & {*words}:
            flags, about = common_flags(), f"{about}\n\n{MORE}"
        else:
            words = expand(words)
    return tyro.cli(flags, prog=f"ddpo-lessons {name}", description=about, args=words, config=config)


def _own_line(error: BaseException) -> str:
    """Return where in the user's code an error was raised, such as " (mine.py, line 3)", or ""."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    places = [PACKAGE, *(Path(path).resolve() for path in libraries)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_file() and not any(path.is_relative_to(place) for place in places):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def _output_is_closed() -> bool:
    """Return whether nobody reads what is printed, as after `| head`; if so, discard what is left."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at its end
        return True
    return False


def run(name: str, flags: Any) -> int:
    """Check the flags of a command, run it, and return the exit status."""
    if hasattr(flags, "check"):
        flags.check()
    home = "lessons" if name == "demo" else "cli"
    status: int = importlib.import_module(f"ddpo_lessons.{home}.{name}").run(flags)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, by default that of the process's command line, and return the exit status.

    The status is 0 after success and 2 after an error, which is printed (tyro prints its own). As in shells
    it is 130 after Ctrl-C and 143 after SIGTERM, even if the run was saved, and 141 if nobody reads the
    output any more, as after `| head`. Without arguments the function prints the help, as pip does.
    """
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if argv[0] == "help":
        argv = [*argv[1:2], "--help"]
    flags: Any = None

    def translated(message: object) -> str:  # before flags are parsed, messages are about the names in a file
        return str(message) if flags is None else in_flags(str(message), flags)

    def format_warning(message: object, category: object, filename: str, *_: object) -> str:
        is_ours = Path(filename).resolve().is_relative_to(PACKAGE)
        return f"{wrapped(f'warning: {translated(message) if is_ours else message}')}\n"  # without a path

    warnings.formatwarning = format_warning  # type: ignore[assignment]
    try:
        if argv in (["--version"], ["-V"], ["--help"], ["-h"]):
            print(HELP if argv[0] in ("--help", "-h") else __version__, flush=True)
            return 0
        try:
            flags = parse(argv)
        except SystemExit as end:
            return int(end.code or 0)
        return run(argv[0], flags)
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            return 141
        place = _own_line(error)
        text = re.sub(r"^\[Errno \d+\] ", "", str(error) if place else translated(error)).strip()
        print(wrapped(f"error: {text}{place}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # as shells count
    except (Exception, SystemExit) as end:
        place = _own_line(end)
        if not place:  # a fault of ours, whose traceback is wanted
            raise
        did = "raised"
        if isinstance(end, KeyError) and end.args == ("image",):
            place += ": metadata has an image only with --images FOLDER"
        if isinstance(end, SystemExit):
            did, place = "ended the program by", f"{place}: raise an error instead"
        print(wrapped(f"error: your code {did} {end!r}{place}"), file=sys.stderr)
        return 2
