"""Rehearse a full-size run: `python -m benchmarks.speed.full_size`, some minutes and 6 GB.

Builds Stable Diffusion 1.5's shapes with random weights in bf16 at 512 pixels, and lets img2img DDPO take an
epoch of two images in several shapes of forward passes: sampling two at a time and training one, a group that
shares its first prediction, gradient accumulation. Then the first run's path to its end: checkpoint, resume,
saved LoRA, which plain diffusers loads. Where there is a GPU it runs there. Writes full_size.json, an
entry for each machine: for each run by how much old log-probs of sampling and of training's passes differ
(largest |exp(difference) - 1|), the first ratio's error, seconds and peak memory.
"""

import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from benchmarks.common import Row, machine, write_json
from ddpo_lessons import DDPOConfig, ImageDDPOTrainer
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.worlds import load_tiny_sd

RESULT = Path(__file__).with_suffix(".json")
SIDE = 512
# Two images of two actions each: four steps at strength 0.5.
SETTINGS: Row = {
    "num_epochs": 1, "sample_num_steps": 4, "sample_guidance_scale": 1.0, "mixed_precision": "bf16",
    "sample_batch_size": 2, "sample_num_batches_per_epoch": 1, "train_batch_size": 2, "image_grid_freq": 0,
}  # fmt: skip
RUNS: dict[str, Row] = {
    "equal passes": {"train_micro_batch_size": 2},
    "sampling 2, training 1": {"train_micro_batch_size": 1},
    "a group shares its first prediction": {"train_micro_batch_size": 2, "sample_group_size": 2},
    "gradient accumulation": {
        "train_micro_batch_size": 1, "train_batch_size": 1, "train_gradient_accumulation_steps": 2,
    },
    "guidance 5": {"train_micro_batch_size": 1, "sample_guidance_scale": 5.0},
}  # fmt: skip


def make_pipeline() -> StableDiffusionPipeline:
    """Make Stable Diffusion 1.5 with random weights in bf16, and tiny-sd's tokenizer."""
    torch.manual_seed(0)
    blocks = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    unet = UNet2DConditionModel(sample_size=SIDE // 8, cross_attention_dim=768, attention_head_dim=8)
    vae = AutoencoderKL(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=4, sample_size=SIDE,
        down_block_types=blocks[0], up_block_types=blocks[1],
    )  # fmt: skip
    encoder = CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        projection_dim=768,
    )  # fmt: skip
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
        set_alpha_to_one=False, steps_offset=1,
    )  # fmt: skip
    pipeline = StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(encoder), tokenizer=load_tiny_sd().tokenizer, unet=unet,
        scheduler=scheduler, safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    return pipeline.to(torch.bfloat16)


def device_name() -> str:
    """Return the machine's name, and its GPU's if it has one."""
    return f"{torch.cuda.get_device_name()}, {machine()}" if torch.cuda.is_available() else machine()


def peak_bytes() -> int:
    """Return the peak memory: on a GPU its own, else the process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1000


def brightness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """Return the brightness of each image as its reward."""
    return images.float().mean(dim=(1, 2, 3)) + torch.arange(len(images), device=images.device)


def photograph() -> tuple[str, torch.Tensor, Row]:
    """Return an image (3, SIDE, SIDE), the same one always."""
    return "a photo", torch.rand(3, SIDE, SIDE, generator=torch.Generator().manual_seed(0)), {}


def train(name: str, folder: str, pipeline: Any, **changes: Any) -> tuple[ImageDDPOTrainer, Row]:
    """Do the epochs that are left, and return what the first optimizer step recorded."""
    config = DDPOConfig(**{**SETTINGS, **RUNS[name], **changes}, output_dir=folder)
    trainer = ImageDDPOTrainer(config, brightness, photograph, pipeline, noise_strength=0.5)
    started = time.perf_counter()
    trainer.train()
    first = read_metrics(Path(folder), "step")[0]
    return trainer, {
        "run": name,
        "sampling_error": first["max_sampling_error"],
        "first_ratio_error": first["first_replay_max_ratio_error"],
        "seconds": round(time.perf_counter() - started, 1),
        "gigabytes": round(peak_bytes() / 1e9, 1),
    }


def rehearse(folder: str) -> Row:
    """Resume the first run for one more epoch, save its LoRA, and load that into plain diffusers."""
    name = next(iter(RUNS))
    trainer, _ = train(name, folder, make_pipeline(), num_epochs=2, resume_from="latest")
    trainer.save_pretrained(f"{folder}/lora")
    plain = make_pipeline()
    plain.load_lora_weights(f"{folder}/lora")
    drawn = plain(
        "a photo", num_inference_steps=1, guidance_scale=1.0, output_type="pt",
        generator=torch.Generator().manual_seed(0),
    ).images  # (1, 3, SIDE, SIDE)  # fmt: skip
    return {"resumed_epochs": trainer.epochs_done, "plain_diffusers": list(drawn.shape)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name in RUNS:
            rows.append(train(name, f"{folder}/{name}", make_pipeline())[1])
            print(rows[-1], flush=True)
        path = rehearse(f"{folder}/{next(iter(RUNS))}")
    found = {"machine": device_name(), "threads": torch.get_num_threads(), "runs": rows, **path}
    others = [run for run in json.loads(RESULT.read_text()) if run["machine"] != found["machine"]]
    write_json(RESULT, [*others, found])
