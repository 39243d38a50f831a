"""Stable Diffusion 3 with random weights against plain diffusers, and runs of all flow models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusion3Img2ImgPipeline
from helpers import (
    PROMPTS,
    T5_LENGTH,
    brightness,
    check_drawn_as_by_diffusers,
    check_resume,
    flow_trainer,
    images_of,
    make_config,
    make_flux_pipeline,
    make_kontext_pipeline,
    make_sd3_pipeline,
    noise_of,
    red_three,
)

from ddpo_lessons.algorithms.flow_grpo import FlowGRPO
from ddpo_lessons.algorithms.nft import NFT
from ddpo_lessons.algorithms.pepg import PEPG
from ddpo_lessons.data.starts import FromImages, FromNoise, WithImages
from ddpo_lessons.models import Family, family_of, load_pipeline
from ddpo_lessons.models.policy import prepare_policy
from ddpo_lessons.rollout import SamplingSettings, img2img_rollout, text2img_rollout
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.worlds import load_tiny_sd3

pytestmark = pytest.mark.usefixtures("one_thread")

HEIGHT, WIDTH = 32, 48


# ------------------------------------------------------------------------------- against plain diffusers
@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize(("t5", "negative"), [(False, ""), (True, "a blue four")])
def test_conditioning_is_that_of_diffusers(t5, negative, guidance):
    pipeline = make_sd3_pipeline(t5=t5)
    prompts, negatives, pooled, negative_pooled = pipeline.encode_prompt(
        list(PROMPTS), None, None, device="cpu", do_classifier_free_guidance=guidance > 1,
        negative_prompt=[negative] * len(PROMPTS), max_sequence_length=T5_LENGTH,
    )  # fmt: skip
    expected = {"prompt_embeds": prompts, "pooled_embeds": pooled}
    if guidance > 1:
        expected |= {"negative_prompt_embeds": negatives, "negative_pooled_embeds": negative_pooled}
    family = family_of(pipeline)
    for _ in range(2):  # the second time from memory
        torch.testing.assert_close(family.condition(PROMPTS, negative, guidance), expected)
    assert bool(prompts[0, -1].any()) == t5  # zeros stand for a T5 that is not there


def test_without_a_third_tokenizer_there_are_as_many_zeros_as_in_diffusers():
    pipeline = make_sd3_pipeline()
    pipeline.tokenizer_3 = None
    conditioning = family_of(pipeline).condition(["a red three"], "", 1.0)
    expected = pipeline.encode_prompt("a red three", None, None)[0]
    torch.testing.assert_close(conditioning["prompt_embeds"], expected)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("t5", [False, True])
def test_text2img_by_the_ode_draws_what_plain_diffusers_draws(guidance, t5):
    pipeline, prompts = make_sd3_pipeline(t5=t5), ["a red three", "a digit", ""]
    noise = noise_of(3, 4, 8, 8)
    settings = SamplingSettings(
        negative_prompt="a blue four", num_inference_steps=4, guidance_scale=guidance, eta=0.0
    )
    drawn = text2img_rollout(pipeline, prompts, settings, initial_noise=noise)
    check_drawn_as_by_diffusers(
        drawn, pipeline, prompts, settings, noise, negative_prompt=["a blue four"] * 3,
        guidance_scale=guidance, max_sequence_length=T5_LENGTH,
    )  # fmt: skip


@pytest.mark.parametrize(("guidance", "strength"), [(1.0, 0.6), (4.0, 0.6), (1.0, 0.5)])
def test_img2img_by_the_ode_draws_what_plain_diffusers_draws(guidance, strength):
    """From the latents that we start with: those of diffusers are a draw of the posterior, ours its mean.

    A strength of 0.5 of five steps means three, as 0.6 does.
    """
    pipeline = make_sd3_pipeline()
    prompts = ["a red three", "a digit"]
    images = images_of(2, HEIGHT, WIDTH)
    noise = noise_of(2, 4, 8, 12)
    settings = SamplingSettings(num_inference_steps=5, guidance_scale=guidance, eta=0.0)
    drawn = img2img_rollout(pipeline, prompts, images, strength, settings, initial_noise=noise)
    _, trajectory = drawn
    with torch.no_grad():
        mean = pipeline.vae.encode(images * 2 - 1).latent_dist.mean
    sigma = trajectory.timesteps[0, 0] / 1000
    assert sigma == pytest.approx(3 * 0.5 / (1 + 2 * 0.5), rel=5e-3)  # half of the way, shifted
    start = (1 - sigma) * (mean - 0.0609) * 1.5305 + sigma * noise
    torch.testing.assert_close(trajectory.latents[:, 0], start, atol=1e-5, rtol=0)

    plain = StableDiffusion3Img2ImgPipeline(**pipeline.components)
    plain.set_progress_bar_config(disable=True)
    check_drawn_as_by_diffusers(
        drawn, plain, prompts, settings, start, image=images, strength=strength, height=HEIGHT, width=WIDTH,
        negative_prompt=["", ""], guidance_scale=guidance, max_sequence_length=T5_LENGTH,
    )  # fmt: skip


def test_the_forward_process_the_velocity_and_the_clean_latents_belong_together():
    family = family_of(make_sd3_pipeline())
    clean, noise = noise_of(2, 2, 4, 8, 8).unbind()
    timesteps = torch.tensor([250, 900])
    noisy = family.add_noise(clean, noise, timesteps)
    torch.testing.assert_close(noisy[0], 0.75 * clean[0] + 0.25 * noise[0])
    velocity = family.denoising_target(clean, noise, timesteps)
    assert torch.equal(velocity, noise - clean)
    torch.testing.assert_close(family.predict_clean(noisy, velocity, timesteps), clean, atol=1e-5, rtol=0)


# ---------------------------------------------------------------------------------------------- training
def make_schnell_pipeline() -> Any:
    return make_flux_pipeline(guidance=False)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    ("make", "algorithm", "start", "changes"),
    [
        (make_sd3_pipeline, FlowGRPO(), None, {}),
        (make_sd3_pipeline, FlowGRPO(window=2), None, {"sample_group_size": 2, "train_kl_coefficient": 0.1}),
        (make_sd3_pipeline, FlowGRPO("dance"), FromImages(0.6), {"train_use_lora": False}),
        (make_sd3_pipeline, FlowGRPO("cps", window=2), None, {"sample_guidance_scale": 1.0}),
        (make_flux_pipeline, FlowGRPO(), None, {}),
        (make_flux_pipeline, FlowGRPO(window=2), FromImages(0.6), {"sample_group_size": 2}),
        (make_schnell_pipeline, FlowGRPO("cps"), FromNoise(resolution=48), {}),
        (make_kontext_pipeline, FlowGRPO("dance"), WithImages(), {"train_kl_coefficient": 0.1}),
    ],
)
def test_the_policy_that_trains_is_the_one_that_sampled(tmp_path, make, algorithm, start, changes, precision):
    trainer = flow_trainer(
        tmp_path, algorithm, start, make(), mixed_precision=precision, train_batch_size=2,
        sample_num_batches_per_epoch=2, train_learning_rate=1e-2, **changes,
    )  # fmt: skip
    trainer.train()
    first, second = read_metrics(tmp_path, "step")
    assert first["first_replay_max_ratio_error"] < (1e-5 if precision == "no" else 1e-3)
    assert first["grad_norm"] > 5e-4
    # By then the first step has moved it.
    assert second["max_ratio_error"] > max(1e-5, first["first_replay_max_ratio_error"])


@pytest.mark.parametrize(
    ("make", "algorithm", "start"),
    [
        (make_sd3_pipeline, lambda: FlowGRPO(window=2), None),
        (make_sd3_pipeline, lambda: PEPG(decay_rate=0.4), None),
        (make_flux_pipeline, lambda: FlowGRPO(window=2), None),
        (make_kontext_pipeline, lambda: NFT(decay_rate=0.4), WithImages()),
    ],
)
def test_a_run_resumes_to_the_bit(tmp_path, make, algorithm, start):
    """With the window of the epoch; with old weights, which by the third epoch are not the new ones."""

    def run(folder: Path, **changes: Any) -> Trainer:
        return flow_trainer(folder, algorithm(), start, make(), **changes)

    check_resume(run, tmp_path, epochs=3)


def test_the_window_moves_and_only_it_is_recorded(tmp_path):
    trainer = flow_trainer(tmp_path, FlowGRPO(window=2), None, make_sd3_pipeline())
    windows = [
        tuple(torch.nonzero(trainer.sampler.schedule(epoch).stds).flatten().tolist()) for epoch in range(30)
    ]
    assert set(windows) == {(0, 1), (1, 2), (2, 3)}  # the last of the five steps has no noise
    epoch = windows.index((1, 2))
    _, trajectory, _ = trainer.sampler.sample(epoch, trainer.contexts.draw(epoch))
    assert trajectory.log_probs.shape == (2, 2)
    assert torch.equal(trajectory.timesteps[0], trainer.sampler.schedule(epoch).timesteps[1:3])


# --------------------------------------------------------------------------------------- parts, precision
def test_another_scheduler_is_refused_by_name():
    pipeline = make_sd3_pipeline()
    pipeline.scheduler = DDIMScheduler()
    with pytest.raises(TypeError, match="a DDIMScheduler is no schedule of flow matching"):
        family_of(pipeline)


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "tokenizer_2"])
def test_a_missing_part_is_refused_by_name(tmp_path, part):
    pipeline = make_sd3_pipeline()
    setattr(pipeline, part, None)
    with pytest.raises(TypeError, match=f"sd_pipeline has no {part}:"):
        Trainer(make_config(tmp_path), brightness, red_three, pipeline, algorithm=FlowGRPO())


@pytest.mark.parametrize(
    ("size", "message"), [((36, 32), "multiples of 8"), ((32, 72), "at most 64 pixels a side")]
)
def test_images_that_the_transformer_cannot_take_are_refused_before_it_does(size, message):
    with pytest.raises(ValueError, match=message):
        img2img_rollout(make_sd3_pipeline(), [""], torch.rand(1, 3, *size), 0.5)


def test_float16_leaves_t5_alone_which_it_breaks(tmp_path):
    family = family_of(make_sd3_pipeline(t5=True))
    assert isinstance(family, Family)
    config = make_config(tmp_path, mixed_precision="fp16")
    prepare_policy(family.denoiser, family.frozen, config, True, torch.device("cpu"), family.keeps_float32)
    found = {name: network.dtype for name, network in family.frozen.items()}
    assert found.pop("text_encoder_3") == torch.float32
    assert found == dict.fromkeys(("vae", "text_encoder", "text_encoder_2"), torch.float16)


def test_the_embedded_flow_model_has_two_ways_in():
    ours, plain = load_pipeline("tiny-sd3"), load_tiny_sd3()
    weights = plain.transformer.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in ours.transformer.state_dict().items())
    images, _ = text2img_rollout(ours, ["a red three"], SamplingSettings(num_inference_steps=2, eta=0.0))
    assert images.shape == (1, 3, 32, 32)
