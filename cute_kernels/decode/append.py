"""Append the new tokens of each sequence: k and v into their pages, and the compressed entries that they complete.

    page[t] = new[t - s]                                s <= t < s + new tokens, s the sequence's cached tokens
    entry j = mean of tokens j d ... j d + l - 1        if its last token is new; fp32, rounded once

A CTA has PART_TOKENS new tokens of a key/value head and sequence, either their keys or their values. A thread sums
every SLICES-th token of a vector, and the SLICES sums are added in order: bitwise equal to BlockMean
(pool/compress.py).

Floor: l (D + D_v) 2 bytes read per entry, once every d tokens: 64 KB per sequence with 4 heads of 128. Latency only.

Limits: dims multiples of 8; d divides the page size. Pages of new tokens belong to one sequence.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.decode.pages import Lengths, Paging, fake_lengths, fake_pages, fake_table
from cute_kernels.pool.compress import BATCH, SLICES
from cute_kernels.runtime.dsl import SmemAllocator
from cute_kernels.runtime.jit import VECTOR, Kernel, compile_kernel, compiled_once, fake_heads

PART_TOKENS = 64
"""New tokens per CTA; an entry belongs to the CTA of its last token."""


class AppendPages:
    """Copy new tokens into their pages, and pool the entries that they complete.

    Args: dim, v_dim: dims of k and v. page_size: tokens per page. length, stride: l and d.
    """

    def __init__(self, dim: int, v_dim: int, page_size: int, length: int, stride: int) -> None:
        self.length, self.stride = length, stride
        self.tokens, self.entries = Paging(page_size), Paging.of_entries(page_size, length, stride)
        self.lanes = max(dim, v_dim) // VECTOR

    @staticmethod
    @compiled_once
    def compile(dims: tuple[int, int], dtype: torch.dtype, page_size: int, length: int, stride: int) -> Kernel:
        return compile_kernel(
            AppendPages(*dims, page_size, length, stride),
            *fake_heads(dtype, *dims),
            *[fake_pages(dtype, page_size, dim) for dim in dims],
            *[fake_pages(dtype, page_size // stride, dim) for dim in dims],
            fake_table(),
            *fake_lengths(),
        )

    @cute.jit
    def __call__(
        self,
        mK: cute.Tensor,  # [B, N_q, H_kv, D]
        mV: cute.Tensor,  # [B, N_q, H_kv, D_v]
        mKPages: cute.Tensor,  # [pages, page_size, H_kv, D]
        mVPages: cute.Tensor,  # [pages, page_size, H_kv, D_v]
        mKEntries: cute.Tensor,  # [pages, page_size / d, H_kv, D]
        mVEntries: cute.Tensor,  # [pages, page_size / d, H_kv, D_v]
        mTable: cute.Tensor,  # int32 [B, pages per sequence]
        mCached: cute.Tensor,  # int32 [B]: Lengths
        mNew: cute.Tensor,
        stream: Any,
    ):
        self.kernel(mK, mV, mKPages, mVPages, mKEntries, mVEntries, mTable, Lengths(mCached, mNew)).launch(
            grid=[mK.shape[2] * cute.ceil_div(mK.shape[1], PART_TOKENS), 2, mK.shape[0]],
            block=[self.lanes * SLICES, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mKPages: cute.Tensor,
        mVPages: cute.Tensor,
        mKEntries: cute.Tensor,
        mVEntries: cute.Tensor,
        mTable: cute.Tensor,
        lengths: Lengths,
    ):
        kv_head_and_part, second, batch = cute.arch.block_idx()
        kv_head, part = kv_head_and_part % mK.shape[2], kv_head_and_part // mK.shape[2]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        smem = SmemAllocator()
        layout = cute.make_ordered_layout((VECTOR, self.lanes, SLICES), order=(0, 1, 2))
        sSum = smem.allocate_tensor(Float32, layout, 16)  # (VECTOR, lanes, SLICES)
        gTable = mTable[batch, None]  # [pages per sequence]
        cached, new = lengths.mCached[batch], lengths.mNew[batch]
        if second == 0:
            self._append(mK[batch, None, kv_head, None], mKPages, mKEntries, gTable, kv_head, part, cached, new, sSum)
        else:
            self._append(mV[batch, None, kv_head, None], mVPages, mVEntries, gTable, kv_head, part, cached, new, sSum)

    @cute.jit
    def _append(
        self,
        gNew: cute.Tensor,  # [N_q, dim]
        mPages: cute.Tensor,
        mEntries: cute.Tensor,
        gTable: cute.Tensor,
        kv_head: Int32,
        part: Int32,
        cached: Int32,
        new: Int32,
        sSum: cute.Tensor,
    ):
        thread, _, _ = cute.arch.thread_idx()
        vectors = const_expr(cute.size(gNew, mode=[1]) // VECTOR)
        lane, slice_ = thread % self.lanes, thread // self.lanes
        rX = cute.make_rmem_tensor((VECTOR, BATCH), gNew.element_type)

        begin = part * PART_TOKENS  # index among the new tokens
        new = cutlass.min(new, begin + PART_TOKENS)

        # Tokens
        if lane < vectors:
            for i in cutlass.range(begin + slice_, new, SLICES, unroll=1):
                page, slot = self.tokens.find(gTable, cached + i)
                cute.autovec_copy(self._vector(gNew[i, None], lane), rX[None, 0])
                cute.autovec_copy(rX[None, 0], self._vector(mPages[page, slot, kv_head, None], lane))

        # Entries that end with one of them
        first = cutlass.max(cached + begin - self.length + self.stride, 0) // self.stride
        end = Int32(0)
        if (new > begin) & (cached + new >= self.length):
            end = (cached + new - self.length) // self.stride + 1
        rSum = cute.make_rmem_tensor(VECTOR, Float32)
        for entry in cutlass.range(first, end, unroll=1):
            rSum.fill(0.0)
            for start in cutlass.range(slice_, self.length, SLICES * BATCH, unroll=1):
                for i in range_constexpr(BATCH):
                    rX[None, i].fill(0.0)
                    at = start + i * SLICES
                    token = entry * self.stride + at
                    if (at < self.length) & (lane < vectors):
                        if token >= cached:
                            cute.autovec_copy(self._vector(gNew[token - cached, None], lane), rX[None, i])
                        else:
                            page, slot = self.tokens.find(gTable, token)
                            gX = mPages[page, slot, kv_head, None]  # [dim]
                            cute.autovec_copy(self._vector(gX, lane), rX[None, i])
                for i in range_constexpr(BATCH):
                    rSum.store(rSum.load() + rX[None, i].load().to(Float32))
            cute.autovec_copy(rSum, sSum[None, lane, slice_])
            cute.arch.sync_threads()  # the SLICES sums are written
            if (slice_ == 0) & (lane < vectors):
                for i in range_constexpr(1, SLICES):
                    rSum.store(rSum.load() + sSum[None, lane, i].load())
                rO = cute.make_rmem_tensor(VECTOR, gNew.element_type)
                rO.store((rSum.load() / Float32(self.length)).to(gNew.element_type))
                page, slot = self.entries.find(gTable, entry)
                cute.autovec_copy(rO, self._vector(mEntries[page, slot, kv_head, None], lane))
            cute.arch.sync_threads()  # they are read: the next entry's may overwrite them

    def _vector(self, gX: cute.Tensor, vector: Int32) -> cute.Tensor:
        return cute.local_tile(gX, (VECTOR,), (vector,))
