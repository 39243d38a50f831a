"""kill -9 at random moments, of one process and of one of two."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import InitProcessGroupKwargs

from benchmarks.common import free_port
from benchmarks.torture.harness import Counts, each_case, expect, fork, kill, wait, wait_for
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


def _kill_once(generator: random.Random, folder: Path, seconds: float) -> bool:
    """Start or continue the run and kill it while it trains; tell whether it was still alive."""
    process = _start(folder)
    time.sleep(generator.random() * seconds)
    return kill(process)


def _killed(place: Path, kill_one: Callable[[Path, float], bool]) -> Path:
    """Return the folder of a run that was alive when it was killed."""
    for attempt in range(20):  # a machine that is slow now may be fast later
        run = place / f"run-{attempt}"
        run.mkdir()
        if kill_one(run, 0.9**attempt):
            return run
    raise AssertionError("every run ended before its kill")


def kills(seed: int, cases: range, folder: Path) -> Counts:
    """Kill a run that saves after every epoch once or twice, continue it, and compare with the whole run."""
    (folder / "whole").mkdir()
    process, before = _start(folder / "whole"), time.monotonic()
    expect(wait(process) == 0, "the run that is not killed failed")
    whole, seconds = result_of(folder / "whole"), time.monotonic() - before

    def case(generator: random.Random, place: Path) -> str:
        run = _killed(place, lambda run, share: _kill_once(generator, run, seconds * share))
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
def _start_pair(folder: Path) -> list[int]:
    """Start two processes that share each epoch's four samples, as accelerate launch does."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=PEER_SECONDS))]
    shared = {"train_batch_size": 2, "accelerator_kwargs": {"kwargs_handlers": handlers}}

    def work(rank: int) -> None:
        os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true")
        trainer = make_trainer(folder, num_epochs=EPOCHS, **GENTLE, **shared)
        expect(trainer.accelerator.num_processes == 2, "the processes did not find each other")
        (folder / f"started-{rank}").touch()
        trainer.train()

    return [fork(lambda rank=rank: work(rank), folder / f"error-{rank}") for rank in (0, 1)]


def _distance(mine: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return the largest difference between two runs' weights."""
    distances = []
    for name in (name for name in mine["tensors"] if name.startswith("policy|")):
        pair = [run["tensors"][name] for run in (mine, theirs)]
        expect(pair[0][0] == "torch.float32", f"{name} is {pair[0][0]}")
        here, there = (torch.frombuffer(bytearray(data), dtype=torch.float32) for _, data in pair)
        distances.append((here - there).abs().max().item())
    return max(distances)


def pairs(seed: int, cases: range, folder: Path) -> Counts:
    """Compare two processes with one; kill one of two, wait for the other, and continue."""
    (folder / "two").mkdir()
    (folder / "one").mkdir()
    before = time.monotonic()
    expect([wait(p) for p in _start_pair(folder / "two")] == [0, 0], "two processes failed")
    seconds = time.monotonic() - before
    alone = {"sample_num_batches_per_epoch": 2, "train_batch_size": 4}
    expect(wait(fork(lambda: _train(folder / "one", **alone, **GENTLE))) == 0, "one process failed")
    whole = result_of(folder / "two")
    distance = _distance(whole, result_of(folder / "one"))
    waits: list[float] = []

    def case(generator: random.Random, place: Path) -> str:
        victim = generator.randrange(2)
        other = -1

        def kill_one(run: Path, share: float) -> bool:
            nonlocal other
            started = _start_pair(run)
            other = started[1 - victim]
            for rank in (0, 1):
                wait_for(run / f"started-{rank}")
            time.sleep(generator.random() * seconds * share)
            alive = kill(started[victim])
            expect(alive or wait(other) == 0, "two processes failed without a kill")
            return alive

        run, killed = _killed(place, kill_one), time.monotonic()
        status = wait(other, PEER_SECONDS)
        waits.append(time.monotonic() - killed)
        # A process that was killed at its very end leaves the other nothing to wait for.
        saved = checkpoint.list_checkpoints(run)
        finished = bool(saved) and saved[-1].name == checkpoint.name_of(EPOCHS)
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
