"""The digit world: real handwriting in one color on another, each image with a prompt that describes it.

Handwriting comes from scikit-learn's copy of the UCI "Optical Recognition of Handwritten Digits"
(Alpaydin and Kaynak, 1998, CC BY 4.0): 1,797 bitmaps of 8x8 pixels. Each becomes an image (3, 32, 32) such as
"a red three on a blue background", possibly damaged ("a foggy red three on a blue background").
In this world prompts can be checked: colors are measured, and a classifier recognizes the digit.
"""

import functools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ddpo_lessons.damages import DAMAGES
from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.image import measure_background
from ddpo_lessons.words import DIGITS
from ddpo_lessons.worlds.judges import Classifier, named, nearest, patch_mixer, strided_convolutions

CHECKPOINT = CHECKPOINTS["tiny-sd"]
IMAGE_SIZE = 32
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.13, 0.15),
    "green": (0.10, 0.60, 0.22),
    "blue": (0.13, 0.25, 0.80),
    "yellow": (0.97, 0.84, 0.15),
    "white": (0.97, 0.97, 0.97),
    "black": (0.06, 0.06, 0.06),
}
COLOR_NAMES = tuple(COLORS)

# Pre-training leaves out one ink for every digit, so ten of the sixty (digit, ink) pairs.
LEFT_OUT = tuple((digit, COLOR_NAMES[(5 * digit + 2) % 6]) for digit in range(10))
SEEN = tuple((d, c) for d in range(10) for c in COLOR_NAMES if (d, c) not in LEFT_OUT)

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
    """Return the bitmaps (N, 8, 8) float32 in [0, 1] and the labels (N,) of a split of the handwriting.

    "train" has 1,297 bitmaps. Its halves "reward" and "judge" trained the reward model and the evaluator.
    "validation", 200 of the first half, is for choosing settings, and "practice" is the rest of "train".
    "test" has 500, which are used only for evaluation. Raises a ValueError for another split.
    """
    bitmaps, labels, splits = _all_handwriting()
    if split not in splits:
        raise ValueError(f"split={split!r} does not exist: use one of {sorted(splits)}")
    return bitmaps[splits[split]], labels[splits[split]]


# ------------------------------------------------------------------------------------------ rendering
def placements(count: int, generator: torch.Generator) -> torch.Tensor:
    """Sample affine maps (N, 2, 3) for `render`: shifts of 1.5 pixels, turns of 0.12, zooms of 8% at most.

    Turns are in radians.
    """
    uniform = torch.rand(count, 4, generator=generator) * 2 - 1  # (N, 4)
    angle = uniform[:, 0] * 0.12
    scale = 1.14 / (1 + uniform[:, 1] * 0.08)  # 1.14 leaves a margin of two pixels around the bitmap
    cos, sin = angle.cos() * scale, angle.sin() * scale
    dx, dy = uniform[:, 2] * 1.5 * 2 / IMAGE_SIZE, uniform[:, 3] * 1.5 * 2 / IMAGE_SIZE
    return torch.stack([cos, -sin, dx, sin, cos, dy], dim=1).reshape(-1, 2, 3)  # (N, 2, 3)


def render(
    bitmaps: torch.Tensor, ink: torch.Tensor, background: torch.Tensor, theta: torch.Tensor
) -> torch.Tensor:
    """Render handwriting in one color on another: (N, 3, 32, 32) in [0, 1].

    `bitmaps` are (N, 8, 8) ink coverage in [0, 1], `ink` and `background` are RGB (N, 3), or the background
    is a texture (N, 3, 32, 32), and `theta` (N, 2, 3) are the affine maps of `placements`.
    """
    grid = F.affine_grid(theta, [len(bitmaps), 1, IMAGE_SIZE, IMAGE_SIZE], align_corners=False)
    coverage = F.grid_sample(bitmaps[:, None], grid, mode="bicubic", align_corners=False)
    coverage = (1.4 * coverage - 0.15).clamp(0, 1)  # (N, 1, 32, 32), crisper than the bitmap's gray steps
    if background.ndim == 2:
        background = background[:, :, None, None]
    return coverage * ink[:, :, None, None] + (1 - coverage) * background


def measure_colors(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure the colors of ink and background, RGB (B, 3) each, of images (B, 3, H, W), without a network.

    `image.measure_background` measures the background. The ink is the mean color of the 5% of pixels that
    are farthest from the background in RGB, so that soft edges do not count.
    """
    flat = images.float().flatten(2)  # (B, 3, H*W)
    background = measure_background(images)  # (B, 3)
    distance = (flat - background[:, :, None]).norm(dim=1)  # (B, H*W)
    farthest = distance.topk(max(1, flat.shape[2] // 20), dim=1).indices  # (B, K)
    ink = flat.gather(2, farthest[:, None].expand(-1, 3, -1)).mean(dim=2)  # (B, 3)
    return ink, background


def coverage(images: torch.Tensor, ink: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
    """Return the fraction of each pixel that ink covers; images (N, 3, H, W) -> (N, 1, H, W) in [0, 1].

    A pixel x = a i + (1 - a) g of ink i and background g, RGB (N, 3), has the coverage `a = (x - g)·(i - g) /
    |i - g|²`.
    """
    axis, background = (color[:, :, None, None] for color in (ink - background, background))  # (N, 3, 1, 1)
    along = ((images - background) * axis).sum(dim=1, keepdim=True)
    return (along / axis.square().sum(dim=1, keepdim=True).clamp(min=1e-6)).clamp(0, 1)


def lean(images: torch.Tensor) -> torch.Tensor:
    """Measure the lean (B,) of the ink in images (B, 3, H, W), in pixels to the right per pixel up.

    The lean is the slope of x over y in a least-squares fit to the pixels, weighted by their ink coverage. An
    upright stroke has 0, italics have about 0.25, and an image without ink has 0.
    """
    # Summed on the CPU, because MPS has no float64.
    weights = coverage(images, *measure_colors(images))[:, 0].cpu().double()  # (B, H, W)
    weights = weights / weights.sum(dim=(1, 2), keepdim=True).clamp(min=1e-6)
    height, width = images.shape[2:]
    y = torch.arange(height, 0, -1)[:, None] - (height + 1) / 2  # (H, 1), upwards
    x = torch.arange(width) - (width - 1) / 2  # (W,)
    mean_x, mean_y, xy, yy = ((weights * part).sum(dim=(1, 2)) for part in (x, y, x * y, y * y))  # (B,) each
    return ((xy - mean_x * mean_y) / (yy - mean_y**2).clamp(min=1e-6)).float().to(images.device)


def repaint(
    images: torch.Tensor, old: tuple[torch.Tensor, torch.Tensor], new: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Replace the two colors (ink, background) of images (N, 3, H, W); each color is RGB (N, 3)."""
    ink, background = (color[:, :, None, None] for color in new)
    covered = coverage(images, *old)  # (N, 1, H, W)
    return covered * ink + (1 - covered) * background


# ----------------------------------------------------------------------------------------- camouflage
def texture(count: int, base: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Generate blotchy textures around base colors for camouflage; (N, 3) -> (N, 3, 32, 32)."""
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
    """The content of a prompt of the digit world; None for what the prompt does not name."""

    digit: int | None = None
    ink: str | None = None
    background: str | None = None
    damage: str | None = None


def make_prompt(
    digit: int | None, ink: str | None = None, background: str | None = None, damage: str | None = None
) -> str:
    """Write a prompt such as "a foggy red three on a blue background"; without a digit, "a red digit ..."."""
    words = ["a", damage, ink, "digit" if digit is None else DIGITS[digit]]
    if background is not None:
        words += ["on", "a", background, "background"]
    return " ".join(word for word in words if word is not None)


def parse_prompt(prompt: str) -> Description:
    """Parse a text as a prompt of this world; unknown words are ignored. The inverse of `make_prompt`."""
    before, _, after = re.sub(r"[^a-z ]", " ", prompt.lower()).partition(" on ")
    words = before.split()
    return Description(
        digit=next((DIGITS.index(word) for word in words if word in DIGITS), None),
        ink=next((word for word in words if word in COLORS), None),
        background=next((word for word in after.split() if word in COLORS), None),
        damage=next((w for w in words if w in DAMAGES or w in ("clear", "camouflaged")), None),
    )


# --------------------------------------------------------------------------------------------- images
@dataclass(frozen=True)
class LabeledImages:
    """A batch of images of the digit world with their labels."""

    images: torch.Tensor  #: (N, 3, 32, 32) in [0, 1], possibly damaged
    clean: torch.Tensor  #: the same images without damage
    digits: torch.Tensor  #: (N,) int64
    severities: torch.Tensor  #: (N,) int64, 0 for clean
    descriptions: list[Description]

    @property
    def prompts(self) -> list[str]:
        """The complete prompt of each image."""
        return [make_prompt(d.digit, d.ink, d.background, d.damage) for d in self.descriptions]


def draw_images(
    count: int,
    split: str,
    seed: int,
    damage: str | None = None,
    severity: int = 3,
    pairs: tuple[tuple[int, str], ...] | None = None,
) -> LabeledImages:
    """Generate random images of the digit world.

    The handwriting comes from a split (see `handwriting`), and `pairs` are the (digit, ink) pairs, by default
    all sixty. `damage` is "camouflaged", which has no severity, or a name of `DAMAGES` with a severity of 1
    to 5. Raises a ValueError for other damages.
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
        background = rng.choice([name for name in COLOR_NAMES if name != ink])
        descriptions.append(Description(digit, ink, background, damage))
        chosen.append(rng.choice(by_digit[digit]))
    ink_rgb, background_rgb = two_colors(descriptions)  # (N, 3) each
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
    return LabeledImages(images, clean, digits, severities, descriptions)


def color_indices(descriptions: Sequence[Description]) -> torch.Tensor:
    """Return the indices in `COLORS` of ink and background, (N, 2)."""
    return torch.tensor([[COLOR_NAMES.index(n or "") for n in (d.ink, d.background)] for d in descriptions])


def two_colors(descriptions: Sequence[Description]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ink and background, RGB (N, 3) each."""
    ink, background = color_indices(descriptions).T
    palette = torch.tensor(list(COLORS.values()))  # (6, 3)
    return palette[ink], palette[background]


@dataclass(frozen=True)
class Edits:
    """Input images, each with a prompt for new colors; a correct edit has these and keeps the digit."""

    inputs: LabeledImages  #: the N input images, without damage
    #: the content of the prompts: an ink and a background that the image does not have, and no digit
    wanted: list[Description]
    targets: torch.Tensor  #: the correct results, (N, 3, 32, 32): the same handwriting in the new colors

    @property
    def prompts(self) -> list[str]:
        """The prompts, such as "a yellow digit on a white background"."""
        return [make_prompt(None, d.ink, d.background) for d in self.wanted]


def draw_edits(count: int, split: str, seed: int) -> Edits:
    """Generate images of a split, each with a prompt that names another ink and another background."""
    rng = random.Random(f"edits-{seed}")
    inputs = draw_images(count, split, seed)
    wanted = []
    for old in inputs.descriptions:
        ink = rng.choice([name for name in COLOR_NAMES if name != old.ink])
        background = rng.choice([name for name in COLOR_NAMES if name not in (ink, old.background)])
        wanted.append(Description(None, ink, background))
    targets = repaint(inputs.images, two_colors(inputs.descriptions), two_colors(wanted))
    return Edits(inputs, wanted, targets)


# --------------------------------------------------------------------------------------- classifiers
# They differ in architecture and seed, and the reward model and the evaluator in their half of the training
# handwriting. The evaluator was trained on clean images only, as an off-the-shelf classifier would be. The
# reward model was also trained on damaged images, with soft targets for how legible they are; therefore its
# log-probability of the true digit has a gradient wherever an image can become more legible. A reward may
# measure colors by the rule of the evaluation; the second evaluator is not used in any training.
class RewardModel(Classifier):
    """The classifier in the reward: strided convolutions; (B, 3, 32, 32) to logits (B, 10)."""

    weights = CHECKPOINT / "reward_model.safetensors"

    def __init__(self) -> None:
        super().__init__()
        self.features = strided_convolutions(32, 48, 64, 96, first_stride=1)  # (B, 96, 4, 4)
        self.head = nn.Linear(96 * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 10) of images (B, 3, 32, 32) in [0, 1]."""
        return self.head(self.features(images * 2 - 1).flatten(1))


class Judge(Classifier):
    """The held-out evaluator: wide kernels and max pooling; (B, 3, 32, 32) to logits (B, 10)."""

    weights = CHECKPOINT / "judge.safetensors"

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 24, 5, padding=2), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 5, padding=2), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(48, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveMaxPool2d(4),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(64 * 16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 10) of images (B, 3, 32, 32) in [0, 1]."""
        return self.head(self.features(images - 0.5).flatten(1))


class SecondJudge(Classifier):
    """The second held-out evaluator: a `patch_mixer`.

    It maps (B, 3, 32, 32) to logits of the digit (B, 10), the ink (B, 6) and the background (B, 6).
    """

    weights = CHECKPOINT / "second_judge.safetensors"

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*patch_mixer(64))  # (B, 64, 8, 8)
        self.head = nn.Linear(64, 10 + 2 * len(COLORS))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logits of digit, ink and background of images (B, 3, 32, 32) in [0, 1]."""
        logits = self.head(self.features(images - 0.5).mean(dim=(2, 3)))  # (B, 22)
        return logits.split([10, len(COLORS), len(COLORS)], dim=1)


def accuracy(model: nn.Module, images: torch.Tensor, digits: torch.Tensor) -> float:
    """Return the accuracy of a model on images (N, 3, 32, 32), on any device, with these digits (N,)."""
    return (named(model, images)[:, 0] == digits.cpu()).float().mean().item()


@torch.no_grad()
def _hits(images: torch.Tensor, truth: torch.Tensor, judge: nn.Module) -> torch.Tensor:
    """Return (N, 3) whether digit (by the evaluator), ink and background (measured) are correct."""
    colors = [nearest(color, COLORS).cpu() for color in measure_colors(images)]
    return torch.stack([named(judge, images)[:, 0], *colors], dim=1) == truth


def score_prompts(
    judge: nn.Module, images: torch.Tensor, descriptions: list[Description]
) -> dict[str, float]:
    """Return the fraction of images whose digit, ink, background, and all three, match the prompt.

    The images (N, 3, 32, 32) in [0, 1] and the evaluator may be on any device.
    """
    digits = torch.tensor([d.digit for d in descriptions])
    hits = _hits(images, torch.cat([digits[:, None], color_indices(descriptions)], dim=1), judge)
    right = {"digit": hits[:, 0], "ink": hits[:, 1], "background": hits[:, 2], "all three": hits.all(dim=1)}
    return {name: part.float().mean().item() for name, part in right.items()}


def judge_edits(
    images: torch.Tensor, edits: Edits, judge: Judge, second_judge: SecondJudge
) -> dict[str, torch.Tensor]:
    """Return which edited images match their prompt and keep their digit, as booleans (N,) on the CPU.

    For images (N, 3, 32, 32) in [0, 1], "digit" says whether the evaluator recognizes the digit of the input,
    "colors" whether the measured ink and background are nearest to the named ones, and "both" combines the
    two. "second_judge" says whether the second evaluator classifies all three correctly. Images and
    evaluators may be on any device.
    """
    truth = torch.cat([edits.inputs.digits[:, None], color_indices(edits.wanted)], dim=1)  # (N, 3)
    hits = _hits(images, truth, judge)
    return {
        "digit": hits[:, 0],
        "colors": hits[:, 1:].all(dim=1),
        "both": hits.all(dim=1),
        "second_judge": (named(second_judge, images) == truth).all(dim=1),
    }
