"""Stable Diffusion 3 and 3.5: a transformer that predicts velocities, three text encoders, steps of a flow.

Source: Esser et al. 2024, arXiv 2403.03206, sections 4 and 5.3.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from ddpo_lessons.flow import FlowSchedule
from ddpo_lessons.models.stable_diffusion import StableDiffusion, check_strength, set_steps

T5_TOKENS = 256  # diffusers' default, max_sequence_length


class StableDiffusion3(StableDiffusion):
    """Stable Diffusion 3; `family.Family` describes the methods of each family.

    The third text encoder, T5, may be missing: zeros take the place of its tokens, as in diffusers. They are
    256, or as many as `tokenizer_3.model_max_length` says where that is less. A TypeError says that another
    part is missing, or that the scheduler is not that of flow matching.
    """

    without_checker: ClassVar[dict[str, Any]] = {}
    parts: ClassVar[tuple[str, ...]] = (
        "transformer", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "scheduler",
    )  # fmt: skip
    text_encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")
    cached_prompts = 128  # each takes 333 tokens of 4096 numbers, 5.5 MB

    def _check(self, pipeline: Any) -> None:
        if not isinstance(pipeline.scheduler, FlowMatchEulerDiscreteScheduler):
            raise TypeError(
                f"a {type(pipeline.scheduler).__name__} is no schedule of flow matching: give the pipeline "
                "its FlowMatchEulerDiscreteScheduler back"
            )

    @property
    def denoiser(self) -> Any:
        return self.pipeline.transformer

    @property
    def frozen(self) -> dict[str, nn.Module]:
        third = getattr(self.pipeline, "text_encoder_3", None)  # FLUX.1 has two
        return {**super().frozen, **({} if third is None else {"text_encoder_3": third})}

    @property
    def keeps_float32(self) -> frozenset[str]:
        """T5 overflows in float16."""
        return frozenset({"text_encoder_3"})

    def _call(  # type: ignore[override]
        self,
        denoiser: Callable[..., Any],
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        prompt_embeds: torch.Tensor,
        pooled_embeds: torch.Tensor,
    ) -> torch.Tensor:
        return denoiser(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=prompt_embeds,
            pooled_projections=pooled_embeds,
        ).sample

    # ---------------------------------------------------------------------------------------- prompts
    @torch.no_grad()
    def _encode_texts(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """Embed texts with CLIP's tokens, of both encoders, before T5's: (B, L + L', D), pooled (B, P)."""
        outs = self._read_by_clip(texts)
        clip = torch.cat([out.hidden_states[-2] for out in outs], dim=-1)
        t5 = self._encode_with_t5(texts).to(clip)  # (B, L', D)
        clip = F.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
        pooled = torch.cat([out.text_embeds for out in outs], dim=-1)
        return {"prompt_embeds": torch.cat([clip, t5], dim=1), "pooled_embeds": pooled}

    def _encode_with_t5(self, texts: list[str]) -> torch.Tensor:
        tokenizer, encoder = self.pipeline.tokenizer_3, self.pipeline.text_encoder_3
        length = T5_TOKENS if tokenizer is None else min(T5_TOKENS, tokenizer.model_max_length)
        if encoder is None:
            return torch.zeros(len(texts), length, self.denoiser.config.joint_attention_dim)
        padded = tokenizer(texts, padding="max_length", max_length=length, truncation=True)
        return encoder(torch.tensor(padded.input_ids).to(encoder.device))[0]

    # --------------------------------------------------------------------------------------- schedule
    @property
    def init_noise_sigma(self) -> float:
        return 1.0

    def schedule(
        self,
        num_steps: int,
        noise_strength: float = 1.0,
        eta: float = 1.0,
        size: tuple[int, int] | None = None,
    ) -> FlowSchedule:
        """Skip int(num_steps - num_steps * noise_strength) steps of the schedule; `eta` is the SDE's level.

        diffusers' img2img pipeline of this model counts so: where the product is not whole, one more step is
        run than by Stable Diffusion 1.
        """
        check_strength(noise_strength)
        scheduler = self.pipeline.scheduler
        set_steps(scheduler, num_steps, **self._noise_levels(num_steps, size))
        sigmas = scheduler.sigmas[int(num_steps - num_steps * noise_strength) :]  # (steps + 1,)
        return FlowSchedule(sigmas, eta, self.denoiser.device, num_train_timesteps=self.num_train_timesteps)

    def _noise_levels(self, num_steps: int, size: tuple[int, int] | None) -> dict[str, Any]:
        """Return further arguments of the scheduler, which has the noise levels itself."""
        return {}

    def add_noise(self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return (1 - σ̄) z + σ̄ ε."""
        sigmas = self._sigmas(timesteps, clean)
        return (1 - sigmas) * clean + sigmas * noise

    def _sigmas(self, timesteps: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return (timesteps / self.num_train_timesteps).to(like).view(-1, *[1] * (like.ndim - 1))  # (B, 1, ...)

    def predict_clean(
        self, noisy: torch.Tensor, output: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return x - σ̄ v."""
        return noisy - self._sigmas(timesteps, noisy) * output

    def denoising_target(
        self, clean: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor
    ) -> torch.Tensor:
        """Return the velocity ε - z."""
        return noise - clean

    # ----------------------------------------------------------------------------------------- images
    @property
    def _shift(self) -> float:
        """The shift of the autoencoder's latents, after scaling."""
        config = self.pipeline.vae.config
        return (config.shift_factor or 0.0) * config.scaling_factor

    @property
    def sides(self) -> tuple[int, float]:
        """Multiples of a patch of latents, up to the number of positions."""
        patch = super().sides[0] * self.denoiser.config.patch_size
        return patch, patch * self.denoiser.config.pos_embed_max_size

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return super().encode(images) - self._shift

    def decode_with_gradient(self, latents: torch.Tensor) -> torch.Tensor:
        return super().decode_with_gradient(latents + self._shift)
