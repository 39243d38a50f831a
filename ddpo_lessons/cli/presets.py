"""Define the presets of `ddpo-lessons train`, which flags of the command line override."""

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ddpo_lessons.config import DDPOConfig


@dataclass(frozen=True)
class Preset:
    """A model, a reward, prompts, and fields of `DDPOConfig` under one name.

    Fields that `config` leaves out have the defaults of `DDPOConfig`.
    """

    model: str  #: "tiny-sd", "tiny-sd3", "tiny-zoo", or a name on the hub
    reward: str  #: a name of `rewards.REWARDS`
    prompts: str  #: a name of `PROMPTS`; empty for img2img, where captions or `--prompt` give them
    config: dict[str, Any]  #: fields of `DDPOConfig`
    noise_strength: float | None = None  #: of img2img, on a folder of images; None for text-to-image
    damages: tuple[str, ...] = ()  #: of img2img, names of `damages.DAMAGES` that are done to clean images
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)  #: of the damages, one of which is drawn for each image
    augmented: bool = False  #: of img2img, whether training images are flipped and their colors jittered
    processes: int = 1  #: for how many processes `config` holds the batches of one
    algorithm: str = "ddpo"  #: as `--algorithm` takes it
    resolution: int | None = None  #: side of the images in pixels; None for the model's own


# config/dgx.py of kvablack/ddpo-pytorch: the experiments of the DDPO paper, section 6, as its first author
# repeated them in PyTorch. Sizes are per process and were run with 8 of them (alignment: 6), 256 (288)
# samples an epoch; one process sees as many with 8 (6) times the sample_num_batches_per_epoch and
# train_gradient_accumulation_steps.
_PAPER: dict[str, Any] = {
    "num_epochs": 100,
    "num_checkpoint_limit": 100_000_000,
    "image_grid_freq": 10,  # a grid at 512 pixels is a JPEG of some 3 MB
    "mixed_precision": "fp16",
    "sample_batch_size": 8,
    "sample_num_batches_per_epoch": 4,
    "train_batch_size": 4,
    "train_gradient_accumulation_steps": 2,
    "per_prompt_stat_tracking": True,
}
_PAPER_HARDER = {**_PAPER, "num_epochs": 200, "per_prompt_stat_tracking_buffer_size": 32}
_SD_1_4 = "CompVis/stable-diffusion-v1-4"

# hectorastrom/gaussian-glasses (rl/rl_trainer.py, rl/reward.py and the project's page): img2img with an empty
# prompt and no guidance, noise strength 0.2 to 0.4 of 50 steps, 256 samples an optimizer step, 256 to 1,028
# images, flipped and jittered, up to 500 epochs. It ran fp16, 8-bit Adam, the change of CLIP ViT-B/16's
# logit of the true class, and a penalty of 0.3 * 6 times LPIPS to the input; here bf16, AdamW, the change of
# ViT-L/14's margin, and as much of `distance_penalty` to the clean image. Of one process, see `divide`.
_GLASSES: dict[str, Any] = {
    "num_epochs": 500,
    "image_grid_freq": 10,
    "mixed_precision": "bf16",
    "sample_num_steps": 50,
    "sample_guidance_scale": 0.0,
    "sample_batch_size": 4,
    "sample_num_batches_per_epoch": 64,
    "train_batch_size": 4,
    "train_gradient_accumulation_steps": 64,
    "train_learning_rate": 1e-4,
}
_GLASSES_REWARD = "clip_change=1,distance_penalty=1.8"
_SD_1_5 = "stable-diffusion-v1-5/stable-diffusion-v1-5"

# Follow the prompt and keep the input image: the task of lesson 07 at full size. Not trained on a GPU.
# Guidance, learning rate, clip range (DDPOConfig's) and 256 samples in two optimizer steps are those of
# `aesthetic`, groups those of lesson 07; that they work together is a guess. Guidance is part of the policy:
# both forward passes are trained. LoRA is on attention only (DDPOConfig's default), because the prompt enters
# there, and because every tool for Stable Diffusion loads such weights. For one process, as above.
_EDIT: dict[str, Any] = {
    "num_epochs": 100,
    "save_freq": 5,
    "image_grid_freq": 5,
    "mixed_precision": "bf16",
    "sample_num_steps": 50,
    "sample_guidance_scale": 5.0,
    "sample_batch_size": 4,
    "sample_num_batches_per_epoch": 64,
    "sample_group_size": 4,  # rollouts of an image share their first noise, so only actions explain rewards
    "train_batch_size": 4,
    "train_gradient_accumulation_steps": 32,
    "train_learning_rate": 3e-4,
}

# Restore damaged photographs in one to three hours on Colab's T4, half of that on its L4. Not trained on a
# GPU. Small epochs, because in the world of animals 16 images per optimizer step learned many times faster
# per image than 512; that the same holds at full size is a guess, and so are learning rate, rank, weights of
# the reward, strength and number of epochs. `branching` trains on one action of each image. fp16, as a T4 has
# no bf16; it also rounds eight times finer. Estimated: 9.4 GB, and 204 TFLOP per epoch, which a T4 does in 10
# seconds at 0.3 of its 65 TFLOP/s, and in 26 at the 0.12 that seems likelier.
_RESTORE: dict[str, Any] = {
    "num_epochs": 300,
    "save_freq": 10,
    "image_grid_freq": 10,
    "mixed_precision": "fp16",
    "sample_num_steps": 20,
    "sample_guidance_scale": 1.0,
    "sample_batch_size": 8,
    "sample_num_batches_per_epoch": 2,
    "sample_group_size": 8,  # of one photograph with one damage
    "train_batch_size": 8,
    "train_gradient_accumulation_steps": 2,  # one optimizer step per epoch
    "train_micro_batch_size": 4,  # 8 pairs would take 13.3 GB
    "train_learning_rate": 3e-4,
    "train_learning_rate_schedule": "cosine",
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
}

# Not trained on a GPU. yifan123/flow_grpo: `pickscore_sd3_4gpu` of config/grpo.py over config/base.py, LoRA
# of scripts/train_sd3.py. 16 prompts an epoch, 16 images each, two optimizer steps; here one process makes
# them. Guidance goes with the noise level and the clip range: their configs without it have a level of 0.8, a
# range of 1e-5, CPS and a window. They ran fp16 at 512 pixels on prompts of their own, averaged the weights,
# and divided by the epoch's standard deviation, not that of the differences from the groups' means.
_SD35: dict[str, Any] = {
    "num_epochs": 200,  # theirs run until somebody stops them
    "save_freq": 20,
    "image_grid_freq": 10,
    "mixed_precision": "bf16",
    "sample_num_steps": 10,
    "sample_eta": 0.7,
    "sample_guidance_scale": 4.5,
    "sample_batch_size": 8,
    "sample_num_batches_per_epoch": 32,
    "sample_group_size": 16,
    "train_batch_size": 8,
    "train_gradient_accumulation_steps": 16,
    "train_learning_rate": 3e-4,
    "train_clip_range": 1e-4,
    "train_kl_coefficient": 0.01,
    "train_lora_rank": 32,
    "train_lora_alpha": 64,
    "train_lora_target_modules": (
        *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"attn.{layer}" for layer in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    ),
}

# Not trained on a GPU. The same project: `pickscore_flux_8gpu`, LoRA of scripts/train_flux.py, 48 prompts an
# epoch with 24 images each. Guidance is an input of FLUX.1, and costs no second pass. They averaged the
# weights, and took prompts of their own and 128 tokens of each.
_FLUX: dict[str, Any] = {
    **_SD35,
    "save_freq": 30,
    "sample_num_steps": 6,
    "sample_eta": 0.9,
    "sample_guidance_scale": 3.5,
    "sample_batch_size": 3,
    "sample_num_batches_per_epoch": 384,
    "sample_group_size": 24,
    "train_batch_size": 3,
    "train_gradient_accumulation_steps": 192,
    "train_kl_coefficient": 0.0,
    "train_lora_rank": 64,
    "train_lora_alpha": 128,
    "train_lora_target_modules": (
        *_SD35["train_lora_target_modules"],
        *(f"{part}.net.{layer}" for part in ("ff", "ff_context") for layer in ("0.proj", "2")),
    ),
}

# As in lesson 07, whose numbers benchmarks/NOTES.md explains, but from noise: more steps, smaller epochs.
_DIGITS: dict[str, Any] = {
    "num_epochs": 40,
    "save_freq": 10,
    "sample_num_steps": 10,
    "sample_guidance_scale": 1.0,
    "sample_batch_size": 64,
    "sample_num_batches_per_epoch": 1,
    "sample_group_size": 4,
    "train_batch_size": 64,
    "train_learning_rate": 2e-3,
    "train_clip_range": 5e-3,
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
}

PRESETS: dict[str, Preset] = {
    "zoo": Preset("tiny-zoo", "animal_alignment", "zoo", _DIGITS),  # not tuned
    "digit_world": Preset("tiny-sd", "prompt_alignment", "digit_world", _DIGITS),
    # The same for the flow model, with the noise of Flow-GRPO; not tuned.
    "digit_world_flow": Preset("tiny-sd3", "prompt_alignment", "digit_world", {**_DIGITS, "sample_eta": 0.7}),
    # DDPO's authors sampled from 398 animals of ImageNet for these two.
    "compressibility": Preset(_SD_1_4, "jpeg_compressibility", "animals", _PAPER, processes=8),
    "incompressibility": Preset(_SD_1_4, "jpeg_incompressibility", "animals", _PAPER, processes=8),
    "aesthetic": Preset(
        _SD_1_4,
        "aesthetic_score",
        "animals",
        {**_PAPER_HARDER, "train_gradient_accumulation_steps": 4},
        processes=8,
    ),
    # DDPO's authors compared LLaVA's description with the prompt; CLIP's score is the nearest reward here.
    "alignment": Preset(
        _SD_1_4,
        "clip_score",
        "activities",
        {**_PAPER_HARDER, "sample_num_batches_per_epoch": 6, "train_gradient_accumulation_steps": 6},
        processes=6,
    ),
    # gaussian-glasses reports 14.5% after training, 11.4% before, and 44.6% for the images themselves.
    "camouflage": Preset(_SD_1_5, _GLASSES_REWARD, "", _GLASSES, noise_strength=0.4, augmented=True),
    # gaussian-glasses began this without settings of its own; the weaker noise is our choice, not measured.
    "corruption": Preset(
        _SD_1_5,
        _GLASSES_REWARD,
        "",
        _GLASSES,
        noise_strength=0.2,
        damages=("noisy", "blurry", "foggy", "blocky"),
        augmented=True,
    ),
    # Heavy fog alone, since a larger task takes longer. The penalty compares with the clean photograph.
    "restore": Preset(
        _SD_1_5,
        "clip_margin=1,distance_penalty=1.8",
        "",
        _RESTORE,
        noise_strength=0.4,
        damages=("foggy",),
        severities=(3, 4, 5),
        augmented=True,
        algorithm="branching",
    ),
    # With little noise img2img ignores the prompt, and with much noise it loses the input image. A half is a
    # guess: no policy can restore what noise has removed, but with less noise the rollouts of a group hardly
    # differ.
    "edit": Preset(_SD_1_5, "edit", "", _EDIT, noise_strength=0.5),
    "sd35": Preset(
        "stabilityai/stable-diffusion-3.5-medium", "pick_score", "activities", _SD35, algorithm="flow_grpo"
    ),
    "flux": Preset(
        "black-forest-labs/FLUX.1-dev",
        "pick_score",
        "activities",
        _FLUX,
        algorithm="flow_grpo",
        resolution=512,
    ),
}

OF_MODELS = {"tiny-sd": "digit_world", "tiny-sd3": "digit_world_flow", "tiny-zoo": "zoo"}  # without --preset


def world_size() -> int:
    """Return the number of processes that accelerate launch or torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def divide(preset: Preset, processes: int, given: Collection[str] = ()) -> dict[str, Any]:
    """Return a preset's fields for each of several processes that share its experiment.

    One process alone keeps what `config` says, also of a preset that was run with more. Fields that were
    given are for each process, and not divided. A ValueError refuses samples that do not divide.
    """
    if processes == 1 or not preset.config:
        return preset.config
    config, fields = DDPOConfig(**preset.config), dict(preset.config)
    for size, count, things in (
        ("sample_batch_size", "sample_num_batches_per_epoch", "an epoch"),
        ("train_batch_size", "train_gradient_accumulation_steps", "an optimizer step"),
    ):
        if {size, count} & set(given):
            continue
        batch = getattr(config, size)
        samples = batch * getattr(config, count) * preset.processes
        if samples % processes:
            raise ValueError(
                f"{processes} processes do not divide the preset's {samples} samples of {things}: launch "
                f"another number, or give --{size.replace('_', '-')} and --{count.replace('_', '-')} of each"
            )
        fields[size] = math.gcd(batch, samples // processes)
        fields[count] = samples // processes // fields[size]
    return fields
