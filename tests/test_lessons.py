"""Every lesson from top to bottom on a machine with a GPU, which is made up: all of it stays on the CPU."""

import json
import multiprocessing
from pathlib import Path
from unittest import mock

import pytest
from fake_device import fake_device

from benchmarks.speed.lessons import LESSONS, first_failure

pytestmark = pytest.mark.slow
IMPORTED = ["test_lessons", "matplotlib.pyplot", "sklearn.datasets", "ddpo_lessons.app.demo"]  # take 4 s


@pytest.fixture(scope="module")
def processes():
    """Processes that begin with the imports done, where the system can fork."""
    can_fork = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if can_fork else "spawn")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLBACKEND", "agg")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield context


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_lesson_runs_on_the_cpu_of_a_machine_with_a_gpu(lesson, processes, tmp_path):
    """In a process of its own, because a lesson changes settings of libraries, and tries faults."""
    found = tmp_path / "found.json"
    process = processes.Process(target=run, args=(lesson, found), daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0
    assert json.loads(found.read_text("utf-8")) == {"failure": "", "to_device": {}}


def run(lesson: Path, found: Path) -> None:
    """Write what stops a lesson, and what it puts on the device."""
    with fake_device(is_asleep=True) as traffic, mock.patch("torch.cuda.is_available", return_value=True):
        failure = first_failure(lesson)
    found.write_text(json.dumps({"failure": failure, "to_device": traffic.to_device}), "utf-8")
