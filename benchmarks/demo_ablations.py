"""What each choice of the demo is worth: `python -m benchmarks.demo_ablations`.

Every variant changes one thing of the demo's settings and runs for 10 epochs from the same seed. The judge
reads 200 test pictures now and then; the points go to benchmarks/demo_ablations.csv.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from pathlib import Path
from typing import Any

from diffusers import DDIMScheduler
from tqdm.auto import tqdm

from ddpo_lessons import demo
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.prompts import damaged_handwriting
from ddpo_lessons.rewards import decorruption, digit_legibility
from ddpo_lessons.tiny import load_judge, load_reward_model, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import accuracy
from ddpo_lessons.trainer import ImageDDPOTrainer

RESULT = Path(__file__).parent / "demo_ablations.csv"
EPOCHS = 10
JUDGED_EPOCHS = (1, 5, 10)
# The settings that a variant changes; "last_step", "reward" and "noise_strength" are not the config's.
VARIANTS: dict[str, dict[str, Any]] = {
    "the demo": {},
    "last step trained too": {"last_step": True},
    "no groups": {"sample_group_size": 1},
    "peers' constants": {
        "train_learning_rate": 3e-4,
        "train_clip_range": 1e-4,
        "train_lora_rank": 4,
        "train_lora_alpha": 4,
        "train_lora_target_modules": ("to_k", "to_q", "to_v", "to_out.0"),
    },
    "attention only": {"train_lora_target_modules": ("to_k", "to_q", "to_v", "to_out.0")},
    "more noise": {"noise_strength": 0.34},
    "full fine-tuning": {"train_use_lora": False, "train_learning_rate": 2e-4},
    "reward: closeness": {"reward": "closeness"},
}


def run_variant(name: str, epochs: int, images: int, folder: str) -> list[dict[str, Any]]:
    """Train one variant and return a row for every time that the judge read."""
    changes = dict(VARIANTS[name])
    last_step, reward = changes.pop("last_step", False), changes.pop("reward", "legibility")
    noise_strength = changes.pop("noise_strength", demo.NOISE_STRENGTH)
    pipeline, judge = load_tiny_sd(), load_judge()
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, set_alpha_to_one=not last_step)
    test = world.draw_pictures(images, "test", 0, demo.DAMAGE, demo.SEVERITY)
    settings = {**demo.SETTINGS, **changes, "num_epochs": epochs, "save_freq": epochs, "image_grid_freq": 0}
    rewards = {"legibility": lambda: digit_legibility(load_reward_model()), "closeness": decorruption}
    trainer = ImageDDPOTrainer(
        DDPOConfig(**settings, output_dir=folder, overwrite=True),
        rewards[reward](),
        damaged_handwriting(0, [demo.DAMAGE], [demo.SEVERITY]),
        pipeline,
        noise_strength=noise_strength,
    )
    started, rows = time.perf_counter(), []
    for epoch in range(epochs):
        metrics = trainer.step(epoch)
        if epoch + 1 in JUDGED_EPOCHS:
            restored = demo.restore(pipeline, test.images, noise_strength)
            rows.append(
                {
                    "variant": name,
                    "epoch": epoch + 1,
                    "samples_seen": metrics["samples_seen"],
                    "reward_mean": round(metrics["reward_mean"], 4),
                    "judge": round(accuracy(judge, restored, test.digits), 4),
                    "seconds": round(time.perf_counter() - started, 1),
                }
            )
            tqdm.write(str(rows[-1]))
    return rows


def main() -> None:
    """Run the variants that were asked for and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.variants:
        with tempfile.TemporaryDirectory() as folder:
            rows += run_variant(name, arguments.epochs, arguments.images, folder)
        with open(arguments.output, "w", newline="") as file:  # after each, so that a stop loses nothing
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
