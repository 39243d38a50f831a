"""Checks of the first epoch: silent where all is well, and each fault is seen by the check that is for it."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, LCMScheduler, PNDMScheduler
from fake_device import fake_device
from helpers import (
    NOT_CLIPPED,
    Remembering,
    brightness,
    each_prompt,
    flow_trainer,
    let_loss_overflow,
    make_config,
    make_pipeline,
    make_sd3_pipeline,
    make_xl_pipeline,
    noisy_image,
    records_of,
    red_three,
    stir_adapter,
)

from ddpo_lessons.advantages import normalize
from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.checks import of_snippet, preflight
from ddpo_lessons.cli.main import main
from ddpo_lessons.data.starts import FromImages, FromNoise
from ddpo_lessons.lessons import run_sets
from ddpo_lessons.lessons.faults import FAULTS, Fault, put_in
from ddpo_lessons.models.policy import with_parts
from ddpo_lessons.smoke import smoke_run
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training.memory import OutOfMemory
from ddpo_lessons.worlds import load_tiny_sd

pytestmark = pytest.mark.usefixtures("one_thread")


FOUR: dict[str, Any] = {"sample_batch_size": 4, "train_batch_size": 2}  # two optimizer steps


def make(folder: Any, reward: Any = brightness, algorithm: str = "ddpo", **changes: Any) -> Trainer:
    config = make_config(folder, **{**FOUR, **changes})
    parts = (config, reward, each_prompt(), make_pipeline())
    return Trainer(*parts, algorithm=make_algorithm(algorithm))


def failed(trainer: Trainer) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [finding.check for finding in preflight(trainer, plain=False).failed]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train_use_lora": False},
        {"sample_group_size": 2, "mixed_precision": "bf16"},
        {"algorithm": "rwr", **NOT_CLIPPED},
        {"train_ema_decay": 0.9},
    ],
    ids=str,
)
def test_healthy_runs_pass(settings, tmp_path):
    assert failed(make(tmp_path, **settings)) == []


def test_a_healthy_flow_model_passes(tmp_path):
    assert failed(flow_trainer(tmp_path, make_algorithm("nft"), **{**FOUR, **NOT_CLIPPED})) == []


@pytest.mark.parametrize(
    ("settings", "dropped"),
    [
        ({"train_use_lora": False}, 3),  # weight and bias of `add_q_proj`, and the norm behind it
        ({"train_lora_target_modules": ("attn.to_q", "attn.add_q_proj")}, 2),  # A and B
    ],
    ids=str,
)
def test_weights_whose_output_the_model_drops_need_no_gradient(settings, dropped, tmp_path):
    """Stable Diffusion 3's last block drops what its text has asked for; in the block before it is read."""
    changes = {"pipeline": make_sd3_pipeline(), **FOUR, **settings}
    trainer = flow_trainer(tmp_path, make_algorithm("flow_grpo"), **changes)
    for name, weight in trainer.learner.trainable.items():
        if "transformer_blocks.0.attn.add_q_proj" in name:
            weight.register_hook(torch.zeros_like)
    with pytest.warns(UserWarning, match="whose output the model drops"):
        trainer.step(0)
    (found,) = [finding for finding in trainer.preflight if finding.check == GRADIENT]
    count, lost = len(trainer.learner.trainable) - dropped, 2
    assert not found.passed
    assert found.says.startswith(
        f"{count - lost} of {count} do in 2 optimizer steps (left out: {dropped} whose output the model "
        "drops), but not transformer_blocks.0.attn.add_q_proj"
    )


RATIO = "the ratio is 1 before the first optimizer step"
LATER = "the ratio differs from 1 after an optimizer step"
GRADIENT, MOVE = "every trained weight gets a gradient", "optimizer steps change the weights"
DRAWN, DIFFER = "training changes the sampled images", "rewards differ between samples"
SAVED = "the saved weights give the trained model's images"
STARTS = "every sample or group starts from its own noise"
SAME = "scoring the same images again gives the same rewards"
FOLLOW = "rewards do not depend on the order of the batch"
ALONE = "samples generated and scored separately get the same rewards"
SEEN = {
    "stale sampler": {DRAWN},
    "other prompts": {RATIO},
    "other weights": {GRADIENT, MOVE, DRAWN},
    "first layer only": {GRADIENT},
    "B stays 0": {GRADIENT, MOVE, DRAWN},
    "empty file": {SAVED},
    "first four": set(),
    "whole numbers": set(),
    "shifted images": {ALONE},
    "bf16 latents": {RATIO},
    "own ratio": {LATER},
    "0 to 255": set(),
    "four noises": {STARTS},
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen_by_the_checks_for_them_and_by_no_other(name, tmp_path):
    """Of three nobody takes note: of advantages that are wrong, and of a reward that differs and is wrong."""
    # Without weight decay only a gradient moves weights.
    settings = {"sample_batch_size": 8, "train_adam_weight_decay": 0.0, "train_clip_range": 2e-4}
    if name == "other prompts":
        settings["sample_guidance_scale"] = 1.0
    with put_in(FAULTS[name]):
        found = set(failed(make(tmp_path, run_sets.redness, **settings)))
    assert SEEN[name] <= found <= SEEN[name] | {LATER}  # where nothing moves, later ratios are 1 to rounding


@pytest.mark.parametrize("is_called", [True, False], ids=["fused AdamW", "8-bit AdamW"])
def test_steps_that_float16_skips_are_no_fault(is_called, tmp_path):
    """A fused optimizer is called and skips by itself; another one is not even called."""
    with fake_device():
        trainer = make(tmp_path, mixed_precision="fp16")
        let_loss_overflow(trainer)
        trainer.learner.optimizer.optimizer._step_supports_amp_scaling = is_called
        found = preflight(trainer, plain=False)
    assert not found.failed
    skipped = [finding.check for finding in found if "scale is still too high" in finding.says]
    assert skipped == [GRADIENT, MOVE, DRAWN]
    assert [finding.check for finding in found if not finding.checked] == [*skipped, SAVED]


def test_a_fault_is_out_again_and_its_text_must_stand_in_one_function(tmp_path):
    change = FAULTS["first four"]
    with put_in(change):
        assert normalize([1, 1, 1, 1, 2.0]).tolist()[-1] > 1e6  # the first four do not differ
    assert normalize([1, 1, 1, 1, 2.0]).tolist() == pytest.approx([-0.5] * 4 + [2])
    for right, says in (
        ("nowhere", "0 times"),
        ("self", "times, not once"),
        ('name = "ddpo"', "no function"),
    ):
        wrong = Fault("algorithms/ddpo.py", right, "0", "", "")
        with pytest.raises(ValueError, match=says), put_in(wrong):
            pass


def a_detached_loss(patch, make_run):
    loss = DDPO.loss

    def wrong(self, *arguments):
        value, stats = loss(self, *arguments)
        return value.detach() + 0 * value, stats

    patch.setattr(DDPO, "loss", wrong)
    return make_run(train_adam_weight_decay=0.0)


def half_of_the_adapter_left_out(patch, make_run):
    trainer = make_run()
    for number, weight in enumerate(trainer.learner.trainable.values()):
        if number % 4 == 1:
            weight.register_hook(torch.zeros_like)
    return trainer


def a_reward_with_dropout(patch, make_run):
    return make_run(lambda images, *_: torch.nn.functional.dropout(images).mean((1, 2, 3)))


def a_reward_that_normalises_its_batch(patch, make_run):
    return make_run(lambda images, *_: images.mean((1, 2, 3)) - images[0].mean())


@pytest.mark.parametrize(
    ("break_it", "checks"),
    [
        (a_detached_loss, {GRADIENT, MOVE, DRAWN}),
        (half_of_the_adapter_left_out, {GRADIENT}),
        (a_reward_with_dropout, {SAME, FOLLOW, ALONE}),
        (a_reward_that_normalises_its_batch, {FOLLOW, ALONE}),
    ],
)
def test_faults_of_a_user_are_seen(break_it, checks, tmp_path, monkeypatch):
    trainer = break_it(monkeypatch, lambda reward=brightness, **changes: make(tmp_path, reward, **changes))
    assert checks <= set(failed(trainer))


def test_a_run_writes_and_warns_of_what_its_first_epoch_shows(tmp_path, monkeypatch):
    trainer = half_of_the_adapter_left_out(monkeypatch, lambda: make(tmp_path))
    with pytest.warns(UserWarning, match="looks broken: FAIL  every trained weight gets a gradient"):
        trainer.step(0)
    seen = json.loads((tmp_path / "preflight.json").read_text())
    assert [finding["check"] for finding in seen if not finding["passed"]] == [GRADIENT]
    trainer.step(1)
    assert len(trainer.preflight) == 5  # of the first epoch


@pytest.mark.filterwarnings("ignore")
def test_the_command_prints_a_line_a_check_and_leaves_no_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flat.py").write_text("def flat(images, prompts, metadata):\n    return [1] * len(images)\n")
    words = (
        "--reward flat.py:flat --sample-batch-size 4 --sample-num-batches-per-epoch 1 --train-batch-size 4"
    )
    words += " --sample-num-steps 3 --sample-group-size 2 --train-gradient-accumulation-steps 1"
    assert main(["preflight", *words.split()]) == 1
    said = capsys.readouterr().out
    assert [line[:40] for line in said.splitlines() if "FAIL" in line] == [f"FAIL  {DIFFER}: st"]
    assert max(map(len, said.splitlines())) <= 80
    lines = said.replace("\n      ", " ").splitlines()  # as before they were wrapped
    because = "not checked, because rewards do not differ, so that every gradient is 0"
    assert [line for line in lines if line.startswith("skip")] == [
        *(f"skip  {check}: {because}" for check in (GRADIENT, MOVE, DRAWN)),
        f"skip  {SAVED}: not seen, because training changed no image",
    ]
    assert said.endswith("\n8 of 13 checks passed, 4 not checked\n")
    assert {path.name for path in tmp_path.iterdir()} <= {"flat.py", "__pycache__"}


def test_the_lesson_has_the_numbers_that_were_counted():
    root = Path(__file__).parents[1]
    results, lesson = root / "benchmarks" / "results", root / "notebooks" / "08_fails_in_silence.ipynb"
    found = json.loads((results / "silent_faults.json").read_text("utf-8"))
    seen = {name for name, checks in found.items() if any(checks.values())}
    assert seen <= FAULTS.keys() <= found.keys()  # no healthy run raises an alarm
    counts = json.loads((results / "preflight_counts.json").read_text("utf-8"))
    hits = [row for row in counts["mutations"] if row["seen"]]
    text = lesson.read_text("utf-8")
    assert (len(seen), len(FAULTS)) == (9, 13)
    assert f" {counts['healthy']['first_epochs']} runs" in text
    assert len(counts["healthy"]["alarms"]) == 3
    assert len(hits) == 1
    assert f" {len(counts['mutations'])} one-line faults" in text


# -------------------------------------------------------------------------- the trainer is given back
def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.family.denoiser.named_parameters()}


def state_of(trainer: Trainer) -> Any:
    """All that an epoch changes, as JSON and bytes of tensors."""
    tensors = {
        (kind, name): tensor.clone()
        for kind, group in trainer.learner.tensors().items()
        for name, tensor in group.items()
    }
    return trainer.state.values(), tensors


def counted() -> Any:
    """A prompt function that holds state and cannot tell it."""
    calls: list[None] = []

    def draw() -> tuple[str, dict[str, Any]]:
        calls.append(None)
        return f"a red {['three', 'four', 'five'][len(calls) % 3]}", {"call": len(calls)}

    return draw


def of_calls(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """A reward that differs between the first prompts and later ones."""
    return images.mean(dim=(1, 2, 3)) * torch.tensor([each["call"] for each in metadata])


class Told(Remembering):
    """A prompt function that holds state and tells it."""

    def __call__(self) -> tuple[str, dict[str, Any]]:
        self.drawn += 1
        return f"a red {['three', 'four', 'five'][self.drawn % 3]}", {"call": self.drawn}


KINDS = [
    {},
    {"train_use_lora": False, "train_ema_decay": 0.9},
    {"mixed_precision": "bf16"},
    {"algorithm": "nft", **NOT_CLIPPED},
]


def rehearse_both(trainer: Trainer) -> None:
    assert preflight(trainer, plain=trainer.algorithm.name != "nft").failed == []
    smoke_run(trainer)


@pytest.mark.parametrize("prompts", [counted, Told])
@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_a_run_after_rehearsals_is_bitwise_the_run_without(prompts, changes, tmp_path):
    settings = {**FOUR, "num_epochs": 3, "save_freq": 1, "train_learning_rate_schedule": "linear", **changes}
    algorithm = settings.pop("algorithm", "ddpo")

    def make_run(name: str, **more: Any) -> Trainer:
        config = make_config(tmp_path / name, **settings, **more)
        return Trainer(config, of_calls, prompts(), make_pipeline(), algorithm=make_algorithm(algorithm))

    plain, rehearsed = make_run("plain"), make_run("rehearsed")
    before, weights, random_state = state_of(rehearsed), weights_of(rehearsed), torch.get_rng_state()
    rehearse_both(rehearsed)
    assert not (tmp_path / "rehearsed").exists()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same(state_of(rehearsed), before)
    assert_same((0, weights_of(rehearsed)), (0, weights))
    assert rehearsed.preflight == ()
    plain.train()
    rehearsed.step(0)
    rehearsed.save()
    log = (tmp_path / "rehearsed" / "metrics.jsonl").read_bytes()
    rehearse_both(rehearsed)  # in the middle of a run, too
    assert (tmp_path / "rehearsed" / "metrics.jsonl").read_bytes() == log
    rehearsed.train()
    assert_same(state_of(rehearsed), state_of(plain))
    rehearse_both(rehearsed)  # after the last epoch, where the learning rate is 0
    assert_same(state_of(rehearsed), state_of(plain))
    assert records_of(tmp_path / "rehearsed") == records_of(tmp_path / "plain")
    assert len(rehearsed.preflight) == len(plain.preflight)


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert [name for name, tensor in one[1].items() if not torch.equal(tensor, other[1][name])] == []


def test_a_rehearsal_takes_smaller_passes_where_memory_lacks(tmp_path):
    trainer = make(tmp_path, train_micro_batch_size=4)
    calls: list[int] = []

    def function() -> int:
        calls.append(trainer.config.train_micro_batch_size)
        if len(calls) == 1:
            raise OutOfMemory(trainer.config, "train_micro_batch_size", 4, torch.OutOfMemoryError("full"))
        return trainer.config.train_micro_batch_size

    assert trainer.rehearse(function) == 2
    assert calls == [4, 2]


def test_findings_are_shown_as_lines(tmp_path):
    found = preflight(make(tmp_path))
    lines = repr(found).splitlines()
    assert lines[0].startswith("ok    images are float32 in [0, 1] and not constant: float32 from ")
    assert lines[-1] == f"{len(found)} of {len(found)} checks passed"
    assert len([line for line in lines[:-1] if not line.startswith(" ")]) == len(found)


def test_later_trainers_of_the_pipeline_are_not_warned_of_a_rehearsal(tmp_path):
    pipeline = make_pipeline()
    config = make_config(tmp_path, train_use_lora=False, **FOUR)
    preflight(Trainer(config, brightness, each_prompt(), pipeline, algorithm=DDPO()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(config, brightness, each_prompt(), pipeline, algorithm=DDPO())


# ------------------------------------------------------------------------------------- plain diffusers
def contexts_of(trainer: Trainer) -> list[Any]:
    return list(trainer.contexts.of(trainer.epochs_done).values())


def snippet_of(trainer: Trainer) -> tuple[bool, float]:
    """Draw as the docs say, with an adapter that changes much; return the verdict and the distance."""
    stir_adapter(trainer.learner.denoiser)
    (found,) = of_snippet(trainer, contexts_of(trainer))
    return found.passed, float(found.says.split()[0])


@pytest.mark.parametrize("start", [FromNoise(), FromImages(0.6)], ids=["noise", "images"])
@pytest.mark.parametrize("model", [make_pipeline, make_xl_pipeline])
@pytest.mark.parametrize("changes", [{}, {"mixed_precision": "bf16", "sample_guidance_scale": 1.0}], ids=str)
def test_the_docs_snippet_draws_what_the_run_draws(model, start, changes, tmp_path):
    config = make_config(tmp_path, sample_num_steps=6, negative_prompts="a blue four", **changes)
    prompts = red_three if type(start) is FromNoise else noisy_image
    trainer = Trainer(config, brightness, prompts, model(), algorithm=DDPO(), start=start)
    passed, distance = snippet_of(trainer)
    assert passed
    assert distance < 1e-5


def test_the_docs_snippet_replaces_the_scheduler_of_stable_diffusion(tmp_path):
    """PNDM, which Stable Diffusion 1.5 comes with, ignores eta; LCM's betas are its own by default."""
    plain = make_pipeline(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, steps_offset=1)
    own = plain.scheduler.config
    for number, (scheduler, expected) in enumerate(
        [
            (PNDMScheduler.from_config(own), True),
            (LCMScheduler(prediction_type="v_prediction", steps_offset=1), False),
        ]
    ):
        pipeline = with_parts(make_pipeline(), {"scheduler": scheduler})
        trainer = Trainer(
            make_config(tmp_path / str(number), sample_num_steps=6), brightness, red_three, pipeline,
            algorithm=DDPO(),
        )  # fmt: skip
        assert snippet_of(trainer)[0] == expected


def test_a_schedule_on_which_diffusers_draws_black_is_named(tmp_path):
    """Of five trailing steps the first has no signal: 1 - ᾱ - σ², which is 0, is rounded below 0."""
    trainer = make(tmp_path, sample_num_steps=5)
    trainer.pipeline.scheduler = DDIMScheduler.from_config(load_tiny_sd().scheduler.config)
    (found,) = of_snippet(trainer, contexts_of(trainer))
    assert not found.passed
    assert found.says.startswith("nan away")
    assert "eta=0.999" in found.says


def test_the_command_draws_with_plain_diffusers_too(tmp_path, capsys):
    flags = ("--sample-num-steps", "6", "--sample-batch-size", "4", "--train-batch-size", "4")
    more = ("--sample-num-batches-per-epoch", "1", "--reward", "colorfulness")
    assert main(["preflight", *flags, *more]) == 0
    lines = capsys.readouterr().out.replace("\n      ", " ").splitlines()  # as before they were wrapped
    assert lines[-2].startswith("ok    a plain diffusers pipeline gives the trainer's images")
    assert lines[-1] == "13 of 13 checks passed"  # one step an epoch has no later ratio


def test_flow_models_need_no_other_scheduler(tmp_path):
    trainer = flow_trainer(tmp_path, make_algorithm("nft"), **{**FOUR, **NOT_CLIPPED})
    assert of_snippet(trainer, contexts_of(trainer)) == []
