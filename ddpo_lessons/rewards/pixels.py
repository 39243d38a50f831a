"""Rewards that are computed from the pixels alone."""

import io
from collections.abc import Sequence

import torch

from ddpo_lessons.image import to_pil
from ddpo_lessons.rewards.reward import (
    Metadata,
    RewardFunction,
    checked_reward,
    metadata_images,
    register,
)


def _jpeg_kilobytes(images: torch.Tensor) -> torch.Tensor:
    sizes = []
    for image in images:
        buffer = io.BytesIO()
        to_pil(image).save(buffer, format="JPEG", quality=95)
        sizes.append(buffer.tell() / 1000)
    return torch.tensor(sizes, dtype=torch.float32, device=images.device)  # (B,)


@register()
def jpeg_compressibility() -> RewardFunction:
    """Score minus the size of the image as a JPEG of quality 95, in kB of 1000 bytes.

    Source: DDPO paper, section 5.1; kB and quality as in ddpo-pytorch.
    """
    return checked_reward(lambda images, prompts, metadata: -_jpeg_kilobytes(images))


@register()
def jpeg_incompressibility() -> RewardFunction:
    """Score the size of the image as a JPEG of quality 95, in kB of 1000 bytes."""
    return checked_reward(lambda images, prompts, metadata: _jpeg_kilobytes(images))


@register()
def colorfulness() -> RewardFunction:
    """Score how colorful people find an image: 0 for grays, above 100 for the most vivid.

    With R, G, B on 0..255, rg = R - G and yb = (R + G) / 2 - B:
    sqrt(std(rg)^2 + std(yb)^2) + 0.3 sqrt(mean(rg)^2 + mean(yb)^2), over all pixels.

    Source: Hasler and Suesstrunk 2003, "Measuring colourfulness in natural images", metric M(3).
    """

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        red, green, blue = (255 * images).flatten(2).unbind(1)  # (B, H*W) each
        opponent = torch.stack([red - green, (red + green) / 2 - blue], dim=1)  # (B, 2, H*W)
        std = opponent.std(dim=2, correction=0).norm(dim=1)  # (B,)
        mean = opponent.mean(dim=2).norm(dim=1)  # (B,)
        return std + 0.3 * mean

    return reward


@register(needs=("target",))
def pixel_penalty(reference: str = "target") -> RewardFunction:
    """Score minus the root mean square difference to the image `metadata[reference]`, in [-1, 0].

    It needs no network, but it treats a shifted image as a different one; `distance_penalty` is closer to
    human perception. The reference "target" is the clean original, and "image" the input.
    """

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        difference = images - metadata_images(metadata, reference, images)  # (B, 3, H, W)
        return -difference.square().mean(dim=(1, 2, 3)).sqrt()

    return reward
