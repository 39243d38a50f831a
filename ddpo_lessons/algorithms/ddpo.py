"""Lesson 06: DDPO on one page (Black et al. 2023, arXiv 2305.13301, section 4.3, DDPO-IS).

Denoising is a Markov decision process: the state is (prompt, t, x_t), the action is x_{t-1}, and the policy
is the Gaussian of a DDIM step, whose mean the denoiser predicts and whose σ_t the schedule fixes (lesson 03):

    log p(x_{t-1} | x_t) = -(x_{t-1} - mean)² / (2 σ_t²) - log σ_t - log(2π) / 2, averaged over the latent

An epoch has four parts:

1. Sample: `rollout.sample_trajectory` runs the current policy from B first states, with T actions each, and
   records states and log-probs. The prompts' embeddings and guidance are part of the policy.
2. Score: the user's reward function maps the final images and their prompts to one number per image.
3. Weight: `DDPO.advantages` compares each reward with similar ones; all actions of a sample get its
   advantage.
4. Step: `DDPO.steps` takes the recorded actions in random order and yields optimizer steps on PPO's clipped
   surrogate (lesson 04), with ρ = p(action now) / p(action when it was sampled):

    loss = mean over actions of max(-A ρ, -A clip(ρ, 1 - ε, 1 + ε))

`trainer.py` calls parts 1 to 4 in this order, and nothing else that it does changes a weight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from ddpo_lessons.advantages import PerPromptStatTracker, normalize, normalize_groups
from ddpo_lessons.algorithms.algorithm import (
    Algorithm,
    Learner,
    Loss,
    LossAndStats,
    Pairs,
    Samples,
    check_pairs,
)
from ddpo_lessons.batching import minibatches, shuffle_samples, shuffle_time
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.ddim import DDIMStep, gaussian_kl
from ddpo_lessons.models import Family
from ddpo_lessons.ppo import check_finite, clipped_surrogate
from ddpo_lessons.rollout import Trajectory


class DDPO(Algorithm):
    """Denoising diffusion policy optimization (DDPO)."""

    name = "ddpo"
    tracker: PerPromptStatTracker | None = None

    def begin(self, config: DDPOConfig, family: Family, num_train_timesteps: int) -> None:
        """Prepare for a run, with a tracker if statistics per prompt are set."""
        self.tracker = None
        if config.per_prompt_stat_tracking:
            self.tracker = PerPromptStatTracker(
                config.per_prompt_stat_tracking_buffer_size, config.per_prompt_stat_tracking_min_count
            )
        super().begin(config, family, num_train_timesteps)

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any]) -> torch.Tensor:
        """Return (reward - mean) / std for all samples of the epoch (N,), of all processes.

        Depending on the config, mean and std are those of the recent rewards of the prompt (or id), of the
        sample's group, or of the epoch. `keys` identify prompts or ids.
        """
        if self.tracker is not None:
            return self.tracker.update(keys, rewards)
        if self.config.sample_group_size > 1:
            return normalize_groups(rewards, self.config.sample_group_size)
        return normalize(rewards)

    def steps(self, samples: Samples, learner: Learner) -> Iterator[tuple[Loss, list[Pairs]]]:
        """Yield the optimizer steps of an epoch, each on all kept actions of `samples_per_step` samples.

        The trainer takes a step when it is yielded, so the weights change between two yields.
        """
        check_finite(old_log_prob=samples.trajectory.log_probs, advantages=samples.advantages)
        if self.config.mixed_precision != "no":
            samples = self.rescore(samples, learner)
        for generator in self.shuffles(samples):  # one for each inner epoch
            for groups in self.groups(samples, learner, generator):
                yield partial(self.loss, samples, learner), groups

    def groups(self, samples: Samples, learner: Learner, generator: torch.Generator) -> Iterator[list[Pairs]]:
        """Yield the pairs of each optimizer step of an inner epoch, in groups that fit into memory."""
        config, trajectory = self.config, samples.trajectory
        samples_per_step = config.train_batch_size * config.train_gradient_accumulation_steps
        shape = trajectory.log_probs.shape
        for pairs in shuffled_pairs(shape, self.num_train_timesteps, samples_per_step, generator):
            yield [
                share_predictions(part, trajectory.group_size, trajectory.branches)
                for part in learner.split(pairs)
            ]

    def rescore(self, samples: Samples, learner: Learner) -> Samples:
        """Compute the old log-probs again with the forward passes of training.

        In bf16 and fp16 a network rounds differently in batches of different sizes, and a log-prob divides
        the difference by a step's small σ. With Stable Diffusion's shapes the first ratio would then differ
        from 1 by more than the clip range. Therefore both log-probs of a ratio use forward passes of the same
        size.
        """
        trajectory, reduction = samples.trajectory, self.config.log_prob_reduction

        def score(denoiser: Any, pairs: Pairs) -> torch.Tensor:
            return replay(self.family, denoiser, trajectory, pairs, reduction).log_prob  # (P,)

        log_probs = trajectory.log_probs.clone()  # (B, T), unchanged for actions that are not trained on
        steps = self.groups(samples, learner, next(self.shuffles(samples)))
        groups = [pairs for step in steps for pairs in step]  # all at once, so that a GPU waits once
        rows, columns = (torch.cat([pairs[name] for pairs in groups]) for name in ("rows", "columns"))
        log_probs[rows, columns] = torch.cat(learner.evaluate(score, groups))
        new = replace(trajectory, log_probs=log_probs)
        return replace(samples, trajectory=new, sampled_log_probs=trajectory.log_probs)

    def weights(self, samples: Samples, pairs: Pairs) -> torch.Tensor:
        """Return the advantages (N,) of recorded actions, those of their samples if these are (B,)."""
        rows, advantages = pairs["rows"], samples.advantages
        return advantages[rows] if advantages.ndim == 1 else advantages[rows, pairs["columns"]]

    def loss(self, samples: Samples, learner: Learner, denoiser: Any, pairs: Pairs) -> LossAndStats:
        """Replay recorded actions; return PPO's loss, with a KL penalty if it is set, and statistics."""
        config, trajectory = self.config, samples.trajectory
        new = replay(self.family, denoiser, trajectory, pairs, config.log_prob_reduction)
        rows, columns = pairs["rows"], pairs["columns"]
        loss, stats = clipped_surrogate(
            new.log_prob,
            trajectory.log_probs[rows, columns],
            self.weights(samples, pairs),
            config.train_clip_range,
            config.train_adv_clip_max,
        )
        record = {name: getattr(stats, name) for name in ("approx_kl", "kl_k3", "clip_fraction")}
        if config.train_kl_coefficient > 0:  # to the policy before training, not to the behavior policy
            with torch.no_grad(), learner.reference() as reference:
                start = replay(self.family, reference, trajectory, pairs, config.log_prob_reduction)
            kl = self.kl(new, start, trajectory, pairs).mean()
            loss = loss + config.train_kl_coefficient * kl
            record["kl_reference"] = kl.detach()
        if samples.sampled_log_probs is not None:
            error = trajectory.log_probs[rows, columns] - samples.sampled_log_probs[rows, columns]
            record["max_sampling_error"] = error.expm1().abs().max()
        # Before the first step of an epoch both policies are equal, and this is 0 up to rounding.
        return loss, {**record, "max_ratio_error": (stats.ratio - 1).abs().max()}

    def kl(self, new: DDIMStep, reference: DDIMStep, trajectory: Trajectory, pairs: Pairs) -> torch.Tensor:
        """Return the KL from these steps to those of the policy before training, (N,)."""
        return gaussian_kl(new, reference, self.config.log_prob_reduction)

    def state_dict(self) -> Any:
        return None if self.tracker is None else self.tracker.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if self.tracker is not None:
            self.tracker.load_state_dict(state)


def shuffled_pairs(
    shape: tuple[int, ...], num_train_timesteps: int, samples_per_step: int, generator: torch.Generator
) -> list[Pairs]:
    """Return the (sample, action) pairs of each optimizer step, with samples and their actions shuffled.

    Of its T actions each of B samples keeps K = `num_train_timesteps`, which the shuffle chooses. Each of the
    B / S steps, with S = `samples_per_step`, has {"rows": (S K,), "columns": (S K,)}: the numbers of samples
    and of their actions.
    """
    rows, columns = torch.meshgrid(*map(torch.arange, shape), indexing="ij")  # (B, T) each
    shuffled = shuffle_samples({"rows": rows, "columns": columns}, generator)
    shuffled = shuffle_time(shuffled, ["columns"], generator)  # along a row, "rows" is one number
    kept = {name: numbers[:, :num_train_timesteps] for name, numbers in shuffled.items()}
    steps = minibatches(kept, samples_per_step)
    return [{name: numbers.flatten() for name, numbers in step.items()} for step in steps]


def replay(
    family: Family,
    denoiser: Callable[..., Any],
    trajectory: Trajectory,
    pairs: Pairs,
    reduction: Literal["mean", "sum"],
) -> DDIMStep:
    """Compute log_prob (N,), mean and std of N recorded actions under a denoiser.

    The family's `predict` makes all predictions, in sampling and here. Pairs that do not come from
    `share_predictions` are passed to it first. `reduction` is that of sampling. Raises a ValueError for pairs
    that the trajectory does not have.
    """
    check_pairs(pairs, trajectory.log_probs.shape)
    if "distinct" not in pairs:
        on_host = {name: pairs[name].cpu() for name in ("rows", "columns")}
        pairs = share_predictions(on_host, trajectory.group_size, trajectory.branches)
    rows, columns, distinct = pairs["rows"], pairs["columns"], pairs["distinct"]
    latents, timesteps = trajectory.latents[rows, columns], trajectory.timesteps[rows, columns]
    conditioning = {name: value[rows[distinct]] for name, value in trajectory.conditioning.items()}
    output = family.predict(
        denoiser, latents[distinct], timesteps[distinct], conditioning, trajectory.guidance_scale
    )[pairs["inverse"]]
    next_latents = trajectory.latents[rows, columns + 1]  # (N, C, h, w): the actions
    return trajectory.schedule.step(output, timesteps, latents, prev_sample=next_latents, reduction=reduction)


def share_predictions(pairs: Pairs, group_size: int, branches: int | None = None) -> Pairs:
    """Find pairs with the same state, because one prediction is enough for all of them.

    The rollouts of a group start in the same state, so their first actions share a prediction. Group size and
    branches are those of `Trajectory`. The function only saves forward passes; it changes no loss and no
    gradient. The N pairs get "distinct" (D,), the positions of pairs with different states, and "inverse"
    (N,): pair n has the state of pair distinct[inverse[n]].
    """
    rows, columns = pairs["rows"], pairs["columns"]
    if group_size == 1:
        return {**pairs, "distinct": torch.arange(len(rows)), "inverse": torch.arange(len(rows))}
    sizes = [group_size]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // (branches or group_size))
    alike = torch.tensor(sizes)[columns.clamp(max=len(sizes) - 1)]  # consecutive rollouts in the same state
    owners = rows // alike * alike  # the first rollout with this state
    states, inverse = torch.stack([owners, columns]).unique(dim=1, return_inverse=True)  # (2, D), (N,)
    distinct = torch.zeros(states.shape[1], dtype=torch.long)
    distinct.scatter_(0, inverse, torch.arange(len(rows)))  # any pair of a state will do
    return {**pairs, "distinct": distinct, "inverse": inverse}
