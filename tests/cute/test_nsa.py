"""NSA on an NVIDIA GPU against fp64: results, selections, gradients; per tile, per token, with all kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import dispatch
from nsa import NSAAux, NSAConfig, nsa, nsa_forward, nsa_forward_aux, reference
from nsa.inputs import NSAInputs
from tests.support import cases
from tests.support.causality import assert_causal
from tests.support.cute_cases import BF16, FP16, SLACK, SOME, check_forward, check_gradients, gate_weight, like, on_gpu
from tests.support.gpu_calls import Case
from tests.support.hardware import DETERMINISTIC, STRATEGIES, with_kernels
from tests.support.kv_outer_cases import small_chunks

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

PAPER = NSAConfig.paper(num_selected_blocks=6, window_size=200)
"""A selection that selects from a few hundred tokens on."""
MODES = {"tile": SOME, "token": PAPER}
SIZES = [
    *(("tile", tokens) for tokens in (1, 63, 64, 65, 255, 256, 257, 1000, 4096, 8191)),
    *(("token", tokens) for tokens in (1, 31, 32, 33, 63, 64, 65, 257, 1000, 2500)),
]
SPARSE: dict[str, Any] = {"num_cmp_selected_blocks": 2, "compress_block_size": 4, "select_block_size": 64}
OVERLAPPING: dict[str, Any] = {"compress_block_size": 32, "compress_stride": 16, "select_block_size": 64}
OPTIONS: dict[str, dict[str, Any]] = {
    "not causal": {"causal": False},
    "not causal, forced": {"causal": False, "num_init_blocks": 1, "num_local_blocks": 2},
    "shared in the group": {"share_heads_in_group": True},
    "tiles of 512": {"q_tile_size": 512},
    "many blocks": {"num_selected_blocks": 40},
    "more blocks than there are": {"num_selected_blocks": 100},
    "forced": {"num_init_blocks": 1, "num_local_blocks": 1},
    "only forced": {"num_init_blocks": 1, "num_local_blocks": 2},
    "blocks of 128": {"select_block_size": 128},
    "blocks of 192": {"select_block_size": 192, "q_tile_size": 768},
    "short entries": {"compress_block_size": 16, "select_block_size": 64},
    "entries of a block of 128": {"compress_block_size": 128},
    "entries of two blocks": {"compress_block_size": 128, "select_block_size": 64, "num_init_blocks": 1},
    "overlapping": OVERLAPPING,
    "overlapping, blocks of 128, forced": {
        **OVERLAPPING,
        "select_block_size": 128,
        "num_selected_blocks": 5,
        "num_init_blocks": 1,
        "num_local_blocks": 2,
    },
    "no phases": {"compress_block_size": 32, "compress_stride": 12, "select_block_size": 64},
    "odd entries": {"compress_block_size": 20, "compress_stride": 7, "select_block_size": 128, "num_local_blocks": 1},
    "no blocks": {"num_selected_blocks": 0},
    "no window": {"window_size": 0},
    "window of one": {"window_size": 1},
    "scale": {"softmax_scale": 0.5},
    "sparse compressed": SPARSE,
    "sparse compressed, not causal": {**SPARSE, "num_cmp_selected_blocks": 1, "causal": False},
    "sparse compressed, all fit": {"num_cmp_selected_blocks": 8},
}
TOKEN_OPTIONS: dict[str, dict[str, Any]] = {
    "nothing forced": {"num_init_blocks": 0, "num_local_blocks": 0},
    "only forced": {"num_selected_blocks": 3},
    "apart": {"compress_block_size": 64, "compress_stride": None},
    "long entries": {"compress_block_size": 96, "compress_stride": 32},
    "odd ratio": {"compress_block_size": 48, "compress_stride": 16, "select_block_size": 192},
    "blocks of 128": {"select_block_size": 128},
    "blocks of 256": {"select_block_size": 256, "num_selected_blocks": 3},
    "more blocks than there are": {"num_selected_blocks": 100},
    "no window": {"window_size": 0},
    "local blocks reach out of the window": {"window_size": 100},
    "blocks of 128 in the window": {"select_block_size": 128, "window_size": 300},
    "nothing selected": {"num_selected_blocks": 0, "num_init_blocks": 0, "num_local_blocks": 0},
    "scale": {"softmax_scale": 0.5},
}
TENSORS = [
    ("w_k_compress",),
    ("w_k_compress", "w_v_compress", "gate_proj_weight"),
    ("k_cmp", "v_cmp"),
    ("k_slc", "v_slc"),
    ("k_slc", "v_slc", "k_win", "v_win", "gates"),
]
PLAIN: dict[str, Any] = {"heads": 8, "dim": 128, "v_dim": 128}
PROJECTED: dict[str, Any] = {"tensors": ("gate_proj_weight",)}
CALLS: dict[str, Case] = {
    **{name: Case(replace(SOME, **of), 3001, **PLAIN, **PROJECTED) for name, of in OPTIONS.items()},
    **{
        f"per token, {name}": Case(replace(PAPER, **of), 1500, heads=8, **PROJECTED)
        for name, of in TOKEN_OPTIONS.items()
    },
    **{
        f"{', '.join(names)} per {mode}": Case(MODES[mode], 1000, **PLAIN, tensors=names)
        for names in TENSORS
        for mode in MODES
    },
    **{
        f"D={dim}, D_v={192 - dim} per {mode}": Case(MODES[mode], 900, heads=8, dim=dim, v_dim=192 - dim, **PROJECTED)
        for dim in (64, 128)
        for mode in MODES
    },
    "per token, 64 heads a group": Case(PAPER, 700, heads=64, kv_heads=1, **PROJECTED),
    "per token, 64 heads a group, D=128": Case(PAPER, 700, heads=128, dim=128, v_dim=128, dtype=FP16, **PROJECTED),
}


def check(inputs: NSAInputs, config: NSAConfig = SOME, *, recompute: bool = False) -> NSAAux:
    aux = check_forward(inputs, config)
    check_gradients(inputs, config, recompute=recompute)
    return aux


@with_kernels("size", SIZES)
def test_sizes(size: tuple[str, int]) -> None:
    mode, tokens = size
    config = MODES[mode]
    aux = check(NSAInputs(*on_gpu(tokens), gate_proj_weight=gate_weight()), config)
    if tokens > 1000:  # the selection left something out
        assert int((aux.indices[:, :, -1] >= 0).sum(-1).max()) == config.num_selected_blocks


@with_kernels("group dim dtype mode recompute", [1, 2, 4, 8, 16], [64, 128], [BF16, FP16], MODES, [False, True])
def test_groups(group: int, dim: int, dtype: torch.dtype, mode: str, recompute: bool) -> None:
    heads = max(group, 2)
    qkv = on_gpu(700, heads, heads // group, dim, dtype=dtype, batch=2)
    check(NSAInputs(*qkv, gate_proj_weight=gate_weight(heads, dim, dtype)), MODES[mode], recompute=recompute)


@with_kernels("name batch", CALLS, [1, 2])
def test_calls(name: str, batch: int) -> None:
    call = replace(CALLS[name], batch=batch)
    check(call.inputs("cuda"), call.config)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, marks=pytest.mark.sm_90(**changes), id=str(changes))
        for changes in ({"num_cmp_selected_blocks": 3, "n_block_size": 64}, {"q_tile_size": 128})
    ],
)
def test_options_of_hopper(changes: dict[str, Any]) -> None:
    if "n_block_size" in changes:
        changes = {**changes, "compress_block_size": 16, "select_block_size": 64}
    check_forward(NSAInputs(*on_gpu(5000, 4, 2)), replace(SOME, **changes))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["gate_proj_weight", "gates", None])
def test_gates(form: str | None, dtype: torch.dtype, mode: str) -> None:
    """Gates that are given may be negative."""
    given = {"gate_proj_weight": gate_weight(dtype=dtype), "gates": like(2, 1000, 8, 3, dtype=dtype)}
    inputs = NSAInputs(*on_gpu(1000, batch=2), **({form: given[form]} if form else {}))
    aux = check(inputs, MODES[mode])
    expected = reference.nsa(inputs.map(Tensor.double), MODES[mode], indices=aux.indices.long())[1].gates
    # fp32 sums of D products of 16-bit numbers, through a sigmoid of slope at most 1/4
    assert (aux.gates.double() - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_given_gates_and_one_key(mode: str) -> None:
    """dq is 0: do weighted by a gate is rounded once, and its product with o is that of what was rounded."""
    q, k, v = on_gpu(1, batch=16)
    inputs = NSAInputs(q, k, v, gates=like(16, 1, 8, 3, seed=2, scale=3.0))
    assert check_gradients(inputs, MODES[mode])["q"].abs().max() < SLACK


@DETERMINISTIC
@pytest.mark.parametrize("changes", [{}, *map(OPTIONS.get, ("blocks of 128", "blocks of 192", "sparse compressed"))])
def test_deterministic(changes: dict[str, Any]) -> None:
    inputs = NSAInputs(*on_gpu(3001, batch=2), gate_proj_weight=gate_weight())
    expected, *others = (check_gradients(inputs, replace(SOME, **changes), deterministic=True) for _ in range(3))
    for gradients in others:
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_expanded_keys() -> None:
    """Other strides are drawn in test_fuzz.py."""
    q, k, v = on_gpu(777, 4, 2, 64, batch=2)
    out = nsa_forward(q, k[:1].expand_as(k), v[:1].expand_as(v), config=SOME)
    assert torch.equal(out[:1], nsa_forward(q, k, v, config=SOME)[:1])


# Selection


@pytest.mark.parametrize(
    "name",
    ["plain", "sparse compressed", "overlapping", "shared in the group", "per token", "per token, 64 heads a group"],
)
def test_nothing_depends_on_later_tokens(name: str, kernels: str) -> None:
    overlapping = {**OVERLAPPING, "num_local_blocks": 1}
    changes = {**OPTIONS, "overlapping": overlapping}.get(name, {})
    config = PAPER if name.startswith("per token") else replace(SOME, **changes)
    heads = (64, 1) if name.endswith("64 heads a group") else (8, 2)
    tokens = 2600 if name == "sparse compressed" else 1100

    def run(q: Tensor, k: Tensor, v: Tensor, **fixed: Tensor | None) -> tuple[Tensor, NSAAux]:
        if not fixed:
            return nsa_forward_aux(q, k, v, config=config)
        forward = dispatch.resolve(dispatch.Call("nsa", q.device, q.dtype)).load()
        out, aux = forward(NSAInputs(q, k, v), config, **{name: x for name, x in fixed.items() if x is not None})
        return out, NSAAux(*aux)

    positions = {0, 30, 31, 46, 47, 62, 63, 64, 127, 128, 255, 256, 300, 511, 767, 1000, tokens - 300, tokens - 1}
    assert_causal(run, on_gpu(tokens, *heads, 64), config, sorted(positions))


# Chunks, and few tokens


CHUNKED = {
    "plain": SOME,
    "not causal": replace(SOME, causal=False),
    "sparse compressed": replace(SOME, **SPARSE),
    "per token": PAPER,
}


@pytest.mark.parametrize("kernels", STRATEGIES, indirect=True)
@pytest.mark.parametrize("gates", ["gate_proj_weight", "gates", None])
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_change_nothing(name: str, gates: str | None, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """Of queries, and of worklists. Nor does whether the gate is a kernel of its own, as it is for aux."""
    from cute_kernels.call import chunk_rows

    q, k, v = on_gpu(3000, batch=2)
    given = {"gate_proj_weight": gate_weight(), "gates": like(2, 3000, 8, 3)}
    keywords: dict[str, Any] = {"config": CHUNKED[name], **({gates: given[gates]} if gates else {})}
    expected, _ = nsa_forward_aux(q, k, v, **keywords)
    assert torch.equal(nsa_forward(q, k, v, **keywords), expected)
    monkeypatch.setattr("cute_kernels.call.CHUNK_BYTES", 1 << 20)
    assert chunk_rows(2, 3000, 8, 128, 256) < 3000
    small_chunks(monkeypatch, 256, 1 << 20, 100)
    assert torch.equal(nsa_forward(q, k, v, **keywords), expected)


@pytest.mark.parametrize(("shape", "recompute"), cases.product([(0, 256), (1, 0)], [True, False]))
def test_empty(shape: tuple[int, int], recompute: bool) -> None:
    q, k, v = (torch.ones(*shape, heads, 64, device="cuda", dtype=BF16, requires_grad=True) for heads in (4, 2, 2))
    weight = gate_weight(4, 64).requires_grad_()
    nsa(q, k, v, gate_proj_weight=weight, recompute=recompute).sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape
    assert weight.grad is not None
    assert not weight.grad.any()
    out, aux = nsa_forward_aux(q, k, v)
    assert out.shape == q.shape
    assert aux.lse_win.shape == (shape[0], 4, shape[1])
