"""A reward that is learned from choices."""

import pytest
import torch

from benchmarks.zoo import preference
from ddpo_lessons.worlds import animals

pytestmark = pytest.mark.usefixtures("one_thread")


class SaysFluent(torch.nn.Module):
    """Gives Fluent three quarters of the artists' probability."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        artists = torch.tensor([1.0, 1.0, 6.0]).log().expand(len(images), 3)
        return torch.zeros(len(images), 45), artists, torch.zeros(len(images), 8)


def test_utility_by_hand():
    images = torch.tensor([[0.9, 0.5, 0.1], [0.2, 0.2, 0.8]])[:, :, None, None].repeat(1, 1, 64, 64)
    images[:, :, 10:50, 10:50] = 0.3  # the animal does not count
    assert preference.utility(images, SaysFluent()).tolist() == pytest.approx([0.8 + 0.75, -0.6 + 0.75])


def test_choices_follow_the_odds():
    first, second, chosen = preference.draw_choices(400, 3)
    odds = (4 * (preference.utility(first) - preference.utility(second))).sigmoid()
    for low, high in ((0.0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 1.0)):
        some = (odds >= low) & (odds < high)
        spread = (odds[some] * (1 - odds[some])).sum().sqrt()  # of the number that are chosen
        assert (chosen[some].sum() - odds[some].sum()).abs() < 3 * spread
    one, again, other = (preference.draw_choices(20, seed) for seed in (3, 3, 4))
    assert all(map(torch.equal, one, again))
    assert not any(map(torch.equal, one, other))


@pytest.mark.slow
def test_the_model_is_at_the_minimum_and_agrees_with_choices_that_it_never_saw():
    first, second, chosen = preference.draw_choices(500, 0)
    model = preference.fit_preferences(first, second, chosen)
    weight = model.head.weight[0]
    inputs = [model.features(images * 2 - 1).flatten(1) for images in (first, second)]
    difference = inputs[0] - inputs[1]  # (N, F)
    surprise = (difference @ weight).sigmoid() - chosen.float()  # derivative of each choice's misfit
    gradient = difference.T @ surprise / len(chosen) + 2 * preference.PENALTY * weight
    assert gradient.abs().max() < 1e-3

    first, second, chosen = preference.draw_choices(500, 1)
    agrees = (model(first) > model(second)) == chosen
    assert agrees.float().mean() > 0.75  # the annotator repeats a choice in 85 of 100
    assert model(first).shape == (500,)


def test_the_annotator_prefers_fluent_on_orange_to_twemoji_on_blue():
    theta = animals.placements(1, torch.Generator().manual_seed(0)).repeat(2, 1, 1)
    pairs = torch.tensor([[10, animals.ARTISTS.index(name)] for name in ("Fluent", "Twemoji")])
    backgrounds = torch.tensor([animals.BACKGROUND_NAMES.index(name) for name in ("orange", "blue")])
    liked, disliked = preference.utility(animals.render(pairs, backgrounds, theta)).tolist()
    assert liked == pytest.approx(0.96 - 0.22 + 1, abs=0.02)
    assert disliked == pytest.approx(0.31 - 0.90, abs=0.02)
