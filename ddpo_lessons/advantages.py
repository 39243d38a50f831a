"""Lessons 04 and 05: compute advantages from rewards.

DDPO needs no value network, because the reward of a trajectory, normalized over the batch or over its
prompt, is the advantage of each of its steps. Token-level PPO has a value per step and distributes the
reward with generalized advantage estimation (GAE).
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

Rewards = torch.Tensor | np.ndarray | Sequence[float]


def to_rewards(values: Any) -> torch.Tensor:
    """Convert numbers of any type to a tensor: float32 if they fit exactly, otherwise float64.

    Float64 matters because advantages are differences, and in float32 1e8 and 1e8 + 1 are equal. Raises
    TypeError, ValueError or RuntimeError, as numpy and torch do, for values that are not numbers.
    """
    if isinstance(values, torch.Tensor):
        if values.is_complex():
            raise TypeError("a complex tensor holds no real numbers")
        wide = values.is_floating_point()
        return values.to(torch.promote_types(values.dtype, torch.float32)) if wide else values.cpu().double()
    if hasattr(values, "__array__"):  # an array, or for example a column of a table
        values = np.asarray(values)
        if values.dtype.kind not in "biufO":
            raise TypeError(f"an array of {values.dtype} holds no real numbers")
        # Torch supports neither negative strides nor another byte order.
        kind = np.float32 if values.dtype.name in ("float16", "float32") else np.float64
        return torch.from_numpy(np.array(values, dtype=kind, order="C"))
    return torch.as_tensor(values, dtype=torch.float64)


def normalize(rewards: Rewards, eps: float = 1e-8) -> torch.Tensor:
    """Normalize rewards over the whole batch: ``(r - mean(r)) / (std(r) + eps)``, float32 (N,).

    Std is that of the population. Equal rewards give exact zeros, because they carry no information. The mean
    is the baseline that reduces the variance of the policy gradient. Source: TRL 0.21's ``DDPOTrainer.step``.

    Rewards (N,) may be of any real or integer type, and include those of all processes. `eps`, in units of
    the reward, avoids a division by 0. Raises a ValueError if the rewards are not (N,), are empty, or contain
    NaN or inf.
    """
    values, device = _as_float64(rewards)
    return _standardise(values, values, eps).to(device)


def normalize_groups(rewards: Rewards, group_size: int, eps: float = 1e-8) -> torch.Tensor:
    """Normalize rewards within groups of rollouts that share context and initial noise.

    ``(r - mean of its group) / (std of all such differences + eps)``, float32 (N,), for rewards (N,) in which
    the samples of a group are consecutive. The group's mean is the baseline, as in GRPO (Shao et al. 2024,
    arXiv 2402.03300, section 4.1). A common std is used so that a group whose rewards hardly differ does not
    get the same weight as the others (Liu et al. 2025, arXiv 2503.20783, section 3.1). Raises a ValueError if
    group_size is below 2 or does not divide N, or if `normalize` would refuse the rewards.
    """
    values, device = _as_float64(rewards)
    if group_size < 2 or len(values) % group_size:
        raise ValueError(f"group_size={group_size} must be 2 or more and divide the {len(values)} rewards")
    groups = values.view(-1, group_size)  # (N / G, G)
    # As in _standardise: equal rewards give exact zeros.
    groups = groups - groups[:, :1]
    differences = (groups - groups.mean(1, keepdim=True)).flatten()  # (N,)
    return (differences / (differences.std(correction=0) + eps)).float().to(device)


class PerPromptStatTracker:
    """Normalize rewards with the statistics of each context's recent rewards.

    A context is a prompt or an image, identified by any hashable key. With separate statistics, an easy
    context no longer dominates a hard one. A key's statistics are used once it has ``min_count`` rewards, and
    before that those of the current batch: ``(r - mean) / (std + 1e-6)`` with the population's std. Source:
    ``stat_tracking.py`` of ddpo-pytorch, the code of DDPO's authors.

    While rewards rise, the mean of a buffer over several epochs is below the current mean. Advantages are
    then positive on average, and all samples are reinforced, good or bad. A run records the average.

    Attributes:
        buffer_size: number of the newest rewards that are kept per key.
        min_count: number of rewards that a key needs before its own statistics are used.

    Raises:
        ValueError: min_count is below 1, or the buffer is too small to reach it.
    """

    def __init__(self, buffer_size: int, min_count: int) -> None:
        if min_count < 1:
            raise ValueError(f"min_count={min_count} must be 1 or more")
        if buffer_size < min_count:
            raise ValueError(
                f"buffer_size={buffer_size} can never hold min_count={min_count} rewards, so no "
                f"key would get statistics of its own; use buffer_size >= {min_count}"
            )
        self.buffer_size = buffer_size
        self.min_count = min_count
        self._rewards: dict[Hashable, deque[float]] = {}

    def update(self, keys: Iterable[Hashable], rewards: Rewards) -> torch.Tensor:
        """Record rewards (N,) of all processes; return their advantages, float32 (N,) on the rewards' device.

        `keys` identify the context of each reward. For images use an id instead of the prompt, because
        different images may share a prompt. Raises a ValueError for another number of keys, and as
        `normalize` does.
        """
        values, device = _as_float64(rewards)
        keys = list(keys)
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} keys for {len(values)} rewards; give one key per reward")
        positions: dict[Hashable, list[int]] = {}
        for i, key in enumerate(keys):
            positions.setdefault(key, []).append(i)

        advantages = torch.empty(len(values), dtype=torch.float32)
        for key, indices in positions.items():
            buffer = self._rewards.setdefault(key, deque(maxlen=self.buffer_size))
            new = values[indices].tolist()
            kept = [*buffer, *new][-max(self.buffer_size, len(new)) :]  # at least all rewards of this epoch
            buffer.extend(new)
            basis = torch.tensor(kept, dtype=torch.float64) if len(kept) >= self.min_count else values
            advantages[indices] = _standardise(values[indices], basis, eps=1e-6)
        return advantages.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for JSON; raise a TypeError for keys that JSON cannot store."""
        return {
            "buffer_size": self.buffer_size,
            "min_count": self.min_count,
            "rewards": [[_encode(key), list(kept)] for key, kept in self._rewards.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a tracker's rewards; raise a ValueError for another buffer_size or min_count."""
        for name in ("buffer_size", "min_count"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved statistics have {name}={state[name]}, this tracker has "
                    f"{name}={getattr(self, name)}; resume with the saved value"
                )
        self._rewards = {_decode(key): deque(kept, maxlen=self.buffer_size) for key, kept in state["rewards"]}


@torch.no_grad()
def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute generalized advantage estimation (GAE), backwards through time.

    Source: Schulman et al. 2015, arXiv 1506.02438, formulas 11 and 16::

        delta_t  = r_t + gamma V_{t+1} - V_t
        A_t      = delta_t + gamma lam A_{t+1}
        return_t = A_t + V_t

    V and A after the last valid step are 0. ``lam=0`` gives the one-step TD error, ``lam=1`` the Monte-Carlo
    return minus the value. The results have no gradient, because they are targets, and are not whitened.

    Rewards and values are (..., T), as is `mask`, which is true or 1 on valid steps. Padding may be on the
    left, on the right or on both sides, and a masked step ends the episode before it. Returns advantages and
    returns (..., T), 0 on padding, float32 (float64 if an input is). Raises a ValueError if shapes differ, or
    if gamma or lam is outside [0, 1].
    """
    valid = _valid_steps(rewards, mask)
    if values.shape != rewards.shape:
        raise ValueError(
            f"values has shape {tuple(values.shape)}, rewards has {tuple(rewards.shape)}; "
            "both must be (..., T) and the same"
        )
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"{name}={number} must be in [0, 1]")
    rewards = _as_float(rewards)
    # Fill, here and below, instead of multiplying by 0, because padding may contain inf or NaN.
    values = _as_float(values).masked_fill(~valid, 0)

    advantages = torch.zeros_like(rewards + values)
    next_value = next_advantage = advantages.new_zeros(advantages.shape[:-1])  # (...)
    for t in reversed(range(rewards.shape[-1])):
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        advantages[..., t] = delta + gamma * lam * next_advantage
        advantages[..., t].masked_fill_(~valid[..., t], 0)
        next_value, next_advantage = values[..., t], advantages[..., t]
    return advantages, advantages + values


def masked_whiten(values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Shift and scale the valid entries to mean 0 and variance 1: ``(v - mean) / sqrt(var + 1e-8)``.

    Mean and variance are over all valid entries of the batch, where `mask`, of the same shape, is true or 1.
    The variance is the unbiased one, as in TRL's text PPO. The result is 0 where masked, float32 (float64 if
    the input is). Raises a ValueError if shapes differ, or if fewer than two entries are valid.
    """
    valid = _valid_steps(values, mask)
    values = _as_float(values)
    if valid.sum() < 2:
        raise ValueError("whitening needs at least two valid entries: one has no variance")
    mean, variance = values[valid].mean(), values[valid].var()
    return ((values - mean) * (variance + 1e-8).rsqrt()).masked_fill(~valid, 0)


def _as_float64(rewards: Rewards) -> tuple[torch.Tensor, torch.device]:
    """Return rewards as float64 on the CPU, and their original device."""
    rewards = to_rewards(rewards)
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must have shape (N,) with N >= 1, got {tuple(rewards.shape)}")
    values = rewards.detach().cpu().double()
    if not values.isfinite().all():
        bad = (~values.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"rewards hold NaN or inf at positions {bad}; fix the reward function")
    return values, rewards.device


def _standardise(values: torch.Tensor, basis: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the distances of values from the mean of the basis in its standard deviations, float32."""
    # Subtract one value first, so that equal rewards give exact zeros although their mean is rounded.
    origin = basis[0]
    basis = basis - origin
    return ((values - origin - basis.mean()) / (basis.std(correction=0) + eps)).float()


def _as_float(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float32, and leave float64 as it is."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _valid_steps(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    if mask.shape != values.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, the values have {tuple(values.shape)}")
    return mask.bool()


def _encode(key: Hashable) -> Any:
    """Encode a key for JSON, with tuples as {"tuple": [...]}."""
    if isinstance(key, tuple):
        return {"tuple": [_encode(part) for part in key]}
    if key is None or isinstance(key, str | int | float):  # bool is an int
        return key
    raise TypeError(
        f"key {key!r} of type {type(key).__name__} cannot be saved; use str, int, float, bool, "
        "None or tuples of them as keys"
    )


def _decode(key: Any) -> Hashable:
    return tuple(_decode(part) for part in key["tuple"]) if isinstance(key, dict) else key
