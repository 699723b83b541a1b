"""The three ops where PyTorch's transforms of functions, its meta device and its autocast are around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import attention_residual, neighborhood_attention, nsa, nsa_forward, nsa_forward_aux
from nsa.neighborhood import neighborhood_attention_backward, neighborhood_attention_forward

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
