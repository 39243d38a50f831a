"""What works on the CPU must work where accelerate chooses a GPU; see `fake_device`."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, PartialState
from fake_device import DEVICE, HOST, Traffic, fake_device
from helpers import NOT_CLIPPED, brightness, each_prompt, make_config, make_pipeline, noisy_image, red_three
from PIL import Image

from ddpo_lessons.app import cli, demo, options
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.data.prompts import damaged_handwriting, get_prompts
from ddpo_lessons.rewards import (
    RewardFunction,
    decorruption,
    digit_legibility,
    prompt_alignment,
    recolouring,
)
from ddpo_lessons.run import checkpoint
from ddpo_lessons.run.runlog import read_metrics
from ddpo_lessons.text.models import ValueModel, load_text_models
from ddpo_lessons.text.trainer import TextPPOConfig, TextPPOTrainer
from ddpo_lessons.tiny import load_judge, load_tiny_sd, world
from ddpo_lessons.tiny.classifier import accuracy
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer, Runner, RWRTrainer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    with fake_device() as traffic:
        yield traffic


# ------------------------------------------------------------------------------------- the device itself
def test_tensors_on_the_device_have_values_and_a_place(traffic: Traffic) -> None:
    host = torch.arange(6.0).view(2, 3)
    on_device = host.to("cuda")
    assert (host.device, on_device.device, on_device.cpu().device) == (HOST, DEVICE, HOST)
    assert on_device.is_cuda
    assert not on_device.is_cpu
    assert on_device.to(DEVICE) is on_device  # nothing to copy
    assert (2 * on_device).sum().item() == 30
    for made in (
        torch.zeros(2, device=DEVICE),
        torch.tensor([1, 2], device=DEVICE),
        torch.zeros_like(host, device=DEVICE),
        torch.as_tensor(host, dtype=torch.float64, device=DEVICE),
        on_device.new_zeros(2),
        on_device[1:].T,
        on_device.to(torch.bfloat16),
        host.to(on_device),
        host.cuda(),
        copy.deepcopy(on_device),
        on_device.max(dim=1).values,
        torch.randn(2, device=DEVICE),
    ):
        assert made.device == DEVICE
    assert torch.zeros_like(on_device, device=HOST).device == HOST
    host[0] = on_device[1]
    assert host.device == HOST
    assert host[0].tolist() == [3, 4, 5]


def test_gradients_are_on_the_device(traffic: Traffic) -> None:
    layer = torch.nn.Linear(2, 1).to(DEVICE)
    pixels = torch.rand(4, 2, device=DEVICE)
    layer(pixels).sum().backward()
    assert layer.weight.device == layer.weight.grad.device == DEVICE
    assert torch.equal(layer.weight.grad[0], pixels.sum(0))
    before = torch.rand(2, requires_grad=True)
    (2 * before.to(DEVICE)).sum().backward()
    assert before.grad.tolist() == [2, 2]


def test_accelerate_chooses_the_device(traffic: Traffic) -> None:
    assert PartialState().device.type == "cuda"
    module = torch.nn.Linear(2, 2)
    assert Accelerator().prepare(module).weight.device == DEVICE


@pytest.mark.parametrize(
    "mix",
    [
        lambda host, there: host + there,
        lambda host, there: there.mul_(host),
        lambda host, there: host.sum().add_(there.sum()),
        lambda host, there: torch.cat([host, there]),
        lambda host, there: torch.stack([host.sum(), there.sum()]),
        lambda host, there: torch.nn.Linear(3, 1)(there),
        lambda host, there: there.gather(0, host.long()),
        lambda host, there: host[there.long()],
        lambda host, there: torch.where(there > 0, host, there),
        lambda host, there: torch.randn(3, device=DEVICE, generator=torch.Generator()),
        lambda host, there: there.normal_(generator=torch.Generator()),
    ],
)
def test_devices_do_not_mix(traffic: Traffic, mix: Callable[..., Any]) -> None:
    host = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"device"):
        mix(host, host.to(DEVICE))


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, np.asarray])
def test_numpy_takes_tensors_of_the_host_only(traffic: Traffic, convert: Callable[..., Any]) -> None:
    assert convert(torch.zeros(3, device=DEVICE).cpu()).shape == (3,)
    with pytest.raises(TypeError, match=r"Tensor\.cpu\(\)"):
        convert(torch.zeros(3, device=DEVICE))


@pytest.mark.parametrize(
    ("use", "to_device", "to_host", "waits"),
    [
        (lambda host, there: host.to(DEVICE), 1, 0, 0),
        (lambda host, there: torch.tensor([1], device=DEVICE), 1, 0, 0),
        (lambda host, there: there.new_tensor([1]), 1, 0, 0),
        (lambda host, there: there.copy_(host), 1, 0, 0),
        (lambda host, there: there[host.long()], 1, 0, 0),
        (lambda host, there: there[[0, 1]], 1, 0, 0),
        (lambda host, there: there.__setitem__(0, host[0]), 1, 0, 0),
        (lambda host, there: there.cpu(), 0, 1, 0),
        (lambda host, there: there.to("cpu", torch.float64), 0, 1, 0),
        (lambda host, there: host.copy_(there), 0, 1, 0),
        (lambda host, there: there[0].item(), 0, 0, 1),
        (lambda host, there: there.tolist(), 0, 0, 1),
        (lambda host, there: bool(there.isfinite().all()), 0, 0, 1),
        (lambda host, there: float(there[0]), 0, 0, 1),
        (lambda host, there: f"{there[0]:.2f}", 0, 0, 1),
        (lambda host, there: torch.tensor([there[0], there[1]]), 0, 0, 1),
        (lambda host, there: there.nonzero(), 0, 0, 1),
        (lambda host, there: there[there > 0], 0, 0, 1),
        (lambda host, there: torch.where(there > 0), 0, 0, 1),
        (lambda host, there: torch.unique(there), 0, 0, 1),
        (lambda host, there: there.repeat_interleave(there.long()), 0, 0, 1),
        (lambda host, there: torch.cuda.synchronize(), 0, 0, 1),
        (lambda host, there: there.to(DEVICE), 0, 0, 0),
        (lambda host, there: there + host[0] + 1, 0, 0, 0),
        (lambda host, there: torch.where(there > 0, there, 0.0), 0, 0, 0),
        (lambda host, there: there.__setitem__(there > 0, 0.5), 0, 0, 0),
        (lambda host, there: there.repeat_interleave(2), 0, 0, 0),
        (lambda host, there: torch.zeros(3, device=DEVICE), 0, 0, 0),
        (lambda host, there: host.tolist(), 0, 0, 0),
    ],
)
def test_traffic_is_counted(
    traffic: Traffic, use: Callable[..., Any], to_device: int, to_host: int, waits: int
) -> None:
    host = torch.zeros(3)
    there = host.to(DEVICE)
    traffic.clear()
    use(host, there)
    assert [counter.total() for counter in vars(traffic).values()] == [to_device, to_host, waits]


def test_traffic_names_the_packages_line(traffic: Traffic) -> None:
    images = torch.rand(2, 3, 8, 8, device=DEVICE)
    decorruption()(images, ["", ""], [{"target": image} for image in images])
    assert {line.partition(":")[0] for line in traffic.waits} == {"rewards/base.py"}
    traffic.clear()
    images.sum().item()
    assert [line.partition(":")[0] for line in traffic.waits] == ["tests/test_device.py"]
    assert str(traffic).startswith("     1 waits     tests/test_device.py:")


def test_autocast_of_the_device_works(traffic: Traffic) -> None:
    there = torch.rand(2, 2, device=DEVICE)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (there @ there).dtype == torch.bfloat16
    assert torch.amp.GradScaler("cuda").is_enabled()


def patched() -> list[Any]:
    return [
        torch.cuda.synchronize,
        torch._C._group_tensors_by_device_and_dtype,
        torch.autocast.__init__,
        torch.cuda.amp.common.amp_definitely_not_available,
        PartialState.default_device,
    ]


def test_nothing_is_left_behind() -> None:
    outer, before = Accelerator(), patched()
    with contextlib.suppress(KeyError), fake_device():
        assert Accelerator().device.type == "cuda"
        assert not set(before) & set(patched())
        tensor = torch.zeros(2, device=DEVICE)
        raise KeyError
    assert patched() == before
    assert tensor.device == outer.device == Accelerator().device == HOST
    assert (tensor + torch.zeros(2)).numpy().tolist() == [0, 0]


# -------------------------------------------------------------------------------------------- training
SMALL = {"sample_num_steps": 6, "sample_num_batches_per_epoch": 2, "mixed_precision": "no"}


def make_trainer(kind: type[DDPOTrainer], folder: Path, **changes: Any) -> DDPOTrainer:
    """Make a trainer of tiny-sd: four samples, two optimizer steps."""
    config = make_config(folder, **{**SMALL, **changes})
    if kind is DDPOTrainer:
        return DDPOTrainer(config, prompt_alignment(), get_prompts("digit_world", 0), load_tiny_sd())
    prompts = damaged_handwriting(0, ["foggy"], [3])
    return ImageDDPOTrainer(config, digit_legibility(), prompts, load_tiny_sd(), noise_strength=0.5)


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record of metrics.jsonl, without its times."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, (int, float)) and not name.startswith("seconds")
    }


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", [ImageDDPOTrainer, DDPOTrainer])
def test_training_is_that_of_the_cpu(kind: type[DDPOTrainer], precision: str, tmp_path: Path) -> None:
    make_trainer(kind, tmp_path / "host", mixed_precision=precision).train()
    with fake_device():
        trainer = make_trainer(kind, tmp_path / "device", mixed_precision=precision)
        trainer.train()
        trainer.save_pretrained(tmp_path / "lora")
        assert {parameter.device for parameter in trainer.learner.trainable.values()} == {DEVICE}
    records = [read_metrics(tmp_path / name) for name in ("host", "device")]
    assert len(records[0]) == len(records[1]) == 3  # two steps and an epoch
    for expected, found in zip(*records, strict=True):
        assert numbers(found) == pytest.approx(numbers(expected), rel=1e-3, abs=1e-5)
    weights = [
        checkpoint.read(tmp_path / name / checkpoint.name_of(1))[0]["policy"] for name in ("host", "device")
    ]
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)
    assert any(weight.any() for name, weight in weights[1].items() if "lora_B" in name)  # trained
    assert list((tmp_path / "lora").glob("*.safetensors"))


def test_training_continues_from_a_checkpoint(tmp_path: Path, traffic: Traffic) -> None:
    changes = {"per_prompt_stat_tracking": True, "train_kl_coefficient": 0.1, "mixed_precision": "fp16"}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    DDPOTrainer(make_config(whole, num_epochs=2, **changes), brightness, red_three, make_pipeline()).train()
    DDPOTrainer(make_config(broken, **changes), brightness, red_three, make_pipeline()).train()
    DDPOTrainer.from_checkpoint(
        broken / checkpoint.name_of(1), brightness, red_three, make_pipeline(), {"num_epochs": 2}
    ).train()
    tensors = [checkpoint.read(folder / checkpoint.name_of(2))[0] for folder in (whole, broken)]
    torch.testing.assert_close(tensors[1], tensors[0], rtol=0, atol=0)


# ------------------------------------------------------------------------------ what crosses, what waits
RUNS: dict[str, tuple[type[Runner], dict[str, Any]]] = {
    "text-to-image": (DDPOTrainer, {}),
    "img2img": (ImageDDPOTrainer, {}),
    "RWR": (RWRTrainer, NOT_CLIPPED),
    "KL": (DDPOTrainer, {"train_kl_coefficient": 1.0}),
    "full fine-tuning": (DDPOTrainer, {"train_use_lora": False}),
    "groups": (DDPOTrainer, {"sample_group_size": 2}),
    "fp16": (DDPOTrainer, {"mixed_precision": "fp16"}),
}


def crossings(run: str, folder: Path, **changes: Any) -> int:
    """Count transfers and waits of a second epoch: eight samples in passes of two, two optimizer steps."""
    kind, settings = RUNS[run]
    shape = {"sample_num_batches_per_epoch": 4, "train_batch_size": 4, "train_forward_size": 4}
    config = make_config(folder, **{**shape, "sample_forward_size": 2, **settings, **changes})
    draw = noisy_image if kind is ImageDDPOTrainer else each_prompt()
    with fake_device() as traffic:
        extra = {"noise_strength": 1.0} if kind is ImageDDPOTrainer else {}
        trainer = kind(config, brightness, draw, make_pipeline(), **extra)
        trainer.step(0)
        traffic.clear()
        trainer.step(1)
        return sum(sum(counter.values()) for counter in vars(traffic).values())


@pytest.mark.parametrize("run", RUNS)
def test_what_crosses_or_waits_is_counted_by_epoch_pass_and_step(run: str, tmp_path: Path) -> None:
    """Nothing in a group of pairs or a denoising step; little in the rest."""
    usual = crossings(run, tmp_path / "usual")
    assert crossings(run, tmp_path / "groups", train_forward_size=1) == usual  # 12 groups a step, not 3
    assert crossings(run, tmp_path / "long", sample_num_steps=6, train_forward_size=8) == usual
    per_step = (crossings(run, tmp_path / "steps", train_batch_size=2) - usual) / 2
    per_pass = (usual - crossings(run, tmp_path / "passes", sample_forward_size=8)) / 3
    assert per_step <= 2
    assert per_pass <= 10
    assert usual - 2 * per_step - 4 * per_pass <= 20


def test_every_run_ends_on_the_device(tmp_path: Path) -> None:
    for run, (kind, settings) in RUNS.items():
        with fake_device():
            config = make_config(tmp_path / run, **settings)
            draw = noisy_image if kind is ImageDDPOTrainer else red_three
            extra = {"noise_strength": 0.7} if kind is ImageDDPOTrainer else {}
            trainer = kind(config, brightness, draw, make_pipeline(), **extra)
            trainer.train()
            assert {p.device for p in trainer.learner.trainable.values()} == {DEVICE}
        assert read_metrics(tmp_path / run, "epoch")[0]["epoch"] == 1


def test_text_ppo_is_that_of_the_cpu() -> None:
    """It trains where its policy is; answers are drawn by the host's generator, so they are the same."""

    def lengths(texts: Any) -> torch.Tensor:
        return torch.tensor([float(len(text)) for text in texts])

    def history(place: torch.device) -> list[dict[str, float]]:
        models = load_text_models()
        policy = models.policy.to(place)
        config = TextPPOConfig(batch_size=4, minibatch_size=4, inner_epochs=1, max_new_tokens=6)
        value = ValueModel.from_policy(policy)
        trainer = TextPPOTrainer(config, policy, value, models.tokenizer, lengths, ["the plot"])
        trainer.step()
        return trainer.history

    expected = history(HOST)
    with fake_device():
        found = history(DEVICE)
    assert numbers(found[0]) == pytest.approx(numbers(expected[0]), rel=1e-3, abs=1e-5)


# --------------------------------------------------------------------------- rewards, judges and commands
PLACES = [HOST, DEVICE]


@pytest.fixture
def pictures() -> world.Pictures:
    return world.draw_pictures(8, "test", 0, "foggy", 3)


@pytest.mark.parametrize("digits_place", PLACES)
@pytest.mark.parametrize("images_place", PLACES)
@pytest.mark.parametrize("judge_place", PLACES)
def test_accuracy_reads_pictures_of_any_device(
    judge_place: torch.device,
    images_place: torch.device,
    digits_place: torch.device,
    pictures: world.Pictures,
    traffic: Traffic,
) -> None:
    expected = accuracy(load_judge(), pictures.images, pictures.digits)
    judge = load_judge().to(judge_place)
    assert accuracy(judge, pictures.images.to(images_place), pictures.digits.to(digits_place)) == expected
    assert next(judge.parameters()).device == judge_place


@pytest.mark.parametrize("make_reward", [digit_legibility, prompt_alignment, decorruption, recolouring])
def test_rewards_score_pictures_of_the_device(
    make_reward: Callable[[], RewardFunction], pictures: world.Pictures, traffic: Traffic
) -> None:
    metadata = [
        {"digit": int(digit), "target": clean, "image": clean}
        for digit, clean in zip(pictures.digits, pictures.clean, strict=True)
    ]
    prompts = ["a red three on a blue background"] * len(metadata)
    expected, found = (
        make_reward()(pictures.images.to(place), prompts, metadata) for place in (HOST, DEVICE)
    )
    expected, found = (result[0] if isinstance(result, tuple) else result for result in (expected, found))
    assert found.device == DEVICE  # as the images
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("images_place", PLACES)
def test_restore_takes_pictures_of_any_device(
    images_place: torch.device, pictures: world.Pictures, traffic: Traffic
) -> None:
    settings = {"noise_strength": 0.5, "num_steps": 6}
    expected = demo.restore(load_tiny_sd(), pictures.images, **settings)
    found = demo.restore(load_tiny_sd().to(DEVICE), pictures.images.to(images_place), **settings)
    assert found.device == HOST  # where the judges are
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_demo_runs_to_its_end(tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"sample_batch_size": 8, "sample_num_batches_per_epoch": 1, "sample_group_size": 2}
    init = DDPOConfig.__init__

    def init_small(self: DDPOConfig, **settings: Any) -> None:
        init(self, **{**settings, **small, "train_batch_size": 8})

    monkeypatch.setattr(DDPOConfig, "__init__", init_small)
    assert demo.run(options.Demo(epochs=1, eval_images=8, output_dir=tmp_path)) == 0
    assert json.loads((tmp_path / "results.json").read_text())
    assert traffic.to_device.total() > 0


@pytest.mark.parametrize("start", ["image", "noise"])
def test_sample_draws_on_the_device(start: str, tmp_path: Path, traffic: Traffic) -> None:
    picture, out = tmp_path / "picture.png", tmp_path / "out"
    Image.new("RGB", (32, 32), "red").save(picture)
    flags = {
        "image": ["--images", str(picture), "--noise-strength", "0.5"],
        "noise": ["--prompt", "a red three", "--count", "1"],
    }
    assert cli.main(["sample", *flags[start], "--steps", "4", "--output-dir", str(out)]) == 0
    made = {"image": "picture.png", "noise": "sample-000.png"}
    assert Image.open(out / made[start]).size == (32, 32)
    assert any(line.startswith("app/sample.py") for line in traffic.to_host)
