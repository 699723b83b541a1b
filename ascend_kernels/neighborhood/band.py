"""Neighborhood attention by its band of probabilities: launchers of band_kernels.py, which has math and layout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ascend_kernels.device import memory_of, npu_of
from ascend_kernels.launch import accepted_by, launch
from ascend_kernels.layout import copy_to_results, output_buffers, padded_dim, readable, without_padding
from ascend_kernels.neighborhood import band_kernels, tiling
from ascend_kernels.neighborhood.windows import needs_upcast, sizes_of, strides_of

KERNELS = {
    "band_scores": band_kernels.scores_kernel,
    "band_ds": band_kernels.ds_kernel,
    "band_rows": band_kernels.rows_kernel,
    "band_columns": band_kernels.columns_kernel,
    "band_gradients": band_kernels.gradients_kernel,
    "band_expand": band_kernels.expand_kernel,
}
SEPARATE_TOKENS = 512
"""N from which gradients use three launches, as in Liger's op for Ascend, so that each launch is balanced over cores,
which the three axes of one launch do not allow. Below it, launches dominate the time."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel_size: int,
    dilation: int,
    softmax_scale: float | None,
    boundary: str,
    causal: bool,
    backend: str,
    return_band: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Forward of checked inputs.

    Args:
        q: `[B,N,H,D]`. k, v: `[B,N,H_kv,D]`.
        backend: "triton" or "ascend", whose tiles and grid to use.
        return_band: if False, the batch is processed in chunks with a small band each (`tiling.batch_chunks`).

    Returns:
        out like q, contiguous, and the band `[B,H,N,kernel_size]` fp32, 0 where a slot has no key, or None.
    """
    batch, num_tokens, heads, _ = q.shape
    dim = q.shape[-1]
    out = torch.empty((*q.shape[:-1], padded_dim(dim, backend)), dtype=q.dtype, device=q.device)
    sizes = _band_sizes(q, k, kernel_size, dilation, softmax_scale, boundary, causal)
    shape = (heads, num_tokens, kernel_size)
    if return_band:
        chunks = [slice(0, batch)]
    else:
        chunks = tiling.batch_chunks(batch, 4 * heads * num_tokens * kernel_size, memory_of(q.device))
    largest = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    band = torch.empty((largest, *shape), dtype=torch.float32, device=q.device)
    for chunk in chunks:
        chunk_band = band[: chunk.stop - chunk.start]
        tensors = {name: readable(tensor[chunk], backend) for name, tensor in (("q", q), ("k", k))}
        _launch("band_scores", backend, sizes, tensors, {"p_band": chunk_band})
        tensors = {"x": readable(v[chunk], backend), "y": out[chunk]}
        _launch("band_rows", backend, {**sizes, "scale": 1.0}, tensors, {"p_band": chunk_band})
    return without_padding(out, dim), band if return_band else None


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Tensor,
    *,
    kernel_size: int,
    dilation: int,
    softmax_scale: float | None,
    boundary: str,
    causal: bool,
    backend: str,
    fused: bool | None = None,
    results: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """dq, dk, dv from the inputs of `forward` and its band. Bitwise the same in every run.

    Args:
        do: gradient of out, `[B,N,H,D]`. q, k, v, band: as `forward` took and returned them.
        fused: dq, dk and dv in one launch; otherwise in three, which add up in the same order. None: one for N below
            SEPARATE_TOKENS.
        results: tensors for dq, dk, dv, with any strides of batch elements, tokens, heads; None: new contiguous ones.
    """
    sizes = _band_sizes(q, k, kernel_size, dilation, softmax_scale, boundary, causal)
    dim = q.shape[-1]
    do, q, k, v = (readable(tensor, backend) for tensor in (do, q, k, v))
    band = band.contiguous()
    ds = torch.empty(band.shape, dtype=torch.float32, device=band.device)
    dq, dk, dv = buffers = output_buffers(results, (q, k, v), backend)
    kv_sizes = {**sizes, "num_heads": k.shape[2]}
    _launch("band_ds", backend, sizes, {"do": do, "v": v}, {"p_band": band, "p_ds": ds})
    if fused is None:
        fused = q.shape[1] < SEPARATE_TOKENS
    if fused:
        tensors = {"q": q, "k": k, "do": do, "dq": dq, "dk": dk, "dv": dv}
        _launch("band_gradients", backend, kv_sizes, tensors, {"p_p": band, "p_ds": ds})
    else:
        _launch("band_rows", backend, sizes, {"x": k, "y": dq}, {"p_band": ds})
        _launch("band_columns", backend, kv_sizes, {"x": q, "y": dk}, {"p_band": ds})
        _launch("band_columns", backend, {**kv_sizes, "scale": 1.0}, {"x": do, "y": dv}, {"p_band": band})
    return copy_to_results(buffers, results, dim)


def expand_band(band: Tensor, *, dilation: int, boundary: str, causal: bool, backend: str) -> Tensor:
    """The band `[B,H,N,kernel_size]` fp32 as a dense matrix `[B,H,N,N]` fp32 of rows and keys, 0 outside of windows."""
    batch, heads, num_tokens, kernel_size = band.shape
    dense = torch.zeros((batch, heads, num_tokens, num_tokens), dtype=torch.float32, device=band.device)
    rows = band.transpose(1, 2)
    sizes = _band_sizes(rows, rows, kernel_size, dilation, None, boundary, causal)
    sizes["key_stride"] = sizes["dilation"]
    _launch("band_expand", backend, sizes, {}, {"p_band": band.contiguous(), "p_dense": dense})
    return dense


def _band_sizes(
    q: Tensor,
    k: Tensor,
    kernel_size: int,
    dilation: int,
    softmax_scale: float | None,
    boundary: str,
    causal: bool,
) -> dict[str, Any]:
    """`windows.sizes_of`, but with all slots of the window, even if it is longer than the sequence."""
    sizes = sizes_of(q, k, kernel_size, dilation, softmax_scale, boundary, causal)
    left = kernel_size - 1 if causal else kernel_size // 2
    return {**sizes, "left": left, "right": kernel_size - 1 - left}


def _launch(
    kernel_name: str, backend: str, sizes: dict[str, Any], tensors: dict[str, Tensor], bands: dict[str, Tensor]
) -> None:
    """Launch a kernel on tensors `[B,N,heads,D]` and bands `[B,H,N,K]`, with the sizes that it has parameters for."""
    kernel = KERNELS[kernel_name]
    first = next(iter(bands.values()))
    batch = first.shape[0]
    if batch * sizes["num_tokens"] == 0:
        return
    dtype, dim = next(((tensor.dtype, tensor.shape[-1]) for tensor in tensors.values()), (torch.float32, 1))
    plan, work = tiling.band_plan(
        kernel_name,
        dtype,
        dim,
        batch=batch,
        sequences=sizes["num_heads"] * sizes["dilation"],
        rows=sizes["rows_per_class"],
        device=npu_of(first.device) if backend == "ascend" else None,
    )
    pointers = {f"p_{name}": tensor for name, tensor in tensors.items()} | bands
    scalars = {**sizes, "dim": dim, "num_work": math.prod(work), "num_batches": batch}
    constants = {
        "BLOCK_M": plan.tiles.block_m,
        "BLOCK_N": plan.tiles.block_n,
        "BLOCK_D": plan.tiles.block_d,
        "UPCAST": needs_upcast(kernel, dtype),
    }
    launch(
        kernel,
        plan.grid,
        {**pointers, **accepted_by(kernel, scalars), **strides_of(tensors)},
        accepted_by(kernel, constants),
        **plan.options,
    )
