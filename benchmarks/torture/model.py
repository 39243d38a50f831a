"""A pipeline and settings that train in milliseconds, and what every experiment does with them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from benchmarks.torture.harness import expect
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.runlog import read_metrics
from ddpo_lessons.tiny.recipe import make_tokenizer
from ddpo_lessons.trainer import DDPOTrainer

PIXELS = 8
PROMPTS = ("a red three", "", "a blue four on a white background", "a green digit")
VAE = {"block_out_channels": (4, 4), "norm_num_groups": 2, "latent_channels": 4, "sample_size": PIXELS}
TEXT = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
UNET = {"block_out_channels": (8,), "norm_num_groups": 2, "cross_attention_dim": 8, "attention_head_dim": 2}
UNET |= {"sample_size": PIXELS // 2}
SCHEDULE = {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "steps_offset": 1}


@functools.cache
def tokenizer() -> CLIPTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return make_tokenizer(Path(folder))


def make_pipeline() -> StableDiffusionPipeline:
    """Make a pipeline of random weights: images (3, 8, 8), latents (4, 4, 4)."""
    words = tokenizer()
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id}
    text = CLIPTextConfig(
        vocab_size=len(words), max_position_embeddings=words.model_max_length, **TEXT, **ids
    )
    coders = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline = StableDiffusionPipeline(
            vae=AutoencoderKL(**VAE, **coders),
            text_encoder=CLIPTextModel(text),
            tokenizer=words,
            unet=UNet2DConditionModel(mid_block_type=None, layers_per_block=1, **UNET, **blocks),
            scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, **SCHEDULE),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    for module in (pipeline.unet, pipeline.vae, pipeline.text_encoder):
        module.eval()
    return pipeline


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run of one epoch: two samples, three timesteps, two optimizer steps."""
    return {
        "output_dir": str(folder),
        "num_epochs": 1,
        "num_checkpoint_limit": 2,
        "image_grid_freq": 0,
        "sample_num_steps": 3,
        "sample_guidance_scale": 1.0,
        "sample_batch_size": 2,
        "sample_num_batches_per_epoch": 1,
        "train_batch_size": 1,
        "train_learning_rate": 1e-2,
        "train_clip_range": 1e-2,
        **changes,
    }


def brightness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return images.mean(dim=(1, 2, 3))


def any_prompt() -> tuple[str, dict[str, Any]]:
    """Prompt function that draws from torch's global generator, which the trainer seeds."""
    return PROMPTS[int(torch.randint(len(PROMPTS), ()))], {}


def make_trainer(folder: Path, reward: Any = brightness, **changes: Any) -> DDPOTrainer:
    """Make a trainer that continues what the folder holds, or begins anew."""
    resume = "latest" if checkpoint.list_checkpoints(folder) else ""
    merged = settings(folder, **{"resume_from": resume, "overwrite": not resume, **changes})
    return DDPOTrainer(DDPOConfig(**merged), reward, any_prompt, make_pipeline())


def whole_run(folder: Path, reward: Any = brightness, **changes: Any) -> dict[str, Any]:
    """Return the result of a run that nothing happens to."""
    make_trainer(folder, reward, **changes).train()
    return result_of(folder)


def continue_run(folder: Path, whole: dict[str, Any], reward: Any = brightness, **changes: Any) -> None:
    """Continue a run to its end, which must be that of a run that nothing happened to."""
    expect(whole_run(folder, reward, **changes) == whole, "the continued run differs")


def result_of(folder: Path) -> dict[str, Any]:
    """Return what a finished run is judged by: its last checkpoint's tensors and counters, its step records.

    The times of the epoch records are the clock's; everything else must repeat.
    """
    tensors, state = checkpoint.read(checkpoint.list_checkpoints(folder)[-1])
    epochs = [
        {name: value for name, value in record.items() if not name.startswith("seconds")}
        for record in read_metrics(folder, "epoch")
    ]
    named = {f"{stem}|{name}": tensor for stem, group in tensors.items() for name, tensor in group.items()}
    return {
        "tensors": {name: (str(tensor.dtype), tensor.numpy().tobytes()) for name, tensor in named.items()},
        "counters": (state["epochs_done"], state["global_step"], state["algorithm"]),
        "steps": read_metrics(folder, "step"),
        "epochs": epochs,
    }
