"""Lesson 03: which log-prob carries a learning signal? `python -m benchmarks.results.log_probs`.

tiny-sd is trained on redness, with one optimizer step per 32 rollouts of "a three", and three seeds. The loss
takes the log-prob of the stored action, of a resampled action, or of the stored action with a gradient of its
own ("attached"). log_probs.csv has a row per optimizer step, measured on 64 images from the same noise:
redness, the fraction that the evaluator recognizes as a three, and the mean log-prob of their own steps.
`images/draw_03_ddim_log_probs.py` draws it.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, parse, product, redness, run_all
from ddpo_lessons.ddim import gaussian_log_prob
from ddpo_lessons.models import Family, family_of
from ddpo_lessons.rollout import SamplingSettings, Trajectory, sample_seed, text2img_rollout
from ddpo_lessons.worlds import digits, load_tiny_sd

RESULT = Path(__file__).with_suffix(".csv")
COLUMNS = ("action", "seed", "steps", "redness", "threes", "log_prob")
ACTIONS = ("stored", "resampled", "attached")
STEPS, ROLLOUTS, IMAGES, LEARNING_RATE = 10, 32, 64, 3e-4


def roll_out(pipeline: Any, count: int, *seed: int) -> tuple[torch.Tensor, Trajectory]:
    generator = torch.Generator().manual_seed(sample_seed(*seed))
    settings = SamplingSettings(num_inference_steps=10, guidance_scale=1.0)
    return text2img_rollout(pipeline, ["a three"] * count, settings, generator=generator)


def score(
    family: Family, rolled: Trajectory, k: int, action: str, generator: torch.Generator
) -> torch.Tensor:
    """Return the log-probs (B,) that the loss uses for action k."""
    t, x_t, stored = rolled.timesteps[:, k], rolled.latents[:, k], rolled.latents[:, k + 1]
    output = family.predict(family.denoiser, x_t, t, rolled.conditioning, 1.0)  # (B, C, h, w)
    if action == "resampled":
        z = torch.randn(x_t.shape, generator=generator)
        return rolled.schedule.step(output, t, x_t, noise=z).log_prob
    step = rolled.schedule.step(output, t, x_t, prev_sample=stored)
    if action == "stored":
        return step.log_prob
    noise = (stored - step.mean).detach()  # σ z
    return gaussian_log_prob(step.mean + noise, step.mean, step.std, "mean")


def train(run: Row) -> list[Row]:
    pipeline, judge, rows = load_tiny_sd(), digits.Judge.load(), list[Row]()
    family = family_of(pipeline)
    optimizer = torch.optim.Adam(pipeline.unet.parameters(), lr=LEARNING_RATE)
    fresh = torch.Generator().manual_seed(sample_seed(run["seed"], -1))
    for done in range(STEPS + 1):
        images, seen = roll_out(pipeline, IMAGES, 99)
        threes = (judge(images).argmax(1) == 3).float().mean().item()
        found = {"redness": redness(images).mean().item(), "log_prob": seen.log_probs.mean().item()}
        rows.append({"steps": done, **found, "threes": threes})
        images, rolled = roll_out(pipeline, ROLLOUTS, run["seed"], done)
        rewards = redness(images)  # (B,)
        advantages = (rewards - rewards.mean()) / rewards.std()
        optimizer.zero_grad()
        for k in range(rolled.num_steps):
            log_probs = score(family, rolled, k, run["action"], fresh)
            (-(advantages * log_probs).mean()).backward()
        optimizer.step()
    return rows


if __name__ == "__main__":
    run_all(train, product(seed=(0, 1, 2), action=ACTIONS), COLUMNS, RESULT, parse(__doc__).processes)
