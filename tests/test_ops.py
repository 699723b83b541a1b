"""nsa_forward as one operator: torch.compile records it whole, for every length, and with every argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nsa.ops as ops
from nsa import NSAConfig, nsa_forward
from nsa.config import OPTION_NAMES
from nsa.tensors import TENSOR_NAMES
from tests.helpers import SMALL, make_qkv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile


def compiled(**keywords: Any) -> Any:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nsa_forward(q * 2, k, v, **keywords) + 1

    torch._dynamo.reset()
    return layer, torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")


@pytest.mark.parametrize("preset", SMALL)
def test_compiles_whole_and_once_for_all_lengths(preset: str) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nsa_forward(q * 2, k, v, config=SMALL[preset]) + 1

    torch._dynamo.reset()
    once = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    for tokens in (75, 90, 64, 200):
        qkv = make_qkv(tokens)
        assert torch.equal(once(*qkv), layer(*qkv))
    assert len(graphs) == 1


def test_options_and_tensors_reach_the_call() -> None:
    gates = torch.rand(1, 75, 4, 3, dtype=torch.float64)
    keywords: dict[str, Any] = {"num_selected_blocks": 2, "compress_block_size": 8, "causal": False, "gates": gates}
    eager, whole = compiled(**keywords)
    qkv = make_qkv(75)
    assert torch.equal(whole(*qkv), eager(*qkv))
    assert not torch.equal(whole(*qkv), compiled(**keywords | {"causal": True})[1](*qkv))


def test_packed_documents() -> None:
    bounds = torch.tensor([0, 30, 75], dtype=torch.int32)
    eager, whole = compiled(cu_seqlens=bounds, config=SMALL["seed"])
    q, k, v = make_qkv(75, batch=None)
    assert torch.equal(whole(q, k, v), eager(q, k, v))


def test_schema_names_every_tensor_and_option() -> None:
    for name, schema in ops.SCHEMAS.items():
        names = {argument.name for argument in torch._C.parse_schema(name + schema).arguments}
        assert names - {"do", "saved"} == {*TENSOR_NAMES, *OPTION_NAMES, *ops.REST}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"compress": torch.nn.Flatten(-2)}, "compress must be 'mean' under torch.compile"),
        ({"config": NSAConfig(), "causal": True}, "config stands for all options, got causal beside it"),
        ({"window": 3}, "unknown keyword argument window"),
    ],
)
def test_refuses_what_it_cannot_pass_on(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ops.call_forward(*make_qkv(10), **keywords)


def test_bad_input_is_refused_in_the_graph_too() -> None:
    _, whole = compiled(gates=torch.ones(3))
    with pytest.raises(ValueError, match="gates must have the shape"):
        whole(*make_qkv(75))
