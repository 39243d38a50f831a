"""Starts of a rollout: noise (text-to-image, editing) or a noised image (img2img)."""

import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import Context, image_context, text_context
from ddpo_lessons.image import check_size
from ddpo_lessons.models import Family, Schedule
from ddpo_lessons.rollout import from_images, from_noise

TOO_LARGE = 2  # times the model's own side, from where on a resolution is warned of


@dataclass(frozen=True)
class FromNoise:
    """Text-to-image: the first state is noise; `prompt_function` returns `(prompt, metadata)`.

    Other starts are subclasses that override what differs.
    """

    name: ClassVar[str] = "noise"
    #: side of the square images in pixels; None for the model's own size, or that of the images that the
    #: prompt function returns
    resolution: int | None = field(default=None, kw_only=True)

    def identity(self) -> dict[str, Any]:
        """Return the settings that affect the weights, for checkpoints."""
        return {"start": self.name, **asdict(self)}

    def check_resolution(self, family: Family) -> None:
        """Raise a ValueError for a resolution that the model cannot take; warn of one far above its own."""
        side = self.resolution
        if side is None:
            return
        check_size((side, side), *family.sides, resolution=side)
        times = family.latents_shape((side, side))[-1] / family.latents_shape()[-1]
        if times >= TOO_LARGE:
            warnings.warn(
                f"resolution={side} is {times:g} times the model's own {side / times:g}: images are usually "
                f"worse than at that size, and time and memory grow with their {times**2:.0f} times as many "
                f"pixels. Leave resolution out to use {side / times:g}.",
                stacklevel=4,
            )

    def schedule(self, family: Family, config: DDPOConfig, contexts: Sequence[Context] = ()) -> Schedule:
        """Return the schedule of a rollout for contexts of one size, which is the whole schedule."""
        return family.schedule(config.sample_num_steps, eta=config.sample_eta, size=self.size(contexts))

    def count_train_timesteps(self, num_actions: int, config: DDPOConfig) -> int:
        """Return the number of actions that are trained on, by `train_timestep_fraction`."""
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
        """Accept all contexts, because any prompts can share a batch."""

    def size(self, contexts: Sequence[Context]) -> tuple[int, int] | None:
        """Return (H, W) of the images, or None for the model's own size."""
        return None if self.resolution is None else (self.resolution, self.resolution)

    def prompts(self, contexts: Sequence[Context], config: DDPOConfig) -> list[str]:
        """Return the prompts that the policy is conditioned on."""
        return [context.prompt for context in contexts]

    def images(self, contexts: Sequence[Context]) -> torch.Tensor | None:
        """Return the images (B, 3, H, W) that the policy is conditioned on, if any."""
        return None

    def first_states(
        self,
        family: Family,
        contexts: Sequence[Context],
        schedule: Schedule,
        noise: torch.Tensor,
        group_size: int,
    ) -> torch.Tensor:
        """Make the first state of each rollout, (B, C, h, w), from standard normal noise."""
        return from_noise(family, noise)


@dataclass(frozen=True)
class WithImages(FromNoise):
    """Editing: the first state is noise, and the model is conditioned on an image and a prompt.

    `prompt_function` returns `(prompt, image, metadata)`. This needs an editing model, such as FLUX.1
    Kontext, whereas `FromImages` starts any model from an image.
    """

    name = "noise with images"

    def context(self, drawn: Any, family: Family) -> Context:
        """Check what the prompt function returned."""
        return image_context(drawn, family)

    def check(self, contexts: Sequence[Context]) -> None:
        """Raise a ValueError for images of different sizes, because an epoch has one schedule."""
        sizes = {tuple(context.image.shape[1:]) for context in contexts if context.image is not None}
        if len(sizes) > 1:
            raise ValueError(f"images of one epoch have the sizes {sorted(sizes)}: resize them to one")
        if self.resolution is not None and sizes != {(self.resolution, self.resolution)}:
            raise ValueError(
                f"resolution={self.resolution}, but the images have {sizes}: resize them, or leave it out"
            )

    def size(self, contexts: Sequence[Context]) -> tuple[int, int] | None:
        """Return (H, W) of the contexts' images, or of the run's resolution if there are none yet."""
        for context in contexts:
            if context.image is not None:
                return context.image.shape[1], context.image.shape[2]
        return super().size(contexts)

    def images(self, contexts: Sequence[Context]) -> torch.Tensor | None:
        """Return the contexts' images."""
        return torch.stack([context.image for context in contexts if context.image is not None])


@dataclass(frozen=True)
class FromImages(WithImages):
    """Img2img: the first state is an image with noise; `prompt_function` returns `(prompt, image, metadata)`.

    `noise_strength` in (0, 1] is the fraction of the schedule that is run.
    """

    name = "images"
    noise_strength: float = 0.2

    def __post_init__(self) -> None:
        """Raise a TypeError for a strength that is not a number; the schedule checks its value."""
        if not isinstance(self.noise_strength, (int, float)):
            raise TypeError(f"noise_strength={self.noise_strength!r} must be a number in (0, 1]")

    def schedule(self, family: Family, config: DDPOConfig, contexts: Sequence[Context] = ()) -> Schedule:
        """Return the schedule of a rollout, which is the last part of the whole schedule."""
        size = self.size(contexts)
        return family.schedule(config.sample_num_steps, self.noise_strength, config.sample_eta, size)

    def images(self, contexts: Sequence[Context]) -> torch.Tensor | None:
        """Return None, because the images are in the first states."""
        return None

    def first_states(
        self,
        family: Family,
        contexts: Sequence[Context],
        schedule: Schedule,
        noise: torch.Tensor,
        group_size: int,
    ) -> torch.Tensor:
        """Encode the images and add the noise."""
        images = super().images(contexts)
        assert images is not None
        return from_images(family, images, schedule, noise, group_size=group_size)
