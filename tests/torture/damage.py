"""Files of checkpoints and records that are cut, changed, exchanged or gone: never other weights."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.runlog import METRICS
from tests.torture.harness import ALGORITHMS, finished, is_own

RUN = {**ALGORITHMS["nft"], "num_checkpoint_limit": 3}  # its checkpoints hold an older policy too
EPOCHS = 3
ran: list[str] = []  # what Python itself reports of unpickling and of programs that were started


def _audit(event: str, arguments: Any) -> None:
    if event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.posix_spawn", "os.exec"):
        ran.append(event)


class Payload:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def at(part: float, change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Change 16 bytes that lie so far into a file."""

    def damage(data: bytes) -> bytes:
        start = int(part * len(data))
        return data[:start] + change(data[start : start + 16]) + data[start + 16 :]

    return damage


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "a bit of the head flipped": at(0.02, lambda block: bytes([block[0] ^ 1]) + block[1:]),
    "a bit of the middle flipped": at(0.5, lambda block: bytes([block[0] ^ 64]) + block[1:]),
    "zeros written": at(0.9, lambda block: bytes(len(block))),
    "bytes left out": at(0.4, lambda block: b""),
    "cut off": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "bytes added": lambda data: data + b"more",
    "a pickle": lambda data: pickle.dumps(Payload()),
    "removed": lambda data: None,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of three epochs, and the result of one that went on to the fourth undamaged."""
    folder, whole = (tmp_path_factory.mktemp(name) for name in ("run", "whole"))
    finished(folder, **RUN, num_epochs=EPOCHS)
    shutil.copytree(folder, whole, dirs_exist_ok=True)
    sys.addaudithook(_audit)
    return folder, finished(whole, **RUN, num_epochs=EPOCHS + 1)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_clear_error_or_changes_nothing(damage, runs, tmp_path):
    """Of each file of the newest checkpoint and of the metrics; the error's advice leads to the whole run."""
    original, whole = runs
    newest = Path(checkpoint.name_of(EPOCHS))
    for number, name in enumerate([*(newest / p.name for p in (original / newest).iterdir()), Path(METRICS)]):
        place = shutil.copytree(original, tmp_path / str(number))
        after = DAMAGES[damage]((place / name).read_bytes())
        if after is None:
            (place / name).unlink()
        else:
            (place / name).write_bytes(after)
        falls_back, is_record = place / newest not in checkpoint.list_checkpoints(place), name.name == METRICS
        again: dict[str, Any] = {**RUN, "num_epochs": EPOCHS + 1}
        ran.clear()
        error, result = None, {}
        try:
            result = finished(place, **again)
        except ValueError as raised:
            error = raised
        assert ran == [], name
        if error is None:
            assert falls_back or is_record, f"{name}: the damage went unnoticed"
            assert result["tensors"] == whole["tensors"], name
            assert result == whole or after is None, name  # without metrics their older records are gone
            continue
        assert is_own(error), name
        assert "damaged" in str(error), name
        assert (METRICS if is_record else newest.name) in str(error)
        if is_record:
            (place / METRICS).unlink()
            assert finished(place, **again)["tensors"] == whole["tensors"], name
        else:
            before = str(place / checkpoint.name_of(EPOCHS - 1))
            assert finished(place, **again, resume_from=before) == whole, name
