"""Attention residual: two oracles that agree, arguments, the layer, operators; the kernels in the interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dispatch
from ascend_kernels import residual_reference
from dispatch import attention_residual
from nsa import AttentionResidual
from nsa.residual_calls import Blocks
from tests.residual_cases import EPS, differentiated, make, oracle, through_the_public_op
from tests.residual_loops import mix

# The oracle


@settings(max_examples=60)
@given(
    blocks=st.integers(1, 7),
    batch=st.integers(1, 2),
    tokens=st.integers(0, 3),
    dim=st.integers(1, 9),
    norm=st.booleans(),
)
def test_oracles_agree(blocks: int, batch: int, tokens: int, dim: int, norm: bool) -> None:
    case = make(tokens, dim, blocks, batch=batch, norm=norm, dtype=torch.float64)
    assert isinstance(case.blocks, Tensor)
    out, alpha, rstd = residual_reference.attention_residual(case.blocks, case.w_query, case.w_norm, eps=EPS)
    w_norm = [1.0] * dim if case.w_norm is None else case.w_norm.tolist()
    expected = torch.tensor(mix(case.blocks.tolist(), case.w_query.tolist(), w_norm, EPS), dtype=torch.float64)
    torch.testing.assert_close(out, expected.view(out.shape), rtol=0, atol=1e-12)
    assert alpha.shape == rstd.shape == (blocks, batch, tokens)
    torch.testing.assert_close(alpha.sum(0), torch.ones_like(alpha[0]))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("layout", ["stacked", "list"])
def test_gradients_of_the_oracle(layout: str, norm: bool) -> None:
    case = make(2, 5, 3, batch=2, layout=layout, norm=norm, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *leaves: oracle()(*case.inputs(leaves)), case.leaves)


# The public function


@pytest.mark.parametrize("layout", ["stacked", "list", "token-major", "slices", "strided"])
def test_cpu_tensors_run_the_reference(layout: str) -> None:
    case = make(6, 20, 4, batch=2, layout=layout, dtype=torch.bfloat16, weight_dtype=torch.float32)
    got, expected = through_the_public_op(case, "reference"), differentiated(oracle(), case)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(attention_residual(case.blocks, case.w_query, case.w_norm, EPS), got[0])


BLOCKS = torch.zeros(3, 2, 5, 8)
BAD: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "blocks must be a torch.Tensor or a list of them, got int", {"blocks": 3}),
    (ValueError, r"blocks must have the layout \[L,B,N,D\] or be a list, got shape \[2, 5, 8\]", {"blocks": BLOCKS[0]}),
    (ValueError, "blocks must have at least one member, got an empty list", {"blocks": []}),
    (TypeError, r"blocks\[1\] must be a torch.Tensor, got NoneType", {"blocks": [BLOCKS[0], None]}),
    (ValueError, r"blocks\[0\] must have the layout \[B,N,D\], got shape \[5, 8\]", {"blocks": [BLOCKS[0, 0]]}),
    (
        ValueError,
        r"blocks\[1\] must have blocks\[0\]'s shape \[2, 5, 8\], got \[2, 4, 8\]",
        {"blocks": [BLOCKS[0], BLOCKS[0, :, :4]]},
    ),
    (
        ValueError,
        r"blocks\[2\] must be float32 as blocks\[0\], got float16",
        {"blocks": [BLOCKS[0], BLOCKS[1], BLOCKS[2].half()]},
    ),
    (
        ValueError,
        r"blocks\[1\] must have blocks\[0\]'s strides \(40, 8, 1\), got \(8, 16, 1\)",
        {"blocks": [BLOCKS[0], torch.zeros(5, 2, 8).transpose(0, 1)]},
    ),
    (
        ValueError,
        r"blocks\[1\] must be on blocks\[0\]'s device cpu, got meta",
        {"blocks": [BLOCKS[0], BLOCKS[0].to("meta")]},
    ),
    (TypeError, "blocks must be bfloat16, float16, float32 or float64, got int64", {"blocks": BLOCKS.long()}),
    (ValueError, r"blocks must have at least one block and D >= 1, got shape \[0, 2, 5, 8\]", {"blocks": BLOCKS[:0]}),
    (TypeError, "w_query must be a torch.Tensor, got NoneType", {"w_query": None}),
    (TypeError, "w_query must be float32 .blocks are float32., got float16", {"w_query": torch.zeros(8).half()}),
    (ValueError, r"w_query must have the shape \[8\], got \[7\]", {"w_query": torch.zeros(7)}),
    (TypeError, "w_norm must be a torch.Tensor or None, got float", {"w_norm": 1.0}),
    (
        TypeError,
        "w_norm must be float16 or float32 .blocks are float16., got float64",
        {"blocks": BLOCKS.half(), "w_norm": torch.zeros(8).double()},
    ),
    (ValueError, r"w_norm must have the shape \[8\], got \[8, 1\]", {"w_norm": torch.zeros(8, 1)}),
    (ValueError, "w_norm must be on the blocks' device cpu, got meta", {"w_norm": torch.zeros(8, device="meta")}),
    (TypeError, "eps must be a number, got None", {"eps": None}),
    (ValueError, "eps must be finite and at least 0, got -1.0", {"eps": -1.0}),
    (ValueError, "eps must be finite and at least 0, got nan", {"eps": math.nan}),
]


@pytest.mark.parametrize(("error", "message", "changes"), BAD, ids=str)
def test_bad_arguments_are_named(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    given = {"blocks": BLOCKS, "w_query": torch.zeros(8), "w_norm": torch.ones(8), **changes}
    with pytest.raises(error, match=message):
        attention_residual(**given)


# The layer


@pytest.mark.parametrize("norm_weight", [True, False])
def test_the_layer_starts_with_the_mean(norm_weight: bool) -> None:
    layer = AttentionResidual(16, norm_weight=norm_weight)
    blocks = [torch.randn(2, 5, 16, requires_grad=True) for _ in range(4)]
    out = layer(blocks)
    torch.testing.assert_close(out, sum(blocks) / 4)
    out.square().sum().backward()
    assert all(block.grad is not None for block in blocks)
    assert sorted(layer.state_dict()) == ["w_norm", "w_query"][0 if norm_weight else 1 :]
    assert layer.w_query.grad is not None
    assert layer.w_query.grad.abs().sum() > 0


def test_the_layer_is_the_function() -> None:
    layer = AttentionResidual(16, eps=1e-3)
    torch.nn.init.normal_(layer.w_query)
    blocks = torch.randn(4, 2, 5, 16)
    assert torch.equal(layer(blocks), attention_residual(blocks, layer.w_query, layer.w_norm, 1e-3))
    assert "16, eps=0.001, norm_weight=True" in repr(layer)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (TypeError, "hidden_size must be an integer, got 8.0", {"hidden_size": 8.0}),
        (ValueError, "hidden_size must be at least 1, got 0", {"hidden_size": 0}),
        (ValueError, "eps must be finite and at least 0, got -1", {"eps": -1}),
    ],
    ids=str,
)
def test_bad_arguments_of_the_layer(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        AttentionResidual(**{"hidden_size": 8, **changes})


# The operators


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("layout", ["stacked", "list"])
def test_compiles(layout: str, norm: bool) -> None:
    check_compiled("reference", layout=layout, norm=norm)


def check_compiled(backend: str, **options: Any) -> None:
    """Results and gradients of the eager call, in one graph."""
    torch._dynamo.reset()
    case = make(6, 20, 3, **options)

    def run(blocks: Blocks, w_query: Tensor, w_norm: Tensor | None) -> Tensor:
        return attention_residual(blocks, w_query * 2, w_norm, EPS, backend=backend) + 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(differentiated(compiled, case), differentiated(run, case))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("layout", ["stacked", "list"])
def test_operators_keep_pytorchs_rules(layout: str, norm: bool) -> None:
    case = make(3, 6, 2, layout=layout, norm=norm, dtype=torch.float64)
    operator = torch.ops.nsa_kernels.attention_residual.default
    stacked = isinstance(case.blocks, Tensor)
    blocks = [case.blocks] if stacked else case.blocks
    torch.library.opcheck(operator, (blocks, case.w_query, case.w_norm, stacked, EPS, None))


# Dispatch


def refusal(backend: str, device: str, dtype: torch.dtype = torch.float16, **options: Any) -> str | None:
    call = dispatch.Call("attention_residual", device, dtype, options=options)
    return {verdict.impl.backend: verdict.reason for verdict in dispatch.explain(call)}[backend]
