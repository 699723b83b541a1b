"""Attention of each token to the blocks that every token of its block attends to, causal, in one go.

    S_ij = scale q_i . k_j        j <= i in blocks 0 ... init-1 and b-local+1 ... b, b = i // l' (of its document)
    o_i = sum_j exp(S_ij - lse_i) v_j        lse_i = log sum_j exp(S_ij)

ForcedBlocks  one CTA: the tokens of one block x the G query heads of a key/value head, and keys and values of their
              init + local blocks, which are the same for all of them and known without looking at what they chose.
              All keys of a row are there at once: one softmax (warp_rows.py), then o and lse to where they belong.
              token_selected.py would write and read o for each of these blocks.

Near a document's beginning both kinds of blocks meet: the local ones then begin with block `init`, and the last ones of
them lie behind the tokens. So nothing counts twice, the keys of a CTA ascend, and what is between them is behind init
blocks that all its tokens see: only the last block is masked, of the first CTAs of a document all.

Floor, 64K tokens, 64 heads over 4, D = 128, l' = 64, init + local = 3: 0.41 TFLOP, 0.69 ms at 600 TFLOP/s, half a block
of them for nothing; q and o once, 2.1 GB, 0.51 ms at 4.2 TB/s, at the same time; keys and values, 0.4 GB, from L2.

Four warps and two CTAs of a multiprocessor where shared memory has room for them (three blocks of 64 for D = D_v = 128:
96 KiB and 16 KiB for rows, twice), else eight warps.

Limits: those of warp_rows.py: (init + local) l' <= MOST_KEYS, for S is in registers; rows start at multiples of 16
bytes. All blocks that are read must hold finite values up to the last token of the CTA's own block.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from torch import Tensor

from cute_kernels.device import has_warpgroups
from cute_kernels.documents import TILE, document_at
from cute_kernels.jit import CUTE_DTYPES, Kernel, compile_kernel, compiled_once, fake
from cute_kernels.segments import fake_bounds
from cute_kernels.warp import LANES
from cute_kernels.warp_rows import SHARED_PERCENT, WarpRows, block_bounds, heads_of

MOST_KEYS = 256
"""Of a CTA."""

SMEM_BYTES = 228 << 10
"""Of a multiprocessor."""

CTA_BYTES = 1 << 10
"""What each CTA takes of it for itself."""


def takes_forced(size: int, init: int, local: int) -> bool:
    """Whether there are forced blocks, and the kernel has room for them. Args: l', and blocks of either kind."""
    return 0 < (init + local) * size <= MOST_KEYS


def places_of_tokens(mX: cute.Tensor, group: int) -> cute.Tensor:
    """[B, T, H, D] as [B, H_kv, T, G, D]."""
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
        blocks = cute.ceil_div(first_token % self.size + mQ.shape[1], self.size)
        if const_expr(mBounds is not None):
            blocks = (mQ.shape[1] + (mBounds.shape[1] - 1) * (self.size - 1)) // self.size  # the most there can be
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
        ).launch(
            grid=[blocks, mK.shape[2], mK.shape[0]],
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
        mine = self._begin(row_layout, key_layout, value_layout)
        block, number = mine.item, mine.item  # in the sequence or pack; in its document
        if const_expr(mBounds is None):
            block += first_token // self.size
            number = block
        else:
            number -= mBounds[TILE, document_at(mBounds[TILE, None], block, 1, 1, 0)]
        own, end = block_bounds(block, self.size, first_token + mQ.shape[1], mBounds)
        end = cutlass.min(own + self.size, end)
        document = own - number * self.size  # its first token
        token = cutlass.max(own, first_token)
        before = token - first_token
        self._attend(
            mine,
            cute.domain_offset((0, before, 0, 0, 0), mQ),
            mK,
            mV,
            None,
            cute.domain_offset((0, 0, before, 0, 0), mO),
            cute.domain_offset((0, 0, before, 0), mLse),
            self._first_keys(document, number),
            end,
            (end - token) * self.group,
            token,
            scale,
            mma_s,
            mma_o,
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
    warpgroups: bool,
) -> Kernel:
    dim, v_dim = dims
    return compile_kernel(
        ForcedBlocks(dim, v_dim, CUTE_DTYPES[dtype], group, size, init, local, warpgroups),
        *[fake(dtype, None, None, None, columns) for columns in (dim, dim, v_dim, v_dim)],
        fake(torch.float32, None, None, None, aligned=False),
        fake_bounds() if packed else None,
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
        q, k, v, size, scale, first_token, bounds: as of `token_selected.token_selected_forward`, checked.
        o: `[B,T,H,D_v]` in q's dtype, where to write; rows aligned.
        lse: fp32 `[B,H,T]`, likewise, natural log. Rows of no document are left as they are, as in o.
        init, local: for which `takes_forced`.
    """
    dims, group = (q.shape[3], v.shape[3]), q.shape[2] // k.shape[2]
    how = size, init, local, bounds is not None, has_warpgroups(q.device)
    _attend(dims, q.dtype, group, *how).run(q, k, v, o, lse, bounds, first_token, scale)
