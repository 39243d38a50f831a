"""What each choice of the demo is worth: `python -m benchmarks.zoo.edit_ablations`.

Every variant changes one thing of the demo's settings and trains on as many samples, 12 epochs of its 34.
Then the judges look at 200 validation pictures; rows go to edit_ablations.csv, and what it already holds is
not run again.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, run_all, scratch_config
from benchmarks.zoo.edit import SEEDS, SHARES
from ddpo_lessons.algorithms.base import Algorithm
from ddpo_lessons.algorithms.branching import Branching
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.app.demo import GROUND_WEIGHT, POLICY, SETTINGS, VALIDATION, Exam, Img2Img
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.families import family_of
from ddpo_lessons.named_prompts import hidden_animals
from ddpo_lessons.rewards import animal_alignment
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.worlds import animals, load_tiny_zoo

EPOCHS, PICTURES = 12, 200


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
    Variant("one action: 2 of 5 steps", policy=replace(POLICY, steps=5)),
    Variant("noise at every step (DDPO)", algorithm=DDPO),
    Variant("attention only", config={"train_lora_target_modules": ("to_k", "to_q", "to_v", "to_out.0")}),
)


@torch.no_grad()
def in_one_call(pipeline: Any, edits: animals.Edits) -> torch.Tensor:
    """Decode what the policy's first call takes for the clean latents, without any step."""
    family = family_of(pipeline)
    timesteps = family.schedule(POLICY.steps, POLICY.strength).timesteps[:1].expand(len(edits.prompts))
    clean = family.encode(edits.images)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    noisy = family.add_noise(clean, noise, timesteps)
    conditioning = family.condition(edits.prompts, "", POLICY.guidance)
    output = family.predict(family.denoiser, noisy, timesteps, conditioning, POLICY.guidance)
    return family.decode(family.predict_clean(noisy, output, timesteps))


def train(variant: Variant) -> list[Row]:
    """Train a variant; return its row, and one for drawing in a single network call."""
    policy, pipeline, exam = variant.policy, load_tiny_zoo(), Exam(animals.draw_edits(PICTURES, VALIDATION))
    own = {"sample_num_steps": policy.steps, "num_epochs": EPOCHS, "seed": variant.seed}
    with scratch_config(SETTINGS, variant.config, own) as config:
        task = (animal_alignment(ground_weight=GROUND_WEIGHT), hidden_animals(variant.seed), pipeline)
        start, algorithm = FromImages(policy.strength), variant.algorithm()
        trainer = Trainer(config, *task, algorithm=algorithm, start=start)
        for epoch in range(EPOCHS):
            trainer.step(epoch)
    rows = [{"variant": variant.variant, "seed": variant.seed, **exam.measure(pipeline, policy)}]
    if variant.variant == VARIANTS[0].variant:
        name = "the same policy, decoded after one network call"
        rows.append({"variant": name, "seed": variant.seed, **exam.shares(in_one_call(pipeline, exam.edits))})
    return rows


def main() -> None:
    """Train every variant with every seed."""
    runs = [replace(variant, seed=seed) for seed, variant in itertools.product(SEEDS, VARIANTS)]
    path = Path(__file__).with_suffix(".csv")
    run_all(train, runs, ("variant", "seed", *SHARES), 2, path, parse(__doc__).processes)


if __name__ == "__main__":
    main()
