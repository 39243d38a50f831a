"""Lessons 06 to 08: the DDPO loop, for text-to-image and for img2img.

One epoch samples, scores and trains (Black et al. 2023, arXiv 2305.13301, algorithm 1 with importance
sampling). All randomness is drawn from (seed, epoch, sample), never from what happened before: an epoch can be
done again, resumed or spread over processes and comes out the same.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, gather_object, set_seed
from diffusers import DDIMScheduler, StableDiffusionPipeline
from diffusers.training_utils import _collate_lora_metadata, cast_training_params
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict
from torch import nn
from tqdm.auto import tqdm

from ddpo_lessons import checkpoint
from ddpo_lessons.advantages import PerPromptStatTracker, normalize, normalize_groups
from ddpo_lessons.batching import minibatches, shuffle_samples, shuffle_time
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.ddim import ddim_step_with_logprob, step_std
from ddpo_lessons.ppo import clipped_surrogate
from ddpo_lessons.rollout import (
    PromptEncoder,
    Trajectory,
    check_images,
    img2img_rollout,
    make_schedule,
    predict,
    sample_seed,
    text2img_rollout,
)
from ddpo_lessons.runlog import RunLog, claim

PAIRS_NUMEL = 64 * 256  # latent elements of a forward pass that train_forward_size=0 aims for

# What may differ between a run and its continuation without changing a weight.
FREE_FIELDS = {
    "exp_name", "run_name", "log_with", "tracker_kwargs", "accelerator_kwargs", "project_kwargs",
    "tracker_project_name", "logdir", "output_dir", "overwrite", "num_epochs", "save_freq",
    "num_checkpoint_limit", "image_grid_freq", "allow_tf32", "resume_from", "train_forward_size",
    "train_gradient_checkpointing",
}  # fmt: skip

RewardFunction = Callable[[torch.Tensor, tuple[str, ...], tuple[Any, ...]], Any]


@dataclass(frozen=True)
class Context:
    """What one rollout is asked for: a prompt, for img2img an image (3, H, W), and the user's metadata."""

    prompt: str
    metadata: Any
    image: torch.Tensor | None = None

    @property
    def key(self) -> Any:
        """What per-prompt statistics are kept by: `metadata["id"]` where there is one, else the prompt."""
        has_id = isinstance(self.metadata, dict) and "id" in self.metadata
        return self.metadata["id"] if has_id else self.prompt


class DDPOTrainer:
    """Denoising diffusion policy optimisation of a Stable-Diffusion-shaped pipeline.

    Args:
        config: the settings.
        reward_function: `(images, prompts, metadata) -> rewards (B,)` or `(rewards, info)`, with images
            (B, 3, H, W) float in [0, 1].
        prompt_function: `() -> (prompt, metadata)`.
        sd_pipeline: a plain diffusers pipeline, or a wrapper of `ddpo_lessons.compat`.
        image_samples_hook: called every epoch as `(batches, samples_seen, tracker)`, where each batch is
            `[images, prompts, metadata, rewards, info]` and the tracker is None when none was asked for.

    Raises:
        ValueError: if settings do not fit each other, the pipeline, the run's folder or the checkpoint.
        TypeError: if the pipeline or a function is not what it has to be.
    """

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: Callable[[], tuple[Any, ...]],
        sd_pipeline: Any,
        image_samples_hook: Callable[[list[list[Any]], int, Any], None] | None = None,
    ) -> None:
        """Check everything, build the policy and, when asked, resume."""
        _check_callable("reward_function", reward_function)
        _check_callable("prompt_function", prompt_function)
        self.config = config
        self.reward_function = reward_function
        self.prompt_function = prompt_function
        self.image_samples_hook = image_samples_hook
        self.pipeline = _check_pipeline(getattr(sd_pipeline, "sd_pipeline", sd_pipeline))
        use_lora = getattr(sd_pipeline, "use_lora", config.train_use_lora)
        self.num_train_timesteps = self._count_train_timesteps()
        self.accelerator = Accelerator(
            mixed_precision=config.mixed_precision,
            log_with=config.log_with,
            project_config=ProjectConfiguration(
                **{"project_dir": str(config.run_dir), **config.project_kwargs}
            ),
            **config.accelerator_kwargs,
        )
        self.plan = config.epoch_plan(self.num_train_timesteps, self.accelerator.num_processes)
        if self.plan.total_samples % config.sample_group_size:
            raise ValueError(
                f"sample_group_size={config.sample_group_size} does not divide the "
                f"{self.plan.total_samples} samples of an epoch"
            )
        resume = claim(config) if self.accelerator.is_main_process else None
        resume = self._broadcast(resume)
        torch.backends.cuda.matmul.allow_tf32 = config.allow_tf32
        set_seed(config.seed)
        self.encode_prompts = PromptEncoder(self.pipeline)
        self._prepare_policy(use_lora)
        self.tracker = self._make_stat_tracker()
        self.epochs_done = 0
        self.global_step = 0
        if resume is not None:
            self._load(Path(resume))
        self._start_log()

    # ------------------------------------------------------------------------------------ preparation
    def _broadcast(self, value: Any) -> Any:
        if self.accelerator.num_processes == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box)
        return box[0]

    def _schedule(self) -> torch.Tensor:
        """Return the timesteps that a rollout takes."""
        return make_schedule(self.pipeline.scheduler, self.config.sample_num_steps)

    def _count_train_timesteps(self) -> int:
        """Return how many timesteps of each sample are trained on."""
        stochastic = int(
            (step_std(self.pipeline.scheduler, self._schedule(), self.config.sample_eta) > 0).sum()
        )
        count = int(stochastic * self.config.train_timestep_fraction + 1e-6)
        if count == 0:
            raise ValueError(
                f"train_timestep_fraction={self.config.train_timestep_fraction} of {stochastic} steps leaves "
                "none to train on: raise it, or take more steps"
            )
        return count

    def _prepare_policy(self, use_lora: bool) -> None:
        """Freeze what is not trained, set precisions, add the adapter, and hand the rest to accelerate."""
        pipeline, config, device = self.pipeline, self.config, self.accelerator.device
        precision = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = precision[config.mixed_precision]
        pipeline.vae.requires_grad_(False).to(device, dtype).eval()
        pipeline.text_encoder.requires_grad_(False).to(device, dtype).eval()
        unet = pipeline.unet
        adapted = bool(getattr(unet, "peft_config", None))
        self.base_fingerprint = checkpoint.fingerprint(unet)
        unet.requires_grad_(not (use_lora or adapted))
        unet.to(device, dtype if use_lora or adapted else torch.float32)
        if adapted:  # the user's own adapter is the policy
            for name, parameter in unet.named_parameters():
                parameter.requires_grad_("lora_" in name)
        elif use_lora:
            unet.add_adapter(
                LoraConfig(
                    r=config.train_lora_rank,
                    lora_alpha=config.train_lora_alpha,
                    init_lora_weights="gaussian",
                    target_modules=list(config.train_lora_target_modules),
                )
            )
        self.uses_lora = use_lora or adapted
        cast_training_params(unet, dtype=torch.float32)
        if config.train_gradient_checkpointing:
            unet.enable_gradient_checkpointing()
        # Always eval mode: dropout would make the policy that trains differ from the one that sampled.
        unet.eval()
        trainable = {n: p for n, p in unet.named_parameters() if p.requires_grad}
        self.trainable_names, self.trainable = list(trainable), list(trainable.values())
        optimizer = self._make_optimizer()
        # In one process this is pipeline.unet itself; in several it synchronises gradients.
        self.unet: nn.Module
        self.unet, self.optimizer = self.accelerator.prepare(unet, optimizer)
        self.unet.eval()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self.config
        kind: Any = torch.optim.AdamW
        if config.train_use_8bit_adam:
            try:
                kind = importlib.import_module("bitsandbytes").optim.AdamW8bit
            except ImportError as error:
                raise ImportError(
                    "train_use_8bit_adam needs bitsandbytes: pip install bitsandbytes"
                ) from error
        return kind(
            self.trainable,
            lr=config.train_learning_rate,
            betas=(config.train_adam_beta1, config.train_adam_beta2),
            weight_decay=config.train_adam_weight_decay,
            eps=config.train_adam_epsilon,
        )

    def _make_stat_tracker(self) -> PerPromptStatTracker | None:
        config = self.config
        if not config.per_prompt_stat_tracking:
            return None
        return PerPromptStatTracker(
            config.per_prompt_stat_tracking_buffer_size, config.per_prompt_stat_tracking_min_count
        )

    def _start_log(self) -> None:
        self.log = (
            RunLog(self.config, self.epochs_done) if self.accelerator.is_main_process else None
        )
        if self.config.log_with:
            flat = {
                k: v if isinstance(v, (int, float, str)) else str(v)
                for k, v in self.config.to_dict().items()
            }
            self.accelerator.init_trackers(
                self.config.tracker_project_name,
                config=flat,
                init_kwargs=self.config.tracker_kwargs,
            )

    # --------------------------------------------------------------------------------------- training
    def train(self) -> None:
        """Run the epochs that are left; Ctrl-C finishes the epoch and saves, a second one stops at once."""
        config = self.config
        self._fast_forward_prompts()
        bar = tqdm(
            range(self.epochs_done, config.num_epochs),
            desc="epochs",
            initial=self.epochs_done,
            total=config.num_epochs,
            disable=not self.accelerator.is_local_main_process,
        )
        with _InterruptAfterEpoch() as interrupt:
            for epoch in bar:
                metrics = self.step(epoch)
                bar.set_postfix(reward=f"{metrics['reward_mean']:.3f}")
                stop = self._any_process(interrupt.requested)
                if (
                    self.epochs_done % config.save_freq == 0
                    or self.epochs_done == config.num_epochs
                    or stop
                ):
                    self.save()
                if stop:
                    break
        self.accelerator.end_training()

    def _any_process(self, flag: bool) -> bool:
        flags = torch.tensor([float(flag)], device=self.accelerator.device)
        return bool(self.accelerator.gather(flags).sum() > 0)

    def step(self, epoch: int) -> dict[str, float]:
        """Do one epoch: sample, score, train; return its metrics."""
        started = time.perf_counter()
        contexts = self.draw_contexts(epoch)
        indices = self._own_indices()
        batches, trajectory = [], []
        reward_seconds = 0.0
        bar = tqdm(
            indices,
            desc="sampling",
            leave=False,
            disable=not self.accelerator.is_local_main_process,
        )
        for rows in bar:
            images, piece = self._rollout(epoch, rows, [contexts[row] for row in rows])
            before = time.perf_counter()
            batches.append(self._score(images, [contexts[row] for row in rows]))
            reward_seconds += time.perf_counter() - before
            trajectory.append(piece)
        rewards = self._gather_rewards(indices, torch.cat([batch[3] for batch in batches]))
        advantages = self._advantages(rewards, [context.key for context in contexts])
        sampled = time.perf_counter()
        own = torch.tensor([row for rows in indices for row in rows])
        self._train_on(epoch, Trajectory.cat(trajectory), advantages[own])
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

    def draw_contexts(self, epoch: int) -> list[Context]:
        """Ask the prompt function for the contexts of an epoch, the same ones in every process.

        Python's, numpy's and torch's global generators are seeded from (seed, epoch) first, so that prompt
        functions that draw from them need no state of their own.
        """
        set_seed(sample_seed(self.config.seed, epoch) % 2**32)
        size = self.config.sample_group_size
        drawn = [
            self._make_context(self.prompt_function())
            for _ in range(self.plan.total_samples // size)
        ]
        return [context for context in drawn for _ in range(size)]

    def _make_context(self, drawn: Any) -> Context:
        if not isinstance(drawn, tuple) or len(drawn) != 2 or not isinstance(drawn[0], str):
            raise TypeError(f"prompt_function must return (prompt, metadata), not {drawn!r:.200}")
        return Context(drawn[0], drawn[1])

    def _fast_forward_prompts(self) -> None:
        """Bring a prompt function that holds its own state to where the resumed run left it."""
        if not hasattr(self.prompt_function, "load_state_dict"):
            for epoch in range(self.epochs_done):
                self.draw_contexts(epoch)

    def _own_indices(self) -> list[list[int]]:
        """Return the numbers, in the whole epoch, of the samples in each of this process's batches."""
        size, processes = self.config.sample_batch_size, self.accelerator.num_processes
        firsts = range(
            self.accelerator.process_index * size, self.plan.total_samples, size * processes
        )
        return [list(range(first, first + size)) for first in firsts]

    def _generators(self, epoch: int, rows: Sequence[int], purpose: int) -> list[torch.Generator]:
        """Give every sample its own generator, so that batch size and processes change nothing."""
        seeds = [sample_seed(self.config.seed, epoch, purpose, row) for row in rows]
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def _initial_noise(
        self, epoch: int, rows: Sequence[int], shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Draw x_T or the forward noise (B, C, h, w); samples of a group share it."""
        groups = [row // self.config.sample_group_size for row in rows]
        noise = [
            torch.randn(shape, generator=g) for g in self._generators(epoch, groups, purpose=0)
        ]
        return torch.stack(noise).to(self.accelerator.device)

    def _rollout(
        self, epoch: int, rows: Sequence[int], contexts: Sequence[Context]
    ) -> tuple[torch.Tensor, Trajectory]:
        """Sample one batch: images (B, 3, H, W) and its trajectory."""
        unet = self.pipeline.unet.config
        shape = (unet.in_channels, unet.sample_size, unet.sample_size)
        with self.accelerator.autocast():
            return text2img_rollout(
                self.pipeline,
                [context.prompt for context in contexts],
                initial_noise=self._initial_noise(epoch, rows, shape),
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
        }

    # ---------------------------------------------------------------------------- rewards, advantages
    def _score(self, images: torch.Tensor, contexts: Sequence[Context]) -> list[Any]:
        """Call the reward function: [images, prompts, metadata, rewards (B,) float32, info]."""
        prompts = tuple(context.prompt for context in contexts)
        metadata = tuple(context.metadata for context in contexts)
        returned = self.reward_function(images, prompts, metadata)
        rewards, info = returned if isinstance(returned, tuple) else (returned, {})
        # float32: integer rewards would truncate the advantages to 0
        rewards = torch.as_tensor(rewards, dtype=torch.float32).detach().cpu()
        if rewards.shape != (len(images),):
            raise ValueError(
                f"reward_function returned shape {tuple(rewards.shape)} for {len(images)} images: "
                f"return one reward per image, ({len(images)},)"
            )
        for row in torch.nonzero(~rewards.isfinite()).flatten().tolist():
            raise ValueError(
                f"reward_function returned {rewards[row].item()} for sample {row} of the batch, prompt "
                f"{prompts[row]!r}: return finite numbers"
            )
        return [images, prompts, metadata, rewards, info]

    def _gather_rewards(self, indices: list[list[int]], own: torch.Tensor) -> torch.Tensor:
        """Return the rewards of the whole epoch (N,) in the order of its samples, on every process."""
        numbers = torch.tensor([row for rows in indices for row in rows])
        pair = torch.stack([numbers.float(), own]).T.to(
            self.accelerator.device
        )  # (N / processes, 2)
        gathered = self.accelerator.gather(pair).cpu()  # (N, 2)
        rewards = torch.empty(self.plan.total_samples)
        rewards[gathered[:, 0].long()] = gathered[:, 1]
        return rewards

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
        config = self.config
        num_samples, num_steps = trajectory.timesteps.shape
        order = {
            "sample": torch.arange(num_samples)[:, None].expand(-1, num_steps),  # (B, T)
            "step": torch.arange(num_steps).expand(num_samples, -1),  # (B, T)
        }
        samples_per_step = config.train_batch_size * config.train_gradient_accumulation_steps
        bar = tqdm(
            total=self.plan.optimizer_steps,
            desc="training",
            leave=False,
            disable=not self.accelerator.is_local_main_process,
        )
        for inner_epoch in range(config.train_num_inner_epochs):
            seed = sample_seed(config.seed, epoch, 2, inner_epoch, self.accelerator.process_index)
            generator = torch.Generator().manual_seed(seed)
            shuffled = shuffle_time(shuffle_samples(order, generator), ["step"], generator)
            kept = {key: rows[:, : self.num_train_timesteps] for key, rows in shuffled.items()}
            for number, pairs in enumerate(minibatches(kept, samples_per_step)):
                sample, step = pairs["sample"].flatten(), pairs["step"].flatten()  # (N,)
                record = self._optimizer_step(trajectory, advantages, sample, step)
                if inner_epoch == number == 0:  # no update yet: the policies must agree
                    record["first_replay_max_ratio_error"] = record["max_ratio_error"]
                self.global_step += 1
                position = {
                    "epoch": epoch + 1,
                    "inner_epoch": inner_epoch + 1,
                    "step": self.global_step,
                }
                self._log("step", {**position, **record})
                bar.update()
        bar.close()

    def _optimizer_step(
        self,
        trajectory: Trajectory,
        advantages: torch.Tensor,
        sample: torch.Tensor,
        step: torch.Tensor,
    ) -> dict[str, float]:
        """Accumulate the gradient over groups of pairs, weighed by their share, and step once."""
        size = self.config.train_forward_size or max(
            self.config.train_batch_size, PAIRS_NUMEL // trajectory.latents[0, 0].numel()
        )
        groups = list(zip(sample.split(size), step.split(size), strict=True))
        shares, stats = [], []
        for number, (rows, columns) in enumerate(groups):
            last = number == len(groups) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.unet):
                loss, group_stats = self._loss(trajectory, advantages, rows, columns)
                share = len(rows) / len(sample)
                self.accelerator.backward(loss * share)
            ratio_error = (group_stats.ratio - 1).abs().max()
            shares.append(share)
            stats.append(
                [
                    loss.detach(),
                    group_stats.approx_kl,
                    group_stats.kl_k3,
                    group_stats.clip_fraction,
                    ratio_error,
                ]
            )
        grad_norm = self.accelerator.clip_grad_norm_(
            self.trainable, self.config.train_max_grad_norm
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._summarise(stats, shares, grad_norm)

    def _loss(
        self,
        trajectory: Trajectory,
        advantages: torch.Tensor,
        rows: torch.Tensor,
        columns: torch.Tensor,
    ) -> tuple[torch.Tensor, Any]:
        """Replay the recorded actions of some pairs and return the clipped surrogate over them."""
        device = self.accelerator.device
        negative = trajectory.negative_prompt_embeds
        latents = trajectory.latents[rows, columns]  # (N, C, h, w)
        timesteps = trajectory.timesteps[rows, columns]  # (N,)
        with self.accelerator.autocast():
            output = predict(
                self.unet,
                latents,
                timesteps,
                trajectory.prompt_embeds[rows],
                None if negative is None else negative[rows],
                trajectory.guidance_scale,
            )
        replay = ddim_step_with_logprob(
            self.pipeline.scheduler,
            output,
            timesteps,
            latents,
            eta=self.config.sample_eta,
            prev_sample=trajectory.latents[rows, columns + 1],
            reduction=self.config.log_prob_reduction,
        )
        return clipped_surrogate(
            replay.log_prob,
            trajectory.log_probs[rows, columns],
            advantages[rows].to(device),
            self.config.train_clip_range,
            self.config.train_adv_clip_max,
        )

    def _summarise(
        self, stats: list[list[torch.Tensor]], shares: list[float], grad_norm: torch.Tensor
    ) -> dict[str, float]:
        """Join the statistics of groups and processes into the record of one optimizer step."""
        table = torch.stack([torch.stack(row) for row in stats]).float()  # (groups, 5)
        weights = torch.tensor(shares, device=table.device)[:, None]
        means = (table[:, :4] * weights).sum(0)  # (4,)
        row = torch.cat([means, table[:, 4:].amax(0)])[None]  # (1, 5)
        gathered = self.accelerator.gather(row)  # (processes, 5)
        loss, approx_kl, kl_k3, clip_fraction = gathered[:, :4].mean(0).tolist()
        return {
            "loss": loss,
            "approx_kl": approx_kl,
            "kl_k3": kl_k3,
            "clip_fraction": clip_fraction,
            "max_ratio_error": gathered[:, 4].max().item(),
            "grad_norm": float(grad_norm),
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    # ----------------------------------------------------------------------------------- what is kept
    def _log(self, kind: str, values: dict[str, float]) -> None:
        if self.log is not None:
            self.log.record(kind, values)
        if self.config.log_with:
            self.accelerator.log(
                {f"{kind}/{k}": v for k, v in values.items()}, step=self.global_step
            )

    def _report(self, epoch: int, metrics: dict[str, float], batches: list[list[Any]]) -> None:
        self._log("epoch", metrics)
        frequency = self.config.image_grid_freq
        if self.log is not None and frequency and epoch % frequency == 0:
            self.log.images(self.epochs_done, torch.cat([batch[0] for batch in batches]))
        if self.image_samples_hook is not None and self.accelerator.is_main_process:
            tracker = self.accelerator.trackers[0] if self.accelerator.trackers else None
            self.image_samples_hook(batches, int(metrics["samples_seen"]), tracker)

    def save(self) -> Path:
        """Write a checkpoint; every process must call it. Return its folder."""
        self.accelerator.wait_for_everyone()
        folder = self.config.run_dir / checkpoint.name_of(self.epochs_done)
        if self.accelerator.is_main_process:
            tensors = {
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
            "num_processes": self.accelerator.num_processes,
            "config": self.config.to_dict(),
            "model": self.base_fingerprint,
            "trainer": type(self).__name__,
            "stat_tracker": None if self.tracker is None else self.tracker.state_dict(),
            "prompt_function": None if prompts is None else prompts(),
            "grad_scaler": None if scaler is None else scaler.state_dict(),
        }

    def _load(self, folder: Path) -> None:
        """Continue from a checkpoint after checking that it is whole and of this model and config."""
        tensors, state = checkpoint.read(folder)
        self._check_state(folder, state)
        policy = tensors["policy"]
        if set(policy) != set(self.trainable_names):
            raise ValueError(
                f"checkpoint {folder} trains other weights than this trainer: use the same adapter"
            )
        with torch.no_grad():
            for name, parameter in zip(self.trainable_names, self.trainable, strict=True):
                parameter.copy_(policy[name])
        checkpoint.load_optimizer_tensors(
            self.optimizer, self.trainable_names, tensors["optimizer"]
        )
        if self.tracker is not None:
            self.tracker.load_state_dict(state["stat_tracker"])
        if (
            hasattr(self.prompt_function, "load_state_dict")
            and state["prompt_function"] is not None
        ):
            self.prompt_function.load_state_dict(state["prompt_function"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["grad_scaler"])
        self.epochs_done, self.global_step = state["epochs_done"], state["global_step"]

    def _check_state(self, folder: Path, state: dict[str, Any]) -> None:
        if state["model"] != self.base_fingerprint:
            raise ValueError(
                f"checkpoint {folder} belongs to another model: load the pipeline it was made with"
            )
        if state["trainer"] != type(self).__name__:
            raise ValueError(
                f"checkpoint {folder} was written by {state['trainer']}, not {type(self).__name__}"
            )
        mine, theirs = self.config.to_dict(), state["config"]
        changed = sorted(k for k in mine.keys() - FREE_FIELDS if mine[k] != theirs.get(k))
        if changed:
            detail = ", ".join(f"{k}={theirs.get(k)!r} (now {mine[k]!r})" for k in changed)
            raise ValueError(f"checkpoint {folder} was made with another config: set {detail} back")

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path,
        reward_function: RewardFunction,
        prompt_function: Callable[[], tuple[Any, ...]],
        sd_pipeline: Any,
        **arguments: Any,
    ) -> DDPOTrainer:
        """Make a trainer that continues a checkpoint with the config that it was written with.

        Args:
            folder: the checkpoint's folder, `<run>/checkpoint-NNNNNN`; the run goes on in `<run>`.
            reward_function: as in the constructor.
            prompt_function: as in the constructor.
            sd_pipeline: the pipeline that the run started from.
            **arguments: further arguments of the constructor.

        Returns:
            The trainer.

        Raises:
            ValueError: if the checkpoint is damaged or belongs to another model.
        """
        _, state = checkpoint.read(Path(folder))
        config = DDPOConfig.from_dict(state["config"])
        config.resume_from, config.output_dir = str(folder), str(Path(folder).parent)
        return cls(config, reward_function, prompt_function, sd_pipeline, **arguments)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the trained weights for plain diffusers.

        LoRA weights load with `pipeline.load_lora_weights(folder)`; a fully trained UNet is written with its
        whole pipeline, for `StableDiffusionPipeline.from_pretrained(folder)`.

        Args:
            folder: where to write to.
        """
        if not self.accelerator.is_main_process:
            return
        if not self.uses_lora:
            self.pipeline.save_pretrained(folder)
            return
        unet = self.pipeline.unet
        StableDiffusionPipeline.save_lora_weights(
            folder,
            unet_lora_layers=convert_state_dict_to_diffusers(get_peft_model_state_dict(unet)),
            **_collate_lora_metadata({"unet": unet}),
        )


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
        debug_hook: called after every epoch with this trainer, for validation images and the like.

    Raises:
        ValueError: as in `DDPOTrainer`, or if noise_strength leaves no step.
    """

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction,
        prompt_function: Callable[[], tuple[Any, ...]],
        sd_pipeline: Any,
        image_samples_hook: Callable[[list[list[Any]], int, Any], None] | None = None,
        noise_strength: float = 0.2,
        debug_hook: Callable[[ImageDDPOTrainer], None] | None = None,
    ) -> None:
        """Check everything, build the policy and, when asked, resume."""
        self.noise_strength = noise_strength
        self.debug_hook = debug_hook
        super().__init__(config, reward_function, prompt_function, sd_pipeline, image_samples_hook)

    def _schedule(self) -> torch.Tensor:
        return make_schedule(
            self.pipeline.scheduler, self.config.sample_num_steps, self.noise_strength
        )

    def _make_context(self, drawn: Any) -> Context:
        if not isinstance(drawn, tuple) or len(drawn) != 3 or not isinstance(drawn[0], str):
            raise TypeError(
                f"prompt_function must return (prompt, image, metadata), not {drawn!r:.200}"
            )
        prompt, image, metadata = drawn
        image = to_tensor(image)
        check_images(image[None], self.pipeline.vae)
        return Context(prompt, metadata, image)

    def draw_contexts(self, epoch: int) -> list[Context]:
        """Ask for the contexts of an epoch and refuse images of different sizes."""
        contexts = super().draw_contexts(epoch)
        sizes = {tuple(c.image.shape) for c in contexts if c.image is not None}
        if len(sizes) > 1:
            raise ValueError(
                f"images of one epoch have the sizes {sorted(sizes)}: resize them to one"
            )
        return contexts

    def _rollout(
        self, epoch: int, rows: Sequence[int], contexts: Sequence[Context]
    ) -> tuple[torch.Tensor, Trajectory]:
        images = torch.stack([context.image for context in contexts if context.image is not None])
        factor = 2 ** (len(self.pipeline.vae.config.block_out_channels) - 1)
        shape = (
            self.pipeline.unet.config.in_channels,
            images.shape[2] // factor,
            images.shape[3] // factor,
        )
        with self.accelerator.autocast():
            return img2img_rollout(
                self.pipeline,
                [context.prompt for context in contexts],
                images,
                self.noise_strength,
                initial_noise=self._initial_noise(epoch, rows, shape),
                **self._sampling_settings(epoch, rows),
            )

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), "noise_strength": self.noise_strength}

    def _check_state(self, folder: Path, state: dict[str, Any]) -> None:
        super()._check_state(folder, state)
        if state["noise_strength"] != self.noise_strength:
            raise ValueError(
                f"checkpoint {folder} was made with noise_strength={state['noise_strength']}: set it"
            )

    def step(self, epoch: int) -> dict[str, float]:
        """Do one epoch, then call `debug_hook`."""
        metrics = super().step(epoch)
        if self.debug_hook is not None and self.accelerator.is_main_process:
            self.debug_hook(self)
        return metrics


# -------------------------------------------------------------------------------------------- helpers
def _check_callable(name: str, function: Any) -> None:
    if not callable(function):
        raise TypeError(f"{name} must be callable, not {type(function).__name__}")


def _check_pipeline(pipeline: Any) -> Any:
    """Return the pipeline with a DDIMScheduler; refuse what is no Stable-Diffusion-shaped pipeline."""
    for part in ("unet", "vae", "text_encoder", "tokenizer", "scheduler"):
        if not hasattr(pipeline, part):
            raise TypeError(
                f"sd_pipeline has no {part}: pass a diffusers pipeline such as "
                "StableDiffusionPipeline.from_pretrained(...)"
            )
    if not isinstance(pipeline.scheduler, DDIMScheduler):
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    return pipeline


def to_tensor(image: Any) -> torch.Tensor:
    """Turn a PIL image or a float array into a tensor (3, H, W) float32 in [0, 1]."""
    if hasattr(image, "convert"):
        import numpy as np

        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255
    return torch.as_tensor(image)


class _InterruptAfterEpoch:
    """Turns the first Ctrl-C into a request that the epoch's end honours; the second raises as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None

    def _handle(self, signum: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        tqdm.write("Ctrl-C: finishing this epoch, then saving; press again to stop at once")

    def __enter__(self) -> _InterruptAfterEpoch:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
