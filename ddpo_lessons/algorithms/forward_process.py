"""Lessons 06 and 10: training on final samples, noised anew, as pre-training does on data.

The forward process x_t of a sample x₀ and fresh noise ε needs no record of how the sample was made: any
sampler will do, and nothing is said about log-probabilities. RWR, AWM, DiffusionNFT and Diffusion-DPO differ
in what they make of the errors at such examples.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ddpo_lessons.algorithms.base import Algorithm, Learner, Pairs, Samples
from ddpo_lessons.algorithms.ddpo import SHUFFLE, shuffled_pairs
from ddpo_lessons.families import Family
from ddpo_lessons.rollout import sample_seed


@dataclass(frozen=True)
class Example:
    """Some samples, each noised to a time of its own.

    Attributes:
        family: whose forward process it is.
        clean: (N, C, h, w) x₀, the final latents.
        noise: (N, C, h, w) ε.
        timesteps: (N,) t.
        conditioning: (N, ...) each, without what guidance leads away from.
    """

    family: Family
    clean: torch.Tensor
    noise: torch.Tensor
    timesteps: torch.Tensor
    conditioning: dict[str, torch.Tensor]

    @property
    def noisy(self) -> torch.Tensor:
        """x_t (N, C, h, w)."""
        return self.family.add_noise(self.clean, self.noise, self.timesteps)

    @property
    def times(self) -> torch.Tensor:
        """The timesteps as shares of the schedule (N,), in [0, 1)."""
        return self.timesteps / self.family.num_train_timesteps

    def predict(self, denoiser: Callable[..., Any]) -> torch.Tensor:
        """Return what a denoiser says of x_t (N, C, h, w), without guidance."""
        return self.family.predict(
            denoiser, self.noisy, self.timesteps, self.conditioning, guidance_scale=1.0
        )

    def error(self, denoiser: Callable[..., Any]) -> torch.Tensor:
        """Return a denoiser's `error_of` each example (N,)."""
        return self.error_of(self.predict(denoiser))

    def error_of(self, output: torch.Tensor) -> torch.Tensor:
        """Return mean((output - target)²) of each example (N,): the loss of pre-training."""
        target = self.family.denoising_target(self.clean, self.noise, self.timesteps)
        return (output - target).square().flatten(1).mean(1)


class ForwardProcess(Algorithm):
    """What such algorithms share: an epoch's examples and steps.

    Every (sample, timestep) pair of DDPO becomes one example here, so that all methods train on equally many;
    its timestep is a random one of those up to the first that sampling visits.
    """

    def update(self, samples: Samples, learner: Learner) -> None:
        """Take as many optimizer steps as DDPO would, on as many examples."""
        config, count = self.config, samples.first_step
        samples_per_step = config.train_batch_size * config.train_gradient_accumulation_steps
        num_timesteps = self.count_timesteps(samples)
        for inner_epoch in range(config.train_num_inner_epochs):
            seed = sample_seed(config.seed, samples.epoch, SHUFFLE, inner_epoch, samples.process)
            generator = torch.Generator().manual_seed(seed)
            for pairs in self.pairs(samples, samples_per_step, generator):
                examples = {**pairs, **self.denoising_examples(samples, pairs, count, num_timesteps)}
                learner.step(partial(self.loss, samples, learner), learner.split(examples))
                count += 1

    def pairs(self, samples: Samples, samples_per_step: int, generator: torch.Generator) -> list[Pairs]:
        """Return the pairs of each optimizer step, as DDPO has them."""
        shape = samples.trajectory.log_probs.shape
        return shuffled_pairs(shape, self.num_train_timesteps, samples_per_step, generator)

    def count_timesteps(self, samples: Samples) -> int:
        """Count the timesteps up to the first that sampling visits: img2img begins with little noise."""
        first = samples.trajectory.schedule.timesteps[0]
        return min(self.family.num_train_timesteps, math.ceil(first) + 1)

    def denoising_examples(self, samples: Samples, pairs: Pairs, step: int, num_timesteps: int) -> Pairs:
        """Draw timestep (N,) and noise (N, C, h, w) of each pair from its own seed, whatever the grouping."""
        numbers = samples.numbers[pairs["rows"]].tolist()  # by number in the epoch: processes change nothing
        seeds = [
            sample_seed(self.config.seed, 3, step, 0, number, column)
            for number, column in zip(numbers, pairs["columns"].tolist(), strict=True)
        ]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        shape = samples.trajectory.final_latents.shape[1:]
        timesteps = torch.cat([torch.randint(num_timesteps, (1,), generator=g) for g in generators])
        return {
            "timesteps": timesteps,
            "noise": torch.stack([torch.randn(shape, generator=g) for g in generators]),
        }

    def example(self, samples: Samples, pairs: Pairs, rows: str = "rows") -> Example:
        """Put the examples of some pairs together.

        Args:
            samples: of the epoch.
            pairs: with what `denoising_examples` drew.
            rows: which entry of the pairs holds the numbers of the samples.
        """
        trajectory, numbers = samples.trajectory, pairs[rows]
        told = {n: v[numbers] for n, v in trajectory.conditioning.items() if not n.startswith("negative_")}
        return Example(
            self.family, trajectory.final_latents[numbers], pairs["noise"], pairs["timesteps"], told
        )

    @abc.abstractmethod
    def loss(
        self, samples: Samples, learner: Learner, denoiser: Callable[..., Any], pairs: Pairs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of some examples, a mean over them, and statistics."""
