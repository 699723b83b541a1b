"""Every op as an operator: PyTorch's rules, and torch.compile, which records it whole and once for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ascend_kernels.launch import recording
from nsa import (
    NSAConfig,
    attention_residual,
    block_sparse_attention,
    neighborhood_attention,
    nsa,
    nsa_forward,
    operators,
    top_blocks_by_max,
)
from tests.support.helpers import SMALL, make_qkv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile

INTS = torch.int32
Arguments = tuple[Any, ...]


def qkv(tokens: int, **options: Any) -> Arguments:
    return make_qkv(tokens, requires_grad=True, **options)


def continued(tokens: int, batch: int = 1) -> Arguments:
    """A quarter of the tokens as queries, which begin behind a quarter, at a tile of 16."""
    start = tokens // 4 // 16 * 16
    q, k, v = make_qkv(tokens, batch=batch)
    return *(x.requires_grad_() for x in (q[:, start : start + tokens // 4].clone(), k, v)), start


def blocks_of(tokens: int) -> Arguments:
    """More keys than queries, and for each query the first block and its own."""
    q, k, v = make_qkv(tokens + 10)
    own = (torch.arange(tokens, dtype=INTS) + 10) // 16
    blocks = torch.stack([torch.where(own > 0, 0, -1), own], -1).expand(1, 2, -1, -1)
    return *(x.requires_grad_() for x in (q[:, 10:].clone(), k, v)), blocks


def stacked(tokens: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Arguments:
    """Three blocks, and both weights."""
    shapes = (3, 2, tokens, 20), (20,), (20,)
    return tuple(torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)


def of_list(x: Tensor, w_query: Tensor, w_norm: Tensor, **options: Any) -> Tensor:
    return attention_residual([x[0] * 2, x[1], x[2]], w_query, None, **options) * w_norm


COMPILED: dict[str, tuple[Callable[..., Tensor], Callable[[int], Arguments]]] = {
    "nsa_forward": (lambda q, k, v: nsa_forward(q, k, v, config=SMALL["paper"]) * q, qkv),
    **{f"nsa, {name}": (partial(nsa, config=config), qkv) for name, config in SMALL.items()},
    "nsa, its config made inside": (lambda q, k, v: nsa(q, k, v, config=NSAConfig.paper(window_size=5)), qkv),
    "nsa, continued": (lambda q, k, v, start: nsa(q, k, v, q_start=start, config=SMALL["paper"]), continued),
    "neighborhood": (neighborhood_attention, qkv),
    "neighborhood, moved": (
        partial(neighborhood_attention, kernel_size=4, dilation=3, boundary="shift", softmax_scale=0.3),
        qkv,
    ),
    "neighborhood, continued": (
        lambda q, k, v, start: neighborhood_attention(q, k, v, kernel_size=9, causal=True, q_start=start),
        continued,
    ),
    "blocks": (partial(block_sparse_attention, block_size=16), blocks_of),
    "blocks, from a start": (partial(block_sparse_attention, block_size=16, q_start=3), blocks_of),
    "residual": (attention_residual, stacked),
    "residual of a list": (of_list, stacked),
}
ON_GPUS: dict[str, dict[str, Any]] = {
    "triton": {"backend": "triton", "dilation": 3},
    "band": {"backend": "triton", "algorithm": "band", "kernel_size": 4},
    "cute": {"backend": "cute", "kernel_size": 33, "dilation": 2},
}
GPU: dict[str, Any] = {
    name: (partial(neighborhood_attention, **options), partial(qkv, dim=64, dtype=torch.bfloat16, device="cuda"))
    for name, options in ON_GPUS.items()
} | {
    f"residual, {function.__name__}": (
        partial(function, backend="triton"),
        partial(stacked, dtype=torch.bfloat16, device="cuda"),
    )
    for function in (attention_residual, of_list)
}


def check_compiled(function: Callable[..., Tensor], make: Callable[[int], Arguments]) -> None:
    """Results and gradients of the eager call, without compiling again for another length."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    once = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for tokens in (80, 96, 64, 200):
        arguments = make(tokens)
        leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
        got, expected = (function(*arguments) for function in (once, function))
        do = torch.randn_like(got)
        results = [(out, *torch.autograd.grad(out, leaves, do, allow_unused=True)) for out in (got, expected)]
        torch.testing.assert_close(*results)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 4  # a float among the options may take Dynamo two attempts at the first


@pytest.mark.parametrize("case", COMPILED)
def test_compiles_whole_and_once_for_all_lengths(case: str) -> None:
    check_compiled(*COMPILED[case])


def test_residual_of_triton_compiles_once_for_all_lengths() -> None:
    """Its launches are only recorded, so that this runs without a GPU: results have no values."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    once = torch.compile(partial(of_list, backend="triton"), fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    with recording(run=False) as launches:
        for tokens in (80, 96, 64):
            once(*stacked(tokens, torch.float32)).sum().backward()
            graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3
    assert len(launches) > 0


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")  # FlashAttention-4 warns while it compiles
@pytest.mark.parametrize("case", GPU)
def test_compiles_on_a_gpu(case: str) -> None:
    check_compiled(*GPU[case])


# PyTorch's rules


def of_nsa(*tensors: Tensor, **extra: Any) -> tuple[Arguments, dict[str, Any]]:
    return tuple(operators.operator_tensors(*tensors, extra)), operators.operator_keywords({"config": SMALL["seed"]})


def opchecked() -> dict[str, tuple[str, Arguments, dict[str, Any]]]:
    """By case: the operator's name, its arguments and keywords."""
    bounds, starts = torch.tensor([0, 30, 75], dtype=INTS), torch.tensor([16, 32], dtype=INTS)
    pack = {"cu_seqlens": torch.tensor([0, 20, 35], dtype=INTS), "cu_seqlens_k": torch.tensor([0, 36, 67], dtype=INTS)}
    q, k, v = make_qkv(75, batch=2)
    pq, pk, pv = make_qkv(75, batch=None)
    blocks, w = torch.randn(3, 2, 6, 5).double().transpose(2, 3), torch.randn(6).double()
    plain = {
        "plain": of_nsa(q, k, v),
        "gates": of_nsa(q, k, v, gates=torch.rand(2, 75, 4, 3).double()),
        "weight": of_nsa(q, k, v, gate_proj_weight=torch.randn(4, 3, 16).double()),
        "packed": of_nsa(pq, pk, pv, cu_seqlens=bounds),
        "starts": of_nsa(q[:, 32:], k, v, q_start=starts, q_sum=torch.randn(2, 4, 16).double()),
        "packed, continued": of_nsa(pq[:35], pk, pv, **pack),
    }
    index = torch.zeros(2, 2, 75, 1, dtype=INTS)
    return {
        **{f"{operator}, {case}": (operator, *x) for operator in ("forward", "saving") for case, x in plain.items()},
        "neighborhood": ("neighborhood_attention", (q, k, v, 5, 2, None, "shift", False, "auto", None, True), {}),
        "blocks": (
            "block_sparse_attention",
            (q, k, v, index, None, None, None, 16, True, None, False, None, True),
            {},
        ),
        "top blocks": ("top_blocks_by_max", (q[:, :, :2], k[:, :, :1], None, None, None, 16, 2, 1, None), {}),
        "residual": ("attention_residual", ([blocks], w, None, True, 1e-5, None, True), {}),
        "residual of a list": ("attention_residual", ([*blocks], w, w + 1, False, 1e-5, None, True), {}),
    }


def leaf(x: Tensor | None) -> Tensor | None:
    """In the same layout."""
    return None if x is None else x.detach().clone().requires_grad_()


@pytest.mark.parametrize("case", opchecked())
def test_operators_keep_pytorchs_rules(case: str) -> None:
    name, arguments, keywords = opchecked()[case]
    if name not in ("forward", "top_blocks_by_max"):
        first, *others = arguments
        first = [leaf(x) for x in first] if isinstance(first, list) else leaf(first)
        arguments = first, *map(leaf, others[:2]), *others[2:]
    torch.library.opcheck(getattr(torch.ops.nsa_kernels, name).default, arguments, keywords)


def test_top_blocks_compile() -> None:
    q_idx, k_idx = (torch.randint(-2, 3, (1, 40, heads, 4)).double() for heads in (2, 1))
    torch._dynamo.reset()
    compiled = torch.compile(top_blocks_by_max, fullgraph=True, backend="aot_eager")
    for start in (None, 3):
        options: dict[str, Any] = {"block_size": 16, "k": 2, "q_start": start}
        assert torch.equal(
            compiled(q_idx[:, :20], k_idx, **options), top_blocks_by_max(q_idx[:, :20], k_idx, **options)
        )
