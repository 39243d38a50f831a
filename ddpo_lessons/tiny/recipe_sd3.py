"""The recipe of tiny-sd3: `python -m ddpo_lessons.tiny.recipe_sd3` remakes the shipped checkpoint.

A transformer of Stable Diffusion 3's shape (Esser et al. 2024, arXiv 2403.03206, section 4) learns rectified
flow in the digit world: x_σ = (1 - σ) x₀ + σ ε, and the velocity ε - x₀ is what it predicts. Autoencoder,
judge and pictures are tiny-sd's; two text encoders and the transformer are trained here, together.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from diffusers.training_utils import EMAModel
from torch import nn
from tqdm.auto import tqdm
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from ddpo_lessons.tiny import CHECKPOINT, load_judge, world
from ddpo_lessons.tiny.recipe import (
    BRIGHT,
    DARK,
    FIRST_SHARE,
    UNET_BANK,
    describe,
    draw_mixture,
    encode,
    make_text_encoder,
    make_tokenizer,
    markdown,
    parse_arguments,
    score_prompts,
    tokenize,
)

WIDTH = 32  # of a token's embedding, in each of the two text encoders
STEPS = 16_000
BATCH = 32
T5_TOKENS = 1  # zeros in the place of T5's tokens; diffusers' own default is 256
LONG_SHARE = 1 / 16  # of the steps, with those 256, so that the default shows digits, too
GUIDANCE_SCALE = 4.0  # of the pictures in the table


# ----------------------------------------------------------------------------------------------- parts
def make_transformer() -> SD3Transformer2DModel:
    """Make the untrained transformer: 3.5 million parameters on latents (4, 8, 8), 16 tokens of 2×2."""
    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=6,
        num_attention_heads=4,
        attention_head_dim=32,
        caption_projection_dim=128,
        joint_attention_dim=2 * WIDTH,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=4,
        qk_norm="rms_norm",
    )


def make_pipeline_parts() -> StableDiffusion3Pipeline:
    """Put the untrained pipeline together; its autoencoder is tiny-sd's, and it has no T5."""
    vae = AutoencoderKL.from_pretrained(CHECKPOINT, subfolder="vae", local_files_only=True)
    # Stable Diffusion 3 subtracts a shift from latents; and no folder of this machine is to be saved.
    vae.register_to_config(shift_factor=0.0, _name_or_path="")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
        third = CLIPTokenizer.from_pretrained(folder, model_max_length=T5_TOKENS)
    return StableDiffusion3Pipeline(
        transformer=make_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae.float(),
        text_encoder=make_text_encoder(tokenizer, CLIPTextModelWithProjection, WIDTH),
        tokenizer=tokenizer,
        text_encoder_2=make_text_encoder(tokenizer, CLIPTextModelWithProjection, WIDTH),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=third,
    )


# ------------------------------------------------------------------------------------------- training
def embed(
    encoders: tuple[CLIPTextModelWithProjection, ...], tokens: torch.Tensor, t5_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embed token ids (B, L): (B, L + t5_tokens, 64) and pooled (B, 64), as StableDiffusion3Pipeline does."""
    outs = [encoder(tokens, output_hidden_states=True) for encoder in encoders]
    clip = torch.cat([out.hidden_states[-2] for out in outs], dim=-1)  # (B, L, 64)
    zeros = clip.new_zeros(len(clip), t5_tokens, clip.shape[-1])
    return torch.cat([clip, zeros], dim=1), torch.cat([out.text_embeds for out in outs], dim=-1)


def train(
    pipeline: StableDiffusion3Pipeline,
    bank: tuple[torch.Tensor, list[world.Description]],
    steps: int,
    device: torch.device,
) -> None:
    """Train transformer and text encoders on the mean squared error of the velocity; keep an average.

    σ is drawn as u^0.6 with u uniform, and the first steps show bright ink on dark ground only, for the
    reasons that `recipe.train_unet` gives.
    """
    latents, descriptions = bank
    latents = latents * pipeline.vae.config.scaling_factor
    encoders = (pipeline.text_encoder, pipeline.text_encoder_2)
    model = nn.ModuleList([pipeline.transformer, *encoders]).to(device).train()
    ema = EMAModel(model.parameters(), decay=0.999, use_ema_warmup=True, foreach=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.05)
    rng = random.Random(0)
    everything = range(len(latents))
    bright = [i for i, d in enumerate(descriptions) if d.ink in BRIGHT and d.background in DARK]
    for step in (bar := tqdm(range(steps), desc="transformer", mininterval=5, dynamic_ncols=True)):
        rows = rng.choices(bright if step < FIRST_SHARE * steps else everything, k=BATCH)
        clean = latents[rows].to(device)  # (B, 4, 8, 8)
        tokens = tokenize(pipeline.tokenizer, [describe(descriptions[row], rng) for row in rows]).to(device)
        words, pooled = embed(encoders, tokens, 256 if rng.random() < LONG_SHARE else T5_TOKENS)
        sigmas = (torch.rand(BATCH) ** 0.6).to(device)  # (B,)
        noise = torch.randn_like(clean)
        share = sigmas[:, None, None, None]
        velocity = pipeline.transformer(
            hidden_states=(1 - share) * clean + share * noise,
            timestep=1000 * sigmas,
            encoder_hidden_states=words,
            pooled_projections=pooled,
        ).sample
        loss = F.mse_loss(velocity, noise - clean)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        ema.step(model.parameters())
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    ema.copy_to(model.parameters())
    model.eval()


def make_pipeline(scale: float, device: torch.device) -> StableDiffusion3Pipeline:
    """Train text encoders and transformer; they never see the left-out pairs of digit and ink."""
    torch.manual_seed(0)
    pipeline = make_pipeline_parts()
    pictures = draw_mixture(max(64, int(UNET_BANK * scale)), "train", 77, world.SEEN, clean_kinds=14)
    latents = encode(pipeline.vae, pictures.images)
    train(pipeline, (latents, pictures.descriptions), max(2, int(STEPS * scale)), device)
    return pipeline.to("cpu")


# ----------------------------------------------------------------------------------------- evaluation
def generate(
    pipeline: StableDiffusion3Pipeline,
    descriptions: list[world.Description],
    seed: int,
    max_sequence_length: int = T5_TOKENS,
) -> torch.Tensor:
    """Generate a picture (3, 32, 32) of every description with plain diffusers, 20 steps."""
    generator = torch.Generator().manual_seed(seed)
    prompts = [world.make_prompt(d.digit, d.ink, d.background) for d in descriptions]
    images = [
        pipeline(
            prompts[first : first + 100],
            num_inference_steps=20,
            guidance_scale=GUIDANCE_SCALE,
            generator=generator,
            output_type="pt",
            max_sequence_length=max_sequence_length,
        ).images
        for first in tqdm(range(0, len(prompts), 100), desc="generating")
    ]
    return torch.cat(images).float()  # (N, 3, 32, 32)


def evaluate(pipeline: StableDiffusion3Pipeline, count: int) -> dict[str, dict[str, float]]:
    """Measure how well prompts are obeyed, as for tiny-sd.

    Args:
        pipeline: the checkpoint, as it was loaded from disk.
        count: pictures of each row.

    Returns:
        For every row of the table its columns.
    """
    judge, table = load_judge(), {}
    rows = (
        ("seen combinations", world.SEEN, T5_TOKENS),
        ("left-out combinations", world.LEFT_OUT, T5_TOKENS),
        ("seen combinations with 256 zeros", world.SEEN, 256),
    )
    for name, pairs, tokens in rows:
        descriptions = world.draw_pictures(count, "train", 2, pairs=pairs).descriptions
        images = generate(pipeline, descriptions, 3, tokens)
        table[f"generated, {name}"] = score_prompts(judge, images, descriptions)
    return table


def main(argv: list[str] | None = None) -> int:
    """Make the checkpoint and print its table.

    Args:
        argv: command line.

    Returns:
        0.
    """
    arguments = parse_arguments(argv, __doc__, "recipe_sd3", Path("tiny-sd3"))
    if not arguments.table_only:
        started = time.perf_counter()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        pipeline = make_pipeline(arguments.scale, device)
        pipeline.transformer.half()  # halves the wheel
        pipeline.vae.half()
        pipeline.save_pretrained(arguments.output)
        print(f"trained in {(time.perf_counter() - started) / 60:.1f} minutes on {device}")
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        arguments.output, text_encoder_3=None, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    table = evaluate(pipeline, arguments.images)
    (arguments.output / "evaluation.json").write_text(json.dumps(table, indent=1) + "\n")
    print(markdown(table))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
