"""Lessons 06 to 12: `Trainer` of `run/runner.py`, and DDPO by the names of TRL's and imageddpo's trainers.

Algorithm and start are arguments, so that other combinations need no class of their own:
`Trainer(..., algorithm=RWR(), start=FromImages(0.4))`. Each algorithm is a file in `algorithms/`.
"""

from collections.abc import Callable
from typing import Any

from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import PromptFunction, RewardFunction, check_hook
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.run.runner import ImageSamplesHook as ImageSamplesHook
from ddpo_lessons.run.runner import Trainer as Trainer

DebugHook = Callable[[Any, float, int], None]  # (sd_pipeline, noise_strength, global_step), as by imageddpo


class DDPOTrainer(Trainer):
    """DDPO from noise; `prompt_function` is `() -> (prompt, metadata)`. All else is that of `Trainer`."""

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: Any,
        image_samples_hook: ImageSamplesHook | None = None,
    ) -> None:
        super().__init__(
            config, reward_function, prompt_function, sd_pipeline, image_samples_hook, algorithm=DDPO()
        )


class ImageDDPOTrainer(Trainer):
    """DDPO whose first state is an image with noise; `prompt_function` is `() -> (prompt, image, metadata)`.

    `noise_strength` is the share of the schedule that is run, in (0, 1]; a ValueError refuses one that leaves
    no step. `debug_hook` is called before every epoch as `(sd_pipeline, noise_strength, global_step)`, for
    validation images and the like. All else is that of `Trainer`.
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
