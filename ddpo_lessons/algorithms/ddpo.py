"""Lesson 06: DDPO on one page (Black et al. 2023, arXiv 2305.13301, algorithm 1, importance sampling).

Denoising is a Markov decision process: the state is (prompt, t, x_t), the action is x_{t-1}, and the policy
is the Gaussian of a DDIM step. Only the last state is rewarded. An epoch

1. samples: plays the process with the policy as it is, and records every action's log-prob (`rollout.play`);
2. scores: calls the user's reward function on the images, and on nothing else;
3. turns rewards into advantages: which samples were better than their like (`DDPO.advantages`);
4. updates: goes through the recorded actions in random order, replays them under the policy as it has become,
   and takes optimizer steps on PPO's clipped surrogate (`DDPO.update`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ddpo_lessons.advantages import PerPromptStatTracker, normalize, normalize_groups
from ddpo_lessons.algorithms.base import Algorithm, Learner, Pairs, Samples
from ddpo_lessons.batching import minibatches, shuffle_samples, shuffle_time
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.ddim import DDIMStep, gaussian_kl
from ddpo_lessons.families import Family
from ddpo_lessons.ppo import check_finite, clipped_surrogate
from ddpo_lessons.rollout import Trajectory, sample_seed


class DDPO(Algorithm):
    """Denoising diffusion policy optimisation."""

    name = "ddpo"
    tracker: PerPromptStatTracker | None

    def begin(self, config: DDPOConfig, family: Family, num_train_timesteps: int) -> None:
        """Get to know a run; with per-prompt statistics, begin to keep them."""
        super().begin(config, family, num_train_timesteps)
        self.tracker = None
        if config.per_prompt_stat_tracking:
            self.tracker = PerPromptStatTracker(
                config.per_prompt_stat_tracking_buffer_size, config.per_prompt_stat_tracking_min_count
            )

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any]) -> torch.Tensor:
        """Compare each reward (N,) with its prompt's, its group's or the epoch's; in standard deviations."""
        if self.tracker is not None:
            return self.tracker.update(keys, rewards)
        if self.config.sample_group_size > 1:
            return normalize_groups(rewards, self.config.sample_group_size)
        return normalize(rewards)

    def update(self, samples: Samples, learner: Learner) -> None:
        """Take the optimizer steps of an epoch over shuffled (sample, timestep) pairs."""
        config, trajectory = self.config, samples.trajectory
        check_finite(old_log_prob=trajectory.log_probs, advantages=samples.advantages)
        samples_per_step = config.train_batch_size * config.train_gradient_accumulation_steps
        for inner_epoch in range(config.train_num_inner_epochs):
            seed = sample_seed(config.seed, samples.epoch, 2, inner_epoch, samples.process)
            generator = torch.Generator().manual_seed(seed)
            for pairs in shuffled_pairs(
                trajectory.log_probs.shape, self.num_train_timesteps, samples_per_step, generator
            ):
                groups = [share_predictions(group, trajectory.group_size) for group in learner.split(pairs)]
                learner.step(partial(self.loss, samples, learner), groups)

    def loss(
        self, samples: Samples, learner: Learner, denoiser: Callable[..., Any], pairs: Pairs
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Replay some recorded actions; return PPO's loss, with a KL penalty if asked for, and statistics."""
        config, trajectory = self.config, samples.trajectory
        new = replay(self.family, denoiser, trajectory, pairs, config.log_prob_reduction)
        loss, stats = clipped_surrogate(
            new.log_prob,
            trajectory.log_probs[pairs["rows"], pairs["columns"]],
            samples.advantages[pairs["rows"]],
            config.train_clip_range,
            config.train_adv_clip_max,
        )
        means = {name: getattr(stats, name) for name in ("approx_kl", "kl_k3", "clip_fraction")}
        if config.train_kl_coefficient > 0:
            with torch.no_grad(), learner.reference() as before:
                old = replay(self.family, before, trajectory, pairs, config.log_prob_reduction)
            kl = gaussian_kl(new, old, config.log_prob_reduction).mean()
            loss = loss + config.train_kl_coefficient * kl
            means["kl_reference"] = kl.detach()
        return loss, {**means, "max_ratio_error": (stats.ratio - 1).abs().max()}

    def state_dict(self) -> Any:
        """Return the statistics of prompts."""
        return None if self.tracker is None else self.tracker.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Take them back."""
        if self.tracker is not None:
            self.tracker.load_state_dict(state)


def shuffled_pairs(
    shape: tuple[int, ...], num_train_timesteps: int, samples_per_step: int, generator: torch.Generator
) -> list[Pairs]:
    """Return the (sample, timestep) pairs of each optimizer step, in random order (lessons 01 and 02).

    Args:
        shape: (B, T) of the actions.
        num_train_timesteps: so many of a sample's T actions are trained on.
        samples_per_step: of an optimizer step; divides B.
        generator: decides the orders.

    Returns:
        For each step {"rows": (N,), "columns": (N,)}, which index samples and their actions.
    """
    rows, columns = torch.meshgrid(*map(torch.arange, shape), indexing="ij")  # (B, T) each
    shuffled = shuffle_samples({"rows": rows, "columns": columns}, generator)
    shuffled = shuffle_time(shuffled, ["columns"], generator)
    kept = {name: numbers[:, :num_train_timesteps] for name, numbers in shuffled.items()}
    steps = minibatches(kept, samples_per_step)
    return [{name: numbers.flatten() for name, numbers in step.items()} for step in steps]


def share_predictions(pairs: Pairs, group_size: int) -> Pairs:
    """Find the pairs (N,) whose states differ, "distinct" (D,), and for each pair its state, "places" (N,).

    The rollouts of a group begin in one state, so one prediction replays all their first actions.
    """
    rows, columns = pairs["rows"], pairs["columns"]
    if group_size == 1:
        return {**pairs, "distinct": torch.arange(len(rows)), "places": torch.arange(len(rows))}
    owners = torch.where(columns == 0, rows // group_size * group_size, rows)
    states, places = torch.stack([owners, columns]).unique(dim=1, return_inverse=True)  # (2, D), (N,)
    distinct = torch.zeros(states.shape[1], dtype=torch.long)
    return {**pairs, "distinct": distinct.scatter_(0, places, torch.arange(len(rows))), "places": places}


def replay(
    family: Family, denoiser: Callable[..., Any], trajectory: Trajectory, pairs: Pairs, reduction: Any
) -> DDIMStep:
    """Score recorded actions under a denoiser (lesson 03): log_prob (N,), mean and std of each.

    Args:
        family: whose `predict` sampled, and predicts here.
        denoiser: the policy as it has become, or another one.
        trajectory: what was recorded.
        pairs: of `share_predictions`.
        reduction: as in sampling.

    Returns:
        The steps, with gradient.
    """
    rows, columns, distinct = pairs["rows"], pairs["columns"], pairs["distinct"]
    latents, timesteps = trajectory.latents[rows, columns], trajectory.timesteps[rows, columns]
    told = {name: value[rows[distinct]] for name, value in trajectory.conditioning.items()}
    output = family.predict(
        denoiser, latents[distinct], timesteps[distinct], told, trajectory.guidance_scale
    )[pairs["places"]]
    outcome = trajectory.latents[rows, columns + 1]  # (N, C, h, w)
    return trajectory.schedule.step(output, timesteps, latents, prev_sample=outcome, reduction=reduction)
