from typing import Any

import numpy as np
import pytest
import torch
from helpers import brightness, counted_passes, make_config, make_pipeline
from PIL import Image

from ddpo_lessons.data.contexts import Batch, check_functions, check_key, info_means, score, text_context
from ddpo_lessons.image import to_tensor
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("change", [lambda a: a[:, ::-1].copy()[:, ::-1], lambda a: a.astype(">f4")])
def test_arrays_that_torch_refuses_are_taken_with_their_values(change):
    pixels = np.arange(12, dtype=np.float32).reshape(3, 2, 2) / 12
    assert torch.equal(to_tensor(change(pixels)), torch.arange(12.0).view(3, 2, 2) / 12)


def test_an_image_brings_no_gradient_along():
    assert not to_tensor(torch.rand(3, 2, 2, requires_grad=True)).requires_grad


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (torch.zeros(3, 0, 4), ValueError, r"shape \(3, 0, 4\) has no pixels"),
        (np.zeros((3, 2, 2), dtype=object), TypeError, "not an array of object"),
        (np.zeros((3, 2, 2), dtype=np.complex64), TypeError, "not an array of complex64"),
        (np.zeros((3, 2, 2), dtype=np.uint8), TypeError, "not an array of uint8"),
        ([[0.5]], TypeError, "not list"),
    ],
)
def test_an_image_that_cannot_be_used_is_named(image, error, message):
    with pytest.raises(error, match=message):
        to_tensor(image)


def test_a_pil_image_becomes_floats_from_0_to_1():
    colored, gray = Image.new("RGB", (1, 1), (255, 0, 51)), Image.new("L", (1, 1), 51)
    assert torch.equal(to_tensor(colored).flatten(), torch.tensor([1.0, 0, 0.2]))
    assert torch.equal(to_tensor(gray).flatten(), torch.tensor([0.2, 0.2, 0.2]))


def test_half_an_emoji_is_no_prompt():
    with pytest.raises(ValueError, match=r"prompt_function returned '\\ud83d', which is no valid text"):
        text_context(("\ud83d", {}))


@pytest.mark.parametrize("key", ["a", 1, 0.5, True, None, ("a", (1, None))])
def test_keys_that_a_checkpoint_brings_back(key):
    check_key(key)


@pytest.mark.parametrize("key", [[1], {}, b"a", float("nan"), 1j, ("a", [1]), frozenset(), np.float32(1)])
def test_keys_that_a_checkpoint_cannot_bring_back_are_refused_before_any_forward_pass(tmp_path, key):
    pipeline = make_pipeline()
    config = make_config(tmp_path, per_prompt_stat_tracking=True)
    trainer = DDPOTrainer(config, brightness, lambda: ("a", {"id": key}), pipeline)
    message = r"metadata\['id'\], or the algorithm's key, holds"
    with counted_passes(pipeline.unet) as sizes, pytest.raises(TypeError, match=message):
        trainer.train()
    assert sizes == []


@pytest.mark.parametrize("strength", [None, "0.5", torch.tensor([0.5, 0.7])])
def test_a_noise_strength_that_is_no_number(tmp_path, strength):
    with pytest.raises(TypeError, match=r"noise_strength=.* must be a number"):
        ImageDDPOTrainer(
            make_config(tmp_path), brightness, lambda: None, make_pipeline(), noise_strength=strength
        )


def test_a_seed_of_more_than_32_bits_is_taken(tmp_path):
    DDPOTrainer(make_config(tmp_path, seed=2**32), brightness, lambda: ("a", {}), make_pipeline()).train()


class Prompts:
    """A prompt function with some state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __call__(self) -> tuple[str, dict[str, Any]]:
        return "", {}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


@pytest.mark.parametrize("state", [{"rng": (1, 2)}, {0: "a"}, {"rng": object()}])
def test_a_state_that_a_checkpoint_could_not_give_back_is_refused(state):
    check_functions(brightness, Prompts({"seed": 1, "drawn": [2, None]}))
    with pytest.raises(TypeError, match="must return what JSON holds and gives back"):
        check_functions(brightness, Prompts(state))


def scored(returned: Any) -> Batch:
    """Score two images with a reward function that returns this."""
    return score(lambda *_: returned, torch.zeros(2, 3, 4, 4), [text_context(("", {}))] * 2)


@pytest.mark.parametrize(
    "returned", [(0.25, 0.75), [0.25, 0.75], ([0.25, 0.75], {"a": 1}), (torch.tensor([0.25, 0.75]), {})]
)
def test_rewards_come_with_info_or_without(returned):
    assert scored(returned).rewards.tolist() == [0.25, 0.75]


@pytest.mark.parametrize(
    "turn",
    [
        lambda rewards: rewards.numpy()[::-1].copy()[::-1],  # negative strides
        lambda rewards: rewards.numpy().astype(">f8"),
        lambda rewards: rewards.numpy().astype(object),
        lambda rewards: rewards.numpy().astype(np.longdouble),
        lambda rewards: rewards.tolist(),
        lambda rewards: list(rewards),
        lambda rewards: rewards.half(),
    ],
)
def test_rewards_of_any_numbers_are_the_same(turn):
    """Also as entries of the info, which otherwise would be missing from the records without a word."""
    numbers = turn(torch.tensor([0.25, 0.75]))
    batch = scored((numbers, {"red": numbers}))
    assert batch.rewards.tolist() == [0.25, 0.75]
    assert info_means([batch]) == {"red": 0.5}


@pytest.mark.parametrize(
    "wrong", [np.array(["0.5", "0.7"]), torch.zeros(2, dtype=torch.complex64), [10**400, 1]]
)
def test_what_is_no_real_number_is_refused(wrong):
    with pytest.raises(TypeError, match="must return numbers"):
        scored(wrong)


@pytest.mark.parametrize("names", [["state_dict"], ["load_state_dict"], ["skip"], ["skip", "state_dict"]])
def test_a_prompt_function_with_half_a_state_is_refused(names):
    prompts = type("Half", (), {name: lambda self, *state: {} for name in ["__call__", *names]})()
    with pytest.raises(TypeError, match="belong together"):
        check_functions(brightness, prompts)


def test_the_info_is_recorded_where_it_is_a_number_for_every_sample():
    images = torch.zeros(2, 3, 8, 8)

    def batch(info):
        return Batch(images, ("a", "b"), ({}, {}), torch.zeros(2), info)

    first = {
        "tensor": torch.tensor([1, 2]),
        "list": [0.5, 1.5],
        "one": 3.0,
        "text": ["x", "y"],
        "rare": [1, 1],
    }
    second = {"tensor": torch.tensor([4.0, 5.0]), "list": (True, False), "one": 3.0, "text": "xy"}
    assert info_means([batch(first), batch(second)]) == {"tensor": 3.0, "list": 0.75}
    assert info_means([batch({}), batch(second)]) == {}
    assert info_means([batch("seen"), batch(None)]) == {}
