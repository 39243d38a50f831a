"""Get the contexts of an epoch, which are prompts and images, equally in every process."""

import contextlib
import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed

from ddpo_lessons.algorithms.algorithm import Algorithm
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import Context, PromptFunction, check_key
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.models import Family
from ddpo_lessons.rollout import sample_seed
from ddpo_lessons.training.processes import Share, all_same

Contexts = dict[int, Context]  # by their samples' numbers in the epoch


@contextlib.contextmanager
def same_random_state() -> Iterator[None]:
    """Restore Python's, numpy's and torch's global generators after a `with` block."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class ContextSource:
    """Call the prompt function for the contexts of each epoch.

    An epoch that is done again finds the contexts and the global random state that it had. If the prompt
    function has a state, it is asked again; else what it said is kept. `before` is that state as it was
    before the newest epoch was drawn.
    """

    def __init__(
        self,
        prompt_function: PromptFunction,
        start: FromNoise,
        family: Family,
        algorithm: Algorithm,
        config: DDPOConfig,
        share: Share,
    ) -> None:
        self.prompt_function: Any = prompt_function
        self.start, self.family, self.algorithm = start, family, algorithm
        self.config, self.share = config, share
        self.before: Any = None
        self._drawn: tuple[int, Contexts] | None = None  # of an epoch that is not done
        self._epochs_drawn = 0

    @property
    def skips(self) -> bool:
        """Whether the prompt function skips the samples of other processes."""
        return self.share.accelerator.num_processes > 1 and hasattr(self.prompt_function, "skip")

    def of(self, epoch: int) -> Contexts:
        """Return the contexts of an epoch, or those of the last attempt if it failed; see `draw`."""
        if self._drawn is None or self._drawn[0] != epoch:
            self.before = copy.deepcopy(self.state_dict())
            try:
                self._drawn = (epoch, self.draw(epoch))
            except BaseException:
                self.load_state_dict(self.before)
                raise
            self._random_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
        else:  # a reward that draws from global generators finds them as they were
            random.setstate(self._random_state[0])
            np.random.set_state(self._random_state[1])
            torch.set_rng_state(self._random_state[2])
        self._epochs_drawn = epoch + 1
        self.check_same(self._drawn[1])
        return self._drawn[1]

    @property
    def newest(self) -> Contexts:
        """The contexts of the current epoch, also in its hooks; a RuntimeError between epochs."""
        if self._drawn is None:
            raise RuntimeError("no epoch is being done: ask in a hook")
        return self._drawn[1]

    def done(self) -> None:
        """Drop the contexts of a completed epoch."""
        self._drawn = None

    def draw(self, epoch: int) -> Contexts:
        """Call the prompt function for the contexts of an epoch, which is counted from 0.

        Python's, numpy's and torch's global generators are seeded from (seed, epoch) first, so that prompt
        functions that draw from them need no state of their own. Contexts come by their samples' numbers in
        the epoch: all of them, or this process's own where the prompt function can skip the others.
        """
        set_seed(sample_seed(self.config.seed, epoch) % 2**32)
        size, own = self.config.sample_group_size, set(self.share.rows.flatten().tolist())
        groups = [range(first, first + size) for first in range(0, self.share.total, size)]
        calls = [not (self.skips and own.isdisjoint(numbers)) for numbers in groups]
        if hasattr(self.prompt_function, "prefetch"):
            self.prompt_function.prefetch(calls)
        contexts: Contexts = {}
        for numbers, is_call in zip(groups, calls, strict=True):
            if not is_call:
                self.prompt_function.skip()
                continue
            context = self.start.context(self.prompt_function(), self.family)
            contexts |= dict.fromkeys(numbers, context)
        for context in contexts.values():
            check_key(self.algorithm.key(context))
        self.start.check(list(contexts.values()))
        return contexts

    def check_same(self, contexts: Contexts) -> None:
        """Raise an error if prompts differ between processes, because rewards would be mixed up."""
        drawn = list(contexts.values())
        seen: Any = (self.before, self.start.size(drawn)) if self.skips else list(map(_mark, drawn))
        if not all_same(self.share.accelerator, seen):
            raise RuntimeError(
                "prompt_function gives each process something else: seed it alike in all of them, for each "
                "takes its own samples of one epoch"
            )

    def keys(self, contexts: Contexts) -> list[Any]:
        """Return the key by which each sample of the epoch (N,) is compared, if any."""
        keys = {number: self.algorithm.key(context) for number, context in contexts.items()}
        if self.skips:  # each process knows its own
            keys = self.share.gather_dicts(keys)
        return [keys[number] for number in range(self.share.total)]

    def state_dict(self) -> Any:
        """Return the prompt function's state; None if it has none."""
        state = getattr(self.prompt_function, "state_dict", None)
        return None if state is None else state()

    def load_state_dict(self, state: Any, epochs_done: int = 0) -> None:
        """Restore the prompt function's state, or call it as often as in the completed epochs."""
        if state is not None and hasattr(self.prompt_function, "load_state_dict"):
            self.prompt_function.load_state_dict(state)
            self._drawn = None
            return
        for epoch in range(self._epochs_drawn, epochs_done):
            self.draw(epoch)


def _mark(context: Context) -> Any:
    """Return a mark of a context: its prompt, and a pixel of each channel of its image."""
    image = context.image
    return context.prompt, None if image is None else image.flatten()[:: image[0].numel()].tolist()
