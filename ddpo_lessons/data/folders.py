"""Lesson 08: read img2img contexts from a folder of images, with labels, captions and damage.

`FOLDER/cat/*.png` gives every image of that subfolder the label "cat". Images that lie in the folder itself
have no label, except for those of COD10K, whose file names hold it. `NAME.txt` beside `NAME.png` is the
image's caption: the prompt that the edit should follow, or several, one per line. Or `metadata.jsonl` or
`metadata.csv` in the folder holds all captions, as for datasets' imagefolder: {"file_name": "cat/a.png",
"text": "a white cat"}.
"""

import csv
import functools
import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps

from ddpo_lessons.damages import DAMAGES, blur
from ddpo_lessons.data.augmentation import augment
from ddpo_lessons.data.prompts import PromptSampler
from ddpo_lessons.image import to_rgb, to_tensor
from ddpo_lessons.words import DIGITS

METADATA = ("metadata.jsonl", "metadata.csv")  # captions of a whole folder
LABEL = "{label}"  # in a prompt: the image's class
CACHE_BYTES = 2**30  # of images that are kept fitted
READ = ".jpg, .png, .webp, .tif, .bmp or .gif"  # some of the endings that Pillow opens
MOST_NAMED = 10  # files in a message
# What PIL raises of files that are cut off, broken, bombs, or none of its kinds.
_UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
# COD10K's camouflaged images (Fan et al. 2020), such as COD10K-CAM-1-Aquatic-3-Crab-20.jpg. Those of other
# names in its folder show nothing camouflaged, or no animal.
COD10K = re.compile(r"COD10K-CAM-\d+-\w+-\d+-(\w+)-\d+")
REFERENCE_SIZE = 224  # pixels for which the benchmark of corruptions (arXiv 1903.12261) is made


@dataclass(frozen=True)
class ImageFolder:
    """The images of a folder."""

    folder: Path  #: where they are
    files: tuple[Path, ...]  #: their paths
    #: the name of each one's subfolder, or None where they lie in the folder itself and are not COD10K's
    labels: tuple[str, ...] | None
    #: the prompts of each one, at least one, or None where no image has a caption
    captions: tuple[tuple[str, ...], ...] | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """The different labels, sorted."""
        return tuple(sorted(set(self.labels or ())))

    def split(self, held_out: int, seed: int) -> tuple["ImageFolder", "ImageFolder"]:
        """Return images for training and held-out images, a given number per class, by the seed.

        Without classes, all images are one class. Raises a ValueError if no image, or all images of a class,
        would be held out.
        """
        groups: dict[str, list[int]] = {}
        for number, label in enumerate(self.labels or [""] * len(self.files)):
            groups.setdefault(label, []).append(number)
        chosen = set[int]()
        for label, numbers in groups.items():
            if not 1 <= held_out < len(numbers):
                of = f" of {label}" if label else ""
                raise ValueError(
                    f"held_out={held_out} of {len(numbers)} images{of}: hold out at least 1, and keep one to "
                    "train on"
                )
            chosen |= set(random.Random(f"{seed}-held-out-{label}").sample(numbers, held_out))
        rows = range(len(self.files))
        return self._only([n for n in rows if n not in chosen]), self._only(sorted(chosen))

    def large_classes(self, least: int) -> "ImageFolder":
        """Return the images of the classes that have at least this many; print which are left out, if any.

        Without classes, all images are one class. Raises a ValueError if no class is large enough.
        """
        labels = self.labels or [""] * len(self.files)
        counts = Counter(labels)
        if (largest := max(counts.values(), default=0)) < least:
            raise ValueError(
                f"no class has {least} images, because the largest one has {largest}: add images to "
                f"{self.folder}, or ask for fewer"
            )
        small = [f"{label} ({count})" for label, count in sorted(counts.items()) if count < least]
        if small:
            print(f"classes left out, because they have fewer than {least} images: {name_some(small)}")
        return self._only([row for row, label in enumerate(labels) if counts[label] >= least])

    def _only(self, rows: Sequence[int]) -> "ImageFolder":
        labels, captions = self.labels, self.captions
        return ImageFolder(
            self.folder,
            tuple(self.files[row] for row in rows),
            None if labels is None else tuple(labels[row] for row in rows),
            None if captions is None else tuple(captions[row] for row in rows),
        )


def find_images(folder: str | Path) -> ImageFolder:
    """Find the images of a folder or of its subfolders, and decode each to find damaged files.

    Beside the images lie captions, for all of them or for none; text files that share no image's name are
    notes, and are passed over, as hidden files are. Files are sorted by class and name. In the folder of
    COD10K, Train/Image or Test/Image, the camouflaged images are found, and "BatFish" in a name is the label
    "bat fish". Raises ValueError if it is no folder, holds no image, holds images both in itself and in
    subfolders, or has captions for some images only, or one that is empty or not UTF-8; OSError naming all
    images that cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    files, labels = _files_and_labels(folder)
    check_files(files)
    return ImageFolder(folder, files, labels or None, find_captions(folder, files))


def _files_and_labels(folder: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the images of a folder, and their labels or nothing."""
    flat = _image_files(folder)
    subfolders = [path for path in _visible(folder) if path.is_dir()]
    sorted_in = [(file, sub.name) for sub in subfolders for file in _image_files(sub)]
    if flat and sorted_in:
        raise ValueError(f"{folder} holds images beside subfolders of images: move them into one")
    if not flat and not sorted_in:
        others = [path for place in (folder, *subfolders) for path in _visible(place) if path.is_file()]
        endings = sorted({path.suffix.lower() or path.name for path in others})
        there = f", but files that end in {name_some(endings)}" if endings else ""
        raise ValueError(
            f"{folder} and its subfolders hold no image that can be read{there}: save images there as {READ}"
        )
    sorted_in = sorted_in or _labeled_by_name(flat)
    return tuple(file for file, _ in sorted_in) or tuple(flat), tuple(label for _, label in sorted_in)


def _labeled_by_name(files: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return COD10K's images among these, with the class in each file name."""
    named = [(file, match[1]) for file in files if (match := COD10K.fullmatch(file.stem))]
    spaced = [(file, re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower()) for file, name in named]
    return sorted(spaced, key=lambda entry: (entry[1], entry[0]))


def summary(images: ImageFolder) -> str:
    """Describe images in one line: folder, number, labels, captions, and files that the search skipped."""
    counts = Counter(images.labels or ())
    labels = ", ".join(f"{name} {number}" for name, number in sorted(counts.items())) or "none"
    captions = "none" if images.captions is None else f"{sum(map(len, images.captions))} prompts"
    count = f"{images.folder}: {len(images.files)} images"
    return f"{count}; labels: {labels}; captions: {captions}; {skipped(images)}"


def skipped(images: ImageFolder) -> str:
    """Describe in one line how many files of the images' folder `find_images` skips, and why."""
    has_captions, used = images.captions is not None, set(_files_and_labels(images.folder)[0])
    known = {file.with_suffix("") for file in used} if has_captions else set()
    found = _visible(images.folder)
    found += [path for sub in found if sub.is_dir() for path in _visible(sub)]
    left = [
        path
        for path in sorted(found)
        if path.is_file() and path not in used
        and not (path.suffix.lower() == ".txt" and path.with_suffix("") in known)
        and not (has_captions and path.name in METADATA)
    ]  # fmt: skip
    reasons = {
        "Pillow cannot open them": [path for path in left if not _is_image(path)],
        "their names hold no class": [path for path in left if _is_image(path)],  # beside images of COD10K
    }
    parts = [
        f"{len(files)} because {reason} ({_name_files(images.folder, files)})"
        for reason, files in reasons.items()
        if files
    ]
    return f"skipped files: {'; '.join(parts) or 'none'}"


def _visible(folder: Path) -> list[Path]:
    """List a folder without hidden files, such as the `._a.png` that macOS writes beside `a.png`."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _image_files(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if _is_image(path)]


def _is_image(path: Path) -> bool:
    """Return whether Pillow opens files with this ending."""
    kinds = Image.registered_extensions()  # which also names kinds that can only be written
    return kinds.get(path.suffix.lower()) in Image.OPEN


def find_captions(folder: Path, files: Sequence[Path]) -> tuple[tuple[str, ...], ...] | None:
    """Read the prompts of every image, from a file for the folder or from text files beside images.

    None where there is neither kind of file. If some images have none, both kinds are there, or a file cannot
    be read, a ValueError names it.
    """
    places = sorted({file.parent for file in files})
    beside = [path for place in places for path in _visible(place) if path.suffix.lower() == ".txt"]
    texts = {path.with_suffix(""): path for path in beside}
    strays = texts.keys() - {file.with_suffix("") for file in files}
    sources = [folder / name for name in METADATA if (folder / name).exists()]
    sources += [path for name, path in texts.items() if name not in strays][:1]
    if not sources:
        return None
    if len(sources) > 1:
        names = " and in ".join(_name_files(folder, [source]) for source in sources)
        raise ValueError(f"{folder} has captions in {names}: keep one kind")
    if sources[0].parent == folder and sources[0].name in METADATA:
        said = {folder / name: lines for name, lines in _read_metadata(sources[0])}
    else:
        said = {
            file: _strip(_read_text(texts[name]).splitlines())
            for file in files
            if (name := file.with_suffix("")) in texts
        }
    if missing := [file for file in files if not said.get(file)]:
        remedy = f"add lines of {_name_files(folder, missing)} to {sources[0].name}"
        if sources[0].name not in METADATA:
            absent = _name_files(folder, [file.with_suffix(".txt") for file in missing])
            others = _name_files(folder, [texts[name] for name in sorted(strays)])
            remedy = f"write the prompt into {absent}"
            remedy += f" (no image has the name of {others})" if strays else ""
        raise ValueError(f"{folder} has captions, but not for all images: {remedy}, or take all captions out")
    return tuple(said[file] for file in files)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"the caption {file} is not UTF-8 text ({error}): save it as UTF-8") from error


def _read_metadata(file: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield images and captions: "text" (or "prompt") is one, in JSON also a list of several."""
    lines = _read_text(file).splitlines(keepends=True)
    rows: Any = csv.DictReader(lines) if file.suffix == ".csv" else filter(str.strip, lines)
    for number, row in enumerate(rows, start=1):
        try:
            entry = json.loads(row) if isinstance(row, str) else row
            said = entry["text"] if "text" in entry else entry["prompt"]
            yield Path(entry["file_name"]).as_posix(), _strip([said] if isinstance(said, str) else said)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            found = f"{type(error).__name__}: {error}"
            if isinstance(error, KeyError):
                found = f"it has {', '.join(map(repr, entry))}"
            raise ValueError(
                f'{file}, entry {number} is not like {{"file_name": "a.png", "text": "a cat"}}: {found}'
            ) from error


def _strip(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text.strip() for text in texts if text.strip())


def _name_files(folder: Path, files: Sequence[Path]) -> str:
    return name_some([file.relative_to(folder).as_posix() for file in files])


def name_some(names: Sequence[str]) -> str:
    """Return the first ten names and the number of the others."""
    rest = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def open_image(file: Path) -> Image.Image:
    """Open an image file upright and in RGB; raise an OSError with its name if it cannot be read."""
    try:
        with Image.open(file) as image:
            return to_rgb(image)
    except _UNREADABLE as error:
        raise OSError(f"{file} is damaged ({error}): replace it, or take it out") from error


def check_files(files: Sequence[Path]) -> None:
    """Decode every image once, in threads; raise an OSError that lists damaged files with reasons."""
    with ThreadPoolExecutor() as pool:  # decoders leave Python's lock
        reasons = pool.map(_why_unreadable, files)
        bad = [f"{file} ({reason})" for file, reason in zip(files, reasons, strict=True) if reason]
    if bad:
        raise OSError(
            f"{len(bad)} of {len(files)} images cannot be read: {name_some(bad)}: replace them, or take "
            "them out"
        )


def _why_unreadable(file: Path) -> str:
    try:
        with Image.open(file) as image:
            image.draft("RGB", (1, 1))  # JPEG is read to its end, and computed at an eighth of its size
            to_rgb(image)
    except _UNREADABLE as error:
        return str(error).replace(f" {str(file)!r}", "")
    return ""


# ------------------------------------------------------------------------------------------- contexts
def damage(image: torch.Tensor, name: str, severity: int, generator: torch.Generator) -> torch.Tensor:
    """Damage one image (3, H, W) in [0, 1] by a name of `damages.DAMAGES`, at a severity of 1 to 5.

    Noise and JPEG act on pixels, and fog on the whole image, at any size. Blur is measured in pixels: for
    sides above 224 pixels it grows with the side, because severities are defined for that size. Raises a
    ValueError for another name or severity.
    """
    if name not in DAMAGES:
        raise ValueError(f"damage={name!r} does not exist: use one of {list(DAMAGES)}")
    if name == "blurry":
        scale = max(1.0, min(image.shape[1:]) / REFERENCE_SIZE)
        return blur(image[None], severity, generator, scale)[0]
    return DAMAGES[name](image[None], severity, generator)[0]


def check_placeholders(prompt: str, images: ImageFolder) -> None:
    """Raise a ValueError for "{label}" without labels, or for another name in braces in a prompt."""
    for name in re.findall(r"{\w+}", prompt):
        if name != LABEL:
            raise ValueError(
                f"prompt={prompt!r}: nothing replaces {name}; only {LABEL} becomes the name of the image's "
                "subfolder"
            )
    if LABEL in prompt and images.labels is None:
        raise ValueError(
            f"prompt={prompt!r} names classes, but the folder {images.folder} has no class subfolders: sort "
            "the images into FOLDER/cat, FOLDER/dog, ..."
        )


class ImagePrompts(PromptSampler):
    """Sample images of a folder, as a prompt function `() -> (prompt, image (3, size, size), metadata)`.

    If the caption of an image has several prompts, one of them is chosen at random each time. Images without
    captions have `prompt`, in which "{label}" becomes the class. The images of an epoch are read together in
    threads (`prefetch`), and cached after resizing while there is room. For each image one of the damages
    (names of `damages.DAMAGES`) and one of the severities are sampled; without damages images stay clean.
    With `augmented` each draw is a random variant of its image, made before the damage, see `augment`.

    Metadata: `id`, the file's path in the folder, with captions followed by the prompt; `image`, the image
    that is trained on; `target`, the image before the damage, which is the same one without damages; with
    class subfolders `label`, and `digit` if the label names one; with damage also `damage` and `severity`.
    """

    def __init__(
        self,
        images: ImageFolder,
        prompt: str,
        size: int,
        seed: int,
        damages: Sequence[str] = (),
        severities: Sequence[int] = (1, 2, 3, 4, 5),
        augmented: bool = False,
    ) -> None:
        if not isinstance(images, ImageFolder):
            raise TypeError(f"images={images!r:.60} must come from find_images(FOLDER)")
        if not isinstance(prompt, str):
            raise TypeError(f"prompt={prompt!r:.60} must be text; it may be empty")
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"size={size!r}: give the side of the square in pixels, a whole number from 1")
        check_placeholders(prompt, images)
        super().__init__(self._draw_image, seed)
        self.images, self.prompt, self.size = images, prompt, size
        self.damages, self.severities, self.augmented = damages, severities, augmented
        self.kept = max(1, CACHE_BYTES // (3 * size**2))
        self._fitted = functools.lru_cache(self.kept)(self._read)

    def prefetch(self, calls: Sequence[bool]) -> None:
        """Read the images of the next draws in parallel: True for a call, False for a skip."""
        draws = [self.drawn + number for number, is_call in enumerate(calls) if is_call]
        wanted = dict.fromkeys(self._choose(self._generator(number)) for number in draws)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for _ in pool.map(self._fitted, list(wanted)[: self.kept]):
                pass

    def every(self) -> list[Any]:
        """Return one context per image, in order and without augmentation.

        Damage depends on seed and image.
        """
        numbers = range(len(self.images.files))
        return [self.describe(n, random.Random(f"{self.seed}-validation-{n}")) for n in numbers]

    def _read(self, number: int) -> Image.Image:
        return ImageOps.fit(open_image(self.images.files[number]), (self.size, self.size))

    def _choose(self, generator: random.Random) -> int:
        return generator.choice(range(len(self.images.files)))

    def _draw_image(self, generator: random.Random) -> Any:
        return self.describe(self._choose(generator), generator, self.augmented)

    def describe(self, number: int, generator: random.Random, augmented: bool = False) -> Any:
        """Return prompt, image (3, size, size) and metadata of an image, by its index in the folder."""
        images, fitted = self.images, self._fitted(number)
        image = to_tensor(augment(fitted, generator) if augmented else fitted)
        metadata: dict[str, Any] = {"id": images.files[number].relative_to(images.folder).as_posix()}
        wanted = self.prompt
        if images.captions is not None:
            wanted = generator.choice(images.captions[number])
            metadata["id"] += f": {wanted}"
        if images.labels is not None:
            label = metadata["label"] = images.labels[number]
            wanted = wanted.replace(LABEL, label)
            if label in DIGITS:
                metadata["digit"] = DIGITS.index(label)
        metadata["target"] = image
        if self.damages:
            name, severity = generator.choice(self.damages), generator.choice(self.severities)
            metadata |= {"damage": name, "severity": severity}
            noise = torch.Generator().manual_seed(generator.getrandbits(62))
            image = damage(image, name, severity, noise)
        return wanted, image, {**metadata, "image": image}
