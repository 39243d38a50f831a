"""What each choice of the demo is worth: `python -m benchmarks.zoo.edit_ablations`.

Every variant changes one thing of the demo's settings and trains on as many samples, 12,800. Then the judges
look at 200 validation pictures; rows go to edit_ablations.csv, and what it already holds is not run again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.common import Row, parse, run_all, scratch_config
from benchmarks.zoo.edit import SEEDS, SHARES
from ddpo_lessons.algorithms import DDPO, Algorithm
from ddpo_lessons.algorithms.branching import Branching
from ddpo_lessons.app.demo import POLICY, SETTINGS, VALIDATION, Exam, Img2Img, reward
from ddpo_lessons.data.prompts import hidden_animals
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.trainer import Runner
from ddpo_lessons.zoo import load_tiny_zoo, world

SAMPLES, PICTURES = 12_800, 200
ONE_CALL = replace(POLICY, steps=2)  # of which one is run, from the noised picture to the finished one


@dataclass(frozen=True)
class Variant:
    """What a run changes of the demo."""

    variant: str
    seed: int = 0
    policy: Img2Img = POLICY
    config: Row = field(default_factory=dict)  # fields of DDPOConfig
    algorithm: Callable[[], Algorithm] = Branching


VARIANTS = (
    Variant("nothing changed"),
    Variant("one action: 2 of 4 steps", policy=replace(POLICY, steps=4)),
    Variant("noise at every step (DDPO)", algorithm=DDPO),
    Variant("attention only", config={"train_lora_target_modules": ("to_k", "to_q", "to_v", "to_out.0")}),
)


def train(variant: Variant) -> list[Row]:
    """Train a variant; return its row, and one for drawing in a single network call."""
    policy, pipeline, exam = variant.policy, load_tiny_zoo(), Exam(world.draw_edits(PICTURES, VALIDATION))
    own = {"sample_num_steps": policy.steps, "num_epochs": SAMPLES // 256, "seed": variant.seed}
    with scratch_config(SETTINGS, variant.config, own) as config:
        task = (reward(), hidden_animals(variant.seed), pipeline)
        start, algorithm = FromImages(policy.strength), variant.algorithm()
        trainer = Runner(config, *task, algorithm=algorithm, start=start)
        for epoch in range(SAMPLES // trainer.plan.total_samples):
            trainer.step(epoch)
    rows = [{"variant": variant.variant, "seed": variant.seed, **exam.measure(pipeline, policy)}]
    if variant.variant == VARIANTS[0].variant:
        name = "the same policy, decoded after one network call"
        rows.append({"variant": name, "seed": variant.seed, **exam.measure(pipeline, ONE_CALL)})
    return rows


def main() -> None:
    """Train every variant with every seed."""
    runs = [replace(variant, seed=seed) for seed, variant in itertools.product(SEEDS, VARIANTS)]
    path = Path(__file__).with_suffix(".csv")
    run_all(train, runs, ("variant", "seed", *SHARES), 2, path, parse(__doc__).processes)


if __name__ == "__main__":
    main()
