"""What RL of an img2img task has to be better than: no change, pixel operations, the untrained policy.

`python -m benchmarks.results.baselines` measures them on the tasks of img2img.py, and
appends a row per setting to baselines.csv; what the file already holds is not run again. Settings are chosen
on validation pictures. Only the chosen ones have an entry in the column "test": the share that the judge
reads of the 500 pictures on which RL was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import Row, parse, run_all
from benchmarks.results.img2img import EXPERIMENTS, NUM_STEPS, SEVERITY, TABLE_IMAGES, Run
from benchmarks.results.pixel_operations import OPERATIONS
from ddpo_lessons.app.demo import restore
from ddpo_lessons.tiny import load_judge, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import accuracy

COLUMNS = ("task", "what", "setting", "validation", "test")
VALIDATION_IMAGES = 200
STEPS = range(2, 9)  # of NUM_STEPS
PROMPTS = ("", "a clear digit")
TASKS = EXPERIMENTS["tasks"]
Change = Callable[[torch.Tensor], torch.Tensor]  # (N, 3, 32, 32) in [0, 1] to the same


@dataclass(frozen=True)
class Baseline:
    """One thing to compare with, on one task."""

    run: Run
    what: str  # a key of CHANGES

    @property
    def task(self) -> str:
        return self.run.variant


# ------------------------------------------------------------------------------------ what is compared
def untrained() -> dict[str, Change]:
    """Return the untrained policy at every strength, with every prompt."""
    pipeline = load_tiny_sd()
    return {
        f"{steps} of {NUM_STEPS}{', ' if prompt else ''}{prompt}": partial(
            restore, pipeline, noise_strength=steps / NUM_STEPS, num_steps=NUM_STEPS, prompt=prompt
        )
        for steps, prompt in itertools.product(STEPS, PROMPTS)
    }


CHANGES: dict[str, Callable[[], dict[str, Change]]] = {
    "untouched": lambda: {"": lambda images: images},
    "operation": lambda: {**OPERATIONS},
    "untrained": untrained,
}


# ----------------------------------------------------------------------------------------- measurement
def read(change: Change, pictures: world.Pictures) -> float:
    """Return the share of changed pictures that the judge reads."""
    return accuracy(load_judge(), change(pictures.images), pictures.digits)


def best(rows: Iterable[Row]) -> Row:
    """Return the row whose setting reads most; the first of equals."""
    return max(rows, key=lambda row: row["validation"])


def measure(baseline: Baseline) -> list[Row]:
    """Read validation pictures with every setting, test pictures with the best, whose row comes last."""
    changes, damage = CHANGES[baseline.what](), baseline.run.damage
    pictures = world.draw_pictures(VALIDATION_IMAGES, "validation", 0, damage, SEVERITY)
    name: Row = {"task": baseline.task, "what": baseline.what}
    rows = [
        {**name, "setting": setting, "validation": read(change, pictures)}
        for setting, change in changes.items()
    ]
    chosen = best(rows)
    chosen["test"] = read(
        changes[chosen["setting"]], world.draw_pictures(TABLE_IMAGES, "test", 0, damage, SEVERITY)
    )
    return sorted(rows, key=lambda row: "test" in row)


def main() -> None:
    """Measure everything."""
    runs = [Baseline(task, what) for what in CHANGES for task in TASKS]
    run_all(measure, runs, COLUMNS, 2, Path(__file__).with_suffix(".csv"), parse(__doc__).processes)


if __name__ == "__main__":
    main()
