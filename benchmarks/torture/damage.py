"""Checkpoints and metrics with bytes flipped, cut off or exchanged."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.torture.harness import Counts, each_case, expect, is_clear
from benchmarks.torture.model import make_trainer, result_of
from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.runlog import METRICS, read_metrics

EPOCHS = 3
executed: list[str] = []  # what Python itself reports of unpickling and of programs that were started


def _audit(event: str, arguments: Any) -> None:
    if event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.posix_spawn", "os.exec"):
        executed.append(event)


class _Payload:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def _flip(data: bytearray, generator: random.Random) -> bytes:
    for _ in range(generator.choice([1, 1, 1, 2, 8])):
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(data)


def _overwrite(data: bytearray, generator: random.Random) -> bytes:
    start = generator.randrange(len(data))
    length = min(generator.choice([1, 16, 512]), len(data) - start)
    data[start : start + length] = generator.choice([bytes(length), generator.randbytes(length)])
    return bytes(data)


def _leave_out(data: bytearray, generator: random.Random) -> bytes:
    del data[generator.randrange(len(data))]
    return bytes(data)


DAMAGES: dict[str, Callable[[bytearray, random.Random], bytes | None]] = {
    "bits flipped": _flip,
    "cut off": lambda data, generator: bytes(data[: generator.randrange(len(data))]),
    "a block overwritten": _overwrite,
    "bytes left out": _leave_out,
    "bytes added": lambda data, generator: bytes(data) + generator.randbytes(generator.choice([1, 100])),
    "a pickle": lambda data, generator: pickle.dumps(_Payload()),
    "removed": lambda data, generator: None,
}


def _spoil(path: Path, generator: random.Random) -> tuple[str, bool]:
    """Damage a file; return in which way, and whether it changed."""
    before = path.read_bytes()
    damage = generator.choice(list(DAMAGES))
    after = DAMAGES[damage](bytearray(before), generator)
    if after is None:
        path.unlink()
    else:
        path.write_bytes(after)
    return damage, after != before


def _continued(place: Path, source: str = "latest") -> dict[str, Any]:
    make_trainer(place, num_epochs=EPOCHS + 1, resume_from=source, overwrite=False).train()
    return result_of(place)


def damage(seed: int, cases: range, folder: Path) -> Counts:
    """Damage the newest checkpoint or the metrics of a run, and continue it with resume_from='latest'."""
    make_trainer(folder / "run", num_epochs=EPOCHS, num_checkpoint_limit=3).train()
    shutil.copytree(folder / "run", folder / "whole")
    whole = _continued(folder / "whole")
    sys.addaudithook(_audit)

    def case(generator: random.Random, place: Path) -> str:
        shutil.copytree(folder / "run", place, dirs_exist_ok=True)
        newest = place / checkpoint.name_of(EPOCHS)
        path = generator.choice([*sorted(newest.iterdir()), place / METRICS, place / METRICS])
        _, changed = _spoil(path, generator)
        executed.clear()
        what = "metrics" if path.name == METRICS else "checkpoint"
        falls_back = newest not in checkpoint.list_checkpoints(place)
        unclear: ValueError | None = None
        try:
            result = _continued(place)
        except ValueError as error:
            unclear = error
        expect(not executed, f"code ran: {executed}")
        if unclear is not None:
            clear = path.parent.name in str(unclear) and "damaged" in str(unclear)
            expect(is_clear(unclear, ValueError) and clear and changed, f"unclear: {unclear}")
            if generator.random() < 0.2:
                _follow_advice(place, what, whole)
                return f"{what}: clear error; its advice followed: equal"
            return f"{what}: clear error"
        expect(result["tensors"] == whole["tensors"], "a wrong resume: other weights")
        expect(result["counters"] == whole["counters"], "a wrong resume: other counters")
        if what == "metrics":
            if result["steps"] == whole["steps"]:
                return "metrics: nothing that the checkpoint knows was changed, equal"
            left = len(result["steps"])
            expect(result["steps"] == whole["steps"][-left:], "records changed unnoticed")
            return "metrics: file removed: continued without the older records, weights equal"
        expect(result == whole, "records differ")
        if falls_back:
            return "checkpoint: fell back to the one before, equal"
        expect(path.name == checkpoint.MANIFEST or not changed, f"damage of {path.name} went unnoticed")
        return "checkpoint: nothing but white space or the like was changed, equal"

    return each_case("damage", case, seed, cases, folder)


def _follow_advice(place: Path, what: str, whole: dict[str, Any]) -> None:
    """Resume from the checkpoint before, or move the metrics away; the weights must be those of the run."""
    if what == "metrics":
        (place / METRICS).unlink()
        expect(_continued(place)["tensors"] == whole["tensors"], "the continued run differs")
    else:
        before = str(place / checkpoint.name_of(EPOCHS - 1))
        expect(_continued(place, before) == whole, "the continued run differs")


def metrics(seed: int, cases: range, folder: Path) -> Counts:
    """Damage metrics.jsonl and read it."""
    make_trainer(folder / "run", num_epochs=EPOCHS).train()
    whole = read_metrics(folder / "run")

    def case(generator: random.Random, place: Path) -> str:
        shutil.copy(folder / "run" / METRICS, place)
        damage, _ = _spoil(place / METRICS, generator)
        try:
            found = read_metrics(place)
        except ValueError as error:
            expect(is_clear(error, ValueError) and "line" in str(error), f"unclear: {error}")
            return "clear error"
        shorter_by_one = len(found) >= len(whole) - 1
        if found == whole[: len(found)]:
            # Other damage can look like a cut only in the last record.
            expect(damage in ("cut off", "removed") or shorter_by_one, f"{damage} went unnoticed")
            return "all records, or those before a cut"
        expect(shorter_by_one, f"{damage} changed and lost records")
        return "a number or name changed: read as it stands (resuming checks a hash)"

    return each_case("metrics", case, seed, cases, folder)
