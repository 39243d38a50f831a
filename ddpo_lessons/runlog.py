"""The folder of a run: metrics.jsonl, config.json, image grids, and the trackers that were asked for."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddpo_lessons import checkpoint
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.plotting import image_grid

METRICS = "metrics.jsonl"


def claim(config: DDPOConfig) -> Path | None:
    """Make sure that a run may write to its folder; return the checkpoint that it continues, if any.

    Raises:
        ValueError: if the folder holds another run, or there is nothing to resume.
    """
    run_dir = config.run_dir
    if config.resume_from:
        if config.resume_from != "latest":
            return Path(config.resume_from)
        found = checkpoint.list_checkpoints(run_dir)
        if not found:
            raise ValueError(
                f"resume_from='latest', but {run_dir} holds no checkpoint: leave resume_from empty"
            )
        return found[-1]
    if (run_dir / METRICS).exists() or checkpoint.list_checkpoints(run_dir):
        if not config.overwrite:
            raise ValueError(
                f"{run_dir} already holds a run: set resume_from='latest' to continue it, overwrite=True to "
                "replace it, or choose another output_dir"
            )
        _clear(run_dir)
    return None


def _clear(run_dir: Path) -> None:
    """Remove what a run wrote, and nothing else."""
    for path in [
        *run_dir.glob("checkpoint-*"),
        *run_dir.glob(".checkpoint-*.tmp"),
        run_dir / "images",
    ]:
        shutil.rmtree(path, ignore_errors=True)
    for name in (METRICS, "config.json"):
        (run_dir / name).unlink(missing_ok=True)


class RunLog:
    """Writes the records of one run."""

    def __init__(self, config: DDPOConfig, epochs_done: int) -> None:
        """Write config.json and drop the records of epochs that will be done again."""
        self.run_dir = config.run_dir
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "config.json").write_text(json.dumps(config.to_dict(), indent=1) + "\n")
        kept = [r for r in read_metrics(self.run_dir) if r["epoch"] <= epochs_done]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        (self.run_dir / METRICS).write_text(text)

    def record(self, kind: str, values: Mapping[str, float]) -> None:
        """Append one record: {"kind": ..., **values}; numbers that are not finite become null."""
        clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
        with open(self.run_dir / METRICS, "a") as file:
            file.write(json.dumps({"kind": kind, **clean}) + "\n")

    def images(self, epoch: int, images: torch.Tensor) -> None:
        """Save a grid of up to 32 images (N, 3, H, W) as images/epoch-NNNNNN.png."""
        folder = self.run_dir / "images"
        folder.mkdir(exist_ok=True)
        image_grid(images[:32], columns=8).save(folder / f"epoch-{epoch:06d}.png")


def read_metrics(run_dir: str | Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Read metrics.jsonl of a run; a last line that a kill cut off is left out.

    Args:
        run_dir: folder of the run.
        kind: "step" or "epoch", or None for both.

    Returns:
        The records, oldest first.
    """
    path = Path(run_dir, METRICS)
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [record for record in records if kind is None or record["kind"] == kind]
