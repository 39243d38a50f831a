"""Damage images (B, 3, H, W) in [0, 1], at a severity of 1 to 5."""

import io
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ddpo_lessons.image import measure_background, to_pil


def _amount(severity: int, amounts: tuple[float, ...]) -> float:
    if severity not in (1, 2, 3, 4, 5):
        raise ValueError(f"severity={severity!r}: use 1, 2, 3, 4 or 5")
    return amounts[severity - 1]


def noise(images: torch.Tensor, severity: int, generator: torch.Generator) -> torch.Tensor:
    """Add Gaussian pixel noise; standard deviation 0.10 to 0.50."""
    sigma = _amount(severity, (0.10, 0.18, 0.26, 0.36, 0.50))
    return (images + sigma * torch.randn(images.shape, generator=generator).to(images.device)).clamp(0, 1)


def blur(images: torch.Tensor, severity: int, generator: torch.Generator, scale: float = 1.0) -> torch.Tensor:
    """Blur with a Gaussian of 1.0 to 3.4 pixels, times `scale`: images of many pixels need a wider one."""
    sigma, radius = scale * _amount(severity, (1.0, 1.5, 2.0, 2.6, 3.4)), round(8 * scale)
    taps = torch.exp(-(torch.arange(-radius, radius + 1, device=images.device) ** 2) / (2 * sigma**2))
    kernel = (taps[:, None] * taps[None, :] / taps.sum() ** 2).expand(3, 1, -1, -1)
    return F.conv2d(F.pad(images, (radius,) * 4, mode="reflect"), kernel, groups=3)


def fog(images: torch.Tensor, severity: int, generator: torch.Generator) -> torch.Tensor:
    """Blend with light gray fog of slowly varying thickness; mean thickness 0.45 to 0.85."""
    thickness = _amount(severity, (0.45, 0.55, 0.65, 0.75, 0.85))
    coarse = torch.rand(len(images), 1, 3, 3, generator=generator) * 2 - 1
    clouds = F.interpolate(coarse, images.shape[2:], mode="bicubic", align_corners=True)
    amount = (thickness + 0.08 * clouds).clamp(0, 0.95).to(images.device)  # (B, 1, H, W)
    return images * (1 - amount) + 0.78 * amount


def jpeg(images: torch.Tensor, severity: int, generator: torch.Generator) -> torch.Tensor:
    """Compress as JPEG of quality 30 to 3 and decode again."""
    quality = int(_amount(severity, (30, 18, 11, 6, 3)))
    out = []
    for image in images:
        buffer = io.BytesIO()
        to_pil(image).save(buffer, format="JPEG", quality=quality)
        out.append(torch.from_numpy(np.array(Image.open(buffer))).permute(2, 0, 1) / 255)
    return torch.stack(out).float().to(images.device)


def fade(images: torch.Tensor, severity: int, generator: torch.Generator) -> torch.Tensor:
    """Reduce the contrast toward the background by 55% to 90%."""
    amount = _amount(severity, (0.55, 0.65, 0.74, 0.82, 0.90))
    background = measure_background(images)[:, :, None, None]
    return images * (1 - amount) + background * amount


def darken(images: torch.Tensor, severity: int, generator: torch.Generator) -> torch.Tensor:
    """Darken to 45% down to 12% of the light."""
    return images * _amount(severity, (0.45, 0.34, 0.25, 0.18, 0.12))


Damage = Callable[[torch.Tensor, int, torch.Generator], torch.Tensor]
DAMAGES: dict[str, Damage] = {
    "noisy": noise,
    "blurry": blur,
    "foggy": fog,
    "blocky": jpeg,
    "faded": fade,
    "dark": darken,
}
