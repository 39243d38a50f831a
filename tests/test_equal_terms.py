"""The comparison counts what it says it counts, asks everybody the same, and brackets the best rate."""

import dataclasses
import math

import pytest
import torch

from benchmarks.common import read_rows, write_rows
from benchmarks.results import equal_tasks, equal_terms
from benchmarks.results.equal_tasks import TASKS
from benchmarks.results.equal_terms import LADDER
from benchmarks.zoo import edit
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.worlds import load_tiny_sd3, load_tiny_zoo
from tests.helpers import make_sd3_pipeline

# Network passes of an epoch's sample, by hand: what sampling needs, then three for each example that is
# trained on. DRaFT samples up to where its K steps begin, ReFL up to the step that it jumps from.
PASSES = {
    ("taste", "DDPO"): 1 / 8 + 4
    + 3 * 2 * (1 / 4 * 1 / 8 + 3 / 4),  # on average: a group shares its first state
    ("taste", "RWR"): 5 + 3 * 2, ("taste", "AWM"): 5 + (3 + 1) * 2,  # the lagging policy is asked too
    ("taste", "DiffusionNFT"): 5 + (3 + 1) * 2, ("taste", "PEPG"): 5 + (3 + 1) * 2,
    ("taste", "online DPO"): 5 + 2 / 8 * (3 + 1) * 2,  # two of eight samples; the first policy is asked too
    ("taste", "DRaFT"): 2 + 3 * 3, ("taste", "ReFL"): 5 - 2 + 3, ("edit", "PEPG"): 5 + (3 + 1) * 2,
    ("prompts", "RWR"): 10 + 3 * 3, ("prompts", "DiffusionNFT"): 10 + (3 + 1) * 3,
    ("prompts", "DRaFT"): 5 + 3 * 5, ("prompts", "ReFL"): 10 - 4 + 3,
}  # fmt: skip
SHARED = {("taste", "DDPO")}  # by chance more or fewer of the kept states are in common


@pytest.fixture
def short(monkeypatch):
    """An epoch of 8 samples in one optimizer step, without a question before it."""
    for name, task in TASKS.items():
        settings = {**task.settings, "sample_batch_size": 8, "train_batch_size": 8}
        monkeypatch.setitem(TASKS, name, dataclasses.replace(task, settings=settings, points=(8,)))


@pytest.mark.slow
@pytest.mark.parametrize(("task", "method"), PASSES)
def test_passes_are_those_counted_by_hand(task, method, short, monkeypatch):
    monkeypatch.setattr(equal_terms, "look", lambda exam, pipeline: (torch.zeros(1, 8, 3, 4, 4), {}))
    (row,) = equal_terms.train({"task": task, "method": method, "learning_rate": 1e-4, "seed": 1})
    tolerance = 0.15 if (task, method) in SHARED else 1e-9
    assert row["queries"] == 8
    assert row["passes"] / 8 == pytest.approx(PASSES[task, method], rel=tolerance)


def test_all_methods_exist_and_take_equally_many_optimizer_steps_for_a_query():
    for task in TASKS.values():
        rates = set()
        for method in task.methods.values():
            settings = {**task.settings, **method.config}
            make_algorithm(method.algorithm).check(DDPOConfig(**settings))
            rates.add(settings["train_batch_size"])
            assert all(point % settings["sample_batch_size"] == 0 for point in task.points)
        assert len(rates) == 1


# --------------------------------------------------------------------------------------------- search
@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        ({}, 1e-3),
        ({1e-3: 5.0}, 3e-3),
        ({1e-3: 1.0, 3e-3: 2.0}, 1e-2),
        ({1e-3: 2.0, 3e-3: 1.0}, 3e-4),
        ({3e-4: 3.0, 1e-3: 2.0, 3e-3: 1.0}, 1e-4),
        ({3e-4: 1.0, 1e-3: 2.0, 3e-3: 1.0}, None),
        ({1e-3: 1.0, 3e-3: 2.0, 1e-2: 1.5}, None),
        ({1e-3: 1.0, 3e-3: 1.0, 3e-4: 1.0}, 1e-4),
        (dict.fromkeys(LADDER[:5], 1.0), None),
    ],
)
def test_the_search_goes_on_until_the_best_rate_lies_inside(tried, expected):
    assert equal_terms.next_rate(tried) == expected


@pytest.mark.parametrize("peak", LADDER[1:-1])
def test_wherever_one_best_rate_lies_it_is_found_from_the_same_beginning(peak):
    tried: dict[float, float] = {}
    while (rate := equal_terms.next_rate(tried)) is not None:
        tried[rate] = -abs(math.log(rate / peak))
    assert max(tried, key=lambda rate: tried[rate]) == peak
    assert list(tried)[:2] == [1e-3, 3e-3]


def rows_of(rate, *points):
    names = ("queries", "reward", "judge")
    about = {"task": "taste", "method": "RWR", "learning_rate": rate, "seed": 100}
    return [{**about, **dict(zip(names, point, strict=True))} for point in points]


def test_rate_and_length_are_chosen_by_the_highest_reward_within_the_limit(tmp_path, monkeypatch):
    hacked = rows_of(3e-3, (0, 0.0, 1.0), (64, 2.0, 0.9), (128, 9.0, 0.89), (256, 12.0, 0.1))
    careful = rows_of(1e-3, (0, 0.0, 1.0), (64, 1.0, 1.0), (128, 2.5, 0.95), (256, 2.4, 0.95))
    monkeypatch.setattr(equal_terms, "SEARCH", tmp_path / "search.csv")
    write_rows(tmp_path / "search.csv", [*hacked, *careful])
    assert equal_terms.chosen("taste", "RWR") == (1e-3, 128)
    other_seed = rows_of(1e-3, (0, 0.0, 1.0), (64, 1.4, 1.0), (128, 3.5, 0.7))  # broke after that
    assert equal_terms.best_point("taste", [*careful, *other_seed]) == (1.2, 64)
    assert equal_terms.chosen("prompts", "RWR") == (3e-3, 1920)


# ---------------------------------------------------------------------------------------------- exams
class PlainExam(equal_tasks.Evaluation):
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
    exam = PlainExam()
    marks = exam.measure(exam.images(None))
    assert marks["reward"] == pytest.approx((0.1 + 0.9 + 0.4 + 0.3) / 4)
    assert marks["judge"] == 0.25
    assert marks["diversity"] == pytest.approx((0.8 + 0.1) / 2 / math.sqrt(2))


def test_the_best_of_n_takes_each_answer_once():
    exam = PlainExam()
    found = exam.best_of(lambda noise: exam.draw(None, noise))
    means = {count: images.mean((2, 3, 4)).tolist() for count, images in found.items()}
    assert means[2][0] == pytest.approx([0.9, 0.4])
    assert means[2][1] == pytest.approx([0.3, 0.2])  # from noises 2 and 3
    assert means[4][0] == means[4][1] == pytest.approx([0.9, 0.4])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "load", "questions"),
    [("taste", load_tiny_zoo, 45), ("edit", load_tiny_zoo, 200), ("prompts", load_tiny_sd3, 50)],
)
def test_an_exam_asks_the_same_every_time_and_other_splits_otherwise(task, load, questions):
    pipeline, (test, again, other) = load(), map(TASKS[task].exam, ("test", "test", "validation"))
    first = test.draw(pipeline, 0)
    torch.testing.assert_close(first, again.draw(pipeline, 0))
    for different in (test.draw(pipeline, 1), other.draw(pipeline, 0), test.draw(pipeline, 7)):
        common = slice(min(len(first), len(different)))
        assert (first[common] - different[common]).abs().mean() > 0.01
    assert len(test.prompts) == len(first) == questions


def test_the_program_of_the_edit_is_judged_as_that_of_the_demo():
    exam = equal_tasks.EditExam("test")
    ((images,),) = exam.real().values()
    committed = {row["what"]: row for row in read_rows(edit.RESULTS) if row["animals"] == "practised"}
    for name, share in exam.exam.shares(images).items():
        # Of the demo's 500 pictures these are 200.
        assert share == pytest.approx(float(committed["program"][name]), abs=0.04), name


def test_handwriting_is_what_the_prompts_ask_for():
    exam = equal_tasks.PromptExam("test")
    marks = exam.measure(exam.real()["handwriting"])
    assert marks["judge"] > 0.95
    assert marks["reward"] > -0.2


def test_all_layers_that_are_named_exist():
    names = [name for name, _ in make_sd3_pipeline().transformer.named_modules()]
    assert all(any(name.endswith(layer) for name in names) for layer in equal_tasks.OF_SD3)
