"""Numbers that torch.compile makes symbols of, since they changed from call to call, are numbers to every check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from nsa import (
    NSAttention,
    attention_residual,
    block_sparse_attention,
    neighborhood_attention,
    nsa,
    top_blocks_by_max,
)
from tests.support.helpers import SMALL, make_qkv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile

TOKENS = 40
BLOCKS = torch.tensor([0, -1]).expand(1, 2, TOKENS, 2)
OPTIONS: Any = {name: value for name, value in vars(SMALL["paper"]).items() if name != "window_size"}


def bounds(first: int) -> Tensor:
    return torch.tensor([0, first, TOKENS], dtype=torch.int32)


@pytest.fixture(scope="module")
def layer() -> NSAttention:
    torch.manual_seed(0)
    return NSAttention(64, 4, 2, config=SMALL["paper"])


Call = Callable[[Tensor, Tensor, Tensor, int], Tensor]
CALLS: dict[str, tuple[Call, tuple[int, ...]]] = {
    "max_seqlen": (
        lambda q, k, v, n: nsa(q[0], k[0], v[0], cu_seqlens=bounds(n), max_seqlen=n, config=SMALL["paper"]),
        (21, 33),
    ),
    "window_size": (lambda q, k, v, n: nsa(q, k, v, window_size=n, **OPTIONS), (8, 9)),
    "softmax_scale": (lambda q, k, v, n: nsa(q, k, v, softmax_scale=n / 20), (8, 9)),
    "q_start": (lambda q, k, v, n: nsa(q[:, n : n + 9], k, v, q_start=n, config=SMALL["paper"]), (8, 9)),
    "block_size": (lambda q, k, v, n: block_sparse_attention(q, k, v, BLOCKS, block_size=n), (8, 9)),
    "block_size, k": (
        lambda q, k, v, n: top_blocks_by_max(q[:, :, :2].contiguous(), k[:, :, :1].contiguous(), block_size=n, k=n - 5),
        (8, 7),
    ),
    "kernel_size, dilation": (
        lambda q, k, v, n: neighborhood_attention(q, q, q, kernel_size=n, dilation=n - 3, softmax_scale=n / 9),
        (5, 7),
    ),
    "eps": (lambda q, k, v, n: attention_residual([q[0]], k[0, 0, 0], v[0, 0, 0], eps=n / 100), (1, 2)),
}


@pytest.mark.parametrize(("call", "values"), CALLS.values(), ids=list(CALLS))
def test_arguments_that_change_compile(call: Call, values: tuple[int, ...]) -> None:
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    q, k, v = (x.requires_grad_() for x in make_qkv(TOKENS, dtype=torch.float32))
    for value in values:
        torch.testing.assert_close(compiled(q, k, v, value), call(q, k, v, value), rtol=1e-5, atol=1e-5)


def test_the_longest_document_of_a_layer_is_a_symbol(layer: NSAttention) -> None:
    """As training on packs with torch.compile has it: automatically dynamic from the second length on."""
    torch.compiler.reset()
    counts = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled, x = torch.compile(layer, fullgraph=True, backend=counts), torch.randn(TOKENS, 64)
    for longest in (21, 30, 33):
        given: Any = {"cu_seqlens": bounds(longest), "max_seqlen": longest}
        torch.testing.assert_close(compiled(x, **given), layer(x, **given), rtol=1e-5, atol=1e-5)
    assert counts.frame_count == 2


def test_sizes_of_a_gpus_tensors_may_be_symbols() -> None:
    """Symbols have no hash, so such a call is not remembered."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    tokens = mode.from_tensor(torch.empty(TOKENS)).shape[0]
    assert isinstance(tokens, torch.SymInt)
    with mode:
        block, weight = torch.empty(1, tokens, 8, device="cuda"), torch.empty(8, device="cuda")
        assert attention_residual([block, block], weight, backend="reference").shape == block.shape
