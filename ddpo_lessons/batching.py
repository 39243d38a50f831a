"""Lessons 01 and 02: shuffle the samples of an epoch and cut them into minibatches.

An epoch samples trajectories, then trains on them for one or more inner epochs. A sample batch is a dict of
tensors whose first dimension is the sample. The second dimension of tensors that depend on time is the
denoising step.
"""

from collections.abc import Iterable

import torch

from ddpo_lessons.plan import EpochPlan as EpochPlan
from ddpo_lessons.plan import check_divides

Samples = dict[str, torch.Tensor]


def shuffle_samples(samples: Samples, generator: torch.Generator) -> Samples:
    """Shuffle the samples (B, ...) in the same random order for every key; return new tensors.

    The generator is a CPU generator, so that the order is the same on every device. Raises a ValueError if
    there is no tensor, or if the tensors have different numbers of samples.
    """
    order = torch.randperm(_num_samples(samples), generator=generator)  # (B,)
    return {key: tensor[order.to(tensor.device)] for key, tensor in samples.items()}


def shuffle_time(samples: Samples, keys: Iterable[str], generator: torch.Generator) -> Samples:
    """Shuffle the timesteps of each sample in its own random order, the same for all ``keys``.

    A minibatch then mixes noise levels. Latents, timestep and log-prob of a step must stay together, so
    ``keys`` must name every entry that depends on time, with tensors (B, T, ...). All other entries are
    returned unchanged. The generator is a CPU generator. Raises a ValueError if ``keys`` is empty, if a key
    is missing, or if the (B, T) of two keys differ.
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
    """Cut samples (B, ...) into B / batch_size consecutive minibatches, which are views.

    Raises a ValueError if there is no tensor, if the tensors have different numbers of samples, or if
    batch_size does not divide B.
    """
    num_samples = _num_samples(samples)
    check_divides("batch_size", batch_size, num_samples, "samples")
    return [
        {key: tensor[start : start + batch_size] for key, tensor in samples.items()}
        for start in range(0, num_samples, batch_size)
    ]


def _num_samples(samples: Samples) -> int:
    sizes = {key: len(tensor) for key, tensor in samples.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"samples must be tensors with the same first dimension, got {sizes}")
    return next(iter(sizes.values()))
