"""Steps of flow models: against formulas written again, and against a world whose answer is known."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from ddpo_lessons.flow import FlowSchedule, flow_coefficients

MEAN, VARIANCE = 1.0, 0.25  # of the data, in one dimension


def final_variance(steps: int, eta: float, sde: str = "flow") -> float:
    """The variance that the sampler ends with where data are N(1, 0.25) and the velocity is exact.

    Everything is linear: v = E[ε - x₀ | x_σ] has the slope cov(ε - x₀, x_σ) / var(x_σ).
    """
    sigmas = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    variance = torch.tensor(1.0, dtype=torch.float64)
    for sigma, (weight_x, weight_v, std) in zip(
        sigmas, flow_coefficients(sigmas, eta, sde).T.double(), strict=False
    ):
        slope = (sigma - (1 - sigma) * VARIANCE) / ((1 - sigma) ** 2 * VARIANCE + sigma**2)
        variance = variance * (weight_x + weight_v * slope) ** 2 + std**2
    return variance.item()


# Numbers of a computation apart from this package, for one world and one grid of steps.
@pytest.mark.parametrize(
    ("steps", "ode", "flow", "dance", "cps"),
    [
        (10, 0.1856, 0.2300, 0.1936, 0.1238),
        (40, 0.2321, 0.2474, 0.2348, 0.1491),
        (400, 0.2482, 0.2511, 0.2484, 0.1608),
        (4000, 0.2498, 0.2506, 0.2498, 0.1631),
    ],
)
def test_sdes_keep_the_marginals_in_the_limit_and_cps_does_not(steps, ode, flow, dance, cps):
    found = [final_variance(steps, 0.0), final_variance(steps, 0.7), final_variance(steps, 0.3, "dance")]
    assert found == pytest.approx([ode, flow, dance], abs=1e-4)
    assert final_variance(steps, 0.8, "cps") == pytest.approx(cps, abs=1e-4)


def make_steps() -> tuple[FlowMatchEulerDiscreteScheduler, torch.Tensor]:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(5)
    return scheduler, scheduler.sigmas


def states() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, v and noise of two samples."""
    return torch.randn(3, 2, 4, 8, 8, generator=torch.Generator().manual_seed(0)).unbind()


def test_the_ode_is_the_step_of_diffusers():
    scheduler, sigmas = make_steps()
    x, v, _ = states()
    schedule = FlowSchedule(sigmas, 0.0, "cpu")
    torch.testing.assert_close(schedule.timesteps, scheduler.timesteps)
    for t in schedule.timesteps:
        theirs = scheduler.step(v, t, x).prev_sample
        torch.testing.assert_close(schedule.step(v, t.expand(2), x, noise=v).prev_sample, theirs)


def test_cps_of_level_one_is_the_stochastic_step_of_diffusers():
    """The whole of the next noise level is fresh then: x' = (1 - σ') x₀ + σ' z."""
    _scheduler, sigmas = make_steps()
    x, v, z = states()
    schedule = FlowSchedule(sigmas, 1.0, "cpu", "cps")
    for number, t in enumerate(schedule.timesteps):
        clean, after = x - sigmas[number] * v, sigmas[number + 1]
        ours = schedule.step(v, t.expand(2), x, noise=z).prev_sample
        torch.testing.assert_close(ours, (1 - after) * clean + after * z, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sde", ["flow", "dance"])
def test_the_sde_is_that_of_the_papers(sde):
    """Flow-GRPO's mean in its authors' form, and DanceGRPO's with the score."""
    _, sigmas = make_steps()
    x, v, z = (tensor.double() for tensor in states())
    schedule = FlowSchedule(sigmas, 0.7, "cpu", sde)
    for number, t in enumerate(schedule.timesteps[:-1]):
        sigma, after = sigmas[number].double(), sigmas[number + 1].double()
        dt = after - sigma
        if sde == "flow":
            s = 0.7 * torch.sqrt(sigma / (1 - (sigma if sigma < 1 else after)))
            mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        else:
            s = torch.tensor(0.7)
            score = -(x - (1 - sigma) * (x - sigma * v)) / sigma**2
            mean = x + v * dt - 0.5 * s**2 * score * dt
        std = s * torch.sqrt(-dt)
        step = schedule.step(v, t.expand(2), x, noise=z)
        torch.testing.assert_close(step.mean.double(), mean, atol=1e-5, rtol=1e-5)
        assert step.std.tolist() == pytest.approx([std.item()] * 2, rel=1e-5)
        replayed = schedule.step(v, t.expand(2), x, prev_sample=step.prev_sample)
        by_hand = -z.square().flatten(1).mean(1) / 2 - math.log(std) - math.log(2 * math.pi) / 2
        torch.testing.assert_close(replayed.log_prob.double(), by_hand, atol=1e-4, rtol=1e-4)


def test_a_timestep_of_another_schedule_gives_nan_and_not_the_first_step():
    schedule = FlowSchedule(torch.linspace(1, 0, 5), 0.7, "cpu")
    timesteps = torch.tensor([schedule.timesteps[1], 123.0])
    step = schedule.step(torch.ones(2, 1), timesteps, torch.ones(2, 1), noise=torch.ones(2, 1))
    assert step.prev_sample.isfinite().flatten().tolist() == [True, False]
    assert step.log_prob.isnan().tolist() == [False, True]
    assert schedule.lengths_at(timesteps).tolist() == pytest.approx([0.25, math.nan], nan_ok=True)


def test_a_window_has_noise_and_the_rest_is_the_ode():
    _, sigmas = make_steps()
    everywhere, ode = FlowSchedule(sigmas, 0.7, "cpu"), FlowSchedule(sigmas, 0.0, "cpu")
    window = everywhere.with_noise(window=(1, 3))
    assert (window.stds > 0).tolist() == [False, True, True, False, False]
    x, v, z = states()
    for number, t in enumerate(window.timesteps):
        same = everywhere if number in (1, 2) else ode
        ours, theirs = (schedule.step(v, t.expand(2), x, noise=z) for schedule in (window, same))
        assert torch.equal(ours.prev_sample, theirs.prev_sample)


def test_the_last_step_has_no_noise_and_lengths_add_up():
    _, sigmas = make_steps()
    schedule = FlowSchedule(sigmas, 0.7, "cpu")
    assert schedule.stds[-1] == 0
    assert schedule.lengths_at(schedule.timesteps).sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sde": "ddim"}, r"sde='ddim' does not exist: use one of flow, dance, cps"),
        ({"eta": -0.1}, r"eta=-0\.1 must be a finite number"),
        ({"eta": 1.1, "sde": "cps"}, r"1 is the most for sde='cps'"),
        ({"sigmas": torch.tensor([0.5, 0.5, 0.0])}, r"sigmas must fall"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        flow_coefficients(**{"sigmas": torch.tensor([1.0, 0.5, 0.0]), "eta": 0.7, **settings})


def test_timesteps_at_places_by_hand():
    """Three steps, a third of the way each: halfway lies in the middle of the second one."""
    schedule = FlowSchedule(torch.tensor([1.0, 0.75, 0.5, 0.0]), 0.0, "cpu")
    timesteps = schedule.timesteps_at(torch.tensor([1.0, 2 / 3, 1 / 2, 1 / 3, 1 / 6, 0.0]))
    torch.testing.assert_close(timesteps, torch.tensor([1000.0, 750, 625, 500, 250, 0]))
