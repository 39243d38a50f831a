"""Lesson 06: call the user's functions, and check their results."""

import inspect
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ddpo_lessons.advantages import to_rewards
from ddpo_lessons.image import to_tensor
from ddpo_lessons.models import Family
from ddpo_lessons.rewards.reward import RewardFunction as RewardFunction
from ddpo_lessons.rewards.reward import split_info

PromptFunction = Callable[[], tuple[Any, ...]]
DEPTH = 3  # levels of nested dicts and lists of the metadata that are checked


@dataclass(frozen=True)
class Context:
    """The context of a rollout: a prompt, the user's metadata and, for img2img, an image (3, H, W)."""

    prompt: str
    metadata: Any
    image: torch.Tensor | None = None

    @property
    def key(self) -> Any:
        """The key of per-prompt statistics: `metadata["id"]` if there is one, otherwise the prompt."""
        has_id = isinstance(self.metadata, dict) and "id" in self.metadata
        return self.metadata["id"] if has_id else self.prompt


class Batch(NamedTuple):
    """A batch of B scored images, in TRL's order."""

    images: torch.Tensor  #: (B, 3, H, W)
    prompts: tuple[str, ...]
    metadata: tuple[Any, ...]
    rewards: torch.Tensor  #: (B,)
    info: Any  #: further results of the reward function

    def for_hook(self) -> list[Any]:
        """Return the list that TRL gives to a hook, with the rewards on the CPU."""
        return list(self._replace(rewards=self.rewards.cpu()))


def check_hook(name: str, hook: Any) -> None:
    """Raise a TypeError for a hook that is neither a function nor None."""
    if hook is not None and not callable(hook):
        raise TypeError(f"{name} must be a function or None, not {type(hook).__name__}")


def check_functions(reward_function: Any, prompt_function: Any) -> None:
    """Raise a TypeError for functions that cannot be called, or whose state JSON cannot store."""
    for name, function in (("reward_function", reward_function), ("prompt_function", prompt_function)):
        if not callable(function):
            makes = "get_reward" if name == "reward_function" else "get_prompts"
            by_name = f"; {makes} makes one by its name" if isinstance(function, str) else ""
            raise TypeError(f"{name} must be callable, not {type(function).__name__}{by_name}")
    is_wrapper = hasattr(prompt_function, "__wrapped__")  # its signature is another function's
    prompt_takes = None if is_wrapper else other_arguments(prompt_function, ())
    if takes := other_arguments(reward_function):
        remedy = "give it these three arguments"
        if len(takes.parameters) < 2 and "images" not in takes.parameters:
            remedy = "if it returns a reward function, call it: NAME() instead of NAME"
        are_swapped = not other_arguments(prompt_function) and not other_arguments(reward_function, ())
        if prompt_takes and are_swapped:
            remedy = "it looks swapped with prompt_function, which takes three arguments"
        raise TypeError(
            f"reward_function takes {takes} and is called with (images, prompts, metadata): {remedy}"
        )
    if prompt_takes:
        raise TypeError(
            f"prompt_function takes {prompt_takes} and is called without arguments: write `lambda: ...`, or "
            "give each argument a default"
        )
    has = {name for name in ("state_dict", "load_state_dict", "skip") if hasattr(prompt_function, name)}
    if has and not {"state_dict", "load_state_dict"} <= has:
        raise TypeError(
            f"prompt_function has {', '.join(sorted(has))} alone: state_dict() and load_state_dict() belong "
            "together, and skip() needs both"
        )
    if hasattr(prompt_function, "state_dict"):
        remedy = (
            "prompt_function.state_dict() must return what JSON holds and gives back: dicts with text as "
            "keys, lists, text, numbers"
        )
        state = prompt_function.state_dict()
        try:
            given_back = json.loads(json.dumps(state))
        except TypeError as error:
            raise TypeError(remedy) from error
        if given_back != state:  # tuples become lists, and numbers as keys text
            raise TypeError(remedy)


def other_arguments(
    function: Callable[..., Any], arguments: Sequence[str] = ("images", "prompts", "metadata")
) -> inspect.Signature | None:
    """Return a function's signature if it does not accept arguments of this number, else None."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*arguments)
    except TypeError:
        return signature
    return None


def text_context(drawn: Any) -> Context:
    """Make a context from the result of a text-to-image prompt function; raise a TypeError otherwise."""
    if isinstance(drawn, tuple) and len(drawn) == 3 and isinstance(drawn[0], str):
        raise TypeError(
            "prompt_function returned (prompt, image, metadata), and this run starts from noise: return "
            "(prompt, metadata), or take ImageDDPOTrainer, or Trainer(..., start=FromImages(noise_strength))"
        )
    if not isinstance(drawn, tuple) or len(drawn) != 2 or not isinstance(drawn[0], str):
        raise TypeError(f"prompt_function must return (prompt, metadata), not {drawn!r:.200}")
    return Context(_check_prompt(drawn[0]), drawn[1])


def _check_prompt(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # such as half an emoji, which no tokenizer accepts
        raise ValueError(
            f"prompt_function returned {prompt!r:.200}, which is no valid text: {error}"
        ) from error
    return prompt


def check_key(key: Any) -> None:
    """Raise a TypeError for a key of samples that a checkpoint cannot restore."""
    parts = key if isinstance(key, tuple) else ()
    for part in parts:
        check_key(part)
    if not isinstance(key, (str, int, float, tuple, type(None))) or key != key:
        raise TypeError(
            f"metadata['id'], or the algorithm's key, holds {key!r:.200}: samples are compared by str, int, "
            "float, bool, None or tuples of them"
        )


def image_context(drawn: Any, family: Family) -> Context:
    """Make a context from the result of an img2img prompt function; raise a TypeError otherwise."""
    if not isinstance(drawn, tuple) or len(drawn) != 3 or not isinstance(drawn[0], str):
        raise TypeError(f"prompt_function must return (prompt, image, metadata), not {drawn!r:.200}")
    prompt, image, metadata = drawn
    image = to_tensor(image)
    family.check_images(image[None])
    return Context(_check_prompt(prompt), metadata, image)


def score(reward_function: RewardFunction, images: torch.Tensor, contexts: Sequence[Context]) -> Batch:
    """Call the reward function on B images and their contexts; `check_rewards` checks the values.

    Raises a TypeError for rewards that are not numbers, and a ValueError for rewards of another shape. It
    also raises a ValueError if the function writes into the tensors or arrays that it gets, because later
    rollouts start from these images.
    """
    prompts = tuple(context.prompt for context in contexts)
    metadata = tuple(context.metadata for context in contexts)
    before = _marks(images, metadata)
    returned = reward_function(images, prompts, metadata)
    if not before <= _marks(images, metadata):
        raise ValueError(
            "reward_function writes into the images or the metadata that it is given: let it work on copies, "
            "such as image.clone()"
        )
    rewards, info = split_info(returned)
    try:
        rewards = to_rewards(rewards).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        among = rewards if isinstance(rewards, list | tuple) else []
        wrong = next((entry for entry in among if not isinstance(entry, int | float | torch.Tensor)), rewards)
        remedy = ": return them alone, or a pair of them and a dict" if isinstance(returned, tuple) else ""
        if returned is None:
            remedy = ": does it end without return?"
        raise TypeError(f"reward_function must return numbers, not {wrong!r:.60}{remedy}") from error
    if rewards.shape != (len(images),):
        raise ValueError(
            f"reward_function returned shape {tuple(rewards.shape)} for {len(images)} images: "
            f"return one reward per image, ({len(images)},)"
        )
    return Batch(images, prompts, metadata, rewards, info)


def _marks(images: torch.Tensor, metadata: Sequence[Any]) -> set[tuple[Any, ...]]:
    """Return a checksum of the images and of each tensor and array in the metadata, to detect writing."""
    marks: set[tuple[Any, ...]] = {(_sum_of(images),)}
    seen, left = set[int](), [(entry, 0) for entry in metadata]
    while left:
        holder, depth = left.pop()
        if not isinstance(holder, dict | list | tuple) or depth == DEPTH or id(holder) in seen:
            continue
        seen.add(id(holder))  # samples of a group share their metadata
        for name, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if isinstance(value, torch.Tensor | np.ndarray):
                marks.add((id(holder), name, id(value), _sum_of(value)))
            left.append((value, depth + 1))
    return marks


def _sum_of(value: Any) -> int | None:
    """Return a checksum of the bytes on the CPU, and elsewhere torch's count of writes."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout != torch.strided:
            return None if value.is_inference() else value._version
        value = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(np.ascontiguousarray(value).tobytes())


def info_means(batches: Sequence[Batch]) -> dict[str, float]:
    """Return the means of the entries of info that have one number per sample, by name."""
    infos = [batch.info for batch in batches]
    if not all(isinstance(info, Mapping) for info in infos):
        return {}
    means = {}
    for name in infos[0]:
        columns = [_column(batch.info.get(name), len(batch.images)) for batch in batches]
        found = [column for column in columns if column is not None]
        if len(found) == len(columns):
            means[str(name)] = torch.cat(found).mean().item()
    return means


def _column(value: Any, size: int) -> torch.Tensor | None:
    """Return an entry of info (B,), or None if it is not B numbers."""
    try:
        column = to_rewards(value).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return column if column.shape == (size,) else None


def check_rewards(batches: Sequence[Batch]) -> torch.Tensor:
    """Return the rewards of all batches on the CPU, (N,); raise a ValueError if one is not finite."""
    rewards = torch.cat([batch.rewards for batch in batches]).cpu()  # (N,)
    for batch, own in zip(batches, rewards.split([len(batch.rewards) for batch in batches]), strict=True):
        for row in torch.nonzero(~own.isfinite()).flatten().tolist():
            raise ValueError(
                f"reward_function returned {own[row].item()} for sample {row} of the batch, prompt "
                f"{batch.prompts[row]!r}: return finite numbers"
            )
    return rewards
