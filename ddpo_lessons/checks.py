"""Check a user's model, reward and data for faults that raise no error (preflight).

Preflight runs one epoch, generates and scores some of its images again, and compares images before training,
after it, and with the saved weights. Then it undoes the epoch.
"""

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DDIMScheduler

from ddpo_lessons.data.contexts import Context, check_rewards, score
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.loading import quiet_loading
from ddpo_lessons.models import family_of, image_size
from ddpo_lessons.models.policy import adapter_off, copy_of, read_lora, unwrap_forward, with_parts
from ddpo_lessons.rollout import Trajectory
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.first_epoch import SKIPPED, Finding, Findings, judged, skip_if_failed
from ddpo_lessons.training.sampler import Sampler

SHOWN = 4  # number of images that are generated several times
MOST_DISTANCE = 5e-3  # of pixels in [0, 1], on average: about one of 255 levels


def preflight(trainer: Trainer, plain: bool = True) -> Findings:
    """Run a trainer's next epoch, check it for faults that raise no error, and undo it.

    With `plain` it also compares images with those of a plain diffusers pipeline, as in the docs.

        preflight(trainer)  # as the last expression of a cell: a line per check
        trainer.train()  # as if there had been no preflight

    See `Trainer.rehearse` for what is undone. Raises ValueError with several processes.
    """
    if trainer.accelerator.num_processes > 1:
        raise ValueError("preflight looks at one process: start it without accelerate launch")
    return Findings(trainer.rehearse(lambda: _look_at_epoch(trainer, plain)))


def _look_at_epoch(trainer: Trainer, plain: bool) -> list[Finding]:
    epoch = trainer.epochs_done
    contexts = trainer.contexts.of(epoch)
    batches, trajectory, _ = trainer.sampler.sample(epoch, contexts)
    images, rewards = torch.cat([batch.images for batch in batches]), check_rewards(batches)  # (N, 3, H, W)
    asked = [contexts[row] for row in trainer.sampler.share.rows.flatten().tolist()]
    found = [_of_images(images), _of_starts(trajectory), *_of_scoring(trainer, images, asked, rewards)]
    found.append(_of_single(trainer, contexts, rewards))
    shown = asked[:: max(1, len(asked) // SHOWN)][:SHOWN]
    with trainer.learner.averaged_policy():
        before = trainer.sampler.draw(shown)
    with adapter_off(trainer.learner.denoiser):
        bare = trainer.sampler.draw(shown)
    trainer.step(epoch)
    found += [*trainer.preflight, *_of_saving(trainer, shown, before, bare)]
    return [*found, *of_snippet(trainer, shown)] if plain else found


def _of_images(images: torch.Tensor) -> Finding:
    low, high, kind = images.min().item(), images.max().item(), str(images.dtype).removeprefix("torch.")
    fine = images.dtype == torch.float32 and 0 <= low < high - 0.1 and high <= 1
    remedy = "not float32 in [0, 1], or all of one brightness"
    return judged(
        "images are float32 in [0, 1] and not constant", fine, f"{kind} from {low:.2f} to {high:.2f}", remedy
    )


def _of_starts(trajectory: Trajectory) -> Finding:
    """Check that only rollouts of the same group share their first state."""
    starts = trajectory.latents[:: trajectory.group_size, 0].flatten(1)  # (groups, C h w)
    found, expected = len(starts.unique(dim=0)), len(starts)
    remedy = "are seeds of random numbers used again?"
    says = f"{found} of {expected} groups" if trajectory.group_size > 1 else f"{found} of {expected} samples"
    return judged("every sample or group starts from its own noise", found == expected, says, remedy)


def _rescore(trainer: Trainer, images: torch.Tensor, contexts: Sequence[Context], size: int) -> torch.Tensor:
    """Score images (N, 3, H, W) again, `size` at a time: (N,)."""
    rewards = []
    for first in range(0, len(images), size):
        part = slice(first, first + size)
        rewards.append(score(trainer.reward_function, images[part], contexts[part]).rewards.cpu())
    return torch.cat(rewards)


def _compared(
    check: str,
    again: torch.Tensor,
    rewards: torch.Tensor,
    epoch: torch.Tensor,
    remedy: str,
    allowed: float = 0.05,
) -> Finding:
    """Compare rewards (N,) with earlier ones, relative to the standard deviation of the epoch."""
    error, deviation = (again - rewards).abs().max().item(), epoch.std(correction=0).item()
    says = f"they differ by {error:.2g} at most, with a standard deviation of {deviation:.2g}"
    return judged(check, error <= allowed * deviation + 1e-6, says, remedy)


def _of_scoring(
    trainer: Trainer, images: torch.Tensor, contexts: list[Context], rewards: torch.Tensor
) -> list[Finding]:
    """Score the same images again, and in reverse order."""
    size = trainer.config.sample_batch_size
    again = _rescore(trainer, images, contexts, size)
    backwards = _rescore(trainer, images.flip(0), contexts[::-1], size).flip(0)
    random = "dropout, random numbers, or a memory of earlier calls?"
    by_place = "a reward that goes by place in the batch, or compares within it?"
    return [
        _compared("scoring the same images again gives the same rewards", again, rewards, rewards, random),
        _compared("rewards do not depend on the order of the batch", backwards, rewards, rewards, by_place),
    ]


def _of_single(trainer: Trainer, contexts: dict[int, Context], rewards: torch.Tensor) -> Finding:
    """Generate the first and the last group separately, and score their samples one by one."""
    epoch, sampler, size = trainer.epochs_done, trainer.sampler, trainer.config.sample_group_size
    schedule = sampler.schedule(epoch, list(contexts.values()))
    first, last = list(range(size)), list(range(len(rewards) - size, len(rewards)))
    images = torch.cat(
        [sampler.render(sampler.beginning(epoch, rows, contexts, schedule)) for rows in (first, last)]
    )
    rows = [*first, *last]
    alone = _rescore(trainer, images, [contexts[row] for row in rows], 1)
    return _compared(
        "samples generated and scored separately get the same rewards",
        alone,
        rewards[rows],
        rewards,
        "images, prompts or metadata shifted against one another, or a reward that depends on its batch?",
        # Forward passes of single groups are rounded differently in bf16 and fp16.
        allowed=0.05 if trainer.config.mixed_precision == "no" else 0.3,
    )


def _of_saving(
    trainer: Trainer, contexts: Sequence[Context], before: torch.Tensor, bare: torch.Tensor
) -> list[Finding]:
    """Compare images of the trained policy with those before training and those of the saved weights.

    `bare` are images (B, 3, H, W) without the adapter, before this epoch.
    """
    with trainer.learner.averaged_policy():
        after = trainer.sampler.draw(contexts)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save_pretrained(folder)
        still_bare, loaded = draw_saved(trainer, contexts, Path(folder))
    moved, error = _distance(after, before), _distance(after, loaded)
    watched = trainer.watched
    assert watched is not None
    is_excused = not any(watched.rates)  # a learning rate of 0, at the start or the end of a schedule
    drawn = judged(
        "training changes the sampled images",
        moved > 0 or is_excused,
        f"by {moved:.1e} on average, from the same noise",
        "does the sampler use other weights than those that are trained?",
    )
    if trainer.learner.only_skipped:
        drawn = Finding(drawn.check, True, SKIPPED, checked=False)
    elif watched.is_flat:
        drawn = skip_if_failed(drawn)
    saved = judged(
        "the saved weights give the trained model's images",
        error <= 0.25 * moved + 1e-6,
        f"loaded by plain diffusers, {error:.1e} away",
        "an empty file, other names of weights, or another scale of the adapter?",
    )
    if moved == 0:
        saved = Finding(saved.check, True, "not seen, because training changed no image", checked=False)
    found = [drawn, saved]
    if still_bare is not None:
        away = _distance(still_bare, bare)
        says = f"without it images are {away:.1e} from those before training"
        fine = away <= 0.25 * moved + 1e-6
        found.append(
            judged("the model without the adapter is unchanged", fine, says, "are its weights trained?")
        )
    return found


def draw_saved(
    trainer: Trainer, contexts: Sequence[Context], folder: Path
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Generate images without the new adapter, and with the weights that plain diffusers loads."""
    pipeline = copy_of(trainer.pipeline)
    sampler = replace(trainer.sampler, family=family_of(pipeline))
    if not trainer.use_lora:
        with quiet_loading():
            loaded = type(pipeline).from_pretrained(folder).to(trainer.accelerator.device)
        return None, replace(sampler, family=family_of(loaded)).draw(contexts)
    pipeline.unload_lora_weights()
    bare = sampler.draw(contexts)
    read_lora(pipeline, folder)
    sampler.family.forget_prompts()  # whose embeddings an adapter of the text encoder may have made
    return None if trainer.had_adapter else bare, sampler.draw(contexts)


# ------------------------------------------------------------------------------------- plain diffusers
def of_snippet(trainer: Trainer, contexts: Sequence[Context]) -> list[Finding]:
    """Compare images of the docs' snippet for plain diffusers with those of the run, from the same noise.

    Both use float32, because diffusers samples other noise in half precision. Flow models are left out,
    because their plain pipelines need no other scheduler.
    """
    if not isinstance(trainer.pipeline.scheduler, DDIMScheduler):
        return []
    family = family_of(copy_of(trainer.pipeline, torch.float32))
    unwrap_forward(family.denoiser)
    sampler = replace(trainer.sampler, family=family, autocast=contextlib.nullcontext)
    error = _distance(sampler.draw(contexts), draw_plain(sampler, contexts))
    remedy = (
        "another schedule of steps or, where it is nan, diffusers' root of a negative number: sample with "
        "eta=0.999, see docs/howto/troubleshooting.md"
    )
    says = f"{error:.1e} away, {MOST_DISTANCE:g} is allowed"
    return [
        judged("a plain diffusers pipeline gives the trainer's images", error <= MOST_DISTANCE, says, remedy)
    ]


@torch.no_grad()
def draw_plain(sampler: Sampler, contexts: Sequence[Context]) -> torch.Tensor:
    """Generate an image of each context (B, 3, H, W) as a user would, with the noise of `Sampler.draw`.

    Img2img starts from the latents' mean, whereas diffusers would sample the latents of an image.
    """
    config, start, family = sampler.config, sampler.start, sampler.family
    plain, side = with_parts(family.pipeline, family.without_checker), image_size(family.pipeline)
    height, width = start.size(contexts) or (side, side)
    settings: dict[str, Any] = {"height": height, "width": width}
    if isinstance(start, FromImages):
        with quiet_loading():
            plain = diffusers.AutoPipelineForImage2Image.from_pipe(plain, **family.without_checker)
        images = torch.stack([context.image for context in contexts if context.image is not None])
        settings = {"image": family.encode(images), "strength": start.noise_strength}
    loaded = getattr(plain.scheduler, "replaced", plain.scheduler)  # the model's own
    plain.scheduler = DDIMScheduler.from_config(loaded.config, clip_sample=False)
    plain.set_progress_bar_config(disable=True)
    made: torch.Tensor = plain(
        start.prompts(contexts, config),
        negative_prompt=[config.negative_prompts] * len(contexts) if config.negative_prompts else None,
        num_inference_steps=config.sample_num_steps,
        guidance_scale=config.sample_guidance_scale,
        eta=config.sample_eta,
        generator=sampler.generators(range(len(contexts))),
        output_type="pt",
        **settings,
    ).images
    return made


def _distance(images: torch.Tensor, others: torch.Tensor) -> float:
    return (images - others).abs().mean().item()
