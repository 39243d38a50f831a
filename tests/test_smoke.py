"""A smoke run says what a whole run will take, and `cost` what it took."""

import dataclasses
import json
from pathlib import Path

import pytest
from fake_device import fake_device
from helpers import brightness, make_config, make_pipeline, red_three

from ddpo_lessons import cost, smoke_run
from ddpo_lessons.algorithms.rwr import RWR
from ddpo_lessons.trainer import DDPOTrainer, Trainer
from ddpo_lessons.training.costs import SmokeRun
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

# 16 images in 36 s, a hundred times: 3600 s, which cost 0.50.
MADE = SmokeRun(
    images=16, seconds_sampling=20.0, seconds_reward=1.0, seconds_training=15.0, peak_bytes=9_870_000_000,
    is_gpu=True, first_ratio_error=2e-8, sampling_error=1.5e-3, clip_range=1e-4, num_epochs=100,
    price_per_hour=0.5,
)  # fmt: skip


def test_sentences_by_hand():
    assert repr(MADE).splitlines() == [
        "An epoch of 16 images takes 36 s: 2.25 s per image.",
        "Sampling takes 20 s, rewards 1 s, training 15 s.",
        "The peak is 9.87 GB of GPU memory.",
        "The first ratio is off by 2.0e-08; the clip range is 0.0001.",
        "Ratios of sampling and training are off by 1.5e-03.",
        "All 100 epochs take 1:00:00, 0.50 at 0.5 per hour, validation and checkpoints left out.",
    ]
    plain = dataclasses.replace(MADE, sampling_error=None, first_ratio_error=None, price_per_hour=0.0)
    assert repr(plain).splitlines()[3:] == [
        "All 100 epochs take 1:00:00, validation and checkpoints left out."
    ]
    precise = dataclasses.replace(MADE, seconds_sampling=0.00123, seconds_reward=0.00123)
    assert repr(precise).splitlines()[:2] == [
        "An epoch of 16 images takes 15 s: 0.938 s per image.",
        "Sampling takes 0.00123 s, rewards 0.00123 s, training 15 s.",
    ]
    longest = dataclasses.replace(precise, images=1_600_000, seconds_training=0.00123)
    assert max(map(len, repr(longest).splitlines())) <= 88


def test_a_smoke_run_measures_an_epoch(tmp_path):
    config = make_config(tmp_path, num_epochs=7, price_per_hour=2.0)
    seconds, found = [], smoke_run(DDPOTrainer(config, brightness, red_three, make_pipeline()))
    assert (found.images, found.num_epochs, found.price_per_hour, found.is_gpu) == (2, 7, 2.0, False)
    seconds = [found.seconds_sampling, found.seconds_reward, found.seconds_training]
    assert min(seconds) > 0
    assert found.seconds == pytest.approx(sum(seconds))
    assert found.first_ratio_error is not None
    assert found.first_ratio_error < 1e-5
    assert found.sampling_error is None  # in float32 nothing is computed again
    assert 1e8 < found.peak_bytes < 1e11
    assert not any(tmp_path.iterdir())


def test_low_precision_tells_the_error_of_sampling_and_others_have_no_ratio(tmp_path):
    low = make_config(tmp_path / "low", mixed_precision="bf16")
    assert smoke_run(DDPOTrainer(low, brightness, red_three, make_pipeline())).sampling_error is not None
    config = make_config(tmp_path / "rwr", train_clip_range=1e-4)
    found = smoke_run(Trainer(config, brightness, red_three, make_pipeline(), algorithm=RWR()))
    assert found.first_ratio_error is None


def test_a_smoke_run_on_a_gpu(tmp_path):
    with fake_device():
        config = make_config(tmp_path, mixed_precision="fp16")
        found = smoke_run(DDPOTrainer(config, brightness, red_three, make_pipeline()))
    assert found.seconds > 0


def write_run(folder: Path) -> None:
    """Write two epochs of 16 images, 1.5 hours in all at 0.5 per hour."""
    parts = {"seconds_sampling": 1000.0, "seconds_reward": 100.0, "seconds_training": 1500.0}
    with (folder / "metrics.jsonl").open("w") as file:
        for epoch in (1, 2):
            seen = {"epoch": epoch, "samples_seen": 16 * epoch, "reward_mean": 0.0}
            file.write(json.dumps({"kind": "epoch", **seen, **parts, "seconds_other": 100.0}) + "\n")
    (folder / "config.json").write_text(json.dumps(make_config(folder, price_per_hour=0.5).to_dict()))


def test_cost_by_hand(tmp_path):
    write_run(tmp_path)
    found = cost(tmp_path)
    assert (found.epochs, found.images, found.seconds) == (2, 32, 5400)
    assert repr(found) == "2 epochs with 32 images took 1:30:00, 0.75 at 0.5 per hour: 169 s per image"
    predicted = dataclasses.replace(MADE, seconds_sampling=2234.0)  # 2250 s per epoch
    assert repr(cost(tmp_path, predicted)).splitlines()[1] == (
        "predicted were 1:15:00, 0.62 at 0.5 per hour: the run took 1.20 times as long"
    )


def test_cost_of_a_trainer_and_of_no_run(tmp_path):
    trainer = DDPOTrainer(make_config(tmp_path, num_epochs=2), brightness, red_three, make_pipeline())
    with pytest.raises(ValueError, match="no record of an epoch"):
        cost(trainer)
    trainer.train()
    records = read_metrics(tmp_path, "epoch")
    names = {name for name in records[0] if name.startswith("seconds_")}
    assert names == {"seconds_sampling", "seconds_reward", "seconds_training", "seconds_other"}
    assert cost(trainer).seconds == pytest.approx(sum(record[name] for record in records for name in names))
    assert records[1]["seconds_other"] > records[0]["seconds_other"] > 0  # a checkpoint lies between
