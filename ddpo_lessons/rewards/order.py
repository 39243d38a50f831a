"""Check whether a reward ranks images as it should, before training on it."""

from collections.abc import Sequence
from typing import Any

import torch

from ddpo_lessons.rewards.reward import RewardFunction, metadata_images, split_info

GRAY = 0.5  # of every pixel of a blank image
BATCH = 8  # images that are scored together


@torch.no_grad()
def check_order(
    reward_function: RewardFunction, contexts: Sequence[Any], device: str | torch.device = "cpu"
) -> dict[str, float]:
    """Score clean, damaged and blank images; return the means, and the fraction in correct order.

    Contexts are what an img2img prompt function with damage returns: `(prompt, image (3, H, W), metadata)`,
    the image damaged and `metadata["target"]` clean; blank images are gray. The entries are "clean",
    "damaged", "blank", and "in_order": the fraction of contexts with clean > damaged > blank. An image that
    is not damaged is its own target, so damaged > blank is enough. A low fraction is for the reader to judge,
    and refuses nothing; a ValueError says that there is no clean image.
    """
    prompts, images, metadata = zip(*contexts, strict=True)
    damaged = torch.stack(images)  # (N, 3, H, W)
    kinds = {
        "clean": metadata_images(metadata, "target", damaged),
        "damaged": damaged,
        "blank": torch.full_like(damaged, GRAY),
    }
    batches = [slice(first, first + BATCH) for first in range(0, len(damaged), BATCH)]

    def score(shown: torch.Tensor) -> torch.Tensor:
        parts = [reward_function(shown[part].to(device), prompts[part], metadata[part]) for part in batches]
        return torch.cat([split_info(part)[0].cpu() for part in parts])  # (N,)

    scores = {name: score(shown) for name, shown in kinds.items()}
    is_same = (kinds["clean"] == damaged).flatten(1).all(dim=1)  # (N,)
    in_order = (scores["clean"] > scores["damaged"]) | is_same
    in_order &= scores["damaged"] > scores["blank"]
    return {name: of_kind.mean().item() for name, of_kind in scores.items()} | {
        "in_order": in_order.double().mean().item()
    }
