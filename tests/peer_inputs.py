"""The tiny model and the tensors that golden/peers.json was recorded on; both follow from seeds."""

import dataclasses
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


def seeded_normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Standard normal float32 numbers that every version of NumPy and torch reproduces."""
    # RandomState's streams are frozen by NumPy's compatibility policy; the Generator's are not.
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape).astype(np.float32))


def tiny_scheduler(**changes: Any) -> DDIMScheduler:
    """Stable Diffusion's schedule, with latents left unclipped."""
    config: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    config |= {"steps_offset": 1, "clip_sample": False, "set_alpha_to_one": False}
    return DDIMScheduler(**(config | changes))


def make_tiny_pipeline(**scheduler_changes: Any) -> StableDiffusionPipeline:
    """Make a pipeline shaped like Stable Diffusion (16 x 16 pixels) with the same weights everywhere."""
    blocks = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1, "sample_size": 8}
    blocks |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    blocks |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    unet = UNet2DConditionModel(**blocks, cross_attention_dim=8, attention_head_dim=4)
    blocks = {"block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 4, "sample_size": 16}
    blocks |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(**blocks)
    tokenizer = _character_tokenizer()
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPTextConfig(vocab_size=len(tokenizer), max_position_embeddings=16, **shape, **ids)
    text_encoder = CLIPTextModel(config)
    for seed, model in enumerate((unet, vae, text_encoder)):
        _fill_weights(model.eval(), seed)
    scheduler = tiny_scheduler(**scheduler_changes)
    unused = {"safety_checker": None, "feature_extractor": None}
    parts = {"vae": vae, "text_encoder": text_encoder, "tokenizer": tokenizer, "unet": unet}
    return StableDiffusionPipeline(**parts, **unused, scheduler=scheduler, requires_safety_checker=False)


def make_tiny_folder(folder: Path, **scheduler_changes: Any) -> Path:
    """Write that pipeline into a folder."""
    make_tiny_pipeline(**scheduler_changes).save_pretrained(folder)
    return folder


@torch.no_grad()
def tiny_noise_pred(pipeline: StableDiffusionPipeline) -> torch.Tensor:
    """What a pipeline's UNet predicts for one prompt and one noisy latent, (1, 4, 8, 8)."""
    tokens = pipeline.tokenizer("a red cat", padding="max_length", return_tensors="pt")
    embeddings = pipeline.text_encoder(tokens.input_ids)[0]  # (1, 16, 8)
    return pipeline.unet(seeded_normal((1, 4, 8, 8), 900), 501, embeddings).sample


def _character_tokenizer() -> CLIPTokenizer:
    """Spell words letter by letter: a vocabulary that needs no merges."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
        Path(folder, "merges.txt").write_text("#version: 0.2\n")
        return CLIPTokenizer.from_pretrained(folder, model_max_length=16)


@torch.no_grad()
def _fill_weights(model: torch.nn.Module, seed: int) -> None:
    """Replace the libraries' initialization, which differs between their versions."""
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if parameter.ndim == 1:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            values = seeded_normal(tuple(parameter.shape), seed=1000 * seed + index)
            parameter.copy_(values / math.sqrt(parameter[0].numel()))


@dataclasses.dataclass(frozen=True)
class DDIMCase:
    """One batch of four denoising steps out of ten; its tensors follow from the seed."""

    seed: int
    eta: float = 1.0
    timesteps: tuple[int, ...] = (901, 501, 101, 1)
    scheduler: dict[str, Any] = dataclasses.field(default_factory=dict)
    shape: tuple[int, ...] = (2, 3, 3)
    num_steps: int = 10

    def make_scheduler(self) -> DDIMScheduler:
        scheduler = tiny_scheduler(**self.scheduler)
        scheduler.set_timesteps(self.num_steps)
        return scheduler

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return model_output, timesteps, sample and noise."""
        shape = (len(self.timesteps), *self.shape)
        model_output, sample, noise = (seeded_normal(shape, 10 * self.seed + i) for i in range(3))
        return model_output, torch.tensor(self.timesteps), sample, noise


def fifty_steps() -> DDIMCase:
    """Every step of a 50-step run, on latents of Stable Diffusion's size."""
    scheduler = tiny_scheduler()
    scheduler.set_timesteps(50)
    timesteps = tuple(scheduler.timesteps.tolist())
    return DDIMCase(seed=17, timesteps=timesteps, shape=(4, 64, 64), num_steps=50)


def steps_of_size(size: int) -> DDIMCase:
    return DDIMCase(seed=18, timesteps=(501,) * 16, shape=(4, size, size))


def moved_output(case: DDIMCase) -> torch.Tensor:
    """The model's output after a small update of the policy, as large in every dimension."""
    model_output = case.tensors()[0]
    return model_output + 1e-3 * seeded_normal(tuple(model_output.shape), seed=181)
