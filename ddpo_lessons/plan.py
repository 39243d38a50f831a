"""Lesson 01: count the samples, minibatches and optimizer steps of an epoch."""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class EpochPlan:
    """The plan of one epoch. Batch sizes are per process, totals are over all processes.

    An optimizer step accumulates the gradients of ``gradient_accumulation_steps`` minibatches over
    all their timesteps, so it sees ``train_batch_size * gradient_accumulation_steps`` samples per
    process. The minibatches of an inner epoch divide into whole optimizer steps.

    Attributes:
        sample_batch_size: number of trajectories that a process samples at once.
        num_batches_per_epoch: number of sample batches per process and epoch.
        train_batch_size: number of samples per minibatch, per process.
        gradient_accumulation_steps: number of minibatches per optimizer step.
        num_inner_epochs: number of times that the samples of an epoch are trained on.
        num_timesteps: number of denoising steps per sample that are trained on.
        num_processes: number of processes (devices) that train together.

    Raises:
        ValueError: a number is below 1 or does not divide; the message names the field and the
            nearest number that works.
    """

    sample_batch_size: int
    num_batches_per_epoch: int
    train_batch_size: int
    gradient_accumulation_steps: int
    num_inner_epochs: int
    num_timesteps: int
    num_processes: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name}={value!r} must be a whole number, 1 or more")
        check_divides(
            "train_batch_size",
            self.train_batch_size,
            self.samples_per_process,
            "samples of a process (sample_batch_size * num_batches_per_epoch)",
        )
        check_divides(
            "gradient_accumulation_steps",
            self.gradient_accumulation_steps,
            self.minibatches_per_inner_epoch,
            "minibatches of an inner epoch",
        )

    @property
    def samples_per_process(self) -> int:
        """Number of trajectories that a process samples and trains on per epoch."""
        return self.sample_batch_size * self.num_batches_per_epoch

    @property
    def total_samples(self) -> int:
        """Number of trajectories per epoch, over all processes."""
        return self.samples_per_process * self.num_processes

    @property
    def minibatches_per_inner_epoch(self) -> int:
        """Number of minibatches of a process in an inner epoch."""
        return self.samples_per_process // self.train_batch_size

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps per epoch; all processes take the same steps together."""
        steps = self.minibatches_per_inner_epoch // self.gradient_accumulation_steps
        return self.num_inner_epochs * steps

    @property
    def samples_per_optimizer_step(self) -> int:
        """Number of trajectories whose gradients an optimizer step averages, over all processes."""
        return self.train_batch_size * self.gradient_accumulation_steps * self.num_processes

    @property
    def pairs_per_sample(self) -> int:
        """Number of times that an epoch trains on a sample: once per timestep and inner epoch."""
        return self.num_timesteps * self.num_inner_epochs

    @property
    def total_pairs(self) -> int:
        """Number of (sample, timestep) pairs of an epoch, over all processes and inner epochs."""
        return self.total_samples * self.pairs_per_sample


def summary(plan: EpochPlan, num_epochs: int) -> str:
    """Return two lines with the numbers to check before a run: samples and optimizer steps."""
    of_each, inner = "", ""
    if plan.num_processes > 1:
        of_each = f" ({plan.samples_per_process} in each of {plan.num_processes} processes)"
    if plan.num_inner_epochs > 1:
        inner = f" in {plan.num_inner_epochs} inner epochs"
    return (
        f"samples: {plan.total_samples} per epoch{of_each}, {plan.samples_per_optimizer_step} per optimizer "
        f"step\noptimizer steps: {plan.optimizer_steps} per epoch{inner}, "
        f"{plan.optimizer_steps * num_epochs} in all"
    )


def counts(plan: EpochPlan, forward_passes: int, rewards: int = 1) -> dict[str, int]:
    """Return the counts of an epoch over all processes, by name.

    `forward_passes` of the network and `rewards` are those of one sample. Rollouts that share a state need
    fewer passes, and a model whose last step has no noise has fewer pairs.
    """
    of_each, inner = "", ""
    if plan.num_processes > 1:
        of_each = f", {plan.samples_per_process} in each of {plan.num_processes} processes"
    if plan.num_inner_epochs > 1:
        inner = f", in {plan.num_inner_epochs} inner epochs"
    return {
        f"samples{of_each}": plan.total_samples,
        "network forward passes in sampling, at most": plan.total_samples * forward_passes,
        "reward evaluations": plan.total_samples * rewards,
        "(sample, timestep) pairs to train on, at most": plan.total_pairs,
        f"optimizer steps{inner}, each on {plan.samples_per_optimizer_step} samples": plan.optimizer_steps,
    }


def check_divides(name: str, value: int, total: int, things: str) -> None:
    """Raise a ValueError, with the nearest divisor, if a value does not divide a total of things."""
    if value < 1 or total % value:
        small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
        divisors = sorted({*small, *(total // n for n in small)})
        distance = min(abs(n - value) for n in divisors)
        nearest = " or ".join(str(n) for n in divisors if abs(n - value) == distance)
        raise ValueError(
            f"{name}={value} does not divide the {total} {things}; the nearest that does is {nearest}"
        )
