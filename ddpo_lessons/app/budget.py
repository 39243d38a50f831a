"""Lesson 08: what a run costs in memory and time, worked out before it runs.

A pipeline on the `meta` device has shapes and no memory, so that Stable Diffusion 1.5 can be counted on any
machine. On it the run's own code is played while operations are counted: the family embeds, predicts and
decodes, the algorithm takes an optimizer step. So nothing here knows a family or an algorithm. What is not
counted: the CUDA context, workspaces of kernels, fragments of the allocator, and what rewards compute.
"""

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from ddpo_lessons.algorithms.base import Algorithm, Loss, Pairs, Samples
from ddpo_lessons.app.sample import image_size
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import Context
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.families import Family, family_of
from ddpo_lessons.families.policy import prepare_policy
from ddpo_lessons.rollout import Trajectory, sample_trajectory
from ddpo_lessons.run.learner import Learner
from ddpo_lessons.run.processes import make_autocast
from ddpo_lessons.run.sampling import Sampler, count_actions

META = torch.device("meta")
# bitsandbytes keeps the moments of smaller tensors in 32 bits (its `min_8bit_size`).
SMALLEST_8BIT = 4096
_FLOPS = FlopCounterMode(display=False).flop_registry  # FLOPs by operation, of its arguments and its outcome


# -------------------------------------------------------------------------------------------- counts
def nbytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def weights(network: nn.Module) -> list[torch.Tensor]:
    """Return what a network holds in the precision of its policy: parameters, and buffers of floats."""
    return [*network.parameters(), *(b for b in network.buffers() if b.is_floating_point())]


def moment_bytes(parameters: Iterable[torch.Tensor], eight_bit: bool = False) -> int:
    """Return the bytes of AdamW's two moments of float32 parameters, each as large as the parameter.

    In eight bits they take one byte a number where a tensor has 4,096 or more, as bitsandbytes does it; its
    tables of scales are left out.
    """
    sizes = [p.numel() * (1 if eight_bit and p.numel() >= SMALLEST_8BIT else 4) for p in parameters]
    return 2 * sum(sizes)


@dataclass(frozen=True)
class Cost:
    """FLOPs, the most bytes of activations that live at one time, and rows that the denoiser sees."""

    flops: int
    peak: int
    passes: int = 0


class Counter(TorchDispatchMode):
    """Counts what operations compute, and the tensors that they make, while these live.

    What an operation is given, and none has made, was there before, and does not count. On a GPU,
    `torch.cuda.max_memory_allocated` measures the same from the allocator's side.

    Args:
        device: tensors elsewhere do not count.

    Attributes:
        flops: 2 for each multiply-add of a product or convolution; elementwise operations count 0.
        live: bytes that live now.
        peak: the most that lived at one time.
        passes: rows that networks were asked about, see `once`; by whether there was a gradient.
    """

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.flops = self.live = self.peak = 0
        self.passes = {False: 0, True: 0}
        self._device, self._known, self._given = device, set[int](), list[torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look at what it was given and made."""
        kwargs = kwargs or {}
        for storage in self._storages((args, kwargs)):
            if id(storage) not in self._known:
                self._known.add(id(storage))
                self._given.append(storage)  # held, so that its id is not used again
        out = func(*args, **kwargs)
        formula = _FLOPS.get(func._overloadpacket)
        self.flops += formula(*args, **kwargs, out_val=out) if formula else 0
        for storage in self._storages(out):
            if id(storage) not in self._known:  # else a view, or in place
                self._known.add(id(storage))
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, id(storage), storage.nbytes())
        return out

    def _storages(self, values: Any) -> Iterator[torch.UntypedStorage]:
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device:
                yield leaf.untyped_storage()

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    @contextlib.contextmanager
    def once(self, network: Any) -> Iterator[None]:
        """Let a network run once for each shape without gradient; later it counts and answers the same."""
        forward, known = network.forward, dict[Any, Any]()

        def remembered(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.passes[torch.is_grad_enabled()] += len(tensors[0])
            if torch.is_grad_enabled():
                return forward(*args, **kwargs)
            key, before = tuple((t.shape, t.dtype) for t in tensors), self.flops
            if key in known:
                self.flops += known[key][0]
            else:
                out = forward(*args, **kwargs)
                known[key] = self.flops - before, out
            return known[key][1]

        with mock.patch.object(network, "forward", remembered):
            yield


def cost(run: Callable[[], Any], autocast: torch.dtype | None = None) -> Cost:
    """Count forward and backward as a GPU would run it; what was there before is not part of the peak."""
    with as_on_cuda(), torch.autocast("meta", autocast), Counter() as counter:
        run()
    return Cost(counter.flops, counter.peak)


# ---------------------------------------------------------------------------- what a GPU would choose
# Autocast's lists, as far as networks need them; torch.amp's documentation, "CUDA Ops that can autocast".
_TO_LOW = ("linear", "conv2d", "scaled_dot_product_attention")
_TO_FLOAT32 = ("group_norm", "layer_norm")


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Let meta tensors take the ways that CUDA tensors take: fused attention, and autocast.

    On `meta`, attention would write out its (B, heads, L, L) matrix; on a GPU the fused kernel (Dao et al.
    2022, arXiv 2205.14135) never does, and computes it again in the backward pass. Autocast knows no meta
    tensors: here `torch.autocast("meta", dtype)` computes products in `dtype`, normalisations in float32.
    """
    low: torch.dtype | None = None

    @contextlib.contextmanager
    def autocast(
        device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, **unused: Any
    ) -> Iterator[None]:
        nonlocal low
        before, low = low, dtype if enabled else None
        try:
            yield
        finally:
            low = before

    def casting(function: Callable[..., Any], is_product: bool) -> Callable[..., Any]:
        def cast(*args: Any, **kwargs: Any) -> Any:
            dtype = low if is_product else torch.float32
            if low is not None:
                to = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
                args, kwargs = tree_map_only(torch.Tensor, to, (args, kwargs))
            return function(*args, **kwargs)

        return cast

    def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **no_mask: Any) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]

    usual: dict[str, Any] = {name: getattr(F, name) for name in (*_TO_LOW, *_TO_FLOAT32)}
    usual["scaled_dot_product_attention"] = fused
    changed: dict[str, Any] = {name: casting(f, name in _TO_LOW) for name, f in usual.items()}
    with mock.patch.multiple(F, **changed), mock.patch.object(torch, "autocast", autocast):
        yield


class _WithoutValues(TorchDispatchMode):
    """Lets a run's code go on where it asks the device for a value: it is told 1, and no shape depends on it.

    Noise that the host draws is not drawn, for that of an optimizer step may take GB.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or answer for it."""
        kwargs, aten = kwargs or {}, torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        if func is aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return torch.ones(args[0].shape, dtype=args[0].dtype)
        if func is aten.randn.generator and len(args[0]) > 1:
            return torch.empty(args[0], device=META)
        return func(*args, **kwargs)


# ---------------------------------------------------------------------------------- parts of an epoch
def mean(images: torch.Tensor, *contexts: Any) -> torch.Tensor:
    """Return a reward (N,) that takes nothing, and has a gradient."""
    return images.mean(dim=(1, 2, 3))


class Rehearsal(Learner):
    """The learner of a run that is played on the `meta` device, with the policy that the run would train.

    `cost` is that of an optimizer step, of passes with a gradient only; `pairs` the bytes that its pairs
    hold.
    """

    cost, pairs = Cost(0, 0), 0

    def __init__(self, family: Family, config: DDPOConfig, algorithm: Algorithm, start: FromNoise) -> None:
        """Make policy and reference as the trainer does, and gradients, so that accumulating makes none."""
        self.family, self.algorithm, self.begins = family, algorithm, start
        is_lora, denoiser = config.train_use_lora, family.denoiser
        trained = prepare_policy(denoiser, family.frozen, config, is_lora, META, family.keeps_float32)
        had_adapter = bool(config.train_lora_from) or not is_lora
        for weight in trained.values():
            weight.grad = torch.zeros_like(weight)
        # What stands for accelerate, with one process on one device.
        alone: Any = SimpleNamespace(device=META, unwrap_model=lambda network: network)
        self.autocast, old = make_autocast(config.mixed_precision, META), algorithm.keeps_old
        needs = algorithm.needs_reference(config), not had_adapter
        super().__init__(config, alone, denoiser, None, trained, *needs, self.autocast, 1, old)

    def sample(self) -> tuple[Trajectory, torch.Tensor, Counter]:
        """Sample as many rollouts as pass together; return their trajectory, images and counts.

        Groups share nothing here, as in the largest pass.
        """
        family, config, start, algorithm = self.family, self.config, self.begins, self.algorithm
        actions = start.count_train_timesteps(count_actions(family, start, algorithm, config), config)
        algorithm.begin(replace(config, train_num_inner_epochs=1), family, actions)
        share: Any = SimpleNamespace(accelerator=self.accelerator)
        sampler = Sampler(config, family, start, algorithm, mean, self.autocast, share, self, print)
        side = (start.size([]) or [image_size(family.pipeline)])[0]
        contexts = [Context(f"not {config.negative_prompts}", {}, torch.zeros(3, side, side))]
        prompts, size = start.prompts(contexts, config), start.size(contexts)
        count, _ = config.forward_sizes(math.prod(family.latents_shape(size)))
        with Counter() as counter, counter.once(family.denoiser), algorithm.sampling_policy(self):
            with self.autocast():
                told = (prompts, config.negative_prompts, config.sample_guidance_scale, size)
                family.condition(*told, start.images(contexts))
            counter.flops = 0  # a prompt is embedded once
            generators = [torch.Generator()] * count
            beginning = sampler._beginning(contexts * count, sampler.schedule(0, contexts), generators, None)
            with torch.no_grad(), self.autocast():
                trajectory = sample_trajectory(family, **beginning)
                images = family.decode(trajectory.final_latents)
        return trajectory, images, counter

    def train(self, piece: Trajectory) -> None:
        """Let the algorithm take one optimizer step, on samples like the first one of `piece`."""
        plan, group_size = self.config.epoch_plan(1), self.config.sample_group_size
        count = plan.samples_per_optimizer_step
        repeat = lambda tensor: tensor[:1].expand(count, *tensor.shape[1:])  # noqa: E731
        trajectory = Trajectory(**tree_map_only(torch.Tensor, repeat, vars(piece)))
        rewards = torch.arange(plan.samples_per_process * group_size).float()  # so that groups are whole
        keys = [self.algorithm.key(Context("", {}))] * len(rewards)
        advantages = self.algorithm.advantages(rewards, keys)[:count].to(META)
        self.begin_epoch(trajectory)
        samples = Samples(0, 0, 0, torch.arange(count), trajectory, advantages, mean)
        for loss, groups in self.algorithm.steps(samples, self):
            self.step(loss, groups)

    def step(self, loss: Loss, groups: Sequence[Pairs]) -> dict[str, float]:
        """Go forward and backward with the first group, which no other exceeds, and count it for all."""
        self.pairs = nbytes(tensor for group in groups for tensor in group.values())
        group = {name: tensor.to(META) for name, tensor in groups[0].items()}
        with Counter() as counter, counter.once(self.denoiser), self.autocast():
            value, _ = loss(self.denoiser, group)
            value.backward()  # with autocast for what checkpointing runs again
        share = sum(len(group["rows"]) for group in groups) / len(group["rows"])
        self.cost = Cost(round(counter.flops * share), counter.peak, round(counter.passes[True] * share))
        return {}

    def copies(self) -> list[torch.Tensor]:
        """Return the weights of older policies that are held beside the new one's."""
        return [*self.old.values(), *self.start.values(), *self.average.values()]


# ---------------------------------------------------------------------------------------- the budget
@dataclass(frozen=True)
class Budget:
    """Bytes on one device, and work of one epoch of one process."""

    #: weights that are not trained, of all networks, and copies of the policy: an older one, and the one
    #: before training where no adapter can be switched off for it
    frozen: int
    trained: int  #: weights that are; their gradients take as much
    moments: int  #: AdamW's two
    latents: int  #: of an epoch's trajectories, (N, T+1, C, h, w) and what else they hold
    images: int  #: of an epoch, float32 (N, 3, H, W), which wait for the report
    #: of an epoch's prompts, as the denoiser is told them; those that the family remembers are not counted
    embeddings: int
    pairs: int  #: what an optimizer step's pairs hold: numbers, and noise where the algorithm draws it
    reward: int  #: what the reward model holds
    sampling: Cost  #: work of an epoch; the peak is that of embedding, encoding, denoising and decoding
    training: Cost  #: work of an epoch; the peak is that of forward and backward

    @property
    def networks(self) -> int:
        """Weights, gradients and moments."""
        return self.frozen + 2 * self.trained + self.moments

    @property
    def samples(self) -> int:
        """What an epoch's samples hold."""
        return self.latents + self.images + self.embeddings

    @property
    def resident(self) -> int:
        """What stays for a whole epoch."""
        return self.networks + self.samples + self.pairs + self.reward

    @property
    def activations(self) -> int:
        """The larger peak: sampling and training come one after the other."""
        return max(self.sampling.peak, self.training.peak)

    @property
    def joining(self) -> int:
        """What trajectories take a second time when those of all passes are joined."""
        return self.latents + self.embeddings

    @property
    def peak(self) -> int:
        """All of it."""
        return self.resident + max(self.activations, self.joining)

    def seconds(self, peak_tflops: float, utilisation: float) -> tuple[float, float]:
        """Return seconds of sampling and of training in an epoch: FLOPs / (peak * utilisation).

        The peak is in 1e12 operations a second; the share of it that is reached is an assumption until it is
        measured, and a ValueError refuses one outside (0, 1].
        """
        if not 0 < utilisation <= 1:
            raise ValueError(f"utilisation={utilisation} must lie in (0, 1]")
        rate = peak_tflops * 1e12 * utilisation
        return self.sampling.flops / rate, self.training.flops / rate


def estimate(
    pipeline: Any, config: DDPOConfig, algorithm: Algorithm, start: FromNoise, reward_bytes: int = 0
) -> Budget:
    """Work out what an epoch of one process costs.

    The pipeline, on the `meta` device, becomes the policy; `reward_bytes` is what a reward model holds on the
    device. A ValueError refuses a pipeline that is elsewhere, and settings that do not fit.
    """
    family, algorithm = family_of(pipeline), copy.copy(algorithm)
    if family.denoiser.device.type != "meta":
        raise ValueError("the pipeline is not on the meta device: count that of app.memory's `like`")
    vars(algorithm).update(draws_steps=False)  # AlignProp: the most steps that it may draw
    with as_on_cuda(), _WithoutValues():
        rehearsal = Rehearsal(family, config, algorithm, start)
        piece, images, sampling = rehearsal.sample()
        rehearsal.train(piece)
    trained, networks = list(rehearsal.trainable.values()), [family.denoiser, *family.frozen.values()]
    everything = [weight for network in networks for weight in weights(network)] + rehearsal.copies()
    plan, work = config.epoch_plan(1), rehearsal.cost
    passes, steps = plan.samples_per_process / len(images), plan.optimizer_steps
    return Budget(
        frozen=nbytes(everything) - nbytes(trained),
        trained=nbytes(trained),
        moments=moment_bytes(trained, config.train_use_8bit_adam),
        latents=round(nbytes(t for t in vars(piece).values() if isinstance(t, torch.Tensor)) * passes),
        images=round(images.nbytes * passes),
        embeddings=round(nbytes(piece.conditioning.values()) * passes),
        pairs=rehearsal.pairs,
        reward=reward_bytes,
        sampling=Cost(round(sampling.flops * passes), sampling.peak, round(sampling.passes[False] * passes)),
        training=Cost(work.flops * steps, work.peak, work.passes * steps),
    )
