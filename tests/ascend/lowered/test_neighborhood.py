"""Neighborhood attention: launches of the public functions, lowered by triton-ascend, executed and gated.

The cases together execute every specialisation that the planner can choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from ascend_kernels.device import DEVICES
from ascend_kernels.launch import Launch, recording
from ascend_kernels.neighborhood import band as band_attention
from ascend_kernels.neighborhood import dense_backward, tiling
from dispatch import neighborhood_attention, neighborhood_attention_backward
from tests.ascend.lowered import gates, proof
from tests.support import backward_cases, band_cases, cases, neighborhood_cases
from tests.support.helpers import make_qkv

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
        plan = tiling.Plan(tiles, launch.grid, tiling.live_bytes(kernel, tiles, dtype.itemsize), launch.options)
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
    """Result of a function whose launches are executed."""
    with executing():
        return function()


# The flash kernels


def widest(block_d: int, tier: int) -> dict[str, Any]:
    """The largest head dim and window that tiles are chosen for together."""
    return {"tokens": 150, "dim": block_d, "kernel_size": tier, "boundary": "shift"}


FLASH: dict[str, dict[str, Any]] = {
    "2304 tokens": {"tokens": 2304, "kernel_size": 7, "dim": 64},
    "long": {"tokens": 4096, "kernel_size": 63, "dim": 128, "boundary": "shift", "heads": 1},
    "dilated, grouped, even": {"tokens": 301, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 64},
    "fewer tokens than keys, features padded": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 123},
    "one token, one feature": {"tokens": 1, "dim": 1},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "head_major": True, "batch": 2},
}
KERNELS = ["forward_kernel", "dq_kernel", "dkdv_kernel"]


def check_flash(**case: Any) -> None:
    """The public op, forward and backward."""
    with executing() as launches:
        neighborhood_cases.check("ascend", **case)
    assert [one.kernel.fn.__name__ for one in launches] == KERNELS


@pytest.mark.ascend
@pytest.mark.parametrize(
    ("dtype", "block_d", "tier"), cases.product(DTYPES, tiling.BLOCKS_D, tiling.TIERS, cover=2), ids=str
)
def test_every_head_dim_and_window(dtype: torch.dtype, block_d: int, tier: int) -> None:
    """All (dtype, D, tier), by which `specialisations` lists the flash kernels; any two of the three in every run."""
    check_flash(dtype=dtype, **widest(block_d, tier))


@pytest.mark.ascend
@pytest.mark.parametrize(("case", "dtype"), cases.product(FLASH, DTYPES), ids=str)
def test_flash(case: str, dtype: torch.dtype) -> None:
    check_flash(dtype=dtype, **FLASH[case])


SHORT = [(7, "truncate"), (2, "shift"), (7, "causal")]
"""In every run, of k = 1, 2, 3, 4 and 7."""


@pytest.mark.ascend
@pytest.mark.parametrize(
    ("kernel_size", "window"), cases.some(SHORT, [1, 2, 3, 4, 7], neighborhood_cases.WINDOWS), ids=str
)
def test_every_short_length(kernel_size: int, window: str) -> None:
    """N = 1 ... 70 with every such window, dtypes and dilations in turn; few builds, for sizes are run-time values."""
    boundary = neighborhood_cases.WINDOWS[window]
    with proof.executing() as launches:
        for tokens in range(1, 71):
            kind = {"dtype": DTYPES[(tokens + kernel_size) % 3], "heads": 1 + (tokens % 5 == 0)}
            size = {"kernel_size": kernel_size, "dilation": 1 + tokens // 3 % 2}
            neighborhood_cases.check("ascend", tokens, **kind, **size, **boundary)
    assert [one.kernel.fn.__name__ for one in launches] == KERNELS * 70


# The band


BAND: dict[str, dict[str, Any]] = {
    "2304 tokens": {"tokens": 2304, "kernel_size": 7, "dim": 64},
    "long": {"tokens": 4096, "kernel_size": 33, "dim": 128, "boundary": "shift", "heads": 1},
    "dilated, grouped, even": {"tokens": 150, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "moved, dilated": {"tokens": 151, "kernel_size": 40, "dilation": 2, "boundary": "shift", "dim": 32},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 64},
    "widest features": {"tokens": 50, "kernel_size": 9, "boundary": "shift", "dim": 256},
    "fewer tokens than keys": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 64},
    "fewer tokens than keys, truncated, features padded": {"tokens": 5, "kernel_size": 64, "dim": 123},
    "one token, one feature": {"tokens": 1, "dim": 1},
    "one key": {"tokens": 40, "kernel_size": 1, "dim": 16},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "layout": "head-major", "batch": 2},
}


@pytest.mark.ascend
@pytest.mark.parametrize(("case", "dtype"), cases.product(BAND, DTYPES), ids=str)
def test_band(case: str, dtype: torch.dtype) -> None:
    band_cases.check(executed, "ascend", dtype=dtype, **BAND[case])


ALGORITHM_CASES: dict[str, dict[str, Any]] = {
    "2304 tokens": {"tokens": 2304, "kernel_size": 7, "dim": 64, "heads": 1},
    "as pairs": {"tokens": 150, "kernel_size": 6, "dilation": 3, "boundary": "shift", "dim": 40},
}


@pytest.mark.ascend
@pytest.mark.parametrize(("case", "dtype"), cases.product(ALGORITHM_CASES, DTYPES), ids=str)
def test_differentiable_op(case: str, dtype: torch.dtype) -> None:
    """`algorithm="band"`: the backward takes the band beyond 2048 tokens, and pairs up to them."""
    with executing() as launches:
        neighborhood_cases.check("ascend", dtype=dtype, algorithm="band", **ALGORITHM_CASES[case])
    backward = "ds_kernel" if case == "2304 tokens" else "dense_ds_kernel"
    assert backward in [one.kernel.fn.__name__ for one in launches]


# The backward from probabilities


PATHS = ["dense", "sparse"]
BACKWARD: dict[str, dict[str, Any]] = {
    "a band": {"tokens": 150, "dim": 64, "kernel_size": 16, "boundary": "shift"},
    "all pairs": {"tokens": 150, "dim": 128, "kernel_size": 9, "dense": True},
    "the longest": {"tokens": 2048, "dim": 64, "kernel_size": 63, "heads": 1, "dense": True},
    "dilated, grouped, even": {"tokens": 201, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 256},
    "fewer tokens than keys, features padded": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 123},
    "one token, one feature": {"tokens": 1, "dim": 1},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "head_major": True, "batch": 2, "dense": True},
}


@pytest.mark.ascend
@pytest.mark.parametrize(("case", "path", "dtype"), cases.product(BACKWARD, PATHS, DTYPES), ids=str)
def test_backward(case: str, path: str, dtype: torch.dtype) -> None:
    inputs, window = backward_cases.make(dtype=dtype, **BACKWARD[case])
    call = partial(neighborhood_attention_backward, *inputs, **window, path=path, backend="ascend")
    backward_cases.assert_gradients(executed(call), inputs, window, case)


@pytest.mark.ascend
def test_plain_and_persistent_give_the_same_bits() -> None:
    inputs, window = backward_cases.make(150, dim=80, heads=8, kv_heads=4, batch=2, dtype=torch.bfloat16, dense=True)
    results = []
    for persistent in (False, True):
        with recording(run=False) as launches:
            results.append(dense_backward.backward(*inputs, **window, backend="ascend", persistent=persistent))
        assert [one.grid for one in launches] == ([(20,)] * 3 if persistent else [(48,), (48,), (48,)])
        proof.execute(launches)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# All of them


def test_every_specialisation_is_executed() -> None:
    """Derived from the cases by recording their launches."""
    flash = [widest(block_d, tier) for block_d in tiling.BLOCKS_D for tier in tiling.TIERS]
    with recording(run=False) as launches:
        for dtype in DTYPES:
            for case in (*flash, *FLASH.values()):
                inputs, do, options = neighborhood_cases.make(dtype=dtype, **case)
                neighborhood_cases.results("ascend", inputs, do, **options)
            for case in BAND.values():
                band_cases.results(lambda function: function(), "ascend", *band_cases.make(dtype=dtype, **case))
            for case, path in product(BACKWARD.values(), PATHS):
                inputs, window = backward_cases.make(dtype=dtype, **case)
                neighborhood_attention_backward(*inputs, **window, path=path, backend="ascend")
    executed = {specialisation_of(launch) for launch in launches}
    listed = set(tiling.specialisations())
    assert not listed - executed, f"no case launches {sorted(map(str, listed - executed))}"
    assert not executed - listed, f"not among the specialisations: {sorted(map(str, executed - listed))}"


@pytest.mark.parametrize(("dtype", "dim"), cases.product(DTYPES[::-1], [64, 128, 256]), ids=str)
def test_flash_compiles_for_sm_90(dtype: torch.dtype, dim: int) -> None:
    q, k, v = make_qkv(500, dim=dim, dtype=dtype, requires_grad=True)
    with recording(run=False) as launches:
        out = neighborhood_attention(q, k, v, kernel_size=9, backend="triton")
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert len(launches) == 3
    proof.assert_compiles(launches)


@pytest.mark.parametrize(("dtype", "dim"), cases.product(DTYPES[::-1], [64, 256]), ids=str)
def test_band_compiles_for_sm_90(dtype: torch.dtype, dim: int) -> None:
    q, k, v = make_qkv(1500, dim=dim, dtype=dtype)
    window = {"dilation": 1, "boundary": "shift", "causal": False, "backend": "triton"}
    with recording(run=False) as launches:
        _, band = band_attention.forward(q, k, v, kernel_size=9, softmax_scale=None, **window)
        for fused in (True, False):
            band_attention.backward(q, q, k, v, band, kernel_size=9, softmax_scale=None, fused=fused, **window)
        band_attention.expand_band(band, **window)
    assert {one.kernel for one in launches} == set(band_attention.KERNELS.values())
    proof.assert_compiles(launches)


@pytest.mark.parametrize("dtype", [torch.float32, *cases.rest(torch.float16, torch.bfloat16)], ids=str)
def test_backward_compiles_for_sm_90(dtype: torch.dtype) -> None:
    inputs, window = backward_cases.make(200, dim=128, dtype=dtype, dense=True)
    with recording(run=False) as launches:
        neighborhood_attention_backward(*inputs, **window, path="dense", backend="triton")
    assert len(launches) == 3
    proof.assert_compiles(launches)
