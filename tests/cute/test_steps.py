"""The steps of NSA's forward and backward for NVIDIA GPUs, with PyTorch twins for kernels, against the oracle.

Which kernels a call launches is tested in test_plan.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cute_kernels import backward, call, forward, plan
from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4.rules import RULES as RULES_OF
from cute_kernels.mma.wgmma import TILE
from cute_kernels.pool.documents import Packed
from nsa import NSAAux, NSAConfig, reference
from nsa.inputs import NSAInputs
from tests.support import cases
from tests.support import step_twins as twins
from tests.support.helpers import make_inputs

RULES = {"sm_90": RULES_OF[9], "sm_100": RULES_OF[10]}
SOME = NSAConfig(compress_block_size=16, select_block_size=64, num_selected_blocks=2, window_size=50, q_tile_size=256)
PAPER = NSAConfig.paper(num_selected_blocks=5, window_size=200)


@pytest.fixture
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Backwards run with twins, by the rules of an architecture."""
    name = getattr(request, "param", "sm_90")
    twins.install(monkeypatch, RULES[name])
    return str(name)


# Forward

TILES = replace(SOME, num_selected_blocks=3)
FORWARD = {
    "tile": TILES,
    "shared": replace(TILES, share_heads_in_group=True, num_local_blocks=1, compress_stride=8),
    "sparse compressed": replace(TILES, num_cmp_selected_blocks=3, compress_block_size=2, compress_stride=1),
    "sparse compressed, all": replace(TILES, num_cmp_selected_blocks=9),
    "token": replace(PAPER, window_size=70),
    "token, no window": replace(PAPER, window_size=0, num_init_blocks=0, num_local_blocks=0),
    "not causal": replace(TILES, causal=False),
}
CAUSAL = [name for name, config in FORWARD.items() if config.causal]


def continued(tokens: int, first: int, config: NSAConfig, *, gates: str) -> NSAInputs:
    """The last queries of a sequence, with q_sum where they begin inside a tile; keys are all read."""
    whole = make_inputs(tokens, heads=4, kv_heads=2, dim=4, v_dim=4, batch=2, seed=tokens)
    begun = first // config.q_tile_size * config.q_tile_size
    given: dict[str, Any] = {}
    if gates == "given":
        given["gates"] = torch.rand(2, tokens - first, 4, 3).double()
    elif gates == "projected":
        given["gate_proj_weight"] = torch.randn(4, 3, 4).double()
    if first > begun:
        given["q_sum"] = whole.q[:, begun:first].sum(1)
    return replace(whole, q=whole.q[:, first:], **given)


@pytest.mark.parametrize(
    ("arch", "name", "at", "cut", "gates"),
    [
        *cases.product(
            RULES,
            CAUSAL,
            [(0, 540), (300, 600), (304, 310), (512, 512)],
            [False, True],
            ["third", "given", "projected"],
            cover=2,
        ),
        ("sm_90", "not causal", (0, 540), True, "third"),
    ],
)
def test_forward(
    arch: str, name: str, at: tuple[int, int], cut: bool, gates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All queries, or the last ones; in one piece, or cut into chunks of a tile."""
    config, (first, tokens) = FORWARD[name], at
    twins.install_forward(monkeypatch, RULES[arch], config)
    if cut:
        monkeypatch.setattr(call, "CHUNK_BYTES", 1)
    inputs = continued(tokens, first, config, gates=gates)
    expected, expected_aux = reference.nsa(inputs, config)
    assert expected_aux is not None
    out, aux = forward.nsa(inputs, config)
    assert aux is not None
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for field, got in zip(NSAAux._fields, aux, strict=True):
        wanted = getattr(expected_aux, field)
        assert (got is None) == (wanted is None), field
        if got is not None and wanted is not None:
            torch.testing.assert_close(
                got.to(wanted.dtype), wanted, rtol=1e-5, atol=1e-6, msg=lambda m, n=field: f"{n}: {m}"
            )
    again, _ = forward.nsa(inputs, config, aux=False)
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-6)
    fixed = {"indices": aux[-2], "cmp_indices": aux[-1]} if name != "sparse compressed, all" else {"indices": aux[-2]}
    torch.testing.assert_close(forward.nsa(inputs, config, **fixed)[0], expected, rtol=1e-5, atol=1e-6)
    if first % config.q_tile_size > 0:  # refused where a backward follows
        return
    for recompute in (False, True):
        result, saved = forward.nsa_saving(inputs, config, recompute=recompute)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
        like = forward.nsa_saved_like(inputs, config, recompute=recompute)
        assert [x.shape for x in saved] == [x.shape for x in like]


def test_packed_documents_list_all_blocks_of_entries_where_they_fit() -> None:
    """The kernel lists blocks that it scored entries of; a caller gets what docs/semantics.md says."""
    bounds = torch.tensor([0, 40, 43, 43, 100], dtype=torch.int32)  # 10, 0, 0 and 14 blocks of two entries
    length, stride, tile, width, count = 4, 2, 8, 2, 10
    q, k, v = (torch.zeros(1, 105, 1, 16) for _ in range(3))
    sizes = {"tile": tile, "step": tile, "length": length, "stride": stride}
    documents, _ = twins.lay_out(q, k, v, Packed(bounds), **sizes)
    expected, scored = [], []
    for tokens in bounds.diff().tolist():
        blocks = -(-max(0, (tokens - length) // stride + 1) // width)
        for last in (min(first + tile, tokens) - 1 for first in range(0, tokens, tile)):
            visible = [block for block in range(blocks) if block * width * stride + length - 1 <= last][-count:]
            scored.append(visible + [-1] * (count - len(visible)))
            expected.append([*range(blocks), *[-1] * (count - blocks)] if blocks <= count else scored[-1])
    unused = documents.num_tiles - len(scored)
    assert unused > 0
    assert expected != scored
    given, wanted = (
        torch.tensor([[*rows, *[[-1] * count] * unused]] * 3, dtype=torch.int32) for rows in (scored, expected)
    )
    got = forward._complete_entry_blocks(documents, given, width)
    assert got.dtype == torch.int32
    assert torch.equal(got, wanted)


def test_windows_reach_no_farther_than_tokens() -> None:
    assert call.window_reach(7, True, 100) == (6, 0)
    assert call.window_reach(7, False, 100) == (3, 3)
    assert call.window_reach(2**31 - 1, True, 100) == (100, 0)
    assert call.window_reach(2**31 - 1, False, 100) == (100, 100)


# Backward


@pytest.mark.parametrize(
    ("arch", "batch", "rows", "expected"),
    [
        ("sm_90", 1, 131_072, "split"),
        ("sm_90", 1, 131_073, "phases"),
        ("sm_100", 1, 300, "phases"),
        ("sm_100", 2, 16_383, "fa4"),
        ("sm_100", 2, 16_384, "phases"),
    ],
    indirect=["arch"],
)
@pytest.mark.usefixtures("arch")
def test_lengths_by_which_the_compressed_branch_is_planned(
    batch: int, rows: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "SPLIT_PAIRS", 4 * 131_072 * SOME.num_compressed(131_072))
    q, k, v = (torch.empty((batch, rows, heads, 4), dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    assert plan.plan(NSAInputs(q, k, v), SOME).compressed_backward == expected


class Case(NamedTuple):
    config: NSAConfig = SOME
    tokens: int | tuple[int, ...] = 300
    """Of a sequence, or of each packed document, before some tokens that belong to none."""
    tensors: tuple[str, ...] = ()
    """Optional ones."""
    first: int = 0
    """Token of the first query."""
    batch: int = 2
    v_dim: int = 2
    """D is 4."""
    tail: int = 13
    """Tokens that belong to no document."""
    lists: int | None = None
    """LIST_BYTES: one key/value head takes 216 for each sequence on sm_90, 120 on sm_100; one of its blocks 24."""
    heads_apart: bool = False
    """A chunk for each key/value head, instead of one for all."""
    deterministic: bool = False

    @property
    def inputs(self) -> NSAInputs:
        packed = isinstance(self.tokens, tuple)
        lengths = self.tokens if isinstance(self.tokens, tuple) else (self.tokens,)
        total = sum(lengths) + (self.tail if packed else 0)
        batch = None if packed else self.batch
        whole = make_inputs(total, heads=4, kv_heads=2, dim=4, v_dim=self.v_dim, batch=batch, seed=total)
        more = optional_tensors(whole, self.config)
        if packed:
            whole = replace(whole, cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int())
        inputs = replace(whole, **{name: more[name] for name in self.tensors})
        if self.first == 0:
            return inputs
        gates = None if inputs.gates is None else inputs.gates[:, self.first :]
        return replace(inputs, q=inputs.q[:, self.first :], gates=gates)


def optional_tensors(inputs: NSAInputs, config: NSAConfig) -> dict[str, Tensor]:
    *lead, heads, dim = inputs.q.shape
    kv_heads, v_dim = inputs.v.shape[-2:]
    entries = config.num_compressed(lead[-1])
    shapes = {
        "w_k_compress": (kv_heads, dim, dim),
        "w_v_compress": (kv_heads, v_dim, v_dim),
        "gate_proj_weight": (heads, 3, dim),
        "gates": (*lead, heads, 3),
        "k_cmp": (*lead[:-1], entries, kv_heads, dim),
        "v_cmp": (*lead[:-1], entries, kv_heads, v_dim),
        **{f"k_{branch}": (*lead, kv_heads, dim) for branch in ("slc", "win")},
        **{f"v_{branch}": (*lead, kv_heads, v_dim) for branch in ("slc", "win")},
    }
    return {name: torch.randn(shape, dtype=inputs.q.dtype) for name, shape in shapes.items()}


def check(case: Case) -> None:
    inputs, config = case.inputs, case.config
    out, aux = reference.nsa(inputs, config)
    do = torch.randn_like(out)
    saved = twins.saved(inputs, config, aux).to_list()
    like = forward.nsa_saved_like(inputs, config, recompute=False)
    assert [tensor.shape for tensor in saved] == [tensor.shape for tensor in like]
    got = backward.nsa_backward(inputs, config, saved, do, deterministic=case.deterministic)
    leaves = inputs.map(lambda x: x.detach().requires_grad_())
    fixed = {} if inputs.packed else {"indices": aux.indices, "cmp_indices": aux.cmp_indices}
    wanted = {name: tensor for name, tensor in leaves.tensors().items() if tensor.requires_grad}
    of_leaves, _ = reference.nsa(leaves, config, **fixed)
    expected = torch.autograd.grad(of_leaves, list(wanted.values()), do, materialize_grads=True)
    assert set(got) == set(wanted)
    for name, gradient in zip(wanted, expected, strict=True):
        # Gradients of compressed entries are summed in fp32
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


ENTRIES = {"num_cmp_selected_blocks": 3, "compress_block_size": 1}
"""Selected blocks of entries."""
OPTIONS: list[dict[str, Any]] = [
    {"compress_stride": 8},
    {"compress_stride": 5},
    {"compress_block_size": 64},
    {"causal": False},
    ENTRIES,
    {**ENTRIES, "causal": False},
    {"softmax_scale": 0.3},
    {"select_block_size": 128},
    {"select_block_size": 192},
    {"select_block_size": 192, "causal": False},
    {"share_heads_in_group": True},
    {"num_selected_blocks": 0},
    {"window_size": 0},
    {"window_size": 2**31 - 1},
    {"window_size": 2**31 - 1, "causal": False},
    {"q_tile_size": 512},
]
OF_LAST_QUERIES: list[dict[str, Any]] = [
    {},
    {"compress_stride": 8},
    {"compress_stride": 5},
    {"compress_block_size": 64},
    {"compress_block_size": 512},
    ENTRIES,
    {"select_block_size": 192},
    {"window_size": 0},
    {"window_size": 2**31 - 1},
]
WITHOUT_ATOMICS: list[dict[str, Any]] = [
    {},
    {"select_block_size": 128},
    {"share_heads_in_group": True, "window_size": 300},
    {"num_cmp_selected_blocks": 3, "compress_block_size": 2, "compress_stride": 1},
]
"""What D = D_v takes on Hopper, for all queries and for the last ones."""
TENSORS = [
    ("gate_proj_weight",),
    ("gates",),
    ("w_k_compress",),
    ("w_k_compress", "w_v_compress", "gate_proj_weight"),
    ("k_cmp", "v_cmp"),
    ("k_slc", "v_slc"),
    ("k_win", "v_win"),
    ("k_slc", "v_slc", "k_win", "v_win", "gates"),
]
LENGTHS = (1, 0, 70, 300, 16)
SOME_ENTRIES = {"num_cmp_selected_blocks": 2, "compress_block_size": 1}
"""Of three blocks of entries, a document of 300 tokens attends to two."""
OF_DOCUMENTS: list[dict[str, Any]] = [
    {"compress_block_size": 1},
    {"compress_stride": 8},
    {"compress_block_size": 4, "compress_stride": 2},
    {"num_cmp_selected_blocks": 2, "compress_block_size": 64},
    {"select_block_size": 128},
    {"share_heads_in_group": True},
    {"num_selected_blocks": 0},
    {"window_size": 0},
    {"q_tile_size": 512},
]
TENSORS_OF_DOCUMENTS = [names for names in TENSORS if "k_cmp" not in names]


def some(**changes: Any) -> NSAConfig:
    return replace(SOME, **changes)


CASES: dict[str, list[Case]] = {
    "length": [Case(tokens=tokens) for tokens in (1, 15, 64, 300, 540)],
    # The compressed branch by phases for one sequence, by lists for two
    "option": [Case(some(**changes), 400, batch=1 + i // 2 % 2) for i, changes in enumerate(OPTIONS)],
    "chunk": [
        Case(some(**ENTRIES), 520, lists=250),
        Case(some(**ENTRIES, share_heads_in_group=True), 520, lists=60),
        Case(some(causal=False), 520, lists=250, heads_apart=True),
        Case(some(**ENTRIES), 520, lists=130, heads_apart=True),
        Case(some(**ENTRIES, share_heads_in_group=True), 520, lists=60, heads_apart=True),
    ],
    "tensors": [Case(tensors=names, heads_apart=True) for names in TENSORS],
    "last queries": [
        Case(some(**changes), tokens, first=first, batch=1 + i // 2 % 2)
        for i, (changes, (first, tokens)) in enumerate(
            zip(OF_LAST_QUERIES, cycle([(256, 540), (512, 700), (512, 520), (256, 257)]), strict=False)
        )
    ],
    "tensors of last queries": [Case(tensors=names, first=256) for names in TENSORS],
    "chunk of last queries": [
        Case(some(**changes), 700, first=512, lists=lists, heads_apart=True)
        for changes in ({}, ENTRIES)
        for lists in (200, 60)
    ],
    "no queries": [Case(config, 512, first=512) for config in (SOME, PAPER)],
    "without atomics": [
        Case(some(**changes), 700, first=first, v_dim=4, deterministic=first == 256)
        for changes, first in zip(WITHOUT_ATOMICS, (512, 0, 256, 256), strict=True)
    ],
    "pack": [
        Case(tokens=LENGTHS),
        *(Case(tokens=lengths, tail=0) for lengths in ((300,), (256, 256, 1), (0, 0))),
        *(Case(tokens=lengths, tail=tail) for lengths, tail in (((0, 20), 300), ((1, 5), 3), ((0, 0), 13))),
    ],
    "option of packs": [Case(some(**changes), (70, 0, 300)) for changes in OF_DOCUMENTS],
    "chunk of packs": [Case(some(**SOME_ENTRIES), LENGTHS, lists=lists, heads_apart=True) for lists in (600, 250)],
    "tensors of packs": [
        Case(some(**changes), (70, 0, 130), names)
        for changes, names in zip([{"compress_stride": 8}, SOME_ENTRIES] * 4, TENSORS_OF_DOCUMENTS, strict=False)
    ],
    # The window takes the local blocks of the selected branch along where keys and do are the same, and dims
    "token": [
        Case(PAPER, tokens, names, v_dim=4 if i < 4 else 2)
        for i, (tokens, names) in enumerate(
            [(1, ()), (63, TENSORS[0]), (300, TENSORS[1]), (540, ()), (540, ()), (65, TENSORS[5]), (300, TENSORS[6])]
        )
    ],
    # Any start; phases from multiples of the stride, the window with local blocks from multiples of its tiles
    "last queries per token": [
        Case(PAPER, tokens, first=first, v_dim=v_dim, batch=batch)
        for first, tokens, v_dim, batch in (
            (1, 2, 4, 1),
            (63, 200, 2, 2),
            (64, 65, 4, 2),
            (300, 540, 4, 1),
            (299, 540, 2, 1),
            (304, 540, 2, 1),
            (304, 310, 4, 2),
            (448, 700, 4, 2),
            (448, 700, 2, 2),
        )
    ],
    # Any length, stride and first query, without phases
    "compressed without atomics": [
        Case(replace(PAPER, **changes), 540, first=first, v_dim=4)
        for changes, first in (
            ({"compress_stride": 5}, 300),
            ({"compress_block_size": 512}, 300),
            ({"window_size": 0}, 0),
        )
    ],
}
BY_NAME = {f"{group}, {i}": case for group, of_group in CASES.items() for i, case in enumerate(of_group)}
ON_HOPPER = ("without atomics", "compressed without atomics")


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        *cases.product(RULES, [name for name in BY_NAME if not name.startswith(ON_HOPPER)]),
        *(("sm_90", name) for name in BY_NAME if name.startswith(ON_HOPPER)),
    ],
    indirect=["arch"],
)
@pytest.mark.usefixtures("arch")
def test_backward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME[name]
    if case.heads_apart:
        monkeypatch.setattr(backward, "TEMPORARY_BYTES", 1)
    if case.lists is not None:
        monkeypatch.setattr(backward, "LIST_BYTES", case.lists)
    check(case)


@pytest.mark.usefixtures("arch")
def test_shares_have_their_own_dtype() -> None:
    """Gradients of what all queries share, for chunks to add up."""
    inputs = Case(tensors=("w_k_compress",)).inputs.map(Tensor.float)
    aux = reference.nsa(inputs, SOME)[1]
    saved = twins.saved(inputs, SOME, aux).to_list()
    do = torch.randn(*inputs.q.shape[:-1], 2)
    own, wide = (backward.nsa_backward(inputs, SOME, saved, do, share_dtype=x) for x in (None, torch.float64))
    for name, gradient in wide.items():
        assert gradient.dtype == (torch.float32 if name == "q" else torch.float64), name
        torch.testing.assert_close(gradient.float(), own[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("arch", "batch"), cases.product(RULES, [1, 2]), indirect=["arch"])
@pytest.mark.usefixtures("arch")
def test_phases_equal_lists(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PHASES_FROM", 0)
    monkeypatch.setattr(backward, "PHASE_BYTES", 10_000)
    for stride in (16, 8):
        for tokens in (16, 24, 30, 256, 300):
            check(Case(some(compress_stride=stride), tokens, batch=batch))


@pytest.mark.parametrize(("stride", "expected"), [(16, {(17, 17), (18, 18)}), (8, {(35, 35), (36, 36)})])
@pytest.mark.usefixtures("arch")
def test_phases_have_as_many_rows_as_entries(
    stride: int, expected: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no length alone has one tile of entries, but two of rows, for which FA4 compiles other kernels."""
    sizes = set()

    def dense_backward(gradients: fa4.Gradients, *, causal: bool, **how: Any) -> None:
        if causal:
            sizes.add((gradients.q.shape[1], gradients.k.shape[1]))
        twins.dense_backward(gradients, causal=causal, **how)

    monkeypatch.setattr(fa4, "dense_backward", dense_backward)
    check(Case(some(compress_stride=stride), batch=1))
    assert sizes == expected


@pytest.mark.parametrize("size", [64, 128, 192, 256])
@pytest.mark.usefixtures("arch")
def test_atomic_free_backward_gets_lists_of_its_tiles(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4's lists are 128 keys wide where that divides l'."""
    widths = []

    def selected(*tensors: Any, **how: Any) -> None:
        widths.append(tensors[6].width)
        twins.atomic_free_selected(*tensors, **how)

    monkeypatch.setattr(backward, "selected_backward", selected)
    check(Case(some(select_block_size=size), deterministic=True))
    assert widths == [TILE]


@pytest.mark.parametrize(
    ("changes", "local"),
    [
        ({}, 2),
        ({"window_size": 128}, 2),
        ({"window_size": 127}, 0),
        ({"window_size": 0}, 0),
        ({"num_local_blocks": 1, "window_size": 64}, 1),
        ({"num_local_blocks": 0}, 0),
        ({"select_block_size": 128}, 0),
        ({"select_block_size": 128, "window_size": 256}, 2),
        ({"num_init_blocks": 0}, 2),
    ],
    ids=str,
)
@pytest.mark.usefixtures("arch")
def test_local_blocks_inside_the_window(changes: dict[str, Any], local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = []

    def selected(*inputs: Any, local: int, **how: Any) -> None:
        left_out.append(local)
        twins.kv_outer_backward(*inputs, local=local, **how)

    monkeypatch.setattr(backward, "kv_outer_backward", selected)
    check(Case(replace(PAPER, **changes), 400, batch=1, v_dim=4))
    assert left_out == [local]
