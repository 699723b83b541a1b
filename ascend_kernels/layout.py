"""Layouts that the kernels read and write directly, and copies of other tensors.

Features, the last dimension, must be contiguous. An NPU moves whole blocks of 32 bytes (D = 123 faulted on an A3), so
there rows must also start at a multiple of 32 bytes, and are padded to a multiple of ROW_ALIGNMENT features.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_BYTES = 32
ROW_ALIGNMENT = 16
"""Alignment of rows in elements: one block of a 16-bit dtype, two of fp32."""


def is_readable(tensor: Tensor, backend: str) -> bool:
    """True if kernels can read a tensor directly."""
    if backend != "ascend":
        return tensor.stride(-1) == 1
    strides = (stride for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1)
    return (
        tensor.stride(-1) == 1
        and tensor.shape[-1] % ROW_ALIGNMENT == 0
        and all(stride % ROW_ALIGNMENT == 0 for stride in strides)
        and tensor.data_ptr() % BLOCK_BYTES == 0
    )


def readable(tensor: Tensor, backend: str) -> Tensor:
    """Return the tensor, or a copy that kernels can read."""
    return tensor if is_readable(tensor, backend) else readable_copy(tensor, backend)


def readable_copy(tensor: Tensor, backend: str) -> Tensor:
    """A contiguous copy that kernels can read; for NPUs padded with zero features.

    Padding changes no result: products with it are 0, and `without_padding` removes its own results.
    """
    if backend != "ascend":
        return tensor.contiguous()
    dim = tensor.shape[-1]
    copy = tensor.new_zeros((*tensor.shape[:-1], padded_dim(dim, backend)))
    copy[..., :dim] = tensor
    return copy


def padded_dim(dim: int, backend: str) -> int:
    """Number of features of a row, including padding."""
    return -(-dim // ROW_ALIGNMENT) * ROW_ALIGNMENT if backend == "ascend" else dim


def without_padding(tensor: Tensor, dim: int) -> Tensor:
    """The first `dim` features, contiguous."""
    return tensor if tensor.shape[-1] == dim else tensor[..., :dim].contiguous()


def empty_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """New contiguous tensors of the same shapes, dtypes and devices."""
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors)


def output_buffers(results: tuple[Tensor, ...] | None, like: tuple[Tensor, ...], backend: str) -> tuple[Tensor, ...]:
    """Output tensors for kernels: `results` if given and directly writable, else new tensors shaped as `like`."""
    if results is not None and all(is_readable(result, backend) for result in results):
        return results
    return empty_contiguous(*like)


def copy_to_results(buffers: tuple[Tensor, ...], results: tuple[Tensor, ...] | None, dim: int) -> tuple[Tensor, ...]:
    """Return the contents of `output_buffers` without padding, copied to `results` if given."""
    if results is None:
        return tuple(without_padding(buffer, dim) for buffer in buffers)
    for result, buffer in zip(results, buffers, strict=True):
        if result is not buffer:
            result.copy_(buffer[..., :dim])
    return results
