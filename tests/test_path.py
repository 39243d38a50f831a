"""How far it is from `train()` to the loss and to the network: package functions, counted in a run."""

import sys
from pathlib import Path
from types import FrameType

import pytest
from helpers import brightness, make_config, make_pipeline, red_three

import ddpo_lessons
from ddpo_lessons.algorithms import ddpo
from ddpo_lessons.models.stable_diffusion import StableDiffusion
from ddpo_lessons.trainer import DDPOTrainer

PACKAGE = Path(ddpo_lessons.__file__).parent
pytestmark = pytest.mark.usefixtures("one_thread")


def package_functions() -> list[str]:
    """Name the package's functions on the stack, the outermost first."""
    names, frame = list[str](), sys._getframe(1)
    place: FrameType | None = frame
    while place is not None:
        if Path(place.f_code.co_filename).is_relative_to(PACKAGE):
            names.append(place.f_code.co_name)
        place = place.f_back
    return names[::-1]


@pytest.mark.parametrize(
    ("place", "name", "first", "last"),
    [
        (ddpo, "clipped_surrogate", ["step", "loss"], ["step", "loss"]),
        (StableDiffusion, "predict", ["sample", "sample_trajectory"], ["step", "loss", "replay"]),
    ],
)
def test_from_train_to_the_clipped_loss_and_the_policy_are_four_calls(
    tmp_path, monkeypatch, place, name, first, last
):
    stacks, function = [], getattr(place, name)

    def seen(*arguments):
        stacks.append(package_functions())
        return function(*arguments)

    monkeypatch.setattr(place, name, seen)
    DDPOTrainer(make_config(tmp_path), brightness, red_three, make_pipeline()).train()
    assert stacks[0] == ["train", "step", *first]
    assert stacks[-1] == ["train", "step", *last]


def test_an_epoch_runs_at_most_150_functions_of_the_package(tmp_path):
    trainer = DDPOTrainer(make_config(tmp_path), brightness, red_three, make_pipeline())
    trainer.step(0)  # the first one also opens the run's folder, and is watched for what a broken run shows
    functions = set()

    def profile(frame: FrameType, event: str, _):
        code = frame.f_code
        is_function = event == "call" and not code.co_name.startswith("<")  # no comprehension, no lambda
        if is_function and Path(code.co_filename).is_relative_to(PACKAGE):
            functions.add((code.co_filename, code.co_firstlineno))

    sys.setprofile(profile)
    try:
        trainer.step(1)
    finally:
        sys.setprofile(None)
    assert len(functions) <= 150
