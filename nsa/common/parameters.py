"""Values of parameters, which FSDP2 and tensor parallelism may have sharded."""

from __future__ import annotations

import torch
from torch import Tensor


def set_values(parameter: Tensor, values: Tensor) -> None:
    """Copy values, the same on all ranks, into a parameter; into a DTensor this rank's part of them."""
    if type(parameter) is not torch.nn.Parameter:
        from torch.distributed.tensor import DTensor, distribute_tensor  # half a second, which few need

        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        parameter.copy_(values)


def identity_like(parameter: Tensor) -> Tensor:
    """Identity matrices in the last two dims: whole, whatever of the parameter this rank has."""
    eye = torch.eye(parameter.shape[-1], dtype=parameter.dtype, device=parameter.device)
    return eye.expand(parameter.shape).contiguous()
