"""Evaluate a run on held-out images, which are generated from the same noise at several epochs."""

import contextlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddpo_lessons.data.contexts import Context, RewardFunction, check_rewards, score
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.models import family_of
from ddpo_lessons.table import Lines
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.runlog import as_numbers, read_metrics, spread, with_captions, write_file
from ddpo_lessons.training.sampler import Sampler

SHOWN = 16
UNTRAINED = "untrained.json"  # in the run's folder, see `Validation.untrained`
SETTINGS = (
    "seed", "mixed_precision", "sample_num_steps", "sample_eta", "sample_guidance_scale", "sample_batch_size"
)  # fmt: skip
ROUNDING = 1e-3  # of rewards, when the same images are generated again


def _nothing(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return torch.zeros(len(images))


@dataclass(frozen=True)
class Measured:
    """Rewards of the held-out images of one policy, printed as means with standard errors."""

    name: str
    rewards: torch.Tensor  #: (N,) from the reward function of training
    evaluations: torch.Tensor | None = None  #: (N,) from the evaluator, if there is one

    def __str__(self) -> str:
        text = f"{self.name:<32} reward {with_error(self.rewards):>16}"
        if self.evaluations is None:
            return text
        return f"{text}   evaluator {with_error(self.evaluations):>14}"


def with_error(scores: torch.Tensor) -> str:
    """Return the mean of scores (N,) and its standard error (N - 1 degrees of freedom) as text.

    Both have as many decimals as give the error two digits, but at most four; three digits without an error.
    """
    error = scores.double().std().item() / math.sqrt(len(scores)) if len(scores) > 1 else math.nan
    mean = scores.double().mean().item()
    if not error > 0:  # 0 or NaN
        return f"{mean:.3g} ± {error:g}"
    decimals = min(4, max(0, 1 - math.floor(math.log10(error))))
    return f"{mean:.{decimals}f} ± {error:.{decimals}f}"


class Validation:
    """Generate and score held-out contexts during a run, as the `image_samples_hook` of a trainer.

    Before the first epoch, after every `every` epochs and after the last one it writes
    `images/validation-NNNNNN` (for img2img pairs of input and result) into the run's folder, a record
    `{"kind": "validation", "epoch", "step", "validation_reward", "validation_reward_std",
    "validation_reward_q05", ..., "rewards"}` into metrics.jsonl, and both to the trackers. The noise depends
    only on seed and context, so grids differ only by what was learned, and the training itself does not
    change. Every process generates images, because weights may be sharded, and the main process scores them.
    `Hooks` combines this hook with others.

        validation = Validation(trainer, held_out, every=10, evaluator=hits)
        trainer.image_samples_hook = validation
        trainer.train()
        validation.table()  # as the last expression of a cell: a line per measured epoch

    Each of the samples is a result of a prompt function: `(prompt, metadata)`, or `(prompt, image,
    metadata)`. An evaluator is a second reward function, `(images, prompts, metadata) -> (N,)`, which is not
    trained on; its scores are recorded as "evaluations", and their mean as "validation_evaluation". Raises a
    TypeError or ValueError for samples that the trainer's start does not take, images of different sizes, no
    samples, and `every` below 1.
    """

    in_every_process = True  # the trainer calls other hooks only in the main process

    def __init__(
        self,
        trainer: Trainer,
        samples: Sequence[Any],
        every: int = 10,
        evaluator: RewardFunction | None = None,
    ) -> None:
        if not isinstance(samples, Sequence):
            raise TypeError(
                f"Validation takes a list of samples, not {type(samples).__name__}: give "
                "ImagePrompts(...).every(), or a list of (prompt, metadata)"
            )
        if not samples:
            raise ValueError("samples of the validation is empty: give at least one")
        if every < 1:
            raise ValueError(f"every={every} epochs between two validations: give a number of at least 1")
        self.trainer, self.every, self.evaluator = trainer, every, evaluator
        family = family_of(trainer.pipeline)  # a separate one, because training's caches its prompts
        self.sampler = replace(trainer.sampler, family=family)
        self.contexts = [trainer.start.context(sample, family) for sample in samples]
        trainer.start.check(self.contexts)
        self._before = self.measure() if trainer.epochs_done == 0 else None

    def __call__(self, batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        """Generate and score the images if it is the turn of this epoch."""
        is_main, epochs = self.trainer.accelerator.is_main_process, self.trainer.epochs_done
        if epochs == 1 and self._before is not None and is_main:  # there was no folder before
            self._report(0, 0, *self._before)
        if epochs % self.every == 0 or epochs == self.trainer.config.num_epochs:
            found = self.measure()
            if is_main:
                self._report(epochs, global_step, *found)

    def table(self) -> Lines[Measured]:
        """Return the measurements in the run's folder: before, during and after training."""
        return Lines(
            Measured(
                f"epoch {record['epoch']}",
                torch.tensor(record["rewards"], dtype=torch.float64),
                torch.tensor(record["evaluations"], dtype=torch.float64) if "evaluations" in record else None,
            )
            for record in read_metrics(self.trainer.config.run_dir, "validation")
        )

    def images(self, count: int, trained: bool = True) -> torch.Tensor:
        """Generate the first held-out images (N, 3, H, W) with the current or the untrained policy.

        They are the images of `measure`. Raises RuntimeError as `untrained` does. Every process must call it.
        """
        learner = self.trainer.learner
        with learner.averaged_policy() if trained else self._before_training():
            return torch.cat([images.cpu() for images in self._batches(self.sampler, self.contexts[:count])])

    def untrained(self, *strengths: float, best_of: int = 1) -> Lines[Measured]:
        """Score the untrained policy at several noise strengths, also after training.

        Without strengths the run's own is used. Of `best_of` images from different noise, the one with the
        highest reward is kept, and the evaluator scores it; the first image is that of validation.

        A run of one process keeps the results in untrained.json. After a restart they are read from there if
        settings, prompts and input images are the same, and the first batch, which is generated again, gets
        the same rewards and evaluations; otherwise all is measured again.

        Raises ValueError for strengths if the run does not start from images, and RuntimeError if the run
        trains other weights than a new adapter and has begun; also ValueError for a damaged untrained.json.
        Every process must call it.
        """
        of_many = f", best-of-{best_of}" if best_of > 1 else ""
        with self._before_training():
            return Lines(
                self._kept(f"untrained{name}{of_many}", replace(self.sampler, start=start), best_of)
                for name, start in self._starts(strengths)
            )

    def _before_training(self) -> contextlib.AbstractContextManager[None]:
        is_new = self.trainer.global_step == 0
        return contextlib.nullcontext() if is_new else self.trainer.learner.reference()

    def _starts(self, strengths: Sequence[float]) -> list[tuple[str, FromNoise]]:
        """Return names and starts of the strengths, or of the run."""
        start = self.trainer.start
        if not strengths:
            return [("", start)]
        if not isinstance(start, FromImages):
            raise ValueError("strengths are for runs that start from images: leave them out")
        return [
            (f", strength {strength:g}", replace(start, noise_strength=strength)) for strength in strengths
        ]

    def _kept(self, name: str, sampler: Sampler, best_of: int) -> Measured:
        """Read a measurement from the run's folder if it still holds; otherwise measure, and keep it."""
        path, settings = self.trainer.config.run_dir / UNTRAINED, self._settings(sampler)
        is_alone = self.trainer.accelerator.num_processes == 1
        kept = _read(path) if is_alone and path.exists() else {}
        found, size = kept.get(name, {"settings": None}), self.trainer.config.sample_batch_size
        if found["settings"] == settings:
            first, then = _joined(self._draw(sampler, self.contexts[:size])[1:]), torch.tensor(found["first"])
            if len(then) == len(first) and torch.allclose(then, first, rtol=ROUNDING, atol=ROUNDING):
                return Measured(name, *(each and torch.tensor(each) for each in found["measured"]))
        tries = [self._draw(sampler, self.contexts, number)[1:] for number in range(best_of)]
        measured = _best(name, tries)
        if is_alone:
            both: list[list[float] | None] = [as_numbers(measured.rewards), None]
            if measured.evaluations is not None:
                both[1] = as_numbers(measured.evaluations)
            first = _joined([each if each is None else each[:size] for each in tries[0]])
            kept[name] = {"settings": settings, "first": as_numbers(first), "measured": both}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, (json.dumps(kept) + "\n").encode())
        return measured

    def _settings(self, sampler: Sampler) -> dict[str, Any]:
        """Return what decides the images beside the model, with a checksum of prompts and input images."""
        checksum = 0
        for context in self.contexts:
            checksum = zlib.crc32(context.prompt.encode(), checksum)
            if context.image is not None:
                checksum = zlib.crc32(context.image.cpu().numpy().tobytes(), checksum)
        config = {name: getattr(self.trainer.config, name) for name in SETTINGS}
        return {**sampler.start.identity(), **config, "checksum": checksum}

    def measure(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Generate images of all contexts (N, 3, H, W); score them in the main process, (N,) each."""
        with self.trainer.learner.averaged_policy():
            return self._draw(self.sampler, self.contexts)

    def _draw(
        self, sampler: Sampler, contexts: Sequence[Context], number: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Generate contexts with noise number `number`; return images, rewards and evaluations (N,)."""
        size, batches, evaluated = self.trainer.config.sample_batch_size, [], []
        is_main = self.trainer.accelerator.is_main_process
        reward = self.trainer.reward_function if is_main else _nothing
        evaluator = self.evaluator if is_main or self.evaluator is None else _nothing
        drawn = self._batches(sampler, contexts, number)
        for first, images in zip(range(0, len(contexts), size), drawn, strict=True):
            part = contexts[first : first + size]
            batches.append(score(reward, images, part))
            if evaluator is not None:
                evaluated.append(score(evaluator, images, part))
        images = torch.cat([batch.images.cpu() for batch in batches])
        return images, check_rewards(batches), check_rewards(evaluated) if evaluated else None

    def _batches(
        self, sampler: Sampler, contexts: Sequence[Context], number: int = 0
    ) -> Iterator[torch.Tensor]:
        """Generate the given contexts with noise number `number`, in batches of images (B, 3, H, W)."""
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


def _read(path: Path) -> dict[str, Any]:
    """Read what was measured before; raise a ValueError if the file is damaged."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if all({"settings", "first", "measured"} <= {*line} for line in kept.values()):
            return kept
    raise ValueError(f"{path} is damaged: delete it, and the results are measured again")


def _best(name: str, tries: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> Measured:
    """Keep the highest reward of each context and its evaluation, of (N,) and (N,) or None for each try."""
    rewards = torch.stack([rewards for rewards, _ in tries])  # (best_of, N)
    best = rewards.argmax(dim=0, keepdim=True)  # (1, N)
    evaluations = [evaluations for _, evaluations in tries if evaluations is not None]
    chosen = torch.stack(evaluations).gather(0, best)[0] if evaluations else None
    return Measured(name, rewards.gather(0, best)[0], chosen)


def _joined(scores: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Put rewards and evaluations (N,) after one another, for a comparison."""
    return torch.cat([each.float() for each in scores if each is not None])
