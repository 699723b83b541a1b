"""The backward of neighborhood attention from a dense matrix of probabilities, in Triton, for NPUs and NVIDIA GPUs.

    dv = p^T do    dp = do v^T    delta = rowsum(p * dp)    ds = p * (dp - delta)    dq = scale * ds k
    dk = scale * ds^T q

for each query head, with p `[N,N]` in fp32 and ds `[N,N]` in the inputs' dtype, to which `tl.dot` rounds it anyway. dk
and dv are sums over the query heads of a key head's group. One program computes each sum, so results are bitwise
repeatable.

Three kernels. `dv` keeps a tile of keys and walks over queries. `ds` keeps a tile of queries and walks over keys
twice, for delta and for ds: recomputing dp moves less memory than writing it and reading it back. `dqdk` keeps a tile
of rows, as queries for dq and as keys for dk. `dv` and `dqdk` process BLOCK_D features of a head per work tile.

p is 0 outside the windows, and a key is at most `before` tokens before its query and `after` tokens after it. Tiles
without such a pair are skipped: neither read nor written to ds. All kernels use the same square tiles of matrices:
`dqdk` reads exactly the tiles that `ds` wrote; the rest of ds is not initialised. Tiles start at multiples of their
size and are masked at the last row, never clamped: one block copy each. With dilation, zeros are multiplied, too.

Work tiles. Programs stride over work tiles, heads innermost. A plain launch has a program per work tile; a persistent
launch has a program per core. Both give the same bits. NPUs use persistent launches for long sequences, since a core
starts its programs one at a time, each at a cost. A GPU schedules blocks in hardware.

Floor. Per batch element, q, k, v, do, dq, dk and dv are (3 H + 4 H_kv) N D elements. With W = before + after + 1 keys
in reach, N at most, `dv` reads 4 N W H bytes of p and takes 2 N W H D FLOP; `ds` reads p twice, writes N W H elements
and takes 4 N W H D; `dqdk` reads ds twice and takes 4 N W H D. `dv` and `dqdk` read p and ds again for every further
BLOCK_D features. Memory: ds, N^2 H elements.

Limits: N <= 2048, D <= 256, fp16, bf16 or fp32; features contiguous, and on NPUs padded (`layout.readable`); memory
and grids in `neighborhood/backward.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.device import gpu_cores, npu_of
from ascend_kernels.launch import launch
from ascend_kernels.layout import copy_to_results, output_buffers, readable
from ascend_kernels.neighborhood import tiling
from ascend_kernels.neighborhood.windows import load_rows, needs_upcast, scale_of, store_rows, strides_of

# Kernels

SIZES = ("num_work", "num_tokens", "num_heads", "group_size", "before", "after")
"""Run-time values that Triton must not specialise; strides and D may be, for their alignment."""


@triton.jit
def _work_tile(i_work, num_heads, num_tokens, dim, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Coordinates of a work tile: batch element and head (int64), first row and first feature (int32)."""
    num_tiles = tl.cdiv(num_tokens, BLOCK_M)
    num_dim_tiles = tl.cdiv(dim, BLOCK_D)
    i_outer = i_work // num_heads
    i_dim_tile = i_outer % num_dim_tiles
    i_tile = i_outer // num_dim_tiles % num_tiles
    i_batch = i_outer // num_dim_tiles // num_tiles
    return (
        tl.cast(i_batch, tl.int64),
        tl.cast(i_work % num_heads, tl.int64),
        tl.cast(i_tile * BLOCK_M, tl.int32),
        tl.cast(i_dim_tile * BLOCK_D, tl.int32),
    )


@triton.jit
def _rows_in_reach(i_row, before, after, num_tokens, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Half-open range of rows at most `before` before or `after` after a tile; the start is a multiple of BLOCK_N."""
    first = tl.maximum(i_row - before, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(tl.minimum(i_row + BLOCK_M, num_tokens) + after, num_tokens)
    return first, end


@triton.jit(do_not_specialize=SIZES)
def dense_dv_kernel(
    p_attn,
    p_do,
    p_dv,
    num_work,
    num_tokens,
    num_heads,
    group_size,
    before,
    after,
    dim,
    attn_batch_stride,
    attn_head_stride,
    attn_row_stride,
    do_batch_stride,
    do_token_stride,
    do_head_stride,
    dv_batch_stride,
    dv_token_stride,
    dv_head_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """dv of BLOCK_M keys and BLOCK_D features per work tile. num_heads is H_kv here."""
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_batch, i_kv_head, i_row, i_dim = _work_tile(i_work, num_heads, num_tokens, dim, BLOCK_M, BLOCK_D)
        o_k = i_row + tl.arange(0, BLOCK_M)
        o_dim = i_dim + tl.arange(0, BLOCK_D)
        first_query, end_query = _rows_in_reach(i_row, after, before, num_tokens, BLOCK_M, BLOCK_N)
        b_dv = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        for i_group_head in range(0, group_size):
            i_head = i_kv_head * group_size + i_group_head
            p_attn_head = p_attn + i_batch * attn_batch_stride + i_head * attn_head_stride
            p_do_head = p_do + i_batch * do_batch_stride + i_head * do_head_stride
            for i_query in range(first_query, end_query, BLOCK_N):
                o_q = i_query + tl.arange(0, BLOCK_N)
                b_p = load_rows(p_attn_head, o_q, o_k, attn_row_stride, num_tokens, num_tokens, False)
                b_do = load_rows(p_do_head, o_q, o_dim, do_token_stride, num_tokens, dim, UPCAST)
                b_dv += tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, input_precision="ieee")

        p_dv_head = p_dv + i_batch * dv_batch_stride + i_kv_head * dv_head_stride
        store_rows(p_dv_head, b_dv, o_k, o_dim, dv_token_stride, num_tokens, dim)


@triton.jit(do_not_specialize=SIZES)
def dense_ds_kernel(
    p_attn,
    p_do,
    p_v,
    p_ds,
    num_work,
    num_tokens,
    num_heads,
    group_size,
    before,
    after,
    dim,
    attn_batch_stride,
    attn_head_stride,
    attn_row_stride,
    do_batch_stride,
    do_token_stride,
    do_head_stride,
    v_batch_stride,
    v_token_stride,
    v_head_stride,
    ds_batch_stride,
    ds_head_stride,
    ds_row_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """ds of BLOCK_M queries per work tile."""
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_batch, i_head, i_row, _ = _work_tile(i_work, num_heads, num_tokens, 1, BLOCK_M, BLOCK_D)
        p_attn_head = p_attn + i_batch * attn_batch_stride + i_head * attn_head_stride
        p_do_head = p_do + i_batch * do_batch_stride + i_head * do_head_stride
        p_v_head = p_v + i_batch * v_batch_stride + i_head // group_size * v_head_stride
        p_ds_head = p_ds + i_batch * ds_batch_stride + i_head * ds_head_stride
        o_q = i_row + tl.arange(0, BLOCK_M)
        first_key, end_key = _rows_in_reach(i_row, before, after, num_tokens, BLOCK_M, BLOCK_N)

        b_delta = tl.zeros([BLOCK_M], dtype=tl.float32)
        for PASS in tl.static_range(2):  # delta, then ds
            for i_key in range(first_key, end_key, BLOCK_N):
                o_k = i_key + tl.arange(0, BLOCK_N)
                b_dp = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
                for i_dim in range(0, dim, BLOCK_D):
                    o_dim = i_dim + tl.arange(0, BLOCK_D)
                    b_do = load_rows(p_do_head, o_q, o_dim, do_token_stride, num_tokens, dim, UPCAST)
                    b_v = load_rows(p_v_head, o_k, o_dim, v_token_stride, num_tokens, dim, UPCAST)
                    b_dp += tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
                b_p = load_rows(p_attn_head, o_q, o_k, attn_row_stride, num_tokens, num_tokens, False)
                if PASS == 0:
                    b_delta += tl.sum(b_p * b_dp, 1)
                else:
                    b_ds = b_p * (b_dp - b_delta[:, None])
                    store_rows(p_ds_head, b_ds, o_q, o_k, ds_row_stride, num_tokens, num_tokens)


@triton.jit(do_not_specialize=SIZES)
def dense_dqdk_kernel(
    p_ds,
    p_q,
    p_k,
    p_dq,
    p_dk,
    scale,
    num_work,
    num_tokens,
    num_heads,
    group_size,
    before,
    after,
    dim,
    ds_batch_stride,
    ds_head_stride,
    ds_row_stride,
    q_batch_stride,
    q_token_stride,
    q_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    dq_batch_stride,
    dq_token_stride,
    dq_head_stride,
    dk_batch_stride,
    dk_token_stride,
    dk_head_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """dq of all heads of a group and dk, of BLOCK_M rows and BLOCK_D features per work tile. num_heads is H_kv."""
    for i_work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_batch, i_kv_head, i_row, i_dim = _work_tile(i_work, num_heads, num_tokens, dim, BLOCK_M, BLOCK_D)
        o_rows = i_row + tl.arange(0, BLOCK_M)
        o_dim = i_dim + tl.arange(0, BLOCK_D)
        first_key, end_key = _rows_in_reach(i_row, before, after, num_tokens, BLOCK_M, BLOCK_N)
        first_query, end_query = _rows_in_reach(i_row, after, before, num_tokens, BLOCK_M, BLOCK_N)
        p_k_head = p_k + i_batch * k_batch_stride + i_kv_head * k_head_stride
        b_dk = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        for i_group_head in range(0, group_size):
            i_head = i_kv_head * group_size + i_group_head
            p_ds_head = p_ds + i_batch * ds_batch_stride + i_head * ds_head_stride
            p_q_head = p_q + i_batch * q_batch_stride + i_head * q_head_stride
            b_dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            for i_key in range(first_key, end_key, BLOCK_N):
                o_k = i_key + tl.arange(0, BLOCK_N)
                b_ds = load_rows(p_ds_head, o_rows, o_k, ds_row_stride, num_tokens, num_tokens, UPCAST)
                b_k = load_rows(p_k_head, o_k, o_dim, k_token_stride, num_tokens, dim, UPCAST)
                b_dq += tl.dot(b_ds, b_k, input_precision="ieee")
            p_dq_head = p_dq + i_batch * dq_batch_stride + i_head * dq_head_stride
            store_rows(p_dq_head, b_dq * scale, o_rows, o_dim, dq_token_stride, num_tokens, dim)

            for i_query in range(first_query, end_query, BLOCK_N):
                o_q = i_query + tl.arange(0, BLOCK_N)
                b_ds = load_rows(p_ds_head, o_q, o_rows, ds_row_stride, num_tokens, num_tokens, UPCAST)
                b_q = load_rows(p_q_head, o_q, o_dim, q_token_stride, num_tokens, dim, UPCAST)
                b_dk += tl.dot(tl.trans(b_ds), b_q, input_precision="ieee")

        p_dk_head = p_dk + i_batch * dk_batch_stride + i_kv_head * dk_head_stride
        store_rows(p_dk_head, b_dk * scale, o_rows, o_dim, dk_token_stride, num_tokens, dim)


# Launcher


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
    backend: str,
    persistent: bool | None = None,
    results: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients from probabilities of checked inputs.

    Args:
        do, q: `[B,N,H,D]`. k, v: `[B,N,H_kv,D]`, q's dtype.
        attn: `[B,H,N,N]` fp32, 0 outside of the windows.
        backend: "triton" or "ascend", whose tiles and grid to use.
        persistent: a program per core instead of one per work tile; None: on Ascend, for N from PERSISTENT_TOKENS.
        results: tensors for dq, dk, dv, with any strides of batch elements, tokens, heads; None: new contiguous ones.

    Returns:
        dq, dk, dv.
    """
    dim, scale = q.shape[-1], {"scale": scale_of(q, softmax_scale)}
    do, q, k, v = (readable(tensor, backend) for tensor in (do, q, k, v))
    attn = attn if attn.stride(-1) == 1 else attn.contiguous()
    dq, dk, dv = buffers = output_buffers(results, (q, k, v), backend)
    if q.numel() == 0:
        return copy_to_results(buffers, results, dim)
    ds = torch.empty(attn.shape, dtype=q.dtype, device=q.device)
    num_tokens, num_heads = q.shape[1:3]
    before, after = _key_reach(num_tokens, kernel_size, dilation, boundary, causal)
    sizes = {
        "num_tokens": num_tokens,
        "num_heads": k.shape[2],
        "group_size": num_heads // k.shape[2],
        "before": before,
        "after": after,
        "dim": q.shape[-1],
    }
    if persistent is None:
        persistent = backend == "ascend" and num_tokens >= PERSISTENT_TOKENS
    _launch("dense_dv", backend, persistent, sizes, {"attn": attn}, {"do": do, "dv": dv})
    q_sizes = {**sizes, "num_heads": num_heads}
    _launch("dense_ds", backend, persistent, q_sizes, {"attn": attn, "ds": ds}, {"do": do, "v": v})
    _launch("dense_dqdk", backend, persistent, {**sizes, **scale}, {"ds": ds}, {"q": q, "k": k, "dq": dq, "dk": dk})
    return copy_to_results(buffers, results, dim)


def _key_reach(num_tokens: int, kernel_size: int, dilation: int, boundary: str, causal: bool) -> tuple[int, int]:
    """Maximum distance of a key before and after its query, in tokens."""
    left = kernel_size - 1 if causal else kernel_size // 2
    right = kernel_size - 1 - left
    if boundary == "shift" and not causal:  # a row at the border may be the first or the last of its window
        left = right = kernel_size - 1
    return min(left * dilation, num_tokens), min(right * dilation, num_tokens)


PERSISTENT_TOKENS = 1024
"""As in Liger's op for Ascend, which uses it in fp32 only."""
KERNELS = {"dense_dv": dense_dv_kernel, "dense_ds": dense_ds_kernel, "dense_dqdk": dense_dqdk_kernel}


def _launch(
    kernel_name: str,
    backend: str,
    persistent: bool,
    sizes: dict[str, Any],
    matrices: dict[str, Tensor],
    tensors: dict[str, Tensor],
) -> None:
    """Launch a kernel on matrices `[B,H,N,N]` and tensors `[B,N,heads,D]`."""
    first = next(iter(tensors.values()))
    sequences, num_tokens = first.shape[0] * sizes["num_heads"], sizes["num_tokens"]
    cores = None
    if persistent:
        cores = npu_of(first.device).cores if backend == "ascend" else gpu_cores(first.device)
    plan = tiling.dense_plan(
        kernel_name,
        first.dtype,
        sizes["dim"],
        sequences=sequences,
        tokens=num_tokens,
        backend=backend,
        cores=cores,
    )
    kernel = KERNELS[kernel_name]
    pointers = {f"p_{name}": tensor for name, tensor in (matrices | tensors).items()}
    scalars = {
        **sizes,
        "num_work": tiling.num_dense_work_tiles(kernel_name, plan.tiles, sequences, num_tokens, sizes["dim"]),
        **strides_of(matrices, ("batch", "head", "row")),
        **strides_of(tensors),
    }
    constants = {
        "BLOCK_M": plan.tiles.block_m,
        "BLOCK_N": plan.tiles.block_n,
        "BLOCK_D": plan.tiles.block_d,
        "UPCAST": needs_upcast(kernel, first.dtype),
    }
    launch(kernel, plan.grid, {**pointers, **scalars}, constants, **plan.options)
