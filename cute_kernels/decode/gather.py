"""Gather rows of sequences from their pages, sequence by sequence: keys and values, or compressed entries.

    out[first[b] + i] = row source[b] + i of sequence b        i < count[b], zero up to first[b+1]

A prefill's attention reads contiguous keys, in the layout of pool/documents.py. A CTA copies ROWS rows of one tensor.
Rows after the last sequence are not written: they are never read, and are as many as the pages that no sequence uses.

Floor: rows are read and written once. 1M tokens, 4 heads of 128, bf16: 4.3 GB for k and v, 1 ms at 4.2 TB/s.

Limits: dims multiples of 8; 64-bit offsets.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import range_constexpr
from torch import Tensor

from cute_kernels.decode.pages import Paging, fake_pages, fake_table
from cute_kernels.pool.documents import BATCH, COPY_THREADS, document_at
from cute_kernels.runtime.jit import VECTOR, Kernel, compile_kernel, compiled_once, fake, fake_heads

ROWS = 16
"""Rows per CTA."""

FIRST, SOURCE, COUNT = range(3)
"""Rows of the table, int32 [3, B+1], per sequence: its first row in the output, the source row copied there, and the
number of rows."""


class GatherPages:
    """Args: paging: location of rows in pages."""

    def __init__(self, paging: Paging) -> None:
        self.paging = paging

    @staticmethod
    @compiled_once
    def compile(dims: tuple[int, int], dtype: torch.dtype, slots: int, lag: int) -> Kernel:
        pages = [fake_pages(dtype, slots, dim) for dim in dims]
        places = fake(torch.int32, 3, None, aligned=False)
        return compile_kernel(
            GatherPages(Paging(slots, lag)),
            *pages,
            fake_table(),
            places,
            *fake_heads(dtype, *dims),
        )

    @cute.jit
    def __call__(
        self,
        mKPages: cute.Tensor,  # [pages, slots, H_kv, D]
        mVPages: cute.Tensor,  # [pages, slots, H_kv, D_v]
        mTable: cute.Tensor,  # int32 [B, pages per sequence]
        mPlaces: cute.Tensor,  # int32 [3, B+1]
        mK: cute.Tensor,  # [1, rows, H_kv, D]
        mV: cute.Tensor,  # [1, rows, H_kv, D_v]
        stream: Any,
    ):
        self.kernel(mKPages, mVPages, mTable, mPlaces, mK, mV).launch(
            grid=[cute.ceil_div(mK.shape[1], ROWS), 2, 1], block=[COPY_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mKPages: cute.Tensor,
        mVPages: cute.Tensor,
        mTable: cute.Tensor,
        mPlaces: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
    ):
        _, second, _ = cute.arch.block_idx()
        if second == 0:
            self.copy(mKPages, mTable, mPlaces, mK)
        else:
            self.copy(mVPages, mTable, mPlaces, mV)

    @cute.jit
    def copy(self, mPages: cute.Tensor, mTable: cute.Tensor, mPlaces: cute.Tensor, mX: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        _, rows, heads, dim = mX.shape
        vectors = dim // VECTOR
        end = cutlass.min(mPlaces[FIRST, mPlaces.shape[1] - 1], rows)
        rX = cute.make_rmem_tensor((VECTOR, BATCH), mX.element_type)
        for start in cutlass.range(thread, ROWS * heads * vectors, COPY_THREADS * BATCH):
            for i in range_constexpr(BATCH):
                item = start + i * COPY_THREADS
                row, head, vector = group * ROWS + item // vectors // heads, item // vectors % heads, item % vectors
                rX[None, i].fill(0.0)
                if (item < ROWS * heads * vectors) & (row < end):
                    sequence = document_at(mPlaces[FIRST, None], row, 1, 1, 0)
                    before = row - mPlaces[FIRST, sequence]
                    if before < mPlaces[COUNT, sequence]:
                        page, slot = self.paging.find(mTable[sequence, None], mPlaces[SOURCE, sequence] + before)
                        gX = cute.local_tile(mPages[page, slot, head, None], (VECTOR,), (vector,))
                        cute.autovec_copy(gX, rX[None, i])
            for i in range_constexpr(BATCH):
                item = start + i * COPY_THREADS
                row, head, vector = group * ROWS + item // vectors // heads, item // vectors % heads, item % vectors
                if (item < ROWS * heads * vectors) & (row < end):
                    cute.autovec_copy(rX[None, i], cute.local_tile(mX[0, row, head, None], (VECTOR,), (vector,)))


def gather_pages(
    k_pages: Tensor, v_pages: Tensor, block_table: Tensor, places: Tensor, rows: int, *, lag: int = 0
) -> tuple[Tensor, Tensor]:
    """Gather rows of k and v `[1,rows,H_kv,D]`, `[...,D_v]` from pages `[pages,slots,H_kv,...]`.

    Args:
        block_table: int32 `[B,pages per sequence]`, valid for the rows that are copied.
        places: int32 `[3,B+1]`: FIRST, SOURCE and COUNT; FIRST[B] is the end of the last sequence.
        lag: slots before a sequence's row 0 (Paging).
    """
    slots, dims = k_pages.shape[1], (k_pages.shape[3], v_pages.shape[3])
    k, v = (torch.empty((1, rows, *x.shape[2:]), dtype=x.dtype, device=x.device) for x in (k_pages, v_pages))
    if rows > 0:
        GatherPages.compile(dims, k.dtype, slots, lag).run(k_pages, v_pages, block_table, places, k, v)
    return k, v
