"""Lessons 01 and 02: how many of everything an epoch holds, and how samples are shuffled and cut.

An epoch samples trajectories, then trains on them for one or more inner epochs. A sample batch is a
dict of tensors whose first dimension is the sample and, for what depends on time, whose second is
the denoising step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

Samples = dict[str, torch.Tensor]


@dataclass(frozen=True)
class EpochPlan:
    """The arithmetic of one epoch. Batch sizes are per process, totals are over all processes.

    An optimizer step accumulates the gradients of ``gradient_accumulation_steps`` minibatches over
    all their timesteps, so it sees ``train_batch_size * gradient_accumulation_steps`` samples per
    process. The minibatches of an inner epoch divide into whole optimizer steps.

    Attributes:
        sample_batch_size: trajectories that one process samples at once.
        num_batches_per_epoch: sample batches per process and epoch.
        train_batch_size: samples of one minibatch, per process.
        gradient_accumulation_steps: minibatches per optimizer step.
        num_inner_epochs: passes over the samples of an epoch.
        num_timesteps: denoising steps per sample that are trained on.
        num_processes: processes (devices) that work side by side.

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
        _check_divides(
            "train_batch_size",
            self.train_batch_size,
            self.samples_per_process,
            "samples of a process (sample_batch_size * num_batches_per_epoch)",
        )
        _check_divides(
            "gradient_accumulation_steps",
            self.gradient_accumulation_steps,
            self.minibatches_per_inner_epoch,
            "minibatches of an inner epoch",
        )

    @property
    def samples_per_process(self) -> int:
        """Trajectories that one process samples per epoch, and then trains on."""
        return self.sample_batch_size * self.num_batches_per_epoch

    @property
    def total_samples(self) -> int:
        """Trajectories per epoch over all processes."""
        return self.samples_per_process * self.num_processes

    @property
    def minibatches_per_inner_epoch(self) -> int:
        """Minibatches that one process goes through in an inner epoch."""
        return self.samples_per_process // self.train_batch_size

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per epoch; processes step together, so they do not multiply it."""
        steps = self.minibatches_per_inner_epoch // self.gradient_accumulation_steps
        return self.num_inner_epochs * steps

    @property
    def samples_per_optimizer_step(self) -> int:
        """Trajectories whose gradients one optimizer step averages, over all processes."""
        return self.train_batch_size * self.gradient_accumulation_steps * self.num_processes

    @property
    def forward_passes_per_sample(self) -> int:
        """How often an epoch trains on one sample: once per timestep and inner epoch."""
        return self.num_timesteps * self.num_inner_epochs

    @property
    def total_forward_passes(self) -> int:
        """Training passes per epoch, counted one (sample, timestep) pair at a time."""
        return self.total_samples * self.forward_passes_per_sample


def shuffle_samples(samples: Samples, generator: torch.Generator) -> Samples:
    """Put the samples in a new random order, the same for every key.

    Args:
        samples: tensors (B, ...).
        generator: a CPU generator, so that every device sees the same order.

    Returns:
        A new dict of new tensors; the given ones stay as they are.

    Raises:
        ValueError: there is no tensor, or their numbers of samples differ.
    """
    order = torch.randperm(_num_samples(samples), generator=generator)  # (B,)
    return {key: tensor[order.to(tensor.device)] for key, tensor in samples.items()}


def shuffle_time(samples: Samples, keys: Iterable[str], generator: torch.Generator) -> Samples:
    """Put each sample's timesteps in a random order of its own, the same for all ``keys``.

    A minibatch then mixes noise levels. Latents, timestep and log-prob of one step must stay
    together, so every key that depends on time has to be named.

    Args:
        samples: tensors (B, ...); those of ``keys`` are (B, T, ...).
        keys: the entries to permute along T.
        generator: a CPU generator, so that every device sees the same order.

    Returns:
        A new dict; entries not in ``keys`` are the given tensors.

    Raises:
        ValueError: a key is missing, none is named, or the (B, T) of two keys differ.
    """
    keys = list(keys)
    if not keys or not samples.keys() >= set(keys):
        raise ValueError(f"keys={keys} must name entries of samples, which are {sorted(samples)}")
    shapes = {key: tuple(samples[key].shape[:2]) for key in keys}
    if len(set(shapes.values())) > 1 or len(shapes[keys[0]]) < 2:
        raise ValueError(
            f"entries to shuffle in time must share their first dimensions (B, T), got {shapes}; "
            "split latents (B, T + 1, ...) into the states before and after each step"
        )
    batch, time = shapes[keys[0]]
    permutations = [torch.randperm(time, generator=generator) for _ in range(batch)]
    orders = torch.stack(permutations)  # (B, T)
    rows = torch.arange(batch)[:, None]  # (B, 1)
    shuffled = {key: samples[key][rows.to(d), orders.to(d)] for key in keys if (d := samples[key].device)}
    return samples | shuffled


def minibatches(samples: Samples, batch_size: int) -> list[Samples]:
    """Cut the samples into consecutive minibatches.

    Args:
        samples: tensors (B, ...).
        batch_size: samples per minibatch; must divide B.

    Returns:
        B / batch_size dicts of tensors (batch_size, ...), views of the given ones.

    Raises:
        ValueError: there is no tensor, numbers of samples differ, or batch_size does not divide B.
    """
    num_samples = _num_samples(samples)
    _check_divides("batch_size", batch_size, num_samples, "samples")
    return [
        {key: tensor[start : start + batch_size] for key, tensor in samples.items()}
        for start in range(0, num_samples, batch_size)
    ]


def _num_samples(samples: Samples) -> int:
    sizes = {key: len(tensor) for key, tensor in samples.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"samples must be tensors with the same first dimension, got {sizes}")
    return next(iter(sizes.values()))


def _check_divides(name: str, value: int, total: int, things: str) -> None:
    if value < 1 or total % value:
        small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
        divisors = sorted({*small, *(total // n for n in small)})
        distance = min(abs(n - value) for n in divisors)
        nearest = " or ".join(str(n) for n in divisors if abs(n - value) == distance)
        raise ValueError(
            f"{name}={value} does not divide the {total} {things}; the nearest that does is {nearest}"
        )
