"""The sheet of the world of animals: remakes `ddpo_lessons/worlds/sheet.png` from the three sets of emoji.

In any folder, and then here:

    npm install @iconify-json/noto@1.2.9 @iconify-json/twemoji@1.2.5 @iconify-json/fluent-emoji-flat@1.2.6
    pip install resvg-py==0.5.0
    python -m benchmarks.zoo.sheet FOLDER

`ddpo_lessons/worlds/LICENSES.md` says who made the emoji and what the licences ask for.
"""

import argparse
import io
import json
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
RESVG = "resvg-py==0.5.0"
# What the sets call an animal, where that is not the animal's name: the face, if there is one.
FACES = ("cat", "dog", "horse", "monkey", "rabbit", "cow", "tiger", "mouse", "pig")
ICONS = {
    "sheep": "ewe",
    "squirrel": "chipmunk",
    "bee": "honeybee",
    **{name: f"{name}-face" for name in FACES},
}


def read_set(folder: Path, package: str) -> dict[str, Any]:
    """Read a set's icons.

    Args:
        folder: where npm installed the sets.
        package: a name of `SETS`.

    Returns:
        What Iconify's icons.json holds.

    Raises:
        ValueError: if the set is not there, or is another version.
    """
    path = folder / "node_modules" / package
    install = "npm install " + " ".join(f"{name}@{version}" for name, version in SETS.items())
    if not (path / "package.json").is_file():
        raise ValueError(f"{folder} has no {package}: run `{install}` in it")
    version = json.loads((path / "package.json").read_text("utf-8"))["version"]
    if version != SETS[package]:
        raise ValueError(f"{folder} has {package} {version}, which may look different: run `{install}` in it")
    return json.loads((path / "icons.json").read_text("utf-8"))


def svg(icons: dict[str, Any], name: str) -> str:
    """Return an icon of a set as an SVG file."""
    icon = icons["icons"][name]
    left, top = icon.get("left", 0), icon.get("top", 0)
    width, height = (icon.get(side, icons.get(side, 16)) for side in ("width", "height"))
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    box = f'viewBox="{left} {top} {width} {height}" width="{width}" height="{height}"'
    return f"<svg {names} {box}>{icon['body']}</svg>"


def pad(picture: Image.Image) -> Image.Image:
    """Bring a picture's longer side to `SIZE` pixels, and centre it on a transparent square of that side."""
    if picture.size != (SIZE, SIZE):
        scale = SIZE / max(picture.size)
        picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.LANCZOS)
    square = Image.new("RGBA", (SIZE, SIZE))
    square.paste(picture, ((SIZE - picture.width) // 2, (SIZE - picture.height) // 2))
    return square


def draw(text: str) -> Image.Image:
    """Draw an SVG file, `SIZE` pixels wide.

    Args:
        text: the file.

    Returns:
        The picture, RGBA.

    Raises:
        RuntimeError: if resvg-py is not installed.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise RuntimeError(f"resvg-py draws the emoji and is not installed: pip install {RESVG}") from error
    return Image.open(io.BytesIO(bytes(resvg_py.svg_to_bytes(svg_string=text, width=SIZE)))).convert("RGBA")


def make_sheet(folder: Path) -> Image.Image:
    """Draw all animals, a row each, by all artists, a column each.

    Args:
        folder: where npm installed the sets.

    Returns:
        The sheet, RGBA.

    Raises:
        ValueError: as `read_set`.
        RuntimeError: as `draw`.
    """
    sets = [read_set(folder, package) for package in SETS]
    sheet = Image.new("RGBA", (SIZE * len(SETS), SIZE * len(ANIMALS)))
    for row, animal in enumerate(ANIMALS):
        for column, icons in enumerate(sets):
            picture = pad(draw(svg(icons, ICONS.get(animal, animal))))
            sheet.paste(picture, (SIZE * column, SIZE * row))
    return sheet


def main(argv: list[str] | None = None) -> int:
    """Remake the sheet; a mistake of the call ends with a line and the status 2."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo.sheet", description="Remake the sheet.")
    parser.add_argument("folder", type=Path, help="where `npm install` put the sets of emoji")
    parser.add_argument("--output", type=Path, default=SHEET, help="file to write")
    arguments = parser.parse_args(argv)
    try:
        sheet = make_sheet(arguments.folder)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    sheet.save(arguments.output, optimize=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
