"""Classifiers that share nothing: the reward model, and two judges that only measure.

They differ in architecture, seed, half of the training handwriting and in what they have seen. The
judge, like any off-the-shelf classifier, knows clean pictures only. The reward model has seen damaged
ones too, with targets that say how legible they are: the worse the damage, the less sure it is asked
to be. So its log-probability of the true digit has a slope wherever a picture can become more legible.

The second judge names digit, ink and background of clean pictures. A reward may measure colours by the rule
that the verdict uses; what the second judge makes of a picture no training ever asks.
"""

import itertools

import torch
from torch import nn

from ddpo_lessons.tiny import world


class RewardModel(nn.Module):
    """Strided convolutions, group normalisation; (B, 3, 32, 32) to logits (B, 10)."""

    def __init__(self) -> None:
        """Make the untrained network."""
        super().__init__()
        widths = (3, 32, 48, 64, 96)
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(itertools.pairwise(widths)):
            layers += [nn.Conv2d(before, after, 3, stride=2 if i else 1, padding=1)]
            layers += [nn.GroupNorm(8, after), nn.SiLU()]
        self.features = nn.Sequential(*layers)  # (B, 96, 4, 4)
        self.head = nn.Linear(96 * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 10) of images (B, 3, 32, 32) in [0, 1]."""
        return self.head(self.features(images * 2 - 1).flatten(1))


class Judge(nn.Module):
    """Wide kernels, max pooling, batch normalisation; (B, 3, 32, 32) to logits (B, 10)."""

    def __init__(self) -> None:
        """Make the untrained network."""
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 24, 5, padding=2), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(24, 48, 5, padding=2), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(48, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveMaxPool2d(4),
        )  # fmt: skip
        self.head = nn.Sequential(nn.Linear(64 * 16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 10) of images (B, 3, 32, 32) in [0, 1]."""
        return self.head(self.features(images - 0.5).flatten(1))


def patch_mixer(width: int) -> list[nn.Module]:
    """Make layers that mix 4x4 patches in place and in depth by turns (ConvMixer, arXiv 2201.09792)."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, stride=4), nn.GELU(), nn.BatchNorm2d(width)]
    for _ in range(4):
        layers += [nn.Conv2d(width, width, 5, padding=2, groups=width), nn.GELU(), nn.BatchNorm2d(width)]
        layers += [nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width)]
    return layers


class SecondJudge(nn.Module):
    """A mixer of patches; see `patch_mixer`.

    (B, 3, 32, 32) to logits of the digit (B, 10), the ink (B, 6) and the background (B, 6).
    """

    def __init__(self) -> None:
        """Make the untrained network."""
        super().__init__()
        self.features = nn.Sequential(*patch_mixer(64))  # (B, 64, 8, 8)
        self.head = nn.Linear(64, 10 + 2 * len(world.COLOURS))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logits of digit, ink and background of images (B, 3, 32, 32) in [0, 1]."""
        logits = self.head(self.features(images - 0.5).mean(dim=(2, 3)))  # (B, 22)
        return logits.split([10, len(world.COLOURS), len(world.COLOURS)], dim=1)


def beside(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return images on the device of a model's weights; a model without weights takes them where they are."""
    return images.to(next(model.parameters(), images).device)


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, digits: torch.Tensor) -> float:
    """Return the share of images (N, 3, 32, 32), on any device, whose digit (N,) the model reads rightly."""
    images = beside(model, images)
    read = torch.cat([model(batch).argmax(dim=1).cpu() for batch in images.split(256)])  # (N,)
    return (read == digits.cpu()).float().mean().item()


@torch.no_grad()
def score_prompts(
    judge: nn.Module, images: torch.Tensor, descriptions: list[world.Description]
) -> dict[str, float]:
    """Return how often digit, ink, background, and all three, are what the prompt says.

    Images (N, 3, 32, 32) in [0, 1] and the judge may be on any device.
    """
    wanted = world.colour_indices(descriptions)  # (N, 2)
    measured = [world.nearest_colour(colour).cpu() for colour in world.measure_colours(images)]
    read = torch.cat([judge(batch).argmax(1).cpu() for batch in beside(judge, images).split(256)])
    right = dict(zip(("ink", "background"), torch.stack(measured, dim=1).eq(wanted).T, strict=True))
    right = {"digit": read == torch.tensor([d.digit for d in descriptions]), **right}
    right["all three"] = torch.stack(list(right.values())).all(dim=0)
    return {name: hits.float().mean().item() for name, hits in right.items()}


@torch.no_grad()
def judge_edits(
    images: torch.Tensor, edits: world.Edits, judge: Judge, second_judge: SecondJudge
) -> dict[str, torch.Tensor]:
    """Say which pictures obey their sentence and kept their digit.

    Of images (N, 3, 32, 32) in [0, 1] that edits became, on any device as the judges are, these truth values
    (N,) on the CPU: "digit", the judge reads the digit of the input; "colours", measured ink and background
    are nearest to those named; "both"; "second_judge", it names all three rightly.
    """
    digits, wanted = edits.pictures.digits, world.colour_indices(edits.wanted)  # (N,), (N, 2)
    measured = [world.nearest_colour(colour).cpu() for colour in world.measure_colours(images)]
    named = [logits.argmax(dim=1).cpu() for logits in second_judge(beside(second_judge, images))]
    verdicts = {
        "digit": judge(beside(judge, images)).argmax(dim=1).cpu() == digits,
        "colours": (torch.stack(measured, dim=1) == wanted).all(dim=1),
    }
    verdicts["both"] = verdicts["digit"] & verdicts["colours"]
    truth = torch.cat([digits[:, None], wanted], dim=1)  # (N, 3)
    verdicts["second_judge"] = (torch.stack(named, dim=1) == truth).all(dim=1)
    return verdicts
