"""nsa and nsa_forward as operators: torch.compile records them whole, for every length, and with every argument."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import dispatch
from nsa import (
    AttentionResidual,
    LinearCompression,
    NeighborhoodAttention,
    attention_residual,
    block_sparse_attention,
    neighborhood_attention,
    nsa,
    nsa_forward,
    nsa_forward_aux,
)
from nsa import operators as ops
from nsa.common.derivatives import recompute_gradients
from nsa.common.operators import EagerFunction
from nsa.config import OPTION_NAMES
from nsa.inputs import TENSOR_NAMES, NSAInputs
from tests.support.cases import rest
from tests.support.helpers import SMALL, make_qkv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile


def compiled(**keywords: Any) -> Any:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nsa_forward(q * 2, k, v, **keywords) + 1

    torch._dynamo.reset()
    return layer, torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")


def test_operator_gives_every_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(75))
    extra = {"gate_proj_weight": torch.randn(4, 3, q.shape[-1]).double().requires_grad_()}
    wanted, do = (q, k, v, *extra.values()), torch.randn_like(q)
    got = torch.autograd.grad(ops.call_saving(q, k, v, **extra, config=SMALL["seed"]), wanted, do)
    expected = torch.autograd.grad(nsa(q, k, v, **extra, config=SMALL["seed"]), wanted, do)
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)
    (only,) = torch.autograd.grad(ops.call_saving(q.detach(), k, v, config=SMALL["seed"]).sum(), v)
    assert only.shape == v.shape


@pytest.mark.parametrize("extra", [{}, {"cu_seqlens": torch.tensor([0, 30, 75], dtype=torch.int32), "max_seqlen": 45}])
def test_eager_training_is_what_the_operators_do(extra: dict[str, Any]) -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(75, batch=None if extra else 1))
    weight = torch.randn(4, 3, q.shape[-1]).double().requires_grad_()
    config, flags = SMALL["seed"], {"deterministic": False, "recompute": True, "backend": None}
    inputs = NSAInputs(q, k, v, gate_proj_weight=weight, **extra)
    call = ops.resolve(inputs, config, **flags, needs_grad=True)
    out = EagerFunction.apply(call, *call.tensors)
    expected = ops.call_saving(q, k, v, gate_proj_weight=weight, config=config, **extra)
    assert torch.equal(out, expected)
    do, wanted = torch.randn_like(q), (q, v, weight)  # not k's
    got = torch.autograd.grad(out, wanted, do, retain_graph=True)
    for x, y in zip(got, torch.autograd.grad(expected, wanted, do), strict=True):
        assert torch.equal(x, y)
    for need in (True, False):
        (first,) = torch.autograd.grad(out, q, do.requires_grad_(need), create_graph=True)
        with pytest.raises(RuntimeError, match="nsa has no second derivative"):
            first.sum().backward()


@pytest.mark.parametrize("below_an_operator", [False, True])
def test_recomputation_stays_in_its_thread(below_an_operator: bool) -> None:
    threads = set()

    def cube(x: Tensor) -> Tensor:
        threads.add(threading.get_ident())
        return x**3

    def differentiate(x: Tensor) -> Tensor:
        with torch.no_grad():
            (gradient,) = recompute_gradients(cube, [x], torch.ones_like(x))
        return gradient

    run = torch.library.custom_op("nsa_tests::differentiate", differentiate, mutates_args=())
    x = torch.arange(4.0, requires_grad=True)  # so that the operator's autograd runs, and is off below it
    assert torch.equal(run(x) if below_an_operator else differentiate(x), 3 * x**2)
    assert threads == {threading.get_ident()}


@pytest.mark.cuda
@pytest.mark.parametrize("operator", [False, True])
def test_reference_trains_on_a_gpu(operator: bool) -> None:
    """In autograd's thread of the device, for which the recomputation must not wait."""
    q, k, v = (x.cuda().requires_grad_() for x in make_qkv(75))
    do, keywords = torch.randn_like(q), {"config": SMALL["seed"], "backend": "reference"}
    found: list[tuple[Tensor, ...]] = []

    def train() -> None:
        out = ops.call_saving(q, k, v, **keywords) if operator else nsa(q, k, v, **keywords)
        found.append(torch.autograd.grad(out, (q, k, v), do))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(120)
    assert found, "backward did not end in two minutes"
    own = [x.detach().cpu().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(nsa(*own, config=SMALL["seed"]), own, do.cpu())
    for x, y in zip(found[0], expected, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-9, atol=1e-9)


def test_second_derivative_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(20))
    out = ops.call_saving(q, k, v, config=SMALL["seed"])
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="nsa has no second derivative"):
        first.sum().backward()


def test_options_and_tensors_reach_the_call() -> None:
    gates = torch.rand(1, 75, 4, 3, dtype=torch.float64)
    keywords: dict[str, Any] = {"num_selected_blocks": 2, "compress_block_size": 8, "causal": False, "gates": gates}
    eager, whole = compiled(**keywords)
    qkv = make_qkv(75)
    assert torch.equal(whole(*qkv), eager(*qkv))
    assert not torch.equal(whole(*qkv), compiled(**keywords | {"causal": True})[1](*qkv))


def test_schema_names_every_tensor_and_option() -> None:
    for name, schema in (ops.FORWARD, ops.SAVING, ops.BACKWARD):
        names = {argument.name for argument in torch._C.parse_schema(name + schema).arguments}
        assert names - {"do", "saved"} == {*TENSOR_NAMES, *OPTION_NAMES, *ops.CALL_DEFAULTS}


def largest(blocks: Tensor) -> Tensor:
    return blocks.amax(-2)


@pytest.mark.parametrize(
    ("preset", "packed"), [("paper", True), *rest(("paper", False), ("seed", True), ("seed", False))]
)
def test_a_callable_compress_compiles_once_for_all_lengths(preset: str, packed: bool) -> None:
    """Outside the operator, so with gradients of what it holds."""
    length = SMALL[preset].compress_block_size
    layers = [LinearCompression(2, length, 16, dtype=torch.float64) for _ in range(2)]
    weights = [weight for layer in layers for weight in layer.parameters()]
    for weight in weights:
        torch.nn.init.normal_(weight)
    config = replace(SMALL[preset], compress=tuple(layers))

    def layer(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None) -> Tensor:
        return nsa(q * 2, k, v, config=config, cu_seqlens=bounds) + 1

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    once = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (75, 90, 64, 200):
        qkv = [x.requires_grad_() for x in make_qkv(tokens, batch=None if packed else 1)]
        bounds = torch.tensor([0, 30, tokens], dtype=torch.int32) if packed else None
        out, expected = (function(*qkv, bounds) for function in (once, layer))
        torch.testing.assert_close(out, expected)
        do = torch.randn_like(out)
        for x, y in zip(*(torch.autograd.grad(some, [*qkv, *weights], do) for some in (out, expected)), strict=True):
            torch.testing.assert_close(x, y)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("function", "compress"), [(nsa, "mean"), (nsa_forward, largest)])
def test_debug_reads_what_the_graph_is_given(function: Any, compress: Any) -> None:
    torch._dynamo.reset()
    whole = torch.compile(partial(function, debug=True, compress=compress), fullgraph=True, backend="aot_eager")
    q, k, v = (torch.nn.Parameter(x) for x in make_qkv(75))
    whole(q, k, v)
    with torch.no_grad():
        q[0, 3, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="q must be finite"):
        whole(q, k, v)


def test_bad_input_is_refused_in_the_graph_too() -> None:
    _, whole = compiled(gates=torch.ones(3))
    with pytest.raises(ValueError, match="gates must have the shape"):
        whole(*make_qkv(75))


@pytest.mark.parametrize("op", ["nsa", "neighborhood_attention", "block_sparse_attention", "attention_residual"])
def test_dispatch_knows_whether_gradients_are_needed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is routed as what is not: no tensor needs a gradient inside of an operator."""
    q, k, v = make_qkv(20, dtype=torch.float32)
    blocks = torch.zeros((1, k.shape[2], 20, 1), dtype=torch.int32)
    call: Any = {
        "nsa": lambda q: nsa(q, k, v, config=SMALL["paper"]),
        "neighborhood_attention": lambda q: neighborhood_attention(q, k, v, kernel_size=3),
        "block_sparse_attention": lambda q: block_sparse_attention(q, k, v, blocks, block_size=8),
        "attention_residual": lambda q: attention_residual(q, torch.zeros(q.shape[-1])),
    }[op]
    asked = []
    resolved = dispatch.resolve

    def resolve(call: dispatch.Call, *rest: Any, **options: Any) -> dispatch.Impl:
        asked.append(call.backward)
        return resolved(call, *rest, **options)

    monkeypatch.setattr(dispatch, "resolve", resolve)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for run, needs_grad in ((call, True), (call, False), (compiled, True)):
        with torch.set_grad_enabled(needs_grad):
            run(q.clone().requires_grad_())
        assert asked
        assert set(asked) == {needs_grad}
        asked.clear()


def test_intermediate_results_break_the_graph() -> None:
    """Dynamo calls `nsa_forward_aux` as it is: tracing the reference would take 25 breaks, again at each length."""
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def branches(q: Tensor) -> Tensor:
        out, aux = nsa_forward_aux(q * 2, q, q, config=SMALL["paper"])
        return out + aux.o_win

    graphs = []
    compiled = torch.compile(branches, backend=counter)
    for tokens in (20, 33, 47):
        q = torch.randn(1, tokens, 2, 8)
        assert torch.equal(compiled(q), branches(q))
        graphs.append(counter.frame_count)
    assert graphs == [2, 4, 4], "before and after the call, then once more for all lengths"
    assert len(torch._dynamo.utils.counters["graph_break"]) == 1


def test_other_layers_are_exported_for_all_lengths() -> None:
    """NSAttention is in docs/usage.md, which tests run, too."""
    tokens = {1: torch.export.Dim("tokens", min=2, max=4096)}
    x, longer = torch.randn(1, 40, 16), torch.randn(1, 75, 16)
    window = NeighborhoodAttention(16, 2, kernel_size=5)
    exported = torch.export.export(window, (x,), dynamic_shapes=(tokens,)).module()
    torch.testing.assert_close(exported(longer), window(longer))
    mix = AttentionResidual(16)
    exported = torch.export.export(mix, ([x, x + 1],), dynamic_shapes=([tokens] * 2,)).module()
    torch.testing.assert_close(exported([longer, -longer]), mix([longer, -longer]))
