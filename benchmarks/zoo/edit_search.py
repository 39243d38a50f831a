"""Search the demo's schedule, for branching and for DDPO alike: `python -m benchmarks.zoo.edit_search`.

As many random settings for each algorithm, of images per epoch, optimizer steps per epoch, group size, learning
rate, length, average of the weights, and Adam's second moment. A run is looked at on 200 validation pictures
after every 512 reward evaluations, and its rows go to edit_search.csv; what it holds is not run again.
`--trials` and `--seeds` continue a search: the second look takes the best settings with more seeds.
"""

import argparse
import random
from pathlib import Path
from typing import Any

from benchmarks.common import Row, run_all, trainer_of
from benchmarks.zoo.edit import SHARES
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.lessons.demo import GROUND_WEIGHT, POLICY, SETTINGS, VALIDATION, Exam
from ddpo_lessons.named_prompts import hidden_animals
from ddpo_lessons.rewards import animal_alignment
from ddpo_lessons.worlds import animals, load_tiny_zoo

RESULT = Path(__file__).with_suffix(".csv")
ALGORITHMS = "branching", "ddpo"
EVERY, PICTURES = 512, 200
SPACE: dict[str, tuple[Any, ...]] = {
    "images": (16, 32, 64, 128),  # an epoch's
    "steps": (1, 1, 2),  # optimizer steps of an epoch
    "group": (4, 8),
    "learning_rate": (5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3),
    "evaluations": (2048, 3072, 4096, 6144),  # of the reward, in the whole run
    "ema": (0.0, 0.9, 0.95),
    "beta2": (0.99, 0.999),
}


def trial(number: int) -> Row:
    """Draw the settings of a trial; the same ones for every algorithm."""
    draws = random.Random(number)
    return {name: draws.choice(values) for name, values in SPACE.items()}


def settings(run: Row) -> Row:
    """Return what a trial changes of the demo's settings."""
    images = run["images"]
    batch = min(images, 128)
    return {
        "sample_batch_size": batch, "sample_num_batches_per_epoch": images // batch,
        "sample_group_size": run["group"], "num_epochs": run["evaluations"] // images,
        "train_batch_size": images // run["steps"], "train_micro_batch_size": images // run["steps"],
        "train_learning_rate": run["learning_rate"], "train_ema_decay": run["ema"],
        "train_adam_beta2": run["beta2"], "seed": run["seed"], "save_freq": 10**6,
    }  # fmt: skip


def train(run: Row) -> list[Row]:
    """Train; return a row for every so many evaluations."""
    pipeline, exam = load_tiny_zoo(), Exam(animals.draw_edits(PICTURES, VALIDATION))
    task = (animal_alignment(ground_weight=GROUND_WEIGHT), hidden_animals(run["seed"]), pipeline)
    algorithm, start = make_algorithm(run["algorithm"]), FromImages(POLICY.strength)
    rows, seconds = list[Row](), 0.0
    with trainer_of(task, SETTINGS, settings(run), algorithm=algorithm, start=start) as trainer:
        for epoch in range(trainer.config.num_epochs):
            metrics = trainer.step(epoch)
            seconds += sum(metrics[f"seconds_{phase}"] for phase in ("sampling", "reward", "training"))
            done = (epoch + 1) * run["images"]
            if done % EVERY == 0:
                with trainer.learner.averaged_policy():
                    shares = exam.measure(pipeline, POLICY)
                reward = metrics["reward_mean"]
                rows.append({"done": done, "seconds": seconds, "reward": reward, **shares})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--trials", type=int, nargs="+", default=range(40), help="numbers of trials")
    parser.add_argument("--seeds", type=int, nargs="+", default=(10,))
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    runs = [
        {"algorithm": algorithm, "trial": number, "seed": seed, **trial(number)}
        for seed in arguments.seeds for number in arguments.trials for algorithm in ALGORITHMS
    ]  # fmt: skip
    columns = ("algorithm", "trial", "seed", *SPACE, "done", "seconds", "reward", *SHARES)
    run_all(train, runs, columns, arguments.output, arguments.processes)
