"""The script that remakes the sheet of emoji, without the emoji."""

import json
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.zoo import sheet
from ddpo_lessons.worlds import animals

ROOT = Path(__file__).parents[1]


def install(folder: Path, **versions: str) -> None:
    """Make a folder with sets of one icon, a red square, of each given version."""
    for package, version in (sheet.SETS | versions).items():
        path = folder / "node_modules" / package
        path.mkdir(parents=True)
        (path / "package.json").write_text(json.dumps({"version": version}))
        body = '<path fill="red" d="M0 0h8v8H0z"/>'
        (path / "icons.json").write_text(json.dumps({"icons": {"ant": {"body": body}}, "height": 8}))


def test_the_script_and_the_world_agree():
    assert sheet.SHEET == animals.SHEET
    assert sheet.SIZE == animals.IMAGE_SIZE
    pairs = zip(animals.ARTISTS, sheet.SETS, strict=True)
    assert all(artist.lower() in package for artist, package in pairs)


def test_a_picture_that_is_not_square_is_centered_and_not_stretched():
    wide, tall = (sheet.pad(Image.new("RGBA", size, "red")) for size in ((128, 64), (64, 128)))
    assert wide.size == tall.size == (64, 64)
    assert wide.getchannel("A").getbbox() == (0, 16, 64, 48)
    assert tall.getchannel("A").getbbox() == (16, 0, 48, 64)
    square = Image.effect_noise((64, 64), 50).convert("RGBA")
    assert sheet.pad(square).tobytes() == square.tobytes()


def test_an_icon_becomes_a_file_with_the_box_of_its_set(tmp_path):
    install(tmp_path)
    icons = sheet.read_set(tmp_path, "@iconify-json/noto")
    text = sheet.svg(icons, "ant")
    assert 'viewBox="0 0 16 8" width="16" height="8"' in text  # 16 where a set says nothing
    assert text.endswith('><path fill="red" d="M0 0h8v8H0z"/></svg>')


def test_sets_that_are_missing_or_other_are_named_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"has no @iconify-json/noto: run `npm install @iconify-json/noto@1"):
        sheet.make_sheet(tmp_path)
    install(tmp_path, **{"@iconify-json/twemoji": "1.0.0"})
    with pytest.raises(ValueError, match=r"twemoji 1\.0\.0, which may look different: run `npm install"):
        sheet.make_sheet(tmp_path)
