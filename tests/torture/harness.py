"""Cases and what comes of them, processes that can be killed, and a run of a tiny model that trains fast."""

from __future__ import annotations

import copy
import functools
import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

import ddpo_lessons
from benchmarks.peers.inputs import make_tiny_pipeline
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.runlog import read_metrics
from ddpo_lessons.trainer import Trainer
from tests.helpers import NOT_CLIPPED, make_sd3_pipeline

PACKAGE = str(Path(ddpo_lessons.__file__).parent)
PROMPTS = ("a red three", "", "a blue four on a white background", "a green digit")
Case = Callable[[random.Random, Path], str]  # works in an empty folder; says what came of it


@dataclass
class Counts:
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)  # each says how to repeat it


class BrokenPromiseError(AssertionError):
    """A promise that was not kept."""


def expect(holds: bool, message: str) -> None:
    if not holds:
        raise BrokenPromiseError(message)


def is_clear(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Tell whether an error is of these kinds and was raised by the package itself."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return isinstance(error, kinds) and raised_in.startswith(PACKAGE)


def each_case(name: str, case: Case, seed: int, cases: range, folder: Path) -> Counts:
    """Run cases, each in an empty folder with a generator of its own; anything it raises is a failure."""
    counts = Counts()
    for number in cases:
        place = folder / f"{name}-{number}"
        place.mkdir(parents=True)
        try:
            counts.outcomes[case(random.Random(f"{name} {seed} {number}"), place)] += 1
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"
            counts.failures.append(f"--only {name} --seed {seed} --case {number}: {where}: {error!s:.300}")
        AcceleratorState._reset_state(reset_partial_state=True)
        shutil.rmtree(place)
    return counts


# ------------------------------------------------------------------------------------------- processes
def fork(work: Callable[[], object], errors: Path | None = None) -> int:
    """Run `work` in a copy of this process, which has everything imported; return its number.

    The copy ends with status 0, or with 1 after writing what was raised to `errors`.
    """
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        work()
        status = 0
    except BaseException as error:
        if errors is not None:
            errors.write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(status)


def wait(process: int, seconds: float = 300) -> int:
    """Return the exit status of a process, negative for a signal; kill it and fail if it takes too long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    kill(process)
    raise BrokenPromiseError(f"a process was still running after {seconds:g} s")


def kill(process: int) -> bool:
    """Kill a process; tell whether it was still alive."""
    os.kill(process, signal.SIGKILL)  # until it is waited for, its number is not given away
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL


def wait_for(path: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        expect(time.monotonic() < deadline, f"{path.name} did not come within {seconds:g} s")
        time.sleep(0.002)


# ------------------------------------------------------------------------------------------------ runs
# Those that remember more than DDPO: an older policy's weights, those before training, seeds of their own.
PAIRS = {"sample_group_size": 2, "train_batch_size": 2}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ddpo": {},
    "flow_grpo": {"algorithm": "flow_grpo:window=1", "flow": True, "train_kl_coefficient": 0.1},
    "nft": {"algorithm": "nft:decay_rate=0.3", **NOT_CLIPPED},
    "dpo": {"algorithm": "dpo", "flow": True, **PAIRS, **NOT_CLIPPED},
    "draft": {"algorithm": "draft:last_steps=3,draws_steps=True", **NOT_CLIPPED},
}


@functools.cache
def _pipeline(flow: bool) -> Any:
    if flow:
        return make_sd3_pipeline()
    return make_tiny_pipeline(prediction_type="v_prediction", timestep_spacing="trailing")


def make_pipeline(flow: bool = False) -> Any:
    """Make a tiny Stable Diffusion, or a flow model: Stable Diffusion 3."""
    return copy.deepcopy(_pipeline(flow))


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run of one epoch: two samples, three timesteps, two optimizer steps."""
    return {
        "output_dir": str(folder),
        "num_epochs": 1,
        "num_checkpoint_limit": 2,
        "image_grid_freq": 0,
        "sample_num_steps": 3,
        "sample_guidance_scale": 1.0,
        "sample_batch_size": 2,
        "sample_num_batches_per_epoch": 1,
        "train_learning_rate": 1e-2,
        "train_clip_range": 1e-2,
        **changes,
    }


def brightness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return images.mean(dim=(1, 2, 3))


def any_prompt() -> tuple[str, dict[str, Any]]:
    """Prompt function that draws from torch's global generator, which the trainer seeds."""
    return PROMPTS[int(torch.randint(len(PROMPTS), ()))], {}


def make_trainer(
    folder: Path, reward: Any = brightness, algorithm: str = "ddpo", flow: bool = False, **changes: Any
) -> Trainer:
    """Make a trainer that continues what the folder holds, or begins anew."""
    resume = "latest" if checkpoint.list_checkpoints(folder) else ""
    # Faults are put into rewards, so that one run has several by name.
    usual = {"resume_from": resume, "overwrite": not resume, "resume_anyway": True}
    merged = settings(folder, **{**usual, **changes})
    parts = (DDPOConfig(**merged), reward, any_prompt, make_pipeline(flow))
    return Trainer(*parts, algorithm=make_algorithm(algorithm))


def whole_run(folder: Path, reward: Any = brightness, **changes: Any) -> dict[str, Any]:
    """Return the result of a run that nothing happens to."""
    make_trainer(folder, reward, **changes).train()
    return result_of(folder)


def continue_run(folder: Path, whole: dict[str, Any], reward: Any = brightness, **changes: Any) -> None:
    """Continue a run to its end, which must be that of a run that nothing happened to."""
    expect(whole_run(folder, reward, **changes) == whole, "the continued run differs")


def result_of(folder: Path) -> dict[str, Any]:
    """Return what a finished run is judged by: its last checkpoint's tensors and counters, and its records.

    The times of the epoch records are the clock's; everything else must repeat.
    """
    tensors, state = checkpoint.read(checkpoint.list_checkpoints(folder)[-1])
    epochs = [
        {name: value for name, value in record.items() if not name.startswith("seconds")}
        for record in read_metrics(folder, "epoch")
    ]
    named = {f"{stem}|{name}": tensor for stem, group in tensors.items() for name, tensor in group.items()}
    return {
        "tensors": {name: (str(tensor.dtype), tensor.numpy().tobytes()) for name, tensor in named.items()},
        "counters": (state["epochs_done"], state["global_step"], state["algorithm"]),
        "steps": read_metrics(folder, "step"),
        "epochs": epochs,
    }
