"""`ddpo-lessons demo`: img2img DDPO learns to make damaged handwriting legible, in minutes on a CPU.

Foggy pictures go in with an empty prompt. The reward model says how surely it reads the true digit in
what comes out, and LoRA weights of the UNet are trained on that. The judge, a classifier that training
never sees, reads pictures of the test split before and after, from the same noise. benchmarks/NOTES.md
tells how these settings were found, and what did not work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.plotting import image_grid, plot_run, save_figure
from ddpo_lessons.prompts import damaged_handwriting
from ddpo_lessons.rewards import digit_legibility
from ddpo_lessons.rollout import img2img_rollout, sample_seed
from ddpo_lessons.runlog import read_metrics
from ddpo_lessons.tiny import load_judge, load_reward_model, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import accuracy
from ddpo_lessons.trainer import ImageDDPOTrainer

DAMAGE = "foggy"
SEVERITY = 3
NUM_STEPS = 12
NOISE_STRENGTH = 0.25  # the last 3 steps: what more noise hides, no policy can bring back
PROMPT = ""
# Attention, which is all that the peers adapt, and feed-forward layers and convolutions too.
EVERYWHERE = (
    *("to_k", "to_q", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
    *("conv1", "conv2", "conv_in", "conv_out"),
)
SETTINGS: dict[str, Any] = {
    "num_epochs": 30,
    "sample_num_steps": NUM_STEPS,
    "sample_guidance_scale": 1.0,
    "sample_batch_size": 64,
    "sample_num_batches_per_epoch": 2,
    "sample_group_size": 4,  # rollouts of a picture from one noise: only the actions explain the rewards
    "train_batch_size": 64,
    # The peers' 3e-4 and 1e-4 hardly move a model this small.
    "train_learning_rate": 1e-3,
    "train_clip_range": 5e-3,
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
    "train_lora_target_modules": EVERYWHERE,
    "save_freq": 10,
    "image_grid_freq": 5,
}
JUDGED_DURING_TRAINING = 100  # pictures, every so many epochs:
JUDGE_EVERY = 5


def restore(
    pipeline: Any,
    images: torch.Tensor,
    noise_strength: float = NOISE_STRENGTH,
    num_steps: int = NUM_STEPS,
    prompt: str = PROMPT,
    seed: int = 0,
) -> torch.Tensor:
    """Send images through the policy, picture n with noise of its own from (seed, n).

    Args:
        pipeline: its UNet is the policy.
        images: (N, 3, H, W) in [0, 1].
        noise_strength: as in `img2img_rollout`.
        num_steps: steps of the whole schedule.
        prompt: of all of them.
        seed: the same one means the same noise.

    Returns:
        Images (N, 3, H, W) in [0, 1].
    """
    out = []
    for first in range(0, len(images), 100):
        batch = images[first : first + 100]
        numbers = range(first, first + len(batch))
        restored, _ = img2img_rollout(
            pipeline,
            [prompt] * len(batch),
            batch,
            noise_strength,
            num_inference_steps=num_steps,
            guidance_scale=1.0,
            generator=[torch.Generator().manual_seed(sample_seed(seed, n)) for n in numbers],
        )
        out.append(restored)
    return torch.cat(out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's flags to a parser."""
    parser.add_argument("--seed", type=int, default=0, help="seed of training (default 0)")
    parser.add_argument(
        "--epochs", type=int, default=SETTINGS["num_epochs"], help="epochs (default %(default)s)"
    )
    parser.add_argument(
        "--eval-images", type=int, default=500, help="test pictures judged (default %(default)s)"
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("demo-run"), help="folder (default %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and print what it found.

    Args:
        arguments: parsed flags of `add_arguments`.

    Returns:
        0.
    """
    started = time.perf_counter()
    folder: Path = arguments.output_dir
    pipeline, judge = load_tiny_sd(), load_judge()
    test = world.draw_pictures(arguments.eval_images, "test", 0, DAMAGE, SEVERITY)
    print(f"reading {len(test.digits)} {DAMAGE} pictures of handwriting that nothing was trained on")
    before = restore(pipeline, test.images)
    curve: list[dict[str, float]] = []
    trainer = ImageDDPOTrainer(
        DDPOConfig(
            **{**SETTINGS, "num_epochs": arguments.epochs},
            seed=arguments.seed,
            output_dir=str(folder),
            overwrite=True,
        ),
        digit_legibility(load_reward_model()),
        damaged_handwriting(arguments.seed, [DAMAGE], [SEVERITY]),
        pipeline,
        _judge_now_and_then(judge, pipeline, test, before, curve, arguments.epochs),
        noise_strength=NOISE_STRENGTH,
    )
    trainer.train()
    after = restore(pipeline, test.images)
    trainer.save_pretrained(folder / "lora")
    shares = {
        "clean": accuracy(judge, test.clean, test.digits),
        "damaged": accuracy(judge, test.images, test.digits),
        "before": accuracy(judge, before, test.digits),
        "after": accuracy(judge, after, test.digits),
    }
    _write_results(folder, shares, curve, (test.images, before, after, test.clean))
    _print_results(folder, shares, time.perf_counter() - started)
    return 0


def _judge_now_and_then(
    judge: nn.Module,
    pipeline: Any,
    test: world.Pictures,
    before: torch.Tensor,
    curve: list[dict[str, float]],
    num_epochs: int,
) -> Callable[[list[list[Any]], int, Any], None]:
    """Make a hook that appends the judge's accuracy on some test pictures to `curve`."""
    digits = test.digits[:JUDGED_DURING_TRAINING]
    first = accuracy(judge, before[: len(digits)], digits)
    curve.append({"epoch": 0, "samples_seen": 0, "accuracy": first})
    epochs = itertools.count(1)

    def hook(batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        epoch = next(epochs)
        if epoch % JUDGE_EVERY and epoch != num_epochs:
            return
        share = accuracy(judge, restore(pipeline, test.images[: len(digits)]), digits)
        samples_seen = epoch * sum(len(images) for images, *_ in batches)
        curve.append({"epoch": epoch, "samples_seen": samples_seen, "accuracy": share})

    return hook


def _write_results(
    folder: Path,
    shares: dict[str, float],
    curve: list[dict[str, float]],
    pictures: tuple[torch.Tensor, ...],
) -> None:
    """Write results.json, judge.jsonl, before-after.png and curves.png."""
    (folder / "results.json").write_text(json.dumps(shares, indent=1) + "\n")
    (folder / "judge.jsonl").write_text("".join(json.dumps(point) + "\n" for point in curve))
    rows = torch.cat([row[:12] for row in pictures])
    image_grid(rows, columns=min(12, len(pictures[0])), scale=3).save(folder / "before-after.png")
    save_figure(plot_run(read_metrics(folder, "epoch"), curve), folder / "curves.png")


def _print_results(folder: Path, shares: dict[str, float], seconds: float) -> None:
    """Print the verdict and where things are."""
    print("\nThe judge, which training never saw, reads correctly")
    names = {
        "damaged": f"the {DAMAGE} pictures themselves",
        "before": "what the model makes of them before RL",
        "after": "what it makes of them after RL",
        "clean": "the clean originals",
    }
    for key, name in names.items():
        print(f"  {100 * shares[key]:5.1f}%  of {name}")
    gain = 100 * (shares["after"] - shares["before"])
    print(f"RL changed it by {gain:+.1f} points in {seconds / 60:.1f} minutes altogether.\n")
    for name, what in (
        ("before-after.png", "rows: damaged, before RL, after RL, clean original"),
        ("curves.png", "reward and judge over the samples"),
        ("metrics.jsonl", "every optimizer step and epoch"),
        ("lora", "pipeline.load_lora_weights(...) in plain diffusers loads this"),
    ):
        print(f"  {folder / name}: {what}")
