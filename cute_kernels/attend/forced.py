"""Attention to forced blocks, to which all tokens of a block attend, in one pass: the initial and the local blocks.

    S_ij = scale q_i . k_j        j <= i in blocks 0 ... init-1 and b-local+1 ... b, b = i // l' (of its document)
    o_i = sum_j exp(S_ij - lse_i) v_j        lse_i = log sum_j exp(S_ij)

ForcedForward         one CTA: the tokens of one block x the G query heads of a key/value head, and keys and values of
                      their init + local blocks, the same for all of them whatever they selected. All keys of a row are
                      resident at once (warp_rows.py); o and lse are written to their final place, whereas kv_outer.py
                      would write and read a partial for each of these blocks.
ForcedCombineAndGate  the same after KVOuterForward has attended to the other blocks: the epilogue combines a row in
                      registers with its partials, gates it with the other branches (combine_rows.py) and writes
                      NSA's out; also o and gates if a backward will read them. The rows of a block are divided among
                      CTAs of about CTA_ROWS, so that a chunk of tokens fills the GPU.

Floor, 64K tokens, 64 heads over 4, D = 128, l' = 64, init + local = 3: 0.41 TFLOP, 0.69 ms at 600 TFLOP/s, of which
half a block is masked; q and o once, 2.1 GB, 0.51 ms at 4.2 TB/s, concurrently; keys and values, 0.4 GB, from L2.
ForcedCombineAndGate for n = 16 reads the partials of 13 slots, 14.0 GB, o_cmp and o_win besides q, and writes out: 18.3
GB, 4.4 ms; with o and gates 19.5 GB.

Limits: those of warp_rows.py; (init + local) l' <= 256, since S is in registers; rows 16-byte aligned. All blocks
that are read must hold finite values up to the last token of the CTA's own block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from torch import Tensor

from cute_kernels.attend.combine_rows import CombineInputs
from cute_kernels.attend.views import (
    group_heads,
    group_heads_first,
    group_lse_heads,
    most_token_blocks,
    token_block,
)
from cute_kernels.attend.warp_rows import CtaContext, Mmas, WarpRows
from cute_kernels.gate.forward import Gating, fake_gating
from cute_kernels.lists.worklist import Worklist, fake_slots
from cute_kernels.mma.smem import RESERVED_SMEM_BYTES, SM_SMEM_BYTES, SMEM_CARVEOUT
from cute_kernels.mma.warp import LANES
from cute_kernels.pool.documents import PackedBlocks, fake_tables
from cute_kernels.runtime.device import has_warpgroups
from cute_kernels.runtime.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake, fake_heads, fake_stats

CTA_ROWS = 512
"""Approximate minimum rows, tokens x G, per CTA of ForcedCombineAndGate."""


def slice_cta(mX: cute.Tensor | None, cta: CtaContext, first: Int32) -> cute.Tensor | None:
    """[rows, G, D] from row `first` on, for the CTA's batch and head, of [B, H_kv, rows, G, D]; None stays None."""
    return None if mX is None else cute.domain_offset((first, 0, 0), mX[cta.batch, cta.kv_head, None, None, None])


class CtaTokens(NamedTuple):
    """Tokens of a CTA, and keys of its blocks."""

    first: Int32
    """Row of the first token in the queries passed to the kernel."""
    position: Int32
    """Index of the first token in the keys' numbering."""
    first_keys: tuple[Int32, ...]
    """First key of each block."""
    end: Int32
    """Exclusive end of the tokens, in the keys' numbering."""
    num_rows: Int32
    """Number of tokens x G."""


class ForcedForward(WarpRows):
    """Args:
    dim, v_dim, dtype: D, D_v and their 16-bit type.
    group: G.
    size: l', tokens per block.
    init, local: number of initial and of local blocks.
    warpgroups: use WGMMA.
    """

    ctas_per_block = 1

    def __init__(
        self, dim: int, v_dim: int, dtype: Any, group: int, size: int, init: int, local: int, warpgroups: bool
    ) -> None:
        super().__init__(dim, v_dim, dtype, group, 1, size, init + local, 4, warpgroups)
        # Four warps and two CTAs per SM if shared memory has room for them (three blocks of 64, D = D_v = 128: 96 KiB
        # and 16 KiB for rows, twice), otherwise eight warps
        self.init, self.local, self.ctas_per_sm = init, local, 2
        smem_bytes = 2 * (self.keys * (dim + v_dim) + self.warps * self.rows * dim) + RESERVED_SMEM_BYTES
        if self.ctas_per_sm * smem_bytes > SM_SMEM_BYTES:
            self.warps, self.ctas_per_sm = 8, 1

    @staticmethod
    @compiled_once
    def compile(
        dims: tuple[int, int],
        dtype: torch.dtype,
        group: int,
        size: int,
        init: int,
        local: int,
        packed: bool,
        warpgroups: bool,
    ) -> Kernel:
        dim, v_dim = dims
        return compile_kernel(
            ForcedForward(dim, v_dim, CUTE_DTYPES[dtype], group, size, init, local, warpgroups),
            *fake_heads(dtype, dim, dim, v_dim, v_dim),
            *fake_stats(1),
            fake_tables()[0] if packed else None,
            Int32(0),
            Float32(0.0),
        )

    def _launch(self, mQ: cute.Tensor, mK: cute.Tensor, mBounds: cute.Tensor | None, first_token: Int32) -> Any:
        blocks = most_token_blocks(mQ.shape[1], self.size, first_token, mBounds)
        return {
            "grid": [blocks * self.ctas_per_block, mK.shape[2], mK.shape[0]],
            "block": [self.warps * LANES, 1, 1],
            "min_blocks_per_mp": self.ctas_per_sm,
            "preferred_smem_carveout": SMEM_CARVEOUT,
        }

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D], of the tokens first_token ...
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        mO: cute.Tensor,  # [B, T, H, D_v]
        mLse: cute.Tensor,  # fp32 [B, H, T]
        mBounds: cute.Tensor | None,  # PackedBlocks.bounds
        first_token: Int32,
        scale: Float32,
        stream: Any,
    ):
        self.kernel(
            group_heads(mQ, self.group),
            mK,
            mV,
            group_heads_first(mO, self.group),
            group_lse_heads(mLse, self.group),
            mBounds,
            first_token,
            scale,
            self._mmas(),
        ).launch(stream=stream, **self._launch(mQ, mK, mBounds, first_token))

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # [B, T, H_kv, G, D]
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,  # [B, H_kv, T, G, D_v]
        mLse: cute.Tensor,  # [B, H_kv, T, G]
        mBounds: cute.Tensor | None,
        first_token: Int32,
        scale: Float32,
        mmas: Mmas,
    ):
        cta = self._set_up(mmas)
        tokens = self._cta_tokens(cta, mQ, mBounds, first_token)
        self._attend_tokens(cta, tokens, mQ, mK, mV, mO, mLse, scale)

    @cute.jit
    def _attend_tokens(
        self,
        cta: CtaContext,
        tokens: CtaTokens,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        scale: Float32,
        combine: CombineInputs | None = None,
    ):
        """Args: see `kernel`; `combine`: see `_attend`."""
        self._attend(
            cta,
            cute.domain_offset((0, tokens.first, 0, 0, 0), mQ),
            mK,
            mV,
            None,
            cute.domain_offset((0, 0, tokens.first, 0, 0), mO),
            cute.domain_offset((0, 0, tokens.first, 0), mLse),
            tokens.first_keys,
            tokens.end,
            tokens.num_rows,
            tokens.position,
            scale,
            combine,
        )

    @cute.jit
    def _cta_tokens(
        self, cta: CtaContext, mQ: cute.Tensor, mBounds: cute.Tensor | None, first_token: Int32
    ) -> CtaTokens:
        """Args: `mQ`: see `kernel`."""
        part = cta.work_idx % self.ctas_per_block
        at = token_block(cta.work_idx // self.ctas_per_block, self.size, mQ.shape[1], first_token, mBounds)
        part_tokens = const_expr(-(-self.size // self.ctas_per_block))
        own = at.block * self.size
        token = cutlass.max(own + part * part_tokens, at.start)
        end = cutlass.min(own + cutlass.min((part + 1) * part_tokens, self.size), at.end)
        first_keys = self._first_keys(at.first_key, at.block)
        num_rows = (end - token) * self.group
        return CtaTokens(at.first_row + token, at.first_key + token, first_keys, at.first_key + end, num_rows)

    def _first_keys(self, document: Int32, block: Int32) -> tuple[Int32, ...]:
        """First key of each block. Args: document: first token. block: the tokens' own, within the document."""
        # Near the start of a document both kinds of blocks would overlap: there the local blocks start at block `init`,
        # and the last of them are after the tokens. So no key counts twice, the keys of a CTA ascend, and their only
        # gap comes after the init blocks, which all of its tokens see
        local = document + cutlass.max(block - self.local + 1, self.init) * self.size
        first = [document + i * self.size for i in range(self.init)]
        return (*first, *(local + i * self.size for i in range(self.local)))


class ForcedCombineAndGate(ForcedForward):
    """ForcedForward for sequences that writes NSA's out instead of o. Args: as for ForcedForward, with D = D_v."""

    def __init__(self, dim: int, dtype: Any, group: int, size: int, init: int, local: int, warpgroups: bool) -> None:
        super().__init__(dim, dim, dtype, group, size, init, local, warpgroups)
        self.ctas_per_block = max(1, size * group // CTA_ROWS)

    @staticmethod
    @compiled_once
    def compile(  # type: ignore[override]
        dim: int,
        dtype: torch.dtype,
        group: int,
        size: int,
        init: int,
        local: int,
        w_dtype: torch.dtype | None,
        g_dtype: torch.dtype | None,
        keeps: bool,
        warpgroups: bool,
    ) -> Kernel:
        q, k, v, out = fake_heads(dtype, dim, dim, dim, dim)
        return compile_kernel(
            ForcedCombineAndGate(dim, CUTE_DTYPES[dtype], group, size, init, local, warpgroups),
            q,
            k,
            v,
            fake_slots(),
            fake(dtype, None, None, None, group, dim),
            fake(torch.float32, None, None, None, group, aligned=False),
            out,
            *fake_stats(1),
            *fake_gating(dim, dtype, w_dtype, g_dtype, keeps),
            Int32(0),
            Float32(0.0),
        )

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D], of the tokens first_token ...
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D]
        mSlotBlocks: cute.Tensor,  # Worklist.slot_blocks
        mOPartial: cute.Tensor,  # [B, H_kv, T n, G, D]
        mLsePartial: cute.Tensor,  # fp32 [B, H_kv, T n, G]
        mOut: cute.Tensor,  # [B, T, H, D]
        mLse: cute.Tensor,  # fp32 [B, H, T]
        mW: cute.Tensor | None,  # [H, 3, D]
        mG: cute.Tensor | None,  # [B, T, H, 3]: output with mW, input without
        mCmp: cute.Tensor,  # [B, T, H, D]
        mWin: cute.Tensor,
        mSlc: cute.Tensor | None,  # [B, T, H, D], output for o of the selected branch
        first_token: Int32,
        scale: Float32,
        stream: Any,
    ):
        self.kernel(
            group_heads(mQ, self.group),
            mK,
            mV,
            mSlotBlocks,
            mOPartial,
            mLsePartial,
            group_heads_first(mOut, self.group),
            group_lse_heads(mLse, self.group),
            mW,
            group_heads_first(mG, self.group),
            group_heads_first(mCmp, self.group),
            group_heads_first(mWin, self.group),
            group_heads_first(mSlc, self.group),
            first_token,
            scale,
            self._mmas(),
        ).launch(stream=stream, **self._launch(mQ, mK, None, first_token))

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # [B, T, H_kv, G, D]
        mK: cute.Tensor,
        mV: cute.Tensor,
        mSlotBlocks: cute.Tensor,
        mOPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mOut: cute.Tensor,  # [B, H_kv, T, G, D], like mCmp, mWin and mSlc
        mLse: cute.Tensor,  # [B, H_kv, T, G]
        mW: cute.Tensor | None,
        mG: cute.Tensor | None,  # [B, H_kv, T, G, 3]
        mCmp: cute.Tensor,
        mWin: cute.Tensor,
        mSlc: cute.Tensor | None,
        first_token: Int32,
        scale: Float32,
        mmas: Mmas,
    ):
        cta = self._set_up(mmas)
        tokens = self._cta_tokens(cta, mQ, None, first_token)
        gWeight = None
        if const_expr(mW is not None):
            gWeight = cute.domain_offset((cta.kv_head * self.group, 0, 0), mW)  # [G, 3, D]
        # [T, G, 3] and 16 bits [T, G, D], from the CTA's first token on
        gGates, gSlc = slice_cta(mG, cta, tokens.first), slice_cta(mSlc, cta, tokens.first)
        first_slot = tokens.first * mSlotBlocks.shape[3]
        combine = CombineInputs(
            gSlotBlocks=cute.domain_offset((tokens.first, 0), mSlotBlocks[cta.batch, cta.kv_head, None, None]),
            gOPartial=slice_cta(mOPartial, cta, first_slot),
            gLsePartial=cute.domain_offset((first_slot, 0), mLsePartial[cta.batch, cta.kv_head, None, None]),
            gWeight=gWeight,
            gGates=gGates,
            gCmp=slice_cta(mCmp, cta, tokens.first),
            gWin=slice_cta(mWin, cta, tokens.first),
            gSlc=gSlc,
        )
        self._attend_tokens(cta, tokens, mQ, mK, mV, mOut, mLse, scale, combine)


def forced_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    size: int,
    scale: float,
    init: int,
    local: int,
    first_token: int = 0,
    packed: PackedBlocks | None = None,
) -> None:
    """Attend to the first `init` blocks of a document and to the `local` blocks that end with the token's own block.

    Args:
        q, k, v, size, scale, first_token, packed: see `kv_outer.kv_outer_forward`; already checked.
        o: `[B,T,H,D_v]` in q's dtype, output; rows aligned.
        lse: fp32 `[B,H,T]`, output, natural log. Rows that belong to no query are left untouched, in o too.
        init, local: of MAX_FORCED_KEYS keys at most.
    """
    dims, group = (q.shape[3], v.shape[3]), q.shape[2] // k.shape[2]
    options = size, init, local, packed is not None, has_warpgroups(q.device)
    bounds = None if packed is None else packed.bounds
    ForcedForward.compile(dims, q.dtype, group, *options).run(q, k, v, o, lse, bounds, first_token, scale)


def forced_combine_and_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    worklist: Worklist,
    o_partial: Tensor,
    gating: Gating,
    *,
    lse_partial: Tensor,
    lse: Tensor,
    size: int,
    scale: float,
    init: int,
    local: int,
) -> None:
    """Attend to forced blocks, add the partials of other blocks, and gate with the other branches into `gating.out`.

    Args:
        q, k, v, size, scale, init, local: see `forced_forward`, with D = D_v, for the worklist's tokens.
        worklist: lists the blocks that are not forced.
        o_partial, lse_partial: `[B,H_kv,T n,G,D]` and fp32 `[B,H_kv,T n,G]`, read only for slots that have a block.
        gating: for these tokens and heads.
        lse: fp32 `[B,H,T]`, output for the lse of the selected branch, natural log.
    """
    options = size, init, local, *gating.variant, has_warpgroups(q.device)
    run = ForcedCombineAndGate.compile(q.shape[3], q.dtype, o_partial.shape[3], *options).run
    partials = worklist.slot_blocks, o_partial, lse_partial
    run(q, k, v, *partials, gating.out, lse, *gating.arguments, worklist.first_token, scale)
