"""Random tiny pipelines and settings that train in a tenth of a second; importable in child processes."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTokenizer

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.tiny import recipe

SCHEDULE: dict[str, Any] = {
    "beta_schedule": "squaredcos_cap_v2",
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
PROMPTS = ("a red three", "", "a blue four on a white background", "a green digit")


@functools.cache
def make_tokenizer() -> CLIPTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return recipe.make_tokenizer(Path(folder))


def make_pipeline(seed: int = 0, dropout: float = 0.0, **scheduler: Any) -> StableDiffusionPipeline:
    """Make a pipeline of random weights, 32x32 images; `scheduler` overrides its config."""
    tokenizer = make_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(16, 32),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            layers_per_block=1,
            cross_attention_dim=recipe.WIDTH,
            attention_head_dim=2,
            norm_num_groups=8,
            dropout=dropout,
        )
        pipeline = StableDiffusionPipeline(
            vae=recipe.make_vae(),
            text_encoder=recipe.make_text_encoder(tokenizer),
            tokenizer=tokenizer,
            unet=unet,
            scheduler=DDIMScheduler(**{**SCHEDULE, **scheduler}),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.set_progress_bar_config(disable=True)
    for module in (pipeline.unet, pipeline.vae, pipeline.text_encoder):
        module.eval()
    return pipeline


def make_config(folder: Path | str, **changes: Any) -> DDPOConfig:
    """Make settings of one epoch: two samples, three timesteps, one optimizer step."""
    settings = {
        "output_dir": str(folder),
        "num_epochs": 1,
        "image_grid_freq": 0,
        "sample_num_steps": 3,
        "sample_guidance_scale": 2.0,
        "sample_batch_size": 2,
        "sample_num_batches_per_epoch": 1,
        "train_batch_size": 2,
        "train_learning_rate": 1e-3,
        "train_clip_range": 1e-2,
    }
    return DDPOConfig(**{**settings, **changes})


def brightness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """Reward of the mean pixel."""
    return images.mean(dim=(1, 2, 3))


def red_three() -> tuple[str, dict[str, Any]]:
    """Prompt function of one prompt."""
    return "a red three", {}


def each_prompt() -> Any:
    """Make a prompt function that goes round `PROMPTS`, the second of which is empty."""
    drawn: list[None] = []

    def draw() -> tuple[str, dict[str, Any]]:
        drawn.append(None)
        return PROMPTS[(len(drawn) - 1) % len(PROMPTS)], {}

    return draw


def noisy_image() -> tuple[str, torch.Tensor, dict[str, Any]]:
    """Prompt function of an image from torch's global generator, which the trainer seeds."""
    return "", torch.rand(3, 32, 32), {}


def stir_adapter(unet: torch.nn.Module, seed: int = 1) -> None:
    """Give a fresh LoRA adapter, which starts as zero, weights that change the policy."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in unet.named_parameters():
        if "lora_B" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(0.1 * noise)


@contextlib.contextmanager
def counted_passes(unet: torch.nn.Module) -> Iterator[list[int]]:
    """Collect the batch size of every forward pass of a UNet."""
    sizes: list[int] = []
    handle = unet.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(args[0])), with_kwargs=True
    )
    try:
        yield sizes
    finally:
        handle.remove()
