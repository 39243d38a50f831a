"""Steps of training and of sampling: `python -m benchmarks.results.recolor_steps`.

A policy is trained on recolor.py's task in five steps, of which one is an action, with 12,800 samples, a
third of recolor.py's, and three seeds. Then 200 validation images are evaluated: sampled in 5, 10 and 20
steps, with the adapter on at only one of the two steps, and decoded after one network evaluation. For
comparison there are the untrained pipeline's best settings, and best-of-8 with these. Rows go to
recolor_steps.csv, run by run; finished runs are skipped.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, best_draws, parse, run_all, trainer_of
from benchmarks.results.recolor import POLICY, SETTINGS, UNTRAINED_BEST, Evaluation
from benchmarks.tiny.requests import edit_requests
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.lessons.demo import Img2Img, img2img
from ddpo_lessons.models import family_of
from ddpo_lessons.rewards import recoloring
from ddpo_lessons.rollout import from_images
from ddpo_lessons.worlds import digits, load_tiny_sd

RUNS, EPOCHS, IMAGES = ("0", "1", "2", "untrained"), 50, 200  # seeds, and what needs no training
DRAWS = 8
STEPS = (5, 10, 20)  # of sampling
COLUMNS = ("run", "sampled", "digit", "colors", "both", "second_judge")


@torch.no_grad()
def edit_partly(
    pipeline: Any,
    images: torch.Tensor,
    prompts: Sequence[str],
    setting: Img2Img,
    trained: Collection[int],
    calls: int,
) -> torch.Tensor:
    """Edit images (N, 3, H, W) with a trained adapter that is switched off at some steps.

    It is on at the steps in `trained`, counted from the first one, 0. The result is the decoded prediction of
    the clean latents after `calls` network evaluations; after all of them this is the edit.
    """
    family, generator = family_of(pipeline), torch.Generator().manual_seed(0)
    schedule = family.schedule(setting.steps, setting.strength)
    latents = from_images(family, images, schedule, generator=generator)
    conditioning = family.condition(prompts, "", setting.guidance)
    for k, timestep in enumerate(schedule.timesteps[:calls]):
        (pipeline.unet.enable_adapters if k in trained else pipeline.unet.disable_adapters)()
        timesteps = timestep.expand(len(images))
        output = family.predict(family.denoiser, latents, timesteps, conditioning, setting.guidance)
        clean = family.predict_clean(latents, output, timesteps)
        noise = torch.randn(latents.shape, generator=generator)
        latents = schedule.step(output, timesteps, latents, noise=noise).prev_sample
    pipeline.unet.enable_adapters()
    return family.decode(clean)


# The steps at which the adapter is on, and the number of network evaluations before decoding.
PARTS: dict[str, tuple[tuple[int, ...], int]] = {
    "adapter at step 1 only": ((0,), 2),
    "adapter at step 2 only": ((1,), 2),
    "decoded after call 1": ((0, 1), 1),
}


def drawn(edits: digits.Edits) -> dict[str, torch.Tensor]:
    """Return untrained images with the best settings: one sample of each, and best-of-8 by the reward."""
    pipeline, score, given = load_tiny_sd(), recoloring(), edits.inputs
    facts = [{"digit": d, "image": i} for d, i in zip(given.digits.tolist(), given.images, strict=True)]
    task = pipeline, given.images, edits.prompts, UNTRAINED_BEST
    draws = [img2img(*task, draw * IMAGES) for draw in range(DRAWS)]  # (N, 3, 32, 32) each
    best = best_draws(draws, [score(images, edits.prompts, facts)[0] for images in draws])
    return {"untrained, best setting": draws[0], f"untrained, best-of-{DRAWS}": best}


def trained(seed: int, edits: digits.Edits, evaluation: Evaluation) -> dict[str, torch.Tensor]:
    pipeline = load_tiny_sd()
    task, start = (recoloring(), edit_requests(seed), pipeline), FromImages(POLICY.strength)
    with trainer_of(task, SETTINGS, {"seed": seed}, algorithm=DDPO(), start=start) as trainer:
        for epoch in range(EPOCHS):
            trainer.step(epoch)
    made = {f"in {steps} steps": evaluation.images(pipeline, replace(POLICY, steps=steps)) for steps in STEPS}
    for name, part in PARTS.items():
        made[name] = edit_partly(pipeline, edits.inputs.images, edits.prompts, POLICY, *part)
    return made


def measure(run: Row) -> list[Row]:
    edits = digits.draw_edits(IMAGES, "validation", 0)
    evaluation = Evaluation(edits)
    made = drawn(edits) if run["run"] == "untrained" else trained(int(run["run"]), edits, evaluation)
    return [{"sampled": name, **evaluation.fractions(images)} for name, images in made.items()]


if __name__ == "__main__":
    path = Path(__file__).with_suffix(".csv")
    run_all(measure, [{"run": name} for name in RUNS], COLUMNS, path, parse(__doc__).processes)
