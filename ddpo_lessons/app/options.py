"""Flags of the commands: what they are, and every check of them that needs no torch.

Flags, their types and their help are the fields below and those of `DDPOConfig`, as tyro reads them.
"""

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from ddpo_lessons.algorithms import make_algorithm, parse_algorithm
from ddpo_lessons.app import reward_flag
from ddpo_lessons.app.flags import refused_by
from ddpo_lessons.app.presets import PRESETS, Preset, divide, world_size
from ddpo_lessons.app.runs import Policy, check_model, find_policy
from ddpo_lessons.config import LORA_FILE, DDPOConfig
from ddpo_lessons.data.prompts import PROMPTS, from_file, get_prompts

# Names in a registry whose module loads torch; tests/test_cli.py compares them.
Damage = Literal["noisy", "blurry", "foggy", "blocky", "faded", "dark"]

JUDGE = (
    "A second reward, written as --reward is, which is recorded as reward/judge and never trained on: where "
    "it falls while the reward rises, the reward is being gamed."
)
# The fields of DDPOConfig that most runs set; `--help` shows the others below them.
BASIC = (
    "num_epochs", "seed", "output_dir", "overwrite", "resume_from", "mixed_precision", "sample_num_steps",
    "sample_guidance_scale", "sample_batch_size", "sample_num_batches_per_epoch", "sample_group_size",
    "train_batch_size", "train_gradient_accumulation_steps", "train_learning_rate", "train_lora_rank",
    "train_lora_from",
)  # fmt: skip
SHORT = {"train_learning_rate": ("--lr",)}
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
        about = tyro.conf.arg(
            help=" ".join(str(docs[name]).split()), help_behavior_hint=f"({default})", aliases=SHORT.get(name)
        )
        written = (JSON,) if get_origin(hints[name]) is dict else ()
        flags[name] = Annotated[hints[name], about, *written]
    return TypedDict("Settings", flags, total=False)  # type: ignore[operator]


def _one_of(names: Iterable[Any], default: Any = None) -> Any:
    """Allow these values only."""
    choice = tyro.extras.literal_type_from_choices(names)
    return tyro.conf.arg(constructor=choice, help_behavior_hint=f"(default: {default})")


def _in_one_line(kind: type) -> type:
    """Join the lines of fields' docstrings: tyro keeps a break before a line that is indented."""
    for doc in docstring_parser.parse_from_object(kind).params:
        text = doc.description or ""
        if "\n" in text:
            about = tyro.conf.arg(help=" ".join(text.split()))
            kind.__annotations__[doc.arg_name] = Annotated[kind.__annotations__[doc.arg_name], about]
    return kind


def check_packages(config: DDPOConfig) -> None:
    """Raise an ImportError for a package that the settings need and that is not installed."""
    adam = "bitsandbytes" if config.train_use_8bit_adam else None
    for name, package in (("log_with", config.log_with), ("train_use_8bit_adam", adam)):
        ways = ["tensorboard", "tensorboardX"] if package == "tensorboard" else [package]
        if package and not any(importlib.util.find_spec(str(way)) for way in ways):
            raise ImportError(f"{name} needs a package that is not installed: pip install {package}")


def check_resolution(resolution: int | None) -> None:
    """Refuse a side that no image has; the model's own rules are looked at once it is loaded."""
    if resolution is not None and resolution < 1:
        raise ValueError(f"--resolution {resolution}: use a number of pixels, such as 512")


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

    def check(self) -> None:
        """Raise a ValueError for numbers that no demo can have."""
        for name, least in (("seed", 0), ("epochs", 1), ("eval_images", 1)):
            if (number := getattr(self, name)) < least:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} {number}: use a whole number of at least {least}")
        for place in (self.output_dir, *self.output_dir.parents):
            if place.is_file():  # found out after minutes otherwise
                raise ValueError(f"--output-dir {self.output_dir}: {place} is a file; choose another folder")


@dataclass
@_in_one_line
class Train:
    """Train a model on a reward; on several devices: accelerate launch -m ddpo_lessons.app.cli train ..."""

    basic: Annotated[dict[str, Any], tyro.conf.arg(constructor=_settings(BASIC))]
    """Fields of DDPOConfig."""
    advanced: Annotated[dict[str, Any], tyro.conf.arg(constructor=_settings(ADVANCED))]
    """More fields of DDPOConfig."""
    config: Path | None = None
    """Flags in a file: YAML, or the config.json of a run, to make another one like it; flags override it."""
    model: str | None = None
    """Folder or name on the hub; tiny-sd, tiny-sd3 or tiny-zoo, which are in the package; tiny-sd if no
    preset says another."""
    preset: Annotated[str | None, _one_of(PRESETS)] = None
    """Named settings, which every other flag overrides; for an embedded model its own."""
    algorithm: str | None = None
    """How rewards become updates: ddpo, branching, rwr, flow_grpo, awm, nft, pepg, dpo, draft or refl, with
    settings of its own as in nft:beta=0.1,max_decay=0; or a subclass of Algorithm of your own, FILE.py:CLASS
    or MODULE:CLASS, whose settings follow a second colon, my.py:RLOO:scale=2; the preset's, or ddpo."""
    reward: Annotated[str | None, tyro.conf.arg(help=reward_flag.help_text(), metavar="REWARD")] = None
    judge: Annotated[str | None, tyro.conf.arg(help=JUDGE, metavar="REWARD")] = None
    prompts: str | None = None
    """digit_world, digit_world_left_out, zoo, zoo_left_out, animals, activities; or a file: one a line,
    JSON, JSON lines, or a table with a column named prompt."""
    prompt: str | None = None
    """One prompt for everything."""
    images: Path | None = None
    """Img2img, or images for a model that edits: a folder of images, or of subfolders named by label;
    NAME.txt beside NAME.png: its prompts."""
    noise_strength: float | None = None
    """With --images: share of the schedule that is run; the preset's, or 0.2."""
    resolution: int | None = None
    """Side of the images, in pixels; the preset's, or the model's own."""
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
        for name in ("algorithm", "reward", "judge", "prompts"):
            if getattr(self, name) == "":
                raise ValueError(f"--{name} is empty: leave it out, or say which, as --help does")
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
        check_resolution(self.resolution)
        if self.noise_strength is not None and not 0 < self.noise_strength <= 1:
            raise ValueError(f"--noise-strength {self.noise_strength} must lie in (0, 1]")
        if self.severity is not None and not (self.damage or preset.damages):
            raise ValueError("--severity says how strong damage is: give --damage too")
        if not (self.reward or preset.reward):
            raise ValueError("a model without a preset needs a reward: give --reward")
        terms = self.choose_rewards(preset)
        config = self.make_config(preset)
        config.check_epoch(world_size())
        if self.images is not None and not self.images.is_dir():
            raise ValueError(f"--images {self.images} is not a folder")
        source = config.resume_from
        if source not in ("", "auto", "latest") and not Path(source, "state.json").is_file():
            raise ValueError(f"--resume-from {source} holds no state.json: give the folder of a checkpoint")
        if config.train_lora_from and not Path(config.train_lora_from, LORA_FILE).is_file():
            raise ValueError(f"--train-lora-from {config.train_lora_from} holds no {LORA_FILE}")
        check_packages(config)
        self.check_gpu_memory()
        if self.judge is not None:
            with refused_by(reward="judge"):
                reward_flag.load_functions(reward_flag.parse(self.judge))
        reward_flag.load_functions(terms)  # late, since a user's file may need torch
        if self.images is None:
            self.choose_prompts(preset, config.seed)  # late, since those of the digit world need torch
        make_algorithm(self.choose_algorithm(preset)).check(config)  # last, since all of them do

    def choose_algorithm(self, preset: Preset) -> str:
        """Return the algorithm asked for, or the preset's."""
        return self.algorithm or preset.algorithm

    def choose_resolution(self, preset: Preset) -> int | None:
        """Return the side asked for, or the preset's; None for the model's own."""
        return self.resolution or preset.resolution

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
        if self.images is not None and not self.validation.is_dir():
            raise ValueError(
                f"--validation {self.validation} is not a folder: give one of images, as --images"
            )
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
            try:
                return from_file(name, seed)
            except ValueError as error:
                raise ValueError(f"--prompts {error}") from error
        if name not in PROMPTS:
            raise ValueError(f"--prompts {name} is neither a file nor one of {', '.join(PROMPTS)}")
        return get_prompts(name, seed)


@dataclass
class Preflight(Train):
    """Do a run's first epoch aside, with train's flags, and look for faults that raise no error."""


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
        check_resolution(self.resolution)
        if self.resolution is not None and self.keep_size:
            raise ValueError("--keep-size and --resolution are two sizes: leave one of them out")
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
class Plot:
    """Draw the rewards and other curves of runs, and of one run its first and latest images."""

    runs: tyro.conf.Positional[list[Path]]
    """Folders of runs, also of those that still go on; several share the panels."""
    output: Path | None = None
    """The file, whose ending is its format; plot.png in the run's folder, or for several runs here."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("plot needs the folder of a run")


@dataclass
class Doctor:
    """Say what works on this machine."""
