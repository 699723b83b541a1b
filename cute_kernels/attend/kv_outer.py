"""KV-outer attention of each token to its own blocks of keys, exact: keys stay in a CTA, query rows are gathered.

    S_ij = scale q_i . k_j        j <= i in the blocks that token i selected
    o_i = sum_j exp(S_ij - lse_i) v_j        lse_i = log sum_j exp(S_ij)

KVOuterForward       one CTA: keys and values of one KV block, and a work tile of the query rows that selected it
                     (lists/worklist.py). o and lse over these keys are written to the rows' partials (warp_rows.py).
CombinePartials,     sum the partials of each row; for NSA also gated with the other branches (combine.py)
CombineAndGate
ForcedForward,       forced blocks, to which every token attends, need no selection and are attended to in one pass
ForcedCombineAndGate (forced.py). ForcedForward writes o and lse to their final place, where CombinePartials
                     accumulates. For NSA ForcedCombineAndGate replaces CombineAndGate, bitwise equal, and adds the
                     partials
WindowCombine        on Hopper, if the local blocks are inside the window: replaces all four, and the window's own
                     kernel (window_combine.py)

The host loops over chunks of tokens and key/value heads, sized so that their partials stay below PARTIAL_BYTES and
their q fits in L2. Chunks alternate between two streams (runtime/streams.py): one attends while the other combines or
leaves SMs idle.

Traffic does not depend on which blocks are selected: q is read n times, o is written and read n times.

Floor, 64K tokens, 64 heads over 4, D = 128, n = 16, l' = 64: 2.2 TFLOP, 3.7 ms at 600 TFLOP/s, and 34 GB for the
partials, 8.2 ms at 4.2 TB/s, concurrently; 17 GB of q come from L2 when cached, otherwise 4.1 ms more.
ForcedCombineAndGate moves 3.2 GB less than ForcedForward and CombineAndGate would.

Packed documents (B = 1) are read in place; no block spans two documents.

Limits: WGMMA on sm_90a, mma.sync on sm_100a; D and D_v 64 or 128; l' a multiple of 64, up to 256; any G; for T tokens
of a chunk n T G D_v < 2^34; q of consecutive tokens less than 2^15 elements apart; 64-bit offsets; rows 16-byte
aligned. Every attended block must hold finite values after a token too, otherwise that token's o is not finite.
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
from cute_kernels.attend.forced import forced_combine_and_gate, forced_forward
from cute_kernels.attend.views import block_bounds, group_heads
from cute_kernels.attend.warp_rows import Mmas, WarpRows
from cute_kernels.attend.window_combine import WindowBranch, window_combine
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
from cute_kernels.runtime.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake, fake_heads
from cute_kernels.runtime.streams import SideStreams

WARPS = 8
CTAS_PER_SM = 2

PARTIAL_BYTES = 520 << 20
"""Size of a chunk's o_partial and lse_partial: 8192 tokens of 16 heads and 16 slots. Two chunks are live at a time."""

MIN_TILE_ROWS = 2048
"""Minimum rows, query rows x G, per work tile of a split block."""


class KVOuterForward(WarpRows):
    """Args:
    dim, v_dim, dtype: D, D_v and their 16-bit type.
    group: G.
    slots: n, slots per token.
    size: l', tokens per block.
    warpgroups: use WGMMA.
    """

    def __init__(self, dim: int, v_dim: int, dtype: Any, group: int, slots: int, size: int, warpgroups: bool) -> None:
        super().__init__(dim, v_dim, dtype, group, slots, size, 1, WARPS, warpgroups)
        self.ctas_per_sm = CTAS_PER_SM if size * (dim + v_dim) <= 128 * 128 else 1

    @staticmethod
    @compiled_once
    def compile(
        dims: tuple[int, int], dtype: torch.dtype, group: int, slots: int, size: int, packed: bool, warpgroups: bool
    ) -> Kernel:
        dim, v_dim = dims
        return compile_kernel(
            KVOuterForward(dim, v_dim, CUTE_DTYPES[dtype], group, slots, size, warpgroups),
            *fake_heads(dtype, dim, dim, v_dim),
            fake_query_rows(),
            fake_tiles(),
            fake_tiles(),
            fake(dtype, None, None, None, group, v_dim),
            fake(torch.float32, None, None, None, group, aligned=False),
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
            self._mmas(),
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
        mmas: Mmas,
    ):
        cta = self._set_up(mmas)
        _, num_tiles = num_work_tiles(mCumCounts[cta.batch, cta.kv_head, None, None])
        if cta.work_idx < num_tiles:
            gWorkTile = mWorkTiles[cta.batch, cta.kv_head, None, cta.work_idx]  # int32 [3]: BLOCK, FIRST, COUNT
            first_key, end = block_bounds(gWorkTile[BLOCK], self.size, mK.shape[1], mBounds)
            num_rows = gWorkTile[COUNT] * self.group
            # int32 [T n - FIRST]; the work tile's slot_idx are the first COUNT
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
) -> tuple[Any, Tensor]:
    """Attention of each token to the blocks that it selected, causal. Bitwise reproducible.

    Args:
        q: `[B,T,H,D]`, tokens `first_token` ...; bf16 or fp16, rows aligned (device.vectorizable).
        k, v: `[B,N,H_kv,D]` and `[...,D_v]`, at least all tokens up to those of q; dtype and alignment as q.
        indices: int32 `[B,H_kv,T,n]`, distinct blocks of `size` tokens, padded with -1 at any position. Blocks that
            start after their token have no effect.
        size: l'.
        scale: factor of q . k, > 0.
        packed: describes packed documents, with B = 1: their queries are the rows of q, their tokens those of k and v,
            and blocks count from each document's first token.
        init, local: number of forced blocks that indices hold for every token wherever they exist: the first `init` of
            its document, and `local` that end with its own. They are attended to in one pass (attend/forced.py).
        gating: for these tokens, of D = D_v and no pack: write out too, and o only into its `o_slc`.
        window: also attend to the window of these keys, together with the forced blocks (attend/window_combine.py).
            In its results, rows that belong to no query are left untouched.

    Returns:
        o `[B,T,H,D_v]`, with `gating` its o_slc or None, and lse fp32 `[B,H,T]`, natural log. Rows without keys, and
        rows after the last document, are 0 and -inf.

    Raises:
        ValueError: for arguments that the kernels do not support.
    """
    check_token_attention(q, k, v, indices, size, scale, first_token, packed)
    batch, tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[2:]
    group, slots = heads // kv_heads, indices.shape[3]
    o: Any = gating.o_slc if gating is not None else q.new_empty((batch, tokens, heads, v_dim))
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    if q.numel() == 0 or slots == 0:
        return None if o is None else o.zero_(), lse.fill_(-math.inf)

    if gating is not None and (gating.o_win is None) != (window is not None):
        raise ValueError("o of the window is given, or the window is attended to here: gating.o_win or window")
    has_forced = init + local > 0
    forced: dict[str, Any] = {"size": size, "scale": scale, "init": init, "local": local}
    if has_forced and packed is not None:
        lse.fill_(-math.inf)  # including rows that belong to no query
        if window is not None and o is not None:
            o.zero_()
    if has_forced and gating is None and window is None:
        forced_forward(q, k, v, o, lse, first_token=first_token, packed=packed, **forced)
    options = (dim, v_dim), q.dtype, group, slots, size, packed is not None, has_warpgroups(q.device)
    attend = KVOuterForward.compile(*options).run
    chunks = worklist_chunks(
        indices,
        size=size,
        min_rows=-(-MIN_TILE_ROWS // group),
        token_bytes=slots * group * (v_dim * q.element_size() + 4),
        max_bytes=PARTIAL_BYTES,
        first_token=first_token,
        packed=packed,
        init=init,
        local=local,
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
                    kept = None if o is None else o[b, t, q_heads]
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
            # The stream keeps them alive as long as needed
            del worklist, o_partial, lse_partial, qkv, chunk_gating, tables, chunk_lse, lses
    return o, lse
