"""What the task of recolour.py is worth without RL: `python -m benchmarks.results.edit`.

Writes edit_grid.csv, the untrained pipeline over what a user can turn, on 100 validation pictures;
images/07-strengths.png; and edit.csv, what else there is to compare with, on the 500 test
pictures: nothing done, a program written for this world, and the policy trained on pairs, for as many
samples as RL.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, Row, parse, read_rows, run_all
from benchmarks.results.recolour import POLICY, SETTINGS, Exam, untrained
from benchmarks.results.supervised import train_supervised
from benchmarks.tiny.requests import edit_requests
from ddpo_lessons.app.demo import Img2Img
from ddpo_lessons.app.plotting import plot_strip, save_figure
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.tiny import load_tiny_sd, world

FOLDER = Path(__file__).parent
GRID, RESULTS = FOLDER / "edit_grid.csv", FOLDER / "edit.csv"
SHARES = ("digit", "colours", "both", "second_judge")
STRENGTHS = (0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
GUIDANCES = (4.0, 7.5, 12.0, 20.0, 30.0)
STEPS = (5, 10, 20)
ETAS = (0.0, 1.0)  # diffusers' default, and DDPM's noise
VALIDATION, TEST = (100, "validation", 0), (500, "test", 0)  # arguments of world.draw_edits
LEARNING_RATES = (3e-4, 1e-3, 2e-3)  # of supervised training, tried on
SEARCH_SHARE = 0.2  # of the samples
TAUGHT = replace(POLICY, guidance=1.0)  # who has the answers needs no guidance, which would cost twice
SEEDS = (0, 1, 2)


def measure(setting: Img2Img) -> list[Row]:
    """Return the judges' verdict on the untrained pipeline with a setting."""
    pipeline, exam = loaded()
    return [{**asdict(setting), **exam.shares(untrained(pipeline, exam.edits, setting))}]


@functools.cache
def loaded() -> tuple[Any, Exam]:
    """Load the pipeline and the judges once in a process."""
    return load_tiny_sd(), Exam(world.draw_edits(*VALIDATION))


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


def draw_strengths() -> None:
    """Draw images/07-strengths.png: the first pictures of the validation split at every strength."""
    edits, pipeline = world.draw_edits(3, "validation", 0), load_tiny_sd()
    columns = {"goes in": edits.pictures.images}
    for strength in STRENGTHS:
        setting = Img2Img(strength, guidance=7.5, steps=10, eta=0.0)  # guidance and η: diffusers' defaults
        columns[f"strength {strength:g}"] = untrained(pipeline, edits, setting)
    pictures = torch.stack(list(columns.values()), dim=1)  # (3, columns, 3, 32, 32)
    rows = dict(zip(edits.prompts, pictures, strict=True))
    save_figure(plot_strip(rows, list(columns), len(columns)), ROOT / "images" / "07-strengths.png")


# ------------------------------------------------------------------------------ what else can be done
def by_program(edits: world.Edits) -> torch.Tensor:
    """Do it without any model: read the sentence, find the two colours of the picture, repaint it.

    Nobody can write this for photographs: they are not made of two colours, and a sentence names anything.
    """
    images, said = edits.pictures.images, [world.parse_prompt(prompt) for prompt in edits.prompts]
    named = world.rgb([d.ink for d in said]), world.rgb([d.background for d in said])
    return world.repaint(images, world.measure_colours(images), named)


@dataclass(frozen=True)
class Alternative:
    """Something else than RL; `seed` is that of training, where there is any."""

    what: str
    seed: int = 0


def taught(seed: int, learning_rate: float, share: float = 1.0) -> Any:
    """Return a pipeline trained on pairs, in batches of 64: RL's layers and a share of its samples."""
    pipeline = load_tiny_sd()
    changes = {"train_learning_rate": learning_rate, "num_epochs": int(share * SETTINGS["num_epochs"])}
    changes |= {"sample_guidance_scale": TAUGHT.guidance, "train_batch_size": 64, "seed": seed}
    config = DDPOConfig(**{**SETTINGS, **changes})
    train_supervised(pipeline, edit_requests(seed), TAUGHT.strength, config)
    return pipeline


def compare(alternative: Alternative) -> list[Row]:
    """Return the row of an alternative."""
    test, row = Exam(world.draw_edits(*TEST)), asdict(alternative)
    if alternative.what == "supervised":
        row["learning_rate"] = learning_rate(alternative.seed)
        images = test.images(taught(alternative.seed, row["learning_rate"]), TAUGHT)
    else:
        images = test.edits.pictures.images if alternative.what == "untouched" else by_program(test.edits)
    return [{**row, **test.shares(images)}]


def learning_rate(seed: int) -> float:
    """Return the rate with which most validation pictures are right; later seeds take the first one's."""
    if seed != SEEDS[0]:
        return next(float(row["learning_rate"]) for row in read_rows(RESULTS) if row["what"] == "supervised")
    exam = Exam(world.draw_edits(*VALIDATION))
    found = {rate: taught(seed, rate, SEARCH_SHARE) for rate in LEARNING_RATES}
    return max(found, key=lambda rate: exam.shares(exam.images(found[rate], TAUGHT))["both"])


def main() -> None:
    processes = parse(__doc__).processes
    run_all(measure, grid(), ("strength", "guidance", "steps", "eta", *SHARES), 4, GRID, processes)
    print("best of the grid:", best_of_grid(read_rows(GRID)))
    draw_strengths()
    columns = ("what", "seed", "learning_rate", *SHARES)
    first = [Alternative("untouched"), Alternative("program"), Alternative("supervised")]
    for alternatives in (first, [Alternative("supervised", seed) for seed in SEEDS[1:]]):
        run_all(compare, alternatives, columns, 2, RESULTS, processes)


if __name__ == "__main__":
    main()
