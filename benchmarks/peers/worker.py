"""Runs in the peers' environment: each entry runs the peers once and returns what happened.

Entries are named as in tests/golden/peers.json: the peers' defects (docs/peers.md), or the functions of ours
that reproduce their numbers. The numbers come from the peers' own code; this file chooses only the inputs,
and it imports nothing of ``ddpo_lessons``. Started by ``record``.
"""

import dataclasses
import faulthandler
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.peers import inputs
from benchmarks.peers.inputs import DDIMCase, seeded_normal

Row = dict[str, Any]
TRL, IMAGE = "trl", "imageddpo"
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
        output, timesteps, sample, noise = case.tensors()
        own = case.make_scheduler().step(output, timesteps[0], sample, eta=case.eta, variance_noise=noise)
        rows.append(_trl_step(case) | {"scheduler_prev_sample": own.prev_sample})
    return rows


def _trl_step(case: DDIMCase) -> Row:
    step = _draw(case)
    return {"case": dataclasses.asdict(case), "prev_sample": step.latents, "log_prob": step.log_probs}


def _draw(case: DDIMCase, dtype: torch.dtype = torch.float32) -> Any:
    """Let TRL draw the outcome of a case, with the case's noise in the place of its own."""
    from trl.models import modeling_sd_base

    output, timesteps, sample, noise = case.tensors()
    drawn, modeling_sd_base.randn_tensor = modeling_sd_base.randn_tensor, lambda *_, **__: noise
    try:
        return modeling_sd_base.scheduler_step(
            case.make_scheduler(), output.to(dtype), timesteps, sample.to(dtype), eta=case.eta
        )
    finally:
        modeling_sd_base.randn_tensor = drawn


def _replay(case: DDIMCase, output: torch.Tensor, prev_sample: torch.Tensor) -> torch.Tensor:
    """TRL's log-probs of a given outcome."""
    from trl.models.modeling_sd_base import scheduler_step

    _, timesteps, sample, _ = case.tensors()
    arguments = (case.make_scheduler(), output, timesteps, sample.to(output.dtype))
    return scheduler_step(*arguments, eta=case.eta, prev_sample=prev_sample).log_probs


def surrogate(folder: Path) -> list[Row]:
    """TRL's calculate_loss on given log-probs, with the UNet and the scheduler left out."""
    rows = []
    for seed, (spread, clip_range) in enumerate(((1e-4, 1e-4), (0.05, 0.1), (0.5, 0.2))):
        old = seeded_normal((16,), 100 + seed)
        new = old + spread * seeded_normal((16,), 200 + seed)
        advantages = 3 * seeded_normal((16,), 300 + seed)  # some beyond the clamp at 5
        given = {"log_prob": new, "old_log_prob": old, "advantages": advantages, "clip_range": clip_range}
        rows.append({**given, **_trl_loss(old, new, advantages, clip_range)})
    return rows


def _trl_loss(old: torch.Tensor, new: torch.Tensor, advantages: torch.Tensor, clip_range: float) -> Row:
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
    found = DDPOTrainer.calculate_loss(stand_in, None, None, None, old, advantages, None)
    return dict(zip(("loss", "approx_kl", "clip_fraction"), found, strict=True))


def _tracked(updates: list[tuple[str, np.ndarray]], buffer_size: int = 16, min_count: int = 16) -> Row:
    """What TRL's PerPromptStatTracker makes of some updates, each of prompts (a letter each) and rewards."""
    from trl.trainer.utils import PerPromptStatTracker

    stats, rows = PerPromptStatTracker(buffer_size, min_count), []
    for keys, rewards in updates:
        rows.append({"rewards": rewards, "advantages": stats.update(list(keys), rewards)})
    return {"buffer_size": buffer_size, "min_count": min_count, "updates": rows}


def tracker(folder: Path) -> Row:
    """Updates of uneven size, through the min_count threshold."""
    prompts = ("aabbc", "aabcc", "abbbb", "ccaab")
    updates = [(keys, seeded_normal((5,), 400 + seed).numpy()) for seed, keys in enumerate(prompts)]
    found = _tracked(updates, buffer_size=6, min_count=4)
    found["updates"] = [{"keys": keys, **row} for keys, row in zip(prompts, found["updates"], strict=True)]
    return found


def stale_mean_biases_advantages(folder: Path) -> Row:
    """Default sizes and rewards that improve by 0.5 an epoch (sigma 0.2).

    "small": a buffer that can never hold min_count rewards; two prompts, far apart, share one mean.
    """
    improving = [0.5 * epoch + 0.2 * seeded_normal((4,), 500 + epoch).numpy() for epoch in range(12)]
    apart = [seeded_normal((8,), 600 + seed).numpy() + np.repeat([0, 10], 4) for seed in range(6)]
    small = _tracked([("aaaabbbb", rewards) for rewards in apart], buffer_size=8)
    last = small["updates"][-1]["advantages"]
    small |= {"updates": 6, "mean_advantage_by_prompt": [last[:4].mean(), last[4:].mean()]}
    return {**_tracked([("aaaa", rewards) for rewards in improving]), "small": small}


def clip_range_depends_on_latent_size(folder: Path) -> list[Row]:
    """The same change per dimension for three latent sizes: TRL's KL and clip fraction shrink."""
    rows = []
    for size in (4, 16, 64):
        case = inputs.steps_of_size(size)
        drawn = _draw(case)
        new = _replay(case, inputs.moved_output(case), drawn.latents)
        found = _trl_loss(drawn.log_probs, new, torch.ones(len(new)), CLIP_RANGE)
        del found["loss"]
        rows.append({"latent_size": size, "log_ratio": new - drawn.log_probs, **found})
    return rows


def tiny_model(folder: Path) -> Row:
    """The tiny folder's text encoder and UNet: proof that two environments hold one model."""
    from diffusers import StableDiffusionPipeline

    return {"noise_pred": inputs.tiny_noise_pred(StableDiffusionPipeline.from_pretrained(folder))}


# ------------------------------------------------------------------------ whole runs of the peers

_BATCHES = ("sample_batch_size", "sample_num_batches_per_epoch", "train_batch_size")
_BATCHES += ("train_gradient_accumulation_steps", "train_num_inner_epochs")
ONE_MINIBATCH: Row = dict(zip(_BATCHES, (4, 1, 4, 1, 1), strict=True))


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
        entry = {"advantages": advantages, "ratio": ratio, "loss": loss}
        self.losses.append({name: tensor.detach() for name, tensor in entry.items()})
        return loss


def peer_trainer(
    peer: str, config: Row, folder: Path | str, *task: Any, lora: bool = True, mixins: Any = (), **extra: Any
) -> Any:
    """Make a peer's trainer for a task, a reward and a prompt function, with the pipeline in a folder."""
    import imageddpo
    import trl

    base, pipeline = imageddpo.ImageDDPOTrainer, imageddpo.I2IDDPOStableDiffusionPipeline
    if peer == TRL:
        base, pipeline = trl.DDPOTrainer, trl.DefaultDDPOStableDiffusionPipeline
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = type("RecordedTrainer", (*mixins, base), {})
        return trainer(trl.DDPOConfig(**config), *task, pipeline(str(folder), use_lora=lora), **extra)


def make_trainer(
    peer: str,
    folder: Path,
    use_lora: bool = False,
    reward: Callable[[torch.Tensor], Any] = lambda images: images.float().mean((1, 2, 3)),
    **config: Any,
) -> Any:
    """Build a peer's trainer on the tiny folder; one optimizer step per epoch, at its end."""
    settings: Row = {"mixed_precision": "no", "allow_tf32": False, "sample_num_steps": 4}
    settings |= dict(zip(_BATCHES, (2, 2, 2, 2, 1), strict=True)) | config
    extra = {name: settings.pop(name) for name in ("noise_strength", "image_samples_hook") if name in config}
    image = () if peer == TRL else (seeded_normal((3, 16, 16), 800).sigmoid(),)
    task = (lambda images, *_: (reward(images), {}), lambda: ("a red cat", *image, {}))
    return peer_trainer(peer, settings, folder, *task, lora=use_lora, mixins=(Recorder,), **extra)


def run(peer: str, folder: Path, *, epochs: int = 1, **settings: Any) -> Row:
    """Train and report: error, steps, and how far the ratios are from 1 before any update."""
    trainer = make_trainer(peer, folder, **settings)
    error = _error_of(lambda: trainer.train(epochs))
    report: Row = {"error": error, "sampled_steps": trainer.sampled_steps}
    if error:
        return report
    config = trainer.config
    minibatches = config.sample_batch_size // config.train_batch_size * config.sample_num_batches_per_epoch
    ratios, losses = (torch.stack([entry[key] for entry in trainer.losses]) for key in ("ratio", "loss"))
    away, weights = (ratios - 1).abs(), trainer.sd_pipeline.unet.parameters()
    report |= {"trained_steps": len(trainer.losses) // minibatches // config.train_num_inner_epochs}
    report |= {"clip_fraction_before_update": (away > config.train_clip_range).float().mean()}
    report |= {"ratios_nan": bool(ratios.isnan().any()), "losses_nan": int(losses.isnan().sum())}
    report |= {"weights_finite": all(bool(weight.isfinite().all()) for weight in weights)}
    return report if report["ratios_nan"] else report | {"max_ratio_error_before_update": away.max()}


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


FROM_NOISE: Row = {"noise_strength": 1.0}
GUIDED_OR_NOT = {f"train_cfg={cfg}": {"train_cfg": cfg} for cfg in (True, False)}
# Entries that are a run with some settings, or several.
RUNS: dict[str, Any] = {
    "asynchronous_rewards_fail": (TRL, {"async_reward_computation": True}),
    "no_guidance_is_a_shape_error": {
        str(scale): (TRL, {"sample_guidance_scale": scale}) for scale in (0.0, 1.0)
    },
    "no_guidance_trains_another_prompt": {  # trained with and without the pair of embeddings
        name: (IMAGE, {**FROM_NOISE, "sample_guidance_scale": 1.0, **train_cfg})
        for name, train_cfg in GUIDED_OR_NOT.items()
    },
    # with guidance 5: trained with it (the control), then without
    "guidance_is_left_out_of_training": {name: (TRL, cfg) for name, cfg in GUIDED_OR_NOT.items()},
    # the default noise_strength of 0.2 with the default train_timestep_fraction of 1
    "default_noise_strength_fails": (IMAGE, {"sample_num_steps": 10}),
    "fewer_steps_trained_than_sampled": (
        IMAGE, {"noise_strength": 0.8, "sample_num_steps": 10, "train_timestep_fraction": 0.8},
    ),
    "eta_zero_is_trained": {
        "trl": (TRL, {"sample_eta": 0.0}), "imageddpo": (IMAGE, {**FROM_NOISE, "sample_eta": 0.0}),
    },
}  # fmt: skip


def planned(entry: Any, folder: Path) -> Row:
    """Return the report of an entry of RUNS."""
    if isinstance(entry, dict):
        return {name: planned(part, folder) for name, part in entry.items()}
    peer, settings = entry
    return run(peer, folder, **settings)


def resumed_lora_is_an_empty_adapter(folder: Path) -> Row:
    """TRL: train LoRA, save, resume; which adapter holds the weights, which the optimizer."""
    trained, project = _trained_and_saved(folder, use_lora=True, epochs=2)
    checkpoint = str(project / "checkpoints" / "checkpoint_0")
    resumed = make_trainer(TRL, folder, use_lora=True, resume_from=checkpoint)
    unet = resumed.sd_pipeline.unet
    held = {id(weight) for group in resumed.optimizer.param_groups for weight in group["params"]}

    def lora_b(unet: Any, adapter: str = "") -> list[torch.Tensor]:
        return [weight for name, weight in unet.named_parameters() if f"lora_B.{adapter}" in name]

    def largest(weights: list[torch.Tensor]) -> torch.Tensor:
        return max(weight.abs().max() for weight in weights)

    adapters = {}
    for name in unet.peft_config:
        weights = lora_b(unet, f"{name}.")
        holds = all(id(weight) in held for weight in weights)
        adapters[name] = {"max_abs_lora_b": largest(weights), "held_by_optimizer": holds}
    saved = largest(lora_b(trained.sd_pipeline.unet))
    return {"saved_max_abs_lora_b": saved, "resumed": adapters, "active": unet.active_adapters()}


def checkpoint_numbers_count_saves(folder: Path) -> Row:
    """TRL: seven epochs, and six, saved every second; what the folders are called, and what is resumed."""
    projects = [
        _trained_and_saved(folder, epochs=epochs, save_freq=2)[1] / "checkpoints" for epochs in (7, 6)
    ]
    names, of_six = (sorted(path.name for path in project.iterdir()) for project in projects)
    resumed = make_trainer(TRL, folder, resume_from=str(projects[0]))
    found = {"checkpoints": names, "checkpoints_after_6_epochs": of_six}
    return {"epochs": 7, "save_freq": 2, **found, "first_epoch_after_resume": resumed.first_epoch}


def _trained_and_saved(folder: Path, epochs: int, **settings: Any) -> tuple[Any, Path]:
    """Train with the project_kwargs without which TRL cannot save."""
    project = Path(tempfile.mkdtemp(dir=folder.parent))
    kwargs = {"project_dir": str(project), "automatic_checkpoint_naming": True}
    trainer = make_trainer(TRL, folder, project_kwargs=kwargs, **settings)
    trainer.train(epochs)
    return trainer, project


def last_step_without_noise_is_nan(folder: Path) -> Row:
    """imageddpo on a schedule that ends in a deterministic step: one replay, and a run.

    With seed 0 a whole minibatch falls on that step, and its loss has no gradient: an error.
    """
    from imageddpo.pipeline import scheduler_step

    case = DDIMCase(seed=10, scheduler={"set_alpha_to_one": True})
    output, timesteps, sample, noise = case.tensors()
    step = scheduler_step(case.make_scheduler(), output, timesteps, sample, eta=1.0, prev_sample=noise)
    ends_clean = inputs.make_tiny_folder(folder.with_name("set_alpha_to_one"), set_alpha_to_one=True)
    return {
        "step": {"case": dataclasses.asdict(case), "log_prob": step.log_probs},
        "run": run(IMAGE, ends_clean, seed=1, **FROM_NOISE, **ONE_MINIBATCH),
    }


def integer_rewards_cut_advantages(folder: Path) -> Row:
    """TRL with per-prompt statistics and integer rewards: the advantages that it trains on."""
    rewards = torch.tensor([3, 1, 4, 1])
    advantages = _advantages_in_training(folder, rewards, per_prompt_stat_tracking=True)
    (update,) = _tracked([("aaaaaaaa", np.array([3, 1, 4, 1, 5, 9, 2, 6]))])["updates"]
    return {"tracker": update, "run": {"rewards": rewards, "sorted_advantages": advantages}}


def global_advantages(folder: Path) -> Row:
    """Without per-prompt statistics: rewards in, advantages out of TRL's own training step."""
    rewards = seeded_normal((4,), seed=700)
    return {"rewards": rewards, "sorted_advantages": _advantages_in_training(folder, rewards)}


def _advantages_in_training(folder: Path, rewards: torch.Tensor, **settings: Any) -> torch.Tensor:
    trainer = make_trainer(TRL, folder, reward=lambda _: rewards, **ONE_MINIBATCH, **settings)
    trainer.train(1)
    return trainer.losses[0]["advantages"].sort().values  # the trainer had shuffled them


def defaults_cannot_save(folder: Path) -> Row:
    """TRL's defaults: saving in training, save_pretrained, and an image hook without a tracker."""
    trainer = make_trainer(TRL, folder)
    return {
        "save_state": run(TRL, folder, epochs=2)["error"],
        "save_pretrained": _error_of(lambda: trainer.save_pretrained(folder.with_name("save_pretrained"))),
        "image_samples_hook": run(TRL, folder, image_samples_hook=lambda *_: None)["error"],
    }


def readme_shows_no_constructor(folder: Path) -> Row:
    """The constructor that imageddpo's README shows."""
    from imageddpo import ImageDDPOTrainer

    shown = ("config", "model", "ref_model", "accelerator", "prompt_fn", "reward_fn")
    return {"error": _error_of(lambda: ImageDDPOTrainer(**dict.fromkeys(shown)))}


def bf16_latents_leave_the_clip_range(folder: Path) -> Row:
    """TRL in bf16: a run with LoRA and guidance 5, and 50 steps of full size, drawn and then replayed."""
    settings: Row = {"use_lora": True, "mixed_precision": "bf16", "sample_num_steps": 50}
    case = inputs.fifty_steps()
    drawn = _draw(case, torch.bfloat16)
    log_prob = _replay(case, case.tensors()[0].bfloat16(), drawn.latents)
    error = (torch.exp(log_prob - drawn.log_probs) - 1).abs()
    step = {"latents_dtype": str(drawn.latents.dtype), "ratio_errors": error}
    step["steps_outside_clip_range"] = int((error > CLIP_RANGE).sum())
    return {"step": step, "run": run(TRL, folder, **settings)}


def batching(folder: Path) -> list[Row]:
    """How many forward passes and optimizer steps an epoch of TRL takes."""
    rows = []
    for plan in ((2, 2, 2, 1, 1), (4, 2, 2, 2, 1), (4, 1, 1, 4, 3), (6, 2, 3, 2, 2)):
        settings: Row = dict(zip(_BATCHES, plan, strict=True))
        trainer = make_trainer(TRL, folder, **settings)
        found = {"num_timesteps": trainer.num_train_timesteps, "optimizer_steps": trainer.step(0, 0)}
        passes = len(trainer.losses) * settings["train_batch_size"]
        rows.append({**settings, **found, "forward_passes": passes})
    return rows


# ---------------------------------------------------------------------------------- two processes


def gradients_never_synchronise(folder: Path) -> Row:
    """Two processes: largest difference between their weights before and after one epoch."""
    return {
        f"{peer} {'LoRA' if use_lora else 'full'}": _drift(peer, folder, use_lora, **strength)
        for peer, strength in ((TRL, {}), (IMAGE, FROM_NOISE))
        for use_lora in (False, True)
    }


def _drift(peer: str, folder: Path, use_lora: bool, **strength: Any) -> Row:
    trainer = make_trainer(peer, folder, use_lora=use_lora, **strength)

    def gap() -> torch.Tensor:
        trainable = [p for p in trainer.sd_pipeline.unet.parameters() if p.requires_grad]
        weights = torch.cat([parameter.detach().flatten() for parameter in trainable])
        first, second = trainer.accelerator.gather(weights[None])
        return (first - second).abs().max()

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


def plain(value: Any) -> Any:
    """Turn tensors into lists, floats into the nine digits that identify a float32, NaN into None."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return None if value != value else float(f"{value:.9g}")
    return value


GROUPS: dict[str, tuple[Callable[[Path], Any], ...]] = {
    "one_process": (
        tiny_model, ddim_steps, surrogate, global_advantages, tracker, batching,
        resumed_lora_is_an_empty_adapter, checkpoint_numbers_count_saves, last_step_ignores_final_alpha,
        last_step_without_noise_is_nan, integer_rewards_cut_advantages, defaults_cannot_save,
        readme_shows_no_constructor, clip_range_depends_on_latent_size, stale_mean_biases_advantages,
    ),
    "bf16": (bf16_latents_leave_the_clip_range,),  # one precision per process
    "drift": (gradients_never_synchronise,),
    "save": (saving_in_two_processes_deadlocks,),
}  # fmt: skip


def main() -> None:
    """Run the group that the command line names, in the empty folder that it names."""
    group, scratch = sys.argv[1], Path(sys.argv[2])
    folder = inputs.make_tiny_folder(scratch / "tiny")
    rows = {function.__name__: function(folder) for function in GROUPS[group]}
    if group == "one_process":
        rows |= {name: planned(entry, folder) for name, entry in RUNS.items()}
    (scratch / "rows.json").write_text(json.dumps(plain(rows), allow_nan=False))


if __name__ == "__main__":
    main()
