"""Helpers of the benchmarks: the machine's name, CSVs, and runs that append to a CSV, a few at a time."""

import argparse
import csv
import functools
import itertools
import json
import multiprocessing
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.image import image_grid

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


def machine() -> str:
    """Return what a measured number needs beside it: cores, processor, torch."""
    cpuinfo = Path("/proc/cpuinfo")
    named = re.findall(r"^model name\s*: (.+)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    processor = named[0] if named else platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {processor}, torch {torch.__version__}"


def quiet_thread() -> None:
    """Compute on one thread, without diffusers' progress bars."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()


@contextmanager
def scratch_config(*settings: Row, **changes: Any) -> Iterator[DDPOConfig]:
    """Make a config of settings, later ones first; its run's folder goes with the block."""
    merged = {name: value for part in (*settings, changes) for name, value in part.items()}
    with tempfile.TemporaryDirectory() as folder:
        yield DDPOConfig(**merged, output_dir=folder)


@contextmanager
def trainer_of(task: Sequence[Any], *settings: Row, **parts: Any) -> Iterator[Any]:
    """Make a `Trainer` of a config of settings and a task: reward, prompt function and pipeline.

    `parts` are its algorithm and its start.
    """
    from ddpo_lessons.trainer import Trainer  # the other trainers' environment lacks some of its requirements

    with scratch_config(*settings) as config:
        yield Trainer(config, *task, **parts)


def denoised(
    family: Any, latents: torch.Tensor, prompts: Sequence[str], schedule: Any, guidance: float = 1.0,
    draws: torch.Generator | None = None,
) -> torch.Tensor:  # fmt: skip
    """Denoise first latents (N, C, h, w) by a schedule, and return the images (N, 3, H, W)."""
    from ddpo_lessons.rollout import sample_trajectory

    conditioning = family.condition(prompts, "", guidance)
    made = sample_trajectory(family, latents, schedule, conditioning, guidance, draws)
    return family.decode(made.final_latents)


def draw(pipeline: Any, prompts: Sequence[str], *seed: int, **settings: Any) -> torch.Tensor:
    """Generate an image of each prompt as in training, from noise that the seed decides.

    `settings` are fields of `SamplingSettings`; the default is no guidance.
    """
    from ddpo_lessons.rollout import SamplingSettings, sample_seed, text2img_rollout

    noise = [torch.Generator().manual_seed(sample_seed(*seed, n)) for n in range(len(prompts))]
    sampling = SamplingSettings(**{"guidance_scale": 1.0, **settings})
    return text2img_rollout(pipeline, prompts, sampling, generator=noise)[0]


def best_draws(draws: Sequence[torch.Tensor], rewards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Keep for each prompt the sample with the highest reward; (N, 3, H, W) and (N,) of each sample."""
    best = torch.stack(list(rewards)).argmax(dim=0)  # (N,)
    return torch.stack(list(draws))[best, torch.arange(len(best))]


def redness(images: torch.Tensor, prompts: Any = None, metadata: Any = None) -> torch.Tensor:
    """A reward: red less the mean of green and blue, (B,)."""
    red, green, blue = images.mean((2, 3)).unbind(1)
    return red - (green + blue) / 2


def seconds_of(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_once(path: Path, measure: Callable[[], list[Row]]) -> None:
    """Measure, and write the rows into a CSV, unless the file is there."""
    if not path.exists():
        quiet_thread()
        write_rows(path, measure())


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a CSV with the columns of the first row; decimals are rounded."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: round(v, 5) if isinstance(v, float) else v for k, v in r.items()} for r in rows)


def parse(doc: str | None, **choices: list[Any]) -> argparse.Namespace:
    """Parse `--processes`, and for every choice a flag that names some of it; without the flag it is all."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    for name, values in choices.items():
        parser.add_argument(f"--{name}", nargs="+", type=type(values[0]), choices=values, default=values)
    return parser.parse_args()


def readings(trainer: Any, epochs: Collection[int], measure: Callable[[], Row]) -> list[Row]:
    """Train up to the last of the epochs, and measure after so many of them; 0 is before training."""
    rows = list[Row]()
    for epoch in range(max(epochs) + 1):
        if epoch in epochs:
            rows.append({"epoch": epoch, **measure()})
        if epoch < max(epochs):
            trainer.step(epoch)
    return rows


def where(rows: Iterable[Row], **values: str) -> list[Row]:
    """Return the rows with these values in these columns."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def best(rows: Sequence[Row], column: str) -> Row:
    """Return the row with the largest number in a column, the first of equals."""
    return max(rows, key=lambda row: float(row[column]))


def best_rate(path: Path, column: str, **values: str) -> float:
    """Return the learning rate of the CSV's row with the largest number in a column, of those chosen."""
    return float(best(where(read_rows(path), **values), column)["learning_rate"])


def save_grid(images: torch.Tensor, columns: int, path: Path) -> None:
    """Save images (N, 3, H, W) in rows, at their own size."""
    path.parent.mkdir(exist_ok=True)
    image_grid(images, columns, scale=1).save(path)


def product(**choices: Iterable[Any]) -> list[Row]:
    """Return a run for every combination of the choices; the last one changes fastest."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def run_all(
    train: Callable[[Row], list[Row]], runs: Sequence[Row], columns: Sequence[str], path: Path,
    processes: int,
) -> None:  # fmt: skip
    """Run what is not yet in a CSV, in this order, and append each run's rows when it ends.

    A run is given by some columns of the CSV. `train` returns its rows, in one of so many processes at a
    time; the columns that give the run are added to each row.
    """
    held = {tuple(row[name] for name in runs[0]) for row in read_rows(path)} if path.exists() else set()
    todo = [run for run in runs if tuple(str(run[name]) for name in runs[0]) not in held]
    pool = multiprocessing.get_context("spawn").Pool(processes, quiet_thread)
    with open(path, "a", newline="", encoding="utf-8") as file, pool:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        for rows in pool.imap_unordered(functools.partial(_named, train), todo):
            for row in rows:
                writer.writerow({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()})
            file.flush()
            print(*rows[-1].values(), flush=True)


def _named(train: Callable[[Row], list[Row]], run: Row) -> list[Row]:
    return [{**run, **row} for row in train(run)]
