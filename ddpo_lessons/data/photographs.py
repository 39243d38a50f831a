"""Lesson 13: download photographs from the model hub as a folder of class subfolders."""

import shutil
from pathlib import Path
from typing import Any

from ddpo_lessons import hub
from ddpo_lessons.data.folders import ImageFolder, find_images
from ddpo_lessons.image import to_rgb

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

    A folder that is there already is only read. The set is streamed until each class has `per_class`, and
    lies in FOLDER.part until then, so that after an interruption the next call begins anew. The source is a
    name on the hub, or a folder of its files, with one column of images and one of class labels.

    Raises ImportError without the package `datasets`; ValueError if the folder does not hold `per_class` of
    every class, if that is below 1, if the set has no such columns, or too few images of a class;
    RuntimeError if the set cannot be had.
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
