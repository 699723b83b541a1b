"""Attention of a few query rows to tiles of paged keys: mainloop shared by score.py and blocks.py.

    rows per CTA: a power of two times 16      row_warps = rows / 16, key_warps = warps / row_warps
    a tile: KEYS keys and values               a warp multiplies 16 rows with its share of a tile's keys

All warps load, `stages` - 1 tiles ahead, with cp.async. Products are mma.sync m16n8k16. Each warp has an online softmax
over its own keys; at the end the key warps of a row are reduced through shared memory, in order, to one partial:

    o_partial = sum_j exp2(s_j - lse) v_j       lse = log2 sum_j exp2(s_j)        s = scale log2(e) q k

Rows without keys: o 0, lse -inf. V rows that were never written are zeros in shared memory.

In flight per SM, with 16 rows of D = 128: two CTAs of `stages` - 1 = 2 tiles of 32 KB, 128 KB. 4.2 TB/s over 132 SMs
need 32 KB per microsecond of latency.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.decode.pages import Paging
from cute_kernels.limits import DECODE_KEYS
from cute_kernels.mma.mma_sync import (
    MMA_K,
    QUAD,
    SMEM_ALIGNMENT,
    acc_as_operand_a,
    acc_mn_view,
    accumulator,
    gemm_registers,
    gemm_smem,
    make_warp_mma,
    online_softmax,
    smem_tiles,
    transpose_view,
)
from cute_kernels.mma.smem import RESERVED_SMEM_BYTES, SM_SMEM_BYTES, SMEM_CARVEOUT
from cute_kernels.mma.warp import LANES
from cute_kernels.runtime.jit import FLOATS, VECTOR

KEYS = DECODE_KEYS
"""Keys per tile."""
MIN_WARPS = 4
MAX_ROWS = 128
FEW_STAGES, MOST_STAGES = 3, 6


class Buffers(NamedTuple):
    """Shared memory of a CTA."""

    sQ: cute.Tensor
    """[rows, D]"""
    sK: cute.Tensor
    """[KEYS, D, stages]"""
    sV: cute.Tensor
    """[KEYS, D_v, stages]"""
    sO: cute.Tensor
    """fp32 [16, D_v, warps], aliasing keys and values once all are multiplied."""
    sMax: cute.Tensor
    """fp32 [16, warps]"""
    sSum: cute.Tensor
    """fp32 [16, warps]"""


class PagedKeys(NamedTuple):
    """Keys and values of a sequence's key/value head."""

    gTable: cute.Tensor  # int32 [pages per sequence]
    mK: cute.Tensor  # [pages, slots, H_kv, D]
    mV: cute.Tensor  # [pages, slots, H_kv, D_v]
    kv_head: Int32


class DecodeTiles:
    """Args:
    dim, v_dim, dtype: D, D_v and their 16-bit type.
    rows: maximum query rows per CTA.
    paging: location of the keys.
    row_bytes, cta_bytes: additional shared memory, per row and in total.
    ctas_per_sm: maximum CTAs per SM; with 3, two stages are used.
    """

    def __init__(
        self,
        dim: int,
        v_dim: int,
        dtype: Any,
        rows: int,
        paging: Paging,
        *,
        row_bytes: int = 0,
        cta_bytes: int = 0,
        ctas_per_sm: int = 2,
    ) -> None:
        self.dim, self.v_dim, self.dtype, self.paging = dim, v_dim, dtype, paging
        row_warps = 1
        while row_warps * MMA_K < min(rows, MAX_ROWS):
            row_warps *= 2
        self.row_warps, self.rows = row_warps, row_warps * MMA_K
        self.warps = max(MIN_WARPS, row_warps)
        self.threads = self.warps * LANES
        self.key_warps = self.warps // row_warps
        self.warp_keys = KEYS // self.key_warps
        self.sums = self.warps * MMA_K * (v_dim + VECTOR)  # elements of sO; rows are padded against bank conflicts
        stage = KEYS * (dim + v_dim) * 2
        fixed = self.rows * (2 * dim + row_bytes) + self.warps * MMA_K * 8 + cta_bytes + 1024  # alignment
        self.keys_stay = True  # in L2, because other CTAs read them too
        self.stages, self.ctas_per_sm = 0, ctas_per_sm
        while self.stages == 0:  # fewest that hide latency; a single CTA per SM uses all that fit
            least = max(FEW_STAGES if self.ctas_per_sm < 3 else 2, -(-self.sums * 4 // stage))
            room = SM_SMEM_BYTES // self.ctas_per_sm - RESERVED_SMEM_BYTES - fixed
            most = min(MOST_STAGES, room // stage)
            if most >= least:
                self.stages = most if self.ctas_per_sm == 1 else least
            else:
                self.ctas_per_sm -= 1

    def launch(self, stream: Any) -> dict[str, Any]:
        """Launch options, except for the grid."""
        return {
            "block": [self.threads, 1, 1],
            "min_blocks_per_mp": self.ctas_per_sm,
            "preferred_smem_carveout": SMEM_CARVEOUT,
            "use_pdl": True,
            "stream": stream,
        }

    def layouts(self) -> tuple[Any, Any, Any]:
        """Layouts of sQ, sK and sV."""
        tile = cute.select(smem_tiles(self.rows, self.dim, 1), mode=[0, 1])
        k_tiles, v_tiles = (smem_tiles(KEYS, dim, self.stages) for dim in (self.dim, self.v_dim))
        return tile, k_tiles, v_tiles

    @cute.jit
    def allocate(self, smem: Any, layouts: tuple[Any, Any, Any]) -> Buffers:
        q_layout, k_layout, v_layout = layouts
        sQ = smem.allocate_tensor(self.dtype, q_layout, SMEM_ALIGNMENT * 8)  # [rows, D]
        k_size = KEYS * self.dim * self.stages
        size = k_size + KEYS * self.v_dim * self.stages
        tiles = smem.allocate_tensor(self.dtype, cute.make_layout(size), SMEM_ALIGNMENT * 8).iterator
        sK = cute.make_tensor(tiles, k_layout)  # [KEYS, D, stages]
        sV = cute.make_tensor(tiles + k_size, v_layout)  # [KEYS, D_v, stages]
        row = self.v_dim + VECTOR
        o_layout = cute.make_layout((MMA_K, self.v_dim, self.warps), stride=(row, 1, MMA_K * row))
        sO = cute.make_tensor(cute.recast_ptr(tiles, dtype=Float32), o_layout)  # [16, D_v, warps]
        stats = cute.make_layout((MMA_K, self.warps))
        sMax, sSum = (smem.allocate_tensor(Float32, stats, 16) for _ in range(2))
        return Buffers(sQ, sK, sV, sO, sMax, sSum)

    @cute.jit
    def load_queries(
        self,
        gQ: cute.Tensor,  # [N_q, G, D], of a sequence and key/value head
        sQ: cute.Tensor,
        first: Int32,
        end: Int32,
    ):
        """Start copying query rows (token * G + head) `first` ..., with zeros from row `end` on."""
        thread, _, _ = cute.arch.thread_idx()
        vectors, group = const_expr(self.dim // VECTOR), gQ.shape[1]
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(), self.dtype, num_bits_per_copy=128)
        rZero = cute.make_rmem_tensor(VECTOR, self.dtype)
        rZero.fill(0.0)
        for i in range_constexpr(-(-self.rows * vectors // self.threads)):
            item = thread + i * self.threads
            row, vector = item // vectors, item % vectors
            if row < self.rows:
                to = cute.local_tile(sQ[row, None], (VECTOR,), (vector,))
                if first + row < end:
                    gRow = gQ[(first + row) // group, (first + row) % group, None]  # [D]
                    cute.copy(copy, cute.local_tile(gRow, (VECTOR,), (vector,)), to)
                else:
                    cute.autovec_copy(rZero, to)

    # Hooks of the subclasses

    def bounds(self, tile: Int32, work: Any) -> tuple[Int32, Int32]:
        """First key of a tile, and exclusive end of the existing keys, in rows of `paging`."""
        raise NotImplementedError

    def finish_scores(self, S: cute.Tensor, tile: Int32, work: Any) -> None:
        """Process a warp's scores after the products: set those of keys that a row does not see to -inf."""
        raise NotImplementedError

    # Mainloop

    @cute.jit
    def attend(self, keys: PagedKeys, buffers: Buffers, num_tiles: Int32, scale: Float32, work: Any) -> Any:
        """Attend to tiles 0 ... num_tiles - 1; loads of the queries are in flight. Returns a warp's o, maxima and sums.

        Args:
            scale: softmax_scale * log2(e).
            work: for `bounds` and `finish_scores`.
        """
        lane = cute.arch.lane_idx()
        row_warp, key_warp = self.place()
        sWarpQ = cute.local_tile(buffers.sQ, (MMA_K, self.dim), (row_warp, 0))  # [16, D]
        mma = make_warp_mma(self.dtype, 1)
        rPages = self._pages()
        # Load: first tiles
        for stage in range_constexpr(self.stages - 1):
            if stage < num_tiles:
                self._load_pages(keys, Int32(stage), rPages, work)
                self._load(keys, buffers, Int32(stage), rPages, work)
            cute.arch.cp_async_commit_group()
        if self.stages - 1 < num_tiles:
            self._load_pages(keys, Int32(self.stages - 1), rPages, work)

        rMax, rSum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)  # (r)
        rMax.fill(-Float32.inf)
        rSum.fill(0.0)
        acc_o = accumulator(mma, (MMA_K, self.v_dim))  # fp32 [16, D_v]
        acc_o.fill(0.0)
        for tile in cutlass.range(num_tiles, unroll=1):
            # Load: `stages` - 1 tiles ahead
            cute.arch.cp_async_wait_group(self.stages - 2)
            # All copies of this tile have landed, and the last one is multiplied: its stage may be filled
            cute.arch.sync_threads()
            ahead = tile + self.stages - 1
            if ahead < num_tiles:
                self._load(keys, buffers, ahead, rPages, work)
            cute.arch.cp_async_commit_group()
            if ahead + 1 < num_tiles:
                self._load_pages(keys, ahead + 1, rPages, work)

            # MMA: S = Q K^T
            stage = tile % self.stages
            acc = accumulator(mma, (MMA_K, self.warp_keys))  # fp32 [16, warp_keys]
            acc.fill(0.0)
            first = key_warp * (self.warp_keys // MMA_K)
            gemm_smem(mma, lane, acc, sWarpQ, buffers.sK[None, None, stage], first)

            # Softmax
            S = acc_mn_view(acc)  # fp32 (c, r, 0, n)
            self.finish_scores(S, tile, work)  # may have barriers of its own
            online_softmax(S, acc_mn_view(acc_o), rMax, rSum, scale)

            # MMA: O += P V  [16, D_v]
            sColumns = transpose_view(buffers.sV[None, None, stage])  # [D_v, KEYS]
            gemm_registers(mma, lane, acc_o, acc_as_operand_a(acc, self.dtype), sColumns, 0, True, first)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()  # all copies have landed and all tiles are multiplied: sO may be written over them
        return acc_o, rMax, rSum

    def place(self) -> tuple[Int32, Int32]:
        """Indices of the 16 rows and of the share of a tile's keys that this warp multiplies."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return warp_index % self.row_warps, warp_index // self.row_warps

    def _pages(self) -> tuple[cute.Tensor, ...]:
        """Registers for the pages of a tile's rows: those of keys, and of values if their width differs."""
        dims = (self.dim,) if self.dim == self.v_dim else (self.dim, self.v_dim)
        return tuple(cute.make_rmem_tensor(KEYS * (dim // VECTOR) // self.threads, Int32) for dim in dims)

    @cute.jit
    def _load_pages(self, keys: PagedKeys, tile: Int32, rPages: tuple[cute.Tensor, ...], work: Any):
        thread, _, _ = cute.arch.thread_idx()
        first, end = self.bounds(tile, work)
        end = cutlass.min(end, first + KEYS)
        for rPage in rPages:
            vectors = const_expr(cute.size(rPage) * self.threads // KEYS)
            self.paging.load_pages(keys.gTable, first, end, thread, vectors, rPage, self.threads)

    @cute.jit
    def _load(self, keys: PagedKeys, buffers: Buffers, tile: Int32, rPages: tuple[cute.Tensor, ...], work: Any):
        thread, _, _ = cute.arch.thread_idx()
        stage = tile % self.stages
        first, end = self.bounds(tile, work)
        is_whole = first + KEYS <= end
        sK, sV = buffers.sK[None, None, stage], buffers.sV[None, None, stage]  # [KEYS, D], [KEYS, D_v]
        how = is_whole, self.threads, self.keys_stay
        self.paging.load_rows(keys.mK, keys.kv_head, sK, first, thread, rPages[0], *how)
        self.paging.load_rows(keys.mV, keys.kv_head, sV, first, thread, rPages[-1], *how)

    # Epilogue

    @cute.jit
    def store_partial(
        self,
        of_warp: Any,  # as returned by `attend`
        buffers: Buffers,
        gO: cute.Tensor,  # fp32 [rows, D_v]
        gLse: cute.Tensor,  # fp32 [rows], in base 2
        num_rows: Int32,
        apart: cutlass.Constexpr[int] = 1,
    ):
        """Reduce the key warps, and write the query rows: every `apart`-th row of the CTA."""
        acc_o, rMax, rSum = of_warp
        thread, _, _ = cute.arch.thread_idx()
        lane, warp_index = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        acc_o_mn = acc_mn_view(acc_o)  # fp32 (c, r, 0, n) of [16, D_v]
        for r in range_constexpr(2):
            row = r * 8 + lane // QUAD
            row_sum = cute.arch.warp_reduction_sum(rSum[r], threads_in_group=QUAD)
            if lane % QUAD == 0:
                buffers.sMax[row, warp_index], buffers.sSum[row, warp_index] = rMax[r], row_sum
            for n in range_constexpr(self.v_dim // 8):
                to = cute.local_tile(buffers.sO[row, None, warp_index], (2,), (n * QUAD + lane % QUAD,))
                cute.autovec_copy(acc_o_mn[None, r, 0, n], to)
        cute.arch.sync_threads()  # o and statistics of all warps are written
        pieces = const_expr(self.v_dim // FLOATS)
        for item in cutlass.range(thread, num_rows * pieces, self.threads, unroll=1):
            row, piece = item // pieces, item % pieces
            row_warp, row_in_warp = row * apart // MMA_K, row * apart % MMA_K
            top = -Float32.inf
            for k in range_constexpr(self.key_warps):
                top = cute.arch.fmax(top, buffers.sMax[row_in_warp, k * self.row_warps + row_warp])
            base = Float32(0.0) if top == -Float32.inf else top
            total = Float32(0.0)
            rO, rPart = cute.make_rmem_tensor(FLOATS, Float32), cute.make_rmem_tensor(FLOATS, Float32)
            rO.fill(0.0)
            for k in range_constexpr(self.key_warps):
                warp = k * self.row_warps + row_warp
                weight = cute.math.exp2(buffers.sMax[row_in_warp, warp] - base, fastmath=True)
                total += buffers.sSum[row_in_warp, warp] * weight
                cute.autovec_copy(cute.local_tile(buffers.sO[row_in_warp, None, warp], (FLOATS,), (piece,)), rPart)
                for i in range_constexpr(FLOATS):
                    rO[i] = cute.math.fma(rPart[i], weight, rO[i])
            inverse = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
            for i in range_constexpr(FLOATS):
                rO[i] = rO[i] * inverse
            cute.autovec_copy(rO, cute.local_tile(gO[row, None], (FLOATS,), (piece,)))
            if piece == 0:
                gLse[row] = base + cute.math.log2(total, fastmath=True)
        cute.arch.sync_threads()  # they are reduced: the next row's operands may be loaded over them
