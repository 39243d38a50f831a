"""Folders of images: labels, what rewards need, damage and its metadata."""

import ast
import colorsys
import contextlib
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import pictures
from PIL import Image

from ddpo_lessons import rewards
from ddpo_lessons.cli import reward_flag
from ddpo_lessons.damages import DAMAGES, blur
from ddpo_lessons.data import folders
from ddpo_lessons.image import to_tensor

ROOT = Path(__file__).parents[1]


def refused(match: str | None) -> Any:
    """Expect a ValueError, or none."""
    return pytest.raises(ValueError, match=match) if match else contextlib.nullcontext()


@pytest.fixture
def zoo(tmp_path):
    for place, color in (("dog/a.png", "red"), ("cat/a.png", "lime"), ("cat/b.png", "blue")):
        pictures(tmp_path, place, color=color)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    pictures(tmp_path, ".cache/a.png")
    (tmp_path / "empty").mkdir()
    return tmp_path


# ----------------------------------------------------------------------------------- what is in there
def test_subfolders_are_labels(zoo):
    images = folders.find_images(zoo)
    assert [file.relative_to(zoo).as_posix() for file in images.files] == [
        "cat/a.png",
        "cat/b.png",
        "dog/a.png",
    ]
    assert images.labels == ("cat", "cat", "dog")
    assert images.classes == ("cat", "dog")


def test_a_flat_folder_has_no_labels(tmp_path):
    pictures(tmp_path, "b.png")
    images = folders.find_images(tmp_path)
    assert images.labels is None
    assert images.classes == ()


@pytest.mark.parametrize("name", ["._a.png", ".hidden.png", "._a.txt", ".a.txt", ".DS_Store", "Thumbs.db"])
def test_hidden_files_are_neither_images_nor_captions(zoo, name):
    """macOS puts `._NAME` beside each file on foreign disks: half a kilobyte that begins with these bytes."""
    before = folders.find_images(zoo)
    for folder in (zoo, zoo / "cat"):
        (folder / name).write_bytes(bytes.fromhex("00051607000200004d6163204f532058"))
    pictures(zoo, "dog/.hidden.png")  # a whole image
    found = folders.find_images(zoo)
    assert found == before
    assert found.captions is None
    count, names = 1, "cat/notes.txt"
    if name == "Thumbs.db":
        count, names = 3, "Thumbs.db, cat/Thumbs.db, cat/notes.txt"
    line = f"skipped files: {count} because Pillow cannot open them ({names})"
    assert folders.skipped(found) == line
    assert folders.summary(found).endswith(f"; {line}")


def test_the_line_on_skipped_files_counts_classes_without_any_image_and_no_captions(captioned):
    (captioned / "cat" / "notes.txt").unlink()
    images = folders.find_images(captioned)
    assert folders.skipped(images) == "skipped files: none"
    (captioned / "owl").mkdir()
    for number in range(12):
        (captioned / "owl" / f"{number:02}.HEIC").write_bytes(b"heic")
    assert folders.skipped(images) == (
        "skipped files: 12 because Pillow cannot open them ("
        f"{', '.join(f'owl/{number:02}.HEIC' for number in range(10))} and 2 more)"
    )


@pytest.mark.parametrize("folder", ["zoo", "captioned"])
def test_images_that_are_left_out_later_are_no_skipped_files(folder, request):
    images = folders.find_images(request.getfixturevalue(folder))
    part = images.large_classes(2)  # without the dog
    line = "skipped files: 1 because Pillow cannot open them (cat/notes.txt)"
    assert folders.skipped(part) == folders.skipped(images) == line
    assert "2 images; labels: cat 2; " in folders.summary(part)


def test_a_hidden_file_is_no_stray_caption(captioned):
    (captioned / "dog" / "._a.txt").write_bytes(b"\x00\x05\x16\x07")
    assert folders.find_images(captioned).captions[2] == ("a black dog",)
    (captioned / "dog" / "a.txt").write_text(" ")
    with pytest.raises(ValueError, match=r"has captions, but not for all") as caught:
        folders.find_images(captioned)
    assert "._a.txt" not in str(caught.value)


def test_the_names_of_cod10k_hold_the_classes(tmp_path):
    """As Train/Image is distributed; what is not camouflaged, or of no class, is passed over."""
    for name in (
        "COD10K-CAM-1-Aquatic-3-Crab-20.jpg",
        "COD10K-CAM-1-Aquatic-1-BatFish-2.jpg",
        "COD10K-CAM-1-Aquatic-1-BatFish-10.jpg",
        "COD10K-CAM-1-Aquatic-10-LeafySeaDragon-463.jpg",
        "COD10K-NonCAM-3-Flying-53-Bird-3097.jpg",
        "COD10K-NonCAM-6-Background-5001.jpg",
        "COD10K-CAM-5-Other-5057.jpg",
    ):
        pictures(tmp_path, name)
    images = folders.find_images(tmp_path)
    assert images.labels == ("bat fish", "bat fish", "crab", "leafy sea dragon")
    assert [file.stem.rpartition("-")[2] for file in images.files] == ["10", "2", "20", "463"]
    (tmp_path / "readme.md").write_text("COD10K")
    assert folders.skipped(images) == (
        "skipped files: 1 because Pillow cannot open them (readme.md); 3 because their names hold no class "
        "(COD10K-CAM-5-Other-5057.jpg, COD10K-NonCAM-3-Flying-53-Bird-3097.jpg, "
        "COD10K-NonCAM-6-Background-5001.jpg)"
    )
    (tmp_path / "sub").mkdir()
    pictures(tmp_path / "sub", "COD10K-CAM-1-Aquatic-3-Crab-20.jpg")
    with pytest.raises(ValueError, match="holds images beside subfolders"):
        folders.find_images(tmp_path)


# ----------------------------------------------------------------------------------------- held out
def test_classes_with_few_images_can_be_left_out(zoo, capsys):
    images = folders.find_images(zoo)
    large = images.large_classes(2)
    assert (large.files, large.labels) == (images.files[:2], ("cat", "cat"))
    line = "classes left out, because they have fewer than 2 images: dog (1)\n"
    assert capsys.readouterr().out == line
    assert images.large_classes(1) == images
    assert capsys.readouterr().out == ""
    (zoo / "dog" / "a.png").rename(zoo / "cat" / "c.png")
    flat = folders.find_images(zoo / "cat")
    assert flat.large_classes(3) == flat
    with pytest.raises(ValueError, match="no class has 4 images, because the largest one has 3"):
        flat.large_classes(4)


def test_as_many_of_each_class_are_held_out(captioned):
    for number in range(5):
        pictures(captioned, f"cat/{number}.png", f"dog/{number}.png")
        for kind in ("cat", "dog"):
            (captioned / kind / f"{number}.txt").write_text(f"{kind} {number}")
    images = folders.find_images(captioned)  # 7 cats, 6 dogs
    training, held_out = images.split(2, seed=0)
    assert held_out.labels == ("cat", "cat", "dog", "dog")
    assert sorted(training.files + held_out.files) == list(images.files)
    assert training.labels == ("cat",) * 5 + ("dog",) * 4
    for part in (training, held_out):
        known = dict(zip(images.files, images.captions, strict=True))
        assert part.captions == tuple(known[file] for file in part.files)
    assert images.split(2, seed=0) == (training, held_out)
    assert len({images.split(2, seed)[1].files for seed in range(20)}) > 10
    fewer = folders.ImageFolder(captioned, images.files[:7], images.labels[:7])  # without dogs
    assert fewer.split(2, seed=0)[1].files == held_out.files[:2]


def test_without_classes_all_images_are_one(tmp_path):
    pictures(tmp_path, "a.png", "b.png", "c.png")
    training, held_out = folders.find_images(tmp_path).split(1, seed=3)
    assert (len(training.files), len(held_out.files), held_out.labels) == (2, 1, None)


@pytest.mark.parametrize(("held_out", "match"), [(0, "=0 of 2 images of cat"), (1, "=1 of 1 images of dog")])
def test_a_class_is_neither_kept_nor_held_out_whole(zoo, held_out, match):
    with pytest.raises(ValueError, match=f"held_out{match}: hold out at least 1, and keep one"):
        folders.find_images(zoo).split(held_out, seed=0)


FLAG = re.compile("--[a-z]")


def test_only_the_command_line_names_its_flags():
    """Errors raised outside cli/ and lessons/ hold flags of other programs, or say that they mean a flag."""
    others = ("hf download", "accelerate launch", "--use_fsdp", "on the command line as")
    for path in (ROOT / "ddpo_lessons").rglob("*.py"):
        raised = [
            node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Raise)
        ]
        for node in raised if path.parent.name not in ("cli", "lessons") else ():
            for text in (part.value for part in ast.walk(node) if isinstance(part, ast.Constant)):
                named = isinstance(text, str) and FLAG.search(text)
                assert not named or any(other in text for other in others), f"{path}:{node.lineno}: {text}"


def test_every_image_is_drawn_with_its_label(zoo):
    sampler = folders.ImagePrompts(folders.find_images(zoo), "an animal", 16, seed=3)
    drawn = [sampler() for _ in range(40)]
    colors = {"cat/a.png": (0, 1, 0), "cat/b.png": (0, 0, 1), "dog/a.png": (1, 0, 0)}
    assert {metadata["id"] for *_, metadata in drawn} == set(colors)
    for prompt, image, metadata in drawn:
        assert prompt == "an animal"
        assert image.shape == (3, 16, 16)
        assert image is metadata["image"] is metadata["target"]
        assert metadata["label"] == metadata["id"].partition("/")[0]
        assert tuple(image[:, 0, 0].tolist()) == colors[metadata["id"]]
        assert set(metadata) == {"id", "image", "label", "target"}


def test_folders_named_after_digits_give_the_digit(tmp_path):
    pictures(tmp_path, "three/a.png", "seven/a.png")
    sampler = folders.ImagePrompts(folders.find_images(tmp_path), "", 32, seed=0)
    drawn = [sampler()[2] for _ in range(10)]
    assert {(metadata["label"], metadata["digit"]) for metadata in drawn} == {("three", 3), ("seven", 7)}


# ------------------------------------------------------------------------------------------- captions
@pytest.fixture
def captioned(zoo):
    for place, text in (
        ("dog/a.txt", "a black dog"),
        ("cat/a.TXT", "\ufeffa white cat\n\n   a striped cat  \n"),
        ("cat/b.txt", "ein grünes Kätzchen\n"),
    ):
        (zoo / place).write_text(text, encoding="utf-8")
    return zoo


def test_captions_lie_beside_their_images_and_notes_are_passed_over(captioned):
    images = folders.find_images(captioned)  # cat/notes.txt belongs to no image
    assert images.captions == (("a white cat", "a striped cat"), ("ein grünes Kätzchen",), ("a black dog",))
    for place in ("cat/a.TXT", "cat/b.txt", "dog/a.txt"):
        (captioned / place).unlink()
    assert folders.find_images(captioned).captions is None


def test_the_prompt_that_is_drawn_is_the_caption(captioned):
    images = folders.find_images(captioned)
    sampler, again = (folders.ImagePrompts(images, "", 16, seed=3) for _ in range(2))
    drawn = [sampler() for _ in range(60)]
    assert [prompt for prompt, *_ in drawn] == [again()[0] for _ in drawn]
    said = {(metadata["id"], prompt) for prompt, _, metadata in drawn}
    assert said == {
        ("cat/a.png: a white cat", "a white cat"),  # statistics are kept for each request
        ("cat/a.png: a striped cat", "a striped cat"),
        ("cat/b.png: ein grünes Kätzchen", "ein grünes Kätzchen"),
        ("dog/a.png: a black dog", "a black dog"),
    }


def test_captions_change_no_draw_of_images(captioned):
    def draw(images: folders.ImageFolder) -> list[Any]:
        return [folders.ImagePrompts(images, "", 16, seed)()[2]["id"].partition(":")[0] for seed in range(20)]

    with_captions = folders.find_images(captioned)
    assert draw(with_captions) == draw(folders.ImageFolder(captioned, with_captions.files, None))


def test_images_without_a_caption_are_all_named(captioned):
    (captioned / "cat" / "b.txt").write_text(" \n\n")
    (captioned / "dog" / "a.txt").rename(captioned / "dog" / "A dog.txt")
    with pytest.raises(ValueError, match=r"write the prompt into cat/b\.txt, dog/a\.txt \(no") as caught:
        folders.find_images(captioned)
    message = str(caught.value)
    assert "no image has the name of cat/notes.txt, dog/A dog.txt" in message


def test_a_message_names_ten_files_and_counts_the_rest(tmp_path):
    pictures(tmp_path, *(f"{number:02}.png" for number in range(14)))
    (tmp_path / "00.txt").write_text("a dog")
    with pytest.raises(ValueError, match=r"01\.txt, 02\.txt.*, 10\.txt and 3 more, or take"):
        folders.find_images(tmp_path)


# ------------------------------------------------------------------------------- metadata.jsonl, labels
def write_metadata(folder: Path, *lines: str) -> None:
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")


def test_captions_of_metadata_jsonl(zoo):
    write_metadata(
        zoo,
        '{"file_name": "dog/a.png", "text": "a black dog"}',
        '{"file_name": "cat/a.png", "text": ["a white cat", "a striped cat"], "other": 3}',
        "",
        '{"file_name": "cat/b.png", "prompt": "ein grünes Kätzchen"}',
        '{"file_name": "gone.png", "text": "of no image"}',
    )
    images = folders.find_images(zoo)
    assert images.captions == (("a white cat", "a striped cat"), ("ein grünes Kätzchen",), ("a black dog",))
    with pytest.raises(ValueError, match="has captions: drop the prompt"):
        reward_flag.check((), images, "a dog")


def test_captions_of_metadata_csv(zoo):
    table = zoo / "metadata.csv"
    table.write_text(
        'file_name,text,other\ndog/a.png,"a black, old dog",1\ncat/a.png,a white cat,2\n'
        'cat/b.png,"two\nlines",3\n'
    )
    captions = folders.find_images(zoo).captions
    assert captions == (("a white cat",), ("two\nlines",), ("a black, old dog",))


DOG = '{"file_name": "dog/a.png", "text": "a dog"}'


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ({"stray.png": b"\x89PNG"}, "beside subfolders"),
        ({"dog/a.txt": "a black dog".encode("utf-16")}, r"a\.txt is not UTF-8 text .*save it as UTF-8"),
        ({"metadata.csv": b"file_name,text\ncaf\xe9"}, r"metadata\.csv is not UTF-8 text .*save it as UTF-8"),
        ({"metadata.csv": b"name,text\na,a dog\n"}, r"csv, entry 1 is not like .*it has 'name', 'text'"),
        ({"metadata.jsonl": DOG}, r"add lines of cat/a\.png, cat/b\.png to metadata\.jsonl, or"),
        ({"metadata.jsonl": DOG.replace('"text"', '"said"')}, "entry 1 is not like"),
        ({"metadata.jsonl": DOG.replace('"a dog"', "3")}, "entry 1 is not like"),
        ({"metadata.jsonl": "dog/a.png,a dog"}, "entry 1 is not like"),
        ({"metadata.jsonl": DOG, "cat/a.TXT": "a cat"}, r"metadata\.jsonl and in cat/a\.TXT: keep one kind"),
        (
            {"metadata.jsonl": DOG, "metadata.csv": "file_name,text\n", "cat/a.TXT": "a cat"},
            r"metadata\.jsonl and in metadata\.csv and in .*: keep one kind",
        ),
    ],
    ids=str,
)
def test_a_folder_that_cannot_be_used_is_refused_with_the_file(zoo, written, says):
    for name, data in written.items():
        (zoo / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ValueError, match=says):
        folders.find_images(zoo)


def test_a_place_without_images_is_refused(zoo):
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        folders.find_images("nowhere")
    says = "empty and its subfolders hold no image that can be read: save images there as .jpg, .png, "
    with pytest.raises(ValueError, match=re.escape(says)):
        folders.find_images(zoo / "empty")


def test_a_folder_of_endings_that_are_not_read_is_refused_with_them(tmp_path):
    (tmp_path / "cat").mkdir()
    for name in ("a.HEIC", "b.heic", "cat/c.raw", ".hidden"):
        (tmp_path / name).write_bytes(b"heic")
    says = "hold no image that can be read, but files that end in .heic, .raw: save images there as .jpg, "
    with pytest.raises(ValueError, match=re.escape(says)):
        folders.find_images(tmp_path)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"images": "photos"}, r"images='photos' must come from find_images\(FOLDER\)"),
        ({"prompt": None}, "prompt=None must be text"),
        ({"prompt": "a {lable}"}, r"nothing replaces {lable}; only {label} becomes the name"),
        ({"size": "32"}, "size='32': give the side of the square in pixels"),
        ({"size": 0}, "size=0: give the side of the square in pixels"),
    ],
)
def test_prompts_of_images_refuse_arguments_that_would_fail_later(zoo, changes, error):
    arguments = {"images": folders.find_images(zoo), "prompt": "", "size": 16, "seed": 0}
    with pytest.raises((TypeError, ValueError), match=error):
        folders.ImagePrompts(**arguments | changes)


def test_a_prompt_names_the_class(zoo, tmp_path):
    images = folders.find_images(zoo)
    reward_flag.check(reward_flag.parse("clip_score"), images, "a photo of a {label}")
    sampler = folders.ImagePrompts(images, "a photo of a {label}", 16, seed=3)
    said = {(metadata["id"], prompt) for prompt, _, metadata in (sampler() for _ in range(30))}
    assert said == {
        ("cat/a.png", "a photo of a cat"),
        ("cat/b.png", "a photo of a cat"),
        ("dog/a.png", "a photo of a dog"),
    }
    without = folders.ImageFolder(zoo, images.files, None)
    with pytest.raises(ValueError, match="names classes, but"):
        reward_flag.check((), without, "a photo of a {label}")
    with pytest.raises(ValueError, match="names classes, but"):
        folders.ImagePrompts(without, "a photo of a {label}", 16, seed=3)


# --------------------------------------------------------------------------------------- augmentation
@pytest.fixture
def halves(tmp_path):
    """An image whose left half is of one color and whose right half is black."""
    image = Image.new("RGB", (16, 16))
    image.paste((100, 150, 200), (0, 0, 8, 16))
    image.save(tmp_path / "a.png")
    return folders.find_images(tmp_path)


def hue_of(color: torch.Tensor) -> float:
    return colorsys.rgb_to_hsv(*color.tolist())[0]


def test_an_augmented_draw_is_flipped_and_jittered(halves):
    sampler = folders.ImagePrompts(halves, "", 16, seed=0, augmented=True)
    drawn = [sampler()[1] for _ in range(200)]
    left = [image[:, 8, 3].sum() > image[:, 8, 12].sum() for image in drawn]
    assert 80 < sum(map(int, left)) < 120
    colors = torch.stack(
        [image[:, 8, 3 if is_left else 12] for image, is_left in zip(drawn, left, strict=True)]
    )
    before = torch.tensor([100, 150, 200]) / 255
    assert (colors - before).mean(dim=0).abs().max() < 0.02  # no side is preferred
    # Contrast moves a color away from the image's mean gray, 71, or toward it: at most by a tenth of 129,
    # brightness by a tenth of 200, saturation by a tenth of 200 - 143.
    assert 0.05 < (colors.amax(dim=1) - before.max()).abs().max() < (12.9 * 1.1 + 20 + 5.7 * 1.2) / 255 + 0.01
    hues = torch.tensor([hue_of(color) for color in colors]) - hue_of(before)
    assert 0.04 < hues.max() < 0.06  # a step of 8 bits beside 0.05
    assert -0.06 < hues.min() < -0.04


def test_augmentation_depends_on_seed_and_draw_alone(halves):
    one, other = (folders.ImagePrompts(halves, "", 16, 4, ("noisy",), augmented=True) for _ in range(2))
    first, second = one(), one()
    assert not torch.equal(first[2]["target"], second[2]["target"])
    other.skip()  # as another process does
    assert torch.equal(other()[1], second[1])
    again = folders.ImagePrompts(halves, "", 16, 9, ("noisy",), augmented=True)
    again.load_state_dict({"seed": 4, "drawn": 1})  # as a run that is resumed
    assert torch.equal(again()[2]["target"], second[2]["target"])
    plain = folders.ImagePrompts(halves, "", 16, 4, ("noisy",))
    assert torch.equal(one.every()[0][1], plain.every()[0][1])  # what is held out stays as it is


# ---------------------------------------------------------------------------------- reading in parallel
def test_reading_ahead_changes_no_draw_and_reads_only_what_is_wanted(zoo):
    images = folders.find_images(zoo)
    plain, ahead = (folders.ImagePrompts(images, "", 16, 5, ("noisy",)) for _ in range(2))
    calls = [True, False, True, True, False]
    ahead.prefetch(calls)
    read = ahead._fitted.cache_info().misses
    for is_call in calls:
        if not is_call:
            plain.skip()
            ahead.skip()
            continue
        (_, one, about), (_, other, other_about) = plain(), ahead()
        assert about["id"] == other_about["id"]
        assert torch.equal(one, other)
    assert ahead._fitted.cache_info().misses == read  # nothing was read twice, or late
    assert ahead.state_dict() == plain.state_dict() == {"seed": 5, "drawn": 5}


def test_every_image_once_whatever_was_drawn(zoo):
    images = folders.find_images(zoo)
    sampler = folders.ImagePrompts(images, "", 16, 5, ("noisy",))
    before = sampler.every()
    sampler()
    after = sampler.every()
    assert [about["id"] for _, _, about in before] == ["cat/a.png", "cat/b.png", "dog/a.png"]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(before, after, strict=True))


def test_a_damaged_file_is_named_when_it_is_read_ahead(zoo):
    images = folders.find_images(zoo)
    for file in images.files:
        file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(OSError, match="is damaged"):
        folders.ImagePrompts(images, "", 16, 5).prefetch([True] * 4)


@pytest.mark.parametrize(
    ("reward", "with_captions", "prompt", "match"),
    [
        ("edit", False, None, "has no captions: write the prompt of NAME.png into NAME.txt"),
        ("clip_score", False, " ", "has no captions"),
        ("colorfulness", True, "a dog", "has captions: drop the prompt, or take"),
        ("edit", True, "", "drop the prompt"),
        ("edit", True, None, None),
        ("edit", False, "a dog", None),
        ("colorfulness", False, None, None),
        ("colorfulness", False, "", None),
    ],
)
def test_an_image_has_one_prompt_where_the_reward_scores_it(captioned, reward, with_captions, prompt, match):
    found = folders.find_images(captioned)
    images = found if with_captions else folders.ImageFolder(captioned, found.files, found.labels)
    with refused(match):
        reward_flag.check(reward_flag.parse(reward), images, prompt)


# -------------------------------------------------------------------------------------------- rewards
def flat(folder: Path) -> folders.ImageFolder:
    return folders.ImageFolder(folder, (folder / "a.png",), None)


def in_classes(folder: Path, *names: str) -> folders.ImageFolder:
    return folders.ImageFolder(folder, tuple(folder / name / "a.png" for name in names), names)


@pytest.mark.parametrize(
    ("reward", "classes", "match"),
    [
        ("clip_change", (), "has no class subfolders"),
        ("clip_margin", ("cat",), "one subfolder, cat: add another"),
        ("recoloring", (), "has no class subfolders"),
        ("recoloring", ("three", "cat"), "subfolder cat: name them zero, one"),
        ("clip_change", ("cat", "dog"), None),
        ("recoloring", ("three",), None),
        ("colorfulness", (), None),
    ],
)
def test_rewards_find_what_they_need_or_are_refused(tmp_path, reward, classes, match):
    images = in_classes(tmp_path, *classes) if classes else flat(tmp_path)
    with refused(match):
        reward_flag.check(reward_flag.parse(reward), images, "a red three on a blue background")


def test_a_reward_that_a_program_registers_is_checked_and_made_as_those_of_the_package(tmp_path, monkeypatch):
    calls: list[Any] = []

    def mine(**given: Any) -> Any:
        calls.append(given)

    monkeypatch.setitem(rewards.REWARDS, "mine", rewards.Registered(mine))  # put back after the test
    rewards.register(needs=("label", "target"))(mine)
    classes = in_classes(tmp_path, "cat", "dog", "cat")
    with pytest.raises(ValueError, match="reward='mine' needs to know what the images show"):
        reward_flag.check(reward_flag.parse("mine"), flat(tmp_path), None)
    reward_flag.make(reward_flag.parse("mine"), classes)
    reward_flag.make(reward_flag.parse("mine"))
    assert calls == [{"classes": ("cat", "dog")}, {}]


# --------------------------------------------------------------------------------------------- damage
def test_damage_keeps_the_clean_image_as_the_target(zoo):
    images = folders.find_images(zoo)
    sampler = folders.ImagePrompts(images, "", 32, 0, damages=("noisy", "foggy"), severities=(2, 4))
    drawn = [sampler()[1:] for _ in range(40)]
    seen = {(metadata["damage"], metadata["severity"]) for _, metadata in drawn}
    assert seen == {(name, severity) for name in ("noisy", "foggy") for severity in (2, 4)}
    for image, metadata in drawn:
        assert image is metadata["image"]
        assert metadata["target"].std(dim=(1, 2)).max() == 0  # one color, as it was written
        assert not torch.equal(image, metadata["target"])
    again = folders.ImagePrompts(images, "", 32, 0, damages=("noisy", "foggy"), severities=(2, 4))
    assert all(torch.equal(again()[1], image) for image, _ in drawn)


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("size", [32, 512])
def test_damage_works_at_every_size(name, size):
    image = torch.linspace(0, 1, size).expand(3, size, size) * 0.6 + 0.2
    damaged = folders.damage(image, name, 3, torch.Generator().manual_seed(0))
    assert damaged.shape == image.shape
    assert 0 <= damaged.min() <= damaged.max() <= 1
    if name != "blurry":  # a straight ramp stays one
        assert (damaged - image).abs().mean() > 0.005


def test_blur_grows_with_large_images():
    """A step between two halves becomes the Gaussian's integral; its standard deviation is what is asked."""
    for size, sigma in ((32, 2.0), (224, 2.0), (512, 2.0 * 512 / 224)):
        image = torch.zeros(3, size, size)
        image[:, :, size // 2 :] = 1
        edge = folders.damage(image, "blurry", 3, torch.Generator())[0, size // 2]  # (W,)
        # one sigma right of the step, which lies half a pixel left of the first bright one
        offset = round(sigma)
        expected = 0.5 * (1 + math.erf((offset + 0.5) / sigma / math.sqrt(2)))
        assert edge[size // 2 + offset].item() == pytest.approx(expected, abs=0.01), size


def test_blur_at_scale_one_is_the_kernel_of_seventeen_by_seventeen():
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    taps = torch.exp(-(torch.arange(-8, 9) ** 2) / (2 * 2.6**2))
    kernel = (taps[:, None] * taps[None, :] / taps.sum() ** 2).expand(3, 1, 17, 17)
    padded = torch.nn.functional.pad(images, (8, 8, 8, 8), mode="reflect")
    expected = torch.nn.functional.conv2d(padded, kernel, groups=3)
    torch.testing.assert_close(blur(images, 4, torch.Generator()), expected)


def test_unknown_damage_and_severity_are_named():
    image = torch.zeros(3, 32, 32)
    with pytest.raises(ValueError, match="damage='wet'"):
        folders.damage(image, "wet", 1, torch.Generator())
    with pytest.raises(ValueError, match="severity=6"):
        folders.damage(image, "foggy", 6, torch.Generator())


# -------------------------------------------------------------------------------------- kinds of files
def test_sixteen_bits_keep_their_brightness(tmp_path):
    for value, expected in ((0, 0), (32896, 128), (65535, 255)):  # 32896 = 128 * 257
        file = tmp_path / "gray.png"
        Image.fromarray(np.full((4, 4), value, dtype=np.uint16)).save(file)
        image = folders.open_image(file)
        assert (image.mode, image.getpixel((1, 1))) == ("RGB", (expected,) * 3)
        with Image.open(file) as opened:  # as a prompt function may return it
            torch.testing.assert_close(to_tensor(opened), torch.full((3, 4, 4), expected / 255))


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(OSError, match=r"a\.tiff .*32 bits a pixel .*save it with 8 or 16"):
        folders.find_images(tmp_path)
    (tmp_path / "a.tiff").unlink()
    (tmp_path / "dog").mkdir()
    (tmp_path / "dog" / "broken.png").write_bytes(b"\x89PNG, or not")
    with pytest.raises(OSError, match=r"broken\.png"):
        folders.find_images(tmp_path)
    cut = pictures(tmp_path, "cut.jpg", size=(64, 64)) / "cut.jpg"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(OSError, match=r"cut\.jpg is damaged .*replace it, or take it out"):
        folders.open_image(cut)


def test_all_damaged_files_are_named_before_the_first_is_drawn(tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for name in ("a.jpg", "b.png", "c.jpg", "d.png"):
        Image.fromarray(noise).save(tmp_path / name)
    for name in ("a.jpg", "b.png"):  # their headers are whole
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(OSError, match=r"2 of 4 images cannot be read: .*a\.jpg \(.*b\.png \(") as caught:
        folders.find_images(tmp_path)
    assert "c.jpg" not in str(caught.value)
