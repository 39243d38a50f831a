from typing import Any

import pytest
import torch
from diffusers import PixArtTransformer2DModel
from helpers import make_config, make_pipeline, stir_adapter
from peft import LoraConfig, get_peft_model_state_dict

from ddpo_lessons.app.demo import EVERYWHERE
from ddpo_lessons.families.lora import SummedConv2d, SummedLinear, use_summed_weights
from ddpo_lessons.families.policy import prepare_policy

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
