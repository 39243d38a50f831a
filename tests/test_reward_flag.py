"""`--reward`: its grammar, functions of the user's files, models by path, weighted sums."""

from __future__ import annotations

import inspect
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import CLIP_SIZE, TINY, pictures, printed_error, run_command, write_clip, write_resnet

from ddpo_lessons import rewards
from ddpo_lessons.cli import reward_flag
from ddpo_lessons.cli.reward_flag import Term, parse
from ddpo_lessons.data import folders
from ddpo_lessons.image import to_pil
from ddpo_lessons.training.runlog import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")

NUMBERS = itertools.count()
MINE = """
calls = []

def red(images, prompts, metadata):
    calls.append(prompts)
    return images[:, 0].mean(dim=(1, 2)), {"blue": images[:, 2].mean(dim=(1, 2))}

class Constant:
    def __init__(self, value):
        self.value = value

    def __call__(self, images, prompts, metadata):
        return [self.value] * len(images)

two = Constant(2.0)

def make():
    return red

def short(images, prompts):
    return [0.0] * len(images)
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A file of the user's, in the current folder, under a name that no other test has imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"my_rewards_{next(NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(MINE)
    return name


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"))


def noise(size: int = 8) -> torch.Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))


# -------------------------------------------------------------------------------------------- grammar
def test_terms_are_names_functions_and_models_with_weights(tmp_path):
    folder = str(tmp_path)
    assert parse("colorfulness") == (Term("colorfulness", None),)
    assert parse("a.b:f") == (Term("f", None, "a.b"),)
    written = f"clip_score@{folder}=1, my.py:red=-0.2,colorfulness,aesthetic_score@openai/clip@{folder}=2e1"
    assert parse(written) == (
        Term("clip_score", 1.0, models=(folder,)),
        Term("red", -0.2, "my.py"),
        Term("colorfulness", None),
        Term("aesthetic_score", 20.0, models=("openai/clip", folder)),
    )
    assert [term.text for term in parse(written)][1:3] == ["my.py:red", "colorfulness"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clip_scroe", "clip_scroe does not exist (perhaps clip_score): use one of animal"),
        ("clip_scroe=1,edit=2", "reward=clip_scroe does not exist"),
        ("colorfulness,", "has a term without a name"),
        ("clip_score=high", "the weight after = must be a finite number"),
        ("clip_score=nan", "the weight after = must be a finite number"),
        ("clip_score=", "the weight after = must be a finite number"),
        ("clip_score=1,clip_score@openai/clip=2", "names clip_score twice"),
        ("a.py:red,b.py:red", "give it once, with the sum of the weights, or rename one of two functions"),
        ("my.py:red=0", "is 0 for every image, so nothing can be learned: give a weight other than 0"),
        ("my.py:", "write FILE.py:FUNCTION"),
        ("my.py", "my.py names no function of the file: write my.py:FUNCTION"),
        (":red", "write FILE.py:FUNCTION"),
        ("my.py:red()", "write FILE.py:FUNCTION"),
        ("colorfulness@openai/clip", "write colorfulness alone, since it asks no model"),
        ("aesthetic_score@a/b@c/d@e/f", "write aesthetic_score@CLIP@HEAD"),
        ("clip_score@no-such-folder", "'no-such-folder' is neither a folder nor OWNER/NAME"),
        ("clip_scroe@a/b", "clip_scroe does not exist"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ValueError, match="reward=") as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "form",
    ["clip_score@{}/a,b", "clip_score@{}/a=b", "clip_score@{}/a@b", "a,b.py:red", "a=b.py:red", "a@b.py:red"],
)
def test_a_path_with_a_mark_of_the_grammar_is_refused_with_the_remedy(form, tmp_path):
    for name in ("a,b", "a=b", "a@b"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="If a path holds , = or @, rename it or link to it"):
        parse(form.format(tmp_path))
    with pytest.raises(ValueError, match="clip_scroe") as caught:
        parse("colorfulness=1,clip_scroe=2")  # holds no path
    assert "link" not in str(caught.value)


def test_a_reward_declares_the_models_that_it_takes():
    """They come first among the arguments of a factory, and are given by name or folder."""
    for name, registered in rewards.REWARDS.items():
        parameters = inspect.signature(registered.make).parameters.values()
        asked = [spec for spec in parameters if spec.annotation == str | Path]
        assert len(asked) == len(registered.models), name
        assert asked == [*parameters][: len(asked)]


# ------------------------------------------------------------------------------------------ functions
@pytest.mark.parametrize("form", ["{}.py:red", "{}:red", "./{}.py:red"])
def test_a_function_of_the_users_file(mine, form):
    function = reward_flag.make(parse(form.format(mine)))
    score, info = function(noise(), ("a", "b"), ({}, {}))
    assert torch.equal(score, noise()[:, 0].mean(dim=(1, 2)))
    assert list(info) == ["blue"]
    assert function is sys.modules[mine].red  # and no copy of its module


def test_an_object_that_is_called_is_a_function_too(mine):
    assert reward_flag.make(parse(f"{mine}.py:two"))(noise(), ("a", "b"), ({}, {})) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("NAME.py:bleu", ValueError, "NAME.py has no 'bleu'; it has make, red"),
        ("nowhere.py:red", ValueError, "there is no file nowhere.py"),
        ("nowhere:red", ValueError, "there is no module nowhere in"),
        ("NAME:make", TypeError, r"add a line such as `reward = make\(\)` and give NAME:reward"),
        ("NAME:short", TypeError, r"it takes \(images, prompts\); give it these three arguments"),
        ("broken_NAME.py:red", ValueError, r"SyntaxError.*line 2"),
        (
            "needy_NAME:red",
            ValueError,
            r"ModuleNotFoundError: No module named 'notthere'.*line 3 of needy_NAME",
        ),
        ("json.py:red", ValueError, r"another module is called json .*rename the file"),
    ],
)
def test_functions_that_cannot_be_had_are_named(mine, text, error, message):
    Path(f"broken_{mine}.py").write_text("x = 1\ndef red(:\n")
    Path(f"needy_{mine}.py").write_text("\n\nimport notthere\n")
    Path("json.py").touch()
    with pytest.raises(error, match=message.replace("NAME", mine)):
        reward_flag.load_functions(parse(text.replace("NAME", mine)))


# --------------------------------------------------------------------------------- sums and their models
def test_a_sum_weighs_its_terms_and_keeps_their_info(mine):
    Path("other.py").write_text(
        "def green(images, prompts, metadata): return images[:, 1].mean(dim=(1, 2))\n"
    )
    combined = reward_flag.make(parse(f"{mine}.py:red=2,other.py:green=-0.5,{mine}:two"))
    score, info = combined(noise(), ("a", "b"), ({}, {}))
    red, green, blue = noise().mean(dim=(2, 3)).T
    torch.testing.assert_close(score.float(), 2 * red - 0.5 * green + 2)
    two = torch.full((2,), 2.0, dtype=torch.float64)  # which came as a list
    torch.testing.assert_close(info, {"red": red, "red/blue": blue, "green": green, "two": two})


def test_a_model_by_path_is_the_one_that_is_asked(clip_folder, tmp_path):
    images, prompts = noise(CLIP_SIZE), ("a red three", "a cat")
    resnet = write_resnet(tmp_path / "resnet")
    combined = reward_flag.make(parse(f"clip_score@{clip_folder}=3,distance_penalty@{resnet}=0.5"))
    metadata = [{"target": 1 - image} for image in images]
    score, _ = combined(images, prompts, metadata)
    cosine: Any = rewards.clip_score(clip_folder)(images, prompts, metadata)
    distance: Any = rewards.distance_penalty(resnet)(images, prompts, metadata)
    torch.testing.assert_close(score, 3 * cosine + 0.5 * distance)
    both, _ = reward_flag.make(parse(f"edit@{clip_folder}@{resnet}"))(
        images, prompts, [{"image": 1 - image} for image in images]
    )
    torch.testing.assert_close(both, 5 * cosine + distance)


def test_the_distance_is_to_the_original_which_is_the_input_where_nothing_is_damaged(tmp_path):
    resnet = write_resnet(tmp_path / "resnet")
    to_pil(noise(32)[0]).save(tmp_path / "a.png")
    photos = folders.find_images(tmp_path)
    distance = reward_flag.make(parse(f"distance_penalty@{resnet}"), photos)
    for damages in ((), ("foggy",)):
        prompt, image, metadata = folders.ImagePrompts(photos, "", 32, 0, damages)()
        to_original: Any = distance(image[None], (prompt,), (metadata,))
        assert to_original < -0.01 if damages else to_original > -1e-9


def test_a_model_that_is_not_there_names_the_flag(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RuntimeError, match="--reward NAME@FOLDER"):
        reward_flag.make(parse("clip_score"))


# --------------------------------------------------------------------------------------------- train
def test_a_sum_is_recorded_and_a_resume_tells_of_another(mine, model, clip_folder, capsys):
    reward = f"clip_score@{clip_folder}=1,{mine}.py:red=0.2"
    flags = ["train", *TINY, "--model", model, "--prompt", "a red three"]
    run_command(*flags, "--reward", reward)
    assert sys.modules[mine].calls == [("a red three",) * 2]
    (epoch,) = read_metrics("run", "epoch")
    parts = {name: epoch[f"reward/{name}"] for name in ("clip_score", "red", "red/blue")}  # all unweighted
    assert epoch["reward_mean"] == pytest.approx(parts["clip_score"] + 0.2 * parts["red"], abs=1e-6)
    capsys.readouterr()
    other = reward.replace("0.2", "0.3")
    run_command(*flags, "--num-epochs", "2", "--resume-from", "latest", "--reward", other)
    message = capsys.readouterr().out
    assert "continuing run/checkpoint-000001 with changes: num_epochs 1 → 2; reward " in message
    assert f"'{mine}.py:red': 0.2}} → " in message
    assert f"'{mine}.py:red': 0.3}}" in message


def test_images_are_checked_for_every_term(mine, model, capsys):
    pictures(Path("photos"), "a.png")
    flags = ["train", *TINY, "--model", model, "--images", "photos", "--noise-strength", "0.7"]
    run_command(*flags, "--reward", f"{mine}.py:red=1,clip_margin@a/b=1", status=2)
    assert "--reward clip_margin needs to know what the images show" in printed_error(capsys)
    run_command(*flags, "--reward", f"{mine}:red")
