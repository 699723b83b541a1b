"""The band's kernels in Triton's interpreter, on CPU tensors; test_band.py runs this file in a process of its
own, since TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ascend_kernels import device
from ascend_kernels.launch import Launch, recording
from ascend_kernels.neighborhood import band as band_attention
from ascend_kernels.neighborhood import tiling
from dispatch import neighborhood_attention
from nsa.neighborhood.api import neighborhood_attention_forward
from tests.support import cases, neighborhood_cases
from tests.support.band_cases import check
from tests.support.helpers import make_qkv
from tests.support.neighborhood_cases import WINDOWS


def run(function: Callable[[], Any]) -> Any:
    return function()


def names(launches: list[Launch]) -> list[str]:
    return [one.kernel.fn.__name__ for one in launches]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 rows on few cores: borders everywhere, several steps of each loop and over the work."""
    few = {name: replace(listed, cores=3) for name, listed in device.DEVICES.items()}
    monkeypatch.setattr(tiling, "band_tiles", lambda *_: tiling.Tiles(16, 32, 16))
    monkeypatch.setattr(device, "DEVICES", few)


@pytest.mark.parametrize(("window", "dtype"), cases.product(WINDOWS, [torch.float32, torch.float16]))
def test_short_lengths(window: str, dtype: torch.dtype) -> None:
    """N = 1, and one of 2 ... 50, for each window and dtype; kernel sizes 1 ... 8, dilations 1 ... 3."""
    draw = random.Random(f"{window} {dtype}")
    for tokens in (1, draw.randint(2, 50)):
        size, dilation = draw.randint(1, 8), draw.randint(1, 3)
        check(run, "ascend", tokens, heads=1, dtype=dtype, kernel_size=size, dilation=dilation, **WINDOWS[window])


BORDERS = [("truncate", 2), ("shift", 17), ("causal", 20)]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("window", "kernel_size"), cases.some(BORDERS, WINDOWS, [1, 2, 16, 17, 20, 40]))
def test_borders_of_tiles(window: str, kernel_size: int) -> None:
    check(run, "ascend", 33, heads=1, kernel_size=kernel_size, dim=20, **WINDOWS[window])


CASES: dict[str, dict[str, Any]] = {
    "features not a power of two": {"tokens": 40, "dim": 40, "kernel_size": 5},
    "features that are padded": {"tokens": 40, "dim": 17, "kernel_size": 5},
    "wide features": {"tokens": 37, "dim": 100, "kernel_size": 6, "dilation": 2, "boundary": "shift"},
    "widest features": {"tokens": 20, "dim": 256, "kernel_size": 4, "dtype": torch.float16, "heads": 1},
    "a batch of head-major groups": {"tokens": 33, "batch": 2, "heads": 4, "kv_heads": 2, "layout": "head-major"},
    "features with strides": {"tokens": 20, "layout": "strided"},
    "fewer tokens than keys": {"tokens": 5, "kernel_size": 64, "boundary": "shift"},
    "fewer tokens than keys, truncated": {"tokens": 5, "kernel_size": 64},
    "fewer tokens than keys, causal": {"tokens": 5, "kernel_size": 23, "causal": True, "dilation": 2},
    "as many tokens as keys": {"tokens": 12, "kernel_size": 6, "boundary": "shift", "dilation": 2},
    "some classes shorter than the window": {"tokens": 17, "kernel_size": 6, "boundary": "shift", "dilation": 3},
    "fewer tokens than the dilation": {"tokens": 5, "kernel_size": 3, "dilation": 1000},
    "a dilation beyond int32": {"tokens": 5, "kernel_size": 5, "dilation": 1 << 40},
    "a scale": {"tokens": 21, "kernel_size": 7, "softmax_scale": 0.7},
    "logits in the hundreds": {"tokens": 21, "kernel_size": 7, "logits": 100.0},
    "bf16": {"tokens": 70, "kernel_size": 9, "dtype": torch.bfloat16, "kv_heads": 2},
}
HERE = (
    "logits in the hundreds",
    "features with strides",
    "fewer tokens than keys, causal",
    "some classes shorter than the window",
    "a dilation beyond int32",
)
"""Interpreted in every run; `make test-ascend` executes others once lowered: padded features, heads first, bf16."""


@pytest.mark.parametrize("case", [*HERE, *cases.rest(*(case for case in CASES if case not in HERE))])
def test_options(case: str) -> None:
    check(run, "ascend", **CASES[case])


def test_tiles_of_the_gpu() -> None:
    check(run, "triton", 100, kernel_size=31, boundary="shift", heads=1)


def test_no_tokens() -> None:
    q, k, v = make_qkv(0, dtype=torch.float32, requires_grad=True)
    out = neighborhood_attention(q, k, v, algorithm="band", backend="ascend")
    out.sum().backward()
    assert out.shape == q.shape
    assert q.grad is not None
    options = {"dilation": 1, "boundary": "truncate", "causal": False, "backend": "ascend"}
    assert band_attention.expand_band(torch.zeros(1, 2, 0, 7), **options).shape == (1, 2, 0, 0)


def test_the_public_op() -> None:
    with recording(run=True) as launches:
        neighborhood_cases.check("ascend", 40, algorithm="band", kernel_size=6, dilation=2, boundary="shift")
    dense = ["expand_kernel", "dense_dv_kernel", "dense_ds_kernel", "dense_dqdk_kernel"]  # for so few tokens
    assert names(launches) == ["scores_kernel", "rows_kernel", *dense]


@pytest.mark.parametrize("algorithm", ["auto", *cases.rest("flash", "band", "dense")])
def test_the_public_band(algorithm: str) -> None:
    q, k, v = make_qkv(30, dtype=torch.float32)
    window = {"kernel_size": 5, "boundary": "shift"}
    out, band = neighborhood_attention_forward(q, k, v, algorithm=algorithm, backend="ascend", **window)
    expected = neighborhood_attention_forward(q, k, v, backend="reference", **window)
    torch.testing.assert_close((out, band), expected)


def test_without_gradients_batches_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(20, batch=3, dtype=torch.float32)
    whole, _ = neighborhood_attention_forward(q, k, v, backend="ascend")
    monkeypatch.setattr(tiling, "CHUNK_BYTES", 2 * 4 * 4 * 20 * 7)
    with recording(run=True) as launches:
        chunked = neighborhood_attention(q, k, v, algorithm="band", backend="ascend")
    assert torch.equal(whole, chunked)
    assert names(launches) == ["scores_kernel", "rows_kernel"] * 2
    assert [one.arguments["p_band"].shape[0] for one in launches] == [2, 2, 1, 1]


def test_slots_of_other_rows_are_not_summed() -> None:
    """A band is read as a matrix, whose rows hold what belongs to neighboring ones: NaN there must not arrive."""
    q, k, v = make_qkv(40, 1, 1, dtype=torch.float32)
    options = {"kernel_size": 5, "dilation": 1, "softmax_scale": None, "boundary": "truncate", "causal": False}
    _, band = band_attention.forward(q, k, v, **options, backend="ascend")
    do = torch.ones_like(q)
    do[:, 20] = torch.nan
    dq, _, _ = band_attention.backward(do, q, k, v, band, **options, backend="ascend")
    assert dq.isnan().any(-1).flatten().nonzero().flatten().tolist() == [20]
