"""What the recolouring of digits is worth without RL, and that RL is compared with the best of it."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from benchmarks.common import read_rows
from benchmarks.results import edit, recolour
from ddpo_lessons.app.demo import Img2Img
from ddpo_lessons.tiny import load_judge, load_second_judge, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import judge_edits


def test_rl_is_compared_with_the_best_of_the_committed_grid():
    rows = read_rows(edit.GRID)
    assert len(rows) == len(edit.grid())
    assert edit.best_of_grid(rows) == recolour.UNTRAINED_BEST


def test_the_committed_runs_have_the_settings_that_stand_in_the_module():
    for run in json.loads(recolour.RESULT.read_text("utf-8"))["runs"]:
        assert run["run"]["settings"] == json.loads(json.dumps(recolour.SETTINGS))
        assert asdict(recolour.POLICY).items() <= run["run"].items()
        assert asdict(recolour.UNTRAINED_BEST).items() <= run["untrained_best"].items()
        assert [row["epoch"] for row in run["run"]["path"]] == list(range(0, 151, recolour.WATCH_EVERY))


@pytest.mark.slow
def test_a_run_tells_what_the_committed_ones_tell(monkeypatch):
    small = {"num_epochs": 2, "sample_batch_size": 8, "sample_num_batches_per_epoch": 1}
    monkeypatch.setattr(recolour, "SETTINGS", {**recolour.SETTINGS, **small, "train_batch_size": 8})
    monkeypatch.setattr(recolour, "TEST", (8, "test", 0))
    monkeypatch.setattr(recolour, "WATCHED", (8, "validation", 0))
    monkeypatch.setattr(recolour, "WATCH_EVERY", 1)
    row, images = recolour.train(1)
    (_, committed, _) = json.loads(recolour.RESULT.read_text("utf-8"))["runs"]
    assert row.keys() == committed.keys()
    assert committed["run"].keys() - row["run"].keys() == {"seconds"}  # once is enough
    assert [point["epoch"] for point in row["run"]["path"]] == [0, 1, 2]
    assert (row["seed"], row["run"]["samples"]) == (1, 16)
    assert not torch.equal(images["before"], images["after"])


def test_the_program_needs_no_model_and_gets_nearly_all_right():
    edits = world.draw_edits(100, "validation", 1)
    verdicts = judge_edits(edit.by_program(edits), edits, load_judge(), load_second_judge())
    assert verdicts["both"].float().mean() > 0.95
    assert verdicts["second_judge"].float().mean() > 0.95


def test_the_untrained_pipeline_is_that_of_diffusers_and_repeats_itself():
    edits, pipeline = world.draw_edits(3, "validation", 0), load_tiny_sd()
    low, again, high = (
        recolour.untrained(pipeline, edits, Img2Img(strength, 4.0, 5)) for strength in (0.4, 0.4, 0.8)
    )
    assert torch.equal(low, again)
    change = [(images - edits.pictures.images).square().mean() for images in (low, high)]
    assert change[0] < change[1]
