"""Work out the camouflage experiment on cards of 10, 24 and 80 GB: `python -m benchmarks.speed.budget_table`.

Nothing is measured: the numbers are those of `ddpo_lessons.app.budget`, and images/draw_08_full_gpu_run.py
draws them. CLIP ViT-L/14, the reward model, is counted with its 427,616,513 parameters in float32.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import write_rows
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
    sizes = {name: getattr(config, name) for name in ("sample_batch_size", "train_batch_size")}
    checkpointing = config.train_gradient_checkpointing
    return {"gpu_memory": gigabytes, **sizes, "checkpointing": checkpointing, **asdict(found)}


if __name__ == "__main__":
    write_rows(RESULT, [row(gigabytes) for gigabytes in GPU_MEMORY])
