"""This package's trainer, or the bare UNet, an epoch at a time; started by `side_by_side`."""

import math
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils import logging
from safetensors.torch import load_file

from benchmarks.common import Row, redness, seconds_of
from benchmarks.speed.cases import CASES, SIZES, Case, input_image
from benchmarks.speed.peer_environment import serve
from ddpo_lessons.algorithms.algorithm import Samples
from ddpo_lessons.algorithms.ddpo import share_predictions, shuffled_pairs
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.models import Schedule
from ddpo_lessons.rollout import Trajectory
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer, Trainer

GROUP_SIZES = (
    8,
    16,
    32,
    64,
    128,
)  # UNet evaluations of one forward pass, of which the floor uses the fastest


def make_trainer(case: Case, size: str, folder: str, output_dir: str, **settings: Any) -> Trainer:
    """Build our trainer with the settings of the case, some others, and defaults for everything else."""
    logging.disable_progress_bar()
    config = DDPOConfig(**{**case.settings(size), **settings}, output_dir=output_dir, image_grid_freq=0)
    pipeline = StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    if case.noise_strength is None:
        return DDPOTrainer(config, redness, lambda: (case.prompt, {}), pipeline)
    task = (redness, lambda: (case.prompt, input_image(), {}), pipeline)
    return ImageDDPOTrainer(config, *task, noise_strength=case.noise_strength)


def embedding(trainer: Trainer, case: Case) -> torch.Tensor:
    """Return the embedding (1, L, D) of the case's prompt."""
    return trainer.family.condition([case.prompt], "", guidance_scale=1.0)["prompt_embeds"]


# ------------------------------------------------------------------------------------ equal gradients
def trajectory_of(tensors: dict[str, torch.Tensor], case: Case, schedule: Schedule) -> Trajectory:
    """Turn the other trainer's samples, whose timesteps it has shuffled, back into a trajectory."""
    sample = {k.removeprefix("sample."): v for k, v in tensors.items() if k.startswith("sample.")}
    order = sample["timesteps"].argsort(dim=1, descending=True)  # (B, T)
    rows = torch.arange(len(order))[:, None]
    states, outcomes = (sample[name][rows, order] for name in ("latents", "next_latents"))  # (B, T, C, h, w)
    latents = torch.cat([states, outcomes[:, -1:]], dim=1)  # (B, T+1, C, h, w)
    embeds = ("prompt_embeds", "negative_prompt_embeds")[: case.evaluations]
    return Trajectory(
        latents=latents, timesteps=sample["timesteps"][rows, order],
        log_probs=sample["log_probs"][rows, order], conditioning={name: sample[name] for name in embeds},
        guidance_scale=case.guidance_scale, schedule=schedule, final_latents=latents[:, -1],
    )  # fmt: skip


def step_gradient(trainer: Trainer, trajectory: Trajectory, advantages: torch.Tensor) -> list[torch.Tensor]:
    """Take an optimizer step on all actions; return its gradient before clipping, weight by weight."""
    gradient: list[torch.Tensor] = []
    clip = trainer.accelerator.clip_grad_norm_

    def watch(*args: Any) -> Any:
        gradient.extend(p.grad.clone() for p in trainer.learner.trainable.values() if p.grad is not None)
        return clip(*args)

    learner, count = trainer.learner, trajectory.num_steps
    samples = Samples(0, 0, 0, torch.arange(len(advantages)), trajectory, advantages, score=None)
    shape, generator = trajectory.log_probs.shape, torch.Generator().manual_seed(0)
    (pairs,) = shuffled_pairs(shape, count, len(advantages), generator)
    learner.begin_epoch(trajectory)
    groups = [share_predictions(group, group_size=1) for group in learner.split(pairs)]
    with mock.patch.object(trainer.accelerator, "clip_grad_norm_", watch):
        learner.step(partial(trainer.algorithm.loss, samples, learner), groups)
    return gradient


def compare_gradient(trainer: Trainer, case: Case, path: str) -> dict[str, float]:
    """Take the other trainer's recorded step with ours; return how far the gradients are apart.

    Returns:
        "gradient_difference": |ours - theirs| / |theirs| over all trained weights.
    """
    tensors = load_file(path)
    embeds = embedding(trainer, case).expand_as(tensors["sample.prompt_embeds"])
    torch.testing.assert_close(tensors["sample.prompt_embeds"], embeds, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        for name, parameter in trainer.learner.trainable.items():
            parameter.copy_(tensors[f"weight.{name}"])
    schedule = trainer.start.schedule(trainer.family, trainer.config)
    trajectory = trajectory_of(tensors, case, schedule)
    ours = step_gradient(trainer, trajectory, tensors["sample.advantages"].float())
    theirs = [tensors[f"grad.{name}"] for name in trainer.learner.trainable]
    apart = torch.stack([(a - b).norm() for a, b in zip(ours, theirs, strict=True)]).norm()
    return {"gradient_difference": (apart / torch.stack([b.norm() for b in theirs]).norm()).item()}


# ---------------------------------------------------------------------------------------------- floor
class Floor:
    """An epoch's UNet evaluations and nothing else, in forward passes of the size that is fastest here."""

    def __init__(self, trainer: Trainer, case: Case, size: str) -> None:
        """Find the best size of a forward pass, and of one with its backward pass."""
        self.unet, self.trainable = trainer.learner.denoiser, list(trainer.learner.trainable.values())
        self.embeds = embedding(trainer, case)  # (1, L, D)
        self.evaluations = math.prod(SIZES[size][:2]) * case.actions * case.evaluations
        self.passes = [(run, self._fastest(run)) for run in (self._forward, self._backward)]

    def _fastest(self, run: Callable[[int], None]) -> list[int]:
        fastest = min(GROUP_SIZES, key=lambda size: self._rate(run, size))
        groups = torch.arange(self.evaluations).chunk(math.ceil(self.evaluations / fastest))
        return [len(group) for group in groups]

    def _rate(self, run: Callable[[int], None], count: int) -> float:
        """Return the best of five times per evaluation, in seconds."""
        return min(seconds_of(lambda: run(count)) for _ in range(5)) / count

    def _predict(self, count: int) -> torch.Tensor:
        latents, timesteps = torch.zeros(count, 4, 8, 8), torch.full((count,), 500)
        return self.unet(latents, timesteps, encoder_hidden_states=self.embeds.expand(count, -1, -1)).sample

    @torch.no_grad()
    def _forward(self, count: int) -> None:
        self._predict(count)

    def _backward(self, count: int) -> None:
        torch.autograd.grad(self._predict(count).square().mean(), self.trainable)

    def epoch(self) -> dict[str, float]:
        """Do the evaluations of sampling and of training; return seconds of each."""
        sampling, training = (
            seconds_of(lambda run=run, sizes=sizes: [run(size) for size in sizes])
            for run, sizes in self.passes
        )
        return {"sampling": sampling, "reward": 0.0, "training": training, "whole": sampling + training}


def main() -> None:
    """Serve epochs of the case, size and folder that the command line names, compiled if it says so."""
    case, size, folder, compiled = CASES[sys.argv[1]], sys.argv[2], sys.argv[3], sys.argv[4:] == ["compiled"]
    with tempfile.TemporaryDirectory() as output_dir:
        trainer = make_trainer(case, size, folder, output_dir, torch_compile=compiled)
        floor = cache(lambda: Floor(trainer, case, size))

        def epoch(line: str) -> Row:
            if line.startswith("gradient "):
                return compare_gradient(trainer, case, line.removeprefix("gradient "))
            if line == "floor":
                return floor().epoch()
            metrics: dict[str, float] = {}
            whole = seconds_of(lambda: metrics.update(trainer.step(trainer.epochs_done)))
            phases = {name: metrics[f"seconds_{name}"] for name in ("sampling", "reward", "training")}
            return {**phases, "whole": whole}

        serve(epoch)


if __name__ == "__main__":
    main()
