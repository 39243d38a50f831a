"""The sheet of the world of animals: remakes `ddpo_lessons/worlds/sheet.png` from the three sets of emoji.

In any folder, and then here:

    npm install @iconify-json/noto@1.2.9 @iconify-json/twemoji@1.2.5 @iconify-json/fluent-emoji-flat@1.2.6
    pip install resvg-py==0.5.0
    python -m benchmarks.zoo.sheet FOLDER

`ddpo_lessons/worlds/LICENSES.md` names the makers of the emoji and the terms of the licenses.
"""

import io
import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from ddpo_lessons.words import ANIMALS

SHEET = Path(__file__).parents[2] / "ddpo_lessons/worlds/sheet.png"
SIZE = 64
SETS = {  # package and version, a column each
    "@iconify-json/noto": "1.2.9",
    "@iconify-json/twemoji": "1.2.5",
    "@iconify-json/fluent-emoji-flat": "1.2.6",
}
# Names of an animal in the sets, where they differ from its own: the face, if there is one.
FACES = ("cat", "dog", "horse", "monkey", "rabbit", "cow", "tiger", "mouse", "pig")
ICONS = {
    "sheep": "ewe", "squirrel": "chipmunk", "bee": "honeybee", **{name: f"{name}-face" for name in FACES},
}  # fmt: skip


def read_set(folder: Path, package: str) -> dict[str, Any]:
    """Read the icons.json of a set that npm installed; a ValueError refuses other versions."""
    path = folder / "node_modules" / package
    install = f"run `npm install {' '.join(f'{name}@{version}' for name, version in SETS.items())}` in it"
    if not (path / "package.json").is_file():
        raise ValueError(f"{folder} has no {package}: {install}")
    version = json.loads((path / "package.json").read_text("utf-8"))["version"]
    if version != SETS[package]:
        raise ValueError(f"{folder} has {package} {version}, which may look different: {install}")
    return json.loads((path / "icons.json").read_text("utf-8"))


def svg(icons: dict[str, Any], name: str) -> str:
    icon = icons["icons"][name]
    left, top = icon.get("left", 0), icon.get("top", 0)
    width, height = (icon.get(side, icons.get(side, 16)) for side in ("width", "height"))
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    box = f'viewBox="{left} {top} {width} {height}" width="{width}" height="{height}"'
    return f"<svg {names} {box}>{icon['body']}</svg>"


def pad(image: Image.Image) -> Image.Image:
    """Bring an image's longer side to `SIZE` pixels, and center it on a transparent square of that side."""
    if image.size != (SIZE, SIZE):
        scale = SIZE / max(image.size)
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.LANCZOS)
    square = Image.new("RGBA", (SIZE, SIZE))
    square.paste(image, ((SIZE - image.width) // 2, (SIZE - image.height) // 2))
    return square


def make_sheet(folder: Path) -> Image.Image:
    """Draw all animals, a row each, by all artists, a column each; RGBA."""
    sets = [read_set(folder, package) for package in SETS]
    import resvg_py  # only this script needs it

    sheet = Image.new("RGBA", (SIZE * len(SETS), SIZE * len(ANIMALS)))
    for row, animal in enumerate(ANIMALS):
        for column, icons in enumerate(sets):
            drawn = resvg_py.svg_to_bytes(svg_string=svg(icons, ICONS.get(animal, animal)), width=SIZE)
            image = Image.open(io.BytesIO(bytes(drawn))).convert("RGBA")
            sheet.paste(pad(image), (SIZE * column, SIZE * row))
    return sheet


if __name__ == "__main__":
    make_sheet(Path(sys.argv[1])).save(SHEET, optimize=True)
