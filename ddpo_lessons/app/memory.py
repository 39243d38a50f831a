"""Lesson 08: how much of a run a GPU takes at a time, worked out for any model, settings and memory.

What an experiment is, samples per epoch and per optimizer step, stays what it was: only passes are cut.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from huggingface_hub import try_to_load_from_cache

from ddpo_lessons.app import budget
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.families.stable_diffusion_3 import T5_TOKENS
from ddpo_lessons.tiny import CHECKPOINTS

GB = 1e9
SHARE = 0.85  # of a card: the rest is the allocator's fragments, which no count sees
CUDA = 1.0  # GB of the context and of kernels' workspaces

# GB, and TFLOP/s of dense bf16 with float32 accumulation, as NVIDIA gives them; TF32 is half of it on each.
CARDS = {
    "RTX 3080": (10, 59.5),
    "RTX 4080": (16, 97.5),
    "RTX 3090": (24, 71.2),
    "RTX 4090": (24, 165.2),
    "A100": (80, 312.0),
}
UTILISATION = 0.3  # an assumption
# Models of the hub whose sizes are known without a file of theirs.
KNOWN: dict[str, Callable[[], budget.Networks]] = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": budget.sd15,
    "runwayml/stable-diffusion-v1-5": budget.sd15,
    "CompVis/stable-diffusion-v1-4": budget.sd15,
    "stabilityai/stable-diffusion-xl-base-1.0": budget.sdxl,
    "stabilityai/stable-diffusion-3.5-medium": budget.sd35_medium,
}
# Parameters of what rewards load, all in float32: CLIP ViT-L/14 and ViT-H/14, LAION's head, ResNet-18 without
# its own, ImageReward.
_CLIP, _HEAD, _RESNET = 427_616_513, 925_441, 11_176_512
_CLIP_H, _BLIP = 986_109_441, 446_206_689
_REWARD_MODELS = {
    "clip_score": {_CLIP},
    "clip_margin": {_CLIP},
    "clip_change": {_CLIP},
    "aesthetic_score": {_CLIP, _HEAD},
    "pick_score": {_CLIP_H},
    "hps_v2": {_CLIP_H},
    "image_reward": {_BLIP},
    "distance_penalty": {_RESNET},
    "edit": {_CLIP, _RESNET},
}


# ------------------------------------------------------------------------------------------- the model
def find_networks(model: str) -> budget.Networks:
    """Make a model's networks on the `meta` device, of its config files; no weights are read.

    Args:
        model: "tiny-sd" or "tiny-sd3", a folder, a model in the hub's cache on this machine, or a key of
            `KNOWN`.

    Returns:
        The networks.

    Raises:
        ValueError: if the model is none of these, or of a family that cannot be counted.
    """
    folder = _folder_of(model)
    if folder is None and model in KNOWN:
        return KNOWN[model]()
    if folder is None:
        raise ValueError(
            f"the size of {model!r} is not known here: give a folder that holds the pipeline, or one of "
            f"{', '.join([*CHECKPOINTS, *KNOWN])}"
        )
    parts = DiffusionPipeline.load_config(folder)
    kind, made = budget.kind_of(parts), dict[str, Any]()
    try:
        for spec in fields(kind):
            if spec.name == "t5_tokens":
                made[spec.name] = _t5_tokens(folder)
            else:
                made[spec.name] = _network(folder, spec.name, parts[spec.name][1])
        return kind(**made)
    except (KeyError, OSError, AttributeError) as error:
        raise ValueError(f"{folder} holds no Stable Diffusion 1, 2, XL or 3 pipeline: {error}") from error


def _t5_tokens(folder: Path) -> int:
    file = folder / "tokenizer_3" / "tokenizer_config.json"
    length = json.loads(file.read_text("utf-8"))["model_max_length"] if file.is_file() else T5_TOKENS
    return min(T5_TOKENS, length)


def _folder_of(model: str) -> Path | None:
    if model in CHECKPOINTS:
        return CHECKPOINTS[model]
    if Path(model, "model_index.json").is_file():
        return Path(model)
    if Path(model).is_absolute() or model.count("/") != 1:
        return None
    cached = try_to_load_from_cache(model, "model_index.json")
    folder = Path(cached).parent if isinstance(cached, str) else None
    denoisers = ("unet", "transformer")
    is_whole = folder and any((folder / name / "config.json").is_file() for name in denoisers)
    return folder if is_whole else None


def _network(folder: Path, name: str, class_name: str | None) -> Any:
    if class_name is None:  # as T5 may be
        return None
    with torch.device("meta"):
        if name.startswith("text_encoder"):
            kind = getattr(transformers, class_name)
            return kind(kind.config_class.from_pretrained(folder / name))
        kind = getattr(diffusers, class_name)
        return kind.from_config(kind.load_config(folder / name))


def reward_bytes(reward: str) -> int:
    """Return the bytes of the models of the rewards that a text names; of a user's own nothing is known."""
    named = re.findall(r"\w+", reward)
    return 4 * sum(set().union(*(_REWARD_MODELS.get(name, set()) for name in named)))


# -------------------------------------------------------------------------------------------- the card
def device_gigabytes() -> float:
    """Return the memory of the smallest GPU that this process sees: all processes must cut alike.

    Raises:
        ValueError: if there is none.
    """
    if not torch.cuda.is_available():
        raise ValueError("--gpu-memory auto asks a CUDA device, and there is none: give GB, such as 24")
    cards = range(torch.cuda.device_count())
    return min(torch.cuda.get_device_properties(card).total_memory for card in cards) / GB


def low_precision() -> str:
    """Return "bf16", or "fp16" where the GPU is one from before Ampere."""
    too_old = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return "fp16" if too_old else "bf16"


@dataclass(frozen=True)
class Fit:
    """Settings that fit, and what they take.

    Attributes:
        config: the settings.
        gigabytes: at the peak, on paper.
    """

    config: DDPOConfig
    gigabytes: float

    def __str__(self) -> str:
        size, config = self.config.train_forward_size, self.config
        return (
            f"passes of {size} sample{'' if size == 1 else 's'}, mixed_precision={config.mixed_precision}, "
            f"{'with' if config.train_gradient_checkpointing else 'without'} gradient checkpointing, "
            f"{self.gigabytes:.1f} GB on paper"
        )


def fit(
    model: str,
    config: DDPOConfig,
    gigabytes: float,
    num_timesteps: int,
    from_images: bool,
    reward_bytes: int = 0,
    keeps_old: bool = False,
    keep_checkpointing: bool = False,
) -> Fit:
    """Cut passes to what a card holds; samples per epoch and per optimizer step stay the same.

    Sampling and training take passes of one size: in bf16 and fp16 a network may round differently in
    another, and training is to replay what sampling did. Gradient checkpointing costs time, so it is for
    cards that do not hold one sample without it.

    Args:
        model: as in `find_networks`.
        config: the settings of one process.
        gigabytes: of the card, in 1e9 bytes.
        num_timesteps: actions of a trajectory.
        from_images: img2img.
        reward_bytes: what the reward's models hold.
        keeps_old: as in `budget.estimate`.
        keep_checkpointing: leave `train_gradient_checkpointing` as it is.

    Returns:
        The settings, with the largest passes that fit.

    Raises:
        ValueError: if not even a pass of one sample fits; it names the smallest card that would do.
    """
    ways = [config.train_gradient_checkpointing] if keep_checkpointing else [False, True]
    for checkpointing in ways:
        one = replace(_with_passes(config, 1), train_gradient_checkpointing=checkpointing)
        networks = find_networks(model)
        paper = budget.estimate(networks, one, num_timesteps, from_images, reward_bytes, keeps_old)
        # What a pass makes grows no faster than the samples in it.
        room = gigabytes * GB * SHARE - CUDA * GB - paper.resident
        if room >= paper.activations:
            size = _largest_divisor(_samples_of_a_step(config), int(room / paper.activations))
            fitted = replace(_with_passes(config, size), train_gradient_checkpointing=checkpointing)
            return Fit(fitted, (paper.resident + size * paper.activations) / GB)
    smallest = (paper.peak / GB + CUDA) / SHARE
    raise ValueError(
        f"--gpu-memory {gigabytes:.3g}: one sample at a time takes {paper.peak / GB:.1f} GB on "
        f"paper, and with room for CUDA a card of {smallest:.1f} GB: take a larger one, bf16, or fewer "
        "samples an epoch"
    )


def _samples_of_a_step(config: DDPOConfig) -> int:
    return config.train_batch_size * config.train_gradient_accumulation_steps


def _with_passes(config: DDPOConfig, size: int) -> DDPOConfig:
    """Return settings with passes of that many samples, which divides the samples of an optimizer step."""
    samples = config.sample_batch_size * config.sample_num_batches_per_epoch
    batch = math.gcd(config.sample_batch_size, size)
    return replace(
        config,
        sample_batch_size=batch,
        sample_num_batches_per_epoch=samples // batch,
        sample_forward_size=size,
        train_forward_size=size,
    )


def _largest_divisor(number: int, limit: int) -> int:
    return max(size for size in range(1, min(number, limit) + 1) if number % size == 0)
