import itertools
import math
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, EulerDiscreteScheduler, PNDMScheduler
from helpers import ddim_step

from ddpo_lessons.ddim import DDIMSchedule, DDIMStep

SHAPE = (3, 4, 5, 5)


def make_scheduler(num_inference_steps: int = 10, **config: Any) -> DDIMScheduler:
    scheduler = DDIMScheduler(**{"clip_sample": False, **config})
    scheduler.set_timesteps(num_inference_steps)
    return scheduler


def random_step(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model_output, sample = torch.randn(2, *SHAPE, generator=generator)
    return model_output, sample


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- agreement with diffusers ---------------------------------------------------------------------

LIMITS: dict[str, dict[str, Any]] = {
    "unlimited": {},
    "clipped": {"clip_sample": True, "clip_sample_range": 0.8},
    "thresholded": {"thresholding": True, "sample_max_value": 1.5},
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("set_alpha_to_one", [True, False])
def test_agrees_with_diffusers(
    set_alpha_to_one: bool, spacing: str, prediction_type: str, limit: str
) -> None:
    for steps_offset, eta, num_steps in itertools.product([0, 1], [0.3, 1.0], [7, 20]):
        scheduler = make_scheduler(
            num_steps, set_alpha_to_one=set_alpha_to_one, timestep_spacing=spacing,
            prediction_type=prediction_type, steps_offset=steps_offset, **LIMITS[limit],
        )  # fmt: skip
        for timestep in scheduler.timesteps:
            model_output, sample = random_step(seed=int(timestep))
            expected = scheduler.step(model_output, timestep, sample, eta, generator=seeded())
            step = ddim_step(scheduler, model_output, timestep, sample, eta, generator=seeded())
            torch.testing.assert_close(step.prev_sample, expected.prev_sample, rtol=1e-5, atol=2e-5)
            assert step.log_prob.isfinite().all()


def test_agrees_with_diffusers_from_pure_noise() -> None:
    scheduler = make_scheduler(
        rescale_betas_zero_snr=True, timestep_spacing="trailing", prediction_type="v_prediction"
    )
    assert scheduler.alphas_cumprod[scheduler.timesteps[0]] == 0
    model_output, sample = random_step()
    for timestep in scheduler.timesteps:
        step = ddim_step(scheduler, model_output, timestep, sample, 0.5, generator=seeded())
        expected = scheduler.step(model_output, timestep, sample, 0.5, generator=seeded())
        torch.testing.assert_close(step.prev_sample, expected.prev_sample, rtol=1e-5, atol=1e-5)
        full_noise = ddim_step(scheduler, model_output, timestep, sample, eta=1.0)
        assert full_noise.prev_sample.isfinite().all()


def test_mixed_timesteps_equal_single_ones() -> None:
    scheduler = make_scheduler(set_alpha_to_one=False, steps_offset=1)
    model_output, sample = random_step()
    outcome = torch.randn(SHAPE, generator=seeded())
    timesteps = torch.tensor([901, 1, 401])
    mixed = ddim_step(scheduler, model_output, timesteps, sample, 0.7, outcome)
    for i, timestep in enumerate(timesteps.tolist()):
        one = slice(i, i + 1)
        single = ddim_step(scheduler, model_output[one], timestep, sample[one], 0.7, outcome[one])
        for together, alone in zip(mixed, single, strict=True):
            assert torch.equal(together[one], alone)


def test_last_step_is_not_clamped_to_timestep_zero() -> None:
    # At t = 1 the step leads below 0. A clamp to 0 would use ᾱ_0 < 1 in place of ᾱ = 1.
    scheduler = make_scheduler(set_alpha_to_one=True, steps_offset=1)
    x0, sample = random_step()
    alpha_bar = scheduler.alphas_cumprod[1]
    noise = (sample - alpha_bar.sqrt() * x0) / (1 - alpha_bar).sqrt()
    step = ddim_step(scheduler, noise, 1, sample)
    torch.testing.assert_close(step.mean, x0, rtol=0, atol=1e-4)


# --- worked out by hand ---------------------------------------------------------------------------


def two_level_scheduler(**config: Any) -> DDIMScheduler:
    """ᾱ = 0.8 at t = 0 and 0.4 at t = 1; with two steps each leads to the other."""
    return make_scheduler(2, num_train_timesteps=2, trained_betas=[0.2, 0.5], set_alpha_to_one=True, **config)


def test_step_by_hand() -> None:
    # variance = (0.2 / 0.6) (1 - 0.4 / 0.8) = 1/6, and 1 - 0.8 - 1/6 = 1/30
    sample, noise = torch.full((1, 2), 1.0), torch.full((1, 2), 0.5)
    x0 = (1 - math.sqrt(0.6) * 0.5) / math.sqrt(0.4)
    mean = math.sqrt(0.8) * x0 + math.sqrt(1 / 30) * 0.5
    outcome = torch.tensor([[mean + 0.1, mean - 0.3]])
    step = ddim_step(two_level_scheduler(), noise, 1, sample, 1.0, outcome)
    densities = [-(d**2) * 3 + 0.5 * math.log(6 / (2 * math.pi)) for d in (0.1, -0.3)]
    assert step.std.tolist() == pytest.approx([math.sqrt(1 / 6)])
    assert step.mean[0].tolist() == pytest.approx([mean, mean])
    assert step.log_prob.tolist() == pytest.approx([sum(densities) / 2])
    total = ddim_step(two_level_scheduler(), noise, 1, sample, 1.0, outcome, reduction="sum")
    assert total.log_prob.tolist() == pytest.approx([sum(densities)])


def test_log_prob_is_that_of_torch() -> None:
    scheduler = make_scheduler()
    model_output, sample = random_step()
    step = ddim_step(scheduler, model_output, 500, sample, 0.6, generator=seeded())
    gaussian = torch.distributions.Normal(step.mean, step.std.view(-1, 1, 1, 1))
    expected = gaussian.log_prob(step.prev_sample).mean(dim=(1, 2, 3))
    torch.testing.assert_close(step.log_prob, expected)


# --- replay and gradients -------------------------------------------------------------------------


def test_replay_of_a_fresh_step_has_ratio_one() -> None:
    scheduler = make_scheduler()
    model_output, sample = random_step()
    timesteps = torch.tensor([900, 500, 100])
    fresh = ddim_step(scheduler, model_output, timesteps, sample, generator=seeded())
    replay = ddim_step(scheduler, model_output, timesteps, sample, prev_sample=fresh.prev_sample)
    assert torch.equal((replay.log_prob - fresh.log_prob).exp(), torch.ones(3))


@pytest.mark.parametrize("replayed", [True, False])
def test_gradient_flows_through_the_mean_only(replayed: bool) -> None:
    # d log N / d mean = (x - mean) / std² per dimension; the mean over D dimensions divides by D.
    # Had the drawn sample kept its gradient, x - mean would be constant and the gradient zero.
    scheduler = make_scheduler()
    model_output, sample = random_step()
    model_output.requires_grad_()
    outcome = torch.randn(SHAPE, generator=seeded()) if replayed else None
    step = ddim_step(scheduler, model_output, 500, sample, prev_sample=outcome, generator=seeded())
    assert not step.prev_sample.requires_grad
    (gradient,) = torch.autograd.grad(step.log_prob.sum(), step.mean)
    deviation = step.prev_sample - step.mean
    expected = deviation / step.std.view(-1, 1, 1, 1) ** 2 / math.prod(SHAPE[1:])
    torch.testing.assert_close(gradient, expected.detach())
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_computed_in_float32(dtype: torch.dtype) -> None:
    scheduler = make_scheduler()
    model_output, sample = (tensor.to(dtype) for tensor in random_step())
    step = ddim_step(scheduler, model_output, 100, sample, generator=seeded())
    exact = ddim_step(scheduler, model_output.float(), 100, sample.float(), generator=seeded())
    assert all(tensor.dtype == torch.float32 for tensor in step)
    assert all(torch.equal(a, b) for a, b in zip(step, exact, strict=True))


# --- steps without noise --------------------------------------------------------------------------


def test_deterministic_last_step_has_no_log_prob_and_no_nan() -> None:
    scheduler = make_scheduler(set_alpha_to_one=True)
    model_output, sample = random_step()
    model_output.requires_grad_()
    step = ddim_step(scheduler, model_output, torch.tensor([0, 500, 0]), sample)
    assert step.std[[0, 2]].tolist() == [0, 0]
    assert torch.equal(step.prev_sample[0], step.mean[0])
    assert step.log_prob[[0, 2]].tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(step.log_prob.sum(), model_output)
    assert gradient[[0, 2]].abs().max() == 0
    assert gradient[1].isfinite().all()
    assert gradient[1].abs().max() > 0


@pytest.mark.parametrize(
    ("config", "last_is_deterministic"),
    [
        ({"set_alpha_to_one": True, "steps_offset": 0}, True),
        ({"set_alpha_to_one": True, "steps_offset": 1}, True),
        ({"set_alpha_to_one": False, "steps_offset": 0}, True),  # ᾱ_prev = ᾱ_0 = ᾱ_t
        ({"set_alpha_to_one": False, "steps_offset": 1}, False),  # Stable Diffusion's own
    ],
)
def test_stds_find_the_deterministic_step(config: dict[str, Any], last_is_deterministic: bool) -> None:
    scheduler = make_scheduler(**config)
    stds = DDIMSchedule(scheduler, scheduler.timesteps, eta=0.5).stds
    assert stds.dtype == torch.float32
    assert (stds[:-1] > 0).all()
    assert (stds[-1] == 0) == last_is_deterministic
    variances = [scheduler._get_variance(t, t - 100) for t in scheduler.timesteps]
    torch.testing.assert_close(stds, 0.5 * torch.stack(variances).sqrt())


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_the_table_stays_where_it_is(device: str) -> None:
    """Timesteps may be on any device; the numbers follow them, and the scheduler is left alone."""
    scheduler = make_scheduler()
    table, values = scheduler.alphas_cumprod, scheduler.alphas_cumprod.clone()
    model_output, sample = (tensor.to(device) for tensor in random_step())
    timesteps = torch.tensor([900, 500, 100], device=device)
    step = ddim_step(scheduler, model_output, timesteps, sample, generator=seeded())
    assert {tensor.device.type for tensor in step} == {device}
    assert scheduler.alphas_cumprod is table
    assert table.device.type == "cpu"
    assert torch.equal(table, values)


# --- bad input ------------------------------------------------------------------------------------


def take(scheduler: DDIMScheduler | None = None, **changes: Any) -> DDIMStep:
    model_output, sample = random_step()
    arguments = {"model_output": model_output, "timestep": 500, "sample": sample, **changes}
    return ddim_step(scheduler or make_scheduler(), **arguments)


@pytest.mark.parametrize("eta", [0.0, -0.1, math.nan, math.inf])
def test_without_noise_there_is_no_density(eta: float) -> None:
    with pytest.raises(ValueError, match=f"eta={eta} .*no density"):
        take(eta=eta)


def test_eta_above_one_works_until_there_is_no_room_for_it() -> None:
    # Room for the noise: eta² (1 - ᾱ_t / ᾱ_prev) / (1 - ᾱ_t) <= 1, here eta² 5/6 <= 1 at t = 1.
    state = {"model_output": torch.ones(1, 2), "sample": torch.ones(1, 2), "timestep": 1}
    for eta in (1.09, 1.0954452):  # the second is √(6/5) rounded up: 3e-8 above the room there is
        assert take(two_level_scheduler(), eta=eta, **state).mean.isfinite().all()
    with pytest.raises(ValueError, match=r"eta=1\.1 .*timesteps \[1\]"):
        take(two_level_scheduler(), eta=1.1, **state)


@pytest.mark.parametrize("other", [DDPMScheduler, PNDMScheduler, EulerDiscreteScheduler])
def test_other_schedulers_are_refused_with_the_remedy(other: type) -> None:
    with pytest.raises(TypeError, match=r"DDIMScheduler\.from_config"):
        DDIMSchedule(other(), torch.tensor([500]))


def test_timesteps_must_be_set() -> None:
    with pytest.raises(ValueError, match="set_timesteps"):
        DDIMSchedule(DDIMScheduler(), torch.tensor([500]))


def test_timesteps_are_whole_and_of_the_schedule() -> None:
    """A step from another timestep would lead to one that no step starts from."""
    scheduler = make_scheduler()
    with pytest.raises(TypeError, match="integers"):
        DDIMSchedule(scheduler, torch.tensor([500.0]))
    for timestep in (499, 1000, -1):
        with pytest.raises(ValueError, match=rf"does not stop there.*\[{timestep}\]"):
            DDIMSchedule(scheduler, torch.tensor([500, timestep]))


def test_what_is_not_run_is_nan() -> None:
    schedule, (model_output, sample) = DDIMSchedule(make_scheduler(), torch.tensor([500])), random_step()
    step = schedule.step(model_output, torch.tensor([500, 400, 500]), sample, prev_sample=sample)
    assert step.log_prob.isnan().tolist() == [False, True, False]


def test_predictions_that_would_divide_by_zero_are_refused() -> None:
    pure_noise = make_scheduler(rescale_betas_zero_snr=True, timestep_spacing="trailing")
    with pytest.raises(ValueError, match=r"v_prediction.*\[999\]"):
        take(pure_noise, timestep=999)
    with pytest.raises(ValueError, match="betas start at 0"):
        take(make_scheduler(beta_start=0.0), timestep=0)


def test_unknown_prediction_type_is_refused() -> None:
    scheduler = make_scheduler(prediction_type="flow")
    with pytest.raises(ValueError, match="prediction_type='flow'"):  # before the network is called
        DDIMSchedule(scheduler, scheduler.timesteps)


def test_the_table_is_float32_whatever_torch_s_default_is() -> None:
    scheduler = make_scheduler()
    expected = DDIMSchedule(scheduler, scheduler.timesteps)
    torch.set_default_dtype(torch.float64)
    try:
        found = DDIMSchedule(scheduler, scheduler.timesteps)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found._table.dtype == torch.float32
    torch.testing.assert_close(found._table, expected._table, equal_nan=True, rtol=0, atol=0)
