"""Sample and score the part of an epoch that belongs to this process."""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddpo_lessons.advantages import to_rewards
from ddpo_lessons.algorithms.algorithm import Algorithm, Learner
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import Batch, Context, RewardFunction, score, split_info
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.models import Family, Schedule
from ddpo_lessons.rollout import (
    ACTIONS,
    INITIAL_NOISE,
    NO_EPOCH,
    Generators,
    Trajectory,
    recorded_steps,
    sample_noise,
    sample_trajectory,
    seeded,
)
from ddpo_lessons.training.memory import in_halves, sized
from ddpo_lessons.training.processes import Share, progress_bar

# A network rounds differently in a batch of another size, and a log-prob divides that by the step's noise:
# with less noise than this, rounding alone can take a ratio out of other trainers' clip range of 1e-4.
MIN_STD = 2e-4


def count_actions(family: Family, start: FromNoise, algorithm: Algorithm, config: DDPOConfig) -> int:
    """Return the number of recorded steps of a rollout; raise a ValueError if it cannot be replayed."""
    start.check_resolution(family)
    try:
        schedule = algorithm.sampling_schedule(start.schedule(family, config), config, epoch=0)
        if not hasattr(schedule, "stds"):
            raise TypeError(
                "sampling_schedule() of the algorithm must return a schedule, such as the one that it is "
                f"given, not {schedule!r:.60}"
            )
        first, end = recorded_steps(schedule)
    except ValueError as error:
        if str(error).startswith(("noise_strength=", "algorithm=", "sample_num_steps=")):
            raise
        fields = f"sample_num_steps={config.sample_num_steps}, sample_eta={config.sample_eta}"
        raise ValueError(f"{fields}: {error}") from error
    noisy = schedule.stds[schedule.stds > 0]
    if (noisy < MIN_STD).any():
        raise ValueError(
            f"sample_eta={config.sample_eta} leaves steps with noise of {noisy.min():.1e}, too little for "
            f"float32 to replay them (at least {MIN_STD:.0e}): raise it"
        )
    return end - first


@dataclass
class Sampler:
    """Sample and score a process's part of an epoch; `on_pass` is called after each forward pass."""

    config: DDPOConfig
    family: Family
    start: FromNoise
    algorithm: Algorithm
    reward_function: RewardFunction
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    share: Share
    learner: Learner
    on_pass: Callable[[], None]

    def schedule(self, epoch: int, contexts: Sequence[Context] = ()) -> Schedule:
        """Return the denoising schedule of an epoch for its contexts."""
        steps = self.start.schedule(self.family, self.config, contexts)
        return self.algorithm.sampling_schedule(steps, self.config, epoch)

    def sample(self, epoch: int, contexts: dict[int, Context]) -> tuple[list[Batch], Trajectory, float]:
        """Sample and score this process's part; return batches, trajectory and seconds of scoring."""
        batches, pieces, seconds = [], [], 0.0
        rows = self.share.rows  # (batches, B)
        known = list(contexts.values())
        shape = self.family.latents_shape(self.start.size(known))
        size, _ = self.config.micro_batch_sizes(math.prod(shape))
        schedule = self.schedule(epoch, known)  # a hook may have set another one
        with (
            self.algorithm.sampling_policy(self.learner),
            progress_bar(self.share.accelerator, "sampling", len(rows), leave=False) as bar,
        ):
            for group in rows.chunk(math.ceil(rows.numel() / size)):  # (G, B)
                with sized(self.config, "sample_micro_batch_size", group.numel):
                    beginning = self.beginning(epoch, group.flatten().tolist(), contexts, schedule)
                    with torch.no_grad(), self.autocast():
                        trajectory = sample_trajectory(self.family, **beginning)
                        images = self.family.decode(trajectory.final_latents)  # (G B, 3, H, W)
                if images.is_cuda:
                    torch.cuda.synchronize(images.device)  # decoding is sampling, not reward
                before = time.perf_counter()
                for batch, own_images in zip(group.tolist(), images.split(group.shape[1]), strict=True):
                    batches.append(score(self.reward_function, own_images, [contexts[row] for row in batch]))
                seconds += time.perf_counter() - before
                pieces.append(trajectory)
                bar.update(len(group))
                self.on_pass()
        return batches, Trajectory.cat(pieces), seconds

    def beginning(
        self, epoch: int, rows: Sequence[int], contexts: dict[int, Context], schedule: Schedule
    ) -> dict[str, Any]:
        """Return the arguments of `sample_trajectory` for rollouts of an epoch, by their numbers in it."""
        config, shares = self.config, self.algorithm.shares_starts
        groups = [row // config.sample_group_size for row in rows] if shares else rows
        return self._beginning(
            [contexts[row] for row in rows],
            schedule,
            [self._generator(epoch, INITIAL_NOISE, group) for group in groups],
            [self._generator(epoch, ACTIONS, row) for row in rows],
            config.shared_starts if shares else 1,
            self.algorithm.branches(config),
        )

    def _generator(self, *numbers: int) -> torch.Generator:
        """Return a generator per sample, so that batch size and processes have no effect."""
        return seeded(self.config.seed, *numbers)

    def draw(self, contexts: Sequence[Context], numbers: Sequence[int] | None = None) -> torch.Tensor:
        """Generate an image of each context (B, 3, H, W) from numbered noise that no epoch uses.

        If memory runs out in a run of one process, the images are generated in halves. Several processes take
        equal passes, and raise an OutOfMemory.
        """
        known, schedule = range(len(contexts)) if numbers is None else numbers, self.schedule(0, contexts)

        def render(rows: Sequence[int]) -> torch.Tensor:
            generators = self.generators([known[row] for row in rows])
            chosen = [contexts[row] for row in rows]
            return self.render(self._beginning(chosen, schedule, generators, generators))

        rows = range(len(contexts))
        if self.share.accelerator.num_processes == 1:
            return in_halves(render, rows)
        with sized(self.config, "sample_micro_batch_size", lambda: len(rows)):
            return render(rows)

    def render(self, beginning: dict[str, Any]) -> torch.Tensor:
        """Run rollouts with arguments of `sample_trajectory`; return only their images (B, 3, H, W)."""
        with torch.no_grad(), self.autocast():
            return self.family.decode(sample_trajectory(self.family, **beginning).final_latents)

    def generators(self, numbers: Iterable[int]) -> list[torch.Generator]:
        """Return the generators of `draw`, each for the noise of an image and then of its steps."""
        return [self._generator(NO_EPOCH, number) for number in numbers]

    def _beginning(
        self,
        contexts: Sequence[Context],
        schedule: Schedule,
        of_noise: Sequence[torch.Generator],
        of_actions: Generators,
        group_size: int = 1,
        branches: int | None = None,
    ) -> dict[str, Any]:
        """Sample the noise of B rollouts, make their first states, and encode their prompts."""
        config, family, size = self.config, self.family, self.start.size(contexts)
        shape = family.latents_shape(size)
        noise = sample_noise(shape, of_noise).to(self.share.accelerator.device)  # (B, C, h, w)
        with torch.no_grad(), self.autocast():
            return {
                "latents": self.start.first_states(family, contexts, schedule, noise, group_size),
                "schedule": schedule,
                "conditioning": family.condition(
                    self.start.prompts(contexts, config),
                    config.negative_prompts,
                    config.sample_guidance_scale,
                    size,
                    self.start.images(contexts),
                ),
                "guidance_scale": config.sample_guidance_scale,
                "generator": of_actions,
                "reduction": config.log_prob_reduction,
                "group_size": group_size,
                "branches": branches,
            }


def scorer(
    reward_function: RewardFunction, contexts: Sequence[Context]
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a function that scores other images (N, 3, H, W) of contexts with these numbers (N,)."""

    def rescore(images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        chosen = [contexts[row] for row in rows.tolist()]
        prompts, metadata = tuple(c.prompt for c in chosen), tuple(c.metadata for c in chosen)
        if images.requires_grad:
            images.register_hook(_refuse_nan)
        with torch.autocast(images.device.type, enabled=False):  # as it computes in sampling
            return to_rewards(split_info(reward_function(images, prompts, metadata))[0])

    return rescore


def _refuse_nan(gradient: torch.Tensor) -> None:
    if gradient.isnan().any():
        raise ValueError(
            "the gradient of the reward with respect to the images is NaN: look for a root, a logarithm, a "
            "norm or a division at 0 in the reward function"
        )
