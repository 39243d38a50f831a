"""Where a rollout starts: from noise (text-to-image) or from a noised image (img2img)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import Context, image_context, text_context
from ddpo_lessons.families import Family, Schedule
from ddpo_lessons.rollout import from_images, from_noise


@dataclass(frozen=True)
class FromNoise:
    """Text-to-image: the first state is noise; `prompt_function` returns `(prompt, metadata)`.

    Another start is a subclass that changes what is different.
    """

    def identity(self) -> dict[str, Any]:
        """Return what decides the weights, for checkpoints."""
        return {"start": "noise"}

    def schedule(self, family: Family, config: DDPOConfig) -> Schedule:
        """Return the steps of a rollout: the whole schedule."""
        return family.schedule(config.sample_num_steps, eta=config.sample_eta)

    def count_train_timesteps(self, num_actions: int, config: DDPOConfig) -> int:
        """Return `train_timestep_fraction` of the actions."""
        count = int(num_actions * config.train_timestep_fraction + 1e-6)
        if count == 0:
            raise ValueError(
                f"train_timestep_fraction={config.train_timestep_fraction} of {num_actions} steps with "
                "noise leaves none to train on: raise it, or take more steps"
            )
        return count

    def context(self, drawn: Any, family: Family) -> Context:
        """Check what the prompt function returned."""
        return text_context(drawn)

    def check(self, contexts: Sequence[Context]) -> None:
        """Accept all: prompts make a batch whatever they are."""

    def size(self, contexts: Sequence[Context]) -> tuple[int, int] | None:
        """Return (H, W) of the images, or None for the model's own size."""
        return None

    def prompts(self, contexts: Sequence[Context], config: DDPOConfig) -> list[str]:
        """Return what the policy is told."""
        return [context.prompt for context in contexts]

    def first_states(
        self,
        family: Family,
        contexts: Sequence[Context],
        schedule: Schedule,
        noise: torch.Tensor,
        group_size: int,
    ) -> torch.Tensor:
        """Make the first state of each rollout, (B, C, h, w), of standard normal noise."""
        return from_noise(family, noise)


@dataclass(frozen=True)
class FromImages(FromNoise):
    """Img2img: the first state is an image with noise; `prompt_function` returns `(prompt, image, metadata)`.

    Attributes:
        noise_strength: share of the schedule that is run, in (0, 1].
    """

    noise_strength: float = 0.2

    def __post_init__(self) -> None:
        """Refuse what is no number; the schedule looks at its size."""
        if not isinstance(self.noise_strength, (int, float)):
            raise TypeError(f"noise_strength={self.noise_strength!r} must be a number in (0, 1]")

    def identity(self) -> dict[str, Any]:
        """Return what decides the weights, for checkpoints."""
        return {"start": "images", "noise_strength": self.noise_strength}

    def schedule(self, family: Family, config: DDPOConfig) -> Schedule:
        """Return the steps of a rollout: the last part of the schedule."""
        return family.schedule(config.sample_num_steps, self.noise_strength, config.sample_eta)

    def context(self, drawn: Any, family: Family) -> Context:
        """Check what the prompt function returned."""
        return image_context(drawn, family)

    def check(self, contexts: Sequence[Context]) -> None:
        """Refuse images of different sizes."""
        sizes = {tuple(context.image.shape) for context in contexts if context.image is not None}
        if len(sizes) > 1:
            raise ValueError(f"images of one epoch have the sizes {sorted(sizes)}: resize them to one")

    def size(self, contexts: Sequence[Context]) -> tuple[int, int] | None:
        """Return (H, W) of the contexts' images."""
        height, width = next(c.image for c in contexts if c.image is not None).shape[1:]
        return height, width

    def first_states(
        self,
        family: Family,
        contexts: Sequence[Context],
        schedule: Schedule,
        noise: torch.Tensor,
        group_size: int,
    ) -> torch.Tensor:
        """Encode the images and add the noise."""
        images = torch.stack([context.image for context in contexts if context.image is not None])
        return from_images(family, images, schedule, noise, group_size=group_size)
