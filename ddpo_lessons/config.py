"""Lesson 06: every number of a run, under TRL's names, checked when it is set.

Fields and defaults are those of TRL 0.21's `DDPOConfig`, which people's scripts hold; fields that are new say
why they exist.
"""

import dataclasses
import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_origin, get_type_hints

from ddpo_lessons.plan import EpochPlan

LORA_FILE = "pytorch_lora_weights.safetensors"  # of the adapter, as diffusers names it
RUN = "run"  # beside the fields in config.json: what else a run was made with, see training/record.py
FORWARD_NUMEL = 64 * 256  # elements of latents that a forward pass is filled up to, where its size is 0


@dataclass
class DDPOConfig:
    """Settings of `DDPOTrainer` and `ImageDDPOTrainer`.

    Batch sizes count samples per process. Wrong values raise a ValueError that names the field.
    """

    # --- the run
    exp_name: str = "ddpo"
    """Name of the experiment, and of the run's folder unless `run_name` or `output_dir` is set."""
    run_name: str = ""
    """Name of this run; its folder is `logdir/run_name` (or `logdir/exp_name`) unless `output_dir` is set."""
    seed: int = 0
    """Decides every random number: noise, actions, shuffles, LoRA's start."""
    log_with: str | None = None
    """"tensorboard" or "wandb": a copy of metrics.jsonl and images/, which are always written. A tracker that
    fails is warned of once and left out for the rest of the run."""
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to accelerate's `init_trackers`."""
    accelerator_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to `Accelerator`."""
    project_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to accelerate's `ProjectConfiguration`; a `project_dir` in it is the run's folder, unless
    `output_dir` is set."""
    tracker_project_name: str = "ddpo_lessons"
    """Project under which trackers file the run."""
    logdir: str = "logs"
    """Folder that holds the folders of runs."""
    output_dir: str = ""
    """The run's own folder. New: says in one word what TRL spreads over three fields."""
    overwrite: bool = False
    """Replace a run that the folder already holds. New: without it such a folder is refused."""
    num_epochs: int = 100
    """Number of epochs; each samples once and trains `train_num_inner_epochs` times on what it sampled."""
    save_freq: int = 1
    """A checkpoint every so many epochs, and always after the last."""
    num_checkpoint_limit: int = 5
    """How many checkpoints are kept."""
    image_grid_freq: int = 1
    """A grid of the first images every so many epochs, also for the tracker; 0 for none. New: grids need no
    tracker."""
    price_per_hour: float = 0.0
    """Price of an hour on the machine, in any currency: the line after the first epoch then also says what
    the run costs. New."""
    mixed_precision: str = "no"
    """"no", "bf16" or "fp16": precision of the networks. Latents and log-probs are float32 whatever it is.
    TRL's default is fp16, which asks for a GPU."""
    allow_tf32: bool = True
    """Allow TF32 matrix products on NVIDIA GPUs."""
    torch_compile: bool = False
    """Compile the UNet (on the CPU with a C++ compiler): the first epoch takes minutes more, all later ones
    less. New: if compiled gradients are not those of the UNet, as happens, the run ends before a step."""
    resume_from: str = ""
    """"auto" continues from the newest checkpoint if there is one, and starts the run otherwise; "latest"
    requires a checkpoint; a path names one. What the run did after it is dropped once training goes on."""

    # --- sampling
    sample_num_steps: int = 50
    """Denoising steps of the whole schedule."""
    sample_eta: float = 1.0
    """η of DDIM; 0 is deterministic and has no log-probability, so it cannot be trained."""
    sample_guidance_scale: float = 5.0
    """Classifier-free guidance; at 1 and below a step takes one forward pass."""
    sample_batch_size: int = 1
    """Samples that are scored together."""
    sample_num_batches_per_epoch: int = 2
    """Sampling batches per epoch."""
    sample_group_size: int = 1
    """Rollouts of each context from one initial noise. New: within such a group only the actions explain the
    rewards, so advantages are normalised in it (as GRPO does). Must divide the samples of an epoch."""
    sample_micro_batch_size: int = 0
    """Samples that are denoised together, in whole batches; 0 picks: one batch, and more where latents are
    small. New, see `train_micro_batch_size`."""
    negative_prompts: str = ""
    """What guidance leads away from."""

    log_prob_reduction: Literal["mean", "sum"] = "mean"
    """How a latent's dimensions make one log-probability. New: the peers' mean ties the meaning of the clip
    range to the latent's size; with "sum" the ratio is the true one, and 1e-4 is far too small."""

    # --- training
    train_batch_size: int = 1
    """Samples of one minibatch."""
    train_use_lora: bool = True
    """Train a LoRA adapter; False trains the whole UNet. New: in TRL the pipeline wrapper decides."""
    train_lora_rank: int = 4
    """Rank of the adapter. New: the peers fix 4."""
    train_lora_alpha: int = 4
    """Scale of the adapter times its rank. New: the peers fix 4."""
    train_lora_target_modules: tuple[str, ...] = ("to_k", "to_q", "to_v", "to_out.0")
    """Layers that get an adapter. New: the peers fix these."""
    train_lora_from: str = ""
    """Folder of LoRA weights, such as `RUN/lora`, that a new run starts from, with a fresh optimizer. Rank,
    alpha and layers are taken from there; those that are set here must agree. New: for another learning rate,
    reward or strength in a second run."""
    train_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time. New: for 512 px on 10 GB."""
    train_use_8bit_adam: bool = False
    """AdamW of bitsandbytes."""
    train_learning_rate: float = 3e-4
    """Learning rate."""
    train_learning_rate_schedule: str = "constant"
    """"constant", "linear" or "cosine", from `train_learning_rate`: the last two end at 0 with the last of
    `num_epochs`. New: as diffusers' `get_scheduler`; a run that goes on with another `num_epochs` follows the
    new curve."""
    train_learning_rate_warmup_steps: int = 0
    """Optimizer steps in which the learning rate rises from 0. New, see `train_learning_rate_schedule`."""
    train_adam_beta1: float = 0.9
    """Adam's β₁."""
    train_adam_beta2: float = 0.999
    """Adam's β₂."""
    train_adam_weight_decay: float = 1e-4
    """AdamW's weight decay."""
    train_adam_epsilon: float = 1e-8
    """Adam's ε."""
    train_gradient_accumulation_steps: int = 1
    """Minibatches of one optimizer step, each with all its timesteps."""
    train_max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    train_ema_decay: float = 0.0
    """Keep an average of the weights, decay average + (1 - decay) new after every optimizer step. It is what
    is validated, and saved for other tools; the newest weights sample and learn. New; 0 for none."""
    train_num_inner_epochs: int = 1
    """How often the samples of an epoch are trained on."""
    train_cfg: bool = True
    """Train the guided policy that sampled. False is refused under guidance: it trains another policy."""
    train_adv_clip_max: float = 5.0
    """Advantages are clipped to this magnitude."""
    train_clip_range: float = 1e-4
    """PPO's clip range of the ratio."""
    train_kl_coefficient: float = 0.0
    """Weight of the KL from the policy to what it was before training. New: holds back reward hacking, at the
    price of one more forward pass (DPOK, arXiv 2305.16381)."""
    train_timestep_fraction: float = 1.0
    """Share of each sample's timesteps, drawn at random, that is trained on."""
    train_micro_batch_size: int = 0
    """(sample, timestep) pairs of one forward pass; 0 picks: `train_batch_size`, and more where latents are
    small. New: a knob of speed and memory that changes no result in float32. In bf16 and fp16 networks round
    differently in batches of different sizes: the `sample_micro_batch_size` that sampled replays exactly."""

    # --- advantages
    per_prompt_stat_tracking: bool = False
    """Normalise rewards per prompt (or per `metadata["id"]`) instead of over the epoch."""
    per_prompt_stat_tracking_buffer_size: int = 16
    """Rewards remembered per prompt."""
    per_prompt_stat_tracking_min_count: int = 16
    """Below so many rewards a prompt uses the epoch's statistics."""

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        """Name the field that an unknown one may have meant; Python's own TypeError does not."""
        known = {spec.name for spec in dataclasses.fields(cls)}
        for name in fields.keys() - known:
            raise TypeError(f"{cls.__name__} has no field {name!r}{_similar(name)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every field."""
        if isinstance(self.train_lora_target_modules, list):  # as JSON and argument parsers give it
            self.train_lora_target_modules = tuple(self.train_lora_target_modules)
        self.check()

    def check(self) -> None:
        """Raise a ValueError for the first field whose value cannot work, naming it and the remedy."""
        _check_types(self)
        _check_values(self)
        _check_combinations(self)
        self.epoch_plan(num_timesteps=1)

    @property
    def run_dir(self) -> Path:
        """The folder that everything of the run goes to."""
        if self.output_dir:
            return Path(self.output_dir)
        return Path(
            self.project_kwargs.get("project_dir") or Path(self.logdir, self.run_name or self.exp_name)
        )

    def epoch_plan(self, num_timesteps: int, num_processes: int = 1) -> EpochPlan:
        """Return the arithmetic of an epoch with that many trained timesteps."""
        try:
            return EpochPlan(
                sample_batch_size=self.sample_batch_size,
                num_batches_per_epoch=self.sample_num_batches_per_epoch,
                train_batch_size=self.train_batch_size,
                gradient_accumulation_steps=self.train_gradient_accumulation_steps,
                num_inner_epochs=self.train_num_inner_epochs,
                num_timesteps=num_timesteps,
                num_processes=num_processes,
            )
        except ValueError as error:  # names the plan's fields, two of which have a longer name here
            message = str(error).replace("gradient_accumulation_steps", "train_gradient_accumulation_steps")
            message = message.replace("num_batches_per_epoch", "sample_num_batches_per_epoch")
            raise ValueError(message) from None

    def check_epoch(self, num_processes: int) -> None:
        """Raise a ValueError if the samples of all processes are not whole groups, or teach nothing."""
        samples = self.epoch_plan(1, num_processes).total_samples
        if samples % self.sample_group_size:
            raise ValueError(
                f"sample_group_size={self.sample_group_size} does not divide the {samples} samples of an "
                "epoch: change it, sample_batch_size or sample_num_batches_per_epoch"
            )
        if samples == 1 and not self.per_prompt_stat_tracking:
            raise ValueError(
                "an epoch of one sample teaches nothing, for its reward is its own mean: raise "
                "sample_batch_size or sample_num_batches_per_epoch"
            )

    @property
    def shared_starts(self) -> int:
        """How many rollouts side by side begin in one state: a group, where batches hold whole ones."""
        size = self.sample_group_size
        return size if self.sample_batch_size % size == 0 else 1

    def micro_batch_sizes(self, latents_numel: int) -> tuple[int, int]:
        """Return how many samples are denoised, and how many pairs trained on, in one forward pass.

        Latents of a sample have so many elements, C h w. The samples are a multiple of `sample_batch_size`.
        """
        fitting = FORWARD_NUMEL // latents_numel
        batches = max(1, (self.sample_micro_batch_size or fitting) // self.sample_batch_size)
        pairs = self.train_micro_batch_size or max(self.train_batch_size, fitting)
        return min(batches, self.sample_num_batches_per_epoch) * self.sample_batch_size, pairs

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as they go into config.json; objects in a `*_kwargs` become their names."""
        fields = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        return json.loads(json.dumps(fields, default=str))

    def decisive_fields(self) -> dict[str, Any]:
        """Return the fields that decide the weights, which a continued run must keep."""
        return {name: value for name, value in self.to_dict().items() if name not in _FREE}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make a config of config.json's fields; an unknown field is a ValueError."""
        try:
            return cls(**{name: value for name, value in values.items() if name != RUN})
        except TypeError as error:
            raise ValueError(f"{error}: was this config written by another version?") from error


def _similar(name: str) -> str:
    """Say which field may have been meant."""
    names = [spec.name for spec in dataclasses.fields(DDPOConfig)]
    ends = [field for field in names if field.endswith(name)][:3]  # steps, learning_rate
    close = ends or difflib.get_close_matches(name, names, n=2)
    return f" (perhaps {' or '.join(close)})" if close else ""


# What may differ between a run and its continuation without changing a weight by more than rounding.
_FREE = {
    "exp_name", "run_name", "log_with", "tracker_kwargs", "accelerator_kwargs", "project_kwargs",
    "tracker_project_name", "logdir", "output_dir", "overwrite", "num_epochs", "save_freq",
    "num_checkpoint_limit", "image_grid_freq", "allow_tf32", "resume_from", "sample_micro_batch_size",
    "torch_compile", "train_lora_from", "train_learning_rate", "train_learning_rate_schedule",
    "train_learning_rate_warmup_steps", "train_micro_batch_size", "train_gradient_checkpointing",
    "price_per_hour",
}  # fmt: skip
_AT_LEAST_ONE = (
    "num_epochs", "save_freq", "num_checkpoint_limit", "sample_num_steps", "sample_batch_size",
    "sample_num_batches_per_epoch", "sample_group_size", "train_batch_size", "train_lora_rank",
    "train_lora_alpha", "train_gradient_accumulation_steps", "train_num_inner_epochs",
    "per_prompt_stat_tracking_buffer_size", "per_prompt_stat_tracking_min_count",
)  # fmt: skip
_POSITIVE = (
    "sample_eta", "train_learning_rate", "train_adam_epsilon", "train_max_grad_norm", "train_adv_clip_max",
    "train_clip_range",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "seed", "image_grid_freq", "price_per_hour", "sample_guidance_scale", "train_adam_weight_decay",
    "sample_micro_batch_size", "train_micro_batch_size", "train_kl_coefficient",
    "train_learning_rate_warmup_steps",
)  # fmt: skip
_CHOICES = {
    "mixed_precision": ("no", "bf16", "fp16"),
    "log_with": (None, "tensorboard", "wandb"),
    "log_prob_reduction": ("mean", "sum"),
    "train_learning_rate_schedule": ("constant", "linear", "cosine"),
}
# What the trainer decides itself.
_RESERVED = (
    "mixed_precision", "log_with", "project_config", "gradient_accumulation_steps", "dynamo_backend",
    "dynamo_plugin",
)  # fmt: skip


def _check_types(config: DDPOConfig) -> None:
    # Not the fields' own `type`: HfArgumentParser, which TRL's scripts use, changes it in place.
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind is int and not (is_number and isinstance(value, int)):
            raise ValueError(f"{name}={value!r} must be a whole number")
        if kind is float and not (is_number and abs(value) < float("inf")):
            raise ValueError(f"{name}={value!r} must be a finite number")
        if kind is bool and not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")
        if kind is str and not isinstance(value, (str, Path)):
            raise ValueError(f"{name}={value!r} must be text")
        if get_origin(kind) is dict and not isinstance(value, dict):
            raise ValueError(f"{name}={value!r} must be a dict")
    modules = config.train_lora_target_modules
    is_sequence = isinstance(modules, (tuple, list)) and bool(modules)
    if not is_sequence or not all(isinstance(name, str) for name in modules):
        raise ValueError(f"train_lora_target_modules={modules!r} must be a tuple of names")


def _check_values(config: DDPOConfig) -> None:
    values = vars(config)
    for name in _AT_LEAST_ONE:
        if values[name] < 1:
            raise ValueError(f"{name}={values[name]} must be at least 1")
        if values[name] >= 2**31:  # no machine ends such a run, and torch's errors name no field
            raise ValueError(f"{name}={values[name]} must be less than 2**31: take a smaller number")
    for name in _AT_LEAST_ZERO:
        if values[name] < 0:
            raise ValueError(f"{name}={values[name]} must not be negative")
    if config.sample_eta == 0:
        raise ValueError("sample_eta=0 makes every step deterministic: it has no density to train; use 1.0")
    for name in _POSITIVE:
        if values[name] <= 0:
            raise ValueError(f"{name}={values[name]} must be positive")
    for name, choices in _CHOICES.items():
        if values[name] not in choices:
            raise ValueError(f"{name}={values[name]!r} must be one of {', '.join(filter(None, choices))}")
    for name in ("train_adam_beta1", "train_adam_beta2", "train_ema_decay"):
        if not 0 <= values[name] < 1:
            raise ValueError(f"{name}={values[name]} must lie in [0, 1)")
    if not 0 < config.train_timestep_fraction <= 1:
        raise ValueError(f"train_timestep_fraction={config.train_timestep_fraction} must lie in (0, 1]")


def _check_combinations(config: DDPOConfig) -> None:
    if config.resume_from == "auto" and config.overwrite:
        raise ValueError(
            "resume_from='auto' continues the run there is, and overwrite=True replaces it: set one of them"
        )
    if config.train_lora_from and not config.train_use_lora:
        raise ValueError(
            f"train_lora_from={config.train_lora_from!r} starts an adapter, and train_use_lora=False trains "
            "none: leave one of them out"
        )
    reserved = sorted(config.accelerator_kwargs.keys() & set(_RESERVED))
    if reserved:
        raise ValueError(f"accelerator_kwargs may not hold {reserved}: other fields of the config set them")
    if not config.train_cfg and config.sample_guidance_scale > 1:
        raise ValueError(
            f"train_cfg=False with sample_guidance_scale={config.sample_guidance_scale} would train another "
            "policy than the one that sampled: set train_cfg=True, or sample_guidance_scale=1"
        )
    if config.per_prompt_stat_tracking and config.sample_group_size > 1:
        raise ValueError(
            "per_prompt_stat_tracking and sample_group_size > 1 are two baselines of the advantages: use one"
        )
    tracker = (config.per_prompt_stat_tracking_buffer_size, config.per_prompt_stat_tracking_min_count)
    if config.per_prompt_stat_tracking and tracker[0] < tracker[1]:
        raise ValueError(
            f"per_prompt_stat_tracking_buffer_size={tracker[0]} is below per_prompt_stat_tracking_min_count="
            f"{tracker[1]}, so no prompt would ever reach its own statistics: raise the buffer size"
        )
    if config.per_prompt_stat_tracking and tracker[0] == 1:
        raise ValueError(
            "per_prompt_stat_tracking_buffer_size=1 remembers one reward, which has no spread: use 2 or more"
        )
