"""Another trainer, an epoch at a time; runs in its own environment, started by `side_by_side`."""

import itertools
import statistics
import sys
import time
import warnings
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.common import Row, redness, seconds_of
from benchmarks.speed.cases import CASES, Case, input_image
from benchmarks.speed.peer_environment import serve


def peer_trainer(peer: str, config: Row, folder: str, *task: Any, **extra: Any) -> Any:
    """Make the trainer of "TRL" or "imageddpo" for a reward and a prompt function, with LoRA."""
    import imageddpo
    import trl

    trainer, pipeline = {
        "TRL": (trl.DDPOTrainer, trl.DefaultDDPOStableDiffusionPipeline),
        "imageddpo": (imageddpo.ImageDDPOTrainer, imageddpo.I2IDDPOStableDiffusionPipeline),
    }[peer]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer(trl.DDPOConfig(**config), *task, pipeline(folder, use_lora=True), **extra)


def make_trainer(case: Case, size: str, folder: str) -> Any:
    """Build the other trainer with LoRA, as its documentation does."""
    config = {
        **case.settings(size),
        "train_timestep_fraction": case.actions / case.num_steps,  # imageddpo trains this fraction
        "project_kwargs": {"project_dir": folder, "automatic_checkpoint_naming": True},
    }
    image, extra = (
        ((), {}) if case.peer == "TRL" else ((input_image(),), {"noise_strength": case.noise_strength})
    )
    task = (lambda images, *_: (redness(images.float()), {}), lambda: (case.prompt, *image, {}))
    return peer_trainer(case.peer, config, folder, *task, **extra)


def timed(owner: Any, name: str, seconds: dict[str, float], phase: str) -> None:
    """Let a method of an object add the seconds that it takes to those of a phase."""
    method = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = method(*args, **kwargs)
        seconds[phase] += time.perf_counter() - started
        return result

    setattr(owner, name, run)


def trainable(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in trainer.sd_pipeline.unet.named_parameters() if p.requires_grad}


def record_gradient(trainer: Any, path: str) -> list[float]:
    """Write the first optimizer step of the next epoch: weights, samples, gradient before clipping.

    Returns:
        A list that the step will fill: the fraction of ratios outside the clip range in each of its losses.
    """
    accelerator, clip_fractions = trainer.accelerator, []
    train, loss, clip = trainer._train_batched_samples, trainer.calculate_loss, accelerator.clip_grad_norm_
    tensors: dict[str, torch.Tensor] = {}

    def watch_minibatch(inner_epoch: int, epoch: int, global_step: int, batches: list[Any]) -> int:
        step = batches[: trainer.config.train_gradient_accumulation_steps]
        tensors.update({f"sample.{k}": torch.cat([batch[k] for batch in step]).detach() for k in step[0]})
        tensors.update({f"weight.{k}": v.detach().clone() for k, v in trainable(trainer).items()})
        return train(inner_epoch, epoch, global_step, batches)

    def watch_loss(*args: Any) -> Any:
        result = loss(*args)
        clip_fractions.append(result[2].item())
        return result

    def watch_gradient(*args: Any) -> Any:
        tensors.update({f"grad.{k}": v.grad.detach().clone() for k, v in trainable(trainer).items()})
        save_file({k: v.contiguous() for k, v in tensors.items()}, path)
        # From here on nothing is recorded, because these epochs are timed.
        trainer._train_batched_samples, trainer.calculate_loss = train, loss
        accelerator.clip_grad_norm_ = clip
        return clip(*args)

    trainer._train_batched_samples, trainer.calculate_loss = watch_minibatch, watch_loss
    accelerator.clip_grad_norm_ = watch_gradient
    return clip_fractions


def main() -> None:
    """Serve epochs of the case, size and folder that the command line names."""
    case, size, folder = CASES[sys.argv[1]], sys.argv[2], sys.argv[3]
    trainer = make_trainer(case, size, folder)
    trainer.sd_pipeline.set_progress_bar_config(disable=True)
    phases, numbers = dict[str, float](), itertools.count()
    timed(trainer, "_generate_samples", phases, "sampling")
    timed(trainer, "compute_rewards", phases, "reward")

    def epoch(line: str) -> Row:
        path = line.removeprefix("gradient ")
        clip_fractions = record_gradient(trainer, path) if path != line else []
        phases.update(sampling=0.0, reward=0.0)
        number = next(numbers)
        whole = seconds_of(lambda: trainer.step(number, number))
        answer = {**phases, "training": whole - sum(phases.values()), "whole": whole}
        return answer | ({"first_clip_fraction": statistics.mean(clip_fractions)} if clip_fractions else {})

    serve(epoch)


if __name__ == "__main__":
    main()
