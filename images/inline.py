"""Copies of the lessons that carry their figures: `python images/inline.py FOLDER [NOTEBOOK ...]`.

A lesson shows `../images/NAME.svg`, which is not there when only the notebook was uploaded. In the copies
each figure stands in the text as a PNG, and links to other files of the repository are plain text. A line
says what to upload before the first cell, and Colab offers a GPU for the lesson that needs one.
`make colab` puts the package's wheel beside them.
"""

import argparse
import base64
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parent
NOTEBOOKS = IMAGES.parent / "notebooks"
FIGURE = re.compile(r"\.\./images/([\w-]+)\.(svg|png)")
LINK = re.compile(r"(?<!!)\[([^\[\]\n]+)\]\((?!https?:|data:|#)[^()\s]+\)")  # to a file that is not there

ON_GPU = "13_full_run"  # its opening has all steps on Colab
UPLOAD = (
    "\n\n**On Colab**, before you run the first cell, upload the package's wheel in the *Files* panel on the "
    "left. (`make colab` wrote it beside this notebook.)"
)


def script(name: str) -> Path:
    """Return the script of this folder that draws a figure; a ValueError if none names it, or several."""
    found = [path for path in sorted(IMAGES.glob("draw_*.py")) if f'"{name}"' in path.read_text("utf-8")]
    if len(found) != 1:
        raise ValueError(f"{name}.svg: {len(found)} of images/draw_*.py draw it; let one of them do so")
    return found[0]


def draw(notebooks: list[Path], folder: Path) -> None:
    """Draw the figures of some lessons as PNGs, and run each script once."""
    shown = {match for path in notebooks for match in FIGURE.findall(path.read_text("utf-8"))}
    for path in sorted({script(name) for name, kind in shown if kind == "svg"}):
        subprocess.run([sys.executable, path, "--output", folder, "--png", folder], check=True)


def inline(notebook: Path, drawn: Path) -> str:
    """Return the JSON of a notebook's copy for Colab; `drawn` has the PNGs made for it."""

    def data(figure: re.Match[str]) -> str:
        name, kind = figure.groups()
        folder = drawn if kind == "svg" else IMAGES
        return "data:image/png;base64," + base64.b64encode((folder / f"{name}.png").read_bytes()).decode()

    content = json.loads(notebook.read_text(encoding="utf-8"))
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = LINK.sub(r"\1", FIGURE.sub(data, "".join(cell["source"])))
    opening, setup = content["cells"][:2]
    if notebook.stem == ON_GPU:
        content["metadata"] |= {"accelerator": "GPU", "colab": {"gpuType": "T4"}}
    elif "SOURCE = None" in "".join(setup["source"]):  # otherwise pip finds the package
        opening["source"] += UPLOAD
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def main() -> None:
    """Write the copies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("notebooks", type=Path, nargs="*", default=sorted(NOTEBOOKS.glob("*.ipynb")))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as drawn:
        draw(arguments.notebooks, Path(drawn))
        for notebook in arguments.notebooks:
            copy = arguments.folder / notebook.name
            copy.write_text(inline(notebook, Path(drawn)), encoding="utf-8")
            print(copy)


if __name__ == "__main__":
    main()
