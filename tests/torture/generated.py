"""What is made up at random, settings, pictures, rewards: a sound run or one clear error."""

from __future__ import annotations

import dataclasses
import math
import random
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ddpo_lessons.algorithms import ALGORITHMS, make_algorithm, settings_of
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.families import family_of
from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.runlog import read_metrics
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer, Trainer
from tests.torture.harness import NOT_CLIPPED, Case, brightness, expect, is_clear, make_pipeline, settings

FIELDS = {field.name for field in dataclasses.fields(DDPOConfig)}
NAMES = FIELDS | {"prompt_function", "reward_function", "image", "images", "noise_strength", "metadata"}
LEFT_ALONE = {  # where a run writes, and what needs minutes, a GPU or an account
    "output_dir", "logdir", "overwrite", "resume_from", "train_lora_from", "log_with", "torch_compile",
    "train_use_8bit_adam",
}  # fmt: skip
ODD = (0, -1, 2.0, 0.5, math.nan, math.inf, True, "2", None, 2**70, [1], "")
CHOICES: dict[str, Sequence[Any]] = {  # of other fields the default's type says what is good
    "num_epochs": (1, 2),
    "image_grid_freq": (0, 1, 2),
    "mixed_precision": ("no", "no", "bf16"),
    "seed": (0, 1, 2**64),
    "sample_guidance_scale": (0.0, 1.0, 1.5, 20.0),
    "log_prob_reduction": ("mean", "sum"),
    "train_lora_target_modules": ([], ["to_k"], ["conv1", "proj_in"], ["norm1"], ["no_layer"]),
    "train_learning_rate": (0.0, 1e-5, 1e-3, 0.1),
    "train_adam_epsilon": (1e-12, 1e-8, 1.0),
    "train_cfg": (True, True, True, False),
}
OWN: dict[str, Sequence[Any]] = {  # settings of algorithms; the others take True and False
    "sde": ("flow", "dance", "cps"),
    "window": (0, 1, 2, 3),
    "temperature": (0.1, 1.0),
    "top_share": (None, 0.5),
    "time_power": (0.0, 2.0),
    "error_power": (0.25, 1.0),
    "lag_coefficient": (0.0, 5.0),
    "beta": (0.1, 1.0, 1000.0),
    "decay_rate": (0.0, 0.5),
    "max_decay": (0.0, 0.9),
    "last_steps": (1, 2, 3),
    "margin": (0.5, math.inf),
}
NAMES |= {"algorithm", *(name for algorithm in ALGORITHMS for name in settings_of(algorithm))}
Draw = random.Random


def mostly(draw: Draw, good: Sequence[Any], bad: Sequence[Any]) -> Any:
    """Choose a bad one in one of twenty cases: an example has many parts."""
    return draw.choice(bad if draw.random() < 0.05 else good)


def text(draw: Draw) -> str:
    """Make up a text of any characters, surrogates too, or a known one."""
    strange = "".join(chr(draw.randrange(0x110000)) for _ in range(draw.randrange(6)))
    return draw.choice([strange, "a red three", "", "\x00", "\ud800", "a " * 500, "<|endoftext|>"])


def setting(draw: Draw, name: str) -> Any:
    default = getattr(DDPOConfig, name)
    if name in CHOICES:
        good = draw.choice(CHOICES[name])
    elif isinstance(default, bool):
        good = draw.random() < 0.5
    elif isinstance(default, str):
        good = text(draw)
    else:
        good = draw.random() if isinstance(default, float) else draw.randrange(1, 4)
    return mostly(draw, [good], ODD)


def image(draw: Draw) -> Any:
    """Make up an image: a tensor, an array or a PIL image, of any type, size and range."""
    height = mostly(draw, [16, 8, 12, 32], [0, 1, 2, 15])
    width = mostly(draw, [height], [16, 8, 0])
    shape = (*mostly(draw, [(3,)], [(1,), (4,), (), (3, 3)]), height, width)
    kind = draw.choice(["tensor", "needs gradient", "array", "reversed", "pil"])
    if kind == "pil" and 0 not in shape:
        modes = ("RGB", "L", "RGBA", "P", "1", "I;16", "CMYK", "F")
        return Image.new(draw.choice(modes), (width, height))
    pixels = np.random.default_rng(draw.randrange(100)).random(shape)
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore")
        types = ("uint8", "int64", "bool", "complex64", "object")
        dtype = mostly(draw, ("float32", "float64", "float16", ">f4"), types)
        array = (pixels * mostly(draw, [1], [-1, 255, math.nan, math.inf])).astype(dtype)
    if kind == "reversed":
        return array[..., ::-1]
    if kind == "array" or array.dtype.kind == "O" or not array.dtype.isnative:
        return array
    return torch.from_numpy(array).requires_grad_(kind == "needs gradient" and array.dtype.kind == "f")


def metadata(draw: Draw) -> Any:
    ids = (0, "x", 0.5, math.nan, (1, "a"), None, True, [1], {}, b"x", 1j, torch.zeros(2), frozenset([1]))
    return draw.choice([{}, {}, None, [1], {"id": draw.choice(ids)}])


REWARDS: dict[str, Callable[[list[Any]], Any]] = {  # what a reward function makes of its numbers
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


# ------------------------------------------------------------------------------ trainers of what was drawn
def with_settings(draw: Draw, folder: Path, pipeline: Any) -> DDPOTrainer:
    names = sorted(name for name in FIELDS - LEFT_ALONE if hasattr(DDPOConfig, name))
    changes = {name: setting(draw, name) for name in draw.sample(names, draw.randrange(9))}
    config = DDPOConfig(**settings(folder, **changes))
    return DDPOTrainer(config, brightness, lambda: ("a red three", {}), pipeline)


def with_prompts(draw: Draw, folder: Path, pipeline: Any) -> DDPOTrainer:
    bad = [None, "text", ("a",), ("a", {}, {}), (1, {}), ["a", {}]]
    values = iter([mostly(draw, [(text(draw), metadata(draw))], bad) for _ in range(2)])
    tracking = {"per_prompt_stat_tracking": draw.random() < 0.5, "per_prompt_stat_tracking_min_count": 1}
    config = DDPOConfig(**settings(folder, sample_guidance_scale=2.0, **tracking))
    return DDPOTrainer(config, brightness, lambda: next(values), pipeline)


def with_images(draw: Draw, folder: Path, pipeline: Any) -> DDPOTrainer:
    bad = [None, ("a", {}), ("a", None, {}), ("a", [[0.5]], {})]
    drawn = [mostly(draw, [(text(draw), image(draw), metadata(draw))], bad) for _ in range(2)]
    values = iter(draw.choice([drawn, [drawn[0]] * 2]))
    strength = mostly(draw, [draw.uniform(0.34, 1)], ODD)
    config = DDPOConfig(**settings(folder))
    return ImageDDPOTrainer(config, brightness, lambda: next(values), pipeline, noise_strength=strength)


def with_rewards(draw: Draw, folder: Path, pipeline: Any) -> DDPOTrainer:
    values = [draw.choice([draw.uniform(-10, 10), draw.randrange(-5, 6)]) for _ in range(2)]
    values[0] = mostly(draw, values[:1], (math.nan, math.inf, 1e300, 5e-324))
    changes = draw.choice([{}, {"sample_group_size": 2}, {"per_prompt_stat_tracking": True}])
    returned, config = draw.choice(list(REWARDS.values())), DDPOConfig(**settings(folder, **changes))
    return DDPOTrainer(config, lambda *_: returned(values), lambda: ("a red three", {}), pipeline)


def with_algorithms(draw: Draw, folder: Path, pipeline: Any) -> Trainer:
    """Draw an algorithm with settings of its own, groups and a penalty, from noise or images."""
    name = draw.choice(list(ALGORITHMS))
    known = list(settings_of(name))
    drawn = draw.sample(known, draw.randrange(len(known) + 1))
    own = {key: mostly(draw, OWN.get(key, (True, False)), ODD) for key in drawn}
    choices = {"sample_group_size": (2, 2, 1), "train_kl_coefficient": (0, 0, 0.1), "train_batch_size": (2,)}
    changes = {key: mostly(draw, good, ODD) for key, good in choices.items()}
    if draw.random() < 0.7:  # most have no clip range
        changes |= NOT_CLIPPED
    picture = torch.full((3, 16, 16), 0.5)
    config = DDPOConfig(**settings(folder, **changes))
    from_images = draw.random() < 0.5
    context = ("a red three", picture, {}) if from_images else ("a red three", {})
    start = FromImages(draw.choice([2 / 3, 1.0])) if from_images else FromNoise()
    parts = (config, brightness, lambda: context, pipeline)
    return Trainer(*parts, algorithm=make_algorithm(name, **own), start=start)


# ------------------------------------------------------------------------------------------ what must hold
def check_run(trainer: Trainer, folder: Path) -> None:
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
    if trainer.algorithm.name in ("ddpo", "flow_grpo", "awm"):  # the others have no ratio
        error = steps[0]["first_replay_max_ratio_error"]
        expect(error is not None and error <= tolerance, f"the first ratio is off by {error}")
    for record in steps + epochs:
        expect(all(value is not None for value in record.values()), f"NaN in {record}")


KINDS: dict[str, Callable[[Draw, Path, Any], Trainer]] = {
    "settings": with_settings,
    "prompts": with_prompts,
    "images": with_images,
    "rewards": with_rewards,
    "algorithms": with_algorithms,
    "flow models": with_algorithms,
}


def generated(folder: Path) -> Case:
    """Try settings, prompts, images, rewards and algorithms that are made up at random."""

    def case(draw: Draw, place: Path) -> str:
        """Make a trainer and train: check the run, or the error and that it came before any computing."""
        kind = draw.choice([*KINDS])
        pipeline, passes, trainer = make_pipeline(flow=kind == "flow models"), [], None
        denoiser = family_of(pipeline).denoiser
        denoiser.register_forward_pre_hook(lambda module, args: passes.append(module))
        try:
            trainer = KINDS[kind](draw, place, pipeline)
            before = [parameter.detach().clone() for parameter in trainer.learner.trainable.values()]
            trainer.train()
        except (ValueError, TypeError, ImportError) as error:
            named = NAMES.intersection(re.findall(r"\w+", str(error)))
            expect(is_clear(error, ValueError, TypeError, ImportError) and bool(named), f"unclear: {error!r}")
            if kind == "rewards" and trainer is not None:
                same = map(torch.equal, before, trainer.learner.trainable.values())
                expect(all(same), "weights changed before the error")
                expect(not checkpoint.list_checkpoints(place), "a checkpoint was written before the error")
                return "rewards: clear error, nothing trained"
            expect(not passes, f"{len(passes)} forward passes before: {error}")
            return f"{kind}: clear error before any forward pass"
        check_run(trainer, place)
        return f"{kind}: sound run"

    return case
