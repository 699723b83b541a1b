"""Attention of each token to the blocks that every token of its block attends to, causal, and what its slots have.

    S_ij = scale q_i . k_j        j <= i in blocks 0 ... init-1 and b-local+1 ... b, b = i // l' (of its document)
    o_i = sum_j exp(S_ij - lse_i) v_j        lse_i = log sum_j exp(S_ij)

ForcedBlocks  one CTA: the tokens of one block x the G query heads of a key/value head, or where these are many rows a
              share of the tokens, and keys and values of their init + local blocks, which are the same for all of them
              and known without looking at what they chose. All keys of a row are there at once: one softmax
              (warp_rows.py). Where other blocks were visited before, in slots (token_selected.py), their o and lse are
              added to that in registers (row_slots.py). Then o and lse go to where they belong; or where the other
              branches are there already, their gated sum with o, which never goes to memory (row_branches.py).
              token_selected.py would write and read o for each of these blocks, and write it and read it once more
              between the attention to them and the slots.

Near a document's beginning both kinds of blocks meet: the local ones then begin with block `init`, and the last ones of
them lie behind the tokens. So nothing counts twice, the keys of a CTA ascend, and what is between them is behind init
blocks that all its tokens see: only the last block is masked, of the first CTAs of a document all.

Floor, 64K tokens, 64 heads over 4, D = 128, l' = 64, init + local = 3: 0.41 TFLOP, 0.69 ms at 600 TFLOP/s, half a block
of them for nothing; q and o once, 2.1 GB, 0.51 ms at 4.2 TB/s, at the same time; keys and values, 0.8 GB, from L2. With
n = 16, whose 13 other slots are read: 16.3 GB, 3.9 ms. The other branches are 2.1 GB more, 0.5 ms.

Four warps and two CTAs of a multiprocessor where shared memory has room for them (three blocks of 64 for D = D_v = 128:
96 KiB and 16 KiB for rows, twice), else eight warps. A lane has 16 loads of 16 bytes of slots under way for D_v = 128.

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

from cute_kernels.device import has_warpgroups
from cute_kernels.documents import TILE, TOKEN, document_at
from cute_kernels.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.row_branches import Others
from cute_kernels.row_slots import Slots
from cute_kernels.segments import fake_bounds, fake_table
from cute_kernels.warp import LANES
from cute_kernels.warp_rows import SHARED_PERCENT, Mine, WarpRows, block_bounds, heads_of

MOST_KEYS = 256
"""Of a CTA."""

SHARE_ROWS = 512
"""About the fewest of a CTA where the rows of a block are shared, so that a pass over some tokens has enough CTAs."""

SMEM_BYTES = 228 << 10
"""Of a multiprocessor."""

CTA_BYTES = 1 << 10
"""What each CTA takes of it for itself."""


def takes_forced(size: int, init: int, local: int) -> bool:
    """Whether there are forced blocks, and the kernel has room for them. Args: l', and blocks of either kind."""
    return 0 < (init + local) * size <= MOST_KEYS


def places_of_tokens(mX: cute.Tensor | None, group: int) -> cute.Tensor | None:
    """[B, T, H, D] as [B, H_kv, T, G, D]."""
    if mX is None:
        return None
    grouped = heads_of(mX, group)
    return cute.make_tensor(grouped.iterator, cute.select(grouped.layout, mode=[0, 2, 1, 3, 4]))


def statistics_of_tokens(mLse: cute.Tensor | None, group: int) -> cute.Tensor | None:
    """[B, H, T] as [B, H_kv, T, G]."""
    if mLse is None:
        return None
    batches, heads, tokens = mLse.layout.shape
    of_batch, of_head, of_token = mLse.layout.stride
    layout = cute.make_layout(
        (batches, heads // group, tokens, group), stride=(of_batch, of_head * group, of_token, of_head)
    )
    return cute.make_tensor(mLse.iterator, layout)


def of_cta(mX: cute.Tensor | None, mine: Mine, first: Int32) -> cute.Tensor | None:
    """Of [B, H_kv, places, G, D] what is the CTA's, from a place on."""
    if mX is None:
        return None
    return cute.domain_offset((first, 0, 0), mX[mine.batch, mine.kv_head, None, None, None])


class ForcedBlocks(WarpRows):
    """Args: dims of k and v; 16-bit type; G; l', tokens of a block; first and local blocks; whether to use WGMMA."""

    def __init__(
        self, dim: int, v_dim: int, dtype: Any, group: int, size: int, init: int, local: int, warpgroups: bool
    ) -> None:
        super().__init__(dim, v_dim, dtype, group, 1, size, init + local, 4, warpgroups)
        self.init, self.local, self.ctas = init, local, 2
        bytes_of_cta = 2 * (self.keys * (dim + v_dim) + self.warps * self.rows * dim) + CTA_BYTES
        if self.ctas * bytes_of_cta > SMEM_BYTES:
            self.warps, self.ctas = 8, 1
        self.shares = max(1, size * group // SHARE_ROWS)
        self.tokens = -(-size // self.shares)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,  # [B, T, H, D], of the tokens first_token ...
        mK: cute.Tensor,  # [B, N, H_kv, D]
        mV: cute.Tensor,  # [B, N, H_kv, D_v]
        mO: cute.Tensor,  # [B, T, H, D_v]
        mLse: cute.Tensor | None,  # fp32 [B, H, T]; None where there are other branches
        mBlocks: cute.Tensor | None,  # Visits.blocks, where there are slots
        mParts: cute.Tensor | None,  # their o [B, H_kv, T n, G, D_v]
        mPartLse: cute.Tensor | None,  # fp32 [B, H_kv, T n, G]
        mCmp: cute.Tensor | None,  # [B, T, H, D_v], where out is written in place of o
        mWin: cute.Tensor | None,  # likewise
        mGates: cute.Tensor | None,  # [B, T, H, 3]
        mTokens: cute.Tensor | None,  # OtherBranches.tokens, with mBounds: mO and mGates are of packed tokens then
        mBounds: cute.Tensor | None,  # Documents.bounds, whose tiles are the blocks
        first_token: Int32,
        scale: Float32,
        stream: Any,
    ):
        blocks = cute.ceil_div(first_token % self.size + mQ.shape[1], self.size)
        if const_expr(mBounds is not None):  # the most there can be, as a pass may begin inside of a block
            blocks = (mQ.shape[1] + mBounds.shape[1] * (self.size - 1)) // self.size
        self.kernel(
            heads_of(mQ, self.group),
            mK,
            mV,
            places_of_tokens(mO, self.group),
            statistics_of_tokens(mLse, self.group),
            mBlocks,
            mParts,
            mPartLse,
            places_of_tokens(mCmp, self.group),
            places_of_tokens(mWin, self.group),
            places_of_tokens(mGates, self.group),
            mTokens,
            mBounds,
            first_token,
            scale,
            *self._operands(),
        ).launch(
            grid=[blocks * self.shares, mK.shape[2], mK.shape[0]],
            block=[self.warps * LANES, 1, 1],
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
        mO: cute.Tensor,  # [B, H_kv, T, G, D_v]
        mLse: cute.Tensor | None,  # [B, H_kv, T, G]
        mBlocks: cute.Tensor | None,
        mParts: cute.Tensor | None,
        mPartLse: cute.Tensor | None,
        mCmp: cute.Tensor | None,  # as mO
        mWin: cute.Tensor | None,
        mGates: cute.Tensor | None,
        mTokens: cute.Tensor | None,
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
        block, share = mine.item // self.shares, mine.item % self.shares
        stop, number = first_token + mQ.shape[1], Int32(0)  # behind the last token; which block of its document it is
        if const_expr(mBounds is None):
            block += first_token // self.size
            number = block
        else:
            document = document_at(mBounds[TOKEN, None], first_token, 1, 1, 0)
            before = (first_token - mBounds[TOKEN, document]) // self.size  # more than it has if it ends earlier
            block += cutlass.min(mBounds[TILE, document] + before, mBounds[TILE, document + 1])
            document = document_at(mBounds[TILE, None], block, 1, 1, 0)
            number = block - mBounds[TILE, document]
        own, end = block_bounds(block, self.size, stop, mBounds)
        token = cutlass.max(own + share * self.tokens, first_token)
        end = cutlass.min(cutlass.min(own + cutlass.min((share + 1) * self.tokens, self.size), stop), end)
        start = token - first_token
        to = start  # the token's place in mO, mLse and mGates
        if const_expr(mTokens is not None):
            to = token - mBounds[TOKEN, document] + mTokens[document]
        others = None
        if const_expr(mCmp is not None):
            others = Others(of_cta(mCmp, mine, start), of_cta(mWin, mine, start), of_cta(mGates, mine, to))
        slots = None
        if const_expr(mBlocks is not None):
            places = start * mBlocks.shape[3]
            slots = Slots(
                cute.domain_offset((start, 0), mBlocks[mine.batch, mine.kv_head, None, None]),
                of_cta(mParts, mine, places),
                cute.domain_offset((places, 0), mPartLse[mine.batch, mine.kv_head, None, None]),
            )
        self._attend(
            mine,
            cute.domain_offset((0, start, 0, 0, 0), mQ),
            mK,
            mV,
            None,
            cute.domain_offset((0, 0, to, 0, 0), mO),
            cute.domain_offset((0, 0, to, 0), mLse) if const_expr(mLse is not None) else None,
            self._first_keys(own - number * self.size, number),
            end,
            (end - token) * self.group,
            token,
            scale,
            mma_s,
            mma_o,
            slots,
            others,
        )

    def _first_keys(self, document: Int32, number: Int32) -> tuple[Int32, ...]:
        """Of each block of the CTA. Args: the document's first token, and which of its blocks the CTA's is."""
        local = document + cutlass.max(number - self.local + 1, self.init) * self.size
        first = [document + i * self.size for i in range(self.init)]
        return (*first, *(local + i * self.size for i in range(self.local)))


@compiled_once
def _attend(
    dims: tuple[int, int],
    dtype: torch.dtype,
    group: int,
    size: int,
    init: int,
    local: int,
    packed: bool,
    slots: bool,
    others: bool,
    gates: torch.dtype | None,
    warpgroups: bool,
) -> Kernel:
    dim, v_dim = dims
    return compile_kernel(
        ForcedBlocks(dim, v_dim, CUTE_DTYPES[dtype], group, size, init, local, warpgroups),
        *[fake(dtype, None, None, None, columns) for columns in (dim, dim, v_dim, v_dim)],
        None if others else fake(torch.float32, None, None, None, aligned=False),
        fake_table() if slots else None,
        fake(dtype, None, None, None, group, v_dim) if slots else None,
        fake(torch.float32, None, None, None, group, aligned=False) if slots else None,
        *[fake(dtype, None, None, None, v_dim) if others else None for _ in range(2)],
        None if gates is None else fake(gates, None, None, None, 3, aligned=False),
        fake(torch.int32, None, aligned=False) if others and packed else None,
        fake_bounds() if packed else None,
        Int32(0),
        Float32(0.0),
    )


class OtherBranches(NamedTuple):
    """For their gated sum with the selected branch in place of its o and lse."""

    cmp: Tensor
    """`[B,T,H,D_v]`, as o."""
    win: Tensor
    """Likewise."""
    gates: Tensor | None
    """`[B,T,H,3]`, used as they are; None: 1/3 each."""
    tokens: Tensor | None = None
    """int32 `[documents + 1]`, with bounds: a document's first token where out and gates are of packed tokens, B = 1,
    and not of the rows of q; those of no document are left as they are in out."""

    def part(self, batches: slice, rows: slice, heads: slice) -> OtherBranches:
        """Of some query heads, and rows of q."""
        cmp, win = (x[batches, rows, heads] for x in (self.cmp, self.win))
        return OtherBranches(cmp, win, self.of_out(self.gates, batches, rows, heads), self.tokens)

    def of_out(self, x: Any, batches: slice, rows: slice, heads: slice) -> Any:
        """What of out, or the gates, the part is given."""
        return None if x is None else x[batches, rows if self.tokens is None else slice(None), heads]


def forced_blocks_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor | None,
    *,
    size: int,
    scale: float,
    init: int,
    local: int,
    first_token: int = 0,
    bounds: Tensor | None = None,
    slots: tuple[Tensor, Tensor, Tensor] | None = None,
    others: OtherBranches | None = None,
) -> None:
    """Attend to the first `init` blocks of a document and to `local` blocks that end with the token's own.

    Args:
        q, k, v, size, scale: as of `token_selected.token_selected_forward`, checked.
        o: `[B,T,H,D_v]` in q's dtype, where to write; rows aligned.
        lse: fp32 `[B,H,T]`, likewise, natural log. Rows of no document are left as they are, as in o.
        init, local: for which `takes_forced`.
        first_token, bounds: as there, but first_token may be any with bounds too: q is of some tokens then.
        slots: what other blocks gave, to count too: int32 `[B,H_kv,T,n]`, -1 for a slot that counts nothing; o
            `[B,H_kv,T n,G,D_v]` in q's dtype, rows aligned; lse fp32 `[B,H_kv,T n,G]`.
        others: write the gated sum of all branches in place of o; lse is None then.
    """
    dims, group = (q.shape[3], v.shape[3]), q.shape[2] // k.shape[2]
    gates = None if others is None or others.gates is None else others.gates.dtype
    how = size, init, local, bounds is not None, slots is not None, others is not None, gates, has_warpgroups(q.device)
    beside = *(slots or (None,) * 3), *(others or (None,) * 4)
    _attend(dims, q.dtype, group, *how).run(q, k, v, o, lse, *beside, bounds, first_token, scale)
