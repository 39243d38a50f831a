"""Lessons 06 and 07: sample a trajectory with its log-probs, from noise or from an image.

A rollout is an episode of DDPO's denoising MDP (Black et al. 2023, arXiv 2305.13301, section 4.3): the state
is (prompt, t, x_t), the action is x_{t-1}, and the policy is the Gaussian of one stochastic DDIM step.
Sampling and training both predict with the family's `predict`, so that training replays the policy that
sampled.
"""

from __future__ import annotations

import hashlib
import itertools
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
    """The record of a batch of rollouts: states, actions and the log-prob of each action."""

    #: (B, T+1, C, h, w) float32; action k leads from `latents[:, k]` to `latents[:, k + 1]`
    latents: torch.Tensor
    timesteps: torch.Tensor  #: (B, T), the timestep of action k
    log_probs: torch.Tensor  #: (B, T) float32, log-prob of action k under the policy that sampled it
    #: inputs that the policy is conditioned on, (B, ...) each, under the family's names; names with the
    #: prefix `negative_` exist only if guidance needs a second forward pass
    conditioning: dict[str, torch.Tensor]
    guidance_scale: float  #: the guidance scale, which is part of the policy
    schedule: Schedule  #: the steps that were run; a replay takes their numbers only from here
    #: (B, C, h, w) float32, the latents that the VAE decoded: `latents[:, -1]`, or the result of later steps
    #: without noise, which are not actions
    final_latents: torch.Tensor
    group_size: int = 1  #: the number of consecutive rollouts that start in the same state
    #: the number of branches into which a group splits at each action, until each rollout is on its own; None
    #: if all rollouts separate at the first action
    branches: int | None = None

    @property
    def num_steps(self) -> int:
        """The number of recorded actions, T, which can be trained on."""
        return self.timesteps.shape[1]

    @property
    def is_guided(self) -> bool:
        """Whether the policy used two forward passes per step."""
        return any(name.startswith("negative_") for name in self.conditioning)

    @staticmethod
    def cat(trajectories: Sequence[Trajectory]) -> Trajectory:
        """Join trajectories of one schedule, also guided ones with those that needed only one pass."""
        first = trajectories[0]
        names = {name: None for t in trajectories for name in t.conditioning}  # a set that keeps the order
        return replace(
            first,
            latents=torch.cat([t.latents for t in trajectories]),
            timesteps=torch.cat([t.timesteps for t in trajectories]),
            log_probs=torch.cat([t.log_probs for t in trajectories]),
            conditioning={name: torch.cat([_condition(t, name) for t in trajectories]) for name in names},
            final_latents=torch.cat([t.final_latents for t in trajectories]),
        )


def _condition(trajectory: Trajectory, name: str) -> torch.Tensor:
    return trajectory.conditioning.get(name, trajectory.conditioning[name.removeprefix("negative_")])


# ------------------------------------------------------------------------------------------- seeds
# Purposes of random numbers. A seed is mixed from the run's seed, the number of the epoch (or of the
# optimizer step), one of these purposes, and the number of the sample. It therefore depends neither on
# earlier random numbers nor on batch sizes or the number of processes.
INITIAL_NOISE = 0  # (seed, epoch, purpose, sample or group)
ACTIONS = 1  # (seed, epoch, purpose, sample)
SHUFFLE = 2  # the order of training: (seed, epoch, purpose, inner epoch, process)
FORWARD_PROCESS = 3  # timesteps and noise of training: (seed, purpose, optimizer step, 0, sample, column)
WINDOW = 4  # the position of the window of noise: (seed, epoch, purpose)
STEPS_WITH_GRADIENT = 5  # (seed, optimizer step, purpose)
NEW_NOISE = 6  # of steps that are repeated with a gradient: (seed, optimizer step, purpose, sample)
NO_EPOCH = -1  # instead of an epoch, for images that are not trained on: (seed, -1, number)


def sample_seed(*numbers: int) -> int:
    """Mix numbers such as (seed, epoch, purpose, sample) into one 63-bit seed."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seeded(*numbers: int) -> torch.Generator:
    """Return a CPU generator with the `sample_seed` of these numbers."""
    return torch.Generator().manual_seed(sample_seed(*numbers))


def sample_noise(shape: Sequence[int], generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Sample standard normal noise (N, ...) float32, with one generator per sample."""
    return torch.stack([torch.randn(shape, generator=g, dtype=torch.float32) for g in generators])


# -------------------------------------------------------------------------------------- first states
def from_noise(family: Family, noise: torch.Tensor) -> torch.Tensor:
    """Return the first state (B, C, h, w) float32 of text-to-image: noise on the schedule's scale."""
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

    Images are (B, 3, H, W) in [0, 1], the state is (B, C, h, w) float32, and t is the first timestep of the
    schedule. The noise ε is sampled if it is not given. `group_size` consecutive images are equal, so each
    group is encoded once.
    """
    clean = family.encode(images[::group_size]).repeat_interleave(group_size, dim=0)  # (B, C, h, w)
    if noise is None:
        noise = _first_noise(clean.shape, generator, clean.device, group_size)
    return family.add_noise(clean, noise, schedule.timesteps[:1])


# ------------------------------------------------------------------------------------------ sampling
def _first_noise(
    shape: Sequence[int], generator: Generators, device: torch.device, group_size: int
) -> torch.Tensor:
    """Sample the noise of first states, one per group."""
    noise = randn_tensor(tuple(shape), generator, device, torch.float32)
    return noise[::group_size].repeat_interleave(group_size, dim=0)


def _check_groups(group_size: int, prompts: Sequence[str], **tensors: torch.Tensor | None) -> None:
    """Raise a ValueError for groups whose rollouts differ in something that is computed once."""
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
    """Sample the noise of all steps, (T, B, C, h, w), in their order, and move it to the device once."""
    each = generator if isinstance(generator, list) else [generator]
    place = each[0].device if each[0] is not None else latents.device
    noise = [randn_tensor(latents.shape, generator, place, torch.float32) for _ in range(count)]
    return torch.stack(noise).to(latents.device)


def recorded_steps(schedule: Schedule) -> tuple[int, int]:
    """Return the index of the first recorded step, and the index after the last.

    Recorded steps are the schedule's actions. By default these are all steps with noise, which are
    consecutive; in an ODE they are all steps. Raises ValueError if η is above 0 but no step has noise.
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


def rollouts_per_state(schedule: Schedule, group_size: int, branches: int | None) -> list[int]:
    """Return how many consecutive rollouts share each state, before each step and after the last (T + 1).

    A group is a tree: its rollouts start in one state, and each action splits a state into `branches` states
    (None: into one per rollout). With 4 rollouts and 2 branches, and steps 1 and 2 of 0 to 3 as actions:

        step       0    1 (action)    2 (action)    3
        states  abcd -> abcd -> ab, cd -> a, b, c, d -> a, b, c, d
        result  [4,     4,      2,        1,            1]
    """
    first, end = recorded_steps(schedule)
    counts = [group_size]
    for k, std in enumerate(schedule.stds.tolist()):
        splits = first <= k < end and std > 0
        counts.append(max(1, counts[-1] // (branches or group_size)) if splits else counts[-1])
    return counts


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
    """Sample a batch of trajectories over a schedule.

    Steps that are not actions are run but not recorded. If no step has noise, as in the ODE of a flow model,
    all steps are recorded with log-prob 0, for losses that need no log-probs.

    The policy is the family's denoiser, `latents` is the first state (B, C, h, w), and `conditioning` comes
    from `family.condition`. The generator (one, or one per sample) determines the actions. Group size and
    branches are those of `Trajectory`; predictions that rollouts share are computed once. Raises a ValueError
    if η is above 0 but no step has noise.
    """
    first, end = recorded_steps(schedule)
    states, log_probs = [], []
    noise = _draw_noise(len(schedule.stds), latents, generator)  # (T, B, C, h, w)
    counts = rollouts_per_state(schedule, group_size, branches)
    for k, (shared, shared_after) in enumerate(itertools.pairwise(counts)):
        is_action = first <= k < end
        timesteps = schedule.timesteps[k].expand(len(latents))  # (B,)
        distinct = {name: value[::shared] for name, value in conditioning.items()}
        output = family.predict(
            family.denoiser, latents[::shared], timesteps[::shared], distinct, guidance_scale
        )
        output = output.repeat_interleave(shared, dim=0)  # (B, C, h, w)
        # Rollouts of a group differ only in their actions; all other noise is shared.
        alike = shared_after if is_action else group_size
        step_noise = noise[k, ::alike].repeat_interleave(alike, dim=0)
        step = schedule.step(output, timesteps, latents, noise=step_noise, reduction=reduction)
        if is_action:
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
    """Settings of sampling, apart from the model, the prompts and the random numbers."""

    num_inference_steps: int = 50  #: denoising steps of the whole schedule
    #: w; at 1 and below, or if prompt and negative prompt are equal, one forward pass per step predicts from
    #: the prompt alone
    guidance_scale: float = 5.0
    #: η of DDIM, > 0; 1 gives DDPM's noise. For a flow model the noise level of its SDE; 0 gives the ODE
    eta: float = 1.0
    negative_prompt: str = ""  #: the prompt that guidance moves away from
    reduction: Literal["mean", "sum"] = "mean"  #: of the log-density over a latent, see `DDIMSchedule.step`
    #: the number of consecutive rollouts that share prompt, input image and initial noise
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

    `pipeline` is a diffusers pipeline of a known family, or a `Family`, which caches the embeddings of
    prompts. The generator (one, or one per sample) determines noise and actions. `initial_noise` is x_T (B,
    C, h, w), and is sampled if it is not given. `size` is (H, W) in pixels, by default that of `images` or
    the model's own. `images` (B, 3, H, W) in [0, 1] are for an editing model such as FLUX.1 Kontext.

    Raises TypeError if the pipeline is of no known family, or takes no images. Raises ValueError if eta, size
    or images do not fit the model, if the scheduler cannot be used, or if the rollouts of a group differ in
    prompt, image or noise.
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
    """Encode images, add the noise of `noise_strength`, and denoise them (SDEdit, arXiv 2108.01073).

    Images are (B, 3, H, W) float in [0, 1], with one prompt each. `noise_strength` in (0, 1] is the fraction
    of the schedule that is run, and `initial_noise` is ε of `from_images`. Other arguments are those of
    `text2img_rollout`. Raises TypeError if the pipeline is of no known family, or the images are not floats.
    Raises ValueError if images, noise_strength or eta do not fit, or if the rollouts of a group differ in
    prompt, image or noise.
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
    """Encode the prompts, sample from the first states, and decode the results."""
    scale = settings.guidance_scale
    conditioning = family.condition(prompts, settings.negative_prompt, scale, size, images)
    trajectory = sample_trajectory(
        family, latents, schedule, conditioning, scale, generator, settings.reduction, settings.group_size
    )
    return family.decode(trajectory.final_latents), trajectory
