"""Lesson 04: compute the clipped surrogate of PPO and DDPO, and the statistics to watch."""

import math
from typing import NamedTuple

import torch


class PPOStats(NamedTuple):
    """Statistics of the distance from the policy that sampled; all float32 and detached."""

    ratio: torch.Tensor  # (N,) pi_new / pi_old
    approx_kl: torch.Tensor  # () mean of (log ratio)^2 / 2, the estimator that DDPO code logs
    kl_k3: torch.Tensor  # () mean of ratio - 1 - log ratio, never negative
    clip_fraction: torch.Tensor  # () fraction of pairs with |ratio - 1| above the clip range


def clipped_surrogate(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    clip_range: float,
    adv_clip_max: float = 5.0,
) -> tuple[torch.Tensor, PPOStats]:
    r"""Compute PPO's clipped objective as a loss to minimize.

    With ``ρ = exp(log_prob - old_log_prob)`` and ``A`` the advantage clamped to ±adv_clip_max::

        loss = mean(max(-A ρ, -A clip(ρ, 1 - clip_range, 1 + clip_range)))

    Source: PPO (Schulman et al. 2017, arXiv 1707.06347, formula 7), for denoising steps DDPO
    (Black et al. 2023, arXiv 2305.13301, section 4.3). ``kl_k3`` estimates KL(old || new) from
    samples of the old policy (Schulman 2020, "Approximating KL divergence", estimator k3). It is unbiased
    if the log-probs are those of whole actions. If they are means over the latents, ρ is not an importance
    weight, and ``kl_k3``, like ``approx_kl``, only compares optimizer steps at one size of the latents.

    The loss is the mean over the pairs of this call. To split an optimizer step into groups, weight each
    group's loss by its fraction of the pairs, because the sum is then the mean over all pairs.

    Args:
        log_prob: log-probs of the recorded actions under the policy in training, (N,), nats.
        old_log_prob: log-probs of the same actions when they were sampled, (N,), nats.
        advantages: one per pair, (N,), in standard deviations of the reward.
        clip_range: distance of the ratio from 1 at which the gradient stops, above 0. It is on
            the scale of the log-probs: DDPO's 1e-4 belongs to log-probs averaged over the latents.
        adv_clip_max: maximum magnitude of the advantages, above 0.

    Returns:
        The loss, a float32 scalar, and the statistics.

    Raises:
        ValueError: shapes differ or are empty, or clip_range or adv_clip_max is not above 0. Values are not
            checked here, because a GPU would wait for it; `check_finite` does this once per epoch.
    """
    if not log_prob.shape == old_log_prob.shape == advantages.shape or log_prob.numel() == 0:
        raise ValueError(
            "log_prob, old_log_prob and advantages must have the same shape and not be empty, got "
            f"{tuple(log_prob.shape)}, {tuple(old_log_prob.shape)} and {tuple(advantages.shape)}"
        )
    for name, bound in (("clip_range", clip_range), ("adv_clip_max", adv_clip_max)):
        if not (math.isfinite(bound) and bound > 0):
            raise ValueError(f"{name}={bound} must be a finite number above 0")

    log_ratio = log_prob.float() - old_log_prob.detach().float()  # (N,)
    advantages = advantages.detach().float().clamp(-adv_clip_max, adv_clip_max)  # (N,)
    loss = clipped_loss(log_ratio.exp(), advantages, clip_range).mean()
    return loss, ratio_stats(log_ratio.detach(), clip_range)


def check_finite(**tensors: torch.Tensor) -> None:
    """Raise a ValueError for NaN and infinity, which would spoil the whole batch.

    The error names the tensor and the likely cause: log-probs of a step without noise, or weights that were
    divided by a standard deviation of 0.
    """
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            cause = "does it divide by the deviation of a group of one sample, or of equal rewards?"
            if "log_prob" in name:
                cause = "a step without noise has no density: leave such steps out of the batch"
            raise ValueError(f"{name} holds NaN or inf: {cause}")


def clipped_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip_range: float) -> torch.Tensor:
    """Return the clipped loss of each pair: ``max(-A ρ, -A clip(ρ, 1 - clip_range, 1 + clip_range))``.

    Ratios ρ = pi_new / pi_old and advantages have the same shape. The maximum is the pessimistic one of the
    two terms: clipping can remove a gain, but it never hides a loss.
    """
    clipped_ratio = ratio.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(-advantages * ratio, -advantages * clipped_ratio)


def ratio_stats(log_ratio: torch.Tensor, clip_range: float) -> PPOStats:
    """Return the statistics of ratios, see `PPOStats`.

    `log_ratio` is log pi_new - log pi_old of actions that the old policy sampled, (N,), detached. The clip
    fraction counts every ratio outside the range, also those for which the pessimistic loss keeps its
    gradient.
    """
    ratio = log_ratio.exp()
    return PPOStats(
        ratio=ratio,
        approx_kl=0.5 * log_ratio.square().mean(),
        # expm1 keeps the digits that ratio - 1 would lose, because ratios are near 1.
        kl_k3=(torch.expm1(log_ratio) - log_ratio).mean(),
        clip_fraction=((ratio - 1).abs() > clip_range).float().mean(),
    )
