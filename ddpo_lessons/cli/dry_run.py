"""Determine and print what `ddpo-lessons train` will do, before any weights are loaded."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline

from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.algorithm import Algorithm
from ddpo_lessons.algorithms.draft import DRaFT
from ddpo_lessons.cli import reward_flag
from ddpo_lessons.cli.messages import in_flags, wrapped
from ddpo_lessons.cli.options import Train
from ddpo_lessons.cli.presets import world_size
from ddpo_lessons.cli.sample import NOISE_STRENGTH, takes_images
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.folders import ImageFolder
from ddpo_lessons.data.prompts import read_prompts
from ddpo_lessons.data.starts import FromImages, FromNoise, WithImages
from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.loading import quiet_loading
from ddpo_lessons.models import Family, family_class
from ddpo_lessons.models.stable_diffusion import count_steps
from ddpo_lessons.models.stable_diffusion_3 import StableDiffusion3
from ddpo_lessons.plan import counts
from ddpo_lessons.training.runlog import GRIDS, claim

SHOWN = 80  # characters of a prompt


def say(text: str) -> None:
    """Print a line in one of the processes."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def settle(arguments: Train) -> DDPOConfig:
    """Return this process's settings; raise a ValueError if the run could not use its folder.

    A dry run writes nothing, so the folder may hold another run.
    """
    config = arguments.make_config()
    _check_apart(arguments, config.run_dir)
    claim(replace(config, overwrite=True) if arguments.dry_run and not config.resume_from else config)
    if not arguments.chosen.config:
        plan = config.epoch_plan(1, world_size())
        text = (
            f"without --preset, settings that no flag gives are for trying out: {plan.total_samples} "
            f"samples per epoch, {plan.samples_per_optimizer_step} per optimizer step, "
            f"--mixed-precision {config.mixed_precision}, learning rate {config.train_learning_rate:g}"
        )
        say(wrapped(text))
    return config


def _check_apart(arguments: Train, run_dir: Path) -> None:
    """Raise a ValueError if the run would write among the images that it reads, or read what it writes."""
    for name in ("images", "validation"):
        folder: Path | None = getattr(arguments, name)
        if folder is not None and folder.is_dir():
            read, written = folder.resolve(), run_dir.resolve()
            # Images are found in a folder and in its subfolders, but not below these.
            if read in (written, written.parent, written / GRIDS):
                raise ValueError(
                    f"--output-dir {run_dir} would write among the images of --{name} {folder}: choose "
                    "another --output-dir"
                )


def check_rewards(arguments: Train, images: ImageFolder | None) -> None:
    """Raise a ValueError for a reward or evaluator that does not fit the images or prompts."""
    try:
        _check_terms(arguments.chosen.reward, arguments, images)
    except ValueError as error:
        if arguments.reward is None and "reward=" in str(error):
            raise ValueError(f"{error} (no --reward is given, so it is the preset's)") from error
        raise
    if arguments.judge is not None:
        with reward_flag.called_judge():
            _check_terms(arguments.judge, arguments, images)


def _check_terms(reward: str, arguments: Train, images: ImageFolder | None) -> None:
    terms, name = reward_flag.parse(reward), arguments.chosen.prompts
    if images is not None:
        reward_flag.check(terms, images, arguments.prompt)
        return
    drawn, metadata = arguments.choose_prompts(seed=0)()
    is_file = arguments.prompt is None and Path(name).is_file()
    said = read_prompts(name) if is_file else [drawn]
    reward_flag.check_text(terms, said, metadata, arguments.prompt)


def choose_start(arguments: Train, pipeline: Any) -> FromNoise:
    """Return the start of rollouts: noise, images, or noise with images as a condition."""
    resolution = arguments.chosen.resolution
    if arguments.images is None:
        return FromNoise(resolution=resolution)
    if takes_images(pipeline, arguments.noise_strength):
        return WithImages(resolution=resolution)
    return FromImages(arguments.chosen.noise_strength or NOISE_STRENGTH, resolution=resolution)


# ----------------------------------------------------------------------------------------- the dry run
def dry_run(arguments: Train, images: ImageFolder | None) -> int:
    """Print what the run would do, with its counts; no weights are loaded.

    Returns 0, or 2 if the run would end with an error because of its output folder.
    """
    check_rewards(arguments, images)
    config = settle(arguments)
    for line in describe(arguments, config, images):
        say(line)
    try:
        claim(config)
    except ValueError as error:
        say(wrapped(f"but the run would end with an error: {in_flags(str(error), arguments)}"))
        return 2
    return 0


def describe(arguments: Train, config: DDPOConfig, images: ImageFolder | None) -> Iterator[str]:
    """Yield a line for each part of the run that is known in advance."""
    chosen = arguments.chosen
    yield f"model: {chosen.model}"
    yield f"reward: {chosen.reward}"
    yield f"algorithm: {chosen.algorithm}"
    if images is not None:
        classes = f" of {len(images.classes)} classes" if images.classes else ""
        yield f"images: {len(images.files)}{classes} in {images.folder}"
    yield f"prompts: {_source_of_prompts(arguments, images)}"
    family = _family(chosen.model)
    edits = family is not None and family.takes_images
    strength = 1.0 if images is None or edits else chosen.noise_strength or NOISE_STRENGTH
    if family is not None and not issubclass(family, StableDiffusion3):  # whose count is rounded up
        count_steps(config.sample_num_steps, strength)  # raises an error if it is 0, as the run would
    yield from count(config, make_algorithm(chosen.algorithm), strength)


def count(config: DDPOConfig, algorithm: Algorithm, noise_strength: float) -> Iterator[str]:
    """Yield a table of the counts of an epoch and of the run, without loading the model.

    Stable Diffusion rounds the steps of img2img down, and FLUX.1 needs one forward pass for its guidance.
    """
    steps = math.ceil(config.sample_num_steps * noise_strength - 1e-6)
    actions, rewards = getattr(algorithm, "window", 0) or steps, 1
    if isinstance(algorithm, DRaFT):  # makes the images of its samples again, and scores them
        actions, rewards = 1, 1 + config.train_num_inner_epochs
    plan = config.epoch_plan(FromNoise().count_train_timesteps(actions, config), world_size())
    passes = steps * (2 if config.sample_guidance_scale > 1 else 1)
    yield f"steps of a rollout: {steps} of {config.sample_num_steps}"
    epochs = f"in {config.num_epochs} epoch{'' if config.num_epochs == 1 else 's'}"
    rows = [("", "per epoch", epochs)]
    for name, number in counts(plan, passes, rewards).items():
        rows.append((name, f"{number:,}", f"{number * config.num_epochs:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, epoch, run in rows:
        yield f"{name:{widths[0]}}  {epoch:>{widths[1]}}  {run:>{widths[2]}}"
    written = -(-config.num_epochs // config.save_freq)
    yield f"checkpoints: {written} written, {min(written, config.num_checkpoint_limit)} kept"
    yield f"output folder: {config.run_dir}"


def _family(model: str) -> type[Family] | None:
    """Return the family of a model, if its files are on this machine."""
    try:
        with quiet_loading():
            index = DiffusionPipeline.load_config(str(CHECKPOINTS.get(model, model)), local_files_only=True)
    except OSError:
        return None
    return family_class(index["_class_name"])


def _source_of_prompts(arguments: Train, images: ImageFolder | None) -> str:
    if arguments.prompt is not None:
        return f"{arguments.prompt!r} for all samples"
    name = arguments.chosen.prompts
    if images is None and Path(name).is_file():
        lines = read_prompts(name)
        return f"{name}, {len(lines)} prompts: {_first(lines)}"
    if images is None:
        return name
    if images.captions is None:
        return "none: every image has the empty prompt"
    lines = list(dict.fromkeys(line for lines in images.captions for line in lines))
    return f"captions, {len(lines)} different ones: {_first(lines)}"


def _first(prompts: Sequence[str]) -> str:
    short = (repr(prompt if len(prompt) <= SHOWN else f"{prompt[:SHOWN]}…") for prompt in prompts[:3])
    return ", ".join(short) + (", ..." if len(prompts) > 3 else "")
