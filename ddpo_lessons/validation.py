"""Images that are never trained on, made again every so many epochs from the same noise."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ddpo_lessons.data.contexts import Context, RewardFunction, check_rewards, score
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.models import family_of
from ddpo_lessons.table import Lines
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.runlog import as_numbers, read_metrics, spread, with_captions
from ddpo_lessons.training.sampler import Sampler

SHOWN = 16


def _nothing(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return torch.zeros(len(images))


@dataclass(frozen=True)
class Measured:
    """Scores of the held-out images of one policy, in their order; shown as means with standard errors."""

    name: str
    rewards: torch.Tensor  #: (N,) of the training's reward function
    evaluations: torch.Tensor | None = None  #: (N,) of the evaluator, if there is one

    def __str__(self) -> str:
        text = f"{self.name:<32} reward {with_error(self.rewards)}"
        return text if self.evaluations is None else f"{text}   evaluator {with_error(self.evaluations)}"


def with_error(scores: torch.Tensor) -> str:
    """Write the mean of scores (N,) and its standard error, of N - 1 degrees of freedom."""
    error = scores.double().std().item() / math.sqrt(len(scores)) if len(scores) > 1 else math.nan
    return f"{scores.double().mean().item():.3f} ± {error:.3f}"


class Validation:
    """A trainer's `image_samples_hook` that renders and scores contexts which are not trained on.

    Before the first epoch, after every `every` epochs and after the last one it writes
    `images/validation-NNNNNN` (for img2img pairs of input and result) into the run's folder, a record
    `{"kind": "validation", "epoch", "step", "validation_reward", "validation_reward_std",
    "validation_reward_q05", ..., "rewards"}` into metrics.jsonl, and both to the trackers. Noise depends on
    seed and context alone, so that grids differ by what was learned. Nothing of the training changes. Every
    process renders, for weights may be sharded, and the main one scores. `Hooks` combines it with others.

        validation = Validation(trainer, held_out, every=10, evaluator=hits)
        trainer.image_samples_hook = validation
        trainer.train()
        validation.table()  # the last expression of a notebook's cell: a line per epoch that was measured

    Samples are what a prompt function would return, one for each context: `(prompt, metadata)`, or `(prompt,
    image, metadata)`. An evaluator is a second reward function, `(images, prompts, metadata) -> (N,)`, which
    nothing is trained on; its scores are recorded as "evaluations", and their mean as
    "validation_evaluation". A TypeError or ValueError refuses samples that the trainer's start does not take,
    images that differ in size, no samples, and `every` below 1.
    """

    in_every_process = True  # the trainer calls other hooks in the main one

    def __init__(
        self,
        trainer: Trainer,
        samples: Sequence[Any],
        every: int = 10,
        evaluator: RewardFunction | None = None,
    ) -> None:
        if every < 1 or not samples:
            raise ValueError(
                f"validation of {len(samples)} samples every {every} epochs: give one or more of both"
            )
        self.trainer, self.every, self.evaluator = trainer, every, evaluator
        family = family_of(trainer.pipeline)  # one of its own: training's remembers prompts
        self.sampler = replace(trainer.sampler, family=family)
        self.contexts = [trainer.start.context(sample, family) for sample in samples]
        trainer.start.check(self.contexts)
        self._before = self._measure() if trainer.epochs_done == 0 else None

    def __call__(self, batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        """Render and score if the epoch is one of those."""
        is_main, epochs = self.trainer.accelerator.is_main_process, self.trainer.epochs_done
        if epochs == 1 and self._before is not None and is_main:  # there was no folder before
            self._report(0, 0, *self._before)
        if epochs % self.every == 0 or epochs == self.trainer.config.num_epochs:
            found = self._measure()
            if is_main:
                self._report(epochs, global_step, *found)

    def table(self) -> Lines[Measured]:
        """Read what the run's folder holds of the epochs: before training, during and after."""
        return Lines(
            Measured(
                f"epoch {record['epoch']}",
                torch.tensor(record["rewards"], dtype=torch.float64),
                torch.tensor(record["evaluations"], dtype=torch.float64) if "evaluations" in record else None,
            )
            for record in read_metrics(self.trainer.config.run_dir, "validation")
        )

    def images(self, count: int, trained: bool = True) -> torch.Tensor:
        """Draw the first held-out images (N, 3, H, W), by the policy as it is or as it was before training.

        They are those of `measure`. Raises RuntimeError as `untrained` does. Every process must call it.
        """
        learner = self.trainer.learner
        with learner.averaged_policy() if trained else self._before_training():
            return torch.cat([images.cpu() for images in self._batches(self.sampler, self.contexts[:count])])

    def untrained(self, *strengths: float, best_of: int = 1) -> Lines[Measured]:
        """Score the policy before training, also when the run has trained, at several noise strengths.

        Without strengths it is the run's own. Of `best_of` images from different noise the one with the
        highest reward is taken, and the evaluator scores it; the first of them is that of validation. Raises
        ValueError for strengths where the run does not start from images; RuntimeError if the run trains
        other weights than a new adapter, and has begun. Every process must call it.
        """
        of_many = f", best of {best_of}" if best_of > 1 else ""
        with self._before_training():
            return Lines(
                self._best(f"untrained{name}{of_many}", replace(self.sampler, start=start), best_of)
                for name, start in self._starts(strengths)
            )

    def _before_training(self) -> contextlib.AbstractContextManager[None]:
        is_new = self.trainer.global_step == 0
        return contextlib.nullcontext() if is_new else self.trainer.learner.reference()

    def _starts(self, strengths: Sequence[float]) -> list[tuple[str, FromNoise]]:
        """Name the starts of the strengths, or the run's own one."""
        start = self.trainer.start
        if not strengths:
            return [("", start)]
        if not isinstance(start, FromImages):
            raise ValueError("strengths are for runs that start from images: leave them out")
        return [
            (f", strength {strength:g}", replace(start, noise_strength=strength)) for strength in strengths
        ]

    def _best(self, name: str, sampler: Sampler, best_of: int) -> Measured:
        """Take of each context's images that with the highest reward."""
        tries = [self._draw(sampler, number)[1:] for number in range(best_of)]
        rewards = torch.stack([rewards for rewards, _ in tries])  # (best_of, N)
        best = rewards.argmax(dim=0, keepdim=True)  # (1, N)
        evaluations = [evaluations for _, evaluations in tries if evaluations is not None]
        chosen = torch.stack(evaluations).gather(0, best)[0] if evaluations else None
        return Measured(name, rewards.gather(0, best)[0], chosen)

    def measure(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Render all contexts (N, 3, H, W) in every process; score them (N,) in the main one."""
        return self._measure()[:2]

    def _measure(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        with self.trainer.learner.averaged_policy():
            return self._draw(self.sampler)

    def _draw(
        self, sampler: Sampler, number: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Render all contexts for a time by its number; return images, rewards (N,) and evaluations (N,)."""
        size, batches, evaluated = self.trainer.config.sample_batch_size, [], []
        is_main = self.trainer.accelerator.is_main_process
        reward = self.trainer.reward_function if is_main else _nothing
        evaluator = self.evaluator if is_main or self.evaluator is None else _nothing
        drawn = self._batches(sampler, self.contexts, number)
        for first, images in zip(range(0, len(self.contexts), size), drawn, strict=True):
            contexts = self.contexts[first : first + size]
            batches.append(score(reward, images, contexts))
            if evaluator is not None:
                evaluated.append(score(evaluator, images, contexts))
        images = torch.cat([batch[0].cpu() for batch in batches])
        return images, check_rewards(batches), check_rewards(evaluated) if evaluated else None

    def _batches(
        self, sampler: Sampler, contexts: Sequence[Context], number: int = 0
    ) -> Iterator[torch.Tensor]:
        """Draw the first contexts for a time by its number, in batches of images (B, 3, H, W)."""
        size, before = self.trainer.config.sample_batch_size, number * len(self.contexts)
        for first in range(0, len(contexts), size):
            part = contexts[first : first + size]
            yield sampler.draw(part, [before + first + n for n in range(len(part))])

    def _report(
        self,
        epochs: int,
        step: int,
        images: torch.Tensor,
        rewards: torch.Tensor,
        evaluations: torch.Tensor | None,
    ) -> None:
        trainer = self.trainer
        shown, captions = with_captions(self.contexts[:SHOWN], images[:SHOWN], rewards[:SHOWN].tolist())
        values: dict[str, Any] = {
            "epoch": epochs,
            "step": step,
            "validation_reward": rewards.mean().item(),
            **spread("validation_reward", rewards),
            "rewards": as_numbers(rewards),
        }
        if evaluations is not None:
            values["validation_evaluation"] = evaluations.mean().item()
            values["evaluations"] = as_numbers(evaluations)
        trainer.write_grid("validation", epochs, shown, captions)
        trainer.write_record("validation", values)
