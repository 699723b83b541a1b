"""Tables of the documentation are those of the files they show, and what pages say of these files holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import bench_paper, tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = tables.pages()
TEXT = {page: page.read_text(encoding="utf-8") for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_show_what_the_files_have(page: Path) -> None:
    assert tables.rendered(page, TEXT[page]) == TEXT[page], "python -m bench.tables renders it anew"


def test_every_table_is_shown() -> None:
    shown = {name for text in TEXT.values() for _, name, _, _ in tables.MARKED.findall(text)}
    assert shown == set(tables.TABLES)


def test_results_are_those_that_pages_cite() -> None:
    """Nothing else lies in bench/results but PNG files of what is cited."""
    cited = {name for text in TEXT.values() for name in re.findall(r"bench/results/([\w.-]+)", text)}
    cited |= set(re.findall(r"bench/results/([\w.-]+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    there = {path.name for path in tables.RESULTS.iterdir() if path.is_file()}
    assert {name for name in cited if "." in name} <= there
    assert {name for name in there if name not in cited and Path(name).with_suffix(".json").name not in cited} == set()


OPEN = {
    "context-parallel-h100": {
        f"{case}, all over undivided"
        for case in (
            *(f"per_tile 1024K, {ranks} ranks, {done}" for ranks in (4, 8, 16) for done in ("fwd", "fwd+bwd")),
            *("paper 256K, 8 ranks, fwd+bwd", "paper 256K, 16 ranks, fwd", "paper 256K, 16 ranks, fwd+bwd"),
        )
    },
    "context-parallel-nccl-h100": {"per_tile 1024K, 2 ranks, fwd+bwd, speed-up"},
    "context-parallel-nccl4-h200": {"per_tile 1024K, 4 ranks, fwd+bwd, speed-up"},
    "generate-h200": {"step at 64K, batch 1: dense takes as long"},
    "decode-h200": {"64K, batch 1, fla takes as long"},
}
"""Bars that are not reached yet; the page that shows the run names them."""


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*-h[12]00*.json")), ids=lambda path: path.stem)
def test_recorded_runs_are_green_and_reach_their_bars(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content.get("gate", "green") in ("green", "unchecked")
    missed = {bar["bar"] for bar in content.get("bars", ()) if bar["verdict"] != "pass" and "stretch" not in bar["bar"]}
    assert missed == OPEN.get(path.stem, set())


def test_no_peer_of_the_paper_is_faster() -> None:
    content = tables.load("paper-h200")
    queued = {(row["n"], row["pass"]): row for row in content["rows"] if row["mode"] == "queued"}
    for n, peers in tables.SFNSA.items():
        for direction, peer in zip(("fwd", "fwd+bwd"), peers, strict=True):
            row = queued[n << 10, direction]
            assert row["ms_p50"] < min(peer, row["fla_ms"])


def test_bars_of_the_paper_are_those_of_the_benchmark() -> None:
    bars = {bar["bar"]: bar["wanted"] for bar in tables.load("paper-h200")["bars"]}
    for n, by_pass in bench_paper.MS_BARS.items():
        for direction, (ms, *_) in by_pass.items():
            assert bars[f"{n >> 10}K {direction}"] == f"<= {ms:g} ms"


def test_the_demo_says_nothing_of_noise() -> None:
    assert "too noisy" not in {row["faster"] for row in tables.load("e2e-cpu")["rows"]}


def test_defaults_are_faster_than_peers_where_pages_say_so() -> None:
    """docs/results.md lists what is slower: nothing of neighborhood attention and attention residual."""
    near: list[Any] = [row for row in tables.load("neighborhood-h200")["rows"] if row["default"]]
    assert all(row["ms_p50"] < min(filter(None, (row["fa4_ms"], row["flex_ms"], row["liger_ms"]))) for row in near)
    for row in tables.load("attnres-h200")["rows"]:
        for own, clock in (("ms_p50", ""), ("wall_ms", "_wall")):
            assert all(row[own] < row[f"{peer}{clock}_ms"] for peer in ("liger", "compile", "eager"))
