"""Run `ddpo-lessons sample` after its flags are checked."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from PIL import Image, ImageOps
from tqdm.auto import tqdm

from ddpo_lessons.cli.options import Sample, check_output
from ddpo_lessons.data.folders import (
    LABEL,
    check_files,
    damage,
    find_captions,
    find_images,
    name_some,
    open_image,
)
from ddpo_lessons.data.prompts import from_file, read_prompts
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.flow import FlowSchedule
from ddpo_lessons.image import fit, image_grid, to_pil, to_tensor
from ddpo_lessons.models import family_of, image_size, load_pipeline
from ddpo_lessons.models.policy import loaded_dtype, read_lora
from ddpo_lessons.named_prompts import get_prompts
from ddpo_lessons.rollout import SamplingSettings, img2img_rollout, sample_seed, text2img_rollout
from ddpo_lessons.training.processes import make_autocast

NOISE_STRENGTH = 0.2  # ImageDDPOTrainer's default
COUNT = 4  # images where no number is asked for
GRID = "grid.png"
MOST_IN_GRID = 16
LARGEST = 4  # times the pixels of the model's own images: memory grows with them, attention's time squared


@dataclass(frozen=True)
class Job:
    """An image to generate: the name of its file, its prompt, and its input file, if any."""

    name: str
    prompt: str
    file: Path | None = None


def run(arguments: Sample) -> int:
    """Generate images and write each at once; return 0, or 130 after Ctrl-C."""
    policy, jobs = arguments.policy, choose_jobs(arguments)
    _check_outputs(arguments.output_dir, jobs, arguments.overwrite)
    files = [job.file for job in jobs if job.file is not None]
    check_files(files)
    pipeline = load_pipeline(policy.model, dtype=loaded_dtype(policy.settings))
    edits, size = takes_images(pipeline, arguments.noise_strength), _size(arguments)
    if size is not None:
        FromNoise(resolution=size[0]).check_resolution(family_of(pipeline))
    if arguments.keep_size:
        _check_sizes(files, image_size(pipeline), *family_of(pipeline).sides)
    if policy.lora is not None:
        read_lora(pipeline, policy.lora)
    pipeline.to(Accelerator().device)  # which reads ACCELERATE_USE_CPU, as training does
    if files and not edits:  # refuses a strength that cannot work
        family_of(pipeline).schedule(
            _settings(arguments).num_inference_steps, _strength(arguments), size=size
        )
    return _sample(arguments, pipeline, jobs)


def takes_images(pipeline: Any, noise_strength: float | None) -> bool:
    """Return whether a model edits images; raise a ValueError if a noise_strength is set for it."""
    edits = family_of(pipeline).takes_images
    if edits and noise_strength is not None:
        raise ValueError(
            f"--noise-strength {noise_strength}: a {type(pipeline).__name__} edits images, and starts from "
            "noise alone; leave it out"
        )
    return edits


# ----------------------------------------------------------------------------------------- what to make
def choose_jobs(arguments: Sample) -> list[Job]:
    """Return the images to generate, from the flags or from the training data of the policy.

    Those from images are named after them. A ValueError says that there is no image, two have the same name,
    or one lacks its caption.
    """
    if arguments.starts_from_images:
        return _jobs_from_images(arguments)
    count, source = arguments.count or COUNT, arguments.policy.record.get("prompts", {})
    if arguments.prompt is not None:
        prompts = [arguments.prompt] * count
    elif "prompt" in source:
        prompts = [source["prompt"]] * count
    else:
        if "file" in source:
            _say_if_some(arguments, "prompts", len(read_prompts(source["file"])))
        draw = (from_file if "file" in source else get_prompts)(
            source.get("file") or source["name"], arguments.seed
        )
        prompts = [draw()[0] for _ in range(count)]
    return [Job(f"sample-{number:03d}.png", prompt) for number, prompt in enumerate(prompts)]


def _say_if_some(arguments: Sample, things: str, there: int) -> None:
    """Print that only a part of the training data is used, if no count was given."""
    if arguments.count is None and there > COUNT:
        print(f"{COUNT} of the run's {there} {things}; --count {there} uses all of them", flush=True)


def _jobs_from_images(arguments: Sample) -> list[Job]:
    """Return a job for every given image, or for the first images of the training data."""
    found: list[tuple[Path, str, Sequence[str]]] = []  # file, name, caption
    for place in arguments.images or [Path(arguments.policy.record["images"]["folder"])]:
        if place.is_dir():
            images = find_images(place)
            pngs = [file.relative_to(place).with_suffix(".png").as_posix() for file in images.files]
            found.extend(zip(images.files, pngs, images.captions or ((),) * len(pngs), strict=True))
        else:
            check_files([place])
            captions = find_captions(place.parent, [place]) or [()]
            found.append((place, f"{place.stem}.png", captions[0]))
    if not arguments.images:
        _say_if_some(arguments, "images", len(found))
        found = found[: arguments.count or COUNT]
    jobs = [Job(name, _choose_prompt(arguments, file, lines), file) for file, name, lines in found]
    names: dict[str, Path | str] = {GRID: "the grid"}
    for job in jobs:
        if job.name in names:
            raise ValueError(f"{names[job.name]} and {job.file} would both become {job.name}: rename one")
        names[job.name] = str(job.file)
    return jobs


def _choose_prompt(arguments: Sample, file: Path, caption: Sequence[str]) -> str:
    """Return the prompt of the flag, of training, or the first line of the caption."""
    source = arguments.policy.record.get("prompts", {})
    if arguments.prompt is not None or "prompt" in source:
        prompt = source["prompt"] if arguments.prompt is None else arguments.prompt
        return prompt.replace(LABEL, file.parent.name)
    if "captions" in source and not caption:
        raise ValueError(
            f"the policy was trained on captions, and {file} has none: write it into {file.stem}.txt beside "
            "it, or give --prompt"
        )
    return caption[0] if caption else ""


# ------------------------------------------------------------------------------------------- checks
def _check_outputs(folder: Path, jobs: Sequence[Job], overwrite: bool) -> None:
    """Raise an error before writing among existing files, or over an input."""
    inputs = {job.file.resolve() for job in jobs if job.file is not None}
    for job in jobs:
        if (folder / job.name).resolve() in inputs:
            raise ValueError(f"{folder / job.name} is an input: choose another --output-dir")
    check_output(folder)
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(
            f"--output-dir {folder} holds files already: choose another one, or give --overwrite to replace "
            "those of the same name"
        )


def _check_sizes(files: Sequence[Path], size: int, factor: int, longest: float) -> None:
    """Raise an error that names all images of sizes that the model cannot take, or that take too long."""
    wrong = []
    for file in files:
        with Image.open(file) as image:
            width, height = image.size
        too_large = width * height > LARGEST * size**2 or max(width, height) > longest
        if too_large or width % factor or height % factor:
            wrong.append(f"{file} ({width} x {height})")
    if wrong:
        side = "" if longest == float("inf") else f", up to {longest:g},"
        most = LARGEST * size**2
        raise ValueError(
            f"--keep-size takes sides that are multiples of {factor}{side} and at most {most} pixels, "
            f"{LARGEST} times the model's own {size} x {size}: resize {name_some(wrong)}, "
            "or leave out --keep-size"
        )


# ------------------------------------------------------------------------------------------ sampling
def _sample(arguments: Sample, pipeline: Any, jobs: Sequence[Job]) -> int:
    """Generate and write one batch after the other; after Ctrl-C all written images are complete."""
    folder, shown = arguments.output_dir, []
    family, settings = family_of(pipeline), _settings(arguments)  # a family remembers embeddings
    square = _size(arguments)
    if isinstance(family.schedule(settings.num_inference_steps, size=square), FlowSchedule):
        settings = replace(settings, eta=0.0)  # plain diffusers follows the ODE: noise is for training only
    folder.mkdir(parents=True, exist_ok=True)
    size, done = 1 if arguments.keep_size else arguments.batch_size, 0  # sizes may differ
    side = image_size(pipeline) if square is None else square[0]
    low = loaded_dtype(arguments.policy.settings) == torch.bfloat16  # then as in training, LoRA in float32
    autocast = make_autocast("bf16" if low else "no", family.denoiser.device)
    try:
        for first in tqdm(range(0, len(jobs), size), desc="sampling", disable=None):
            numbers = range(first, min(first + size, len(jobs)))
            batch = [jobs[number] for number in numbers]
            inputs = [_load(arguments, side, n, jobs[n]) for n in numbers]
            seeds = [sample_seed(arguments.seed, number) for number in numbers]
            noise = [torch.Generator().manual_seed(seed) for seed in seeds]
            prompts, given = [job.prompt for job in batch], [image for image in inputs if image is not None]
            with autocast():
                if given and not family.takes_images:
                    strength = _strength(arguments)
                    made, _ = img2img_rollout(
                        family, prompts, torch.stack(given), strength, settings, generator=noise
                    )
                else:
                    images = torch.stack(given) if given else None
                    made, _ = text2img_rollout(
                        family, prompts, settings, generator=noise, size=square, images=images
                    )
            for job, image, start in zip(batch, made.cpu(), inputs, strict=True):
                _write(folder / job.name, to_pil(image))
                tqdm.write(str(folder / job.name))
                done += 1
                if done <= MOST_IN_GRID:
                    shown.append([image] if start is None else [start, image])
    except KeyboardInterrupt:
        tqdm.write(f"stopped: {done} of {len(jobs)} images are in {folder}")
        return 130
    _write(folder / GRID, _grid(shown))
    part = f", of the first {len(shown)} of {done} images" if len(shown) < done else ""
    print(f"{folder / GRID}{': each input, and on its right the result' if len(shown[0]) == 2 else ''}{part}")
    return 0


def _settings(arguments: Sample) -> SamplingSettings:
    """Return the settings of a rollout, from the flags or from training."""
    scale, trained = arguments.guidance_scale, arguments.policy.settings
    return SamplingSettings(
        num_inference_steps=arguments.steps or trained.sample_num_steps,
        guidance_scale=trained.sample_guidance_scale if scale is None else scale,
        eta=trained.sample_eta,
        negative_prompt=trained.negative_prompts,
    )


def _size(arguments: Sample) -> tuple[int, int] | None:
    """Return (H, W) in pixels from flags or training; None for the size of the model or of each image."""
    side = arguments.resolution or arguments.policy.record.get("resolution")
    return None if side is None or arguments.keep_size else (side, side)


def _strength(arguments: Sample) -> float:
    given = arguments.noise_strength
    return arguments.policy.record.get("noise_strength", NOISE_STRENGTH) if given is None else given


def _load(arguments: Sample, size: int, number: int, job: Job) -> torch.Tensor | None:
    """Return the input image (3, H, W) of a job; images of the run get the run's damage."""
    if job.file is None:
        return None
    image = open_image(job.file)
    pixels = to_tensor(image) if arguments.keep_size else fit(image, size)
    trained_on = {} if arguments.images else arguments.policy.record["images"]
    if trained_on.get("damages"):
        chooser = random.Random(f"{arguments.seed}-{number}")
        name, severity = chooser.choice(trained_on["damages"]), chooser.choice(trained_on["severities"])
        pixels = damage(pixels, name, severity, torch.Generator().manual_seed(chooser.getrandbits(62)))
    return pixels


def _write(path: Path, image: Image.Image) -> None:
    """Write an image in one step, so that no incomplete file is ever visible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    image.save(aside, format="PNG")
    aside.replace(path)


def _grid(rows: Sequence[Sequence[torch.Tensor]]) -> Image.Image:
    """Make a grid of images, each beside its input if there is one, padded with white."""
    tiles = [tile for row in rows for tile in row]
    box = (max(tile.shape[2] for tile in tiles), max(tile.shape[1] for tile in tiles))
    columns = 2 if len(rows[0]) == 2 and len(rows) <= COUNT else min(4, len(tiles))
    padded = [to_tensor(ImageOps.pad(to_pil(tile), box, color="white")) for tile in tiles]
    return image_grid(torch.stack(padded), columns=columns)
