"""Stable Diffusion 1 and 2: one text encoder, a UNet, an autoencoder, and DDIM steps."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import DDIMScheduler
from torch import nn

from ddpo_lessons.ddim import DDIMSchedule, predict_x0_and_noise
from ddpo_lessons.image import check_images, check_size
from ddpo_lessons.models.family import Schedule


class StableDiffusion:
    """Stable Diffusion 1 or 2; `family.Family` describes the methods of each family.

    A pipeline with another scheduler gets a DDIMScheduler. A TypeError says that a part is missing, or that
    the UNet takes more than latents.
    """

    without_checker: ClassVar[dict[str, Any]] = {"safety_checker": None, "requires_safety_checker": False}
    parts: ClassVar[tuple[str, ...]] = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
    text_encoders: ClassVar[tuple[str, ...]] = ("text_encoder",)  # of CLIP
    takes_images: ClassVar[bool] = False
    cached_prompts = 1024

    def __init__(self, pipeline: Any) -> None:
        for part in self.parts:
            if getattr(pipeline, part, None) is None:
                raise TypeError(
                    f"sd_pipeline has no {part}: pass a diffusers pipeline such as "
                    "StableDiffusionPipeline.from_pretrained(...)"
                )
        self._check(pipeline)
        self.pipeline = pipeline
        self._encoded = functools.lru_cache(self.cached_prompts)(self._encode_text)

    def _check(self, pipeline: Any) -> None:
        """Raise a TypeError for a model with other inputs than latents; set a DDIMScheduler."""
        channels, latents = pipeline.unet.config.in_channels, pipeline.vae.config.latent_channels
        if channels != latents:
            raise TypeError(
                f"the UNet takes {channels} channels, the latents have {latents}: inpainting models cannot "
                "be trained"
            )
        if not isinstance(pipeline.scheduler, DDIMScheduler):
            pipeline.scheduler = ddim_scheduler(pipeline.scheduler)

    @property
    def denoiser(self) -> Any:
        return self.pipeline.unet

    @property
    def frozen(self) -> dict[str, nn.Module]:
        return {name: getattr(self.pipeline, name) for name in ("vae", *self.text_encoders)}

    @property
    def keeps_float32(self) -> frozenset[str]:
        return frozenset()

    # ----------------------------------------------------------------------------------------- policy
    def predict(
        self,
        denoiser: Callable[..., Any],
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
        guidance_scale: float,
    ) -> torch.Tensor:
        """Predict with classifier-free guidance: e = e_neg + w (e_pos - e_neg).

        Without names that begin with `negative_` one pass gives e_pos. The network sees all in its own
        precision. Source: Ho and Salimans 2022, arXiv 2207.12598, eq. 6 in Stable Diffusion's convention.
        """
        dtype = next(self.denoiser.parameters()).dtype  # diffusers' own property goes through all of them
        # Contiguous, since kernels for other layouts round differently: an encoded image may have one.
        latents, timesteps = latents.to(dtype).contiguous(), timesteps.to(latents.device)
        cast = {n: v.to(dtype) if v.is_floating_point() else v for n, v in conditioning.items()}
        positive = {name: value for name, value in cast.items() if not name.startswith("negative_")}
        if len(positive) == len(cast):
            return self._call(denoiser, latents, timesteps, **positive).float()
        both = {name: torch.cat([cast[f"negative_{name}"], value]) for name, value in positive.items()}
        out = self._call(denoiser, torch.cat([latents] * 2), torch.cat([timesteps] * 2), **both)
        negative, prompted = out.float().chunk(2)  # (N, C, h, w) each
        return negative + guidance_scale * (prompted - negative)

    def _call(
        self,
        denoiser: Callable[..., Any],
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        prompt_embeds: torch.Tensor,
    ) -> torch.Tensor:
        return denoiser(latents, timesteps, encoder_hidden_states=prompt_embeds).sample

    # ---------------------------------------------------------------------------------------- prompts
    def condition(
        self,
        prompts: Sequence[str],
        negative_prompt: str,
        guidance_scale: float,
        size: tuple[int, int] | None = None,
        images: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        shown = {} if images is None else self._image_conditioning(images)
        negative = self._negative(prompts, negative_prompt, size) if guidance_scale > 1 else {}
        if negative:
            negative = {f"negative_{name}": value for name, value in {**negative, **shown}.items()}
        return {**self._embeds(prompts, size), **shown, **negative}

    def _image_conditioning(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the conditioning of an editing model on images (B, 3, H, W); other models refuse them."""
        raise TypeError(
            f"a {type(self.pipeline).__name__} has no input for images: start from them with FromImages, or "
            "use an editing model such as FLUX.1 Kontext"
        )

    def _negative(
        self, prompts: Sequence[str], negative_prompt: str, size: tuple[int, int] | None
    ) -> dict[str, torch.Tensor]:
        """Return the negative conditioning, (B, ...) each; nothing if it equals that of the prompts."""
        if all(prompt == negative_prompt for prompt in prompts):
            return {}
        return self._embeds([negative_prompt] * len(prompts), size)

    def _embeds(self, prompts: Sequence[str], size: tuple[int, int] | None) -> dict[str, torch.Tensor]:
        """Return the embeddings (B, ...) of B prompts; each distinct text is encoded once."""
        found = [*map(self._encoded, prompts)]
        return {name: torch.stack([row[name] for row in found]) for name in found[0]}

    def forget_prompts(self) -> None:
        self._encoded.cache_clear()

    def _encode_text(self, text: str) -> dict[str, torch.Tensor]:
        """Encode a text alone, because batches round differently and a resume has other batches."""
        return {name: rows[0] for name, rows in self._encode_texts([text]).items()}

    @torch.no_grad()
    def _encode_texts(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """Embed texts with CLIP's last layer: (B, L, D)."""
        (out,) = self._read_by_clip(texts)
        return {"prompt_embeds": out[0]}

    def _read_by_clip(self, texts: list[str]) -> list[Any]:
        """Return the outputs of each text encoder, with all hidden states."""
        outs = []
        for name in self.text_encoders:
            tokenizer = getattr(self.pipeline, name.replace("text_encoder", "tokenizer"))
            encoder = getattr(self.pipeline, name)
            outs.append(encoder(tokenize(tokenizer, texts).to(encoder.device), output_hidden_states=True))
        return outs

    # --------------------------------------------------------------------------------------- schedule
    @property
    def init_noise_sigma(self) -> float:
        return float(self.pipeline.scheduler.init_noise_sigma)

    @property
    def num_train_timesteps(self) -> int:
        return self.pipeline.scheduler.config.num_train_timesteps

    def schedule(
        self,
        num_steps: int,
        noise_strength: float = 1.0,
        eta: float = 1.0,
        size: tuple[int, int] | None = None,
    ) -> Schedule:
        scheduler = self.pipeline.scheduler
        timesteps = make_schedule(scheduler, num_steps, noise_strength)
        return DDIMSchedule(scheduler, timesteps, eta, self.denoiser.device)

    def add_noise(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return sqrt(ᾱ_t) z + sqrt(1 - ᾱ_t) ε."""
        return self.pipeline.scheduler.add_noise(clean, noise, timesteps)

    def denoising_target(
        self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return the noise, v or the clean latents, by the scheduler's prediction type."""
        scheduler = self.pipeline.scheduler
        match scheduler.config.prediction_type:
            case "epsilon":
                return noise
            case "v_prediction":
                return scheduler.get_velocity(clean, noise, timesteps)
            case _:
                return clean

    def predict_clean(
        self, noisy: torch.Tensor, output: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Solve x_t = sqrt(ᾱ_t) z + sqrt(1 - ᾱ_t) ε for z."""
        scheduler = self.pipeline.scheduler
        alpha_bars = scheduler.alphas_cumprod.to(noisy)[timesteps].view(-1, *[1] * (noisy.ndim - 1))
        return predict_x0_and_noise(scheduler, output, noisy, alpha_bars)[0]

    # ----------------------------------------------------------------------------------------- images
    def latents_shape(self, size: tuple[int, int] | None = None) -> tuple[int, int, int]:
        config = self.denoiser.config
        if size is None:
            return config.in_channels, config.sample_size, config.sample_size
        factor = vae_factor(self.pipeline.vae)
        return config.in_channels, size[0] // factor, size[1] // factor

    @property
    def sides(self) -> tuple[int, float]:
        return vae_factor(self.pipeline.vae), float("inf")

    def check_images(self, images: torch.Tensor) -> None:
        check_images(images)
        check_size((images.shape[2], images.shape[3]), *self.sides)

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return encode(self.pipeline.vae, images)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.decode_with_gradient(latents)

    def decode_with_gradient(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.pipeline.vae
        latents = (latents / vae.config.scaling_factor).to(vae.dtype)
        # A processor's cache holds what the decoder makes of a few images, not of a hundred.
        groups = latents.split(8 if vae.device.type == "cpu" else len(latents))
        images = torch.cat([vae.decode(group).sample for group in groups])
        return (images.float() / 2 + 0.5).clamp(0, 1)


def tokenize(tokenizer: Any, texts: Sequence[str], length: int | None = None) -> torch.Tensor:
    """Tokenize texts to ids (B, L), padded to a length or the tokenizer's; warn if a text is cut."""
    length = length or tokenizer.model_max_length
    for text, ids in zip(texts, tokenizer(texts, verbose=False).input_ids, strict=True):
        if len(ids) > length:
            lost = tokenizer.decode(ids[length - 1 : -1])
            warnings.warn(
                f"prompt {text!r:.200} is too long: {lost!r:.200} is cut, since the text encoder reads "
                f"{length} tokens. Shorten the prompt.",
                stacklevel=8,
            )
    padded = tokenizer(texts, padding="max_length", max_length=length, truncation=True)
    return torch.tensor(padded.input_ids)


# What a scheduler's config says of the model: how noise was added in its training, and what it predicts.
OF_THE_MODEL = (
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas",
    "rescale_betas_zero_snr", "prediction_type",
)  # fmt: skip


def ddim_scheduler(scheduler: Any) -> DDIMScheduler:
    """Make a DDIM scheduler with the noise schedule of another one, which it keeps in `replaced`.

    diffusers' `from_config` gives what the other one has by default DDIM's own default: other betas than
    those of LCM, TCD, Heun and KDPM2. Here what describes the model is copied either way. Predictions are
    clipped only where the other scheduler clips them, because DDIM's default of [-1, 1] is meant for pixels.
    Raises TypeError if the other one has no betas, as those of flow matching and EDM, because DDIM would then
    take its own.
    """
    config = scheduler.config
    if "beta_schedule" not in config or config.get("use_flow_sigmas"):
        raise TypeError(
            f"a {type(scheduler).__name__} has no betas, so DDIM cannot take its steps: use a model that was "
            "trained with a DDPM schedule"
        )
    copied = {name: config[name] for name in OF_THE_MODEL if name in config}
    ddim = DDIMScheduler.from_config(config, clip_sample=config.get("clip_sample", False), **copied)
    ddim.replaced = scheduler
    return ddim


def make_schedule(scheduler: DDIMScheduler, num_steps: int, noise_strength: float = 1.0) -> torch.Tensor:
    """Set the scheduler, and return the decreasing timesteps (T,) of a rollout.

    `noise_strength` is the fraction of the schedule of `num_steps` that is run, without its noisy beginning;
    1 runs all of it, and less runs int(num_steps * noise_strength) steps, as diffusers' img2img pipelines do.
    They do not correct the rounding of the product, so 50 * 0.58 = 28.999... runs 28 steps. Raises ValueError
    if noise_strength is outside (0, 1] or leaves no step, or there are more steps than timesteps.
    """
    steps = count_steps(num_steps, noise_strength)
    timesteps = set_steps(scheduler, num_steps)[num_steps - steps :]
    if (limit := scheduler.config.num_train_timesteps) <= timesteps[0]:
        raise ValueError(
            f"sample_num_steps={num_steps} with the scheduler's steps_offset="
            f"{scheduler.config.steps_offset} begin at timestep {timesteps[0]}, but the model was trained up "
            f"to {limit - 1}: take fewer"
        )
    return timesteps


def count_steps(num_steps: int, noise_strength: float) -> int:
    """Return the number of steps that `make_schedule` runs; raise a ValueError if there is none."""
    check_strength(noise_strength)
    steps = int(num_steps * noise_strength)
    if steps == 0:
        least = next(n / 1000 for n in range(1, 1001) if int(num_steps * (n / 1000)) > 0)
        raise ValueError(
            f"noise_strength={noise_strength} with {num_steps} steps runs no step: "
            f"use a noise_strength of at least {least:g}, or more steps"
        )
    return steps


def check_strength(noise_strength: float) -> None:
    """Raise a ValueError for a noise_strength outside (0, 1]."""
    if not 0 < noise_strength <= 1:
        raise ValueError(f"noise_strength={noise_strength} must lie in (0, 1]")


def set_steps(scheduler: Any, num_steps: int, **levels: Any) -> torch.Tensor:
    """Set a scheduler, and return its timesteps (num_steps,); raise a ValueError if it has fewer.

    `levels` are what else `set_timesteps` is given.
    """
    if num_steps > scheduler.config.num_train_timesteps:
        raise ValueError(
            f"sample_num_steps={num_steps} is more than the model's schedule of "
            f"{scheduler.config.num_train_timesteps} timesteps: take fewer"
        )
    scheduler.set_timesteps(num_steps, **levels)  # on the CPU: a step looks its numbers up there
    # Trailing spacing may round to one timestep too many at the end (-1): count from the start.
    return scheduler.timesteps[:num_steps]


@torch.no_grad()
def encode(vae: Any, images: torch.Tensor) -> torch.Tensor:
    """Encode images (B, 3, H, W) in [0, 1] as the mean of scaled latents (B, C, h, w) float32."""
    posterior = vae.encode((images * 2 - 1).to(vae.device, vae.dtype)).latent_dist
    return posterior.mode().float() * vae.config.scaling_factor


def vae_factor(vae: Any) -> int:
    """Return the number of pixels per latent along a side."""
    return 2 ** (len(vae.config.block_out_channels) - 1)
