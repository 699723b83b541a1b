"""Mean pooling of blocks of tokens: compressed keys and values, and the mean query of each tile.

    o[b, j, h] = mean of x[b, j*stride + t, h] over t = 0 ... length-1

Sums in fp32, rounded once. A thread holds one 16-byte vector of one (b, j, h) and sums every SLICES-th token; the
partial sums of the SLICES threads are reduced through shared memory, always in the same order. Overlapping blocks
(stride < length) read tokens again, from L2.

Packed documents (B = 1): blocks count from each document's first token. Tiles are means of aligned rows, entries are
aligned (pool/documents.py); blocks that do not exist are 0.

Floor: negligible arithmetic; every token is read once, every mean written once. K and V of 128K tokens, 2 heads
of 128, bf16: 134 MB read, 2 MB written, 32 us at 4.2 TB/s. Queries with 8 heads: 268 MB, 64 us.

Limits: head dim a multiple of 8; fewer than 2^31 vectors of output; 64-bit offsets.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr
from torch import Tensor

from cute_kernels.pool.documents import ENTRY, LENGTH, START, TILE, TOKEN, Documents, document_at, fake_tables
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import VECTOR, Kernel, compile_kernel, compiled_once, fake

CTA_VECTORS = 64
"""16-byte output vectors per CTA, each computed by SLICES threads."""
SLICES = 4
BATCH = 8
"""Number of loads that a thread has in flight."""


class BlockMean:
    """Pools one tensor, or two in one launch.

    Args:
        length, stride: tokens per block, and between the starts of consecutive blocks.
        ragged: also pool a last block of fewer tokens (its mean is over the tokens present).
    """

    def __init__(self, length: int, stride: int, *, ragged: bool) -> None:
        self.length, self.stride, self.ragged = length, stride, ragged

    @staticmethod
    @compiled_once
    def compile(
        kernel: tuple[int, int, bool],
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        dim: int,
        dim2: int | None,
        packed: bool,
    ) -> Kernel:
        length, stride, ragged = kernel
        pairs: list[Any] = []
        for size in (dim, dim2):
            if size is None:
                pairs += [None, None]
            else:
                pairs += [fake(dtype, None, None, None, size), fake(out_dtype, None, None, None, size)]
        bounds = fake_tables()[0] if packed else None
        return compile_kernel(BlockMean(length, stride, ragged=ragged), *pairs, bounds)

    @cute.jit
    def __call__(
        self,
        mX: cute.Tensor,  # [B, N, heads, D]
        mO: cute.Tensor,  # [B, blocks, heads, D]
        mX2: cute.Tensor | None,
        mO2: cute.Tensor | None,
        mBounds: cute.Tensor | None,  # Documents.bounds
        stream: Any,
    ):
        widest = mO.shape[3] if const_expr(mO2 is None) else max(mO.shape[3], mO2.shape[3])
        vectors = mO.shape[0] * mO.shape[1] * mO.shape[2] * (widest // VECTOR)
        self.kernel(mX, mO, mX2, mO2, mBounds).launch(
            grid=[cute.ceil_div(vectors, CTA_VECTORS), 1 if const_expr(mX2 is None) else 2, 1],
            block=[CTA_VECTORS * SLICES, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mO: cute.Tensor,
        mX2: cute.Tensor | None,
        mO2: cute.Tensor | None,
        mBounds: cute.Tensor | None,
    ):
        _, second, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        # fp32 (VECTOR, CTA_VECTORS, SLICES)
        sSum = smem.allocate_tensor(
            Float32, cute.make_ordered_layout((VECTOR, CTA_VECTORS, SLICES), order=(0, 1, 2)), 16
        )
        if const_expr(mX2 is None):
            self.pool(mX, mO, sSum, mBounds)
        else:
            if second == 0:
                self.pool(mX, mO, sSum, mBounds)
            else:
                self.pool(mX2, mO2, sSum, mBounds)

    @cute.jit
    def pool(
        self,
        mX: cute.Tensor,
        mO: cute.Tensor,
        sSum: cute.Tensor,
        mBounds: cute.Tensor | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        lane, slice_ = thread % CTA_VECTORS, thread // CTA_VECTORS
        _, blocks, heads, dim = mO.shape
        item = group * CTA_VECTORS + lane
        vector = item % (dim // VECTOR)
        row = item // (dim // VECTOR)
        head = row % heads
        block = (row // heads) % blocks
        batch = row // heads // blocks
        exists = batch < mO.shape[0]

        first = Int32(block * self.stride)
        left = mX.shape[1] - first
        if const_expr(mBounds is not None):
            mFirst = mBounds[TILE if self.ragged else ENTRY, None]
            document = document_at(mFirst, block, 1, 1, 0)
            before = (block - mFirst[document]) * self.stride  # within the document
            if const_expr(self.ragged):
                before += mBounds[START, document] // self.stride * self.stride  # start of its first tile
            left = mBounds[LENGTH, document] - before
            exists = exists and left >= (1 if self.ragged else self.length)
            if const_expr(not self.ragged):
                first = mBounds[TOKEN, document] + before
        count = Int32(self.length)
        if const_expr(self.ragged):
            count = cutlass.min(count, left)
        if not exists:
            count = Int32(0)

        rSum = cute.make_rmem_tensor(VECTOR, Float32)
        rSum.fill(0.0)
        rX = cute.make_rmem_tensor((VECTOR, BATCH), mX.element_type)
        for start in cutlass.range(slice_, count, SLICES * BATCH):
            for i in range_constexpr(BATCH):
                token = start + i * SLICES
                rX[None, i].fill(0.0)
                if token < count:
                    gX = cute.local_tile(mX[batch, first + token, head, None], (VECTOR,), (vector,))
                    cute.autovec_copy(gX, rX[None, i])
            for i in range_constexpr(BATCH):
                rSum.store(rSum.load() + rX[None, i].load().to(Float32))

        cute.autovec_copy(rSum, sSum[None, lane, slice_])
        cute.arch.sync_threads()
        if slice_ == 0 and batch < mO.shape[0]:
            for i in range_constexpr(1, SLICES):
                rSum.store(rSum.load() + sSum[None, lane, i].load())
            rO = cute.make_rmem_tensor(VECTOR, mO.element_type)
            rO.store((rSum.load() / Float32(cutlass.max(count, 1))).to(mO.element_type))
            cute.autovec_copy(rO, cute.local_tile(mO[batch, block, head, None], (VECTOR,), (vector,)))


def block_means(
    k: Tensor, v: Tensor, length: int, stride: int, dtype: torch.dtype, documents: Documents | None = None
) -> tuple[Tensor, Tensor]:
    """Means of the whole blocks of k and v `[B,N,H_kv,D]`, in one launch: `[B,entries,H_kv,D]` in `dtype`.

    With documents the entries are aligned ones.
    """
    entries = max(0, (k.shape[1] - length) // stride + 1) if documents is None else documents.num_entries
    pooled = [torch.empty((x.shape[0], entries, *x.shape[2:]), dtype=dtype, device=x.device) for x in (k, v)]
    if pooled[0].numel() > 0:
        run = BlockMean.compile(
            (length, stride, False), k.dtype, dtype, k.shape[-1], v.shape[-1], documents is not None
        ).run
        run(k, pooled[0], v, pooled[1], None if documents is None else documents.bounds)
    return pooled[0], pooled[1]


def compress_kv(inputs: Any, config: Any, documents: Documents | None = None) -> tuple[Tensor, Tensor]:
    """Compressed keys and values `[B,entries,H_kv,D]` in the inputs' dtype: given, or pooled and projected.

    Args:
        inputs, config: nsa.inputs.NSAInputs and nsa.config.NSAConfig.
        documents: inputs are packed, `[1,T,...]`; entries are aligned.
    """
    if inputs.k_cmp is not None:
        if documents is None:
            return inputs.k_cmp, inputs.v_cmp
        return documents.align_entries(inputs.k_cmp)[None], documents.align_entries(inputs.v_cmp)[None]
    length, stride, dtype = config.compress_block_size, config.stride, inputs.q.dtype
    weights = (inputs.w_k_compress, inputs.w_v_compress)
    if weights == (None, None):
        return block_means(inputs.k, inputs.v, length, stride, dtype, documents)
    # Rounded once, after the projection
    pooled = block_means(inputs.k, inputs.v, length, stride, torch.float32, documents)
    k_cmp, v_cmp = (
        (x if w is None else torch.einsum("bnhd,hde->bnhe", x, w.float())).to(dtype).contiguous()
        for x, w in zip(pooled, weights, strict=True)
    )
    return k_cmp, v_cmp


def tile_means(q: Tensor, tile: int, documents: Documents | None = None) -> Tensor:
    """Mean query of each tile of `tile` tokens, including a ragged last one: fp32 `[B,tiles,H,D]`.

    With documents q has their aligned rows, and rows before a document's first query count as zeros.
    """
    batch, tokens, heads, dim = q.shape
    tiles = -(-tokens // tile) if documents is None else documents.num_tiles
    means = torch.empty((batch, tiles, heads, dim), dtype=torch.float32, device=q.device)
    if means.numel() > 0:
        run = BlockMean.compile((tile, tile, True), q.dtype, torch.float32, dim, None, documents is not None).run
        run(q, means, None, None, None if documents is None else documents.bounds)
    return means
