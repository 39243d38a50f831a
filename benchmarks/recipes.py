"""Helpers of the recipes: parts of tiny models, a stage of training, images, table and command line."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline
from diffusers.training_utils import EMAModel
from safetensors.torch import save_file
from torch import nn
from tqdm.auto import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

Table = dict[str, dict[str, float]]

LENGTH = 16  # tokens of a prompt; a prompt of the worlds has at most ten
WIDTH = 64  # of a token's embedding
LETTERS = [chr(c) for c in range(ord("!"), ord("~") + 1)]
CHARACTERS = LETTERS + [letter + "</w>" for letter in LETTERS]  # inside and at the end of a word
SAVE_SECONDS = 180  # a stage that is stopped loses at most so many


# ----------------------------------------------------------------------------------------------- parts
def write_tokenizer(folder: Path, merges: list[str]) -> CLIPTokenizer:
    """Write vocab.json and merges.txt of a CLIP tokenizer, and load it, `LENGTH` tokens long."""
    tokens = dict.fromkeys([*CHARACTERS, *(merge.replace(" ", "") for merge in merges)])
    vocab = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=LENGTH)


def make_text_encoder(tokenizer: CLIPTokenizer, kind: Any = CLIPTextModel, width: int = WIDTH) -> Any:
    """Make an untrained text encoder of a class of transformers: two layers, heads of width 16."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=width // 16, max_position_embeddings=LENGTH, projection_dim=width,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    text_encoder = kind(config)
    # Ten times CLIP's start: words then differ from each other more than positions do, and the UNet
    # finds the one word that names the digit among those that are always there.
    nn.init.normal_(text_encoder.get_input_embeddings().weight, std=0.2)
    return text_encoder


def make_vae(**changes: Any) -> AutoencoderKL:
    """Make the untrained autoencoder, which divides both sides by four: images (3, 32, 32) to (4, 8, 8)."""
    settings: dict[str, Any] = {
        "block_out_channels": (16, 32, 64), "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3, "layers_per_block": 1, "latent_channels": 4,
        "norm_num_groups": 8, "sample_size": 32,
    }  # fmt: skip
    return AutoencoderKL(**settings | changes)


def make_scheduler() -> DDIMScheduler:
    """Make the schedule: cosine, so that pure noise really is where sampling starts; v-prediction.

    `set_alpha_to_one` makes the last step deterministic. With False its standard deviation would be 0.006,
    and since a log-prob's gradient grows as 1 / std, that step would dominate all the others.
    """
    return DDIMScheduler(
        beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction", timestep_spacing="trailing",
        steps_offset=1,  # trailing steps ignore it, and StableDiffusionPipeline insists on it
        clip_sample=False, set_alpha_to_one=True,
    )  # fmt: skip


def assemble(
    vae: AutoencoderKL, tokenizer: CLIPTokenizer, make_unet: Callable[[], Any]
) -> StableDiffusionPipeline:
    """Put a Stable Diffusion pipeline together, with an untrained text encoder and no safety checker."""
    parts = {"vae": vae, "text_encoder": make_text_encoder(tokenizer), "tokenizer": tokenizer}
    parts["unet"] = make_unet()  # after the encoder: the order of the random weights
    none = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return StableDiffusionPipeline(**parts, scheduler=make_scheduler(), **none)


# ------------------------------------------------------------------------------------------- training
def train(
    name: str,
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    steps: int,
    learning_rate: float,
    *,
    weight_decay: float = 1e-2,
    warmup: float = 0.05,
    max_norm: float = 1.0,
    ema_decay: float | None = None,
    folder: Path | None = None,
) -> None:
    """Take the optimizer steps of a stage: AdamW, one cycle of the learning rate.

    `learning_rate` is the highest one, reached after the fraction `warmup` of the steps; gradients are
    clipped to `max_norm`. At the end the model is in eval mode, and holds the average of its weights if there
    is an `ema_decay`. The stage saves in `folder` as NAME.pt, and goes on from there; `loss_of`, which maps a
    step's number to its loss, then seeds what it draws by the step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=warmup
    )
    ema = EMAModel(model.parameters(), decay=ema_decay or 0.0, use_ema_warmup=True, foreach=True)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "ema": ema}
    first, file = 0, folder / f"{name}.pt" if folder else None
    if file and file.is_file():
        state = torch.load(file, weights_only=True)
        first = state.pop("step")
        for key, part in parts.items():
            part.load_state_dict(state[key])
    saved = time.monotonic()
    model.train()
    for step in (bar := tqdm(range(first, steps), desc=name, initial=first, total=steps, mininterval=20)):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        if ema_decay:
            ema.step(model.parameters())
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        if file and (time.monotonic() - saved > SAVE_SECONDS or step + 1 == steps):
            state = {key: part.state_dict() for key, part in parts.items()} | {"step": step + 1}
            torch.save(state, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
            saved = time.monotonic()
    if ema_decay:
        ema.copy_to(model.parameters())
    model.eval()


@torch.no_grad()
def encode(vae: AutoencoderKL, images: torch.Tensor) -> torch.Tensor:
    """Encode images (N, 3, H, W) in [0, 1] to unscaled latents (N, 4, H/4, W/4) on the CPU."""
    batches = (batch.to(vae.device) * 2 - 1 for batch in images.split(64))
    return torch.cat([vae.encode(batch).latent_dist.mean.cpu() for batch in batches])


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """Decode unscaled latents (N, 4, h, w) to images (N, 3, 4h, 4w) in [0, 1]."""
    decoded = torch.cat([vae.decode(batch).sample for batch in latents.split(64)])
    return (decoded / 2 + 0.5).clamp(0, 1)


def scale_latents(vae: AutoencoderKL, images: torch.Tensor) -> None:
    """Set `scaling_factor` so that the standard deviation of these images' latents is 1."""
    vae.register_to_config(scaling_factor=1 / encode(vae, images).std().item())


def velocity_loss(pipeline: Any, clean: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of v at timesteps 1000 u^0.6, u uniform."""
    scheduler = pipeline.scheduler
    timesteps = (scheduler.config.num_train_timesteps * draw_times(len(clean))).long().to(clean.device)
    noise = torch.randn_like(clean)
    noisy = scheduler.add_noise(clean, noise, timesteps)
    predicted = pipeline.unet(noisy, timesteps, pipeline.text_encoder(tokens)[0]).sample
    return F.mse_loss(predicted, scheduler.get_velocity(clean, noise, timesteps))


def draw_times(count: int) -> torch.Tensor:
    """Draw u^0.6 in [0, 1], u uniform: where noise hides the image, only the prompt describes it."""
    return torch.rand(count) ** 0.6


# ----------------------------------------------------------------------------------------- evaluation
def generate(
    pipeline: Any, prompts: list[str], seed: int, guidance_scale: float, **settings: Any
) -> torch.Tensor:
    """Generate an image of every prompt with plain diffusers, 20 steps; (N, 3, H, W) in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    images = [
        pipeline(
            prompts[first : first + 50],
            num_inference_steps=20,
            guidance_scale=guidance_scale,
            generator=generator,
            output_type="pt",
            **settings,
        ).images
        for first in tqdm(range(0, len(prompts), 50), desc="generating")
    ]
    return torch.cat(images).float()


def markdown(table: Table) -> str:
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
def scaled(count: int, scale: float, least: int = 2) -> int:
    return max(least, int(count * scale))


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def save(pipeline: Any, folder: Path, classifiers: dict[str, nn.Module] | None = None) -> None:
    """Write the checkpoint; denoiser and autoencoder as float16, which halves the wheel."""
    pipeline.to("cpu")
    for name in {"unet", "transformer", "vae"} & pipeline.components.keys():
        getattr(pipeline, name).half()
    pipeline.save_pretrained(folder)
    for name, model in (classifiers or {}).items():
        save_file(model.state_dict(), folder / f"{name}.safetensors")


def run(
    argv: list[str] | None,
    doc: str | None,
    output: str,
    make: Callable[[argparse.Namespace], None],
    measure: Callable[[Path, int], Table],
) -> int:
    """Read the flags that all recipes take, make a checkpoint, and print its table.

    `make` trains and writes the checkpoint, `measure` takes its folder and a number of images to the table.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--output", type=Path, default=Path(output), help="folder to write to")
    parser.add_argument("--scale", type=float, default=1.0, help="share of all training steps")
    parser.add_argument("--images", type=int, default=1000, help="images of each row of the table")
    parser.add_argument("--table-only", action="store_true", help="measure what --output holds")
    arguments = parser.parse_args(argv)
    if not arguments.table_only:
        started = time.perf_counter()
        make(arguments)
        print(f"trained in {(time.perf_counter() - started) / 60:.1f} minutes on {device()}")
    table = measure(arguments.output, arguments.images)
    (arguments.output / "evaluation.json").write_text(json.dumps(table, indent=1) + "\n")
    print(markdown(table))
    return 0
