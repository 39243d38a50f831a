"""TRL's and imageddpo's names over the same trainer, so that old scripts run on.

A script for TRL <= 0.23's DDPO or for imageddpo runs after changing its import lines to
`from ddpo_lessons.compat import ...`. The classes here add what such scripts call or count on; what
the trainer does is in `ddpo_lessons.trainer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.pipelines.stable_diffusion import StableDiffusionPipelineOutput

from ddpo_lessons import config, trainer
from ddpo_lessons.data.contexts import Context
from ddpo_lessons.families.policy import ddim_scheduler, save_policy
from ddpo_lessons.rollout import PromptEncoder, Trajectory, decode, make_schedule, predict
from ddpo_lessons.tiny import CHECKPOINT

TINY_SD = "tiny-sd"
LORA_FILE = "pytorch_lora_weights.safetensors"


# ---------------------------------------------------------------------------------------- pipelines
def _place(model: str | Path) -> str:
    return str(CHECKPOINT if str(model) == TINY_SD else model)


def load_pipeline(model: str | Path, revision: str = "main") -> StableDiffusionPipeline:
    """Load a Stable-Diffusion-shaped pipeline in float32, with a DDIMScheduler and no safety checker.

    Only safetensors are read, no pickle.

    Args:
        model: "tiny-sd" for the embedded one, a folder, or the name of a model on the hub.
        revision: branch, tag or commit on the hub.

    Returns:
        The pipeline, on the CPU.

    Raises:
        RuntimeError: if the model cannot be had; says why and what to do.
    """
    try:
        pipeline = StableDiffusionPipeline.from_pretrained(
            _place(model),
            revision=revision,
            use_safetensors=True,
            safety_checker=None,
            requires_safety_checker=False,
        )
    except Exception as error:  # network, file and format errors share the remedy, but no base
        reason = " ".join(str(error).split())
        raise RuntimeError(
            f"the model {str(model)!r} could not be loaded ({type(error).__name__}: {reason:.300}). "
            "Give the path of a folder that holds a diffusers pipeline with safetensors: on a machine with "
            "a network `hf download MODEL --local-dir FOLDER` makes one; or set HF_HOME to a cache that "
            "already holds the model"
        ) from error
    pipeline.scheduler = ddim_scheduler(pipeline.scheduler)
    return pipeline


def _load_adapter(pipeline: StableDiffusionPipeline, model: str, revision: str) -> bool:
    """Load the LoRA weights that lie beside a model; return whether there are any."""
    try:
        pipeline.load_lora_weights(model, weight_name=LORA_FILE, revision=revision)
    except OSError as error:
        if not Path(model).is_dir():  # then it may also be the network
            warnings.warn(f"no LoRA weights beside {model}, starting new ones: {error}", stacklevel=3)
        return False
    return True


def _save(pipeline: StableDiffusionPipeline, folder: str | Path) -> None:
    """Write the whole pipeline; LoRA weights go beside it, where `_load_adapter` finds them."""
    save_policy(pipeline, folder)
    if not getattr(pipeline.unet, "peft_config", None):
        return
    weights = pipeline.unet.state_dict()
    base = type(pipeline.unet).from_config(pipeline.unet.config)
    base.load_state_dict(
        {name.replace(".base_layer", ""): w for name, w in weights.items() if "lora_" not in name}
    )
    parts = {**pipeline.components, "unet": base}
    type(pipeline)(**parts, requires_safety_checker=False).save_pretrained(folder)


def _part(name: str) -> Any:
    return property(lambda self: getattr(self.sd_pipeline, name), doc=f"The pipeline's {name}.")


class DefaultDDPOStableDiffusionPipeline:
    """TRL's wrapper of a diffusers pipeline, which is its `sd_pipeline`.

    Args:
        pretrained_model_name: "tiny-sd", a folder, or the name of a model on the hub. LoRA weights beside
            it are loaded and trained on.
        pretrained_model_revision: branch, tag or commit on the hub.
        use_lora: train LoRA weights, not the whole UNet.

    Raises:
        RuntimeError: if the model cannot be had.
    """

    unet = _part("unet")
    vae = _part("vae")
    text_encoder = _part("text_encoder")
    tokenizer = _part("tokenizer")
    scheduler = _part("scheduler")
    set_progress_bar_config = _part("set_progress_bar_config")

    def __init__(
        self,
        pretrained_model_name: str,
        *,
        pretrained_model_revision: str = "main",
        use_lora: bool = True,
    ) -> None:
        self.pretrained_model = pretrained_model_name
        self.pretrained_revision = pretrained_model_revision
        self.sd_pipeline = load_pipeline(pretrained_model_name, pretrained_model_revision)
        place = _place(pretrained_model_name)
        self.use_lora = _load_adapter(self.sd_pipeline, place, pretrained_model_revision) or use_lora

    @property
    def autocast(self) -> Any:
        """What TRL's trainer asks for: no autocast around LoRA, accelerate's otherwise (None)."""
        return contextlib.nullcontext if self.use_lora else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the diffusers pipeline; its output has `images`.

        For latents and log-probabilities too, call `ddpo_lessons.rollout.text2img_rollout`.
        """
        return self.sd_pipeline(*args, **kwargs)

    def save_pretrained(self, output_dir: str | Path) -> None:
        """Write the pipeline and, beside it, the LoRA weights; this class loads both from there."""
        _save(self.sd_pipeline, output_dir)


class I2IDDPOStableDiffusionPipeline(DefaultDDPOStableDiffusionPipeline):
    """imageddpo's wrapper: called, it denoises latents that already hold a noised image."""

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
        """Denoise `latents` over the last part of the schedule.

        Args:
            prompt: one prompt, or one per sample.
            latents: (B, C, h, w), noised to the first timestep that is run.
            prompt_embeds: (B, L, D), in the place of `prompt`.
            negative_prompt_embeds: (B, L, D); the empty prompt's if not given.
            num_inference_steps: number of steps of the whole schedule.
            guidance_scale: w; at 1 and below only the negative embeddings are looked at.
            eta: η of DDIM; 0 is deterministic.
            generator: of the noise, where η > 0.
            output_type: "pil", "pt" or "np".
            starting_step_ratio: share of the schedule that is run, the trainer's `noise_strength`.

        Returns:
            An object with `images`.

        Raises:
            ValueError: if guidance is asked for without a prompt.
        """
        pipeline, encoder = self.sd_pipeline, PromptEncoder(self.sd_pipeline)
        size = len(latents)
        embeds = negative_prompt_embeds
        if embeds is None:
            embeds = encoder([""] * size)
        negative = None
        if guidance_scale > 1:
            if prompt_embeds is None:
                if prompt is None:
                    raise ValueError("guidance needs a prompt: give prompt or prompt_embeds")
                prompt_embeds = encoder([prompt] * size if isinstance(prompt, str) else prompt)
            embeds, negative = prompt_embeds, embeds
        for timestep in make_schedule(pipeline.scheduler, num_inference_steps, starting_step_ratio):
            latents = latents.float()
            output = predict(pipeline.unet, latents, timestep.expand(size), embeds, negative, guidance_scale)
            latents = pipeline.scheduler.step(
                output, timestep, latents, eta=eta, generator=generator
            ).prev_sample
        images = decode(pipeline.vae, latents) * 2 - 1  # the processor takes [-1, 1]
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
        """Check every field."""
        super().__post_init__()
        if self.async_reward_computation:
            raise ValueError(
                "async_reward_computation=True stops TRL with an AttributeError: set it to False"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that the trainer knows."""
        known = {field.name for field in dataclasses.fields(config.DDPOConfig)}
        return {name: value for name, value in super().to_dict().items() if name in known}


class DDPOTrainer(trainer.DDPOTrainer):
    """`ddpo_lessons.trainer.DDPOTrainer` with the methods of TRL's trainer."""

    def train(self, epochs: int | None = None) -> None:
        """Run the epochs that are left.

        Args:
            epochs: takes the place of the config's `num_epochs`.
        """
        if epochs is not None:
            self.config.num_epochs = epochs
        super().train()

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write the pipeline and, beside it, the LoRA weights.

        Args:
            save_directory: where to write to.
        """
        if self.accelerator.is_main_process:
            _save(self.pipeline, save_directory)

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> None:
        """Upload what `save_pretrained` writes.

        Args:
            repo_id: "user/name"; made if it does not exist.
            private: whether a new one is private; None for the account's default.
            token: of the hub; the one of `hf auth login` if not given.
        """
        from huggingface_hub import HfApi

        if not self.accelerator.is_main_process:
            return
        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            api.upload_folder(repo_id=repo_id, folder_path=folder)


class ImageDDPOTrainer(DDPOTrainer, trainer.ImageDDPOTrainer):
    """`ddpo_lessons.trainer.ImageDDPOTrainer` with two habits of imageddpo that its scripts count on.

    `train_timestep_fraction` is a share of `sample_num_steps`, and scripts set it to `noise_strength`. At
    guidance 1 and below a prompt only names its image for per-prompt statistics: the policy sees none.
    """

    def _count_train_timesteps(self) -> int:
        stochastic = self._count_stochastic()
        share = self.config.sample_num_steps * self.config.train_timestep_fraction
        count = min(int(share + 1e-6), stochastic)
        return count or super()._count_train_timesteps()  # which says what is wrong

    def _rollout(
        self, epoch: int, rows: Sequence[int], contexts: Sequence[Context]
    ) -> tuple[torch.Tensor, Trajectory]:
        if self.config.sample_guidance_scale <= 1:
            nothing = self.config.negative_prompts
            contexts = [dataclasses.replace(context, prompt=nothing) for context in contexts]
        return super()._rollout(epoch, rows, contexts)
