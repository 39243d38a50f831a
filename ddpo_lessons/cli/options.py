"""Define the flags of the commands, and check them without loading a model.

tyro reads flags, their types and their help from the fields below and from `DDPOConfig`.
"""

import functools
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from ddpo_lessons.algorithms import ALGORITHMS, make_algorithm
from ddpo_lessons.cli import reward_flag
from ddpo_lessons.cli.presets import OF_MODELS, PRESETS, Preset, divide, world_size
from ddpo_lessons.cli.runs import Policy, check_model, find_policy, lack
from ddpo_lessons.config import LORA_FILE, DDPOConfig
from ddpo_lessons.damages import DAMAGES
from ddpo_lessons.data.folders import LABEL
from ddpo_lessons.data.prompts import from_file
from ddpo_lessons.named_prompts import PROMPTS, get_prompts
from ddpo_lessons.rewards import REWARDS
from ddpo_lessons.words import similar

T = TypeVar("T")

JSON = PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda words: json.loads(words[0]),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)


# First fields of the groups of settings, in the order of DDPOConfig.
GROUPS = {
    "run": "exp_name",
    "sampling": "sample_num_steps",
    "training": "train_batch_size",
    "advantage": "per_prompt_stat_tracking",
}


def _setting_flags() -> dict[str, Any]:
    """Return the types of the fields of `DDPOConfig`, with all that tyro shows of their flags."""
    hints, defaults = get_type_hints(DDPOConfig), DDPOConfig().to_dict()
    preset = PRESETS["digit_world"].config  # of tiny-sd, the default model
    flags = {}
    for doc in docstring_parser.parse_from_object(DDPOConfig).params:
        name, default = doc.arg_name, defaults[doc.arg_name]
        hint = f"(default: {default or repr(default)}"
        if preset.get(name, default) != default:
            hint += f"; for tiny-sd: {preset[name]}"
        about = tyro.conf.arg(
            help=" ".join(str(doc.description).split()),
            help_behavior_hint=f"{hint})",
            aliases=("--lr",) if name == "train_learning_rate" else None,
        )
        written = (JSON,) if get_origin(hints[name]) is dict else ()
        flags[name] = Annotated[hints[name], about, *written]
    return flags


def _settings() -> Any:
    """Return a function that joins groups of settings, which tyro fills with the flags that are given."""
    groups: dict[str, dict[str, Any]] = {}
    starts = {first: title for title, first in GROUPS.items()}
    for name, kind in _setting_flags().items():
        if name in starts:
            group = groups[starts[name]] = {}
        group[name] = kind

    def settings(run: Any, sampling: Any, training: Any, advantage: Any) -> dict[str, Any]:
        return {**run, **sampling, **training, **advantage}

    settings.__annotations__ = {
        title: Annotated[TypedDict(title, flags, total=False), tyro.conf.arg(prefix_name=False)]  # type: ignore[operator]
        for title, flags in groups.items()
    }
    return settings


def _with_help(flags: type[T]) -> type[T]:
    """Give tyro the help of each flag in one line, because it keeps line breaks before an indented line."""
    for doc in docstring_parser.parse_from_object(flags).params:
        about = tyro.conf.arg(help=" ".join(str(doc.description).split()))
        flags.__annotations__[doc.arg_name] = Annotated[flags.__annotations__[doc.arg_name], about]
    for name, kind in flags.__annotations__.items():
        if getattr(flags, name, "") is None:  # its help has "If left out"
            flags.__annotations__[name] = Annotated[kind, tyro.conf.arg(help_behavior_hint="")]
    return flags


def check_packages(config: DDPOConfig) -> None:
    """Raise an ImportError if a package that the settings need is not installed."""
    adam = "bitsandbytes" if config.train_use_8bit_adam else None
    for name, package in (("log_with", config.log_with), ("train_use_8bit_adam", adam)):
        ways = ["tensorboard", "tensorboardX"] if package == "tensorboard" else [package]
        if package and not any(importlib.util.find_spec(str(way)) for way in ways):
            raise ImportError(f"{name} needs a package that is not installed: `pip install {package}`")


def check_output(folder: Path) -> None:
    """Raise a ValueError if the output folder is a file, or would be inside a file."""
    for place in (folder, *folder.parents):
        if place.is_file():
            raise ValueError(f"--output-dir {folder}: {place} is a file; choose another folder")


def check_no_label(prompt: str | None) -> None:
    """Raise a ValueError for a prompt that names the class of an input image, if there are no images."""
    if LABEL in (prompt or ""):
        raise ValueError(
            f"--prompt {prompt!r}: {LABEL} becomes the class of an input image, and there is none: give "
            "--images FOLDER with class subfolders, or write the word itself"
        )


def check_numbers(flags: Any, **least: int) -> None:
    """Raise a ValueError for a given number that is below its minimum."""
    for name, low in least.items():
        if (number := getattr(flags, name)) is not None and number < low:
            raise ValueError(f"{name}={number}: use a number of at least {low}")


# ------------------------------------------------------------------------------------------- commands
ALGORITHM = (
    f"Algorithm of the updates: {', '.join(ALGORITHMS)}, optionally with settings, as in "
    "nft:beta=0.1,max_decay=0. Or give your own subclass of Algorithm as FILE.py:CLASS or MODULE:CLASS, with "
    "settings after a second colon, as in rloo.py:RLOO:scale=2. If left out, the preset's algorithm, or ddpo."
)
NAMED = (
    f"Named group of settings, which any other flag overrides: {', '.join(PRESETS)}. Models in the package "
    "use their own preset by default."
)
DAMAGE = (
    f"With --images: kinds of damage that are applied to clean images: {', '.join(DAMAGES)}. If left out, "
    "the preset's kinds."
)
PROMPT_SOURCES = (
    f"Source of the prompts: {', '.join(PROMPTS)}; or a file with one prompt per line, JSON, JSON lines, or "
    "a table with a column named prompt."
)


@_with_help
@dataclass
class Demo:
    """Flags of `demo`."""

    algorithm: Literal["branching", "ddpo"] = "branching"
    """Algorithm of training; each has its own schedule."""
    seed: int = 0
    """Seed of training."""
    epochs: int | None = None
    """Number of training epochs. If left out, that of the algorithm's schedule."""
    eval_images: int = 500
    """Number of test images that are evaluated."""
    output_dir: Path = Path("demo-run")
    """Output folder."""

    def check(self) -> None:
        """Raise a ValueError for numbers and folders that cannot work."""
        check_numbers(self, seed=0, epochs=1, eval_images=1)
        check_output(self.output_dir)  # now, because it is first written after minutes


@_with_help
@dataclass
class Train:
    """Flags of `train`."""

    settings: Annotated[dict[str, Any], tyro.conf.arg(constructor=_settings())]
    """Fields of DDPOConfig."""
    reward: Annotated[str | None, tyro.conf.arg(help=reward_flag.help_text())] = None
    preset: Annotated[str | None, tyro.conf.arg(help=NAMED)] = None
    model: str | None = None
    """Model: tiny-sd, tiny-sd3 or tiny-zoo (in the package), a folder, or a name on the hub. If left out,
    the preset's model, or tiny-sd."""
    algorithm: Annotated[str | None, tyro.conf.arg(help=ALGORITHM)] = None
    images: Path | None = None
    """Folder of input images for img2img or for an editing model. The names of subfolders are labels.
    NAME.txt has the prompts of the image NAME.png, one per line."""
    prompt: str | None = None
    """Single prompt for all samples."""
    prompts: Annotated[str | None, tyro.conf.arg(help=PROMPT_SOURCES)] = None
    noise_strength: float | None = None
    """With --images: fraction of the denoising schedule that is run, from above 0 (nearly unchanged images)
    to 1. If left out, the preset's value, or 0.2."""
    resolution: int | None = None
    """Side of the images in pixels. If left out, the preset's size, or the model's own."""
    damage: Annotated[tuple[str, ...] | None, tyro.conf.arg(help=DAMAGE, metavar="KIND [KIND ...]")] = None
    severity: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT [INT ...]")] = None
    """Severities of the damage, from 1 (weak) to 5 (strong). If left out, all five."""
    judge: str | None = None
    """Held-out evaluator: a second reward, in the syntax of --reward, that is recorded as reward/judge and
    not trained on. If it falls while the reward rises, the policy exploits the reward."""
    validation: Path | None = None
    """Held-out data, which is not trained on. At intervals during training, the run generates images from
    it, always with the same noise, and computes their rewards. Give a folder of images if --images is set,
    and otherwise a file with one prompt per line."""
    validation_freq: int = 10
    """Number of epochs between two validations. There is also a validation before the first epoch and
    after the last."""
    config: Path | None = None
    """File with flags: YAML, or the config.json of a run that you want to repeat. Flags on the command line
    override it."""
    dry_run: bool = False
    """Print what the run would do, with the numbers of samples and steps per epoch and in total, and exit
    without loading weights."""

    @property
    def preset_name(self) -> str | None:
        """The given preset, or else that of a model in the package."""
        return self.preset or OF_MODELS.get(self.model or "tiny-sd")

    @functools.cached_property
    def chosen(self) -> Preset:
        """The preset, with the parts that flags replace."""
        name = self.preset_name
        preset = PRESETS[name] if name else Preset(self.model or "", reward="", prompts="", config={})
        given: dict[str, Any] = {
            "model": self.model,
            "reward": self.reward,
            "prompts": self.prompts,
            "algorithm": self.algorithm,
            "noise_strength": self.noise_strength,
            "damages": self.damage,
            "resolution": self.resolution,
        }
        return replace(preset, **{part: value for part, value in given.items() if value})

    def check(self) -> None:
        """Raise a ValueError for flags that exclude each other, and for settings that cannot work."""
        for name in ("algorithm", "reward", "judge", "prompts"):
            if getattr(self, name) == "":
                raise ValueError(f"--{name} is empty: give a value (--help lists them), or leave it out")
        if self.model is not None:
            check_model(self.model)
        if self.preset is not None and self.preset not in PRESETS:
            meant = similar(self.preset, PRESETS)
            raise ValueError(f"preset={self.preset} does not exist{meant}: use one of {', '.join(PRESETS)}")
        if unknown := [name for name in self.damage or () if name not in DAMAGES]:
            meant = similar(unknown[0], DAMAGES)
            raise ValueError(f"damage={unknown[0]} does not exist{meant}: use one of {', '.join(DAMAGES)}")
        if unfit := [number for number in self.severity or () if not 1 <= number <= 5]:
            raise ValueError(f"severity={unfit[0]} must lie between 1 and 5")
        if self.images is None:
            for name in ("noise_strength", "damage", "severity"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')} needs input images: give --images too")
            if self.chosen.noise_strength is not None:
                wanted = reward_flag.wanted(reward_flag.parse(self.chosen.reward), self.prompt)
                raise ValueError(f"--preset {self.preset} needs input images: give {wanted}")
            check_no_label(self.prompt)
        if self.prompts is not None and (self.images, self.prompt) != (None, None):
            raise ValueError("--prompts cannot be combined with --prompt or --images: leave it out")
        self.check_validation()
        check_numbers(self, resolution=1, validation_freq=1)
        if self.noise_strength is not None and not 0 < self.noise_strength <= 1:
            raise ValueError(f"--noise-strength {self.noise_strength} must lie in (0, 1]")
        if self.severity is not None and not self.chosen.damages:
            raise ValueError("--severity has no effect without damage: give --damage too")
        if not self.chosen.reward:
            raise ValueError(f"--model {self.model} has no preset, so it needs a reward: give --reward")
        terms = reward_flag.parse(self.chosen.reward)
        config = self.make_config()
        config.check_epoch(world_size())
        if self.images is not None and not self.images.is_dir():
            raise ValueError(f"--images {self.images} is not a folder: give a folder of images")
        source = config.resume_from
        if source not in ("", "auto", "latest") and (fault := lack(Path(source), "state.json")):
            raise ValueError(f"--resume-from {fault}: give the folder of a checkpoint")
        if config.train_lora_from and (fault := lack(Path(config.train_lora_from), LORA_FILE)):
            raise ValueError(f"--train-lora-from {fault}: give the folder of a LoRA")
        check_packages(config)
        if self.judge is not None:
            with reward_flag.called_judge():
                reward_flag.load_functions(reward_flag.parse(self.judge))
        reward_flag.load_functions(terms)  # late, because a user's file may take long to load
        if self.images is None:
            self.choose_prompts(config.seed)
        make_algorithm(self.chosen.algorithm).check(config)
        self.check_choice()

    def check_choice(self) -> None:
        """Raise a ValueError if no flag chooses what is trained, because a run may take long."""
        choices = ("reward", "preset", "model", "algorithm", "prompts", "prompt", "images")
        if all(getattr(self, choice) is None for choice in choices):
            name = type(self).__name__.lower()
            raise ValueError(
                f"{name} needs a choice of what to train: give --reward, --preset, --model or --algorithm "
                f"(`ddpo-lessons {name} --help` explains them). For example, `ddpo-lessons {name} --reward "
                "colorfulness --num-epochs 20` trains tiny-sd, a small model in the package"
            )

    def check_validation(self) -> None:
        """Raise a ValueError for validation data that cannot be used."""
        if self.validation is None:
            return
        if self.images is None and not self.validation.is_file():
            raise ValueError(
                f"--validation {self.validation} is not a file: give a file with one prompt per line"
            )
        if self.images is not None and not self.validation.is_dir():
            raise ValueError(
                f"--validation {self.validation} is not a folder: with --images, give a folder of images"
            )
        if self.images is not None and self.validation.resolve() == self.images.resolve():
            raise ValueError(
                f"--validation {self.validation} is also the training set (--images): give other images"
            )

    def make_config(self) -> DDPOConfig:
        """Return the preset's settings for one process, overridden by the settings that were given."""
        settings = divide(self.chosen, world_size(), self.settings)
        if self.settings.get("train_lora_from"):  # the defaults are the adapter's instead of the preset's
            settings = {name: value for name, value in settings.items() if "train_lora_" not in name}
        if self.algorithm is not None:  # it may not use all settings of the preset's algorithm
            algorithm = make_algorithm(self.algorithm)
            unused = {*algorithm.unused, *(["sample_eta"] if algorithm.follows_ode else [])}
            settings = {name: value for name, value in settings.items() if name not in unused}
        return DDPOConfig(**{**settings, **self.settings})

    def choose_prompts(self, seed: int) -> Callable[[], tuple[str, dict[str, Any]]]:
        """Return the prompt function of text-to-image."""
        prompt = self.prompt
        if prompt is not None:
            return lambda: (prompt, {})
        name = self.chosen.prompts
        if not name:
            raise ValueError(
                f"--model {self.model} has no preset, so it needs prompts: give --prompts, --prompt or "
                "--images"
            )
        return from_file(name, seed) if Path(name).is_file() else get_prompts(name, seed)


@dataclass
class Preflight(Train):
    """Flags of `preflight`, which are those of `train`."""


# The common flags of `train` in the order of their use, and the texts that are shorter than those of
# `--help-all`.
COMMON: dict[str, str | None] = {
    "reward": (
        "Reward to maximize: a name, a function as FILE.py:FUNCTION, or a weighted sum such as "
        f"clip_score=1,my.py:red=0.2. Names: {', '.join(REWARDS)}."
    ),
    "images": "Folder of input images, for img2img or an editing model. If left out, text-to-image.",
    "prompt": "Single prompt for all samples (--prompts takes a file of them).",
    "num_epochs": "Number of epochs.",
    "output_dir": "Folder of the run. If left out, logs/ddpo.",
    "noise_strength": None,
    "preset": None,
    "model": None,
    "algorithm": (
        f"Algorithm: {', '.join(ALGORITHMS)}, or your own as FILE.py:CLASS. If left out, the preset's, or "
        "ddpo."
    ),
    "train_learning_rate": None,
    "seed": "Seed of all random numbers.",
    "validation": "Held-out folder of images, or file of prompts, whose rewards are recorded at intervals.",
    "resume_from": 'Checkpoint to continue from: "auto" takes the newest, or starts if there is none.',
    "dry_run": "Print what the run would do, and exit without loading weights.",
    "help_all": "Show all flags, in groups, and exit.",
}


def common_flags() -> type:
    """Return a class with the common flags of `train` alone, which tyro shows after `--help`."""
    kinds: dict[str, Any] = {
        **get_type_hints(Train, include_extras=True),
        **_setting_flags(),
        "help_all": bool,
    }
    defaults: dict[str, Any] = {**vars(DDPOConfig), **vars(Train), "help_all": False}
    fields = []
    for name, text in COMMON.items():
        kind = kinds[name] if text is None else Annotated[kinds[name], tyro.conf.arg(help=text)]
        if name in ("output_dir", "resume_from", "dry_run", "help_all"):  # off by default
            kind = Annotated[kind, tyro.conf.arg(help_behavior_hint=""), tyro.conf.FlagCreatePairsOff]
        fields.append((name, kind, field(default=defaults[name])))
    return make_dataclass("Common", fields)


@_with_help
@dataclass
class Sample:
    """Flags of `sample`."""

    run_dir: Annotated[Path | None, tyro.conf.arg(name="run")] = None
    """Folder of a run. It provides the model, weights, prompts, images and settings that no other flag
    gives."""
    images: Annotated[list[Path], tyro.conf.arg(metavar="PATH [PATH ...]", help_behavior_hint="")] = field(
        default_factory=list
    )
    """For img2img: folders or files of input images, whose names the results keep. If left out, the images
    of the run."""
    prompt: str | None = None
    """Prompt of all images. If left out, the run's prompts, or the first line of NAME.txt."""
    count: int | None = None
    """Number of images without --images. If left out, 4."""
    output_dir: Path = Path("samples")
    """Output folder, which must be empty."""
    overwrite: bool = False
    """Allow an output folder that is not empty, and replace files of the same name."""
    seed: int = 0
    """Seed of the noise."""
    noise_strength: float | None = None
    """For img2img: fraction of the schedule that is run. If left out, the run's, or 0.2."""
    steps: int | None = None
    """Number of denoising steps of the whole schedule. If left out, the run's, or 50."""
    guidance_scale: float | None = None
    """Scale of classifier-free guidance. If left out, the run's, or 5."""
    resolution: int | None = None
    """Side of the images in pixels. If left out, the run's, or the model's own."""
    keep_size: bool = False
    """For img2img: keep image sizes that the model can take, instead of resizing all to the model's own."""
    batch_size: int = 4
    """Number of images that are generated together; it does not change the images."""
    model: str | None = None
    """Model as a folder or a name on the hub. If left out, the run's, or tiny-sd."""
    lora: Path | None = None
    """Folder of LoRA weights. If it is inside a run's folder, the run's settings are used."""

    @functools.cached_property
    def policy(self) -> Policy:
        """The model, with the weights that a run trained if one is given."""
        return find_policy(self.run_dir, self.model, self.lora)

    @property
    def starts_from_images(self) -> bool:
        """Whether this is img2img, from the given images or those of the run."""
        return bool(self.images) or "images" in self.policy.record

    def check(self) -> None:
        """Raise a ValueError for values that cannot work, and for flags that exclude each other."""
        check_numbers(self, count=1, steps=1, batch_size=1, resolution=1)
        if self.guidance_scale is not None and not 0 <= self.guidance_scale < math.inf:
            raise ValueError(
                f"--guidance-scale {self.guidance_scale} must be 0 or more: 1 turns guidance off, 5 is usual"
            )
        if self.resolution is not None and self.keep_size:
            raise ValueError("--keep-size and --resolution contradict each other: leave one of them out")
        for place in self.images:
            if not place.exists():
                raise ValueError(f"--images {place} does not exist: give folders or files of images")
        if self.images and self.count is not None:
            raise ValueError("--count cannot be combined with --images: leave one of them out")
        record = self.policy.record
        trained_on = record.get("images", {}).get("folder")
        if self.starts_from_images:
            if not self.images and not Path(trained_on).is_dir():
                raise ValueError(f"the run's folder of images, {trained_on}, no longer exists: give --images")
            return
        if self.noise_strength is not None or self.keep_size:
            flag = "--keep-size" if self.keep_size else "--noise-strength"
            raise ValueError(f"{flag} needs input images: give --images too")
        if record.get("start", "noise") != "noise":
            raise ValueError("the run got its images from a Python function: give --images")
        check_no_label(self.prompt)
        if self.prompt is None and "prompts" not in record:
            raise ValueError(
                "there is no prompt and no image: give --prompt, --images, or the folder of a run as --run"
            )


@_with_help
@dataclass
class Plot:
    """Plot rewards and other curves of runs, and for a single run its first and latest images."""

    runs: Annotated[
        tyro.conf.Positional[list[Path]], tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="")
    ]
    """Folders of finished or unfinished runs. Several runs share the panels of the figure, but runs of
    different rewards have a panel of the reward each."""
    output: Path | None = None
    """Output file, whose ending sets the format. If left out, plot.png: in the folder of a single run, and
    for several runs in the current folder."""
