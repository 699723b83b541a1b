"""Location of a sequence's rows in pages: tokens, and compressed entries.

    token t       page block_table[b, t // page_size], slot t % page_size
    entry j       in the page of its last token, j d + l - 1: row j + lag, with page_size / d slots per page

lag = (l - 1) // d. A page's tensor is [pages, slots, H_kv, dim]. Offsets are 64-bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr, range_constexpr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T, dsl_user_op

from cute_kernels.mma.warp import divide
from cute_kernels.runtime.dsl import ASSEMBLES_CACHE_POLICIES
from cute_kernels.runtime.jit import VECTOR, fake


class Paging(NamedTuple):
    """Location of a sequence's rows."""

    slots: int
    """Slots per page."""
    lag: int = 0
    """Number of slots before row 0."""

    @staticmethod
    def of_entries(page_size: int, length: int, stride: int) -> Paging:
        """Paging of compressed entries. Args: length, stride: l and d."""
        return Paging(page_size // stride, (length - 1) // stride)

    @cute.jit
    def find(self, gTable: cute.Tensor, row: Int32) -> tuple[Int32, Int32]:
        """Page and slot of a row. Args: gTable: the sequence's row of block_table."""
        page, slot = divide(row + self.lag, self.slots)
        return gTable[page], slot

    @cute.jit
    def load_pages(
        self,
        gTable: cute.Tensor,
        first: Int32,
        end: Int32,
        thread: Int32,
        vectors: cutlass.Constexpr[int],
        rPage: cute.Tensor,  # int32 [rows * vectors / threads]
        threads: cutlass.Constexpr[int],
    ):
        """Look up the pages of the rows whose vectors this thread copies in `load_rows`; -1 from row `end` on."""
        for i in range_constexpr(cute.size(rPage)):
            row = first + (thread + i * threads) // vectors
            rPage[i] = Int32(-1)
            if row < end:
                rPage[i] = self.find(gTable, row)[0]

    @cute.jit
    def load_rows(
        self,
        mX: cute.Tensor,  # [pages, slots, H_kv, dim]
        kv_head: Int32,
        sX: cute.Tensor,  # [rows, dim]
        first: Int32,
        thread: Int32,
        rPage: cute.Tensor,
        is_whole: cutlass.Boolean,  # all rows have a page, so copies need no branches
        threads: cutlass.Constexpr[int],
        stays: cutlass.Constexpr[bool],  # in L2, for other readers
    ):
        """Start copying rows `first` ... into shared memory, with zeros where there is no page: 0 * NaN is NaN."""
        if is_whole:
            self._load_rows(mX, kv_head, sX, first, thread, rPage, True, threads, stays)
        else:
            self._load_rows(mX, kv_head, sX, first, thread, rPage, False, threads, stays)

    @cute.jit
    def _load_rows(
        self,
        mX: cute.Tensor,
        kv_head: Int32,
        sX: cute.Tensor,
        first: Int32,
        thread: Int32,
        rPage: cute.Tensor,
        is_whole: cutlass.Constexpr[bool],
        threads: cutlass.Constexpr[int],
        stays: cutlass.Constexpr[bool],
    ):
        vectors = cute.size(sX, mode=[1]) // VECTOR
        mode = cpasync.LoadCacheMode.GLOBAL
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=mode), sX.element_type, num_bits_per_copy=128)
        rZero = cute.make_rmem_tensor(VECTOR, sX.element_type)
        rZero.fill(0.0)
        apart = const_expr(threads // vectors)  # distance between a thread's rows
        vector = thread % vectors
        _, slot = divide(first + thread // vectors + self.lag, self.slots)
        for i in range_constexpr(cute.size(rPage)):
            row = thread // vectors + i * apart
            if const_expr(apart % self.slots != 0):
                _, slot = divide(first + row + self.lag, self.slots)
            to = cute.local_tile(sX[row, None], (VECTOR,), (vector,))
            if const_expr(is_whole and not stays and ASSEMBLES_CACHE_POLICIES):
                at = cute.local_tile(mX[rPage[i], slot, kv_head, None], (VECTOR,), (vector,)).iterator
                copy_read_once(sX.iterator + cute.crd2idx((row, vector * VECTOR), sX.layout), at)
            elif const_expr(is_whole):
                cute.copy(copy, cute.local_tile(mX[rPage[i], slot, kv_head, None], (VECTOR,), (vector,)), to)
            else:
                if rPage[i] >= 0:
                    cute.copy(copy, cute.local_tile(mX[rPage[i], slot, kv_head, None], (VECTOR,), (vector,)), to)
                else:
                    cute.autovec_copy(rZero, to)


@dsl_user_op
def copy_read_once(to: cute.Pointer, source: cute.Pointer, *, loc: Any = None, ip: Any = None) -> None:
    """Start copying 16 bytes into shared memory, marked in L2 as first to be evicted."""
    at = {"loc": loc, "ip": ip}
    policy = llvm.inline_asm(T.i64(), [], "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "=l", **at)
    operands = [llvm.ptrtoint(T.i32(), to.llvm_ptr, **at), llvm.ptrtoint(T.i64(), source.llvm_ptr, **at), policy]
    copy = "cp.async.cg.shared.global.L2::cache_hint [$0], [$1], 16, $2;"
    llvm.inline_asm(None, operands, copy, "r,l,l", has_side_effects=True, **at)


class Lengths(NamedTuple):
    """Lengths of the sequences, int32 [B] each. Nothing is computed for a sequence without new tokens."""

    mCached: cute.Tensor
    """Number of tokens before the step's."""
    mNew: cute.Tensor
    """Number of tokens of the step, 0 to N_q."""

    @cute.jit
    def tokens(self, batch: Int32) -> Int32:
        """Total number of tokens, including the step's; 0 for a sequence without new ones."""
        new = self.mNew[batch]
        return Int32(0) if new == 0 else self.mCached[batch] + new


def fake_pages(dtype: torch.dtype, slots: int, dim: int) -> Any:
    """[pages, slots, H_kv, dim]."""
    return fake(dtype, None, slots, None, dim)


def fake_lengths() -> list[Any]:
    """Fields of `Lengths` to compile with."""
    return [fake(torch.int32, None, aligned=False) for _ in Lengths._fields]


def fake_table() -> Any:
    """block_table, int32 [B, pages per sequence]."""
    return fake(torch.int32, None, None, aligned=False)
