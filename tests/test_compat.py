"""Scripts in the style of TRL's and imageddpo's documents run after changing their import lines."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionImg2ImgPipeline, StableDiffusionPipeline
from helpers import brightness, make_config, make_pipeline, noisy_image, red_three, stir_adapter
from safetensors.torch import load_file

from ddpo_lessons import compat, models
from ddpo_lessons.config import LORA_FILE
from ddpo_lessons.models.stable_diffusion import StableDiffusion
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.worlds import load_tiny_sd3

pytestmark = pytest.mark.usefixtures("one_thread")

TRL_SCRIPT = """
from dataclasses import dataclass, field

import numpy as np
from transformers import HfArgumentParser

from trl import DDPOConfig, DDPOTrainer, DefaultDDPOStableDiffusionPipeline


@dataclass
class ScriptArguments:
    pretrained_model: str = field(default="runwayml/stable-diffusion-v1-5", metadata={"help": "model"})
    pretrained_revision: str = field(default="main", metadata={"help": "revision"})
    hf_hub_model_id: str = field(default="ddpo-finetuned-stable-diffusion", metadata={"help": "repo"})
    use_lora: bool = field(default=True, metadata={"help": "whether to use LoRA"})


def prompt_fn():
    return np.random.choice(["a red three", "a blue four"]), {}


def dark_scorer():
    def score(images, prompts, metadata):
        pixels = (images * 255).round().clamp(0, 255)
        return -pixels.mean(dim=(1, 2, 3)), {}

    return score


seen = []


def image_outputs_logger(image_data, global_step, accelerate_logger):
    result = {}
    images, prompts, _, rewards, _ = image_data[-1]
    for i, image in enumerate(images):
        result[f"{prompts[i]:.25} | {rewards[i].item():.2f}"] = image.unsqueeze(0).float()
    seen.append((global_step, len(image_data), result))


parser = HfArgumentParser((ScriptArguments, DDPOConfig))
script_args, training_args = parser.parse_args_into_dataclasses()
training_args.project_kwargs = {
    "logging_dir": "./logs",
    "automatic_checkpoint_naming": True,
    "total_limit": 5,
    "project_dir": "./save",
}
pipeline = DefaultDDPOStableDiffusionPipeline(
    script_args.pretrained_model,
    pretrained_model_revision=script_args.pretrained_revision,
    use_lora=script_args.use_lora,
)
trainer = DDPOTrainer(
    training_args, dark_scorer(), prompt_fn, pipeline, image_samples_hook=image_outputs_logger
)
trainer.train()
trainer.save_pretrained("finetuned")
if training_args.push_to_hub:
    trainer.push_to_hub(script_args.hf_hub_model_id)
"""

TRL_FLAGS = """
--num_epochs=2 --train_gradient_accumulation_steps=1 --sample_num_steps=3 --sample_batch_size=2
--train_batch_size=1 --sample_num_batches_per_epoch=2 --per_prompt_stat_tracking=True
--per_prompt_stat_tracking_buffer_size=32 --train_learning_rate=1e-3 --train_clip_range=1e-2
--async_reward_computation=False --max_workers=2
"""

IMAGEDDPO_SCRIPT = """
import torch
from imageddpo import I2IDDPOStableDiffusionPipeline, ImageDDPOTrainer
from trl import DDPOConfig

NOISE_STRENGTH = 0.4
generator = torch.Generator().manual_seed(0)
numbers = iter(range(1000))


def image_loader():
    number = next(numbers) % 4
    image = torch.rand(3, 32, 32, generator=generator)
    return f"id:{number}", image, {"label": number, "original_image": image.clone()}


def reward_fn(images, prompts, metadata):
    before = torch.stack([entry["original_image"] for entry in metadata])
    return (images.to(before) - before).mean(dim=(1, 2, 3)), {}


validated = []


def validation_hook(pipeline, noise_strength, wandb_step):
    pipeline.vae.eval()
    pipeline.unet.eval()
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        latents = pipeline.vae.encode(2.0 * image - 1.0).latent_dist.sample()
        latents *= pipeline.vae.config.scaling_factor
        timesteps = torch.tensor([int(1000 * noise_strength)]).long()
        noisy_latents = pipeline.scheduler.add_noise(latents, torch.randn_like(latents), timesteps)
        ids = pipeline.tokenizer(
            [""],
            return_tensors="pt",
            padding="max_length",
            truncation=True,
            max_length=pipeline.tokenizer.model_max_length,
        ).input_ids
        embeds = pipeline.text_encoder(ids)[0]
        output = pipeline(
            prompt_embeds=embeds,
            negative_prompt_embeds=embeds,
            num_inference_steps=10,
            guidance_scale=0.0,
            output_type="pil",
            latents=noisy_latents,
            starting_step_ratio=noise_strength,
        )
    validated.append((noise_strength, wandb_step, output.images[0]))


config = DDPOConfig(
    num_epochs=2,
    mixed_precision="no",
    allow_tf32=True,
    sample_eta=1.0,
    train_timestep_fraction=NOISE_STRENGTH,
    sample_num_steps=10,
    sample_guidance_scale=0.0,
    sample_batch_size=2,
    sample_num_batches_per_epoch=2,
    train_batch_size=2,
    train_gradient_accumulation_steps=2,
    train_learning_rate=1e-3,
    per_prompt_stat_tracking=True,
    per_prompt_stat_tracking_min_count=2,
    project_kwargs={"project_dir": "./ddpo_logs/now/", "logging_dir": "./ddpo_logs/now/runs"},
)
pipeline = I2IDDPOStableDiffusionPipeline(pretrained_model_name=MODEL, use_lora=True)
trainer = ImageDDPOTrainer(
    config=config,
    reward_function=reward_fn,
    prompt_function=image_loader,
    sd_pipeline=pipeline,
    noise_strength=NOISE_STRENGTH,
    debug_hook=validation_hook,
)
trainer.train()
"""


# The snippet of imageddpo's README, block by block; its comments stand for what a user fills in.
README_SCRIPT = """
from imageddpo import ImageDDPOTrainer, I2IDDPOStableDiffusionPipeline
from trl import DDPOConfig

config = DDPOConfig(
    sample_num_steps=50,
    sample_guidance_scale=7.5,
    sample_eta=1.0,
    train_batch_size=4,
    train_use_8bit_adam=True,
    # ... other DDPOConfig parameters
)

# Initialize the pipeline
pipeline = I2IDDPOStableDiffusionPipeline.from_pretrained(
    "runwayml/stable-diffusion-v1-5",
    # ... pipeline initialization parameters
)

# Initialize the trainer
trainer = ImageDDPOTrainer(
    config=config,
    model=pipeline.unet,
    ref_model=None,
    accelerator=None,
    prompt_fn=your_prompt_function,
    reward_fn=your_reward_function,
    noise_strength=0.2,  # ImageDDPO specific parameter
    # ... other trainer parameters
)
"""


@pytest.fixture
def policy_prompts(monkeypatch):
    """The prompts that rollouts of the trainer are given."""
    prompts: list[str] = []
    condition = StableDiffusion.condition

    def listen(self: Any, texts: list[str], *settings: Any) -> Any:
        prompts.extend(texts)
        return condition(self, texts, *settings)

    monkeypatch.setattr(StableDiffusion, "condition", listen)
    return prompts


def run_script(text: str, **names: Any) -> dict[str, Any]:
    """Change a script's import lines, and nothing else, and run it; return its variables."""
    text, changed = re.subn(
        r"^from (trl|imageddpo) import", "from ddpo_lessons.compat import", text, flags=re.M
    )
    assert changed > 0
    # As a module, for dataclasses look up the module of their types.
    module = type(sys)("script")
    sys.modules["script"] = module
    vars(module).update(names)
    exec(compile(text, "script.py", "exec"), vars(module))
    return vars(module)


def config(folder: Path, **changes: Any) -> compat.DDPOConfig:
    return compat.DDPOConfig(**{**make_config(folder).to_dict(), "mixed_precision": "no", **changes})


def picture(pipeline: Any) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(5)
    return pipeline("a red three", num_inference_steps=2, generator=generator, output_type="np").images


# ------------------------------------------------------------------------------------------- scripts
def test_a_script_for_trl_runs(here, model, monkeypatch):
    flags = [*TRL_FLAGS.split(), f"--pretrained_model={model}"]
    monkeypatch.setattr(sys, "argv", ["aesthetics.py", *flags])
    script = run_script(TRL_SCRIPT)
    assert script["training_args"].exp_name == "aesthetics"  # as TRL names it
    assert script["training_args"].push_to_hub is False
    # 2 batches of 2 samples, minibatches of 1: 4 optimizer steps an epoch
    assert [(step, batches, len(images) in (1, 2)) for step, batches, images in script["seen"]] == [
        (4, 2, True),
        (8, 2, True),
    ]
    steps = read_metrics(here / "save", "step")
    assert len(steps) == 8
    assert steps[0]["first_replay_max_ratio_error"] < 1e-5
    lora = load_file(here / "finetuned" / LORA_FILE)
    assert (
        sum(tensor.abs().sum() for name, tensor in lora.items() if "lora_B" in name or "lora.up" in name) > 0
    )


def test_a_script_for_imageddpo_runs(here, model, policy_prompts):
    script = run_script(IMAGEDDPO_SCRIPT, MODEL=model)
    # one optimizer step an epoch; the hook comes before
    assert [(strength, step) for strength, step, _ in script["validated"]] == [(0.4, 0), (0.4, 1)]
    assert all(image.size == (32, 32) for *_, image in script["validated"])
    # 10 steps at strength 0.4 are 4, and all of them are trained on, though the fraction is 0.4 too
    assert script["trainer"].num_train_timesteps == 4
    # without guidance the policy sees no prompt; the prompts still tell the images apart
    assert policy_prompts == [""] * 8
    kept = script["trainer"].stat_tracker.state_dict()["rewards"]
    assert {key for key, _ in kept} == {f"id:{n}" for n in range(4)}
    steps = read_metrics(here / "ddpo_logs" / "now", "step")
    assert len(steps) == 2
    assert steps[0]["first_replay_max_ratio_error"] < 1e-5
    moved = [p for n, p in script["pipeline"].unet.named_parameters() if "lora_B" in n]
    assert sum(parameter.abs().sum() for parameter in moved) > 0


def test_under_guidance_the_policy_sees_the_prompt(here, model, policy_prompts):
    script = IMAGEDDPO_SCRIPT.replace("sample_guidance_scale=0.0", "sample_guidance_scale=2.0")
    script = script.replace("num_epochs=2", "num_epochs=1")
    run_script(script, MODEL=model)
    assert policy_prompts == ["id:0", "id:1", "id:2", "id:3"]


def test_a_fraction_that_leaves_no_step_is_refused(tmp_path, model):
    settings = config(tmp_path, sample_num_steps=10, train_timestep_fraction=0.05)
    pipeline = compat.I2IDDPOStableDiffusionPipeline(model)
    with pytest.raises(ValueError, match=r"train_timestep_fraction=0\.05"):
        compat.ImageDDPOTrainer(settings, brightness, noisy_image, pipeline, noise_strength=0.4)


def readme_script(model: str, *others: str) -> str:
    """Fill the README's comments in, as its reader has to, and take the model from a folder."""
    text = README_SCRIPT.replace("runwayml/stable-diffusion-v1-5", model)
    for name, filled in zip(("DDPOConfig", "pipeline initialization", "trainer"), others, strict=True):
        text = text.replace(f"# ... other {name} parameters", filled)
        text = text.replace(f"# ... {name} parameters", filled)
    return text


def test_the_snippet_of_imageddpos_readme_runs(here, model, monkeypatch):
    # 8-bit Adam is bitsandbytes', for CUDA alone; torch's Adam stands in, under its name
    adam = type(sys)("bitsandbytes")
    adam.optim = type(sys)("optim")
    adam.optim.AdamW8bit = torch.optim.AdamW
    monkeypatch.setitem(sys.modules, "bitsandbytes", adam)
    filled = "num_epochs=1, sample_batch_size=4, mixed_precision='no', train_learning_rate=1e-2"
    script = run_script(
        readme_script(model, filled, "use_lora=True", ""),
        your_prompt_function=noisy_image, your_reward_function=lambda *given: (brightness(*given), {}),
    )  # fmt: skip
    trainer = script["trainer"]
    assert trainer.sd_pipeline is script["pipeline"]
    assert (trainer.num_train_timesteps, trainer.noise_strength) == (10, 0.2)  # 0.2 of 50 steps
    trainer.train()
    # TRL's defaults: 2 batches an epoch, here of 4 samples, and steps of 4
    assert [row["step"] for row in read_metrics(trainer.config.run_dir, "step")] == [1, 2]
    assert sum(p.abs().sum() for n, p in script["pipeline"].unet.named_parameters() if "lora_B" in n) > 0


def test_a_batch_of_four_needs_four_samples_as_in_trl(here, model):
    """TRL's own check refuses train_batch_size=4 with its default sample_batch_size, 1, as well."""
    names = {"your_prompt_function": noisy_image, "your_reward_function": brightness}
    text = readme_script(model, "mixed_precision='no'", "", "").replace("train_use_8bit_adam=True,", "")
    with pytest.raises(ValueError, match="train_batch_size=4 does not divide the 2 samples"):
        run_script(text, **names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ref_model": object()}, "leave ref_model out: .* train_kl_coefficient"),
        ({"accelerator": object()}, "leave accelerator out: .* accelerator_kwargs"),
        ({"prompt_fn": None}, "give one of prompt_function and prompt_fn, not 0"),
        ({"reward_fn": None}, "give one of reward_function and reward_fn, not 0"),
        ({"model": None}, "give one of sd_pipeline and model, not 0"),
        ({"prompt_function": noisy_image}, "give one of prompt_function and prompt_fn, not 2"),
        ({"reward_function": brightness}, "give one of reward_function and reward_fn, not 2"),
        ({"sd_pipeline": make_pipeline()}, "give one of sd_pipeline and model, not 2"),
    ],
)
def test_arguments_that_imageddpo_never_had_are_refused(tmp_path, model, changes, message):
    pipeline = compat.I2IDDPOStableDiffusionPipeline.from_pretrained(model)
    given = {"model": pipeline.unet, "prompt_fn": noisy_image, "reward_fn": brightness, **changes}
    with pytest.raises(TypeError, match=message):
        compat.ImageDDPOTrainer(config=config(tmp_path), **given)


def test_a_unet_brings_the_pipeline_that_it_belongs_to(tmp_path, model):
    first, second = (compat.I2IDDPOStableDiffusionPipeline.from_pretrained(model) for _ in range(2))
    functions = {"prompt_fn": noisy_image, "reward_fn": brightness, "noise_strength": 1.0}
    for number, pipeline in enumerate((second, first)):
        trainer = compat.ImageDDPOTrainer(config(tmp_path / str(number)), model=pipeline.unet, **functions)
        assert trainer.sd_pipeline is pipeline
    with pytest.raises(ValueError, match="no I2IDDPOStableDiffusionPipeline of this program has it"):
        compat.ImageDDPOTrainer(config(tmp_path / "other"), model=make_pipeline().unet, **functions)


# ------------------------------------------------------------------------------------------ wrappers
def test_a_model_without_a_unet_is_refused(tmp_path):
    refused = pytest.raises(TypeError, match="trains UNets, and a StableDiffusion3Pipeline has none")
    with refused:
        compat.DefaultDDPOStableDiffusionPipeline("tiny-sd3")
    for kind, draw in ((compat.DDPOTrainer, red_three), (compat.ImageDDPOTrainer, noisy_image)):
        with refused:
            kind(config(tmp_path), brightness, draw, load_tiny_sd3())


def test_the_wrapper_shows_the_parts_of_its_pipeline(model):
    wrapper = compat.DefaultDDPOStableDiffusionPipeline(model)
    for part in ("unet", "vae", "text_encoder", "tokenizer", "scheduler"):
        assert getattr(wrapper, part) is getattr(wrapper.sd_pipeline, part)
    assert isinstance(wrapper.scheduler, DDIMScheduler)
    assert wrapper.use_lora
    with pytest.raises(AttributeError):
        wrapper.unet = None
    assert not compat.DefaultDDPOStableDiffusionPipeline(model, use_lora=False).use_lora


def test_the_wrapper_samples_as_the_pipeline_that_it_was_made_of(model):
    wrapper = compat.DefaultDDPOStableDiffusionPipeline(model)
    assert np.array_equal(picture(wrapper), picture(make_pipeline()))


@pytest.mark.parametrize("use_lora", [True, False])
def test_what_is_saved_opens_as_it_was_trained(tmp_path, model, use_lora):
    wrapper = compat.DefaultDDPOStableDiffusionPipeline(model, use_lora=use_lora)
    untrained = picture(wrapper)
    run = compat.DDPOTrainer(
        config(tmp_path / "run", train_learning_rate=0.05), brightness, red_three, wrapper
    )
    run.train()
    trained = picture(wrapper)
    assert np.abs(trained - untrained).max() > 1e-3
    run.save_pretrained(tmp_path / "by-trainer")
    run.save_model(tmp_path / "by-example")  # as TRL's own example ends
    wrapper.save_pretrained(tmp_path / "by-wrapper")
    for folder in ("by-trainer", "by-example", "by-wrapper"):
        again = compat.DefaultDDPOStableDiffusionPipeline(str(tmp_path / folder), use_lora=False)
        assert again.use_lora is use_lora  # weights that are there are trained on
        np.testing.assert_allclose(picture(again), trained, atol=1e-5)
        plain = StableDiffusionPipeline.from_pretrained(tmp_path / folder)
        np.testing.assert_allclose(picture(plain), untrained if use_lora else trained, atol=1e-5)


def test_training_goes_on_from_saved_lora_weights(tmp_path, model):
    wrapper = compat.DefaultDDPOStableDiffusionPipeline(model)
    compat.DDPOTrainer(config(tmp_path / "first"), brightness, red_three, wrapper)
    stir_adapter(wrapper.unet)
    wrapper.save_pretrained(tmp_path / "saved")
    again = compat.DefaultDDPOStableDiffusionPipeline(str(tmp_path / "saved"))
    run = compat.DDPOTrainer(config(tmp_path / "second"), brightness, red_three, again)
    names = [name for name in run.learner.trainable if "lora_B" in name]
    before = {n: p.clone() for n, p in again.unet.named_parameters() if n in names}
    assert sum(weights.abs().sum() for weights in before.values()) > 0
    run.train()
    after = dict(again.unet.named_parameters())
    assert any(not torch.equal(after[name], before[name]) for name in names)
    assert len(run.learner.trainable) == 2 * len(names)  # A and B of one adapter, not of two


@pytest.mark.parametrize("guidance_scale", [0.0, 3.0])
def test_i2i_denoises_as_diffusers_img2img(model, guidance_scale):
    wrapper = compat.I2IDDPOStableDiffusionPipeline(model)
    reference = StableDiffusionImg2ImgPipeline(
        **wrapper.sd_pipeline.components, requires_safety_checker=False
    )
    reference.set_progress_bar_config(disable=True)
    clean = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    prompt = "a red three" if guidance_scale else ""
    expected = reference(
        [prompt] * 2,
        image=clean,
        strength=0.6,
        num_inference_steps=5,
        guidance_scale=guidance_scale,
        generator=torch.Generator().manual_seed(1),
        output_type="pt",
    ).images
    wrapper.scheduler.set_timesteps(5)
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    noisy = wrapper.scheduler.add_noise(clean, noise, wrapper.scheduler.timesteps[2:3])
    settings = {"num_inference_steps": 5, "guidance_scale": guidance_scale, "starting_step_ratio": 0.6}
    # "a blue four" must not matter where guidance is off
    text = prompt or "a blue four"
    images = wrapper(text, latents=noisy, output_type="pt", **settings).images
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


def test_i2i_refuses_guidance_without_a_prompt(model):
    wrapper = compat.I2IDDPOStableDiffusionPipeline(model)
    with pytest.raises(ValueError, match="prompt_embeds"):
        wrapper(latents=torch.zeros(1, 4, 8, 8), guidance_scale=2.0)


# -------------------------------------------------------------------------------------------- config
def test_the_config_has_the_defaults_of_trl_where_scripts_count_on_them(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/my_script.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert compat.DDPOConfig().mixed_precision == "fp16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert compat.DDPOConfig().mixed_precision == "no"
    assert str(compat.DDPOConfig().run_dir) == str(Path("logs", "my_script"))
    assert "max_workers" not in compat.DDPOConfig().to_dict()


def test_the_trainer_has_what_scripts_reach_for(tmp_path, model):
    pipeline = compat.DefaultDDPOStableDiffusionPipeline(model)
    hook: Any = lambda *arguments: None  # noqa: E731
    trainer = compat.DDPOTrainer(config(tmp_path), brightness, red_three, pipeline, hook)
    assert (trainer.prompt_fn, trainer.reward_fn) == (red_three, brightness)
    assert trainer.image_samples_callback is hook
    assert (trainer.first_epoch, trainer.num_train_timesteps, trainer.stat_tracker) == (0, 3, None)
    assert trainer.optimizer is trainer.learner.optimizer
    assert trainer.step(0, 7) == 1  # TRL's count of optimizer steps


def test_async_rewards_are_refused():
    with pytest.raises(ValueError, match="async_reward_computation"):
        compat.DDPOConfig(async_reward_computation=True)


def test_train_takes_a_number_of_epochs(tmp_path, model):
    wrapper = compat.DefaultDDPOStableDiffusionPipeline(model)
    run = compat.DDPOTrainer(config(tmp_path, num_epochs=100), brightness, red_three, wrapper)
    run.train(epochs=1)
    assert run.epochs_done == 1
    assert [folder.name for folder in checkpoint.list_checkpoints(tmp_path)] == ["checkpoint-000001"]


def test_from_checkpoint_finds_the_run(tmp_path, model):
    def wrapper() -> compat.DefaultDDPOStableDiffusionPipeline:
        return compat.DefaultDDPOStableDiffusionPipeline(model)

    compat.DDPOTrainer(config(tmp_path), brightness, red_three, wrapper()).train()
    saved = tmp_path / "checkpoint-000001"
    assert compat.DDPOTrainer.from_checkpoint(saved, brightness, red_three, wrapper()).epochs_done == 1


# ----------------------------------------------------------------------------------------------- hub
def test_push_to_hub_uploads_what_is_saved(tmp_path, model, monkeypatch):
    calls: list[Any] = []

    class Hub:
        def __init__(self, token: str | None) -> None:
            calls.append(token)

        def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> Any:
            calls.append((repo_id, private, exist_ok))
            return type("Url", (), {"repo_id": f"me/{repo_id}"})

        def upload_folder(self, repo_id: str, folder_path: str) -> None:
            calls.append((repo_id, {path.name for path in Path(folder_path).iterdir()}))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    wrapper = compat.DefaultDDPOStableDiffusionPipeline(model)
    compat.DDPOTrainer(config(tmp_path), brightness, red_three, wrapper).push_to_hub("mine", private=True)
    token, made, (repo_id, files) = calls
    assert (token, made, repo_id) == (None, ("mine", True, True), "me/mine")
    assert {LORA_FILE, "model_index.json", "unet", "vae"} <= files


def test_a_model_that_cannot_be_had_is_one_error_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError) as caught:
        models.load_pipeline("nobody/nothing")
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in ("nobody/nothing", "HF_HOME", "hf download"))


def test_pickled_weights_are_refused(tmp_path, model):
    pipeline = StableDiffusionPipeline.from_pretrained(model)
    pipeline.save_pretrained(tmp_path, safe_serialization=False)
    assert list(tmp_path.glob("unet/*.bin"))
    with pytest.raises(RuntimeError, match="safetensors"):
        models.load_pipeline(tmp_path)
