"""Attention of each token to its own blocks of keys, exact: keys stay, queries come to them.

    S_ij = scale q_i . k_j        j <= i in the blocks that token i chose
    o_i = sum_j exp(S_ij - lse_i) v_j        lse_i = log sum_j exp(S_ij)

VisitBlocks   one CTA: keys and values of one block, and a segment of the tokens that chose it (segments.py). The G
              query heads of a key/value head chose together, so a block has visits x G rows. All keys of a row are
              there at once: one softmax (warp_rows.py), then o in 16 bits and lse to the place of the token's slot.
AddSlots      the slots of each row added up in their order, weighted by exp(lse_slot - lse): BATCH of them loaded at a
              time, in an online softmax.

Forced blocks, which every token attends to at places known beforehand, need no slots and are not visited: after the
visits of a pass forced_blocks.py attends to all of them and adds the slots to that before anything is written. There is
no AddSlots then, and the other branches can be added in the same place, so that o is never written.

What moves does not depend on whether neighbours agree: q is read n times, the slots' o written and read n times. That
of a pass stays below PART_BYTES by taking some tokens and key/value heads at a time, of which q is small enough for L2.
Passes run on two streams in turn (side_streams.py): one visits and adds up where another leaves multiprocessors idle.

Floor, 64K tokens, 64 heads over 4, D = 128, n = 16, l' = 64: 2.2 TFLOP, 3.7 ms at 600 TFLOP/s, and 34 GB for the slots'
o, 8.2 ms at 4.2 TB/s, at the same time; 17 GB of q come from L2 where it is there, else 4.1 ms more. With 3 forced
blocks 13 slots are written and read, q is read and o written once more: 30 GB, 7.2 ms. Seen once on an H200, random
blocks, none of them forced: VisitBlocks 8.1 ms, AddSlots 5.0, one after the other 13.4, on two streams 12.2.

Packed documents (B = 1): their tokens are read where they lie; no block holds those of two.

Limits: WGMMA on sm_90a, mma.sync on sm_100a; D and D_v 64 or 128; l' a multiple of 64, up to 256; any G; for T tokens
of a pass n T G D_v < 2^34; a token's q less than 2^15 numbers from the next one's; 64-bit offsets; rows start at
multiples of 16 bytes. Every block that is attended to must hold finite values behind a token too, or that token's o is
not finite.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels.device import has_warpgroups, vectorized
from cute_kernels.forced_blocks import OtherBranches, forced_blocks_forward, takes_forced
from cute_kernels.jit import CUTE_DTYPES, VECTOR, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.segments import (
    BLOCK,
    COUNT,
    CUT,
    FIRST,
    WHOLE,
    Visits,
    fake_bounds,
    fake_places,
    fake_segments,
    fake_table,
    passes,
)
from cute_kernels.side_streams import SideStreams
from cute_kernels.support import TOKEN_SELECT_SIZES
from cute_kernels.warp import LANES, LOG2_E
from cute_kernels.warp_rows import SHARED_PERCENT, WarpRows, block_bounds, heads_of
from cute_kernels.warp_tiles import read_once

WARPS = 8
CTAS = 2
"""Of a multiprocessor, at a time."""

ADD_THREADS = 128
BATCH = 8
"""Loads of a thread in flight together."""

PART_BYTES = 520 << 20
"""For o and lse of a pass's slots, 8192 tokens of 16 heads and 16 slots; two passes have theirs at a time."""

SEGMENT_ROWS = 2048
"""The fewest rows of a segment of a cut block."""

DIMS = (64, 128)
SIZES = TOKEN_SELECT_SIZES


@cute.jit
def used_segments(mSums: cute.Tensor) -> tuple[Int32, Int32]:
    """How many segments there are of cut blocks, and of all. Args: [3, blocks] of Visits.sums."""
    last = mSums.shape[1] - 1
    cut = mSums[CUT, last]
    return cut, cut + mSums[WHOLE, last]


class VisitBlocks(WarpRows):
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
        mPlaces: cute.Tensor,  # Visits.places
        mSegments: cute.Tensor,  # Visits.segments
        mSums: cute.Tensor,  # Visits.sums
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
        mine = self._begin(row_layout, key_layout, value_layout)
        segment, kv_head, batch = mine.item, mine.kv_head, mine.batch
        _, used = used_segments(mSums[batch, kv_head, None, None])
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
                mma_s,
                mma_o,
            )


class AddSlots:
    """Adds up what the slots of each row have; slots that visit nothing count nothing.

    Args:
        dim: columns of a row.
        group: G.
        weighted: by the slots' lse's, to one softmax over all their keys.
        units: parts of a slot, one behind the other.
        skip: do not load what no slot visits: pays where such slots are many.
    """

    def __init__(self, dim: int, group: int, *, weighted: bool, units: int, skip: bool) -> None:
        self.vectors, self.group, self.weighted, self.units = dim // VECTOR, group, weighted, units
        self.skip = skip
        self.rows = ADD_THREADS // self.vectors

    @cute.jit
    def __call__(
        self,
        mBlocks: cute.Tensor,  # Visits.blocks
        mParts: cute.Tensor,  # [B, H_kv, T n units, G, dim]
        mPartLse: cute.Tensor | None,  # fp32 [B, H_kv, T n, G], when weighted
        mX: cute.Tensor,  # [B, T, H, dim]
        mLse: cute.Tensor | None,  # fp32 [B, H, T], likewise
        stream: Any,
    ):
        self.kernel(mBlocks, mParts, mPartLse, mX, mLse).launch(
            grid=[cute.ceil_div(mBlocks.shape[2] * self.group, self.rows), mBlocks.shape[1], mBlocks.shape[0]],
            block=[ADD_THREADS, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mBlocks: cute.Tensor,
        mParts: cute.Tensor,
        mPartLse: cute.Tensor | None,
        mX: cute.Tensor,
        mLse: cute.Tensor | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, kv_head, batch = cute.arch.block_idx()
        vector, row = thread % self.vectors, cta * self.rows + thread // self.vectors
        token, head = row // self.group, row % self.group
        _, _, tokens, slots = mBlocks.shape
        if token < tokens:
            gBlocks = mBlocks[batch, kv_head, token, None]
            top, total = -Float32.inf, Float32(0.0)
            rSum = cute.make_rmem_tensor(VECTOR, Float32)
            rSum.fill(0.0)
            rBlocks = cute.make_rmem_tensor(BATCH, Int32)
            rPart = cute.make_rmem_tensor((VECTOR, BATCH), mParts.element_type)
            rPairs = cute.recast_tensor(rPart, Int32)
            rWeight = cute.make_rmem_tensor(BATCH, Float32)
            once = read_once(mParts.element_type)  # so that the queries, which are read again, stay in L2
            parts = slots * self.units
            for start in cutlass.range(0, parts, BATCH, unroll=1):
                # Nothing but which blocks to skip is waited for before all loads are under way
                rPart.fill(0.0)
                rWeight.fill(-Float32.inf)
                if const_expr(self.skip):
                    for i in range_constexpr(BATCH):
                        rBlocks[i] = Int32(-1)
                        if start + i < parts:
                            rBlocks[i] = gBlocks[(start + i) // self.units]
                for i in range_constexpr(BATCH):
                    part = start + i
                    loads = part < parts
                    if const_expr(self.skip):
                        loads = rBlocks[i] >= 0
                    if loads:
                        place = token * parts + part
                        gPart = mParts[batch, kv_head, place, head, None]
                        cute.copy(once, cute.local_tile(gPart, (VECTOR,), (vector,)), rPart[None, i])
                        visits = cutlass.Boolean(True)
                        if const_expr(not self.skip):
                            visits = gBlocks[part // self.units] >= 0
                        lse = Float32(0.0)
                        if const_expr(self.weighted):
                            lse = mPartLse[batch, kv_head, place, head]
                        rWeight[i] = lse if visits else -Float32.inf
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
                    for j in range_constexpr(VECTOR // 2):
                        rPairs[j, i] = rPairs[j, i] if weight > 0.0 else Int32(0)
                    for j in range_constexpr(VECTOR):
                        rSum[j] = cute.math.fma(weight, rPart[j, i].to(Float32), rSum[j])
            gX = mX[batch, token, kv_head * self.group + head, None]
            if const_expr(self.weighted):
                rSum.store(rSum.load() * (Float32(0.0) if total == 0.0 else 1.0 / total))
                if vector == 0:
                    mLse[batch, kv_head * self.group + head, token] = top + cute.math.log(total)
            rX = cute.make_rmem_tensor(VECTOR, mX.element_type)
            rX.store(rSum.load().to(mX.element_type))
            cute.autovec_copy(rX, cute.local_tile(gX, (VECTOR,), (vector,)))


@compiled_once
def _visit(
    dims: tuple[int, int], dtype: torch.dtype, group: int, slots: int, size: int, packed: bool, warpgroups: bool
) -> Kernel:
    dim, v_dim = dims
    return compile_kernel(
        VisitBlocks(dim, v_dim, CUTE_DTYPES[dtype], group, slots, size, warpgroups),
        *[fake(dtype, None, None, None, columns) for columns in (dim, dim, v_dim)],
        fake_places(),
        fake_segments(),
        fake_segments(),
        fake(dtype, None, None, None, group, v_dim),
        fake(torch.float32, None, None, None, group, aligned=False),
        fake_bounds() if packed else None,
        Int32(0),
        Float32(0.0),
    )


@compiled_once
def _add(dim: int, dtype: torch.dtype, group: int, *, weighted: bool, units: int, skip: bool = False) -> Kernel:
    return compile_kernel(
        AddSlots(dim, group, weighted=weighted, units=units, skip=skip),
        fake_table(),
        fake(dtype, None, None, None, group, dim),
        fake(torch.float32, None, None, None, group, aligned=False) if weighted else None,
        fake(dtype, None, None, None, dim),
        fake(torch.float32, None, None, None, aligned=False) if weighted else None,
    )


def add_slots(
    visits: Visits,
    parts: Tensor,
    x: Tensor,
    *,
    part_lse: Tensor | None = None,
    lse: Tensor | None = None,
    units: int = 1,
    skip: bool = False,
) -> None:
    """Add up what the slots of some tokens have.

    Args:
        parts: `[B,H_kv,T n units,G,dim]`, read for the slots that visit a block.
        x: `[B,T,H,dim]`, where to write.
        part_lse, lse: fp32 `[B,H_kv,T n,G]` and `[B,H,T]`: weigh by the first, and write that of all slots.
        units: parts of a slot.
        skip: do not load what no slot visits.
    """
    run = _add(x.shape[3], x.dtype, parts.shape[3], weighted=lse is not None, units=units, skip=skip).run
    run(visits.blocks, parts, part_lse, x, lse)


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


def token_selected_forward(
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
            document, and `local` that end with its own. They are attended to in one go (forced_blocks.py).

    Returns:
        o `[B,T,H,D_v]` and lse fp32 `[B,H,T]`, natural log. Rows without keys, and rows behind the last document: 0 and
        -inf. Bitwise the same each time.

    Raises:
        ValueError: for what the kernels cannot take.
    """
    check_token_selected(q, k, v, indices, size, scale, first_token, bounds)
    batch, tokens, heads, _ = q.shape
    o = torch.empty((batch, tokens, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if o.numel() == 0 or indices.shape[3] == 0:
        return o.zero_(), lse.fill_(-math.inf)
    _attend(q, k, v, indices, o, lse, size, scale, first_token, bounds, init, local)
    return o, lse


def token_selected_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    others: OtherBranches,
    out: Tensor,
    *,
    size: int,
    scale: float,
    first_token: int = 0,
    bounds: Tensor | None = None,
    init: int,
    local: int,
) -> None:
    """The gated sum of this branch and the others, for which its o is not written.

    Args:
        q, k, v, indices, size, scale, first_token, bounds: as of `token_selected_forward`.
        others: the other branches, of the same rows.
        out: `[B,T,H,D_v]` in q's dtype, where to write, rows aligned; with bounds by `others.tokens`, and 0 for tokens
            of no document. Bit for bit what gate.py makes of o.
        init, local: as there, for which `takes_forced`.

    Raises:
        ValueError: for what the kernels cannot take.
    """
    check_token_selected(q, k, v, indices, size, scale, first_token, bounds)
    if not takes_forced(size, init, local) or indices.shape[3] == 0:
        raise ValueError(f"there must be forced blocks that fit, got init = {init}, local = {local}, size = {size}")
    if out.numel() > 0:
        _attend(q, k, v, indices, out, None, size, scale, first_token, bounds, init, local, others)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor | None,
    size: int,
    scale: float,
    first_token: int,
    bounds: Tensor | None,
    init: int,
    local: int,
    others: OtherBranches | None = None,
) -> None:
    """Of at least one row and slot, into o and lse; with others their gated sum with it into o."""
    group, slots, (dim, v_dim) = q.shape[2] // k.shape[2], indices.shape[3], (k.shape[3], v.shape[3])
    attend_forced = None
    if takes_forced(size, init, local):
        if bounds is not None:  # tokens of no document, which nothing writes
            o.zero_()
            if lse is not None:
                lse.fill_(-math.inf)
        attend_forced = partial(forced_blocks_forward, size=size, scale=scale, init=init, local=local, bounds=bounds)
        if slots <= init + local:  # no other blocks
            attend_forced(q, k, v, o, lse, first_token=first_token, others=others)
            return
    visit = _visit((dim, v_dim), q.dtype, group, slots, size, bounds is not None, has_warpgroups(q.device)).run
    with SideStreams(q.device) as streams:
        for visits, batches, of in passes(
            indices,
            size=size,
            length=-(-SEGMENT_ROWS // group),
            token_bytes=slots * group * (v_dim * q.element_size() + 4),
            most_bytes=PART_BYTES,
            first_token=first_token,
            bounds=bounds,
            init=init if attend_forced else 0,
            local=local if attend_forced else 0,
        ):
            streams.begin()
            shape = (*visits.places.shape, group)
            parts = torch.empty((*shape, v_dim), dtype=q.dtype, device=q.device)
            part_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
            rows, queries = visits.rows(first_token), slice(of.start * group, of.stop * group)
            tables = visits.places, visits.segments, visits.sums
            some = q[batches, rows, queries], k[batches, :, of], v[batches, :, of]
            beside = None if others is None else others.part(batches, rows, queries)
            some_o = o[batches, rows, queries] if others is None else others.of_out(o, batches, rows, queries)
            some_lse = None if lse is None else lse[batches, queries, rows]
            with streams.run(visits, parts, part_lse, some):
                visit(*some, *tables, parts, part_lse, bounds, visits.first_token, scale)
                if attend_forced:
                    given, first = (visits.blocks, parts, part_lse), visits.first_token
                    attend_forced(*some, some_o, some_lse, first_token=first, slots=given, others=beside)
                else:
                    add_slots(visits, parts, some_o, part_lse=part_lse, lse=some_lse)
            del parts, part_lse, visits, tables, some
