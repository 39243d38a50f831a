"""Lesson 02: which denoising steps to train on, in which order: reward curves of every order.

    python -m benchmarks.results.orders --processes 1

tiny-sd generates "a three" in eight denoising steps, of which T = 7 have noise; 48 samples per epoch. Two
rewards: redness, at two learning rates, and a small size as a JPEG, each with three seeds; and then redness
with five new seeds, at the first of these learning rates and at a higher one. An order decides which (sample,
step) pairs an epoch trains on: three of the seven steps of each sample, or all. An epoch has four optimizer
steps.

orders.csv has a row per run and epoch: the mean reward of fresh samples after so many epochs of training, and
in the last row the fraction of them that the evaluator recognizes as a three. Finished runs are skipped. Ten
seconds of CPU time per run on one thread.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, product, redness, run_all, trainer_of
from ddpo_lessons.algorithms.ddpo import DDPO, share_predictions
from ddpo_lessons.rewards import jpeg_compressibility
from ddpo_lessons.rollout import sample_seed
from ddpo_lessons.worlds import digits, load_tiny_sd

RESULT = Path(__file__).with_suffix(".csv")
COLUMNS = ("reward", "learning_rate", "order", "seed", "epoch", "mean_reward", "judge")
PROMPT, DIGIT, EPOCHS = "a three", 3, 6
SEEDS, NEW_SEEDS = (0, 1, 2), (11, 12, 13, 14, 15)  # the new ones test the findings of the first three
REWARDS: dict[str, Callable[[], Any]] = {"redness": lambda: redness, "compressibility": jpeg_compressibility}
SETTINGS: Row = {
    "sample_num_steps": 8, "sample_guidance_scale": 1.0, "sample_batch_size": 48,
    "sample_num_batches_per_epoch": 1, "train_batch_size": 12, "train_micro_batch_size": 42,
    "train_clip_range": 5e-3, "train_lora_rank": 16, "train_lora_alpha": 16,
    "image_grid_freq": 0, "accelerator_kwargs": {"cpu": True},
}  # fmt: skip
Columns = Callable[[int, int, torch.Generator], torch.Tensor]  # (B, T, generator) -> (B, K)


def in_time(first: int, last: int, samples: int, steps: int, generator: torch.Generator) -> torch.Tensor:
    """Return the same steps for every sample, in time order."""
    return torch.arange(steps)[first:last].expand(samples, -1)


def shared(kept: int, samples: int, steps: int, generator: torch.Generator) -> torch.Tensor:
    """Return the first steps of one random order for all samples."""
    return torch.randperm(steps, generator=generator)[:kept].expand(samples, -1)


def individual(kept: int, samples: int, steps: int, generator: torch.Generator) -> torch.Tensor:
    """Return the first steps of each sample's own random order."""
    return torch.stack([torch.randperm(steps, generator=generator)[:kept] for _ in range(samples)])


ORDERS: dict[str, Columns] = {
    "first three": partial(in_time, 0, 3), "last three": partial(in_time, 4, 7),
    "three, shared order": partial(shared, 3), "three, individual orders": partial(individual, 3),
    "all seven": partial(individual, 7),
}  # fmt: skip


class OrderedDDPO(DDPO):
    """DDPO whose optimizer steps train on the pairs of an order."""

    def __init__(self, order: str) -> None:
        self.order = order

    def steps(self, samples: Any, learner: Any) -> Any:
        generator = torch.Generator().manual_seed(sample_seed(self.config.seed, samples.epoch, 2))
        count, steps = samples.trajectory.log_probs.shape
        rows = torch.randperm(count, generator=generator)  # (B,)
        columns = ORDERS[self.order](count, steps, generator)  # (B, K)
        kept, size = columns.shape[1], self.config.train_batch_size
        for some, theirs in zip(rows.split(size), columns.split(size), strict=True):
            pairs = {"rows": some.repeat_interleave(kept), "columns": theirs.flatten()}
            parts = [share_predictions(part, 1) for part in learner.split(pairs)]
            yield partial(self.loss, samples, learner), parts


def train(run: Row) -> list[Row]:
    task = (REWARDS[run["reward"]](), lambda: (PROMPT, {}), load_tiny_sd())
    own = {"seed": run["seed"], "train_learning_rate": run["learning_rate"]}
    with trainer_of(task, SETTINGS, own, algorithm=OrderedDDPO(run["order"])) as trainer:
        means = [trainer.step(epoch)["reward_mean"] for epoch in range(EPOCHS)]
        ((images, _, _, rewards, _),), _, _ = trainer.sampler.sample(EPOCHS, trainer.contexts.of(EPOCHS))
    read = (digits.Judge.load()(images).argmax(1) == DIGIT).float().mean().item()
    rows: list[Row] = [{"epoch": epoch, "mean_reward": mean} for epoch, mean in enumerate(means)]
    return [*rows, {"epoch": EPOCHS, "mean_reward": rewards.mean().item(), "judge": read}]


if __name__ == "__main__":
    tasks = [("redness", 3e-3, SEEDS), ("compressibility", 3e-3, SEEDS), ("redness", 1e-3, SEEDS)]
    tasks += [("redness", rate, NEW_SEEDS) for rate in (3e-3, 1e-2)]
    runs = [
        {"reward": reward, "learning_rate": rate, **run}
        for reward, rate, seeds in tasks
        for run in product(seed=seeds, order=ORDERS)
    ]
    run_all(train, runs, COLUMNS, RESULT, parse(__doc__).processes)
