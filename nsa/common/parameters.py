"""Access to parameters that FSDP2 or tensor parallelism may have sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def set_values(parameter: Tensor, values: Tensor) -> None:
    """Copy values, equal on all ranks, into a parameter; a DTensor gets this rank's part of them."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        parameter.copy_(values)


def local_part(parameter: Tensor) -> Tensor:
    """The local part of a DTensor; any other parameter itself."""
    return parameter.to_local() if is_sharded(parameter) else parameter


def is_sharded(parameter: Tensor) -> TypeGuard[DTensor]:
    """True for a DTensor."""
    if type(parameter) is torch.nn.Parameter:
        return False
    from torch.distributed.tensor import DTensor  # half a second, rarely needed

    return isinstance(parameter, DTensor)


def identity_like(parameter: Tensor) -> Tensor:
    """Identity matrices in the last two dims, of the full size even if the parameter is sharded."""
    eye = torch.eye(parameter.shape[-1], dtype=parameter.dtype, device=parameter.device)
    return eye.expand(parameter.shape).contiguous()
