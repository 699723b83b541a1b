"""Tile sizes, warps and stages of the kernels, by dtype, head dim and the shared memory of the device.

Fixed tables and no autotuning: the same call runs the same code, with the same bits, on every start. Tiles of class S
(device.memory_class) fit every device; classes M and L differ only where that was measured to be faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ascend_kernels import device as devices
from ascend_kernels.launch import gpu_options as gpu_options

MAX_DIM = 256


@dataclass(frozen=True)
class Tiles:
    """Rows that a program keeps, keys (or rows) per step, and compiler options."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        return gpu_options(num_warps=self.num_warps, num_stages=self.num_stages)


def block_of(size: int, least: int = 16) -> int:
    """Smallest power of two that holds `size`, at least `least`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def interval_tiles(dtype: torch.dtype, dim: int, dim_v: int, device: torch.device) -> Tiles:
    """Rows and keys of interval.forward_kernel."""
    wide = block_of(max(dim, dim_v))
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1)
    if wide > 128:
        return Tiles(64, 32, 8, 2)
    return Tiles(64, 64, 4, 3) if devices.memory_class(device) == "L" else Tiles(128, 64, 8, 2)


def token_score_tiles(dtype: torch.dtype, dim: int, group: int, device: torch.device) -> Tiles:
    """Tokens, whose heads together are 64 or 128 rows if possible, and entries of scores.token_kernel."""
    wide, rows = block_of(dim), block_of(group, 1)
    if dtype == torch.float32 or wide > 128:
        return Tiles(max(1, 32 // rows), 32, 4, 1)
    large = devices.memory_class(device) == "L"
    kept = 128 if large and rows > 2 else 64  # few heads to sum leave many results in registers
    return Tiles(max(1, kept // rows), 64, 4, 3 if large else 2)


def score_tiles(dtype: torch.dtype, dim: int) -> Tiles:
    """Rows, and entries or keys of the other kernels of scores.py."""
    if dtype == torch.float32:
        return Tiles(16, 32, 4, 1)
    return Tiles(128, 64, 8, 2) if block_of(dim) <= 128 else Tiles(64, 32, 8, 1)


def selected_tiles(
    dtype: torch.dtype, dim: int, dim_v: int, rows: int, size: int, device: torch.device, *, token: bool,
    backward: bool = False,
) -> Tiles:  # fmt: skip
    """Rows that share a list, and keys, of selected.forward_kernel and dq_kernel.

    Args:
        rows: of a list. size: tokens of a block.
    """
    wide = block_of(max(dim, dim_v))
    keys = min(64 if wide <= 128 and dtype.itemsize == 2 else 32, block_of(size))
    if token:
        return Tiles(block_of(rows), keys, 4 if rows > 16 or wide > 128 else 2, 2)
    if dtype == torch.float32:
        return Tiles(min(32, block_of(rows)), keys, 4, 1)
    if devices.memory_class(device) == "L" and wide <= 128:
        return Tiles(min(128, block_of(rows)), keys, 8 if rows > 64 else 4, 3)
    return Tiles(min(128 if wide <= 128 and not backward else 64, block_of(rows)), keys, 8, 2)


def dq_tiles(dtype: torch.dtype, dim: int, dim_v: int, device: torch.device) -> Tiles:
    """Rows and keys of interval_backward.dq_kernel."""
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1)
    if block_of(max(dim, dim_v)) > 128:
        return Tiles(64, 32, 8, 1)
    return Tiles(128, 64, 8, 3) if devices.memory_class(device) == "L" else Tiles(64, 64, 4, 2)


def dkdv_tiles(dtype: torch.dtype, dim: int, dim_v: int, device: torch.device) -> Tiles:
    """Rows and keys of interval_backward.dkdv_kernel."""
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1)
    if block_of(max(dim, dim_v)) > 128:
        return Tiles(32, 32, 8, 1)
    return Tiles(32, 64, 4, 3) if devices.memory_class(device) == "L" else Tiles(64, 64, 4, 2)


def kv_outer_tiles(dtype: torch.dtype, dim: int, dim_v: int, group: int, size: int, device: torch.device) -> Tiles:
    """Pairs, whose heads together are 64 or more rows, and keys of kv_outer.forward_kernel."""
    wide, heads = block_of(max(dim, dim_v)), block_of(group, 1)
    if dtype == torch.float32:
        return Tiles(max(1, 16 // heads), min(32, block_of(size)), 4, 1)
    if wide > 128:
        return Tiles(max(1, 64 // heads), min(32, block_of(size)), 8, 1)
    rows, keys = 128 if heads >= 16 else 64, 128 if devices.memory_class(device) == "L" else 64
    keys = min(keys, block_of(size))
    return Tiles(max(1, rows // heads), keys, 4 if keys <= 64 else 8, 2)


def kv_outer_backward_tiles(
    dtype: torch.dtype, dim: int, dim_v: int, rows: int, size: int, device: torch.device, *, token: bool
) -> Tiles:
    """Pairs or rows, and keys, of kv_outer.token_backward_kernel and tile_backward_kernel.

    Args:
        rows: heads of a token, or rows of a tile.
    """
    wide, large = block_of(max(dim, dim_v)), devices.memory_class(device) == "L"
    most, keys, warps, stages = 64 if large and token else 32, 64, 4, 3 if large and not token else 2
    if wide > 128:
        most, keys, warps, stages = 32, 32, 8, 1
    if dtype == torch.float32:
        most, keys, warps, stages = 16 if token else 32, 32, 4, 1
    kept = max(1, most // block_of(rows, 1)) if token else min(most, block_of(rows))
    return Tiles(kept, min(keys, block_of(size)), warps, stages)


def lse_tiles(dtype: torch.dtype, dim: int, group: int, size: int, device: torch.device) -> Tiles:
    """Pairs and keys of indexer_loss.lse_kernel."""
    chosen = kv_outer_tiles(dtype, dim, dim, group, size, device)
    if dtype == torch.float32 or block_of(dim) > 128 or devices.memory_class(device) != "L":
        return chosen
    return Tiles(max(1, 64 // block_of(group, 1)), chosen.block_n, 4, 2)


def indexer_tiles(dtype: torch.dtype, dim: int, size: int) -> Tiles:
    """Pairs, and keys, of indexer_loss.best_kernel and dk_kernel."""
    if dtype == torch.float32:
        return Tiles(16, min(32, block_of(size)), 4, 1)
    wide = block_of(dim) > 128
    return Tiles(32 if wide else 64, min(32 if wide else 64, block_of(size)), 4, 1 if wide else 2)


QUERY_OUTER_FROM = {"S": 12, "M": 24, "L": 32}
"""Heads of a group from which token mode goes through each token's blocks (selected.py), by class.

Below, it goes through each block's tokens (kv_outer.py), which reads keys once but writes partial results. The bounds
follow from the ratio of L2 to HBM bandwidth.
"""


def head_warps(group: int, dim: int) -> int:
    """Warps of kernels that go through partial results of a token's heads."""
    return min(4, max(1, block_of(group, 1) * block_of(dim) // 512))


def attends_by_block(group: int, device: torch.device) -> bool:
    """True if token mode attends KV-outer: by shape and device alone, so that bits depend on nothing else."""
    return group < QUERY_OUTER_FROM[devices.memory_class(device)]
