"""The demo's task, an animal that hides in confetti, without RL: `python -m benchmarks.zoo.edit`.

Writes edit_grid.csv: the untrained pipeline over strength, guidance scale, steps and η, on 100 validation
images. Then edit.csv has baselines on the 500 test images and on as many of new animals: the input image
itself, a program, the untrained pipeline as RL begins and with its best settings, best-of-n with these by
RL's own reward, and the policy trained on pairs. If interrupted, the script continues with what is missing.
"""

import functools
from pathlib import Path
from typing import Any

import torch
from scipy import ndimage

from benchmarks.common import Row, best_draws, parse, product, read_rows, run_all
from benchmarks.results.edit import best_of_grid
from benchmarks.results.supervised import train_supervised
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.lessons.demo import (
    FAST_POLICY,
    SETTINGS,
    TEST,
    UNTRAINED_BEST,
    VALIDATION,
    Evaluation,
    Img2Img,
    make_reward,
)
from ddpo_lessons.named_prompts import hidden_animals
from ddpo_lessons.worlds import animals, load_tiny_zoo

FOLDER = Path(__file__).parent
GRID, RESULTS = FOLDER / "edit_grid.csv", FOLDER / "edit.csv"
SHARES = ("animal", "artist", "background", "all", "second_judge")
STRENGTHS = (0.375, 0.5, 0.625, 0.75, 0.875)
GUIDANCES = (1.0, 3.0, 6.0, 12.0)
STEPS = (8, 16)
ETAS = (0.0, 1.0)  # diffusers' default, and DDPM's noise
IMAGES = 500
PAIRS = 2_560  # of supervised training, each at all timesteps that RL runs
SEEDS = (0, 1, 2)


def measure(run: Row) -> list[Row]:
    pipeline, evaluation = loaded()
    return [dict(evaluation.measure(pipeline, Img2Img(**run)))]


@functools.cache
def loaded() -> tuple[Any, Evaluation]:
    return load_tiny_zoo(), Evaluation(animals.draw_edits(100, VALIDATION))


# ------------------------------------------------------------------------------ baselines
def around(image: torch.Tensor) -> torch.Tensor:
    """Return the outermost pixels of an image (H, W)."""
    return torch.cat([image[0], image[-1], image[:, 0], image[:, -1]])


def by_program(edits: animals.Edits) -> torch.Tensor:
    """Edit without any model: paint over the confetti, which reaches the frame of the image.

    A disc has one color, so each connected region of one color that reaches the frame counts as confetti.
    Then the largest remaining piece is the animal, and all else is also painted over.
    """
    out = []
    for image, description in zip(edits.images, edits.wanted.descriptions, strict=True):
        background = torch.tensor(animals.BACKGROUNDS[description.background or ""])[:, None, None]
        numbers = (image * 255).round().long()
        one_color = (numbers * torch.tensor([1, 256, 65536])[:, None, None]).sum(dim=0)  # (64, 64)
        kept = torch.ones(64, 64, dtype=torch.bool)
        for color in around(one_color).unique():
            regions = torch.from_numpy(ndimage.label((one_color == color).numpy())[0])
            at_frame = around(regions)
            kept &= ~torch.isin(regions, at_frame[at_frame > 0])
        pieces = torch.from_numpy(ndimage.label(kept.numpy())[0])
        sizes = pieces.flatten().bincount()[1:]
        animal = pieces == 1 + sizes.argmax() if len(sizes) else kept
        out.append(torch.where(animal, image, background))
    return torch.stack(out)


def best_of(count: int, edits: animals.Edits) -> torch.Tensor:
    """Edit each image `count` times with the best untrained settings; keep the highest reward."""
    pipeline, score = load_tiny_zoo(), make_reward()
    seeds = (1_000_000 + first * len(edits.prompts) for first in range(count))
    draws = [Evaluation(edits).images(pipeline, UNTRAINED_BEST, seed) for seed in seeds]
    return best_draws(draws, [score(images, edits.prompts, edits.metadata)[0] for images in draws])


def taught(seed: int) -> Any:
    """Return a pipeline whose adapter, of RL's layers and rank, was trained on pairs in batches of 32."""
    pipeline = load_tiny_zoo()
    changes = {"sample_batch_size": PAIRS, "sample_num_batches_per_epoch": 1, "num_epochs": 1}
    changes |= {"train_batch_size": 32, "train_learning_rate": 1e-3, "seed": seed}
    changes |= {"sample_num_steps": FAST_POLICY.steps}
    config = DDPOConfig(**{**SETTINGS, **changes})
    train_supervised(pipeline, hidden_animals(seed), FAST_POLICY.strength, config)
    return pipeline


def compare(run: Row) -> list[Row]:
    rows, pipeline = [], taught(run["seed"]) if run["what"] == "supervised" else None
    for group, indices in (("practised", animals.PRACTICE_ANIMALS), ("new", animals.NEW_ANIMALS)):
        evaluation = Evaluation(animals.draw_edits(IMAGES, TEST, indices))
        match run["what"]:
            case "untouched":
                images = evaluation.edits.images
            case "program":
                images = by_program(evaluation.edits)
            case "best-of-8":
                images = best_of(8, evaluation.edits)
            case "turned":
                images = evaluation.images(load_tiny_zoo(), UNTRAINED_BEST)
            case "as RL begins" | "supervised":
                images = evaluation.images(pipeline or load_tiny_zoo(), FAST_POLICY)
            case unknown:
                raise ValueError(f"what={unknown!r} is no alternative")
        rows.append({"animals": group, **evaluation.fractions(images)})
    return rows


if __name__ == "__main__":
    processes = parse(__doc__).processes
    grid = product(eta=ETAS, steps=STEPS, guidance=GUIDANCES, strength=STRENGTHS)
    run_all(measure, grid, ("strength", "guidance", "steps", "eta", *SHARES), GRID, processes)
    print("best of the grid:", best_of_grid(read_rows(GRID), "all"))
    alternatives = product(what=("supervised",), seed=SEEDS)  # of training
    alternatives += product(what=("untouched", "program", "best-of-8", "turned", "as RL begins"), seed=(0,))
    run_all(compare, alternatives, ("what", "seed", "animals", *SHARES), RESULTS, processes)
