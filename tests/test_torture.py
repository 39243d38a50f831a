"""`make torture` runs: kills at each moment, and one attack of each other kind."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["killed_there", "[0.6]", "fourth", "cut and off"])
def test_an_attack_breaks_nothing(attack):
    command = [sys.executable, "-W", "ignore", "-m", "tests.torture", "-k", attack]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
