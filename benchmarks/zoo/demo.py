"""The demo with both algorithms, five new seeds each: `python -m benchmarks.zoo.demo`.

Each run is evaluated on 100 validation images after every 1,024 reward evaluations; at its end on 500 test
images, on as many of new animals, and on the validation images decoded after one network evaluation. Rows go
to demo.csv, with the mean reward of the evaluated images; finished runs are skipped. The first run's
images become images/demo-before-after.png, which README, site and lesson 07 show. `seconds` are processor
time of training alone, on one thread. "branching, too long" is a run with lesson 07's policy, 8,192 reward
evaluations instead of 5,984, and a reward whose classifier sees each image once.
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
    BACKGROUND_WEIGHT,
    BEFORE_AFTER,
    FAST_POLICY,
    POLICY,
    SCHEDULES,
    SETTINGS,
    SHOWN,
    TEST,
    UNTRAINED_BEST,
    VALIDATION,
    WATCHED,
    Evaluation,
    Img2Img,
    before_after,
    make_reward,
)
from ddpo_lessons.models import family_of
from ddpo_lessons.named_prompts import hidden_animals
from ddpo_lessons.rewards import RewardFunction, animal_alignment
from ddpo_lessons.worlds import animals, load_tiny_zoo

RESULT = Path(__file__).with_suffix(".csv")
SEEDS = {"branching": (51, 52, 53, 54, 55), "ddpo": (61, 62, 63, 64, 65)}  # no run had them before
EVERY = 1024
RUNS: dict[str, tuple[Img2Img, RewardFunction, Row]] = {
    **{name: (FAST_POLICY, make_reward(), own) for name, own in SCHEDULES.items()},
    "branching, too long": (
        POLICY,
        animal_alignment(background_weight=BACKGROUND_WEIGHT),
        {**SCHEDULES["branching"], "sample_num_steps": POLICY.steps, "num_epochs": 256},
    ),
}


@torch.no_grad()
def in_one_call(pipeline: Any, edits: animals.Edits, policy: Img2Img) -> torch.Tensor:
    """Decode the clean latents that the policy predicts in its first network evaluation; (N, 3, 64, 64)."""
    family = family_of(pipeline)
    timesteps = family.schedule(policy.steps, policy.strength).timesteps[:1].expand(len(edits.prompts))
    clean = family.encode(edits.images)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    noisy = family.add_noise(clean, noise, timesteps)
    conditioning = family.condition(edits.prompts, "", policy.guidance)
    output = family.predict(family.denoiser, noisy, timesteps, conditioning, policy.guidance)
    return family.decode(family.predict_clean(noisy, output, timesteps))


def verdict(evaluation: Evaluation, images: torch.Tensor, score: RewardFunction) -> Row:
    """Return the mean reward of edits, and the fractions that are correct."""
    rewards, _ = score(images, evaluation.edits.prompts, evaluation.edits.metadata)
    return {"reward": rewards.mean().item(), **evaluation.fractions(images)}


def train(run: Row) -> list[Row]:
    """Train with an algorithm and a seed; return a row for every evaluation."""
    algorithm, seed = run["algorithm"].split(",")[0], run["seed"]
    policy, score, own = RUNS[run["algorithm"]]
    pipeline, watch = load_tiny_zoo(), Evaluation(animals.draw_edits(WATCHED, VALIDATION))
    test = Evaluation(animals.draw_edits(IMAGES, TEST))
    new = Evaluation(animals.draw_edits(IMAGES, TEST, animals.NEW_ANIMALS))
    shown = Evaluation(animals.draw_edits(SHOWN, TEST))
    untrained = {"before": policy, "untrained_best": UNTRAINED_BEST}
    images = {name: shown.images(pipeline, setting) for name, setting in untrained.items()}
    rows, done, seconds = list[Row](), 0, 0.0

    def read(name: str, evaluation: Evaluation, edited: torch.Tensor) -> None:
        rows.append({"images": name, "done": done, "seconds": seconds, **verdict(evaluation, edited, score)})

    read("validation", watch, watch.images(pipeline, policy))
    task, start = (score, hidden_animals(seed), pipeline), FromImages(policy.strength)
    with trainer_of(
        task, SETTINGS, own | {"seed": seed}, algorithm=make_algorithm(algorithm), start=start
    ) as trainer:
        epochs, batch = trainer.config.num_epochs, trainer.config.sample_batch_size
        for epoch in range(epochs):
            started = time.process_time()
            trainer.step(epoch)
            seconds, done = seconds + time.process_time() - started, (epoch + 1) * batch
            if done % EVERY == 0 or epoch + 1 == epochs:
                read("validation", watch, watch.images(pipeline, policy))
    read("validation, one call", watch, in_one_call(pipeline, watch.edits, policy))
    for name, evaluation in (("test", test), ("new animals", new)):
        read(name, evaluation, evaluation.images(pipeline, policy))
    if (run["algorithm"], seed) == ("branching", SEEDS["branching"][0]):
        images["after"] = shown.images(pipeline, policy)
        figure = before_after(shown, images)
        figure.savefig(ROOT / "images" / "demo-before-after.png", **BEFORE_AFTER)
    return rows


if __name__ == "__main__":
    asked = parse(__doc__, algorithms=[*RUNS])
    seeds = {**SEEDS, "branching, too long": (20,)}
    runs = [{"seed": seed, "algorithm": name} for name in asked.algorithms for seed in seeds[name]]
    columns = ("seed", "algorithm", "images", "done", "seconds", "reward", *SHARES)
    run_all(train, runs, columns, RESULT, asked.processes)
    print(f"wrote {RESULT}; now run: python -m benchmarks.tables")
