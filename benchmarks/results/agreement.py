"""Do the gradients of separate epochs agree? Without guidance and with it, for lesson 06.

`python -m benchmarks.results.agreement` samples eight epochs of 64 foggy prompts from untrained tiny-sd, with
a fresh adapter, and takes the first gradient of DDPO on each. Cosines of their pairs are 1 where reward noise
plays no part and 0 where it is all there is. Into agreement.csv, a row for each guidance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from benchmarks.common import write_rows
from benchmarks.results.algorithms import SETTINGS, draw_prompts
from ddpo_lessons.advantages import normalize
from ddpo_lessons.algorithms.ddpo import replay, share_predictions
from ddpo_lessons.data.prompts import digit_world_prompts
from ddpo_lessons.families import family_of
from ddpo_lessons.rewards import prompt_alignment
from ddpo_lessons.rollout import text2img_rollout
from ddpo_lessons.tiny import load_tiny_sd

RESULT = Path(__file__).parent / "agreement.csv"
EPOCHS = 8


def gradients(guidance: float) -> tuple[torch.Tensor, float]:
    """Return the gradient of each epoch (8, weights), and the mean std of an epoch's rewards."""
    torch.manual_seed(0)
    pipeline = load_tiny_sd()
    pipeline.unet.requires_grad_(False)
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    pipeline.unet.add_adapter(
        LoraConfig(r=16, lora_alpha=16, init_lora_weights="gaussian", target_modules=targets)
    )
    trained = [p for p in pipeline.unet.parameters() if p.requires_grad]
    family, ask, reward = family_of(pipeline), digit_world_prompts(0, damage="foggy"), prompt_alignment()
    found, spread = [], []
    for epoch in range(EPOCHS):
        prompts, metadata = draw_prompts(ask, SETTINGS["sample_batch_size"])
        generator = torch.Generator().manual_seed(epoch)
        images, trajectory = text2img_rollout(
            family,
            prompts,
            num_inference_steps=SETTINGS["sample_num_steps"],
            guidance_scale=guidance,
            generator=generator,
        )
        rewards: Any = reward(images, prompts, metadata)[0]
        spread.append(rewards.std().item())
        rows, columns = torch.meshgrid(*map(torch.arange, trajectory.log_probs.shape), indexing="ij")
        pairs = share_predictions({"rows": rows.flatten(), "columns": columns.flatten()}, 1)
        log_prob = replay(family, pipeline.unet, trajectory, pairs, "mean").log_prob
        loss = -(normalize(rewards)[pairs["rows"]] * log_prob).mean()
        parts = torch.autograd.grad(loss, trained)
        found.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(found), sum(spread) / EPOCHS


def mean_cosine(units: torch.Tensor) -> torch.Tensor:
    """Return the mean cosine over the pairs of different rows of unit length."""
    count = len(units)
    return (units.sum(0).square().sum() - count) / (count * (count - 1))


def jackknife(units: torch.Tensor) -> float:
    """Return the standard error of the mean cosine: pairs share epochs, so each epoch is left out in turn."""
    count = len(units)
    left_out = torch.stack([mean_cosine(torch.cat([units[:n], units[n + 1 :]])) for n in range(count)])
    return ((count - 1) * left_out.var(correction=0)).sqrt().item()


def main() -> None:
    """Measure, and write the CSV."""
    torch.set_num_threads(1)
    table = []
    for guidance in (1.0, 3.0):
        each, spread = gradients(guidance)
        units = each / each.norm(dim=1, keepdim=True)
        table.append(
            {
                "guidance": guidance,
                "epochs": EPOCHS,
                "samples": SETTINGS["sample_batch_size"],
                "cosine_mean": mean_cosine(units).item(),
                "cosine_error": jackknife(units),
                "norm": each.norm(dim=1).mean().item(),
                "reward_std": spread,
            }
        )
        print(table[-1], flush=True)
    write_rows(RESULT, table)


if __name__ == "__main__":
    main()
