"""NSA's Triton kernels: compiled for GPUs that are not there and executed instruction by instruction (compiled.py), and
on a GPU.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import dispatch
from ascend_kernels import device
from ascend_kernels.launch import recording, specialization
from ascend_kernels.nsa import backward, interval, kv_outer, layout, lists, tiling, topk
from nsa import NSAConfig, block_sparse_attention, nsa, nsa_forward, nsa_forward_aux, reference, top_blocks_by_max
from nsa.inputs import NSAAux, NSAInputs
from tests.ascend import compiled
from tests.ascend.lowered import description
from tests.support import cases
from tests.support.far_rows import far_apart
from tests.support.helpers import make_qkv

EXECUTED = (80, 89, 120)
"""Compute capabilities whose code tests/ptx executes."""
BUDGETS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Error relative to the largest value: a few roundings of results and of probabilities."""

WEIGHTS = ("gate_proj_weight", "w_k_compress", "w_v_compress")

BLOCKS: dict[str, Any] = {
    "compress_block_size": 8, "compress_stride": 4, "select_block_size": 16, "num_selected_blocks": 2,
    "window_size": 12,
}  # fmt: skip
PAPER = NSAConfig.paper(**BLOCKS, num_init_blocks=0, num_local_blocks=1)
PER_TILE = NSAConfig.per_tile(**BLOCKS, q_tile_size=16)


class Case(NamedTuple):
    """A call of NSA."""

    config: NSAConfig
    dtype: torch.dtype = torch.bfloat16
    dim: int = 16
    dim_v: int = 16
    tokens: int = 40
    heads: tuple[int, int] = (4, 2)
    bounds: tuple[int, ...] | None = None
    """Bounds of packed documents; rows after the last one are NaN."""
    keys: tuple[int, ...] | None = None
    """Bounds of their keys, if they differ."""
    starts: tuple[int, ...] | None = None
    """q_start of sequences, of which there are 60 keys."""
    more: tuple[str, ...] = ("gate_proj_weight",)
    """Tensors besides q, k and v."""
    recompute: bool = False
    query_outer: bool = False
    logits: float = 1.0
    """Standard deviation of logits, about."""


CASES: dict[str, Case] = {
    "per token": Case(PAPER),
    "per tile": Case(PER_TILE),
    "per token, packed": Case(PAPER, torch.float16, tokens=48, bounds=(0, 5, 5, 30, 44)),
    "per token, query-outer, continued": Case(
        PAPER, tokens=24, bounds=(0, 5, 9, 22), keys=(0, 20, 30, 46), query_outer=True, recompute=True
    ),
    "per tile, shared, given gates, own keys, fp32": Case(
        NSAConfig.per_tile(**BLOCKS, q_tile_size=32, share_heads_in_group=True, num_init_blocks=1),
        torch.float32, dim=24, dim_v=8, more=("gates", "k_slc", "v_slc", "k_win", "v_win"), recompute=True,
    ),
    "per tile, not causal, learned, no gates": Case(
        NSAConfig.per_tile(**BLOCKS, q_tile_size=32, causal=False, num_local_blocks=1),
        more=("w_k_compress", "w_v_compress"),
    ),
    "per token, large logits": Case(PAPER, tokens=25, logits=100.0),
    "per tile, blocks of two steps": Case(
        NSAConfig.per_tile(**{**BLOCKS, "select_block_size": 80}, q_tile_size=32), tokens=170, heads=(2, 1)
    ),
    "per tile, packed, given gates": Case(PER_TILE, tokens=48, bounds=(0, 5, 5, 30, 44), more=("gates",)),
    "per tile, starts": Case(PER_TILE, tokens=20, starts=(0, 32)),
    "given entries, 128 features": Case(PAPER, dim=128, dim_v=128, more=("k_cmp", "v_cmp")),
}  # fmt: skip

FEW = {"num_selected_blocks": 4, "window_size": 100}
ON_GPUS: dict[str, Case] = {
    "paper": Case(NSAConfig.paper(**FEW), dim=128, dim_v=128, tokens=700, heads=(32, 2)),
    "paper, 192 and 128 features": Case(NSAConfig.paper(**FEW), dim=192, dim_v=128, tokens=500, heads=(16, 1)),
    "paper, fp32": Case(NSAConfig.paper(**FEW), torch.float32, dim=64, dim_v=64, tokens=300),
    "paper, groups of 1": Case(NSAConfig.paper(**FEW), dim=64, dim_v=64, tokens=700, heads=(2, 2)),
    "paper, groups of 6": Case(NSAConfig.paper(**FEW), dim=40, dim_v=24, tokens=700, heads=(12, 2)),
    "paper, groups of 40": Case(NSAConfig.paper(**FEW), dim=64, dim_v=64, tokens=700, heads=(40, 1)),
    "paper, blocks of 128": Case(
        NSAConfig.paper(**FEW, select_block_size=128), dim=128, dim_v=128, tokens=700, recompute=True
    ),
    "paper, blocks of 48, 256 features": Case(
        NSAConfig.paper(**FEW, select_block_size=48), dim=256, dim_v=256, tokens=500
    ),
    "per tile": Case(NSAConfig.per_tile(**FEW), dim=128, dim_v=128, tokens=900),
    "per tile of 48": Case(NSAConfig.per_tile(**FEW, q_tile_size=48), torch.float16, 64, 64, tokens=900),
    "per tile, shared": Case(NSAConfig.per_tile(**FEW, share_heads_in_group=True), dim=64, dim_v=64, tokens=900),
}


def inputs_of(case: Case) -> NSAInputs:
    generator = torch.Generator().manual_seed(0)
    keys = 60 if case.starts else case.tokens if case.keys is None else case.keys[-1] + 4
    lead = (len(case.starts or (0,)),) if case.bounds is None else ()
    entries, (heads, kv_heads) = case.config.num_compressed(keys), case.heads
    shapes = {
        "q": (case.tokens, heads, case.dim), "k": (keys, kv_heads, case.dim), "v": (keys, kv_heads, case.dim_v),
        "gates": (case.tokens, heads, 3), "k_cmp": (entries, kv_heads, case.dim),
        "v_cmp": (entries, kv_heads, case.dim_v), "k_slc": (keys, kv_heads, case.dim),
        "v_slc": (keys, kv_heads, case.dim_v), "k_win": (keys, kv_heads, case.dim),
        "v_win": (keys, kv_heads, case.dim_v), "gate_proj_weight": (heads, 3, case.dim),
        "w_k_compress": (kv_heads, case.dim, case.dim), "w_v_compress": (kv_heads, case.dim_v, case.dim_v),
    }  # fmt: skip

    def tensor(name: str) -> Tensor:
        shape = shapes[name] if name in WEIGHTS else (*lead, *shapes[name])
        scale = case.logits if name == "q" else 1.0
        return (scale * torch.randn(shape, generator=generator)).to(case.dtype)

    def bounds(of: tuple[int, ...] | None) -> Tensor | None:
        return None if of is None else torch.tensor(of, dtype=torch.int32)

    tensors: dict[str, Any] = {name: tensor(name) for name in ("q", "k", "v", *case.more)}
    if case.bounds is not None:
        tensors["q"][case.bounds[-1] :] = torch.nan
        for name in "kv":
            tensors[name][(case.keys or case.bounds)[-1] :] = torch.nan
    where = {"cu_seqlens": case.bounds, "cu_seqlens_k": case.keys, "q_start": case.starts}
    return NSAInputs(**tensors, **{name: bounds(of) for name, of in where.items()})


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
    assert error <= BUDGETS[dtype], f"{what}: {error:.1e}"


def check(of: Case, place: str = "cpu") -> None:
    """All results and gradients against the reference in fp64. Selections must be its own, but for near ties."""
    config, inputs = of.config, inputs_of(of).map(lambda x: x.to(place))
    inputs = replace(inputs, **{name: x.to(place) for name, x in inputs.tensors().items()})
    own = inputs.map(lambda x: x.detach().clone().requires_grad_())
    leaves = {name: x for name, x in own.tensors().items() if x.requires_grad}
    out = nsa(**own.tensors(), config=config, recompute=of.recompute, backend="triton")
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    gradients = torch.autograd.grad(out, [*leaves.values()], do, retain_graph=True)
    if place != "cpu":
        assert all(map(torch.equal, gradients, torch.autograd.grad(out, [*leaves.values()], do)))
    same_out, aux = nsa_forward_aux(**inputs.tensors(), config=config, backend="triton")
    assert torch.equal(same_out, out)

    exact = inputs.map(lambda x: x.double().nan_to_num(0.0).requires_grad_())
    _, free = reference.nsa(exact, config)
    assert free is not None
    given: dict[str, Any] = {}
    if not torch.equal(aux.indices, free.indices):
        assert of.bounds is None, "packed documents differ"
        assert (aux.indices != free.indices).any(-1).float().mean() < 0.03, "more than near ties"
        given["indices"] = aux.indices.long()
    expected, expected_aux = reference.nsa(exact, config, **given)
    assert_close(out, expected, of.dtype, "out")
    assert expected_aux is not None
    for name, got, wanted in zip(NSAAux._fields, aux, expected_aux, strict=True):
        if got is None or wanted is None:
            assert got is wanted
        elif name != "indices":
            assert torch.equal(got.isinf(), wanted.isinf()), name
            finite = ~wanted.isinf()
            assert_close(got[finite], wanted[finite], of.dtype, name)
    exact_leaves = [x for x in exact.tensors().values() if x.requires_grad]
    wanted = torch.autograd.grad(expected, exact_leaves, do.double())
    for name, got, gradient in zip(leaves, gradients, wanted, strict=True):
        assert_close(got, gradient, of.dtype, f"gradient of {name}")


@pytest.fixture
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A compute capability, for whose class tiles are chosen. Limits are so small that all work comes in chunks."""
    found: int = request.param
    for module, name, value in (
        (backward, "TEMPORARY_BYTES", 1), (kv_outer, "PARTIAL_BYTES", 1 << 14), (layout, "DOCS", 2),
        (lists, "PAIRS", 8), (topk, "WORKSPACE_BYTES", 1 << 10), (topk, "BLOCK", 2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(device, "memory_class", lambda _: compiled.CLASSES[found])
    return found


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("case", "capability"),
    cases.some([("per token, large logits", 80), ("per tile, blocks of two steps", 120)], CASES, EXECUTED),
    indirect=["capability"],
)
def test_nsa(case: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if CASES[case].query_outer:
        monkeypatch.setattr(tiling, "QUERY_OUTER_FROM", dict.fromkeys("SML", 1))
    with compiled.executing(capability):
        check(CASES[case])


@pytest.mark.cuda
@pytest.mark.parametrize("case", [*CASES, *(f"large: {name}" for name in ON_GPUS)])
def test_on_a_gpu(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of = CASES[case] if case in CASES else ON_GPUS[case.removeprefix("large: ")]
    if of.query_outer:
        monkeypatch.setattr(tiling, "QUERY_OUTER_FROM", dict.fromkeys("SML", 1))
    check(of, "cuda")


def check_rows(config: NSAConfig, tokens: int, start: int, stop: int, heads: int, dim: int, place: str) -> None:
    """Rows start ... stop - 1 of a call are those of shorter calls, and do not depend on later tokens, bit for bit."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, tokens, h, dim, device=place).bfloat16() for h in (heads, 2, 2))
    whole = nsa_forward(q, k, v, config=config, backend="triton")
    later = [x[:, :stop].clone() for x in (q, k, v)]
    assert torch.equal(nsa_forward(*later, config=config, backend="triton"), whole[:, :stop])
    part = nsa_forward(q[:, start:stop], *later[1:], config=config, backend="triton")
    assert torch.equal(part, whole[:, start:stop])


@pytest.mark.interpreted
@pytest.mark.parametrize(("config", "start", "stop"), [(PAPER, 9, 27), (PER_TILE, 16, 32)], ids=["token", "tile"])
def test_rows_of_shorter_calls(config: NSAConfig, start: int, stop: int) -> None:
    with compiled.executing(89):
        check_rows(config, 40, start, stop, 4, 16, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [4, 32, 80])
@pytest.mark.parametrize(
    ("config", "start", "stop"),
    [(NSAConfig.paper(**FEW), 333, 777), (NSAConfig.per_tile(**FEW), 512, 768)],
    ids=["token", "tile"],
)
def test_rows_of_shorter_calls_on_a_gpu(config: NSAConfig, start: int, stop: int, heads: int) -> None:
    check_rows(config, 1000, start, stop, heads, 128, "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("config", [NSAConfig.paper(**FEW), NSAConfig.per_tile(**FEW)], ids=["token", "tile"])
def test_rows_far_apart_on_a_gpu(config: NSAConfig) -> None:
    """Offsets of inputs and of the gradient of out beyond 2^31 elements."""
    torch.manual_seed(0)
    tensors = [torch.randn(1, 700, heads, 64, device="cuda").bfloat16() for heads in (8, 2, 2, 8)]

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = nsa(*leaves, config=config, backend="triton")
        return out, *torch.autograd.grad(out, leaves, do)

    for got, expected in zip(run(*far_apart(tensors, 1)), run(*tensors), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("config", [PAPER, PER_TILE], ids=["token", "tile"])
def test_lengths_share_compiled_kernels(config: NSAConfig) -> None:
    """Training on other lengths compiles nothing."""
    found: list[set[Any]] = []
    for tokens in (40, 41, 64, 128, 200, 255, 256, 500):
        inputs = inputs_of(Case(config, tokens=tokens, heads=(8, 2)))
        with recording(run=False) as launches:
            out, (indices, *saved) = backward.nsa_saving(inputs, config, recompute=False)
            backward.nsa_backward(inputs, config, [indices.zero_(), *saved], out)
        found.append({specialization(x.kernel, x.arguments, x.constants, x.options) for x in launches})
    assert all(one == found[0] for one in found)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("by_block", "causal", "capability"),
    cases.some([(True, True, 89)], [True, False], [True, False], EXECUTED),
    indirect=["capability"],
)
def test_blocks(by_block: bool, causal: bool, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given blocks, in any order; those of an indexer."""
    monkeypatch.setattr(tiling, "QUERY_OUTER_FROM", dict.fromkeys("SML", 12 if by_block else 1))
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    queries = 24 if causal else 40
    q, k, v, q_idx, k_idx = normal(2, queries, 4, 16), normal(2, 40, 2, 16), normal(2, 40, 2, 8), *(
        normal(2, n, h, 16) for n, h in ((queries, 2), (40, 1))
    )  # fmt: skip
    how: dict[str, Any] = {"block_size": 16, "causal": causal, "softmax_scale": 0.3}
    with compiled.executing(capability):
        if causal:
            blocks = top_blocks_by_max(q_idx, k_idx, block_size=16, k=2, local=1, backend="triton")
            exact = top_blocks_by_max(q_idx.double(), k_idx.double(), block_size=16, k=2, local=1)
            assert torch.equal(blocks, exact)
        else:
            blocks = torch.tensor([2, 0]).expand(2, 2, queries, 2)
        blocks = blocks.flip(-1)
        own = [x.clone().requires_grad_() for x in (q, k, v)]
        out = block_sparse_attention(*own, blocks, **how, backend="triton")
        do = normal(*out.shape)
        gradients = torch.autograd.grad(out, own, do)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = block_sparse_attention(*leaves, blocks, **how, backend="reference")
    assert_close(out, expected, torch.bfloat16, "out")
    for name, got, wanted in zip("qkv", gradients, torch.autograd.grad(expected, leaves, do.double()), strict=True):
        assert_close(got, wanted, torch.bfloat16, f"d{name}")


@pytest.mark.interpreted
def test_a_window_as_long_as_the_sequence_is_dense_attention() -> None:
    q, k, v = make_qkv(70, dtype=torch.float16)
    with compiled.executing(80):
        pack = layout.pack_of(q, k, length=16, stride=16, tile=1, causal=True)
        out, _ = interval.forward(*map(layout.rows_of, (q, k, v)), pack, interval.Interval.window(70, True), 0.25)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    dense = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert_close(out, dense.transpose(1, 2)[0], torch.float16, "out")


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "config", [PAPER, PER_TILE, replace(PAPER, num_selected_blocks=0, num_local_blocks=0, window_size=0)]
)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 3)], ids=str)
def test_few_or_no_keys(config: NSAConfig, shape: tuple[int, int]) -> None:
    """No sequences, no tokens, no entries, no blocks."""
    q, k, v = (torch.randn(*shape, h, 16, requires_grad=True) for h in (4, 2, 2))
    with compiled.executing(89):
        out, aux = nsa_forward_aux(q, k, v, config=config, backend="triton")
        grads = torch.autograd.grad(nsa(q, k, v, config=config, backend="triton").sum(), (q, k, v))
    expected, expected_aux = nsa_forward_aux(q, k, v, config=config, backend="reference")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(aux.indices, expected_aux.indices)
    assert [x.shape for x in aux if x is not None] == [x.shape for x in expected_aux if x is not None]
    wanted = torch.autograd.grad(nsa(q, k, v, config=config, backend="reference").sum(), (q, k, v))
    torch.testing.assert_close(grads, wanted)


@pytest.mark.interpreted
def test_no_documents() -> None:
    q, k, v = (torch.full((5, h, 16), torch.nan) for h in (4, 2, 2))
    with compiled.executing(89):
        out = nsa(q, k, v, config=PAPER, cu_seqlens=torch.zeros(1, dtype=torch.int32), backend="triton")
    assert not out.any()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_saved_tensors_are_known_before(case: str, recompute: bool) -> None:
    """Shapes and dtypes for the meta device and torch.compile."""
    inputs, config = inputs_of(CASES[case]), CASES[case].config
    with recording(run=False):
        _, saved = backward.nsa_saving(inputs, config, recompute=recompute)
    like = backward.nsa_saved_like(inputs.map(lambda x: x.to("meta")), config, recompute=recompute)
    assert [(x.shape, x.dtype) for x in like] == [(x.shape, x.dtype) for x in saved]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "supports num_cmp_selected_blocks=None only, got 2": ({}, {"num_cmp_selected_blocks": 2}),
    "supports a compress_stride that divides l and l', got 3, 8 and 16": ({}, {"compress_stride": 3}),
    "supports a q_tile_size of 1 or a multiple of 16, got 24": ({}, {"q_tile_size": 24}),
    "supports a select_block_size that is a multiple of 16 up to 256, got 8": ({}, {"select_block_size": 8}),
    "supports a select_block_size that is a multiple of 16 up to 256, got 512": ({}, {"select_block_size": 512}),
    "supports num_selected_blocks up to 64, got 65": ({}, {"num_selected_blocks": 65}),
    "supports D and D_v up to 256, got 264 and 264": ({"dim": 264}, {}),
    "supports up to 128 query heads per key/value head, got 129": ({"heads": 129}, {}),
    "supports selection per token with causal=True only": ({}, {"q_tile_size": 1, "causal": False}),
    "supports float16, bfloat16 and float32, got float64": ({"dtype": torch.float64}, {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message: str) -> None:
    sizes, options = {"heads": 1, "dim": 8, "dtype": torch.float32} | REFUSED[message][0], REFUSED[message][1]
    q, k, v = (torch.zeros(1, 32, h, sizes["dim"], dtype=sizes["dtype"]) for h in (sizes["heads"], 1, 1))
    config = NSAConfig.per_tile(**BLOCKS | {"q_tile_size": 16} | options)
    with recording(run=False) as launches, pytest.raises(dispatch.BackendError, match=re.escape(f"triton: {message}")):
        nsa(q, k, v, config=config, backend="triton")
    assert not launches


SPILLS = {
    "forward_kernel": 256,
    "dq_kernel": 64,
    "dkdv_kernel": 544,
    "token_backward_kernel": 384,
    "tile_backward_kernel": 128,
}
"""Most bytes of registers that a thread of a kernel stores to memory; others store none.

The highest are those of data-centre Blackwell (10.0, 10.3), whose tiles are Hopper's.
"""


@pytest.mark.full
@pytest.mark.parametrize("capability", compiled.CLASSES, indirect=True)
@pytest.mark.parametrize("heads", [(64, 4), (8, 8)], ids=str)
@pytest.mark.parametrize("config", [NSAConfig.paper(), NSAConfig.per_tile()], ids=["per token", "per tile"])
def test_shared_memory_and_spills(config: NSAConfig, heads: tuple[int, int], capability: int) -> None:
    """Kernels of a training step with 128 features in bf16, assembled for each GPU."""
    q, k, v = (torch.zeros(1, 1024, h, 128, dtype=torch.bfloat16) for h in (heads[0], heads[1], heads[1]))
    inputs = NSAInputs(q, k, v, gate_proj_weight=torch.zeros(heads[0], 3, 128, dtype=torch.bfloat16))
    with recording(run=False) as launches:
        out, saved = backward.nsa_saving(inputs, config, recompute=False)
        backward.nsa_backward(inputs, config, saved, torch.zeros_like(out))
    for launch in {description.key_of(launch): launch for launch in launches}.values():
        ptx = compiled.compile_ptx(launch, capability)
        compiled.check_shared(launch, ptx, capability)
        name = launch.kernel.fn.__name__
        assert compiled.spilled_bytes(ptx, capability) <= SPILLS.get(name, 0), name
