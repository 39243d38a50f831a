"""Diagrams: each has its script, each script draws what is committed, and the colors can be read."""

import base64
import json
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from images import dark as dark_copies
from images import inline

IMAGES = Path(__file__).parents[1] / "images"
LESSONS = sorted((IMAGES.parent / "notebooks").glob("*.ipynb"))
SCRIPTS = sorted(IMAGES.glob("draw_*.py"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A function that runs a script, if it has not run yet, and returns what it drew: SVGs and PNGs."""
    folder = tmp_path_factory.mktemp("drawn")

    @cache
    def draw(script: Path) -> list[Path]:
        before = {*folder.iterdir()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [str(script), "--output", str(folder), "--png", str(folder)])
            patch.syspath_prepend(str(IMAGES))
            runpy.run_path(str(script), run_name="__main__")
        return sorted({*folder.iterdir()} - before)

    return draw


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_draws_what_is_committed(script, drawn):
    diagrams = [path for path in drawn(script) if path.suffix == ".svg"]
    assert diagrams
    for path in diagrams:
        committed = (IMAGES / path.name).read_text(encoding="utf-8")
        if f"Matplotlib v{mpl.__version__}," in committed and sys.platform == "linux":
            assert path.read_text(encoding="utf-8") == committed, f"run the script of {path.name} again"


def test_every_diagram_has_its_script():
    scripts = "".join(script.read_text(encoding="utf-8") for script in SCRIPTS)
    assert [p.name for p in IMAGES.glob("*.svg") if f'"{p.stem}"' not in scripts] == []


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2.2, section 1.4.3."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_stands_out_from_the_card_and_white_from_every_box():
    style = runpy.run_path(str(IMAGES / "style.py"))
    pairs = [(style["INK"], style["CARD"]), (style["MUTED"], style["CARD"])]
    for dark, light in pairs + [(color, "#ffffff") for color in style["PALETTE"]]:
        ratio = (luminance(light) + 0.05) / (luminance(dark) + 0.05)
        assert ratio >= 4.5, (dark, light, ratio)  # what WCAG asks of text


def test_diagrams_bring_their_own_light_background():
    card = runpy.run_path(str(IMAGES / "style.py"))["CARD"]
    for path in IMAGES.glob("*.svg"):
        first = re.search(r'<g id="patch_1">.*?</g>', path.read_text(encoding="utf-8"), re.DOTALL)
        assert first, path.name
        assert f"fill: {card}" in first[0], path.name


def test_every_figure_of_the_readme_has_a_current_dark_copy():
    readme = (IMAGES.parent / "README.md").read_text("utf-8")
    shown = re.findall(r'<img src="images/([\w.-]+)"', readme)
    assert shown
    assert "![" not in readme
    assert [path.name for path in dark_copies.named()] == shown
    assert {*dark_copies.named()} == {*(IMAGES / "dark").iterdir()}
    for copy in dark_copies.named():
        original = IMAGES / copy.name
        if copy.suffix == ".svg":
            is_current = copy.read_text("utf-8") == dark_copies.dark_svg(original.read_text("utf-8"))
        else:
            is_current = np.array_equal(
                dark_copies.read_pixels(copy), dark_copies.dark_png(dark_copies.read_pixels(original))
            )
        assert is_current, f"run: python images/dark.py, because {copy.name} is not the original's"


def figures(lesson: Path) -> list[str]:
    """The names of the files that a lesson shows."""
    return re.findall(r"\.\./images/([\w.-]+)", lesson.read_text(encoding="utf-8"))


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_every_figure_of_a_lesson_can_be_drawn_or_is_there(lesson):
    assert figures(lesson)
    for name in figures(lesson):
        if name.endswith(".svg"):
            assert inline.script(name.removesuffix(".svg")) in SCRIPTS
        else:
            assert (IMAGES / name).is_file()


def test_a_figure_that_nobody_draws_is_named():
    with pytest.raises(ValueError, match=r"nobody\.svg: 0 of images/draw_\*\.py draw it"):
        inline.script("nobody")


def without_links(text: str) -> str:
    """Return a text with the words of its links and figures."""
    return re.sub(r"!?\[([^\[\]\n]*)\]\([^()\s]*\)", r"\1", text)


@pytest.mark.slow
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_a_copy_for_colab_carries_its_figures_and_has_no_dead_links(lesson, drawn):
    diagrams = [name.removesuffix(".svg") for name in figures(lesson) if name.endswith(".svg")]
    (folder,) = {path.parent for name in diagrams for path in drawn(inline.script(name))}
    original, copy = json.loads(lesson.read_text("utf-8")), json.loads(inline.inline(lesson, folder))
    on_gpu = {"accelerator": "GPU", "colab": {"gpuType": "T4"}} if lesson.stem == inline.ON_GPU else {}
    assert copy["metadata"] == {**original["metadata"], **on_gpu}
    copy["metadata"] = original["metadata"]
    opening = copy["cells"][0]
    assert "Upload" in opening["source"] or inline.UPLOAD in opening["source"]
    opening["source"] = opening["source"].removesuffix(inline.UPLOAD)
    count = 0
    for cell, carried in zip(original.pop("cells"), copy.pop("cells"), strict=True):
        source, inlined = "".join(cell.pop("source")), "".join(carried.pop("source"))
        pictures = re.findall(r"data:image/png;base64,([\w+/=]+)", inlined)
        assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
        assert "../images/" not in inlined
        assert len(pictures) == source.count("../images/")
        if cell["cell_type"] == "markdown":
            assert not re.search(r"\]\((?!https?:|data:|#)", inlined)
        assert without_links(inlined) == without_links(source)
        assert carried == cell
        count += len(pictures)
    assert copy == original
    assert count == len(figures(lesson))


@pytest.mark.parametrize("name", ["01_batching", inline.ON_GPU])
@pytest.mark.parametrize("source", ["None", '"ddpo-lessons"'])
def test_a_copy_for_colab_says_what_to_upload_and_asks_for_a_gpu(name, source, tmp_path):
    """Nothing is uploaded if pip finds the package; lesson 13 has its own words about it."""
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": [f"SOURCE = {source}\n"]},
    ]
    path = tmp_path / f"{name}.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {"kernelspec": {}}}), encoding="utf-8")
    copy = json.loads(inline.inline(path, tmp_path))
    uploads = source == "None" and name != inline.ON_GPU
    assert copy["cells"][0]["source"] == "# Title\ntext" + uploads * inline.UPLOAD
    on_gpu = {"accelerator": "GPU", "colab": {"gpuType": "T4"}} if name == inline.ON_GPU else {}
    assert copy["metadata"] == {"kernelspec": {}, **on_gpu}


@pytest.mark.slow
def test_the_command_writes_lessons_whose_figures_several_scripts_draw(tmp_path):
    lessons = [path for path in LESSONS if path.name[:2] in ("06", "07")]
    subprocess.run([sys.executable, IMAGES / "inline.py", tmp_path, *lessons], check=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in lessons]
    for lesson in lessons:
        text = (tmp_path / lesson.name).read_text("utf-8")
        assert "../images/" not in text
        assert text.count("](data:image/png;base64,") == len(figures(lesson))
