"""Lessons 06 and 07: sampling a trajectory, from noise or from an image, with its log-probabilities.

A rollout plays the denoising MDP of DDPO (Black et al. 2023, arXiv 2305.13301, section 4.3): the state is
(prompt, t, x_t), the action is x_{t-1}, and the policy is the Gaussian of one stochastic DDIM step. What the
policy predicts comes from one function, `predict`, which training calls again to replay the trajectory.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import DDIMScheduler
from diffusers.utils.torch_utils import randn_tensor
from torch import nn

from ddpo_lessons.ddim import ddim_step_with_logprob, step_std

CACHED_PROMPTS = 1024


@dataclass(frozen=True)
class Trajectory:
    """What one rollout did: states, actions and how likely each action was.

    Attributes:
        latents: (B, T+1, C, h, w) float32; action k leads from `latents[:, k]` to `latents[:, k + 1]`.
        timesteps: (B, T) int64, the timestep at which action k was taken; on the CPU, where schedules are.
        log_probs: (B, T) float32, log-probability of action k under the policy that took it.
        prompt_embeds: (B, L, D).
        negative_prompt_embeds: (B, L, D) of the empty or negative prompt, or None when one pass is enough.
        prompts: the B prompts.
        guidance_scale: the guidance that was part of the policy.
        final_latents: (B, C, h, w) float32, what the VAE decoded: `latents[:, -1]`, or what a deterministic
            last step, which is no action, made of it.
    """

    latents: torch.Tensor
    timesteps: torch.Tensor
    log_probs: torch.Tensor
    prompt_embeds: torch.Tensor
    negative_prompt_embeds: torch.Tensor | None
    prompts: tuple[str, ...]
    guidance_scale: float
    final_latents: torch.Tensor

    @property
    def num_steps(self) -> int:
        """The number of actions T that were taken and can be trained on."""
        return self.timesteps.shape[1]

    @staticmethod
    def cat(trajectories: Sequence[Trajectory]) -> Trajectory:
        """Join trajectories of one schedule along the batch.

        Guided and unguided ones mix: where one pass was enough, both embeddings are the same.
        """
        first = trajectories[0]
        guided = any(t.negative_prompt_embeds is not None for t in trajectories)
        negative = [
            t.prompt_embeds if t.negative_prompt_embeds is None else t.negative_prompt_embeds
            for t in trajectories
        ]
        return Trajectory(
            latents=torch.cat([t.latents for t in trajectories]),
            timesteps=torch.cat([t.timesteps for t in trajectories]),
            log_probs=torch.cat([t.log_probs for t in trajectories]),
            prompt_embeds=torch.cat([t.prompt_embeds for t in trajectories]),
            negative_prompt_embeds=torch.cat(negative) if guided else None,
            prompts=sum((t.prompts for t in trajectories), ()),
            guidance_scale=first.guidance_scale,
            final_latents=torch.cat([t.final_latents for t in trajectories]),
        )


# --------------------------------------------------------------------------------------------- policy
def predict(
    unet: nn.Module,
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    prompt_embeds: torch.Tensor,
    negative_prompt_embeds: torch.Tensor | None,
    guidance_scale: float,
) -> torch.Tensor:
    """Predict the noise (or v, or sample) of each latent: the one policy of sampling and training.

    With guidance, e = e_neg + w (e_pos - e_neg) (Ho and Salimans 2022, arXiv 2207.12598, eq. 6 in the
    convention of Stable Diffusion). Without `negative_prompt_embeds` one pass gives e_pos.

    Args:
        unet: the denoiser.
        latents: (N, C, h, w) float32; the UNet sees them in its own precision.
        timesteps: (N,).
        prompt_embeds: (N, L, D).
        negative_prompt_embeds: (N, L, D) or None.
        guidance_scale: w.

    Returns:
        (N, C, h, w) float32.
    """
    dtype = next(unet.parameters()).dtype
    timesteps = timesteps.to(latents.device)
    # Contiguous, since kernels for other layouts round differently: an encoded image may have one.
    latents, embeds = latents.to(dtype).contiguous(), prompt_embeds.to(dtype)
    if negative_prompt_embeds is None:
        return unet(latents, timesteps, encoder_hidden_states=embeds).sample.float()
    both = torch.cat([negative_prompt_embeds.to(dtype), embeds])  # (2N, L, D)
    out = unet(torch.cat([latents] * 2), torch.cat([timesteps] * 2), encoder_hidden_states=both).sample
    negative, positive = out.float().chunk(2)  # (N, C, h, w) each
    return negative + guidance_scale * (positive - negative)


class PromptEncoder:
    """Turns prompts into embeddings, each distinct text once; texts that are cut are named once."""

    def __init__(self, pipeline: Any) -> None:
        """Remember the pipeline's tokenizer and text encoder."""
        self.pipeline = pipeline
        self._cache: OrderedDict[str, torch.Tensor] = OrderedDict()

    def __call__(self, prompts: Sequence[str]) -> torch.Tensor:
        """Return embeddings (B, L, D) of B prompts on the text encoder's device."""
        missing = [p for p in dict.fromkeys(prompts) if p not in self._cache]
        if missing:
            self._cache.update(zip(missing, self._encode(missing), strict=True))
        embeds = torch.stack([self._cache[p] for p in prompts])
        for prompt in dict.fromkeys(prompts):
            self._cache.move_to_end(prompt)
        while len(self._cache) > CACHED_PROMPTS:
            self._cache.popitem(last=False)
        return embeds

    @torch.no_grad()
    def _encode(self, prompts: list[str]) -> torch.Tensor:
        tokenizer, text_encoder = self.pipeline.tokenizer, self.pipeline.text_encoder
        length = tokenizer.model_max_length
        for prompt, ids in zip(prompts, tokenizer(prompts, verbose=False).input_ids, strict=True):
            if len(ids) > length:
                lost = tokenizer.decode(ids[length - 1 : -1])
                warnings.warn(
                    f"prompt {prompt!r} is too long: {lost!r} is cut, since the text encoder reads "
                    f"{length} tokens. Shorten the prompt.",
                    stacklevel=4,
                )
        padded = tokenizer(prompts, padding="max_length", max_length=length, truncation=True)
        ids = torch.tensor(padded.input_ids, device=text_encoder.device)  # (B, L)
        return text_encoder(ids)[0]


def _conditioning(
    encoder: PromptEncoder, prompts: Sequence[str], negative_prompt: str, guidance_scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Embed the prompts; None for the negative ones when guidance is off or changes nothing."""
    if guidance_scale <= 1 or all(prompt == negative_prompt for prompt in prompts):
        return encoder(prompts), None
    return encoder(prompts), encoder([negative_prompt] * len(prompts))


# ------------------------------------------------------------------------------------------- schedule
def make_schedule(scheduler: DDIMScheduler, num_steps: int, noise_strength: float = 1.0) -> torch.Tensor:
    """Set the scheduler and return the timesteps that a rollout takes.

    Args:
        scheduler: its `num_inference_steps` is set.
        num_steps: number of steps of the whole schedule.
        noise_strength: share of the schedule that is run, from its noisy end cut off; 1 runs it all and
            int(num_steps * noise_strength) steps are run otherwise, as in diffusers' img2img.

    Returns:
        Timesteps (T,), decreasing.

    Raises:
        ValueError: if noise_strength is outside (0, 1] or leaves no step, or there are more steps than
            timesteps.
    """
    if not 0 < noise_strength <= 1:
        raise ValueError(f"noise_strength={noise_strength} must lie in (0, 1]")
    # 1e-6 keeps 50 * 0.58 = 28.999... from losing the step that it names
    steps = int(num_steps * noise_strength + 1e-6)
    if steps == 0:
        raise ValueError(
            f"noise_strength={noise_strength} with {num_steps} steps runs no step: "
            f"use a noise_strength of at least {1 / num_steps:.3g}, or more steps"
        )
    if num_steps > scheduler.config.num_train_timesteps:
        raise ValueError(
            f"{num_steps} steps (sample_num_steps) of a schedule of {scheduler.config.num_train_timesteps} "
            "timesteps: take fewer"
        )
    scheduler.set_timesteps(num_steps)  # on the CPU: a step looks its numbers up there
    # Trailing spacing may round to one timestep too many at the end (-1): count from the start.
    return scheduler.timesteps[num_steps - steps : num_steps]


# ------------------------------------------------------------------------------------------- sampling
def sample_seed(*numbers: int) -> int:
    """Mix numbers such as (seed, epoch, sample) into one 63-bit seed."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@torch.no_grad()
def _denoise(
    pipeline: Any,
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    conditioning: tuple[torch.Tensor, torch.Tensor | None],
    prompts: Sequence[str],
    guidance_scale: float,
    eta: float,
    reduction: Literal["mean", "sum"],
    generator: torch.Generator | list[torch.Generator] | None,
    group_size: int,
) -> tuple[torch.Tensor, Trajectory]:
    """Run the policy from `latents` (B, C, h, w); a last step without variance is run, not recorded."""
    states, log_probs = [latents], []
    stds = step_std(pipeline.scheduler, timesteps, eta)  # (T,)
    shared = group_size  # the rollouts of a group begin in one state, and part with their first actions
    for timestep, std in zip(timesteps.tolist(), stds.tolist(), strict=True):
        distinct, (embeds, negative_embeds) = latents[::shared], conditioning
        output = predict(
            pipeline.unet,
            distinct,
            torch.full((len(distinct),), timestep),
            embeds[::shared],
            None if negative_embeds is None else negative_embeds[::shared],
            guidance_scale,
        )
        output, shared = output.repeat_interleave(shared, dim=0), 1  # (B, C, h, w)
        step = ddim_step_with_logprob(
            pipeline.scheduler,
            output,
            timestep,
            latents,
            eta,
            generator=generator,
            reduction=reduction,
        )
        latents = step.prev_sample
        if std > 0:
            states.append(latents)
            log_probs.append(step.log_prob)
    if not log_probs:
        raise ValueError(
            "every step of the schedule is deterministic: use more steps or a larger noise_strength"
        )
    trajectory = Trajectory(
        latents=torch.stack(states, dim=1),  # (B, T+1, C, h, w)
        timesteps=timesteps[stds > 0].expand(len(latents), -1),  # (B, T)
        log_probs=torch.stack(log_probs, dim=1),  # (B, T)
        prompt_embeds=conditioning[0],
        negative_prompt_embeds=conditioning[1],
        prompts=tuple(prompts),
        guidance_scale=guidance_scale,
        final_latents=latents,
    )
    return decode(pipeline.vae, latents), trajectory


@torch.no_grad()
def decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Decode latents (B, C, h, w) to images (B, 3, H, W) float32 in [0, 1]."""
    images = vae.decode((latents / vae.config.scaling_factor).to(vae.dtype)).sample
    return (images.float() / 2 + 0.5).clamp(0, 1)


@torch.no_grad()
def encode(vae: Any, images: torch.Tensor) -> torch.Tensor:
    """Encode images (B, 3, H, W) in [0, 1] to scaled latents (B, C, h, w) float32: the posterior's mean."""
    posterior = vae.encode((images * 2 - 1).to(vae.device, vae.dtype)).latent_dist
    return posterior.mode().float() * vae.config.scaling_factor


def vae_factor(vae: Any) -> int:
    """Return how many pixels make one latent, along a side."""
    return 2 ** (len(vae.config.block_out_channels) - 1)


def check_images(images: torch.Tensor, vae: Any) -> None:
    """Refuse images that are not a float batch (B, 3, H, W) in [0, 1] of a size that the VAE divides.

    Raises:
        TypeError: if `images` is not a floating point tensor.
        ValueError: if shape, values or size do not fit; the message says how to mend them.
    """
    if not isinstance(images, torch.Tensor) or not images.is_floating_point():
        kind = images.dtype if isinstance(images, torch.Tensor) else type(images).__name__
        raise TypeError(
            f"images must be a float tensor (B, 3, H, W) in [0, 1], not {kind}: divide uint8 by 255"
        )
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images must have shape (B, 3, H, W), not {tuple(images.shape)}: convert to RGB")
    low, high = images.min().item(), images.max().item()
    if not (low >= -1e-3 and high <= 1 + 1e-3):  # also catches NaN
        raise ValueError(f"images must lie in [0, 1], but reach from {low:.3g} to {high:.3g}: rescale them")
    factor = vae_factor(vae)
    if images.shape[2] % factor or images.shape[3] % factor:
        raise ValueError(f"images of {tuple(images.shape[2:])} pixels: resize to multiples of {factor}")


def text2img_rollout(
    pipeline: Any,
    prompts: Sequence[str],
    *,
    num_inference_steps: int = 50,
    guidance_scale: float = 5.0,
    eta: float = 1.0,
    negative_prompt: str = "",
    reduction: Literal["mean", "sum"] = "mean",
    generator: torch.Generator | list[torch.Generator] | None = None,
    initial_noise: torch.Tensor | None = None,
    encoder: PromptEncoder | None = None,
    group_size: int = 1,
) -> tuple[torch.Tensor, Trajectory]:
    """Sample images from noise and record the trajectory.

    Args:
        pipeline: a Stable-Diffusion-shaped diffusers pipeline with a DDIMScheduler.
        prompts: B prompts.
        num_inference_steps: number of denoising steps.
        guidance_scale: w; at 1 and below, and where prompt and negative prompt agree, one forward pass a
            step predicts from the prompt alone.
        eta: η of DDIM, > 0; 1 gives DDPM's noise.
        negative_prompt: what guidance leads away from.
        reduction: of the log-density over the latent's dimensions, see `ddim_step_with_logprob`.
        generator: one, or one per sample; decides noise and actions.
        initial_noise: x_T (B, C, h, w); drawn when not given.
        encoder: a `PromptEncoder` whose cache is to be used.
        group_size: so many rollouts side by side have one context and one initial noise; what they share is
            computed once.

    Returns:
        Images (B, 3, H, W) float32 in [0, 1] and the trajectory.

    Raises:
        ValueError: if eta is not positive or the scheduler cannot be used.
    """
    size = pipeline.unet.config.sample_size
    shape = (len(prompts), pipeline.unet.config.in_channels, size, size)
    timesteps = make_schedule(pipeline.scheduler, num_inference_steps)
    if initial_noise is None:
        initial_noise = randn_tensor(shape, generator, pipeline.unet.device, torch.float32)
    latents = initial_noise.float() * pipeline.scheduler.init_noise_sigma
    conditioning = _conditioning(encoder or PromptEncoder(pipeline), prompts, negative_prompt, guidance_scale)
    return _denoise(
        pipeline,
        latents,
        timesteps,
        conditioning,
        prompts,
        guidance_scale,
        eta,
        reduction,
        generator,
        group_size,
    )


def img2img_rollout(
    pipeline: Any,
    prompts: Sequence[str],
    images: torch.Tensor,
    noise_strength: float,
    *,
    num_inference_steps: int = 50,
    guidance_scale: float = 5.0,
    eta: float = 1.0,
    negative_prompt: str = "",
    reduction: Literal["mean", "sum"] = "mean",
    generator: torch.Generator | list[torch.Generator] | None = None,
    initial_noise: torch.Tensor | None = None,
    encoder: PromptEncoder | None = None,
    group_size: int = 1,
) -> tuple[torch.Tensor, Trajectory]:
    """Encode images, add the noise that `noise_strength` names, and denoise (SDEdit, arXiv 2108.01073).

    x_t = sqrt(ᾱ_t) z + sqrt(1 - ᾱ_t) ε with z the scaled latent of the image and t the first timestep run.

    Args:
        pipeline: a Stable-Diffusion-shaped diffusers pipeline with a DDIMScheduler.
        prompts: B prompts.
        images: (B, 3, H, W) float in [0, 1].
        noise_strength: share of the schedule that is run, in (0, 1].
        num_inference_steps: number of steps of the whole schedule.
        guidance_scale: as in `text2img_rollout`.
        eta: η of DDIM, > 0.
        negative_prompt: what guidance leads away from.
        reduction: of the log-density over the latent's dimensions, see `ddim_step_with_logprob`.
        generator: one, or one per sample; decides noise and actions.
        initial_noise: ε (B, C, h, w); drawn when not given.
        encoder: a `PromptEncoder` whose cache is to be used.
        group_size: so many rollouts side by side have one context and one initial noise; what they share is
            computed once.

    Returns:
        Images (B, 3, H, W) float32 in [0, 1] and the trajectory.

    Raises:
        TypeError: if the images are not floats.
        ValueError: if images, noise_strength or eta do not fit.
    """
    check_images(images, pipeline.vae)
    if len(images) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts for {len(images)} images: give one prompt per image")
    timesteps = make_schedule(pipeline.scheduler, num_inference_steps, noise_strength)
    clean = encode(pipeline.vae, images[::group_size]).repeat_interleave(group_size, dim=0)  # (B, C, h, w)
    if initial_noise is None:
        initial_noise = randn_tensor(clean.shape, generator, clean.device, torch.float32)
    latents = pipeline.scheduler.add_noise(clean, initial_noise, timesteps[:1].to(clean.device))
    conditioning = _conditioning(encoder or PromptEncoder(pipeline), prompts, negative_prompt, guidance_scale)
    return _denoise(
        pipeline,
        latents,
        timesteps,
        conditioning,
        prompts,
        guidance_scale,
        eta,
        reduction,
        generator,
        group_size,
    )
