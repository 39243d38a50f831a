"""Lesson 05: learn from pairs of texts with a preference, by a reward model or DPO."""

from typing import Any

import torch
import torch.nn.functional as F

from ddpo_lessons.text.language_models import read
from ddpo_lessons.text.text_ppo import action_mask, token_log_probs


def preference_loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Compute the loss of a reward model on pairs: mean of ``-log sigmoid(r_chosen - r_rejected)``.

    By the Bradley-Terry model the sigmoid is the probability that the text with the higher score is
    preferred, so that only differences of scores count. Source: Ouyang et al. 2022, arXiv 2203.02155,
    formula 1, with two texts per query. Scores of the preferred texts and of the others are (B,).
    """
    return -F.logsigmoid(chosen - rejected).mean()


def response_log_probs(
    policy: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, query_lengths: torch.Tensor
) -> torch.Tensor:
    """Return the log-prob of each whole response given its query, (B,) in nats, of texts (B, L)."""
    log_probs = token_log_probs(read(policy, input_ids, attention_mask), input_ids)  # (B, L - 1)
    return log_probs.masked_fill(~action_mask(attention_mask, query_lengths), 0).sum(1)


def dpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    beta: float = 0.1,
) -> torch.Tensor:
    """Compute the loss of direct preference optimization: mean of ``-log sigmoid(beta * margin)``.

    The margin is how much more the policy has raised the log-prob of the preferred response over that of
    the reference than it has raised the other's. Source: Rafailov et al. 2023, arXiv 2305.18290, formula 7.
    Log-probs (B,) are of whole responses in nats, under the policy and the reference; `beta`, per nat, is the
    KL coefficient of the reward that the loss replaces.
    """
    margin = (chosen - ref_chosen) - (rejected - ref_rejected)  # (B,)
    return -F.logsigmoid(beta * margin).mean()
