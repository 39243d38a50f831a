"""The two small worlds of images of the lessons, `digits` and `animals`, and the models that generate them.

The models are `tiny-sd` (the default) and `tiny-sd3` for digits, and `tiny-zoo` for animals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.loading import quiet_loading

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline


def load_tiny_sd() -> StableDiffusionPipeline:
    """Load tiny-sd as a diffusers pipeline: images (3, 32, 32) of the digit world, latents (4, 8, 8)."""
    return _load("tiny-sd")


def load_tiny_sd3() -> StableDiffusion3Pipeline:
    """Load tiny-sd3, a flow model, as a diffusers pipeline: images (3, 32, 32), latents (4, 8, 8).

    The model has no T5, so zeros replace its embeddings. One token of zeros is enough: call the pipeline with
    `max_sequence_length=1`.
    """
    return _load("tiny-sd3", text_encoder_3=None)


def load_tiny_zoo() -> StableDiffusionPipeline:
    """Load tiny-zoo as a diffusers pipeline: images (3, 64, 64) of animals, latents (4, 16, 16)."""
    import torch

    pipeline = _load("tiny-zoo")
    for part in (pipeline.vae, pipeline.unet):  # convolutions are faster on a CPU
        part.to(memory_format=torch.channels_last)
    return pipeline


def _load(name: str, **left_out: None) -> Any:
    from diffusers import DiffusionPipeline

    with quiet_loading():
        pipeline = DiffusionPipeline.from_pretrained(CHECKPOINTS[name], local_files_only=True, **left_out)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
