"""What users bring along: rewards of large numbers, or that write into what they get; images; float64."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    NOT_CLIPPED,
    brightness,
    make_config,
    make_flux_pipeline,
    make_pipeline,
    make_sd3_pipeline,
    red_three,
    weights_of,
)
from PIL import Image

from ddpo_lessons.algorithms import make_algorithm
from ddpo_lessons.data.folders import open_image
from ddpo_lessons.image import to_tensor
from ddpo_lessons.trainer import DDPOTrainer, ImageDDPOTrainer, Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "turn", [list, np.array, lambda values: torch.tensor(values, dtype=torch.float64), torch.LongTensor]
)
def test_rewards_that_float32_cannot_tell_apart_still_differ(turn, tmp_path, recwarn):
    """1e8 and 1e8 + 1 are one number in float32; their advantages are -1 and 1."""
    seen: list[torch.Tensor] = []

    def reward(images: torch.Tensor, *_: Any) -> Any:
        return turn([100_000_000 + n for n in range(len(images))])

    trainer = DDPOTrainer(make_config(tmp_path, sample_batch_size=2), reward, red_three, make_pipeline())
    weigh = trainer.algorithm.advantages
    trainer.algorithm.advantages = lambda *given: seen.append(weigh(*given)) or seen[-1]
    trainer.step(0)
    assert seen[0].tolist()[:2] == pytest.approx([-1, 1])
    assert not [str(warning.message) for warning in recwarn if "teaches nothing" in str(warning.message)]


def write_into_images(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return images.mul_(2).sub_(1).mean((1, 2, 3))


def write_into_metadata(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    for entry in metadata:
        entry["image"] *= 0.5
    return images.mean((1, 2, 3))


def replace_in_metadata(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    for entry in metadata:
        entry["image"] = entry["image"] * 0.5  # other rollouts of the group share the dict
    return images.mean((1, 2, 3))


def write_into_a_list(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    metadata[0]["more"][0][:] = 0.0
    return images.mean((1, 2, 3))


def note_in_metadata(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    """Keep something for a hook, which harms nobody."""
    for entry, image in zip(metadata, images, strict=True):
        entry["seen"] = image
    return images.mean((1, 2, 3))


def test_a_reward_may_add_to_the_metadata(tmp_path):
    """Also where it holds itself."""
    metadata: dict[str, Any] = {"id": 1}
    metadata["self"] = metadata
    trainer = DDPOTrainer(
        make_config(tmp_path), note_in_metadata, lambda: ("a red three", metadata), make_pipeline()
    )
    trainer.train()


def test_a_run_that_was_undone_leaves_a_fresh_pipeline(tmp_path):
    """An epoch that fails after its optimizer steps has trained nothing."""

    def fail(*_: Any) -> None:
        raise OSError("after all steps")

    pipeline = make_pipeline()
    with pytest.raises(OSError, match="after all steps"):
        DDPOTrainer(make_config(tmp_path / "a"), brightness, red_three, pipeline, fail).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DDPOTrainer(make_config(tmp_path / "b"), brightness, red_three, pipeline)


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_exif_that_cannot_be_read_turns_nothing(kind, tmp_path):
    path = tmp_path / f"a.{kind}"
    Image.new("RGB", (2, 1), (51, 51, 51)).save(path, exif=b"Exif\x00\x00broken")
    assert to_tensor(open_image(path)).shape == (3, 1, 2)


def write_by_numpy(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    pixels = np.asarray(metadata[0]["image"])  # the memory of a tensor, whose count of writes stays
    pixels *= 0
    return images.mean((1, 2, 3))


@pytest.mark.parametrize(
    "reward", [write_into_images, write_into_metadata, replace_in_metadata, write_into_a_list, write_by_numpy]
)
@pytest.mark.parametrize("as_array", [False, True])
def test_a_reward_that_writes_into_what_it_is_given_is_refused(reward, as_array, tmp_path):
    """Later rollouts of the epoch start from metadata["image"], and a judge looks at the images."""
    image = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    kept = image.clone()

    def prompts() -> Any:
        given = image.numpy() if as_array else image
        return "", given, {"image": given, "more": [given]}

    trainer = ImageDDPOTrainer(make_config(tmp_path), reward, prompts, make_pipeline(), noise_strength=0.7)
    before = weights_of(trainer).clone()
    with pytest.raises(ValueError, match=r"writes into the images or the metadata.*copies"):
        trainer.train()
    assert torch.equal(weights_of(trainer), before)
    assert torch.equal(image, kept) == (reward in (write_into_images, replace_in_metadata))


# --------------------------------------------------------------------------- a pipeline that is used twice
@pytest.mark.parametrize("use_lora", [True, False])
def test_a_second_trainer_of_one_pipeline_says_that_it_goes_on(use_lora, tmp_path):
    """A cell that is run twice: the second run starts where the first one ended."""
    pipeline = make_pipeline()

    def train(folder: str, **changes: Any) -> torch.Tensor:
        config = make_config(tmp_path / folder, train_use_lora=use_lora, **changes)
        trainer = DDPOTrainer(config, brightness, red_three, pipeline)
        began = weights_of(trainer).clone()
        trainer.train()
        return began

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = train("first")
    with pytest.warns(UserWarning, match="an earlier trainer.*load a fresh pipeline"):
        second = train("second")
    assert not torch.equal(first, second)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train("second", resume_from="latest", num_epochs=2)  # whose weights come from the checkpoint
        if use_lora:
            pipeline.unload_lora_weights()
            again = train("again")
            assert torch.equal(again, first)  # as of a fresh pipeline


def test_an_adapter_that_a_user_loads_is_no_second_trainer(tmp_path):
    trainer = DDPOTrainer(make_config(tmp_path / "first"), brightness, red_three, make_pipeline())
    trainer.train()
    trainer.save_pretrained(tmp_path / "lora")
    pipeline = make_pipeline()
    pipeline.load_lora_weights(tmp_path / "lora")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DDPOTrainer(make_config(tmp_path / "second"), brightness, red_three, pipeline)
        DDPOTrainer(make_config(tmp_path / "third"), brightness, red_three, pipeline)  # nothing was trained


# ---------------------------------------------------------------------------------------------- images
def transparent(mode: str) -> Image.Image:
    """Make an image of two pixels: a clear one whose hidden color is dark, and an opaque dark one."""
    image = Image.new("RGBA", (2, 1), (51, 51, 51, 0))
    image.putpixel((1, 0), (51, 51, 51, 255))
    if mode == "P":  # as in a GIF: one entry of the palette is clear
        image = Image.new("P", (2, 1))
        image.putpalette([51, 51, 51, 51, 51, 51])
        image.putpixel((1, 0), 1)
        image.info["transparency"] = 0
    elif mode == "RGB":  # as in a PNG without alpha: a color is clear
        image = Image.new("RGB", (2, 1), (51, 51, 51))
        image.putpixel((0, 0), (9, 9, 9))
        image.info["transparency"] = (9, 9, 9)
    return image.convert("LA") if mode == "LA" else image


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_what_is_transparent_lets_a_white_ground_through(mode):
    assert to_tensor(transparent(mode)).tolist() == [[[1.0, pytest.approx(0.2)]]] * 3  # 51 of 255


def test_half_transparent_red_is_pink():
    """By hand: 128/255 of (255, 0, 0) and 127/255 of white are (255, 127, 127)."""
    pink = to_tensor(Image.new("RGBA", (1, 1), (255, 0, 0, 128)))
    assert (pink.flatten() * 255).tolist() == pytest.approx([255, 127, 127])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_from_a_function_is_turned_as_one_from_a_folder(orientation, tmp_path):
    """Pixels by EXIF 2.3, table 4: 6 means that the camera was turned left, so its left edge is the top."""
    image = Image.new("L", (2, 1), 0)
    image.putpixel((1, 0), 255)  # dark, then bright
    exif = image.getexif()
    exif[0x0112] = orientation
    (tmp_path / "folder").mkdir()
    image.save(path := tmp_path / "folder" / "photo.png", exif=exif)
    upright = {1: [[0, 1]], 2: [[1, 0]], 3: [[1, 0]], 4: [[0, 1]]}
    upright |= {5: [[0], [1]], 6: [[0], [1]], 7: [[1], [0]], 8: [[1], [0]]}
    with Image.open(path) as opened:
        assert to_tensor(opened)[0].tolist() == upright[orientation]
    assert to_tensor(open_image(path))[0].tolist() == upright[orientation]


# ------------------------------------------------------------------------------- torch's default precision
@pytest.mark.parametrize(
    ("model", "algorithm", "settings"),
    [
        (make_pipeline, "ddpo", {}),
        (make_pipeline, "branching", {"sample_group_size": 2, "sample_batch_size": 2}),
        (make_pipeline, "rwr", NOT_CLIPPED),
        (make_pipeline, "draft", NOT_CLIPPED),
        (make_sd3_pipeline, "flow_grpo", {"sample_eta": 0.7}),
        (make_sd3_pipeline, "awm", NOT_CLIPPED),
        (make_flux_pipeline, "nft", NOT_CLIPPED),
    ],
)
def test_a_run_is_the_same_whatever_torch_s_default_precision_is(model, algorithm, settings, tmp_path):
    """With float64 as the default, the package's tensors and random numbers stay those of float32.

    Only peft draws an adapter's first weights in the default precision: here both runs get the same.
    """
    runs = []
    for default in (torch.float32, torch.float64):
        config, pipeline = make_config(tmp_path / str(default), **settings), model()
        torch.set_default_dtype(default)
        try:
            made = make_algorithm(algorithm)
            runs.append(Trainer(config, brightness, red_three, pipeline, algorithm=made))
            generator = torch.Generator().manual_seed(0)
            for parameter in runs[-1].learner.trainable.values():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.data = noise / 10
            runs[-1].step(0)
        finally:
            torch.set_default_dtype(torch.float32)
    assert weights_of(runs[1]).dtype == torch.float32
    torch.testing.assert_close(weights_of(runs[1]), weights_of(runs[0]), rtol=0, atol=1e-6)
