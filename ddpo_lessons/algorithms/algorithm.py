"""What an algorithm is given, and what it has to have."""

import abc
import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import Context
from ddpo_lessons.flow import FlowSchedule
from ddpo_lessons.models import Family, Schedule
from ddpo_lessons.rollout import SHUFFLE, WINDOW, Trajectory, seeded

Pairs = dict[str, torch.Tensor]  # "rows" (samples) and "columns" (actions), (N,) each, and what a loss adds
_OTHERS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args and **kwargs
LossAndStats = tuple[torch.Tensor, dict[str, torch.Tensor]]
Loss = Callable[[Any, Pairs], LossAndStats]  # of a denoiser and a group of pairs


@dataclass(frozen=True)
class Samples:
    """What one process sampled in an epoch, and how good it was."""

    epoch: int  #: its number, from 0
    first_step: int  #: optimizer steps that were taken before it
    process: int  #: number of the process
    #: (B,) on the CPU, which samples of the epoch these are; other processes have the others
    numbers: torch.Tensor
    trajectory: Trajectory  #: what was done
    advantages: torch.Tensor  #: (B,) or (B, T), what `Algorithm.advantages` made of the rewards
    #: `(images, rows) -> rewards`, with a gradient if the reward function has one: asks it again, for other
    #: images (N, 3, H, W) made from the contexts of the samples `rows` (N,)
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    #: (B, T) log-probs as sampling computed them, if those of the trajectory were computed once more
    sampled_log_probs: torch.Tensor | None = None


class Learner(Protocol):
    """Takes optimizer steps; `steps_done` counts them."""

    steps_done: int

    def split(self, pairs: Pairs) -> list[Pairs]:
        """Cut the pairs of a step into as many groups as forward passes are needed."""

    def reference(self) -> contextlib.AbstractContextManager[Any]:
        """Give the denoiser as it was before training, for the time of a `with` block."""

    def evaluate(self, function: Callable[[Any, Pairs], torch.Tensor], groups: Sequence[Pairs]) -> list[Any]:
        """Call `function(denoiser, group)` for groups of pairs as a step does its loss, without gradients."""

    def old_policy(self) -> contextlib.AbstractContextManager[Any]:
        """Give the denoiser with the old policy's weights, for the time of a `with` block."""

    def update_old_policy(self, decay: float) -> None:
        """Move the old policy's weights: old = decay old + (1 - decay) new; 0 copies the new ones."""


def draw_window(schedule: Schedule, window: int, config: DDPOConfig, epoch: int) -> tuple[int, int]:
    """Draw neighbouring steps of those with noise, first and end; a ValueError if there are fewer."""
    noisy = torch.nonzero(schedule.stds > 0).flatten().tolist()
    if window > len(noisy):
        raise ValueError(f"window={window} of {len(noisy)} steps with noise: lower it, or take more steps")
    places = len(noisy) - window + 1
    first = noisy[0] + int(torch.randint(places, (1,), generator=seeded(config.seed, epoch, WINDOW)))
    return first, first + window


class Algorithm(abc.ABC):
    """How rewards weigh samples, and the loss; settings of its own are arguments with defaults."""

    name: ClassVar[str]  #: what checkpoints and the command line call it
    #: fields of the config that it does not use, and that must therefore keep their defaults
    unused: ClassVar[tuple[str, ...]] = ()
    #: whether the learner is to keep an older policy's weights, see `Learner.update_old_policy`
    keeps_old: ClassVar[bool] = False
    #: whether the rollouts of a group begin in one state; where no step has noise they must not
    shares_starts: ClassVar[bool] = True
    #: whether flow models are sampled by their ODE; other models keep their noise
    follows_ode: ClassVar[bool] = False
    config: DDPOConfig
    family: Family
    num_train_timesteps: int

    def check(self, config: DDPOConfig) -> None:
        """Refuse settings that ask for what the algorithm does not have, with a ValueError."""
        for name in self.unused:
            if getattr(config, name) != getattr(DDPOConfig, name):
                raise ValueError(f"{self.name} does not use {name}={getattr(config, name)}: leave it out")

    def begin(self, config: DDPOConfig, family: Family, num_train_timesteps: int) -> None:
        """Get to know a run before it samples, and how many actions of each sample are trained on."""
        self.config, self.family, self.num_train_timesteps = config, family, num_train_timesteps

    def needs_reference(self, config: DDPOConfig) -> bool:
        """Tell whether `Learner.reference` will be asked for the policy before training."""
        return config.train_kl_coefficient > 0

    def sampling_schedule(self, schedule: Schedule, config: DDPOConfig, epoch: int) -> Schedule:
        """Return the steps to sample by in an epoch, given those that config and model lead to."""
        if not (self.follows_ode and isinstance(schedule, FlowSchedule)):
            return schedule
        if config.sample_eta != DDPOConfig.sample_eta:
            raise ValueError(
                f"{self.name} samples a flow model by its ODE, without noise: leave sample_eta out"
            )
        return schedule.with_noise(eta=0.0)

    def sampling_policy(self, learner: Learner) -> contextlib.AbstractContextManager[Any]:
        """Make another policy than the newest one sample, for the time of a `with` block."""
        return contextlib.nullcontext()

    def branches(self, config: DDPOConfig) -> int:
        """Return into how many a group parts at each action; by default its members part at the first."""
        return config.sample_group_size

    def key(self, context: Context) -> Any:
        """Return what a sample is compared by: `metadata["id"]` or the prompt; None where it is not.

        Checkpoints keep it: it is made of str, int, float, bool, None and tuples of these.
        """
        return context.key if self.config.per_prompt_stat_tracking else None

    @abc.abstractmethod
    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any]) -> torch.Tensor:
        """Turn all processes' rewards (N,), with what `key` made of contexts, into weights (N,) or (N, T)."""

    @abc.abstractmethod
    def steps(self, samples: Samples, learner: Learner) -> Iterator[tuple[Loss, list[Pairs]]]:
        """Yield the optimizer steps of an epoch, each a loss and the groups of pairs that it is the mean of.

        The trainer accumulates the gradient of `loss(denoiser, group)` over the groups and takes the step,
        before it asks for the next one. Beside the loss come statistics: each a mean over the group's pairs
        or, if its name begins with "max", a maximum. The "max_ratio_error" of an epoch's first step is the
        error of the first replay.
        """

    def shuffles(self, samples: Samples) -> Iterator[torch.Generator]:
        """Yield what decides the order of training in each inner epoch."""
        for inner_epoch in range(self.config.train_num_inner_epochs):
            yield seeded(self.config.seed, samples.epoch, SHUFFLE, inner_epoch, samples.process)

    def identity(self) -> dict[str, Any]:
        """Return settings of its own that decide the weights: its constructor's arguments, as attributes."""
        kind = type(self)
        names = [name for name, a in inspect.signature(kind).parameters.items() if a.kind not in _OTHERS]
        for name in names:
            if not hasattr(self, name):
                raise TypeError(
                    f"{kind.__name__} does not keep its argument {name!r}, which a resume compares: set "
                    f"self.{name}"
                )
        return {name: getattr(self, name) for name in names}

    def state_dict(self) -> Any:
        """Return what it remembers from epoch to epoch, in what JSON holds."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Take that back."""
        if state is not None:
            raise ValueError(f"{self.name} remembers nothing, and was given {state!r:.200}")
