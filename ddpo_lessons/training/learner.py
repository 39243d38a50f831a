"""Take optimizer steps over groups of pairs, in any precision and in several processes."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.optimization import get_scheduler
from torch import nn
from torch.distributed.tensor import DTensor

from ddpo_lessons.algorithms.algorithm import Algorithm, Loss, Pairs, check_loss
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.models.policy import adapter_off
from ddpo_lessons.models.sharded import forget_gathered, part_of, parted_like, whole
from ddpo_lessons.rollout import Trajectory
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.compiled import Recorder, check_gradients

# GradScaler halves its scale at every skipped step: from 65536 it is at 1 after 16 of them.
MAX_SKIPPED = 20
COPY_BYTES = 2**28  # of one transfer: so much memory is needed beside what is copied

Weights = dict[str, torch.Tensor]


class Learner:
    """Accumulate gradients over groups of pairs, and take optimizer steps.

    Denoiser, optimizer and the trained weights by name are as accelerate prepared them. `is_fresh` says that
    they are a new adapter, without which the denoiser is the policy before training; otherwise the weights
    before training are kept if the algorithm needs them, as are those of an older policy. The learning rate
    follows a curve over all of the config's epochs, each of `steps_per_epoch`.
    """

    def __init__(
        self,
        config: DDPOConfig,
        accelerator: Accelerator,
        denoiser: nn.Module,
        optimizer: Any,
        trainable: dict[str, nn.Parameter],
        algorithm: Algorithm,
        is_fresh: bool,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]],
        steps_per_epoch: int,
    ) -> None:
        self.config, self.accelerator = config, accelerator
        self.denoiser, self.optimizer, self.trainable = denoiser, optimizer, trainable
        self._autocast = autocast
        self._kind: tuple[bool, tuple[int, ...]]
        self._latents_shape: tuple[int, ...]
        self.steps_done = 0
        self.micro_batch_size = 1  # pairs in the largest group of the newest `split`
        self.is_fresh, self.steps_per_epoch = is_fresh, steps_per_epoch
        self.old = self._copy_if(algorithm.keeps_old)
        self.start = self._copy_if(algorithm.needs_reference(config) and not is_fresh)
        self.average = self._copy_if(config.train_ema_decay > 0)
        self.skipped_in_a_row = 0
        self._compared: set[Any] = set()  # shapes whose compiled gradients are right

    def _copy_if(self, is_kept: bool) -> Weights:
        return {name: p.detach().clone() for name, p in self.trainable.items()} if is_kept else {}

    def begin_epoch(self, trajectory: Trajectory) -> None:
        """Prepare for an epoch with latents of this shape, which determines the micro batches."""
        self._latents_shape = tuple(trajectory.latents.shape[2:])  # (C, h, w)
        self._kind = (trajectory.is_guided, self._latents_shape)
        self.micro_batch_size = 1

    def split(self, pairs: Pairs) -> list[Pairs]:
        """Split pairs (N,) into groups of similar size, because a small last group would waste time."""
        _, size = self.config.micro_batch_sizes(math.prod(self._latents_shape))
        count = math.ceil(len(pairs["rows"]) / size)
        chunks = {name: tensor.chunk(count) for name, tensor in pairs.items()}
        self.micro_batch_size = len(chunks["rows"][0])
        return [{name: chunks[name][n] for name in pairs} for n in range(len(chunks["rows"]))]

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """Provide the denoiser as it was before training, within a `with` block.

        Raises RuntimeError if that was not kept, because the algorithm does not say that it needs it.
        """
        if not self.start and not self.is_fresh:
            raise RuntimeError(
                "the policy before training is not kept: let the algorithm's needs_reference(config) be True"
            )
        with self._with(self.start) if self.start else adapter_off(self.denoiser):
            yield self.accelerator.unwrap_model(self.denoiser)

    @contextlib.contextmanager
    def old_policy(self) -> Iterator[Any]:
        """Provide the denoiser with the old policy's weights, within a `with` block.

        Raises RuntimeError if they are not kept.
        """
        if not self.old:
            raise RuntimeError("no old policy is kept: set keeps_old = True in the algorithm's class")
        with self._with(self.old):
            yield self.accelerator.unwrap_model(self.denoiser)

    def averaged_policy(self) -> contextlib.AbstractContextManager[None]:
        """Provide the denoiser with the average of its weights, if one is kept, within a `with` block."""
        return self._with(self.average) if self.average else contextlib.nullcontext()

    @contextlib.contextmanager
    def _with(self, weights: Weights) -> Iterator[None]:
        """Provide the denoiser with other weights within a `with` block."""
        new = {name: held(parameter) for name, parameter in self.trainable.items()}
        try:
            self._use(weights)  # in the block: an interruption must not leave half of them in place
            yield
        finally:
            self._use(new)

    @torch.no_grad()
    def _use(self, weights: Weights) -> None:
        for name, parameter in self.trainable.items():
            if isinstance(parameter, DTensor):  # what FSDP gathers is its own memory, whatever `data` is
                part_of(parameter).copy_(part_of(weights[name]))
            else:
                parameter.data = weights[name]  # nothing is copied
        self._forget()

    def _forget(self) -> None:
        """Drop low-precision copies of other weights, and weights that FSDP has gathered."""
        torch.clear_autocast_cache()
        forget_gathered(self.denoiser)

    def update_old_policy(self, decay: float) -> None:
        """Move the old policy's weights: old = decay old + (1 - decay) new; 0 copies the new weights."""
        self._move(self.old, decay)

    @torch.no_grad()
    def _move(self, weights: Weights, decay: float) -> None:
        for name, tensor in weights.items():
            part_of(tensor).lerp_(part_of(self.trainable[name]), 1 - decay)

    # ------------------------------------------------------------------------------------- its state
    def tensors(self) -> dict[str, Weights]:
        """Return weights and optimizer state for a checkpoint; every process must call it."""
        return {  # in one order: after a resume each process has another one
            kind: {name: whole(group[name]) for name in sorted(group)}
            for kind, group in self._tensors().items()
        }

    def copy_tensors(self) -> dict[str, Weights]:
        """Copy this process's part: an adapter on its device, full (large) weights to the host."""
        is_adapter = any("lora_" in name for name in self.trainable)
        place = self.accelerator.device if is_adapter else torch.device("cpu")
        return {
            kind: copy_together({name: part_of(tensor) for name, tensor in group.items()}, place)
            for kind, group in self._tensors().items()
        }

    def _tensors(self) -> dict[str, Weights]:
        state = checkpoint.optimizer_tensors(self.optimizer, list(self.trainable))
        kept = {"old": self.old, "average": self.average}
        return {"policy": dict(self.trainable), "optimizer": state, **{k: w for k, w in kept.items() if w}}

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, Weights]) -> None:
        """Load the result of `tensors` or `copy_tensors`."""
        self.optimizer.zero_grad()
        for mine, kind in ((self.trainable, "policy"), (self.old, "old"), (self.average, "average")):
            for name, tensor in mine.items():
                part_of(tensor).copy_(part_of(parted_like(tensors[kind][name], tensor)))
        self._forget()
        state = {
            key: parted_like(tensor, self.trainable[key.rpartition("|")[0]])
            for key, tensor in tensors["optimizer"].items()
        }
        checkpoint.load_optimizer_tensors(self.optimizer, list(self.trainable), state)

    # ------------------------------------------------------------------------------------- one step
    def step(self, loss: Loss, groups: Sequence[Pairs]) -> dict[str, float]:
        """Accumulate the gradient over groups, weighted by their sizes; take a step; return its record."""
        sizes = [len(group["rows"]) for group in groups]
        shares, stats = [size / sum(sizes) for size in sizes], []
        groups = move_together(groups, self.accelerator.device)
        for number, (share, group) in enumerate(zip(shares, groups, strict=True), start=1):
            if self.config.torch_compile:
                self._check_compiled(loss, group)
            is_last = number == len(groups)
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.denoiser):
                with self._autocast():
                    value, group_stats = check_loss(loss(self.denoiser, group))
                self.accelerator.backward(value * share)
            stats.append({"loss": value.detach(), **group_stats})
        num_steps = self.config.num_epochs * self.steps_per_epoch  # which may have changed since the start
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = learning_rate(self.config, self.steps_done, num_steps)
        weights = list(self.trainable.values())
        grad_norm = whole(self.accelerator.clip_grad_norm_(weights, self.config.train_max_grad_norm))
        record = self._summarize(stats, shares, grad_norm)
        is_finite = math.isfinite(record["grad_norm"])
        if self.accelerator.scaler is None and not is_finite:
            raise RuntimeError(
                f"the gradient of optimizer step {self.steps_done + 1} is not finite, so the step was not "
                "taken: the policy may have moved so far that ratios overflow. Lower train_learning_rate="
                f"{self.config.train_learning_rate}, and resume from a checkpoint"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._move(self.average, self.config.train_ema_decay)
        if self.accelerator.scaler is not None:
            record |= self._note_skipped(not is_finite)
        self.steps_done += 1
        return record

    def evaluate(
        self, function: Callable[[Any, Pairs], torch.Tensor], groups: Sequence[Pairs]
    ) -> list[torch.Tensor]:
        """Call `function(denoiser, group)` for groups as a step calls its loss; the results have no gradient.

        A compiled denoiser still prepares one, because without it other kernels run, which round differently.
        """
        alone = self.accelerator.no_sync(self.denoiser)  # which would else prepare to share gradients
        with alone, torch.set_grad_enabled(self.config.torch_compile), self._autocast():
            moved = move_together(groups, self.accelerator.device)
            return [function(self.denoiser, group).detach() for group in moved]

    def _note_skipped(self, skipped: bool) -> dict[str, float]:
        """Record a step that fp16's scaler skipped, and its scale; raise an error after too many.

        Accelerate's `step_was_skipped` is not asked: a fused optimizer is called, and skips by itself.
        """
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise RuntimeError(
                f"the last {MAX_SKIPPED} optimizer steps were skipped, for their gradients overflow float16: "
                "nothing is learned. Set mixed_precision='bf16' or 'no', and resume from a checkpoint"
            )
        # Where nothing was skipped the scale is not read: the host would have to wait for it.
        scale = {"loss_scale": self.accelerator.scaler.get_scale()} if skipped else {}
        return {"step_skipped": float(skipped), **scale}

    @property
    def only_skipped(self) -> bool:
        """Whether fp16's scaler has skipped every optimizer step so far."""
        return 0 < self.steps_done <= self.skipped_in_a_row

    def _summarize(
        self, stats: list[dict[str, torch.Tensor]], shares: list[float], grad_norm: torch.Tensor
    ) -> dict[str, float]:
        """Join the statistics of groups and processes into the record of one optimizer step, in one wait."""
        names = [*stats[0], "grad_norm"]
        rows = [[torch.as_tensor(value, device=grad_norm.device) for value in row.values()] for row in stats]
        table = torch.stack([torch.stack([*row, grad_norm]).float() for row in rows])  # (G, S)
        tables = self.accelerator.gather(table[None]).cpu()  # (processes, G, S)
        weights = torch.tensor(shares)[:, None]  # (G, 1)
        is_max = torch.tensor([name.startswith(("max", "grad_norm")) for name in names])
        joined = torch.stack(
            [torch.where(is_max, table.amax(0), (table * weights).sum(0)) for table in tables]
        )  # (processes, S)
        values = torch.where(is_max, joined.amax(0), joined.mean(0)).tolist()
        return {**dict(zip(names, values, strict=True)), "lr": self.optimizer.param_groups[0]["lr"]}

    def _check_compiled(self, loss: Loss, group: Pairs) -> None:
        """Compare compiled gradients with the denoiser's own, twice per shape: at first and later on.

        Later on, since LoRA's A has no gradient in the first one, where B is zero. What is compared is
        the gradient of the outputs: PPO's is zero where a ratio is clipped.
        """
        shape = (self.steps_done > 0, *self._kind, *[tuple(tensor.shape) for tensor in group.values()])
        if shape in self._compared:
            return

        def gradients() -> tuple[torch.Tensor, ...]:
            recorder = Recorder(self.denoiser)
            with self._autocast():
                loss(recorder, group)
            return torch.autograd.grad(recorder.sum_of_squares(), list(self.trainable.values()))

        with self.accelerator.no_sync(self.denoiser):
            compiled = gradients()
            with torch.compiler.set_stance("force_eager"):
                own = gradients()
        check_gradients(list(self.trainable), compiled, own)
        self._compared.add(shape)


def held(parameter: nn.Parameter) -> torch.Tensor:
    """Return the current values of a weight, before others replace them."""
    return parameter.detach().clone() if isinstance(parameter, DTensor) else parameter.data


def learning_rate(config: DDPOConfig, steps_done: int, num_steps: int) -> float:
    """Return the learning rate of the next step of a run of `num_steps`, without any state."""
    name = config.train_learning_rate_schedule
    if name == "constant" and config.train_learning_rate_warmup_steps:
        name = "constant_with_warmup"
    stand_in = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    factors = get_scheduler(
        name, stand_in, num_warmup_steps=config.train_learning_rate_warmup_steps, num_training_steps=num_steps
    )
    (factor,) = factors.lr_lambdas
    return config.train_learning_rate * factor(min(steps_done, num_steps))


def move_together(groups: Sequence[Pairs], device: torch.device) -> list[Pairs]:
    """Move all tensors of all groups from the host to a device, in one transfer."""
    if device.type == "cpu":
        return list(groups)
    named = {f"{n} {name}": tensor for n, group in enumerate(groups) for name, tensor in group.items()}
    moved = copy_together(named, device)
    return [{name: moved[f"{n} {name}"] for name in group} for n, group in enumerate(groups)]


def copy_together(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy tensors to a device as the bytes of a few large ones, with a transfer for each of these."""
    # By device, since optimizers keep some numbers on the host; those with larger elements first, so that
    # each lies at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: (str(item[1].device), -item[1].element_size()))
    copies: dict[str, torch.Tensor] = {}
    batch: list[tuple[str, torch.Tensor]] = []
    size = 0
    for number, (name, tensor) in enumerate(ordered, start=1):
        batch.append((name, tensor.detach()))
        following = ordered[number][1] if number < len(ordered) else None
        size += tensor.numel() * tensor.element_size()
        if following is None or following.device != tensor.device or size >= COPY_BYTES:
            copies |= _copy_as_one(batch, device)
            batch, size = [], 0
    return copies


def _copy_as_one(batch: list[tuple[str, torch.Tensor]], device: torch.device) -> dict[str, torch.Tensor]:
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in batch]
    pieces = torch.cat(raw).to(device).split([len(piece) for piece in raw])
    return {
        name: piece.view(tensor.dtype).view(tensor.shape)
        for (name, tensor), piece in zip(batch, pieces, strict=True)
    }
