"""Rewards that combine other rewards."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ddpo_lessons.advantages import to_rewards
from ddpo_lessons.rewards.learned import CLIP_MODEL, PERCEPTUAL_MODEL, clip_score, distance_penalty
from ddpo_lessons.rewards.reward import (
    Metadata,
    RewardFunction,
    Rewards,
    checked_reward,
    register,
    split_info,
)


def _component(result: Rewards, name: str, like: torch.Tensor) -> tuple[torch.Tensor, Mapping[str, Any]]:
    rewards, info = split_info(result, f"the reward {name!r}")
    rewards = to_rewards(rewards)
    if like.device.type == "mps":  # which has no float64
        rewards = rewards.float()
    rewards = rewards.to(like.device)
    if rewards.shape != like.shape[:1]:
        raise ValueError(f"rewards of {name!r} have shape {tuple(rewards.shape)}: return (B,)")
    if not rewards.isfinite().all():
        worst = int(rewards.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"reward of {name!r} is {rewards[worst].item()} for sample {worst}")
    return rewards, info


def weighted_sum(components: Mapping[str, tuple[float, RewardFunction]]) -> RewardFunction:
    """Sum weight * reward over components {name: (weight, reward function)}.

    The info holds every component's rewards (B,) before weighting, under its name, and its own info under
    "name/key". A component that returns NaN, an infinity or anything but (B,) is named in a ValueError.
    Raises ValueError if there is no component or a weight is not finite, and TypeError if a component is no
    pair of a number and a function.
    """
    if not components:
        raise ValueError("components is empty: give at least one name: (weight, reward)")
    for name, pair in components.items():
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not (is_pair and callable(pair[1]) and not isinstance(pair[0], str)):
            raise TypeError(
                f"component {name!r} is {pair!r:.60}: give (weight, reward), such as (1.0, reward)"
            )
        if not abs(pair[0]) < float("inf"):
            raise ValueError(f"weight of {name!r} is {pair[0]}: use a finite number")

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        total = torch.zeros(len(images), device=images.device)
        info: dict[str, Any] = {}
        for name, (weight, function) in components.items():
            rewards, details = _component(function(images, prompts, metadata), name, images)
            total = total + weight * rewards
            info[name] = rewards
            info.update({f"{name}/{key}": value for key, value in details.items()})
        return total, info

    return reward


@register(needs=("prompt", "image"), models=("CLIP", "NETWORK"))
def edit(
    model: str | Path = CLIP_MODEL,
    perceptual_model: str | Path = PERCEPTUAL_MODEL,
    clip_weight: float = 5.0,
    distance_weight: float = 1.0,
) -> RewardFunction:
    """Score an edit: CLIP's score of the prompt minus the distance to the input image.

    clip_weight * cos(image, prompt) - distance_weight * d(image, metadata["image"]), with the cosine of
    `clip_score` in [-1, 1] and the perceptual distance of `distance_penalty` in [0, 4]. Both terms are
    returned as info before weighting, "clip_score" and "distance_penalty", which is -d.

    Advantages are normalized, so only the ratio of the weights matters. It trades following the prompt
    against keeping the input. 5 to 1 is a guess, because CLIP's cosines vary less than distances. Sources:
    Hessel et al. 2021, arXiv 2104.08718, and Zhang et al. 2018, arXiv 1801.03924, as those two say. Raises
    ValueError if a weight is negative or not finite, or the metadata has no `image` of the result's shape;
    RuntimeError if a model cannot be had, or the perceptual one is not convolutional.
    """
    for name, weight in (("clip_weight", clip_weight), ("distance_weight", distance_weight)):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"{name}={weight}: use a finite number that is not negative")
    return weighted_sum(
        {
            "clip_score": (clip_weight, clip_score(model)),
            "distance_penalty": (distance_weight, distance_penalty(perceptual_model, reference="image")),
        }
    )


def judged(reward_function: RewardFunction, judge: RewardFunction) -> RewardFunction:
    """Return a reward function whose info also has the evaluator's rewards (B,), without a gradient.

    A judge that returns NaN, an infinity or anything but (B,) is named in a ValueError.
    """

    @functools.wraps(reward_function)
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        rewards, info = split_info(reward_function(images, prompts, metadata))
        with torch.no_grad():
            marks, _ = _component(judge(images.detach(), prompts, metadata), "judge", images)
        return rewards, {**info, "judge": marks}

    return reward
