"""The demo with both algorithms, five new seeds each: `python -m benchmarks.zoo.demo`.

Each run is evaluated on 100 validation images after every 1,024 reward evaluations; at its end on 500 test
images, on as many of new animals, and on the validation images decoded after one network evaluation. Rows go
to demo.csv, with the mean reward of the evaluated images; finished runs are skipped. The first run's
images become images/demo-before-after.png, which README, site and lesson 07 show. `seconds` are processor
time of training alone, on one thread.
"""

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, Row, parse, run_all, trainer_of
from benchmarks.zoo.edit import IMAGES, SHARES
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.lessons.demo import (
    BEFORE_AFTER,
    FAST_POLICY,
    SCHEDULES,
    SETTINGS,
    SHOWN,
    TEST,
    UNTRAINED_BEST,
    VALIDATION,
    WATCHED,
    Evaluation,
    before_after,
    make_reward,
)
from ddpo_lessons.models import family_of
from ddpo_lessons.named_prompts import hidden_animals
from ddpo_lessons.worlds import animals, load_tiny_zoo

RESULT = Path(__file__).with_suffix(".csv")
SEEDS = {"branching": (51, 52, 53, 54, 55), "ddpo": (61, 62, 63, 64, 65)}  # no run had them before
EVERY = 1024
RUNS = {**SCHEDULES, "branching, too long": {**SCHEDULES["branching"], "num_epochs": 374}}
SCORE = make_reward()


@torch.no_grad()
def in_one_call(pipeline: Any, edits: animals.Edits) -> torch.Tensor:
    """Decode the clean latents that the policy predicts in its first network evaluation; (N, 3, 64, 64)."""
    family = family_of(pipeline)
    timesteps = (
        family.schedule(FAST_POLICY.steps, FAST_POLICY.strength).timesteps[:1].expand(len(edits.prompts))
    )
    clean = family.encode(edits.images)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    noisy = family.add_noise(clean, noise, timesteps)
    conditioning = family.condition(edits.prompts, "", FAST_POLICY.guidance)
    output = family.predict(family.denoiser, noisy, timesteps, conditioning, FAST_POLICY.guidance)
    return family.decode(family.predict_clean(noisy, output, timesteps))


def verdict(evaluation: Evaluation, images: torch.Tensor) -> Row:
    """Return the mean reward of edits, and the fractions that are correct."""
    rewards, _ = SCORE(images, evaluation.edits.prompts, evaluation.edits.metadata)
    return {"reward": rewards.mean().item(), **evaluation.fractions(images)}


def train(run: Row) -> list[Row]:
    """Train with an algorithm and a seed; return a row for every evaluation."""
    algorithm, seed = run["algorithm"].split(",")[0], run["seed"]
    pipeline, watch = load_tiny_zoo(), Evaluation(animals.draw_edits(WATCHED, VALIDATION))
    test = Evaluation(animals.draw_edits(IMAGES, TEST))
    new = Evaluation(animals.draw_edits(IMAGES, TEST, animals.NEW_ANIMALS))
    shown = Evaluation(animals.draw_edits(SHOWN, TEST))
    untrained = {"before": FAST_POLICY, "untrained_best": UNTRAINED_BEST}
    images = {name: shown.images(pipeline, setting) for name, setting in untrained.items()}
    rows, done, seconds = list[Row](), 0, 0.0

    def read(name: str, evaluation: Evaluation, edited: torch.Tensor) -> None:
        rows.append({"images": name, "done": done, "seconds": seconds, **verdict(evaluation, edited)})

    read("validation", watch, watch.images(pipeline, FAST_POLICY))
    task, own = (SCORE, hidden_animals(seed), pipeline), {**RUNS[run["algorithm"]], "seed": seed}
    start = FromImages(FAST_POLICY.strength)
    with trainer_of(task, SETTINGS, own, algorithm=make_algorithm(algorithm), start=start) as trainer:
        epochs, batch = trainer.config.num_epochs, trainer.config.sample_batch_size
        for epoch in range(epochs):
            started = time.process_time()
            trainer.step(epoch)
            seconds, done = seconds + time.process_time() - started, (epoch + 1) * batch
            if done % EVERY == 0 or epoch + 1 == epochs:
                read("validation", watch, watch.images(pipeline, FAST_POLICY))
    read("validation, one call", watch, in_one_call(pipeline, watch.edits))
    for name, evaluation in (("test", test), ("new animals", new)):
        read(name, evaluation, evaluation.images(pipeline, FAST_POLICY))
    if (run["algorithm"], seed) == ("branching", SEEDS["branching"][0]):
        images["after"] = shown.images(pipeline, FAST_POLICY)
        figure = before_after(shown, images)
        figure.savefig(ROOT / "images" / "demo-before-after.png", **BEFORE_AFTER)
    return rows


if __name__ == "__main__":
    asked = parse(__doc__, algorithms=[*RUNS])
    seeds = {**SEEDS, "branching, too long": (50,)}
    runs = [{"seed": seed, "algorithm": name} for name in asked.algorithms for seed in seeds[name]]
    columns = ("seed", "algorithm", "images", "done", "seconds", "reward", *SHARES)
    run_all(train, runs, columns, RESULT, asked.processes)
    print(f"wrote {RESULT}; now run: python -m benchmarks.tables")
