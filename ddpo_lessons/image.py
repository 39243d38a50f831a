"""Convert and check images as tensors, and arrange them in grids."""

import contextlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

JPEG_FROM = 256  # pixels to a side: a grid of larger images would take megabytes as a PNG
JPEG_QUALITY = 90
COLUMNS = 8  # of a full grid; even, so that input and result stay in one row


def to_rgb(image: Image.Image) -> Image.Image:
    """Rotate an image upright and convert it to 8-bit RGB; raise a ValueError for 32 bits per channel.

    PIL's own conversion has three faults, which this function avoids: 16 bits per channel become white;
    transparent pixels show their hidden color instead of a white background; and photographs that a camera
    has marked as rotated stay rotated.
    """
    with contextlib.suppress(SyntaxError, ValueError, struct.error):  # EXIF that cannot be read turns nothing
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.array(image) / 257).round().astype(np.uint8))  # 65535 becomes 255
    if image.mode in ("I", "F"):
        raise ValueError(f"an image of 32 bits a pixel (mode {image.mode!r}): save it with 8 or 16")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def to_tensor(image: Any) -> torch.Tensor:
    """Convert a PIL image to a tensor (3, H, W) float32 in [0, 1], and an array to a tensor."""
    if hasattr(image, "convert"):
        pixels = np.array(to_rgb(image))  # (H, W, 3)
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    is_array = isinstance(image, np.ndarray) and image.dtype.name in ("float16", "float32", "float64")
    if not is_array and not isinstance(image, torch.Tensor):
        kind = f"an array of {image.dtype}" if isinstance(image, np.ndarray) else type(image).__name__
        raise TypeError(
            f"an image must be a PIL image, or a float tensor or array (3, H, W) in [0, 1], not {kind}"
        )
    if 0 in image.shape:
        raise ValueError(f"an image of shape {tuple(image.shape)} has no pixels: return (3, H, W)")
    if is_array:  # torch takes neither negative strides nor another machine's byte order
        image = np.ascontiguousarray(image, dtype=image.dtype.newbyteorder("="))
    return torch.as_tensor(image).detach()


def to_pil(image: torch.Tensor) -> Image.Image:
    """Convert an image (3, H, W) in [0, 1] to a PIL image."""
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array)


def fit(image: Image.Image, size: int) -> torch.Tensor:
    """Resize an image and crop its center to a square: (3, size, size) in [0, 1]."""
    return to_tensor(ImageOps.fit(image, (size, size)))


def check_images(images: torch.Tensor, name: str = "images") -> None:
    """Check for finite float images (B, 3, H, W) in [0, 1], with a tolerance of 1e-3.

    Raises TypeError if `images` is not a floating-point tensor; ValueError if shape or range is wrong or a
    pixel is NaN or infinite.
    """
    if not isinstance(images, torch.Tensor) or not images.is_floating_point():
        kind = images.dtype if isinstance(images, torch.Tensor) else type(images).__name__
        raise TypeError(f"{name} is {kind}: pass a float tensor (B, 3, H, W) in [0, 1]; divide uint8 by 255")
    if images.ndim != 4 or images.shape[1] != 3 or images.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(images.shape)}: pass (B, 3, H, W), converted to RGB")
    for index, image in enumerate(images):
        low, high = (limit.item() for limit in image.aminmax())  # NaN if any pixel is NaN
        if not (low >= -1e-3 and high <= 1 + 1e-3):  # so written, it refuses NaN too
            raise ValueError(
                f"{name}[{index}] spans [{low:.4g}, {high:.4g}]: finite values in [0, 1] are "
                "taken; images in [-1, 1] become (images + 1) / 2"
            )


def check_size(
    size: tuple[int, int], factor: int, longest: float = float("inf"), resolution: int | None = None
) -> None:
    """Raise a ValueError for a size (H, W) in pixels that the model cannot take."""
    if any(side % factor for side in size) or max(size) > longest:
        most = "" if longest == float("inf") else f", at most {longest:g} pixels a side"
        if resolution is not None:
            raise ValueError(f"resolution={resolution}: use multiples of {factor}{most}")
        raise ValueError(f"images of {size} pixels: resize to multiples of {factor}{most}")


def measure_background(images: torch.Tensor) -> torch.Tensor:
    """Measure the background (B, 3) of (B, 3, H, W): the median of the outermost pixels, in RGB."""
    border = torch.ones(images.shape[2:], dtype=torch.bool, device=images.device)
    border[1:-1, 1:-1] = False
    return images.float()[:, :, border].median(dim=2).values


def image_grid(images: torch.Tensor, columns: int, scale: int | None = None) -> Image.Image:
    """Arrange images (N, 3, H, W) in [0, 1] in rows of `columns`, with the last row padded with white.

    `scale` enlarges by whole pixels; None enlarges small images to at least 96. A ValueError refuses no
    images, and no columns.
    """
    if images.ndim != 4 or len(images) == 0 or columns < 1:
        raise ValueError(
            f"a grid needs images (N, 3, H, W) with N >= 1 and columns >= 1, got "
            f"{tuple(images.shape)} and {columns}"
        )
    _, _, height, width = images.shape
    rows = -(-len(images) // columns)
    canvas = torch.ones(rows * columns, 3, height, width)
    canvas[: len(images)] = images.float().cpu()
    sheet = canvas.view(rows, columns, 3, height, width).permute(2, 0, 3, 1, 4)  # (3, R, H, C, W)
    image = to_pil(sheet.reshape(3, rows * height, columns * width))
    scale = scale or max(1, -(-96 // height))
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def grid_columns(count: int) -> int:
    """Return the number of columns of a run's grid, so that no column is empty."""
    return min(COLUMNS, count)


def save_grid(grid: Image.Image, path: Path, side: int) -> None:
    """Save a grid of images of this side as PATH.png, or as PATH.jpg if they are large.

    It is written aside first, so that a plot of a run that goes on reads no half of it.
    """
    is_large = side >= JPEG_FROM
    settings: dict[str, Any] = {"quality": JPEG_QUALITY} if is_large else {}
    aside = path.with_name(f".{path.name}.part")
    grid.save(aside, format="JPEG" if is_large else "PNG", **settings)
    aside.replace(path.with_name(path.name + (".jpg" if is_large else ".png")))
