"""Attention of each token to its own blocks of keys, exact: keys stay, queries come to them.

    S_ij = scale q_i . k_j        j <= i in the blocks that token i chose
    o_i = sum_j exp(S_ij - lse_i) v_j        lse_i = log sum_j exp(S_ij)

KVOuterForward   one CTA: keys and values of one block, and a segment of the tokens that chose it (worklist.py). The G
              query heads of a key/value head chose together, so a block has visits x G rows. All keys of a row are
              there at once: one softmax (warp_rows.py), then o in 16 bits and lse to the place of the token's slot.
CombinePartials      the slots of each row added up in their order, weighted by exp(lse_slot - lse): BATCH of them
              loaded at a time, in an online softmax.
CombineAndGate    CombinePartials for NSA: weighs o in registers and adds the other branches to it (forward.py), so that
              o is not read again, nor written unless a backward will read it: bit for bit what gate/forward.py makes of
              it.

Forced blocks, which every token attends to at places known beforehand, need no slots and are not visited:
attend/forced.py attends to all of them first and leaves o and lse where the result goes, and CombinePartials adds the
other slots to what is there (`carry`). For NSA it does so behind the visits and adds the slots, and the other branches,
itself (ForcedCombineAndGate, in place of CombineAndGate): bit for bit the same.

What moves does not depend on whether neighbours agree: q is read n times, o is written and read n times. The slots' o
of a pass stays below PART_BYTES by taking some tokens and key/value heads at a time, of which q is small enough for L2.
Passes run on two streams in turn (streams.py): one visits and adds up where another leaves multiprocessors idle.

Floor, 64K tokens, 64 heads over 4, D = 128, n = 16, l' = 64: 2.2 TFLOP, 3.7 ms at 600 TFLOP/s, and 34 GB for the slots'
o, 8.2 ms at 4.2 TB/s, at the same time; 17 GB of q come from L2 where it is there, else 4.1 ms more. To write out
instead of o CombineAndGate reads 3.2 GB more, where a gate behind CombinePartials moves 5.4 GB, 0.5 ms more;
ForcedCombineAndGate moves 3.2 GB less than ForcedForward and CombineAndGate behind it would. Seen once on an H200,
random blocks: KVOuterForward 8.1 ms, CombinePartials 5.0, one after the other 13.4, on two streams 12.2.

Packed documents (B = 1): their tokens are read where they lie; no block holds those of two.

Limits: WGMMA on sm_90a, mma.sync on sm_100a; D and D_v 64 or 128; l' a multiple of 64, up to 256; any G; for T tokens
of a pass n T G D_v < 2^34; a token's q less than 2^15 numbers from the next one's; 64-bit offsets; rows start at
multiples of 16 bytes. Every block that is attended to must hold finite values behind a token too, or that token's o is
not finite.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels.attend.combine import BATCH
from cute_kernels.attend.forced import forced_blocks_forward, gated_forced_blocks, takes_forced
from cute_kernels.attend.warp_rows import SHARED_PERCENT, WarpRows, block_bounds, heads_of
from cute_kernels.gate.forward import Gating, fake_gating, row_gates, weighted_sum
from cute_kernels.limits import TOKEN_SELECT_SIZES
from cute_kernels.lists.worklist import (
    BLOCK,
    COUNT,
    FIRST,
    Worklist,
    fake_bounds,
    fake_query_rows,
    fake_slots,
    fake_tiles,
    num_work_tiles,
    worklist_chunks,
)
from cute_kernels.mma.warp import LANES, LOG2_E
from cute_kernels.runtime.device import has_warpgroups, vectorized
from cute_kernels.runtime.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.runtime.streams import SideStreams

WARPS = 8
CTAS = 2
"""Of a multiprocessor, at a time."""

ADD_THREADS = 128
PART_BYTES = 520 << 20
"""For o and lse of a pass's slots, 8192 tokens of 16 heads and 16 slots; two passes have theirs at a time."""

SEGMENT_ROWS = 2048
"""The fewest rows of a segment of a cut block."""

DIMS = (64, 128)
SIZES = TOKEN_SELECT_SIZES


class KVOuterForward(WarpRows):
    """Args: dims of k and v; 16-bit type; G; n, slots of a token; l', tokens of a block; whether to use WGMMA."""

    def __init__(self, dim: int, v_dim: int, dtype: Any, group: int, slots: int, size: int, warpgroups: bool) -> None:
        super().__init__(dim, v_dim, dtype, group, slots, size, 1, WARPS, warpgroups)
        self.ctas = CTAS if size * (dim + v_dim) <= 128 * 128 else 1

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D], of the tokens first_token ...
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        mPlaces: cute.Tensor,  # Worklist.query_rows
        mSegments: cute.Tensor,  # Worklist.work_tiles
        mSums: cute.Tensor,  # Worklist.cum_counts
        mO: cute.Tensor,  # [B, H_kv, T n, G, D_v]
        mLse: cute.Tensor,  # fp32 [B, H_kv, T n, G]
        mBounds: cute.Tensor | None,  # Documents.bounds, whose tiles are the blocks
        first_token: Int32,
        scale: Float32,
        stream: Any,
    ):
        self.kernel(
            heads_of(mQ, self.group),
            mK,
            mV,
            mPlaces,
            mSegments,
            mSums,
            mO,
            mLse,
            mBounds,
            first_token,
            scale,
            *self._operands(),
        ).launch(
            grid=[mSegments.shape[3], mK.shape[2], mK.shape[0]],
            block=[WARPS * LANES, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=SHARED_PERCENT,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # [B, T, H_kv, G, D]
        mK: cute.Tensor,
        mV: cute.Tensor,
        mPlaces: cute.Tensor,
        mSegments: cute.Tensor,
        mSums: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        mBounds: cute.Tensor | None,
        first_token: Int32,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_o: cute.TiledMma,
        row_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout,
        value_layout: cute.ComposedLayout,
    ):
        mine = self._begin(mma_s, mma_o, row_layout, key_layout, value_layout)
        segment, kv_head, batch = mine.item, mine.kv_head, mine.batch
        _, used = num_work_tiles(mSums[batch, kv_head, None, None])
        if segment < used:
            gSegment = mSegments[batch, kv_head, None, segment]
            first_key, end = block_bounds(gSegment[BLOCK], self.size, mK.shape[1], mBounds)
            num_rows = gSegment[COUNT] * self.group
            gPlaces = cute.domain_offset((gSegment[FIRST],), mPlaces[batch, kv_head, None])
            self._attend(
                mine,
                mQ,
                mK,
                mV,
                gPlaces,
                mO,
                mLse,
                (first_key,),
                end,
                num_rows,
                first_token,
                scale,
            )


class Place(NamedTuple):
    """Where a thread's vector is."""

    batch: Int32
    kv_head: Int32
    head: Int32
    """Of all query heads."""
    token: Int32
    in_group: Int32
    """Which of its key/value head's query heads it is of."""
    vector: Int32
    there: Boolean
    """Whether there is such a token."""

    def of(self, mX: cute.Tensor) -> cute.Tensor:
        """Its vector of [B, T, H, dim]."""
        return cute.local_tile(mX[self.batch, self.token, self.head, None], (VECTOR,), (self.vector,))


class CombinePartials:
    """Adds up what the slots of each row have; slots that visit nothing, of which nothing is read, count nothing.

    Args:
        dim: columns of a row.
        group: G.
        weighted: by the slots' lse's, to one softmax over all their keys.
        units: parts of a slot, one behind the other.
        carry: begin with what the rows hold already, weighted by its lse too: nothing, and not read, where that is
            -inf.
    """

    def __init__(self, dim: int, group: int, *, weighted: bool, units: int, carry: bool) -> None:
        self.vectors, self.group, self.weighted, self.units, self.carry = dim // VECTOR, group, weighted, units, carry
        self.rows = ADD_THREADS // self.vectors

    @cute.jit
    def __call__(
        self,
        mBlocks: cute.Tensor,  # Worklist.slot_blocks
        mParts: cute.Tensor,  # [B, H_kv, T n units, G, dim]
        mPartLse: cute.Tensor | None,  # fp32 [B, H_kv, T n, G], when weighted
        mX: cute.Tensor,  # [B, T, H, dim]
        mLse: cute.Tensor | None,  # fp32 [B, H, T], likewise
        stream: Any,
    ):
        self.kernel(mBlocks, mParts, mPartLse, mX, mLse).launch(**self._launch(mBlocks, stream))

    def _launch(self, mBlocks: cute.Tensor, stream: Any) -> dict[str, Any]:
        return {
            "grid": [cute.ceil_div(mBlocks.shape[2] * self.group, self.rows), mBlocks.shape[1], mBlocks.shape[0]],
            "block": [ADD_THREADS, 1, 1],
            "stream": stream,
        }

    @cute.kernel
    def kernel(
        self,
        mBlocks: cute.Tensor,
        mParts: cute.Tensor,
        mPartLse: cute.Tensor | None,
        mX: cute.Tensor,
        mLse: cute.Tensor | None,
    ):
        at = self._place(mBlocks)
        carried = self._carried(at, mLse)
        if at.there:
            cute.autovec_copy(self._sum(at, carried, mBlocks, mParts, mPartLse, mX, mLse), at.of(mX))

    @cute.jit
    def _place(self, mBlocks: cute.Tensor) -> Place:
        thread, _, _ = cute.arch.thread_idx()
        cta, kv_head, batch = cute.arch.block_idx()
        vector, row = thread % self.vectors, cta * self.rows + thread // self.vectors
        token, head = row // self.group, row % self.group
        there = token < mBlocks.shape[2]
        return Place(batch, kv_head, kv_head * self.group + head, token, head, vector, there)

    @cute.jit
    def _carried(self, at: Place, mLse: cute.Tensor | None) -> Float32:
        """lse of what the row holds already; all threads of a warp take part."""
        carried = -Float32.inf
        if const_expr(self.carry):
            if at.there:
                carried = mLse[at.batch, at.head, at.token]
            cute.arch.sync_warp()  # a row's threads, of one warp, have read it before one of them writes
        return carried

    @cute.jit
    def _sum(
        self,
        at: Place,
        carried: Float32,
        mBlocks: cute.Tensor,
        mParts: cute.Tensor,
        mPartLse: cute.Tensor | None,
        mX: cute.Tensor,
        mLse: cute.Tensor | None,
    ) -> cute.Tensor:
        """The thread's vector of a row that is there, rounded to X's type; writes the row's lse."""
        gBlocks = mBlocks[at.batch, at.kv_head, at.token, None]
        slots = mBlocks.shape[3]
        top, total = -Float32.inf, Float32(0.0)
        rSum = cute.make_rmem_tensor(VECTOR, Float32)
        rSum.fill(0.0)
        if const_expr(self.carry):
            rHeld = cute.make_rmem_tensor(VECTOR, mX.element_type)
            rHeld.fill(0.0)
            top = carried
            if carried > -Float32.inf:
                cute.autovec_copy(at.of(mX), rHeld)
                total = Float32(1.0)
            rSum.store(rHeld.load().to(Float32))
        rBlocks = cute.make_rmem_tensor(BATCH, Int32)
        rPart = cute.make_rmem_tensor((VECTOR, BATCH), mParts.element_type)
        rWeight = cute.make_rmem_tensor(BATCH, Float32)
        parts = slots * self.units
        for start in cutlass.range(0, parts, BATCH, unroll=1):
            # Nothing but which slots visit a block is waited for before all loads are under way
            rBlocks.fill(-1)
            for i in range_constexpr(BATCH):
                if start + i < parts:
                    rBlocks[i] = gBlocks[(start + i) // self.units]
            rPart.fill(0.0)
            rWeight.fill(-Float32.inf)
            for i in range_constexpr(BATCH):
                if rBlocks[i] >= 0:
                    place = at.token * parts + start + i
                    gPart = mParts[at.batch, at.kv_head, place, at.in_group, None]
                    cute.autovec_copy(cute.local_tile(gPart, (VECTOR,), (at.vector,)), rPart[None, i])
                    rWeight[i] = Float32(0.0)
                    if const_expr(self.weighted):
                        rWeight[i] = mPartLse[at.batch, at.kv_head, place, at.in_group]
            new_top = top
            for i in range_constexpr(BATCH):
                new_top = cute.arch.fmax(new_top, rWeight[i])
            base = Float32(0.0) if new_top == -Float32.inf else new_top
            scale = cute.math.exp2((top - base) * LOG2_E, fastmath=True)
            top, total = new_top, total * scale
            for j in range_constexpr(VECTOR):
                rSum[j] = rSum[j] * scale
            for i in range_constexpr(BATCH):
                weight = cute.math.exp2((rWeight[i] - base) * LOG2_E, fastmath=True)
                total += weight
                for j in range_constexpr(VECTOR):
                    rSum[j] = cute.math.fma(weight, rPart[j, i].to(Float32), rSum[j])
        if const_expr(self.weighted):
            rSum.store(rSum.load() * (Float32(0.0) if total == 0.0 else 1.0 / total))
            if at.vector == 0:
                mLse[at.batch, at.head, at.token] = top + cute.math.log(total)
        rX = cute.make_rmem_tensor(VECTOR, mX.element_type)
        rX.store(rSum.load().to(mX.element_type))
        return rX


class CombineAndGate(CombinePartials):
    """CombinePartials, gated: adds the other branches to o in registers and writes out; o too if asked.

    Args: as of CombinePartials.
    """

    def __init__(self, dim: int, group: int) -> None:
        super().__init__(dim, group, weighted=True, units=1, carry=False)

    @cute.jit
    def __call__(
        self,
        mBlocks: cute.Tensor,
        mParts: cute.Tensor,
        mPartLse: cute.Tensor,
        mOut: cute.Tensor,  # [B, T, H, dim]
        mLse: cute.Tensor,
        mQ: cute.Tensor | None,  # [B, T, H, dim], with mW
        mW: cute.Tensor | None,  # [H, 3, dim]
        mG: cute.Tensor | None,  # [B, T, H, 3]: without mW read, with it written
        mCmp: cute.Tensor,  # [B, T, H, dim]
        mWin: cute.Tensor,
        mSlc: cute.Tensor | None,  # likewise, the sums
        stream: Any,
    ):
        self.kernel(mBlocks, mParts, mPartLse, mOut, mLse, mQ, mW, mG, mCmp, mWin, mSlc).launch(
            **self._launch(mBlocks, stream)
        )

    @cute.kernel
    def kernel(
        self,
        mBlocks: cute.Tensor,
        mParts: cute.Tensor,
        mPartLse: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor,
        mQ: cute.Tensor | None,
        mW: cute.Tensor | None,
        mG: cute.Tensor | None,
        mCmp: cute.Tensor,
        mWin: cute.Tensor,
        mSlc: cute.Tensor | None,
    ):
        at = self._place(mBlocks)
        rQ = cute.make_rmem_tensor(VECTOR, mOut.element_type)
        rO = cute.make_rmem_tensor((VECTOR, 3), mOut.element_type)
        rQ.fill(0.0)
        rW = None
        if const_expr(mW is not None):
            rW = cute.make_rmem_tensor((VECTOR, 3), mW.element_type)
            rW.fill(0.0)
        if at.there:
            rO[None, 1].store(self._sum(at, -Float32.inf, mBlocks, mParts, mPartLse, mOut, mLse).load())
            # Under way with the slots these would take 24 registers more: five CTAs of a multiprocessor, not seven
            cute.autovec_copy(at.of(mCmp), rO[None, 0])
            cute.autovec_copy(at.of(mWin), rO[None, 2])
            if const_expr(mSlc is not None):
                cute.autovec_copy(rO[None, 1], at.of(mSlc))
            if const_expr(mW is not None):
                cute.autovec_copy(at.of(mQ), rQ)
                for b in range_constexpr(3):
                    gW = mW[at.head, b, None]
                    cute.autovec_copy(cute.local_tile(gW, (VECTOR,), (at.vector,)), rW[None, b])
        gG = None if const_expr(mG is None) else mG[at.batch, at.token, at.head, None]
        rG = row_gates(rQ, rW, gG, at.there, self.vectors)
        if const_expr(mW is not None and mG is not None):
            if at.there & (at.vector == 0):
                for b in range_constexpr(3):
                    gG[b] = rG[b]
        if at.there:
            cute.autovec_copy(weighted_sum(rO, rG), at.of(mOut))


@compiled_once
def _visit(
    dims: tuple[int, int], dtype: torch.dtype, group: int, slots: int, size: int, packed: bool, warpgroups: bool
) -> Kernel:
    dim, v_dim = dims
    return compile_kernel(
        KVOuterForward(dim, v_dim, CUTE_DTYPES[dtype], group, slots, size, warpgroups),
        *[fake(dtype, None, None, None, columns) for columns in (dim, dim, v_dim)],
        fake_query_rows(),
        fake_tiles(),
        fake_tiles(),
        fake(dtype, None, None, None, group, v_dim),
        fake(torch.float32, None, None, None, group, aligned=False),
        fake_bounds() if packed else None,
        Int32(0),
        Float32(0.0),
    )


@compiled_once
def _add(dim: int, dtype: torch.dtype, group: int, *, weighted: bool, units: int, carry: bool) -> Kernel:
    return compile_kernel(
        CombinePartials(dim, group, weighted=weighted, units=units, carry=carry),
        fake_slots(),
        fake(dtype, None, None, None, group, dim),
        fake(torch.float32, None, None, None, group, aligned=False) if weighted else None,
        fake(dtype, None, None, None, dim),
        fake(torch.float32, None, None, None, aligned=False) if weighted else None,
    )


@compiled_once
def _add_gated(
    dim: int, dtype: torch.dtype, group: int, w_dtype: torch.dtype | None, g_dtype: torch.dtype | None, keeps: bool
) -> Kernel:
    q, out = (fake(dtype, None, None, None, dim) for _ in range(2))
    return compile_kernel(
        CombineAndGate(dim, group),
        fake_slots(),
        fake(dtype, None, None, None, group, dim),
        fake(torch.float32, None, None, None, group, aligned=False),
        out,
        fake(torch.float32, None, None, None, aligned=False),
        None if w_dtype is None else q,
        *fake_gating(dim, dtype, w_dtype, g_dtype, keeps),
    )


def add_slots(
    worklist: Worklist,
    parts: Tensor,
    x: Tensor,
    *,
    part_lse: Tensor | None = None,
    lse: Tensor | None = None,
    units: int = 1,
    carry: bool = False,
) -> None:
    """Add up what the slots of some tokens have.

    Args:
        parts: `[B,H_kv,T n units,G,dim]`, read for the slots that visit a block.
        x: `[B,T,H,dim]`, where to write.
        part_lse, lse: fp32 `[B,H_kv,T n,G]` and `[B,H,T]`: weigh by the first, and write that of all slots.
        units: parts of a slot.
        carry: to what x and lse hold, as if that were one more slot; x is not read where lse is -inf.
    """
    run = _add(x.shape[3], x.dtype, parts.shape[3], weighted=lse is not None, units=units, carry=carry).run
    run(worklist.slot_blocks, parts, part_lse, x, lse)


def add_gated_slots(
    worklist: Worklist, parts: Tensor, q: Tensor, gating: Gating, *, part_lse: Tensor, lse: Tensor
) -> None:
    """Add up o of what the slots of some tokens have, and weigh and add it with the other branches, into `gating.out`.

    Args:
        parts, part_lse, lse: as of `add_slots`, where out is x.
        q: `[B,T,H,D]` with D = D_v, read with `gating.gate_proj_weight` only.
    """
    out = gating.out
    run = _add_gated(out.shape[3], out.dtype, parts.shape[3], *gating.variant).run
    read = None if gating.gate_proj_weight is None else q
    run(worklist.slot_blocks, parts, part_lse, out, lse, read, *gating.arguments)


def takes_gating(dims: tuple[int, int], slots: int, packed: bool) -> bool:
    """Whether `kv_outer_forward` takes a `gating`. Args: D and D_v; n; whether documents are packed."""
    return dims[0] == dims[1] and slots > 0 and not packed


def check_token_selected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    size: int,
    scale: float,
    first_token: int = 0,
    bounds: Tensor | None = None,
) -> None:
    """Raise ValueError for what the kernels cannot take."""
    for name, x in (("q", q), ("k", k), ("v", v), ("indices", indices)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions, got {list(x.shape)}")
    batch, tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[2:]
    keys = k.shape[1]
    if k.shape != (batch, keys, kv_heads, dim) or v.shape[:2] != (batch, keys):
        raise ValueError(f"k and v must be [{batch}, N, H_kv, {dim} or D_v], got {[*k.shape]}, {[*v.shape]}")
    if first_token < 0 or keys < first_token + tokens:
        raise ValueError(f"k and v must hold tokens 0 ... {first_token + tokens - 1} at least, got {[*k.shape]}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"H must be a multiple of H_kv, got {heads} and {kv_heads}")
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must all be bf16 or all fp16, got {q.dtype}, {k.dtype}, {v.dtype}")
    if dim not in DIMS or v_dim not in DIMS:
        raise ValueError(f"D and D_v must be in {DIMS}, got {dim} and {v_dim}")
    if indices.dtype != torch.int32 or indices.shape[:3] != (batch, kv_heads, tokens):
        expected = f"int32 [{batch}, {kv_heads}, {tokens}, n]"
        raise ValueError(f"indices must be {expected}, got {indices.dtype} {list(indices.shape)}")
    if size not in SIZES:
        raise ValueError(f"size must be in {SIZES}, got {size}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be finite and greater than 0, got {scale}")
    if bounds is not None and (batch != 1 or first_token != 0 or bounds.dim() != 2 or bounds.shape[1] < 2):
        got = f"{list(bounds.shape)}, B = {batch}, first_token = {first_token}"
        raise ValueError(f"bounds must be [6, documents + 1] with B = 1 and first_token = 0, got {got}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not vectorized(x):
            raise ValueError(f"rows of {name} must start at multiples of 16 bytes, got strides {x.stride()}")


def kv_outer_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    size: int,
    scale: float,
    first_token: int = 0,
    bounds: Tensor | None = None,
    init: int = 0,
    local: int = 0,
    gating: Gating | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each token to the blocks that it chose, causal.

    Args:
        q: `[B,T,H,D]`, of the tokens `first_token` ...; bf16 or fp16, rows aligned (device.vectorizable).
        k, v: `[B,N,H_kv,D]` and `[...,D_v]`, of all tokens up to those at least, likewise.
        indices: int32 `[B,H_kv,T,n]`, different blocks of `size` tokens, padded with -1 at any place. Blocks that begin
            behind their token count nothing.
        size: l'.
        scale: what q . k is multiplied by, > 0.
        bounds: of packed documents, with B = 1 (documents.bounds_of, Documents.bounds_of_blocks), whose tiles are the
            blocks: these count from each document's first token.
        init, local: indices hold these forced blocks for every token wherever they exist: the first `init` of its
            document, and `local` that end with its own. They are attended to in one go (attend/forced.py).
        gating: of these tokens: write out too, and o only into its `o_slc`, where `takes_gating`.

    Returns:
        o `[B,T,H,D_v]`, that of `gating` or else its out, and lse fp32 `[B,H,T]`, natural log. Rows without keys, and
        rows behind the last document: 0 and -inf. Bitwise the same each time.

    Raises:
        ValueError: for what the kernels cannot take.
    """
    check_token_selected(q, k, v, indices, size, scale, first_token, bounds)
    batch, tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[2:]
    group, slots = heads // kv_heads, indices.shape[3]
    if gating is None:
        o = torch.empty((batch, tokens, heads, v_dim), dtype=q.dtype, device=q.device)
    elif takes_gating((dim, v_dim), slots, bounds is not None):
        o = gating.out if gating.o_slc is None else gating.o_slc
    else:
        got = f"D = {dim}, D_v = {v_dim}, n = {slots}, {'a pack' if bounds is not None else 'sequences'}"
        raise ValueError(f"gating needs D = D_v, n > 0 and no packed documents, got {got}")
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if o.numel() == 0 or slots == 0:
        return o.zero_(), lse.fill_(-math.inf)
    forced = takes_forced(size, init, local)
    if forced and gating is None:
        if bounds is not None:
            lse.fill_(-math.inf)  # also of tokens of no document
        where: dict[str, Any] = {"first_token": first_token, "bounds": bounds}
        forced_blocks_forward(q, k, v, o, lse, size=size, scale=scale, init=init, local=local, **where)
    visit = _visit((dim, v_dim), q.dtype, group, slots, size, bounds is not None, has_warpgroups(q.device)).run
    with SideStreams(q.device) as streams:
        for worklist, batches, of in worklist_chunks(
            indices,
            size=size,
            min_rows=-(-SEGMENT_ROWS // group),
            token_bytes=slots * group * (v_dim * q.element_size() + 4),
            max_bytes=PART_BYTES,
            first_token=first_token,
            bounds=bounds,
            init=init if forced else 0,
            local=local if forced else 0,
        ):
            streams.begin()
            shape = (*worklist.query_rows.shape, group)
            parts = torch.empty((*shape, v_dim), dtype=q.dtype, device=q.device)
            part_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
            queries = slice(of.start * group, of.stop * group)
            rows = worklist.tokens(first_token)
            tables = worklist.query_rows, worklist.work_tiles, worklist.cum_counts
            some = q[batches, rows, queries], k[batches, :, of], v[batches, :, of]
            gated = None if gating is None else gating.narrow(batches, rows, queries)
            with streams.run(worklist, parts, part_lse, some, gated):
                visit(*some, *tables, parts, part_lse, bounds, worklist.first_token, scale)
                of_rows = lse[batches, queries, rows]
                if gated is None:
                    sums: dict[str, Any] = {"part_lse": part_lse, "lse": of_rows, "carry": forced}
                    add_slots(worklist, parts, o[batches, rows, queries], **sums)
                elif forced:
                    how: dict[str, Any] = {"size": size, "scale": scale, "init": init, "local": local}
                    gated_forced_blocks(*some, worklist, parts, part_lse, gated, of_rows, **how)
                else:
                    add_gated_slots(worklist, parts, some[0], gated, part_lse=part_lse, lse=of_rows)
            del parts, part_lse, worklist, tables, some, gated, of_rows
    return o, lse
