"""Make the dark copies of the README's figures: `python images/dark.py` writes them to images/dark.

README.md names them in `<source media="(prefers-color-scheme: dark)">`, which GitHub shows to readers with a
dark theme. The site makes its own copies with the same functions (docs/conf.py).
"""

import re
from pathlib import Path

import numpy as np
from PIL import Image, ImageColor
from scipy import ndimage

ROOT = Path(__file__).parents[1]
FOLDER = "images/dark"
FILTER = "invert(0.92) hue-rotate(180deg)"  # CSS much like `invert`: dark paper, and hues stay
DARK = "#0d1117"  # the paper of dark copies: GitHub's dark page


def invert(colors: np.ndarray, paper: np.ndarray) -> np.ndarray:
    """Return colors (..., 3) of 8 bits on a dark page: `paper` (3,) becomes `DARK`, black becomes light."""
    inverted, old = ((0.92 - 0.84 / 255 * np.asarray(values)) for values in (colors, paper))
    turned, old = (2 * (values @ (0.213, 0.715, 0.072))[..., None] - values for values in (inverted, old))
    new = np.array(ImageColor.getrgb(DARK)) / 255
    moved = new + (turned - old) * (1 - new) / (1 - old)
    return np.rint(255 * moved.clip(0, 1)).astype(np.uint8)


def dark_svg(text: str) -> str:
    """Return an SVG with all colors inverted but those of its images."""
    color = re.compile(r"(?<=: )#[0-9a-f]{6}\b")
    found = re.search(r'<g id="patch_1">.*?fill: (#[0-9a-f]{6})', text, re.DOTALL)
    paper = np.array(ImageColor.getrgb(found[1] if found else "#ffffff"))

    def dark(color: str) -> str:
        return f"#{invert(np.array(ImageColor.getrgb(color)), paper).tobytes().hex()}"

    text = color.sub(lambda match: dark(match[0]), text)
    return text.replace("<svg ", f'<svg fill="{dark("#000000")}" ', 1)  # Matplotlib leaves black's color out


def images_on_paper(pixels: np.ndarray) -> list[tuple[slice, slice]]:
    """Return the places of the images in a plot (H, W, 3): what is large, nearly full and of many colors."""
    is_drawn = (pixels != pixels[0, 0]).any(axis=-1)  # the corner is paper
    places, side = [], max(24, pixels.shape[1] // 30)
    for place in ndimage.find_objects(ndimage.label(is_drawn, np.ones((3, 3)))[0]):
        region = pixels[place]
        is_large = min(region.shape[:2]) > side and is_drawn[place].mean() > 0.5
        if is_large and len(np.unique(region.reshape(-1, 3), axis=0)) > 40:
            places.append(place)
    return places


def dark_png(pixels: np.ndarray) -> np.ndarray | None:
    """Return a plot (H, W, 3) with all inverted but its images, or None if it has no images."""
    places = images_on_paper(pixels)
    dark = invert(pixels, pixels[0, 0])
    for place in places:
        dark[place] = pixels[place]
    return dark if places else None


def read_pixels(path: Path) -> np.ndarray:
    """Return the pixels (H, W, 3) of an image file."""
    return np.asarray(Image.open(path).convert("RGB"))


def named() -> list[Path]:
    """Return the dark copies that the README names."""
    text = (ROOT / "README.md").read_text("utf-8")
    return [ROOT / name for name in re.findall(rf'srcset="({FOLDER}/[^"]+)"', text)]


def main() -> None:
    """Write the dark copies."""
    for copy in named():
        original = ROOT / "images" / copy.name
        copy.parent.mkdir(exist_ok=True)
        if copy.suffix == ".svg":
            copy.write_text(dark_svg(original.read_text("utf-8")), "utf-8")
        elif (dark := dark_png(read_pixels(original))) is not None:
            Image.fromarray(dark).save(copy, optimize=True)
        print(copy.relative_to(ROOT))


if __name__ == "__main__":
    main()
