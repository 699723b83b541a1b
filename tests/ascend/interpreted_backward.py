"""The backward from probabilities in Triton's interpreter, on CPU tensors; test_backward.py runs this file in a
process of its own, since TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ascend_kernels import device
from ascend_kernels.launch import recording
from ascend_kernels.neighborhood import backward as attention_backward
from ascend_kernels.neighborhood import dense_backward, tiling
from dispatch import neighborhood_attention_backward
from tests.support import backward_cases, cases
from tests.support.backward_cases import check
from tests.support.neighborhood_cases import WINDOWS

SMALL = tiling.Tiles(16, 16, 16)
OWN_TILES = tiling.DENSE_TILES


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16: borders everywhere, and several steps of every loop."""
    monkeypatch.setattr(tiling, "DENSE_TILES", SMALL)


@pytest.mark.parametrize(("window", "dtype"), cases.product(WINDOWS, [torch.float32, torch.float16]))
def test_short_lengths(window: str, dtype: torch.dtype) -> None:
    """Lengths within one tile and beyond several; kernel sizes 1 ... 8, dilations 1 ... 3."""
    for tokens in range(1 if dtype == torch.float32 else 2, 51, 12):
        check(
            "ascend",
            tokens,
            path="dense",
            heads=1 + (tokens % 5 == 0),
            dtype=dtype,
            kernel_size=1 + tokens // 2 % 8,
            dilation=1 + tokens % 3,
            **WINDOWS[window],
        )


BORDERS = [("truncate", 2), ("shift", 17), ("causal", 40)]


@pytest.mark.parametrize(("window", "kernel_size"), cases.some(BORDERS, WINDOWS, [1, 2, 17, 18, 33, 40]))
def test_borders_of_tiles(window: str, kernel_size: int) -> None:
    check("ascend", 49, path="dense", heads=1, kernel_size=kernel_size, **WINDOWS[window])


CASES: dict[str, dict[str, Any]] = {
    "features not a multiple of a tile": {"tokens": 21, "dim": 40, "kernel_size": 5},
    "features that are padded": {"tokens": 40, "dim": 123, "kernel_size": 5},
    "wide features": {"tokens": 21, "dim": 64, "kernel_size": 6, "dilation": 2, "boundary": "shift", "heads": 4},
    "a batch of head-major groups": {"tokens": 33, "batch": 2, "heads": 4, "kv_heads": 2, "head_major": True},
    "fewer tokens than keys": {"tokens": 5, "kernel_size": 64, "boundary": "shift"},
    "fewer tokens than keys, causal": {"tokens": 5, "kernel_size": 63, "causal": True, "dilation": 2},
    "a dilation beyond int32": {"tokens": 5, "kernel_size": 1 << 3, "dilation": 1 << 40},
    "a scale": {"tokens": 21, "softmax_scale": 0.7},
    "bf16": {"tokens": 50, "kernel_size": 9, "dtype": torch.bfloat16, "kv_heads": 2},
    "all pairs": {"tokens": 40, "dense": True},
    "all pairs in bf16": {"tokens": 40, "dense": True, "attn_dtype": torch.bfloat16, "dtype": torch.float16},
    "a band in fp16": {"tokens": 40, "attn_dtype": torch.float16},
}


@pytest.mark.parametrize(("path", "case"), cases.product(["dense", "sparse"], CASES))
def test_options(path: str, case: str) -> None:
    check("ascend", path=path, **CASES[case])


@pytest.mark.parametrize(("backend", "dtype"), cases.product(["ascend", "triton"], [torch.float32, torch.float16]))
def test_own_tiles(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "DENSE_TILES", OWN_TILES)
    check(backend, 130, path="dense", dim=80, dtype=dtype, kernel_size=31, boundary="shift")


@pytest.mark.parametrize("dtype", [torch.float16, *cases.rest(torch.float32)], ids=["fp16", "fp32"])
def test_plain_and_persistent_give_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: replace(listed, cores=3) for name, listed in device.DEVICES.items()}
    monkeypatch.setattr(device, "DEVICES", few)
    inputs, window = backward_cases.make(24, dim=24, heads=4, kv_heads=2, dtype=dtype, dense=True)
    results, grids = [], []
    for persistent in (False, True):
        with recording(run=True) as launches:
            results.append(dense_backward.backward(*inputs, **window, backend="ascend", persistent=persistent))
        grids.append([one.grid[0] for one in launches])
    assert grids == [[8, 8, 8], [3, 3, 3]]  # 2 tiles of rows, 2 of features, 2 key heads; 4 heads for ds
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("path", "per_chunk"),
    cases.some([("dense", 2), ("sparse", 1)], ["dense", "sparse"], [1, 2, 5]),
)
def test_chunks_give_the_same_bits(path: str, per_chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, window = backward_cases.make(16, batch=3, heads=6, kv_heads=3, kernel_size=5)
    whole = neighborhood_attention_backward(*inputs, **window, path=path, backend="ascend")
    per_key_head = 2 * 16 * (16 * 8 if path == "dense" else 5 * 4)
    monkeypatch.setattr(attention_backward, "workspace_limit", lambda memory: per_chunk * per_key_head + 1)
    with recording(run=True) as launches:
        parts = neighborhood_attention_backward(*inputs, **window, path=path, backend="ascend")
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    if path == "dense":
        chunks = {1: 9, 2: 6, 5: 3}[per_chunk]  # a chunk is key heads of one batch element, or whole batch elements
        assert sum(one.kernel.fn.__name__ == "dense_ds_kernel" for one in launches) == chunks


def test_far_pairs_are_not_read() -> None:
    """Tiles that no window reaches may hold anything: they are skipped."""
    inputs, window = backward_cases.make(48, dense=True, kernel_size=5)
    before = neighborhood_attention_backward(*inputs, **window, path="dense", backend="ascend")
    inputs[-1][:, :, :16, 32:] = float("nan")
    inputs[-1][:, :, 32:, :16] = float("nan")
    after = neighborhood_attention_backward(*inputs, **window, path="dense", backend="ascend")
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_no_tokens() -> None:
    inputs, window = backward_cases.make(0)
    gradients = neighborhood_attention_backward(*inputs, **window, path="dense", backend="ascend")
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in inputs[1:4]]
