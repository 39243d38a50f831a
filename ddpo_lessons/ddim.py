"""Lesson 03: take a stochastic DDIM step and compute the log-prob of its outcome.

A denoising step with noise is a Gaussian policy: the state is ``(x_t, t, prompt)``, and the action is
``x_prev``. Its density has a closed form, because mean and standard deviation are known. Sampling is
therefore a Markov decision process (Black et al. 2023, arXiv 2305.13301, section 4.3).
"""

from __future__ import annotations

import copy
import math
from typing import Literal, NamedTuple

import torch
from diffusers import DDIMScheduler

PREDICTIONS = ("epsilon", "sample", "v_prediction")  # possible predictions of a network


class DDIMStep(NamedTuple):
    """The result of a denoising step: its outcome, the outcome's log-prob, and the Gaussian."""

    prev_sample: torch.Tensor  # (B, ...) float32, carries no gradient
    log_prob: torch.Tensor  # (B,) float32, gradient through `mean` only
    mean: torch.Tensor  # (B, ...) float32
    std: torch.Tensor  # (B,) float32, 0 where the step is deterministic


class DDIMSchedule:
    r"""The DDIM steps of a run, whose coefficients are computed and checked once.

    Formulas (12) and (16) of DDIM (Song et al. 2021, arXiv 2010.02502), with ``alpha_bar`` for its
    alpha, and the policy of DDPO (Black et al. 2023, arXiv 2305.13301, section 4.3)::

        std      = eta sqrt((1 - alpha_bar_prev) / (1 - alpha_bar)) sqrt(1 - alpha_bar / alpha_bar_prev)
        mean     = sqrt(alpha_bar_prev) x0 + sqrt(1 - alpha_bar_prev - std^2) noise
        x_prev   ~ N(mean, std^2 I)
        log_prob = -(x_prev - mean)^2 / (2 std^2) - log(std) - log(2 pi) / 2

    where ``x0`` and ``noise`` are the model's predictions. A step agrees with ``DDIMScheduler.step`` for
    every prediction type, clipping, thresholding and spacing. Its coefficients depend only on the schedule,
    so they are kept in a table on the device, and a GPU never waits for them.

    std is 0 on the last step when ``alpha_bar_prev`` is 1 (``set_alpha_to_one=True``) or equals ``alpha_bar``
    (t = 0 otherwise). Such a step returns its mean with log-prob 0 and no gradient: leave it out of training.

    Args:
        scheduler: a DDIMScheduler on which ``set_timesteps`` was called; later calls have no effect here.
        timesteps: the timesteps to run, (T,), decreasing, from ``scheduler.timesteps``.
        eta: noise scale, above 0; 1 is as noisy as DDPM.
        device: the device of the latents.

    Attributes:
        timesteps: (T,) int64 on the device.
        first_timestep: the first of them as an int, so that the host does not wait for the GPU.
        stds: (T,) float32 on the CPU; 0 where a step is deterministic and therefore not an action.
        actions: index of the first action and index after the last; None if all steps with noise are actions.

    Raises:
        TypeError: the scheduler is not a DDIMScheduler, or the timesteps are not integers.
        ValueError: eta is not above 0 or too large for a timestep, ``set_timesteps`` was not called, a
            timestep is not one of ``scheduler.timesteps`` or its prediction undefined.
    """

    actions: tuple[int, int] | None = None

    def __init__(
        self,
        scheduler: DDIMScheduler,
        timesteps: torch.Tensor,
        eta: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        coefficients = _coefficients(scheduler, timesteps.cpu(), eta)  # (4, T)
        self.scheduler, self.eta = scheduler, eta
        self.stds = coefficients[3]
        # NaN at every timestep that is not run, so that a wrong timestep cannot go unnoticed.
        shape = (4, scheduler.config.num_train_timesteps)
        table = torch.full(shape, math.nan, dtype=torch.float32)
        table[:, timesteps.cpu()] = coefficients
        self._table = table.to(device)
        self.timesteps, self.first_timestep = timesteps.to(device), int(timesteps[0])

    def with_actions(self, first: int, end: int) -> DDIMSchedule:
        """Return the same schedule with the steps from `first` to before `end` as its actions."""
        other = copy.copy(self)
        other.actions = (first, end)
        return other

    def step(
        self,
        model_output: torch.Tensor,
        timesteps: torch.Tensor,
        sample: torch.Tensor,
        noise: torch.Tensor | None = None,
        prev_sample: torch.Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> DDIMStep:
        """Take a step with this noise, or replay the step that led to `prev_sample`.

        The outcome is detached, so that the gradient of the log-prob does not flow through the sample.
        Everything is computed in float32 regardless of the inputs' dtype, because in bf16 the rounding of the
        latents alone changes some log-probs by more than DDPO's clip range.

        The network's output after guidance, the latents x_t (`sample`), standard normal noise, and the
        outcome to replay are (B, ...). The timesteps (B,) are on the device and belong to this schedule; at
        other timesteps the result is NaN. `reduction` is the mean or sum of the log-density (nats) over all
        but the batch dimension. With the mean, the PPO ratio is the geometric mean of the ratios of single
        dimensions.
        """
        numbers = self._table[:, timesteps].view(4, -1, *[1] * (sample.ndim - 1))  # (4, B, 1, ...)
        alpha_bar, weight_x0, weight_noise, std = numbers
        x0, direction = predict_x0_and_noise(self.scheduler, model_output.float(), sample.float(), alpha_bar)
        mean = weight_x0 * x0 + weight_noise * direction  # (B, ...)
        if prev_sample is None:
            prev_sample = mean + std * noise
        prev_sample = prev_sample.detach().float()
        log_prob = gaussian_log_prob(prev_sample, mean, std.flatten(), reduction)
        return DDIMStep(prev_sample, log_prob, mean, std.flatten())


def _coefficients(scheduler: DDIMScheduler, timesteps: torch.Tensor, eta: float) -> torch.Tensor:
    """Return alpha_bar, the two weights of the mean, and the std of each step, (4, T) float32 on the CPU."""
    if not isinstance(scheduler, DDIMScheduler):
        raise TypeError(
            f"scheduler is a {type(scheduler).__name__}, but the step's density is known for DDIM "
            "only; use pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, "
            "clip_sample=False)"
        )
    if scheduler.config.prediction_type not in PREDICTIONS:
        raise ValueError(
            f"prediction_type={scheduler.config.prediction_type!r} is unknown; use one of {PREDICTIONS}"
        )
    if not (math.isfinite(eta) and eta > 0):
        raise ValueError(
            f"eta={eta} must be a finite number above 0; 1 is as noisy as DDPM. At 0 the outcome of a step "
            "has no density and so no log-probability; DDIMScheduler.step samples without"
        )
    alpha_bar, alpha_bar_prev = _alpha_bars(scheduler, timesteps)
    if scheduler.config.prediction_type == "epsilon":
        _refuse_where(
            alpha_bar == 0,
            timesteps,
            "pure noise (rescale_betas_zero_snr) says nothing about x0 if the model predicts the "
            "noise; use a model with prediction_type 'v_prediction' or 'sample'",
        )
    variance = noise_variance(alpha_bar, alpha_bar_prev, eta)
    direction_variance = 1 - alpha_bar_prev - variance
    # Rounding may leave a zero slightly negative (-6e-8); clearly negative values come from eta > 1.
    _refuse_where(
        direction_variance < -1e-6,
        timesteps,
        f"eta={eta} adds more noise than x_prev may hold; lower eta",
    )
    weight_x0, weight_noise = alpha_bar_prev.sqrt(), direction_variance.clamp(min=0).sqrt()
    return torch.stack([alpha_bar, weight_x0, weight_noise, variance.sqrt()])


def gaussian_kl(
    step: DDIMStep, reference: DDIMStep, reduction: Literal["mean", "sum"] = "mean"
) -> torch.Tensor:
    r"""Return the exact KL divergence from one policy's steps to another's, for the same states: (B,).

    Both are Gaussians with the standard deviation of the schedule, so only the means differ::

        KL(step || reference) = (mean - mean_reference)^2 / (2 std^2)

    It is 0 where the step is deterministic; `reduction` is that of `DDIMSchedule.step`. Source: DPOK (Fan et
    al. 2023, arXiv 2305.16381, section 4.2).
    """
    noisy = step.std > 0
    safe_std = torch.where(noisy, step.std, 1.0)  # (B,)
    squared = (step.mean - reference.mean).square().flatten(1)  # (B, D)
    distance = squared.mean(1) if reduction == "mean" else squared.sum(1)
    return torch.where(noisy, distance / (2 * safe_std.square()), 0.0)


def _alpha_bars(scheduler: DDIMScheduler, timesteps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return alpha_bar at each timestep and at the next one of sampling, (T,) each."""
    if scheduler.num_inference_steps is None:
        raise ValueError("the scheduler has no num_inference_steps; call set_timesteps(...) first")
    if timesteps.is_floating_point():
        raise TypeError(f"timesteps must be integers, got {timesteps.dtype}")
    _refuse_where(
        ~torch.isin(timesteps, scheduler.timesteps.cpu()),
        timesteps,
        f"a schedule of {scheduler.num_inference_steps} steps does not stop there; take timesteps of "
        "scheduler.timesteps",
    )
    table = scheduler.alphas_cumprod.cpu()
    prev_timesteps = timesteps - scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    # The clamp only keeps the index valid, because below 0 the final alpha_bar is used.
    alpha_bar_prev = torch.where(
        prev_timesteps >= 0,
        table[prev_timesteps.clamp(min=0)],
        scheduler.final_alpha_cumprod.cpu(),
    )
    alpha_bar = table[timesteps]
    _refuse_where(alpha_bar == 1, timesteps, "the betas start at 0, which leaves no noise to remove")
    return alpha_bar, alpha_bar_prev


def noise_variance(alpha_bar: torch.Tensor, alpha_bar_prev: torch.Tensor, eta: float) -> torch.Tensor:
    """Return the variance of the noise that a step adds: the square of formula (16) of DDIM.

    `alpha_bar`, of any shape, belongs to the timestep of the step, and `alpha_bar_prev` to the next timestep.
    The variance is exactly 0 where the step is deterministic.
    """
    return eta**2 * (1 - alpha_bar_prev) / (1 - alpha_bar) * (1 - alpha_bar / alpha_bar_prev)


def predict_x0_and_noise(
    scheduler: DDIMScheduler,
    model_output: torch.Tensor,
    sample: torch.Tensor,
    alpha_bar: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert the model's output to x0 and noise, (B, ...) each: x_t = sqrt(ab) x0 + sqrt(1 - ab) noise.

    The config of `scheduler` gives the prediction type and the limits of x0. `sample` is x_t, (B, ...), and
    `alpha_bar` is ab, (B, 1, ...). Raises a ValueError for an unknown prediction type.
    """
    signal, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()  # (B, 1, ...)
    match scheduler.config.prediction_type:
        case "epsilon":
            x0, noise = (sample - sigma * model_output) / signal, model_output
        case "sample":
            x0, noise = model_output, (sample - signal * model_output) / sigma
        case "v_prediction":
            x0 = signal * sample - sigma * model_output
            noise = signal * model_output + sigma * sample
        case unknown:
            raise ValueError(f"prediction_type={unknown!r} is unknown; use one of {PREDICTIONS}")
    # As in the scheduler, only x0 is limited; the predicted noise stays unchanged.
    if scheduler.config.thresholding:
        x0 = scheduler._threshold_sample(x0)
    elif scheduler.config.clip_sample:
        limit = scheduler.config.clip_sample_range
        x0 = x0.clamp(-limit, limit)
    return x0, noise


def gaussian_log_prob(
    value: torch.Tensor, mean: torch.Tensor, std: torch.Tensor, reduction: str
) -> torch.Tensor:
    """Return the log-density of N(mean, std^2 I) at a value (B, ...) with std (B,): (B,) in nats.

    `reduction` is "mean" or "sum" over all but the batch dimension. Where std is 0, the result is 0 without a
    gradient.
    """
    noisy = std != 0  # the NaN of an unknown timestep stays NaN
    # Replace std before dividing, because a NaN in the unused branch would still reach the gradient.
    safe_std = torch.where(noisy, std, 1.0)
    squared_error = (value - mean).square().flatten(1)  # (B, D)
    error = squared_error.mean(1) if reduction == "mean" else squared_error.sum(1)
    dimensions = 1 if reduction == "mean" else squared_error.shape[1]
    constant = dimensions * (safe_std.log() + 0.5 * math.log(2 * math.pi))
    return torch.where(noisy, -error / (2 * safe_std.square()) - constant, 0.0)


def _refuse_where(refused: torch.Tensor, timesteps: torch.Tensor, message: str) -> None:
    if refused.any():
        raise ValueError(f"{message} (at timesteps {timesteps[refused].unique().tolist()})")
