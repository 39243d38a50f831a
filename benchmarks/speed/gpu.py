"""Measure on a GPU, part by part, what the pages only estimate: `make gpu`.

The parts are `tests/test_gpu.py`, the lessons, the demo, and epochs at the shapes of published models. Their
weights are random, which changes neither time nor memory, so nothing is downloaded. Each part is a process of
its own with a time limit, about 45 minutes in all. When it ends its row goes into gpu.json, and the next
`make gpu` leaves it out, so that a stop loses one part. A part that fails also has a row, with the reason.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.utils import logging

from benchmarks.common import ROOT, Row, machine, redness, scratch_config, write_json
from benchmarks.speed import lessons, paper_run
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.cli.options import Demo
from ddpo_lessons.cli.presets import PRESETS
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.lessons import demo
from ddpo_lessons.models import image_size
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.runlog import read_metrics

RESULT = Path(__file__).with_suffix(".json")
COMMAND = (sys.executable, "-m", "benchmarks.speed.gpu")
TESTS = ("-q", "-n", "4", "tests/test_gpu.py")
LESSON = (sys.executable, "-m", "benchmarks.speed.lessons")
DEMO: dict[str, Any] = {}  # its own settings
PHASES = ("sampling", "reward", "training")
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def on_gpu() -> bool:
    return torch.cuda.is_available()


# ------------------------------------------------------------------------------------------ epochs
@dataclass(frozen=True)
class Epoch:
    """An epoch of a preset, cut to a few samples in one optimizer step."""

    model: str  #: of `paper_run.published`
    preset: str
    samples: int
    size: int  #: samples of a forward pass
    steps: int  #: of denoising; half of them are actions of the preset `edit`
    precision: str = "bf16"
    checkpointing: bool = False
    compiled: bool = False

    def settings(self) -> Row:
        """Return fields of `DDPOConfig`."""
        fields: Row = {**PRESETS[self.preset].config, "sample_num_steps": self.steps, "image_grid_freq": 0}
        fields |= {"sample_batch_size": self.size, "sample_num_batches_per_epoch": self.samples // self.size}
        fields |= {"train_batch_size": self.samples, "train_gradient_accumulation_steps": 1}
        fields |= {"sample_micro_batch_size": self.size, "train_micro_batch_size": self.size}
        fields |= {"mixed_precision": self.precision, "torch_compile": self.compiled}
        return {**fields, "sample_group_size": 1, "train_gradient_checkpointing": self.checkpointing}

    def rows(self) -> Iterator[Row]:
        """Yield the settings and the estimate, then what is measured: of a failure, the first row stays."""
        yield {"precision": self.precision, "samples": self.samples, "size": self.size, "steps": self.steps}
        yield {"checkpointing": self.checkpointing, "compiled": self.compiled}
        bf16 = on_gpu() and self.precision == "bf16"
        if bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            yield {"result": "the card has no bf16"}
            return
        preset = PRESETS[self.preset]
        start = FromNoise(resolution=preset.resolution)
        if preset.noise_strength is not None:
            start = FromImages(preset.noise_strength)
        with scratch_config(self.settings()) as config:
            paper = paper_run.estimate(paper_run.published(self.model), config, preset.algorithm, start)
            flops = {"sampling": paper.sampling_flops, "training": paper.training_flops}
            yield {"paper_gb": paper.peak / 1e9, **{f"{k}_tflop": v / 1e12 for k, v in flops.items()}}
            pipeline = paper_run.published(self.model, "cuda" if on_gpu() else "cpu", DTYPES[self.precision])
            yield from measured(pipeline, config, make_algorithm(preset.algorithm), start)


def measured(pipeline: Any, config: DDPOConfig, algorithm: Any, start: FromNoise) -> Iterator[Row]:
    """Run three epochs: the first compiles, the second is timed, and in the third waits are counted."""
    torch._dynamo.config.recompile_limit = 64  # a graph for every shape; past it a network runs uncompiled
    side = image_size(pipeline)

    def draw() -> Any:
        prompt = "a black cat"
        return (prompt, torch.rand(3, side, side), {}) if isinstance(start, FromImages) else (prompt, {})

    trainer = Trainer(config, redness, draw, pipeline, algorithm=algorithm, start=start)
    started = time.perf_counter()
    trainer.step(0)
    yield {"first_epoch_s": time.perf_counter() - started}
    if on_gpu():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    metrics = trainer.step(1)
    yield {f"{phase}_s": metrics[f"seconds_{phase}"] for phase in PHASES}
    (first, *_) = read_metrics(config.run_dir, "step")
    yield {"ratio_error": first["first_replay_max_ratio_error"]}
    if on_gpu():
        yield {"peak_gb": torch.cuda.max_memory_allocated() / 1e9}
        yield {"waits": count_waits(lambda: trainer.step(2))}


def count_waits(work: Callable[[], Any]) -> int:
    """Return how often the host waits for the GPU, as far as torch's own debug mode sees it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


# ---------------------------------------------------------------------- tests, lessons and the demo
class Tally:
    """A plugin of pytest that counts outcomes."""

    def __init__(self) -> None:
        self.outcomes, self.failures = Counter[str](), list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: what passed in its call, and what failed or was skipped anywhere."""
        if report.when == "call" or not report.passed:
            self.outcomes[report.outcome] += 1
            self.failures += [report.nodeid] if report.failed else []


def run_tests() -> Iterator[Row]:
    """Run the tests that concern a GPU."""
    tally = Tally()
    code = pytest.main([*TESTS], plugins=[tally])
    failed = f"{len(tally.failures)} failed" if tally.failures else f"pytest ended with {code:d}"
    yield {"result": failed if code else "ok", **tally.outcomes, "failures": tally.failures}


def run_lessons() -> Iterator[Row]:
    """Run every lesson, as many at a time as there are cores: they stay on the CPU, one thread each."""
    environment = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"}
    chosen = [path for path in lessons.LESSONS if path.stem != "13_full_run"]  # which would download a model
    started = time.perf_counter()

    def failure(lesson: Path) -> str:
        command = [*LESSON, str(lesson)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        (*_, last) = ["", *done.stderr.splitlines()]
        return f"{lesson.stem}, {last or f'ended with {done.returncode}'}" if done.returncode else ""

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [text for text in pool.map(failure, chosen) if text]
    yield {"seconds": time.perf_counter() - started, "passed": len(chosen) - len(failures)}
    yield {"result": f"{len(failures)} failed" if failures else "ok", "failures": failures}


def run_demo() -> Iterator[Row]:
    """Run `make demo`."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        demo.run(Demo(**DEMO, output_dir=Path(folder)))
        found = json.loads(Path(folder, "results.json").read_text("utf-8"))
    yield {"seconds": time.perf_counter() - started}
    yield {f"{when}_all": found[when]["all"] for when in ("before", "after")}


EPOCHS = {
    "sd15": Epoch("sd15", "edit", 8, 4, 20),
    "sd15-checkpointing": Epoch("sd15", "edit", 8, 2, 20, checkpointing=True),
    "sd15-fp16": Epoch("sd15", "edit", 8, 2, 20, "fp16"),
    "sd15-compiled": Epoch("sd15", "edit", 8, 4, 20, compiled=True),
    "sdxl": Epoch("sdxl", "edit", 4, 2, 20, checkpointing=True),
    "sdxl-fp16": Epoch("sdxl", "edit", 4, 1, 20, "fp16", checkpointing=True),
    "sd35_medium": Epoch("sd35_medium", "sd35", 2, 1, 4, checkpointing=True),
    "sd35_medium-fp16": Epoch("sd35_medium", "sd35", 2, 1, 4, "fp16", checkpointing=True),
    "flux_dev": Epoch("flux_dev", "flux", 2, 1, 4, checkpointing=True),
}
PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "tests": run_tests,
    "lessons": run_lessons,
    "demo": run_demo,
}
PARTS |= {name: epoch.rows for name, epoch in EPOCHS.items()}
LIMITS = dict.fromkeys(PARTS, 130) | {"tests": 400, "lessons": 300, "demo": 300}  # s
LIMITS |= {"sd15-compiled": 380, "sdxl-fp16": 240, "flux_dev": 300}


# ------------------------------------------------------------------------------------ part after part
def launch(name: str) -> Row:
    """Run a part in a process of its own; return its row."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(
            [*COMMAND, "--child", name], cwd=ROOT, stdout=out, stderr=err, start_new_session=True
        )
        try:
            code: int | None = child.wait(LIMITS[name])
        except subprocess.TimeoutExpired:
            code = None
        finally:  # with what it has started: compilers have workers
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0), err.seek(0)
        row: Row = {"result": "ok"}
        for line in re.findall(r"^\{.*\}$", out.read(), re.MULTILINE):
            row |= json.loads(line)
        return row if code == 0 else {**row, "result": reason(code, LIMITS[name], err.read())}


def reason(code: int | None, limit: int, errors: str) -> str:
    """Return in a line why a part has failed."""
    if code is None:
        return f"not done within {limit} s"
    if code < 0:
        return f"killed by signal {-code}"
    (*_, last) = ["", *re.findall(r"^[\w.]+(?:Error|Exception)\b.*", errors, re.MULTILINE)]
    return "out of memory" if "OutOfMemoryError" in last else last[:120] or f"ended with {code}"


def header() -> Row:
    """Return the machine and the versions that were measured."""
    card = torch.cuda.get_device_properties(0) if on_gpu() else None
    libraries = {name: metadata.version(name) for name in ("torch", "diffusers", "peft", "accelerate")}
    hardware = f"{card.name}, {card.total_memory / 1e9:.1f} GB" if card else machine()
    return {"command": "make gpu", "hardware": hardware, "host": machine(), "libraries": libraries}


def main(words: Sequence[str] | None = None) -> None:
    """Measure what has no row yet; write each row when it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[], help="these alone, also again")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if not on_gpu():
        parser.error("there is no CUDA device; tests/test_gpu_benchmark.py rehearses the parts without one")
    logging.disable_progress_bar()
    if arguments.child:
        for row in PARTS[arguments.child]():
            print(json.dumps(row), flush=True)
        return
    path, found = arguments.output, {**header(), "parts": {}}
    if path.exists():
        held = json.loads(path.read_text("utf-8"))
        if held["hardware"] != found["hardware"]:
            parser.error(f"{path} is of {held['hardware']}, and this is {found['hardware']}: give --output")
        found = held
    for name in arguments.parts or [name for name in PARTS if name not in found["parts"]]:
        row = {**launch(name), "libraries": header()["libraries"]}
        found["parts"][name] = row
        write_json(path.with_suffix(".new"), found)
        path.with_suffix(".new").replace(path)  # whole at any time
        shown = [f"{key} {value}" for key, value in row.items() if key != "libraries"]
        print(name, *shown, sep=", ", flush=True)
    print(f"{path} has {len(found['parts'])} of {len(PARTS)} parts: `python -m benchmarks.tables` shows them")


if __name__ == "__main__":
    main()
