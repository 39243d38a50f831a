"""Provide the names of TRL and imageddpo for the same trainer, so that old scripts run.

A script for TRL <= 0.23's DDPO or for imageddpo runs after changing its import lines to
`from ddpo_lessons.compat import ...`. The classes here add what such scripts call or count on, and no more:
docs/howto/moving.md says what is left out, and what takes its place.
"""

import copy
import dataclasses
import sys
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch

from ddpo_lessons import config, trainer
from ddpo_lessons.config import LORA_FILE
from ddpo_lessons.data.contexts import Context
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.embedded import CHECKPOINTS
from ddpo_lessons.loading import quiet_loading
from ddpo_lessons.models import family_of, load_pipeline
from ddpo_lessons.models.policy import save_policy, with_adapters, with_parts
from ddpo_lessons.models.stable_diffusion import make_schedule

with quiet_loading():
    from diffusers import StableDiffusionPipeline
    from diffusers.pipelines.stable_diffusion import StableDiffusionPipelineOutput


# ---------------------------------------------------------------------------------------- pipelines
def _check_has_unet(pipeline: Any) -> None:
    """Raise a TypeError for models without a UNet and DDIM steps, which TRL and imageddpo need."""
    if getattr(pipeline, "unet", None) is None:
        raise TypeError(
            f"ddpo_lessons.compat trains UNets, and a {type(pipeline).__name__} has none: use "
            "ddpo_lessons.Trainer, for example with algorithm=FlowGRPO()"
        )


def _load_adapter(pipeline: StableDiffusionPipeline, model: str, revision: str) -> bool:
    """Load the LoRA weights beside a model; return whether there are any."""
    try:
        pipeline.load_lora_weights(model, weight_name=LORA_FILE, revision=revision)
    except OSError as error:
        if not Path(model).is_dir():  # then it may also be the network
            warnings.warn(f"no LoRA weights beside {model}, starting new ones: {error}", stacklevel=3)
        return False
    return True


def _save(
    pipeline: StableDiffusionPipeline, folder: str | Path, originals: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write the whole pipeline; LoRA weights go beside it, where `_load_adapter` finds them."""
    save_policy(family_of(pipeline), folder, originals)
    adapted = with_adapters(pipeline)
    if adapted:
        base = with_parts(pipeline, {**originals, **{part: copy.deepcopy(m) for part, m in adapted.items()}})
        base.unload_lora_weights()
        base.save_pretrained(folder)


def _part(name: str) -> Any:
    return property(lambda self: getattr(self.sd_pipeline, name), doc=f"The pipeline's {name}.")


_WRAPPERS: "weakref.WeakSet[DefaultDDPOStableDiffusionPipeline]" = weakref.WeakSet()


def _wrapper_of(unet: Any) -> Any:
    """Find the wrapper of a UNet, because imageddpo's README passes only the UNet to the trainer."""
    found = [wrapper for wrapper in _WRAPPERS if wrapper.unet is unet]
    if not found:
        raise ValueError(
            f"model is a {type(unet).__name__}, and no I2IDDPOStableDiffusionPipeline of this program has it "
            "as its unet: give sd_pipeline=pipeline"
        )
    return found[0]


class DefaultDDPOStableDiffusionPipeline:
    """TRL's wrapper of a diffusers pipeline, which is its `sd_pipeline`.

    The name is "tiny-sd", a folder, or that of a model on the hub; LoRA weights beside it are loaded and
    trained on. `use_lora` trains LoRA weights, not the whole UNet. A RuntimeError says that the model cannot
    be had, a TypeError that it has no UNet.
    """

    unet = _part("unet")
    vae = _part("vae")
    text_encoder = _part("text_encoder")
    tokenizer = _part("tokenizer")
    scheduler = _part("scheduler")
    set_progress_bar_config = _part("set_progress_bar_config")

    def __init__(
        self, pretrained_model_name: str, *, pretrained_model_revision: str = "main", use_lora: bool = True
    ) -> None:
        self.sd_pipeline = load_pipeline(pretrained_model_name, pretrained_model_revision)
        _check_has_unet(self.sd_pipeline)
        place = str(CHECKPOINTS.get(pretrained_model_name, pretrained_model_name))
        self.use_lora = _load_adapter(self.sd_pipeline, place, pretrained_model_revision) or use_lora
        _WRAPPERS.add(self)

    @classmethod
    def from_pretrained(cls, pretrained_model_name: str, **settings: Any) -> Self:
        """Make a pipeline, as in imageddpo's README; the settings are those of the constructor."""
        return cls(pretrained_model_name, **settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the diffusers pipeline; its output has `images`.

        For latents and log-probabilities too, call `ddpo_lessons.rollout.text2img_rollout`.
        """
        return self.sd_pipeline(*args, **kwargs)

    def save_pretrained(self, output_dir: str | Path) -> None:
        """Save the pipeline and, beside it, the LoRA weights; this class loads both."""
        _save(self.sd_pipeline, output_dir)


class I2IDDPOStableDiffusionPipeline(DefaultDDPOStableDiffusionPipeline):
    """imageddpo's wrapper, whose call denoises latents of a noised image."""

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        latents: torch.Tensor,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        eta: float = 0.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        output_type: str = "pil",
        starting_step_ratio: float = 1.0,
    ) -> StableDiffusionPipelineOutput:
        """Denoise latents (B, C, h, w), which have the noise level of the first timestep that is run.

        Embeddings (B, L, D) replace `prompt`; without negative embeddings those of the empty prompt are used.
        With a guidance scale of 1 or less only the negative embeddings have an effect. η and generator are
        those of DDIM. `starting_step_ratio`, the fraction of the schedule that is run, is the trainer's
        `noise_strength`. The returned object has `images`, as "pil", "pt" or "np". Raises a ValueError for
        guidance without a prompt.
        """
        pipeline, family, size = self.sd_pipeline, family_of(self.sd_pipeline), len(latents)

        def embed(texts: Sequence[str]) -> torch.Tensor:
            return family.condition(texts, "", guidance_scale=1.0)["prompt_embeds"]  # (B, L, D)

        embeds = embed([""] * size) if negative_prompt_embeds is None else negative_prompt_embeds
        conditioning = {"prompt_embeds": embeds}
        if guidance_scale > 1:
            if prompt_embeds is None:
                if prompt is None:
                    raise ValueError("guidance needs a prompt: give prompt or prompt_embeds")
                prompt_embeds = embed([prompt] * size if isinstance(prompt, str) else prompt)
            conditioning = {"prompt_embeds": prompt_embeds, "negative_prompt_embeds": embeds}
        for timestep in make_schedule(pipeline.scheduler, num_inference_steps, starting_step_ratio):
            latents = latents.float()
            timesteps = timestep.expand(size)
            output = family.predict(pipeline.unet, latents, timesteps, conditioning, guidance_scale)
            latents = pipeline.scheduler.step(
                output, timestep, latents, eta=eta, generator=generator
            ).prev_sample
        images = family.decode(latents) * 2 - 1  # the processor takes [-1, 1]
        images = pipeline.image_processor.postprocess(images, output_type=output_type)
        return StableDiffusionPipelineOutput(images=images, nsfw_content_detected=None)


# -------------------------------------------------------------------------------- config, trainers
@dataclasses.dataclass
class DDPOConfig(config.DDPOConfig):
    """The config with the fields and defaults of TRL that scripts count on."""

    exp_name: str = dataclasses.field(default_factory=lambda: Path(sys.argv[0]).stem or "ddpo")
    """Name of the experiment; that of the script, as in TRL."""
    mixed_precision: str = dataclasses.field(
        default_factory=lambda: "fp16" if torch.cuda.is_available() else "no"
    )
    """TRL's fp16 on a CUDA device; "no" elsewhere, where TRL's default is an error."""
    async_reward_computation: bool = False
    """Refused when True: it never worked in TRL."""
    max_workers: int = 2
    """Belongs to the former, without effect."""
    push_to_hub: bool = False
    """For the script to read; as in TRL, nothing else does."""

    def __post_init__(self) -> None:
        """Check every field; None means no mixed precision, as in TRL's own tests."""
        if self.mixed_precision is None:
            self.mixed_precision = "no"
        super().__post_init__()
        if self.async_reward_computation:
            raise ValueError(
                "async_reward_computation=True stops TRL with an AttributeError: set it to False"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that the trainer has."""
        known = {field.name for field in dataclasses.fields(config.DDPOConfig)}
        return {name: value for name, value in super().to_dict().items() if name in known}


def _name(path: str) -> Any:
    return property(attrgetter(path), doc=f"TRL's name of `{path}`.")


class _Methods(trainer.Trainer):
    """The public methods and attributes of TRL's trainer, with its signatures."""

    prompt_fn = _name("prompt_function")
    reward_fn = _name("reward_function")
    image_samples_callback = _name("image_samples_hook")
    optimizer = _name("learner.optimizer")
    first_epoch = _name("epochs_done")

    def __init__(
        self,
        config: config.DDPOConfig,
        reward_function: Any,
        prompt_function: Any,
        sd_pipeline: Any,
        *others: Any,
        **named: Any,
    ) -> None:
        """Raise a TypeError for a pipeline without a UNet."""
        _check_has_unet(sd_pipeline)
        super().__init__(config, reward_function, prompt_function, sd_pipeline, *others, **named)

    @property
    def stat_tracker(self) -> Any:
        """The statistics of prompts, or None."""
        return getattr(self.algorithm, "tracker", None)

    def train(self, epochs: int | None = None) -> None:
        """Run the remaining epochs, of `epochs` instead of the config's `num_epochs` if it is given."""
        if epochs is not None:
            self.config.num_epochs = epochs
        super().train()

    def step(self, epoch: int, global_step: int | None = None) -> Any:
        """Run one epoch, from 0; return its metrics or, with TRL's `global_step`, the new count of steps."""
        metrics = super().step(epoch)
        return metrics if global_step is None else self.global_step

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Save pipeline and LoRA weights; half precision rounds the base, as in TRL."""
        if self.accelerator.is_fsdp2:
            raise ValueError(
                "weights are sharded, of which no whole pipeline is written: use ddpo_lessons.trainer"
            )
        if self.accelerator.is_main_process:
            _save(self.pipeline, save_directory, self._originals)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Do what `save_pretrained` does, by default in the run's folder; TRL's example calls it."""
        self.save_pretrained(output_dir or self.config.run_dir)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> None:
        """Upload what `save_pretrained` writes to "user/name", by default with `hf auth login`'s token."""
        from huggingface_hub import HfApi

        if not self.accelerator.is_main_process:
            return
        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            api.upload_folder(repo_id=repo_id, folder_path=folder)


class DDPOTrainer(_Methods, trainer.DDPOTrainer):
    """`ddpo_lessons.trainer.DDPOTrainer` with the methods of TRL's trainer."""


class _ImageddpoStart(FromImages):
    """Two conventions of imageddpo that its scripts rely on.

    `train_timestep_fraction` is a share of `sample_num_steps`, and scripts set it to `noise_strength`. At
    guidance 1 and below a prompt only names its image for per-prompt statistics: the policy sees none.
    """

    name = "images, as by imageddpo"

    def count_train_timesteps(self, num_actions: int, config: config.DDPOConfig) -> int:
        count = min(int(config.sample_num_steps * config.train_timestep_fraction), num_actions)
        return count or super().count_train_timesteps(num_actions, config)  # which says what is wrong

    def prompts(self, contexts: Sequence[Context], config: config.DDPOConfig) -> list[str]:
        if config.sample_guidance_scale <= 1:
            return [config.negative_prompts] * len(contexts)
        return super().prompts(contexts, config)


def _one_of(**given: Any) -> Any:
    """Return an argument that has two names; raise a TypeError if none or both are given."""
    values = [value for value in given.values() if value is not None]
    if len(values) != 1:
        raise TypeError(f"give one of {' and '.join(given)}, not {len(values)}")
    return values[0]


class ImageDDPOTrainer(_Methods, trainer.ImageDDPOTrainer):
    """`ddpo_lessons.trainer.ImageDDPOTrainer` with the methods of TRL's trainer and imageddpo's start.

    imageddpo's README calls `reward_function` `reward_fn`, `prompt_function` `prompt_fn`, and gives the UNet
    of a wrapper as `model` in the place of `sd_pipeline`. Its `ref_model` and `accelerator` must be None,
    since no code of imageddpo's ever took them; a TypeError says what to do instead.
    """

    start_class = _ImageddpoStart

    def __init__(
        self,
        config: config.DDPOConfig,
        reward_function: Any = None,
        prompt_function: Any = None,
        sd_pipeline: Any = None,
        *others: Any,
        reward_fn: Any = None,
        prompt_fn: Any = None,
        model: Any = None,
        ref_model: None = None,
        accelerator: None = None,
        **named: Any,
    ) -> None:
        for name, value, instead in (
            ("ref_model", ref_model, "train_kl_coefficient's penalty is to the policy before training"),
            ("accelerator", accelerator, "the trainer makes one of the config's accelerator_kwargs"),
        ):
            if value is not None:
                raise TypeError(f"leave {name} out: imageddpo has no such argument, and {instead}")
        _one_of(sd_pipeline=sd_pipeline, model=model)
        super().__init__(
            config,
            _one_of(reward_function=reward_function, reward_fn=reward_fn),
            _one_of(prompt_function=prompt_function, prompt_fn=prompt_fn),
            _wrapper_of(model) if sd_pipeline is None else sd_pipeline,
            *others,
            **named,
        )
