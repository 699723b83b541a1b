"""The backward of neighborhood attention from saved probabilities: which path, and in which chunks.

    dense    probabilities of all pairs of tokens, matrix products (dense_attention.py): O(N^2) memory, for short N
    sparse   the band of probabilities (band_attention.py): O(N kernel_size) memory, for any N

Each takes the other's probabilities, which are expanded or gathered first. What a path needs beside inputs and
gradients is its workspace; chunks over batch elements and key heads keep it within `workspace_limit`. The smallest
chunk is one key head with its query heads, since dk and dv are sums over these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_kernels import band_attention, dense_attention, reference, tiling

MAX_DENSE_TOKENS = 2048
MIN_WORKSPACE_LIMIT = 512 << 20
WORKSPACE_SHARE = 0.18


def workspace_limit(memory: int) -> int:
    """Bytes that a backward may take beside inputs and gradients on a device with `memory` bytes."""
    return max(MIN_WORKSPACE_LIMIT, int(WORKSPACE_SHARE * memory))


def dense_refusal(q: Tensor, k: Tensor, *, backend: str, copies_attn: bool = True) -> str | None:
    """The limit of the dense path that a call exceeds even in the smallest chunks, with both numbers; or None.

    Args:
        copies_attn: probabilities must be expanded or cast; not when they come dense and in fp32.
    """
    tokens, group_size = q.shape[1], q.shape[2] // k.shape[2]
    if tokens > MAX_DENSE_TOKENS:
        return f"takes N up to {MAX_DENSE_TOKENS}, got {tokens}"
    needed, limit = _dense_workspace(q, group_size, copies_attn), workspace_limit(tiling.memory_of(q.device))
    if needed > limit:
        return (
            f"takes a workspace up to {limit} bytes, the larger of 512 MiB and 18 % of the device's memory; "
            f"one key head with its {group_size} query heads needs {needed}"
        )
    programs = _dense_programs(q, group_size, backend)
    if programs > tiling.MAX_GRID:
        return (
            f"takes grids up to {tiling.MAX_GRID} programs; "
            f"one key head with its {group_size} query heads needs {programs}"
        )
    return None


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    *,
    kernel_size: int,
    dilation: int,
    softmax_scale: float | None,
    boundary: str,
    causal: bool,
    path: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from probabilities of checked inputs.

    Args:
        do, q: `[B,N,H,D]`. k, v: `[B,N,H_kv,D]`, q's dtype.
        attn: the band `[B,H,N,kernel_size]`, or probabilities of all pairs `[B,H,N,N]`, 0 outside of the windows; any
            floating dtype. A band where N == kernel_size.
        path: "dense" or "sparse"; "auto" is dense wherever `dense_refusal` has no reason, else sparse.
        backend: "triton" or "ascend", whose tiles and grids to use.

    Returns:
        dq, dk, dv, contiguous.

    Raises:
        ValueError: path "dense" beyond its limits, before anything is allocated.
    """
    window: dict[str, Any] = {"dilation": dilation, "boundary": boundary, "causal": causal}
    options = {**window, "kernel_size": kernel_size, "softmax_scale": softmax_scale, "backend": backend}
    batch, tokens, heads, _ = q.shape
    kv_heads = k.shape[2]
    group_size = heads // kv_heads
    is_band = attn.shape[-1] == kernel_size
    as_it_is = attn.dtype == torch.float32 and attn.stride(-1) == 1

    refusal = dense_refusal(q, k, backend=backend, copies_attn=is_band or not as_it_is)
    if path == "dense" and refusal is not None:
        raise ValueError(f"path='dense' {refusal}")
    dense = path == "dense" or (path == "auto" and refusal is None)

    if dense:
        needed = _dense_workspace(q, group_size, is_band or not as_it_is)
        per_chunk = tiling.MAX_GRID // max(1, _dense_programs(q, group_size, backend))
    else:  # ds, and the band where it is gathered or cast
        needed = group_size * tokens * kernel_size * 4 * (1 if is_band and as_it_is else 2)
        per_chunk = batch * kv_heads
    per_chunk = min(per_chunk, workspace_limit(tiling.memory_of(q.device)) // max(1, needed))

    def gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, attn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if dense:
            matrix = band_attention.expand_band(attn.float(), backend=backend, **window) if is_band else attn.float()
            return dense_attention.backward(do, q, k, v, matrix, **options)
        band = attn.float() if is_band else reference.band_of(attn, kernel_size, **window)
        return band_attention.backward(do, q, k, v, band, **options)

    chunks = list(_chunks(batch, kv_heads, per_chunk))
    if len(chunks) <= 1:
        return gradients(do, q, k, v, attn)
    results = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
    for batches, key_heads in chunks:
        query_heads = slice(key_heads.start * group_size, key_heads.stop * group_size)
        by_query, by_key = (batches, slice(None), query_heads), (batches, slice(None), key_heads)
        parts = gradients(do[by_query], q[by_query], k[by_key], v[by_key], attn[batches, query_heads])
        for result, part, place in zip(results, parts, (by_query, by_key, by_key), strict=True):
            result[place] = part
    dq, dk, dv = results
    return dq, dk, dv


def _dense_workspace(q: Tensor, group_size: int, copies_attn: bool) -> int:
    """Bytes of ds, and of probabilities in fp32 where they are copied, of a key head's query heads."""
    return group_size * q.shape[1] ** 2 * (q.element_size() + 4 * copies_attn)


def _dense_programs(q: Tensor, group_size: int, backend: str) -> int:
    """Pieces of work that a key head's query heads are for the kernel with most of them."""
    sizes: dict[str, Any] = {"tokens": q.shape[1], "backend": backend, "cores": None}
    heads = {"dense_ds": group_size}
    return max(
        tiling.dense_plan(kernel, q.dtype, q.shape[3], sequences=heads.get(kernel, 1), **sizes).grid[0]
        for kernel in tiling.DENSE_KERNELS
    )


def _chunks(batch: int, kv_heads: int, per_chunk: int) -> Iterator[tuple[slice, slice]]:
    """Batch elements and key heads of each chunk of at most `per_chunk` (at least one) pairs of them."""
    batches = max(1, per_chunk // kv_heads)
    heads = min(kv_heads, max(1, per_chunk))
    for first_batch in range(0, batch, batches):
        for first_head in range(0, kv_heads, heads):
            yield (
                slice(first_batch, min(first_batch + batches, batch)),
                slice(first_head, min(first_head + heads, kv_heads)),
            )
