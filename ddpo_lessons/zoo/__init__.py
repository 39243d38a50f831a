"""The world of animals, and the checkpoint that draws it, `tiny-zoo`, with a reward model and two judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpo_lessons.tiny import CHECKPOINTS, load_weights

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

    from ddpo_lessons.zoo.judges import Judge, RewardModel, SecondJudge

CHECKPOINT = CHECKPOINTS["tiny-zoo"]


def load_tiny_zoo() -> StableDiffusionPipeline:
    """Load the shipped checkpoint: a plain pipeline, 64x64 images, latents (4, 16, 16)."""
    import torch
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(CHECKPOINT, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    for part in (pipeline.vae, pipeline.unet):  # convolutions on a CPU are faster with channels side by side
        part.to(memory_format=torch.channels_last)
    return pipeline


def load_reward_model() -> RewardModel:
    """Load the classifier that RL optimises: images (B, 3, 64, 64) in [0, 1] to logits of three kinds."""
    from ddpo_lessons.zoo.judges import RewardModel

    return load_weights(RewardModel(), CHECKPOINT / "reward_model.safetensors")


def load_judge() -> Judge:
    """Load the classifier that only measures: images (B, 3, 64, 64) in [0, 1] to logits of three kinds."""
    from ddpo_lessons.zoo.judges import Judge

    return load_weights(Judge(), CHECKPOINT / "judge.safetensors")


def load_second_judge() -> SecondJudge:
    """Load the other judge: images (B, 3, 64, 64) in [0, 1] to logits of three kinds."""
    from ddpo_lessons.zoo.judges import SecondJudge

    return load_weights(SecondJudge(), CHECKPOINT / "second_judge.safetensors")
