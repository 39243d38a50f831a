"""Digits in other colors, the task of edit.py, recolor_steps.py, equal_terms.py and time_to_result.py.

The input image is a handwritten digit, and the prompt names two other colors and no digit. A correct result
has both colors of the prompt, and still the digit of the input.
"""

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.common import Row
from ddpo_lessons.lessons.demo import EVERYWHERE, Img2Img, img2img
from ddpo_lessons.rollout import SamplingSettings, img2img_rollout, sample_seed
from ddpo_lessons.worlds import digits
from ddpo_lessons.worlds.digits import judge_edits

POLICY = Img2Img(0.4, 2.0, 5)  # two steps are run, the first of which is an action
# The untrained pipeline's settings with the most correct images, of a grid of all four: edit_grid.csv.
UNTRAINED_BEST = Img2Img(0.4, 30.0, 10)
SETTINGS: Row = {
    "num_epochs": 150, "sample_num_steps": POLICY.steps, "sample_guidance_scale": POLICY.guidance,
    "sample_batch_size": 128, "sample_num_batches_per_epoch": 2,
    "sample_group_size": 8,  # rollouts from one noise, so that only the actions explain the rewards
    "train_batch_size": 256,  # one optimizer step an epoch
    # The other trainers' 3e-4 and 1e-4 hardly change a model this small.
    "train_learning_rate": 2e-3, "train_clip_range": 5e-3, "train_lora_rank": 16, "train_lora_alpha": 16,
    "train_lora_target_modules": EVERYWHERE, "save_freq": 50, "image_grid_freq": 0,
}  # fmt: skip


def untrained(pipeline: Any, edits: digits.Edits, setting: Img2Img) -> torch.Tensor:
    """Edit images as a user of plain diffusers would, see `img2img`."""
    return img2img(pipeline, edits.inputs.images, edits.prompts, setting)


def restore(pipeline: Any, images: torch.Tensor, prompts: Sequence[str], setting: Img2Img) -> torch.Tensor:
    """Edit images by the policy, each with noise of its own; the results are on the CPU."""
    how = SamplingSettings(
        num_inference_steps=setting.steps, guidance_scale=setting.guidance, eta=setting.eta
    )
    out = []
    for numbers in torch.arange(len(images)).split(100):
        noise = [torch.Generator().manual_seed(sample_seed(0, int(n))) for n in numbers]
        arguments = [prompts[n] for n in numbers], images[numbers], setting.strength, how
        out.append(img2img_rollout(pipeline, *arguments, generator=noise)[0].cpu())
    return torch.cat(out)


class Evaluation:
    """Evaluate a pipeline's edits with the held-out evaluators, always from the same noise."""

    def __init__(self, edits: digits.Edits) -> None:
        self.edits = edits
        self.judges = digits.Judge.load(), digits.SecondJudge.load()

    def images(self, pipeline: Any, setting: Img2Img) -> torch.Tensor:
        """Edit the input images by the policy, (N, 3, 32, 32)."""
        return restore(pipeline, self.edits.inputs.images, self.edits.prompts, setting)

    def fractions(self, images: torch.Tensor) -> dict[str, float]:
        """Return the fractions of images with correct digit, colors and both, see `judge_edits`."""
        verdicts = judge_edits(images, self.edits, *self.judges)
        return {name: hits.double().mean().item() for name, hits in verdicts.items()}
