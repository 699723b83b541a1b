"""bench/bench_decode.py on a CPU: rows as documented, a wrong result, a case that does not run, bars."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import bench_decode as bench
from nsa import NSAConfig
from tests.support.bench_helpers import documented_fields, run, verdicts

SMALL = ["--device", "cpu", "--heads", "4/1", "--sizes", "700:1,2", "--dim", "32", "--seconds", "0.01", "--prefill"]
"""Without a prefill, unless its sizes follow."""


# Entries, and keys of selected blocks and window: 16 blocks of 64, of each query head in tile mode, and 512
@pytest.mark.parametrize(
    ("preset", "n", "read"),
    [
        ("paper", 1500, (1500 - 32) // 16 + 1 + 1024 + 512),
        ("per_tile", 300, 300 // 64 + 300 + 300),  # with room for the last block, which no entry covers
    ],
)
def test_rows(preset: str, n: int, read: int, tmp_path: Path) -> None:
    out = tmp_path / "decode-0.5"
    options = ["--presets", preset, "--sizes", f"{n}:1,2", "--queries", "1", "--peak-tbs", "1"]
    content = run(bench.main, out, *SMALL, *options, script="bench_decode.py")
    assert [(row["b"], row["n"], row["mode"]) for row in content["rows"]] == [(1, n, "eager"), (2, n, "eager")]
    for row in content["rows"]:
        assert row["dense_ms"] > 0
        assert row["fla_ms"] is None
        moved = row["b"] * read * 2 * 32 * 2  # 32 numbers of 16 bits, as keys and as values
        assert row["floor_ms"] == pytest.approx(moved / 1e9)
    assert len(content["missing"]) == 2, "fla"


@pytest.mark.parametrize("preset", ["paper", "per_tile"])
def test_one_wrong_element_makes_it_red(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.nsa_with_cache

    def wrong(*arguments: Tensor, **options: object) -> Tensor:
        out: Tensor = real(*arguments, **options)  # type: ignore[arg-type]
        out[0, -1, 0, 0] += 0.1
        return out

    monkeypatch.setattr(bench, "nsa_with_cache", wrong)
    run(bench.main, tmp_path / "decode", *SMALL, "--presets", preset, "--queries", "4", status=1)


def test_prefill(tmp_path: Path) -> None:
    """Chunks of which the last is shorter, beside the whole call."""
    options = ["500:200", "--sizes", "100:1", "--presets", "paper", "--queries", "1", "--no-peers"]
    rows = run(bench.main, tmp_path / "decode", *SMALL, *options, script="bench_decode.py")["rows"]
    prefills = [row for row in rows if row["op"] == "prefill"]
    assert [(row["n"], row["n_q"], row["mode"]) for row in prefills] == [(500, 200, "chunks"), (500, 200, "whole")]


def test_chosen_are_the_definitions_blocks() -> None:
    """Against scores that are summed block by block."""
    torch.manual_seed(0)
    config = NSAConfig.paper(num_selected_blocks=6)
    token, q, entries = 2000, torch.randn(4, 16), torch.randn(200, 16)
    visible = config.num_compressed(token + 1)
    p = torch.softmax(config.scale(16) * q.double() @ entries[:visible].double().T, -1).sum(0).tolist()
    scores = {}
    for block in range(token // 64 + 1):
        overlaps = [max(0, min(16 * j + 32, 64 * block + 64) - max(16 * j, 64 * block)) for j in range(visible)]
        scores[block] = sum(n * x for n, x in zip(overlaps, p, strict=True)) / 32
    forced = {0, token // 64 - 1, token // 64}
    best = sorted(set(scores) - forced, key=lambda block: -scores[block])[:3]
    found = bench.chosen(q, entries, token, config)
    assert found is not None
    assert set(found.tolist()) == forced | {*best}
    assert bench.chosen(q, torch.zeros_like(entries), token, config) is None, "all blocks tie"


def test_layers_have_keys_of_their_own() -> None:
    """As many as do not fit L2, with the same results."""
    case = bench.Case("paper", 4, 1, 300, 2, 1)
    made = bench.make_step(case, bench.parse([*SMALL, "--out", "unused"]), torch.device("cpu"))
    other = made.copy()
    assert other.cache.table is made.cache.table
    for name, pages in made.cache.pages.items():
        assert pages.data_ptr() != other.cache.pages[name].data_ptr()
    with torch.no_grad(), made.cache.table.step(1):
        assert torch.equal(made.call(), other.call())
    assert [bench.num_copies(mib << 20) for mib in (1, 11, 99, 100, 300)] == [8, 8, 3, 2, 1]


def test_bars() -> None:
    row = dict.fromkeys(documented_fields("bench_decode.py"))
    row |= {"op": "decode", "preset": "paper", "b": 1, "n": 64 << 10, "n_q": 1, "h": 64, "h_kv": 4, "d": 128}
    row |= {"dtype": "bf16", "mode": "graph", "ms_p50": 0.02, "fla_ms": 1.0}
    rows = [row, row | {"mode": "eager", "host_us": 200.0}, row | {"n": 1 << 20, "ms_p50": 0.07}]
    prefill = row | {"op": "prefill", "n": 1 << 20, "n_q": 8 << 10}
    rows += [prefill | {"mode": mode, "ms_p50": ms} for mode, ms in (("chunks", 11), ("whole", 10))]
    found = verdicts(bench.find_bars(rows))
    assert found["64K, batch 1, graph"] == "pass"
    assert found["64K, batch 16, graph"] == "not measured"
    assert found["1024K, batch 1, graph"] == "FAIL"
    assert found["prefill, 1M in chunks of 8K"] == "pass"
    assert found["64K, batch 1, host"] == "FAIL"
    assert found["64K, batch 1, fla takes as long"] == "pass"
