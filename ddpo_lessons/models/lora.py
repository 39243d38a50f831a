"""Make LoRA layers that change the weight instead of the output (an addition to lesson 06).

A LoRA layer computes W x + s B (A x) (Hu et al. 2021, arXiv 2106.09685, section 4.1), peft's with five
operations on activations. (W + s B A) x is the same function with the same gradients, with one operation on
activations and one on weights, which are few. It needs a frozen W in float32, for the sum in bfloat16 would
round small updates away.
"""

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Conv2d, Linear
from torch import nn
from torch.nn import functional


def use_summed_weights(config: LoraConfig) -> None:
    """Use summed weights in adapters of this config without dropout, with peft's parameters and names."""
    config._register_custom_module({nn.Linear: SummedLinear, nn.Conv2d: SummedConv2d})


def _is_plain(layer: Any) -> bool:
    """Return whether exactly one adapter must be added, which is not merged into W."""
    return not layer.disable_adapters and not layer.merged and len(layer.active_adapters) == 1


def _summed_weight(layer: Any) -> torch.Tensor:
    """Return W + s B A in the shape of W."""
    (name,) = layer.active_adapters
    weight = layer.base_layer.weight  # (out, in) or (out, in, kh, kw)
    a, b = layer.lora_A[name].weight.flatten(1), layer.lora_B[name].weight.flatten(1)  # (r, in ...), (out, r)
    return torch.addmm(weight.flatten(1), b, a, alpha=layer.scaling[name]).view_as(weight)


class SummedLinear(Linear):
    """peft's LoRA of a linear layer, with one product over the activations."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map (..., in) to (..., out)."""
        if not _is_plain(self):
            return super().forward(x, *args, **kwargs)
        return functional.linear(x, _summed_weight(self), self.base_layer.bias)


class SummedConv2d(Conv2d):
    """peft's LoRA of a convolution, with one convolution of the activations."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map (B, in, h, w) to (B, out, h', w')."""
        if not _is_plain(self):
            return super().forward(x, *args, **kwargs)
        return self.base_layer._conv_forward(x, _summed_weight(self), self.base_layer.bias)
