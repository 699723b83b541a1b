"""What every launch of neighborhood attention must pass, whichever public function made it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ascend_kernels.device import DEVICES
from ascend_kernels.launch import Launch
from ascend_kernels.neighborhood import tiling
from tests.ascend.lowered import gates, proof

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MLIR_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
LOADS_STORES_MATMULS = {
    "forward": (3, 3, 2),
    "dq": (7, 2, 3),
    "dkdv": (7, 2, 4),
    "band_scores": (2, 1, 1),
    "band_ds": (3, 1, 1),
    "band_rows": (2, 1, 1),
    "band_columns": (2, 1, 1),
    "band_gradients": (6, 3, 3),
    "band_expand": (1, 1, 0),
    "dense_dv": (2, 1, 1),
    "dense_ds": (6, 1, 2),
    "dense_dqdk": (4, 2, 2),
}
"""Block copies in and out, and matrix products, that a kernel's source has."""


def specialisation_of(launch: Launch) -> tuple[str, torch.dtype, tiling.Tiles]:
    """As `tiling.specialisations` lists it: kernel, dtype of its operands, tiles."""
    name = launch.kernel.fn.__name__.removesuffix("_kernel")
    kernel = name if name in (*tiling.KERNELS, *tiling.DENSE_KERNELS) else f"band_{name}"
    rows = (launch.arguments[pointer] for pointer in ("p_q", "p_do", "p_x", "p_band") if pointer in launch.arguments)
    sizes = {"BLOCK_D": tiling.MIN_BLOCK_D, "ONE_PASS": False, **launch.constants}
    tiles = tiling.Tiles(*(sizes[constant] for constant in ("BLOCK_M", "BLOCK_N", "BLOCK_D", "ONE_PASS")))
    return kernel, next(rows).dtype, tiles


def plan_of(launch: Launch) -> tiling.Plan:
    """What the planner counts for the tiles and the grid that were launched."""
    kernel, dtype, tiles = specialisation_of(launch)
    return tiling.Plan(tiles, launch.grid, tiling.live_bytes(kernel, tiles, dtype.itemsize), launch.options)


def gate(launches: Sequence[Launch]) -> None:
    """Block copies only, products of the inputs' dtype, and tiles from the list, within every device's memories."""
    known = set(tiling.specialisations())
    for launch in launches:
        kernel, dtype, tiles = specialisation_of(launch)
        assert (kernel, dtype, tiles) in known
        linalg = proof.lower(launch).linalg
        loads, stores, matmuls = LOADS_STORES_MATMULS[kernel]
        gates.assert_no_single_element_loops(linalg, kernel)
        if matmuls:
            gates.assert_matmul_inputs(linalg, MLIR_NAMES[dtype], kernel)
        assert gates.count(linalg, "linalg.matmul") == matmuls
        assert gates.count_block_copies(linalg) == {"load": loads, "store": stores}
        plan = plan_of(launch)
        gates.assert_plan_is_honest(plan, linalg, kernel)
        for device in DEVICES:
            gates.assert_plan(plan, device, kernel)


@contextmanager
def executing() -> Iterator[list[Launch]]:
    """Launches of the block run from their Linalg, and must pass the gates."""
    with proof.executing() as launches:
        yield launches
    gate(launches)


def executed(function: Callable[[], Any]) -> Any:
    """What a function gives, executed so."""
    with executing():
        return function()
