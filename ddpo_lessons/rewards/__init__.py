"""Reward functions: what the policy is trained to increase.

Every factory here returns a function of `(images, prompts, metadata)`. It takes float images
(B, 3, H, W) in [0, 1], B prompts and B dicts of metadata, and returns float32 rewards (B,) on the
images' device, or `(rewards, info)` with a dict of named (B,) tensors. Rewards carry no gradient:
DDPO uses their values only, so a reward may be anything that can be computed (Black et al. 2023,
arXiv 2305.13301, section 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddpo_lessons.rewards.animals import animal_alignment
from ddpo_lessons.rewards.base import Metadata, RewardFunction, Rewards, check_images
from ddpo_lessons.rewards.combined import edit, weighted_sum
from ddpo_lessons.rewards.digits import (
    digit_legibility,
    digit_margin,
    legibility_gain,
    prompt_alignment,
    recolouring,
)
from ddpo_lessons.rewards.models import (
    AESTHETIC_HEAD,
    ANIMALS,
    CLIP_MODEL,
    PERCEPTUAL_MODEL,
    aesthetic_score,
    clip_change,
    clip_margin,
    clip_score,
    distance_penalty,
    load_from_hub,
)
from ddpo_lessons.rewards.pixels import (
    colourfulness,
    decorruption,
    jpeg_compressibility,
    jpeg_incompressibility,
)
from ddpo_lessons.rewards.preferences import (
    BERT,
    CLIP_H,
    HPS_V2,
    IMAGE_REWARD,
    PICK_SCORE,
    hps_v2,
    image_reward,
    pick_score,
)

__all__ = [
    "AESTHETIC_HEAD",
    "ANIMALS",
    "BERT",
    "CLIP_H",
    "CLIP_MODEL",
    "HPS_V2",
    "IMAGE_REWARD",
    "PERCEPTUAL_MODEL",
    "PICK_SCORE",
    "REWARDS",
    "Metadata",
    "RewardFunction",
    "Rewards",
    "aesthetic_score",
    "animal_alignment",
    "check_images",
    "clip_change",
    "clip_margin",
    "clip_score",
    "colourfulness",
    "decorruption",
    "digit_legibility",
    "digit_margin",
    "distance_penalty",
    "edit",
    "get_reward",
    "hps_v2",
    "image_reward",
    "jpeg_compressibility",
    "jpeg_incompressibility",
    "legibility_gain",
    "load_from_hub",
    "pick_score",
    "prompt_alignment",
    "recolouring",
    "weighted_sum",
]

REWARDS: dict[str, Callable[..., RewardFunction]] = {
    "jpeg_compressibility": jpeg_compressibility,
    "jpeg_incompressibility": jpeg_incompressibility,
    "colourfulness": colourfulness,
    "decorruption": decorruption,
    "digit_legibility": digit_legibility,
    "legibility_gain": legibility_gain,
    "digit_margin": digit_margin,
    "prompt_alignment": prompt_alignment,
    "animal_alignment": animal_alignment,
    "clip_score": clip_score,
    "clip_margin": clip_margin,
    "clip_change": clip_change,
    "aesthetic_score": aesthetic_score,
    "pick_score": pick_score,
    "hps_v2": hps_v2,
    "image_reward": image_reward,
    "distance_penalty": distance_penalty,
    "recolouring": recolouring,
    "edit": edit,
}


def get_reward(name: str, *arguments: Any, **settings: Any) -> RewardFunction:
    """Make the reward function of a name in `REWARDS`.

    Args:
        name: a key of `REWARDS`.
        *arguments: of the factory; none for its defaults.
        **settings: more of them, by name.

    Raises:
        ValueError: if the name does not exist; the message lists those that do.
        RuntimeError: if the reward needs a model that cannot be had.
    """
    if name not in REWARDS:
        raise ValueError(f"reward={name!r} does not exist: use one of {', '.join(sorted(REWARDS))}")
    return REWARDS[name](*arguments, **settings)
