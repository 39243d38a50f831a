from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import PixArtTransformer2DModel
from helpers import (
    brightness,
    check_resume,
    make_config,
    make_flux_pipeline,
    make_pipeline,
    make_sd3_pipeline,
    make_xl_pipeline,
    red_three,
    stir_adapter,
)
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file

from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.algorithms.flow_grpo import FlowGRPO
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.lessons.demo import EVERYWHERE
from ddpo_lessons.models.lora import SummedConv2d, SummedLinear, use_summed_weights
from ddpo_lessons.models.policy import LORA_FILE, prepare_policy
from ddpo_lessons.trainer import DDPOTrainer, Trainer
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def adapted_unet(summed: bool) -> Any:
    """Make a UNet with an adapter in all kinds of layers, one of stride 2 among them, that is no zero."""
    unet = make_pipeline().unet.requires_grad_(False)
    targets = [*EVERYWHERE, "downsamplers.0.conv"]
    config = LoraConfig(r=4, lora_alpha=6, init_lora_weights="gaussian", target_modules=targets)
    if summed:
        use_summed_weights(config)
    torch.manual_seed(0)
    unet.add_adapter(config)
    stir_adapter(unet)
    return unet


def output(unet: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(3, 4, 8, 8, generator=generator)
    embeds = torch.randn(3, 5, unet.config.cross_attention_dim, generator=generator)
    return unet(latents, torch.tensor([10, 500, 900]), encoder_hidden_states=embeds).sample


def gradient(unet: Any) -> torch.Tensor:
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(output(unet).square().sum(), trained)])


def test_the_same_function_with_the_same_gradient_as_pefts():
    ours, pefts = adapted_unet(summed=True), adapted_unet(summed=False)
    kinds = [type(module) for module in ours.modules()]
    assert SummedLinear in kinds
    assert SummedConv2d in kinds
    assert list(get_peft_model_state_dict(ours)) == list(get_peft_model_state_dict(pefts))
    torch.testing.assert_close(output(ours), output(pefts), rtol=1e-5, atol=1e-5)
    expected = gradient(pefts)
    assert ((gradient(ours) - expected).norm() / expected.norm()).item() < 1e-5


def test_switched_off_fused_and_scaled_as_pefts():
    base, unet = make_pipeline().unet, adapted_unet(summed=True)
    adapted = output(unet)
    unet.disable_adapters()
    assert torch.equal(output(unet), output(base))
    unet.enable_adapters()
    assert torch.equal(output(unet), adapted)
    unet.fuse_lora()
    torch.testing.assert_close(output(unet), adapted, rtol=1e-5, atol=1e-5)
    unet.unfuse_lora()
    unet.set_adapters("default", weights=0.0)
    torch.testing.assert_close(output(unet), output(base), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("precision", "summed"), [("no", True), ("bf16", False)])
def test_only_where_the_sum_is_exact_enough(tmp_path, precision, summed):
    pipeline = make_pipeline()
    config = make_config(tmp_path, mixed_precision=precision)
    prepare_policy(pipeline.unet, {}, config, use_lora=True, device=torch.device("cpu"))
    assert any(isinstance(module, SummedLinear) for module in pipeline.unet.modules()) == summed


def test_a_network_that_takes_no_adapter_is_refused(tmp_path):
    sizes = {"num_attention_heads": 1, "attention_head_dim": 8, "num_layers": 1, "cross_attention_dim": 8}
    network = PixArtTransformer2DModel(**sizes, caption_channels=8, sample_size=8, norm_num_groups=1)
    with pytest.raises(ValueError, match=r"no adapter to a PixArtTransformer2DModel.*train_use_lora=False"):
        prepare_policy(network, {}, make_config(tmp_path), True, torch.device("cpu"))


# ------------------------------------------------------------------- adapters that the model comes with
ENCODERS = {
    "sd": (make_pipeline, ["text_encoder"]),
    "xl": (make_xl_pipeline, ["text_encoder", "text_encoder_2"]),
    "sd3": (make_sd3_pipeline, ["text_encoder", "text_encoder_2"]),
    "flux": (make_flux_pipeline, ["text_encoder"]),
}


def write_lora_of_all(folder: Path, model: str) -> Path:
    """Write a LoRA of the denoiser and of text encoders, as many that people share are."""
    make, encoders = ENCODERS[model]
    pipeline = make()
    denoiser = "unet" if hasattr(pipeline, "unet") else "transformer"
    layers = {}
    for part in (denoiser, *encoders):
        network = getattr(pipeline, part)
        names = [*DDPOConfig.train_lora_target_modules] if part == denoiser else ["q_proj", "v_proj"]
        network.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=names))
        stir_adapter(network)
        layers[f"{part}_lora_layers"] = get_peft_model_state_dict(network)
        layers[f"{part}_lora_adapter_metadata"] = network.peft_config["default"].to_dict()
    pipeline.save_lora_weights(folder, **layers)
    return folder


def draw(pipeline: Any) -> torch.Tensor:
    settings = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "pt"}
    return pipeline("a red three", generator=torch.Generator().manual_seed(0), **settings).images


@pytest.mark.parametrize("model", ENCODERS)
def test_the_adapters_of_text_encoders_are_saved_too(model, tmp_path):
    folder, make = write_lora_of_all(tmp_path / "start", model), ENCODERS[model][0]
    is_flow = model in ("sd3", "flux")
    eta = {"sample_eta": 0.7} if is_flow else {}
    config = make_config(tmp_path / "run", train_lora_from=str(folder), **eta)
    algorithm = FlowGRPO() if is_flow else DDPO()
    trainer = Trainer(config, brightness, red_three, trained := make(), algorithm=algorithm)
    trainer.train()
    trainer.save_pretrained(tmp_path / "lora")
    saved, began = (load_file(place / LORA_FILE) for place in (tmp_path / "lora", folder))
    assert saved.keys() == began.keys()
    of_encoders = [name for name in began if name.startswith("text_encoder")]
    assert len(of_encoders) >= 8
    assert all(torch.equal(saved[name], began[name]) for name in of_encoders)  # and not trained
    plain, bare = make(), make()
    plain.load_lora_weights(tmp_path / "lora")
    torch.testing.assert_close(draw(plain), draw(trained), rtol=0, atol=1e-4)
    assert (draw(bare) - draw(trained)).abs().max() > 1e-2


def test_a_resume_needs_the_text_encoder_s_adapter(tmp_path):
    """A checkpoint has the UNet's alone, so the folder must be there, or the run be refused."""
    folder = write_lora_of_all(tmp_path / "start", "sd")

    def run(run_folder: Path, **changes: Any) -> Trainer:
        config = make_config(run_folder, train_lora_from=str(folder), **changes)
        return DDPOTrainer(config, brightness, red_three, make_pipeline())

    check_resume(run, tmp_path)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"frozen_with_an_adapter: \['text_encoder'\] there, \[\] here"):
        run(tmp_path / "parts", num_epochs=3, resume_from="latest")


def test_a_resume_without_the_folder_of_its_first_adapter_is_exact(tmp_path):
    first = DDPOTrainer(make_config(tmp_path / "first"), brightness, red_three, make_pipeline())
    stir_adapter(first.learner.denoiser)
    first.save_pretrained(folder := tmp_path / "start")

    def train(run: str, epochs: int, **changes: Any) -> None:
        settings = {"num_epochs": epochs, "train_lora_from": str(folder), "train_learning_rate": 0.01}
        config = make_config(tmp_path / run, **settings, **changes)
        DDPOTrainer(config, brightness, red_three, make_pipeline()).train()

    train("whole", 2)
    train("parts", 1)
    folder.rename(tmp_path / "elsewhere")
    train("parts", 2, resume_from="latest")
    whole, parts = (checkpoint.read(tmp_path / run / checkpoint.name_of(2))[0] for run in ("whole", "parts"))
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)


def test_a_lora_of_a_text_encoder_alone_is_refused(tmp_path):
    pipeline = make_pipeline()
    pipeline.text_encoder.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj"]))
    weights = get_peft_model_state_dict(pipeline.text_encoder)
    pipeline.save_lora_weights(tmp_path / "lora", text_encoder_lora_layers=weights)
    config = make_config(tmp_path / "run", train_lora_from=str(tmp_path / "lora"))
    with pytest.raises(ValueError, match="a text encoder alone: give a LoRA of the UNet2DConditionModel"):
        DDPOTrainer(config, brightness, red_three, make_pipeline())


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda p: p.set_adapters("style", 0.5), r"UNet has a weight of 0.5.*set_adapters\('style', 1.0\)"),
        (lambda p: p.fuse_lora(), r"UNet is fused into its weights.*unload_lora_weights\(\)"),
        (lambda p: p.disable_lora(), r"UNet is switched off: call pipeline.enable_lora\(\)"),
        (lambda p: p.fuse_lora(components=["text_encoder"]), "text_encoder is fused into its weights"),
    ],
)
def test_an_adapter_that_is_not_in_use_as_it_is_is_refused(prepare, message, tmp_path):
    pipeline = make_pipeline()
    pipeline.load_lora_weights(write_lora_of_all(tmp_path / "start", "sd"), adapter_name="style")
    prepare(pipeline)
    with pytest.raises(ValueError, match=message):
        DDPOTrainer(make_config(tmp_path / "run"), brightness, red_three, pipeline)


def test_the_remedies_for_such_adapters_help(tmp_path):
    """After each of them the run trains, and plain diffusers draws what was trained with what was saved."""
    start = write_lora_of_all(tmp_path / "start", "sd")

    def loaded(fused: bool) -> Any:
        pipeline = make_pipeline()
        pipeline.load_lora_weights(start, adapter_name="style")
        if fused:
            pipeline.fuse_lora()
            pipeline.unload_lora_weights()
        return pipeline

    weighed = loaded(fused=False)
    weighed.set_adapters("style", 0.5)
    weighed.set_adapters("style", 1.0)
    runs = (("fused", loaded(fused=True), loaded(fused=True)), ("weighed", weighed, make_pipeline()))
    for name, pipeline, plain in runs:
        trainer = DDPOTrainer(make_config(tmp_path / name), brightness, red_three, pipeline)
        trainer.train()
        trainer.save_pretrained(tmp_path / f"{name}-lora")
        plain.load_lora_weights(tmp_path / f"{name}-lora")
        torch.testing.assert_close(draw(plain), draw(pipeline), rtol=0, atol=1e-4)
    config = make_config(tmp_path / "full", train_use_lora=False)
    DDPOTrainer(config, brightness, red_three, loaded(fused=True)).train()
    assert len(read_metrics(tmp_path / "full", "epoch")) == 1
