"""One check of the band's kernels against fp64, shared by all ways to run them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ascend_kernels.neighborhood import band as band_attention
from bench import oracles
from nsa.neighborhood.api import neighborhood_attention_backward, neighborhood_attention_forward
from tests.support.helpers import assert_within_budget, make_qkv
from tests.support.neighborhood_loops import pairs_of, slots_of

NAMES = ("output", "band", "dq", "dk", "dv")

Run = Callable[[Callable[[], Any]], Any]
"""Calls a function and gives its results: as it is, or with its launches run in another way."""


def make(
    tokens: int,
    *,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 16,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    layout: str = "token-major",
    softmax_scale: float | None = None,
    logits: float = 1.0,
    **window: Any,
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """do, q, k, v, and all options.

    Args:
        layout: "token-major", "head-major" (`[B,H,N,D]` in memory), or "strided" (every second feature of a tensor).
        logits: standard deviation of the logits, if `softmax_scale` is None.
        window: kernel_size, dilation, boundary, causal.
    """
    window = {"kernel_size": 7, "dilation": 1, "boundary": "truncate", "causal": False, **window}
    many = {"batch": batch, "dtype": dtype, "device": device}
    q, k, v = make_qkv(tokens, heads, kv_heads, dim, seed=tokens, **many)  # type: ignore[arg-type]
    do = make_qkv(tokens, heads, kv_heads, dim, seed=tokens + 1, **many)[0]  # type: ignore[arg-type]
    inputs = tuple(_laid_out(tensor, layout) for tensor in (do, q * logits, k, v))
    return inputs, {**window, "softmax_scale": softmax_scale}


def results(run: Run, backend: str, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> dict[str, Any]:
    """What the public functions give, and what they launch for other lengths: gradients, expanded probabilities."""
    tokens = inputs[0].shape[1]
    out, band = run(partial(neighborhood_attention_forward, *inputs[1:], **options, backend=backend))
    inputs = (*inputs, band)
    gradients = run(partial(neighborhood_attention_backward, *inputs, **options, path="sparse", backend=backend))
    fused = tokens >= band_attention.SEPARATE_TOKENS
    others = run(partial(band_attention.backward, *inputs, **options, backend=backend, fused=fused))
    found = {"out": out, "band": band, "gradients": gradients, "others": others}
    if tokens * tokens <= 1 << 16:
        window = {name: options[name] for name in ("dilation", "boundary", "causal")}
        found["dense"] = run(partial(band_attention.expand_band, band, **window, backend=backend))
    return found


def check(run: Run, backend: str, tokens: int, **options: Any) -> None:
    """All results within the budget of helpers.py, and the expansion exact; `options` as of `make`.

    On CPU tensors fused and separate gradients also agree in every bit: what runs them rounds each operation as it is
    written. A GPU's compiler fuses multiplications and additions of each kernel as it likes.
    """
    inputs, options = make(tokens, **options)
    got = results(run, backend, inputs, options)
    do, q, k, v = inputs
    out, band = got["out"], got["band"]
    if q.device.type == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(got["gradients"], got["others"], strict=True))
    assert band.dtype == torch.float32
    assert all(tensor.dtype == q.dtype for tensor in (out, *got["gradients"], *got["others"]))

    exact = _oracle(q.double(), k.double(), v.double(), do.double(), options)
    low = _oracle(q, k, v, do, options)
    rounding = q.shape[-1] * torch.finfo(torch.float32).eps  # sums over D in fp32, in another order than PyTorch's
    for gradients in (got["gradients"], got["others"]):
        for name, mine, truth, theirs in zip(NAMES, (out, band, *gradients), exact, low, strict=True):
            assert_within_budget(mine, truth, theirs, f"{name} of N={tokens} {options}", slack=rounding)
    assert not band[exact[1] == 0].any(), "slots without a key"
    assert (exact[1][band == 0] < torch.finfo(torch.float32).tiny).all(), "slots with a key"
    if "dense" in got:
        assert torch.equal(got["dense"], pairs_of(band, **_window(options)))


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    if layout == "head-major":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "strided":
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1).flatten(-2)[..., ::2]
    return tensor


def _oracle(q: Tensor, k: Tensor, v: Tensor, do: Tensor, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """out, the band in the dtype of sums, dq, dk, dv."""
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out, _ = oracles.neighborhood_attention(*leaves, **options)
    exact = oracles.wide(q.dtype)
    keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2).to(exact)
    scale = q.shape[-1] ** -0.5 if options["softmax_scale"] is None else options["softmax_scale"]
    visible = oracles.neighbors(torch.arange(q.shape[1], device=q.device), q.shape[1], **_window(options))
    logits = torch.einsum("bihd,bjhd->bhij", q.to(exact), keys) * scale
    p = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    slots = slots_of(q.shape[1], **_window(options)).to(q.device)
    band = torch.nn.functional.pad(p, [0, 1]).gather(-1, slots.expand(*p.shape[:2], *slots.shape))
    return (out.detach(), band, *torch.autograd.grad(out, leaves, do))


def _window(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "softmax_scale"}
