"""Time an epoch without keeping it, to predict what the whole run will cost."""

import sys

import psutil
import torch

from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.costs import SmokeRun


def smoke_run(trainer: Trainer) -> SmokeRun:
    """Run a trainer's next epoch twice, time the second time, and undo both.

    The first time is a warm-up, in which kernels are chosen, prompts are encoded and files are read.
    `Trainer.rehearse` documents what is undone. Every process must call it.

        predicted = smoke_run(trainer)
        predicted  # as the last expression of a cell: seconds, memory, hours and money
    """
    trainer.rehearse(lambda: trainer.step(trainer.epochs_done))
    return trainer.rehearse(lambda: _timed_epoch(trainer))


def _timed_epoch(trainer: Trainer) -> SmokeRun:
    config, device = trainer.config, trainer.accelerator.device
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)
    metrics = trainer.step(trainer.epochs_done)
    watched = trainer.watched
    assert watched is not None
    return SmokeRun(
        images=trainer.plan.total_samples,
        seconds_sampling=metrics["seconds_sampling"],
        seconds_reward=metrics["seconds_reward"],
        seconds_training=metrics["seconds_training"],
        peak_bytes=_peak_bytes(device),
        is_gpu=torch.cuda.is_initialized(),
        first_ratio_error=next(iter(watched.replay_errors), None),
        sampling_error=max(watched.sampling_errors, default=None),
        clip_range=config.train_clip_range,
        num_epochs=config.num_epochs,
        price_per_hour=config.price_per_hour,
    )


def _peak_bytes(device: torch.device) -> int:
    """Return the peak of bytes reserved on the GPU, or without a GPU the peak of this process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved(device)
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
