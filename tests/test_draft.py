"""Gradients through the last steps, in a world of one number whose answer is known."""

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


def gradient(algorithm: DRaFT, family: Linear, steps: int) -> tuple[float, float]:
    """Return loss and its gradient with respect to θ; the reward is the picture's number."""
    algorithm.begin(DDPOConfig(), family, 3)  # type: ignore[arg-type]
    samples: Any = SimpleNamespace(trajectory=rollout(family), score=lambda images, rows: images.flatten())
    pairs = {"rows": torch.arange(3), "noise": torch.zeros(3, steps, 1, 1, 1)}
    loss, _ = algorithm.loss(samples, None, steps, family.denoiser, pairs)
    (slope,) = torch.autograd.grad(loss, family.denoiser.weight)
    return loss.item(), slope.item()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_gradient_is_that_of_the_last_steps_alone(steps):
    """With x_0 = x_T Π (1 - length θ), a step adds -length / (1 - length θ) x_0 to the derivative."""
    theta = 0.8
    end = 1.0  # mean of the starts
    for length in LENGTHS:
        end *= 1 - length * theta
    expected = sum(-length / (1 - length * theta) * end for length in LENGTHS[3 - steps :])
    loss, slope = gradient(DRaFT(3), Linear(theta), steps)
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
    loss, slope = gradient(ReFL(3), Linear(theta), 2)
    assert loss == pytest.approx(-(1 - 0.75 * theta) * state, rel=1e-5)
    assert slope == pytest.approx(0.75 * state, rel=1e-5)
