"""The digit world with the checkpoints that live in it, `tiny-sd` (the default) and `tiny-sd3`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline

    from ddpo_lessons.tiny.classifier import Judge, RewardModel, SecondJudge

CHECKPOINT = Path(__file__).parent / "checkpoint"
CHECKPOINTS = {
    "tiny-sd": CHECKPOINT,
    "tiny-sd3": CHECKPOINT.with_name("checkpoint_sd3"),
    "tiny-zoo": CHECKPOINT.parents[1] / "zoo" / "checkpoint",
}


def load_tiny_sd() -> StableDiffusionPipeline:
    """Load the shipped checkpoint: a plain pipeline, 32x32 images, latents (4, 8, 8)."""
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(CHECKPOINT, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_tiny_sd3() -> StableDiffusion3Pipeline:
    """Load the flow model of the same world: a plain pipeline, 32x32 images, latents (4, 8, 8).

    Zeros stand for T5, which it lacks. One token of them is enough: call it with `max_sequence_length=1`.
    """
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(
        CHECKPOINTS["tiny-sd3"], text_encoder_3=None, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_reward_model() -> RewardModel:
    """Load the classifier that RL optimises: images (B, 3, 32, 32) in [0, 1] to logits (B, 10)."""
    from safetensors.torch import load_file

    from ddpo_lessons.tiny.classifier import RewardModel

    model = RewardModel()
    model.load_state_dict(load_file(CHECKPOINT / "reward_model.safetensors"))
    return model.eval().requires_grad_(False)


def load_judge() -> Judge:
    """Load the classifier that only measures: images (B, 3, 32, 32) in [0, 1] to logits (B, 10)."""
    from safetensors.torch import load_file

    from ddpo_lessons.tiny.classifier import Judge

    model = Judge()
    model.load_state_dict(load_file(CHECKPOINT / "judge.safetensors"))
    return model.eval().requires_grad_(False)


def load_second_judge() -> SecondJudge:
    """Load the other judge: images (B, 3, 32, 32) in [0, 1] to logits of digit, ink and background."""
    from safetensors.torch import load_file

    from ddpo_lessons.tiny.classifier import SecondJudge

    model = SecondJudge()
    model.load_state_dict(load_file(CHECKPOINT / "second_judge.safetensors"))
    return model.eval().requires_grad_(False)
