import math
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    FluxImg2ImgPipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionXLImg2ImgPipeline,
)
from helpers import (
    counted_passes,
    ddim_step,
    generators,
    images_of,
    make_flux_pipeline,
    make_pipeline,
    make_sd3_pipeline,
    make_xl_pipeline,
)

from ddpo_lessons.models import family_of
from ddpo_lessons.models.stable_diffusion import make_schedule
from ddpo_lessons.rollout import (
    SamplingSettings,
    Trajectory,
    img2img_rollout,
    rollouts_per_state,
    sample_seed,
    text2img_rollout,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def embed(family: Any, prompts: Any) -> torch.Tensor:
    return family.condition(prompts, "", guidance_scale=1.0)["prompt_embeds"]


# ------------------------------------------------------------------------------------ what is sampled
@pytest.mark.parametrize(("branches", "counts"), [(2, [4, 4, 2, 1, 1]), (None, [4, 4, 1, 1, 1])])
def test_rollouts_of_a_group_share_states_until_actions_split_them(branches, counts):
    schedule = family_of(make_pipeline()).schedule(4).with_actions(1, 3)
    assert rollouts_per_state(schedule, 4, branches) == counts


@pytest.mark.parametrize("prediction_type", ["v_prediction", "epsilon", "sample"])
@pytest.mark.parametrize("set_alpha_to_one", [False, True])
def test_text2img_draws_the_images_of_plain_diffusers(prediction_type, set_alpha_to_one):
    pipeline = make_pipeline(prediction_type=prediction_type, set_alpha_to_one=set_alpha_to_one)
    prompts, noise = ["a red three", ""], torch.randn(2, 4, 8, 8, generator=generators(5)[0])
    theirs = pipeline(
        prompts, num_inference_steps=4, guidance_scale=3.0, eta=1.0, generator=generators(1, 2),
        latents=noise, output_type="pt",
    ).images  # fmt: skip
    settings = SamplingSettings(num_inference_steps=4, guidance_scale=3.0)
    ours, _ = text2img_rollout(pipeline, prompts, settings, generator=generators(1, 2), initial_noise=noise)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("spacing", ["trailing", "leading"])
def test_img2img_draws_the_images_of_plain_diffusers(spacing):
    pipeline = make_pipeline(timestep_spacing=spacing)
    prompts, images = ["a red three", "a blue four"], images_of(2, 32, 32)
    theirs = StableDiffusionImg2ImgPipeline(**pipeline.components, requires_safety_checker=False)
    theirs.set_progress_bar_config(disable=True)
    expected = theirs(
        prompts, image=family_of(pipeline).encode(images), strength=0.6, num_inference_steps=5,
        guidance_scale=3.0, eta=1.0, generator=generators(1, 2), output_type="pt",
    ).images  # fmt: skip
    settings = SamplingSettings(num_inference_steps=5, guidance_scale=3.0)
    ours, trajectory = img2img_rollout(pipeline, prompts, images, 0.6, settings, generator=generators(1, 2))
    assert trajectory.num_steps == 3
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


def test_trajectory_holds_states_actions_and_their_gaussian_log_probs():
    pipeline = make_pipeline()
    prompts, settings = ["a red three", "a two"], SamplingSettings(num_inference_steps=3, guidance_scale=2.0)
    images, trajectory = text2img_rollout(pipeline, prompts, settings, generator=generators(1, 2))
    assert trajectory.latents.shape == (2, 4, 4, 8, 8)
    assert trajectory.timesteps.tolist() == [[999, 666, 332]] * 2
    assert trajectory.log_probs.shape == (2, 3)
    torch.testing.assert_close(family_of(pipeline).decode(trajectory.latents[:, -1]), images)
    for k, t in enumerate(trajectory.timesteps[0].tolist()):
        before, after = trajectory.latents[:, k], trajectory.latents[:, k + 1]
        steps = torch.full((2,), t)
        with torch.no_grad():
            output = family_of(pipeline).predict(pipeline.unet, before, steps, trajectory.conditioning, 2.0)
        step = ddim_step(pipeline.scheduler, output, t, before, generator=generators(9, 9))
        z = (after - step.mean) / step.std.view(2, 1, 1, 1)
        by_hand = -0.5 * (z**2).mean((1, 2, 3)) - step.std.log() - 0.5 * math.log(2 * math.pi)
        torch.testing.assert_close(trajectory.log_probs[:, k], by_hand, atol=1e-4, rtol=0)
        assert 0.5 < z.std() < 1.5  # the recorded action really is a draw of that Gaussian


def test_a_sample_does_not_depend_on_its_batch():
    pipeline = make_pipeline()
    prompts, images = ["a red three", "", "a two"], images_of(3, 32, 32)
    settings = SamplingSettings(num_inference_steps=4, guidance_scale=3.0)
    together = img2img_rollout(pipeline, prompts, images, 0.8, settings, generator=generators(1, 2, 3))
    for i in range(3):
        one = prompts[i : i + 1], images[i : i + 1]
        alone = img2img_rollout(pipeline, *one, 0.8, settings, generator=generators(i + 1))
        torch.testing.assert_close(alone[0][0], together[0][i], atol=1e-4, rtol=0)
        torch.testing.assert_close(alone[1].log_probs[0], together[1].log_probs[i], atol=1e-4, rtol=0)


# -------------------------------------------------------------------------------------- forward passes
@pytest.mark.parametrize(
    ("guidance", "prompts", "negative", "batches"),
    [
        (5.0, ["a two", ""], "", [4] * 3),
        (5.0, ["", ""], "", [2] * 3),
        (5.0, ["a two", "a two"], "a two", [2] * 3),
        (1.0, ["a two", ""], "", [2] * 3),
        (0.0, ["a two", ""], "", [2] * 3),
    ],
)
def test_one_pass_where_one_is_enough(guidance, prompts, negative, batches):
    pipeline = make_pipeline()
    settings = SamplingSettings(num_inference_steps=3, guidance_scale=guidance, negative_prompt=negative)
    with counted_passes(pipeline.unet) as sizes:
        text2img_rollout(pipeline, prompts, settings, generator=generators(1, 2))
    assert sizes == batches


def test_guidance_moves_the_prediction_away_from_the_negative_prompt():
    pipeline = make_pipeline()
    family = family_of(pipeline)
    latents, t = torch.randn(1, 4, 8, 8, generator=generators(1)[0]), torch.tensor([500])
    conditions = (["a red three"], "", 1.0), (["a blue four"], "", 1.0), (["a red three"], "a blue four", 7.5)
    with torch.no_grad():
        towards, away, guided = (
            family.predict(pipeline.unet, latents, t, family.condition(*each), each[2]) for each in conditions
        )
    assert (towards - away).abs().max() > 1e-3
    torch.testing.assert_close(guided, away + 7.5 * (towards - away), atol=1e-4, rtol=0)


def test_joining_guided_and_unguided_batches_keeps_what_each_predicts():
    pipeline = make_pipeline()
    settings = SamplingSettings(num_inference_steps=2, guidance_scale=5.0)
    pieces = [
        text2img_rollout(pipeline, [prompt], settings, generator=generators(1))[1] for prompt in ("", "a two")
    ]
    joined, family = Trajectory.cat(pieces), family_of(pipeline)
    assert not pieces[0].is_guided
    assert joined.is_guided
    latents, timesteps = joined.latents[:, 0], joined.timesteps[:, 0]
    with torch.no_grad():
        alone = family.predict(pipeline.unet, latents[:1], timesteps[:1], pieces[0].conditioning, 5.0)
        both = family.predict(pipeline.unet, latents, timesteps, joined.conditioning, 5.0)
    torch.testing.assert_close(both[:1], alone, atol=1e-5, rtol=0)


# -------------------------------------------------------------------------------------------- schedule
@pytest.mark.parametrize(
    ("num_steps", "strength", "expected"), [(10, 0.8, 8), (50, 0.58, 28), (50, 0.2, 10), (7, 1.0, 7)]
)
def test_noise_strength_decides_the_steps(num_steps, strength, expected):
    scheduler = make_pipeline().scheduler
    steps = make_schedule(scheduler, num_steps, strength)
    assert len(steps) == expected
    assert torch.equal(steps, scheduler.timesteps[-expected:])
    assert scheduler.num_inference_steps == num_steps


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (make_pipeline, StableDiffusionImg2ImgPipeline),
        (make_xl_pipeline, StableDiffusionXLImg2ImgPipeline),
        (make_sd3_pipeline, StableDiffusion3Img2ImgPipeline),
        (make_flux_pipeline, FluxImg2ImgPipeline),
    ],
)
def test_img2img_runs_the_steps_of_diffusers(make, plain):
    """All strengths of two digits; the product's rounding decides at 50 x 0.58 or, for flow models, 0.56."""
    family, size = family_of(make()), (32, 32)
    for num_steps in (10, 25, 50, 90, 100):
        for percent in range(100 // num_steps + 1, 101):
            strength = percent / 100
            schedule = family.schedule(num_steps, strength, size=size)
            stand_in = SimpleNamespace(scheduler=family.pipeline.scheduler)
            expected, count = plain.get_timesteps(stand_in, num_steps, strength, "cpu")
            assert len(schedule.timesteps) == count, (num_steps, strength)
            torch.testing.assert_close(schedule.timesteps, expected[:count], rtol=0, atol=1e-3)


@pytest.mark.parametrize("num_steps", [50, 61, 103, 998])
def test_a_schedule_has_the_steps_it_was_asked_for_and_none_below_zero(num_steps):
    steps = make_schedule(make_pipeline().scheduler, num_steps)
    assert len(steps) == num_steps
    assert steps.min() >= 0
    assert (steps.diff() < 0).all()


def test_img2img_starts_from_the_image_noised_to_the_first_timestep():
    pipeline, images = make_pipeline(), images_of(2, 32, 32)
    noise = torch.randn(2, 4, 8, 8, generator=generators(1)[0])
    _, trajectory = img2img_rollout(
        pipeline, ["", ""], images, 0.5, SamplingSettings(num_inference_steps=4), initial_noise=noise
    )
    alpha_bar = pipeline.scheduler.alphas_cumprod[int(trajectory.timesteps[0, 0])]
    expected = alpha_bar.sqrt() * family_of(pipeline).encode(images) + (1 - alpha_bar).sqrt() * noise
    torch.testing.assert_close(trajectory.latents[:, 0], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("strength", [0.0, -0.1, 1.01, float("nan")])
def test_noise_strength_outside_its_range_is_refused(strength):
    with pytest.raises(ValueError, match=r"noise_strength=.* must lie in \(0, 1\]"):
        make_schedule(make_pipeline().scheduler, 10, strength)


def test_noise_strength_that_runs_no_step_names_the_least_that_does():
    with pytest.raises(ValueError, match=r"runs no step: use a noise_strength of at least 0\.1, or"):
        make_schedule(make_pipeline().scheduler, 10, 0.09)
    with pytest.raises(ValueError, match=r"runs no step: use a noise_strength of at least 0\.021, or"):
        make_schedule(make_pipeline().scheduler, 49, 0.02)  # 1 / 49 = 0.0204 is the least
    assert len(make_schedule(make_pipeline().scheduler, 49, 0.021)) == 1


def test_a_schedule_that_begins_after_the_last_trained_timestep_is_refused():
    """Stable Diffusion 1.5's own scheduler: 1000 steps are timesteps 1 to 1000, and there are 0 to 999."""
    pipeline = make_pipeline(timestep_spacing="leading", steps_offset=1, beta_schedule="scaled_linear")
    assert make_schedule(pipeline.scheduler, 999)[0] == 999
    with pytest.raises(ValueError, match=r"sample_num_steps=1000 .* steps_offset=1 begin at timestep 1000"):
        make_schedule(pipeline.scheduler, 1000)


def test_a_deterministic_last_step_is_run_but_not_recorded():
    pipeline, settings = make_pipeline(set_alpha_to_one=True), SamplingSettings(num_inference_steps=3)
    for rollout, start in ((text2img_rollout, ()), (img2img_rollout, (images_of(1, 32, 32), 1.0))):
        with counted_passes(pipeline.unet) as sizes:
            images, trajectory = rollout(pipeline, [""], *start, settings, generator=generators(1))
        assert len(sizes) == 3
        assert trajectory.num_steps == 2
        assert trajectory.timesteps.tolist() == [[999, 666]]
        assert trajectory.log_probs.isfinite().all()
        torch.testing.assert_close(family_of(pipeline).decode(trajectory.final_latents), images)
        undone = family_of(pipeline).decode(trajectory.latents[:, -1])
        assert (images - undone).abs().max() > 1e-3  # the image is that of the last step


# ------------------------------------------------------------------------------------ text and images
def test_each_text_is_encoded_once():
    pipeline = make_pipeline()
    family = family_of(pipeline)
    sizes: list[int] = []
    pipeline.text_encoder.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    first = embed(family, ["a two", "", "a two"])
    again = embed(family, ["", "a one"])
    assert sizes == [1, 1, 1]
    assert torch.equal(first[0], first[2])
    assert torch.equal(first[1], again[0])


def test_a_prompt_that_is_too_long_is_named_once_with_what_is_cut():
    family = family_of(make_pipeline())
    prompt = "a red three " * 4 + "on a blue background"  # 16 tokens and two at the ends
    with pytest.warns(UserWarning, match=r"too long: 'blue background' is cut.*16 tokens") as found:
        embed(family, [prompt, "a two"])
    assert len(found) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embed(family, [prompt])
        embed(family, ["a red three " * 4])


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), TypeError, "torch.uint8: .* divide uint8 by 255"),
        (torch.zeros(1, 3, 30, 32), ValueError, r"\(30, 32\) pixels: resize to multiples of 4"),
    ],
)
def test_images_that_do_not_fit_are_refused_before_any_pass(images, error, message):
    pipeline = make_pipeline()
    with counted_passes(pipeline.unet) as sizes, pytest.raises(error, match=message):
        img2img_rollout(pipeline, ["a two"], images, 0.5, SamplingSettings(num_inference_steps=4))
    assert sizes == []


def test_images_of_any_size_that_the_vae_divides_are_taken():
    images, trajectory = img2img_rollout(
        make_pipeline(), ["a two"], torch.rand(1, 3, 24, 40), 0.5, SamplingSettings(num_inference_steps=2)
    )
    assert images.shape == (1, 3, 24, 40)
    assert trajectory.latents.shape == (1, 2, 4, 6, 10)


def test_numbers_of_prompts_and_images_must_agree():
    with pytest.raises(ValueError, match="2 prompts for 1 images"):
        img2img_rollout(make_pipeline(), ["", ""], images_of(1, 32, 32), 0.5)


def test_seeds_of_samples_do_not_collide():
    seeds = {sample_seed(s, e, p, r) for s in range(4) for e in range(8) for p in range(3) for r in range(16)}
    assert len(seeds) == 4 * 8 * 3 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 23) != sample_seed(12, 3)


# ------------------------------------------------------------------------------------------- groups
@pytest.mark.parametrize("from_images", [False, True])
def test_a_group_that_draws_its_own_noise_begins_in_one_state(from_images):
    pipeline, prompts = make_pipeline(), ["a red three", "a red three", "nine", "nine"]
    rollout, start = text2img_rollout, ()
    if from_images:
        rollout, start = img2img_rollout, (images_of(2, 32, 32).repeat_interleave(2, dim=0), 0.7)
    settings = SamplingSettings(num_inference_steps=4, guidance_scale=3.0, group_size=2)
    images, trajectory = rollout(pipeline, prompts, *start, settings, generator=generators(1)[0])
    (generator,) = generators(1)
    noise = torch.randn(4, 4, 8, 8, generator=generator)[::2].repeat_interleave(2, dim=0)
    settings = replace(settings, group_size=1)
    alone, _ = rollout(pipeline, prompts, *start, settings, generator=generator, initial_noise=noise)
    torch.testing.assert_close(images, alone, atol=1e-5, rtol=0)
    assert torch.equal(*trajectory.latents[:2, 0])
    assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize(
    ("prompts", "size", "noise", "message"),
    [
        (["one", "two"], 2, None, "the prompts of a group must be the same"),
        (["one"] * 3, 2, None, "group_size=2 must be 1 or more and divide the 3 prompts"),
        (["one"] * 2, 0, None, "group_size=0 must be 1 or more"),
        (["one"] * 2, 2, torch.arange(512.0).view(2, 4, 8, 8), "initial_noise must be the same within"),
    ],
)
def test_groups_that_have_nothing_in_common_are_refused(prompts, size, noise, message):
    with pytest.raises(ValueError, match=message):
        text2img_rollout(make_pipeline(), prompts, SamplingSettings(group_size=size), initial_noise=noise)
    images = torch.rand(len(prompts), 3, 32, 32) if noise is None else torch.zeros(2, 3, 32, 32)
    with pytest.raises(ValueError, match=message):
        img2img_rollout(
            make_pipeline(), prompts, images, 0.5, SamplingSettings(group_size=size), initial_noise=noise
        )
