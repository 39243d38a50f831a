"""Lesson 08: how much of a run a GPU takes at a time, worked out for any model, settings and memory.

What an experiment is, samples per epoch and per optimizer step, stays what it was: only passes are cut.
"""

import copy
import importlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from huggingface_hub import try_to_load_from_cache
from torch import nn

from ddpo_lessons.algorithms.base import Algorithm
from ddpo_lessons.app import budget
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.families import family_class
from ddpo_lessons.families.policy import with_parts
from ddpo_lessons.tiny import CHECKPOINT, CHECKPOINTS

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
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
# Models of the hub whose sizes are known without a file of theirs.
KNOWN = {name: model for model, parts in PUBLISHED.items() for name in parts["hub"]}
# Parameters of what rewards load, all in float32: CLIP ViT-L/14 and ViT-H/14, LAION's head, ResNet-18 without
# its own.
_CLIP, _CLIP_H, _HEAD, _RESNET = 427_616_513, 986_109_441, 925_441, 11_176_512
_REWARD_MODELS = {
    **{name: {_CLIP} for name in ("clip_score", "clip_margin", "clip_change")},
    "pick_score": {_CLIP_H},
    "aesthetic_score": {_CLIP, _HEAD},
    "distance_penalty": {_RESNET},
    "edit": {_CLIP, _RESNET},
}


# ------------------------------------------------------------------------------ models without weights
def published(name: str, device: str = "meta", dtype: torch.dtype = torch.float32) -> Any:
    """Make a published model, a key of `PUBLISHED`, with random weights, of what `published.json` says of it.

    Sources: the config.json of each part on the hub; what is not named is the library's default. Tokenizers
    give as many tokens as the published ones; which ones changes nothing. "meta" makes shapes only.
    """
    model, parts = PUBLISHED[name], dict[str, Any]()
    for part, (class_name, settings) in model["parts"].items():
        kind = getattr(diffusers, class_name, None) or getattr(transformers, class_name)
        if part.startswith("tokenizer"):
            parts[part] = kind.from_pretrained(CHECKPOINT / "tokenizer", **settings)
        elif issubclass(kind, nn.Module):
            parts[part] = _network(kind, getattr(kind, "config_class", dict)(**settings), device, dtype)
        else:
            parts[part] = kind(**settings)
    return getattr(diffusers, model["class"])(**parts, **model["settings"])


def _network(kind: Any, config: Any, device: str = "meta", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Make a network of diffusers or transformers, of its config alone."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return getattr(kind, "from_config", kind)(config)
    finally:
        torch.set_default_dtype(usual)


def like(pipeline: Any) -> Any:
    """Make a pipeline like another one on the `meta` device; adapters are left out."""
    networks = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    parts = {name: _network(type(part), part.config) for name, part in networks.items()}
    return with_parts(pipeline, {**parts, "scheduler": copy.deepcopy(pipeline.scheduler)})


def find_pipeline(model: str) -> Any:
    """Make a model's pipeline on the `meta` device, of its config files; no weights are read.

    The model is "tiny-sd" or its like, a folder, one in the hub's cache on this machine, or a key of `KNOWN`;
    a ValueError refuses any other, and families that are not trained here.
    """
    folder = _folder_of(model)
    if folder is None and model in KNOWN:
        return published(KNOWN[model])
    if folder is None:
        raise ValueError(
            f"the size of {model!r} is not known here: give a folder that holds the pipeline, or one of "
            f"{', '.join([*CHECKPOINTS, *KNOWN])}"
        )
    try:
        index = dict(DiffusionPipeline.load_config(folder))
        settings = {name: value for name, value in index.items() if not name.startswith("_")}
        settings |= family_class(index["_class_name"]).without_checker
        parts = {name: _part(folder / name, *v) for name, v in settings.items() if isinstance(v, list)}
        return getattr(diffusers, index["_class_name"])(**{**settings, **parts})
    except (KeyError, OSError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder} holds no pipeline that can be counted: {error}") from error


def _part(folder: Path, library: str | None, class_name: str | None) -> Any:
    """Make a part of a pipeline: a network without weights, a tokenizer or scheduler as it is."""
    if library is None or class_name is None:  # as T5 may be
        return None
    kind = getattr(importlib.import_module(library), class_name)
    if not issubclass(kind, nn.Module):
        return kind.from_pretrained(folder)
    load = getattr(kind, "load_config", None) or kind.config_class.from_pretrained
    return _network(kind, load(folder))


def _folder_of(model: str) -> Path | None:
    if model in CHECKPOINTS:
        return CHECKPOINTS[model]
    if Path(model, "model_index.json").is_file():
        return Path(model)
    if Path(model).is_absolute() or model.count("/") != 1:
        return None
    cached = try_to_load_from_cache(model, "model_index.json")
    folder = Path(cached).parent if isinstance(cached, str) else None
    return folder if folder and (folder / "vae" / "config.json").is_file() else None


def reward_bytes(reward: str) -> int:
    """Return the bytes of the models of the rewards that a text names; of a user's own nothing is known."""
    named = re.findall(r"\w+", reward)
    return 4 * sum(set().union(*(_REWARD_MODELS.get(name, set()) for name in named)))


# -------------------------------------------------------------------------------------------- the card
def device_gigabytes() -> float:
    """Return GB of the smallest GPU seen, for all processes must cut alike; a ValueError if there is none."""
    if not torch.cuda.is_available():
        raise ValueError("--gpu-memory auto asks a CUDA device, and there is none: give GB, such as 24")
    cards = range(torch.cuda.device_count())
    return min(torch.cuda.get_device_properties(card).total_memory for card in cards) / GB


def low_precision() -> str:
    """Return "bf16", or "fp16" where the GPU is one from before Ampere."""
    too_old = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return "fp16" if too_old else "bf16"


def fit(
    model: str,
    config: DDPOConfig,
    gigabytes: float,
    algorithm: Algorithm,
    start: FromNoise,
    reward_bytes: int = 0,
    keep_checkpointing: bool = False,
) -> tuple[DDPOConfig, float]:
    """Cut passes to what a card holds; samples per epoch and per optimizer step stay the same.

    Sampling and training take passes of one size: in bf16 and fp16 a network may round differently in
    another, and training is to replay what sampling did. Sizes that the algorithm refuses are left out.
    Gradient checkpointing costs time, so it is for cards that do not hold the smallest pass without it,
    unless it is to be kept as it is.

    Returns the settings with the largest passes that fit so many gigabytes of 1e9 bytes, and GB at their
    peak, on paper. If not even the smallest pass fits, a ValueError names the smallest card that would do.
    """
    samples = config.train_batch_size * config.train_gradient_accumulation_steps
    cuts = {size: with_passes(config, size) for size in range(1, samples + 1) if samples % size == 0}
    sizes = [size for size, cut in cuts.items() if _accepts(algorithm, cut)]
    for checkpointing in [config.train_gradient_checkpointing] if keep_checkpointing else [False, True]:
        cut = replace(cuts[sizes[0]], train_gradient_checkpointing=checkpointing)
        paper = budget.estimate(find_pipeline(model), cut, algorithm, start, reward_bytes)
        # What a pass makes grows no faster than the samples in it.
        each, room = paper.activations / sizes[0], gigabytes * GB * SHARE - CUDA * GB - paper.resident
        if room >= max(paper.activations, paper.joining):
            size = max(size for size in sizes if size * each <= room)
            peak = paper.resident + max(size * each, paper.joining)
            return replace(cuts[size], train_gradient_checkpointing=checkpointing), peak / GB
    raise ValueError(
        f"--gpu-memory {gigabytes:.3g}: the smallest passes, of {sizes[0]}, take {paper.peak / GB:.1f} GB on "
        f"paper, and with room for CUDA a card of {(paper.peak / GB + CUDA) / SHARE:.1f} GB: take a larger "
        "one, bf16, or fewer samples an epoch"
    )


def _accepts(algorithm: Algorithm, config: DDPOConfig) -> bool:
    try:
        algorithm.check(config)
    except ValueError:
        return False
    return True


def with_passes(config: DDPOConfig, size: int) -> DDPOConfig:
    """Return settings with passes of that many samples, which divides the samples of an optimizer step."""
    samples = config.sample_batch_size * config.sample_num_batches_per_epoch
    batch = math.gcd(config.sample_batch_size, size)
    sizes: dict[str, Any] = {"sample_forward_size": size, "train_forward_size": size}
    return replace(config, sample_batch_size=batch, sample_num_batches_per_epoch=samples // batch, **sizes)
