"""Lesson 05: compute the parts of PPO for text, from logits to the loss.

A token is an action. The logits at position t belong to the token at t + 1, so everything per action lives on
the L - 1 *places* between tokens: place t is where the policy had read tokens 0..t and chose token t + 1. A
mask (B, L - 1) says at which places it really chose; queries and padding are no choices. Advantages,
whitening and the clipped loss of a pair come from the lessons before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ddpo_lessons.ppo import clipped_loss

KLEstimator = Literal["kl", "abs", "mse", "full"]


# ------------------------------------------------------------------------------------- masks, log-probs
def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Number the tokens of each row of a mask (B, L) from 0, with 0 for padding; (B, L)."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)


def action_mask(attention_mask: torch.Tensor, query_lengths: torch.Tensor) -> torch.Tensor:
    """Mark the positions at which the policy chose a token, (B, L - 1) bool.

    The n-th token of a row is an action if n is above the row's query length, (B,); its place is one to the
    left. Padding, where the mask (B, L) is 0, may be left, right or both. A ValueError refuses an empty
    query: its first action would have no place.
    """
    if (query_lengths < 1).any():
        raise ValueError("every query needs at least one token: the first action has to be chosen somewhere")
    number = attention_mask.cumsum(1)  # (B, L) the first token of a row is number 1
    is_action = attention_mask.bool() & (number > query_lengths[:, None])  # (B, L)
    return is_action[:, 1:]


def token_log_probs(logits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Compute the log-prob of each token except the first, given the tokens before it.

    ``log_probs[b, t] = log softmax(logits[b, t])[input_ids[b, t + 1]]``: of logits (B, L, V) and ids (B, L),
    (B, L - 1) float32 in nats, not masked.
    """
    log_probs = logits[:, :-1].float().log_softmax(dim=-1)  # (B, L - 1, V)
    return log_probs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)


def entropy_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Compute the entropy of the distribution of logits (..., V): (...), nats, float32."""
    log_probs = logits.float().log_softmax(dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average the entries where the mask is true; raise a ValueError if there are none."""
    if not mask.any():
        raise ValueError("the mask is false everywhere, and the mean of nothing is undefined")
    return values[mask.bool()].mean()


# ------------------------------------------------------------------------------------------- rewards
def kl_estimate(
    logits: torch.Tensor, ref_logits: torch.Tensor, input_ids: torch.Tensor, estimator: KLEstimator = "kl"
) -> torch.Tensor:
    """Estimate the KL to the reference at each position, (B, L - 1) in nats.

    With d = log π - log π_ref of the recorded token, `kl` is d, which is right on average but negative for
    some tokens; `abs` is its absolute value and `mse` is d² / 2, which are never negative; `full` is the
    exact KL(π || π_ref) of the place, a sum over the vocabulary. The two `logits` are (B, L, V), and the ids
    are (B, L).
    Source: the four kinds of `_kl_penalty` in TRL 0.11; on `mse` see http://joschu.net/blog/kl-approx.html.
    """
    if estimator == "full":
        new, ref = (x[:, :-1].float().log_softmax(-1) for x in (logits, ref_logits))  # (B, L - 1, V)
        return (new.exp() * (new - ref)).sum(-1)
    difference = token_log_probs(logits, input_ids) - token_log_probs(ref_logits, input_ids)  # (B, L - 1)
    if estimator == "kl":
        return difference
    return difference.abs() if estimator == "abs" else 0.5 * difference.square()


def adapt_kl_coef(kl_coef: float, kl: float, target: float, gain: float = 0.1) -> float:
    """Return the next KL coefficient, which moves the KL of a text toward a target.

    ``kl_coef * (1 + gain * clip(kl / target - 1, -0.2, 0.2))``: at most 2% more or less with a gain of 0.1.
    Source: Ziegler et al. 2019, arXiv 1909.08593, section 2.2, where the gain is K_β. `kl` and `target` are
    in nats per text.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + gain * error)


def shape_rewards(
    scores: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, kl_coef: float = 0.1
) -> torch.Tensor:
    """Compute the reward of every action: ``-kl_coef * kl``, plus the score for the last one.

    Source: Ziegler et al. 2019, arXiv 1909.08593, formula 2, spread over tokens as in TRL. `scores` (B,) are
    of whole texts. `kl` (B, T) is each sampled token's log-prob under the policy minus that under the
    reference, in nats: it may be negative, is right on average, and sums to the whole text's log ratio.
    `kl_coef` is in units of the score per nat. The rewards (B, T) have no gradient, and are 0 where the mask
    of actions (B, T) is false; a ValueError names rows without an action.
    """
    mask = mask.bool()
    if not mask.any(dim=1).all():
        rows = (~mask.any(dim=1)).nonzero().flatten().tolist()
        raise ValueError(f"rows {rows} have no action: a text needs at least one sampled token")
    rewards = (-kl_coef * kl.detach()).masked_fill(~mask, 0)
    number = torch.arange(mask.shape[1], device=mask.device)  # (T,)
    last = torch.where(mask, number, -1).argmax(dim=1)  # (B,) the place of the last action
    rewards[torch.arange(len(rewards)), last] += scores.to(rewards)
    return rewards


# --------------------------------------------------------------------------------------------- losses
def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """Compute the clipped squared error of each value, relative to its old value.

    ``max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2``

    Source: TRL's ``vf_loss``. The value is pulled toward the return until it has moved by c, the clip range,
    from the old value, that of sampling; a move away from the return is always punished. All of one shape.
    """
    clipped = values.clamp(old_values - clip_range, old_values + clip_range)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


@dataclass(frozen=True)
class Targets:
    """The training targets of a text's actions, all (B, T), fixed during the inner epochs."""

    log_probs: torch.Tensor  # when sampled
    values: torch.Tensor  # when sampled
    advantages: torch.Tensor  # whitened
    returns: torch.Tensor
    mask: torch.Tensor  # bool

    def __getitem__(self, rows: torch.Tensor) -> Targets:
        """Return the targets of some rows."""
        return Targets(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def text_ppo_loss(
    log_probs: torch.Tensor,
    values: torch.Tensor,
    entropy: torch.Tensor,
    targets: Targets,
    clip_range: float = 0.2,
    value_clip_range: float = 0.2,
    value_coef: float = 0.1,
    ratio_threshold: float = 10.0,
    entropy_coef: float = 0.0,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Compute policy loss + value_coef * value loss - entropy_coef * entropy, averaged over actions.

    Also returned are statistics, see `loss_stats`. Sources: PPO (Schulman et al. 2017, arXiv 1707.06347,
    formulas 7 and 9); value clipping and the ratio threshold as in TRL 0.11. A minibatch whose mean ratio is
    above the threshold is skipped: its loss is 0 with zero gradient, because such a ratio says that the
    update before went too far for these texts to be a guide.

    Log-probs of the recorded tokens and the entropy of each place's distribution, in nats, and values, in
    units of the score, are (B, T) and of the model in training.
    """
    mask = targets.mask.bool()
    log_ratio = (log_probs - targets.log_probs).masked_fill(~mask, 0)  # (B, T)
    ratio = log_ratio.exp()
    policy_loss = masked_mean(clipped_loss(ratio, targets.advantages, clip_range), mask)
    value_losses = clipped_value_loss(values, targets.values, targets.returns, value_clip_range)
    value_loss = masked_mean(value_losses, mask)
    mean_entropy = masked_mean(entropy, mask)
    loss = policy_loss + value_coef * value_loss - entropy_coef * mean_entropy
    skipped = not masked_mean(ratio, mask).item() <= ratio_threshold  # NaN is skipped too
    if skipped:
        loss = 0 * values[mask].sum()  # not 0 * loss: an infinite ratio would make that NaN
    stats = loss_stats(log_ratio.detach(), values.detach(), targets, clip_range, value_clip_range)
    stats |= {"loss/policy": policy_loss.item(), "loss/value": value_loss.item(), "loss/total": loss.item()}
    stats["policy/entropy"] = mean_entropy.item()
    return loss, stats | {"policy/skipped": float(skipped)}


def loss_stats(
    log_ratio: torch.Tensor,
    values: torch.Tensor,
    targets: Targets,
    clip_range: float,
    value_clip_range: float,
) -> dict[str, float]:
    """Return statistics to watch, averaged over the actions of a minibatch.

    `policy/approx_kl` (d^2 / 2) and `policy/kl` (-d) estimate KL(old || new) from d = log ratio;
    `policy/clip_fraction` and `value/clip_fraction` count the actions where clipping decides the
    loss (lesson 04 counts all ratios outside the clip range);
    `policy/ratio_error` is the largest ``|ratio - 1|``, which has to be 0 on the first minibatch after
    sampling (the mean ratio is near 1 for any new policy: it estimates a sum of probabilities);
    `value/explained` is 1 - Var(return - value) / Var(return): 1 for a perfect value, 0 for a constant;
    `advantages/mean` is of the whitened advantages, 0 over a whole batch and near 0 in a minibatch;
    `value/var` is the variance of the values.

    The log ratio is log π_new - log π_old, (B, T), 0 where masked; values are of the model in training.
    """
    mask = targets.mask.bool()
    ratio, advantages, returns = log_ratio.exp(), targets.advantages, targets.returns
    policy_clipped = clipped_loss(ratio, advantages, clip_range) > -advantages * ratio
    value_clipped = clipped_value_loss(values, targets.values, returns, value_clip_range) > (
        0.5 * (values - returns).square()
    )
    error = (returns - values)[mask]
    spread = returns[mask].var(correction=0).item()
    return {
        "policy/ratio": masked_mean(ratio, mask).item(),
        "policy/ratio_error": (ratio - 1).abs()[mask].max().item(),
        "policy/approx_kl": masked_mean(0.5 * log_ratio.square(), mask).item(),
        "policy/kl": masked_mean(-log_ratio, mask).item(),
        "policy/clip_fraction": masked_mean(policy_clipped.float(), mask).item(),
        "value/clip_fraction": masked_mean(value_clipped.float(), mask).item(),
        "value/mean": masked_mean(values, mask).item(),
        "value/var": values[mask].var(correction=0).item(),
        "value/error": error.square().mean().item(),
        "value/explained": 1 - error.var(correction=0).item() / spread if spread > 0 else math.nan,
        "advantages/mean": masked_mean(advantages, mask).item(),
        "returns/mean": masked_mean(returns, mask).item(),
        "returns/std": math.sqrt(spread),
    }
