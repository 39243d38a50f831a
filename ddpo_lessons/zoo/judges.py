"""Classifiers of the world of animals: the reward model, and two judges that only measure.

They name animal, artist and ground, and differ in architecture, in seed, in the pictures that they learned
from (other sizes, places and grounds of the same drawings) and in how those were spoiled: blurred and noisy
for the reward model, which has to score what a policy draws on its way; noisy for the judge; with a part cut
out for the second judge.
"""

import itertools

import torch
from torch import nn

from ddpo_lessons.tiny.classifier import beside, patch_mixer
from ddpo_lessons.tiny.world import measure_background
from ddpo_lessons.zoo import world

CLASSES = (len(world.ANIMALS), len(world.ARTISTS), len(world.GROUNDS))  # animals, artists, grounds
NAMES = ("animal", "artist", "ground")


class Classifier(nn.Module):
    """Features of a picture, and one linear layer of them; subclasses differ in the features."""

    def __init__(self, features: nn.Module, width: int) -> None:
        """Put the layer on features (B, width, ...), which it flattens."""
        super().__init__()
        self.features = features
        self.head = nn.Linear(width, sum(CLASSES))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logits of animal (B, 45), artist (B, 3), ground (B, 8) of images (B, 3, 64, 64)."""
        return self.head(self.features(images * 2 - 1).flatten(1)).split(CLASSES, dim=1)


class RewardModel(Classifier):
    """Strided convolutions, group normalisation."""

    def __init__(self) -> None:
        """Make the untrained network."""
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((3, 24, 48, 64, 96)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.SiLU()]
        super().__init__(nn.Sequential(*layers), 96 * 16)  # (B, 96, 4, 4)


class Judge(Classifier):
    """Wide kernels, max pooling, batch normalisation."""

    def __init__(self) -> None:
        """Make the untrained network."""
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((3, 24, 32, 64)):
            layers += [
                nn.Conv2d(before, after, 5, padding=2),
                nn.MaxPool2d(2),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        super().__init__(nn.Sequential(*layers, nn.AdaptiveMaxPool2d(4), nn.Dropout(0.3)), 64 * 16)


class SecondJudge(Classifier):
    """A mixer of patches; see `tiny.classifier.patch_mixer`."""

    def __init__(self) -> None:
        """Make the untrained network."""
        super().__init__(nn.Sequential(*patch_mixer(64), nn.AdaptiveAvgPool2d(2)), 64 * 4)  # (B, 64, 2, 2)


# ------------------------------------------------------------------------------------------ judging
def named(model: Classifier, images: torch.Tensor) -> torch.Tensor:
    """Return the indices of animal, artist and ground that a classifier names; (N, 3, 64, 64) -> (N, 3).

    Images and classifier may be on any device, the indices are on the CPU.
    """
    with torch.no_grad():
        batches = [
            torch.stack([part.argmax(dim=1) for part in model(batch)], 1)
            for batch in beside(model, images).split(256)
        ]
    return torch.cat(batches).cpu()


def verdicts(
    images: torch.Tensor, labels: torch.Tensor, judge: Judge, second_judge: SecondJudge
) -> dict[str, torch.Tensor]:
    """Say what is right in pictures (N, 3, 64, 64) in [0, 1], on any device, as the judges are.

    Labels are what they should show: indices of animal, artist and ground, (N, 3) on the CPU. The judge
    names animal and artist, and the ground is measured. Truth values (N,) on the CPU: "animal", "artist",
    "ground", "all" three, and "second_judge", which names all three rightly.
    """
    hits = named(judge, images) == labels  # (N, 3)
    hits[:, 2] = world.nearest_ground(measure_background(images)).cpu() == labels[:, 2]
    right = dict(zip(NAMES, hits.T, strict=True))
    right["all"] = hits.all(dim=1)
    right["second_judge"] = (named(second_judge, images) == labels).all(dim=1)
    return right


def judge_edits(
    images: torch.Tensor, edits: world.Edits, judge: Judge, second_judge: SecondJudge
) -> dict[str, torch.Tensor]:
    """Say what is right in edited pictures: as `verdicts`, but no ground is right that is not plain."""
    right, plain = verdicts(images, edits.wanted.labels, judge, second_judge), edits.are_plain(images)
    return right | {name: right[name] & plain for name in ("ground", "all", "second_judge")}
