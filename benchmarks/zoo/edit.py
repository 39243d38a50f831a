"""An animal in another artist's hand, by img2img without RL: `python -m benchmarks.zoo.edit`.

An animal by one artist goes in, with a sentence that names another artist and another ground, and no animal.
Done right, the picture shows the same animal, in that hand, on that ground. Writes edit_grid.csv, the
untrained pipeline over what a user can turn, on validation pictures; and edit.csv, on the 500 test pictures:
nothing done, the best of several tries by the reward, and the adapter that RL would train, trained on pairs.
Interrupted, it goes on with what is missing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionImg2ImgPipeline

from benchmarks.common import Row, parse, read_rows, run_all, scratch_config
from benchmarks.results.supervised import train_supervised
from ddpo_lessons.app.demo import EVERYWHERE, Img2Img
from ddpo_lessons.data.prompts import redrawing_requests
from ddpo_lessons.rewards import animal_alignment
from ddpo_lessons.zoo import load_judge, load_reward_model, load_second_judge, load_tiny_zoo, world
from ddpo_lessons.zoo.judges import named, verdicts

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
POLICY = Img2Img(0.75, 1.0, 8, eta=0.0)  # six steps are run; who has the answers needs no guidance
SETTINGS: Row = {  # of supervised training
    "num_epochs": 120,
    "sample_num_steps": POLICY.steps,
    "sample_guidance_scale": POLICY.guidance,
    "sample_batch_size": 128,
    "sample_num_batches_per_epoch": 2,
    "train_batch_size": 64,
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
    "train_lora_target_modules": EVERYWHERE,
}
# Seeds of `world.draw_edits`: pictures that training does not draw, as its own have other placements.
TEST, VALIDATION = 0, 1


def redraw(pipeline: Any, edits: world.Edits, setting: Img2Img, first_seed: int = 0) -> torch.Tensor:
    """Edit pictures as a user of plain diffusers would; picture n has noise of its own, always the same.

    Args:
        pipeline: gives its parts, with an adapter if it has one.
        edits: pictures and sentences.
        setting: of img2img.
        first_seed: seed of picture 0's noise; picture n has the n-th after it.

    Returns:
        Images (N, 3, 64, 64) in [0, 1], on the CPU.
    """
    plain = StableDiffusionImg2ImgPipeline(**pipeline.components, requires_safety_checker=False)
    plain.set_progress_bar_config(disable=True)
    out = []
    for numbers in torch.arange(len(edits.prompts)).split(50):
        edited = plain(
            prompt=[edits.prompts[n] for n in numbers],
            image=edits.pictures.images[numbers],
            strength=setting.strength,
            guidance_scale=setting.guidance,
            num_inference_steps=setting.steps,
            eta=setting.eta,
            generator=[torch.Generator().manual_seed(first_seed + int(n)) for n in numbers],
            output_type="pt",
        )
        out.append(edited.images.float().cpu())
    return torch.cat(out)


class Exam:
    """The judges' verdict on what a pipeline makes of pictures and sentences, always from the same noise."""

    def __init__(self, edits: world.Edits) -> None:
        self.edits, self.judges = edits, (load_judge(), load_second_judge())

    def shares(self, images: torch.Tensor) -> dict[str, float]:
        """Return the shares of pictures with animal, artist, ground and all three right, see `verdicts`."""
        right = verdicts(images, self.edits.wanted, *self.judges)
        return {name: hits.double().mean().item() for name, hits in right.items()}

    def measure(self, pipeline: Any, setting: Img2Img) -> dict[str, float]:
        """Return the shares of what a pipeline makes of the pictures."""
        return self.shares(redraw(pipeline, self.edits, setting))


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
    """What else can be done; `seed` is that of training, where there is any."""

    what: str
    seed: int = 0


def best_of(tries: int, edits: world.Edits) -> torch.Tensor:
    """Draw with the best untrained setting several times, and keep what the reward likes most.

    The animal that is to stay is what the reward model sees in the picture that goes in.
    """
    reward, pipeline = animal_alignment(), load_tiny_zoo()
    seen = named(load_reward_model(), edits.pictures.images)[:, 0].tolist()
    metadata = [{"animal": world.ANIMALS[animal]} for animal in seen]
    best = best_of_grid(read_rows(GRID))
    drawn = [redraw(pipeline, edits, best, first_seed=n * len(seen)) for n in range(tries)]
    scores = torch.stack([reward(images, edits.prompts, metadata)[0] for images in drawn])  # (tries, N)
    return torch.stack(drawn)[scores.argmax(dim=0), torch.arange(len(seen))]


def taught(seed: int, learning_rate: float, share: float = 1.0) -> Any:
    """Return a pipeline trained on pairs, on a share of the samples."""
    pipeline = load_tiny_zoo()
    epochs = int(share * SETTINGS["num_epochs"])
    changes = {"train_learning_rate": learning_rate, "num_epochs": epochs}
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
    for alternatives in (first, more):
        run_all(compare, alternatives, columns, 2, RESULTS, processes)


if __name__ == "__main__":
    main()
