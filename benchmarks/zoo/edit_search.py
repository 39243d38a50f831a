"""Search the demo's schedule, for branching and for DDPO alike: `python -m benchmarks.zoo.edit_search`.

Both algorithms try the same random settings, drawn from a wide space first and then (`--space narrow`) from
around the best of those. A run is evaluated on 200 validation images after every 1,024 reward evaluations
and at its end. Rows go to edit_search.csv; finished trials are skipped.
"""

import argparse
import random
from pathlib import Path
from typing import Any

from benchmarks.common import Row, run_all, trainer_of
from benchmarks.zoo.edit import SHARES
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.lessons.demo import BACKGROUND_WEIGHT, EVERYWHERE, POLICY, SETTINGS, VALIDATION, Evaluation
from ddpo_lessons.named_prompts import hidden_animals
from ddpo_lessons.rewards import animal_alignment
from ddpo_lessons.worlds import animals, load_tiny_zoo

RESULT = Path(__file__).with_suffix(".csv")
ALGORITHMS = "branching", "ddpo"
SEED = 10  # of the search; the demo's own runs have others, and the best settings are tried with 0 and 1
EVERY, IMAGES = 1024, 200
LAYERS = {"everywhere": EVERYWHERE, "attention": EVERYWHERE[:4]}
FIXED: Row = {"warmup": 0, "grad_norm": 1.0, "kl": 0.0, "rank": 16, "epsilon": 1e-8, "layers": "everywhere"}
SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "wide": {
        "images": (16, 32, 64, 128),  # an epoch's
        "steps": (1, 1, 2),  # optimizer steps of an epoch
        "group": (4, 8),
        "learning_rate": (5e-4, 7e-4, 1e-3, 1.4e-3, 2e-3, 2.8e-3),
        "evaluations": (2048, 3072, 4096, 6144),  # of the reward, in the whole run
        "ema": (0.0, 0.9, 0.95),
        "beta2": (0.99, 0.999),
    },
    "narrow": {
        "images": (32, 48, 64),
        "steps": (1,),
        "group": (8,),
        "learning_rate": (7e-4, 1e-3, 1.4e-3, 2e-3),
        "evaluations": (4096, 6000),
        "ema": (0.0, 0.8),
        "beta2": (0.99, 0.999),
        "warmup": (0, 10),
        "grad_norm": (0.3, 1.0),
    },
    "held": {  # constraints that keep a policy near its start
        "images": (32, 48),
        "steps": (1,),
        "group": (8,),
        "learning_rate": (1e-3, 1.4e-3),
        "evaluations": (4096, 6000),
        "ema": (0.0, 0.9),
        "beta2": (0.99,),
        "grad_norm": (0.3,),
        "kl": (0.0, 0.003, 0.01, 0.03, 0.1),
        "rank": (4, 16),
        "epsilon": (1e-8, 1e-5, 1e-4),
        "layers": ("everywhere", "everywhere", "attention"),
    },
}


def trial(space: str, number: int) -> Row:
    """Draw the settings of a trial; the same ones for every algorithm."""
    draws = random.Random(number)
    drawn = {name: draws.choice(values) for name, values in SPACES[space].items()}
    return {name: drawn.get(name, FIXED.get(name)) for name in (*SPACES["wide"], *FIXED)}


def settings(run: Row) -> Row:
    """Return a trial's changes to the demo's settings."""
    images = run["images"]
    return {
        "sample_batch_size": images, "sample_num_batches_per_epoch": 1, "sample_group_size": run["group"],
        "num_epochs": run["evaluations"] // images, "train_batch_size": images // run["steps"],
        "train_micro_batch_size": images // run["steps"], "train_learning_rate": run["learning_rate"],
        "train_learning_rate_warmup_steps": run["warmup"], "train_max_grad_norm": run["grad_norm"],
        "train_kl_coefficient": run["kl"], "train_adam_epsilon": run["epsilon"],
        "train_lora_rank": run["rank"], "train_lora_alpha": run["rank"],
        "train_lora_target_modules": LAYERS[run["layers"]], "train_ema_decay": run["ema"],
        "train_adam_beta2": run["beta2"], "seed": run["seed"],
        "save_freq": 10**6,
    }  # fmt: skip


def train(run: Row) -> list[Row]:
    """Train; return a row for every so many evaluations."""
    pipeline, evaluation = load_tiny_zoo(), Evaluation(animals.draw_edits(IMAGES, VALIDATION))
    task = (animal_alignment(background_weight=BACKGROUND_WEIGHT), hidden_animals(run["seed"]), pipeline)
    algorithm, start = make_algorithm(run["algorithm"]), FromImages(POLICY.strength)
    rows, seconds = list[Row](), 0.0
    with trainer_of(task, SETTINGS, settings(run), algorithm=algorithm, start=start) as trainer:
        for epoch in range(trainer.config.num_epochs):
            metrics = trainer.step(epoch)
            seconds += sum(metrics[f"seconds_{phase}"] for phase in ("sampling", "reward", "training"))
            done = (epoch + 1) * run["images"]
            if done % EVERY < run["images"] or epoch + 1 == trainer.config.num_epochs:
                with trainer.learner.averaged_policy():
                    shares = evaluation.measure(pipeline, POLICY)
                reward = metrics["reward_mean"]
                rows.append({"done": done, "seconds": seconds, "reward": reward, **shares})
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--space", choices=SPACES, default="wide")
    parser.add_argument("--trials", type=int, nargs="+", default=range(20), help="numbers of trials")
    parser.add_argument("--algorithms", choices=ALGORITHMS, nargs="+", default=ALGORITHMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[SEED])
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    space = arguments.space
    runs = [
        {"space": space, "algorithm": algorithm, "trial": number, "seed": seed, **trial(space, number)}
        for seed in arguments.seeds for number in arguments.trials for algorithm in arguments.algorithms
    ]  # fmt: skip
    columns = (*runs[0], "done", "seconds", "reward", *SHARES)
    run_all(train, runs, columns, arguments.output, arguments.processes)
