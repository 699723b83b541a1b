"""Values of parameters, which FSDP2 and tensor parallelism may have sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def set_values(parameter: Tensor, values: Tensor) -> None:
    """Copy values, the same on all ranks, into a parameter; into a DTensor this rank's part of them."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        parameter.copy_(values)


def local_part(parameter: Tensor) -> Tensor:
    """The part that this rank has of a DTensor; any other parameter as it is."""
    return parameter.to_local() if is_sharded(parameter) else parameter


def is_sharded(parameter: Tensor) -> TypeGuard[DTensor]:
    """True for a DTensor."""
    if type(parameter) is torch.nn.Parameter:
        return False
    from torch.distributed.tensor import DTensor  # half a second, which few need

    return isinstance(parameter, DTensor)


def identity_like(parameter: Tensor) -> Tensor:
    """Identity matrices in the last two dims: whole, whatever of the parameter this rank has."""
    eye = torch.eye(parameter.shape[-1], dtype=parameter.dtype, device=parameter.device)
    return eye.expand(parameter.shape).contiguous()
