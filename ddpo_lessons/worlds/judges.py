"""The common parts of both worlds' classifiers: layers, loading, and predictions."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

import torch
from safetensors.torch import load_file
from torch import nn


class Classifier(nn.Module):
    """A classifier of images (B, 3, H, W) in [0, 1]; it returns one tensor of logits, or one per task."""

    weights: ClassVar[Path]  #: the shipped file

    @classmethod
    def load(cls, file: Path | None = None) -> Self:
        """Load weights (by default the shipped ones) in evaluation mode, without gradients for them."""
        model = cls()
        model.load_state_dict(load_file(file or cls.weights))
        return model.eval().requires_grad_(False)


# --------------------------------------------------------------------------------------------- parts
def strided_convolutions(*widths: int, first_stride: int = 2) -> nn.Sequential:
    """Make convolutions with group normalization; each has stride 2, the first one `first_stride`."""
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise((3, *widths))):
        layers += [nn.Conv2d(before, after, 3, stride=2 if i else first_stride, padding=1)]
        layers += [nn.GroupNorm(8, after), nn.SiLU()]
    return nn.Sequential(*layers)


def patch_mixer(width: int) -> list[nn.Module]:
    """Make a ConvMixer on 4x4 patches: depthwise and pointwise convolutions in turn (arXiv 2201.09792)."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4), nn.GELU(), nn.BatchNorm2d(width)]
    for _ in range(4):
        layers += [nn.Conv2d(width, width, 5, padding=2, groups=width), nn.GELU(), nn.BatchNorm2d(width)]
        layers += [nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width)]
    return layers


# ---------------------------------------------------------------------------------------- predictions
@torch.no_grad()
def named(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return the predicted class of each of K tasks; (N, 3, H, W) in [0, 1] -> (N, K).

    Images and classifier may be on any device; the indices are on the CPU.
    """
    images = images.to(next(model.parameters(), images).device)  # a stand-in may have no parameters
    batches = [model(batch) for batch in images.split(256)]
    kinds = [logits if isinstance(logits, tuple) else (logits,) for logits in batches]
    return torch.cat([torch.stack([part.argmax(dim=1) for part in logits], dim=1) for logits in kinds]).cpu()


def nearest(rgb: torch.Tensor, palette: Mapping[str, tuple[float, float, float]]) -> torch.Tensor:
    """Return the index of the palette color nearest to each RGB row; (B, 3) -> (B,)."""
    colors = torch.tensor(list(palette.values()), dtype=rgb.dtype, device=rgb.device)  # (C, 3)
    return torch.cdist(rgb, colors).argmin(dim=1)
