"""Neighborhood attention by FlashAttention-4's window: its views on a CPU, with a twin of the window, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dispatch
from ascend_kernels.neighborhood import reference
from bench import oracles
from cute_kernels import neighborhood as cute
from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4 import rules as fa4_rules
from cute_kernels.runtime import device
from dispatch import neighborhood_attention
from tests.support import cases
from tests.support.attention_gradients import Branch, gradients
from tests.support.cute_cases import SLACK
from tests.support.hardware import NEIGHBORHOOD
from tests.support.helpers import make_qkv
from tests.support.neighborhood_cases import check

BF16, FP16 = torch.bfloat16, torch.float16

# Views, on a CPU: everything but the window itself is real


class Twin:
    """FlashAttention-4's window in fp64, which writes where it is told to, and what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, ...]] = []

    def window(
        self, q: Tensor, k: Tensor, v: Tensor, *, into: tuple[Tensor, Tensor], scale: float, **reach: int
    ) -> None:
        assert all(map(device.vectorized, (q, k, v, *into)))
        self.calls.append((q, k, v, into[0]))
        for target, x in zip(into, oracles.attention(q, k, v, seen(q, k, **reach), scale, q.dtype), strict=True):
            target.copy_(x)

    def window_backward(self, of: fa4.Gradients, *, scale: float, deterministic: bool = False, **reach: int) -> None:
        assert all(map(device.vectorized, vars(of).values()))
        self.calls.append((of.q, of.k, of.v, of.o))
        visible, delta = seen(of.q, of.k, **reach), (of.o * of.do).sum(-1).transpose(1, 2)
        assert bool(visible.any(0).all()), "FlashAttention-4 may not write dk and dv of a tile of keys that no row sees"
        branch = Branch(visible, of.lse, delta)
        for target, x in zip(
            (of.dq, of.dk, of.dv), gradients(of.q, of.k, of.v, of.do, [branch], scale, low=False), strict=True
        ):
            target.copy_(x)


def seen(q: Tensor, k: Tensor, *, left: int, right: int) -> Tensor:
    """Keys in the window of each row, bool `[N,N_k]`."""
    assert max(left, right) + max(q.shape[1], k.shape[1]) < 2**31, "FlashAttention-4 adds them in int32"
    row, key = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])
    return (key >= row - left) & (key <= row + right)


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Twin:
    one = Twin()
    monkeypatch.setattr(fa4, "window", one.window)
    monkeypatch.setattr(fa4, "window_backward", one.window_backward)
    return one


contiguous = Tensor.contiguous


def head_major(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sequence_minor(x: Tensor) -> Tensor:
    """`[N,B,H,D]` in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def projected_together(x: Tensor) -> Tensor:
    """A token's heads between others of the same projection."""
    return torch.cat([x, x, x], 2)[:, :, x.shape[2] : 2 * x.shape[2]]


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (contiguous, head_major, sequence_minor, projected_together)


def assert_like_the_reference(qkv: tuple[Tensor, ...], do: Tensor, **options: Any) -> None:
    """Forward and backward of the module against autograd of the reference, in fp64."""
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    expected, _, _ = reference.neighborhood_attention(*leaves, **options)
    gradients = torch.autograd.grad(expected, leaves, do)
    window = {"softmax_scale": None, "boundary": "truncate", "causal": False, **options, "backend": "cute"}
    out, lse = cute.forward(*qkv, **window)
    torch.testing.assert_close(out, expected.detach(), rtol=0, atol=1e-6)  # lse, which backward reads, is fp32
    for got, wanted in zip(cute.backward(do, *qkv, out, lse, **window), gradients, strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 23),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 4]),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
    window=st.fixed_dictionaries(
        {"kernel_size": st.integers(1, 30), "dilation": st.integers(1, 25), "causal": st.booleans()}
    ),
)
def test_views(
    twin: Twin,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    batch: int,
    kv_heads: int,
    group: int,
    layouts: tuple[Callable[[Tensor], Tensor], ...],
    window: dict[str, Any],
) -> None:
    heads = kv_heads * group
    q, k, v = make_qkv(tokens, heads, kv_heads, 4, batch=batch, seed=tokens)
    do, _, _ = make_qkv(tokens, heads, kv_heads, 4, batch=batch, seed=tokens + 1)
    q, k, v, do = (layout(x) for layout, x in zip(layouts, (q, k, v, do), strict=True))
    assert_like_the_reference((q, k, v), do, **window)
    if window["causal"]:
        monkeypatch.setattr(fa4_rules, "WINDOW_ALIGNMENT", 4)
        for first in {tokens // 2, tokens - 1, tokens}:
            twin.calls.clear()
            assert_like_the_reference((q[:, first:], k, v), do[:, first:], **window)
            # By whole tiles in the forward, so that tiles of keys stay as they are, and to the row in the backward
            for i, (rows, keys, _, _) in enumerate(twin.calls):
                more = 3 if i < len(twin.calls) // 2 else 0
                assert keys.shape[1] < window["kernel_size"] + rows.shape[1] + more, "keys before all windows"


@pytest.mark.parametrize(
    ("layout", "tokens", "batch", "dilation", "calls"),
    [
        (contiguous, 24, 3, 4, 1),
        (contiguous, 23, 3, 4, 2),
        (projected_together, 23, 1, 4, 2),
        (projected_together, 24, 3, 4, 3),
        (head_major, 24, 5, 4, 4),
        (sequence_minor, 23, 3, 4, 3 + 1),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_few_calls_and_no_copies(
    twin: Twin, layout: Callable[[Tensor], Tensor], tokens: int, batch: int, dilation: int, calls: int
) -> None:
    inputs = [layout(x) for x in make_qkv(tokens, 4, 2, 4, batch=batch)]
    window = {"kernel_size": 5, "dilation": dilation, "softmax_scale": None, "boundary": "truncate", "causal": False}
    out, lse = cute.forward(*inputs, **window, backend="cute")
    assert len(twin.calls) == calls
    for views in twin.calls:
        for view, whole in zip(views, (*inputs, out), strict=True):
            assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert lse.shape == (batch, dilation, 4, -(-tokens // dilation // 4) * 4)


def test_grids_hold_all_classes(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute, "MAX_GRID", 5)
    for layout in (contiguous, projected_together):
        q, k, v = (layout(x) for x in make_qkv(23, 2, 1, 4))
        assert_like_the_reference((q, k, v), q, kernel_size=3, dilation=9)
    assert all(view.shape[0] <= 5 and view.shape[2] <= 5 for views in twin.calls for view in views)


@pytest.mark.parametrize("group", [1, 2])
def test_sums_of_backward_are_bounded(twin: Twin, monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """At most three heads' sums at a time."""
    q, k, v = make_qkv(20, 7 * group, 7, 4)
    per_head = 128 * 4 * 4 * (group + 2 * (group > 1))
    monkeypatch.setattr(cute, "SUMS_BYTES", 3 * per_head)
    assert_like_the_reference((q, k, v), q, kernel_size=3, dilation=1)
    _, *backward = twin.calls
    assert [views[1].shape[2] for views in backward] == [3, 3, 1]


def test_rows_that_are_not_aligned_are_copied(twin: Twin) -> None:
    q, k, v = make_qkv(20, 2, 1, 4)
    shifted = torch.cat([q.flatten(), q.new_zeros(1)])[1:].view(q.shape)
    assert not device.vectorized(shifted)
    assert_like_the_reference((shifted, k, v), q.sum().expand(q.shape), kernel_size=3, dilation=2)


@pytest.mark.parametrize("shape", [(1, 0, 2, 4), (0, 5, 2, 4)], ids=str)
def test_nothing_to_compute(twin: Twin, shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape, dtype=torch.float64)
    assert_like_the_reference((empty, empty, empty), empty, kernel_size=3, dilation=2)
    assert not twin.calls


# Refusals


def ask(*, dtype: torch.dtype = BF16, backward: bool = True, **options: Any) -> dict[str, str | None]:
    call = dispatch.Call("neighborhood_attention", "cuda:0", dtype, backward=backward, options=options)
    return {verdict.impl.backend: verdict.reason for verdict in dispatch.explain(call)}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"shape": (2, 4099, 8, 64), "dilation": 3, "boundary": "truncate", "algorithm": "auto", "band": False}, None),
        ({"shape": (2, 4099, 8, 128), "boundary": "shift", "causal": True, "algorithm": "flash"}, None),
        ({"dtype": FP16, "shape": (1, 0, 8, 128)}, None),
        ({"shape": (1, 1 << 25, 8, 128), "backward": False}, None),
        ({"shape": (1, 1 << 25, 8, 128), "dilation": 4}, None),
        ({"dtype": torch.float32}, "takes bfloat16 and float16, got float32"),
        ({"shape": (1, 9, 1, 80)}, "takes head dims 64 and 128, got D=80"),
        ({"boundary": "shift"}, "takes boundary='truncate' only"),
        ({"band": True}, "never has the band"),
        ({"algorithm": "dense"}, "has algorithm 'flash' only, got 'dense'"),
        ({"shape": (70_000, 9, 1, 64)}, "up to 65535 sequences and heads, got B=70000, H=1"),
        ({"shape": (1, 1 << 30, 1, 64)}, "takes N below 1073741824, got 1073741824"),
        ({"shape": (1, 1 << 25, 8, 128)}, "in backward, got 33554432 rows of 128"),
    ],
    ids=str,
)
def test_takes_or_refuses(options: dict[str, Any], reason: str | None) -> None:
    answer = ask(**options)["cute"]
    assert answer is None if reason is None else reason in (answer or "")


@pytest.mark.usefixtures("hopper")
def test_goes_before_triton_where_windows_are_wide_and_it_can_run() -> None:
    def chosen(**options: Any) -> str:
        return dispatch.resolve(dispatch.Call("neighborhood_attention", "cuda:0", BF16, options=options)).backend

    assert chosen(boundary="truncate", kernel_size=97) == "cute"
    assert chosen(boundary="truncate", kernel_size=96) == "triton"
    assert chosen(boundary="shift", kernel_size=97) == "triton"


# On a GPU

GPU_CASES: dict[str, dict[str, Any]] = {
    "one token": {"tokens": 1, "kernel_size": 7},
    "even": {"tokens": 2305, "dim": 64, "kernel_size": 8, "dilation": 2, "batch": 2},
    "even, grouped, dilated": {"tokens": 4099, "kernel_size": 64, "dilation": 3, "heads": 8, "kv_heads": 2},
    "causal": {"tokens": 3001, "kernel_size": 300, "causal": True, "batch": 2, "heads": 4, "kv_heads": 1},
    "causal, shift, dilated": {"tokens": 1500, "kernel_size": 9, "causal": True, "boundary": "shift", "dilation": 3},
    "more keys than tokens": {"tokens": 257, "kernel_size": 1000, "heads": 4, "kv_heads": 1},
    "more classes than tokens": {"tokens": 70, "kernel_size": 5, "dilation": 1000},
    "a class each, nearly": {"tokens": 300, "kernel_size": 5, "dilation": 299, "softmax_scale": 0.3},
    "head-major": {"tokens": 2049, "kernel_size": 9, "head_major": True, "heads": 4, "dilation": 2, "batch": 2},
    "long": {"tokens": 65536, "kernel_size": 63, "dilation": 8},
}
"""Others are drawn in test_fuzz.py."""


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("case", "dtype"), cases.product(GPU_CASES, [BF16, FP16]), ids=str)
def test_on_a_gpu(case: str, dtype: torch.dtype) -> None:
    check("cute", device="cuda", dtype=dtype, slack=SLACK, **{"dim": 128, **GPU_CASES[case]})


@pytest.mark.cuda
@pytest.mark.filterwarnings("default")
@NEIGHBORHOOD
def test_deterministic_where_pytorch_is_asked_for_it() -> None:
    qkv = make_qkv(4001, 8, 2, 128, dtype=BF16, device="cuda", requires_grad=True)
    do = torch.randn(qkv[0].shape, device="cuda", dtype=BF16)

    def gradients() -> tuple[Tensor, ...]:
        out = neighborhood_attention(*qkv, kernel_size=900, backend="cute")
        return torch.autograd.grad(out, qkv, do)

    torch.use_deterministic_algorithms(True)
    expected = gradients()
    for _ in range(5):
        assert all(map(torch.equal, gradients(), expected))
