"""What `ddpo-lessons sample` does once its flags are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from diffusers import StableDiffusionPipeline
from diffusers.utils import logging
from PIL import Image, ImageOps
from tqdm.auto import tqdm

from ddpo_lessons.compat import LORA_FILE, load_pipeline
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import to_tensor
from ddpo_lessons.data.folders import fit, open_image
from ddpo_lessons.data.images import image_grid
from ddpo_lessons.families import family_of
from ddpo_lessons.families.stable_diffusion import vae_factor
from ddpo_lessons.rollout import img2img_rollout, sample_seed, text2img_rollout
from ddpo_lessons.run.runlog import METRICS
from ddpo_lessons.tiny.world import to_pil

if TYPE_CHECKING:
    from ddpo_lessons.app.cli import Sample

NOISE_STRENGTH = 0.2  # ImageDDPOTrainer's default


def run(arguments: Sample) -> int:
    """Sample, and write the images.

    Args:
        arguments: the command line's, checked.

    Returns:
        0.
    """
    if arguments.lora is not None and not (arguments.lora / LORA_FILE).is_file():
        raise ValueError(f"--lora {arguments.lora} holds no {LORA_FILE}: give the lora folder of a run")
    settings = run_settings(arguments.lora or Path(arguments.model))
    inputs = [open_image(file) for file in arguments.images]
    pipeline = load_pipeline(arguments.model)
    if arguments.lora is not None:
        _load_lora(pipeline, arguments.lora)
    pipeline.to(PartialState().device)
    images = _choose_inputs(inputs, image_size(pipeline), arguments.keep_size)
    _write_samples(arguments.output_dir, images, _draw(arguments, settings, pipeline, images))
    return 0


def image_size(pipeline: StableDiffusionPipeline) -> int:
    """Return the side of the square images, in pixels, that a pipeline makes."""
    return pipeline.unet.config.sample_size * vae_factor(pipeline.vae)


def run_settings(result: Path) -> DDPOConfig:
    """Return the config of the run whose folder holds `result`, or the defaults."""
    run_dir = result.parent
    if not (result.is_dir() and (run_dir / METRICS).is_file()):
        return DDPOConfig()
    return DDPOConfig.from_dict(json.loads((run_dir / "config.json").read_text(encoding="utf-8")))


def _load_lora(pipeline: StableDiffusionPipeline, folder: Path) -> None:
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # diffusers prints, layer by layer, what it raises too
    try:
        pipeline.load_lora_weights(folder, weight_name=LORA_FILE)
    except RuntimeError as error:
        raise ValueError(f"--lora {folder} does not fit the model: {error!s:.200}") from error
    finally:
        logging.set_verbosity(verbosity)


def _choose_inputs(inputs: list[Image.Image], size: int, keep_size: bool) -> list[torch.Tensor]:
    return [to_tensor(image) if keep_size else fit(image, size) for image in inputs]


def _draw(
    arguments: Sample,
    settings: DDPOConfig,
    pipeline: StableDiffusionPipeline,
    inputs: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Sample an image (3, H, W) for every input, or as many as were asked for without."""
    scale, strength = arguments.guidance_scale, arguments.noise_strength
    sampling: dict[str, Any] = {
        "num_inference_steps": arguments.steps or settings.sample_num_steps,
        "guidance_scale": settings.sample_guidance_scale if scale is None else scale,
        "eta": settings.sample_eta,
        "negative_prompt": settings.negative_prompts,
    }
    family = family_of(pipeline)  # remembers the prompt's embedding
    count = len(inputs) or arguments.count or 4
    size = 1 if arguments.keep_size else arguments.batch_size  # sizes may differ
    images: list[torch.Tensor] = []
    for first in tqdm(range(0, count, size), desc="sampling"):
        numbers = range(first, min(first + size, count))
        prompts = [arguments.prompt or ""] * len(numbers)
        seeds = [sample_seed(arguments.seed, number) for number in numbers]
        sampling["generator"] = [torch.Generator().manual_seed(seed) for seed in seeds]
        if inputs:
            batch = torch.stack([inputs[number] for number in numbers])
            noise = NOISE_STRENGTH if strength is None else strength
            images.extend(img2img_rollout(family, prompts, batch, noise, **sampling)[0].cpu())
        else:
            images.extend(text2img_rollout(family, prompts, **sampling)[0].cpu())
    return images


def _write_samples(folder: Path, inputs: list[torch.Tensor], images: list[torch.Tensor]) -> None:
    """Write each image, and a grid of all of them, beside the inputs where there are any."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        path = folder / f"sample-{number:03d}.png"
        to_pil(image).save(path)
        print(path)
    tiles = [tile for pair in zip(inputs, images, strict=True) for tile in pair] if inputs else images
    box = (max(tile.shape[2] for tile in tiles), max(tile.shape[1] for tile in tiles))
    padded = [to_tensor(ImageOps.pad(to_pil(tile), box, color="white")) for tile in tiles]
    image_grid(torch.stack(padded), columns=2 if inputs else min(4, len(tiles))).save(folder / "grid.png")
    print(f"{folder / 'grid.png'}{': left the input, right the result' if inputs else ''}")
