"""Run the demo for several seeds: `python -m benchmarks.results.demo`.

Writes demo.json and the picture of the first seed that the README shows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

RESULT = Path(__file__).parent / "demo.json"


def processor() -> str:
    """Return the name of the processor, as far as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def machine() -> str:
    """Return what a measured number needs beside it: cores, processor, torch."""
    return f"{os.cpu_count()} cores, {processor()}, torch {torch.__version__}"


def run_demo(seed: int, folder: Path) -> dict[str, Any]:
    """Run `ddpo-lessons demo` as a command and return its results with the seconds it took."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "ddpo_lessons.app.cli", "demo"]
    subprocess.run([*command, "--seed", str(seed), "--output-dir", str(folder)], check=True)
    results = json.loads((folder / "results.json").read_text())
    return {"seed": seed, **results, "seconds": round(time.perf_counter() - started, 1)}


def main() -> None:
    """Run the demo for every seed, one after the other, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = arguments.keep or Path(scratch)
        folders = [base / f"demo-{seed}" for seed in arguments.seeds]
        rows = [run_demo(*job) for job in zip(arguments.seeds, folders, strict=True)]
        image = "before-after.png"  # the README shows that of the first seed
        shutil.copy(folders[0] / image, Path(__file__).parents[2] / "images" / f"demo-{image}")
    RESULT.write_text(json.dumps({"machine": machine(), "runs": rows}, indent=1) + "\n")
    print(f"wrote {RESULT}; now run: python -m benchmarks.tables")


if __name__ == "__main__":
    main()
