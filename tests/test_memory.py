"""What a GPU takes at a time: by hand on small random networks, and Stable Diffusion 1.5 on every card."""

import itertools
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from helpers import make_config, make_pipeline, make_xl_pipeline
from torch import nn
from transformers import T5Config, T5EncoderModel

from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.app import budget, memory
from ddpo_lessons.app.presets import PRESETS, divide
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.families import family_of
from ddpo_lessons.tiny import load_tiny_sd3

pytestmark = pytest.mark.usefixtures("one_thread")

EPOCH: dict[str, Any] = {
    "sample_batch_size": 4,
    "sample_num_batches_per_epoch": 6,
    "train_batch_size": 3,
    "train_gradient_accumulation_steps": 4,
}


# ------------------------------------------------------------------------------------------- models
def with_t5() -> StableDiffusion3Pipeline:
    """tiny-sd3 with a random T5, of no more tokens than its tokenizer says."""
    parts = load_tiny_sd3().components
    config = T5Config(vocab_size=10_000, d_model=64, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    parts["tokenizer_3"].model_max_length = 8
    return StableDiffusion3Pipeline(**{**parts, "text_encoder_3": T5EncoderModel(config)})


def without_tokenizer_3() -> StableDiffusion3Pipeline:
    return StableDiffusion3Pipeline(**{**load_tiny_sd3().components, "tokenizer_3": None})


@pytest.mark.parametrize(
    ("make", "tokens"),
    [
        (make_pipeline, 16),
        (make_xl_pipeline, 16),
        (load_tiny_sd3, 16 + 1),
        (with_t5, 16 + 8),
        (without_tokenizer_3, 16 + 256),
    ],
)
def test_a_folder_gives_its_pipeline_without_weights(make, tokens, tmp_path):
    pipeline = make()
    pipeline.save_pretrained(tmp_path)
    found = memory.find_pipeline(str(tmp_path))
    assert type(found) is type(pipeline)
    for name, value in pipeline.scheduler.config.items():
        assert name.startswith("_") or found.scheduler.config[name] == value
    steps, like = pipeline.scheduler.timesteps, memory.like(pipeline)
    family_of(like).schedule(7)
    assert pipeline.scheduler.timesteps is steps  # another scheduler was set
    networks = [name for name, part in pipeline.components.items() if isinstance(part, nn.Module)]
    for made, name in itertools.product((found, like), networks):
        shapes = {key: tensor.shape for key, tensor in getattr(made, name).state_dict().items()}
        assert shapes == {key: tensor.shape for key, tensor in getattr(pipeline, name).state_dict().items()}
        assert {t.device.type for t in getattr(made, name).parameters()} == {"meta"}
    if "force_zeros_for_empty_prompt" in pipeline.config:
        assert found.config.force_zeros_for_empty_prompt == pipeline.config.force_zeros_for_empty_prompt
    for each in (pipeline, like):
        assert family_of(each).condition(["a red three"], "", 1.0)["prompt_embeds"].shape[1] == tokens


def test_a_name_that_is_not_known():
    with pytest.raises(
        ValueError,
        match=r"size of 'some/model' is not known here: .*tiny-sd, tiny-sd3, tiny-zoo, stable-diff",
    ):
        memory.find_pipeline("some/model")


def test_a_folder_of_another_family_is_refused(tmp_path):
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "KolorsPipeline", "vae": ["diffusers", "VAE"]}'
    )
    with pytest.raises(ValueError, match="no pipeline that can be counted: the model is a KolorsPipeline"):
        memory.find_pipeline(str(tmp_path))


def test_a_folder_that_lacks_a_part_is_refused(tmp_path):
    load_tiny_sd3().save_pretrained(tmp_path)
    (tmp_path / "vae" / "config.json").unlink()
    with pytest.raises(ValueError, match=r"no pipeline that can be counted: .*config\.json"):
        memory.find_pipeline(str(tmp_path))


def test_rewards_share_clip():
    clip, resnet = 427_616_513 * 4, 11_176_512 * 4
    assert memory.reward_bytes("clip_score") == memory.reward_bytes("clip_score+0.5*clip_margin") == clip
    assert memory.reward_bytes("edit") == clip + resnet
    assert memory.reward_bytes("jpeg_compressibility") == memory.reward_bytes("mine.py:score") == 0


# --------------------------------------------------------------------------------------------- fitting
START = FromImages(noise_strength=1.0)


def peak(model: str, config: DDPOConfig) -> float:
    """GB that a card needs, counted with passes of the size in question."""
    found = budget.estimate(memory.find_pipeline(model), config, DDPO(), START)
    return (found.peak / memory.GB + memory.CUDA) / memory.SHARE


def test_the_largest_passes_that_fit(model, tmp_path):
    config = make_config(tmp_path, **EPOCH, mixed_precision="bf16")
    # 12 samples an optimizer step: passes of 1, 2, 3, 4, 6 or 12
    four, six = (peak(model, memory.with_passes(config, size)) for size in (4, 6))
    found, _ = memory.fit(model, config, (four + six) / 2, DDPO(), START)
    assert found.forward_sizes(4 * 8 * 8) == (4, 4)
    before, after = (each.epoch_plan(3) for each in (config, found))
    assert after.total_samples == before.total_samples == 24
    assert after.samples_per_optimizer_step == before.samples_per_optimizer_step == 12
    assert not found.train_gradient_checkpointing


def test_passes_keep_what_an_algorithm_needs(model, tmp_path):
    """DPO's batches hold whole groups."""
    config = make_config(tmp_path, **EPOCH, sample_group_size=2, train_clip_range=DDPOConfig.train_clip_range)
    small, _ = memory.fit(
        model, config, peak(model, memory.with_passes(config, 2)), make_algorithm("dpo"), START
    )
    assert (small.sample_batch_size, small.train_forward_size) == (2, 2)
    large, _ = memory.fit(model, config, 24, make_algorithm("dpo"), START)
    assert (large.sample_batch_size, large.train_forward_size) == (4, 12)


def test_checkpointing_is_for_what_does_not_fit_without(model, tmp_path):
    config = make_config(tmp_path, **EPOCH)
    gigabytes = peak(model, memory.with_passes(config, 1)) * (1 - 1e-9)
    found, taken = memory.fit(model, config, gigabytes, DDPO(), START)
    assert found.train_gradient_checkpointing
    assert taken < gigabytes
    with pytest.raises(ValueError, match="smallest passes, of 1,"):
        memory.fit(model, config, gigabytes, DDPO(), START, keep_checkpointing=True)


def test_the_smallest_card_that_would_do_is_named(model, tmp_path):
    config = make_config(tmp_path, **EPOCH)
    with pytest.raises(ValueError, match=r"a card of (\d+\.\d) GB") as caught:
        memory.fit(model, config, 0.5, DDPO(), START)
    checkpointed = memory.with_passes(make_config(tmp_path, **EPOCH, train_gradient_checkpointing=True), 1)
    assert f"a card of {peak(model, checkpointed):.1f} GB" in str(caught.value)


def test_auto_needs_a_device(monkeypatch):
    with pytest.raises(ValueError, match="there is none"):
        memory.device_gigabytes()
    cards = [type("Card", (), {"total_memory": size}) for size in (80 * 10**9, 24 * 10**9)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: cards[number])
    assert memory.device_gigabytes() == 24


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", sorted({size for size, _ in memory.CARDS.values()}))
def test_the_heaviest_preset_fits_every_card_and_uses_it(gigabytes):
    """All samples of the aesthetic experiment on one GPU, with CLIP."""
    preset, whole = PRESETS["aesthetic"], {"sample_num_batches_per_epoch": 32}
    config = DDPOConfig(**{**preset.config, **whole, "train_gradient_accumulation_steps": 32})
    task = DDPO(), FromNoise(), memory.reward_bytes(preset.reward)
    found, taken = memory.fit(preset.model, config, gigabytes, *task)
    assert len({*found.forward_sizes(4 * 64 * 64)}) == 1  # sampling and training round alike
    most = memory.SHARE * gigabytes - memory.CUDA
    assert 0.5 * gigabytes < taken <= most
    counted = budget.estimate(memory.find_pipeline(preset.model), found, *task).peak / memory.GB
    assert counted == pytest.approx(taken, rel=0.01)


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
    assert tuple(getattr(config, field) for field in EPOCH) == expected


def test_processes_that_do_not_divide_the_experiment_are_refused():
    with pytest.raises(ValueError, match="3 processes do not divide the preset's 256 samples of an epoch"):
        divide(PRESETS["edit"], 3)


def test_what_was_given_is_that_of_each_process():
    given = {"sample_num_batches_per_epoch"}
    assert divide(PRESETS["edit"], 4, given)["sample_num_batches_per_epoch"] == 64
    assert divide(PRESETS["edit"], 4, given)["train_gradient_accumulation_steps"] == 8
