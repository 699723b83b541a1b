"""Neighborhood attention's band: the kernels on a GPU, tiles, grids, chunks."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_kernels.device import DEVICES
from ascend_kernels.neighborhood import tiling
from tests.support.band_cases import check

# Tiles, grids and chunks


def test_planner_on_random_shapes() -> None:
    """10,000 shapes: tiles are among the specialisations and fit, grids are small, and all row numbers are int32."""
    known = set(tiling.specialisations())
    assert len(known) <= 80
    draw = random.Random(0)
    for _ in range(10_000):
        kernel = draw.choice(tiling.BAND_KERNELS)
        dtype = torch.float32 if kernel == "band_expand" else draw.choice(tiling.DTYPES)
        rows, kernel_size = int(2 ** draw.uniform(0, 29)), int(2 ** draw.uniform(0, 29))
        device = draw.choice(list(DEVICES.values()))
        shape = {"batch": draw.randint(1, 300), "sequences": draw.randint(1, 1 << 12), "rows": rows}
        dim = draw.randint(1, tiling.MAX_DIM)
        plan, work = tiling.band_plan(kernel, dtype, dim, device=device, **shape)
        assert (kernel, dtype, plan.tiles) in known
        assert tiling.fits(plan.live_bytes, device)
        assert len(plan.grid) == len(work) == (3 if kernel == "band_gradients" else 1)
        assert all(1 <= programs <= tiles for programs, tiles in zip(plan.grid, work, strict=True))
        assert math.prod(plan.grid) <= min(65535, 2 * device.cores)
        assert math.prod(work) * plan.tiles.block_m * plan.tiles.block_d >= shape["batch"] * shape["sequences"] * rows
        assert rows + 2 * kernel_size + plan.tiles.block_m + plan.tiles.block_n < 2**31
        gpu, _ = tiling.band_plan(kernel, dtype, dim, device=None, **shape)
        assert all(programs <= 65535 for programs in gpu.grid[1:])
        assert gpu.grid[0] < 2**31


@given(batch=st.integers(0, 200), size=st.integers(0, 1 << 32), memory=st.integers(0, 1 << 38))
def test_chunks(batch: int, size: int, memory: int) -> None:
    limit = max(256 << 20, int(0.08 * memory))
    parts = tiling.batch_chunks(batch, size, memory)
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(batch))
    for part in parts:
        count = part.stop - part.start
        assert count == 1 or count * size <= limit
    if len(parts) > 1:
        assert (parts[0].stop + 1) * size > limit


# The kernels


MOVED: dict[str, Any] = {"kernel_size": 64, "dilation": 3, "boundary": "shift"}
GPU_CASES: dict[str, dict[str, Any]] = {
    "short": {"tokens": 33, "kernel_size": 7, "kv_heads": 2},
    "plain": {"tokens": 2304, "dim": 64, "kernel_size": 7, "heads": 4, "kv_heads": 4},
    "even, moved, dilated, grouped": {"tokens": 4099, "dim": 128, **MOVED, "heads": 8, "kv_heads": 2},
    "causal": {"tokens": 3001, "dim": 80, "kernel_size": 100, "causal": True, "batch": 2},
    "widest features": {"tokens": 1500, "dim": 256, "kernel_size": 33, "boundary": "shift"},
    "head-major": {"tokens": 200, "dim": 128, "kernel_size": 9, "layout": "head-major", "heads": 4, "kv_heads": 4},
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", GPU_CASES)
def test_on_a_gpu(case: str, dtype: torch.dtype) -> None:
    check(lambda function: function(), "triton", device="cuda", dtype=dtype, **GPU_CASES[case])
