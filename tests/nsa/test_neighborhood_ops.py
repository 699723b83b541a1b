"""Neighborhood attention as an operator: torch.compile records it whole, once for all lengths, with its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from ascend_kernels.neighborhood import algorithms
from dispatch import neighborhood_attention
from nsa import NeighborhoodAttention, NeighborhoodAttentionLayer
from nsa.neighborhood import operators
from tests.support.helpers import make_qkv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "moved": {"kernel_size": 4, "dilation": 3, "boundary": "shift", "softmax_scale": 0.3},
    "causal": {"kernel_size": 9, "causal": True},
}
ON_GPUS: dict[str, dict[str, Any]] = {
    "triton": {"backend": "triton", "dilation": 3},
    "band": {"backend": "triton", "algorithm": "band", "kernel_size": 4},
    "cute": {"backend": "cute", "kernel_size": 33, "dilation": 2},
}


def check_compiled(device: str, dtype: torch.dtype, dim: int, **options: Any) -> None:
    """Results and gradients of the eager call, without compiling again for another length."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return neighborhood_attention(q * 2, k, v, **options) + 1

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    once = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for tokens in (75, 90, 64, 200):
        qkv = make_qkv(tokens, dim=dim, dtype=dtype, device=device, requires_grad=True)
        do = torch.randn_like(qkv[0])
        got, expected = ((out := function(*qkv), *torch.autograd.grad(out, qkv, do)) for function in (once, layer))
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 4  # a float among the options may take Dynamo two attempts at the first


@pytest.mark.parametrize("case", OPTIONS)
def test_compiles_whole_and_once_for_all_lengths(case: str) -> None:
    check_compiled("cpu", torch.float64, 16, **OPTIONS[case])


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")  # FlashAttention-4 warns while it compiles
@pytest.mark.parametrize("case", ON_GPUS)
def test_compiles_on_a_gpu(case: str) -> None:
    check_compiled("cuda", torch.bfloat16, 64, **ON_GPUS[case])


@pytest.mark.parametrize("kind", [NeighborhoodAttention, NeighborhoodAttentionLayer])
def test_the_layer_compiles(kind: type[torch.nn.Module]) -> None:
    torch._dynamo.reset()
    layer = kind(32, 4, num_kv_heads=2, kernel_size=5, dilation=2)
    hidden = torch.randn(2, 40, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden), layer(hidden))


def test_operator_keeps_pytorchs_rules() -> None:
    qkv = make_qkv(40, requires_grad=True)
    operator = torch.ops.nsa_kernels.neighborhood_attention.default
    torch.library.opcheck(operator, (*qkv, 5, 2, None, "shift", False, "auto", None, True))


def test_bad_arguments_are_named_under_compile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(neighborhood_attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="kernel_size must be at least 1, got 0"):
        compiled(*make_qkv(8), kernel_size=0)


def test_second_derivatives_are_refused_under_compile() -> None:
    q, k, v = make_qkv(20, requires_grad=True)
    out = torch.ops.nsa_kernels.neighborhood_attention(q, k, v, 5, 1, None, "truncate", False, "auto", None, True)[0]
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="neighborhood_attention has no second derivative"):
        first.square().sum().backward()


class Recorder:
    """A backend whose backward notes what it is asked for."""

    training, backend = "a module", "cute"

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def load(self) -> Any:
        return lambda q, k, v, **_: (q.clone(), q.new_empty(0))

    def load_training(self) -> Any:
        return self

    def kept_like(self, q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return q.new_empty(0)

    def backward(self, do: Any, q: Any, k: Any, v: Any, *_: Any, deterministic: bool, **__: Any) -> Any:
        self.asked.append(deterministic)
        return q.clone(), k.clone(), v.clone()


@pytest.mark.parametrize(("asked", "compiled"), [(False, False), (True, False), (True, True)])
def test_determinism_is_what_pytorchs_flag_says_in_forward(
    asked: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in backward, which may run much later. PyTorch refuses to run with it what was compiled without."""
    torch._dynamo.reset()
    recorder = Recorder()
    monkeypatch.setattr(operators, "find_impl", lambda *_, **__: recorder)
    function = torch.compile(neighborhood_attention, backend="aot_eager") if compiled else neighborhood_attention
    q, k, v = make_qkv(8, requires_grad=True)
    torch.use_deterministic_algorithms(asked)
    out = function(q, k, v)
    torch.use_deterministic_algorithms(not asked)
    out.sum().backward()
    assert recorder.asked == [asked]


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", ON_GPUS)
def test_kept_like_is_what_is_kept(case: str) -> None:
    from cute_kernels import neighborhood as cute

    q, k, v = make_qkv(75, dim=64, dtype=torch.bfloat16, device="cuda")
    window = {"kernel_size": 7, "dilation": 1, "softmax_scale": None, "boundary": "truncate", "causal": False}
    module = cute if case == "cute" else algorithms
    options = {**window, **ON_GPUS[case]}
    kept, like = module.forward(q, k, v, **options)[1], module.kept_like(q, k, v, **options)
    assert kept is not None
    assert (kept.shape, kept.dtype, kept.stride()) == (like.shape, like.dtype, like.stride())
