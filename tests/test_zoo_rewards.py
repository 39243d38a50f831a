"""The reward of the world of animals, and the prompts that it scores."""

import shutil

import pytest
import torch

from ddpo_lessons.damages import DAMAGES
from ddpo_lessons.data.folders import ImagePrompts, find_images, open_image
from ddpo_lessons.image import to_tensor
from ddpo_lessons.named_prompts import hidden_animals, zoo_prompts
from ddpo_lessons.rewards import AveragedOverViews, animal_alignment, animal_margin, check_order
from ddpo_lessons.worlds import animals
from ddpo_lessons.worlds.judges import named


class Says(torch.nn.Module):
    """Gives the first class of each kind a logit of 2, and all others 0."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(2.0 * torch.eye(classes)[[0] * len(images)] for classes in (45, 3, 8))


E2 = 7.38905609893065  # e²
CAT, NOTO = torch.tensor(E2 / (E2 + 44)).log().item(), torch.tensor(E2 / (E2 + 2)).log().item()


class ReadsCorners(torch.nn.Module):
    """Has the upper left and the upper right pixel as the logits of two classes."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.stack([images[:, 0, 0, 0], images[:, 0, 0, -1]], dim=1),)


def green(count: int) -> torch.Tensor:
    return torch.tensor(animals.BACKGROUNDS["green"])[None, :, None, None].repeat(count, 1, 64, 64)


def test_the_reward_by_hand():
    prompts = ["a cat by Noto on a green background", "an animal by Noto on a red background", "a cat"]
    metadata = [{}, {"animal": "cat"}, {}]
    rewards, terms = animal_alignment(Says(), 20.0)(green(3), prompts, metadata)
    far = torch.dist(
        torch.tensor(animals.BACKGROUNDS["green"]), torch.tensor(animals.BACKGROUNDS["red"])
    ).item()
    assert terms["background_distance"].tolist() == pytest.approx([0, far, 0], abs=1e-6)
    expected = [CAT + NOTO, CAT + NOTO - 20 * far, CAT]
    assert rewards.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_ground_is_measured_where_the_mask_says():
    images, mask = green(1), torch.zeros(64, 64, dtype=torch.bool)
    images[0, :, 10, 10] = torch.tensor(animals.BACKGROUNDS["red"])
    mask[10, 9:13] = True  # four pixels, one of them red
    far = torch.dist(
        torch.tensor(animals.BACKGROUNDS["green"]), torch.tensor(animals.BACKGROUNDS["red"])
    ).item()
    reward, prompt = animal_alignment(Says()), ["a cat on a green background"]
    for metadata, distance in (
        ({}, 0),
        ({"background_mask": mask}, far / 4),
        ({"background_mask": ~mask}, 0),
    ):
        _, terms = reward(images, prompt, [metadata])
        assert terms["background_distance"].item() == pytest.approx(distance, abs=1e-6)


@pytest.mark.parametrize("mask", [torch.ones(64, 64), torch.ones(32, 32, dtype=torch.bool), None])
def test_a_mask_that_does_not_fit_or_is_missing_is_refused(mask):
    right = {"background_mask": torch.ones(64, 64, dtype=torch.bool)}
    with pytest.raises(ValueError, match=r"metadata\[1\]\['background_mask'\] must be a bool tensor"):
        animal_alignment(Says())(green(2), ["a cat"] * 2, [right, {"background_mask": mask}])


@pytest.mark.parametrize(
    ("size", "prompt", "metadata", "message"),
    [
        (64, "a three", {}, "names no animal, artist or background"),
        (64, "an animal", {"artist": "Rembrandt"}, "'Rembrandt': use a name of worlds.animals.ARTISTS"),
        (64, "by Noto", {"animal": "owl"}, "'owl': use a name of worlds.animals.ANIMALS"),
        (32, "a fox", {}, "images are 32x32"),
    ],
)
def test_what_cannot_be_scored_is_refused(size, prompt, metadata, message):
    with pytest.raises(ValueError, match=message):
        animal_alignment(Says())(torch.rand(1, 3, size, size), [prompt], [metadata])


def test_the_metadata_speaks_where_the_prompt_is_silent():
    metadata = [{"animal": "cat", "artist": "Noto"}, {"animal": "cat", "artist": "Noto"}, {"animal": "fox"}]
    prompts = ["an animal", "a dog by Fluent", "an animal"]
    _, terms = animal_alignment(Says())(torch.zeros(3, 3, 64, 64), prompts, metadata)
    assert terms["animal_log_prob"].tolist() == pytest.approx([CAT, CAT - 2, CAT - 2], abs=1e-5)
    assert terms["artist_log_prob"].tolist() == pytest.approx([NOTO, NOTO - 2, 0], abs=1e-5)


def test_the_reward_model_prefers_what_is_asked_for():
    edits = animals.draw_edits(20, 3)
    reward = animal_alignment()
    asked, untouched = (
        reward(images, edits.prompts, edits.metadata)[0] for images in (edits.wanted.images, edits.images)
    )
    assert asked.min() > -0.5
    assert untouched.max() < -1


@pytest.mark.parametrize(("split", "pairs"), [("seen", animals.SEEN), ("left_out", animals.LEFT_OUT)])
def test_prompts_are_of_their_split_and_say_what_the_metadata_says(split, pairs):
    sampler = zoo_prompts(0, split)
    for _ in range(50):
        prompt, metadata = sampler()
        said = animals.parse_prompt(prompt)
        assert {"animal": said.animal, "artist": said.artist, "background": said.background} == metadata
        assert (animals.ANIMALS.index(said.animal), animals.ARTISTS.index(said.artist)) in pairs
    with pytest.raises(ValueError, match="split='test'"):
        zoo_prompts(0, "test")


def test_requests_leave_the_animal_out_and_continue_where_they_stood():
    sampler, other = hidden_animals(0), hidden_animals(7)
    draws = [sampler() for _ in range(3)]
    for prompt, image, metadata in draws:
        assert animals.parse_prompt(prompt).animal is None
        assert animals.ANIMALS.index(metadata["animal"]) in animals.PRACTICE_ANIMALS
        assert metadata["artist"] in animals.ARTISTS
        assert image.shape == metadata["target"].shape == (3, 64, 64)
    other.load_state_dict({"seed": 0, "drawn": 2})
    prompt, image, _ = other()
    assert prompt == draws[2][0]
    assert torch.equal(image, draws[2][1])


# ----------------------------------------------------------------------------------------- the margin
class Says45(torch.nn.Module):
    """Gives animal number n, of all 45, a logit of n."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.arange(45.0).expand(len(images), 45), images[:, 0], images[:, 0]


def test_the_margin_is_among_the_classes_of_the_folder():
    first, third, last = (animals.ANIMALS[number] for number in (0, 2, 44))
    metadata = [{"label": last}, {"label": third}]
    of_all, of_three = (animal_margin(names, Says45()) for names in (animals.ANIMALS, (first, third, last)))
    assert of_all(green(2), ["", ""], metadata).tolist() == [1, 2 - 44]
    assert of_three(green(2), ["", ""], metadata).tolist() == [42, 2 - 44]


def test_a_positive_margin_is_a_right_answer():
    shown = animals.draw_images(60, 3)
    foggy = DAMAGES["foggy"](shown.images, 2, torch.Generator().manual_seed(0))
    metadata = [{"label": said.animal} for said in shown.descriptions]
    for classifier in (animals.RewardModel.load(), animals.Judge.load()):
        reward = animal_margin(model=classifier)
        right = named(classifier, foggy)[:, 0] == shown.labels[:, 0]
        assert 0 < right.sum() < 60
        assert torch.equal(reward(foggy, [""] * 60, metadata) > 0, right)
    default = animal_margin()(foggy, [""] * 60, metadata)
    assert torch.equal(default, animal_margin(model=animals.RewardModel.load())(foggy, [""] * 60, metadata))


@pytest.mark.parametrize(
    ("classes", "size", "metadata", "message"),
    [
        (("cat",), 64, {"label": "cat"}, "give two or more different names"),
        (("cat", "church"), 64, {"label": "cat"}, "classes contain 'church': use names from"),
        (("cat", "dog"), 64, {"label": "fox"}, r"metadata\[0\]\['label'\] is 'fox': use one of"),
        (("cat", "dog"), 64, {}, r"metadata\[0\] has no 'label'"),
        (("cat", "dog"), 32, {"label": "cat"}, "images are 32x32: animal_margin scores"),
    ],
)
def test_what_has_no_margin_is_refused(classes, size, metadata, message):
    with pytest.raises(ValueError, match=message):
        animal_margin(classes)(green(1)[:, :, :size, :size], [""], [metadata])


# ------------------------------------------------------------------------------------------ the order
def test_the_order_of_a_reward_by_hand():
    """Brightness orders two of four: clean 0.9, 0.8, 0.4, 0.6; damaged 0.7, 0.7, 0.7, 0.3; blank 0.5."""
    contexts = [
        ("", torch.full((3, 8, 8), damaged), {"target": torch.full((3, 8, 8), clean)})
        for clean, damaged in ((0.9, 0.7), (0.8, 0.7), (0.4, 0.7), (0.6, 0.3))
    ]

    def brightness(images, prompts, metadata):
        assert (len(prompts), len(metadata)) == (4, 4)
        return images.mean(dim=(1, 2, 3)), {"more": images[:, 0, 0, 0]}

    found = check_order(brightness, contexts)
    assert found == pytest.approx({"clean": 0.675, "damaged": 0.6, "blank": 0.5, "in_order": 0.5})
    with pytest.raises(ValueError, match=r"metadata\[0\] has no 'target'"):
        check_order(brightness, [("", contexts[0][1], {})])


def test_of_undamaged_images_only_the_blank_ones_are_compared():
    images = torch.stack([torch.full((3, 8, 8), shade) for shade in (0.9, 0.4)])
    contexts = [("", image, {"target": image}) for image in images]
    found = check_order(lambda shown, *_: shown.mean(dim=(1, 2, 3)), contexts)
    assert found == pytest.approx({"clean": 0.65, "damaged": 0.65, "blank": 0.5, "in_order": 0.5})


def test_the_order_is_found_a_few_images_at_a_time():
    shades = [number / 20 for number in range(19)]
    contexts = [
        (str(shade), torch.full((3, 8, 8), shade), {"target": torch.full((3, 8, 8), shade + 0.05)})
        for shade in shades
    ]
    sizes = []

    def brightness(images, prompts, metadata):
        sizes.append(len(images))
        assert len(prompts) == len(metadata) == len(images)
        return images.mean(dim=(1, 2, 3))

    found = check_order(brightness, contexts)
    assert sizes == [8, 8, 3] * 3
    assert found == pytest.approx({"clean": 0.5, "damaged": 0.45, "blank": 0.5, "in_order": 8 / 19})


def test_pictures_lie_in_folders_and_the_margin_orders_them(tmp_path):
    written = animals.write_images(tmp_path / "zoo", 2, seed=0)
    again = animals.write_images(tmp_path / "again", 2, seed=0)
    every = find_images(written)
    assert len(every.files) == 90
    for file in every.files:
        assert file.read_bytes() == (again / file.relative_to(written)).read_bytes()
    for name in set(every.classes) - {"cat", "fox"}:
        shutil.rmtree(written / name)
    images = find_images(written)
    assert images.labels == ("cat", "cat", "fox", "fox")
    shown = torch.stack([to_tensor(open_image(file)) for file in images.files])
    assert shown.shape == (4, 3, 64, 64)
    seen = {animals.ANIMALS[number] for number in named(animals.Judge.load(), shown)[:, 0]}
    assert seen == {"cat", "fox"}
    held_out = ImagePrompts(images, "an animal", 64, 0, ("foggy",), (4,)).every()
    found = check_order(animal_margin(images.classes), held_out)
    assert found["clean"] > found["damaged"] + 5


def test_an_average_over_views_by_hand():
    """On pixels 1 2 3 / 4 5 6: as it is 1, 3; mirrored 3, 1; shifted by one pixel to each corner."""
    image = torch.arange(1.0, 7).view(1, 1, 2, 3)
    averaged = AveragedOverViews(ReadsCorners(), pixels=1)
    upper = [view[0].tolist() for view in averaged.views(image)[:, 0, 0]]
    # Shifted down or up: rows 1 1 or 2; to the right or left: columns 1 1 2 or 2 3 3.
    assert upper == [[1, 2, 3], [3, 2, 1], [1, 1, 2], [2, 3, 3], [4, 4, 5], [5, 6, 6]]
    # The logits differ by 2, -2, 1, 1, 1, 1; log p = -log(1 + e^d) for the first class.
    losses = [torch.tensor(float(d)).exp().add(1).log().item() for d in (2, -2, 1, 1, 1, 1)]
    (logits,) = averaged(torch.cat([image, image + 7]))
    assert logits[:, 0].tolist() == pytest.approx([-sum(losses) / 6] * 2, abs=1e-6)


def test_views_keep_the_size_and_constant_images():
    averaged = AveragedOverViews(animals.RewardModel.load().eval())
    images = green(2)
    assert torch.equal(averaged.views(images), images.expand(6, 2, 3, 64, 64))
    for alone, together in zip(averaged.classifier(images), averaged(images), strict=True):
        torch.testing.assert_close(together, alone.log_softmax(dim=1))


def test_a_view_must_be_shifted():
    with pytest.raises(ValueError, match="pixels=0: a view must be shifted by at least 1"):
        AveragedOverViews(Says(), pixels=0)
