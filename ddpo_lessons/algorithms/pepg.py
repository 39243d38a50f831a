"""Lesson 10: PEPG, the proximal ELBO policy gradient (Choi et al. 2026, arXiv 2602.04663).

A policy gradient needs the log-probability of a sample. Its lower bound, the ELBO, is the error of
pre-training, and one random timestep and noise give an estimate:

    E = -mean((x̂₀ - x₀)²) / e,    log ρ = E now - E of the policy that sampled

with e the mean of abs(x̂₀ - x₀), without a gradient. The loss is

    loss = -mean(ρ (A - log ρ) E)    with ρ and log ρ detached.

Without log ρ it would be REINFORCE. With log ρ, the gradient is that of the regression ρ / 2 (A - log ρ)²,
whose minimum makes a sample A nats more likely and no more, so no clipping is needed. A is the advantage
times `scale`.
"""

from typing import Any

import torch

from ddpo_lessons.algorithms.algorithm import Learner, LossAndStats, Pairs, Samples
from ddpo_lessons.algorithms.nft import NFT, normalized_error


def proximal_loss(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return -ρ (A - log ρ) E of each example (N,), with E now and at sampling, and A in nats."""
    log_ratio = new.detach() - old
    return -log_ratio.exp() * (advantages - log_ratio) * new


class PEPG(NFT):
    """Train by PEPG; samples, advantages, examples, penalty and the sampling policy are those of `NFT`.

    `scale` is the number of nats of E by which an advantage of 1 should make a sample more likely. Raises a
    ValueError for a number that does not fit.
    """

    name = "pepg"

    def __init__(
        self,
        scale: float = 0.1,
        decay_rate: float = 0.001,
        max_decay: float = 0.5,
        visited_states: bool = False,
    ) -> None:
        super().__init__(1.0, decay_rate, max_decay, visited_states)
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale={scale} must be a number above 0; 0.1 is usual")
        self.scale = scale

    def loss(self, samples: Samples, learner: Learner, denoiser: Any, pairs: Pairs) -> LossAndStats:
        example, bound = self.example(samples, pairs), self.config.train_adv_clip_max
        advantages = self.scale * samples.advantages[pairs["rows"]].clamp(-bound, bound)  # (N,)
        with torch.no_grad(), learner.old_policy() as old_policy:  # before the new one, which has a gradient
            old = -normalized_error(example, example.predict(old_policy))  # (N,)
        output = example.predict(denoiser)  # (N, C, h, w)
        new = -normalized_error(example, output)  # (N,)
        penalty, record = self.penalty(example, learner, output)
        record["log_ratio_size"] = (new.detach() - old).abs().mean()
        return proximal_loss(new, old, advantages).mean() + penalty, record
