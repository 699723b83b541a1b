"""Packed documents on CUDA: each is bitwise what it is alone, and inside the error budget of the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from nsa import NSAAux, NSAConfig, nsa, nsa_forward, nsa_forward_aux, reference
from nsa.inputs import NSAInputs
from tests.support.cute_cases import Alone, alone_documents, captured, part_of
from tests.support.hardware import with_strategies
from tests.support.helpers import make_qkv

pytestmark = [pytest.mark.cuda, pytest.mark.filterwarnings("default")]

T = 256
LENGTHS = (0, 1, T - 1, T, 0, 0, T + 1, 3000, 37, 2 * T, 2113, 0)
TAIL = 41
"""Rows behind the last document, which hold NaN."""


@dataclass(frozen=True)
class Case:
    config: NSAConfig
    heads: int = 4
    kv_heads: int = 1
    dim: int = 128
    v_dim: int | None = None
    tensors: tuple[str, ...] = ()
    """Optional tensors to give."""


OVERLAPPING = NSAConfig.seed(
    compress_block_size=32,
    compress_stride=16,
    select_block_size=64,
    num_selected_blocks=6,
    num_init_blocks=1,
    num_local_blocks=2,
    window_size=200,
)
CASES = {
    "seed": Case(NSAConfig.seed(num_selected_blocks=4), tensors=("gate_proj_weight",)),
    "one head a group, D=64": Case(NSAConfig.seed(num_selected_blocks=4), heads=2, kv_heads=2, dim=64),
    "D_v=64": Case(NSAConfig.seed(num_selected_blocks=4), heads=2, kv_heads=2, v_dim=64),
    "overlapping, forced": Case(OVERLAPPING, heads=8, kv_heads=2, tensors=("gates",)),
    "shared": Case(
        replace(OVERLAPPING, share_heads_in_group=True), 8, 2, dim=64, tensors=("w_k_compress", "w_v_compress")
    ),
    "wide blocks": Case(replace(OVERLAPPING, select_block_size=256, q_tile_size=512, num_selected_blocks=3)),
    "sparse compressed": Case(
        replace(OVERLAPPING, compress_block_size=16, compress_stride=8, num_cmp_selected_blocks=2), heads=8, kv_heads=2
    ),
    "own keys": Case(
        NSAConfig.seed(num_selected_blocks=4, window_size=100), tensors=("k_slc", "v_slc", "k_win", "v_win")
    ),
    "own window": Case(NSAConfig.seed(num_selected_blocks=4), dim=64, tensors=("k_win", "v_win")),
    "nothing selected": Case(NSAConfig.seed(num_selected_blocks=0, window_size=0)),
    "per token": Case(NSAConfig.paper(num_selected_blocks=6, window_size=200), heads=8, kv_heads=2, tensors=("gates",)),
    "long blocks": Case(NSAConfig.seed(compress_block_size=256, num_selected_blocks=2)),
}


def pack(case: Case, lengths: tuple[int, ...] = LENGTHS, tail: int = TAIL, *, seed: int = 0) -> NSAInputs:
    tokens = sum(lengths) + tail
    sizes = {"batch": None, "dtype": torch.bfloat16, "device": "cuda"}
    shape = (tokens, case.heads, case.kv_heads, case.dim, case.v_dim)
    q, k, v = make_qkv(*shape, **sizes, seed=seed)  # type: ignore[arg-type]
    given: dict[str, Tensor] = {}
    for offset, branch in enumerate(("slc", "win"), 1):
        _, own_k, own_v = make_qkv(*shape, **sizes, seed=seed + offset)  # type: ignore[arg-type]
        given |= {f"k_{branch}": own_k, f"v_{branch}": own_v}
    generator = torch.Generator().manual_seed(seed)
    given["gates"] = torch.randn((tokens, case.heads, 3), generator=generator).cuda()
    for tensor in (q, k, v, *given.values()):
        tensor[tokens - tail :] = torch.nan
    given["gate_proj_weight"] = torch.randn((case.heads, 3, case.dim), generator=generator).cuda().bfloat16() / 8
    for name, dim in (("w_k_compress", case.dim), ("w_v_compress", case.v_dim or case.dim)):
        given[name] = (torch.randn((case.kv_heads, dim, dim), generator=generator) / dim**0.5).cuda().bfloat16()
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
    return NSAInputs(q, k, v, cu_seqlens=bounds, **{name: given[name] for name in case.tensors})


def run(inputs: NSAInputs, config: NSAConfig) -> tuple[Tensor, NSAAux]:
    return nsa_forward_aux(**inputs.tensors(), config=config, backend="cute")  # type: ignore[arg-type]


def without_batch(aux: NSAAux) -> dict[str, Tensor]:
    return {name: tensor[0] for name, tensor in aux._asdict().items() if tensor is not None}


def assert_equals_each_document_alone(case: Case, lengths: tuple[int, ...] = LENGTHS) -> None:
    inputs = pack(case, lengths)
    out, aux = run(inputs, case.config)
    assert torch.equal(nsa_forward(**inputs.tensors(), config=case.config, backend="cute"), out)  # type: ignore[arg-type]
    last = None
    for document in alone_documents(inputs, case.config, lengths):
        where = f"document {document.tokens}"
        alone_out, alone_aux = run(document.inputs, case.config)
        assert torch.equal(out[document.tokens], alone_out[0]), where
        expected = without_batch(alone_aux)
        got = part_of(aux, document)
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), f"{name} of {where}"
        last = document
    assert last is not None
    assert not out[last.tokens.stop :].any()
    rest = replace(last, tokens=slice(last.tokens.stop, None), tiles=slice(last.tiles.stop, None))
    for name, tensor in part_of(aux, replace(rest, entries=slice(last.entries.stop, None))).items():
        fill = -torch.inf if name.startswith("lse") else -1 if name.endswith("indices") else 0
        assert (tensor == fill).all(), f"{name} behind the last document"


@with_strategies("name", CASES)
def test_equals_each_document_alone(name: str) -> None:
    assert_equals_each_document_alone(CASES[name])


@with_strategies("")
def test_lists_all_blocks_of_entries_where_they_fit() -> None:
    """Two blocks, and a first tile that sees one of them."""
    case = CASES["sparse compressed"]
    assert -(-case.config.num_compressed(1500) // case.config.n_block_size) == case.config.num_cmp_selected_blocks
    assert case.config.num_compressed(T) < case.config.n_block_size
    assert_equals_each_document_alone(case, (1500, 300, 2113))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tile", [pytest.param(tile, marks=pytest.mark.sm_90(q_tile_size=tile)) for tile in (128, 384)])
def test_tiles_of_sm_90(tile: int, dim: int) -> None:
    assert_equals_each_document_alone(Case(replace(OVERLAPPING, q_tile_size=tile), dim=dim))


@with_strategies("name", CASES)
def test_has_the_shapes_of_the_reference(name: str) -> None:
    case, lengths = CASES[name], (300, 0, 20)
    inputs = pack(case, lengths)
    out, aux = run(inputs, case.config)
    expected_out, expected = reference.nsa(inputs, case.config)
    assert out.shape == expected_out.shape
    for name, tensor in expected._asdict().items():
        got = getattr(aux, name)
        if tensor is None:
            assert got is None, name
        else:
            assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype), name


@with_strategies("name spare", ["overlapping, forced", "sparse compressed"], [-1, 0, 500])
def test_given_entries(name: str, spare: int) -> None:
    """As they were computed, with no, the same or more rows to spare, they change no bit; spare rows are not read."""
    case = CASES[name]
    inputs = pack(case)
    out, aux = run(inputs, case.config)
    used = sum(map(case.config.num_compressed, LENGTHS))
    given = {}
    for field in ("k_cmp", "v_cmp"):
        entries = getattr(aux, field)
        rows = used if spare < 0 else len(entries) + spare
        given[field] = entries.new_full((rows, *entries.shape[1:]), torch.nan)
        given[field][:used] = entries[:used]
    got, got_aux = run(replace(inputs, **given), case.config)
    assert torch.equal(got, out)
    assert torch.equal(got_aux.k_cmp[:used], aux.k_cmp[:used])


REACHED = ("seed", "one head a group, D=64", "overlapping, forced", "sparse compressed", "own keys", "per token")


def spoilt(inputs: NSAInputs, document: Alone, value: float) -> NSAInputs:
    """With a value in place of all queries, keys and values of a document."""
    changed = {}
    for name, tensor in inputs.tensors().items():
        if name[:2] in ("q", "k", "v", "k_", "v_"):
            changed[name] = tensor.clone()
            changed[name][document.tokens] = value
    return replace(inputs, **changed)


@with_strategies("name value", REACHED, [3.0, torch.nan, torch.inf])
def test_no_document_reaches_another(name: str, value: float) -> None:
    """Neither the one before it, whose last tiles of keys may go on behind its end, nor the one behind it."""
    case = CASES[name]
    inputs = pack(case)
    before, before_aux = run(inputs, case.config)
    whole = list(alone_documents(inputs, case.config, LENGTHS))
    for changed in whole:
        after, after_aux = run(spoilt(inputs, changed, value), case.config)
        for document in whole:
            if document is not changed:
                where = f"{document.tokens} from {changed.tokens}"
                assert torch.equal(before[document.tokens], after[document.tokens]), where
                old, new = part_of(before_aux, document), part_of(after_aux, document)
                assert all(torch.equal(old[key], new[key]) for key in old), where
        assert not torch.equal(before[changed.tokens], after[changed.tokens])
        assert not after[sum(LENGTHS) :].any()


@with_strategies("name value", REACHED, [torch.nan, torch.inf])
def test_no_gradient_reaches_another_document(name: str, value: float) -> None:
    """FlashAttention-4 adds up in any order, and P and dS are rounded to bf16: 2^-7 of the largest gradient."""
    case = CASES[name]
    inputs = pack(case)
    do = torch.randn(*inputs.q.shape[:-1], inputs.v.shape[-1], device="cuda", dtype=torch.bfloat16)
    names = [name for name in inputs.tensors() if name[:2] in ("q", "k", "v", "k_", "v_")]

    def gradients(given: NSAInputs, do: Tensor) -> tuple[Tensor, ...]:
        leaves = {name: given.tensors()[name].detach().requires_grad_() for name in names}
        out = nsa(**{**given.tensors(), **leaves}, config=case.config, backend="cute")  # type: ignore[arg-type]
        return torch.autograd.grad(out, list(leaves.values()), do)

    before = gradients(inputs, do)
    whole = list(alone_documents(inputs, case.config, LENGTHS))
    for changed in whole:
        other_do = do.clone()
        other_do[changed.tokens] = value
        after = gradients(spoilt(inputs, changed, value), other_do)
        rest = torch.ones(sum(LENGTHS), dtype=torch.bool, device="cuda")
        rest[changed.tokens] = False
        for of, old, new in zip(names, before, after, strict=True):
            old, new = old[: sum(LENGTHS)][rest], new[: sum(LENGTHS)][rest]
            allowed = 2**-7 * float(old.float().abs().max())
            torch.testing.assert_close(new, old, rtol=0, atol=allowed, msg=lambda m, of=of: f"d{of}: {m}")


@with_strategies("docs", [300, 2500])
def test_many_documents(docs: int) -> None:
    """With 300 FlashAttention-4's own tables, with 2500 several rounds of adding up."""
    case = CASES["shared"]
    generator = torch.Generator().manual_seed(docs)
    lengths = tuple(torch.randint(0, 90, (docs,), generator=generator).tolist())
    inputs = pack(case, lengths)
    out, aux = run(inputs, case.config)
    for document in list(alone_documents(inputs, case.config, lengths))[:: docs // 20]:
        alone_out, alone_aux = run(document.inputs, case.config)
        assert torch.equal(out[document.tokens], alone_out[0])
        expected = without_batch(alone_aux)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in part_of(aux, document).items())


@with_strategies("name", ["seed", "sparse compressed", "own keys"])
def test_a_graph_follows_the_bounds(name: str) -> None:
    case = CASES[name]
    inputs = pack(case)

    def call() -> Tensor:
        return nsa_forward(**inputs.tensors(), config=case.config, backend="cute")  # type: ignore[arg-type]

    torch.utils.deterministic.fill_uninitialized_memory = False
    graph, out = captured(call)
    total, docs = sum(LENGTHS), len(LENGTHS)
    other = torch.linspace(0, total, docs + 1).round().int()
    for bounds in (other, torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)):
        assert inputs.cu_seqlens is not None
        inputs.cu_seqlens.copy_(bounds)
        graph.replay()
        assert torch.equal(out, call())
