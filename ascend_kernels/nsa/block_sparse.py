"""Attention to given blocks: the selected branch of token mode as an op.

    forward     query-outer (selected.py) or KV-outer (kv_outer.py), by shapes and device
    backward    delta, then KV-outer

Blocks may be in any order, with -1 anywhere. The same call on the same device gives the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ascend_kernels.launch import launch
from ascend_kernels.nsa import kv_outer, selected
from ascend_kernels.nsa.attention import store_statistics
from ascend_kernels.nsa.layout import Pack, pack_of, rows_of, strided
from ascend_kernels.nsa.tiling import attends_by_block, block_of, gpu_options


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_start: Tensor | None,
    *,
    block_size: int,
    causal: bool,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """out `[B,N_q,H,D_v]`, packed `[T,H,D_v]`, and the fp32 lse `[H,rows]`, flat, for checked arguments.

    Args:
        q, k, v, block_indices, cu_seqlens, cu_seqlens_k: see nsa.block_sparse_attention.
        q_start: int32 `[B]`; None if queries are the last tokens.
    """
    pack = token_pack(q, k, cu_seqlens, cu_seqlens_k, q_start, block_size, causal)
    attend = kv_outer.forward if attends_by_block(q.shape[-2] // k.shape[-2], q.device) else selected.forward
    how: dict[str, Any] = {"size": block_size, "scale": softmax_scale, "causal": causal}
    out, lse = attend(rows_of(q), rows_of(k), rows_of(v), lists_of(block_indices), pack, **how)
    return out.view(*q.shape[:-1], v.shape[-1]), lse.flatten()


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_start: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    block_size: int,
    causal: bool,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous. Args: do: gradient of out. The rest: arguments and results of `forward`."""
    pack = token_pack(q, k, cu_seqlens, cu_seqlens_k, q_start, block_size, causal)
    heads = q.shape[-2]
    statistics = statistics_of(rows_of(do), rows_of(out), lse.view(heads, -1))
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    given = rows_of(q), rows_of(k), rows_of(v), rows_of(do), statistics, lists_of(block_indices)
    how: dict[str, Any] = {"size": block_size, "scale": softmax_scale, "causal": causal}
    by_block = attends_by_block(heads // k.shape[-2], q.device)
    if not by_block:
        selected.dq(*given, rows_of(dq), pack, **how)
    dk, dv = kv_outer.backward(*given, rows_of(dq) if by_block else None, pack, **how)
    return dq, dk.to(k.dtype).view(k.shape), dv.to(v.dtype).view(v.shape)


@triton.jit(do_not_specialize=("num_work", "num_rows"))
def statistics_kernel(
    p_do, do_row, do_head, p_out, out_row, out_head, p_lse, p_stats, num_work, num_rows, num_heads, dim,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Statistics of BLOCK_M pairs of a row and a head, with gate 1."""
    o_m, o_d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    o_row, o_head = (o_m // num_heads).to(tl.int64), o_m % num_heads
    exists = o_m < num_work
    mask = exists[:, None] & (o_d < dim)[None, :]
    b_do = tl.load(p_do + (o_row * do_row + o_head * do_head)[:, None] + o_d[None, :], mask=mask, other=0.0)  # [M,D]
    b_o = tl.load(p_out + (o_row * out_row + o_head * out_head)[:, None] + o_d[None, :], mask=mask, other=0.0)
    b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
    b_lse = tl.load(p_lse + o_head * num_rows + o_row, mask=exists, other=0.0)
    store_statistics(p_stats + o_m.to(tl.int64) * 4, b_lse, b_delta, tl.full([BLOCK_M], 1.0, tl.float32), exists)


def statistics_of(do: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Statistics (attention.py) of rows, `[H,rows,4]`, the heads of a row next to each other in memory.

    Args:
        do, out: `[rows,H,D]`. lse: `[H,rows]`, contiguous.
    """
    rows, heads, dim = do.shape
    statistics = torch.empty((rows, heads, 4), dtype=torch.float32, device=do.device)
    work = rows * heads
    if work > 0:
        arguments = {
            **strided("do", do), **strided("out", out), "p_lse": lse, "p_stats": statistics, "num_work": work,
            "num_rows": rows, "num_heads": heads, "dim": dim,
        }  # fmt: skip
        constants = {"BLOCK_M": 32, "BLOCK_D": block_of(dim)}
        launch(statistics_kernel, (-(-work // 32),), arguments, constants, **gpu_options(num_warps=4))
    return statistics.transpose(0, 1)


def kept_like(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An empty tensor like the lse of `forward`, without running anything (sizes may be symbols)."""
    like: Tensor = q.new_empty(math.prod(q.shape[:-1]), dtype=torch.float32)
    return like


def token_pack(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_start: Tensor | None,
    size: int,
    causal: bool = True,
) -> Pack:
    """Documents of a call in which each token has its own list of blocks of `size` keys."""
    return pack_of(q, k, cu_seqlens, cu_seqlens_k, q_start, length=size, stride=size, tile=1, causal=causal)


def lists_of(block_indices: Tensor) -> Tensor:
    """`[B,H_kv,N_q,k]` or `[H_kv,T,k]` as int32 `[H_kv,rows,k]`, contiguous."""
    if block_indices.dtype != torch.int32:  # blocks past all keys must remain so
        block_indices = block_indices.clamp(-1, torch.iinfo(torch.int32).max).to(torch.int32)
    if block_indices.dim() == 4:
        block_indices = block_indices.transpose(0, 1).flatten(1, 2)
    return block_indices.contiguous()
