"""Every command and every code block of the README runs."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ddpo_lessons.app.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def demo_folder(tmp_path, monkeypatch):
    """An empty folder in which the demo ran, in short."""
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--epochs", "1", "--eval-images", "16"]) == 0
    return tmp_path


@pytest.mark.slow
def test_python_blocks_run(demo_folder):
    assert len(blocks("python")) == 2
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert (demo_folder / "red-run" / "lora").is_dir()


@pytest.mark.slow
def test_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("ddpo-lessons ")]
    assert [command[0] for command in commands] == ["demo", "demo", "train", "sample"]
    for command in commands[2:]:
        assert main(command) == 0
    assert list((tmp_path / "pictures").glob("*.png"))


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_knows_what_to_do():
    """Make prints the commands of each target, and stops at one that it does not have."""
    targets = set(re.findall(r"(?:^|`)make (\w+)", README, flags=re.MULTILINE))
    assert {"demo", "test", "lab"} <= targets
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", *targets]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "-m pytest" in run.stdout
