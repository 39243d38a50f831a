"""Make a cache of the model hub in which the models of lesson 13 have random weights.

Every loader then runs as it does with a network: each finds the published name in the cache. Only Stable
Diffusion's tokenizer and both CLIPs' are those of tiny-sd.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel, ResNetConfig, ResNetModel

from benchmarks.common import Row
from benchmarks.speed.paper_run import published
from ddpo_lessons.cli.presets import PRESETS
from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.rewards.learned import CLIP_MODEL, PERCEPTUAL_MODEL

EVALUATOR = "laion/CLIP-ViT-B-32-laion2B-s34B-b79K"  # lesson 13's
TOKENIZER = CHECKPOINTS["tiny-sd"] / "tokenizer"
# From the config.json of each model on the hub.
CLIPS: dict[str, Row] = {
    CLIP_MODEL: {
        "projection_dim": 768,
        "text": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
        "vision": {
            "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
            "num_hidden_layers": 24, "patch_size": 14,
        },
    },
    EVALUATOR: {
        "projection_dim": 512,
        "text": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8},
        "vision": {
            "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
            "num_hidden_layers": 12, "patch_size": 32,
        },
    },
}  # fmt: skip
RESNET_18: Row = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}


def write_models(cache: Path, device: str = "cpu") -> None:
    """Write Stable Diffusion 1.5, two CLIPs and a ResNet, 4.5 GB, into a folder that is to be `HF_HUB_CACHE`.

    The weights are drawn on a device, on which all of them fit one after another.
    """
    torch.manual_seed(0)
    pipeline = published("sd15", device, torch.float16)
    pipeline.save_pretrained(_snapshot(cache, PRESETS["restore"].model))
    end = json.loads((TOKENIZER / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]["<|endoftext|>"]
    for name, shape in CLIPS.items():
        parts = {f"{part}_config": shape[part] for part in ("text", "vision")}
        parts["text_config"] |= {"eos_token_id": end}  # whose state is the text's
        config = CLIPConfig(projection_dim=shape["projection_dim"], **parts)
        _write(cache, name, partial(CLIPModel, config), device, crop_size=224)
        for file in TOKENIZER.iterdir():
            (_snapshot(cache, name) / file.name).write_bytes(file.read_bytes())
    _write(cache, PERCEPTUAL_MODEL, partial(ResNetModel, ResNetConfig(**RESNET_18)), device)


def _write(cache: Path, name: str, make: Callable[[], Any], device: str, **preprocessor: Any) -> None:
    """Write a network and the settings of its preprocessor."""
    with torch.device(device):
        network = make()
    folder = _snapshot(cache, name)
    network.save_pretrained(folder)
    settings = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25], "size": 224, **preprocessor}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings), "utf-8")


def _snapshot(cache: Path, name: str) -> Path:
    """Return the folder in which the hub's client looks for a model's only revision."""
    model, revision = cache / f"models--{name.replace('/', '--')}", "0" * 40
    (model / "refs").mkdir(parents=True, exist_ok=True)
    (model / "refs" / "main").write_text(revision, "utf-8")
    folder = model / "snapshots" / revision
    folder.mkdir(parents=True, exist_ok=True)
    return folder
