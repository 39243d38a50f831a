"""Training runs that append to a CSV, a few at a time; what the file already holds is not run again."""

from __future__ import annotations

import csv
import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol


class Run(Protocol):
    """A run has a key: the values of the CSV's first columns, which name it."""

    @property
    def key(self) -> tuple[str, ...]:
        """What names the run in the CSV."""
        ...


def _done(path: Path, names: Sequence[str]) -> set[tuple[str, ...]]:
    """Return the keys of the runs that a CSV holds."""
    if not path.exists():
        return set()
    with open(path, newline="") as file:
        return {tuple(row[name] for name in names) for row in csv.DictReader(file)}


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def run_all(
    train: Callable[[Any], list[dict[str, Any]]],
    runs: Sequence[Run],
    columns: Sequence[str],
    path: Path,
    processes: int,
) -> None:
    """Run what the CSV does not hold yet, and append each run's rows when it ends.

    Args:
        train: turns a run into its rows; runs in a process of its own.
        runs: in the order in which they are started.
        columns: of the CSV, those of the key first.
        path: the CSV.
        processes: how many runs at a time.
    """
    names = columns[: len(runs[0].key)] if runs else columns[:0]
    held = _done(path, names)
    todo = [run for run in runs if run.key not in held]
    with open(path, "a", newline="") as file, multiprocessing.get_context("spawn").Pool(processes) as pool:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        for rows in pool.imap_unordered(train, todo):
            rounded = [{name: _short(value) for name, value in row.items()} for row in rows]
            writer.writerows(rounded)
            file.flush()
            print(*rounded[-1].values(), flush=True)
