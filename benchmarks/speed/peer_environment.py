"""An environment of the other trainers' own, and processes that answer a line with a line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.common import ROOT, Row

PEERS = ("trl==0.21.0", "imageddpo==0.1.2", "transformers<5", "diffusers==0.39.0", "peft", "accelerate")
OTHERS = ("wandb", "scikit-learn", "tyro")  # what imageddpo imports, and the task of time_to_result
TORCH = "torch==2.13.0"
PACKAGES = ("trl", "imageddpo", "torch", "diffusers", "transformers", "peft", "accelerate")
SETTINGS = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}


def make_environment() -> str:
    """Install the other trainers into an environment of their own; return its interpreter."""
    folder = ROOT / "build/peers"
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        # uv's resolver, because an old pip searches versions for ten minutes
        subprocess.run([python, "-m", "pip", "install", "--quiet", "uv", TORCH], check=True)
        install = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python]
        subprocess.run([*install, *PEERS, *OTHERS, TORCH], check=True)
    return str(python)


def versions(python: str) -> dict[str, str]:
    """Return the versions of the other trainers and of their requirements in an environment."""
    code = "import sys, json, importlib.metadata as m\n"
    code += "print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    output = subprocess.run([python, "-c", code, *PACKAGES], check=True, capture_output=True)
    return json.loads(output.stdout)


class Worker:
    """A process that answers a line with a line, for as long as a `with` block; `serve` is its other end."""

    def __init__(self, command: list[str]) -> None:
        # Compiling may take any time in the first epoch.
        environment = os.environ | SETTINGS | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process: Any = subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)
        if self._read() != "ready":
            raise RuntimeError(f"{' '.join(command)} did not start: run it in a terminal to see why")

    def _read(self) -> str:
        return self.process.stdout.readline().strip()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: Any) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, line: str, may_fail: bool = False) -> Row:
        """Send a line, return the answer; an error is one only where the worker may fail."""
        print(line, file=self.process.stdin, flush=True)
        answer = json.loads(self._read())
        if "error" in answer and not may_fail:
            raise RuntimeError(answer["error"])
        return answer


def serve(answer: Callable[[str], Row]) -> None:
    """Call `answer` with every line of the standard input; print what it returns or raises, as JSON."""
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries that print must not disturb
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        try:
            found = answer(line.strip())
        except Exception as error:  # the comparison reports how another trainer fails
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]:.120}"}
        print(json.dumps(found), file=answers, flush=True)
