"""Lesson 13: download photographs from the model hub as class subfolders, and label unsorted ones."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddpo_lessons import hub
from ddpo_lessons.data.folders import ImageFolder, find_images, open_image
from ddpo_lessons.image import fit, to_rgb
from ddpo_lessons.rewards.learned import CLIP_MODEL, load_clip
from ddpo_lessons.rewards.reward import check_classes

# Ten easy classes of ImageNet (github.com/fastai/imagenette), the shorter side of an image 320 pixels.
IMAGENETTE = "johnowhitaker/imagenette2-320"
# A set may name its classes by WordNet's numbers; here are names that a caption can hold.
CLASS_NAMES = {
    "n01440764": "tench",
    "n02102040": "springer spaniel",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}


def fetch_photographs(
    folder: str | Path, per_class: int = 40, source: str = IMAGENETTE, split: str = "train"
) -> ImageFolder:
    """Download the first photographs of every class of a set as `FOLDER/CLASS/*.jpg`; return them.

    An existing folder is only read. Otherwise the set is streamed into FOLDER.part until each class has
    `per_class` images, so that after an interruption the next call starts again. The source is a name on the
    hub, or a folder of its files, with one column of images and one of class labels.

    Raises ImportError without the package `datasets`; ValueError if the folder does not hold `per_class` of
    every class, if that is below 1, if the set has no such columns, or too few images of a class;
    RuntimeError if the set cannot be loaded.
    """
    if per_class < 1:
        raise ValueError(f"per_class={per_class}: take at least 1 image of each class")
    folder = Path(folder)
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        _write(_stream(source, split), part, per_class, source)
        part.rename(folder)
    images = find_images(folder)
    held = {name: (images.labels or ()).count(name) for name in images.classes}
    if not held or set(held.values()) != {per_class}:
        raise ValueError(
            f"{folder} does not hold {per_class} images of each class, but {held}: read it with find_images, "
            "remove it, or fetch into another folder"
        )
    return images


def _stream(source: str, split: str) -> Any:
    """Return a dataset whose rows are read one after another; nothing is kept on the disk."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("photographs from the hub need a package: pip install datasets") from error
    try:
        if not Path(source).exists() and not hub.hub_reachable():  # its client would try for minutes
            raise ConnectionError("the hub does not answer")
        return load_dataset(source, split=split, streaming=True)
    except Exception as error:  # of network, files and formats, which share no base
        raise RuntimeError(
            f"the photographs {source!r} could not be had ({type(error).__name__}: {error}): sort images of "
            "your own into FOLDER/cat, FOLDER/dog, ... and read them with find_images"
        ) from error


def _write(dataset: Any, folder: Path, per_class: int, source: str) -> None:
    columns = {type(kind).__name__: name for name, kind in (dataset.features or {}).items()}
    if not {"Image", "ClassLabel"} <= set(columns):
        raise ValueError(f"{source} has no column of images or none of class labels: take another source")
    image, label = columns["Image"], columns["ClassLabel"]
    kind, names = dataset.features[image], [CLASS_NAMES.get(n, n) for n in dataset.features[label].names]
    written = dict.fromkeys(names, 0)
    for row in dataset.cast_column(image, type(kind)(decode=False)):  # most rows are passed over
        name = names[row[label]]
        if written[name] < per_class:
            file = folder / name / f"{written[name]:04d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            to_rgb(kind.decode_example(row[image])).save(file, quality=95)
            written[name] += 1
        if min(written.values()) == per_class:
            return
    raise ValueError(f"{source} has {written} images, not {per_class} of every class: lower per_class")


@torch.no_grad()
def label_images(
    images: ImageFolder,
    classes: Sequence[str],
    device: str | torch.device = "cpu",
    model: str | Path = CLIP_MODEL,
) -> ImageFolder:
    """Label each image with the class that CLIP finds most likely, in place of any subfolder's name.

    These are pseudo-labels: an image of none of the classes also gets one of them. Images are cropped to a
    square around their center, as for training. Raises ValueError for fewer than two classes or equal names;
    RuntimeError if the model cannot be loaded.
    """
    check_classes(classes)
    clip = load_clip(model).to(device)
    texts = clip.embed_texts([f"a photo of a {name}" for name in classes])  # (classes, D)
    labels = []
    for file in images.files:
        shown = fit(open_image(file), clip.crop).to(device)
        labels.append(classes[int((clip.embed_images(shown[None]) @ texts.T).argmax())])
    return replace(images, labels=tuple(labels))
