"""Which reading counts as the result."""

import pytest
import torch
from peft import LoraConfig

from benchmarks.speed.time_to_result import first_reached, load_adapter
from ddpo_lessons.worlds import load_tiny_sd


def run_of(*readings):
    """A run's rows as the CSV gives them: a reading every 10 seconds."""
    return [{"seconds": str(10 * n), "both": str(right)} for n, right in enumerate(readings)]


def test_first_reading_of_15_points_more_counts_though_a_later_one_is_worse():
    assert first_reached(run_of(0.42, 0.5, 0.57, 0.45, 0.8))["seconds"] == "20"


def test_15_points_are_enough_in_the_floats_of_a_share_of_200():
    before, after = torch.tensor([85 / 200, 115 / 200]).tolist()
    assert after < before + 0.15  # by 1e-8
    assert first_reached([{"both": before}, {"both": after}]) == {"both": after}


def test_29_of_200_pictures_are_not_enough():
    assert first_reached(run_of(0.42, 0.565, 0.565)) is None


def test_adapter_of_other_layers_is_refused():
    unet = load_tiny_sd().unet
    unet.add_adapter(LoraConfig(r=4, target_modules=["to_q"]))
    weights = {name: torch.ones_like(p) for name, p in unet.named_parameters() if "lora_" in name}
    load_adapter(unet, weights)
    assert all((p == 1).all() for name, p in unet.named_parameters() if name in weights)
    weights.popitem()
    with pytest.raises(RuntimeError, match="other weights"):
        load_adapter(unet, weights)
