"""What the demo's task is worth without RL, and that the demo compares with the best of it."""

from __future__ import annotations

import torch

from benchmarks.common import read_rows
from benchmarks.results import edit
from ddpo_lessons.app import demo
from ddpo_lessons.tiny import load_judge, load_second_judge, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import judge_edits


def test_the_demo_compares_with_the_best_of_the_committed_grid() -> None:
    rows = read_rows(edit.GRID)
    assert len(rows) == len(edit.grid())
    assert edit.best_of_grid(rows) == demo.UNTRAINED_BEST


def test_the_program_needs_no_model_and_gets_nearly_all_right() -> None:
    edits = world.draw_edits(100, "validation", 1)
    verdicts = judge_edits(edit.by_program(edits), edits, load_judge(), load_second_judge())
    assert verdicts["both"].float().mean() > 0.95
    assert verdicts["second_judge"].float().mean() > 0.95


def test_the_untrained_pipeline_is_that_of_diffusers_and_repeats_itself() -> None:
    edits, pipeline = world.draw_edits(3, "validation", 0), load_tiny_sd()
    low, again, high = (
        demo.untrained(pipeline, edits, demo.Img2Img(strength, 4.0, 5)) for strength in (0.4, 0.4, 0.8)
    )
    assert torch.equal(low, again)
    change = [(images - edits.pictures.images).square().mean() for images in (low, high)]
    assert change[0] < change[1]
