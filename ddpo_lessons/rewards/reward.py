"""Define the type and the registration of rewards, check their inputs, and read metadata."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

from ddpo_lessons.image import check_images

Metadata = Sequence[Mapping[str, Any]]
Rewards = torch.Tensor | tuple[torch.Tensor, dict[str, Any]]


class RewardFunction(Protocol):
    """A function from images (B, 3, H, W) in [0, 1] to rewards (B,), which a trainer calls after sampling.

    It may also return `(rewards, info)`. A trainer passes B prompts and B dicts of metadata as tuples, and
    the rewards of this package take any sequences. The types are open, so that functions written for either
    fit.
    """

    def __call__(self, images: torch.Tensor, prompts: Any, metadata: Any, /) -> Any:
        """Score a batch of images."""


# Inputs of a reward: the prompt, or a key of the metadata. With a folder of images, a factory that needs a
# "label" gets the folder's classes as the argument `classes`. The "target" is the image before the damage of
# `--damage`; without damage it is the input "image".
Need = Literal["prompt", "image", "target", "label", "digit"]
Factory = TypeVar("Factory", bound=Callable[..., RewardFunction])


@dataclass(frozen=True)
class Registered:
    """A reward that `get_reward` and the command line find by name."""

    make: Callable[..., RewardFunction]  #: returns the reward function; models are its first arguments
    needs: tuple[Need, ...] = ()  #: inputs besides the images
    models: tuple[str, ...] = ()  #: kinds of models that it takes by folder or hub name, such as "CLIP"
    #: function of the prompts that raises a ValueError for those that it cannot score; None if it scores any
    reads: Callable[[Sequence[str]], Any] | None = None


REWARDS: dict[str, Registered] = {}


def register(
    needs: tuple[Need, ...] = (),
    models: tuple[str, ...] = (),
    reads: Callable[[Sequence[str]], Any] | None = None,
) -> Callable[[Factory], Factory]:
    """Register the decorated factory under its name, with the inputs that it needs; see `Registered`.

    Raises TypeError if a factory that needs a "label" lacks the argument `classes`.
    """

    def decorate(make: Factory) -> Factory:
        taken = inspect.signature(make).parameters
        takes_all = any(argument.kind is argument.VAR_KEYWORD for argument in taken.values())
        if "label" in needs and "classes" not in taken and not takes_all:
            raise TypeError(f"{make.__name__} needs a 'label': give it an argument 'classes'")
        REWARDS[make.__name__] = Registered(make, needs, models, reads)
        return make

    return decorate


def split_info(returned: Any, name: str = "reward_function") -> tuple[Any, Mapping[str, Any]]:
    """Split the result of a reward function into (rewards, info); a tuple of numbers is only rewards.

    Raises a TypeError that names the function if the second result is neither a mapping nor None.
    """
    if not (isinstance(returned, tuple) and len(returned) == 2 and _has_rows(returned[0])):
        return returned, {}
    rewards, info = returned[0], {} if returned[1] is None else returned[1]
    if not isinstance(info, Mapping):
        raise TypeError(
            f"{name} returned {info!r:.60} as its second result: return a dict of further numbers per image, "
            "or only the rewards"
        )
    return rewards, info


def _has_rows(value: Any) -> bool:
    # Not np.ndim, because a list may hold numbers on a GPU, which numpy does not accept.
    return getattr(value, "ndim", 1 if isinstance(value, Sequence) else 0) > 0


def checked_reward(score: RewardFunction) -> RewardFunction:
    """Check the inputs and pass float32 images clamped to [0, 1], with a gradient if they have one."""

    @functools.wraps(score)
    def checked(images: torch.Tensor, prompts: Sequence[str], metadata: Metadata) -> Rewards:
        check_images(images)
        for name, given in (("prompts", prompts), ("metadata", metadata)):
            if len(given) != len(images):
                raise ValueError(f"{len(given)} {name} for {len(images)} images: pass one for each")
        with torch.set_grad_enabled(torch.is_grad_enabled() and images.requires_grad):
            return score(images.float().clamp(0, 1), prompts, metadata)

    return checked


def margin(logits: torch.Tensor, labels: Sequence[str], classes: Sequence[str]) -> torch.Tensor:
    """Subtract the largest logit of a wrong class from that of the true class: (B, classes) to (B,).

    Raises a ValueError for a label that is not one of the classes.
    """
    for index, label in enumerate(labels):
        if label not in classes:
            raise ValueError(f"metadata[{index}]['label'] is {label!r}: use one of {list(classes)}")
    true = torch.tensor([classes.index(label) for label in labels], device=logits.device)[:, None]  # (B, 1)
    wrong = logits.scatter(1, true, -torch.inf)
    return logits.gather(1, true)[:, 0] - wrong.amax(dim=1)


def check_classes(classes: Sequence[str]) -> None:
    """Raise a ValueError for fewer than two classes, or for equal names."""
    if len(set(classes)) != len(classes) or len(classes) < 2:
        raise ValueError(f"classes={list(classes)}: give two or more different names")


def metadata_column(metadata: Metadata, key: str, meaning: str) -> list[Any]:
    """Return `metadata[i][key]` of every image; raise a ValueError with its meaning if one is missing."""
    for index, entry in enumerate(metadata):
        if key not in entry:
            raise ValueError(
                f"metadata[{index}] has no {key!r}: this reward needs {meaning}; "
                "let the prompt function put it into the metadata"
            )
    return [entry[key] for entry in metadata]


def metadata_images(metadata: Metadata, key: str, like: torch.Tensor) -> torch.Tensor:
    """Return the checked images `metadata[i][key]` as one batch of the shape of `like`, on its device."""
    values = metadata_column(metadata, key, "an image (3, H, W) in [0, 1]")
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or value.shape != like.shape[1:]:
            given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"metadata[{index}][{key!r}] is {given}: "
                f"use a tensor of the images' shape {tuple(like.shape[1:])}"
            )
    images = torch.stack([value.to(like.device) for value in values])  # (B, 3, H, W)
    check_images(images, f"metadata {key!r}")
    return images.float().clamp(0, 1)
