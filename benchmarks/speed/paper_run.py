"""Work out full-size runs on paper: `python -m benchmarks.speed.paper_run` writes app/paper_run.json.

What a GPU would do is counted, never measured: bytes and FLOPs are those of `ddpo_lessons.app.budget`, times
are FLOPs over a share of a card's peak. What the host does is measured here, in CPU seconds of one core:
reading photographs, and the size of a grid of images on disk. Lesson 08 and its pictures read the file.
"""

import io
import json
import tempfile
import time
import timeit
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import matplotlib.cbook
import torch
from PIL import Image
from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection, ResNetConfig, ResNetModel

from benchmarks.common import ROOT, Row, machine, write_json
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.app import budget, memory
from ddpo_lessons.app.memory import CARDS, CUDA, GB, SHARE, UTILISATION, published, reward_bytes
from ddpo_lessons.app.presets import PRESETS
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.folders import fit, open_image
from ddpo_lessons.data.images import JPEG_QUALITY, image_grid, to_tensor
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.families import family_of
from ddpo_lessons.families.policy import prepare_policy
from ddpo_lessons.tiny.world import to_pil

RESULT = ROOT / "ddpo_lessons" / "app" / "paper_run.json"  # in the wheel, for lesson 08 reads it
SMOKE = {  # lesson 08's smoke run: `edit` with these fields
    "num_epochs": 10,
    "image_grid_freq": 1,
    "sample_num_steps": 20,
    "sample_num_batches_per_epoch": 16,
    "train_gradient_accumulation_steps": 8,
}
ONE_SAMPLE = {"train_batch_size": 1, "sample_forward_size": 1, "train_forward_size": 1}
RUNS: dict[str, tuple[str, Row]] = {  # name: preset, changed fields
    "smoke": ("edit", SMOKE),
    "edit": ("edit", {}),
    "camouflage": ("camouflage", {}),
}


# --------------------------------------------------------------------------------------- what a GPU does
def reward_flops() -> dict[str, float]:
    """Return FLOPs that the rewards of the presets take for one sample."""
    with torch.device("meta"):
        sizes: Row = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
        sizes |= {"num_attention_heads": 16, "patch_size": 14, "image_size": 224, "projection_dim": 768}
        clip = CLIPVisionModelWithProjection(CLIPVisionConfig(**sizes))
        sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "embedding_size": 64}
        resnet = ResNetModel(ResNetConfig(**sizes, layer_type="basic"))
        small, large = torch.zeros(1, 3, 224, 224), torch.zeros(1, 3, 512, 512)
        tokens = torch.zeros(1, 77, dtype=torch.long)
    text = published("sd15").text_encoder
    with torch.no_grad():
        image = budget.cost(lambda: clip(pixel_values=small)).flops
        distance = budget.cost(lambda: resnet(large)).flops
        sentence = budget.cost(lambda: text(tokens)).flops
    # edit: the result and its sentence, features of result and input; camouflage: result and input
    return {"edit": image + sentence + 2 * distance, "camouflage": 2 * image}


def estimate(run: str, gigabytes: int) -> tuple[DDPOConfig, budget.Budget]:
    """Return a run's settings, cut to a card, and its budget."""
    name, changes = RUNS[run]
    preset, algorithm = PRESETS[name], make_algorithm("ddpo")
    start, models = FromImages(preset.noise_strength or 1), reward_bytes(preset.reward)
    whole = DDPOConfig(**{**preset.config, **changes})
    config, _ = memory.fit(preset.model, whole, gigabytes, algorithm, start, models)
    return config, budget.estimate(published("sd15"), config, algorithm, start, models)


def rows(host: Row) -> list[Row]:
    """Return every run on every card."""
    flops, table, estimated = reward_flops(), list[Row](), cache(estimate)
    for run, (preset, _) in RUNS.items():
        for card, (gigabytes, tflops) in CARDS.items():
            config, paper = estimated(run, gigabytes)
            samples = config.sample_batch_size * config.sample_num_batches_per_epoch
            sampling, training = paper.seconds(tflops, UTILISATION)
            reward = samples * flops[preset] / (tflops / 2 * 1e12 * UTILISATION)
            drawn = samples // config.sample_group_size  # pictures that are read
            photos = drawn * host["photo_512px_s"]
            row = {"run": run, "card": card, "gpu_memory": gigabytes, "pairs": config.train_forward_size}
            row |= {"checkpointing": config.train_gradient_checkpointing, "peak_gb": paper.peak / 1e9}
            row |= {"epochs": config.num_epochs, "sampling_s": sampling, "training_s": training}
            row |= {"reward_s": reward, "photos_s": photos}
            hours = config.num_epochs * (sampling + training + reward + photos) / 3600
            table.append({**row, "hours": hours})
    return table


def training_peak(model: str, config: DDPOConfig, pairs: int, checkpointing: bool) -> int:
    """Return the bytes that a training pass makes."""
    size = {"train_batch_size": pairs, "train_forward_size": pairs}
    config = replace(config, **size, train_gradient_checkpointing=checkpointing)
    return budget.estimate(published(model), config, make_algorithm("ddpo"), FromNoise()).training.peak


def stations() -> list[Row]:
    """Return GB at the stations of an epoch of `edit`, and in training passes of several sizes."""
    config, paper = estimate("edit", 24)
    models = {"networks": paper.networks, "reward models": paper.reward}
    epoch = {**models, "the epoch's samples": paper.samples}
    family, autocast = family_of(published("sd15")), torch.bfloat16
    prepare_policy(family.denoiser, family.frozen, config, True, budget.META)
    latents, steps = torch.zeros(4, 4, 64, 64, device="meta"), torch.zeros(4, device="meta")
    with torch.no_grad():
        told = family.condition(["a cat"] * 4, "", config.sample_guidance_scale)
        predict = partial(family.predict, family.denoiser, latents, steps, told, config.sample_guidance_scale)
        step = budget.cost(predict, autocast).peak
        decoded = budget.cost(lambda: family.decode(latents), autocast).peak
    found = [("models loaded", models, 0), ("256 samples kept", epoch, 0)]
    found += [("denoise 4", epoch, step), ("decode 4", epoch, decoded)]
    again, two = (training_peak("sd15", config, 2, checkpointing) for checkpointing in (True, False))
    found.append(("train 2 pairs, checkpointing", epoch, again))
    found += [(f"train {pairs} pairs", epoch, two * pairs // 2) for pairs in (2, 4, 8, 16)]
    return [{"station": name, **parts, "activations": peak} for name, parts, peak in found]


def sdxl() -> Row:
    """Count Stable Diffusion XL's UNet at 1024 pixels."""
    config, unet = DDPOConfig(mixed_precision="bf16"), published("sdxl").unet
    parameters = sum(p.numel() for p in unet.parameters())
    trained = prepare_policy(unet, {}, config, use_lora=True, device=budget.META)
    return {
        "parameters": parameters,
        "lora": sum(p.numel() for p in trained.values()),
        "gb_bf16": parameters * 2 / GB,
        "guided_pair_gb": training_peak("sdxl", config, 1, checkpointing=False) / GB,
        "guided_pair_checkpointing_gb": training_peak("sdxl", config, 1, checkpointing=True) / GB,
    }


def sd35() -> list[Row]:
    """Count the preset `sd35` in passes of one sample, with and without T5 and checkpointing."""
    table, reward = list[Row](), reward_bytes(PRESETS["sd35"].reward)
    fields = {**PRESETS["sd35"].config, "sample_batch_size": 1, "sample_num_batches_per_epoch": 256}
    for has_t5, checkpointing in product((True, False), repeat=2):
        pipeline = published("sd35_medium")
        if not has_t5:
            pipeline.text_encoder_3 = None
        config = DDPOConfig(**{**fields, "train_gradient_checkpointing": checkpointing, **ONE_SAMPLE})
        algorithm = make_algorithm(PRESETS["sd35"].algorithm)
        paper = budget.estimate(pipeline, config, algorithm, FromNoise(), reward)
        row = {"t5": has_t5, "checkpointing": checkpointing, "networks_gb": paper.networks / GB}
        row |= {"reward_gb": paper.reward / GB, "activations_gb": (paper.peak - paper.resident) / GB}
        row["samples_gb"] = paper.samples / GB
        table.append({**row, "peak_gb": paper.peak / GB, "card_gb": (paper.peak / GB + CUDA) / SHARE})
    return table


def flux() -> list[Row]:
    """Count the preset `flux` in passes of one sample, on one card and shared by eight."""
    preset, table = PRESETS["flux"], list[Row]()
    for resolution, cards in product((512, 1024), (1, 8)):
        shares = {
            name: preset.config[name] * preset.config["sample_batch_size"] // cards
            for name in ("sample_num_batches_per_epoch", "train_gradient_accumulation_steps")
        }
        one = {**shares, **ONE_SAMPLE, "sample_batch_size": 1, "train_gradient_checkpointing": True}
        pipeline, reward = published("flux_dev"), reward_bytes(preset.reward)
        algorithm, start = make_algorithm(preset.algorithm), FromNoise(resolution=resolution)
        paper = budget.estimate(pipeline, DDPOConfig(**{**preset.config, **one}), algorithm, start, reward)
        frozen = sum(p.nbytes for p in pipeline.transformer.parameters() if not p.requires_grad)
        elsewhere = (frozen + 2 * paper.trained + paper.moments) * (1 - 1 / cards)
        row = {"resolution": resolution, "cards": cards, "samples": one["sample_num_batches_per_epoch"]}
        row |= {"networks_gb": (paper.networks - elsewhere) / GB, "samples_gb": paper.samples / GB}
        row |= {"reward_gb": paper.reward / GB, "activations_gb": (paper.peak - paper.resident) / GB}
        peak = (paper.peak - elsewhere) / GB
        table.append({**row, "peak_gb": peak, "card_gb": (peak + CUDA) / SHARE})
    return table


# ------------------------------------------------------------------------------------- what the host does
def host() -> Row:
    """Measure photographs that are read, and a grid of images that is written."""
    photo = Image.open(matplotlib.cbook.get_sample_data("grace_hopper.jpg")).convert("RGB")  # 512 x 606
    found: Row = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        for name, size in (("photo_12mp_s", (3000, 4000)), ("photo_512px_s", (512, 606))):
            file = Path(folder, f"{name}.jpg")
            to_pil(with_grain(to_tensor(photo.resize(size, Image.Resampling.BICUBIC)))).save(file, quality=90)
            timer = timeit.Timer(lambda file=file: fit(open_image(file), 512), timer=time.process_time)
            found[name] = min(timer.repeat(repeat=3, number=1))
    tile = to_tensor(photo.crop((0, 47, 512, 559)))
    grid = image_grid(torch.stack([with_grain(tile, seed) for seed in range(32)]), columns=8)
    for name in ("png", "jpeg"):
        buffer = io.BytesIO()
        grid.save(buffer, name, quality=JPEG_QUALITY)  # PNG has none
        found[f"grid_{name}_mb"] = buffer.tell() / 1e6
    return found


def with_grain(image: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Add the noise that a camera would (3, H, W): an enlarged picture has none, and is read too fast."""
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    return (image + 0.02 * noise).clamp(0, 1)


def main() -> None:
    """Write the file."""
    measured = host()
    found = {
        "command": "python -m benchmarks.speed.paper_run",
        "host": measured,
        "memory": stations(),
        "sdxl": sdxl(),
        "sd35": sd35(),
        "flux": flux(),
        "runs": rows(measured),
    }
    write_json(RESULT, json.loads(json.dumps(found), parse_float=lambda number: round(float(number), 4)))


if __name__ == "__main__":
    main()
