"""The world of animals: forty-five animals, each by three artists, on a background of one color.

The drawings are emoji: Noto (Apache-2.0), Twemoji (CC BY 4.0) and Fluent flat (MIT), see LICENSES.md. Each
becomes an image (3, 64, 64) such as "a fox by Noto on a blue background", with a random direction, size and
shift. Pre-training leaves out thirty of the 135 pairs of animal and artist. For img2img, the input image has
confetti as its background.
"""

import functools
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.image import measure_background, to_pil
from ddpo_lessons.words import ANIMALS
from ddpo_lessons.worlds.judges import Classifier, named, nearest, patch_mixer, strided_convolutions

CHECKPOINT = CHECKPOINTS["tiny-zoo"]
IMAGE_SIZE = 64
ARTISTS = ("Noto", "Twemoji", "Fluent")
BACKGROUNDS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.25, 0.27),
    "orange": (0.96, 0.58, 0.22),
    "yellow": (0.98, 0.86, 0.36),
    "green": (0.36, 0.70, 0.42),
    "blue": (0.31, 0.56, 0.90),
    "purple": (0.56, 0.38, 0.75),
    "pink": (0.97, 0.70, 0.81),
    "white": (0.96, 0.96, 0.96),
}
BACKGROUND_NAMES = tuple(BACKGROUNDS)
CLASSES = (len(ANIMALS), len(ARTISTS), len(BACKGROUNDS))
NAMES = ("animal", "artist", "background")  # of the three tasks of `CLASSES`
NUM_DISCS = 100
SHEET = Path(__file__).with_name("sheet.png")  # one row per animal, one column per artist; RGBA, 64x64 each

# Pre-training leaves out one artist for two of every three animals, and each artist ten times.
LEFT_OUT = tuple((animal, (animal + animal // 3) % 3) for animal in range(len(ANIMALS)) if animal % 3)
SEEN = tuple((a, b) for a in range(len(ANIMALS)) for b in range(len(ARTISTS)) if (a, b) not in LEFT_OUT)
# Nine animals that RL never sees, and the others, which are used in training on edits.
NEW_ANIMALS = tuple(range(2, len(ANIMALS), 5))
PRACTICE_ANIMALS = tuple(animal for animal in range(len(ANIMALS)) if animal not in NEW_ANIMALS)


# ------------------------------------------------------------------------------------------ rendering
@functools.cache
def sprites() -> torch.Tensor:
    """Return all drawings (45, 3, 4, 64, 64) as RGBA in [0, 1], with colors multiplied by alpha."""
    sheet = torch.from_numpy(np.array(Image.open(SHEET))).float() / 255  # (45 * 64, 3 * 64, 4)
    grid = sheet.reshape(len(ANIMALS), IMAGE_SIZE, len(ARTISTS), IMAGE_SIZE, 4).permute(0, 2, 4, 1, 3)
    return torch.cat([grid[:, :, :3] * grid[:, :, 3:], grid[:, :, 3:]], dim=2)


def placements(count: int, generator: torch.Generator) -> torch.Tensor:
    """Sample affine maps (N, 2, 3) for `render`: a flip, 78% to 94% of the size, shifts up to 2.5 pixels."""
    uniform = torch.rand(count, 4, generator=generator)
    scale = 1 / (0.78 + 0.16 * uniform[:, 0])  # (N,)
    side = torch.where(uniform[:, 1] < 0.5, -1.0, 1.0)
    dx, dy = ((2 * u - 1) * 2.5 * 2 / IMAGE_SIZE * scale for u in (uniform[:, 2], uniform[:, 3]))
    zero = torch.zeros(count)
    return torch.stack([side * scale, zero, dx, zero, scale, dy], dim=1).reshape(-1, 2, 3)


def render(pairs: torch.Tensor, backgrounds: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """Render images (N, 3, 64, 64) in [0, 1] of pairs of animal and artist (N, 2) on backgrounds (N,).

    Pairs and backgrounds are indices, and `theta` (N, 2, 3) are the affine maps of `placements`.
    """
    return draw_over(torch.tensor(list(BACKGROUNDS.values()))[backgrounds][:, :, None, None], pairs, theta)


def draw_over(images: torch.Tensor, pairs: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """Render animals on images (N, 3, 64, 64) or colors (N, 3, 1, 1); other arguments as in `render`."""
    grid = F.affine_grid(theta, [len(pairs), 4, IMAGE_SIZE, IMAGE_SIZE], align_corners=False)
    rgba = F.grid_sample(sprites()[pairs[:, 0], pairs[:, 1]], grid, align_corners=False)  # (N, 4, 64, 64)
    return rgba[:, :3] + (1 - rgba[:, 3:]) * images


def draw_confetti(count: int, seed: int) -> torch.Tensor:
    """Generate images of confetti (N, 3, 64, 64): overlapping discs, colored between two background colors.

    Such a "dead leaves" image has edges of all lengths, as natural images have (Lee, Mumford and Huang 2001,
    "Occlusion models for natural images", IJCV 41). The seed determines positions, radii (4 to 11 pixels) and
    colors.
    """
    # Derived, because `placements` uses the seed itself.
    generator = torch.Generator().manual_seed(random.Random(f"confetti-{seed}").getrandbits(62))
    palette = torch.tensor(list(BACKGROUNDS.values()))
    of = torch.randint(len(BACKGROUNDS), (2, NUM_DISCS, count), generator=generator)
    x, y, radius, share = torch.rand(4, NUM_DISCS, count, 1, generator=generator)  # (100, N, 1) each
    colors = palette[of[0]].lerp(palette[of[1]], share)[..., None, None]  # (100, N, 3, 1, 1)
    pixels = torch.arange(IMAGE_SIZE) + 0.5
    images = colors[0].repeat(1, 1, IMAGE_SIZE, IMAGE_SIZE)
    for disc in range(1, NUM_DISCS):
        across, down = pixels - IMAGE_SIZE * x[disc], pixels - IMAGE_SIZE * y[disc]  # (N, 64) each
        inside = down[:, :, None] ** 2 + across[:, None] ** 2 < (4 + 7 * radius[disc, :, None]) ** 2
        images = torch.where(inside[:, None], colors[disc], images)
    return images


def background_distance(
    images: torch.Tensor, names: Sequence[str | None], masks: torch.Tensor | None = None
) -> torch.Tensor:
    """Measure the distance (B,) of images (B, 3, H, W) from plain backgrounds, without a learned model.

    The distance is Euclidean in RGB, between the named color and a pixel, and the mean is taken over the
    pixels where `masks` (B, H, W) is true; without masks, over the outermost three rows and columns. The
    result is 0 if no background is named or the mask is empty.
    """
    if masks is None:
        masks = torch.ones_like(images[:, 0], dtype=torch.bool)
        masks[:, 3:-3, 3:-3] = False
    colors = images.new_tensor([BACKGROUNDS[name or BACKGROUND_NAMES[0]] for name in names])[:, :, None, None]
    masks = masks.to(images.device)
    distances = (images.float() - colors).norm(dim=1) * masks  # (B, H, W)
    mean = distances.sum(dim=(1, 2)) / masks.sum(dim=(1, 2)).clamp(min=1)
    return mean * mean.new_tensor([name is not None for name in names])


# -------------------------------------------------------------------------------------------- prompts
@dataclass(frozen=True)
class Description:
    """The content of a prompt of this world; None for what the prompt does not name."""

    animal: str | None = None
    artist: str | None = None
    background: str | None = None


def make_prompt(animal: str | None, artist: str | None = None, background: str | None = None) -> str:
    """Write a prompt such as "a fox by Noto on a blue background"; without an animal, "an animal ..."."""
    noun = animal or "animal"
    words = ["an" if noun[0] in "aeiou" else "a", noun]
    words += ["by", artist] if artist else []
    words += ["on", "an" if background[0] in "aeiou" else "a", background, "background"] if background else []
    return " ".join(words)


def parse_prompt(prompt: str) -> Description:
    """Parse a text as a prompt of this world; unknown words are ignored. The inverse of `make_prompt`."""
    words = re.findall("[a-z]+", prompt.lower())
    return Description(
        animal=next((word for word in words if word in ANIMALS), None),
        artist=next((name for name in ARTISTS if name.lower() in words), None),
        background=next((word for word in words if word in BACKGROUNDS), None),
    )


# --------------------------------------------------------------------------------------------- images
@dataclass(frozen=True)
class LabeledImages:
    """A batch of images of animals with their labels."""

    images: torch.Tensor  #: (N, 3, 64, 64) in [0, 1]
    labels: torch.Tensor  #: indices of animal, artist and background, (N, 3) int64
    theta: torch.Tensor  #: affine maps of `placements`, (N, 2, 3)

    @property
    def descriptions(self) -> list[Description]:
        """The names of animal, artist and background of each image."""
        return [Description(ANIMALS[a], ARTISTS[b], BACKGROUND_NAMES[c]) for a, b, c in self.labels.tolist()]

    @property
    def prompts(self) -> list[str]:
        """The complete prompt of each image."""
        return [make_prompt(d.animal, d.artist, d.background) for d in self.descriptions]


def draw_images(count: int, seed: int, pairs: Sequence[tuple[int, int]] = SEEN + LEFT_OUT) -> LabeledImages:
    """Generate random images of the given (animal, artist) pairs, by default of all 135."""
    rng = random.Random(seed)
    chosen = torch.tensor([rng.choice(pairs) for _ in range(count)])  # (N, 2)
    backgrounds = torch.tensor([rng.randrange(len(BACKGROUNDS)) for _ in range(count)])
    theta = placements(count, torch.Generator().manual_seed(seed))
    labels = torch.cat([chosen, backgrounds[:, None]], dim=1)
    return LabeledImages(render(chosen, backgrounds, theta), labels, theta)


def write_images(folder: str | Path, per_class: int, seed: int) -> Path:
    """Write `per_class` images of each animal as `FOLDER/ANIMAL/*.png`, and return the folder.

    Only pairs of animal and artist from pre-training are used.
    """
    for animal, name in enumerate(ANIMALS):
        pairs = [pair for pair in SEEN if pair[0] == animal]
        drawn = draw_images(per_class, random.Random(f"{seed}-{name}").getrandbits(62), pairs)
        (Path(folder) / name).mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(drawn.images):
            to_pil(image).save(Path(folder) / name / f"{number:04d}.png")
    return Path(folder)


@dataclass(frozen=True)
class Edits:
    """Input images of animals on confetti, each with a prompt that names only a background."""

    images: torch.Tensor  #: the input images, (N, 3, 64, 64) in [0, 1]
    wanted: LabeledImages  #: the correct results: the same animals, on the backgrounds that the prompts name

    @property
    def prompts(self) -> list[str]:
        """The prompts, such as "an animal on a green background"."""
        return [make_prompt(None, None, d.background) for d in self.wanted.descriptions]

    @property
    def background_masks(self) -> torch.Tensor:
        """Masks (N, 64, 64) of the background in the correct results, at least one pixel from the animal."""
        other = (self.wanted.images - self._colors).norm(dim=1, keepdim=True) >= 0.02  # (N, 1, 64, 64)
        return F.max_pool2d(other.float(), 3, stride=1, padding=1)[:, 0] == 0

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """What a reward needs and the prompts do not name: `animal`, `artist` and `background_mask`."""
        shown = zip(self.wanted.descriptions, self.background_masks, strict=True)
        return [{"animal": d.animal, "artist": d.artist, "background_mask": mask} for d, mask in shown]

    def are_plain(self, images: torch.Tensor) -> torch.Tensor:
        """Return (N,) whether at least 90% of an image's background is within 0.15 (RGB) of the named color.

        The images may be on any device; the result is on the CPU.
        """
        background = self.background_masks
        plain = ((images.float().cpu() - self._colors).norm(dim=1) < 0.15) & background
        return plain.sum(dim=(1, 2)) >= 0.9 * background.sum(dim=(1, 2))

    @property
    def _colors(self) -> torch.Tensor:
        """The named background colors, (N, 3, 1, 1)."""
        return torch.tensor(list(BACKGROUNDS.values()))[self.wanted.labels[:, 2]][:, :, None, None]


def draw_edits(count: int, seed: int, animals: Sequence[int] = PRACTICE_ANIMALS) -> Edits:
    """Generate edits of random animals (indices), in pairs with artists from pre-training."""
    wanted = draw_images(count, seed, [pair for pair in SEEN if pair[0] in animals])
    return Edits(draw_over(draw_confetti(count, seed), wanted.labels[:, :2], wanted.theta), wanted)


# --------------------------------------------------------------------------------------- classifiers
# They differ in architecture, in seed, in the images that they were trained on (other sizes, places and
# backgrounds of the same drawings) and in how those were damaged: blurred and noisy for the reward model,
# which has to score what a policy generates on its way; noisy for the evaluator; with a part cut out for the
# second evaluator.
class AnimalClassifier(Classifier):
    """One linear layer on flattened features (B, width) of an image; subclasses differ in the features."""

    def __init__(self, features: nn.Module, width: int) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(width, sum(CLASSES))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logits of animal (B, 45), artist (B, 3), background (B, 8) of images (B, 3, 64, 64)."""
        return self.head(self.features(images * 2 - 1).flatten(1)).split(CLASSES, dim=1)


class RewardModel(AnimalClassifier):
    """The classifier in the reward: strided convolutions."""

    weights = CHECKPOINT / "reward_model.safetensors"

    def __init__(self) -> None:
        super().__init__(strided_convolutions(24, 48, 64, 96), 96 * 16)  # (B, 96, 4, 4)


class Judge(AnimalClassifier):
    """The held-out evaluator, which is not used in training: wide kernels and max pooling."""

    weights = CHECKPOINT / "judge.safetensors"

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((3, 24, 32, 64)):
            layers += [nn.Conv2d(before, after, 5, padding=2), nn.MaxPool2d(2)]
            layers += [nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(nn.Sequential(*layers, nn.AdaptiveMaxPool2d(4), nn.Dropout(0.3)), 64 * 16)


class SecondJudge(AnimalClassifier):
    """The second held-out evaluator: a `patch_mixer`."""

    weights = CHECKPOINT / "second_judge.safetensors"

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*patch_mixer(64), nn.AdaptiveAvgPool2d(2)), 64 * 4)  # (B, 64, 2, 2)


def verdicts(
    images: torch.Tensor, labels: torch.Tensor, judge: Judge, second_judge: SecondJudge
) -> dict[str, torch.Tensor]:
    """Return what is correct in images (N, 3, 64, 64) in [0, 1], by key, as booleans (N,) on the CPU.

    `labels` are the correct indices of animal, artist and background, (N, 3) on the CPU. "animal" and
    "artist" are classified by `judge`, "background" is measured, "all" combines the three, and
    "second_judge" says whether the second evaluator classifies all three correctly. Images and evaluators
    may be on any device.
    """
    hits = named(judge, images) == labels  # (N, 3)
    hits[:, 2] = nearest(measure_background(images), BACKGROUNDS).cpu() == labels[:, 2]
    right = dict(zip(NAMES, hits.T, strict=True))
    right["all"] = hits.all(dim=1)
    right["second_judge"] = (named(second_judge, images) == labels).all(dim=1)
    return right


def judge_edits(
    images: torch.Tensor, edits: Edits, judge: Judge, second_judge: SecondJudge
) -> dict[str, torch.Tensor]:
    """Return what is correct in edited images, as `verdicts` does; a background must also be plain."""
    right, plain = verdicts(images, edits.wanted.labels, judge, second_judge), edits.are_plain(images)
    return right | {name: right[name] & plain for name in ("background", "all", "second_judge")}
