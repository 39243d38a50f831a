"""The recipe of tiny-sd: `python -m ddpo_lessons.tiny.recipe` remakes the shipped checkpoint.

Four stages: three classifiers, the autoencoder, then text encoder and UNet together by plain denoising
(v-prediction, Salimans and Ho 2022, arXiv 2202.00512, section 4; cosine schedule of Nichol and Dhariwal 2021,
arXiv 2102.09672, section 3.2). At the end it prints the table that the README shows.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from torch import nn
from tqdm.auto import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from ddpo_lessons.tiny import world
from ddpo_lessons.tiny.classifier import (
    CLEAN_ONLY,
    LEGIBILITY,
    Judge,
    RewardModel,
    SecondJudge,
    accuracy,
    description_loss,
    legibility_loss,
    train_classifier,
)

LENGTH = 16  # tokens of a prompt; a sentence of the world has at most ten
WIDTH = 64  # of a token's embedding
BATCH = 64  # of the classifiers
JUDGE_STEPS = 1500
REWARD_MODEL_STEPS = 2000
SECOND_JUDGE_STEPS = 3000
VAE_STEPS = 4000
VAE_BATCH = 32
VAE_BANK = 12_000  # pictures that the autoencoder is trained on
UNET_STEPS = 9_000
UNET_BATCH = 32
UNET_BANK = 40_000  # pictures that the denoiser is trained on
FIRST_SHARE = 0.05  # of the steps, on bright ink on dark ground only, see `train_unet`
BRIGHT, DARK = ("white", "yellow"), ("black", "blue")
GUIDANCE_SCALE = 7.5  # of the pictures in the table


# ----------------------------------------------------------------------------------------------- parts
def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Make a CLIP tokenizer that knows each word of the digit world as one token.

    Byte-pair merges build every word letter by letter, so any other text still splits into characters.

    Args:
        folder: an empty folder for vocab.json and merges.txt.

    Returns:
        The tokenizer, `LENGTH` tokens long.
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
    return write_tokenizer(folder, tokens, merges)


def write_tokenizer(folder: Path, tokens: list[str], merges: list[str]) -> CLIPTokenizer:
    """Write vocab.json and merges.txt of a CLIP tokenizer, and load it, `LENGTH` tokens long."""
    vocab = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=LENGTH)


def make_text_encoder(tokenizer: CLIPTokenizer, kind: Any = CLIPTextModel, width: int = WIDTH) -> Any:
    """Make an untrained text encoder of a class of transformers: two layers, heads of width 16."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=width // 16,
        max_position_embeddings=LENGTH,
        projection_dim=width,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    text_encoder = kind(config)
    # Ten times CLIP's start: words then differ from each other more than positions do, and the UNet
    # finds the one word that names the digit among those that are always there.
    nn.init.normal_(text_encoder.get_input_embeddings().weight, std=0.2)
    return text_encoder


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
    """Make the schedule: cosine, so that pure noise really is where sampling starts; v-prediction.

    `set_alpha_to_one` makes the last step deterministic. With False its standard deviation would be 0.006,
    and since a log-prob's gradient grows as 1 / std, that step would drown all the others.
    """
    return DDIMScheduler(
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        steps_offset=1,  # trailing steps ignore it, and StableDiffusionPipeline insists on it
        clip_sample=False,
        set_alpha_to_one=True,
    )


# ------------------------------------------------------------------------------------------------ data
def draw_mixture(
    count: int, split: str, seed: int, pairs: tuple[tuple[int, str], ...], clean_kinds: int = 7
) -> world.Pictures:
    """Draw pictures, clean_kinds / (clean_kinds + 7) of them clean, others damaged at severities 1 to 4."""
    rng = random.Random(seed)
    kinds = [None] * clean_kinds + [*world.DAMAGES, "camouflaged"]
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
        torch.cat([g.severities for g in groups]),
        [d for g in groups for d in g.descriptions],
    )


def _shares(count: int, parts: int, rng: random.Random) -> list[int]:
    picks = [rng.randrange(parts) for _ in range(count)]
    return [picks.count(part) for part in range(parts)]


def describe(description: world.Description, rng: random.Random) -> str:
    """Say what a picture shows, sometimes only part of it, and in one case of ten nothing at all."""
    if rng.random() < 0.1:
        return ""
    damage = description.damage or rng.choice(["clear", None])
    return world.make_prompt(
        description.digit if rng.random() < 0.95 else None,
        description.ink if rng.random() < 0.9 else None,
        description.background if rng.random() < 0.9 else None,
        damage,
    )


# ------------------------------------------------------------------------------------------- training
def train_vae(vae: AutoencoderKL, pictures: torch.Tensor, steps: int, device: torch.device) -> None:
    """Train the autoencoder, weighing each picture by its contrast, so that faint ink counts too.

    Loss: mean over pictures of `|x - x'| / std(x)`, plus 1e-6 times the KL of the posterior to N(0, 1).
    Afterwards `scaling_factor` makes the latents' standard deviation 1.
    """
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    vae.to(device).train()
    for step in tqdm(range(steps), desc="autoencoder", mininterval=5, dynamic_ncols=True):
        images = _draw_rows(pictures, VAE_BATCH, step).to(device) * 2 - 1  # (B, 3, 32, 32)
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
    latents = encode(vae, _draw_rows(pictures, 1000, steps))
    vae.register_to_config(scaling_factor=1 / latents.std().item())


def _draw_rows(pictures: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return pictures[torch.randint(0, len(pictures), (count,), generator=generator)]


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
    """Train UNet and text encoder together on the mean squared error of v; keep an average of the weights.

    What the word "three" does to a pixel has one sign for white on black and the other for black on white, so
    its mean gradient over all colours is zero, and the digit's name is ignored for a long time. The first
    steps therefore show bright ink on dark ground only. Timesteps are drawn as 1000 u^0.6 with u uniform:
    where noise hides the picture, only the prompt can say which digit it is.
    """
    unet, text_encoder, tokenizer, vae, scheduler = parts
    latents, descriptions = bank
    latents = latents * vae.config.scaling_factor
    unet.to(memory_format=torch.channels_last)
    model = nn.ModuleList([unet, text_encoder]).to(device).train()
    ema = EMAModel(model.parameters(), decay=0.999, use_ema_warmup=True, foreach=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.02)
    rng = random.Random(0)
    everything = range(len(latents))
    bright = [i for i, d in enumerate(descriptions) if d.ink in BRIGHT and d.background in DARK]
    for step in (bar := tqdm(range(steps), desc="UNet", mininterval=5, dynamic_ncols=True)):
        rows = rng.choices(bright if step < FIRST_SHARE * steps else everything, k=UNET_BATCH)
        clean = latents[rows].to(device)  # (B, 4, 8, 8)
        tokens = tokenize(tokenizer, [describe(descriptions[row], rng) for row in rows]).to(device)
        timesteps = (scheduler.config.num_train_timesteps * torch.rand(UNET_BATCH) ** 0.6).long().to(device)
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
    unet.to(memory_format=torch.contiguous_format)  # safetensors stores no other layout
    model.eval()


def tokenize(tokenizer: CLIPTokenizer, prompts: list[str]) -> torch.Tensor:
    """Return token ids (N, 24)."""
    padded = tokenizer(prompts, padding="max_length", max_length=LENGTH, truncation=True)
    return torch.tensor(padded.input_ids)


# ----------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def reconstruct(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    """Send images (N, 3, 32, 32) in [0, 1] through the autoencoder and back."""
    out = []
    for batch in images.split(256):
        latents = vae.encode(batch * 2 - 1).latent_dist.mode()
        out.append((vae.decode(latents).sample / 2 + 0.5).clamp(0, 1))
    return torch.cat(out)


def generate(
    pipeline: StableDiffusionPipeline, descriptions: list[world.Description], seed: int
) -> torch.Tensor:
    """Generate a picture of every description with plain diffusers, 20 steps."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [world.make_prompt(d.digit, d.ink, d.background) for d in descriptions]
    images = [
        pipeline(
            prompts[first : first + 100],
            num_inference_steps=20,
            guidance_scale=GUIDANCE_SCALE,
            generator=generator,
            output_type="pt",
        ).images
        for first in tqdm(range(0, len(prompts), 100), desc="generating")
    ]
    return torch.cat(images)  # (N, 3, 32, 32)


def score_prompts(
    judge: nn.Module, images: torch.Tensor, descriptions: list[world.Description]
) -> dict[str, float]:
    """Return how often digit, ink, background, and all three, are what the prompt says."""
    inks, backgrounds = (world.nearest_colour(rgb) for rgb in world.measure_colours(images))
    named = [(d.digit, world.COLOUR_NAMES.index(d.ink or "")) for d in descriptions]
    ground = torch.tensor([world.COLOUR_NAMES.index(d.background or "") for d in descriptions])
    digits, colours = torch.tensor(named).T
    with torch.no_grad():
        read = torch.cat([judge(batch).argmax(1) for batch in images.split(256)])
    right = {"digit": read == digits, "ink": inks == colours, "background": backgrounds == ground}
    right["all three"] = right["digit"] & right["ink"] & right["background"]
    return {name: hits.float().mean().item() for name, hits in right.items()}


def evaluate(
    pipeline: StableDiffusionPipeline, judge: nn.Module, reward_model: nn.Module, count: int
) -> dict[str, dict[str, float]]:
    """Measure the checkpoint on handwriting of the test split and on generated pictures.

    Args:
        pipeline: the checkpoint, as it was loaded from disk.
        judge: the classifier that measures.
        reward_model: the classifier that RL optimises.
        count: pictures of each row.

    Returns:
        For every row of the table its columns.
    """
    table: dict[str, dict[str, float]] = {}
    for damage in (None, *world.DAMAGES, "camouflaged"):
        pictures = world.draw_pictures(count, "test", 1, damage)
        again = reconstruct(pipeline.vae, pictures.images)
        table[f"test handwriting, {damage or 'clean'}"] = {
            "judge": accuracy(judge, pictures.images, pictures.digits),
            "judge after VAE": accuracy(judge, again, pictures.digits),
            "reward model": accuracy(reward_model, pictures.images, pictures.digits),
            "VAE error": (again - pictures.images).abs().mean().item(),
        }
    for name, pairs in (("seen", world.SEEN), ("left-out", world.LEFT_OUT)):
        descriptions = world.draw_pictures(count, "train", 2, pairs=pairs).descriptions
        images = generate(pipeline, descriptions, seed=3)
        table[f"generated, {name} combinations"] = score_prompts(judge, images, descriptions)
    return table


def markdown(table: dict[str, dict[str, float]]) -> str:
    """Write the table as the README shows it: one part a kind of row."""
    parts = []
    for kind in dict.fromkeys(name.split(", ")[0] for name in table):
        rows = {name: row for name, row in table.items() if name.startswith(kind)}
        columns = list(next(iter(rows.values())))
        lines = [f"| {kind} | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
        for name, row in rows.items():
            cells = [f"{row[c]:.4f}" if "error" in c else f"{100 * row[c]:.1f}%" for c in columns]
            lines.append(f"| {name.split(', ')[1]} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


# ----------------------------------------------------------------------------------------- the recipe
def train_classifiers(scale: float) -> tuple[Judge, RewardModel]:
    """Train the judge on clean pictures of its half, the reward model on damaged ones of the other."""
    everything = world.SEEN + world.LEFT_OUT
    steps = tqdm(range(2), desc="classifiers")
    torch.manual_seed(1)
    judge = Judge()
    train_classifier(
        judge,
        lambda step: world.draw_pictures(BATCH, "judge", 10_000_000 + step),
        legibility_loss(CLEAN_ONLY),
        max(2, int(JUDGE_STEPS * scale)),
        seed=1,
    )
    steps.update()
    torch.manual_seed(2)
    reward_model = RewardModel()
    train_classifier(
        reward_model,
        lambda step: draw_mixture(BATCH, "reward", 20_000_000 + step, everything),
        legibility_loss(LEGIBILITY),
        max(2, int(REWARD_MODEL_STEPS * scale)),
        seed=2,
    )
    steps.update()
    steps.close()
    return judge, reward_model


def train_second_judge(scale: float) -> SecondJudge:
    """Train the second judge on clean pictures of the judge's half: digit, ink and background."""
    torch.manual_seed(4)
    model = SecondJudge()
    train_classifier(
        model,
        lambda step: world.draw_pictures(BATCH, "judge", 30_000_000 + step),
        description_loss,
        max(2, int(SECOND_JUDGE_STEPS * scale)),
        seed=4,
    )
    return model


def make_pipeline(scale: float, device: torch.device) -> StableDiffusionPipeline:
    """Train autoencoder, text encoder and UNet; only the denoiser never sees the left-out pairs."""
    torch.manual_seed(0)
    vae = make_vae()
    pictures = draw_mixture(max(64, int(VAE_BANK * scale)), "train", 3, world.SEEN + world.LEFT_OUT)
    train_vae(vae, pictures.images, max(2, int(VAE_STEPS * scale)), device)
    pictures = draw_mixture(max(64, int(UNET_BANK * scale)), "train", 77, world.SEEN, clean_kinds=14)
    latents = encode(vae, pictures.images)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
    text_encoder, unet, scheduler = make_text_encoder(tokenizer), make_unet(), make_scheduler()
    parts = (unet, text_encoder, tokenizer, vae, scheduler)
    train_unet(parts, (latents, pictures.descriptions), max(2, int(UNET_STEPS * scale)), device)
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def save_checkpoint(
    pipeline: StableDiffusionPipeline, classifiers: dict[str, nn.Module], folder: Path
) -> None:
    """Write the checkpoint; UNet and autoencoder as float16, which halves the wheel."""
    pipeline.to("cpu")
    pipeline.unet.half()
    pipeline.vae.half()
    pipeline.save_pretrained(folder)
    for name, model in classifiers.items():
        save_file(model.state_dict(), folder / f"{name}.safetensors")


def parse_arguments(argv: list[str] | None, doc: str | None, module: str, output: Path) -> argparse.Namespace:
    """Read the flags that the recipes of both checkpoints take."""
    parser = argparse.ArgumentParser(prog=f"python -m ddpo_lessons.tiny.{module}", description=doc)
    parser.add_argument("--output", type=Path, default=output, help="folder to write to")
    parser.add_argument("--scale", type=float, default=1.0, help="share of all training steps")
    parser.add_argument("--images", type=int, default=1000, help="images of each row of the table")
    parser.add_argument("--table-only", action="store_true", help="measure what --output holds")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Make the checkpoint and print its table.

    Args:
        argv: command line.

    Returns:
        0.
    """
    arguments = parse_arguments(argv, __doc__, "recipe", Path("tiny-sd"))
    if not arguments.table_only:
        started = time.perf_counter()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        judge, reward_model = train_classifiers(arguments.scale)
        pipeline = make_pipeline(arguments.scale, device)
        classifiers = {"judge": judge, "reward_model": reward_model}
        classifiers["second_judge"] = train_second_judge(arguments.scale)
        save_checkpoint(pipeline, classifiers, arguments.output)
        print(f"trained in {(time.perf_counter() - started) / 60:.1f} minutes on {device}")
    pipeline = StableDiffusionPipeline.from_pretrained(arguments.output, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    judge, reward_model = Judge().eval(), RewardModel().eval()
    judge.load_state_dict(load_file(arguments.output / "judge.safetensors"))
    reward_model.load_state_dict(load_file(arguments.output / "reward_model.safetensors"))
    table = evaluate(pipeline, judge, reward_model, arguments.images)
    (arguments.output / "evaluation.json").write_text(json.dumps(table, indent=1) + "\n")
    print(markdown(table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
