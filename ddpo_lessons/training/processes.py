"""Set up accelerate, precision and progress bars, and divide samples among processes."""

import contextlib
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TextIO

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, gather_object
from diffusers.utils import logging
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from tqdm.auto import tqdm

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.loading import draws_bars

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_REFUSED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
SHARDS = "accelerate launch --use_fsdp --fsdp_version 2"


def make_accelerator(config: DDPOConfig) -> Accelerator:
    """Make the accelerator of the config.

    Raises ImportError if a tracker is asked for that is not installed; ValueError if the launch shards
    weights otherwise than by FSDP2.
    """
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != config.mixed_precision:
        # Of an earlier trainer of this process, as in a notebook; it keeps what it needs of it.
        AcceleratorState._reset_state()
    project = {"project_dir": str(config.run_dir), **config.project_kwargs}
    project_config = ProjectConfiguration(**project)
    try:
        accelerator = Accelerator(
            mixed_precision=config.mixed_precision,
            log_with=config.log_with,
            project_config=project_config,
            # what accelerate would compile is not compared with anything: see torch_compile
            dynamo_backend="no",
            **config.accelerator_kwargs,
        )
    except TypeError as error:
        raise TypeError(
            f"accelerator_kwargs={config.accelerator_kwargs} must be arguments of accelerate's Accelerator: "
            f"{error}"
        ) from error
    if accelerator.distributed_type in _REFUSED and not accelerator.is_fsdp2:
        raise ValueError(
            f"the launch shards weights by {accelerator.distributed_type.value}, which this trainer does not "
            f"know: use `{SHARDS}`, or `accelerate launch --multi_gpu` where the model fits on one card"
        )
    # The learner weighs groups itself, also where an environment variable asks accelerate to.
    accelerator.gradient_accumulation_steps = 1
    if config.log_with and not accelerator.log_with:  # accelerate leaves out what is not installed
        raise ImportError(
            f"log_with={config.log_with!r} needs a package that is not installed: "
            f"pip install {config.log_with}"
        )
    return accelerator


def check_sharding(accelerator: Accelerator, config: DDPOConfig, use_lora: bool) -> None:
    """Raise a ValueError for settings that do not work, or are untested, with sharded weights."""
    if not accelerator.is_fsdp2:
        return
    plugin = accelerator.state.fsdp_plugin
    for is_asked, name, remedy in (
        (not use_lora, "train_use_lora=False", "train an adapter, or on one card"),
        (config.torch_compile, "torch_compile=True", "leave it out"),
        (config.train_use_8bit_adam, "train_use_8bit_adam=True", "leave it out: its state is sharded, too"),
        (config.mixed_precision == "fp16", "mixed_precision='fp16'", "use 'bf16'"),
        (plugin.activation_checkpointing, "fsdp_activation_checkpointing", "train_gradient_checkpointing"),
        (isinstance(plugin.cpu_offload, CPUOffloadPolicy), "fsdp_offload_params", "take more cards"),
    ):
        if is_asked:
            raise ValueError(f"weights are sharded by FSDP2, which {name} does not go with: {remedy}")


def set_up_sharding(accelerator: Accelerator, denoiser: Any) -> None:
    """Let accelerate shard a denoiser by block, without casts, which autocast makes."""
    plugin = accelerator.state.fsdp_plugin
    plugin.mixed_precision_policy = None  # it would round timesteps to bfloat16
    plugin.cpu_ram_efficient_loading = False  # all processes have loaded the model
    policy = plugin.auto_wrap_policy
    if getattr(policy, "func", policy) is not size_based_auto_wrap_policy:
        there = {type(module).__name__ for module in denoiser.modules()}
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
        plugin.transformer_cls_names_to_wrap = [
            name for name in denoiser._no_split_modules or () if name in there
        ]


def make_autocast(
    mixed_precision: str, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a factory of autocast contexts for forward passes.

    Not accelerate's own: that follows the state of the process, which a later trainer may change.
    """
    if mixed_precision == "no":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=_LOW[mixed_precision])


def all_same(accelerator: Accelerator, value: Any) -> bool:
    """Return whether all processes have the same value, as text; every process must call it."""
    if accelerator.num_processes == 1:
        return True
    own = zlib.crc32(repr(value).encode())
    return bool((accelerator.gather(torch.tensor([own], device=accelerator.device)) == own).all())


def progress_bar(accelerator: Accelerator, name: str, total: int, **settings: Any) -> Any:
    """Make a progress bar, unless `diffusers.utils.logging.disable_progress_bar()` was called."""
    is_drawn = accelerator.is_local_main_process and draws_bars()
    return logging.tqdm(total=total, desc=name, disable=not is_drawn, **settings)


def say(accelerator: Accelerator, text: str, file: TextIO | None = None) -> None:
    """Print a line at once, in one process, by default to stdout; silenced together with bars."""
    if accelerator.is_main_process and logging.is_progress_bar_enabled():
        tqdm.write(text, file=file)
        (file or sys.stdout).flush()


@dataclass
class Share:
    """The part of an epoch's samples that this process makes, and the collection of all results."""

    accelerator: Accelerator  #: which knows the processes
    total: int  #: N, samples of an epoch
    batch_size: int  #: samples that are scored together; the processes take turns by it

    @property
    def rows(self) -> torch.Tensor:
        """The numbers of this process's samples within the whole epoch: (batches, B)."""
        by_turn = torch.arange(self.total).view(-1, self.accelerator.num_processes, self.batch_size)
        return by_turn[:, self.accelerator.process_index]

    def gather_rewards(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rewards of the whole epoch (N,) in the order of its samples, on every process."""
        if self.accelerator.num_processes == 1:
            return own
        gathered = self.accelerator.gather(own.to(self.accelerator.device)).cpu()  # process by process
        by_process = gathered.view(self.accelerator.num_processes, -1, self.batch_size)
        return by_process.transpose(0, 1).flatten()

    def gather_means(self, own: dict[str, float]) -> dict[str, float]:
        """Return the means over all processes of entries that all of them have."""
        parts = gather_object([own]) if self.accelerator.num_processes > 1 else [own]
        names = [name for name in parts[0] if all(name in part for part in parts)]
        return {name: fmean(part[name] for part in parts) for name in names}

    def gather_dicts(self, own: dict[Any, Any]) -> dict[Any, Any]:
        """Join the dicts of all processes."""
        return {key: value for part in gather_object([own]) for key, value in part.items()}
