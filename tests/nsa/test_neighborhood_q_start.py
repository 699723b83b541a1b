"""Neighborhood attention of queries that continue a sequence: against loops, and chunks against the whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dispatch
from ascend_kernels.neighborhood import reference, support
from dispatch import neighborhood_attention, neighborhood_attention_backward, neighborhood_attention_forward
from tests.support.causality import perturbed
from tests.support.helpers import make_qkv
from tests.support.neighborhood_loops import attend, pairs_of

WINDOWS = st.fixed_dictionaries(
    {
        "kernel_size": st.integers(1, 12),
        "dilation": st.integers(1, 5),
        "boundary": st.sampled_from(["truncate", "shift"]),
        "causal": st.just(True),
    }
)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Tokens, and a range of them."""
    tokens = draw(st.integers(1, 24))
    first, last = sorted(draw(st.integers(0, tokens)) for _ in range(2))
    return tokens, first, last


@settings(max_examples=40)
@given(cut=cuts(), kv_heads=st.integers(1, 2), group=st.integers(1, 2), window=WINDOWS)
def test_agrees_with_the_loops(cut: tuple[int, int, int], kv_heads: int, group: int, window: dict[str, Any]) -> None:
    """Rows of the loops over all tokens up to the last query, with the band and the LSE."""
    tokens, first, stop = cut
    q, k, v = make_qkv(tokens, kv_heads * group, kv_heads, dim=3, seed=tokens)
    out, band = neighborhood_attention_forward(q[:, first:stop], k, v, q_start=first, **window)
    _, _, lse = reference.neighborhood_attention(q[:, first:stop], k[:, :stop], v[:, :stop], **window)
    if first == stop:
        assert out.shape == (1, 0, kv_heads * group, 3)
        return
    whole = attend(*(x[:, :stop].tolist() for x in (q, k, v)), scale=1 / math.sqrt(3), **window)
    expected = [torch.tensor(x, dtype=torch.float64) for x in whole]
    torch.testing.assert_close(out, expected[0][:, first:], rtol=0, atol=1e-12)
    torch.testing.assert_close(band, expected[1][:, :, first:], rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, expected[2][:, :, first:], rtol=0, atol=1e-12)


@settings(max_examples=25)
@given(cut=cuts(), window=WINDOWS)
def test_chunks_and_their_gradients_are_those_of_the_whole(cut: tuple[int, int, int], window: dict[str, Any]) -> None:
    """Rows for any cut; shares of dk and dv add up, by autograd, from the band and from all pairs."""
    tokens, first, stop = cut
    q, k, v = make_qkv(tokens, 4, 2, dim=3, seed=tokens, requires_grad=True)
    do = torch.randn_like(q)
    expected = neighborhood_attention(q, k, v, **window)
    gradients = torch.autograd.grad(expected, (q, k, v), do)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for start, end in ((0, first), (first, stop), (stop, tokens)):
        rows = slice(start, end)
        out = neighborhood_attention(q[:, rows], k, v, q_start=start, **window)
        torch.testing.assert_close(out, expected[:, rows], rtol=0, atol=1e-12)
        shares = torch.autograd.grad(out, (q, k, v), do[:, rows])
        for total, share in zip(sums, shares, strict=True):
            total += share
        assert not shares[1][:, end:].any()
        with torch.no_grad():
            _, band = neighborhood_attention_forward(q[:, rows], k, v, q_start=start, **window)
            own = shares[0][:, rows], *shares[1:]
            given = [band]
            if window["kernel_size"] != end:  # as many columns as a band has are one
                _, whole = neighborhood_attention_forward(q[:, :end], k[:, :end], v[:, :end], **window)
                given.append(pairs_of(whole, **window)[:, :, rows])
            for attn in given:
                got = neighborhood_attention_backward(do[:, rows], q[:, rows], k, v, attn, q_start=start, **window)
                torch.testing.assert_close(got, own, rtol=0, atol=1e-11)
    torch.testing.assert_close(sums, list(gradients), rtol=0, atol=1e-11)


@pytest.mark.parametrize("start", [0, 5, 29])
def test_nothing_depends_on_later_tokens(start: int) -> None:
    q, k, v = make_qkv(30)
    window: dict[str, Any] = {"kernel_size": 4, "dilation": 3, "causal": True}
    out = neighborhood_attention(q[:, start:], k, v, **window)
    for at in range(start, 30):
        other = neighborhood_attention(*perturbed((q[:, start:], k, v), at), **window)
        assert torch.equal(other[:, : at + 1 - start], out[:, : at + 1 - start])
        assert at == 29 or not torch.equal(other, out)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "q_start must be at least 0, got -1", {"q_start": -1}),
        (ValueError, r"q_start must be from 0 to N_k - N_q = 20 - 8 = 12, got 13", {"q_start": 13}),
        (TypeError, r"q_start must be an integer, got tensor\(\[3\]\)", {"q_start": torch.tensor([3])}),
        (ValueError, "q_start goes with causal=True, got causal=False and q_start=3", {"q_start": 3, "causal": False}),
        (ValueError, "causal=False needs as many queries as keys, got N_q=8, N_k=20", {"causal": False}),
        (ValueError, r"k must have the shape \[1, 8, 2, 16\], got \[1, 7, 2, 16\]", {"k": torch.zeros(1, 7, 2, 16)}),
        (ValueError, r"v must have the shape \[1, 20, 2, 16\], got \[1, 19, 2, 16\]", {"v": torch.zeros(1, 19, 2, 16)}),
    ],
)
def test_errors_name_argument_and_value(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    q, k, v = make_qkv(20, dtype=torch.float32)
    arguments: dict[str, Any] = {"q": q[:, :8], "k": k, "v": v, "causal": True, **changes}
    for function in (neighborhood_attention, neighborhood_attention_forward):
        with pytest.raises(error, match=message):
            function(**arguments)
    with pytest.raises(error, match=message):
        neighborhood_attention_backward(do=q[:, :8], attn=torch.zeros(1, 4, 8, 7), **arguments)


@pytest.mark.parametrize("check", [support.check_gpu, support.check_narrow_gpu, support.check_npu])
def test_triton_refuses_by_name(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gpu_refusal", "npu_refusal"):
        monkeypatch.setattr(support, name, lambda _: None)
    options = {"shape": (1, 20, 4, 16), "causal": True, "first_token": 12}
    call = dispatch.Call("neighborhood_attention", "cuda:0", torch.float32, options=options)
    assert check(call) == "needs as many queries as keys (cute and reference do not), got q_start=12"
    options["first_token"] = 0
    assert check(call) is None
