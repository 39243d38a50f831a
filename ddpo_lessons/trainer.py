"""Lessons 06 to 11: the trainers by the names that people know, each an algorithm with a start.

What they do is in `algorithms/`, a file for each; what surrounds it is in `run/runner.py`. Another
combination needs no class: `Runner(..., algorithm=RWR(), start=FromImages(0.4))`.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import PromptFunction, RewardFunction, check_hook
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.run.runner import ImageSamplesHook as ImageSamplesHook
from ddpo_lessons.run.runner import Runner as Runner

DebugHook = Callable[[Any, float, int], None]  # (sd_pipeline, noise_strength, global_step), as by imageddpo


class AlgorithmTrainer(Runner):
    """What all but `ImageDDPOTrainer` share: they differ in the algorithm, whose settings are keywords.

    `prompt_function` is `() -> (prompt, metadata)`; with a `noise_strength` in (0, 1], the share of the
    schedule that img2img runs, it is `() -> (prompt, image, metadata)`. All else is that of `Runner`; a
    ValueError refuses settings that the algorithm, `algorithm_name`, does not have.
    """

    algorithm_name: ClassVar[str]

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: Any,
        image_samples_hook: ImageSamplesHook | None = None,
        *,
        noise_strength: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            config,
            reward_function,
            prompt_function,
            sd_pipeline,
            image_samples_hook,
            algorithm=make_algorithm(self.algorithm_name, **settings),
            start=FromNoise() if noise_strength is None else FromImages(noise_strength),
        )


class DDPOTrainer(AlgorithmTrainer):
    """DDPO, which has no settings of its own."""

    algorithm_name = "ddpo"


class ImageDDPOTrainer(Runner):
    """DDPO whose first state is an image with noise; `prompt_function` is `() -> (prompt, image, metadata)`.

    `noise_strength` is the share of the schedule that is run, in (0, 1]; a ValueError refuses one that leaves
    no step. `debug_hook` is called before every epoch as `(sd_pipeline, noise_strength, global_step)`, for
    validation images and the like. All else is that of `Runner`.
    """

    start_class: type[FromImages] = FromImages

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: Any,
        image_samples_hook: ImageSamplesHook | None = None,
        noise_strength: float = 0.2,
        debug_hook: DebugHook | None = None,
    ) -> None:
        check_hook("debug_hook", debug_hook)
        self.noise_strength, self.debug_hook = noise_strength, debug_hook
        super().__init__(
            config,
            reward_function,
            prompt_function,
            sd_pipeline,
            image_samples_hook,
            algorithm=DDPO(),
            start=self.start_class(noise_strength),
        )

    def step(self, epoch: int) -> dict[str, float]:
        """Call `debug_hook`, then do one epoch."""
        if self.debug_hook is not None and self.accelerator.is_main_process:
            self.debug_hook(self.sd_pipeline, self.noise_strength, self.global_step)
        return super().step(epoch)


class RWRTrainer(AlgorithmTrainer):
    """Reward-weighted regression; settings: `temperature` and `top_share` of `RWR`."""

    algorithm_name = "rwr"


class BranchingTrainer(AlgorithmTrainer):
    """DDPO with credit for each action by branching, which needs groups; setting: `window` of `Branching`."""

    algorithm_name = "branching"


class FlowGRPOTrainer(AlgorithmTrainer):
    """Flow-GRPO, for flow models; settings: `sde`, `window` and `kl_times_length` of `FlowGRPO`."""

    algorithm_name = "flow_grpo"


class AWMTrainer(AlgorithmTrainer):
    """Advantage-weighted matching; settings: those of `AWM`, such as `time_power`."""

    algorithm_name = "awm"


class NFTTrainer(AlgorithmTrainer):
    """DiffusionNFT; settings: `beta`, `decay_rate` and `max_decay` of `NFT`."""

    algorithm_name = "nft"


class PEPGTrainer(AlgorithmTrainer):
    """PEPG; settings: `scale`, `decay_rate` and `max_decay` of `PEPG`."""

    algorithm_name = "pepg"


class DPOTrainer(AlgorithmTrainer):
    """Online Diffusion-DPO, which needs groups; setting: `beta` of `DPO`."""

    algorithm_name = "dpo"


class DRaFTTrainer(AlgorithmTrainer):
    """DRaFT or AlignProp, for differentiable rewards; settings: `last_steps`, `draws_steps` of `DRaFT`."""

    algorithm_name = "draft"


class ReFLTrainer(AlgorithmTrainer):
    """ReFL, for differentiable rewards; settings: `last_steps` and `margin` of `ReFL`."""

    algorithm_name = "refl"
