"""Tables of the READMEs, from a result made up by hand."""

import json
import re

import pytest

from benchmarks import tables
from benchmarks.tables import filled
from images import lessons

LESSONS = sorted((tables.ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("urls", ["", '[project.urls]\nRepository = "https://github.com/some/where"\n'])
def test_an_address_in_pyproject_gives_every_lesson_a_badge(urls, tmp_path, monkeypatch):
    monkeypatch.setattr(lessons, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "x"\n{urls}')
    names = [path.stem for path in LESSONS]
    lines = tables.lesson_table({"seconds": dict.fromkeys(names, 1), "machine": "a machine"}).splitlines()
    colab = "](https://colab.research.google.com/github/some/where/blob/colab/"
    found = [name for name, line in zip(names, lines[2:], strict=False) if f"{colab}{name}.ipynb)" in line]
    assert found == (names if urls else [])
    assert ("colab" in "".join(lines)) == bool(urls)
    lesson = json.loads(tables.filled_page(LESSONS[0]))
    source = next(line for line in lesson["cells"][1]["source"] if line.startswith("SOURCE = "))
    assert ("@ git+https://github.com/some/where" in source) == bool(urls)


@pytest.mark.parametrize(
    ("time", "minutes"),
    [
        ("75 minutes with exercises", 75),
        ("about 70 minutes, and 25 more for", 95),
        ("about 75 minutes, and half an hour more for", 105),
    ],
)
def test_the_minutes_of_a_lesson_are_those_of_its_first_cell(time, minutes, tmp_path, monkeypatch):
    monkeypatch.setattr(lessons, "NOTEBOOKS", tmp_path)
    for name, text in (("found", f"**your time** {time} exercise 1"), ("none", "no time")):
        (tmp_path / f"{name}.ipynb").write_text(json.dumps({"cells": [{"source": [text]}]}))
    assert lessons.minutes("found") == minutes
    with pytest.raises(ValueError, match="none has no time of its reader"):
        lessons.minutes("none")


@pytest.mark.parametrize("end", ["hub.com/some/where.git", "hub.com/some/where/", "lab.com/some/where"])
def test_an_address_that_colab_cannot_open_is_refused(end, tmp_path, monkeypatch):
    monkeypatch.setattr(lessons, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text(f'[project]\nurls.Repository = "https://git{end}"\n')
    with pytest.raises(ValueError, match="write https://github"):
        lessons.badge("01_batching")


def test_only_tables_with_marks_are_read(monkeypatch):
    made = {"one": lambda: "| new |", "not measured": lambda: tables.read("no such file")}
    monkeypatch.setattr(tables, "TABLES", made)
    text = "before\n<!-- one -->\n| old |\n<!-- /one -->\nafter <!-- /one -->\n"
    assert filled(text) == text.replace("old", "new")
    with pytest.raises(FileNotFoundError, match="no such file"):
        filled("<!-- not measured --><!-- /not measured -->")


def test_epochs_on_a_gpu_are_beside_the_paper():
    nothing = tables.gpu_table({})
    assert nothing.count("| not run |") == len(tables.EPOCHS)
    assert nothing.endswith("\n\nNot run on a GPU yet.")
    done = {"paper_gb": 11.48, "peak_gb": 12.06, "sampling_s": 4.0, "training_s": 6.0, "first_epoch_s": 12.34}
    done |= {"sampling_tflop": 158.0, "training_tflop": 282.0, "waits": 31, "ratio_error": 0.00012}
    parts = {"sd15": {**done, "result": "ok"}, "sdxl": {"paper_gb": 10.33, "result": "out of memory"}}
    parts["tests"] = {"passed": 20, "result": "1 failed"}
    parts["lessons"] = {"seconds": 98.7, "passed": 12, "result": "ok"}
    found = tables.gpu_table({"hardware": "a card, 24.0 GB", "parts": parts}).splitlines()
    assert found[2] == "| sd15 | bf16 | 4 | 11.5 | 12.1 | 4.0 | 6.0 | 12.3 | 44 | 31 | 1e-04 | ok |"
    assert "| sdxl | bf16 | 2, checkpointing | 10.3 | – | – | – | – | – | – | – | out of memory |" in found
    outcomes = (
        "Tests: 20 passed, 1 failed. Lessons: 12 passed, 99 s, ok. `make gpu` has not completed the demo yet."
    )
    assert found[-1] == f"Measured on one GPU (a card, 24.0 GB). {outcomes}"


def test_the_verdict_beside_other_trainers_has_the_measured_ranges():
    verdict = tables.speed_sentence(tables.read("benchmarks/speed/side_by_side.json")["runs"])
    page = (tables.ROOT / "docs" / "beside-peers.md").read_text("utf-8").partition("<!--")[0]
    ranges = re.findall(r"\d\.\d to \d\.\d", verdict)
    assert ranges == re.findall(r"\d\.\d to \d\.\d", page)


@pytest.mark.parametrize("path", tables.PAGES)
def test_a_page_shows_the_committed_tables(path):
    assert tables.filled_page(tables.ROOT / path) == (tables.ROOT / path).read_text(encoding="utf-8")
