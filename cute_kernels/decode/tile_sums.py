"""Tile mode: sums of a tile's queries up to each token of a step, and the product rows of score.py.

    sum[i]     = sum of the queries of token i's tile up to i          from the cached sum of the token before
    rows[i, h] = q[i, h], and three 16-bit terms of sum[i, h] / (tokens of the tile up to i)

The terms hold the 24 bits of an fp32 mantissa; in fp16 the later ones are scaled (`TermScales`, select/tile.py). A
thread has one vector of a head, for all tokens of a sequence in turn. `keep_sums` writes the sums to the cache when the
step ends, because a step that fails must find the earlier ones.

Floor: 4 D bytes read and 14 D written per token and head: 64 heads of 128: 0.15 MB. Latency only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, range_constexpr
from torch import Tensor

from cute_kernels.decode.cache import LengthTensors
from cute_kernels.decode.pages import Lengths, fake_lengths
from cute_kernels.decode.score import TERMS
from cute_kernels.mma.warp import divide
from cute_kernels.runtime.device import vectorizable
from cute_kernels.runtime.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake, fake_heads
from cute_kernels.select.tile import TermScales

THREADS = 128


class Sums(NamedTuple):
    """Sums of a step's queries, and product rows."""

    rows: Tensor
    """`[B,N_q,H TERMS,D]`, in the queries' dtype."""
    sums: Tensor
    """fp32 `[B,N_q,H,D]`"""


class SumQueries:
    """Args: dim, dtype, tile: D, 16-bit type and T."""

    def __init__(self, dim: int, dtype: Any, tile: int) -> None:
        self.vectors, self.tile = dim // VECTOR, tile
        self.term_scale = TermScales.of(dtype).later

    @staticmethod
    @compiled_once
    def compile(dim: int, dtype: torch.dtype, tile: int) -> Kernel:
        queries, rows = fake_heads(dtype, dim, dim)
        return compile_kernel(
            SumQueries(dim, CUTE_DTYPES[dtype], tile), queries, fake_sums(dim), *fake_lengths(), rows, fake_sums(dim)
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N_q, H, D]
        mKept: cute.Tensor,  # fp32 [B, slots, H, D], from the cache
        mCached: cute.Tensor,  # int32 [B]: Lengths
        mNew: cute.Tensor,
        mRows: cute.Tensor,  # [B, N_q, H TERMS, D], output
        mSums: cute.Tensor,  # fp32 [B, N_q, H, D], output
        stream: Any,
    ):
        self.kernel(mQ, mKept, Lengths(mCached, mNew), mRows, mSums).launch(
            grid=[cute.ceil_div(mQ.shape[2] * self.vectors, THREADS), mQ.shape[0], 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mQ: cute.Tensor, mKept: cute.Tensor, lengths: Lengths, mRows: cute.Tensor, mSums: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        part, batch, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        head, vector = divide(part * THREADS + thread, self.vectors)
        rX = cute.make_rmem_tensor(VECTOR, mQ.element_type)
        rTerm = cute.make_rmem_tensor(VECTOR, mQ.element_type)
        rSum, rMean = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        rSum.fill(0.0)
        if head < mQ.shape[2]:
            cached = lengths.mCached[batch]
            _, inside = divide(cached, self.tile)
            if (inside > 0) & (lengths.mNew[batch] > 0):
                cute.autovec_copy(cute.local_tile(mKept[batch, inside - 1, head, None], (VECTOR,), (vector,)), rSum)
            for i in cutlass.range(lengths.mNew[batch], unroll=1):
                _, inside = divide(cached + i, self.tile)
                if inside == 0:
                    rSum.fill(0.0)
                cute.autovec_copy(cute.local_tile(mQ[batch, i, head, None], (VECTOR,), (vector,)), rX)
                cute.autovec_copy(rX, cute.local_tile(mRows[batch, i, head * TERMS, None], (VECTOR,), (vector,)))
                rSum.store(rSum.load() + rX.load().to(Float32))
                cute.autovec_copy(rSum, cute.local_tile(mSums[batch, i, head, None], (VECTOR,), (vector,)))
                rMean.store(rSum.load() / Float32(inside + 1))
                for term in range_constexpr(1, TERMS):
                    rTerm.store(rMean.load().to(mQ.element_type))
                    rMean.store((rMean.load() - rTerm.load().to(Float32)) * self.term_scale)
                    gRow = mRows[batch, i, head * TERMS + term, None]  # [D]
                    cute.autovec_copy(rTerm, cute.local_tile(gRow, (VECTOR,), (vector,)))


class KeepSums:
    """Args: dim, tile: D and T."""

    def __init__(self, dim: int, tile: int) -> None:
        self.vectors, self.tile = dim // VECTOR, tile

    @staticmethod
    @compiled_once
    def compile(dim: int, tile: int) -> Kernel:
        return compile_kernel(KeepSums(dim, tile), fake_sums(dim), fake_sums(dim), *fake_lengths())

    @cute.jit
    def __call__(
        self,
        mSums: cute.Tensor,  # fp32 [B, N_q, H, D]
        mKept: cute.Tensor,  # fp32 [B, slots, H, D], output
        mCached: cute.Tensor,  # int32 [B]: Lengths
        mNew: cute.Tensor,
        stream: Any,
    ):
        self.kernel(mSums, mKept, Lengths(mCached, mNew)).launch(
            grid=[cute.ceil_div(mSums.shape[2] * self.vectors, THREADS), mSums.shape[0], 1],
            block=[THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mSums: cute.Tensor, mKept: cute.Tensor, lengths: Lengths):
        thread, _, _ = cute.arch.thread_idx()
        part, batch, _ = cute.arch.block_idx()
        head, vector = divide(part * THREADS + thread, self.vectors)
        rSum = cute.make_rmem_tensor(VECTOR, Float32)
        if head < mSums.shape[2]:
            new = lengths.mNew[batch]
            for i in cutlass.range(cutlass.max(new - self.tile, 0), new, unroll=1):  # later ones reuse the slots
                _, inside = divide(lengths.mCached[batch] + i, self.tile)
                cute.autovec_copy(cute.local_tile(mSums[batch, i, head, None], (VECTOR,), (vector,)), rSum)
                cute.autovec_copy(rSum, cute.local_tile(mKept[batch, inside, head, None], (VECTOR,), (vector,)))


def fake_sums(dim: int) -> Any:
    return fake(torch.float32, None, None, None, dim)


def sum_queries(q: Tensor, kept: Tensor, lengths: LengthTensors, tile: int) -> Sums:
    """Args: q: `[B,N_q,H,D]`. kept: the cache's sums, fp32 `[B,min(T,capacity),H,D]`. tile: T."""
    batch, queries, heads, dim = q.shape
    rows = q.new_empty((batch, queries, heads * TERMS, dim))
    sums = q.new_empty(q.shape, dtype=torch.float32)
    KeepSums.compile(dim, tile).compile_ahead()  # before any sum of the step is stored
    SumQueries.compile(dim, q.dtype, tile).run(vectorizable(q), kept, *lengths[:2], rows, sums)
    return Sums(rows, sums)


def keep_sums(sums: Tensor, kept: Tensor, lengths: LengthTensors, tile: int) -> None:
    """Write a step's sums `[B,N_q,H,D]` to the cache's; lengths are those before the step."""
    KeepSums.compile(sums.shape[-1], tile).run(sums, kept, *lengths[:2])
