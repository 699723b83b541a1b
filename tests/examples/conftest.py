"""What tests of examples share: the text, which takes a second to load, and what each branch of NSA gives."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import nsa.module
from examples.shared import byte_models
from examples.shared.byte_models import Corpus, load_corpus
from examples.shared.nsa_variants import BRANCHES
from nsa import nsa_forward_aux


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(autouse=True)
def loaded_once(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_models, "load_corpus", lambda: corpus)


@pytest.fixture
def contributions(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Sum of the absolute gated outputs of each branch, over the calls of NSA's modules in this test."""
    sizes: dict[str, float] = dict.fromkeys(BRANCHES, 0.0)

    def record(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        out, aux = nsa_forward_aux(q, k, v, **keywords)
        outputs = zip(BRANCHES, aux.gates.unbind(-1), (aux.o_cmp, aux.o_slc, aux.o_win), strict=True)
        for branch, gate, output in outputs:
            sizes[branch] += (gate[..., None] * output).abs().sum().item()
        return out

    monkeypatch.setattr(nsa.module, "nsa", record)
    return sizes
