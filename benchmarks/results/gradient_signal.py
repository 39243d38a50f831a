"""Lesson 02: how much of a denoising step's gradient is signal.

    python -m benchmarks.results.gradient_signal --processes 1

Weights stay as they come. A batch is 48 samples of "a three", as many as an epoch of `orders.py` has, in
eight denoising steps, of which seven have noise. Ten batches of a seed share the policy, and differ in every
random number. For two rewards gradient_signal.csv has a row per seed and step: the mean cosine between the
gradients of two batches, which is 1 if all of a gradient repeats and 0 if it is noise, and the mean length.
The rows "first three", "last three" and "all seven" are about the sum of these steps' gradients.
"""

from pathlib import Path

import torch

from benchmarks.common import Row, parse, redness, run_all
from benchmarks.results.clocks import PROMPT, Policy, column
from ddpo_lessons.advantages import normalize
from ddpo_lessons.rewards import jpeg_compressibility

RESULT = Path(__file__).with_suffix(".csv")
COLUMNS = ("seed", "reward", "steps", "cosine", "length")
SEEDS, BATCHES, SAMPLES = (1, 2, 3, 4, 5), 10, 48
REWARDS = {"redness": redness, "compressibility": jpeg_compressibility()}
PARTS = {"first three": slice(0, 3), "last three": slice(-3, None), "all seven": slice(None)}


def gradients(policy: Policy, seed: int) -> torch.Tensor:
    """Return the gradients of one batch, (R, T, P): of each reward, of each step's forward pass."""
    images, made, samples = policy.rollout(seed, SAMPLES)
    asked = images, [PROMPT] * SAMPLES, [{}] * SAMPLES
    advantages = [normalize(reward(*asked)) for reward in REWARDS.values()]  # (B,) each
    steps = []
    for j in range(made.num_steps):
        ratio = policy.log_ratio(made, column(samples, j)).exp()  # (B,)
        steps.append([policy.gradient(-(a * ratio).mean()) for a in advantages])
    return torch.stack([torch.stack(step) for step in steps], dim=1)


def mean_cosine(vectors: torch.Tensor) -> float:
    """Return the mean cosine between two different ones of N vectors (N, P)."""
    units = torch.nn.functional.normalize(vectors.double(), dim=1)
    count = len(units)
    return float((units.sum(0).square().sum() - count) / (count * (count - 1)))


def measure(run: Row) -> list[Row]:
    policy, (seed,) = Policy(), run.values()
    found = torch.stack([gradients(policy, 1000 * seed + n) for n in range(BATCHES)])  # (N, R, T, P)
    timesteps = policy.family.schedule(8).timesteps[: found.shape[2]].tolist()
    rows = list[Row]()
    for number, reward in enumerate(REWARDS):
        ours = found[:, number]  # (N, T, P)
        parts = {str(t): ours[:, j] for j, t in enumerate(timesteps)}
        parts |= {name: ours[:, part].sum(1) for name, part in PARTS.items()}
        rows += [
            {"reward": reward, "steps": name, "cosine": mean_cosine(g), "length": g.norm(dim=1).mean().item()}
            for name, g in parts.items()
        ]
    return rows


if __name__ == "__main__":
    run_all(measure, [{"seed": seed} for seed in SEEDS], COLUMNS, RESULT, parse(__doc__).processes)
