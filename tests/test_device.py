"""What works on the CPU must work where accelerate chooses a GPU; see `fake_device`."""

import copy
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import matplotlib.pyplot as plt
import pytest
import torch
import transformers
from accelerate import Accelerator, PartialState
from fake_device import DEVICE, HOST, fake_device
from helpers import NOT_CLIPPED, brightness, each_prompt, make_config, make_pipeline, noisy_image, red_three
from IPython.core.getipython import get_ipython
from PIL import Image

from benchmarks.results.recolor import restore
from benchmarks.speed.full_run import LESSON
from benchmarks.speed.lessons import play
from benchmarks.tiny.requests import edit_requests
from ddpo_lessons.algorithms.branching import branch_advantages
from ddpo_lessons.algorithms.rwr import RWR
from ddpo_lessons.cli import main as cli
from ddpo_lessons.cli import options
from ddpo_lessons.config import DDPOConfig
from ddpo_lessons.damages import DAMAGES
from ddpo_lessons.flow import FlowSchedule
from ddpo_lessons.lessons import demo, run_sets, set_up
from ddpo_lessons.named_prompts import get_prompts
from ddpo_lessons.rewards import colorfulness, prompt_alignment, recoloring
from ddpo_lessons.text.language_models import ValueModel, load_text_models
from ddpo_lessons.text.text_trainer import TextPPOConfig, TextPPOTrainer
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer, Trainer
from ddpo_lessons.training import checkpoint
from ddpo_lessons.training.runlog import read_metrics
from ddpo_lessons.worlds import animals, digits, load_tiny_sd
from ddpo_lessons.worlds.digits import accuracy, judge_edits, score_prompts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def traffic():
    with fake_device() as traffic:
        yield traffic


def test_the_device_refuses_what_cuda_refuses_and_counts_what_crosses_or_waits(traffic):
    """So that the tests below could fail."""
    host = torch.zeros(3)
    there = host.to(DEVICE)
    with pytest.raises(RuntimeError, match="device"):
        host + there
    assert float(there.sum()) == there.cpu().sum() == 0
    assert [counter.total() for counter in vars(traffic).values()] == [1, 1, 1]
    colorfulness()(there.expand(2, 3, 8, 3), ["", ""], [{}, {}])
    assert any(line.startswith("image.py:") for line in traffic.waits)


def test_a_copy_of_tensors_of_both_sides_leaves_each_where_it_is(traffic):
    both = {"host": torch.zeros(3), "there": torch.ones(3).to(DEVICE)}
    copies = copy.deepcopy({"first": both, "again": both})
    assert copies["again"]["host"].device == HOST
    assert copies["again"]["there"].device == DEVICE
    assert copies["again"] is copies["first"]


# ------------------------------------------------------------------------------------------- lessons
@pytest.fixture
def own_environment(monkeypatch):
    """Take back what `set_up` leaves in the environment and in libraries."""
    for name in ("ACCELERATE_USE_CPU", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with plt.style.context("default"):
        yield
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.enable_progress_bar()


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_lessons_stay_on_the_cpu(device, own_environment, tmp_path):
    with (
        fake_device() as traffic,
        mock.patch("accelerate.PartialState.default_device", torch.device(device)),
    ):
        set_up()
        set_up()  # its cell is run again
        assert PartialState().device == Accelerator().device == HOST
        for precision in ("no", "bf16"):  # accelerate's state is made anew
            trainer = make_trainer(DDPOTrainer, tmp_path / precision, mixed_precision=precision)
            assert {weight.device for weight in trainer.learner.trainable.values()} == {HOST}
    assert traffic.to_device.total() == 0


@pytest.mark.parametrize("made", [Accelerator, PartialState])
def test_a_kernel_that_computes_elsewhere_has_to_be_restarted(made, own_environment, traffic):
    """accelerate checks its variable against an Accelerator only, and else goes on where it was."""
    made()
    with pytest.raises(RuntimeError, match="already uses cuda in this kernel: restart"):
        set_up()


def test_lesson_13_in_small_runs_on_a_gpu(own_environment, traffic, monkeypatch):
    """All of its cells, of which the small scale stays on the CPU by itself."""
    write_all = animals.write_images

    def write_few(*arguments: Any, **settings: Any) -> Path:
        folder = write_all(*arguments, **settings)
        for name in animals.ANIMALS[6:]:
            shutil.rmtree(folder / name)
        return folder

    monkeypatch.setattr(animals, "write_images", write_few)
    monkeypatch.setattr("ddpo_lessons.lessons._stay_on_cpu", lambda: None)
    settings = {
        "num_epochs": 2, "sample_num_steps": 12, "sample_guidance_scale": 1.0, "sample_batch_size": 8,
        "sample_num_batches_per_epoch": 1, "sample_group_size": 8, "train_batch_size": 8,
    }  # fmt: skip
    played = play(LESSON, {"13-001": {"DEVICE": "cuda"}, "13-006": {"EVERY": 1, "SETTINGS": settings}})
    assert get_ipython() is None  # no shell is left for the tests that follow
    assert played["trainer"].accelerator.device.type == "cuda"
    assert played["trainer"].epochs_done == 2
    assert traffic.to_device.total() > 0


# -------------------------------------------------------------------------------------------- training
SMALL = {"sample_num_steps": 6, "sample_num_batches_per_epoch": 2, "mixed_precision": "no"}


def make_trainer(kind: type[DDPOTrainer], folder: Path, **changes: Any) -> DDPOTrainer:
    """Make a trainer of tiny-sd: four samples, two optimizer steps."""
    config = make_config(folder, **{**SMALL, **changes})
    if kind is DDPOTrainer:
        return DDPOTrainer(config, prompt_alignment(), get_prompts("digit_world", 0), load_tiny_sd())
    task = config, recoloring(), edit_requests(0), load_tiny_sd()
    return ImageDDPOTrainer(*task, noise_strength=0.5)


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record of metrics.jsonl, without its times."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, (int, float)) and not name.startswith("seconds")
    }


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("kind", [ImageDDPOTrainer, DDPOTrainer])
def test_training_is_that_of_the_cpu(kind, precision, tmp_path):
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


def test_training_continues_from_a_checkpoint(tmp_path, traffic):
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
RUNS: dict[str, tuple[Callable[..., Trainer], dict[str, Any]]] = {
    "text-to-image": (DDPOTrainer, {}),
    "img2img": (functools.partial(ImageDDPOTrainer, noise_strength=1.0), {}),
    "RWR": (functools.partial(Trainer, algorithm=RWR()), NOT_CLIPPED),
    "KL": (DDPOTrainer, {"train_kl_coefficient": 1.0}),
    "full fine-tuning": (DDPOTrainer, {"train_use_lora": False}),
    "groups": (DDPOTrainer, {"sample_group_size": 2}),
    "fp16": (DDPOTrainer, {"mixed_precision": "fp16"}),
}
PROMPTS = {"img2img": noisy_image}  # the others go round prompts


def crossings(run: str, folder: Path, **changes: Any) -> int:
    """Count transfers and waits of a second epoch: eight samples in passes of two, two optimizer steps."""
    kind, settings = RUNS[run]
    shape = {"sample_num_batches_per_epoch": 4, "train_batch_size": 4, "train_micro_batch_size": 4}
    config = make_config(folder, **{**shape, "sample_micro_batch_size": 2, **settings, **changes})
    with fake_device() as traffic:
        trainer = kind(config, brightness, PROMPTS.get(run, each_prompt()), make_pipeline())
        trainer.step(0)
        traffic.clear()
        trainer.step(1)
        assert {weight.device for weight in trainer.learner.trainable.values()} == {DEVICE}
        return sum(sum(counter.values()) for counter in vars(traffic).values())


@pytest.mark.parametrize("run", RUNS)
def test_what_crosses_or_waits_is_counted_by_epoch_pass_and_step(run, tmp_path):
    """Nothing in a group of pairs or a denoising step; little in the rest."""
    usual = crossings(run, tmp_path / "usual")
    assert crossings(run, tmp_path / "groups", train_micro_batch_size=1) == usual  # 12 groups a step, not 3
    assert crossings(run, tmp_path / "long", sample_num_steps=6, train_micro_batch_size=8) == usual
    per_step = (crossings(run, tmp_path / "steps", train_batch_size=2) - usual) / 2
    per_pass = (usual - crossings(run, tmp_path / "passes", sample_micro_batch_size=8)) / 3
    assert per_step <= 2
    assert per_pass <= 10
    assert usual - 2 * per_step - 4 * per_pass <= 20


def test_text_ppo_is_that_of_the_cpu():
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
def pictures():
    return digits.draw_images(8, "test", 0, "foggy", 3)


@pytest.mark.parametrize("digits_place", PLACES)
@pytest.mark.parametrize("images_place", PLACES)
@pytest.mark.parametrize("judge_place", PLACES)
def test_accuracy_reads_pictures_of_any_device(judge_place, images_place, digits_place, pictures, traffic):
    expected = accuracy(digits.Judge.load(), pictures.images, pictures.digits)
    judge = digits.Judge.load().to(judge_place)
    assert accuracy(judge, pictures.images.to(images_place), pictures.digits.to(digits_place)) == expected
    assert next(judge.parameters()).device == judge_place


def on(place: torch.device, *models: torch.nn.Module) -> list[Any]:
    return [model.to(place) for model in models]


@pytest.mark.parametrize("images_place", PLACES)
@pytest.mark.parametrize("judge_place", PLACES)
def test_judges_of_the_digit_world_read_pictures_of_any_device(judge_place, images_place, traffic):
    edits = digits.draw_edits(8, "test", 0)
    expected = judge_edits(edits.targets, edits, digits.Judge.load(), digits.SecondJudge.load())
    judge, second_judge = on(judge_place, digits.Judge.load(), digits.SecondJudge.load())
    images = edits.targets.to(images_place)
    found = judge_edits(images, edits, judge, second_judge)
    assert {name: hits.tolist() for name, hits in found.items()} == {
        name: hits.tolist() for name, hits in expected.items()
    }
    assert {hits.device for hits in found.values()} == {HOST}
    shown = edits.inputs.descriptions
    assert score_prompts(judge, images, shown) == score_prompts(digits.Judge.load(), edits.targets, shown)


@pytest.mark.parametrize("images_place", PLACES)
@pytest.mark.parametrize("judge_place", PLACES)
def test_judges_of_the_animals_read_pictures_of_any_device(judge_place, images_place, traffic):
    edits = animals.draw_edits(6, 0)
    pictures = edits.wanted.images
    expected = animals.judge_edits(pictures, edits, animals.Judge.load(), animals.SecondJudge.load())
    evaluation = demo.Evaluation(edits)
    evaluation.judges = tuple(on(judge_place, *evaluation.judges))
    found = animals.judge_edits(pictures.to(images_place), edits, *evaluation.judges)
    assert {name: hits.tolist() for name, hits in found.items()} == {
        name: hits.tolist() for name, hits in expected.items()
    }
    assert evaluation.fractions(pictures.to(images_place))["all"] == expected["all"].double().mean()
    distance = animals.background_distance(pictures.to(images_place), ["red"] * 6, edits.background_masks)
    torch.testing.assert_close(
        distance.cpu(), animals.background_distance(pictures, ["red"] * 6, edits.background_masks)
    )


@pytest.mark.parametrize("damage", DAMAGES)
def test_pictures_of_the_device_are_damaged_as_those_of_the_host(damage, pictures, traffic):
    expected, found = (
        DAMAGES[damage](pictures.clean.to(place), 3, torch.Generator().manual_seed(0)) for place in PLACES
    )
    assert found.device == DEVICE
    torch.testing.assert_close(found.cpu(), expected)


def test_textures_of_the_device_are_those_of_the_host(traffic):
    base = torch.rand(2, 3, generator=torch.Generator().manual_seed(0))
    expected, found = (
        digits.texture(2, base.to(place), torch.Generator().manual_seed(1)) for place in PLACES
    )
    assert found.device == DEVICE
    torch.testing.assert_close(found.cpu(), expected)


def test_a_set_shows_images_that_were_made_on_the_device(pictures, traffic):
    made: Any = pictures.images.to(DEVICE)
    run = run_sets.Run(mock.Mock(), [], [], [made], [torch.arange(8.0).to(DEVICE)], [])
    (axes, *_) = run_sets.show_images({"A": run}, count=2).axes
    torch.testing.assert_close(torch.tensor(axes.images[0].get_array()), pictures.images[0].permute(1, 2, 0))


def test_a_flow_schedule_takes_noise_levels_of_the_device(traffic):
    sigmas = torch.tensor([1.0, 0.6, 0.0])
    expected, found = (FlowSchedule(sigmas.to(place), 0.7, HOST) for place in PLACES)
    assert found.stds.device == found.sigmas.device == HOST
    torch.testing.assert_close(found.stds, expected.stds, rtol=0, atol=0)


@pytest.mark.parametrize("make_reward", [prompt_alignment, recoloring])
def test_rewards_score_pictures_of_the_device(make_reward, pictures, traffic):
    metadata = [
        {"digit": int(digit), "image": clean}
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
def test_restore_takes_pictures_of_any_device(images_place, pictures, traffic):
    arguments = [""] * len(pictures.images), demo.Img2Img(0.5, 1.0, 6)
    expected = restore(load_tiny_sd(), pictures.images, *arguments)
    found = restore(load_tiny_sd().to(DEVICE), pictures.images.to(images_place), *arguments)
    assert found.device == HOST  # where the judges are
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- without float64
@pytest.mark.parametrize("run", [run for run in RUNS if run != "fp16"])
def test_training_needs_no_float64_on_the_device(run, tmp_path):
    """MPS has none. For fp16, torch's scaler of the loss takes float32 there, and float64 on CUDA."""
    kind, settings = RUNS[run]
    with fake_device(has_float64=False):
        with pytest.raises(TypeError, match="float64"):
            torch.zeros(3).to(DEVICE).double()
        draw = PROMPTS.get(run, each_prompt())
        trainer = kind(make_config(tmp_path, **settings), brightness, draw, make_pipeline())
        trainer.step(0)
        assert {weight.device for weight in trainer.learner.trainable.values()} == {DEVICE}


def test_what_is_computed_in_float64_is_computed_on_the_host(pictures):
    rewards = torch.tensor([0.0, 1.0, 2.0, 5.0])
    expected = branch_advantages(rewards, 2, 2), digits.lean(pictures.clean)
    with fake_device(has_float64=False):
        found = branch_advantages(rewards.to(DEVICE), 2, 2), digits.lean(pictures.clean.to(DEVICE))
        assert {tensor.device for tensor in found} == {DEVICE}
        torch.testing.assert_close([tensor.cpu() for tensor in found], list(expected))


def test_demo_runs_to_its_end(tmp_path, traffic, monkeypatch):
    small = {"sample_batch_size": 8, "sample_num_batches_per_epoch": 1, "sample_group_size": 2}
    init = DDPOConfig.__init__

    def init_small(self: DDPOConfig, **settings: Any) -> None:
        init(self, **{**settings, **small, "train_batch_size": 8})

    monkeypatch.setattr(DDPOConfig, "__init__", init_small)
    assert demo.run(options.Demo(epochs=1, eval_images=8, output_dir=tmp_path)) == 0
    assert json.loads((tmp_path / "results.json").read_text())
    assert traffic.to_device.total() > 0


@pytest.mark.parametrize("start", ["image", "noise"])
def test_sample_draws_on_the_device(start, tmp_path, traffic):
    picture, out = tmp_path / "picture.png", tmp_path / "out"
    Image.new("RGB", (32, 32), "red").save(picture)
    flags = {
        "image": ["--images", str(picture), "--noise-strength", "0.5"],
        "noise": ["--prompt", "a red three", "--count", "1"],
    }
    assert cli.main(["sample", *flags[start], "--steps", "4", "--output-dir", str(out)]) == 0
    made = {"image": "picture.png", "noise": "sample-000.png"}
    assert Image.open(out / made[start]).size == (32, 32)
    assert any(line.startswith("cli/sample.py") for line in traffic.to_host)


def test_sample_stays_on_the_cpu_where_training_does(tmp_path, traffic, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    arguments = ["--count", "1", "--steps", "4", "--output-dir"]
    assert cli.main(["sample", "--prompt", "a red three", *arguments, str(tmp_path / "out")]) == 0
    assert traffic.to_device.total() == 0
