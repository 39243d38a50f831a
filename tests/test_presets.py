"""Presets: what they name exists, and processes share an experiment."""

from pathlib import Path

import pytest
import torch

from benchmarks.speed.paper_run import GB, estimate, published
from ddpo_lessons import named_prompts, rewards
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.cli import reward_flag
from ddpo_lessons.cli.presets import PRESETS, divide
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.damages import DAMAGES
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.models.policy import prepare_policy
from ddpo_lessons.models.stable_diffusion import make_schedule

SIZES = (
    "sample_batch_size",
    "sample_num_batches_per_epoch",
    "train_batch_size",
    "train_gradient_accumulation_steps",
)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_what_exists(name):
    preset = PRESETS[name]
    assert {term.name for term in reward_flag.parse(preset.reward)} <= set(rewards.REWARDS)
    assert set(preset.damages) <= set(DAMAGES)
    if preset.noise_strength is None:
        assert preset.prompts in named_prompts.PROMPTS
        assert not preset.damages
    else:
        assert preset.prompts == ""
    DDPOConfig(**preset.config)


@pytest.mark.parametrize(
    ("name", "processes", "samples", "steps"),
    [
        ("compressibility", 8, 256, 4),
        ("incompressibility", 8, 256, 4),
        ("aesthetic", 8, 256, 2),
        ("alignment", 6, 288, 2),
        ("camouflage", 1, 256, 1),
        ("corruption", 1, 256, 1),
        ("edit", 1, 256, 2),  # as the paper's
        ("restore", 1, 16, 1),
        ("sd35", 1, 256, 2),
        ("flux", 1, 1152, 2),
    ],
)
def test_presets_make_the_epochs_of_the_peers(name, processes, samples, steps):
    # ddpo-pytorch's config/dgx.py works them out in comments; gaussian-glasses: 256 a gradient update
    plan = DDPOConfig(**PRESETS[name].config).epoch_plan(50, processes)
    assert (plan.total_samples, plan.optimizer_steps) == (samples, steps)


@pytest.mark.parametrize(
    ("name", "steps", "guided"),
    [("camouflage", 20, False), ("corruption", 10, False), ("edit", 25, True), ("restore", 8, False)],
)
def test_img2img_presets_run_part_of_the_schedule(name, steps, guided):
    from diffusers import DDIMScheduler

    preset = PRESETS[name]
    config = DDPOConfig(**preset.config)
    assert (config.sample_guidance_scale > 1) == guided
    timesteps = make_schedule(DDIMScheduler(), config.sample_num_steps, preset.noise_strength or 0)
    assert len(timesteps) == steps


def test_the_edit_preset_trains_attention_in_groups():
    config = DDPOConfig(**PRESETS["edit"].config)
    assert (config.sample_group_size, config.epoch_plan(1).total_samples % config.sample_group_size) == (4, 0)
    assert config.train_lora_target_modules == DDPOConfig().train_lora_target_modules


@pytest.mark.parametrize("name", ["camouflage", "corruption"])
def test_gaussian_glasses_penalizes_the_distance_and_varies_its_images(name):
    """rl/reward.py: the change of the logit less 0.3 * 6 LPIPS; data/COD_dataset.py: flips and jitter."""
    change, penalty = reward_flag.parse(PRESETS[name].reward)
    assert (change.name, change.weight) == ("clip_change", 1)
    assert (penalty.name, penalty.weight) == ("distance_penalty", pytest.approx(0.3 * 6))
    assert PRESETS[name].augmented


@pytest.mark.slow
def test_restore_fits_a_t4_for_one_to_three_hours():
    """Of 16 GB, and 65 TFLOP/s of which 0.12 to 0.3 are used; the comment in presets.py has these numbers."""
    preset = PRESETS["restore"]
    config, start = DDPOConfig(**preset.config), FromImages(preset.noise_strength)
    found = estimate(published("sd15"), config, preset.algorithm, start, 4 * (427_616_513 + 11_176_512))
    assert found.peak / GB == pytest.approx(9.4, abs=0.1)
    epoch = found.sampling_flops + found.training_flops
    assert epoch / 1e12 == pytest.approx(204, abs=5)
    hours = [config.num_epochs * epoch / (65e12 * used) / 3600 for used in (0.3, 0.12)]
    assert 0.8 < hours[0] < hours[1] < 3


@pytest.mark.parametrize("name", PRESETS)
def test_the_algorithm_of_a_preset_takes_its_settings(name):
    preset = PRESETS[name]
    make_algorithm(preset.algorithm).check(DDPOConfig(**preset.config))


def test_stable_diffusion_35_takes_the_settings_of_its_source():
    """pickscore_sd3_4gpu of flow_grpo: 16 groups of 16, and rollouts of a group that share no noise."""
    config = DDPOConfig(**PRESETS["sd35"].config)
    assert config.epoch_plan(1).total_samples == 16 * 16
    assert (config.sample_group_size, config.shared_starts) == (16, 1)
    found = published("sd35_medium").transformer
    trained = prepare_policy(found, {}, config, use_lora=True, device=torch.device("meta"))
    # 23 blocks with eight layers of 1536 x 1536, and a last one whose text is given up: no to_add_out
    assert sum(p.numel() for p in trained.values()) == (23 * 8 + 7) * 32 * (1536 + 1536)


def settings_row(name: str) -> str:
    """A line of docs/full-size.md."""
    preset, config = PRESETS[name], DDPOConfig(**PRESETS[name].config)
    strength = preset.noise_strength
    start = "noise" if strength is None else f"images, {strength}"
    actions = int(config.sample_num_steps * (strength or 1) + 1e-6)
    plan = config.epoch_plan(actions)
    processes = {"alignment": 6}.get(name, 8 if config.per_prompt_stat_tracking else 1)
    cells = [f"`{name}`", f"`{preset.reward}`", start, f"{config.sample_guidance_scale:g}", actions]
    cells += [f"{config.train_learning_rate:g}", config.num_epochs, plan.total_samples]
    cells += [plan.samples_per_optimizer_step, processes]
    return f"| {' | '.join(map(str, cells))} |"


def test_the_page_of_presets_is_theirs():
    page = Path(__file__).parents[1] / "docs" / "full-size.md"
    lines = page.read_text("utf-8").splitlines()
    assert [row for row in map(settings_row, PRESETS) if row not in lines] == []


# ------------------------------------------------------------------------------------------- processes
@pytest.mark.parametrize(
    ("name", "processes", "expected"),
    [
        ("edit", 4, (4, 16, 4, 8)),  # 256 and 128 samples
        ("edit", 1, (4, 64, 4, 32)),
        ("aesthetic", 8, (8, 4, 4, 4)),  # as published
        ("aesthetic", 2, (8, 16, 4, 16)),
        ("aesthetic", 1, (8, 4, 4, 4)),  # alone: a process' share
        ("alignment", 4, (8, 9, 4, 9)),  # 288 and 144 samples
        ("digit_world", 4, (16, 1, 16, 1)),  # one batch: that is cut
    ],
)
def test_processes_share_the_experiment(name, processes, expected):
    config = DDPOConfig(**divide(PRESETS[name], processes))
    assert tuple(getattr(config, field) for field in SIZES) == expected


def test_processes_that_do_not_divide_the_experiment_are_refused():
    with pytest.raises(ValueError, match="3 processes do not divide the preset's 256 samples of an epoch"):
        divide(PRESETS["edit"], 3)


def test_what_was_given_is_that_of_each_process():
    given = {"sample_num_batches_per_epoch"}
    assert divide(PRESETS["edit"], 4, given)["sample_num_batches_per_epoch"] == 64
    assert divide(PRESETS["edit"], 4, given)["train_gradient_accumulation_steps"] == 8
