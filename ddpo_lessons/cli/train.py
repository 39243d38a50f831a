"""Run `ddpo-lessons train` after its flags are checked."""

import shlex
import warnings
from pathlib import Path
from typing import Any

from ddpo_lessons.algorithms import is_own, make_algorithm, parse_algorithm
from ddpo_lessons.cli import dry_run, reward_flag
from ddpo_lessons.cli.messages import wrapped
from ddpo_lessons.cli.options import Train
from ddpo_lessons.data.folders import ImageFolder, ImagePrompts, find_images, summary
from ddpo_lessons.data.prompts import read_prompts
from ddpo_lessons.hooks import Hooks
from ddpo_lessons.models import image_size, load_pipeline
from ddpo_lessons.models.policy import loaded_dtype
from ddpo_lessons.rewards.combined import judged
from ddpo_lessons.trainer import ImageSamplesHook, Trainer
from ddpo_lessons.training.processes import say
from ddpo_lessons.training.trackers import PLOT
from ddpo_lessons.validation import Validation


def run(arguments: Train) -> int:
    """Train, save and print where; return 0, or 128 plus the number of the signal that stopped the run."""
    images = None if arguments.images is None else find_images(arguments.images)
    held_out = find_held_out(arguments)
    if arguments.dry_run:
        return dry_run.dry_run(arguments, images)
    trainer = make_trainer(arguments, images)
    is_main = trainer.accelerator.is_main_process
    if is_main and images is not None:
        print(summary(images))
    if is_main and 0 < trainer.epochs_done < trainer.config.num_epochs:
        print(f"continuing after epoch {trainer.epochs_done} of {trainer.config.num_epochs}")
    hooks: list[ImageSamplesHook] = [_first_epoch_hook(trainer)]
    if held_out is not None:
        hooks.append(make_validation(arguments, trainer, held_out))
    trainer.image_samples_hook = Hooks(*hooks)
    with warnings.catch_warnings():  # the hook prints the findings of the first epoch
        warnings.filterwarnings("ignore", message="the first epoch looks broken")
        trainer.train()
    trainer.save_pretrained(trainer.config.run_dir / ("lora" if trainer.use_lora else "pipeline"))
    if is_main:
        _print_places(trainer)
    if trainer.stopped_by is None:
        return 0
    if is_main:
        done, asked = trainer.epochs_done, trainer.config.num_epochs
        print(f"stopped after epoch {done} of {asked}; continue with the same flags and --resume-from auto")
    return 128 + trainer.stopped_by


def make_trainer(arguments: Train, images: ImageFolder | None) -> Trainer:
    """Run all cheap checks, then load models; return the trainer."""
    chosen = arguments.chosen
    dry_run.check_rewards(arguments, images)
    config = dry_run.settle(arguments)
    reward_function = reward_flag.make(reward_flag.parse(chosen.reward), images)
    if arguments.judge is not None:
        judge = reward_flag.make(reward_flag.parse(arguments.judge), images)
        reward_function = judged(reward_function, judge)
    pipeline = load_pipeline(chosen.model, dtype=loaded_dtype(config))
    if images is None:
        prompts: Any = arguments.choose_prompts(config.seed)
    else:
        prompts = _sampler(arguments, images, pipeline, config.seed)
    return Trainer(
        config,
        reward_function,
        prompts,
        pipeline,
        algorithm=make_algorithm(chosen.algorithm),
        start=dry_run.choose_start(arguments, pipeline),
        about=_about(arguments, images),
    )


def find_held_out(arguments: Train) -> ImageFolder | list[str] | None:
    """Find the images or prompts of `--validation`, and check that they fit the reward."""
    if arguments.validation is None:
        return None
    rewards = reward_flag.parse(arguments.chosen.reward)
    try:
        if arguments.images is None:
            prompts = read_prompts(arguments.validation)
            reward_flag.check_text(rewards, prompts, {}, arguments.prompt)
            return prompts
        held_out = find_images(arguments.validation)
        reward_flag.check(rewards, held_out, arguments.prompt)
        return held_out
    except ValueError as error:
        raise ValueError(f"--validation {arguments.validation}: {error}") from error


def make_validation(arguments: Train, trainer: Trainer, held_out: ImageFolder | list[str]) -> Validation:
    """Make the validation hook; its images get the prompts and the damage of training."""
    if isinstance(held_out, list):
        samples: list[Any] = [(prompt, {}) for prompt in held_out]
    else:
        sampler = _sampler(arguments, held_out, trainer.pipeline, trainer.config.seed)
        samples = sampler.every()
    return Validation(trainer, samples, arguments.validation_freq)


def _first_epoch_hook(trainer: Trainer) -> ImageSamplesHook:
    """Make the hook that prints the findings of the first epoch."""

    def hook(batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        if trainer.epochs_done == 1:
            say(trainer.accelerator, "\n".join(wrapped(str(found), 6) for found in trainer.preflight))

    return hook


def _sampler(arguments: Train, images: ImageFolder, pipeline: Any, seed: int) -> ImagePrompts:
    chosen = arguments.chosen
    severities = arguments.severity or chosen.severities
    side = chosen.resolution or image_size(pipeline)
    return ImagePrompts(
        images, arguments.prompt or "", side, seed, chosen.damages, severities, chosen.augmented
    )


def _about(arguments: Train, images: ImageFolder | None) -> dict[str, Any]:
    """Return the names of a run's parts, in the syntax of the command line."""
    chosen = arguments.chosen
    about: dict[str, Any] = {
        "preset": arguments.preset_name,
        "reward": reward_flag.describe(reward_flag.parse(chosen.reward)),
        "judge": arguments.judge,
        "own_algorithm": chosen.algorithm if is_own(parse_algorithm(chosen.algorithm)[0]) else None,
    }
    if images is None:
        return {**about, "prompts": _prompt_source(arguments)}
    about["images"] = {
        "folder": str(images.folder.resolve()),
        "files": len(images.files),
        "damages": chosen.damages,
        "severities": (arguments.severity or chosen.severities) if chosen.damages else (),
        "augmented": chosen.augmented,
    }
    about["prompts"] = {"prompt": arguments.prompt or ""}
    if images.captions is not None:
        about["prompts"] = {"captions": sum(map(len, images.captions))}
    return about


def _prompt_source(arguments: Train) -> dict[str, Any]:
    if arguments.prompt is not None:
        return {"prompt": arguments.prompt}
    name = arguments.chosen.prompts
    return {"file": str(Path(name).resolve())} if Path(name).is_file() else {"name": name}


def _print_places(trainer: Trainer) -> None:
    run_dir = trainer.config.run_dir
    if (run_dir / PLOT).is_file():  # a plot that failed was warned of
        print(wrapped(f"{run_dir / PLOT}: rewards and other curves of the run, and its images"))
    print(wrapped(f"{run_dir}: metrics.jsonl, config.json, images/, and checkpoints for --resume-from auto"))
    folder = run_dir / ("lora" if trainer.use_lora else "pipeline")
    command = shlex.join(["ddpo-lessons", "sample", "--run", str(run_dir)])
    print(f"{folder}: what was trained; use it with\n  {command}")
