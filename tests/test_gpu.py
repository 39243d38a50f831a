"""What only a GPU can break, with tiny models: `make gpu` runs it there, and `make test` on the CPU.

Other files hold the same of the CPU: `test_trainer.py`, `test_families.py` and `test_flow_family.py`.
`test_device.py` counts transfers on a device that it makes up, `test_compiled.py` goes without inductor.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import (
    brightness,
    make_config,
    make_flux_pipeline,
    make_pipeline,
    make_sd3_pipeline,
    make_xl_pipeline,
    red_three,
    stir_adapter,
)
from torch import nn

from benchmarks.speed.gpu import count_waits
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.algorithms.flow_grpo import FlowGRPO
from ddpo_lessons.checks import preflight
from ddpo_lessons.smoke import smoke_run
from ddpo_lessons.trainer import Trainer
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.runlog import read_metrics

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [] if HAS_GPU else pytest.mark.slow
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
PRECISIONS = ["no", "bf16", pytest.param("fp16", marks=needs_gpu)]
MODELS = {"sd": make_pipeline, "xl": make_xl_pipeline, "sd3": make_sd3_pipeline, "flux": make_flux_pipeline}


def make_trainer(folder: Path, model: str = "sd", pipeline: Any = None, **changes: Any) -> Any:
    """Make a trainer of eight samples in passes of two, two optimizer steps."""
    shape = {"sample_num_batches_per_epoch": 4, "train_batch_size": 4, "sample_micro_batch_size": 2}
    is_flow = model in ("sd3", "flux")
    eta = {"sample_eta": 0.7} if is_flow else {}
    config = make_config(folder, **{**shape, "train_micro_batch_size": 2, **eta, **changes})
    algorithm = FlowGRPO() if is_flow else DDPO()
    return Trainer(config, brightness, red_three, pipeline or MODELS[model](), algorithm=algorithm)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_the_first_replay_has_ratio_one(model, precision, tmp_path):
    trainer = make_trainer(tmp_path, model, mixed_precision=precision)
    stir_adapter(trainer.learner.denoiser)
    trainer.step(0)
    assert {weight.device.type for weight in trainer.learner.trainable.values()} == {DEVICE}
    (first, *_) = read_metrics(tmp_path, "step")
    assert first["first_replay_max_ratio_error"] < 1e-4


def test_training_is_that_of_the_cpu(tmp_path, monkeypatch):
    """Noise and order are drawn by the host; without TF32 only rounding differs."""
    make_trainer(tmp_path / "device", allow_tf32=False).train()
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    trainer = make_trainer(tmp_path / "host")
    trainer.train()
    assert {weight.device.type for weight in trainer.learner.trainable.values()} == {"cpu"}
    (found,), (expected,) = (read_metrics(tmp_path / name, "epoch") for name in ("device", "host"))
    names = ("reward_mean", "reward_std")
    assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-3)
    found, expected = (read_metrics(tmp_path / name, "step")[0] for name in ("device", "host"))
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rehearsals_leave_weights_and_random_state(precision, tmp_path):
    trainer = make_trainer(tmp_path, mixed_precision=precision)
    stir_adapter(trainer.learner.denoiser)
    before, values = trainer.learner.copy_tensors(), trainer.state.values()
    seed = torch.cuda.get_rng_state() if HAS_GPU else torch.get_rng_state()
    assert preflight(trainer).failed == []
    found = smoke_run(trainer)
    assert found.is_gpu == HAS_GPU
    assert found.peak_bytes > 1e6
    assert torch.equal(torch.cuda.get_rng_state() if HAS_GPU else torch.get_rng_state(), seed)
    assert trainer.state.values() == values
    for kind, tensors in trainer.learner.copy_tensors().items():
        assert before[kind].keys() == tensors.keys()
        assert all(torch.equal(before[kind][name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_run_is_the_run_that_never_stopped(precision, tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # sums in one order
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        make_trainer(tmp_path / "whole", mixed_precision=precision, num_epochs=2).train()
        make_trainer(tmp_path / "broken", mixed_precision=precision).train()
        saved = tmp_path / "broken" / checkpoint.name_of(1)
        parts = brightness, red_three, make_pipeline()
        Trainer.from_checkpoint(saved, *parts, {"num_epochs": 2}, algorithm=DDPO()).train()
    finally:
        torch.use_deterministic_algorithms(False)
    tensors = [checkpoint.read(tmp_path / run / checkpoint.name_of(2))[0] for run in ("whole", "broken")]
    torch.testing.assert_close(tensors[1], tensors[0], rtol=0, atol=0)


@pytest.mark.parametrize("model", MODELS)
def test_what_is_saved_draws_the_same_with_plain_diffusers(model, tmp_path):
    trained, plain = MODELS[model](), MODELS[model]()
    trainer = make_trainer(tmp_path / "run", model, trained)
    stir_adapter(trainer.learner.denoiser)
    trainer.save_pretrained(tmp_path / "lora")

    def draw(pipeline: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        settings = {"num_inference_steps": 3, "height": 32, "width": 32, "output_type": "pt"}
        return pipeline.to(DEVICE)("a red three", generator=generator, **settings).images

    before = draw(plain)
    plain.load_lora_weights(tmp_path / "lora")
    found, expected = draw(plain), draw(trained)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    assert (found - before).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", *(pytest.param(p, marks=needs_gpu) for p in ("bf16", "fp16"))])
def test_a_compiled_network_has_the_gradients_of_its_own(precision, tmp_path, monkeypatch):
    """Compiled by inductor on a GPU; the trainer compares all gradients before its first step.

    Without gradients inductor makes other kernels: rescored by those, ratios were 0.3 from 1 on an H100.
    """
    torch._dynamo.reset()
    if not HAS_GPU:  # inductor takes minutes there
        monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="eager"))
    trainer = make_trainer(tmp_path, mixed_precision=precision, torch_compile=True)
    trainer.train()
    assert trainer.global_step == 2
    (first, *_) = read_metrics(tmp_path, "step")
    assert first["first_replay_max_ratio_error"] < 1e-4


@needs_gpu
@pytest.mark.parametrize("model", MODELS)
def test_nothing_waits_within_a_group_of_pairs(model, tmp_path):
    def waits(size: int) -> int:
        trainer = make_trainer(
            tmp_path / f"{size}", model, train_micro_batch_size=size, mixed_precision="fp16"
        )
        trainer.step(0)
        epoch: Callable[[], Any] = functools.partial(trainer.step, 1)
        return count_waits(epoch)

    assert waits(1) == waits(4)
