"""Rewards of the digit world: a classifier scores the digit, colors are measured."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ddpo_lessons.rewards.reward import (
    Metadata,
    RewardFunction,
    Rewards,
    checked_reward,
    metadata_column,
    metadata_images,
    register,
)
from ddpo_lessons.worlds.digits import (
    COLORS,
    Description,
    RewardModel,
    coverage,
    measure_colors,
    parse_prompt,
)


def _digits(metadata: Metadata, device: torch.device) -> torch.Tensor:
    values = metadata_column(metadata, "digit", "the true digit, an int from 0 to 9")
    for index, value in enumerate(values):
        if np.ndim(value) or value not in range(10):
            raise ValueError(f"metadata[{index}]['digit'] is {value!r}: use an int from 0 to 9")
    return torch.tensor([int(value) for value in values], device=device)  # (B,)


def _digit_log_prob(model: nn.Module, images: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    log_probs = model.to(images.device)(images).float().log_softmax(dim=1)  # (B, 10)
    return log_probs.gather(1, digits[:, None])[:, 0]  # (B,)


def _color_distance(measured: torch.Tensor, names: Sequence[str | None]) -> torch.Tensor:
    """Return the RGB distance (B,) of measured (B, 3) to named colors; 0 where none is named."""
    distances = [
        measured.new_zeros(()) if name is None else (row - row.new_tensor(COLORS[name])).norm()
        for row, name in zip(measured, names, strict=True)
    ]
    return torch.stack(distances)


def described(prompts: Sequence[str]) -> list[Description]:
    """Parse prompts; raise a ValueError for one that names neither a digit nor a color."""
    said = [parse_prompt(prompt) for prompt in prompts]
    for index, part in enumerate(said):
        if part.digit is None and part.ink is None and part.background is None:
            raise ValueError(
                f"prompts[{index}]={prompts[index]!r} names no digit and no color: "
                'write as in "a red three on a blue background", or train for another reward'
            )
    return said


@register(needs=("prompt",), reads=described)
def prompt_alignment(model: nn.Module | None = None) -> RewardFunction:
    """Score how well an image of the digit world shows its prompt.

    With log p (nats) from the classifier, colors measured without any model, and distances Euclidean in RGB
    on [0, 1] (at most sqrt(3))::

        log p(digit) - |ink - named ink| - |background - named background|

    The model maps (B, 3, 32, 32) to logits (B, 10); None is the world's own. What a prompt leaves unsaid
    counts 0. The three terms are returned as info. The reward refuses a prompt that names none of the three,
    with a ValueError.
    """
    reader = (RewardModel.load() if model is None else model).eval()

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        said = described(prompts)
        named = torch.tensor([part.digit is not None for part in said], device=images.device)
        digits = torch.tensor([part.digit or 0 for part in said], device=images.device)  # (B,)
        log_p = _digit_log_prob(reader, images, digits) * named  # (B,)
        ink, background = measure_colors(images)  # (B, 3) each
        ink_distance = _color_distance(ink, [part.ink for part in said])
        background_distance = _color_distance(background, [part.background for part in said])
        return log_p - ink_distance - background_distance, {
            "digit_log_prob": log_p,
            "ink_distance": ink_distance,
            "background_distance": background_distance,
        }

    return reward


def described_colors(prompts: Sequence[str]) -> list[Description]:
    """Parse prompts; raise a ValueError for one that does not name both colors."""
    said = [parse_prompt(prompt) for prompt in prompts]
    for index, part in enumerate(said):
        if part.ink is None or part.background is None:
            raise ValueError(
                f"prompts[{index}]={prompts[index]!r} does not name ink and background: "
                'write as in "a yellow digit on a white background"'
            )
    return said


@register(needs=("prompt", "image", "digit"), reads=described_colors)
def recoloring(model: nn.Module | None = None) -> RewardFunction:
    """Score recoloring: the prompt names ink and background, and digit and shape should stay.

    With log p (nats) of `metadata["digit"]` from the classifier, colors and coverage measured without any
    model (`digits.measure_colors`, `digits.coverage`), and colors' distances Euclidean in RGB on [0, 1]::

        log p(digit) - 10 (|ink - named ink| + |background - named background|)
            - 30 mean |coverage - coverage of the input|

    The input is `metadata["image"]` (3, H, W). The four terms are returned as info, before weighting. The
    reward refuses a prompt that does not name both colors, with a ValueError.
    """
    reader = (RewardModel.load() if model is None else model).eval()

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        said = described_colors(prompts)
        log_p = _digit_log_prob(reader, images, _digits(metadata, images.device))  # (B,)
        inputs = metadata_images(metadata, "image", images)
        ink, background = measure_colors(images)  # (B, 3) each
        moved = coverage(images, ink, background) - coverage(inputs, *measure_colors(inputs))
        terms = {
            "digit_log_prob": log_p,
            "ink_distance": _color_distance(ink, [part.ink for part in said]),
            "background_distance": _color_distance(background, [part.background for part in said]),
            "shape_distance": moved.abs().mean(dim=(1, 2, 3)),
        }
        colors = terms["ink_distance"] + terms["background_distance"]
        return log_p - 10 * colors - 30 * terms["shape_distance"], terms

    return reward
