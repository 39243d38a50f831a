"""Lesson 09: Flow-GRPO (Liu et al. 2025, arXiv 2505.05470), DDPO for models whose sampler is an ODE.

An ODE has no actions, because the initial noise determines the image. Flow-GRPO therefore samples with an SDE
of the same marginals (`flow.py`). Its steps are Gaussian policies like those of DDIM, so the rest is DDPO,
with rewards compared within a prompt. Three settings are new:

- the SDE: "flow", "dance" (DanceGRPO, arXiv 2505.07818) or "cps" (arXiv 2509.05952);
- a window: only some consecutive steps have noise and are trained, and the rest follows the ODE. The window
  moves between epochs (MixGRPO, arXiv 2507.21802, slides it; Flow-GRPO-Fast samples its position, as here);
- the penalty: the authors leave Δ out of the KL of a step, (mean - mean_ref)² / (2 κ²) with std² = κ² Δ.
"""

import torch

from ddpo_lessons.algorithms.algorithm import Pairs, draw_window
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.ddim import DDIMStep
from ddpo_lessons.flow import SDE, FlowSchedule
from ddpo_lessons.models import Schedule
from ddpo_lessons.rollout import Trajectory


def flow_schedule(schedule: Schedule, name: str) -> FlowSchedule:
    """Return the schedule if it is a flow model's; otherwise raise a ValueError for the algorithm."""
    if not isinstance(schedule, FlowSchedule):
        raise ValueError(f"algorithm={name!r} needs a flow model, such as tiny-sd3: for this one use 'ddpo'")
    return schedule


class FlowGRPO(DDPO):
    """DDPO on the SDE of a flow model; `sample_eta` of the config is its noise level η.

    With `sample_group_size` above 1 rewards are compared within a group, whose rollouts also share their
    first state, as in DanceGRPO. `sde` is that of `flow.flow_coefficients`. `window` is the number of
    consecutive steps with noise, 0 for all; other values raise a ValueError. `kl_times_length` multiplies the
    KL of a step by its length Δ, as the authors do for "flow" and "dance", because their σ lacks √Δ there.
    With "cps" they use the true KL, which False uses for every SDE.
    """

    name = "flow_grpo"

    def __init__(self, sde: SDE = "flow", window: int = 0, kl_times_length: bool = True) -> None:
        if not isinstance(window, int) or window < 0:
            raise ValueError(f"window={window} must be a whole number; 0 stands for all steps")
        self.sde, self.window, self.kl_times_length = sde, window, kl_times_length

    def sampling_schedule(self, schedule: Schedule, config: DDPOConfig, epoch: int) -> FlowSchedule:
        """Return the schedule with the SDE's noise in the epoch's window."""
        everywhere = flow_schedule(schedule, self.name).with_noise(sde=self.sde)
        if not self.window:
            return everywhere
        return everywhere.with_noise(sde=self.sde, window=draw_window(everywhere, self.window, config, epoch))

    def kl(self, new: DDIMStep, reference: DDIMStep, trajectory: Trajectory, pairs: Pairs) -> torch.Tensor:
        """Return the KL to the policy before training (N,), times the steps' lengths if that is set."""
        kl = super().kl(new, reference, trajectory, pairs)
        if not self.kl_times_length or self.sde == "cps":
            return kl
        schedule = flow_schedule(trajectory.schedule, self.name)
        return kl * schedule.lengths_at(trajectory.timesteps[pairs["rows"], pairs["columns"]])
