"""nsa_with_cache: steps and chunks give the rows of calls without a cache, and nothing is lost in silence."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
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
from nsa import (
    NeighborhoodAttention,
    NeighborhoodCache,
    NSACache,
    NSAConfig,
    PageTable,
    neighborhood_attention,
    nsa_forward,
    nsa_with_cache,
)
from nsa.decoding import append as appending
from nsa.decoding import reference
from nsa.decoding.append import write_rows
from nsa.inputs import KEY_NAMES, NSAInputs
from tests.support.cases import rest
from tests.support.helpers import SMALL, assert_rounded_once, make_inputs, make_qkv
from tests.support.loop_oracle import nsa_document
from tests.support.reference_cases import cases, configs
from tests.support.threads import MESSAGE, while_running

EXACT = {"rtol": 1e-12, "atol": 1e-12}
BY_TOKEN = ("q", "gates", *KEY_NAMES)


def cache_for(inputs: NSAInputs, config: NSAConfig, max_tokens: int, **options: Any) -> NSACache:
    """A cache for calls like this one; all of its memory is NaN."""
    cache = NSACache.empty(
        config,
        inputs.q.shape[0],
        max_tokens,
        heads=inputs.q.shape[2],
        heads_kv=inputs.k.shape[2],
        dim=inputs.k.shape[3],
        dim_v=inputs.v.shape[3],
        separate_kv=inputs.k_slc is not None,
        dtype=inputs.q.dtype,
        **options,
    )
    poison(cache)
    return cache


def poison(cache: NSACache) -> None:
    """NaN in all pages that no sequence holds; in a new cache, everywhere."""
    uses = cache.table.page_uses
    assert uses is not None
    for pages in cache.pages.values():
        pages[uses == 0] = torch.nan
    if cache.tile_sums is not None and not cache.seqlens.any():
        cache.tile_sums.fill_(torch.nan)


def tokens_of(inputs: NSAInputs, start: int, stop: int) -> dict[str, Tensor]:
    """Tokens of a call, as nsa_with_cache takes them."""
    return {n: t[:, start:stop] if n in BY_TOKEN else t for n, t in inputs.tensors().items()}


def append(cache: NSACache, inputs: NSAInputs, chunks: Iterable[int], start: int = 0, **options: Any) -> Tensor:
    """The rows of one call after the other, of so many tokens each."""
    outs = []
    for count in chunks:
        outs.append(nsa_with_cache(cache=cache, **tokens_of(inputs, start, start + count), **options))
        start += count
    return torch.cat(outs, 1)


def looped_rows(inputs: NSAInputs, config: NSAConfig, rows: Iterable[int]) -> Tensor:
    """Rows of sequence 0 by the loops, `[rows,H,D_v]`: of the whole, in tile mode the last of each prefix."""
    own = {n: t[0] if n in BY_TOKEN else t for n, t in inputs.tensors().items()}
    if config.token_mode:
        return nsa_document(config=config, **own).out[list(rows)]
    cut = ({n: t[: row + 1] if n in BY_TOKEN else t for n, t in own.items()} for row in rows)
    return torch.stack([nsa_document(config=config, **prefix).out[-1] for prefix in cut])


def sequence(inputs: NSAInputs, b: int) -> NSAInputs:
    """One sequence of a batch."""
    own: dict[str, Any] = {n: t[b : b + 1] for n, t in inputs.tensors().items() if n in BY_TOKEN}
    return replace(inputs, **own)


def snapshot(cache: NSACache) -> dict[str, Tensor]:
    """All of a cache's memory as bytes, so that NaN equals itself."""
    return {name: tensor.clone().view(torch.uint8) for name, tensor in cache.state_dict().items()}


def assert_unchanged(cache: NSACache, before: dict[str, Tensor]) -> None:
    for name, tensor in snapshot(cache).items():
        assert torch.equal(tensor, before[name]), name


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
            absent = (torch.arange(count) >= torch.tensor(counts)[:, None])[..., None, None]
            tensors = {n: t.masked_fill(absent, torch.nan) for n, t in tensors.items()}
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
        before, table = self.cache.table.block_table.clone(), self.cache.table
        self.cache.reorder(torch.tensor(rows))
        self.texts, self.tiles = ([old[row] for row in rows] for old in (self.texts, self.tiles))
        self.forget()
        for b, (row, text) in enumerate(zip(rows, self.texts, strict=True)):
            full = len(text) // table.page_size
            assert torch.equal(table.block_table[b, :full], before[row, :full]), "full pages are shared"
        poison(self.cache)

    def move(self) -> None:
        """To another cache, of one more page, that loads the state."""
        self.cache.table.grow(pages=self.cache.table.num_pages + 1)
        old, self.cache = self.cache, copy.deepcopy(self.cache)
        self.cache.reset()
        self.cache.load_state_dict(old.state_dict())
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


@settings(max_examples=40)
@given(st.data())
def test_any_order_of_operations(data: st.DataObject) -> None:
    """Steps, beams and cuts over pages of any size that may run out; free pages are NaN, counts of uses are right."""
    config = data.draw(configs().filter(lambda config: config.causal))
    size = data.draw(st.sampled_from([8, 3, 20, 1]))
    fewest = -(-24 // size)
    pages = data.draw(st.sampled_from([fewest, 2 * fewest, 3 * fewest]))
    beams = Beams(config, 3, 24, page_size=size, pages=pages)
    beams.step(12, data.draw(st.lists(st.integers(4, 12), min_size=3, max_size=3)))
    kinds = st.sampled_from(["step", "step", "reorder", "reorder", "truncate", "truncate", "truncate", "move"])
    for operation in data.draw(st.lists(kinds, min_size=6, max_size=10)):
        if operation == "move":
            beams.move()
        elif operation == "step":
            count = data.draw(st.integers(1, 9))
            beams.step(count, [data.draw(st.sampled_from([0, count])) for _ in range(3)])
        elif operation == "reorder":
            beams.reorder([data.draw(st.integers(0, 2)) for _ in range(3)])
        else:
            tile, lengths = config.q_tile_size, [len(text) for text in beams.texts]
            cuts = [max(n - data.draw(st.sampled_from([0, 0, 1, 3, 8])), 0) for n in lengths]
            cuts = [cut // tile * tile if data.draw(st.booleans()) else cut for cut in cuts]
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


def test_what_is_kept_of_a_tile_moves_with_its_sequence() -> None:
    """Also in a state that is loaded: a cut to a closed tile does not open it."""
    beams, other = (Beams(SMALL["seed"], 2, 96, page_size=8) for _ in range(2))
    beams.step(40)
    beams.truncate([16, 35])
    beams.reorder([1, 0])
    other.cache.load_state_dict(beams.cache.state_dict())
    for cache in (beams.cache, other.cache):
        with pytest.raises(ValueError, match=r"or at least 16 for sequence 1 of 16 tokens, .* got 10"):
            cache.truncate(torch.tensor([35, 10], dtype=torch.int32))
    beams.truncate([33, 16])
    beams.step(3)


# Capacity


def overflowing(name: str, **options: Any) -> tuple[NSAInputs, NSACache]:
    """A batch of three; sequence 1 has 40 tokens of 48 that its pages hold, and 8 more do not fit 9."""
    inputs = make_inputs(100, heads=2, kv_heads=1, dim=4, batch=3)
    cache = cache_for(inputs, SMALL[name], 48, page_size=8, **options)
    nsa_with_cache(cache=cache, **tokens_of(inputs, 0, 40), counts=torch.tensor([10, 40, 3], dtype=torch.int32))
    return inputs, cache


def test_an_overflow_is_named_until_its_sequence_is_cut_and_finds_room() -> None:
    inputs, cache = overflowing("seed")
    whole = snapshot(cache)
    with pytest.raises(RuntimeError, match=r"sequences \[1\]"):
        nsa_with_cache(cache=cache, **tokens_of(inputs, 40, 49), config=replace(SMALL["seed"], debug=True))
    assert_unchanged(cache, whole)
    before = cache.pages["k"][cache.table.block_table[1, :5].long()].clone()
    assert nsa_with_cache(cache=cache, **tokens_of(inputs, 40, 49))[1].isnan().all()
    assert torch.equal(cache.pages["k"][cache.table.block_table[1, :5].long()], before)
    with pytest.raises(RuntimeError, match=r"sequences \[1\] of \[40\] tokens had no room .*at most 48 tokens"):
        cache.check()
    cache.table.grow(64)
    cache.truncate(40)
    cache.check()
    out = nsa_with_cache(cache=cache, **tokens_of(inputs, 40, 49))
    close(out[1:2], recomputed(sequence(inputs, 1), SMALL["seed"], range(40, 49)))


# Refusals


def new(tokens: int = 3, batch: int = 2, **sizes: Any) -> dict[str, Tensor]:
    return make_inputs(tokens, batch=batch, **sizes).tensors()


NEW, SEED = new(), SMALL["seed"]
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (new(0), ValueError, "q must have B=2 sequences and N_q >= 1 tokens"),
    (new(dtype=torch.float32), TypeError, "q must be float64, as the cache is, got float32"),
    ({n: new(4)[n] for n in "kv"}, ValueError, r"k must have q's N_q=3 new tokens, got shape \[2, 4, 2, 16\]"),
    (new(dim=8, v_dim=16), ValueError, r"k must have the cache's \[H_kv,D\] = \[2, 16\]"),
    (new(v_dim=8), ValueError, "v must have the cache's D_v=16"),
    (new(heads=8), ValueError, "q must have the cache's H=4 heads"),
    ({"gates": torch.rand(2, 4, 4, 3).double()}, ValueError, "gates must have the shape"),
    ({"k_slc": NEW["k"], "v_slc": NEW["v"]}, ValueError, "k_slc goes with separate_kv=True of the cache: given, separ"),
    ({"config": replace(SEED, compress_stride=4)}, ValueError, "compress_stride must be 8, which the cache was"),
    ({"counts": torch.tensor([1, 4]).int()}, ValueError, r"counts must be from 0 to 3, got \[1, 4\]"),
    ({"counts": torch.tensor([1, 2])}, TypeError, "counts must be int32, got int64"),
    ({"q": NEW["q"].clone().requires_grad_()}, RuntimeError, "nsa_with_cache does not support gradients"),
    ({"backend": "cute"}, dispatch.BackendError, "cute: runs on CUDA devices, got cpu"),
    ({"backend": ["cute"]}, TypeError, r"backend must be a string or None, got \['cute'\]"),
    ({"backend": ""}, ValueError, r"backend must be one of .*, got ''"),
    ({"cache": {}}, TypeError, "cache must be an NSACache, got dict"),
    ({"config": replace(SEED, compress=lambda blocks: blocks)}, ValueError, "compress must map blocks of k"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_refused_calls_leave_the_cache_as_it_was(changes: Any, error: type[Exception], message: str) -> None:
    cache = cache_for(make_inputs(1, batch=2), SEED, 64, page_size=8)
    append(cache, make_inputs(21, batch=2), [20, 1])
    before = snapshot(cache)
    with pytest.raises(error, match=message):
        nsa_with_cache(**({"cache": cache} | NEW | changes))
    if "compress must" in message:  # raised where blocks are pooled: memory after the last tokens may have been written
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
    few = iter(range(len(cache.pages) + 1))

    def scarce(x: Tensor, *how: Any) -> Tensor:
        if next(few, None) is None:
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
    monkeypatch.undo()
    cache.table.grow(128)
    assert {x.shape[0] for x in (*cache.pages.values(), *other.pages.values())} == {cache.table.num_pages}


SIZES: dict[str, Any] = {"heads_kv": 2, "dim": 16}
ZERO = torch.zeros(1, dtype=torch.int32)
MADE: list[tuple[Callable[[], Any], str]] = [
    (lambda: NSACache.empty(SEED, 1, 64, **SIZES), "heads must be given with q_tile_size=16"),
    (lambda: NSACache.empty(replace(SMALL["paper"], causal=False), 1, 64, **SIZES), "causal must be True"),
    (lambda: PageTable.empty(1), "max_tokens or pages must be given"),
    (lambda: NSACache.empty(SMALL["paper"], 1, 64, device="meta", **SIZES), "^device must have values"),
    (lambda: PageTable(ZERO[None], ZERO.to("meta"), page_size=64, num_pages=1), "^seqlens must be on a device with"),
    (lambda: one_sequence().reorder(torch.tensor([1])), r"rows must be from 0 to 0, got \[1\]"),
    (lambda: one_sequence().truncate(-1), "lengths must be at least 0, got -1"),
    (lambda: one_sequence().table.grow(10), "max_tokens must be at least 64, got 10"),
]


def one_sequence() -> NSACache:
    return cache_for(make_inputs(1), SMALL["seed"], 64)


@pytest.mark.parametrize(("make", "message"), MADE, ids=[message for _, message in MADE])
def test_other_refusals(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_vmap_is_refused() -> None:
    cache = one_sequence()
    with pytest.raises(RuntimeError, match=r"^nsa_with_cache does not support torch\.vmap"):
        torch.vmap(lambda x: nsa_with_cache(x, x[..., :2, :], x[..., :2, :], cache))(torch.randn(3, 1, 1, 4, 16))


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

    def step(some: list[NSACache], start: int, count: int) -> None:
        with table.step(count):
            for layer in some:
                append(layer, inputs, [count], start)

    start = 0
    for count, called in ((20, 0), (1, 1), (8, 2), (25, 2)):
        state = {n: t.clone() for n, t in table.state_dict().items()}
        with pytest.raises(RuntimeError, match=rf"a step must call each layer once, got {called} of 3 caches"):
            step(layers[:called], start, count)
        assert all(torch.equal(t, state[n]) for n, t in table.state_dict().items()), "as if it had not begun"
        with table.step(count):
            with pytest.raises(ValueError, match="q must have the step's N_q"):
                append(layers[0], inputs, [count + 1], start)
            outs = [append(layer, inputs, [count], start) for layer in layers]
            with pytest.raises(RuntimeError, match="already called in the open step"):
                append(layers[0], inputs, [count], start)
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


def test_a_cache_that_joins_late_holds_the_tokens() -> None:
    inputs, config = make_inputs(60, batch=2), SMALL["seed"]
    cache = cache_for(inputs, config, 64, page_size=16)
    append(cache, inputs, [20])
    table, layers = cache.table, cache.table.num_layers
    loaded = PageTable.empty(2, 64, page_size=16)
    loaded.load_state_dict(table.state_dict())
    for late in (table, loaded):
        for some in ({}, {"k": cache.pages["k"], "v": cache.pages["v"]}):
            with pytest.raises(ValueError, match=r"table must be empty .*, got \[20, 20\] tokens"):
                NSACache(config, late, heads=4, heads_kv=2, dim=16, dtype=torch.float64, pages=some)
    assert table.num_layers == layers
    kept = {name: x.clone() for name, x in cache.state_dict().items() if name in cache.pages or name == "tile_sums"}
    joined = beside(cache, pages=kept)
    with table.step(5):
        outs = [append(layer, inputs, [5], 20) for layer in (cache, joined)]
    assert torch.equal(*outs)
    table.reset()
    beside(cache)


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    inputs = make_inputs(60, batch=2)
    cache = cache_for(inputs, SMALL["seed"], 64, page_size=8)
    append(cache, inputs, [37, 1])
    before, state = snapshot(cache), cache.state_dict()
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({**state, "k": state["k"].float()}, ValueError, r"k must be float64 \[16, 8, 2, 16\], got float32"),
        ({}, ValueError, "state must have the tensors"),
        ([1], TypeError, "state must be a mapping of names to tensors, got list"),
        ({0: 1, "seqlens": 2}, ValueError, r"state must have the tensors .* got \['0', 'seqlens'\]"),
        *(({**state, name: 1}, TypeError, rf"^{name} must be a torch\.Tensor, got int") for name in state),
    ]
    for other, error, message in wrong:
        with pytest.raises(error, match=message):
            cache.load_state_dict(other)
    with pytest.raises(RuntimeError, match="load_state_dict must happen between steps"), cache.table.step(1):
        cache.load_state_dict(state)
    assert_unchanged(cache, before)


def test_copies_of_layers_have_a_table_of_their_own() -> None:
    inputs = make_inputs(40, batch=2)
    layers = two_layers(inputs, SMALL["seed"])
    others, before = copy.deepcopy(layers), snapshot(layers[0])
    assert others[0].table is others[1].table is not layers[0].table
    assert [caches[0].table.num_layers for caches in (layers, others)] == [2, 2]
    others[0].table.grow(80)
    with others[0].table.step(20):
        outs = [append(cache, inputs, [20]) for cache in others]
    close(outs[1], recomputed(inputs, SMALL["seed"], range(20)))
    assert_unchanged(layers[0], before)


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
@pytest.mark.parametrize("name", ["paper", *rest("seed")])
def test_compiled_steps_of_two_layers_are_one_graph(name: str) -> None:
    torch.compiler.reset()
    config, inputs = SMALL[name], make_inputs(60, batch=2)

    def step(layers: list[NSACache], tokens: dict[str, Tensor], counts: Tensor) -> list[Tensor]:
        with layers[0].table.step(tokens["q"].shape[1], counts):
            return [nsa_with_cache(cache=layer, **tokens) for layer in layers]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    pairs = [two_layers(inputs, config) for _ in range(3)]
    for pair in pairs:
        step(pair, tokens_of(inputs, 0, 50), torch.tensor([50, 25], dtype=torch.int32))
    for start in range(50, 70):  # the last ones overflow
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


# Threads: a cache belongs to one at a time


def in_another_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_an_open_step_is_its_thread_s() -> None:
    cache, given = one_sequence(), make_qkv(3)
    table, row = cache.table, torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        with table.step(3):
            pass

    with table.step(3):
        for call in (
            step,
            lambda: nsa_with_cache(*given, cache),
            lambda: table.reorder(row),
            lambda: table.truncate(1),
            lambda: table.grow(300),
            lambda: cache.load_state_dict(cache.state_dict()),
            lambda: copy.deepcopy(cache),
            lambda: NSACache(SMALL["seed"], table, heads=4, heads_kv=2, dim=16),
        ):
            with pytest.raises(RuntimeError, match=MESSAGE):
                in_another_thread(call)
        out = nsa_with_cache(*given, cache)
    assert cache.seqlens.tolist() == [3]
    assert torch.equal(out, nsa_with_cache(*given, one_sequence()))
    in_another_thread(lambda: nsa_with_cache(*given, copy.deepcopy(cache)))  # in turns, and a copy is free
    in_another_thread(lambda: nsa_with_cache(*given, cache))
    assert cache.seqlens.tolist() == [6]


def test_a_step_that_raises_frees_its_cache() -> None:
    cache = one_sequence()
    with pytest.raises(ValueError, match="counts must be from 0 to 2"):
        nsa_with_cache(*make_qkv(2), cache, counts=torch.tensor([3], dtype=torch.int32))
    in_another_thread(lambda: nsa_with_cache(*make_qkv(2), cache))
    assert cache.seqlens.tolist() == [2]


def test_a_rolling_cache_is_one_thread_s(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = NeighborhoodAttention(32, 4, kernel_size=5, causal=True)
    cache, x = layer.new_cache(1), torch.randn(1, 9, 32)
    entered, go_on = threading.Event(), threading.Event()

    def wait(*args: Any, **kwargs: Any) -> Tensor:
        entered.set()
        assert go_on.wait(30)
        return neighborhood_attention(*args, **kwargs)

    def run() -> Tensor:
        with torch.no_grad():
            return layer(x, cache=cache)  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr("nsa.neighborhood.module.neighborhood_attention", wait)
        with while_running(run, entered, go_on) as first, pytest.raises(RuntimeError, match=MESSAGE):
            run()
    torch.testing.assert_close(first.result(), layer(x))  # another thread may sum in another order
    run()
    assert int(cache.length) == 18
