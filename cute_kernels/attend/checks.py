"""Argument checks of attention to each token's own blocks, shared by all its kernels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cute_kernels.limits import TOKEN_SELECT_SIZES
from cute_kernels.pool.documents import PackedBlocks
from cute_kernels.runtime.device import vectorized

DIMS = (64, 128)
"""Supported D and D_v."""


def check_token_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    size: int,
    scale: float,
    first_token: int = 0,
    packed: PackedBlocks | None = None,
) -> None:
    """Raise ValueError for arguments that the kernels do not support. Args: see kv_outer.kv_outer_forward."""
    for name, x in (("q", q), ("k", k), ("v", v), ("indices", indices)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got {list(x.shape)}")
    batch, tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[2:]
    keys = k.shape[1]
    if k.shape != (batch, keys, kv_heads, dim) or v.shape[:2] != (batch, keys):
        raise ValueError(f"k and v must be [{batch}, N, H_kv, {dim} or D_v], got {[*k.shape]}, {[*v.shape]}")
    if first_token < 0 or (packed is None and keys < first_token + tokens):
        raise ValueError(f"k and v must hold tokens 0 ... {first_token + tokens - 1} at least, got {[*k.shape]}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"H must be a multiple of H_kv, got {heads} and {kv_heads}")
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must all be bf16 or all fp16, got {q.dtype}, {k.dtype}, {v.dtype}")
    if dim not in DIMS or v_dim not in DIMS:
        raise ValueError(f"D and D_v must be in {DIMS}, got {dim} and {v_dim}")
    if indices.dtype != torch.int32 or indices.shape[:3] != (batch, kv_heads, tokens):
        expected = f"int32 [{batch}, {kv_heads}, {tokens}, n]"
        raise ValueError(f"indices must be {expected}, got {indices.dtype} {list(indices.shape)}")
    if size not in TOKEN_SELECT_SIZES:
        raise ValueError(f"size must be in {TOKEN_SELECT_SIZES}, got {size}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be finite and greater than 0, got {scale}")
    if packed is not None and (batch != 1 or first_token != 0 or packed.positions.shape != (tokens,)):
        got = f"{list(packed.positions.shape)}, B = {batch}, first_token = {first_token}"
        raise ValueError(f"positions must be [{tokens}] with B = 1 and first_token = 0, got {got}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not vectorized(x):
            raise ValueError(f"rows of {name} must start at multiples of 16 bytes, got strides {x.stride()}")
