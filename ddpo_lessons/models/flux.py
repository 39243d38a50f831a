"""FLUX.1: a transformer over patches of latents, with guidance as an input; and Kontext, which edits images.

Source: Labs et al. 2025, arXiv 2506.15742, sections 2 and 3, and the published models. What differs from
Stable Diffusion 3 stands here:

- the transformer reads a sequence of tokens, which are patches of 2 × 2 latents with their positions;
- "dev" was distilled from guided predictions, so the guidance scale is an input and one pass is enough.
  "schnell" has no such input, and needs no guidance;
- the larger the image, the more noise levels are shifted;
- Kontext reads the tokens of an image to be edited after those of the noise.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn import functional

from ddpo_lessons.models.stable_diffusion import tokenize, vae_factor
from ddpo_lessons.models.stable_diffusion_3 import StableDiffusion3

PATCH = 2  # latents along a side of a token
T5_TOKENS = {True: 512, False: 256}  # of "dev" and of "schnell", as their authors trained them


class Flux(StableDiffusion3):
    """FLUX.1; `family.Family` describes the methods of each family.

    If the guidance scale is an input of the transformer ("dev"), `guidance_scale` is this input, and there is
    no negative prompt. Otherwise ("schnell") a scale above 1 takes two forward passes, as diffusers'
    `true_cfg_scale` does.
    """

    @property
    def keeps_float32(self) -> frozenset[str]:
        """T5 overflows in float16."""
        return frozenset({"text_encoder_2"})

    @property
    def _takes_guidance(self) -> bool:
        return bool(self.denoiser.config.guidance_embeds)

    def _call(  # type: ignore[override]
        self,
        denoiser: Callable[..., Any],
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        prompt_embeds: torch.Tensor,
        pooled_embeds: torch.Tensor,
        guidance: torch.Tensor | None = None,
        image_latents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        images = [latents] if image_latents is None else [latents, image_latents]
        tokens = [to_tokens(image) for image in images]
        places = [places_of(image, number) for number, image in enumerate(images)]
        out = denoiser(
            hidden_states=torch.cat(tokens, dim=1),  # (N, L, 4C)
            timestep=timesteps / self.num_train_timesteps,
            guidance=guidance,
            pooled_projections=pooled_embeds,
            encoder_hidden_states=prompt_embeds,
            txt_ids=prompt_embeds.new_zeros(prompt_embeds.shape[1], 3),
            img_ids=torch.cat(places),
        ).sample
        return to_latents(out[:, : tokens[0].shape[1]], latents.shape[2])

    # ---------------------------------------------------------------------------------------- prompts
    def condition(
        self,
        prompts: Sequence[str],
        negative_prompt: str,
        guidance_scale: float,
        size: tuple[int, int] | None = None,
        images: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        """Embed B prompts: prompt_embeds (B, L, D), pooled_embeds (B, P) and, for "dev", guidance (B,).

        Raises ValueError for a negative prompt if the guidance scale is an input of the model.
        """
        if not self._takes_guidance:
            return super().condition(prompts, negative_prompt, guidance_scale, size, images)
        if negative_prompt:
            raise ValueError(
                f"negative_prompts={negative_prompt!r}: guidance is an input of this model, so a "
                "negative prompt has no effect; leave it out"
            )
        conditioning = super().condition(prompts, negative_prompt, 1.0, size, images)
        embeds = conditioning["prompt_embeds"]
        guidance = torch.full((len(prompts),), guidance_scale, dtype=torch.float32, device=embeds.device)
        return {**conditioning, "guidance": guidance}

    @torch.no_grad()
    def _encode_texts(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """Embed texts by token with T5, and as a whole with CLIP, which reads only the beginning."""
        clip, t5 = self.pipeline.text_encoder, self.pipeline.text_encoder_2
        length = self.pipeline.tokenizer.model_max_length
        ids = self.pipeline.tokenizer(texts, padding="max_length", max_length=length, truncation=True)
        most = min(T5_TOKENS[self._takes_guidance], self.pipeline.tokenizer_2.model_max_length)
        return {
            "prompt_embeds": t5(tokenize(self.pipeline.tokenizer_2, texts, most).to(t5.device))[0],
            "pooled_embeds": clip(torch.tensor(ids.input_ids).to(clip.device)).pooler_output,
        }

    # --------------------------------------------------------------------------------------- schedule
    def _noise_levels(self, num_steps: int, size: tuple[int, int] | None) -> dict[str, Any]:
        """Return evenly spaced noise levels and their shift, which grows with the number of tokens."""
        config = self.pipeline.scheduler.config
        _, height, width = self.latents_shape(size)
        most, least = config.max_image_seq_len, config.base_image_seq_len
        share = (height * width // PATCH**2 - least) / (most - least)
        shift = config.base_shift + share * (config.max_shift - config.base_shift)
        return {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps), "mu": shift}

    # ----------------------------------------------------------------------------------------- images
    def latents_shape(self, size: tuple[int, int] | None = None) -> tuple[int, int, int]:
        factor, side = vae_factor(self.pipeline.vae), self.pipeline.default_sample_size
        height, width = (side, side) if size is None else (size[0] // factor, size[1] // factor)
        return self.pipeline.vae.config.latent_channels, height, width

    @property
    def sides(self) -> tuple[int, float]:
        """Multiples of a patch of latents, without an upper limit."""
        return PATCH * vae_factor(self.pipeline.vae), float("inf")


class FluxKontext(Flux):
    """FLUX.1 Kontext: `condition` takes images to be edited, of the size of the results or of another one."""

    takes_images: ClassVar[bool] = True

    def _image_conditioning(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"image_latents": self.encode(images)}  # (B, C, h, w)


def to_tokens(latents: torch.Tensor) -> torch.Tensor:
    """Split latents (N, C, h, w) into tokens (N, h w / 4, 4C), row by row."""
    return functional.pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2)


def to_latents(tokens: torch.Tensor, height: int) -> torch.Tensor:
    """Join tokens (N, L, 4C) to latents (N, C, h, w) of a height."""
    rows = tokens.transpose(1, 2).unflatten(2, (height // PATCH, -1))  # (N, 4C, h / 2, w / 2)
    return functional.pixel_shuffle(rows, PATCH)


def places_of(latents: torch.Tensor, number: int) -> torch.Tensor:
    """Return the number of its image, the row and the column of each token, (L, 3)."""
    height, width = (side // PATCH for side in latents.shape[2:])
    ranges = (range(number, number + 1), range(height), range(width))
    axes = [torch.arange(r.start, r.stop, device=latents.device, dtype=torch.float32) for r in ranges]
    return torch.cartesian_prod(*axes)
