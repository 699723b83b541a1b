"""The backward of neighborhood attention from probabilities: meaning, arguments, routing, chunks, launches, kernels."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dispatch
from ascend_kernels.device import DEVICES, MAX_GRID
from ascend_kernels.launch import Launch, recording
from ascend_kernels.neighborhood import backward as attention_backward
from ascend_kernels.neighborhood import band, dense_backward, reference, tiling
from dispatch import neighborhood_attention, neighborhood_attention_backward
from tests.support import backward_cases, cases
from tests.support.helpers import make_qkv
from tests.support.live_memory import PeakBytes

# The meaning

windows = st.fixed_dictionaries(
    {
        "kernel_size": st.integers(1, 12),
        "dilation": st.integers(1, 4),
        "boundary": st.sampled_from(["truncate", "shift"]),
        "causal": st.booleans(),
    }
)


@settings(max_examples=40)
@given(
    tokens=st.integers(0, 24), kv_heads=st.integers(1, 2), group=st.integers(1, 2), dense=st.booleans(), window=windows
)
def test_gradients_are_autograds(tokens: int, kv_heads: int, group: int, dense: bool, window: dict[str, Any]) -> None:
    q, k, v = make_qkv(tokens, kv_heads * group, kv_heads, dim=3, seed=tokens, requires_grad=True)
    do = make_qkv(tokens, kv_heads * group, dim=3, seed=tokens + 1)[0]
    out, attn, _ = reference.neighborhood_attention(q, k, v, **window)
    expected = torch.autograd.grad(out, (q, k, v), do)
    attn = attn.detach()
    if dense and window["kernel_size"] != tokens:
        attn = backward_cases.dense_of(attn, window)
    got = neighborhood_attention_backward(do, q, k, v, attn, **window)
    assert not any(gradient.requires_grad for gradient in got)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_band_of_all_tokens_is_a_band() -> None:
    """Where kernel_size == N both shapes are one; all pairs can be given with a larger window."""
    inputs, window = backward_cases.make(9, kernel_size=9, dtype=torch.float64, attn_dtype=torch.float64)
    from_band = neighborhood_attention_backward(*inputs, **window)
    do, q, k, v, band = inputs
    dense = backward_cases.dense_of(band, window)
    assert dense.shape == band.shape
    assert not torch.equal(dense, band)
    from_dense = neighborhood_attention_backward(do, q, k, v, dense, **{**window, "kernel_size": 19})
    torch.testing.assert_close(from_band, from_dense, rtol=0, atol=1e-14)


def test_a_band_is_read_on_the_device_of_the_probabilities() -> None:
    """The meta device stands for a GPU: window starts come from the host."""
    dense = torch.empty(1, 2, 9, 9, device="meta")
    assert reference.band_of(dense, 3, 1, "shift", False).shape == (1, 2, 9, 3)


@pytest.mark.parametrize("causal", [True, False])
def test_a_key_that_no_row_of_a_class_sees_reaches_none_of_its_gradients(causal: bool) -> None:
    window: dict[str, Any] = {"kernel_size": 3, "dilation": 2, "causal": causal}
    q, k, v = make_qkv(8, requires_grad=True)
    for bad in (0, 7):
        with torch.no_grad():
            spoilt = k.clone()
            spoilt[:, bad] = math.nan
        out, band, _ = reference.neighborhood_attention(q, spoilt, v, boundary="truncate", **window)
        (dq,) = torch.autograd.grad(out.sum(), q)
        (dq_by_band, *_) = neighborhood_attention_backward(
            torch.ones_like(out), q.detach(), spoilt, v.detach(), band.detach().nan_to_num(0.0), **window
        )
        others = [row for row in range(8) if row % 2 != bad % 2]
        assert dq[:, others].isfinite().all()
        assert dq_by_band[:, others].isfinite().all()


def test_bad_arguments_are_named() -> None:
    (do, q, k, v, attn), window = backward_cases.make(8, heads=2)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "do must be a torch.Tensor, got NoneType", {"do": None}),
        (TypeError, r"do must be float32 \(q is float32\), got float16", {"do": do.half()}),
        (ValueError, r"do must have q's shape \[1, 8, 2, 16\], got \[1, 7, 2, 16\]", {"do": do[:, 1:]}),
        (TypeError, "attn must be bfloat16, float16, float32 or float64, got int64", {"attn": attn.long()}),
        (
            ValueError,
            r"attn must be a band \[1, 2, 8, 7\] or of all pairs \[1, 2, 8, 8\], got shape \[1, 2, 8, 6\]",
            {"attn": attn[..., 1:]},
        ),
        (ValueError, "attn must be on q's device cpu, got meta", {"attn": attn.to("meta")}),
        (ValueError, "path must be one of auto, sparse, dense, got 'flash'", {"path": "flash"}),
        (TypeError, "cache must be a BackwardCache or None, got dict", {"cache": {}}),
        (dispatch.BackendError, "with TRITON_INTERPRET=1, got cpu", {"backend": "ascend"}),
    ]
    for error, message, changes in wrong:
        arguments = {"do": do, "q": q, "k": k, "v": v, "attn": attn, **window, **changes}
        with pytest.raises(error, match=message):
            neighborhood_attention_backward(**arguments)


# Routing

FORWARD = ["scores_kernel", "rows_kernel"]
DENSE = ["dense_dv_kernel", "dense_ds_kernel", "dense_dqdk_kernel"]
SPARSE = ["ds_kernel", "rows_kernel", "columns_kernel", "columns_kernel"]
FUSED = ["ds_kernel", "gradients_kernel"]
EXPAND = ["expand_kernel"]


def names(launches: list[Launch]) -> list[str]:
    return [one.kernel.__name__ for one in launches]


@pytest.mark.parametrize(
    ("path", "tokens", "dense", "backend"),
    cases.product(["auto", "sparse", "dense"], [511, 512, 2048, 2049], [False, True], ["ascend", "triton"], cover=2),
)
def test_launched_kernels(path: str, tokens: int, dense: bool, backend: str) -> None:
    """Every kernel of the band can be reached: fused gradients below 512 tokens, separate ones from there on."""
    q, k, v = make_qkv(tokens, 1, 1, dtype=torch.float16)
    attn = torch.empty((1, 1, tokens, tokens if dense else 7), dtype=torch.float32)
    call = {"kernel_size": 7, "path": path, "backend": backend}
    with recording(run=False) as launches:
        if path == "dense" and tokens > 2048:
            with pytest.raises(ValueError, match=f"path='dense' supports N up to 2048, got {tokens}"):
                neighborhood_attention_backward(q, q, k, v, attn, **call)
            assert not launches
            return
        neighborhood_attention_backward(q, q, k, v, attn, **call)
    if path == "dense" or (path == "auto" and tokens <= 2048):
        assert names(launches) == [*([] if dense else EXPAND), *DENSE]
    else:
        assert names(launches) == (FUSED if tokens < 512 else SPARSE)


@pytest.mark.parametrize(
    ("algorithm", "tokens", "backend"),
    cases.product(["auto", "flash", "band", "dense"], [2048, 2049], ["ascend", "triton"], cover=2),
)
def test_launched_kernels_of_the_differentiable_op(algorithm: str, tokens: int, backend: str) -> None:
    q, k, v = make_qkv(tokens, 1, 1, dtype=torch.float16, requires_grad=True)
    call = {"algorithm": algorithm, "backend": backend}
    with recording(run=False) as launches:
        if algorithm == "dense" and tokens > 2048:
            with pytest.raises(ValueError, match=f"algorithm='dense' supports N up to 2048, got {tokens}"):
                neighborhood_attention(q, k, v, **call)
            assert not launches
            neighborhood_attention(q.detach(), k.detach(), v.detach(), **call)  # nothing to differentiate
            assert names(launches) == FORWARD
            return
        out = neighborhood_attention(q, k, v, **call)
        torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    if algorithm in ("auto", "flash"):
        assert names(launches) == ["forward_kernel", "dq_kernel", "dkdv_kernel"]
    elif tokens <= 2048:
        assert names(launches) == FORWARD + EXPAND + DENSE
    else:
        assert names(launches) == FORWARD + SPARSE


def recorded(heads: int, tokens: int = 2048, path: str = "auto", dense: bool = False) -> list[str]:
    """Launches for one key head with so many query heads, whose tensors have no memory."""
    q, k, v = (torch.empty((1, tokens, n, 16), dtype=torch.float16, device="meta") for n in (heads, 1, 1))
    attn = torch.empty((1, heads, tokens, tokens if dense else 7), dtype=torch.float32, device="meta")
    with recording(run=False) as launches:
        attention_backward.backward(
            q, q, k, v, attn, **{**backward_cases.WINDOW, "softmax_scale": 1.0}, path=path, backend="triton"
        )
    return names(launches)


def test_workspace_of_the_dense_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """ds and the expanded band, 6 bytes a pair in fp16; ds alone where pairs are given in fp32."""
    assert attention_backward.workspace_limit(0) == 512 << 20
    assert attention_backward.workspace_limit(64 << 30) == int(0.18 * (64 << 30))
    per_head = 2048 * 2048 * 6
    for memory, heads in ((0, (512 << 20) // per_head), (32 << 30, int(0.18 * (32 << 30)) // per_head)):
        monkeypatch.setattr(attention_backward, "memory_of", lambda device, memory=memory: memory)
        assert recorded(heads) == EXPAND + DENSE
        assert recorded(heads + 1) == SPARSE
        assert recorded(heads + 1, path="sparse") == SPARSE
        assert recorded(heads + 1, dense=True) == DENSE
        with pytest.raises(ValueError, match=rf"a workspace up to \d+ bytes.* {heads + 1} query heads needs"):
            recorded(heads + 1, path="dense")


def test_grid_of_the_dense_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_backward, "memory_of", lambda device: 64 << 30)
    monkeypatch.setattr(attention_backward, "MAX_GRID", 64)  # tiles of 64 rows: 32 programs a head
    assert recorded(2) == EXPAND + DENSE
    assert recorded(3) == SPARSE
    with pytest.raises(
        ValueError, match="supports grids up to 64 programs; one key head with its 3 query heads needs 96"
    ):
        recorded(3, path="dense")


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous in any dim."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


ATTN: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "a band": ({}, {"dense": 64 * 64 * 6, "sparse": 64 * 7 * 4}),
    "a strided band in bf16": (
        {"dtype": torch.bfloat16, "strided": True},
        {"dense": 64 * 64 * 6, "sparse": 64 * 7 * 8},
    ),
    "a wide band in bf16": (
        {"dtype": torch.bfloat16, "slots": 300},
        {"dense": 64 * 64 * 4 + 64 * 300 * 4, "sparse": 64 * 300 * 8},
    ),
    "all pairs": ({"slots": 64}, {"dense": 64 * 64 * 2, "sparse": 64 * 7 * 8}),
    "strided pairs in bf16": (
        {"slots": 64, "dtype": torch.bfloat16, "strided": True},
        {"dense": 64 * 64 * 6, "sparse": 64 * 7 * 8},
    ),
    "pairs in fp64": ({"slots": 64, "dtype": torch.float64}, {"dense": 64 * 64 * 6, "sparse": 64 * 7 * 12}),
}
"""Probabilities of 64 tokens, and bytes of workspace for one query head in fp16."""


ROWS: dict[str, tuple[str, int, int]] = {
    "rows": ("triton", 16, 0),
    "strided rows": ("triton", 16, 3 + 3 + 1 + 1),
    "rows to be padded": ("ascend", 15, 3 + 3 + 1 + 1 + 3 + 1 + 1),
}
"""Backend, D, and how many heads of 16 features are copied for a key head: of do, q, k, v, and of dq, dk, dv."""


@pytest.mark.parametrize(("kind", "path", "rows"), cases.product(ATTN, ["dense", "sparse"], ROWS, cover=2))
def test_chunks_stay_within_the_workspace(kind: str, path: str, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two key heads of three query heads each at a time: what lives beside inputs and gradients was counted.

    It is a little less where what is counted does not live at the same time.
    """
    given, per_head = ATTN[kind]
    slots, strided = given.get("slots", 7), given.get("strided", False)
    attn = torch.zeros(2, 12, 64, slots, dtype=given.get("dtype", torch.float32))
    backend, dim, copied_heads = ROWS[rows]
    q, do = (torch.zeros(2, 64, 12, dim, dtype=torch.float16) for _ in range(2))
    k, v = (torch.zeros(2, 64, 4, dim, dtype=torch.float16) for _ in range(2))
    if strided:
        attn = every_second(attn)
    if rows == "strided rows":
        q, k, v, do = (every_second(tensor) for tensor in (q, k, v, do))
    needed = 3 * per_head[path] + copied_heads * 64 * 16 * 2
    indices = 64 * (64 + 10 * 7) if path == "sparse" and slots == 64 else 0
    limit = indices + 3 * needed - 1
    launched = []
    monkeypatch.setattr(attention_backward, "workspace_limit", lambda memory: limit)
    for module in (band, dense_backward):
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: launched.append(kernel.__name__))
    window = {**backward_cases.WINDOW, "kernel_size": slots if slots != 64 else 7}
    with PeakBytes() as measured:
        gradients = attention_backward.backward(do, q, k, v, attn, **window, path=path, backend=backend)
    workspace = measured.peak - sum(gradient.nbytes for gradient in gradients)
    assert launched.count("dense_ds_kernel" if path == "dense" else "ds_kernel") == 4
    assert 0.8 * 2 * needed <= workspace <= 2 * needed + indices


@given(batch=st.integers(0, 5), kv_heads=st.integers(1, 7), per_chunk=st.integers(0, 40))
def test_chunks_are_everything_once(batch: int, kv_heads: int, per_chunk: int) -> None:
    found = []
    for batches, heads in attention_backward._chunks(batch, kv_heads, per_chunk):
        chunk = [(b, h) for b in range(batch)[batches] for h in range(kv_heads)[heads]]
        assert 1 <= len(chunk) <= max(1, per_chunk)
        found += chunk
    assert sorted(found) == [(b, h) for b in range(batch) for h in range(kv_heads)]


def test_planner_on_random_shapes() -> None:
    """10,000 calls of the dense path: what is not refused has grids and tiles that every device takes."""
    known = set(tiling.specialisations())
    draw = random.Random(0)
    for _ in range(10_000):
        kernel, dtype = draw.choice(tiling.DENSE_KERNELS), draw.choice(tiling.DTYPES)
        tokens, dim, sequences = draw.randint(1, 2048), draw.randint(1, tiling.MAX_DIM), draw.randint(1, 512)
        device = draw.choice(list(DEVICES.values()))
        sizes: dict[str, Any] = {"sequences": sequences, "tokens": tokens, "backend": "ascend"}
        plain = tiling.dense_plan(kernel, dtype, dim, cores=None, **sizes)
        persistent = tiling.dense_plan(kernel, dtype, dim, cores=device.cores, **sizes)
        tiles = plain.tiles
        assert persistent.tiles == tiles
        assert (kernel, dtype, tiles) in known
        slices = 1 if kernel == "dense_ds" else math.ceil(dim / tiles.block_d)
        assert plain.grid == (sequences * math.ceil(tokens / tiles.block_m) * slices,)
        assert persistent.grid == (min(plain.grid[0], device.cores),)
        assert plain.grid[0] <= MAX_GRID or sequences > 1
        assert tiling.fits(plain.live_bytes, device)


# The kernels


MOVED: dict[str, Any] = {"kernel_size": 64, "dilation": 3, "boundary": "shift"}
GPU_CASES: dict[str, dict[str, Any]] = {
    "short": {"tokens": 33, "kv_heads": 2},
    "the longest": {"tokens": 2048, "dim": 64, "heads": 4, "kv_heads": 4},
    "even, moved, dilated, grouped": {"tokens": 2047, "dim": 128, **MOVED, "heads": 8, "kv_heads": 2},
    "causal": {"tokens": 1501, "dim": 80, "kernel_size": 300, "causal": True, "batch": 2},
    "widest features": {"tokens": 700, "dim": 256, "kernel_size": 129, "boundary": "shift"},
    "head-major, all pairs": {"tokens": 1024, "dim": 128, "head_major": True, "kv_heads": 2, "dense": True},
    "all pairs in bf16": {"tokens": 500, "dense": True, "attn_dtype": torch.bfloat16},
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("path", ["dense", "sparse"])
@pytest.mark.parametrize("case", GPU_CASES)
def test_on_a_gpu(case: str, path: str, dtype: torch.dtype) -> None:
    backward_cases.check("triton", device="cuda", dtype=dtype, path=path, **GPU_CASES[case])
