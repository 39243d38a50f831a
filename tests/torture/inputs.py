"""What users type, write into files and return from functions: one clear error, and nothing begun."""

import importlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from ddpo_lessons.cli import main as cli

TEXTS = {
    "empty.txt": "",
    "cut.json": '["a cat", ',
    "broken.yaml": "num_epochs: [1\n",
    "typo.yaml": "num_epoch: 3\n",
    "old/config.json": "{",
    "old/metrics.jsonl": "",
    "captioned/a.txt": " \n",
    "pretends/a.jpg": "GIF89a, or not",
    "torture_mine.py": """import torch
def two(images, prompts): return [0.0] * len(images)
def a_dict(images, prompts, metadata): return {"red": 1.0}
def one_more(images, prompts, metadata): return [0.0] * (len(images) + 1)
def three(images, prompts, metadata): return [0.0] * len(images), {}, {}
def infinite(images, prompts, metadata): return images.mean(dim=(1, 2, 3)).log() - float("inf")
def nothing(images, prompts, metadata): print("scored")
def label(images, prompts, metadata): return [len(entry["label"]) for entry in metadata]
def opens(images, prompts, metadata): return open("weights.bin").read()
""",
    "torture_raises.py": "import nowhere_installed\n",
}
OWN = "train --num-epochs 1 --sample-batch-size 4 --train-batch-size 4 --reward torture_mine.py:"
# The words, and what the error must hold: the field, and what to do or what is right.
INPUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # numbers and words of flags
    ("train --num-epochs -3", ("num_epochs=-3", "at least 1")),
    ("train --mixed-precision fp32", ("mixed_precision='fp32'", "bf16")),
    ("train --lr nan", ("train_learning_rate=nan", "finite")),
    ("train --sample-group-size 3", ("sample_group_size=3", "divide")),
    ("train --sample-num-steps 2000", ("2000 steps (sample_num_steps)", "1000")),
    ("train --algorithm ppo", ("algorithm='ppo'", "ddpo")),
    ("train --algorithm nft:beta", ("algorithm='nft:beta'", "KEY=VALUE")),
    ("train --algorithm flow_grpo", ("flow_grpo", "flow model")),
    # rewards by name
    ("train --reward ''", ("--reward is empty", "--help")),
    ("train --reward colourfulness=much", ("reward=colourfulness=much", "number")),
    ("train --reward torture_mine.py:two", ("torture_mine.py:two", "three arguments")),
    ("train --judge torture_mine.py:gone", ("torture_mine.py:gone", "it has a_dict, infinite")),
    ("train --reward torture_raises.py:red", ("torture_raises.py", "nowhere_installed", "line 1")),
    # folders and files
    ("train --images captioned", ("captioned", "write the prompt into a.txt")),
    ("train --images pretends --prompt a", ("a.jpg", "replace")),
    ("train --prompts empty.txt", ("empty.txt", "one prompt a line")),
    ("train --prompts cut.json", ("cut.json", "mend it")),
    ("train --config broken.yaml", ("--config broken.yaml", "YAML")),
    ("train --config typo.yaml", ("--config typo.yaml", "num_epochs")),
    ("train --resume-from photos --output-dir new", ("--resume-from photos", "checkpoint")),
    ("sample --run old", ("config.json", "damaged")),
    # what a function returns or raises
    (OWN + "a_dict", ("reward_function", "numbers")),
    (OWN + "one_more", ("(5,)", "one reward per image")),
    (OWN + "three", ("reward_function", "a pair of them and a dict")),
    (OWN + "infinite", ("-inf", "sample 0", "prompt", "finite")),
    (OWN + "nothing", ("None", "numbers")),
    (OWN + "label", ("KeyError", "'label'", "torture_mine.py, line 8")),
    (OWN + "opens", ("weights.bin", "torture_mine.py, line 9")),
)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Path]]:
    """Everything in a folder of images, files and functions, each wrong in one way, in which a test runs."""
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name in ("photos", "captioned"):
        (tmp_path / name).mkdir(exist_ok=True)
        Image.new("RGB", (40, 30), "teal").save(tmp_path / name / "a.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    importlib.invalidate_caches()
    yield set(tmp_path.rglob("*"))
    for name in ("torture_mine", "torture_raises"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("words", "holds"), INPUTS, ids=[words for words, _ in INPUTS])
def test_a_wrong_input_is_one_line_that_says_what_to_do(words, holds, files, tmp_path, capsys):
    assert cli.main(shlex.split(words)) == 2
    said = capsys.readouterr().err.replace("\r", "\n").splitlines()
    (line,) = (line for line in said if "error" in line.lower())
    assert line.startswith("error: ")
    assert len(line) < 700
    assert [part for part in holds if part not in line] == []
    made = {path for path in tmp_path.rglob("*") if path not in files and "__pycache__" not in path.parts}
    assert not made or words.startswith(OWN)  # which fails in the first epoch, not before the run
    assert list(tmp_path.rglob("checkpoint*")) == []
