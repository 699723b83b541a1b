"""Residue classes and windows: addressing of rows in the kernels of neighborhood attention, and their sizes.

Tokens of a residue class are `dilation` tokens apart, so a class is addressed by its first token and a larger stride
between rows. Tiles are consecutive rows, masked at their end and never clamped: one block copy each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZES = ("num_work", "num_tokens", "num_heads", "group_size", "dilation", "rows_per_class", "left", "right", "shift")
"""Run-time values that Triton must not specialise; strides and D may be, for their alignment."""


# In kernels


@triton.jit
def work_tile(i_work, num_heads, dilation, num_tokens, rows_per_class, rows_per_tile):
    """Coordinates of a work tile: batch element, head and class (int64), its first row and the class's rows (int32)."""
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
    """First key of each row's window; negative if a truncated window starts before its class."""
    lowest = tl.where(shift != 0, 0, -left)
    highest = tl.where(shift != 0, tl.maximum(num_rows - (left + right + 1), 0), num_rows)
    return tl.minimum(tl.maximum(o_rows - left, lowest), highest)


@triton.jit
def first_row_of_key(o_keys, left, right, shift):
    """First row whose window holds a key; may be negative."""
    from_start = (shift != 0) & (o_keys <= left + right)  # keys of the first window
    return tl.where(from_start, 0, o_keys - right)


@triton.jit
def last_row_of_key(o_keys, num_rows, left, right, shift):
    """Last row whose window holds a key; may be past the end of the class."""
    to_end = (shift != 0) & (o_keys >= num_rows - (left + right + 1))  # keys of the last window
    return tl.where(to_end, num_rows - 1, o_keys + left)


@triton.jit
def class_base(p, i_batch, i_head, i_class, batch_stride, token_stride, head_stride):
    """Pointer to the first row of a class of a head."""
    return p + i_batch * batch_stride + i_head * head_stride + i_class * token_stride


@triton.jit
def tile_mask(o_rows, o_dim, end_row, dim, WHOLE_D: tl.constexpr):
    """Rows and features of a tile that exist. WHOLE_D: BLOCK_D is D; GPUs load faster without a mask of features."""
    if WHOLE_D:
        mask = (o_rows < end_row)[:, None]
    else:
        mask = (o_rows < end_row)[:, None] & (o_dim < dim)[None, :]
    return mask


@triton.jit
def load_rows(p_class, o_rows, o_dim, row_stride, end_row, dim, UPCAST: tl.constexpr, WHOLE_D: tl.constexpr = False):
    """A tile of rows `[rows, features]`, zeros from end_row and from dim on."""
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


# In launchers


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
    """The scalar arguments of kernels, besides strides, D and num_work.

    Args:
        q: `[B,N,H,D]` and k: `[B,N,H_kv,D]`, as the user gave them, without padding.

    Returns:
        The scalars by name; dilation and window are limited to N, beyond which they change nothing.
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


def strides_of(tensors: Mapping[str, Tensor], axes: tuple[str, ...] = ("batch", "token", "head")) -> dict[str, int]:
    """The stride arguments of kernels: `<tensor>_<axis>_stride`."""
    return {
        f"{name}_{axis}_stride": tensor.stride(i) for name, tensor in tensors.items() for i, axis in enumerate(axes)
    }


def needs_upcast(kernel: Any, dtype: torch.dtype) -> bool:
    """True if operands of `tl.dot` must be cast to fp32, because Triton's interpreter multiplies the raw bits of
    bf16.
    """
    return dtype == torch.bfloat16 and not isinstance(kernel, triton.JITFunction)
