"""A compiled UNet trains the same weights, or the run ends before a step.

The backends here trace the UNet as torch.compile does and then run torch's own kernels, which takes seconds;
inductor's takes minutes and is not run.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import brightness, make_config, make_pipeline, red_three
from torch import nn

from ddpo_lessons.trainer import DDPOTrainer
from ddpo_lessons.training import learner
from ddpo_lessons.training.compiled import WrongGradientsError, check_gradients
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.slow

Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]


def traced(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    """Run the traced graph as it is."""
    return graph.forward


def other_kernels_without_gradients(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    """Give outputs that are 10% larger where no gradient is needed, as if other kernels had run."""
    factor = 1.0 if torch.is_grad_enabled() else 1.1

    def run(*inputs: Any) -> Any:
        return tuple(out * factor for out in graph(*inputs))

    return run


def forgets_most_of_the_gradient(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    """Give the right output with a quarter of its gradient."""

    def run(*inputs: Any) -> Any:
        return tuple(out.detach() + (out - out.detach()) / 4 for out in graph(*inputs))

    return run


@pytest.fixture
def make_trainer(tmp_path, monkeypatch):
    def make(backend: Backend, **settings: Any) -> DDPOTrainer:
        torch._dynamo.reset()
        monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend=backend))
        folder = tmp_path / f"compiled-{settings.get('torch_compile')}"
        return DDPOTrainer(make_config(folder, **settings), brightness, red_three, make_pipeline())

    return make


def test_compiled_training_gives_the_same_weights_and_compares_each_shape_once(make_trainer, monkeypatch):
    compared: list[int] = []

    def spy(names: list[str], compiled: list[torch.Tensor], own: list[torch.Tensor]) -> None:
        compared.append(len(names))
        check_gradients(names, compiled, own)

    monkeypatch.setattr(learner, "check_gradients", spy)
    weights = []
    for torch_compile in (True, False):
        # 2 samples of 3 timesteps, 4 pairs at most: groups of 3 and 3 pairs. The second epoch's prompts are
        # empty, so that its passes hold 3 pairs instead of 6.
        settings = {"num_epochs": 2, "train_micro_batch_size": 4, "torch_compile": torch_compile}
        trainer = make_trainer(traced, **settings)
        trainer.prompt_function = lambda trainer=trainer: ("" if trainer.epochs_done else "a red three", {})
        trainer.train()
        assert (trainer.pipeline.unet._compiled_call_impl is not None) == torch_compile
        weights.append(trainer.learner.trainable.values())
    assert compared == [len(weights[0])] * 2
    for compiled, own in zip(*weights, strict=True):
        torch.testing.assert_close(compiled, own, rtol=1e-4, atol=1e-6)


def test_in_low_precision_old_log_probs_are_of_the_kernels_that_train(make_trainer):
    trainer = make_trainer(other_kernels_without_gradients, torch_compile=True, mixed_precision="bf16")
    with pytest.warns(UserWarning, match=r"agree up to rounding: .*kernels round too .* torch_compile=False"):
        trainer.train()
    (first, *_) = read_metrics(trainer.config.run_dir, "step")
    assert first["first_replay_max_ratio_error"] == 0
    assert first["max_sampling_error"] > 0.02


def test_wrong_gradients_end_the_run_before_a_step(make_trainer):
    trainer = make_trainer(forgets_most_of_the_gradient, torch_compile=True)
    before = [weight.detach().clone() for weight in trainer.learner.trainable.values()]
    with pytest.raises(WrongGradientsError, match=r"torch_compile=True: .* 75% off.*Set torch_compile=False"):
        trainer.train()
    assert trainer.global_step == 0
    assert all(torch.equal(a, b) for a, b in zip(trainer.learner.trainable.values(), before, strict=True))
    assert not list(trainer.config.run_dir.glob("checkpoint-*"))


def test_gradients_are_compared_by_weight():
    own = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.02])]  # norms 5 and 0.02
    check_gradients(["a", "b"], own, own)
    check_gradients(["a", "b"], [torch.tensor([3.0, 2.0]), own[1]], own)  # 2 / 5
    check_gradients(["a", "b"], [own[0], torch.tensor([0.0, 0.0])], own)  # 0.02 / (5 / 100)
    with pytest.raises(WrongGradientsError, match="80% off, in 1 of 2 weights, such as a;"):
        check_gradients(["a", "b"], [torch.tensor([3.0, 0.0]), own[1]], own)  # 4 / 5
    with pytest.raises(WrongGradientsError, match="60% off, in 1 of 2 weights, such as b;"):
        check_gradients(["a", "b"], [own[0], torch.tensor([0.0, 0.05])], own)  # 0.03 / 0.05
    with pytest.raises(WrongGradientsError, match="in 1 of 2 weights, such as b;"):
        check_gradients(["a", "b"], [own[0], torch.tensor([0.0, torch.nan])], own)


def test_a_unet_that_an_earlier_trainer_compiled_is_not_used(tmp_path):
    pipeline = make_pipeline()
    pipeline.unet.compile(backend="eager")
    trainer = DDPOTrainer(make_config(tmp_path), brightness, red_three, pipeline)
    assert trainer.pipeline.unet._compiled_call_impl is None
