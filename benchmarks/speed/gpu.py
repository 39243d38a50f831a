"""Fill lesson 08's table: time and memory of Stable Diffusion 1.5's shape on this machine, beside the budget.

`python -m benchmarks.speed.gpu` needs a CUDA device and writes gpu.csv and gpu.json. Weights are random, for
they change neither time nor memory, and nothing is downloaded. `--size tiny` runs the same on tiny-sd, in
float32 unless `--precision` says otherwise, also without a GPU; peaks of memory stay empty there, for the CPU's
allocator keeps no such count.

Single passes of the UNet come first; then whole epochs, of lesson 08's preset on every card and of the cases
of cases.py at every batch size, each beside its floor: the passes that it needs and nothing else.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import peft
import torch
from accelerate.state import AcceleratorState
from diffusers import DDIMScheduler, StableDiffusionPipeline
from transformers import CLIPTokenizer

from benchmarks.speed.cases import CASES, Case
from ddpo_lessons.app import budget
from ddpo_lessons.app.presets import GPU_MEMORY, PRESETS, fit_to_memory
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.families.policy import prepare_policy
from ddpo_lessons.rollout import predict, vae_factor
from ddpo_lessons.run.compiled import WrongGradientsError
from ddpo_lessons.tiny import CHECKPOINT, load_tiny_sd
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer

HERE = Path(__file__).parent
COLUMNS = (
    "work", "case", "gpu_memory", "batch", "checkpointing", "compiled", "samples", "result", "seconds",
    "floor", "tflop", "peak_gb", "paper_gb",
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


def preset_config(folder: str, samples: int, precision: str, gigabytes: int) -> DDPOConfig:
    """Settings of the camouflage preset on a card: fewer samples, one optimizer step of all."""
    changes = {
        "sample_num_batches_per_epoch": samples // 4,
        "train_gradient_accumulation_steps": samples // 4,
        "mixed_precision": precision,
        "image_grid_freq": 0,
    }
    fields = fit_to_memory({**PRESETS["camouflage"].config, **changes}, gigabytes)
    return DDPOConfig(**fields, output_dir=folder, overwrite=True)


def case_config(
    folder: str, samples: int, precision: str, case: Case, batch: int, checkpointing: bool
) -> DDPOConfig:
    """Settings of a case, with as many whole batches in an epoch as there are samples for."""
    changes = {
        "sample_batch_size": batch,
        "sample_num_batches_per_epoch": max(1, samples // batch),
        "train_batch_size": batch,
        "train_gradient_checkpointing": checkpointing,
        "mixed_precision": precision,
        "image_grid_freq": 0,
    }
    return DDPOConfig(**{**case.settings("large"), **changes}, output_dir=folder, overwrite=True)


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
    """Complete a row with what `work` measures; too small a card and other failures are results, too."""
    reset_peak()
    try:
        measured = {"result": "ok", **work(), "peak_gb": peak_gb()}
    except torch.cuda.OutOfMemoryError:
        measured = {"result": "out of memory"}
    except WrongGradientsError:
        measured = {"result": "compiled gradients are wrong"}
    except RuntimeError as error:  # of a kernel or a compiler: the rows after it can still be measured
        measured = {"result": f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.100}"}
    return rounded({**dict.fromkeys(COLUMNS, ""), **row, **measured})


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}


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


def make_trainer(pipeline: StableDiffusionPipeline, config: DDPOConfig, case: Case) -> DDPOTrainer:
    """Make the trainer of a case; each picture of img2img is another one."""
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps one precision per process
    if case.noise_strength is None:
        return DDPOTrainer(config, brightness, lambda: (case.prompt, {}), pipeline)
    side = pipeline.unet.config.sample_size * vae_factor(pipeline.vae)

    def prompt_function() -> Any:
        return case.prompt, torch.rand(3, side, side), {}

    return ImageDDPOTrainer(config, brightness, prompt_function, pipeline, noise_strength=case.noise_strength)


def floors(trainer: DDPOTrainer, case: Case, single: Sequence[dict[str, Any]]) -> dict[str, float | str]:
    """Seconds of an epoch's UNet evaluations and nothing else, by phase; empty where none was measured.

    Args:
        trainer: whose epoch it is.
        case: what it trains.
        single: the rows of single passes, of which the fastest counts, an evaluation, that is not larger
            than the trainer's own passes: memory is what the batch size was chosen for. Where its own are
            larger than all that were measured, as with tiny-sd, this is no lower bound: add to `--batches`.
    """
    unet, config = trainer.pipeline.unet.config, trainer.config
    samples, pairs = config.forward_sizes(unet.in_channels * unet.sample_size**2)
    phases = {
        "sampling": ("", case.actions, samples),
        "training": (config.train_gradient_checkpointing, trainer.num_train_timesteps, pairs),
    }
    found: dict[str, float | str] = {"reward": ""}
    for phase, (checkpointing, steps, size) in phases.items():
        evaluations = trainer.plan.total_samples * steps * case.evaluations
        rates = [
            row["seconds"] / row["batch"]
            for row in single
            if (row["work"], row["checkpointing"], row["result"]) == (f"{phase} pass", checkpointing, "ok")
            and row["batch"] <= size * case.evaluations
        ]
        found[phase] = evaluations * min(rates) if rates else ""
    return found


def epochs(
    pipeline: StableDiffusionPipeline,
    config: DDPOConfig,
    case: Case,
    single: Sequence[dict[str, Any]],
    row: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Complete a row with the second of two epochs, once for every phase and once for the whole."""
    trainer = make_trainer(pipeline, replace(config, torch_compile=row["compiled"]), case)
    # An empty prompt needs one pass, whatever the guidance.
    counted = replace(config, sample_guidance_scale=case.guidance_scale if case.evaluations == 2 else 1.0)
    from_images = case.noise_strength is not None
    paper = budget.estimate(budget.like(pipeline), counted, trainer.num_train_timesteps, from_images)
    metrics: dict[str, float] = {}

    def work() -> dict[str, Any]:
        trainer.step(0)  # compiles, and compares gradients with the UNet's own, which takes memory of its own
        reset_peak()
        metrics.update(trainer.step(1))
        return {}

    row |= {
        "case": case.name,
        "samples": trainer.plan.total_samples,
        "checkpointing": config.train_gradient_checkpointing,
        "paper_gb": paper.peak / 1e9,
    }
    whole = attempt(row, work)
    floor = floors(trainer, case, single)
    flops = {"sampling": paper.flops_sampling / 1e12, "reward": "", "training": paper.flops_training / 1e12}
    batches = {"sampling": config.sample_batch_size, "reward": "", "training": config.train_batch_size}
    phases = []
    for phase, tflop in flops.items():
        seconds = metrics[f"seconds_{phase}"] if whole["result"] == "ok" else ""
        found = {"seconds": seconds, "floor": floor[phase], "tflop": tflop}
        phases.append({**whole, "work": f"epoch: {phase}", "batch": batches[phase], **found})
    total = {key: added(phase[key] for phase in phases) for key in ("seconds", "floor", "tflop")}
    phases.append({**whole, "work": "epoch: whole", "batch": config.sample_batch_size, **total})
    yield from map(rounded, phases)
    pipeline.unet.disable_gradient_checkpointing()


def added(values: Iterable[Any]) -> float | str:
    """Add up what was measured."""
    return sum(value for value in values if value != "") or ""


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
        "command": shlex.join(["python", "-m", "benchmarks.speed.gpu", *words]),
        "seed": arguments.seed,
        "machine": machine(),
        "precision": arguments.precision,
        "python": platform.python_version(),
        **{library.__name__: library.__version__ for library in (torch, diffusers, peft, accelerate)},
    }


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure everything that was asked for."""
    torch.manual_seed(arguments.seed)
    pipeline, precision = make_pipeline(arguments.size), arguments.precision
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prepare_policy(pipeline, DDPOConfig(mixed_precision=precision), True, device)
    for compiled in (False, True) if arguments.compile else (False,):
        if compiled:
            # A graph for every shape and mode; past the limit the UNet would run uncompiled, in silence.
            torch._dynamo.config.recompile_limit = 64
            pipeline.unet.compile(dynamic=False)  # as the trainer does
        single = []
        for batch in arguments.batches:
            for row in passes(pipeline, precision, batch, arguments.repeats, compiled):
                single.append(row)
                yield row
        yield from all_epochs(pipeline, precision, arguments, single, compiled)


def all_epochs(
    pipeline: StableDiffusionPipeline,
    precision: str,
    arguments: argparse.Namespace,
    single: Sequence[dict[str, Any]],
    compiled: bool,
) -> Iterator[dict[str, Any]]:
    """Measure epochs of the preset on every card, and of every case at every batch size."""
    preset = PRESETS["camouflage"]
    guidance, steps = (preset.config[f"sample_{name}"] for name in ("guidance_scale", "num_steps"))
    camouflage = Case("camouflage", guidance, preset.prompts, preset.noise_strength, steps)
    with tempfile.TemporaryDirectory() as folder:
        for gigabytes in arguments.gpu_memory:
            config = preset_config(folder, arguments.samples, precision, gigabytes)
            row = {"gpu_memory": gigabytes, "compiled": compiled}
            yield from epochs(pipeline, config, camouflage, single, row)
        for case, batch in product((CASES[name] for name in arguments.cases), arguments.batches):
            for checkpointing in (False, True) if batch == 1 else (False,):  # 1 with it is the least memory
                config = case_config(folder, arguments.samples, precision, case, batch, checkpointing)
                yield from epochs(pipeline, config, case, single, {"compiled": compiled})


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print each row when it is there, and write table and header."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=("sd15", "tiny"), default="sd15")
    parser.add_argument("--precision", choices=tuple(budget.AUTOCAST), help="bf16; tiny: no")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--gpu-memory", type=int, nargs="+", choices=GPU_MEMORY, default=list(GPU_MEMORY))
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--samples", type=int, help="of an epoch, a multiple of 4 (32; tiny: 8)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="all of it again with a compiled UNet")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="CSV; the header becomes a JSON beside it")
    words = sys.argv[1:] if words is None else list(words)
    arguments = parser.parse_args(words)
    arguments.samples = arguments.samples or (8 if arguments.size == "tiny" else 32)
    arguments.precision = arguments.precision or ("no" if arguments.size == "tiny" else "bf16")
    if arguments.samples < 4 or arguments.samples % 4:
        parser.error(f"--samples {arguments.samples}: use a multiple of 4")
    if arguments.size == "sd15" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --size tiny runs the same on tiny-sd")
    output = arguments.output or HERE / ("gpu_cpu.csv" if arguments.size == "tiny" else "gpu.csv")
    diffusers.utils.logging.disable_progress_bar()
    output.with_suffix(".json").write_text(json.dumps(header(arguments, words), indent=1) + "\n")
    rows = []
    for row in measure(arguments):
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
        with open(output, "w", newline="") as file:  # after each, so that a stop loses nothing
            writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
