"""Run the demo for several seeds: `python -m benchmarks.results.demo`.

Writes demo.json and the picture of the first seed that the README shows.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, machine, seconds_of, write_json

RESULT = Path(__file__).with_suffix(".json")
SEEDS = (0, 1, 2)


def run_demo(seed: int, folder: Path) -> dict[str, Any]:
    """Run `ddpo-lessons demo` as a command and return its results with the seconds it took."""
    command = [sys.executable, "-m", "ddpo_lessons.app.cli", "demo", "--seed", str(seed)]
    command += ["--output-dir", str(folder)]
    seconds = seconds_of(lambda: subprocess.run(command, check=True))
    results = json.loads((folder / "results.json").read_text())
    return {"seed": seed, **results, "seconds": round(seconds, 1)}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        rows = [run_demo(seed, Path(scratch, str(seed))) for seed in SEEDS]  # one after the other
        picture = "before-after.png"
        shutil.copy(Path(scratch, str(SEEDS[0]), picture), ROOT / "images" / f"demo-{picture}")
    write_json(RESULT, {"machine": machine(), "runs": rows})
    print(f"wrote {RESULT}; now run: python -m benchmarks.tables")


if __name__ == "__main__":
    main()
