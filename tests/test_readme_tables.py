"""Tables of the READMEs, from a result made up by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.tables import (
    ANIMAL_SHARES,
    ablation_table,
    by_variant,
    edit_table,
    filled,
    finding,
    lesson_table,
    peers_table,
    recolouring,
    seeds_table,
)
from images import lessons

LESSONS = sorted((tables.ROOT / "notebooks").glob("*.ipynb"))


def phases(sampling: float, training: float) -> dict[str, list[float]]:
    """Medians, each with a tenth below and a fifth above."""
    seconds = {"sampling": sampling, "reward": 0.0, "training": training, "whole": sampling + training}
    return {name: [value, 0.9 * value, 1.2 * value] for name, value in seconds.items()}


@pytest.fixture
def result() -> dict[str, Any]:
    ours = {"size": "TRL", "ours": phases(1.0, 3.0), "floor": phases(1.0, 2.2)}
    ours |= {"compiled": phases(1.0, 1.5)}
    peer = {"peer": phases(2.0, 8.0)}
    right = {"first_clip_fraction": 0.0, "gradient_difference": {"ours": 5.2e-6, "compiled": 6e-6}}
    wrong = {"first_clip_fraction": 0.97, "gradient_difference": None}
    return {
        "machine": "2 cores, a processor, torch 2.13.0",
        "threads": 2,
        "rounds": 5,
        "peers": {"trl": "0.21.0"},
        "ours": {"diffusers": "0.42.1"},
        "rows": [
            {"case": "guided", "against": "TRL", **ours, **peer, **right},
            {"case": "unguided", "against": "TRL", **ours, "error": "RuntimeError: a | b" + " and so on" * 9},
            {"case": "img2img", "against": "imageddpo", **ours, **peer, **wrong},
        ],
    }


def test_peers_are_compared_by_whole_epochs(result: dict[str, Any]) -> None:
    lines = peers_table(result).splitlines()
    assert [line.removeprefix("| ") for line in lines[2:5]] == [
        "guided | TRL | TRL | 10.00 | 4.00 | 2.50 | 2.50 | 4.00 | 1.25 | 0.78 "
        "| gradients 5e-06 and 6e-06 apart |",
        "unguided | TRL | TRL | fails | 4.00 | 2.50 | – | – | 1.25 | 0.78 "
        "| RuntimeError: a / b and so on and so on and so on and so on and so on … |",
        "img2img | TRL | imageddpo | 10.00 | 4.00 | 2.50 | 2.50 | 4.00 | 1.25 | 0.78 "
        "| wrong policy: clip fraction 0.97 before any update |",
    ]
    assert all(line.count("|") == lines[0].count("|") for line in lines[1:5])
    assert lines[6] == (
        "Seconds per epoch, 5 rounds, 2 thread(s), 2 cores, a processor, torch 2.13.0. "
        "Peers: trl 0.21.0. Ours: diffusers 0.42.1."
    )


def shares(*values: float) -> dict[str, float]:
    return dict(zip(("digit", "colours", "both", "second_judge"), values, strict=True))


def test_lesson_07_shows_the_untrained_pipeline_every_seed_and_their_mean() -> None:
    untrained = {**shares(0.4, 0.8, 0.3, 0.25), "strength": 0.4, "guidance": 7.5, "steps": 10}
    before = shares(0.9, 0.0, 0.0, 0.0)
    runs = [
        {"seed": seed, "untrained_best": untrained, "before": before, "after": after, "seconds": seconds}
        for seed, after, seconds in (
            (0, shares(0.8, 1.0, 0.8, 0.7), 120),
            (1, shares(0.9, 0.9, 0.9, 0.9), 180),
        )
    ]
    lines = seeds_table({"machine": "a machine", "runs": runs}).splitlines()
    assert lines[2:] == [
        "| untrained, the best setting: strength 0.4, guidance 7.5, 10 steps"
        " | 40.0% | 80.0% | 30.0% | 25.0% |  |",
        "| untrained, as RL begins | 90.0% | 0.0% | 0.0% | 0.0% |  |",
        "| after RL, seed 0 | 80.0% | 100.0% | 80.0% | 70.0% | 2.0 |",
        "| after RL, seed 1 | 90.0% | 90.0% | 90.0% | 90.0% | 3.0 |",
        "| **after RL, mean** | 85.0% | 95.0% | 85.0% | 80.0% | 2.5 |",
        "",
        "Measured on: a machine.",
    ]
    taught = [{"what": "supervised", **shares(0.8, 1.0, share, 0.8)} for share in (0.7, 0.9)]
    others = [{"what": what, **shares(1, 0, 0, 0)} for what in ("untouched", "program")]
    lines = edit_table(recolouring({"runs": runs}, [*taught, *others])).splitlines()
    assert lines[2] == "| nothing | 100.0% | 0.0% | 0.0% | 0.0% |"
    assert lines[5:] == [
        "| supervised on pairs, as many samples | 80.0% | 100.0% | 80.0% (70.0 to 90.0) | 80.0% |",
        "| RL, from a score | 85.0% | 95.0% | 85.0% (80.0 to 90.0) | 80.0% |",
    ]


def test_the_demo_s_comparison_takes_the_animals_that_it_is_about() -> None:
    right = dict.fromkeys(("animal", "artist", "ground", "all", "second_judge"), 0.5)
    best = {**right, "all": 0.4, "strength": 0.75, "guidance": 3.0, "steps": 16}
    new = {"untrained_best": {**right, "all": 0.3}, "after": {**right, "all": 0.8}}
    run = {"untrained_best": best, "after": {**right, "all": 0.9}, "new_animals": new}
    rows = [
        {"what": what, "animals": animals, **right, "all": share}
        for what in ("untouched", "program", "best of 8", "supervised")
        for animals, share in (("practised", 0.1), ("new", 0.2))
    ]
    for animals, shown in (("practised", [10, 10, 40, 10, 10, 90]), ("new", [20, 20, 30, 20, 20, 80])):
        lines = edit_table(finding({"runs": [run]}, rows, animals), ANIMAL_SHARES).splitlines()[2:]
        assert [float(line.split("|")[5].strip(" %")) for line in lines] == shown
        assert lines[2].startswith("| turning the knobs (strength 0.75, guidance 3, 16 steps) |")


def test_the_paper_s_table_has_the_end_of_each_way_and_the_seeds_range() -> None:
    def row(method: str, seed: int, epoch: str, score: float, setting: str = "") -> dict[str, Any]:
        known = {"animal": "0.5", "all": "0.25", "utility": "1"}
        own = {"reward": "taste", "method": method, "seed": seed, "epoch": epoch, "setting": setting}
        return {**own, "score": str(score), **known}

    rows = [
        row("DDPO", seed, epoch, score)
        for seed, ends in ((0, (1, 3)), (1, (1, 4)))
        for epoch, score in zip(("0", "16"), ends, strict=True)
    ]
    rows += [row(m, seed, epoch, 2) for m in ("branching", "RWR") for seed in (0, 1) for epoch in ("0", "16")]
    rows += [row("best of 8", 0, "", 5), row("turned", 0, "", 6, "a cat by Noto")]
    assert tables.paper_table(rows).splitlines()[2:] == [
        "| taste | untrained | 1.00 | 25% | 1.00 |",
        "| taste | DDPO | 3.50 (3.00 to 4.00) | 25% | 1.00 |",
        "| taste | branching | 2.00 | 25% | 1.00 |",
        "| taste | RWR | 2.00 | 25% | 1.00 |",
        "| taste | best of 8 | 5.00 | 25% | 1.00 |",
        "| taste | turned: a cat by Noto | 6.00 | 25% | 1.00 |",
    ]


def test_the_ablations_show_every_variant() -> None:
    rows = [{"variant": name, **shares(0.5, 0.6, both, 0.7)} for name, both in (("one", 0.4), ("other", 0.3))]
    assert ablation_table(rows).splitlines()[2:] == [
        "| one | 50.0% | 60.0% | 40.0% | 70.0% |",
        "| other | 50.0% | 60.0% | 30.0% | 70.0% |",
    ]


def test_the_demo_s_ablations_are_means_of_each_variant_s_seeds() -> None:
    rows = [
        {"variant": name, "seed": seed, **dict.fromkeys(ANIMAL_SHARES, "0.5"), "all": right}
        for seed, ends in enumerate((("0.4", "0.1"), ("0.6", "0.2")))
        for name, right in zip(("as it is", "other"), ends, strict=True)
    ]
    assert edit_table(by_variant(rows), ANIMAL_SHARES).splitlines()[2:] == [
        "| as it is | 50.0% | 50.0% | 50.0% | 50.0% (40.0 to 60.0) | 50.0% |",
        "| other | 50.0% | 50.0% | 50.0% | 15.0% (10.0 to 20.0) | 50.0% |",
    ]


def test_the_table_of_lessons_has_every_notebook_and_its_time() -> None:
    seconds = {path.stem: 3.4 + n for n, path in enumerate(LESSONS)}
    rows = lesson_table({"machine": "a machine", "seconds": seconds}).splitlines()
    assert [row.split(" | ")[2] for row in rows[2:-2]] == [f"{3.4 + n:.0f} s" for n in range(len(LESSONS))]
    assert all(f"(notebooks/{path.name})" in row for path, row in zip(LESSONS, rows[2:], strict=False))
    assert rows[-1] == "Times: in a fresh kernel on a machine."


@pytest.mark.parametrize("urls", ["", '[project.urls]\nRepository = "https://github.com/some/where"\n'])
def test_an_address_in_pyproject_gives_every_lesson_a_badge(
    urls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize("end", ["hub.com/some/where.git", "hub.com/some/where/", "lab.com/some/where"])
def test_an_address_that_colab_cannot_open_is_refused(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lessons, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text(f'[project]\nurls.Repository = "https://git{end}"\n')
    with pytest.raises(ValueError, match="write https://github"):
        lessons.badge("01_batching")


def test_only_tables_with_marks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"one": lambda: "| new |", "not measured": lambda: tables.read("no such file")}
    monkeypatch.setattr(tables, "TABLES", made)
    text = "before\n<!-- one -->\n| old |\n<!-- /one -->\nafter <!-- /one -->\n"
    assert filled(text) == text.replace("old", "new")
    with pytest.raises(FileNotFoundError, match="no such file"):
        filled("<!-- not measured --><!-- /not measured -->")


def test_epochs_on_a_gpu_are_beside_the_paper() -> None:
    nothing = tables.gpu_table({})
    assert nothing.count("| not run |") == len(tables.EPOCHS)
    assert "sdxl" not in tables.gpu_table({}, "sd15")
    assert nothing.endswith("\n\n**Not run on a GPU yet.**")
    done = {"paper_gb": 11.48, "peak_gb": 12.06, "sampling_s": 4.0, "training_s": 6.0, "first_epoch_s": 12.34}
    done |= {"sampling_tflop": 158.0, "training_tflop": 282.0, "waits": 31, "ratio_error": 0.00012}
    parts = {"sd15": {**done, "result": "ok"}, "sdxl": {"paper_gb": 10.33, "result": "out of memory"}}
    parts["tests"] = {"passed": 20, "result": "1 failed"}
    found = tables.gpu_table({"hardware": "a card, 24.0 GB", "parts": parts}).splitlines()
    assert found[2] == "| sd15 | bf16 | 4 | 11.5 | 12.1 | 4.0 | 6.0 | 12.3 | 44 | 31 | 1e-04 | ok |"
    assert "| sdxl | bf16 | 2, checkpointing | 10.3 | – | – | – | – | – | – | – | out of memory |" in found
    assert found[-1] == "Measured on: a card, 24.0 GB. Tests: 20 passed, 1 failed. Demo: not run."


@pytest.mark.parametrize("path", tables.PAGES)
def test_a_page_shows_the_committed_tables(path: str) -> None:
    assert tables.filled_page(tables.ROOT / path) == (tables.ROOT / path).read_text(encoding="utf-8")
