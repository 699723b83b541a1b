"""One check of neighborhood attention's kernels against fp64, shared by the interpreter's tests and those on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ascend_kernels import reference
from dispatch import neighborhood_attention
from tests.helpers import assert_within_budget, make_qkv

NAMES = ("output", "dq", "dk", "dv")


def check(
    backend: str,
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
    algorithm: str = "auto",
    slack: float | None = None,
    **options: Any,
) -> None:
    """Output and gradients of the public op within the budget of helpers.py.

    Args:
        head_major: inputs are `[B,H,N,D]` in memory.
        packed: inputs are parts of one tensor `[B,N,H+2*H_kv,D]`, so their strides are not those of the output.
        slack: allowance for differences of sums over D that cancel; None: what fp32 needs for numbers about 1.
        options: keywords of neighborhood_attention that change the result.
    """
    inputs = make_qkv(tokens, heads, kv_heads, dim, batch=batch, dtype=dtype, device=device, seed=tokens)
    if head_major:
        q, k, v = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs)
        inputs = (q, k, v)
    if packed:
        q, k, v = torch.cat(inputs, 2).split([heads, kv_heads, kv_heads], 2)
        inputs = (q, k, v)
    do = make_qkv(tokens, heads, kv_heads, dim, batch=batch, dtype=dtype, device=device, seed=tokens + 1)[0]
    got = _with_gradients(
        lambda *qkv: neighborhood_attention(*qkv, algorithm=algorithm, backend=backend, **options), inputs, do
    )
    exactly = partial(reference.neighborhood_attention, **options, return_band=False)
    oracle = _with_gradients(lambda *qkv: exactly(*qkv)[0], _fp64(inputs), do)
    low = _with_gradients(lambda *qkv: exactly(*qkv, compute_dtype=dtype)[0], inputs, do)
    for name, mine, exact, theirs in zip(NAMES, got, oracle, low, strict=True):
        assert mine.dtype == dtype
        # Sums over D in fp32, in another order than PyTorch's; ds is a difference of two, which may cancel
        rounding = dim * torch.finfo(torch.float32).eps if slack is None else slack
        assert_within_budget(mine, exact, theirs, f"{name} of N={tokens} {options}", slack=rounding)


def _fp64(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.double() for tensor in tensors)


def _with_gradients(function: Any, inputs: tuple[Tensor, ...], do: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]  # with their strides
    out = function(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, do.to(out.dtype)))
