"""What the demo's task is worth without RL: `python -m benchmarks.edit`.

Writes benchmarks/edit_grid.csv, the untrained pipeline over strength, guidance and steps on 200 validation
pictures, and benchmarks/edit.csv, what else there is to compare with, on the 500 test pictures: nothing done,
a program that was written for this world, and the policy trained on pairs, for as many samples as RL.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging

from benchmarks.runs import run_all
from benchmarks.supervised import train_supervised
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.demo import POLICY, SETTINGS, Exam, Img2Img
from ddpo_lessons.prompts import edit_requests
from ddpo_lessons.rollout import make_schedule
from ddpo_lessons.tiny import load_tiny_sd, world

FOLDER = Path(__file__).parent
GRID, RESULTS = FOLDER / "edit_grid.csv", FOLDER / "edit.csv"
SHARES = ("digit", "colours", "both", "second_judge")
STRENGTHS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
GUIDANCES = (1.0, 2.0, 4.0, 7.5)
STEPS = (5, 10, 20)
VALIDATION, TEST = (200, "validation", 0), (500, "test", 0)  # arguments of world.draw_edits
LEARNING_RATES = (3e-4, 1e-3, 2e-3)  # of supervised training
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Cell:
    """A setting of the untrained pipeline."""

    setting: Img2Img

    @property
    def key(self) -> tuple[str, ...]:
        """What names it in the CSV."""
        return tuple(str(value) for value in asdict(self.setting).values())


def measure(cell: Cell) -> list[dict[str, Any]]:
    """Return the judges' verdict on the untrained pipeline with a setting."""
    torch.set_num_threads(1)
    exam = Exam(world.draw_edits(*VALIDATION))
    return [{**asdict(cell.setting), **exam.shares(exam.images(load_tiny_sd(), cell.setting))}]


def grid() -> list[Cell]:
    """Return the settings that differ: strengths that run two steps or more, each number of steps once."""
    scheduler, cells = load_tiny_sd().scheduler, []
    for steps, guidance in itertools.product(STEPS, GUIDANCES):
        lengths = {
            len(make_schedule(scheduler, steps, s)): s for s in reversed(STRENGTHS) if steps * s > 1.99
        }
        cells += [Cell(Img2Img(strength, guidance, steps)) for strength in sorted(lengths.values())]
    return cells


def best_of_grid(rows: list[dict[str, str]]) -> Img2Img:
    """Return the setting with which most pictures are right, the first of equals."""
    row = max(rows, key=lambda row: float(row["both"]))
    return Img2Img(float(row["strength"]), float(row["guidance"]), int(row["steps"]))


# ------------------------------------------------------------------------------ what else can be done
def by_program(edits: world.Edits) -> torch.Tensor:
    """Do it without any model: read the sentence, find the two colours of the picture, repaint it.

    Nobody can write this for photographs: there a colour is not two numbers, and a sentence names anything.
    """
    images, said = edits.pictures.images, [world.parse_prompt(prompt) for prompt in edits.prompts]
    named = world.rgb([d.ink for d in said]), world.rgb([d.background for d in said])
    return world.repaint(images, world.measure_colours(images), named)


@dataclass(frozen=True)
class Alternative:
    """Something else than RL; `seed` is that of training, where there is any."""

    what: str
    seed: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        """What names it in the CSV."""
        return (self.what, str(self.seed))


def taught(seed: int, learning_rate: float) -> Any:
    """Return a pipeline trained on pairs: the demo's layers, batches and number of samples."""
    pipeline = load_tiny_sd()
    config = DDPOConfig(**{**SETTINGS, "train_learning_rate": learning_rate}, seed=seed)
    train_supervised(pipeline, edit_requests(seed), POLICY.strength, config)
    return pipeline


def compare(alternative: Alternative) -> list[dict[str, Any]]:
    """Return the rows of an alternative; the learning rate is chosen on validation pictures, for one seed."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    started, test = time.perf_counter(), Exam(world.draw_edits(*TEST))
    row: dict[str, Any] = {"what": alternative.what, "seed": alternative.seed}
    if alternative.what == "supervised":
        validation = Exam(world.draw_edits(*VALIDATION))
        found = {}
        for rate in LEARNING_RATES if alternative.seed == SEEDS[0] else [chosen_rate()]:
            pipeline = taught(alternative.seed, rate)
            found[rate] = (validation.shares(validation.images(pipeline, POLICY))["both"], pipeline)
        best = max(found, key=lambda rate: found[rate][0])
        row |= {"learning_rate": best, "validation": found[best][0]}
        images = test.images(found[best][1], POLICY)
    else:
        images = test.edits.pictures.images if alternative.what == "untouched" else by_program(test.edits)
    return [{**row, **test.shares(images), "seconds": time.perf_counter() - started}]


def chosen_rate() -> float:
    """Return the learning rate that validation pictures chose for the first seed."""
    rows = read(RESULTS)
    (rate,) = (row["learning_rate"] for row in rows if (row["what"], row["seed"]) == ("supervised", "0"))
    return float(rate)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    """Measure what the CSVs do not hold yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    processes = parser.parse_args().processes
    run_all(measure, grid(), ("strength", "guidance", "steps", *SHARES), GRID, processes)
    print("best of the grid:", best_of_grid(read(GRID)))
    columns = ("what", "seed", "learning_rate", "validation", *SHARES, "seconds")
    first = [Alternative("untouched"), Alternative("program"), Alternative("supervised")]
    for alternatives in (first, [Alternative("supervised", seed) for seed in SEEDS[1:]]):
        run_all(compare, alternatives, columns, RESULTS, processes)


if __name__ == "__main__":
    main()
