"""Gradients through the last steps, in a world of one number whose answer is known."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddpo_lessons.algorithms.draft import DRaFT, replay_last_steps
from ddpo_lessons.algorithms.refl import ReFL
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.flow import FlowSchedule
from ddpo_lessons.rollout import Trajectory, sample_trajectory

SIGMAS = torch.tensor([1.0, 0.75, 0.25, 0.0])  # steps of length 0.25, 0.5, 0.25
LENGTHS = (0.25, 0.5, 0.25)


class Linear:
    """A family whose velocity is θ x, so that x_0 = x_T Π (1 - length θ); a picture is its latent."""

    num_train_timesteps = 1000

    def __init__(self, theta: float) -> None:
        self.denoiser = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.denoiser.weight, theta)

    def predict(self, denoiser: Any, latents: torch.Tensor, *_: Any) -> torch.Tensor:
        return denoiser(latents)

    def predict_clean(self, noisy: torch.Tensor, output: torch.Tensor, timesteps: Any) -> torch.Tensor:
        return noisy - timesteps.view(-1, 1, 1, 1) / 1000 * output

    def decode_with_gradient(self, latents: torch.Tensor) -> torch.Tensor:
        return latents


def rollout(family: Linear) -> Trajectory:
    starts = torch.tensor([1.0, -2.0, 4.0]).view(3, 1, 1, 1)
    return sample_trajectory(family, starts, FlowSchedule(SIGMAS, 0.0, "cpu"), {}, 1.0)  # type: ignore[arg-type]


def gradient(algorithm: DRaFT, family: Linear, steps: int, detached: bool = False, kl: float = 0.0) -> Any:
    """Return loss, its gradient with respect to θ, and the record; the reward is the picture's number."""
    config = DDPOConfig(train_kl_coefficient=kl)
    algorithm.begin(config, family, 3)  # type: ignore[arg-type]

    def score(images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return images.flatten().detach() if detached else images.flatten()

    samples: Any = SimpleNamespace(trajectory=rollout(family), score=score)
    before = Linear(0.5).denoiser
    learner: Any = SimpleNamespace(reference=lambda: contextlib.nullcontext(before))
    pairs = {"rows": torch.arange(3), "noise": torch.zeros(3, steps, 1, 1, 1)}
    loss, record = algorithm.loss(samples, learner, steps, family.denoiser, pairs)
    (slope,) = torch.autograd.grad(loss, family.denoiser.weight)
    return loss.item(), slope.item(), record


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_gradient_is_that_of_the_last_steps_alone(steps):
    """With x_0 = x_T Π (1 - length θ), a step adds -length / (1 - length θ) x_0 to the derivative."""
    theta = 0.8
    end = 1.0  # mean of the starts
    for length in LENGTHS:
        end *= 1 - length * theta
    expected = sum(-length / (1 - length * theta) * end for length in LENGTHS[3 - steps :])
    loss, slope, _ = gradient(DRaFT(3), Linear(theta), steps)
    assert loss == pytest.approx(-end, rel=1e-5)
    assert slope == pytest.approx(-expected, rel=1e-5)


def test_images_are_made_anew_as_they_were():
    family = Linear(0.8)
    trajectory = rollout(family)
    for steps in (1, 2, 3):
        latents, asked = replay_last_steps(family, family.denoiser, trajectory, torch.tensor([2, 0]), steps)  # type: ignore[arg-type]
        torch.testing.assert_close(latents, trajectory.final_latents[[2, 0]])
        first, timesteps, _ = asked[0]
        assert not first.requires_grad  # the state before the steps is a constant
        torch.testing.assert_close(timesteps, 1000 * SIGMAS[3 - steps].expand(2))


def test_refl_goes_through_one_prediction():
    """x̂_0 = x - σ θ x at the state two steps before the end, where σ = 0.75."""
    theta = 0.8
    state = 1 - 0.25 * theta
    loss, slope, _ = gradient(ReFL(3), Linear(theta), 2)
    assert loss == pytest.approx(-(1 - 0.75 * theta) * state, rel=1e-5)
    assert slope == pytest.approx(0.75 * state, rel=1e-5)


def test_the_penalty_is_the_mean_squared_change_of_the_output():
    """Outputs are 0.8 x and 0.5 x; of the last step's states x_K the squares have a known mean."""
    family, price = Linear(0.8), 2.0
    states = torch.tensor([1.0, -2.0, 4.0]) * (1 - 0.25 * 0.8) * (1 - 0.5 * 0.8)
    distance = 0.3**2 * states.square().mean().item()
    loss, slope, record = gradient(DRaFT(1), family, 1, kl=price)
    free, free_slope, _ = gradient(DRaFT(1), family, 1)
    assert record["distance_reference"].item() == pytest.approx(distance, rel=1e-5)
    assert loss - free == pytest.approx(price * distance, rel=1e-4)
    assert slope - free_slope == pytest.approx(price * 2 * distance / 0.3, rel=1e-4)


def test_a_reward_without_a_gradient_is_refused():
    with pytest.raises(ValueError, match="rewards without a gradient"):
        gradient(DRaFT(1), Linear(0.8), 1, detached=True)


def test_alignprop_draws_every_number_of_steps_and_the_same_again():
    algorithm = DRaFT(3, draws_steps=True)
    algorithm.begin(DDPOConfig(), Linear(0.8), 3)  # type: ignore[arg-type]
    drawn = [algorithm.steps_with_gradient(step) for step in range(30)]
    assert set(drawn) == {1, 2, 3}
    assert drawn == [algorithm.steps_with_gradient(step) for step in range(30)]
