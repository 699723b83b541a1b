"""Attention of each token to its own blocks of keys, KV-outer and query-outer, interpreted, against fp64.

For a GPU see test_block_sparse.py and test_nsa.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import cases
from tests.support.hardware import WINDOW_COMBINE
from tests.support.helpers import assert_rounded_once
from tests.support.interpreted_gpu import interpreted
from tests.support.kv_outer_cases import GATES, WindowCase, make, small_chunks

pytestmark = [pytest.mark.slow, pytest.mark.interpreted, pytest.mark.filterwarnings("default")]


NO_KEYS = torch.full((1, 1, 70, 2), -1, dtype=torch.int32)
"""Blocks of tokens that choose none, one that begins behind them, and from token 40 on some that they see."""
NO_KEYS[:, :, 20:40, 1], NO_KEYS[:, :, 40:, 0], NO_KEYS[:, :, 64:, 1] = 1, 0, 1

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one token": (1, {"group": 1}),
    "odd group": (70, {"group": 3, "kv_heads": 1, "count": 2}),
    "rows without keys": (70, {"group": 3, "kv_heads": 1, "indices": NO_KEYS}),
    "many rows": (80, {"group": 16, "kv_heads": 1, "dim": 128, "count": 2}),
    "D_v, fp16": (70, {"group": 4, "kv_heads": 1, "dim": 128, "v_dim": 64, "count": 2, "dtype": torch.float16}),
    "documents": ([70, 0, 1, 66], {"group": 2, "kv_heads": 1, "count": 2, "behind": 3}),
    "128 tokens": (200, {"group": 2, "kv_heads": 1, "v_dim": 128, "count": 2, "size": 128}),
}


QUERY_OUTER = [case for case in CASES if case not in ("odd group", "rows without keys")]
QUERY_OUTER_HERE = [("warps, late", "documents")]
LATE = ["warpgroups, late", "warps, late"]
HERE = [("warps, late", "rows without keys")]
EARLY = [
    ("warpgroups, early", "documents"),
    *cases.rest(
        ("warps, early", "D_v, fp16"),
        ("warps, early", "many rows"),
        ("warpgroups, early", "many rows"),
        ("warpgroups, early", "D_v, fp16"),
    ),
]
LATE_IF_FULL = [LATE[0], *cases.rest(LATE[1])]
RACES = ["warps, late, races", "warpgroups, late, races"]


@interpreted([*cases.some(HERE, LATE, CASES), *EARLY], "case")
def test_interpreted(case: str) -> None:
    tokens, options = CASES[case]
    make(tokens, device="cpu", **options).check()


ORDERED: dict[str, Callable[[], None]] = {
    "forward and backward": lambda: make(90, 3, 1, 64, count=2, device="cpu").check(),
    "query-outer": lambda: make(90, 3, 1, 64, count=2, device="cpu").check_forward(query_outer=True),
    "forced": lambda: make(140, 3, 1, count=4, forced=(0, 2), device="cpu").check_forward(),
}


@interpreted(RACES)
@pytest.mark.parametrize("what", ORDERED)
def test_barriers_put_shared_memory_in_order(what: str) -> None:
    """Some blocks have three tiles of rows and more: one is read while the next but one arrives."""
    ORDERED[what]()


@interpreted(LATE_IF_FULL)
def test_interpreted_in_chunks_and_work_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch, 64, 1 << 17, 5)
    make([90, 66], 2, 2, count=2, device="cpu").check()


@interpreted(cases.some(QUERY_OUTER_HERE, LATE, QUERY_OUTER), "case")
def test_query_outer_interpreted(case: str) -> None:
    tokens, options = CASES[case]
    make(tokens, device="cpu", **options).check_forward(query_outer=True)


FORCED: dict[str, tuple[Any, dict[str, Any], tuple[int, ...]]] = {
    "one token": (1, {"group": 1, "forced": (1, 2)}, ()),
    "early and late blocks": (330, {"group": 2, "kv_heads": 1, "forced": (1, 2)}, ()),
    "first and own": (201, {"group": 4, "kv_heads": 1, "forced": (1, 1), "dim": 128, "v_dim": 64}, ()),
    "local alone": (201, {"group": 4, "kv_heads": 1, "forced": (0, 2), "v_dim": 128, "dtype": torch.float16}, ()),
    "own alone": (130, {"group": 2, "kv_heads": 1, "forced": (0, 1)}, ()),
    "first alone": (201, {"group": 1, "kv_heads": 2, "forced": (2, 0)}, ()),
    "from mid-block": (301, {"group": 16, "kv_heads": 1, "forced": (1, 2), "dim": 128}, (250, 263)),
    "odd group": (301, {"group": 3, "kv_heads": 2, "forced": (1, 2)}, (63, 130)),
    "documents": ([70, 0, 1, 266], {"group": 2, "kv_heads": 1, "forced": (1, 2), "behind": 3}, ()),
    "128 tokens": (401, {"group": 4, "kv_heads": 1, "forced": (1, 1), "size": 128}, (200, 290)),
    "128 tokens, wide": (401, {"group": 4, "kv_heads": 1, "forced": (0, 2), "size": 128, "dim": 128}, (380, 401)),
    "128 tokens, documents": ([140, 270], {"group": 1, "kv_heads": 1, "forced": (1, 1), "size": 128}, ()),
}
FORCED_HERE = [("warpgroups, late", "early and late blocks"), ("warps, late", "documents")]


@interpreted(cases.some(FORCED_HERE, LATE, FORCED), "case")
def test_forced_blocks_interpreted(case: str) -> None:
    tokens, options, rows = FORCED[case]
    make(tokens, device="cpu", count=None, **options).check_forced(*rows)


BESIDE: list[tuple[Any, tuple[int, int]]] = [(330, (1, 2)), (330, (0, 2)), (330, (2, 3)), ([70, 0, 330], (1, 2))]


@interpreted(cases.some([("warps, late", BESIDE[3])], LATE, BESIDE), "beside")
def test_forced_beside_selected(beside: tuple[Any, tuple[int, int]]) -> None:
    """All of the forward: forced blocks, the other blocks, and the combine; there is no room for (2, 3)."""
    tokens, forced = beside
    behind = 0 if isinstance(tokens, int) else 5
    inputs = make(tokens, 2, 1, count=sum(forced) + 2, forced=forced, behind=behind, device="cpu")
    inputs.check_forward()


GATED = [("warpgroups, early", "given fp32", (0, 0))]


@interpreted(cases.some(GATED, ["warpgroups, late", "warpgroups, early"], GATES, [(1, 2), (0, 0)]), "gates", "forced")
def test_gated_on_the_way(gates: str, forced: tuple[int, int]) -> None:
    """Some of a warp's rows are past the last token."""
    make(201, 3, 1, batch=2, count=sum(forced) + 1, forced=forced, device="cpu").check_gated(gates)


@interpreted(["warpgroups, early"])
@pytest.mark.parametrize("projected", [True, False])
def test_gated_sums_are_rounded_once(projected: bool) -> None:
    from cute_kernels.gate.forward import gated_sum

    q, *branches, out = torch.randn(5, 1, 100, 3, 64).bfloat16()
    weight, given = torch.randn(3, 3, 64).bfloat16(), torch.rand(1, 100, 3, 4)[..., 1:]
    gates = torch.einsum("bnhd,hcd->bnhc", q.double(), weight.double()).sigmoid() if projected else given.double()
    gated_sum(*branches, out, q=q, **({"gate_proj_weight": weight} if projected else {"gates": given}))
    exact = sum(gates[..., i, None] * branch.double() for i, branch in enumerate(branches))
    assert_rounded_once(out, exact, "out")


@interpreted(["warpgroups, early"])
@pytest.mark.parametrize(
    ("branches", "w_dtype"), [(2, torch.bfloat16), *cases.rest((1, torch.float32), (0, None))], ids=str
)
def test_dq_with_other_terms(branches: int, w_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of heads and tokens."""
    small_chunks(monkeypatch, 64, 1, 40)
    make(70, 2, 2, count=2, device="cpu").check_terms(branches=branches, w_dtype=w_dtype)


@interpreted(["warpgroups, late, races", *cases.rest("warpgroups, early")])
def test_dq_with_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of tokens, the second of them with a CTA's rows alone; slots without partials; gates or none."""
    small_chunks(monkeypatch, 128, 1, 40)
    inputs = make(300, 2, 1, count=4, forced=(1, 2), device="cpu")
    inputs.check_window(140, w_dtype=torch.bfloat16, has_cmp=True)
    inputs.check_window(127, w_dtype=None, has_cmp=False)


@interpreted(["warpgroups, early"])
@pytest.mark.parametrize(("gates", "forced"), [("projected", (1, 2)), *cases.rest(("given fp32", (0, 0)))])
def test_gated_in_chunks(gates: str, forced: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of heads and tokens, with gates that the kernels compute and with given ones."""
    small_chunks(monkeypatch, 64, 1, 40)
    chosen = torch.full((1, 2, 70, 10), -1, dtype=torch.int32)
    chosen[..., 66:, 9] = 1  # nothing before, and nothing in the first slots that are loaded together
    inputs = make(70, 2, 2, indices=chosen, device="cpu")
    replace(inputs, forced=forced).check_gated(gates)


@pytest.mark.blas
@interpreted(LATE_IF_FULL)
def test_forced_blocks_of_later_queries() -> None:
    """Queries from any token on: bitwise those of all."""
    inputs = make(300, 2, 1, count=4, forced=(1, 2), device="cpu")
    o, lse = inputs.forward()
    for first in (70, 250):
        some, some_lse = inputs.forward(first=first)
        assert torch.equal(some, o[:, first:])
        assert torch.equal(some_lse, lse[..., first:])


@interpreted(cases.some([(LATE[0], 64)], LATE, [5, 63, 64, 280]), "token")
def test_future_changes_nothing_of_forced_blocks(token: int) -> None:
    inputs = make(300, 2, 1, count=None, forced=(1, 2), device="cpu")
    o, lse = inputs.attend_forced(slice(0, 300))
    other, other_lse = inputs.other_after(token).attend_forced(slice(0, 300))
    assert torch.equal(o[:, : token + 1], other[:, : token + 1])
    assert torch.equal(lse[..., : token + 1], other_lse[..., : token + 1])
    assert not torch.equal(o[:, token + 1], other[:, token + 1])


# With the window


WINDOWS = {
    "one token": WindowCase(1),
    "early and late blocks": WindowCase(330),
    "192 tokens a block": WindowCase(410, group=8, size=192, forced=(1, 1), window=200),
    "tokens of eight heads": WindowCase(201, group=8, kv_heads=2, dim=128, window=128, batch=2),
    "from mid-block": WindowCase(330, group=32, first=263, window=131),
    "from inside of a tile of rows": WindowCase(330, first=197, dim=128, window=321, beside=1),
    "a window of all tokens": WindowCase(270, window=2048, beside=0),
    "own block alone": WindowCase(200, forced=(0, 1), window=64),
    "first blocks in the window": WindowCase(290, forced=(2, 1), window=250),
    "128 tokens a block": WindowCase(401, size=128, forced=(1, 1), window=129, dtype=torch.float16),
    "many slots": WindowCase(700, beside=28, window=129),
    "documents": WindowCase([70, 0, 1, 137], kv_heads=2, behind=3),
    "documents, 128 tokens a block": WindowCase([140, 270], size=128, forced=(1, 1), window=150),
}
WINDOWS_HERE = [("late", "early and late blocks"), ("early", "first blocks in the window"), ("late", "documents")]
"""Interpreted in every run."""


WHEN = ["late", "early"]


class TestWindowCombine:
    """Window, forced blocks, combine and gate in one kernel: both branches against fp64; out against the gate's own."""

    @interpreted(cases.some(WINDOWS_HERE, WHEN, WINDOWS), "case")
    def test_branches(self, case: str) -> None:
        WINDOWS[case].check("cpu")

    @interpreted(cases.some([("early", "projected")], WHEN, GATES), "gates")
    def test_gates(self, gates: str) -> None:
        """Some of the rows of a step are past the last token, or before the first query."""
        WindowCase(141, first=69).check_gated(gates, "cpu")

    @interpreted(["late, races"])
    def test_barriers_put_shared_memory_in_order(self) -> None:
        """Each stage is filled several times."""
        WindowCase(220, window=190).check_gated("projected", "cpu")

    @interpreted(["late"])
    @pytest.mark.parametrize("name", ["documents", *cases.rest("early and late blocks")])
    def test_chunks_change_nothing(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tokens and heads, some of which begin inside blocks and documents."""
        case = WINDOWS[name]
        inputs = case.inputs("cpu")
        expected = case.run(inputs)
        small_chunks(monkeypatch, 24)
        for got, want in zip(case.run(inputs), expected, strict=True):
            assert torch.equal(got.nan_to_num(9e3), want.nan_to_num(9e3))

    @interpreted(["late"])
    def test_queries_from_any_token_on(self) -> None:
        case = WindowCase(150, window=140)
        inputs = case.inputs("cpu")
        whole = case.run(inputs)
        for first in (67, 149):
            for got, want, tokens in zip(replace(case, first=first).run(inputs), whole, (1, 2, 1, 2), strict=True):
                assert torch.equal(got, want.narrow(tokens, first, 150 - first))

    @interpreted(["late"])
    @pytest.mark.parametrize("token", [66, *cases.rest(5, 63, 64, 130)])
    def test_future_changes_nothing(self, token: int) -> None:
        """Nor what later tokens of the same step select: in the first blocks some slots are theirs alone."""
        case = WindowCase(150, window=140)
        inputs = case.inputs("cpu")
        indices = inputs.indices.clone()
        indices[:, :, token + 1 :, -1] = -1
        others = case.run(replace(inputs.other_after(token), indices=indices))
        for got, other, tokens in zip(case.run(inputs), others, (1, 2, 1, 2), strict=True):
            assert torch.equal(got.narrow(tokens, 0, token + 1), other.narrow(tokens, 0, token + 1))
            assert not torch.equal(got.select(tokens, token + 1), other.select(tokens, token + 1))


@pytest.mark.cuda
@WINDOW_COMBINE
class TestWindowCombineOnAGpu:
    @pytest.mark.parametrize("name", WINDOWS)
    def test_branches(self, name: str) -> None:
        WINDOWS[name].check("cuda")

    @pytest.mark.parametrize("gates", GATES)
    def test_gates(self, gates: str) -> None:
        WindowCase(1500, kv_heads=4, dim=128, beside=13, window=512, batch=2).check_gated(gates, "cuda")

    def test_paper(self) -> None:
        WindowCase(2900, kv_heads=2, dim=128, beside=13, window=512).check("cuda")
