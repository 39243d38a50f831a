"""Lesson 10: advantage-weighted matching (AWM, Xue et al. 2025, arXiv 2509.25050): RWR with signed weights.

RWR trains on the policy's own samples with the loss of pre-training, weighed by how good they were. AWM lets
the weights be advantages, so that bad samples push away, and holds the steps back as PPO does. The loss of
pre-training ℓ at one noise level σ̄ in [0, 1] and noise ε takes the place of a log-probability:

    ℓ = mean((output - target)²),    "log p" = -σ̄^k ℓ,    ρ = exp("log p" now - "log p" when sampling)

with the same σ̄ and ε in both. Where the policy that sampled is still the newest one, ρ = 1 and the gradient
is that of A σ̄^k ℓ. How a sample was made is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ddpo_lessons.advantages import normalize, normalize_groups
from ddpo_lessons.algorithms.base import Learner, Pairs, Samples
from ddpo_lessons.algorithms.forward_process import Example, ForwardProcess
from ddpo_lessons.ppo import clipped_surrogate


class AWM(ForwardProcess):
    """Advantage-weighted matching on as many examples as DDPO has actions.

    Flow models are sampled by their ODE. Advantages are those of a sample's group, if there are groups, or of
    the epoch. Guidance samples, and is not trained. `train_kl_coefficient` χ adds χ mean((output - output
    before training)²). `time_power`, k, lets noisy examples count more (t runs from 0 to 1); a ValueError
    refuses one below 0. `logit_normal` is that of `ForwardProcess`.
    """

    name = "awm"
    unused: ClassVar[tuple[str, ...]] = ("per_prompt_stat_tracking", "log_prob_reduction")
    keeps_old = True
    shares_starts = False
    follows_ode = True

    def __init__(self, time_power: float = 2.0, logit_normal: bool = False) -> None:
        super().__init__(logit_normal)
        if not time_power >= 0:
            raise ValueError(f"time_power={time_power} must not be negative; 0 weighs all times alike")
        self.time_power = time_power

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any]) -> torch.Tensor:
        """Return rewards minus the mean of the group or the epoch, over the std of all differences (N,)."""
        size = self.config.sample_group_size
        return normalize_groups(rewards, size) if size > 1 else normalize(rewards)

    def update(self, samples: Samples, learner: Learner) -> None:
        """Take the optimizer steps of an epoch, from the policy that sampled."""
        learner.update_old_policy(decay=0.0)
        super().update(samples, learner)

    def loss(
        self, samples: Samples, learner: Learner, denoiser: Callable[..., Any], pairs: Pairs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return PPO's loss of some examples, with a penalty if asked for, and statistics."""
        config, example = self.config, self.example(samples, pairs)
        with torch.no_grad(), learner.old_policy() as old_policy:  # before the new one, which has a gradient
            old = self.log_prob(example, example.predict(old_policy))
        output = example.predict(denoiser)  # (N, C, h, w)
        new, advantages = self.log_prob(example, output), samples.advantages[pairs["rows"]]
        loss, stats = clipped_surrogate(
            new, old, advantages, config.train_clip_range, config.train_adv_clip_max
        )
        penalty, record = self.penalty(example, learner, output)
        record["clip_fraction"] = stats.clip_fraction
        return loss + penalty, {**record, "max_ratio_error": (stats.ratio - 1).abs().max()}

    def log_prob(self, example: Example, output: torch.Tensor) -> torch.Tensor:
        """Return what takes the place of log-probabilities, (N,)."""
        return -(example.times**self.time_power) * example.error_of(output)

    def penalty(
        self, example: Example, learner: Learner, output: torch.Tensor
    ) -> tuple[torch.Tensor | float, dict[str, torch.Tensor]]:
        """Return how far outputs have moved from before training, weighed, and as a statistic."""
        if self.config.train_kl_coefficient == 0:
            return 0.0, {}
        with torch.no_grad(), learner.reference() as reference:
            before = example.predict(reference)
        distance = (output - before).square().mean()
        return self.config.train_kl_coefficient * distance, {"distance_reference": distance.detach()}

    def identity(self) -> dict[str, Any]:
        """Return its settings."""
        return {**super().identity(), "time_power": self.time_power}
