"""The two worlds that the lessons practise in, `digits` and `animals`, and the pipelines that draw them.

They are `tiny-sd` (the default) and `tiny-sd3` for digits, and `tiny-zoo` for animals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpo_lessons.embedded import CHECKPOINTS

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline


def load_tiny_sd() -> StableDiffusionPipeline:
    """Load the model of the digit world: a plain pipeline, 32x32 images, latents (4, 8, 8)."""
    return _load("tiny-sd")


def load_tiny_sd3() -> StableDiffusion3Pipeline:
    """Load the flow model of the digit world: a plain pipeline, 32x32 images, latents (4, 8, 8).

    Zeros stand for T5, which it lacks. One token of them is enough: call it with `max_sequence_length=1`.
    """
    return _load("tiny-sd3", text_encoder_3=None)


def load_tiny_zoo() -> StableDiffusionPipeline:
    """Load the model of the world of animals: a plain pipeline, 64x64 images, latents (4, 16, 16)."""
    import torch

    pipeline = _load("tiny-zoo")
    for part in (pipeline.vae, pipeline.unet):  # convolutions on a CPU are faster with channels side by side
        part.to(memory_format=torch.channels_last)
    return pipeline


def _load(name: str, **left_out: None) -> Any:
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(CHECKPOINTS[name], local_files_only=True, **left_out)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
