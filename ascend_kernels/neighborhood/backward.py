"""The backward of neighborhood attention from saved probabilities: choice of a path and of chunks.

    dense    probabilities of all pairs of tokens, matrix products (dense_backward.py): O(N^2) memory, for short N;
             on Ascend by plain launches, by persistent ones from N = 1024 on
    sparse   the band of probabilities (band.py): O(N kernel_size) memory, for any N; dq, dk and dv in one launch, in
             three from N = 512 on

Each path takes the other's probabilities, expanding or gathering them first. Its workspace is all memory besides
gradients: probabilities, ds, and copies of tensors that kernels cannot read directly. Chunks over batch elements and
key heads, each with its own copies, keep the workspace within `workspace_limit`. The smallest chunk is one key head
with its query heads, since dk and dv are sums over these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ascend_kernels.device import MAX_GRID, memory_of
from ascend_kernels.layout import empty_contiguous, is_readable, padded_dim
from ascend_kernels.neighborhood import band as band_attention
from ascend_kernels.neighborhood import dense_backward, reference, tiling

MAX_DENSE_TOKENS = 2048
MIN_WORKSPACE_LIMIT = 512 << 20
WORKSPACE_SHARE = 0.18
INDEX_BYTES, SLOT_INDEX_BYTES = 64, 10
"""Bytes per row, and per slot of a row, for all heads together: indices to gather a band, and masks of slots."""


def workspace_limit(memory: int) -> int:
    """Maximum workspace in bytes, besides inputs and gradients, on a device with `memory` bytes."""
    return max(MIN_WORKSPACE_LIMIT, int(WORKSPACE_SHARE * memory))


def dense_refusal(q: Tensor, k: Tensor, *, backend: str, bytes_per_head: int | None = None) -> str | None:
    """The limit of the dense path that a call exceeds even in the smallest chunks, or None.

    Args:
        bytes_per_head: workspace per query head, without copies of inputs; None: that for the band of a forward.
    """
    tokens, group_size = q.shape[1], q.shape[2] // k.shape[2]
    if tokens > MAX_DENSE_TOKENS:
        return f"supports N up to {MAX_DENSE_TOKENS}, got {tokens}"
    if bytes_per_head is None:
        bytes_per_head = tokens * tokens * (4 + q.element_size())
    needed, limit = group_size * bytes_per_head, workspace_limit(memory_of(q.device))
    if needed > limit:
        return (
            f"supports a workspace up to {limit} bytes, the larger of 512 MiB and 18 % of the device's memory; "
            f"one key head with its {group_size} query heads needs {needed}"
        )
    programs = _dense_programs(q, group_size, backend)
    if programs > MAX_GRID:
        return (
            f"supports grids up to {MAX_GRID} programs; one key head with its {group_size} query heads needs {programs}"
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
        path: "dense" or "sparse"; "auto" is dense unless `dense_refusal` gives a reason.
        backend: "triton" or "ascend", whose tiles and grids to use.

    Returns:
        dq, dk, dv, contiguous.

    Raises:
        ValueError: path "dense" exceeds its limits; raised before anything is allocated.
    """
    batch, tokens, heads, _ = q.shape
    kv_heads = k.shape[2]
    group_size = heads // kv_heads
    is_band = attn.shape[-1] == kernel_size
    if not is_band:
        kernel_size = reference.reaching(kernel_size, tokens, dilation, boundary, causal)
    window: dict[str, Any] = {"dilation": dilation, "boundary": boundary, "causal": causal}
    options = {**window, "kernel_size": kernel_size, "softmax_scale": softmax_scale, "backend": backend}

    refusal = dense_refusal(q, k, backend=backend, bytes_per_head=_bytes_per_head(q, attn, kernel_size, dense=True))
    if path == "dense" and refusal is not None:
        raise ValueError(f"path='dense' {refusal}")
    dense = path == "dense" or (path == "auto" and refusal is None)

    most_key_heads = MAX_GRID // max(1, _dense_programs(q, group_size, backend)) if dense else batch * kv_heads
    needed = group_size * _bytes_per_head(q, attn, kernel_size, dense=dense)
    dq, dk, dv = empty_contiguous(q, k, v)
    needed += sum(group_size * _bytes_of_copy(x, backend) for x in (do, q, dq))
    needed += sum(_bytes_of_copy(x, backend) for x in (k, v, dk, dv))
    indices = 0 if dense or is_band else tokens * (INDEX_BYTES + SLOT_INDEX_BYTES * kernel_size)
    available = workspace_limit(memory_of(q.device)) - indices
    per_chunk = min(most_key_heads, max(0, available) // max(1, needed))

    def run_chunk(do: Tensor, q: Tensor, k: Tensor, v: Tensor, attn: Tensor, results: tuple[Tensor, ...]) -> None:
        """Write the gradients of a chunk; its workspace is freed on return."""
        if dense:
            matrix = _readable_probabilities(attn, is_band)
            if is_band:
                matrix = band_attention.expand_band(matrix, backend=backend, **window)
            dense_backward.backward(do, q, k, v, matrix, results=results, **options)
        else:
            band = _readable_probabilities(attn, True) if is_band else reference.band_of(attn, kernel_size, **window)
            band_attention.backward(do, q, k, v, band, results=results, **options)

    for batches, key_heads in _chunks(batch, kv_heads, per_chunk):
        query_heads = slice(key_heads.start * group_size, key_heads.stop * group_size)
        by_query, by_key = (batches, slice(None), query_heads), (batches, slice(None), key_heads)
        results = (dq[by_query], dk[by_key], dv[by_key])
        run_chunk(do[by_query], q[by_query], k[by_key], v[by_key], attn[batches, query_heads], results)
    return dq, dk, dv


def _are_readable_probabilities(attn: Tensor, is_band: bool) -> bool:
    """True if kernels can read probabilities directly: in fp32, a contiguous band or a matrix with contiguous rows."""
    return attn.dtype == torch.float32 and (attn.is_contiguous() if is_band else attn.stride(-1) == 1)


def _readable_probabilities(attn: Tensor, is_band: bool) -> Tensor:
    """Convert probabilities for the kernels, with at most one copy."""
    if _are_readable_probabilities(attn, is_band):
        return attn
    return attn.to(torch.float32, memory_format=torch.contiguous_format, copy=True)


def _bytes_per_head(q: Tensor, attn: Tensor, kernel_size: int, *, dense: bool) -> int:
    """Workspace of a path per query head: ds, and probabilities if they are copied, expanded or gathered."""
    tokens = q.shape[1]
    pairs, slots = 4 * tokens * tokens, 4 * tokens * kernel_size
    is_band = attn.shape[-1] == kernel_size
    copied = not _are_readable_probabilities(attn, is_band)
    if dense:
        ds = tokens * tokens * q.element_size()
        if is_band:  # its copy is freed before ds is allocated
            return pairs + max(ds, slots if copied else 0)
        return ds + (pairs if copied else 0)
    if is_band:
        return slots + (slots if copied else 0)
    gathered = tokens * kernel_size * attn.element_size()  # if it is cast, freed before ds is allocated
    return slots + max(slots, gathered if attn.dtype != torch.float32 else 0)


def _bytes_of_copy(tensor: Tensor, backend: str) -> int:
    """Bytes of a copy of one head of a tensor `[B,N,heads,D]`; 0 if kernels can read the tensor directly."""
    size = tensor.shape[1] * padded_dim(tensor.shape[3], backend) * tensor.element_size()
    return 0 if is_readable(tensor, backend) else size


def _dense_programs(q: Tensor, group_size: int, backend: str) -> int:
    """Number of work tiles of a key head and its query heads, in the kernel with the most."""
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
