"""Every lesson from top to bottom on a machine with a GPU, which is made up: all of it stays on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from fake_device import fake_device

from benchmarks.speed.lessons import LESSONS, first_failure

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_lesson_runs_on_the_cpu_of_a_machine_with_a_gpu(lesson, tmp_path):
    """In a process of its own, because a lesson changes settings of libraries, and tries faults."""
    found = tmp_path / "found.json"
    environment = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, __file__, str(lesson), str(found)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.exists(), done.stderr
    assert json.loads(found.read_text("utf-8")) == {"failure": "", "to_device": {}}


if __name__ == "__main__":
    with fake_device(is_asleep=True) as traffic, mock.patch("torch.cuda.is_available", return_value=True):
        failure = first_failure(Path(sys.argv[1]))
    result = {"failure": failure, "to_device": traffic.to_device}
    Path(sys.argv[2]).write_text(json.dumps(result), "utf-8")
