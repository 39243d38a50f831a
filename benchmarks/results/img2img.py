"""The long experiments of lesson 07: img2img DDPO on damaged and camouflaged handwriting.

`python -m benchmarks.results.img2img` trains tiny-sd once per (experiment, variant, seed) and appends a row
per reading of the judge to img2img.csv, run by run; what the file already holds is not run again.
The experiment "tasks" ends in a row for every damage and severity, from 500 test pictures each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, run_all, scratch_config
from ddpo_lessons import rewards
from ddpo_lessons.app.demo import EVERYWHERE, restore
from ddpo_lessons.data.contexts import PromptFunction
from ddpo_lessons.data.prompts import damaged_handwriting
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
    damages: tuple[str, ...] = ("foggy",)
    severities: tuple[int, ...] = (3,)
    reward: str = "legibility"
    epochs: int = 15
    noise_strength: float = 0.25  # the last three steps: two actions, and one step without noise
    pool: int | None = None  # train on so many different pictures
    id_in_prompt: bool = False
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


def _with_distance(reward: rewards.RewardFunction) -> rewards.RewardFunction:
    """Charge for every change: 10 times the mean squared error to the input."""
    return rewards.weighted_sum({"reward": (1.0, reward), "distance": (10.0, rewards.decorruption("image"))})


REWARDS: dict[str, Callable[[], rewards.RewardFunction]] = {
    "legibility": rewards.digit_legibility,
    "probability": lambda: rewards.digit_legibility(probability=True),
    "gain": rewards.legibility_gain,
    "margin": rewards.digit_margin,
    "logit change": logit_change,
    "legibility and distance": lambda: _with_distance(rewards.digit_legibility()),
    "margin and distance": lambda: _with_distance(rewards.digit_margin()),
    "closeness to the original": rewards.decorruption,
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
    kinds = list(itertools.product(run.damages, run.severities))
    for damage, severity in kinds:
        yield damage, severity, world.draw_pictures(count // len(kinds), "test", 0, damage, severity)


def examiner(run: Run, pipeline: Any) -> Callable[[], dict[str, float]]:
    """Return what reads test handwriting after a policy: always the same pictures, from the same noise."""
    drawn, judge = [pictures for *_, pictures in test_pictures(run, TEST_IMAGES)], load_judge()
    images, digits = torch.cat([p.images for p in drawn]), torch.cat([p.digits for p in drawn])
    draw = prompts_of(run)
    contexts = [draw() for _ in range(TEST_IMAGES // 2)]
    train_images = torch.stack([image for _, image, _ in contexts])
    train_digits = torch.tensor([metadata["digit"] for *_, metadata in contexts])

    def examine() -> dict[str, float]:
        """Return what the judge reads of test and training pictures, and the squared distance moved."""
        both = (images, train_images)
        restored, train = (restore(pipeline, part, run.noise_strength, NUM_STEPS) for part in both)
        return {
            "judge": accuracy(judge, restored, digits),
            "judge_damaged": accuracy(judge, images, digits),
            "judge_train": accuracy(judge, train, train_digits),
            "distance": (restored - images).square().mean().item(),
        }

    return examine


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
        rows += [{**last, **reading} for reading in by_damage(run, pipeline)]
    return rows


def by_damage(run: Run, pipeline: Any) -> Iterator[Row]:
    """Yield what the judge reads of every damage and severity of a run, before and after training."""
    judge, kinds = load_judge(), len(run.damages) * len(run.severities)
    for damage, severity, pictures in test_pictures(run, TABLE_IMAGES * kinds):
        images = {"judge_damaged": pictures.images}
        images["judge"] = restore(pipeline, pictures.images, run.noise_strength, NUM_STEPS)
        pipeline.unet.disable_adapters()
        images["judge_before"] = restore(pipeline, pictures.images, run.noise_strength, NUM_STEPS)
        pipeline.unet.enable_adapters()
        read = {name: accuracy(judge, shown, pictures.digits) for name, shown in images.items()}
        yield {"damage": damage, "severity": severity, **read}


# ----------------------------------------------------------------------------------------- what is run
FOUR = ("noisy", "blurry", "foggy", "blocky")
CAMOUFLAGED: Row = {"damages": ("camouflaged",), "reward": "logit change"}
NO_GROUPS = {"sample_group_size": 1}
BY_CONTEXT = {
    **NO_GROUPS,
    "per_prompt_stat_tracking": True,
    "per_prompt_stat_tracking_buffer_size": 16,
    "per_prompt_stat_tracking_min_count": 4,
}
SMALL: Row = {"pool": 32}
GLASSES: Row = {**CAMOUFLAGED, **SMALL, "epochs": 30, "noise_strength": 5 / 12, "config": NO_GROUPS}
EXPERIMENTS: dict[str, list[Run]] = {
    "tasks": [
        Run("fog", ("foggy",), epochs=30),
        Run("camouflage", **CAMOUFLAGED, epochs=60),
        Run("darkness", ("dark",), epochs=30),
        Run("fading", ("faded",), epochs=30),
        Run("blur", ("blurry",), (5,), epochs=30),
        Run("noise", ("noisy",), (5,), epochs=30),
        Run("four corruptions", FOUR, (1, 2, 3, 4, 5), epochs=30),
    ],
    "rewards": [
        *(Run(reward, reward=reward) for reward in REWARDS if reward != "gain"),
        Run("legibility, no groups", config=NO_GROUPS),
        # Within a group the gain has the advantages of legibility, to rounding; without groups it has not.
        Run("gain, no groups", reward="gain", config=NO_GROUPS),
    ],
    "baselines": [
        Run("groups from one noise", **SMALL),
        Run("per image, by id", **SMALL, config=BY_CONTEXT),
        Run("per image, id in the prompt", **SMALL, id_in_prompt=True, config=BY_CONTEXT),
        Run("global", **SMALL, config=NO_GROUPS),
    ],
    "strength": [
        Run(f"{steps} of {NUM_STEPS}", noise_strength=steps / NUM_STEPS) for steps in (2, 3, 4, 6, 8)
    ],
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
