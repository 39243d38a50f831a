import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpo_lessons.advantages import PerPromptStatTracker, gae, masked_whiten, normalize, normalize_groups

# --- normalize ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewards",
    [[1, 2, 3, 6], np.array([1, 2, 3, 6]), torch.tensor([1, 2, 3, 6]), torch.tensor([1.0, 2, 3, 6])],
)
def test_normalize_by_hand(rewards):
    # mean 3, population variance (4 + 1 + 0 + 9) / 4 = 3.5; integers are not truncated
    advantages = normalize(rewards)
    assert advantages.dtype == torch.float32
    expected = [-2 / math.sqrt(3.5), -1 / math.sqrt(3.5), 0, 3 / math.sqrt(3.5)]
    assert advantages.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7e5, 0])
@pytest.mark.parametrize("count", [1, 3, 7, 1000])
def test_equal_rewards_give_exact_zeros(reward, count):
    assert normalize([reward] * count).tolist() == [0] * count
    assert PerPromptStatTracker(1000, 1).update("k" * count, [reward] * count).abs().max() == 0


def test_normalize_survives_a_large_offset():
    rewards = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(normalize(rewards + 1e8), normalize(rewards))


def test_eps_bounds_the_scale():
    assert normalize([0.0, 2.0], eps=1.0).tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "shape"),
        (torch.zeros(2, 2), r"\(2, 2\)"),
        ([0.0, math.nan, 1.0, math.inf], r"positions \[1, 3\]"),
    ],
)
def test_bad_rewards(rewards, message):
    with pytest.raises(ValueError, match=message):
        normalize(rewards)


# --- normalize_groups -----------------------------------------------------------------------------


def test_groups_by_hand():
    # differences -1, 1 and -3, 3; their common std is sqrt((1 + 1 + 9 + 9) / 4) = sqrt(5)
    advantages = normalize_groups([10, 12, 100, 106], group_size=2)
    assert advantages.dtype == torch.float32
    expected = [-1 / math.sqrt(5), 1 / math.sqrt(5), -3 / math.sqrt(5), 3 / math.sqrt(5)]
    assert advantages.tolist() == pytest.approx(expected)


def test_a_group_of_equals_says_nothing():
    advantages = normalize_groups([0.1, 0.1, 0.1, 1.0, 2.0, 3.0], group_size=3)
    assert advantages[:3].tolist() == [0, 0, 0]
    assert advantages[3:].tolist() == pytest.approx([-math.sqrt(3), 0, math.sqrt(3)])
    assert normalize_groups([0.1, 0.1, 0.7, 0.7], group_size=2).tolist() == [0] * 4


@pytest.mark.parametrize("group_size", [1, 4, 0])
def test_groups_must_divide(group_size):
    with pytest.raises(ValueError, match=f"group_size={group_size} .*6 rewards"):
        normalize_groups(torch.arange(6), group_size)


# --- PerPromptStatTracker -------------------------------------------------------------------------


def test_tracker_by_hand():
    tracker = PerPromptStatTracker(buffer_size=4, min_count=3)
    # "a" has 3 rewards: its own mean 2 and std sqrt(2/3). "b" has 1: the batch's, mean 4, std
    # sqrt(((-3)² + (-2)² + (-1)² + 6²) / 4) = sqrt(12.5).
    first = tracker.update(["a", "b", "a", "a"], [1.0, 10.0, 2.0, 3.0])
    std_a, std_all = math.sqrt(2 / 3), math.sqrt(12.5)
    assert first.tolist() == pytest.approx([-1 / std_a, 6 / std_all, 0, 1 / std_a], rel=1e-5, abs=1e-6)
    # "a" keeps its newest 4 rewards, 2, 3, 4, 7: mean 4, std sqrt((4 + 1 + 0 + 9) / 4) = sqrt(3.5).
    second = tracker.update(["a", "a"], [4.0, 7.0])
    assert second.tolist() == pytest.approx([0, 3 / math.sqrt(3.5)], rel=1e-5, abs=1e-6)
    assert tracker.state_dict()["rewards"] == [["a", [2.0, 3.0, 4.0, 7.0]], ["b", [10.0]]]


def test_more_rewards_than_the_buffer_holds_are_compared_with_all_of_the_epoch():
    tracker = PerPromptStatTracker(buffer_size=4, min_count=2)
    advantages = tracker.update(["a"] * 8, [0.0] * 4 + [1.0] * 4)
    assert advantages.tolist() == pytest.approx([-1.0] * 4 + [1.0] * 4, rel=1e-5)
    assert tracker.state_dict()["rewards"] == [["a", [1.0] * 4]]


def test_a_stale_mean_makes_every_advantage_positive():
    # 64 old rewards around 0, then 16 around 1 with the same spread: the buffer's mean is 0.2 and
    # its variance 0.01 + 0.8 * 0.2 * 1², so the new ones seem good, all of them.
    spread = [-0.1, 0.1]
    tracker = PerPromptStatTracker(buffer_size=80, min_count=4)
    assert tracker.update(["k"] * 64, spread * 32).mean().item() == pytest.approx(0, abs=1e-6)
    advantages = tracker.update(["k"] * 16, [1 + s for s in spread] * 8)
    assert advantages.mean().item() == pytest.approx(0.8 / math.sqrt(0.17), rel=1e-4)
    assert advantages.min() > 0
    # A buffer of one batch has nothing stale in it.
    fresh = PerPromptStatTracker(buffer_size=16, min_count=4)
    fresh.update(["k"] * 16, spread * 8)
    advantages = fresh.update(["k"] * 16, [1 + s for s in spread] * 8)
    assert advantages.mean().item() == pytest.approx(0, abs=1e-5)


def test_impossible_buffer_is_refused():
    with pytest.raises(ValueError, match=r"buffer_size=15 .*min_count=16"):
        PerPromptStatTracker(buffer_size=15, min_count=16)
    with pytest.raises(ValueError, match="min_count=0"):
        PerPromptStatTracker(buffer_size=15, min_count=0)


def test_one_key_per_reward_and_nothing_recorded_otherwise():
    tracker = PerPromptStatTracker(4, 2)
    with pytest.raises(ValueError, match="1 keys for 2 rewards"):
        tracker.update(["a"], [1.0, 2.0])
    with pytest.raises(ValueError, match="NaN"):
        tracker.update(["a", "a"], [1.0, math.nan])
    assert tracker.state_dict()["rewards"] == []


KEYS = ["a red three", "", 3, -2.5, None, True, ("image", 7), ("image", ("test", None, 0.5)), ()]


def test_state_survives_json():
    generator = torch.Generator().manual_seed(0)
    tracker = PerPromptStatTracker(buffer_size=5, min_count=2)
    for _ in range(2):
        tracker.update(KEYS * 2, torch.randn(2 * len(KEYS), generator=generator))
    resumed = PerPromptStatTracker(buffer_size=5, min_count=2)
    resumed.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert repr(resumed.state_dict()) == repr(tracker.state_dict())  # True is not 1
    for _ in range(2):  # the second update pushes old rewards out of the buffer
        rewards = torch.randn(len(KEYS), generator=generator)
        assert torch.equal(resumed.update(KEYS, rewards), tracker.update(KEYS, rewards))


def test_keys_that_json_cannot_hold_are_named():
    tracker = PerPromptStatTracker(4, 2)
    tracker.update([("image", frozenset({1}))], [1.0])
    with pytest.raises(TypeError, match=r"frozenset\(\{1\}\)"):
        tracker.state_dict()


def test_state_of_other_settings_is_refused():
    state = PerPromptStatTracker(8, 2).state_dict()
    with pytest.raises(ValueError, match=r"buffer_size=8.*buffer_size=4"):
        PerPromptStatTracker(4, 2).load_state_dict(state)
    with pytest.raises(ValueError, match="min_count"):
        PerPromptStatTracker(8, 4).load_state_dict(state)


# --- GAE ------------------------------------------------------------------------------------------

REWARDS = [0.0442, 0.1176, -0.1157, -0.0230, -0.3808, 0.0233, 0.0230, 0.0929, 1.3803]
VALUES = [5.6171, 4.9112, 1.9119, 3.3269, 2.0643, 4.7600, 4.6683, 1.0787, 3.4501]
ADVANTAGES = [-3.7704, -3.2723, -0.4111, -1.8004, -0.5420, -3.0072, -3.0935, 0.4980, -2.0698]
RETURNS = [1.8467, 1.6389, 1.5008, 1.5264, 1.5223, 1.7528, 1.5748, 1.5767, 1.3803]


def test_gae_of_the_seed_notebook():
    advantages, returns = gae(torch.tensor([REWARDS]), torch.tensor([VALUES]), 1.0, 0.95)
    # The printed inputs are rounded, which may move the last of four digits by one.
    torch.testing.assert_close(advantages, torch.tensor([ADVANTAGES]), rtol=0, atol=1e-4)
    torch.testing.assert_close(returns, torch.tensor([RETURNS]), rtol=0, atol=1e-4)


def test_gae_by_hand():
    # Backwards with gamma = lam = 1/2: delta = 3 - 4, 2 + 2 - 2 = 2, 1 + 1 - 1 = 1
    # A = -1, 2 - 1/4, 1 + 7/16
    advantages, returns = gae(torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 4.0]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == [1.4375, 1.75, -1.0]
    assert returns.tolist() == [2.4375, 3.75, 3.0]


steps = st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=12)
unit = st.floats(0, 1)


@given(steps, unit)
@settings(max_examples=60, deadline=None)
def test_lambda_one_is_monte_carlo_and_zero_is_td(chain, gamma):
    rewards, values = torch.tensor(chain, dtype=torch.float64).T
    horizon = len(chain)
    discounts = [gamma**k for k in range(horizon)]
    monte_carlo = [
        sum(d * r for d, r in zip(discounts, rewards[t:].tolist(), strict=False)) for t in range(horizon)
    ]
    _, returns = gae(rewards, values, gamma, lam=1.0)
    assert returns.tolist() == pytest.approx(monte_carlo, abs=1e-9)
    next_values = torch.cat([values[1:], torch.zeros(1)])
    advantages, _ = gae(rewards, values, gamma, lam=0.0)
    torch.testing.assert_close(advantages, rewards + gamma * next_values - values)


@given(steps, unit, unit, st.integers(0, 3), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_padding_changes_nothing(chain, gamma, lam, left, right):
    rewards, values = torch.tensor(chain, dtype=torch.float64).T
    garbage = torch.tensor([math.nan, math.inf, -7.0], dtype=torch.float64)

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([garbage[:left], tensor, garbage[:right]])

    mask = torch.tensor([0] * left + [1] * len(chain) + [0] * right)
    alone = gae(rewards, values, gamma, lam)
    padded = gae(pad(rewards), pad(values), gamma, lam, mask)
    for expected, result in zip(alone, padded, strict=True):
        torch.testing.assert_close(result[left : left + len(chain)], expected)
        assert result[mask == 0].abs().sum() == 0


def test_gae_of_a_batch_is_row_by_row():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 2, 3, 6, generator=generator)
    advantages, returns = gae(rewards, values, 0.9, 0.8)
    one = gae(rewards[1, 2], values[1, 2], 0.9, 0.8)
    torch.testing.assert_close((advantages[1, 2], returns[1, 2]), one)


def test_gae_is_a_target_without_gradient():
    values = torch.tensor(VALUES, requires_grad=True)
    advantages, returns = gae(torch.tensor(REWARDS), values)
    assert not advantages.requires_grad
    assert not returns.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": torch.zeros(2)}, "values has shape"),
        ({"mask": torch.ones(1, 3)}, "mask has shape"),
        ({"gamma": 1.1}, "gamma=1.1"),
        ({"lam": -0.1}, "lam=-0.1"),
    ],
)
def test_gae_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        gae(**{"rewards": torch.zeros(3), "values": torch.zeros(3), **changes})


# --- masked_whiten --------------------------------------------------------------------------------


def test_whiten_by_hand():
    # valid 1, 2, 6: mean 3, unbiased variance (4 + 1 + 9) / 2 = 7
    values = torch.tensor([[1.0, math.nan], [2.0, 6.0]])
    mask = torch.tensor([[1, 0], [1, 1]])
    expected = [-2 / math.sqrt(7), 0, -1 / math.sqrt(7), 3 / math.sqrt(7)]
    assert masked_whiten(values, mask).flatten().tolist() == pytest.approx(expected)


@given(
    st.lists(st.integers(-50, 50), min_size=2, max_size=20).filter(lambda v: len(set(v)) > 1),
    st.floats(0.1, 10),
    st.floats(-5, 5),
)
@settings(max_examples=60, deadline=None)
def test_whitening_forgets_shift_and_scale(raw, scale, shift):
    values = torch.tensor(raw, dtype=torch.float64)
    whitened = masked_whiten(values)
    torch.testing.assert_close(masked_whiten(values * scale + shift), whitened, rtol=0, atol=1e-4)
    assert whitened.mean().item() == pytest.approx(0, abs=1e-9)
    assert whitened.var().item() == pytest.approx(1, rel=1e-4)


def test_whitening_one_entry_is_refused():
    with pytest.raises(ValueError, match="at least two"):
        masked_whiten(torch.tensor([1.0, 2.0]), torch.tensor([1, 0]))
