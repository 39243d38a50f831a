"""A device that has no memory for a forward pass: it is halved, and the run ends with the same weights."""

import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import brightness, each_prompt, flow_trainer, launch, make_config, make_pipeline, weights_of

from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.trainer import DDPOTrainer, Trainer
from ddpo_lessons.training.memory import OutOfMemory
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.validation import Validation

pytestmark = pytest.mark.usefixtures("one_thread", "bars")


# Two epochs of 8 samples, three steps, no guidance: 24 pairs in an optimizer step.
SIZES: dict[str, Any] = {
    "num_epochs": 2, "sample_guidance_scale": 1.0, "sample_batch_size": 2, "sample_num_batches_per_epoch": 4,
    "train_batch_size": 8,
}  # fmt: skip


class Full:
    """Lets a network run out of memory on more rows than fit, with or without gradient."""

    def __init__(self, network: torch.nn.Module, sampling: int = 10**6, training: int = 10**6) -> None:
        self.fits = {False: sampling, True: training}
        self.failures = 0
        network.register_forward_pre_hook(self.look, with_kwargs=True)

    def look(self, network: torch.nn.Module, args: Any, kwargs: Any) -> None:
        rows = len(args[0]) if args else len(kwargs["hidden_states"])
        if rows > self.fits[torch.is_grad_enabled()]:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def make(folder: Path, **changes: Any) -> DDPOTrainer:
    return DDPOTrainer(
        make_config(folder, **{**SIZES, **changes}), brightness, each_prompt(), make_pipeline()
    )


def test_training_is_halved_until_it_fits_and_trains_the_same_weights(tmp_path, capsys):
    trainer = make(tmp_path / "halved")
    full = Full(trainer.family.denoiser, training=4)
    trainer.train()
    # 24 pairs in one pass, then 12, 6 and 3, which fit: the second epoch begins there.
    assert full.failures == 3
    assert trainer.config.train_micro_batch_size == 3
    said = [line for line in capsys.readouterr().out.splitlines() if "out of memory" in line]
    assert [line.split(":")[0] for line in said] == ["out of memory in training"] * 3
    assert said[0] == (
        "out of memory in training: train_micro_batch_size 24 -> 12, and the epoch begins again; "
        "set train_micro_batch_size=12 so that the next run starts there"
    )
    small = make(tmp_path / "small", train_micro_batch_size=3)
    small.train()
    assert torch.equal(weights_of(trainer), weights_of(small))
    halved, same = (read_metrics(tmp_path / name, "step") for name in ("halved", "small"))
    assert halved == same  # no record of what was dropped
    assert len(halved) == 2


def test_sampling_is_halved_in_whole_batches(tmp_path, capsys):
    trainer = make(tmp_path / "halved")
    full = Full(trainer.family.denoiser, sampling=3)
    trainer.train()
    assert full.failures == 2  # 8 samples, 4, 2
    assert (trainer.config.sample_micro_batch_size, trainer.config.train_micro_batch_size) == (2, 0)
    assert "out of memory in sampling: sample_micro_batch_size 4 -> 2, " in capsys.readouterr().out
    small = make(tmp_path / "small", sample_micro_batch_size=2)
    small.train()
    assert torch.equal(weights_of(trainer), weights_of(small))


def test_both_are_halved_in_a_later_epoch_and_a_resumed_run_starts_there(tmp_path):
    trainer = make(tmp_path, num_epochs=1)
    trainer.train()
    before = weights_of(trainer)
    trainer.config.num_epochs = 2
    full = Full(trainer.family.denoiser, sampling=4, training=12)
    trainer.train()
    assert full.failures == 2
    assert (trainer.config.sample_micro_batch_size, trainer.config.train_micro_batch_size) == (4, 12)
    assert not torch.equal(before, weights_of(trainer))
    state = json.loads((tmp_path / "checkpoint-000002" / "state.json").read_text("utf-8"))
    assert state["config"]["train_micro_batch_size"] == 12
    resumed = DDPOTrainer.from_checkpoint(
        tmp_path / "checkpoint-000001", brightness, each_prompt(), make_pipeline(), {"num_epochs": 2}
    )
    resumed.train()
    assert len(read_metrics(tmp_path, "epoch")) == 2


@pytest.mark.parametrize("name", ["nft", "dpo", "draft:last_steps=2"])
def test_algorithms_that_predict_elsewhere_are_halved_too(name, tmp_path):
    """NFT asks an older policy, DPO two samples at a time, DRaFT takes steps again."""
    unused = {field: getattr(DDPOConfig, field) for field in make_algorithm(name).unused}
    settings = {**SIZES, **unused, "sample_group_size": 2, "num_epochs": 1}

    def train(limit: int = 10**6, **changes: Any) -> Trainer:
        config = make_config(tmp_path / str(limit), **settings, **changes)
        algorithm = make_algorithm(name)
        trainer = Trainer(config, brightness, each_prompt(), make_pipeline(), algorithm=algorithm)
        Full(trainer.family.denoiser, training=limit)
        trainer.train()
        return trainer

    halved = train(limit=3)
    size = halved.config.train_micro_batch_size
    assert 1 <= size <= 3
    assert torch.equal(weights_of(halved), weights_of(train(train_micro_batch_size=size)))


def test_a_flow_model_is_halved(tmp_path):
    trainer = flow_trainer(tmp_path, make_algorithm("flow_grpo"), None, None, num_epochs=1)
    Full(trainer.family.denoiser, training=2)
    trainer.train()
    assert trainer.config.train_micro_batch_size == 2


@pytest.mark.parametrize(
    ("limits", "changes", "says"),
    [
        ({"training": 0}, {}, "passes of 1 are the smallest; use train_gradient_checkpointing=True"),
        ({"training": 0}, {"train_gradient_checkpointing": True}, "smallest; use mixed_precision='bf16'"),
        ({"sampling": 1}, {}, "use sample_batch_size=1 with sample_num_batches_per_epoch=8"),
        (
            {"sampling": 0},
            {"sample_batch_size": 1, "sample_num_batches_per_epoch": 8},
            "passes of 1 are the smallest; use mixed_precision",
        ),
    ],
)  # fmt: skip
def test_where_nothing_can_be_halved_the_error_has_the_remedy(limits, changes, says, tmp_path):
    trainer = make(tmp_path, **changes)
    before = weights_of(trainer)
    Full(trainer.family.denoiser, **limits)
    with pytest.raises(torch.OutOfMemoryError, match=says) as caught:
        trainer.train()
    assert "Tried to allocate 2.00 GiB" in str(caught.value)
    assert torch.equal(weights_of(trainer), before)


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError])
def test_other_errors_are_not_taken_for_it(kind, tmp_path):
    def broken(*_: Any) -> torch.Tensor:
        raise kind("CUDA error")

    trainer = make(tmp_path)
    trainer.sampler.family.denoiser.register_forward_pre_hook(broken)
    with pytest.raises(kind, match="CUDA error"):
        trainer.train()
    assert trainer.config.sample_micro_batch_size == 0


def test_a_reward_that_runs_out_of_memory_halves_nothing(tmp_path):
    def large(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("in the reward")

    config = make_config(tmp_path, **SIZES)
    trainer = DDPOTrainer(config, large, each_prompt(), make_pipeline())
    with pytest.raises(torch.OutOfMemoryError, match=r"^in the reward$"):
        trainer.train()
    assert (trainer.config.sample_micro_batch_size, trainer.config.train_micro_batch_size) == (0, 0)


def test_what_the_failed_pass_held_is_free_before_the_next(tmp_path, monkeypatch):
    trainer, held, free = make(tmp_path, num_epochs=1), [], []

    def fail(network: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and len(args[0]) > 12:
            pass_of = torch.zeros(3)
            held.append(weakref.ref(pass_of))
            raise torch.OutOfMemoryError("full")

    trainer.family.denoiser.register_forward_pre_hook(fail, with_kwargs=True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append([ref() is None for ref in held]))
    trainer.train()
    assert free == [[True]]


def test_validation_generates_in_halves_what_does_not_fit(tmp_path):
    trainer, held_out = make(tmp_path), [(prompt, {}) for prompt in ("a", "b", "c")]
    whole = Validation(trainer, held_out).images(3)
    full = Full(trainer.family.denoiser, sampling=1)
    with pytest.warns(UserWarning, match="2 images do not fit into memory .* lower sample_batch_size"):
        halves = Validation(trainer, held_out).images(3)
    assert torch.allclose(halves, whole, atol=1e-5)
    assert full.failures == 2  # the first batch, of two, before training and here
    full.fits[False] = 0
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2.00 GiB"):
        Validation(trainer, held_out)


# ------------------------------------------------------------------------------------------- processes
def test_of_several_processes_one_that_runs_out_in_validation_names_the_size(tmp_path):
    """Each takes as many passes as the others, so none halves its own."""
    trainer = make(tmp_path)
    Full(trainer.family.denoiser, sampling=1)
    several = SimpleNamespace(num_processes=2, device=trainer.accelerator.device)
    trainer.sampler.share.accelerator = several
    with pytest.raises(OutOfMemory, match="use sample_batch_size=1 with sample_num_batches_per_epoch=8"):
        Validation(trainer, [(prompt, {}) for prompt in ("a", "b", "c")])


@pytest.mark.slow
def test_of_two_processes_one_that_runs_out_ends_both_with_the_remedy(tmp_path):
    together = launch(__file__, tmp_path, processes=2)
    _, errors = together.communicate(timeout=300)
    assert together.returncode != 0
    assert "set train_micro_batch_size=12 in every process" in errors


if __name__ == "__main__":
    import sys

    one = make(Path(sys.argv[1]), train_batch_size=8)
    if one.accelerator.process_index == 1:
        Full(one.family.denoiser, training=12)
    one.train()
