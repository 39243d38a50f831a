"""The folder of a run: metrics.jsonl, config.json, image grids, and the trackers that were asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddpo_lessons import checkpoint
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.plotting import image_grid

METRICS = "metrics.jsonl"


def claim(config: DDPOConfig) -> Path | None:
    """Check that a run may use its folder; return the checkpoint that it continues, if any.

    Nothing is changed yet: what an older run left is dropped once training starts.

    Raises:
        ValueError: if the folder holds another run, or there is nothing to resume.
    """
    run_dir = config.run_dir
    checkpoints = checkpoint.list_checkpoints(run_dir)
    if config.resume_from == "latest":
        if not checkpoints:
            raise ValueError(
                f"resume_from='latest', but {run_dir} holds no checkpoint: leave resume_from empty"
            )
        return checkpoints[-1]
    source = Path(config.resume_from) if config.resume_from else None
    holds_run = checkpoints or read_metrics(run_dir)
    if holds_run and not config.overwrite and not _is_inside(source, run_dir):
        raise ValueError(
            f"{run_dir} already holds a run: set resume_from='latest' to continue it, overwrite=True to "
            "replace it, or choose another output_dir"
        )
    return source


def _is_inside(source: Path | None, run_dir: Path) -> bool:
    return source is not None and source.resolve().parent == run_dir.resolve()


class RunLog:
    """Writes the records of one run."""

    def __init__(self, config: DDPOConfig, source: Path | None, epochs_done: int) -> None:
        """Write config.json; drop what older runs left here and the epochs that will be done again.

        Args:
            config: the settings.
            source: the checkpoint that is continued, if any.
            epochs_done: its number, or 0.
        """
        self.run_dir = config.run_dir
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if not _is_inside(source, self.run_dir):
            epochs_done = 0
        self._drop_after(epochs_done)
        _write(self.run_dir / "config.json", json.dumps(config.to_dict(), indent=1) + "\n")

    def _drop_after(self, epochs_done: int) -> None:
        """Remove what a run wrote after that epoch, and nothing else."""
        checkpoint.remove_leftovers(self.run_dir)
        for path in checkpoint.list_checkpoints(self.run_dir):
            if checkpoint.epochs_of(path) > epochs_done:
                checkpoint.remove(path)
        for path in self.run_dir.glob("images/epoch-*.png"):
            number = path.stem.removeprefix("epoch-")
            if number.isdigit() and int(number) > epochs_done:
                path.unlink()
        kept = [r for r in read_metrics(self.run_dir) if r["epoch"] <= epochs_done]
        _write(self.run_dir / METRICS, "".join(json.dumps(record) + "\n" for record in kept))

    def record(self, kind: str, values: Mapping[str, float]) -> None:
        """Append one record: {"kind": ..., **values}; numbers that are not finite become null."""
        clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
        with open(self.run_dir / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **clean}) + "\n")

    def images(self, epoch: int, images: torch.Tensor) -> None:
        """Save a grid of up to 32 images (N, 3, H, W) as images/epoch-NNNNNN.png."""
        folder = self.run_dir / "images"
        folder.mkdir(exist_ok=True)
        image_grid(images[:32], columns=8).save(folder / f"epoch-{epoch:06d}.png")


def _write(path: Path, text: str) -> None:
    """Replace a file in one step, so that a kill leaves the old one or the new one."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


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
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [record for record in records if kind is None or record["kind"] == kind]
