"""Fewer denoising steps, and a reward that is averaged over views: `python -m benchmarks.zoo.edit_views`.

Trains the demo's task with both algorithms, two sampling settings of the policy (twelve steps at strength
0.45, or eight at 0.4), and a reward whose classifier sees an image once or in six views. Everything else is
from the search of the schedule (edit_search.py): epochs of 32 images with one optimizer step, 187 of them.
A run is evaluated on 400 validation images at its end. Rows go to edit_views.csv; finished runs are skipped.
"""

import time
from pathlib import Path

from benchmarks.common import Row, parse, product, run_all, trainer_of
from benchmarks.zoo.edit import SHARES
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.lessons.demo import (
    BACKGROUND_WEIGHT,
    FAST_POLICY,
    POLICY,
    SCHEDULES,
    SETTINGS,
    VALIDATION,
    Evaluation,
    make_reward,
)
from ddpo_lessons.named_prompts import hidden_animals
from ddpo_lessons.rewards import animal_alignment
from ddpo_lessons.worlds import animals, load_tiny_zoo

RESULT = Path(__file__).with_suffix(".csv")
POLICIES = {policy.steps: policy for policy in (FAST_POLICY, POLICY)}
VIEWS = (6, 1)  # that the reward's classifier sees of an image
SEEDS = (10, 11)  # of the search
IMAGES, EPOCHS = 400, 187  # 5,984 reward evaluations


def train(run: Row) -> list[Row]:
    """Train, and return one row: processor time of training, and fractions of correct images."""
    policy, pipeline = POLICIES[run["steps"]], load_tiny_zoo()
    evaluation = Evaluation(animals.draw_edits(IMAGES, VALIDATION))
    score = make_reward() if run["views"] == 6 else animal_alignment(background_weight=BACKGROUND_WEIGHT)
    task, start = (score, hidden_animals(run["seed"]), pipeline), FromImages(policy.strength)
    own = SCHEDULES[run["algorithm"]] | {"sample_num_steps": policy.steps, "num_epochs": EPOCHS}
    own |= {"seed": run["seed"], "save_freq": EPOCHS}
    seconds = 0.0
    with trainer_of(task, SETTINGS, own, algorithm=make_algorithm(run["algorithm"]), start=start) as trainer:
        for epoch in range(EPOCHS):
            started = time.process_time()
            trainer.step(epoch)
            seconds += time.process_time() - started
    return [{"seconds": seconds, **evaluation.measure(pipeline, policy)}]


if __name__ == "__main__":
    runs = product(algorithm=tuple(SCHEDULES), steps=tuple(POLICIES), views=VIEWS, seed=SEEDS)
    run_all(train, runs, (*runs[0], "seconds", *SHARES), RESULT, parse(__doc__).processes)
