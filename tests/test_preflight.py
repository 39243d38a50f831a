"""Checks of the first epoch: silent where all is well, and each fault is seen by the check that is for it."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch
from helpers import NOT_CLIPPED, brightness, each_prompt, flow_runner, make_config, make_pipeline

from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.app import preflight
from ddpo_lessons.app.cli import main
from ddpo_lessons.data.starts import FromNoise
from ddpo_lessons.families.policy import save_policy
from ddpo_lessons.families.stable_diffusion import StableDiffusion
from ddpo_lessons.run.sampling import Sampler
from ddpo_lessons.trainer import Runner

pytestmark = pytest.mark.usefixtures("one_thread")


FOUR: dict[str, Any] = {"sample_batch_size": 4, "train_batch_size": 2}  # two optimizer steps


def make(folder: Any, reward: Any = brightness, algorithm: str = "ddpo", **changes: Any) -> Runner:
    config = make_config(folder, **{**FOUR, **changes})
    parts = (config, reward, each_prompt(), make_pipeline())
    return Runner(*parts, algorithm=make_algorithm(algorithm), start=FromNoise())


def failed(trainer: Runner) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [finding.check for finding in preflight.fly(trainer) if not finding.passed]


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
    assert failed(flow_runner(tmp_path, make_algorithm("nft"), **{**FOUR, **NOT_CLIPPED})) == []


RATIO, GRADIENT, MOVE = "the first ratio is 1", "every weight gets a gradient", "steps move the weights"
DRAWN, SAVED, DIFFER = "training changes what is drawn", "the saved file draws the same", "rewards differ"
SAME, FOLLOW = "the same pictures get the same rewards", "rewards follow their samples"
ALONE = "samples made and scored alone get their rewards"
FAULTS: list[tuple[Any, tuple[str, ...]]] = []


def fault(*checks: str) -> Any:
    """Register what makes a broken trainer, with the checks that must see it."""
    return lambda function: FAULTS.append((function, checks)) or function


@fault(RATIO)
def guidance_of_sampling_only(patch, make_run):
    predict = StableDiffusion.predict

    def wrong(self, denoiser, latents, timesteps, conditioning, guidance_scale):
        return predict(
            self, denoiser, latents, timesteps, conditioning, 1.0 if torch.is_grad_enabled() else 5.0
        )

    patch.setattr(StableDiffusion, "predict", wrong)
    return make_run(sample_guidance_scale=5.0)


@fault(GRADIENT, MOVE, DRAWN)
def a_detached_loss(patch, make_run):
    loss = DDPO.loss

    def wrong(self, *arguments):
        value, stats = loss(self, *arguments)
        return value.detach() + 0 * value, stats

    patch.setattr(DDPO, "loss", wrong)
    return make_run(train_adam_weight_decay=0.0)


@fault(MOVE, DRAWN)
def an_optimizer_of_other_weights(patch, make_run):
    trainer = make_run()
    trainer.learner.optimizer.step = lambda *_: None
    return trainer


@fault(GRADIENT)
def half_of_the_adapter_left_out(patch, make_run):
    trainer = make_run()
    for number, weight in enumerate(trainer.learner.trainable.values()):
        if number % 4 == 1:
            weight.register_hook(torch.zeros_like)
    return trainer


@fault(DRAWN)
def a_sampler_that_never_gets_the_adapter(patch, make_run):
    trainer = make_run()
    copied = make_pipeline()  # as an engine of its own that keeps the weights it began with
    trainer.sampler.family = type(trainer.family)(copied)
    return trainer


@fault(SAVED)
def an_empty_file(patch, make_run):
    trainer = make_run()

    def wrong(folder: Any) -> None:
        with torch.no_grad():
            for weight in trainer.learner.trainable.values():
                weight.mul_(0)
        save_policy(trainer.family, folder)

    trainer.save_pretrained = wrong
    return trainer


@fault(ALONE)
def prompts_shifted_by_one(patch, make_run):
    sample = Sampler.rollout

    def wrong(self, *arguments):
        images, trajectory = sample(self, *arguments)
        return images.roll(1, dims=0), trajectory

    patch.setattr(Sampler, "rollout", wrong)
    return make_run()


@fault(
    DIFFER,
    GRADIENT,
    MOVE,
    DRAWN,
)
def a_reward_that_reads_0_to_255(patch, make_run):
    wrong = lambda images, *_: (images > 128).float().mean((1, 2, 3))  # noqa: E731
    return make_run(wrong, train_adam_weight_decay=0.0)


@fault(
    SAME,
    FOLLOW,
    ALONE,
)
def a_reward_with_dropout(patch, make_run):
    return make_run(lambda images, *_: torch.nn.functional.dropout(images).mean((1, 2, 3)))


@fault(FOLLOW, ALONE)
def a_reward_that_normalises_its_batch(patch, make_run):
    def wrong(images, *_):
        means = images.mean((1, 2, 3))
        return means - means[0]

    return make_run(wrong)


@fault(SAME)
def a_reward_that_writes_into_its_pictures(patch, make_run):
    def wrong(images, *_):
        rewards = images.mean((1, 2, 3))
        images.mul_(2).sub_(1)
        return rewards

    return make_run(wrong)


@pytest.mark.parametrize(("break_it", "checks"), FAULTS, ids=[function.__name__ for function, _ in FAULTS])
def test_faults_are_seen_by_the_checks_for_them(break_it, checks, tmp_path, monkeypatch):
    trainer = break_it(monkeypatch, lambda reward=brightness, **changes: make(tmp_path, reward, **changes))
    assert set(checks) <= set(failed(trainer))


def test_a_run_writes_and_warns_of_what_its_first_epoch_shows(tmp_path, monkeypatch):
    trainer = half_of_the_adapter_left_out(monkeypatch, lambda: make(tmp_path))
    with pytest.warns(UserWarning, match="looks broken: FAIL  every weight gets a gradient"):
        trainer.step(0)
    seen = json.loads((tmp_path / "preflight.json").read_text())
    assert [finding["check"] for finding in seen if not finding["passed"]] == [GRADIENT]
    trainer.step(1)
    assert len(trainer.preflight) == 4  # of the first epoch


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
    assert "FAIL  rewards differ" in said
    assert "ok    the saved file draws the same" in said
    assert {path.name for path in tmp_path.iterdir()} <= {"flat.py", "__pycache__"}
