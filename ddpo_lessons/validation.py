"""Images that are never trained on, made again every so many epochs from the same noise."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ddpo_lessons.data.contexts import check_rewards, score
from ddpo_lessons.models import family_of
from ddpo_lessons.trainer import ImageSamplesHook, Trainer
from ddpo_lessons.training.runlog import spread, with_captions

SHOWN = 16


def _nothing(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return torch.zeros(len(images))


class Validation:
    """A trainer's `image_samples_hook` that renders and scores contexts which are not trained on.

    Before the first epoch, after every `every` epochs and after the last one it writes
    `images/validation-NNNNNN` (for img2img pairs of input and result) into the run's folder, a record
    `{"kind": "validation", "epoch", "step", "validation_reward", "validation_reward_std",
    "validation_reward_q05", ...}` into metrics.jsonl, and both to the trackers. Noise depends on seed and
    context alone, so that grids differ by what was learned. Nothing of the training changes. Every process
    renders, for weights may be sharded, and the main one scores. Another hook, if given, is called first.

        trainer = ImageDDPOTrainer(config, reward, prompts, pipeline)
        trainer.image_samples_hook = Validation(trainer, held_out, every=10)
        trainer.train()

    Samples are what a prompt function would return, one for each context: `(prompt, metadata)`, or `(prompt,
    image, metadata)`. A TypeError or ValueError refuses those that the trainer's start does not take, images
    that differ in size, no samples, and `every` below 1.
    """

    in_every_process = True  # the trainer calls other hooks in the main one

    def __init__(
        self, trainer: Trainer, samples: Sequence[Any], every: int = 10, hook: ImageSamplesHook | None = None
    ) -> None:
        if every < 1 or not samples:
            raise ValueError(
                f"validation of {len(samples)} samples every {every} epochs: give one or more of both"
            )
        self.trainer, self.every, self.hook = trainer, every, hook
        family = family_of(trainer.pipeline)  # one of its own: training's remembers prompts
        self.sampler = replace(trainer.sampler, family=family)
        self.contexts = [trainer.start.context(sample, family) for sample in samples]
        trainer.start.check(self.contexts)
        self._before = self.measure() if trainer.epochs_done == 0 else None

    def __call__(self, batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        """Render and score if the epoch is one of those."""
        is_main, epochs = self.trainer.accelerator.is_main_process, self.trainer.epochs_done
        if self.hook is not None and is_main:
            self.hook(batches, global_step, tracker)
        if epochs == 1 and self._before is not None and is_main:  # there was no folder before
            self._report(0, 0, *self._before)
        if epochs % self.every == 0 or epochs == self.trainer.config.num_epochs:
            found = self.measure()
            if is_main:
                self._report(epochs, global_step, *found)

    def measure(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Render all contexts (N, 3, H, W) in every process; score them (N,) in the main one."""
        numbers = list(range(len(self.contexts)))
        size, batches = self.trainer.config.sample_batch_size, []
        for first in range(0, len(numbers), size):
            rows = numbers[first : first + size]
            contexts = [self.contexts[row] for row in rows]
            with self.trainer.learner.averaged_policy():
                images = self.sampler.draw(contexts, rows)
            is_main = self.trainer.accelerator.is_main_process
            reward = self.trainer.reward_function if is_main else _nothing
            batches.append(score(reward, images, contexts))
        return torch.cat([batch[0].cpu() for batch in batches]), check_rewards(batches)

    def _report(self, epochs: int, step: int, images: torch.Tensor, rewards: torch.Tensor) -> None:
        trainer = self.trainer
        shown, captions = with_captions(self.contexts[:SHOWN], images[:SHOWN], rewards[:SHOWN].tolist())
        values = {
            "epoch": epochs,
            "step": step,
            "validation_reward": rewards.mean().item(),
            **spread("validation_reward", rewards),
        }
        trainer.write_grid("validation", epochs, shown, captions)
        trainer.write_record("validation", values)
