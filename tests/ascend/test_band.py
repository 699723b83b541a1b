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
from ascend_kernels.launch import recording
from ascend_kernels.neighborhood import band as band_attention
from ascend_kernels.neighborhood import tiling
from dispatch import neighborhood_attention
from tests.support.band_cases import check
from tests.support.helpers import make_qkv

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


def test_tiles_grow_with_the_sequence_as_far_as_the_memory_allows() -> None:
    def rows_of(kernel: str, dtype: torch.dtype, length: int) -> int:
        return tiling.band_tiles(kernel, dtype, length).block_m

    for kernel in ("band_rows", "band_columns", "band_gradients"):
        assert rows_of(kernel, torch.float16, 1025) > rows_of(kernel, torch.float16, 1024)
        too_large = tiling.live_bytes(kernel, tiling.Tiles(64, 64, 64), 4)
        assert not tiling.fits(too_large, DEVICES["A2"])
        assert rows_of(kernel, torch.float32, 1025) == rows_of(kernel, torch.float32, 1024)


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


def test_launches_that_an_npu_would_be_given() -> None:
    q, k, v = make_qkv(5000, heads=8, dtype=torch.bfloat16, requires_grad=True)
    with recording(run=False) as launches:
        out = neighborhood_attention(q, k, v, kernel_size=60, dilation=2, algorithm="band", backend="ascend")
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
        short = torch.empty(1, 300, 8, 16)
        given = torch.empty(1, 8, 300, 9)
        window = {"kernel_size": 9, "dilation": 2, "softmax_scale": None, "boundary": "truncate", "causal": False}
        band_attention.backward(short, short, short, short, given, **window, backend="ascend")
        band = out.new_empty(1, 8, 300, 9, dtype=torch.float32)
        band_attention.expand_band(band, dilation=1, boundary="shift", causal=False, backend="ascend")
    assert [(one.kernel.__name__, one.grid) for one in launches] == [
        ("scores_kernel", (20,)),
        ("rows_kernel", (20,)),
        *(("ds_kernel", (20,)), ("rows_kernel", (20,)), ("columns_kernel", (20,)), ("columns_kernel", (20,))),
        *(("ds_kernel", (20,)), ("gradients_kernel", (1, 16, 1))),
        ("expand_kernel", (40,)),
    ]
    for one in launches:
        assert set(one.arguments) | set(one.constants) == set(one.kernel.arg_names)
        assert one.constants.get("UPCAST", False) is False


# The kernels


GPU_CASES: dict[str, dict[str, Any]] = {
    "short": {"tokens": 33, "kernel_size": 7, "kv_heads": 2},
    "plain": {"tokens": 2304, "dim": 64, "kernel_size": 7, "heads": 4, "kv_heads": 4},
    "even, moved, dilated, grouped": {
        "tokens": 4099,
        "dim": 128,
        "kernel_size": 64,
        "dilation": 3,
        "boundary": "shift",
        "heads": 8,
        "kv_heads": 2,
    },
    "causal": {"tokens": 3001, "dim": 80, "kernel_size": 100, "causal": True, "batch": 2},
    "widest features": {"tokens": 1500, "dim": 256, "kernel_size": 33, "boundary": "shift"},
    "head-major": {"tokens": 200, "dim": 128, "kernel_size": 9, "layout": "head-major", "heads": 4, "kv_heads": 4},
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", GPU_CASES)
def test_on_a_gpu(case: str, dtype: torch.dtype) -> None:
    check(lambda function: function(), "triton", device="cuda", dtype=dtype, **GPU_CASES[case])
