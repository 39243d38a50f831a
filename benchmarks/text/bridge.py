"""What a learned value buys DDPO: `python -m benchmarks.text.bridge`.

DDPO gives every step of a trajectory the same advantage, its normalised reward. Text PPO learns a value and
spreads the reward with GAE. Here tiny-sd learns to paint red from prompts that name no colour, with either:
the plain trainer, and one with a small value network at two λ. Each from the same three seeds; points go to
bridge.csv.
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from torch import nn

from benchmarks.common import write_rows
from ddpo_lessons.advantages import gae, masked_whiten
from ddpo_lessons.algorithms.base import Learner, Pairs, Samples
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.rollout import Trajectory
from ddpo_lessons.tiny import load_tiny_sd, world
from ddpo_lessons.trainer import Runner

SEEDS, EPOCHS, STEPS, SAMPLES = (0, 1, 2), 10, 8, 32
VARIANTS: dict[str, float | None] = {
    "DDPO: one advantage": None,
    "value, λ = 0.95": 0.95,
    "value, λ = 1": 1.0,
}
VALUE_STEPS, VALUE_RATE = 40, 1e-3


def draw_prompt() -> tuple[str, dict[str, Any]]:
    return f"a {random.choice(world.DIGITS)}", {}


def redness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    red, green, blue = images.mean((2, 3)).unbind(1)
    return red - (green + blue) / 2


class ValueNetwork(nn.Module):
    """The expected reward of a state (latents, timestep, prompt): two layers on all of it."""

    def __init__(self, latent_numel: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(latent_numel + width + STEPS, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, trajectory: Trajectory) -> torch.Tensor:
        """Return values (B, T) of the states that actions were taken in."""
        batch, time_steps = trajectory.timesteps.shape
        latents = trajectory.latents[:, :-1].flatten(2)  # (B, T, C h w)
        prompts = (
            trajectory.conditioning["prompt_embeds"].mean(1, keepdim=True).expand(-1, time_steps, -1)
        )  # (B, T, D)
        clock = torch.eye(STEPS)[:time_steps].expand(batch, -1, -1)  # (B, T, STEPS)
        return self.layers(torch.cat([latents, prompts, clock], dim=2)).squeeze(-1)


class PairAdvantages:
    """Advantages (B, T) that answer `advantages[rows]` with those of the pairs in question."""

    def __init__(self, advantages: torch.Tensor, columns: torch.Tensor) -> None:
        self.advantages, self.columns = advantages, columns

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.advantages[rows, self.columns]


class ValueDDPO(DDPO):
    """DDPO whose advantages come from a value network and GAE, as in PPO for text."""

    def __init__(self, lam: float) -> None:
        self.lam = lam
        self.explained: list[float] = []

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
        left = (targets - values).var(0) / targets.var(0)  # (T,) what the value did not know
        self.explained = (1 - left).tolist()
        for _ in range(VALUE_STEPS):
            loss = (self.values(trajectory) - returns).square().mean()
            self.value_optimizer.zero_grad()
            loss.backward()
            self.value_optimizer.step()
        super().update(replace(samples, advantages=masked_whiten(advantages)), learner)

    def loss(
        self, samples: Samples, learner: Learner, denoiser: Any, pairs: Pairs
    ) -> tuple[torch.Tensor, Any]:
        own: Any = PairAdvantages(samples.advantages, pairs["columns"])
        return super().loss(replace(samples, advantages=own), learner, denoiser, pairs)


def run(variant: str, seed: int, folder: str, epochs: int) -> list[dict[str, Any]]:
    lam = VARIANTS[variant]
    config = DDPOConfig(
        output_dir=folder,
        seed=seed,
        num_epochs=epochs,
        sample_num_steps=STEPS,
        sample_guidance_scale=1.0,
        sample_batch_size=SAMPLES,
        sample_num_batches_per_epoch=1,
        train_batch_size=8,
        train_use_lora=False,
        train_learning_rate=1e-4,
        train_clip_range=5e-3,
        image_grid_freq=0,
    )
    torch.manual_seed(seed)
    arguments = (config, redness, draw_prompt, load_tiny_sd())
    algorithm = DDPO() if lam is None else ValueDDPO(lam)
    trainer = Runner(*arguments, algorithm=algorithm, start=FromNoise())
    rows = []
    for epoch in range(epochs):
        started = time.process_time()
        metrics = trainer.step(epoch)
        explained = getattr(algorithm, "explained", [])
        row = {"variant": variant, "seed": seed, "epoch": epoch + 1, "reward": metrics["reward_mean"]}
        row["first"] = explained[0] if explained else ""
        row["last"] = explained[-1] if explained else ""
        rows.append({**row, "cpu_seconds": time.process_time() - started})
    print(variant, seed, [round(row["reward"], 3) for row in rows], flush=True)
    return rows


def main() -> None:
    diffusers_logging.disable_progress_bar()
    rows = []
    for seed in SEEDS:
        for variant in VARIANTS:
            with tempfile.TemporaryDirectory() as folder:
                rows += run(variant, seed, folder, EPOCHS)
    write_rows(Path(__file__).with_suffix(".csv"), rows)


if __name__ == "__main__":
    main()
