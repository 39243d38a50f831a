"""Measure sampling settings without training on recolor.py's task: `python -m benchmarks.results.edit`.

Writes edit_grid.csv: the untrained pipeline over strength, guidance scale, steps and η, on 100 validation
images.
"""

import functools
from pathlib import Path
from typing import Any

from benchmarks.common import Row, best, parse, product, read_rows, run_all
from benchmarks.results.recolor import Evaluation, untrained
from ddpo_lessons.lessons.demo import Img2Img
from ddpo_lessons.worlds import digits, load_tiny_sd

GRID = Path(__file__).parent / "edit_grid.csv"
SHARES = ("digit", "colors", "both", "second_judge")
STRENGTHS = (0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
GUIDANCES = (4.0, 7.5, 12.0, 20.0, 30.0)
STEPS = (5, 10, 20)
ETAS = (0.0, 1.0)  # diffusers' default, and DDPM's noise


def measure(run: Row) -> list[Row]:
    pipeline, evaluation = loaded()
    return [dict(evaluation.fractions(untrained(pipeline, evaluation.edits, Img2Img(**run))))]


@functools.cache
def loaded() -> tuple[Any, Evaluation]:
    return load_tiny_sd(), Evaluation(digits.draw_edits(100, "validation", 0))


def grid() -> list[Row]:
    """Return the settings; of strengths that run equally many steps, one is enough."""
    every = product(eta=ETAS, steps=STEPS, guidance=GUIDANCES, strength=STRENGTHS)
    return [run for run in every if (run["steps"] * run["strength"]).is_integer()]


def best_of_grid(rows: list[Row], column: str) -> Img2Img:
    """Return the settings with the most correct images, the first of equals."""
    row = best(rows, column)
    return Img2Img(float(row["strength"]), float(row["guidance"]), int(row["steps"]), float(row["eta"]))


if __name__ == "__main__":
    run_all(
        measure, grid(), ("strength", "guidance", "steps", "eta", *SHARES), GRID, parse(__doc__).processes
    )
    print("best of the grid:", best_of_grid(read_rows(GRID), "both"))
