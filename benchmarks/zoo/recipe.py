"""The recipe of tiny-zoo: `python -m benchmarks.zoo.recipe` remakes the checkpoint of the world of animals.

Stages: the autoencoder, text encoder and UNet together by plain denoising
(v-prediction, Salimans and Ho 2022, arXiv 2202.00512, section 4; cosine schedule of Nichol and Dhariwal 2021,
arXiv 2102.09672, section 3.2), and three classifiers. A stage that was stopped goes on where it last saved,
to the same result: every step draws its random numbers from its own seed. At the end comes the table that the
model card shows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file
from torch import nn
from tqdm.auto import tqdm
from transformers import CLIPTokenizer

from ddpo_lessons.tiny.recipe import (
    make_scheduler,
    make_text_encoder,
    markdown,
    save_checkpoint,
    write_tokenizer,
)
from ddpo_lessons.zoo import world
from ddpo_lessons.zoo.judges import (
    NAMES,
    Classifier,
    Judge,
    RewardModel,
    SecondJudge,
    Spoil,
    add_noise,
    blur_and_add_noise,
    cut_out,
    named,
    verdicts,
)

SAVE_SECONDS = 180  # a stage that is stopped loses at most so much
VAE_STEPS, VAE_BATCH = 6000, 32
CLASSIFIER_STEPS, CLASSIFIER_BATCH = 1500, 64
UNET_STEPS, UNET_BATCH = 9_000, 32
UNET_BANK = 40_000  # pictures that the denoiser is trained on
WIDTH = 64  # of a token's embedding
WORDS = ("a", "an", "animal", "by", "on", "background", *world.ANIMALS, *world.GROUNDS)
WORDS += tuple(name.lower() for name in world.ARTISTS)
GUIDANCE_SCALE = 3.0  # of the pictures in the table
CLASSIFIERS: dict[str, tuple[type[Classifier], Spoil]] = {
    "reward_model": (RewardModel, blur_and_add_noise),
    "judge": (Judge, add_noise),
    "second_judge": (SecondJudge, cut_out),
}


# ----------------------------------------------------------------------------------------------- parts
def make_vae() -> AutoencoderKL:
    """Make the untrained autoencoder: images (3, 64, 64) to latents (4, 16, 16)."""
    return AutoencoderKL(
        block_out_channels=(16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=world.IMAGE_SIZE,
        mid_block_add_attention=False,
    )


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Make a CLIP tokenizer that knows each word of this world as one token; any other text is spelt.

    Byte-pair encoding as it is trained, on a text of each word once, until every word is one token.

    Args:
        folder: an empty folder for vocab.json and merges.txt.

    Returns:
        The tokenizer.
    """
    letters = [chr(c) for c in range(ord("!"), ord("~") + 1)]
    tokens, merges = letters + [letter + "</w>" for letter in letters], []
    spelt = [[*word[:-1], word[-1] + "</w>"] for word in WORDS]
    while counts := Counter(pair for pieces in spelt for pair in itertools.pairwise(pieces)):
        left, right = counts.most_common(1)[0][0]
        merges.append(f"{left} {right}")
        tokens.append(left + right)
        spelt = [merge(pieces, left, right) for pieces in spelt]
    return write_tokenizer(folder, tokens, merges)


def merge(pieces: list[str], left: str, right: str) -> list[str]:
    """Join the neighbours left and right wherever they stand, from the left."""
    joined: list[str] = []
    for piece in pieces:
        if joined and joined[-1] == left and piece == right:
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def make_unet() -> UNet2DConditionModel:
    """Make the untrained UNet on latents (4, 16, 16); attention where they are 8x8 and 4x4."""
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(48, 96, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        norm_num_groups=16,
    )


# ------------------------------------------------------------------------------------------- training
def train(
    name: str,
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    steps: int,
    folder: Path,
    learning_rate: float,
    ema_decay: float | None = None,
) -> None:
    """Take the optimizer steps of a stage, from where it last saved; AdamW, one cycle of the learning rate.

    Args:
        name: of the stage, and of its file in `folder`.
        model: what is trained; at the end it holds the average of its weights, if there is one.
        loss_of: maps a step's number to its loss, and seeds what it draws by that number.
        steps: number of optimizer steps.
        folder: where the stage saves.
        learning_rate: the highest one.
        ema_decay: of the average of the weights; None for none.
    """
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.05
    )
    ema = EMAModel(model.parameters(), decay=ema_decay or 0.0, use_ema_warmup=True, foreach=True)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    file, first = folder / f"{name}.pt", 0
    if file.is_file():
        state = torch.load(file, weights_only=True)
        first = state.pop("step")
        for key, part in parts.items():
            part.load_state_dict(state[key])
    saved = time.monotonic()
    model.train()
    for step in (bar := tqdm(range(first, steps), desc=name, initial=first, total=steps, mininterval=20)):
        torch.manual_seed(step)
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if ema_decay:
            ema.step(model.parameters())
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        if time.monotonic() - saved > SAVE_SECONDS or step + 1 == steps:
            state = {key: part.state_dict() for key, part in parts.items()} | {"step": step + 1}
            torch.save(state, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
            saved = time.monotonic()
    if ema_decay:
        ema.copy_to(model.parameters())
    model.eval()


def edges(images: torch.Tensor) -> torch.Tensor:
    """Return the differences of neighbouring pixels, (N, 3, H - 1, W - 1) twice, joined as channels."""
    return torch.cat(
        [images[:, :, 1:, 1:] - images[:, :, 1:, :-1], images[:, :, 1:, 1:] - images[:, :, :-1, 1:]], dim=1
    )


def train_vae(vae: AutoencoderKL, steps: int, folder: Path) -> None:
    """Train the autoencoder: absolute error of pixels and of edges, and 3e-6 times the KL to N(0, 1).

    Afterwards `scaling_factor` makes the latents' standard deviation 1.
    """

    def loss_of(step: int) -> torch.Tensor:
        images = world.draw_pictures(VAE_BATCH, step).images * 2 - 1  # (B, 3, 64, 64)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(images).latent_dist
            decoded = vae.decode(posterior.sample()).sample
        decoded = decoded.float()
        error = (decoded - images).abs().mean() + (edges(decoded) - edges(images)).abs().mean()
        return error + 3e-6 * posterior.kl().float().mean()

    train("autoencoder", vae, loss_of, steps, folder, 2e-3)
    latents = encode(vae, world.draw_pictures(1000, steps).images)
    vae.register_to_config(scaling_factor=1 / latents.std().item())


@torch.no_grad()
def encode(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    """Encode images (N, 3, 64, 64) in [0, 1] to unscaled latents (N, 4, 16, 16)."""
    return torch.cat([vae.encode(batch * 2 - 1).latent_dist.mean for batch in images.split(64)])


def train_classifier(model: Classifier, spoil: Spoil, first_seed: int, steps: int, folder: Path) -> None:
    """Train a classifier on fresh pictures, seeds `first_seed` onwards, by the sum of its cross-entropies."""

    def loss_of(step: int) -> torch.Tensor:
        pictures = world.draw_pictures(CLASSIFIER_BATCH, first_seed + step)
        logits = model(spoil(pictures.images))
        return torch.stack(
            [F.cross_entropy(*pair) for pair in zip(logits, pictures.labels.T, strict=True)]
        ).sum()

    train(type(model).__name__, model, loss_of, steps, folder, 2e-3)


def describe(description: world.Description, rng: random.Random) -> str:
    """Say what a picture shows, often only part of it, and in one case of ten nothing at all."""
    if rng.random() < 0.1:
        return ""
    return world.make_prompt(
        description.animal if rng.random() < 0.85 else None,
        description.artist if rng.random() < 0.85 else None,
        description.ground if rng.random() < 0.85 else None,
    )


def make_bank(vae: AutoencoderKL, count: int) -> tuple[torch.Tensor, list[world.Description]]:
    """Return latents (N, 4, 16, 16), standard deviation 1, of pictures of seen pairs, and what these show."""
    latents, descriptions = [], []
    for part in range(math.ceil(count / 500)):
        pictures = world.draw_pictures(500, 2_000_000 + part, world.SEEN)
        latents.append(encode(vae, pictures.images))
        descriptions += pictures.descriptions
    return torch.cat(latents) * vae.config.scaling_factor, descriptions


def train_denoiser(pipeline: StableDiffusionPipeline, bank: int, steps: int, folder: Path) -> None:
    """Train UNet and text encoder together on the mean squared error of v; keep an average of the weights.

    Timesteps are drawn as 1000 u^0.6 with u uniform: where noise hides the picture, only the prompt can say
    which animal it is.
    """
    latents, descriptions = make_bank(pipeline.vae, bank)
    scheduler = pipeline.scheduler
    pipeline.unet.to(memory_format=torch.channels_last)
    model = nn.ModuleList([pipeline.unet, pipeline.text_encoder])

    def loss_of(step: int) -> torch.Tensor:
        rng = random.Random(step)
        rows = rng.choices(range(len(latents)), k=UNET_BATCH)
        clean = latents[rows]  # (B, 4, 16, 16)
        prompts = [describe(descriptions[row], rng) for row in rows]
        tokens = pipeline.tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
        timesteps = (scheduler.config.num_train_timesteps * torch.rand(UNET_BATCH) ** 0.6).long()
        noise = torch.randn_like(clean)
        noisy = scheduler.add_noise(clean, noise, timesteps)
        predicted = pipeline.unet(noisy, timesteps, pipeline.text_encoder(tokens)[0]).sample
        return F.mse_loss(predicted, scheduler.get_velocity(clean, noise, timesteps))

    train("denoiser", model, loss_of, steps, folder, 1e-3, ema_decay=0.999)
    pipeline.unet.to(memory_format=torch.contiguous_format)  # safetensors stores no other layout


def scaled(count: int, scale: float) -> int:
    """Return a share of a number of steps or pictures, 2 at least."""
    return max(2, round(count * scale))


def make_pipeline(scale: float, folder: Path) -> StableDiffusionPipeline:
    """Train autoencoder, text encoder and UNet; only the denoiser never sees the left-out pairs."""
    torch.manual_seed(0)
    vae = make_vae()
    train_vae(vae, scaled(VAE_STEPS, scale), folder)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as empty:
        tokenizer = make_tokenizer(Path(empty))
    pipeline = StableDiffusionPipeline(
        vae=vae,
        text_encoder=make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=make_unet(),
        scheduler=make_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    train_denoiser(pipeline, scaled(UNET_BANK, scale), scaled(UNET_STEPS, scale), folder)
    return pipeline


def make_classifiers(scale: float, folder: Path) -> dict[str, Classifier]:
    """Train the reward model and both judges, on pictures of disjoint seeds."""
    made = {}
    for index, (name, (kind, spoil)) in enumerate(CLASSIFIERS.items()):
        torch.manual_seed(index)
        made[name] = kind()
        train_classifier(made[name], spoil, 10_000_000 * (index + 1), scaled(CLASSIFIER_STEPS, scale), folder)
    return made


# ----------------------------------------------------------------------------------------- evaluation
def generate(pipeline: StableDiffusionPipeline, prompts: list[str], seed: int) -> torch.Tensor:
    """Generate a picture of every prompt with plain diffusers, 20 steps; (N, 3, 64, 64) in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    images = [
        pipeline(
            prompts[first : first + 50],
            num_inference_steps=20,
            guidance_scale=GUIDANCE_SCALE,
            generator=generator,
            output_type="pt",
        ).images
        for first in tqdm(range(0, len(prompts), 50), desc="generating")
    ]
    return torch.cat(images)


@torch.no_grad()
def evaluate(
    pipeline: StableDiffusionPipeline, classifiers: dict[str, Classifier], count: int
) -> dict[str, dict[str, float]]:
    """Measure the checkpoint on pictures that nothing was trained on, and on generated ones.

    Args:
        pipeline: the checkpoint, as it was loaded from disk.
        classifiers: "reward_model", "judge" and "second_judge".
        count: pictures of each row.

    Returns:
        For every row of the table its columns.
    """
    table: dict[str, dict[str, float]] = {}
    pictures = world.draw_pictures(count, 100_000_000)
    latents = encode(pipeline.vae, pictures.images)
    decoded = torch.cat([pipeline.vae.decode(batch).sample for batch in latents.split(64)])
    again = (decoded / 2 + 0.5).clamp(0, 1)
    for name, images in (("as drawn", pictures.images), ("after the autoencoder", again)):
        for who, model in classifiers.items():
            hits = (named(model, images) == pictures.labels).float().mean(dim=0).tolist()
            table[f"held-out pictures, {who.replace('_', ' ')} {name}"] = dict(zip(NAMES, hits, strict=True))
    table["autoencoder, held-out pictures"] = {"error": (again - pictures.images).abs().mean().item()}
    for name, pairs in (("seen", world.SEEN), ("left-out", world.LEFT_OUT)):
        wanted = world.draw_pictures(count, 100_000_001, pairs)
        images = generate(pipeline, wanted.prompts, seed=3)
        judged = verdicts(images, wanted.labels, classifiers["judge"], classifiers["second_judge"])
        shares = {column.replace("_", " "): hits.double().mean().item() for column, hits in judged.items()}
        table[f"generated, {name} combinations"] = shares
    return table


def main(argv: list[str] | None = None) -> int:
    """Make the checkpoint and print its table.

    Args:
        argv: command line.

    Returns:
        0.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo.recipe", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("tiny-zoo"), help="folder to write to")
    parser.add_argument(
        "--work", type=Path, default=Path("build/zoo"), help="where stages save and go on from"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of all training steps")
    parser.add_argument("--images", type=int, default=1000, help="images of each row of the table")
    parser.add_argument("--table-only", action="store_true", help="measure what --output holds")
    arguments = parser.parse_args(argv)
    if not arguments.table_only:
        arguments.work.mkdir(parents=True, exist_ok=True)
        pipeline = make_pipeline(arguments.scale, arguments.work)
        classifiers = make_classifiers(arguments.scale, arguments.work)
        save_checkpoint(pipeline, classifiers, arguments.output)
    pipeline = StableDiffusionPipeline.from_pretrained(arguments.output, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    for name, model in (kinds := {name: kind() for name, (kind, _) in CLASSIFIERS.items()}).items():
        model.load_state_dict(load_file(arguments.output / f"{name}.safetensors"))
        model.eval()
    table = evaluate(pipeline, kinds, arguments.images)
    (arguments.output / "evaluation.json").write_text(json.dumps(table, indent=1) + "\n")
    print(markdown(table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
