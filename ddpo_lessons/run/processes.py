"""The devices of a run: accelerate's part, and the precision of forward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration

from ddpo_lessons.config import DDPOConfig

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_REFUSED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def make_accelerator(config: DDPOConfig) -> Accelerator:
    """Make the accelerator that the config describes.

    Raises:
        ImportError: if a tracker is asked for that is not installed.
        ValueError: if the launch shards the weights, which checkpoints and adapters here do not know.
    """
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != config.mixed_precision:
        # Of an earlier trainer of this process, as in a notebook; it keeps what it needs of it.
        AcceleratorState._reset_state()
    project = {"project_dir": str(config.run_dir), **config.project_kwargs}
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        log_with=config.log_with,
        project_config=ProjectConfiguration(**project),
        dynamo_backend="no",  # what accelerate would compile is not compared with anything: see torch_compile
        **config.accelerator_kwargs,
    )
    if accelerator.distributed_type in _REFUSED:
        raise ValueError(
            f"the launch shards weights ({accelerator.distributed_type.value}), which this trainer cannot "
            "save: use plain multi-GPU, `accelerate launch --multi_gpu`"
        )
    # The learner weighs groups itself, also where an environment variable asks accelerate to.
    accelerator.gradient_accumulation_steps = 1
    if config.log_with and not accelerator.log_with:  # accelerate leaves out what is not installed
        raise ImportError(
            f"log_with={config.log_with!r} needs a package that is not installed: "
            f"pip install {config.log_with}"
        )
    return accelerator


def make_autocast(
    mixed_precision: str, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what makes the context of a forward pass.

    Not accelerate's own: that follows the state of the process, which a later trainer may change.
    """
    if mixed_precision == "no":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=_LOW[mixed_precision])
