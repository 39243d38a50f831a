"""Are a compiled UNet's gradients right? `python -m benchmarks.compiled_gradient`.

Compares output and LoRA gradients, by block, between a UNet as it is and compiled: `aot_eager` traces it and
runs the same kernels, `inductor`, torch.compile's default, makes its own. Two UNets: tiny-sd's, and a smaller
one of random weights. Writes benchmarks/compiled_gradient.json. On the CPU inductor needs a C++ compiler, and
minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.utils import logging

from benchmarks.demo_table import machine
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.policy import prepare_policy
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


def make_unet(changes: dict[str, Any]) -> Any:
    """Make tiny-sd's UNet, or another with those settings changed, with an adapter that changes something."""
    pipeline = load_tiny_sd()
    torch.manual_seed(0)
    if changes:
        pipeline.unet = UNet2DConditionModel.from_config({**pipeline.unet.config, **changes})
    prepare_policy(pipeline, DDPOConfig(), use_lora=True, device=torch.device("cpu"))
    for name, parameter in pipeline.unet.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return pipeline.unet


def gradients(unet: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the output (B, C, h, w) and the gradient of its squares' sum, a vector for each block."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(BATCH, 4, 8, 8, generator=generator)
    embeds = torch.randn(BATCH, 16, unet.config.cross_attention_dim, generator=generator)
    output = unet(latents, torch.full((BATCH,), 500), encoder_hidden_states=embeds).sample
    trained = {name: p for name, p in unet.named_parameters() if p.requires_grad}
    own = dict(zip(trained, torch.autograd.grad(output.square().sum(), trained.values()), strict=True))
    joined = {b: torch.cat([g.flatten() for name, g in own.items() if name.startswith(b)]) for b in BLOCKS}
    return output.detach(), joined


def differences(changes: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return how far output and gradients of both backends are from the UNet's own, relative to its norms."""
    output, expected = gradients(make_unet(changes))
    apart: dict[str, dict[str, float]] = {}
    for backend in ("aot_eager", "inductor"):
        unet = make_unet(changes)
        unet.compile(backend=backend)
        compiled, own = gradients(unet)
        blocks = {b: ((own[b] - expected[b]).norm() / expected[b].norm()).item() for b in BLOCKS}
        apart[backend] = {"output": ((compiled - output).norm() / output.norm()).item(), **blocks}
        print(backend, *(f"{name} {value:.1e}" for name, value in apart[backend].items()))
    return apart


def main() -> None:
    """Compare, print and write."""
    logging.disable_progress_bar()
    apart = {"tiny-sd": differences({}), "smaller": differences(SMALLER)}
    RESULT.write_text(json.dumps({"machine": machine(), "relative_difference": apart}, indent=1) + "\n")


if __name__ == "__main__":
    main()
