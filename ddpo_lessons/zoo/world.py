"""The world of animals: forty-five animals, each by three artists, on a ground of one colour, in a sentence.

The pictures are emoji: Noto (Apache-2.0), Twemoji (CC BY 4.0) and Fluent flat (MIT), see LICENSES.md. Each
becomes a 64x64 picture such as "a fox by Noto on a blue background", turned to either side, larger or
smaller, shifted. Thirty of the 135 combinations of animal and artist are kept from the denoiser's training.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from ddpo_lessons.animals import ANIMALS

IMAGE_SIZE = 64
ARTISTS = ("Noto", "Twemoji", "Fluent")
GROUNDS: dict[str, tuple[float, float, float]] = {
    "red": (0.86, 0.25, 0.27),
    "orange": (0.96, 0.58, 0.22),
    "yellow": (0.98, 0.86, 0.36),
    "green": (0.36, 0.70, 0.42),
    "blue": (0.31, 0.56, 0.90),
    "purple": (0.56, 0.38, 0.75),
    "pink": (0.97, 0.70, 0.81),
    "white": (0.96, 0.96, 0.96),
}
GROUND_NAMES = tuple(GROUNDS)
SHEET = Path(__file__).with_name("sheet.png")  # a row an animal, a column an artist, RGBA, 64x64 each

# Two animals of three miss one artist in pre-training, each artist ten times.
LEFT_OUT = tuple((animal, (animal + animal // 3) % 3) for animal in range(len(ANIMALS)) if animal % 3)
SEEN = tuple((a, b) for a in range(len(ANIMALS)) for b in range(len(ARTISTS)) if (a, b) not in LEFT_OUT)
# What an edit is practised on, and nine animals that RL never sees.
NEW_ANIMALS = tuple(range(2, len(ANIMALS), 5))
PRACTICE_ANIMALS = tuple(animal for animal in range(len(ANIMALS)) if animal not in NEW_ANIMALS)


# ------------------------------------------------------------------------------------------ rendering
@functools.cache
def sprites() -> torch.Tensor:
    """Return the sheet's pictures, colours multiplied by coverage: (45, 3, 4, 64, 64), RGBA in [0, 1]."""
    sheet = torch.from_numpy(np.array(Image.open(SHEET))).float() / 255  # (45 * 64, 3 * 64, 4)
    grid = sheet.reshape(len(ANIMALS), IMAGE_SIZE, len(ARTISTS), IMAGE_SIZE, 4).permute(0, 2, 4, 1, 3)
    return torch.cat([grid[:, :, :3] * grid[:, :, 3:], grid[:, :, 3:]], dim=2)


def placements(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw placements: either side, 78% to 94% of the picture's size, shifted by at most 2.5 pixels.

    Args:
        count: number of placements N.
        generator: source of the randomness.

    Returns:
        Affine matrices (N, 2, 3) for `render`, mapping the picture's coordinates to the sprite's.
    """
    uniform = torch.rand(count, 4, generator=generator)
    scale = 1 / (0.78 + 0.16 * uniform[:, 0])  # (N,)
    side = torch.where(uniform[:, 1] < 0.5, -1.0, 1.0)
    dx, dy = ((2 * u - 1) * 2.5 * 2 / IMAGE_SIZE * scale for u in (uniform[:, 2], uniform[:, 3]))
    zero = torch.zeros(count)
    return torch.stack([side * scale, zero, dx, zero, scale, dy], dim=1).reshape(-1, 2, 3)


def render(pairs: torch.Tensor, grounds: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    """Draw animals on grounds.

    Args:
        pairs: indices of animal and artist, (N, 2).
        grounds: indices in `GROUNDS`, (N,).
        theta: (N, 2, 3) placements.

    Returns:
        Images (N, 3, 64, 64) in [0, 1].
    """
    grid = F.affine_grid(theta, [len(pairs), 4, IMAGE_SIZE, IMAGE_SIZE], align_corners=False)
    rgba = F.grid_sample(sprites()[pairs[:, 0], pairs[:, 1]], grid, align_corners=False)  # (N, 4, 64, 64)
    ground = torch.tensor(list(GROUNDS.values()))[grounds][:, :, None, None]
    return rgba[:, :3] + (1 - rgba[:, 3:]) * ground


def nearest_ground(rgb: torch.Tensor) -> torch.Tensor:
    """Return the index in `GROUNDS` of the colour nearest to each RGB row; (B, 3) -> (B,)."""
    palette = torch.tensor(list(GROUNDS.values()), dtype=rgb.dtype, device=rgb.device)  # (8, 3)
    return torch.cdist(rgb, palette).argmin(dim=1)


# -------------------------------------------------------------------------------------------- prompts
@dataclass(frozen=True)
class Description:
    """What a prompt of the world of animals says; None where it says nothing."""

    animal: str | None = None
    artist: str | None = None
    ground: str | None = None


def make_prompt(animal: str | None, artist: str | None = None, ground: str | None = None) -> str:
    """Put a description into words, e.g. "a fox by Noto on a blue background".

    Args:
        animal: a name of `ANIMALS`, or None for "animal".
        artist: a name of `ARTISTS`, or None.
        ground: a name of `GROUNDS`, or None.

    Returns:
        The prompt.
    """
    noun = animal or "animal"
    words = ["an" if noun[0] in "aeiou" else "a", noun]
    words += ["by", artist] if artist else []
    words += ["on", "an" if ground[0] in "aeiou" else "a", ground, "background"] if ground else []
    return " ".join(words)


def parse_prompt(prompt: str) -> Description:
    """Read a prompt of the world of animals; the inverse of `make_prompt`.

    Args:
        prompt: any text; words that this world does not know are ignored.

    Returns:
        What the prompt says.
    """
    words = re.findall("[a-z]+", prompt.lower())
    return Description(
        animal=next((word for word in words if word in ANIMALS), None),
        artist=next((name for name in ARTISTS if name.lower() in words), None),
        ground=next((word for word in words if word in GROUNDS), None),
    )


# ------------------------------------------------------------------------------------------- pictures
@dataclass(frozen=True)
class Pictures:
    """A batch of the world of animals.

    Attributes:
        images: (N, 3, 64, 64) in [0, 1].
        labels: indices of animal, artist and ground, (N, 3) int64.
        theta: where each animal stands, (N, 2, 3), see `placements`.
    """

    images: torch.Tensor
    labels: torch.Tensor
    theta: torch.Tensor

    @property
    def descriptions(self) -> list[Description]:
        """The names of what every picture shows."""
        return [Description(ANIMALS[a], ARTISTS[b], GROUND_NAMES[c]) for a, b, c in self.labels.tolist()]

    @property
    def prompts(self) -> list[str]:
        """The full sentence for every picture."""
        return [make_prompt(d.animal, d.artist, d.ground) for d in self.descriptions]


def draw_pictures(count: int, seed: int, pairs: Sequence[tuple[int, int]] = SEEN + LEFT_OUT) -> Pictures:
    """Draw random pictures of the world of animals.

    Args:
        count: number of pictures N.
        seed: decides what they show, and the placements.
        pairs: the pairs of (animal, artist) to draw from; by default all 135.

    Returns:
        The pictures.
    """
    rng = random.Random(seed)
    chosen = torch.tensor([rng.choice(pairs) for _ in range(count)])  # (N, 2)
    grounds = torch.tensor([rng.randrange(len(GROUNDS)) for _ in range(count)])
    theta = placements(count, torch.Generator().manual_seed(seed))
    return Pictures(render(chosen, grounds, theta), torch.cat([chosen, grounds[:, None]], dim=1), theta)


@dataclass(frozen=True)
class Edits:
    """Pictures, and for each a sentence that asks for another artist and another ground: the animal stays.

    Attributes:
        pictures: N pictures, what goes in.
        wanted: indices of animal (the picture's own), artist and ground (both others), (N, 3).
        targets: (N, 3, 64, 64), that animal by that artist on that ground, in the same place.
    """

    pictures: Pictures
    wanted: torch.Tensor
    targets: torch.Tensor

    @property
    def prompts(self) -> list[str]:
        """The sentences, such as "an animal by Twemoji on a green background"."""
        return [make_prompt(None, ARTISTS[b], GROUND_NAMES[c]) for _, b, c in self.wanted.tolist()]


@functools.cache
def _changes(animal: int, pairs: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Return the changes of artist (old, new) that the pairs allow for an animal."""
    artists = [artist for artist in range(len(ARTISTS)) if (animal, artist) in pairs]
    return list(itertools.permutations(artists, 2))


def draw_edits(
    count: int,
    seed: int,
    animals: Sequence[int] = PRACTICE_ANIMALS,
    pairs: tuple[tuple[int, int], ...] = SEEN,
) -> Edits:
    """Draw pictures, each with a sentence that names another artist and another ground, not the animal.

    Args:
        count: number of pictures N.
        seed: decides pictures and sentences.
        animals: indices of those that may be shown.
        pairs: the pairs of (animal, artist) of which both the picture and what becomes of it are; a tuple, in
            which every animal has two artists.

    Returns:
        Pictures, sentences, and what the pictures should become.
    """
    rng = random.Random(f"edits-{seed}")
    drawn = [rng.choice(animals) for _ in range(count)]
    chosen = torch.tensor([(a, *rng.choice(_changes(a, pairs))) for a in drawn])  # (N, 3): animal, old, new
    grounds = torch.tensor([rng.sample(range(len(GROUNDS)), 2) for _ in range(count)])  # (N, 2): old, new
    theta = placements(count, torch.Generator().manual_seed(seed))
    before = torch.stack([chosen[:, 0], chosen[:, 1], grounds[:, 0]], dim=1)
    wanted = torch.stack([chosen[:, 0], chosen[:, 2], grounds[:, 1]], dim=1)
    pictures = Pictures(render(before[:, :2], before[:, 2], theta), before, theta)
    return Edits(pictures, wanted, render(wanted[:, :2], wanted[:, 2], theta))
