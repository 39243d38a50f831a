"""Text PPO: values worked out by hand, and properties that hold for any numbers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpo_lessons.text.text_ppo import (
    Targets,
    action_mask,
    adapt_kl_coef,
    clipped_value_loss,
    entropy_from_logits,
    kl_estimate,
    masked_mean,
    positions,
    shape_rewards,
    text_ppo_loss,
    token_log_probs,
)


def close(actual: torch.Tensor, expected: Any, **tolerances: float) -> None:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, **({"rtol": 1e-5, "atol": 1e-5} | tolerances))


# ---------------------------------------------------------------------------------- masks and log-probs
def test_positions_by_hand() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]])
    assert positions(mask).tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1]]


def test_action_mask_by_hand() -> None:
    # a query of 2 and a response of 2 tokens: padded left, right, both ways, and not at all
    attention = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    mask = action_mask(attention, torch.tensor([2, 2, 2, 4]))
    assert mask.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_an_empty_query_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        action_mask(torch.ones(1, 3), torch.tensor([0]))


def test_token_log_probs_by_hand() -> None:
    # logits log(1, 2, 1) at place 0 and log(1, 1, 2) at place 1; tokens 0, 1, 2: 2/4 and 2/4
    logits = torch.tensor([[[1.0, 2, 1], [1, 1, 2], [9, 9, 9]]]).log()
    close(token_log_probs(logits, torch.tensor([[0, 1, 2]])), [[math.log(0.5), math.log(0.5)]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_are_float32_and_never_positive(dtype: torch.dtype) -> None:
    logits = 5 * torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(0))
    log_probs = token_log_probs(logits.to(dtype), torch.zeros(2, 4, dtype=torch.long))
    assert log_probs.dtype == torch.float32
    assert log_probs.shape == (2, 3)
    assert log_probs.max() <= 0


def test_entropy_by_hand() -> None:
    close(entropy_from_logits(torch.tensor([[0.0, 0, 0, 0], [100, 0, 0, 0]])), [math.log(4), 0])


def test_masked_mean_ignores_what_is_masked() -> None:
    values, mask = torch.tensor([1.0, math.nan, 3.0, math.inf]), torch.tensor([1, 0, 1, 0])
    assert masked_mean(values, mask) == 2
    with pytest.raises(ValueError, match="everywhere"):
        masked_mean(values, torch.zeros(4))


# ---------------------------------------------------------------------------------------- KL and rewards
def test_shape_rewards_by_hand() -> None:
    kl = torch.tensor([[9.0, 1.0, 2.0, 9.0], [1.0, -1.0, 3.0, 4.0]])
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]])
    rewards = shape_rewards(torch.tensor([10.0, 20.0]), kl, mask, kl_coef=0.5)
    # the score comes on the last action, wherever padding puts it
    assert rewards.tolist() == [[0, -0.5, 9.0, 0], [0, 0, 0, 18.0]]
    assert kl[0, 1] == 1  # the given tensor stays as it is


def test_a_text_without_an_action_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        shape_rewards(torch.zeros(2), torch.zeros(2, 2), torch.tensor([[0, 1], [0, 0]]))


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # the token has 1/2 under the policy and 1/4 under the reference: d = log 2; then the reverse
        ("kl", [math.log(2), -math.log(2)]),
        ("abs", [math.log(2), math.log(2)]),
        ("mse", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2]),
        # 1/2 log 2 + 1/4 log (1/2) + 1/4 log 1
        ("full", [math.log(2) / 4, math.log(2) / 4]),
    ],
)
def test_kl_estimates_by_hand(estimator: Any, expected: list[float]) -> None:
    new = torch.tensor([[[2.0, 1, 1], [2, 1, 1], [1, 9, 1]]]).log()
    ref = torch.tensor([[[1.0, 2, 1], [1, 2, 1], [9, 1, 1]]]).log()
    close(kl_estimate(new, ref, torch.tensor([[2, 0, 1]]), estimator), [expected])


def test_the_difference_and_the_full_sum_have_the_same_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    new, ref = torch.randn(2, 1, 2, 5, generator=generator)  # (1, 2, 5) each: two tokens, one place
    exact = kl_estimate(new, ref, torch.zeros(1, 2, dtype=torch.long), "full").item()
    tokens = torch.arange(5).repeat(2, 1).T  # (5, 2) each token once; its probability weighs it
    each = kl_estimate(new.expand(5, -1, -1), ref.expand(5, -1, -1), tokens, "kl")[:, 0]
    assert (new[0, 0].softmax(-1) * each).sum().item() == pytest.approx(exact, rel=1e-5)


def test_adapted_kl_coefficient_by_hand() -> None:
    assert adapt_kl_coef(2.0, kl=6.6, target=6.0) == pytest.approx(2 * 1.01)
    assert adapt_kl_coef(2.0, kl=60.0, target=6.0) == pytest.approx(2 * 1.02)  # the error is clipped
    assert adapt_kl_coef(2.0, kl=-1.0, target=6.0, gain=0.5) == pytest.approx(2 * 0.9)
    assert adapt_kl_coef(2.0, kl=6.0, target=6.0) == 2.0


# ------------------------------------------------------------------------------------------------ losses
def test_clipped_value_loss_by_hand() -> None:
    # return 1, old value 0, range 0.2: moving on to 0.5 counts as 0.2, moving away counts in full
    loss = clipped_value_loss(torch.tensor([0.5, -0.5, 0.1]), torch.zeros(3), torch.ones(3), clip_range=0.2)
    close(loss, [0.5 * 0.8**2, 0.5 * 1.5**2, 0.5 * 0.9**2])


def by_hand(**changes: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the loss of two actions and one masked place: ratios 1.5 and 0.5, advantages 1 and -1."""
    targets = Targets(
        log_probs=torch.tensor([[-1.0, -1.0, -1.0]]),
        values=torch.tensor([[0.0, 0.0, math.nan]]),
        advantages=torch.tensor([[1.0, -1.0, 7.0]]),
        returns=torch.tensor([[1.0, 1.0, math.nan]]),
        mask=torch.tensor([[True, True, False]]),
    )
    log_probs = torch.tensor([[-1 + math.log(1.5), -1 + math.log(0.5), 900.0]], requires_grad=True)
    values = torch.tensor([[0.5, -0.5, math.nan]], requires_grad=True)
    return text_ppo_loss(log_probs, values, torch.tensor([[2.0, 1.0, math.nan]]), targets, **changes)


def test_text_ppo_loss_by_hand() -> None:
    loss, stats = by_hand(value_coef=0.1)
    # policy: max(-1.5, -1.2) = -1.2 and max(0.5, 0.8) = 0.8; value: 0.32 and 1.125
    assert stats["loss/policy"] == pytest.approx(-0.2)
    assert stats["loss/value"] == pytest.approx((0.32 + 1.125) / 2)
    assert loss.item() == pytest.approx(-0.2 + 0.07225)
    assert stats["policy/ratio"] == pytest.approx(1)
    assert stats["policy/clip_fraction"] == 1
    assert stats["value/clip_fraction"] == 0.5
    assert stats["policy/kl"] == pytest.approx(-math.log(0.75) / 2)
    assert stats["policy/approx_kl"] == pytest.approx((math.log(1.5) ** 2 + math.log(0.5) ** 2) / 4)
    assert stats["policy/skipped"] == 0
    assert stats["policy/entropy"] == 1.5
    assert stats["advantages/mean"] == 0
    assert stats["value/var"] == 0.25


def test_entropy_is_subtracted_from_the_loss() -> None:
    assert by_hand()[0].item() - by_hand(entropy_coef=0.1)[0].item() == pytest.approx(0.1 * 1.5)


def test_the_ratio_threshold_skips_with_exactly_zero_gradient() -> None:
    loss, stats = by_hand(ratio_threshold=0.9)
    assert stats["policy/skipped"] == 1
    assert loss.item() == 0
    loss.backward()


@pytest.mark.parametrize("odd", [1000.0, math.nan])
def test_an_infinite_or_undefined_ratio_skips_without_nan_gradient(odd: float) -> None:
    zeros = torch.zeros(1, 2)
    targets = Targets(zeros, zeros, zeros, zeros, torch.ones(1, 2, dtype=torch.bool))
    log_probs = torch.tensor([[odd, 0.0]], requires_grad=True)
    values = torch.ones(1, 2, requires_grad=True)
    loss, stats = text_ppo_loss(log_probs, values, zeros, targets)
    loss.backward()
    assert stats["policy/skipped"] == 1
    assert values.grad is not None
    assert values.grad.tolist() == [[0, 0]]


# -------------------------------------------------------------------------------------------- properties
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1000))
def test_padding_changes_no_loss(left: int, right: int, query: int, response: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    length = query + response

    def loss(before: int, after: int, row: list[torch.Tensor], attention: torch.Tensor) -> torch.Tensor:
        padded = [torch.nn.functional.pad(tensor, (before, after), value=3.0) for tensor in row]
        mask = action_mask(torch.nn.functional.pad(attention, (before, after)), torch.tensor([query]))
        new, old, values, old_values, advantages, returns = (tensor[:, 1:] for tensor in padded)
        targets = Targets(old, old_values, advantages, returns, mask)
        return text_ppo_loss(new, values, torch.zeros_like(new), targets)[0]

    row = list(0.3 * torch.randn(6, 1, length, generator=generator))
    attention = torch.ones(1, length, dtype=torch.long)
    close(loss(left, right, row, attention), loss(0, 0, row, attention))
