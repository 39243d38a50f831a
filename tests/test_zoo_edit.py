"""The untrained pipeline on redrawing animals: what a row of the grid is."""

from __future__ import annotations

import pytest
import torch

from benchmarks.common import read_rows
from benchmarks.zoo import edit
from ddpo_lessons.app.demo import Img2Img
from ddpo_lessons.zoo import load_tiny_zoo, world

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_best_of_a_grid_is_the_first_of_equals():
    names = ("strength", "guidance", "steps", "eta", "all")
    rows = [
        ("0.5", "1.0", "8", "0.0", "0.1"),
        ("0.75", "3.0", "8", "1.0", "0.4"),
        ("1.0", "6.0", "16", "0.0", "0.4"),
    ]
    assert edit.best_of_grid([dict(zip(names, row, strict=True)) for row in rows]) == Img2Img(
        0.75, 3.0, 8, 1.0
    )


def test_the_committed_grid_holds_every_setting_once():
    rows = read_rows(edit.GRID)
    settings = {(row["strength"], row["guidance"], row["steps"], row["eta"]) for row in rows}
    assert len(rows) == len(settings) == 5 * 4 * 2 * 2
    for row in rows:
        assert float(row["all"]) <= min(float(row[name]) for name in ("animal", "sentence"))


def test_a_picture_has_its_own_noise_and_at_low_strength_hardly_changes():
    edits, pipeline = world.draw_edits(2, edit.VALIDATION), load_tiny_zoo()
    low, again, high = (
        edit.redraw(pipeline, edits, Img2Img(strength, 1.0, 8, 0.0)) for strength in (0.125, 0.125, 1.0)
    )
    assert torch.equal(low, again)
    changes = [(made - edits.pictures.images).abs().mean().item() for made in (low, high)]
    assert changes[0] < 0.05 < changes[1]
