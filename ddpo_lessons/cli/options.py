"""Flags of the commands, and every check of them that needs no model.

Flags, their types and their help are the fields below and those of `DDPOConfig`, as tyro reads them.
"""

import functools
import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from ddpo_lessons.algorithms import ALGORITHMS, make_algorithm
from ddpo_lessons.cli import reward_flag
from ddpo_lessons.cli.presets import OF_MODELS, PRESETS, Preset, divide, world_size
from ddpo_lessons.cli.runs import Policy, check_model, find_policy
from ddpo_lessons.config import LORA_FILE, DDPOConfig
from ddpo_lessons.damages import DAMAGES
from ddpo_lessons.data.prompts import from_file
from ddpo_lessons.named_prompts import PROMPTS, get_prompts

JSON = PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda words: json.loads(words[0]),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)


def _settings() -> Any:
    """Make the type of a dict of fields of `DDPOConfig`; tyro puts those in that are given."""
    hints, defaults = get_type_hints(DDPOConfig), DDPOConfig().to_dict()
    preset = PRESETS["digit_world"].config  # of tiny-sd, where no preset is asked for
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
    return TypedDict("Settings", flags, total=False)  # type: ignore[operator]


def check_packages(config: DDPOConfig) -> None:
    """Raise an ImportError for a package that the settings need and that is not installed."""
    adam = "bitsandbytes" if config.train_use_8bit_adam else None
    for name, package in (("log_with", config.log_with), ("train_use_8bit_adam", adam)):
        ways = ["tensorboard", "tensorboardX"] if package == "tensorboard" else [package]
        if package and not any(importlib.util.find_spec(str(way)) for way in ways):
            raise ImportError(f"{name} needs a package that is not installed: pip install {package}")


def check_output(folder: Path) -> None:
    """Refuse a folder that is a file, or would lie in one, by a ValueError."""
    for place in (folder, *folder.parents):
        if place.is_file():
            raise ValueError(f"--output-dir {folder}: {place} is a file; choose another folder")


def check_numbers(flags: Any, **least: int) -> None:
    """Refuse a number that is given and below its least value, by a ValueError."""
    for name, low in least.items():
        if (number := getattr(flags, name)) is not None and number < low:
            raise ValueError(f"{name}={number}: use a number of at least {low}")


# ------------------------------------------------------------------------------------------- commands
ALGORITHM = (
    f"How rewards become updates: {', '.join(ALGORITHMS)}, with settings of its own as in "
    "nft:beta=0.1,max_decay=0; or a subclass of Algorithm of your own, FILE.py:CLASS or MODULE:CLASS, whose "
    "settings follow a second colon, my.py:RLOO:scale=2; the preset's, or ddpo."
)
NAMED = (
    f"Named settings, which every other flag overrides: {', '.join(PRESETS)}; for an embedded model its own."
)
DAMAGE = f"With --images: damage to clean images, one of {', '.join(DAMAGES)}; the preset's if not given."
PROMPT_SOURCES = (
    f"{', '.join(PROMPTS)}; or a file: one a line, JSON, JSON lines, or a table with a column named prompt."
)


@dataclass
class Demo:
    """Flags of `demo`."""

    algorithm: Literal["branching", "ddpo"] = "branching"
    """Algorithm; each has a schedule of its own."""
    seed: int = 0
    """Seed of training."""
    epochs: int | None = None
    """Epochs of training; the schedule's if not given."""
    eval_images: int = 500
    """Test pictures judged."""
    output_dir: Path = Path("demo-run")
    """Folder."""

    def check(self) -> None:
        """Raise a ValueError for numbers that no demo can have."""
        check_numbers(self, seed=0, epochs=1, eval_images=1)
        check_output(self.output_dir)  # which is written after minutes


@dataclass
class Train:
    """Flags of `train`."""

    settings: Annotated[dict[str, Any], tyro.conf.arg(constructor=_settings())]
    """Fields of DDPOConfig."""
    config: Path | None = None
    """Flags in a file: YAML, or the config.json of a run, to make another one like it; flags override it."""
    model: str | None = None
    """Folder or name on the hub; tiny-sd, tiny-sd3 or tiny-zoo, which are in the package; the preset's, or
    tiny-sd."""
    preset: Annotated[str | None, tyro.conf.arg(help=NAMED)] = None
    algorithm: Annotated[str | None, tyro.conf.arg(help=ALGORITHM)] = None
    reward: Annotated[str | None, tyro.conf.arg(help=reward_flag.help_text())] = None
    judge: str | None = None
    """A second reward, written as --reward is, which is recorded as reward/judge and never trained on: where
    it falls while the reward rises, the reward is being gamed."""
    prompts: Annotated[str | None, tyro.conf.arg(help=PROMPT_SOURCES)] = None
    prompt: str | None = None
    """One prompt for everything."""
    images: Path | None = None
    """Img2img, or images for a model that edits: a folder of images, or of subfolders named by label;
    NAME.txt beside NAME.png: its prompts."""
    noise_strength: float | None = None
    """With --images: share of the schedule that is run; the preset's, or 0.2."""
    resolution: int | None = None
    """Side of the images, in pixels; the preset's, or the model's own."""
    damage: Annotated[tuple[str, ...] | None, tyro.conf.arg(help=DAMAGE)] = None
    severity: tuple[Literal[1, 2, 3, 4, 5], ...] | None = None
    """Of the damage; any of them if not given."""
    validation: Path | None = None
    """Not trained on, but made and scored from the same noise again and again: a folder of images as those of
    --images; without --images a file, a prompt a line."""
    validation_freq: int = 10
    """Epochs from one validation to the next; there is one before the first and after the last."""
    dry_run: bool = False
    """Say what the run would do and count, and end; no weights are loaded."""

    @property
    def preset_name(self) -> str | None:
        """The preset asked for; without one, that of an embedded model."""
        return self.preset or OF_MODELS.get(self.model or "tiny-sd")

    @functools.cached_property
    def chosen(self) -> Preset:
        """The preset, if any, with the parts that flags replace."""
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
        """Raise a ValueError for flags that do not go together, and for settings that cannot work."""
        for name in ("algorithm", "reward", "judge", "prompts"):
            if getattr(self, name) == "":
                raise ValueError(f"--{name} is empty: leave it out, or say which, as --help does")
        if self.model is not None:
            check_model(self.model)
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset={self.preset} does not exist: use one of {', '.join(PRESETS)}")
        if unknown := [name for name in self.damage or () if name not in DAMAGES]:
            raise ValueError(f"damage={unknown[0]} does not exist: use one of {', '.join(DAMAGES)}")
        if self.images is None:
            for name in ("noise_strength", "damage", "severity"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')} is about images: give --images too")
            if self.chosen.noise_strength is not None:
                raise ValueError(f"--preset {self.preset} trains on images: give --images FOLDER")
        if self.prompts is not None and (self.images, self.prompt) != (None, None):
            raise ValueError("--prompts does not go with --prompt or --images: leave it out")
        self.check_validation()
        check_numbers(self, resolution=1, validation_freq=1)
        if self.noise_strength is not None and not 0 < self.noise_strength <= 1:
            raise ValueError(f"--noise-strength {self.noise_strength} must lie in (0, 1]")
        if self.severity is not None and not self.chosen.damages:
            raise ValueError("--severity says how strong damage is: give --damage too")
        if not self.chosen.reward:
            raise ValueError("a model without a preset needs a reward: give --reward")
        terms = reward_flag.parse(self.chosen.reward)
        config = self.make_config()
        config.check_epoch(world_size())
        if self.images is not None and not self.images.is_dir():
            raise ValueError(f"--images {self.images} is not a folder")
        source = config.resume_from
        if source not in ("", "auto", "latest") and not Path(source, "state.json").is_file():
            raise ValueError(f"--resume-from {source} holds no state.json: give the folder of a checkpoint")
        if config.train_lora_from and not Path(config.train_lora_from, LORA_FILE).is_file():
            raise ValueError(f"--train-lora-from {config.train_lora_from} holds no {LORA_FILE}")
        check_packages(config)
        if self.judge is not None:
            reward_flag.load_functions(reward_flag.parse(self.judge))
        reward_flag.load_functions(terms)  # late, since a user's file may take long to load
        if self.images is None:
            self.choose_prompts(config.seed)
        make_algorithm(self.chosen.algorithm).check(config)

    def check_validation(self) -> None:
        """Refuse what cannot be validated on."""
        if self.validation is None:
            return
        if self.images is None and not self.validation.is_file():
            raise ValueError(f"--validation {self.validation} is not a file: give one, with a prompt a line")
        if self.images is not None and not self.validation.is_dir():
            raise ValueError(f"--validation {self.validation} is not a folder of images, as --images is")
        if self.images is not None and self.validation.resolve() == self.images.resolve():
            raise ValueError(f"--validation {self.validation} is what is trained on: keep some images apart")

    def make_config(self) -> DDPOConfig:
        """Return the preset's settings for one of the processes, overridden by those that were given."""
        settings = divide(self.chosen, world_size(), self.settings)
        if self.settings.get("train_lora_from"):  # the adapter's own, and not the preset's, are the defaults
            settings = {name: value for name, value in settings.items() if "train_lora_" not in name}
        if self.algorithm is not None:  # which may not use all that the preset's does
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
            raise ValueError("a model without a preset needs prompts: give --prompts, --prompt or --images")
        return from_file(name, seed) if Path(name).is_file() else get_prompts(name, seed)


@dataclass
class Preflight(Train):
    """Flags of `preflight`: those of `train`."""


@dataclass
class Sample:
    """Flags of `sample`."""

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
    resolution: int | None = None
    """Side of the images, in pixels; the run's, or the model's own."""
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

    @functools.cached_property
    def policy(self) -> Policy:
        """The model with what its run trained, if there is a run."""
        return find_policy(self.run_dir, self.model, self.lora)

    @property
    def starts_from_images(self) -> bool:
        """Whether this is img2img: of images given, or else of those of the run."""
        return bool(self.images) or "images" in self.policy.record

    def check(self) -> None:
        """Raise a ValueError for values that cannot work and for flags that do not go together."""
        check_numbers(self, count=1, steps=1, batch_size=1, resolution=1)
        if self.guidance_scale is not None and not 0 <= self.guidance_scale < math.inf:
            raise ValueError(f"--guidance-scale {self.guidance_scale}: use 1 for none, and 5 or so for more")
        if self.resolution is not None and self.keep_size:
            raise ValueError("--keep-size and --resolution are two sizes: leave one of them out")
        for place in self.images:
            if not place.exists():
                raise ValueError(f"--images {place} does not exist")
        if self.images and self.count is not None:
            raise ValueError("--count is for images from noise, or a run's: leave it out, or --images")
        record = self.policy.record
        trained_on = record.get("images", {}).get("folder")
        if self.starts_from_images:
            if not self.images and not Path(trained_on).is_dir():
                raise ValueError(f"the run was trained on {trained_on}, which is not there: give --images")
            return
        if self.noise_strength is not None or self.keep_size:
            raise ValueError("--noise-strength and --keep-size are about images: give --images too")
        if record.get("start", "noise") != "noise":
            raise ValueError("the run was trained on images of a Python function: give --images")
        if self.prompt is None and "prompts" not in record:
            raise ValueError(
                "there is nothing to start from: give --prompt or --images, or the --run of train"
            )


@dataclass
class Plot:
    """Draw the rewards and other curves of runs, and of one run its first and latest images."""

    runs: tyro.conf.Positional[list[Path]]
    """Folders of runs, also of those that still go on; several share the panels."""
    output: Path | None = None
    """The file, whose ending is its format; plot.png in the run's folder, or for several runs here."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("plot needs the folder of a run")
