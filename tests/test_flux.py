"""FLUX.1 and Kontext with random weights: against plain diffusers, and in runs."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxImg2ImgPipeline, FluxKontextPipeline, FluxPipeline, FluxTransformer2DModel
from fake_device import fake_device
from helpers import (
    FLUX_LENGTH,
    PROMPTS,
    T5_LENGTH,
    check_drawn_as_by_diffusers,
    flow_trainer,
    images_of,
    make_config,
    make_flux_pipeline,
    make_kontext_pipeline,
    make_pipeline,
    make_sd3_pipeline,
    noise_of,
    printed_error,
    run_command,
)
from PIL import Image
from torch import nn

from ddpo_lessons.algorithms.awm import AWM
from ddpo_lessons.algorithms.draft import DRaFT
from ddpo_lessons.algorithms.flow_grpo import FlowGRPO
from ddpo_lessons.algorithms.nft import NFT
from ddpo_lessons.cli.presets import PRESETS
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages, FromNoise, WithImages
from ddpo_lessons.image import to_tensor
from ddpo_lessons.models import Family, family_of, load_pipeline
from ddpo_lessons.models.flux import Flux, FluxKontext, places_of, to_latents, to_tokens
from ddpo_lessons.models.policy import loaded_dtype, prepare_policy, read_lora
from ddpo_lessons.rollout import SamplingSettings, img2img_rollout, sample_seed, text2img_rollout
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def packed(pipeline: Any, latents: torch.Tensor) -> torch.Tensor:
    """Cut latents as diffusers does."""
    return pipeline._pack_latents(latents, *latents.shape)


# ------------------------------------------------------------------------------------------------ tokens
def test_tokens_are_those_of_diffusers_and_become_latents_again():
    latents = noise_of(2, 4, 6, 10)
    tokens = to_tokens(latents)
    assert tokens.shape == (2, 15, 16)
    assert torch.equal(tokens, packed(FluxPipeline, latents))
    assert torch.equal(to_latents(tokens, 6), latents)
    expected = FluxPipeline._prepare_latent_image_ids(2, 3, 5, "cpu", torch.float32)
    assert torch.equal(places_of(latents, 0), expected)
    assert places_of(latents, 1)[7].tolist() == [1, 1, 2]


# ------------------------------------------------------------------------------- against plain diffusers
def test_conditioning_is_that_of_diffusers():
    pipeline = make_flux_pipeline()
    prompts, pooled, _ = pipeline.encode_prompt(list(PROMPTS), max_sequence_length=FLUX_LENGTH)
    family = family_of(pipeline)
    for _ in range(2):  # the second time from memory
        conditioning = family.condition(PROMPTS, "", 3.5)
        torch.testing.assert_close(conditioning.pop("guidance"), torch.full((4,), 3.5))
        torch.testing.assert_close(conditioning, {"prompt_embeds": prompts, "pooled_embeds": pooled})


@pytest.mark.parametrize(("guidance", "tokens"), [(True, 512), (False, 256)])
def test_t5_reads_as_many_tokens_as_the_model_was_trained_with(guidance, tokens):
    pipeline = make_flux_pipeline(guidance=guidance)
    pipeline.tokenizer_2.model_max_length = 10_000  # of a tokenizer that names none
    assert family_of(pipeline).condition(["a"], "", 1.0)["prompt_embeds"].shape == (1, tokens, 48)


def test_a_prompt_that_t5_cannot_hold_is_cut_aloud_and_one_that_clip_cannot_hold_is_not():
    pipeline, long = make_flux_pipeline(), "a red three on a blue background " * 10
    with pytest.warns(UserWarning, match=f"the text encoder reads {FLUX_LENGTH} tokens"):
        family_of(pipeline).condition([long], "", 1.0)
    pipeline.tokenizer_2.model_max_length = 512
    family_of(pipeline).condition([long], "", 1.0)


def test_guidance_that_is_an_input_takes_no_negative_prompt():
    with pytest.raises(ValueError, match="negative_prompts='a blue four': guidance is an input"):
        family_of(make_flux_pipeline()).condition(["a red three"], "a blue four", 3.5)


@pytest.mark.parametrize("size", [(32, 32), (32, 64)])
@pytest.mark.parametrize("takes_guidance", [True, False])
@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_text2img_by_the_ode_draws_what_plain_diffusers_draws(size, takes_guidance, guidance):
    """Guidance is told ("dev"), or led from the negative prompt ("schnell", which never needs it)."""
    pipeline, prompts = make_flux_pipeline(guidance=takes_guidance), ["a red three", "a digit", ""]
    noise = noise_of(3, 4, size[0] // 4, size[1] // 4)
    settings = SamplingSettings(num_inference_steps=4, guidance_scale=guidance, eta=0.0)
    drawn = text2img_rollout(pipeline, prompts, settings, initial_noise=noise, size=size)
    check_drawn_as_by_diffusers(
        drawn, pipeline, prompts, settings, noise, to_tokens, height=size[0], width=size[1],
        negative_prompt=None if takes_guidance else [""] * 3, max_sequence_length=FLUX_LENGTH,
        **{"guidance_scale" if takes_guidance else "true_cfg_scale": guidance},
    )  # fmt: skip
    conditioning = family_of(pipeline).condition(prompts, "", guidance)
    assert drawn[1].is_guided == (guidance > 1 and not takes_guidance)
    assert ("guidance" in conditioning) == takes_guidance


def test_the_larger_the_image_the_later_its_noise_goes():
    """σ̄ = e^μ / (e^μ + 1/s - 1) at s = 1/2, with μ from 0.5 at 4 tokens to 1.15 at 64."""
    family = family_of(make_flux_pipeline())
    for size, tokens in ((None, 16), ((32, 32), 16), ((64, 64), 64)):
        shift = math.exp(0.5 + 0.65 * (tokens - 4) / 60)
        schedule = family.schedule(4, size=size)
        assert schedule.timesteps[2].item() == pytest.approx(1000 * shift / (shift + 1), rel=1e-5)
    schnell = family_of(make_flux_pipeline(guidance=False)).schedule(4, size=(64, 64))
    assert schnell.timesteps.tolist() == [1000, 750, 500, 250]


@pytest.mark.parametrize(("steps", "strength", "actions"), [(5, 0.6, 3), (10, 0.25, 3), (4, 1.0, 4)])
@pytest.mark.parametrize("takes_guidance", [True, False])
def test_img2img_by_the_ode_draws_what_plain_diffusers_draws(takes_guidance, steps, strength, actions):
    """From the latents that we start with: those of diffusers are a draw of the posterior, ours its mean."""
    pipeline, prompts = make_flux_pipeline(guidance=takes_guidance), ["a red three", "a digit"]
    images, noise = images_of(2, 32, 48), noise_of(2, 4, 8, 12)
    settings = SamplingSettings(num_inference_steps=steps, guidance_scale=1.0, eta=0.0)
    drawn = img2img_rollout(pipeline, prompts, images, strength, settings, initial_noise=noise)
    _, trajectory = drawn
    assert trajectory.num_steps == actions
    with torch.no_grad():
        mean = pipeline.vae.encode(images * 2 - 1).latent_dist.mean
    sigma = trajectory.timesteps[0, 0] / 1000
    start = (1 - sigma) * (mean - 0.1159) * 0.3611 + sigma * noise
    torch.testing.assert_close(trajectory.latents[:, 0], start, atol=1e-5, rtol=0)
    plain = FluxImg2ImgPipeline(**pipeline.components)
    plain.set_progress_bar_config(disable=True)
    check_drawn_as_by_diffusers(
        drawn, plain, prompts, settings, start, to_tokens, image=images, strength=strength, height=32,
        width=48, guidance_scale=1.0, max_sequence_length=FLUX_LENGTH,
    )  # fmt: skip


@pytest.mark.parametrize("takes_guidance", [True, False])
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_kontext_edits_as_plain_diffusers_does(takes_guidance, guidance):
    pipeline = make_flux_pipeline(guidance=takes_guidance, kind=FluxKontextPipeline)
    prompts, images, noise = ["make it red", "remove it"], images_of(2, 32, 48), noise_of(2, 4, 8, 12)
    settings = SamplingSettings(num_inference_steps=4, guidance_scale=guidance, eta=0.0)
    edited = text2img_rollout(pipeline, prompts, settings, initial_noise=noise, images=images)
    without = text2img_rollout(pipeline, prompts, settings, initial_noise=noise, size=(32, 48))
    for drawn, image in ((edited, images), (without, None)):
        check_drawn_as_by_diffusers(
            drawn, pipeline, prompts, settings, noise, to_tokens, image=image, height=32, width=48,
            negative_prompt=None if takes_guidance else ["", ""], max_sequence_length=FLUX_LENGTH,
            max_area=32 * 48, _auto_resize=False,
            **{"guidance_scale" if takes_guidance else "true_cfg_scale": guidance},
        )  # fmt: skip
    assert (edited[0] - without[0]).abs().max() > 1e-3


def test_images_are_refused_by_models_that_take_none():
    for pipeline in (make_flux_pipeline(), make_pipeline()):
        with pytest.raises(TypeError, match=f"a {type(pipeline).__name__} has no input for images"):
            text2img_rollout(pipeline, [""], images=images_of(1, 32, 32))


@pytest.mark.parametrize("size", [(36, 32), (32, 44)])
def test_sizes_that_make_no_whole_tokens_are_refused(size):
    for pipeline in (make_flux_pipeline(), make_kontext_pipeline()):
        with pytest.raises(ValueError, match="multiples of 8"):
            text2img_rollout(pipeline, [""], size=size)
        with pytest.raises(ValueError, match="multiples of 8"):
            img2img_rollout(pipeline, [""], images_of(1, *size), 0.5)


# ---------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("algorithm", [AWM(), NFT(decay_rate=0.4), DRaFT()])
@pytest.mark.parametrize(
    ("make", "start"), [(make_flux_pipeline, FromNoise()), (make_kontext_pipeline, WithImages())]
)
def test_other_algorithms_take_steps_that_change_the_adapter(tmp_path, algorithm, make, start):
    trainer = flow_trainer(tmp_path, algorithm, start, make())
    before = {name: weight.detach().clone() for name, weight in trainer.learner.trainable.items()}
    trainer.train()
    assert any(not torch.equal(before[name], weight) for name, weight in trainer.learner.trainable.items())
    assert all("lora_" in name for name in before)
    records = read_metrics(tmp_path, "step")
    assert len(records) == 2
    assert records[0]["grad_norm"] > 0


def test_what_trains_without_log_probs_is_told_the_guidance_that_sampled(tmp_path):
    """Guidance is in the conditioning: the forward process asks for a scale of 1, and means this policy."""
    trainer = flow_trainer(tmp_path, AWM(), sample_guidance_scale=3.5)
    seen: list[torch.Tensor] = []
    trainer.family.denoiser.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["guidance"]), with_kwargs=True
    )
    trainer.train()
    assert {value for guidance in seen for value in guidance.tolist()} == {3.5}


def test_an_epoch_has_the_noise_levels_of_its_images(tmp_path):
    """And a run from noise those of its resolution."""
    trainer = flow_trainer(tmp_path / "images", FlowGRPO(), FromImages(1.0))
    trainer.contexts.prompt_function = lambda: ("", torch.rand(3, 64, 64), {})
    _, trajectory, _ = trainer.sampler.sample(0, trainer.contexts.draw(0))
    expected = trainer.family.schedule(5, size=(64, 64)).timesteps
    assert torch.equal(trajectory.schedule.timesteps, expected)
    assert not torch.equal(expected, trainer.family.schedule(5).timesteps)
    square = flow_trainer(tmp_path / "noise", FlowGRPO(), FromNoise(resolution=64))
    _, trajectory, _ = square.sampler.sample(0, square.contexts.draw(0))
    assert trajectory.final_latents.shape == (2, 4, 16, 16)
    assert torch.equal(trajectory.schedule.timesteps, expected)
    assert square._identity["resolution"] == 64


def test_a_run_tells_kontext_the_image_of_each_context(tmp_path):
    trainer = flow_trainer(tmp_path, FlowGRPO(), WithImages(), make_kontext_pipeline())
    contexts = trainer.contexts.draw(0)
    _, trajectory, _ = trainer.sampler.sample(0, contexts)
    images = torch.stack([contexts[number].image for number in range(2)])
    assert not torch.equal(images[0], images[1])
    assert torch.equal(trajectory.conditioning["image_latents"], trainer.family.encode(images))


def test_what_is_wrong_with_a_size_is_said_before_sampling(tmp_path):
    with pytest.raises(ValueError, match="resolution=44: use multiples of 8"):
        flow_trainer(tmp_path, FlowGRPO(), FromNoise(resolution=44))
    trainer = flow_trainer(tmp_path, FlowGRPO(), WithImages(resolution=64), make_kontext_pipeline())
    with pytest.raises(ValueError, match=r"resolution=64, but the images have \{\(32, 32\)\}"):
        trainer.contexts.draw(0)
    sides = iter([32, 48, 32, 48])
    trainer = flow_trainer(tmp_path, FlowGRPO(), WithImages(), make_kontext_pipeline())
    trainer.contexts.prompt_function = lambda: ("", torch.rand(3, 32, next(sides)), {})
    with pytest.raises(ValueError, match=r"sizes \[\(32, 32\), \(32, 48\)\]: resize them to one"):
        trainer.contexts.draw(0)


@pytest.mark.parametrize("make", [make_sd3_pipeline, make_flux_pipeline, make_kontext_pipeline])
def test_plain_diffusers_loads_the_adapter_and_draws_the_trained_pictures(tmp_path, make):
    """Of other layers than the usual ones, which `test_gpu.py` has of every family."""
    targets, length, to_plain = ("to_q", "add_k_proj", "to_out.0", "ff.net.2"), T5_LENGTH, torch.clone
    if make is not make_sd3_pipeline:
        targets = ("attn.to_q", "attn.add_k_proj", "ff.net.2", "proj_mlp")
        length, to_plain = FLUX_LENGTH, to_tokens
    changes = {"train_lora_target_modules": targets, "train_lora_alpha": 8}
    start = WithImages() if make is make_kontext_pipeline else None
    trainer = flow_trainer(tmp_path / "run", FlowGRPO(), start, make(), train_learning_rate=1e-2, **changes)
    trainer.train()
    trainer.save_pretrained(tmp_path / "lora")
    noise, images = noise_of(1, 4, 8, 8), None if start is None else images_of(1, 32, 32)
    _, trajectory = text2img_rollout(
        trainer.pipeline,
        ["a red three"],
        SamplingSettings(num_inference_steps=3, guidance_scale=4.0, eta=0.0),
        initial_noise=noise,
        images=images,
    )

    def draw(pipeline: Any) -> torch.Tensor:
        editing = {} if images is None else {"image": images, "max_area": 32 * 32, "_auto_resize": False}
        return pipeline(
            prompt="a red three", num_inference_steps=3, guidance_scale=4.0, height=32, width=32,
            latents=to_plain(noise), output_type="latent", max_sequence_length=length, **editing,
        ).images  # fmt: skip

    plain, trained = make(), to_plain(trajectory.final_latents)
    assert (draw(plain) - trained).abs().max() > 1e-3
    plain.load_lora_weights(tmp_path / "lora")
    torch.testing.assert_close(draw(plain), trained, atol=1e-5, rtol=0)


# --------------------------------------------------------------------------------------- parts, precision
def test_pipelines_have_their_family(tmp_path):
    kinds = {FluxPipeline: Flux, FluxImg2ImgPipeline: Flux, FluxKontextPipeline: FluxKontext}
    for kind, family in kinds.items():
        found = family_of(make_flux_pipeline(kind=kind))
        assert type(found) is family
        assert isinstance(found, Family)
        assert set(found.frozen) == {"vae", "text_encoder", "text_encoder_2"}
        assert found.keeps_float32 == {"text_encoder_2"}


def test_the_adapter_of_flux_devs_preset_has_so_many_weights():
    """A block of two streams: eight layers 3072 × 3072, four of width 12,288; two of one: q, k and v."""
    with torch.device("meta"):
        transformer = FluxTransformer2DModel(num_layers=1, num_single_layers=2)  # instead of 19 and 38
    config = DDPOConfig(**PRESETS["flux"].config)
    trained = prepare_policy(transformer, {}, config, use_lora=True, device=torch.device("meta"))
    square, wide = 64 * (3072 + 3072), 64 * (3072 + 12288)
    assert sum(p.numel() for p in trained.values()) == 8 * square + 4 * wide + 2 * 3 * square


def test_on_a_device_nothing_crosses_or_waits_in_a_denoising_step_or_a_group_of_pairs(tmp_path):
    """As many transfers with more steps, and with smaller groups; `test_device.py` has the other models."""

    def crossings(name: str, **changes: Any) -> int:
        with fake_device() as traffic:
            shape = {"sample_num_steps": 3, "train_batch_size": 2, "train_micro_batch_size": 2}
            trainer = flow_trainer(
                tmp_path / name, FlowGRPO(), WithImages(), make_kontext_pipeline(), **{**shape, **changes}
            )
            trainer.step(0)
            traffic.clear()
            trainer.step(1)
            return sum(sum(counter.values()) for counter in vars(traffic).values())

    usual = crossings("usual")
    assert crossings("groups", train_micro_batch_size=1) == usual
    assert crossings("long", sample_num_steps=5, train_micro_batch_size=4) == usual


def test_kontext_runs_on_the_meta_device():
    """So that its memory can be estimated with the family's own code: nothing looks at values."""
    family = family_of(make_kontext_pipeline())
    for network in (family.denoiser, *family.frozen.values()):
        network.to("meta")
    images = torch.empty(2, 3, 64, 32, device="meta")
    conditioning = family.condition(["a", "b"], "", 3.5, (64, 32), images)
    latents = torch.empty(2, *family.latents_shape((64, 32)), device="meta")
    out = family.predict(family.denoiser, latents, torch.empty(2, device="meta"), conditioning, 3.5)
    assert out.shape == latents.shape == (2, 4, 16, 8)
    assert family.decode(out).shape == images.shape


def test_a_run_in_bf16_loads_all_networks_in_it_and_the_adapter_exactly(tmp_path, monkeypatch):
    """As FLUX.1 has to: 17 billion parameters. What is trained itself stays float32."""
    folder, lora = tmp_path / "model", str(tmp_path / "lora")
    make_flux_pipeline().save_pretrained(folder)
    settings = {"mixed_precision": "bf16"}
    assert loaded_dtype(make_config(tmp_path, **settings)) == torch.bfloat16
    assert loaded_dtype(make_config(tmp_path, **settings, train_use_lora=False)) == torch.float32
    assert loaded_dtype(make_config(tmp_path)) == torch.float32

    def load() -> Any:
        return load_pipeline(folder, dtype=torch.bfloat16)

    with monkeypatch.context() as patch:  # no network is ever whole in float32
        patch.setattr(nn.Module, "to", lambda network, *_: network)
        family = family_of(load())
    networks = [family.denoiser, *family.frozen.values()]
    assert {p.dtype for network in networks for p in network.parameters()} == {torch.bfloat16}
    start = FromNoise(resolution=32)  # a saved pipeline has forgotten its size
    trainer = flow_trainer(tmp_path / "run", FlowGRPO(), start, load(), **settings)
    trainer.train()
    trainer.save_pretrained(lora)
    again = flow_trainer(tmp_path / "again", FlowGRPO(), start, load(), train_lora_from=lora, **settings)
    assert {weight.dtype for weight in again.learner.trainable.values()} == {torch.float32}
    for name, weight in again.learner.trainable.items():
        assert torch.equal(weight, trainer.learner.trainable[name])


# ------------------------------------------------------------------------------------- the command line
TINY = shlex.split("""
train --num-epochs 1 --sample-num-steps 3 --sample-batch-size 2 --sample-num-batches-per-epoch 1
--train-batch-size 2 --reward colorfulness --algorithm flow_grpo --resolution 32 --mixed-precision bf16
""")


def pixels(file: Path) -> torch.Tensor:
    with Image.open(file) as image:
        return to_tensor(image)


@pytest.mark.slow
def test_the_command_line_trains_and_samples_from_noise_and_from_images(tmp_path):
    """With the run's resolution; the picture is that of plain diffusers with the LoRA weights."""
    make_flux_pipeline().save_pretrained(tmp_path / "model")
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (48, 40), "red").save(photos / "red.png")
    starts = {"text": ("--prompt", "a red three"), "images": ("--images", photos, "--noise-strength", 0.7)}
    for name, words in starts.items():
        run, out = tmp_path / name, tmp_path / f"{name} drawn"
        run_command(*TINY, "--model", tmp_path / "model", *words, "--output-dir", run)
        run_command("sample", "--run", run, *(["--count", 1] if name == "text" else []), "--output-dir", out)
        assert {pixels(file).shape for file in out.glob("[rs]*.png")} == {(3, 32, 32)}
    plain = load_pipeline(tmp_path / "model", dtype=torch.bfloat16)
    read_lora(plain, tmp_path / "text" / "lora")
    generator = torch.Generator().manual_seed(sample_seed(0, 0))
    noise = torch.randn(1, 4, 8, 8, generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        drawn = plain(
            "a red three", num_inference_steps=3, guidance_scale=5.0, height=32, width=32, output_type="pt",
            latents=packed(plain, noise), max_sequence_length=FLUX_LENGTH,
        ).images[0]  # fmt: skip
    # Plain diffusers keeps its latents in bfloat16, and we in float32.
    assert (pixels(tmp_path / "text drawn" / "sample-000.png") - drawn).abs().max() < 0.03


def test_the_command_line_gives_kontext_images_beside_the_noise(tmp_path, capsys):
    folder, images = tmp_path / "model", tmp_path / "images"
    make_kontext_pipeline().save_pretrained(folder)
    held_out = tmp_path / "held out"
    for place in (images, held_out):
        place.mkdir()
        Image.new("RGB", (32, 32), "red").save(place / "red.png")
    flags = (*TINY, "--model", folder, "--images", images, "--prompt", "make it blue", "--output-dir")
    run_command(*flags, tmp_path / "run", "--validation", held_out, "--validation-freq", 1)
    about = json.loads((tmp_path / "run" / "config.json").read_text())["run"]
    assert (about["start"], about["resolution"]) == ("noise with images", 32)
    assert len(read_metrics(tmp_path / "run", "validation")) == 2
    run_command("sample", "--run", tmp_path / "run", "--output-dir", tmp_path / "edited")
    assert pixels(tmp_path / "edited" / "red.png").shape == (3, 32, 32)
    strength = ("--noise-strength", "0.5")
    run_command(*flags, tmp_path / "other", *strength, status=2)
    assert "a FluxKontextPipeline edits images" in printed_error(capsys)
