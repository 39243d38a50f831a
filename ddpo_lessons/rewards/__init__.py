"""Reward functions: what the policy is trained to increase.

Every factory here returns a function of `(images, prompts, metadata)`. It takes float images
(B, 3, H, W) in [0, 1], B prompts and B dicts of metadata, and returns float32 rewards (B,) on the
images' device, or `(rewards, info)` with a dict of named (B,) tensors. Rewards carry no gradient:
DDPO uses their values only, so a reward may be anything that can be computed (Black et al. 2023,
arXiv 2305.13301, section 5).
"""

from __future__ import annotations

import functools
import io
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from ddpo_lessons.data.prompts import ANIMALS

Metadata = Sequence[Mapping[str, Any]]
Rewards = torch.Tensor | tuple[torch.Tensor, dict[str, Any]]
T = TypeVar("T")

CLIP_MODEL = "openai/clip-vit-large-patch14"
AESTHETIC_HEAD = "ttj/sac-logos-ava1-l14-linearMSE"
PERCEPTUAL_MODEL = "microsoft/resnet-18"


class RewardFunction(Protocol):
    """What a trainer calls after sampling: images (B, 3, H, W) in [0, 1] to rewards (B,)."""

    def __call__(self, images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        """Score a batch of images."""
        ...


# ------------------------------------------------------------------------------------------ input
def check_images(images: torch.Tensor, name: str = "images") -> None:
    """Refuse anything but finite float images (B, 3, H, W) in [0, 1], to a tolerance of 1e-3.

    Args:
        images: what to look at.
        name: how the message calls them.

    Raises:
        TypeError: if `images` is not a floating-point tensor.
        ValueError: if shape or range is wrong or a pixel is NaN or infinite.
    """
    if not isinstance(images, torch.Tensor) or not images.is_floating_point():
        kind = images.dtype if isinstance(images, torch.Tensor) else type(images).__name__
        raise TypeError(f"{name} is {kind}: pass a float tensor (B, 3, H, W) in [0, 1]")
    if images.ndim != 4 or images.shape[1] != 3 or images.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(images.shape)}: pass (B, 3, H, W)")
    for index, image in enumerate(images):
        low, high = (limit.item() for limit in image.aminmax())  # NaN if any pixel is NaN
        if not (low >= -1e-3 and high <= 1 + 1e-3):  # so written, it refuses NaN too
            raise ValueError(
                f"{name}[{index}] spans [{low:.4g}, {high:.4g}]: rewards take finite values in "
                "[0, 1]; images in [-1, 1] become (images + 1) / 2"
            )


def _reward(score: RewardFunction) -> RewardFunction:
    """Check what comes in, take away gradients, and hand on float32 images clamped to [0, 1]."""

    @functools.wraps(score)
    def checked(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        check_images(images)
        for name, given in (("prompts", prompts), ("metadata", metadata)):
            if len(given) != len(images):
                raise ValueError(f"{len(given)} {name} for {len(images)} images: pass one for each")
        with torch.no_grad():
            return score(images.float().clamp(0, 1), prompts, metadata)

    return checked


def _column(metadata: Metadata, key: str, meaning: str) -> list[Any]:
    for index, entry in enumerate(metadata):
        if key not in entry:
            raise ValueError(
                f"metadata[{index}] has no {key!r}: this reward needs {meaning}; "
                "let the prompt function put it into the metadata"
            )
    return [entry[key] for entry in metadata]


def _digits(metadata: Metadata, device: torch.device) -> torch.Tensor:
    values = _column(metadata, "digit", "the true digit, an int from 0 to 9")
    for index, value in enumerate(values):
        try:
            valid = 0 <= operator.index(value) <= 9
        except TypeError:
            valid = False
        if not valid:
            raise ValueError(f"metadata[{index}]['digit'] is {value!r}: use an int from 0 to 9")
    return torch.tensor([operator.index(value) for value in values], device=device)  # (B,)


def _images(metadata: Metadata, key: str, like: torch.Tensor) -> torch.Tensor:
    values = _column(metadata, key, "an image (3, H, W) in [0, 1]")
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or value.shape != like.shape[1:]:
            given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"metadata[{index}][{key!r}] is {given}: "
                f"use a tensor of the images' shape {tuple(like.shape[1:])}"
            )
    images = torch.stack([value.to(like.device) for value in values])  # (B, 3, H, W)
    check_images(images, f"metadata {key!r}")
    return images.float().clamp(0, 1)


# ----------------------------------------------------------------------------------------- pixels
def _jpeg_kilobytes(images: torch.Tensor) -> torch.Tensor:
    from ddpo_lessons.tiny.world import to_pil

    sizes = []
    for image in images:
        buffer = io.BytesIO()
        to_pil(image).save(buffer, format="JPEG", quality=95)
        sizes.append(buffer.tell() / 1000)
    return torch.tensor(sizes, dtype=torch.float32, device=images.device)  # (B,)


def jpeg_compressibility() -> RewardFunction:
    """Minus the size of the image as a JPEG of quality 95, in kB of 1000 bytes.

    Source: DDPO paper, section 5.1; kB and quality as in ddpo-pytorch.

    Returns:
        The reward function.
    """
    return _reward(lambda images, prompts, metadata: -_jpeg_kilobytes(images))


def jpeg_incompressibility() -> RewardFunction:
    """The size of the image as a JPEG of quality 95, in kB of 1000 bytes.

    Returns:
        The reward function.
    """
    return _reward(lambda images, prompts, metadata: _jpeg_kilobytes(images))


def colourfulness() -> RewardFunction:
    """How colourful people find an image; 0 for greys, above 100 for the most vivid.

    With R, G, B on 0..255, rg = R - G and yb = (R + G) / 2 - B:
    sqrt(std(rg)^2 + std(yb)^2) + 0.3 sqrt(mean(rg)^2 + mean(yb)^2), over all pixels.

    Source: Hasler and Suesstrunk 2003, "Measuring colourfulness in natural images", metric M(3).

    Returns:
        The reward function.
    """

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        red, green, blue = (255 * images).flatten(2).unbind(1)  # (B, H*W) each
        opponent = torch.stack([red - green, (red + green) / 2 - blue], dim=1)  # (B, 2, H*W)
        std = opponent.std(dim=2, correction=0).norm(dim=1)  # (B,)
        mean = opponent.mean(dim=2).norm(dim=1)  # (B,)
        return std + 0.3 * mean

    return reward


def decorruption(reference: str = "target") -> RewardFunction:
    """Minus the mean squared error to the image `metadata[reference]` (3, H, W).

    Args:
        reference: key of the metadata: "target" pulls towards the clean original, "image" keeps
            the result close to the input.

    Returns:
        The reward function; its values lie in [-1, 0].
    """

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        return -(images - _images(metadata, reference, images)).square().mean(dim=(1, 2, 3))

    return reward


# ------------------------------------------------------------------------------------ digit world
def _digit_reader(model: nn.Module | None) -> nn.Module:
    """Return the classifier to ask: (B, 3, 32, 32) to logits (B, 10); by default the tiny one."""
    if model is None:
        from ddpo_lessons.tiny import load_reward_model

        model = load_reward_model()
    return model.eval()


def _legibility(
    model: nn.Module, images: torch.Tensor, digits: torch.Tensor, probability: bool
) -> torch.Tensor:
    log_probs = model.to(images.device)(images).float().log_softmax(dim=1)  # (B, 10)
    chosen = log_probs.gather(1, digits[:, None])[:, 0]  # (B,)
    return chosen.exp() if probability else chosen


def _margin(logits: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Logit of the true class minus the strongest wrong one; (B, C) and (B,) to (B,)."""
    wrong = logits.scatter(1, true[:, None], -torch.inf)
    return logits.gather(1, true[:, None])[:, 0] - wrong.amax(dim=1)


def digit_legibility(model: nn.Module | None = None, probability: bool = False) -> RewardFunction:
    """How well the digit `metadata["digit"]` can be read: log p(digit | image), in nats.

    Args:
        model: a digit classifier, images (B, 3, H, W) to logits (B, 10); None for the reward model
            of the digit world. Never pass the judge.
        probability: give p instead of log p; bounded, but flat where the digit cannot be read.

    Returns:
        The reward function.
    """
    reader = _digit_reader(model)

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        return _legibility(reader, images, _digits(metadata, images.device), probability)

    return reward


def legibility_gain(model: nn.Module | None = None, probability: bool = False) -> RewardFunction:
    """Legibility after minus before; before is that of the input, `metadata["image"]` (3, H, W).

    The baseline differs from image to image but not from policy to policy, so the gain has the
    same gradient as `digit_legibility` and less variance between easy and hard inputs.

    Args:
        model: as for `digit_legibility`.
        probability: as for `digit_legibility`.

    Returns:
        The reward function.
    """
    reader = _digit_reader(model)

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        digits = _digits(metadata, images.device)
        before = _images(metadata, "image", images)
        after_and_before = torch.cat([images, before])  # (2B, 3, H, W)
        both = _legibility(reader, after_and_before, digits.repeat(2), probability)  # (2B,)
        return both[: len(images)] - both[len(images) :]

    return reward


def digit_margin(model: nn.Module | None = None) -> RewardFunction:
    """Logit of the true digit minus that of the strongest wrong digit; positive if read rightly.

    Args:
        model: as for `digit_legibility`.

    Returns:
        The reward function.
    """
    reader = _digit_reader(model)

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        logits = reader.to(images.device)(images).float()  # (B, 10)
        return _margin(logits, _digits(metadata, images.device))

    return reward


def _colour_distance(measured: torch.Tensor, names: Sequence[str | None]) -> torch.Tensor:
    """Euclidean RGB distance (B,) of measured (B, 3) to named colours; 0 where none is named."""
    from ddpo_lessons.tiny.world import COLOURS

    distances = [
        measured.new_zeros(()) if name is None else (row - row.new_tensor(COLOURS[name])).norm()
        for row, name in zip(measured, names, strict=True)
    ]
    return torch.stack(distances)


def prompt_alignment(
    model: nn.Module | None = None,
    digit_weight: float = 1.0,
    ink_weight: float = 1.0,
    background_weight: float = 1.0,
) -> RewardFunction:
    """How well an image of the digit world shows what its prompt says.

    digit_weight * log p(digit) - ink_weight * |ink - named ink| - background_weight *
    |background - named background|: log p from the classifier, colours measured without any
    model, distances Euclidean in RGB on [0, 1] (at most sqrt(3)). What a prompt leaves unsaid
    counts 0. The three terms are returned as info, before weighting.

    Args:
        model: as for `digit_legibility`.
        digit_weight: weight of the log-probability, per nat.
        ink_weight: weight of the ink's distance.
        background_weight: weight of the background's distance.

    Returns:
        The reward function. It raises ValueError for a prompt that names none of the three.
    """
    from ddpo_lessons.tiny.world import measure_colours, parse_prompt

    reader = _digit_reader(model)

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        said = [parse_prompt(prompt) for prompt in prompts]
        for index, part in enumerate(said):
            if part.digit is None and part.ink is None and part.background is None:
                raise ValueError(
                    f"prompts[{index}]={prompts[index]!r} names no digit and no colour: "
                    'write as in "a red three on a blue background"'
                )
        named = torch.tensor([part.digit is not None for part in said], device=images.device)
        digits = torch.tensor([part.digit or 0 for part in said], device=images.device)  # (B,)
        log_p = _legibility(reader, images, digits, probability=False) * named  # (B,)
        ink, background = measure_colours(images)  # (B, 3) each
        ink_distance = _colour_distance(ink, [part.ink for part in said])
        background_distance = _colour_distance(background, [part.background for part in said])
        score = digit_weight * log_p - ink_weight * ink_distance - background_weight * background_distance
        return score, {
            "digit_log_prob": log_p,
            "ink_distance": ink_distance,
            "background_distance": background_distance,
        }

    return reward


def recolouring(
    model: nn.Module | None = None, colour_weight: float = 10.0, shape_weight: float = 30.0
) -> RewardFunction:
    """Obey a prompt that names ink and background, and keep digit and shape of the input.

    log p(digit) - colour_weight * (|ink - named ink| + |background - named background|) - shape_weight *
    mean |coverage - coverage of the input|: log p of `metadata["digit"]` from the classifier, colours and
    coverage measured without any model (`world.measure_colours`, `world.coverage`), colours' distances
    Euclidean in RGB on [0, 1]. The input is `metadata["image"]` (3, H, W). The four terms are returned as
    info, before weighting.

    Args:
        model: as for `digit_legibility`.
        colour_weight: weight of the two colours' distances.
        shape_weight: weight of the share of ink that came, went or moved.

    Returns:
        The reward function. It raises ValueError for a prompt that does not name both colours.
    """
    from ddpo_lessons.tiny import world

    reader = _digit_reader(model)

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        said = [world.parse_prompt(prompt) for prompt in prompts]
        for index, part in enumerate(said):
            if part.ink is None or part.background is None:
                raise ValueError(
                    f"prompts[{index}]={prompts[index]!r} does not name ink and background: "
                    'write as in "a yellow digit on a white background"'
                )
        log_p = _legibility(reader, images, _digits(metadata, images.device), probability=False)  # (B,)
        inputs = _images(metadata, "image", images)
        ink, background = world.measure_colours(images)  # (B, 3) each
        moved = world.coverage(images, ink, background) - world.coverage(
            inputs, *world.measure_colours(inputs)
        )
        terms = {
            "digit_log_prob": log_p,
            "ink_distance": _colour_distance(ink, [part.ink for part in said]),
            "background_distance": _colour_distance(background, [part.background for part in said]),
            "shape_distance": moved.abs().mean(dim=(1, 2, 3)),
        }
        colours = terms["ink_distance"] + terms["background_distance"]
        return log_p - colour_weight * colours - shape_weight * terms["shape_distance"], terms

    return reward


# ---------------------------------------------------------------------------- models from the hub
def load_from_hub(model: str | Path, load: Callable[[Path], T]) -> T:
    """Find a model on this machine or on the hub, and load it.

    Only JSON, the tokenizer's merges and safetensors are ever downloaded or read: no pickle, no
    code of the model's repository.

    Args:
        model: a folder, a file, or the id of a model on the hub.
        load: turns the folder (or file) into what is returned.

    Returns:
        What `load` made.

    Raises:
        RuntimeError: if the model cannot be had or loaded; says which, why and what to do.
    """
    from huggingface_hub import snapshot_download

    files = ["*.json", "merges.txt", "model*.safetensors"]
    try:
        here = Path(model)
        if not here.exists():
            here = Path(snapshot_download(str(model), allow_patterns=files))
        return load(here)
    except Exception as error:  # network, file and format errors share the remedy, but no base
        reason = " ".join(str(error).split())
        raise RuntimeError(
            f"the model {str(model)!r} could not be loaded ({type(error).__name__}: {reason}). "
            "On a machine with a network run `hf download MODEL --local-dir FOLDER`, copy the "
            "folder here and pass its path; or set HF_HOME to a cache that already holds it"
        ) from error


def _pretrained(model_class: Any, folder: Path) -> Any:
    model, report = model_class.from_pretrained(
        folder, use_safetensors=True, trust_remote_code=False, output_loading_info=True
    )
    if report["missing_keys"]:  # transformers would leave them random, and the reward with them
        raise ValueError(f"weights are missing: {', '.join(sorted(report['missing_keys']))[:200]}")
    return model.eval().requires_grad_(False)


class _Normalize(nn.Module):
    """Shift and scale channels by the mean and std of a folder's preprocessor_config.json."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.settings = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
        self.register_buffer("mean", torch.tensor(self.settings["image_mean"])[:, None, None])
        self.register_buffer("std", torch.tensor(self.settings["image_std"])[:, None, None])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (images - self.mean) / self.std


class _Clip(nn.Module):
    """CLIP (Radford et al. 2021, arXiv 2103.00020) as two maps onto the unit sphere."""

    def __init__(self, folder: Path) -> None:
        from transformers import CLIPModel, CLIPTokenizer

        super().__init__()
        self.model = _pretrained(CLIPModel, folder)
        self.tokenizer = CLIPTokenizer.from_pretrained(folder)
        self.normalize = _Normalize(folder)
        size, crop = (self.normalize.settings[key] for key in ("size", "crop_size"))
        self.edge = size["shortest_edge"] if isinstance(size, dict) else size
        self.crop = crop["height"] if isinstance(crop, dict) else crop

    def preprocess(self, images: torch.Tensor) -> torch.Tensor:
        """CLIP's own preprocessing in torch: shorter edge resized, centre cropped, normalised.

        Bicubic with antialias is what PIL does, but for rounding to 8 bits in between; doing it
        here spares the detour through PIL images and the need for torchvision.
        """
        shape = [self.edge * side // min(images.shape[2:]) for side in images.shape[2:]]
        resized = F.interpolate(images, shape, mode="bicubic", antialias=True).clamp(0, 1)
        top, left = ((side - self.crop) // 2 for side in shape)
        cropped = resized[:, :, top : top + self.crop, left : left + self.crop]
        return self.normalize(cropped)

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        """Images (B, 3, H, W) in [0, 1] to unit vectors (B, D)."""
        pooled = self.model.vision_model(pixel_values=self.preprocess(images)).pooler_output
        return F.normalize(self.model.visual_projection(pooled), dim=1)

    def embed_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """N texts to unit vectors (N, D); what exceeds CLIP's 77 tokens is cut."""
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self.normalize.mean.device)
        return F.normalize(self.model.text_projection(self.model.text_model(**tokens).pooler_output), dim=1)


@functools.cache
def _load_clip(model: str | Path) -> _Clip:
    # Cached, for a weighted sum of CLIP rewards needs the 1.7 GB only once.
    return load_from_hub(model, _Clip)


def clip_score(model: str | Path = CLIP_MODEL) -> RewardFunction:
    """Cosine of CLIP's embeddings of image and prompt, in [-1, 1].

    CLIPModel's `logits_per_image` is this times exp(logit_scale). Source: Hessel et al. 2021,
    arXiv 2104.08718, who report 2.5 max(cosine, 0).

    Args:
        model: a CLIPModel on the hub, or its folder.

    Returns:
        The reward function.

    Raises:
        RuntimeError: if the model cannot be had.
    """
    clip = _load_clip(model)

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        clip.to(images.device)
        return (clip.embed_images(images) * clip.embed_texts(prompts)).sum(dim=1)

    return reward


def _class_logits(
    model: str | Path, classes: Sequence[str], template: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Zero-shot classifier: images (B, 3, H, W) to exp(logit_scale) * cosines (B, classes)."""
    if len(set(classes)) != len(classes) or len(classes) < 2:
        raise ValueError(f"classes={list(classes)}: give two or more different names")
    if "{}" not in template:
        raise ValueError(f"template={template!r} has no {{}}: it marks the place of the class")
    clip = _load_clip(model)
    with torch.no_grad():
        texts = clip.embed_texts([template.format(name) for name in classes])  # (classes, D)

    def logits(images: torch.Tensor) -> torch.Tensor:
        clip.to(images.device)
        scale = clip.model.logit_scale.exp()
        return scale * clip.embed_images(images) @ texts.to(images.device).T

    return logits


def _labels(metadata: Metadata, classes: Sequence[str], device: torch.device) -> torch.Tensor:
    labels = _column(metadata, "label", "the name of the true class")
    for index, label in enumerate(labels):
        if label not in classes:
            raise ValueError(f"metadata[{index}]['label'] is {label!r}: use one of {list(classes)}")
    return torch.tensor([classes.index(label) for label in labels], device=device)  # (B,)


def clip_margin(
    model: str | Path = CLIP_MODEL,
    classes: Sequence[str] = ANIMALS,
    template: str = "a photo of a {}",
) -> RewardFunction:
    """CLIP's zero-shot logit of the class `metadata["label"]` minus the strongest wrong one.

    Args:
        model: a CLIPModel on the hub, or its folder.
        classes: the names of the classes.
        template: the sentence for a class; {} becomes its name.

    Returns:
        The reward function.

    Raises:
        ValueError: if there are fewer than two classes, or the template has no place for them.
        RuntimeError: if the model cannot be had.
    """
    logits = _class_logits(model, classes, template)

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        return _margin(logits(images), _labels(metadata, classes, images.device))

    return reward


def clip_change(
    model: str | Path = CLIP_MODEL,
    classes: Sequence[str] = ANIMALS,
    template: str = "a photo of a {}",
) -> RewardFunction:
    """The margin of `clip_margin` after minus before, before being that of `metadata["image"]`.

    The margin and not the true class's logit alone, which rises as well when all logits rise.

    Args:
        model: as for `clip_margin`.
        classes: as for `clip_margin`.
        template: as for `clip_margin`.

    Returns:
        The reward function.

    Raises:
        ValueError: as for `clip_margin`.
        RuntimeError: if the model cannot be had.
    """
    logits = _class_logits(model, classes, template)

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        labels = _labels(metadata, classes, images.device)
        before = _images(metadata, "image", images)
        return _margin(logits(images), labels) - _margin(logits(before), labels)

    return reward


def _load_aesthetic_head(path: Path) -> nn.Module:
    from safetensors.torch import load_file

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
    weights = load_file(path if path.is_file() else path / "model.safetensors")
    prefix = "layers."
    layers = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    head.load_state_dict(layers)
    return head.eval().requires_grad_(False)


def aesthetic_score(model: str | Path = CLIP_MODEL, head: str | Path = AESTHETIC_HEAD) -> RewardFunction:
    """LAION's aesthetic score, about 1 to 10: a small network on CLIP ViT-L/14's unit embedding.

    Source: Schuhmann 2022, "improved-aesthetic-predictor" (sac+logos+ava1-l14-linearMSE), used in
    the DDPO paper, section 5.2. The scores mean something only with the pair of models given as
    defaults.

    Args:
        model: CLIP ViT-L/14 on the hub, or its folder.
        head: the network's weights: a model on the hub, its folder, or a safetensors file with the
            keys layers.0.weight, layers.0.bias, ...

    Returns:
        The reward function.

    Raises:
        ValueError: if the CLIP model's embeddings do not have 768 dimensions.
        RuntimeError: if a model cannot be had.
    """
    scorer = load_from_hub(head, _load_aesthetic_head)
    clip = _load_clip(model)
    width = clip.model.config.projection_dim
    if width != 768:
        raise ValueError(f"model={str(model)!r} embeds in {width} dimensions: use {CLIP_MODEL}")

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        clip.to(images.device)
        return scorer.to(images.device)(clip.embed_images(images))[:, 0]

    return reward


class _Features(nn.Module):
    """Feature maps of every stage of a convolutional network, of unit length at every position."""

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


def distance_penalty(model: str | Path = PERCEPTUAL_MODEL, reference: str = "target") -> RewardFunction:
    """Minus a perceptual distance, LPIPS-style, to the image `metadata[reference]` (3, H, W).

    With f_l the features of stage l, scaled to unit length over the channels at each position,
    d = mean over l, over positions, of |f_l(image) - f_l(reference)|^2, in [0, 4]. This is LPIPS
    without its learned channel weights and with a mean over stages for its sum (Zhang et al. 2018,
    arXiv 1801.03924, equation 1; section 4 finds unweighted features a good metric already).

    Args:
        model: a convolutional network on the hub, or its folder, that `AutoModel` loads, such as
            ResNet or ConvNeXt.
        reference: key of the metadata: "target" pulls towards the clean original, "image" keeps
            the result close to the input.

    Returns:
        The reward function.

    Raises:
        RuntimeError: if the model cannot be had, or is not convolutional.
    """
    features = load_from_hub(model, _Features)

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        features.to(images.device)
        here, there = features(images), features(_images(metadata, reference, images))
        layers = [
            (a - b).square().sum(dim=1).mean(dim=(1, 2)) for a, b in zip(here, there, strict=True)
        ]  # (B,) each
        return -torch.stack(layers).mean(dim=0)

    return reward


# ------------------------------------------------------------------------------------ combinations
def _component(result: Rewards, name: str, like: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    rewards, info = result if isinstance(result, tuple) else (result, {})
    rewards = torch.as_tensor(rewards, dtype=torch.float32, device=like.device)
    if rewards.shape != like.shape[:1]:
        raise ValueError(f"rewards of {name!r} have shape {tuple(rewards.shape)}: return (B,)")
    if not rewards.isfinite().all():
        worst = int(rewards.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"reward of {name!r} is {rewards[worst].item()} for sample {worst}")
    return rewards, info


def weighted_sum(components: Mapping[str, tuple[float, RewardFunction]]) -> RewardFunction:
    """Sum of weight * reward over the components.

    The info holds every component's rewards (B,) before weighting, under its name, and its own
    info under "name/key".

    Args:
        components: name to (weight, reward function).

    Returns:
        The reward function. It raises ValueError if a component returns NaN, an infinity or
        anything but (B,), naming the component.

    Raises:
        ValueError: if there is no component or a weight is not finite.
    """
    if not components:
        raise ValueError("components is empty: give at least one name: (weight, reward)")
    for name, (weight, _) in components.items():
        if not abs(weight) < float("inf"):
            raise ValueError(f"weight of {name!r} is {weight}: use a finite number")

    @_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        total = images.new_zeros(len(images))
        info: dict[str, Any] = {}
        for name, (weight, function) in components.items():
            rewards, details = _component(function(images, prompts, metadata), name, images)
            total += weight * rewards
            info[name] = rewards
            info.update({f"{name}/{key}": value for key, value in details.items()})
        return total, info

    return reward


def edit(
    model: str | Path = CLIP_MODEL,
    perceptual_model: str | Path = PERCEPTUAL_MODEL,
    clip_weight: float = 5.0,
    distance_weight: float = 1.0,
) -> RewardFunction:
    """Obey the prompt and keep the picture: CLIP's score of the prompt less the distance to the input.

    clip_weight * cos(image, prompt) - distance_weight * d(image, metadata["image"]), with the cosine of
    `clip_score` in [-1, 1] and the perceptual distance of `distance_penalty` in [0, 4]. Both terms are
    returned as info before weighting, "clip_score" and "distance_penalty", which is -d.

    Advantages are normalised, so that only the ratio of the weights counts: it trades obedience against
    faithfulness. 5 to 1 is a guess, not measured on a GPU: CLIP's cosines lie closer together than distances.
    Sources: Hessel et al. 2021, arXiv 2104.08718, and Zhang et al. 2018, arXiv 1801.03924, as those two say.

    Args:
        model: as for `clip_score`.
        perceptual_model: the model of `distance_penalty`.
        clip_weight: weight of obedience, per unit of cosine.
        distance_weight: weight of faithfulness, per unit of distance.

    Returns:
        The reward function. It raises ValueError where the metadata has no `image` of the result's shape.

    Raises:
        ValueError: if a weight is negative or not finite.
        RuntimeError: if a model cannot be had, or the perceptual one is not convolutional.
    """
    for name, weight in (("clip_weight", clip_weight), ("distance_weight", distance_weight)):
        if not 0 <= weight < float("inf"):
            raise ValueError(f"{name}={weight}: use a finite number that is not negative")
    return weighted_sum(
        {
            "clip_score": (clip_weight, clip_score(model)),
            "distance_penalty": (distance_weight, distance_penalty(perceptual_model, reference="image")),
        }
    )


REWARDS: dict[str, Callable[[], RewardFunction]] = {
    "jpeg_compressibility": jpeg_compressibility,
    "jpeg_incompressibility": jpeg_incompressibility,
    "colourfulness": colourfulness,
    "decorruption": decorruption,
    "digit_legibility": digit_legibility,
    "legibility_gain": legibility_gain,
    "digit_margin": digit_margin,
    "prompt_alignment": prompt_alignment,
    "clip_score": clip_score,
    "clip_margin": clip_margin,
    "clip_change": clip_change,
    "aesthetic_score": aesthetic_score,
    "distance_penalty": distance_penalty,
    "recolouring": recolouring,
    "edit": edit,
}


def get_reward(name: str) -> RewardFunction:
    """Make the reward function of a name in `REWARDS`, with its default arguments.

    Args:
        name: a key of `REWARDS`.

    Returns:
        The reward function.

    Raises:
        ValueError: if the name does not exist; the message lists those that do.
        RuntimeError: if the reward needs a model that cannot be had.
    """
    if name not in REWARDS:
        raise ValueError(f"reward={name!r} does not exist: use one of {', '.join(sorted(REWARDS))}")
    return REWARDS[name]()
