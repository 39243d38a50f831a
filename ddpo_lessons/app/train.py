"""What `ddpo-lessons train` does once its flags are checked."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.app.presets import Preset
from ddpo_lessons.app.sample import NOISE_STRENGTH, image_size
from ddpo_lessons.compat import load_pipeline
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.folders import (
    ImageFolder,
    check_needs,
    check_prompt,
    find_images,
    image_prompts,
    make_reward,
)
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.rewards import get_reward
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
    trainer = make_trainer(arguments, images)
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
    config = arguments.make_config(preset)
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
    damages = arguments.damage or preset.damages
    check_needs(reward, images, damages)
    check_prompt(reward, images, arguments.prompt)
    reward_function, pipeline = make_reward(reward, images), load_pipeline(model)
    sampler = image_prompts(
        images,
        arguments.prompt or "",
        image_size(pipeline),
        config.seed,
        damages,
        arguments.severity or (1, 2, 3, 4, 5),
    )
    given = (arguments.noise_strength, preset.noise_strength, NOISE_STRENGTH)
    strength = next(value for value in given if value is not None)
    algorithm, start = make_algorithm(arguments.algorithm), FromImages(strength)
    return Runner(config, reward_function, sampler, pipeline, algorithm=algorithm, start=start)


def _sample_prompt(arguments: Train, images: ImageFolder | None) -> list[str]:
    """Return the prompt's flag for `sample`: the one of training, or TEXT where there were several."""
    if arguments.prompt is not None:
        return ["--prompt", arguments.prompt]
    return ["--prompt", "TEXT"] if images is None or images.captions is not None else []


def _print_places(trainer: Runner, model: str, folder: Path, prompt: list[str]) -> None:
    run_dir = trainer.config.run_dir
    print(f"{run_dir}: metrics.jsonl, config.json, images/, and checkpoints for --resume-from latest")
    command = ["ddpo-lessons", "sample"]
    command += ["--model", str(folder)] if not trainer.use_lora else ["--model", model, "--lora", str(folder)]
    command += prompt
    if isinstance(trainer.start, FromImages):
        command += ["--noise-strength", str(trainer.start.noise_strength), "--images", "FILE"]
    print(f"{folder}: what was trained; use it with\n  {shlex.join(command)}")
