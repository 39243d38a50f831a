"""What a model family promises, whatever its networks are; nobody outside knows more of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from ddpo_lessons.ddim import DDIMStep


class Schedule(Protocol):
    """The steps of a run, as `ddim.DDIMSchedule` and `flow.FlowSchedule` are."""

    timesteps: torch.Tensor  #: (T,) on the latents' device
    stds: torch.Tensor  #: (T,) on the CPU; 0 where a step has no noise. Those that have noise are neighbours
    eta: float  #: level of the noise; 0 where no step is to have any
    #: the first of the steps that are actions and the one after the last; None for all with noise
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
        """Take a step with this noise, or replay that which led to `prev_sample`, as `DDIMSchedule` does."""

    def with_actions(self, first: int, end: int) -> "Schedule":
        """Return the same steps, of which those from `first` to before `end` are actions."""


@runtime_checkable
class Family(Protocol):
    """A diffusers pipeline, seen as what reinforcement learning needs of it."""

    #: arguments of `from_pretrained` that leave a safety checker out
    without_checker: ClassVar[dict[str, Any]]
    #: whether the denoiser is told images beside the prompt, as models that edit are
    takes_images: ClassVar[bool]
    pipeline: Any  #: the diffusers pipeline

    def __init__(self, pipeline: Any) -> None:
        """Refuse a pipeline that lacks a part, with a TypeError."""

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
        """Turn B prompts, and images (B, 3, H, W) in [0, 1], into what the denoiser is told, (B, ...) each.

        Names that begin with `negative_` hold what guidance leads away from; they are left out where one
        pass is enough: guidance of 1 and below, prompts that all are the negative one, or a model that is
        told its guidance, which then is here. `size` is (H, W) of the images in pixels, the model's own if
        not given. A TypeError refuses images where `takes_images` is False.
        """

    def forget_prompts(self) -> None:
        """Forget embeddings that were kept, since a text encoder has other weights now."""

    def schedule(
        self,
        num_steps: int,
        noise_strength: float = 1.0,
        eta: float = 1.0,
        size: tuple[int, int] | None = None,
    ) -> Schedule:
        """Return the last `noise_strength` of a schedule of `num_steps` steps.

        `size` is (H, W) of the images in pixels, the model's own if not given: some models have other noise
        levels for larger images.
        """

    def predict(
        self,
        denoiser: Callable[..., Any],
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
        guidance_scale: float,
    ) -> torch.Tensor:
        """Predict (N, C, h, w) float32 with guidance: the one policy of sampling and training."""

    def add_noise(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return x_t (B, C, h, w) of clean latents, as the forward process makes it."""

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
        """What an image's sides are multiples of, and the longest that there may be, in pixels."""

    def check_images(self, images: torch.Tensor) -> None:
        """Refuse images that are not a float batch (B, 3, H, W) in [0, 1] of a size that can be encoded."""

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Turn images (B, 3, H, W) in [0, 1] into latents (B, C, h, w) float32, without randomness."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Turn latents (B, C, h, w) into images (B, 3, H, W) float32 in [0, 1], without a gradient."""

    def decode_with_gradient(self, latents: torch.Tensor) -> torch.Tensor:
        """Turn latents into images like `decode`, for losses that go through the images."""
