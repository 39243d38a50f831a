"""Fill lesson 08's table: time and memory of Stable Diffusion 1.5's shape on this machine, beside the budget.

`python -m benchmarks.speed.gpu` needs a CUDA device and writes gpu.csv and gpu.json. Weights are random, for
they change neither time nor memory, and nothing is downloaded. `--size tiny` runs the same on tiny-sd, in
float32 unless `--precision` says otherwise, also without a GPU; peaks of memory stay empty there, for the
CPU's allocator keeps no such count.

Single passes of the UNet come first; then whole epochs, of lesson 08's preset on every card and of the cases
of cases.py at every batch size, each beside its floor: the passes that it needs and nothing else.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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

from benchmarks.common import write_json, write_rows
from benchmarks.speed.cases import CASES, Case, redness
from ddpo_lessons.app import budget
from ddpo_lessons.app.presets import GPU_MEMORY, PRESETS, fit_to_memory
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.families import family_of
from ddpo_lessons.families.policy import prepare_policy
from ddpo_lessons.families.stable_diffusion import vae_factor
from ddpo_lessons.run.compiled import WrongGradientsError
from ddpo_lessons.tiny import CHECKPOINT, load_tiny_sd
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer

HERE = Path(__file__).parent
Row = dict[str, Any]
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


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_pipeline(size: str) -> StableDiffusionPipeline:
    """Load tiny-sd, or make a pipeline of Stable Diffusion 1.5's shape with random weights."""
    if size == "tiny":
        return load_tiny_sd()
    tokenizer = CLIPTokenizer.from_pretrained(CHECKPOINT / "tokenizer")  # ids fit; the words do not matter
    tokenizer.model_max_length = 77
    return StableDiffusionPipeline(
        **vars(budget.sd15(device())),
        tokenizer=tokenizer,
        scheduler=DDIMScheduler(**SD15_SCHEDULE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def reset_peak() -> None:
    if device() == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def seconds_of(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a few calls, after two that do not count."""
    times = []
    for _ in range(2 + repeats):
        started = time.perf_counter()
        run()
        if device() == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


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


# -------------------------------------------------------------------------------------- single passes
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

    row: Row = {"batch": batch, "compiled": compiled}
    cost = budget.sampling_cost(networks.unet, batch, tokens, autocast)
    row |= {"work": "sampling pass", "tflop": cost.flops / 1e12, "paper_gb": (weights + cost.peak) / 1e9}
    yield attempt(row, lambda: {"seconds": seconds_of(torch.no_grad()(forward), repeats)})
    for checkpointing in (False, True):
        switch = f"{'enable' if checkpointing else 'disable'}_gradient_checkpointing"
        for network in (unet, networks.unet):
            getattr(network, switch)()
        cost = budget.training_cost(networks.unet, batch, tokens, autocast)
        gradients = budget.parameter_bytes(p for p in networks.unet.parameters() if p.requires_grad)
        row |= {"tflop": cost.flops / 1e12, "paper_gb": (weights + gradients + cost.peak) / 1e9}
        row |= {"work": "training pass", "checkpointing": checkpointing}
        yield attempt(row, lambda: {"seconds": seconds_of(lambda: forward().mean().backward(), repeats)})
    unet.disable_gradient_checkpointing()
    unet.zero_grad()


# ----------------------------------------------------------------------------------------- whole epochs
def runs(arguments: argparse.Namespace, folder: str) -> Iterator[tuple[Case, DDPOConfig, Row]]:
    """Yield the preset on every card, and every case at every batch size."""
    preset, samples = PRESETS["camouflage"], arguments.samples
    shared = {"mixed_precision": arguments.precision, "image_grid_freq": 0}
    shared |= {"output_dir": folder, "overwrite": True}
    guidance, steps = (preset.config[f"sample_{name}"] for name in ("guidance_scale", "num_steps"))
    camouflage = Case("camouflage", guidance, preset.prompts, preset.noise_strength, steps)
    one_step = {
        "sample_num_batches_per_epoch": samples // 4,
        "train_gradient_accumulation_steps": samples // 4,
    }
    for gigabytes in arguments.gpu_memory:
        fields = fit_to_memory({**preset.config, **one_step, **shared}, gigabytes)
        yield camouflage, DDPOConfig(**fields), {"gpu_memory": gigabytes}
    for case, batch in product((CASES[name] for name in arguments.cases), arguments.batches):
        sizes = {"sample_num_batches_per_epoch": max(1, samples // batch)}
        sizes |= {"sample_batch_size": batch, "train_batch_size": batch}
        for checkpointing in (False, True) if batch == 1 else (False,):  # 1 with it is the least memory
            sizes["train_gradient_checkpointing"] = checkpointing
            yield case, DDPOConfig(**{**case.settings("large"), **sizes, **shared}), {}


def make_trainer(pipeline: Any, config: DDPOConfig, case: Case) -> DDPOTrainer:
    """Make the trainer of a case; each picture of img2img is another one."""
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps one precision per process

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        return redness(images)  # costs nothing: CLIP's time and memory come on top

    if case.noise_strength is None:
        return DDPOTrainer(config, reward, lambda: (case.prompt, {}), pipeline)
    side = pipeline.unet.config.sample_size * vae_factor(pipeline.vae)
    context = lambda: (case.prompt, torch.rand(3, side, side), {})  # noqa: E731
    return ImageDDPOTrainer(config, reward, context, pipeline, noise_strength=case.noise_strength)


def floors(trainer: DDPOTrainer, case: Case, single: Sequence[Row]) -> dict[str, float | str]:
    """Seconds of an epoch's UNet evaluations and nothing else, by phase; empty where none was measured.

    Of `single`, the rows of single passes, the fastest counts, an evaluation, that is not larger than the
    trainer's own passes: memory is what the batch size was chosen for. Where its own are larger than all that
    were measured, as with tiny-sd, this is no lower bound: add to `--batches`.
    """
    unet, config = trainer.pipeline.unet.config, trainer.config
    samples, pairs = config.forward_sizes(unet.in_channels * unet.sample_size**2)
    phases = {"sampling": ("", case.actions, samples)}
    phases["training"] = (config.train_gradient_checkpointing, trainer.num_train_timesteps, pairs)
    found: dict[str, float | str] = {"reward": ""}
    for phase, (checkpointing, steps, size) in phases.items():
        key = (f"{phase} pass", checkpointing, "ok")
        same = [row for row in single if (row["work"], row["checkpointing"], row["result"]) == key]
        rates = [row["seconds"] / row["batch"] for row in same if row["batch"] <= size * case.evaluations]
        found[phase] = trainer.plan.total_samples * steps * case.evaluations * min(rates) if rates else ""
    return found


def epochs(pipeline: Any, config: DDPOConfig, case: Case, single: Sequence[Row], row: Row) -> Iterator[Row]:
    """Complete a row with the second of two epochs, once for every phase and once for the whole."""
    trainer = make_trainer(pipeline, replace(config, torch_compile=row["compiled"]), case)
    # An empty prompt needs one pass, whatever the guidance.
    counted = replace(config, sample_guidance_scale=case.guidance_scale if case.evaluations == 2 else 1.0)
    from_images = case.noise_strength is not None
    paper = budget.estimate(budget.like(pipeline), counted, trainer.num_train_timesteps, from_images)
    metrics: dict[str, float] = {}

    def work() -> Row:
        trainer.step(0)  # compiles, and compares gradients with the UNet's own, which takes memory of its own
        reset_peak()
        metrics.update(trainer.step(1))
        return {}

    row |= {"case": case.name, "samples": trainer.plan.total_samples, "paper_gb": paper.peak / 1e9}
    whole = attempt({**row, "checkpointing": config.train_gradient_checkpointing}, work)
    floor = floors(trainer, case, single)
    flops = {"sampling": paper.flops_sampling / 1e12, "reward": "", "training": paper.flops_training / 1e12}
    batches = {"sampling": config.sample_batch_size, "reward": "", "training": config.train_batch_size}
    total: Row = {"seconds": "", "floor": "", "tflop": ""}
    for phase, tflop in flops.items():
        found = {"seconds": metrics.get(f"seconds_{phase}", ""), "floor": floor[phase], "tflop": tflop}
        total = {name: sum(v for v in (total[name], found[name]) if v != "") or "" for name in total}
        yield {**whole, "work": f"epoch: {phase}", "batch": batches[phase], **found}
    yield {**whole, "work": "epoch: whole", "batch": config.sample_batch_size, **total}
    pipeline.unet.disable_gradient_checkpointing()


# ----------------------------------------------------------------------------------------------- report
def header(arguments: argparse.Namespace, words: Sequence[str]) -> Row:
    """What has to be known to run it again; the machine without the host's name."""
    machine = f"{torch.get_num_threads()} threads, {platform.machine()}"
    if device() == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    return {
        "command": shlex.join(["python", "-m", "benchmarks.speed.gpu", *words]),
        "seed": arguments.seed,
        "machine": machine,
        "precision": arguments.precision,
        "python": platform.python_version(),
        **{library.__name__: library.__version__ for library in (torch, diffusers, peft, accelerate)},
    }


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measure everything that was asked for."""
    torch.manual_seed(arguments.seed)
    pipeline, precision = make_pipeline(arguments.size), arguments.precision
    config, frozen = DDPOConfig(mixed_precision=precision), family_of(pipeline).frozen
    prepare_policy(pipeline.unet, frozen, config, True, torch.device(device()))
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
        with tempfile.TemporaryDirectory() as folder:
            for case, config, row in runs(arguments, folder):
                yield from epochs(pipeline, config, case, single, {**row, "compiled": compiled})


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
    tiny = arguments.size == "tiny"
    arguments.samples = arguments.samples or (8 if tiny else 32)
    arguments.precision = arguments.precision or ("no" if tiny else "bf16")
    if arguments.samples < 4 or arguments.samples % 4:
        parser.error(f"--samples {arguments.samples}: use a multiple of 4")
    if not tiny and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --size tiny runs the same on tiny-sd")
    output = arguments.output or HERE / ("gpu_cpu.csv" if tiny else "gpu.csv")
    diffusers.utils.logging.disable_progress_bar()
    write_json(output.with_suffix(".json"), header(arguments, words))
    rows = []
    for row in measure(arguments):
        rows.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items() if value != ""), flush=True)
        write_rows(output, rows)  # after each, so that a stop loses nothing


if __name__ == "__main__":
    main()
