"""Lesson 06: reward-weighted regression (RWR), the method with which DDPO was compared.

RWR treats the reward as a weight: it samples, and then trains on its own samples with the ordinary denoising
loss, in which better samples have a larger weight (Peters and Schaal 2007; for diffusion models Lee et al.
2023, arXiv 2302.12192, and Black et al. 2023, arXiv 2305.13301, section 4.2). It does not use the denoising
steps of sampling.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ddpo_lessons.algorithms.algorithm import Learner, LossAndStats, Pairs, Samples
from ddpo_lessons.algorithms.forward_process import ForwardProcess


def rwr_weights(rewards: torch.Tensor, temperature: float) -> torch.Tensor:
    """Compute the weights of RWR: ``w = N softmax(r / (temperature std(r)))``, with mean 1; (N,) float32.

    Small temperatures train only on the best samples, large ones on all samples equally. Raises a ValueError
    if the temperature is not positive. Source: Black et al. 2023, section 4.2, w_RWR, with rewards in
    standard deviations, so that one temperature fits every reward.
    """
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; 1 is a usual value")
    rewards = rewards.double()
    std = rewards.std(correction=0).clamp(min=1e-8)
    return len(rewards) * (rewards / (temperature * std)).softmax(dim=0).float()


def sparse_rwr_weights(rewards: torch.Tensor, top_fraction: float) -> torch.Tensor:
    """Compute the weights of sparse RWR: 1 / top_fraction for the best samples, 0 for the others; mean 1.

    The result is (N,) float32, with at least one sample to train on. Raises a ValueError for a fraction
    outside (0, 1]. Source: Black et al. 2023, section 4.2, w_sparse, with a quantile of the epoch as its
    threshold.
    """
    if not 0 < top_fraction <= 1:
        raise ValueError(f"top_fraction={top_fraction} must lie in (0, 1]")
    count = max(1, round(top_fraction * len(rewards)))
    weights = torch.zeros(len(rewards))
    weights[rewards.double().topk(count).indices.cpu()] = len(rewards) / count
    return weights


class RWR(ForwardProcess):
    """Train by reward-weighted regression on the same rollouts, prompts, rewards and settings as DDPO.

    Sampling uses guidance, as in DDPO, and training does not, as in ordinary fine-tuning. Samples of a group
    share their first state, as in DDPO. `temperature` is that of `rwr_weights`; `top_fraction` selects
    `sparse_rwr_weights` instead, and both functions check their values. `visited_states` is that of
    `ForwardProcess`.
    """

    name = "rwr"
    unused = (
        "train_kl_coefficient", "per_prompt_stat_tracking", "log_prob_reduction", "train_clip_range",
        "train_adv_clip_max",
    )  # fmt: skip

    def __init__(
        self,
        temperature: float = 0.2,
        top_fraction: float | None = None,
        visited_states: bool = False,
    ) -> None:
        super().__init__(visited_states)
        self.temperature, self.top_fraction = temperature, top_fraction
        self.advantages(torch.zeros(1))  # checks the settings before anything is loaded

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any] = ()) -> torch.Tensor:
        """Return the weight of each sample (N,), which replaces DDPO's advantage."""
        if self.top_fraction is not None:
            return sparse_rwr_weights(rewards, self.top_fraction)
        return rwr_weights(rewards, self.temperature)

    def loss(self, samples: Samples, learner: Learner, denoiser: Any, pairs: Pairs) -> LossAndStats:
        """Return the weighted denoising loss of examples: mean of w (target - prediction)^2."""
        error = self.example(samples, pairs).error(denoiser)  # (N,)
        return (samples.advantages[pairs["rows"]] * error).mean(), {"denoising_error": error.detach().mean()}
