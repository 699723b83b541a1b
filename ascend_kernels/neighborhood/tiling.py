"""Tiles and grids of neighborhood attention that fit the memories of each device, and all specialisations.

Ascend. A program of a flash kernel (flash.py) keeps a tile of BLOCK_M rows and walks over the rows of the other side,
BLOCK_N at a time. Its live tiles are counted per memory:

    UB vector unit: scores, probabilities, masks, accumulators, and all data exchanged with the cube L1 operands of
    `tl.dot`, whole tiles: q k v (forward), q k v do (backward), and p or ds on their way back L0A, L0B operands of one
    cube instruction, L0C its fp32 result; compilers split a `tl.dot` into blocks of at least 16 x 16 x 16, so only a
    tile's short sides are counted here

A program of the band's kernels (band_kernels.py) keeps BLOCK_M rows or keys of the band and processes BLOCK_N of the
other side and BLOCK_D features at a time. The UB holds fp32 tiles of the band, dense and by slots, with masks, and the
accumulator of a result. A program of the dense backward (dense_backward.py) does the same with fp32 tiles of matrices
of all pairs.

Tiles that cross between memories are counted twice (double buffering), and the sum may use UB_SHARE of the UB. No
compiler for an NPU has confirmed this model: it is a conservative count, to be replaced by measurements on a device.

Kernels stride over their work tiles with as many programs as there are cores, so the limit of a grid (MAX_GRID) never
requires larger tiles.

NVIDIA. Tiles live in registers and shared memory; those of `gpu_plan` fit the 227 KiB of sm_90.

Row numbers are int32 in the kernels, offsets of elements int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from ascend_kernels.device import KIB, MAX_GRID, MIN_UB, VECTOR_CORES, Device
from ascend_kernels.launch import gpu_options
from ascend_kernels.support import DTYPES

MAX_TOKENS = 1 << 29
"""Row numbers, plus a window and a tile past both ends, fit int32 with a wide margin."""
UB_SHARE = 0.75
KERNELS = ("forward", "dq", "dkdv")
BAND_KERNELS = ("band_scores", "band_ds", "band_rows", "band_columns", "band_gradients", "band_expand")
DENSE_KERNELS = ("dense_dv", "dense_ds", "dense_dqdk")
BLOCKS_D = (32, 64, 128, 256)
BLOCKS = (16, 32, 64, 128)
MAX_DIM = BLOCKS_D[-1]
MIN_BLOCK_D = 64
"""Minimum number of features of a tile on Ascend: narrower heads share builds, to keep their number small."""
SMALLEST_NPU = Device("smallest", MIN_UB, 512 * KIB, 64 * KIB, 64 * KIB, 128 * KIB, 1)
"""Tiles on Ascend fit the memories of this device, and so those of every device."""
GPU_OPTIONS = gpu_options(num_warps=4, num_stages=2)


@dataclass(frozen=True)
class Tiles:
    """Number of rows that a program keeps, of rows per step, and of features (a power of two, at least 32)."""

    block_m: int
    block_n: int
    block_d: int
    one_pass: bool = False
    """True if a program reads a single tile, because it keeps so few rows that their windows fit it."""

    def rows_per_tile(self, window: int) -> int:
        """Number of rows that a program keeps, for windows of so many keys."""
        return min(self.block_m, self.block_n - window + 1) if self.one_pass else self.block_m


@dataclass(frozen=True)
class Plan:
    """Tiles, grid and compiler options of one launch."""

    tiles: Tiles
    grid: tuple[int, ...]
    live_bytes: dict[str, int]
    """Bytes of live tiles in UB, L1, L0A, L0B and L0C; empty for GPUs, whose compiler allocates memory itself."""
    options: dict[str, int]
    """Compiler options besides the tiles."""


def block_d_for(dim: int) -> int:
    """Number of features of a tile for head dim D."""
    return next(block for block in BLOCKS_D if block >= dim)


def num_work_tiles(tiles: Tiles, window: int = 1, *, sequences: int, rows: int) -> int:
    """Number of work tiles of all sequences, each with as many rows as windows of so many keys allow."""
    return sequences * -(-rows // tiles.rows_per_tile(window))


def fits(live: dict[str, int], device: Device) -> bool:
    """True if the live tiles fit every memory, and use at most UB_SHARE of the UB."""
    capacity = {
        "UB": int(UB_SHARE * device.ub),
        "L1": device.l1,
        "L0A": device.l0a,
        "L0B": device.l0b,
        "L0C": device.l0c,
    }
    return all(size <= capacity[memory] for memory, size in live.items())


def live_bytes(kernel: str, tiles: Tiles, itemsize: int) -> dict[str, int]:
    """Bytes, by memory, of the tiles that are live in one iteration of a kernel."""
    pairs = tiles.block_m * tiles.block_n
    kept, walked = tiles.block_m * tiles.block_d, tiles.block_n * tiles.block_d
    l1 = 0
    if kernel == "forward":
        # crossing: scores in fp32, p in the inputs' dtype, p v in fp32, o; staying: p, slots, mask, accumulator
        ub = pairs * (2 * (4 + itemsize) + 4 + 4 + 1) + kept * (2 * 4 + 4 + itemsize)
        l1 = itemsize * (kept + 2 * 2 * walked + 2 * pairs)
    elif kernel == "dq":
        # crossing: scores and dp in fp32, ds in the inputs' dtype, ds k in fp32; staying: p, slots, mask, accumulator
        ub = pairs * (2 * (4 + 4 + itemsize) + 4 + 4 + 1) + kept * (2 * 4 + 4 + itemsize)
        l1 = itemsize * (2 * kept + 2 * 2 * walked + 2 * pairs)
    elif kernel == "dkdv":
        # as dq, with p and ds crossing and two accumulators
        ub = pairs * (2 * (4 + 4 + 2 * itemsize) + 4 + 4 + 1) + kept * (2 * 4 + 2 * 4 + itemsize)
        l1 = itemsize * (2 * kept + 2 * 2 * walked + 2 * 2 * pairs)
    elif kernel in ("band_scores", "band_ds"):
        # crossing: products, the stored tile, p of ds; staying: sums and slots, one slot's line, the tile and its mask
        slots = tiles.block_m * tiles.block_m
        ub = pairs * (2 * 4 + 4 + 4 + 4) + slots * (2 * 4 + 2 * 4 + 4 + 1)
        l1 = itemsize * 2 * (kept + walked)
    elif kernel in ("band_rows", "band_columns", "band_gradients"):
        # crossing: the band's tile, its operand, products, the result; staying: slots, mask, accumulator
        ub = pairs * (2 * 4 + 2 * itemsize + 4 + 1) + kept * (2 * 4 + 4 + itemsize)
        l1 = itemsize * 2 * (pairs + walked)
    elif kernel == "band_expand":
        # crossing: the tile, in and out; staying: slots, mask
        ub = pairs * (2 * 4 + 2 * 4 + 4 + 1)
    elif kernel == "dense_dv":
        # crossing: p in fp32 and in the inputs' dtype, p^T do in fp32; staying: accumulator
        ub = pairs * 2 * (4 + itemsize) + kept * (2 * 4 + 4 + itemsize)
        l1 = itemsize * (2 * pairs + 2 * walked)
    elif kernel == "dense_ds":
        # crossing: dp and p in fp32, ds in the inputs' dtype; staying: dp, ds
        ub = pairs * (2 * (4 + 4 + itemsize) + 4 + 4)
        l1 = itemsize * (2 * kept + 2 * walked)
    elif kernel == "dense_dqdk":
        # crossing: ds k in fp32, ds to be transposed; staying: two accumulators
        ub = pairs * 2 * itemsize + kept * (2 * 4 + 2 * 4 + itemsize)
        l1 = itemsize * (2 * pairs + 2 * walked)
    else:
        raise ValueError(f"there is no kernel {kernel!r}")
    ub += 8 * 4 * max(tiles.block_m, tiles.block_n)  # row maxima, sums, LSE, delta, row numbers
    if kernel == "band_expand":  # without a `tl.dot`
        return {"UB": ub}
    side = 16 * max(tiles.block_m, tiles.block_n, tiles.block_d)
    return {"UB": ub, "L1": l1, "L0A": 2 * side * itemsize, "L0B": 2 * side * itemsize, "L0C": 2 * side * 4}


# flash.py on Ascend

TIERS = (16, 128)
"""Window sizes for which tiles are chosen; the last also covers all larger ones."""
STEP_BYTES = 32 * KIB
"""Cost of a step of the inner loop besides its traffic, in bytes of traffic: a guess until measured on a device."""


@lru_cache
def ascend_tiles(kernel: str, dtype: torch.dtype, dim: int, kernel_size: int) -> Tiles:
    """Tiles of a call: those of the lowest cost per kept row for the widest window of the tier.

    The cost is traffic (rows loaded into L1, scores between cube and vector unit) and steps.
    """
    tier = next((tier for tier in TIERS if kernel_size <= tier), TIERS[-1])
    block_d = max(MIN_BLOCK_D, block_d_for(dim))

    def cost(tiles: Tiles) -> float:
        rows = tiles.block_m + tier - 1
        steps = -(-rows // tiles.block_n)
        scores = steps * tiles.block_m * tiles.block_n * (8 if kernel == "forward" else 16)
        return (2 * rows * block_d * dtype.itemsize + scores + steps * STEP_BYTES) / tiles.block_m

    candidates = (
        Tiles(block_m, block_n, block_d, one_pass=kernel != "dkdv" and block_n >= block_m + tier - 1)
        for block_m in BLOCKS
        for block_n in BLOCKS
    )
    fitting = (tiles for tiles in candidates if fits(live_bytes(kernel, tiles, dtype.itemsize), SMALLEST_NPU))
    return min(fitting, key=cost)


def ascend_plan(
    kernel: str,
    dtype: torch.dtype,
    dim: int,
    kernel_size: int,
    *,
    sequences: int,
    rows: int,
    device: Device,
) -> Plan:
    """Tiles, and at most one program per core; each strides over the work tiles.

    Args:
        sequences: number of classes of all heads and batch elements. rows: number of rows of each.
    """
    tiles = ascend_tiles(kernel, dtype, dim, kernel_size)
    work = num_work_tiles(tiles, kernel_size, sequences=sequences, rows=rows)
    grid = (max(1, min(work, device.cores, MAX_GRID)),)
    return Plan(tiles, grid, live_bytes(kernel, tiles, dtype.itemsize), {})


# flash.py on NVIDIA GPUs

GPU_ONE_PASS = {"forward": 17, "dq": 17, "dkdv": 33}
"""Largest windows for which GPUs use one pass over the keys or queries of a tile."""


def gpu_plan(
    kernel: str,
    dtype: torch.dtype,
    dim: int,
    window: int,
    *,
    sequences: int,
    rows: int,
    cores: int,
    memory: str,
    bounded: bool,
) -> Plan:
    """Tiles, and a program per work tile or, for some kernels of one pass, a few persistent ones per multiprocessor,
    which load a work tile while they compute the one before. The best of those measured on an H200, with windows of 7
    to 127 keys (docs/neighborhood_attention.md).

    Args:
        window: keys that a row sees. sequences, rows: as in `ascend_plan`. cores: multiprocessors.
        memory: device.memory_class.
        bounded: whether rows see, or for dkdv are seen by, window + BLOCK_M - 1 rows of one head at most.
    """
    block_d = block_d_for(dim)
    options, programs = {"num_warps": 4, "num_stages": 1}, None
    if dtype == torch.float32:
        rows = 32 if block_d < 128 or memory == "L" else 16
        tiles = Tiles(rows, rows, block_d)
        options["num_warps"] = 8 if block_d == 256 else 4
    elif block_d == 256:
        tiles = Tiles(64 if kernel == "forward" else 32, 32, block_d)
        options["num_stages"] = 2
    elif bounded and window <= GPU_ONE_PASS[kernel] and (memory == "L" or block_d < 128 or kernel == "forward"):
        small = kernel == "dkdv" and block_d < 128 and window <= 17
        tiles = Tiles(*((16, 32) if small else (32, 64) if kernel == "dkdv" else (64, 64)), block_d, one_pass=True)
        if kernel != "forward":
            options["num_stages"], programs = 3, 4 if small else 2
        elif block_d < 128:
            options["num_stages"], programs = 2, 4
        else:
            options["maxnreg"] = 168
    else:
        tiles = Tiles(64, 32, block_d)
        options |= {"num_stages": 2, "maxnreg": 168} if kernel == "forward" else {"num_stages": 3}
    work = min(num_work_tiles(tiles, window, sequences=sequences, rows=rows), (1 << 31) - 1)
    grid = (work if programs is None else min(work, programs * cores),)
    return Plan(tiles, grid, {}, GPU_OPTIONS | options)


# band_kernels.py

BAND_LENGTHS = (1024,)
"""Rows per class up to which the band's kernels use smaller tiles, to occupy all cores."""
CHUNK_BYTES = 256 << 20
CHUNK_SHARE = 0.08
"""A chunk's band uses at most CHUNK_BYTES, or this share of the device's memory if that is more."""


@lru_cache
def band_tiles(kernel: str, dtype: torch.dtype, rows: int) -> Tiles:
    """Tiles for classes of so many rows, on Ascend and on GPUs.

    In kernels that write a band, a slot costs BLOCK_N + BLOCK_M operations of the vector unit per row, so their tiles
    are small; the others use the largest that fit if sequences are long.
    """
    small = Tiles(32, 64, MIN_BLOCK_D)
    large = Tiles(64, 64, MIN_BLOCK_D)
    takes_large = kernel in ("band_rows", "band_columns", "band_gradients") and rows > BAND_LENGTHS[-1]
    return large if takes_large and fits(live_bytes(kernel, large, dtype.itemsize), SMALLEST_NPU) else small


def band_plan(
    kernel: str,
    dtype: torch.dtype,
    dim: int,
    *,
    batch: int,
    sequences: int,
    rows: int,
    device: Device | None,
) -> tuple[Plan, tuple[int, ...]]:
    """The plan of a kernel of the band, and the number of work tiles along each axis of its grid.

    Args:
        sequences: number of classes of all heads of a batch element. rows: number of rows of each.
        device: None for an NVIDIA GPU.
    """
    tiles = band_tiles(kernel, dtype, rows)
    features = 1 if kernel in ("band_scores", "band_ds", "band_expand") else -(-dim // tiles.block_d)
    along_rows = -(-rows // tiles.block_m) * features
    work: tuple[int, ...]
    if kernel == "band_gradients":
        work = (along_rows, sequences, batch)
    else:
        work = (along_rows * sequences * batch,)
    if device is None:
        grid = tuple(min(size, (1 << 31) - 1 if axis == 0 else MAX_GRID) for axis, size in enumerate(work))
        return Plan(tiles, grid, {}, {**GPU_OPTIONS, "num_stages": 2 if dtype.itemsize == 2 else 1}), work
    programs = min(MAX_GRID, device.cores * (VECTOR_CORES if kernel == "band_expand" else 1))
    grid = ()
    for size in reversed(work):
        grid = (min(size, programs // math.prod(grid)), *grid)
    return Plan(tiles, grid, live_bytes(kernel, tiles, dtype.itemsize), {}), work


def batch_chunks(batch: int, bytes_each: int, memory: int) -> list[slice]:
    """Chunks of at least one batch element whose band uses at most CHUNK_BYTES or CHUNK_SHARE of the memory.

    Args:
        bytes_each: the band of one batch element. memory: bytes of the device.
    """
    limit = max(CHUNK_BYTES, int(CHUNK_SHARE * memory))
    size = max(1, limit // max(1, bytes_each))
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


# dense_backward.py

DENSE_TILES = Tiles(64, 64, 64)
"""Tiles on Ascend for every dtype and D; larger D means more work tiles. Tiles of matrices are square and equal in all
kernels, because one reads the tiles that another wrote."""


def num_dense_work_tiles(kernel: str, tiles: Tiles, sequences: int, tokens: int, dim: int) -> int:
    """Number of work tiles: tiles of rows, times tiles of features if the kernel's results have them."""
    dim_tiles = 1 if kernel == "dense_ds" else -(-dim // tiles.block_d)
    return num_work_tiles(tiles, sequences=sequences, rows=tokens) * dim_tiles


def dense_plan(
    kernel: str,
    dtype: torch.dtype,
    dim: int,
    *,
    sequences: int,
    tokens: int,
    backend: str,
    cores: int | None,
) -> Plan:
    """Tiles, and a grid that is plain, with a program per work tile, or persistent.

    Args:
        sequences: heads whose results the kernel writes, of all batch elements.
        backend: "ascend" or "triton".
        cores: programs of a persistent grid; None for a plain one.
    """
    if backend == "ascend":
        tiles, options = DENSE_TILES, {}
        live = live_bytes(kernel, tiles, dtype.itemsize)
    else:
        tiles = Tiles(32, 32, 64) if dtype == torch.float32 else Tiles(64, 64, 64)
        options, live = dict(GPU_OPTIONS), {}
    work = num_dense_work_tiles(kernel, tiles, sequences, tokens, dim)
    return Plan(tiles, (work if cores is None else min(work, cores),), live, options)


# All on Ascend


def specialisations() -> Iterator[tuple[str, torch.dtype, Tiles]]:
    """Every (kernel, dtype, tiles) on Ascend, once: those of `ascend_tiles`, `band_tiles` and `DENSE_TILES`."""
    seen = {
        (kernel, dtype, ascend_tiles(kernel, dtype, block_d, tier)): None
        for kernel in KERNELS
        for dtype in DTYPES
        for block_d in BLOCKS_D
        for tier in TIERS
    }
    seen |= {
        (kernel, dtype, band_tiles(kernel, dtype, rows)): None
        for kernel in BAND_KERNELS
        for dtype in (DTYPES if kernel != "band_expand" else (torch.float32,))
        for rows in (BAND_LENGTHS[-1], MAX_TOKENS)
    }
    seen |= {(kernel, dtype, DENSE_TILES): None for kernel in DENSE_KERNELS for dtype in DTYPES}
    yield from seen
