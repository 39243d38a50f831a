"""Find out which forward passes fit on the device, and halve those that do not."""

import contextlib
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from ddpo_lessons.config import DDPOConfig

# GB of Stable Diffusion 1.5 at 512 pixels in half precision, as benchmarks/speed/paper_run.py estimates them
# for the preset `edit`: networks, reward models and samples, and what a guided pair's training pass makes.
HELD, OF_A_PAIR = 5.3, 2.3
# GB of CUDA's kernels and workspaces, and the fraction of free memory that the allocator's fragments leave.
CUDA, SHARE = 1.0, 0.85

Field = Literal["sample_micro_batch_size", "train_micro_batch_size"]


def what_fits() -> dict[str, Any]:
    """Return precision and micro batches for Stable Diffusion 1.5 at 512 pixels on this machine.

    They are fields of `DDPOConfig`: bf16 where the GPU computes in it (Ampere and newer), fp16 on an older
    one, such as the T4, and float32 without CUDA, where a micro batch of 0 leaves the choice to the trainer.
    The sizes follow from the GPU's free memory, so call this before anything is loaded, and close other
    programs that use the GPU. They are estimates: a pass that does not fit is halved, see `halve`::

        config = DDPOConfig(**what_fits(), output_dir="run")
    """
    precision, size = "no", 0
    if torch.cuda.is_available():
        precision = "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"
        torch.cuda.empty_cache()  # memory that earlier cells have used and given back is free
        free = torch.cuda.mem_get_info()[0] / 1e9 * SHARE - CUDA - HELD  # GB
        size = 2 ** int(math.log2(max(1.0, free / OF_A_PAIR)))
    return {
        "mixed_precision": precision,
        "sample_micro_batch_size": size,
        "train_micro_batch_size": size,
    }


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
    """Convert the OutOfMemoryError of a `with` block with passes of this size to `OutOfMemory`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(config, field, size(), error) from error


def halve(config: DDPOConfig, error: OutOfMemory) -> str:
    """Set the smaller size, free the memory of the failed pass, and return a line about it."""
    setattr(config, error.field, error.smaller)
    _free(error)
    return (
        f"{error.place}: {error.field} {error.size} -> {error.smaller}, and the epoch begins again; "
        f"set {error.field}={error.smaller} so that the next run starts there"
    )


def in_halves(function: Callable[[Sequence[int]], torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    """Return a function's result for B rows, (B, ...); if memory runs out, warn and join two halves."""
    try:
        return function(rows)
    except torch.OutOfMemoryError as error:
        if len(rows) == 1:
            raise
        _free(error)
    warnings.warn(
        f"{len(rows)} images do not fit into memory and are generated in halves: lower sample_batch_size, so "
        "that no time is lost on passes that fail",
        stacklevel=2,
    )
    middle = len(rows) // 2
    return torch.cat([in_halves(function, rows[:middle]), in_halves(function, rows[middle:])])


def _free(error: BaseException) -> None:
    """Free the memory of the pass that raised an error: variables of its frames hold activations."""
    for each in (error, error.__cause__):
        traceback.clear_frames(each.__traceback__ if each else None)
    torch.cuda.empty_cache()
