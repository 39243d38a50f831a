"""Run lesson 13 at full size with random weights: `python -m benchmarks.speed.full_run`.

Stable Diffusion 1.5's shapes at 512 pixels, photographs and a classifier are made up, because nothing is
downloaded. All else are the notebook's own cells, from the machine to the LoRA in plain diffusers. On a GPU
it is the preset `restore` with fewer epochs; on a CPU everything is cut to two images and few steps, which
takes 20 to 25 minutes and 10 GB. Writes full_run.json, an entry for each machine.
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT, Row, write_json
from benchmarks.speed.full_size import device_name, make_pipeline
from benchmarks.speed.lessons import play
from ddpo_lessons.cli.presets import PRESETS
from ddpo_lessons.data.folders import ImageFolder, find_images
from ddpo_lessons.image import to_pil
from ddpo_lessons.rewards import pixel_penalty
from ddpo_lessons.rewards.reward import margin, metadata_column
from ddpo_lessons.worlds import load_tiny_zoo

RESULT = Path(__file__).with_suffix(".json")
LESSON = ROOT / "notebooks" / "13_full_run.ipynb"
CLASSES = "red", "blue"  # of made-up photographs, which have one color and noise
# The preset cut for a CPU: two images, and three steps of which one is an action.
CUT: Row = {
    "num_epochs": 2, "save_freq": 1, "image_grid_freq": 0, "mixed_precision": "bf16", "sample_num_steps": 8,
    "sample_batch_size": 2, "sample_num_batches_per_epoch": 1, "sample_group_size": 2, "train_batch_size": 2,
    "train_gradient_accumulation_steps": 1, "train_micro_batch_size": 1,
}  # fmt: skip


def make_photographs(folder: str | Path, per_class: int) -> ImageFolder:
    """Write photographs of 512 pixels as FOLDER/CLASS/*.jpg."""
    draws = torch.Generator().manual_seed(0)
    for channel, name in ((0, "red"), (2, "blue")):
        (Path(folder) / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            image = 0.5 * torch.rand(3, 512, 512, generator=draws)
            image[channel] += 0.5
            to_pil(image).save(Path(folder) / name / f"{number}.jpg")
    return find_images(folder)


def color_margin(model: str = "", classes: Any = CLASSES, template: str = "") -> Any:
    """Make a stand-in for `clip_margin` that distinguishes red from blue."""

    def reward(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
        logits = 10 * images.float().mean(dim=(2, 3))[:, [2, 0]]  # (B, 2), in the order of sorted classes
        return margin(logits, metadata_column(metadata, "label", "the color"), sorted(classes))

    return reward


def load(model: str, dtype: torch.dtype = torch.float32) -> Any:
    """Make the models that the lesson loads; instead of fp16, which is very slow on a CPU, float32."""
    slow = dtype == torch.float16 and not torch.cuda.is_available()
    return load_tiny_zoo() if model == "tiny-zoo" else make_pipeline().to(torch.float32 if slow else dtype)


def rehearse(folder: str, num_epochs: int) -> Row:
    """Run the lesson; return its measurements."""
    on_gpu = torch.cuda.is_available()
    preset = PRESETS["restore"]
    settings = {**preset.config, "num_epochs": num_epochs, "save_freq": num_epochs // 2} if on_gpu else CUT
    made_up: Row = {
        "FULL": True, "PRESETS": {"restore": replace(preset, config=settings)}, "load_pipeline": load,
        "clip_margin": color_margin, "distance_penalty": pixel_penalty,
        "fetch_photographs": lambda name, per_class: make_photographs(Path(folder, name), 8 if on_gpu else 2),
    }  # fmt: skip
    if not on_gpu:
        made_up["what_fits"] = dict
    chosen: Row = {"HELD_OUT": 5 if on_gpu else 1, "EVERY": num_epochs // 2, "RUN": Path(folder, "run")}
    started = time.perf_counter()
    played = play(LESSON, {"13-001": made_up, "13-006": chosen})
    predicted, took = played["predicted"], played["cost"](played["trainer"])
    return {
        "precision": played["config"].mixed_precision, "images": predicted.images,
        "steps": played["config"].sample_num_steps, "micro_batch": played["config"].train_micro_batch_size,
        "preflight": {finding.check: finding.passed for finding in played["findings"]},
        "first_ratio_error": predicted.first_ratio_error, "sampling_error": predicted.sampling_error,
        "seconds_sampling": round(predicted.seconds_sampling, 2),
        "seconds_training": round(predicted.seconds_training, 2),
        "gigabytes": round(predicted.peak_bytes / 1e9, 1),
        "epochs": took.epochs, "seconds": round(took.seconds, 1),
        "resumed_difference": played["difference"],
        "whole_lesson_seconds": round(time.perf_counter() - started),
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12 if torch.cuda.is_available() else 2)
    epochs = parser.parse_args().epochs
    with tempfile.TemporaryDirectory() as folder:
        found = {"machine": device_name(), "threads": torch.get_num_threads(), **rehearse(folder, epochs)}
    rows = json.loads(RESULT.read_text()) if RESULT.exists() else []
    write_json(RESULT, [*(row for row in rows if row["machine"] != found["machine"]), found])
    print(json.dumps(found, indent=1))
