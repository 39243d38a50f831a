"""Rewards of the world of animals: its classifier names animal and artist, the ground is measured."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ddpo_lessons.rewards.base import Metadata, RewardFunction, Rewards, checked_reward


def animal_alignment(
    model: nn.Module | None = None,
    animal_weight: float = 1.0,
    artist_weight: float = 1.0,
    ground_weight: float = 10.0,
) -> RewardFunction:
    """How well an image of the world of animals shows what its prompt says.

    With log p from the classifier, the ground measured without any model, and its distance Euclidean in RGB
    on [0, 1]::

        animal_weight * log p(animal) + artist_weight * log p(artist)
            - ground_weight * |ground - named ground|

    The animal may be named by the metadata instead, as `metadata["animal"]`: in an edit the sentence leaves
    it out, and the picture's own is to stay. What neither says counts 0. The three terms are returned as
    info, before weighting.

    Args:
        model: images (B, 3, 64, 64) to logits of animal, artist and ground; None for the reward model of the
            world of animals. Never pass a judge.
        animal_weight: weight of the animal's log-probability, per nat.
        artist_weight: weight of the artist's.
        ground_weight: weight of the ground's distance.

    Returns:
        The reward function. It raises ValueError for images of another size, an animal that this world does
        not have, and a prompt of which nothing can be scored.
    """
    from ddpo_lessons.tiny.world import measure_background
    from ddpo_lessons.zoo import load_reward_model, world

    classifier = (load_reward_model() if model is None else model).eval()

    @checked_reward
    def reward(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        if images.shape[2:] != (world.IMAGE_SIZE, world.IMAGE_SIZE):
            raise ValueError(
                f"images are {images.shape[3]}x{images.shape[2]}: animal_alignment scores those of tiny-zoo, "
                f"{world.IMAGE_SIZE}x{world.IMAGE_SIZE}"
            )
        said = [world.parse_prompt(prompt) for prompt in prompts]
        animals = [part.animal or entry.get("animal") for part, entry in zip(said, metadata, strict=True)]
        for index, (part, animal) in enumerate(zip(said, animals, strict=True)):
            if animal is None and part.artist is None and part.ground is None:
                raise ValueError(
                    f"prompts[{index}]={prompts[index]!r} names no animal, artist or ground: "
                    'write as in "a fox by Noto on a blue background"'
                )
            if animal is not None and animal not in world.ANIMALS:
                raise ValueError(
                    f"metadata[{index}]['animal'] is {animal!r}: use a name of zoo.world.ANIMALS"
                )
        animal_logits, artist_logits, _ = classifier.to(images.device)(images)
        measured = measure_background(images)  # (B, 3)
        distances = [
            measured.new_zeros(())
            if part.ground is None
            else (rgb - rgb.new_tensor(world.GROUNDS[part.ground])).norm()
            for rgb, part in zip(measured, said, strict=True)
        ]
        terms = {
            "animal_log_prob": _log_prob(animal_logits, animals, world.ANIMALS),
            "artist_log_prob": _log_prob(artist_logits, [part.artist for part in said], world.ARTISTS),
            "ground_distance": torch.stack(distances),
        }
        score = animal_weight * terms["animal_log_prob"] + artist_weight * terms["artist_log_prob"]
        return score - ground_weight * terms["ground_distance"], terms

    return reward


def _log_prob(logits: torch.Tensor, names: Sequence[str | None], classes: Sequence[str]) -> torch.Tensor:
    """Log-probabilities (B,) in nats of the named classes, of logits (B, C); 0 where none is named."""
    log_probs = logits.float().log_softmax(dim=1)
    return torch.stack(
        [
            row.new_zeros(()) if name is None else row[classes.index(name)]
            for row, name in zip(log_probs, names, strict=True)
        ]
    )
