"""Seconds of training until 15 points more images are correct: `python -m benchmarks.speed.time_to_result`.

The task is results/recolor.py's. It is trained by this package with the task's settings and with DDPOConfig's
defaults, and by imageddpo with two sets of settings (result_peer.py). An image is correct if the evaluator
recognizes the digit and both colors are those of the prompt. This is measured on 200 validation images,
before training and after every 256 samples, an epoch of the task's settings (or more, if an epoch is longer);
the time of an evaluation does not count. A run ends at +15 points or at the limit. Its rows then go into
time_to_result.csv; finished runs are skipped. time_to_result.json names the machine.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file

from benchmarks.common import Row, machine, parse, product, run_all, seconds_of, trainer_of, write_json
from benchmarks.results.recolor import POLICY, SETTINGS, Evaluation
from benchmarks.speed.peer_environment import Worker, make_environment, versions
from benchmarks.speed.result_peer import VARIANTS as PEERS
from benchmarks.speed.side_by_side import tiny_folder
from benchmarks.tiny.requests import edit_requests
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.lessons.demo import Img2Img
from ddpo_lessons.rewards import recoloring
from ddpo_lessons.worlds import digits, load_tiny_sd

RESULT = Path(__file__).with_suffix(".csv")
COLUMNS = ("variant", "seed", "epoch", "seconds", "samples", "digit", "colors", "both")
OURS: dict[str, Row] = {
    "ddpo-lessons, recolor.py": SETTINGS,
    # The task's number of steps, and no image grids, since the other trainer makes none.
    "ddpo-lessons, the defaults": {"sample_num_steps": POLICY.steps, "image_grid_freq": 0},
}
SEEDS = (0, 1, 2)
LIMIT = 120.0  # seconds of training
GAIN = 0.15
IMAGES = 200
READ_EVERY = SETTINGS["sample_batch_size"] * SETTINGS["sample_num_batches_per_epoch"]  # samples
Epoch = Callable[[], dict[str, float]]  # trains an epoch; returns its seconds and its samples


@contextmanager
def our_epochs(run: Row, pipeline: Any) -> Iterator[Epoch]:
    task, start = (recoloring(), edit_requests(run["seed"]), pipeline), FromImages(POLICY.strength)
    settings = (OURS[run["variant"]], {"seed": run["seed"]})
    with trainer_of(task, *settings, algorithm=DDPO(), start=start) as trainer:

        def epoch() -> dict[str, float]:
            seconds = seconds_of(lambda: trainer.step(trainer.epochs_done))
            return {"seconds": seconds, "samples": trainer.plan.total_samples}

        yield epoch


@contextmanager
def peer_epochs(python: str, tiny: str, run: Row, pipeline: Any) -> Iterator[Epoch]:
    """Let imageddpo train in a process of its own, and load its adapter into the pipeline."""
    attention = ["to_k", "to_q", "to_v", "to_out.0"]
    pipeline.unet.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=attention))
    command = [python, "-m", "benchmarks.speed.result_peer", run["variant"], str(run["seed"]), tiny]
    with tempfile.TemporaryDirectory() as folder, Worker(command) as peer:
        path = f"{folder}/lora.safetensors"

        def epoch() -> dict[str, float]:
            answer = peer.ask(path)
            load_adapter(pipeline.unet, load_file(path))
            return answer

        yield epoch


def load_adapter(unet: Any, weights: dict[str, torch.Tensor]) -> None:
    """Copy an adapter's weights into one of the same shape; refuse any other."""
    missing, unexpected = unet.load_state_dict(weights, strict=False)
    if wrong := [*(name for name in missing if "lora_" in name), *unexpected]:
        raise RuntimeError(f"the peer trains other weights than expected: {wrong}")


def train(python: str, tiny: str, run: Row) -> list[Row]:
    """Train until the gain or the limit, and return a row for every evaluation."""
    pipeline, evaluation = load_tiny_sd(), Evaluation(digits.draw_edits(IMAGES, "validation", 0))
    settings = {**DDPOConfig().to_dict(), **{**OURS, **PEERS}[run["variant"]]}
    policy = Img2Img(POLICY.strength, settings["sample_guidance_scale"], POLICY.steps)
    epochs = our_epochs if run["variant"] in OURS else partial(peer_epochs, python, tiny)
    row = {"epoch": 0, "seconds": 0.0, "samples": 0}
    rows: list[Row] = []

    def read() -> None:
        fractions = evaluation.fractions(evaluation.images(pipeline, policy))
        rows.append({**row, **{name: fractions[name] for name in ("digit", "colors", "both")}})

    read()
    with epochs(run, pipeline) as epoch:
        while first_reached(rows) is None and row["seconds"] < LIMIT:
            done = epoch()
            row = {**row, "epoch": row["epoch"] + 1, **{k: row[k] + done[k] for k in ("seconds", "samples")}}
            if row["samples"] - rows[-1]["samples"] >= READ_EVERY or row["seconds"] >= LIMIT:
                read()
    return rows


def first_reached(rows: Sequence[Row]) -> Row | None:
    """Return the first of a run's rows in which 15 points more are correct than in row 0, if there is one."""
    before = float(rows[0]["both"])
    reached = (row for row in rows if float(row["both"]) >= before + GAIN - 1e-6)  # it counts in 0.005
    return next(reached, None)


if __name__ == "__main__":
    processes, python = parse(__doc__).processes, make_environment()
    about = {"machine": machine(), "gain": GAIN, "peers": versions(python)}
    header = RESULT.with_suffix(".json")
    if RESULT.exists() and json.loads(header.read_text()) != about:
        raise SystemExit(f"{header} tells of another machine or other peers: remove {RESULT}")
    write_json(header, about)
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(tiny_folder(Path(scratch, "tiny-sd")))
        runs = product(seed=SEEDS, variant=(*OURS, *PEERS))
        run_all(partial(train, python, folder), runs, COLUMNS, RESULT, processes)
