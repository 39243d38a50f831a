import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpo_lessons.ppo import check_finite, clipped_loss, clipped_surrogate


def surrogate_of_ratios(
    ratios: list[float], advantages: list[float], **options: float
) -> tuple[torch.Tensor, Any]:
    log_prob = torch.tensor(ratios).log()
    old = torch.zeros(len(ratios))
    return clipped_surrogate(log_prob, old, torch.tensor(advantages), clip_range=0.2, **options)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 1.0, -1.2),  # a gain is cut off at 1 + c
        (0.5, 1.0, -0.5),  # a loss of probability of a good action is not
        (1.5, -1.0, 1.5),  # nor is more probability of a bad one
        (0.5, -1.0, 0.8),  # less of a bad one is cut off at 1 - c
        (1.5, 0.0, 0.0),
        (1.0, 100.0, -5.0),  # the advantage is clamped first
        (1.5, -100.0, 7.5),
    ],
)
def test_loss_by_hand(ratio: float, advantage: float, expected: float) -> None:
    loss, _ = surrogate_of_ratios([ratio], [advantage])
    assert loss.item() == pytest.approx(expected)


def test_loss_of_each_pair_keeps_the_shape() -> None:
    # Four rollouts, one of every case: gain cut off, harm not, harm not, gain cut off.
    ratio = torch.tensor([[1.5, 0.5], [1.1, 0.5]])
    advantages = torch.tensor([[1.4, 0.2], [-0.2, -1.4]])
    losses = clipped_loss(ratio, advantages, 0.2)
    torch.testing.assert_close(losses, torch.tensor([[-1.68, -0.1], [0.22, 1.12]]))
    surrogate, _ = clipped_surrogate(ratio.log().flatten(), torch.zeros(4), advantages.flatten(), 0.2)
    torch.testing.assert_close(losses.mean(), surrogate)


def test_adv_clip_max_is_a_parameter() -> None:
    loss, _ = surrogate_of_ratios([1.0, 1.0], [10.0, -4.0], adv_clip_max=3.0)
    assert loss.item() == pytest.approx(0.0)


def test_stats_by_hand() -> None:
    _, stats = surrogate_of_ratios([1.5, 0.9, 1.0, 0.5], [1.0, 1.0, 1.0, 1.0])
    logs = [math.log(r) for r in (1.5, 0.9, 1.0, 0.5)]
    assert stats.ratio.tolist() == pytest.approx([1.5, 0.9, 1.0, 0.5])
    assert stats.approx_kl.item() == pytest.approx(sum(x * x for x in logs) / 8)
    assert stats.kl_k3.item() == pytest.approx((0.5 - 0.1 + 0 - 0.5 - sum(logs)) / 4, rel=1e-5)
    assert stats.clip_fraction.item() == 0.5


def test_stats_carry_no_gradient() -> None:
    log_prob = torch.zeros(2, requires_grad=True)
    loss, stats = clipped_surrogate(log_prob, torch.zeros(2), torch.ones(2), 0.2)
    assert loss.requires_grad
    assert not any(value.requires_grad for value in stats)


def test_kl_k3_estimates_kl_of_old_from_new() -> None:
    # KL(N(0, 1) || N(m, 1)) = m² / 2. The estimate takes samples of the old policy.
    shift = 0.5
    actions = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    old, new = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(shift, 1.0)
    _, stats = clipped_surrogate(new.log_prob(actions), old.log_prob(actions), torch.ones_like(actions), 0.2)
    assert stats.kl_k3.item() == pytest.approx(shift**2 / 2, rel=0.02)


def test_kl_k3_keeps_its_digits_for_small_ratios() -> None:
    # For log ratio x, k3 = x² / 2 + x³ / 6; ratio - 1 - log ratio in float32 would give noise.
    log_prob = torch.tensor([1e-4, -1e-4])
    _, stats = clipped_surrogate(log_prob, torch.zeros(2), torch.ones(2), 1e-4)
    assert stats.kl_k3.item() == pytest.approx(0.5e-8, rel=0.01)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),  # the very first update: the policy gradient itself
        (1.1, 2.0, -2.2),
        (1.5, 2.0, 0.0),  # clipped
        (0.5, 2.0, -1.0),
        (0.5, -2.0, 0.0),  # clipped
        (1.5, -2.0, 3.0),
        (1.0, -9.0, 5.0),  # by the clamped advantage
    ],
)
def test_gradient_by_hand(ratio: float, advantage: float, expected: float) -> None:
    log_prob = torch.tensor([math.log(ratio), 0.0], requires_grad=True)
    loss, _ = clipped_surrogate(log_prob, torch.zeros(2), torch.tensor([advantage, 0.0]), 0.2)
    loss.backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([expected / 2, 0.0])


@given(
    pairs=st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1), st.floats(-8, 8)), min_size=2, max_size=20),
    cut=st.integers(1, 19),
    clip_range=st.floats(1e-4, 0.5),
)
@settings(max_examples=50, deadline=None)
def test_groups_weighted_by_their_share_make_the_whole(
    pairs: list[tuple[float, float, float]], cut: int, clip_range: float
) -> None:
    log_prob, old, advantages = torch.tensor(pairs).T
    cut = min(cut, len(pairs) - 1)
    whole, stats = clipped_surrogate(log_prob, old, advantages, clip_range)
    parts = [
        clipped_surrogate(log_prob[part], old[part], advantages[part], clip_range)[0] * share
        for part, share in ((slice(cut), cut), (slice(cut, None), len(pairs) - cut))
    ]
    torch.testing.assert_close(sum(parts) / len(pairs), whole, rtol=1e-4, atol=1e-5)
    assert stats.kl_k3 >= -1e-7
    # The clipped loss is a pessimistic bound of the unclipped one.
    assert whole >= -(stats.ratio * advantages.clamp(-5, 5)).mean() - 1e-5


def test_half_precision_and_integer_inputs_become_float32() -> None:
    loss, stats = clipped_surrogate(
        torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), torch.tensor([1, -3]), 0.2
    )
    assert loss.dtype == stats.ratio.dtype == torch.float32
    assert loss.item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantages": torch.ones(3)}, "same shape"),
        ({"old_log_prob": torch.zeros(2, 1)}, "same shape"),
        (dict.fromkeys(("log_prob", "old_log_prob", "advantages"), torch.zeros(0)), "not be empty"),
        ({"clip_range": 0.0}, "clip_range=0.0"),
        ({"clip_range": math.nan}, "clip_range=nan"),
        ({"adv_clip_max": -1.0}, "adv_clip_max=-1.0"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "log_prob": torch.zeros(2),
        "old_log_prob": torch.zeros(2),
        "advantages": torch.ones(2),
        "clip_range": 0.2,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        clipped_surrogate(**arguments)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(value):
    check_finite(advantages=torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="old_log_prob holds NaN or inf: a step without noise"):
        check_finite(advantages=torch.tensor([1.0, 2.0]), old_log_prob=torch.tensor([0.0, value]))
    with pytest.raises(ValueError, match=r"advantages holds NaN or inf: .* a group of one sample"):
        check_finite(old_log_prob=torch.tensor([0.0]), advantages=torch.tensor([value, 1.0]))


def test_no_gradient_reaches_the_policy_that_sampled():
    new, old = (torch.zeros(2, requires_grad=True) for _ in range(2))
    clipped_surrogate(new, old, torch.ones(2), clip_range=0.1, adv_clip_max=5.0)[0].backward()
    assert new.grad is not None
    assert old.grad is None
