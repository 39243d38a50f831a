"""What a run keeps of how it was made, what a resume compares, and runs that start from LoRA weights."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import brightness, make_config, make_pipeline, noisy_image, red_three, weights_of

from ddpo_lessons.config import LORA_FILE, DDPOConfig
from ddpo_lessons.data.prompts import animals
from ddpo_lessons.rewards import colourfulness
from ddpo_lessons.rewards.combined import judged
from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.record import changed_sources, name_of, read_run
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


def darkness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return -brightness(images, prompts, metadata)


def run(folder: Path, reward: Any = brightness, **changes: Any) -> DDPOTrainer:
    trainer = DDPOTrainer(make_config(folder, **changes), reward, red_three, make_pipeline())
    trainer.train()
    return trainer


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
        (colourfulness(), "ddpo_lessons.rewards.pixels:colourfulness.<locals>.reward"),
        (animals(0), "ddpo_lessons.data.prompts:animals.<locals>.draw"),
        (lambda: None, None),
    ],
)
def test_functions_have_names_and_a_lambda_has_none(function, name):
    assert name_of(function) == name


def test_sources_are_compared_where_both_runs_know_them():
    pics = {"folder": "/a", "files": 2, "digest": "12"}
    saved = {"reward": "edit", "reward_function": "m:f.<locals>.g", "images": pics}
    for mine in (
        {},
        {"reward_function": "another.module:f.<locals>.g"},
        {"reward": "edit", "reward_function": "m:h"},  # the name tells more than the function
        {"images": {**pics, "folder": "/moved/to/b"}},
    ):
        assert changed_sources(saved, mine) == {}
    assert changed_sources(saved, {"reward": "jpeg"}) == {"reward": "reward: edit there, jpeg here"}
    assert changed_sources(saved, {"reward_function": "m:h"}) == {
        "reward": "reward: m:f.<locals>.g there, m:h here"
    }
    more = changed_sources(saved, {"images": {"folder": "/a", "files": 3, "digest": "34"}})
    assert more["images"].endswith("folder '/a', files 3, digest '34' here")


# --------------------------------------------------------------------------------------- config.json
def test_config_json_says_what_a_python_run_was_made_with(tmp_path):
    make_pipeline().save_pretrained(tmp_path / "model")
    pipeline = type(make_pipeline()).from_pretrained(tmp_path / "model")
    config = make_config(tmp_path / "run")
    ImageDDPOTrainer(config, darkness, noisy_image, pipeline, noise_strength=0.7).train()
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
    with pytest.raises(ValueError, match=r"\['learning_rate'\] \(perhaps train_learning_rate\)"):
        DDPOConfig.from_dict({"learning_rate": 1e-4})


# ------------------------------------------------------------------------------------------- resuming
def test_another_reward_is_refused_unless_it_is_meant(tmp_path):
    run(tmp_path)
    both = "reward: helpers:brightness there, test_record:darkness here"
    with pytest.raises(ValueError, match=both) as caught:
        run(tmp_path, darkness, resume_from="latest", num_epochs=2)
    assert "resume_anyway=True" in str(caught.value)
    nameless = run(tmp_path, lambda i, p, m: -brightness(i, p, m), resume_from="latest", num_epochs=2)
    assert nameless.epochs_done == 2
    meant = run(tmp_path, darkness, resume_from="latest", num_epochs=3, resume_anyway=True)
    assert meant.epochs_done == 3
    assert read_run(tmp_path)[1]["reward_function"] == "test_record:darkness"
    with pytest.raises(ValueError, match="darkness there, helpers:brightness here"):
        run(tmp_path, resume_from="latest", num_epochs=4)


def test_everything_that_differs_is_one_error(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match=r"seed: 0 there, 1 here; reward: .* here\).*train_lora_from"):
        run(tmp_path, darkness, resume_from="latest", seed=1)


def test_a_checkpoint_of_an_older_version_is_continued(tmp_path):
    """It knows no names."""
    run(tmp_path)
    folder = tmp_path / "checkpoint-000001"
    tensors, state = checkpoint.read(folder)
    del state["run"]
    checkpoint.write(tmp_path, 1, tensors, state)
    assert run(tmp_path, darkness, resume_from="latest", num_epochs=2).epochs_done == 2


def test_a_resume_says_what_changed_and_what_there_is_to_do(tmp_path, capsys):
    run(tmp_path)
    capsys.readouterr()
    run(tmp_path, resume_from="latest", num_epochs=1)
    assert capsys.readouterr().out == "nothing to do: the run has 1 epochs, and 1 are asked for\n"
    run(tmp_path, resume_from="latest", num_epochs=2, train_learning_rate=5e-4)
    line, numbers = capsys.readouterr().out.splitlines()
    assert numbers.startswith("samples: 2 per epoch")
    assert line.startswith(f"continuing {tmp_path / 'checkpoint-000001'} with changes: ")
    assert line.endswith("num_epochs 1 → 2; train_learning_rate 0.001 → 0.0005")


def test_a_constant_reward_is_told_once(tmp_path):
    with pytest.warns(UserWarning, match=r"epoch 1 teaches nothing: all 2 rewards are 0\.5") as caught:
        run(tmp_path, lambda i, p, m: torch.full((len(i),), 0.5), num_epochs=2)
    assert len([w for w in caught if "teaches nothing" in str(w.message)]) == 1


# --------------------------------------------------------------------------------- from LoRA weights
def weights(trainer: DDPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.learner.trainable.values()])


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
    with pytest.raises(ValueError, match="train_use_lora=False trains none"):
        run(tmp_path / "b", **start, train_use_lora=False)
    with pytest.raises(ValueError, match=f"holds no {LORA_FILE}"):
        run(tmp_path / "b", train_lora_from=str(tmp_path))
    adapted = make_pipeline()
    adapted.load_lora_weights(tmp_path / "lora", weight_name=LORA_FILE)
    with pytest.raises(ValueError, match="the pipeline already has an adapter"):
        DDPOTrainer(make_config(tmp_path / "b", **start), brightness, red_three, adapted)
    assert not (tmp_path / "b").exists()
