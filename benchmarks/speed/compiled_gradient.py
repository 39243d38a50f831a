"""Are a compiled UNet's gradients right? `python -m benchmarks.speed.compiled_gradient`.

Compares output and LoRA gradients, by block, between a UNet as it is and compiled: `aot_eager` traces it and
runs the same kernels, `inductor`, torch.compile's default, makes its own. UNets: tiny-sd's in float32 and in
bfloat16, and a smaller one of random weights. Writes compiled_gradient.json, with what
`torch_compile` makes of each. On the CPU inductor needs a C++ compiler, and minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.utils import logging

from benchmarks.common import machine, write_json
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.families import family_of
from ddpo_lessons.families.policy import prepare_policy
from ddpo_lessons.run.compiled import WrongGradientsError, check_gradients
from ddpo_lessons.tiny import load_tiny_sd

RESULT = Path(__file__).with_suffix(".json")
BLOCKS = ("down_blocks", "mid_block", "up_blocks")
BATCH = 4
SMALLER = {
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": 2,
    "norm_num_groups": 8,
}
# name: (settings of the UNet that are changed, mixed_precision)
UNETS = {"tiny-sd": ({}, "no"), "tiny-sd, bfloat16": ({}, "bf16"), "smaller": (SMALLER, "no")}


def make_unet(changes: dict[str, Any], precision: str) -> Any:
    """Make tiny-sd's UNet, or another with those settings changed, with an adapter that changes something."""
    pipeline = load_tiny_sd()
    torch.manual_seed(0)
    if changes:
        pipeline.unet = UNet2DConditionModel.from_config({**pipeline.unet.config, **changes})
    config = DDPOConfig(mixed_precision=precision)
    frozen, device = family_of(pipeline).frozen, torch.device("cpu")
    prepare_policy(pipeline.unet, frozen, config, use_lora=True, device=device)
    for name, parameter in pipeline.unet.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return pipeline.unet


def gradients(unet: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the output (B, C, h, w) and the gradient of its squares' sum, by the name of the weight."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(BATCH, 4, 8, 8, generator=generator)
    embeds = torch.randn(BATCH, 16, unet.config.cross_attention_dim, generator=generator)
    timesteps = torch.full((BATCH,), 500)
    with torch.autocast("cpu", torch.bfloat16, enabled=unet.dtype == torch.bfloat16):
        told = embeds.to(unet.dtype)
        output = unet(latents.to(unet.dtype), timesteps, encoder_hidden_states=told).sample.float()
    trained = {name: p for name, p in unet.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(output.square().sum(), trained.values())
    return output.detach(), dict(zip(trained, found, strict=True))


def apart(compiled: torch.Tensor, own: torch.Tensor) -> float:
    return ((compiled - own).norm() / own.norm()).item()


def block(gradient: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Join the gradients of a block into one vector."""
    return torch.cat([g.flatten() for weight, g in gradient.items() if weight.startswith(name)])


def differences(changes: dict[str, Any], precision: str) -> dict[str, dict[str, float]]:
    """Return how far output and gradients of both backends are from the UNet's own, relative to its norms."""
    output, own = gradients(make_unet(changes, precision))
    found: dict[str, dict[str, float]] = {}
    for backend in ("aot_eager", "inductor"):
        unet = make_unet(changes, precision)
        unet.compile(backend=backend, dynamic=False)
        compiled_output, compiled = gradients(unet)
        blocks = {name: apart(block(compiled, name), block(own, name)) for name in BLOCKS}
        found[backend] = {"output": apart(compiled_output, output), **blocks, "refused": False}
        try:
            check_gradients(list(own), list(compiled.values()), list(own.values()))
        except WrongGradientsError:
            found[backend]["refused"] = True  # what `torch_compile` does
        print(backend, *(f"{name} {value:.1e}" for name, value in found[backend].items()))
    return found


def main() -> None:
    logging.disable_progress_bar()
    found = {name: differences(*unet) for name, unet in UNETS.items()}
    write_json(RESULT, {"machine": machine(), "relative_difference": found})


if __name__ == "__main__":
    main()
