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


@pytest.mark.parametrize(
    ("days", "words"),
    [
        (["2026-11-26"], "one day, 2026-11-26"),
        (["2026-11-26", "2026-11-22"], "two days, 2026-11-22 to 2026-11-26"),
        ([f"2026-11-{day}" for day in range(10, 21)], "11 days, 2026-11-10 to 2026-11-20"),
    ],
)
def test_days_of_measurement_are_counted(days, words):
    assert tables.measured_on(days) == words


def test_speed_has_the_ranges_of_all_days_with_equal_gradients():
    def row(against, size, peer, ours, floor=1.0, difference=1e-5):
        seconds = {"peer": peer, "ours": ours, "floor": floor}
        found = {name: {"whole": [value, value, value]} for name, value in seconds.items()}
        apart = difference and {"ours": difference}
        return {"against": against, "size": size, "gradient_difference": apart, **found}

    first = [row("TRL", "TRL", 5.0, 2.0), row("imageddpo", "gaussian-glasses", 4.0, 1.0)]
    first += [row("imageddpo", "gaussian-glasses", 9.0, 1.0, difference=None), row("TRL", "large", 2.4, 2.0)]
    first += [{"against": "TRL", "size": "TRL", "error": "none", "ours": {"whole": [1, 1, 1]}}]
    second = [row("TRL", "TRL", 6.0, 2.0), row("imageddpo", "TRL", 9.0, 1.0)]  # not its own example
    runs = [{"day": day, "machine": "m", "rows": rows} for day, rows in (("2", first), ("1", second))]
    shown = tables.speed_table(runs).splitlines()
    assert [line.split(" | ")[1] for line in shown[2:5]] == [
        "2.5 to 3.0 times |", "4.0 to 4.0 times |", "1.2 to 1.2 times |",
    ]  # fmt: skip
    assert shown[-1] == "The gradients are equal. Measured on two days, 1 to 2 (m)."
    answer = tables.speed_answer(runs)
    assert "takes 2.5 to 4.0 times as long" in answer
    assert "takes 1.0 to 2.0 times as long as the forward" in answer


def test_the_guide_has_one_number_per_cell():
    _, _, *rows = tables.guide_table().splitlines()
    results = [line.split(" | ")[2:] for line in rows]
    assert len(results) == 5
    assert all(len(re.findall(r"\d[\d.]*", cell)) == 1 for cells in results for cell in cells)


@pytest.mark.parametrize("path", tables.PAGES)
def test_a_page_shows_the_committed_tables(path):
    assert tables.filled_page(tables.ROOT / path) == (tables.ROOT / path).read_text(encoding="utf-8")
