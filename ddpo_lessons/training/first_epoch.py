"""Lesson 08: check the first epoch of a run for faults that raise no error.

Every run has these checks, which watch what it does anyway; `checks.preflight` has more.
Each looks for faults that were found in published trainers (docs/peers.md).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ddpo_lessons.models.policy import unread
from ddpo_lessons.models.sharded import part_of
from ddpo_lessons.table import Lines, wrap
from ddpo_lessons.training.learner import Learner, Weights

NOT_CLIPPED = 1e-3  # what the first ratio may be off by where no clip range says it
SKIPPED = (
    "not seen: float16's scaler skipped every optimizer step, most probably since its scale is still too "
    "high; look at step_skipped in metrics.jsonl after the next epoch"
)
# What ratios of training's log-probs and sampling's may be off by in bf16 and fp16 without guidance. Rounding
# alone gives up to 4e-3 with Stable Diffusion's shapes, and 9e-2 with a guidance scale of 5
# (benchmarks/speed/full_size.json).
ROUNDING = 2e-2
TINY = 1e-3  # a gradient that is so much smaller than the largest need not move its weight


@dataclass(frozen=True)
class Finding:
    """The result of a check; if it failed, `says` ends with the most likely cause."""

    check: str
    passed: bool  #: also True if the check was left out
    says: str
    checked: bool = True  #: False if the check was left out, because of what `says`

    def __str__(self) -> str:
        mark = "skip" if not self.checked else "ok  " if self.passed else "FAIL"
        return f"{mark}  {self.check}: {self.says}"


class Findings(Lines[Finding]):
    """The results of all checks, printed as a wrapped line per check and a summary."""

    @property
    def failed(self) -> list[Finding]:
        """The findings that failed."""
        return [finding for finding in self if not finding.passed]

    def __repr__(self) -> str:
        return self.text(88)

    def text(self, width: int) -> str:
        """Return what is printed, in lines of at most so many characters."""
        skipped = sum(not finding.checked for finding in self)
        passed = len(self) - len(self.failed) - skipped
        lines = [wrap(str(finding), 6, width) for finding in self]
        text = "\n".join([*lines, f"{passed} of {len(self)} checks passed"])
        return f"{text}, {skipped} not checked" if skipped else text


def judged(check: str, passed: bool, says: str, remedy: str) -> Finding:
    """Make a finding, with the remedy after the observation if the check failed."""
    return Finding(check, passed, says if passed else f"{says}; {remedy}")


def _optimizer_steps(count: int) -> str:
    """Return a number of optimizer steps in words, such as "1 optimizer step"."""
    return f"{count} optimizer step{'' if count == 1 else 's'}"


def skip_if_failed(finding: Finding) -> Finding:
    """Mark a failed check as not checked, because rewards that do not differ are the cause."""
    says = "not checked, because rewards do not differ, so that every gradient is 0"
    return finding if finding.passed else Finding(finding.check, True, says, checked=False)


class FirstEpoch:
    """Observe the optimizer steps of the first epoch: gradients, changes of weights, the first replay.

    `before` is this process's part of the trained weights, as they are before the learner takes these steps.
    """

    def __init__(self, learner: Learner, before: Weights) -> None:
        self.learner, self.before = learner, before
        self.gradients = torch.zeros(len(learner.trainable), device=learner.accelerator.device)  # norms
        self.rates: list[float] = []  # learning rates, one a step
        self.replay_errors: list[float] = []  # the largest |ratio - 1| of each step, where there are ratios
        self.sampling_errors: list[float] = []  # and that of sampling, where old log-probs are computed again
        self.rewards = torch.zeros(0)  # (N,) of all processes
        self.is_flat = False  # whether rewards do not differ, and therefore every gradient is 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Observe the gradients of each optimizer step in a `with` block, without waiting for a GPU."""
        optimizer = getattr(self.learner.optimizer, "optimizer", self.learner.optimizer)  # in accelerate's
        handle = optimizer.register_step_pre_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        norms = [
            weight.new_zeros(()) if weight.grad is None else part_of(weight.grad).detach().float().norm()
            for weight in self.learner.trainable.values()
        ]
        self.gradients = self.gradients.maximum(torch.stack(norms))

    def findings(
        self, group_size: int, clip_range: float | None, guidance_scale: float = 1.0
    ) -> list[Finding]:
        """Return the findings; every process must call it.

        Half of the clip range is what the first ratio may be off by; None where nothing is clipped. Guidance,
        g times one prediction minus g - 1 times the other, amplifies the rounding of both by up to 2g - 1.
        """
        norms = self.learner.accelerator.gather(self.gradients[None]).amax(0)  # (weights,) of all processes
        rewards, found = self._of_rewards(group_size), [self._of_gradients(norms), self._of_weights(norms)]
        rounding = ROUNDING * max(1.0, 2 * guidance_scale - 1)
        found += self._of_ratios(NOT_CLIPPED if clip_range is None else clip_range / 2, rounding)
        self.is_flat = not rewards.passed and not norms.any()
        return [rewards, *(map(skip_if_failed, found) if self.is_flat else found)]

    def _of_ratios(self, allowed: float, rounding: float) -> list[Finding]:
        """The first step replays the policy that sampled, with itself; the next ones with one that moved."""
        if not self.replay_errors:
            return []
        first, later = self.replay_errors[0], max(self.replay_errors[1:], default=0.0)
        says = f"off by {first:.1e} at most, {allowed:g} is allowed"
        remedy = "other guidance, precision, schedule or dropout than in sampling?"
        found = [judged("the ratio is 1 before the first optimizer step", first <= allowed, says, remedy)]
        if self.sampling_errors:
            if self.learner.config.torch_compile:  # sampling computes no gradients, so it has other kernels
                remedy = "do compiled kernels round too differently? Try torch_compile=False"
            error = max(self.sampling_errors)
            says = f"ratios of both are off by {error:.1e} at most, {rounding:g} is allowed"
            found.append(
                judged(
                    "log-probs of training and sampling agree up to rounding", error <= rounding, says, remedy
                )
            )
        may_skip = self.learner.accelerator.scaler is not None
        if len(self.replay_errors) > 1 and not may_skip and self.rates[0] > 0:
            remedy = "is the policy compared with itself, or did the step move nothing?"
            found.append(
                judged(
                    "the ratio differs from 1 after an optimizer step",
                    later > 0,
                    f"off by {later:.1e} at most",
                    remedy,
                )
            )
        return found

    def _of_rewards(self, group_size: int) -> Finding:
        groups = self.rewards.view(-1, group_size) if group_size > 1 else self.rewards[None]
        inside = groups.std(dim=1, correction=0).mean().item()
        says = f"standard deviation {self.rewards.std(correction=0):.3g}, within a group {inside:.3g}"
        remedy = "does the reward round, saturate, or expect images from 0 to 255 or -1 to 1?"
        return judged("rewards differ between samples", inside > 0, says, remedy)

    def _of_gradients(self, norms: torch.Tensor) -> Finding:
        """An adapter's A gets none in the first step, for its B is 0; and float16 may skip some."""
        if self.learner.only_skipped:
            return Finding("every trained weight gets a gradient", True, SKIPPED, checked=False)
        sizes = dict(zip(self.learner.trainable, norms.tolist(), strict=True))
        dropped = unread(self.learner.accelerator.unwrap_model(self.learner.denoiser))
        read = [name for name in sizes if not name.startswith(dropped)]
        late = len(self.rates) < 2 or self.learner.accelerator.scaler is not None
        asked = [name for name in read if not (late and ("lora_A" in name or "lora.down" in name))]
        silent = [name for name in asked if sizes[name] == 0]
        says = f"{len(asked) - len(silent)} of {len(asked)} do in {_optimizer_steps(len(self.rates))}"
        if len(read) < len(sizes):
            says += f" (left out: {len(sizes) - len(read)} whose output the model drops)"
        return judged(
            "every trained weight gets a gradient",
            not silent,
            f"{says}, but not {silent[0]}" if silent else says,
            "an adapter added after wrapping, a detached loss, or layers that no forward pass reaches?",
        )

    def _of_weights(self, norms: torch.Tensor) -> Finding:
        """All with a gradient worth the name must move; one of rounding errors alone may be too small.

        Without any gradient AdamW's weight decay still moves them, which is no learning.
        """
        if self.learner.only_skipped:
            return Finding("optimizer steps change the weights", True, SKIPPED, checked=False)
        steps, rate, names = len(self.rates), max(self.rates, default=0.0), list(self.learner.trainable)
        moved = torch.stack([self._change(name) for name in names])  # (weights, 2)
        squares, sizes = self.learner.accelerator.gather(moved[None]).sum(0).T  # (weights,) of all parts
        pushed = norms > TINY * norms.max()
        still = [name for name, stays in zip(names, pushed & (squares == 0), strict=True) if stays]
        excused = steps > 0 and rate == 0  # it may warm up from 0
        size = (squares.sum() / sizes.sum()).sqrt().item()
        such = f", but {len(still)} of {len(names)} stay, such as {still[0]}" if still else ""
        says = f"by {size:.1e} (rms) in {_optimizer_steps(steps)} at a learning rate of {rate:g}{such}"
        if norms.any():
            fine = excused or (size > 0 and not still)
            remedy = "does the optimizer hold other weights than the model, or some of them only?"
        else:
            fine, says = False, f"{says}, all gradients 0"
            remedy = "are all advantages 0, or is the loss detached?"
        return judged("optimizer steps change the weights", fine, says, remedy)

    def _change(self, name: str) -> torch.Tensor:
        """Return the sum of squares by which a weight moved, and its size, (2,)."""
        now = part_of(self.learner.trainable[name]).detach()
        squares = (now - self.before[name].to(now.device)).float().square().sum()
        return torch.stack([squares, torch.full_like(squares, now.numel())])
