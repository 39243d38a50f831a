"""Lesson 07: branching, which gives each action of long trajectories its own credit, for DDPO.

DDPO gives every action of a sample the sample's whole reward, so most of an action's credit belongs to other
actions. Here only a window of consecutive steps are actions, and it is sampled again for each epoch. A group
of G = b^n rollouts shares its trajectory up to the window of n steps and splits into b branches at each of
them, so that it is a tree whose leaves are images. At all other steps the group shares its noise, so that its
images differ only because of the actions:

    value of a node = mean reward of the leaves below it
    advantage of an action = value of where it leads - value of where it was taken

divided by the standard deviation of all such differences at that depth. With a window of one step this is
DDPO's advantage within a group, except that the samples differ by a single action. States that rollouts share
are predicted once, in sampling and in training, so an epoch is also cheaper.

Relatives: TempFlow-GRPO (arXiv 2508.04324) branches at one step; BranchGRPO (arXiv 2509.06040) and TreeGRPO
(arXiv 2512.08153) average leaves over trees.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ddpo_lessons.algorithms.algorithm import draw_window
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.models import Schedule


def branch_advantages(rewards: torch.Tensor, branches: int, window: int, eps: float = 1e-8) -> torch.Tensor:
    """Compute the advantages of actions in trees: the child's value minus the parent's, by depth.

    Rewards (N,) are those of the leaves in the order of the trees, so that the leaves below a node are
    consecutive. A tree with b `branches` at each of n actions (`window`) has b^n leaves. Column k of the
    result (N, n) float32 belongs to the action at depth k on the way to each leaf, divided by the standard
    deviation of the column plus `eps`.
    """
    leaves = rewards.cpu().double()  # on the CPU, because MPS has no float64
    sizes = [branches ** (window - depth) for depth in range(window + 1)]  # leaves below a node, by depth
    values = [leaves.view(-1, size).mean(dim=1).repeat_interleave(size) for size in sizes]  # (N,) each
    differences = torch.stack(values, dim=1).diff(dim=1)  # (N, n)
    return (differences / (differences.std(dim=0, correction=0) + eps)).float().to(rewards.device)


class Branching(DDPO):
    """DDPO whose groups branch in a window of steps; `sample_group_size` is the number of a tree's leaves.

    `window` is n, the number of consecutive steps that are actions; the group size is a power b^n. Raises a
    ValueError for a window that is not a number of steps.
    """

    name = "branching"
    unused = ("per_prompt_stat_tracking",)

    def __init__(self, window: int = 1) -> None:
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"window={window} must be a whole number of steps, 1 or more")
        self.window = window

    def check(self, config: DDPOConfig) -> None:
        super().check(config)
        size = config.sample_group_size
        if size < 2 or self.branches(config) ** self.window != size:
            raise ValueError(
                f"sample_group_size={size} must be b^{self.window} for branching, with b branches at each "
                f"step of its window: set sample_group_size to {2**self.window} or {3**self.window}, or "
                "choose another window"
            )
        if config.sample_batch_size % size:
            raise ValueError(
                f"branching needs whole groups in a batch: make sample_batch_size="
                f"{config.sample_batch_size} a multiple of sample_group_size={size}"
            )

    def branches(self, config: DDPOConfig) -> int:
        """Return b, for which b^window is the group size."""
        return round(config.sample_group_size ** (1 / self.window))

    def sampling_schedule(self, schedule: Schedule, config: DDPOConfig, epoch: int) -> Schedule:
        """Return the schedule with the epoch's window as its actions."""
        return schedule.with_actions(*draw_window(schedule, self.window, config, epoch))

    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any]) -> torch.Tensor:
        return branch_advantages(rewards, self.branches(self.config), self.window)
