"""Neighborhood attention: its calls, and their operators (see nsa/common/operators.py).

nsa_kernels::neighborhood_attention             out and the tensor saved for backward; differentiable
nsa_kernels::neighborhood_attention_backward    dq, dk, dv

`backward` is True if gradients are needed, because tensors inside an operator do not require any. `deterministic` is
the value of PyTorch's flag in forward, on which compiled graphs are guarded.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import dispatch
from nsa.common.checks import check_choice
from nsa.common.derivatives import determinism_is_asked_for, needs_grad
from nsa.common.operators import AttentionCall, register_backward, register_forward
from nsa.common.resolve import find_impl
from nsa.neighborhood.validate import ALGORITHMS, Window, check_tensors, keys_until

_OPTIONS = (
    "int kernel_size, int dilation, float? softmax_scale, str boundary, bool causal, str algorithm, str? backend, "
    "bool backward"
)
FORWARD = "nsa_kernels::neighborhood_attention", f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)"
BACKWARD = (
    "nsa_kernels::neighborhood_attention_backward",
    f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor saved, {_OPTIONS}, bool deterministic) -> "
    "(Tensor, Tensor, Tensor)",
)


class NeighborhoodCall(AttentionCall):
    """q, k and v; the options of a Window, `deterministic`, and those of the backend."""

    op = "neighborhood_attention"

    @property
    def forward_options(self) -> dict[str, Any]:
        return {name: option for name, option in self.options.items() if name != "deterministic"}

    def forward(self) -> Tensor:
        options = self.forward_options
        if "algorithm" in options:
            options["keep"] = False
        out: Tensor = self.impl.load()(*self.tensors, **options)[0]
        return out


def resolve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: Window,
    *,
    algorithm: str,
    backend: str | None,
    band: bool = False,
    backward: bool | None = None,
    deterministic: bool | None = None,
) -> NeighborhoodCall:
    """Check all arguments and find a backend that supports the call.

    Args:
        band: True if probabilities are also returned.
        backward: True if gradients are needed. Default: None, which means if a tensor requires them.
        deterministic: True if gradients must be bitwise repeatable. Default: None, which means PyTorch's flag.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_tensors(q, k, v)
    keys_until(q, k, window.causal, None)
    options = dict(vars(window))
    deterministic = determinism_is_asked_for() if deterministic is None else deterministic
    facts = {**options, "algorithm": algorithm, "band": band, "deterministic": deterministic, **sizes(q, k)}
    backward = needs_grad(q, k, v) if backward is None else backward
    impl = find_impl(dispatch.Call("neighborhood_attention", q.device, q.dtype, backward, options=facts), backend)
    if impl.training is None:
        options["return_band"] = band
    else:
        options |= {"backend": impl.backend, "deterministic": deterministic}
        if band or algorithm in ("band", "dense"):
            options["algorithm"] = "band" if band else algorithm
    return NeighborhoodCall(impl, backward, (q, k, v), options)


def sizes(q: Tensor, k: Tensor) -> dict[str, object]:
    """Options of dispatch.Call: `shape` `[B,N_k,H,D]`, and `first_token`, the token index of the first query."""
    return {"shape": (q.shape[0], k.shape[1], *q.shape[2:]), "first_token": k.shape[1] - q.shape[1]}


def _resolve(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> NeighborhoodCall:
    window = Window(**{name: options.pop(name) for name in Window.__match_args__})
    return resolve(q, k, v, window, **options)


register_forward(*FORWARD, _resolve)
register_backward("neighborhood_attention", FORWARD, BACKWARD, _resolve, ("q", "k", "v"))
