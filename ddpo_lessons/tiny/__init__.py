"""The digit world with the checkpoints that live in it, `tiny-sd` (the default) and `tiny-sd3`."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline
    from torch import nn

    from ddpo_lessons.tiny.classifier import Judge, RewardModel, SecondJudge

    Network = TypeVar("Network", bound=nn.Module)

CHECKPOINT = Path(__file__).parent / "checkpoint"
CHECKPOINTS = {
    "tiny-sd": CHECKPOINT,
    "tiny-sd3": CHECKPOINT.with_name("checkpoint_sd3"),
    "tiny-zoo": CHECKPOINT.parents[1] / "zoo" / "checkpoint",
}
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def no_model(model: str) -> str:
    """Say why a text names no pipeline; nothing where it may: a folder of one, a name here or on the hub."""
    if Path(model).is_dir():
        is_whole = Path(model, "model_index.json").is_file()
        return "" if is_whole else f"{model} holds no model_index.json: give a folder of a diffusers pipeline"
    if Path(model).is_file():
        return f"{model} is a file: give the folder of a diffusers pipeline, which holds model_index.json"
    if model in CHECKPOINTS or HUB_NAME.fullmatch(model):
        return ""
    close = difflib.get_close_matches(model, CHECKPOINTS, n=1)
    perhaps = f" (perhaps {close[0]})" if close else ""
    return (
        f"{model} is neither a folder (there is no {Path(model).absolute()}), nor OWNER/NAME on the hub, nor "
        f"{' or '.join(CHECKPOINTS)}{perhaps}: on a machine with a network `hf download OWNER/NAME "
        "--local-dir FOLDER` makes a folder"
    )


def load_tiny_sd() -> StableDiffusionPipeline:
    """Load the shipped checkpoint: a plain pipeline, 32x32 images, latents (4, 8, 8)."""
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(CHECKPOINT, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_tiny_sd3() -> StableDiffusion3Pipeline:
    """Load the flow model of the same world: a plain pipeline, 32x32 images, latents (4, 8, 8).

    Zeros stand for T5, which it lacks. One token of them is enough: call it with `max_sequence_length=1`.
    """
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(
        CHECKPOINTS["tiny-sd3"], text_encoder_3=None, local_files_only=True
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_reward_model() -> RewardModel:
    """Load the classifier that RL optimises: images (B, 3, 32, 32) in [0, 1] to logits (B, 10)."""
    from ddpo_lessons.tiny.classifier import RewardModel

    return load_weights(RewardModel(), CHECKPOINT / "reward_model.safetensors")


def load_judge() -> Judge:
    """Load the classifier that only measures: images (B, 3, 32, 32) in [0, 1] to logits (B, 10)."""
    from ddpo_lessons.tiny.classifier import Judge

    return load_weights(Judge(), CHECKPOINT / "judge.safetensors")


def load_second_judge() -> SecondJudge:
    """Load the other judge: images (B, 3, 32, 32) in [0, 1] to logits of digit, ink and background."""
    from ddpo_lessons.tiny.classifier import SecondJudge

    return load_weights(SecondJudge(), CHECKPOINT / "second_judge.safetensors")


def load_weights(model: Network, file: Path) -> Network:
    """Fill a network from a safetensors file, for use and not for training."""
    from safetensors.torch import load_file

    model.load_state_dict(load_file(file))
    return model.eval().requires_grad_(False)
