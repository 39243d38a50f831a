"""What the classifiers of both worlds have in common: their parts, how they are loaded, what they name."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

import torch
from safetensors.torch import load_file
from torch import nn


class Classifier(nn.Module):
    """A classifier of images (B, 3, H, W) in [0, 1], which returns logits, a tensor or one for each kind."""

    weights: ClassVar[Path]  #: the file that is shipped

    @classmethod
    def load(cls, file: Path | None = None) -> Self:
        """Load weights, by default those that are shipped, for use and not for training."""
        model = cls()
        model.load_state_dict(load_file(file or cls.weights))
        return model.eval().requires_grad_(False)


# --------------------------------------------------------------------------------------------- parts
def strided_convolutions(*widths: int, first_stride: int = 2) -> nn.Sequential:
    """Make convolutions of these widths with group normalisation; each halves the sides, or not the first."""
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise((3, *widths))):
        layers += [nn.Conv2d(before, after, 3, stride=2 if i else first_stride, padding=1)]
        layers += [nn.GroupNorm(8, after), nn.SiLU()]
    return nn.Sequential(*layers)


def patch_mixer(width: int) -> list[nn.Module]:
    """Make layers that mix 4x4 patches in place and in depth by turns (ConvMixer, arXiv 2201.09792)."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4), nn.GELU(), nn.BatchNorm2d(width)]
    for _ in range(4):
        layers += [nn.Conv2d(width, width, 5, padding=2, groups=width), nn.GELU(), nn.BatchNorm2d(width)]
        layers += [nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width)]
    return layers


# ------------------------------------------------------------------------------------------- verdicts
@torch.no_grad()
def named(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return the indices of the K classes that a classifier names; (N, 3, H, W) in [0, 1] -> (N, K).

    Images and classifier may be on any device, the indices are on the CPU.
    """
    images = images.to(next(model.parameters(), images).device)  # a stand-in may have no parameters
    batches = [model(batch) for batch in images.split(256)]
    kinds = [logits if isinstance(logits, tuple) else (logits,) for logits in batches]
    return torch.cat([torch.stack([part.argmax(dim=1) for part in logits], dim=1) for logits in kinds]).cpu()


def nearest(rgb: torch.Tensor, palette: Mapping[str, tuple[float, float, float]]) -> torch.Tensor:
    """Return the index in a palette of the colour nearest to each RGB row; (B, 3) -> (B,)."""
    colours = torch.tensor(list(palette.values()), dtype=rgb.dtype, device=rgb.device)  # (C, 3)
    return torch.cdist(rgb, colours).argmin(dim=1)
