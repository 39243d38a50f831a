"""Try to break training runs, count what happens, and write counts.json: `python -m benchmarks.torture`.

A failure is printed and recorded with the arguments that repeat it, and makes the command end with status 1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging

from benchmarks.common import machine, write_json
from benchmarks.torture import damage, disks, generated, kills, rewards
from benchmarks.torture.harness import Counts

RESULT = Path(__file__).parent / "counts.json"

# Each experiment and the number of its cases in a full run.
EXPERIMENTS: dict[str, tuple[Callable[[int, range, Path], Counts], int]] = {
    "kills": (kills.kills, 60),
    "pairs": (kills.pairs, 10),
    "full_disk": (disks.full_disk, 50),
    "read_only": (disks.read_only, 20),
    "clock": (disks.clock, 10),
    "second_trainer": (disks.second_trainer, 30),
    "damage": (damage.damage, 600),
    "metrics": (damage.metrics, 400),
    "generated": (generated.generated, 2000),
    "reward_functions": (rewards.reward_functions, 40),
    "http_service": (rewards.http_service, 50),
}


def run(name: str, seed: int, cases: range) -> dict[str, Any]:
    """Run one experiment in a folder that is deleted afterwards; return its part of the report."""
    before = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        Path(folder).chmod(0o755)  # "read_only" trains as another user
        counts = EXPERIMENTS[name][0](seed, cases, Path(folder))
    report = {
        "what": (EXPERIMENTS[name][0].__doc__ or "").splitlines()[0],
        "cases": len(cases),
        "outcomes": dict(counts.outcomes.most_common()),
        "failures": counts.failures,
        "seconds": round(time.perf_counter() - before, 1),
        **counts.notes,
    }
    print(f"{name}: {json.dumps(report, indent=1, ensure_ascii=False)}", flush=True)
    return report


def main() -> int:
    """Run the experiments that were asked for; write the report after a full run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), help="these experiments")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the cases that are tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="the one case with this number, as a failure names it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    diffusers_logging.disable_progress_bar()
    names = arguments.only or list(EXPERIMENTS)
    reports = {}
    for name in names:
        count = max(1, round(arguments.scale * EXPERIMENTS[name][1]))
        cases = range(count) if arguments.case is None else range(arguments.case, arguments.case + 1)
        reports[name] = run(name, arguments.seed, cases)
    failures = sum(len(report["failures"]) for report in reports.values())
    print(f"{sum(report['cases'] for report in reports.values())} cases, {failures} failures")
    if len(reports) == len(EXPERIMENTS) and arguments.scale >= 1 and arguments.case is None:
        whole = {"machine": machine(), "seed": arguments.seed, "failures": failures, "experiments": reports}
        write_json(RESULT, whole)
        print(f"wrote {RESULT.name}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
