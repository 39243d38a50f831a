"""Lesson 10: DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117).

Let r in [0, 1] say how good a sample was, v the output now and v_old that of the policy that sampled. Around
v_old lie two mirror images,

    v⁺ = (1 - β) v_old + β v,    v⁻ = (1 + β) v_old - β v,

and the loss asks v⁺ to explain good samples, and v⁻ bad ones:

    loss = A_max mean(r / β |x̂₀⁺ - x₀|² / w⁺ + (1 - r) / β |x̂₀⁻ - x₀|² / w⁻)

with w = mean |x̂₀ - x₀|, held fixed. Its value does not depend on r where v = v_old; its gradient does, and is
AWM's with t² / w for t^k. β is how far the mirror images lie apart, and not the weight of a penalty, which is
`train_kl_coefficient`. The policy that samples follows the one that learns: after every epoch
old = d old + (1 - d) new, with d = min(decay_rate epoch, max_decay).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ddpo_lessons.algorithms.awm import AWM
from ddpo_lessons.algorithms.base import Learner, Pairs, Samples
from ddpo_lessons.algorithms.forward_process import ForwardProcess


class NFT(AWM):
    """DiffusionNFT; samples, advantages, examples and penalty are those of `AWM`.

    Args:
        beta: how far v⁺ and v⁻ lie from v_old, in units of v - v_old.
        decay_rate: by how much the decay d of the sampling policy grows from epoch to epoch.
        max_decay: where it stops; 0 lets the newest policy sample.

    Raises:
        ValueError: if a number does not fit.
    """

    name = "nft"
    unused = ("per_prompt_stat_tracking", "log_prob_reduction", "train_clip_range")

    def __init__(self, beta: float = 1.0, decay_rate: float = 0.001, max_decay: float = 0.5) -> None:
        if not beta > 0:
            raise ValueError(f"beta={beta} must be above 0; 1 and 0.1 are usual")
        if not decay_rate >= 0:
            raise ValueError(f"decay_rate={decay_rate} must not be negative")
        if not 0 <= max_decay < 1:
            raise ValueError(
                f"max_decay={max_decay} must lie in [0, 1): at 1 the sampling policy never moves"
            )
        self.beta, self.decay_rate, self.max_decay = beta, decay_rate, max_decay

    def sampling_policy(self, learner: Learner) -> contextlib.AbstractContextManager[Any]:
        """Let the old policy sample."""
        return learner.old_policy()

    def update(self, samples: Samples, learner: Learner) -> None:
        """Take the optimizer steps of an epoch; then let the old policy follow."""
        ForwardProcess.update(self, samples, learner)
        learner.follow(min(self.decay_rate * samples.epoch, self.max_decay))

    def loss(
        self, samples: Samples, learner: Learner, denoiser: Callable[..., Any], pairs: Pairs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of some examples, with a penalty if asked for, and statistics."""
        example, bound = self.example(samples, pairs), self.config.train_adv_clip_max
        advantages = samples.advantages[pairs["rows"]].clamp(-bound, bound)  # (N,)
        goodness = advantages / (2 * bound) + 0.5  # r, in [0, 1]
        with torch.no_grad(), learner.old_policy() as old_policy:  # before the new one, which has a gradient
            old = example.predict(old_policy)  # (N, C, h, w)
        step = self.beta * (example.predict(denoiser) - old)
        errors = []
        for mirrored in (old + step, old - step):
            clean = self.family.predict_clean(example.noisy, mirrored, example.timesteps)
            difference = (clean - example.clean).flatten(1)  # (N, D)
            weight = difference.detach().abs().mean(1).clamp(min=1e-5)
            errors.append(difference.square().mean(1) / weight)  # (N,)
        good, bad = errors
        loss = bound / self.beta * (goodness * good + (1 - goodness) * bad).mean()
        penalty, record = self.penalty(example, learner, denoiser)
        return loss + penalty, {**record, "distance_old": (step / self.beta).detach().square().mean()}

    def identity(self) -> dict[str, Any]:
        """Return its settings."""
        return {"beta": self.beta, "decay_rate": self.decay_rate, "max_decay": self.max_decay}
