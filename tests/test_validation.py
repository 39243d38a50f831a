"""Validation: the same noise each time, a record and a grid, and nothing of the training changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PROMPTS, brightness, make_config, make_pipeline, noisy_image, records_of, red_three
from PIL import Image

from ddpo_lessons import Validation
from ddpo_lessons.algorithms.awm import AWM
from ddpo_lessons.rollout import SamplingSettings, sample_seed, text2img_rollout
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer, Trainer
from ddpo_lessons.training.sampler import NO_EPOCH
from ddpo_lessons.worlds import load_tiny_sd3

pytestmark = pytest.mark.usefixtures("one_thread")

HELD_OUT = [(prompt, {}) for prompt in PROMPTS[:3]]


def make_trainer(folder: Path, every: int | None, **changes: Any) -> DDPOTrainer:
    trainer = DDPOTrainer(make_config(folder, **changes), brightness, red_three, make_pipeline())
    if every is not None:
        trainer.image_samples_hook = Validation(trainer, HELD_OUT, every)
    return trainer


def test_training_is_the_same_with_and_without(tmp_path):
    for name, every in (("without", None), ("with", 2)):
        make_trainer(tmp_path / name, every, num_epochs=3).train()
    found = records_of(tmp_path / "with")
    assert [r for r in found if r["kind"] != "validation"] == records_of(tmp_path / "without")
    validated = [record for record in found if record["kind"] == "validation"]
    assert [(record["epoch"], record["step"]) for record in validated] == [(0, 0), (2, 2), (3, 3)]
    names = {path.name for path in (tmp_path / "with" / "images").iterdir()}
    assert names == {f"validation-00000{n}.{kind}" for n in (0, 2, 3) for kind in ("json", "png")}


def test_a_resumed_run_validates_as_the_one_that_never_stopped(tmp_path):
    make_trainer(tmp_path / "whole", 2, num_epochs=4).train()
    make_trainer(tmp_path / "parts", 2, num_epochs=2).train()
    make_trainer(tmp_path / "parts", 2, num_epochs=4, resume_from="latest").train()
    assert records_of(tmp_path / "whole") == records_of(tmp_path / "parts")


def test_the_noise_is_the_same_each_time_and_what_differs_was_learned(tmp_path):
    trainer = make_trainer(tmp_path, None, train_learning_rate=0.05)
    validation = Validation(trainer, HELD_OUT)
    before, rewards = validation.measure()
    again, _ = validation.measure()
    assert torch.equal(before, again)
    torch.testing.assert_close(rewards, before.mean(dim=(1, 2, 3)))
    trainer.train()
    assert not torch.equal(before, validation.measure()[0])


def test_images_stand_beside_their_results(tmp_path):
    trainer = ImageDDPOTrainer(
        make_config(tmp_path, num_epochs=1), brightness, noisy_image, make_pipeline(), noise_strength=0.7
    )
    red = torch.zeros(3, 32, 32)
    red[0] = 1
    calls: list[int] = []
    trainer.image_samples_hook = Validation(
        trainer, [("", red, {})], every=5, hook=lambda batches, step, tracker: calls.append(step)
    )
    trainer.train()
    assert calls == [1]
    grid = Image.open(tmp_path / "images" / "validation-000000.png")
    assert grid.size == (2 * 96, 96)  # no column is empty
    assert grid.getpixel((48, 48)) == (255, 0, 0)
    assert grid.getpixel((96 + 48, 48)) != (255, 0, 0)


@pytest.mark.parametrize(("samples", "every"), [([], 1), (HELD_OUT, 0)])
def test_nothing_to_validate_is_refused(samples, every, tmp_path):
    trainer = make_trainer(tmp_path, None)
    with pytest.raises(ValueError, match="give one or more of both"):
        Validation(trainer, samples, every)


def test_a_flow_model_is_validated_by_the_steps_that_training_samples_by(tmp_path):
    """The ODE of AWM."""
    changes = {"train_clip_range": 1e-4, "sample_guidance_scale": 1.0}
    trainer = Trainer(
        make_config(tmp_path, **changes), brightness, red_three, load_tiny_sd3(), algorithm=AWM()
    )
    images, _ = Validation(trainer, HELD_OUT, 1).measure()
    generators = [
        torch.Generator().manual_seed(sample_seed(0, NO_EPOCH, row)) for row in range(len(HELD_OUT))
    ]
    expected, _ = text2img_rollout(
        load_tiny_sd3(),
        [prompt for prompt, _ in HELD_OUT],
        SamplingSettings(num_inference_steps=3, guidance_scale=1.0, eta=0.0),
        generator=generators,
    )
    assert torch.allclose(images, expected, atol=1e-5)
