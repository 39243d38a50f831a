"""The comparison counts what it says it counts, evaluates all alike, and searches all alike."""

import dataclasses
import itertools
import math
import subprocess
import sys

import pytest
import torch

from benchmarks.common import ROOT, read_rows, write_rows
from benchmarks.results import equal_tasks, equal_terms
from benchmarks.results.equal_tasks import METHODS, TASKS, Setting
from benchmarks.results.equal_terms import BEGIN, LADDERS
from benchmarks.zoo import edit
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.config import DDPOConfig

# Network passes of an epoch's sample, by hand: what sampling needs, then three for each example that is
# trained on. DRaFT samples up to where its K steps begin, ReFL up to the step that it jumps from.
PASSES = {
    ("preference", "DDPO"): 1 / 8 + 4
    + 3 * 2 * (1 / 4 * 1 / 8 + 3 / 4),  # on average: a group shares its first state
    ("preference", "RWR"): 5 + 3 * 2,
    ("preference", "AWM"): 5 + (3 + 1) * 2,  # the EMA policy predicts, too
    ("preference", "DiffusionNFT"): 5 + (3 + 1) * 2, ("preference", "PEPG"): 5 + (3 + 1) * 2,
    # Two of eight samples, and the first policy predicts, too.
    ("preference", "online DPO"): 5 + 2 / 8 * (3 + 1) * 2,
    ("preference", "DRaFT"): 2 + 3 * 3, ("preference", "ReFL"): 5 - 2 + 3,
    ("edit", "DRaFT"): 2 + 3 * 3, ("edit", "ReFL"): 5 - 2 + 3,
}  # fmt: skip
SHARED = {("preference", "DDPO")}  # by chance more or fewer of the kept states are in common


@pytest.mark.slow
@pytest.mark.parametrize(("task", "method"), PASSES)
def test_passes_are_those_counted_by_hand(task, method, monkeypatch):
    monkeypatch.setattr(
        equal_tasks.Evaluation, "measure", lambda evaluation, images: {"reward": 0.0, "judge": 1.0}
    )
    monkeypatch.setattr(equal_tasks.Evaluation, "images", lambda evaluation, *_: torch.zeros(1, 8, 3, 4, 4))
    monkeypatch.setattr(equal_terms, "at_the_start", lambda *_: {"reward": 0.0, "judge": 1.0})
    monkeypatch.setitem(TASKS, task, dataclasses.replace(TASKS[task], points=(0, 8)))
    run = {"task": task, "method": method, **Setting(1e-4, 8, 1)._asdict(), "length": 8, "seed": 1}
    first, row = equal_terms.train(run)
    tolerance = 0.15 if (task, method) in SHARED else 1e-9
    assert (first["evaluations"], row["evaluations"]) == (0, 8)
    assert row["passes"] / 8 == pytest.approx(PASSES[task, method], rel=tolerance)


def test_all_methods_exist_and_every_setting_reaches_the_points():
    for name, task in TASKS.items():
        for method in {**task.methods, **task.details}:
            settings = equal_terms.settings_of(name, method, BEGIN)
            config = {field: value for part in settings for field, value in part.items()}
            make_algorithm(task.method(method).algorithm).check(DDPOConfig(**config))
        assert all(point % images == 0 for point in task.points for images in LADDERS.images)


# --------------------------------------------------------------------------------------------- search
def test_trials_are_neighbors_of_the_best_one_and_never_repeated():
    peak = Setting(3e-4, 32, 2)
    tried: dict[Setting, float] = {}
    for _ in range(7):
        trial = equal_terms.next_setting(tried, lambda setting: True)
        assert trial not in tried
        if tried:
            assert any(trial in equal_terms.neighbors(setting) for setting in tried)
        tried[trial] = -sum(
            abs(ladder.index(one) - ladder.index(other))
            for ladder, one, other in zip(LADDERS, trial, peak, strict=True)
        )
    assert next(iter(tried)) == BEGIN
    assert max(tried.values()) >= -1  # at most one place away


def test_where_nothing_helps_the_search_goes_down_in_learning_rate():
    tried: dict[Setting, float] = {}
    for _ in range(6):
        tried[equal_terms.next_setting(tried, lambda setting: True)] = 0.0
    assert Setting(3e-5, 16, 1) in tried


def test_a_setting_that_the_algorithm_refuses_is_no_trial():
    assert not equal_terms.fits("preference", "AWM", Setting(1e-3, 16, 2))
    tried = {BEGIN: 0.0}
    while len(tried) < 30:
        trial = equal_terms.next_setting(
            tried, lambda setting: equal_terms.fits("preference", "AWM", setting)
        )
        assert trial.steps == 1
        tried[trial] = -math.inf
        if len(tried) == len(LADDERS.learning_rate) * len(LADDERS.images):
            break


def test_an_algorithm_of_ones_own_takes_part(tmp_path):
    file = tmp_path / "own_rwr.py"
    file.write_text("from ddpo_lessons.algorithms.rwr import RWR\n\n\nclass Mine(RWR):\n    name = 'mine'\n")
    method = TASKS["preference"].method(f"{file}:Mine")
    assert method.algorithm == f"{file}:Mine"
    assert equal_terms.fits("preference", f"{file}:Mine", BEGIN)
    with pytest.raises(ValueError, match="does not exist"):
        TASKS["preference"].method("mine")


def test_an_algorithm_of_ones_own_that_clips_has_the_clip_range_of_ddpo(tmp_path):
    file = tmp_path / "own_clip.py"
    file.write_text("from ddpo_lessons.algorithms.ddpo import DDPO\n\n\nclass Own(DDPO):\n    name = 'own'\n")
    assert TASKS["preference"].method(f"{file}:Own").config == TASKS["preference"].methods["DDPO"].config
    assert "train_clip_range" not in TASKS["preference"].method("rwr").config


@pytest.mark.slow
def test_a_wrong_method_is_refused_before_any_run():
    command = [sys.executable, "-m", "benchmarks.results.equal_terms", "--methods", "nowhere.py:Mine"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "--methods: algorithm='nowhere.py:Mine': there is no file nowhere.py" in ended.stderr


def test_a_method_of_ones_own_is_ranked_among_the_others():
    results = read_rows(equal_terms.RESULTS)
    own = [{**row, "method": "mine.py:Mine", "reward": "1.23"} for row in results if row["method"] == "DDPO"]
    lines = equal_terms.ranking("edit", [*results, *own], ["mine.py:Mine"])
    assert [line.split()[0] for line in lines] == ["mine.py:Mine", "DRaFT", "ReFL", "branching", "DDPO"]
    assert "reward   1.23, evaluator  45%, 5 seeds" in lines[0]


def test_neighbors_differ_by_one_place_of_one_ladder():
    assert set(equal_terms.neighbors(Setting(3e-2, 8, 2))) == {
        Setting(1e-2, 8, 2), Setting(3e-2, 16, 2), Setting(3e-2, 8, 4), Setting(3e-2, 8, 1)
    }  # fmt: skip


def rows_of(setting, seed, *points):
    names = ("evaluations", "reward", "judge")
    about = {"task": "preference", "method": "RWR", **setting._asdict(), "seed": seed}
    return [{**about, **dict(zip(names, point, strict=True))} for point in points]


def test_setting_and_length_are_chosen_by_the_highest_reward_within_the_limit(tmp_path, monkeypatch):
    hacked, careful = Setting(3e-3, 16, 1), Setting(1e-3, 16, 1)
    rows = [
        *rows_of(hacked, 110, (0, 0.0, 1.0), (128, 2.0, 0.9), (256, 9.0, 0.89)),
        *rows_of(hacked, 111, (0, 0.0, 1.0), (128, 2.0, 0.9), (256, 9.0, 0.95), (384, 12.0, 0.95)),
        *rows_of(careful, 110, (0, 0.0, 1.0), (128, 1.0, 1.0), (256, 2.5, 0.95), (384, 2.4, 0.95)),
        *rows_of(careful, 111, (0, 0.0, 1.0), (128, 2.6, 1.0), (256, 2.5, 0.95), (384, 2.4, 0.95)),
    ]
    monkeypatch.setattr(equal_terms, "SEARCH", tmp_path / "search.csv")
    write_rows(tmp_path / "search.csv", rows)
    assert equal_terms.best_point("preference", rows[:7]) == (2.0, 128)
    assert equal_terms.chosen("preference", "RWR") == (careful, 256)


def test_only_the_limit_decides_what_is_acceptable():
    start = {"reward": -7.5, "judge": 0.9}
    for reward, judge, expected in ((-7.4, 0.81, True), (-7.6, 0.9, True), (0.0, 0.80, False)):
        found = equal_terms.acceptable("preference", {"reward": reward, "judge": judge}, start)
        assert found == expected
    assert equal_terms.acceptable("edit", {"reward": 0.0, "judge": 0.0}, start)


def test_the_search_runs_every_trial_with_both_seeds(monkeypatch):
    """With a made-up training whose reward grows with the learning rate."""
    calls = []

    def train(run):
        calls.append((equal_terms.setting_of(run), run["seed"]))
        return [{"evaluations": n, "reward": n * run["learning_rate"], "judge": 1.0} for n in (0, 384)]

    monkeypatch.setattr(equal_terms, "train", train)
    rows = equal_terms.search({"task": "preference", "method": "AWM"})
    assert len(calls) == len(set(calls)) == 14
    assert len(rows) == 2 * len(calls)
    assert max(row["learning_rate"] for row in rows) == LADDERS.learning_rate[-1]
    assert [seed for _, seed in calls] == [110, 111] * 7


def test_committed_runs_are_those_of_the_search_and_of_five_seeds():
    searched, results = read_rows(equal_terms.SEARCH), read_rows(equal_terms.RESULTS)
    for task, method in itertools.chain.from_iterable(
        itertools.product([name], task.methods) for name, task in TASKS.items()
    ):
        own = [row for row in searched if (row["task"], row["method"]) == (task, method)]
        runs = {(equal_terms.setting_of(row), row["seed"]) for row in own}
        assert len(runs) == 2 * TASKS[task].trials, method
        own = [row for row in results if (row["task"], row["method"]) == (task, method)]
        assert {int(row["seed"]) for row in own} == set(equal_terms.SEEDS), method
        setting, length = equal_terms.chosen(task, method)
        assert {equal_terms.setting_of(row) for row in own} == {setting}
        assert {int(row["length"]) for row in own} == {length}


def test_a_detail_changes_something_and_has_the_setting_and_the_seeds_of_its_method():
    results = read_rows(equal_terms.RESULTS)
    for name, detail in TASKS["preference"].details.items():
        assert detail.config != METHODS[detail.like].config
        own = [row for row in results if row["method"] == name]
        assert {int(row["seed"]) for row in own} == set(equal_terms.SEEDS), name
        setting, length = equal_terms.chosen("preference", detail.like)
        assert {(equal_terms.setting_of(row), int(row["length"])) for row in own} == {(setting, length)}


# ---------------------------------------------------------------------------------------------- evaluations
class PlainEvaluation(equal_tasks.Evaluation):
    """Two questions, whose answers are as bright as the noise's number says."""

    prompts, metadata, noises = ["a", "b"], [{}] * 2, 2
    bright = torch.tensor([[0.1, 0.9, 0.3, 0.2] * 4, [0.4, 0.3, 0.2, 0.1] * 4])  # (questions, noises)

    def __init__(self):
        self.reward = lambda images, prompts, metadata: (images.mean((1, 2, 3)), {})

    def draw(self, pipeline, noise):
        return self.bright[:, noise].view(2, 1, 1, 1).expand(2, 3, 2, 2)

    def judged(self, images):
        return {"judge": (images.mean((1, 2, 3)) > 0.5).double().mean().item()}

    def turned(self, pipeline):
        return {}


def test_marks_are_those_worked_out_by_hand():
    evaluation = PlainEvaluation()
    marks = evaluation.measure(evaluation.images(None))
    assert marks["reward"] == pytest.approx((0.1 + 0.9 + 0.4 + 0.3) / 4)
    assert marks["judge"] == 0.25
    assert marks["diversity"] == pytest.approx((0.8 + 0.1) / 2 / math.sqrt(2))


def test_the_best_of_n_takes_each_answer_once():
    evaluation = PlainEvaluation()
    found = evaluation.best_of(lambda noise: evaluation.draw(None, noise))
    means = {count: images.mean((2, 3, 4)).tolist() for count, images in found.items()}
    assert means[2][0] == pytest.approx([0.9, 0.4])
    assert means[2][1] == pytest.approx([0.3, 0.2])  # from noises 2 and 3
    assert means[4][0] == means[4][1] == pytest.approx([0.9, 0.4])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "questions"),
    [("preference", 45), ("edit", 200)],
)
def test_an_exam_asks_the_same_every_time_and_other_splits_otherwise(task, questions):
    pipeline, (test, again, other) = (
        TASKS[task].load(),
        map(TASKS[task].evaluation, ("test", "test", "validation")),
    )
    first = test.draw(pipeline, 0)
    torch.testing.assert_close(first, again.draw(pipeline, 0))
    for different in (test.draw(pipeline, 1), other.draw(pipeline, 0), test.draw(pipeline, 7)):
        common = slice(min(len(first), len(different)))
        assert (first[common] - different[common]).abs().mean() > 0.01
    assert len(test.prompts) == len(first) == questions


def test_the_program_of_the_edit_is_judged_as_that_of_the_demo():
    evaluation = equal_tasks.EditEvaluation("test")
    ((images,),) = evaluation.real().values()
    committed = {row["what"]: row for row in read_rows(edit.RESULTS) if row["animals"] == "practised"}
    for name, share in evaluation.evaluation.fractions(images).items():
        # Of the demo's 500 pictures these are 200.
        assert share == pytest.approx(float(committed["program"][name]), abs=0.04), name
