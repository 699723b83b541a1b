"""Combine the partials of the three branches, and gate: the last launch of a step.

    o_branch = sum_s 2^(lse_s - lse) o_s       lse = log2 sum_s 2^lse_s       s over the branch's splits or parts
    out      = g_cmp o_cmp + g_slc o_slc + g_win o_win                        fp32, rounded once

A CTA has a token and head, with a fixed number of threads per branch: `lanes` threads per partial, holding one vector
of 8 elements each, threads / lanes partials at a time, and `ahead` of these in flight. Their sums are reduced in order
through shared memory: bitwise reproducible. Rows past a sequence's new tokens become 0, and those of a sequence that
has overflowed NaN.

Floor: 4 D_v bytes per head and partial; latency of a few loads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.decode.pages import Lengths, fake_lengths
from cute_kernels.decode.score import ScoreEntries
from cute_kernels.decode.splits import Partials
from cute_kernels.gate.forward import BRANCHES, lanes_per_row, row_gates, weighted_sum
from cute_kernels.mma.warp import divide
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.select.topk import Blocks


class Shape(NamedTuple):
    """Shape of a CTA."""

    threads: int
    """Threads per branch, a multiple of `lanes`."""
    ahead: int
    """Number of partials whose loads a thread has in flight."""


FEW_HEADS, MANY_HEADS = Shape(128, 8), Shape(64, 4)
"""All partials at once, with 80 registers per thread and 2 CTAs per SM; for batches, 54 registers and 6 CTAs per SM."""


class CombineBranches:
    """Sum the partials of the three branches of a token and head, then gate.

    Args:
        score: kernel that wrote the compressed branch's partials.
        dim, v_dim: head dims of q and out.
        shape: shape of a CTA.
        heads: number of heads that select together.
    """

    def __init__(self, score: ScoreEntries, dim: int, v_dim: int, shape: Shape, heads: int) -> None:
        self.heads = heads
        self.threads, self.ahead = shape
        self.score, self.group, self.queries = score, score.group, score.query_rows // score.group
        self.vectors, self.v_vectors = dim // VECTOR, v_dim // VECTOR
        self.lanes = lanes_per_row(self.vectors, self.v_vectors)
        self.rows = self.threads // self.lanes
        self.v_dim = v_dim

    @staticmethod
    @compiled_once
    def compile(
        dims: tuple[int, int],
        dtype: torch.dtype,
        group: int,
        queries: int,
        blocks: Blocks,
        page_size: int,
        w_dtype: torch.dtype | None,
        g_dtype: torch.dtype | None,
        shape: Shape = FEW_HEADS,
        terms: int = 1,  # see ScoreEntries
        select_heads: int | None = None,  # None: G
    ) -> Kernel:
        dim, v_dim = dims
        score = ScoreEntries(dim, v_dim, CUTE_DTYPES[dtype], group, queries, blocks, page_size, terms=terms)
        heads = select_heads or group
        return compile_kernel(
            CombineBranches(score, dim, v_dim, shape, heads),
            *fake_lengths(),
            fake(torch.int8, None, aligned=False),
            fake(torch.float32, None, score.cta_rows, v_dim),
            fake(torch.float32, None, score.cta_rows, aligned=False),
            *fake_block_partials(heads, v_dim),
            *((None, None) if heads == group else fake_block_partials(group, v_dim)),
            None if w_dtype is None else fake(dtype, None, None, None, dim),
            None if w_dtype is None else fake(w_dtype, None, BRANCHES, dim),
            None if g_dtype is None else fake(g_dtype, None, None, None, BRANCHES, aligned=False),
            fake(dtype, None, None, None, v_dim),
            *[Int32(0)] * 2,
        )

    @cute.jit
    def __call__(
        self,
        mCached: cute.Tensor,  # int32 [B]: Lengths
        mNew: cute.Tensor,
        mOverflowed: cute.Tensor,  # int8 [B]
        mCmpO: cute.Tensor,  # fp32 [places, rows, D_v], as written by ScoreEntries
        mCmpLse: cute.Tensor,
        mBlockO: cute.Tensor,  # fp32 [B, items, parts, heads, D_v], as written by AttendBlocks
        mBlockLse: cute.Tensor,
        mWinO: cute.Tensor | None,  # the same with G heads, if the window's are a separate launch
        mWinLse: cute.Tensor | None,
        mQ: cute.Tensor | None,  # [B, N_q, H, D], with mW
        mW: cute.Tensor | None,  # [H, 3, D]
        mG: cute.Tensor | None,  # [B, N_q, H, 3], without mW
        mOut: cute.Tensor,  # [B, N_q, H, D_v]
        ctas: Int32,  # CTAs of ScoreEntries
        selected_parts: Int32,  # parts of AttendBlocks
        stream: Any,
    ):
        tensors = mOverflowed, mCmpO, mCmpLse, mBlockO, mBlockLse, mWinO, mWinLse, mQ, mW, mG, mOut
        self.kernel(Lengths(mCached, mNew), *tensors, ctas, selected_parts).launch(
            grid=[mOut.shape[2], mOut.shape[1], mOut.shape[0]],
            block=[BRANCHES * self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        lengths: Lengths,
        mOverflowed: cute.Tensor,
        mCmpO: cute.Tensor,
        mCmpLse: cute.Tensor,
        mBlockO: cute.Tensor,
        mBlockLse: cute.Tensor,
        mWinO: cute.Tensor | None,
        mWinLse: cute.Tensor | None,
        mQ: cute.Tensor | None,
        mW: cute.Tensor | None,
        mG: cute.Tensor | None,
        mOut: cute.Tensor,
        ctas: Int32,
        selected_parts: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        head, query, batch = cute.arch.block_idx()
        branch, row, lane = thread // self.threads, thread % self.threads // self.lanes, thread % self.lanes
        in_v = lane < self.v_vectors
        smem = SmemAllocator()
        sums = cute.make_ordered_layout((self.v_dim, self.rows, BRANCHES), order=(0, 1, 2))
        sO = smem.allocate_tensor(Float32, sums, 16)  # (D_v, rows, BRANCHES)
        stats = cute.make_layout((self.rows, BRANCHES))
        sMax, sSum = (smem.allocate_tensor(Float32, stats, 16) for _ in range(2))  # (rows, BRANCHES)
        is_new = query < lengths.mNew[batch]
        gOut = mOut[batch, query, head, None]  # [D_v]
        rOut = cute.make_rmem_tensor(VECTOR, mOut.element_type)
        rOut.fill(0.0)
        if mOverflowed[batch] != 0:
            rOut.fill(float("nan"))
        kv_head, head_in_group = divide(head, self.group)
        heads = mOut.shape[2] // self.group * self.score.row_groups
        cut = self.score.splits.cut(lengths, batch, heads, ctas)
        rQ = cute.make_rmem_tensor(VECTOR, mOut.element_type)
        rQ.fill(0.0)
        rW = None
        if const_expr(mW is not None):
            rW = cute.make_rmem_tensor((VECTOR, BRANCHES), mW.element_type)
            rW.fill(0.0)
            if lane < self.vectors:
                cute.autovec_copy(cute.local_tile(mQ[batch, query, head, None], (VECTOR,), (lane,)), rQ)
                for b in range_constexpr(BRANCHES):
                    cute.autovec_copy(cute.local_tile(mW[head, b, None], (VECTOR,), (lane,)), rW[None, b])
        gG = None if const_expr(mG is None) else mG[batch, query, head, None]
        rG = row_gates(rQ, rW, gG, is_new, self.lanes)  # fp32 (BRANCHES)
        cute.arch.griddepcontrol_wait()
        if is_new:
            # Partials, `rows` at a time
            if branch == 0:
                query_row = query * self.group + head_in_group
                group, group_row = divide(query_row, self.score.cta_rows)
                partials = self.score.splits.partials(cut, kv_head * self.score.row_groups + group)
                gCmp = mCmpO[None, group_row, None], mCmpLse[None, group_row]  # fp32 [partials, D_v], [partials]
                self._sum(*gCmp, partials, row, lane, branch, sO, sMax, sSum)
            elif branch == 1:
                partials = Partials(Int32(0), selected_parts)
                self._sum(*self._of_head(mBlockO, mBlockLse, self.heads), partials, row, lane, branch, sO, sMax, sSum)
            elif const_expr(mWinO is None):
                partials = Partials(selected_parts, mBlockLse.shape[2] - selected_parts)
                self._sum(*self._of_head(mBlockO, mBlockLse, self.heads), partials, row, lane, branch, sO, sMax, sSum)
            else:
                partials = Partials(Int32(0), mWinLse.shape[2])
                self._sum(*self._of_head(mWinO, mWinLse, self.group), partials, row, lane, branch, sO, sMax, sSum)
            cute.arch.sync_threads()  # all sums of the three branches are written

            # Branches: the first one's threads combine and gate
            if branch == 0:
                rO = cute.make_rmem_tensor((VECTOR, BRANCHES), Float32)
                rO.fill(0.0)
                if in_v:
                    for b in range_constexpr(BRANCHES):
                        self._total(b, lane, sO, sMax, sSum, rO[None, b])
                rOut.store(weighted_sum(rO, rG).load().to(mOut.element_type))
        if in_v & (row == 0) & (branch == 0):
            cute.autovec_copy(rOut, cute.local_tile(gOut, (VECTOR,), (lane,)))

    @cute.jit
    def _of_head(self, mO: cute.Tensor, mLse: cute.Tensor, heads: cutlass.Constexpr[int]) -> tuple[Any, Any]:
        """AttendBlocks' partials of the CTA's token and head. Args: `heads`: number of heads stored together."""
        head, query, batch = cute.arch.block_idx()
        selector, head_in_group = divide(head, heads)
        item = selector * self.queries + query
        return mO[batch, item, None, head_in_group, None], mLse[batch, item, None, head_in_group]

    @cute.jit
    def _sum(
        self,
        gO: cute.Tensor,  # fp32 [partials, D_v]
        gLse: cute.Tensor,  # fp32 [partials]
        partials: Partials,
        row: Int32,
        lane: Int32,
        branch: Int32,
        sO: cute.Tensor,
        sMax: cute.Tensor,
        sSum: cute.Tensor,
    ):
        """Sum every `rows`-th partial from `row` on, unnormalized. Partials without keys contribute nothing."""
        top, total = -Float32.inf, Float32(0.0)
        rO = cute.make_rmem_tensor(VECTOR, Float32)
        rO.fill(0.0)
        rPart = cute.make_rmem_tensor((VECTOR, self.ahead), Float32)
        rLse = cute.make_rmem_tensor(self.ahead, Float32)
        for start in cutlass.range(row, partials.count, self.rows * self.ahead, unroll=1):
            rPart.fill(0.0)
            rLse.fill(-Float32.inf)
            for i in range_constexpr(self.ahead):
                if start + i * self.rows < partials.count:
                    place = partials.first + start + i * self.rows
                    rLse[i] = gLse[place]
                    if lane < self.v_vectors:
                        cute.autovec_copy(cute.local_tile(gO[place, None], (VECTOR,), (lane,)), rPart[None, i])
            new_top = top
            for i in range_constexpr(self.ahead):
                new_top = cute.arch.fmax(new_top, rLse[i])
            base = Float32(0.0) if new_top == -Float32.inf else new_top
            rescale = cute.math.exp2(top - base, fastmath=True)
            total = total * rescale
            rO.store(rO.load() * rescale)
            for i in range_constexpr(self.ahead):
                if rLse[i] > -Float32.inf:
                    weight = cute.math.exp2(rLse[i] - base, fastmath=True)
                    total += weight
                    rO.store(rO.load() + rPart[None, i].load() * weight)
            top = new_top
        if lane < self.v_vectors:
            cute.autovec_copy(rO, cute.local_tile(sO[None, row, branch], (VECTOR,), (lane,)))
        if lane == 0:
            sMax[row, branch], sSum[row, branch] = top, total

    @cute.jit
    def _total(
        self,
        branch: cutlass.Constexpr[int],
        lane: Int32,
        sO: cute.Tensor,
        sMax: cute.Tensor,
        sSum: cute.Tensor,
        rO: cute.Tensor,
    ):
        """A lane's vector of a branch."""
        top, total = -Float32.inf, Float32(0.0)
        for i in range_constexpr(self.rows):
            top = cute.arch.fmax(top, sMax[i, branch])
        base = Float32(0.0) if top == -Float32.inf else top
        rPart = cute.make_rmem_tensor(VECTOR, Float32)
        rSum = cute.make_rmem_tensor(VECTOR, Float32)
        rSum.fill(0.0)
        for i in range_constexpr(self.rows):
            weight = cute.math.exp2(sMax[i, branch] - base, fastmath=True)
            total += sSum[i, branch] * weight
            cute.autovec_copy(cute.local_tile(sO[None, i, branch], (VECTOR,), (lane,)), rPart)
            rSum.store(rSum.load() + rPart.load() * weight)
        inverse = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
        rO.store(rSum.load() * inverse)


def fake_block_partials(heads: int, v_dim: int) -> tuple[Any, Any]:
    """[B, items, parts, heads, D_v] and their lse."""
    return (
        fake(torch.float32, None, None, None, heads, v_dim),
        fake(torch.float32, None, None, None, heads, aligned=False),
    )
