"""Why losses on the forward process do badly in img2img: `python -m benchmarks.results.forward_starts`.

Digits in other colours, as in recolour.py, before training. What is varied is the examples of a loss: final
latents noised anew to any timestep up to the first of sampling, as from noise ("noised anew"), the states
themselves that sampling visited ("visited states"), or fresh noise at their timesteps ("visited timesteps").

For each loss and seed: the cosine of its descent with the gradient of the mean reward through both steps of
sampling, on 256 pictures, with guidance and without. "all alike" weighs every sample by 1. Into
forward_starts.csv; what it holds already is not measured again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import Row, parse, run_all, scratch_config
from benchmarks.results import recolour
from benchmarks.tiny.requests import edit_requests
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.base import Algorithm, Pairs, Samples
from ddpo_lessons.algorithms.forward_process import ForwardProcess
from ddpo_lessons.data.contexts import check_rewards
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.rewards import recolouring
from ddpo_lessons.run.sampling import scorer
from ddpo_lessons.tiny import load_tiny_sd
from ddpo_lessons.trainer import Runner

SEEDS, EPOCHS = (0, 1, 2), 2  # of 128 pictures
EXAMPLES = ("noised anew", "visited states", "visited timesteps")
SETTINGS: Row = {
    **recolour.SETTINGS,
    "sample_num_batches_per_epoch": 1,
    "train_batch_size": 64,  # two optimizer steps an epoch
}


class AtTimesteps(ForwardProcess):
    """Examples with fresh noise at the timesteps that sampling visited."""

    def visited_examples(self, trajectory: Any, rows: torch.Tensor, generators: Any) -> Pairs:
        """Replace the noise that leads to the state."""
        examples = super().visited_examples(trajectory, rows, generators)
        shape = trajectory.final_latents.shape[1:]
        return {**examples, "noise": torch.stack([torch.randn(shape, generator=g) for g in generators])}


def make(name: str, examples: str) -> Algorithm:
    """Make an algorithm, with these examples if it has any."""
    if examples not in EXAMPLES[1:]:
        return make_algorithm(name)
    algorithm = make_algorithm(name, visited_states=True)
    if examples == EXAMPLES[2]:
        algorithm.__class__ = type("AtTimesteps", (AtTimesteps, type(algorithm)), {})
    return algorithm


@dataclass(frozen=True)
class Direction:
    """What names a measurement of directions."""

    guidance: float
    seed: int


def gradient(algorithm: Algorithm, samples: Samples, learner: Any, config: Any) -> torch.Tensor:
    """Return the gradient of an algorithm's loss on samples as one vector; no step is taken."""
    algorithm.begin(config, learner.family, 1)
    weights = list(learner.trainable.values())
    found = []

    def step(loss: Any, groups: Any) -> None:
        value, _ = loss(learner.denoiser, groups[0])
        parts = torch.autograd.grad(value, weights)
        found.append(torch.cat([part.flatten() for part in parts]))

    stand_in = SimpleNamespace(
        step=step,
        split=lambda pairs: [pairs],
        update_old_policy=lambda decay: None,  # it is the newest one
        old_policy=learner.old_policy,
    )
    advantages = algorithm.advantages(samples.advantages, [None] * len(samples.advantages))
    algorithm.update(replace(samples, advantages=advantages), stand_in)
    return torch.stack(found).mean(0)


def directions(run: Direction) -> list[Row]:
    """Return the cosine of each loss's descent with the gradient of the mean reward, before training."""
    kinds = {(name, kind): make(name.lower(), kind) for name in ("AWM", "NFT", "RWR") for kind in EXAMPLES}
    for kind in EXAMPLES:
        alike = make("rwr", kind)
        alike.temperature = math.inf  # type: ignore[attr-defined]
        kinds["all alike", kind] = alike
    kinds |= {
        ("DDPO", "actions"): make_algorithm("ddpo"),
        ("reward", ""): make_algorithm("draft", last_steps=2),
    }
    own: Row = {"seed": run.seed, "sample_guidance_scale": run.guidance}
    with scratch_config(SETTINGS, own) as config:
        parts = (config, recolouring(), edit_requests(run.seed), load_tiny_sd())
        start = FromImages(recolour.POLICY.strength)
        runner = Runner(*parts, algorithm=make_algorithm("awm"), start=start)
        learner = SimpleNamespace(
            denoiser=runner.learner.denoiser,
            trainable=runner.learner.trainable,
            old_policy=runner.learner.old_policy,
            family=runner.family,
        )
        sums: dict[Any, Any] = dict.fromkeys(kinds, 0.0)
        for epoch in range(EPOCHS):
            contexts = runner.contexts.draw(epoch)
            batches, trajectory, _ = runner.sampler.sample(epoch, contexts)
            rows, scored = torch.arange(len(contexts)), scorer(runner.reward_function, [*contexts.values()])
            samples = Samples(epoch, 2 * epoch, 0, rows, trajectory, check_rewards(batches), scored)
            for name, algorithm in kinds.items():
                sums[name] = sums[name] + gradient(algorithm, samples, learner, config)
    climb = sums.pop(("reward", ""))
    cosines = {name: torch.cosine_similarity(found, climb, dim=0).item() for name, found in sums.items()}
    return [{**vars(run), "method": m, "examples": e, "cosine": c} for (m, e), c in cosines.items()]


def main() -> None:
    """Measure with guidance, then without."""
    columns = ("guidance", "seed", "method", "examples", "cosine")
    asked = [Direction(guidance, seed) for guidance in (2.0, 1.0) for seed in SEEDS]
    run_all(directions, asked, columns, 2, Path(__file__).with_suffix(".csv"), parse(__doc__).processes)


if __name__ == "__main__":
    main()
