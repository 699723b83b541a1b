"""One check of neighborhood attention's kernels against fp64, shared by all ways to run them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import oracles
from dispatch import neighborhood_attention
from tests.support.far_rows import far_apart
from tests.support.helpers import assert_within_budget, make_qkv

NAMES = ("output", "dq", "dk", "dv")
WINDOWS: dict[str, dict[str, Any]] = {
    "truncate": {},
    "shift": {"boundary": "shift"},
    "causal": {"boundary": "shift", "causal": True},
}

LARGE_LOGITS: dict[str, dict[str, Any]] = {
    "in the hundreds": {"logits": 100.0},
    "of similar keys": {"logits": 300.0, "spread": 0.1},
    "of groups": {"logits": 100.0, "heads": 4, "kv_heads": 2, "dilation": 2, "boundary": "shift"},
}


def make(
    tokens: int,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 16,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    head_major: bool = False,
    packed: bool = False,
    far: int | None = None,
    logits: float = 1.0,
    spread: float | None = None,
    **options: Any,
) -> tuple[tuple[Tensor, ...], Tensor, dict[str, Any]]:
    """q, k, v; the gradient of out; and the options that are left.

    Args:
        head_major: inputs are `[B,H,N,D]` in memory.
        packed: inputs are parts of one tensor `[B,N,H+2*H_kv,D]`, so their strides are not those of the output.
        far: a dimension of inputs and `do` along which they span more than 2^31 elements.
        logits: standard deviation of the logits, if `softmax_scale` is its default.
        spread: keys and values are those of one token plus `spread` times independent ones; None: independent.
    """
    shape = {"batch": batch, "dtype": dtype, "device": device}
    q, k, v = make_qkv(tokens, heads, kv_heads, dim, seed=tokens, **shape)  # type: ignore[arg-type]
    if spread is not None:
        k, v = (x[:, :1] + spread * x for x in (k, v))
    inputs: tuple[Tensor, ...] = (q * logits, k, v)
    if head_major:
        inputs = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs)
    if packed:
        inputs = torch.cat(inputs, 2).split([heads, kv_heads, kv_heads], 2)
    do = make_qkv(tokens, heads, kv_heads, dim, seed=tokens + 1, **shape)[0]  # type: ignore[arg-type]
    if far is not None:
        *inputs, do = far_apart((*inputs, do), far)
    return tuple(inputs), do, options


def results(
    backend: str, inputs: tuple[Tensor, ...], do: Tensor, algorithm: str = "auto", **options: Any
) -> tuple[Tensor, ...]:
    """Output and gradients of the public op."""
    call = partial(neighborhood_attention, **options, algorithm=algorithm, backend=backend)
    return _with_gradients(call, inputs, do)


def check(backend: str, tokens: int, *, algorithm: str = "auto", slack: float | None = None, **options: Any) -> None:
    """Output and gradients of the public op within the budget of helpers.py.

    Args:
        slack: allowance for differences of sums over D that cancel; None: what fp32 needs for numbers about 1 and the
            scale.
        options: of `make`, and keywords of neighborhood_attention that change the result.
    """
    inputs, do, options = make(tokens, **options)
    assert_right(results(backend, inputs, do, algorithm, **options), inputs, do, slack, **options)


def assert_right(
    got: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...],
    do: Tensor,
    slack: float | None = None,
    rows: slice = slice(None),
    **options: Any,
) -> None:
    """`check` of results that are there, of some rows."""
    dim, dtype = do.shape[-1], do.dtype
    exactly = partial(oracles.neighborhood_attention, **options)
    oracle = _with_gradients(lambda *qkv: exactly(*qkv)[0], _fp64(inputs), do)
    low = _with_gradients(lambda *qkv: exactly(*qkv)[0], inputs, do)
    for name, mine, exact, theirs in zip(NAMES, got, oracle, low, strict=True):
        assert mine.dtype == dtype
        # Sums over D in fp32, in another order than PyTorch's; ds is a difference of two, which may cancel, times scale
        larger = max(1.0, (options.get("softmax_scale") or 0.0) * dim**0.5)
        rounding = dim * torch.finfo(torch.float32).eps * larger if slack is None else slack
        parts = (x[:, rows] for x in (mine, exact, theirs))
        assert_within_budget(*parts, f"{name} of N={do.shape[1]} {options}", slack=rounding)


def _fp64(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.double() for tensor in tensors)


def _with_gradients(function: Any, inputs: tuple[Tensor, ...], do: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]  # with their strides
    out = function(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, do.to(out.dtype)))
