"""Named settings for `ddpo-lessons train`; flags of the command line override them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    """What a name stands for: a model, a reward, prompts, and fields of `DDPOConfig`.

    Fields that `config` leaves out have the defaults of `DDPOConfig`.
    """

    model: str
    reward: str
    prompts: str
    config: dict[str, Any]


# config/dgx.py of kvablack/ddpo-pytorch, the experiments of the DDPO paper, section 6. Sizes are per
# process and were run with 8 of them (alignment: 6), 256 (288) samples an epoch; one process sees as
# many with 8 (6) times the sample_num_batches_per_epoch and train_gradient_accumulation_steps.
_PAPER: dict[str, Any] = {
    "num_epochs": 100,
    "num_checkpoint_limit": 100_000_000,
    "mixed_precision": "fp16",
    "sample_batch_size": 8,
    "sample_num_batches_per_epoch": 4,
    "train_batch_size": 4,
    "train_gradient_accumulation_steps": 2,
    "per_prompt_stat_tracking": True,
}
_PAPER_HARDER = {**_PAPER, "num_epochs": 200, "per_prompt_stat_tracking_buffer_size": 32}
_SD_1_4 = "CompVis/stable-diffusion-v1-4"

PRESETS: dict[str, Preset] = {
    # As for the demo, whose numbers benchmarks/NOTES.md explains, but from noise: more steps, smaller epochs.
    "digit_world": Preset(
        "tiny-sd",
        "prompt_alignment",
        "digit_world",
        {
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
        },
    ),
    # The peer drew from 398 animals of ImageNet for these two.
    "compressibility": Preset(_SD_1_4, "jpeg_compressibility", "animals", _PAPER),
    "incompressibility": Preset(_SD_1_4, "jpeg_incompressibility", "animals", _PAPER),
    "aesthetic": Preset(
        _SD_1_4,
        "aesthetic_score",
        "animals",
        {**_PAPER_HARDER, "train_gradient_accumulation_steps": 4},
    ),
    # The peer asked LLaVA what it sees; CLIP's score is the nearest reward here.
    "alignment": Preset(
        _SD_1_4,
        "clip_score",
        "activities",
        {
            **_PAPER_HARDER,
            "sample_num_batches_per_epoch": 6,
            "train_gradient_accumulation_steps": 6,
        },
    ),
}
