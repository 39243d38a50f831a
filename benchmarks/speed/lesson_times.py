"""Time every notebook in a fresh kernel and an empty folder: `python -m benchmarks.speed.lesson_times`.

Writes lesson_times.json, from which the README's table of lessons is made. Run it on a quiet machine.
"""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from benchmarks.common import ROOT, machine, seconds_of, write_json

RESULT = Path(__file__).with_suffix(".json")


def time_of(path: Path) -> float:
    """Execute one notebook and return how long it took, the start of its kernel included."""
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        client = NotebookClient(nbformat.read(path, as_version=4), kernel_name="python3", resources=place)
        return round(seconds_of(client.execute), 1)


def main() -> None:
    seconds = {path.stem: time_of(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    write_json(RESULT, {"machine": machine(), "seconds": seconds})
    print(f"wrote {RESULT.name}: {seconds}; now run: python -m benchmarks.tables")


if __name__ == "__main__":
    main()
