"""Save and restore the state that epochs change, in snapshots and checkpoints."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from ddpo_lessons import __version__
from ddpo_lessons.algorithms.algorithm import Algorithm
from ddpo_lessons.config import RUN, DDPOConfig
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.models import Family, model_name
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.context_source import ContextSource
from ddpo_lessons.training.learner import Learner
from ddpo_lessons.training.processes import all_same
from ddpo_lessons.training.record import changes, name_of

Tensors = dict[str, dict[str, torch.Tensor]]


class Snapshot(NamedTuple):
    """A copy of the state, or the contents of a checkpoint."""

    tensors: Tensors
    values: dict[str, Any]


class State:
    """The state that epochs change: learner, algorithm, prompt function, scaler and `epochs_done`.

    Both a snapshot and a checkpoint hold the same two parts: tensors, and values of which JSON can be made.
    """

    def __init__(self, learner: Learner, algorithm: Algorithm, contexts: ContextSource, scaler: Any) -> None:
        self.learner, self.algorithm, self.contexts, self.scaler = learner, algorithm, contexts, scaler
        self.epochs_done = 0

    def values(self) -> dict[str, Any]:
        """Return the values that are not tensors."""
        return {
            "epochs_done": self.epochs_done,
            "global_step": self.learner.steps_done,
            "skipped_in_a_row": self.learner.skipped_in_a_row,
            "algorithm": self.algorithm.state_dict(),
            "prompt_function": self.contexts.state_dict(),
            "grad_scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def snapshot(self) -> Snapshot:
        """Copy the state from before the contexts of the current epoch were sampled."""
        values = {**self.values(), "prompt_function": self.contexts.before}
        return Snapshot(self.learner.copy_tensors(), copy.deepcopy(values))

    def restore(self, tensors: Tensors, values: dict[str, Any]) -> None:
        """Restore the state of a snapshot or checkpoint."""
        self.learner.load_tensors(tensors)
        self.learner.steps_done = values["global_step"]
        self.learner.skipped_in_a_row = values["skipped_in_a_row"]
        self.algorithm.load_state_dict(values["algorithm"])
        if self.scaler is not None:
            self.scaler.load_state_dict(values["grad_scaler"])
            self.scaler._per_optimizer_states.clear()  # of a step that was broken off
        self.epochs_done = values["epochs_done"]
        self.contexts.load_state_dict(values["prompt_function"], self.epochs_done)


def identity(
    config: DDPOConfig, algorithm: Algorithm, start: FromNoise, num_processes: int, **more: Any
) -> dict[str, Any]:
    """Return everything that affects the weights and must be the same in a resumed run."""
    return {
        "algorithm": type(algorithm).__qualname__,  # a subclass is another algorithm
        **algorithm.identity(),
        **start.identity(),
        "num_processes": num_processes,
        **config.decisive_fields(),
        **more,
    }


def check_processes(accelerator: Accelerator, identity: dict[str, Any], family: Family) -> None:
    """Raise a ValueError if settings, or first values of weights, differ between processes."""
    if accelerator.num_processes == 1:
        return
    networks = (family.denoiser, *family.frozen.values())
    tensors = [tensor for network in networks for tensor in network.state_dict().values()]
    if not all_same(accelerator, (identity, [tensor.flatten()[:4].tolist() for tensor in tensors])):
        raise ValueError(
            "each process has other settings, or has loaded another model: give all the same, and set "
            "fsdp_cpu_ram_efficient_loading: false where they share the weights"
        )


def describe(
    pipeline: Any, algorithm: Algorithm, start: FromNoise, about: Mapping[str, Any], **functions: Any
) -> dict[str, Any]:
    """Return a description of a run in addition to its config, for JSON."""
    known = {
        "version": __version__,
        "model": model_name(pipeline),
        "pipeline": type(pipeline).__name__,
        "algorithm": {"name": type(algorithm).__name__, **algorithm.identity()},
        **start.identity(),
        **{name: name_of(function) for name, function in functions.items()},
        **about,
    }
    plain = json.loads(json.dumps(known, default=str))
    return {name: value for name, value in plain.items() if value is not None}


def read_checkpoint(
    folder: Path, config: DDPOConfig, identity: dict[str, Any], record: dict[str, Any], is_main: bool
) -> Snapshot:
    """Read the checkpoint of a resumed run; return its tensors and values, to which "changes" is added.

    These are the settings that differ from the interrupted run, as text; the main process prints them. Raises
    a ValueError if the checkpoint is damaged or belongs to another run.
    """
    tensors, values = checkpoint.read(folder)
    saved = values[RUN]
    # A model is compared by the last part of its name, since its folder may have been moved.
    there, here = (Path(known.get("model", "")).name or None for known in (saved, record))
    checkpoint.check_identity(folder, {**values["identity"], "model": there}, {**identity, "model": here})
    news = changes({**values["config"], **saved}, {**config.to_dict(), **record})
    if news and is_main:
        tqdm.write(f"continuing {folder} with changes: {'; '.join(news)}")
    return Snapshot(tensors, {**values, "changes": news})
