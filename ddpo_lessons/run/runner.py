"""The machinery of a run around an algorithm: epochs, processes, checkpoints, records, interrupts.

All randomness is drawn from (seed, epoch, sample), never from what happened before: an epoch can be done
again, resumed or spread over processes and comes out the same. An epoch that fails or is interrupted leaves
everything as it was before it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import random
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
from accelerate.utils import gather_object, set_seed
from diffusers.utils import logging as diffusers_logging
from torch import nn
from tqdm.auto import tqdm

from ddpo_lessons import __version__
from ddpo_lessons.algorithms.base import Algorithm, Samples
from ddpo_lessons.config import RUN, DDPOConfig
from ddpo_lessons.data.contexts import (
    Context,
    PromptFunction,
    RewardFunction,
    check_functions,
    check_hook,
    check_key,
    check_rewards,
    info_means,
    score,
    split_info,
)
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.families import Schedule, family_of, model_name
from ddpo_lessons.families.policy import (
    Reference,
    load_adapter,
    make_optimizer,
    originals,
    prepare_policy,
    save_policy,
)
from ddpo_lessons.rollout import Trajectory, play, recorded_steps, sample_seed
from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.interrupt import DeferredInterrupt, Stopped
from ddpo_lessons.run.learner import Learner
from ddpo_lessons.run.processes import make_accelerator, make_autocast
from ddpo_lessons.run.record import changed_fields, changed_sources, continued, name_of
from ddpo_lessons.run.runlog import NO_RECORDS, RunLog, claim, hold

# A network rounds differently in a batch of another size, and a log-prob divides that by the step's noise:
# with less noise than this, rounding alone can take a ratio out of the peers' clip range of 1e-4.
MIN_STD = 2e-4
SHOWN_IMAGES = 32

# Called as (batches, global_step, tracker), as by the peers.
ImageSamplesHook = Callable[[list[list[Any]], int, Any], None]


def _mark(context: Context) -> Any:
    """Return what tells a context from others: its prompt, and a pixel of each channel of its image."""
    image = context.image
    return context.prompt, None if image is None else image.flatten()[:: image[0].numel()].tolist()


def _refuse_nan(gradient: torch.Tensor) -> None:
    if gradient.isnan().any():
        raise ValueError(
            "the gradient of the reward with respect to the images is NaN: look for a root, a logarithm, a "
            "norm or a division at 0 in the reward function"
        )


class Runner:
    """Runs an algorithm on a model, from a start, for as many epochs as the config says.

    Several processes give the weights of one with the same samples and timesteps in each optimizer step; that
    is so where a step takes all of the epoch (and `train_timestep_fraction` is 1). Otherwise each process
    shuffles its own samples.

    Args:
        config: the settings.
        reward_function: `(images, prompts, metadata) -> rewards (B,)` or `(rewards, info)`, with images
            (B, 3, H, W) float in [0, 1]. The means of what a dict `info` holds for every sample are recorded
            as `reward/NAME`. What it raises ends the run, as do rewards that are not finite, and nothing is
            trained on that epoch; `rewards.service.time_limit` ends one that hangs.
        prompt_function: returns what `start` says. If it holds state, give it `state_dict()` and
            `load_state_dict()`; without them a resumed run calls it as often as the old run did. With
            `skip()` beside them a process leaves out what others sample, and makes its own images only. A
            `prefetch(calls)` is told before each epoch which of its draws will be calls, and which skipped.
        sd_pipeline: a plain diffusers pipeline, or a wrapper of `ddpo_lessons.compat`.
        image_samples_hook: called after every epoch as `(batches, global_step, tracker)`, where each batch
            is `[images, prompts, metadata, rewards, info]`, `global_step` counts optimizer steps, and the
            tracker is None when none was asked for.
        algorithm: such as `DDPO()` or `RWR()`.
        start: `FromNoise()` or `FromImages(noise_strength)`.
        about: more that config.json is to say of the run, such as {"reward": name}, and that a resume
            compares, see `run.record`. Model, start, algorithm and the functions' names are found without it.

    Raises:
        ValueError: if settings do not fit each other, the pipeline, the run's folder or the checkpoint.
        TypeError: if the pipeline or a function is not what it has to be.
    """

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: Any,
        image_samples_hook: ImageSamplesHook | None = None,
        *,
        algorithm: Algorithm,
        start: FromNoise,
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Check everything, build the policy and, when asked, resume."""
        check_functions(reward_function, prompt_function)
        check_hook("image_samples_hook", image_samples_hook)
        config.check()
        algorithm.check(config)
        self.config, self.algorithm, self.start = config, algorithm, start
        self.reward_function, self.prompt_function = reward_function, prompt_function
        self.image_samples_hook = image_samples_hook
        self.sd_pipeline = sd_pipeline
        self.pipeline = getattr(sd_pipeline, "sd_pipeline", sd_pipeline)
        self.family = family_of(self.pipeline)
        self.use_lora = getattr(sd_pipeline, "use_lora", config.train_use_lora)
        self.num_train_timesteps = start.count_train_timesteps(self._count_actions(), config)
        algorithm.begin(config, self.family, self.num_train_timesteps)
        self.accelerator = make_accelerator(config)
        self._check_plan()
        self._resumed_from = claim(config)
        is_gone = not Path(config.train_lora_from).is_dir()
        if config.train_lora_from and not (is_gone and self._resumed_from):  # a checkpoint has the weights
            load_adapter(self.family, config)
        self._fingerprints = self._look_at_model()
        self.record = self._describe(about)
        saved = self._read_checkpoint()
        self.autocast = make_autocast(config.mixed_precision, self.accelerator.device)
        self.learner = self._make_learner()
        self.epochs_done = 0
        self.log: RunLog | None = None  # of the main process, once training starts
        self._log_is_open = False
        self._metrics_mark: dict[str, Any] = NO_RECORDS  # what the resumed checkpoint knows of metrics.jsonl
        self._interrupt: DeferredInterrupt | None = None
        self._warned = False  # of an epoch that teaches nothing
        self.stopped_by: int | None = None  # the number of the signal that ended `train` early
        self._drawn: tuple[int, dict[int, Context]] | None = None  # the contexts of an epoch that is not done
        self._prompts_before: Any = None  # the prompt function's state before it
        if saved is not None:
            self._restore(*saved)

    @property
    def global_step(self) -> int:
        """Number of optimizer steps that were taken."""
        return self.learner.steps_done

    # ------------------------------------------------------------------------------------ preparation
    def _count_actions(self) -> int:
        """Return how many steps of a rollout are recorded; refuse settings with which one would fail."""
        config = self.config
        try:
            schedule = self._schedule(epoch=0)
            first, end = recorded_steps(schedule)
        except ValueError as error:
            fields = f"sample_num_steps={config.sample_num_steps}, sample_eta={config.sample_eta}"
            raise ValueError(f"{fields}: {error}") from error
        noisy = schedule.stds[schedule.stds > 0]
        if (noisy < MIN_STD).any():
            raise ValueError(
                f"sample_eta={config.sample_eta} leaves steps with noise of {noisy.min():.1e}, too "
                f"little for float32 to replay them (at least {MIN_STD:.0e}): raise it"
            )
        return end - first

    def _schedule(self, epoch: int) -> Schedule:
        """Return the steps that an epoch samples by."""
        asked = self.start.schedule(self.family, self.config)
        return self.algorithm.explore(asked, self.config, epoch)

    def _check_plan(self) -> None:
        """Work out the epoch, and refuse one that teaches nothing."""
        config = self.config
        self.plan = config.epoch_plan(self.num_train_timesteps, self.accelerator.num_processes)
        if self.plan.total_samples % config.sample_group_size:
            raise ValueError(
                f"sample_group_size={config.sample_group_size} does not divide the "
                f"{self.plan.total_samples} samples of an epoch: change it, sample_batch_size or "
                "sample_num_batches_per_epoch"
            )
        if self.plan.total_samples == 1 and not config.per_prompt_stat_tracking:
            raise ValueError(
                "an epoch of one sample teaches nothing, for its reward is its own mean: raise "
                "sample_batch_size or sample_num_batches_per_epoch"
            )

    def _describe(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is known of the run beside its config, in what JSON holds."""
        known = {
            "version": __version__,
            "model": model_name(self.pipeline),
            "pipeline": type(self.pipeline).__name__,
            "algorithm": {"name": type(self.algorithm).__name__, **self.algorithm.identity()},
            **self.start.identity(),
            "reward_function": name_of(self.reward_function),
            "prompt_function": name_of(self.prompt_function),
            **about,
        }
        plain = json.loads(json.dumps(known, default=str))
        return {name: value for name, value in plain.items() if value is not None}

    def _look_at_model(self) -> dict[str, Any]:
        prints = checkpoint.fingerprints(self.family)
        if self.algorithm.needs_reference(self.config):  # the adapter that was there at the start
            prints["adapter at the start"] = checkpoint.fingerprint(self.family.denoiser, adapter=True)
        return prints

    def _make_learner(self) -> Learner:
        """Build policy and optimizer and hand them to accelerate."""
        config, family, accelerator = self.config, self.family, self.accelerator
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.allow_tf32
        set_seed(config.seed % 2**32)  # numpy takes no larger one
        unet: Any = family.denoiser
        if "_original_forward" in vars(unet):  # an earlier trainer's, with its precision
            unet.forward = vars(unet).pop("_original_forward")
        had_adapter = bool(getattr(unet, "peft_config", None))
        self._originals = originals(family, config, self.use_lora)
        trainable = prepare_policy(
            unet, family.frozen, config, self.use_lora, accelerator.device, family.keeps_float32
        )
        reference = None
        if self.algorithm.needs_reference(config):
            reference = Reference(unet, fresh_adapter=self.use_lora and not had_adapter)
        if config.torch_compile:
            unet.compile(dynamic=False)  # a graph for every shape, so all are compared
        else:
            unet._compiled_call_impl = None  # of an earlier trainer: nn.Module has no other way
        optimizer = make_optimizer(config, list(trainable.values()))
        # In one process this is the family's denoiser itself; in several it synchronises gradients.
        denoiser: nn.Module
        denoiser, optimizer = accelerator.prepare(unet, optimizer)
        denoiser.eval()
        return Learner(
            config,
            accelerator,
            denoiser,
            optimizer,
            trainable,
            reference,
            self.autocast,
            self._after_step,
            num_steps=config.num_epochs * self.plan.optimizer_steps,
            keeps_old=self.algorithm.keeps_old,
        )

    # ----------------------------------------------------------------------------------------- epochs
    def train(self) -> None:
        """Run the epochs that are left.

        Ctrl-C or SIGTERM ends the run within a sampling pass or an optimizer step: the epoch is dropped, and
        what was before it is saved. A second one stops at once. An epoch that fails is dropped too, and what
        was before it is saved.

        Raises:
            RuntimeError: if another trainer trains in the run's folder.
        """
        config, self.stopped_by = self.config, None
        if self.epochs_done >= config.num_epochs and self.accelerator.is_main_process:
            asked = config.num_epochs
            tqdm.write(f"nothing to do: the run has {self.epochs_done} epochs, and {asked} are asked for")
        message = "stopping: dropping this epoch, then saving; once more to stop at once"
        with (
            hold(config.run_dir) if self.accelerator.is_main_process else contextlib.nullcontext(),
            DeferredInterrupt(message) as self._interrupt,
            self._bar("epochs", config.num_epochs, initial=self.epochs_done) as bar,
        ):
            try:
                self._train_until_stopped(bar)
            except Stopped:
                self.save()
            except Exception:
                self._save_what_was_before()
                raise
            finally:
                self._interrupt = None

    def _train_until_stopped(self, bar: Any) -> None:
        config = self.config
        while self.epochs_done < config.num_epochs:
            metrics = self.step(self.epochs_done)
            bar.set_postfix(reward=f"{metrics['reward_mean']:.3f}")
            bar.update()
            if self.epochs_done % config.save_freq == 0 or self.epochs_done == config.num_epochs:
                self.save()

    def step(self, epoch: int) -> dict[str, float]:
        """Do one epoch: sample, score, weigh, update; return its metrics. If it fails, it never was."""
        contexts = self._contexts_of(epoch)
        self._check_same(contexts)
        self._open_log()
        before = self._snapshot()
        try:
            metrics, batches = self._epoch(epoch, contexts)
            self._report(epoch, metrics, batches)
        except BaseException:
            self._go_back_to(before)
            raise
        self._drawn = None
        return metrics

    def _warn_if_constant(self, epoch: int, rewards: torch.Tensor, advantages: torch.Tensor) -> None:
        """Say it once where an epoch teaches nothing, because nothing was better than anything else."""
        constant = bool(rewards.min() == rewards.max())
        if self._warned or (advantages.any() and not constant):
            return
        self._warned = True
        if not self.accelerator.is_main_process:
            return
        what = f"all {len(rewards)} rewards are {rewards[0]:g}" if constant else "all advantages are 0"
        warnings.warn(
            f"epoch {epoch + 1} teaches nothing: {what}; look at the reward function, and at whether what it "
            "scores differs within an epoch (or within a group)",
            stacklevel=4,
        )

    def _epoch(self, epoch: int, contexts: dict[int, Context]) -> tuple[dict[str, float], list[list[Any]]]:
        started = time.perf_counter()
        batches, trajectory, reward_seconds = self._sample(epoch, contexts)
        own = check_rewards(batches)  # (B,)
        rewards = self._gather_rewards(own)  # (N,)
        told = self._gather_info(batches)
        advantages = self.algorithm.advantages(rewards, self._gather_keys(contexts))  # (N,)
        self._warn_if_constant(epoch, rewards, advantages)
        sampled = time.perf_counter()
        numbers = self._own_rows().flatten()  # (B,)
        device, process = self.accelerator.device, self.accelerator.process_index
        if self.config.torch_compile:  # parts that share predictions would all differ in shape
            trajectory = replace(trajectory, group_size=1)
        self.learner.begin_epoch(trajectory)
        with self._bar("training", self.plan.optimizer_steps, leave=False) as self._step_bar:
            self._epoch_now, self._first_step = epoch, self.global_step
            own_advantages = advantages[numbers].to(device)
            scorer = self._scorer([contexts[number] for number in numbers.tolist()])
            samples = Samples(epoch, self.global_step, process, numbers, trajectory, own_advantages, scorer)
            self.algorithm.update(samples, self.learner)
        self.epochs_done = epoch + 1
        return {
            "epoch": self.epochs_done,
            "reward_mean": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            **told,
            "advantage_mean": advantages.mean().item(),
            "samples_seen": self.epochs_done * self.plan.total_samples,
            "seconds_sampling": sampled - started - reward_seconds,
            "seconds_reward": reward_seconds,
            "seconds_training": time.perf_counter() - sampled,
        }, batches

    def _scorer(self, contexts: Sequence[Context]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return what scores other images (N, 3, H, W) made from contexts of these numbers (N,)."""

        def rescore(images: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            chosen = [contexts[row] for row in rows.tolist()]
            prompts, metadata = tuple(c.prompt for c in chosen), tuple(c.metadata for c in chosen)
            if images.requires_grad:
                images.register_hook(_refuse_nan)
            with torch.autocast(images.device.type, enabled=False):  # as it computes in sampling
                return torch.as_tensor(split_info(self.reward_function(images, prompts, metadata))[0])

        return rescore

    def _after_step(self, record: dict[str, float]) -> None:
        """Write the record of an optimizer step, and stop here if somebody asked for it."""
        done = self.global_step - self._first_step
        if done == 1 and "max_ratio_error" in record:  # no update before it: the policies must agree
            record["first_replay_max_ratio_error"] = record["max_ratio_error"]
        inner_epoch = (done - 1) * self.config.train_num_inner_epochs // self.plan.optimizer_steps + 1
        position = {"epoch": self._epoch_now + 1, "inner_epoch": inner_epoch, "step": self.global_step}
        self._record("step", {**position, **record})
        self._step_bar.update()
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self._interrupt is None:
            return
        asked = self._interrupt.requested
        if self.accelerator.num_processes > 1:
            numbers = torch.tensor([float(asked)], device=self.accelerator.device)
            asked = int(self.accelerator.gather(numbers).max())
        if asked:
            self.stopped_by = asked
            raise Stopped

    def _snapshot(self) -> dict[str, Any]:
        """Remember everything that an epoch changes."""
        scaler = self.accelerator.scaler
        return {
            "learner": self.learner.snapshot(),
            "algorithm": copy.deepcopy(self.algorithm.state_dict()),
            "epochs_done": self.epochs_done,
            "grad_scaler": None if scaler is None else scaler.state_dict(),
            "log": None if self.log is None else self.log.position(),
        }

    def _go_back_to(self, before: dict[str, Any]) -> None:
        """Make everything as it was at a snapshot."""
        self.learner.go_back_to(before["learner"])
        self.algorithm.load_state_dict(before["algorithm"])
        self.epochs_done = before["epochs_done"]
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(before["grad_scaler"])
            self.accelerator.scaler._per_optimizer_states.clear()  # of a step that was broken off
        if self.log is not None:
            self.log.rewind(before["log"])
        self._rewind_prompts()

    def _bar(self, name: str, total: int, **settings: Any) -> Any:
        """Make a progress bar, unless `diffusers.utils.logging.disable_progress_bar()` was called."""
        is_shown = self.accelerator.is_local_main_process
        return diffusers_logging.tqdm(total=total, desc=name, disable=not is_shown, **settings)

    # --------------------------------------------------------------------------------------- contexts
    def _contexts_of(self, epoch: int) -> dict[int, Context]:
        """Return the contexts of an epoch; a prompt function without state is not asked twice for them."""
        if self._drawn is None or self._drawn[0] != epoch:
            state = getattr(self.prompt_function, "state_dict", None)
            self._prompts_before = None if state is None else copy.deepcopy(state())
            try:
                self._drawn = (epoch, self.draw_contexts(epoch))
            except BaseException:
                self._rewind_prompts()
                raise
            self._random_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
        else:  # done again: a reward that draws from global generators finds them as they were
            random.setstate(self._random_state[0])
            np.random.set_state(self._random_state[1])
            torch.set_rng_state(self._random_state[2])
        return self._drawn[1]

    def _rewind_prompts(self) -> None:
        """Take the prompt function back to before the epoch, if it can be; else its contexts are kept."""
        if self._prompts_before is not None:
            self.prompt_function.load_state_dict(self._prompts_before)  # type: ignore[attr-defined]
            self._drawn = None

    @property
    def _skips(self) -> bool:
        """Whether the prompt function leaves out what other processes sample."""
        return self.accelerator.num_processes > 1 and hasattr(self.prompt_function, "skip")

    def draw_contexts(self, epoch: int) -> dict[int, Context]:
        """Ask the prompt function for the contexts of an epoch, the same ones in every process.

        Python's, numpy's and torch's global generators are seeded from (seed, epoch) first, so that prompt
        functions that draw from them need no state of their own.

        Args:
            epoch: its number, from 0.

        Returns:
            The contexts by their samples' numbers in the epoch; all of them, or this process's own where the
            prompt function can skip the others.
        """
        set_seed(sample_seed(self.config.seed, epoch) % 2**32)
        size, own = self.config.sample_group_size, set(self._own_rows().flatten().tolist())
        groups = [range(first, first + size) for first in range(0, self.plan.total_samples, size)]
        calls = [not (self._skips and own.isdisjoint(numbers)) for numbers in groups]
        if hasattr(self.prompt_function, "prefetch"):
            self.prompt_function.prefetch(calls)
        contexts: dict[int, Context] = {}
        for numbers, is_call in zip(groups, calls, strict=True):
            if not is_call:
                self.prompt_function.skip()  # type: ignore[attr-defined]
                continue
            context = self.start.context(self.prompt_function(), self.family)
            contexts |= dict.fromkeys(numbers, context)
        if self.config.per_prompt_stat_tracking:
            for context in contexts.values():
                check_key(context.key)
        self.start.check(list(contexts.values()))
        return contexts

    def _check_same(self, contexts: dict[int, Context]) -> None:
        """Refuse a prompt function that gives each process something else: rewards would be mixed up."""
        if self.accelerator.num_processes == 1:
            return
        own_contexts = list(contexts.values())
        size = self.start.size(own_contexts)
        seen: Any = (self._prompts_before, size) if self._skips else list(map(_mark, own_contexts))
        own = zlib.crc32(repr(seen).encode())
        all_of_them = self.accelerator.gather(torch.tensor([own], device=self.accelerator.device))
        if (all_of_them != own).any():
            raise RuntimeError(
                "prompt_function gives each process something else: seed it alike in all of them, for each "
                "takes its own samples of one epoch"
            )

    # --------------------------------------------------------------------------------------- sampling
    def _own_rows(self) -> torch.Tensor:
        """Return the numbers, in the whole epoch, of this process's samples: (batches, B)."""
        processes, process = self.accelerator.num_processes, self.accelerator.process_index
        rows = torch.arange(self.plan.total_samples)
        return rows.view(-1, processes, self.config.sample_batch_size)[:, process]

    def _sample(self, epoch: int, contexts: dict[int, Context]) -> tuple[list[list[Any]], Trajectory, float]:
        """Sample and score this process's share: its batches, their trajectory, seconds of scoring."""
        batches, pieces, seconds = [], [], 0.0
        own_rows = self._own_rows()  # (batches, B)
        shape = self.family.latents_shape(self.start.size(list(contexts.values())))
        samples, _ = self.config.forward_sizes(math.prod(shape))
        schedule = self._schedule(epoch)  # a hook may have set another one
        with (
            self.algorithm.sampling_policy(self.learner),
            self._bar("sampling", len(own_rows), leave=False) as bar,
        ):
            for group in own_rows.chunk(math.ceil(own_rows.numel() / samples)):  # (G, B)
                rows = group.flatten().tolist()
                piece = self._rollout(epoch, rows, [contexts[row] for row in rows], schedule)
                with self.autocast():
                    images = self.family.decode(piece.final_latents)
                if images.is_cuda:
                    torch.cuda.synchronize(images.device)  # decoding is sampling, not reward
                before = time.perf_counter()
                for batch, own_images in zip(group.tolist(), images.split(group.shape[1]), strict=True):
                    own_contexts = [contexts[row] for row in batch]
                    batches.append(score(self.reward_function, own_images, own_contexts))
                seconds += time.perf_counter() - before
                pieces.append(piece)
                bar.update(len(group))
                self._stop_if_asked()
        return batches, Trajectory.cat(pieces), seconds

    def _rollout(
        self, epoch: int, rows: Sequence[int], contexts: Sequence[Context], schedule: Any
    ) -> Trajectory:
        """Play some rollouts of an epoch, by their numbers in it."""
        config, family, size = self.config, self.family, self.start.size(contexts)
        shares = self.algorithm.shares_starts
        groups = [row // config.sample_group_size for row in rows] if shares else rows
        shape = family.latents_shape(size)
        noise = [torch.randn(shape, generator=g) for g in self._generators(epoch, groups, purpose=0)]
        initial_noise = torch.stack(noise).to(self.accelerator.device)
        shared, guidance = config.shared_starts if shares else 1, config.sample_guidance_scale
        with self.autocast(), torch.no_grad():
            latents = self.start.first_states(family, contexts, schedule, initial_noise, shared)
            prompts = self.start.prompts(contexts, config)
            told = family.condition(prompts, config.negative_prompts, guidance, size)
            generators = self._generators(epoch, rows, purpose=1)
            reduction, branches = config.log_prob_reduction, self.algorithm.branches(config)
            return play(family, latents, schedule, told, guidance, generators, reduction, shared, branches)

    def _generators(self, epoch: int, numbers: Sequence[int], purpose: int) -> list[torch.Generator]:
        """Give every sample its own generator, so that batch size and processes change nothing."""
        seeds = [sample_seed(self.config.seed, epoch, purpose, number) for number in numbers]
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def _gather_keys(self, contexts: dict[int, Context]) -> list[Any]:
        """Return what each sample of the epoch (N,) is compared by, if it is; others know those of theirs."""
        keys = {number: context.key for number, context in contexts.items()}
        if self._skips and self.config.per_prompt_stat_tracking:
            keys = dict(pair for pairs in gather_object([keys]) for pair in pairs.items())
        return [keys.get(number) for number in range(self.plan.total_samples)]

    def _gather_rewards(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rewards of the whole epoch (N,) in the order of its samples, on every process."""
        if self.accelerator.num_processes == 1:
            return own
        size = self.config.sample_batch_size
        gathered = self.accelerator.gather(own.to(self.accelerator.device)).cpu()  # process by process
        by_process = gathered.view(self.accelerator.num_processes, -1, size)
        return by_process.transpose(0, 1).flatten()

    def _gather_info(self, batches: list[list[Any]]) -> dict[str, float]:
        """Return the means, over the whole epoch, of what the reward function told beside the rewards."""
        parts = [info_means(batches)]
        if self.accelerator.num_processes > 1:
            parts = gather_object(parts)  # all score as many samples
        names = [name for name in parts[0] if all(name in part for part in parts)]
        return {f"reward/{name}": fmean(part[name] for part in parts) for name in names}

    # ----------------------------------------------------------------------------------- what is kept
    def _open_log(self) -> None:
        """Open metrics.jsonl and the trackers, and drop what an older run left; only once."""
        if self._log_is_open:
            return
        self.accelerator.wait_for_everyone()  # all have looked at the folder before it changes
        if self.accelerator.is_main_process:
            self.log = RunLog(
                self.config, self._resumed_from, self.epochs_done, self._metrics_mark, self.record
            )
        if self.config.log_with:
            fields = self.config.to_dict().items()
            self.accelerator.init_trackers(
                self.config.tracker_project_name,
                config={k: v if isinstance(v, (int, float, str)) else str(v) for k, v in fields},
                init_kwargs=self.config.tracker_kwargs,
            )
        self._log_is_open = True

    def _record(self, kind: str, values: dict[str, float]) -> None:
        if self.log is not None:
            self.log.record(kind, values)
        if self.config.log_with:
            named = {f"{kind}/{name}": value for name, value in values.items()}
            self.accelerator.log(named, step=self.global_step)

    def _report(self, epoch: int, metrics: dict[str, float], batches: list[list[Any]]) -> None:
        self._record("epoch", metrics)
        frequency = self.config.image_grid_freq
        if self.log is not None and frequency and epoch % frequency == 0:
            needed = batches[: math.ceil(SHOWN_IMAGES / self.config.sample_batch_size)]
            images = torch.cat([batch[0] for batch in needed])[:SHOWN_IMAGES]
            self.log.images(self.epochs_done, images)
        if self.image_samples_hook is not None and self.accelerator.is_main_process:
            tracker = self.accelerator.trackers[0] if self.accelerator.trackers else None
            self.image_samples_hook(batches, self.global_step, tracker)

    def save(self) -> Path:
        """Write a checkpoint; every process must call it. Return its folder."""
        self._open_log()  # also where nothing was trained yet
        self.accelerator.wait_for_everyone()
        folder = self.config.run_dir / checkpoint.name_of(self.epochs_done)
        if self.accelerator.is_main_process:
            self._write_checkpoint()
        self.accelerator.wait_for_everyone()
        return folder

    def _save_what_was_before(self) -> None:
        """Write the epochs before one that failed; what failed is told, not what fails here on top of it."""
        folder = self.config.run_dir / checkpoint.name_of(self.epochs_done)
        if self.log is None or self.epochs_done == 0 or folder.exists():
            return
        with contextlib.suppress(OSError, RuntimeError):  # a full disk, or a folder that is another's by now
            self._write_checkpoint()  # waits for nobody: other processes may not have failed

    def _write_checkpoint(self) -> None:
        checkpoint.write(self.config.run_dir, self.epochs_done, self.learner.tensors(), self._state())
        checkpoint.prune(self.config.run_dir, self.config.num_checkpoint_limit)

    def _state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        prompts = getattr(self.prompt_function, "state_dict", None)
        return {
            "epochs_done": self.epochs_done,
            "global_step": self.global_step,
            "config": self.config.to_dict(),
            "identity": self._identity(),
            RUN: self.record,
            "algorithm": self.algorithm.state_dict(),
            "prompt_function": None if prompts is None else prompts(),
            "grad_scaler": None if scaler is None else scaler.state_dict(),
            "metrics": self._metrics_mark if self.log is None else self.log.mark(),
        }

    def _identity(self) -> dict[str, Any]:
        """Return what decides the weights, and so must be the same when a run is continued."""
        return {
            "algorithm": type(self.algorithm).__qualname__,  # a subclass is another algorithm
            **self.algorithm.identity(),
            **self.start.identity(),
            "num_processes": self.accelerator.num_processes,
            **self.config.decisive_fields(),
            "train_use_lora": self.use_lora,
            **self._fingerprints,
        }

    def _read_checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Read the checkpoint that is resumed, if any; refuse one that is damaged or of another run."""
        if self._resumed_from is None:
            return None
        tensors, state = checkpoint.read(self._resumed_from)
        before = state.get(RUN, {})  # older checkpoints have none
        changed = changed_sources(before, self.record)
        refused = [] if self.config.resume_anyway else list(changed.values())
        checkpoint.check_identity(self._resumed_from, state["identity"], self._identity(), refused)
        self.record = continued(before, self.record, changed)
        news = [*changed.values(), *changed_fields(state["config"], self.config)]
        if news and self.accelerator.is_main_process:
            tqdm.write(f"continuing {self._resumed_from} with changes: {'; '.join(news)}")
        return tensors, state

    def _restore(self, tensors: dict[str, Any], state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        if set(tensors["policy"]) != set(self.learner.trainable):
            raise ValueError(
                f"checkpoint {self._resumed_from} trains other weights than this trainer: give the pipeline "
                "the adapter that it had"
            )
        self.learner.load_tensors(tensors)
        self.learner.steps_done = state["global_step"]
        self.algorithm.load_state_dict(state["algorithm"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["grad_scaler"])
        self.epochs_done = state["epochs_done"]
        self._metrics_mark = state["metrics"]
        self._forward_prompts(state["prompt_function"])

    def _forward_prompts(self, state: Any) -> None:
        """Bring the prompt function to where the resumed run left it."""
        load = getattr(self.prompt_function, "load_state_dict", None)
        if load is not None and state is not None:
            load(state)
            return
        for epoch in range(self.epochs_done):
            self.draw_contexts(epoch)

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: Any,
        changes: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Self:
        """Make a trainer that continues a checkpoint with the config that it was written with.

        Args:
            folder: the checkpoint's folder, `<run>/checkpoint-NNNNNN`; the run goes on in `<run>`.
            reward_function: as in the constructor.
            prompt_function: as in the constructor.
            sd_pipeline: the pipeline that the run started from.
            changes: fields of the config that do not decide the weights, such as `num_epochs`;
                `resume_anyway`, where reward, prompts or images have other names now; and objects in
                `accelerator_kwargs` and the like, which the checkpoint holds as text only.
            **arguments: further arguments of the constructor.

        Returns:
            The trainer.

        Raises:
            ValueError: if the checkpoint is damaged or belongs to another model.
        """
        state = checkpoint.read_state(Path(folder))
        config = DDPOConfig.from_dict({**state["config"], **(changes or {})})
        config.resume_from, config.output_dir = str(folder), str(Path(folder).parent)
        return cls(config, reward_function, prompt_function, sd_pipeline, **arguments)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the trained weights for plain diffusers.

        LoRA weights load with `pipeline.load_lora_weights(folder)`; a fully trained denoiser is written with
        its whole pipeline, for `from_pretrained(folder)`.

        Args:
            folder: where to write to.
        """
        if self.accelerator.is_main_process:
            save_policy(self.family, folder, self._originals)
