"""One check of the backward from probabilities against fp64, shared by all ways to run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ascend_kernels.neighborhood import reference
from bench import oracles
from dispatch import neighborhood_attention_backward
from tests.support.helpers import assert_within_budget, make_qkv
from tests.support.neighborhood_loops import pairs_of

WINDOW = {"kernel_size": 7, "dilation": 1, "softmax_scale": None, "boundary": "truncate", "causal": False}


def dense_of(band: Tensor, window: dict[str, Any]) -> Tensor:
    """Probabilities of all pairs `[B,H,N,N]`."""
    return pairs_of(band, **{name: value for name, value in window.items() if name != "softmax_scale"})


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
    dense: bool = False,
    attn_dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """do, q, k, v and probabilities, and all options of the window.

    Args:
        head_major: tensors are `[B,H,N,D]` in memory.
        dense: probabilities of all pairs, instead of the band.
        options: of the window, where they differ from `WINDOW`.
    """
    window = {**WINDOW, **options}
    shape = {"batch": batch, "dtype": dtype, "device": device}
    q, k, v = make_qkv(tokens, heads, kv_heads, dim, seed=tokens, **shape)  # type: ignore[arg-type]
    do = make_qkv(tokens, heads, kv_heads, dim, seed=tokens + 1, **shape)[0]  # type: ignore[arg-type]
    attn = reference.neighborhood_attention(q.double(), k.double(), v.double(), **window)[1].to(attn_dtype)
    if dense:
        attn = dense_of(attn, window)
    tensors: tuple[Tensor, ...] = (do, q, k, v)
    if head_major:
        tensors = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors)
    return (*tensors, attn), window


def check(backend: str, tokens: int, *, path: str = "auto", **options: Any) -> None:
    """Gradients of the public function within the budget of helpers.py; `options` as of `make`."""
    inputs, window = make(tokens, **options)
    got = neighborhood_attention_backward(*inputs, **window, path=path, backend=backend)
    assert_gradients(got, inputs, window, f"N={tokens} {path} {options}")


def assert_gradients(got: tuple[Tensor, ...], inputs: tuple[Tensor, ...], window: dict[str, Any], name: str) -> None:
    """Each within the budget of helpers.py, and a rounding."""
    *tensors, attn = inputs
    q, scale = tensors[1], window["softmax_scale"]
    p = dense_of(attn, window) if attn.shape[-1] == window["kernel_size"] else attn
    exact = oracles.gradients_from_probabilities(*(tensor.double() for tensor in (*tensors, p)), scale)
    low = oracles.gradients_from_probabilities(*tensors, p, scale)
    rounding = q.shape[-1] * torch.finfo(torch.float32).eps  # ds is a difference of sums over D, which may cancel
    for gradient, mine, truth, theirs in zip(("dq", "dk", "dv"), got, exact, low, strict=True):
        assert mine.dtype == q.dtype
        assert_within_budget(mine, truth, theirs, f"{gradient} of {name}", slack=rounding)
