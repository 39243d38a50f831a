"""Work out the camouflage experiment on cards of 10, 24 and 80 GB: `python -m benchmarks.speed.budget_table`.

Nothing is measured: the numbers are those of `ddpo_lessons.app.budget`, and images/draw_08_full_gpu_run.py
draws them. CLIP ViT-L/14, the reward model, is counted with its 427,616,513 parameters in float32.
"""

from __future__ import annotations

import csv
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddpo_lessons.app import budget
from ddpo_lessons.app.presets import GPU_MEMORY, PRESETS, fit_to_memory
from ddpo_lessons.config import DDPOConfig

RESULT = Path(__file__).parent / "budget.csv"
CLIP_BYTES = 427_616_513 * 4
TIMESTEPS = 20  # 0.4 of 50


def row(gigabytes: int) -> dict[str, Any]:
    """Return the budget of the experiment, whole on one card."""
    config = DDPOConfig(**fit_to_memory(PRESETS["camouflage"].config, gigabytes))
    found = budget.estimate(budget.sd15(), config, TIMESTEPS, from_images=True, reward_bytes=CLIP_BYTES)
    return {
        "gpu_memory": gigabytes,
        "sample_batch_size": config.sample_batch_size,
        "train_batch_size": config.train_batch_size,
        "checkpointing": config.train_gradient_checkpointing,
        **asdict(found),
    }


def main() -> None:
    """Write a row for each card."""
    rows = [row(gigabytes) for gigabytes in GPU_MEMORY]
    with open(RESULT, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
