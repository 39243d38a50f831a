"""Every algorithm on two small tasks, with equal budgets: `python -m benchmarks.results.equal_terms`.

equal_tasks.py has tasks and methods. Each method first gets a short run with each of six settings (three
rates, two values of one more setting) on one seed, compared by the reward of validation questions:
equal_terms_search.csv. With the best it is trained on three seeds, and asked the test's questions at the
start and four times along either budget: equal_terms.csv. Queries are images that are scored to be
learned from. Passes are samples that pass the network: a forward pass is one, with its backward pass three.
equal_terms_untrained.csv holds what changing settings does without training. Finished runs are skipped.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, quiet_thread, read_rows, run_all, scratch_config, write_rows
from benchmarks.results.equal_tasks import TASKS
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.trainer import Runner

FOLDER = Path(__file__).parent
SEARCH, RESULTS = FOLDER / "equal_terms_search.csv", FOLDER / "equal_terms.csv"
UNTRAINED = FOLDER / "equal_terms_untrained.csv"
SEEDS, SEARCH_SEED, POINTS = (0, 1, 2), 100, 4
NAMES = ("task", "method", "learning_rate", "value", "seed")
MEASURES = ("reward", "judge", "diversity", "distance")


@dataclass(frozen=True)
class Run:
    """One training run; `value` is that of its method's searched setting."""

    task: str
    method: str
    learning_rate: float
    value: float
    seed: int


@contextmanager
def counted_passes(denoiser: Any) -> Iterator[list[int]]:
    """Count the samples that pass the network."""
    count = [0]

    def add(module: Any, args: Any, kwargs: Any) -> None:
        sample = args[0] if args else kwargs["hidden_states"]  # a UNet's, a transformer's
        count[0] += len(sample) * (3 if torch.is_grad_enabled() else 1)

    handle = denoiser.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield count
    finally:
        handle.remove()


@contextmanager
def make_runner(run: Run) -> Iterator[Runner]:
    """Make the runner of a run."""
    task = TASKS[run.task]
    method = task.methods[run.method]
    searched = {method.setting: run.value}
    of_config = method.setting.startswith("train_")
    algorithm = make_algorithm(method.algorithm, **({} if of_config else searched))
    own: Row = {"train_learning_rate": run.learning_rate, "seed": run.seed}
    with scratch_config(task.settings, method.config, searched if of_config else {}, own) as config:
        parts = (config, task.reward(), task.prompts(run.seed), task.load())
        yield Runner(*parts, algorithm=algorithm, start=task.start)


def search(run: Run) -> list[Row]:
    """Train a short run; return its marks, or NaN if gradients stopped being finite."""
    task = TASKS[run.task]
    with make_runner(run) as runner:
        exam = task.exam(runner.pipeline, "validation")
        exam.marks()
        try:
            for epoch in range(task.search_epochs):
                runner.step(epoch)
        except RuntimeError as error:
            if "finite" not in str(error):
                raise
            return [{**vars(run), **dict.fromkeys(MEASURES, math.nan)}]
        return [{**vars(run), **exam.marks()}]


def compare(run: Run) -> list[Row]:
    """Train until both budgets are used up; return marks along them."""
    task, rows, seconds = TASKS[run.task], list[Row](), 0.0
    whole = {"queries": task.queries, "passes": task.passes}
    asked = {"queries": 0, "passes": 0}  # so many points of a budget have their marks
    with make_runner(run) as runner, counted_passes(runner.family.denoiser) as passes:
        exam = task.exam(runner.pipeline, "test")
        for epoch in itertools.count():
            used = {"queries": epoch * task.settings["sample_batch_size"], "passes": passes[0]}
            due = [b for b in whole if asked[b] <= POINTS and used[b] >= asked[b] * whole[b] / POINTS]
            marks = exam.marks() if due else {}
            for budget in due:
                at = {"budget": budget, "point": asked[budget], **used, "seconds": seconds}
                rows.append({**vars(run), **at, **marks})
                asked[budget] += 1
            if min(asked.values()) > POINTS:
                return rows
            passes[0] = used["passes"]  # an exam's do not count
            metrics = runner.step(epoch)
            seconds += sum(metrics[f"seconds_{part}"] for part in ("sampling", "reward", "training"))
    raise AssertionError("unreachable")


@functools.cache
def chosen(task: str, method: str) -> tuple[float, float]:
    """Return learning rate and value with the highest reward of the search, the first of equals."""
    rows = [row for row in read_rows(SEARCH) if (row["task"], row["method"]) == (task, method)]
    best = max(rows, key=lambda row: -math.inf if row["reward"] == "nan" else float(row["reward"]))
    values = TASKS[task].methods[method].values  # some are whole numbers
    return float(best["learning_rate"]), next(value for value in values if value == float(best["value"]))


def untrained() -> list[Row]:
    """Return marks of the test without training: as the runs begin, and with settings turned."""
    rows = []
    for name, task in TASKS.items():
        exam = task.exam(task.load(), "test")
        rows.append({"task": name, "setting": "as the runs begin", **exam.marks()})
        turned = exam.untrained().items()
        rows += [{"task": name, "setting": setting, **exam.measure(images)} for setting, images in turned]
    return rows


def main() -> None:
    """Search, then compare, all methods of a seed before the next seed."""
    arguments = parse(__doc__, tasks=list(TASKS))
    pairs = [(name, method) for name in arguments.tasks for method in TASKS[name].methods]
    trials = [
        Run(name, method, rate, value, SEARCH_SEED)
        for name, method in pairs
        for rate in TASKS[name].learning_rates
        for value in TASKS[name].methods[method].values
    ]
    run_all(search, trials, (*NAMES, *MEASURES), len(NAMES), SEARCH, arguments.processes)
    runs = [Run(*pair, *chosen(*pair), seed) for seed in SEEDS for pair in pairs]
    columns = (*NAMES, "budget", "point", "queries", "passes", "seconds", *MEASURES)
    run_all(compare, runs, columns, len(NAMES), RESULTS, arguments.processes)
    quiet_thread()
    write_rows(UNTRAINED, untrained())


if __name__ == "__main__":
    main()
