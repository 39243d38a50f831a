"""What to do about a forward pass that does not fit on the device: make smaller ones."""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from ddpo_lessons.config import DDPOConfig

Field = Literal["sample_micro_batch_size", "train_micro_batch_size"]


class OutOfMemory(torch.OutOfMemoryError):
    """A forward or backward pass of an epoch ran out of memory.

    `smaller` is the value of the config's `field` for passes of half the `size`, or 0 if none are smaller.
    """

    def __init__(self, config: DDPOConfig, field: Field, size: int, error: torch.OutOfMemoryError) -> None:
        is_sampling = field == "sample_micro_batch_size"
        unit = config.sample_batch_size if is_sampling else 1  # sampling passes are whole batches
        self.field, self.size, self.smaller = field, size, size // unit // 2 * unit
        self.place = f"out of memory in {'sampling' if is_sampling else 'training'}"
        remedy = f"set {field}={self.smaller} in every process"
        if not self.smaller:
            remedy = f"passes of {size} are the smallest; use {_other_remedy(config, is_sampling)}"
        super().__init__(f"{self.place}: {remedy} ({error})")


def _other_remedy(config: DDPOConfig, is_sampling: bool) -> str:
    half, is_odd = divmod(config.sample_batch_size, 2)
    if is_sampling and half and not is_odd:
        batches = 2 * config.sample_num_batches_per_epoch
        return f"sample_batch_size={half} with sample_num_batches_per_epoch={batches}"
    checkpointing = not is_sampling and not config.train_gradient_checkpointing
    return (
        f"{'train_gradient_checkpointing=True, ' * checkpointing}mixed_precision='bf16' or a lower resolution"
    )


@contextlib.contextmanager
def sized(config: DDPOConfig, field: Field, size: Callable[[], int]) -> Iterator[None]:
    """Turn the OutOfMemoryError of a `with` block, whose passes have that size, into an `OutOfMemory`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(config, field, size(), error) from error


def halve(config: DDPOConfig, error: OutOfMemory) -> str:
    """Set the smaller size and free what the failed pass holds; return a line that says so."""
    setattr(config, error.field, error.smaller)
    for each in (error, error.__cause__):
        traceback.clear_frames(each.__traceback__ if each else None)  # their variables hold activations
    torch.cuda.empty_cache()
    return (
        f"{error.place}: {error.field} {error.size} -> {error.smaller}, and the epoch begins again; "
        f"set {error.field}={error.smaller} so that the next run starts there"
    )
