"""Time every notebook in a fresh kernel and an empty folder: `python -m benchmarks.lesson_times`.

Writes benchmarks/lesson_times.json, from which the README's table of lessons is made. Run it on
a quiet machine.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from benchmarks.demo_table import machine

RESULT = Path(__file__).parent / "lesson_times.json"
NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def seconds_of(path: Path) -> float:
    """Execute one notebook and return how long it took, the start of its kernel included."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return time.perf_counter() - started


def main() -> None:
    """Time the notebooks one after the other."""
    seconds = {path.stem: round(seconds_of(path), 1) for path in NOTEBOOKS}
    RESULT.write_text(json.dumps({"machine": machine(), "seconds": seconds}, indent=1) + "\n")
    print(f"wrote {RESULT.name}: {seconds}; now run: python -m benchmarks.readme_tables")


if __name__ == "__main__":
    main()
