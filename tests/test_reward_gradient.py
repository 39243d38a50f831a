"""Lesson 11's experiment: its measures, against numbers worked out by hand, and its questions."""

import pytest
import torch

from benchmarks.results import reward_gradient
from ddpo_lessons.worlds import digits
from ddpo_lessons.worlds.judges import nearest


def test_frechet_distance_of_unrelated_numbers_is_that_of_their_means_and_spreads():
    """It is Σ (μ - μ')² + (σ - σ')²; here 3² + (2 - 1)² for the first number, and 0 for the second."""
    square = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]) * 0.75**0.5  # variances 1
    assert reward_gradient.frechet(
        square, square * torch.tensor([2, 1]) + torch.tensor([3, 0])
    ) == pytest.approx(10)
    assert reward_gradient.frechet(square, square) == pytest.approx(0)


def test_frechet_distance_of_many_numbers_adds_up_and_sees_what_goes_together():
    generator = torch.Generator().manual_seed(0)
    apart = torch.randn(4000, 2, generator=generator).double()
    twins = apart[:, [0, 0]]  # both numbers alike: covariance [[1, 1], [1, 1]], so that tr (C C')^½ is √2
    assert reward_gradient.frechet(apart, twins) == pytest.approx(4 - 2 * 2**0.5, abs=0.1)


def test_two_pictures_apart():
    black, gray = torch.zeros(2, 3, 32, 32), torch.full((2, 3, 32, 32), 0.5)
    gray[1, :, :16] = 0  # half of the second one
    assert reward_gradient.apart(black, gray).tolist() == pytest.approx([0.5, 0.5 / 2**0.5])


def test_handwriting_has_its_prompts_digits_and_colors_and_other_digits_in_every_picture():
    asked = [digits.Description(3, "red", "blue")] * 3 + [digits.Description(8, "white", "black")] * 3
    drawn = reward_gradient.handwritten(asked, "test", 0)  # (6, 3, 32, 32)
    ink, background = digits.measure_colors(drawn)
    assert [digits.COLOR_NAMES[n] for n in nearest(ink, digits.COLORS)] == ["red"] * 3 + ["white"] * 3
    assert [digits.COLOR_NAMES[n] for n in nearest(background, digits.COLORS)] == ["blue"] * 3 + ["black"] * 3
    assert all(
        reward_gradient.apart(drawn[n, None], drawn[m, None]) > 0.05 for n in range(3) for m in range(n)
    )


def test_highest_reward_of_the_search_decides_whose_learning_rate_it_is(tmp_path, monkeypatch):
    text = "method,learning_rate,reward\nDRaFT-3,0.001,-0.3\nDRaFT-3,0.003,-0.1\nFlow-GRPO,0.01,-0.05\n"
    (tmp_path / "search.csv").write_text(text)
    monkeypatch.setattr(reward_gradient, "SEARCH", tmp_path / "search.csv")
    assert [reward_gradient.chosen(method) for method in ("DRaFT-3", "ReFL", "Flow-GRPO")] == [
        0.003,
        0.003,
        0.01,
    ]
