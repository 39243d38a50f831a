"""Lesson 10: online Diffusion-DPO (Wallace et al. 2023, arXiv 2311.12908).

Direct preference optimization trains a policy to prefer the better of two samples, relative to the policy
before training. With the loss of pre-training ℓ instead of -log p, the same σ̄ and ε for both samples, and Δℓ
= ℓ_best - ℓ_worst,

    loss = -log sigmoid(-β / 2 (Δℓ - Δℓ before training))

At the policy before training its gradient is β / 4 times that of Δℓ: weights 1 and -1.

The paper uses a fixed data set of pairs that people chose; here the reward chooses among the policy's own
samples in every epoch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ddpo_lessons.algorithms.algorithm import Learner, Loss, LossAndStats, Pairs, Samples
from ddpo_lessons.algorithms.awm import AWM
from ddpo_lessons.algorithms.ddpo import shuffled_pairs
from ddpo_lessons.algorithms.forward_process import ForwardProcess
from ddpo_lessons.config import DDPOConfig


class DPO(AWM):
    """Train by online Diffusion-DPO; sampling and examples are those of `AWM`.

    `beta`, above 0, is the sharpness of preferences per unit of error. Raises a ValueError for another beta,
    and for a config without groups.
    """

    name = "dpo"
    unused = (*AWM.unused, "train_clip_range", "train_adv_clip_max", "train_kl_coefficient")
    keeps_old = False

    def __init__(self, beta: float = 1000.0) -> None:
        ForwardProcess.__init__(self)
        if not beta > 0:
            raise ValueError(f"beta={beta} must be above 0; 1000 is usual")
        self.beta = beta

    def check(self, config: DDPOConfig) -> None:
        """Raise a ValueError for settings without whole groups, whose best and worst are compared."""
        super().check(config)
        size = config.sample_group_size
        if size < 2:
            raise ValueError("dpo compares samples of one prompt: set sample_group_size to 2 or more")
        samples_per_step = config.train_batch_size * config.train_gradient_accumulation_steps
        if config.sample_batch_size % size or samples_per_step % size:
            raise ValueError(
                f"dpo needs whole groups: sample_batch_size={config.sample_batch_size} and the "
                f"{samples_per_step} samples of an optimizer step must be multiples of {size}"
            )

    def needs_reference(self, config: DDPOConfig) -> bool:
        return True

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any]) -> torch.Tensor:
        """Return 1 for the best of each group, -1 for the worst, 0 for the others and for ties (N,)."""
        groups = rewards.view(-1, self.config.sample_group_size)  # (groups, G)
        best, worst = groups.argmax(dim=1, keepdim=True), groups.argmin(dim=1, keepdim=True)
        differ = (groups.amax(1, keepdim=True) > groups.amin(1, keepdim=True)).float()
        return (
            torch.zeros_like(groups, dtype=torch.float32)
            .scatter(1, best, differ)
            .scatter(1, worst, -differ)
            .flatten()
        )

    def steps(self, samples: Samples, learner: Learner) -> Iterator[tuple[Loss, list[Pairs]]]:
        return ForwardProcess.steps(self, samples, learner)  # AWM's would move an older policy

    def pairs(self, samples: Samples, samples_per_step: int, generator: torch.Generator) -> list[Pairs]:
        """Return each optimizer step's (group, timestep) pairs: the best as "rows", and the "worst"."""
        size = self.config.sample_group_size
        groups = samples.advantages.cpu().view(-1, size)  # (groups, G)
        firsts = torch.arange(len(groups)) * size
        # The same sample if all rewards are equal.
        best, worst = firsts + groups.argmax(dim=1), firsts + groups.argmin(dim=1)
        shape = len(groups), samples.trajectory.log_probs.shape[1]
        steps = shuffled_pairs(shape, self.num_train_timesteps, samples_per_step // size, generator)
        return [{**step, "rows": best[step["rows"]], "worst": worst[step["rows"]]} for step in steps]

    def loss(self, samples: Samples, learner: Learner, denoiser: Any, pairs: Pairs) -> LossAndStats:
        best, worst = self.example(samples, pairs), self.example(samples, pairs, rows="worst")
        with torch.no_grad(), learner.reference() as reference:
            before = best.error(reference) - worst.error(reference)  # (N,)
        change = best.error(denoiser) - worst.error(denoiser) - before  # below 0 if the best has gained
        loss = -F.logsigmoid(-self.beta / 2 * change)
        return loss.mean(), {"preferred": (change.detach() < 0).float().mean()}
