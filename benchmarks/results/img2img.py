"""The long experiments of lesson 07: img2img DDPO on damaged and camouflaged handwriting.

`python -m benchmarks.results.img2img` trains tiny-sd once per (experiment, variant, seed) and appends a row
per reading of the judge to img2img.csv, run by run; what the file already holds is not run again.
The experiment "tasks" ends in a row for every damage and severity, from 500 test pictures each.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging

from benchmarks.common import parse, run_all
from ddpo_lessons.app.demo import EVERYWHERE, restore
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import PromptFunction
from ddpo_lessons.data.prompts import damaged_handwriting
from ddpo_lessons.rewards import (
    RewardFunction,
    decorruption,
    digit_legibility,
    digit_margin,
    legibility_gain,
    weighted_sum,
)
from ddpo_lessons.tiny import load_judge, load_reward_model, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import accuracy
from ddpo_lessons.trainer import ImageDDPOTrainer

COLUMNS = (
    "experiment", "variant", "seed", "epoch", "samples_seen", "reward_mean", "judge", "judge_damaged",
    "judge_train", "distance", "seconds", "damage", "severity", "judge_before",
)  # fmt: skip
SEEDS = (0, 1, 2)
TEST_IMAGES, TABLE_IMAGES = 200, 500
JUDGE_EVERY = 5
NUM_STEPS = 12
SETTINGS: dict[str, Any] = {
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

    experiment: str
    variant: str
    seed: int
    damages: tuple[str, ...] = ("foggy",)
    severities: tuple[int, ...] = (3,)
    reward: str = "legibility"
    epochs: int = 15
    noise_strength: float = 0.25  # the last three steps: two actions, and one step without noise
    pool: int | None = None  # train on so many different pictures
    id_in_prompt: bool = False
    config: dict[str, Any] = field(default_factory=dict)


# -------------------------------------------------------------------------------------------- rewards
def logit_change() -> RewardFunction:
    """The true digit's logit after minus before: gaussian-glasses' reward, with our reward model for CLIP."""
    model = load_reward_model()

    @torch.no_grad()
    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        before = torch.stack([m["image"] for m in metadata])  # (B, 3, 32, 32)
        digits = torch.tensor([m["digit"] for m in metadata])  # (B,)
        return (model(images) - model(before)).gather(1, digits[:, None])[:, 0]

    return reward


def _with_distance(reward: RewardFunction) -> RewardFunction:
    """Charge for every change: 10 times the mean squared error to the input."""
    return weighted_sum({"reward": (1.0, reward), "distance": (10.0, decorruption("image"))})


REWARDS: dict[str, Callable[[], RewardFunction]] = {
    "legibility": digit_legibility,
    "probability": lambda: digit_legibility(probability=True),
    "gain": legibility_gain,
    "margin": digit_margin,
    "logit change": logit_change,
    "legibility and distance": lambda: _with_distance(digit_legibility()),
    "margin and distance": lambda: _with_distance(digit_margin()),
    "closeness to the original": decorruption,
}


# ---------------------------------------------------------------------------------------------- tasks
def prompts_of(run: Run) -> PromptFunction:
    """Return the prompt function of a run."""
    draw = damaged_handwriting(run.seed, run.damages, run.severities, run.pool)
    if not run.id_in_prompt:
        return draw

    def with_id() -> Any:
        _, image, metadata = draw()
        number = metadata.pop("id")  # so that the prompt is what statistics are kept by
        return f"picture {number}", image, metadata

    return with_id


def test_pictures(run: Run, count: int) -> Iterator[tuple[str, int, world.Pictures]]:
    """Draw test pictures, `count` in all, in equal parts of every damage and severity of a run."""
    kinds = [(damage, severity) for damage in run.damages for severity in run.severities]
    for damage, severity in kinds:
        yield damage, severity, world.draw_pictures(count // len(kinds), "test", 0, damage, severity)


class Examiner:
    """Measures a policy on pictures of the test handwriting, always the same and from the same noise."""

    def __init__(self, run: Run, pipeline: Any) -> None:
        drawn = [pictures for *_, pictures in test_pictures(run, TEST_IMAGES)]
        self.images = torch.cat([p.images for p in drawn])
        self.digits = torch.cat([p.digits for p in drawn])
        draw = prompts_of(run)
        contexts = [draw() for _ in range(TEST_IMAGES // 2)]
        self.train_images = torch.stack([image for _, image, _ in contexts])
        self.train_digits = torch.tensor([metadata["digit"] for *_, metadata in contexts])
        self.run, self.pipeline, self.judge = run, pipeline, load_judge()

    def __call__(self) -> dict[str, float]:
        """Return what the judge reads of test and training pictures, and the squared distance moved."""
        strength = self.run.noise_strength
        restored = restore(self.pipeline, self.images, strength, NUM_STEPS)
        train = restore(self.pipeline, self.train_images, strength, NUM_STEPS)
        return {
            "judge": accuracy(self.judge, restored, self.digits),
            "judge_damaged": accuracy(self.judge, self.images, self.digits),
            "judge_train": accuracy(self.judge, train, self.train_digits),
            "distance": (restored - self.images).square().mean().item(),
        }


# ------------------------------------------------------------------------------------------- training
def train(run: Run) -> list[dict[str, Any]]:
    """Train one run and return a row for every reading of the judge."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    pipeline = load_tiny_sd()
    examine = Examiner(run, pipeline)
    name = {"experiment": run.experiment, "variant": run.variant, "seed": run.seed}
    with tempfile.TemporaryDirectory() as folder:
        settings = {**SETTINGS, **run.config, "num_epochs": run.epochs, "save_freq": run.epochs}
        config = DDPOConfig(**settings, seed=run.seed, output_dir=folder)
        task = (REWARDS[run.reward](), prompts_of(run), pipeline)
        trainer = ImageDDPOTrainer(config, *task, noise_strength=run.noise_strength)
        started, rows = time.perf_counter(), [{**name, "epoch": 0, "samples_seen": 0, **examine()}]
        rewards: list[float] = []
        for epoch in range(run.epochs):
            metrics = trainer.step(epoch)
            rewards.append(metrics["reward_mean"])
            if (epoch + 1) % JUDGE_EVERY == 0:
                seconds = time.perf_counter() - started
                recent = sum(rewards[-JUDGE_EVERY:]) / JUDGE_EVERY
                position = {"epoch": epoch + 1, "samples_seen": metrics["samples_seen"]}
                rows.append({**name, **position, "reward_mean": recent, "seconds": seconds, **examine()})
        rows[0]["reward_mean"] = rewards[0]
    if run.experiment == "tasks":
        last = {**name, "epoch": run.epochs, "samples_seen": rows[-1]["samples_seen"]}
        rows += [{**last, **reading} for reading in by_damage(run, pipeline)]
    return rows


def by_damage(run: Run, pipeline: Any) -> Iterator[dict[str, Any]]:
    """Yield what the judge reads of every damage and severity of a run, before and after training."""
    judge, strength = load_judge(), run.noise_strength
    kinds = len(run.damages) * len(run.severities)
    for damage, severity, pictures in test_pictures(run, TABLE_IMAGES * kinds):
        after = restore(pipeline, pictures.images, strength, NUM_STEPS)
        pipeline.unet.disable_adapters()
        before = restore(pipeline, pictures.images, strength, NUM_STEPS)
        pipeline.unet.enable_adapters()
        yield {
            "damage": damage,
            "severity": severity,
            "judge": accuracy(judge, after, pictures.digits),
            "judge_before": accuracy(judge, before, pictures.digits),
            "judge_damaged": accuracy(judge, pictures.images, pictures.digits),
        }


# ----------------------------------------------------------------------------------------- what is run
FOUR = ("noisy", "blurry", "foggy", "blocky")
POOL = 32
BY_CONTEXT = {
    "sample_group_size": 1,
    "per_prompt_stat_tracking": True,
    "per_prompt_stat_tracking_buffer_size": 16,
    "per_prompt_stat_tracking_min_count": 4,
}
GLASSES: dict[str, Any] = {
    "damages": ("camouflaged",),
    "reward": "logit change",
    "epochs": 30,
    "noise_strength": 5 / 12,
    "pool": POOL,
    "config": {"sample_group_size": 1},
}
EXPERIMENTS: dict[str, list[Run]] = {
    "tasks": [
        Run("tasks", "fog", 0, ("foggy",), epochs=30),
        Run("tasks", "camouflage", 0, ("camouflaged",), reward="logit change", epochs=60),
        Run("tasks", "darkness", 0, ("dark",), epochs=30),
        Run("tasks", "fading", 0, ("faded",), epochs=30),
        Run("tasks", "blur", 0, ("blurry",), (5,), epochs=30),
        Run("tasks", "noise", 0, ("noisy",), (5,), epochs=30),
        Run("tasks", "four corruptions", 0, FOUR, (1, 2, 3, 4, 5), epochs=30),
    ],
    "rewards": [
        *(Run("rewards", reward, 0, reward=reward) for reward in REWARDS if reward != "gain"),
        Run("rewards", "legibility, no groups", 0, config={"sample_group_size": 1}),
        # Within a group the gain has the advantages of legibility, to rounding; without groups it has not.
        Run("rewards", "gain, no groups", 0, reward="gain", config={"sample_group_size": 1}),
    ],
    "baselines": [
        Run("baselines", "groups from one noise", 0, pool=POOL),
        Run("baselines", "per image, by id", 0, pool=POOL, config=BY_CONTEXT),
        Run("baselines", "per image, id in the prompt", 0, pool=POOL, id_in_prompt=True, config=BY_CONTEXT),
        Run("baselines", "global", 0, pool=POOL, config={"sample_group_size": 1}),
    ],
    "strength": [
        Run("strength", f"{steps} of {NUM_STEPS}", 0, noise_strength=steps / NUM_STEPS)
        for steps in (2, 3, 4, 6, 8)
    ],
    # What gaussian-glasses did, and then one remedy at a time; all of them together are "camouflage" above.
    "glasses": [
        Run("glasses", "as gaussian-glasses", 0, **GLASSES),
        Run("glasses", "less noise", 0, **{**GLASSES, "noise_strength": 0.25}),
        Run("glasses", "new pictures", 0, **{**GLASSES, "pool": None}),
        Run("glasses", "groups from one noise", 0, **{**GLASSES, "config": {}}),
    ],
}


def main() -> None:
    """Run the experiments that were asked for, all variants of a seed before the next seed."""
    arguments = parse(__doc__, experiments=list(EXPERIMENTS), seeds=list(SEEDS))
    asked = itertools.product(arguments.experiments, arguments.seeds)
    runs = [replace(run, seed=seed) for name, seed in asked for run in EXPERIMENTS[name]]
    run_all(train, runs, COLUMNS, 3, Path(__file__).with_suffix(".csv"), arguments.processes)


if __name__ == "__main__":
    main()
