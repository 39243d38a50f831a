"""Every algorithm on equal terms: `python -m benchmarks.results.equal_terms`.

equal_tasks.py has tasks and methods. All methods of a task have as many reward queries, and are asked the
same questions along the way. First the learning rate is searched: every method begins with the same two
rates, and goes on in the better one's direction, in steps of about three, until a rate lies between two worse
ones. One rate is better than another if somewhere along its runs the mean reward of two seeds is higher, as
long as the task's limit holds for both: so a run's length is chosen with its rate. The search asks validation
questions, and ends a run whose limit broke. Then three other seeds are trained at the chosen rate to the end,
and are asked the test's.

Queries are images that are scored to be learned from. Passes are samples that pass the network, a forward
pass is one and its backward pass two more; those that only the record needs are not counted.

Writes equal_terms_search.csv, equal_terms.csv, equal_terms_untrained.csv (what one gets without training)
and the first pictures of seed 0 at the chosen length, and at the end. Finished runs are not run again.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Row
from benchmarks.results.equal_tasks import TASKS, Exam
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.draft import DRaFT
from ddpo_lessons.algorithms.refl import ReFL
from ddpo_lessons.image import to_pil

FOLDER = Path(__file__).parent
SEARCH, RESULTS = FOLDER / "equal_terms_search.csv", FOLDER / "equal_terms.csv"
UNTRAINED, PICTURES = FOLDER / "equal_terms_untrained.csv", FOLDER / "equal_terms"
SEEDS, SEARCH_SEEDS, SHOWN = (0, 1, 2), (100, 101), 8
LADDER = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
VARIED = {"train_learning_rate": "learning_rate", "seed": "seed"}  # fields of the config, and of a run
BEGIN = (3, 4)  # places on the ladder
MEASURES = ("task", "setting", "reward", "judge", "second", "diversity")
COLUMNS = ("task", "method", "learning_rate", "seed", "queries", "passes", "seconds", *MEASURES[2:])


@contextmanager
def counted_passes(denoiser: Any) -> Iterator[list[float]]:
    count = [0.0]

    def add(module: Any, args: Any, kwargs: Any) -> None:
        sample = args[0] if args else kwargs["hidden_states"]  # a UNet's, a transformer's
        count[0] += len(sample) * (3 if torch.is_grad_enabled() else 1)

    handle = denoiser.register_forward_pre_hook(add, with_kwargs=True)
    try:
        yield count
    finally:
        handle.remove()


def passes_for_the_record(algorithm: Any) -> float:
    """Return how many passes of a sample, without guidance, serve nothing but the record.

    DRaFT takes its last K steps anew, and ReFL jumps from one of them, on average the (K + 1) / 2 nd from the
    end: what sampling did from there on is only looked at.
    """
    if isinstance(algorithm, ReFL):
        return (algorithm.last_steps + 1) / 2
    return algorithm.last_steps if isinstance(algorithm, DRaFT) else 0.0


def make_trainer(run: Row) -> AbstractContextManager[Any]:
    task = TASKS[run["task"]]
    method, own = task.methods[run["method"]], {name: run[key] for name, key in VARIED.items()}
    parts = (task.exam("validation").reward, task.prompts(run["seed"]), task.load())
    algorithm = make_algorithm(method.algorithm)
    return common.trainer_of(parts, task.settings, method.config, own, algorithm=algorithm, start=task.start)


def look(exam: Exam, pipeline: Any) -> tuple[torch.Tensor, Row]:
    images = exam.images(pipeline)
    return images, exam.measure(images)


@functools.cache
def at_the_start(task: str, split: str) -> tuple[torch.Tensor, Row]:
    """Return those of the untrained policy, which are the same for all methods."""
    return look(TASKS[task].exam(split), TASKS[task].load())


def train(run: Row) -> list[Row]:
    """Train until the queries are used up; return marks along the way, none after numbers broke."""
    task, rows, seconds = TASKS[run["task"]], list[Row](), 0.0
    split = "validation" if run["seed"] in SEARCH_SEEDS else "test"
    with make_trainer(run) as trainer, counted_passes(trainer.family.denoiser) as count:
        length = chosen(run["task"], run["method"])[1] if split == "test" else None
        exam, size = task.exam(split), trainer.config.sample_batch_size
        saved = passes_for_the_record(trainer.algorithm) * size
        passes, strips = 0.0, list[torch.Tensor]()
        for epoch in range(task.points[-1] // size + 1):
            queries = epoch * size
            if queries in task.points:
                start = at_the_start(run["task"], split) if epoch == 0 else None
                images, marks = start or look(exam, trainer.pipeline)
                at = {"queries": queries, "passes": passes, "seconds": seconds}
                rows.append({**at, **marks})
                if split == "validation" and not holds(run["task"], rows[-1], rows[0]):
                    break
                if queries in (length, task.points[-1]):
                    strips.append(torch.cat(list(images[0, :SHOWN]), dim=2))
            if queries == task.points[-1]:
                break
            before = count[0]
            try:
                metrics = trainer.step(epoch)
            except RuntimeError as error:
                if "finite" not in str(error):
                    raise
                break
            passes += count[0] - before - saved
            seconds += sum(metrics[f"seconds_{part}"] for part in ("sampling", "reward", "training"))
    if run["seed"] == SEEDS[0] and run["task"] != "few":
        keep(strips, f"{run['task']}_{run['method']}")
    return rows


def keep(strips: Sequence[torch.Tensor], name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    to_pil(torch.cat(list(strips), dim=1)).save(PICTURES / f"{name.replace(',', '').replace(' ', '_')}.png")


# --------------------------------------------------------------------------------------------- search
def holds(task: str, row: Row, first: Row) -> bool:
    """Return whether a task's limit holds, given a run's first marks."""
    measure, share = TASKS[task].limit
    return float(row[measure]) >= share * float(first[measure])


def best_point(task: str, rows: Sequence[Row]) -> tuple[float, int]:
    """Return the highest mean reward of a rate's runs where the limit holds for each, and when that was.

    Points that the run of a seed did not reach do not count.
    """
    points: dict[int, list[Row]] = {}
    for row in rows:
        points.setdefault(int(row["queries"]), []).append(row)
    rewards = {
        queries: sum(float(row["reward"]) for row in own) / len(own)
        for queries, own in points.items()
        if len(own) == len(points[0]) and all(holds(task, row, points[0][0]) for row in own)
    }
    best = max(rewards, key=lambda queries: rewards[queries])
    return rewards[best], best


def next_rate(tried: dict[float, float]) -> float | None:
    """Return the next rate of the ladder to try, given the marks of others; None if the best lies inside.

    Of rates with equal marks the lowest counts as best: where none helps, the search goes down to the end.
    """
    for place in BEGIN:
        if LADDER[place] not in tried:
            return LADDER[place]
    best = LADDER.index(max(tried, key=lambda rate: (tried[rate], -rate)))
    beside = [LADDER[place] for place in (best - 1, best + 1) if 0 <= place < len(LADDER)]
    return next((rate for rate in beside if rate not in tried), None)


def climb(train: Callable[[float], list[Row]], mark: Callable[[list[Row]], float]) -> list[Row]:
    """Try rates until the best lies between two others; return the rows of all runs, with their rates.

    `mark` is of the rows of a rate.
    """
    rows, tried = list[Row](), dict[float, float]()
    while (rate := next_rate(tried)) is not None:
        own = [{"learning_rate": rate, **row} for row in train(rate)]
        tried[rate] = mark(own)
        rows += own
    return rows


def search(method: Row) -> list[Row]:
    def of_both(rate: float) -> list[Row]:
        runs = [{**method, "learning_rate": rate, "seed": seed} for seed in SEARCH_SEEDS]
        return [{"seed": run["seed"], **row} for run in runs for row in train(run)]

    return climb(of_both, lambda rows: best_point(method["task"], rows)[0])


def chosen(task: str, method: str) -> tuple[float, int]:
    """Return rate and length with the highest reward of the search within the limit, or those of the task."""
    rate, points = TASKS[task].methods[method].rate or TASKS[task].rate, TASKS[task].points
    if rate is not None:
        return rate, points[-1]
    runs: dict[float, list[Row]] = {}
    for row in common.where(common.read_rows(SEARCH), task=task, method=method):
        runs.setdefault(float(row["learning_rate"]), []).append(row)
    found = {rate: best_point(task, rows) for rate, rows in runs.items()}
    best = max(found, key=lambda rate: found[rate][0])
    return best, found[best][1]


# ----------------------------------------------------------------------------------- without training
def untrained(name: str) -> list[Row]:
    """Return marks of the test without training: as runs begin, a setting turned, and the best of n.

    The setting is the one with the highest reward of validation questions.
    """
    task = TASKS[name]
    exam, trial, pipeline = task.exam("test"), task.exam("validation"), task.load()
    ways = trial.turned(pipeline)
    best = max(ways, key=lambda way: trial.rewards(ways[way](0)).mean().item())
    turned = exam.turned(pipeline)[best]
    found = {"as the runs begin": exam.images(pipeline)}
    found[best] = torch.stack([turned(noise) for noise in range(exam.noises)])
    found |= {f"best of {n}": images for n, images in exam.best_of(exam.to_choose_from(pipeline)).items()}
    found |= exam.real()
    return [{"task": name, "setting": what, **exam.measure(images)} for what, images in found.items()]


if __name__ == "__main__":
    every = sorted({method for task in TASKS.values() for method in task.methods})
    arguments = common.parse(__doc__, tasks=list(TASKS), methods=every)
    common.quiet_thread()
    for task in arguments.tasks:
        methods = [method for method in TASKS[task].methods if method in arguments.methods]
        if TASKS[task].rate is None:
            searches = common.product(task=(task,), method=methods)
            common.run_all(search, searches, COLUMNS, SEARCH, arguments.processes)
        runs = common.product(task=(task,), seed=SEEDS, method=methods)
        runs = [{**run, "learning_rate": chosen(task, run["method"])[0]} for run in runs]
        common.run_all(train, runs, COLUMNS, RESULTS, arguments.processes)
    rows = [row for task in TASKS if task != "few" for row in untrained(task)]  # few's are the taste's
    common.write_rows(UNTRAINED, [{**dict.fromkeys(MEASURES, ""), **row} for row in rows])
