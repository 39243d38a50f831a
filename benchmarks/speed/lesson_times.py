"""Time every notebook in a fresh kernel and an empty folder: `python -m benchmarks.speed.lesson_times`.

Writes lesson_times.json, from which the README's table of lessons is made. Run it on
a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from benchmarks.results.demo import machine

RESULT = Path(__file__).parent / "lesson_times.json"
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def seconds_of(path: Path) -> float:
    """Execute one notebook and return how long it took, the start of its kernel included."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return time.perf_counter() - started


def main() -> None:
    """Time the notebooks one after the other; those that are not asked for keep their time."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [path.stem for path in NOTEBOOKS]
    parser.add_argument("names", nargs="*", choices=[*names, []], default=[], help="all, unless named")
    wanted = parser.parse_args().names or names
    seconds = json.loads(RESULT.read_text())["seconds"] if RESULT.exists() else {}
    seconds |= {path.stem: round(seconds_of(path), 1) for path in NOTEBOOKS if path.stem in wanted}
    RESULT.write_text(json.dumps({"machine": machine(), "seconds": seconds}, indent=1) + "\n")
    print(f"wrote {RESULT.name}: {seconds}; now run: python -m benchmarks.tables")


if __name__ == "__main__":
    main()
