"""Steps of training and of sampling: `python -m benchmarks.results.recolor_steps`.

A policy learns recolor.py's task in five steps, of which one is an action, for 12,800 samples, a third of
recolor.py's; three seeds. Then the judges look at 200 validation pictures: sampled in five steps, ten and
twenty, with the adapter on at one of the two steps only, and decoded after one call of the network. Beside
them stand the untrained pipeline's best setting, and the best of eight pictures that it makes. Rows go to
recolor_steps.csv, run by run; runs that it holds are skipped.
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

RUNS, EPOCHS, PICTURES = ("0", "1", "2", "untrained"), 50, 200  # seeds, and what needs no training
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
    """Edit pictures (N, 3, H, W) with a trained adapter that is switched off here and there.

    It is on at the steps in `trained`, counted from 0 where the picture begins. After so many network calls
    what the policy then takes for the clean latents is decoded; after all of them that is the edit.
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


# At which of its two steps the adapter is on, and after how many calls to decode.
PARTS: dict[str, tuple[tuple[int, ...], int]] = {
    "adapter at step 1 only": ((0,), 2),
    "adapter at step 2 only": ((1,), 2),
    "decoded after call 1": ((0, 1), 1),
}


def drawn(edits: digits.Edits) -> dict[str, torch.Tensor]:
    """Return untrained pictures at the best setting: those of the first draw, and the best by the score."""
    pipeline, score, given = load_tiny_sd(), recoloring(), edits.inputs
    facts = [{"digit": d, "image": i} for d, i in zip(given.digits.tolist(), given.images, strict=True)]
    task = pipeline, given.images, edits.prompts, UNTRAINED_BEST
    draws = [img2img(*task, draw * PICTURES) for draw in range(DRAWS)]  # (N, 3, 32, 32) each
    best = best_draws(draws, [score(images, edits.prompts, facts)[0] for images in draws])
    return {"untrained, best setting": draws[0], f"untrained, best of {DRAWS}": best}


def trained(seed: int, edits: digits.Edits, exam: Evaluation) -> dict[str, torch.Tensor]:
    pipeline = load_tiny_sd()
    task, start = (recoloring(), edit_requests(seed), pipeline), FromImages(POLICY.strength)
    with trainer_of(task, SETTINGS, {"seed": seed}, algorithm=DDPO(), start=start) as trainer:
        for epoch in range(EPOCHS):
            trainer.step(epoch)
    made = {f"in {steps} steps": exam.images(pipeline, replace(POLICY, steps=steps)) for steps in STEPS}
    for name, part in PARTS.items():
        made[name] = edit_partly(pipeline, edits.inputs.images, edits.prompts, POLICY, *part)
    return made


def measure(run: Row) -> list[Row]:
    edits = digits.draw_edits(PICTURES, "validation", 0)
    exam = Evaluation(edits)
    made = drawn(edits) if run["run"] == "untrained" else trained(int(run["run"]), edits, exam)
    return [{"sampled": name, **exam.shares(images)} for name, images in made.items()]


if __name__ == "__main__":
    path = Path(__file__).with_suffix(".csv")
    run_all(measure, [{"run": name} for name in RUNS], COLUMNS, path, parse(__doc__).processes)
