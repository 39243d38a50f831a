"""What happens to runs: kill -9, a full disk, a folder that cannot be written, a second trainer."""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import InitProcessGroupKwargs
from accelerate.utils.other import get_free_port

from benchmarks.common import Row
from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.runlog import read_metrics
from tests.torture.harness import (
    ALGORITHMS,
    Case,
    brightness,
    continue_run,
    expect,
    fork,
    is_clear,
    kill,
    make_trainer,
    result_of,
    wait,
    wait_for,
    whole_run,
)

EPOCHS = 6
RUN: Row = {"num_epochs": EPOCHS, "image_grid_freq": 2}
NOBODY = 65534
GENTLE = {"train_learning_rate": 1e-3, "train_adam_epsilon": 1e-2}  # or Adam enlarges what is rounding
PEER_SECONDS = 60.0  # in which a process must notice that the other one is gone


def _train(folder: Path, rank: int = 0, **changes: Any) -> None:
    """Train to the end; the file "started-RANK" says when."""
    trainer = make_trainer(folder, **RUN, **changes)
    (folder / f"started-{rank}").touch()
    trainer.train()


def _start(folder: Path, **changes: Any) -> int:
    """Start or continue the run; return its process when it trains."""
    folder.mkdir(exist_ok=True)
    (folder / "started-0").unlink(missing_ok=True)
    process = fork(lambda: _train(folder, **changes))
    wait_for(folder / "started-0")
    return process


def kills(folder: Path) -> Case:
    """Kill a run of some algorithm once or twice, continue it, and compare with the whole run."""

    @functools.cache
    def whole_of(algorithm: str) -> tuple[Row, float]:
        process, before = _start(folder / algorithm, **ALGORITHMS[algorithm]), time.monotonic()
        expect(wait(process) == 0, "the run that is not killed failed")
        return result_of(folder / algorithm), time.monotonic() - before

    def case(generator: random.Random, place: Path) -> str:
        changes, was_alive = ALGORITHMS[algorithm := generator.choice(list(ALGORITHMS))], False
        whole, seconds = whole_of(algorithm)
        for _ in range(generator.choice([1, 1, 2])):
            process = _start(place, **changes)
            time.sleep(generator.random() * seconds)
            was_alive |= kill(process)
        half_saved, saved = any(place.glob(".checkpoint-*")), checkpoint.list_checkpoints(place)
        expect(wait(fork(lambda: _train(place, **changes))) == 0, "the continued run failed")
        expect(result_of(place) == whole, "the continued run differs from the one that was not killed")
        if half_saved:
            return "killed while saving: continued, equal"
        if not was_alive:
            return "ended before its kill: equal"
        return (
            f"{algorithm}: continued, equal" if saved else "killed before the first save: begun again, equal"
        )

    return case


# ----------------------------------------------------------------------------------------- two processes
def _start_pair(folder: Path) -> list[int]:
    """Start two processes that share each epoch's four samples, as accelerate launch does."""
    folder.mkdir(exist_ok=True)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=PEER_SECONDS))]
    shared = {"train_batch_size": 2, "accelerator_kwargs": {"kwargs_handlers": handlers}}

    def work(rank: int) -> None:
        os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true")
        _train(folder, rank, **GENTLE, **shared)  # alone, one would refuse the other the folder

    return [fork(lambda rank=rank: work(rank)) for rank in (0, 1)]


def _distance(mine: Row, theirs: Row) -> float:
    """Return the largest difference between two runs' weights."""

    def weights(run: Row) -> torch.Tensor:
        found = (data for name, (_, data) in sorted(run["tensors"].items()) if name.startswith("policy|"))
        return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.float32)

    return (weights(mine) - weights(theirs)).abs().max().item()


def pairs(folder: Path) -> Case:
    """Compare two processes with one; kill one of two, wait for the other, and continue."""
    before = time.monotonic()
    expect([wait(p) for p in _start_pair(folder / "two")] == [0, 0], "two processes failed")
    whole, seconds = result_of(folder / "two"), time.monotonic() - before
    alone = {"sample_num_batches_per_epoch": 2, "train_batch_size": 4}
    (folder / "one").mkdir()
    expect(wait(fork(lambda: _train(folder / "one", **alone, **GENTLE))) == 0, "one process failed")
    distance = _distance(whole, result_of(folder / "one"))

    def case(generator: random.Random, place: Path) -> str:
        expect(distance < 1e-6, f"two processes and one are {distance:.1e} apart")
        victim, processes = generator.randrange(2), _start_pair(place)
        for rank in (0, 1):
            wait_for(place / f"started-{rank}")
        time.sleep(generator.random() * seconds)
        kill(processes[victim])
        status = wait(processes[1 - victim], PEER_SECONDS)
        # A process that was killed at its very end leaves the other nothing to wait for.
        finished = (place / checkpoint.name_of(EPOCHS)).exists()
        expect(status == 1 or (status == 0 and finished), f"the other ended with status {status}")
        expect([wait(p) for p in _start_pair(place)] == [0, 0], "the continued run failed")
        expect(result_of(place) == whole, "the continued run differs from the one that was not killed")
        if status == 0:
            return f"process {victim} killed after its work: equal"
        return f"process {victim} killed: the other ended with an error, continued, equal"

    return case


# ------------------------------------------------------------------------------------- disks and folders
def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
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
        if not set(mode) & set("wax") or not Path(file).is_relative_to(folder):
            return real_open(file, mode, buffering, *rest, **more)
        raw = File(str(file), mode.replace("b", ""))
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

    with patch.object(builtins, "open", open_on_disk), patch.object(io, "open", open_on_disk):
        yield


def full_disk(folder: Path) -> Case:
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

    return case


def read_only(folder: Path) -> Case:
    """Take the right to write away before the run or in the middle of it; then give it back and continue."""
    whole = whole_run(folder / "whole", **RUN)

    def case(generator: random.Random, place: Path) -> str:
        run, epoch = place / "run", generator.randrange(-2, EPOCHS)  # before the first for -2 and -1
        run.mkdir()
        place.chmod(0o777)

        def reward(*arguments: Any) -> Any:
            if len(read_metrics(run, "epoch")) == epoch:
                run.chmod(0o500)
            return brightness(*arguments)

        def work() -> None:
            if os.getuid() == 0:
                os.setuid(NOBODY)
            make_trainer(run, reward, **RUN).train()

        if os.getuid() == 0:  # root may write everywhere, so the run is another user's then
            os.chown(run, NOBODY, NOBODY)
        if epoch < 0:
            run.chmod(0o500)
        expect(wait(fork(work, place / "error")) == 1, "the run did not notice")
        message = (place / "error").read_text()
        expect(message.startswith("PermissionError") and str(run) in message, f"unclear: {message}")
        run.chmod(0o700)
        continue_run(run, whole, **RUN)
        when = "from the start" if epoch < 0 else "in the middle"
        return f"read-only {when}: clear error, continued, equal"

    return case
