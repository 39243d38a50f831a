from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ddpo_lessons.batching import EpochPlan, minibatches, shuffle_samples, shuffle_time


def plan(**changes: Any) -> EpochPlan:
    """The numbers of the seed notebook: 4 x 2 samples in minibatches of 2, 3 timesteps."""
    numbers = {
        "sample_batch_size": 4,
        "num_batches_per_epoch": 2,
        "train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_inner_epochs": 1,
        "num_timesteps": 3,
    }
    return EpochPlan(**{**numbers, **changes})


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- EpochPlan ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "samples", "minibatches", "samples_per_step", "steps", "pairs_of_one", "pairs"),
    [
        ({}, 8, 4, 4, 2, 3, 24),
        ({"num_inner_epochs": 3}, 8, 4, 4, 6, 9, 72),  # repeat the samples
        ({"num_processes": 3}, 24, 4, 12, 2, 3, 72),  # multiply samples, and not steps
    ],
)
def test_plan_by_hand(changes, samples, minibatches, samples_per_step, steps, pairs_of_one, pairs) -> None:
    planned = plan(**changes)
    assert planned.total_samples == samples
    assert planned.minibatches_per_inner_epoch == minibatches
    assert planned.samples_per_optimizer_step == samples_per_step
    assert planned.optimizer_steps == steps
    assert (planned.pairs_per_sample, planned.total_pairs) == (pairs_of_one, pairs)


@given(st.tuples(*[st.integers(1, 12)] * 7))
@settings(max_examples=200, deadline=None)
def test_plan_agrees_with_counting(numbers: tuple[int, ...]) -> None:
    batch, batches, train_batch, accumulation, inner_epochs, timesteps, processes = numbers
    assume(batch * batches % train_batch == 0)
    assume(batch * batches // train_batch % accumulation == 0)
    counted_steps = counted_pairs = 0
    for _ in range(inner_epochs):
        for i, _ in enumerate(range(0, batch * batches, train_batch)):
            counted_pairs += train_batch * timesteps * processes
            counted_steps += (i + 1) % accumulation == 0
    planned = EpochPlan(*numbers)
    assert planned.optimizer_steps == counted_steps
    assert planned.samples_per_optimizer_step * counted_steps == planned.total_samples * inner_epochs
    assert planned.total_pairs == counted_pairs
    assert planned.total_samples * planned.pairs_per_sample == counted_pairs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_accumulation_steps": 3}, r"gradient_accumulation_steps=3 .*4 minibatches .* is 2 or 4$"),
        ({"gradient_accumulation_steps": 9}, r"gradient_accumulation_steps=9 .* is 4$"),
        ({"train_batch_size": 3}, r"train_batch_size=3 .*8 samples .* is 2 or 4$"),
        ({"train_batch_size": 7}, r"train_batch_size=7 .* is 8$"),
        ({"sample_batch_size": 3}, r"gradient_accumulation_steps=2 .*3 minibatches .* is 1 or 3$"),
        ({"num_timesteps": 0}, r"num_timesteps=0 .*1 or more"),
        ({"num_processes": -1}, r"num_processes=-1"),
        ({"num_inner_epochs": 1.5}, r"num_inner_epochs=1.5"),
        ({"train_batch_size": True}, r"train_batch_size=True"),
    ],
)
def test_impossible_plans_name_field_and_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


# --- shuffling ------------------------------------------------------------------------------------


def time_samples() -> dict[str, torch.Tensor]:
    """Latents that say which sample and step they are: 100 x sample + step."""
    latents = torch.arange(4)[:, None] * 100 + torch.arange(3)  # (4, 3)
    return {
        "latents": latents[..., None, None].expand(4, 3, 2, 2).clone(),  # (4, 3, 2, 2)
        "timesteps": torch.tensor([[900, 600, 300]] * 4) - torch.arange(4)[:, None],
        "log_probs": latents / 10,
        "advantages": torch.tensor([0.5, 1.5, -0.5, 2.5]),
    }


def test_shuffle_samples_keeps_each_sample_together() -> None:
    samples = time_samples()
    shuffled = shuffle_samples(samples, seeded())
    order = (shuffled["latents"][:, 0, 0, 0] // 100).tolist()
    assert sorted(order) == [0, 1, 2, 3]
    assert order != [0, 1, 2, 3]
    for key, tensor in samples.items():
        assert torch.equal(shuffled[key], tensor[order])


def test_shuffle_samples_leaves_the_originals_alone() -> None:
    samples = time_samples()
    shuffle_samples(samples, seeded())["advantages"].zero_()
    for key, tensor in time_samples().items():
        assert torch.equal(samples[key], tensor)


@pytest.mark.parametrize("shuffle", ["samples", "time"])
def test_the_generator_decides_the_order(shuffle: str) -> None:
    def order(seed: int) -> list[float]:
        samples, keys = time_samples(), ["log_probs"]
        if shuffle == "samples":
            return shuffle_samples(samples, seeded(seed))["log_probs"].flatten().tolist()
        return shuffle_time(samples, keys, seeded(seed))["log_probs"].flatten().tolist()

    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_shuffle_time_keeps_each_step_together() -> None:
    samples = time_samples()
    keys = ["latents", "timesteps", "log_probs"]
    shuffled = shuffle_time(samples, keys, seeded())
    orders = (shuffled["latents"][:, :, 0, 0] % 100).tolist()
    for i, order in enumerate(orders):
        assert sorted(order) == [0, 1, 2]
        for key in keys:
            assert torch.equal(shuffled[key][i], samples[key][i, order])
    assert len({tuple(order) for order in orders}) > 1  # each sample has an order of its own
    assert shuffled["advantages"] is samples["advantages"]


def test_shuffle_time_draws_every_order_equally_often() -> None:
    # 6,000 samples of 3 steps: each of the 6 orders is expected 1,000 times, std 29.
    samples = {"timesteps": torch.arange(3).expand(6000, 3)}
    orders = shuffle_time(samples, ["timesteps"], seeded())["timesteps"]
    _, counts = orders.unique(dim=0, return_counts=True)
    assert len(counts) == 6
    assert counts.min() > 880
    assert counts.max() < 1120


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["latents", "noise"], r"keys=\['latents', 'noise'\].*log_probs"),
        ([], r"keys=\[\]"),
        (["log_probs", "advantages"], r"\(B, T\).*'advantages': \(4,\)"),
        (["advantages"], r"\(B, T\)"),
    ],
)
def test_shuffle_time_refuses(keys: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shuffle_time(time_samples(), keys, seeded())


def test_shuffle_time_refuses_latents_with_one_state_more() -> None:
    samples = {"latents": torch.zeros(4, 4, 2), "timesteps": torch.zeros(4, 3)}
    with pytest.raises(ValueError, match="before and after each step"):
        shuffle_time(samples, ["latents", "timesteps"], seeded())


# --- minibatches ----------------------------------------------------------------------------------


def test_minibatches_cut_in_order() -> None:
    samples = time_samples()
    batches = minibatches(samples, 2)
    assert [batch["advantages"].tolist() for batch in batches] == [[0.5, 1.5], [-0.5, 2.5]]
    for key, tensor in samples.items():
        assert torch.equal(torch.cat([batch[key] for batch in batches]), tensor)


@pytest.mark.parametrize(("size", "nearest"), [(3, "2 or 4"), (0, "1"), (5, "4")])
def test_minibatches_must_divide(size: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"batch_size={size} .*4 samples.* is {nearest}$"):
        minibatches(time_samples(), size)


@pytest.mark.parametrize("samples", [{}, {"a": torch.zeros(2), "b": torch.zeros(3)}])
def test_samples_must_belong_together(samples: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="same first dimension"):
        shuffle_samples(samples, seeded())
    with pytest.raises(ValueError, match="same first dimension"):
        minibatches(samples, 1)
