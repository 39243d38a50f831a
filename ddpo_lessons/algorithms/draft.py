"""Lesson 11: DRaFT-K and AlignProp, which use the reward's gradient through the last steps of sampling.

With a differentiable reward no weights are needed: the loss is -r of images that are generated again from
recorded states, with a gradient through the last K steps,

    x_T → … → x_K (recorded, a constant) → K steps, decoder, reward → -mean r

DRaFT-K fixes K (Clark et al. 2023, arXiv 2309.17400, section 3), and AlignProp samples it (Prabhudesai et al.
2023, arXiv 2310.03739, section 4.2). Memory and time grow with K. A small K changes only what the last steps
can change: colors more than shapes. `train_kl_coefficient` χ adds χ mean((output - output before)²), as in
DRaFT+.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from ddpo_lessons.advantages import normalize
from ddpo_lessons.algorithms.algorithm import Algorithm, Learner, Loss, LossAndStats, Pairs, Samples
from ddpo_lessons.batching import minibatches, shuffle_samples
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.models import Family, Schedule
from ddpo_lessons.rollout import NEW_NOISE, STEPS_WITH_GRADIENT, Trajectory, sample_noise, seeded


def differentiable_rewards(samples: Samples, images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rewards (N,) with a gradient; raise a ValueError if they have none."""
    rewards = samples.score(images, rows)
    if not rewards.requires_grad:
        raise ValueError(
            "the reward function returns rewards without a gradient, so nothing can be learned through them: "
            "compute them with torch from the images, without no_grad, or use another algorithm"
        )
    return rewards


def replay_last_steps(
    family: Family, denoiser: Any, trajectory: Trajectory, rows: torch.Tensor, steps: int, noise: Any = None
) -> tuple[torch.Tensor, list[Any]]:
    """Repeat the last K steps of samples `rows` (N,) with a gradient.

    `noise` is (N, K, C, h, w), or None if these steps have no noise. Returns the final latents (N, C, h, w),
    and for every step the network's inputs, which are latents and timesteps (N,), and its output.
    """
    schedule, total = trajectory.schedule, len(trajectory.schedule.stds)
    conditioning = {name: value[rows] for name, value in trajectory.conditioning.items()}
    latents, asked = trajectory.latents[rows, total - steps], []  # (N, C, h, w)
    for number in range(total - steps, total):
        timesteps = schedule.timesteps[number].expand(len(rows))  # (N,)
        output = family.predict(denoiser, latents, timesteps, conditioning, trajectory.guidance_scale)
        asked.append((latents, timesteps, output))
        step = schedule.step(output, timesteps, latents, noise=torch.zeros_like(latents))
        latents = step.mean  # the outcome of a step is detached
        if schedule.stds[number] > 0:
            latents = latents + step.std[:, None, None, None] * noise[:, number - total]
    return latents, asked


class DRaFT(Algorithm):
    """Train by gradient ascent on the reward through the last K steps. Flow models use their ODE.

    `last_steps` is K, 1 or more, otherwise a ValueError is raised. `draws_steps` samples K between 1 and
    `last_steps` for every optimizer step, as AlignProp does.
    """

    name = "draft"
    unused: ClassVar[tuple[str, ...]] = (
        "per_prompt_stat_tracking", "log_prob_reduction", "train_clip_range", "train_adv_clip_max",
        "train_timestep_fraction",
    )  # fmt: skip
    shares_starts = False
    follows_ode = True

    def __init__(self, last_steps: int = 1, draws_steps: bool = False) -> None:
        if not isinstance(last_steps, int) or last_steps < 1:
            raise ValueError(f"last_steps={last_steps} must be a whole number, at least 1")
        self.last_steps, self.draws_steps = last_steps, draws_steps

    def sampling_schedule(self, schedule: Schedule, config: DDPOConfig, epoch: int) -> Schedule:
        """Return the schedule, which must have at least K steps."""
        if self.last_steps > len(schedule.stds):
            raise ValueError(f"last_steps={self.last_steps} of {len(schedule.stds)} steps: lower it")
        return super().sampling_schedule(schedule, config, epoch)

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any]) -> torch.Tensor:
        """Return (reward - mean) / std (N,), which is only used to see whether rewards differ."""
        return normalize(rewards)

    def steps(self, samples: Samples, learner: Learner) -> Iterator[tuple[Loss, list[Pairs]]]:
        """Yield the optimizer steps of an epoch, each on `samples_per_step` images generated again."""
        config, count = self.config, samples.first_step
        samples_per_step = config.train_batch_size * config.train_gradient_accumulation_steps
        for generator in self.shuffles(samples):
            rows = {"rows": torch.arange(len(samples.numbers))}
            for pairs in minibatches(shuffle_samples(rows, generator), samples_per_step):
                steps = self.steps_with_gradient(count)
                drawn = {**pairs, "noise": self.draw_noise(samples, pairs, steps, count)}
                yield partial(self.loss, samples, learner, steps), learner.split(drawn)
                count += 1

    def steps_with_gradient(self, step: int) -> int:
        """Return K for an optimizer step, the same in all processes."""
        if not self.draws_steps:
            return self.last_steps
        generator = seeded(self.config.seed, step, STEPS_WITH_GRADIENT)
        return 1 + int(torch.randint(self.last_steps, (1,), generator=generator))

    def draw_noise(self, samples: Samples, pairs: Pairs, steps: int, step: int) -> torch.Tensor:
        """Sample the noise (N, K, C, h, w) of K steps with one seed per sample, for any grouping."""
        shape = steps, *samples.trajectory.final_latents.shape[1:]
        numbers = samples.numbers[pairs["rows"]].tolist()  # numbers in the epoch, the same for any processes
        return sample_noise(shape, [seeded(self.config.seed, step, NEW_NOISE, number) for number in numbers])

    def loss(
        self, samples: Samples, learner: Learner, steps: int, denoiser: Any, pairs: Pairs
    ) -> LossAndStats:
        """Generate images again from the states before the last steps; return the negative mean reward."""
        trajectory, rows, family = samples.trajectory, pairs["rows"], self.family
        latents, asked = replay_last_steps(family, denoiser, trajectory, rows, steps, pairs["noise"])
        rewards = differentiable_rewards(samples, family.decode_with_gradient(latents), rows)
        loss, record = -rewards.mean(), {"reward": rewards.detach().mean()}
        if self.config.train_kl_coefficient > 0:
            conditioning = {name: value[rows] for name, value in trajectory.conditioning.items()}
            guidance, moved = trajectory.guidance_scale, []
            for states, timesteps, output in asked:
                with torch.no_grad(), learner.reference() as reference:
                    before = family.predict(reference, states, timesteps, conditioning, guidance)
                moved.append((output - before).square().mean())
            distance = torch.stack(moved).mean()
            loss = loss + self.config.train_kl_coefficient * distance
            record["distance_reference"] = distance.detach()
        return loss, record
