"""Neighborhood attention as an operator: its layers compile, and what it keeps for backward and asks of a backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ascend_kernels.neighborhood import algorithms
from dispatch import neighborhood_attention
from nsa import NeighborhoodAttention, NeighborhoodAttentionLayer
from nsa.neighborhood import operators
from tests.support.helpers import make_qkv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile

ON_GPUS: dict[str, dict[str, Any]] = {
    "triton": {"backend": "triton", "dilation": 3},
    "band": {"backend": "triton", "algorithm": "band", "kernel_size": 4},
    "cute": {"backend": "cute", "kernel_size": 33, "dilation": 2},
}


@pytest.mark.parametrize("kind", [NeighborhoodAttention, NeighborhoodAttentionLayer])
def test_the_layer_compiles(kind: type[torch.nn.Module]) -> None:
    torch._dynamo.reset()
    layer = kind(32, 4, num_kv_heads=2, kernel_size=5, dilation=2)
    hidden = torch.randn(2, 40, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden), layer(hidden))


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
