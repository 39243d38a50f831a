"""What turning the knobs gets on recolour.py's task: `python -m benchmarks.results.edit`.

Writes edit_grid.csv, the untrained pipeline over what a user can turn, on 100 validation pictures.
"""

import functools
import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import Row, parse, read_rows, run_all
from benchmarks.results.recolour import Exam, untrained
from ddpo_lessons.app.demo import Img2Img
from ddpo_lessons.worlds import digits, load_tiny_sd

GRID = Path(__file__).parent / "edit_grid.csv"
SHARES = ("digit", "colours", "both", "second_judge")
STRENGTHS = (0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
GUIDANCES = (4.0, 7.5, 12.0, 20.0, 30.0)
STEPS = (5, 10, 20)
ETAS = (0.0, 1.0)  # diffusers' default, and DDPM's noise


def measure(setting: Img2Img) -> list[Row]:
    """Return the judges' verdict on the untrained pipeline with a setting."""
    pipeline, exam = loaded()
    return [{**asdict(setting), **exam.shares(untrained(pipeline, exam.edits, setting))}]


@functools.cache
def loaded() -> tuple[Any, Exam]:
    """Load the pipeline and the judges once in a process."""
    return load_tiny_sd(), Exam(digits.draw_edits(100, "validation", 0))


def grid() -> list[Img2Img]:
    """Return the settings; of strengths that run equally many steps one is enough."""
    return [
        Img2Img(strength, guidance, steps, eta)
        for eta, steps, guidance, strength in itertools.product(ETAS, STEPS, GUIDANCES, STRENGTHS)
        if (steps * strength).is_integer()
    ]


def best_of_grid(rows: list[dict[str, str]]) -> Img2Img:
    """Return the setting with which most pictures are right, the first of equals."""
    row = max(rows, key=lambda row: float(row["both"]))
    return Img2Img(float(row["strength"]), float(row["guidance"]), int(row["steps"]), float(row["eta"]))


def main() -> None:
    """Measure the grid."""
    columns, processes = ("strength", "guidance", "steps", "eta", *SHARES), parse(__doc__).processes
    run_all(measure, grid(), columns, 4, GRID, processes)
    print("best of the grid:", best_of_grid(read_rows(GRID)))


if __name__ == "__main__":
    main()
