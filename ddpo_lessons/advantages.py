"""Lessons 04 and 05: from rewards to advantages.

DDPO needs no value network: the reward of a trajectory, normalised over the batch or over its
prompt, is the advantage of each of its steps. Token-level PPO has a value per step and spreads the
reward with generalised advantage estimation (GAE).
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

Rewards = torch.Tensor | np.ndarray | Sequence[float]


def to_rewards(values: Any) -> torch.Tensor:
    """Turn numbers of any kind into a tensor: float32 where they are no wider, else float64.

    Float64 matters for advantages, which are differences: in float32 1e8 and 1e8 + 1 are equal. Raises
    TypeError, ValueError or RuntimeError, as numpy and torch do, for what is not numbers.
    """
    if isinstance(values, torch.Tensor):
        if values.is_complex():
            raise TypeError("a complex tensor holds no real numbers")
        wide = values.is_floating_point()
        return values.to(torch.promote_types(values.dtype, torch.float32)) if wide else values.cpu().double()
    if hasattr(values, "__array__"):  # an array, or such as a column of a table
        values = np.asarray(values)
        if values.dtype.kind not in "biufO":
            raise TypeError(f"an array of {values.dtype} holds no real numbers")
        # Torch takes neither negative strides nor another byte order.
        kind = np.float32 if values.dtype.name in ("float16", "float32") else np.float64
        return torch.from_numpy(np.array(values, dtype=kind, order="C"))
    return torch.as_tensor(values, dtype=torch.float64)


def normalize(rewards: Rewards, eps: float = 1e-8) -> torch.Tensor:
    """Advantages from the statistics of the whole batch: ``(r - mean(r)) / (std(r) + eps)``, float32 (N,).

    Std is the population's. Equal rewards, which say nothing, give exact zeros. Source: TRL 0.21's
    ``DDPOTrainer.step``; the mean is the baseline that keeps the policy gradient's variance down.

    Rewards (N,) are of any real or integer type and of all processes; `eps`, in units of the reward, keeps
    the division defined. A ValueError refuses rewards that are not (N,), are empty, or hold NaN or inf.
    """
    values, device = _as_float64(rewards)
    return _standardise(values, values, eps).to(device)


def normalize_groups(rewards: Rewards, group_size: int, eps: float = 1e-8) -> torch.Tensor:
    """Advantages within groups of rollouts that share context and initial noise.

    ``(r - mean of its group) / (std of all such differences + eps)``, float32 (N,), of rewards (N,) with the
    members of a group side by side. The group's mean is the baseline, as in GRPO (Shao et al. 2024, arXiv
    2402.03300, section 4.1); one common std keeps a group whose rewards hardly differ from speaking as loudly
    as the others (Liu et al. 2025, arXiv 2503.20783, section 3.1). Raises ValueError: group_size is below 2
    or does not divide N, or `normalize` would refuse the rewards.
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
    """Advantages from the statistics of each context's recent rewards.

    A context is a prompt or an image, named by any hashable key. With statistics of its own, an
    easy context stops drowning a hard one. They apply once a key has ``min_count`` rewards; until
    then those of the current batch do: ``(r - mean) / (std + 1e-6)`` with the population's std.
    Source: ``stat_tracking.py`` of ddpo-pytorch, the code of DDPO's authors.

    While rewards rise, a buffer that reaches back over several epochs has a mean below today's, so
    advantages come out positive on average and everything sampled is reinforced, good or bad.
    ``last_bias`` shows this.

    Attributes:
        buffer_size: rewards kept per key, the newest.
        min_count: rewards that a key needs before its own statistics apply.
        last_bias: mean advantage of the last update, in standard deviations; 0 without bias.

    Raises:
        ValueError: min_count is below 1, or the buffer is too small ever to reach it.
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
        self.last_bias = 0.0
        self._rewards: dict[Hashable, deque[float]] = {}

    def update(self, keys: Iterable[Hashable], rewards: Rewards) -> torch.Tensor:
        """Record rewards (N,) of all processes; return their advantages, float32 (N,) on the rewards' device.

        `keys` name the context of each reward; for images an id, never the text that conditions the policy:
        different images share it. A ValueError refuses another number of keys, and what `normalize` refuses.
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
            kept = [*buffer, *new][-max(self.buffer_size, len(new)) :]  # never less than all of this epoch's
            buffer.extend(new)
            basis = torch.tensor(kept, dtype=torch.float64) if len(kept) >= self.min_count else values
            advantages[indices] = _standardise(values[indices], basis, eps=1e-6)
        self.last_bias = advantages.mean().item()
        return advantages.to(device)

    def stats(self) -> dict[Hashable, tuple[float, float, int]]:
        """Mean, population standard deviation and number of the rewards kept for each key."""
        return {
            key: (float(np.mean(buffer)), float(np.std(buffer)), len(buffer))
            for key, buffer in self._rewards.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that later updates depend on, as JSON holds it; a TypeError for keys that it cannot."""
        return {
            "buffer_size": self.buffer_size,
            "min_count": self.min_count,
            "rewards": [[_encode(key), list(kept)] for key, kept in self._rewards.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the rewards of a tracker; a ValueError if it had another buffer_size or min_count."""
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
    """Generalised advantage estimation, backwards through time.

    Source: Schulman et al. 2015, arXiv 1506.02438, formulas 11 and 16::

        delta_t  = r_t + gamma V_{t+1} - V_t
        A_t      = delta_t + gamma lam A_{t+1}
        return_t = A_t + V_t

    V and A after the last valid step are 0. ``lam=0`` is the one-step TD error, ``lam=1`` the Monte-Carlo
    return minus the value. The results carry no gradient (they are targets) and are not whitened.

    Rewards and values are (..., T), as is `mask`, true or 1 on valid steps; padding may be left, right or
    both, and a masked step ends the episode before it. Returns advantages and returns (..., T), 0 on padding,
    float32 (float64 if an input is). A ValueError refuses shapes that differ, and a gamma or lam outside [0,
    1].
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
    # Filling, here and below, and not multiplying by 0, because padding may hold inf or NaN.
    values = _as_float(values).masked_fill(~valid, 0)

    advantages = torch.zeros_like(rewards + values)
    next_value = next_advantage = advantages.new_zeros(advantages.shape[:-1])  # (...)
    for t in reversed(range(rewards.shape[-1])):
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        advantages[..., t] = delta + gamma * lam * next_advantage
        advantages[..., t].masked_fill_(~valid[..., t], 0)
        next_value, next_advantage = values[..., t], advantages[..., t]
    return advantages, advantages + values


def masked_whiten(
    values: torch.Tensor, mask: torch.Tensor | None = None, shift_mean: bool = True
) -> torch.Tensor:
    """Scale the valid entries to variance 1, and shift them to mean 0 unless told otherwise.

    ``(v - mean) / sqrt(var + 1e-8)``, plus the mean again with ``shift_mean=False`` (for rewards, whose sign
    matters). Mean and variance are over all valid entries of the batch, where `mask`, of the same shape, is
    true or 1; the variance is the unbiased one, as in TRL's text PPO. The result is 0 where masked, float32
    (float64 if the input is). A ValueError refuses shapes that differ, and fewer than two valid entries.
    """
    valid = _valid_steps(values, mask)
    values = _as_float(values)
    if valid.sum() < 2:
        raise ValueError("whitening needs at least two valid entries: one has no variance")
    mean, variance = values[valid].mean(), values[valid].var()
    whitened = (values - mean) * (variance + 1e-8).rsqrt()
    if not shift_mean:
        whitened = whitened + mean
    return whitened.masked_fill(~valid, 0)


def _as_float64(rewards: Rewards) -> tuple[torch.Tensor, torch.device]:
    """Rewards as float64 on the CPU, and the device they came from."""
    rewards = to_rewards(rewards)
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must have shape (N,) with N >= 1, got {tuple(rewards.shape)}")
    values = rewards.detach().cpu().double()
    if not values.isfinite().all():
        bad = (~values.isfinite()).nonzero().flatten().tolist()
        raise ValueError(f"rewards hold NaN or inf at positions {bad}; fix the reward function")
    return values, rewards.device


def _standardise(values: torch.Tensor, basis: torch.Tensor, eps: float) -> torch.Tensor:
    """Values in standard deviations of the basis from its mean, float32."""
    # Equal rewards must give exact zeros, but their mean may be an ulp off; that of zeros is not.
    origin = basis[0]
    basis = basis - origin
    return ((values - origin - basis.mean()) / (basis.std(correction=0) + eps)).float()


def _as_float(tensor: torch.Tensor) -> torch.Tensor:
    """Float64 stays, everything else becomes float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _valid_steps(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    if mask.shape != values.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, the values have {tuple(values.shape)}")
    return mask.bool()


def _encode(key: Hashable) -> Any:
    """A key as JSON; a tuple, which JSON lacks, becomes {"tuple": [...]}."""
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
