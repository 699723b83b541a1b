"""bench/bench_context_parallel.py on a CPU: shares alone, ranks together, a wrong result, going on, bars."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench import bench_context_parallel as bench
from nsa.distributed import ContextParallel
from tests.support import cases
from tests.support.bench_helpers import Changed, run, verdicts
from tests.support.ranks import Ranks

SMALL = ["--device", "cpu", "--sizes", "per_tile:900:2/1", "paper:400:2/1", "--dim", "4"]
ALONE = [*SMALL, "--ranks", "2", "--seconds", "0.001"]


ROW = {"h": 8, "h_kv": 2, "d": 128, "dtype": "bf16", "rank": 0, "mode": "alone", "peak_gib": None, "tokens": 1 << 20}
ROW |= {"preset": "per_tile", "n": 1 << 20, "ranks": 1, "layout": "contiguous", "pass": "fwd", "ms": 100.0}
"""A row of the undivided call."""


def test_shares_alone(tmp_path: Path) -> None:
    content = run(bench.main, tmp_path / "alone", *ALONE, script="bench_context_parallel.py")
    assert len(content["rows"]) == 2 * 2 * (1 + 2)
    for (preset, n), direction in product((("per_tile", 900), ("paper", 400)), bench.PASSES):
        own = [row for row in content["rows"] if (row["preset"], row["pass"]) == (preset, direction)]
        assert [(row["ranks"], row["rank"]) for row in own] == [(1, 0), (2, 0), (2, 1)]
        assert sum(row["tokens"] for row in own[1:]) == n
        share = next(one for one in content["shares"] if (one["preset"], one["pass"]) == (preset, direction))
        times = [row["ms"] for row in own]
        assert share["slowest_over_mean"] == pytest.approx(max(times[1:]) / (sum(times[1:]) / 2))
        assert share["sum_over_single"] == pytest.approx(sum(times[1:]) / times[0])


@pytest.mark.parametrize("wrong", ["out", "dk"])
def test_one_wrong_value_makes_it_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    forward, backward = bench.attend, bench.Alone.add_shares

    def attend(*arguments, **how):  # type: ignore[no-untyped-def]
        out, saved = forward(*arguments, **how)
        if wrong == "out":
            out[0, -1, 0, 0] += 0.1
        return out, saved

    def add_shares(self, shares, *others):  # type: ignore[no-untyped-def]
        if wrong == "dk":
            shares[-1, 0, 0, 0] += 0.1
        return backward(self, shares, *others)

    monkeypatch.setattr(bench, "attend", attend)
    monkeypatch.setattr(bench.Alone, "add_shares", add_shares)
    content = run(bench.main, tmp_path / "alone", *ALONE, "--sizes", "paper:400:2/1", status=1)
    assert f"{wrong} of " in content["red"][0]


def run_with_one_wrong_value(_: Any, out: str, wrong: str) -> int:
    """A rank's job, where results of the last rank are off."""
    calls: list[int] = []
    nsa = ContextParallel.nsa

    def changed(self: ContextParallel, *tensors: Tensor, **options: Any) -> Tensor:
        result: Tensor = nsa(self, *tensors, **options)
        calls.append(1)
        last = self.rank == self.size - 1 and (wrong != "run to run" or len(calls) == 2)
        forward, backward = (0.1 * last * (wrong in of) for of in (("out", "run to run"), ("dq",)))
        return Changed.apply(result, forward, backward)

    argv = [*SMALL, "--sizes", "paper:400:2/1", "--repeats", "1", "--out", out]
    environment = {"LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), mock.patch.object(ContextParallel, "nsa", changed):
        return bench.Together(bench.parse(argv), torch.device("cpu")).run()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("dq", "rank 1: dq: error"),
        ("run to run", "rank 1: out differs from run to run"),
        *cases.rest(("out", "rank 1: out: error")),
    ],
)
def test_one_wrong_value_of_a_rank_makes_it_red(tmp_path: Path, wrong: str, message: str) -> None:
    out = tmp_path / "together"
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(2, run_with_one_wrong_value, str(out), wrong)
    assert outcomes == [("returned", 1)] * 2
    content = json.loads(out.with_suffix(".json").read_text())
    assert (content["gate"], content["rows"]) == ("red", [])
    assert message in content["red"][0]


def test_bars_of_ranks_together() -> None:
    single = ROW | {"pass": "fwd+bwd", "ms": 280.0, "peak_gib": 12.0}
    divided = single | {"ranks": 2, "layout": "zigzag", "tokens": 1 << 19}
    rows = [single]
    for rank, (alone, together) in enumerate(((139.0, 148.0), (140.0, 150.0))):
        rows.append(divided | {"rank": rank, "ms": alone})
        rows.append(divided | {"rank": rank, "mode": "together", "ms": together, "peak_gib": 9.0 + rank})
    rows.append(divided | {"mode": "messages", "ms": 8.0})
    (share,) = bench.find_shares(rows)
    assert (share["speedup"], share["not_hidden_ms"], share["messages_ms"]) == (280 / 150, 10.0, 8.0)
    assert (share["peak_gib"], share["bound_gib"]) == (10.0, bench.bound_gib(divided))
    assert verdicts(bench.find_bars_together(2, rows)) == {
        "per_tile 1024K, 2 ranks, fwd+bwd, speed-up": "pass",
        "per_tile 1024K, 2 ranks, fwd, peak over bound": "not measured",
        "per_tile 1024K, 2 ranks, fwd+bwd, peak over bound": "pass",
        "paper 256K, 2 ranks, fwd+bwd, speed-up": "not measured",
        "paper 256K, 2 ranks, fwd, peak over bound": "not measured",
        "paper 256K, 2 ranks, fwd+bwd, peak over bound": "not measured",
    }
    worse = single | {"ms": 270.0}, *rows[1:], rows[2] | {"peak_gib": bench.bound_gib(divided) + 0.1}
    slow, _, large, *_ = bench.find_bars_together(2, worse)
    assert (slow.verdict, large.verdict) == ("FAIL", "FAIL")


@pytest.mark.parametrize(
    ("preset", "n", "heads", "direction", "gib"),
    [
        # 512K tokens of 8 heads are 1 GiB, of a pass's 4 heads 1/2; its keys and values, all 1M tokens, 1/2.
        # out, a part's, three branches; keys, those under way and the own ones among these
        ("per_tile", 1 << 20, (8, 2), "fwd", 1 + 0.5 + 1.5 + 0.5 + 0.75),
        # out, dq and three branches; dk and dv; keys as before; a part's dq; fp32 gradients of both parts; of the
        # window and the selected branch dq, dk and dv
        ("per_tile", 1 << 20, (8, 2), "fwd+bwd", 5 + 0.5 + 1.25 + 0.5 + 1.25 + 2),
        # 128K tokens of 64 heads are 2 GiB, of a pass's 32 heads 1; its keys and values 1/4. Two branches, and two
        # chunks' partials
        ("paper", 256 << 10, (64, 4), "fwd", 2 + 1 + 2 + 0.25 + 0.375 + 2 * 520 / 1024),
        # One head at a time: dq of 1/2, dk and dv of 1/8, and fp32 ones on two streams beside two chunks' partials
        ("paper", 256 << 10, (64, 4), "fwd+bwd", 10 + 0.25 + 0.625 + 1 + 0.625 + 0.5 + 0.125 + 0.5 + 1),
    ],
)
def test_bound_of_memory(preset: str, n: int, heads: tuple[int, int], direction: str, gib: float) -> None:
    """The tensors that count, by hand on two ranks; lse, gates, entries and indices add less than a twentieth."""
    row = ROW | {"preset": preset, "n": n, "h": heads[0], "h_kv": heads[1], "ranks": 2, "tokens": n // 2}
    row |= {"layout": "zigzag", "mode": "together", "pass": direction}
    assert gib < bench.bound_gib(row) < 1.05 * gib


@pytest.mark.cuda_extra
def test_limits_of_the_bound_are_those_of_the_kernels() -> None:
    from cute_kernels import backward
    from cute_kernels.attend import kv_outer, kv_outer_backward, selected_backward
    from cute_kernels.runtime import streams

    assert bench.STREAMS == streams.STREAMS
    assert bench.TEMPORARY_BYTES == backward.TEMPORARY_BYTES
    assert bench.PARTIAL_BYTES == {"fwd": kv_outer.PARTIAL_BYTES, "fwd+bwd": kv_outer_backward.PARTIAL_BYTES}
    assert backward.PHASE_BYTES == selected_backward.WORKSPACE_BYTES == kv_outer_backward.PARTIAL_BYTES


def test_bars() -> None:
    def found(*ms: float) -> dict[str, str]:
        divided = [ROW | {"ranks": 2, "rank": rank, "layout": "zigzag", "ms": one} for rank, one in enumerate(ms)]
        return verdicts(bench.find_bars([ROW, *divided]))

    uneven, even = found(52.0, 58.0), found(53.0, 53.0)
    assert uneven["per_tile 1024K, 2 ranks, fwd, slowest over mean"] == "FAIL"  # 58 over 55
    assert uneven["per_tile 1024K, 2 ranks, fwd, all over undivided"] == "FAIL"  # 110 over 100
    assert uneven["paper 256K, 2 ranks, fwd, slowest over mean"] == "not measured"
    assert even["per_tile 1024K, 2 ranks, fwd, all over undivided"] == "pass"
