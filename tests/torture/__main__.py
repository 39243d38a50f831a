"""Try to break training runs, count what happens, and write counts.json: `python -m tests.torture`.

A failure is printed and recorded with the arguments that repeat it, and makes the command end with status 1.
Each experiment that is run whole replaces its part of counts.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import Row, machine, quiet_thread, write_json
from tests.torture import damage, generated, inputs, runs
from tests.torture.harness import Case, each_case

RESULT = Path(__file__).parent / "counts.json"

# What prepares each experiment in a folder and returns its case; and the number of cases in a full run.
EXPERIMENTS: dict[Callable[[Path], Case], int] = {
    runs.kills: 20,
    runs.pairs: 4,
    runs.full_disk: 20,
    runs.read_only: 8,
    damage.damage: 150,
    generated.generated: 300,
    inputs.inputs: len(inputs.INPUTS),
}
NAMES = {prepare.__name__: prepare for prepare in EXPERIMENTS}


def run(name: str, seed: int, cases: range) -> Row:
    """Run one experiment in a folder that is deleted afterwards; return its part of the report."""
    before, prepare = time.perf_counter(), NAMES[name]
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        Path(folder).chmod(0o755)  # "read_only" trains as another user
        counts = each_case(name, prepare(Path(folder)), seed, cases, Path(folder))
    report = {
        "what": (prepare.__doc__ or "").splitlines()[0],
        "cases": len(cases),
        "outcomes": dict(counts.outcomes.most_common()),
        "failures": counts.failures,
        "seconds": round(time.perf_counter() - before, 1),
    }
    print(f"{name}: {json.dumps(report, indent=1, ensure_ascii=False)}", flush=True)
    return report


def record(name: str, seed: int, report: Row) -> None:
    """Replace an experiment's part of counts.json."""
    reports = json.loads(RESULT.read_text("utf-8"))["experiments"] | {name: report}
    reports = {name: reports[name] for name in NAMES if name in reports}
    write_json(RESULT, {"machine": machine(), "seed": seed, "experiments": reports})


def main() -> int:
    """Run the experiments that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--scale", type=float, default=1.0, help="share of the cases that are tried")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="the one case with this number, as a failure names it")
    arguments = parser.parse_args()
    quiet_thread()
    cases = failures = 0
    for name in arguments.only:
        count = max(1, round(arguments.scale * EXPERIMENTS[NAMES[name]]))
        chosen = range(count) if arguments.case is None else range(arguments.case, arguments.case + 1)
        report = run(name, arguments.seed, chosen)
        cases, failures = cases + len(chosen), failures + len(report["failures"])
        if arguments.scale >= 1 and arguments.case is None:
            record(name, arguments.seed, report)
    print(f"{cases} cases, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
