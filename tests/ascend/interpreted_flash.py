"""Neighborhood attention's kernels in Triton's interpreter, on CPU tensors; test_neighborhood_attention.py runs this
file in a process of its own, since TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from ascend_kernels import device
from ascend_kernels.launch import recording
from ascend_kernels.neighborhood import tiling
from dispatch import neighborhood_attention
from tests.support import cases
from tests.support.helpers import make_qkv
from tests.support.neighborhood_cases import LARGE_LOGITS, WINDOWS, check


@pytest.mark.parametrize(("window", "dtype"), cases.product(WINDOWS, [torch.float32, torch.float16]))
def test_short_lengths(window: str, dtype: torch.dtype) -> None:
    """A sample of N = 1 ... 70 for each window and dtype; tests/ascend executes every one of them, once lowered."""
    draw = random.Random(f"{window} {dtype}")
    for tokens in (1, *draw.sample(range(2, 71), 2)):
        size, dilation, heads = draw.randint(1, 8), draw.randint(1, 3), draw.randint(1, 2)
        check("ascend", tokens, heads=heads, dtype=dtype, kernel_size=size, dilation=dilation, **WINDOWS[window])


BORDERS = zip(WINDOWS, itertools.cycle([2, 17, 40]), strict=False)


@pytest.mark.parametrize(("window", "kernel_size"), cases.some(BORDERS, WINDOWS, [1, 2, 17, 18, 33, 40]))
def test_borders_of_tiles(window: str, kernel_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16 rows on few cores: borders everywhere, several steps of the inner loop and over the work."""
    few = {name: replace(listed, cores=3) for name, listed in device.DEVICES.items()}
    monkeypatch.setattr(tiling, "ascend_tiles", lambda *a: tiling.Tiles(16, 16, tiling.block_d_for(a[2])))
    monkeypatch.setattr(device, "DEVICES", few)
    check("ascend", 49, heads=1, kernel_size=kernel_size, **WINDOWS[window])


@pytest.fixture
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dots sum products one after the other, as devices do: a b^T is then b a^T in every bit, as kernels rely on."""

    def dot(_: InterpreterBuilder, a: Any, b: Any, total: Any, *__: Any) -> TensorHandle:
        data = total.data.copy()
        for i in range(a.data.shape[1]):
            data += a.data[:, i, None] * b.data[None, i, :]
        return TensorHandle(data, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


@pytest.mark.usefixtures("dots_in_order")
@pytest.mark.parametrize(
    ("backend", "case"),
    cases.some([("ascend", "in the hundreds"), ("triton", "of groups")], ["ascend", "triton"], LARGE_LOGITS),
)
def test_large_logits(backend: str, case: str) -> None:
    check(backend, 40, algorithm="flash", **LARGE_LOGITS[case])


CASES: dict[str, dict[str, Any]] = {
    "features not a power of two": {"tokens": 40, "dim": 40, "kernel_size": 5},
    "features that are padded": {"tokens": 40, "dim": 123, "kernel_size": 5, "softmax_scale": 0.2},
    "one feature": {"tokens": 20, "dim": 1, "dtype": torch.float16},
    "wide features": {"tokens": 37, "dim": 64, "kernel_size": 6, "dilation": 2, "boundary": "shift", "heads": 4},
    "widest features": {"tokens": 20, "dim": 256, "kernel_size": 4, "dtype": torch.float16},
    "a batch of head-major groups": {"tokens": 33, "batch": 2, "heads": 4, "kv_heads": 2, "head_major": True},
    "fewer tokens than keys": {"tokens": 5, "kernel_size": 64, "boundary": "shift"},
    "fewer tokens than keys, causal": {"tokens": 5, "kernel_size": 63, "causal": True, "dilation": 2},
    "fewer tokens than the dilation": {"tokens": 5, "kernel_size": 3, "dilation": 1000},
    "a dilation beyond int32": {"tokens": 5, "kernel_size": 1 << 12, "dilation": 1 << 40},
    "a scale": {"tokens": 21, "kernel_size": 7, "softmax_scale": 0.7},
    "bf16": {"tokens": 70, "kernel_size": 9, "dtype": torch.bfloat16, "kv_heads": 2},
}
HERE = (
    "features that are padded",
    "a batch of head-major groups",
    "fewer tokens than keys, causal",
    "bf16",
)
"""Of which `make test` has no more."""


@pytest.mark.parametrize("case", [*HERE, *cases.rest(*(case for case in CASES if case not in HERE))])
def test_options(case: str) -> None:
    check("ascend", **CASES[case])


GPU_TILES: dict[str, dict[str, Any]] = {
    "fp32": {"kernel_size": 31, "boundary": "shift"},
    "one pass": {"kernel_size": 9, "dtype": torch.float16, "kv_heads": 2},
    "one pass, moved": {"kernel_size": 9, "dtype": torch.float16, "kv_heads": 2, "boundary": "shift"},
    "one pass, grouped": {"kernel_size": 17, "dtype": torch.float16},
    "one pass, wide features": {"kernel_size": 16, "dtype": torch.float16, "kv_heads": 2, "dim": 128},
    "one pass of dkdv": {"kernel_size": 33, "dtype": torch.float16, "kv_heads": 2, "causal": True, "dim": 64},
    "several": {"kernel_size": 34, "dtype": torch.float16, "kv_heads": 2, "dilation": 2},
    "packed": {"kernel_size": 9, "dtype": torch.float16, "kv_heads": 2, "packed": True},
    "all at once": {"kernel_size": 200, "dtype": torch.float16, "kv_heads": 2},
}
GPU_HERE = ("one pass, moved", "one pass of dkdv", "several", "packed")


@pytest.mark.parametrize("case", [*GPU_HERE, *cases.rest(*(case for case in GPU_TILES if case not in GPU_HERE))])
def test_tiles_of_the_gpu(case: str) -> None:
    check("triton", 100, **GPU_TILES[case])


def test_no_tokens() -> None:
    q, k, v = make_qkv(0, dtype=torch.float32, requires_grad=True)
    out = neighborhood_attention(q, k, v, backend="ascend")
    out.sum().backward()
    assert out.shape == q.shape
    assert q.grad is not None


def test_results_repeat_and_launches_are_recorded() -> None:
    q, k, v = make_qkv(20, 2, 1, dtype=torch.float32, requires_grad=True)
    gradients = []
    for _ in range(2):
        with recording(run=True) as launches:
            out = neighborhood_attention(q, k, v, kernel_size=9, backend="ascend")
            gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
        assert [launch.kernel.fn.__name__ for launch in launches] == ["forward_kernel", "dq_kernel", "dkdv_kernel"]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("algorithm", ["flash", "band"])
def test_second_derivatives_are_refused(algorithm: str) -> None:
    """Also where `do` needs no gradient, or a penalty on gradients would count for nothing."""
    q, k, v = make_qkv(5, 1, 1, dtype=torch.float32, requires_grad=True)
    out = neighborhood_attention(q, k, v, algorithm=algorithm, backend="ascend")
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="neighborhood_attention has no second derivative"):
        first.square().sum().backward()


ALGORITHMS = ("flash", "band", "dense")


@pytest.mark.parametrize(("algorithm", "far"), cases.some(zip(ALGORITHMS, range(3), strict=True), ALGORITHMS, range(3)))
def test_offsets_beyond_int32(algorithm: str, far: int) -> None:
    """Args: `far`, the dimension with a large stride: sequences, tokens or heads."""
    sizes: dict[str, Any] = {"batch": 2, "heads": 2, "kv_heads": 2, "dtype": torch.float16}
    check("triton", 9, **sizes, kernel_size=5, dilation=2, boundary="shift", algorithm=algorithm, far=far)


@pytest.mark.parametrize("algorithm", ["band", "dense"])
def test_algorithms(algorithm: str) -> None:
    check("ascend", 21, heads=2, kv_heads=1, kernel_size=6, dilation=2, boundary="shift", algorithm=algorithm)
