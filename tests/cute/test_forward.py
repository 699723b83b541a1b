"""NSA's forward on an NVIDIA GPU against the fp64 oracle, with Hopper's tiles and with Blackwell's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dispatch
from nsa import NSAAux, NSAConfig, nsa_forward, nsa_forward_aux, reference
from nsa.inputs import NSAInputs
from tests.support import cases
from tests.support.causality import assert_causal
from tests.support.cute_cases import (
    BF16,
    FP16,
    OPTIONS,
    SIZES,
    SOME,
    block_scores,
    check_forward,
    gate_weight,
    on_gpu,
)
from tests.support.hardware import STRATEGIES
from tests.support.helpers import make_qkv

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("tokens", SIZES)
def test_sizes(tokens: int, strategy: str) -> None:
    aux = check_forward(NSAInputs(*on_gpu(tokens), gate_proj_weight=gate_weight()), SOME)
    blocks = -(-tokens // 64)
    if blocks > 8:  # the selection left something out
        assert int((aux.indices[:, :, -1] >= 0).sum(-1).max()) == 3


@pytest.mark.parametrize(
    ("group", "dim", "dtype"), cases.product([1, 2, 4, 8, 16], [64, 128], [BF16, FP16], cover=2), ids=str
)
def test_groups(group: int, dim: int, dtype: torch.dtype) -> None:
    heads = max(group, 2)
    qkv = on_gpu(1000, heads, heads // group, dim, dtype=dtype, batch=2)
    check_forward(NSAInputs(*qkv, gate_proj_weight=gate_weight(heads, dim, dtype)), SOME)


@pytest.mark.parametrize(
    ("entries", "select", "strategy"),
    cases.product([(16, 16), (32, 32), (64, 64), (128, 128), (32, 16), (20, 7)], [64, 128], STRATEGIES, cover=2),
    indirect=["strategy"],
)
@pytest.mark.usefixtures("strategy")
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


@pytest.mark.parametrize("dims", [(64, 128), (128, 64)], ids=str)
def test_value_dims(dims: tuple[int, int], strategy: str) -> None:
    qkv = on_gpu(1000, 4, 2, dims[0], v_dim=dims[1])
    check_forward(NSAInputs(*qkv, gate_proj_weight=gate_weight(4, dims[0])), SOME)


@pytest.mark.parametrize(("name", "strategy"), cases.product(OPTIONS, STRATEGIES, cover=2), indirect=["strategy"])
@pytest.mark.usefixtures("strategy")
def test_options(name: str) -> None:
    check_forward(NSAInputs(*on_gpu(5000, 4, 2), gate_proj_weight=gate_weight(4)), replace(SOME, **OPTIONS[name]))


@pytest.mark.sm_90(num_cmp_selected_blocks=3, n_block_size=64)
def test_narrow_blocks_of_entries() -> None:
    config = replace(SOME, num_cmp_selected_blocks=3, n_block_size=64, compress_block_size=16, select_block_size=64)
    check_forward(NSAInputs(*on_gpu(5000, 4, 2)), config)


@pytest.mark.sm_90(q_tile_size=128)
def test_tiles_of_128() -> None:
    check_forward(NSAInputs(*on_gpu(1000)), replace(SOME, q_tile_size=128))


@pytest.mark.parametrize("form", ["weight", "fp32 weight", "given", "fp32 given", "none"])
def test_gates(form: str) -> None:
    q, k, v = on_gpu(1000, batch=2)
    dtype = torch.float32 if form.startswith("fp32") else BF16
    keywords = {}
    if form.endswith("weight"):
        keywords["gate_proj_weight"] = gate_weight(dtype=dtype)
    elif form.endswith("given"):
        keywords["gates"] = make_qkv(1000, 8, 8, 3, batch=2, dtype=dtype, device="cuda", seed=5)[0]
    inputs = NSAInputs(q, k, v, **keywords)
    aux = check_forward(inputs, SOME)
    expected = reference.nsa(inputs.map(Tensor.double), SOME, indices=aux.indices.long())[1].gates
    # fp32 sums of D products of 16-bit numbers, through a sigmoid of slope at most 1/4
    assert (aux.gates.double() - expected).abs().max() <= 1e-5


def test_inputs_of_all_kinds(strategy: str) -> None:
    """Projections of the compressed entries, ready entries, and keys of their own in every branch."""
    q, k, v = on_gpu(1000, 4, 2, 64, v_dim=128)
    own: dict[str, Tensor] = {}
    for seed, branch in enumerate(("slc", "win"), 1):
        _, own[f"k_{branch}"], own[f"v_{branch}"] = on_gpu(1000, 4, 2, 64, v_dim=128, seed=seed)
    w_k, w_v = (torch.randn(2, d, d, device="cuda", dtype=BF16) / d**0.5 for d in (64, 128))
    aux = check_forward(NSAInputs(q, k, v, w_k_compress=w_k, w_v_compress=w_v, **own), SOME)
    check_forward(NSAInputs(q, k, v, k_cmp=aux.k_cmp, v_cmp=aux.v_cmp), SOME)
    pool = torch.nn.Sequential(torch.nn.Flatten(-2), torch.nn.Linear(64 * 64, 64)).to("cuda", BF16)
    with torch.no_grad():
        entries = reference.nsa(NSAInputs(q, k, k), replace(SOME, compress=pool))[1].k_cmp
    got = nsa_forward_aux(q, k, k, config=replace(SOME, compress=pool))[1].k_cmp
    assert torch.equal(got, entries)


def test_any_strides() -> None:
    """Transposed, packed with others, shifted to odd addresses, expanded: the same result as contiguous copies."""
    q, k, v = on_gpu(777, 4, 2, 64, batch=2)
    expected = nsa_forward(q, k, v, config=SOME)
    other = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(nsa_forward(*other, config=SOME), expected)
    fused = torch.cat([q, k, v], dim=2)
    assert torch.equal(nsa_forward(*fused.split((4, 2, 2), dim=2), config=SOME), expected)
    shifted = []
    for tensor in (q, k, v):
        buffer = torch.empty(tensor.numel() + 1, device="cuda", dtype=BF16)
        buffer[1:] = tensor.flatten()
        shifted.append(buffer[1:].view(tensor.shape))
    assert torch.equal(nsa_forward(*shifted, config=SOME), expected)
    one = nsa_forward(q, k[:1].expand_as(k), v[:1].expand_as(v), config=SOME)
    assert torch.equal(one[:1], expected[:1])


@pytest.mark.parametrize("name", ["plain", "sparse compressed", "overlapping", "shared in the group"])
def test_nothing_depends_on_later_tokens(name: str, strategy: str) -> None:
    overlapping = {"compress_block_size": 32, "compress_stride": 16, "select_block_size": 64, "num_local_blocks": 1}
    config = replace(SOME, **{**OPTIONS, "plain": {}, "overlapping": overlapping}[name])
    tokens = 2600 if "num_cmp_selected_blocks" in OPTIONS.get(name, {}) else 1100

    def run(q: Tensor, k: Tensor, v: Tensor, **fixed: Tensor | None) -> tuple[Tensor, NSAAux]:
        if not fixed:
            return nsa_forward_aux(q, k, v, config=config)
        forward = dispatch.resolve(dispatch.Call("nsa", q.device, q.dtype), "cute").load()
        out, aux = forward(NSAInputs(q, k, v), config, **fixed)
        return out, NSAAux(*aux)

    positions = {0, 62, 63, 64, 127, 128, 255, 256, 300, 511, 767, 1000, tokens - 300, tokens - 1}
    assert_causal(run, on_gpu(tokens, 4, 2, 64), config, sorted(positions))


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


def test_chunks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    from cute_kernels.call import chunk_rows

    q, k, v = on_gpu(3000, batch=2)
    gates = make_qkv(3000, 8, 8, 3, batch=2, dtype=BF16, device="cuda", seed=5)[0]
    for config in (SOME, replace(SOME, causal=False), replace(SOME, num_cmp_selected_blocks=2, compress_block_size=4,
                                                                 select_block_size=64)):  # fmt: skip
        expected = nsa_forward(q, k, v, gates=gates, config=config)
        with monkeypatch.context() as patch:
            patch.setattr("cute_kernels.call.CHUNK_BYTES", 1 << 20)
            assert chunk_rows(2, 3000, 8, 128, 256) < 3000
            assert torch.equal(nsa_forward(q, k, v, gates=gates, config=config), expected)


@pytest.mark.parametrize("shape", [(0, 256), (1, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    q, k, v = (torch.ones(*shape, heads, 64, device="cuda", dtype=BF16) for heads in (4, 2, 2))
    out, aux = nsa_forward_aux(q, k, v)
    assert out.shape == q.shape
    assert aux.lse_win.shape == (shape[0], 4, shape[1])


# What users build around a call


def test_compiles_without_graph_breaks() -> None:
    weight = gate_weight()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nsa_forward(q * 1, k, v, gate_proj_weight=weight, config=SOME) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (1000, 1300, 700):
        qkv = on_gpu(tokens)
        assert torch.equal(compiled(*qkv), layer(*qkv))


def test_at_most_ten_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.profiler import ProfilerActivity, profile

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # each fill is a kernel
    q, k, v = on_gpu(4096)
    for _ in range(2):
        nsa_forward(q, k, v, gate_proj_weight=gate_weight())
    weight = gate_weight()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        nsa_forward(q, k, v, gate_proj_weight=weight)
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 3 < len(kernels) <= 10, kernels
