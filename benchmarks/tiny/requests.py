"""Img2img contexts of the digit world: other colors are asked for."""

import random
from typing import Any

from ddpo_lessons.data.prompts import PromptSampler
from ddpo_lessons.worlds import digits


def edit_requests(seed: int, split: str = "practice") -> PromptSampler:
    """Sample images of the digit world, each with a prompt that names other colors, for img2img.

    Such as a red three on blue with "a yellow digit on a white background": obey it, and keep the digit.
    Metadata: `digit` (int), `image` (what goes in) and `target` (what should come out, which supervised
    training needs and RL does not), both (3, 32, 32).

    The seed decides the sequence, and the pictures; a ValueError refuses a split that `digits.handwriting`
    has not.
    """
    digits.handwriting(split)  # raises now what a later draw would raise

    def draw(generator: random.Random) -> Any:
        edits = digits.draw_edits(1, split, generator.getrandbits(62))
        image, digit = edits.inputs.images[0], edits.inputs.digits.item()
        return edits.prompts[0], image, {"digit": digit, "image": image, "target": edits.targets[0]}

    return PromptSampler(draw, seed)
