"""Handle tensors that FSDP2 divides among processes; other tensors stay unchanged."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of this process; writing to it changes the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the parts; every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parted_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor (whole, or this process's part) in the sharding of another tensor."""
    if not isinstance(like, DTensor) or tensor.ndim == 0:  # such as an optimizer's number of steps
        return tensor
    tensor, mesh = tensor.to(like.device), like.device_mesh
    if tensor.shape != like.to_local().shape:
        return distribute_tensor(tensor, mesh, like.placements, src_data_rank=None)  # cuts, and sends nothing
    return DTensor.from_local(tensor, mesh, like.placements, shape=like.shape, stride=like.stride())


def forget_gathered(module: nn.Module) -> None:
    """Drop gathered weights, which a network keeps between forward passes."""
    for part in module.modules() if isinstance(module, FSDPModule) else ():
        if isinstance(part, FSDPModule):
            part.reshard()
