"""Rewards that use a model: CLIP, PickScore, the aesthetic score, a perceptual distance."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ddpo_lessons import hub
from ddpo_lessons.loading import quiet_loading
from ddpo_lessons.rewards.reward import (
    Metadata,
    RewardFunction,
    check_classes,
    checked_reward,
    margin,
    metadata_column,
    metadata_images,
    register,
)
from ddpo_lessons.words import ANIMALS

CLIP_MODEL = "openai/clip-vit-large-patch14"
PICK_SCORE = "yuvalkirstain/PickScore_v1"
CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"  # what PickScore was trained from
AESTHETIC_HEAD = "ttj/sac-logos-ava1-l14-linearMSE"
PERCEPTUAL_MODEL = "microsoft/resnet-18"
TEXT_FILES = ("*.json", "merges.txt", "vocab.txt")  # configs, tokenizers, preprocessors
WEIGHTS = "model*.safetensors"
T = TypeVar("T")


# ------------------------------------------------------------------------------------------- the hub
def load_from_hub(
    model: str | Path, load: Callable[[Path], T], files: Sequence[str] = (*TEXT_FILES, WEIGHTS)
) -> T:
    """Find a model by folder, file, or name on the hub, and return the result of `load` for it.

    No code of the model's repository runs, and weights are safetensors. Of a repository only what matches the
    patterns `files` is downloaded. Raises RuntimeError if the model cannot be had or loaded; says which, why
    and what to do.
    """
    from huggingface_hub import snapshot_download

    try:
        with quiet_loading(bars=True):
            here = Path(model)
            if not here.exists():
                found = snapshot_download(
                    str(model), allow_patterns=list(files), local_files_only=hub.only_here(model)
                )
                here = Path(found)
            return load(here)
    except Exception as error:  # network, file and format errors share the remedy, but no base
        remedy = (
            "On a machine with a network run `hf download MODEL --local-dir FOLDER`, copy the folder here "
            "and pass its path, on the command line as --reward NAME@FOLDER; or set HF_HOME to a cache that "
            "already holds it"
        )
        raise hub.explain(model, error, remedy) from error


def _pretrained(model_class: Any, folder: Path) -> Any:
    model, report = model_class.from_pretrained(
        folder, use_safetensors=True, trust_remote_code=False, output_loading_info=True
    )
    if report["missing_keys"]:  # transformers would leave them random, and the reward with them
        raise ValueError(f"weights are missing: {', '.join(sorted(report['missing_keys']))[:200]}")
    return model.eval().requires_grad_(False)


class _Normalize(nn.Module):
    """Normalize channels with the mean and std of a folder's preprocessor_config.json."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.settings = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
        self.register_buffer("mean", torch.tensor(self.settings["image_mean"])[:, None, None])
        self.register_buffer("std", torch.tensor(self.settings["image_std"])[:, None, None])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images - self.mean) / self.std


# ---------------------------------------------------------------------------------------------- CLIP
class Clip(nn.Module):
    """CLIP (Radford et al. 2021, arXiv 2103.00020), with image and text embeddings of unit length."""

    model: Any  # of transformers, which mypy does not follow

    def __init__(self, model: nn.Module, processor: Path) -> None:
        from transformers import CLIPTokenizer

        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = CLIPTokenizer.from_pretrained(processor)
        self.normalize = _Normalize(processor)
        size, crop = (self.normalize.settings[key] for key in ("size", "crop_size"))
        self.edge = size["shortest_edge"] if isinstance(size, dict) else size
        self.crop = crop["height"] if isinstance(crop, dict) else crop

    def preprocess(self, images: torch.Tensor) -> torch.Tensor:
        """Resize the shorter side, crop the center, and normalize: (B, 3, H, W) to (B, 3, crop, crop).

        Bicubic with antialias is what PIL does, but for rounding to 8 bits in between; doing it here spares
        the detour through PIL images and the need for torchvision.
        """
        shape = [self.edge * side // min(images.shape[2:]) for side in images.shape[2:]]
        resized = F.interpolate(images, shape, mode="bicubic", antialias=True).clamp(0, 1)
        top, left = ((side - self.crop) // 2 for side in shape)
        return self.normalize(resized[:, :, top : top + self.crop, left : left + self.crop])

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        """Embed images (B, 3, H, W) in [0, 1] as unit vectors (B, D)."""
        pooled = self.model.vision_model(pixel_values=self.preprocess(images)).pooler_output
        return F.normalize(self.model.visual_projection(pooled), dim=1)

    def embed_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Embed N texts as unit vectors (N, D); texts are cut after CLIP's 77 tokens."""
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self.normalize.mean.device)
        return F.normalize(self.model.text_projection(self.model.text_model(**tokens).pooler_output), dim=1)

    def cosines(self, images: torch.Tensor, texts: Sequence[str]) -> torch.Tensor:
        """Return the cosine of each image (B, 3, H, W) and its text: (B,)."""
        self.to(images.device)
        return (self.embed_images(images) * self.embed_texts(texts)).sum(dim=1)


@functools.cache
def load_clip(model: str | Path, processor: str | Path | None = None) -> Clip:
    """Load a CLIPModel and its processor; cached, so that rewards share its 1.7 GB."""
    from transformers import CLIPModel

    weights = load_from_hub(model, lambda folder: _pretrained(CLIPModel, folder))
    return load_from_hub(processor or model, lambda folder: Clip(weights, folder), TEXT_FILES)


@register(needs=("prompt",), models=("CLIP",))
def clip_score(model: str | Path = CLIP_MODEL) -> RewardFunction:
    """Score the cosine of the embeddings of image and prompt with a CLIPModel, in [-1, 1].

    CLIPModel's `logits_per_image` is this times exp(logit_scale). Source: Hessel et al. 2021, arXiv
    2104.08718, who report 2.5 max(cosine, 0).
    """
    clip = load_clip(model)

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        return clip.cosines(images, prompts)

    return reward


@register(needs=("label",), models=("CLIP",))
def clip_margin(
    model: str | Path = CLIP_MODEL, classes: Sequence[str] = ANIMALS, template: str = "a photo of a {}"
) -> RewardFunction:
    """Score CLIP's zero-shot logit of the class `metadata["label"]` minus the largest wrong one.

    {} in the template, the sentence for a class, becomes its name. Raises ValueError if there are fewer than
    two classes, or the template has no place for them; RuntimeError if the model cannot be had.
    """
    check_classes(classes)
    if "{}" not in template:
        raise ValueError(f"template={template!r} has no {{}}: it marks the place of the class")
    clip = load_clip(model)
    with torch.no_grad():
        texts = clip.embed_texts([template.format(name) for name in classes])  # (classes, D)

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        labels = metadata_column(metadata, "label", "the name of the true class")
        clip.to(images.device)
        cosines = clip.embed_images(images) @ texts.to(images.device).T  # (B, classes)
        return margin(clip.model.logit_scale.exp() * cosines, labels, classes)

    return reward


@register(needs=("image", "label"), models=("CLIP",))
def clip_change(
    model: str | Path = CLIP_MODEL, classes: Sequence[str] = ANIMALS, template: str = "a photo of a {}"
) -> RewardFunction:
    """Score the margin of `clip_margin` minus that of the input image `metadata["image"]`.

    It uses the margin instead of the true class's logit, because this logit also rises when all logits rise.
    """
    after = clip_margin(model, classes, template)

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        before = metadata_images(metadata, "image", images)
        return after(images, prompts, metadata) - after(before, prompts, metadata)

    return reward


@register(needs=("prompt",), models=("MODEL", "PROCESSOR"))
def pick_score(model: str | Path = PICK_SCORE, processor: str | Path = CLIP_H) -> RewardFunction:
    """Score images by PickScore, the logit of a CLIP that was trained on human preferences.

    exp(logit_scale) * cos(image, prompt), which is CLIPModel's `logits_per_image`; differences between images
    of one prompt are what it was trained on. `processor` has its tokenizer and preprocessor. Source: Kirstain
    et al. 2023, arXiv 2305.01569, equation 1. Checked against CLIPModel's own forward on random weights,
    never against the published checkpoint.
    """
    clip = load_clip(model, processor)

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        return clip.cosines(images, prompts) * clip.model.logit_scale.exp()

    return reward


def _load_aesthetic_head(path: Path) -> nn.Module:
    """Load the network of LAION's aesthetic score, (B, 768) to (B, 1), from a folder or a file."""
    from safetensors.torch import load_file

    weights = load_file(path if path.is_file() else path / "model.safetensors")
    head = nn.Sequential(  # without activations, as published; dropout keeps the published numbers
        nn.Linear(768, 1024),
        nn.Dropout(0.2),
        nn.Linear(1024, 128),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.Dropout(0.1),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )
    prefix = "layers."  # beside them the file may hold CLIP's
    head.load_state_dict({k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)})
    return head.eval().requires_grad_(False)


@register(models=("CLIP", "HEAD"))
def aesthetic_score(model: str | Path = CLIP_MODEL, head: str | Path = AESTHETIC_HEAD) -> RewardFunction:
    """Score aesthetics from about 1 to 10: LAION's small network on CLIP ViT-L/14's unit embedding.

    Source: Schuhmann 2022, "improved-aesthetic-predictor" (sac+logos+ava1-l14-linearMSE), used in the DDPO
    paper, section 5.2. The scores mean something only with the pair of models given as defaults. The head is
    on the hub, in a folder, or a safetensors file with the keys layers.0.weight, layers.0.bias, ... Raises
    ValueError if the CLIP model's embeddings do not have 768 dimensions; RuntimeError if a model cannot be
    had.
    """
    scorer = load_from_hub(head, _load_aesthetic_head)
    clip = load_clip(model)
    width = clip.model.config.projection_dim
    if width != 768:
        raise ValueError(f"the CLIP model {str(model)!r} embeds in {width} dimensions: use {CLIP_MODEL}")

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        clip.to(images.device)
        return scorer.to(images.device)(clip.embed_images(images))[:, 0]

    return reward


# ------------------------------------------------------------------------------ perceptual distance
class _Features(nn.Module):
    """Return the feature maps of all stages of a network, with unit length at every position."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel

        super().__init__()
        self.model = _pretrained(AutoModel, folder)
        self.normalize = _Normalize(folder)
        if any(layer.ndim != 4 for layer in self(torch.zeros(1, 3, 64, 64))):
            raise ValueError("its hidden states are no (B, C, H, W) maps: use a convolutional net")

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        outputs = self.model(self.normalize(images), output_hidden_states=True)
        return [F.normalize(layer, dim=1) for layer in outputs.hidden_states]  # (B, C, H', W')


@register(needs=("target",), models=("NETWORK",))
def distance_penalty(model: str | Path = PERCEPTUAL_MODEL, reference: str = "target") -> RewardFunction:
    """Score minus a perceptual distance, as in LPIPS, to the image `metadata[reference]` (3, H, W).

    With f_l the features of stage l, scaled to unit length over the channels at each position, it is the mean
    over l, over positions, of `|f_l(image) - f_l(reference)|^2`, in [0, 4]. This is LPIPS without its learned
    channel weights and with a mean over stages for its sum (Zhang et al. 2018, arXiv 1801.03924, equation 1;
    section 4 finds unweighted features a good metric already).

    The model is a convolutional network that `AutoModel` loads, such as ResNet or ConvNeXt; a RuntimeError
    says that it cannot be had, or is not convolutional. The reference "target" is the clean original, and
    "image" the input.
    """
    features = load_from_hub(model, _Features)

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        features.to(images.device)
        here, there = features(images), features(metadata_images(metadata, reference, images))
        layers = [
            (a - b).square().sum(dim=1).mean(dim=(1, 2)) for a, b in zip(here, there, strict=True)
        ]  # (B,) each
        return -torch.stack(layers).mean(dim=0)

    return reward
