"""`ddpo-lessons demo`: img2img RL learns to find an animal in confetti, in minutes on a CPU.

An animal stands before confetti; a sentence names a ground, and neither animal nor artist. Done right, the
picture shows the same animal, by the same artist, on that ground and nothing else. At low noise strength
the untrained pipeline keeps the confetti, at high strength it loses the animal. RL is told nothing but a
score, which knows animal, artist and where the ground is. Of its five denoising steps four are actions, and
each has credit of its own (`algorithms/branching.py`). Two judges, which give training neither reward nor
gradient, look at pictures of before and after, from the same noise, drawn by plain diffusers.
benchmarks/NOTES.md tells how task and settings were found, and what did not work.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionImg2ImgPipeline
from diffusers.utils import logging

from ddpo_lessons.algorithms.branching import Branching
from ddpo_lessons.cli.options import Demo
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.lessons.plotting import plot_dilemma, plot_strip
from ddpo_lessons.models import family_of
from ddpo_lessons.named_prompts import hidden_animals
from ddpo_lessons.rewards import animal_alignment
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.processes import loading_bars
from ddpo_lessons.worlds import animals, load_tiny_zoo
from ddpo_lessons.worlds.animals import judge_edits


@dataclass(frozen=True)
class Img2Img:
    """What a user of img2img can turn: strength, guidance, steps of the whole schedule, and η of DDIM."""

    strength: float
    guidance: float
    steps: int
    eta: float = 1.0


POLICY = Img2Img(0.45, 1.0, 12)  # five steps are run, and all but the last are actions
# The most done right by the untrained pipeline, of a grid of all four: benchmarks/zoo/edit_grid.csv.
UNTRAINED_BEST = Img2Img(0.75, 1.0, 8)
STRENGTHS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)  # of the curve that the figure shows
# Attention, which is all that the peers adapt, and feed-forward layers and convolutions too.
EVERYWHERE = (
    *("to_k", "to_q", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
    *("conv1", "conv2", "conv_in", "conv_out"),
)
SETTINGS: dict[str, Any] = {
    "num_epochs": 34,
    "sample_num_steps": POLICY.steps,
    "sample_guidance_scale": POLICY.guidance,
    "sample_batch_size": 128,
    "sample_num_batches_per_epoch": 8,
    "sample_group_size": 8,  # branches of a picture's path: they part at one step, which explains the rewards
    "train_batch_size": 512,  # two optimizer steps an epoch
    "train_micro_batch_size": 512,  # each in one pass, so that a group's shared state is predicted once
    # The peers' 3e-4 and 1e-4 hardly move a model this small.
    "train_learning_rate": 1e-3,
    "train_learning_rate_schedule": "cosine",
    "train_clip_range": 5e-3,
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
    "train_lora_target_modules": EVERYWHERE,
    "save_freq": 17,
    "image_grid_freq": 0,
}
GROUND_WEIGHT = 16.0  # of the score, in nats for a distance of 1
# Seeds of `animals.draw_edits`: pictures that training does not draw, as its own have seeds of 62 bits.
TEST, VALIDATION = 0, 1
WATCHED = 100  # pictures of validation, looked at every so many epochs:
WATCH_EVERY = 4
SHOWN = 8  # pictures in the strip, the first of the test


def img2img(
    pipeline: Any, images: torch.Tensor, prompts: Sequence[str], setting: Img2Img, first_seed: int = 0
) -> torch.Tensor:
    """Edit images as a user of plain diffusers would; picture n has noise of its own, always the same.

    Images (N, 3, H, W) in [0, 1] with N prompts become as many, on the CPU. Picture n's noise has the n-th
    seed after `first_seed`.
    """
    plain = StableDiffusionImg2ImgPipeline(**pipeline.components, requires_safety_checker=False)
    plain.set_progress_bar_config(disable=True)
    out = []
    for numbers in torch.arange(len(prompts)).split(25):
        edited = plain(
            prompt=[prompts[n] for n in numbers],
            image=images[numbers],
            strength=setting.strength,
            guidance_scale=setting.guidance,
            num_inference_steps=setting.steps,
            eta=setting.eta,
            generator=[torch.Generator().manual_seed(first_seed + int(n)) for n in numbers],
            output_type="pt",
        )
        out.append(edited.images.float().cpu())
    return torch.cat(out)


class Exam:
    """The judges' verdict on what a pipeline makes of pictures and sentences, always from the same noise."""

    def __init__(self, edits: animals.Edits) -> None:
        self.edits = edits
        self.judges = animals.Judge.load(), animals.SecondJudge.load()

    def shares(self, images: torch.Tensor) -> dict[str, float]:
        """Return the shares of pictures with animal, artist, ground and all right, see `judge_edits`."""
        right = judge_edits(images, self.edits, *self.judges)
        return {name: hits.double().mean().item() for name, hits in right.items()}

    def images(self, pipeline: Any, setting: Img2Img, first_seed: int = 0) -> torch.Tensor:
        """Return what plain diffusers makes of the pictures, (N, 3, 64, 64)."""
        return img2img(pipeline, self.edits.images, self.edits.prompts, setting, first_seed)

    def measure(self, pipeline: Any, setting: Img2Img) -> dict[str, float]:
        """Return the shares of what a pipeline makes of the pictures."""
        return self.shares(self.images(pipeline, setting))


def run(arguments: Demo) -> int:
    """Run the demo and print what it found; return 0, or 128 and the number of the signal that stopped it."""
    started = time.perf_counter()
    folder, count = arguments.output_dir, arguments.eval_images
    with loading_bars():
        pipeline, exam = load_tiny_zoo(), Exam(animals.draw_edits(count, TEST))
    strangers = Exam(animals.draw_edits(count, TEST, animals.NEW_ANIMALS))
    watch = Exam(animals.draw_edits(min(WATCHED, count), VALIDATION))
    best, before, best_unseen, before_unseen, watched, *turned = _ask(
        "asking the untrained pipeline, at every strength",
        pipeline,
        *itertools.product((exam, strangers), (UNTRAINED_BEST, POLICY)),
        (watch, POLICY),
        *((watch, replace(UNTRAINED_BEST, strength=strength)) for strength in STRENGTHS),
    )
    images = {"untrained_best": best, "before": before}
    unseen = {"untrained_best": strangers.shares(best_unseen), "before": strangers.shares(before_unseen)}
    curve = [{"strength": s, **watch.shares(made)} for s, made in zip(STRENGTHS, turned, strict=True)]
    path = [{"epoch": 0, **watch.shares(watched)}]
    config = DDPOConfig(
        **{**SETTINGS, "num_epochs": arguments.epochs},
        seed=arguments.seed,
        output_dir=str(folder),
        overwrite=True,
    )
    trainer = Trainer(
        config,
        animal_alignment(ground_weight=GROUND_WEIGHT),
        hidden_animals(arguments.seed),
        pipeline,
        _watch_now_and_then(pipeline, watch, path, arguments.epochs),
        algorithm=Branching(),
        start=FromImages(POLICY.strength),
    )
    trainer.train()
    if trainer.stopped_by is not None:
        print(f"stopped after epoch {trainer.epochs_done} of {config.num_epochs}: without a verdict")
        return 128 + trainer.stopped_by
    images["after"], made = _ask("asking what was trained", pipeline, (exam, POLICY), (strangers, POLICY))
    unseen["after"] = strangers.shares(made)
    trainer.save_pretrained(folder / "lora")
    schedule = family_of(pipeline).schedule(POLICY.steps, POLICY.strength)
    results: dict[str, Any] = {"steps": POLICY.steps, "actions": int((schedule.stds > 0).sum())}
    results |= {name: exam.shares(pictures) for name, pictures in images.items()}
    results["untrained_best"] |= asdict(UNTRAINED_BEST)
    results["new_animals"] = unseen
    results["run"] = {**asdict(POLICY), **_made_with(trainer, count), "path": path}
    results["run"]["seconds"] = round(time.perf_counter() - started, 1)
    _write_results(folder, results, curve, exam.edits, images)
    _print_results(folder, results)
    return 0


def _ask(text: str, pipeline: Any, *asked: tuple[Exam, Img2Img]) -> list[torch.Tensor]:
    """Return what a pipeline makes of each exam's pictures; a terminal sees how many are done."""
    print(text, flush=True)  # a log has this line alone, and at once
    made, total = [], sum(len(exam.edits.prompts) for exam, _ in asked)
    with logging.tqdm(total=total, desc="pictures", leave=False, disable=None) as bar:
        for exam, setting in asked:
            made.append(exam.images(pipeline, setting))
            bar.update(len(made[-1]))
    return made


def _watch_now_and_then(
    pipeline: Any, watch: Exam, path: list[dict[str, float]], num_epochs: int
) -> Callable[[list[list[Any]], int, Any], None]:
    """Make a hook that appends the verdict on validation pictures to `path`."""
    epochs = itertools.count(1)

    def hook(batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        epoch = next(epochs)
        if epoch % WATCH_EVERY == 0 or epoch == num_epochs:
            path.append({"epoch": epoch, **watch.measure(pipeline, POLICY)})

    return hook


def _made_with(trainer: Trainer, num_pictures: int) -> dict[str, Any]:
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
    edits: animals.Edits,
    images: dict[str, torch.Tensor],
) -> None:
    """Write results.json, before-after.png and dilemma.png."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    rows = {
        "goes in": edits.images,
        f"untrained, strength {POLICY.strength}": images["before"],
        "untrained, best setting": images["untrained_best"],
        "after RL": images["after"],
    }
    plot_strip(rows, edits.prompts, SHOWN).savefig(folder / "before-after.png", dpi=150)
    curves = {f"untrained, guidance {UNTRAINED_BEST.guidance:g}": curve}
    figure = plot_dilemma(curves, {"RL": results["run"]["path"]}, obeyed="ground", kept="animal")
    figure.savefig(folder / "dilemma.png", dpi=150)


def _print_results(folder: Path, results: dict[str, Any]) -> None:
    """Print the verdict and where things are."""
    best = results["untrained_best"]
    names = {
        "untrained_best": f"untrained, best: strength {best['strength']:g}, guidance {best['guidance']:g}",
        "before": f"untrained, as RL begins (strength {POLICY.strength:g})",
        "after": "after RL",
    }
    columns = ("animal", "artist", "ground", "all", "second_judge")
    for heading, rows in (
        (f"Of {results['run']['pictures']} test pictures", results),
        ("Of as many pictures of animals that RL never saw", results["new_animals"]),
    ):
        print(f"\n  {heading:54}" + "".join(f"{title.replace('_', ' '):>14}" for title in columns))
        for key, name in names.items():
            print(f"  {name:54}" + "".join(f"{100 * rows[key][column]:13.1f}%" for column in columns))
    print(f"{results['run']['seconds'] / 60:.1f} minutes altogether.\n")
    for name, what in (
        ("before-after.png", "what goes in, the sentence, and what came out"),
        ("dilemma.png", "animal kept against ground obeyed: turning the strength, and RL"),
        ("metrics.jsonl", "every optimizer step and epoch"),
        ("lora", "pipeline.load_lora_weights(...) in plain diffusers loads this"),
    ):
        print(f"  {folder / name}: {what}")
