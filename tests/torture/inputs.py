"""What users type, write into files and return from functions: one clear error, and nothing begun."""

import contextlib
import importlib
import io
import random
import shlex
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from ddpo_lessons.app import cli
from tests.torture.harness import Case, expect

TEXTS = {
    "empty.txt": "",
    "blank.txt": "\n  \n",
    "numbers.json": "[1, 2]",
    "cut.json": '["a cat", ',
    "nameless.csv": "a,b\ncat,dog\n",
    "broken.yaml": "num_epochs: [1\n",
    "list.yaml": "- num_epochs\n",
    "typo.yaml": "num_epoch: 3\n",
    "word.yaml": "num_epochs: many\n",
    "choice.yaml": "preset: edti\n",
    "old/config.json": "{",
    "old/metrics.jsonl": "",
    "captioned/a.txt": " \n",
    "table/metadata.csv": "name,text\na.png,a cat\n",
    "lines/metadata.jsonl": '{"file_name": "a.png", "text": "a cat"\n',
    "gone/metadata.jsonl": '{"file_name": "b.png", "text": "a cat"}\n',
    "pretends/a.jpg": "GIF89a, or not",
    "torture_mine.py": """import torch
NUMBER = 5
def two(images, prompts): return [0.0] * len(images)
def keyword(images, prompts, metadata, *, scale): return [scale] * len(images)
def a_dict(images, prompts, metadata): return {"red": 1.0}
def rows(images, prompts, metadata): return [[0.0, 1.0]] * len(images)
def of_pixels(images, prompts, metadata): return images[:, 0]
def one_more(images, prompts, metadata): return [0.0] * (len(images) + 1)
def three(images, prompts, metadata): return [0.0] * len(images), {}, {}
def infinite(images, prompts, metadata): return images.mean(dim=(1, 2, 3)).log() - float("inf")
def nothing(images, prompts, metadata): print("scored")
def label(images, prompts, metadata): return [len(entry["label"]) for entry in metadata]
def index(images, prompts, metadata): return [prompts[i + 1].count("a") for i in range(len(images))]
def divides(images, prompts, metadata): return [1 / (len(images) - len(prompts))] * len(images)
def asserts(images, prompts, metadata): assert images.max() > 1, "images are in [0, 255]"
def missing(images, prompts, metadata): return images.means(dim=(1, 2, 3))
def shapes(images, prompts, metadata): return (images - torch.zeros(3, 7, 7)).mean(dim=(1, 2, 3))
def opens(images, prompts, metadata): return open("weights.bin").read()
""",
    "torture_raises.py": "import nowhere_installed\n",
}
OWN = "train --num-epochs 1 --sample-batch-size 4 --train-batch-size 4 --reward torture_mine.py:"
# The words, and what the error must hold: the field, and what to do or what is right.
INPUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # numbers and words of flags
    ("train --num-epochs", ("--num-epochs",)),
    ("train --num-epochs -3", ("--num-epochs -3", "at least 1")),
    ("train --num-epochs 99999999999", ("--num-epochs 99999999999", "smaller")),
    ("train --seed -1", ("--seed -1", "negative")),
    ("train --seed 1.5", ("--seed", "'1.5' is not a whole number")),
    ("train --mixed-precision fp32", ("--mixed-precision fp32", "bf16")),
    ("train --lr nan", ("--train-learning-rate nan", "finite")),
    ("train --train-clip-range 0", ("--train-clip-range 0", "positive")),
    ("train --train-adam-beta1 1", ("--train-adam-beta1 1", "[0, 1)")),
    ("train --train-ema-decay 2", ("--train-ema-decay 2", "[0, 1)")),
    ("train --train-timestep-fraction 1.1", ("--train-timestep-fraction 1.1", "(0, 1]")),
    ("train --train-learning-rate-schedule cosin", ("--train-learning-rate-schedule", "cosine")),
    ("train --sample-group-size 3", ("--sample-group-size 3", "divide")),
    ("train --train-batch-size 7", ("--train-batch-size", "64")),
    ("train --sample-num-steps 2000", ("--sample-num-steps 2000", "1000")),
    ("train --train-lora-target-modules nothing", ("--train-lora-target-modules", "nothing")),
    ("train --overwrite yes", ("yes",)),
    ("train --resolution -64", ("--resolution -64", "such as")),
    ("train --resolution 33", ("--resolution 33", "multiple")),
    ("train --gpu-memory 8,5", ("--gpu-memory 8,5", "such as 24")),
    ("train --algorithm ppo", ("--algorithm ppo", "ddpo")),
    ("train --algorithm nft:beta", ("--algorithm nft:beta", "KEY=VALUE")),
    ("train --algorithm draft:last_steps=0", ("last_steps=0", "1")),
    ("train --algorithm flow_grpo", ("flow_grpo", "flow model")),
    ("train --algorithm branching --sample-group-size 1", ("--sample-group-size",)),
    ("train --algorithm draft --train-clip-range 0.1", ("--train-clip-range", "draft")),
    ("preflight --num-epochs 0", ("--num-epochs 0", "at least 1")),
    ("demo --epochs 0", ("--epochs 0", "of at least 1")),
    ("demo --eval-images 0", ("--eval-images 0", "of at least 1")),
    # rewards by name
    ("train --reward ''", ("--reward is empty", "--help")),
    ("train --reward colourfulness=much", ("--reward colourfulness=much", "number")),
    ("train --reward colourfulness,colourfulness", ("colourfulness twice",)),
    ("train --reward colourfulness@x", ("--reward colourfulness@x", "asks no model")),
    ("train --reward torture_mine.py", ("--reward torture_mine.py", "torture_mine.py:FUNCTION")),
    ("train --reward torture_mine.py:NUMBER", ("torture_mine.py:NUMBER", "function")),
    ("train --reward torture_mine.py:two", ("torture_mine.py:two", "three arguments")),
    ("train --reward torture_mine.py:keyword", ("torture_mine.py:keyword", "three arguments")),
    ("train --judge torture_mine.py:gone", ("--judge torture_mine.py:gone", "it has a_dict, asserts")),
    ("train --reward torture_raises.py:red", ("torture_raises.py", "nowhere_installed", "line 1")),
    # folders and files
    ("train --images photos/a.png", ("--images photos/a.png", "not a folder")),
    ("train --images photos --prompt 'a {label}'", ("--prompt", "photos", "subfolders")),
    ("train --images photos --prompt a --noise-strength nan", ("--noise-strength nan", "(0, 1]")),
    ("train --images photos --prompt a --validation nowhere", ("--validation nowhere", "not a folder")),
    ("train --images captioned", ("captioned", "write the prompt into a.txt")),
    ("train --images table", ("metadata.csv", "file_name")),
    ("train --images lines", ("metadata.jsonl, entry 1", "file_name")),
    ("train --images gone", ("metadata.jsonl", "add lines of a.png")),
    ("train --images pretends --prompt a", ("a.jpg", "replace")),
    ("train --images deep --prompt a", ("a.tiff", "8 or 16")),
    ("train --prompts empty.txt", ("--prompts empty.txt", "one prompt a line")),
    ("train --prompts blank.txt", ("--prompts blank.txt", "one prompt a line")),
    ("train --prompts numbers.json", ("--prompts numbers.json, entry 1 is 1", '"a cat"')),
    ("train --prompts cut.json", ("--prompts cut.json", "mend it")),
    ("train --prompts nameless.csv", ("--prompts nameless.csv", "named prompt")),
    ("train --prompts photos", ("--prompts photos", "file")),
    ("train --config broken.yaml", ("--config broken.yaml", "YAML")),
    ("train --config list.yaml", ("--config list.yaml", "num_epochs: 5")),
    ("train --config typo.yaml", ("--config typo.yaml", "num_epochs")),
    ("train --config word.yaml", ("--num-epochs", "'many' is not a whole number")),
    ("train --config choice.yaml", ("--preset edti", "perhaps edit")),
    ("train --resume-from photos --output-dir new", ("--resume-from photos", "checkpoint")),
    ("sample --run old", ("config.json", "damaged")),
    ("sample --prompt x --noise-strength 0.5", ("--noise-strength", "--images")),
    ("sample --prompt x --steps 0", ("--steps 0", "at least 1")),
    ("sample --prompt x --resolution 30", ("--resolution 30", "multiple")),
    ("report nowhere", ("nowhere", "folder of a run")),
    ("report old", ("config.json", "damaged")),
    # what a function returns or raises
    (OWN + "a_dict", ("reward_function", "numbers")),
    (OWN + "rows", ("(4, 2)", "one reward per image")),
    (OWN + "of_pixels", ("(4, 32, 32)", "one reward per image")),
    (OWN + "one_more", ("(5,)", "one reward per image")),
    (OWN + "three", ("reward_function", "a pair of them and a dict")),
    (OWN + "infinite", ("-inf", "sample 0", "prompt", "finite")),
    (OWN + "nothing", ("None", "numbers")),
    (OWN + "label", ("KeyError", "'label'", "torture_mine.py, line 12")),
    (OWN + "index", ("IndexError", "torture_mine.py, line 13")),
    (OWN + "divides", ("ZeroDivisionError", "torture_mine.py, line 14")),
    (OWN + "asserts", ("AssertionError", "images are in [0, 255]", "torture_mine.py, line 15")),
    (OWN + "missing", ("AttributeError", "means", "torture_mine.py, line 16")),
    (OWN + "shapes", ("must match", "torture_mine.py, line 17")),
    (OWN + "opens", ("weights.bin", "torture_mine.py, line 18")),
)


def forget(place: Path) -> None:
    """Let the next case import a module of the same name from a folder of its own."""
    sys.path[:] = [folder for folder in sys.path if not Path(folder).is_relative_to(place)]
    for name in ("torture_mine", "torture_raises"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def inputs(folder: Path) -> Case:
    """Give the command line wrong words, files and functions, each once."""

    def case(draw: random.Random, place: Path) -> str:
        words, holds = INPUTS[int(place.name.rpartition("-")[2])]
        for name, text in TEXTS.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(text)
        for name in ("photos", "captioned", "table", "lines", "gone"):
            (place / name).mkdir(exist_ok=True)
            Image.new("RGB", (40, 30), "teal").save(place / name / "a.png")
        (place / "deep").mkdir()
        Image.fromarray(np.zeros((32, 32), np.float32)).save(place / "deep" / "a.tiff")
        before, said = sorted(place.rglob("*")), io.StringIO()
        with (
            contextlib.chdir(place),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            status = cli.main(shlex.split(words))
        forget(place)
        lines = [line for line in said.getvalue().replace("\r", "\n").splitlines() if "error" in line.lower()]
        expect(status == 2 and len(lines) == 1, f"{words}: status {status}, {said.getvalue():.300}")
        (line,) = lines
        expect(line.startswith("error: ") and len(line) < 700, f"{words}: not one short line: {line}")
        expect(all(part in line for part in holds), f"{words}: {holds} not in: {line}")
        is_own = "torture_mine.py:" in words and "--num-epochs 1" in words
        made = {
            path
            for path in sorted(place.rglob("*"))
            if path not in before and "__pycache__" not in path.parts
        }
        expect(is_own or not made, f"{words}: wrote {made}")
        expect(not list(place.rglob("checkpoint*")), f"{words}: a checkpoint was written")
        return "returned or raised: clear error" if is_own else "clear error before anything was written"

    return case
