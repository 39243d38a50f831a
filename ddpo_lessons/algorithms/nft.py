"""Lesson 10: DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117).

Let q in [0, 1] be the optimality probability of a sample (r in the paper), v the current output, and v_old
the output of the policy that sampled. The implicit positive and negative policies are

    v⁺ = v_old + ζ (v - v_old),    v⁻ = v_old - ζ (v - v_old),

and the loss fits v⁺ to good samples, and v⁻ to bad ones:

    loss = A_max mean(q / ζ (x̂₀⁺ - x₀)² / e⁺ + (1 - q) / ζ (x̂₀⁻ - x₀)² / e⁻)

with e the mean of abs(x̂₀ - x₀) (w in the paper), without a gradient. At v = v_old the loss does not depend
on q, but its gradient does: it is AWM's with σ̄² / e instead of σ̄^k, for any ζ. ζ is the paper's β, here
`beta`. It determines how strongly v is kept near v_old. In contrast, the penalty with the weight
`train_kl_coefficient`, which the authors' code also calls beta, keeps v near the policy before training. The
sampling policy follows the learning one: after every epoch old = decay old + (1 - decay) new, with decay =
min(decay_rate epoch, max_decay).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ddpo_lessons.algorithms.algorithm import Learner, Loss, LossAndStats, Pairs, Samples
from ddpo_lessons.algorithms.awm import AWM
from ddpo_lessons.algorithms.forward_process import Example, ForwardProcess


def normalized_error(example: Example, output: torch.Tensor) -> torch.Tensor:
    """Return mean((x̂₀ - x₀)²) / e of each example (N,), with e = mean(abs(x̂₀ - x₀)) detached."""
    clean = example.family.predict_clean(example.noisy, output, example.timesteps)
    difference = (clean - example.clean).flatten(1)  # (N, D)
    size = difference.detach().abs().mean(1).clamp(min=1e-5)  # e, (N,)
    return difference.square().mean(1) / size


def implicit_policy_loss(
    example: Example, new: torch.Tensor, old: torch.Tensor, optimality: torch.Tensor, beta: float
) -> torch.Tensor:
    """Return DiffusionNFT's loss of each example (N,), in units of A_max.

    `new` and `old` (N, C, h, w) are the outputs of the learning policy and of the policy that sampled, the
    latter without a gradient. `optimality` is q, (N,) in [0, 1], and `beta` is ζ, above 0.
    """
    step = beta * (new - old)
    positive = normalized_error(example, old + step)  # of v⁺, (N,)
    negative = normalized_error(example, old - step)  # of v⁻, (N,)
    return (optimality * positive + (1 - optimality) * negative) / beta


class NFT(AWM):
    """Train by DiffusionNFT; samples, advantages, examples and penalty are those of `AWM`.

    `beta` is ζ, the distance of v⁺ and v⁻ from v_old in units of v - v_old; a large value keeps v near v_old.
    `decay_rate` is the growth of the sampling policy's decay per epoch, up to `max_decay`; with 0 the newest
    policy samples. `visited_states` is that of `ForwardProcess`. Raises a ValueError for a number that does
    not fit.
    """

    name = "nft"
    unused = ("per_prompt_stat_tracking", "log_prob_reduction", "train_clip_range")

    def __init__(
        self,
        beta: float = 1.0,
        decay_rate: float = 0.001,
        max_decay: float = 0.5,
        visited_states: bool = False,
    ) -> None:
        ForwardProcess.__init__(self, visited_states)
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
        return learner.old_policy()

    def steps(self, samples: Samples, learner: Learner) -> Iterator[tuple[Loss, list[Pairs]]]:
        """Yield the optimizer steps of an epoch; then update the old policy."""
        yield from ForwardProcess.steps(self, samples, learner)
        learner.update_old_policy(min(self.decay_rate * samples.epoch, self.max_decay))

    def loss(self, samples: Samples, learner: Learner, denoiser: Any, pairs: Pairs) -> LossAndStats:
        example, bound = self.example(samples, pairs), self.config.train_adv_clip_max
        advantages = samples.advantages[pairs["rows"]].clamp(-bound, bound)  # (N,)
        optimality = advantages / (2 * bound) + 0.5  # q, in [0, 1]
        with torch.no_grad(), learner.old_policy() as old_policy:  # before the new one, which has a gradient
            old = example.predict(old_policy)  # (N, C, h, w)
        new = example.predict(denoiser)
        loss = bound * implicit_policy_loss(example, new, old, optimality, self.beta).mean()
        penalty, record = self.penalty(example, learner, new)
        return loss + penalty, {**record, "distance_old": (new.detach() - old).square().mean()}
