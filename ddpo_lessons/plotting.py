"""Figures that more than one place draws: image grids, and the curves of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def image_grid(images: torch.Tensor, columns: int, scale: int | None = None) -> Image.Image:
    """Lay images out in rows.

    Args:
        images: (N, 3, H, W) in [0, 1].
        columns: images per row.
        scale: enlargement by whole pixels; None enlarges small images to at least 96 pixels.

    Returns:
        One picture; the last row is filled with white.

    Raises:
        ValueError: there are no images, or columns is below 1.
    """
    if images.ndim != 4 or len(images) == 0 or columns < 1:
        raise ValueError(
            f"a grid needs images (N, 3, H, W) with N >= 1 and columns >= 1, got "
            f"{tuple(images.shape)} and {columns}"
        )
    _, _, height, width = images.shape
    rows = -(-len(images) // columns)
    canvas = torch.ones(rows * columns, 3, height, width)
    canvas[: len(images)] = images.float().cpu().clamp(0, 1)
    sheet = canvas.view(rows, columns, 3, height, width).permute(0, 3, 1, 4, 2)  # (R, H, C, W, 3)
    pixels = (sheet.reshape(rows * height, columns * width, 3) * 255).round().to(torch.uint8)
    picture = Image.fromarray(pixels.numpy())
    scale = scale or max(1, -(-96 // height))
    return picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)


def plot_run(records: Sequence[dict[str, Any]], judge: Sequence[dict[str, float]] = ()) -> Figure:
    """Draw the reward of a run over its samples, beside the judge's accuracy where it was measured.

    Args:
        records: the "epoch" records of metrics.jsonl.
        judge: records with "samples_seen" and "accuracy".

    Returns:
        The figure, not yet shown or saved.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    seen = [r["samples_seen"] for r in records]
    mean = torch.tensor([float(r["reward_mean"]) for r in records])
    std = torch.tensor([float(r["reward_std"]) for r in records])
    left.plot(seen, mean, color="tab:blue")
    left.fill_between(seen, mean - std, mean + std, color="tab:blue", alpha=0.15, linewidth=0)
    left.set(title="reward (mean, one standard deviation)", xlabel="samples", ylabel="reward")
    right.plot(
        [j["samples_seen"] for j in judge],
        [100 * j["accuracy"] for j in judge],
        "o-",
        color="tab:green",
    )
    right.set(title="the judge, which training never sees", xlabel="samples", ylabel="right (%)")
    right.set_ylim(0, 100)
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Save a figure at a size that reads well on a screen."""
    figure.savefig(path, dpi=150)
