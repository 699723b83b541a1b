"""Training with NSA on an NVIDIA GPU: other ways to the same gradients, and what users build around a call.

Gradients of all sizes and options are in test_nsa.py.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, NSAttention, nsa, nsa_forward, operators
from nsa.inputs import NSAInputs
from tests.support import cases
from tests.support.cute_cases import (
    BF16,
    SOME,
    captured,
    check_gradients,
    gate_weight,
    gradients,
    like,
    on_gpu,
)
from tests.support.hardware import ATOMIC_FREE, DETERMINISTIC

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]


# Ways of computing the same


@pytest.mark.parametrize("config", [SOME, replace(SOME, num_cmp_selected_blocks=2, compress_block_size=4,
                                                   select_block_size=64)], ids=["all", "some"])  # fmt: skip
def test_recompute(config: NSAConfig, strategy: str) -> None:
    check_gradients(NSAInputs(*on_gpu(3000, batch=2), gate_proj_weight=gate_weight()), config, recompute=True)


def test_few_heads_at_a_time(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    from cute_kernels import backward

    monkeypatch.setattr(backward, "TEMPORARY_BYTES", 1)
    check_gradients(NSAInputs(*on_gpu(3000, batch=2), gate_proj_weight=gate_weight()), SOME)


@pytest.mark.parametrize("shared", [True, False])
def test_lists_in_chunks_when_every_tile_chooses_block_0(
    monkeypatch: pytest.MonkeyPatch, shared: bool, strategy: str
) -> None:
    from cute_kernels import backward

    q, k, v = on_gpu(5000)
    k[:, :64] *= 8
    config = replace(SOME, share_heads_in_group=shared, num_init_blocks=1)
    for list_bytes in (20_000, 3_000):
        monkeypatch.setattr(backward, "LIST_BYTES", list_bytes)
        check_gradients(NSAInputs(q, k, v), config)


def test_phases_and_lists_agree(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    from cute_kernels import backward

    monkeypatch.setattr("cute_kernels.plan.PHASES_FROM", 0)
    monkeypatch.setattr(backward, "nsa_backward", partial(backward.nsa_backward, atomic_free=False))
    for tokens, stride in ((2000, None), (2000, 16), (1999, 32), (64, None), (127, None)):
        config = replace(SOME, compress_stride=stride)
        check_gradients(NSAInputs(*on_gpu(tokens, batch=2)), config)


def test_any_strides() -> None:
    fused = like(1, 1000, 12, 128)
    expected = check_gradients(NSAInputs(*(x.contiguous() for x in fused.split((8, 2, 2), dim=2))), SOME)
    leaf = fused.clone().requires_grad_()
    out = nsa(*leaf.split((8, 2, 2), dim=2), config=SOME)
    out.backward(like(*out.shape))
    together = torch.cat([expected[name] for name in ("q", "k", "v")], 2)
    torch.testing.assert_close(leaf.grad, together, rtol=2e-2, atol=2e-2 * float(together.abs().max()))


# What users build around a call


def test_operators() -> None:
    keywords = operators.operator_keywords({"config": SOME})
    for tokens, extra in ((300, {}), (300, {"gate_proj_weight": gate_weight().requires_grad_()})):
        qkv = [x.requires_grad_() for x in on_gpu(tokens)]
        arguments = operators.operator_tensors(*qkv, extra)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(
            torch.ops.nsa_kernels.saving.default, tuple(arguments), keywords, test_utils=checks, atol=0.1, rtol=0.1
        )


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_compiles_once_for_all_lengths(packed: bool, recompute: bool) -> None:
    weight = gate_weight().requires_grad_()
    graphs = []

    def layer(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        return nsa(q * 2, k, v, gate_proj_weight=weight, config=SOME, recompute=recompute, **keywords) + 1

    def count(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return torch._inductor.compile(graph, examples)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    for tokens in (1000, 1300, 700):
        qkv = [x.requires_grad_() for x in on_gpu(tokens, batch=None if packed else 1)]
        keywords = {}
        if packed:
            keywords["cu_seqlens"] = torch.tensor([0, 300, tokens], device="cuda", dtype=torch.int32)
        do = like(*qkv[0].shape)
        got = torch.autograd.grad(compiled(*qkv, **keywords), qkv, do)
        expected = torch.autograd.grad(layer(*qkv, **keywords), qkv, do)
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=float(y.abs().max()) * 2**-6)
    assert len(graphs) == 1


def test_training_step_as_a_cuda_graph() -> None:
    static = [x.requires_grad_() for x in on_gpu(3000)]
    weight = gate_weight().requires_grad_()
    do = like(*static[0].shape)
    config = replace(SOME, num_cmp_selected_blocks=2, compress_block_size=4, select_block_size=64)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(nsa(*static, gate_proj_weight=weight, config=config), (*static, weight), do)

    graph, results = captured(step)
    for seed in range(2, 4):
        with torch.no_grad():
            for tensor, value in zip(static, on_gpu(3000, seed=seed), strict=True):
                tensor.copy_(value)
        graph.replay()
        for got, expected in zip(results, step(), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=float(expected.abs().max()) * 2**-6)


@ATOMIC_FREE
def test_layer_as_graphed_callables() -> None:
    """torch.cuda.make_graphed_callables captures forward and backward of a layer: outputs and gradients of plain calls.

    Bit for bit: two heads share keys, and all compressed entries are one block of keys, so that a sum of
    FlashAttention-4's atomics has two terms at most, whose order does not matter.
    """
    torch.manual_seed(5)
    layer = NSAttention(256, 4, 2, head_dim=64, config=SOME, device="cuda", dtype=BF16)
    sample = like(1, 1000, 256).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(layer), (sample,))
    for seed in range(3):
        torch.manual_seed(seed)
        x, do = (torch.randn_like(sample).requires_grad_() for _ in range(2))
        results = []
        for call in (layer, graphed):
            out = call(x)
            results.append((out, *torch.autograd.grad(out, (x, *call.parameters()), do)))
            results[-1] = tuple(result.clone() for result in results[-1])  # a graph writes its own anew
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected)


def test_same_forward_with_and_without_a_graph() -> None:
    qkv = on_gpu(3000)
    for recompute in (True, False):
        out = nsa(*(x.requires_grad_() for x in qkv), gate_proj_weight=gate_weight(), config=SOME, recompute=recompute)
        assert torch.equal(out, nsa_forward(*qkv, gate_proj_weight=gate_weight(), config=SOME))


@DETERMINISTIC
@pytest.mark.parametrize(
    "changes",
    [
        {"select_block_size": 64},
        {"select_block_size": 128},
        {"select_block_size": 192},
        {"num_cmp_selected_blocks": 2, "compress_block_size": 4, "select_block_size": 64},
    ],
    ids=str,
)
def test_deterministic(changes: dict[str, Any]) -> None:
    weight = gate_weight()
    inputs = NSAInputs(*on_gpu(3001, batch=2), gate_proj_weight=weight)
    do = like(2, 3001, 8, 128)
    config = replace(SOME, **changes)
    check_gradients(inputs, config, deterministic=True)

    def run() -> dict[str, Tensor]:
        return gradients(lambda x: nsa(**x.tensors(), config=config, deterministic=True), inputs, do)

    expected = run()
    for _ in range(10):
        for name, gradient in run().items():
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(("batch", "shared"), cases.product([1, 2], [True, False]))
def test_selected_backward_of_fa4(batch: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels import backward

    monkeypatch.setattr(backward, "nsa_backward", partial(backward.nsa_backward, atomic_free=False))
    config = replace(SOME, share_heads_in_group=shared)
    check_gradients(NSAInputs(*on_gpu(3001, batch=batch), gate_proj_weight=gate_weight()), config)
    monkeypatch.setattr(backward, "TEMPORARY_BYTES", 1)
    check_gradients(NSAInputs(*on_gpu(1000, batch=batch)), config)
