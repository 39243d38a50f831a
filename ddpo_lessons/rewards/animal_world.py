"""Rewards of the world of animals: a classifier scores animal and artist, the background is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ddpo_lessons.rewards.reward import (
    Metadata,
    RewardFunction,
    Rewards,
    check_classes,
    checked_reward,
    margin,
    metadata_column,
    register,
)
from ddpo_lessons.worlds import animals
from ddpo_lessons.worlds.animals import Description


@register(needs=("prompt",), reads=lambda prompts: described(prompts, [{}] * len(prompts)))
def animal_alignment(model: nn.Module | None = None, background_weight: float = 10.0) -> RewardFunction:
    """Score how well an image of the world of animals shows its prompt.

    With log p from the classifier (nats), and the mean distance of the background's pixels from the named
    color, Euclidean in RGB on [0, 1]::

        log p(animal) + log p(artist) - background_weight * distance

    Animal and artist may be named by the metadata instead, as `metadata["animal"]` and `metadata["artist"]`:
    in an edit the prompt leaves them out, and those of the image are to stay. A term that neither names
    counts 0. The background is where `metadata["background_mask"]` (64, 64) is true; without it, the
    outermost three rows and columns of pixels. The three terms are returned as info, before weighting. A
    ValueError refuses images of another size, a name that this world does not have, and a prompt of which
    nothing can be scored.

    The model maps images (B, 3, 64, 64) to logits of animal, artist and background; None is the reward
    model of the world of animals. Never pass a held-out evaluator.
    """
    classifier = (animals.RewardModel.load() if model is None else model).eval()

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        check_side(images, "animal_alignment")
        said = described(prompts, metadata)
        animal_logits, artist_logits, _ = classifier.to(images.device)(images)
        terms = {
            "animal_log_prob": _log_prob(animal_logits, [part.animal for part in said], animals.ANIMALS),
            "artist_log_prob": _log_prob(artist_logits, [part.artist for part in said], animals.ARTISTS),
            "background_distance": animals.background_distance(
                images, [part.background for part in said], _background_masks(metadata, images)
            ),
        }
        score = terms["animal_log_prob"] + terms["artist_log_prob"]
        return score - background_weight * terms["background_distance"], terms

    return reward


@register(needs=("label",))
def animal_margin(classes: Sequence[str] = animals.ANIMALS, model: nn.Module | None = None) -> RewardFunction:
    """Score the logit of the animal `metadata["label"]` minus the largest wrong one.

    What `clip_margin` is for photographs, for the world of animals: among `classes`, names of its animals.
    The model is as for `animal_alignment`. Train for the reward model alone, and measure with
    `animals.Judge.load()`, or with the second one: an image is recognized where its margin is above 0.
    Raises ValueError if there are fewer than two of them, or one is no animal of this world; and for images
    that are not of its size.
    """
    check_classes(classes)
    if strangers := [name for name in classes if name not in animals.ANIMALS]:
        raise ValueError(f"classes contain {strangers[0]!r}: use names from worlds.animals.ANIMALS")
    classifier = animals.RewardModel.load() if model is None else model
    columns = [animals.ANIMALS.index(name) for name in classes]

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> torch.Tensor:
        check_side(images, "animal_margin")
        labels = metadata_column(metadata, "label", "the name of the animal")
        return margin(classifier.to(images.device)(images)[0][:, columns], labels, classes)

    return reward


def check_side(images: torch.Tensor, name: str) -> None:
    """Raise a ValueError for images that do not have this world's size."""
    if images.shape[2:] != (animals.IMAGE_SIZE, animals.IMAGE_SIZE):
        raise ValueError(
            f"images are {images.shape[3]}x{images.shape[2]}: {name} scores those of tiny-zoo, "
            f"{animals.IMAGE_SIZE}x{animals.IMAGE_SIZE}"
        )


def described(prompts: Sequence[str], metadata: Metadata) -> list[Description]:
    """Read prompts, with what the metadata names; a ValueError refuses those of which nothing is scored."""
    said = [
        _with_metadata(index, animals.parse_prompt(prompt), entry)
        for index, (prompt, entry) in enumerate(zip(prompts, metadata, strict=True))
    ]
    for index, (prompt, part) in enumerate(zip(prompts, said, strict=True)):
        if part == animals.Description():
            raise ValueError(
                f"prompt {index}, {prompt!r}, names no animal, artist or background: "
                'write as in "a fox by Noto on a blue background", or train for another reward'
            )
    return said


def _with_metadata(index: int, said: Description, metadata: Mapping[str, Any]) -> Description:
    """Return the description of a prompt, completed with animal and artist from the metadata."""
    for name, known in (("animal", animals.ANIMALS), ("artist", animals.ARTISTS)):
        if metadata.get(name) not in (None, *known):
            raise ValueError(
                f"metadata[{index}][{name!r}] is {metadata[name]!r}: "
                f"use a name of worlds.animals.{name.upper()}S"
            )
    animal, artist = said.animal or metadata.get("animal"), said.artist or metadata.get("artist")
    return replace(said, animal=animal, artist=artist)


def _background_masks(metadata: Metadata, images: torch.Tensor) -> torch.Tensor | None:
    """Return where the backgrounds are, (B, 64, 64) bool on the images' device, or None without masks."""
    masks: list[Any] = [entry.get("background_mask") for entry in metadata]
    if all(mask is None for mask in masks):
        return None
    for index, mask in enumerate(masks):
        if not isinstance(mask, torch.Tensor) or mask.shape != images.shape[2:] or mask.dtype != torch.bool:
            raise ValueError(
                f"metadata[{index}]['background_mask'] must be a bool tensor of the images' sides, "
                f"{tuple(images.shape[2:])}, in all entries or in none"
            )
    return torch.stack([mask.to(images.device) for mask in masks])


def _log_prob(logits: torch.Tensor, names: Sequence[str | None], classes: Sequence[str]) -> torch.Tensor:
    """Return log-probs (B,) in nats of the named classes from logits (B, C); 0 where none is named."""
    log_probs = logits.float().log_softmax(dim=1)
    return torch.stack(
        [
            row.new_zeros(()) if name is None else row[classes.index(name)]
            for row, name in zip(log_probs, names, strict=True)
        ]
    )
