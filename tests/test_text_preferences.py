"""Losses on pairs of texts, worked out by hand."""

import math
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from benchmarks.text import recipe
from ddpo_lessons.text.preferences import dpo_loss, preference_loss, response_log_probs


def test_preference_loss_by_hand() -> None:
    # σ(log 3) = 3/4 and σ(-log 3) = 1/4
    scores = torch.tensor([math.log(3), 0.0])
    expected = -(math.log(3 / 4) + math.log(1 / 4)) / 2
    assert preference_loss(scores, scores.flip(0)).item() == pytest.approx(expected)


def test_dpo_loss_by_hand() -> None:
    # margin (-1 + 2) - (-3 + 2) = 2; β = log(3) / 2: σ(log 3) = 3/4
    terms = (torch.tensor([x]) for x in (-1.0, -3.0, -2.0, -2.0))
    assert dpo_loss(*terms, beta=math.log(3) / 2).item() == pytest.approx(-math.log(3 / 4))


def test_dpo_loss_starts_at_log_2_and_raises_the_preferred_response() -> None:
    chosen, rejected = torch.tensor([-5.0], requires_grad=True), torch.tensor([-4.0], requires_grad=True)
    loss = dpo_loss(chosen, rejected, chosen.detach(), rejected.detach(), beta=0.3)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert chosen.grad.item() == pytest.approx(-0.15)  # -β / 2
    assert rejected.grad.item() == pytest.approx(0.15)


def test_response_log_probs_leave_out_query_and_padding() -> None:
    torch.manual_seed(0)
    policy: Any = GPT2LMHeadModel(recipe.make_config(recipe.make_tokenizer(), width=16, layers=1)).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    padded = torch.nn.functional.pad(ids, (2, 1))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (2, 1))
    with torch.no_grad():
        log_probs = policy(ids).logits[0].log_softmax(-1)
        got = response_log_probs(policy, padded, mask, torch.tensor([3]))
    expected = log_probs[2, 8] + log_probs[3, 9]
    assert got.item() == pytest.approx(expected.item(), abs=1e-4)
