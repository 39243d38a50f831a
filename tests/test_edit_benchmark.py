"""Digits in other colors: the best sampling settings, and an adapter that is on at some steps only."""

from typing import Any

import torch
from peft import LoraConfig

from benchmarks.common import read_rows
from benchmarks.results import edit, recolor
from benchmarks.results.recolor_steps import edit_partly
from ddpo_lessons.lessons.demo import Img2Img
from ddpo_lessons.worlds import digits, load_tiny_sd


def test_rl_is_compared_with_the_best_of_the_committed_grid():
    rows = read_rows(edit.GRID)
    assert len(rows) == len(edit.grid())
    assert edit.best_of_grid(rows, "both") == recolor.UNTRAINED_BEST


def test_the_adapter_is_on_at_the_calls_that_are_named_and_calls_can_be_left_out():
    edits = digits.draw_edits(2, "validation", 0)

    def edited(pipeline: Any, trained: tuple[int, ...], calls: int = 2) -> torch.Tensor:
        return edit_partly(pipeline, edits.inputs.images, edits.prompts, recolor.POLICY, trained, calls)

    trained, untrained = load_tiny_sd(), load_tiny_sd()
    trained.unet.add_adapter(LoraConfig(r=2, target_modules=["conv_out"], init_lora_weights=False))
    untrained.unet.add_adapter(LoraConfig(r=2, target_modules=["conv_out"]))  # which changes nothing yet
    made = {on: edited(trained, on) for on in ((), (0,), (1,), (0, 1))}
    torch.testing.assert_close(made[()], edited(untrained, (0, 1)))
    assert len({round(images.sum().item(), 3) for images in made.values()}) == 4
    first = edited(trained, (0,), calls=1)
    assert torch.equal(first, edited(trained, (0, 1), calls=1))
    assert not torch.equal(first, made[(0,)])


def test_the_untrained_pipeline_is_that_of_diffusers_and_repeats_itself():
    edits, pipeline = digits.draw_edits(3, "validation", 0), load_tiny_sd()
    low, again, high = (
        recolor.untrained(pipeline, edits, Img2Img(strength, 4.0, 5)) for strength in (0.4, 0.4, 0.8)
    )
    assert torch.equal(low, again)
    change = [(images - edits.inputs.images).square().mean() for images in (low, high)]
    assert change[0] < change[1]
