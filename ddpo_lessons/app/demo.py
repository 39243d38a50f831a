"""`ddpo-lessons demo`: img2img DDPO learns to obey the prompt and keep the picture, in minutes on a CPU.

A handwritten digit goes in, with a sentence that names two other colours and no digit. Done right, both
colours are those named, and the digit is still the one that was written. At low noise strength the untrained
pipeline ignores the sentence, at high strength it loses the digit. RL is told nothing but a score. Two judges
that training never asks look at pictures of the test split before and after, from the same noise.
benchmarks/NOTES.md tells how these settings were found, and what did not work.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import StableDiffusionImg2ImgPipeline

from ddpo_lessons.app.plotting import plot_dilemma, plot_strip, save_figure
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.prompts import edit_requests
from ddpo_lessons.rewards import recolouring
from ddpo_lessons.rollout import img2img_rollout, sample_seed
from ddpo_lessons.tiny import load_judge, load_second_judge, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import judge_edits
from ddpo_lessons.trainer import ImageDDPOTrainer

if TYPE_CHECKING:
    from ddpo_lessons.app.cli import Demo


@dataclass(frozen=True)
class Img2Img:
    """What a user of img2img can turn: strength, guidance, steps of the whole schedule, and η of DDIM."""

    strength: float
    guidance: float
    steps: int
    eta: float = 1.0


POLICY = Img2Img(0.4, 2.0, 5)  # two steps are run, the first of which is an action
# The most done right by the untrained pipeline, of a grid of all four: benchmarks/results/edit_grid.csv.
UNTRAINED_BEST = Img2Img(0.4, 30.0, 10)
STRENGTHS = (0.2, 0.4, 0.5, 0.6, 0.8, 1.0)  # of the curve that the figure shows
# Attention, which is all that the peers adapt, and feed-forward layers and convolutions too.
EVERYWHERE = (
    *("to_k", "to_q", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
    *("conv1", "conv2", "conv_in", "conv_out"),
)
SETTINGS: dict[str, Any] = {
    "num_epochs": 150,
    "sample_num_steps": POLICY.steps,
    "sample_guidance_scale": POLICY.guidance,
    "sample_batch_size": 128,
    "sample_num_batches_per_epoch": 2,
    "sample_group_size": 8,  # rollouts of a picture from one noise: only the actions explain the rewards
    "train_batch_size": 256,  # one optimizer step an epoch
    # The peers' 3e-4 and 1e-4 hardly move a model this small.
    "train_learning_rate": 2e-3,
    "train_clip_range": 5e-3,
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
    "train_lora_target_modules": EVERYWHERE,
    "save_freq": 50,
    "image_grid_freq": 0,
}
WATCHED = 100  # pictures of the validation split, looked at every so many epochs:
WATCH_EVERY = 5
SHOWN = 6  # pictures in the strip, the first of the test split


def restore(
    pipeline: Any,
    images: torch.Tensor,
    noise_strength: float,
    num_steps: int,
    prompt: str | Sequence[str] = "",
    seed: int = 0,
    guidance_scale: float = 1.0,
    eta: float = 1.0,
) -> torch.Tensor:
    """Send images through the policy, picture n with noise of its own from (seed, n).

    Args:
        pipeline: its UNet is the policy.
        images: (N, 3, H, W) in [0, 1].
        noise_strength: as in `img2img_rollout`.
        num_steps: steps of the whole schedule.
        prompt: of all of them, or N prompts.
        seed: the same one means the same noise.
        guidance_scale: as in `img2img_rollout`.
        eta: as in `img2img_rollout`.

    Returns:
        Images (N, 3, H, W) in [0, 1], on the CPU.
    """
    prompts = [prompt] * len(images) if isinstance(prompt, str) else prompt
    out = []
    for numbers in torch.arange(len(images)).split(100):
        edited, _ = img2img_rollout(
            pipeline,
            [prompts[n] for n in numbers],
            images[numbers],
            noise_strength,
            num_inference_steps=num_steps,
            guidance_scale=guidance_scale,
            eta=eta,
            generator=[torch.Generator().manual_seed(sample_seed(seed, int(n))) for n in numbers],
        )
        out.append(edited.cpu())
    return torch.cat(out)


def untrained(pipeline: Any, edits: world.Edits, setting: Img2Img) -> torch.Tensor:
    """Edit pictures as a user of plain diffusers would; picture n has noise of its own, always the same.

    Args:
        pipeline: gives its parts.
        edits: pictures and sentences.
        setting: of img2img.

    Returns:
        Images (N, 3, 32, 32) in [0, 1], on the CPU.
    """
    plain = StableDiffusionImg2ImgPipeline(**pipeline.components, requires_safety_checker=False)
    plain.set_progress_bar_config(disable=True)
    out = []
    for numbers in torch.arange(len(edits.prompts)).split(100):
        edited = plain(
            prompt=[edits.prompts[n] for n in numbers],
            image=edits.pictures.images[numbers],
            strength=setting.strength,
            guidance_scale=setting.guidance,
            num_inference_steps=setting.steps,
            eta=setting.eta,
            generator=[torch.Generator().manual_seed(int(n)) for n in numbers],
            output_type="pt",
        )
        out.append(edited.images.float().cpu())
    return torch.cat(out)


class Exam:
    """The judges' verdict on what a pipeline makes of pictures and sentences, always from the same noise."""

    def __init__(self, edits: world.Edits) -> None:
        """Load the judges."""
        self.edits = edits
        self.judges = load_judge(), load_second_judge()

    def images(self, pipeline: Any, setting: Img2Img) -> torch.Tensor:
        """Return what the policy makes of the pictures, (N, 3, 32, 32)."""
        return restore(
            pipeline,
            self.edits.pictures.images,
            setting.strength,
            setting.steps,
            self.edits.prompts,
            guidance_scale=setting.guidance,
            eta=setting.eta,
        )

    def shares(self, images: torch.Tensor) -> dict[str, float]:
        """Return the shares of pictures with the digit, the colours and both right, see `judge_edits`."""
        verdicts = judge_edits(images, self.edits, *self.judges)
        return {name: hits.double().mean().item() for name, hits in verdicts.items()}


def run(arguments: Demo) -> int:
    """Run the demo and print what it found.

    Args:
        arguments: the command line's.

    Returns:
        0.
    """
    started = time.perf_counter()
    folder = arguments.output_dir
    pipeline, exam = load_tiny_sd(), Exam(world.draw_edits(arguments.eval_images, "test", 0))
    watch = Exam(world.draw_edits(min(WATCHED, arguments.eval_images), "validation", 0))
    print("asking the untrained pipeline, at every strength")
    images = {
        "untrained_best": untrained(pipeline, exam.edits, UNTRAINED_BEST),
        "before": exam.images(pipeline, POLICY),
    }
    curve = [
        {"strength": s, **watch.shares(untrained(pipeline, watch.edits, replace(UNTRAINED_BEST, strength=s)))}
        for s in STRENGTHS
    ]
    config = DDPOConfig(
        **{**SETTINGS, "num_epochs": arguments.epochs},
        seed=arguments.seed,
        output_dir=str(folder),
        overwrite=True,
    )
    path = [{"epoch": 0, **watch.shares(watch.images(pipeline, POLICY))}]
    trainer = ImageDDPOTrainer(
        config,
        recolouring(),
        edit_requests(arguments.seed),
        pipeline,
        _watch_now_and_then(pipeline, watch, path, arguments.epochs),
        noise_strength=POLICY.strength,
    )
    trainer.train()
    images["after"] = exam.images(pipeline, POLICY)
    trainer.save_pretrained(folder / "lora")
    results: dict[str, Any] = {name: exam.shares(pictures) for name, pictures in images.items()}
    results["untrained_best"] |= asdict(UNTRAINED_BEST)
    results["run"] = {**asdict(POLICY), **_made_with(trainer, len(exam.edits.prompts)), "path": path}
    results["run"]["seconds"] = round(time.perf_counter() - started, 1)
    _write_results(folder, results, curve, exam.edits, images)
    _print_results(folder, results)
    return 0


def _watch_now_and_then(
    pipeline: Any, watch: Exam, path: list[dict[str, float]], num_epochs: int
) -> Callable[[list[list[Any]], int, Any], None]:
    """Make a hook that appends the verdict on validation pictures to `path`."""
    epochs = itertools.count(1)

    def hook(batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        epoch = next(epochs)
        if epoch % WATCH_EVERY == 0 or epoch == num_epochs:
            path.append({"epoch": epoch, **watch.shares(watch.images(pipeline, POLICY))})

    return hook


def _made_with(trainer: ImageDDPOTrainer, num_pictures: int) -> dict[str, Any]:
    """Return what somebody needs who wants the same run."""
    config = trainer.config.to_dict()
    return {
        "seed": config["seed"],
        "pictures": num_pictures,
        "samples": trainer.epochs_done * trainer.plan.total_samples,
        "settings": {name: config[name] for name in SETTINGS},
        "torch": torch.__version__,
        "device": str(trainer.accelerator.device),
    }


def _write_results(
    folder: Path,
    results: dict[str, Any],
    curve: list[dict[str, float]],
    edits: world.Edits,
    images: dict[str, torch.Tensor],
) -> None:
    """Write results.json, before-after.png and dilemma.png."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    rows = {
        "goes in": edits.pictures.images,
        f"untrained, strength {POLICY.strength}": images["before"],
        "untrained, best setting": images["untrained_best"],
        "after RL": images["after"],
    }
    save_figure(plot_strip(rows, edits.prompts, SHOWN), folder / "before-after.png")
    curves = {f"untrained, guidance {UNTRAINED_BEST.guidance:g}": curve}
    save_figure(plot_dilemma(curves, {"RL": results["run"]["path"]}), folder / "dilemma.png")


def _print_results(folder: Path, results: dict[str, Any]) -> None:
    """Print the verdict and where things are."""
    best = results["untrained_best"]
    names = {
        "untrained_best": f"untrained, best: strength {best['strength']:g}, guidance {best['guidance']:g}",
        "before": f"untrained, as RL begins (strength {POLICY.strength:g})",
        "after": "after RL",
    }
    columns = {"digit": "digit kept", "colours": "colours", "both": "both", "second_judge": "second judge"}
    heading = f"Of {results['run']['pictures']} test pictures"
    print(f"\n  {heading:54}" + "".join(f"{title:>14}" for title in columns.values()))
    for key, name in names.items():
        print(f"  {name:54}" + "".join(f"{100 * results[key][column]:13.1f}%" for column in columns))
    print(f"{results['run']['seconds'] / 60:.1f} minutes altogether.\n")
    for name, what in (
        ("before-after.png", "what goes in, the sentence, and what came out"),
        ("dilemma.png", "digit kept against colours obeyed: turning the strength, and RL"),
        ("metrics.jsonl", "every optimizer step and epoch"),
        ("lora", "pipeline.load_lora_weights(...) in plain diffusers loads this"),
    ):
        print(f"  {folder / name}: {what}")
