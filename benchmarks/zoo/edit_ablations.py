"""What each choice of the demo is worth: `python -m benchmarks.zoo.edit_ablations`.

Every variant changes one thing of the demo's settings and trains on as many samples, 12 epochs of its 34.
Then the judges look at 200 validation pictures; rows go to edit_ablations.csv, and what it already holds is
not run again.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, product, run_all, trainer_of
from benchmarks.zoo.edit import SEEDS, SHARES
from ddpo_lessons.algorithms.algorithm import Algorithm
from ddpo_lessons.algorithms.branching import Branching
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.lessons.demo import GROUND_WEIGHT, POLICY, SETTINGS, VALIDATION, Exam, Img2Img
from ddpo_lessons.models import family_of
from ddpo_lessons.named_prompts import hidden_animals
from ddpo_lessons.rewards import animal_alignment
from ddpo_lessons.worlds import animals, load_tiny_zoo

EPOCHS, PICTURES = 12, 200
ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")


# What each variant changes: the policy, fields of DDPOConfig, and the algorithm.
VARIANTS: dict[str, tuple[Img2Img, Row, type[Algorithm]]] = {
    "nothing changed": (POLICY, {}, Branching),
    "one action: 2 of 5 steps": (replace(POLICY, steps=5), {}, Branching),
    "noise at every step (DDPO)": (POLICY, {}, DDPO),
    "attention only": (POLICY, {"train_lora_target_modules": ATTENTION}, Branching),
}


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


def train(run: Row) -> list[Row]:
    """Train a variant; return its row, and one for drawing in a single network call."""
    policy, changes, algorithm = VARIANTS[run["variant"]]
    pipeline, exam = load_tiny_zoo(), Exam(animals.draw_edits(PICTURES, VALIDATION))
    own = {**changes, "sample_num_steps": policy.steps, "num_epochs": EPOCHS, "seed": run["seed"]}
    task = (animal_alignment(ground_weight=GROUND_WEIGHT), hidden_animals(run["seed"]), pipeline)
    start = FromImages(policy.strength)
    with trainer_of(task, SETTINGS, own, algorithm=algorithm(), start=start) as trainer:
        for epoch in range(EPOCHS):
            trainer.step(epoch)
    rows: list[Row] = [exam.measure(pipeline, policy)]
    if run["variant"] == "nothing changed":
        name = "the same policy, decoded after one network call"
        rows.append({"variant": name, **exam.shares(in_one_call(pipeline, exam.edits))})
    return rows


if __name__ == "__main__":
    path, runs = Path(__file__).with_suffix(".csv"), product(seed=SEEDS, variant=VARIANTS)
    run_all(train, runs, ("variant", "seed", *SHARES), path, parse(__doc__).processes)
