"""Shared by tests of examples: the text, which takes a second to load, runs, and contributions of NSA's branches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

import nsa.module
from examples.shared import byte_models
from examples.shared.byte_models import Corpus, load_corpus
from examples.shared.nsa_variants import BRANCHES
from nsa import nsa_forward_aux
from tests.support.bench_helpers import assert_documented


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture(autouse=True)
def loaded_once(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_models, "load_corpus", lambda: corpus)


@pytest.fixture
def written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run an example that evaluates its variants three times; returns its file, after checks that hold for each."""

    def run(example: ModuleType, options: list[str], *lists: str) -> dict[str, Any]:
        assert example.main([*options, "--out", str(tmp_path / "run-0.5")]) == 0
        content: dict[str, Any] = json.loads((tmp_path / "run-0.5.json").read_text())
        assert_documented(f"{example.__name__.replace('.', '/')}.py", content, ("rows", "summary", *lists))
        assert (tmp_path / "run-0.5.png").read_bytes().startswith(b"\x89PNG")
        assert f"What this says: {content['verdict']}" in " ".join(capsys.readouterr().out.split())
        losses = {summary["variant"]: summary["final_val_loss"] for summary in content["summary"]}
        steps = content["training"]["steps"]
        for variant in content["model"]["parameters"]:
            own = [row for row in content["rows"] if row["variant"] == variant]
            assert [row["step"] for row in own] == [0, steps // 2, steps]
            assert own[-1]["val_loss"] == losses[variant] < own[0]["val_loss"]
        return content

    return run


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
