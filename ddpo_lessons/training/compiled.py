"""Check that a compiled UNet is still the same function (an addition to lesson 08).

torch.compile generates kernels, and those of the backward pass can be wrong although the forward pass is
correct (PyTorch's issue 185509). Ratios are then 1 as they should be, and no metric of PPO shows the fault,
but whole blocks learn nothing. Therefore gradients are compared before they are used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

# Relative to a weight's gradient. A lost one is 1 apart; bfloat16's rounding needs room, for guidance takes
# the difference of two outputs that are nearly equal.
MAX_APART = 0.5
SMALL = 0.01  # of the largest gradient: what is smaller may be mostly rounding


class WrongGradientsError(RuntimeError):
    """The gradients of compiled code differ from those of the same code uncompiled."""


class Recorder:
    """Call a denoiser and keep its outputs, so that their gradients can be computed.

    A loss's own gradient would not do: PPO's is zero where a ratio is clipped.
    """

    def __init__(self, denoiser: Callable[..., Any]) -> None:
        self._denoiser = denoiser
        self._outputs: list[torch.Tensor] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the denoiser."""
        out = self._denoiser(*args, **kwargs)
        self._outputs.append(out.sample)
        return out

    def sum_of_squares(self) -> torch.Tensor:
        """Return a scalar that depends on every output."""
        return torch.stack([out.float().square().sum() for out in self._outputs]).sum()


def check_gradients(
    names: Sequence[str], compiled: Sequence[torch.Tensor], own: Sequence[torch.Tensor]
) -> None:
    """Compare the gradients of compiled and uncompiled code, weight by weight.

    Each weight's difference is `|compiled - own| / max(|own|, 0.01 largest |own|)`. A WrongGradientsError
    names weights that differ by more than half, or are not finite.
    """
    norms = torch.stack([gradient.norm() for gradient in own])  # (weights,)
    apart = torch.stack([(a - b).norm() for a, b in zip(compiled, own, strict=True)])  # (weights,)
    relative = apart / norms.clamp(min=SMALL * norms.max())
    wrong = [name for name, value in zip(names, relative.tolist(), strict=True) if not value <= MAX_APART]
    if wrong:
        raise WrongGradientsError(
            f"torch_compile=True: torch {torch.__version__} compiles this UNet to wrong gradients, "
            f"{relative.max():.0%} off, in {len(wrong)} of {len(names)} weights, such as {wrong[0]}; no step "
            "was taken with them. Set torch_compile=False, or try another version of torch"
        )
