"""Train a model with any algorithm: `Trainer.step` runs one epoch.

All random numbers depend only on (seed, epoch, sample), so an epoch gives the same result when it is
repeated, resumed or spread over processes. If an epoch fails or is interrupted, everything is as it was
before it. The parts of an epoch are modules in `training/`.

The word "step" has four meanings: `Trainer.step` runs an epoch, `Learner.step` takes an optimizer step,
`Algorithm.steps` yields the loss of each optimizer step, and `schedule.step` takes a denoising step.
"""

import contextlib
import copy
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from tqdm.auto import tqdm

from ddpo_lessons.algorithms.algorithm import Algorithm, Samples, check_advantages, check_steps
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.config import RUN, DDPOConfig
from ddpo_lessons.data.contexts import (
    Batch,
    PromptFunction,
    RewardFunction,
    check_functions,
    check_hook,
    check_rewards,
    info_means,
)
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.loading import draws_bars
from ddpo_lessons.models import family_of
from ddpo_lessons.models.policy import (
    load_adapter,
    make_optimizer,
    originals,
    prepare_networks,
    save_policy,
)
from ddpo_lessons.plan import summary
from ddpo_lessons.rollout import Trajectory
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.context_source import Contexts, ContextSource, same_random_state
from ddpo_lessons.training.costs import hours_and_money
from ddpo_lessons.training.first_epoch import Finding, FirstEpoch
from ddpo_lessons.training.interrupt import DeferredInterrupt, Stopped
from ddpo_lessons.training.learner import Learner, Weights
from ddpo_lessons.training.memory import OutOfMemory, halve, sized
from ddpo_lessons.training.processes import (
    Share,
    check_sharding,
    make_accelerator,
    make_autocast,
    progress_bar,
    say,
    set_up_sharding,
)
from ddpo_lessons.training.runlog import RunLog, as_numbers, claim, hold, spread, varied, with_captions
from ddpo_lessons.training.sampler import Sampler, count_actions, scorer
from ddpo_lessons.training.state import Snapshot, State, check_processes, describe, identity, read_checkpoint
from ddpo_lessons.training.trackers import Trackers

SHOWN_IMAGES = 32
_CHANGED_WEIGHTS: Any = WeakIdKeyDictionary()  # by optimizer steps of this process

T = TypeVar("T")

DebugHook = Callable[[Any, float, int], None]  # (sd_pipeline, noise_strength, global_step), as in imageddpo
# Called as (batches, global_step, tracker), as in TRL.
ImageSamplesHook = Callable[[list[list[Any]], int, Any], None]


class Trainer:
    """Train a model with an algorithm for the number of epochs in the config.

    Several processes end with the weights of one if each optimizer step takes the whole epoch (and
    `train_timestep_fraction` is 1), because a step then has the same samples and timesteps. Otherwise each
    process shuffles its own samples.

    Args:
        config: the settings; the trainer keeps a copy as its `config`.
        reward_function: `(images, prompts, metadata) -> rewards (B,)` or `(rewards, info)`, with images
            (B, 3, H, W) float in [0, 1]. `info` is a dict of further numbers per sample, whose means are
            recorded as `reward/NAME`. If the function raises an error or returns rewards that are not finite,
            the run ends without training on that epoch.
        prompt_function: returns the prompt, and the image and metadata that `start` needs. If it holds state,
            give it `state_dict()` and `load_state_dict()`; without them a resumed run calls it as often as
            the old run did. If it also has `skip()`, a process makes only its own images. A
            `prefetch(calls)` is called before each epoch with the list of draws, which are calls or skips.
        sd_pipeline: a plain diffusers pipeline, or a wrapper of `ddpo_lessons.compat`.
        image_samples_hook: called after every epoch as `(batches, global_step, tracker)`, where each batch
            is `[images, prompts, metadata, rewards, info]`, `global_step` counts optimizer steps, and the
            tracker is None if there is none, or if it could not start.
        algorithm: such as `DDPO()` or `RWR()`.
        start: `FromNoise()`, `FromImages(noise_strength)` or `WithImages()`.
        about: further entries for config.json, such as {"reward": name}; a resume prints which of them
            changed. Model, start, algorithm and the functions' names are recorded without it.

    Raises:
        ValueError: if settings do not fit each other, the pipeline, the run's folder or the checkpoint.
        TypeError: if the pipeline or a function has the wrong type.
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
        start: FromNoise = FromNoise(),
        about: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        check_functions(reward_function, prompt_function)
        check_hook("image_samples_hook", image_samples_hook)
        if not isinstance(config, DDPOConfig):
            raise TypeError(f"config must be a DDPOConfig, not {type(config).__name__}")
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                f"algorithm={algorithm!r:.60} must be an object such as DDPO(), or the result of "
                "ddpo_lessons.algorithms.make_algorithm(NAME)"
            )
        if not isinstance(start, FromNoise):
            raise TypeError(
                f"start={start!r:.60} must be an object: FromNoise(), FromImages(noise_strength) or "
                "WithImages()"
            )
        config = copy.copy(config)  # a loaded adapter sets its rank, without changing the caller's config
        config.check()
        algorithm.check(config)
        self.config, self.algorithm, self.start = config, algorithm, start
        self.reward_function, self.prompt_function = reward_function, prompt_function
        self.image_samples_hook = image_samples_hook
        self.log: RunLog | None = None  #: of the main process, once training starts
        self._log_is_open = False
        self.watched: FirstEpoch | None = None  #: the observer of the run's first epoch, or of a rehearsal
        self.preflight: Sequence[Finding] = ()  #: its findings
        self.stopped_by: int | None = None  #: the number of the signal that ended `train` early
        self._interrupt: DeferredInterrupt | None = None
        self._before_rehearsal: Snapshot | None = None
        self._training_ended: float | None = None  # the time when the last epoch's optimizer steps ended
        self._has_warned = False  # of an epoch without a learning signal
        self.sd_pipeline = sd_pipeline
        self.pipeline = getattr(sd_pipeline, "sd_pipeline", sd_pipeline)
        self.family = family_of(self.pipeline)
        self.use_lora = getattr(sd_pipeline, "use_lora", config.train_use_lora)
        actions = count_actions(self.family, start, algorithm, config)
        self.num_train_timesteps = start.count_train_timesteps(actions, config)
        algorithm.begin(config, self.family, self.num_train_timesteps)
        self.accelerator = make_accelerator(config)
        self.trackers = Trackers(self.accelerator)
        check_sharding(self.accelerator, config, self.use_lora)
        self.plan = config.epoch_plan(self.num_train_timesteps, self.accelerator.num_processes)
        config.check_epoch(self.accelerator.num_processes)
        self.record = describe(
            self.pipeline, algorithm, start, about,
            reward_function=reward_function, prompt_function=prompt_function,
        )  # fmt: skip
        saved = self._read_checkpoint()
        self._changes: list[str] = saved.values["changes"] if saved else []
        self.autocast = make_autocast(config.mixed_precision, self.accelerator.device)
        self.learner = self._make_learner()
        share = Share(self.accelerator, self.plan.total_samples, config.sample_batch_size)
        self.contexts = ContextSource(prompt_function, start, self.family, algorithm, config, share)
        self.sampler = Sampler(
            config, self.family, start, algorithm, reward_function, self.autocast, share, self.learner,
            self._stop_if_asked,
        )  # fmt: skip
        self.state = State(self.learner, algorithm, self.contexts, self.accelerator.scaler)
        if saved is not None:
            self._resume(saved)
        elif self._was_trained_before():
            warnings.warn(
                "an earlier trainer has trained this pipeline, so this one starts from its weights, which "
                "are also the reference of a KL penalty: load a fresh pipeline to start from the model's own",
                stacklevel=3,
            )

    @property
    def epochs_done(self) -> int:
        """Number of completed epochs."""
        return self.state.epochs_done

    @property
    def global_step(self) -> int:
        """Number of optimizer steps so far."""
        return self.learner.steps_done

    @property
    def is_rehearsing(self) -> bool:
        """Whether `rehearse` is running, so that nothing is written and no hook is called."""
        return self._before_rehearsal is not None

    # ------------------------------------------------------------------------------------ preparation
    def _read_checkpoint(self) -> Snapshot | None:
        """Check the run's folder and the model, and read the checkpoint to resume from, if any."""
        config = self.config
        self._resumed_from = claim(config)
        is_gone, is_kept = not Path(config.train_lora_from).is_dir(), self.algorithm.needs_reference(config)
        # A checkpoint has the current weights, but not the reference policy's.
        if config.train_lora_from and not (is_gone and self._resumed_from and not is_kept):
            load_adapter(self.family, config)
        adapted = [name for name, part in self.family.frozen.items() if getattr(part, "peft_config", None)]
        self._identity = identity(
            config, self.algorithm, self.start, self.accelerator.num_processes, train_use_lora=self.use_lora,
            frozen_with_an_adapter=adapted, train_lora_from=config.train_lora_from if is_kept else "",
        )  # fmt: skip
        check_processes(self.accelerator, self._identity, self.family)
        if self._resumed_from is None:
            return None
        is_main = self.accelerator.is_main_process
        return read_checkpoint(self._resumed_from, config, self._identity, self.record, is_main)

    def _was_trained_before(self) -> bool:
        """Return whether an earlier trainer of this process has changed the weights."""
        return any(weight in _CHANGED_WEIGHTS for weight in self.learner.trainable.values())

    def _resume(self, saved: Snapshot) -> None:
        """Continue from a checkpoint; raise a ValueError if the pipeline is not the run's initial one."""
        if self._was_trained_before() and self.algorithm.needs_reference(self.config):
            raise ValueError(
                "an earlier trainer has trained this pipeline, so its weights are not the "
                "reference of the KL penalty: resume with a fresh pipeline"
            )
        there = {name: weight.shape for name, weight in saved.tensors["policy"].items()}
        here = {name: weight.shape for name, weight in self.learner.trainable.items()}
        if there != here:
            raise ValueError(
                f"checkpoint {self._resumed_from} trains other weights than this trainer: give the pipeline "
                "the adapter that it had"
            )
        self.state.restore(*saved)

    def _make_learner(self) -> Learner:
        """Build policy and optimizer, and prepare them with accelerate."""
        config, family, accelerator = self.config, self.family, self.accelerator
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.allow_tf32
        set_seed(config.seed % 2**32)  # numpy takes no larger one
        unet: Any = family.denoiser
        self.had_adapter = bool(getattr(unet, "peft_config", None))
        self._originals = originals(family, config, self.use_lora)
        # A sharded network goes to the device block by block, because all of it may not fit there.
        place = torch.device("cpu") if accelerator.is_fsdp2 else accelerator.device
        trainable = prepare_networks(family, config, self.use_lora, place, accelerator.device)
        optimizer = make_optimizer(config, list(trainable.values()))
        if accelerator.is_fsdp2:
            set_up_sharding(accelerator, unet)
        # In one process this is the family's denoiser itself; in several it synchronizes gradients.
        denoiser: nn.Module
        denoiser, optimizer = accelerator.prepare(unet, optimizer)
        denoiser.eval()
        trainable = {name: p for name, p in unet.named_parameters() if name in trainable}  # parts, if sharded
        return Learner(
            config, accelerator, denoiser, optimizer, trainable, self.algorithm,
            self.use_lora and not self.had_adapter, self.autocast, self.plan.optimizer_steps,
        )  # fmt: skip

    # ----------------------------------------------------------------------------------------- epochs
    def train(self) -> None:
        """Run the remaining epochs.

        Ctrl-C or SIGTERM ends the run within a forward pass of sampling or an optimizer step: the trainer
        drops the current epoch and saves the state before it. A second signal stops at once. An epoch that
        fails is also dropped, and the state before it is saved. Raises RuntimeError if another trainer uses
        the folder.
        """
        config, self.stopped_by = self.config, None
        epochs_before = self.epochs_done
        if self.epochs_done < config.num_epochs:
            say(self.accelerator, summary(self.plan, config.num_epochs))
        elif self.accelerator.is_main_process:
            tqdm.write(
                f"nothing to do: the run has {self.epochs_done} epochs, and {config.num_epochs} are asked "
                "for; raise num_epochs to train further"
            )
        with (
            hold(config.run_dir) if self.accelerator.is_main_process else contextlib.nullcontext(),
            DeferredInterrupt() as self._interrupt,
            progress_bar(self.accelerator, "epochs", config.num_epochs, initial=self.epochs_done) as bar,
        ):
            try:
                while self.epochs_done < config.num_epochs:
                    started = time.perf_counter()
                    try:
                        metrics = self.step(self.epochs_done)
                    except OutOfMemory as error:
                        self._halve(error)
                        continue
                    bar.set_postfix(reward=f"{metrics['reward_mean']:.3f}")
                    bar.update()
                    is_last = self.epochs_done == config.num_epochs
                    is_first_of_several = self.epochs_done == epochs_before + 1 and not is_last
                    if is_first_of_several or not draws_bars():
                        self._print_epoch(metrics, time.perf_counter() - started, is_first_of_several)
                    if self.epochs_done % config.save_freq == 0 or is_last:
                        self.save()
            except Stopped as stopped:
                self.stopped_by = stopped.number
                self.save()
            except Exception:
                self._save_what_was_before()
                raise
            finally:
                self._interrupt = None

    def rehearse(self, function: Callable[[], T]) -> T:
        """Call a function that runs the next epoch or a part of it, and undo its changes.

        Weights, optimizer, averages, the scaler, the prompt function, the global random state, the trainer's
        attributes and the run's folder are as before, so training continues as if nothing had been called.
        During the call nothing is written and no hook is called. Two changes stay: smaller micro batches
        after a lack of memory, and the state of a reward function that counts its calls. Every process must
        call it.
        """
        while True:
            try:
                return self._rehearsed(function)
            except OutOfMemory as error:
                self._halve(error)

    def _rehearsed(self, function: Callable[[], T]) -> T:
        with same_random_state():
            self.contexts.of(self.epochs_done)  # so that the snapshot has the prompt function's state
            attributes, before = dict(vars(self)), self.state.snapshot()
            self._before_rehearsal, self.log = before, None  # without a log nothing is recorded
            try:
                return function()
            finally:
                vars(self).update(attributes)
                self.state.restore(*before)

    def _halve(self, error: OutOfMemory) -> None:
        """Halve the micro batch that ran out of memory; raise the error if that is impossible."""
        if not error.smaller or self.accelerator.num_processes > 1:  # others wait
            raise error
        say(self.accelerator, halve(self.config, error))

    def _print_epoch(self, metrics: dict[str, Any], seconds: float, is_first: bool) -> None:
        """Print a line per epoch for logs without progress bars, and after the first an estimate of all."""
        done, asked, price = self.epochs_done, self.config.num_epochs, self.config.price_per_hour
        reward = f"reward {metrics['reward_mean']:.4g} (std {metrics['reward_std']:.3g})"
        left = tqdm.format_interval(seconds * (asked - done))
        text = f"epoch {done} of {asked}: {reward}; {seconds:.1f} s, {left} left"
        if is_first:
            text += f"\n  all {asked} epochs take {hours_and_money(seconds * asked, price)}"
        say(self.accelerator, text, sys.stderr)

    def step(self, epoch: int) -> dict[str, Any]:
        """Run one epoch in the order of lesson 06 and return its metrics; undo the epoch if it fails."""
        times = [time.perf_counter() if self._training_ended is None else self._training_ended]
        contexts = self.contexts.of(epoch)  # 1. prompts, for img2img with their images
        self._open_log()
        with self._undone_if_it_fails() as before, self._observed_if_first(before) as first:
            times.append(time.perf_counter())
            # 2. Sample, and 3. call the reward function.
            batches, trajectory, reward_seconds = self.sampler.sample(epoch, contexts)
            rewards = self.sampler.share.gather_rewards(check_rewards(batches))  # (N,)
            # 4. Advantages, for the samples of all processes.
            keys = self.contexts.keys(contexts)
            advantages = check_advantages(  # (N,) or (N, T)
                self.algorithm.advantages(rewards, keys), len(rewards), trajectory.log_probs.shape[1]
            )
            self._warn_if_constant(epoch, rewards, advantages)
            times.append(time.perf_counter())
            # 5. The algorithm shuffles (sample, timestep) pairs. 6. Their loss, and an optimizer step.
            samples = self._samples(epoch, contexts, trajectory, advantages)
            steps = check_steps(self.algorithm.steps(samples, self.learner), advantages)
            with (
                progress_bar(self.accelerator, "training", self.plan.optimizer_steps, leave=False) as bar,
                sized(self.config, "train_micro_batch_size", lambda: self.learner.micro_batch_size),
            ):
                for number, (loss, groups) in enumerate(steps):
                    self._record_step(epoch, number, self.learner.step(loss, groups), first)
                    bar.update()
                    self._stop_if_asked()
            times.append(time.perf_counter())
            # 7. Record the results.
            self.state.epochs_done, self._training_ended = epoch + 1, times[-1]
            other, sampling, training = (end - start for start, end in itertools.pairwise(times))
            metrics = self._metrics(rewards, batches, advantages) | {
                "seconds_sampling": sampling - reward_seconds,
                "seconds_reward": reward_seconds,
                "seconds_training": training,
                "seconds_other": other,
            }
            self._report_first(first, rewards)
            self._report(epoch, metrics, batches, contexts)
        if not self.is_rehearsing:
            _CHANGED_WEIGHTS.update(dict.fromkeys(self.learner.trainable.values()))
            self.contexts.done()
        return metrics

    @contextlib.contextmanager
    def _undone_if_it_fails(self) -> Iterator[Snapshot]:
        """Restore the state and the log if a `with` block raises an error; yield the state before it."""
        before = self._before_rehearsal or self.state.snapshot()
        position = None if self.log is None else self.log.size
        try:
            yield before
        except BaseException:
            self.state.restore(*before)
            if self.log is not None and position is not None:
                self.log.rewind(position)
            raise

    @contextlib.contextmanager
    def _observed_if_first(self, before: Snapshot) -> Iterator[FirstEpoch | None]:
        """Observe a `with` block if it is the first epoch that trains, or one of a rehearsal."""
        if self.global_step > 0 and not self.is_rehearsing:
            yield None
            return
        first = FirstEpoch(self.learner, before.tensors["policy"])
        with first.watch():
            yield first

    def _samples(
        self, epoch: int, contexts: Contexts, trajectory: Trajectory, advantages: torch.Tensor
    ) -> Samples:
        """Return the samples that this process trains on."""
        numbers = self.sampler.share.rows.flatten()  # (B,)
        if self.config.torch_compile:  # groups that share predictions would all differ in shape
            trajectory = replace(trajectory, group_size=1)
        self.learner.begin_epoch(trajectory)
        return Samples(
            epoch=epoch,
            first_step=self.global_step,
            process=self.accelerator.process_index,
            numbers=numbers,
            trajectory=trajectory,
            advantages=advantages[numbers].float().to(self.accelerator.device),
            score=scorer(self.reward_function, [contexts[number] for number in numbers.tolist()]),
        )

    def _metrics(
        self, rewards: torch.Tensor, batches: Sequence[Batch], advantages: torch.Tensor
    ) -> dict[str, Any]:
        """Describe the samples of the whole epoch."""
        info = self.sampler.share.gather_means(info_means(batches))
        return {
            "epoch": self.epochs_done,
            "reward_mean": rewards.mean().item(),
            **spread("reward", rewards),
            **{f"reward/{name}": mean for name, mean in info.items()},
            "advantage_mean": advantages.mean().item(),
            "samples_seen": self.epochs_done * self.plan.total_samples,
            "rewards": as_numbers(rewards),
        }

    def _report_first(self, first: FirstEpoch | None, rewards: torch.Tensor) -> None:
        """Keep the checks of the run's first epoch, if this is it, and warn of those that failed."""
        if first is None:
            return
        self.watched, first.rewards, config = first, rewards, self.config
        clip_range = None if "train_clip_range" in self.algorithm.unused else config.train_clip_range
        self.preflight = first.findings(config.sample_group_size, clip_range, config.sample_guidance_scale)
        first.before = {}  # free this copy of the weights
        if self.log is not None:
            self.log.preflight([vars(finding) for finding in self.preflight])
            for finding in self.preflight:
                if not finding.passed and not self._has_warned:
                    warnings.warn(f"the first epoch looks broken: {finding}", stacklevel=3)

    def _warn_if_constant(self, epoch: int, rewards: torch.Tensor, advantages: torch.Tensor) -> None:
        """Warn once of an epoch without a learning signal, because no sample was better than another."""
        constant = bool(rewards.min() == rewards.max())
        if self._has_warned or (advantages.any() and not constant):
            return
        self._has_warned = True
        if not self.accelerator.is_main_process:
            return
        what = f"all {len(rewards)} rewards are {rewards[0]:g}" if constant else "all advantages are 0"
        warnings.warn(
            f"epoch {epoch + 1} teaches nothing: {what}; look at the reward function, and at whether what it "
            "scores differs within an epoch (or within a group)",
            stacklevel=4,
        )

    def _record_step(
        self, epoch: int, number: int, record: dict[str, float], first: FirstEpoch | None
    ) -> None:
        """Write the record of an optimizer step; `number` counts from 0 within the epoch."""
        if "max_ratio_error" in record:
            if number == 0:  # no update before it: the policies must agree
                record["first_replay_max_ratio_error"] = record["max_ratio_error"]
            if first is not None:
                first.replay_errors.append(record["max_ratio_error"])
        if first is not None and "max_sampling_error" in record:
            first.sampling_errors.append(record["max_sampling_error"])
        inner_epoch = number * self.config.train_num_inner_epochs // self.plan.optimizer_steps + 1
        position = {"epoch": epoch + 1, "inner_epoch": inner_epoch, "step": self.global_step}
        self.write_record("step", {**position, **record})

    def _stop_if_asked(self) -> None:
        if self._interrupt is None:
            return
        asked = self._interrupt.requested
        if self.accelerator.num_processes > 1:
            numbers = torch.tensor([float(asked)], device=self.accelerator.device)
            asked = int(self.accelerator.gather(numbers).max())
        if asked:
            raise Stopped(asked)

    # ----------------------------------------------------------------------------------- what is kept
    def _open_log(self) -> None:
        """Open metrics.jsonl, discard records after the checkpoint, and start the trackers; only once."""
        if self._log_is_open or self.is_rehearsing:
            return
        self.accelerator.wait_for_everyone()  # all processes have read the folder before it changes
        if self.accelerator.is_main_process:
            self.log = RunLog(self.config, self._resumed_from, self.epochs_done, self.record)
            self.log.changes(self.epochs_done, self._changes)
        self.trackers.start(self.config)
        self._log_is_open = True

    def write_record(self, kind: str, values: Mapping[str, Any]) -> None:
        """Write a record of numbers and lists of numbers to metrics.jsonl, in the main process.

        The trackers get the record without its lists.
        """
        if self.log is not None:
            self.log.record(kind, values)
            numbers = {name: value for name, value in values.items() if not isinstance(value, list)}
            self.trackers.log(kind, numbers, self.global_step)

    def write_grid(self, kind: str, epoch: int, images: torch.Tensor, captions: Sequence[str]) -> None:
        """Write a grid of images (N, 3, H, W) to images/ and to the trackers, in the main process."""
        if self.log is not None:
            grid = self.log.images(epoch, images, kind, captions)
            self.trackers.log_grid(kind, grid, self.global_step)

    def _report(
        self, epoch: int, metrics: dict[str, Any], batches: Sequence[Batch], contexts: Contexts
    ) -> None:
        frequency = self.config.image_grid_freq
        if self.log is not None and frequency and epoch % frequency == 0:
            own = [contexts[number] for number in self.sampler.share.rows.flatten().tolist()]
            count = SHOWN_IMAGES // (1 if own[0].image is None else 2)
            shown = varied(
                [context.prompt if context.image is None else id(context) for context in own], count
            )
            places = [divmod(number, self.config.sample_batch_size) for number in shown]
            images = torch.stack([batches[batch].images[place] for batch, place in places])
            rewards = [float(batches[batch].rewards[place]) for batch, place in places]
            tiles, captions = with_captions([own[number] for number in shown], images, rewards)
            self.write_grid("epoch", self.epochs_done, tiles, captions)
        self.write_record("epoch", metrics)  # after the grid, so that TensorBoard also writes it to disk
        hook = None if self.is_rehearsing else self.image_samples_hook
        if hook is not None and (self.accelerator.is_main_process or hasattr(hook, "in_every_process")):
            tracker = self.accelerator.trackers[0] if self.accelerator.trackers else None
            hook([batch.for_hook() for batch in batches], self.global_step, tracker)

    def save(self) -> Path:
        """Write a checkpoint and return its folder; every process must call it."""
        self._open_log()  # also before any training
        self.accelerator.wait_for_everyone()
        folder = self.config.run_dir / checkpoint.name_of(self.epochs_done)
        tensors = self.learner.tensors()
        if self.accelerator.is_main_process:
            self._write_checkpoint(tensors)
        self.accelerator.wait_for_everyone()
        return folder

    def _save_what_was_before(self) -> None:
        """Save the state before an epoch that failed; errors here do not hide the original error."""
        folder = self.config.run_dir / checkpoint.name_of(self.epochs_done)
        if self.log is None or self.epochs_done == 0 or folder.exists() or self.accelerator.is_fsdp2:
            return
        with contextlib.suppress(OSError, RuntimeError):  # a full disk, or another trainer in the folder
            self._write_checkpoint(self.learner.tensors())  # without waiting: other processes may be fine

    def _write_checkpoint(self, tensors: dict[str, Weights]) -> None:
        if self.log is not None:
            self.log.flush()  # so that a checkpoint has its records even after a power cut
        config = self.config.to_dict()
        values = {**self.state.values(), "config": config, "identity": self._identity, RUN: self.record}
        checkpoint.write(self.config.run_dir, self.epochs_done, tensors, values)
        checkpoint.prune(self.config.run_dir, self.config.num_checkpoint_limit)
        self.trackers.plot(self.config.run_dir)

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
        """Make a trainer that continues a checkpoint with the checkpoint's own config.

        The checkpoint is `<run>/checkpoint-NNNNNN`, and the run continues in `<run>`. The pipeline must be
        the one that the run started from. `changes` are fields of the config that do not affect the weights,
        such as `num_epochs`, and objects in `accelerator_kwargs` and the like, because the checkpoint has
        them only as text. Other arguments are those of the constructor. Raises a ValueError if the checkpoint
        is damaged or belongs to another model.
        """
        state = checkpoint.read_state(Path(folder))
        config = DDPOConfig.from_dict({**state["config"], **(changes or {})})
        config.resume_from, config.output_dir = str(folder), str(Path(folder).parent)
        return cls(config, reward_function, prompt_function, sd_pipeline, **arguments)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the trained weights for plain diffusers, see `save_policy`; every process must call it."""
        with self.learner.averaged_policy():
            save_policy(self.family, folder, self._originals, self.accelerator.is_main_process)


class DDPOTrainer(Trainer):
    """Train with DDPO from noise; `prompt_function` is `() -> (prompt, metadata)`; see `Trainer`."""

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: Any,
        image_samples_hook: ImageSamplesHook | None = None,
    ) -> None:
        super().__init__(
            config, reward_function, prompt_function, sd_pipeline, image_samples_hook, algorithm=DDPO()
        )


class ImageDDPOTrainer(Trainer):
    """Train with DDPO from noisy images; `prompt_function` is `() -> (prompt, image, metadata)`.

    `noise_strength` in (0, 1] is the fraction of the schedule that is run; a value that leaves no step raises
    a ValueError. `debug_hook` is called before every epoch as `(sd_pipeline, noise_strength, global_step)`,
    for example for validation images. Other arguments are those of `Trainer`.
    """

    start_class: type[FromImages] = FromImages

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: PromptFunction,
        sd_pipeline: Any,
        image_samples_hook: ImageSamplesHook | None = None,
        noise_strength: float = 0.2,
        debug_hook: DebugHook | None = None,
    ) -> None:
        check_hook("debug_hook", debug_hook)
        self.noise_strength, self.debug_hook = noise_strength, debug_hook
        super().__init__(
            config, reward_function, prompt_function, sd_pipeline, image_samples_hook,
            algorithm=DDPO(), start=self.start_class(noise_strength),
        )  # fmt: skip

    def step(self, epoch: int) -> dict[str, Any]:
        """Call `debug_hook`, then run one epoch."""
        if self.debug_hook is not None and self.accelerator.is_main_process and not self.is_rehearsing:
            self.debug_hook(self.sd_pipeline, self.noise_strength, self.global_step)
        return super().step(epoch)
