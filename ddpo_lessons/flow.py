r"""Lesson 09: take steps of a flow model, with the ODE that it was trained for or an SDE for exploration.

Rectified flow (Liu et al. 2022, arXiv 2209.03003; Esser et al. 2024, arXiv 2403.03206) mixes data and noise
along straight lines, x = (1 - σ̄) x₀ + σ̄ ε with the noise level σ̄ from 0 to 1, and a network predicts the
velocity v = ε - x₀. The predictions of x₀ and ε are x - σ̄ v and x + (1 - σ̄) v. A step from σ̄ to σ̄' < σ̄, with
Δ = σ̄ - σ̄', samples from a Gaussian, which is one of

    ODE    mean = x - v Δ,                                                     std = 0
    SDE    mean = x - (v + κ² (x + (1 - σ̄) v) / (2σ̄)) Δ,                       std = κ √Δ
    CPS    mean = (1 - σ̄') (x - σ̄ v) + √(σ̄'² - std²) (x + (1 - σ̄) v),          std = σ̄' sin(η π / 2)

As Δ goes to 0, the SDE has the distribution of x of the ODE, for any κ. "flow" has κ = η √(σ̄ / (1 - σ̄))
(Flow-GRPO, Liu et al. 2025, arXiv 2505.05470, section 4.2), and "dance" has κ = η (DanceGRPO, Xue et al.
2025, arXiv 2505.07818). CPS (Wang and Yu 2025, arXiv 2509.05952) keeps the weights of x₀ and ε instead of
the distribution. η, here `eta`, is the noise level; the papers write a for it, and σ or t for σ̄.
"""

from __future__ import annotations

import copy
import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from ddpo_lessons.ddim import DDIMStep, gaussian_log_prob

SDE = Literal["flow", "dance", "cps"]


def flow_coefficients(sigmas: torch.Tensor, eta: float, sde: SDE = "flow") -> torch.Tensor:
    """Return the coefficients of each step, (3, T) float32: weights of x and v in the mean, and the std.

    `sigmas` (T + 1,) are decreasing noise levels in [0, 1], and `eta` is η; 0 gives the ODE. At σ̄ = 1, where
    √(σ̄ / (1 - σ̄)) is undefined, "flow" uses 1 - σ̄ of the next noise level, as its authors do. A step to
    σ̄' = 0 has no noise, because it gives the final image. Raises a ValueError for an eta or sde that does
    not fit, and for noise levels that do not decrease.
    """
    if sde not in get_args(SDE):
        raise ValueError(f"sde={sde!r} does not exist: use one of {', '.join(get_args(SDE))}")
    if not (math.isfinite(eta) and eta >= 0):
        raise ValueError(f"eta={eta} must be a finite number, 0 or more; 0.7 is usual for flow models")
    if sde == "cps" and eta > 1:
        raise ValueError(
            f"eta={eta} is too large: 1 is the most for sde='cps', where all of the noise is new"
        )
    sigmas = sigmas.double()  # the weights of the last steps are differences of nearly equal numbers
    now, after = sigmas[:-1], sigmas[1:]  # (T,)
    length = now - after
    if not (length > 0).all():
        raise ValueError(f"sigmas must fall from step to step, and are {sigmas.tolist()}")
    if sde == "cps":
        std = after * math.sin(eta * math.pi / 2)
        kept = (after.square() - std.square()).clamp(min=0).sqrt()
        weights = (1 - after) + kept, (1 - now) * kept - now * (1 - after)
    else:
        level = torch.full_like(now, eta)
        if sde == "flow":
            room = torch.where(now < 1, 1 - now, 1 - after)
            level = eta * (now / room).sqrt()
        level = torch.where(after > 0, level, 0.0)
        pull = level.square() / (2 * now)
        weights = 1 - pull * length, -(1 + pull * (1 - now)) * length
        std = level * length.sqrt()
    return torch.stack([*weights, std]).float()


class FlowSchedule:
    """The steps of a flow model's run, computed once, as `ddim.DDIMSchedule` does for DDIM.

    Args:
        sigmas: (T + 1,) noise levels, decreasing; kept as float32 on the CPU.
        eta: noise level η; 0 gives the ODE.
        device: the device of the latents.
        sde: the formula, see `flow_coefficients`, whose errors are raised.
        window: (first, end) of the steps with noise; all others follow the ODE. None for all steps.
        num_train_timesteps: the timestep at σ̄ = 1.

    Attributes:
        timesteps: (T,) float32 on the device, σ̄ times `num_train_timesteps`, which is the network's input.
        stds: (T,) float32 on the CPU; 0 where a step has no noise and therefore is not an action.
        actions: index of the first action and index after the last; None if all steps with noise are actions.
    """

    actions: tuple[int, int] | None = None

    def __init__(
        self,
        sigmas: torch.Tensor,
        eta: float,
        device: torch.device | str,
        sde: SDE = "flow",
        window: tuple[int, int] | None = None,
        num_train_timesteps: int = 1000,
    ) -> None:
        sigmas = sigmas.cpu()
        first, end = window or (0, len(sigmas) - 1)
        coefficients = flow_coefficients(sigmas, 0.0)  # (3, T): the ODE
        coefficients[:, first:end] = flow_coefficients(sigmas, eta, sde)[:, first:end]
        self.sigmas, self.eta, self.num_train_timesteps = sigmas.float(), eta, num_train_timesteps
        self.stds = coefficients[2]
        lengths = self.sigmas[:-1] - self.sigmas[1:]
        self.timesteps = (self.sigmas[:-1] * num_train_timesteps).to(device)
        # The last column belongs to timesteps that are not in this schedule, and gives NaN.
        self._table = F.pad(torch.cat([coefficients, lengths[None]]), (0, 1), value=math.nan).to(device)

    def with_actions(self, first: int, end: int) -> FlowSchedule:
        """Return the same schedule with the steps from `first` to before `end` as its actions."""
        other = copy.copy(self)
        other.actions = (first, end)
        return other

    def with_noise(
        self, eta: float | None = None, sde: SDE = "flow", window: tuple[int, int] | None = None
    ) -> FlowSchedule:
        """Return a schedule of the same noise levels with other noise; None keeps eta."""
        eta = self.eta if eta is None else eta
        return FlowSchedule(self.sigmas, eta, self.timesteps.device, sde, window, self.num_train_timesteps)

    def step(
        self,
        model_output: torch.Tensor,
        timesteps: torch.Tensor,
        sample: torch.Tensor,
        noise: torch.Tensor | None = None,
        prev_sample: torch.Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> DDIMStep:
        """Take a step with this noise, or replay the step to `prev_sample`, as `DDIMSchedule.step` does.

        Latents, velocity (after guidance) and noise (standard normal) are (B, ...). `timesteps` (B,) belong
        to this schedule and are on the device.
        """
        shape = (3, -1, *[1] * (sample.ndim - 1))
        weight_x, weight_v, std = self._table[:3, self._numbers(timesteps)].view(shape)  # (B, 1, ...)
        mean = weight_x * sample.float() + weight_v * model_output.float()  # (B, ...)
        if prev_sample is None:
            prev_sample = mean + std * noise
        prev_sample = prev_sample.detach().float()
        log_prob = gaussian_log_prob(prev_sample, mean, std.flatten(), reduction)
        return DDIMStep(prev_sample, log_prob, mean, std.flatten())

    def timesteps_at(self, places: torch.Tensor) -> torch.Tensor:
        """Return timesteps (N,) at positions between the clean end, 0, and the first step, 1.

        Each of the T steps takes an equal part, within which σ̄ grows linearly. Positions are (N,), on the
        CPU.
        """
        steps = len(self.sigmas) - 1
        done = (1 - places).clamp(0, 1) * steps  # (N,), in steps
        number = done.long().clamp(max=steps - 1)
        sigmas = torch.lerp(self.sigmas[number], self.sigmas[number + 1], done - number)
        return sigmas * self.num_train_timesteps

    def lengths_at(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Return the lengths Δ = σ̄ - σ̄' (B,) of the steps at timesteps (B,)."""
        return self._table[3, self._numbers(timesteps)]

    def _numbers(self, timesteps: torch.Tensor) -> torch.Tensor:
        """Return the indices of these steps, (B,), without waiting for a GPU."""
        matches = timesteps[:, None] == self.timesteps  # (B, T)
        return torch.where(matches.any(dim=1), matches.int().argmax(dim=1), len(self.timesteps))
