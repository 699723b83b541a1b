"""Window, forced blocks, combine and gate in one kernel (attend/window_combine.py), interpreted and on a GPU.

Both branches against fp64; out against the gate's own kernel, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support import cases
from tests.support.hardware import WINDOW_COMBINE
from tests.support.kv_outer_cases import GATES, small_chunks
from tests.support.kv_outer_cases import WindowCase as Case

pytestmark = pytest.mark.filterwarnings("default")  # CuTe DSL warns while it is imported and while it compiles


CASES = {
    "one token": Case(1),
    "early and late blocks": Case(330),
    "192 tokens a block": Case(410, group=8, size=192, forced=(1, 1), window=200),
    "tokens of eight heads": Case(201, group=8, kv_heads=2, dim=128, window=128, batch=2),
    "from mid-block": Case(330, group=32, first=263, window=131),
    "from inside of a tile of rows": Case(330, first=197, dim=128, window=321, beside=1),
    "a window of all tokens": Case(270, window=2048, beside=0),
    "own block alone": Case(200, forced=(0, 1), window=64),
    "first blocks in the window": Case(290, forced=(2, 1), window=250),
    "128 tokens a block": Case(401, size=128, forced=(1, 1), window=129, dtype=torch.float16),
    "many slots": Case(700, beside=28, window=129),
    "documents": Case([70, 0, 1, 137], kv_heads=2, behind=3),
    "documents, 128 tokens a block": Case([140, 270], size=128, forced=(1, 1), window=150),
}
HERE = [("late", "early and late blocks"), ("early", "first blocks in the window"), ("late", "documents")]
"""Interpreted in every run."""


WHEN = ["late", "early"]


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.usefixtures("interpreted")
class TestInterpreted:
    @pytest.mark.parametrize(("interpreted", "case"), cases.some(HERE, WHEN, CASES), indirect=["interpreted"])
    def test_branches(self, case: str) -> None:
        CASES[case].check("cpu")

    @pytest.mark.parametrize(
        ("interpreted", "gates"),
        cases.some([("early", "projected")], WHEN, GATES),
        indirect=["interpreted"],
    )
    def test_gates(self, gates: str) -> None:
        """Some of the rows of a step are behind the last token, and before the first query."""
        Case(141, first=69).check_gated(gates, "cpu")

    @pytest.mark.parametrize("interpreted", ["late, races"], indirect=True)
    def test_barriers_put_shared_memory_in_order(self) -> None:
        """Each stage is filled several times."""
        Case(220, window=190).check_gated("projected", "cpu")

    @pytest.mark.parametrize("interpreted", ["late"], indirect=True)
    @pytest.mark.parametrize("name", ["documents", *cases.rest("early and late blocks")])
    def test_chunks_change_nothing(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of tokens and heads, some of which begin inside of blocks and of documents."""
        case = CASES[name]
        inputs = case.inputs("cpu")
        expected = case.run(inputs)
        small_chunks(monkeypatch, 24)
        for got, want in zip(case.run(inputs), expected, strict=True):
            assert torch.equal(got.nan_to_num(9e3), want.nan_to_num(9e3))

    @pytest.mark.parametrize("interpreted", ["late"], indirect=True)
    def test_queries_from_any_token_on(self) -> None:
        case = Case(150, window=140)
        inputs = case.inputs("cpu")
        whole = case.run(inputs)
        for first in (67, 149):
            for got, want, tokens in zip(replace(case, first=first).run(inputs), whole, (1, 2, 1, 2), strict=True):
                assert torch.equal(got, want.narrow(tokens, first, 150 - first))

    @pytest.mark.parametrize("interpreted", ["late"], indirect=True)
    @pytest.mark.parametrize("token", [66, *cases.rest(5, 63, 64, 130)])
    def test_future_changes_nothing(self, token: int) -> None:
        """Nor what later tokens of the same step select: in the first blocks some slots are theirs alone."""
        case = Case(150, window=140)
        inputs = case.inputs("cpu")
        indices = inputs.indices.clone()
        indices[:, :, token + 1 :, -1] = -1
        others = case.run(replace(inputs.other_after(token), indices=indices))
        for got, other, tokens in zip(case.run(inputs), others, (1, 2, 1, 2), strict=True):
            assert torch.equal(got.narrow(tokens, 0, token + 1), other.narrow(tokens, 0, token + 1))
            assert not torch.equal(got.select(tokens, token + 1), other.select(tokens, token + 1))


# On a GPU


@pytest.mark.cuda
@WINDOW_COMBINE
class TestOnAGpu:
    @pytest.mark.parametrize("name", CASES)
    def test_branches(self, name: str) -> None:
        CASES[name].check("cuda")

    @pytest.mark.parametrize("gates", GATES)
    def test_gates(self, gates: str) -> None:
        Case(1500, kv_heads=4, dim=128, beside=13, window=512, batch=2).check_gated(gates, "cuda")

    def test_paper(self) -> None:
        Case(2900, kv_heads=2, dim=128, beside=13, window=512).check("cuda")
