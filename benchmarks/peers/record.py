"""Run TRL's DDPOTrainer and imageddpo on a tiny model; record what they compute and how they fail.

    python -m benchmarks.peers.record --python PEERS_PYTHON --output tests/golden

writes ``peers.json`` there, in about three minutes on an idle machine. PEERS_PYTHON is the
interpreter of an environment that holds the peers (benchmarks/README.md says how to make one).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGES = ("trl", "imageddpo", "torch", "diffusers", "transformers", "peft", "accelerate")
REPOSITORY = Path(__file__).resolve().parents[2]
DEADLOCK_DUMPS = 6  # a process of the worker's row_02 dumps its stack every ten seconds
RUN_SECONDS = 1800  # an idle machine takes 60


class DeadlockError(Exception):
    """All processes of a run wait for one another."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="interpreter that can import the peers")
    parser.add_argument("--output", type=Path, required=True, help="folder for peers.json")
    arguments = parser.parse_args()

    rows = {"made_with": _versions(arguments.python)}
    with tempfile.TemporaryDirectory() as scratch:
        for group, processes in (("one_process", 1), ("bf16", 1), ("drift", 2)):
            print(f"{group}: the peers run in {processes} process(es) ...", flush=True)
            rows |= _run(arguments.python, group, processes, Path(scratch))
        rows["row_02"] = _save_from_one_and_from_two(arguments.python, Path(scratch))
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / "peers.json"
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"wrote {path}, {path.stat().st_size / 1000:.0f} kB")


def _versions(python: str) -> dict[str, str]:
    code = "import sys, json, importlib.metadata as m\n"
    code += "print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    output = subprocess.run([python, "-c", code, *PACKAGES], check=True, capture_output=True)
    return json.loads(output.stdout)


def _save_from_one_and_from_two(python: str, scratch: Path) -> dict[str, Any]:
    """Let TRL train and save: alone, which ends, then in two processes; where these hang."""
    print("save: one process, then two ...", flush=True)
    _run(python, "save", 1, scratch)
    rows: dict[str, Any] = {"processes=1": "finished", "processes=2": "finished"}
    stacks = [_folder(scratch, "save", 2, rank) / "stack.txt" for rank in range(2)]
    try:
        _run(python, "save", 2, scratch, deadlocked=lambda: all(map(_waits_for_ever, stacks)))
    except DeadlockError:
        rows |= {"processes=2": "deadlock", "hangs_in": [_calls(stack)[-1] for stack in stacks]}
    return rows


def _waits_for_ever(stacks: Path) -> bool:
    """Whether a process has stood in one collective call for a minute.

    A time limit would not tell a deadlock from a machine that is busy with something else.
    """
    calls = _calls(stacks) if stacks.exists() else []
    last = calls[-DEADLOCK_DUMPS:]
    in_collective = last and last[-1] and last[-1][0] in ("barrier", "all_gather")
    return bool(in_collective) and len(last) == DEADLOCK_DUMPS and last.count(last[0]) == len(last)


def _calls(stacks: Path) -> list[list[str]]:
    """For each dump: functions of torch.distributed, accelerate and TRL, innermost first."""
    files = r"(?:distributed_c10d|accelerator|ddpo_trainer)\.py"
    dumps = stacks.read_text().split("Timeout (")[1:]
    main_threads = (dump.strip().split("\n\n")[-1] for dump in dumps)
    return [re.findall(rf"{files}\", line \d+ in (\w+)", thread) for thread in main_threads]


def _run(
    python: str,
    group: str,
    processes: int,
    scratch: Path,
    deadlocked: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run a group of the worker's rows and return the first process's results.

    The processes get the variables that torchrun sets: ``accelerate launch --cpu`` starts only one
    (accelerate 1.15), and torchrun gives its workers sessions of their own, out of reach of a kill.
    """
    port = _free_port()
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(processes):
            folder = _folder(scratch, group, processes, rank)
            folder.mkdir()
            environment = _environment(rank, processes, port)
            command = [python, "-m", "benchmarks.peers.worker", group, "--scratch", str(folder)]
            with (folder / "log.txt").open("w") as log:
                workers.append(
                    subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log)
                )
        for rank in _failed(workers, deadlocked):
            text = (_folder(scratch, group, processes, rank) / "log.txt").read_text()
            raise RuntimeError(f"{group} failed in process {rank}:\n{text[-3000:]}")
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return json.loads((_folder(scratch, group, processes, 0) / "rows.json").read_text())


def _failed(workers: list[subprocess.Popen[bytes]], deadlocked: Callable[[], bool]) -> list[int]:
    """Wait for all to end, or for one to fail: the other would then wait for it for ever."""
    end = time.monotonic() + RUN_SECONDS
    while time.monotonic() < end:
        codes = [worker.poll() for worker in workers]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed or None not in codes:
            return failed
        if deadlocked():
            raise DeadlockError
        time.sleep(1)
    raise TimeoutError(f"no end after {RUN_SECONDS} s")


def _folder(scratch: Path, group: str, processes: int, rank: int) -> Path:
    return scratch / f"{group}-{processes}-{rank}"


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # sums in one order, so that a second recording gives the same
        "WANDB_MODE": "disabled",
    }
    if processes > 1:
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
