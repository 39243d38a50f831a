"""Run TRL's DDPOTrainer and imageddpo on a tiny model; record what they compute and how they fail.

`python -m benchmarks.peers.record` makes the peers' environment, unless it is there, and writes
tests/golden/peers.json, in about three minutes on an idle machine.
"""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from accelerate.utils.other import get_free_port

from benchmarks.common import ROOT, Row
from benchmarks.peers.environment import SETTINGS, make_environment, versions

RESULT = ROOT / "tests" / "golden" / "peers.json"
DEADLOCK_DUMPS = 6  # a process that saves dumps its stack every ten seconds
RUN_SECONDS = 1800  # an idle machine takes 60


class DeadlockError(Exception):
    """All processes of a run wait for one another."""


def _save_from_one_and_from_two(python: str, scratch: Path) -> Row:
    """Let TRL train and save: alone, which ends, then in two processes; where these hang."""
    _run(python, "save", 1, scratch)
    rows: Row = {"processes=1": "finished", "processes=2": "finished"}
    stacks = [folder / "stack.txt" for folder in _folders(scratch, "save", 2)]
    try:
        _run(python, "save", 2, scratch, deadlocked=lambda: all(map(_waits_for_ever, stacks)))
    except DeadlockError:
        rows |= {"processes=2": "deadlock", "hangs_in": [_calls(stack)[-1] for stack in stacks]}
    return rows


def _waits_for_ever(stacks: Path) -> bool:
    """Whether a process has stood in one collective call for a minute.

    A time limit would not tell a deadlock from a machine that is busy with something else.
    """
    last = _calls(stacks)[-DEADLOCK_DUMPS:] if stacks.exists() else []
    stands = len(last) == DEADLOCK_DUMPS and last.count(last[0]) == len(last)
    return stands and last[0][:1] in (["barrier"], ["all_gather"])


def _calls(stacks: Path) -> list[list[str]]:
    """For each dump: functions of torch.distributed, accelerate and TRL, innermost first."""
    files = r"(?:distributed_c10d|accelerator|ddpo_trainer)\.py"
    dumps = stacks.read_text().split("Timeout (")[1:]
    main_threads = (dump.strip().split("\n\n")[-1] for dump in dumps)
    return [re.findall(rf"{files}\", line \d+ in (\w+)", thread) for thread in main_threads]


def _folders(scratch: Path, group: str, processes: int) -> list[Path]:
    return [scratch / f"{group}-{processes}-{rank}" for rank in range(processes)]


def _run(
    python: str, group: str, processes: int, scratch: Path, deadlocked: Callable[[], bool] = lambda: False
) -> Row:
    """Run a group of the worker's rows and return the first process's results.

    The processes get the variables that torchrun sets: ``accelerate launch --cpu`` starts only one
    (accelerate 1.15), and torchrun gives its workers sessions of their own, out of reach of a kill.
    """
    print(f"{group}: the peers run in {processes} process(es) ...", flush=True)
    # One thread: sums in one order, so that a second recording gives the same.
    environment = os.environ | SETTINGS | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    if processes > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
        environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    folders = _folders(scratch, group, processes)
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank, folder in enumerate(folders):
            folder.mkdir()
            own = environment | (dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) if processes > 1 else {})
            command = [python, "-m", "benchmarks.peers.worker", group, str(folder)]
            with (folder / "log.txt").open("w") as log:
                workers.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=log, stderr=log))
        end = time.monotonic() + RUN_SECONDS
        while None in (codes := [worker.poll() for worker in workers]) and not any(codes):
            if deadlocked():
                raise DeadlockError
            if time.monotonic() > end:
                raise TimeoutError(f"{group}: no end after {RUN_SECONDS} s")
            time.sleep(1)
    finally:
        for worker in workers:  # one that failed leaves the other waiting for ever
            worker.kill()
            worker.wait()
    for folder, code in zip(folders, codes, strict=True):
        if code:
            raise RuntimeError(f"{group} failed:\n{(folder / 'log.txt').read_text()[-3000:]}")
    return json.loads((folders[0] / "rows.json").read_text())


def main() -> None:
    python = make_environment()
    rows = {"made_with": versions(python)}
    with tempfile.TemporaryDirectory() as scratch:
        for group, processes in (("one_process", 1), ("bf16", 1), ("drift", 2)):
            rows |= _run(python, group, processes, Path(scratch))
        rows["saving_in_two_processes_deadlocks"] = _save_from_one_and_from_two(python, Path(scratch))
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))
    RESULT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"wrote {RESULT}, {RESULT.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
