"""What clipping decides: `python -m benchmarks.results.clipping` teaches tiny-sd red, with it and without.

Four inner epochs, three seeds. A row per run goes to clipping.csv: the largest KL estimate of an optimizer
step, and after the last epoch the redness of 100 pictures and the share whose digit a judge reads, from
starts of each seed's own. Pictures of seed 0 go to clipping_*.png; images/draw_04_ppo_clipping.py draws both.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, redness, run_all, scratch_config
from ddpo_lessons.algorithms.ddpo import DDPO, replay
from ddpo_lessons.data.images import image_grid
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.ppo import clipped_loss, ratio_stats
from ddpo_lessons.rollout import sample_seed, text2img_rollout
from ddpo_lessons.tiny import load_judge, load_tiny_sd, world
from ddpo_lessons.trainer import Runner

RESULT = Path(__file__).with_suffix(".csv")
COLUMNS = ("variant", "seed", "approx_kl", "redness", "judge")
CLIP_RANGE, EPOCHS, PICTURES = 5e-3, 5, 100
SETTINGS: Row = {
    "sample_num_steps": 8, "sample_guidance_scale": 1.0, "sample_batch_size": 32,
    "sample_num_batches_per_epoch": 1, "train_batch_size": 8, "train_num_inner_epochs": 4,
    "train_use_lora": False, "train_learning_rate": 2e-4, "image_grid_freq": 0,
    "accelerator_kwargs": {"cpu": True},
}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    variant: str  # "before training", "clipped" or "not clipped"
    seed: int


class Loss(DDPO):
    """DDPO that may leave out the clip, and keeps the KL estimates."""

    def __init__(self, clips: bool) -> None:
        self.clips, self.kl = clips, list[float]()

    def loss(self, samples: Any, learner: Any, denoiser: Any, pairs: Any) -> Any:
        new = replay(self.family, denoiser, samples.trajectory, pairs, "mean").log_prob
        log_ratio = new - samples.trajectory.log_probs[pairs["rows"], pairs["columns"]]  # (N,)
        self.kl.append(ratio_stats(log_ratio.detach(), CLIP_RANGE).approx_kl.item())
        advantages = samples.advantages[pairs["rows"]].clamp(-5, 5)  # (N,)
        return clipped_loss(log_ratio.exp(), advantages, CLIP_RANGE if self.clips else 1e9).mean(), {}


def train(run: Variant) -> list[Row]:
    pipeline, algorithm = load_tiny_sd(), Loss(run.variant == "clipped")
    with scratch_config(SETTINGS, seed=run.seed) as config:
        task: Any = (redness, lambda: (f"a {random.choice(world.DIGITS)}", {}), pipeline)
        trainer = Runner(config, *task, algorithm=algorithm, start=FromNoise())
        for epoch in range(0 if run.variant == "before training" else EPOCHS):
            trainer.step(epoch)
    noise = [torch.Generator().manual_seed(sample_seed(run.seed, 99, row)) for row in range(PICTURES)]
    asked = [f"a {world.DIGITS[row % 10]}" for row in range(PICTURES)]
    images = text2img_rollout(pipeline, asked, num_inference_steps=8, guidance_scale=1.0, generator=noise)[0]
    read = (load_judge()(images).argmax(1) == torch.arange(PICTURES) % 10).float().mean().item()
    if run.seed == 0:
        name = f"clipping_{run.variant.replace(' ', '_')}.png"
        image_grid(images[:20], 10, scale=1).save(RESULT.with_name(name))
    found = {"approx_kl": max(algorithm.kl, default=""), "redness": redness(images).mean().item()}
    return [{**vars(run), **found, "judge": read}]


if __name__ == "__main__":
    names = ("before training", "clipped", "not clipped")
    compared = [Variant(name, seed) for seed in (0, 1, 2) for name in names]
    run_all(train, compared, COLUMNS, 2, RESULT, parse(__doc__).processes)
