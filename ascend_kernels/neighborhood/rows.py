"""What the kernels of neighborhood attention share: rows of residue classes, and the numbers every launch takes.

Tokens of a class lie `dilation` tokens apart, so a class is addressed by its first token and a larger stride between
rows. Tiles are runs of consecutive rows, masked at their end and never clamped: one block copy each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZES = ("num_work", "num_tokens", "num_heads", "group_size", "dilation", "rows_per_class", "left", "right", "shift")
"""Run-time values that must not make builds of their own; strides and D may, for their alignment."""


@triton.jit
def piece(i_work, num_heads, dilation, num_tokens, rows_per_class, rows_per_tile):
    """Batch element, head and residue class (int64), first row of the tile and rows of the class (int32)."""
    num_tiles = tl.cdiv(rows_per_class, rows_per_tile)
    i_outer = i_work // num_heads
    i_class = i_outer % dilation
    i_tile = i_outer // dilation % num_tiles
    i_batch = i_outer // dilation // num_tiles
    return (
        tl.cast(i_batch, tl.int64),
        tl.cast(i_work % num_heads, tl.int64),
        tl.cast(i_class, tl.int64),
        tl.cast(i_tile * rows_per_tile, tl.int32),
        tl.cast((num_tokens - i_class + dilation - 1) // dilation, tl.int32),
    )


@triton.jit
def window_start(o_rows, num_rows, left, right, shift):
    """First key of rows' windows; below 0 where a truncated one starts before its class."""
    lowest = tl.where(shift != 0, 0, -left)
    highest = tl.where(shift != 0, tl.maximum(num_rows - (left + right + 1), 0), num_rows)
    return tl.minimum(tl.maximum(o_rows - left, lowest), highest)


@triton.jit
def first_reader(o_keys, left, right, shift):
    """First row that sees a key; below 0 where no row is."""
    from_start = (shift != 0) & (o_keys <= left + right)  # keys of the first window
    return tl.where(from_start, 0, o_keys - right)


@triton.jit
def last_reader(o_keys, num_rows, left, right, shift):
    """Last row that sees a key; past the class's end where no row is."""
    to_end = (shift != 0) & (o_keys >= num_rows - (left + right + 1))  # keys of the last window
    return tl.where(to_end, num_rows - 1, o_keys + left)


@triton.jit
def class_base(p, i_batch, i_head, i_class, batch_stride, token_stride, head_stride):
    """Where a class of a head starts."""
    return p + i_batch * batch_stride + i_head * head_stride + i_class * token_stride


@triton.jit
def tile_mask(o_rows, o_dim, end_row, dim, WHOLE_D: tl.constexpr):
    """What of a tile there is. WHOLE_D: all features, which GPUs load faster without a mask."""
    if WHOLE_D:
        mask = (o_rows < end_row)[:, None]
    else:
        mask = (o_rows < end_row)[:, None] & (o_dim < dim)[None, :]
    return mask


@triton.jit
def load_rows(p_class, o_rows, o_dim, row_stride, end_row, dim, UPCAST: tl.constexpr, WHOLE_D: tl.constexpr = False):
    """Rows of a class, zeros from end_row on."""
    mask = tile_mask(o_rows, o_dim, end_row, dim, WHOLE_D)
    b_rows = tl.load(p_class + o_rows.to(tl.int64)[:, None] * row_stride + o_dim[None, :], mask=mask, other=0.0)
    if UPCAST:
        b_rows = b_rows.to(tl.float32)
    return b_rows


@triton.jit
def store_rows(p_class, b_rows, o_rows, o_dim, row_stride, end_row, dim, WHOLE_D: tl.constexpr = False):
    mask = tile_mask(o_rows, o_dim, end_row, dim, WHOLE_D)
    p_rows = p_class + o_rows.to(tl.int64)[:, None] * row_stride + o_dim[None, :]
    tl.store(p_rows, b_rows.to(p_class.dtype.element_ty), mask=mask)


# Launchers


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)


def sizes_of(
    q: Tensor,
    k: Tensor,
    kernel_size: int,
    dilation: int,
    softmax_scale: float | None,
    boundary: str,
    causal: bool,
) -> dict[str, Any]:
    """The numbers that kernels take beside strides, features and num_work, of inputs as they came, without padding.

    Windows and classes past N rows change nothing.
    """
    num_tokens, num_heads = q.shape[1:3]
    classes = max(1, min(dilation, num_tokens))
    left = kernel_size - 1 if causal else kernel_size // 2
    return {
        "scale": scale_of(q, softmax_scale),
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "group_size": num_heads // k.shape[2],
        "dilation": classes,
        "rows_per_class": -(-num_tokens // classes),
        "left": min(left, num_tokens),
        "right": min(kernel_size - 1 - left, num_tokens),
        "shift": int(boundary == "shift" and not causal),
    }


ALIGNMENT = 16
"""NPUs move rows of whole blocks of 32 bytes: D = 123 faulted on an A3. So many elements are one block of 16-bit types
and two of fp32."""


def is_readable(tensor: Tensor, backend: str) -> bool:
    """Whether kernels take a tensor as it is: features contiguous; for NPUs, rows that start and end with a block."""
    if backend != "ascend":
        return tensor.stride(-1) == 1
    bytes_of_block = 2 * ALIGNMENT
    strides = (stride for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1)
    return (
        tensor.stride(-1) == 1
        and tensor.shape[-1] % ALIGNMENT == 0
        and all(stride % ALIGNMENT == 0 for stride in strides)
        and tensor.data_ptr() % bytes_of_block == 0
    )


def readable(tensor: Tensor, backend: str) -> Tensor:
    """The tensor, or a copy that kernels take."""
    return tensor if is_readable(tensor, backend) else readable_copy(tensor, backend)


def readable_copy(tensor: Tensor, backend: str) -> Tensor:
    """A contiguous copy that kernels take, for NPUs with zeros as further features.

    They change no result: products with them are 0, and results of their own, 0 too, are cut off by `without_padding`.
    """
    if backend != "ascend":
        return tensor.contiguous()
    dim = tensor.shape[-1]
    copy = tensor.new_zeros((*tensor.shape[:-1], features_of(dim, backend)))
    copy[..., :dim] = tensor
    return copy


def features_of(dim: int, backend: str) -> int:
    """D as kernels see it."""
    return -(-dim // ALIGNMENT) * ALIGNMENT if backend == "ascend" else dim


def without_padding(tensor: Tensor, dim: int) -> Tensor:
    """The first `dim` features, contiguous."""
    return tensor if tensor.shape[-1] == dim else tensor[..., :dim].contiguous()


def empty_like_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """New contiguous tensors of the same shapes."""
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in tensors)


def writable(results: tuple[Tensor, ...] | None, like: tuple[Tensor, ...], backend: str) -> tuple[Tensor, ...]:
    """Where kernels write: results where they are given and can be written as they are, else new tensors."""
    if results is not None and all(is_readable(result, backend) for result in results):
        return results
    return empty_like_rows(*like)


def handed_over(written: tuple[Tensor, ...], results: tuple[Tensor, ...] | None, dim: int) -> tuple[Tensor, ...]:
    """What kernels wrote, without padding: in results where they are given."""
    if results is None:
        return tuple(without_padding(tensor, dim) for tensor in written)
    for result, tensor in zip(results, written, strict=True):
        if result is not tensor:
            result.copy_(tensor[..., :dim])
    return results
