"""NSA on an NVIDIA GPU against fp64: results, selections, gradients; per tile, with both strategies, and per token."""

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
from tests.support.cute_cases import (
    BF16,
    FP16,
    OPTIONS,
    SIZES,
    SLACK,
    SOME,
    block_scores,
    check_forward,
    check_gradients,
    gate_weight,
    like,
    on_gpu,
)
from tests.support.hardware import with_strategies
from tests.support.kv_outer_cases import small_chunks

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

PAPER = NSAConfig.paper(num_selected_blocks=6, window_size=200)
"""A selection that selects from a few hundred tokens on."""
TOKEN_OPTIONS: dict[str, dict[str, Any]] = {
    "nothing forced": {"num_init_blocks": 0, "num_local_blocks": 0},
    "only forced": {"num_selected_blocks": 3},
    "apart": {"compress_block_size": 64, "compress_stride": None},
    "blocks of 128": {"select_block_size": 128},
    "blocks of 256": {"select_block_size": 256, "num_selected_blocks": 3},
    "no window": {"window_size": 0},
    "local blocks reach out of the window": {"window_size": 100},
    "blocks of 128 in the window": {"select_block_size": 128, "window_size": 300},
    "nothing selected": {"num_selected_blocks": 0, "num_init_blocks": 0, "num_local_blocks": 0},
}
MODES = pytest.mark.parametrize("config", [SOME, PAPER], ids=["tile", "token"])


def check(inputs: NSAInputs, config: NSAConfig = SOME, *, recompute: bool = False) -> NSAAux:
    aux = check_forward(inputs, config)
    check_gradients(inputs, config, recompute=recompute)
    return aux


# Sizes and options


@with_strategies("tokens", SIZES)
def test_sizes(tokens: int) -> None:
    aux = check(NSAInputs(*on_gpu(tokens), gate_proj_weight=gate_weight()))
    if tokens > 512:  # the selection left something out
        assert int((aux.indices[:, :, -1] >= 0).sum(-1).max()) == 3


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 63, 64, 65, 257, 1000, 2500])
def test_sizes_per_token(tokens: int) -> None:
    aux = check(NSAInputs(*on_gpu(tokens), gate_proj_weight=gate_weight()), PAPER)
    if tokens > 1000:
        assert int((aux.indices[:, :, -1] >= 0).sum(-1).max()) == 6


def check_groups(group: int, dim: int, dtype: torch.dtype, config: NSAConfig, *, recompute: bool = False) -> None:
    heads = max(group, 2)
    qkv = on_gpu(700, heads, heads // group, dim, dtype=dtype, batch=2)
    check(NSAInputs(*qkv, gate_proj_weight=gate_weight(heads, dim, dtype)), config, recompute=recompute)


@with_strategies("group dim dtype", [1, 2, 4, 8, 16], [64, 128], [BF16, FP16])
def test_groups(group: int, dim: int, dtype: torch.dtype) -> None:
    check_groups(group, dim, dtype, SOME)


@pytest.mark.parametrize(
    ("group", "dim", "dtype", "recompute"),
    cases.product([1, 2, 4, 8, 16, 64], [64, 128], [BF16, FP16], [False, True], cover=2),
    ids=str,
)
def test_groups_per_token(group: int, dim: int, dtype: torch.dtype, recompute: bool) -> None:
    check_groups(group, dim, dtype, PAPER, recompute=recompute)


@MODES
@pytest.mark.parametrize("dims", [(64, 128), (128, 64)], ids=str)
def test_dims_of_values(dims: tuple[int, int], config: NSAConfig, strategy: str) -> None:
    qkv = on_gpu(900, 8, 2, dims[0], v_dim=dims[1])
    check(NSAInputs(*qkv, gate_proj_weight=gate_weight(8, dims[0])), config)


@with_strategies("name batch", OPTIONS, [1, 2])
def test_options(name: str, batch: int) -> None:
    check(NSAInputs(*on_gpu(3001, batch=batch), gate_proj_weight=gate_weight()), replace(SOME, **OPTIONS[name]))


@pytest.mark.parametrize("name", TOKEN_OPTIONS)
def test_options_per_token(name: str) -> None:
    inputs = NSAInputs(*on_gpu(1500, 8, 2, 64), gate_proj_weight=gate_weight(8, 64))
    check(inputs, replace(PAPER, **TOKEN_OPTIONS[name]))


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


@with_strategies("entries select", [(16, 16), (32, 32), (64, 64), (128, 128), (32, 16), (20, 7)], [64, 128])
def test_blocks(entries: tuple[int, int], select: int) -> None:
    """Entries by their length and stride."""
    length, stride = entries
    config = NSAConfig(
        compress_block_size=length,
        compress_stride=stride,
        select_block_size=select,
        num_selected_blocks=5,
        num_init_blocks=1,
        num_local_blocks=2,
        window_size=64,
    )
    check_forward(NSAInputs(*on_gpu(3000, 4, 2, 64)), config)


# Optional tensors


@MODES
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("form", ["gate_proj_weight", "gates", None])
def test_gates(form: str | None, dtype: torch.dtype, config: NSAConfig) -> None:
    """Gates that are given may be negative."""
    given = {"gate_proj_weight": gate_weight(dtype=dtype), "gates": like(2, 1000, 8, 3, dtype=dtype)}
    inputs = NSAInputs(*on_gpu(1000, batch=2), **({form: given[form]} if form else {}))
    aux = check(inputs, config)
    expected = reference.nsa(inputs.map(Tensor.double), config, indices=aux.indices.long())[1].gates
    # fp32 sums of D products of 16-bit numbers, through a sigmoid of slope at most 1/4
    assert (aux.gates.double() - expected).abs().max() <= 1e-5


OPTIONAL = [
    ("w_k_compress",),
    ("w_k_compress", "w_v_compress", "gate_proj_weight"),
    ("k_cmp", "v_cmp"),
    ("k_slc", "v_slc"),
    ("k_slc", "v_slc", "k_win", "v_win", "gates"),
]


def extras(inputs: NSAInputs, names: tuple[str, ...], config: NSAConfig) -> NSAInputs:
    batch, tokens, heads, dim = inputs.q.shape
    kv_heads, v_dim = inputs.v.shape[2:]
    entries = config.num_compressed(tokens)
    made = {
        "w_k_compress": like(kv_heads, dim, dim, scale=dim**-0.5),
        "w_v_compress": like(kv_heads, v_dim, v_dim, scale=v_dim**-0.5),
        "gate_proj_weight": gate_weight(heads, dim),
        "gates": like(batch, tokens, heads, 3),
        "k_cmp": like(batch, entries, kv_heads, dim),
        "v_cmp": like(batch, entries, kv_heads, v_dim, seed=8),
    }
    for seed, branch in enumerate(("slc", "win")):
        made[f"k_{branch}"] = like(batch, tokens, kv_heads, dim, seed=10 + seed)
        made[f"v_{branch}"] = like(batch, tokens, kv_heads, v_dim, seed=20 + seed)
    return replace(inputs, **{name: made[name] for name in names})


@with_strategies("names", OPTIONAL)
def test_optional_tensors(names: tuple[str, ...]) -> None:
    check(extras(NSAInputs(*on_gpu(1000)), names, SOME))


def test_own_keys_and_entries_per_token() -> None:
    names = ("k_slc", "v_slc", "k_win", "v_win", "k_cmp", "v_cmp")
    check_gradients(extras(NSAInputs(*on_gpu(600)), names, PAPER), PAPER)


@MODES
def test_given_gates_and_one_key(config: NSAConfig) -> None:
    """dq is 0: do weighted by a gate is rounded once, and its product with o is that of what was rounded."""
    q, k, v = on_gpu(1, batch=16)
    inputs = NSAInputs(q, k, v, gates=like(16, 1, 8, 3, seed=2, scale=3.0))
    assert check_gradients(inputs, config)["q"].abs().max() < SLACK


def test_any_strides() -> None:
    """Transposed, packed with others, at odd addresses, expanded: the same result as contiguous copies."""
    q, k, v = on_gpu(777, 4, 2, 64, batch=2)
    gates = like(2, 777, 3, 4).transpose(-1, -2)
    expected = nsa_forward(q, k, v, gates=gates.clone(), config=SOME)
    shifted = []
    for tensor in (q, k, v):
        buffer = torch.empty(tensor.numel() + 1, device="cuda", dtype=BF16)
        buffer[1:] = tensor.flatten()
        shifted.append(buffer[1:].view(tensor.shape))
    for others in (
        [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)],
        torch.cat([q, k, v], dim=2).split((4, 2, 2), dim=2),
        shifted,
    ):
        assert torch.equal(nsa_forward(*others, gates=gates, config=SOME), expected)
    one = nsa_forward(q, k[:1].expand_as(k), v[:1].expand_as(v), gates=gates, config=SOME)
    assert torch.equal(one[:1], expected[:1])


# Selection


@pytest.mark.parametrize("name", ["plain", "sparse compressed", "overlapping", "shared in the group", "per token"])
def test_nothing_depends_on_later_tokens(name: str, strategy: str) -> None:
    overlapping = {"compress_block_size": 32, "compress_stride": 16, "select_block_size": 64, "num_local_blocks": 1}
    config = replace(SOME, **{**OPTIONS, "plain": {}, "per token": {}, "overlapping": overlapping}[name])
    config = PAPER if name == "per token" else config
    tokens = 2600 if name == "sparse compressed" else 1100

    def run(q: Tensor, k: Tensor, v: Tensor, **fixed: Tensor | None) -> tuple[Tensor, NSAAux]:
        if not fixed:
            return nsa_forward_aux(q, k, v, config=config)
        forward = dispatch.resolve(dispatch.Call("nsa", q.device, q.dtype), "cute").load()
        out, aux = forward(NSAInputs(q, k, v), config, **fixed)
        return out, NSAAux(*aux)

    positions = {0, 30, 31, 46, 47, 62, 63, 64, 127, 128, 255, 256, 300, 511, 767, 1000, tokens - 300, tokens - 1}
    assert_causal(run, on_gpu(tokens, 8, 2, 64), config, sorted(positions))


def test_ties_go_to_the_lower_block() -> None:
    q, k, v = on_gpu(4096)
    _, aux = nsa_forward_aux(q, torch.ones_like(k), v, config=SOME)
    assert torch.equal(aux.indices[0, 0, -1], torch.arange(3, device="cuda", dtype=torch.int32))
    assert bool((aux.indices[:, :, 2:] == torch.arange(3, device="cuda")).all())


def test_selection_of_a_long_sequence() -> None:
    q, k, v = on_gpu(1 << 16, 4, 2)
    _, aux = nsa_forward_aux(q, k, v)
    inputs = NSAInputs(*(t.double() for t in (q, k, v)), k_cmp=aux.k_cmp.double(), v_cmp=aux.v_cmp.double())
    for tile in (20, 100, 255):
        scores = block_scores(inputs, NSAConfig(), tile)[..., : (tile + 1) * 4]
        kth = scores.topk(16).values[..., -1:]
        chosen = scores.gather(-1, aux.indices[:, :, tile].long())
        assert bool((chosen >= kth - 1e-5 * scores.abs().amax(-1, keepdim=True)).all())


# Chunks, and few tokens


CHUNKED = {
    "plain": SOME,
    "not causal": replace(SOME, causal=False),
    "sparse compressed": replace(SOME, **OPTIONS["sparse compressed"]),
    "per token": PAPER,
}


@pytest.mark.parametrize("gates", ["gate_proj_weight", "gates", None])
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_change_nothing(name: str, gates: str | None, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
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


def test_at_most_ten_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.profiler import ProfilerActivity, profile

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # each fill is a kernel
    q, k, v = on_gpu(4096)
    weight = gate_weight()
    for _ in range(2):
        nsa_forward(q, k, v, gate_proj_weight=weight)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        nsa_forward(q, k, v, gate_proj_weight=weight)
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 3 < len(kernels) <= 10, kernels
