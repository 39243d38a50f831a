"""Define the interface of algorithms: their inputs, their methods, and checks of what these return."""

import abc
import contextlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import Context
from ddpo_lessons.flow import FlowSchedule
from ddpo_lessons.models import Family, Schedule
from ddpo_lessons.rollout import SHUFFLE, WINDOW, Trajectory, seeded

Pairs = dict[str, torch.Tensor]  # "rows" (samples) and "columns" (actions), (N,) each, and entries of a loss
_OTHERS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args and **kwargs
LossAndStats = tuple[torch.Tensor, dict[str, torch.Tensor]]
Loss = Callable[[Any, Pairs], LossAndStats]  # of a denoiser and a group of pairs


@dataclass(frozen=True)
class Samples:
    """The samples of one process in an epoch, with their advantages."""

    epoch: int  #: number of the epoch, from 0
    first_step: int  #: number of optimizer steps before this epoch
    process: int  #: number of the process
    #: (B,) on the CPU, the numbers of these samples in the epoch; other processes have the others
    numbers: torch.Tensor
    trajectory: Trajectory  #: the record of the rollouts
    advantages: torch.Tensor  #: (B,) or (B, T), the result of `Algorithm.advantages`
    #: `(images, rows) -> rewards`: calls the reward function again, for other images (N, 3, H, W) made from
    #: the contexts of the samples `rows` (N,); with a gradient if the reward function has one
    score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    #: (B, T) log-probs from sampling, if those of the trajectory were computed again
    sampled_log_probs: torch.Tensor | None = None


class Learner(Protocol):
    """The part of a trainer that takes optimizer steps; `steps_done` counts them."""

    steps_done: int

    def split(self, pairs: Pairs) -> list[Pairs]:
        """Split the pairs of a step into groups, one per forward pass."""

    def reference(self) -> contextlib.AbstractContextManager[Any]:
        """Provide the denoiser as it was before training, within a `with` block."""

    def evaluate(self, function: Callable[[Any, Pairs], torch.Tensor], groups: Sequence[Pairs]) -> list[Any]:
        """Call `function(denoiser, group)` for groups as a step calls its loss, without gradients."""

    def old_policy(self) -> contextlib.AbstractContextManager[Any]:
        """Provide the denoiser with the old policy's weights, within a `with` block."""

    def update_old_policy(self, decay: float) -> None:
        """Move the old policy's weights: old = decay old + (1 - decay) new; 0 copies the new weights."""


def draw_window(schedule: Schedule, window: int, config: DDPOConfig, epoch: int) -> tuple[int, int]:
    """Sample a window of consecutive steps with noise; return its first index and the index after it.

    Raises a ValueError if fewer steps have noise.
    """
    noisy = torch.nonzero(schedule.stds > 0).flatten().tolist()
    if window > len(noisy):
        raise ValueError(f"window={window} of {len(noisy)} steps with noise: lower it, or take more steps")
    places = len(noisy) - window + 1
    first = noisy[0] + int(torch.randint(places, (1,), generator=seeded(config.seed, epoch, WINDOW)))
    return first, first + window


class Algorithm(abc.ABC):
    """Base class of algorithms, which define weights of samples and a loss.

    Settings of an algorithm are arguments of its constructor, with defaults.
    """

    name: ClassVar[str]  #: the name in checkpoints and on the command line
    #: fields of the config that the algorithm does not use, which must therefore keep their defaults
    unused: ClassVar[tuple[str, ...]] = ()
    #: whether the learner keeps the weights of an old policy, see `Learner.update_old_policy`
    keeps_old: ClassVar[bool] = False
    #: whether the rollouts of a group start in the same state; if no step has noise they must not
    shares_starts: ClassVar[bool] = True
    #: whether flow models are sampled with their ODE; other models keep their noise
    follows_ode: ClassVar[bool] = False
    config: DDPOConfig
    family: Family
    num_train_timesteps: int

    def check(self, config: DDPOConfig) -> None:
        """Raise a ValueError for settings that the algorithm does not use."""
        for name in self.unused:
            if getattr(config, name) != getattr(DDPOConfig, name):
                raise ValueError(f"{self.name} does not use {name}={getattr(config, name)}: leave it out")

    def begin(self, config: DDPOConfig, family: Family, num_train_timesteps: int) -> None:
        """Prepare for a run, in which `num_train_timesteps` actions of each sample are trained on.

        Raises a TypeError if `state_dict` returns what JSON cannot store.
        """
        with contextlib.suppress(AttributeError):  # of a subclass that sets its state after this call
            check_state(self.state_dict())
        self.config, self.family, self.num_train_timesteps = config, family, num_train_timesteps

    def needs_reference(self, config: DDPOConfig) -> bool:
        """Return whether `Learner.reference`, the policy before training, will be used."""
        return config.train_kl_coefficient > 0

    def sampling_schedule(self, schedule: Schedule, config: DDPOConfig, epoch: int) -> Schedule:
        """Return the denoising steps of an epoch, given the schedule of config and model."""
        if not (self.follows_ode and isinstance(schedule, FlowSchedule)):
            return schedule
        if config.sample_eta != DDPOConfig.sample_eta:
            raise ValueError(
                f"{self.name} samples a flow model by its ODE, without noise: leave sample_eta out"
            )
        return schedule.with_noise(eta=0.0)

    def sampling_policy(self, learner: Learner) -> contextlib.AbstractContextManager[Any]:
        """Let another policy than the newest one sample, within a `with` block."""
        return contextlib.nullcontext()

    def branches(self, config: DDPOConfig) -> int:
        """Return the number of branches per action of a group; by default all separate at the first."""
        return config.sample_group_size

    def key(self, context: Context) -> Any:
        """Return the key by which samples are compared: `metadata["id"]` or the prompt, or None for no key.

        A key consists of str, int, float, bool, None and tuples of these, because checkpoints store it.
        """
        return context.key if self.config.per_prompt_stat_tracking else None

    @abc.abstractmethod
    def advantages(self, rewards: torch.Tensor, keys: Sequence[Any]) -> torch.Tensor:
        """Compute weights (N,) or (N, T) from the rewards (N,) of all processes and the keys of `key`."""

    @abc.abstractmethod
    def steps(self, samples: Samples, learner: Learner) -> Iterator[tuple[Loss, list[Pairs]]]:
        """Yield the optimizer steps of an epoch, each as a loss and the groups of pairs that it averages.

        The trainer accumulates the gradient of `loss(denoiser, group)` over the groups and takes the step
        before the iterator continues, so the weights change between two yields. The loss also returns
        statistics: each is a mean over the group's pairs or, if its name begins with "max", a maximum. The
        "max_ratio_error" of an epoch's first step is the error of the first replay.
        """

    def shuffles(self, samples: Samples) -> Iterator[torch.Generator]:
        """Yield the generator of the order of training for each inner epoch."""
        for inner_epoch in range(self.config.train_num_inner_epochs):
            yield seeded(self.config.seed, samples.epoch, SHUFFLE, inner_epoch, samples.process)

    def identity(self) -> dict[str, Any]:
        """Return the algorithm's settings, which are its constructor's arguments, from its attributes."""
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
        """Return the state that is kept between epochs, for JSON."""
        return None

    def load_state_dict(self, state: Any) -> None:
        """Load the state that `state_dict` returned."""
        if state is not None:
            raise ValueError(f"{self.name} remembers nothing, and was given {state!r:.200}")


def check_advantages(advantages: Any, num_samples: int, num_actions: int) -> torch.Tensor:
    """Return an algorithm's advantages, (N,) or (N, T).

    Raises a TypeError if they are no tensor, and a ValueError if they have another shape.
    """
    if not isinstance(advantages, torch.Tensor):
        raise TypeError(f"advantages() of the algorithm must return a tensor, not {advantages!r:.60}")
    shapes = ((num_samples,), (num_samples, num_actions))
    if tuple(advantages.shape) not in shapes:
        raise ValueError(
            f"advantages() of the algorithm returned shape {tuple(advantages.shape)} for {num_samples} "
            f"samples of {num_actions} actions: return one weight per sample, {shapes[0]}, or one per "
            f"action, {shapes[1]}"
        )
    return advantages


def check_state(state: Any) -> None:
    """Raise a TypeError for an algorithm's state that JSON does not store, or changes."""
    remedy = (
        f"state_dict() of the algorithm must return what JSON holds and gives back, not {state!r:.60}: dicts "
        "with text as keys, lists, text, numbers, and tensor.tolist() instead of a tensor"
    )
    try:
        given_back = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise TypeError(remedy) from error
    if given_back != state:  # tuples become lists, and numbers as keys text
        raise TypeError(remedy)


def check_steps(steps: Any, advantages: torch.Tensor) -> Iterator[tuple[Loss, list[Pairs]]]:
    """Yield an algorithm's optimizer steps, and check each one before.

    Raises a TypeError if they are no iterator of pairs of a loss and groups, and a ValueError if there is no
    group or no pair, or if no step is yielded although some advantage is not 0.
    """
    if not isinstance(steps, Iterable):
        raise TypeError(f"steps() of the algorithm must yield (loss, groups) pairs, not return {steps!r:.60}")
    is_required = bool(advantages.any())
    for step in steps:
        if not (isinstance(step, tuple) and len(step) == 2):
            raise TypeError(f"steps() of the algorithm must yield (loss, groups) pairs, not {step!r:.60}")
        loss, groups = step
        if not callable(loss):
            raise TypeError(
                f"steps() of the algorithm yielded the loss {loss!r:.60}: yield a function of a denoiser and "
                "a group, such as partial(self.loss, samples, learner)"
            )
        if not (isinstance(groups, list | tuple) and groups and all(map(_is_group, groups))):
            raise TypeError(
                f"steps() of the algorithm yielded the groups {groups!r:.60}: yield a list of one or more "
                "dicts with numbers of samples, 'rows', and of their actions, 'columns', as tensors (P,)"
            )
        is_required = False
        yield loss, list(groups)
    if is_required:
        raise ValueError("steps() of the algorithm yielded nothing: yield one or more (loss, groups) pairs")


def _is_group(group: Any) -> bool:
    rows = group.get("rows") if isinstance(group, dict) else None
    return isinstance(rows, torch.Tensor) and all(  # DRaFT's groups have no columns
        isinstance(n, torch.Tensor) and n.dtype == torch.long and n.ndim == 1 and 0 < len(n) == len(rows)
        for n in (rows, group.get("columns", rows))
    )


def check_pairs(pairs: Pairs, shape: tuple[int, ...]) -> None:
    """Raise a ValueError for pairs that are not among B samples with T actions each, `shape`.

    Numbers on a GPU are not checked, because the host would wait for them.
    """
    for name, count in zip(("rows", "columns"), shape, strict=True):
        if name not in pairs:
            raise ValueError(f"steps() of the algorithm yielded pairs without {name!r}: replay needs them")
        numbers = pairs[name]
        if numbers.device.type == "cpu" and not 0 <= numbers.min() <= numbers.max() < count:
            raise ValueError(
                f"steps() of the algorithm yielded {name!r} from {numbers.min()} to {numbers.max()}: let "
                f"them lie between 0 and {count - 1}"
            )


def check_loss(returned: Any) -> LossAndStats:
    """Return the result of an algorithm's loss; raise an error if it cannot be trained on."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not (is_pair and isinstance(returned[0], torch.Tensor) and isinstance(returned[1], dict)):
        raise TypeError(
            "loss() of the algorithm must return a pair of the loss, a tensor, and a dict of statistics, "
            f"not {returned!r:.60}"
        )
    loss, stats = returned
    for name, value in (("the loss", loss), *((f"the statistic {name!r}", v) for name, v in stats.items())):
        try:
            shape = tuple(torch.as_tensor(value).shape)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"loss() of the algorithm returned {name} as {value!r:.60}: return a number or leave it out"
            ) from error
        if shape != ():
            raise ValueError(
                f"loss() of the algorithm returned {name} with shape {shape}: return one number, such as the "
                "mean over the pairs"
            )
    if not loss.requires_grad:
        raise ValueError(
            "loss() of the algorithm returned a loss without a gradient: compute it from the predictions of "
            "the denoiser, as replay does, and without detach() or no_grad()"
        )
    return loss, stats
