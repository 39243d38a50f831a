"""Damaged handwriting, of which lesson 07 tells: fog, camouflage, and gaussian-glasses' settings.

`python -m benchmarks.results.img2img` trains tiny-sd once per (experiment, variant, seed) and appends a row
per reading of the judge to img2img.csv, run by run; what the file already holds is not run again.
The experiment "tasks" ends in a row of 500 test pictures, before training and after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, run_all, scratch_config
from ddpo_lessons import rewards
from ddpo_lessons.app.demo import EVERYWHERE, restore
from ddpo_lessons.data.prompts import PromptSampler, damaged_handwriting
from ddpo_lessons.tiny import load_judge, load_reward_model, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import accuracy
from ddpo_lessons.trainer import ImageDDPOTrainer

COLUMNS = (
    "experiment", "variant", "seed", "epoch", "samples_seen", "reward_mean", "judge", "judge_damaged",
    "judge_train", "distance", "damage", "severity", "judge_before",
)  # fmt: skip
SEEDS = (0, 1, 2)
TEST_IMAGES, TABLE_IMAGES = 200, 500
JUDGE_EVERY = 5
NUM_STEPS = 12
SEVERITY = 3
SETTINGS: Row = {
    "sample_num_steps": NUM_STEPS,
    "sample_guidance_scale": 1.0,
    "sample_batch_size": 64,
    "sample_num_batches_per_epoch": 2,
    "sample_group_size": 4,
    "train_batch_size": 64,
    "train_learning_rate": 1e-3,
    "train_clip_range": 5e-3,
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
    "train_lora_target_modules": EVERYWHERE,
    "image_grid_freq": 0,
}


@dataclass(frozen=True)
class Run:
    """One training run: what it is called, its task, and what it changes."""

    variant: str
    damage: str = "foggy"
    reward: str = "legibility"
    epochs: int = 30
    noise_strength: float = 0.25  # the last three steps: two actions, and one step without noise
    pool: int | None = None  # train on so many different pictures
    config: Row = field(default_factory=dict)
    experiment: str = ""
    seed: int = 0


# -------------------------------------------------------------------------------------------- rewards
def logit_change() -> rewards.RewardFunction:
    """The true digit's logit after minus before: gaussian-glasses' reward, with our reward model for CLIP."""
    model = load_reward_model()

    @torch.no_grad()
    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        before = torch.stack([m["image"] for m in metadata])  # (B, 3, 32, 32)
        digits = torch.tensor([m["digit"] for m in metadata])  # (B,)
        return (model(images) - model(before)).gather(1, digits[:, None])[:, 0]

    return reward


REWARDS: dict[str, Callable[[], rewards.RewardFunction]] = {
    "legibility": rewards.digit_legibility,
    "logit change": logit_change,
}


# -------------------------------------------------------------------------------------------- reading
def prompts_of(run: Run) -> PromptSampler:
    """Return the prompt function of a run."""
    return damaged_handwriting(run.seed, [run.damage], [SEVERITY], run.pool)


def examiner(run: Run, pipeline: Any) -> Callable[[], dict[str, float]]:
    """Return what reads test handwriting after a policy: always the same pictures, from the same noise."""
    test, judge = world.draw_pictures(TEST_IMAGES, "test", 0, run.damage, SEVERITY), load_judge()
    draw = prompts_of(run)
    contexts = [draw() for _ in range(TEST_IMAGES // 2)]
    train_images = torch.stack([image for _, image, _ in contexts])
    train_digits = torch.tensor([metadata["digit"] for *_, metadata in contexts])

    def examine() -> dict[str, float]:
        """Return what the judge reads of test and training pictures, and the squared distance moved."""
        both = (test.images, train_images)
        restored, train = (restore(pipeline, part, run.noise_strength, NUM_STEPS) for part in both)
        return {
            "judge": accuracy(judge, restored, test.digits),
            "judge_damaged": accuracy(judge, test.images, test.digits),
            "judge_train": accuracy(judge, train, train_digits),
            "distance": (restored - test.images).square().mean().item(),
        }

    return examine


def final_reading(run: Run, pipeline: Any) -> Row:
    """Return what the judge reads of more test pictures, before and after training."""
    test, judge = world.draw_pictures(TABLE_IMAGES, "test", 0, run.damage, SEVERITY), load_judge()
    images = {"judge_damaged": test.images}
    images["judge"] = restore(pipeline, test.images, run.noise_strength, NUM_STEPS)
    pipeline.unet.disable_adapters()
    images["judge_before"] = restore(pipeline, test.images, run.noise_strength, NUM_STEPS)
    read = {name: accuracy(judge, shown, test.digits) for name, shown in images.items()}
    return {"damage": run.damage, "severity": SEVERITY, **read}


# ------------------------------------------------------------------------------------------- training
def train(run: Run) -> list[Row]:
    """Train one run and return a row for every reading of the judge."""
    pipeline = load_tiny_sd()
    examine = examiner(run, pipeline)
    name = {column: getattr(run, column) for column in COLUMNS[:3]}
    with scratch_config(SETTINGS, run.config, seed=run.seed) as config:
        task = (REWARDS[run.reward](), prompts_of(run), pipeline)
        trainer = ImageDDPOTrainer(config, *task, noise_strength=run.noise_strength)
        rows, means = [{**name, "epoch": 0, "samples_seen": 0, **examine()}], list[float]()
        for epoch in range(run.epochs):
            metrics = trainer.step(epoch)
            means.append(metrics["reward_mean"])
            if (epoch + 1) % JUDGE_EVERY == 0:
                position = {"epoch": epoch + 1, "samples_seen": metrics["samples_seen"]}
                recent = {"reward_mean": sum(means[-JUDGE_EVERY:]) / JUDGE_EVERY}
                rows.append({**name, **position, **recent, **examine()})
    rows[0]["reward_mean"] = means[0]
    if run.experiment == "tasks":
        last = {**name, "epoch": run.epochs, "samples_seen": rows[-1]["samples_seen"]}
        rows.append({**last, **final_reading(run, pipeline)})
    return rows


# ----------------------------------------------------------------------------------------- what is run
CAMOUFLAGED: Row = {"damage": "camouflaged", "reward": "logit change"}
NO_GROUPS = {"sample_group_size": 1}
GLASSES: Row = {**CAMOUFLAGED, "pool": 32, "noise_strength": 5 / 12, "config": NO_GROUPS}
EXPERIMENTS: dict[str, list[Run]] = {
    "tasks": [Run("fog"), Run("camouflage", **CAMOUFLAGED, epochs=60)],
    # What gaussian-glasses did, and then one remedy at a time; all of them together are "camouflage" above.
    "glasses": [
        Run("as gaussian-glasses", **GLASSES),
        Run("less noise", **{**GLASSES, "noise_strength": 0.25}),
        Run("new pictures", **{**GLASSES, "pool": None}),
        Run("groups from one noise", **{**GLASSES, "config": {}}),
    ],
}


def main() -> None:
    """Run the experiments, all variants of a seed before the next seed."""
    numbered = itertools.product(EXPERIMENTS, SEEDS)
    runs = [replace(run, experiment=name, seed=seed) for name, seed in numbered for run in EXPERIMENTS[name]]
    run_all(train, runs, COLUMNS, 3, Path(__file__).with_suffix(".csv"), parse(__doc__).processes)


if __name__ == "__main__":
    main()
