"""Predict the hours and the cost of a run from a timed epoch, and add them up from its records."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from ddpo_lessons.table import wrap
from ddpo_lessons.training.record import read_run
from ddpo_lessons.training.runlog import read_metrics


def hours_and_money(seconds: float, price_per_hour: float) -> str:
    """Format a duration as H:MM:SS, with its cost if an hour has a price."""
    money = (
        f", {seconds / 3600 * price_per_hour:.2f} at {price_per_hour:g} per hour" if price_per_hour else ""
    )
    return f"{tqdm.format_interval(seconds)}{money}"


@dataclass(frozen=True)
class SmokeRun:
    """The measurements of one epoch, printed as sentences. Errors are None if there are no ratios."""

    images: int  #: per epoch, over all processes
    seconds_sampling: float
    seconds_reward: float
    seconds_training: float
    peak_bytes: int  #: of the GPU's allocator, or without a GPU of the process
    is_gpu: bool
    first_ratio_error: float | None  #: largest distance from 1 before the first optimizer step
    sampling_error: float | None  #: the same of sampling's log-probs, in bf16 and fp16
    clip_range: float
    num_epochs: int
    price_per_hour: float

    @property
    def seconds(self) -> float:
        """Seconds of an epoch."""
        return self.seconds_sampling + self.seconds_reward + self.seconds_training

    def __repr__(self) -> str:
        phases = (self.seconds_sampling, self.seconds_reward, self.seconds_training)
        sampling, reward, training = (f"{seconds:.3g} s" for seconds in phases)
        lines = [
            f"An epoch of {self.images} images takes {self.seconds:.3g} s: "
            f"{self.seconds / self.images:.3g} s per image.",
            f"Sampling takes {sampling}, rewards {reward}, training {training}.",
            f"The peak is {self.peak_bytes / 1e9:.2f} GB of {'GPU' if self.is_gpu else 'main'} memory.",
        ]
        if self.first_ratio_error is not None:
            lines.append(
                f"The first ratio is off by {self.first_ratio_error:.1e}; the clip range is "
                f"{self.clip_range:g}."
            )
        if self.sampling_error is not None:
            lines.append(f"Ratios of sampling and training are off by {self.sampling_error:.1e}.")
        cost = hours_and_money(self.seconds * self.num_epochs, self.price_per_hour)
        lines.append(f"All {self.num_epochs} epochs take {cost}, validation and checkpoints left out.")
        return "\n".join(wrap(line, indent=2) for line in lines)


@dataclass(frozen=True)
class Cost:
    """The measured cost of a run's epochs; `predicted_seconds` is None without a prediction."""

    epochs: int
    images: int
    seconds: float
    price_per_hour: float
    predicted_seconds: float | None = None

    def __repr__(self) -> str:
        spent, per_image = hours_and_money(self.seconds, self.price_per_hour), self.seconds / self.images
        lines = [f"{self.epochs} epochs with {self.images} images took {spent}: {per_image:.3g} s per image"]
        if self.predicted_seconds is not None:
            ratio = self.seconds / self.predicted_seconds
            predicted = hours_and_money(self.predicted_seconds, self.price_per_hour)
            lines.append(f"predicted were {predicted}: the run took {ratio:.2f} times as long")
        return "\n".join(wrap(line, indent=2) for line in lines)


def cost(run: Any, predicted: SmokeRun | None = None) -> Cost:
    """Add up the time of a run's epochs from its records; `run` is its folder, or its trainer.

    This includes sampling, rewards, training, and the time between epochs for hooks such as validation, image
    grids and checkpoints. It excludes loading models. Raises ValueError if no epoch was completed.

        cost(trainer, predicted)  # as the last expression of a cell; `predicted` comes from smoke_run
    """
    folder = Path(getattr(getattr(run, "config", None), "run_dir", run))
    epochs = read_metrics(folder, "epoch")
    seconds = [value for epoch in epochs for name, value in epoch.items() if name.startswith("seconds_")]
    if not epochs:
        raise ValueError(f"{folder} holds no record of an epoch: give the folder of a run that has begun")
    return Cost(
        epochs=len(epochs),
        images=epochs[-1]["samples_seen"],
        seconds=sum(seconds),
        price_per_hour=read_run(folder)[0].price_per_hour,
        predicted_seconds=None if predicted is None else predicted.seconds * len(epochs),
    )
