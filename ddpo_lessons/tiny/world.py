"""The digit world: real handwriting in one colour on another, with the sentence that describes it.

Handwriting comes from scikit-learn's copy of the UCI "Optical Recognition of Handwritten Digits"
(Alpaydin and Kaynak, 1998, CC BY 4.0): 1,797 bitmaps of 8x8 pixels. Each becomes a 32x32 picture such as
"a red three on a blue background", possibly damaged ("a foggy red three on a blue background").
The world is small enough to be scored exactly: colours are measured, digits are read by a classifier.
"""

import functools
import io
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

IMAGE_SIZE = 32
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.13, 0.15),
    "green": (0.10, 0.60, 0.22),
    "blue": (0.13, 0.25, 0.80),
    "yellow": (0.97, 0.84, 0.15),
    "white": (0.97, 0.97, 0.97),
    "black": (0.06, 0.06, 0.06),
}
COLOUR_NAMES = tuple(COLOURS)

# Every digit misses one ink in pre-training: ten of the sixty (digit, ink) pairs are never shown.
LEFT_OUT = tuple((digit, COLOUR_NAMES[(5 * digit + 2) % 6]) for digit in range(10))
SEEN = tuple((d, c) for d in range(10) for c in COLOUR_NAMES if (d, c) not in LEFT_OUT)

TEST_SIZE = 500
VALIDATION_SIZE = 200
SPLIT_SEED = 1797


# ---------------------------------------------------------------------------------------- handwriting
@functools.cache
def _all_handwriting() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.from_numpy(np.random.RandomState(SPLIT_SEED).permutation(len(data.target)))
    test, train = order[:TEST_SIZE], order[TEST_SIZE:]
    half = len(train) // 2
    reward, judge = train[:half], train[half:]
    validation, practice = reward[-VALIDATION_SIZE:], torch.cat([reward[:-VALIDATION_SIZE], judge])
    splits = {"test": test, "train": train, "reward": reward, "judge": judge}
    splits |= {"validation": validation, "practice": practice}
    bitmaps = torch.from_numpy(data.images).float() / 16  # (1797, 8, 8) ink coverage in [0, 1]
    return bitmaps, torch.from_numpy(data.target).long(), splits


def handwriting(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bitmaps (N, 8, 8) float32 in [0, 1] and labels (N,) of one split of the handwriting.

    "train" (1,297) and its two halves "reward" and "judge", from which those classifiers learned;
    "validation", 200 of the reward model's half, on which settings are searched, and "practice", the rest of
    "train"; or "test" (500), which appears in nothing but evaluation. A ValueError refuses others.
    """
    bitmaps, labels, splits = _all_handwriting()
    if split not in splits:
        raise ValueError(f"split={split!r} does not exist: use one of {sorted(splits)}")
    return bitmaps[splits[split]], labels[splits[split]]


# ------------------------------------------------------------------------------------------ rendering
def placements(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw (N, 2, 3) for `render`: shifts of 1.5 pixels, turns of 0.12 radians, zooms of 8%, at most."""
    uniform = torch.rand(count, 4, generator=generator) * 2 - 1  # (N, 4)
    angle = uniform[:, 0] * 0.12
    scale = 1.14 / (1 + uniform[:, 1] * 0.08)  # 1.14 leaves a margin of two pixels around the bitmap
    cos, sin = angle.cos() * scale, angle.sin() * scale
    dx, dy = uniform[:, 2] * 1.5 * 2 / IMAGE_SIZE, uniform[:, 3] * 1.5 * 2 / IMAGE_SIZE
    return torch.stack([cos, -sin, dx, sin, cos, dy], dim=1).reshape(-1, 2, 3)  # (N, 2, 3)


def render(
    bitmaps: torch.Tensor, ink: torch.Tensor, background: torch.Tensor, theta: torch.Tensor
) -> torch.Tensor:
    """Draw handwriting in one colour on another: (N, 3, 32, 32) in [0, 1].

    Bitmaps are (N, 8, 8) ink coverage in [0, 1], `ink` is (N, 3) RGB, the background too, or (N, 3, 32, 32)
    where it has a texture, and `theta` (N, 2, 3) placements.
    """
    grid = F.affine_grid(theta, [len(bitmaps), 1, IMAGE_SIZE, IMAGE_SIZE], align_corners=False)
    coverage = F.grid_sample(bitmaps[:, None], grid, mode="bicubic", align_corners=False)
    coverage = (1.4 * coverage - 0.15).clamp(0, 1)  # (N, 1, 32, 32), crisper than the bitmap's grey steps
    if background.ndim == 2:
        background = background[:, :, None, None]
    return coverage * ink[:, :, None, None] + (1 - coverage) * background


def measure_background(images: torch.Tensor) -> torch.Tensor:
    """Measure the background (B, 3) of (B, 3, H, W): the median of the outermost pixels, in RGB."""
    border = torch.ones(images.shape[2:], dtype=torch.bool, device=images.device)
    border[1:-1, 1:-1] = False
    return images.float()[:, :, border].median(dim=2).values


def measure_colours(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure ink and background colour, RGB (B, 3) each, of (B, 3, H, W), without any learned model.

    The background is that of `measure_background`; the ink is the mean of the 5% of pixels that lie farthest
    from it, so that soft edges do not count.
    """
    flat = images.float().flatten(2)  # (B, 3, H*W)
    background = measure_background(images)  # (B, 3)
    distance = (flat - background[:, :, None]).norm(dim=1)  # (B, H*W)
    farthest = distance.topk(max(1, flat.shape[2] // 20), dim=1).indices  # (B, K)
    ink = flat.gather(2, farthest[:, None].expand(-1, 3, -1)).mean(dim=2)  # (B, 3)
    return ink, background


def nearest_colour(rgb: torch.Tensor) -> torch.Tensor:
    """Return the index in `COLOURS` of the colour nearest to each RGB row; (B, 3) -> (B,)."""
    palette = torch.tensor(list(COLOURS.values()), dtype=rgb.dtype, device=rgb.device)  # (6, 3)
    return torch.cdist(rgb, palette).argmin(dim=1)


def coverage(images: torch.Tensor, ink: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
    """Say how much ink lies on each pixel of pictures (N, 3, H, W) of two colours: (N, 1, H, W) in [0, 1].

    A pixel x = a i + (1 - a) g of ink i and background g, RGB (N, 3), has the coverage `a = (x - g)·(i - g) /
    |i - g|²`.
    """
    axis, ground = (colour[:, :, None, None] for colour in (ink - background, background))  # (N, 3, 1, 1)
    along = ((images - ground) * axis).sum(dim=1, keepdim=True)
    return (along / axis.square().sum(dim=1, keepdim=True).clamp(min=1e-6)).clamp(0, 1)


def lean(images: torch.Tensor) -> torch.Tensor:
    """Measure how far the ink of pictures (B, 3, H, W) leans: pixels to the right for each pixel up, (B,).

    It is the slope of x over y, fitted to the pixels by least squares, each weighed by its ink; an upright
    stroke has 0, italics have about 0.25. A picture without ink has 0.
    """
    # Summed on the CPU, because MPS has no float64.
    weights = coverage(images, *measure_colours(images))[:, 0].cpu().double()  # (B, H, W)
    weights = weights / weights.sum(dim=(1, 2), keepdim=True).clamp(min=1e-6)
    height, width = images.shape[2:]
    y = torch.arange(height, 0, -1)[:, None] - (height + 1) / 2  # (H, 1), upwards
    x = torch.arange(width) - (width - 1) / 2  # (W,)
    mean_x, mean_y, xy, yy = ((weights * part).sum(dim=(1, 2)) for part in (x, y, x * y, y * y))  # (B,) each
    return ((xy - mean_x * mean_y) / (yy - mean_y**2).clamp(min=1e-6)).float().to(images.device)


def repaint(
    images: torch.Tensor, old: tuple[torch.Tensor, torch.Tensor], new: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Give pictures (N, 3, H, W) two other colours (ink, background), RGB (N, 3) each, pixel by pixel."""
    ink, background = (colour[:, :, None, None] for colour in new)
    share = coverage(images, *old)  # (N, 1, H, W)
    return share * ink + (1 - share) * background


# --------------------------------------------------------------------------------------------- damage
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
    """Blend with light grey fog of slowly varying thickness; mean thickness 0.45 to 0.85."""
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
    """Wash the ink out towards the background; 55% to 90% of the contrast is lost."""
    amount = _amount(severity, (0.55, 0.65, 0.74, 0.82, 0.90))
    background = measure_colours(images)[1][:, :, None, None]
    return images * (1 - amount) + background * amount


def darken(images: torch.Tensor, severity: int, generator: torch.Generator) -> torch.Tensor:
    """Take away light; 45% down to 12% of it is left."""
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


def texture(count: int, base: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw blotchy textures around base colours; (N, 3) -> (N, 3, 32, 32), for camouflage."""
    coarse = torch.randn(count, 3, 8, 8, generator=generator)
    fine = torch.randn(count, 3, 16, 16, generator=generator)
    blotches = sum(
        F.interpolate(x.to(base.device), (IMAGE_SIZE, IMAGE_SIZE), mode="bicubic", align_corners=False)
        for x in (coarse, fine)
    )
    return (base[:, :, None, None] + 0.07 * blotches).clamp(0, 1)


# -------------------------------------------------------------------------------------------- prompts
@dataclass(frozen=True)
class Description:
    """What a prompt of the digit world says; None where it says nothing."""

    digit: int | None = None
    ink: str | None = None
    background: str | None = None
    damage: str | None = None


def make_prompt(
    digit: int | None, ink: str | None = None, background: str | None = None, damage: str | None = None
) -> str:
    """Put a description into words, e.g. "a foggy red three on a blue background"; no digit is "digit"."""
    words = ["a", damage, ink, "digit" if digit is None else DIGITS[digit]]
    if background is not None:
        words += ["on", "a", background, "background"]
    return " ".join(word for word in words if word is not None)


def parse_prompt(prompt: str) -> Description:
    """Read any text as a prompt of the digit world, ignoring unknown words; the inverse of `make_prompt`."""
    before, _, after = re.sub(r"[^a-z ]", " ", prompt.lower()).partition(" on ")
    words = before.split()
    return Description(
        digit=next((DIGITS.index(word) for word in words if word in DIGITS), None),
        ink=next((word for word in words if word in COLOURS), None),
        background=next((word for word in after.split() if word in COLOURS), None),
        damage=next((w for w in words if w in DAMAGES or w in ("clear", "camouflaged")), None),
    )


# ------------------------------------------------------------------------------------------- pictures
@dataclass(frozen=True)
class Pictures:
    """A batch of the digit world: images (N, 3, 32, 32), the clean originals, and what they show."""

    images: torch.Tensor
    clean: torch.Tensor
    digits: torch.Tensor  # (N,) int64
    severities: torch.Tensor  # (N,) int64, 0 for clean
    descriptions: list[Description]

    @property
    def prompts(self) -> list[str]:
        """The full sentence for every picture."""
        return [make_prompt(d.digit, d.ink, d.background, d.damage) for d in self.descriptions]


def draw_pictures(
    count: int,
    split: str,
    seed: int,
    damage: str | None = None,
    severity: int = 3,
    pairs: tuple[tuple[int, str], ...] | None = None,
) -> Pictures:
    """Draw random pictures of the digit world.

    Those of a split (see `handwriting`) and of pairs of (digit, ink), by default all sixty; the damage is
    "camouflaged", always the same, or a name of `DAMAGES` at a severity of 1 to 5. A ValueError refuses
    others.
    """
    if damage is not None and damage != "camouflaged" and damage not in DAMAGES:
        raise ValueError(f"damage={damage!r} does not exist: use camouflaged or one of {list(DAMAGES)}")
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    bitmaps, labels = handwriting(split)
    by_digit = [torch.nonzero(labels == digit).flatten().tolist() for digit in range(10)]
    pairs = pairs if pairs is not None else SEEN + LEFT_OUT
    chosen, descriptions = [], []
    for _ in range(count):
        digit, ink = rng.choice(pairs)
        background = rng.choice([name for name in COLOUR_NAMES if name != ink])
        descriptions.append(Description(digit, ink, background, damage))
        chosen.append(rng.choice(by_digit[digit]))
    ink_rgb = torch.tensor([COLOURS[d.ink or ""] for d in descriptions])  # (N, 3)
    background_rgb = torch.tensor([COLOURS[d.background or ""] for d in descriptions])  # (N, 3)
    theta = placements(count, generator)
    clean = render(bitmaps[chosen], ink_rgb, background_rgb, theta)
    images = clean
    if damage == "camouflaged":
        hidden_ink = background_rgb + 0.22 * (ink_rgb - background_rgb)
        images = render(bitmaps[chosen], hidden_ink, texture(count, background_rgb, generator), theta)
    elif damage is not None:
        images = DAMAGES[damage](clean, severity, generator)
    digits = torch.tensor([d.digit for d in descriptions])
    severities = torch.full((count,), 0 if damage is None else severity)
    return Pictures(images, clean, digits, severities, descriptions)


def colour_indices(descriptions: Sequence[Description]) -> torch.Tensor:
    """Return the indices in `COLOURS` of ink and background, (N, 2)."""
    return torch.tensor([[COLOUR_NAMES.index(n or "") for n in (d.ink, d.background)] for d in descriptions])


def rgb(names: Sequence[str | None]) -> torch.Tensor:
    """Return the RGB of colours by name, (N, 3)."""
    return torch.tensor([COLOURS[name or ""] for name in names])


@dataclass(frozen=True)
class Edits:
    """Pictures, and for each a sentence that asks for other colours: obey it, and keep the digit."""

    pictures: Pictures  #: N clean pictures, what goes in
    #: what each sentence names: ink and background, neither of them the picture's own, and no digit
    wanted: list[Description]
    targets: torch.Tensor  #: (N, 3, 32, 32), the same handwriting in the colours that were asked for

    @property
    def prompts(self) -> list[str]:
        """The sentences, such as "a yellow digit on a white background"."""
        return [make_prompt(None, d.ink, d.background) for d in self.wanted]


def draw_edits(count: int, split: str, seed: int) -> Edits:
    """Draw pictures of a split, each with a sentence that names another ink and another background."""
    rng = random.Random(f"edits-{seed}")
    pictures = draw_pictures(count, split, seed)
    wanted = []
    for old in pictures.descriptions:
        ink = rng.choice([name for name in COLOUR_NAMES if name != old.ink])
        background = rng.choice([name for name in COLOUR_NAMES if name not in (ink, old.background)])
        wanted.append(Description(None, ink, background))
    colours = [
        (rgb([d.ink for d in said]), rgb([d.background for d in said]))
        for said in (pictures.descriptions, wanted)
    ]
    return Edits(pictures, wanted, repaint(pictures.images, *colours))


def to_pil(image: torch.Tensor) -> Image.Image:
    """Turn one image (3, H, W) in [0, 1] into a PIL image."""
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array)
