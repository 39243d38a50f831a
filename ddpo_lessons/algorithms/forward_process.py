"""Lessons 06 and 10: train on re-noised final samples, as pre-training does on data.

The forward process x_t of a sample x₀ and new noise ε needs no record of how the sample was made, so any
sampler can be used, and no log-probs are needed. RWR, AWM, DiffusionNFT and Diffusion-DPO differ in the loss
that they compute from the errors at such examples.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ddpo_lessons.algorithms.algorithm import Algorithm, Learner, Loss, LossAndStats, Pairs, Samples
from ddpo_lessons.algorithms.ddpo import shuffled_pairs
from ddpo_lessons.ddim import DDIMSchedule
from ddpo_lessons.flow import FlowSchedule
from ddpo_lessons.models import Family, Schedule
from ddpo_lessons.rollout import FORWARD_PROCESS, Trajectory, recorded_steps, sample_noise, seeded


@dataclass(frozen=True)
class Example:
    """A batch of samples, each noised to its own timestep."""

    family: Family  #: the family that defines the forward process
    clean: torch.Tensor  #: (N, C, h, w) x₀, the final latents
    noise: torch.Tensor  #: (N, C, h, w) ε
    timesteps: torch.Tensor  #: (N,) t
    conditioning: dict[str, torch.Tensor]  #: (N, ...) each, without the negative prompt

    @property
    def noisy(self) -> torch.Tensor:
        """The noisy latents x_t (N, C, h, w)."""
        return self.family.add_noise(self.clean, self.noise, self.timesteps)

    @property
    def times(self) -> torch.Tensor:
        """The timesteps as fractions of the schedule (N,), in [0, 1]."""
        return self.timesteps / self.family.num_train_timesteps

    def predict(self, denoiser: Callable[..., Any]) -> torch.Tensor:
        """Return a denoiser's output for x_t (N, C, h, w), without guidance."""
        return self.family.predict(
            denoiser, self.noisy, self.timesteps, self.conditioning, guidance_scale=1.0
        )

    def error(self, denoiser: Callable[..., Any]) -> torch.Tensor:
        """Return `error_of` a denoiser's output (N,)."""
        return self.error_of(self.predict(denoiser))

    def error_of(self, output: torch.Tensor) -> torch.Tensor:
        """Return mean((output - target)²) of each example (N,): the loss of pre-training."""
        target = self.family.denoising_target(self.clean, self.noise, self.timesteps)
        return (output - target).square().flatten(1).mean(1)


def visited_states(trajectory: Trajectory) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the recorded states before a step (B, K, C, h, w), and their timesteps (K,)."""
    first, _ = recorded_steps(trajectory.schedule)
    timesteps = trajectory.schedule.timesteps[first:][: trajectory.latents.shape[1]]
    return trajectory.latents[:, : len(timesteps)], timesteps


class ForwardProcess(Algorithm):
    """Base class of these algorithms, which provides an epoch's examples and steps.

    Every (sample, timestep) pair of DDPO becomes one example here, so that all methods train on the same
    number. The timestep of an example is a random one up to the first that sampling visits. For a flow model
    it may lie anywhere on the schedule of sampling, so that the schedule's shift to high noise also applies
    in training.

    In text-to-image, such examples look like the states of sampling. In img2img they do not: x_t is the
    noised final sample, whereas sampling saw the noised input image. With `visited_states` an example is a
    state x_t that sampling visited, chosen among those from which it took a step, and ε is the noise that
    leads there from x₀ in the forward process. Then x₀ given x_t follows the sampler, with its guidance and
    its noise:

    - equal weights for all samples teach the sampler itself, E[x₀ | x_t], guidance included;
    - advantages teach its covariance with them, E[A (v* - v_old) | x_t] where E[A | x_t] = 0. Let a step lead
      to μ + σz, and the later steps from there to x₀(μ + σz) ≈ x₀(μ) + J σz. Then a sample moves the
      prediction of x₀ along A J σz, which is a policy gradient, A z, passed through the later steps;
    - a state without later noise has only one x₀, so it learns the guidance of good samples.
    """

    def __init__(self, visited_states: bool = False) -> None:
        self.visited_states = visited_states

    def steps(self, samples: Samples, learner: Learner) -> Iterator[tuple[Loss, list[Pairs]]]:
        """Yield as many optimizer steps as DDPO, on as many examples as its pairs."""
        config, count = self.config, samples.first_step
        samples_per_step = config.train_batch_size * config.train_gradient_accumulation_steps
        for generator in self.shuffles(samples):
            for pairs in self.pairs(samples, samples_per_step, generator):
                examples = {**pairs, **self.denoising_examples(samples, pairs, count)}
                yield partial(self.loss, samples, learner), learner.split(examples)
                count += 1

    def pairs(self, samples: Samples, samples_per_step: int, generator: torch.Generator) -> list[Pairs]:
        """Return the pairs of each optimizer step, as in DDPO."""
        shape = samples.trajectory.log_probs.shape
        return shuffled_pairs(shape, self.num_train_timesteps, samples_per_step, generator)

    def draw_timesteps(self, schedule: Schedule, generators: Sequence[torch.Generator]) -> torch.Tensor:
        """Sample timesteps (N,) up to the first that sampling visits, because img2img has little noise."""
        if not isinstance(schedule, FlowSchedule):
            assert isinstance(schedule, DDIMSchedule)  # the only other kind
            count = schedule.first_timestep + 1
            return torch.cat([torch.randint(count, (1,), generator=g) for g in generators])
        evenly = torch.cat([torch.rand(1, generator=g, dtype=torch.float32) for g in generators])
        return schedule.timesteps_at(1 - evenly)  # above 0: not all clean

    def denoising_examples(self, samples: Samples, pairs: Pairs, step: int) -> Pairs:
        """Sample a timestep (N,) and noise (N, C, h, w) with one seed per pair, for any grouping."""
        numbers = samples.numbers[pairs["rows"]].tolist()  # numbers in the epoch, the same for any processes
        generators = [
            seeded(self.config.seed, FORWARD_PROCESS, step, 0, number, column)
            for number, column in zip(numbers, pairs["columns"].tolist(), strict=True)
        ]
        if self.visited_states:
            return self.visited_examples(samples.trajectory, pairs["rows"], generators)
        shape = samples.trajectory.final_latents.shape[1:]
        return {
            "timesteps": self.draw_timesteps(samples.trajectory.schedule, generators),
            "noise": sample_noise(shape, generators),
        }

    def visited_examples(
        self, trajectory: Trajectory, rows: torch.Tensor, generators: Sequence[torch.Generator]
    ) -> Pairs:
        """Choose one state before a step of each sample at random; return its timestep and noise."""
        states, timesteps = visited_states(trajectory)  # (B, K, C, h, w), (K,)
        drawn = torch.cat([torch.randint(len(timesteps), (1,), generator=g) for g in generators])
        noisy, clean, times = states[rows, drawn], trajectory.final_latents[rows], timesteps[drawn]
        nothing, one = torch.zeros_like(clean), torch.ones_like(clean)
        kept, scale = (self.family.add_noise(*parts, times) for parts in ((clean, nothing), (nothing, one)))
        return {"timesteps": times, "noise": (noisy - kept) / scale}

    def example(self, samples: Samples, pairs: Pairs, rows: str = "rows") -> Example:
        """Return the examples of pairs; the entry `rows` of the pairs has the numbers of the samples."""
        trajectory, numbers = samples.trajectory, pairs[rows]
        conditioning = {
            n: v[numbers] for n, v in trajectory.conditioning.items() if not n.startswith("negative_")
        }
        return Example(
            self.family, trajectory.final_latents[numbers], pairs["noise"], pairs["timesteps"], conditioning
        )

    @abc.abstractmethod
    def loss(self, samples: Samples, learner: Learner, denoiser: Any, pairs: Pairs) -> LossAndStats:
        """Return the mean loss of a group of examples, and statistics."""
