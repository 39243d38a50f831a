"""What a few lines do to a damaged picture without any learning: the first thing to compare RL with.

The list was fixed before any of it was measured. All but the first two are followed by `stretch`, since
most of them leave little contrast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from scipy import ndimage

Operation = Callable[[torch.Tensor], torch.Tensor]  # (N, 3, H, W) in [0, 1] to the same


def stretch(images: torch.Tensor, low: float = 0.01, high: float = 0.99) -> torch.Tensor:
    """Map two quantiles of each channel of each picture to 0 and 1, and cut off what lies outside."""
    values = images.flatten(2)  # (N, 3, HW)
    bottom, top = (values.quantile(q, dim=2)[:, :, None, None] for q in (low, high))  # (N, 3, 1, 1)
    return ((images - bottom) / (top - bottom).clamp(min=1e-6)).clamp(0, 1)


def median(images: torch.Tensor, size: int) -> torch.Tensor:
    return torch.from_numpy(ndimage.median_filter(images.numpy(), (1, 1, size, size)))


def gaussian(images: torch.Tensor, sigma: float) -> torch.Tensor:
    return torch.from_numpy(ndimage.gaussian_filter(images.numpy(), (0, 0, sigma, sigma)))


def without_blurred(images: torch.Tensor, sigma: float) -> torch.Tensor:
    """Subtract a blurred copy: what is left is what changes within a few pixels."""
    return images - gaussian(images, sigma)


def unsharp(images: torch.Tensor, sigma: float = 2, amount: float = 2) -> torch.Tensor:
    return images + amount * without_blurred(images, sigma)


def principal_axis(images: torch.Tensor) -> torch.Tensor:
    """Project the colours of each picture onto the line along which they vary most; the result is grey."""
    colours = images.flatten(2)  # (N, 3, HW)
    colours = colours - colours.mean(dim=2, keepdim=True)
    axis = torch.linalg.eigh(colours @ colours.mT).eigenvectors[:, :, -1:]  # (N, 3, 1), of the largest value
    axis = torch.where(axis.sum(dim=1, keepdim=True) < 0, -axis, axis)  # what was brighter stays brighter
    return (axis.mT @ colours).unflatten(2, images.shape[2:]).expand(-1, 3, -1, -1)


def _then_stretch(*operations: Operation) -> Operation:
    def run(images: torch.Tensor) -> torch.Tensor:
        for operation in operations:
            images = operation(images)
        return stretch(images)

    return run


OPERATIONS: dict[str, Operation] = {
    "stretch": stretch,
    "min-max stretch": partial(stretch, low=0.0, high=1.0),
    "median 3": _then_stretch(partial(median, size=3)),
    "median 5": _then_stretch(partial(median, size=5)),
    "Gaussian 1": _then_stretch(partial(gaussian, sigma=1)),
    "Gaussian 1.5": _then_stretch(partial(gaussian, sigma=1.5)),
    "unsharp mask": _then_stretch(unsharp),
    "minus blur 8": _then_stretch(partial(without_blurred, sigma=8)),
    "minus blur 4": _then_stretch(partial(without_blurred, sigma=4)),
    "principal axis": _then_stretch(principal_axis),
    "Gaussian 1, principal axis": _then_stretch(partial(gaussian, sigma=1), principal_axis),
}
