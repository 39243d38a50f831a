"""`ddpo-lessons demo · train · sample · doctor`: what the flags are, and every check that needs no torch.

Flags, their types and their help are the fields below and those of `DDPOConfig`, as tyro reads them. What a
command does is imported when it runs: torch takes seconds to load, and `doctor` runs where it does not load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import math
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

from ddpo_lessons import __version__
from ddpo_lessons.algorithms import make_algorithm, parse_algorithm
from ddpo_lessons.app import reward_flag
from ddpo_lessons.app.flags import in_flags
from ddpo_lessons.app.presets import PRESETS, Preset, divide, world_size
from ddpo_lessons.app.runs import Policy, check_model, find_policy
from ddpo_lessons.config import LORA_FILE, DDPOConfig
from ddpo_lessons.data.prompts import PROMPTS, from_file, get_prompts

# Names in a registry whose module loads torch; tests/test_cli.py compares them.
Damage = Literal["noisy", "blurry", "foggy", "blocky", "faded", "dark"]

# The fields of DDPOConfig that most runs set; `--help` shows the others below them.
BASIC = (
    "num_epochs", "seed", "output_dir", "overwrite", "resume_from", "mixed_precision", "sample_num_steps",
    "sample_guidance_scale", "sample_batch_size", "sample_num_batches_per_epoch", "sample_group_size",
    "train_batch_size", "train_gradient_accumulation_steps", "train_learning_rate", "train_lora_rank",
    "train_lora_from",
)  # fmt: skip
ADVANCED = tuple(spec.name for spec in dataclasses.fields(DDPOConfig) if spec.name not in BASIC)


def _json_object(words: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(words[0])
    except json.JSONDecodeError as error:
        raise ValueError(f"{words[0]!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f'{words[0]!r} is not an object such as {{"key": 1}}')
    return value


JSON = PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=_json_object,
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)


def _settings(names: Sequence[str]) -> Any:
    """Make the type of a dict of fields of `DDPOConfig`; tyro puts those in that are given."""
    hints, defaults = get_type_hints(DDPOConfig), DDPOConfig().to_dict()
    preset = PRESETS["digit_world"].config  # of tiny-sd, where no preset is asked for
    docs = {doc.arg_name: doc.description for doc in docstring_parser.parse_from_object(DDPOConfig).params}
    flags = {}
    for name in names:
        shown = ",".join(defaults[name]) if isinstance(defaults[name], list) else str(defaults[name])
        default = f"default: {shown or repr(shown)}"
        if preset.get(name, defaults[name]) != defaults[name]:
            default += f"; for tiny-sd: {preset[name]}"
        about = tyro.conf.arg(help=" ".join(str(docs[name]).split()), help_behavior_hint=f"({default})")
        written = (JSON,) if get_origin(hints[name]) is dict else ()
        flags[name] = Annotated[hints[name], about, *written]
    return TypedDict("Settings", flags, total=False)  # type: ignore[operator]


def _one_of(names: Iterable[Any], default: Any = None) -> Any:
    """Allow these values only."""
    choice = tyro.extras.literal_type_from_choices(names)
    return tyro.conf.arg(constructor=choice, help_behavior_hint=f"(default: {default})")


def check_packages(config: DDPOConfig) -> None:
    """Raise an ImportError for a package that the settings need and that is not installed."""
    adam = "bitsandbytes" if config.train_use_8bit_adam else None
    for name, package in (("log_with", config.log_with), ("train_use_8bit_adam", adam)):
        ways = ["tensorboard", "tensorboardX"] if package == "tensorboard" else [package]
        if package and not any(importlib.util.find_spec(str(way)) for way in ways):
            raise ImportError(f"{name} needs a package that is not installed: pip install {package}")


# ------------------------------------------------------------------------------------------- commands
@dataclass
class Demo:
    """Teach img2img to find an animal in confetti."""

    seed: int = 0
    """Seed of training."""
    epochs: int = 34
    """Epochs of training."""
    eval_images: int = 500
    """Test pictures judged."""
    output_dir: Path = Path("demo-run")
    """Folder."""

    def run(self) -> int:
        """Run the demo."""
        from ddpo_lessons.app import demo

        return demo.run(self)


@dataclass
class Train:
    """Train a model on a reward; on several devices: accelerate launch -m ddpo_lessons.app.cli train ..."""

    basic: Annotated[dict[str, Any], tyro.conf.arg(constructor=_settings(BASIC))]
    """Fields of DDPOConfig."""
    advanced: Annotated[dict[str, Any], tyro.conf.arg(constructor=_settings(ADVANCED))]
    """More fields of DDPOConfig."""
    model: str | None = None
    """Folder or name on the hub; tiny-sd, tiny-sd3 or tiny-zoo, which are in the package; tiny-sd if no
    preset says another."""
    preset: Annotated[str | None, _one_of(PRESETS)] = None
    """Named settings, which every other flag overrides; for an embedded model its own."""
    algorithm: str | None = None
    """How rewards become updates: ddpo, branching, rwr, flow_grpo, awm, nft, dpo, draft or refl, with
    settings of its own as in nft:beta=0.1,max_decay=0; the preset's, or ddpo."""
    reward: Annotated[str | None, tyro.conf.arg(help=reward_flag.help_text(), metavar="REWARD")] = None
    prompts: str | None = None
    """digit_world, digit_world_left_out, zoo, zoo_left_out, animals, activities; or a file, one a line."""
    prompt: str | None = None
    """One prompt for everything."""
    images: Path | None = None
    """Img2img: a folder of images, or of subfolders named by label; NAME.txt beside NAME.png: its prompts."""
    noise_strength: float | None = None
    """With --images: share of the schedule that is run; the preset's, or 0.2."""
    damage: tuple[Damage, ...] | None = None
    """With --images: damage to clean images, one for each; the preset's if not given."""
    severity: tuple[Literal[1, 2, 3, 4, 5], ...] | None = None
    """Of the damage; any of them if not given."""
    validation: Path | None = None
    """Not trained on, but made and scored from the same noise again and again: a folder of images as those of
    --images; without --images a file, a prompt a line."""
    validation_freq: int = 10
    """Epochs from one validation to the next; there is one before the first and after the last."""
    gpu_memory: str | None = None
    """GB of each GPU, or auto: cuts passes to what fits; samples per epoch and optimizer step stay."""
    dry_run: bool = False
    """Say what the run would do and cost, and end; no weights are loaded."""

    def run(self) -> int:
        """Check everything that can be checked without torch, then train."""
        self.check()
        from ddpo_lessons.app import train

        return train.run(self)

    def choose_preset(self) -> Preset:
        """Return the preset asked for; without one, the embedded models have theirs."""
        if self.preset is None and self.model == "tiny-sd3":
            return PRESETS["digit_world_flow"]
        if self.preset is None and self.model == "tiny-zoo":
            return PRESETS["zoo"]
        if self.preset is None and self.model not in (None, "tiny-sd"):
            return Preset(self.model, reward="", prompts="", config={})
        return PRESETS[self.preset or "digit_world"]

    def check(self) -> None:
        """Raise a ValueError for flags that do not go together, and for settings that cannot work."""
        if self.model is not None:
            check_model(self.model)
        preset = self.choose_preset()
        parse_algorithm(self.choose_algorithm(preset))
        if self.images is None:
            for name in ("noise_strength", "damage", "severity"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')} is about images: give --images too")
            if preset.noise_strength is not None:
                raise ValueError(f"--preset {self.preset} trains on images: give --images FOLDER")
        if self.prompts is not None and (self.images, self.prompt) != (None, None):
            raise ValueError("--prompts does not go with --prompt or --images: leave it out")
        self.check_validation()
        if self.severity is not None and not (self.damage or preset.damages):
            raise ValueError("--severity says how strong damage is: give --damage too")
        if not (self.reward or preset.reward):
            raise ValueError("a model without a preset needs a reward: give --reward")
        terms = self.choose_rewards(preset)
        config = self.make_config(preset)
        if self.images is not None and not self.images.is_dir():
            raise ValueError(f"--images {self.images} is not a folder")
        if config.resume_from not in ("", "latest") and not Path(config.resume_from).is_dir():
            raise ValueError(f"--resume-from {config.resume_from} is not a folder: give a checkpoint")
        if config.train_lora_from and not Path(config.train_lora_from, LORA_FILE).is_file():
            raise ValueError(f"--train-lora-from {config.train_lora_from} holds no {LORA_FILE}")
        check_packages(config)
        self.check_gpu_memory()
        reward_flag.load_functions(terms)  # late, since a user's file may need torch
        if self.images is None:
            self.choose_prompts(preset, config.seed)  # late, since those of the digit world need torch
        make_algorithm(self.choose_algorithm(preset)).check(config)  # last, since all of them do

    def choose_algorithm(self, preset: Preset) -> str:
        """Return the algorithm asked for, or the preset's."""
        return self.algorithm or preset.algorithm

    def choose_rewards(self, preset: Preset) -> tuple[reward_flag.Term, ...]:
        """Return what is trained for."""
        return reward_flag.parse(self.reward or preset.reward)

    def check_validation(self) -> None:
        """Refuse what cannot be validated on."""
        if self.validation is None:
            return
        if self.validation_freq < 1:
            raise ValueError(f"--validation-freq {self.validation_freq}: use a number of at least 1")
        if self.images is None and not self.validation.is_file():
            raise ValueError(f"--validation {self.validation} is not a file: give one, with a prompt a line")
        if self.images is not None and self.validation.resolve() == self.images.resolve():
            raise ValueError(
                f"--validation {self.validation} is what is trained on: take some of its images out into a "
                "folder of their own"
            )

    @property
    def given(self) -> dict[str, Any]:
        """The fields of `DDPOConfig` that were given as flags."""
        return {**self.basic, **self.advanced}

    def make_config(self, preset: Preset) -> DDPOConfig:
        """Return the preset's settings for one of the processes, overridden by those that were given."""
        settings = divide(preset, world_size(), self.given)
        if self.given.get("train_lora_from"):  # the adapter's own, and not the preset's, are the defaults
            settings = {name: value for name, value in settings.items() if "train_lora_" not in name}
        if self.algorithm is not None:  # which may not use all that the preset's does
            algorithm = make_algorithm(self.algorithm)
            unused = {*algorithm.unused, *(["sample_eta"] if algorithm.follows_ode else [])}
            settings = {name: value for name, value in settings.items() if name not in unused}
        return DDPOConfig(**{**settings, **self.given})

    def check_gpu_memory(self) -> None:
        """Refuse a memory that is no number of GB, and flags that it would override."""
        if self.gpu_memory is None:
            return
        is_number = re.fullmatch(r"\d+(\.\d+)?", self.gpu_memory) and float(self.gpu_memory) > 0
        if self.gpu_memory != "auto" and not is_number:
            raise ValueError(f"--gpu-memory {self.gpu_memory}: give the GB of each GPU, such as 24, or auto")
        for name in ("sample_forward_size", "train_forward_size"):
            if self.given.get(name):
                raise ValueError(f"--gpu-memory decides {name}: leave one of them out")

    def choose_prompts(self, preset: Preset, seed: int) -> Callable[[], tuple[str, dict[str, Any]]]:
        """Return the prompt function of text-to-image."""
        prompt = self.prompt
        if prompt is not None:
            return lambda: (prompt, {})
        name = self.prompts or preset.prompts
        if not name:
            raise ValueError("a model without a preset needs prompts: give --prompts, --prompt or --images")
        if Path(name).is_file():
            return from_file(name, seed)
        if name not in PROMPTS:
            raise ValueError(f"--prompts {name} is neither a file nor one of {', '.join(PROMPTS)}")
        return get_prompts(name, seed)


@dataclass
class Sample:
    """Use what was trained: --run RUN samples its policy, on prompts or images as in training."""

    run_dir: Annotated[Path | None, tyro.conf.arg(name="run")] = None
    """Folder of a run, which gives model, weights, prompts, images and settings that no flag below gives."""
    model: str | None = None
    """Folder or name on the hub; the run's, or tiny-sd."""
    lora: Path | None = None
    """Folder of LoRA weights; one that lies in a run's folder brings its settings."""
    images: list[Path] = field(default_factory=list)
    """Img2img: folders or files to start from, whose names the results keep; the run's if not given."""
    prompt: str | None = None
    """What the images show; the run's prompt or prompts, or the first line of NAME.txt, if not given."""
    count: int | None = None
    """Images without --images; 4 if not given."""
    noise_strength: float | None = None
    """Of img2img: share of the schedule that is run; the run's, or 0.2."""
    keep_size: bool = False
    """Of img2img: keep sizes that the model can take, instead of making all the model's own."""
    steps: int | None = None
    """Of the whole schedule; the run's, or 50."""
    guidance_scale: float | None = None
    """Classifier-free guidance; the run's, or 5."""
    seed: int = 0
    """Decides the noise."""
    batch_size: int = 4
    """Images that are made together; changes none of them."""
    output_dir: Path = Path("samples")
    """Folder, which has to be empty."""
    overwrite: bool = False
    """Write into a folder that holds files, over those of the same name."""

    def run(self) -> int:
        """Check the flags, then sample."""
        self.check()
        from ddpo_lessons.app import sample

        return sample.run(self)

    def choose_policy(self) -> Policy:
        """Return the model with what its run trained, if there is a run."""
        return find_policy(self.run_dir, self.model, self.lora)

    def starts_from_images(self, policy: Policy) -> bool:
        """Tell whether this is img2img: of images given, or else of those of the run."""
        return bool(self.images) or "images" in policy.record

    def check(self) -> None:
        """Raise a ValueError for values that cannot work and for flags that do not go together."""
        for name in ("count", "steps", "batch_size"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"--{name.replace('_', '-')} {number}: use a number of at least 1")
        if self.guidance_scale is not None and not 0 <= self.guidance_scale < math.inf:
            raise ValueError(f"--guidance-scale {self.guidance_scale}: use 1 for none, and 5 or so for more")
        for place in self.images:
            if not place.exists():
                raise ValueError(f"--images {place} does not exist")
        if self.images and self.count is not None:
            raise ValueError("--count is for images from noise, or a run's: leave it out, or --images")
        policy = self.choose_policy()
        trained_on = policy.record.get("images", {}).get("folder")
        if self.starts_from_images(policy):
            if not self.images and not Path(trained_on).is_dir():
                raise ValueError(f"the run was trained on {trained_on}, which is not there: give --images")
            return
        if self.noise_strength is not None or self.keep_size:
            raise ValueError("--noise-strength and --keep-size are about images: give --images too")
        if policy.record.get("start", "noise") != "noise":
            raise ValueError("the run was trained on images of a Python function: give --images")
        if self.prompt is None and "prompts" not in policy.record:
            raise ValueError(
                "there is nothing to start from: give --prompt or --images, or the --run of train"
            )


@dataclass
class Doctor:
    """Say what works on this machine."""

    def run(self) -> int:
        """Print the findings."""
        from ddpo_lessons.app import doctor

        return doctor.main()


Command = Demo | Train | Sample | Doctor

# -------------------------------------------------------------------------------------------- parsing
# How values are written, where tyro's own way is another one.
RULES = ConstructorRegistry()
Spec = PrimitiveConstructorSpec | UnsupportedTypeAnnotationError


@RULES.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> Spec | None:
    """`X | None` is written as X: None is the flag that was not given."""
    kinds = [kind for kind in get_args(info.type) if kind is not NoneType]
    if len(kinds) != 1 or NoneType not in get_args(info.type):
        return None
    return ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))


@RULES.primitive_rule
def _comma_list(info: PrimitiveTypeInfo) -> Spec | None:
    """`tuple[X, ...]` is written A,B."""
    if info.type_origin is not tuple:
        return None
    of_one = ConstructorRegistry.get_primitive_spec(
        PrimitiveTypeInfo.make(get_args(info.type)[0], info.markers)
    )
    assert isinstance(of_one, PrimitiveConstructorSpec)

    def parse(words: list[str]) -> tuple[Any, ...]:
        parts = [part.strip() for part in words[0].split(",") if part.strip()]
        if not parts or (of_one.choices and not set(parts) <= set(of_one.choices)):
            raise ValueError(f"{words[0]!r}: use one or more of {', '.join(of_one.choices or ('A', 'B'))}")
        return tuple(of_one.instance_from_str([part]) for part in parts)

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{of_one.metavar},...",
        instance_from_str=parse,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [str(value)],
    )


def parse(argv: Sequence[str]) -> Command:
    """Parse the words after the program's name; `--help` is printed and ends the program.

    Raises:
        ValueError: for a command or flag that does not exist, or a value that a flag cannot have.
    """
    kinds = {kind.__name__.lower(): kind for kind in get_args(Command)}
    if argv and argv[0] in kinds:
        return _parse(kinds[argv[0]], f"ddpo-lessons {argv[0]}", argv[1:])
    if argv and not argv[0].startswith("-"):
        raise ValueError(f"there is no command {argv[0]!r}: use one of {', '.join(kinds)}")
    return _parse(Command, "ddpo-lessons", argv)


def _parse(kind: Any, program: str, words: Sequence[str]) -> Any:
    """Let tyro parse; the box of several lines that it prints of an error becomes an exception of one."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                kind, prog=program, args=words, config=(tyro.conf.OmitArgPrefixes,), registry=RULES
            )
    except SystemExit as end:
        if not end.code:
            raise
    text = re.sub(r"\x1b\[[\d;]*m", "", box.getvalue())  # without colours
    _, message, *_ = re.split("[─-]{5,}", text)  # a title, a rule, the message, a rule, hints
    message = " ".join(re.sub("[│╮]", " ", message).split())
    similar = re.findall(r"^[│ ]{6}(--[a-z][\w-]*)", text, flags=re.MULTILINE)[:3]
    if "Unrecognized" in message and not similar:
        similar = _by_initials(kind, message)
    if "Unrecognized" in message and similar:
        message += f"; perhaps you meant {' or '.join(similar)}"
    raise ValueError(f"{message.removeprefix('Error parsing ')} (see {program} --help)")


def _by_initials(kind: Any, message: str) -> list[str]:
    """Return flags of `train` that a short one may stand for: --lr for --train-learning-rate."""
    (word,) = re.findall(r"options: --([a-z]+)", message)[:1] or [""]
    names = [spec.name for spec in dataclasses.fields(DDPOConfig)] if kind is Train and word else []
    initials = {name: "".join(part[0] for part in name.split("_")) for name in names}
    return [f"--{name.replace('_', '-')}" for name in names if initials[name].endswith(word)][:3]


def _own_line(error: BaseException) -> str:
    """Return where in the user's own code an error arose, such as " (mine.py, line 3)", or nothing."""
    libraries = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    places = [Path(__file__).parents[1], *(Path(path).resolve() for path in libraries)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename).resolve()
        if path.is_file() and not any(path.is_relative_to(place) for place in places):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the words after the program's name; those of the process if not given.

    Returns:
        The exit status: 0; 2 after an error, which is printed in one line; 130 after Ctrl-C and 143 after
        SIGTERM, as shells count, also where what was done is saved.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv == ["--version"]:
        print(__version__)
        return 0
    # At import, transformers warns of image processors without torchvision, which nothing here uses.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return parse(argv).run()
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        message = in_flags(" ".join(str(error).split()), argv[0] if argv else "")
        print(f"error: {message}{_own_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # as shells count
    except SystemExit as end:
        place = _own_line(end)
        if not place:  # of --help
            raise
        print(
            f"error: your code ended the program by {end!r}{place}: raise an error instead", file=sys.stderr
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
