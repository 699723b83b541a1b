"""Neighborhood attention through its band: launchers of band_kernels.py, which has the math and the layouts."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from ascend_kernels.device import npu_of
from ascend_kernels.launch import launch
from ascend_kernels.neighborhood import band_kernels, tiling
from ascend_kernels.neighborhood.rows import features_of, handed_over, readable, sizes_of, without_padding, writable

KERNELS = {
    "band_scores": band_kernels.scores_kernel,
    "band_ds": band_kernels.ds_kernel,
    "band_rows": band_kernels.rows_kernel,
    "band_columns": band_kernels.columns_kernel,
    "band_gradients": band_kernels.gradients_kernel,
    "band_expand": band_kernels.expand_kernel,
}
SEPARATE_TOKENS = 512
"""N from which gradients take three launches, as in Liger's op for Ascend: the cores then share the work of each launch
evenly, which the three axes of one launch do not. Below, launches are what takes the time."""


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
        return_band: without, batch elements go through in chunks whose band is small (`tiling.chunks`).

    Returns:
        out like q, contiguous, and the band `[B,H,N,kernel_size]` fp32, 0 where a slot has no key, or None.
    """
    batch, num_tokens, heads, _ = q.shape
    dim = q.shape[-1]
    out = torch.empty((*q.shape[:-1], features_of(dim, backend)), dtype=q.dtype, device=q.device)
    sizes = _band_sizes(q, k, kernel_size, dilation, softmax_scale, boundary, causal)
    shape = (heads, num_tokens, kernel_size)
    if return_band:
        parts = [slice(0, batch)]
    else:
        parts = tiling.chunks(batch, 4 * heads * num_tokens * kernel_size, tiling.memory_of(q.device))
    largest = max((part.stop - part.start for part in parts), default=0)
    band = torch.empty((largest, *shape), dtype=torch.float32, device=q.device)
    for part in parts:
        own = band[: part.stop - part.start]
        rows = {name: readable(tensor[part], backend) for name, tensor in (("q", q), ("k", k))}
        _launch("band_scores", backend, sizes, rows, {"p_band": own})
        rows = {"x": readable(v[part], backend), "y": out[part]}
        _launch("band_rows", backend, {**sizes, "scale": 1.0}, rows, {"p_band": own})
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
    """dq, dk, dv from what `forward` took and the band that it gave. Bitwise the same in every run.

    Args:
        fused: dq, dk and dv in one launch; otherwise in three, which add up in the same order. None: one for N below
            SEPARATE_TOKENS.
        results: where they go, with any strides of batch elements, tokens and heads; None: new tensors, contiguous.
    """
    sizes = _band_sizes(q, k, kernel_size, dilation, softmax_scale, boundary, causal)
    dim = q.shape[-1]
    do, q, k, v = (readable(tensor, backend) for tensor in (do, q, k, v))
    band = band.contiguous()
    ds = torch.empty(band.shape, dtype=torch.float32, device=band.device)
    dq, dk, dv = written = writable(results, (q, k, v), backend)
    per_key = {**sizes, "num_heads": k.shape[2]}
    _launch("band_ds", backend, sizes, {"do": do, "v": v}, {"p_band": band, "p_ds": ds})
    if q.shape[1] < SEPARATE_TOKENS if fused is None else fused:
        tensors = {"q": q, "k": k, "do": do, "dq": dq, "dk": dk, "dv": dv}
        _launch("band_gradients", backend, per_key, tensors, {"p_p": band, "p_ds": ds})
    else:
        _launch("band_rows", backend, sizes, {"x": k, "y": dq}, {"p_band": ds})
        _launch("band_columns", backend, per_key, {"x": q, "y": dk}, {"p_band": ds})
        _launch("band_columns", backend, {**per_key, "scale": 1.0}, {"x": do, "y": dv}, {"p_band": band})
    return handed_over(written, results, dim)


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
    """As rows.py has them, with all slots of windows that reach past the rows."""
    sizes = sizes_of(q, k, kernel_size, dilation, softmax_scale, boundary, causal)
    left = kernel_size - 1 if causal else kernel_size // 2
    return {**sizes, "left": left, "right": kernel_size - 1 - left}


def _launch(
    name: str, backend: str, sizes: dict[str, Any], tensors: dict[str, Tensor], bands: dict[str, Tensor]
) -> None:
    """Launch a kernel with those sizes and constants that it has parameters for."""
    kernel = KERNELS[name]
    some = next(iter(bands.values()))
    batch = some.shape[0]
    if batch * sizes["num_tokens"] == 0:
        return
    dtype, dim = next(((rows.dtype, rows.shape[-1]) for rows in tensors.values()), (torch.float32, 1))
    plan, work = tiling.band_plan(
        name,
        dtype,
        dim,
        batch=batch,
        sequences=sizes["num_heads"] * sizes["dilation"],
        rows=sizes["rows_per_class"],
        device=npu_of(some.device) if backend == "ascend" else None,
    )
    numbers = {**sizes, "dim": dim, "num_work": math.prod(work), "num_batches": batch}
    interpreted = not isinstance(kernel, triton.JITFunction)
    constants = {
        "BLOCK_M": plan.tiles.block_m,
        "BLOCK_N": plan.tiles.block_n,
        "BLOCK_D": plan.tiles.block_d,
        "UPCAST": interpreted and dtype == torch.bfloat16,  # the interpreter multiplies raw bits of bf16
    }
    strides = {
        f"{name}_{axis}_stride": tensor.stride(i)
        for name, tensor in tensors.items()
        for i, axis in enumerate(("batch", "token", "head"))
    }
    pointers = {f"p_{name}": tensor for name, tensor in tensors.items()} | bands
    launch(
        kernel,
        plan.grid,
        {**pointers, **_of(kernel, numbers), **strides},
        _of(kernel, constants),
        **plan.options,
    )


def _of(kernel: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in kernel.arg_names}
