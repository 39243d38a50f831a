"""The classifiers of the world of animals: shapes, verdicts, and what spoils their pictures."""

import itertools

import pytest
import torch

from benchmarks.zoo import recipe
from ddpo_lessons.worlds import animals
from ddpo_lessons.worlds.judges import named


class Says(torch.nn.Module):
    """Names the same animal, artist and background in every picture."""

    def __init__(self, *named: int) -> None:
        super().__init__()
        self.named = named

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = zip(self.named, animals.CLASSES, strict=True)
        return tuple(torch.eye(classes)[[index] * len(images)] for index, classes in pairs)


@pytest.mark.parametrize("kind", [animals.RewardModel, animals.Judge, animals.SecondJudge])
def test_a_classifier_gives_logits_of_animal_artist_and_background(kind):
    logits = kind().eval()(torch.rand(2, 3, 64, 64))
    assert [part.shape for part in logits] == [(2, 45), (2, 3), (2, 8)]


def test_classifiers_share_no_architecture():
    kinds = (animals.RewardModel, animals.Judge, animals.SecondJudge)
    shapes = [{tuple(w.shape) for w in kind().features.parameters() if w.ndim == 4} for kind in kinds]
    assert not any(one & other for one, other in itertools.combinations(shapes, 2))


def test_named_takes_the_largest_logit_in_any_number_of_batches():
    assert named(Says(44, 1, 7), torch.zeros(300, 3, 64, 64)).tolist() == [[44, 1, 7]] * 300


def test_verdicts_by_hand():
    images = torch.zeros(4, 3, 64, 64)
    backgrounds = torch.tensor([4, 4, 4, 2])  # three are blue, the last one is yellow
    images += torch.tensor(list(animals.BACKGROUNDS.values()))[backgrounds][:, :, None, None]
    labels = torch.tensor([[5, 1, 4], [6, 1, 4], [5, 2, 4], [5, 1, 4]])
    # The judge's own word for the background, 0, does not count; that of the second judge does.
    right = animals.verdicts(images, labels, Says(5, 1, 0), Says(5, 1, 4))
    assert {name: truth.tolist() for name, truth in right.items()} == {
        "animal": [True, False, True, True],
        "artist": [True, True, False, True],
        "background": [True, True, True, False],
        "all": [True, False, False, False],
        "second_judge": [True, False, False, True],
    }
    wrong = animals.verdicts(images, labels, Says(5, 1, 4), Says(5, 1, 0))
    assert wrong["all"].tolist() == [True, False, False, False]
    assert not wrong["second_judge"].any()


def test_edits_are_right_only_on_plain_background():
    edits = animals.draw_edits(3, seed=0)
    (animal, artist, background), *_ = edits.wanted.labels.tolist()
    images = edits.wanted.images.clone()
    images[:, :, :8] = edits.images[:, :, :8]
    by_hand = {"animal": True, "artist": True, "background": False, "all": False, "second_judge": False}
    says = Says(animal, artist, background)
    for shown, expected in ((images, by_hand), (edits.wanted.images, dict.fromkeys(by_hand, True))):
        right = animals.judge_edits(shown, edits, says, says)
        assert {name: hits[0].item() for name, hits in right.items()} == expected


@pytest.mark.parametrize("spoil", [recipe.add_noise, recipe.blur_and_add_noise, recipe.cut_out])
@pytest.mark.parametrize("count", [1, 5])
def test_spoiling_keeps_the_shape_and_the_pictures_themselves(spoil, count):
    torch.manual_seed(0)
    images = torch.rand(count, 3, 64, 64)
    before = images.clone()
    spoiled = spoil(images)
    assert spoiled.shape == images.shape
    assert torch.equal(images, before)
    assert (spoiled != images).any(dim=(1, 2, 3)).all()


def test_noise_has_a_standard_deviation_of_its_own_up_to_15_percent():
    torch.manual_seed(0)
    deviations = recipe.add_noise(torch.zeros(500, 3, 32, 32)).std(dim=(1, 2, 3))
    assert deviations.mean() == pytest.approx(0.075, abs=0.006)  # three standard errors
    assert deviations.min() < 0.005
    assert 0.145 < deviations.max() < 0.155


def test_cut_out_paints_256_pixels_grey(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(recipe, "add_noise", lambda images: images)
    cut = recipe.cut_out(torch.ones(50, 3, 64, 64))
    painted = (cut == 0.5).all(dim=1)  # (50, 64, 64)
    assert painted.sum(dim=(1, 2)).tolist() == [256] * 50
    for side in (1, 2):  # a square
        assert painted.any(dim=side).sum(dim=1).tolist() == [16] * 50
    assert (cut == 1).any(dim=1).sum(dim=(1, 2)).tolist() == [64 * 64 - 256] * 50
    assert len(painted.unique(dim=0)) > 40  # each elsewhere


def test_every_other_picture_is_blurred(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(recipe, "add_noise", lambda images: images)
    stripes = (torch.arange(64) % 2).float().expand(4, 3, 64, 64)  # too fine for half of the width
    blurred = recipe.blur_and_add_noise(stripes)
    assert torch.equal(blurred[1::2], stripes[1::2])
    torch.testing.assert_close(blurred[::2], torch.full((2, 3, 64, 64), 0.5))
