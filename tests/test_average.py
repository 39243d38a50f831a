"""The average of the weights (`train_ema_decay`): what it is, who uses it, and that a run goes on with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import brightness, check_resume, make_config, make_pipeline, red_three
from safetensors.torch import load_file

from ddpo_lessons.config import LORA_FILE
from ddpo_lessons.trainer import DDPOTrainer
from ddpo_lessons.validation import Validation

DECAY = 0.75
pytestmark = pytest.mark.usefixtures("one_thread")


def make_trainer(folder: Path, decay: float = DECAY, **changes: Any) -> DDPOTrainer:
    fields = {"train_ema_decay": decay, "num_epochs": 2, "save_freq": 1, "train_learning_rate": 0.1}
    return DDPOTrainer(make_config(folder, **{**fields, **changes}), brightness, red_three, make_pipeline())


def flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].detach().flatten().clone() for name in sorted(weights)])


def test_it_is_the_decayed_mean_of_the_weights_after_each_step(tmp_path):
    trainer = make_trainer(tmp_path)
    learner, expected = trainer.learner, flat(trainer.learner.trainable)
    step = learner.optimizer.step

    def stepped(*arguments: Any) -> None:
        nonlocal expected
        step(*arguments)
        expected = DECAY * expected + (1 - DECAY) * flat(learner.trainable)

    learner.optimizer.step = stepped
    trainer.train()
    assert trainer.global_step >= 2
    assert (flat(learner.trainable) - expected).abs().max() > 0.01
    torch.testing.assert_close(flat(learner.average), expected, rtol=0, atol=1e-6)


def test_it_is_saved_and_validated_and_the_newest_weights_stay(tmp_path):
    trainer, seen = make_trainer(tmp_path), []
    trainer.train()
    newest = flat(trainer.learner.trainable)
    trainer.save_pretrained(tmp_path / "lora")
    saved = load_file(tmp_path / "lora" / LORA_FILE)
    total = sum(tensor.double().sum() for tensor in saved.values())
    torch.testing.assert_close(total, flat(trainer.learner.average).double().sum())
    validation = Validation(trainer, [("a red three", {})], 1)
    trainer.family.denoiser.register_forward_pre_hook(lambda *_: seen.append(flat(trainer.learner.trainable)))
    validation.measure()
    assert all(torch.equal(weights, flat(trainer.learner.average)) for weights in seen)
    assert torch.equal(flat(trainer.learner.trainable), newest)


def test_a_resumed_run_has_the_average_of_the_run_that_never_stopped(tmp_path):
    check_resume(make_trainer, tmp_path)


def test_without_a_decay_nothing_is_kept_and_the_same_is_learned(tmp_path):
    plain, averaged = make_trainer(tmp_path / "plain", decay=0.0), make_trainer(tmp_path / "averaged")
    plain.train()
    averaged.train()
    assert plain.learner.average == {}
    assert torch.equal(flat(plain.learner.trainable), flat(averaged.learner.trainable))


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_a_decay_that_keeps_nothing_new_is_refused(tmp_path, decay):
    with pytest.raises(ValueError, match=r"train_ema_decay=.* must lie in \[0, 1\)"):
        make_trainer(tmp_path, decay)
