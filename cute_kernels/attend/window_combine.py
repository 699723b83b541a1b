"""Last kernel of token-mode attention on Hopper: window, forced blocks, combine and gate in one.

    o_win  = softmax over keys i - left <= j <= i                     of the window
    o_f    = softmax over the forced blocks: the first `init`, and the `local` ones that end with the row's own
    o      = sum_s exp(lse_s - lse) o_s                               s over o_f and the slots with a partial
    out    = g_cmp o_cmp + g_slc o + g_win o_win                      or o and o_win are written

Local blocks are inside the window: they cost no products of their own, and o_win does not go through memory.

WindowCombine   a CTA owns CTA_ROWS query rows, tokens x the G heads of a key/value head (pack_gqa), 2 x 64 at a time,
                64 per consumer warpgroup. One ring of stages delivers their operands in the order of use: tiles of 64
                keys and values, from the row's own down to the window's first, then of the initial blocks; the
                partials of each slot used by one of the tokens; o_cmp.

The consumers multiply while the producer prefetches partials, so memory and tensor cores are busy at the same time.
The tiles of a row and their order depend on its token alone, and no row changes another's sums: bits do not depend on
chunks, nor on later tokens.

Floor, 64K tokens, 64 heads over 4, D = 128, n = 16, l' = 64, forced (1, 2), w = 512: partials of 13 slots, 14.0 GB, q
and o_cmp, out, 3.2 GB: 4.1 ms at 4.2 TB/s; concurrently 10 tiles of keys, 1.4 TFLOP, 1.5 ms at 900 TFLOP/s, and 2.7
billion exponentials, 0.7 ms. Keys and values from L2: 10.7 GB.

Limits: sm_90a; D = D_v 64 or 128; G 8, 16 or 32; n <= 32, T n < 2^31; l' a multiple of 64; causal; 0 < local l'
<= w <= 2048; window and selected branch have the same keys and values; TMA: rows 16-byte aligned; 64-bit offsets.
Keys and values must be finite up to the last token of a row's tile of 64, and from the start of the tile with the
window's first key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warpgroup
from torch import Tensor

from cute_kernels.attend.combine_rows import Row, quad_gates
from cute_kernels.attend.views import (
    TokenBlock,
    group_heads,
    group_heads_first,
    group_lse_heads,
    most_token_blocks,
    token_block,
)
from cute_kernels.gate.forward import BRANCHES, Gating, fake_gating
from cute_kernels.lists.worklist import Worklist, fake_slots
from cute_kernels.mma.mma_sync import (
    QUAD,
    acc_as_operand_a,
    acc_mn_view,
    accumulator,
    as_vectors,
    make_warp_mma,
    online_softmax,
    scale_row,
    store_rows,
    transpose_view,
    vector_strides,
)
from cute_kernels.mma.warp import LN_2, LOG2_E, lowest_bit
from cute_kernels.mma.warp_specialized import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    THREADS,
    WARPGROUP_WARPS,
    Consumer,
    accumulator_row,
    consumer_of,
    consumer_state,
    producer_state,
)
from cute_kernels.mma.wgmma import (
    MN,
    REGISTERS,
    SHARED,
    TILE,
    K,
    TmaTensor,
    allocate_tiles,
    as_warpgroup_acc,
    issue_mma,
    ldmatrix_copy,
    make_tma_tensors,
    producer_acquire,
    smem_operand_a,
    smem_operand_b,
    swizzled_tiles,
    tma_loads,
    tma_pipeline,
    warpgroup_mma,
)
from cute_kernels.pool.documents import PackedBlocks, fake_tables
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake, fake_heads, fake_stats

STAGES = 5
"""Stages of the ring, two tiles of 64 x D each; there is no room for more with D = 128."""

CTA_ROWS = 512
"""Maximum query rows per CTA, at most those of a block; TILE per consumer at a time."""

STEP_ROWS = CONSUMERS * TILE


class StepTiles(NamedTuple):
    """Tiles of TILE keys for the rows of a step: from `own` down to `low`, then 0 ... `first` - 1.

    The first `local` of them belong to local blocks.
    """

    own: Int32
    low: Int32
    local: Int32
    first: Int32

    def num_window(self) -> Int32:
        return self.own - self.low + 1

    @cute.jit
    def tile(self, i: Int32) -> Int32:
        window = self.num_window()
        return self.own - i if i < window else i - window


class Sums(NamedTuple):
    """Online-softmax state of a warp's 16 rows."""

    acc: cute.Tensor  # [16, D]
    """fp32, MMA accumulator: P V, not yet divided by the sums of P."""
    rMax: cute.Tensor
    """fp32 (r): maxima of scores, in base 2, of the thread's two rows."""
    rSum: cute.Tensor
    """fp32 (r): sums of P over the thread's columns."""


class Shared(NamedTuple):
    """Shared memory and pipelines."""

    sQ: cute.Tensor  # (TILE, D, CONSUMERS)
    sRing: cute.Tensor  # (TILE, D, 2 STAGES)
    sWeights: cute.Tensor  # fp32 (STEP_ROWS, n or more): lse of a row's slots, then weights
    q_ready: Any
    ring_ready: Any


class TmaTensors(NamedTuple):
    """Tensors that TMA loads."""

    q: TmaTensor  # ((G, T), D, H_kv, B)
    k: TmaTensor  # (N, D, H_kv, B)
    v: TmaTensor
    partials: TmaTensor  # ((G, T), D, n, B H_kv)
    cmp: TmaTensor | None  # like q


class Outputs(NamedTuple):
    """Outputs and gates of all CTAs, [B, H_kv, ...], or of one without B and H_kv. Rows are those of q."""

    lse: cute.Tensor  # fp32 [..., T, G]
    win_lse: cute.Tensor | None  # fp32 [..., T, G]
    out: cute.Tensor | None  # 16 bits [..., T, G, D], with gates
    weight: cute.Tensor | None  # [H, 3, D] of all CTAs, [G, 3, D] of one, see CombineInputs
    gates: cute.Tensor | None  # [..., T, G, 3], see CombineInputs
    o_win: cute.Tensor | None  # 16 bits [..., T, G, D]
    o_slc: cute.Tensor | None  # 16 bits [..., T, G, D]: o of the selected branch


class WorkTile(NamedTuple):
    """Tokens of a CTA."""

    kv_head: Int32
    batch: Int32
    at: TokenBlock
    first: Int32
    """First token."""
    steps: tuple[Int32, Int32]
    """Range of steps."""
    left: Int32
    """Number of keys before its own that a token sees in the window."""
    gSlotBlocks: cute.Tensor  # int32 [T, n]


class WindowCombine:
    """Roles: warpgroup 0 is the producer, whose warp 0 issues TMA; warpgroups 1 and 2 are the consumers.

    Args:
        dim, dtype: D = D_v and their 16-bit type.
        group: G.
        slots: n.
        size, init, local: l', and number of initial and local blocks.
        gated: write out.
    """

    def __init__(
        self, dim: int, dtype: Any, group: int, slots: int, size: int, init: int, local: int, *, gated: bool
    ) -> None:
        self.dim, self.dtype, self.group, self.slots = dim, dtype, group, slots
        self.size, self.init, self.local, self.gated = size, init, local, gated
        self.tile_tokens = TILE // group
        self.step_tokens = STEP_ROWS // group
        self.cta_tokens = min(CTA_ROWS // group, size)
        self.lane_slots = -(-slots // QUAD)
        """Number of slots of a row held by one lane of its quad."""
        self.tile_bytes = TILE * dim * dtype.width // 8

    @staticmethod
    @compiled_once
    def compile(
        dim: int,
        dtype: torch.dtype,
        group: int,
        slots: int,
        size: int,
        init: int,
        local: int,
        gating: tuple[torch.dtype | None, torch.dtype | None] | None,
        keeps: tuple[bool, bool, bool],
        packed: bool,
    ) -> Kernel:
        """Args: gating: dtypes of weight and gates; None: not gated. keeps: if o, o_win and its lse are written."""
        lse, win_lse = fake_stats(2)
        o, o_win, out = fake_heads(dtype, dim, dim, dim)
        keeps_o, keeps_win, keeps_win_lse = keeps
        gates: tuple[Any, ...] = (None,) * 4
        if gating is not None:
            weight, given, o_cmp, *_ = fake_gating(dim, dtype, *gating, False)
            gates = out, weight, given, o_cmp
        return compile_kernel(
            WindowCombine(dim, CUTE_DTYPES[dtype], group, slots, size, init, local, gated=gating is not None),
            *fake_heads(dtype, dim, dim, dim),
            fake_slots(),
            fake(dtype, None, None, None, group, dim),
            fake(torch.float32, None, None, None, group, aligned=False),
            lse,
            win_lse if keeps_win_lse else None,
            *gates,
            o_win if keeps_win else None,
            o if keeps_o else None,
            fake_tables()[0] if packed else None,
            Int32(0),
            Int32(0),
            Float32(0.0),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D], of the tokens first_token ...
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,
        mSlotBlocks: cute.Tensor,  # Worklist.slot_blocks
        mOPartial: cute.Tensor,  # [B, H_kv, T n, G, D], contiguous
        mLsePartial: cute.Tensor,  # fp32 [B, H_kv, T n, G]
        mLse: cute.Tensor,  # fp32 [B, H, T]
        mWinLse: cute.Tensor | None,  # fp32 [B, H, T], of the window
        mOut: cute.Tensor | None,  # [B, T, H, D], as those below; with gates
        mW: cute.Tensor | None,  # [H, 3, D]
        mG: cute.Tensor | None,  # [B, T, H, 3]: output with mW, input without
        mCmp: cute.Tensor | None,
        mWin: cute.Tensor | None,
        mSlc: cute.Tensor | None,
        mBounds: cute.Tensor | None,  # PackedBlocks.bounds
        left: Int32,
        first_token: Int32,
        scale: Float32,
        stream: Any,
    ):
        group = self.group
        rows = [_group_rows(mQ, group), mK, mV, _partial_rows(mOPartial, self.slots)]
        if const_expr(mCmp is not None):
            rows.append(_group_rows(mCmp, group))
        q, k, v, partials, *cmp = make_tma_tensors(cpasync.CopyBulkTensorTileG2SOp(), self.dtype, self.dim, *rows)
        blocks = most_token_blocks(mQ.shape[1], self.size, first_token, mBounds)
        outputs = Outputs(
            group_lse_heads(mLse, group),
            None if const_expr(mWinLse is None) else group_lse_heads(mWinLse, group),
            group_heads_first(mOut, group),
            mW,
            group_heads_first(mG, group),
            group_heads_first(mWin, group),
            group_heads_first(mSlc, group),
        )
        self.kernel(
            TmaTensors(q, k, v, partials, None if const_expr(mCmp is None) else cmp[0]),
            mSlotBlocks,
            mLsePartial,
            outputs,
            mBounds,
            mQ.shape[1],
            left,
            first_token,
            scale,
            warpgroup_mma(self.dtype, TILE, SHARED, K, K),
            warpgroup_mma(self.dtype, self.dim, REGISTERS, K, MN),
        ).launch(
            grid=[blocks * (self.size // self.cta_tokens), mK.shape[2], mK.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        tma: TmaTensors,
        mSlotBlocks: cute.Tensor,
        mLsePartial: cute.Tensor,
        outputs: Outputs,
        mBounds: cute.Tensor | None,
        num_rows: Int32,
        left: Int32,
        first_token: Int32,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_o: cute.TiledMma,
    ):
        thread, _, _ = cute.arch.thread_idx()
        index, kv_head, batch = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        parts = const_expr(self.size // self.cta_tokens)
        at = token_block(index // parts, self.size, num_rows, first_token, mBounds)
        first = at.block * self.size + index % parts * self.cta_tokens  # first of the CTA's tokens
        # Steps start at multiples of 128 / G tokens of a sequence or document, wherever its queries start, and tiles of
        # keys at multiples of 64: a step is inside one tile and one block
        first_step = cutlass.max(at.start - first, 0) // self.step_tokens
        stop_step = cute.ceil_div(cutlass.min(at.end - first, self.cta_tokens), self.step_tokens)
        steps = (first_step, stop_step if at.end > at.start else first_step)
        shared = self.allocate()
        work = WorkTile(kv_head, batch, at, first, steps, left, mSlotBlocks[batch, kv_head, None, None])

        if warp_index < WARPGROUP_WARPS:  # producer
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_index == 0:
                self.load(shared, tma, work)
        else:  # consumers
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            gLsePartial = mLsePartial[batch, kv_head, None, None]  # fp32 [T n, G]
            consumer = consumer_of(thread, warp_index)
            self.consume(shared, mma_s, mma_o, work, gLsePartial, self.of_cta(outputs, work), scale, consumer)

    def of_cta(self, outputs: Outputs, work: WorkTile) -> Outputs:
        """Slice for the CTA's batch and key/value head."""
        slices = [_of_cta(x, work.batch, work.kv_head) for x in outputs._replace(weight=None)]
        heads, weight = work.kv_head * self.group, outputs.weight
        return Outputs(*slices)._replace(weight=weight and cute.domain_offset((heads, 0, 0), weight))

    def allocate(self) -> Shared:
        smem = SmemAllocator()
        layouts = [swizzled_tiles(self.dtype, self.dim, count) for count in (CONSUMERS, 2 * STAGES)]
        # (TILE, D, CONSUMERS) and (TILE, D, 2 STAGES)
        sQ, sRing = (allocate_tiles(smem, self.dtype, layout) for layout in layouts)
        # Odd row stride in words, so that lanes of different rows read one column without bank conflicts
        weights = cute.make_ordered_layout((STEP_ROWS, self.slots | 1), order=(1, 0))
        sWeights = smem.allocate_tensor(Float32, weights, 16)
        warps = CONSUMERS * WARPGROUP_WARPS
        # Full once TMA has written the queries of a step; empty once the 8 consumer warps have awaited their last S and
        # read their gates
        q_ready = tma_pipeline(1, warps, CONSUMERS * self.tile_bytes, defer_sync=True)
        # Full once TMA has written a tile of K and one of V, or the partials or o_cmp of each consumer; empty once the
        # 8 consumer warps have awaited P V, or read the partials or o_cmp
        ring_ready = tma_pipeline(STAGES, warps, 2 * self.tile_bytes)
        return Shared(sQ, sRing, sWeights, q_ready, ring_ready)

    # Tiles and slots of a step of the CTA

    @cute.jit
    def key_tiles(self, first: Int32, left: Int32) -> StepTiles:
        """Args: first: the first token of the step."""
        own = first // TILE
        local = cutlass.max(first // self.size - self.local + 1, 0) * (self.size // TILE)
        low = cutlass.max(first - left, 0) // TILE
        init = cutlass.min(Int32(self.init * (self.size // TILE)), local)
        return StepTiles(own, low, own - local + 1, init)

    @cute.jit
    def slots_with_partials(self, gSlotBlocks: cute.Tensor, at: TokenBlock, first: Int32) -> Int32:
        """Bitmask of the slots in which some token of the step has a block. All lanes of a warp must call this."""
        lane, has_block = cute.arch.lane_idx(), Int32(0)
        for i in range_constexpr(self.step_tokens):
            token = first + i
            if (lane < self.slots) & (token >= at.start) & (token < at.end):
                if gSlotBlocks[at.first_row + token, lane] >= 0:
                    has_block = Int32(1)
        return cute.arch.vote_ballot_sync(has_block != 0)

    # Producer

    @cute.jit
    def load(self, shared: Shared, tma: TmaTensors, work: WorkTile):
        """Warp 0: load the operands of all steps of the CTA."""
        at, kv_head, batch, kv_heads = work.at, work.kv_head, work.batch, tma.k.coordinates.shape[2]
        first_row, first_key = ((0, at.first_row + work.first), 0, 0, 0), (at.first_key, 0, 0, 0)
        load_q = tma_loads((_from(tma.q, first_row), shared.sQ))
        load_partials = tma_loads((_from(tma.partials, first_row), shared.sRing))
        load_k, load_v = (tma_loads((_from(x, first_key), shared.sRing)) for x in (tma.k, tma.v))
        state, q_state = producer_state(STAGES), producer_state(1)
        for step in cutlass.range(work.steps[0], work.steps[1], unroll=1):
            first_token = work.first + step * self.step_tokens
            tiles = self.key_tiles(first_token, work.left)
            slots = self.slots_with_partials(work.gSlotBlocks, at, first_token)
            barrier = producer_acquire(shared.q_ready, q_state)
            for i in range_constexpr(CONSUMERS):
                load_q((step * CONSUMERS + i, kv_head, batch), i, barrier)
            q_state.advance()
            for i in cutlass.range(tiles.num_window() + tiles.first, unroll=1):
                barrier = producer_acquire(shared.ring_ready, state)
                load_k((tiles.tile(i), kv_head, batch), 2 * state.index, barrier)
                load_v((tiles.tile(i), kv_head, batch), 2 * state.index + 1, barrier)
                state.advance()
            while slots != 0:
                barrier = producer_acquire(shared.ring_ready, state)
                for i in range_constexpr(CONSUMERS):
                    place = step * CONSUMERS + i, lowest_bit(slots), batch * kv_heads + kv_head
                    load_partials(place, 2 * state.index + i, barrier)
                state.advance()
                slots &= slots - 1
            if const_expr(self.gated):
                load_cmp = tma_loads((_from(tma.cmp, first_row), shared.sRing))  # type: ignore[arg-type]
                barrier = producer_acquire(shared.ring_ready, state)
                for i in range_constexpr(CONSUMERS):
                    load_cmp((step * CONSUMERS + i, kv_head, batch), 2 * state.index + i, barrier)
                state.advance()

    # Consumers

    @cute.jit
    def consume(
        self,
        shared: Shared,
        mma_s: cute.TiledMma,
        mma_o: cute.TiledMma,
        work: WorkTile,
        gLsePartial: cute.Tensor,  # fp32 [T n, G]
        outputs: Outputs,
        scale: Float32,
        consumer: Consumer,
    ):
        at, left, gSlotBlocks = work.at, work.left, work.gSlotBlocks
        state, q_state = consumer_state(STAGES), consumer_state(1)
        sQ, sRing, sWeights, q_ready, ring_ready = shared
        tSrQ = smem_operand_a(mma_s, sQ)[None, None, None, consumer.warpgroup]  # [TILE rows, D]
        # [TILE keys, D, 2 STAGES] and [D, TILE keys, 2 STAGES]
        tSrK, tOrV = smem_operand_b(mma_s, sRing), smem_operand_b(mma_o, transpose_view(sRing))
        # [16, D]
        sWarpQ = cute.local_tile(
            sQ[None, None, consumer.warpgroup], (16, self.dim), (consumer.warp % WARPGROUP_WARPS, 0)
        )
        # fp32 (rows from the lane's first one on, n or more)
        sLaneWeights = cute.domain_offset((consumer.warpgroup * TILE + accumulator_row(consumer, 0), 0), sWeights)
        read_rows = ldmatrix_copy(mma_o, self.dtype, consumer.thread)
        tCsRing = read_rows.partition_S(sRing)  # (., ., ., 2 STAGES)

        for step in cutlass.range(work.steps[0], work.steps[1], unroll=1):
            first_token = work.first + step * self.step_tokens
            tiles = self.key_tiles(first_token, left)
            slots = self.slots_with_partials(gSlotBlocks, at, first_token)
            tile_token = first_token + consumer.warpgroup * self.tile_tokens
            rows = [self.row(consumer, r, tile_token, at) for r in range(2)]
            rTokens = cute.make_rmem_tensor(2, Int32)  # int32 (r)
            for r in range_constexpr(2):
                rTokens[r] = tile_token + accumulator_row(consumer, r) // self.group
                self.load_lse(gSlotBlocks, gLsePartial, rows[r], sLaneWeights[8 * r, None])

            # Window and forced blocks: S = Q K^T  [16, TILE], O += P V  [16, D] per warp
            q_ready.consumer_wait(q_state)
            window = self.make_sums()  # fp32 [16, D] per warp
            for i in cutlass.range(tiles.local, unroll=1):
                S = self.mma_qk(ring_ready, state, mma_s, tSrQ, tSrK)  # fp32 [16, TILE keys]
                self.mask(S, tiles.tile(i) * TILE, tile_token, rTokens, left)
                self.softmax_and_mma_pv(S, window, ring_ready, state, mma_o, tOrV, scale)
                state.advance()
            # So far both have attended to the local blocks alone, so forced blocks continue from a copy of the sums
            forced = self.make_sums()
            for x, y in zip(forced, window, strict=True):
                x.store(y.load())
            for i in cutlass.range(tiles.local, tiles.num_window(), unroll=1):
                S = self.mma_qk(ring_ready, state, mma_s, tSrQ, tSrK)
                self.mask(S, tiles.tile(i) * TILE, tile_token, rTokens, left)
                self.softmax_and_mma_pv(S, window, ring_ready, state, mma_o, tOrV, scale)
                state.advance()
            rWin = self.finish_window(window, rows, outputs)  # 16 bits [16, D]
            for _ in cutlass.range(tiles.first, unroll=1):
                S = self.mma_qk(ring_ready, state, mma_s, tSrQ, tSrK)
                self.softmax_and_mma_pv(S, forced, ring_ready, state, mma_o, tOrV, scale)
                state.advance()
            rGates = cute.make_rmem_tensor((BRANCHES, 2), Float32)  # fp32 (branch, r)
            if const_expr(self.gated):
                for r in range_constexpr(2):
                    sRow = sWarpQ[r * 8 + cute.arch.lane_idx() // QUAD, None]  # [D]
                    rGates[None, r].store(quad_gates(outputs.weight, outputs.gates, rows[r], sRow).load())
            cute.arch.sync_warp()
            q_ready.consumer_release(q_state)
            q_state.advance()

            # Combine
            rInverse = self.weigh(forced, sLaneWeights, rows, outputs)  # fp32 (r)
            acc_o_mn = acc_mn_view(forced.acc)  # fp32 (c, r, 0, n) of [16, D]
            rX = cute.make_rmem_tensor_like(forced.acc, self.dtype)  # 16 bits [16, D]: partials, then o_cmp
            while slots != 0:
                slot = lowest_bit(slots)
                weights = (sLaneWeights[0, slot], sLaneWeights[8, slot])
                ring_ready.consumer_wait(state)
                stage = 2 * state.index + consumer.warpgroup
                cute.copy(read_rows, tCsRing[None, None, None, stage], read_rows.retile(as_warpgroup_acc(rX)))
                for r in range_constexpr(2):
                    _add_row(acc_o_mn, rX, r, weights[r])
                cute.arch.sync_warp()
                ring_ready.consumer_release(state)
                state.advance()
                slots &= slots - 1

            # Gate
            for r in range_constexpr(2):
                scale_row(acc_o_mn[None, r, 0, None], rInverse[r])
            rO = cute.make_rmem_tensor_like(forced.acc, self.dtype)  # 16 bits [16, D]
            rO.store(forced.acc.load().to(self.dtype))
            self.store_rows(rO, outputs.o_slc, consumer, tile_token, at)
            self.store_rows(rWin, outputs.o_win, consumer, tile_token, at)
            if const_expr(self.gated):
                ring_ready.consumer_wait(state)
                stage = 2 * state.index + consumer.warpgroup
                cute.copy(read_rows, tCsRing[None, None, None, stage], read_rows.retile(as_warpgroup_acc(rX)))
                cute.arch.sync_warp()
                ring_ready.consumer_release(state)
                state.advance()
                self.gate((rX, rO, rWin), rGates, rO)
                self.store_rows(rO, outputs.out, consumer, tile_token, at)

    @cute.jit
    def row(self, consumer: Consumer, r: cutlass.Constexpr[int], tile_token: Int32, at: TokenBlock) -> Row:
        """The r-th of the thread's two rows of a tile."""
        i = accumulator_row(consumer, r)
        token = tile_token + i // self.group
        is_valid = (token >= at.start) & (token < at.end)
        existing = cutlass.min(cutlass.max(token, at.start), at.end - 1)
        return Row(at.first_row + existing, i % self.group, is_valid)

    @cute.jit
    def load_lse(self, gSlotBlocks: cute.Tensor, gLsePartial: cute.Tensor, row: Row, sLse: cute.Tensor):
        """lse of a row's partials, in base 2, -inf where there is none; lane j of a quad has slots j, j + QUAD ..."""
        for k in range_constexpr(self.lane_slots):
            slot = k * QUAD + cute.arch.lane_idx() % QUAD
            if slot < self.slots:
                lse = -Float32.inf
                if row.is_valid & (gSlotBlocks[row.token, slot] >= 0):
                    lse = gLsePartial[row.token * self.slots + slot, row.head] * LOG2_E
                sLse[slot] = lse

    def make_sums(self) -> Sums:
        """Empty softmax state."""
        sums = Sums(
            accumulator(make_warp_mma(self.dtype, 1), (16, self.dim)),
            cute.make_rmem_tensor(2, Float32),
            cute.make_rmem_tensor(2, Float32),
        )
        for x, value in zip(sums, (0.0, -Float32.inf, 0.0), strict=True):
            x.fill(value)
        return sums

    @cute.jit
    def mma_qk(
        self, ring_ready: Any, state: Any, mma_s: cute.TiledMma, tSrQ: cute.Tensor, tSrK: cute.Tensor
    ) -> cute.Tensor:
        """S of a tile of keys, as an `accumulator` of a warp."""
        S = accumulator(make_warp_mma(self.dtype, 1), (16, TILE))  # fp32 [16, TILE keys]
        ring_ready.consumer_wait(state)
        issue_mma(mma_s, as_warpgroup_acc(S), tSrQ, tSrK[None, None, None, 2 * state.index], False)
        warpgroup.wait_group(0)
        return S

    @cute.jit
    def mask(self, S: cute.Tensor, first_key: Int32, tile_token: Int32, rTokens: cute.Tensor, left: Int32):
        """Set scores of keys outside a row's window to -inf. Args: rTokens: tokens of the thread's two rows."""
        last_token = tile_token + self.tile_tokens - 1
        if (first_key + TILE - 1 > tile_token) | (first_key < last_token - left):
            scores = acc_mn_view(S)  # fp32 (c, r, 0, n)
            for r in range_constexpr(2):
                last = rTokens[r] - first_key
                for n in range_constexpr(TILE // 8):
                    for c in range_constexpr(2):
                        key = n * 8 + cute.arch.lane_idx() % QUAD * 2 + c
                        sees = (key <= last) & (key >= last - left)
                        scores[c, r, 0, n] = scores[c, r, 0, n] if sees else -Float32.inf

    @cute.jit
    def softmax_and_mma_pv(
        self,
        S: cute.Tensor,
        sums: Sums,
        ring_ready: Any,
        state: Any,
        mma_o: cute.TiledMma,
        tOrV: cute.Tensor,
        scale: Float32,
    ):
        """S becomes P; O += P V."""
        online_softmax(acc_mn_view(S), acc_mn_view(sums.acc), sums.rMax, sums.rSum, scale * LOG2_E)
        rP = acc_as_operand_a(S, self.dtype)  # 16 bits [16, TILE keys]
        issue_mma(mma_o, as_warpgroup_acc(sums.acc), rP, tOrV[None, None, None, 2 * state.index + 1], True)
        warpgroup.wait_group(0)
        ring_ready.consumer_release(state)

    @cute.jit
    def finish_window(self, window: Sums, rows: list[Row], outputs: Outputs) -> cute.Tensor:
        """o of the window, rounded; store its lse if requested."""
        for r in range_constexpr(2):
            total = cute.arch.warp_reduction_sum(window.rSum[r], threads_in_group=QUAD)
            inverse = Float32(0.0) if total == 0.0 else 1.0 / total
            scale_row(acc_mn_view(window.acc)[None, r, 0, None], inverse)
            if const_expr(outputs.win_lse is not None):
                _store_lse(outputs.win_lse, rows[r], window.rMax[r], total)
        rWin = cute.make_rmem_tensor_like(window.acc, self.dtype)  # 16 bits [16, D]
        rWin.store(window.acc.load().to(self.dtype))
        return rWin

    @cute.jit
    def weigh(self, forced: Sums, sLaneWeights: cute.Tensor, rows: list[Row], outputs: Outputs) -> cute.Tensor:
        """Combine the forced blocks and the slots of each row into one softmax, and store its lse.

        Args:
            sLaneWeights: from `load_lse`; replaced by weights, which are negative where there is no partial.

        Returns:
            Factors for the thread's two rows once all partials are added.
        """
        rInverse = cute.make_rmem_tensor(2, Float32)  # fp32 (r)
        lane = cute.arch.lane_idx() % QUAD
        for r in range_constexpr(2):
            total = cute.arch.warp_reduction_sum(forced.rSum[r], threads_in_group=QUAD)
            top = -Float32.inf
            for k in range_constexpr(self.lane_slots):
                if k * QUAD + lane < self.slots:
                    top = cute.arch.fmax(top, sLaneWeights[8 * r, k * QUAD + lane])
            top = cute.arch.fmax(cute.arch.warp_reduction_max(top, threads_in_group=QUAD), forced.rMax[r])
            base = Float32(0.0) if top == -Float32.inf else top
            rescale = cute.math.exp2(forced.rMax[r] - base, fastmath=True)
            scale_row(acc_mn_view(forced.acc)[None, r, 0, None], rescale)
            others = Float32(0.0)
            for k in range_constexpr(self.lane_slots):
                slot = k * QUAD + lane
                if slot < self.slots:
                    lse = sLaneWeights[8 * r, slot]
                    weight = cute.math.exp2(lse - base, fastmath=True)
                    sLaneWeights[8 * r, slot] = Float32(-1.0) if lse == -Float32.inf else weight
                    others += weight
            total = total * rescale + cute.arch.warp_reduction_sum(others, threads_in_group=QUAD)
            _store_lse(outputs.lse, rows[r], base, total)
            rInverse[r] = Float32(0.0) if total == 0.0 else 1.0 / total
        cute.arch.sync_warp()
        return rInverse

    @cute.jit
    def gate(self, branches: tuple[cute.Tensor, ...], rGates: cute.Tensor, rOut: cute.Tensor):
        """out of a warp's rows, which may alias a branch; bitwise equal to `gate.forward.weighted_sum`."""
        out, *inputs = (acc_mn_view(x) for x in (rOut, *branches))
        for r in range_constexpr(2):
            for n in range_constexpr(self.dim // 8):
                for c in range_constexpr(2):
                    value = inputs[0][c, r, 0, n].to(Float32) * rGates[0, r]
                    for b in range_constexpr(1, BRANCHES):
                        value = cute.math.fma(inputs[b][c, r, 0, n].to(Float32), rGates[b, r], value)
                    out[c, r, 0, n] = value.to(self.dtype)

    @cute.jit
    def store_rows(
        self,
        rRounded: cute.Tensor,
        gX: cute.Tensor | None,  # [T, G, D]; None: discard
        consumer: Consumer,
        tile_token: Int32,
        at: TokenBlock,
    ):
        """Store those of a warp's 16 rounded rows that exist."""
        if const_expr(gX is not None):
            i = consumer.warp % WARPGROUP_WARPS * 16 + cute.arch.lane_idx() % 16
            token, head = i // self.group, i % self.group
            exists = (tile_token + token >= at.start) & (tile_token + token < at.end)
            token_stride, head_stride = vector_strides(gX)
            start = token * token_stride + head * head_stride if exists else Int32(-1)
            # [T, G, D] from the tile's first token on
            gTile = cute.domain_offset((at.first_row + tile_token, 0, 0), gX)
            store_rows(acc_mn_view(rRounded), as_vectors(gTile), start)


def _group_rows(mX: cute.Tensor, group: int) -> cute.Tensor:
    """[B, T, H, D] as ((G, T), D, H_kv, B)."""
    grouped = group_heads(mX, group)
    batches, tokens, kv_heads, heads, dim = grouped.layout.shape
    batch_stride, token_stride, kv_stride, head_stride, dim_stride = grouped.layout.stride
    layout = cute.make_layout(
        ((heads, tokens), dim, kv_heads, batches),
        stride=((head_stride, token_stride), dim_stride, kv_stride, batch_stride),
    )
    return cute.make_tensor(grouped.iterator, layout)


def _partial_rows(mX: cute.Tensor, slots: int) -> cute.Tensor:
    """[B, H_kv, T n, G, D], contiguous, as ((G, T), D, n, B H_kv)."""
    batches, kv_heads, places, group, dim = mX.layout.shape
    _, kv_stride, place_stride, head_stride, dim_stride = mX.layout.stride
    layout = cute.make_layout(
        ((group, places // slots), dim, slots, batches * kv_heads),
        stride=((head_stride, place_stride * slots), dim_stride, place_stride, kv_stride),
    )
    return cute.make_tensor(mX.iterator, layout)


def _from(x: TmaTensor, start: Any) -> TmaTensor:
    """Restrict to rows or keys from a coordinate on, which may be negative: TMA fills with zeros there."""
    return x._replace(coordinates=cute.domain_offset(start, x.coordinates))


def _of_cta(mX: cute.Tensor | None, batch: Int32, kv_head: Int32) -> cute.Tensor | None:
    """Slice of [B, H_kv, ...] for a CTA; None stays None."""
    if mX is None:
        return None
    rest = [None] * (cute.rank(mX) - 2)
    place = (batch, kv_head, *rest)
    return mX[place]


@cute.jit
def _store_lse(gLse: cute.Tensor, row: Row, base: Float32, total: Float32):
    """Store the log of `total` 2^base."""
    if row.is_valid & (cute.arch.lane_idx() % QUAD == 0):
        gLse[row.token, row.head] = (base + cute.math.log2(total, fastmath=True)) * LN_2


@cute.jit
def _add_row(acc_o_mn: cute.Tensor, rX: cute.Tensor, r: cutlass.Constexpr[int], weight: Float32):
    """Row r of o += weight X. A negative weight means that there is no partial and X is uninitialized."""
    is_absent = weight < 0.0
    mask = Int32(0) if is_absent else Int32(-1)
    factor = Float32(0.0) if is_absent else weight
    pairs = cute.recast_tensor(acc_mn_view(rX), Int32)  # int32 (1, r, 0, n)
    for n in range_constexpr(cute.size(pairs, mode=[3])):
        pairs[0, r, 0, n] = pairs[0, r, 0, n] & mask
    X = acc_mn_view(rX)  # 16 bits (c, r, 0, n)
    for n in range_constexpr(cute.size(X, mode=[3])):
        for c in range_constexpr(2):
            acc_o_mn[c, r, 0, n] = cute.math.fma(factor, X[c, r, 0, n].to(Float32), acc_o_mn[c, r, 0, n])


class WindowBranch(NamedTuple):
    """Window branch, if computed by the selected branch's last kernel."""

    left: int
    """Number of keys before its own that a token sees."""
    o: Tensor | None
    """`[B,T,H,D]`, output for its o; None: discard."""
    lse: Tensor | None
    """fp32 `[B,H,T]`, output for its lse; None: discard."""

    def narrow(self, batches: slice, rows: slice, heads: slice) -> WindowBranch:
        """Restrict to some batches, rows and heads."""
        o, lse = self.o, self.lse
        return WindowBranch(
            self.left,
            None if o is None else o[batches, rows, heads],
            None if lse is None else lse[batches, heads, rows],
        )


def window_combine(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    worklist: Worklist,
    o_partial: Tensor,
    *,
    lse_partial: Tensor,
    o: Tensor | None,
    lse: Tensor,
    window: WindowBranch,
    gating: Gating | None,
    size: int,
    scale: float,
    init: int,
    local: int,
    packed: PackedBlocks | None = None,
) -> None:
    """Attend to window and forced blocks, add the partials of the other blocks, and gate.

    Args:
        q, k, v, size, scale, packed: see `kv_outer.kv_outer_forward`; already checked, for the worklist's tokens.
        worklist: lists the blocks that are not forced.
        o_partial, lse_partial: `[B,H_kv,T n,G,D]` contiguous and fp32 `[B,H_kv,T n,G]`, read only for slots that have a
            block.
        o: `[B,T,H,D]`, output for o of the selected branch; None: discard.
        lse: fp32 `[B,H,T]`, output for its lse, natural log. Rows that belong to no query are left untouched, here and
            in all results.
        window: at most MAX_COMBINED_WINDOW keys, in which the local blocks are.
        gating: for these tokens and heads: also write out. Its o_win and o_slc are ignored.
    """
    kept = o is not None, window.o is not None, window.lse is not None
    gates: tuple[Tensor | None, ...] = (None,) * 4
    variant = None
    if gating is not None:
        gates, variant = (gating.out, gating.gate_proj_weight, gating.gates, gating.o_cmp), gating.variant[:2]
    run = WindowCombine.compile(
        q.shape[3],
        q.dtype,
        o_partial.shape[3],
        worklist.slot_blocks.shape[3],
        size,
        init,
        local,
        variant,
        kept,
        packed is not None,
    ).run
    partials = worklist.slot_blocks, o_partial, lse_partial
    bounds = None if packed is None else packed.bounds
    numbers = window.left, worklist.first_token, scale
    run(q, k, v, *partials, lse, window.lse, *gates, window.o, o, bounds, *numbers)
