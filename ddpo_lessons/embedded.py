"""List the models in this package, and check names of models; `doctor` uses it without torch."""

import re
from pathlib import Path

from ddpo_lessons.words import similar

WORLDS = Path(__file__).with_name("worlds")
CHECKPOINTS = {name: WORLDS / name for name in ("tiny-sd", "tiny-sd3", "tiny-zoo")}
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def no_model(model: str) -> str:
    """Return why a text cannot name a pipeline, or nothing if it may."""
    if Path(model).is_dir():
        is_whole = Path(model, "model_index.json").is_file()
        return "" if is_whole else f"{model} holds no model_index.json: give a folder of a diffusers pipeline"
    if Path(model).is_file():
        return f"{model} is a file: give the folder of a diffusers pipeline, which holds model_index.json"
    if model in CHECKPOINTS or HUB_NAME.fullmatch(model):
        return ""
    return (
        f"{model} is neither a folder (there is no {Path(model).absolute()}), nor OWNER/NAME on the hub, nor "
        f"{' or '.join(CHECKPOINTS)}{similar(model, CHECKPOINTS)}: on a machine with a network `hf "
        "download OWNER/NAME --local-dir FOLDER` makes a folder"
    )
