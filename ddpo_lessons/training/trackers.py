"""Send records and grids to TensorBoard or W&B and plot.png, without stopping a run on errors."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from PIL import Image

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.training import figure

PLOT = "plot.png"  # of a run, in its folder


class Trackers:
    """Send records and grids to the trackers of an accelerator, over the number of optimizer steps.

    A tracker that raises an exception is warned of once and gets nothing more from this run, because its next
    call would most likely fail too, and metrics.jsonl and images/ hold everything.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._failed: list[Any] = []
        self._plot_failed = False

    def start(self, config: DDPOConfig) -> None:
        """Start the tracker of the config; every process must call it."""
        if not config.log_with:
            return
        fields = config.to_dict().items()
        try:
            self.accelerator.init_trackers(
                config.tracker_project_name,
                config={k: v if isinstance(v, (int, float, str)) else str(v) for k, v in fields},
                init_kwargs=config.tracker_kwargs,
            )
        except Exception as error:
            self.accelerator.trackers.clear()
            _warn(config.log_with, error)

    def log(self, kind: str, values: Mapping[str, float], step: int) -> None:
        """Send a record as the scalars `KIND/NAME`."""
        named = {f"{kind}/{name}": value for name, value in values.items()}
        self._send(lambda tracker: tracker.log(named, step=step))

    def log_grid(self, kind: str, grid: Image.Image, step: int) -> None:
        """Send a grid as the image `KIND/images`; TensorBoard writes it to disk with the next record."""
        pixels = {f"{kind}/images": np.asarray(grid)[None]}  # (1, H, W, 3)

        def send(tracker: Any) -> None:
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images(pixels, step=step, **layout)

        self._send(send)

    def plot(self, run_dir: Path) -> None:
        """Plot the run into its folder, and warn the first time that this fails."""
        path = run_dir / PLOT
        try:
            figure.write(path, run_dir)
        except Exception as error:
            if not self._plot_failed:
                warnings.warn(
                    f"cannot write {path} ({_reason(error)}): the run goes on, and `ddpo-lessons plot` draws "
                    "it later",
                    stacklevel=2,
                )
            self._plot_failed = True

    def _send(self, send: Callable[[Any], None]) -> None:
        for tracker in self.accelerator.trackers:
            if tracker in self._failed:
                continue
            try:
                send(tracker)
            except Exception as error:
                self._failed.append(tracker)
                _warn(tracker.name, error)


def _warn(name: str, error: Exception) -> None:
    warnings.warn(
        f"{name} failed ({_reason(error)}) and gets nothing more from this run; metrics.jsonl and images/ "
        "hold everything",
        stacklevel=4,
    )


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
