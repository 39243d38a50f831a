import io
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CLIP_MEAN as MEAN
from helpers import CLIP_SIZE as SIZE
from helpers import CLIP_STD as STD
from helpers import brightness, write_clip, write_preprocessor, write_resnet
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, CLIPConfig, CLIPModel, CLIPTokenizer, ViTConfig, ViTModel

from ddpo_lessons import rewards
from ddpo_lessons.rewards import learned, reward
from ddpo_lessons.rewards.combined import judged
from ddpo_lessons.worlds import digits
from ddpo_lessons.worlds.digits import COLORS

NO_METADATA: list[dict[str, Any]] = [{}, {}]
PROMPTS = ["a red three", "a cat"]
RED_ON_BLUE = "a red digit on a blue background"


def bytes_images(seed: int, *shape: int) -> torch.Tensor:
    """Random images whose pixels are exact multiples of 1/255."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator).float() / 255


class PixelReader(nn.Module):
    """A digit classifier whose logits are log(11) times the first ten pixels of the red channel.

    One bright pixel therefore gives p = 11 / (11 + 9) = 0.55, none gives 0.1.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert not self.training
        return math.log(11) * images[:, 0, 0, :10]


def showing(*digits: int | None) -> torch.Tensor:
    images = torch.zeros(len(digits), 3, 32, 32)
    for image, digit in zip(images, digits, strict=True):
        if digit is not None:
            image[0, 0, digit] = 1
    return images


def values(result: rewards.Rewards) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    assert result.dtype == torch.float32
    return result


# ------------------------------------------------------------------------------------------ input
@pytest.mark.parametrize(
    ("images", "error", "match"),
    [
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), TypeError, r"torch\.uint8.*float tensor"),
        (np.zeros((2, 3, 8, 8)), TypeError, "ndarray.*float tensor"),
        (torch.zeros(3, 8, 8), ValueError, r"\(3, 8, 8\)"),
        (torch.zeros(2, 8, 8, 3), ValueError, r"\(2, 8, 8, 3\).*\(B, 3, H, W\)"),
        (torch.zeros(0, 3, 8, 8), ValueError, r"\(0, 3, 8, 8\)"),
        (torch.stack([torch.zeros(3, 8, 8), -torch.ones(3, 8, 8)]), ValueError, r"\[1\].*\+ 1"),
        (torch.full((2, 3, 8, 8), math.inf), ValueError, r"images\[0\] spans \[inf"),
    ],
)
def test_bad_images_are_refused(images, error, match):
    with pytest.raises(error, match=match):
        rewards.colorfulness()(images, PROMPTS, NO_METADATA)


def test_one_nan_pixel_names_its_sample():
    images = torch.zeros(3, 3, 8, 8)
    images[2, 1, 4, 4] = math.nan
    with pytest.raises(ValueError, match=r"images\[2\] spans \[nan"):
        rewards.colorfulness()(images, ["a"] * 3, [{}] * 3)


def test_rounding_outside_the_range_is_tolerated_and_clamped():
    brightest = reward.checked_reward(lambda images, prompts, metadata: images.amax(dim=(1, 2, 3)))
    over = torch.ones(2, 3, 8, 8) + 5e-4
    assert torch.equal(values(brightest(over, PROMPTS, NO_METADATA)), torch.ones(2))


@pytest.mark.parametrize(("prompts", "metadata"), [(["a"], NO_METADATA), (PROMPTS, [{}])])
def test_counts_must_agree(prompts, metadata):
    with pytest.raises(ValueError, match=r"1 (prompts|metadata) for 2 images"):
        rewards.colorfulness()(torch.zeros(2, 3, 8, 8), prompts, metadata)


def test_rewards_carry_the_images_gradient_only_and_take_half_precision():
    images = bytes_images(0, 2, 3, 32, 32)

    def score(images: torch.Tensor) -> torch.Tensor:
        return values(rewards.prompt_alignment(PixelReader())(images, ["a three", "a four"], NO_METADATA)[0])

    assert not score(images).requires_grad
    assert score(images.clone().requires_grad_()).requires_grad
    torch.testing.assert_close(score(images.half()), score(images), atol=2e-3, rtol=0)


# ----------------------------------------------------------------------------------------- pixels
def test_jpeg_counts_the_bytes_that_pil_writes():
    images = bytes_images(1, 2, 3, 40, 24)
    images[1] = 0.5  # a flat image is the most compressible
    expected = []
    for image in images.numpy():
        pixels = np.rint(255 * np.moveaxis(image, 0, -1)).astype(np.uint8)
        buffer = io.BytesIO()
        Image.frombytes("RGB", (24, 40), pixels.tobytes()).save(buffer, "JPEG", quality=95)
        expected.append(len(buffer.getvalue()) / 1000)
    incompressible = values(rewards.jpeg_incompressibility()(images, PROMPTS, NO_METADATA))
    np.testing.assert_allclose(incompressible, expected, rtol=1e-6)
    compressible = values(rewards.jpeg_compressibility()(images, PROMPTS, NO_METADATA))
    assert torch.equal(compressible, -incompressible)
    assert 0.3 < expected[1] < 1 < expected[0] < 4  # kilobytes, not bytes


def test_colorfulness_by_hand():
    images = torch.zeros(2, 3, 4, 4)
    images[0, 0, :, :2] = 1  # the left half pure red: rg = 255, yb = 127.5
    images[0, 2, :, 2:] = 1  # the right half pure blue: rg = 0, yb = -255
    images[1] = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))  # a gray picture
    expected = math.hypot(127.5, 191.25) + 0.3 * math.hypot(127.5, -63.75)
    result = values(rewards.colorfulness()(images, PROMPTS, NO_METADATA))
    np.testing.assert_allclose(result, [expected, 0], atol=1e-3)


@pytest.mark.parametrize(
    ("second", "match"),
    [
        ({}, r"metadata\[1\] has no 'target'.*prompt function"),
        ({"target": "file.png"}, r"metadata\[1\]\['target'\] is str"),
        ({"target": torch.zeros(3, 9, 9)}, r"metadata\[1\]\['target'\] is \(3, 9, 9\).*\(3, 8, 8\)"),
        ({"target": torch.full((3, 8, 8), 255.0)}, r"metadata 'target'\[1\] spans \[255"),
    ],
)
def test_bad_reference_images_are_named(second, match):
    metadata = [{"target": torch.zeros(3, 8, 8)}, second]
    with pytest.raises(ValueError, match=match):
        reward.metadata_images(metadata, "target", torch.zeros(2, 3, 8, 8))


# ------------------------------------------------------------------------------------ digit world
@pytest.mark.parametrize("digit", [10, -1, "3", 2.5, None])
def test_a_digit_that_is_none_is_named(digit):
    metadata = [{"digit": 1}, {"digit": digit}]
    with pytest.raises(ValueError, match=r"metadata\[1\]\['digit'\].*int from 0 to 9"):
        rewards.recoloring(PixelReader())(showing(1, 1), [RED_ON_BLUE] * 2, metadata)


def test_the_default_reader_is_the_tiny_reward_model(monkeypatch):
    monkeypatch.setattr(digits.RewardModel, "load", PixelReader)
    result, _ = rewards.get_reward("prompt_alignment")(showing(3), ["a three"], [{}])
    np.testing.assert_allclose(result, [math.log(0.55)], rtol=1e-5)


def square(ink: Sequence[float], background: Sequence[float], left: int = 12) -> torch.Tensor:
    """A square of ink on a background; 64 of 1,024 pixels, more than the 5% that are measured."""
    image = torch.tensor(background)[:, None, None].repeat(1, 32, 32)
    image[:, 12:20, left : left + 8] = torch.tensor(ink)[:, None, None]
    return image


def picture(ink: str, background: str) -> torch.Tensor:
    return square(COLORS[ink], COLORS[background])


class ReadsThree(nn.Module):
    """Says 0.55 for three and 0.05 for the rest, whatever it sees."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return (math.log(11) * torch.eye(10)[3]).expand(len(images), 10)


def test_prompt_alignment_adds_up_what_the_prompt_says():
    images = torch.stack([picture("red", "blue")] * 4)
    prompts = [
        "a red three on a blue background", "a green five on a blue background",
        "a red digit on a white background", "a three",
    ]  # fmt: skip
    result = rewards.prompt_alignment(ReadsThree())(images, prompts, [{}] * 4)
    assert isinstance(result, tuple)
    score, info = result
    red, green, blue, white = (np.array(COLORS[name]) for name in ("red", "green", "blue", "white"))
    ink = np.array([0, np.linalg.norm(red - green), 0, 0])
    background = np.array([0, 0, np.linalg.norm(blue - white), 0])
    log_p = np.log([0.55, 0.05, 1, 0.55])
    np.testing.assert_allclose(info["ink_distance"], ink, atol=1e-5)
    np.testing.assert_allclose(info["background_distance"], background, atol=1e-5)
    np.testing.assert_allclose(info["digit_log_prob"], log_p, atol=1e-5)
    np.testing.assert_allclose(score, log_p - ink - background, atol=1e-5)


def test_prompt_alignment_refuses_a_prompt_with_nothing_to_align():
    images = torch.stack([picture("red", "blue")] * 2)
    with pytest.raises(ValueError, match=r"prompts\[1\]='a cat' names no digit"):
        rewards.prompt_alignment(ReadsThree())(images, PROMPTS, NO_METADATA)


# ---------------------------------------------------------------------------- models from the hub
def preprocess(images: torch.Tensor, edge: int) -> torch.Tensor:
    """What CLIP's processor does, by PIL: shorter edge to `edge`, center SIZE x SIZE, normalize."""
    pixels = []
    for image in images.numpy():
        picture = Image.fromarray(np.rint(255 * np.moveaxis(image, 0, -1)).astype(np.uint8))
        short = min(picture.size)
        width, height = (int(edge * side / short) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        left, top = (width - SIZE) // 2, (height - SIZE) // 2
        array = np.asarray(picture.crop((left, top, left + SIZE, top + SIZE))) / 255
        pixels.append(np.moveaxis((array - MEAN) / STD, -1, 0))
    return torch.tensor(np.stack(pixels), dtype=torch.float32)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"))


def clip_outputs(folder: Path, images: torch.Tensor, texts: Sequence[str]) -> Any:
    """CLIPModel's own forward pass, and its logit scale."""
    pixels = preprocess(images, SIZE)
    tokens = CLIPTokenizer.from_pretrained(folder)(list(texts), padding=True, return_tensors="pt")
    model = CLIPModel.from_pretrained(folder)
    with torch.no_grad():
        return model(**tokens, pixel_values=pixels), model.logit_scale.exp()


def test_clip_score_is_clips_own_cosine(clip_folder):
    images = bytes_images(3, 2, 3, SIZE, SIZE)
    outputs, scale = clip_outputs(clip_folder, images, PROMPTS)
    result = values(rewards.clip_score(clip_folder)(images, PROMPTS, NO_METADATA))
    torch.testing.assert_close(result, outputs.logits_per_image.diag() / scale, atol=1e-5, rtol=0)
    swapped = values(rewards.clip_score(clip_folder)(images, PROMPTS[::-1], NO_METADATA))
    assert (result - swapped).abs().min() > 0.01


def test_pick_score_is_clips_own_logit(clip_folder, tmp_path):
    model = CLIPModel.from_pretrained(clip_folder)
    model.logit_scale.data.fill_(4.6)  # about that of CLIP, and not that of a new one
    model.save_pretrained(tmp_path)  # without tokenizer and preprocessor
    images = bytes_images(3, 2, 3, SIZE, SIZE)
    outputs, scale = clip_outputs(clip_folder, images, PROMPTS)
    expected = outputs.logits_per_image.diag() / scale * math.exp(4.6)
    result = values(rewards.pick_score(tmp_path, clip_folder)(images, PROMPTS, NO_METADATA))
    torch.testing.assert_close(result, expected, atol=1e-3, rtol=0)
    assert abs(result[0] - result[1]) > 0.1


def test_clip_cuts_what_does_not_fit(clip_folder):
    images = bytes_images(3, 1, 3, SIZE, SIZE).expand(3, -1, -1, -1)
    # 24 positions: start, 22 letters, end. Only the third prompt differs before the cut.
    prompts = ["a " * 22, "a " * 22 + "b c " * 30, "a " * 11 + "b " * 30]
    fits, cut, other = values(rewards.clip_score(clip_folder)(images, prompts, [{}] * 3)).tolist()
    assert cut == pytest.approx(fits, abs=1e-5)
    assert abs(other - fits) > 1e-3


@pytest.mark.parametrize("shape", [(44, 61), (61, 44), (20, 32)])
def test_preprocessing_resizes_and_crops_as_pil_does(clip_folder, tmp_path, shape):
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    write_preprocessor(folder, 36)
    smooth = torch.nn.functional.avg_pool2d(bytes_images(4, 2, 3, *shape), 3, 1, 1)
    images = (255 * smooth).round() / 255
    expected = preprocess(images, 36)
    result = learned.load_clip(folder).preprocess(images)
    assert result.shape == (2, 3, SIZE, SIZE)
    # PIL rounds twice to 8 bits, once after each of its two passes; a standard deviation is 0.26.
    assert (result - expected).abs().max() < 1.6 / 255 / 0.26


def test_clip_margin_and_change_against_clips_own_logits(clip_folder):
    classes = ("cat", "owl", "bear")
    texts = [f"my {name}" for name in classes]
    images, before = bytes_images(5, 2, 3, SIZE, SIZE), bytes_images(6, 2, 3, SIZE, SIZE)
    metadata = [{"label": "owl", "image": before[0]}, {"label": "cat", "image": before[1]}]

    def margins(pictures: torch.Tensor) -> np.ndarray:
        first, second = clip_outputs(clip_folder, pictures, texts)[0].logits_per_image.numpy()
        return np.array([first[1] - max(first[0], first[2]), second[0] - max(second[1:])])

    margin = rewards.clip_margin(clip_folder, classes, template="my {}")
    result = values(margin(images, PROMPTS, metadata))
    np.testing.assert_allclose(result, margins(images), atol=1e-4)
    change = rewards.clip_change(clip_folder, classes, template="my {}")
    expected = margins(images) - margins(before)
    np.testing.assert_allclose(values(change(images, PROMPTS, metadata)), expected, atol=1e-4)
    assert np.abs(expected).min() > 1e-3
    unchanged = values(change(before, PROMPTS, metadata))
    np.testing.assert_allclose(unchanged, [0, 0], atol=1e-5)


def test_clip_classes_template_and_labels_are_checked(clip_folder):
    with pytest.raises(ValueError, match="two or more different"):
        rewards.clip_margin(clip_folder, ["cat", "cat"])
    with pytest.raises(ValueError, match=r"template='a photo' has no \{\}"):
        rewards.clip_margin(clip_folder, template="a photo")
    with pytest.raises(ValueError, match=r"metadata\[1\]\['label'\] is 'dog'.*'cat', 'owl'"):
        rewards.clip_margin(clip_folder, ["cat", "owl"])(
            torch.zeros(2, 3, 8, 8), PROMPTS, [{"label": "cat"}, {"label": "dog"}]
        )


def aesthetic_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    widths = {0: (768, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}
    weights = {}
    for layer, (inputs, outputs) in widths.items():
        scale = inputs**-0.5
        weight = torch.randn(outputs, inputs, generator=generator) * scale
        weights[f"layers.{layer}.weight"] = weight
        weights[f"layers.{layer}.bias"] = torch.randn(outputs, generator=generator)
    return weights


@pytest.mark.parametrize("name", ["model.safetensors", "head.safetensors"])
def test_aesthetic_score_is_the_linear_network_on_the_unit_embedding(clip_folder, tmp_path, name):
    weights = aesthetic_weights()
    save_file({**weights, "vision_model.unrelated": torch.zeros(1)}, tmp_path / name)
    head = tmp_path if name == "model.safetensors" else tmp_path / name  # a folder or a file
    images = bytes_images(8, 2, 3, SIZE, SIZE)
    hidden = clip_outputs(clip_folder, images, ["a"])[0].image_embeds.double().numpy()
    np.testing.assert_allclose(np.linalg.norm(hidden, axis=1), 1, rtol=1e-5)
    for layer in (0, 2, 4, 6, 7):
        weight, bias = (weights[f"layers.{layer}.{kind}"].numpy() for kind in ("weight", "bias"))
        hidden = hidden @ weight.T + bias
    result = values(rewards.aesthetic_score(clip_folder, head)(images, PROMPTS, NO_METADATA))
    np.testing.assert_allclose(result, hidden[:, 0], rtol=1e-4)
    assert abs(hidden[0, 0] - hidden[1, 0]) > 1e-3


def test_an_aesthetic_head_of_another_shape_is_refused(clip_folder, tmp_path):
    weights = aesthetic_weights()
    weights["layers.6.weight"] = weights["layers.6.weight"][:, :32].contiguous()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"could not be loaded.*size mismatch for 6\.weight"):
        rewards.aesthetic_score(clip_folder, tmp_path)


def test_aesthetic_score_needs_768_dimensions(clip_folder, tmp_path):
    folder = shutil.copytree(clip_folder, tmp_path / "narrow")
    config = CLIPConfig.from_pretrained(folder)
    config.projection_dim = 512
    CLIPModel(config).save_pretrained(folder)
    save_file(aesthetic_weights(), tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match="512 dimensions: use openai/clip-vit-large-patch14"):
        rewards.aesthetic_score(folder, tmp_path / "head.safetensors")


@pytest.fixture
def resnet_folder(tmp_path):
    return write_resnet(tmp_path / "resnet")


def test_distance_penalty_against_numpy(resnet_folder):
    images, targets = bytes_images(9, 2, 3, 24, 40), bytes_images(10, 2, 3, 24, 40)
    model = AutoModel.from_pretrained(resnet_folder)

    def features(pictures: torch.Tensor) -> list[np.ndarray]:
        pixels = (pictures - torch.tensor([0.4, 0.5, 0.6]).reshape(3, 1, 1)) / torch.tensor(
            [0.2, 0.25, 0.3]
        ).reshape(3, 1, 1)
        with torch.no_grad():
            layers = model(pixels, output_hidden_states=True).hidden_states
        assert len(layers) == 3
        return [layer.double().numpy() for layer in layers]

    expected = np.zeros(2)
    for f, g in zip(features(images), features(targets), strict=True):
        for i in range(2):
            f_norm, g_norm = np.linalg.norm(f[i], axis=0), np.linalg.norm(g[i], axis=0)
            assert min(f_norm.min(), g_norm.min()) > 1e-6
            cosine = (f[i] * g[i]).sum(axis=0) / (f_norm * g_norm)
            expected[i] += (2 - 2 * cosine).mean() / 3  # |u - v|^2 of two unit vectors
    metadata = [{"target": target, "image": image} for target, image in zip(targets, images, strict=True)]
    result = values(rewards.distance_penalty(resnet_folder)(images, PROMPTS, metadata))
    np.testing.assert_allclose(result, -expected, rtol=1e-4)
    assert expected.min() > 0.01
    to_input = rewards.distance_penalty(resnet_folder, reference="image")
    assert torch.equal(values(to_input(images, PROMPTS, metadata)), torch.zeros(2))


def test_pixel_penalty_is_the_root_mean_square():
    images = torch.full((2, 3, 8, 8), 0.5)
    targets = [torch.full((3, 8, 8), 0.2), images[1].clone()]
    targets[1][0] = 0.9  # one channel of three
    metadata = [{"target": target, "image": image} for target, image in zip(targets, images, strict=True)]
    result = values(rewards.pixel_penalty()(images, PROMPTS, metadata))
    np.testing.assert_allclose(result, [-0.3, -0.4 / 3**0.5], rtol=1e-6)
    to_input = rewards.pixel_penalty(reference="image")
    assert values(to_input(images, PROMPTS, metadata)).tolist() == [0, 0]


def test_distance_penalty_refuses_a_network_without_maps(resnet_folder, tmp_path):
    config = ViTConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=64,
    )  # fmt: skip
    ViTModel(config).save_pretrained(tmp_path / "vit")
    shutil.copy(resnet_folder / "preprocessor_config.json", tmp_path / "vit")
    with pytest.raises(RuntimeError, match=r"vit.*use a convolutional net"):
        rewards.distance_penalty(tmp_path / "vit")


@pytest.mark.parametrize("name", sorted(rewards.REWARDS.keys() - {"aesthetic_score"}))  # of another CLIP
def test_a_reward_needs_no_more_of_the_metadata_than_it_declares(name, clip_folder, resnet_folder):
    """Given what it declares, it scores; without a key of it, it says that the key is missing."""
    known = rewards.REWARDS[name]
    settings = {"classes": ("cat", "dog")} if "label" in known.needs else {}
    reward = known.make(
        *({"NETWORK": resnet_folder}.get(model, clip_folder) for model in known.models), **settings
    )
    size = 64 if name.startswith("animal_") else 32
    images = torch.full((1, 3, size, size), 0.5)
    whole: dict[str, Any] = {"image": images[0], "target": images[0], "label": "cat", "digit": 3}
    given = {key: value for key, value in whole.items() if key in known.needs}
    prompt = "a red three, a fox by Noto on a blue background" if "prompt" in known.needs else ""
    reward(images, [prompt], [given])
    for key in given:
        with pytest.raises(ValueError, match=f"has no '{key}'"):
            reward(images, [prompt], [{other: value for other, value in given.items() if other != key}])
    if known.reads is not None:
        with pytest.raises(ValueError, match="name"):
            known.reads(["a fax"])


def test_a_model_that_cannot_be_had_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    asking = [name for name, known in rewards.REWARDS.items() if known.models]
    assert len(asking) == 7
    for name in asking:
        with pytest.raises(RuntimeError) as caught:
            rewards.get_reward(name)
        message = str(caught.value)
        assert any(
            model in message
            for model in (
                learned.CLIP_MODEL,
                learned.AESTHETIC_HEAD,
                learned.PERCEPTUAL_MODEL,
                learned.PICK_SCORE,
            )
        )
        for part in ("no answer of", "hf download", "pass its path", "HF_HOME"):
            assert part in message


def half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def as_pickle(file: Path) -> None:
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()


def without_projection(file: Path) -> None:
    weights = load_file(file)
    del weights["visual_projection.weight"]
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda file: shutil.rmtree(file.parent), r"clip.*could not be loaded.*hf download"),
        (as_pickle, r"could not be loaded.*safetensors"),
        (half, "could not be loaded"),
        (without_projection, r"weights are missing: visual_projection\.weight"),  # and not left random
    ],
)
def test_weights_that_are_not_whole_are_refused(clip_folder, tmp_path, spoil, message):
    folder = shutil.copytree(clip_folder, tmp_path / "clip")
    spoil(folder / "model.safetensors")
    with pytest.raises(RuntimeError, match=message):
        rewards.clip_score(folder)


# ------------------------------------------------------------------------------------ combinations
def constant(*numbers: float) -> rewards.RewardFunction:
    return lambda images, prompts, metadata: torch.tensor(numbers)


def test_weighted_sum_reports_every_component():
    def with_info(images: Any, prompts: Any, metadata: Any) -> rewards.Rewards:
        return torch.tensor([3, 5]), {"detail": torch.tensor([1.0, 2.0])}  # integers, on purpose

    combined = rewards.weighted_sum({"a": (0.5, constant(1.0, -2.0)), "b": (-0.1, with_info)})
    result = combined(torch.zeros(2, 3, 8, 8), PROMPTS, NO_METADATA)
    assert isinstance(result, tuple)
    total, info = result
    np.testing.assert_allclose(total, [0.5 - 0.3, -1.0 - 0.5], rtol=1e-6)
    assert sorted(info) == ["a", "b", "b/detail"]
    assert info["a"].tolist() == [1.0, -2.0]
    assert info["b"].tolist() == [3.0, 5.0]
    assert info["b/detail"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("component", "match"),
    [
        (constant(1.0), r"'bad' have shape \(1,\)"),
        (constant(1.0, math.nan), "'bad' is nan for sample 1"),
        (constant(math.inf, 1.0), "'bad' is inf for sample 0"),
        (lambda *_: (torch.ones(2), [1, 2]), r"the reward 'bad' returned \[1, 2\] as its second result"),
    ],
)
def test_weighted_sum_names_a_bad_component(component, match):
    combined = rewards.weighted_sum({"good": (1.0, constant(1.0, 1.0)), "bad": (1.0, component)})
    with pytest.raises((TypeError, ValueError), match=match):
        combined(torch.zeros(2, 3, 8, 8), PROMPTS, NO_METADATA)


def test_weighted_sum_refuses_bad_weights():
    with pytest.raises(ValueError, match="components is empty"):
        rewards.weighted_sum({})
    with pytest.raises(ValueError, match="weight of 'a' is nan"):
        rewards.weighted_sum({"a": (math.nan, constant(1.0))})


@pytest.mark.parametrize(
    "component", [constant(1.0), 1.0, (1.0,), (constant(1.0), 1.0), ("1", constant(1.0))]
)
def test_weighted_sum_refuses_a_component_that_is_no_weight_and_reward(component):
    components: Any = {"a": component}
    with pytest.raises(TypeError, match=r"component 'a' is .*: give \(weight, reward\)"):
        rewards.weighted_sum(components)


@pytest.mark.parametrize("second", [[1, 2], "note", torch.ones(2)])
def test_a_second_result_that_is_no_dict_is_refused(second):
    with pytest.raises(TypeError, match=r"reward_function returned .* as its second result: return a dict"):
        reward.split_info((torch.ones(2), second))


def test_two_numbers_are_two_rewards():
    assert reward.split_info((1.0, 2.0)) == ((1.0, 2.0), {})


def test_none_as_a_second_result_is_no_information():
    assert reward.split_info((torch.ones(2), None))[1] == {}


def test_edit_is_clips_cosine_less_the_distance_to_the_input(clip_folder, resnet_folder):
    """With their weights; each of the two has a test against its model above."""
    images, inputs = bytes_images(11, 2, 3, SIZE, SIZE), bytes_images(12, 2, 3, SIZE, SIZE)
    # A target that is the result itself: what is kept must be the input.
    metadata = [{"image": before, "target": after} for before, after in zip(inputs, images, strict=True)]
    cosines = values(rewards.clip_score(clip_folder)(images, PROMPTS, metadata))
    to_input = rewards.distance_penalty(resnet_folder, reference="image")
    distances = -values(to_input(images, PROMPTS, metadata))
    score, info = rewards.edit(clip_folder, resnet_folder, 3.0, 0.5)(images, PROMPTS, metadata)
    assert torch.equal(info["clip_score"], cosines)
    assert torch.equal(info["distance_penalty"], -distances)
    torch.testing.assert_close(score, 3 * cosines - 0.5 * distances)
    assert distances.min() > 0.01
    default, _ = rewards.edit(clip_folder, resnet_folder)(images, PROMPTS, metadata)
    torch.testing.assert_close(default, 5 * cosines - distances)


def test_edit_needs_good_weights():
    for weights in ({"clip_weight": -1.0}, {"distance_weight": math.inf}, {"distance_weight": math.nan}):
        (name,) = weights
        with pytest.raises(ValueError, match=f"{name}=.*not negative"):  # before it looks for a model
            rewards.edit("nowhere", "nowhere", **weights)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"reward='jpeg'.*jpeg_compressibility.*prompt_alignment"):
        rewards.get_reward("jpeg")
    with pytest.raises(ValueError, match=r"does not exist \(perhaps colorfulness\): use one of"):
        rewards.get_reward("colourfulness")
    with pytest.raises(ValueError, match=r"reward='my.py:red' is .* import a function of your own"):
        rewards.get_reward("my.py:red")


def test_recoloring_adds_up_digit_colors_and_shape():
    white, black, red, blue = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0)
    prompts = [RED_ON_BLUE] * 2
    before = square(white, black)
    metadata = [{"digit": np.int64(3), "image": before}, {"digit": torch.tensor(3), "image": before}]
    images = torch.stack([square(red, blue), square(red, blue, left=14)])
    score, info = rewards.recoloring(ReadsThree())(images, prompts, metadata)
    ink = (0.14**2 + 0.13**2 + 0.15**2) ** 0.5  # from (1, 0, 0) to the world's red
    background = (0.13**2 + 0.25**2 + 0.20**2) ** 0.5  # from (0, 0, 1) to its blue
    moved = 2 * 2 * 8 / 1024  # two columns of ink went, two came
    assert info["ink_distance"].tolist() == pytest.approx([ink, ink], abs=1e-5)
    assert info["background_distance"].tolist() == pytest.approx([background, background], abs=1e-5)
    assert info["shape_distance"].tolist() == pytest.approx([0, moved], abs=1e-5)
    digit = math.log(0.55)
    assert info["digit_log_prob"].tolist() == pytest.approx([digit, digit])
    expected = digit - 10 * (ink + background)
    assert score.tolist() == pytest.approx([expected, expected - 30 * moved], abs=1e-4)


def test_recoloring_prefers_the_right_answer_and_asks_for_both_colors():
    edits = digits.draw_edits(16, "test", 2)
    pairs = zip(edits.inputs.digits.tolist(), edits.inputs.images, strict=True)
    metadata = [{"digit": digit, "image": image} for digit, image in pairs]
    reward = rewards.recoloring()
    right, _ = reward(edits.targets, edits.prompts, metadata)
    untouched, _ = reward(edits.inputs.images, edits.prompts, metadata)
    somebody_elses, _ = reward(edits.targets.roll(1, 0), edits.prompts, metadata)
    assert (right > untouched + 1).all()
    assert (right > somebody_elses + 1).all()
    with pytest.raises(ValueError, match="does not name ink and background"):
        reward(edits.targets, ["a red digit"] * 16, metadata)


def test_a_judge_is_recorded_without_gradient():
    images = torch.rand(3, 3, 4, 4, requires_grad=True)
    rewards, info = judged(brightness, brightness)(images, ("",) * 3, ({},) * 3)
    assert rewards.requires_grad
    assert torch.equal(info["judge"], rewards.detach())
    assert not info["judge"].requires_grad
    with pytest.raises(ValueError, match="'judge' have shape"):
        judged(brightness, lambda *_: torch.zeros(2))(images, ("",) * 3, ({},) * 3)


def test_a_factory_without_the_argument_that_its_need_brings_is_refused():
    def mine() -> rewards.RewardFunction:
        raise AssertionError("is not made")

    with pytest.raises(TypeError, match="mine needs a 'label': give it an argument 'classes'"):
        rewards.register(needs=("label",))(mine)
    assert "mine" not in rewards.REWARDS
