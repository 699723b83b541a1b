"""Attention residual in Triton's interpreter, on CPU tensors; test_attention_residual.py runs this file in a process of
its own, since TRITON_INTERPRET must be set before triton is imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from ascend_kernels import device
from ascend_kernels.launch import recording
from ascend_kernels.residual import reference, tiling
from dispatch import attention_residual
from tests.support import cases
from tests.support.residual_cases import EPS, LARGE_SCORES, check, make, through_the_public_op

BACKENDS = ("ascend", "triton")
weights_plan = tiling.weights_plan


@pytest.fixture(autouse=True)
def _few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that programs stride over several tokens."""
    one = {name: replace(listed, cores=1) for name, listed in device.DEVICES.items()}
    monkeypatch.setattr(device, "DEVICES", one)
    monkeypatch.setattr(device, "GPU_CORES", 1)


@pytest.mark.parametrize(
    ("backend", "blocks", "dtype"),
    cases.some(
        [("ascend", 1, torch.float32), ("triton", 3, torch.float16), ("ascend", 33, torch.float16)],
        BACKENDS,
        [1, 3, 8, 33, 64],
        [torch.float32, torch.float16],
    ),
)
def test_blocks(backend: str, blocks: int, dtype: torch.dtype) -> None:
    check(backend, 2, 20, blocks, through_the_public_op, dtype=dtype)


@pytest.mark.parametrize(
    ("backend", "case"),
    cases.some(
        [("triton", "equal blocks"), ("ascend", "similar blocks, read twice"), ("triton", "equal blocks, tiled")],
        BACKENDS,
        LARGE_SCORES,
    ),
)
def test_large_scores(backend: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "weights_plan", wide_weights)
    check(backend, 2, run=through_the_public_op, **LARGE_SCORES[case])


FEATURES = [("ascend", 15), ("triton", 123), ("ascend", 1025)]


@pytest.mark.parametrize(("backend", "dim"), cases.some(FEATURES, BACKENDS, [1, 15, 16, 17, 123, 1025, 4096]))
def test_features(backend: str, dim: int) -> None:
    check(backend, 3, dim, 3, through_the_public_op, batch=2)


@pytest.mark.parametrize(
    ("backend", "blocks", "layout"),
    cases.product(BACKENDS, [5, 16, 17], ["list", "slices", "token-major", "strided"]),
)
def test_layouts(backend: str, blocks: int, layout: str) -> None:
    check(backend, 2, 48 if blocks % 2 else 43, blocks, through_the_public_op, layout=layout, batch=2)


CASES: dict[str, dict[str, Any]] = {
    "bf16": {"dim": 40, "blocks": 5, "dtype": torch.bfloat16},
    "no norm": {"dim": 40, "blocks": 4, "norm": False},
    "weights in fp32": {"dim": 40, "blocks": 4, "dtype": torch.float16, "weight_dtype": torch.float32},
    "several tiles": {"dim": 9000, "blocks": 3},
    "several tiles of a list": {"dim": 9000, "blocks": 3, "layout": "list", "dtype": torch.float16},
    "several tiles by a table": {"dim": 8208, "blocks": 17, "layout": "list", "norm": False},
}


OPTIONS = [
    ("ascend", "bf16"),
    ("triton", "no norm"),
    ("ascend", "weights in fp32"),
    ("triton", "several tiles of a list"),
]


@pytest.mark.parametrize(("backend", "case"), cases.some(OPTIONS, BACKENDS, CASES))
def test_options(backend: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if CASES[case]["dim"] > tiling.GPU_MAX_ROW:
        monkeypatch.setattr(tiling, "weights_plan", wide_weights)
    check(backend, 2, run=through_the_public_op, **CASES[case])


def wide_weights(dim: int, npu: device.Device | None) -> tuple[int, tiling.Plan]:
    """In place of `weights_plan`, whose programs for a GPU sum 8 features each: a thousand of them take seconds."""
    block_p, plan = weights_plan(dim, npu)
    return block_p, plan if npu else replace(plan, block_d=512, programs=-(-dim // 512))


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_low_precision_overflows(backend: str) -> None:
    """A row of one small number: rstd^3 is past fp16 from rstd = 40 on."""
    case = make(10, 1, 1, dtype=torch.float16)
    rstd = reference.attention_residual(case.blocks, case.w_query, case.w_norm, eps=EPS)[2]
    assert rstd.max() ** 3 > torch.finfo(torch.float16).max
    check(backend, 10, 1, 1, through_the_public_op, dtype=torch.float16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN
def test_tokens_do_not_meet() -> None:
    """NaN in one token's blocks, and an infinite gradient of another, stay with these tokens."""
    case = make(6, 20, 3)
    blocks, do = case.blocks.detach().clone(), case.do.clone()  # type: ignore[union-attr]
    blocks[1, 0, 2] = torch.nan
    do[0, 4] = torch.inf
    blocks.requires_grad_()
    for backend in BACKENDS:
        out = attention_residual(blocks, case.w_query, case.w_norm, EPS, backend=backend)
        assert out.isnan().any(-1).flatten().nonzero().flatten().tolist() == [2]
        (gradient,) = torch.autograd.grad(out, blocks, do)
        assert (~gradient.isfinite()).any(-1).any(0).flatten().nonzero().flatten().tolist() == [2, 4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: str) -> None:
    case = make(0, 8, 3)
    out, *gradients = through_the_public_op(case, backend)
    assert out.shape == (1, 0, 8)
    assert all(gradient.abs().sum() == 0 for gradient in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_repeat_and_launches_are_few(backend: str) -> None:
    case = make(4, 40, 5)
    runs = []
    for _ in range(2):
        with recording(run=True) as launches:
            runs.append(through_the_public_op(case, backend))
        assert [one.kernel.fn.__name__ for one in launches] == ["forward_kernel", "backward_kernel", "weights_kernel"]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


class Traffic:
    """Bytes that kernels load from, and store to, the memory of tensors by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loads: list[tuple[Any, Any]] = []
        self.stores: list[tuple[Any, Any]] = []
        builder = InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store

        def counted_load(builder: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            self.loads.append((ptrs.data, mask.data))
            return load(builder, ptrs, mask, *rest)

        def counted_store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.stores.append((ptrs.data, mask.data))
            return store(builder, ptrs, value, mask, *rest)

        monkeypatch.setattr(builder, "create_masked_load", counted_load)
        monkeypatch.setattr(builder, "create_masked_store", counted_store)

    @staticmethod
    def of(tensor: torch.Tensor, accesses: list[tuple[Any, Any]]) -> float:
        """Times that the elements of a tensor are accessed, on average."""
        start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return sum(int((mask & (ptrs >= start) & (ptrs < end)).sum()) for ptrs, mask in accesses) / tensor.numel()


@pytest.mark.parametrize(
    ("backend", "dim", "blocks", "readings"),
    [
        ("ascend", 32, 5, (1, 1, 1)),  # a token is one tile
        ("ascend", 32, 9, (1, 2, 1)),
        ("ascend", 2064, 3, (2, 2, 2)),
        *cases.rest(
            ("triton", 8192, 5, (1, 2, 1)),  # the second time from the L2
            ("ascend", 1040, 5, (1, 2, 1)),
            ("triton", 4096, 5, (1, 1, 1)),
        ),
    ],
)
def test_traffic(
    backend: str, dim: int, blocks: int, readings: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """V is read, forward and backward, and do, as often as residual/tiling.py says; results are written once."""
    case = make(5, dim, blocks)
    traffic = Traffic(monkeypatch)
    out = attention_residual(case.blocks, case.w_query, case.w_norm, EPS, backend=backend)
    assert isinstance(case.blocks, torch.Tensor)
    forward, backward, of_do = readings
    assert traffic.of(case.blocks, traffic.loads) == forward
    assert traffic.of(out, traffic.stores) == 1
    traffic.loads.clear()
    dblocks, *_ = torch.autograd.grad(out, case.leaves, case.do)
    assert traffic.of(case.blocks, traffic.loads) == backward
    assert traffic.of(case.do, traffic.loads) == of_do
    assert traffic.of(dblocks, traffic.stores) == 1


def test_second_derivatives_are_refused() -> None:
    case = make(3, 8, 2)
    out = attention_residual(case.blocks, case.w_query, case.w_norm, backend="triton")
    (first,) = torch.autograd.grad(out.sum(), case.w_query, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_residual has no second derivative"):
        first.square().sum().backward()
