"""The digit world: splits, drawing, measuring, damage and words."""

import pytest
import torch

from ddpo_lessons.damages import DAMAGES
from ddpo_lessons.worlds import digits
from ddpo_lessons.worlds.judges import nearest


def test_splits_share_no_handwriting_and_cover_everything():
    """Validation is handwriting that the judge does not know and nobody practises on."""
    sizes = {"train": 1297, "test": 500, "reward": 648, "judge": 649, "validation": 200, "practice": 1097}
    assert {name: len(digits.handwriting(name)[1]) for name in sizes} == sizes
    bitmaps = {name: {tuple(b.flatten().tolist()) for b in digits.handwriting(name)[0]} for name in sizes}
    assert not bitmaps["test"] & bitmaps["train"]
    for one, other in (("reward", "judge"), ("validation", "practice")):
        assert not bitmaps[one] & bitmaps[other]
        assert bitmaps[one] | bitmaps[other] == bitmaps["train"]
    assert bitmaps["validation"] <= bitmaps["reward"]
    with pytest.raises(ValueError, match="split='valid'"):
        digits.handwriting("valid")


def test_ten_pairs_are_left_out_one_for_each_digit():
    assert [digit for digit, _ in digits.LEFT_OUT] == list(range(10))
    assert len(set(digits.SEEN)) == 50
    assert not set(digits.SEEN) & set(digits.LEFT_OUT)


def test_render_blends_ink_and_background_by_coverage():
    bitmap = torch.ones(1, 8, 8)
    ink, background = torch.tensor([[1.0, 0.5, 0.0]]), torch.tensor([[0.0, 0.5, 1.0]])
    still = torch.eye(2, 3)[None]
    image = digits.render(bitmap, ink, background, still)
    assert image.shape == (1, 3, 32, 32)
    assert torch.allclose(image[0, :, 16, 16], ink[0])  # full coverage shows the ink
    empty = digits.render(torch.zeros(1, 8, 8), ink, background, still)
    assert torch.allclose(empty[0, :, 16, 16], background[0])


def test_measured_colors_are_those_that_were_drawn():
    pictures = digits.draw_images(300, "train", seed=5)
    measured = [nearest(color, digits.COLORS) for color in digits.measure_colors(pictures.images)]
    assert torch.equal(torch.stack(measured, dim=1), digits.color_indices(pictures.descriptions))


@pytest.mark.parametrize("damage", [*DAMAGES, "camouflaged"])
def test_damage_keeps_the_range_and_grows_with_severity(damage):
    errors = []
    for severity in (1, 3, 5):
        pictures = digits.draw_images(32, "train", 7, damage, severity)
        assert pictures.images.min() >= 0
        assert pictures.images.max() <= 1
        errors.append((pictures.images - pictures.clean).square().mean().item())
    assert errors[0] > 1e-4
    assert damage == "camouflaged" or errors == sorted(errors)


def test_fade_takes_the_stated_share_of_contrast():
    pictures = digits.draw_images(16, "train", 3, "faded", 3)
    before_ink, before_background = digits.measure_colors(pictures.clean)
    ink, background = digits.measure_colors(pictures.images)
    before = (before_ink - before_background).norm(dim=1)
    assert torch.allclose((ink - background).norm(dim=1) / before, torch.full((16,), 0.26), atol=0.01)


def test_same_seed_same_pictures_other_seed_others():
    first, again, other = (digits.draw_images(8, "test", seed, "noisy") for seed in (1, 1, 2))
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)


@pytest.mark.parametrize("wrong", [{"split": "valid"}, {"damage": "wet"}, {"severity": 6}])
def test_what_cannot_be_drawn_is_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        digits.draw_images(1, **{"split": "train", "seed": 0, "damage": "foggy", **wrong})


def test_prompts_are_read_back():
    for said in ((3, "red", "blue", "foggy"), (None, None, "white", None), (0, "black", None, "clear")):
        assert digits.parse_prompt(digits.make_prompt(*said)) == digits.Description(*said)
    assert digits.make_prompt(3, "red", "blue", "foggy") == "a foggy red three on a blue background"
    assert digits.parse_prompt("something else entirely") == digits.Description()


def test_repaint_keeps_the_coverage_of_every_pixel():
    black, white = torch.zeros(1, 3), torch.ones(1, 3)
    red, green = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    image = torch.tensor([0.0, 0.25, 1.0]).expand(1, 3, 1, 3)  # white ink on black, a quarter at the edge
    repainted = digits.repaint(image, (white, black), (red, green))
    expected = torch.tensor([[0.0, 1.0, 0.0], [0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]).T[None, :, None]
    assert torch.allclose(repainted, expected)


def test_an_edit_asks_for_two_other_colors_and_its_target_is_the_same_handwriting_in_them():
    edits = digits.draw_edits(200, "test", 3)
    assert torch.equal(edits.inputs.images, digits.draw_images(200, "test", 3).images)
    for old, new, prompt in zip(edits.inputs.descriptions, edits.wanted, edits.prompts, strict=True):
        assert new.ink not in (old.ink, new.background)
        assert new.background != old.background
        assert digits.parse_prompt(prompt) == new
        assert new.digit is None
    measured = [nearest(color, digits.COLORS) for color in digits.measure_colors(edits.targets)]
    assert torch.equal(torch.stack(measured, dim=1), digits.color_indices(edits.wanted))
    old, new = map(digits.two_colors, (edits.inputs.descriptions, edits.wanted))
    back = digits.repaint(edits.targets, new, old)
    assert torch.allclose(back, edits.inputs.images, atol=1e-5)


def slanted_stroke(slope):
    """A red stroke on white, 20 x 3 pixels; at height y its middle lies `slope * y` to the right."""
    y = 15.5 - torch.arange(32)[:, None]  # upwards
    x = torch.arange(32) - 15.5
    ink = (2 - (x - slope * y).abs()).clamp(0, 1) * (y.abs() < 10)
    red, white = (torch.tensor(digits.COLORS[name])[:, None, None] for name in ("red", "white"))
    return ink * red + (1 - ink) * white


@pytest.mark.parametrize("slope", [-0.4, 0.0, 0.25, 0.7])
def test_lean_is_the_slope_of_a_stroke_wherever_it_stands(slope):
    stroke = slanted_stroke(slope)
    images = torch.stack([stroke, stroke.roll(3, dims=2), stroke.roll(2, dims=1), 1 - stroke])
    assert torch.allclose(digits.lean(images), torch.full((4,), slope), atol=0.01)


def test_a_picture_without_ink_does_not_lean():
    assert digits.lean(torch.full((1, 3, 32, 32), 0.5)).tolist() == [0.0]
