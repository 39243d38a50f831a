"""Runs in the peers' environment: each function runs the peers once and returns what happened.

Functions are named after the entries of tests/golden/peers.json: the peers' defects (docs/peers.md), or the
functions of ours that reproduce their numbers. The numbers come from the peers' own code; this file
chooses only the inputs, and it imports nothing of ``ddpo_lessons``. Started by ``record``.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import math
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.peers.inputs import (
    DDIMCase,
    fifty_steps,
    make_tiny_folder,
    moved_output,
    seeded_normal,
    steps_of_size,
    tiny_noise_pred,
)

Row = dict[str, Any]
CLIP_RANGE = 1e-4  # the peers' default

# ------------------------------------------------------------------ single functions of the peers


def ddim_steps(folder: Path) -> list[Row]:
    """TRL's scheduler_step where it is right: every prediction type, two etas, clipped or not."""
    cases = [
        DDIMCase(seed=seed, eta=eta, scheduler={"prediction_type": prediction_type})
        for seed, prediction_type in enumerate(("epsilon", "sample", "v_prediction"))
        for eta in (1.0, 0.5)
    ]
    cases.append(DDIMCase(seed=3, scheduler={"clip_sample": True, "clip_sample_range": 1.0}))
    cases.append(DDIMCase(seed=4, scheduler={"thresholding": True, "sample_max_value": 1.5}))
    return [_trl_step(case) for case in cases]


def last_step_ignores_final_alpha(folder: Path) -> list[Row]:
    """The last step for both ends of the schedule: TRL's outcome and the scheduler's own."""
    rows = []
    for set_alpha_to_one in (False, True):
        case = DDIMCase(seed=9, timesteps=(1,), scheduler={"set_alpha_to_one": set_alpha_to_one})
        model_output, timesteps, sample, noise = case.tensors()
        own = case.make_scheduler().step(
            model_output, timesteps[0], sample, eta=case.eta, variance_noise=noise
        )
        rows.append(_trl_step(case) | {"scheduler_prev_sample": _numbers(own.prev_sample)})
    return rows


def _trl_step(case: DDIMCase) -> Row:
    step = _draw(case)
    return {
        "case": dataclasses.asdict(case),
        "prev_sample": _numbers(step.latents),
        "log_prob": _numbers(step.log_probs),
    }


def _draw(case: DDIMCase, dtype: torch.dtype = torch.float32) -> Any:
    """Let TRL draw the outcome of a case, with the case's noise in the place of its own."""
    from trl.models import modeling_sd_base

    model_output, timesteps, sample, noise = case.tensors()
    drawn, modeling_sd_base.randn_tensor = modeling_sd_base.randn_tensor, lambda *_, **__: noise
    try:
        return modeling_sd_base.scheduler_step(
            case.make_scheduler(), model_output.to(dtype), timesteps, sample.to(dtype), eta=case.eta
        )
    finally:
        modeling_sd_base.randn_tensor = drawn


def _replay(case: DDIMCase, model_output: torch.Tensor, prev_sample: torch.Tensor) -> torch.Tensor:
    """TRL's log-probs of a given outcome."""
    from trl.models.modeling_sd_base import scheduler_step

    _, timesteps, sample, _ = case.tensors()
    sample = sample.to(model_output.dtype)
    scheduler = case.make_scheduler()
    return scheduler_step(
        scheduler, model_output, timesteps, sample, eta=case.eta, prev_sample=prev_sample
    ).log_probs


def _replay_without_noise() -> Row:
    """imageddpo replays a batch that holds the deterministic last step among noisy ones."""
    from imageddpo.pipeline import scheduler_step

    case = DDIMCase(seed=10, scheduler={"set_alpha_to_one": True})
    model_output, timesteps, sample, noise = case.tensors()
    step = scheduler_step(case.make_scheduler(), model_output, timesteps, sample, eta=1.0, prev_sample=noise)
    log_prob = [None if math.isnan(value) else value for value in _numbers(step.log_probs)]
    return {"case": dataclasses.asdict(case), "log_prob": log_prob}


def surrogate(folder: Path) -> list[Row]:
    """TRL's calculate_loss on given log-probs, with the UNet and the scheduler left out."""
    rows = []
    for seed, (spread, clip_range) in enumerate(((1e-4, 1e-4), (0.05, 0.1), (0.5, 0.2))):
        old = seeded_normal((16,), 100 + seed)
        new = old + spread * seeded_normal((16,), 200 + seed)
        advantages = 3 * seeded_normal((16,), 300 + seed)  # some beyond the clamp at 5
        loss, approx_kl, clip_fraction = _trl_loss(old, new, advantages, clip_range)
        row = {"log_prob": new, "old_log_prob": old, "advantages": advantages, "loss": loss}
        row |= {"approx_kl": approx_kl, "clip_fraction": clip_fraction}
        rows.append({key: _numbers(value) for key, value in row.items()})
        rows[-1]["clip_range"] = clip_range
    return rows


def _trl_loss(
    old: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, clip_range: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from trl import DDPOConfig, DDPOTrainer

    stand_in = SimpleNamespace(
        autocast=nullcontext,
        config=DDPOConfig(train_cfg=False, train_clip_range=clip_range),
        sd_pipeline=SimpleNamespace(
            unet=lambda *_: SimpleNamespace(sample=None),
            scheduler_step=lambda *_, **__: SimpleNamespace(log_probs=new),
        ),
    )
    stand_in.loss = lambda *args: DDPOTrainer.loss(stand_in, *args)
    return DDPOTrainer.calculate_loss(stand_in, None, None, None, old, advantages, None)


def tracker(folder: Path) -> Row:
    """TRL's PerPromptStatTracker over updates of uneven size, through the min_count threshold."""
    from trl.trainer.utils import PerPromptStatTracker

    stats = PerPromptStatTracker(buffer_size=6, min_count=4)
    updates = []
    for seed, keys in enumerate(("aabbc", "aabcc", "abbbb", "ccaab")):
        rewards = seeded_normal((len(keys),), 400 + seed).numpy()
        advantages = stats.update(list(keys), rewards)
        updates.append({"keys": keys, "rewards": _numbers(rewards), "advantages": _numbers(advantages)})
    return {"buffer_size": 6, "min_count": 4, "updates": updates}


def _integers_in_tracker() -> Row:
    from trl.trainer.utils import PerPromptStatTracker

    rewards = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    advantages = PerPromptStatTracker(buffer_size=16, min_count=16).update(["a"] * 8, rewards)
    return {"rewards": rewards.tolist(), "advantages": advantages.tolist()}


def _bf16_replay() -> Row:
    """TRL scores bf16 latents: 50 steps drawn, then replayed on the latents that were stored."""
    case = fifty_steps()
    drawn = _draw(case, torch.bfloat16)
    log_prob = _replay(case, case.tensors()[0].bfloat16(), drawn.latents)
    error = (torch.exp(log_prob - drawn.log_probs) - 1).abs()
    return {
        "latents_dtype": str(drawn.latents.dtype),
        "ratio_errors": _numbers(error),
        "steps_outside_clip_range": int((error > CLIP_RANGE).sum()),
    }


def clip_range_depends_on_latent_size(folder: Path) -> list[Row]:
    """The same change per dimension for three latent sizes: TRL's KL and clip fraction shrink."""
    rows = []
    for size in (4, 16, 64):
        case = steps_of_size(size)
        drawn = _draw(case)
        new = _replay(case, moved_output(case), drawn.latents)
        _, approx_kl, clip_fraction = _trl_loss(drawn.log_probs, new, torch.ones(len(new)), CLIP_RANGE)
        row = {"log_ratio": new - drawn.log_probs, "approx_kl": approx_kl}
        row |= {"clip_fraction": clip_fraction}
        rows.append({"latent_size": size} | {key: _numbers(value) for key, value in row.items()})
    return rows


def stale_mean_biases_advantages(folder: Path) -> Row:
    """TRL's tracker with its default sizes and rewards that improve by 0.5 an epoch (sigma 0.2)."""
    from trl.trainer.utils import PerPromptStatTracker

    improving = PerPromptStatTracker(buffer_size=16, min_count=16)
    updates = []
    for epoch in range(12):
        rewards = 0.5 * epoch + 0.2 * seeded_normal((4,), 500 + epoch).numpy()
        advantages = improving.update(["a"] * 4, rewards)
        updates.append({"rewards": _numbers(rewards), "advantages": _numbers(advantages)})
    return {"buffer_size": 16, "min_count": 16, "updates": updates, "small": _small_buffer()}


def _small_buffer() -> Row:
    """A buffer that can never hold min_count rewards: two prompts, far apart, share one mean."""
    from trl.trainer.utils import PerPromptStatTracker

    stats = PerPromptStatTracker(buffer_size=8, min_count=16)
    for seed in range(6):
        rewards = seeded_normal((8,), 600 + seed).numpy() + np.repeat([0, 10], 4)
        advantages = stats.update(list("aaaabbbb"), rewards)
    return {
        "buffer_size": 8,
        "min_count": 16,
        "updates": 6,
        "mean_advantage_by_prompt": [float(advantages[:4].mean()), float(advantages[4:].mean())],
    }


# ------------------------------------------------------------------------ whole runs of the peers

ONE_MINIBATCH: Row = {
    "sample_batch_size": 4,
    "sample_num_batches_per_epoch": 1,
    "train_batch_size": 4,
    "train_gradient_accumulation_steps": 1,
}


class Recorder:
    """Mixed into a peer's trainer: watches what passes through, changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sampled_steps: int | None = None
        self.losses: list[Row] = []
        super().__init__(*args, **kwargs)

    def _generate_samples(self, *args: Any, **kwargs: Any) -> Any:
        samples, pairs = super()._generate_samples(*args, **kwargs)  # type: ignore[misc]
        self.sampled_steps = samples[0]["log_probs"].shape[1]
        return samples, pairs

    def loss(self, advantages: torch.Tensor, clip_range: float, ratio: torch.Tensor) -> torch.Tensor:
        loss = super().loss(advantages, clip_range, ratio)  # type: ignore[misc]
        self.losses.append(
            {"advantages": advantages.detach(), "ratio": ratio.detach(), "loss": loss.detach()}
        )
        return loss


def make_trainer(
    peer: str,
    folder: Path,
    *,
    use_lora: bool = False,
    noise_strength: float | None = None,
    reward: Callable[[torch.Tensor], Any] = lambda images: images.float().mean((1, 2, 3)),
    image_samples_hook: Callable[..., None] | None = None,
    **config: Any,
) -> Any:
    """Build a peer's trainer on the tiny folder; one optimizer step per epoch, at its end."""
    from trl import DDPOConfig, DDPOTrainer

    settings: Row = {
        "mixed_precision": "no",
        "allow_tf32": False,
        "sample_num_steps": 4,
        "sample_batch_size": 2,
        "sample_num_batches_per_epoch": 2,
        "train_batch_size": 2,
        "train_gradient_accumulation_steps": 2,
    }
    extra: Row = {}
    image: tuple[torch.Tensor, ...] = ()
    if peer == "trl":
        from trl import DefaultDDPOStableDiffusionPipeline as Pipeline

        base = DDPOTrainer
    else:
        from imageddpo import I2IDDPOStableDiffusionPipeline as Pipeline
        from imageddpo import ImageDDPOTrainer

        base, image = ImageDDPOTrainer, (seeded_normal((3, 16, 16), 800).sigmoid(),)
        if noise_strength is not None:
            extra["noise_strength"] = noise_strength
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return type("RecordedTrainer", (Recorder, base), {})(
            DDPOConfig(**(settings | config)),
            lambda images, prompts, metadata: (reward(images), {}),
            lambda: ("a red cat", *image, {}),
            Pipeline(str(folder), use_lora=use_lora),
            image_samples_hook,
            **extra,
        )


def run(peer: str, folder: Path, *, epochs: int = 1, **settings: Any) -> Row:
    """Train and report: error, steps, and how far the ratios are from 1 before any update."""
    trainer = make_trainer(peer, folder, **settings)
    error = _error_of(lambda: trainer.train(epochs))
    config = trainer.config
    minibatches = config.sample_batch_size // config.train_batch_size
    minibatches *= config.sample_num_batches_per_epoch
    report: Row = {"error": error, "sampled_steps": trainer.sampled_steps}
    if not error:
        ratios = torch.stack([entry["ratio"] for entry in trainer.losses])
        losses = torch.stack([entry["loss"] for entry in trainer.losses])
        outside = (ratios - 1).abs() > config.train_clip_range
        weights = [parameter.detach() for parameter in trainer.sd_pipeline.unet.parameters()]
        report |= {
            "trained_steps": len(trainer.losses) // minibatches // config.train_num_inner_epochs,
            "clip_fraction_before_update": _numbers(outside.float().mean()),
            "ratios_nan": bool(ratios.isnan().any()),
            "losses_nan": int(losses.isnan().sum()),
            "weights_finite": all(bool(weight.isfinite().all()) for weight in weights),
        }
        if not ratios.isnan().any():
            report["max_ratio_error_before_update"] = _numbers((ratios - 1).abs().max())
    return report


def _error_of(action: Callable[[], Any]) -> Row | None:
    """Type, message and the raising function of the error that an action ends with, if any."""
    try:
        action()
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_next:
            trace = trace.tb_next
        raised_in = trace.tb_frame.f_code.co_name if trace else ""
        message = re.sub(r"/\S*/", "", str(error).strip().splitlines()[0])
        return {"type": type(error).__name__, "message": message, "raised_in": raised_in}
    return None


def resumed_lora_is_an_empty_adapter(folder: Path) -> Row:
    """TRL: train LoRA, save, resume; which adapter holds the weights, which the optimizer."""
    trained, project = _trained_and_saved(folder, use_lora=True, epochs=2)
    checkpoint = str(project / "checkpoints" / "checkpoint_0")
    resumed = make_trainer("trl", folder, use_lora=True, resume_from=checkpoint)
    unet = resumed.sd_pipeline.unet
    held = {id(weight) for group in resumed.optimizer.param_groups for weight in group["params"]}
    adapters = {}
    for adapter in unet.peft_config:
        weights = {k: v for k, v in unet.named_parameters() if f"lora_B.{adapter}." in k}
        adapters[adapter] = {
            "max_abs_lora_b": _numbers(max(weight.abs().max() for weight in weights.values())),
            "held_by_optimizer": all(id(weight) in held for weight in weights.values()),
        }
    lora_b = [v for k, v in trained.sd_pipeline.unet.named_parameters() if "lora_B" in k]
    saved = max(weight.abs().max() for weight in lora_b)
    active = unet.active_adapters()
    return {"saved_max_abs_lora_b": _numbers(saved), "resumed": adapters, "active": active}


def checkpoint_numbers_count_saves(folder: Path) -> Row:
    """TRL: seven epochs, saved every second; what the folders are called, and what is resumed."""
    _, project = _trained_and_saved(folder, epochs=7, save_freq=2)
    names = sorted(path.name for path in (project / "checkpoints").iterdir())
    _, odd = _trained_and_saved(folder, epochs=6, save_freq=2)
    resumed = make_trainer("trl", folder, resume_from=str(project / "checkpoints"))
    return {
        "epochs": 7,
        "save_freq": 2,
        "checkpoints": names,
        "checkpoints_after_6_epochs": sorted(path.name for path in (odd / "checkpoints").iterdir()),
        "first_epoch_after_resume": resumed.first_epoch,
    }


def _trained_and_saved(folder: Path, epochs: int, **settings: Any) -> tuple[Any, Path]:
    project = Path(tempfile.mkdtemp(dir=folder.parent))
    trainer = make_trainer("trl", folder, project_kwargs=_project(project), **settings)
    trainer.train(epochs)
    return trainer, project


def _project(folder: Path) -> Row:
    """The project_kwargs without which TRL cannot save."""
    return {"project_dir": str(folder), "automatic_checkpoint_naming": True}


def asynchronous_rewards_fail(folder: Path) -> Row:
    return run("trl", folder, async_reward_computation=True)


def no_guidance_is_a_shape_error(folder: Path) -> Row:
    return {str(scale): run("trl", folder, sample_guidance_scale=scale) for scale in (0.0, 1.0)}


def no_guidance_trains_another_prompt(folder: Path) -> Row:
    """imageddpo without guidance, trained with and without the pair of embeddings."""
    return {
        f"train_cfg={train_cfg}": run(
            "imageddpo",
            folder,
            noise_strength=1.0,
            sample_guidance_scale=1.0,
            train_cfg=train_cfg,
        )
        for train_cfg in (True, False)
    }


def guidance_is_left_out_of_training(folder: Path) -> Row:
    """TRL with guidance 5: trained with it (the control), then without."""
    return {f"train_cfg={cfg}": run("trl", folder, train_cfg=cfg) for cfg in (True, False)}


def last_step_without_noise_is_nan(folder: Path) -> Row:
    """imageddpo on a schedule that ends in a deterministic step.

    With seed 0 a whole minibatch falls on that step, and its loss has no gradient: an error.
    """
    ends_clean = make_tiny_folder(folder.with_name("set_alpha_to_one"), set_alpha_to_one=True)
    run_report = run("imageddpo", ends_clean, noise_strength=1.0, seed=1, **ONE_MINIBATCH)
    return {"step": _replay_without_noise(), "run": run_report}


def default_noise_strength_fails(folder: Path) -> Row:
    """imageddpo's default noise_strength of 0.2 with the default train_timestep_fraction of 1."""
    return run("imageddpo", folder, sample_num_steps=10)


def fewer_steps_trained_than_sampled(folder: Path) -> Row:
    return run(
        "imageddpo",
        folder,
        noise_strength=0.8,
        sample_num_steps=10,
        train_timestep_fraction=0.8,
    )


def eta_zero_is_trained(folder: Path) -> Row:
    return {
        "trl": run("trl", folder, sample_eta=0.0),
        "imageddpo": run("imageddpo", folder, noise_strength=1.0, sample_eta=0.0),
    }


def integer_rewards_cut_advantages(folder: Path) -> Row:
    """TRL with per-prompt statistics and integer rewards: the advantages that it trains on."""
    rewards = torch.tensor([3, 1, 4, 1])
    advantages = _advantages_in_training(folder, rewards, per_prompt_stat_tracking=True)
    run_report = {"rewards": rewards.tolist(), "sorted_advantages": advantages.tolist()}
    return {"tracker": _integers_in_tracker(), "run": run_report}


def global_advantages(folder: Path) -> Row:
    """Without per-prompt statistics: rewards in, advantages out of TRL's own training step."""
    rewards = seeded_normal((4,), seed=700)
    advantages = _advantages_in_training(folder, rewards)
    return {"rewards": _numbers(rewards), "sorted_advantages": _numbers(advantages)}


def _advantages_in_training(folder: Path, rewards: torch.Tensor, **settings: Any) -> torch.Tensor:
    trainer = make_trainer("trl", folder, reward=lambda _: rewards, **ONE_MINIBATCH, **settings)
    trainer.train(1)
    return trainer.losses[0]["advantages"].sort().values  # the trainer had shuffled them


def defaults_cannot_save(folder: Path) -> Row:
    """TRL's defaults: saving in training, save_pretrained, and an image hook without a tracker."""
    trainer = make_trainer("trl", folder)
    return {
        "save_state": run("trl", folder, epochs=2)["error"],
        "save_pretrained": _error_of(lambda: trainer.save_pretrained(folder.with_name("save_pretrained"))),
        "image_samples_hook": run("trl", folder, image_samples_hook=lambda *_: None)["error"],
    }


def readme_shows_no_constructor(folder: Path) -> Row:
    """The constructor that imageddpo's README shows."""
    from imageddpo import ImageDDPOTrainer

    shown = ("config", "model", "ref_model", "accelerator", "prompt_fn", "reward_fn")
    return {"error": _error_of(lambda: ImageDDPOTrainer(**dict.fromkeys(shown)))}


def bf16_latents_leave_the_clip_range(folder: Path) -> Row:
    """TRL in bf16: one run with LoRA and guidance 5, and the same on latents of full size."""
    settings: Row = {"use_lora": True, "mixed_precision": "bf16", "sample_num_steps": 50}
    return {"step": _bf16_replay(), "run": run("trl", folder, **settings)}


def batching(folder: Path) -> list[Row]:
    """How many forward passes and optimizer steps an epoch of TRL takes."""
    plans = [(2, 2, 2, 1, 1), (4, 2, 2, 2, 1), (4, 1, 1, 4, 3), (6, 2, 3, 2, 2)]
    names = (
        "sample_batch_size",
        "sample_num_batches_per_epoch",
        "train_batch_size",
        "train_gradient_accumulation_steps",
        "train_num_inner_epochs",
    )
    rows = []
    for plan in plans:
        settings: Row = dict(zip(names, plan, strict=True))
        trainer = make_trainer("trl", folder, **settings)
        optimizer_steps = trainer.step(epoch=0, global_step=0)
        rows.append(
            settings
            | {
                "num_timesteps": trainer.num_train_timesteps,
                "optimizer_steps": optimizer_steps,
                "forward_passes": len(trainer.losses) * settings["train_batch_size"],
            }
        )
    return rows


# ---------------------------------------------------------------------------------- two processes


def gradients_never_synchronise(folder: Path) -> Row:
    """Two processes: largest difference between their weights before and after one epoch."""
    return {
        f"{peer} {'LoRA' if use_lora else 'full'}": _drift(peer, folder, use_lora)
        for peer in ("trl", "imageddpo")
        for use_lora in (False, True)
    }


def _drift(peer: str, folder: Path, use_lora: bool) -> Row:
    strength: Row = {"noise_strength": 1.0} if peer == "imageddpo" else {}
    trainer = make_trainer(peer, folder, use_lora=use_lora, **strength)

    def gap() -> Any:
        trainable = [p for p in trainer.sd_pipeline.unet.parameters() if p.requires_grad]
        weights = torch.cat([parameter.detach().flatten() for parameter in trainable])
        first, second = trainer.accelerator.gather(weights[None])
        return _numbers((first - second).abs().max())

    before = gap()
    trainer.train(1)
    return {"processes": trainer.accelerator.num_processes, "before": before, "after": gap()}


def saving_in_two_processes_deadlocks(folder: Path) -> Row:
    """TRL through its first save; the last of the stacks shows where a process hangs."""
    with (folder.parent / "stack.txt").open("w") as stack:
        faulthandler.dump_traceback_later(10, repeat=True, file=stack)
        _trained_and_saved(folder, epochs=3)
        faulthandler.cancel_dump_traceback_later()
    return {"error": None}


# --------------------------------------------------------------------------- what is written


def _numbers(values: np.ndarray | torch.Tensor) -> Any:
    """Plain floats, with the nine digits that identify a float32."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    text = json.dumps(values.tolist())
    return json.loads(text, parse_float=lambda number: float(f"{float(number):.9g}"))


def tiny_model(folder: Path) -> Row:
    """The tiny folder's text encoder and UNet: proof that two environments hold one model."""
    from diffusers import StableDiffusionPipeline

    return {"noise_pred": _numbers(tiny_noise_pred(StableDiffusionPipeline.from_pretrained(folder)))}


GROUPS: dict[str, tuple[Callable[[Path], Any], ...]] = {
    "one_process": (
        tiny_model, ddim_steps, surrogate, global_advantages, tracker, batching,
        resumed_lora_is_an_empty_adapter, checkpoint_numbers_count_saves, asynchronous_rewards_fail,
        no_guidance_is_a_shape_error, no_guidance_trains_another_prompt,
        guidance_is_left_out_of_training, last_step_ignores_final_alpha, last_step_without_noise_is_nan,
        default_noise_strength_fails, fewer_steps_trained_than_sampled, eta_zero_is_trained,
        integer_rewards_cut_advantages, defaults_cannot_save, readme_shows_no_constructor,
        clip_range_depends_on_latent_size, stale_mean_biases_advantages,
    ),
    "bf16": (bf16_latents_leave_the_clip_range,),  # one precision per process
    "drift": (gradients_never_synchronise,),
    "save": (saving_in_two_processes_deadlocks,),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--scratch", type=Path, required=True, help="empty folder to work in")
    arguments = parser.parse_args()
    folder = make_tiny_folder(arguments.scratch / "tiny")
    rows = {function.__name__: function(folder) for function in GROUPS[arguments.group]}
    (arguments.scratch / "rows.json").write_text(json.dumps(rows, allow_nan=False))


if __name__ == "__main__":
    main()
