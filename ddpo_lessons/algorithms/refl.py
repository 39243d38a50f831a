"""Lesson 11: ReFL (Xu et al. 2023, arXiv 2304.05977), the gradient through one prediction.

Late in sampling, the model's prediction of the clean image is good enough to be scored. ReFL stops at a
random late step, predicts once with a gradient, decodes x̂₀, and raises the reward:

    loss = mean max(0, margin - r(decode(x̂₀)))

One prediction needs as much memory as DRaFT-1, but it trains earlier steps.
"""

import math
from typing import Any

from ddpo_lessons.algorithms.algorithm import Learner, LossAndStats, Pairs, Samples
from ddpo_lessons.algorithms.draft import DRaFT, differentiable_rewards


class ReFL(DRaFT):
    """Train by reward feedback learning; sampling and optimizer steps are those of `DRaFT`.

    One of the `last_steps` is chosen for every optimizer step. A reward above `margin` has no gradient;
    infinity sets no limit. Raises a ValueError for values that do not fit.
    """

    name = "refl"
    unused = (*DRaFT.unused, "train_kl_coefficient")

    def __init__(self, last_steps: int = 3, margin: float = float("inf")) -> None:
        super().__init__(last_steps, draws_steps=True)
        if math.isnan(margin):
            raise ValueError(f"margin={margin} must be a number; inf pushes every reward up")
        self.margin = margin

    def loss(
        self, samples: Samples, learner: Learner, steps: int, denoiser: Any, pairs: Pairs
    ) -> LossAndStats:
        """Predict once from the states `steps` before the end; return the loss of the predicted images."""
        trajectory, rows, family = samples.trajectory, pairs["rows"], self.family
        number = len(trajectory.schedule.stds) - steps
        conditioning = {name: value[rows] for name, value in trajectory.conditioning.items()}
        latents = trajectory.latents[rows, number]  # (N, C, h, w)
        timesteps = trajectory.schedule.timesteps[number].expand(len(rows))  # (N,)
        output = family.predict(denoiser, latents, timesteps, conditioning, trajectory.guidance_scale)
        clean = family.predict_clean(latents, output, timesteps)
        rewards = differentiable_rewards(samples, family.decode_with_gradient(clean), rows)
        shortfall = -rewards if self.margin == float("inf") else (self.margin - rewards).relu()
        return shortfall.mean(), {"reward": rewards.detach().mean()}

    def identity(self) -> dict[str, Any]:
        """Return the settings, with text for infinity, which JSON does not have."""
        return {**super().identity(), "margin": str(self.margin)}
