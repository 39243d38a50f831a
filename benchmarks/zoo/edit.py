"""What the demo's task is worth without RL, and what its choices are worth: `python -m benchmarks.zoo.edit`.

Writes edit_grid.csv, the untrained pipeline over what a user can turn, on validation pictures; and edit.csv,
on the 500 test pictures: nothing done, the best of several tries by the reward, the policy trained on pairs,
and RL as the demo does it with one thing changed. Interrupted, it goes on with what is missing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, read_rows, run_all, scratch_config
from benchmarks.results.supervised import train_supervised
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.app.demo import POLICY, SETTINGS, TEST, UNTRAINED_BEST, VALIDATION, Exam, Img2Img, redraw
from ddpo_lessons.data.prompts import redrawing_requests
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.ddim import predict_x0_and_noise
from ddpo_lessons.families import family_of
from ddpo_lessons.rewards import animal_alignment
from ddpo_lessons.trainer import Runner
from ddpo_lessons.zoo import load_reward_model, load_tiny_zoo, world
from ddpo_lessons.zoo.judges import named

FOLDER = Path(__file__).parent
GRID, RESULTS = FOLDER / "edit_grid.csv", FOLDER / "edit.csv"
SHARES = ("animal", "artist", "ground", "sentence", "all", "second_judge")
STRENGTHS = (0.5, 0.625, 0.75, 0.875, 1.0)
GUIDANCES = (1.0, 3.0, 6.0, 12.0)
STEPS = (8, 16)
ETAS = (0.0, 1.0)  # diffusers' default, and DDPM's noise
GRID_PICTURES, TEST_PICTURES = 60, 500
LEARNING_RATES = (3e-4, 1e-3, 2e-3)  # of supervised training, tried on
SEARCH_SHARE = 0.2  # of the samples
SEEDS = (0, 1, 2)
ONE_ACTION = replace(POLICY, steps=3)  # two steps are run, the first of which is the action
DDPM = replace(POLICY, eta=1.0)  # every step but the last has noise, in training and in the exam


# --------------------------------------------------------------------------------------------- the grid
def measure(setting: Img2Img) -> list[Row]:
    """Return the judges' verdict on the untrained pipeline with a setting."""
    pipeline, exam = loaded()
    return [{**asdict(setting), **exam.measure(pipeline, setting)}]


@functools.cache
def loaded() -> tuple[Any, Exam]:
    """Load the pipeline and the judges once in a process."""
    return load_tiny_zoo(), Exam(world.draw_edits(GRID_PICTURES, VALIDATION))


def best_of_grid(rows: list[dict[str, str]]) -> Img2Img:
    """Return the setting with which most pictures are right, the first of equals."""
    row = max(rows, key=lambda row: float(row["all"]))
    return Img2Img(float(row["strength"]), float(row["guidance"]), int(row["steps"]), float(row["eta"]))


# ------------------------------------------------------------------------------ what else can be done
@dataclass(frozen=True)
class Alternative:
    """Something beside the demo; `seed` is that of training, where there is any."""

    what: str
    seed: int = 0


def best_of(tries: int, edits: world.Edits) -> torch.Tensor:
    """Draw with the best untrained setting several times, and keep what the demo's reward likes most.

    The animal that is to stay is what the reward model sees in the picture that goes in.
    """
    reward, pipeline = animal_alignment(), load_tiny_zoo()
    seen = named(load_reward_model(), edits.pictures.images)[:, 0].tolist()
    metadata = [{"animal": world.ANIMALS[animal]} for animal in seen]
    drawn = [redraw(pipeline, edits, UNTRAINED_BEST, first_seed=n * len(seen)) for n in range(tries)]
    scores = torch.stack([reward(images, edits.prompts, metadata)[0] for images in drawn])  # (tries, N)
    return torch.stack(drawn)[scores.argmax(dim=0), torch.arange(len(seen))]


def taught(seed: int, learning_rate: float, share: float = 1.0) -> Any:
    """Return a pipeline trained on pairs, in batches of 64: the demo's layers and a share of its samples."""
    pipeline = load_tiny_zoo()
    epochs = int(share * SETTINGS["num_epochs"])
    changes = {"train_learning_rate": learning_rate, "num_epochs": epochs, "train_batch_size": 64}
    with scratch_config(SETTINGS, changes, seed=seed) as config:
        train_supervised(pipeline, redrawing_requests(seed), POLICY.strength, config)
    return pipeline


def learning_rate(seed: int) -> float:
    """Return the rate with which most validation pictures are right; later seeds take the first one's."""
    if seed != SEEDS[0]:
        return next(float(row["learning_rate"]) for row in read_rows(RESULTS) if row["what"] == "supervised")
    exam = Exam(world.draw_edits(GRID_PICTURES, VALIDATION))
    found = {rate: exam.measure(taught(seed, rate, SEARCH_SHARE), POLICY)["all"] for rate in LEARNING_RATES}
    return max(found, key=lambda rate: found[rate])


def trained(seed: int, policy: Img2Img, algorithm: str, **changes: Any) -> Any:
    """Return a pipeline trained by RL, as the demo does it but for the policy's steps and the algorithm."""
    pipeline = load_tiny_zoo()
    with scratch_config(SETTINGS, changes, seed=seed, sample_num_steps=policy.steps) as config:
        trainer = Runner(
            config,
            animal_alignment(),
            redrawing_requests(seed),
            pipeline,
            algorithm=make_algorithm(algorithm),
            start=FromImages(policy.strength),
        )
        trainer.train()
    return pipeline


@torch.no_grad()
def after_one_call(pipeline: Any, edits: world.Edits) -> torch.Tensor:
    """Decode what the policy predicts of the clean latents in the first of its steps."""
    family = family_of(pipeline)
    timesteps = family.schedule(POLICY.steps, POLICY.strength).timesteps[:1]  # (1,)
    out = []
    for numbers in torch.arange(len(edits.prompts)).split(100):
        clean = family.encode(edits.pictures.images[numbers])  # (B, C, h, w)
        noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(int(numbers[0])))
        latents = family.add_noise(clean, noise, timesteps)
        told = family.condition([edits.prompts[n] for n in numbers], "", POLICY.guidance)
        steps = timesteps.expand(len(numbers))
        output = family.predict(family.denoiser, latents, steps, told, POLICY.guidance)
        alpha_bar = pipeline.scheduler.alphas_cumprod[steps].view(-1, 1, 1, 1)
        predicted, _ = predict_x0_and_noise(pipeline.scheduler, output, latents, alpha_bar)
        out.append(family.decode(predicted))
    return torch.cat(out)


def compare(alternative: Alternative) -> list[Row]:
    """Return the rows of an alternative."""
    edits, seed, what = world.draw_edits(TEST_PICTURES, TEST), alternative.seed, alternative.what
    exam, row = Exam(edits), asdict(alternative)
    if what == "supervised":
        row["learning_rate"] = learning_rate(seed)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "untouched": lambda: edits.pictures.images,
        "best of 4": lambda: best_of(4, edits),
        "best of 16": lambda: best_of(16, edits),
        "supervised": lambda: redraw(taught(seed, row["learning_rate"]), edits, POLICY),
        "one network call": lambda: after_one_call(trained(seed, POLICY, "branching"), edits),
        "one action": lambda: redraw(trained(seed, ONE_ACTION, "branching"), edits, ONE_ACTION),
        "DDPO": lambda: redraw(trained(seed, DDPM, "ddpo"), edits, DDPM),
    }
    return [{**row, **exam.shares(made[what]())}]


def main() -> None:
    processes = parse(__doc__).processes
    grid = [
        Img2Img(strength, guidance, steps, eta)
        for eta, steps, guidance, strength in itertools.product(ETAS, STEPS, GUIDANCES, STRENGTHS)
        if (steps * strength).is_integer()
    ]
    run_all(measure, grid, ("strength", "guidance", "steps", "eta", *SHARES), 4, GRID, processes)
    print("best of the grid:", best_of_grid(read_rows(GRID)))
    columns = ("what", "seed", "learning_rate", *SHARES)
    first = [Alternative(what) for what in ("untouched", "best of 4", "best of 16", "supervised")]
    more = [Alternative("supervised", seed) for seed in SEEDS[1:]]
    more += [Alternative(what, seed) for seed in SEEDS for what in ("DDPO", "one action", "one network call")]
    for alternatives in (first, more):
        run_all(compare, alternatives, columns, 2, RESULTS, processes)


if __name__ == "__main__":
    main()
