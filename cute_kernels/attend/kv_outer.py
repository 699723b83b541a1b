"""KV-outer attention of each token to its own blocks of keys, exact: keys stay in a CTA, query rows come to them.

    S_ij = scale q_i . k_j        j <= i in the blocks that token i selected
    o_i = sum_j exp(S_ij - lse_i) v_j        lse_i = log sum_j exp(S_ij)

KVOuterForward       one CTA: keys and values of one KV block, and a work tile of the query rows that selected it
                     (lists/worklist.py). o and lse of these keys alone go to the rows' partials (warp_rows.py).
CombinePartials,     the partials of each row added up; for NSA also gated with the other branches (combine.py)
CombineAndGate
ForcedForward,       forced blocks, which every token attends to, need no selection: attended to in one go (forced.py).
ForcedCombineAndGate ForcedForward writes o and lse where the result goes, and CombinePartials accumulates. For NSA
                     ForcedCombineAndGate takes the place of CombineAndGate, bitwise the same, and adds the partials
WindowCombine        on Hopper, where local blocks lie in the window: takes the place of all four, and of the window's
                     own kernel (window_combine.py)

The host goes over tokens and key/value heads in chunks, whose partials stay below PARTIAL_BYTES and whose q is small
enough for L2. Chunks alternate between two streams (runtime/streams.py): one attends where another combines or leaves
SMs idle.

What moves does not depend on which blocks are selected: q is read n times, o is written and read n times.

Floor, 64K tokens, 64 heads over 4, D = 128, n = 16, l' = 64: 2.2 TFLOP, 3.7 ms at 600 TFLOP/s, and 34 GB for the
partials, 8.2 ms at 4.2 TB/s, at the same time; 17 GB of q come from L2 where it is there, else 4.1 ms more.
ForcedCombineAndGate moves 3.2 GB less than ForcedForward and CombineAndGate would.

Packed documents (B = 1): their tokens are read where they lie; no block holds those of two.

Limits: WGMMA on sm_90a, mma.sync on sm_100a; D and D_v 64 or 128; l' a multiple of 64, up to 256; any G; for T tokens
of a chunk n T G D_v < 2^34; a token's q less than 2^15 elements from the next one's; 64-bit offsets; rows start at
multiples of 16 bytes. Every block that is attended to must hold finite values behind a token too, or that token's o is
not finite.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from torch import Tensor

from cute_kernels.attend.checks import check_token_attention
from cute_kernels.attend.combine import combine_and_gate, combine_partials
from cute_kernels.attend.forced import forced_combine_and_gate, forced_forward, takes_forced
from cute_kernels.attend.views import block_bounds, group_heads
from cute_kernels.attend.warp_rows import WarpRows
from cute_kernels.attend.window_combine import WindowBranch, takes_window, window_combine
from cute_kernels.gate.forward import Gating
from cute_kernels.lists.worklist import (
    BLOCK,
    COUNT,
    FIRST,
    fake_packed,
    fake_query_rows,
    fake_tiles,
    num_work_tiles,
    packed_tables,
    worklist_chunks,
)
from cute_kernels.mma.smem import SMEM_CARVEOUT
from cute_kernels.mma.warp import LANES
from cute_kernels.pool.documents import PackedBlocks
from cute_kernels.runtime.device import has_warpgroups
from cute_kernels.runtime.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.runtime.streams import SideStreams

WARPS = 8
CTAS_PER_SM = 2

PARTIAL_BYTES = 520 << 20
"""Of a chunk's o_partial and lse_partial, 8192 tokens of 16 heads and 16 slots; two chunks have theirs at a time."""

MIN_TILE_ROWS = 2048
"""The fewest rows, query rows x G, of a work tile of a split block."""


class KVOuterForward(WarpRows):
    """Args: dims of k and v; 16-bit type; G; n, slots of a token; l', tokens of a block; whether to use WGMMA."""

    def __init__(self, dim: int, v_dim: int, dtype: Any, group: int, slots: int, size: int, warpgroups: bool) -> None:
        super().__init__(dim, v_dim, dtype, group, slots, size, 1, WARPS, warpgroups)
        self.ctas_per_sm = CTAS_PER_SM if size * (dim + v_dim) <= 128 * 128 else 1

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D], of the tokens first_token ...
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        mQueryRows: cute.Tensor,  # Worklist.query_rows
        mWorkTiles: cute.Tensor,  # Worklist.work_tiles
        mCumCounts: cute.Tensor,  # Worklist.cum_counts
        mOPartial: cute.Tensor,  # [B, H_kv, T n, G, D_v]
        mLsePartial: cute.Tensor,  # fp32 [B, H_kv, T n, G]
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
            mQueryRows,
            mWorkTiles,
            mCumCounts,
            mOPartial,
            mLsePartial,
            mBounds,
            mPositions,
            first_token,
            scale,
            *self._mmas_and_layouts(),
        ).launch(
            grid=[mWorkTiles.shape[3], mK.shape[2], mK.shape[0]],
            block=[WARPS * LANES, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # [B, T, H_kv, G, D]
        mK: cute.Tensor,
        mV: cute.Tensor,
        mQueryRows: cute.Tensor,
        mWorkTiles: cute.Tensor,
        mCumCounts: cute.Tensor,
        mOPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mBounds: cute.Tensor | None,
        mPositions: cute.Tensor | None,
        first_token: Int32,
        scale: Float32,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
    ):
        cta = self._set_up(mma_qk, mma_pv, q_layout, k_layout, v_layout)
        _, num_tiles = num_work_tiles(mCumCounts[cta.batch, cta.kv_head, None, None])
        if cta.work_idx < num_tiles:
            gWorkTile = mWorkTiles[cta.batch, cta.kv_head, None, cta.work_idx]
            first_key, end = block_bounds(gWorkTile[BLOCK], self.size, mK.shape[1], mBounds)
            num_rows = gWorkTile[COUNT] * self.group
            gQueryRows = cute.domain_offset((gWorkTile[FIRST],), mQueryRows[cta.batch, cta.kv_head, None])
            self._attend(
                cta,
                mQ,
                mK,
                mV,
                gQueryRows,
                mOPartial,
                mLsePartial,
                (first_key,),
                end,
                num_rows,
                first_token,
                scale,
                mPositions=mPositions,
            )


@compiled_once
def _compiled(
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
        *fake_packed(packed),
        Int32(0),
        Float32(0.0),
    )


def takes_gating(dims: tuple[int, int], slots: int, packed: bool) -> bool:
    """Whether `kv_outer_forward` takes a `gating`. Args: D and D_v; n; whether documents are packed."""
    return dims[0] == dims[1] and slots > 0 and not packed


def kv_outer_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    size: int,
    scale: float,
    first_token: int = 0,
    packed: PackedBlocks | None = None,
    init: int = 0,
    local: int = 0,
    gating: Gating | None = None,
    window: WindowBranch | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each token to the blocks that it selected, causal.

    Args:
        q: `[B,T,H,D]`, of the tokens `first_token` ...; bf16 or fp16, rows aligned (device.vectorizable).
        k, v: `[B,N,H_kv,D]` and `[...,D_v]`, of all tokens up to those at least, likewise.
        indices: int32 `[B,H_kv,T,n]`, different blocks of `size` tokens, padded with -1 at any place. Blocks that begin
            behind their token have no effect.
        size: l'.
        scale: what q . k is multiplied by, > 0.
        packed: of packed documents, with B = 1: their queries are the rows of q, their tokens those of k and v, and
            blocks count from each document's first token.
        init, local: indices hold these forced blocks for every token wherever they exist: the first `init` of its
            document, and `local` that end with its own. They are attended to in one go (attend/forced.py).
        gating: of these tokens: write out too, and o only into its `o_slc`, where `takes_gating`.
        window: attend to the window of these keys too, with forced blocks, where `takes_window`. Rows of no query
            are left as they are in its results.

    Returns:
        o `[B,T,H,D_v]`, that of `gating` or else its out, and lse fp32 `[B,H,T]`, natural log. Rows without keys, and
        rows behind the last document: 0 and -inf. Bitwise the same each time.

    Raises:
        ValueError: for what the kernels cannot take.
    """
    check_token_attention(q, k, v, indices, size, scale, first_token, packed)
    batch, tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[2:]
    group, slots = heads // kv_heads, indices.shape[3]
    if gating is None:
        o = torch.empty((batch, tokens, heads, v_dim), dtype=q.dtype, device=q.device)
    elif takes_gating((dim, v_dim), slots, packed is not None):
        o = gating.out if gating.o_slc is None else gating.o_slc
    else:
        got = f"D = {dim}, D_v = {v_dim}, n = {slots}, {'a pack' if packed is not None else 'sequences'}"
        raise ValueError(f"gating needs D = D_v, n > 0 and no packed documents, got {got}")
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if o.numel() == 0 or slots == 0:
        return o.zero_(), lse.fill_(-math.inf)

    if window is not None and not takes_window(
        (dim, v_dim), group, slots, size, local, window.left + 1, warpgroups=has_warpgroups(q.device)
    ):
        got = f"{[*q.shape]}, D_v = {v_dim}, n = {slots}, l' = {size}, {local} local blocks, {window.left=}"
        raise ValueError(f"not a window that the selected branch can take along: {got}")
    if gating is not None and (gating.o_win is None) != (window is not None):
        raise ValueError("o of the window is given, or the window is attended to here: gating.o_win or window")
    has_forced = window is not None or takes_forced(size, init, local)
    forced: dict[str, Any] = {"size": size, "scale": scale, "init": init, "local": local}
    if has_forced and packed is not None:
        lse.fill_(-math.inf)  # also of rows of no query
        if window is not None:
            o.zero_()
    if has_forced and gating is None and window is None:
        forced_forward(q, k, v, o, lse, first_token=first_token, packed=packed, **forced)
    options = (dim, v_dim), q.dtype, group, slots, size, packed is not None, has_warpgroups(q.device)
    attend = _compiled(*options).run
    chunks = worklist_chunks(
        indices,
        size=size,
        min_rows=-(-MIN_TILE_ROWS // group),
        token_bytes=slots * group * (v_dim * q.element_size() + 4),
        max_bytes=PARTIAL_BYTES,
        first_token=first_token,
        packed=packed,
        init=init if has_forced else 0,
        local=local if has_forced else 0,
    )
    with SideStreams(q.device) as streams:
        for worklist, b, h in chunks:
            streams.begin()
            shape = (*worklist.query_rows.shape, group)
            o_partial = torch.empty((*shape, v_dim), dtype=q.dtype, device=q.device)
            lse_partial = torch.empty(shape, dtype=torch.float32, device=q.device)
            t, q_heads = worklist.tokens(first_token), slice(h.start * group, h.stop * group)
            qkv = q[b, t, q_heads], k[b, :, h], v[b, :, h]
            chunk_gating = None if gating is None else gating.narrow(b, t, q_heads)
            with streams.run(worklist, o_partial, lse_partial, qkv, chunk_gating):
                tables = worklist.query_rows, worklist.work_tiles, worklist.cum_counts
                attend(*qkv, *tables, o_partial, lse_partial, *packed_tables(packed), worklist.first_token, scale)
                chunk_lse = lse[b, q_heads, t]
                lses: dict[str, Any] = {"lse_partial": lse_partial, "lse": chunk_lse}
                if window is not None:
                    kept = None if gating is not None and gating.o_slc is None else o[b, t, q_heads]
                    chunk_window = window.narrow(b, t, q_heads)
                    q_chunk, k_chunk, v_chunk = qkv
                    window_combine(
                        q_chunk,
                        k_chunk,
                        v_chunk,
                        worklist,
                        o_partial,
                        o=kept,
                        window=chunk_window,
                        gating=chunk_gating,
                        packed=packed,
                        **lses,
                        **forced,
                    )
                elif chunk_gating is None:
                    combine_partials(worklist, o_partial, o[b, t, q_heads], accumulate=has_forced, **lses)
                elif has_forced:
                    q_chunk, k_chunk, v_chunk = qkv
                    forced_combine_and_gate(
                        q_chunk, k_chunk, v_chunk, worklist, o_partial, chunk_gating, **lses, **forced
                    )
                else:
                    combine_and_gate(worklist, o_partial, qkv[0], chunk_gating, **lses)
            # The stream holds them as long as it needs them
            del worklist, o_partial, lse_partial, qkv, chunk_gating, tables, chunk_lse, lses
    return o, lse
