"""kill -9 at random moments, of one process and of one of two."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import InitProcessGroupKwargs

from benchmarks.torture.harness import BrokenPromiseError, Counts, each_case, expect, fork, wait, wait_for
from benchmarks.torture.model import make_trainer, result_of
from ddpo_lessons.run import checkpoint

EPOCHS = 6
GENTLE = {"train_learning_rate": 1e-3, "train_adam_epsilon": 1e-2}  # or Adam enlarges what is rounding
PEER_SECONDS = 60.0  # in which a process must notice that the other one is gone


def _train(folder: Path, **changes: Any) -> None:
    """Train to the end; the file "started" says when."""
    trainer = make_trainer(folder, num_epochs=EPOCHS, **changes)
    (folder / "started").touch()
    trainer.train()


def _start(folder: Path) -> int:
    """Start or continue the run; return its process when it trains."""
    (folder / "started").unlink(missing_ok=True)
    process = fork(lambda: _train(folder))
    wait_for(folder / "started")
    return process


def _whole_run(folder: Path) -> tuple[dict[str, Any], float]:
    """Return the result of a run that is not killed, and how long it trained."""
    folder.mkdir()
    process, before = _start(folder), time.monotonic()
    expect(wait(process) == 0, "the run that is not killed failed")
    return result_of(folder), time.monotonic() - before


def _kill_once(generator: random.Random, folder: Path, seconds: float) -> bool:
    """Start or continue the run and kill it while it trains; tell whether it was still alive."""
    process = _start(folder)
    time.sleep(generator.random() * seconds)
    os.kill(process, signal.SIGKILL)  # until it is waited for, its number is not given away
    return wait(process) == -signal.SIGKILL


def kills(seed: int, cases: range, folder: Path) -> Counts:
    """Kill a run that saves after every epoch once or twice, continue it, and compare with the whole run."""
    whole, seconds = _whole_run(folder / "whole")

    def case(generator: random.Random, place: Path) -> str:
        for attempt in range(20):  # a machine that is slow now may be fast later
            run = place / f"run-{attempt}"
            run.mkdir()
            if _kill_once(generator, run, seconds * 0.9**attempt):
                break
        else:
            raise BrokenPromiseError("every run ended before its kill")
        if generator.random() < 0.3:
            _kill_once(generator, run, seconds)
        half_saved = any(run.glob(".checkpoint-*"))
        saved = len(checkpoint.list_checkpoints(run))
        expect(wait(fork(lambda: _train(run))) == 0, "the continued run failed")
        expect(result_of(run) == whole, "the continued run differs from the one that was not killed")
        if half_saved:
            return "killed while saving: continued, equal"
        return "continued, equal" if saved else "killed before the first save: begun again, equal"

    return each_case("kills", case, seed, cases, folder)


# ----------------------------------------------------------------------------------------- two processes
def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start_pair(folder: Path, **changes: Any) -> list[int]:
    """Start two processes that share each epoch's four samples, as accelerate launch does."""
    port = _free_port()
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }

    def work(rank: int) -> None:
        os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank))
        handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=PEER_SECONDS))]
        trainer = make_trainer(
            folder,
            num_epochs=EPOCHS,
            train_batch_size=2,
            **GENTLE,
            accelerator_kwargs={"kwargs_handlers": handlers},
            **changes,
        )
        expect(trainer.accelerator.num_processes == 2, "the processes did not find each other")
        (folder / f"started-{rank}").touch()
        trainer.train()

    return [fork(lambda rank=rank: work(rank), folder / f"error-{rank}") for rank in (0, 1)]


def _alone(folder: Path) -> None:
    make_trainer(
        folder, num_epochs=EPOCHS, sample_num_batches_per_epoch=2, train_batch_size=4, **GENTLE
    ).train()


def _distance(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest difference between two runs' weights."""
    distances = []
    for name, (kind, data) in mine["tensors"].items():
        if name.startswith("policy|"):
            expect(kind == "torch.float32", f"{name} is {kind}")
            here, there = (
                torch.frombuffer(bytearray(d), dtype=torch.float32)
                for d in (data, theirs["tensors"][name][1])
            )
            distances.append((here - there).abs().max().item())
    return max(distances)


def pairs(seed: int, cases: range, folder: Path) -> Counts:
    """Compare two processes with one; kill one of two, wait for the other, and continue."""
    (folder / "two").mkdir()
    (folder / "one").mkdir()
    before = time.monotonic()
    expect([wait(p) for p in _start_pair(folder / "two")] == [0, 0], "two processes failed")
    seconds = time.monotonic() - before
    expect(wait(fork(lambda: _alone(folder / "one"))) == 0, "one process failed")
    whole = result_of(folder / "two")
    distance = _distance(whole, result_of(folder / "one"))
    waits: list[float] = []

    def case(generator: random.Random, place: Path) -> str:
        victim = generator.randrange(2)
        for attempt in range(20):
            run = place / str(attempt)
            run.mkdir()
            started = _start_pair(run)
            for rank in (0, 1):
                wait_for(run / f"started-{rank}")
            time.sleep(generator.random() * seconds * 0.9**attempt)
            os.kill(started[victim], signal.SIGKILL)
            if wait(started[victim]) == -signal.SIGKILL:
                break
            expect(wait(started[1 - victim]) == 0, "two processes failed without a kill")
        else:
            raise BrokenPromiseError("every run ended before its kill")
        killed = time.monotonic()
        status = wait(started[1 - victim], PEER_SECONDS)
        waits.append(time.monotonic() - killed)
        # A process that was killed at its very end leaves the other nothing to wait for.
        finished = [path.name for path in checkpoint.list_checkpoints(run)][-1:] == [
            checkpoint.name_of(EPOCHS)
        ]
        expect(status == 1 or (status == 0 and finished), f"the other ended with status {status}")
        expect([wait(p) for p in _start_pair(run)] == [0, 0], "the continued run failed")
        expect(result_of(run) == whole, "the continued run differs from the one that was not killed")
        if status == 0:
            return f"process {victim} killed after its work: equal"
        return f"process {victim} killed: the other ended with an error, continued, equal"

    counts = each_case("pairs", case, seed, cases, folder)
    if distance > 1e-6:
        counts.failures.append(f"--only pairs: two processes and one are {distance:.1e} apart")
    counts.outcomes["two processes equal to one (1e-6)"] += distance <= 1e-6
    counts.notes = {
        "cases": len(cases) + 1,  # the last outcome is one, too
        "two_against_one_max_difference": distance,
        "longest_wait_for_the_other_s": round(max(waits, default=0.0), 2),
        "wait_limit_s": PEER_SECONDS,
    }
    return counts
