"""Train tiny-sd on redness with PPO's clipping and without: `python -m benchmarks.results.clipping`.

There are two learning rates, one and four inner epochs, ten epochs and three seeds, and then five new seeds
until redness has passed 0.5: with four inner epochs at 2e-4 and at half and twice that learning rate, and
with one inner epoch at 2e-4.
clipping.csv has a row per evaluated epoch; epoch 0 is before training. `redness` and `readable` (the fraction
of correct digits by the evaluator) are of 100 images, from first noise of each seed's own; `median` and `low`
(5% quantile) are of the redness. The other columns are about the epoch's 224 actions after its last optimizer
step: the root mean square of their mean shift d, the means of log ρ and of (log ρ)²/2, the fraction of ρ
outside the clip range, and the fraction of actions whose gradient the clip removes (or would remove). Images
of two runs of seed 0 go to clipping_*.png, a row per epoch; images/draw_04_ppo_clipping.py draws all of it.
"""

import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, draw, parse, product, readings, redness, run_all, save_grid, trainer_of
from ddpo_lessons.algorithms.algorithm import Learner, Samples
from ddpo_lessons.algorithms.ddpo import DDPO, replay, share_predictions
from ddpo_lessons.ppo import clipped_loss, ratio_stats
from ddpo_lessons.worlds import digits, load_tiny_sd

RESULT = Path(__file__).with_suffix(".csv")
COLUMNS = (
    "variant", "learning_rate", "inner_epochs", "seed", "epoch", "redness", "readable", "median",
    "low", "shift", "log_ratio", "approx_kl", "outside", "halted",
)  # fmt: skip
CLIP_RANGE, EPOCHS, IMAGES = 5e-3, 10, 100
EVALUATED = (1, 2, 3, 5, 7, 10)  # after these epochs
NEW_SEEDS = (3, 4, 5, 6, 7)  # to test the findings of the first three
# Of each learning rate and number of inner epochs: within them redness passes 0.5 in most runs.
NEW_EPOCHS = {(2e-4, 4): 5, (4e-4, 4): 3, (1e-4, 4): 5, (2e-4, 1): 7}
SETTINGS: Row = {
    "sample_num_steps": 8, "sample_guidance_scale": 1.0, "sample_batch_size": 32,
    "sample_num_batches_per_epoch": 1, "train_batch_size": 8, "train_use_lora": False, "image_grid_freq": 0,
    "num_epochs": EPOCHS, "accelerator_kwargs": {"cpu": True},
}  # fmt: skip


class Loss(DDPO):
    """DDPO with or without clipping, which also measures how far each epoch moved its actions."""

    def __init__(self, clips: bool) -> None:
        self.clips, self.moved = clips, dict[str, float]()

    def steps(self, samples: Samples, learner: Learner) -> Any:
        if samples.epoch + 1 not in EVALUATED:
            yield from super().steps(samples, learner)
            return
        trajectory = samples.trajectory
        rows, columns = torch.meshgrid(*map(torch.arange, trajectory.log_probs.shape), indexing="ij")
        pairs = share_predictions({"rows": rows.flatten(), "columns": columns.flatten()}, 1)
        before = self._replay(learner, samples, pairs)
        yield from super().steps(samples, learner)
        after = self._replay(learner, samples, pairs)
        shift = (after.mean - before.mean).flatten(1) / after.std[:, None]  # (N, D) of every number, in σ
        log_ratio = after.log_prob - trajectory.log_probs.flatten()  # (N,)
        stats, advantages = ratio_stats(log_ratio, CLIP_RANGE), samples.advantages[pairs["rows"]]
        wanted = log_ratio * advantages > 0  # (N,) moved in the direction of its advantage
        self.moved = {
            "shift": shift.square().mean().sqrt().item(), "log_ratio": log_ratio.mean().item(),
            "approx_kl": stats.approx_kl.item(), "outside": stats.clip_fraction.item(),
            "halted": (wanted & ((stats.ratio - 1).abs() > CLIP_RANGE)).float().mean().item(),
        }  # fmt: skip

    @torch.no_grad()
    def _replay(self, learner: Any, samples: Samples, pairs: Any) -> Any:
        return replay(self.family, learner.denoiser, samples.trajectory, pairs, "mean")

    def loss(self, samples: Any, learner: Any, denoiser: Any, pairs: Any) -> Any:
        new = replay(self.family, denoiser, samples.trajectory, pairs, "mean").log_prob
        log_ratio = new - samples.trajectory.log_probs[pairs["rows"], pairs["columns"]]  # (N,)
        advantages = samples.advantages[pairs["rows"]].clamp(-5, 5)  # (N,)
        return clipped_loss(log_ratio.exp(), advantages, CLIP_RANGE if self.clips else 1e9).mean(), {}


def look(pipeline: Any, seed: int) -> tuple[torch.Tensor, Row]:
    """Generate the images that a seed is evaluated on after every epoch, and measure them."""
    asked = [f"a {digits.DIGITS[row % 10]}" for row in range(IMAGES)]
    images = draw(pipeline, asked, seed, 99, num_inference_steps=8)
    right = digits.Judge.load()(images).argmax(1) == torch.arange(IMAGES) % 10  # (100,)
    red = redness(images)  # (100,)
    low, median = red.quantile(torch.tensor([0.05, 0.5])).tolist()
    return images, {
        "redness": red.mean().item(), "readable": right.float().mean().item(), "median": median, "low": low,
    }  # fmt: skip


def train(run: Row) -> list[Row]:
    learning_rate, inner_epochs, seed, variant = run.values()
    pipeline, algorithm, strips = load_tiny_sd(), Loss(variant == "clipped"), list[torch.Tensor]()

    def measure() -> Row:
        images, found = look(pipeline, seed)
        strips.append(images[:10])
        return {**found, **algorithm.moved}

    task = (redness, lambda: (f"a {random.choice(digits.DIGITS)}", {}), pipeline)
    own = {"train_learning_rate": learning_rate, "train_num_inner_epochs": inner_epochs, "seed": seed}
    with trainer_of(task, SETTINGS, own, algorithm=algorithm) as trainer:
        last = NEW_EPOCHS[learning_rate, inner_epochs] if seed in NEW_SEEDS else EPOCHS
        rows = readings(trainer, [0, *(epoch for epoch in EVALUATED if epoch <= last)], measure)
    if (seed, learning_rate, inner_epochs) == (0, 2e-4, 4):
        name = f"clipping_{variant.replace(' ', '_')}.png"
        save_grid(torch.cat(strips), 10, RESULT.with_name(name))  # a row per epoch
    return rows


if __name__ == "__main__":
    both = ("clipped", "not clipped")
    runs = product(learning_rate=(2e-4, 5e-5), inner_epochs=(4, 1), seed=(0, 1, 2), variant=both)
    runs += product(learning_rate=[2e-4], inner_epochs=[4], seed=NEW_SEEDS, variant=both)
    for seed in NEW_SEEDS:
        runs += product(learning_rate=(4e-4, 1e-4), inner_epochs=[4], seed=[seed], variant=both)
    runs += product(learning_rate=[2e-4], inner_epochs=[1], seed=NEW_SEEDS, variant=both)
    run_all(train, runs, COLUMNS, RESULT, parse(__doc__).processes)
