"""Model families: Stable Diffusion XL against plain diffusers, and what every family keeps its promise of."""

import functools
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    DDPMScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    KDPM2DiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLPipeline,
    TCDScheduler,
    UniPCMultistepScheduler,
)
from helpers import (
    PROMPTS,
    brightness,
    check_drawn_as_by_diffusers,
    check_resume,
    counted_passes,
    each_prompt,
    generators,
    images_of,
    make_config,
    make_flux_pipeline,
    make_pipeline,
    make_sd3_pipeline,
    make_xl_pipeline,
    noise_of,
    noisy_image,
    printed_error,
)

from ddpo_lessons.cli import main as cli
from ddpo_lessons.models import FAMILIES, Family, family_of, load_pipeline
from ddpo_lessons.models.policy import prepare_policy
from ddpo_lessons.models.stable_diffusion import StableDiffusion, ddim_scheduler
from ddpo_lessons.models.stable_diffusion_xl import StableDiffusionXL
from ddpo_lessons.rollout import SamplingSettings, Trajectory, img2img_rollout, text2img_rollout
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer, Trainer
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

MAKERS = {"sd": make_pipeline, "xl": make_xl_pipeline}
# force_zeros_for_empty_prompt, and the negative prompt.
NEGATIVES = [(True, ""), (False, ""), (True, "a blue four"), (False, "a blue four")]
HEIGHT, WIDTH = 32, 48


def make_xl(zeros: bool, **scheduler: Any) -> StableDiffusionXLPipeline:
    pipeline = make_xl_pipeline(**scheduler)
    pipeline.register_to_config(force_zeros_for_empty_prompt=zeros)
    return pipeline


def diffusers_negative(zeros: bool, negative: str, count: int) -> list[str] | None:
    """Return the negative prompt that diffusers is given: to it only a missing one is zeros."""
    return None if zeros and not negative else [negative] * count


# ------------------------------------------------------------------------------- against plain diffusers
@pytest.mark.parametrize("size", [None, (HEIGHT, WIDTH)])
@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize(("zeros", "negative"), NEGATIVES)
def test_conditioning_is_that_of_diffusers(zeros, negative, guidance, size):
    pipeline, count = make_xl(zeros), len(PROMPTS)
    prompts, negative_embeds, pooled, negative_pooled = pipeline.encode_prompt(
        list(PROMPTS), device="cpu", do_classifier_free_guidance=guidance > 1,
        negative_prompt=diffusers_negative(zeros, negative, count),
    )  # fmt: skip
    pixels = size or (32, 32)
    width = pipeline.text_encoder_2.config.projection_dim
    ids = pipeline._get_add_time_ids(pixels, (0, 0), pixels, torch.float32, width).repeat(count, 1)
    expected = {"prompt_embeds": prompts, "pooled_embeds": pooled, "time_ids": ids}
    if guidance > 1:
        expected["negative_prompt_embeds"] = negative_embeds
        expected |= {"negative_pooled_embeds": negative_pooled, "negative_time_ids": ids}
    family = family_of(pipeline)
    for _ in range(2):  # the second time from memory
        torch.testing.assert_close(family.condition(PROMPTS, negative, guidance, size), expected)


SAMPLED = [(1.0, *NEGATIVES[0]), *((5.0, *case) for case in NEGATIVES[:3])]


@pytest.mark.parametrize(("guidance", "zeros", "negative"), SAMPLED)
def test_text2img_draws_what_plain_diffusers_draws(guidance, zeros, negative):
    pipeline, prompts, noise = make_xl(zeros), ["a red three", "a digit", ""], noise_of(3, 4, 8, 8)
    settings = SamplingSettings(
        negative_prompt=negative, num_inference_steps=4, guidance_scale=guidance, eta=0.7
    )
    drawn = text2img_rollout(pipeline, prompts, settings, generator=generators(1, 2, 3), initial_noise=noise)
    check_drawn_as_by_diffusers(
        drawn, pipeline, prompts, settings, noise, atol=1e-4, guidance_scale=guidance, eta=0.7,
        negative_prompt=diffusers_negative(zeros, negative, 3),
    )  # fmt: skip


@pytest.mark.parametrize(("guidance", "zeros", "negative"), SAMPLED)
def test_img2img_draws_what_plain_diffusers_draws(guidance, zeros, negative):
    """From the latents that we start with: those of diffusers are a draw of the posterior, ours its mean."""
    pipeline = make_xl(zeros)
    prompts, images = ["a red three", "a digit"], images_of(2, HEIGHT, WIDTH)
    noise = noise_of(2, 4, 8, 12)
    settings = SamplingSettings(
        negative_prompt=negative, num_inference_steps=5, guidance_scale=guidance, eta=0.7
    )
    drawn = img2img_rollout(
        pipeline, prompts, images, 0.6, settings, generator=generators(1, 2), initial_noise=noise
    )
    _, trajectory = drawn
    with torch.no_grad():
        clean = pipeline.vae.encode(images * 2 - 1).latent_dist.mean * pipeline.vae.config.scaling_factor
    alpha_bar = pipeline.scheduler.alphas_cumprod[int(trajectory.timesteps[0, 0])]
    start = alpha_bar.sqrt() * clean + (1 - alpha_bar).sqrt() * noise
    torch.testing.assert_close(trajectory.latents[:, 0], start, atol=1e-5, rtol=0)

    plain = StableDiffusionXLImg2ImgPipeline(
        **pipeline.components, force_zeros_for_empty_prompt=zeros, add_watermarker=False
    )
    plain.set_progress_bar_config(disable=True)
    check_drawn_as_by_diffusers(
        drawn, plain, prompts, settings, start, atol=1e-4, image=images, strength=0.6, eta=0.7,
        negative_prompt=diffusers_negative(zeros, negative, 2), guidance_scale=guidance,
    )  # fmt: skip


@pytest.mark.parametrize(("zeros", "passes"), [(False, 1), (True, 2)])
def test_empty_prompts_take_one_pass_unless_the_negative_one_is_zeros(zeros, passes):
    """Trajectories of one pass and of two then go together, and each is replayed as it was sampled."""
    family = family_of(make_xl(zeros))
    with counted_passes(family.denoiser) as sizes:
        _, empty = text2img_rollout(
            family, [""], SamplingSettings(num_inference_steps=2), generator=generators(1)
        )
    assert sizes == [passes] * 2
    _, trajectory = text2img_rollout(
        family, ["a red three"], SamplingSettings(num_inference_steps=2), generator=generators(1)
    )
    joined = Trajectory.cat([empty, trajectory])
    assert set(joined.conditioning) == set(trajectory.conditioning)
    with torch.no_grad():
        both = family.predict(
            family.denoiser, joined.latents[:, 0], joined.timesteps[:, 0], joined.conditioning, 5.0
        )
        for row, alone in enumerate((empty, trajectory)):
            expected = family.predict(
                family.denoiser, alone.latents[:, 0], alone.timesteps[:, 0], alone.conditioning, 5.0
            )
            torch.testing.assert_close(both[row : row + 1], expected, atol=1e-5, rtol=0)


# ---------------------------------------------------------------------------------------------- training
def make_trainer(folder: Path, start: str = "text", **changes: Any) -> Trainer:
    """Make a trainer of two optimizer steps an epoch."""
    config = make_config(folder, **{"train_batch_size": 1, **changes})
    if start == "text":
        return DDPOTrainer(config, brightness, each_prompt(), make_xl_pipeline())
    return ImageDDPOTrainer(config, brightness, noisy_image, make_xl_pipeline(), noise_strength=0.7)


@pytest.mark.parametrize(
    ("start", "changes"),
    [
        ("text", {"sample_guidance_scale": 5.0}),
        ("text", {"sample_group_size": 2, "negative_prompts": "a blue four", "train_use_lora": False}),
        ("images", {"sample_guidance_scale": 1.0, "train_use_lora": False}),
        ("images", {"sample_group_size": 2, "sample_guidance_scale": 5.0}),
    ],
)
def test_the_policy_that_trains_is_the_one_that_sampled(tmp_path, start, changes):
    make_trainer(tmp_path, start, **changes).train()
    first, second = read_metrics(tmp_path, "step")
    assert first["first_replay_max_ratio_error"] < 1e-5
    assert first["grad_norm"] > 1e-3
    assert second["max_ratio_error"] > 1e-4  # by then the first step has moved it


@pytest.mark.parametrize(
    ("start", "changes"), [("text", {}), ("images", {"train_use_lora": False, "sample_group_size": 2})]
)
def test_a_run_resumes_to_the_bit(tmp_path, start, changes):
    check_resume(functools.partial(make_trainer, start=start, **changes), tmp_path)


def test_class_numbers_reach_a_network_in_bf16_as_they_are():
    """bf16 holds whole numbers up to 256 only."""
    family, seen = family_of(make_pipeline().to(torch.bfloat16)), []

    def call(denoiser: Any, latents: torch.Tensor, timesteps: torch.Tensor, **given: torch.Tensor) -> Any:
        seen.append(given)
        return latents

    family._call = call
    conditioning = {"classes": torch.tensor([999]), "embeds": torch.tensor([[0.1]])}
    family.predict(family.denoiser, torch.zeros(1, 4, 8, 8), torch.tensor([500]), conditioning, 1.0)
    assert seen[0]["classes"].tolist() == [999]
    assert seen[0]["embeds"].dtype == torch.bfloat16


@pytest.mark.parametrize("make", [make_pipeline, make_xl_pipeline, make_sd3_pipeline, make_flux_pipeline])
def test_a_prompt_s_embedding_does_not_depend_on_what_is_encoded_beside_it(make):
    pipeline = make()
    prompts = ["a red three", "", "a blue seven on a white background", "nine"]
    together = family_of(pipeline).condition(prompts, "", 1.0)
    for row, prompt in enumerate(prompts):
        alone = family_of(pipeline).condition([prompt], "", 1.0)
        assert all(torch.equal(together[name][row], alone[name][0]) for name in together)


# ---------------------------------------------------------------------------------------------- exports
def draw(pipeline: StableDiffusionXLPipeline) -> torch.Tensor:
    """Draw latents with plain diffusers."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        ["a red three"], num_inference_steps=3, guidance_scale=3.0, eta=1.0, generator=generators(1),
        latents=noise_of(1, 4, 8, 8), output_type="latent",
    ).images  # fmt: skip


@pytest.mark.parametrize("use_lora", [True, False])
def test_what_was_trained_draws_the_same_in_plain_diffusers(tmp_path, use_lora):
    changes = {
        "train_use_lora": use_lora, "train_learning_rate": 1e-2, "train_lora_alpha": 8,
        "train_lora_target_modules": ("to_q", "to_out.0", "proj_in", "conv1"),
    }  # fmt: skip
    trainer = make_trainer(tmp_path / "run", **changes)
    trainer.train()
    trainer.save_pretrained(tmp_path / "export")
    _, trajectory = text2img_rollout(
        trainer.pipeline,
        ["a red three"],
        SamplingSettings(num_inference_steps=3, guidance_scale=3.0),
        generator=generators(1),
        initial_noise=noise_of(1, 4, 8, 8),
    )
    plain = make_xl_pipeline()
    assert (draw(plain) - trajectory.final_latents).abs().max() > 1e-2
    if use_lora:
        plain.load_lora_weights(tmp_path / "export")
    else:
        plain = StableDiffusionXLPipeline.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(draw(plain), trajectory.final_latents, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------------------------- loading
@pytest.mark.parametrize(
    "make", [*MAKERS.values(), make_sd3_pipeline, functools.partial(make_sd3_pipeline, t5=True)]
)
def test_load_pipeline_gives_float32_and_the_familys_scheduler_whatever_was_saved(tmp_path, make):
    """And knows which parts were left out, as T5 may be."""
    pipeline, usual = make(), make()
    is_flow = hasattr(pipeline, "transformer")
    if not is_flow:
        pipeline.scheduler = EulerDiscreteScheduler.from_config(pipeline.scheduler.config)
    networks = family_of(usual).frozen.keys() | {"transformer" if is_flow else "unet"}
    for network in networks:
        getattr(pipeline, network).half()
    pipeline.save_pretrained(tmp_path)
    loaded = load_pipeline(tmp_path)
    assert type(loaded) is type(pipeline)
    assert type(loaded.scheduler) is type(usual.scheduler)
    if is_flow:
        assert loaded.scheduler.config.shift == 3.0
    else:
        assert torch.equal(loaded.scheduler.betas, usual.scheduler.betas)
    assert family_of(loaded).frozen.keys() == family_of(usual).frozen.keys()
    for network in networks:
        saved = getattr(pipeline, network).state_dict()
        for key, tensor in getattr(loaded, network).state_dict().items():
            assert tensor.dtype == torch.float32 or not tensor.is_floating_point()
            assert torch.equal(tensor, saved[key].to(tensor.dtype))


REFUSED = ("FluxFillPipeline", "QwenImagePipeline", "StableDiffusionInpaintPipeline")


def write_unknown(folder: Path, name: str) -> Path:
    """Write a pipeline's folder whose weights cannot be read."""
    (folder / "unet").mkdir()
    (folder / "unet" / "config.json").write_text('{"_class_name": "UNet2DConditionModel"}')
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"no weights")
    index = {"_class_name": name, "unet": ["diffusers", "UNet2DConditionModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_other_families_are_refused_by_name_before_their_weights_are_read(tmp_path, name, capsys):
    folder = write_unknown(tmp_path, name)
    message = f"the model is a {name}, of a family that this package does not train"
    with pytest.raises(TypeError, match=message):
        load_pipeline(folder)
    command = ["train", "--model", str(folder), "--reward", "colorfulness", "--prompt", "a red three"]
    assert cli.main([*command, "--output-dir", str(tmp_path / "run")]) == 2
    assert printed_error(capsys).startswith(f"error: {message}")
    assert not (tmp_path / "run").exists()


def test_weights_that_cannot_be_read_are_another_error(tmp_path):
    """So the test above would see it if they were looked at."""
    with pytest.raises(RuntimeError, match="could not be loaded"):
        load_pipeline(write_unknown(tmp_path, "StableDiffusionPipeline"))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("some-name", r"neither a folder \(there is no .*some-name\), nor OWNER/NAME on the hub"),
        ("./some-name", "some-name is neither a folder"),
        ("tiny-sdd", r"\(perhaps tiny-sd\): on a machine"),
        ("FILE", "is a file: give the folder of a diffusers pipeline"),
        ("EMPTY", "holds no model_index.json: give a folder"),
    ],
)
def test_what_names_no_model_is_refused_without_asking_the_hub(model, says, tmp_path, monkeypatch):
    monkeypatch.setattr("ddpo_lessons.hub.hub_reachable", lambda: pytest.fail("the hub was asked"))
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    places = {name: str(tmp_path / name.lower()) for name in ("FILE", "EMPTY")}
    with pytest.raises(RuntimeError, match=says):
        load_pipeline(places.get(model, model))


def test_pipelines_of_other_classes_are_refused():
    parts = {**make_pipeline().components, "requires_safety_checker": False}
    with pytest.raises(TypeError, match="a StableDiffusionInpaintPipeline, of a family"):
        family_of(StableDiffusionInpaintPipeline(**parts))
    with pytest.raises(TypeError, match="a SimpleNamespace, of a family"):
        family_of(SimpleNamespace(**make_xl_pipeline().components))


def test_known_classes_and_their_subclasses_find_their_family():
    class Mine(StableDiffusionXLPipeline):
        pass

    parts = make_xl_pipeline().components
    for kind in (StableDiffusionXLImg2ImgPipeline, Mine):
        assert type(family_of(kind(**parts, add_watermarker=False))) is StableDiffusionXL
    assert type(family_of(make_pipeline())) is StableDiffusion
    family = family_of(make_xl_pipeline())
    assert family_of(family) is family


def test_a_refiner_is_refused_for_its_missing_text_encoder():
    with pytest.raises(TypeError, match="no text_encoder:"):
        family_of(StableDiffusionXLPipeline(**{**make_xl_pipeline().components, "text_encoder": None}))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_schedulers_without_betas_are_refused(make):
    pipeline = make()
    pipeline.scheduler = EDMEulerScheduler()
    with pytest.raises(TypeError, match="EDMEulerScheduler has no betas"):
        family_of(pipeline)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of numpy, in diffusers
@pytest.mark.parametrize(
    "kind", [LCMScheduler, TCDScheduler, HeunDiscreteScheduler, KDPM2DiscreteScheduler, PNDMScheduler]
)
def test_ddim_takes_the_noise_schedule_of_a_scheduler_s_defaults(kind):
    scheduler = kind()
    found = ddim_scheduler(scheduler)
    torch.testing.assert_close(found.alphas_cumprod, scheduler.alphas_cumprod)
    assert found.config.clip_sample is False
    assert found.replaced is scheduler


def test_the_usual_line_for_lcm_on_a_model_of_euler_clips_nothing():
    """Betas by hand: 0.00085 and 0.012 are Stable Diffusion's; Euler's config says nothing of clipping."""
    of_sd = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    euler = EulerDiscreteScheduler(**of_sd, prediction_type="v_prediction")
    found = ddim_scheduler(LCMScheduler.from_config(euler.config))
    assert found.betas[[0, -1]].tolist() == pytest.approx([0.00085, 0.012])
    assert (found.config.clip_sample, found.config.prediction_type) == (False, "v_prediction")
    assert ddim_scheduler(DDPMScheduler()).config.clip_sample is True  # which clips, as its config says


def test_a_solver_that_is_set_to_flow_steps_is_refused():
    with pytest.raises(TypeError, match="UniPCMultistepScheduler has no betas"):
        ddim_scheduler(UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"))


def test_the_command_line_trains_and_samples_it(tmp_path, capsys):
    folder, out = str(tmp_path / "model"), tmp_path / "out"
    make_xl_pipeline().save_pretrained(folder)
    command = ["train", "--model", folder, "--reward", "colorfulness", "--prompt", "a red three"]
    command += ["--num-epochs", "1", "--sample-num-steps", "3", "--output-dir", str(tmp_path / "run")]
    assert cli.main(command) == 0, capsys.readouterr().err
    lora = str(tmp_path / "run" / "lora")
    command = ["sample", "--model", folder, "--lora", lora, "--prompt", "a red three", "--count", "1"]
    assert cli.main([*command, "--output-dir", str(out)]) == 0, capsys.readouterr().err
    assert (out / "sample-000.png").is_file()


# -------------------------------------------------------------------------------------------- precision
@pytest.mark.parametrize(
    ("name", "precision", "upcast", "expected"),
    [
        ("xl", "fp16", True, torch.float32),
        ("xl", "fp16", False, torch.float16),
        ("xl", "bf16", True, torch.bfloat16),
        ("sd", "fp16", True, torch.float16),
    ],
)
def test_float16_leaves_out_the_vae_that_overflows(tmp_path, name, precision, upcast, expected):
    pipeline = MAKERS[name]()
    pipeline.vae.register_to_config(force_upcast=upcast)
    family = family_of(pipeline)
    config = make_config(tmp_path, mixed_precision=precision)
    prepare_policy(family.denoiser, family.frozen, config, True, torch.device("cpu"), family.keeps_float32)
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert pipeline.vae.dtype == expected
    assert {encoder.dtype for part, encoder in family.frozen.items() if part != "vae"} == {low}
    assert {p.dtype for n, p in pipeline.unet.named_parameters() if "lora_" not in n} == {low}


def test_autocast_does_not_touch_the_vae():
    family, generator = family_of(make_xl_pipeline()), generators(1)[0]
    images, latents = torch.rand(1, 3, 32, 32), torch.randn(1, 4, 8, 8, generator=generator)
    vae, scale = family.pipeline.vae, family.pipeline.vae.config.scaling_factor
    with torch.no_grad():
        encoded = vae.encode(images * 2 - 1).latent_dist.mean * scale
        decoded = (vae.decode(latents / scale).sample / 2 + 0.5).clamp(0, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(family.encode(images), encoded, atol=1e-6, rtol=0)
        torch.testing.assert_close(family.decode(latents), decoded, atol=1e-6, rtol=0)
        assert vae.decode(latents).sample.dtype == torch.bfloat16  # of itself, it would be touched


@pytest.mark.parametrize("way", ["encode", "decode_with_gradient"])
def test_autocast_is_switched_off_where_the_vae_is_and_not_where_images_are(way, monkeypatch):
    """Images come from the host: that autocast of another device is off there is of no use."""
    family = family_of(make_xl_pipeline())
    family.pipeline = SimpleNamespace(vae=SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(StableDiffusion, way, lambda family, tensor: torch.is_autocast_enabled("cuda"))
    before = torch.is_autocast_enabled("cuda")
    torch.set_autocast_enabled("cuda", True)
    try:
        assert not getattr(family, way)(torch.zeros(1))
    finally:
        torch.set_autocast_enabled("cuda", before)


# ------------------------------------------------------------------------------------------ completeness
def promised() -> dict[str, Any]:
    return {name: value for name, value in vars(Family).items() if name == "__init__" or name[0] != "_"}


@pytest.mark.parametrize("kind", list(dict.fromkeys(FAMILIES.values())), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [name for name in promised() if name != "without_checker"])
def test_a_familys_methods_take_what_the_protocol_says(kind, name):
    promise, kept = promised()[name], inspect.getattr_static(kind, name)
    assert isinstance(kept, property) == isinstance(promise, property)
    if not isinstance(promise, property):

        def parameters(method: Any) -> list[tuple[Any, ...]]:
            return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]

        assert parameters(kept) == parameters(promise)
