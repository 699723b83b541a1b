"""Query-outer attention per token, exact: a CTA keeps the query rows of a work tile, and KV blocks stream past them.

    S_ij = scale q_i . k_j        j <= i in the blocks that token i selected
    o_i = sum_j exp(S_ij - lse_i) v_j        lse_i = log sum_j exp(S_ij)

A work tile is as many tokens as fill 128 query rows with the G heads of their key/value head (pack_gqa). Its CTA lists
each block that any of its tokens selected once, in ascending order, with a bit per token that selected it. Then it runs
flash attention over this list, with scores masked by these bits and by causality. A block that a row did not select
leaves the row's bits unchanged: P is 0 and o is rescaled by 1. The result of a token therefore does not depend on the
selections of the other tokens of its tile, and nothing leaks from the future.

It is faster when neighbors agree, since a tile multiplies the union of its tokens' blocks. The work of kv_outer.py does
not depend on the selections. `plan.per_token` chooses between them.

Floor, 64K tokens, 64 heads over 4, D = 128, n = 16, l' = 64, u blocks a tile of 8 tokens: u / 16 times 2.2 TFLOP, 3.7
ms at 600 TFLOP/s; q and o once, 2 GB, 0.5 ms; keys and values from L2, u x 32 KB a tile. Random blocks: u = 98.

Limits: WGMMA on sm_90a, mma.sync on sm_100a; D and D_v 64 or 128; l' a multiple of 64; G up to 128; rows 16-byte
aligned; selected blocks must be finite after a token too.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from torch import Tensor

from cute_kernels.attend.checks import check_token_attention
from cute_kernels.attend.views import block_bounds, group_heads
from cute_kernels.limits import MAX_QUERY_OUTER_SLOTS, QUERY_OUTER_ROWS, query_outer_tokens
from cute_kernels.lists.worklist import fake_packed, fake_slots, packed_tables, position_of, selected_block
from cute_kernels.mma.mma_sync import (
    QUAD,
    acc_as_operand_a,
    acc_mn_view,
    accumulator,
    as_vectors,
    gather_rows,
    gemm_registers,
    gemm_smem,
    load_block,
    make_warp_mma,
    mask_after,
    online_softmax,
    scale_row,
    store_rows,
    transpose_view,
)
from cute_kernels.mma.warp import LANES, LN_2, LOG2_E
from cute_kernels.mma.wgmma import (
    MN,
    REGISTERS,
    TILE,
    K,
    allocate_tiles,
    as_warpgroup_acc,
    issue_mma,
    load_operand_a,
    smem_operand_b,
    swizzled_tiles,
    warpgroup_mma,
)
from cute_kernels.pool.documents import PackedBlocks
from cute_kernels.runtime.device import has_warpgroups
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import (
    CUTE_DTYPES,
    VECTOR,
    Kernel,
    compile_kernel,
    compiled_once,
    fake,
    fake_heads,
    fake_stats,
)

WARP_ROWS = 16
WARPS = QUERY_OUTER_ROWS // WARP_ROWS
THREADS = WARPS * LANES

STAGES = 3
"""Buffers of TILE keys and values: one is multiplied while the others fill."""


class QueryOuterForward:
    """Work tile: `tokens` consecutive tokens of a key/value head with its G query heads.

    Args:
        dim, v_dim, dtype: D, D_v and their 16-bit type.
        group: G.
        slots: n, slots per token.
        size: l', tokens per block.
        warpgroups: use WGMMA.
    """

    def __init__(self, dim: int, v_dim: int, dtype: Any, group: int, slots: int, size: int, warpgroups: bool) -> None:
        self.dim, self.v_dim, self.dtype, self.group, self.slots, self.size = dim, v_dim, dtype, group, slots, size
        self.warpgroups = warpgroups
        self.tokens = query_outer_tokens(group)
        self.block_tiles = size // TILE

    @staticmethod
    @compiled_once
    def compile(
        dims: tuple[int, int], dtype: torch.dtype, group: int, slots: int, size: int, packed: bool, warpgroups: bool
    ) -> Kernel:
        dim, v_dim = dims
        return compile_kernel(
            QueryOuterForward(dim, v_dim, CUTE_DTYPES[dtype], group, slots, size, warpgroups),
            *fake_heads(dtype, dim, dim, v_dim),
            fake_slots(),
            fake(dtype, None, None, None, v_dim),
            *fake_stats(1),
            *fake_packed(packed),
            Int32(0),
            Float32(0.0),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D], of the tokens first_token ...
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        mIndices: cute.Tensor,  # int32 [B, H_kv, T, n]
        mO: cute.Tensor,  # [B, T, H, D_v]
        mLse: cute.Tensor,  # fp32 [B, H, T]
        mBounds: cute.Tensor | None,  # PackedBlocks.bounds and .positions
        mPositions: cute.Tensor | None,
        first_token: Int32,
        scale: Float32,
        stream: Any,
    ):
        self.kernel(
            group_heads(mQ, self.group),
            mK,
            mV,
            mIndices,
            group_heads(mO, self.group),
            mLse,
            mBounds,
            mPositions,
            first_token,
            scale,
        ).launch(
            grid=[cute.ceil_div(mIndices.shape[2], self.tokens), mK.shape[2], mK.shape[0]],
            block=[THREADS, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # [B, T, H_kv, G, D]
        mK: cute.Tensor,
        mV: cute.Tensor,
        mIndices: cute.Tensor,
        mO: cute.Tensor,  # [B, T, H_kv, G, D_v]
        mLse: cute.Tensor,
        mBounds: cute.Tensor | None,
        mPositions: cute.Tensor | None,
        first_token: Int32,
        scale: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, kv_head, batch = cute.arch.block_idx()
        tiles, _, _ = cute.arch.grid_dim()
        tile = tiles - 1 - cta  # late tokens have the longest lists
        lane = cute.arch.lane_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        sizes = (self.dim, STAGES), (self.v_dim, STAGES), (self.dim, QUERY_OUTER_ROWS // TILE)
        # (TILE, D, STAGES), (TILE, D_v, STAGES) and (TILE, D, QUERY_OUTER_ROWS / TILE)
        sK, sV, sQ = (allocate_tiles(smem, self.dtype, swizzled_tiles(self.dtype, *size)) for size in sizes)
        num_slots = const_expr(self.tokens * self.slots)
        # int32 [tokens n] each: per slot of the tile, then per listed block
        sSlotBlock, sSlotBits, sBlock, sBlockBits = (
            smem.allocate_tensor(Int32, cute.make_layout(num_slots), 16) for _ in range(4)
        )

        # Load: gather q
        first = tile * self.tokens
        num_tokens = cutlass.min(mIndices.shape[2] - first, self.tokens)
        gQ = cute.domain_offset((first, 0, 0), mQ[batch, None, kv_head, None, None])  # [T - first, G, D]
        gO = cute.domain_offset((first, 0, 0), mO[batch, None, kv_head, None, None])  # [T - first, G, D_v]
        first_token += first
        sWarpgroupQ = sQ[None, None, warp_index * WARP_ROWS // TILE]  # [TILE rows, D]
        # [WARP_ROWS, D]
        sWarpQ = cute.local_tile(sWarpgroupQ, (WARP_ROWS, self.dim), (warp_index % (TILE // WARP_ROWS), 0))
        lane_row = warp_index * WARP_ROWS + lane % WARP_ROWS
        last_row = num_tokens * self.group - 1
        row = cutlass.min(lane_row, last_row)
        start = cute.crd2idx((row // self.group, row % self.group, 0), gQ.layout) // VECTOR
        gather_rows(as_vectors(gQ), sWarpQ, Int32(start))
        cute.arch.cp_async_commit_group()

        # List the blocks
        gIndices = cute.domain_offset((first, 0), mIndices[batch, kv_head, None, None])  # int32 [T - first, n]
        end = first_token + num_tokens  # used without mBounds; tokens past the last are left out below
        for i in range_constexpr((num_slots + THREADS - 1) // THREADS):
            slot_idx = thread + i * THREADS
            if slot_idx < num_slots:
                token, block = slot_idx // self.slots, Int32(-1)
                if token < num_tokens:
                    chosen = gIndices[token, slot_idx % self.slots]
                    position = position_of(first_token + token, mPositions)
                    block = selected_block(chosen, position, end, self.size, mBounds)
                sSlotBlock[slot_idx] = block
        cute.arch.sync_threads()  # sSlotBlock is written
        num_blocks = self._list_blocks(sSlotBlock, sSlotBits, sBlock, sBlockBits, thread)

        # Load: keys and values of the first steps
        steps = num_blocks * self.block_tiles
        gK, gV = mK[batch, None, kv_head, None], mV[batch, None, kv_head, None]  # [N, D], [N, D_v]
        for step in range_constexpr(STAGES - 1):
            if step < steps:
                self._load(gK, gV, sK, sV, sBlock, Int32(step), mBounds)
            cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(STAGES - 1)
        cute.arch.sync_warp()
        rQ = None
        if const_expr(self.warpgroups):
            # 16 bits [TILE rows, D], a warp's part
            rQ = load_operand_a(warpgroup_mma(self.dtype, TILE, REGISTERS, K, K), sWarpgroupQ)

        rToken, rPosition = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Int32)  # int32 (r)
        rMax, rSum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)  # maxima in base 2
        for r in range_constexpr(2):
            rToken[r] = (warp_index * WARP_ROWS + r * 8 + lane // QUAD) // self.group
            rPosition[r] = position_of(first_token + cutlass.min(rToken[r], num_tokens - 1), mPositions)
            rMax[r], rSum[r] = -Float32.inf, Float32(0.0)
        # fp32 [WARP_ROWS, D_v]
        acc_o = accumulator(make_warp_mma(self.dtype, 1), (WARP_ROWS, self.v_dim))
        acc_o.fill(0.0)
        acc_o_mn = acc_mn_view(acc_o)  # (c, r, 0, n)

        # Mainloop
        for step in cutlass.range(steps, unroll=1):
            # Load
            cute.arch.cp_async_wait_group(STAGES - 2)
            if const_expr(self.warpgroups):
                cute.arch.fence_view_async_shared()
            # All copies of this step have landed, and the last step is multiplied: its stage may be filled
            cute.arch.sync_threads()
            if step + STAGES - 1 < steps:
                self._load(gK, gV, sK, sV, sBlock, step + STAGES - 1, mBounds)
            cute.arch.cp_async_commit_group()

            # MMA: S = Q K^T
            acc = accumulator(make_warp_mma(self.dtype, 1), (WARP_ROWS, TILE))  # fp32 [WARP_ROWS, TILE keys]
            self._mma_qk(acc, rQ, sWarpQ, sK, step % STAGES)

            # Softmax
            i_block = step // self.block_tiles
            first_key, _ = block_bounds(sBlock[i_block], self.size, mK.shape[1], mBounds)
            first_key += step % self.block_tiles * TILE
            S = acc_mn_view(acc)  # fp32 (c, r, 0, n)
            self._mask(S, sBlockBits[i_block], rToken, rPosition, first_key)
            online_softmax(S, acc_o_mn, rMax, rSum, scale * LOG2_E)

            # MMA: O += P V  [WARP_ROWS, D_v]
            self._mma_pv(acc_o, acc_as_operand_a(acc, self.dtype), sV, step % STAGES)

        # Epilogue
        for r in range_constexpr(2):
            row_sum = self._normalize(acc_o_mn[None, r, 0, None], rSum[r])
            row = warp_index * WARP_ROWS + r * 8 + lane // QUAD
            if (lane % QUAD == 0) & (row <= last_row):
                base = Float32(0.0) if rMax[r] == -Float32.inf else rMax[r]
                lse = (base + cute.math.log2(row_sum, fastmath=True)) * LN_2
                mLse[batch, kv_head * self.group + row % self.group, first + row // self.group] = lse
        rO = cute.make_rmem_tensor_like(acc_o, self.dtype)  # 16 bits [WARP_ROWS, D_v]
        rO.store(acc_o.load().to(self.dtype))
        vector = cute.crd2idx((lane_row // self.group, lane_row % self.group, 0), gO.layout) // VECTOR
        store_rows(acc_mn_view(rO), as_vectors(gO), Int32(vector) if lane_row <= last_row else Int32(-1))

    @cute.jit
    def _list_blocks(
        self,
        sSlotBlock: cute.Tensor,
        sSlotBits: cute.Tensor,
        sBlock: cute.Tensor,
        sBlockBits: cute.Tensor,
        thread: Int32,
    ) -> Int32:
        """Write each block once, ascending, with a bit per token that selected it. Returns the number of blocks."""
        num_slots = const_expr(self.tokens * self.slots)
        for i in range_constexpr((num_slots + THREADS - 1) // THREADS):
            slot_idx = thread + i * THREADS
            if slot_idx < num_slots:
                block, bits, earlier = sSlotBlock[slot_idx], Int32(0), Int32(0)
                for other in cutlass.range(num_slots, unroll=8):
                    same = sSlotBlock[other] == block
                    bits |= Int32(1) << other // self.slots if same else Int32(0)
                    earlier += Int32(1) if same & (other < slot_idx) else Int32(0)
                sSlotBits[slot_idx] = bits if (block >= 0) & (earlier == 0) else Int32(0)
        cute.arch.sync_threads()  # sSlotBits is written: nonzero in the first slot of each block
        num_blocks = Int32(0)
        for i in range_constexpr((num_slots + THREADS - 1) // THREADS):
            slot_idx = cutlass.min(thread + i * THREADS, num_slots - 1)
            block, lower = sSlotBlock[slot_idx], Int32(0)
            num_blocks = Int32(0)
            for other in cutlass.range(num_slots, unroll=8):
                is_first = Int32(1) if sSlotBits[other] != 0 else Int32(0)
                num_blocks += is_first
                lower += is_first if sSlotBlock[other] < block else Int32(0)
            if sSlotBits[slot_idx] != 0:
                sBlock[lower], sBlockBits[lower] = block, sSlotBits[slot_idx]
        cute.arch.sync_threads()  # the list is written
        return num_blocks

    @cute.jit
    def _load(
        self,
        gK: cute.Tensor,
        gV: cute.Tensor,
        sK: cute.Tensor,
        sV: cute.Tensor,
        sBlock: cute.Tensor,
        step: Int32,
        mBounds: cute.Tensor | None,
    ):
        """Start copying the keys and values of a step into their stage, using all threads."""
        thread, _, _ = cute.arch.thread_idx()
        first, end = block_bounds(sBlock[step // self.block_tiles], self.size, gK.shape[0], mBounds)
        first += step % self.block_tiles * TILE
        load_block(gK, sK[None, None, step % STAGES], first, end, thread, THREADS)
        load_block(gV, sV[None, None, step % STAGES], first, end, thread, THREADS)

    @cute.jit
    def _mma_qk(self, acc: cute.Tensor, rQ: cute.Tensor | None, sWarpQ: cute.Tensor, sK: cute.Tensor, stage: Int32):
        """S of the warp's rows."""
        if const_expr(self.warpgroups):
            mma = warpgroup_mma(self.dtype, TILE, REGISTERS, K, K)
            issue_mma(mma, as_warpgroup_acc(acc), rQ, smem_operand_b(mma, sK)[None, None, None, stage], False)
            warpgroup.wait_group(0)
        else:
            acc.fill(0.0)
            gemm_smem(make_warp_mma(self.dtype, 1), cute.arch.lane_idx(), acc, sWarpQ, sK[None, None, stage], 0)

    @cute.jit
    def _mask(self, S: cute.Tensor, bits: Int32, rToken: cute.Tensor, rPosition: cute.Tensor, first_key: Int32):
        """Set scores of keys that a row does not see to -inf. Args: `bits`: tokens that selected the block."""
        rLastKey = cute.make_rmem_tensor(2, Int32)  # last key that a row sees
        for r in range_constexpr(2):
            is_selected = (bits >> rToken[r] & 1) != 0
            rLastKey[r] = rPosition[r] - first_key if is_selected else Int32(-1)
        if cute.arch.vote_any_sync(cutlass.min(rLastKey[0], rLastKey[1]) < TILE - 1):
            for r in range_constexpr(2):
                mask_after(S[None, r, 0, None], rLastKey[r])

    @cute.jit
    def _normalize(self, rRow: cute.Tensor, lane_sum: Float32) -> Float32:
        """Divide a row of o by its sum; return the sum. Args: `lane_sum`: partial sum over the lane's columns."""
        row_sum = cute.arch.warp_reduction_sum(lane_sum, threads_in_group=QUAD)
        inverse = Float32(0.0) if row_sum == 0.0 else cute.arch.rcp_approx(row_sum)
        scale_row(rRow, inverse)
        return row_sum

    @cute.jit
    def _mma_pv(self, acc: cute.Tensor, rP: cute.Tensor, sV: cute.Tensor, stage: Int32):
        """o += P V."""
        if const_expr(self.warpgroups):
            mma = warpgroup_mma(self.dtype, self.v_dim, REGISTERS, K, MN)
            rV = smem_operand_b(mma, transpose_view(sV))[None, None, None, stage]  # [D_v, TILE keys]
            issue_mma(mma, as_warpgroup_acc(acc), rP, rV, True)
            warpgroup.wait_group(0)
        else:
            sColumns = transpose_view(sV)[None, None, stage]  # [D_v, TILE keys]
            gemm_registers(make_warp_mma(self.dtype, 1), cute.arch.lane_idx(), acc, rP, sColumns, 0, True)


def query_outer_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    size: int,
    scale: float,
    first_token: int = 0,
    packed: PackedBlocks | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments, results and errors as `kv_outer.kv_outer_forward`. In addition:

    Raises:
        ValueError: for more heads per group than a work tile has rows, or too many slots in one.
    """
    check_token_attention(q, k, v, indices, size, scale, first_token, packed)
    batch, tokens, heads, dim = q.shape
    group, slots, v_dim = heads // k.shape[2], indices.shape[3], v.shape[3]
    if group > QUERY_OUTER_ROWS:
        raise ValueError(f"q must have at most {QUERY_OUTER_ROWS} heads for each of k's, got {group}")
    if query_outer_tokens(group) * slots > MAX_QUERY_OUTER_SLOTS:
        most = MAX_QUERY_OUTER_SLOTS // query_outer_tokens(group)
        raise ValueError(f"indices must have at most {most} slots for {group} heads a group, got {slots}")
    o = torch.empty((batch, tokens, heads, v_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if o.numel() == 0 or slots == 0:
        return o.zero_(), lse.fill_(-math.inf)
    if indices.stride(3) != 1:
        indices = indices.clone(memory_format=torch.contiguous_format)
    attend = QueryOuterForward.compile(
        (dim, v_dim), q.dtype, group, slots, size, packed is not None, has_warpgroups(q.device)
    )
    attend.run(q, k, v, indices, o, lse, *packed_tables(packed), first_token, scale)
    return o, lse
