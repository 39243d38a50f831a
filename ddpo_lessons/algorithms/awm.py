"""Lesson 10: advantage-weighted matching (AWM, Xue et al. 2025, arXiv 2509.25050).

RWR trains on the policy's own samples with the loss of pre-training, weighted by their rewards. AWM uses
advantages as weights, which may be negative, so bad samples are pushed away. The loss of pre-training ℓ at a
noise level σ̄ in [0, 1] and noise ε takes the place of a log-probability:

    ℓ = mean((output - target)²),    "log p" = -σ̄^k ℓ,    ρ = exp("log p" now - "log p" when sampling)

with the same σ̄ and ε in both. While the policy that sampled is still the newest one, ρ = 1 and the gradient
is that of A σ̄^k ℓ without a constraint. PPO's clipping acts only from the second optimizer step of an epoch
on. AWM's authors take one step per epoch, and constrain it by a penalty to an EMA policy,

    ema_kl_coefficient mean((output - output of the EMA policy)²)

where after each step EMA = decay EMA + (1 - decay) newest, with decay = min(decay_rate steps, max_decay). The
loss does not depend on how a sample was made.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ddpo_lessons.advantages import normalize, normalize_groups
from ddpo_lessons.algorithms.algorithm import Learner, Loss, LossAndStats, Pairs, Samples
from ddpo_lessons.algorithms.forward_process import Example, ForwardProcess
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.ppo import clipped_surrogate

TINY = 1e-10  # as the authors have it; keeps the gradient of a power finite at 0


class AWM(ForwardProcess):
    """Train by advantage-weighted matching on as many examples as DDPO has actions.

    Flow models are sampled with their ODE. Advantages are relative to a sample's group, if there are groups,
    or to the epoch. Guidance is used in sampling, and not in training. `train_kl_coefficient` χ adds χ
    mean((output - output before training)²). `time_power`, k, gives noisy examples a larger weight (t is
    between 0 and 1). `error_power`, p, replaces ℓ by ((ℓ + 1e-10)^p - 1e-10^p) / p; below 1, an example with
    a large error has less influence. `ema_kl_coefficient`, `decay_rate` and `max_decay` are explained above;
    with an `ema_kl_coefficient` an epoch has one optimizer step and no clip range. `visited_states` is that
    of `ForwardProcess`. Raises a ValueError for numbers that do not fit, and for settings without effect.

    The authors' runs: time_power=1, error_power=0.25 and, for `train_adv_clip_max` = 5, ema_kl_coefficient=5,
    which is their `ema_beta` = 1 for advantages scaled to [-1, 1].
    """

    name = "awm"
    unused: ClassVar[tuple[str, ...]] = ("per_prompt_stat_tracking", "log_prob_reduction")
    keeps_old = True
    shares_starts = False
    follows_ode = True
    ema_kl_coefficient = 0.0  # also for subclasses

    def __init__(
        self,
        time_power: float = 2.0,
        error_power: float = 1.0,
        ema_kl_coefficient: float = 0.0,
        decay_rate: float = 0.001,
        max_decay: float = 0.3,
        visited_states: bool = False,
    ) -> None:
        super().__init__(visited_states)
        if not time_power >= 0:
            raise ValueError(f"time_power={time_power} must not be negative; 0 weighs all times alike")
        if not 0 < error_power < float("inf"):
            raise ValueError(f"error_power={error_power} must be a number above 0; 1 changes nothing")
        if not 0 <= ema_kl_coefficient < float("inf"):
            raise ValueError(f"ema_kl_coefficient={ema_kl_coefficient} must be a number, 0 or more")
        decays = f"decay_rate={decay_rate}, max_decay={max_decay}"
        if ema_kl_coefficient == 0 and (decay_rate, max_decay) != (0.001, 0.3):
            raise ValueError(f"{decays} do nothing without an ema_kl_coefficient: set it too")
        if ema_kl_coefficient > 0 and not (decay_rate > 0 and 0 < max_decay < 1):
            raise ValueError(f"{decays}: an EMA policy needs a rate above 0 and a largest decay in (0, 1)")
        self.time_power, self.error_power = time_power, error_power
        self.ema_kl_coefficient = ema_kl_coefficient
        self.decay_rate, self.max_decay = decay_rate, max_decay

    def check(self, config: DDPOConfig) -> None:
        """Raise a ValueError for several optimizer steps, or a clip range, with an EMA policy."""
        super().check(config)
        if self.ema_kl_coefficient and config.epoch_plan(1).optimizer_steps > 1:
            raise ValueError(
                "ema_kl_coefficient is for one optimizer step an epoch: let train_batch_size * "
                "train_gradient_accumulation_steps be all samples, and train_num_inner_epochs 1"
            )
        if self.ema_kl_coefficient and config.train_clip_range != DDPOConfig.train_clip_range:
            raise ValueError(
                f"train_clip_range={config.train_clip_range} does nothing with one optimizer step an epoch, "
                "whose ratios are 1: leave it out"
            )

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any]) -> torch.Tensor:
        """Return rewards minus the mean of the group or the epoch, over the std of all differences (N,)."""
        size = self.config.sample_group_size
        return normalize_groups(rewards, size) if size > 1 else normalize(rewards)

    def steps(self, samples: Samples, learner: Learner) -> Iterator[tuple[Loss, list[Pairs]]]:
        """Yield the optimizer steps of an epoch; then update the old or EMA policy."""
        if self.ema_kl_coefficient == 0:
            learner.update_old_policy(decay=0.0)
        yield from super().steps(samples, learner)
        if self.ema_kl_coefficient > 0:
            learner.update_old_policy(min(self.decay_rate * (samples.first_step + 1), self.max_decay))

    def loss(self, samples: Samples, learner: Learner, denoiser: Any, pairs: Pairs) -> LossAndStats:
        config, example = self.config, self.example(samples, pairs)
        with torch.no_grad(), learner.old_policy() as old_policy:  # before the new one, which has a gradient
            before = example.predict(old_policy)  # (N, C, h, w); with ema_kl_coefficient, of the EMA policy
        output = example.predict(denoiser)  # (N, C, h, w)
        new, advantages = self.log_prob(example, output), samples.advantages[pairs["rows"]]
        old = new.detach() if self.ema_kl_coefficient else self.log_prob(example, before)
        loss, stats = clipped_surrogate(
            new, old, advantages, config.train_clip_range, config.train_adv_clip_max
        )
        penalty, record = self.penalty(example, learner, output)
        record["clip_fraction"] = stats.clip_fraction
        if self.ema_kl_coefficient:
            moved = (output - before).square().mean()
            penalty, record["distance_old"] = penalty + self.ema_kl_coefficient * moved, moved.detach()
        return loss + penalty, {**record, "max_ratio_error": (stats.ratio - 1).abs().max()}

    def log_prob(self, example: Example, output: torch.Tensor) -> torch.Tensor:
        """Return the substitute for log-probabilities, (N,)."""
        error, power = example.error_of(output), self.error_power
        if power != 1:
            error = ((error + TINY) ** power - TINY**power) / power
        return -(example.times**self.time_power) * error

    def penalty(
        self, example: Example, learner: Learner, output: torch.Tensor
    ) -> tuple[torch.Tensor | float, dict[str, torch.Tensor]]:
        """Return the penalty on the change of outputs since before training, and its statistic."""
        if self.config.train_kl_coefficient == 0:
            return 0.0, {}
        with torch.no_grad(), learner.reference() as reference:
            before = example.predict(reference)
        distance = (output - before).square().mean()
        return self.config.train_kl_coefficient * distance, {"distance_reference": distance.detach()}
