"""What a learned value buys DDPO: `python -m benchmarks.text.bridge`.

DDPO gives every step of a trajectory the same advantage, its normalised reward. Text PPO learns a value and
spreads the reward with GAE. Here tiny-sd learns to paint red from prompts that name no colour, with either:
the plain trainer, and one with a small value network at two λ. Each from the same three seeds; points go to
bridge.csv.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import Row, quiet_thread, redness, scratch_config, write_rows
from ddpo_lessons.advantages import gae, masked_whiten
from ddpo_lessons.algorithms.base import Learner, Pairs, Samples
from ddpo_lessons.algorithms.ddpo import DDPO, replay
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.ppo import clipped_surrogate
from ddpo_lessons.rollout import Trajectory
from ddpo_lessons.tiny import load_tiny_sd, world
from ddpo_lessons.trainer import Runner

SEEDS, EPOCHS, STEPS = (0, 1, 2), 10, 8
VARIANTS = {"DDPO: one advantage": None, "value, λ = 0.95": 0.95, "value, λ = 1": 1.0}
VALUE_STEPS, VALUE_RATE = 40, 1e-3
SETTINGS: Row = {
    "sample_num_steps": STEPS,
    "sample_guidance_scale": 1.0,
    "sample_batch_size": 32,
    "sample_num_batches_per_epoch": 1,
    "train_batch_size": 8,
    "train_use_lora": False,
    "train_learning_rate": 1e-4,
    "train_clip_range": 5e-3,
    "image_grid_freq": 0,
}


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


class ValueDDPO(DDPO):
    """DDPO whose advantages come from a value network and GAE, as in PPO for text."""

    def __init__(self, lam: float) -> None:
        self.lam = lam

    def begin(self, config: DDPOConfig, family: Any, num_train_timesteps: int) -> None:
        super().begin(config, family, num_train_timesteps)
        unet = family.denoiser.config
        self.values = ValueNetwork(unet.in_channels * unet.sample_size**2, unet.cross_attention_dim)
        self.value_optimizer = torch.optim.Adam(self.values.parameters(), lr=VALUE_RATE)

    def advantages(self, rewards: torch.Tensor, keys: Any) -> torch.Tensor:
        return rewards  # raw: a value predicts rewards, not their rank within an epoch

    def update(self, samples: Samples, learner: Learner) -> None:
        trajectory, scores = samples.trajectory, samples.advantages
        rewards = torch.zeros(trajectory.timesteps.shape)  # (B, T)
        rewards[:, -1] = scores
        with torch.no_grad():
            values = self.values(trajectory)
        advantages, returns = gae(rewards, values, gamma=1.0, lam=self.lam)
        targets = scores[:, None].expand_as(values)
        self.explained = 1 - (targets - values).var(0) / targets.var(0)  # (T,) what the value knew
        for _ in range(VALUE_STEPS):
            loss = (self.values(trajectory) - returns).square().mean()
            self.value_optimizer.zero_grad()
            loss.backward()
            self.value_optimizer.step()
        super().update(replace(samples, advantages=masked_whiten(advantages)), learner)

    def loss(self, samples: Samples, learner: Learner, denoiser: Any, pairs: Pairs) -> Any:
        config, own = self.config, (pairs["rows"], pairs["columns"])
        new = replay(self.family, denoiser, samples.trajectory, pairs, "mean").log_prob
        old, advantages = samples.trajectory.log_probs[own], samples.advantages[own]  # (N,)
        limits = config.train_clip_range, config.train_adv_clip_max
        return clipped_surrogate(new, old, advantages, *limits)[0], {}


def run(variant: str, seed: int) -> list[Row]:
    lam, rows = VARIANTS[variant], list[Row]()
    algorithm = DDPO() if lam is None else ValueDDPO(lam)
    with scratch_config(SETTINGS, seed=seed) as config:
        torch.manual_seed(seed)
        task: Any = (redness, lambda: (f"a {random.choice(world.DIGITS)}", {}), load_tiny_sd())
        trainer = Runner(config, *task, algorithm=algorithm, start=FromNoise())
        for epoch in range(EPOCHS):
            reward = trainer.step(epoch)["reward_mean"]
            first, *_, last = algorithm.explained.tolist() if isinstance(algorithm, ValueDDPO) else ("", "")
            row = {"variant": variant, "seed": seed, "epoch": epoch + 1, "reward": reward}
            rows.append({**row, "first": first, "last": last})
    print(variant, seed, [round(row["reward"], 3) for row in rows], flush=True)
    return rows


def main() -> None:
    quiet_thread()
    rows = [row for seed in SEEDS for variant in VARIANTS for row in run(variant, seed)]
    write_rows(Path(__file__).with_suffix(".csv"), rows)


if __name__ == "__main__":
    main()
