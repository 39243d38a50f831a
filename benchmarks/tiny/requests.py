"""Img2img contexts of the digit world: prompts name other colors."""

import random
from typing import Any

from ddpo_lessons.data.prompts import PromptSampler
from ddpo_lessons.worlds import digits


def edit_requests(seed: int) -> PromptSampler:
    """Sample images of the digit world, each with a prompt that names other colors, for img2img.

    An example is a red three on blue with "a yellow digit on a white background". A correct result has the
    colors of the prompt and the digit of the input image. Metadata: `digit` (int), `image` (the input image)
    and `target` (the correct result, which supervised training needs and RL does not), both (3, 32, 32).

    The seed decides the sequence and the images.
    """

    def draw(generator: random.Random) -> Any:
        edits = digits.draw_edits(1, "practice", generator.getrandbits(62))
        image, digit = edits.inputs.images[0], edits.inputs.digits.item()
        return edits.prompts[0], image, {"digit": digit, "image": image, "target": edits.targets[0]}

    return PromptSampler(draw, seed)
