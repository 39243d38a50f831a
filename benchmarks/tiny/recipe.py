"""The recipe of tiny-sd: `python -m benchmarks.tiny.recipe` remakes the shipped checkpoint.

Four stages: three classifiers, the autoencoder, then text encoder and UNet together by plain denoising
(v-prediction, Salimans and Ho 2022, arXiv 2202.00512, section 4; cosine schedule of Nichol and Dhariwal 2021,
arXiv 2102.09672, section 3.2). At the end it prints the table that docs/tiny-sd.md shows.
"""

import argparse
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from torch import nn
from transformers import CLIPTokenizer

from benchmarks import recipes
from benchmarks.recipes import WIDTH, scaled
from ddpo_lessons.damages import DAMAGES
from ddpo_lessons.worlds import digits
from ddpo_lessons.worlds.digits import Judge, RewardModel, SecondJudge, accuracy, score_prompts

BATCH = 64  # of the classifiers
JUDGE_STEPS = 1500
REWARD_MODEL_STEPS = 2000
SECOND_JUDGE_STEPS = 3000
VAE_STEPS = 4000
VAE_BATCH = 32
VAE_BANK = 12_000  # images that the autoencoder is trained on
STEPS = 9_000
DENOISER_BATCH = 32
BANK = 40_000  # images that the denoiser is trained on
FIRST_SHARE = 0.05  # of the steps, on bright ink on dark background only, see `train_denoiser`
BRIGHT, DARK = ("white", "yellow"), ("black", "blue")
GUIDANCE_SCALE = 7.5  # of the images in the table
# The target probability of the true digit at severities 0 (clean) to 5, for a classifier.
LEGIBILITY = torch.tensor([0.96, 0.80, 0.66, 0.52, 0.38, 0.24])
CLEAN_ONLY = torch.tensor([0.955])


# ----------------------------------------------------------------------------------------------- parts
def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Make a CLIP tokenizer in which each word of the digit world is one token.

    Byte-pair merges build every word letter by letter, so any other text still splits into characters.
    vocab.json and merges.txt go to the folder.
    """
    words = ["a", "on", "background", "digit", "clear", "camouflaged", "handwriting"]
    words += [*digits.DIGITS, *digits.COLORS, *DAMAGES]
    merges: dict[str, None] = {}
    for word in words:
        left, *pieces = [*word[:-1], word[-1] + "</w>"]
        for piece in pieces:
            merges[f"{left} {piece}"] = None
            left += piece
    return recipes.write_tokenizer(folder, list(merges))


def make_unet() -> UNet2DConditionModel:
    """Make the untrained UNet: 2.8 million parameters on latents (4, 8, 8)."""
    return UNet2DConditionModel(
        sample_size=8, block_out_channels=(64, 96), down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2, layers_per_block=1, cross_attention_dim=WIDTH,
        attention_head_dim=4, norm_num_groups=16,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ data
def draw_mixture(
    count: int, split: str, seed: int, pairs: tuple[tuple[int, str], ...], clean_kinds: int = 7
) -> digits.LabeledImages:
    """Generate images, clean_kinds / (clean_kinds + 7) of them clean, others damaged at severities 1 to 4."""
    rng = random.Random(seed)
    kinds = [None] * clean_kinds + [*DAMAGES, "camouflaged"]
    picks = [rng.randrange(len(kinds)) for _ in range(count)]
    groups = []
    for index, kind in enumerate(kinds):
        if size := picks.count(index):
            severity = rng.randint(1, 4)
            groups.append(digits.draw_images(size, split, rng.getrandbits(31), kind, severity, pairs))
    return digits.LabeledImages(
        torch.cat([g.images for g in groups]), torch.cat([g.clean for g in groups]),
        torch.cat([g.digits for g in groups]), torch.cat([g.severities for g in groups]),
        [d for g in groups for d in g.descriptions],
    )  # fmt: skip


def draw_bank(scale: float) -> digits.LabeledImages:
    """Generate the denoiser's training images, without the left-out pairs of digit and ink."""
    return draw_mixture(scaled(BANK, scale, 64), "train", 77, digits.SEEN, clean_kinds=14)


def describe(description: digits.Description, rng: random.Random) -> str:
    """Return a caption of an image, sometimes of only a part of it, and empty in one case of ten."""
    if rng.random() < 0.1:
        return ""
    damage = description.damage or rng.choice(["clear", None])
    return digits.make_prompt(
        description.digit if rng.random() < 0.95 else None, description.ink if rng.random() < 0.9 else None,
        description.background if rng.random() < 0.9 else None, damage,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------- classifiers
def targets(labeled: digits.LabeledImages, belief: torch.Tensor) -> torch.Tensor:
    """Return the target class probabilities (N, 10) of a classifier."""
    confidence = belief[labeled.severities]  # (N,)
    others = ((1 - confidence) / 9)[:, None].expand(-1, 10)
    return others.scatter(1, labeled.digits[:, None], confidence[:, None])


def description_loss(logits: tuple[torch.Tensor, ...], labeled: digits.LabeledImages) -> torch.Tensor:
    """The sum of the cross-entropies of digit, ink and background."""
    labels = (labeled.digits, *digits.color_indices(labeled.descriptions).T)
    return torch.stack([F.cross_entropy(*pair) for pair in zip(logits, labels, strict=True)]).sum()


def train_classifier(
    kind: type[nn.Module],
    seed: int,
    draw: Callable[[int], digits.LabeledImages],
    loss: Callable[[Any, digits.LabeledImages], torch.Tensor],
    steps: int,
) -> nn.Module:
    """Train a classifier on new images; `loss` is of its logits and the images."""
    torch.manual_seed(seed)
    model = kind()
    torch.manual_seed(seed)  # of dropout

    def loss_of(step: int) -> torch.Tensor:
        labeled = draw(step)
        return loss(model(labeled.images), labeled)

    recipes.train(
        kind.__name__, model, loss_of, steps, 4e-3, weight_decay=0.05, warmup=0.3, max_norm=math.inf
    )
    return model


def make_classifiers(scale: float) -> dict[str, nn.Module]:
    """Train both evaluators on clean images of their half, the reward model on damaged ones of the other."""

    def clean(first: int) -> Callable[[int], digits.LabeledImages]:
        return lambda step: digits.draw_images(BATCH, "judge", first + step)

    def damaged(step: int) -> digits.LabeledImages:
        return draw_mixture(BATCH, "reward", 20_000_000 + step, digits.SEEN + digits.LEFT_OUT)

    def legibility(belief: torch.Tensor) -> Callable[[Any, digits.LabeledImages], torch.Tensor]:
        return lambda logits, labeled: F.cross_entropy(logits, targets(labeled, belief))

    sizes = [scaled(steps, scale) for steps in (JUDGE_STEPS, REWARD_MODEL_STEPS, SECOND_JUDGE_STEPS)]
    return {
        "judge": train_classifier(Judge, 1, clean(10_000_000), legibility(CLEAN_ONLY), sizes[0]),
        "reward_model": train_classifier(RewardModel, 2, damaged, legibility(LEGIBILITY), sizes[1]),
        "second_judge": train_classifier(SecondJudge, 4, clean(30_000_000), description_loss, sizes[2]),
    }


# ------------------------------------------------------------------------------------------- pipeline
def train_vae(vae: AutoencoderKL, bank: torch.Tensor, steps: int) -> None:
    """Train the autoencoder, weighing each image by its contrast, so that faint ink also counts.

    Loss: mean over images of `|x - x'| / std(x)`, plus 1e-6 times the KL of the posterior to N(0, 1).
    Afterwards `scaling_factor` makes the latents' standard deviation 1.
    """

    def loss_of(step: int) -> torch.Tensor:
        images = _draw_rows(bank, VAE_BATCH, step).to(vae.device) * 2 - 1  # (B, 3, 32, 32)
        posterior = vae.encode(images).latent_dist
        error = vae.decode(posterior.sample()).sample - images
        contrast = images.std(dim=(1, 2, 3), keepdim=True) + 0.05
        return (error.abs() / contrast).mean() + 1e-6 * posterior.kl().mean()

    recipes.train("autoencoder", vae, loss_of, steps, 2e-3, weight_decay=1e-4, warmup=0.3)
    recipes.scale_latents(vae, _draw_rows(bank, 1000, steps))


def _draw_rows(bank: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return bank[torch.randint(0, len(bank), (count,), generator=generator)]


def train_denoiser(
    pipeline: Any,
    model: nn.Module,
    bank: digits.LabeledImages,
    loss: Callable[[torch.Tensor, torch.Tensor, random.Random], torch.Tensor],
    steps: int,
    warmup: float,
) -> None:
    """Train a denoiser and its text encoders together; keep an average of the weights.

    The effect of the word "three" on a pixel has one sign for white on black and the other for black on
    white, so its mean gradient over all colors is zero, and the digit's name is ignored for a long time. The
    first steps therefore show bright ink on dark background only.

    `loss` is of clean latents (B, 4, 8, 8) and token ids (B, L), with a generator of Python's.
    """
    latents = recipes.encode(pipeline.vae, bank.images) * pipeline.vae.config.scaling_factor
    rng, everything = random.Random(0), range(len(latents))
    bright = [i for i, d in enumerate(bank.descriptions) if d.ink in BRIGHT and d.background in DARK]

    def loss_of(step: int) -> torch.Tensor:
        rows = rng.choices(bright if step < FIRST_SHARE * steps else everything, k=DENOISER_BATCH)
        prompts = [describe(bank.descriptions[row], rng) for row in rows]
        tokens = pipeline.tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
        device = pipeline.vae.device
        return loss(latents[rows].to(device), tokens.input_ids.to(device), rng)

    recipes.train("denoiser", model, loss_of, steps, 1e-3, warmup=warmup, ema_decay=0.999)


def make_pipeline(scale: float) -> StableDiffusionPipeline:
    """Train autoencoder, text encoder and UNet; only the denoiser never sees the left-out pairs."""
    torch.manual_seed(0)
    vae = recipes.make_vae().to(recipes.device())
    labeled = draw_mixture(scaled(VAE_BANK, scale, 64), "train", 3, digits.SEEN + digits.LEFT_OUT)
    train_vae(vae, labeled.images, scaled(VAE_STEPS, scale))
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
    pipeline = recipes.assemble(vae, tokenizer, make_unet).to(recipes.device())
    pipeline.unet.to(memory_format=torch.channels_last)
    train_denoiser(
        pipeline, nn.ModuleList([pipeline.unet, pipeline.text_encoder]), draw_bank(scale),
        lambda clean, tokens, rng: recipes.velocity_loss(pipeline, clean, tokens), scaled(STEPS, scale),
        warmup=0.02,
    )  # fmt: skip
    pipeline.unet.to(memory_format=torch.contiguous_format)  # safetensors stores no other layout
    return pipeline


def make(arguments: argparse.Namespace) -> None:
    classifiers = make_classifiers(arguments.scale)
    recipes.save(make_pipeline(arguments.scale), arguments.output, classifiers)


# ----------------------------------------------------------------------------------------- evaluation
def measure_prompts(
    pipeline: Any, judge: nn.Module, pairs: Any, count: int, guidance_scale: float, **settings: Any
) -> dict[str, float]:
    """Return how often images match prompts of pairs of digit and ink."""
    descriptions = digits.draw_images(count, "train", 2, pairs=pairs).descriptions
    prompts = [digits.make_prompt(d.digit, d.ink, d.background) for d in descriptions]
    images = recipes.generate(pipeline, prompts, 3, guidance_scale, **settings)
    return score_prompts(judge, images, descriptions)


def measure(folder: Path, count: int) -> recipes.Table:
    """Measure a checkpoint on handwriting of the test split and on generated images, `count` per row."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    judge = Judge.load(folder / "judge.safetensors")
    reward_model = RewardModel.load(folder / "reward_model.safetensors")
    table = {}
    for damage in (None, *DAMAGES, "camouflaged"):
        labeled = digits.draw_images(count, "test", 1, damage)
        again = recipes.decode(pipeline.vae, recipes.encode(pipeline.vae, labeled.images))
        table[f"test handwriting, {damage or 'clean'}"] = {
            "evaluator": accuracy(judge, labeled.images, labeled.digits),
            "evaluator after VAE": accuracy(judge, again, labeled.digits),
            "reward model": accuracy(reward_model, labeled.images, labeled.digits),
            "VAE error": (again - labeled.images).abs().mean().item(),
        }
    for name, pairs in (("seen", digits.SEEN), ("left-out", digits.LEFT_OUT)):
        scores = measure_prompts(pipeline, judge, pairs, count, GUIDANCE_SCALE)
        table[f"generated, {name} combinations"] = scores
    return table


def main(argv: list[str] | None = None) -> int:
    return recipes.run(argv, __doc__, "tiny-sd", make, measure)


if __name__ == "__main__":
    raise SystemExit(main())
