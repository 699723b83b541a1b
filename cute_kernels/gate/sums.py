"""Gradients of q, k and v: the branches' parts added up in fp32 and rounded once.

    dq[i] = sum_b dq_b[i] + sum_b d logit_b[i] * w[h,b]
    dk[i] = dk_slc[i] + dk_win[i] + 1/l * sum over entries j with j*d <= i < j*d + l of dk_cmp[j]      dv likewise

Every part is optional. A row (token and head) belongs to a group of lanes, one vector of 16 bytes each.

Packed documents (B = 1): parts of q, k and v come in the aligned rows of documents.py, entries are aligned ones; tokens
behind the last document get 0.

Floor: every part is read once, every sum written once. 128K tokens, 8 heads of 128 for q and 2 for k and v, bf16:
1.5 GB, 0.36 ms at 4.2 TB/s.

Limits: head dims multiples of 8, at most 256; 64-bit offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.pool.documents import DOCUMENT, ENTRY, LENGTH, ROW, Documents, fake_tables
from cute_kernels.runtime.jit import VECTOR, Kernel, compile_kernel, compiled_once, fake

THREADS = 128
BRANCHES = 3
WHOLE = 2
"""Branches that attend to the keys themselves."""


@cute.jit
def _add(rSum: cute.Tensor, gPart: cute.Tensor):
    """Add a vector of a part."""
    rPart = cute.make_rmem_tensor(VECTOR, gPart.element_type)
    cute.autovec_copy(gPart, rPart)
    rSum.store(rSum.load() + rPart.load().to(Float32))


class QueryGradients:
    """Args: head dim."""

    def __init__(self, dim: int) -> None:
        self.vectors = dim // VECTOR
        self.lanes = 1 << (self.vectors - 1).bit_length()
        self.rows = THREADS // self.lanes

    @cute.jit
    def __call__(
        self,
        mDq: cute.Tensor,  # [B, N, H, D]
        mPart0: cute.Tensor | None,  # [B, N, H, D], with mRows aligned rows
        mPart1: cute.Tensor | None,
        mPart2: cute.Tensor | None,
        mLogits: cute.Tensor | None,  # fp32 [B, N, H, 3]
        mW: cute.Tensor | None,  # [H, 3, D], with mLogits
        mRows: cute.Tensor | None,  # Documents.rows
        stream: Any,
    ):
        groups = mDq.shape[0] * cute.ceil_div(mDq.shape[1], self.rows)
        self.kernel(mDq, mPart0, mPart1, mPart2, mLogits, mW, mRows).launch(
            grid=[groups * mDq.shape[2], 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mDq: cute.Tensor,
        mPart0: cute.Tensor | None,
        mPart1: cute.Tensor | None,
        mPart2: cute.Tensor | None,
        mLogits: cute.Tensor | None,
        mW: cute.Tensor | None,
        mRows: cute.Tensor | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        item, _, _ = cute.arch.block_idx()
        _, tokens, heads, _ = mDq.shape
        head, group = item % heads, item // heads
        groups = cute.ceil_div(tokens, self.rows)
        batch = group // groups
        lane = thread % self.lanes
        token = group % groups * self.rows + thread // self.lanes
        if (token < tokens) & (lane < self.vectors):
            row = token
            if const_expr(mRows is not None):
                row = mRows[token]
            rSum = cute.make_rmem_tensor(VECTOR, Float32)
            rSum.fill(0.0)
            if row >= 0:
                for mPart in (mPart0, mPart1, mPart2):
                    if const_expr(mPart is not None):
                        _add(rSum, cute.local_tile(mPart[batch, row, head, None], (VECTOR,), (lane,)))
                if const_expr(mLogits is not None):
                    rW = cute.make_rmem_tensor(VECTOR, mW.element_type)
                    for b in range_constexpr(BRANCHES):
                        cute.autovec_copy(cute.local_tile(mW[head, b, None], (VECTOR,), (lane,)), rW)
                        logit = mLogits[batch, token, head, b]
                        for i in range_constexpr(VECTOR):
                            rSum[i] = cute.math.fma(logit, rW[i].to(Float32), rSum[i])
            rDq = cute.make_rmem_tensor(VECTOR, mDq.element_type)
            rDq.store(rSum.load().to(mDq.element_type))
            cute.autovec_copy(rDq, cute.local_tile(mDq[batch, token, head, None], (VECTOR,), (lane,)))


class KeyGradients:
    """Args: dims of k and v; l and d; with documents T."""

    def __init__(self, dim: int, v_dim: int, keys: Keys, tile: int) -> None:
        self.vectors, self.v_vectors, self.keys, self.tile = dim // VECTOR, v_dim // VECTOR, keys, tile
        self.lanes = 1 << (max(self.vectors, self.v_vectors) - 1).bit_length()
        self.rows = THREADS // self.lanes

    @cute.jit
    def __call__(
        self,
        mDk: cute.Tensor,  # [B, N, H_kv, D]
        mDkPart0: cute.Tensor | None,  # [B, N, H_kv, D], with mRows aligned rows
        mDkPart1: cute.Tensor | None,
        mDkCmp: cute.Tensor | None,  # fp32 [B, entries, H_kv, D]
        mDv: cute.Tensor,
        mDvPart0: cute.Tensor | None,
        mDvPart1: cute.Tensor | None,
        mDvCmp: cute.Tensor | None,
        mRows: cute.Tensor | None,  # Documents.rows, .bounds and .tiles
        mBounds: cute.Tensor | None,
        mTiles: cute.Tensor | None,
        stream: Any,
    ):
        groups = mDk.shape[0] * cute.ceil_div(mDk.shape[1] * mDk.shape[2], self.rows)
        self.kernel(mDk, mDkPart0, mDkPart1, mDkCmp, mDv, mDvPart0, mDvPart1, mDvCmp, mRows, mBounds, mTiles).launch(
            grid=[groups, 2, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mDk: cute.Tensor,
        mDkPart0: cute.Tensor | None,
        mDkPart1: cute.Tensor | None,
        mDkCmp: cute.Tensor | None,
        mDv: cute.Tensor,
        mDvPart0: cute.Tensor | None,
        mDvPart1: cute.Tensor | None,
        mDvCmp: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mBounds: cute.Tensor | None,
        mTiles: cute.Tensor | None,
    ):
        _, values, _ = cute.arch.block_idx()
        if values == 0:
            self.add_up(mDk, mDkPart0, mDkPart1, mDkCmp, mRows, mBounds, mTiles, self.vectors)
        else:
            self.add_up(mDv, mDvPart0, mDvPart1, mDvCmp, mRows, mBounds, mTiles, self.v_vectors)

    @cute.jit
    def add_up(
        self,
        mDx: cute.Tensor,
        mPart0: cute.Tensor | None,
        mPart1: cute.Tensor | None,
        mDxCmp: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mBounds: cute.Tensor | None,
        mTiles: cute.Tensor | None,
        vectors: cutlass.Constexpr[int],
    ):
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        _, tokens, heads, _ = mDx.shape
        groups = cute.ceil_div(tokens * heads, self.rows)
        batch = group // groups
        lane = thread % self.lanes
        item = group % groups * self.rows + thread // self.lanes
        token, head = item // heads, item % heads
        if (token < tokens) & (lane < vectors):
            row = token
            if const_expr(mRows is not None):
                row = mRows[token]
            rSum = cute.make_rmem_tensor(VECTOR, Float32)
            rSum.fill(0.0)
            if row >= 0:
                if const_expr(mDxCmp is not None):
                    position, before, entries = row, Int32(0), mDxCmp.shape[1]
                    if const_expr(mTiles is not None):
                        document = mTiles[DOCUMENT, row // self.tile]
                        position = row - mBounds[ROW, document]
                        before = mBounds[ENTRY, document]
                        entries = self.keys.visible(mBounds[LENGTH, document] - 1, entries)
                    length, stride = self.keys.length, self.keys.stride
                    first = Int32(0) if position < length else (position - length) // stride + 1
                    last = cutlass.min(position // stride + 1, entries)
                    for entry in cutlass.range(first, last):
                        _add(rSum, cute.local_tile(mDxCmp[batch, before + entry, head, None], (VECTOR,), (lane,)))
                    rSum.store(rSum.load() * Float32(1.0 / length))
                for mPart in (mPart0, mPart1):
                    if const_expr(mPart is not None):
                        _add(rSum, cute.local_tile(mPart[batch, row, head, None], (VECTOR,), (lane,)))
            rDx = cute.make_rmem_tensor(VECTOR, mDx.element_type)
            rDx.store(rSum.load().to(mDx.element_type))
            cute.autovec_copy(rDx, cute.local_tile(mDx[batch, token, head, None], (VECTOR,), (lane,)))


@compiled_once
def _queries(dim: int, dtype: torch.dtype, parts: int, w_dtype: torch.dtype | None, packed: bool) -> Kernel:
    return compile_kernel(
        QueryGradients(dim),
        fake(dtype, None, None, None, dim),
        *_some(parts, BRANCHES, dtype, dim),
        None if w_dtype is None else fake(torch.float32, None, None, None, 3, aligned=False),
        None if w_dtype is None else fake(w_dtype, None, 3, dim),
        fake(torch.int32, None, aligned=False) if packed else None,
    )


@compiled_once
def _keys(dims: tuple[int, int], dtype: torch.dtype, parts: int, keys: Keys | None, tile: int, packed: bool) -> Kernel:
    tensors: list[Any] = []
    for dim in dims:
        entries = None if keys is None else fake(torch.float32, None, None, None, dim)
        tensors += [fake(dtype, None, None, None, dim), *_some(parts, WHOLE, dtype, dim), entries]
    rows = fake(torch.int32, None, aligned=False) if packed else None
    tables = fake_tables() if packed else (None, None)
    return compile_kernel(KeyGradients(*dims, keys or Keys(), tile), *tensors, rows, *tables)


def _some(count: int, places: int, dtype: torch.dtype, dim: int) -> tuple[Any, ...]:
    return tuple(fake(dtype, None, None, None, dim) if i < count else None for i in range(places))


def _fill(parts: Sequence[Tensor], places: int) -> tuple[Tensor | None, ...]:
    return (*parts, *[None] * (places - len(parts)))


def query_gradients(
    dq: Tensor,
    parts: Sequence[Tensor],
    *,
    logits: Tensor | None = None,
    gate_proj_weight: Tensor | None = None,
    documents: Documents | None = None,
) -> None:
    """Add up into dq.

    Args:
        dq: `[B,N,H,D]`, bf16 or fp16; may be one of the parts.
        parts: up to three like dq, with documents aligned rows.
        logits: fp32 `[B,N,H,3]`, with gate_proj_weight `[H,3,D]`.
    """
    if dq.numel() > 0:
        w_dtype = None if gate_proj_weight is None or logits is None else gate_proj_weight.dtype
        rows = None if documents is None else documents.rows
        run = _queries(dq.shape[-1], dq.dtype, len(parts), w_dtype, documents is not None).run
        run(dq, *_fill(parts, BRANCHES), logits, None if w_dtype is None else gate_proj_weight, rows)


def key_gradients(
    dk: Tensor,
    dv: Tensor,
    k_parts: Sequence[Tensor],
    v_parts: Sequence[Tensor],
    *,
    entries: tuple[Tensor, Tensor] | None,
    keys: Keys,
    documents: Documents | None = None,
) -> None:
    """Add up into dk and dv.

    Args:
        dk, dv: `[B,N,H_kv,D]` and `[...,D_v]`, bf16 or fp16.
        k_parts, v_parts: up to two each like dk and dv, with documents aligned rows.
        entries: gradients of pooled entries, fp32 `[B,entries,H_kv,...]`, with documents aligned ones.
        keys: l and d of the entries.
    """
    if dk.numel() > 0:
        tile = 1 if documents is None else documents.tile
        tables: tuple[Any, ...] = (None, None, None)
        if documents is not None:
            tables = documents.rows, documents.bounds, documents.tiles
        dims = dk.shape[-1], dv.shape[-1]
        run = _keys(dims, dk.dtype, len(k_parts), None if entries is None else keys, tile, documents is not None).run
        dk_cmp, dv_cmp = entries or (None, None)
        run(dk, *_fill(k_parts, WHOLE), dk_cmp, dv, *_fill(v_parts, WHOLE), dv_cmp, *tables)
