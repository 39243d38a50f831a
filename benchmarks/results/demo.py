"""Run the demo for several seeds: `python -m benchmarks.results.demo`.

Writes demo.json and the picture of the first seed that the README shows.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, machine, write_json

RESULT = Path(__file__).with_suffix(".json")


def run_demo(seed: int, folder: Path) -> dict[str, Any]:
    """Run `ddpo-lessons demo` as a command and return its results with the seconds it took."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "ddpo_lessons.app.cli", "demo"]
    subprocess.run([*command, "--seed", str(seed), "--output-dir", str(folder)], check=True)
    results = json.loads((folder / "results.json").read_text())
    return {"seed": seed, **results, "seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as scratch:
        rows = [run_demo(seed, Path(scratch, str(seed))) for seed in seeds]  # one after the other
        picture = "before-after.png"
        shutil.copy(Path(scratch, str(seeds[0]), picture), ROOT / "images" / f"demo-{picture}")
    write_json(RESULT, {"machine": machine(), "runs": rows})
    print(f"wrote {RESULT}; now run: python -m benchmarks.tables")


if __name__ == "__main__":
    main()
