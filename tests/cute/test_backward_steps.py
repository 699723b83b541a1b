"""The steps of NSA's backward for NVIDIA GPUs, with PyTorch twins for kernels, against autograd of the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import backward, call, forward, plan
from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4.rules import RULES as RULES_OF
from nsa import NSAConfig, reference
from nsa.inputs import NSAInputs
from tests.support import cases
from tests.support import step_twins as twins
from tests.support.helpers import make_inputs

RULES = {"sm_90": RULES_OF[9], "sm_100": RULES_OF[10]}
SOME = NSAConfig(compress_block_size=16, select_block_size=64, num_selected_blocks=2, window_size=50, q_tile_size=256)
PAPER = NSAConfig.paper(num_selected_blocks=5, window_size=200)


@pytest.fixture(params=RULES)
def arch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    twins.install(monkeypatch, RULES[request.param])
    return str(request.param)


def oracle(inputs: NSAInputs, config: NSAConfig, do: Tensor, **fixed: Any) -> dict[str, Tensor]:
    leaves = inputs.map(lambda x: x.detach().requires_grad_())
    out, _ = reference.nsa(leaves, config, **fixed)
    wanted = {name: tensor for name, tensor in leaves.tensors().items() if tensor.requires_grad}
    gradients = torch.autograd.grad(out, list(wanted.values()), do, materialize_grads=True)
    return dict(zip(wanted, gradients, strict=True))


def check(inputs: NSAInputs, config: NSAConfig, **how: Any) -> None:
    out, aux = reference.nsa(inputs, config)
    do = torch.randn_like(out)
    saved = twins.saved(inputs, config, aux).to_list()
    like = forward.nsa_saved_like(inputs, config, recompute=False)
    assert [tensor.shape for tensor in saved] == [tensor.shape for tensor in like]
    got = backward.nsa_backward(inputs, config, saved, do, **how)
    fixed = {} if inputs.packed else {"indices": aux.indices, "cmp_indices": aux.cmp_indices}
    expected = oracle(inputs, config, do, **fixed)
    assert set(got) == set(expected)
    for name, gradient in got.items():
        # Gradients of compressed entries are summed in fp32
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_shares_have_their_own_dtype(arch: str) -> None:
    """Gradients of what all queries share, for chunks to add up."""
    inputs = replace(some_inputs(300).map(Tensor.float), w_k_compress=torch.randn(2, 4, 4))
    aux = reference.nsa(inputs, SOME)[1]
    saved = twins.saved(inputs, SOME, aux).to_list()
    do = torch.randn(*inputs.q.shape[:-1], 2)
    own, wide = (backward.nsa_backward(inputs, SOME, saved, do, share_dtype=x) for x in (None, torch.float64))
    for name, gradient in wide.items():
        assert gradient.dtype == (torch.float32 if name == "q" else torch.float64), name
        torch.testing.assert_close(gradient.float(), own[name], rtol=1e-5, atol=1e-5)


def some_inputs(tokens: int, *, group: int = 2, batch: int | None = 2) -> NSAInputs:
    return make_inputs(tokens, heads=2 * group, kv_heads=2, dim=4, v_dim=2, batch=batch, seed=tokens)


def packed_inputs(*lengths: int, behind: int = 13) -> NSAInputs:
    """Documents and some tokens that belong to none."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return replace(some_inputs(sum(lengths) + behind, batch=None), cu_seqlens=cu_seqlens)


@pytest.mark.parametrize(("arch", "tokens"), cases.product(RULES, [1, 15, 64, 300, 540]), indirect=["arch"])
def test_lengths(tokens: int, arch: str) -> None:
    check(some_inputs(tokens), SOME)


OPTIONS: list[dict[str, Any]] = [
    {"compress_stride": 8},
    {"compress_stride": 5},
    {"compress_block_size": 64},
    {"causal": False},
    {"num_cmp_selected_blocks": 3, "compress_block_size": 1},
    {"num_cmp_selected_blocks": 3, "compress_block_size": 1, "causal": False},
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


@pytest.mark.parametrize(
    ("arch", "changes", "batch"), cases.product(RULES, OPTIONS, [1, 2]), indirect=["arch"], ids=str
)
def test_options(changes: dict[str, Any], batch: int, arch: str) -> None:
    """The compressed branch by phases for one sequence, by lists for two."""
    check(some_inputs(400, batch=batch), replace(SOME, **changes))


def test_windows_reach_no_farther_than_tokens() -> None:
    assert call.window_reach(7, True, 100) == (6, 0)
    assert call.window_reach(7, False, 100) == (3, 3)
    assert call.window_reach(2**31 - 1, True, 100) == (100, 0)
    assert call.window_reach(2**31 - 1, False, 100) == (100, 100)


@pytest.mark.parametrize(("arch", "batch"), cases.product(RULES, [1, 2]), indirect=["arch"])
def test_phases_equal_lists(batch: int, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "PHASES_FROM", 0)
    monkeypatch.setattr(backward, "PHASE_BYTES", 10_000)
    for stride in (16, 8):
        for tokens in (16, 24, 30, 256, 300):
            check(some_inputs(tokens, batch=batch), replace(SOME, compress_stride=stride))


@pytest.mark.parametrize(("stride", "expected"), [(16, {(17, 17), (18, 18)}), (8, {(35, 35), (36, 36)})])
def test_phases_have_as_many_rows_as_entries(
    stride: int, expected: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no length alone has one tile of entries, but two of rows, for which FA4 compiles other kernels."""
    twins.install(monkeypatch, RULES["sm_90"])
    sizes = set()

    def dense_backward(gradients: fa4.Gradients, *, causal: bool, **how: Any) -> None:
        if causal:
            sizes.add((gradients.q.shape[1], gradients.k.shape[1]))
        twins.dense_backward(gradients, causal=causal, **how)

    monkeypatch.setattr(fa4, "dense_backward", dense_backward)
    check(some_inputs(300, batch=1), replace(SOME, compress_stride=stride))
    assert sizes == expected


@pytest.mark.parametrize(
    ("arch", "cut", "changes"),
    cases.product(
        RULES,
        [(1, 250), (1, 60), (2, 250), (2, 130), (2, 60)],
        [
            {"num_cmp_selected_blocks": 3, "compress_block_size": 1},
            {"num_cmp_selected_blocks": 3, "compress_block_size": 1, "share_heads_in_group": True},
            {"causal": False},
        ],
    ),
    indirect=["arch"],
)
def test_heads_and_lists_in_chunks(
    arch: str, cut: tuple[int, int], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of a key/value head take 216 bytes for each batch on sm_90, 120 on sm_100; those of a block take 24."""
    chunks, list_bytes = cut
    if chunks == 2:
        monkeypatch.setattr(backward, "TEMPORARY_BYTES", 1)
    monkeypatch.setattr(backward, "LIST_BYTES", list_bytes)
    check(some_inputs(520), replace(SOME, **changes))


def extras(inputs: NSAInputs, names: tuple[str, ...]) -> NSAInputs:
    """More of the optional tensors."""
    *lead, heads, dim = inputs.q.shape
    kv_heads, v_dim = inputs.v.shape[-2:]
    entries = SOME.num_compressed(lead[-1])
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
    return replace(inputs, **{name: torch.randn(shapes[name], dtype=inputs.q.dtype) for name in names})


EXTRAS = [
    ("gate_proj_weight",),
    ("gates",),
    ("w_k_compress",),
    ("w_k_compress", "w_v_compress", "gate_proj_weight"),
    ("k_cmp", "v_cmp"),
    ("k_slc", "v_slc"),
    ("k_slc", "v_slc", "k_win", "v_win", "gates"),
]


@pytest.mark.parametrize(("arch", "names"), cases.product(RULES, EXTRAS), indirect=["arch"], ids=str)
def test_optional_tensors(names: tuple[str, ...], arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a chunk for each key/value head, as in most other tests of one for all."""
    monkeypatch.setattr(backward, "TEMPORARY_BYTES", 1)
    check(extras(some_inputs(300), names), SOME)


# Queries that continue a sequence


def last_queries(inputs: NSAInputs, first: int) -> NSAInputs:
    gates = None if inputs.gates is None else inputs.gates[:, first:]
    return replace(inputs, q=inputs.q[:, first:], gates=gates)


@pytest.mark.parametrize(
    ("arch", "batch", "at", "changes"),
    cases.product(
        RULES,
        [1, 2],
        [(256, 257), (256, 540), (512, 520), (512, 700)],
        [
            {},
            {"compress_stride": 8},
            {"compress_stride": 5},
            {"compress_block_size": 64},
            {"compress_block_size": 512},
            {"num_cmp_selected_blocks": 3, "compress_block_size": 1},
            {"select_block_size": 192},
            {"window_size": 0},
            {"window_size": 2**31 - 1},
        ],
    ),
    indirect=["arch"],
)
def test_last_queries(changes: dict[str, Any], at: tuple[int, int], batch: int, arch: str) -> None:
    """The compressed branch by phases for one sequence, by lists for two."""
    first, tokens = at
    check(last_queries(some_inputs(tokens, batch=batch), first), replace(SOME, **changes))


@pytest.mark.parametrize(
    ("arch", "names"),
    cases.product(
        RULES, [("gate_proj_weight",), ("gates",), ("w_k_compress",), ("k_cmp", "v_cmp"), ("k_win", "v_win")]
    ),
    indirect=["arch"],
    ids=str,
)
def test_optional_tensors_of_last_queries(names: tuple[str, ...], arch: str) -> None:
    check(last_queries(extras(some_inputs(300), names), 256), SOME)


@pytest.mark.parametrize(
    ("arch", "list_bytes", "changes"),
    cases.product(RULES, [200, 60], [{}, {"num_cmp_selected_blocks": 3, "compress_block_size": 1}], cover=2),
    indirect=["arch"],
    ids=str,
)
def test_lists_of_last_queries_in_chunks(
    changes: dict[str, Any], list_bytes: int, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backward, "TEMPORARY_BYTES", 1)
    monkeypatch.setattr(backward, "LIST_BYTES", list_bytes)
    check(last_queries(some_inputs(700), 512), replace(SOME, **changes))


STARTS = [(1, 2), (63, 200), (64, 65), (300, 540), (299, 540), (304, 540), (304, 310), (448, 700)]


@pytest.mark.parametrize(
    ("arch", "at", "batch", "v_dim"), cases.product(RULES, STARTS, [1, 2], [2, 4]), indirect=["arch"]
)
def test_last_queries_of_token_mode(at: tuple[int, int], batch: int, v_dim: int, arch: str) -> None:
    """Any start; phases from multiples of the stride, the window with local blocks from multiples of its tiles."""
    first, tokens = at
    inputs = make_inputs(tokens, heads=4, kv_heads=2, dim=4, v_dim=v_dim, batch=batch, seed=tokens)
    check(last_queries(inputs, first), PAPER)


@pytest.mark.parametrize(
    ("changes", "first", "deterministic"),
    cases.product(
        [
            {},
            {"select_block_size": 128},
            {"share_heads_in_group": True, "window_size": 300},
            {"num_cmp_selected_blocks": 3, "compress_block_size": 2, "compress_stride": 1},
        ],
        [0, 256, 512],
        [False, True],
    ),
    ids=str,
)
def test_kernels_without_atomics(
    changes: dict[str, Any], first: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What D = D_v takes on Hopper, for all queries and for the last ones."""
    twins.install(monkeypatch, RULES["sm_90"])
    inputs = last_queries(make_inputs(700, heads=4, kv_heads=2, dim=4, v_dim=4, batch=2, seed=1), first)
    check(inputs, replace(SOME, **changes), deterministic=deterministic)


@pytest.mark.parametrize("first", [0, 300])
@pytest.mark.parametrize("changes", [{"compress_stride": 5}, {"compress_block_size": 512}, {"window_size": 0}], ids=str)
def test_compressed_branch_without_atomics(
    changes: dict[str, Any], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any length, stride and first query, without phases."""
    twins.install(monkeypatch, RULES["sm_90"])
    inputs = last_queries(make_inputs(540, heads=4, kv_heads=2, dim=4, v_dim=4, batch=2, seed=1), first)
    check(inputs, replace(PAPER, **changes))


@pytest.mark.parametrize(
    ("split", "rows", "arch", "v_dim", "changes"),
    [
        (True, 131_072, "sm_90", 4, {}),
        (False, 131_073, "sm_90", 4, {}),
        (False, 131_072, "sm_100", 4, {}),
        (False, 131_072, "sm_90", 2, {}),
        (False, 131_072, "sm_90", 4, {"causal": False}),
        (False, 131_072, "sm_90", 4, {"num_cmp_selected_blocks": 3}),
        (True, 131_072, "sm_90", 4, {"num_cmp_selected_blocks": 2048}),
    ],
)
def test_rule_of_the_compressed_branch(
    split: bool, rows: int, arch: str, v_dim: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without atomics or phases: on Hopper with D = D_v, for few pairs, where a row attends to all entries it sees."""
    monkeypatch.setattr(plan.fa4, "rules", lambda device: RULES[arch])
    config = replace(SOME, **changes)
    entries = config.num_compressed(rows)
    monkeypatch.setattr(plan, "SPLIT_PAIRS", 4 * 131_072 * entries)
    q, k, v = (
        torch.empty((1, rows, heads, dim), dtype=torch.bfloat16, device="meta")
        for heads, dim in ((4, 4), (2, 4), (2, v_dim))
    )
    made = [plan.plan(NSAInputs(q, k, v), config, atomic_free=free) for free in (True, False)]
    assert [x.compressed_backward == "split" for x in made] == [split, False]


@pytest.mark.parametrize("config", [SOME, PAPER], ids=["tile", "token"])
def test_no_queries(config: NSAConfig, arch: str) -> None:
    check(last_queries(some_inputs(512), 512), config)


# Packed documents

LENGTHS = (1, 0, 70, 300, 16)
SOME_ENTRIES = {"num_cmp_selected_blocks": 2, "compress_block_size": 1}
"""Of three blocks of entries, a document of 300 tokens attends to two."""


PACKS = [(LENGTHS, 13), ((300,), 0), ((256, 256, 1), 0), ((0, 20), 300), ((1, 5), 3), ((0, 0), 13), ((0, 0), 0)]


@pytest.mark.parametrize(("arch", "pack"), cases.product(RULES, PACKS), indirect=["arch"], ids=str)
def test_documents(pack: tuple[tuple[int, ...], int], arch: str) -> None:
    lengths, behind = pack
    check(packed_inputs(*lengths, behind=behind), SOME)


@pytest.mark.parametrize(
    ("arch", "changes"),
    cases.product(
        RULES,
        [
            {"compress_block_size": 1},
            {"compress_block_size": 4, "compress_stride": 2},
            SOME_ENTRIES,
            {"num_cmp_selected_blocks": 2, "compress_block_size": 64},
            {"select_block_size": 128},
            {"share_heads_in_group": True},
            {"num_selected_blocks": 0},
            {"window_size": 0},
            {"q_tile_size": 512},
        ],
    ),
    indirect=["arch"],
    ids=str,
)
def test_options_of_documents(changes: dict[str, Any], arch: str) -> None:
    check(packed_inputs(70, 0, 300), replace(SOME, **changes))


@pytest.mark.parametrize(("arch", "list_bytes"), cases.product(RULES, [600, 250]), indirect=["arch"])
def test_heads_and_lists_of_documents_in_chunks(list_bytes: int, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "TEMPORARY_BYTES", 1)
    monkeypatch.setattr(backward, "LIST_BYTES", list_bytes)
    check(packed_inputs(*LENGTHS), replace(SOME, **SOME_ENTRIES))


@pytest.mark.parametrize(
    ("arch", "names", "changes"),
    cases.product(
        RULES,
        [
            ("gate_proj_weight",),
            ("gates",),
            ("w_k_compress",),
            ("w_v_compress", "gate_proj_weight"),
            ("k_slc", "v_slc"),
            ("k_slc", "v_slc", "k_win", "v_win", "gates"),
        ],
        [{"compress_stride": 8}, SOME_ENTRIES],
    ),
    indirect=["arch"],
    ids=str,
)
def test_optional_tensors_of_documents(names: tuple[str, ...], changes: dict[str, Any], arch: str) -> None:
    check(extras(packed_inputs(70, 0, 130), names), replace(SOME, **changes))


@pytest.mark.parametrize("size", [64, 128, 192, 256])
def test_atomic_free_backward_gets_lists_of_its_tiles(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-4's lists are 128 keys wide where that divides l'."""
    from cute_kernels.mma.wgmma import TILE

    twins.install(monkeypatch, RULES["sm_90"])
    monkeypatch.setattr(call, "chosen_lists", lambda *_, width, **__: width)
    widths = []

    def atomic_free(*tensors: Tensor, into: tuple[Tensor, Tensor, Tensor], **_: Any) -> None:
        widths.append(tensors[6])  # lists
        for x in into:
            x.zero_()

    monkeypatch.setattr(backward, "selected_backward", atomic_free)
    inputs, config = some_inputs(300), replace(SOME, select_block_size=size)
    out, aux = reference.nsa(inputs, config)
    saved = twins.saved(inputs, config, aux).to_list()
    backward.nsa_backward(inputs, config, saved, torch.randn_like(out), deterministic=True)
    assert widths == [TILE]


# Token mode


@pytest.mark.parametrize(
    ("arch", "v_dim", "names", "tokens"),
    cases.product(
        RULES,
        [4, 2],
        [(), ("gate_proj_weight",), ("gates",), ("k_slc", "v_slc"), ("k_win", "v_win")],
        [1, 63, 65, 300, 540],
    ),
    indirect=["arch"],
)
def test_token_mode(arch: str, v_dim: int, names: tuple[str, ...], tokens: int) -> None:
    """The window takes the local blocks of the selected branch along where keys and do are the same, and dims."""
    inputs = make_inputs(tokens, heads=4, kv_heads=2, dim=4, v_dim=v_dim, batch=2, seed=tokens)
    check(extras(inputs, names), PAPER)


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
def test_local_blocks_inside_the_window(changes: dict[str, Any], local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    twins.install(monkeypatch, RULES["sm_90"])
    left_out = []

    def selected(*inputs: Any, local: int, **how: Any) -> None:
        left_out.append(local)
        twins.kv_outer_backward(*inputs, local=local, **how)

    monkeypatch.setattr(backward, "kv_outer_backward", selected)
    check(make_inputs(400, heads=4, kv_heads=2, dim=4, batch=1, seed=1), replace(PAPER, **changes))
    assert left_out == [local]
