"""`ddpo-lessons demo · train · sample · doctor`.

Modules are imported by the command that needs them: `doctor` must run where torch does not even load.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import json
import os
import shlex
import sys
import textwrap
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

if TYPE_CHECKING:
    import torch
    from diffusers import StableDiffusionPipeline
    from PIL import Image

    from ddpo_lessons.app.presets import Preset
    from ddpo_lessons.config import DDPOConfig
    from ddpo_lessons.data.folders import ImageFolder
    from ddpo_lessons.trainer import ImageDDPOTrainer, Runner

NOISE_STRENGTH = 0.2  # ImageDDPOTrainer's default


class Command(NamedTuple):
    """A subcommand: what it does in a line, its flags, and what it runs."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are exceptions, so that `main` prints every error in the same way."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the words after the program's name; those of the process if not given.

    Returns:
        The exit status: 2 after an error, which is printed in one line.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    # At import, transformers warns of image processors without torchvision, which nothing here uses.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        arguments = _make_parser(argv).parse_args(argv)
        return COMMANDS[arguments.command].run(arguments)
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # as shells count


def _make_parser(argv: list[str]) -> argparse.ArgumentParser:
    """Make the parser, with the flags of that command only which `argv` names."""
    from ddpo_lessons import __version__

    parser = _Parser(prog="ddpo-lessons", description="Reinforcement learning of diffusion models.")
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name, help=command.summary, description=command.summary, allow_abbrev=False
        )
        if argv[:1] == [name]:
            command.add_arguments(subparser)
    return parser


# ------------------------------------------------------------------------------- flags of DDPOConfig
def field_docs(kind: type) -> dict[str, str]:
    """Read the docstrings under the fields of a dataclass from its source."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    docs = {}
    for field, doc in itertools.pairwise(definition.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(doc, ast.Expr)
            and isinstance(doc.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(doc.value.value).split())
    return docs


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not an object such as {{"key": 1}}')
    return value


def _comma_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _severities(text: str) -> tuple[int, ...]:
    parts = _comma_list(text)
    if not parts or not set(parts) <= set("12345"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list such as 1,3,5 of numbers from 1 to 5")
    return tuple(map(int, parts))


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _flag_of_type(hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a field of that type."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if hint in (int, float):
        return {"type": hint, "metavar": "N" if hint is int else "X"}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return {"type": _comma_list, "metavar": "A,B,..."}
    if typing.get_origin(hint) is dict:
        return {"type": _json_object, "metavar": "JSON"}
    return {"type": str, "metavar": "TEXT"}


def _show(default: Any) -> str:
    if default is None:
        return ""
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, dict):
        return json.dumps(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of `DDPOConfig`; only those that are given get into the namespace."""
    from ddpo_lessons.config import DDPOConfig

    group = parser.add_argument_group("settings (fields of DDPOConfig, in parentheses its defaults)")
    docs, hints, defaults = field_docs(DDPOConfig), typing.get_type_hints(DDPOConfig), DDPOConfig()
    for field in dataclasses.fields(DDPOConfig):
        shown = _show(getattr(defaults, field.name))
        text = docs[field.name] + (f" ({shown})" if shown else "")
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_flag_of_type(hints[field.name]),
        )


# --------------------------------------------------------------------------------------------- train
def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    from ddpo_lessons.app.presets import GPU_MEMORY, PRESETS
    from ddpo_lessons.data.prompts import PROMPTS
    from ddpo_lessons.rewards import REWARDS
    from ddpo_lessons.tiny.world import DAMAGES

    parser.epilog = "On several devices: accelerate launch -m ddpo_lessons.app.cli train ..."
    parser.add_argument("--model", help="folder or name on the hub (tiny-sd, which is in the package)")
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        help="named settings, which every other flag overrides (digit_world for tiny-sd)",
    )
    parser.add_argument("--reward", metavar="NAME", help=", ".join(REWARDS))
    parser.add_argument("--prompts", metavar="NAME", help=f"{', '.join(PROMPTS)}; or a file, a prompt a line")
    parser.add_argument("--prompt", metavar="TEXT", help="one prompt for everything")
    parser.add_argument(
        "--images",
        metavar="FOLDER",
        type=Path,
        help="img2img on the image files in it, or in its subfolders, whose names are the labels; NAME.txt "
        "beside NAME.png holds the prompt to obey, or several, one a line",
    )
    parser.add_argument(
        "--noise-strength",
        type=float,
        metavar="X",
        help=f"with --images: share of the schedule that is run (the preset's, or {NOISE_STRENGTH})",
    )
    parser.add_argument(
        "--damage",
        type=_comma_list,
        metavar="A,B,...",
        help=f"with --images: damage to clean images, one for each: {', '.join(DAMAGES)} (the preset's)",
    )
    parser.add_argument(
        "--severity", type=_severities, metavar="N,N,...", help="of the damage, 1 to 5 (1,2,3,4,5)"
    )
    parser.add_argument(
        "--gpu-memory",
        type=int,
        choices=GPU_MEMORY,
        help="GB of each GPU: cuts batches to what fits; samples per epoch and optimizer step stay the same",
    )
    add_config_flags(parser)


def _train(arguments: argparse.Namespace) -> int:
    preset = _choose_preset(arguments)
    _check_train_arguments(arguments, preset)
    images = _find_images(arguments)
    trainer = _make_trainer(arguments, preset, images)
    trainer.train()
    folder = trainer.config.run_dir / ("lora" if trainer.use_lora else "pipeline")
    trainer.save_pretrained(folder)
    if trainer.accelerator.is_main_process:
        _print_places(trainer, arguments.model or preset.model, folder, _sample_prompt(arguments, images))
    return 0


def _choose_preset(arguments: argparse.Namespace) -> Preset:
    from ddpo_lessons.app.presets import PRESETS, Preset

    if arguments.preset is None and arguments.model not in (None, "tiny-sd"):
        return Preset(arguments.model, reward="", prompts="", config={})
    return PRESETS[arguments.preset or "digit_world"]


def _check_train_arguments(arguments: argparse.Namespace, preset: Preset) -> None:
    from ddpo_lessons.tiny.world import DAMAGES

    if arguments.images is None:
        for flag in ("noise_strength", "damage", "severity"):
            if getattr(arguments, flag) is not None:
                raise ValueError(f"--{flag.replace('_', '-')} is about images: give --images too")
        if preset.noise_strength is not None:
            raise ValueError(f"--preset {arguments.preset} trains on images: give --images FOLDER")
    if arguments.prompts is not None and (arguments.images, arguments.prompt) != (None, None):
        raise ValueError("--prompts does not go with --prompt or --images: leave it out")
    if arguments.damage is not None and (not arguments.damage or not set(arguments.damage) <= set(DAMAGES)):
        raise ValueError(f"--damage {','.join(arguments.damage)}: use one or more of {','.join(DAMAGES)}")
    if arguments.severity is not None and not (arguments.damage or preset.damages):
        raise ValueError("--severity says how strong damage is: give --damage too")


def _find_images(arguments: argparse.Namespace) -> ImageFolder | None:
    from ddpo_lessons.data.folders import find_images

    return None if arguments.images is None else find_images(arguments.images)


def _make_trainer(arguments: argparse.Namespace, preset: Preset, images: ImageFolder | None) -> Runner:
    """Check everything that is cheap to check, then load models."""
    from ddpo_lessons.compat import load_pipeline
    from ddpo_lessons.rewards import get_reward
    from ddpo_lessons.trainer import DDPOTrainer

    config = _make_config(arguments, preset)
    reward, model = arguments.reward or preset.reward, arguments.model or preset.model
    if not reward:
        raise ValueError("a model without a preset needs a reward: give --reward")
    if images is not None:
        return _make_image_trainer(arguments, preset, images, config, reward, model)
    prompts = _choose_prompts(arguments, preset, config.seed)
    return DDPOTrainer(config, get_reward(reward), prompts, load_pipeline(model))


def _make_image_trainer(
    arguments: argparse.Namespace,
    preset: Preset,
    images: ImageFolder,
    config: DDPOConfig,
    reward: str,
    model: str,
) -> ImageDDPOTrainer:
    from ddpo_lessons.compat import load_pipeline
    from ddpo_lessons.data.folders import check_needs, check_prompt, image_prompts, make_reward
    from ddpo_lessons.trainer import ImageDDPOTrainer

    damages = arguments.damage or preset.damages
    check_needs(reward, images, damages)
    check_prompt(reward, images, arguments.prompt)
    reward_function, pipeline = make_reward(reward, images), load_pipeline(model)
    sampler = image_prompts(
        images,
        arguments.prompt or "",
        _image_size(pipeline),
        config.seed,
        damages,
        arguments.severity or (1, 2, 3, 4, 5),
    )
    given = (arguments.noise_strength, preset.noise_strength, NOISE_STRENGTH)
    strength = next(value for value in given if value is not None)
    return ImageDDPOTrainer(config, reward_function, sampler, pipeline, noise_strength=strength)


def _make_config(arguments: argparse.Namespace, preset: Preset) -> DDPOConfig:
    from ddpo_lessons.app.presets import fit_to_memory
    from ddpo_lessons.config import DDPOConfig

    fields = {field.name for field in dataclasses.fields(DDPOConfig)}
    given = {name: value for name, value in vars(arguments).items() if name in fields}
    asked = {**preset.config, **given}
    if arguments.gpu_memory is None:
        return DDPOConfig(**asked)
    checkpointing = {name: value for name, value in given.items() if name == "train_gradient_checkpointing"}
    return DDPOConfig(**{**fit_to_memory(asked, arguments.gpu_memory), **checkpointing})


def _choose_prompts(
    arguments: argparse.Namespace, preset: Preset, seed: int
) -> Callable[[], tuple[str, dict[str, Any]]]:
    from ddpo_lessons.data.prompts import from_file, get_prompts

    if arguments.prompt is not None:
        return lambda: (arguments.prompt, {})
    name = arguments.prompts or preset.prompts
    if not name:
        raise ValueError("a model without a preset needs prompts: give --prompts, --prompt or --images")
    return from_file(name, seed) if Path(name).is_file() else get_prompts(name, seed)


def _sample_prompt(arguments: argparse.Namespace, images: ImageFolder | None) -> list[str]:
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
    strength = getattr(trainer, "noise_strength", None)
    if strength is not None:
        command += ["--noise-strength", str(strength), "--images", "FILE"]
    print(f"{folder}: what was trained; use it with\n  {shlex.join(command)}")


# -------------------------------------------------------------------------------------------- images
def _image_size(pipeline: StableDiffusionPipeline) -> int:
    """Return the side of the square images, in pixels, that a pipeline makes."""
    from ddpo_lessons.families.stable_diffusion import vae_factor

    return pipeline.unet.config.sample_size * vae_factor(pipeline.vae)


# -------------------------------------------------------------------------------------------- sample
def _add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-sd", help="folder or name on the hub (%(default)s)")
    parser.add_argument("--lora", type=Path, metavar="FOLDER", help="LoRA weights: a run's lora folder")
    parser.add_argument("--images", type=Path, nargs="+", metavar="FILE", help="img2img: what to start from")
    parser.add_argument("--prompt", metavar="TEXT", help='what the images show ("" with --images)')
    parser.add_argument("--count", type=_at_least_one, metavar="N", help="images without --images (4)")
    parser.add_argument(
        "--noise-strength",
        type=float,
        metavar="X",
        help=f"with --images: share of the schedule that is run ({NOISE_STRENGTH})",
    )
    parser.add_argument(
        "--keep-size",
        action="store_true",
        help="with --images: keep sizes that the model can take, instead of making all the model's own",
    )
    parser.add_argument(
        "--steps", type=_at_least_one, metavar="N", help="of the whole schedule (the run's, or 50)"
    )
    parser.add_argument("--guidance-scale", type=float, metavar="X", help="(the run's, or 5)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides the noise (%(default)s)")
    parser.add_argument(
        "--batch-size", type=_at_least_one, default=4, metavar="N", help="changes no image (%(default)s)"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("samples"), help="folder (%(default)s)")


def _sample(arguments: argparse.Namespace) -> int:
    from accelerate import PartialState

    from ddpo_lessons.compat import load_pipeline
    from ddpo_lessons.data.folders import open_image

    _check_sample_arguments(arguments)
    settings = _run_settings(arguments.lora or Path(arguments.model))
    inputs = [open_image(file) for file in arguments.images or []]
    pipeline = load_pipeline(arguments.model)
    if arguments.lora is not None:
        _load_lora(pipeline, arguments.lora)
    pipeline.to(PartialState().device)
    images = _choose_inputs(inputs, _image_size(pipeline), arguments.keep_size)
    _write_samples(arguments.output_dir, images, _draw(arguments, settings, pipeline, images))
    return 0


def _check_sample_arguments(arguments: argparse.Namespace) -> None:
    from ddpo_lessons.compat import LORA_FILE

    if arguments.images is None:
        if arguments.prompt is None:
            raise ValueError("there is nothing to start from: give --prompt or --images")
        if arguments.noise_strength is not None or arguments.keep_size:
            raise ValueError("--noise-strength and --keep-size are about images: give --images too")
    elif arguments.count is not None:
        raise ValueError("--count is for images from noise: leave it out, or --images")
    if arguments.lora is not None and not (arguments.lora / LORA_FILE).is_file():
        raise ValueError(f"--lora {arguments.lora} holds no {LORA_FILE}: give the lora folder of a run")


def _run_settings(result: Path) -> DDPOConfig:
    """Return the config of the run whose folder holds `result`, or the defaults."""
    from ddpo_lessons.config import DDPOConfig
    from ddpo_lessons.run.runlog import METRICS

    run_dir = result.parent
    if not (result.is_dir() and (run_dir / METRICS).is_file()):
        return DDPOConfig()
    return DDPOConfig.from_dict(json.loads((run_dir / "config.json").read_text(encoding="utf-8")))


def _load_lora(pipeline: StableDiffusionPipeline, folder: Path) -> None:
    from diffusers.utils import logging

    from ddpo_lessons.compat import LORA_FILE

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # diffusers prints, layer by layer, what it raises too
    try:
        pipeline.load_lora_weights(folder, weight_name=LORA_FILE)
    except RuntimeError as error:
        raise ValueError(f"--lora {folder} does not fit the model: {error!s:.200}") from error
    finally:
        logging.set_verbosity(verbosity)


def _choose_inputs(inputs: list[Image.Image], size: int, keep_size: bool) -> list[torch.Tensor]:
    from ddpo_lessons.data.contexts import to_tensor
    from ddpo_lessons.data.folders import fit

    return [to_tensor(image) if keep_size else fit(image, size) for image in inputs]


def _draw(
    arguments: argparse.Namespace,
    settings: DDPOConfig,
    pipeline: StableDiffusionPipeline,
    inputs: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Sample an image (3, H, W) for every input, or as many as were asked for without."""
    import torch
    from tqdm.auto import tqdm

    from ddpo_lessons.families import family_of
    from ddpo_lessons.rollout import img2img_rollout, sample_seed, text2img_rollout

    scale, strength = arguments.guidance_scale, arguments.noise_strength
    sampling: dict[str, Any] = {
        "num_inference_steps": arguments.steps or settings.sample_num_steps,
        "guidance_scale": settings.sample_guidance_scale if scale is None else scale,
        "eta": settings.sample_eta,
        "negative_prompt": settings.negative_prompts,
    }
    family = family_of(pipeline)  # remembers the prompt's embedding
    count = len(inputs) or arguments.count or 4
    size = 1 if arguments.keep_size else arguments.batch_size  # sizes may differ
    images: list[torch.Tensor] = []
    for first in tqdm(range(0, count, size), desc="sampling"):
        numbers = range(first, min(first + size, count))
        prompts = [arguments.prompt or ""] * len(numbers)
        seeds = [sample_seed(arguments.seed, number) for number in numbers]
        sampling["generator"] = [torch.Generator().manual_seed(seed) for seed in seeds]
        if inputs:
            batch = torch.stack([inputs[number] for number in numbers])
            noise = NOISE_STRENGTH if strength is None else strength
            images.extend(img2img_rollout(family, prompts, batch, noise, **sampling)[0].cpu())
        else:
            images.extend(text2img_rollout(family, prompts, **sampling)[0].cpu())
    return images


def _write_samples(folder: Path, inputs: list[torch.Tensor], images: list[torch.Tensor]) -> None:
    """Write each image, and a grid of all of them, beside the inputs where there are any."""
    import torch
    from PIL import ImageOps

    from ddpo_lessons.data.contexts import to_tensor
    from ddpo_lessons.data.images import image_grid
    from ddpo_lessons.tiny.world import to_pil

    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(images):
        path = folder / f"sample-{number:03d}.png"
        to_pil(image).save(path)
        print(path)
    tiles = [tile for pair in zip(inputs, images, strict=True) for tile in pair] if inputs else images
    box = (max(tile.shape[2] for tile in tiles), max(tile.shape[1] for tile in tiles))
    padded = [to_tensor(ImageOps.pad(to_pil(tile), box, color="white")) for tile in tiles]
    image_grid(torch.stack(padded), columns=2 if inputs else min(4, len(tiles))).save(folder / "grid.png")
    print(f"{folder / 'grid.png'}{': left the input, right the result' if inputs else ''}")


# ---------------------------------------------------------------------------------- demo and doctor
def _add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    from ddpo_lessons.app import demo

    demo.add_arguments(parser)


def _demo(arguments: argparse.Namespace) -> int:
    from ddpo_lessons.app import demo

    return demo.run(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from ddpo_lessons.app import doctor

    return doctor.main()


COMMANDS = {
    "demo": Command("Teach img2img to obey a sentence and keep the picture.", _add_demo_arguments, _demo),
    "train": Command("Train a model with DDPO on a reward.", _add_train_arguments, _train),
    "sample": Command("Use what was trained.", _add_sample_arguments, _sample),
    "doctor": Command("Say what works on this machine.", lambda parser: None, _doctor),
}

if __name__ == "__main__":
    sys.exit(main())
