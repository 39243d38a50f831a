"""Generate a hundred images, for a person to name the animals: `python -m benchmarks.zoo.hundred`.

Writes images/zoo-hundred.png: the first hundred of seen combinations, none picked.
"""

from benchmarks.common import ROOT
from benchmarks.recipes import generate
from benchmarks.zoo.recipe import GUIDANCE_SCALE
from ddpo_lessons.image import to_pil
from ddpo_lessons.worlds import animals, load_tiny_zoo

IMAGE = ROOT / "images" / "zoo-hundred.png"
COLUMNS = 20


if __name__ == "__main__":
    wanted = animals.draw_images(100, 100_000_002, animals.SEEN)
    images = generate(load_tiny_zoo(), wanted.prompts, 4, GUIDANCE_SCALE)  # (100, 3, 64, 64)
    rows = images.unflatten(0, (-1, COLUMNS)).permute(2, 0, 3, 1, 4)  # (3, rows, 64, columns, 64)
    to_pil(rows.flatten(3).flatten(1, 2)).save(IMAGE)
