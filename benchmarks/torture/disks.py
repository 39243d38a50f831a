"""Full disks, read-only folders, clocks that go back, and a second trainer in the folder."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.torture.harness import Counts, each_case, expect, fork, is_clear, wait
from benchmarks.torture.model import brightness, continue_run, make_trainer, result_of, whole_run
from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.runlog import read_metrics

EPOCHS = 5
RUN: dict[str, Any] = {"num_epochs": EPOCHS, "image_grid_freq": 2}
NOBODY = 65534


def _size(folder: Path) -> int:
    """Return the bytes in a folder's files, some of which may go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Let files in a folder take so many bytes together; a write beyond that is short, or fails."""
    real_open = builtins.open

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            room = size - _size(folder)
            if room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(bytes(data)[:room]) or 0

    def open_on_disk(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any) -> Any:
        inside = isinstance(file, (str, Path)) and Path(file).is_relative_to(folder)
        if not inside or not set(mode) & set("wax"):
            return real_open(file, mode, buffering, *rest, **more)
        raw = File(str(file), mode.replace("b", ""))
        if buffering == 0:
            return raw
        return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

    with patch.object(builtins, "open", open_on_disk), patch.object(io, "open", open_on_disk):
        yield


def full_disk(seed: int, cases: range, folder: Path) -> Counts:
    """Let the disk fill up at a random byte of the run; then make room and continue."""
    whole, needed = whole_run(folder / "whole", **RUN), _size(folder / "whole")

    def case(generator: random.Random, place: Path) -> str:
        outcome = "the run fitted"
        try:
            with small_disk(place, generator.randrange(int(1.3 * needed))):
                make_trainer(place, **RUN).train()
        except OSError as error:
            clear = is_clear(error, OSError) and error.errno == errno.ENOSPC and "make room" in str(error)
            expect(clear, f"unclear: {error}")
            what = "a checkpoint" if "checkpoint-" in str(error) else "another file"
            outcome = f"no room for {what}: clear error, continued, equal"
        expect(not list(place.glob(".checkpoint-*")), "half a checkpoint takes the space that is missing")
        for path in checkpoint.list_checkpoints(place):
            checkpoint.read(path)
        read_metrics(place)
        continue_run(place, whole, **RUN)
        return outcome

    return each_case("full_disk", case, seed, cases, folder)


def read_only(seed: int, cases: range, folder: Path) -> Counts:
    """Take the right to write away before the run or in the middle of it; then give it back and continue."""
    whole = whole_run(folder / "whole", **RUN)
    am_root = os.getuid() == 0  # root may write everywhere, so the run is another user's then

    def case(generator: random.Random, place: Path) -> str:
        run, epoch = place / "run", generator.randrange(EPOCHS)
        run.mkdir()
        from_the_start = generator.random() < 0.3
        place.chmod(0o777)
        if from_the_start:
            run.chmod(0o500)

        def reward(images: Any, prompts: Any, metadata: Any) -> Any:
            if len(read_metrics(run, "epoch")) == epoch:
                run.chmod(0o500)
            return brightness(images, prompts, metadata)

        def work() -> None:
            if am_root:
                os.setuid(NOBODY)
            make_trainer(run, reward, **RUN).train()

        if am_root:
            os.chown(run, NOBODY, NOBODY)
        status = wait(fork(work, place / "error"))
        expect(status == 1, "the run did not notice")
        message = (place / "error").read_text()
        expect(message.startswith("PermissionError") and str(run) in message, f"unclear: {message}")
        run.chmod(0o700)
        continue_run(run, whole, **RUN)
        when = "from the start" if from_the_start else "in the middle"
        return f"read-only {when}: clear error, continued, equal"

    return each_case("read_only", case, seed, cases, folder)


def clock(seed: int, cases: range, folder: Path) -> Counts:
    """Let the clock and the files' times go back and forth by days, between a stop and a continuation too."""
    whole, real = whole_run(folder / "whole", **RUN), time.time

    def case(generator: random.Random, place: Path) -> str:
        def wandering() -> float:
            return real() + generator.uniform(-5e5, 5e5)

        with patch.object(time, "time", wandering):
            make_trainer(place, **{**RUN, "num_epochs": generator.randrange(1, EPOCHS)}).train()
            for path in place.rglob("*"):
                os.utime(path, (wandering(), wandering()))
            continue_run(place, whole, **RUN)
        return "clock went back: continued, equal"

    return each_case("clock", case, seed, cases, folder)


REFUSALS = ("another trainer", "already holds a run", "no checkpoint")


def second_trainer(seed: int, cases: range, folder: Path) -> Counts:
    """Start a second trainer on the folder of one that runs, at a random moment of its run."""
    before = time.monotonic()
    whole = whole_run(folder / "whole", **RUN)
    seconds = time.monotonic() - before

    def case(generator: random.Random, place: Path) -> str:
        first = fork(lambda: make_trainer(place, **RUN).train(), place / "error")
        time.sleep(generator.random() * seconds)
        changes: dict[str, Any] = generator.choice([{"resume_from": "latest"}, {"overwrite": True}, {}])
        refusal = ""
        try:
            make_trainer(place, **{**RUN, "resume_from": "", "overwrite": False, **changes}).train()
        except (RuntimeError, ValueError) as error:
            expect(is_clear(error, RuntimeError, ValueError), f"unclear: {error}")
            refusal = next((why for why in REFUSALS if why in str(error)), "")
            expect(bool(refusal), f"refused for another reason: {error}")
        status = wait(first)
        if status:  # the second was faster to take the folder
            message = (place / "error").read_text()
            expect(any(why in message for why in REFUSALS[:2]), f"unclear: {message}")
            expect(not refusal, "the two refused each other")
        expect(result_of(place) == whole, "the run differs")
        if status:
            return "the first was refused, the second's run equal"
        if refusal:
            return f"the second was refused (“{refusal}”), the first's run equal"
        return "one after the other: equal"

    return each_case("second_trainer", case, seed, cases, folder)
