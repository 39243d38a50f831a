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
    for name, rate in (("DDPO", "0.003"), ("low rates", "0.0003")):
        begin, end = (where(data, method=name, learning_rate=rate, epoch=epoch) for epoch in ("0", "6"))
        shrunk = [
            new - old for old, new in zip(numbers(begin, "reward"), numbers(end, "reward"), strict=True)
        ]
        assert len(shrunk) == 5
        assert f"smaller by {between(shrunk, 2)} kB" in text


def test_lesson_06_holds_what_painter_csv_says_of_six_steps():
    text, data = prose("06_text_to_image_ddpo"), rows_of("zoo/painter.csv")
    sizes: dict[str, list[list[float]]] = {}
    for rate in RATES:
        for method in ("six steps", "six steps, five trained"):
            rows = where(data, method=method, learning_rate=rate, epoch="6")
            rows.sort(key=lambda row: int(row["seed"]))
            assert [row["seed"] for row in rows] == ["3", "4", "5", "6", "7", "13", "14"]
            sizes.setdefault(rate, []).append([-float(row["reward"]) for row in rows])
        with_last, left_out = (f"{between(found, 2)} kB" for found in sizes[rate])
        smaller = sum(out < every for every, out in zip(*sizes[rate], strict=True))
        assert f"| {rate} | {with_last} | {left_out} | {smaller} of 7 |" in text
    lost = where(data, method="six steps", learning_rate="0.01", epoch="6")
    assert {row["fox"] for row in lost} == {"0.0"}  # "no run that trains the last action keeps a single fox"


def test_lesson_06_holds_what_painter_csv_says_of_large_files():
    text, data = prose("06_text_to_image_ddpo"), rows_of("zoo/painter.csv")
    (best,) = where(data, method="best-of-8, large files")
    (words,) = where(data, method="more words, large files")
    assert f"| best-of-8 | {float(best['reward']):.2f} | {float(best['fox']):.0%} | 8 |" in text
    row = f'| longer prompt, "{words["prompt"]}" | {float(words["reward"]):.2f} | {float(words["fox"]):.0%} |'
    assert row in text
    for rate in RATES:
        rows = where(data, method="large files", learning_rate=rate, epoch="16")
        rows.sort(key=lambda row: int(row["seed"]))
        assert [row["seed"] for row in rows] == ["3", "4", "5", "6", "7", "13", "14"]
        kilobytes, foxes = numbers(rows, "reward"), [f"{found:.0f}%" for found in numbers(rows, "fox", 100)]
        assert f"| {rate} | {between(kilobytes, 2)} | {', '.join(foxes)} |" in text
        assert min(kilobytes) > float(best["reward"])
        above = sum(found > float(words["reward"]) for found in kilobytes)
        assert above == (6 if rate == "0.001" else 7)


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


def restored(rate: str = "0.002", penalty: str = "40.0") -> dict[str, list[Row]]:
    """Return the rows of each measurement, in the order of the seeds."""
    found: dict[str, list[Row]] = {}
    rows = where(rows_of("results/full_run.csv"), learning_rate=rate, penalty=penalty)
    for row in sorted(rows, key=lambda row: row["seed"]):
        found.setdefault(row["what"], []).append(row)
    assert {len(seeds) for seeds in found.values()} == {5}
    return found


def percents(rows: list[Row], column: str = "second_judge") -> list[float]:
    return numbers(rows, column, 100)


def paired(before: Row, after: Row) -> tuple[float, float]:
    """Return the mean difference in percentage points and its standard error, as in exercise 2."""
    hits = zip(before["hits"], after["hits"], strict=True)
    differences = [100.0 * ((last == "x") - (first == "x")) for first, last in hits]
    return mean(differences), error_of(differences)


def test_lesson_13_holds_what_full_run_csv_says():
    text, found = prose("13_full_run"), restored()
    trained, best_of, filtered = found["epoch 48"], found["untrained, best-of-4"], found["stretched"]
    names = {"before training": found["epoch 0"], "best-of-4, untrained": best_of}
    for name, rows in (names | {"after training": trained, "contrast stretch": filtered}).items():
        ends = percents(rows)
        assert f"| {name} | {min(ends):.0f} | {max(ends):.0f} | {mean(ends):.0f} |" in text
    assert all(end > best for end, best in zip(percents(trained), percents(best_of), strict=True))
    leads = [a - b for a, b in zip(percents(trained), percents(filtered), strict=True)]
    assert [round(lead) for lead in leads if lead > 0] == [2]  # "only one is above the contrast stretch"
    gains = [a - b for a, b in zip(percents(best_of), percents(found["epoch 0"]), strict=True)]
    assert f"it is between {min(gains):.0f} and {max(gains):.0f} percentage points" in text
    kept = zip(numbers(found["trained"], "distance"), numbers(found["damaged"], "distance"), strict=True)
    assert sum(after > 0.95 * damaged for after, damaged in kept) == 1  # "it hardly changed"


def test_lesson_13_compares_the_best_and_the_last_evaluation_image_by_image():
    text, found = prose("13_full_run"), restored()
    epochs = ("0", "12", "24", "36", "48")
    quoted, falls = 0, []
    for index, last in enumerate(found["epoch 48"]):
        rows = {epoch: found[f"epoch {epoch}"][index] for epoch in epochs}
        assert all(f"{row['hits'].count('x') / 45:.4g}" == row["second_judge"] for row in rows.values())
        best = max(epochs, key=lambda epoch: float(rows[epoch]["second_judge"]))
        difference, error = paired(rows[best], last)
        if difference < 0:
            quoted += 1
            falls.append(round(45 * -difference / 100))
            ratio = round(-difference / error, 1)
            assert ratio <= 1 or ratio == 2.1
            assert f"| {last['seed']} | {best} | −{-difference:.1f} | {error:.1f} |" in text
    assert quoted == 3
    assert (min(falls), max(falls)) == (2, 4)


def test_lesson_13_holds_other_learning_rates():
    text = prose("13_full_run")
    runs = {rate: restored(rate) for rate in ("0.001", "0.002", "0.004")}
    early = {rate: percents(found["epoch 12"]) for rate, found in runs.items()}
    ends = {rate: percents(found["epoch 48"]) for rate, found in runs.items()}
    for rate in runs:
        cells = [mean(early[rate]), min(ends[rate]), max(ends[rate]), mean(ends[rate])]
        assert f"| {rate} | {' | '.join(f'{cell:.0f}' for cell in cells)} |" in text
    assert all(slow < usual for slow, usual in zip(early["0.001"], early["0.002"], strict=True))
    gains = [slow - usual for slow, usual in zip(ends["0.001"], ends["0.002"], strict=True)]
    assert abs(mean(gains)) < error_of(gains)  # "do not differ clearly"
    bad = [index for index, end in enumerate(ends["0.004"]) if end <= 20]
    assert len(bad) == 4
    before = percents(runs["0.002"]["epoch 0"])
    assert all(abs(ends["0.004"][index] - before[index]) < 7 for index in bad)
    assert sorted(round(early["0.004"][index]) for index in bad)[-2:] == [20, 38]


def test_lesson_13_holds_other_weights_of_the_penalty():
    text, gaps, ends, distances = prose("13_full_run"), {}, {}, {}
    for weight in ("40.0", "10.0", "0.0"):
        rows = restored(penalty=weight)["trained"]
        judges, ends[weight] = percents(rows, "judge"), percents(rows)
        distances[weight] = numbers(rows, "distance")
        cells = f"{mean(ends[weight]):.0f}% | {mean(judges):.0f}% | {mean(distances[weight]):.3f}"
        assert f"| {float(weight):.0f} | {cells} |" in text
        assert all(ours > other for ours, other in zip(judges, ends[weight], strict=True))
        gaps[weight] = mean(judges) - mean(ends[weight])
    untrained = restored()["untrained"]
    ours, others = mean(percents(untrained, "judge")), mean(percents(untrained))
    assert f"it did so before training too ({ours:.0f}% in contrast to {others:.0f}%)" in text
    assert gaps["0.0"] - gaps["40.0"] < 2  # "hardly larger"
    assert gaps["0.0"] - (ours - others) < 4
    for weight in ("10.0", "0.0"):
        gains = [a - b for a, b in zip(ends[weight], ends["40.0"], strict=True)]
        assert abs(mean(gains)) < error_of(gains)  # "do not differ clearly"
    farther = [a > b for a, b in zip(distances["0.0"], distances["40.0"], strict=True)]
    assert sum(farther) == 4


# ------------------------------------------------------------------------------------------- lesson 07
def test_lesson_07_holds_how_far_branching_leads():
    """In the demo's runs by both evaluators, and in the trials of the search that both algorithms had."""
    text, tested = prose("07_img2img_ddpo"), where(rows_of("zoo/demo.csv"), images="test")
    quoted = {
        "all": "Branching leads by {} points, with a standard error of {}.",
        "second_judge": "By the second evaluator it trails by {}, with a standard error of {}.",
    }
    for column, sentence in quoted.items():
        branching, ddpo = (
            numbers(where(tested, algorithm=name), column, 100) for name in ("branching", "ddpo")
        )
        error = (error_of(branching) ** 2 + error_of(ddpo) ** 2) ** 0.5
        lead = mean(branching) - mean(ddpo)
        assert (lead > 0) == ("leads" in sentence)
        assert sentence.format(f"{abs(lead):.1f}", f"{error:.1f}") in text
    ends = {
        (row["space"], row["trial"], row["algorithm"]): row
        for row in where(rows_of("zoo/edit_search.csv"), seed="10")
    }
    trials = {key[:2] for key in ends}
    both = [key for key in trials if {(*key, "branching"), (*key, "ddpo")} <= ends.keys()]
    assert (len(both), len(trials)) == (46, 51)
    leads = [100 * (float(ends[*key, "branching"]["all"]) - float(ends[*key, "ddpo"]["all"])) for key in both]
    assert f"branching ends only {mean(leads):.1f} points higher on average" in text
    assert f"on average, with a standard error of {error_of(leads):.1f}." in text


def test_lesson_07_holds_what_views_and_fewer_steps_bring():
    text, rows = prose("07_img2img_ddpo"), rows_of("zoo/edit_views.csv")
    assert len(rows) == 2 * 2 * 2 * 2  # algorithms, steps, views, seeds

    def gains(column: str, name: str, better: str, other: str) -> list[float]:
        """Return what one value of a setting gains over the other, in the pairs that agree in all else."""
        keys = [key for key in ("algorithm", "steps", "views", "seed") if key != name]
        ends = {(row[name], *(row[key] for key in keys)): 100 * float(row[column]) for row in rows}
        return [end - ends[other, *key[1:]] for key, end in ends.items() if key[0] == better]

    second, first = (gains(column, "views", "6", "1") for column in ("second_judge", "all"))
    assert sum(gain > 0 for gain in second) == 7
    assert f"{mean(second):.1f} points, with a standard error of {error_of(second):.1f}" in text
    assert f"({mean(first):.1f}, standard error {error_of(first):.1f})" in text
    steps = gains("all", "steps", "8", "12")
    assert abs(mean(steps)) == pytest.approx(1, abs=0.1)
    assert f"less than its standard error of {error_of(steps):.1f}" in text
    seconds = {
        (name, steps): mean(numbers(where(rows, algorithm=name, steps=steps), "seconds"))
        for name in ("branching", "ddpo") for steps in ("8", "12")
    }  # fmt: skip
    assert seconds["ddpo", "8"] / seconds["ddpo", "12"] == pytest.approx(1 / 2, abs=0.02)
    assert seconds["branching", "8"] / seconds["branching", "12"] == pytest.approx(4 / 5, abs=0.04)
    ends = {
        name: {(steps, views): mean(numbers(where(rows, algorithm=name, steps=steps, views=views), "all"))
               for steps in ("8", "12") for views in ("1", "6")}
        for name in ("branching", "ddpo")
    }  # fmt: skip
    assert max(ends["branching"], key=ends["branching"].get) == ("8", "6")
    assert max(ends["ddpo"], key=ends["ddpo"].get) == ("12", "6")
