"""Lessons 06 to 08: the DDPO loop, for text-to-image and for img2img.

One epoch samples, scores and trains (Black et al. 2023, arXiv 2305.13301, algorithm 1 with importance
sampling). All randomness is drawn from (seed, epoch, sample), never from what happened before: an epoch can
be done again, resumed or spread over processes and comes out the same.
"""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers.utils import logging as diffusers_logging
from torch import nn

from ddpo_lessons.run import checkpoint
from ddpo_lessons.advantages import PerPromptStatTracker, normalize, normalize_groups
from ddpo_lessons.batching import minibatches, shuffle_samples, shuffle_time
from ddpo_lessons.run.compiled import check_gradients
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.contexts import (
    Context,
    PromptFunction,
    RewardFunction,
    check_functions,
    check_key,
    image_context,
    score,
    text_context,
)
from ddpo_lessons.ddim import DDIMStep, ddim_step_with_logprob, gaussian_kl
from ddpo_lessons.run.interrupt import DeferredInterrupt
from ddpo_lessons.families.policy import Reference, check_pipeline, make_optimizer, prepare_policy, save_policy
from ddpo_lessons.ppo import clipped_surrogate
from ddpo_lessons.rollout import (
    PromptEncoder,
    Trajectory,
    img2img_rollout,
    make_schedule,
    predict,
    sample_seed,
    text2img_rollout,
    vae_factor,
)
from ddpo_lessons.run.runlog import NO_RECORDS, RunLog, claim, hold

# A network rounds differently in a batch of another size, and a log-prob divides that by the step's noise:
# with less noise than this, rounding alone can take a ratio out of the peers' clip range of 1e-4.
MIN_STD = 2e-4

# Called as (batches, global_step, tracker) and (sd_pipeline, noise_strength, global_step), as by the peers.
ImageSamplesHook = Callable[[list[list[Any]], int, Any], None]
DebugHook = Callable[[Any, float, int], None]


class DDPOTrainer:
    """Denoising diffusion policy optimisation of a Stable-Diffusion-shaped pipeline.

    Several processes give the weights of one with the same samples and timesteps in each optimizer step; that
    is so where a step takes all of the epoch (and `train_timestep_fraction` is 1). Otherwise each process
    shuffles its own samples.

    Args:
        config: the settings.
        reward_function: `(images, prompts, metadata) -> rewards (B,)` or `(rewards, info)`, with images
            (B, 3, H, W) float in [0, 1]. What it raises ends the run, as do rewards that are not finite, and
            nothing is trained on that epoch; `reward_service.time_limit` ends one that hangs.
        prompt_function: `() -> (prompt, metadata)`. If it holds state, give it `state_dict()` and
            `load_state_dict()`; without them a resumed run calls it as often as the old run did.
        sd_pipeline: a plain diffusers pipeline, or a wrapper of `ddpo_lessons.compat`.
        image_samples_hook: called after every epoch as `(batches, global_step, tracker)`, where each batch
            is `[images, prompts, metadata, rewards, info]`, `global_step` counts optimizer steps, and the
            tracker is None when none was asked for.

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
    ) -> None:
        """Check everything, build the policy and, when asked, resume."""
        check_functions(reward_function, prompt_function)
        config.check()
        self.config = config
        self.reward_function = reward_function
        self.prompt_function = prompt_function
        self.image_samples_hook = image_samples_hook
        self.sd_pipeline = sd_pipeline
        self.pipeline = check_pipeline(getattr(sd_pipeline, "sd_pipeline", sd_pipeline))
        self.use_lora = getattr(sd_pipeline, "use_lora", config.train_use_lora)
        self.num_train_timesteps = self._count_train_timesteps()
        self.accelerator = _make_accelerator(config)
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
        self._resumed_from = claim(config)
        self._fingerprints = checkpoint.fingerprints(self.pipeline)
        if config.train_kl_coefficient > 0:  # the penalty holds on to the adapter that was there at the start
            self._fingerprints["adapter at the start"] = checkpoint.adapter_fingerprint(self.pipeline.unet)
        saved = self._read_checkpoint()
        self.encode_prompts = PromptEncoder(self.pipeline)
        self._prepare()
        self.tracker = self._make_stat_tracker()
        self.epochs_done = 0
        self.global_step = 0
        self.log: RunLog | None = None  # of the main process, once training starts
        self._log_is_open = False
        self._metrics_mark: dict[str, Any] = NO_RECORDS  # what the resumed checkpoint knows of metrics.jsonl
        if saved is not None:
            self._restore(*saved)

    # ------------------------------------------------------------------------------------ preparation
    def _schedule(self) -> torch.Tensor:
        """Set the scheduler and return the timesteps that a rollout takes."""
        return make_schedule(self.pipeline.scheduler, self.config.sample_num_steps)

    def _count_stochastic(self) -> int:
        """Return how many steps of a rollout have noise; refuse settings with which a step would fail."""
        scheduler, timesteps = self.pipeline.scheduler, self._schedule()  # (T,)
        blank = torch.zeros(len(timesteps), 1)
        # A step of nothing raises now what sampling would raise after the first forward pass.
        try:
            dry_run = ddim_step_with_logprob(
                scheduler, blank, timesteps, blank, self.config.sample_eta, generator=torch.Generator()
            )
        except ValueError as error:
            raise ValueError(f"sample_eta={self.config.sample_eta} and the scheduler: {error}") from error
        noisy = dry_run.std[dry_run.std > 0]
        if (noisy < MIN_STD).any():
            raise ValueError(
                f"sample_eta={self.config.sample_eta} leaves steps with noise of {noisy.min():.1e}, too "
                f"little for float32 to replay them (at least {MIN_STD:.0e}): raise it"
            )
        return len(noisy)

    def _count_train_timesteps(self) -> int:
        """Return how many timesteps of each sample are trained on."""
        stochastic = self._count_stochastic()
        count = int(stochastic * self.config.train_timestep_fraction + 1e-6)
        if count == 0:
            raise ValueError(
                f"train_timestep_fraction={self.config.train_timestep_fraction} of {stochastic} steps with "
                "noise leaves none to train on: raise it, or take more steps"
            )
        return count

    def _prepare(self) -> None:
        """Build policy and optimizer and hand them to accelerate."""
        torch.backends.cuda.matmul.allow_tf32 = self.config.allow_tf32
        set_seed(self.config.seed % 2**32)  # numpy takes no larger one
        had_adapter = bool(getattr(self.pipeline.unet, "peft_config", None))
        trainable = prepare_policy(self.pipeline, self.config, self.use_lora, self.accelerator.device)
        self.trainable_names, self.trainable = list(trainable), list(trainable.values())
        if self.config.train_kl_coefficient > 0:
            self._reference = Reference(self.pipeline.unet, fresh_adapter=self.use_lora and not had_adapter)
        if self.config.torch_compile:
            self.pipeline.unet.compile(dynamic=False)  # a graph for every shape, so all are compared
        else:
            self.pipeline.unet._compiled_call_impl = None  # of an earlier trainer: nn.Module has no other way
        self._compared: set[tuple[int, ...]] = set()  # shapes whose compiled gradients are right
        optimizer = make_optimizer(self.config, self.trainable)
        # In one process this is pipeline.unet itself; in several it synchronises gradients.
        self.unet: nn.Module
        self.unet, self.optimizer = self.accelerator.prepare(self.pipeline.unet, optimizer)
        self.unet.eval()

    def _make_stat_tracker(self) -> PerPromptStatTracker | None:
        config = self.config
        if not config.per_prompt_stat_tracking:
            return None
        return PerPromptStatTracker(
            config.per_prompt_stat_tracking_buffer_size, config.per_prompt_stat_tracking_min_count
        )

    # --------------------------------------------------------------------------------------- training
    def train(self) -> None:
        """Run the epochs that are left; Ctrl-C finishes the epoch and saves, a second one stops at once.

        Raises:
            RuntimeError: if another trainer trains in the run's folder.
        """
        config = self.config
        message = "Ctrl-C: finishing this epoch, then saving; press again to stop at once"
        with (
            hold(config.run_dir) if self.accelerator.is_main_process else contextlib.nullcontext(),
            DeferredInterrupt(message) as interrupt,
            self._bar("epochs", config.num_epochs, initial=self.epochs_done) as bar,
        ):
            while self.epochs_done < config.num_epochs:
                metrics = self.step(self.epochs_done)
                bar.set_postfix(reward=f"{metrics['reward_mean']:.3f}")
                bar.update()
                last = self.epochs_done == config.num_epochs
                stop = self._any_process(interrupt.requested)
                if self.epochs_done % config.save_freq == 0 or last or stop:
                    self.save()
                if stop:
                    break

    def _any_process(self, flag: bool) -> bool:
        flags = torch.tensor([float(flag)], device=self.accelerator.device)
        return bool(self.accelerator.gather(flags).sum() > 0)

    def step(self, epoch: int) -> dict[str, float]:
        """Do one epoch: sample, score, train; return its metrics."""
        started = time.perf_counter()
        contexts = self.draw_contexts(epoch)
        self._check_same(contexts)
        self._open_log()
        batches, trajectory, reward_seconds = self._sample(epoch, contexts)
        rewards = self._gather_rewards(torch.cat([batch[3] for batch in batches]))  # (N,)
        advantages = self._advantages(rewards, [context.key for context in contexts])  # (N,)
        sampled = time.perf_counter()
        self._train_on(epoch, trajectory, advantages[self._own_rows().flatten()])
        self.epochs_done = epoch + 1
        metrics = {
            "epoch": self.epochs_done,
            "reward_mean": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "advantage_mean": advantages.mean().item(),
            "samples_seen": self.epochs_done * self.plan.total_samples,
            "seconds_sampling": sampled - started - reward_seconds,
            "seconds_reward": reward_seconds,
            "seconds_training": time.perf_counter() - sampled,
        }
        self._report(epoch, metrics, batches)
        return metrics

    def _bar(self, name: str, total: int, **settings: Any) -> Any:
        """Make a progress bar, unless `diffusers.utils.logging.disable_progress_bar()` was called."""
        is_shown = self.accelerator.is_local_main_process
        return diffusers_logging.tqdm(total=total, desc=name, disable=not is_shown, **settings)

    def draw_contexts(self, epoch: int) -> list[Context]:
        """Ask the prompt function for the contexts of an epoch, the same ones in every process.

        Python's, numpy's and torch's global generators are seeded from (seed, epoch) first, so that prompt
        functions that draw from them need no state of their own.
        """
        set_seed(sample_seed(self.config.seed, epoch) % 2**32)
        size = self.config.sample_group_size
        count = self.plan.total_samples // size
        drawn = [self._make_context(self.prompt_function()) for _ in range(count)]
        if self.tracker is not None:
            for context in drawn:
                check_key(context.key)
        return [context for context in drawn for _ in range(size)]

    def _make_context(self, drawn: Any) -> Context:
        return text_context(drawn)

    def _check_same(self, contexts: Sequence[Context]) -> None:
        """Refuse a prompt function that gives each process something else: rewards would be mixed up."""
        if self.accelerator.num_processes == 1:
            return
        images = [None if c.image is None else c.image.flatten()[:: c.image[0].numel()] for c in contexts]
        marks = [None if image is None else image.tolist() for image in images]  # a pixel of each channel
        own = zlib.crc32(repr(([context.prompt for context in contexts], marks)).encode())
        all_of_them = self.accelerator.gather(torch.tensor([own], device=self.accelerator.device))
        if (all_of_them != own).any():
            raise RuntimeError(
                "prompt_function gives each process something else: seed it alike in all of them, for each "
                "draws the whole epoch and takes its own samples"
            )

    def _own_rows(self) -> torch.Tensor:
        """Return the numbers, in the whole epoch, of this process's samples: (batches, B)."""
        processes, process = self.accelerator.num_processes, self.accelerator.process_index
        rows = torch.arange(self.plan.total_samples)
        return rows.view(-1, processes, self.config.sample_batch_size)[:, process]

    def _sample(self, epoch: int, contexts: Sequence[Context]) -> tuple[list[list[Any]], Trajectory, float]:
        """Sample and score this process's share: its batches, their trajectory, seconds of scoring."""
        batches, pieces, seconds = [], [], 0.0
        own_rows = self._own_rows()  # (batches, B)
        samples, _ = self.config.forward_sizes(math.prod(self._latents_shape(contexts)))
        with self._bar("sampling", len(own_rows), leave=False) as bar:
            for group in own_rows.chunk(math.ceil(own_rows.numel() / samples)):  # (G, B)
                rows = group.flatten().tolist()
                images, piece = self._rollout(epoch, rows, [contexts[row] for row in rows])
                if images.is_cuda:
                    torch.cuda.synchronize(images.device)  # decoding is sampling, not reward
                before = time.perf_counter()
                for batch, own_images in zip(group.tolist(), images.split(group.shape[1]), strict=True):
                    own_contexts = [contexts[row] for row in batch]
                    batches.append(score(self.reward_function, own_images, own_contexts))
                seconds += time.perf_counter() - before
                pieces.append(piece)
                bar.update(len(group))
        return batches, Trajectory.cat(pieces), seconds

    def _latents_shape(self, contexts: Sequence[Context]) -> tuple[int, ...]:
        """Return the shape (C, h, w) of a sample's latents."""
        unet = self.pipeline.unet.config
        return (unet.in_channels, unet.sample_size, unet.sample_size)

    def _generators(self, epoch: int, rows: Sequence[int], purpose: int) -> list[torch.Generator]:
        """Give every sample its own generator, so that batch size and processes change nothing."""
        seeds = [sample_seed(self.config.seed, epoch, purpose, row) for row in rows]
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def _initial_noise(self, epoch: int, rows: Sequence[int], shape: tuple[int, ...]) -> torch.Tensor:
        """Draw x_T or the forward noise (B, C, h, w); samples of a group share it."""
        groups = [row // self.config.sample_group_size for row in rows]
        generators = self._generators(epoch, groups, purpose=0)
        noise = [torch.randn(shape, generator=generator) for generator in generators]
        return torch.stack(noise).to(self.accelerator.device)

    def _rollout(
        self, epoch: int, rows: Sequence[int], contexts: Sequence[Context]
    ) -> tuple[torch.Tensor, Trajectory]:
        """Sample one batch: images (B, 3, H, W) and its trajectory."""
        with self.accelerator.autocast():
            return text2img_rollout(
                self.pipeline,
                [context.prompt for context in contexts],
                initial_noise=self._initial_noise(epoch, rows, self._latents_shape(contexts)),
                **self._sampling_settings(epoch, rows),
            )

    def _sampling_settings(self, epoch: int, rows: Sequence[int]) -> dict[str, Any]:
        return {
            "num_inference_steps": self.config.sample_num_steps,
            "guidance_scale": self.config.sample_guidance_scale,
            "eta": self.config.sample_eta,
            "negative_prompt": self.config.negative_prompts,
            "reduction": self.config.log_prob_reduction,
            "generator": self._generators(epoch, rows, purpose=1),
            "encoder": self.encode_prompts,
            "group_size": self._shared_starts,
        }

    @property
    def _shared_starts(self) -> int:
        """How many rollouts side by side begin in one state: a group, where batches hold whole ones."""
        size = self.config.sample_group_size
        return size if self.config.sample_batch_size % size == 0 else 1

    # ------------------------------------------------------------------------------------- advantages
    def _gather_rewards(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rewards of the whole epoch (N,) in the order of its samples, on every process."""
        size = self.config.sample_batch_size
        gathered = self.accelerator.gather(own.to(self.accelerator.device)).cpu()  # process by process
        by_process = gathered.view(self.accelerator.num_processes, -1, size)
        return by_process.transpose(0, 1).flatten()

    def _advantages(self, rewards: torch.Tensor, keys: list[Any]) -> torch.Tensor:
        """Turn the epoch's rewards (N,) into advantages (N,) with the baseline that the config names."""
        if self.tracker is not None:
            return self.tracker.update(keys, rewards)
        if self.config.sample_group_size > 1:
            return normalize_groups(rewards, self.config.sample_group_size)
        return normalize(rewards)

    # ---------------------------------------------------------------------------------- policy update
    def _train_on(self, epoch: int, trajectory: Trajectory, advantages: torch.Tensor) -> None:
        """Take the optimizer steps of one epoch over shuffled (sample, timestep) pairs."""
        first_step = self.global_step
        self._schedule()  # a reward or hook may have used the pipeline with another one
        with self._bar("training", self.plan.optimizer_steps, leave=False) as bar:
            for inner_epoch in range(self.config.train_num_inner_epochs):
                for pairs in self._pairs_of_steps(epoch, inner_epoch, trajectory.timesteps.shape):
                    record = self._optimizer_step(trajectory, advantages, **pairs)
                    if self.global_step == first_step and "max_ratio_error" in record:
                        # No update yet: the policies must agree.
                        record["first_replay_max_ratio_error"] = record["max_ratio_error"]
                    self.global_step += 1
                    position = {"epoch": epoch + 1, "inner_epoch": inner_epoch + 1}
                    self._record("step", {**position, "step": self.global_step, **record})
                    bar.update()

    def _pairs_of_steps(
        self, epoch: int, inner_epoch: int, shape: tuple[int, ...]
    ) -> list[dict[str, torch.Tensor]]:
        """Return the shuffled (sample, timestep) pairs of each optimizer step: "rows" and "columns" (N,)."""
        config = self.config
        seed = sample_seed(config.seed, epoch, 2, inner_epoch, self.accelerator.process_index)
        generator = torch.Generator().manual_seed(seed)
        rows, columns = torch.meshgrid(*map(torch.arange, shape), indexing="ij")  # (B, T) each
        shuffled = shuffle_samples({"rows": rows, "columns": columns}, generator)
        shuffled = shuffle_time(shuffled, ["columns"], generator)
        kept = {name: numbers[:, : self.num_train_timesteps] for name, numbers in shuffled.items()}
        samples_per_step = config.train_batch_size * config.train_gradient_accumulation_steps
        return [
            {name: numbers.flatten() for name, numbers in step.items()}
            for step in minibatches(kept, samples_per_step)
        ]

    def _optimizer_step(
        self,
        trajectory: Trajectory,
        advantages: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
    ) -> dict[str, float]:
        """Accumulate the gradient over groups of pairs, weighed by their share, and step once."""
        _, size = self.config.forward_sizes(trajectory.latents[0, 0].numel())
        count = math.ceil(len(rows) / size)  # groups of about one size: a small last one would waste time
        groups = list(zip(rows.chunk(count), columns.chunk(count), strict=True))
        shares, stats = [], []
        for number, group in enumerate(groups, start=1):
            if self.config.torch_compile:
                self._check_compiled(trajectory, *group)
            is_last = number == len(groups)
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.unet):
                loss, group_stats = self._loss(trajectory, advantages, *group)
                share = len(group[0]) / len(rows)
                self.accelerator.backward(loss * share)
            shares.append(share)
            stats.append({"loss": loss.detach(), **group_stats})
        grad_norm = self.accelerator.clip_grad_norm_(self.trainable, self.config.train_max_grad_norm)
        if self.accelerator.scaler is None and not math.isfinite(grad_norm):  # fp16's scaler skips such steps
            raise RuntimeError(
                f"the gradient of optimizer step {self.global_step + 1} is not finite, so the step was not "
                "taken: the policy may have moved so far that ratios overflow. Lower train_learning_rate="
                f"{self.config.train_learning_rate}, and resume from a checkpoint"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._summarise(stats, shares, grad_norm)

    def _check_compiled(self, trajectory: Trajectory, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Compare the compiled UNet's gradients with its own, for every shape at its first and a later step.

        A later step, since LoRA's A has no gradient in the first one, where B is zero.
        """
        is_guided = trajectory.negative_prompt_embeds is not None  # then it is given each pair twice
        shape = (self.global_step > 0, len(rows), is_guided, *trajectory.latents.shape[2:])
        if shape in self._compared:
            return

        def gradients() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(self._probe(trajectory, rows, columns), self.trainable)

        with self.accelerator.no_sync(self.unet):
            compiled = gradients()
            with torch.compiler.set_stance("force_eager"):
                own = gradients()
        check_gradients(self.trainable_names, compiled, own)
        self._compared.add(shape)

    def _probe(self, trajectory: Trajectory, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Return what gradients are compared of: log-probs, for PPO's are zero where a ratio is clipped."""
        return self._replay(self.unet, trajectory, rows, columns).log_prob.sum()

    def _loss(
        self,
        trajectory: Trajectory,
        advantages: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Replay the recorded actions of some pairs; return the loss over them, and statistics.

        A statistic is a mean over the pairs, or, if its name begins with "max", a maximum.
        """
        replay = self._replay(self.unet, trajectory, rows, columns)
        loss, stats = clipped_surrogate(
            replay.log_prob,
            trajectory.log_probs[rows, columns],
            advantages[rows].to(self.accelerator.device),
            self.config.train_clip_range,
            self.config.train_adv_clip_max,
        )
        means = {name: getattr(stats, name) for name in ("approx_kl", "kl_k3", "clip_fraction")}
        if self.config.train_kl_coefficient > 0:
            with torch.no_grad(), self._reference.weights() as unet:
                reference = self._replay(unet, trajectory, rows, columns)
            kl = gaussian_kl(replay, reference, self.config.log_prob_reduction).mean()
            loss = loss + self.config.train_kl_coefficient * kl
            means["kl_reference"] = kl.detach()
        return loss, {**means, "max_ratio_error": (stats.ratio - 1).abs().max()}

    def _replay(
        self, unet: nn.Module, trajectory: Trajectory, rows: torch.Tensor, columns: torch.Tensor
    ) -> DDIMStep:
        """Score the recorded actions of some pairs (N,) under a policy."""
        negative = trajectory.negative_prompt_embeds
        latents = trajectory.latents[rows, columns]  # (N, C, h, w)
        timesteps = trajectory.timesteps[rows, columns]  # (N,)
        distinct, places = self._distinct_states(rows, columns)  # (D,), (N,)
        with self.accelerator.autocast():
            output = predict(
                unet,
                latents[distinct],
                timesteps[distinct],
                trajectory.prompt_embeds[rows[distinct]],
                None if negative is None else negative[rows[distinct]],
                trajectory.guidance_scale,
            )[places]
        return ddim_step_with_logprob(
            self.pipeline.scheduler,
            output,
            timesteps,
            latents,
            eta=self.config.sample_eta,
            prev_sample=trajectory.latents[rows, columns + 1],
            reduction=self.config.log_prob_reduction,
        )

    def _distinct_states(
        self, rows: torch.Tensor, columns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the pairs whose states differ, (D,), and for each pair (N,) which of them has its state.

        The rollouts of a group begin in one state, so one prediction replays all their first actions.
        """
        if self._shared_starts == 1:
            return (every_pair := torch.arange(len(rows))), every_pair
        owners = torch.where(columns == 0, rows // self._shared_starts * self._shared_starts, rows)
        states, places = torch.stack([owners, columns]).unique(dim=1, return_inverse=True)  # (2, D), (N,)
        distinct = torch.zeros(states.shape[1], dtype=torch.long)
        return distinct.scatter_(0, places, torch.arange(len(rows))), places

    def _summarise(
        self, stats: list[dict[str, torch.Tensor]], shares: list[float], grad_norm: torch.Tensor
    ) -> dict[str, float]:
        """Join the statistics of groups and processes into the record of one optimizer step."""
        names = list(stats[0])
        table = torch.stack([torch.stack([row[name] for name in names]) for row in stats]).float()  # (G, S)
        weights = torch.tensor(shares, device=table.device)[:, None]
        is_max = torch.tensor([name.startswith("max") for name in names], device=table.device)
        joined = torch.where(is_max, table.amax(0), (table * weights).sum(0))  # (S,)
        gathered = self.accelerator.gather(joined[None])  # (processes, S)
        values = torch.where(is_max, gathered.amax(0), gathered.mean(0)).tolist()
        return {
            **dict(zip(names, values, strict=True)),
            "grad_norm": float(grad_norm),
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    # ----------------------------------------------------------------------------------- what is kept
    def _open_log(self) -> None:
        """Open metrics.jsonl and the trackers, and drop what an older run left; only once."""
        if self._log_is_open:
            return
        self._log_is_open = True
        self.accelerator.wait_for_everyone()  # all have looked at the folder before it changes
        if self.accelerator.is_main_process:
            self.log = RunLog(self.config, self._resumed_from, self.epochs_done, self._metrics_mark)
        if self.config.log_with:
            fields = self.config.to_dict().items()
            self.accelerator.init_trackers(
                self.config.tracker_project_name,
                config={k: v if isinstance(v, (int, float, str)) else str(v) for k, v in fields},
                init_kwargs=self.config.tracker_kwargs,
            )

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
            self.log.images(self.epochs_done, torch.cat([batch[0] for batch in batches]))
        if self.image_samples_hook is not None and self.accelerator.is_main_process:
            tracker = self.accelerator.trackers[0] if self.accelerator.trackers else None
            self.image_samples_hook(batches, self.global_step, tracker)

    def save(self) -> Path:
        """Write a checkpoint; every process must call it. Return its folder."""
        self._open_log()  # also where nothing was trained yet
        self.accelerator.wait_for_everyone()
        folder = self.config.run_dir / checkpoint.name_of(self.epochs_done)
        if self.accelerator.is_main_process:
            tensors: dict[str, dict[str, torch.Tensor]] = {
                "policy": dict(zip(self.trainable_names, self.trainable, strict=True)),
                "optimizer": checkpoint.optimizer_tensors(self.optimizer, self.trainable_names),
            }
            checkpoint.write(self.config.run_dir, self.epochs_done, tensors, self._state())
            checkpoint.prune(self.config.run_dir, self.config.num_checkpoint_limit)
        self.accelerator.wait_for_everyone()
        return folder

    def _state(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        prompts = getattr(self.prompt_function, "state_dict", None)
        return {
            "epochs_done": self.epochs_done,
            "global_step": self.global_step,
            "config": self.config.to_dict(),
            "identity": self._identity(),
            "stat_tracker": None if self.tracker is None else self.tracker.state_dict(),
            "prompt_function": None if prompts is None else prompts(),
            "grad_scaler": None if scaler is None else scaler.state_dict(),
            "metrics": self._metrics_mark if self.log is None else self.log.mark(),
        }

    def _identity(self) -> dict[str, Any]:
        """Return what decides the weights, and so must be the same when a run is continued."""
        return {
            "trainer": type(self).__name__,
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
        checkpoint.check_identity(self._resumed_from, state["identity"], self._identity())
        return tensors, state

    def _restore(self, tensors: dict[str, Any], state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        if set(tensors["policy"]) != set(self.trainable_names):
            raise ValueError(
                f"checkpoint {self._resumed_from} trains other weights than this trainer: give the pipeline "
                "the adapter that it had"
            )
        with torch.no_grad():
            for name, parameter in zip(self.trainable_names, self.trainable, strict=True):
                parameter.copy_(tensors["policy"][name])
        checkpoint.load_optimizer_tensors(self.optimizer, self.trainable_names, tensors["optimizer"])
        if self.tracker is not None:
            self.tracker.load_state_dict(state["stat_tracker"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["grad_scaler"])
        self.epochs_done, self.global_step = state["epochs_done"], state["global_step"]
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
            changes: fields of the config that do not decide the weights, such as `num_epochs`; and objects in
                `accelerator_kwargs` and the like, which the checkpoint holds as text only.
            **arguments: further arguments of the constructor.

        Returns:
            The trainer.

        Raises:
            ValueError: if the checkpoint is damaged or belongs to another model.
        """
        _, state = checkpoint.read(Path(folder))
        config = DDPOConfig.from_dict({**state["config"], **(changes or {})})
        config.resume_from, config.output_dir = str(folder), str(Path(folder).parent)
        return cls(config, reward_function, prompt_function, sd_pipeline, **arguments)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the trained weights for plain diffusers.

        LoRA weights load with `pipeline.load_lora_weights(folder)`; a fully trained UNet is written with its
        whole pipeline, for `StableDiffusionPipeline.from_pretrained(folder)`.

        Args:
            folder: where to write to.
        """
        if self.accelerator.is_main_process:
            save_policy(self.pipeline, folder)


class ImageDDPOTrainer(DDPOTrainer):
    """DDPO whose first state is an image: `prompt_function` returns `(prompt, image, metadata)`.

    The image (3, H, W) in [0, 1] is encoded, noised to the step that `noise_strength` names, and denoised by
    the policy; everything else is `DDPOTrainer`.

    Args:
        config: the settings.
        reward_function: as in `DDPOTrainer`.
        prompt_function: `() -> (prompt, image, metadata)`.
        sd_pipeline: as in `DDPOTrainer`.
        image_samples_hook: as in `DDPOTrainer`.
        noise_strength: share of the schedule that is run, in (0, 1].
        debug_hook: called before every epoch as `(sd_pipeline, noise_strength, global_step)`, for validation
            images and the like.

    Raises:
        ValueError: as in `DDPOTrainer`, or if noise_strength leaves no step.
    """

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
        """Check everything, build the policy and, when asked, resume."""
        if not isinstance(noise_strength, (int, float)):
            raise TypeError(f"noise_strength={noise_strength!r} must be a number in (0, 1]")
        self.noise_strength = noise_strength
        self.debug_hook = debug_hook
        super().__init__(config, reward_function, prompt_function, sd_pipeline, image_samples_hook)

    def _schedule(self) -> torch.Tensor:
        steps = self.config.sample_num_steps
        return make_schedule(self.pipeline.scheduler, steps, self.noise_strength)

    def step(self, epoch: int) -> dict[str, float]:
        """Call `debug_hook`, then do one epoch."""
        if self.debug_hook is not None and self.accelerator.is_main_process:
            self.debug_hook(self.sd_pipeline, self.noise_strength, self.global_step)
        return super().step(epoch)

    def _make_context(self, drawn: Any) -> Context:
        return image_context(drawn, self.pipeline.vae)

    def draw_contexts(self, epoch: int) -> list[Context]:
        """Ask for the contexts of an epoch and refuse images of different sizes."""
        contexts = super().draw_contexts(epoch)
        sizes = {tuple(c.image.shape) for c in contexts if c.image is not None}
        if len(sizes) > 1:
            raise ValueError(f"images of one epoch have the sizes {sorted(sizes)}: resize them to one")
        return contexts

    def _latents_shape(self, contexts: Sequence[Context]) -> tuple[int, ...]:
        images = (context.image for context in contexts if context.image is not None)
        sides = [side // vae_factor(self.pipeline.vae) for side in next(images).shape[1:]]
        return (self.pipeline.unet.config.in_channels, *sides)

    def _rollout(
        self, epoch: int, rows: Sequence[int], contexts: Sequence[Context]
    ) -> tuple[torch.Tensor, Trajectory]:
        images = torch.stack([context.image for context in contexts if context.image is not None])
        with self.accelerator.autocast():
            return img2img_rollout(
                self.pipeline,
                [context.prompt for context in contexts],
                images,
                self.noise_strength,
                initial_noise=self._initial_noise(epoch, rows, self._latents_shape(contexts)),
                **self._sampling_settings(epoch, rows),
            )

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "noise_strength": self.noise_strength}


def _make_accelerator(config: DDPOConfig) -> Accelerator:
    project = {"project_dir": str(config.run_dir), **config.project_kwargs}
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        log_with=config.log_with,
        project_config=ProjectConfiguration(**project),
        dynamo_backend="no",  # what accelerate would compile is not compared with anything: see torch_compile
        **config.accelerator_kwargs,
    )
    # The trainer weighs groups itself, also where an environment variable asks accelerate to.
    accelerator.gradient_accumulation_steps = 1
    if config.log_with and not accelerator.log_with:  # accelerate leaves out what is not installed
        raise ImportError(
            f"log_with={config.log_with!r} needs a package that is not installed: "
            f"pip install {config.log_with}"
        )
    return accelerator
