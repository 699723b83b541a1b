"""Neighborhood attention: two oracles that agree, the kernels on a GPU, arguments, tiles."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import dispatch
from ascend_kernels.device import DEVICES, UB_VARIABLE, npu_of
from ascend_kernels.launch import Launch, recording
from ascend_kernels.neighborhood import reference, tiling
from bench import oracles
from dispatch import neighborhood_attention
from nsa.neighborhood.api import neighborhood_attention_backward, neighborhood_attention_forward
from tests.support.helpers import assert_rounded_once, make_qkv
from tests.support.live_memory import PeakBytes
from tests.support.neighborhood_cases import check
from tests.support.neighborhood_loops import attend, pairs_of

# The oracle

WINDOWS = st.fixed_dictionaries(
    {
        "kernel_size": st.integers(1, 12),
        "dilation": st.integers(1, 5),
        "boundary": st.sampled_from(["truncate", "shift"]),
        "causal": st.booleans(),
    }
)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Tokens, and a range of them."""
    tokens = draw(st.integers(1, 24))
    first, last = sorted(draw(st.integers(0, tokens)) for _ in range(2))
    return tokens, first, last


@settings(max_examples=80)
@given(cut=cuts(), kv_heads=st.integers(1, 2), group=st.integers(1, 2), window=WINDOWS)
def test_agrees_with_the_loops(cut: tuple[int, int, int], kv_heads: int, group: int, window: dict[str, Any]) -> None:
    """out, band and LSE; causal, for queries that continue a sequence: rows of all tokens up to the last query."""
    tokens, first, stop = cut if window["causal"] else (cut[0], 0, cut[0])
    q, k, v = make_qkv(tokens, kv_heads * group, kv_heads, dim=3, seed=tokens)
    start = {"q_start": first} if window["causal"] else {}
    out, band = neighborhood_attention_forward(q[:, first:stop], k, v, **start, **window)
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
@given(cut=cuts(), window=WINDOWS.map(lambda window: {**window, "causal": True}))
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


def test_the_band_is_not_kept_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public op takes out alone: a band of 64 slots would be four times as large as all of q, k, v and out."""
    q, k, v = make_qkv(4096, 1, 1, dim=4, dtype=torch.float32)
    size = 4096 * 64 * 4
    monkeypatch.setattr(reference, "CHUNK_BYTES", size // 4)
    with PeakBytes() as with_band:
        expected, band = neighborhood_attention_forward(q, k, v, kernel_size=64)
    assert band.nbytes == size
    assert with_band.peak > 2 * size  # chunks of it, and their concatenation
    with PeakBytes() as out_alone:
        out = neighborhood_attention(q, k, v, kernel_size=64)
    assert out_alone.peak < size
    assert torch.equal(out, expected)


# The public functions

K = torch.zeros(1, 20, 2, 16)
LONGER: dict[str, Any] = {"k": K, "v": K, "causal": True}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"v": K[:, :9]}, r"v must have the shape \[1, 8, 2, 16\], got \[1, 9, 2, 16\]"),
    ({"k": torch.zeros(1, 8, 3, 16)}, "q must have a multiple of k's H_kv=3 heads"),
    ({"q": torch.zeros(1, 8, 4, 0)}, "q must have at least one head and D >= 1"),
    ({"boundary": "wrap"}, "boundary must be one of truncate, shift, got 'wrap'"),
    ({"q_start": -1, **LONGER}, "q_start must be at least 0, got -1"),
    ({"q_start": 13, **LONGER}, "q_start must be from 0 to N_k - N_q = 20 - 8 = 12, got 13"),
    ({"q_start": 3}, "q_start goes with causal=True, got causal=False and q_start=3"),
    ({**LONGER, "causal": False}, "causal=False needs as many queries as keys, got N_q=8, N_k=20"),
    ({"k": K[:, :7], "causal": True}, r"k must have the shape \[1, 8, 2, 16\], got \[1, 7, 2, 16\]"),
    ({**LONGER, "v": K[:, :19]}, r"v must have the shape \[1, 20, 2, 16\], got \[1, 19, 2, 16\]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    given = {**dict(zip("qkv", make_qkv(8, dtype=torch.float32), strict=True)), **changes}
    backward = partial(neighborhood_attention_backward, do=given["q"], attn=torch.zeros(1, 4, 8, 7))
    for function in (neighborhood_attention, neighborhood_attention_forward, backward):
        with pytest.raises(ValueError, match=message):
            function(**given)


def test_other_bad_arguments_are_named() -> None:
    q, k, v = make_qkv(8, dtype=torch.float32)
    with pytest.raises(
        ValueError, match="backend must be one of triton, cute, ascend, reference for neighborhood_atte"
    ):
        neighborhood_attention(q, k, v, backend="cudnn")
    with pytest.raises(dispatch.BackendError, match="with TRITON_INTERPRET=1, got cpu"):
        neighborhood_attention(q, k, v, backend="ascend")
    with pytest.raises(TypeError, match=r"q_start must be an integer, got tensor\(\[3\]\)"):
        neighborhood_attention(q, K, K, causal=True, q_start=torch.tensor([3]))


@pytest.mark.usefixtures("hopper")
def test_wide_windows_are_left_to_flash_attention_4() -> None:
    first, *_, again, _, _ = dispatch.explain(
        dispatch.Call("neighborhood_attention", "cuda", torch.float16, options={"kernel_size": 97})
    )
    assert (first.impl.backend, first.reason) == ("triton", "first choice up to kernel_size 96, got 97")
    assert (again.impl.backend, again.reason) == ("triton", None)
    for named, kernel_size in ((None, 96), ("triton", 97)):
        call = dispatch.Call("neighborhood_attention", "cuda", torch.float16, options={"kernel_size": kernel_size})
        assert dispatch.explain(call, named)[0].reason is None


# Launches


ROWS = ("p_q", "p_k", "p_v", "p_o", "p_do", "p_dq", "p_dk", "p_dv", "p_x", "p_y")
"""Tensors `[B,N,heads,D]` of all kernels; the others are probabilities and numbers of rows."""


def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[list[Launch], tuple[Any, ...]]:
    """Launches of the public op and its gradients, and these."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    with recording(run=False) as launches:
        out = neighborhood_attention(q, k, v, **options)
        gradients = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    return launches, (out, *gradients)


@pytest.mark.parametrize(("dim", "algorithm"), [(1, "flash"), (17, "band"), (123, "dense")])
def test_npus_get_rows_of_whole_blocks(dim: int, algorithm: str) -> None:
    """Of 32 bytes: features are padded in what kernels see, and in nothing else. GPUs take what comes."""
    q, k, v = make_qkv(70, dim=dim, dtype=torch.bfloat16)
    launches, results = recorded(q, k, v, algorithm=algorithm, backend="ascend")
    assert all(tensor.shape[-1] == dim and tensor.is_contiguous() for tensor in results)
    seen = set()
    for one in launches:
        for name in set(ROWS) & set(one.arguments):
            rows = one.arguments[name]
            assert rows.data_ptr() % 32 == 0
            assert all(size * 2 % 32 == 0 for size in (rows.shape[-1], *rows.stride()[:-1])), name
            strides = [one.arguments[f"{name[2:]}_{axis}_stride"] for axis in ("batch", "token", "head")]
            assert strides == [*rows.stride()[:-1]]
            assert one.arguments.get("dim", rows.shape[-1]) == rows.shape[-1] == -(-dim // 16) * 16
            seen.add(name)
    assert {"p_q", "p_k"} < seen

    on_gpu, _ = recorded(q, k, v, algorithm=algorithm, backend="triton")
    assert on_gpu[0].arguments["p_q"].data_ptr() == q.data_ptr()


# Tiles


def test_planner_on_random_shapes() -> None:
    """3,000 shapes: tiles are among the specialisations, grids are small, and all row numbers are int32."""
    known = set(tiling.specialisations())
    assert len(known) <= 80
    draw = random.Random(0)
    for _ in range(3_000):
        kernel, dtype = draw.choice(tiling.KERNELS), draw.choice(tiling.DTYPES)
        tokens = int(2 ** draw.uniform(0, 29))
        kernel_size = int(2 ** draw.uniform(0, 29))
        dim = draw.randint(1, tiling.MAX_DIM)
        device = draw.choice(list(DEVICES.values()))
        heads = draw.randint(1, 256)
        plan = tiling.ascend_plan(kernel, dtype, dim, kernel_size, sequences=heads, rows=tokens, device=device)
        tiles, live = plan.tiles, plan.live_bytes
        assert (kernel, dtype, tiles) in known
        assert tiles.block_d >= dim
        capacity = {"UB": 0.75 * device.ub, "L1": device.l1, "L0A": device.l0a, "L0B": device.l0b, "L0C": device.l0c}
        assert all(live[memory] <= capacity[memory] for memory in capacity)
        assert 1 <= math.prod(plan.grid) <= min(device.cores, 65535)
        reach = min(kernel_size, 2 * tokens)
        assert tokens + reach + tiles.block_m + tiles.block_n < 2**31


@given(
    kernel=st.sampled_from(tiling.KERNELS),
    dtype=st.sampled_from(tiling.DTYPES),
    dim=st.integers(1, tiling.MAX_DIM),
    window=st.integers(1, 1 << 29) | st.integers(1, 70),
    rows=st.integers(1, 1 << 29),
    bounded=st.booleans(),
)
def test_plans_for_gpus(kernel: str, dtype: torch.dtype, dim: int, window: int, rows: int, bounded: bool) -> None:
    """One pass is taken only where a tile holds all that its rows see, and keeps half of the tile's rows at least."""
    plan = tiling.gpu_plan(kernel, dtype, dim, window, sequences=3, rows=rows, cores=132, memory="L", bounded=bounded)
    tiles = plan.tiles
    kept = tiles.rows_per_tile(window)
    assert tiles.block_d >= dim
    assert tiles.block_m // 2 <= kept <= tiles.block_m
    if tiles.one_pass:
        assert bounded
        assert kept + window - 1 <= tiles.block_n
    work = tiling.num_work_tiles(tiles, window, sequences=3, rows=rows)
    assert 3 * rows <= work * kept < 3 * (rows + kept)
    assert 1 <= plan.grid[0] <= min(work, 2**31 - 1)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    npu, cpu = SimpleNamespace(type="npu", index=None), torch.device("cpu")
    cores = SimpleNamespace(get_device_properties=lambda _: {"num_aicore": 25, "num_vectorcore": 50})
    target = SimpleNamespace()
    driver = SimpleNamespace(utils=cores, get_current_target=lambda: target)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=driver))
    for target.arch, name in (("Ascend910B4", "A2"), ("Ascend910_9392", "A3"), ("Ascend950PR", "950")):
        assert npu_of(npu) == replace(DEVICES[name], cores=25)
    target.arch = "Ascend310P3"
    with pytest.raises(ValueError, match="Ascend310P3 is not among the listed NPUs"):
        npu_of(npu)
    assert npu_of(cpu) == DEVICES["A2"]
    monkeypatch.setenv(UB_VARIABLE, str(256 * 1024))
    assert npu_of(npu).ub == npu_of(cpu).ub == 256 * 1024
    monkeypatch.setenv(UB_VARIABLE, "1024")
    with pytest.raises(ValueError, match="must have at least 196608 bytes, got 1024"):
        npu_of(cpu)


# The kernels


GPU_CASES: dict[str, dict[str, Any]] = {
    "short": {"tokens": 33, "kernel_size": 7, "kv_heads": 2},
    "plain": {"tokens": 2304, "dim": 64, "kernel_size": 7, "heads": 4, "kv_heads": 4},
    "even, moved, dilated, grouped": {
        "tokens": 4099,
        "dim": 128,
        "kernel_size": 64,
        "dilation": 3,
        "boundary": "shift",
        "heads": 8,
        "kv_heads": 2,
    },
    "causal": {"tokens": 3001, "dim": 80, "kernel_size": 300, "causal": True, "batch": 2},
    "widest features": {"tokens": 1500, "dim": 256, "kernel_size": 129, "boundary": "shift"},
    "head-major": {"tokens": 2049, "dim": 128, "kernel_size": 9, "head_major": True, "heads": 4, "kv_heads": 4},
    "one pass": {"tokens": 5000, "dim": 128, "kernel_size": 9, "heads": 4, "kv_heads": 4},
    "one pass, dilated": {"tokens": 4097, "dim": 128, "kernel_size": 15, "dilation": 8, "kv_heads": 2},
    "one pass, causal, narrow": {"tokens": 3000, "dim": 64, "kernel_size": 17, "causal": True, "kv_heads": 2},
    "one pass, moved, grouped": {"tokens": 3000, "dim": 64, "kernel_size": 12, "boundary": "shift"},
    "one pass of dkdv": {"tokens": 2500, "dim": 128, "kernel_size": 33, "kv_heads": 2},
    "packed": {"tokens": 2500, "dim": 128, "kernel_size": 9, "packed": True, "heads": 4, "kv_heads": 4},
    "long": {"tokens": 65536, "dim": 128, "kernel_size": 63, "dilation": 8},
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", GPU_CASES)
def test_on_a_gpu(case: str, dtype: torch.dtype) -> None:
    check("triton", device="cuda", dtype=dtype, **GPU_CASES[case])


@pytest.mark.cuda
@pytest.mark.parametrize("boundary", ["truncate", "shift"])
def test_every_short_length_on_a_gpu(boundary: str) -> None:
    for tokens in range(1, 71):
        check("triton", tokens, device="cuda", kernel_size=1 + tokens % 8, dilation=1 + tokens % 3, boundary=boundary)


# The reference's precision and memory


@pytest.mark.parametrize(("dtype", "causal"), [(torch.bfloat16, False), (torch.float16, True)])
def test_the_reference_rounds_gradients_once(dtype: torch.dtype, causal: bool) -> None:
    """A key's gradient is a sum of 255 terms, in fp32."""
    inputs, do = make_qkv(600, 2, 1, 16, dtype=dtype), make_qkv(600, 2, 1, 16, dtype=dtype, seed=1)[0]
    options = {"kernel_size": 255, "causal": causal}

    def gradients(run: Any, tensors: tuple[Tensor, ...], do: Tensor) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        return torch.autograd.grad(run(*leaves), leaves, do)

    got = gradients(partial(neighborhood_attention, **options, backend="reference"), inputs, do)
    exact = gradients(
        lambda *qkv: oracles.neighborhood_attention(*qkv, **options)[0], tuple(x.double() for x in inputs), do.double()
    )
    for name, mine, truth in zip(("dq", "dk", "dv"), got, exact, strict=True):
        assert_rounded_once(mine, truth, name)


@pytest.mark.parametrize(("boundary", "causal"), [("truncate", True), ("shift", False)])
def test_the_reference_gathers_no_more_keys_than_a_class_has(boundary: str, causal: bool) -> None:
    q, k, v = make_qkv(120, 2, 1, 8, requires_grad=True)
    results, peaks = [], []
    for size in (12, 2**40):  # 120 tokens are 24 classes of 5, whom a window of 12 holds wherever it lies
        with PeakBytes() as memory:
            out = neighborhood_attention(q, k, v, kernel_size=size, dilation=24, boundary=boundary, causal=causal)
            results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
        peaks.append(memory.peak)
    assert peaks[1] <= 1.01 * peaks[0]
    for few, many in zip(*results, strict=True):
        torch.testing.assert_close(few, many, rtol=1e-12, atol=1e-12)
