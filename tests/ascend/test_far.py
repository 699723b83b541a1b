"""Neighborhood attention past 2^31 elements on a GPU: inputs, results, probabilities; runs of rows against fp64."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_kernels import launch
from ascend_kernels.neighborhood import band, dense_backward
from tests.support.far_rows import FAR, span
from tests.support.hardware import marked
from tests.support.neighborhood_cases import assert_right, check, results

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

KERNELS = {
    "triton, flash": ("triton", "flash"),
    "triton, band": ("triton", "band"),
    "triton, dense": ("triton", "dense"),
    "cute": ("cute", "flash"),
}
HEADS, DIM = 8, 128
TOKENS = FAR // (HEADS * DIM) + 5003
"""Of one sequence: the last 5003 tokens lie behind 2^31 elements."""
RUN = 300
"""Rows that are checked together."""


@pytest.fixture(autouse=True)
def _no_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # tens of GB


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By parameter of kernels that take probabilities: the last element of its memory that a launch could reach."""
    last: dict[str, int] = defaultdict(int)

    def noting(kernel: Any, grid: Any, arguments: dict[str, Any], *others: Any, **options: Any) -> Any:
        for name, x in arguments.items():
            if isinstance(x, Tensor):
                last[name] = max(last[name], x.storage_offset() + span(x))
        return launch.launch(kernel, grid, arguments, *others, **options)

    monkeypatch.setattr(band, "launch", noting)
    monkeypatch.setattr(dense_backward, "launch", noting)
    return last


@pytest.mark.parametrize("far", [0, 1, 2], ids=["sequences", "tokens", "heads"])
@pytest.mark.parametrize("window", [{"kernel_size": 9, "dilation": 2}, {"kernel_size": 130, "causal": True}], ids=str)
@pytest.mark.parametrize("name", marked(KERNELS))
def test_strides(name: str, window: dict[str, Any], far: int) -> None:
    """Inputs and do are views that span as many elements; in 5 GB."""
    backend, algorithm = KERNELS[name]
    sizes: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "dim": 64, "dtype": torch.bfloat16}
    check(backend, 401, **sizes, **window, algorithm=algorithm, far=far, device="cuda")


def normal(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("triton, flash", {"kernel_size": 7, "dilation": 3, "boundary": "shift"}),
        ("triton, flash", {"kernel_size": 64}),
        ("triton, flash", {"kernel_size": 200, "causal": True}),
        ("triton, band", {"kernel_size": 129, "boundary": "shift"}),
        pytest.param("cute", {"kernel_size": 129}, marks=pytest.mark.cuda_extra),
        pytest.param("cute", {"kernel_size": 64, "dilation": 3, "causal": True}, marks=pytest.mark.cuda_extra),
    ],
    ids=str,
)
def test_elements(name: str, window: dict[str, Any], reached: dict[str, int]) -> None:
    """q, k, v, out, do and all gradients; with "band" the probabilities, too. In 60 GB."""
    backend, algorithm = KERNELS[name]
    q, k, v, do = (normal(1, TOKENS, HEADS, DIM) for _ in range(4))
    assert q.numel() > FAR
    got = results(backend, (q, k, v), do, algorithm, **window)
    if algorithm == "band":
        assert min(reached["p_band"], reached["p_ds"]) > FAR
    border = FAR // (HEADS * DIM)
    for start in (0, border - RUN // 2, TOKENS - RUN):
        check_run(got, (q, k, v), do, window, start, start + RUN)


def check_run(
    got: tuple[Tensor, ...], inputs: tuple[Tensor, ...], do: Tensor, window: dict[str, Any], start: int, stop: int
) -> None:
    """Rows against a short sequence that holds whatever they depend on, cut between two rounds of classes.

    A row's keys are at most a window away, moved or not, and a key's gradient comes from such rows: two windows.
    """
    dilation = window.get("dilation", 1)
    margin = 2 * window["kernel_size"] * dilation
    first, last = max(0, start - margin) // dilation * dilation, stop + margin
    near = [x[:, first:last] for x in (*got, *inputs, do)]
    outputs, qkv = tuple(near[: len(got)]), tuple(near[len(got) : -1])
    assert_right(outputs, qkv, near[-1], rows=slice(start - first, stop - first), **window)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "dim", "many"),
    [(65, 64, ("p_attn", "p_ds", "p_dense")), (FAR // (2048 * HEADS * DIM) + 3, DIM, ("p_q", "p_do", "p_v"))],
    ids=["matrices", "inputs"],
)
def test_dense_backward(batch: int, dim: int, many: tuple[str, ...], reached: dict[str, int]) -> None:
    """Probabilities of all pairs for N = 2048, or inputs, which go through in chunks. In 60 GB."""
    window: dict[str, Any] = {"kernel_size": 9, "dilation": 2, "boundary": "shift"}
    q, k, v, do = (normal(batch, 2048, HEADS, dim) for _ in range(4))
    got = results("triton", (q, k, v), do, "dense", **window)
    assert min(reached[name] for name in many) > FAR
    for i in (0, batch - 1):
        here = slice(i, i + 1)
        assert_right(tuple(x[here] for x in got), (q[here], k[here], v[here]), do[here], **window)
