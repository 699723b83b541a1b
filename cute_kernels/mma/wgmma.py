"""Tiles of rows in shared memory and products of them by warpgroups (WGMMA), shared by kernels for Hopper.

In a 64 x columns accumulator, lane 4 i + j of warp w holds columns 2 j and 2 j + 1 of each 8, in rows 16 w + i and
16 w + i + 8: each warp's 16 rows have the layout of mma/mma_sync.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.utils import hopper_helpers

from cute_kernels.limits import TILE as TILE
from cute_kernels.mma.warp import LOG2_E, probability

WARPGROUP_THREADS = 128
"""Threads of a warpgroup."""

SMEM_ALIGNMENT = 1024
"""Alignment of shared-memory tiles in bytes."""

K, MN = OperandMajorMode.K, OperandMajorMode.MN
REGISTERS, SHARED = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM


def swizzled_tiles(dtype: Any, dim: int, count: int, rows: int = TILE) -> Any:
    """Layout of `count` tiles of rows x dim, as TMA writes and WGMMA reads them (also transposed)."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
    return cute.tile_to_shape(atom, (rows, dim, count), (0, 1, 2))


def allocate_tiles(smem: Any, dtype: Any, layout: Any) -> cute.Tensor:
    """Allocate shared memory for tiles in the layout of `swizzled_tiles`."""
    return smem.allocate_tensor(dtype, layout.outer, SMEM_ALIGNMENT, swizzle=layout.inner)


def warpgroup_mma(dtype: Any, columns: int, source: Any, left: Any, right: Any) -> cute.TiledMma:
    """Tiled MMA of TILE x `columns` by one warpgroup. Args: source: memory of the left operand; major modes of both."""
    return hopper_helpers.make_trivial_tiled_mma(dtype, dtype, left, right, Float32, (1, 1, 1), (TILE, columns), source)


def as_warpgroup_acc(acc: cute.Tensor) -> cute.Tensor:
    """View a warp's accumulator of 16 rows (mma_sync.accumulator) as its part of a warpgroup's TILE rows."""
    return cute.make_tensor(acc.iterator, cute.make_layout(((2, 2, cute.size(acc, mode=[2])), 1, 1)))


def smem_operand_a(mma: cute.TiledMma, tiles: cute.Tensor) -> cute.Tensor:
    """Tiles of TILE rows as left operands from SHARED; the last mode is the tile."""
    one = mma.get_slice(0)
    return one.make_fragment_A(one.partition_A(tiles))


def smem_operand_b(mma: cute.TiledMma, tiles: cute.Tensor) -> cute.Tensor:
    """Tiles of columns x k in shared memory as right operands; the last mode is the tile."""
    one = mma.get_slice(0)
    return one.make_fragment_B(one.partition_B(tiles))


@cute.jit
def load_operand_a(mma: cute.TiledMma, rows: cute.Tensor) -> cute.Tensor:
    """Load TILE rows of shared memory to registers, as a left operand from REGISTERS; a warp reads only its own 16."""
    thread, _, _ = cute.arch.thread_idx()
    one = mma.get_slice(thread % WARPGROUP_THREADS)
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), rows.element_type)
    copy = cute.make_tiled_copy_A(load, mma).get_slice(thread % WARPGROUP_THREADS)
    left = one.make_fragment_A(one.partition_shape_A((TILE, cute.size(rows, mode=[1]))))
    cute.copy(copy, copy.partition_S(rows), copy.retile(left))
    return left


def acc_as_operand_a(mma: cute.TiledMma, acc: cute.Tensor) -> cute.Tensor:
    """Round an accumulator of TILE columns and view it as a left operand from REGISTERS: its columns become k."""
    one = mma.get_slice(0)
    left = one.make_fragment_A(one.partition_shape_A((TILE, TILE)))
    left.store(cute.make_tensor(acc.iterator, left.layout).load().to(left.element_type))
    return left


@cute.jit
def issue_mma(
    mma: cute.TiledMma, acc: cute.Tensor, left: cute.Tensor, right: cute.Tensor, add: cutlass.Constexpr[bool]
):
    """Start acc = left right, or acc += left right, as one group."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, add)
    for k in range_constexpr(cute.size(left, mode=[2])):
        cute.gemm(atom, acc, left[None, None, k], right[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def acc_coordinates(acc: cute.Tensor) -> list[tuple[int, int, int]]:
    """Coordinates of a thread's values, ((c, r, n), 0, 0): n-th 8 columns, r-th of 2 rows, c-th of 2 columns."""
    columns, rows, eighths = acc.shape[0]
    return [(n, r, c) for n in range(eighths) for r in range(rows) for c in range(columns)]


def broadcast_over_columns(values: cute.Tensor) -> cute.Tensor:
    """Broadcast values of a thread's rows, (r), to (c, r, n) of `acc_coordinates`."""
    return cute.make_tensor(values.iterator, cute.make_layout((2, 2, TILE // 8), stride=(0, 1, 0)))


@cute.jit
def broadcast_over_rows(shared: cute.Tensor) -> cute.Tensor:
    """Broadcast values of a thread's columns, (c, n), to (c, r, n) of `acc_coordinates`, in registers."""
    values = cute.make_rmem_tensor_like(shared)
    cute.autovec_copy(shared, values)
    return cute.make_tensor(values.iterator, cute.make_layout((2, 2, TILE // 8), stride=(1, 0, 2)))


@cute.jit
def scores_to_probabilities(S: cute.Tensor, scale: Float32, lse: cute.Tensor):
    """Replace S by P. Args: lse: in base 2, as returned by `broadcast_over_columns` or `broadcast_over_rows`."""
    for n, r, c in acc_coordinates(S):
        S[(c, r, n), 0, 0] = probability(S[(c, r, n), 0, 0], scale, lse[c, r, n])


@cute.jit
def score_gradients(dS: cute.Tensor, P: cute.Tensor, dP: cute.Tensor, delta: cute.Tensor):
    """dS = P (dP - delta); dS may alias P or dP. Args: delta: broadcast like lse in `scores_to_probabilities`."""
    for n, r, c in acc_coordinates(P):
        dS[(c, r, n), 0, 0] = P[(c, r, n), 0, 0] * (dP[(c, r, n), 0, 0] - delta[c, r, n])


def _rows_first(x: cute.Tensor) -> cute.Tensor:
    """View [B, N, H, D] as (N, D, H, B)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))


class TmaTensor(NamedTuple):
    """Tensor whose tiles TMA copies."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor  # (N, D, H, B), or ((G, N), D, ., .)


TmaTiles = tuple[TmaTensor, cute.Tensor]
"""Tensor, and tiles in shared memory that are copied to or from it."""


def make_tma_tensors(op: Any, dtype: Any, dim: int, *tensors: cute.Tensor) -> list[TmaTensor]:
    """Tensors for copies of tiles between them and shared memory.

    Args:
        tensors: [B, N, H, D]; or ((G, N), D, ., .), whose tiles have G heads of TILE / G tokens.
    """
    layout = cute.select(swizzled_tiles(dtype, dim, 1), mode=[0, 1])
    rows = [x if isinstance(x.shape[0], tuple) else _rows_first(x) for x in tensors]
    return [TmaTensor(*cpasync.make_tiled_tma_atom(op, x, layout, (_tile_rows(x), dim))) for x in rows]


def _tile_rows(x: cute.Tensor) -> Any:
    """Rows of a tile of (N, D, H, B), or of ((G, N), D, ., .)."""
    rows = x.shape[0]
    return (rows[0], TILE // rows[0]) if isinstance(rows, tuple) else TILE


def _tma_tiles(x: TmaTensor, tiles: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """(., tile in shared memory) and (., (tile of rows, head, batch)) for cute.copy."""
    shape = _tile_rows(x.coordinates), cute.size(tiles, mode=[1])
    gX = cute.flat_divide(x.coordinates, shape)[None, None, None, 0, None, None]
    sX, tiled = cpasync.tma_partition(
        x.atom, 0, cute.make_layout(1), cute.group_modes(tiles, 0, 2), cute.group_modes(gX, 0, 2)
    )
    return sX, cute.group_modes(tiled, 1, 4)


def tma_loads(*sources: TmaTiles) -> Callable[..., None]:
    """Function by which a thread starts loading tiles that arrive together: load(place, index, barrier).

    Args:
        place: (tile of rows, head, batch), in the order of the coordinates.
        index: index of the tile in shared memory.
    """
    copies = [(x.atom, *_tma_tiles(x, tiles), isinstance(x.coordinates.shape[0], tuple)) for x, tiles in sources]

    def load(place: tuple[Any, Any, Any], index: Any, barrier: Any) -> None:
        for atom, sX, gX, is_grouped in copies:
            tile, *rest = place
            where = ((0, tile), *rest) if is_grouped else place
            cute.copy(atom, gX[None, where], sX[None, index], tma_bar_ptr=barrier)

    return load


def tma_store(place: tuple[Any, Any, Any], index: Any, *targets: TmaTiles) -> None:
    """Copy tiles from shared memory, using one warp, and wait until they have been read. Args: see `tma_loads`."""
    for x, tiles in targets:
        sX, gX = _tma_tiles(x, tiles)
        cute.copy(x.atom, sX[None, index], gX[None, place])
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=True)


def tma_pipeline(stages: int, warps: int, tx_bytes: int, *, writers: int = 0, defer_sync: bool = False) -> Any:
    """Pipeline whose stages are filled by TMA with `tx_bytes` each, and read by warps.

    Args:
        writers: number of threads that also write before a stage is full.
        defer_sync: leave it to a later pipeline to make this one's barriers visible to all threads.
    """
    return pipeline.PipelineTmaAsync.create(
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 1 + writers),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, warps),
        tx_count=tx_bytes,
        defer_sync=defer_sync,
    )


def producer_acquire(ready: Any, state: Any) -> Any:
    """Wait until a stage is empty. Returns the barrier to arrive at when it is filled."""
    ready.producer_acquire(state)
    return ready.producer_get_barrier(state)


def ldmatrix_copy(mma: cute.TiledMma, dtype: Any, thread: Int32) -> Any:
    """A thread's copy of 16-bit tiles in shared memory to registers in the layout of a warpgroup's accumulator."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    return cute.make_tiled_copy_C(atom, mma).get_slice(thread)


@cute.jit
def stmatrix_tile(mma: cute.TiledMma, rounded: cute.Tensor, tile: cute.Tensor, thread: Int32):
    """Store a warpgroup's accumulator, in 16 bits, into a tile."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), tile.element_type)
    copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(copy, copy.retile(rounded), copy.partition_D(tile))


@cute.jit
def store_acc_for_tma(mma: cute.TiledMma, acc: cute.Tensor, tile: cute.Tensor, thread: Int32, barrier: Int32):
    """Round a warpgroup's sums into a tile, for TMA to read."""
    rounded = cute.make_rmem_tensor_like(acc, tile.element_type)
    rounded.store(acc.load().to(tile.element_type))
    stmatrix_tile(mma, rounded, tile, thread)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP_THREADS)


@cute.jit
def load_row_stats(mLse: cute.Tensor, mDelta: cute.Tensor, row: Int32, num_rows: Int32) -> tuple[Float32, Float32]:
    """(lse in base 2, delta) of a row, (inf, 0) if lse is not finite. Predicated, not branched, so loads overlap."""
    place = cutlass.min(row, num_rows - 1)
    lse, delta = mLse[place], mDelta[place]
    present = (row < num_rows) & (lse > -Float32.inf) & (lse < Float32.inf)
    return lse * LOG2_E if present else Float32.inf, delta if present else Float32(0.0)
