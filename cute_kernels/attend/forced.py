"""Attention of each token to the blocks that every token of its block attends to, causal, in one go.

    S_ij = scale q_i . k_j        j <= i in blocks 0 ... init-1 and b-local+1 ... b, b = i // l' (of its document)
    o_i = sum_j exp(S_ij - lse_i) v_j        lse_i = log sum_j exp(S_ij)

ForcedForward  one CTA: the tokens of one block x the G query heads of a key/value head, and keys and values of their
              init + local blocks, which are the same for all of them and known without looking at what they chose.
              All keys of a row are there at once: one softmax (warp_rows.py), then o and lse to where they belong.
              attend/kv_outer.py would write and read o for each of these blocks.
ForcedCombineAndGate   the same behind visits of other blocks: a warp adds what the slots have, and the other branches,
              to the rows that it has in registers (attend/combine.py), and writes NSA's out; o and gates too where a
              backward will read them. The rows of a block are shared by CTAs of about SHARE_ROWS, so that a pass over
              some tokens has enough.

Near a document's beginning both kinds of blocks meet: the local ones then begin with block `init`, and the last ones of
them lie behind the tokens. So nothing counts twice, the keys of a CTA ascend, and what is between them is behind init
blocks that all its tokens see: only the last block is masked, of the first CTAs of a document all.

Floor, 64K tokens, 64 heads over 4, D = 128, l' = 64, init + local = 3: 0.41 TFLOP, 0.69 ms at 600 TFLOP/s, half a block
of them for nothing; q and o once, 2.1 GB, 0.51 ms at 4.2 TB/s, at the same time; keys and values, 0.4 GB, from L2.

Four warps and two CTAs of a multiprocessor where shared memory has room for them (three blocks of 64 for D = D_v = 128:
96 KiB and 16 KiB for rows, twice), else eight warps.

ForcedCombineAndGate for n = 16 reads o of 13 slots, 14.0 GB, o_cmp and o_win beside q, and writes out: 18.3 GB, 4.4 ms;
with o and gates 19.5 GB.

Limits: those of warp_rows.py: (init + local) l' <= MOST_KEYS, for S is in registers; rows start at multiples of 16
bytes. All blocks that are read must hold finite values up to the last token of the CTA's own block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from torch import Tensor

from cute_kernels.attend.combine import CombineInputs
from cute_kernels.attend.warp_rows import SHARED_PERCENT, CtaContext, WarpRows, block_bounds, heads_of
from cute_kernels.gate.forward import Gating, fake_gating
from cute_kernels.lists.worklist import Worklist, fake_bounds, fake_slots
from cute_kernels.mma.warp import LANES
from cute_kernels.pool.documents import TILE, document_at
from cute_kernels.runtime.device import has_warpgroups
from cute_kernels.runtime.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake

MOST_KEYS = 256
"""Of a CTA."""

SHARE_ROWS = 512
"""Of a CTA of ForcedCombineAndGate, about, at the fewest."""

SMEM_BYTES = 228 << 10
"""Of a multiprocessor."""

CTA_BYTES = 1 << 10
"""What each CTA takes of it for itself."""


def takes_forced(size: int, init: int, local: int) -> bool:
    """Whether there are forced blocks, and the kernel has room for them. Args: l', and blocks of either kind."""
    return 0 < (init + local) * size <= MOST_KEYS


def places_of_tokens(mX: cute.Tensor | None, group: int) -> cute.Tensor | None:
    """[B, T, H, D] as [B, H_kv, T, G, D], if there is such a tensor."""
    if mX is None:
        return None
    grouped = heads_of(mX, group)
    return cute.make_tensor(grouped.iterator, cute.select(grouped.layout, mode=[0, 2, 1, 3, 4]))


def statistics_of_tokens(mLse: cute.Tensor, group: int) -> cute.Tensor:
    """[B, H, T] as [B, H_kv, T, G]."""
    batches, heads, tokens = mLse.layout.shape
    of_batch, of_head, of_token = mLse.layout.stride
    layout = cute.make_layout(
        (batches, heads // group, tokens, group), stride=(of_batch, of_head * group, of_token, of_head)
    )
    return cute.make_tensor(mLse.iterator, layout)


def of_cta(mX: cute.Tensor | None, mine: CtaContext, first: Int32) -> cute.Tensor | None:
    """Of [B, H_kv, places, G, D], if there is such a tensor, what is the CTA's, from a place on."""
    return None if mX is None else cute.domain_offset((first, 0, 0), mX[mine.batch, mine.kv_head, None, None, None])


class Tokens(NamedTuple):
    """Which tokens a CTA has."""

    before: Int32
    """Of those that the kernel is given."""
    first_keys: tuple[Int32, ...]
    """Of each of its blocks."""
    end: Int32
    """Behind its last token, counted as keys are."""
    num_rows: Int32


class ForcedForward(WarpRows):
    """Args: dims of k and v; 16-bit type; G; l', tokens of a block; first and local blocks; whether to use WGMMA."""

    shares = 1
    """CTAs of a block."""

    def __init__(
        self, dim: int, v_dim: int, dtype: Any, group: int, size: int, init: int, local: int, warpgroups: bool
    ) -> None:
        super().__init__(dim, v_dim, dtype, group, 1, size, init + local, 4, warpgroups)
        self.init, self.local, self.ctas = init, local, 2
        bytes_of_cta = 2 * (self.keys * (dim + v_dim) + self.warps * self.rows * dim) + CTA_BYTES
        if self.ctas * bytes_of_cta > SMEM_BYTES:
            self.warps, self.ctas = 8, 1

    def _launch(self, mQ: cute.Tensor, mK: cute.Tensor, mBounds: cute.Tensor | None, first_token: Int32) -> Any:
        blocks = cute.ceil_div(first_token % self.size + mQ.shape[1], self.size)
        if const_expr(mBounds is not None):
            blocks = (mQ.shape[1] + (mBounds.shape[1] - 1) * (self.size - 1)) // self.size  # the most there can be
        return {
            "grid": [blocks * self.shares, mK.shape[2], mK.shape[0]],
            "block": [self.warps * LANES, 1, 1],
            "min_blocks_per_mp": self.ctas,
            "preferred_smem_carveout": SHARED_PERCENT,
        }

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D], of the tokens first_token ...
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        mO: cute.Tensor,  # [B, T, H, D_v]
        mLse: cute.Tensor,  # fp32 [B, H, T]
        mBounds: cute.Tensor | None,  # Documents.bounds, whose tiles are the blocks
        first_token: Int32,
        scale: Float32,
        stream: Any,
    ):
        self.kernel(
            heads_of(mQ, self.group),
            mK,
            mV,
            places_of_tokens(mO, self.group),
            statistics_of_tokens(mLse, self.group),
            mBounds,
            first_token,
            scale,
            *self._operands(),
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
        mma_s: cute.TiledMma,
        mma_o: cute.TiledMma,
        row_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout,
        value_layout: cute.ComposedLayout,
    ):
        mine = self._begin(mma_s, mma_o, row_layout, key_layout, value_layout)
        at = self._tokens(mine, mQ, mBounds, first_token)
        self._attend_tokens(mine, at, mQ, mK, mV, mO, mLse, first_token, scale)

    @cute.jit
    def _attend_tokens(
        self,
        mine: CtaContext,
        at: Tokens,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLse: cute.Tensor,
        first_token: Int32,
        scale: Float32,
        rest: CombineInputs | None = None,
    ):
        """Args: as of `kernel`; `rest`: as of `_attend`."""
        self._attend(
            mine,
            cute.domain_offset((0, at.before, 0, 0, 0), mQ),
            mK,
            mV,
            None,
            cute.domain_offset((0, 0, at.before, 0, 0), mO),
            cute.domain_offset((0, 0, at.before, 0), mLse),
            at.first_keys,
            at.end,
            at.num_rows,
            first_token + at.before,
            scale,
            rest,
        )

    @cute.jit
    def _tokens(self, mine: CtaContext, mQ: cute.Tensor, mBounds: cute.Tensor | None, first_token: Int32) -> Tokens:
        """Args: `mQ`: as of `kernel`."""
        item, share = mine.item // self.shares, mine.item % self.shares
        block, number = item, item  # in the sequence or pack; in its document
        if const_expr(mBounds is None):
            block += first_token // self.size
            number = block
        else:
            number -= mBounds[TILE, document_at(mBounds[TILE, None], block, 1, 1, 0)]
        own, end = block_bounds(block, self.size, first_token + mQ.shape[1], mBounds)
        tokens = const_expr(-(-self.size // self.shares))
        token = cutlass.max(own + share * tokens, first_token)
        end = cutlass.min(own + cutlass.min((share + 1) * tokens, self.size), end)
        first_keys = self._first_keys(own - number * self.size, number)
        return Tokens(token - first_token, first_keys, end, (end - token) * self.group)

    def _first_keys(self, document: Int32, number: Int32) -> tuple[Int32, ...]:
        """Of each block of the CTA. Args: the document's first token, and which of its blocks the CTA's is."""
        local = document + cutlass.max(number - self.local + 1, self.init) * self.size
        first = [document + i * self.size for i in range(self.init)]
        return (*first, *(local + i * self.size for i in range(self.local)))


class ForcedCombineAndGate(ForcedForward):
    """ForcedForward of sequences, which writes out in place of o. Args: as of ForcedForward, with one dim."""

    def __init__(self, dim: int, dtype: Any, group: int, size: int, init: int, local: int, warpgroups: bool) -> None:
        super().__init__(dim, dim, dtype, group, size, init, local, warpgroups)
        self.shares = max(1, size * group // SHARE_ROWS)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D], of the tokens first_token ...
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D]
        mBlocks: cute.Tensor,  # Worklist.slot_blocks
        mParts: cute.Tensor,  # [B, H_kv, T n, G, D]
        mPartLse: cute.Tensor,  # fp32 [B, H_kv, T n, G]
        mOut: cute.Tensor,  # [B, T, H, D]
        mLse: cute.Tensor,  # fp32 [B, H, T]
        mW: cute.Tensor | None,  # [H, 3, D]
        mG: cute.Tensor | None,  # [B, T, H, 3]: without mW read, with it written
        mCmp: cute.Tensor,  # [B, T, H, D]
        mWin: cute.Tensor,
        mSlc: cute.Tensor | None,  # likewise, o of the selected branch
        first_token: Int32,
        scale: Float32,
        stream: Any,
    ):
        self.kernel(
            heads_of(mQ, self.group),
            mK,
            mV,
            mBlocks,
            mParts,
            mPartLse,
            places_of_tokens(mOut, self.group),
            statistics_of_tokens(mLse, self.group),
            mW,
            places_of_tokens(mG, self.group),
            places_of_tokens(mCmp, self.group),
            places_of_tokens(mWin, self.group),
            places_of_tokens(mSlc, self.group),
            first_token,
            scale,
            *self._operands(),
        ).launch(stream=stream, **self._launch(mQ, mK, None, first_token))

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,  # [B, T, H_kv, G, D]
        mK: cute.Tensor,
        mV: cute.Tensor,
        mBlocks: cute.Tensor,
        mParts: cute.Tensor,
        mPartLse: cute.Tensor,
        mOut: cute.Tensor,  # [B, H_kv, T, G, D], as what is like it
        mLse: cute.Tensor,  # [B, H_kv, T, G]
        mW: cute.Tensor | None,
        mG: cute.Tensor | None,  # [B, H_kv, T, G, 3]
        mCmp: cute.Tensor,
        mWin: cute.Tensor,
        mSlc: cute.Tensor | None,
        first_token: Int32,
        scale: Float32,
        mma_s: cute.TiledMma,
        mma_o: cute.TiledMma,
        row_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout,
        value_layout: cute.ComposedLayout,
    ):
        mine = self._begin(mma_s, mma_o, row_layout, key_layout, value_layout)
        at = self._tokens(mine, mQ, None, first_token)
        gWeight = None
        if const_expr(mW is not None):
            gWeight = cute.domain_offset((mine.kv_head * self.group, 0, 0), mW)
        gGates, gSlc = of_cta(mG, mine, at.before), of_cta(mSlc, mine, at.before)
        places = at.before * mBlocks.shape[3]
        rest = CombineInputs(
            cute.domain_offset((at.before, 0), mBlocks[mine.batch, mine.kv_head, None, None]),
            of_cta(mParts, mine, places),
            cute.domain_offset((places, 0), mPartLse[mine.batch, mine.kv_head, None, None]),
            gWeight,
            gGates,
            of_cta(mCmp, mine, at.before),
            of_cta(mWin, mine, at.before),
            gSlc,
        )
        self._attend_tokens(mine, at, mQ, mK, mV, mOut, mLse, first_token, scale, rest)


@compiled_once
def _attend(
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
        *[fake(dtype, None, None, None, columns) for columns in (dim, dim, v_dim, v_dim)],
        fake(torch.float32, None, None, None, aligned=False),
        fake_bounds() if packed else None,
        Int32(0),
        Float32(0.0),
    )


@compiled_once
def _attend_gated(
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
    q, k, v, out = (fake(dtype, None, None, None, dim) for _ in range(4))
    return compile_kernel(
        ForcedCombineAndGate(dim, CUTE_DTYPES[dtype], group, size, init, local, warpgroups),
        q,
        k,
        v,
        fake_slots(),
        fake(dtype, None, None, None, group, dim),
        fake(torch.float32, None, None, None, group, aligned=False),
        out,
        fake(torch.float32, None, None, None, aligned=False),
        *fake_gating(dim, dtype, w_dtype, g_dtype, keeps),
        Int32(0),
        Float32(0.0),
    )


def forced_blocks_forward(
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
    bounds: Tensor | None = None,
) -> None:
    """Attend to the first `init` blocks of a document and to `local` blocks that end with the token's own.

    Args:
        q, k, v, size, scale, first_token, bounds: as of `token_selected.kv_outer_forward`, checked.
        o: `[B,T,H,D_v]` in q's dtype, where to write; rows aligned.
        lse: fp32 `[B,H,T]`, likewise, natural log. Rows of no document are left as they are, as in o.
        init, local: for which `takes_forced`.
    """
    dims, group = (q.shape[3], v.shape[3]), q.shape[2] // k.shape[2]
    how = size, init, local, bounds is not None, has_warpgroups(q.device)
    _attend(dims, q.dtype, group, *how).run(q, k, v, o, lse, bounds, first_token, scale)


def gated_forced_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    worklist: Worklist,
    parts: Tensor,
    part_lse: Tensor,
    gating: Gating,
    lse: Tensor,
    *,
    size: int,
    scale: float,
    init: int,
    local: int,
) -> None:
    """Attend to the forced blocks, add what slots have of the other ones, and the other branches: all of out.

    Args:
        q, k, v, size, scale, init, local: as of `forced_blocks_forward`, with D = D_v, of the worklist's tokens.
        worklist: of the blocks that are not forced.
        parts: `[B,H_kv,T n,G,D]`, o of the slots, read for those that visit a block.
        part_lse: fp32 `[B,H_kv,T n,G]`, likewise.
        gating: of these tokens and heads.
        lse: fp32 `[B,H,T]`, where to write that of the selected branch, natural log.
    """
    how = size, init, local, *gating.variant, has_warpgroups(q.device)
    run = _attend_gated(q.shape[3], q.dtype, parts.shape[3], *how).run
    run(q, k, v, worklist.slot_blocks, parts, part_lse, gating.out, lse, *gating.arguments, worklist.first_token, scale)
