"""What RL of an img2img task has to be better than: no change, pixel operations, the untrained policy, pairs.

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
from typing import Any

import torch

from benchmarks.common import Row, parse, run_all
from benchmarks.results.img2img import EXPERIMENTS, NUM_STEPS, SEEDS, SETTINGS, TABLE_IMAGES, Run
from benchmarks.results.pixel_operations import OPERATIONS
from benchmarks.results.supervised import train_supervised
from ddpo_lessons.app.demo import restore
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.prompts import PromptSampler
from ddpo_lessons.tiny import load_judge, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import accuracy

COLUMNS = ("task", "what", "seed", "damage", "severity", "setting", "validation", "test")
VALIDATION_IMAGES = 200
STEPS = range(2, 9)  # of NUM_STEPS
PROMPTS = ("", "a clear digit")
TASKS = EXPERIMENTS["tasks"]
Change = Callable[[torch.Tensor], torch.Tensor]  # (N, 3, 32, 32) in [0, 1] to the same


@dataclass(frozen=True)
class Baseline:
    """One thing to compare with, on one task; `seed` is that of training, where there is any."""

    run: Run
    what: str  # a key of CHANGES
    seed: int = 0

    @property
    def task(self) -> str:
        return self.run.variant


# ------------------------------------------------------------------------------------ what is compared
def untrained(baseline: Baseline) -> dict[str, Change]:
    """Return the untrained policy at every strength, with every prompt."""
    pipeline = load_tiny_sd()
    return {
        f"{steps} of {NUM_STEPS}{', ' if prompt else ''}{prompt}": partial(
            restore, pipeline, noise_strength=steps / NUM_STEPS, num_steps=NUM_STEPS, prompt=prompt
        )
        for steps, prompt in itertools.product(STEPS, PROMPTS)
    }


def pairs_of(task: Run, seed: int) -> PromptSampler:
    """Return the prompt function of a task's pairs, without the handwriting of validation pictures."""

    def draw(generator: Any) -> Any:
        damage, severity = generator.choice(task.damages), generator.choice(task.severities)
        picture = world.draw_pictures(1, "practice", generator.getrandbits(62), damage, severity)
        return "", picture.images[0], {"target": picture.clean[0]}

    return PromptSampler(draw, seed)


def supervised(baseline: Baseline) -> dict[str, Change]:
    """Return the policy that is trained on pairs, with RL's settings and its learning rate."""
    run, pipeline = baseline.run, load_tiny_sd()
    config = DDPOConfig(**{**SETTINGS, **run.config}, num_epochs=run.epochs, seed=baseline.seed)
    train_supervised(pipeline, pairs_of(run, baseline.seed), run.noise_strength, config)
    changed = partial(restore, pipeline, noise_strength=run.noise_strength, num_steps=NUM_STEPS)
    return {f"{config.train_learning_rate:g}": changed}


CHANGES: dict[str, Callable[[Baseline], dict[str, Change]]] = {
    "untouched": lambda _: {"": lambda images: images},
    "operation": lambda _: {**OPERATIONS},
    "untrained": untrained,
    "supervised": supervised,
}


# ----------------------------------------------------------------------------------------- measurement
def read(change: Change, pictures: world.Pictures) -> float:
    """Return the share of changed pictures that the judge reads."""
    return accuracy(load_judge(), change(pictures.images), pictures.digits)


def readings(task: Run, changes: dict[str, Change]) -> list[Row]:
    """Read validation pictures of every damage and severity, changed in every way."""
    rows = []
    for damage, severity in itertools.product(task.damages, task.severities):
        pictures = world.draw_pictures(VALIDATION_IMAGES, "validation", 0, damage, severity)
        kind = {"damage": damage, "severity": severity}
        rows += [
            {**kind, "setting": name, "validation": read(change, pictures)}
            for name, change in changes.items()
        ]
    return rows


def best(rows: Iterable[Row]) -> str:
    """Return the setting that reads most over all kinds of pictures; the first of equals."""
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["setting"]] = totals.get(row["setting"], 0.0) + row["validation"]
    return max(totals, key=lambda name: totals[name])


def measure(baseline: Baseline) -> list[Row]:
    """Choose a setting on validation pictures, read the test pictures with it, and return all rows.

    A policy that was trained on several kinds of pictures is one for all of them. The rest is chosen for each
    kind by itself, which only helps what RL is compared with.
    """
    changes = CHANGES[baseline.what](baseline)
    rows = readings(baseline.run, changes)
    for row in rows:
        kind = (row["damage"], row["severity"])
        shared = baseline.what == "supervised"
        if row["setting"] == best(r for r in rows if shared or (r["damage"], r["severity"]) == kind):
            row["test"] = read(changes[row["setting"]], world.draw_pictures(TABLE_IMAGES, "test", 0, *kind))
    name = {column: getattr(baseline, column) for column in COLUMNS[:3]}
    return [{**name, **row} for row in sorted(rows, key=lambda row: "test" in row)]


def main() -> None:
    """Measure everything, the first seed before the others."""
    *unlearned, _ = CHANGES  # all but supervised
    runs = [Baseline(task, what) for what in unlearned for task in TASKS]
    runs += [Baseline(task, "supervised", seed) for seed in SEEDS for task in TASKS]
    run_all(measure, runs, COLUMNS, 3, Path(__file__).with_suffix(".csv"), parse(__doc__).processes)


if __name__ == "__main__":
    main()
