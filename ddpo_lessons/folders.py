"""Lesson 08: img2img contexts from a folder of images, with class labels and damage.

`FOLDER/cat/*.png` gives every image of that subfolder the label "cat". Images that lie in the folder itself
have no label.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps

from ddpo_lessons.contexts import to_tensor
from ddpo_lessons.prompts import PromptSampler
from ddpo_lessons.rewards import REWARDS, RewardFunction, get_reward
from ddpo_lessons.tiny import world

# What rewards read from the metadata.
NEEDS = {
    "clip_margin": "label",
    "clip_change": "label",
    "digit_legibility": "digit",
    "digit_margin": "digit",
    "legibility_gain": "digit",
    "decorruption": "target",
    "distance_penalty": "target",
}
REFERENCE_SIZE = 224  # pixels for which the benchmark of corruptions (arXiv 1903.12261) is made


@dataclass(frozen=True)
class ImageFolder:
    """The images of a folder.

    Attributes:
        folder: where they are.
        files: their paths.
        labels: the name of each one's subfolder, or None where they lie in the folder itself.
    """

    folder: Path
    files: tuple[Path, ...]
    labels: tuple[str, ...] | None

    @property
    def classes(self) -> tuple[str, ...]:
        """The different labels, sorted."""
        return tuple(sorted(set(self.labels or ())))


def find_images(folder: Path) -> ImageFolder:
    """Find image files in a folder, or in its subfolders; each is opened, so that what is no image is found.

    Args:
        folder: holds image files, or subfolders named after classes that hold them.

    Returns:
        The files, sorted by class and name.

    Raises:
        ValueError: if it is no folder, holds no image, or holds images both in itself and in subfolders.
        OSError: if an image cannot be opened.
    """
    if not folder.is_dir():
        raise ValueError(f"--images {folder} is not a folder")
    flat = _image_files(folder)
    subfolders = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    sorted_in = [(file, sub.name) for sub in subfolders for file in _image_files(sub)]
    if flat and sorted_in:
        raise ValueError(f"--images {folder} holds images beside subfolders of images: move them into one")
    if not flat and not sorted_in:
        raise ValueError(f"--images {folder} holds no image file, nor do its subfolders")
    files = tuple(flat or (file for file, _ in sorted_in))
    for file in files:
        Image.open(file).close()
    return ImageFolder(folder, files, None if flat else tuple(label for _, label in sorted_in))


def _image_files(folder: Path) -> list[Path]:
    kinds = Image.registered_extensions()  # which also names kinds that can only be written
    return sorted(path for path in folder.iterdir() if kinds.get(path.suffix.lower()) in Image.OPEN)


def open_image(file: Path) -> Image.Image:
    """Open an image file upright and in RGB; one that is cut off is an OSError that names it."""
    try:
        with Image.open(file) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except OSError as error:
        raise OSError(f"{file} is damaged ({error}): replace it, or take it out") from error


def fit(image: Image.Image, size: int) -> torch.Tensor:
    """Resize an image so that its middle fills a square: (3, size, size) in [0, 1]."""
    return to_tensor(ImageOps.fit(image, (size, size)))


# -------------------------------------------------------------------------------------------- rewards
def check_needs(reward: str, images: ImageFolder, damages: Sequence[str]) -> None:
    """Refuse a reward that would not find in the metadata what it reads.

    Args:
        reward: a name of `REWARDS`.
        images: what is trained on.
        damages: what is done to them.

    Raises:
        ValueError: naming what is missing, and the remedy.
    """
    need = NEEDS.get(reward)
    if need in ("label", "digit") and images.labels is None:
        raise ValueError(
            f"--reward {reward} needs to know what the images show, but --images {images.folder} has no "
            "class subfolders: sort the images into FOLDER/cat, FOLDER/dog, ..."
        )
    if need == "label" and len(images.classes) < 2:
        raise ValueError(
            f"--reward {reward} compares classes, but --images {images.folder} has one subfolder, "
            f"{images.classes[0]}: add another"
        )
    if need == "digit":
        for name in images.classes:
            if name not in world.DIGITS:
                raise ValueError(
                    f"--reward {reward} reads digits, but --images {images.folder} has the subfolder "
                    f"{name}: name them {', '.join(world.DIGITS)}"
                )
    if need == "target" and not damages:
        raise ValueError(f"--reward {reward} compares with a clean original: give --damage, which keeps it")


def make_reward(name: str, images: ImageFolder) -> RewardFunction:
    """Make the reward of a name; those that compare classes compare the folder's.

    Args:
        name: a name of `REWARDS`.
        images: what is trained on.

    Returns:
        The reward function.

    Raises:
        ValueError: if the name does not exist.
        RuntimeError: if the reward needs a model that cannot be had.
    """
    if NEEDS.get(name) == "label":
        return REWARDS[name](classes=images.classes)  # type: ignore[call-arg]
    return get_reward(name)


# ------------------------------------------------------------------------------------------- contexts
def damage(image: torch.Tensor, name: str, severity: int, generator: torch.Generator) -> torch.Tensor:
    """Damage one image.

    Noise and JPEG act on pixels and fog on the whole picture, whatever its size. Blur is measured in pixels:
    above 224 of them to a side it grows with the side, as severities are made for that size.

    Args:
        image: (3, H, W) in [0, 1].
        name: a name of `world.DAMAGES`.
        severity: 1 to 5.
        generator: decides the damage.

    Returns:
        (3, H, W) in [0, 1].

    Raises:
        ValueError: if the damage or the severity does not exist.
    """
    if name not in world.DAMAGES:
        raise ValueError(f"damage={name!r} does not exist: use one of {list(world.DAMAGES)}")
    if name == "blurry":
        scale = max(1.0, min(image.shape[1:]) / REFERENCE_SIZE)
        return world.blur(image[None], severity, generator, scale)[0]
    return world.DAMAGES[name](image[None], severity, generator)[0]


def image_prompts(
    images: ImageFolder,
    prompt: str,
    size: int,
    seed: int,
    damages: Sequence[str] = (),
    severities: Sequence[int] = (1, 2, 3, 4, 5),
) -> PromptSampler:
    """Make a prompt function that draws images of a folder.

    Metadata: `id`, the file's place in the folder, and `image`, what is trained on; with class subfolders
    `label`, and `digit` where the label names one; with damage `target`, the clean image, `damage` and
    `severity`.

    Args:
        images: what to draw from.
        prompt: of every image.
        size: of the square that they are fitted to, in pixels.
        seed: decides the sequence.
        damages: names of `world.DAMAGES`, one of which is drawn for each image; none for clean images.
        severities: of which one is drawn.

    Returns:
        The prompt function, `() -> (prompt, image (3, size, size), metadata)`.
    """

    def draw(generator: random.Random) -> Any:
        number = generator.choice(range(len(images.files)))
        file = images.files[number]
        image = fit(open_image(file), size)
        metadata: dict[str, Any] = {"id": file.relative_to(images.folder).as_posix()}
        if images.labels is not None:
            label = metadata["label"] = images.labels[number]
            if label in world.DIGITS:
                metadata["digit"] = world.DIGITS.index(label)
        if damages:
            name, severity = generator.choice(damages), generator.choice(severities)
            metadata |= {"target": image, "damage": name, "severity": severity}
            noise = torch.Generator().manual_seed(generator.getrandbits(62))
            image = damage(image, name, severity, noise)
        return prompt, image, {**metadata, "image": image}

    return PromptSampler(draw, seed)
