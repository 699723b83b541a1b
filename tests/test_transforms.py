"""The three ops where PyTorch's transforms of functions, its meta device and its autocast are around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import (
    LinearCompression,
    NeighborhoodAttention,
    NSAttention,
    attention_residual,
    neighborhood_attention,
    nsa,
    nsa_forward,
    nsa_forward_aux,
)
from nsa.neighborhood import neighborhood_attention_backward, neighborhood_attention_forward
from tests.helpers import SMALL, make_qkv

Op = Callable[[Tensor], Tensor]

OPS: dict[str, Op] = {
    "nsa": lambda x: nsa(x, x, x),
    "neighborhood_attention": lambda x: neighborhood_attention(x, x, x),
    "attention_residual": lambda x: attention_residual(x, x[0, 0, 0]),
}
WITHOUT_GRAPH: dict[str, Op] = {
    "nsa": lambda x: nsa_forward(x, x, x),
    "nsa ": lambda x: nsa_forward_aux(x, x, x)[0],
    "neighborhood_attention": lambda x: neighborhood_attention_forward(x, x, x)[0],
    "neighborhood_attention_backward": lambda x: neighborhood_attention_backward(x, x, x, x, torch.zeros(1, 2, 20, 7))[
        0
    ],
}
ALL = [*OPS.items(), *WITHOUT_GRAPH.items()]


@pytest.mark.parametrize(("op", "run"), ALL, ids=[name for name, _ in ALL])
def test_refuses_vmap_by_name(op: str, run: Op) -> None:
    with pytest.raises(RuntimeError, match=f"^{op.strip()} does not support torch.vmap: .* batch dimension B"):
        torch.vmap(run)(torch.randn(3, 1, 20, 2, 8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.func.jvp, of torch.jit
@pytest.mark.parametrize(("op", "run"), ALL, ids=[name for name, _ in ALL])
def test_refuses_derivatives_of_functions_by_name(op: str, run: Op) -> None:
    x = torch.randn(1, 20, 2, 8)

    def loss(x: Tensor) -> Tensor:
        return run(x).square().sum()

    by_backward = f"^{op.strip()} does not support torch.func.grad, vjp or jacrev: call backward"
    for transform in (torch.func.grad, torch.func.jacrev, lambda f: lambda x: torch.func.vjp(f, x)):
        with pytest.raises(RuntimeError, match=by_backward):
            transform(loss)(x)
    for transform in (torch.func.jacfwd, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        with pytest.raises(RuntimeError, match=f"^{op.strip()} does not support torch.(vmap|func.jvp or jacfwd): "):
            transform(loss)(x)
    with pytest.raises(RuntimeError, match=f"^{op.strip()} does not support torch.func.grad"):
        torch.vmap(torch.func.grad(loss))(x[None])


@pytest.mark.parametrize(("op", "run"), OPS.items(), ids=OPS)
def test_functional_call_is_no_transform(op: str, run: Any) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return run(x * self.scale)  # type: ignore[no-any-return]

    x, scale = torch.randn(1, 20, 2, 8), torch.tensor(2.0, requires_grad=True)
    out = torch.func.functional_call(Layer(), {"scale": scale}, (x,))
    torch.testing.assert_close(out, run(x * 2))
    assert torch.autograd.grad(out.sum(), scale)[0].isfinite()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
@pytest.mark.parametrize(("op", "run"), OPS.items(), ids=OPS)
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_refuses_in_a_compiled_function_too(transform: Any, op: str, run: Op) -> None:
    torch._dynamo.reset()
    whole = torch.compile(lambda x: transform(lambda x: run(x).sum())(x), backend="aot_eager")
    with pytest.raises(Exception, match=f"{op} does not support torch"):
        whole(torch.randn(3, 1, 20, 2, 8) if transform is torch.vmap else torch.randn(1, 20, 2, 8))


# The meta device


def on_meta(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().to("meta").requires_grad_(x.requires_grad) for name, x in tensors.items()}


def assert_alike(got: Tensor, expected: Tensor) -> None:
    assert got.device.type == "meta"
    assert (got.shape, got.dtype, got.requires_grad) == (expected.shape, expected.dtype, expected.requires_grad)


def assert_same_shapes(run: Callable[..., Tensor], tensors: dict[str, Tensor]) -> None:
    """Of the result and of the gradients of all that requires one."""
    empty = on_meta(tensors)
    got, expected = run(**empty), run(**tensors)
    assert_alike(got, expected)
    wanted = [name for name, x in tensors.items() if x.requires_grad]
    for create_graph in (False, True):
        gradients = (
            torch.autograd.grad(out.square().sum(), [given[name] for name in wanted], create_graph=create_graph)
            for out, given in ((run(**empty), empty), (run(**tensors), tensors))
        )
        for name, got, expected in zip(wanted, *gradients, strict=True):
            assert (got.shape, got.dtype, got.device.type) == (expected.shape, expected.dtype, "meta"), name
    with torch.no_grad():
        assert_alike(run(**empty), run(**tensors))


BOUNDS = torch.tensor([0, 25, 25, 60], dtype=torch.int32)
EXTRAS: dict[str, Callable[[tuple[int, ...]], dict[str, Tensor]]] = {
    "nothing": lambda _: {},
    "gates": lambda lead: {"gates": torch.rand(*lead, 4, 3, requires_grad=True)},
    "fp32 weight": lambda _: {"gate_proj_weight": torch.rand(4, 3, 16, dtype=torch.float32, requires_grad=True)},
    "keys of their own": lambda lead: {
        name: torch.randn(*lead, 2, 16, dtype=torch.bfloat16, requires_grad=True)
        for name in ("k_slc", "v_slc", "k_win", "v_win")
    },
}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
@pytest.mark.parametrize("preset", SMALL)
def test_nsa_has_shapes_on_the_meta_device(preset: str, packed: bool, extra: str) -> None:
    qkv = make_qkv(60, batch=None if packed else 2, dtype=torch.bfloat16, requires_grad=True)
    tensors = dict(zip("qkv", qkv, strict=True)) | EXTRAS[extra](qkv[0].shape[:-2])
    tensors |= {"cu_seqlens": BOUNDS} if packed else {}
    assert_same_shapes(partial(nsa, config=SMALL[preset]), tensors)
    (out, aux), (expected, expected_aux) = (
        nsa_forward_aux(**given, config=SMALL[preset], backend="reference") for given in (on_meta(tensors), tensors)
    )
    assert_alike(out, expected)
    for name, tensor in expected_aux._asdict().items():
        got = getattr(aux, name)
        assert (got is None) == (tensor is None), name
        if tensor is not None:
            assert (got.shape, got.dtype, got.device.type) == (tensor.shape, tensor.dtype, "meta"), name


@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
def test_compression_learns_on_the_meta_device(packed: bool) -> None:
    length = SMALL["seed"].compress_block_size
    layers = [LinearCompression(2, length, 16, device="meta") for _ in range(2)]
    q, k, v = (x.to("meta") for x in make_qkv(60, batch=None if packed else 2, dtype=torch.float32))
    bounds = BOUNDS.to("meta") if packed else None
    out = nsa(q, k, v, cu_seqlens=bounds, config=replace(SMALL["seed"], compress=tuple(layers)))
    weights = [weight for layer in layers for weight in layer.parameters()]
    for weight, gradient in zip(weights, torch.autograd.grad(out.sum(), weights), strict=True):
        assert gradient.shape == weight.shape


@pytest.mark.parametrize("backend", [None, "cute", "reference"])
def test_a_named_backend_has_the_same_shapes_on_the_meta_device(backend: str | None) -> None:
    q = torch.empty(1, 20, 2, 64, device="meta")
    for op in (nsa, neighborhood_attention):
        assert op(q, q, q, backend=backend).shape == q.shape


def test_neighborhood_attention_has_shapes_on_the_meta_device() -> None:
    tensors = dict(zip("qkv", make_qkv(30, dtype=torch.float16, requires_grad=True), strict=True))
    for algorithm in ("auto", "band"):
        assert_same_shapes(partial(neighborhood_attention, algorithm=algorithm), tensors)
    got, expected = (neighborhood_attention_forward(**given, kernel_size=5) for given in (on_meta(tensors), tensors))
    for x, y in zip(got, expected, strict=True):
        assert_alike(x, y)
    tensors |= {"do": expected[0], "attn": expected[1]}
    for x, y in zip(
        *(neighborhood_attention_backward(**given, kernel_size=5) for given in (on_meta(tensors), tensors)), strict=True
    ):
        assert_alike(x, y)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_attention_residual_has_shapes_on_the_meta_device(stacked: bool, norm: bool) -> None:
    size = (3, 2, 5, 8) if stacked else (2, 5, 8)
    tensors = {
        f"block {i}": torch.randn(size, dtype=torch.bfloat16, requires_grad=True) for i in range(3 - 2 * stacked)
    }
    tensors |= {name: torch.randn(8, requires_grad=True) for name in (("w_query", "w_norm") if norm else ("w_query",))}

    def run(**given: Tensor) -> Tensor:
        blocks = [x for name, x in given.items() if name.startswith("block")]
        return attention_residual(blocks[0] if stacked else blocks, given["w_query"], given.get("w_norm"))

    assert_same_shapes(run, tensors)


@pytest.mark.parametrize("layer", [NSAttention, NeighborhoodAttention])
def test_layers_have_shapes_on_the_meta_device(layer: Any) -> None:
    made = layer(32, 4, device="meta")
    x = torch.empty(2, 50, 32, device="meta", requires_grad=True)
    out = made(x)
    assert (out.shape, out.device.type) == (x.shape, "meta")
    out.sum().backward()
    assert all(weight.grad is not None and weight.grad.shape == weight.shape for weight in made.parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
@pytest.mark.parametrize(("op", "run"), OPS.items(), ids=OPS)
def test_compiles_on_the_meta_device(op: str, run: Op) -> None:
    torch._dynamo.reset()
    x = torch.empty(1, 20, 2, 8, device="meta", requires_grad=True)
    out = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    assert_alike(out, run(x))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.shape == x.shape
