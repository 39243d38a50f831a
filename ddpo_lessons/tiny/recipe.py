"""The recipe of tiny-sd: `python -m ddpo_lessons.tiny.recipe` remakes the shipped checkpoint.

Four stages: two classifiers, the autoencoder, then text encoder and UNet together by plain denoising
(v-prediction, Salimans and Ho 2022, arXiv 2202.00512, section 4; cosine schedule of Nichol and Dhariwal 2021,
arXiv 2102.09672, section 3.2). At the end it prints the table that the README shows.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm.auto import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from ddpo_lessons.tiny import world
from ddpo_lessons.tiny.classifier import Judge, RewardModel, accuracy, train_classifier

LENGTH = 24  # tokens of a prompt
WIDTH = 64  # of a token's embedding
BATCH = 64
CLASSIFIER_STEPS = 2000
VAE_STEPS = 5000
UNET_STEPS = 9000
BANK = 40_000  # pictures whose latents the UNet is trained on
Draw = Callable[[int], world.Pictures]


# ----------------------------------------------------------------------------------------------- parts
def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Make a CLIP tokenizer that knows each word of the digit world as one token.

    Byte-pair merges build every word letter by letter, so any other text still splits into characters.

    Args:
        folder: an empty folder for vocab.json and merges.txt.

    Returns:
        The tokenizer, 24 tokens long.
    """
    words = ["a", "on", "background", "digit", "clear", "camouflaged", "handwriting"]
    words += [*world.DIGITS, *world.COLOURS, *world.DAMAGES]
    letters = [chr(c) for c in range(ord("!"), ord("~") + 1)]
    tokens = letters + [letter + "</w>" for letter in letters]
    merges: list[str] = []
    for word in words:
        pieces = [*word[:-1], word[-1] + "</w>"]
        left = pieces[0]
        for piece in pieces[1:]:
            if f"{left} {piece}" not in merges:
                merges.append(f"{left} {piece}")
            left += piece
            if left not in tokens:
                tokens.append(left)
    vocab = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=LENGTH)


def make_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Make the untrained text encoder: two layers, width 64."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        projection_dim=WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def make_vae() -> AutoencoderKL:
    """Make the untrained autoencoder: images (3, 32, 32) to latents (4, 8, 8)."""
    return AutoencoderKL(
        block_out_channels=(16, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=world.IMAGE_SIZE,
    )


def make_unet() -> UNet2DConditionModel:
    """Make the untrained UNet: 2.8 million parameters on latents (4, 8, 8)."""
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(64, 96),
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        norm_num_groups=16,
    )


def make_scheduler() -> DDIMScheduler:
    """Make the schedule: cosine, so that pure noise really is where sampling starts; v-prediction."""
    return DDIMScheduler(
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        clip_sample=False,
        set_alpha_to_one=False,
    )


# ------------------------------------------------------------------------------------------------ data
def draw_mixture(
    count: int, split: str, seed: int, pairs: tuple[tuple[int, str], ...]
) -> world.Pictures:
    """Draw pictures of which half are clean and half damaged in one of seven ways, severities 1 to 4."""
    rng = random.Random(seed)
    kinds = [None] * 7 + [*world.DAMAGES, "camouflaged"]
    groups = []
    for index, size in enumerate(_shares(count, len(kinds), rng)):
        if size:
            severity = rng.randint(1, 4)
            groups.append(
                world.draw_pictures(size, split, rng.getrandbits(31), kinds[index], severity, pairs)
            )
    return world.Pictures(
        torch.cat([g.images for g in groups]),
        torch.cat([g.clean for g in groups]),
        torch.cat([g.digits for g in groups]),
        [d for g in groups for d in g.descriptions],
    )


def _shares(count: int, parts: int, rng: random.Random) -> list[int]:
    picks = [rng.randrange(parts) for _ in range(count)]
    return [picks.count(part) for part in range(parts)]


def describe(description: world.Description, rng: random.Random) -> str:
    """Say what a picture shows, sometimes only part of it, and in one case of seven nothing at all."""
    if rng.random() < 1 / 7:
        return ""
    damage = description.damage or rng.choice(["clear", None])
    return world.make_prompt(
        description.digit if rng.random() < 0.8 else None,
        description.ink if rng.random() < 0.85 else None,
        description.background if rng.random() < 0.85 else None,
        damage,
    )


# ------------------------------------------------------------------------------------------- training
def _steps(name: str, steps: int) -> Iterator[int]:
    return iter(tqdm(range(steps), desc=name, mininterval=5, dynamic_ncols=True))


def train_vae(vae: AutoencoderKL, draw: Draw, steps: int, device: torch.device) -> None:
    """Train the autoencoder, weighing each picture by its contrast, so that faint ink counts too.

    Loss: mean over pictures of |x - x'| / std(x), plus 1e-6 times the KL of the posterior to N(0, 1).
    Afterwards `scaling_factor` makes the latents' standard deviation 1.
    """
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    vae.to(device).train()
    for step in _steps("autoencoder", steps):
        images = draw(step).images.to(device) * 2 - 1  # (B, 3, 32, 32)
        posterior = vae.encode(images).latent_dist
        error = vae.decode(posterior.sample()).sample - images
        contrast = images.std(dim=(1, 2, 3), keepdim=True) + 0.05
        loss = (error.abs() / contrast).mean() + 1e-6 * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    vae.eval()
    latents = encode(vae, draw(steps).images)
    vae.register_to_config(scaling_factor=1 / latents.std().item())


@torch.no_grad()
def encode(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    """Encode images (N, 3, 32, 32) in [0, 1] to unscaled latents (N, 4, 8, 8) on the CPU."""
    batches = (batch.to(vae.device) * 2 - 1 for batch in images.split(256))
    return torch.cat([vae.encode(batch).latent_dist.mean.cpu() for batch in batches])


def train_unet(
    parts: tuple[UNet2DConditionModel, CLIPTextModel, CLIPTokenizer, AutoencoderKL, DDIMScheduler],
    bank: tuple[torch.Tensor, list[world.Description]],
    steps: int,
    device: torch.device,
) -> None:
    """Train UNet and text encoder together on the mean squared error of v; keep an average of the weights."""
    unet, text_encoder, tokenizer, vae, scheduler = parts
    latents, descriptions = bank
    latents = latents * vae.config.scaling_factor
    model = nn.ModuleList([unet, text_encoder]).to(device).train()
    ema = EMAModel(model.parameters(), decay=0.999, use_ema_warmup=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-3, total_steps=steps, pct_start=0.05
    )
    rng = random.Random(0)
    for _ in (bar := tqdm(range(steps), desc="UNet", mininterval=5, dynamic_ncols=True)):
        rows = [rng.randrange(len(latents)) for _ in range(BATCH)]
        clean = latents[rows].to(device)  # (B, 4, 8, 8)
        tokens = tokenize(tokenizer, [describe(descriptions[row], rng) for row in rows]).to(device)
        timesteps = torch.randint(0, scheduler.config.num_train_timesteps, (BATCH,), device=device)
        noise = torch.randn_like(clean)
        noisy = scheduler.add_noise(clean, noise, timesteps)
        target = scheduler.get_velocity(clean, noise, timesteps)
        loss = F.mse_loss(unet(noisy, timesteps, text_encoder(tokens)[0]).sample, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        ema.step(model.parameters())
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    ema.copy_to(model.parameters())
    model.eval()


def tokenize(tokenizer: CLIPTokenizer, prompts: list[str]) -> torch.Tensor:
    """Return token ids (N, 24)."""
    padded = tokenizer(prompts, padding="max_length", max_length=LENGTH, truncation=True)
    return torch.tensor(padded.input_ids)
