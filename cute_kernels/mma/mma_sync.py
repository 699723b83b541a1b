"""Tiles of rows in shared memory and products of them by warps (mma.sync m16n8k16), for attention per token.

In a 16 x 8 accumulator, lane 4 i + j holds columns 2 j and 2 j + 1 of rows i and i + 8. A quad (four lanes) thus holds
16 bytes of a row (in 16 bits), a quarter in each lane. To write whole vectors, the lanes of a quad exchange their parts
of four such pieces (store_rows), or the right operand's columns are permuted (load_permuted) so that each lane already
has a whole piece (store_permuted_rows).
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, warp

from cute_kernels.mma.warp import LANES
from cute_kernels.runtime.jit import VECTOR

QUAD = 4
"""Lanes that hold a row of an accumulator."""

SMEM_ALIGNMENT = 128
"""Alignment of shared-memory tiles in bytes."""

MMA_K = 16
"""Columns (and rows) that one mma.sync multiplies."""


def smem_tiles(rows: int, dim: int, count: int) -> Any:
    """Layout of `count` tiles of rows x dim in 16 bits, for cp.async and ldmatrix without bank conflicts."""
    atom = cute.make_composed_layout(cute.make_swizzle(3, 3, 3), 0, cute.make_ordered_layout((8, 64), order=(1, 0)))
    return cute.tile_to_shape(atom, (rows, dim, count), (0, 1, 2))


def transpose_view(tiles: cute.Tensor) -> cute.Tensor:
    """View a tile of rows x columns, or several (the last mode), as columns x rows."""
    rows, columns, *count = (cute.size(tiles, mode=[i]) for i in range(cute.rank(tiles)))
    order = (1, 0, *range(2, cute.rank(tiles)))
    return cute.composition(tiles, cute.make_ordered_layout((columns, rows, *count), order=order))


def make_warp_mma(dtype: Any, warps: int) -> cute.TiledMma:
    """Tiled MMA of 16-bit operands with fp32 accumulation; each warp has 16 of 16 * warps rows."""
    op = warp.MmaF16BF16Op(dtype, Float32, (16, 8, MMA_K))
    return cute.make_tiled_mma(op, (warps, 1, 1), permutation_mnk=(MMA_K * warps, MMA_K, MMA_K))


@cute.jit
def gemm_smem(
    mma: cute.TiledMma,
    thread: Int32,
    acc: cute.Tensor,
    left: cute.Tensor,  # rows x k
    right: cute.Tensor,  # columns x k
    first: Int32,  # index of acc's first MMA_K columns within right
    left_transposed: cutlass.Constexpr[bool] = False,  # True if rows, not k, are contiguous in memory
    right_transposed: cutlass.Constexpr[bool] = False,
):
    """acc += left right^T, both from shared memory."""
    one = mma.get_slice(thread)
    copy_left = _ldmatrix_copy(mma, left.element_type, thread, "A", left_transposed)
    rLeft = one.make_fragment_A(one.partition_A(left))
    from_left, to_left = copy_left.partition_S(left), copy_left.retile(rLeft)
    from_right, rRight, to_right, copy_right = _operand_b(mma, thread, acc, right, right_transposed)
    for k in range_constexpr(cute.size(rLeft, mode=[2])):
        cute.copy(copy_left, from_left[None, None, k], to_left[None, None, k])
        for i in range_constexpr(cute.size(to_right, mode=[1])):
            cute.copy(copy_right, from_right[None, first + i, k], to_right[None, i, k])
        cute.gemm(mma, acc, rLeft[None, None, k], rRight[None, None, k], acc)


@cute.jit
def gemm_registers(
    mma: cute.TiledMma,
    thread: Int32,
    acc: cute.Tensor,
    rLeft: cute.Tensor,  # as returned by `acc_as_operand_a`
    right: cute.Tensor,  # columns x k
    first: Int32,
    right_transposed: cutlass.Constexpr[bool] = False,
    first_k: Int32 | int = 0,  # index within `right` of the first MMA_K of k in `rLeft`
):
    """acc += left right^T, right from shared memory."""
    from_right, rRight, to_right, copy_right = _operand_b(mma, thread, acc, right, right_transposed)
    for k in range_constexpr(cute.size(rLeft, mode=[2])):
        for i in range_constexpr(cute.size(to_right, mode=[1])):
            cute.copy(copy_right, from_right[None, first + i, first_k + k], to_right[None, i, k])
        cute.gemm(mma, acc, rLeft[None, None, k], rRight[None, None, k], acc)


def _operand_b(mma: cute.TiledMma, thread: Int32, acc: cute.Tensor, right: cute.Tensor, is_transposed: bool) -> Any:
    """Source of a right operand for all of its columns, destination for those of acc, and the copy between them.

    The whole operand is partitioned, because addresses would be wrong for a part that starts inside a swizzled row.
    """
    copy = _ldmatrix_copy(mma, right.element_type, thread, "B", is_transposed)
    columns = cute.size(acc, mode=[2]) * 8
    fragment = mma.make_fragment_B(mma.partition_shape_B((columns, cute.size(right, mode=[1]))))
    return copy.partition_S(right), fragment, copy.retile(fragment), copy


def _ldmatrix_copy(mma: cute.TiledMma, dtype: Any, thread: Int32, operand: str, is_transposed: bool) -> Any:
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=is_transposed, num_matrices=4), dtype)
    make = cute.make_tiled_copy_A if operand == "A" else cute.make_tiled_copy_B
    return make(atom, mma).get_slice(thread)


def accumulator(mma: cute.TiledMma, shape: tuple[int, int]) -> cute.Tensor:
    """Registers for the accumulator of a product."""
    return cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C(shape), Float32)


def acc_mn_view(acc: cute.Tensor) -> cute.Tensor:
    """View as (c, r, m, n): columns 2 j + c of the n-th 8, rows i + 8 r of the m-th 16 of a warp."""
    rows, columns = cute.size(acc, mode=[1]), cute.size(acc, mode=[2])
    return cute.make_tensor(acc.iterator, cute.make_layout((2, 2, rows, columns)))


def acc_as_operand_a(acc: cute.Tensor, dtype: Any) -> cute.Tensor:
    """Round an accumulator and view it as the left operand of the next product: its columns become k."""
    rounded = cute.make_rmem_tensor_like(acc, dtype)
    rounded.store(acc.load().to(dtype))
    rows, columns = cute.size(acc, mode=[1]), cute.size(acc, mode=[2])
    layout = cute.make_layout(((2, 2, 2), rows, columns // 2), stride=((1, 2, 4 * rows), 4, 8 * rows))
    return cute.make_tensor(rounded.iterator, layout)


# Operations on accumulator rows, (c, n) of `acc_mn_view`, by the row's quad


@cute.jit
def mask_after(rRow: cute.Tensor, last: Int32, first: cutlass.Constexpr[int] = 0):
    """Set columns after `last` to -inf. Args: `first`: columns before it are left untouched."""
    lane = cute.arch.lane_idx()
    for n in range_constexpr(first // 8, cute.size(rRow, mode=[1])):
        for c in range_constexpr(2):
            rRow[c, n] = rRow[c, n] if n * 8 + lane % QUAD * 2 + c <= last else -Float32.inf


@cute.jit
def row_max(rRow: cute.Tensor) -> Float32:
    """Maximum of the whole row, in all lanes of its quad."""
    top = -Float32.inf
    for n in range_constexpr(cute.size(rRow, mode=[1])):
        for c in range_constexpr(2):
            top = cute.arch.fmax(top, rRow[c, n])
    return cute.arch.warp_reduction_max(top, threads_in_group=QUAD)


@cute.jit
def exp2_and_sum(rRow: cute.Tensor, scale: Float32, base: Float32, total: Float32) -> Float32:
    """Replace x by 2^(scale x - base). Returns `total` plus the lane's new values, in order."""
    for n in range_constexpr(cute.size(rRow, mode=[1])):
        for c in range_constexpr(2):
            rRow[c, n] = cute.math.exp2(cute.math.fma(rRow[c, n], scale, -base), fastmath=True)
            total += rRow[c, n]
    return total


@cute.jit
def scale_row(rRow: cute.Tensor, factor: Float32):
    for n in range_constexpr(cute.size(rRow, mode=[1])):
        for c in range_constexpr(2):
            rRow[c, n] = rRow[c, n] * factor


@cute.jit
def online_softmax(S: cute.Tensor, acc_o_mn: cute.Tensor, rMax: cute.Tensor, rSum: cute.Tensor, scale: Float32):
    """One step of the online softmax on `acc_mn_view`s of 16 rows: S becomes P, and o is rescaled.

    Args:
        scale: scale of S, in base 2, as are the maxima.
        rSum: sums over the lane's columns.
    """
    for r in range_constexpr(2):
        new_max = cute.arch.fmax(rMax[r], row_max(S[None, r, 0, None]) * scale)
        base = Float32(0.0) if new_max == -Float32.inf else new_max
        rescale = cute.math.exp2(rMax[r] - base, fastmath=True)
        new_sum = exp2_and_sum(S[None, r, 0, None], scale, base, rSum[r] * rescale)
        rMax[r], rSum[r] = new_max, new_sum
        scale_row(acc_o_mn[None, r, 0, None], rescale)


@cute.jit
def store_acc(mma: cute.TiledMma, thread: Int32, acc: cute.Tensor, tile: cute.Tensor, first: Int32):
    """Round an accumulator into shared memory, starting at MMA_K `first` of the tile's columns."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), tile.element_type)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    rounded = cute.make_rmem_tensor_like(acc, tile.element_type)
    rounded.store(acc.load().to(tile.element_type))
    rows, to = copy.retile(rounded), copy.partition_D(tile)
    for i in range_constexpr(cute.size(rows, mode=[2])):
        cute.copy(copy, rows[None, None, i], to[None, None, first + i])


@cute.jit
def transpose_quad(rPieces: cute.Tensor, lane: Int32):
    """Transpose four pieces of a row among the four lanes of a quad, in place.

    Args:
        rPieces: int32 [4]: on entry, this lane's two 16-bit elements of pieces 0 ... 3 of 8 elements each. On return,
            the four pairs of elements of the piece whose index is this lane's index in its quad.
    """
    for bit in range_constexpr(2):
        step = const_expr(1 << bit)
        upper = (lane & step) != 0
        for first in range_constexpr(QUAD):
            if const_expr(first & step == 0):
                low, high = rPieces[first], rPieces[first + step]
                given = low if upper else high
                taken = cute.arch.shuffle_sync_bfly(given, offset=step)
                rPieces[first] = taken if upper else low
                rPieces[first + step] = high if upper else taken


@cute.jit
def load_block(
    mX: cute.Tensor,  # [N, dim]
    sX: cute.Tensor,  # [rows, dim]
    first: Int32,
    end: Int32,
    thread: Int32,
    threads: cutlass.Constexpr[int],
):
    """Start copying rows `first` ... into shared memory, with zeros from row `end` on."""
    vectors = const_expr(cute.size(sX, mode=[1]) // VECTOR)
    copy = cute.make_copy_atom(cpasync.CopyG2SOp(), sX.element_type, num_bits_per_copy=128)
    rZero = cute.make_rmem_tensor(VECTOR, sX.element_type)
    rZero.fill(0.0)
    for i in range_constexpr(cute.size(sX, mode=[0]) * vectors // threads):
        item = thread + i * threads
        row, vector = item // vectors, item % vectors
        to = cute.local_tile(sX[row, None], (VECTOR,), (vector,))
        if first + row < end:
            cute.copy(copy, cute.local_tile(mX[first + row, None], (VECTOR,), (vector,)), to)
        else:
            cute.autovec_copy(rZero, to)


def as_vectors(mX: cute.Tensor) -> cute.Tensor:
    """View memory from a tensor's first element on as 16-byte vectors: (element, vector)."""
    return cute.make_tensor(mX.iterator, cute.make_layout((VECTOR, 1 << 30), stride=(1, VECTOR)))


def vector_strides(gX: cute.Tensor) -> tuple[Int32, Int32]:
    """Strides of the first two modes of [tokens or slots, G, D], in vectors, of which there are less than 2^31."""
    first, second, _ = gX.layout.stride
    return Int32(first // VECTOR), Int32(second // VECTOR)


@cute.jit
def gather_rows(
    mX: cute.Tensor,  # as returned by `as_vectors`
    sX: cute.Tensor,  # [rows, dim]
    start: Int32,  # in lane i, first vector of row i (of each 32 rows in turn)
):
    """Start copying rows into shared memory, using one warp."""
    rows, vectors = const_expr(cute.size(sX, mode=[0])), const_expr(cute.size(sX, mode=[1]) // VECTOR)
    mode = cpasync.LoadCacheMode.GLOBAL
    copy = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=mode), sX.element_type, num_bits_per_copy=128)
    lane = cute.arch.lane_idx()
    for i in range_constexpr(rows * vectors // LANES):
        row, vector = (i * LANES + lane) // vectors, lane % vectors
        place = Int64(cute.arch.shuffle_sync(start, row) + vector)
        cute.copy(copy, mX[None, place], cute.local_tile(sX[row, None], (VECTOR,), (vector,)))


def lane_row(sX: cute.Tensor, threads: int) -> Int32:
    """Row whose first vector this lane supplies to `gather_tile`."""
    across = const_expr(cute.size(sX, mode=[1]) // VECTOR)
    lane, warp_index = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rows = const_expr(LANES // across)  # rows per warp at a time
    steps = const_expr(cute.size(sX, mode=[0]) * across // threads)
    return lane // rows % steps * (threads // across) + warp_index * rows + lane % rows


@cute.jit
def gather_tile(
    mX: cute.Tensor,  # as returned by `as_vectors`
    sX: cute.Tensor,  # [rows, dim]
    start: Int32,  # first vector of the lane's row (lane_row)
    threads: cutlass.Constexpr[int],
):
    """Start copying rows into shared memory, using all warps; a thread's vectors are a multiple of 8 rows apart."""
    across = const_expr(cute.size(sX, mode=[1]) // VECTOR)
    mode = cpasync.LoadCacheMode.GLOBAL
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(cache_mode=mode), sX.element_type, num_bits_per_copy=128)
    lanes = cute.make_ordered_layout((threads // across, across), order=(1, 0))
    copy = cute.make_tiled_copy_tv(atom, lanes, cute.make_layout((1, VECTOR)))
    thread, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    to = copy.get_slice(thread).partition_D(sX)  # (vector, step, 0)
    from_lane = cute.domain_offset((0, lane % across), mX)
    for step in range_constexpr(cute.size(to, mode=[1])):
        first = cute.arch.shuffle_sync(start, step * (LANES // across) + lane // across)
        cute.copy(atom, from_lane[None, Int64(first)], to[None, step, 0])


@cute.jit
def load_permuted(
    mX: cute.Tensor,  # [N, dim]
    sX: cute.Tensor,  # [rows, dim]
    first: Int32,
    end: Int32,
    thread: Int32,
    threads: cutlass.Constexpr[int],
):
    """Like `load_block`, but wait for the rows, and permute the columns for `store_permuted_rows`.

    Of 32 columns, pair i of the j-th 8 goes to position 4 i + j of the pairs. The pairs that lane j of a quad then
    holds, one of each of four pieces of a product, are the j-th 8 columns.
    """
    vectors = const_expr(cute.size(sX, mode=[1]) // VECTOR)
    rX = cute.make_rmem_tensor((VECTOR, const_expr(cute.size(sX, mode=[0]) * vectors // threads)), sX.element_type)
    rX.fill(0.0)
    for i in range_constexpr(cute.size(rX, mode=[1])):
        row, vector = (thread + i * threads) // vectors, (thread + i * threads) % vectors
        if first + row < end:
            cute.autovec_copy(cute.local_tile(mX[first + row, None], (VECTOR,), (vector,)), rX[None, i])
    for i in range_constexpr(cute.size(rX, mode=[1])):
        row, vector = (thread + i * threads) // vectors, (thread + i * threads) % vectors
        for pair in range_constexpr(QUAD):
            to = vector // QUAD * VECTOR * 2 + pair * QUAD + vector % QUAD
            cute.autovec_copy(cute.local_tile(rX[None, i], (2,), (pair,)), cute.local_tile(sX[row, None], (2,), (to,)))


@cute.jit
def store_permuted_rows(
    rRounded: cute.Tensor,  # (c, r, m, n) in 16 bits, in the layout of `acc_mn_view`
    mX: cute.Tensor,  # as returned by `as_vectors`
    start: Int32,  # in lane i, first vector of row i; negative: skip
):
    """Store accumulator rows whose columns are permuted as by `load_permuted`, each by its quad.

    They are the first to be evicted from L2.
    """
    _, _, rows, pieces = rRounded.shape
    lane = cute.arch.lane_idx()
    pairs = cute.recast_tensor(rRounded, Int32)  # (1, r, m, n)
    rPieces = cute.make_rmem_tensor(QUAD, Int32)
    for m in range_constexpr(rows):
        for r in range_constexpr(2):
            place = cute.arch.shuffle_sync(start, m * MMA_K + r * 8 + lane // QUAD)
            if place >= 0:
                row = cute.domain_offset((0, Int64(place + lane % QUAD)), mX)
                for first in range_constexpr(0, pieces, QUAD):
                    for i in range_constexpr(QUAD):
                        rPieces[i] = pairs[0, r, m, first + i]
                    cute.arch.store(row[None, first].iterator, rPieces.load(), cop="cs")


@cute.jit
def store_rows(
    rRounded: cute.Tensor,  # (c, r, m, n) in 16 bits, in the layout of `acc_mn_view`
    mX: cute.Tensor,  # as returned by `as_vectors`
    start: Int32,  # in lane i, first vector of row i; negative: skip
):
    """Store accumulator rows, each by its quad, whose lanes exchange pieces.

    All vectors of a row are written together, with one address and one branch each. They are the first to be evicted
    from L2.
    """
    _, _, rows, pieces = rRounded.shape
    lane = cute.arch.lane_idx()
    pairs = cute.recast_tensor(rRounded, Int32)  # (1, r, m, n)
    rPieces = cute.make_rmem_tensor((QUAD, pieces // QUAD), Int32)
    for m in range_constexpr(rows):
        for r in range_constexpr(2):
            place = cute.arch.shuffle_sync(start, m * MMA_K + r * 8 + lane // QUAD)
            for first in range_constexpr(0, pieces, QUAD):
                for i in range_constexpr(QUAD):
                    rPieces[i, first // QUAD] = pairs[0, r, m, first + i]
                transpose_quad(rPieces[None, first // QUAD], lane)
            row = cute.domain_offset((0, Int64(place + lane % QUAD)), mX)
            if place >= 0:
                for i in range_constexpr(pieces // QUAD):
                    cute.arch.store(row[None, i * QUAD].iterator, rPieces[None, i].load(), cop="cs")
