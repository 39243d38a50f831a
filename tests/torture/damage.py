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

from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.runlog import METRICS
from tests.torture.harness import ALGORITHMS, Case, expect, is_clear, make_trainer, whole_run

EPOCHS = 3
RUN = ALGORITHMS["nft"]  # its checkpoints hold an older policy too
executed: list[str] = []  # what Python itself reports of unpickling and of programs that were started


def _audit(event: str, arguments: Any) -> None:
    if event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.posix_spawn", "os.exec"):
        executed.append(event)


class _Payload:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def _flip(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.choice([1, 1, 1, 2, 8])):
        changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def _replace(data: bytes, generator: random.Random) -> bytes:
    """Exchange a block for zeros or noise, or leave it out."""
    start, length = generator.randrange(len(data)), generator.choice([1, 16, 512])
    block = generator.choice([b"", bytes(length), generator.randbytes(length)])
    return data[:start] + block + data[start + length :]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "bits flipped": _flip,
    "cut off": lambda data, generator: data[: generator.randrange(len(data))],
    "a block replaced": _replace,
    "bytes added": lambda data, generator: data + generator.randbytes(generator.choice([1, 100])),
    "a pickle": lambda data, generator: pickle.dumps(_Payload()),
    "removed": lambda data, generator: None,
}


def _spoil(path: Path, generator: random.Random) -> bool:
    """Damage a file in one of these ways; tell whether it changed."""
    before = path.read_bytes()
    after = generator.choice(list(DAMAGES.values()))(before, generator)
    if after is None:
        path.unlink()
    else:
        path.write_bytes(after)
    return after != before


def _continued(place: Path, source: str = "latest") -> dict[str, Any]:
    return whole_run(place, **RUN, num_epochs=EPOCHS + 1, resume_from=source, overwrite=False)


def damage(folder: Path) -> Case:
    """Damage the newest checkpoint or the metrics of a run, and continue it with resume_from='latest'."""
    make_trainer(folder / "run", **RUN, num_epochs=EPOCHS, num_checkpoint_limit=3).train()
    shutil.copytree(folder / "run", folder / "whole")
    whole = _continued(folder / "whole")
    sys.addaudithook(_audit)

    def case(generator: random.Random, place: Path) -> str:
        shutil.copytree(folder / "run", place, dirs_exist_ok=True)
        newest = place / checkpoint.name_of(EPOCHS)
        path = generator.choice([*sorted(newest.iterdir()), place / METRICS, place / METRICS])
        changed = _spoil(path, generator)
        what = "metrics" if path.name == METRICS else "checkpoint"
        falls_back = newest not in checkpoint.list_checkpoints(place)
        executed.clear()
        try:
            result = _continued(place)
        except ValueError as error:
            named = path.parent.name in str(error) and "damaged" in str(error)
            expect(is_clear(error, ValueError) and named and changed, f"unclear: {error}")
            if generator.random() < 0.8:
                return f"{what}: clear error"
            _follow_advice(place, what, whole)
            return f"{what}: clear error; its advice followed: equal"
        finally:
            expect(not executed, f"code ran: {executed}")
        for name in ("tensors", "counters"):
            expect(result[name] == whole[name], f"a wrong resume: other {name}")
        if what == "metrics":
            if result["steps"] == whole["steps"]:
                return "metrics: nothing that the checkpoint knows was changed, equal"
            expect(result["steps"] == whole["steps"][-len(result["steps"]) :], "records changed unnoticed")
            return "metrics: file removed: continued without the older records, weights equal"
        expect(result == whole, "records differ")
        if falls_back:
            return "checkpoint: fell back to the one before, equal"
        expect(path.name == checkpoint.MANIFEST or not changed, f"damage of {path.name} went unnoticed")
        return "checkpoint: nothing but white space or the like was changed, equal"

    return case


def _follow_advice(place: Path, what: str, whole: dict[str, Any]) -> None:
    """Resume from the checkpoint before, or move the metrics away; the weights must be those of the run."""
    if what == "metrics":
        (place / METRICS).unlink()
        expect(_continued(place)["tensors"] == whole["tensors"], "the continued run differs")
    else:
        before = str(place / checkpoint.name_of(EPOCHS - 1))
        expect(_continued(place, before) == whole, "the continued run differs")
