"""Gradients of q, k and v: sums of the branches' gradients in fp32, rounded once.

    dq[i] = sum_b dq_b[i] + sum_b dlogit_b[i] * w[h,b]
    dk[i] = dk_slc[i] + dk_win[i] + 1/l * sum over entries j with j*d <= i < j*d + l of dk_cmp[j]      same for dv

Every term is optional, and dk and dv of a branch may cover the last keys only, if no earlier key is in a window. Each
row (token and head) has a group of lanes, each holding a 16-byte vector. In token mode, except for packed documents, dq
is summed together with its partials (CombineQueryGradients in attend/combine.py).

Packed documents (B = 1): gradients of the branches are in the aligned rows and keys of pool/documents.py, those of
entries in aligned entries; tokens of no document get 0.

Floor: every term is read once, every sum written once. 128K tokens, 8 heads of 128 for q and 2 for k and v, bf16:
1.5 GB, 0.36 ms at 4.2 TB/s.

Limits: head dims multiples of 8, at most 256; 64-bit offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels.gate.forward import BRANCHES, THREADS, lanes_per_row
from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.pool.documents import ENTRY, KEY, LENGTH, Documents, document_at, fake_rows, fake_tables
from cute_kernels.runtime.jit import VECTOR, Kernel, compile_kernel, compiled_once, fake

TOKEN_BRANCHES = 2
"""Number of branches whose keys are tokens, not compressed entries: selected and window."""


@cute.jit
def add_vector(rSum: cute.Tensor, gRow: cute.Tensor, vector: Int32):
    """Add a vector of a row in global memory to fp32 registers."""
    rTerm = cute.make_rmem_tensor(VECTOR, gRow.element_type)
    cute.autovec_copy(cute.local_tile(gRow, (VECTOR,), (vector,)), rTerm)
    rSum.store(rSum.load() + rTerm.load().to(Float32))


@cute.jit
def add_logit_gradients(rSum: cute.Tensor, gLogits: cute.Tensor, gW: cute.Tensor, vector: Int32):
    """Add sum_b dlogit_b w_b to a vector of dq. Args: gLogits: fp32 [3], of a row. gW: [3, D], of its head."""
    rW = cute.make_rmem_tensor(VECTOR, gW.element_type)
    for b in range_constexpr(BRANCHES):
        cute.autovec_copy(cute.local_tile(gW[b, None], (VECTOR,), (vector,)), rW)
        logit = gLogits[b]
        for i in range_constexpr(VECTOR):
            rSum[i] = cute.math.fma(logit, rW[i].to(Float32), rSum[i])


class QueryGradients:
    """dq of one row, by a group of lanes.

    Args: dim: head dim.
    """

    def __init__(self, dim: int) -> None:
        self.vectors = dim // VECTOR
        self.lanes = lanes_per_row(self.vectors)
        self.rows = THREADS // self.lanes

    @staticmethod
    @compiled_once
    def compile(dim: int, dtype: torch.dtype, terms: int, w_dtype: torch.dtype | None, packed: bool) -> Kernel:
        return compile_kernel(
            QueryGradients(dim),
            fake(dtype, None, None, None, dim),
            *fake_query_terms(dim, dtype, terms, BRANCHES, w_dtype),
            fake_rows() if packed else None,
        )

    @cute.jit
    def __call__(
        self,
        mDq: cute.Tensor,  # [B, N, H, D]
        mTerm0: cute.Tensor | None,  # [B, N, H, D], with mRows aligned rows
        mTerm1: cute.Tensor | None,
        mTerm2: cute.Tensor | None,
        mLogits: cute.Tensor | None,  # fp32 [B, N, H, 3]
        mW: cute.Tensor | None,  # [H, 3, D], with mLogits
        mRows: cute.Tensor | None,  # Documents.rows
        stream: Any,
    ):
        tiles = mDq.shape[0] * cute.ceil_div(mDq.shape[1], self.rows)
        self.kernel(mDq, mTerm0, mTerm1, mTerm2, mLogits, mW, mRows).launch(
            grid=[tiles * mDq.shape[2], 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mDq: cute.Tensor,
        mTerm0: cute.Tensor | None,
        mTerm1: cute.Tensor | None,
        mTerm2: cute.Tensor | None,
        mLogits: cute.Tensor | None,
        mW: cute.Tensor | None,
        mRows: cute.Tensor | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        work_index, _, _ = cute.arch.block_idx()
        _, tokens, heads, _ = mDq.shape
        head, tile = work_index % heads, work_index // heads
        tiles = cute.ceil_div(tokens, self.rows)
        batch = tile // tiles
        lane = thread % self.lanes
        token = tile % tiles * self.rows + thread // self.lanes
        if (token < tokens) & (lane < self.vectors):
            row = token
            if const_expr(mRows is not None):
                row = mRows[token]
            rSum = cute.make_rmem_tensor(VECTOR, Float32)
            rSum.fill(0.0)
            if row >= 0:
                for mTerm in (mTerm0, mTerm1, mTerm2):
                    if const_expr(mTerm is not None):
                        add_vector(rSum, mTerm[batch, row, head, None], lane)
                if const_expr(mLogits is not None):
                    add_logit_gradients(rSum, mLogits[batch, token, head, None], mW[head, None, None], lane)
            rDq = cute.make_rmem_tensor(VECTOR, mDq.element_type)
            rDq.store(rSum.load().to(mDq.element_type))
            cute.autovec_copy(rDq, cute.local_tile(mDq[batch, token, head, None], (VECTOR,), (lane,)))


class KeyGradients:
    """dk or dv of one row, by a group of lanes.

    Args: dim, v_dim: head dims of k and v. keys: l and d of the entries.
    """

    def __init__(self, dim: int, v_dim: int, keys: Keys) -> None:
        self.vectors, self.v_vectors, self.keys = dim // VECTOR, v_dim // VECTOR, keys
        self.lanes = lanes_per_row(self.vectors, self.v_vectors)
        self.rows = THREADS // self.lanes

    @staticmethod
    @compiled_once
    def compile(
        dims: tuple[int, int],
        dtype: torch.dtype,
        terms: int,
        keys: Keys | None,
        packed: bool,
        out_dtype: torch.dtype | None = None,
    ) -> Kernel:
        tensors: list[Any] = []
        for dim in dims:
            entries = None if keys is None else fake(torch.float32, None, None, None, dim)
            out = fake(out_dtype or dtype, None, None, None, dim)
            tensors += [out, *_fake_terms(terms, TOKEN_BRANCHES, dtype, dim), entries]
        tables = (fake_rows(), fake_tables()[0]) if packed else (None, None)
        return compile_kernel(KeyGradients(*dims, keys or Keys()), *tensors, *tables)

    @cute.jit
    def __call__(
        self,
        mDk: cute.Tensor,  # [B, N, H_kv, D]
        mDkTerm0: cute.Tensor | None,  # [B, N, H_kv, D], with mRows aligned keys, or of the last keys
        mDkTerm1: cute.Tensor | None,
        mDkCmp: cute.Tensor | None,  # fp32 [B, entries, H_kv, D]
        mDv: cute.Tensor,  # [B, N, H_kv, D_v], with terms like those of mDk
        mDvTerm0: cute.Tensor | None,
        mDvTerm1: cute.Tensor | None,
        mDvCmp: cute.Tensor | None,
        mRows: cute.Tensor | None,  # Documents.key_rows and .bounds
        mBounds: cute.Tensor | None,
        stream: Any,
    ):
        tiles = mDk.shape[0] * cute.ceil_div(mDk.shape[1] * mDk.shape[2], self.rows)
        self.kernel(mDk, mDkTerm0, mDkTerm1, mDkCmp, mDv, mDvTerm0, mDvTerm1, mDvCmp, mRows, mBounds).launch(
            grid=[tiles, 2, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mDk: cute.Tensor,
        mDkTerm0: cute.Tensor | None,
        mDkTerm1: cute.Tensor | None,
        mDkCmp: cute.Tensor | None,
        mDv: cute.Tensor,
        mDvTerm0: cute.Tensor | None,
        mDvTerm1: cute.Tensor | None,
        mDvCmp: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mBounds: cute.Tensor | None,
    ):
        _, is_v, _ = cute.arch.block_idx()
        if is_v == 0:
            self.sum_row(mDk, mDkTerm0, mDkTerm1, mDkCmp, mRows, mBounds, self.vectors)
        else:
            self.sum_row(mDv, mDvTerm0, mDvTerm1, mDvCmp, mRows, mBounds, self.v_vectors)

    @cute.jit
    def sum_row(
        self,
        mDx: cute.Tensor,
        mTerm0: cute.Tensor | None,
        mTerm1: cute.Tensor | None,
        mDxCmp: cute.Tensor | None,
        mRows: cute.Tensor | None,
        mBounds: cute.Tensor | None,
        vectors: cutlass.Constexpr[int],
    ):
        """Sum one row; dx is dk or dv."""
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        _, tokens, heads, _ = mDx.shape
        tiles = cute.ceil_div(tokens * heads, self.rows)
        batch = tile // tiles
        lane = thread % self.lanes
        token_and_head = tile % tiles * self.rows + thread // self.lanes
        token, head = token_and_head // heads, token_and_head % heads
        if (token < tokens) & (lane < vectors):
            row = token
            if const_expr(mRows is not None):
                row = mRows[token]
            rSum = cute.make_rmem_tensor(VECTOR, Float32)
            rSum.fill(0.0)
            if row >= 0:
                # Means of all entries that contain the token
                if const_expr(mDxCmp is not None):
                    position, first_entry, entries = row, Int32(0), mDxCmp.shape[1]  # within the document
                    if const_expr(mBounds is not None):
                        document = document_at(mBounds[KEY, None], row, 1, 1, 0)
                        position = row - mBounds[KEY, document]
                        first_entry = mBounds[ENTRY, document]
                        entries = self.keys.visible(mBounds[LENGTH, document] - 1, entries)
                    length, stride = self.keys.length, self.keys.stride
                    start = Int32(0) if position < length else (position - length) // stride + 1
                    stop = cutlass.min(position // stride + 1, entries)
                    for entry in cutlass.range(start, stop):
                        add_vector(rSum, mDxCmp[batch, first_entry + entry, head, None], lane)
                    rSum.store(rSum.load() * Float32(1.0 / length))
                for mTerm in (mTerm0, mTerm1):
                    if const_expr(mTerm is not None):
                        term_row = row
                        if const_expr(mRows is None):
                            term_row = row - (tokens - mTerm.shape[1])
                        if term_row >= 0:
                            add_vector(rSum, mTerm[batch, term_row, head, None], lane)
            rDx = cute.make_rmem_tensor(VECTOR, mDx.element_type)
            rDx.store(rSum.load().to(mDx.element_type))
            cute.autovec_copy(rDx, cute.local_tile(mDx[batch, token, head, None], (VECTOR,), (lane,)))


def _fake_terms(terms: int, parameters: int, dtype: torch.dtype, dim: int) -> tuple[Any, ...]:
    """Terms to compile with, and None for the kernel's other parameters."""
    return tuple(fake(dtype, None, None, None, dim) if i < terms else None for i in range(parameters))


def _pad(terms: Sequence[Tensor], parameters: int) -> tuple[Tensor | None, ...]:
    return (*terms, *[None] * (parameters - len(terms)))


class QueryTerms(NamedTuple):
    """Terms of dq."""

    branches: tuple[Tensor, ...]
    """dq of up to three branches, `[B,N,H,D]`, bf16 or fp16."""
    logits: Tensor | None = None
    """fp32 `[B,N,H,3]`: gradients of the gates' logits, with gate_proj_weight."""
    gate_proj_weight: Tensor | None = None
    """`[H,3,D]`; ignored without logits."""

    @property
    def w_dtype(self) -> torch.dtype | None:
        """dtype of gate_proj_weight if logits are given, otherwise None."""
        return None if self.gate_proj_weight is None or self.logits is None else self.gate_proj_weight.dtype

    def narrow(self, batches: slice, rows: slice, heads: slice) -> QueryTerms:
        """Restrict to some batches, rows and heads."""
        logits, weight = self.logits, self.gate_proj_weight
        return QueryTerms(
            tuple(x[batches, rows, heads] for x in self.branches),
            None if logits is None else logits[batches, rows, heads],
            None if weight is None else weight[heads],
        )

    def arguments(self, branches: int) -> tuple[Tensor | None, ...]:
        """Arguments of a kernel with parameters for this number of branches."""
        gates = (None, None) if self.w_dtype is None else (self.logits, self.gate_proj_weight)
        return (*_pad(self.branches, branches), *gates)


def fake_query_terms(
    dim: int, dtype: torch.dtype, terms: int, parameters: int, w_dtype: torch.dtype | None
) -> tuple[Any, ...]:
    """`QueryTerms.arguments` to compile with. Args: terms: number of given branches among the kernel's `parameters`."""
    gates = fake(torch.float32, None, None, None, 3, aligned=False), fake(w_dtype or dtype, None, 3, dim)
    return (*_fake_terms(terms, parameters, dtype, dim), *((None, None) if w_dtype is None else gates))


def query_gradients(dq: Tensor, terms: QueryTerms, *, documents: Documents | None = None) -> None:
    """Sum the terms of dq into dq.

    Args:
        dq: `[B,N,H,D]`, bf16 or fp16, output; may alias one of the terms.
        terms: branches are like dq, with documents in aligned rows.
    """
    if dq.numel() > 0:
        rows = None if documents is None else documents.rows
        run = QueryGradients.compile(
            dq.shape[-1], dq.dtype, len(terms.branches), terms.w_dtype, documents is not None
        ).run
        run(dq, *terms.arguments(BRANCHES), rows)


def key_gradients(
    dk: Tensor,
    dv: Tensor,
    k_terms: Sequence[Tensor],
    v_terms: Sequence[Tensor],
    *,
    entries: tuple[Tensor, Tensor] | None,
    keys: Keys,
    documents: Documents | None = None,
) -> None:
    """Sum the terms of dk and dv into dk and dv.

    Args:
        dk, dv: `[B,N,H_kv,D]` and `[...,D_v]`, bf16, fp16 or fp32, outputs.
        k_terms, v_terms: dk and dv of up to two branches, in bf16 or fp16: aligned keys with documents, otherwise all
            keys or the last ones.
        entries: gradients of the compressed entries, fp32 `[B,entries,H_kv,...]`, aligned entries with documents.
        keys: l and d of the entries.
    """
    if dk.numel() > 0:
        tables = (None, None) if documents is None else (documents.key_rows, documents.bounds)
        dims = dk.shape[-1], dv.shape[-1]
        dtype = k_terms[0].dtype if k_terms else dk.dtype
        summed = None if entries is None else keys
        out_dtype = None if dk.dtype == dtype else dk.dtype
        run = KeyGradients.compile(dims, dtype, len(k_terms), summed, documents is not None, out_dtype).run
        dk_cmp, dv_cmp = entries or (None, None)
        run(dk, *_pad(k_terms, TOKEN_BRANCHES), dk_cmp, dv, *_pad(v_terms, TOKEN_BRANCHES), dv_cmp, *tables)
