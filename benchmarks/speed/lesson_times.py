"""Time every notebook in a fresh kernel and an empty folder: `python -m benchmarks.speed.lesson_times`.

Writes lesson_times.json, from which the README's table of lessons is made. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from benchmarks.common import ROOT, machine, write_json

RESULT = Path(__file__).with_suffix(".json")
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


def seconds_of(path: Path) -> float:
    """Execute one notebook and return how long it took, the start of its kernel included."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return round(time.perf_counter() - started, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NOTEBOOKS, []], default=[], help="all, unless named")
    wanted = parser.parse_args().names or NOTEBOOKS
    seconds = json.loads(RESULT.read_text())["seconds"] if RESULT.exists() else {}
    seconds |= {name: seconds_of(NOTEBOOKS[name]) for name in wanted}
    write_json(RESULT, {"machine": machine(), "seconds": seconds})
    print(f"wrote {RESULT.name}: {seconds}; now run: python -m benchmarks.tables")


if __name__ == "__main__":
    main()
