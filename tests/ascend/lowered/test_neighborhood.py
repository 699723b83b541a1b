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
from ascend_kernels.neighborhood import backward as attention_backward
from ascend_kernels.neighborhood import band as band_attention
from ascend_kernels.neighborhood import dense_backward, tiling
from dispatch import neighborhood_attention, neighborhood_attention_backward
from nsa.neighborhood.api import neighborhood_attention_forward
from tests.ascend.lowered import gates, proof
from tests.ascend.lowered.conftest import CORES
from tests.support import backward_cases, band_cases, cases, neighborhood_cases
from tests.support.helpers import make_qkv
from tests.support.neighborhood_cases import LARGE_LOGITS, WINDOWS

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


def names(launches: Sequence[Launch]) -> list[str]:
    return [one.kernel.fn.__name__ for one in launches]


# The flash kernels


def widest(block_d: int, tier: int) -> dict[str, Any]:
    """The largest head dim and window that tiles are chosen for together."""
    return {"tokens": 150, "dim": block_d, "kernel_size": tier, "boundary": "shift"}


FLASH: dict[str, dict[str, Any]] = {
    "2304 tokens": {"tokens": 2304, "kernel_size": 7, "dim": 64, "heads": 1},
    "long": {"tokens": 600, "kernel_size": 63, "dim": 128, "boundary": "shift", "heads": 1},
    "dilated, grouped, even": {"tokens": 301, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 64},
    "wide": {"tokens": 150, "kernel_size": 41},
    "fewer tokens than keys, features padded": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 123},
    "fewer tokens than keys, causal": {"tokens": 5, "kernel_size": 63, "causal": True, "dilation": 2, "dim": 256},
    "a dilation beyond int32, a scale": {"tokens": 5, "dilation": 1 << 40, "softmax_scale": 0.7},
    "one token, one feature": {"tokens": 1, "dim": 1},
    "head-major": {"tokens": 100, "dim": 64, "heads": 2, "kv_heads": 2, "head_major": True, "batch": 2},
    **{f"logits {name}": {"tokens": 40, **case} for name, case in LARGE_LOGITS.items()},
}
KERNELS = ["forward_kernel", "dq_kernel", "dkdv_kernel"]


def check_flash(**case: Any) -> None:
    """The public op, forward and backward."""
    with executing() as launches:
        neighborhood_cases.check("ascend", **case)
    assert names(launches) == KERNELS


@pytest.mark.ascend
@pytest.mark.full
@pytest.mark.parametrize("tier", tiling.TIERS)
@pytest.mark.parametrize("block_d", tiling.BLOCKS_D)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_head_dim_and_window(dtype: torch.dtype, block_d: int, tier: int) -> None:
    """All (dtype, D, tier), by which `specialisations` lists the flash kernels; FLASH has each of the three."""
    check_flash(dtype=dtype, **widest(block_d, tier))


@pytest.mark.ascend
@pytest.mark.parametrize(("case", "dtype"), cases.product(FLASH, DTYPES), ids=str)
def test_flash(case: str, dtype: torch.dtype) -> None:
    check_flash(dtype=dtype, **FLASH[case])


SHORT = [(7, "truncate"), (2, "shift"), (7, "causal")]
"""In every run, of k = 1, 2, 3, 4 and 7."""


@pytest.mark.ascend
@pytest.mark.parametrize(("kernel_size", "window"), cases.some(SHORT, [1, 2, 3, 4, 7], WINDOWS), ids=str)
def test_every_short_length(kernel_size: int, window: str) -> None:
    """N = 1 ... 70 with every such window, dtypes and dilations in turn; few builds, for sizes are run-time values."""
    boundary = WINDOWS[window]
    with proof.executing() as launches:
        for tokens in range(1, 71):
            kind = {"dtype": DTYPES[(tokens + kernel_size) % 3], "heads": 1 + (tokens % 5 == 0)}
            size = {"kernel_size": kernel_size, "dilation": 1 + tokens // 3 % 2}
            neighborhood_cases.check("ascend", tokens, **kind, **size, **boundary)
    assert names(launches) == KERNELS * 70


# The band


BAND: dict[str, dict[str, Any]] = {
    "long": {"tokens": 1100, "kernel_size": 33, "dim": 40, "boundary": "shift", "heads": 1},
    "wide": {"tokens": 150, "kernel_size": 41, "heads": 1},
    "dilated, grouped, even": {"tokens": 150, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "moved, dilated": {"tokens": 151, "kernel_size": 40, "dilation": 2, "boundary": "shift", "dim": 32},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 64},
    "widest features": {"tokens": 50, "kernel_size": 9, "boundary": "shift", "dim": 256},
    "fewer tokens than keys": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 64},
    "fewer tokens than keys, truncated, features padded": {"tokens": 5, "kernel_size": 64, "dim": 123},
    "fewer tokens than keys, causal": {"tokens": 5, "kernel_size": 23, "causal": True, "dilation": 2},
    "as many tokens as keys": {"tokens": 12, "kernel_size": 6, "boundary": "shift", "dilation": 2},
    "some classes shorter than the window": {"tokens": 17, "kernel_size": 6, "boundary": "shift", "dilation": 3},
    "a dilation beyond int32, a scale": {"tokens": 5, "kernel_size": 5, "dilation": 1 << 40, "softmax_scale": 0.7},
    "logits about a hundred": {"tokens": 21, "logits": 30.0},
    "features with strides": {"tokens": 20, "layout": "strided"},
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
    assert ("ds_kernel" if case == "2304 tokens" else "dense_ds_kernel") in names(launches)


@pytest.mark.ascend
def test_without_gradients_batches_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(20, batch=3, dtype=torch.float32)
    with executing():
        whole, _ = neighborhood_attention_forward(q, k, v, backend="ascend")
    monkeypatch.setattr(tiling, "CHUNK_BYTES", 2 * 4 * 4 * 20 * 7)
    with executing() as launches:
        chunked = neighborhood_attention(q, k, v, algorithm="band", backend="ascend")
    assert torch.equal(whole, chunked)
    assert names(launches) == ["scores_kernel", "rows_kernel"] * 2
    assert [one.arguments["p_band"].shape[0] for one in launches] == [2, 2, 1, 1]


@pytest.mark.ascend
def test_slots_of_other_rows_are_not_summed() -> None:
    """A band is read as a matrix, whose rows hold what belongs to neighboring ones: NaN there must not arrive."""
    q, k, v = make_qkv(40, 1, 1, dtype=torch.float32)
    options = {**backward_cases.WINDOW, "kernel_size": 5, "backend": "ascend"}
    do = torch.ones_like(q)
    do[:, 20] = torch.nan
    with executing():
        _, band = band_attention.forward(q, k, v, **options)
        dq, _, _ = band_attention.backward(do, q, k, v, band, **options)
    assert dq.isnan().any(-1).flatten().nonzero().flatten().tolist() == [20]


# The backward from probabilities


PATHS = ["dense", "sparse"]
BACKWARD: dict[str, dict[str, Any]] = {
    "a band": {"tokens": 150, "dim": 64, "kernel_size": 16, "boundary": "shift"},
    "all pairs": {"tokens": 150, "dim": 128, "kernel_size": 9, "dense": True},
    "the longest": {"tokens": 2048, "dim": 64, "kernel_size": 63, "heads": 1, "dense": True},
    "dilated, grouped, even": {"tokens": 201, "kernel_size": 6, "dilation": 3, "heads": 4, "kv_heads": 2, "dim": 40},
    "causal": {"tokens": 200, "kernel_size": 33, "causal": True, "dim": 256},
    "fewer tokens than keys, features padded": {"tokens": 5, "kernel_size": 64, "boundary": "shift", "dim": 123},
    "fewer tokens than keys, causal": {"tokens": 5, "kernel_size": 63, "causal": True, "dilation": 2},
    "a dilation beyond int32, a scale": {"tokens": 5, "kernel_size": 8, "dilation": 1 << 40, "softmax_scale": 0.7},
    "all pairs in bf16": {"tokens": 40, "dense": True, "attn_dtype": torch.bfloat16},
    "a band in fp16": {"tokens": 40, "attn_dtype": torch.float16},
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
        assert [one.grid for one in launches] == ([(CORES,)] * 3 if persistent else [(48,), (48,), (48,)])
        proof.execute(launches)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.ascend
@pytest.mark.parametrize(("path", "per_chunk"), [("dense", 1), ("dense", 2), ("dense", 5), ("sparse", 1)])
def test_chunks_give_the_same_bits(path: str, per_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, window = backward_cases.make(16, batch=3, heads=6, kv_heads=3, kernel_size=5)
    call = partial(neighborhood_attention_backward, *inputs, **window, path=path, backend="ascend")
    whole = executed(call)
    per_key_head = 2 * 16 * (16 * 8 if path == "dense" else 5 * 4)
    monkeypatch.setattr(attention_backward, "workspace_limit", lambda memory: per_chunk * per_key_head + 1)
    with executing() as launches:
        parts = call()
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    chunks = {1: 9, 2: 6, 5: 3}[per_chunk]  # a chunk is key heads of one batch element, or whole batch elements
    assert names(launches).count("dense_ds_kernel" if path == "dense" else "ds_kernel") == chunks


@pytest.mark.ascend
def test_far_pairs_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that no window reaches may hold anything: they are skipped."""
    monkeypatch.setattr(tiling, "DENSE_TILES", tiling.Tiles(16, 16, 16))
    inputs, window = backward_cases.make(48, dense=True, kernel_size=5)
    call = partial(neighborhood_attention_backward, *inputs, **window, path="dense", backend="ascend")
    results = []
    for far in (0.0, torch.nan):
        inputs[-1][:, :, :16, 32:] = inputs[-1][:, :, 32:, :16] = far
        with proof.executing():
            results.append(call())
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
