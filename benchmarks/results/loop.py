"""One epoch of DDPO in pictures, for lesson 06: three of its 64 samples on their way, and their rewards.

`python -m benchmarks.results.loop` samples an epoch of untrained tiny-sd on prompts that ask for fog, and
keeps the samples with the highest, the median and the lowest reward: algorithms/loop.png has a row for each
(x_T to x_0 as three of the latent's four channels, and the picture), algorithms/loop.json the numbers.
"""

from __future__ import annotations

import torch
from PIL import Image

from benchmarks.common import quiet_thread, write_json
from benchmarks.results.algorithms import PICTURES, SETTINGS, draw_prompts, paint
from ddpo_lessons.advantages import normalize
from ddpo_lessons.data.prompts import digit_world_prompts
from ddpo_lessons.rewards import prompt_alignment
from ddpo_lessons.tiny import load_reward_model, load_tiny_sd


def tiles(latents: torch.Tensor) -> torch.Tensor:
    """Turn latents (T+1, 4, 8, 8) into pictures (T+1, 3, 32, 32): three channels as colours, from -3 to 3."""
    colours = (latents[:, :3] / 6 + 0.5).clamp(0, 1)
    return colours.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)


def main() -> None:
    """Sample, and write both files."""
    quiet_thread()
    prompts, metadata = draw_prompts(digit_world_prompts(0, damage="foggy"), SETTINGS["sample_batch_size"])
    images, trajectory = paint(load_tiny_sd(), prompts, 1.0, torch.Generator().manual_seed(0))
    rewards = prompt_alignment(load_reward_model())(images, prompts, metadata)[0]  # (64,)
    columns = {"reward": rewards, "advantage": normalize(rewards)}
    order = rewards.argsort(descending=True).tolist()
    shown = [order[0], order[len(order) // 2], order[-1]]
    rows = [torch.cat([*tiles(trajectory.latents[n]), images[n]], dim=2) for n in shown]  # (3, 32, 192) each
    picture = torch.cat(rows, dim=1).permute(1, 2, 0)
    PICTURES.mkdir(exist_ok=True)
    Image.fromarray((picture * 255).round().byte().numpy()).save(PICTURES / "loop.png")
    numbers = [
        {"prompt": prompts[n], **{name: round(values[n].item(), 2) for name, values in columns.items()}}
        for n in shown
    ]
    epoch = {"samples": len(prompts), "mean": round(rewards.mean().item(), 2)}
    write_json(PICTURES / "loop.json", {**epoch, "std": round(rewards.std().item(), 2), "shown": numbers})


if __name__ == "__main__":
    main()
