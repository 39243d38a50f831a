"""Define the interface of a model family, which is all that training uses of a pipeline."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from ddpo_lessons.ddim import DDIMStep


class Schedule(Protocol):
    """The denoising steps of a run, such as `ddim.DDIMSchedule` and `flow.FlowSchedule`."""

    timesteps: torch.Tensor  #: (T,) on the latents' device
    stds: torch.Tensor  #: (T,) on the CPU; 0 where a step has no noise. Steps with noise are consecutive
    eta: float  #: noise level; 0 if no step has noise
    #: index of the first action and index after the last; None if all steps with noise are actions
    actions: tuple[int, int] | None

    def step(
        self,
        model_output: torch.Tensor,
        timesteps: torch.Tensor,
        sample: torch.Tensor,
        noise: torch.Tensor | None = None,
        prev_sample: torch.Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> DDIMStep:
        """Take a step with this noise, or replay the step to `prev_sample`, as `DDIMSchedule` does."""

    def with_actions(self, first: int, end: int) -> "Schedule":
        """Return the same schedule with the steps from `first` to before `end` as its actions."""


@runtime_checkable
class Family(Protocol):
    """The parts of a diffusers pipeline that reinforcement learning needs."""

    #: arguments of `from_pretrained` that leave the safety checker out
    without_checker: ClassVar[dict[str, Any]]
    #: whether the denoiser is conditioned on images besides the prompt, as in editing models
    takes_images: ClassVar[bool]
    pipeline: Any  #: the diffusers pipeline

    def __init__(self, pipeline: Any) -> None:
        """Raise a TypeError for a pipeline that lacks a part."""

    @property
    def denoiser(self) -> Any:
        """The network that is trained."""

    @property
    def frozen(self) -> Mapping[str, nn.Module]:
        """The other networks, by their names in the pipeline."""

    @property
    def keeps_float32(self) -> frozenset[str]:
        """Names of the frozen networks that float16 breaks."""

    @property
    def init_noise_sigma(self) -> float:
        """Standard deviation of the first state of text-to-image."""

    def condition(
        self,
        prompts: Sequence[str],
        negative_prompt: str,
        guidance_scale: float,
        size: tuple[int, int] | None = None,
        images: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Encode B prompts, and images (B, 3, H, W) in [0, 1], as the denoiser's inputs, (B, ...) each.

        Entries with the prefix `negative_` belong to the negative prompt. They are left out if one forward
        pass is enough: with guidance of 1 and below, if all prompts equal the negative prompt, or if the
        model itself is conditioned on the guidance scale, which is then an entry. `size` is (H, W) of the
        images in pixels, by default the model's own. Raises a TypeError for images if `takes_images` is
        False.
        """

    def forget_prompts(self) -> None:
        """Clear the cached embeddings, because the weights of a text encoder have changed."""

    def schedule(
        self,
        num_steps: int,
        noise_strength: float = 1.0,
        eta: float = 1.0,
        size: tuple[int, int] | None = None,
    ) -> Schedule:
        """Return the last fraction `noise_strength` of a schedule of `num_steps` steps.

        `size` is (H, W) of the images in pixels, by default the model's own, because some models have other
        noise levels for larger images.
        """

    def predict(
        self,
        denoiser: Callable[..., Any],
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
        guidance_scale: float,
    ) -> torch.Tensor:
        """Predict (N, C, h, w) float32 with guidance; sampling and training both use this policy."""

    def add_noise(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return x_t (B, C, h, w) for clean latents, by the forward process."""

    def denoising_target(
        self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return what the denoiser is pre-trained to predict, (B, C, h, w)."""

    def predict_clean(
        self, noisy: torch.Tensor, output: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return the clean latents (B, C, h, w) that a prediction for noisy ones stands for; linear in it."""

    @property
    def num_train_timesteps(self) -> int:
        """The number of timesteps of the forward process."""

    def latents_shape(self, size: tuple[int, int] | None = None) -> tuple[int, int, int]:
        """Return (C, h, w) of images of (H, W) pixels, or of the model's own size."""

    @property
    def sides(self) -> tuple[int, float]:
        """The number that an image's sides must be multiples of, and their maximum, in pixels."""

    def check_images(self, images: torch.Tensor) -> None:
        """Raise an error for images that are not float (B, 3, H, W) in [0, 1] of a possible size."""

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Encode images (B, 3, H, W) in [0, 1] as latents (B, C, h, w) float32, deterministically."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents (B, C, h, w) to images (B, 3, H, W) float32 in [0, 1], without a gradient."""

    def decode_with_gradient(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode latents like `decode`, with a gradient for losses through the images."""
