"""Lessons 06 and 07: sampling a trajectory, from noise or from an image, with its log-probabilities.

A rollout plays the denoising MDP of DDPO (Black et al. 2023, arXiv 2305.13301, section 4.3): the state is
(prompt, t, x_t), the action is x_{t-1}, and the policy is the Gaussian of one stochastic DDIM step. What the
policy predicts comes from one function, the family's `predict`, which training calls again to replay the
trajectory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from diffusers.utils.torch_utils import randn_tensor

from ddpo_lessons.image import check_size
from ddpo_lessons.models import Family, Schedule, family_of

Generators = torch.Generator | list[torch.Generator] | None


@dataclass(frozen=True)
class Trajectory:
    """What one rollout did: states, actions and how likely each action was."""

    #: (B, T+1, C, h, w) float32; action k leads from `latents[:, k]` to `latents[:, k + 1]`
    latents: torch.Tensor
    timesteps: torch.Tensor  #: (B, T), the timestep at which action k was taken
    log_probs: torch.Tensor  #: (B, T) float32, log-probability of action k under the policy that took it
    #: what the policy was told, (B, ...) each, by names that the family gives; those that begin with
    #: `negative_` are there only where guidance needs a second pass
    conditioning: dict[str, torch.Tensor]
    guidance_scale: float  #: the guidance that was part of the policy
    schedule: Schedule  #: the steps that were run; replaying takes their numbers from here and nowhere else
    #: (B, C, h, w) float32, what the VAE decoded: `latents[:, -1]`, or what later steps without noise, which
    #: are no actions, made of it
    final_latents: torch.Tensor
    group_size: int = 1  #: so many rollouts side by side began in one state
    #: into so many they parted at each action, until each went alone; None for all at the first
    branches: int | None = None

    @property
    def num_steps(self) -> int:
        """The number of actions T that were taken and can be trained on."""
        return self.timesteps.shape[1]

    @property
    def is_guided(self) -> bool:
        """Whether the policy took two passes a step."""
        return any(name.startswith("negative_") for name in self.conditioning)

    @staticmethod
    def cat(trajectories: Sequence[Trajectory]) -> Trajectory:
        """Join trajectories of one schedule; those not guided, where one pass was enough, mix with guided."""
        first = trajectories[0]
        names = {name: None for t in trajectories for name in t.conditioning}  # a set that keeps its order
        return replace(
            first,
            latents=torch.cat([t.latents for t in trajectories]),
            timesteps=torch.cat([t.timesteps for t in trajectories]),
            log_probs=torch.cat([t.log_probs for t in trajectories]),
            conditioning={name: torch.cat([_told(t, name) for t in trajectories]) for name in names},
            final_latents=torch.cat([t.final_latents for t in trajectories]),
        )


def _told(trajectory: Trajectory, name: str) -> torch.Tensor:
    return trajectory.conditioning.get(name, trajectory.conditioning[name.removeprefix("negative_")])


# ------------------------------------------------------------------------------------------- seeds
# What random numbers are drawn for. A seed is mixed from the run's seed, the number of the epoch (or of the
# optimizer step), one of these, and the number of the sample, so that it depends neither on what was drawn
# before nor on batch sizes or the number of processes.
INITIAL_NOISE = 0  # (seed, epoch, purpose, sample or group)
ACTIONS = 1  # (seed, epoch, purpose, sample)
SHUFFLE = 2  # the order of training: (seed, epoch, purpose, inner epoch, process)
FORWARD_PROCESS = 3  # timesteps and noise of training: (seed, purpose, optimizer step, 0, sample, column)
WINDOW = 4  # which steps have noise: (seed, epoch, purpose)
STEPS_WITH_GRADIENT = 5  # (seed, optimizer step, purpose)
NEW_NOISE = 6  # of steps that are taken again with a gradient: (seed, optimizer step, purpose, sample)
NO_EPOCH = -1  # in the place of an epoch, for images that are only looked at: (seed, -1, number)


def sample_seed(*numbers: int) -> int:
    """Mix numbers such as (seed, epoch, purpose, sample) into one 63-bit seed."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seeded(*numbers: int) -> torch.Generator:
    """Return a generator of the CPU with the `sample_seed` of these numbers."""
    return torch.Generator().manual_seed(sample_seed(*numbers))


def sample_noise(shape: Sequence[int], generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Draw standard normal noise (N, ...) float32 of a shape, each sample's from its own generator."""
    return torch.stack([torch.randn(shape, generator=g, dtype=torch.float32) for g in generators])


# -------------------------------------------------------------------------------------- first states
def from_noise(family: Family, noise: torch.Tensor) -> torch.Tensor:
    """Return the first state (B, C, h, w) float32 of text-to-image: noise, as large as the schedule's is."""
    return noise.float() * family.init_noise_sigma


def from_images(
    family: Family,
    images: torch.Tensor,
    schedule: Schedule,
    noise: torch.Tensor | None = None,
    generator: Generators = None,
    group_size: int = 1,
) -> torch.Tensor:
    """Return the first state of img2img: x_t = sqrt(ᾱ_t) z + sqrt(1 - ᾱ_t) ε, with z the image's latent.

    Images are (B, 3, H, W) in [0, 1], the state (B, C, h, w) float32; t is the first timestep of the
    schedule. The noise ε is drawn when not given. So many images side by side as `group_size` says are the
    same one, and encoded once.
    """
    clean = family.encode(images[::group_size]).repeat_interleave(group_size, dim=0)  # (B, C, h, w)
    if noise is None:
        noise = _first_noise(clean.shape, generator, clean.device, group_size)
    return family.add_noise(clean, noise, schedule.timesteps[:1])


# ------------------------------------------------------------------------------------------ sampling
def _first_noise(
    shape: Sequence[int], generator: Generators, device: torch.device, group_size: int
) -> torch.Tensor:
    """Draw the noise of first states, that of each group's first rollout for all of the group."""
    noise = randn_tensor(tuple(shape), generator, device, torch.float32)
    return noise[::group_size].repeat_interleave(group_size, dim=0)


def _check_groups(group_size: int, prompts: Sequence[str], **tensors: torch.Tensor | None) -> None:
    """Refuse groups whose rollouts do not have all in common that is computed once for them."""
    if group_size < 1 or len(prompts) % group_size:
        raise ValueError(f"group_size={group_size} must be 1 or more and divide the {len(prompts)} prompts")
    firsts = [n - n % group_size for n in range(len(prompts))]
    if any(prompts[n] != prompts[first] for n, first in enumerate(firsts)):
        raise ValueError(f"group_size={group_size}: the prompts of a group must be the same")
    for name, tensor in tensors.items():
        if tensor is not None and not torch.equal(tensor, tensor[firsts]):
            raise ValueError(f"group_size={group_size}: {name} must be the same within a group")


def _check_batch(family: Family, images: torch.Tensor, prompts: Sequence[str]) -> None:
    family.check_images(images)
    if len(images) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts for {len(images)} images: give one prompt per image")


def _draw_noise(count: int, latents: torch.Tensor, generator: Generators) -> torch.Tensor:
    """Draw the noise of every step, (T, B, C, h, w), in the order of the steps, and move it once."""
    each = generator if isinstance(generator, list) else [generator]
    place = each[0].device if each[0] is not None else latents.device
    noise = [randn_tensor(latents.shape, generator, place, torch.float32) for _ in range(count)]
    return torch.stack(noise).to(latents.device)


def recorded_steps(schedule: Schedule) -> tuple[int, int]:
    """Return the first of the steps that are recorded and the one after the last.

    They are the schedule's actions, by default all steps with noise, which are neighbours; in an ODE they are
    all. Raises ValueError if noise is asked for, and no step has it.
    """
    if schedule.actions is not None:
        return schedule.actions
    noisy = torch.nonzero(schedule.stds > 0).flatten().tolist()
    if noisy:
        return noisy[0], noisy[-1] + 1
    if schedule.eta > 0:
        raise ValueError(
            "every step of the schedule is deterministic: use more steps or a larger noise_strength"
        )
    return 0, len(schedule.stds)


@torch.no_grad()
def sample_trajectory(
    family: Family,
    latents: torch.Tensor,
    schedule: Schedule,
    conditioning: dict[str, torch.Tensor],
    guidance_scale: float,
    generator: Generators = None,
    reduction: Literal["mean", "sum"] = "mean",
    group_size: int = 1,
    branches: int | None = None,
) -> Trajectory:
    """Run the policy over a schedule; steps that are no actions are run, and not recorded.

    Where no step has noise, as in the ODE of a flow model, all are recorded, with log-prob 0: such a
    trajectory serves losses that need no log-probs.

    The policy is the family's denoiser, `latents` the first state (B, C, h, w), and `conditioning` that of
    `family.condition`. The generator, one or one per sample, decides the actions. Group size and branches are
    those of `Trajectory`: what rollouts share is predicted once. A ValueError says that noise is asked for,
    and no step has it.
    """
    first, end = recorded_steps(schedule)
    states, log_probs = [], []
    noise = _draw_noise(len(schedule.stds), latents, generator)  # (T, B, C, h, w)
    shared = group_size  # so many side by side are in one state
    for k, std in enumerate(schedule.stds.tolist()):
        timesteps = schedule.timesteps[k].expand(len(latents))  # (B,)
        distinct = {name: value[::shared] for name, value in conditioning.items()}
        output = family.predict(
            family.denoiser, latents[::shared], timesteps[::shared], distinct, guidance_scale
        )
        output = output.repeat_interleave(shared, dim=0)  # (B, C, h, w)
        if std > 0:
            # Rollouts of a group part by actions alone: other noise is common to all of them.
            together = group_size
            if first <= k < end:
                shared = together = max(1, shared // (branches or group_size))
            noise[k] = noise[k][::together].repeat_interleave(together, dim=0)
        step = schedule.step(output, timesteps, latents, noise=noise[k], reduction=reduction)
        if first <= k < end:
            states.append(latents)
            log_probs.append(step.log_prob)
        latents = step.prev_sample
        if k == end - 1:
            states.append(latents)
    return Trajectory(
        latents=torch.stack(states, dim=1),  # (B, T+1, C, h, w)
        timesteps=schedule.timesteps[first:end].expand(len(latents), -1),  # (B, T)
        log_probs=torch.stack(log_probs, dim=1),  # (B, T)
        conditioning=conditioning,
        guidance_scale=guidance_scale,
        schedule=schedule,
        final_latents=latents,
        group_size=group_size,
        branches=branches,
    )


@dataclass(frozen=True)
class SamplingSettings:
    """How images are sampled, beside the model, the prompts and the random numbers."""

    num_inference_steps: int = 50  #: denoising steps of the whole schedule
    #: w; at 1 and below, and where prompt and negative prompt agree, one forward pass a step predicts from
    #: the prompt alone
    guidance_scale: float = 5.0
    #: η of DDIM, > 0; 1 gives DDPM's noise. Of a flow model its SDE's level of noise; 0 gives the ODE
    eta: float = 1.0
    negative_prompt: str = ""  #: what guidance leads away from
    reduction: Literal["mean", "sum"] = "mean"  #: of the log-density over a latent, see `DDIMSchedule.step`
    #: so many rollouts side by side have one context and one initial noise; what they share is computed once
    group_size: int = 1


def text2img_rollout(
    pipeline: Any,
    prompts: Sequence[str],
    settings: SamplingSettings = SamplingSettings(),
    *,
    generator: Generators = None,
    initial_noise: torch.Tensor | None = None,
    size: tuple[int, int] | None = None,
    images: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Trajectory]:
    """Sample images from noise, (B, 3, H, W) float32 in [0, 1], and record the trajectory.

    `pipeline` is a diffusers pipeline of a known family; or a `Family`, which remembers prompts' embeddings.
    The generator, one or one per sample, decides noise and actions; `initial_noise` is x_T (B, C, h, w),
    drawn when not given. `size` is (H, W) in pixels; that of `images`, or the model's own, if not given.
    `images` (B, 3, H, W) in [0, 1] are for a model that edits, such as FLUX.1 Kontext.

    Raises TypeError if the pipeline is of no known family, or takes no images; ValueError if eta, size or
    images do not fit the model, the scheduler cannot be used, or the rollouts of a group do not have prompt,
    image and noise in common.
    """
    family = family_of(pipeline)
    if images is not None:
        _check_batch(family, images, prompts)
        size = size or (images.shape[2], images.shape[3])
    _check_groups(settings.group_size, prompts, images=images, initial_noise=initial_noise)
    if size is not None:
        check_size(size, *family.sides)
    schedule = family.schedule(settings.num_inference_steps, eta=settings.eta, size=size)
    if initial_noise is None:
        shape = (len(prompts), *family.latents_shape(size))
        initial_noise = _first_noise(shape, generator, family.denoiser.device, settings.group_size)
    latents = from_noise(family, initial_noise)
    return _sample(family, prompts, latents, schedule, settings, generator, size, images)


def img2img_rollout(
    pipeline: Any,
    prompts: Sequence[str],
    images: torch.Tensor,
    noise_strength: float,
    settings: SamplingSettings = SamplingSettings(),
    *,
    generator: Generators = None,
    initial_noise: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Trajectory]:
    """Encode images, add the noise that `noise_strength` names, and denoise (SDEdit, arXiv 2108.01073).

    Images are (B, 3, H, W) float in [0, 1] with a prompt each; `noise_strength` in (0, 1] is the fraction of
    the schedule that is run; `initial_noise` is ε of `from_images`. All else is that of `text2img_rollout`.
    Raises TypeError if the pipeline is of no known family, or the images are not floats; ValueError if
    images, noise_strength or eta do not fit, or the rollouts of a group do not have prompt, image and noise
    in common.
    """
    family = family_of(pipeline)
    _check_batch(family, images, prompts)
    _check_groups(settings.group_size, prompts, images=images, initial_noise=initial_noise)
    size = (images.shape[2], images.shape[3])
    schedule = family.schedule(settings.num_inference_steps, noise_strength, settings.eta, size)
    latents = from_images(family, images, schedule, initial_noise, generator, settings.group_size)
    return _sample(family, prompts, latents, schedule, settings, generator, size)


def _sample(
    family: Family,
    prompts: Sequence[str],
    latents: torch.Tensor,
    schedule: Schedule,
    settings: SamplingSettings,
    generator: Generators,
    size: tuple[int, int] | None,
    images: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Trajectory]:
    """Encode the prompts, run the policy from first states, and decode what it makes."""
    scale = settings.guidance_scale
    conditioning = family.condition(prompts, settings.negative_prompt, scale, size, images)
    trajectory = sample_trajectory(
        family, latents, schedule, conditioning, scale, generator, settings.reduction, settings.group_size
    )
    return family.decode(trajectory.final_latents), trajectory
