"""Every algorithm on equal terms: `python -m benchmarks.results.equal_terms`.

equal_tasks.py has the tasks and the methods. All methods of a task have as many reward evaluations, and their
policies are evaluated with the same prompts and noise along the way.

The search is the same for all methods of a task: a number of trials of learning rate, images per epoch and
optimizer steps per epoch, each with two seeds. Each trial is a neighbor of the best one so far. A setting is
as good as the highest mean reward at any point of its runs at which the task's limit holds, so the search
chooses the length with the setting. It uses validation prompts, and ends a run that has broken the limit.

Then five other seeds are trained with the chosen setting for the chosen length, and are evaluated on test
prompts. `--methods FILE.py:CLASS` gives an algorithm of your own the same search and the same table.

Reward evaluations are images whose reward is trained on. Passes are forward passes of one sample through the
network, and a backward pass counts as two more; passes that only the record needs are not counted.

Writes equal_terms_search.csv, equal_terms.csv, equal_terms_untrained.csv (what one gets without training)
and the first images of the first seed. Finished runs are not run again.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.common import Row
from benchmarks.results.equal_tasks import TASKS, Setting
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.draft import DRaFT
from ddpo_lessons.algorithms.refl import ReFL
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.image import to_pil

FOLDER = Path(__file__).parent
SEARCH, RESULTS = FOLDER / "equal_terms_search.csv", FOLDER / "equal_terms.csv"
UNTRAINED, IMAGES = FOLDER / "equal_terms_untrained.csv", FOLDER / "equal_terms"
SEEDS, SEARCH_SEEDS, SHOWN = (40, 41, 42, 43, 44), (110, 111), 8
BEGIN = Setting(1e-3, 16, 1)
LADDERS = Setting((3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2), (8, 16, 32, 64), (1, 2, 4))
MEASURES = ("task", "setting", "reward", "judge", "second", "diversity")
COLUMNS = (
    "task", "method", *Setting._fields, "length", "seed",
    "evaluations", "passes", "seconds", *MEASURES[2:],
)  # fmt: skip


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

    DRaFT samples its last K steps again, and ReFL jumps from one of them, on average the (K + 1) / 2 nd from
    the end: what sampling did from there on is only recorded.
    """
    if isinstance(algorithm, ReFL):
        return (algorithm.last_steps + 1) / 2
    return algorithm.last_steps if isinstance(algorithm, DRaFT) else 0.0


def settings_of(task: str, method: str, setting: Setting) -> list[Row]:
    """Return the fields of the config, later ones first."""
    return [TASKS[task].settings, setting.config(), TASKS[task].method(method).config]


def make_trainer(run: Row) -> AbstractContextManager[Any]:
    task, setting = TASKS[run["task"]], Setting(*(run[name] for name in Setting._fields))
    parts = (task.evaluation("validation").reward, task.prompts(run["seed"]), task.load())
    algorithm = make_algorithm(task.method(run["method"]).algorithm)
    fields = settings_of(run["task"], run["method"], setting)
    return common.trainer_of(parts, *fields, {"seed": run["seed"]}, algorithm=algorithm, start=task.start)


@functools.cache
def at_the_start(task: str, split: str) -> Row:
    """Measure the untrained policy, which is the same for all methods."""
    evaluation, pipeline = TASKS[task].evaluation(split), TASKS[task].load()
    return evaluation.measure(evaluation.images(pipeline, evaluation.noises_untrained))


def train(run: Row) -> list[Row]:
    """Train up to `length`, and measure the test there; none after numbers that are not finite.

    A run of the search has no `length`: it is measured at each point, and ends with the last one, or where
    it is not `acceptable`.
    """
    task, passes, seconds, done = TASKS[run["task"]], 0.0, 0.0, 0
    split, points = ("test", (run["length"],)) if "length" in run else ("validation", task.points)
    evaluation, length = task.evaluation(split), points[-1]
    start = {"evaluations": 0, "passes": 0.0, "seconds": 0.0, **at_the_start(run["task"], split)}
    rows = [start]
    with make_trainer(run) as trainer, counted_passes(trainer.family.denoiser) as count:
        size = trainer.config.sample_batch_size
        saved = passes_for_the_record(trainer.algorithm) * size
        for epoch in range(length // size):
            before = count[0]
            try:
                metrics = trainer.step(epoch)
            except RuntimeError as error:
                if "finite" not in str(error):
                    raise
                break
            passes += count[0] - before - saved
            seconds += sum(metrics[f"seconds_{part}"] for part in ("sampling", "reward", "training"))
            done = (epoch + 1) * size
            if done in points:
                images = evaluation.images(trainer.pipeline)
                about = {"evaluations": done, "passes": passes, "seconds": seconds}
                rows.append({**about, **evaluation.measure(images)})
                if split == "validation" and not acceptable(run["task"], rows[-1], start):
                    break
    is_method = run["method"] in task.methods
    if is_method and split == "test" and run["seed"] == SEEDS[0] and length and done == length:
        keep(images[0, :SHOWN], f"{run['task']}_{run['method']}")
    return rows


def keep(images: torch.Tensor, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    name = "".join(letter if letter.isalnum() else "_" for letter in name)
    to_pil(torch.cat(list(images), dim=2)).save(IMAGES / f"{name}.png")


# --------------------------------------------------------------------------------------------- search
def acceptable(task: str, row: Row, start: Row) -> bool:
    """Return whether the task's limit holds."""
    return float(row["judge"]) >= TASKS[task].limit * float(start["judge"])


def best_point(task: str, rows: Sequence[Row]) -> tuple[float, int]:
    """Return the highest mean reward of a setting's runs where all are acceptable, and the length to there.

    Points that the run of a seed did not reach do not count.
    """
    points: dict[int, list[Row]] = {}
    for row in rows:
        points.setdefault(int(row["evaluations"]), []).append(row)
    start = points[0]
    rewards = {
        length: sum(float(row["reward"]) for row in own) / len(own)
        for length, own in points.items()
        if len(own) == len(start) and all(acceptable(task, row, start[0]) for row in own)
    }
    best = max(rewards, key=lambda length: rewards[length])
    return rewards[best], best


def neighbors(setting: Setting) -> list[Setting]:
    """Return the settings that differ in one field by one place of its ladder, larger ones first."""
    found = []
    for name in Setting._fields:
        ladder, place = getattr(LADDERS, name), getattr(LADDERS, name).index(getattr(setting, name))
        for other in (place + 1, place - 1):
            if 0 <= other < len(ladder):
                found.append(setting._replace(**{name: ladder[other]}))
    return found


def next_setting(tried: dict[Setting, float], fits: Callable[[Setting], bool]) -> Setting:
    """Return an untried neighbor of the best setting that has one, given the rewards of those tried.

    Of equal rewards the lowest learning rate counts as best: where none helps, the search goes down.
    """
    if not tried:
        return BEGIN
    for setting in sorted(tried, key=lambda setting: (-tried[setting], setting.learning_rate)):
        for other in neighbors(setting):
            if other not in tried and fits(other):
                return other
    raise ValueError("no setting is left to try")


def fits(task: str, method: str, setting: Setting) -> bool:
    """Return whether the algorithm accepts the setting: with an old policy AWM takes one step per epoch."""
    config = {name: value for part in settings_of(task, method, setting) for name, value in part.items()}
    try:
        make_algorithm(TASKS[task].method(method).algorithm).check(DDPOConfig(**config))
    except ValueError:
        return False
    return True


def search(about: Row) -> list[Row]:
    """Try settings of a method; return the rows of all runs."""
    task, method = about["task"], about["method"]
    runs: dict[Setting, list[Row]] = {}
    for _ in range(TASKS[task].trials):
        tried = {setting: best_point(task, rows)[0] for setting, rows in runs.items()}
        setting = next_setting(tried, functools.partial(fits, task, method))
        trials = [{**about, **setting._asdict(), "seed": seed} for seed in SEARCH_SEEDS]
        runs[setting] = [{**run, **row} for run in trials for row in train(run)]
    return [row for rows in runs.values() for row in rows]


def found(task: str, method: str) -> dict[Setting, tuple[float, int]]:
    """Return reward and length of each trial of a method's search."""
    runs: dict[Setting, list[Row]] = {}
    for row in common.where(common.read_rows(SEARCH), task=task, method=method):
        runs.setdefault(setting_of(row), []).append(row)
    return {setting: best_point(task, rows) for setting, rows in runs.items()}


def setting_of(row: Row) -> Setting:
    """Return the setting of a row of a CSV."""
    return Setting(float(row["learning_rate"]), int(row["images"]), int(row["steps"]))


def chosen(task: str, method: str) -> tuple[Setting, int]:
    """Return setting and length with the highest reward of the search.

    Length 0 means that no trial was better than the untrained policy.
    """
    settings = found(task, TASKS[task].method(method).like or method)
    best = max(settings, key=lambda setting: settings[setting][0])
    return best, settings[best][1]


# ----------------------------------------------------------------------------------- without training
def untrained(name: str) -> list[Row]:
    """Measure what one gets on the test without training: as runs begin, the best settings, and best-of-n.

    The settings are those with the highest reward on validation prompts.
    """
    task = TASKS[name]
    evaluation, trial, pipeline = task.evaluation("test"), task.evaluation("validation"), task.load()
    ways = trial.turned(pipeline)
    best = max(ways, key=lambda way: trial.rewards(ways[way](0)).mean().item())
    turned = evaluation.turned(pipeline)[best]
    found = {best: torch.stack([turned(noise) for noise in range(evaluation.noises)])}
    found |= {
        f"best-of-{n}": images
        for n, images in evaluation.best_of(evaluation.to_choose_from(pipeline)).items()
    }
    found |= evaluation.real()
    rows = [{"setting": what, **evaluation.measure(images)} for what, images in found.items()]
    rows = [{"setting": "as the runs begin", **at_the_start(name, "test")}, *rows]
    return [{"task": name, **row} for row in rows]


def runs_of(task: str, methods: Sequence[str]) -> list[Row]:
    """Return the runs of the comparison, one seed of all methods after another."""
    settings = {method: chosen(task, method) for method in methods}
    return [
        {"task": task, "method": method, **setting._asdict(), "length": length, "seed": seed}
        for seed in SEEDS
        for method, (setting, length) in settings.items()
    ]


def ranking(task: str, results: Sequence[Row], own: Sequence[str] = ()) -> list[str]:
    """Return a line for each method: mean reward and accuracy of its test runs, the highest reward first."""
    lines = {}
    for method in dict.fromkeys([*TASKS[task].methods, *own]):
        ends = [row for row in common.where(results, task=task, method=method)
                if row["evaluations"] == row["length"]]  # fmt: skip
        reward, judge = (sum(float(row[name]) for row in ends) / len(ends) for name in ("reward", "judge"))
        lines[f"{method:28} reward {reward:6.2f}, evaluator {judge:4.0%}, {len(ends)} seeds"] = reward
    return sorted(lines, key=lambda line: -lines[line])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", help="names of methods, or FILE.py:CLASS; all if not given")
    arguments = parser.parse_args()
    try:
        for name in arguments.methods or ():
            TASKS[arguments.tasks[0]].method(name)
    except ValueError as error:
        parser.error(f"--methods: {error}")
    common.quiet_thread()
    for task in arguments.tasks:
        methods = arguments.methods or list(TASKS[task].methods)
        searches = common.product(task=(task,), method=methods)
        common.run_all(search, searches, COLUMNS, SEARCH, arguments.processes)
        common.run_all(train, runs_of(task, methods), COLUMNS, RESULTS, arguments.processes)
    if arguments.methods is not None:
        for task in arguments.tasks:
            print("", *ranking(task, common.read_rows(RESULTS), arguments.methods), sep="\n")
    else:
        for task in filter(lambda name: TASKS[name].details, arguments.tasks):
            details = runs_of(task, list(TASKS[task].details))
            common.run_all(train, details, COLUMNS, RESULTS, arguments.processes)
        rows = [row for task in TASKS for row in untrained(task)]
        common.write_rows(UNTRAINED, [{**dict.fromkeys(MEASURES, ""), **row} for row in rows])
