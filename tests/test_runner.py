"""What surrounds an algorithm: epochs that fail or are stopped, precision, exports, combinations."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline
from fake_device import fake_device
from helpers import (
    NOT_CLIPPED,
    Counting,
    Remembering,
    brightness,
    each_prompt,
    launch,
    let_loss_overflow,
    make_config,
    make_pipeline,
    make_trainer,
    noisy_image,
    records_of,
    red_three,
    run,
    weights_of,
)

from ddpo_lessons import compat
from ddpo_lessons.algorithms.awm import AWM
from ddpo_lessons.algorithms.branching import Branching
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.algorithms.dpo import DPO
from ddpo_lessons.algorithms.draft import DRaFT
from ddpo_lessons.algorithms.flow_grpo import FlowGRPO
from ddpo_lessons.algorithms.nft import NFT
from ddpo_lessons.algorithms.pepg import PEPG
from ddpo_lessons.algorithms.refl import ReFL
from ddpo_lessons.algorithms.rwr import RWR
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer, Trainer
from ddpo_lessons.training import checkpoint, learner
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.worlds import load_tiny_sd3

pytestmark = pytest.mark.usefixtures("one_thread")

TWO_PASSES = {"sample_num_batches_per_epoch": 2, "sample_micro_batch_size": 2, "train_batch_size": 2}
TRACKING = {
    "per_prompt_stat_tracking": True,
    "per_prompt_stat_tracking_buffer_size": 8,
    "per_prompt_stat_tracking_min_count": 2,
}


# -------------------------------------------------------------------------------- epochs that fail
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "prompts"),
    [("reward", Counting), ("reward", Remembering), ("step", Remembering), ("hook", Remembering)],
)
def test_an_epoch_that_failed_never_was(tmp_path, place, prompts):
    """In the second epoch something fails once; done again, it comes out as if nothing had happened.

    The reward has noise from the global generator, which is the same again.
    """
    failures = {"left": 1}

    def fail_once(epoch: int) -> None:
        if epoch == 1 and failures["left"]:
            failures["left"] = 0
            raise OSError("out of luck")

    def train(folder: str, fails: bool) -> Trainer:
        def reward(images: torch.Tensor, *arguments: Any) -> torch.Tensor:
            noise = 0.01 * torch.rand(len(images))
            calls.append(1)
            if fails and place == "reward" and len(calls) == 4:  # the second pass of the second epoch
                fail_once(1)
            return brightness(images, *arguments) + noise

        def hook(batches: Any, global_step: int, tracker: Any) -> None:
            if fails and place == "hook" and global_step == 4:
                fail_once(1)

        calls: list[int] = []
        config = make_config(tmp_path / folder, num_epochs=3, save_freq=9, **TWO_PASSES, **TRACKING)
        trainer = DDPOTrainer(config, reward, prompts(), make_pipeline(), hook)
        if fails and place == "step":
            loss = trainer.algorithm.loss

            def failing(*arguments: Any) -> Any:
                if trainer.global_step == 3:  # one of the epoch's two steps is taken
                    fail_once(1)
                return loss(*arguments)

            trainer.algorithm.loss = failing
        if fails:
            with pytest.raises(OSError, match="out of luck"):
                trainer.train()
            assert (trainer.epochs_done, trainer.global_step) == (1, 2)
            assert len(read_metrics(trainer.config.run_dir, "step")) == 2
        trainer.train()
        return trainer

    straight, failed = train("straight", False), train("failed", True)
    assert torch.equal(weights_of(failed), weights_of(straight))
    assert failed.algorithm.state_dict() == straight.algorithm.state_dict()
    assert failed.prompt_function.drawn == straight.prompt_function.drawn
    assert records_of(tmp_path / "failed") == records_of(tmp_path / "straight")


def test_statistics_are_those_of_one_run(tmp_path):
    algorithm = DDPO()
    for folder, settings in (("a", TRACKING), ("b", {})):
        config = make_config(tmp_path / folder, **settings)
        Trainer(config, brightness, red_three, make_pipeline(), algorithm=algorithm)
    assert algorithm.tracker is None


# ------------------------------------------------------------------------------------- interrupts
@pytest.mark.parametrize(("signum", "place"), [(signal.SIGINT, "sampling"), (signal.SIGTERM, "training")])
def test_a_signal_ends_within_a_pass_or_a_step(tmp_path, signum, place):
    """The epoch is dropped, the one before it saved, and the run goes on as if it had never stopped."""
    asked: list[int] = []
    handler = signal.getsignal(signum)

    def reward(images: torch.Tensor, *arguments: Any) -> torch.Tensor:
        asked.append(1)
        if place == "sampling" and len(asked) == 3:  # first pass of the second epoch
            signal.raise_signal(signum)
        return brightness(images, *arguments)

    trainer = make_trainer(tmp_path / "a", reward, Remembering(), num_epochs=3, save_freq=9, **TWO_PASSES)
    if place == "training":
        step = trainer.learner.step

        def stop_at_third(*given: Any) -> dict[str, float]:
            record = step(*given)
            if trainer.global_step == 3:
                signal.raise_signal(signum)
            return record

        trainer.learner.step = stop_at_third
    trainer.train()
    assert (trainer.stopped_by, signal.getsignal(signum)) == (signum, handler)
    assert len(asked) == (3 if place == "sampling" else 4)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "a")] == ["checkpoint-000001"]
    assert [r["epoch"] for r in read_metrics(tmp_path / "a", "step")] == [1, 1]
    resumed = DDPOTrainer.from_checkpoint(
        tmp_path / "a" / "checkpoint-000001", brightness, Remembering(), make_pipeline()
    )
    resumed.train()
    assert resumed.stopped_by is None
    straight = run(tmp_path / "b", prompts=Remembering(), num_epochs=3, save_freq=9, **TWO_PASSES)
    assert torch.equal(weights_of(resumed), weights_of(straight))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="os.kill sends no SIGINT there")
@pytest.mark.parametrize("processes", [1, 2])
def test_a_launcher_that_is_stopped_leaves_a_checkpoint(tmp_path, processes):
    """`accelerate launch` hands the signal on and kills after half a minute; an epoch here takes longer."""
    process = launch(__file__, tmp_path, processes)
    deadline = time.monotonic() + 120
    while not (tmp_path / "sampling").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    assert (tmp_path / "sampling").exists(), process.communicate()[1][-3000:]
    stopped = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.communicate(timeout=60)
    assert time.monotonic() - stopped < 25
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "run")] == ["checkpoint-000001"]
    checkpoint.read(tmp_path / "run" / "checkpoint-000001")


def in_a_launched_process(folder: Path) -> None:
    """Two epochs, the second of which would take minutes."""
    torch.set_num_threads(1)

    def reward(images: torch.Tensor, *arguments: Any) -> torch.Tensor:
        if trainer.epochs_done == 1:
            (folder / "sampling").touch()
            time.sleep(0.5)
        return brightness(images, *arguments)

    shape = {"sample_num_batches_per_epoch": 200, "sample_micro_batch_size": 2, "train_batch_size": 400}
    settings = {"num_epochs": 2, "save_freq": 9, "sample_num_steps": 1}
    trainer = make_trainer(folder / "run", reward, each_prompt(), **settings, **shape)
    trainer.train()


# --------------------------------------------------------------------------------------- precision
def test_skipped_steps_are_recorded_and_many_in_a_row_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "MAX_SKIPPED", 3)
    with fake_device():
        trainer = make_trainer(tmp_path, num_epochs=4, mixed_precision="fp16")
        before = weights_of(trainer)
        let_loss_overflow(trainer)
        with pytest.raises(
            RuntimeError, match=r"last 3 optimizer steps were skipped.*mixed_precision='bf16'"
        ):
            trainer.train()
        assert torch.equal(weights_of(trainer), before)
    steps = read_metrics(tmp_path, "step")
    assert [step["step_skipped"] for step in steps] == [1, 1]  # the third one's epoch never was
    assert steps[1]["loss_scale"] == steps[0]["loss_scale"] / 2


def test_trainers_of_two_precisions_live_in_one_process(tmp_path):
    """As in a notebook; each keeps its own precision, whichever was made last."""
    plain = make_trainer(tmp_path / "a")
    low = make_trainer(tmp_path / "b", mixed_precision="bf16")
    plain.train()
    low.train()
    again = run(tmp_path / "c")
    assert torch.equal(weights_of(plain), weights_of(again))
    assert next(low.pipeline.unet.parameters()).dtype == torch.bfloat16
    pipeline = make_pipeline()
    make_trainer(tmp_path / "d", pipeline=pipeline, mixed_precision="bf16")
    seen: list[torch.dtype] = []
    pipeline.unet.conv_in.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    run(tmp_path / "e", pipeline=pipeline)
    assert set(seen) == {torch.float32}  # nothing of the first one's autocast is left


def test_tf32_is_switched_for_products_and_convolutions(tmp_path):
    for wanted in (False, True):
        make_trainer(tmp_path, allow_tf32=wanted)
        assert torch.backends.cuda.matmul.allow_tf32 is torch.backends.cudnn.allow_tf32 is wanted


# ----------------------------------------------------------------------------------------- exports
def test_a_full_export_has_the_frozen_networks_as_they_came(tmp_path):
    pipeline, untouched = make_pipeline(), make_pipeline()
    trainer = run(tmp_path, pipeline=pipeline, mixed_precision="bf16", train_use_lora=False)
    trainer.save_pretrained(tmp_path / "export")
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path / "export")
    for part in ("vae", "text_encoder"):
        found, expected = (getattr(p, part).state_dict() for p in (loaded, untouched))
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(next(loaded.unet.parameters()), next(untouched.unet.parameters()))


def test_a_checkpoint_takes_tensors_that_share_memory(tmp_path):
    """As the tables of 8-bit Adam do, which safetensors refuses."""
    table = torch.arange(6.0)
    folder = checkpoint.write(
        tmp_path, 1, {"optimizer": {"a|qmap": table, "b|qmap": table, "c|x": table[2:]}}, {}
    )
    (tensors,) = checkpoint.read(folder)[0].values()
    assert tensors["a|qmap"].tolist() == tensors["b|qmap"].tolist() == table.tolist()
    assert tensors["c|x"].tolist() == [2, 3, 4, 5]


# ------------------------------------------------------------------------------------ combinations
def test_a_checkpoint_goes_on_with_its_algorithm_and_start(tmp_path):
    task = brightness, noisy_image
    parts = {"algorithm": RWR(temperature=0.5), "start": FromImages(0.7)}
    whole, first = (make_config(tmp_path / name, **NOT_CLIPPED) for name in ("whole", "first"))
    whole.num_epochs = 2
    straight = Trainer(whole, *task, make_pipeline(), **parts)
    straight.train()
    Trainer(first, *task, make_pipeline(), **parts).train()
    saved = tmp_path / "first" / checkpoint.name_of(1)
    resumed = Trainer.from_checkpoint(saved, *task, make_pipeline(), {"num_epochs": 2}, **parts)
    resumed.train()
    assert torch.equal(weights_of(resumed), weights_of(straight))
    with pytest.raises(ValueError, match="start: 'images' there, 'noise' here"):
        Trainer.from_checkpoint(saved, *task, make_pipeline(), algorithm=RWR(temperature=0.5))


FLOW = {"sample_num_steps": 4, "sample_guidance_scale": 1.0, "sample_group_size": 2}


@pytest.mark.parametrize(
    ("algorithm", "recorded"),
    [
        (Branching(window=1), {"window": 1}),
        (FlowGRPO(window=2, sde="cps"), {"window": 2, "sde": "cps"}),
        (AWM(time_power=1.0), {"time_power": 1.0}),
        (NFT(beta=0.1), {"beta": 0.1}),
        (PEPG(scale=1.0), {"scale": 1.0}),
        (DPO(beta=10.0), {"beta": 10.0}),
        (DRaFT(last_steps=2), {"last_steps": 2}),
        (ReFL(margin=1.0), {"margin": "1.0"}),  # infinity is no JSON
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_run_records_its_algorithm_and_start_and_trains_from_images(tmp_path, algorithm, recorded):
    noise = {"sample_eta": 0.7} if isinstance(algorithm, DDPO) else {}
    unused = {name: getattr(DDPOConfig, name) for name in algorithm.unused}
    config = make_config(tmp_path, **{**FLOW, **noise, **unused})
    task = brightness, noisy_image, load_tiny_sd3()
    trainer = Trainer(config, *task, algorithm=algorithm, start=FromImages(0.75))
    assert trainer.record["algorithm"].items() >= recorded.items()
    assert (trainer.record["start"], trainer.record["noise_strength"]) == ("images", 0.75)
    before = weights_of(trainer)
    trainer.train()
    assert not torch.equal(before, weights_of(trainer))


def test_a_checkpoint_of_compat_is_not_one_of_the_trainer(tmp_path):
    """They train other timesteps on the same settings."""
    config = make_config(tmp_path, sample_num_steps=4, train_timestep_fraction=0.5)
    compat.ImageDDPOTrainer(config, brightness, noisy_image, make_pipeline(), noise_strength=0.5).train()
    with pytest.raises(ValueError, match="start: 'images, as by imageddpo' there, 'images' here"):
        ImageDDPOTrainer.from_checkpoint(
            tmp_path / "checkpoint-000001", brightness, noisy_image, make_pipeline(), noise_strength=0.5
        )


if __name__ == "__main__":
    in_a_launched_process(Path(sys.argv[1]))
