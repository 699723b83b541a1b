"""Tiles and grids of attention residual that fit the memories of each device, and all specialisations.

Ascend. `get_optimal_block_d` gives the number of features of a row that fit the UB with all temporaries: 12 fp32
numbers per feature forward, 16 backward. Rows of up to so many features use the kernels of whole_rows.py, longer ones
those of tiled.py.

    UB                 forward           backward
    192 KiB (A2, A3)   D <= 2048         D <= 2048
    256 KiB (950)      D <= 4096         D <= 2048

Up to these D, forward reads V once for any L, and twice beyond. Backward reads V and do once if a whole token fits the
UB (`one_tile_rows`): L <= 8 up to D = 512 and L <= 4 up to D = 1024, on any device; for lists, which are read row by
row, only L = 1. It reads V twice and do once for other rows that fit, and both twice for longer ones.

NVIDIA. Rows of up to GPU_MAX_ROW features are one tile, in registers, so forward reads V once from global memory.
Backward reads a token twice, the second time from the L2, unless the whole token is one tile: up to GPU_MAX_TOKEN_ROWS
rows and GPU_MAX_TOKEN elements are, and any number of rows that have no more than GPU_TILE elements together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from ascend_kernels.device import DEVICES, MAX_GRID, MIN_UB, VECTOR_CORES, Device
from ascend_kernels.launch import gpu_options
from ascend_kernels.support import DTYPES

PLAIN = ("forward", "backward")
TILED = ("scores", "mix", "products", "gradients")
WEIGHTS = "weights"
MIN_BLOCK_D = 256
"""Minimum number of features of a tile on Ascend: shorter rows share builds, to keep their number small."""
FP32_PER_FEATURE = {"forward": 12, "backward": 16}
UB_SHARE = 0.85
ONE_TILE_ROWS = (4, 8)
GPU_MAX_ROW, GPU_MAX_TOKEN, GPU_MAX_TOKEN_ROWS = 8192, 32768, 16
"""NVIDIA GPUs: features of a row that is one tile; elements and rows of a token that is one tile."""
GPU_TILE = 2048
"""NVIDIA GPUs: elements of any other tile, unless two rows have more; 64 per thread of a warp."""
GPU_WARPS = 8
"""NVIDIA GPUs: warps per multiprocessor, whose threads can then use 255 registers each."""
GPU_REGISTERS = 192
"""NVIDIA GPUs: registers per thread for values that backward keeps live through a step."""
GPU_SHARED = 200 * 1024
"""NVIDIA GPUs: bytes of shared memory for tiles that are being loaded."""
MAX_BLOCKS = 64
"""Maximum L: a power of two, covered by the tests of docs/ascend_proof.md."""
MAX_ROWS = 1 << 30
"""Maximum number of rows of all tokens and blocks: a program counts its rows, twice in backward, in int32."""
MAX_DIM = 1 << 20
"""Maximum D: offsets within a row fit int32 with a wide margin."""


def get_optimal_block_d(dim: int, backward: bool, ub: int = MIN_UB) -> int:
    """Number of features of a tile for rows of D features, on an NPU with a UB of `ub` bytes.

    The next power of two up to 1024; beyond, the largest power of two for which 12 fp32 numbers per feature forward, or
    16 backward, fit 85 % of the UB. A row fits if that is at least D.
    """
    if dim <= 1024:
        return 1 << (dim - 1).bit_length()
    fitting = int(ub * UB_SHARE / (FP32_PER_FEATURE["backward" if backward else "forward"] * 4))
    return 1 << (fitting.bit_length() - 1)


@dataclass(frozen=True)
class Plan:
    """Tiles, programs and compiler options of one pass over the blocks."""

    block_d: int
    rows: int
    """Rows of a token in a tile."""
    tiled: bool
    """True if a row is several tiles."""
    one_tile: bool
    """True if a token is one tile, which backward then reads once."""
    stages: int
    """Pipeline stages of the loop over tiles: stages - 1 are loaded ahead."""
    programs: int
    live_bytes: dict[str, int]
    """Bytes of live tiles in the UB; empty for GPUs, whose compiler allocates memory itself."""
    options: dict[str, int]
    """Compiler options besides the tiles."""

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.programs,)


def live_bytes(kernel: str, block_d: int, rows: int, itemsize: int) -> dict[str, int]:
    """Bytes of the tiles that a program keeps, by memory."""
    if kernel == WEIGHTS:
        # two tiles of partial sums, their sum, weights and results
        return {"UB": (2 * WEIGHTS_BLOCK_P + 6) * 4 * block_d}
    backward = kernel in ("backward", "products", "gradients")
    row = FP32_PER_FEATURE["backward" if backward else "forward"] * 4 * block_d
    # each further row: a tile being loaded, one in use, a gradient being stored; in fp32 the row, product, gradient
    return {"UB": row + (rows - 1) * block_d * (3 * itemsize + 3 * 4)}


@lru_cache
def one_tile_rows(dtype: torch.dtype, block_d: int, blocks: int) -> int:
    """Rows of backward's tiles on Ascend: all L of a token if they fit a UB of MIN_UB bytes, else 1."""
    for rows in ONE_TILE_ROWS:
        live = live_bytes("backward", block_d, rows, dtype.itemsize)["UB"]
        if 1 < blocks <= rows and live <= UB_SHARE * MIN_UB:
            return rows
    return 1


@lru_cache
def ascend_plan(
    *, backward: bool, dtype: torch.dtype, dim: int, blocks: int, tokens: int, listed: bool, device: Device
) -> Plan:
    """Tiles, and at most one program per vector core; each strides over the tokens.

    Args:
        listed: True if blocks are a list.
    """
    block_d = get_optimal_block_d(max(dim, MIN_BLOCK_D), backward, device.ub)
    tiled = block_d < dim
    rows = one_tile_rows(dtype, block_d, blocks) if backward and not tiled and not listed else 1
    programs = max(1, min(tokens, device.cores * VECTOR_CORES, MAX_GRID))
    live = live_bytes("backward" if backward else "forward", block_d, rows, dtype.itemsize)
    return Plan(block_d, rows, tiled, blocks <= rows, 1, programs, live, {})


@lru_cache
def gpu_plan(
    *,
    backward: bool,
    dtype: torch.dtype,
    dim: int,
    blocks: int,
    tokens: int,
    cores: int,
    rows: int | None = None,
    num_warps: int | None = None,
    stages: int | None = None,
    programs_per_core: int | None = None,
    **options: int,
) -> Plan:
    """Tiles for an NVIDIA GPU, as measured on an H200 (docs/experiments.md).

    If rows are one tile, a multiprocessor has eight warps. A thread keeps 64 elements of a tile, and in backward up to
    twice that if a token is one tile: per-warp work outweighed memory traffic, so fewer warps with larger tiles were
    faster.

    Args:
        cores: number of multiprocessors.
        rows, num_warps, stages, programs_per_core: override the choices made here, to try other plans.
        options: compiler options, such as maxnreg; also overrides.
    """
    block_d = max(32, 1 << (dim - 1).bit_length())
    all_rows = 1 << (blocks - 1).bit_length()
    tiled = block_d > GPU_MAX_ROW
    if tiled:
        block_d, chosen, depth, warps, per_core, registers = 2048, 1, 1, 8, 4, 64
    else:
        one_tile = backward and all_rows <= GPU_MAX_TOKEN_ROWS and all_rows * block_d <= GPU_MAX_TOKEN
        chosen = all_rows if one_tile else min(all_rows, max(2, GPU_TILE // block_d))
        warps = min(GPU_WARPS, max(1, chosen * block_d // GPU_TILE))
        per_core, registers = GPU_WARPS // warps, 255
        tile = chosen * block_d * dtype.itemsize
        # Load two tiles ahead if they fit, unless the second pass hits the L2, or w, do, t and the tile leave no
        # registers for it
        crowded = (chosen + 3) * block_d > GPU_REGISTERS * 32 * warps
        depth = 1 if (backward and (crowded or not one_tile)) or 2 * tile * per_core > GPU_SHARED else 3
    chosen = min(chosen if rows is None else rows, all_rows)
    programs = cores * (per_core if programs_per_core is None else programs_per_core)
    if backward:  # partial sums of t take at most a 32nd of V, unless there is just one per core
        programs = min(programs, max(cores, tokens * blocks * dtype.itemsize // (32 * 4)))
    compiler = gpu_options(num_warps=num_warps or warps, num_stages=1, maxnreg=registers)
    return Plan(
        block_d, chosen, tiled, blocks <= chosen, stages or depth, max(1, min(tokens, programs)), {}, compiler | options
    )


WEIGHTS_BLOCK_P, WEIGHTS_BLOCK_D = 8, 1024


def weights_plan(dim: int, device: Device | None) -> tuple[int, Plan]:
    """BLOCK_P, the partial sums that `weights` adds at a time, and its plan.

    Args:
        device: None for an NVIDIA GPU.
    """
    if device is None:
        # 8 features are 32 bytes, the least that a GPU reads: many programs, with few iterations each
        return 512, Plan(8, 1, False, False, 1, -(-dim // 8), {}, gpu_options(num_warps=4, num_stages=1))
    programs = min(-(-dim // WEIGHTS_BLOCK_D), device.cores * VECTOR_CORES, MAX_GRID)
    live = live_bytes(WEIGHTS, WEIGHTS_BLOCK_D, 1, 4)
    return WEIGHTS_BLOCK_P, Plan(WEIGHTS_BLOCK_D, 1, False, False, 1, programs, live, {})


def specialisations() -> Iterator[tuple[str, torch.dtype, int, int]]:
    """Every (kernel, dtype, BLOCK_D, ROWS) on Ascend, once; each exists for the three ways to address blocks."""
    ubs = sorted({device.ub for device in DEVICES.values()})
    seen: dict[tuple[str, torch.dtype, int, int], None] = {(WEIGHTS, torch.float32, WEIGHTS_BLOCK_D, 1): None}
    for ub in ubs:
        for kernel in PLAIN:
            backward = kernel == "backward"
            longest = get_optimal_block_d(MAX_DIM, backward, ub)
            blocks_d = [MIN_BLOCK_D << i for i in range(longest.bit_length() - MIN_BLOCK_D.bit_length() + 1)]
            for dtype in DTYPES:
                for block_d in blocks_d:
                    several = {one_tile_rows(dtype, block_d, rows) for rows in ONE_TILE_ROWS} if backward else set()
                    seen |= {(kernel, dtype, block_d, rows): None for rows in {1, *several}}
                for tiled in TILED[2:] if backward else TILED[:2]:
                    seen[tiled, dtype, longest, 1] = None
    yield from seen
