"""`ddpo-lessons train`: what a run is going to do, settled and said before any weights are loaded."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.app import budget, memory, reward_flag
from ddpo_lessons.app.options import Train
from ddpo_lessons.app.presets import Preset, world_size
from ddpo_lessons.app.sample import NOISE_STRENGTH, takes_images
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.folders import ImageFolder
from ddpo_lessons.data.images import PNG_BYTES, grid_bytes_per_pixel
from ddpo_lessons.data.prompts import read_prompts
from ddpo_lessons.data.starts import FromImages, FromNoise, WithImages
from ddpo_lessons.plan import summary
from ddpo_lessons.run.runlog import claim
from ddpo_lessons.run.runner import SHOWN_IMAGES


def say(text: str) -> None:
    """Print a line, in one of the processes."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def settle(arguments: Train, preset: Preset, from_images: bool) -> DDPOConfig:
    """Return this process's settings, cut to the memory that was named.

    Raises ValueError if nothing fits, or the run's folder holds another run.
    """
    config = arguments.make_config(preset)
    claim(config)
    if not preset.config:
        plan = config.epoch_plan(1, world_size())
        say(
            f"without --preset, settings that no flag gives are for trying out: {plan.total_samples} "
            f"samples per epoch, {plan.samples_per_optimizer_step} per optimizer step, "
            f"mixed_precision={config.mixed_precision}, learning rate {config.train_learning_rate:g}"
        )
    if arguments.gpu_memory is None:
        return config
    if not preset.config and "mixed_precision" not in arguments.settings:
        config = replace(config, mixed_precision=memory.low_precision())
    named, model = arguments.gpu_memory, arguments.model or preset.model
    config, gigabytes = memory.fit(
        model,
        config,
        memory.device_gigabytes() if named == "auto" else float(named),
        make_algorithm(arguments.choose_algorithm(preset)),
        choose_start(arguments, preset, from_images, memory.find_pipeline(model)),
        memory.reward_bytes(arguments.reward or preset.reward),
        keep_checkpointing="train_gradient_checkpointing" in arguments.settings,
    )
    size = config.train_forward_size
    say(
        f"--gpu-memory {named}: passes of {size} sample{'' if size == 1 else 's'}, "
        f"mixed_precision={config.mixed_precision}, "
        f"{'with' if config.train_gradient_checkpointing else 'without'} gradient checkpointing, "
        f"{gigabytes:.1f} GB on paper"
    )
    return config


def check_rewards(arguments: Train, preset: Preset, images: ImageFolder | None) -> None:
    """Refuse a reward or a judge that does not go with the images or prompts, by a ValueError."""
    try:
        _check_terms(reward_flag.parse(arguments.reward or preset.reward), arguments, preset, images)
    except ValueError as error:
        if arguments.reward is None and "reward=" in str(error):
            raise ValueError(f"{error} (no --reward is given, so it is the preset's)") from error
        raise
    if arguments.judge is not None:
        _check_terms(reward_flag.parse(arguments.judge), arguments, preset, images)


def _check_terms(
    terms: Sequence[reward_flag.Term], arguments: Train, preset: Preset, images: ImageFolder | None
) -> None:
    if images is not None:
        reward_flag.check(terms, images, arguments.prompt)
        return
    name = arguments.prompts or preset.prompts
    drawn, metadata = arguments.choose_prompts(preset, seed=0)()
    is_file = arguments.prompt is None and Path(name).is_file()
    reward_flag.check_text(terms, read_prompts(name) if is_file else [drawn], metadata)


def choose_start(arguments: Train, preset: Preset, from_images: bool, pipeline: Any) -> FromNoise:
    """Return where rollouts begin: in noise, in images, or in noise with images beside it."""
    resolution = arguments.choose_resolution(preset)
    if not from_images:
        return FromNoise(resolution=resolution)
    if takes_images(pipeline, arguments.noise_strength):
        return WithImages(resolution=resolution)
    strengths = (arguments.noise_strength, preset.noise_strength, NOISE_STRENGTH)
    return FromImages(next(s for s in strengths if s is not None), resolution=resolution)


# ----------------------------------------------------------------------------------------- the dry run
def dry_run(arguments: Train, images: ImageFolder | None) -> int:
    """Say what the run would do and cost, and return 0; no weights are loaded."""
    preset = arguments.choose_preset()
    check_rewards(arguments, preset, images)
    config = settle(arguments, preset, images is not None)
    for line in describe(arguments, preset, config, images):
        say(line)
    return 0


def describe(
    arguments: Train, preset: Preset, config: DDPOConfig, images: ImageFolder | None
) -> Iterator[str]:
    """Yield a line for everything that is known of a run beforehand."""
    model, reward = arguments.model or preset.model, arguments.reward or preset.reward
    algorithm = arguments.choose_algorithm(preset)
    plan = config.epoch_plan(1, world_size())
    yield f"model: {model}; reward: {reward}; algorithm: {algorithm}"
    if images is not None:
        classes = f" of {len(images.classes)} classes" if images.classes else ""
        yield f"images: {len(images.files)}{classes} in {images.folder}"
    yield f"prompts: {_source_of_prompts(arguments, preset, images)}"
    yield summary(plan, config.num_epochs)
    try:
        pipeline = memory.find_pipeline(model)
    except ValueError as error:
        yield f"denoiser passes, memory, hours and disk: not known, for {error}"
        return
    start, held = choose_start(arguments, preset, images is not None, pipeline), memory.reward_bytes(reward)
    paper = budget.estimate(pipeline, config, make_algorithm(algorithm), start, held)  # of one process
    yield (
        f"denoiser passes an epoch: {paper.sampling.passes * world_size()} of sampling, "
        f"at most {paper.training.passes * world_size()} of training, forward and backward"
    )
    yield f"memory: {paper.peak / memory.GB:.1f} GB on each device, on paper, without CUDA's own"
    hours = ", ".join(_hours(paper, config))
    smaller = " as it is: --gpu-memory GB cuts its passes" if arguments.gpu_memory is None else ""
    hours = hours.replace("does not fit", f"does not fit{smaller}", 1)
    other = "any other device: train shows it after an epoch"
    yield f"hours: {hours}; on paper, without the reward; {other}"
    yield _disk(config, paper)


def _source_of_prompts(arguments: Train, preset: Preset, images: ImageFolder | None) -> str:
    if arguments.prompt is not None:
        return f"{arguments.prompt!r} for everything"
    name = arguments.prompts or preset.prompts
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
    return ", ".join(map(repr, prompts[:3])) + (", ..." if len(prompts) > 3 else "")


def _hours(paper: budget.Budget, config: DDPOConfig) -> Iterator[str]:
    """Yield a card's name and hours, for each card that holds the run."""
    for name, (gigabytes, tflops) in memory.CARDS.items():
        if paper.peak / memory.GB + memory.CUDA > memory.SHARE * gigabytes:
            yield f"{name}: does not fit"
            continue
        speed = tflops if config.mixed_precision != "no" else tflops / 2  # TF32
        hours = sum(paper.seconds(speed, memory.UTILISATION)) * config.num_epochs / 3600
        yield f"{name}: {hours:.2g}" if hours >= 0.01 else f"{name}: below 0.01"


def _disk(config: DDPOConfig, paper: budget.Budget) -> str:
    """Count checkpoints (weights and moments) and grids; metrics are small."""
    checkpoints = min(config.num_checkpoint_limit, -(-config.num_epochs // config.save_freq))
    grids = -(-config.num_epochs // config.image_grid_freq) if config.image_grid_freq else 0
    samples = config.epoch_plan(1).samples_per_process
    pixels = paper.images // (samples * 3 * 4)  # of one image, float32
    each = grid_bytes_per_pixel(math.isqrt(pixels))
    if config.log_with == "tensorboard":  # whose files lie in the run's folder
        each += PNG_BYTES
    pictures = grids * min(SHOWN_IMAGES, samples) * pixels * each
    kept = checkpoints * (paper.trained + paper.moments)
    return (
        f"disk: {(kept + pictures) / memory.GB:.2g} GB in {config.run_dir}: {checkpoints} checkpoints of "
        f"{(paper.trained + paper.moments) / 1e6:.3g} MB, {grids} grids"
    )
