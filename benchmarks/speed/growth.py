"""How an epoch's time and peak memory grow: `python -m benchmarks.speed.growth` writes growth.csv, .json.

One number at a time is varied around tiny-sd's base point. Each point is trained in fresh processes of one
thread. Time should grow as a power of what is varied, so its slope is fitted to logarithms; memory has a
constant part, so its slope is fitted to the numbers themselves. `ddpo_lessons.app.budget` counts, from shapes
alone, the FLOPs and bytes that stand beside them. Needs Linux, for /proc's and getrusage's units.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from diffusers.utils import logging

from benchmarks.speed.cases import PROMPT, redness
from ddpo_lessons.app import budget
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.tiny import load_tiny_sd
from ddpo_lessons.trainer import DDPOTrainer

HERE = Path(__file__).parent
EPOCHS = 3  # after one that does not count
BATCH = 16  # samples that are denoised together, and those of an optimizer step
MB = 1e6


@dataclass(frozen=True)
class Point:
    """What an epoch does; a field that is not named is the base point's."""

    samples: int = BATCH  # of all processes together
    steps: int = 4  # actions of a trajectory
    side: int = 8  # of a latent, which has 4 channels
    processes: int = 1

    def value(self, series: str) -> int:
        """What the series varies."""
        return 4 * self.side**2 if series == "latent elements" else int(getattr(self, series))


@dataclass(frozen=True)
class Series:
    """Points that differ in one number, and the power of it that time should grow with."""

    points: tuple[Point, ...]
    expected: float
    reason: str


SERIES = {
    "samples": Series(
        tuple(Point(samples=n) for n in (16, 32, 64, 128, 256)),
        1.0,
        "every sample takes the same UNet evaluations",
    ),
    "steps": Series(
        tuple(Point(steps=n) for n in (4, 9, 19, 39)),
        1.0,
        "one evaluation to sample and one to train for each step; decoding comes once",
    ),
    "latent elements": Series(
        tuple(Point(side=n) for n in (8, 12, 16, 24)),
        1.0,
        "convolutions visit every position once; attention adds a part that grows with the square",
    ),
    "processes": Series(
        tuple(Point(steps=8, processes=n) for n in (1, 2)),  # 64 pairs a forward pass in both
        -1.0,
        "two processes share the epoch's samples, each on a core of its own",
    ),
}


def make_config(point: Point, folder: str) -> DDPOConfig:
    """Settings of each process, so that an optimizer step sees BATCH samples of all of them together."""
    return DDPOConfig(
        output_dir=folder,
        image_grid_freq=0,
        sample_num_steps=point.steps + 1,  # tiny-sd's last step then adds no noise and is no action
        sample_guidance_scale=1.0,
        sample_batch_size=BATCH // point.processes,
        sample_num_batches_per_epoch=point.samples // BATCH,
        train_batch_size=2,
        train_gradient_accumulation_steps=BATCH // 2 // point.processes,
    )


def make_trainer(point: Point, folder: str) -> DDPOTrainer:
    pipeline = load_tiny_sd()
    pipeline.unet.register_to_config(sample_size=point.side)  # convolutions and attention take any
    return DDPOTrainer(
        make_config(point, folder), lambda images, *_: redness(images), lambda: (PROMPT, {}), pipeline
    )


# ---------------------------------------------------------------------------------------- one point
def count(trainer: DDPOTrainer) -> dict[str, float]:
    """Work out one process's share on paper: FLOPs, what an epoch stores, the peak above what is loaded."""
    actions = trainer.num_train_timesteps
    found = budget.estimate(budget.like(trainer.pipeline), trainer.config, actions, from_images=False)
    return {
        "tflop": (found.flops_sampling + found.flops_training) / 1e12,
        "stored_mb": (found.latents + found.images + found.embeddings) / MB,
        "counted_mb": (found.peak - found.frozen - found.trained) / MB,
    }


def measure(rank: int, point: Point, folder: str, port: int) -> None:
    """Train a few epochs as one of the point's processes; the first writes what it measured."""
    import resource  # not on Windows, where the tests import the rest

    if point.processes > 1:
        world = {"WORLD_SIZE": point.processes, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
        os.environ.update({name: str(number) for name, number in world.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    trainer = make_trainer(point, folder)
    loaded = psutil.Process().memory_info().rss
    times = []
    for epoch in range(1 + EPOCHS):
        started = time.perf_counter()
        trainer.step(epoch)
        times.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    trainer.accelerator.end_training()
    if rank == 0:
        counted = times[1:]
        seconds = {"seconds": statistics.median(counted), "low": min(counted), "high": max(counted)}
        memory = {"loaded_mb": loaded / MB, "peak_mb": peak / MB}
        Path(folder, "measured.json").write_text(json.dumps({**seconds, **memory, **count(trainer)}))


def run(series: str, point: Point) -> dict[str, Any]:
    """Measure a point in fresh processes; return its row."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (point, folder, port), nprocs=point.processes)
        measured = json.loads(Path(folder, "measured.json").read_text())
    rounded = {name: float(f"{number:.5g}") for name, number in measured.items()}
    return {"series": series, "value": point.value(series), **asdict(point), **rounded}


# ------------------------------------------------------------------------------------------- slopes
def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Return p of y = c x^p, by least squares on the logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def per_unit(x: Sequence[float], y: Sequence[float]) -> float:
    """Return a of y = a x + b, by least squares."""
    return float(np.polyfit(x, y, 1)[0])


def slopes(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put expected and measured slopes of a series side by side; memory is in kB for one more of x."""
    x = [row["value"] for row in rows]
    grown = [row["peak_mb"] - row["loaded_mb"] for row in rows]
    kilobytes = {
        "kb_stored": per_unit(x, [row["stored_mb"] for row in rows]),
        "kb_counted": per_unit(x, [row["counted_mb"] for row in rows]),
        "kb_measured": per_unit(x, grown),
    }
    return {
        "series": name,
        "time_expected": SERIES[name].expected,
        "reason": SERIES[name].reason,
        "time_by_flops": round(exponent(x, [row["tflop"] for row in rows]), 3),
        "time_measured": round(exponent(x, [row["seconds"] for row in rows]), 3),
        **{key: float(f"{1000 * value:.4g}") for key, value in kilobytes.items()},
    }


def write(folder: Path, rows: Sequence[dict[str, Any]], table: Sequence[dict[str, Any]]) -> None:
    with open(folder / "growth.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    header = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    text = json.dumps({**header, "epochs": EPOCHS, "slopes": table}, indent=1)
    (folder / "growth.json").write_text(text + "\n")


def main() -> None:
    """Measure every point, print it, and write table and slopes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=SERIES, nargs="+", default=list(SERIES))
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the CSV and the JSON")
    arguments = parser.parse_args()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["OMP_NUM_THREADS"] = "1"
    # Freed tensors go back to the system, so that peaks are of what lives and not of what was kept for reuse.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 * 1024)
    rows, table = [], []
    for name in arguments.only:
        found = []
        for point in SERIES[name].points:
            found.append(run(name, point))
            print(", ".join(f"{key} {value}" for key, value in found[-1].items()), flush=True)
        rows += found
        table.append(slopes(name, found))
        print(", ".join(f"{key} {value}" for key, value in table[-1].items()), flush=True)
        write(arguments.output, rows, table)


if __name__ == "__main__":
    main()
