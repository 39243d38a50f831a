"""The worked examples of the docs: each runs as it stands, with its line of registration."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel
from helpers import brightness, generators, make_config, make_pipeline, printed_error, red_three

from ddpo_lessons import Trainer, rewards
from ddpo_lessons.algorithms import ALGORITHMS, make_algorithm
from ddpo_lessons.algorithms.ddpo import DDPO
from ddpo_lessons.cli import main as cli
from ddpo_lessons.data.starts import FromImages
from ddpo_lessons.models import FAMILIES, load_pipeline
from ddpo_lessons.rollout import SamplingSettings, text2img_rollout

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "architecture.md").read_text("utf-8")
FAMILY = (DOCS / "howto" / "own-model-family.md").read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE + FAMILY, re.DOTALL)
FILES = {match[1]: code for code in BLOCKS if (match := re.match(r'"""(ddpo_lessons/\S+): ', code))}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def example(request, monkeypatch):
    """Import an example as the module that it would be."""
    name = request.param.removesuffix(".py").replace("/", ".")
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    before = set(rewards.REWARDS)
    exec(compile(FILES[request.param], request.param, "exec"), module.__dict__)
    yield module
    for registered in set(rewards.REWARDS) - before:
        del rewards.REWARDS[registered]


def test_the_first_block_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(BLOCKS[0], {})
    assert (
        len((tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()) == 3
    )  # two steps, an epoch


def test_every_file_of_the_table_exists():
    table = PAGE[PAGE.index("## Which file?") : PAGE.index("## A run")]
    named = re.findall(r"`([a-z_]+(?:/[a-z_]*)*(?:\.py)?)`", table)
    files = [name for name in named if name.endswith((".py", "/"))]
    assert len(files) > 10
    root = Path(__file__).parents[1]
    assert [
        name for name in files if not (root / "ddpo_lessons" / name).exists() and not (root / name).exists()
    ] == []


def test_the_pages_have_three_short_examples():
    assert [path.split("/")[1] for path in FILES] == ["rewards", "algorithms", "models"]
    assert all(25 <= len(code.splitlines()) <= 110 for code in FILES.values())


@pytest.mark.parametrize("example", ["ddpo_lessons/rewards/named_color.py"], indirect=True)
def test_the_reward_is_registered_with_its_need_and_scores_by_hand(example, tmp_path, capsys):
    registered = rewards.REWARDS["named_color"]
    assert registered.needs == ("prompt",)
    images = torch.zeros(2, 3, 4, 4)
    images[0, 0] = 1  # all red
    scored, info = registered.make()(images, ("a red three", "a blue two"), ({}, {}))
    assert scored.tolist() == pytest.approx([0, -1])  # black is 1 away from blue
    assert info["brightness"].tolist() == pytest.approx([1 / 3, 0])
    flags = ["train", "--reward", "named_color", "--output-dir", str(tmp_path), "--num-epochs", "1"]
    sizes = ["--sample-batch-size", "4", "--train-batch-size", "4", "--sample-num-steps", "3"]
    assert cli.main([*flags, *sizes, "--prompt", "a three"]) == 2
    assert "must name one of red, green, blue" in printed_error(capsys)
    assert cli.main([*flags, *sizes, "--prompt", "a red three"]) == 0
    assert '"reward/brightness"' in (tmp_path / "metrics.jsonl").read_text("utf-8")


@pytest.mark.parametrize("example", ["ddpo_lessons/algorithms/score_function.py"], indirect=True)
def test_the_algorithm_takes_ddpos_first_step(example, monkeypatch, tmp_path):
    (line,) = re.findall(r'`"(score_function)": "(\w+)",`', PAGE)
    monkeypatch.setitem(ALGORITHMS, *line)
    sizes = {"sample_batch_size": 4, "train_batch_size": 4, "sample_group_size": 4, "train_clip_range": 1e-4}
    trainers = [
        Trainer(
            make_config(tmp_path / text, **sizes), brightness, red_three, make_pipeline(),
            algorithm=make_algorithm(text),
        )
        for text in ("ddpo", "score_function")
    ]  # fmt: skip
    records = [trainer.step(0) for trainer in trainers]
    assert records[0]["reward_mean"] == records[1]["reward_mean"]
    assert all(finding.passed for finding in trainers[1].preflight)
    ddpo, other = (trainer.learner.trainable for trainer in trainers)
    # At ratio 1 the gradient of -A ratio is that of -A log p, so the weights are equal to rounding.
    assert any(weight.abs().max() > 0 for name, weight in ddpo.items() if "lora_B" in name)
    for name, weight in ddpo.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=2e-6)
    two_steps = make_config(tmp_path / "two", **{**sizes, "train_batch_size": 2})
    with pytest.raises(ValueError, match="one optimizer step per epoch, not 2"):
        Trainer(two_steps, brightness, red_three, make_pipeline(), algorithm=make_algorithm("score_function"))


def make_pixels() -> DDIMPipeline:
    """Return an unconditional model of 16 x 16 pixels with random weights."""
    torch.manual_seed(0)
    unet = UNet2DModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    pipeline = DDIMPipeline(unet, DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("example", ["ddpo_lessons/models/pixel_space.py"], indirect=True)
def test_the_family_draws_what_plain_diffusers_draws_and_trains(example, monkeypatch, tmp_path):
    ((name, kind),) = re.findall(r'`"(DDIMPipeline)": (\w+),`', FAMILY)
    monkeypatch.setitem(FAMILIES, name, getattr(example, kind))
    pipeline = make_pixels()
    plain = pipeline(
        batch_size=2, generator=generators(1, 2), eta=1.0, num_inference_steps=4, output_type="np"
    ).images  # (2, 16, 16, 3)
    settings = SamplingSettings(num_inference_steps=4)
    ours, trajectory = text2img_rollout(pipeline, ["", ""], settings, generator=generators(1, 2))
    torch.testing.assert_close(ours, torch.tensor(plain).permute(0, 3, 1, 2), atol=1e-5, rtol=0)
    assert trajectory.latents.shape == (2, 4, 3, 16, 16)  # the last of four steps has no noise
    config = make_config(tmp_path / "run", train_use_lora=False)
    picture = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(3))
    trainer = Trainer(
        config, brightness, lambda: ("", picture, {}), make_pixels(), algorithm=DDPO(), start=FromImages(0.7)
    )
    trainer.train()
    assert len(trainer.preflight) == 4
    assert all(finding.passed for finding in trainer.preflight)
    trainer.save_pretrained(tmp_path / "saved")
    assert isinstance(load_pipeline(tmp_path / "saved"), DDIMPipeline)
