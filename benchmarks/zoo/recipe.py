"""The recipe of tiny-zoo: `python -m benchmarks.zoo.recipe` remakes the checkpoint of the world of animals.

Stages: the autoencoder, text encoder and UNet together by plain denoising
(v-prediction, Salimans and Ho 2022, arXiv 2202.00512, section 4; cosine schedule of Nichol and Dhariwal 2021,
arXiv 2102.09672, section 3.2), and three classifiers. A stage that was stopped goes on where it last saved,
to the same result: every step draws its random numbers from its own seed. At the end comes the table that the
model card shows.
"""

import argparse
import itertools
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from torch import nn
from transformers import CLIPTokenizer

from benchmarks import recipes
from benchmarks.recipes import WIDTH, scaled
from ddpo_lessons.worlds import animals
from ddpo_lessons.worlds.animals import NAMES, Judge, RewardModel, SecondJudge, verdicts
from ddpo_lessons.worlds.judges import Classifier, named

VAE_STEPS, VAE_BATCH = 6000, 32
CLASSIFIER_STEPS, CLASSIFIER_BATCH = 1500, 64
UNET_STEPS, UNET_BATCH = 9_000, 32
UNET_BANK = 40_000  # images that the denoiser is trained on
WORDS = ("a", "an", "animal", "by", "on", "background", *animals.ANIMALS, *animals.BACKGROUNDS)
WORDS += tuple(name.lower() for name in animals.ARTISTS)
GUIDANCE_SCALE = 3.0  # of the images in the table


# ------------------------------------------------------------------------------------------- spoiling
Spoil = Callable[[torch.Tensor], torch.Tensor]


def add_noise(images: torch.Tensor) -> torch.Tensor:
    """Add Gaussian noise, its standard deviation 0 to 0.15, one per image; (N, 3, H, W)."""
    return images + 0.15 * torch.rand(len(images), 1, 1, 1) * torch.randn_like(images)


def blur_and_add_noise(images: torch.Tensor) -> torch.Tensor:
    """Blur every other image to a quarter or half of its width, and add noise; (N, 3, H, W)."""
    blurred = F.interpolate(images[::2], scale_factor=0.25 if torch.rand(()) < 0.5 else 0.5, mode="area")
    images = images.clone()
    images[::2] = F.interpolate(blurred, images.shape[2:], mode="bilinear")
    return add_noise(images)


def cut_out(images: torch.Tensor) -> torch.Tensor:
    """Paint a gray square of 16x16 pixels over every image, and add noise; (N, 3, 64, 64)."""
    images = images.clone()
    for image, (row, column) in zip(images, torch.randint(0, 48, (len(images), 2)).tolist(), strict=True):
        image[:, row : row + 16, column : column + 16] = 0.5
    return add_noise(images)


CLASSIFIERS: dict[str, tuple[type[Classifier], Spoil]] = {
    "reward_model": (RewardModel, blur_and_add_noise),
    "judge": (Judge, add_noise),
    "second_judge": (SecondJudge, cut_out),
}


# ----------------------------------------------------------------------------------------------- parts
def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Make a CLIP tokenizer in which each word of this world is one token; any other text is spelled.

    Byte-pair encoding as it is trained, on a text of each word once, until every word is one token.
    vocab.json and merges.txt go to the folder.
    """
    merges = []
    spelled = [[*word[:-1], word[-1] + "</w>"] for word in WORDS]
    while counts := Counter(pair for pieces in spelled for pair in itertools.pairwise(pieces)):
        left, right = counts.most_common(1)[0][0]
        merges.append(f"{left} {right}")
        spelled = [merge(pieces, left, right) for pieces in spelled]
    return recipes.write_tokenizer(folder, merges)


def merge(pieces: list[str], left: str, right: str) -> list[str]:
    """Join the neighbors left and right wherever they stand, from the left."""
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
        sample_size=16, block_out_channels=(48, 96, 128),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), layers_per_block=1,
        cross_attention_dim=WIDTH, attention_head_dim=4, norm_num_groups=16,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- training
def edges(images: torch.Tensor) -> torch.Tensor:
    """Return the differences of neighboring pixels, (N, 3, H - 1, W - 1) twice, joined as channels."""
    return torch.cat(
        [images[:, :, 1:, 1:] - images[:, :, 1:, :-1], images[:, :, 1:, 1:] - images[:, :, :-1, 1:]], dim=1
    )


def train_vae(vae: AutoencoderKL, steps: int, folder: Path) -> None:
    """Train the autoencoder: absolute error of pixels and of edges, and 3e-6 times the KL to N(0, 1).

    Afterwards `scaling_factor` makes the latents' standard deviation 1.
    """

    def loss_of(step: int) -> torch.Tensor:
        torch.manual_seed(step)
        images = animals.draw_images(VAE_BATCH, step).images * 2 - 1  # (B, 3, 64, 64)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(images).latent_dist
            decoded = vae.decode(posterior.sample()).sample
        decoded = decoded.float()
        error = (decoded - images).abs().mean() + (edges(decoded) - edges(images)).abs().mean()
        return error + 3e-6 * posterior.kl().float().mean()

    recipes.train("autoencoder", vae, loss_of, steps, 2e-3, folder=folder)
    recipes.scale_latents(vae, animals.draw_images(1000, steps).images)


def train_classifier(model: Classifier, spoil: Spoil, first_seed: int, steps: int, folder: Path) -> None:
    """Train a classifier on new images, seeds `first_seed` onwards, by the sum of its cross-entropies."""

    def loss_of(step: int) -> torch.Tensor:
        torch.manual_seed(step)
        labeled = animals.draw_images(CLASSIFIER_BATCH, first_seed + step)
        logits = model(spoil(labeled.images))
        return torch.stack(
            [F.cross_entropy(*pair) for pair in zip(logits, labeled.labels.T, strict=True)]
        ).sum()

    recipes.train(type(model).__name__, model, loss_of, steps, 2e-3, folder=folder)


def describe(description: animals.Description, rng: random.Random) -> str:
    """Return a caption of an image, often of only a part of it, and empty in one case of ten."""
    if rng.random() < 0.1:
        return ""
    return animals.make_prompt(
        description.animal if rng.random() < 0.85 else None,
        description.artist if rng.random() < 0.85 else None,
        description.background if rng.random() < 0.85 else None,
    )


def make_bank(vae: AutoencoderKL, count: int) -> tuple[torch.Tensor, list[animals.Description]]:
    """Return latents (N, 4, 16, 16), standard deviation 1, and descriptions of images of seen pairs."""
    latents, descriptions = [], []
    for part in range(math.ceil(count / 500)):
        labeled = animals.draw_images(500, 2_000_000 + part, animals.SEEN)
        latents.append(recipes.encode(vae, labeled.images))
        descriptions += labeled.descriptions
    return torch.cat(latents) * vae.config.scaling_factor, descriptions


def train_denoiser(pipeline: StableDiffusionPipeline, bank: int, steps: int, folder: Path) -> None:
    """Train UNet and text encoder together on the mean squared error of v; keep an average of the weights."""
    latents, descriptions = make_bank(pipeline.vae, bank)
    pipeline.unet.to(memory_format=torch.channels_last)
    model = nn.ModuleList([pipeline.unet, pipeline.text_encoder])

    def loss_of(step: int) -> torch.Tensor:
        torch.manual_seed(step)
        rng = random.Random(step)
        rows = rng.choices(range(len(latents)), k=UNET_BATCH)
        clean = latents[rows]  # (B, 4, 16, 16)
        prompts = [describe(descriptions[row], rng) for row in rows]
        tokens = pipeline.tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
        return recipes.velocity_loss(pipeline, clean, tokens)

    recipes.train("denoiser", model, loss_of, steps, 1e-3, ema_decay=0.999, folder=folder)
    pipeline.unet.to(memory_format=torch.contiguous_format)  # safetensors stores no other layout


def make_pipeline(scale: float, folder: Path) -> StableDiffusionPipeline:
    """Train autoencoder, text encoder and UNet; only the denoiser never sees the left-out pairs."""
    torch.manual_seed(0)
    vae = recipes.make_vae(sample_size=animals.IMAGE_SIZE, mid_block_add_attention=False)
    train_vae(vae, scaled(VAE_STEPS, scale), folder)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as empty:
        tokenizer = make_tokenizer(Path(empty))
    pipeline = recipes.assemble(vae, tokenizer, make_unet)
    train_denoiser(pipeline, scaled(UNET_BANK, scale), scaled(UNET_STEPS, scale), folder)
    return pipeline


def make_classifiers(scale: float, folder: Path) -> dict[str, Classifier]:
    """Train the reward model and both evaluators, on images of disjoint seeds."""
    made = {}
    for index, (name, (kind, spoil)) in enumerate(CLASSIFIERS.items()):
        torch.manual_seed(index)
        made[name] = kind()
        train_classifier(made[name], spoil, 10_000_000 * (index + 1), scaled(CLASSIFIER_STEPS, scale), folder)
    return made


# ----------------------------------------------------------------------------------------- evaluation
def titled(name: str) -> str:
    """Return the title of a classifier in the table, such as "second evaluator"."""
    return name.replace("_", " ").replace("judge", "evaluator")


def measure(folder: Path, count: int) -> recipes.Table:
    """Measure a checkpoint on images that nothing was trained on, and on generated ones, `count` per row."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    classifiers = {name: kind.load(folder / f"{name}.safetensors") for name, (kind, _) in CLASSIFIERS.items()}
    table: recipes.Table = {}
    labeled = animals.draw_images(count, 100_000_000)
    again = recipes.decode(pipeline.vae, recipes.encode(pipeline.vae, labeled.images))
    for name, images in (("as drawn", labeled.images), ("after the autoencoder", again)):
        for who, model in classifiers.items():
            hits = (named(model, images) == labeled.labels).float().mean(dim=0).tolist()
            table[f"held-out images, {titled(who)} {name}"] = dict(zip(NAMES, hits, strict=True))
    table["autoencoder, held-out images"] = {"error": (again - labeled.images).abs().mean().item()}
    for name, pairs in (("seen", animals.SEEN), ("left-out", animals.LEFT_OUT)):
        wanted = animals.draw_images(count, 100_000_001, pairs)
        images = recipes.generate(pipeline, wanted.prompts, 3, GUIDANCE_SCALE)
        judged = verdicts(images, wanted.labels, classifiers["judge"], classifiers["second_judge"])
        shares = {titled(column): hits.double().mean().item() for column, hits in judged.items()}
        table[f"generated, {name} combinations"] = shares
    return table


def make(arguments: argparse.Namespace) -> None:
    """Train the checkpoint; its stages save in build/, and go on from there."""
    stages = Path("build") / arguments.output.name
    stages.mkdir(parents=True, exist_ok=True)
    pipeline = make_pipeline(arguments.scale, stages)
    recipes.save(pipeline, arguments.output, make_classifiers(arguments.scale, stages))


def main(argv: list[str] | None = None) -> int:
    return recipes.run(argv, __doc__, "tiny-zoo", make, measure)


if __name__ == "__main__":
    raise SystemExit(main())
