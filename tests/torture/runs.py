"""What happens to runs: SIGKILL at any moment, a full disk, a read-only folder, damaged files."""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate.utils import InitProcessGroupKwargs
from accelerate.utils.other import get_free_port

from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.runlog import METRICS, read_metrics
from tests.helpers import brightness
from tests.torture.harness import ALGORITHMS, ended, finished, is_own, kill, make_trainer, result_of, start

NOBODY = 65534
PEER_SECONDS = 60.0  # in which a process must notice that the other one is gone


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, Any], float]]:
    """The result of an algorithm's run that nothing happens to, and its seconds."""

    @functools.cache
    def of(algorithm: str) -> tuple[dict[str, Any], float]:
        folder, before = tmp_path_factory.mktemp(algorithm), time.monotonic()
        result = finished(folder, **ALGORITHMS[algorithm])
        return result, time.monotonic() - before

    return of


# ---------------------------------------------------------------------------------------------- SIGKILL
FILES = {  # what Python reports before it touches a file: event, and a part of the path
    "writing a checkpoint": ("open", ".new/optimizer"),
    "renaming a checkpoint": ("os.rename", ".new"),
    "deleting a checkpoint": ("shutil.rmtree", ".gone"),
    "writing records": ("open", METRICS),
}


@pytest.mark.parametrize("moment", ["sampling", "training", *FILES])
def test_a_run_that_is_killed_there_is_continued_as_if_nothing_had_been(moment, whole, tmp_path):
    """In the third epoch, of which the reward tells how far the run is."""
    rewards: list[None] = []

    @functools.wraps(brightness)  # which gives it the name, so that the records hold no change
    def reward(*arguments: Any) -> Any:
        rewards.append(None)
        return brightness(*arguments)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def look() -> None:
        if (moment, len(rewards), torch.is_grad_enabled()) in (("sampling", 2, False), ("training", 3, True)):
            die()

    def audit(event: str, arguments: Any) -> None:
        if len(rewards) == 3 and event == FILES[moment][0] and FILES[moment][1] in str(arguments[0]):
            die()

    def work() -> None:
        if moment in FILES:
            sys.addaudithook(audit)  # which only the end of a process removes
        finished(tmp_path, reward=reward, look=look)

    assert ended(start(work)) == -signal.SIGKILL
    assert finished(tmp_path) == whole("ddpo")[0]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_kills_at_any_time_leave_what_an_algorithm_remembers(algorithm, whole, tmp_path):
    """Twice, at times that were drawn: the continued run is killed too."""
    changes, (result, seconds) = ALGORITHMS[algorithm], whole(algorithm)
    generator = random.Random(algorithm)
    for _ in range(2):
        process = start(lambda: finished(tmp_path, **changes))
        time.sleep(generator.random() * seconds / 2)
        kill(process)
    assert finished(tmp_path, **changes) == result


def start_pair(folder: Path) -> list[ForkProcess]:
    """Start two processes that share each epoch's four samples, as accelerate launch does."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=PEER_SECONDS))]
    shared = {"train_batch_size": 2, "accelerator_kwargs": {"kwargs_handlers": handlers}}

    def work(rank: int) -> None:
        os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank), ACCELERATE_USE_CPU="true")
        make_trainer(folder, **shared).train()

    return [start(lambda rank=rank: work(rank)) for rank in (0, 1)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pair")
    assert [ended(process) for process in start_pair(folder)] == [0, 0]
    return result_of(folder)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_whose_peer_is_killed_ends_and_both_continue(victim, pair, tmp_path):
    processes = start_pair(tmp_path)
    while not (tmp_path / checkpoint.name_of(1)).exists():
        time.sleep(0.002)
    kill(processes[victim])
    assert ended(processes[1 - victim], PEER_SECONDS) == 1
    assert [ended(process) for process in start_pair(tmp_path)] == [0, 0]
    assert result_of(tmp_path) == pair


# ------------------------------------------------------------------------------------ disks and folders
def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Let files in a folder take so many bytes together; a write beyond that is short, or fails."""
    real_open = builtins.open

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            room = size - size_of(folder)
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


@pytest.mark.parametrize("part", [0, 0.001, 0.2, 0.4, 0.6, 0.8, 0.99, 0.9999])
def test_a_full_disk_is_one_clear_error_and_leaves_what_can_be_continued(part, whole, tmp_path):
    """Where the disk has a part of what a whole run needs: at first for no record, then for no checkpoint."""
    needed = tmp_path / "whole"
    assert finished(needed) == whole("ddpo")[0]
    place = tmp_path / "run"
    with small_disk(place, int(part * size_of(needed))), pytest.raises(OSError, match="make room") as raised:
        make_trainer(place).train()
    assert is_own(raised.value)
    assert raised.value.errno == errno.ENOSPC
    assert list(place.glob(".checkpoint-*")) == []  # half a checkpoint would take the space that is missing
    for path in checkpoint.list_checkpoints(place):
        checkpoint.read(path)
    read_metrics(place)
    assert finished(place) == whole("ddpo")[0]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can reach."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.mark.parametrize("epoch", [-1, 0, 3], ids=["from the start", "in the first epoch", "in the fourth"])
def test_a_folder_that_cannot_be_written_is_one_clear_error(epoch, whole, open_folder, capfd):
    """As another user if this one is root, who may write everywhere."""
    run = open_folder / "run"
    run.mkdir()

    @functools.wraps(brightness)
    def reward(*arguments: Any) -> Any:
        if len(read_metrics(run, "epoch")) == epoch:
            run.chmod(0o500)
        return brightness(*arguments)

    def work() -> None:
        if os.getuid() == 0:
            os.setuid(NOBODY)
        make_trainer(run, reward).train()

    if os.getuid() == 0:
        os.chown(run, NOBODY, NOBODY)
    if epoch < 0:
        run.chmod(0o500)
    assert ended(start(work)) == 1
    assert re.search(rf"^PermissionError: .*{run}", capfd.readouterr().err, re.MULTILINE)
    run.chmod(0o700)
    assert finished(run) == whole("ddpo")[0]


# -------------------------------------------------------------------------------------------- damaged files
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "bytes added": lambda data: data + b"more",
}
# Without its records a run goes on, and without a checkpoint from the one before.
NO_ERRORS = (("emptied", METRICS), ("removed", METRICS), ("removed", checkpoint.STATE))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of three epochs, whose checkpoints hold an older policy too; what the fourth makes of it."""
    folder, longer = (tmp_path_factory.mktemp(name) for name in ("three", "four"))
    finished(folder, **ALGORITHMS["nft"], num_epochs=3)
    shutil.copytree(folder, longer, dirs_exist_ok=True)
    return folder, finished(longer, **ALGORITHMS["nft"], num_epochs=4)


@pytest.mark.parametrize("damage", [*DAMAGES, "removed"])
def test_a_damaged_file_is_one_clear_error_whose_advice_leads_to_the_same_weights(damage, three, tmp_path):
    """Each file of the newest checkpoint, and the records."""
    (folder, whole), again = three, {**ALGORITHMS["nft"], "num_epochs": 4}
    for path in (*checkpoint.list_checkpoints(folder)[-1].iterdir(), folder / METRICS):
        place = shutil.copytree(folder, tmp_path / path.name)
        damaged = place / path.relative_to(folder)
        if damage == "removed":
            damaged.unlink()
        else:
            damaged.write_bytes(DAMAGES[damage](damaged.read_bytes()))
        is_record = path.name == METRICS
        if (damage, path.name) not in NO_ERRORS:
            with pytest.raises(ValueError, match=f"{path.name}.*damaged|damaged.*{path.name}") as raised:
                make_trainer(place, **again).train()
            assert is_own(raised.value)
            if is_record:
                damaged.unlink()
            else:
                again["resume_from"] = str(place / checkpoint.name_of(2))
        result = finished(place, **again)
        assert result["tensors"] == whole["tensors"]
        assert is_record or result == whole
        again.pop("resume_from", None)
