"""The learning rate's curve: diffusers' own scheduler, stepped, and no state to resume."""

import pytest
import torch
from diffusers.optimization import get_scheduler
from helpers import brightness, make_config, make_pipeline, make_trainer, red_three

from ddpo_lessons import compat
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.trainer import DDPOTrainer
from ddpo_lessons.training.learner import learning_rate
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("name", "warmup", "theirs"),
    [
        ("constant", 0, "constant"),
        ("constant", 3, "constant_with_warmup"),
        ("linear", 0, "linear"),
        ("linear", 3, "linear"),
        ("cosine", 2, "cosine"),
    ],
)
def test_rates_are_those_of_a_scheduler_that_is_stepped(name, warmup, theirs):
    config = DDPOConfig(
        train_learning_rate=0.3, train_learning_rate_schedule=name, train_learning_rate_warmup_steps=warmup
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    scheduler = get_scheduler(theirs, optimizer, num_warmup_steps=warmup, num_training_steps=8)
    for step in range(8):
        assert learning_rate(config, step, 8) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()


def test_by_hand():
    config = DDPOConfig(
        train_learning_rate=1.0, train_learning_rate_schedule="linear", train_learning_rate_warmup_steps=2
    )
    rates = [learning_rate(config, step, 6) for step in range(6)]
    assert rates == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25])


def test_a_resumed_run_is_on_the_curve(tmp_path):
    """Stopped in the middle, as a kill does it: `num_epochs` is that of the whole run."""

    def train(folder: str, **changes: object) -> DDPOTrainer:
        return make_trainer(tmp_path / folder, num_epochs=4, train_learning_rate_schedule="cosine", **changes)

    whole, first = train("whole"), train("parts")
    whole.train()
    for epoch in range(2):
        first.step(epoch)
    first.save()
    train("parts", resume_from="latest").train()
    found, expected = (
        [(r["lr"], r["grad_norm"]) for r in read_metrics(tmp_path / name, "step")]
        for name in ("parts", "whole")
    )
    assert found == expected
    assert [lr for lr, _ in found] == pytest.approx([1e-3, 8.5355e-4, 5e-4, 1.4645e-4], rel=1e-4)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_steps_beyond_the_plan_stay_at_the_end(name):
    """As of an algorithm that takes more steps than its epoch was planned for: a cosine would rise again."""
    config = DDPOConfig(train_learning_rate_schedule=name)
    assert [learning_rate(config, step, 4) for step in (4, 5, 8)] == pytest.approx([0, 0, 0], abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("linear", [1e-3, 7.5e-4, 5e-4, 2.5e-4]), ("cosine", [1e-3, 8.5355e-4, 5e-4, 1.4645e-4])],
)
def test_the_curve_is_that_of_the_epochs_that_are_asked_for_last(tmp_path, kind, expected):
    """TRL's `train(epochs)`, and `num_epochs` of a trainer that is there: of 2 epochs, or of 8, become 4."""
    for first in (2, 8):
        config = make_config(tmp_path / f"{first}", num_epochs=first, train_learning_rate_schedule=kind)
        trainer = compat.DDPOTrainer(config, brightness, red_three, make_pipeline())
        trainer.train(epochs=4)
        found = [record["lr"] for record in read_metrics(config.run_dir, "step")]
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_schedule_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="train_learning_rate_schedule='step' must be one of"):
        DDPOConfig(train_learning_rate_schedule="step")
