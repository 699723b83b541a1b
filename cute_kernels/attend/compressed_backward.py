"""Backward of attention to compressed entries on Hopper, in two kernels and a sum: no atomics, no fp32 dQ.

    S_ij = scale q_i . k_j            P_ij = exp(S_ij - lse_i) if entry j has ended: j d + l - 1 <= i, else 0
    dP_ij = dO_i . v_j                dS_ij = P_ij (dP_ij - delta_i)
    dQ_i = scale sum_j dS_ij k_j      dK_j = scale sum_i dS_ij q_i      dV_j = sum_i P_ij dO_i

lse and delta are as in selected_backward.py: lse may be shifted by a gate; P = 0 if it is not finite.

CompressedDQ     a CTA owns 128 query rows of a head and iterates over the entries visible to them, 64 at a time.
CompressedDKV    a CTA owns 128 entries of a key/value head and a split of the rows that see them: all heads of the
                 group, 64 rows at a time. It writes an fp32 partial of dK and dV; partials are summed in order.

Both are built on backward_tiles.py: roles of warps, shared memory, loads.

Floor: 3 products in CompressedDQ and 4 in CompressedDKV of H N n / 2 2 D FLOPs each for n entries, twice that if all
rows come after all entries. 128K tokens, 8 heads of 128, d = 64: 1.92 TFLOP, 3.2 ms at 600 TFLOP/s. Bytes: q, dO, k and
v are read from HBM twice, dQ is written once, 1.3 GB, 0.3 ms at 4.2 TB/s; up to about 300 partials of 128 KiB.

Limits: sm_90a (WGMMA); D = D_v 64 or 128; causal; dO finite in every row; TMA: rows 16-byte aligned;
64-bit offsets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, range_constexpr
from torch import Tensor

from cute_kernels.attend.backward_tiles import (
    CTA_ROWS,
    STAGES,
    BackwardDKV,
    BackwardDQ,
    Inputs,
    KeyTileRange,
    Mmas,
    RowTileRange,
    SharedDKV,
    SharedDQ,
    Stats,
    TmaTensors,
    WorkTile,
    score_coordinates,
)
from cute_kernels.gate.partials import sum_partials
from cute_kernels.mma.warp_specialized import CONSUMERS, THREADS, Consumer, consumer_state
from cute_kernels.mma.wgmma import TILE, acc_coordinates
from cute_kernels.runtime.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake, fake_heads, fake_stats

MIN_CTAS = 264
"""Minimum CTAs of CompressedDKV, if there is enough work: two for each of 132 multiprocessors, a long and a short one.
Fixed across GPUs for bitwise reproducibility."""

MIN_STEPS = 8
"""Minimum row tiles, over all heads of a group, per CTA of CompressedDKV, to pay for its loads and partial."""


class Entries(NamedTuple):
    """Visibility of compressed entries to rows."""

    length: Int32
    """l, tokens per entry."""
    stride: Int32
    """d, tokens between the starts of consecutive entries."""
    num: Int32
    first_token: Int32
    """Token index of row 0."""

    @cute.jit
    def seen(self, row: Int32) -> Int32:
        """Number of leading entries visible to a row."""
        past_first = row + self.first_token + 1 - self.length  # tokens after the end of entry 0
        return Int32(0) if past_first < 0 else cutlass.min(past_first // self.stride + 1, self.num)

    def first_row(self, entry: Int32) -> Int32:
        """First row that sees an entry, possibly negative; for indices past the last entry, that of the last entry."""
        return cutlass.min(entry, self.num - 1) * self.stride + self.length - 1 - self.first_token


class MaskOfEntries(NamedTuple):
    """Mask of a tile of entries."""

    first_entry: Int32
    seen_by_all: Int32
    """Number of leading entries visible to every row of the warpgroup."""
    rSeen: cute.Tensor
    """int32 (r): number of leading entries visible to each of the thread's rows."""

    @cute.jit
    def apply(self, P: cute.Tensor, tScS: cute.Tensor):
        if self.first_entry + TILE > self.seen_by_all:
            for n, r, c in acc_coordinates(P):
                seen = self.first_entry + tScS[(c, r, n), 0, 0][1] < self.rSeen[r]
                P[(c, r, n), 0, 0] = P[(c, r, n), 0, 0] if seen else Float32(0.0)


class MaskOfRows(NamedTuple):
    """Mask of a tile of rows."""

    first_row: Int32
    seeing_all: Int32
    """First row that sees every entry of the warpgroup."""
    rFirst: cute.Tensor
    """int32 (r): first row that sees each of the thread's entries."""

    @cute.jit
    def apply(self, P: cute.Tensor, tScS: cute.Tensor):
        if self.first_row < self.seeing_all:
            for n, r, c in acc_coordinates(P):
                seen = self.first_row + tScS[(c, r, n), 0, 0][1] >= self.rFirst[r]
                P[(c, r, n), 0, 0] = P[(c, r, n), 0, 0] if seen else Float32(0.0)


class CompressedDQ(BackwardDQ):
    """dQ of the compressed branch. Roles and pipelines: BackwardDQ."""

    @staticmethod
    @compiled_once
    def compile(dim: int, dtype: torch.dtype) -> Kernel:
        return compile_kernel(
            CompressedDQ(dim, CUTE_DTYPES[dtype]),
            *fake_heads(dtype, dim, dim, dim, dim),
            *fake_stats(2),
            fake(dtype, None, None, None, dim),
            *[Int32(0)] * 3,
            Float32(0.0),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mdO: cute.Tensor,
        mK: cute.Tensor,  # [B, entries, H_kv, D]
        mV: cute.Tensor,
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mDelta: cute.Tensor,
        mdQ: cute.Tensor,  # [B, N, H, D]
        length: Int32,
        stride: Int32,
        first_token: Int32,  # token index of row 0
        scale: Float32,
        stream: Any,
    ):
        batches, rows, heads, _ = mQ.shape
        self.kernel(
            self.tma_tensors(mQ, mdO, mK, mV, mdQ),
            (mLse, mDelta),
            rows,
            mK.shape[1],
            heads,
            batches,
            heads // mK.shape[2],
            length,
            stride,
            first_token,
            scale,
            self.mmas(),
        ).launch(
            grid=[cute.ceil_div(rows, CTA_ROWS) * batches * heads, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma: TmaTensors,
        stats: Stats,
        num_rows: Int32,
        num_entries: Int32,
        heads: Int32,
        batches: Int32,
        group: Int32,
        length: Int32,
        stride: Int32,
        first_token: Int32,
        scale: Float32,
        mma: Mmas,
    ):
        work_index, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = cute.ceil_div(num_rows, CTA_ROWS) - 1 - work_index // (heads * batches)  # rows with most entries first
        work = WorkTile(tile, work_index % heads, work_index // heads % batches)
        entries = Entries(length, stride, num_entries, first_token)
        # A row sees a prefix of the entries: a CTA's range needs no list
        last_row = cutlass.min(tile * CTA_ROWS + CTA_ROWS, num_rows) - 1
        key_tiles = KeyTileRange(Int32(0), cute.ceil_div(entries.seen(last_row), TILE))
        inputs = Inputs(tma, (stats,), num_rows, group, scale, mma)
        self.run_roles(warp, inputs, self.allocate(), work, key_tiles, entries)

    @cute.jit
    def mma(
        self,
        inputs: Inputs,
        shared: SharedDQ,
        work: WorkTile,
        key_tiles: KeyTileRange,
        seen: Entries,
        consumer: Consumer,
    ) -> tuple[cute.Tensor, Any]:
        keys_ready, entries = shared.keys_ready, seen
        first_row = (work.tile * CONSUMERS + consumer.warpgroup) * TILE
        tScS = score_coordinates(inputs.mma.s, consumer)
        # The mask is a step function: a thread compares its elements of every tile with one number per row
        seen_by_all, rSeen = entries.seen(first_row), cute.make_rmem_tensor(2, Int32)  # rSeen: int32 (r)
        for r in range_constexpr(2):
            rSeen[r] = entries.seen(first_row + tScS[(0, r, 0), 0, 0][0])
        dQ = self.accumulator(inputs.mma)  # fp32 [TILE rows, D]
        op = self.partition(inputs, shared, work, consumer)
        state = consumer_state(STAGES)
        for i in cutlass.range(key_tiles.num_tiles(), unroll=1):
            keys_ready.consumer_wait(state)
            self.add_key_tile(dQ, op, state.index, MaskOfEntries(i * TILE, seen_by_all, rSeen), inputs)
            keys_ready.consumer_release(state)
            state.advance()
        return dQ, state


class CompressedDKV(BackwardDKV):
    """Partials of dK and dV of the compressed branch. Roles and pipelines: BackwardDKV; both consumers read
    every stage. Results are stored from registers, so no further barriers are needed.

    Args: dim: head dim. dtype: 16-bit type.
    """

    def __init__(self, dim: int, dtype: Any) -> None:
        super().__init__(dim, dtype, key_tiles=CONSUMERS, branches=1)

    @staticmethod
    @compiled_once
    def compile(dim: int, dtype: torch.dtype) -> Kernel:
        return compile_kernel(
            CompressedDKV(dim, CUTE_DTYPES[dtype]),
            *fake_heads(dtype, dim, dim, dim, dim),
            *fake_stats(2),
            fake(torch.float32, None, 2, None, None, None, dim),
            *[Int32(0)] * 3,
            Float32(0.0),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, N, H, D]
        mdO: cute.Tensor,
        mK: cute.Tensor,  # [B, entries, H_kv, D]
        mV: cute.Tensor,
        mLse: cute.Tensor,  # fp32 [B, H, N]
        mDelta: cute.Tensor,
        mPartials: cute.Tensor,  # fp32 [splits, 2, B, entries, H_kv, D]: dK and dV
        length: Int32,
        stride: Int32,
        first_token: Int32,  # token index of row 0
        scale: Float32,
        stream: Any,
    ):
        splits, _, batches, num_entries, kv_heads, _ = mPartials.shape
        self.kernel(
            self.tma_tensors(mQ, mdO, mK, mV),
            (mLse, mDelta),
            mPartials,
            mQ.shape[1],
            mQ.shape[2] // kv_heads,
            length,
            stride,
            first_token,
            scale,
            self.mmas(),
        ).launch(
            grid=[cute.ceil_div(num_entries, CTA_ROWS) * splits * batches * kv_heads, 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma: TmaTensors,
        stats: Stats,
        mPartials: cute.Tensor,
        num_rows: Int32,
        group: Int32,
        length: Int32,
        stride: Int32,
        first_token: Int32,
        scale: Float32,
        mma: Mmas,
    ):
        work_index, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        splits, _, batches, num_entries, kv_heads, _ = mPartials.shape
        tile_and_split = work_index // (kv_heads * batches)
        tile, split = tile_and_split // splits, tile_and_split % splits  # entries seen by the most rows go first
        work = WorkTile(tile, work_index % kv_heads, work_index // kv_heads % batches)
        entries = Entries(length, stride, num_entries, first_token)
        # An entry is seen by a suffix of the rows: no list here either
        row_tiles = self.row_tiles(entries, num_rows, tile, split, splits)
        inputs = Inputs(tma, (stats,), num_rows, group, scale, mma)
        self.run_roles(warp, inputs, work, row_tiles, entries, (mPartials, split))

    @cute.jit
    def row_tiles(self, entries: Entries, num_rows: Int32, tile: Int32, split: Int32, splits: Int32) -> RowTileRange:
        """Row tiles of a split, among those that see some entry of the CTA."""
        first = cutlass.max(entries.first_row(tile * CTA_ROWS), 0) // TILE
        num = cutlass.max(cute.ceil_div(num_rows, TILE) - first, 0)
        each, more = num // splits, num % splits
        start = first + split * each + cutlass.min(split, more)
        return RowTileRange(start, start + each + (Int32(1) if split < more else Int32(0)))

    @cute.jit
    def mma(
        self,
        inputs: Inputs,
        shared: SharedDKV,
        work: WorkTile,
        row_tiles: RowTileRange,
        seen: Entries,
        consumer: Consumer,
    ) -> tuple[cute.Tensor, cute.Tensor]:
        rows_ready, entries = shared.rows_ready, seen
        first_entry = (work.tile * CONSUMERS + consumer.warpgroup) * TILE
        op = self.partition(inputs.mma, shared, consumer.warpgroup, consumer)
        dK, dV = self.accumulators(inputs.mma)  # fp32 [TILE entries, D]
        rFirst = cute.make_rmem_tensor(2, Int32)  # int32 (r)
        for r in range_constexpr(2):
            rFirst[r] = entries.first_row(first_entry + op.tScS[(0, r, 0), 0, 0][0])
        seeing_some, seeing_all = entries.first_row(first_entry), entries.first_row(first_entry + TILE - 1)
        shared.keys_ready.consumer_wait(consumer_state(1))
        state = consumer_state(STAGES)
        for _ in cutlass.range(inputs.group, unroll=1):
            for tile in cutlass.range(row_tiles.first, row_tiles.stop, unroll=1):
                first_row = tile * TILE
                rows_ready.consumer_wait(state)
                if first_row + TILE > seeing_some:
                    mask = MaskOfRows(first_row, seeing_all, rFirst)
                    self.add_row_tile(dK, dV, op, state.index, mask, inputs)
                rows_ready.consumer_release(state)
                state.advance()
        return dK, dV

    @cute.jit
    def epilogue(
        self,
        dK: cute.Tensor,
        dV: cute.Tensor,
        inputs: Inputs,
        shared: SharedDKV,
        work: WorkTile,
        target: tuple[cute.Tensor, Int32],  # partials, and the split
        consumer: Consumer,
    ):
        mPartials, split = target
        dK.store(dK.load() * inputs.scale)
        for i in range_constexpr(2):
            gX = mPartials[split, i, work.batch, None, work.head, None]  # fp32 [entries, D]
            self.store(inputs.mma, (dK, dV)[i], gX, work, consumer)

    @cute.jit
    def store(self, mma: Mmas, acc: cute.Tensor, gX: cute.Tensor, work: WorkTile, consumer: Consumer):
        """Store the fp32 sums of the warpgroup's existing entries to global memory [entries, D]."""
        entry_tile = work.tile * CONSUMERS + consumer.warpgroup
        one = mma.gradients.get_slice(consumer.thread)
        coordinates = one.partition_C(cute.make_identity_tensor((TILE, self.dim)))  # ((c, r, n), 0, 0): (entry, column)
        # fp32 ((c, r, n), 0, 0) of [TILE entries, D]
        tile = one.partition_C(cute.local_tile(gX, (TILE, self.dim), (entry_tile, 0)))
        for r in range_constexpr(2):
            if entry_tile * TILE + coordinates[(0, r, 0), 0, 0][0] < gX.shape[0]:
                cute.autovec_copy(acc[(None, r, None), 0, 0], tile[(None, r, None), 0, 0])


def num_splits(batch: int, rows: int, entries: int, kv_heads: int, group: int) -> int:
    """Number of splits of the rows of each 128 entries: enough for MIN_CTAS, but at least MIN_STEPS row tiles each.

    CTAs thus fill the GPU even when there are few entries.
    """
    ctas = batch * kv_heads * -(-entries // CTA_ROWS)
    return max(1, min(-(-MIN_CTAS // ctas), -(-rows // TILE) * group // MIN_STEPS))


def compressed_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    length: int,
    stride: int,
    scale: float,
    dq: Tensor,
    first_token: int = 0,
) -> tuple[Tensor, Tensor]:
    """Gradients of attention of each token to the compressed entries that have ended. Bitwise reproducible.

    Args:
        q, do: `[B,N,H,D]`, bf16 or fp16, rows aligned (device.vectorizable), N > 0; every row of `do` must be finite.
        k, v: `[B,entries,H_kv,D]`, dtype and alignment as q, at least one entry.
        lse: fp32 `[B,H,N]`, natural log, last dimension contiguous. Shifted by -log(g) if a gate g weights the row.
            Rows whose lse is not finite contribute nothing.
        delta: fp32 `[B,H,N]`, last dimension contiguous: sum(do * o), with o before gating. Not read where lse is not
            finite.
        length, stride: l and d, tokens per entry and between entries.
        scale: softmax scale.
        dq: like q, output.
        first_token: token index of row 0, if the rows continue a sequence.

    Returns:
        dk and dv, fp32, contiguous.
    """
    batch, rows, heads, dim = q.shape
    _, entries, kv_heads, _ = k.shape
    sizes = length, stride, first_token, scale
    splits = num_splits(batch, rows, entries, kv_heads, heads // kv_heads)
    partials = torch.empty((splits, 2, *k.shape), dtype=torch.float32, device=q.device)
    CompressedDKV.compile(dim, q.dtype).run(q, do, k, v, lse, delta, partials, *sizes)
    CompressedDQ.compile(dim, q.dtype).run(q, do, k, v, lse, delta, dq, *sizes)
    dk, dv = sum_partials(partials).unbind(0)
    return dk, dv
