"""nsa_with_cache: steps and chunks give the rows of calls without a cache, and nothing is lost in silence."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import dispatch
from nsa import NeighborhoodCache, NSACache, NSAConfig, PageTable, nsa_forward, nsa_with_cache
from nsa.common import resolve
from nsa.decoding import append as appending
from nsa.decoding import reference
from nsa.decoding.append import write_rows
from nsa.inputs import NSAInputs
from tests.support.cache_cases import (
    append,
    assert_unchanged,
    cache_for,
    looped_rows,
    poison,
    sequence,
    snapshot,
    tokens_of,
)
from tests.support.cases import rest
from tests.support.helpers import SMALL, assert_rounded_once, make_inputs
from tests.support.loop_oracle import nsa_document
from tests.support.reference_cases import cases, configs

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def close(got: Tensor, expected: Tensor, what: str = "") -> None:
    torch.testing.assert_close(got, expected, **EXACT, msg=lambda found: f"{what}: {found}")


def recomputed(inputs: NSAInputs, config: NSAConfig, rows: list[int] | range) -> Tensor:
    """Rows by nsa_forward, `[B,rows,H,D_v]`: of the whole in token mode, in tile mode the last of each prefix."""
    if config.token_mode:
        return nsa_forward(**inputs.tensors(), config=config)[:, list(rows)]  # type: ignore[arg-type]
    prefixes = (tokens_of(inputs, 0, row + 1) for row in rows)
    return torch.cat([nsa_forward(**prefix, config=config)[:, -1:] for prefix in prefixes], 1)  # type: ignore[arg-type]


# The definition

CAUSAL = cases(packed=False).filter(lambda c: c[1].causal and c[0].k_cmp is None and c[0].q.shape[1] > 0)


@settings(max_examples=25)
@given(CAUSAL, st.data())
def test_agrees_with_the_loops(case: tuple[NSAInputs, NSAConfig], data: st.DataObject) -> None:
    """Any options, pages and chunks; memory that no token has written is NaN."""
    inputs, config = case
    k, v, tokens = inputs.k, inputs.v, inputs.q.shape[1]
    if inputs.k_slc is not None or inputs.k_win is not None:  # a cache keeps both or none
        own = {"k_slc": k, "v_slc": v, "k_win": k, "v_win": v}
        inputs = replace(inputs, **{name: x if (x := getattr(inputs, name)) is not None else own[name] for name in own})
    cache = cache_for(inputs, config, tokens + data.draw(st.integers(0, 20)), page_size=data.draw(st.integers(1, 20)))
    chunks: list[int] = []
    while sum(chunks) < tokens:
        chunks.append(min(data.draw(st.sampled_from([1, 1, 2, 5, 8, 30])), tokens - sum(chunks)))
    out = append(cache, inputs, chunks)
    some = st.sets(st.integers(0, tokens - 1), max_size=6)
    rows = list(range(tokens)) if config.token_mode else [*data.draw(some), tokens - 1]
    close(out[0, rows], looped_rows(inputs, config, rows))
    assert cache.seqlens.tolist() == [tokens]
    cache.check()


@pytest.mark.parametrize("name", ["paper", "seed"])
def test_in_bf16(name: str) -> None:
    """Entries are the rounded means, and with these entries results are exact ones, rounded once."""
    config, tokens = SMALL[name], 90
    inputs = make_inputs(tokens, dtype=torch.bfloat16)
    cache = cache_for(inputs, config, tokens, page_size=32)
    out = append(cache, inputs, [1] * 30 + [8, 3, 40, 1, 8])
    entries = torch.arange(config.num_compressed(tokens))[None]
    own = {x: cache.pages[x].flatten(0, 1)[cache.entry_rows(entries)[0]].double() for x in ("k_cmp", "v_cmp")}
    exact = {x: t[0].double() for x, t in inputs.tensors().items()}
    length = config.compress_block_size
    for x in ("k", "v"):
        blocks = exact[x].unfold(0, length, config.stride).mean(-1)
        assert ((own[f"{x}_cmp"] - blocks).abs() <= blocks.abs() * 2**-8 + 1e-6).all()
    rows = range(tokens) if config.token_mode else range(8, tokens, 9)
    expected, ties = [], 0
    for row in [tokens - 1] if config.token_mode else rows:
        prefix = {x: t[: row + 1] for x, t in exact.items()}
        loop = nsa_document(config=config, **prefix, **{x: t[: config.num_compressed(row + 1)] for x, t in own.items()})
        expected += [loop.out] if config.token_mode else [loop.out[-1:]]
        for head in loop.scores:
            for scores in head if config.token_mode else head[-1:]:
                ranked = sorted(map(float, scores.values()), reverse=True)
                ties += sum(abs(a - b) < 1e-5 for a, b in pairwise(ranked) if a != b)
    assert ties == 0, "near ties, whose order fp32 may change: choose another seed"
    assert_rounded_once(out[0, list(rows)], torch.cat(expected), "out")


# Batches of different lengths


@pytest.mark.parametrize("name", ["paper", "seed, sparse compressed"])
def test_lengths_that_differ_a_thousand_times(name: str) -> None:
    config, lengths = SMALL[name], (2, 2000, 700)
    inputs = make_inputs(2010, heads=2, kv_heads=1, dim=4, batch=3)
    cache = cache_for(inputs, config, 2010, pages=2010 // 16 + 50 + 3, page_size=16)
    for start in range(0, 2000, 500):
        counts = torch.tensor([min(max(n - start, 0), 500) for n in lengths], dtype=torch.int32)
        chunk = tokens_of(inputs, start, start + 500)
        behind = torch.arange(500) >= counts[:, None]
        chunk = {n: t.masked_fill(behind[..., None, None], torch.nan) for n, t in chunk.items()}
        out = nsa_with_cache(cache=cache, **chunk, counts=counts)
        for b, count in enumerate(counts.tolist()):
            assert not out[b, count:].any()
    own = [sequence(inputs, b) for b in range(3)]
    for step in range(4):
        tokens = [tokens_of(one, length + step, length + step + 1) for one, length in zip(own, lengths, strict=True)]
        out = nsa_with_cache(cache=cache, **{n: torch.cat([t[n] for t in tokens]) for n in "qkv"})
        for b, length in enumerate(lengths):
            close(out[b : b + 1], recomputed(sequence(inputs, b), config, [length + step]), f"sequence {b}")
    assert cache.seqlens.tolist() == [n + 4 for n in lengths]


# Beams, shared prefixes, cuts


class Beams:
    """What each sequence of a cache holds, as lists of tokens of a pool of them."""

    def __init__(self, config: NSAConfig, batch: int, max_tokens: int, **options: Any) -> None:
        self.pool = make_inputs(400, heads=2, kv_heads=1, dim=4)
        self.config, self.texts, self.next = config, [[] for _ in range(batch)], 0
        self.tiles = [0] * batch  # of the last token that was written: its queries are kept
        self.cache = cache_for(make_inputs(1, heads=2, kv_heads=1, dim=4, batch=batch), config, max_tokens, **options)

    def step(self, count: int, counts: list[int] | None = None) -> None:
        """New tokens, compared with recomputation; sequences without room, and no others, overflow."""
        overflowed = self.without_room(counts or [count] * len(self.texts))
        new = [[(self.next + b * count + i) % 400 for i in range(count)] for b in range(len(self.texts))]
        self.next += count * len(self.texts)
        tensors = {n: torch.cat([t[:, own] for own in new]) for n, t in self.pool.tensors().items()}
        if counts is not None:
            tensors["counts"] = torch.tensor(counts, dtype=torch.int32)
        out = nsa_with_cache(cache=self.cache, **tensors)
        for b, (own, real) in enumerate(zip(new, counts or [count] * len(new), strict=True)):
            if overflowed[b]:
                assert out[b].isnan().all()
                continue
            self.texts[b] = self.texts[b] + own[:real]
            whole = NSAInputs(**{n: t[:, self.texts[b]] for n, t in self.pool.tensors().items()})
            rows = range(len(self.texts[b]) - real, len(self.texts[b]))
            if real:
                self.tiles[b] = rows[-1] // self.config.q_tile_size
                close(out[b : b + 1, :real], recomputed(whole, self.config, rows), f"sequence {b}")
            assert not out[b, real:].any()
        assert self.cache.seqlens.tolist() == [len(text) for text in self.texts]
        assert self.cache.table.overflowed.tolist() == overflowed

    def without_room(self, counts: list[int]) -> list[bool]:
        """Sequences that have overflowed after a step of so many tokens: served in order, they take free pages."""
        table = self.cache.table
        assert table.page_uses is not None
        flags, free, needed = table.overflowed.tolist(), table.page_uses.tolist().count(0), 0
        for b, (text, count) in enumerate(zip(self.texts, counts, strict=True)):
            pages, after = (-(-tokens // table.page_size) for tokens in (len(text), len(text) + count))
            if count and len(text) + count > table.capacity:
                flags[b] = True
            if not flags[b]:
                needed += after - pages
                flags[b] = after > pages and needed > free
        return flags

    def can_be_cut(self, lengths: list[int]) -> bool:
        size = self.config.q_tile_size
        return all(n % size == 0 or n // size == tile for n, tile in zip(lengths, self.tiles, strict=True))

    def truncate(self, lengths: list[int]) -> None:
        self.cache.truncate(torch.tensor(lengths, dtype=torch.int32))
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]
        self.forget()
        poison(self.cache)

    def forget(self) -> None:
        """Sequences that found no page for their copy of an open one are flagged and empty."""
        for b, length in enumerate(self.cache.seqlens.tolist()):
            if length != len(self.texts[b]):
                assert length == 0
                assert self.cache.table.overflowed[b]
                self.texts[b] = []

    def reorder(self, rows: list[int]) -> None:
        self.cache.reorder(torch.tensor(rows))
        self.texts, self.tiles = ([old[row] for row in rows] for old in (self.texts, self.tiles))
        self.forget()
        poison(self.cache)

    def check_pages(self) -> None:
        """Each page is counted as often as it is held, and where a sequence goes on writing it is held once."""
        table, size = self.cache.table, self.cache.table.page_size
        assert table.page_uses is not None
        held = table.block_table[table.block_table >= 0]
        assert torch.equal(table.page_uses.long(), held.long().bincount(minlength=table.num_pages))
        for b, text in enumerate(self.texts):
            assert (table.block_table[b] >= 0).sum() == -(-len(text) // size)
            if len(text) % size:
                assert table.page_uses[table.block_table[b, len(text) // size]] == 1


def test_a_shared_prefix_is_held_once() -> None:
    """100 tokens in pages of 16: six full pages shared by all, and a copy of the last for each but one."""
    beams = Beams(SMALL["paper"], 4, 128, pages=14, page_size=16)
    counts = torch.tensor([100, 0, 0, 0], dtype=torch.int32)
    tensors = {n: t[:, :100].expand(4, -1, -1, -1) for n, t in beams.pool.tensors().items()}
    nsa_with_cache(cache=beams.cache, **tensors, counts=counts)
    beams.texts[0], beams.next = list(range(100)), 100
    beams.reorder([0, 0, 0, 0])
    uses = beams.cache.table.page_uses
    assert uses is not None
    assert sorted(uses.tolist(), reverse=True) == [4] * 6 + [1] * 4 + [0] * 4
    for count in (1, 8, 3):
        beams.step(count)
    beams.cache.check()


def test_copies_that_find_no_page() -> None:
    """Two pages for three copies of an open one: the third is flagged and empty, and may begin anew."""
    beams = Beams(SMALL["paper"], 3, 24, page_size=8, pages=2)
    beams.step(5, [5, 0, 0])
    beams.reorder([0, 0, 0])
    assert beams.texts == [[0, 1, 2, 3, 4]] * 2 + [[]]
    assert beams.cache.table.overflowed.tolist() == [False, False, True]
    beams.step(3)
    beams.truncate([0, 6, 0])
    beams.step(2)
    beams.check_pages()
    assert beams.cache.table.overflowed.tolist() == [False, False, True], "two pages for the second and the first"
    beams.cache.table.grow(pages=3)
    beams.truncate([2, 8, 0])
    beams.step(1)
    assert beams.cache.table.overflowed.tolist() == [False, False, True], "three pages, and the second needs two"


def test_a_write_has_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are written differ, or the device would choose which stays; also in steps longer than tiles."""

    def checked(x: Tensor, rows: Tensor, values: Tensor, wanted: Tensor) -> None:
        written = rows[wanted & (rows >= 0)]
        assert len(written.unique()) == len(written)
        write_rows(x, rows, values, wanted)

    for module in (reference, appending):
        monkeypatch.setattr(module, "write_rows", checked)
    inputs, config = make_inputs(60, batch=2), SMALL["seed"]
    append(cache_for(inputs, config, 60, page_size=8), inputs, [37, 3, 20])


def reserving(inputs: NSAInputs) -> NSACache:
    """Two sequences that hold two pages each before they have tokens."""
    tables = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    uses = torch.ones(4, dtype=torch.int32)
    table = PageTable(*tables, page_size=8, num_pages=4, page_uses=uses)
    return NSACache(SMALL["paper"], table, heads_kv=inputs.k.shape[2], dim=inputs.k.shape[3], dtype=inputs.q.dtype)


@pytest.mark.parametrize("prompt", [8, 11])
def test_reserved_pages_are_not_shared(prompt: int) -> None:
    """Each beam writes a page of its own, behind a full page and inside one."""
    inputs = make_inputs(14, batch=2)
    cache = reserving(inputs)
    append(cache, inputs, [prompt])
    assert cache.table.block_table.tolist() == [[0, 1], [2, 3]]
    cache.reorder(torch.tensor([0, 0]))
    out = append(cache, inputs, [1, 2], prompt)
    mixed = inputs.map(lambda x: torch.cat([x[:1, :prompt].expand(2, -1, -1, -1), x[:, prompt:]], 1))
    close(out, recomputed(mixed, SMALL["paper"], range(prompt, prompt + 3)))


def test_a_step_that_raises_leaves_reserved_pages() -> None:
    """And gives back those that it took."""
    inputs = make_inputs(20, batch=2)
    cache = reserving(inputs)
    cache.table.block_table[1, 1] = -1
    cache.table.page_uses[3] = 0  # type: ignore[index]
    before = {name: tensor.clone() for name, tensor in cache.table.state_dict().items()}
    with pytest.raises(ValueError, match="compress must map blocks of k"):
        append(cache, inputs, [12], config=replace(SMALL["paper"], compress=lambda blocks: blocks))
    assert all(torch.equal(tensor, before[name]) for name, tensor in cache.table.state_dict().items())
    out = append(cache, inputs, [12])
    close(out, recomputed(inputs, SMALL["paper"], range(12)))


@settings(max_examples=40)
@given(st.data())
def test_any_order_of_operations(data: st.DataObject) -> None:
    """Steps, beams and cuts over pages of any size that may run out; free pages are NaN, counts of uses are right."""
    config = data.draw(configs().filter(lambda config: config.causal))
    size = data.draw(st.sampled_from([1, 3, 8, 20]))
    fewest = -(-24 // size)
    pages = data.draw(st.sampled_from([fewest, 2 * fewest, 3 * fewest]))
    beams = Beams(config, 3, 24, page_size=size, pages=pages)
    for operation in data.draw(st.lists(st.sampled_from(["step", "step", "reorder", "truncate"]), max_size=8)):
        if operation == "step":
            count = data.draw(st.integers(1, 9))
            beams.step(count, [data.draw(st.integers(0, count)) for _ in range(3)])
        elif operation == "reorder":
            beams.reorder([data.draw(st.integers(0, 2)) for _ in range(3)])
        else:
            tile, lengths = config.q_tile_size, [len(text) for text in beams.texts]
            cuts = [data.draw(st.integers((max(n, 1) - 1) // tile * tile, n)) for n in lengths]
            if data.draw(st.booleans()):
                cuts = [cut // tile * tile for cut in cuts]
            if beams.can_be_cut(cuts):
                beams.truncate(cuts)
            else:
                before = snapshot(beams.cache)
                with pytest.raises(ValueError, match="lengths must be multiples of q_tile_size"):
                    beams.truncate(cuts)
                assert_unchanged(beams.cache, before)
        beams.check_pages()
    beams.cache.reset()
    assert not beams.cache.seqlens.any()
    assert (beams.cache.table.block_table == -1).all()
    beams.texts = [[], [], []]
    beams.step(1)


def test_a_cut_clears_only_the_flags_of_what_it_cuts() -> None:
    inputs, cache = overflowing("paper")
    nsa_with_cache(cache=cache, **tokens_of(inputs, 40, 49), counts=torch.tensor([0, 9, 0], dtype=torch.int32))
    before = snapshot(cache)
    cache.truncate(1 << 40)
    assert_unchanged(cache, before)
    cache.truncate(torch.tensor([0, 41, 3], dtype=torch.int32))
    assert cache.table.overflowed.tolist() == [False, True, False]
    with pytest.raises(TypeError, match="lengths must be int32 or int64, got float32"):
        cache.truncate(torch.ones(3))
    cache.truncate(torch.tensor([1 << 40, 40, 3]))
    assert not cache.table.overflowed.any()
    assert cache.seqlens.tolist() == [0, 40, 3]


def test_a_cut_to_a_closed_tile_does_not_open_it() -> None:
    """Its sums lay where those of the tile behind it are; also in rows that moved and in a state that was loaded."""
    beams, other = (Beams(SMALL["seed"], 2, 96, page_size=8) for _ in range(2))
    beams.step(40)
    beams.truncate([16, 35])
    beams.reorder([1, 0])
    other.cache.load_state_dict(beams.cache.state_dict())
    for cache in (beams.cache, other.cache):
        before = snapshot(cache)
        with pytest.raises(ValueError, match=r"or at least 16 for sequence 1 of 16 tokens, .* got 10"):
            cache.truncate(torch.tensor([35, 10], dtype=torch.int32))
        assert_unchanged(cache, before)
    beams.truncate([33, 16])
    beams.step(3)
    beams.truncate([34, 18])  # tiles that are open again
    beams.step(1)
    beams.truncate([0, 0])
    beams.step(40)
    beams.truncate([33, 40])
    beams.step(2)


# Capacity


def overflowing(name: str, **options: Any) -> tuple[NSAInputs, NSACache]:
    """A batch of three; sequence 1 has 40 tokens of 48 that its pages hold, and 8 more do not fit 9."""
    inputs = make_inputs(100, heads=2, kv_heads=1, dim=4, batch=3)
    cache = cache_for(inputs, SMALL[name], 48, page_size=8, **options)
    nsa_with_cache(cache=cache, **tokens_of(inputs, 0, 40), counts=torch.tensor([10, 40, 3], dtype=torch.int32))
    return inputs, cache


@pytest.mark.parametrize("name", ["paper", "seed"])
def test_a_sequence_that_overflows_is_nan_and_flagged_and_the_others_are_right(name: str) -> None:
    inputs, cache = overflowing(name)
    before = cache.pages["k"][cache.table.block_table[1, :5].long()].clone()
    lengths, config = [10, 40, 3], SMALL[name]
    for _ in range(2):  # the flag stays, also where one more token had room
        tokens = [tokens_of(sequence(inputs, b), n, n + 9) for b, n in enumerate(lengths)]
        out = nsa_with_cache(cache=cache, **{n: torch.cat([t[n] for t in tokens]) for n in "qkv"})
        assert out[1].isnan().all()
        for b in (0, 2):
            rows = range(lengths[b], lengths[b] + 9)
            close(out[b : b + 1], recomputed(sequence(inputs, b), config, rows))
            lengths[b] += 9
        assert cache.table.overflowed.tolist() == [False, True, False]
    assert cache.seqlens.tolist() == lengths == [28, 40, 21]
    assert torch.equal(cache.pages["k"][cache.table.block_table[1, :5].long()], before)
    with pytest.raises(RuntimeError, match=r"sequences \[1\] of \[40\] tokens had no room .*at most 48 tokens"):
        cache.check()
    cache.table.grow(64)
    cache.truncate(40)
    cache.check()
    tokens = [tokens_of(sequence(inputs, b), n, n + 9) for b, n in enumerate(lengths)]
    out = nsa_with_cache(cache=cache, **{n: torch.cat([t[n] for t in tokens]) for n in "qkv"})
    for b, length in enumerate(lengths):
        close(out[b : b + 1], recomputed(sequence(inputs, b), config, range(length, length + 9)))


def test_pages_that_run_out() -> None:
    """Sequences are served in order: the first takes the last page, the others overflow unless they need none."""
    inputs, cache = overflowing("paper", pages=9)
    out = nsa_with_cache(cache=cache, **tokens_of(inputs, 40, 47), counts=torch.tensor([7, 1, 5], dtype=torch.int32))
    assert cache.table.overflowed.tolist() == [False, True, False]
    assert cache.seqlens.tolist() == [17, 40, 8]
    assert [bool(row.isnan().any()) for row in out] == [False, True, False]


def test_debug_raises_at_once_and_leaves_the_cache_as_it_was() -> None:
    inputs, cache = overflowing("paper")
    before = snapshot(cache)
    debug = replace(SMALL["paper"], debug=True)
    with pytest.raises(RuntimeError, match=r"sequences \[1\]"):
        nsa_with_cache(cache=cache, **tokens_of(inputs, 40, 49), config=debug)
    assert_unchanged(cache, before)


# Refusals

REFUSED: dict[str, tuple[type[Exception], str]] = {
    "q": (ValueError, "q must have B=2 sequences and N_q >= 1 tokens"),
    "batch": (ValueError, "q must have B=2 sequences"),
    "dtype": (TypeError, "q must be float64, as the cache is, got float32"),
    "k": (ValueError, r"k must have q's N_q=3 new tokens, got shape \[2, 4, 2, 16\]"),
    "dim": (ValueError, r"k must have the cache's \[H_kv,D\] = \[2, 16\]"),
    "v": (ValueError, "v must have the cache's D_v=16"),
    "heads": (ValueError, "q must have the cache's H=4 heads"),
    "gates": (ValueError, "gates must have the shape"),
    "separate": (ValueError, "k_slc goes with separate_kv=True of the cache: given, separate_kv=False"),
    "stride": (ValueError, "compress_stride must be 8, which the cache was made for, got 4"),
    "tile": (ValueError, "q_tile_size must be 16, which the cache was made for, got 1"),
    "counts": (ValueError, r"counts must be from 0 to 3, got \[1, 4\]"),
    "counts dtype": (TypeError, "counts must be int32, got int64"),
    "gradient": (RuntimeError, "nsa_with_cache does not support gradients"),
    "backend": (dispatch.BackendError, "cute: runs on CUDA devices, got cpu"),
    "backends": (TypeError, r"backend must be a string or None, got \['cute'\]"),
    "cache": (TypeError, "cache must be an NSACache, got dict"),
    "pool": (ValueError, "compress must map blocks of k"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_calls_leave_the_cache_as_it_was(what: str) -> None:
    config = SMALL["seed"]
    cache = cache_for(make_inputs(1, batch=2), config, 64, page_size=8)
    append(cache, make_inputs(21, batch=2), [20, 1])
    before, given = snapshot(cache), make_inputs(3, batch=2).tensors()
    other: dict[str, Any] = {
        "q": make_inputs(0, batch=2).tensors(),
        "batch": make_inputs(3, batch=1).tensors(),
        "dtype": make_inputs(3, batch=2, dtype=torch.float32).tensors(),
        "k": {n: make_inputs(4, batch=2).tensors()[n] for n in "kv"},
        "dim": make_inputs(3, batch=2, dim=8, v_dim=16).tensors(),
        "v": make_inputs(3, batch=2, v_dim=8).tensors(),
        "heads": make_inputs(3, batch=2, heads=8).tensors(),
        "gates": {"gates": torch.rand(2, 4, 4, 3, dtype=torch.float64)},
        "separate": {"k_slc": given["k"], "v_slc": given["v"]},
        "stride": {"config": replace(config, compress_stride=4)},
        "tile": {"config": replace(config, q_tile_size=1)},
        "counts": {"counts": torch.tensor([1, 4], dtype=torch.int32)},
        "counts dtype": {"counts": torch.tensor([1, 2])},
        "gradient": {"q": given["q"].clone().requires_grad_()},
        "backend": {"backend": "cute"},
        "backends": {"backend": ["cute"]},
        "cache": {"cache": {}},
        "pool": {"config": replace(config, compress=lambda blocks: blocks), **make_inputs(3, batch=2).tensors()},
    }[what]
    error, message = REFUSED[what]
    with pytest.raises(error, match=message):
        nsa_with_cache(**({"cache": cache} | given | other))
    if what == "pool":  # raised where blocks are pooled: what lies behind the sequences may have been written
        after = snapshot(cache)
        before = {n: after[n] if n in ("k", "v") else x for n, x in before.items()}
    assert_unchanged(cache, before)


def test_a_refused_growth_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory may suffice for the table, and not for the last of its layers."""
    from nsa.decoding import cache as module

    config = SMALL["seed"]
    cache = cache_for(make_inputs(1, batch=2), config, 64, page_size=8)
    other = NSACache(config, cache.table, heads_kv=2, dim=8, heads=4, dtype=torch.float64)
    append_all = {id(layer): snapshot(layer) for layer in (cache, other)}
    left = [len(cache.pages) + 1]

    def scarce(x: Tensor, *how: Any) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("no memory is left")
        return longer(x, *how)

    longer = module.longer
    monkeypatch.setattr(module, "longer", scarce)
    capacity, pages = cache.table.capacity, cache.table.num_pages
    with pytest.raises(torch.OutOfMemoryError):
        cache.table.grow(128)
    assert (cache.table.capacity, cache.table.num_pages) == (capacity, pages)
    for layer in (cache, other):
        assert_unchanged(layer, append_all[id(layer)])
    left[0] = 99
    cache.table.grow(128)
    assert {x.shape[0] for x in (*cache.pages.values(), *other.pages.values())} == {cache.table.num_pages}


def test_made_in_inference_mode_it_goes_on_outside() -> None:
    config = SMALL["seed"]
    with torch.inference_mode():
        cache = cache_for(make_inputs(1), config, 16, page_size=8)
        append(cache, make_inputs(5), [5])
        cache.table.grow(64)
        copied = copy.deepcopy(cache)
    for each in (cache, copied):
        append(each, make_inputs(3), [3])
        assert each.seqlens.tolist() == [8]


def test_other_refusals() -> None:
    config = SMALL["seed"]
    sizes = {"heads_kv": 2, "dim": 16}
    with pytest.raises(ValueError, match="heads must be given with q_tile_size=16"):
        NSACache.empty(config, 1, 64, **sizes)
    with pytest.raises(ValueError, match="causal must be True"):
        NSACache.empty(replace(SMALL["paper"], causal=False), 1, 64, **sizes)
    with pytest.raises(ValueError, match="max_tokens or pages must be given"):
        PageTable.empty(1)
    with pytest.raises(ValueError, match=r"^device must have values, since steps read them, got meta$"):
        NSACache.empty(SMALL["paper"], 1, 64, device="meta", **sizes)
    with (
        pytest.raises(ValueError, match=r"^block_table must be on a device with values, .* got meta$"),
        torch.device("meta"),
    ):
        PageTable.empty(1, 64)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^seqlens must be on a device with values, since steps read them, got meta$"):
        PageTable(table, torch.zeros(1, dtype=torch.int32, device="meta"), page_size=64, num_pages=1)
    cache = cache_for(make_inputs(1), config, 64)
    with pytest.raises(ValueError, match=r"rows must be from 0 to 0, got \[1\]"):
        cache.reorder(torch.tensor([1]))
    with pytest.raises(ValueError, match="lengths must be at least 0, got -1"):
        cache.truncate(-1)
    with pytest.raises(ValueError, match="max_tokens must be at least 64, got 10"):
        cache.table.grow(10)
    with torch.inference_mode():
        append(cache, make_inputs(3), [2, 1])
    append(cache, make_inputs(3), [2, 1])
    assert cache.seqlens.tolist() == [6]
    with pytest.raises(RuntimeError, match=r"^nsa_with_cache does not support torch\.vmap"):
        torch.vmap(lambda x: nsa_with_cache(x, x[..., :2, :], x[..., :2, :], cache))(torch.randn(3, 1, 1, 4, 16))


class Mean:
    """Without a hash."""

    def __call__(self, blocks: Tensor) -> Tensor:
        return blocks.mean(-2)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mean)


def test_options_need_no_hash() -> None:
    inputs, config = make_inputs(30), replace(SMALL["paper"], compress=(Mean(), Mean()))
    close(append(cache_for(inputs, config, 30), inputs, [20, 1, 9]), recomputed(inputs, config, range(30)))


def test_few_calls_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "MOST", 3)
    resolve._ACCEPTED.clear()
    inputs = make_inputs(30)
    cache = cache_for(inputs, SMALL["paper"], 64)
    remembered = []
    for start, count in ((0, 1), (1, 2), (3, 3), (6, 3), (9, 4), (13, 5)):
        append(cache, inputs, [count], start)
        remembered.append(len(resolve._ACCEPTED))
    assert remembered == [1, 2, 3, 3, 1, 2]


def test_a_remembered_call_has_the_backend_that_was_named() -> None:
    inputs = make_inputs(2)
    cache = cache_for(inputs, SMALL["paper"], 64)
    append(cache, inputs, [1])
    with pytest.raises(ValueError, match=r"backend must be one of .*, got ''"):
        append(cache, inputs, [1], backend="")


def test_autocast_casts_as_nsa() -> None:
    inputs, config = make_inputs(50, dtype=torch.float32), SMALL["paper"]
    lower = inputs.map(torch.Tensor.bfloat16)
    weight = torch.randn(4, 3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = append(cache_for(lower, config, 50), inputs, [30, 1, 19], gate_proj_weight=weight)
    assert torch.equal(out, append(cache_for(lower, config, 50), lower, [30, 1, 19], gate_proj_weight=weight))


# Layers, state, other people's tables


@pytest.mark.parametrize("name", ["paper", "seed, sparse compressed"])
def test_layers_share_a_table(name: str) -> None:
    config, inputs = SMALL[name], make_inputs(60, batch=2)
    table = PageTable.empty(2, 64, page_size=16)
    sizes = {"heads": 4, "heads_kv": 2, "dim": 16, "dtype": torch.float64}
    layers = [NSACache(config, table, **sizes) for _ in range(3)]  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"3 caches share this table .* `with table.step\(5\):`"):
        append(layers[0], inputs, [5])
    start = 0
    for count in (20, 1, 8, 25):
        for failing in (True, False):  # a step that fails halfway is as if it had not been
            state = {n: t.clone() for n, t in table.state_dict().items()}
            try:
                with table.step(count):
                    outs = [append(layer, inputs, [count], start) for layer in layers[: 2 if failing else 3]]
                    with pytest.raises(RuntimeError, match="already called in the open step"):
                        append(layers[0], inputs, [count], start)
                    with pytest.raises(ValueError, match="q must have the step's N_q"):
                        append(layers[2], inputs, [count + 1], start)
                    if failing:
                        raise KeyError
            except KeyError:
                assert all(torch.equal(t, state[n]) for n, t in table.state_dict().items())
        rows = range(start, start + count)
        for out in outs:
            close(out, recomputed(inputs, config, rows))
        start += count
    assert table.seqlens.tolist() == [54, 54]
    assert table.positions(2).tolist() == [[54, 55]] * 2


def two_layers(inputs: NSAInputs, config: NSAConfig) -> list[NSACache]:
    first = cache_for(inputs, config, 64, page_size=16)
    return [first, beside(first)]


def beside(cache: NSACache, **options: Any) -> NSACache:
    """Another layer of the same table."""
    sizes: dict[str, Any] = {"heads": cache.heads, "heads_kv": cache.heads_kv, "dim": cache.dim, "dtype": cache.dtype}
    return NSACache(cache.config, cache.table, **sizes, **options)


@pytest.mark.parametrize("called", [0, 1])
def test_a_step_that_leaves_out_a_layer_is_as_if_it_had_not_begun(called: int) -> None:
    config, inputs = SMALL["seed"], make_inputs(60, batch=2)
    layers = two_layers(inputs, config)

    def step(some: list[NSACache]) -> list[Tensor]:
        with layers[0].table.step(stop - start):
            return [append(layer, inputs, [stop - start], start) for layer in some]

    for start, stop in ((0, 30), (30, 47)):
        before = {n: x for n, x in snapshot(layers[0]).items() if "table" in n or "sums" in n}
        with pytest.raises(RuntimeError, match=rf"a step must call each layer once, got {called} of 2 caches"):
            step(layers[:called])
        after = snapshot(layers[0])
        assert all(torch.equal(x, after[n]) for n, x in before.items())
        for out in step(layers):
            close(out, recomputed(inputs, config, range(start, stop)))


def test_a_cache_that_joins_late_holds_the_tokens() -> None:
    inputs, config = make_inputs(60, batch=2), SMALL["seed"]
    cache = cache_for(inputs, config, 64, page_size=16)
    append(cache, inputs, [20])
    table, layers = cache.table, cache.table.num_layers
    tables = [table, PageTable(table.block_table, table.seqlens, **sizes_of(table), page_uses=table.page_uses)]
    tables.append(PageTable.empty(2, 64, page_size=16))
    tables[-1].load_state_dict(table.state_dict())
    sizes: dict[str, Any] = {"heads": 4, "heads_kv": 2, "dim": 16, "dtype": torch.float64}
    for late in tables:
        for some in ({}, {"k": cache.pages["k"], "v": cache.pages["v"]}):
            with pytest.raises(ValueError, match=r"table must be empty .*, got \[20, 20\] tokens"):
                NSACache(config, late, **sizes, pages=some)
    assert table.num_layers == layers
    kept = {name: x.clone() for name, x in cache.state_dict().items() if name in cache.pages or name == "tile_sums"}
    joined = beside(cache, pages=kept)
    with table.step(5):
        outs = [append(layer, inputs, [5], 20) for layer in (cache, joined)]
    assert torch.equal(*outs)
    engines = PageTable(table.block_table, table.seqlens, **sizes_of(table))
    NSACache(config, engines, **sizes)
    table.reset()
    beside(cache)


def sizes_of(table: PageTable) -> dict[str, int]:
    return {"page_size": table.page_size, "num_pages": table.num_pages}


def test_state_dict_goes_on_elsewhere() -> None:
    inputs, config = make_inputs(60, batch=2), SMALL["seed"]
    cache, other = (cache_for(inputs, config, 64, page_size=8) for _ in range(2))
    append(cache, inputs, [37, 1])
    other.load_state_dict(cache.state_dict())
    assert_unchanged(other, snapshot(cache))
    assert torch.equal(append(cache, inputs, [1, 5], 38), append(other, inputs, [1, 5], 38))
    before = snapshot(other)
    with pytest.raises(ValueError, match=r"k must be float64 \[16, 8, 2, 16\], got float32"):
        other.load_state_dict({**cache.state_dict(), "k": cache.pages["k"].float()})
    with pytest.raises(ValueError, match="state must have the tensors"):
        other.load_state_dict({})
    for ours, theirs in ((other, cache), (other.table, cache.table)):
        load, state = ours.load_state_dict, theirs.state_dict()  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="state must be a mapping of names to tensors, got list"):
            load([1])
        with pytest.raises(ValueError, match=r"state must have the tensors .* got \['0', 'seqlens'\]"):
            load({0: 1, "seqlens": 2})
        for name in state:
            with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got int"):
                load({**state, name: 1})
        with pytest.raises(RuntimeError, match="load_state_dict must happen between steps"), other.table.step(1):
            load(state)
    assert_unchanged(other, before)


def test_copies_of_layers_have_a_table_of_their_own() -> None:
    """They share it, as the originals do theirs; what is done to one side the other does not see."""
    config, inputs = SMALL["seed"], make_inputs(40, batch=2)
    layers = two_layers(inputs, config)
    first = layers[0]

    def step(caches: list[NSACache], start: int, stop: int) -> None:
        with caches[0].table.step(stop - start):
            outs = [append(cache, inputs, [stop - start], start) for cache in caches]
        for out in outs:
            close(out, recomputed(inputs, config, range(start, stop)))

    step(layers, 0, 37)
    others, before = copy.deepcopy(layers), snapshot(first)
    assert others[0].table is others[1].table
    assert others[0].table is not first.table
    assert (first.table.num_layers, others[0].table.num_layers) == (2, 2)
    others[0].reorder(torch.tensor([1, 1]))
    others[0].table.grow(80)
    others[0].reset()
    assert_unchanged(first, before)
    step(layers, 37, 38)
    step(others, 0, 20)


def test_what_is_no_copy() -> None:
    cache = cache_for(make_inputs(1), SMALL["paper"], 40)
    with pytest.raises(RuntimeError, match="a copy must happen between steps"), cache.table.step(1):
        copy.deepcopy(cache)
    window = NeighborhoodCache(1, heads_kv=1, dim=4, kernel_size=3)
    for made in (cache, cache.table, window):
        with pytest.raises(TypeError, match=r"copy\.copy of this .* would share its memory"):
            copy.copy(made)
    assert cache.table.num_layers == 1


def test_an_engine_allocates_and_advances() -> None:
    """Pages in an order of the engine's own, one of them missing; its memory is written in place."""
    inputs, config = make_inputs(40, batch=2), SMALL["paper"]
    block_table = torch.tensor([[7, 2, 5, -1], [1, 6, 0, 3]], dtype=torch.int32)
    table = PageTable(block_table, torch.zeros(2, dtype=torch.int32), page_size=8, num_pages=8)
    pages = torch.full((2, 8, 8, 2, 16), torch.nan, dtype=torch.float64)
    cache = NSACache(config, table, heads_kv=2, dim=16, dtype=torch.float64, pages={"k": pages[0], "v": pages[1]})
    start = 0
    for count in (20, 1, 3):
        out = append(cache, inputs, [count], start)
        close(out, recomputed(inputs, config, range(start, start + count)))
        assert (table.seqlens == start).all()
        table.seqlens += count
        start += count
    assert torch.equal(pages[0, 7], inputs.k[0, :8])
    out = append(cache, inputs, [1], start)
    assert out[0].isnan().all()
    close(out[1:], recomputed(sequence(inputs, 1), config, [24]))
    assert table.overflowed.tolist() == [True, False]
    table.overflowed.zero_()
    for page in (-1, 8):  # inside a sequence, too, but only of one that has new tokens
        block_table[0, 1] = page
        for row in (0, 1):
            counts = torch.tensor([row == 0, row == 1], dtype=torch.int32)
            assert append(cache, inputs, [1], start, counts=counts).isnan().any() == (row == 0)
            table.overflowed.zero_()
    with pytest.raises(RuntimeError, match="truncate must be done by the engine"):
        cache.truncate(3)
    for wrong, message in (
        ({"k": pages[0, :4]}, r"k of pages must be \[8, 8, 2, 16\]"),
        ({"k": pages[0].transpose(0, 1)}, "k of pages must have one stride between tokens"),
        ({"x": pages[0]}, "pages must be among k, v, k_cmp, v_cmp, got x"),
    ):
        with pytest.raises(ValueError, match=message):
            NSACache(config, table, heads_kv=2, dim=16, dtype=torch.float64, pages=wrong)


class NoHostReads(TorchDispatchMode):
    """Raises where a value, or a size that depends on values, is read on the host."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "_unique2", "repeat_interleave")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.READS, name
        if name in ("index", "index_put_"):
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SMALL)
def test_nothing_is_read_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageTable, "_check_counts", lambda *_, **__: None)  # reads values of CPU tensors alone
    inputs = make_inputs(60, batch=2)
    cache = cache_for(inputs, SMALL[name], 128)
    with NoHostReads():
        for start, count in ((0, 40), (40, 1), (41, 8)):
            counts = torch.full((2,), count, dtype=torch.int32)
            nsa_with_cache(cache=cache, **tokens_of(inputs, start, start + count), counts=counts)


@pytest.mark.cuda
@pytest.mark.parametrize("name", SMALL)
def test_a_captured_step_is_replayed_as_lengths_grow(name: str) -> None:
    config, inputs = SMALL[name], make_inputs(60, batch=2, device="cuda")
    cache = cache_for(inputs, config, 64, page_size=16, device="cuda")
    own = {n: t.clone() for n, t in tokens_of(inputs, 0, 1).items()}
    append(cache, inputs, [1] * 3, backend="reference")
    cache.reset()
    for pages in cache.pages.values():
        pages.fill_(torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = nsa_with_cache(cache=cache, **own, backend="reference")
    for step in range(60):
        for n, tensor in tokens_of(inputs, step, step + 1).items():
            own[n].copy_(tensor.clone())
        graph.replay()
        prefix = {n: t.cpu() for n, t in tokens_of(inputs, 0, step + 1).items()}
        close(out.cpu(), nsa_forward(**prefix, config=config)[:, -1:])  # type: ignore[arg-type]
    assert cache.seqlens.tolist() == [60, 60]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
@pytest.mark.parametrize("name", ["paper", *rest("seed")])
def test_compiled_steps_of_two_layers_are_one_graph(name: str) -> None:
    torch.compiler.reset()
    config, inputs = SMALL[name], make_inputs(60, batch=2)

    def step(layers: list[NSACache], tokens: dict[str, Tensor], counts: Tensor) -> list[Tensor]:
        with layers[0].table.step(tokens["q"].shape[1], counts):
            return [nsa_with_cache(cache=layer, **tokens) for layer in layers]

    counter = CompileCounterWithBackend("aot_eager")
    compiled, pairs = (
        torch.compile(step, fullgraph=True, backend=counter),
        [two_layers(inputs, config) for _ in range(3)],
    )
    for start in range(70):  # the last ones overflow
        tokens = tokens_of(inputs, start % 60, start % 60 + 1)
        counts = torch.tensor([1, start % 2], dtype=torch.int32)
        expected = step(pairs[0], tokens, counts)
        for got, out in zip(compiled(pairs[1 + start % 2], tokens, counts), expected, strict=True):
            torch.testing.assert_close(got, out, **EXACT, equal_nan=True)
        for ours, theirs in zip(pairs[1 + start % 2], pairs[2 - start % 2], strict=True):
            theirs.load_state_dict(ours.state_dict())
    assert counter.frame_count == 1
    assert pairs[1][0].table.overflowed.tolist() == [True, False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
def test_what_no_compiled_step_does() -> None:
    torch.compiler.reset()
    inputs = make_inputs(1)
    compiled = torch.compile(nsa_with_cache, fullgraph=True, backend="eager")
    cache = cache_for(inputs, replace(SMALL["paper"], compress=lambda blocks: blocks.mean(-2)), 64)
    with pytest.raises(Exception, match=r"compress must be 'mean' for nsa_with_cache in torch\.compile"):
        compiled(cache=cache, **tokens_of(inputs, 0, 1))
    cache, tokens = cache_for(inputs, SMALL["paper"], 64), tokens_of(inputs, 0, 1)
    with pytest.raises(Exception, match="nsa_with_cache does not support gradients"):
        compiled(cache=cache, **tokens | {"q": tokens["q"].clone().requires_grad_()})
    with pytest.raises(ValueError, match=r"k must have the cache's \[H_kv,D\]"):  # the operator checks what it is given
        compiled(cache=cache, **tokens | {name: tokens[name][:, :, :1] for name in "kv"})
    assert torch.is_grad_enabled()


def test_an_empty_batch() -> None:
    inputs = make_inputs(5, batch=0)
    cache = cache_for(inputs, SMALL["paper"], 64)
    assert append(cache, inputs, [5]).shape == (0, 5, 4, 16)
    cache.reorder(torch.zeros(0, dtype=torch.int64))
    cache.truncate(0)
    cache.check()


@pytest.mark.parametrize(("name", "v_dim"), [("paper", 16), ("seed", 8), ("seed, sparse compressed", 16)])
def test_memory_that_nobody_wrote_may_be_large_and_finite(name: str, v_dim: int) -> None:
    """Its logits are inf, which no mask that is added takes away: NaN in poisoned memory does not show it."""
    inputs, outs = make_inputs(40, v_dim=v_dim), []
    for fill in (torch.nan, torch.finfo(torch.float64).max):
        cache = cache_for(inputs, SMALL[name], 64, page_size=16)
        for pages in cache.pages.values():
            pages.fill_(fill)
        outs.append(append(cache, inputs, [33, 1, 6]))
    assert torch.equal(*outs)
