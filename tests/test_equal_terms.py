"""The comparison counts what it says it counts, asks everybody the same, and takes the best setting."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.common import write_rows
from benchmarks.results import equal_tasks, equal_terms, recolour
from benchmarks.results.equal_tasks import TASKS
from benchmarks.results.equal_terms import Run
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.tiny import load_tiny_sd3, world
from tests.helpers import make_sd3_pipeline

MEASURES = {"reward": -1.0, "judge": 0.5, "diversity": 0.1, "distance": 0.2}
# Network passes of an epoch's sample, by hand: sampling, then three for each example with a gradient.
PASSES = {
    ("prompts", "DDPO"): 10 + 3 * 3,  # 9 steps have noise, a third of them is trained
    ("prompts", "RWR"): 10 + 3 * 3,
    ("prompts", "AWM"): 10 + 3 * (3 + 1),  # the policy that sampled is asked too
    ("prompts", "DiffusionNFT"): 10 + 3 * (3 + 1),
    ("prompts", "DRaFT-K"): 10 + 2 * 3,
    ("prompts", "ReFL"): 10 + 3,
    ("edit", "DDPO"): 2 / 8 + 2 + 2 * 3 / 8,  # with guidance; a group shares the first step's prediction
    ("edit", "RWR"): 4 + 3,
    ("edit", "DiffusionNFT"): 4 + 4,
    ("edit", "DRaFT-K"): 4 + 2 * 3,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), PASSES)
def test_passes_are_those_counted_by_hand(name, method, monkeypatch):
    task = TASKS[name]
    samples = {"sample_batch_size": 8, "train_batch_size": 8}
    monkeypatch.setitem(TASKS, name, vary(task, settings={**task.settings, **samples}))
    value = task.methods[method].values[0]
    made = equal_terms.make_runner(Run(name, method, 1e-4, value, 0))
    with made as runner, equal_terms.counted_passes(runner.family.denoiser) as passes:
        runner.step(0)
    assert passes[0] / 8 == PASSES[name, method]


def vary(task, **changes):
    return equal_tasks.Task(**{**vars(task), **changes})


def test_every_method_gets_equally_many_trials_with_settings_that_exist():
    for task in TASKS.values():
        for method in task.methods.values():
            assert len(set(method.values)) == 2
            known = vars(DDPOConfig()) if method.setting.startswith("train_") else method.algorithm
            assert method.setting in known or equal_terms.make_algorithm(
                method.algorithm, **{method.setting: method.values[0]}
            )


def test_the_best_setting_is_chosen_and_not_one_that_broke(tmp_path, monkeypatch):
    rows = [
        {"task": "edit", "method": "RWR", "learning_rate": rate, "value": value, "seed": 100, **MEASURES}
        for rate, value in ((1e-3, 0.2), (2e-3, 0.2), (6e-3, 1.0))
    ]
    rows[0]["reward"], rows[1]["reward"], rows[2]["reward"] = -3.0, -2.0, math.nan
    write_rows(tmp_path / "search.csv", rows)
    monkeypatch.setattr(equal_terms, "SEARCH", tmp_path / "search.csv")
    equal_terms.chosen.cache_clear()
    assert equal_terms.chosen("edit", "RWR") == (2e-3, 0.2)
    equal_terms.chosen.cache_clear()
    write_rows(tmp_path / "search.csv", [{**rows[1], "method": "DRaFT-K", "value": 2}])
    assert isinstance(equal_terms.chosen("edit", "DRaFT-K")[1], int)
    equal_terms.chosen.cache_clear()


class PlainExam(equal_tasks.Exam):
    """One question; the images are given."""

    prompts, metadata = ["a"] * 6, [{}] * 6

    def __init__(self):
        self.reward = lambda images, prompts, metadata: (images.mean((1, 2, 3)), {})
        self.answers = torch.zeros(6, 3, 2, 2)

    def images(self):
        return self.answers

    def untrained(self):
        return {}

    def judged(self, images):
        return 0.5


def test_diversity_and_distance_are_those_worked_out_by_hand():
    exam = PlainExam()
    assert exam.marks() == {"reward": 0.0, "judge": 0.5, "diversity": 0.0, "distance": 0.0}
    exam.answers = torch.tensor([0.0, 1.0] * 3).view(6, 1, 1, 1).expand(6, 3, 2, 2)
    marks = exam.marks()
    assert marks["diversity"] == pytest.approx(math.sqrt(6 * 0.25 / 5))
    assert marks["distance"] == marks["reward"] == 0.5


@pytest.mark.slow
def test_an_exam_asks_the_same_every_time_and_other_splits_otherwise(monkeypatch):
    monkeypatch.setattr(equal_tasks, "NOISES", 2)
    pipeline = load_tiny_sd3()
    first, second = (equal_tasks.PromptExam(pipeline, "test") for _ in range(2))
    torch.testing.assert_close(first.images(), second.images())
    assert not torch.equal(first.noise, equal_tasks.PromptExam(pipeline, "validation").noise)
    assert len(set(first.prompts)) == 50
    assert len(first.prompts) == 50 * equal_tasks.NOISES


def test_edits_are_repeated_side_by_side():
    edits = world.draw_edits(3, "test", 0)
    again = equal_tasks.repeat(edits)
    assert again.prompts == [prompt for prompt in edits.prompts for _ in range(equal_tasks.NOISES)]
    assert torch.equal(again.pictures.images[:: equal_tasks.NOISES], edits.pictures.images)
    assert torch.equal(again.targets[1 :: equal_tasks.NOISES], edits.targets)


def test_the_edits_are_those_of_lesson_07():
    settings = TASKS["edit"].settings
    assert settings["sample_num_steps"] == recolour.SETTINGS["sample_num_steps"]
    assert settings["sample_guidance_scale"] == recolour.SETTINGS["sample_guidance_scale"]
    assert settings["train_lora_target_modules"] == recolour.SETTINGS["train_lora_target_modules"]


def test_all_layers_that_are_named_exist():
    names = [name for name, _ in make_sd3_pipeline().transformer.named_modules()]
    assert all(any(name.endswith(layer) for name in names) for layer in equal_tasks.OF_SD3)
