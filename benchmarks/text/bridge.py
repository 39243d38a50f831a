"""What replaces GAE in DDPO: `python -m benchmarks.text.bridge`.

DDPO gives every step of a trajectory the same advantage, its normalized reward. Here tiny-sd is trained on
redness, from prompts that name no color, with five kinds of advantages: DDPO's; those of a small value
network and GAE; the image's one advantage times fixed weights that fall, or rise, linearly over the steps;
and branching's, for one action per image, in groups of eight. There are four learning rates and five seeds.
Each epoch's reward and the sizes of the steps' advantages go to bridge.csv, appended run by run; finished
runs are skipped. At the two lower learning rates the file also has seeds 0 to 2.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import Row, parse, product, redness, run_all, trainer_of
from ddpo_lessons.advantages import gae, masked_whiten
from ddpo_lessons.algorithms.algorithm import Learner, Samples
from ddpo_lessons.algorithms.branching import Branching
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.rollout import Trajectory
from ddpo_lessons.worlds import digits, load_tiny_sd

SEEDS, EPOCHS, STEPS = (3, 4, 5, 6, 7), 10, 8
LEARNING_RATES = (1e-4, 2e-4, 4e-4, 8e-4)
LAM, VALUE_STEPS, VALUE_RATE = 0.95, 40, 1e-3
WEIGHTS = tuple(f"weight {step}" for step in range(1, STEPS))  # the last denoising step adds no noise
COLUMNS = ("variant", "learning_rate", "seed", "epoch", "reward", "first", "last", *WEIGHTS)
SETTINGS: Row = {
    "sample_num_steps": STEPS, "sample_guidance_scale": 1.0, "sample_batch_size": 32,
    "sample_num_batches_per_epoch": 1, "train_batch_size": 8, "train_use_lora": False,
    "train_clip_range": 5e-3, "image_grid_freq": 0,
}  # fmt: skip


class ValueNetwork(nn.Module):
    """The expected reward of a state (latents, timestep, prompt): two layers on all of it."""

    def __init__(self, latent_numel: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(latent_numel + width + STEPS, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, trajectory: Trajectory) -> torch.Tensor:
        """Return values (B, T) of the states that actions were taken in."""
        batch, steps = trajectory.timesteps.shape
        latents = trajectory.latents[:, :-1].flatten(2)  # (B, T, C h w)
        prompts = trajectory.conditioning["prompt_embeds"].mean(1, keepdim=True)  # (B, 1, D)
        clock = torch.eye(STEPS)[:steps].expand(batch, -1, -1)  # (B, T, STEPS)
        return self.layers(torch.cat([latents, prompts.expand(-1, steps, -1), clock], dim=2)).squeeze(-1)


class PerStep(DDPO):
    """DDPO whose advantages are (B, T): one for every step of an image.

    Attributes:
        sizes: root mean square of each step's advantages in the last epoch, (T,). explained: fraction of the
        reward's variance that a value predicted before each step, (T,), if there is one.
    """

    explained: torch.Tensor | None = None

    def spread(self, samples: Samples) -> torch.Tensor:
        raise NotImplementedError

    def steps(self, samples: Samples, learner: Learner) -> Any:
        advantages = self.spread(samples)
        self.sizes = advantages.square().mean(0).sqrt()
        return super().steps(replace(samples, advantages=advantages), learner)


class WeightedDDPO(PerStep):
    """The image's one advantage times fixed weights, in a straight line and of mean square 1."""

    def __init__(self, falling: bool) -> None:
        self.falling = falling

    def spread(self, samples: Samples) -> torch.Tensor:
        weights = torch.arange(samples.trajectory.num_steps, 0, -1).float()  # (T,) T, T - 1, ... 1
        weights = weights / weights.square().mean().sqrt()
        return samples.advantages[:, None] * (weights if self.falling else weights.flip(0))


class ValueDDPO(PerStep):
    """Advantages from a value network and GAE, as in PPO for text."""

    def begin(self, config: DDPOConfig, family: Any, num_train_timesteps: int) -> None:
        super().begin(config, family, num_train_timesteps)
        unet = family.denoiser.config
        self.values = ValueNetwork(unet.in_channels * unet.sample_size**2, unet.cross_attention_dim)
        self.value_optimizer = torch.optim.Adam(self.values.parameters(), lr=VALUE_RATE)

    def advantages(self, rewards: torch.Tensor, keys: Any) -> torch.Tensor:
        return rewards  # raw: a value predicts rewards, not their rank within an epoch

    def spread(self, samples: Samples) -> torch.Tensor:
        trajectory, scores = samples.trajectory, samples.advantages
        rewards = torch.zeros(trajectory.timesteps.shape)  # (B, T)
        rewards[:, -1] = scores
        with torch.no_grad():
            values = self.values(trajectory)
        advantages, returns = gae(rewards, values, gamma=1.0, lam=LAM)
        targets = scores[:, None].expand_as(values)
        self.explained = 1 - (targets - values).var(0) / targets.var(0)
        for _ in range(VALUE_STEPS):
            loss = (self.values(trajectory) - returns).square().mean()
            self.value_optimizer.zero_grad()
            loss.backward()
            self.value_optimizer.step()
        return masked_whiten(advantages)


VARIANTS: dict[str, Callable[[], DDPO]] = {
    "one advantage": DDPO, "falling": lambda: WeightedDDPO(falling=True), "value": ValueDDPO,
    "rising": lambda: WeightedDDPO(falling=False), "branching": Branching,
}  # fmt: skip


def train(run: Row) -> list[Row]:
    algorithm, rows = VARIANTS[run["variant"]](), list[Row]()
    own: Row = {"train_learning_rate": run["learning_rate"], "seed": run["seed"]}
    own |= {"sample_group_size": 8} if run["variant"] == "branching" else {}
    torch.manual_seed(run["seed"])
    task = (redness, lambda: (f"a {random.choice(digits.DIGITS)}", {}), load_tiny_sd())
    with trainer_of(task, SETTINGS, own, algorithm=algorithm) as trainer:
        for epoch in range(EPOCHS):
            row = {"epoch": epoch + 1, "reward": trainer.step(epoch)["reward_mean"]}
            if isinstance(algorithm, PerStep):
                row |= dict(zip(WEIGHTS, algorithm.sizes.tolist(), strict=True))
                if algorithm.explained is not None:
                    row |= {"first": algorithm.explained[0].item(), "last": algorithm.explained[-1].item()}
            rows.append(row)
    return rows


if __name__ == "__main__":
    runs = product(variant=VARIANTS, learning_rate=LEARNING_RATES, seed=SEEDS)
    run_all(train, runs, COLUMNS, Path(__file__).with_suffix(".csv"), parse(__doc__).processes)
