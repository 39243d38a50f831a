"""The how-tos on rewards: their code runs as it stands there, on random models."""

import re
import shlex
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    CLIP_MEAN,
    CLIP_SIZE,
    CLIP_STD,
    each_prompt,
    howto_blocks,
    make_config,
    make_pipeline,
    printed_error,
    weights_of,
    write_clip,
)
from packaging.requirements import Requirement
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from ddpo_lessons.cli import main as cli
from ddpo_lessons.rewards import REWARDS
from ddpo_lessons.trainer import DDPOTrainer
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
CLIENT, SERVER, MODEL = howto_blocks("reward-service", "python")
SMALL = shlex.split("--sample-batch-size 4 --sample-num-batches-per-epoch 1 --train-batch-size 4")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("my", "my_model", "remote"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


# ---------------------------------------------------------------------------------- a reward of one's own
@pytest.mark.slow
def test_rewards_of_ones_own_train(here, capsys):
    mine, known, best_of_8, _hps_v2, _image_reward, in_python = howto_blocks("own-reward", "python")
    (here / "my.py").write_text(mine)
    (here / "models" / "clip").mkdir(parents=True)
    write_clip(here / "models" / "clip")
    (here / "my-images").mkdir()
    for name, color in (("a", "red"), ("b", "black")):
        Image.new("RGB", (32, 32), color).save(f"my-images/{name}.png")
    blocks = [block.replace("\\\n", " ") for block in howto_blocks("own-reward", "sh")]
    lines = [line for block in blocks for line in block.splitlines()]
    runs = {}
    for line in lines:
        words = shlex.split(line)[1:]
        assert cli.main([*words, *SMALL]) == 0
        records = read_metrics(words[-1], "epoch")
        runs[words[-1]] = [record["reward_mean"] for record in records]
        assert all(
            0 < record["reward/blueness" if "=" not in line else "reward/red"] < 1 for record in records
        )
    assert {name: len(rewards) for name, rewards in runs.items()} == {
        "red-run": 2,
        "edit-run": 2,
        "clip-run": 2,
    }
    assert 0 < min(runs["red-run"]) < max(runs["red-run"]) < 1
    capsys.readouterr()
    exec(compile(known, "own-reward.md", "exec"), {})
    assert capsys.readouterr().out == "0.000  b.png\n1.000  a.png\n"
    exec(compile(best_of_8, "own-reward.md", "exec"), {})
    one, best = re.findall(r"\d\.\d{3}", capsys.readouterr().out)
    assert 0 < float(one) < float(best) < 1
    exec(compile(in_python, "own-reward.md", "exec"), {})
    assert len(read_metrics("sum-run", "epoch")) == 1


def test_the_page_names_the_models_that_are_asked():
    text = (ROOT / "docs" / "howto" / "own-reward.md").read_text("utf-8")
    _, _, section = text.partition("## Rewards with a model")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, flags=re.MULTILINE))
    for name, models_of_row in rows.items():
        assert len(models_of_row.split(" @ ")) == len(REWARDS[name].models), name
    assert set(rows) == {name for name, known in REWARDS.items() if known.models}


# --------------------------------------------------------------------------------------- a service
SPECIAL = "<unk> <s> </s> <pad> <image>"
WORDS = f"{SPECIAL} USER ASSISTANT : Does this image show a red three cat ' '? Answer Yes or No ."
TEMPLATE = (
    "{% for m in messages %}USER : {% for c in m['content'] %}{% if c['type'] == 'image' %}<image> "
    "{% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT :{% endif %}"
)


def write_llava(folder: Path) -> Path:
    """Write a random LLaVA, whose images are 16 tokens, and its processor."""
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS.split())}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    side = {"height": CLIP_SIZE, "width": CLIP_SIZE}
    images = CLIPImageProcessorPil(size=side, crop_size=side, image_mean=CLIP_MEAN, image_std=CLIP_STD)
    LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**shape, image_size=CLIP_SIZE, patch_size=8),
        text_config=LlamaConfig(**shape, vocab_size=len(WORDS.split()), pad_token_id=3),
        image_token_index=4,
    )
    model = LlavaForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # the small initial weights would answer everything alike
            parameter.data.mul_(8)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return write_llava(tmp_path_factory.mktemp("llava"))


def test_the_pages_llava_returns_the_probability_of_yes(llava):
    code = MODEL.replace("llava-hf/llava-1.5-7b-hf", llava.as_posix())
    page: dict[str, Any] = {}
    exec(code.replace("torch.bfloat16", "torch.float32"), page)  # for a sharp comparison
    pixels = torch.randint(256, (3, 48, 40, 3), generator=torch.Generator().manual_seed(1)).byte()
    images = [Image.fromarray(image.numpy()) for image in pixels]
    prompts = ["a red three", "a cat", "a red cat three"]
    scores = page["score"](images, prompts)
    torch.testing.assert_close(scores, one_by_one(llava, images, prompts), atol=1e-4, rtol=0)
    assert scores.max() - scores.min() > 0.05


def one_by_one(llava: Path, images: list[Image.Image], prompts: list[str]) -> torch.Tensor:
    """The probabilities of Yes, each from a pass of its own, written without processor and padding."""
    ids = {word: number for number, word in enumerate(WORDS.split())}
    model = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32).eval()
    scores = []
    for image, prompt in zip(images, prompts, strict=True):
        words = f"USER : {'<image> ' * 16}Does this image show ' {prompt} '? Answer Yes or No . ASSISTANT :"
        tokens = torch.tensor([[ids[word] for word in words.split()]])
        pixels = torch.tensor(list(image.resize((CLIP_SIZE, CLIP_SIZE), Image.Resampling.BICUBIC).tobytes()))
        pixels = pixels.reshape(CLIP_SIZE, CLIP_SIZE, 3).permute(2, 0, 1) / 255
        mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (CLIP_MEAN, CLIP_STD))
        with torch.no_grad():
            logits = model(input_ids=tokens, pixel_values=((pixels - mean) / std)[None]).logits[0, -1]
        yes, no = logits[ids["Yes"]].float(), logits[ids["No"]].float()
        scores.append(torch.sigmoid(yes - no))
    return torch.stack(scores)


def redness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """What `MY_MODEL` computes, from the pixels that a PNG holds."""
    levels = (images[:, 0] * 255).round().double()
    return levels.mean(dim=(1, 2)) / 255 + torch.tensor([len(prompt) for prompt in prompts])


MY_MODEL = """
import os, time
from PIL import ImageStat

def score(images, prompts):
    if "hang" in prompts:
        time.sleep(600)
    if "die" in prompts:
        os._exit(1)
    if "raise" in prompts:
        raise KeyError("no digit")
    return [ImageStat.Stat(image).mean[0] / 255 + len(prompt) for image, prompt in zip(images, prompts)]
"""


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def service(here, monkeypatch):
    """The page's server, in a process of its own; yields its address, and the file of what it prints."""
    Path("my_model.py").write_text(MY_MODEL)
    Path("serve.py").write_text(SERVER)
    Path("remote.py").write_text(CLIENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("REWARD_URL", f"http://127.0.0.1:{port}")
    with open("printed", "w") as printed:
        process = subprocess.Popen([sys.executable, "serve.py", str(port)], stderr=printed)
    while not is_listening(port):
        assert process.poll() is None
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}", here / "printed"
    process.kill()
    process.wait()


def test_training_on_the_pages_service_is_training_on_its_model(service):
    def train(name: str, reward: Any) -> tuple[torch.Tensor, list[Any]]:
        seen: list[Any] = []

        def keep(batches: list[Any], step: int, tracker: Any) -> None:
            seen.extend(reward for batch in batches for reward in batch[3].tolist())

        config = make_config(name, sample_num_batches_per_epoch=2)
        trainer = DDPOTrainer(config, reward, each_prompt(), make_pipeline(), image_samples_hook=keep)
        trainer.train()
        return weights_of(trainer), seen

    import remote

    weights, rewards = train("remote", remote.score)
    expected_weights, expected = train("local", redness)
    assert rewards == expected
    assert len(set(rewards)) == 4
    assert torch.equal(weights, expected_weights)


@pytest.mark.parametrize(
    ("prompt", "tries", "cause"),
    [
        ("hang", 4, r"Read timed out\. \(read timeout=0\.3\)"),
        ("die", 4, "Connection refused"),
        ("raise", 1, r"500 Server Error: KeyError\('no digit'\) for url"),
    ],
)
def test_a_service_that_fails_ends_the_run_with_one_error(
    prompt, tries, cause, service, model, monkeypatch, capsys
):
    import remote

    waits: list[Any] = []
    monkeypatch.setattr(remote, "TIMEOUT", 0.3)
    monkeypatch.setattr(remote.Retry, "sleep", lambda retry, _=None: waits.append(retry.get_backoff_time()))
    url, printed = service
    words = ["--model", model, "--prompt", prompt, "--num-epochs", "1", "--sample-num-steps", "3"]
    flags = ["train", "--reward", "remote.py:score", "--output-dir", "run", *SMALL, *words]
    assert cli.main(flags) == 2
    assert re.match(f"error: the reward service {url} failed: .*{cause}", printed_error(capsys))
    assert waits == [0, 2, 4][: tries - 1]
    assert read_metrics("run") == []
    if prompt == "raise":
        assert remote.score(torch.ones(1, 3, 8, 8), ("four",), ({},)) == [5.0]  # the server goes on
        assert "KeyError: 'no digit'" in printed.read_text()


def test_the_pages_client_comes_with_diffusers():
    required = map(Requirement, metadata.requires("diffusers") or [])
    assert "requests" in {requirement.name for requirement in required if requirement.marker is None}
