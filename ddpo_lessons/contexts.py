"""Lesson 06: where a run meets the user's functions, and what is asked of what they return."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ddpo_lessons.rollout import check_images

RewardFunction = Callable[[torch.Tensor, tuple[str, ...], tuple[Any, ...]], Any]
PromptFunction = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Context:
    """What one rollout is asked for: a prompt, the user's metadata and, for img2img, an image (3, H, W)."""

    prompt: str
    metadata: Any
    image: torch.Tensor | None = None

    @property
    def key(self) -> Any:
        """What per-prompt statistics are kept by: `metadata["id"]` where there is one, else the prompt."""
        has_id = isinstance(self.metadata, dict) and "id" in self.metadata
        return self.metadata["id"] if has_id else self.prompt


def check_functions(reward_function: Any, prompt_function: Any) -> None:
    """Refuse functions that cannot be called, and a prompt function whose state no checkpoint can hold.

    Raises:
        TypeError: naming the function.
    """
    for name, function in (
        ("reward_function", reward_function),
        ("prompt_function", prompt_function),
    ):
        if not callable(function):
            raise TypeError(f"{name} must be callable, not {type(function).__name__}")
    if hasattr(prompt_function, "state_dict"):
        try:
            json.dumps(prompt_function.state_dict())
        except TypeError as error:
            raise TypeError("prompt_function.state_dict() must return what JSON holds") from error


def text_context(drawn: Any) -> Context:
    """Make a context of what a text-to-image prompt function returned; refuse anything else."""
    if not isinstance(drawn, tuple) or len(drawn) != 2 or not isinstance(drawn[0], str):
        raise TypeError(f"prompt_function must return (prompt, metadata), not {drawn!r:.200}")
    return Context(drawn[0], drawn[1])


def image_context(drawn: Any, vae: Any) -> Context:
    """Make a context of what an img2img prompt function returned; refuse anything else."""
    if not isinstance(drawn, tuple) or len(drawn) != 3 or not isinstance(drawn[0], str):
        raise TypeError(f"prompt_function must return (prompt, image, metadata), not {drawn!r:.200}")
    prompt, image, metadata = drawn
    image = to_tensor(image)
    check_images(image[None], vae)
    return Context(prompt, metadata, image)


def to_tensor(image: Any) -> torch.Tensor:
    """Turn a PIL image into a tensor (3, H, W) float32 in [0, 1], and an array into a tensor."""
    if hasattr(image, "convert"):
        pixels = np.array(image.convert("RGB"))  # (H, W, 3)
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    if not isinstance(image, (torch.Tensor, np.ndarray)):
        raise TypeError(
            "an image must be a PIL image, or a float tensor or array (3, H, W) in [0, 1], not "
            f"{type(image).__name__}"
        )
    return torch.as_tensor(image)


def score(reward_function: RewardFunction, images: torch.Tensor, contexts: Sequence[Context]) -> list[Any]:
    """Call the reward function on a batch and check what it returns.

    Args:
        reward_function: `(images, prompts, metadata) -> rewards (B,)` or `(rewards, info)`.
        images: (B, 3, H, W).
        contexts: the B contexts that the images were made from.

    Returns:
        [images, prompts, metadata, rewards (B,) float32 on the CPU, info], the peers' order.

    Raises:
        TypeError: if the rewards are not numbers.
        ValueError: if their shape is wrong, or one is NaN or infinite.
    """
    prompts = tuple(context.prompt for context in contexts)
    metadata = tuple(context.metadata for context in contexts)
    returned = reward_function(images, prompts, metadata)
    rewards, info = returned if isinstance(returned, tuple) else (returned, {})
    try:  # float32: integer rewards would truncate the advantages to 0
        rewards = torch.as_tensor(rewards, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"reward_function must return numbers, not {rewards!r:.200}") from error
    if rewards.shape != (len(images),):
        raise ValueError(
            f"reward_function returned shape {tuple(rewards.shape)} for {len(images)} images: "
            f"return one reward per image, ({len(images)},)"
        )
    for row in torch.nonzero(~rewards.isfinite()).flatten().tolist():
        raise ValueError(
            f"reward_function returned {rewards[row].item()} for sample {row} of the batch, prompt "
            f"{prompts[row]!r}: return finite numbers"
        )
    return [images, prompts, metadata, rewards, info]
