"""Fill lesson 08's table: time and memory of Stable Diffusion 1.5's shape on this machine, beside the budget.

`python -m benchmarks.speed.gpu` needs a CUDA device and writes gpu.csv and gpu.json. Weights are random, for
they change neither time nor memory, and nothing is downloaded. `--size tiny` runs the same on tiny-sd, in
float32, also without a GPU; peaks of memory stay empty there, for the CPU's allocator keeps no such count.
Single passes of the UNet come first; then whole epochs of lesson 08's preset on every card.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate.state import AcceleratorState
from diffusers import DDIMScheduler, StableDiffusionPipeline
from transformers import CLIPTokenizer

from benchmarks.common import machine, seconds_of, write_json, write_rows
from benchmarks.speed.cases import redness
from ddpo_lessons.app import budget
from ddpo_lessons.app.presets import GPU_MEMORY, PRESETS, fit_to_memory
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.families import family_of
from ddpo_lessons.families.policy import prepare_policy
from ddpo_lessons.families.stable_diffusion import vae_factor
from ddpo_lessons.run.compiled import WrongGradientsError
from ddpo_lessons.tiny import CHECKPOINT, load_tiny_sd
from ddpo_lessons.trainer import ImageDDPOTrainer

HERE = Path(__file__).parent
PRESET = PRESETS["camouflage"]
Row = dict[str, Any]
COLUMNS = ("work", "gpu_memory", "batch", "checkpointing", "compiled", "samples", "result", "seconds")
COLUMNS += ("tflop", "peak_gb", "paper_gb")


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_pipeline(size: str) -> StableDiffusionPipeline:
    """Load tiny-sd, or make a pipeline of Stable Diffusion 1.5's shape with random weights."""
    if size == "tiny":
        return load_tiny_sd()
    tokenizer = CLIPTokenizer.from_pretrained(CHECKPOINT / "tokenizer")  # ids fit; the words do not matter
    tokenizer.model_max_length = 77
    schedule = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    schedule |= {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}  # as published
    parts = {"tokenizer": tokenizer, "scheduler": DDIMScheduler(**schedule), **vars(budget.sd15(device()))}
    unused = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return StableDiffusionPipeline(**parts, **unused)


def reset_peak() -> None:
    if device() == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a few calls, after two that do not count."""

    def whole() -> None:
        run()
        if device() == "cuda":
            torch.cuda.synchronize()

    return statistics.median([seconds_of(whole) for _ in range(2 + repeats)][2:])


def attempt(row: Row, work: Callable[[], Row]) -> Row:
    """Complete a row with what `work` measures; too small a card and other failures are results, too."""
    reset_peak()
    try:
        measured = {"result": "ok", **work()}
        measured["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if device() == "cuda" else ""
    except torch.cuda.OutOfMemoryError:
        measured = {"result": "out of memory"}
    except WrongGradientsError:
        measured = {"result": "compiled gradients are wrong"}
    except RuntimeError as error:  # of a kernel or a compiler: the rows after it can still be measured
        measured = {"result": f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.100}"}
    return {**dict.fromkeys(COLUMNS, ""), **row, **measured}


def passes(pipeline: Any, precision: str, batch: int, repeats: int, compiled: bool) -> Iterator[Row]:
    """Measure a sampling pass and training passes of a policy that `prepare_policy` made."""
    family, unet = family_of(pipeline), pipeline.unet
    tokens = pipeline.text_encoder.config.max_position_embeddings
    autocast, networks = budget.AUTOCAST[precision], budget.like(pipeline)
    frozen = {"vae": networks.vae, "text_encoder": networks.text_encoder}
    config = DDPOConfig(mixed_precision=precision)
    prepare_policy(networks.unet, frozen, config, True, torch.device("meta"))
    weights = sum(budget.parameter_bytes(network.parameters()) for network in vars(networks).values())
    latents, timesteps, embeds = budget.unet_inputs(unet, batch, tokens)

    def forward() -> torch.Tensor:
        with torch.autocast(unet.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            return family.predict(unet, latents.float(), timesteps, {"prompt_embeds": embeds}, 1.0)

    row: Row = {"work": "sampling pass", "batch": batch, "compiled": compiled}
    cost = budget.sampling_cost(networks.unet, batch, tokens, autocast)
    row |= {"tflop": cost.flops / 1e12, "paper_gb": (weights + cost.peak) / 1e9}
    yield attempt(row, lambda: {"seconds": median_seconds(torch.no_grad()(forward), repeats)})
    gradients = budget.parameter_bytes(p for p in networks.unet.parameters() if p.requires_grad)
    for checkpointing in (False, True):
        for network in (unet, networks.unet):
            getattr(network, f"{'enable' if checkpointing else 'disable'}_gradient_checkpointing")()
        cost = budget.training_cost(networks.unet, batch, tokens, autocast)
        row |= {"tflop": cost.flops / 1e12, "paper_gb": (weights + gradients + cost.peak) / 1e9}
        row |= {"work": "training pass", "checkpointing": checkpointing}
        yield attempt(row, lambda: {"seconds": median_seconds(lambda: forward().mean().backward(), repeats)})
    unet.disable_gradient_checkpointing()
    unet.zero_grad()


def epochs(pipeline: Any, config: DDPOConfig, row: Row) -> Iterator[Row]:
    """Complete a row with the second of two epochs of the preset, once for every phase and once for all."""
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps one precision per process
    side = pipeline.unet.config.sample_size * vae_factor(pipeline.vae)

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        return redness(images)  # costs nothing: CLIP's time and memory come on top

    task = (reward, lambda: (PRESET.prompts, torch.rand(3, side, side), {}), pipeline)
    trainer = ImageDDPOTrainer(config, *task, noise_strength=PRESET.noise_strength)
    paper = budget.estimate(budget.like(pipeline), config, trainer.num_train_timesteps, from_images=True)
    metrics: dict[str, float] = {}

    def work() -> Row:
        trainer.step(0)  # compiles, and compares gradients with the UNet's own, which takes memory of its own
        reset_peak()
        metrics.update(trainer.step(1))
        return {}

    row |= {"samples": trainer.plan.total_samples, "paper_gb": paper.peak / 1e9}
    whole = attempt({**row, "checkpointing": config.train_gradient_checkpointing}, work)
    flops = {"sampling": paper.flops_sampling / 1e12, "reward": "", "training": paper.flops_training / 1e12}
    batches = {"sampling": config.sample_batch_size, "reward": "", "training": config.train_batch_size}
    seconds = {phase: metrics.get(f"seconds_{phase}", "") for phase in flops}
    for phase, tflop in flops.items():
        found = {"batch": batches[phase], "seconds": seconds[phase], "tflop": tflop}
        yield {**whole, "work": f"epoch: {phase}", **found}
    total = {
        "seconds": sum(seconds.values()) if metrics else "",
        "tflop": flops["sampling"] + flops["training"],
    }
    yield {**whole, "work": "epoch: whole", "batch": config.sample_batch_size, **total}
    pipeline.unet.disable_gradient_checkpointing()


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure everything that was asked for."""
    torch.manual_seed(arguments.seed)
    pipeline, precision = make_pipeline(arguments.size), arguments.precision
    config, frozen = DDPOConfig(mixed_precision=precision), family_of(pipeline).frozen
    prepare_policy(pipeline.unet, frozen, config, True, torch.device(device()))
    fields = {**PRESET.config, "mixed_precision": precision, "image_grid_freq": 0, "overwrite": True}
    count = arguments.samples // 4  # one optimizer step
    fields |= {"sample_num_batches_per_epoch": count, "train_gradient_accumulation_steps": count}
    for compiled in (False, True) if arguments.compile else (False,):
        if compiled:
            # A graph for every shape and mode; past the limit the UNet would run uncompiled, in silence.
            torch._dynamo.config.recompile_limit = 64
            pipeline.unet.compile(dynamic=False)  # as the trainer does
        for batch in arguments.batches:
            yield from passes(pipeline, precision, batch, arguments.repeats, compiled)
        for gigabytes in arguments.gpu_memory:
            with tempfile.TemporaryDirectory() as folder:
                own = {**fit_to_memory(fields, gigabytes), "torch_compile": compiled, "output_dir": folder}
                yield from epochs(
                    pipeline, DDPOConfig(**own), {"gpu_memory": gigabytes, "compiled": compiled}
                )


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
    tiny = arguments.size == "tiny"
    arguments.samples = arguments.samples or (8 if tiny else 32)
    arguments.precision = "no" if tiny else "bf16"
    if arguments.samples < 4 or arguments.samples % 4:
        parser.error(f"--samples {arguments.samples}: use a multiple of 4")
    if not tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --size tiny runs the same on tiny-sd")
    output = arguments.output or HERE / ("gpu_cpu.csv" if tiny else "gpu.csv")
    diffusers.utils.logging.disable_progress_bar()
    header = {"command": " ".join(["python -m benchmarks.speed.gpu", *words]), "seed": arguments.seed}
    header |= {"machine": torch.cuda.get_device_name() if device() == "cuda" else machine()}
    libraries = {name: metadata.version(name) for name in ("torch", "diffusers", "peft", "accelerate")}
    write_json(output.with_suffix(".json"), {**header, "precision": arguments.precision, **libraries})
    rows = []
    for row in measure(arguments):
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
        write_rows(output, rows)  # after each, so that a stop loses nothing


if __name__ == "__main__":
    main()
