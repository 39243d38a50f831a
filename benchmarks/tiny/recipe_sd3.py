"""The recipe of tiny-sd3: `python -m benchmarks.tiny.recipe_sd3` remakes the shipped checkpoint.

A transformer of Stable Diffusion 3's shape (Esser et al. 2024, arXiv 2403.03206, section 4) learns rectified
flow in the digit world: x_σ = (1 - σ) x₀ + σ ε, and the velocity ε - x₀ is what it predicts. Autoencoder,
evaluator and images are tiny-sd's; two text encoders and the transformer are trained here, together.
"""

import argparse
import random
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from benchmarks import recipes
from benchmarks.tiny import recipe
from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.worlds import digits

WIDTH = 32  # of a token's embedding, in each of the two text encoders
STEPS = 16_000
T5_TOKENS = 1  # zeros in the place of T5's tokens; diffusers' own default is 256
LONG_SHARE = 1 / 16  # of the steps, with those 256, so that the default also shows digits
GUIDANCE_SCALE = 4.0  # of the images in the table


def make_transformer() -> SD3Transformer2DModel:
    """Make the untrained transformer: 3.5 million parameters on latents (4, 8, 8), 16 tokens of 2×2."""
    return SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=6, num_attention_heads=4,
        attention_head_dim=32, caption_projection_dim=128, joint_attention_dim=2 * WIDTH,
        pooled_projection_dim=2 * WIDTH, pos_embed_max_size=4, qk_norm="rms_norm",
    )  # fmt: skip


def make_parts() -> StableDiffusion3Pipeline:
    """Put the untrained pipeline together; its autoencoder is tiny-sd's, and it has no T5."""
    vae = AutoencoderKL.from_pretrained(CHECKPOINTS["tiny-sd"], subfolder="vae", local_files_only=True)
    # Stable Diffusion 3 subtracts a shift from latents; and no folder of this machine is to be saved.
    vae.register_to_config(shift_factor=0.0, _name_or_path="")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = recipe.make_tokenizer(Path(folder))
        third = CLIPTokenizer.from_pretrained(folder, model_max_length=T5_TOKENS)
    return StableDiffusion3Pipeline(
        transformer=make_transformer(), scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae.float(),
        text_encoder=recipes.make_text_encoder(tokenizer, CLIPTextModelWithProjection, WIDTH),
        tokenizer=tokenizer,
        text_encoder_2=recipes.make_text_encoder(tokenizer, CLIPTextModelWithProjection, WIDTH),
        tokenizer_2=tokenizer, text_encoder_3=None, tokenizer_3=third,
    )  # fmt: skip


def embed(
    encoders: tuple[CLIPTextModelWithProjection, ...], tokens: torch.Tensor, t5_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embed token ids (B, L): (B, L + t5_tokens, 64) and pooled (B, 64), as StableDiffusion3Pipeline does."""
    outs = [encoder(tokens, output_hidden_states=True) for encoder in encoders]
    clip = torch.cat([out.hidden_states[-2] for out in outs], dim=-1)  # (B, L, 64)
    zeros = clip.new_zeros(len(clip), t5_tokens, clip.shape[-1])
    return torch.cat([clip, zeros], dim=1), torch.cat([out.text_embeds for out in outs], dim=-1)


def flow_loss(
    pipeline: StableDiffusion3Pipeline, clean: torch.Tensor, tokens: torch.Tensor, rng: random.Random
) -> torch.Tensor:
    """Return the mean squared error of the velocity at σ = u^0.6, u uniform."""
    encoders = (pipeline.text_encoder, pipeline.text_encoder_2)
    words, pooled = embed(encoders, tokens, 256 if rng.random() < LONG_SHARE else T5_TOKENS)
    sigmas = recipes.draw_times(len(clean)).to(clean.device)  # (B,)
    noise = torch.randn_like(clean)
    share = sigmas[:, None, None, None]
    velocity = pipeline.transformer(
        hidden_states=(1 - share) * clean + share * noise,
        timestep=1000 * sigmas,
        encoder_hidden_states=words,
        pooled_projections=pooled,
    ).sample
    return F.mse_loss(velocity, noise - clean)


def make(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    pipeline = make_parts().to(recipes.device())
    recipe.train_denoiser(
        pipeline, nn.ModuleList([pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]),
        recipe.draw_bank(arguments.scale), lambda clean, tokens, rng: flow_loss(pipeline, clean, tokens, rng),
        recipes.scaled(STEPS, arguments.scale), warmup=0.05,
    )  # fmt: skip
    recipes.save(pipeline, arguments.output)


def measure(folder: Path, count: int) -> recipes.Table:
    """Measure how often images match their prompts, as for tiny-sd; `count` images per row."""
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    rows = (
        ("seen combinations", digits.SEEN, T5_TOKENS),
        ("left-out combinations", digits.LEFT_OUT, T5_TOKENS),
        ("seen combinations with 256 zeros", digits.SEEN, 256),
    )
    return {
        f"generated, {name}": recipe.measure_prompts(
            pipeline, digits.Judge.load(), pairs, count, GUIDANCE_SCALE, max_sequence_length=tokens
        )
        for name, pairs, tokens in rows
    }


def main(argv: list[str] | None = None) -> int:
    return recipes.run(argv, __doc__, "tiny-sd3", make, measure)


if __name__ == "__main__":
    raise SystemExit(main())
