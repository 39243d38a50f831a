"""Find prompt functions by the names of `--prompts`, and define those of the two worlds."""

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ddpo_lessons.data import prompts
from ddpo_lessons.data.prompts import Prompt, PromptSampler
from ddpo_lessons.words import similar
from ddpo_lessons.worlds import animals, digits


def digit_world_prompts(seed: int, split: str = "seen") -> PromptSampler:
    """Sample prompts of the digit world, such as "a red three on a blue background".

    The (digit, ink) pair is uniform over the split: "seen" (the pairs of pre-training), "left_out" (the ten
    it never showed the denoiser) or "all", else a ValueError. The background is uniform over the other
    colors. Metadata: `digit` (int), `ink` and `background` (names).
    """
    pairs = _pairs(digits, split)

    def draw(generator: random.Random) -> Prompt:
        digit, ink = generator.choice(pairs)
        background = generator.choice([name for name in digits.COLORS if name != ink])
        metadata = {"digit": digit, "ink": ink, "background": background}
        return digits.make_prompt(digit, ink, background), metadata

    return PromptSampler(draw, seed)


def zoo_prompts(seed: int, split: str = "seen") -> PromptSampler:
    """Sample prompts of the world of animals, such as "a fox by Noto on a blue background".

    The (animal, artist) pair is uniform over the split: "seen" (the pairs of pre-training), "left_out" (the
    thirty that it never showed) or "all", else a ValueError. Metadata: `animal`, `artist` and `background`
    (names).
    """
    pairs = _pairs(animals, split)

    def draw(generator: random.Random) -> Prompt:
        animal, artist = generator.choice(pairs)
        names = animals.ANIMALS[animal], animals.ARTISTS[artist], generator.choice(animals.BACKGROUND_NAMES)
        return animals.make_prompt(*names), dict(zip(("animal", "artist", "background"), names, strict=True))

    return PromptSampler(draw, seed)


def _pairs(world: ModuleType, split: str) -> tuple[tuple[int, Any], ...]:
    """Return the pairs of a world in a split; raise a ValueError for an unknown split."""
    splits = {"seen": world.SEEN, "left_out": world.LEFT_OUT, "all": world.SEEN + world.LEFT_OUT}
    if split not in splits:
        raise ValueError(f"split={split!r} does not exist: use one of {list(splits)}")
    return splits[split]


def hidden_animals(seed: int) -> PromptSampler:
    """Sample animals in confetti, each with a prompt that names a background, for img2img.

    Such as a fox in confetti with "an animal on a green background": clear the confetti away, and keep the
    animal. Metadata: what the reward depends on, `animal` and `artist` (names) and `background_mask`
    (64, 64); the input `image`, and the correct result `target`, which supervised training needs and RL
    does not, both (3, 64, 64).
    """

    def draw(generator: random.Random) -> Any:
        edits = animals.draw_edits(1, generator.getrandbits(62))
        (metadata,), (image,), (target,) = edits.metadata, edits.images, edits.wanted.images
        return edits.prompts[0], image, {**metadata, "image": image, "target": target}

    return PromptSampler(draw, seed)


PROMPTS: dict[str, Callable[[int], PromptSampler]] = {
    "digit_world": digit_world_prompts,
    "digit_world_left_out": lambda seed: digit_world_prompts(seed, split="left_out"),
    "zoo": zoo_prompts,
    "zoo_left_out": lambda seed: zoo_prompts(seed, split="left_out"),
    "animals": prompts.animals,
    "activities": prompts.activities,
}


def get_prompts(name: str, seed: int) -> PromptSampler:
    """Make the prompt function with a name in `PROMPTS`; raise a ValueError for other names."""
    if name not in PROMPTS:
        what = "is not a file" if Path(name).suffix else "does not exist"
        known = ", ".join(sorted(PROMPTS))
        raise ValueError(f"prompts={name!r} {what}{similar(name, PROMPTS)}: use one of {known}, or a file")
    return PROMPTS[name](seed)
