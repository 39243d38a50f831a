"""What the benchmarks share: the machine's name, CSVs, and runs that append to a CSV, a few at a time."""

import argparse
import csv
import json
import multiprocessing
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging

from ddpo_lessons.config import DDPOConfig

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


def run_all(
    train: Callable[[Any], list[Row]],
    runs: Sequence[Any],
    columns: Sequence[str],
    names: int,
    path: Path,
    processes: int,
) -> None:
    """Run what a CSV does not hold yet, in this order, and append each run's rows when it ends.

    Args:
        train: turns a run into its rows; runs in a process of its own.
        runs: what names a run are its attributes of the first columns' names.
        columns: of the CSV.
        names: how many of them name a run.
        path: the CSV.
        processes: how many runs at a time.
    """
    named = columns[:names]
    held = {tuple(row[name] for name in named) for row in read_rows(path)} if path.exists() else set()
    todo = [run for run in runs if tuple(str(getattr(run, name)) for name in named) not in held]
    pool = multiprocessing.get_context("spawn").Pool(processes, quiet_thread)
    with open(path, "a", newline="", encoding="utf-8") as file, pool:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        for rows in pool.imap_unordered(train, todo):
            for row in rows:
                writer.writerow({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()})
            file.flush()
            print(*rows[-1].values(), flush=True)
