"""What a run keeps of how it was made, what a resume compares, and runs that start from LoRA weights."""

import functools
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    brightness,
    make_config,
    make_pipeline,
    make_trainer,
    red_three,
    run,
    weights_of,
)

from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.config import LORA_FILE, DDPOConfig
from ddpo_lessons.data.prompts import animals
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.rewards import colorfulness
from ddpo_lessons.rewards.combined import judged
from ddpo_lessons.trainer import DDPOTrainer, Trainer
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.record import changes, name_of, read_run
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def darkness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return -brightness(images, prompts, metadata)


# --------------------------------------------------------------------------------------------- names
class Scorer:
    def __call__(self, images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        return brightness(images, prompts, metadata)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (darkness, "test_record:darkness"),
        (functools.partial(darkness, metadata=()), "test_record:darkness"),
        (judged(darkness, brightness), "test_record:darkness"),  # a wrapper is what it wraps
        (Scorer(), "test_record:Scorer"),
        (judged(Scorer(), brightness), "test_record:Scorer"),
        (colorfulness(), "ddpo_lessons.rewards.pixels:colorfulness.<locals>.reward"),
        (animals(0), "ddpo_lessons.data.prompts:animals.<locals>.draw"),
        (itertools.cycle([1]).__next__, "builtins:cycle.__next__"),
        (lambda: None, None),
    ],
)
def test_functions_have_names_and_a_lambda_has_none(function, name):
    assert name_of(function) == name


def test_what_changed_is_told_where_both_runs_know_it():
    saved = {"seed": 0, "reward": "edit", "resume_from": ""}
    assert changes(saved, {"seed": 0, "resume_from": "auto", "prompts": "fox"}) == []
    assert changes(saved, {"seed": 1, "reward": "jpeg"}) == ["seed 0 → 1", "reward edit → jpeg"]


# --------------------------------------------------------------------------------------- config.json
def test_config_json_says_what_a_python_run_was_made_with(tmp_path):
    make_pipeline().save_pretrained(tmp_path / "model")
    pipeline = type(make_pipeline()).from_pretrained(tmp_path / "model")
    config = make_config(tmp_path / "run")
    run(tmp_path / "run", darkness, pipeline=pipeline, noise_strength=0.7)
    settings, record = read_run(tmp_path / "run")
    assert settings == config
    assert {name: record[name] for name in record if name != "version"} == {
        "model": str((tmp_path / "model").resolve()),
        "pipeline": "StableDiffusionPipeline",
        "algorithm": {"name": "DDPO"},
        "start": "images",
        "noise_strength": 0.7,
        "reward_function": "test_record:darkness",
        "prompt_function": "helpers:noisy_image",
    }
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert DDPOConfig.from_dict(written) == config
    del written["run"]  # as older versions wrote it
    assert DDPOConfig.from_dict(written) == config


def test_an_unknown_field_is_told_which_may_be_meant():
    with pytest.raises(TypeError, match=r"no field 'num_epoch' \(perhaps num_epochs\)"):
        DDPOConfig(num_epoch=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"no field 'learning_rate' \(perhaps train_learning_rate\)"):
        DDPOConfig.from_dict({"learning_rate": 1e-4})


# ------------------------------------------------------------------------------------------- resuming
def test_another_reward_or_prompt_function_is_told_in_one_line(tmp_path, capsys):
    run(tmp_path)
    run(tmp_path, darkness, animals(0), resume_from="latest", num_epochs=2)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("continuing"))
    assert "num_epochs 1 → 2; reward_function helpers:brightness → test_record:darkness; prompt_" in line
    assert line.endswith(
        "prompt_function helpers:red_three → ddpo_lessons.data.prompts:animals.<locals>.draw"
    )
    assert read_run(tmp_path)[1]["reward_function"] == "test_record:darkness"


def test_another_model_is_refused_and_one_that_was_moved_is_not(tmp_path):
    """Models go by the last part of their names."""
    for name in ("a/model", "b/model", "a/other"):
        make_pipeline().save_pretrained(tmp_path / name)

    def train(name: str, epochs: int, **changes: Any) -> None:
        pipeline = type(make_pipeline()).from_pretrained(tmp_path / name)
        run(tmp_path / "run", pipeline=pipeline, num_epochs=epochs, **changes)

    train("a/model", 1)
    train("b/model", 2, resume_from="latest")
    with pytest.raises(ValueError, match=r"another run \(model: 'model' there, 'other' here\)"):
        train("a/other", 3, resume_from="latest")
    with pytest.raises(ValueError, match=r"another run \(seed: 0 there, 1 here; model: 'model' there, None"):
        run(tmp_path / "run", resume_from="latest", seed=1)


def test_another_resolution_of_the_start_is_refused_in_either_direction(tmp_path):
    for name, sides in (("a", (None, 16)), ("b", (16, None))):
        for number, side in enumerate(sides):
            config = make_config(tmp_path / name, num_epochs=1 + number, resume_from="auto")
            parts = (config, brightness, red_three, make_pipeline())
            if number == 0:
                Trainer(*parts, algorithm=DDPO(), start=FromNoise(resolution=side)).train()
                continue
            with pytest.raises(ValueError, match=f"resolution: {sides[0]} there, {side} here"):
                Trainer(*parts, algorithm=DDPO(), start=FromNoise(resolution=side))


def test_a_resume_says_what_changed(tmp_path, capsys):
    run(tmp_path)
    capsys.readouterr()
    run(tmp_path, resume_from="latest", num_epochs=2, train_learning_rate=5e-4)
    line, numbers, _ = capsys.readouterr().out.splitlines()
    assert numbers.startswith("samples: 2 per epoch")
    assert line.startswith(f"continuing {tmp_path / 'checkpoint-000001'} with changes: ")
    assert line.endswith("num_epochs 1 → 2; train_learning_rate 0.001 → 0.0005")


def test_the_records_keep_what_a_resume_changed(tmp_path):
    run(tmp_path, num_epochs=2, save_freq=1)
    run(tmp_path, darkness, resume_from="latest", num_epochs=3, save_freq=2)
    earlier = str(tmp_path / "checkpoint-000002")
    for change, rate in (("0.001 → 0.0005", 5e-4), ("0.001 → 0.0002", 2e-4)):  # from the same checkpoint
        run(tmp_path, darkness, resume_from=earlier, num_epochs=3, save_freq=2, train_learning_rate=rate)
        reward = "reward_function helpers:brightness → test_record:darkness"
        expected = [{"kind": "changes", "epoch": 2, "changes": [f"train_learning_rate {change}", reward]}]
        assert read_metrics(tmp_path, "changes") == expected
    run(tmp_path, darkness, resume_from="latest", num_epochs=4, save_freq=2, train_learning_rate=2e-4)
    assert read_metrics(tmp_path, "changes") == expected
    assert [record["epoch"] for record in read_metrics(tmp_path, "epoch")] == [1, 2, 3, 4]


def test_a_constant_reward_is_told_once(tmp_path):
    with pytest.warns(UserWarning, match=r"epoch 1 teaches nothing: all 2 rewards are 0\.5") as caught:
        run(tmp_path, lambda i, p, m: torch.full((len(i),), 0.5), num_epochs=2)
    assert len([w for w in caught if "teaches nothing" in str(w.message)]) == 1


# --------------------------------------------------------------------------------- from LoRA weights
def test_a_new_run_starts_from_lora_weights_with_a_fresh_optimizer(tmp_path):
    layers = ("to_q", "conv1")
    first = run(tmp_path / "a", train_lora_rank=2, train_lora_alpha=6, train_lora_target_modules=layers)
    first.save_pretrained(tmp_path / "a" / "lora")
    start = str(tmp_path / "a" / "lora")
    config = make_config(tmp_path / "b", train_lora_from=start, train_learning_rate=5e-4)
    second = DDPOTrainer(config, darkness, red_three, make_pipeline())
    assert (second.config.train_lora_rank, second.config.train_lora_alpha) == (2, 6)
    assert set(second.config.train_lora_target_modules) == set(layers)
    assert config == make_config(tmp_path / "b", train_lora_from=start, train_learning_rate=5e-4)  # unchanged
    assert list(second.learner.trainable) == list(first.learner.trainable)
    torch.testing.assert_close(weights_of(second), weights_of(first), rtol=0, atol=0)
    assert second.learner.optimizer.state_dict()["state"] == {}
    assert second.epochs_done == 0
    second.train()
    assert not torch.equal(weights_of(second), weights_of(first))
    written, saved = read_run(tmp_path / "b")[0], checkpoint.read_state(tmp_path / "b" / "checkpoint-000001")
    assert written == second.config == DDPOConfig.from_dict(saved["config"])
    assert written.train_lora_from == str(Path(start).resolve())
    shutil.rmtree(start)  # a checkpoint needs it no more
    resumed = DDPOTrainer.from_checkpoint(
        tmp_path / "b" / "checkpoint-000001", darkness, red_three, make_pipeline()
    )
    assert torch.equal(weights_of(resumed), weights_of(second))


def test_lora_weights_that_do_not_fit_what_is_asked_for_are_refused(tmp_path):
    run(tmp_path / "a", train_lora_rank=2).save_pretrained(tmp_path / "lora")
    start = {"train_lora_from": str(tmp_path / "lora")}
    with pytest.raises(ValueError, match=r"train_lora_rank=8, but the adapter of .*lora has 2: leave it out"):
        run(tmp_path / "b", **start, train_lora_rank=8)
    with pytest.raises(ValueError, match="train_use_lora=False trains without one"):
        run(tmp_path / "b", **start, train_use_lora=False)
    with pytest.raises(ValueError, match=f"holds no {LORA_FILE}"):
        run(tmp_path / "b", train_lora_from=str(tmp_path))
    adapted = make_pipeline()
    adapted.load_lora_weights(tmp_path / "lora", weight_name=LORA_FILE)
    with pytest.raises(ValueError, match="the pipeline already has an adapter"):
        make_trainer(tmp_path / "b", pipeline=adapted, **start)
    assert not (tmp_path / "b").exists()
