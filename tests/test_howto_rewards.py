"""The how-tos on rewards: their code runs as it stands there, on random models."""

import ast
import re
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CLIP_MEAN, CLIP_SIZE, CLIP_STD, howto_blocks, write_clip
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

from ddpo_lessons.app import cli
from ddpo_lessons.app.reward_flag import REWARDS
from ddpo_lessons.run.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[1]
SMALL = shlex.split("--sample-batch-size 4 --sample-num-batches-per-epoch 1 --train-batch-size 4")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("my", "serve"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


# ---------------------------------------------------------------------------------- a reward of one's own
@pytest.mark.slow
def test_rewards_of_ones_own_train(here, capsys):
    mine, best_of_8, _hps_v2, _image_reward, in_python = howto_blocks("own-reward", "python")
    (here / "my.py").write_text(mine)
    (here / "models" / "clip").mkdir(parents=True)
    write_clip(here / "models" / "clip")
    (here / "my-images").mkdir()
    Image.new("RGB", (32, 32), "red").save("my-images/a.png")
    lines = [line for block in howto_blocks("own-reward", "sh") for line in block.splitlines()]
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
    exec(compile(best_of_8, "own-reward.md", "exec"), {})
    one, best = re.findall(r"\d\.\d{3}", capsys.readouterr().out)
    assert 0 < float(one) < float(best) < 1
    exec(compile(in_python, "own-reward.md", "exec"), {})
    assert len(read_metrics("sum-run", "epoch")) == 1


def test_the_page_names_the_models_that_are_asked():
    text = (ROOT / "docs" / "howto" / "own-reward.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, flags=re.MULTILINE))
    for name, models_of_row in rows.items():
        assert len(models_of_row.split(" @ ")) == len(REWARDS[name]), name
    in_prose = {"edit", "clip_margin", "clip_change"}
    assert set(rows) | in_prose == {name for name, asked in REWARDS.items() if asked}


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


def test_the_pages_service_scores_what_its_client_asks(here, llava, monkeypatch):
    serve_code, server_code, client_code = howto_blocks("reward-service", "python")
    (here / "serve.py").write_text(serve_code)
    import serve

    made: list[Any] = []
    server_code = server_code.replace("llava-hf/llava-1.5-7b-hf", llava.as_posix())
    server_code = server_code.replace("torch.bfloat16", "torch.float32")  # for a sharp comparison
    with monkeypatch.context() as patch:
        patch.setattr(serve.HTTPServer, "serve_forever", lambda server: made.append(server))
        exec(compile(server_code.replace("8000", "0"), "page", "exec"), {})
    (server,) = made
    images = torch.rand(3, 3, 48, 40, generator=torch.Generator().manual_seed(1))
    prompts, metadata = ("a red three", "a cat", "a red cat three"), ({"image": images[0]},) * 3
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    client: dict[str, Any] = {}
    exec(compile(client_code.replace("8000", str(server.server_port)), "page", "exec"), client)
    scores, _ = client["llava"](images, prompts, metadata)
    server.shutdown()
    server.server_close()
    torch.testing.assert_close(scores, one_by_one(llava, images, prompts), atol=1e-4, rtol=0)
    assert scores.max() - scores.min() > 0.1


def one_by_one(llava: Path, images: torch.Tensor, prompts: tuple[str, ...]) -> torch.Tensor:
    """The probabilities of Yes, each from a pass of its own, written without processor and padding."""
    ids = {word: number for number, word in enumerate(WORDS.split())}
    model = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32).eval()
    scores = []
    for image, prompt in zip(images, prompts, strict=True):
        words = f"USER : {'<image> ' * 16}Does this image show ' {prompt} '? Answer Yes or No . ASSISTANT :"
        tokens = torch.tensor([[ids[word] for word in words.split()]])
        picture = Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy())
        pixels = torch.tensor(
            list(picture.resize((CLIP_SIZE, CLIP_SIZE), Image.Resampling.BICUBIC).tobytes())
        )
        pixels = pixels.reshape(CLIP_SIZE, CLIP_SIZE, 3).permute(2, 0, 1) / 255
        mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (CLIP_MEAN, CLIP_STD))
        with torch.no_grad():
            logits = model(input_ids=tokens, pixel_values=((pixels - mean) / std)[None]).logits[0, -1]
        yes, no = logits[ids["Yes"]].float(), logits[ids["No"]].float()
        scores.append(torch.sigmoid(yes - no))
    return torch.stack(scores)


def test_a_service_needs_numpy_alone():
    tree = ast.parse(howto_blocks("reward-service", "python")[0])
    modules = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}
    assert modules == {
        "import io", "import json", "from http.server import BaseHTTPRequestHandler, HTTPServer",
        "import numpy as np",
    }  # fmt: skip
