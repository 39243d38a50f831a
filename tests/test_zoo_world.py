"""The world of animals: the sheet, drawing, measuring, words and edits."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

from ddpo_lessons.image import measure_background
from ddpo_lessons.worlds import animals
from ddpo_lessons.worlds.judges import nearest

STILL = torch.eye(2, 3)
PAPER = (  # simple_animals.txt of kvablack/ddpo-pytorch, line by line
    "cat dog horse monkey rabbit zebra spider bird sheep deer cow goat lion tiger bear raccoon fox wolf "
    "lizard beetle ant butterfly fish shark whale dolphin squirrel mouse rat snake turtle frog chicken duck "
    "goose bee pig turkey fly llama camel bat gorilla hedgehog kangaroo"
)


def sprite(animal: str, artist: str) -> Image.Image:
    """Cut a picture out of the sheet, by PIL alone."""
    row, column = PAPER.split().index(animal), ("Noto", "Twemoji", "Fluent").index(artist)
    return Image.open(animals.SHEET).crop((64 * column, 64 * row, 64 * column + 64, 64 * row + 64))


def draw(animal: str, artist: str, background: str, theta: torch.Tensor = STILL) -> torch.Tensor:
    """Render one picture, (3, 64, 64)."""
    pair = torch.tensor([[animals.ANIMALS.index(animal), animals.ARTISTS.index(artist)]])
    return animals.render(pair, torch.tensor([animals.BACKGROUND_NAMES.index(background)]), theta[None])[0]


# -------------------------------------------------------------------------------------------- the sheet
def test_sheet_is_a_small_png_with_a_picture_of_its_own_for_each_pair():
    image = Image.open(animals.SHEET)
    assert (image.format, image.mode, image.size) == ("PNG", "RGBA", (3 * 64, 45 * 64))
    assert animals.SHEET.stat().st_size <= 2.5e6
    assert animals.sprites().shape == (45, 3, 4, 64, 64)
    alpha = animals.sprites()[:, :, 3]
    assert alpha.mean(dim=(2, 3)).min() > 0.1  # nobody is missing
    assert animals.sprites().flatten(2).flatten(0, 1).unique(dim=0).shape[0] == 135


def test_animals_are_those_of_the_paper():
    assert tuple(PAPER.split()) == animals.ANIMALS


def test_thirty_pairs_are_left_out_ten_an_artist_and_no_animal_twice():
    assert len(set(animals.LEFT_OUT)) == 30
    assert Counter(artist for _, artist in animals.LEFT_OUT) == {0: 10, 1: 10, 2: 10}
    assert max(Counter(animal for animal, _ in animals.LEFT_OUT).values()) == 1
    every = set(itertools.product(range(45), range(3)))
    assert len(animals.SEEN) + len(animals.LEFT_OUT) == len(every) == 135
    assert set(animals.SEEN) | set(animals.LEFT_OUT) == every


def test_nine_animals_are_new_and_the_others_for_practice():
    assert len(animals.NEW_ANIMALS) == 9
    assert sorted(animals.NEW_ANIMALS + animals.PRACTICE_ANIMALS) == list(range(45))


# ------------------------------------------------------------------------------------------- rendering
def test_render_by_hand():
    image = draw("bear", "Twemoji", "green")
    picture = np.array(sprite("bear", "Twemoji"))
    assert picture[0, 0, 3] == 0  # a corner without the bear
    assert image[:, 0, 0].tolist() == pytest.approx((0.36, 0.70, 0.42))
    assert picture[32, 32, 3] == 255  # its face
    assert (image[:, 32, 32] * 255).tolist() == pytest.approx(picture[32, 32, :3].tolist(), abs=1e-3)


def test_render_composes_as_pil_does():
    for words in ("fox Noto blue", "fly Fluent white", "zebra Twemoji red"):
        animal, artist, background = words.split()
        color = tuple(round(255 * part) for part in animals.BACKGROUNDS[background])
        expected = Image.alpha_composite(Image.new("RGBA", (64, 64), color), sprite(animal, artist))
        drawn = 255 * draw(animal, artist, background).permute(1, 2, 0).numpy()
        assert np.abs(drawn - np.array(expected)[:, :, :3]).max() < 1.01, (
            animal
        )  # of 255; the background is rounded, and so is PIL's sum


def test_a_flip_mirrors_and_a_shift_moves_by_pixels():
    upright = draw("fox", "Noto", "pink")
    assert (upright - upright.flip(2)).abs().max() > 0.1  # so the next line could be false
    flip = torch.tensor([[-1.0, 0, 0], [0, 1, 0]])
    torch.testing.assert_close(draw("fox", "Noto", "pink", flip), upright.flip(2))
    shift = torch.tensor([[1.0, 0, 2 * 2 / 64], [0, 1, -1 * 2 / 64]])  # two to the left, one down
    torch.testing.assert_close(draw("fox", "Noto", "pink", shift)[:, 1:, :-2], upright[:, :-1, 2:])


def test_placements_keep_their_ranges():
    theta = animals.placements(4000, torch.Generator().manual_seed(0))
    assert theta[:, 0, 1].abs().max() == theta[:, 1, 0].abs().max() == 0  # nothing is turned
    size, side = 1 / theta[:, 1, 1], theta[:, 0, 0].sign()
    torch.testing.assert_close(theta[:, 0, 0].abs(), theta[:, 1, 1])
    assert 0.78 <= size.min() < 0.781
    assert 0.939 < size.max() < 0.94001
    assert 0.47 < (side > 0).float().mean() < 0.53
    # The sprite's middle lies where its coordinates are 0; a picture is 64 pixels from -1 to 1.
    middle = torch.stack([-side * theta[:, 0, 2] * size, -theta[:, 1, 2] * size], dim=1) * 32
    assert 2.49 < middle.abs().max() < 2.5001
    assert middle.mean(dim=0).abs().max() < 0.1
    inside = 32 - middle.abs() - 32 * size[:, None]  # between the sprite's edge and the picture's
    assert inside.min() > -0.59  # 32 - 2.5 - 0.94 * 32


def test_measured_ground_is_the_one_that_was_drawn():
    pictures = animals.draw_images(1000, seed=5)
    assert torch.equal(
        nearest(measure_background(pictures.images), animals.BACKGROUNDS), pictures.labels[:, 2]
    )
    assert pictures.images.min() >= 0
    assert pictures.images.max() <= 1 + 1e-6


def test_pictures_are_what_their_labels_say():
    pictures = animals.draw_images(20, seed=3)
    assert pictures.images.shape == (20, 3, 64, 64)
    for image, said, theta in zip(pictures.images, pictures.descriptions, pictures.theta, strict=True):
        torch.testing.assert_close(draw(said.animal, said.artist, said.background, theta), image)
    assert [animals.parse_prompt(prompt) for prompt in pictures.prompts] == pictures.descriptions


def test_same_seed_same_pictures_other_seed_others():
    first, again, other = (animals.draw_images(8, seed) for seed in (1, 1, 2))
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.labels, again.labels)
    assert not torch.equal(first.labels, other.labels)
    assert not torch.equal(first.theta, other.theta)


def test_pictures_show_the_pairs_that_were_asked_for_and_every_background():
    pictures = animals.draw_images(300, 0, animals.LEFT_OUT)
    pairs = {(animal, artist) for animal, artist, _ in pictures.labels.tolist()}
    assert pairs == set(animals.LEFT_OUT)
    assert set(pictures.labels[:, 2].tolist()) == set(range(8))


# ---------------------------------------------------------------------------------------------- prompts
def test_prompts_are_read_back():
    names = ((None, *kind) for kind in (animals.ANIMALS, animals.ARTISTS, animals.BACKGROUND_NAMES))
    every = [animals.Description(*said) for said in itertools.product(*names)]
    prompts = [animals.make_prompt(said.animal, said.artist, said.background) for said in every]
    assert len(set(prompts)) == len(prompts) == 46 * 4 * 9
    assert [animals.parse_prompt(prompt) for prompt in prompts] == every


def test_prompts_carry_the_right_articles():
    assert animals.make_prompt("ant", "Noto", "orange") == "an ant by Noto on an orange background"
    assert animals.make_prompt("fox", None, "blue") == "a fox on a blue background"
    assert animals.make_prompt(None, "Fluent") == "an animal by Fluent"
    assert animals.parse_prompt("something else entirely") == animals.Description()


# ------------------------------------------------------------------------------------------------ edits
def test_confetti_covers_all_in_colors_between_the_backgrounds():
    pictures = animals.draw_confetti(40, seed=3)
    assert pictures.shape == (40, 3, 64, 64)
    palette = torch.tensor(list(animals.BACKGROUNDS.values()))
    assert (pictures >= palette.amin(dim=0)[:, None, None] - 1e-6).all()
    assert (pictures <= palette.amax(dim=0)[:, None, None] + 1e-6).all()
    for picture in pictures:  # discs of at least 4 pixels' radius: one row crosses several, none covers all
        assert 5 < len(picture[:, 32].T.unique(dim=0)) < 33
    assert torch.equal(pictures, animals.draw_confetti(40, seed=3))
    assert not torch.equal(pictures, animals.draw_confetti(40, seed=4))


def test_an_edit_shows_the_wanted_animal_in_its_place_over_confetti():
    edits = animals.draw_edits(300, seed=3)
    wanted = edits.wanted
    assert torch.equal(wanted.images, animals.render(wanted.labels[:, :2], wanted.labels[:, 2], wanted.theta))
    assert {(animal, artist) for animal, artist, _ in wanted.labels.tolist()} <= set(animals.SEEN)
    assert set(wanted.labels[:, 0].tolist()) == set(animals.PRACTICE_ANIMALS)
    # Where the animal covers everything, picture and answer agree, whatever lies behind.
    behind = (torch.full((300, 3, 1, 1), c) for c in (0.0, 1.0))
    black, white = (animals.draw_over(images, wanted.labels[:, :2], wanted.theta) for images in behind)
    opaque = (black == white).expand(-1, 3, -1, -1)
    assert opaque.float().mean() > 0.2
    assert torch.equal(edits.images[opaque], wanted.images[opaque])
    assert (edits.images - wanted.images).abs().mean() > 0.1


def test_sentences_of_edits_leave_animal_and_artist_to_the_picture():
    edits = animals.draw_edits(50, seed=4)
    for prompt, (*_, background) in zip(edits.prompts, edits.wanted.labels.tolist(), strict=True):
        assert prompt.startswith("an animal on a")
        assert animals.parse_prompt(prompt) == animals.Description(
            background=animals.BACKGROUND_NAMES[background]
        )


def test_a_ground_is_plain_if_nine_tenths_of_it_are():
    edits = animals.draw_edits(20, seed=5)
    assert edits.are_plain(edits.wanted.images).all()
    assert not edits.are_plain(edits.images).any()
    background = torch.tensor(list(animals.BACKGROUNDS.values()))[edits.wanted.labels[:, 2]][:, :, None, None]
    plain = background.repeat(1, 1, 64, 64)
    assert edits.are_plain(plain).all()  # where the animal should be does not count
    assert edits.are_plain(plain + 0.14 / 3**0.5).all()
    assert not edits.are_plain(plain + 0.16 / 3**0.5).any()
    spoiled = plain.clone()
    spoiled[:, :, :2] = 0.5  # 128 of at least 1,200 pixels of background
    assert edits.are_plain(spoiled).float().mean() > 0.5
    spoiled[:, :, :8] = 0.5
    assert not edits.are_plain(spoiled).any()


def test_edits_repeat_themselves_and_show_the_animals_that_were_asked_for():
    first, again, other = (animals.draw_edits(40, seed, animals.NEW_ANIMALS) for seed in (1, 1, 2))
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.wanted.labels, other.wanted.labels)
    assert set(first.wanted.labels[:, 0].tolist()) <= set(animals.NEW_ANIMALS)


# ----------------------------------------------------------------------------------------- measurements
def test_the_distance_of_a_ground_by_hand():
    red, blue = (torch.tensor(animals.BACKGROUNDS[name]) for name in ("red", "blue"))
    images = red[None, :, None, None].repeat(3, 1, 64, 64)
    images[:, :, 3:-3, 3:-3] = 0  # inside does not count
    images[1, :, :32] = blue[:, None, None]  # half of the frame
    found = animals.background_distance(images, ["red", "red", None])
    assert found.tolist() == pytest.approx([0, torch.dist(red, blue).item() / 2, 0], abs=1e-6)
