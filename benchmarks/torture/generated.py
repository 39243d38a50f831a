"""Settings, images, prompts and rewards that hypothesis makes up: either a sound run or one clear error."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import torch
from accelerate.state import AcceleratorState
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from PIL import Image

from benchmarks.torture.harness import Counts, described, expect, is_clear
from benchmarks.torture.model import PIXELS, brightness, make_pipeline, settings
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.runlog import read_metrics
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer

NAMES = {field.name for field in dataclasses.fields(DDPOConfig)}
NAMES |= {"prompt_function", "reward_function", "image", "images", "noise_strength", "metadata"}

# --------------------------------------------------------------------------------------------- settings
_whole = st.integers(1, 3)
_odd = st.sampled_from([0, -1, 2.0, 0.5, math.nan, math.inf, True, "2", None, 2**70, [1], ""])


def _mostly(good: st.SearchStrategy[Any], bad: st.SearchStrategy[Any] = _odd) -> st.SearchStrategy[Any]:
    """Draw from `bad` in about one case of twenty, for an example has many fields."""
    return st.sampled_from(range(20)).flatmap(lambda number: bad if number == 19 else good)


def _floats(low: float, high: float) -> st.SearchStrategy[Any]:
    return _mostly(st.floats(low, high))


CONFIGS: dict[str, st.SearchStrategy[Any]] = {
    "num_epochs": _mostly(st.integers(1, 2)),
    "save_freq": _mostly(_whole),
    "num_checkpoint_limit": _mostly(_whole),
    "image_grid_freq": _mostly(st.integers(0, 2)),
    "mixed_precision": _mostly(st.sampled_from(["no", "no", "bf16"])),
    "seed": _mostly(st.integers(0, 2**64)),
    "run_name": _mostly(st.text(max_size=5)),
    "log_with": _mostly(st.none()),
    "sample_num_steps": _mostly(st.sampled_from([1, 2, 3, 5])),
    "sample_eta": _floats(0, 1.5),
    "sample_guidance_scale": _floats(0, 20),
    "sample_batch_size": _mostly(_whole),
    "sample_num_batches_per_epoch": _mostly(st.integers(1, 2)),
    "sample_group_size": _mostly(st.sampled_from([1, 1, 2, 3])),
    "negative_prompts": _mostly(st.text(max_size=20)),
    "log_prob_reduction": _mostly(st.sampled_from(["mean", "sum"])),
    "train_batch_size": _mostly(_whole),
    "train_use_lora": _mostly(st.booleans()),
    "train_lora_rank": _mostly(st.integers(1, 16)),
    "train_lora_alpha": _mostly(st.integers(1, 16)),
    "train_lora_target_modules": _mostly(
        st.lists(st.sampled_from(["to_k", "to_q", "conv1", "proj_in", "norm1", "no_layer"]), max_size=2)
    ),
    "train_gradient_checkpointing": _mostly(st.booleans()),
    "train_learning_rate": _floats(0, 0.1),
    "train_adam_beta1": _floats(0, 1),
    "train_adam_beta2": _floats(0, 1),
    "train_adam_weight_decay": _floats(0, 1),
    "train_adam_epsilon": _floats(1e-12, 1),
    "train_gradient_accumulation_steps": _mostly(st.integers(1, 2)),
    "train_max_grad_norm": _floats(1e-6, 10),
    "train_num_inner_epochs": _mostly(st.integers(1, 2)),
    "train_cfg": _mostly(st.sampled_from([True, True, True, False])),
    "train_adv_clip_max": _floats(1e-3, 10),
    "train_clip_range": _floats(1e-6, 1),
    "train_kl_coefficient": _floats(0, 10),
    "train_timestep_fraction": _floats(0, 1),
    "train_forward_size": _mostly(st.integers(0, 8)),
    "per_prompt_stat_tracking": _mostly(st.booleans()),
    "per_prompt_stat_tracking_buffer_size": _mostly(st.integers(1, 20)),
    "per_prompt_stat_tracking_min_count": _mostly(st.integers(1, 16)),
}

# ------------------------------------------------------------------------------ images, prompts, rewards
_side = _mostly(st.sampled_from([PIXELS, 4, 6, 16]), st.sampled_from([0, 1, 2, 7]))
_shape = _mostly(st.just((3,)), st.sampled_from([(1,), (4,), (), (3, 3)]))
_range = _mostly(st.just((0, 1)), st.sampled_from([(-1, 1), (0, 255), (0, math.nan), (0, math.inf)]))
_types = _mostly(
    st.sampled_from(["float32", "float64", "float16", ">f4"]),
    st.sampled_from(["uint8", "int64", "bool", "complex64", "object"]),
)
_modes = st.sampled_from(["RGB", "L", "RGBA", "P", "1", "I;16", "CMYK", "F"])


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Draw an image as a tensor, an array or a PIL image, of any type, size and range."""
    height = draw(_side)
    shape = (*draw(_shape), height, draw(_mostly(st.just(height), _side)))
    low, high = draw(_range)
    pixels = np.random.default_rng(draw(st.integers(0, 99))).random(shape)
    kind = draw(st.sampled_from(["tensor", "tensor", "needs gradient", "array", "reversed", "pil"]))
    if kind == "pil" and 0 not in shape:
        return Image.new(draw(_modes), (shape[-1], shape[-2]))
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore")
        array = (low + (high - low) * pixels).astype(draw(_types))
    if kind == "reversed":
        return array[..., ::-1]
    if kind == "array" or array.dtype.kind == "O" or not array.dtype.isnative:
        return array
    tensor = torch.from_numpy(array)
    return tensor.requires_grad_() if kind == "needs gradient" and tensor.is_floating_point() else tensor


_texts = st.one_of(
    st.text(max_size=30),
    st.text(st.characters(), max_size=5),
    st.sampled_from(["a red three", "", "\x00", "\ud800", "a " * 500, "<|endoftext|>"]),
)
_ids = st.one_of(
    st.integers(), st.text(max_size=3), st.floats(), st.tuples(st.integers(), st.text(max_size=2)),
    st.sampled_from([None, True, [1], {}, b"x", 1j, torch.zeros(2), frozenset([1])]),
)  # fmt: skip
_id = st.builds(lambda i: {"id": i}, _ids)
_metadata = st.one_of(st.just({}), st.just({}), st.none(), _id, st.lists(st.integers(), max_size=1))
_prompts = _mostly(
    st.tuples(_texts, _metadata), st.sampled_from([None, "text", ("a",), ("a", {}, {}), (1, {}), ["a", {}]])
)
_image_prompts = _mostly(
    st.tuples(_texts, arrays(), _metadata),
    st.sampled_from([None, ("a", {}), ("a", None, {}), ("a", [[0.5]], {})]),
)
_number = st.floats(allow_nan=True, allow_infinity=True)


@st.composite
def returned_rewards(draw: st.DrawFn) -> Callable[[int], Any]:
    """Draw what a reward function makes of B images."""
    kinds_of_number = [_number, st.floats(-10, 10), st.integers(-5, 5)]
    values = draw(st.lists(draw(st.sampled_from(kinds_of_number)), min_size=4, max_size=4))
    shapes: dict[str, Callable[[list[Any]], Any]] = {
        "tensor": lambda v: torch.tensor(v, dtype=torch.float64),
        "list": lambda v: v,
        "array": lambda v: np.array(v, dtype=np.float64),
        "int": lambda v: torch.tensor(v).nan_to_num().clamp(-9, 9).int(),
        "bool": lambda v: torch.tensor(v) > 0,
        "half": lambda v: torch.tensor(v, dtype=torch.float16),
        "info": lambda v: (torch.tensor(v, dtype=torch.float64), {"name": v}),
        "column": lambda v: torch.tensor(v, dtype=torch.float64)[:, None],
        "one more": lambda v: [*v, 1.0],
        "scalar": lambda v: v[0],
        "none": lambda v: None,
        "texts": lambda v: [str(x) for x in v],
        "complex": lambda v: torch.tensor(v, dtype=torch.complex64),
        "nested": lambda v: [[x] for x in v],
        "generator": lambda v: (x for x in v),
        "gradient": lambda v: torch.tensor(v, dtype=torch.float64, requires_grad=True),
    }
    kind = draw(st.sampled_from(list(shapes)))
    return lambda size: shapes[kind]([values[i % 4] for i in range(size)])


# ------------------------------------------------------------------------------------------ what must hold
def _check_run(trainer: DDPOTrainer, folder: Path) -> None:
    """Check what holds after every run."""
    config = trainer.config
    found = checkpoint.list_checkpoints(folder)
    tensors, state = checkpoint.read(found[-1])
    expect(state["epochs_done"] == trainer.epochs_done == config.num_epochs, "epochs are missing")
    expect(len(found) <= config.num_checkpoint_limit, "too many checkpoints")
    for name, parameter in trainer.learner.trainable.items():
        expect(torch.equal(tensors["policy"][name], parameter.detach()), f"{name} was saved otherwise")
        expect(bool(parameter.isfinite().all()), f"{name} is not finite")
    steps, epochs = read_metrics(folder, "step"), read_metrics(folder, "epoch")
    planned = trainer.plan.optimizer_steps * config.num_epochs
    expect(len(steps) == trainer.global_step == planned, f"{len(steps)} steps of {planned}")
    expect(len(epochs) == config.num_epochs, "records of epochs are missing")
    tolerance = 1e-4 if config.log_prob_reduction == "mean" and config.mixed_precision == "no" else 0.1
    error = steps[0]["first_replay_max_ratio_error"]
    expect(error is not None and error <= tolerance, f"the first ratio is off by {error}")
    for record in steps + epochs:
        expect(all(value is not None for value in record.values()), f"NaN in {record}")


def _attempt(folder: Path, make: Callable[[Any], DDPOTrainer], reward_is_asked: bool) -> str:
    """Make a trainer and train: check the run, or the error and that it came before any computing."""
    shutil.rmtree(folder, ignore_errors=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    pipeline, passes, trainer = make_pipeline(), [], None
    pipeline.unet.register_forward_pre_hook(lambda module, args: passes.append(module))
    try:
        trainer = make(pipeline)
        before = [parameter.detach().clone() for parameter in trainer.learner.trainable.values()]
        trainer.train()
    except (ValueError, TypeError, ImportError) as error:
        names_a_field = bool(set(re.findall(r"\w+", str(error))) & NAMES)
        clear = is_clear(error, ValueError, TypeError, ImportError) and names_a_field
        expect(clear, f"unclear {described(error)}")
        if reward_is_asked and trainer is not None:
            expect(
                all(map(torch.equal, before, trainer.learner.trainable.values())),
                "weights changed before the error",
            )
            expect(not checkpoint.list_checkpoints(folder), "a checkpoint was written before the error")
            return "clear error, nothing trained"
        expect(not passes, f"{len(passes)} forward passes before: {error}")
        return "clear error before any forward pass"
    _check_run(trainer, folder)
    return "sound run"


def _with_settings(folder: Path, changes: dict[str, Any], pipeline: Any) -> DDPOTrainer:
    config = DDPOConfig(**settings(folder, **changes))
    return DDPOTrainer(config, brightness, lambda: ("a red three", {}), pipeline)


def _with_prompts(folder: Path, drawn: tuple[list[Any], bool], pipeline: Any) -> DDPOTrainer:
    values, tracking = iter(drawn[0]), {"per_prompt_stat_tracking_min_count": 1}
    tracking["per_prompt_stat_tracking"] = drawn[1]
    config = DDPOConfig(**settings(folder, sample_guidance_scale=2.0, **tracking))
    return DDPOTrainer(config, brightness, lambda: next(values), pipeline)


def _with_images(folder: Path, drawn: tuple[Any, Any, Any], pipeline: Any) -> DDPOTrainer:
    first, second, strength = drawn
    values, config = iter([first, first if second is None else second]), DDPOConfig(**settings(folder))
    return ImageDDPOTrainer(config, brightness, lambda: next(values), pipeline, noise_strength=strength)


def _with_rewards(folder: Path, drawn: tuple[Callable[[int], Any], Any], pipeline: Any) -> DDPOTrainer:
    returned, changes = drawn
    config = DDPOConfig(**settings(folder, **changes))
    return DDPOTrainer(config, lambda i, p, m: returned(len(i)), lambda: ("a red three", {}), pipeline)


_chosen = st.lists(st.sampled_from(list(CONFIGS)), max_size=8, unique=True)
_second = st.booleans().flatmap(lambda same: st.none() if same else _image_prompts)
_changes = st.sampled_from([{}, {"sample_group_size": 2}, {"per_prompt_stat_tracking": True}])
# What is drawn, the trainer that gets it, and its share of the cases.
KINDS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Path, Any, Any], DDPOTrainer], float]] = {
    "settings": (
        _chosen.flatmap(lambda names: st.fixed_dictionaries({name: CONFIGS[name] for name in names})),
        _with_settings,
        0.4,
    ),
    "prompts": (st.tuples(st.lists(_prompts, min_size=2, max_size=2), st.booleans()), _with_prompts, 0.2),
    "images": (st.tuples(_image_prompts, _second, _mostly(st.floats(0.34, 1))), _with_images, 0.2),
    "rewards": (st.tuples(returned_rewards(), _changes), _with_rewards, 0.2),
}


def _try(kind: str, wanted: int, seed: int, folder: Path, counts: Counts) -> None:
    """Let hypothesis make up so many cases of one kind; count what comes of them."""
    strategy, make, _ = KINDS[kind]
    tried: Counter[str] = Counter()
    failed: dict[str, str] = {}

    def case(value: Any) -> None:
        try:
            outcome = _attempt(folder, lambda pipeline: make(folder, value, pipeline), kind == "rewards")
        except Exception as error:  # counted, so that the other cases are tried as well
            outcome = "failure"
            failed.setdefault(described(error), f"{value!r:.300}")
        tried[f"{kind}: {outcome}"] += 1

    limits: dict[str, Any] = {"max_examples": wanted, "deadline": None, "database": None}
    limits["suppress_health_check"] = list(HealthCheck)
    hypothesis.settings(**limits)(hypothesis.seed(seed)(given(strategy)(case)))()
    counts.failures += [f"--only generated --seed {seed}, {kind} {value}: {m}" for m, value in failed.items()]
    counts.outcomes.update(tried)
    counts.notes[f"{kind}: cases"] = tried.total()


def generated(seed: int, cases: range, folder: Path) -> Counts:
    """Try settings, prompts, images and rewards that hypothesis makes up."""
    counts = Counts()
    for kind, (*_, share) in KINDS.items():
        _try(kind, max(1, round(share * len(cases))), seed, folder / "run", counts)
    return counts
