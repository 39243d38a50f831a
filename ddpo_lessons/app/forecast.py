"""`ddpo-lessons train`: what a run is going to do, settled and said before any weights are loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ddpo_lessons.algorithms import make_algorithm, parse_algorithm
from ddpo_lessons.app import budget, memory, reward_flag
from ddpo_lessons.app.options import Train
from ddpo_lessons.app.presets import Preset, world_size
from ddpo_lessons.app.sample import NOISE_STRENGTH
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.folders import ImageFolder
from ddpo_lessons.data.images import grid_bytes_per_pixel
from ddpo_lessons.data.prompts import read_prompts
from ddpo_lessons.families.stable_diffusion import vae_factor
from ddpo_lessons.run.runner import SHOWN_IMAGES

# Algorithms whose largest pass is DDPO's; that of AWM and NFT by the policy that sampled comes before it, and
# is not counted in hours. DPO trains on two samples at a time, and two more go through decoder and reward.
COUNTED = ("ddpo", "rwr", "flow_grpo", "awm", "nft")


def say(text: str) -> None:
    """Print a line, in one of the processes."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def settle(arguments: Train, preset: Preset, from_images: bool) -> DDPOConfig:
    """Return the settings of this process, cut to the memory that was named; say what was decided.

    Args:
        arguments: the command line's, checked.
        preset: the one it chose.
        from_images: img2img.

    Returns:
        The settings.

    Raises:
        ValueError: if nothing fits the memory, or the model's size is not known.
    """
    config, processes = arguments.make_config(preset), world_size()
    if processes > 1:
        plan = config.epoch_plan(num_timesteps=1, num_processes=processes)
        say(
            f"{processes} processes: each samples {plan.samples_per_process} of {plan.total_samples} an "
            f"epoch, with {plan.samples_per_optimizer_step} samples an optimizer step"
        )
    if not preset.config:
        plan = config.epoch_plan(num_timesteps=1, num_processes=processes)
        say(
            f"without --preset, settings that no flag gives are for trying out: {plan.total_samples} "
            f"samples an epoch, {plan.samples_per_optimizer_step} an optimizer step, "
            f"mixed_precision={config.mixed_precision}, learning rate {config.train_learning_rate:g}"
        )
    if arguments.gpu_memory is None:
        return config
    check_counted(arguments.choose_algorithm(preset), "--gpu-memory")
    found = fit(arguments, preset, config, from_images)
    say(f"--gpu-memory {arguments.gpu_memory}: {found}")
    return found.config


def fit(arguments: Train, preset: Preset, config: DDPOConfig, from_images: bool) -> memory.Fit:
    """Cut settings to `--gpu-memory`; without preset and --mixed-precision they take half precision."""
    named = arguments.gpu_memory or ""
    gigabytes = memory.device_gigabytes() if named == "auto" else float(named)
    if not preset.config and "mixed_precision" not in arguments.given:
        config = replace(config, mixed_precision=memory.low_precision())
    model = arguments.model or preset.model
    return memory.fit(
        model,
        config,
        gigabytes,
        count_actions(arguments, preset, config, from_images, memory.find_networks(model)),
        from_images,
        memory.reward_bytes(arguments.reward or preset.reward),
        make_algorithm(arguments.choose_algorithm(preset)).keeps_old,
        keep_checkpointing="train_gradient_checkpointing" in arguments.given,
    )


def noise_strength(arguments: Train, preset: Preset) -> float:
    """Return the flag's, the preset's, or the default."""
    given = (arguments.noise_strength, preset.noise_strength, NOISE_STRENGTH)
    return next(value for value in given if value is not None)


def count_actions(
    arguments: Train,
    preset: Preset,
    config: DDPOConfig,
    from_images: bool,
    networks: budget.Networks | None,
) -> int:
    """Return the steps of a rollout, the last of which may turn out to have no noise.

    Networks that are not known are taken for those of Stable Diffusion 1.
    """
    steps = config.sample_num_steps * (noise_strength(arguments, preset) if from_images else 1.0)
    rounds_up = networks is not None and networks.rounds_steps_up
    return math.ceil(steps - 1e-6) if rounds_up else max(1, int(steps + 1e-6))


def check_counted(algorithm: str, what: str) -> None:
    """Refuse to count an algorithm whose passes hold more than DDPO's.

    Raises:
        ValueError: naming those that can be counted.
    """
    name, _ = parse_algorithm(algorithm)
    if name not in COUNTED:
        raise ValueError(f"{what} counts {', '.join(COUNTED)}, and {name} holds more: try smaller passes")


def windowed(config: DDPOConfig, algorithm: str, actions: int) -> DDPOConfig:
    """Return settings that train as many of a sample's steps as the algorithm's window has, if it has one."""
    window = parse_algorithm(algorithm)[1].get("window", 0)
    share = min(1.0, window / actions) if window else 1.0
    return replace(config, train_timestep_fraction=config.train_timestep_fraction * share)


# ----------------------------------------------------------------------------------------- the dry run
def dry_run(arguments: Train, images: ImageFolder | None) -> int:
    """Say what the run would do and cost; no weights are loaded.

    Args:
        arguments: the command line's, checked.
        images: those of `--images`.

    Returns:
        0.
    """
    preset = arguments.choose_preset()
    if images is not None:
        damages = arguments.damage or preset.damages
        reward_flag.check(arguments.choose_rewards(preset), images, damages, arguments.prompt)
    config = settle(arguments, preset, images is not None)
    for line in describe(arguments, preset, config, images):
        say(line)
    return 0


def describe(
    arguments: Train, preset: Preset, config: DDPOConfig, images: ImageFolder | None
) -> Iterator[str]:
    """Yield a line for everything that is known of a run beforehand."""
    model, reward = arguments.model or preset.model, arguments.reward or preset.reward
    algorithm, networks, unknown = arguments.choose_algorithm(preset), None, None
    try:
        check_counted(algorithm, "the dry run")
        networks = memory.find_networks(model)
    except ValueError as error:
        unknown = error
    actions = count_actions(arguments, preset, config, images is not None, networks)
    config = windowed(config, algorithm, actions)
    plan = config.epoch_plan(max(1, int(actions * config.train_timestep_fraction + 1e-6)), world_size())
    yield f"model: {model}; reward: {reward}; algorithm: {algorithm}"
    if images is not None:
        classes = f" of {len(images.classes)} classes" if images.classes else ""
        yield f"images: {len(images.files)}{classes} in {images.folder}"
    yield f"prompts: {_source_of_prompts(arguments, preset, images)}"
    yield (
        f"samples: {plan.total_samples} an epoch, {plan.samples_per_optimizer_step} an optimizer step; "
        f"{plan.optimizer_steps} optimizer steps an epoch, {plan.optimizer_steps * config.num_epochs} in all "
        f"{config.num_epochs} epochs"
    )
    guided = 2 if config.sample_guidance_scale > 1 else 1
    yield (
        f"denoiser passes an epoch: {plan.total_samples * actions * guided} of sampling, "
        f"at most {plan.total_pairs * guided} of training, forward and backward"
    )
    if networks is None:
        yield f"memory, hours and disk: not known, for {unknown}"
        return
    held, keeps_old = memory.reward_bytes(reward), make_algorithm(algorithm).keeps_old
    paper = budget.estimate(networks, config, actions, images is not None, held, keeps_old)  # of one process
    yield f"memory: {paper.peak / memory.GB:.1f} GB on each device, on paper, without CUDA's own"
    yield f"hours: {', '.join(_hours(paper, config))}; on paper, without the reward; others: not measured"
    yield _disk(config, paper, networks)


def _source_of_prompts(arguments: Train, preset: Preset, images: ImageFolder | None) -> str:
    if arguments.prompt is not None:
        return f"{arguments.prompt!r} for everything"
    name = arguments.prompts or preset.prompts
    if images is None and Path(name).is_file():
        lines = read_prompts(name)
        return f"{name}, {len(lines)} prompts, the first {lines[0]!r}"
    if images is None:
        return name
    if images.captions is None:
        return "none: every image has the empty prompt"
    return f"captions, {len({line for lines in images.captions for line in lines})} different ones"


def _hours(paper: budget.Budget, config: DDPOConfig) -> Iterator[str]:
    """Yield a card's name and hours, for each card that holds the run."""
    for name, (gigabytes, tflops) in memory.CARDS.items():
        if paper.peak / memory.GB + memory.CUDA > memory.SHARE * gigabytes:
            yield f"{name}: does not fit"
            continue
        speed = tflops if config.mixed_precision != "no" else tflops / 2  # TF32
        hours = sum(paper.seconds(speed, memory.UTILISATION)) * config.num_epochs / 3600
        yield f"{name}: {hours:.2g}" if hours >= 0.01 else f"{name}: below 0.01"


def _disk(config: DDPOConfig, paper: budget.Budget, networks: budget.Networks) -> str:
    """Count checkpoints (weights and moments) and grids; metrics are small."""
    checkpoints = min(config.num_checkpoint_limit, -(-config.num_epochs // config.save_freq))
    side = networks.denoiser.config.sample_size * vae_factor(networks.vae)  # pixels
    grids = -(-config.num_epochs // config.image_grid_freq) if config.image_grid_freq else 0
    shown = min(SHOWN_IMAGES, config.sample_batch_size * config.sample_num_batches_per_epoch)
    pictures = grids * shown * side**2 * grid_bytes_per_pixel(side)
    kept = checkpoints * (paper.trained + paper.moments)
    return (
        f"disk: {(kept + pictures) / memory.GB:.2g} GB in {config.run_dir}: {checkpoints} checkpoints of "
        f"{(paper.trained + paper.moments) / 1e6:.3g} MB, {grids} grids"
    )
