"""Lesson 06: reward-weighted regression (RWR), the method that DDPO is measured against.

RWR treats the reward as a weight: it samples, and then trains on its own samples with the ordinary
denoising loss, the better ones more (Peters and Schaal 2007; for diffusion models Lee et al. 2023, arXiv
2302.12192, and Black et al. 2023, arXiv 2305.13301, section 4.2). It never looks at the denoising steps that
were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ddpo_lessons.algorithms.base import Algorithm, Learner, Pairs, Samples
from ddpo_lessons.algorithms.ddpo import SHUFFLE, shuffled_pairs
from ddpo_lessons.rollout import sample_seed


def rwr_weights(rewards: torch.Tensor, temperature: float) -> torch.Tensor:
    """Weights of RWR: ``w = N softmax(r / (temperature std(r)))``, so that their mean is 1.

    Source: Black et al. 2023, section 4.2, w_RWR, with rewards in standard deviations so that one temperature
    serves every reward.

    Args:
        rewards: (N,).
        temperature: small values train on the best samples only, large ones on all alike.

    Returns:
        (N,) float32.

    Raises:
        ValueError: if the temperature is not positive.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; 1 is a usual value")
    rewards = rewards.float()
    std = rewards.std(correction=0).clamp(min=1e-8)
    return len(rewards) * (rewards / (temperature * std)).softmax(dim=0)


def sparse_rwr_weights(rewards: torch.Tensor, top_share: float) -> torch.Tensor:
    """Weights of sparse RWR: 1 / top_share for the best samples, 0 for the others; their mean is 1.

    Source: Black et al. 2023, section 4.2, w_sparse, with the threshold put at a quantile of the epoch.

    Args:
        rewards: (N,).
        top_share: share of the samples that is trained on, in (0, 1]; at least one sample is.

    Returns:
        (N,) float32.

    Raises:
        ValueError: if top_share is outside (0, 1].
    """
    if not 0 < top_share <= 1:
        raise ValueError(f"top_share={top_share} must lie in (0, 1]")
    count = max(1, round(top_share * len(rewards)))
    weights = torch.zeros(len(rewards))
    weights[rewards.float().topk(count).indices.cpu()] = len(rewards) / count
    return weights


class RWR(Algorithm):
    """Reward-weighted regression on the same rollouts, prompts, rewards and settings as DDPO.

    Every (sample, timestep) pair of DDPO becomes one denoising example here, at a random timestep of the
    whole schedule, so that both methods train on equally many. Guidance samples, as in DDPO, and is not
    trained, as in ordinary fine-tuning. Clip range and advantages are not used; samples of a group share
    their start, as in DDPO.

    Args:
        temperature: of `rwr_weights`; not used with top_share.
        top_share: of `sparse_rwr_weights`, or None for RWR's soft weights.

    Raises:
        ValueError: if temperature or top_share does not fit.
    """

    name = "rwr"
    unused = ("train_kl_coefficient", "per_prompt_stat_tracking")

    def __init__(self, temperature: float = 0.2, top_share: float | None = None) -> None:
        self.temperature, self.top_share = temperature, top_share
        self.advantages(torch.zeros(1))  # refuses wrong settings before anything is loaded

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any] = ()) -> torch.Tensor:
        """Return the weight of each sample (N,) where DDPO has its advantage."""
        if self.top_share is not None:
            return sparse_rwr_weights(rewards, self.top_share)
        return rwr_weights(rewards, self.temperature)

    def update(self, samples: Samples, learner: Learner) -> None:
        """Take as many optimizer steps as DDPO would, on as many denoising examples."""
        config, count = self.config, samples.first_step
        samples_per_step = config.train_batch_size * config.train_gradient_accumulation_steps
        for inner_epoch in range(config.train_num_inner_epochs):
            seed = sample_seed(config.seed, samples.epoch, SHUFFLE, inner_epoch, samples.process)
            generator = torch.Generator().manual_seed(seed)
            shape = samples.trajectory.log_probs.shape
            for pairs in shuffled_pairs(shape, self.num_train_timesteps, samples_per_step, generator):
                examples = {**pairs, **self.denoising_examples(samples, pairs, count)}
                learner.step(partial(self.loss, samples), learner.split(examples))
                count += 1

    def denoising_examples(self, samples: Samples, pairs: Pairs, step: int) -> Pairs:
        """Draw timestep (N,) and noise (N, C, h, w) of each pair from its own seed, whatever the grouping."""
        numbers = samples.numbers[pairs["rows"]].tolist()  # by number in the epoch: processes change nothing
        seeds = [
            sample_seed(self.config.seed, 3, step, 0, number, column)
            for number, column in zip(numbers, pairs["columns"].tolist(), strict=True)
        ]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        count, shape = self.family.num_train_timesteps, samples.trajectory.final_latents.shape[1:]
        timesteps = torch.cat([torch.randint(0, count, (1,), generator=g) for g in generators])
        return {
            "timesteps": timesteps,
            "noise": torch.stack([torch.randn(shape, generator=g) for g in generators]),
        }

    def loss(
        self, samples: Samples, denoiser: Callable[..., Any], pairs: Pairs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weighted denoising loss of some pairs: mean of w (target - prediction)^2."""
        family, trajectory, rows = self.family, samples.trajectory, pairs["rows"]
        clean = trajectory.final_latents[rows]  # (N, C, h, w)
        noise, timesteps = pairs["noise"], pairs["timesteps"]
        noisy = family.add_noise(clean, noise, timesteps)
        told = {n: v[rows] for n, v in trajectory.conditioning.items() if not n.startswith("negative_")}
        output = family.predict(denoiser, noisy, timesteps, told, guidance_scale=1.0)
        target = family.denoising_target(clean, noise, timesteps)
        error = (output - target).square().flatten(1).mean(1)  # (N,)
        return (samples.advantages[rows] * error).mean(), {"denoising_error": error.detach().mean()}

    def identity(self) -> dict[str, Any]:
        """Return the weights' settings."""
        return {"temperature": self.temperature, "top_share": self.top_share}
