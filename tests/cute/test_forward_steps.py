"""The order in which NSA's forward for NVIDIA GPUs launches its steps, with stand-ins for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import call, forward
from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4 import rules as fa4_rules
from cute_kernels.gate.forward import Gating
from cute_kernels.pool import compress
from cute_kernels.pool.documents import Packed
from nsa import NSAAux, NSAConfig, reference
from nsa.inputs import NSAInputs
from tests.support import cases
from tests.support import step_twins as twins
from tests.support.helpers import make_inputs

PAPER = NSAConfig.paper(num_selected_blocks=5, window_size=200)
REST = ["compressed", "choose", "selected"]
"""The last one gates, too, where nothing but out is asked for."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []

    def step(module: Any, function: str, name: str, make: Callable[..., Any]) -> None:
        def stand_in(*arguments: Any, **keywords: Any) -> Any:
            log.append(name)
            return make(*arguments, **keywords)

        monkeypatch.setattr(module, function, stand_in)

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros(*q.shape[:3], v.shape[3]), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def means(k: Tensor, v: Tensor, length: int, stride: int, *_: Any) -> tuple[Tensor, ...]:
        return tuple(x.unfold(1, length, stride).mean(-1) for x in (k, v))

    def choose(q: Tensor, k_cmp: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(q.shape[0], k_cmp.shape[2], q.shape[1], PAPER.num_selected_blocks, dtype=torch.int32)

    monkeypatch.setattr(fa4_rules, "rules", lambda device: fa4_rules.RULES[9])
    monkeypatch.setattr(forward, "prefix_lists", lambda *_, **__: None)
    step(compress, "block_means", "compress", means)
    step(fa4, "window", "window", attend)
    step(fa4, "compressed", "compressed", attend)
    step(forward, "token_topk", "choose", choose)
    step(forward, "kv_outer_forward", "selected", attend)
    step(forward, "gated_sum", "gate", lambda *_, **__: None)
    return log


def some_inputs() -> NSAInputs:
    return make_inputs(512, heads=4, kv_heads=2, dim=8, v_dim=8, batch=1, seed=0)


@pytest.mark.parametrize("aux", [False, True])
def test_an_idle_gpu_gets_the_window_first(aux: bool, launched: list[str]) -> None:
    forward.nsa(some_inputs(), PAPER, aux=aux)
    assert launched == ["window", "compress", *REST]


def test_chunks_share_compressed_keys(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "CHUNK_BYTES", 1)
    forward.nsa(some_inputs(), PAPER, aux=False)
    assert launched == ["window", "compress", *REST, "window", *REST]


def test_chunks_gate_their_own_rows(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What gates on the way is given out and gates of the same queries, and what the other branches made of them."""
    inputs = some_inputs()
    inputs = replace(inputs, gates=torch.randn(*inputs.q.shape[:3], 3).sigmoid())

    def select(q: Tensor, *_: Any, gating: Gating, **__: Any) -> tuple[Tensor, Tensor]:
        assert gating.gates is not None
        assert gating.o_win is not None
        assert gating.o_cmp.shape == gating.o_win.shape == q.shape
        gating.out.copy_(q * gating.gates[..., :1])
        return gating.out, torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    monkeypatch.setattr(forward, "kv_outer_forward", select)
    monkeypatch.setattr(call, "CHUNK_BYTES", 1)
    out, _ = forward.nsa(inputs, PAPER, aux=False)
    assert torch.equal(out, inputs.q * inputs.gates[..., :1])
    assert launched.count("window") == 2
    assert "gate" not in launched


@pytest.mark.parametrize("query_outer", [True, False])
def test_a_caller_may_choose_the_kernel_of_the_selected_branch(
    query_outer: bool, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the rule by shape both times. Query-outer does not gate in its epilogue."""

    def attend(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        launched.append("query-outer")
        return torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    monkeypatch.setattr(forward, "query_outer_forward", attend)
    group = 2 if query_outer else 64
    inputs = make_inputs(512, heads=group, kv_heads=1, dim=8, v_dim=8, batch=1, seed=0)
    forward.nsa(inputs, PAPER, aux=False, query_outer=query_outer)
    end = ["query-outer", "gate"] if query_outer else ["selected"]
    assert launched == ["window", "compress", "compressed", "choose", *end]


def test_what_was_compressed_before_is_taken(launched: list[str]) -> None:
    inputs = some_inputs()
    k_cmp, v_cmp = inputs.k[:, :31] + 0, inputs.v[:, :31] + 0
    prepared = call.prepare(inputs, PAPER, (k_cmp, v_cmp))
    forward.attend(prepared, 0, prepared.num_rows, lse=False)
    assert prepared.k_cmp is k_cmp
    assert prepared.v_cmp is v_cmp
    assert launched == ["window", "compressed", "choose", "selected"]


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


# Queries that continue a sequence, with twins of all kernels

TILES = NSAConfig(compress_block_size=16, select_block_size=64, num_selected_blocks=3, window_size=50, q_tile_size=256)
CONTINUED = {
    "tile": TILES,
    "shared": replace(TILES, share_heads_in_group=True, num_local_blocks=1, compress_stride=8),
    "sparse compressed": replace(TILES, num_cmp_selected_blocks=3, compress_block_size=2, compress_stride=1),
    "sparse compressed, all": replace(TILES, num_cmp_selected_blocks=9),
    "token": replace(PAPER, window_size=70),
    "token, no window": replace(PAPER, window_size=0, num_init_blocks=0, num_local_blocks=0),
}
NOT_CAUSAL = {"not causal": replace(TILES, causal=False)}
"""From the first query on alone."""
RULES = {"sm_90": fa4_rules.RULES[9], "sm_100": fa4_rules.RULES[10]}


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
            CONTINUED,
            [(0, 540), (300, 600), (304, 310), (512, 512)],
            [False, True],
            ["third", "given", "projected"],
            cover=2,
        ),
        ("sm_90", "not causal", (0, 540), True, "third"),
    ],
)
def test_last_queries(
    arch: str, name: str, at: tuple[int, int], cut: bool, gates: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, (first, tokens) = {**CONTINUED, **NOT_CAUSAL}[name], at
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
