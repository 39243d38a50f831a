"""Runs of a tiny model that train in a second, what they are judged by, and processes that can be killed."""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState

import ddpo_lessons
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training import checkpoint
from tests.helpers import NOT_CLIPPED, PROMPTS, brightness, make_config, make_sd3_pipeline, records_of
from tests.peer_inputs import make_tiny_pipeline

# Those that remember more than DDPO: an older policy's weights, those before training, seeds of their own.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ddpo": {},
    "flow_grpo": {"algorithm": "flow_grpo:window=1", "flow": True, "train_kl_coefficient": 0.1},
    "nft": {"algorithm": "nft:decay_rate=0.3", **NOT_CLIPPED},
    "dpo": {"algorithm": "dpo", "flow": True, "sample_group_size": 2, "train_batch_size": 2, **NOT_CLIPPED},
    "draft": {"algorithm": "draft:last_steps=3,draws_steps=True", **NOT_CLIPPED},
}


@functools.cache
def _pipeline(flow: bool) -> Any:
    if flow:
        return make_sd3_pipeline()
    return make_tiny_pipeline(prediction_type="v_prediction", timestep_spacing="trailing")


def any_prompt() -> tuple[str, dict[str, Any]]:
    """Prompt function that draws from torch's global generator, which the trainer seeds."""
    return PROMPTS[int(torch.randint(len(PROMPTS), ()))], {}


def make_trainer(
    folder: Path, reward: Any = brightness, algorithm: str = "ddpo", flow: bool = False,
    look: Any = None, **changes: Any,
) -> Trainer:  # fmt: skip
    """Make a trainer of six epochs that continues what the folder holds, or begins.

    Faults are put into rewards, so a run may have several by name. `look` is called before each forward pass.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    settings: dict[str, Any] = {
        "num_epochs": 6, "num_checkpoint_limit": 2, "image_grid_freq": 2, "sample_guidance_scale": 1.0,
        "train_batch_size": 1, "train_learning_rate": 1e-2, "resume_from": "auto", **changes,
    }  # fmt: skip
    pipeline = copy.deepcopy(_pipeline(flow))
    if look is not None:
        pipeline.unet.register_forward_pre_hook(lambda *_: look())
    parts = (make_config(folder, **settings), reward, any_prompt, pipeline)
    return Trainer(*parts, algorithm=make_algorithm(algorithm))


def result_of(folder: Path) -> dict[str, Any]:
    """Return the last checkpoint's tensors and counters, and the records without the clock's times."""
    tensors, state = checkpoint.read(checkpoint.list_checkpoints(folder)[-1])
    return {
        "tensors": {
            f"{stem}|{name}": (str(tensor.dtype), tensor.numpy().tobytes())
            for stem, group in tensors.items()
            for name, tensor in group.items()
        },
        "counters": (state["epochs_done"], state["global_step"], state["algorithm"]),
        "records": records_of(folder),
    }


def finished(folder: Path, **changes: Any) -> dict[str, Any]:
    """Train to the end, from where the folder is; return the result."""
    make_trainer(folder, **changes).train()
    return result_of(folder)


def is_own(error: BaseException) -> bool:
    """Tell whether the package itself raised an error."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return raised_in.startswith(str(Path(ddpo_lessons.__file__).parent))


def start(work: Callable[[], object]) -> ForkProcess:
    """Run `work` in a copy of this process, which has everything imported."""
    process = get_context("fork").Process(target=work, daemon=True)
    process.start()
    return process


def ended(process: ForkProcess, seconds: float = 120) -> int | None:
    """Return the exit status of a process, negative for a signal, or None if it still runs then."""
    process.join(seconds)
    return process.exitcode


def kill(process: ForkProcess) -> None:
    process.kill()
    process.join()
