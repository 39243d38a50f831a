"""`ddpo-lessons demo`: train an img2img model by RL to find an animal in confetti, in minutes on a CPU.

The input image shows an animal on confetti, and the prompt names a background but neither animal nor artist.
A correct edit shows the same animal, by the same artist, on the plain background. At low noise strength the
untrained pipeline keeps the confetti, and at high strength it loses the animal. RL uses only a reward, which
depends on animal, artist and the mask of the background. Two of the three denoising steps are actions.
Branching gives each action its own advantage (`algorithms/branching.py`), and DDPO gives all of them the
same. Two held-out evaluators, which are not used in training, classify images from before and after, which
plain diffusers generates from the same noise. The schedules come from benchmarks/zoo/edit_search.py
and edit_views.py, and benchmarks/NOTES.md describes how the task was chosen and what did not work.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
from diffusers.utils import logging

from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.cli.options import Demo
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.lessons.plotting import GAP, draw_row, plot_dilemma
from ddpo_lessons.models import family_of
from ddpo_lessons.named_prompts import hidden_animals
from ddpo_lessons.rewards import AveragedOverViews, RewardFunction, animal_alignment
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.worlds import animals, load_tiny_zoo
from ddpo_lessons.worlds.animals import judge_edits

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Img2Img:
    """Sampling settings of img2img: noise strength, guidance scale, steps of the schedule, and DDIM's η."""

    strength: float
    guidance: float
    steps: int
    eta: float = 1.0


POLICY = Img2Img(0.45, 1.0, 12)  # lesson 07's: runs five steps, and all but the last are actions
FAST_POLICY = Img2Img(0.4, 1.0, 8)  # the demo's: runs three steps, so it has two actions
# The most accurate settings of the untrained pipeline in a grid of all four: benchmarks/zoo/edit_grid.csv.
UNTRAINED_BEST = Img2Img(0.75, 1.0, 8)
STRENGTHS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)  # of the untrained curve in the figure
# Attention, as other trainers have it, and also feed-forward layers and convolutions.
EVERYWHERE = (
    *("to_k", "to_q", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
    *("conv1", "conv2", "conv_in", "conv_out"),
)
SETTINGS: dict[str, Any] = {
    "sample_num_steps": POLICY.steps,
    "sample_guidance_scale": POLICY.guidance,
    "sample_num_batches_per_epoch": 1,
    "sample_group_size": 8,
    # Other trainers' 3e-4 and 1e-4 hardly change a model this small.
    "train_learning_rate": 1e-3,
    "train_learning_rate_schedule": "cosine",
    "train_clip_range": 5e-3,
    "train_lora_rank": 16,
    "train_lora_alpha": 16,
    "train_lora_target_modules": EVERYWHERE,
    "save_freq": 32,
    "image_grid_freq": 0,
}
# Small epochs of one optimizer step each, because the number of steps matters more than the number of images.
# Both algorithms had the same trials: benchmarks/zoo/edit_search.csv and edit_views.csv.
SMALL_EPOCHS: dict[str, Any] = {
    "num_epochs": 187,  # 5,984 reward evaluations
    "sample_batch_size": 32,
    "train_batch_size": 32,
    "sample_num_steps": FAST_POLICY.steps,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "branching": SMALL_EPOCHS,
    "ddpo": {**SMALL_EPOCHS, "train_adam_beta2": 0.99},
}
BACKGROUND_WEIGHT = 16.0  # in the reward, in nats for a distance of 1
# Seeds of `animals.draw_edits`. Training uses other ones, of 62 bits.
TEST, VALIDATION = 0, 1
WATCHED = 100  # number of validation images
WATCH_EVERY = 16  # epochs
SHOWN = 8  # number of test images in before-after.png
BEFORE_AFTER: dict[str, Any] = {"dpi": 320, "bbox_inches": "tight", "pad_inches": 0.08}  # how it is saved


def make_reward() -> RewardFunction:
    """Return the demo's reward: `animal_alignment`, whose classifier sees each image in six views."""
    return animal_alignment(AveragedOverViews(animals.RewardModel.load()), BACKGROUND_WEIGHT)


def img2img(
    pipeline: Any, images: torch.Tensor, prompts: Sequence[str], setting: Img2Img, first_seed: int = 0
) -> torch.Tensor:
    """Edit images (N, 3, H, W) in [0, 1] by N prompts with plain diffusers; return the results on the CPU.

    The noise of image n has the seed `first_seed + n`, so that it is the same in every call.
    """
    plain = diffusers.StableDiffusionImg2ImgPipeline(**pipeline.components, requires_safety_checker=False)
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


class Evaluation:
    """Evaluate a pipeline's edits with the held-out evaluators, always from the same noise."""

    def __init__(self, edits: animals.Edits) -> None:
        self.edits = edits
        self.judges = animals.Judge.load(), animals.SecondJudge.load()

    def fractions(self, images: torch.Tensor) -> dict[str, float]:
        """Return the fractions of correct images, by the keys of `judge_edits`."""
        return {name: hits.double().mean().item() for name, hits in self.hits(images).items()}

    def hits(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return which images are correct, (N,), by the keys of `judge_edits`."""
        return judge_edits(images, self.edits, *self.judges)

    def images(self, pipeline: Any, setting: Img2Img, first_seed: int = 0) -> torch.Tensor:
        """Edit the input images with plain diffusers: (N, 3, 64, 64)."""
        return img2img(pipeline, self.edits.images, self.edits.prompts, setting, first_seed)

    def measure(self, pipeline: Any, setting: Img2Img) -> dict[str, float]:
        """Edit the input images, and return the fractions of correct ones."""
        return self.fractions(self.images(pipeline, setting))


def run(arguments: Demo) -> int:
    """Run the demo and print its results; return 0, or 128 plus the number of the signal that stopped it."""
    started = time.perf_counter()
    folder, count = arguments.output_dir, arguments.eval_images
    pipeline, test = load_tiny_zoo(), Evaluation(animals.draw_edits(count, TEST))
    unseen_animals = Evaluation(animals.draw_edits(count, TEST, animals.NEW_ANIMALS))
    watch = Evaluation(animals.draw_edits(min(WATCHED, count), VALIDATION))
    best, before, best_unseen, before_unseen, watched, *turned = _generate(
        "evaluating the untrained pipeline at each noise strength",
        pipeline,
        *itertools.product((test, unseen_animals), (UNTRAINED_BEST, FAST_POLICY)),
        (watch, FAST_POLICY),
        *((watch, replace(UNTRAINED_BEST, strength=strength)) for strength in STRENGTHS),
    )
    images = {"untrained_best": best, "before": before}
    unseen = {
        "untrained_best": unseen_animals.fractions(best_unseen),
        "before": unseen_animals.fractions(before_unseen),
    }
    curve = [{"strength": s, **watch.fractions(made)} for s, made in zip(STRENGTHS, turned, strict=True)]
    path = [{"epoch": 0, **watch.fractions(watched)}]
    settings = {**SETTINGS, **SCHEDULES[arguments.algorithm]}
    if arguments.epochs is not None:
        settings["num_epochs"] = arguments.epochs
    config = DDPOConfig(**settings, seed=arguments.seed, output_dir=str(folder), overwrite=True)
    trainer = Trainer(
        config,
        make_reward(),
        hidden_animals(arguments.seed),
        pipeline,
        _watch_now_and_then(pipeline, watch, path, config.num_epochs),
        algorithm=make_algorithm(arguments.algorithm),
        start=FromImages(FAST_POLICY.strength),
    )
    trainer.train()
    if trainer.stopped_by is not None:
        print(f"stopped after epoch {trainer.epochs_done} of {config.num_epochs}, without an evaluation")
        return 128 + trainer.stopped_by
    images["after"], made = _generate(
        "evaluating the trained pipeline", pipeline, (test, FAST_POLICY), (unseen_animals, FAST_POLICY)
    )
    unseen["after"] = unseen_animals.fractions(made)
    trainer.save_pretrained(folder / "lora")
    schedule = family_of(pipeline).schedule(FAST_POLICY.steps, FAST_POLICY.strength)
    results: dict[str, Any] = {"steps": FAST_POLICY.steps, "actions": int((schedule.stds > 0).sum())}
    results |= {name: test.fractions(made) for name, made in images.items()}
    results["untrained_best"] |= asdict(UNTRAINED_BEST)
    results["new_animals"] = unseen
    results["run"] = {**asdict(FAST_POLICY), **_made_with(trainer, arguments), "path": path}
    results["run"]["seconds"] = round(time.perf_counter() - started, 1)
    _write_results(folder, results, curve, test, images)
    _print_results(folder, results)
    return 0


def _generate(text: str, pipeline: Any, *tasks: tuple[Evaluation, Img2Img]) -> list[torch.Tensor]:
    """Edit the images of each evaluation with its settings; a terminal shows a progress bar."""
    print(text, flush=True)  # a log file has only this line, and has it at once
    made, total = [], sum(len(evaluation.edits.prompts) for evaluation, _ in tasks)
    with logging.tqdm(total=total, desc="images", leave=False, disable=None) as bar:
        for evaluation, setting in tasks:
            made.append(evaluation.images(pipeline, setting))
            bar.update(len(made[-1]))
    return made


def _watch_now_and_then(
    pipeline: Any, watch: Evaluation, path: list[dict[str, float]], num_epochs: int
) -> Callable[[list[list[Any]], int, Any], None]:
    """Make a hook that evaluates validation images, and appends the fractions to `path`."""
    epochs = itertools.count(1)

    def hook(batches: list[list[Any]], global_step: int, tracker: Any) -> None:
        epoch = next(epochs)
        if epoch % WATCH_EVERY == 0 or epoch == num_epochs:
            path.append({"epoch": epoch, **watch.measure(pipeline, FAST_POLICY)})

    return hook


def _made_with(trainer: Trainer, arguments: Demo) -> dict[str, Any]:
    """Return what is needed to repeat the run."""
    config = trainer.config.to_dict()
    return {
        "algorithm": arguments.algorithm,
        "seed": config["seed"],
        "eval_images": arguments.eval_images,
        "samples": trainer.epochs_done * trainer.plan.total_samples,
        "settings": {name: config[name] for name in (*SETTINGS, *SCHEDULES[arguments.algorithm])},
        "torch": torch.__version__,
        "device": str(trainer.accelerator.device),
    }


def before_after(evaluation: Evaluation, images: dict[str, torch.Tensor]) -> Figure:
    """Show the first images: the inputs, the untrained results at their best settings, and after RL.

    Prompts differ in one word, their color, which stands below the input image. A check mark stands on each
    correct image. Letters have 11 pixels if the figure is 400 pixels wide.
    """
    from matplotlib.figure import Figure

    edits, names = evaluation.edits, {"untrained_best": "untrained, best settings", "after": "after RL"}
    count = min(SHOWN, len(edits.prompts))
    side = 5 / SHOWN  # of an image and the gap beside it, as all lengths in inches
    title, colors, gap = 0.2, 0.2, 0.03  # heights: a row's name, the words, between rows
    height = (1 + len(names)) * (title + side) + colors + len(names) * gap
    figure = Figure(figsize=(SHOWN * side, height), facecolor="white")
    figure.set_layout_engine("none")
    bottom, look = height - title - side + GAP, {"size": 11}
    words = [prompt.split()[-2] for prompt in edits.prompts]
    name = 'input; prompt: "an animal on a … background"'
    draw_row(figure, edits.images[:count], name, 0, bottom, side, below=words, **look)
    bottom -= colors
    for key, name in names.items():
        bottom -= gap + title + side
        correct = evaluation.hits(images[key])["all"][:count].tolist()
        name = f"{name}: {sum(correct)} of {count} correct"
        draw_row(figure, images[key][:count], name, 0, bottom, side, **look)
        for axis in itertools.compress(figure.axes[-count:], correct):
            mark: dict[str, Any] = {"transform": axis.transAxes, "markeredgecolor": "white", "clip_on": False}
            axis.plot(0.84, 0.16, "o", markersize=11, markerfacecolor="#1a7f37", **mark)
            x, y = (0.78, 0.825, 0.905), (0.16, 0.11, 0.215)
            axis.plot(x, y, color="white", linewidth=1.5, transform=axis.transAxes)
    return figure


def _write_results(
    folder: Path,
    results: dict[str, Any],
    curve: list[dict[str, float]],
    evaluation: Evaluation,
    images: dict[str, torch.Tensor],
) -> None:
    """Write results.json, before-after.png and dilemma.png."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    before_after(evaluation, images).savefig(folder / "before-after.png", **BEFORE_AFTER)
    curves = {f"untrained, guidance {UNTRAINED_BEST.guidance:g}": curve}
    figure = plot_dilemma(curves, {"RL": results["run"]["path"]}, correct="background", kept="animal")
    figure.savefig(folder / "dilemma.png", dpi=150)


def _print_results(folder: Path, results: dict[str, Any]) -> None:
    """Print the fractions of correct images, and the paths of the files."""
    best = results["untrained_best"]
    names = {
        "untrained_best": "untrained, best settings",
        "before": "untrained, RL's settings",
        "after": "after RL",
    }
    columns = {"animal": "animal", "artist": "artist", "background": "background", "all": "all three"}
    columns |= {"second_judge": "2nd evaluator"}
    for heading, rows in (
        (f"{results['run']['eval_images']} test images", results),
        ("as many of new animals", results["new_animals"]),
    ):
        print(f"\n  {heading:24}" + "".join(f"{title:>{len(title) + 2}}" for title in columns.values()))
        for key, name in names.items():
            cells = (f"{100 * rows[key][column]:{len(title) + 1}.1f}%" for column, title in columns.items())
            print(f"  {name:24}" + "".join(cells))
    print("\n  The fractions are of correct images. RL has not seen the new animals.")
    print(
        f"  Best settings: strength {best['strength']:g}, guidance {best['guidance']:g}. "
        f"RL's settings: strength {FAST_POLICY.strength:g}."
    )
    print(f"{results['run']['seconds'] / 60:.1f} minutes in total.\n")
    for name, what in (
        ("before-after.png", "input images, prompts and results"),
        (
            "dilemma.png",
            "animals kept and backgrounds correct, without RL and with it",
        ),
        ("metrics.jsonl", "records of every optimizer step and epoch"),
        ("lora", "load it in plain diffusers with pipeline.load_lora_weights(...)"),
    ):
        print(f"  {folder / name}: {what}")
