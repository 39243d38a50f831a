"""Diagrams: each has its script, each script draws what is committed, and the colours can be read."""

import base64
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import pytest

IMAGES = Path(__file__).parents[1] / "images"
LESSON = IMAGES.parent / "notebooks" / "07_img2img_ddpo.ipynb"  # which shows SVGs and PNGs
SCRIPTS = sorted(IMAGES.glob("draw_*.py"))


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda script: script.stem)
def drawn(request, tmp_path_factory):
    """The folder to which one script has drawn."""
    folder = tmp_path_factory.mktemp(request.param.stem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(request.param), "--output", str(folder)])
        patch.syspath_prepend(str(IMAGES))
        runpy.run_path(str(request.param), run_name="__main__")
    return folder


@pytest.mark.slow
def test_script_draws_what_is_committed(drawn):
    assert list(drawn.iterdir())
    for path in drawn.iterdir():
        committed = (IMAGES / path.name).read_text(encoding="utf-8")
        if f"Matplotlib v{mpl.__version__}," in committed and sys.platform == "linux":
            assert path.read_text(encoding="utf-8") == committed, f"run the script of {path.name} again"


def test_every_diagram_has_its_script():
    scripts = "".join(script.read_text(encoding="utf-8") for script in SCRIPTS)
    assert [p.name for p in IMAGES.glob("*.svg") if f'"{p.stem}"' not in scripts] == []


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2, section 1.4.3."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_stands_out_from_the_card_and_white_from_every_box():
    style = runpy.run_path(str(IMAGES / "style.py"))
    pairs = [(style["INK"], style["CARD"]), (style["MUTED"], style["CARD"])]
    for dark, light in pairs + [(colour, "#ffffff") for colour in style["PALETTE"]]:
        ratio = (luminance(light) + 0.05) / (luminance(dark) + 0.05)
        assert ratio >= 4.5, (dark, light, ratio)  # what WCAG asks of text


def test_diagrams_bring_their_own_light_background():
    card = runpy.run_path(str(IMAGES / "style.py"))["CARD"]
    for path in IMAGES.glob("*.svg"):
        first = re.search(r'<g id="patch_1">.*?</g>', path.read_text(encoding="utf-8"), re.DOTALL)
        assert first, path.name
        assert f"fill: {card}" in first[0], path.name


@pytest.mark.slow
def test_a_copy_for_colab_carries_its_figures_and_changes_nothing_else(tmp_path):
    subprocess.run([sys.executable, IMAGES / "inline.py", tmp_path, LESSON], check=True)
    lesson, copy = (json.loads(path.read_text("utf-8")) for path in (LESSON, tmp_path / LESSON.name))
    count = 0
    for cell, carried in zip(lesson.pop("cells"), copy.pop("cells"), strict=True):
        source, inlined = "".join(cell.pop("source")), "".join(carried.pop("source"))
        pictures = re.findall(r"data:image/png;base64,([\w+/=]+)", inlined)
        assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
        assert "../images/" not in inlined or cell["cell_type"] == "code"
        assert len(pictures) == source.count("../images/") * (cell["cell_type"] == "markdown")
        assert pictures or inlined == source
        assert carried == cell
        count += len(pictures)
    assert copy == lesson
    assert count >= 3
