"""Stable Diffusion XL: two text encoders, a pooled embedding, and the image's size as a condition.

What differs from Stable Diffusion 1 and 2 stands here (Podell et al. 2023, arXiv 2307.01952, sections 2.1 and
2.2); the rest is theirs.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ddpo_lessons.models.stable_diffusion import StableDiffusion, vae_factor


class StableDiffusionXL(StableDiffusion):
    """Stable Diffusion XL; `family.Family` describes the methods of each family."""

    without_checker: ClassVar[dict[str, Any]] = {}
    parts: ClassVar[tuple[str, ...]] = (*StableDiffusion.parts, "text_encoder_2", "tokenizer_2")
    text_encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")

    @property
    def keeps_float32(self) -> frozenset[str]:
        """Its autoencoder overflows in float16 (diffusers keeps it in float32 then, too)."""
        return frozenset({"vae"} if self.pipeline.vae.config.force_upcast else ())

    def _call(  # type: ignore[override]
        self,
        denoiser: Callable[..., Any],
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        prompt_embeds: torch.Tensor,
        pooled_embeds: torch.Tensor,
        time_ids: torch.Tensor,
    ) -> torch.Tensor:
        added = {"text_embeds": pooled_embeds, "time_ids": time_ids}
        return denoiser(
            latents, timesteps, encoder_hidden_states=prompt_embeds, added_cond_kwargs=added
        ).sample

    def _negative(
        self, prompts: Sequence[str], negative_prompt: str, size: tuple[int, int] | None
    ) -> dict[str, torch.Tensor]:
        """Return zeros for the empty prompt if the pipeline is configured so, as in diffusers."""
        if negative_prompt or not self.pipeline.config.force_zeros_for_empty_prompt:
            return super()._negative(prompts, negative_prompt, size)
        embeds = self._embeds(prompts, size)
        return {
            name: value if name == "time_ids" else torch.zeros_like(value) for name, value in embeds.items()
        }

    def _embeds(self, prompts: Sequence[str], size: tuple[int, int] | None) -> dict[str, torch.Tensor]:
        """Add the original size, the crop's corner and the target size, in pixels: (B, 6)."""
        conditioning = super()._embeds(prompts, size)
        if size is None:
            side = self.pipeline.unet.config.sample_size * vae_factor(self.pipeline.vae)
            size = (side, side)
        embeds = conditioning["prompt_embeds"]
        ids = torch.tensor([*size, 0, 0, *size], dtype=embeds.dtype).to(embeds.device)
        return {**conditioning, "time_ids": ids.expand(len(prompts), -1)}

    @torch.no_grad()
    def _encode_texts(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """Join the penultimate layers of both encoders; the second one also gives the pooled embedding."""
        first, second = self._read_by_clip(texts)
        embeds = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        return {"prompt_embeds": embeds, "pooled_embeds": second.text_embeds}

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Encode in the autoencoder's own precision."""
        # Its device, since the images may still be on the CPU.
        with torch.autocast(self.pipeline.vae.device.type, enabled=False):
            return super().encode(images)

    def decode_with_gradient(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode in the autoencoder's own precision."""
        with torch.autocast(self.pipeline.vae.device.type, enabled=False):
            return super().decode_with_gradient(latents)
