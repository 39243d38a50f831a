"""Photographs from the hub, here from a parquet file on the disk, which the same code streams."""

import sys
from pathlib import Path

import datasets
import pytest
import torch
from helpers import pictures, write_clip
from PIL import Image

from ddpo_lessons import hub
from ddpo_lessons.data import photographs
from ddpo_lessons.data.folders import ImagePrompts, find_images
from ddpo_lessons.data.photographs import fetch_photographs, label_images
from ddpo_lessons.rewards import clip_margin

RED, GREEN = (254, 0, 0), (0, 255, 1)  # as JPEG gives them back


def parquet(folder: Path, labels: list[int], names: list[str]) -> str:
    """Write images, red for label 0 and green for others, of sides 40 + row, as a set on the hub has them."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    images = [
        Image.new("RGB", (40 + row, 40), ("red", "lime")[min(label, 1)]) for row, label in enumerate(labels)
    ]
    (folder / "data").mkdir(parents=True)
    made = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
    made.to_parquet(folder / "data" / "train-00000-of-00001.parquet")
    return str(folder)


@pytest.fixture
def source(tmp_path):
    return parquet(tmp_path / "set", [0, 1, 0, 0, 1, 1], ["n03028079", "golf ball"])


def test_the_first_of_each_class_lie_in_its_folder(source, tmp_path):
    images = fetch_photographs(tmp_path / "photos", per_class=2, source=source)
    assert images.labels == ("church", "church", "golf ball", "golf ball")
    assert images.files == tuple(
        tmp_path / "photos" / name / f"000{number}.jpg"
        for name in ("church", "golf ball") for number in (0, 1)
    )  # fmt: skip
    assert [Image.open(file).width for file in images.files] == [40, 42, 41, 44]  # rows 0, 2, 1 and 4
    assert [Image.open(file).getpixel((9, 9)) for file in images.files] == [RED, RED, GREEN, GREEN]
    assert not (tmp_path / "photos.part").exists()


def test_a_folder_that_is_there_is_only_read(source, tmp_path, monkeypatch):
    first = fetch_photographs(tmp_path / "photos", per_class=1, source=source)
    monkeypatch.setattr(photographs, "_stream", None)  # which nothing may call
    assert fetch_photographs(tmp_path / "photos", per_class=1, source=source) == first
    with pytest.raises(ValueError, match=r"does not hold 2 images of each class, but \{'church': 1, 'golf"):
        fetch_photographs(tmp_path / "photos", per_class=2, source=source)


def test_after_an_interruption_all_are_fetched(source, tmp_path, monkeypatch):
    done = []

    def stop(image):
        done.append(image)
        if len(done) == 3:
            raise KeyboardInterrupt
        return image.convert("RGB")

    monkeypatch.setattr(photographs, "to_rgb", stop)
    with pytest.raises(KeyboardInterrupt):
        fetch_photographs(tmp_path / "photos", per_class=2, source=source)
    assert not (tmp_path / "photos").exists()
    monkeypatch.undo()
    assert len(fetch_photographs(tmp_path / "photos", per_class=2, source=source).files) == 4


def test_what_cannot_be_is_refused(source, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"has \{'church': 3, 'golf ball': 3\} images, not 4 of every class"):
        fetch_photographs(tmp_path / "photos", per_class=4, source=source)
    with pytest.raises(ValueError, match="per_class=0: take at least 1"):
        fetch_photographs(tmp_path / "photos", per_class=0, source=source)
    table = tmp_path / "table"
    table.mkdir()
    datasets.Dataset.from_dict({"text": ["a"]}).to_parquet(table / "train.parquet")
    with pytest.raises(ValueError, match="no column of images or none of class labels"):
        fetch_photographs(tmp_path / "photos", source=str(table))
    monkeypatch.setattr(hub, "hub_reachable", lambda: False)
    with pytest.raises(RuntimeError, match=r"'owner/set' could not be had .*: sort images of your own into"):
        fetch_photographs(tmp_path / "photos", source="owner/set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        fetch_photographs(tmp_path / "photos", source=source)
    assert not (tmp_path / "photos").exists()


# ------------------------------------------------------------------------------------- without classes
class Colors(torch.nn.Module):
    """A stand-in for `Clip` that embeds images by their mean color, and "a photo of a red" as red."""

    crop = 8

    def embed_texts(self, texts):
        names = [text.removeprefix("a photo of a ") for text in texts]
        return torch.eye(3)[[["red", "green", "blue"].index(name) for name in names]]

    def embed_images(self, images):
        assert images.shape == (1, 3, 8, 8)
        return images.mean(dim=(2, 3))


def test_unsorted_images_get_the_class_that_clip_finds(tmp_path, monkeypatch):
    monkeypatch.setattr(photographs, "load_clip", lambda model: Colors())
    for number, color in enumerate(("lime", "red", "lime", "red", "lime")):
        pictures(tmp_path, f"{number}.png", color=color)
    images = label_images(find_images(tmp_path), ["red", "green", "blue"])
    assert images.labels == ("green", "red", "green", "red", "green")
    assert images.classes == ("green", "red")  # those that some image has
    train, held_out = images.split(1, seed=0)
    assert (len(train.files), sorted(held_out.labels)) == (3, ["green", "red"])
    (tmp_path / "2024").mkdir()
    for file in images.files:
        file.rename(tmp_path / "2024" / file.name)
    assert label_images(find_images(tmp_path), ["red", "green"]).labels == images.labels
    with pytest.raises(ValueError, match="two or more different names"):
        label_images(images, ["red"])


def test_the_reward_finds_the_labels_of_the_same_clip_correct(tmp_path):
    clip = write_clip(tmp_path / "clip")
    for number, color in enumerate(("lime", "red", "blue", "yellow")):
        pictures(tmp_path, f"photos/{number}.png", color=color)
    images = label_images(find_images(tmp_path / "photos"), ["cat", "owl", "bear"], model=clip)
    contexts = ImagePrompts(images, "", 32, seed=0).every()
    _, shown, metadata = zip(*contexts, strict=True)
    margins = clip_margin(clip, ["cat", "owl", "bear"])(torch.stack(shown), [""] * 4, metadata)
    assert (margins >= 0).all()
