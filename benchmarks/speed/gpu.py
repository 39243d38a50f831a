"""Check lesson 08's paper on a card: seconds and memory of epochs at Stable Diffusion 1.5's shape.

`python -m benchmarks.speed.gpu` needs a CUDA device and writes gpu.csv and gpu.json, with what
`ddpo_lessons.app.budget` says in the columns "…_tflop" and "paper_gb". Weights are random, for they change
neither time nor memory, and nothing is downloaded. `--size tiny` runs the same on tiny-sd, in float32, also
without a GPU; peaks of memory stay empty there, for the CPU's allocator keeps no such count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from diffusers import StableDiffusionPipeline
from diffusers.utils import logging

from benchmarks.common import Row, machine, redness, scratch_config, write_json, write_rows
from ddpo_lessons.app import budget, memory
from ddpo_lessons.app.presets import GPU_MEMORY, PRESETS, fit_to_memory
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.families.stable_diffusion import vae_factor
from ddpo_lessons.run.compiled import WrongGradientsError
from ddpo_lessons.tiny import load_tiny_sd
from ddpo_lessons.trainer import ImageDDPOTrainer

PRESET = PRESETS["camouflage"]
PHASES = ("sampling", "reward", "training")


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_pipeline(size: str) -> StableDiffusionPipeline:
    """Load tiny-sd, or make a pipeline of Stable Diffusion 1.5's shape with random weights."""
    if size == "tiny":
        return load_tiny_sd()
    return memory.published("sd15", device())


def reset_peak() -> None:
    if device() == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def attempt(work: Callable[[], Row]) -> Row:
    """Return what some work measures, and its peak; too small a card and other failures are results, too."""
    reset_peak()
    try:
        measured = {"result": "ok", **work()}
        return {**measured, "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if device() == "cuda" else ""}
    except torch.cuda.OutOfMemoryError:
        result = "out of memory"
    except WrongGradientsError:
        result = "compiled gradients are wrong"
    except RuntimeError as error:  # of a kernel or a compiler: the rows after it can still be measured
        result = f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.100}"
    return {"result": result, **dict.fromkeys((*(f"{phase}_s" for phase in PHASES), "peak_gb"), "")}


def measure_epoch(pipeline: Any, config: DDPOConfig) -> Row:
    """Measure the second of two epochs of the preset; its reward costs nothing, CLIP's comes on top."""
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps one precision per process
    side = pipeline.unet.config.sample_size * vae_factor(pipeline.vae)
    task = (redness, lambda: (PRESET.prompts, torch.rand(3, side, side), {}), pipeline)
    trainer = ImageDDPOTrainer(config, *task, noise_strength=PRESET.noise_strength)
    paper = budget.estimate(memory.like(pipeline), config, trainer.algorithm, trainer.start)

    def work() -> Row:
        trainer.step(0)  # compiles, and compares gradients with the UNet's own, which takes memory of its own
        reset_peak()
        metrics = trainer.step(1)
        return {f"{phase}_s": metrics[f"seconds_{phase}"] for phase in PHASES}

    row = {"checkpointing": config.train_gradient_checkpointing, "samples": trainer.plan.total_samples}
    row |= {"sampling_batch": config.sample_batch_size, "training_batch": config.train_batch_size}
    row |= attempt(work)
    pipeline.unet.disable_gradient_checkpointing()
    flops = {"sampling_tflop": paper.sampling.flops / 1e12, "training_tflop": paper.training.flops / 1e12}
    return {**row, **flops, "paper_gb": paper.peak / 1e9}


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure everything that was asked for."""
    torch.manual_seed(0)
    # A graph for every shape and mode; past the limit the UNet would run uncompiled, in silence.
    torch._dynamo.config.recompile_limit = 64
    pipeline, count = make_pipeline(arguments.size), arguments.batches  # one optimizer step
    fields = {**PRESET.config, "mixed_precision": arguments.precision, "image_grid_freq": 0}
    fields |= {"sample_num_batches_per_epoch": count, "train_gradient_accumulation_steps": count}
    for compiled in (False, True) if arguments.compile else (False,):
        for gigabytes in arguments.gpu_memory:
            with scratch_config(fit_to_memory(fields, gigabytes), torch_compile=compiled) as config:
                found = measure_epoch(pipeline, config)
                yield {"gpu_memory": gigabytes, "compiled": compiled, **found}


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print each row when it is there, and write table and header."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("sd15", "tiny"), default="sd15")
    parser.add_argument("--gpu-memory", type=int, nargs="+", choices=GPU_MEMORY, default=list(GPU_MEMORY))
    parser.add_argument("--batches", type=int, default=8, help="of four samples, in an epoch")
    parser.add_argument("--compile", action="store_true", help="all of it again with a compiled UNet")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".csv"))
    words = sys.argv[1:] if words is None else list(words)
    arguments = parser.parse_args(words)
    arguments.precision = "no" if arguments.size == "tiny" else "bf16"
    if arguments.size != "tiny" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --size tiny runs the same on tiny-sd")
    logging.disable_progress_bar()
    header = {"command": " ".join(["python -m benchmarks.speed.gpu", *words])}
    header |= {"machine": torch.cuda.get_device_name() if device() == "cuda" else machine()}
    libraries = {name: metadata.version(name) for name in ("torch", "diffusers", "peft", "accelerate")}
    write_json(arguments.output.with_suffix(".json"), {**header, **libraries})
    rows = []
    for row in measure(arguments):
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
        write_rows(arguments.output, rows)  # after each, so that a stop loses nothing


if __name__ == "__main__":
    main()
