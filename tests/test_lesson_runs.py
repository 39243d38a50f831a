"""What lessons 06 and 13 quote of runs is what the committed files hold."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.common import ROOT, Row, where
from ddpo_lessons.cli.presets import PRESETS
from ddpo_lessons.lessons import demo
from tests.test_lesson_tables import between, prose, rows_of, script

RATES = ("0.001", "0.003", "0.01")


def numbers(rows: list[Row], column: str, scale: float = 1) -> list[float]:
    return [scale * float(row[column]) for row in rows]


def error_of(differences: list[float]) -> float:
    """Return the standard error of a mean."""
    return stdev(differences) / len(differences) ** 0.5


# ------------------------------------------------------------------------------------------- lesson 06
def test_lesson_06_holds_what_painter_csv_says_of_small_files(monkeypatch):
    text, data = prose("06_text_to_image_ddpo"), rows_of("zoo/painter.csv")
    (best,) = where(data, method="best-of-8")
    (words,) = where(data, method="more words")
    before = where(data, method="DDPO", epoch="0")[0]
    for name, row in (
        ("before training", before), ("best-of-8", best), (f'longer prompt, "{words["prompt"]}"', words)
    ):  # fmt: skip
        assert f"| {name} | {-float(row['reward']):.2f} | {float(row['fox']):.0%} |" in text
    kept_at = script("draw_06_text_to_image", monkeypatch)["kept_at"]
    of_seeds = script("draw_06_text_to_image", monkeypatch)["of_seeds"]
    kept = {}
    for method, name in (("DDPO", "DDPO, stopped there"), ("KL 0.03", "β = 0.03"), ("RWR", "RWR")):
        curves = of_seeds(where(data, method=method), "reward", "fox")
        kept[method] = [100 * kept_at(curve, -1.9) for curve in curves]
        assert f"| {name} | {', '.join(f'{found:.0f}%' for found in kept[method])} |" in text
    leads = [ours - plain for ours, plain in zip(kept["KL 0.03"], kept["DDPO"], strict=True)]
    assert [lead > 0 for lead in sorted(leads)] == [False, True, True, True, True]
    quoted = f"{mean(leads):.0f} percentage points, with a standard error of {error_of(leads):.0f}"
    assert quoted in text
    assert all(rwr < plain for rwr, plain in zip(kept["RWR"], kept["DDPO"], strict=True))
    ends = where(data, method="KL 0.1", epoch="10")
    assert f"at {between((-x for x in numbers(ends, 'reward')), 2)} kB" in text
    assert f"at least {min(numbers(ends, 'fox', 100)):.0f}% of their images have a fox" in text
    assert {*numbers(where(data, method="DDPO", epoch="10"), "fox")} == {0.0}


def test_lesson_06_holds_what_paper_search_csv_says_of_rwr():
    """Its mean reward is at no learning rate, after no epoch, above that before training."""
    text, data = prose("06_text_to_image_ddpo"), rows_of("zoo/paper_search.csv")
    runs = where(data, reward="incompressibility", method="RWR")
    assert "RWR did not raise this reward at any of five learning rates (one seed each" in text
    assert len({row["learning_rate"] for row in runs}) == 5
    assert {row["seed"] for row in runs} == {"100"}
    (start,) = {row["score"] for row in runs if row["epoch"] == "0"}
    assert max(numbers(runs, "score")) == float(start)


# ------------------------------------------------------------------------------------------- lesson 13
def source_of(cell_id: str) -> str:
    cells = json.loads((ROOT / "notebooks" / "13_full_run.ipynb").read_text("utf-8"))["cells"]
    (source,) = ("".join(cell["source"]) for cell in cells if cell["id"] == cell_id)
    return source


def choose(is_full: bool, source: str = "") -> dict[str, Any]:
    """Run the cell that chooses the size."""
    names = {"FULL": is_full, "PRESETS": PRESETS, "Path": Path, "demo": demo, "sys": sys}
    names |= {"tempfile": tempfile, "what_fits": dict}
    exec(source or source_of("13-006"), names)
    return names


def test_lesson_13_says_how_to_get_a_gpu_where_there_is_none(capsys):
    assert choose(is_full=False)["MODEL"] == "tiny-zoo"
    said = " ".join(capsys.readouterr().out.split())
    assert said == (
        "No GPU: this is the small run. On Colab: Runtime > Change runtime type > T4 GPU, then run all cells "
        "again."
    )
    assert choose(is_full=True)["RUN"] == Path("restore-run")
    assert capsys.readouterr().out == ""


def test_lesson_13_can_do_without_drive(monkeypatch):
    """Who refuses the permission deletes four lines, as the lesson says."""

    def mount(folder: str) -> None:
        raise ValueError("mount failed")

    colab = ModuleType("google.colab")
    colab.drive = SimpleNamespace(mount=mount)
    monkeypatch.setitem(sys.modules, "google", ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", colab)
    with pytest.raises(ValueError, match="mount failed"):
        choose(is_full=True)
    assert 'delete the four lines from `if "google.colab"` on' in prose("13_full_run")
    lines = [line for line in source_of("13-006").splitlines() if line]
    (first,) = (n for n, line in enumerate(lines) if line.startswith('    if "google.colab"'))
    assert choose(True, "\n".join(lines[:first] + lines[first + 4 :]))["RUN"] == Path("restore-run")
