"""Lesson 07's task, digits in other colours, for three seeds: `python -m benchmarks.results.recolour`.

A handwritten digit goes in, with a sentence that names two other colours and no digit. Done right, both
colours are those named, and the digit is still the one that was written. Writes recolour.json and
images/07-before-after.png, which lesson 07 shows.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, Row, machine, scratch_config, write_json
from benchmarks.tiny.requests import edit_requests
from ddpo_lessons.app.demo import EVERYWHERE, Img2Img, img2img, restore
from ddpo_lessons.app.plotting import plot_strip, save_figure
from ddpo_lessons.rewards import recolouring
from ddpo_lessons.tiny import load_judge, load_second_judge, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import judge_edits
from ddpo_lessons.trainer import ImageDDPOTrainer

POLICY = Img2Img(0.4, 2.0, 5)  # two steps are run, the first of which is an action
# The most done right by the untrained pipeline, of a grid of all four: edit_grid.csv.
UNTRAINED_BEST = Img2Img(0.4, 30.0, 10)
SETTINGS: Row = {
    "num_epochs": 150,
    "sample_num_steps": POLICY.steps,
    "sample_guidance_scale": POLICY.guidance,
    "sample_batch_size": 128,
    "sample_num_batches_per_epoch": 2,
    "sample_group_size": 8,  # rollouts of a picture from one noise: only the actions explain the rewards
    "train_batch_size": 256,  # one optimizer step an epoch
    # The peers' 3e-4 and 1e-4 hardly move a model this small.
    "train_learning_rate": 2e-3,
    "train_clip_range": 5e-3,
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
    "train_lora_target_modules": EVERYWHERE,
    "save_freq": 50,
    "image_grid_freq": 0,
}
WATCH_EVERY = 5  # epochs
SHOWN = 6  # pictures in the strip, the first of the test split
RESULT = Path(__file__).with_suffix(".json")
PICTURE = ROOT / "images" / "07-before-after.png"
SEEDS = (0, 1, 2)
TEST, WATCHED = (500, "test", 0), (100, "validation", 0)  # arguments of world.draw_edits


def untrained(pipeline: Any, edits: world.Edits, setting: Img2Img) -> torch.Tensor:
    """Edit pictures as a user of plain diffusers would, see `img2img`."""
    return img2img(pipeline, edits.pictures.images, edits.prompts, setting)


class Exam:
    """The judges' verdict on what a pipeline makes of pictures and sentences, always from the same noise."""

    def __init__(self, edits: world.Edits) -> None:
        """Load the judges."""
        self.edits = edits
        self.judges = load_judge(), load_second_judge()

    def images(self, pipeline: Any, setting: Img2Img) -> torch.Tensor:
        """Return what the policy makes of the pictures, (N, 3, 32, 32)."""
        return restore(
            pipeline,
            self.edits.pictures.images,
            setting.strength,
            setting.steps,
            self.edits.prompts,
            guidance_scale=setting.guidance,
            eta=setting.eta,
        )

    def shares(self, images: torch.Tensor) -> dict[str, float]:
        """Return the shares of pictures with the digit, the colours and both right, see `judge_edits`."""
        verdicts = judge_edits(images, self.edits, *self.judges)
        return {name: hits.double().mean().item() for name, hits in verdicts.items()}


def train(seed: int) -> tuple[Row, dict[str, torch.Tensor]]:
    """Train a seed; return its verdicts with what it was made with, and the test pictures."""
    started = time.perf_counter()
    pipeline, test, watch = load_tiny_sd(), Exam(world.draw_edits(*TEST)), Exam(world.draw_edits(*WATCHED))
    images = {
        "untrained_best": untrained(pipeline, test.edits, UNTRAINED_BEST),
        "before": test.images(pipeline, POLICY),
    }
    with scratch_config(SETTINGS, seed=seed) as config:
        task = (recolouring(), edit_requests(seed), pipeline)
        trainer = ImageDDPOTrainer(config, *task, noise_strength=POLICY.strength)
        path: list[Row] = [{"epoch": 0, **watch.shares(watch.images(pipeline, POLICY))}]
        for epoch in range(1, config.num_epochs + 1):
            trainer.step(epoch - 1)
            if epoch % WATCH_EVERY == 0:
                path.append({"epoch": epoch, **watch.shares(watch.images(pipeline, POLICY))})
        settings = {name: config.to_dict()[name] for name in SETTINGS}
    images["after"] = test.images(pipeline, POLICY)
    row: Row = {"seed": seed, **{name: test.shares(made) for name, made in images.items()}}
    row["untrained_best"] |= asdict(UNTRAINED_BEST)
    made_with = {"samples": trainer.epochs_done * trainer.plan.total_samples, "settings": settings}
    made_with |= {"torch": torch.__version__, "device": str(trainer.accelerator.device), "path": path}
    row["run"] = {**asdict(POLICY), "seed": seed, "pictures": len(test.edits.prompts), **made_with}
    row["seconds"] = round(time.perf_counter() - started, 1)
    return row, images


def draw(images: dict[str, torch.Tensor]) -> None:
    """Draw the first test pictures: what goes in, the untrained pipeline twice, and after RL."""
    edits = world.draw_edits(*TEST)
    rows = {
        "goes in": edits.pictures.images,
        f"untrained, strength {POLICY.strength}": images["before"],
        "untrained, best setting": images["untrained_best"],
        "after RL": images["after"],
    }
    save_figure(plot_strip(rows, edits.prompts, SHOWN), PICTURE)


def main() -> None:
    """Train the seeds one after the other."""
    rows = []
    for seed in SEEDS:
        row, images = train(seed)
        rows.append(row)
        if seed == SEEDS[0]:
            draw(images)
    write_json(RESULT, {"machine": machine(), "runs": rows})
    print(f"wrote {RESULT}; now run: python -m benchmarks.tables")


if __name__ == "__main__":
    main()
