"""Neighborhood attention as PyTorch operators with autograd, for torch.compile (see nsa/common/operators.py).

nsa_kernels::neighborhood_attention             out and the tensor saved for backward; differentiable
nsa_kernels::neighborhood_attention_backward    dq, dk, dv

`backward` is True if gradients are needed, because tensors inside an operator do not require any. `deterministic` is
the value of PyTorch's flag in forward, on which compiled graphs are guarded.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

import dispatch
from nsa.common.autocast import autocast_off
from nsa.common.derivatives import determinism_is_asked_for, needs_grad
from nsa.common.operators import register_double_backward_error, register_operator
from nsa.neighborhood.autograd import Gradients, gradients
from nsa.neighborhood.validate import Window, resolve

FORWARD, BACKWARD = "nsa_kernels::neighborhood_attention", "nsa_kernels::neighborhood_attention_backward"
_OPTIONS = (
    "int kernel_size, int dilation, float? softmax_scale, str boundary, bool causal, str algorithm, str? backend, "
    "bool backward"
)
SCHEMAS = {
    FORWARD: f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    BACKWARD: f"(Tensor do, Tensor q, Tensor k, Tensor v, Tensor out, Tensor saved, {_OPTIONS}, "
    "bool deterministic) -> "
    "(Tensor, Tensor, Tensor)",
}


def call_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
    """Call neighborhood_attention's operator; `options` in the order of the schema, without `backward`."""
    out: Tensor = torch.ops.nsa_kernels.neighborhood_attention(q, k, v, *options, needs_grad(q, k, v))[0]
    return out


def _resolve(
    q: Tensor, k: Tensor, v: Tensor, *options: Any, deterministic: bool
) -> tuple[dispatch.Impl, dict[str, Any]]:
    """Return the backend, and the keyword arguments of its forward."""
    *window_options, algorithm, backend, backward = options
    window = Window(*window_options)
    flags = {"backward": backward, "deterministic": deterministic}
    impl = resolve(q, k, v, window, algorithm, backend, band=False, **flags)
    keywords = asdict(window)
    if impl.training is None:
        keywords["return_band"] = False
    else:
        keywords["backend"] = impl.backend
        if algorithm in ("band", "dense"):
            keywords["algorithm"] = algorithm
    return impl, keywords


@torch.no_grad()
def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    impl, keywords = _resolve(q, k, v, *options, deterministic=determinism_is_asked_for())
    with autocast_off(q.device.type):
        out, saved, *_ = impl.load()(q, k, v, **keywords)
    return out, q.new_empty(0) if impl.training is None else saved


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    impl, keywords = _resolve(q, k, v, *options, deterministic=determinism_is_asked_for())
    training = impl.load_training()
    return q.new_empty(q.shape), q.new_empty(0) if training is None else training.kept_like(q, k, v, **keywords)


@torch.no_grad()
def _backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensor, *options: Any) -> Gradients:
    deterministic = options[-1]
    impl, keywords = _resolve(q, k, v, *options[:-1], deterministic=deterministic)
    with autocast_off(do.device.type):
        return gradients(impl, do, q, k, v, out, saved, keywords, deterministic)


def _backward_fake(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    out, saved = output
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, saved)
    ctx.options, ctx.deterministic = options, determinism_is_asked_for()


def _differentiate(ctx: Any, do: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    results: tuple[Tensor | None, ...] = (None, None, None)
    if do is not None:
        results = torch.ops.nsa_kernels.neighborhood_attention_backward(
            do, *ctx.saved_tensors, *ctx.options, ctx.deterministic
        )
    return (*results, *[None] * len(ctx.options))


register_operator(FORWARD, SCHEMAS[FORWARD], _forward, _forward_fake)
register_operator(BACKWARD, SCHEMAS[BACKWARD], _backward, _backward_fake)
torch.library.register_autograd(FORWARD, _differentiate, setup_context=_save)
register_double_backward_error(BACKWARD, "neighborhood_attention")
