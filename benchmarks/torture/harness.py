"""Cases, what comes of them, and processes that can be killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState

import ddpo_lessons

PACKAGE = str(Path(ddpo_lessons.__file__).parent)


@dataclass
class Counts:
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)  # each says how to repeat it
    notes: dict[str, Any] = field(default_factory=dict)  # measured numbers


class BrokenPromiseError(AssertionError):
    """A promise that was not kept."""


def expect(holds: bool, message: str) -> None:
    if not holds:
        raise BrokenPromiseError(message)


def described(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error!s:.300}"


def is_clear(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Tell whether an error is of these kinds and was raised by the package itself."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, kinds) and raised_in.startswith(PACKAGE)


Case = Callable[[random.Random, Path], str]


def each_case(name: str, case: Case, seed: int, cases: range, folder: Path) -> Counts:
    """Run cases, each in an empty folder with a generator of its own; anything it raises is a failure."""
    counts = Counts()
    for number in cases:
        place = folder / f"{name}-{number}"
        place.mkdir(parents=True)
        try:
            outcome = case(random.Random(f"{name} {seed} {number}"), place)
            counts.outcomes[outcome] += 1
        except Exception as error:
            counts.failures.append(f"--only {name} --seed {seed} --case {number}: {described(error)}")
        AcceleratorState._reset_state(reset_partial_state=True)
        shutil.rmtree(place)
    return counts


# ------------------------------------------------------------------------------------------- processes
def fork(work: Callable[[], object], errors: Path | None = None) -> int:
    """Run `work` in a copy of this process, which has everything imported; return its number.

    The copy ends with status 0, or with 1 after writing what was raised to `errors`.
    """
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        work()
        status = 0
    except BaseException as error:
        if errors is not None:
            errors.write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


def wait(process: int, seconds: float = 300) -> int:
    """Return the exit status of a process, negative for a signal; kill it and fail if it takes too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    kill(process)
    raise BrokenPromiseError(f"a process was still running after {seconds:g} s")


def kill(process: int) -> bool:
    """Kill a process; tell whether it was still alive."""
    os.kill(process, signal.SIGKILL)  # until it is waited for, its number is not given away
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def wait_for(path: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        expect(time.monotonic() < deadline, f"{path.name} did not come within {seconds:g} s")
        time.sleep(0.002)
