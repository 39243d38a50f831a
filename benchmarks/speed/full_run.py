"""Run lesson 13 at full size with random weights: `python -m benchmarks.speed.full_run`.

Its models come from a cache of the hub that random_hub.py makes, and its photographs are made up, because
nothing is downloaded. All else are the notebook's own cells, from the machine to the LoRA in plain diffusers.
On a GPU it is the preset `restore`, by default with fewer epochs; on a CPU everything is cut to two images
and few steps, which takes about half an hour and 13 GB. Writes full_run.json, an entry for each machine.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from huggingface_hub import constants

from benchmarks.common import ROOT, Row, write_json
from benchmarks.speed.full_size import device_name
from benchmarks.speed.lessons import play
from benchmarks.speed.random_hub import write_models
from ddpo_lessons.cli.presets import PRESETS
from ddpo_lessons.data.folders import ImageFolder, find_images
from ddpo_lessons.data.photographs import CLASS_NAMES
from ddpo_lessons.image import to_pil
from ddpo_lessons.models import load_pipeline

RESULT = Path(__file__).with_suffix(".json")
LESSON = ROOT / "notebooks" / "13_full_run.ipynb"
# The preset cut for a CPU: two images, and three steps of which one is an action.
CUT: Row = {
    "num_epochs": 2, "save_freq": 1, "image_grid_freq": 0, "mixed_precision": "bf16", "sample_num_steps": 8,
    "sample_batch_size": 2, "sample_num_batches_per_epoch": 1, "sample_group_size": 2, "train_batch_size": 2,
    "train_gradient_accumulation_steps": 1, "train_micro_batch_size": 1,
}  # fmt: skip


def make_photographs(folder: Path, classes: Sequence[str], per_class: int) -> ImageFolder:
    """Write images of 512 pixels, each class in a color of its own, as FOLDER/CLASS/*.jpg."""
    draws = torch.Generator().manual_seed(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        color = torch.rand(3, 1, 1, generator=draws)
        for number in range(per_class):
            noise = torch.rand(3, 512, 512, generator=draws)
            to_pil((color + noise) / 2).save(folder / name / f"{number}.jpg")
    return find_images(folder)


def load_on_cpu(model: str, dtype: torch.dtype = torch.float32) -> Any:
    """Load a pipeline, in float32 instead of fp16, which is very slow on a CPU."""
    return load_pipeline(model, dtype=torch.float32 if dtype == torch.float16 else dtype)


def rehearse(folder: str, num_epochs: int) -> Row:
    """Run the lesson; return its measurements."""
    on_gpu = torch.cuda.is_available()
    preset, every = PRESETS["restore"], max(num_epochs // 10, 1)
    settings = {**preset.config, "num_epochs": num_epochs, "save_freq": every} if on_gpu else CUT
    classes, per_class = list(CLASS_NAMES.values())[: 10 if on_gpu else 2], 40 if on_gpu else 2
    made_up: Row = {
        "FULL": True, "PRESETS": {"restore": replace(preset, config=settings)},
        "fetch_photographs": lambda name, _: make_photographs(Path(folder, name), classes, per_class),
    }  # fmt: skip
    if not on_gpu:
        made_up |= {"what_fits": dict, "load_pipeline": load_on_cpu}
    chosen: Row = {"HELD_OUT": 5 if on_gpu else 1, "EVERY": every, "RUN": Path(folder, "run")}
    write_models(Path(folder, "hub"), "cuda" if on_gpu else "cpu")
    started = time.perf_counter()
    with mock.patch.multiple(constants, HF_HUB_CACHE=f"{folder}/hub", HF_HUB_OFFLINE=True):
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
