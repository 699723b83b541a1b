"""bench/bench_block_sparse.py on a CPU: rows as documented, wrong results, going on, bars."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import bench_block_sparse as bench
from tests.support.bench_helpers import documented_fields

SMALL = ["--device", "cpu", "--seqlens", "100", "--heads", "2", "--kv-heads", "1", "--dim", "16", "--blocks", "16"]
SMALL += ["--count", "3", "--seconds", "0.001"]


OPS = ["block_sparse", "top_blocks"]


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    ops = [] if "--ops" in options else ["--ops", *OPS]
    status = bench.main([*SMALL, *ops, *options, "--out", str(folder / "run-0.5")])
    return status, json.loads((folder / "run-0.5.json").read_text())


def test_rows_and_bars(tmp_path: Path) -> None:
    status, content = run(tmp_path, "--bars", "--peak-tflops", "1", "--peak-tbs", "1")
    assert (status, content["gate"]) == (0, "green")
    names = [("block_sparse", "fwd"), ("block_sparse", "fwd+bwd"), ("top_blocks", "fwd")]
    assert [(row["op"], row["pass"]) for row in content["rows"]] == names
    for row in content["rows"]:
        assert set(row) == documented_fields("bench_block_sparse.py")
        assert 0 <= row["error"] <= row["error_budget"]
        assert row["floor_ms"] > 0
        sparse = row["op"] == "block_sparse"
        assert [row[f"{name}_ms"] is not None for name in ("dense", "mask", "selected", "pairs")] == (
            [True, True, False, False] if sparse else [False, False, False, True]
        )
    assert len(content["missing"]) == 2, "the kernels alone"
    assert {bar["verdict"] for bar in content["bars"]} == {"not measured"}
    # Two products forward, of 16 numbers, two heads and 48 keys but for the first 48 rows' half
    keys = 48 - 48 * 48 / 200
    assert content["rows"][0]["floor_ms"] == pytest.approx(100 * keys * 2 * 16 * 2 * 2 / 1e9)


def test_blocks_are_drawn_as_they_must_be() -> None:
    blocks = bench.draw_blocks(2, 2, 70, 16, 7, torch.Generator().manual_seed(0))
    assert blocks.shape == (2, 2, 70, 7)
    own = torch.arange(70) // 16
    assert bool((blocks == own[:, None]).any(-1).all())
    assert bool((blocks <= own[:, None]).all())
    assert bool(((blocks >= 0).sum(-1) == own + 1).all())
    ordered = blocks.sort(-1).values
    assert not bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any())


def wrong_gradient(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Right results, and dk of the first key 1.5 times what it is."""

    def changed(q: Tensor, k: Tensor, v: Tensor, *arguments: Tensor, **options: Any) -> Tensor:
        scale = torch.ones_like(k)
        scale[:, 0] = 1.5
        return real(q, k.detach() + (k - k.detach()) * scale, v, *arguments, **options)

    return changed


def wrong_result(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def changed(*arguments: Tensor, **options: Any) -> Tensor:
        out = real(*arguments, **options)
        step = torch.zeros_like(out)
        step[0, -1, 0, 0] = 0.01
        return out + step

    return changed


def wrong_blocks(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The last token's worst choice in place of its best."""

    def changed(q: Tensor, keys: Tensor, **options: Any) -> Tensor:
        out, other = real(q, keys, **options), real(-q, keys, **options)
        out[0, 0, -1] = other[0, 0, -1]
        return out

    return changed


@pytest.mark.parametrize(
    ("name", "make", "op"),
    [
        ("block_sparse_attention", wrong_result, "block_sparse"),
        ("block_sparse_attention", wrong_gradient, "block_sparse"),
        ("top_blocks_by_max", wrong_blocks, "top_blocks"),
    ],
)
def test_wrong_results_make_it_red(
    name: str, make: Callable[..., Any], op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, name, make(getattr(bench, name)))
    status, content = run(tmp_path, "--ops", op, "--no-peers")
    assert (status, content["gate"], content["rows"]) == (1, "red", [])
    assert len(content["red"]) == 1


@pytest.mark.parametrize("make", [wrong_result, wrong_gradient])
def test_a_masked_peer_with_wrong_results_has_no_time(
    make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "masked_attention", make(bench.masked_attention))
    status, content = run(tmp_path, "--ops", "block_sparse")
    assert (status, content["gate"]) == (0, "green")
    wrong = [row["pass"] for row in content["rows"] if row["mask_ms"] is None]
    assert wrong == (["fwd", "fwd+bwd"] if make is wrong_result else ["fwd+bwd"])
    reasons = [reason for reason in content["missing"] if reason.startswith("mask did not run: error ")]
    assert len(reasons) == len(wrong)


def test_a_layer_of_minimax_m3(tmp_path: Path) -> None:
    """Beside transformers' own, or told why not."""
    status, content = run(tmp_path, "--ops", "m3_layer", "--peak-tflops", "1")
    assert (status, content["gate"]) == (0, "green")
    if importlib.util.find_spec("transformers") is None:
        assert content["rows"] == []
        assert content["missing"] == [
            f"m3_layer N=100 block=16 {direction} did not run: No module named 'transformers'"
            for direction in ("fwd", "fwd+bwd")
        ]
        return
    assert [row["pass"] for row in content["rows"]] == ["fwd", "fwd+bwd"]
    for row in content["rows"]:
        assert 0 < row["error"] <= row["error_budget"]
        assert min(row["mask_ms"], row["pairs_ms"], row["floor_ms"]) > 0


def test_bars_are_of_the_sizes_that_they_name(tmp_path: Path) -> None:
    _, content = run(tmp_path, "--no-peers")
    row: dict[str, Any] = content["rows"][0]
    row |= {"n": 64 << 10, "h": 64, "h_kv": 4, "d": 128, "k": 16, "block": 128, "dtype": "bf16", "mode": "queued"}
    rows = [
        row | {"ms_p50": 22.0},
        row | {"ms_p50": 66.0, "pass": "fwd+bwd"},
        row | {"ms_p50": 10.0, "selected_ms": 9.9, "block": 64},
    ]
    verdicts = [bar.verdict for bar in bench.find_bars(rows)]
    assert verdicts == ["pass", "FAIL", "not measured", "pass", "not measured"]
