"""Estimate full-size runs: `python -m benchmarks.speed.paper_run` writes ddpo_lessons/lessons/paper_run.json.

The work of a GPU is counted, never measured. A model on the `meta` device has shapes and no memory, so that
forward and backward passes of any model run on it while bytes and FLOPs are counted; times are FLOPs over a
fraction of a GPU's peak. Not counted are the CUDA context, workspaces of kernels, fragments of the allocator,
embedding prompts, optimizer steps, and what reward models compute. Lessons 08 and 12 read the file.
"""

import contextlib
import json
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import ROOT, Row, write_json
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.cli.presets import PRESETS
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.models import family_of, image_size
from ddpo_lessons.models.policy import adapter_off, prepare_policy
from ddpo_lessons.training.processes import make_autocast
from ddpo_lessons.training.sampler import count_actions

RESULT = ROOT / "ddpo_lessons" / "lessons" / "paper_run.json"  # in the wheel, because the lessons read it
MODELS = json.loads(Path(__file__).with_name("published.json").read_text("utf-8"))
META, GB = torch.device("meta"), 1e9
# What autocast computes in low precision, and in float32: "CUDA Ops that can autocast" of torch.amp's pages.
PRODUCTS, NORMS = ("linear", "conv2d", "scaled_dot_product_attention"), ("group_norm", "layer_norm")
SHARE = 0.85  # of a GPU: the rest is for the allocator's fragments, which are not counted
CUDA = 1.0  # GB of the context and of kernels' workspaces
UTILIZATION = 0.3  # an assumption
# GB, and TFLOP/s of dense bf16 with float32 accumulation, as NVIDIA gives them; TF32 is half of it on each.
# The T4 has neither bf16 nor TF32: its data sheet gives 65 for fp16. That of the L4 gives 242 with sparsity,
# which is 121 without. Both are GPUs of Colab, with memory of 320 and 300 GB/s.
CARDS = {
    "T4": (16, 65.0), "L4": (24, 121.0),
    "RTX 3080": (10, 59.5), "RTX 4080": (16, 97.5), "RTX 3090": (24, 71.2), "RTX 4090": (24, 165.2),
    "A100": (80, 312.0),
}  # fmt: skip
# Bytes of reward models, float32: CLIP ViT-L/14, ResNet-18 without its head, CLIP ViT-H/14.
_CLIP, _RESNET, _CLIP_H = (4 * count for count in (427_616_513, 11_176_512, 986_109_441))
REWARDS = {"edit": _CLIP + _RESNET, "camouflage": _CLIP + _RESNET, "sd35": _CLIP_H, "flux": _CLIP_H}
SMOKE = {  # lesson 08's smoke run: `edit` with these fields
    "num_epochs": 10, "image_grid_freq": 1, "sample_num_steps": 20, "sample_num_batches_per_epoch": 16,
    "train_gradient_accumulation_steps": 8,
}  # fmt: skip
ONE_SAMPLE = {"sample_batch_size": 1, "train_batch_size": 1, "train_micro_batch_size": 1}
RUNS: dict[str, tuple[str, Row]] = {  # name: preset, changed fields
    "smoke": ("edit", SMOKE), "edit": ("edit", {}), "camouflage": ("camouflage", {}),
}  # fmt: skip


# ------------------------------------------------------------------------------- counting on `meta`
def published(name: str, device: str = "meta", dtype: torch.dtype = torch.float32) -> Any:
    """Make a published model with random weights from `published.json`; "meta" makes shapes only.

    Sources: the config.json of each part on the hub; what is not named is the library's default. Tokenizers
    give as many tokens as the published ones; which ones changes nothing.
    """
    model, parts = MODELS[name], dict[str, Any]()
    for part, (class_name, settings) in model["parts"].items():
        kind = getattr(diffusers, class_name, None) or getattr(transformers, class_name)
        if part.startswith("tokenizer"):
            parts[part] = kind.from_pretrained(CHECKPOINTS["tiny-sd"] / "tokenizer", **settings)
        elif not issubclass(kind, nn.Module):
            parts[part] = kind(**settings)
        else:
            config = getattr(kind, "config_class", dict)(**settings)
            with torch.device(device), default_dtype(dtype):
                parts[part] = getattr(kind, "from_config", kind)(config)
    return getattr(diffusers, model["class"])(**parts, **model["settings"])


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make floats of a type for the time of a `with` block."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


class Counter(TorchDispatchMode):
    """Counts FLOPs, and the bytes of tensors that operations make while these live.

    FLOPs are 2 for each multiply-add of a product or convolution; elementwise operations count 0. What an
    operation is given, and none has made, was there before, and does not count.
    """

    formulas = FlopCounterMode(display=False).flop_registry

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.flops = self.live = self.peak = 0
        self._device, self._known, self._given = device, set[int](), list[torch.UntypedStorage]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count its inputs and outputs."""
        kwargs = kwargs or {}
        for storage in self._storages((args, kwargs)):
            if id(storage) not in self._known:
                self._known.add(id(storage))
                self._given.append(storage)  # kept, so that its id is not used again
        out = func(*args, **kwargs)
        formula = self.formulas.get(func._overloadpacket)
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
def as_on_cuda() -> Iterator[None]:
    """Let meta tensors use what CUDA tensors use: fused attention, and autocast.

    On `meta`, attention would write out its (B, heads, L, L) matrix; on a GPU the fused kernel (Dao et al.
    2022, arXiv 2205.14135) never does, and computes it again in the backward pass. Autocast ignores meta
    tensors: here `torch.autocast("meta", dtype)` computes products in `dtype`, normalizations in float32, as
    `PRODUCTS` and `NORMS` list them.
    """
    low: list[torch.dtype | None] = [None]

    @contextlib.contextmanager
    def autocast(
        kind: str, dtype: torch.dtype | None = None, enabled: bool = True, **_: Any
    ) -> Iterator[None]:
        low.append(dtype if enabled else None)
        try:
            yield
        finally:
            low.pop()

    def casting(function: Callable[..., Any], is_product: bool) -> Callable[..., Any]:
        def cast(*args: Any, **kwargs: Any) -> Any:
            if low[-1] is not None:
                dtype = low[-1] if is_product else torch.float32
                to = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
                args, kwargs = tree_map_only(torch.Tensor, to, (args, kwargs))
            return function(*args, **kwargs)

        return cast

    def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **no_mask: Any) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]

    usual = {name: getattr(F, name) for name in (*PRODUCTS, *NORMS)}
    usual["scaled_dot_product_attention"] = fused
    changed: dict[str, Any] = {name: casting(f, name in PRODUCTS) for name, f in usual.items()}
    with mock.patch.multiple(F, **changed), mock.patch.object(torch, "autocast", autocast):
        yield


# ------------------------------------------------------------------------------------------ estimates
@dataclass(frozen=True)
class Estimate:
    """Bytes on one device, FLOPs of an epoch of one process, and the most bytes that a pass makes."""

    networks: int  #: weights, gradients and AdamW's moments
    trained: int  #: weights that are trained
    latents: int  #: of an epoch's trajectories, with embeddings, which are there twice when they are joined
    images: int  #: of an epoch, float32, which wait for the report
    reward: int  #: of the reward model
    sampling_flops: int
    sampling_peak: int
    training_flops: int
    training_peak: int

    @property
    def samples(self) -> int:
        """Bytes of an epoch's samples."""
        return self.latents + self.images

    @property
    def activations(self) -> int:
        """What comes on top of `resident` at most; sampling and training come one after the other."""
        return max(self.sampling_peak, self.training_peak, self.latents)

    @property
    def resident(self) -> int:
        """What stays for a whole epoch."""
        return self.networks + self.samples + self.reward

    @property
    def peak(self) -> int:
        """All of it."""
        return self.resident + self.activations


def nbytes(tensors: Any) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def estimate(
    pipeline: Any, config: DDPOConfig, method: str = "ddpo", start: FromNoise = FromNoise(), reward: int = 0
) -> Estimate:
    """Estimate an epoch of one process: a sampling pass and a training pass are counted and multiplied.

    The pipeline, on the `meta` device, becomes the policy; `reward` is bytes of reward models.
    """
    family, algorithm, guidance = family_of(pipeline), make_algorithm(method), config.sample_guidance_scale
    autocast, denoiser = make_autocast(config.mixed_precision, META), family.denoiser
    place = config.train_use_lora, META, family.keeps_float32
    trained = prepare_policy(denoiser, family.frozen, config, *place).values()
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    timesteps = start.schedule(family, config).timesteps
    actions = count_actions(family, start, algorithm, config)
    side = (start.size([]) or [image_size(pipeline)])[0]
    shape = family.latents_shape((side, side))
    size, pairs = config.micro_batch_sizes(math.prod(shape))
    plan = config.epoch_plan(start.count_train_timesteps(actions, config))
    latents = torch.zeros(max(size, pairs), *shape, device=META)
    times = latents[:, 0, 0, 0].clone()
    photos = torch.zeros(size, 3, side, side, device=META)
    with as_on_cuda(), autocast(), torch.no_grad(), Counter() as counter:
        conditioning = family.condition(["a cat"] * size, "", guidance, (side, side))
        counter.flops = 0  # a prompt is embedded once
        states = [torch.zeros_like(latents[:size]) for _ in range(actions + 2)]  # the first and the last, too
        if isinstance(start, FromImages):
            family.encode(photos)
        before = counter.flops
        predict = partial(family.predict, denoiser, guidance_scale=guidance)
        predict(latents[:size], times[:size], conditioning)
        counter.flops += (len(timesteps) - 1) * (counter.flops - before)
        images = family.decode(latents[:size])
    rows = torch.zeros(pairs, dtype=torch.long, device=META)
    with as_on_cuda(), autocast(), Counter() as learning:
        batch = (
            latents[:pairs].clone(),
            times[:pairs],
            {name: value[rows] for name, value in conditioning.items()},
        )
        loss = predict(*batch).square().mean()
        if config.train_kl_coefficient > 0:
            with torch.no_grad(), adapter_off(denoiser):
                predict(*batch)
        loss.backward()
    with as_on_cuda(), autocast(), torch.no_grad(), Counter() as rescoring:  # once, for all inner epochs
        if isinstance(algorithm, DDPO) and config.mixed_precision != "no":
            predict(*batch)
    flops_of_pairs = learning.flops + rescoring.flops // config.train_num_inner_epochs
    networks = [denoiser, *family.frozen.values()]
    weights = [w for network in networks for w in (*network.parameters(), *network.buffers())]
    count, of_action = plan.samples_per_process, 4 + timesteps.element_size()  # a log-prob and a timestep
    of_one = (nbytes(states) + nbytes(conditioning.values())) // size + of_action * actions
    return Estimate(
        networks=nbytes(w for w in weights if w.is_floating_point()) + 3 * nbytes(trained),
        trained=nbytes(trained),
        latents=count * of_one,
        images=count * nbytes([images]) // size,
        reward=reward,
        sampling_flops=counter.flops * count // size,
        sampling_peak=counter.peak,
        training_flops=flops_of_pairs * count * plan.pairs_per_sample // pairs,
        training_peak=learning.peak,
    )


@cache
def in_passes(run: str, size: int, checkpointing: bool) -> tuple[DDPOConfig, Estimate]:
    """Return a run's settings and estimate with passes of so many samples."""
    name, changes = RUNS[run]
    preset = PRESETS[name]
    whole, start = DDPOConfig(**{**preset.config, **changes}), FromImages(preset.noise_strength or 1)
    batch = math.gcd(whole.sample_batch_size, size)
    batches = whole.sample_batch_size // batch * whole.sample_num_batches_per_epoch
    sizes: Row = {"sample_micro_batch_size": size, "train_micro_batch_size": size, "sample_batch_size": batch}
    sizes |= {"sample_num_batches_per_epoch": batches, "train_gradient_checkpointing": checkpointing}
    config = replace(whole, **sizes)
    return config, estimate(published("sd15"), config, "ddpo", start, REWARDS[name])


def fit(run: str, gigabytes: int) -> tuple[DDPOConfig, Estimate]:
    """Return a run's settings and estimate with the largest passes that a GPU holds, of 32 at most.

    Samples per epoch and per optimizer step stay. Sampling and training take passes of one size: in bf16 and
    fp16 a network may round differently in another. Checkpointing is for GPUs that are too small without it.
    """
    for checkpointing, size in product((False, True), (32, 16, 8, 4, 2, 1)):
        config, found = in_passes(run, size, checkpointing)
        if found.peak <= gigabytes * GB * SHARE - CUDA * GB:
            return config, found
    raise ValueError(f"{run} does not fit {gigabytes} GB")


# ---------------------------------------------------------------------------------------------- tables
def runs() -> list[Row]:
    """Return every run on every GPU: what fits, and hours at `UTILIZATION`."""
    table = list[Row]()
    for run, (card, (gigabytes, tflops)) in product(RUNS, CARDS.items()):
        config, found = fit(run, gigabytes)
        rate = tflops * 1e12 * UTILIZATION
        sampling, training = found.sampling_flops / rate, found.training_flops / rate
        row = {"run": run, "card": card, "gpu_memory": gigabytes, "pairs": config.train_micro_batch_size}
        row |= {"checkpointing": config.train_gradient_checkpointing, "peak_gb": found.peak / GB}
        row |= {"epochs": config.num_epochs, "sampling_s": sampling, "training_s": training}
        table.append({**row, "hours": config.num_epochs * (sampling + training) / 3600})
    return table


def training_peak(model: str, config: DDPOConfig, pairs: int, checkpointing: bool = False) -> int:
    """Return the bytes that a training pass makes."""
    size = {"train_batch_size": pairs, "train_micro_batch_size": pairs}
    config = replace(config, **size, train_gradient_checkpointing=checkpointing)
    return estimate(published(model), config).training_peak


def stations() -> list[Row]:
    """Return bytes of an epoch of `edit` in training passes of several sizes."""
    config, found = fit("edit", 24)
    held = {"networks": found.networks, "reward models": found.reward, "the epoch's samples": found.samples}
    again, two = (training_peak("sd15", config, 2, checkpointing) for checkpointing in (True, False))
    peaks = {"2 pairs, checkpointing": again, **{f"{n} pairs": two * n // 2 for n in (2, 4, 8, 16)}}
    return [{"station": f"train {name}", **held, "activations": peak} for name, peak in peaks.items()]


def sdxl() -> Row:
    """Count Stable Diffusion XL's UNet at 1024 pixels."""
    config, unet = DDPOConfig(mixed_precision="bf16"), published("sdxl").unet
    parameters = sum(p.numel() for p in unet.parameters())
    peaks = [training_peak("sdxl", config, 1, checkpointing) / GB for checkpointing in (False, True)]
    return {
        "parameters": parameters,
        "lora": sum(p.numel() for p in prepare_policy(unet, {}, config, True, META).values()),
        "gb_bf16": parameters * 2 / GB,
        "guided_pair_gb": peaks[0],
        "guided_pair_checkpointing_gb": peaks[1],
    }


def gigabytes_of(found: Estimate, elsewhere: float = 0.0) -> Row:
    """Return a row of GB; so many bytes of its networks are on other GPUs."""
    peak = (found.peak - elsewhere) / GB
    row = {"networks_gb": (found.networks - elsewhere) / GB, "samples_gb": found.samples / GB}
    row |= {"reward_gb": found.reward / GB, "activations_gb": found.activations / GB}
    return {**row, "peak_gb": peak, "card_gb": (peak + CUDA) / SHARE}


def sd35() -> list[Row]:
    """Count the preset `sd35` in passes of one sample, with and without T5 and checkpointing."""
    preset, table = PRESETS["sd35"], list[Row]()
    fields = {**preset.config, **ONE_SAMPLE, "sample_num_batches_per_epoch": 256}
    for has_t5, checkpointing in product((True, False), repeat=2):
        pipeline = published("sd35_medium")
        if not has_t5:
            pipeline.text_encoder_3 = None
        config = DDPOConfig(**{**fields, "train_gradient_checkpointing": checkpointing})
        found = estimate(pipeline, config, preset.algorithm, FromNoise(), REWARDS["sd35"])
        table.append({"t5": has_t5, "checkpointing": checkpointing, **gigabytes_of(found)})
    return table


def flux() -> list[Row]:
    """Count the preset `flux` in passes of one sample, on one GPU and shared by eight."""
    preset, table = PRESETS["flux"], list[Row]()
    for resolution, cards in product((512, 1024), (1, 8)):
        one: Row = {**preset.config, **ONE_SAMPLE, "train_gradient_checkpointing": True}
        for name in ("sample_num_batches_per_epoch", "train_gradient_accumulation_steps"):
            one[name] = preset.config[name] * preset.config["sample_batch_size"] // cards
        pipeline, start = published("flux_dev"), FromNoise(resolution=resolution)
        found = estimate(pipeline, DDPOConfig(**one), preset.algorithm, start, REWARDS["flux"])
        frozen = nbytes(p for p in pipeline.transformer.parameters() if not p.requires_grad)
        elsewhere = (frozen + 4 * found.trained) * (1 - 1 / cards)  # gradients and moments, too
        row = {"resolution": resolution, "cards": cards, "samples": one["sample_num_batches_per_epoch"]}
        table.append({**row, **gigabytes_of(found, elsewhere)})
    return table


def methods() -> Row:
    """Return GB that a training pass of one pair or image makes, by algorithm, for lesson 12.

    RWR predicts without guidance; DRaFT-K takes K steps and decodes.
    """
    config = DDPOConfig(mixed_precision="bf16", train_micro_batch_size=1)
    plain = replace(config, sample_guidance_scale=1.0)
    peaks = {"RWR": training_peak("sd15", plain, 1), "DDPO": training_peak("sd15", config, 1)}
    family = family_of(published("sd15"))
    prepare_policy(family.denoiser, family.frozen, config, True, META)
    for steps in (1, 2):
        with as_on_cuda(), torch.autocast("meta", torch.bfloat16), Counter() as counter:
            conditioning = family.condition(["a cat"], "", config.sample_guidance_scale)
            latents = torch.zeros(1, 4, 64, 64, device=META)
            for _ in range(steps):
                time = torch.zeros(1, device=META)
                latents = latents - family.predict(
                    family.denoiser, latents, time, conditioning, config.sample_guidance_scale
                )
            family.decode_with_gradient(latents).mean().backward()
        peaks[f"DRaFT-{steps}"] = counter.peak
    return {
        "networks_gb": estimate(published("sd15"), config).networks / GB,
        **{name: peak / GB for name, peak in peaks.items()},
    }


def main() -> None:
    """Write the file."""
    found: Row = {"command": "python -m benchmarks.speed.paper_run", "memory": stations(), "sdxl": sdxl()}
    found |= {"sd35": sd35(), "flux": flux(), "methods": methods(), "runs": runs()}
    write_json(RESULT, json.loads(json.dumps(found), parse_float=lambda number: round(float(number), 4)))


if __name__ == "__main__":
    main()
