"""Fill lesson 08's table: time and memory of Stable Diffusion 1.5's shape on this machine, beside the budget.

`python -m benchmarks.gpu` needs a CUDA device and writes gpu.csv and gpu.json. Weights are random, for they
change neither time nor memory, and nothing is downloaded. `--size tiny` runs the same on tiny-sd, also
without a GPU; peaks of memory stay empty there, for the CPU's allocator keeps no such count.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import peft
import torch
from accelerate.state import AcceleratorState
from diffusers import DDIMScheduler, StableDiffusionPipeline
from transformers import CLIPTokenizer

from ddpo_lessons import budget
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.policy import prepare_policy
from ddpo_lessons.presets import GPU_MEMORY, PRESETS, fit_to_memory
from ddpo_lessons.rollout import predict, vae_factor
from ddpo_lessons.tiny import CHECKPOINT, load_tiny_sd
from ddpo_lessons.trainer import ImageDDPOTrainer

HERE = Path(__file__).parent
COLUMNS = (
    "work", "gpu_memory", "batch", "checkpointing", "compiled", "samples", "result", "seconds", "tflop",
    "peak_gb", "paper_gb",
)  # fmt: skip
# scheduler/scheduler_config.json of the published model
SD15_SCHEDULE: dict[str, Any] = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}


def make_pipeline(size: str) -> StableDiffusionPipeline:
    """Load tiny-sd, or make a pipeline of Stable Diffusion 1.5's shape with random weights."""
    if size == "tiny":
        return load_tiny_sd()
    tokenizer = CLIPTokenizer.from_pretrained(CHECKPOINT / "tokenizer")  # ids fit; the words do not matter
    tokenizer.model_max_length = 77
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return StableDiffusionPipeline(
        **vars(budget.sd15(device)),
        tokenizer=tokenizer,
        scheduler=DDIMScheduler(**SD15_SCHEDULE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def make_config(folder: str, samples: int, precision: str, **changes: Any) -> DDPOConfig:
    """Settings of the camouflage preset with fewer samples in an epoch, one optimizer step of all."""
    sizes = {
        "sample_num_batches_per_epoch": samples // 4,
        "train_gradient_accumulation_steps": samples // 4,
    }
    preset = {**PRESETS["camouflage"].config, **sizes, "mixed_precision": precision, "image_grid_freq": 0}
    return DDPOConfig(**{**preset, **changes}, output_dir=folder, overwrite=True)


def peak_gb() -> float | str:
    """The most that was allocated since the last reset, in GB; empty without CUDA."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else ""


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds_of(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a few calls, after two that do not count."""
    times = []
    for number in range(2 + repeats):
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times += [time.perf_counter() - started] if number >= 2 else []
    return statistics.median(times)


def attempt(row: dict[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Complete a row with what `work` measures; a card that is too small is a result, too."""
    reset_peak()
    try:
        measured = {"result": "ok", **work(), "peak_gb": peak_gb()}
    except torch.cuda.OutOfMemoryError:
        measured = {"result": "out of memory"}
    found = {**dict.fromkeys(COLUMNS, ""), **row, **measured}
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in found.items()}


# -------------------------------------------------------------------------------------- single passes
def set_checkpointing(unet: Any, wanted: bool) -> None:
    if wanted:
        unet.enable_gradient_checkpointing()
    else:
        unet.disable_gradient_checkpointing()


def passes(
    pipeline: StableDiffusionPipeline, precision: str, batch: int, repeats: int, compiled: bool
) -> Iterator[dict[str, Any]]:
    """Measure a sampling pass and training passes of a policy that `prepare_policy` made."""
    unet, tokens = pipeline.unet, pipeline.text_encoder.config.max_position_embeddings
    autocast, networks = budget.AUTOCAST[precision], budget.like(pipeline)
    prepare_policy(networks, DDPOConfig(mixed_precision=precision), True, torch.device("meta"))
    weights = sum(budget.parameter_bytes(network.parameters()) for network in vars(networks).values())
    latents, timesteps, embeds = budget.unet_inputs(unet, batch, tokens)

    def forward() -> torch.Tensor:
        with torch.autocast(unet.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            return predict(unet, latents.float(), timesteps, embeds, None, 1.0)

    def sample() -> None:
        with torch.no_grad():
            forward()

    def train() -> None:
        forward().mean().backward()

    row = {"batch": batch, "compiled": compiled}
    cost = budget.sampling_cost(networks.unet, batch, tokens, autocast)
    row |= {"tflop": cost.flops / 1e12, "paper_gb": (weights + cost.peak) / 1e9}
    yield attempt({**row, "work": "sampling pass"}, lambda: {"seconds": seconds_of(sample, repeats)})
    for checkpointing in (False, True):
        for network in (unet, networks.unet):
            set_checkpointing(network, checkpointing)
        cost = budget.training_cost(networks.unet, batch, tokens, autocast)
        gradients = budget.parameter_bytes(p for p in networks.unet.parameters() if p.requires_grad)
        row |= {"tflop": cost.flops / 1e12, "paper_gb": (weights + gradients + cost.peak) / 1e9}
        row |= {"work": "training pass", "checkpointing": checkpointing}
        yield attempt(row, lambda: {"seconds": seconds_of(train, repeats)})
    unet.disable_gradient_checkpointing()
    unet.zero_grad()


# ----------------------------------------------------------------------------------------- whole epochs
def brightness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """A reward that costs nothing: CLIP's time and memory come on top."""
    return images.mean(dim=(1, 2, 3))


def epochs(
    pipeline: StableDiffusionPipeline, precision: str, gigabytes: int, samples: int, compiled: bool
) -> Iterator[dict[str, Any]]:
    """Measure the second of two epochs of `ImageDDPOTrainer`, by phase."""
    side = pipeline.unet.config.sample_size * vae_factor(pipeline.vae)
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps one precision per process
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(folder, samples, precision)
        cut = fit_to_memory({k: v for k, v in vars(config).items() if k != "output_dir"}, gigabytes)
        config = replace(config, **{name: cut[name] for name in cut if hasattr(config, name)})
        trainer = ImageDDPOTrainer(
            config, brightness, lambda: ("", torch.rand(3, side, side), {}), pipeline, noise_strength=0.4
        )
        paper = budget.estimate(budget.like(pipeline), config, trainer.num_train_timesteps, from_images=True)
        metrics: dict[str, float] = {}

        def work() -> dict[str, Any]:
            for epoch in range(2):
                metrics.update(trainer.step(epoch))
            return {}

        row = {
            "gpu_memory": gigabytes,
            "samples": samples,
            "compiled": compiled,
            "checkpointing": config.train_gradient_checkpointing,
            "paper_gb": paper.peak / 1e9,
        }
        whole = attempt(row, work)
    flops = {"sampling": paper.flops_sampling / 1e12, "reward": "", "training": paper.flops_training / 1e12}
    batches = {"sampling": config.sample_batch_size, "reward": "", "training": config.train_batch_size}
    for phase, tflop in flops.items():
        seconds = round(metrics[f"seconds_{phase}"], 5) if metrics else ""
        tflop = round(tflop, 5) if tflop else ""
        yield {
            **whole,
            "work": f"epoch: {phase}",
            "seconds": seconds,
            "tflop": tflop,
            "batch": batches[phase],
        }
    pipeline.unet.disable_gradient_checkpointing()


# ----------------------------------------------------------------------------------------------- report
def machine() -> str:
    """Name the device, without the host."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    return f"{torch.get_num_threads()} threads, {platform.machine()}"


def header(arguments: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """What has to be known to run it again."""
    return {
        "command": " ".join(["python -m benchmarks.gpu", *words]),
        "seed": arguments.seed,
        "machine": machine(),
        "precision": "no" if arguments.size == "tiny" else "bf16",
        "python": platform.python_version(),
        **{library.__name__: library.__version__ for library in (torch, diffusers, peft, accelerate)},
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure everything that was asked for."""
    torch.manual_seed(arguments.seed)
    pipeline = make_pipeline(arguments.size)
    precision = "no" if arguments.size == "tiny" else "bf16"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prepare_policy(pipeline, DDPOConfig(mixed_precision=precision), True, device)
    for compiled in (False, True) if arguments.compile else (False,):
        if compiled:
            pipeline.unet.compile()  # in place: names of weights, adapter and trainer stay as they are
        for batch in arguments.batches:
            yield from passes(pipeline, precision, batch, arguments.repeats, compiled)
        for gigabytes in arguments.gpu_memory:
            yield from epochs(pipeline, precision, gigabytes, arguments.samples, compiled)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print each row when it is there, and write table and header."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("sd15", "tiny"), default="sd15")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--gpu-memory", type=int, nargs="+", choices=GPU_MEMORY, default=list(GPU_MEMORY))
    parser.add_argument("--samples", type=int, help="of an epoch, a multiple of 4 (32; tiny: 8)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="all of it again with a compiled UNet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="CSV; the header becomes a JSON beside it")
    words = sys.argv[1:] if words is None else list(words)
    arguments = parser.parse_args(words)
    arguments.samples = arguments.samples or (8 if arguments.size == "tiny" else 32)
    if arguments.samples < 4 or arguments.samples % 4:
        parser.error(f"--samples {arguments.samples}: use a multiple of 4")
    if arguments.size == "sd15" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --size tiny runs the same on tiny-sd")
    output = arguments.output or HERE / ("gpu_cpu.csv" if arguments.size == "tiny" else "gpu.csv")
    diffusers.utils.logging.disable_progress_bar()
    rows = []
    for row in measure(arguments):
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
        with open(output, "w", newline="") as file:  # after each, so that a stop loses nothing
            writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    output.with_suffix(".json").write_text(json.dumps(header(arguments, words), indent=1) + "\n")


if __name__ == "__main__":
    main()
