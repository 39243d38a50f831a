"""Lesson 06: define all settings of a run under TRL's names, and check them when they are set.

Fields and defaults are those of TRL 0.21's `DDPOConfig`, because existing scripts use them. Descriptions of
settings that TRL does not have say "Not in TRL" at the end.
"""

import dataclasses
import difflib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_origin, get_type_hints

from ddpo_lessons.plan import EpochPlan

LORA_FILE = "pytorch_lora_weights.safetensors"  # the adapter's file name in diffusers
RUN = "run"  # an entry of config.json beside the fields: everything else of a run, see training/record.py
FORWARD_NUMEL = 64 * 256  # latent elements per forward pass, where a micro batch size is 0


@dataclass
class DDPOConfig:
    """Settings of `DDPOTrainer` and `ImageDDPOTrainer`.

    Batch sizes count samples per process. Wrong values raise a ValueError that names the field.
    """

    # --- the run
    exp_name: str = "ddpo"
    """Name of the experiment. It is also the name of the run's folder unless `run_name` or `output_dir` is
    set."""
    run_name: str = ""
    """Name of the run. Its folder is `logdir/run_name` (or `logdir/exp_name`) unless `output_dir` is set."""
    seed: int = 0
    """Seed of all random numbers: noise, actions, shuffles and the initial LoRA weights."""
    log_with: str | None = None
    """Tracker that gets a copy of metrics.jsonl and images/: "tensorboard" or "wandb". If the tracker
    fails, the run prints one warning and continues without it."""
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of accelerate's `init_trackers`."""
    accelerator_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `Accelerator`."""
    project_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of accelerate's `ProjectConfiguration`. A `project_dir` among them is the run's
    folder unless `output_dir` is set."""
    tracker_project_name: str = "ddpo_lessons"
    """Name of the project in the tracker."""
    logdir: str = "logs"
    """Folder that contains the folders of runs."""
    output_dir: str = ""
    """Folder of the run. It replaces three settings of TRL (`logdir`, `run_name`, `project_kwargs`). Not in
    TRL."""
    overwrite: bool = False
    """Replace an existing run in the folder. Without it, such a folder is refused. Not in TRL."""
    num_epochs: int = 100
    """Number of epochs. Each epoch samples once and trains `train_num_inner_epochs` times on the samples."""
    save_freq: int = 1
    """Number of epochs between checkpoints. The last epoch is always saved."""
    num_checkpoint_limit: int = 5
    """Number of checkpoints that are kept."""
    image_grid_freq: int = 1
    """Number of epochs between grids of images, of as many prompts as fit, which also go to the tracker; 0
    for no grids. Not in TRL."""
    price_per_hour: float = 0.0
    """Price of an hour on the machine, in any currency. If set, the run also prints its estimated cost
    after the first epoch. Not in TRL."""
    mixed_precision: str = "no"
    """Precision of the networks: "no", "bf16" or "fp16". Latents and log-probs are always float32. The
    default of TRL is fp16, which needs a GPU."""
    allow_tf32: bool = True
    """Allow TF32 matrix products on NVIDIA GPUs."""
    torch_compile: bool = False
    """Compile the UNet, which makes the first epoch slower by minutes and all later epochs faster; the CPU
    needs a C++ compiler. Compiled gradients can be wrong: if they differ from those of the UNet, the run ends
    before the first step. Not in TRL."""
    resume_from: str = ""
    """Checkpoint to continue from: "auto" takes the newest checkpoint, or starts the run if there is none;
    "latest" requires a checkpoint; a path names one. Later records are discarded when training continues."""

    # --- sampling
    sample_num_steps: int = 50
    """Number of denoising steps of the whole schedule."""
    sample_eta: float = 1.0
    """η of DDIM. At 0 a step is deterministic and has no log-probability, so it cannot be trained."""
    sample_guidance_scale: float = 5.0
    """Scale of classifier-free guidance. At 1 and below a step needs only one forward pass."""
    sample_batch_size: int = 1
    """Number of samples per sampling batch, which are scored together."""
    sample_num_batches_per_epoch: int = 2
    """Number of sampling batches per epoch."""
    sample_group_size: int = 1
    """Number of rollouts per prompt (or input image) that share their initial noise. Within such a group
    only the actions can cause differences in reward, so advantages are normalized per group, as in GRPO.
    The group size must divide the number of samples per epoch. Not in TRL."""
    sample_micro_batch_size: int = 0
    """Number of samples per forward pass of sampling, in whole sampling batches. 0 chooses one batch, or
    several if latents are small. Not in TRL, see `train_micro_batch_size`."""
    negative_prompts: str = ""
    """Negative prompt, which guidance moves away from."""

    log_prob_reduction: Literal["mean", "sum"] = "mean"
    """How the log-probs of a latent's elements are reduced to one number. With "mean", the meaning of the
    clip range depends on the size of the latent. With "sum", the ratio is the true one, but then a clip
    range of 1e-4 is far too small. Not in TRL, which always uses "mean"."""

    # --- training
    train_batch_size: int = 1
    """Number of samples per minibatch."""
    train_use_lora: bool = True
    """Train a LoRA adapter. False trains the whole UNet. Not in TRL, where the pipeline wrapper decides."""
    train_lora_rank: int = 4
    """Rank of the adapter. Not in TRL, which always uses 4."""
    train_lora_alpha: int = 4
    """α of the adapter, whose output is scaled by α / rank. Not in TRL, which always uses 4."""
    train_lora_target_modules: tuple[str, ...] = ("to_k", "to_q", "to_v", "to_out.0")
    """Layers that get an adapter. Not in TRL, which always uses the default."""
    train_lora_from: str = ""
    """Folder of LoRA weights, such as `RUN/lora`, from which a new run starts. The optimizer is new, and the
    learning rate, reward or noise strength, for example, may differ. Rank, alpha and layers are those of the
    folder; if you set them here, they must agree. Not in TRL."""
    train_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and takes more time. It is needed for
    512 pixels on 10 GB. Not in TRL."""
    train_use_8bit_adam: bool = False
    """Use the 8-bit AdamW of bitsandbytes."""
    train_learning_rate: float = 3e-4
    """Learning rate."""
    train_learning_rate_schedule: str = "constant"
    """Schedule of the learning rate, as in diffusers' `get_scheduler`: "constant", "linear" or "cosine".
    The last two fall to 0 at the last of `num_epochs`. A resumed run with another `num_epochs` follows the
    new curve. Not in TRL."""
    train_learning_rate_warmup_steps: int = 0
    """Number of optimizer steps in which the learning rate rises from 0. Not in TRL."""
    train_adam_beta1: float = 0.9
    """Adam's β₁."""
    train_adam_beta2: float = 0.999
    """Adam's β₂."""
    train_adam_weight_decay: float = 1e-4
    """AdamW's weight decay."""
    train_adam_epsilon: float = 1e-8
    """Adam's ε."""
    train_gradient_accumulation_steps: int = 1
    """Number of minibatches per optimizer step, each with all its timesteps."""
    train_max_grad_norm: float = 1.0
    """Maximum norm of the gradient; larger gradients are scaled down to it."""
    train_ema_decay: float = 0.0
    """Decay of an exponential moving average (EMA) of the weights, which becomes
    `decay * average + (1 - decay) * weights` after every optimizer step. The average is used in validation,
    and is saved for other tools. The newest weights are used in sampling and training. 0 keeps no average.
    Not in TRL."""
    train_num_inner_epochs: int = 1
    """Number of times that the samples of an epoch are trained on."""
    train_cfg: bool = True
    """Train with the same guidance as in sampling. If sampling has guidance, False is refused, because it
    would train another policy."""
    train_adv_clip_max: float = 5.0
    """Maximum magnitude of an advantage; larger ones are clipped."""
    train_clip_range: float = 1e-4
    """Clip range of PPO's ratio."""
    train_kl_coefficient: float = 0.0
    """Weight of a KL penalty, which keeps the policy close to the policy before training (DPOK, arXiv
    2305.16381). It reduces reward hacking, but costs one more forward pass. Not in TRL."""
    train_timestep_fraction: float = 1.0
    """Fraction of each sample's timesteps that is trained on, chosen at random."""
    train_micro_batch_size: int = 0
    """Number of (sample, timestep) pairs per forward pass of training. 0 chooses `train_batch_size`, or more
    if latents are small. In float32 it affects speed and memory, but no result. In bf16 and fp16 networks
    round differently in batches of different sizes, so a replay is exact only with the
    `sample_micro_batch_size` that sampled. Not in TRL."""

    # --- advantages
    per_prompt_stat_tracking: bool = False
    """Normalize rewards per prompt (or per `metadata["id"]`) instead of over the epoch."""
    per_prompt_stat_tracking_buffer_size: int = 16
    """Number of the latest rewards that are kept per prompt."""
    per_prompt_stat_tracking_min_count: int = 16
    """Minimum number of rewards per prompt; below it, a prompt uses the epoch's statistics."""

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        """Suggest the field that an unknown name may have meant, which Python's own TypeError does not."""
        known = {spec.name for spec in dataclasses.fields(cls)}
        for name in fields.keys() - known:
            raise TypeError(f"{cls.__name__} has no field {name!r}{_similar(name)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every field."""
        if isinstance(self.train_lora_target_modules, list):  # from JSON and argument parsers
            self.train_lora_target_modules = tuple(self.train_lora_target_modules)
        self.check()

    def check(self) -> None:
        """Raise a ValueError, with the field and the fix, for the first value that cannot work."""
        _check_types(self)
        _check_values(self)
        _check_combinations(self)
        self.epoch_plan(num_timesteps=1)

    @property
    def run_dir(self) -> Path:
        """The folder of the run, for all that it writes."""
        if self.output_dir:
            return Path(self.output_dir)
        return Path(
            self.project_kwargs.get("project_dir") or Path(self.logdir, self.run_name or self.exp_name)
        )

    def epoch_plan(self, num_timesteps: int, num_processes: int = 1) -> EpochPlan:
        """Return the plan of an epoch with this number of trained timesteps."""
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
        except ValueError as error:  # the message has the plan's field names, and two are longer here
            message = str(error).replace("gradient_accumulation_steps", "train_gradient_accumulation_steps")
            message = message.replace("num_batches_per_epoch", "sample_num_batches_per_epoch")
            raise ValueError(message) from None

    def check_epoch(self, num_processes: int) -> None:
        """Raise a ValueError if the samples of all processes are not whole groups, or have no advantage."""
        samples = self.epoch_plan(1, num_processes).total_samples
        if samples % self.sample_group_size:
            raise ValueError(
                f"sample_group_size={self.sample_group_size} does not divide the {samples} samples of an "
                "epoch: change it, sample_batch_size or sample_num_batches_per_epoch"
            )
        if samples == 1 and not self.per_prompt_stat_tracking:
            raise ValueError(
                "an epoch of one sample teaches nothing, because its reward is its own mean: raise "
                "sample_batch_size or sample_num_batches_per_epoch"
            )

    @property
    def shared_starts(self) -> int:
        """The number of consecutive rollouts that share their first state: a group, or else 1."""
        size = self.sample_group_size
        return size if self.sample_batch_size % size == 0 else 1

    def micro_batch_sizes(self, latents_numel: int) -> tuple[int, int]:
        """Return the number of samples per forward pass of sampling, and of pairs per one of training.

        `latents_numel` is C h w, the elements of a sample's latent. Samples are a multiple of
        `sample_batch_size`.
        """
        fitting = FORWARD_NUMEL // latents_numel
        batches = max(1, (self.sample_micro_batch_size or fitting) // self.sample_batch_size)
        pairs = self.train_micro_batch_size or max(self.train_batch_size, fitting)
        return min(batches, self.sample_num_batches_per_epoch) * self.sample_batch_size, pairs

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for config.json, in which objects of a `*_kwargs` become their names."""
        fields = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        return json.loads(json.dumps(fields, default=str))

    def decisive_fields(self) -> dict[str, Any]:
        """Return the fields that affect the weights, which a resumed run must keep."""
        return {name: value for name, value in self.to_dict().items() if name not in _FREE}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Make a config from the fields of config.json; raise a ValueError for an unknown field."""
        try:
            return cls(**{name: value for name, value in values.items() if name != RUN})
        except TypeError as error:
            raise ValueError(f"{error}; perhaps another version of ddpo_lessons wrote this config") from error


def _similar(name: str) -> str:
    """Return a hint at the field that may have been meant, or nothing."""
    names = [spec.name for spec in dataclasses.fields(DDPOConfig)]
    ends = [field for field in names if field.endswith(name)][:3]  # steps, learning_rate
    close = ends or difflib.get_close_matches(name, names, n=2)
    return f" (perhaps {' or '.join(close)})" if close else ""


# Fields that a resumed run may change without changing a weight by more than rounding.
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
# Arguments of `Accelerator` that other fields set.
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
    if not isinstance(modules, (tuple, list)) or not all(isinstance(name, str) for name in modules):
        raise ValueError(f"train_lora_target_modules={modules!r} must be a tuple of names")
    if not modules:
        raise ValueError("train_lora_target_modules is empty: name at least one layer, such as 'to_q'")


def _check_values(config: DDPOConfig) -> None:
    values = vars(config)
    for name in _AT_LEAST_ONE:
        if values[name] < 1:
            raise ValueError(f"{name}={values[name]} must be at least 1")
        if values[name] >= 2**31:  # no machine ends such a run, and torch's errors name no field
            raise ValueError(f"{name}={values[name]} must be less than 2**31: use a smaller number")
    for name in _AT_LEAST_ZERO:
        if values[name] < 0:
            raise ValueError(f"{name}={values[name]} must not be negative")
    if config.sample_eta == 0:
        raise ValueError("sample_eta=0 makes every step deterministic, so actions have no density: use 1.0")
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
            "resume_from='auto' continues the run in the folder, and overwrite=True replaces it: set only one"
        )
    if config.train_lora_from and not config.train_use_lora:
        raise ValueError(
            f"train_lora_from={config.train_lora_from!r} is an adapter, but train_use_lora=False trains "
            "without one: set only one of them"
        )
    reserved = sorted(config.accelerator_kwargs.keys() & set(_RESERVED))
    if reserved:
        raise ValueError(
            f"accelerator_kwargs must not contain {', '.join(map(repr, reserved))}: other settings decide it"
        )
    if not config.train_cfg and config.sample_guidance_scale > 1:
        raise ValueError(
            f"train_cfg=False with sample_guidance_scale={config.sample_guidance_scale} would train another "
            "policy than the one that sampled: set train_cfg=True, or sample_guidance_scale=1"
        )
    if config.per_prompt_stat_tracking and config.sample_group_size > 1:
        raise ValueError(
            "per_prompt_stat_tracking and sample_group_size > 1 are two baselines of the advantages: set "
            "only one of them"
        )
    tracker = (config.per_prompt_stat_tracking_buffer_size, config.per_prompt_stat_tracking_min_count)
    if config.per_prompt_stat_tracking and tracker[0] < tracker[1]:
        raise ValueError(
            f"per_prompt_stat_tracking_buffer_size={tracker[0]} is below per_prompt_stat_tracking_min_count="
            f"{tracker[1]}, so no prompt would ever reach its own statistics: raise the buffer size"
        )
    if config.per_prompt_stat_tracking and tracker[0] == 1:
        raise ValueError(
            "per_prompt_stat_tracking_buffer_size=1 keeps one reward, which has no standard deviation: use 2 "
            "or more"
        )
