"""An animal in another artist's hand, by img2img without training: `python -m benchmarks.zoo.edit`.

An animal by one artist goes in, with a sentence that names another artist and another ground, and no animal.
Done right, the picture shows the same animal, in that hand, on that ground. Writes edit_grid.csv: what the
untrained pipeline makes of 60 validation pictures, over what a user can turn. Interrupted, it goes on with
what is missing.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionImg2ImgPipeline

from benchmarks.common import Row, parse, read_rows, run_all
from ddpo_lessons.app.demo import Img2Img
from ddpo_lessons.zoo import load_judge, load_second_judge, load_tiny_zoo, world
from ddpo_lessons.zoo.judges import verdicts

GRID = Path(__file__).with_name("edit_grid.csv")
SHARES = ("animal", "artist", "ground", "sentence", "all", "second_judge")
STRENGTHS = (0.5, 0.625, 0.75, 0.875, 1.0)
GUIDANCES = (1.0, 3.0, 6.0, 12.0)
STEPS = (8, 16)
ETAS = (0.0, 1.0)  # diffusers' default, and DDPM's noise
PICTURES, VALIDATION = 60, 1  # number, and seed of `world.draw_edits`


def redraw(pipeline: Any, edits: world.Edits, setting: Img2Img) -> torch.Tensor:
    """Edit pictures with plain diffusers; picture n has noise of its own, always the same.

    Args:
        pipeline: gives its parts, with an adapter if it has one.
        edits: pictures and sentences.
        setting: of img2img.

    Returns:
        Images (N, 3, 64, 64) in [0, 1].
    """
    plain = StableDiffusionImg2ImgPipeline(**pipeline.components, requires_safety_checker=False)
    plain.set_progress_bar_config(disable=True)
    return plain(
        prompt=edits.prompts,
        image=edits.pictures.images,
        strength=setting.strength,
        guidance_scale=setting.guidance,
        num_inference_steps=setting.steps,
        eta=setting.eta,
        generator=[torch.Generator().manual_seed(n) for n in range(len(edits.prompts))],
        output_type="pt",
    ).images.float()


@functools.cache
def loaded() -> tuple[Any, Any, Any]:
    """Load the pipeline and the judges once in a process."""
    return load_tiny_zoo(), load_judge(), load_second_judge()


def measure(setting: Img2Img) -> list[Row]:
    """Return the shares of pictures with animal, artist, ground, both of these, and all three right."""
    pipeline, *judges = loaded()
    edits = world.draw_edits(PICTURES, VALIDATION)
    right = verdicts(redraw(pipeline, edits, setting), edits.wanted, *judges)
    return [{**asdict(setting), **{name: right[name].double().mean().item() for name in SHARES}}]


def best_of_grid(rows: list[dict[str, str]]) -> Img2Img:
    """Return the setting with which most pictures are right, the first of equals."""
    row = max(rows, key=lambda row: float(row["all"]))
    return Img2Img(float(row["strength"]), float(row["guidance"]), int(row["steps"]), float(row["eta"]))


def main() -> None:
    grid = [
        Img2Img(strength, guidance, steps, eta)
        for eta, steps, guidance, strength in itertools.product(ETAS, STEPS, GUIDANCES, STRENGTHS)
    ]
    columns = ("strength", "guidance", "steps", "eta", *SHARES)
    run_all(measure, grid, columns, 4, GRID, parse(__doc__).processes)
    print("best of the grid:", best_of_grid(read_rows(GRID)))


if __name__ == "__main__":
    main()
