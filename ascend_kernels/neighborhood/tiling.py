"""Tiles and grids: what fits the memories of each device, and which specialisations of the kernels exist at all.

Ascend. A program of a flash kernel (neighborhood/flash.py) keeps a tile of BLOCK_M rows and walks over the rows of
the other side, BLOCK_N at a time. Its live tiles are counted memory by memory:

    UB          the vector unit's: scores, probabilities, masks, accumulators, and whatever crosses to or from the cube
    L1          operands of `tl.dot`, whole tiles: q k v (forward), q k v do (backward), and p or ds on their way back
    L0A, L0B    operands of one cube instruction, L0C its fp32 result; compilers cut a `tl.dot` into pieces of at least
                16 x 16 x 16, so only a tile's short sides are held against these

A program of the band's kernels (band_kernels.py) keeps BLOCK_M rows or keys of the band and takes BLOCK_N of the other
side and BLOCK_D features at a time. The UB holds fp32 tiles of the band, dense and by slots, with masks, and the
accumulator of a result.

A program of the dense backward's kernels (dense_backward.py) does the same with fp32 tiles of matrices of all pairs.

Tiles that cross between memories are counted twice (double buffering), and the sum may take UB_SHARE of the UB. No
compiler for an NPU has confirmed the model: it is a conservative count, to be replaced by measurements on a device.

The product of a grid is at most MAX_GRID. Kernels stride over their work with as many programs as there are cores, so
grids never ask for larger tiles.

NVIDIA. Tiles live in registers and shared memory; those of `gpu_plan` fit the 227 KiB of sm_90.

Row numbers are int32 in the kernels, offsets of elements int64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from ascend_kernels.device import KIB, MIN_UB, Device

MAX_GRID = 65535
MAX_TOKENS = 1 << 29
"""Row numbers, reaching a window and a tile past both ends, stay far inside int32."""
UB_SHARE = 0.75
VECTOR_CORES = 2
"""Vector cores per AI core."""

KERNELS = ("forward", "dq", "dkdv")
BAND_KERNELS = ("band_scores", "band_ds", "band_rows", "band_columns", "band_gradients", "band_expand")
DENSE_KERNELS = ("dense_dv", "dense_ds", "dense_dqdk")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCKS_D = (32, 64, 128, 256)
BLOCKS = (16, 32, 64, 128)
MAX_DIM = BLOCKS_D[-1]
GPU_OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""What upstream Triton takes; fusion by name, since its default differs between versions."""


@dataclass(frozen=True)
class Tiles:
    """Rows a program keeps, rows it takes at a time, and features (a power of two, at least 32)."""

    block_m: int
    block_n: int
    block_d: int
    one_pass: bool = False
    """Whether all that a program takes is one tile; then it keeps so few rows that their windows fit it."""

    def rows_of(self, window: int) -> int:
        """Rows that a program keeps of windows of so many keys."""
        return min(self.block_m, self.block_n - window + 1) if self.one_pass else self.block_m


@dataclass(frozen=True)
class Plan:
    """How one launch goes."""

    tiles: Tiles
    grid: tuple[int, ...]
    live_bytes: dict[str, int]
    """Bytes of live tiles in UB, L1, L0A, L0B and L0C; empty for GPUs, whose compiler counts for itself."""
    options: dict[str, int]
    """What the compiler takes beside the tiles."""


def block_of(dim: int) -> int:
    """Features a tile has for head dim D."""
    return next(block for block in BLOCKS_D if block >= dim)


def live_bytes(kernel: str, tiles: Tiles, itemsize: int) -> dict[str, int]:
    """The tiles that one iteration of a kernel keeps, by memory."""
    if kernel in BAND_KERNELS:
        return _band_live_bytes(kernel, tiles, itemsize)
    scores, kept, walked = (
        tiles.block_m * tiles.block_n,
        tiles.block_m * tiles.block_d,
        tiles.block_n * tiles.block_d,
    )
    if kernel == "forward":
        # crossing: scores in fp32, p in the inputs' dtype, p v in fp32, o; staying: p, slots, mask, accumulator
        ub = scores * (2 * (4 + itemsize) + 4 + 4 + 1) + kept * (2 * 4 + 4 + itemsize)
        l1 = itemsize * (kept + 2 * 2 * walked + 2 * scores)
    elif kernel == "dq":
        # crossing: scores and dp in fp32, ds in the inputs' dtype, ds k in fp32; staying: p, slots, mask, accumulator
        ub = scores * (2 * (4 + 4 + itemsize) + 4 + 4 + 1) + kept * (2 * 4 + 4 + itemsize)
        l1 = itemsize * (2 * kept + 2 * 2 * walked + 2 * scores)
    elif kernel == "dense_dv":
        # crossing: p in fp32 and in the inputs' dtype, p^T do in fp32; staying: accumulator
        ub = scores * 2 * (4 + itemsize) + kept * (2 * 4 + 4 + itemsize)
        l1 = itemsize * (2 * scores + 2 * walked)
    elif kernel == "dense_ds":
        # crossing: dp and p in fp32, ds in the inputs' dtype; staying: dp, ds
        ub = scores * (2 * (4 + 4 + itemsize) + 4 + 4)
        l1 = itemsize * (2 * kept + 2 * walked)
    elif kernel == "dense_dqdk":
        # crossing: ds k in fp32, ds to be transposed; staying: two accumulators
        ub = scores * 2 * itemsize + kept * (2 * 4 + 2 * 4 + itemsize)
        l1 = itemsize * (2 * scores + 2 * walked)
    elif kernel == "dkdv":
        # as dq, with p and ds crossing and two accumulators
        ub = scores * (2 * (4 + 4 + 2 * itemsize) + 4 + 4 + 1) + kept * (2 * 4 + 2 * 4 + itemsize)
        l1 = itemsize * (2 * kept + 2 * 2 * walked + 2 * 2 * scores)
    else:
        raise ValueError(f"there is no kernel {kernel!r}")
    ub += 8 * 4 * max(tiles.block_m, tiles.block_n)  # row maxima, sums, LSE, delta, row numbers
    side = 16 * max(tiles.block_m, tiles.block_n, tiles.block_d)
    return {"UB": ub, "L1": l1, "L0A": 2 * side * itemsize, "L0B": 2 * side * itemsize, "L0C": 2 * side * 4}


def fits(live: dict[str, int], device: Device) -> bool:
    """Whether all of it fits, and no more than UB_SHARE of the UB is taken."""
    capacity = {
        "UB": int(UB_SHARE * device.ub),
        "L1": device.l1,
        "L0A": device.l0a,
        "L0B": device.l0b,
        "L0C": device.l0c,
    }
    return all(size <= capacity[memory] for memory, size in live.items())


MIN_BLOCK_D = 64
"""Features of a tile on Ascend, at least: narrower heads take the same builds, of which there are to be few."""
TIERS = (16, 128)
"""Window sizes that tiles are chosen for; the last one also stands for all that are larger."""
STEP_BYTES = 32 * KIB
"""What a step of the inner loop costs beside its traffic, as traffic: a guess, until a device has been measured."""


@lru_cache
def ascend_tiles(kernel: str, dtype: torch.dtype, dim: int, kernel_size: int) -> Tiles:
    """Tiles for a call: those that cost least per kept row for the widest window of the tier.

    The cost is traffic (walked rows into L1, scores between cube and vector unit) and steps. They fit a UB of MIN_UB
    bytes, so every device takes them, and they are few.
    """
    tier = next((tier for tier in TIERS if kernel_size <= tier), TIERS[-1])
    smallest = Device("smallest", MIN_UB, 512 * KIB, 64 * KIB, 64 * KIB, 128 * KIB, 1)
    block_d = max(MIN_BLOCK_D, block_of(dim))

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
    return min((tiles for tiles in candidates if fits(live_bytes(kernel, tiles, dtype.itemsize), smallest)), key=cost)


BAND_LENGTHS = (1024,)
"""Rows of a class up to which the band's kernels take smaller tiles, to have work for all cores."""
CHUNK_BYTES = 256 << 20
CHUNK_SHARE = 0.08
"""What a chunk's band may take: so many bytes, or that share of the device's memory where it is more."""


def _band_live_bytes(kernel: str, tiles: Tiles, itemsize: int) -> dict[str, int]:
    pairs, kept, walked = (
        tiles.block_m * tiles.block_n,
        tiles.block_m * tiles.block_d,
        tiles.block_n * tiles.block_d,
    )
    ub = 8 * 4 * max(tiles.block_m, tiles.block_n)  # row maxima, sums, delta, row numbers
    if kernel == "band_expand":
        # crossing: the tile, in and out; staying: slots, mask
        return {"UB": ub + pairs * (2 * 4 + 2 * 4 + 4 + 1)}
    if kernel in ("band_scores", "band_ds"):
        # crossing: products, the stored tile, p of ds; staying: sums and slots, one slot's line, the tile and its mask
        slots = tiles.block_m * tiles.block_m
        ub += pairs * (2 * 4 + 4 + 4 + 4) + slots * (2 * 4 + 2 * 4 + 4 + 1)
        l1 = itemsize * 2 * (kept + walked)
    else:
        # crossing: the band's tile, its operand, products, the result; staying: slots, mask, accumulator
        ub += pairs * (2 * 4 + 2 * itemsize + 4 + 1) + kept * (2 * 4 + 4 + itemsize)
        l1 = itemsize * 2 * (pairs + walked)
    side = 16 * max(tiles.block_m, tiles.block_n, tiles.block_d)
    return {"UB": ub, "L1": l1, "L0A": 2 * side * itemsize, "L0B": 2 * side * itemsize, "L0C": 2 * side * 4}


@lru_cache
def band_tiles(kernel: str, dtype: torch.dtype, rows: int) -> Tiles:
    """Tiles for classes of so many rows: for a UB of MIN_UB bytes, and few.

    A slot costs the kernels that write a band BLOCK_N + BLOCK_M of the vector unit's work per row, so their tiles are
    small; the others take the largest that fit, where sequences are long.
    """
    small = Tiles(32, 64, MIN_BLOCK_D)
    large = Tiles(64, 64, MIN_BLOCK_D)
    takes_large = kernel in ("band_rows", "band_columns", "band_gradients") and rows > BAND_LENGTHS[-1]
    smallest = Device("smallest", MIN_UB, 512 * KIB, 64 * KIB, 64 * KIB, 128 * KIB, 1)
    return large if takes_large and fits(live_bytes(kernel, large, dtype.itemsize), smallest) else small


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
    """How a kernel of the band is launched, and pieces of work along each axis of its grid, which programs stride over.

    Args:
        sequences: classes of all heads of a batch element. rows: in each of them.
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


def memory_of(device: torch.device) -> int:
    """Bytes of a device's memory; 0 for CPU tensors, which simulators take: then the smallest limits hold."""
    if device.type == "cpu":
        return 0
    memory: int = torch.get_device_module(device).get_device_properties(device).total_memory
    return memory


def chunks(batch: int, bytes_each: int, memory: int) -> list[slice]:
    """Batch elements in runs whose band takes at most CHUNK_BYTES or CHUNK_SHARE of the memory, one element at least.

    Args:
        bytes_each: the band of one batch element. memory: bytes of the device.
    """
    limit = max(CHUNK_BYTES, int(CHUNK_SHARE * memory))
    size = max(1, limit // max(1, bytes_each))
    return [slice(start, min(start + size, batch)) for start in range(0, batch, size)]


DENSE_TILES = Tiles(64, 64, 64)
"""Of the dense backward on Ascend, for every dtype and D: features are one more dimension of the work. Square tiles of
matrices, the same for all its kernels: one reads what another wrote."""


def dense_work(kernel: str, tiles: Tiles, sequences: int, tokens: int, dim: int) -> int:
    """Pieces of work: tiles of rows, and of features where the kernel's results have them."""
    slices = 1 if kernel == "dense_ds" else -(-dim // tiles.block_d)
    return work_of(tiles, sequences=sequences, rows=tokens) * slices


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
    """Tiles, and a grid that is plain, with a program per piece of work, or persistent.

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
    work = dense_work(kernel, tiles, sequences, tokens, dim)
    return Plan(tiles, (work if cores is None else min(work, cores),), live, options)


def specialisations() -> Iterator[tuple[str, torch.dtype, Tiles]]:
    """Every (kernel, dtype, tiles) that there is on Ascend, once: of `ascend_tiles`, `band_tiles` and `DENSE_TILES`."""
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
    """Tiles, and one program per core at most; each strides over its share of the work.

    Args:
        sequences: classes of all heads and batch elements. rows: in each of them.
    """
    tiles = ascend_tiles(kernel, dtype, dim, kernel_size)
    work = work_of(tiles, kernel_size, sequences=sequences, rows=rows)
    grid = (max(1, min(work, device.cores, MAX_GRID)),)
    return Plan(tiles, grid, live_bytes(kernel, tiles, dtype.itemsize), {})


def work_of(tiles: Tiles, window: int = 1, *, sequences: int, rows: int) -> int:
    """Pieces of work: tiles of all sequences, which keep as many rows as windows of so many keys allow."""
    return sequences * -(-rows // tiles.rows_of(window))


GPU_ONE_PASS = {"forward": 17, "dq": 17, "dkdv": 33}
"""Windows up to which GPUs take one pass over the keys or queries of a tile."""


def gpu_plan(
    kernel: str,
    dtype: torch.dtype,
    dim: int,
    window: int,
    *,
    sequences: int,
    rows: int,
    cores: int,
    bounded: bool,
) -> Plan:
    """Tiles for an NVIDIA GPU, and a program per piece of work or, for some kernels of one pass, few per
    multiprocessor, which load a piece while they compute the one before. The best of those measured on an H200, with
    windows of 7 to 127 keys (docs/neighborhood_attention.md).

    Args:
        window: keys that a row sees. sequences, rows: as in `ascend_plan`. cores: multiprocessors.
        bounded: whether rows see, or for dkdv are seen by, window + BLOCK_M - 1 rows of one head at most.
    """
    block_d = block_of(dim)
    options, programs = {"num_warps": 4, "num_stages": 1}, None
    if dtype == torch.float32:
        tiles = Tiles(32, 32, block_d)
        options["num_warps"] = 8 if block_d == 256 else 4
    elif block_d == 256:
        tiles = Tiles(64 if kernel == "forward" else 32, 32, block_d)
        options["num_stages"] = 2
    elif bounded and window <= GPU_ONE_PASS[kernel]:
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
    work = min(work_of(tiles, window, sequences=sequences, rows=rows), (1 << 31) - 1)
    grid = (work if programs is None else min(work, programs * cores),)
    return Plan(tiles, grid, {}, GPU_OPTIONS | options)
