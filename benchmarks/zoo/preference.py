"""A preference that is learned from choices, in the place of the aesthetic predictor of DDPO's paper.

A simulated annotator prefers warm backgrounds and Fluent's style, and chooses between two images at a time.
A reward model is fitted to the choices, and RL uses its output. Unlike the preferences of people, the
annotator's formula is known, so we can measure whether the annotator would prefer what a policy generates.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from ddpo_lessons.image import measure_background
from ddpo_lessons.rewards import RewardFunction
from ddpo_lessons.rewards.reward import checked_reward
from ddpo_lessons.worlds import animals
from ddpo_lessons.worlds.judges import Classifier

LIKED_ARTIST = "Fluent"
DECISIVENESS = 4.0  # log-odds of a choice, per unit of utility
PENALTY = 0.1  # on the square of the reward model's weights


@torch.no_grad()
def utility(images: torch.Tensor, judge: Classifier | None = None) -> torch.Tensor:
    """Return the annotator's utility of images: ``red - blue of the background + p(Fluent)``.

    Images are (B, 3, 64, 64) in [0, 1]; the result, (B,), is from -1 to 2.
    """
    _, artist_logits, _ = (animals.Judge.load() if judge is None else judge)(images)
    red, _, blue = measure_background(images).unbind(dim=1)
    return red - blue + artist_logits.softmax(dim=1)[:, animals.ARTISTS.index(LIKED_ARTIST)]


def draw_choices(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Let the annotator choose between random images: ``p(first) = sigmoid(4 (u(first) - u(second)))``.

    Source: Bradley and Terry 1952, "Rank analysis of incomplete block designs". Returns first and second
    images (N, 3, 64, 64), and whether the first was chosen (N,).
    """
    first, second = animals.draw_images(2 * count, seed).images.chunk(2)
    judge = animals.Judge.load()
    log_odds = DECISIVENESS * (utility(first, judge) - utility(second, judge))
    chance = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return first, second, chance < log_odds.sigmoid()


class PreferenceModel(nn.Module):
    """A learned reward of images: one linear layer on the features of the world's reward model."""

    def __init__(self) -> None:
        super().__init__()
        model = animals.RewardModel.load()
        self.features = model.features
        self.head = nn.Linear(model.head.in_features, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the reward of images (B, 3, 64, 64) in [0, 1], (B,)."""
        return self.head(self.features(images * 2 - 1).flatten(1))[:, 0]


def fit_preferences(first: torch.Tensor, second: torch.Tensor, first_chosen: torch.Tensor) -> PreferenceModel:
    """Fit a model to choices: minimize ``-log sigmoid(r(chosen) - r(other)) + penalty |w|^2``.

    The arguments are what `draw_choices` returns.
    """
    fitted = PreferenceModel()
    with torch.no_grad():
        inputs = [fitted.features(images * 2 - 1).flatten(1) for images in (first, second)]
    difference = inputs[0] - inputs[1]  # (N, F)
    weight, chosen = fitted.head.weight, first_chosen.float()
    optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        misfit = F.binary_cross_entropy_with_logits(difference @ weight[0], chosen)
        loss = misfit + PENALTY * weight.square().sum()
        loss.backward()
        return loss.detach()

    optimizer.step(closure)
    return fitted.requires_grad_(False)


@functools.cache
def learned_reward() -> RewardFunction:
    """Return the reward that is fitted to two thousand choices."""
    fitted = fit_preferences(*draw_choices(2_000, seed=0))
    return checked_reward(lambda images, prompts, metadata: fitted(images))
