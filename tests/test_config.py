import dataclasses
from pathlib import Path

import pytest

from ddpo_lessons.config import DDPOConfig

# TRL 0.21's DDPOConfig, name by name; what scripts rely on when they leave a field out.
TRL_DEFAULTS = {
    "run_name": "", "seed": 0, "log_with": None, "tracker_kwargs": {}, "accelerator_kwargs": {},
    "project_kwargs": {}, "logdir": "logs", "num_epochs": 100, "save_freq": 1,
    "num_checkpoint_limit": 5, "allow_tf32": True, "resume_from": "", "sample_num_steps": 50,
    "sample_eta": 1.0, "sample_guidance_scale": 5.0, "sample_batch_size": 1,
    "sample_num_batches_per_epoch": 2, "train_batch_size": 1, "train_use_8bit_adam": False,
    "train_learning_rate": 3e-4, "train_adam_beta1": 0.9, "train_adam_beta2": 0.999,
    "train_adam_weight_decay": 1e-4, "train_adam_epsilon": 1e-8,
    "train_gradient_accumulation_steps": 1, "train_max_grad_norm": 1.0,
    "train_num_inner_epochs": 1, "train_cfg": True, "train_adv_clip_max": 5.0,
    "train_clip_range": 1e-4, "train_timestep_fraction": 1.0, "per_prompt_stat_tracking": False,
    "per_prompt_stat_tracking_buffer_size": 16, "per_prompt_stat_tracking_min_count": 16,
    "negative_prompts": "",
}  # fmt: skip


def test_fields_and_defaults_are_those_of_trl():
    config = DDPOConfig()
    assert {name: getattr(config, name) for name in TRL_DEFAULTS} == TRL_DEFAULTS


def test_asynchronous_rewards_are_not_offered():
    with pytest.raises(TypeError, match="async_reward_computation"):
        DDPOConfig(async_reward_computation=True)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("num_epochs", 0, "at least 1"),
        ("save_freq", 0, "at least 1"),
        ("sample_num_steps", 50.0, "whole number"),
        ("sample_batch_size", True, "whole number"),
        ("train_batch_size", -1, "at least 1"),
        ("train_lora_rank", 0, "at least 1"),
        ("train_lora_rank", 2**70, r"less than 2\*\*31"),
        ("num_epochs", 2**31, r"less than 2\*\*31"),
        ("train_micro_batch_size", -1, "not be negative"),
        ("sample_guidance_scale", -0.5, "not be negative"),
        ("seed", -1, "not be negative"),
        ("sample_eta", -1.0, "positive"),
        ("train_learning_rate", 0, "positive"),
        ("train_learning_rate", "1e-3", "finite number"),
        ("train_clip_range", float("nan"), "finite number"),
        ("train_max_grad_norm", float("inf"), "finite number"),
        ("train_adam_beta1", 1.0, r"\[0, 1\)"),
        ("train_timestep_fraction", 0.0, r"\(0, 1\]"),
        ("train_timestep_fraction", 1.5, r"\(0, 1\]"),
        ("train_use_lora", 1, "True or False"),
        ("mixed_precision", "fp8", "one of"),
        ("log_with", "mlflow", "one of"),
        ("log_prob_reduction", "max", "one of"),
        ("train_lora_target_modules", "to_k", "tuple of names"),
        ("train_lora_target_modules", (), "is empty: name at least one layer"),
        ("train_lora_target_modules", float("inf"), "tuple of names"),
        ("train_lora_target_modules", 3, "tuple of names"),
        ("train_lora_target_modules", None, "tuple of names"),
        ("train_lora_target_modules", ("to_k", 1), "tuple of names"),
        ("tracker_kwargs", None, "dict"),
        ("negative_prompts", None, "text"),
        (
            "accelerator_kwargs",
            {"gradient_accumulation_steps": 2},
            "must not contain 'gradient_accumulation_steps': other settings",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(field, value, remedy):
    with pytest.raises(ValueError, match=rf"{field}.*{remedy}"):
        DDPOConfig(**{field: value})


PER_PROMPT = "per_prompt_stat_tracking"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sample_eta": 0.0}, r"sample_eta=0.*deterministic.*no density"),
        ({"train_cfg": False}, "train_cfg=False with sample_guidance_scale=5"),
        ({PER_PROMPT: True, "sample_group_size": 2}, "sample_group_size > 1 are two baselines"),
        (
            {PER_PROMPT: True, f"{PER_PROMPT}_buffer_size": 8, f"{PER_PROMPT}_min_count": 16},
            f"buffer_size=8 is below {PER_PROMPT}_min_count=16",
        ),
        (
            {PER_PROMPT: True, f"{PER_PROMPT}_buffer_size": 1, f"{PER_PROMPT}_min_count": 1},
            r"buffer_size=1 keeps one reward.*use 2 or more",
        ),
        # Sizes that do not divide, with the nearest that do, by the names of the config's fields.
        (
            {"sample_batch_size": 4, "train_batch_size": 3},
            r"^train_batch_size=3 does not divide the 8 .*is 2 or 4",
        ),
        ({"train_batch_size": 3}, r"\(sample_batch_size \* sample_num_batches_per_epoch\)"),
        (
            {"sample_batch_size": 4, "train_batch_size": 2, "train_gradient_accumulation_steps": 3},
            r"^train_gradient_accumulation_steps=3 does not .* 2 or 4",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        DDPOConfig(**settings)


def test_settings_that_are_not_used_are_harmless():
    assert DDPOConfig(train_cfg=False, sample_guidance_scale=1.0).train_cfg is False
    assert DDPOConfig(per_prompt_stat_tracking_buffer_size=8).per_prompt_stat_tracking is False


def test_every_field_survives_json():
    config = DDPOConfig(train_lora_target_modules=["to_q"], tracker_kwargs={"wandb": {"tags": ["a"]}}, seed=7)
    again = DDPOConfig.from_dict(config.to_dict())
    assert again == config
    assert again.train_lora_target_modules == ("to_q",)
    assert set(config.to_dict()) == {field.name for field in dataclasses.fields(config)}


def test_objects_in_kwargs_do_not_keep_a_config_from_being_written():
    config = DDPOConfig(accelerator_kwargs={"kwargs_handlers": [Path("x")]}, output_dir=Path("run"))
    assert config.to_dict()["accelerator_kwargs"] == {"kwargs_handlers": ["x"]}
    assert config.to_dict()["output_dir"] == "run"


@pytest.mark.parametrize(
    ("settings", "folder"),
    [
        ({}, "logs/ddpo"),
        ({"run_name": "red"}, "logs/red"),
        ({"logdir": "out", "exp_name": "blue"}, "out/blue"),
        ({"project_kwargs": {"project_dir": "save"}}, "save"),
        ({"project_kwargs": {"project_dir": "save"}, "output_dir": "here"}, "here"),
    ],
)
def test_the_folder_of_a_run(settings, folder):
    assert DDPOConfig(**settings).run_dir == Path(folder)
