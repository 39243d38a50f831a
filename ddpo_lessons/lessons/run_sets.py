"""The four sets of tiny runs of lesson 08: healthy and faulty runs whose records or images are similar."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.lessons.faults import FAULTS, put_in
from ddpo_lessons.lessons.plotting import plot_strip
from ddpo_lessons.trainer import DDPOTrainer
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.words import DIGITS
from ddpo_lessons.worlds import load_tiny_sd

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETTINGS: dict[str, Any] = {
    "num_epochs": 3,
    "image_grid_freq": 0,
    "sample_num_steps": 5,  # the last one has no noise: four actions
    "sample_guidance_scale": 1.0,
    "sample_batch_size": 16,
    "sample_num_batches_per_epoch": 1,
    "train_batch_size": 2,  # eight optimizer steps per epoch
    "train_learning_rate": 2e-3,
    "train_clip_range": 5e-3,
}
WHITE_ON_GREEN, ANY_COLORS = "a white {} on a green background", "a {}"
# For each set and each run's letter: the name of its fault (None: healthy), and its settings.
RUN_SETS: tuple[dict[str, tuple[str | None, dict[str, Any]]], ...] = (
    {
        "A": ("bf16 latents", {}),
        "B": ("stale sampler", {}),
        "C": (None, {}),
        "D": ("other prompts", {}),
    },
    {
        "E": (None, {"num_epochs": 2, "train_gradient_accumulation_steps": 8}),
        "F": ("other weights", {"num_epochs": 2}),
        "G": ("own ratio", {"num_epochs": 2}),
        "H": (None, {"num_epochs": 2, "train_learning_rate_warmup_steps": 500}),
    },
    {
        letter: (fault, {"num_epochs": 1, "template": ANY_COLORS})
        for letter, fault in zip("IJKL", ("0 to 255", "four noises", None, "shifted images"), strict=True)
    },
    {
        "M": ("first four", {"num_epochs": 2}),
        "N": ("empty file", {"num_epochs": 2}),
        "O": (None, {"num_epochs": 2, "seed": 1}),
        "P": ("whole numbers", {"num_epochs": 2}),
    },
)
ZERO = 1e-9  # a logarithmic axis shows 0 here


def redness(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> torch.Tensor:
    """Return the redness (B,) of images (B, 3, H, W) in [0, 1]: red 1, gray 0, green or blue -1/2."""
    pixels = (255 * images).to(torch.uint8).float() / 255  # as a file has them
    red, green, blue = pixels.mean((2, 3)).unbind(1)  # (B,) each
    return red - (green + blue) / 2


def digits_in_turn(template: str) -> Callable[[], tuple[str, dict[str, Any]]]:
    """Make a prompt function that fills a template such as "a {}" with zero, one, ... nine in turn."""
    made: list[str] = []

    def prompts() -> tuple[str, dict[str, Any]]:
        made.append(template.format(DIGITS[len(made) % 10]))
        return made[-1], {}

    return prompts


def make_trainer(
    folder: str | Path, hook: Any = None, template: str = WHITE_ON_GREEN, **changes: Any
) -> DDPOTrainer:
    """Make a trainer of tiny-sd with the reward `redness` and `SETTINGS`, of which `changes` replace some."""
    config = DDPOConfig(**{**SETTINGS, "output_dir": str(folder), **changes})
    return DDPOTrainer(config, redness, digits_in_turn(template), load_tiny_sd(), hook)


@dataclass(frozen=True)
class Run:
    """A finished run: its records, and for each epoch images (N, 3, H, W), rewards and advantages (N,)."""

    trainer: DDPOTrainer
    epochs: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    images: list[torch.Tensor]
    rewards: list[torch.Tensor]
    advantages: list[torch.Tensor]


def train_run(fault: str | None = None, **changes: Any) -> Run:
    """Train a run, with one of `FAULTS` in the package or without a fault; `changes` as in `make_trainer`."""
    images, rewards, advantages = (list[torch.Tensor]() for _ in range(3))

    def keep(batches: list[list[Any]], *_: Any) -> None:
        images.append(torch.cat([batch[0] for batch in batches]))
        rewards.append(torch.cat([batch[3] for batch in batches]))

    broken = put_in(FAULTS[fault]) if fault else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), broken:
        warnings.simplefilter("ignore")  # the first epoch's checks would name the fault
        trainer = make_trainer(folder, keep, **changes)
        algorithm: Any = trainer.algorithm
        compute = algorithm.advantages

        def recorded(*arguments: Any) -> torch.Tensor:
            advantages.append(compute(*arguments))
            return advantages[-1]

        algorithm.advantages = recorded
        trainer.train()
        epochs, steps = (read_metrics(folder, kind) for kind in ("epoch", "step"))
        return Run(trainer, epochs, steps, images, rewards, advantages)


def train_runs(number: int) -> dict[str, Run]:
    """Train all runs of a set (1 to 4), and return them by their letters."""
    return {letter: train_run(fault, **changes) for letter, (fault, changes) in RUN_SETS[number - 1].items()}


def explain(number: int) -> None:
    """Print the fault of each run of a set, or its settings if it is healthy."""
    for letter, (fault, changes) in RUN_SETS[number - 1].items():
        named = [f"{name}={value}" for name, value in changes.items() if name.startswith("train")]
        print(f"{letter}: {FAULTS[fault] if fault else ', '.join(['healthy', *named])}", end="\n\n")


def show_records(runs: Mapping[str, Run]) -> Figure:
    """Plot each run's reward by epoch, and by optimizer step its gradient norm and ratio error."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(max(4.5, 2.2 * len(runs) + 0.6), 4.6), layout="constrained")
    grid = figure.subplots(3, len(runs), squeeze=False)
    for axis in grid[1:, 1:].flat:
        axis.sharey(grid[1, 0] if axis in grid[1] else grid[2, 0])
        axis.tick_params(labelleft=False)
    for column, (name, run) in zip(grid.T, runs.items(), strict=True):
        rewards = [epoch["reward_mean"] for epoch in run.epochs]
        column[0].plot(range(1, len(rewards) + 1), rewards, "o-", color="C0")
        column[0].set(title=name, xticks=range(1, len(rewards) + 1), xlabel="epoch")
        number = [step["step"] for step in run.steps]
        first = [n for n, step in enumerate(run.steps) if n == 0 or step["epoch"] > run.steps[n - 1]["epoch"]]
        for axis, field in zip(column[1:], ("max_ratio_error", "grad_norm"), strict=True):
            values = [max(step[field], ZERO) for step in run.steps]
            axis.semilogy(number, values, "o-", color="0.6", markersize=4)
            axis.semilogy([number[n] for n in first], [values[n] for n in first], "o", color="C1")
            axis.set(xlabel="optimizer step", xticks=number if len(number) < 4 else [1, *number[3::4]])
        column[1].axhline(run.trainer.config.train_clip_range, color="0.7", linestyle="--", linewidth=1)
    for axis, name in zip(grid[:, 0], ("reward", "largest |ρ − 1|", "gradient norm"), strict=True):
        axis.set_ylabel(name)
    marks = {"yticks": [ZERO, 1e-6, 1e-3, 1], "yticklabels": ["0", "1e-6", "1e-3", "1"]}
    grid[1, 0].set(ylim=(ZERO / 3, 3), **marks)
    low, high = grid[2, 0].get_ylim()
    if low < ZERO:  # a gradient is 0
        grid[2, 0].set(**marks)
    else:
        locator = LogLocator(subs=(1, 3) if high < 100 * low else (1,), numticks=5)
        grid[2, 0].yaxis.set(major_locator=locator, minor_formatter=NullFormatter())
        grid[2, 0].yaxis.set_major_formatter(lambda value, place: f"{value:g}".replace("e-0", "e-"))
    return figure


def show_images(runs: Mapping[str, Run], epoch: int = 1, count: int = 8) -> Figure:
    """Show the first `count` images of an epoch of each run, with their rewards below."""
    rewards = {
        name: [f"{reward:.3f}".replace("-", "−") for reward in run.rewards[epoch - 1].tolist()]
        for name, run in runs.items()
    }
    return plot_strip({name: run.images[epoch - 1] for name, run in runs.items()}, (), count, below=rewards)


# Diagnosis | reason | ratio errors of each epoch | learning rates (1e-3 if none are given).
_RECORDS = """
fine | a healthy run | 1e-7 2e-3 9e-3, 0 4e-3 2e-2
fine | later steps of an epoch may be off by much | 0 0.5, 1e-7 0.9
fine | one step per epoch: nothing is replayed after a step | 0, 1e-7, 0
fine | a learning rate of 0 moves no weight | 0 0, 0 0 | 0 0 0 0
fine | a step changes the ratio of the next step, not its own | 0 1e-8 | 0 1e-3
fine | steps of an earlier epoch do not count: new samples come from the moved policy | 0, 0 0 | 1e-3 0 0
fine | one later step that is off is enough | 0 1e-7, 0 3e-3
fine | 1e-4 is allowed | 9e-5 2e-3, 5e-5 3e-3
fine | 1e-5 is more than rounding: the policy has moved | 0 1e-5, 0 3e-5
fine | one step is off by more than 1e-6, although their mean is below | 0 0 1.8e-6
fine | all later steps count, not only the last one | 0 3e-3 1e-7
fine | after a step with a learning rate above 0 all steps of the epoch follow it | 0 1e-7 3e-3 | 1e-3 0 0
fine | each first step counts by itself: errors do not add up | 0 2e-3, 9e-5 3e-3, 9e-5 3e-3
another policy | the first step of the first epoch is off | 0.3 0.3, 0.2 0.3
another policy | also if later epochs are fine | 2e-4 2e-3, 0 3e-3
another policy | also with one step per epoch | 0.3, 0.2
another policy | the first diagnosis that is true | 0.3 0, 0 0
stale sampler | the first step of a later epoch is off | 0 2e-3, 2e-3 4e-3, 2e-2 2e-2
stale sampler | 2e-4 is more than 1e-4 | 0 2e-3, 2e-4 3e-3
stale sampler | also if only the third epoch is off | 0 2e-3, 0 4e-3, 2e-2 2e-2
stale sampler | also with one step per epoch | 0, 2e-3
ratio stays 1 | it is exactly 1 | 0 0 0, 0 0 0
ratio stays 1 | it is 1 up to rounding | 1e-7 2e-7, 0 1e-7
ratio stays 1 | it stays 1 although the learning rate rises | 0 0 0, 0 0 0 | 0 0 1e-3 1e-3 1e-3 1e-3
"""


def known_records() -> list[tuple[str, str, list[dict[str, float]]]]:
    """Return cases for exercise 1: diagnosis, reason, and the records of the optimizer steps."""
    found = []
    for line in _RECORDS.strip().splitlines():
        verdict, why, epochs, *given = line.split(" | ")
        errors = [(n, float(x)) for n, epoch in enumerate(epochs.split(","), start=1) for x in epoch.split()]
        rates = [float(rate) for rate in given[0].split()] if given else [1e-3] * len(errors)
        rows = zip(errors, rates, strict=True)
        steps = [{"epoch": n, "max_ratio_error": error, "lr": rate} for (n, error), rate in rows]
        found.append((verdict, why, steps))
    return found
