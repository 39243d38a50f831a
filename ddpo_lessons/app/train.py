"""What `ddpo-lessons train` does once its flags are checked."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.app import forecast
from ddpo_lessons.app.presets import Preset
from ddpo_lessons.app.sample import image_size
from ddpo_lessons.compat import load_pipeline
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.folders import (
    LABEL,
    ImageFolder,
    ImagePrompts,
    check_needs,
    check_prompt,
    find_images,
    image_prompts,
    make_reward,
)
from ddpo_lessons.data.prompts import read_prompts
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.rewards import get_reward
from ddpo_lessons.run.validation import Validation
from ddpo_lessons.trainer import Runner

if TYPE_CHECKING:
    from ddpo_lessons.app.cli import Train


def run(arguments: Train) -> int:
    """Train, write what was trained, and say where it is.

    Args:
        arguments: the command line's, checked.

    Returns:
        0.
    """
    images = None if arguments.images is None else find_images(arguments.images)
    held_out = find_held_out(arguments)
    if arguments.dry_run:
        return forecast.dry_run(arguments, images)
    trainer = make_trainer(arguments, images)
    if held_out is not None:
        trainer.image_samples_hook = make_validation(arguments, trainer, held_out)
    trainer.train()
    folder = trainer.config.run_dir / ("lora" if trainer.use_lora else "pipeline")
    trainer.save_pretrained(folder)
    if trainer.accelerator.is_main_process:
        model = arguments.model or arguments.choose_preset().model
        _print_places(trainer, model, folder, _sample_prompt(arguments, images))
    return 0


def make_trainer(arguments: Train, images: ImageFolder | None) -> Runner:
    """Check everything that is cheap to check, then load models.

    Args:
        arguments: the command line's, checked.
        images: those of `--images`.

    Returns:
        The trainer.
    """
    preset = arguments.choose_preset()
    config = forecast.settle(arguments, preset, images is not None)
    reward, model = arguments.reward or preset.reward, arguments.model or preset.model
    if images is not None:
        return _make_image_trainer(arguments, preset, images, config, reward, model)
    prompts = arguments.choose_prompts(preset, config.seed)
    algorithm, start = make_algorithm(arguments.algorithm), FromNoise()
    pipeline = load_pipeline(model)
    return Runner(config, get_reward(reward), prompts, pipeline, algorithm=algorithm, start=start)


def _make_image_trainer(
    arguments: Train,
    preset: Preset,
    images: ImageFolder,
    config: DDPOConfig,
    reward: str,
    model: str,
) -> Runner:
    check_needs(reward, images, arguments.damage or preset.damages)
    check_prompt(reward, images, arguments.prompt)
    reward_function, pipeline = make_reward(reward, images), load_pipeline(model)
    sampler = _sampler(arguments, images, pipeline, config.seed)
    algorithm = make_algorithm(arguments.algorithm)
    start = FromImages(forecast.noise_strength(arguments, preset))
    return Runner(config, reward_function, sampler, pipeline, algorithm=algorithm, start=start)


def find_held_out(arguments: Train) -> ImageFolder | list[str] | None:
    """Find the images, or prompts, of `--validation`, and check that they go with the reward."""
    if arguments.validation is None:
        return None
    if arguments.images is None:
        return read_prompts(arguments.validation)
    preset, held_out = arguments.choose_preset(), find_images(arguments.validation)
    reward = arguments.reward or preset.reward
    check_needs(reward, held_out, arguments.damage or preset.damages)
    check_prompt(reward, held_out, arguments.prompt)
    return held_out


def make_validation(arguments: Train, trainer: Runner, held_out: ImageFolder | list[str]) -> Validation:
    """Make what renders and scores them; images get the prompts and the damage of training."""
    if isinstance(held_out, list):
        samples: list[Any] = [(prompt, {}) for prompt in held_out]
    else:
        sampler = _sampler(arguments, held_out, trainer.pipeline, trainer.config.seed)
        samples = sampler.every()
    return Validation(trainer, samples, arguments.validation_freq)


def _sampler(arguments: Train, images: ImageFolder, pipeline: Any, seed: int) -> ImagePrompts:
    damages = arguments.damage or arguments.choose_preset().damages
    severities = arguments.severity or (1, 2, 3, 4, 5)
    prompt = arguments.prompt or ""
    return image_prompts(images, prompt, image_size(pipeline), seed, damages, severities)


def _sample_prompt(arguments: Train, images: ImageFolder | None) -> list[str]:
    """Return the prompt's flag for `sample`: the one of training, or TEXT where there were several."""
    if arguments.prompt is not None and LABEL not in arguments.prompt:
        return ["--prompt", arguments.prompt]
    is_one = images is not None and images.captions is None and arguments.prompt is None
    return [] if is_one else ["--prompt", "TEXT"]


def _print_places(trainer: Runner, model: str, folder: Path, prompt: list[str]) -> None:
    run_dir = trainer.config.run_dir
    print(f"{run_dir}: metrics.jsonl, config.json, images/, and checkpoints for --resume-from latest")
    command = ["ddpo-lessons", "sample"]
    command += ["--model", str(folder)] if not trainer.use_lora else ["--model", model, "--lora", str(folder)]
    command += prompt
    if isinstance(trainer.start, FromImages):
        command += ["--noise-strength", str(trainer.start.noise_strength), "--images", "FILE"]
    print(f"{folder}: what was trained; use it with\n  {shlex.join(command)}")
