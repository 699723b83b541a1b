"""Transposed block lists for FA4's backward: the model of how FA4 reads them, against the oracle and against FA4; the
kernels that build them. As tests/test_fa4_lists.py does for the forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import nsa.reference as reference
from cute_kernels import fa4
from nsa import NSAConfig
from nsa.tensors import NSAInputs
from tests import fa4_model as model
from tests.fa4_cases import (
    ARCHS,
    CAUSAL,
    COMPRESSIONS,
    NOISY,
    TILES,
    TOKENS,
    assert_same_lists,
    chunk,
    chunks_of,
    low_precision_qkv,
    on_device,
    random_blocks,
)
from tests.fa4_model import Keys, Lists
from tests.helpers import assert_within_budget, make_inputs, make_qkv

WIDTHS = pytest.mark.parametrize(("arch", "width"), [("sm_90", 64), ("sm_90", 128), ("sm_100", 128), ("sm_100", 256)])
"""Blocks of 64 keys need FA4's tile configuration replaced; those of 256 run with 2-CTA instructions at D = 128."""
Gradients = tuple[Tensor, Tensor, Tensor]


def ranges(blocks: int, count: int) -> list[dict[str, int]]:
    """Ranges of at most `count` blocks; 0: one of all."""
    step = count or max(blocks, 1)
    return [{"first_block": first, "blocks": min(step, blocks - first)} for first in range(0, blocks, step)]


def assert_gradients(parts: list[Gradients], expected: tuple[Tensor, ...], start: int, stop: int) -> None:
    """Gradients of rows start ... stop - 1, in parts by range of keys, are the oracle's, which has 0 for other keys."""
    dq, dk, dv = sum(part[0] for part in parts), *(torch.cat([part[i] for part in parts], 1) for i in (1, 2))
    tolerance = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(dq, expected[0][:, start:stop], **tolerance)
    for got, whole in ((dk, expected[1]), (dv, expected[2])):
        keys = got.shape[1]
        torch.testing.assert_close(got, whole[:, :keys], **tolerance)
        assert not whole[:, keys:].any()


# Lists, read as FA4 reads them, give what autograd of the oracle gives


@WIDTHS
@CAUSAL
@settings(max_examples=20)
@given(
    tokens=st.sampled_from(TOKENS) | st.integers(1, 700),
    tile=st.sampled_from(TILES),
    size=st.sampled_from([64, 128, 192]),
    count=st.integers(1, 9),
    group=st.sampled_from([1, 2, 3]),
    shared=st.booleans(),
    first=st.integers(0, 7),
    last=st.integers(0, 7),
    blocks_at_once=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
@example(300, 256, 128, 3, 1, True, 0, 1, 0, 0)  # rows end in the first half of a tile
@example(900, 256, 64, 9, 2, False, 1, 2, 1, 0)  # ranges of keys that end before the rows
def test_selected_branch(
    arch: str,
    width: int,
    causal: bool,
    tokens: int,
    tile: int,
    size: int,
    count: int,
    group: int,
    shared: bool,
    first: int,
    last: int,
    blocks_at_once: int,
    seed: int,
) -> None:
    start, stop = chunk(tokens, tile, first, last)
    keys = stop if causal else tokens
    config = NSAConfig(
        select_block_size=size,
        num_selected_blocks=count,
        window_size=0,
        q_tile_size=tile,
        share_heads_in_group=shared,
        causal=causal,
    )
    inputs = make_inputs(tokens, heads=2 * group, kv_heads=2, dim=4, v_dim=3, seed=seed, requires_grad=True)
    select_heads = 2 if shared else 2 * group
    indices = random_blocks((1, select_heads, -(-tokens // tile)), -(-keys // size), count, seed)
    _, aux = reference.nsa(inputs, config, indices=indices)
    dout = torch.zeros_like(aux.o_slc)
    dout[:, start:stop] = torch.randn_like(dout[:, start:stop])
    expected = torch.autograd.grad(aux.o_slc, (inputs.q, inputs.k, inputs.v), dout)

    bits = model.tile_bits(indices[:, :, start // tile : -(-stop // tile)], -(-keys // size))
    sizes = {"size": size, "width": width, "rows": tile, "num_keys": keys, "rows_from": start, "rows_to": stop}
    rows = tuple(x[:, start:stop].detach() for x in (inputs.q, aux.o_slc, dout))
    parts = []
    for blocks in ranges(-(-keys // width), blocks_at_once):
        lists = model.transposed_lists(bits, 2 * group, Keys(causal=causal), **sizes, **blocks)
        first_key = blocks["first_block"] * width
        there = slice(first_key, min(first_key + blocks["blocks"] * width, keys))
        k, v = inputs.k[:, there].detach(), inputs.v[:, there].detach()
        how: dict[str, Any] = {"causal": causal, "first_row": start, "first_key": first_key, "scale": config.scale(4)}
        lse = aux.lse_slc[..., start:stop]
        parts.append(model.selected_backward(arch, rows[0], k, v, rows[1], rows[2], lse, lists, **how))
    assert_gradients(parts, expected, start, stop)


def gradients_of_entries(
    inputs: NSAInputs, config: NSAConfig, start: int, stop: int, **selections: Tensor
) -> tuple[NSAInputs, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Inputs with compressed entries as leaves; o, dout and lse of rows start ... stop - 1; dq, dk_cmp and dv_cmp."""
    entries = config.num_compressed(inputs.q.shape[1])
    heads, kv_heads, dim = inputs.q.shape[2], *inputs.k.shape[2:]
    _, k, v = make_qkv(entries, heads, kv_heads, dim, inputs.v.shape[-1], seed=entries, requires_grad=True)
    inputs = replace(inputs, k_cmp=k, v_cmp=v)
    _, aux = reference.nsa(inputs, config, **selections)
    dout = torch.zeros_like(aux.o_cmp)
    dout[:, start:stop] = torch.randn_like(dout[:, start:stop])
    expected = torch.autograd.grad(aux.o_cmp, (inputs.q, k, v), dout)
    o = aux.o_cmp[:, start:stop].detach()
    return inputs, (o, dout[:, start:stop], aux.lse_cmp[..., start:stop]), expected


def entry_parts(
    arch: str,
    inputs: NSAInputs,
    of_rows: tuple[Tensor, ...],
    build: Callable[..., Lists],
    *,
    num_keys: int,
    width: int,
    blocks_at_once: int,
    start: int,
    stop: int,
    length: int,
    stride: int,
) -> list[Gradients]:
    """Gradients by range of entries, for which the rows begin as much earlier as the range begins later."""
    assert inputs.k_cmp is not None
    assert inputs.v_cmp is not None
    q, parts = inputs.q[:, start:stop].detach(), []
    for blocks in ranges(-(-num_keys // width), blocks_at_once):
        first = blocks["first_block"] * width
        there = slice(first, min(first + blocks["blocks"] * width, num_keys))
        k, v = inputs.k_cmp[:, there].detach(), inputs.v_cmp[:, there].detach()
        how: dict[str, Any] = {"length": length, "stride": stride, "first_row": start - first * stride}
        scale = NSAConfig().scale(q.shape[-1])
        parts.append(model.compressed_backward(arch, q, k, v, *of_rows, build(**blocks), **how, scale=scale))
    return parts


@WIDTHS
@settings(max_examples=20)
@given(
    tokens=st.sampled_from(TOKENS) | st.integers(1, 700),
    rows=st.sampled_from([128, 256]),
    compression=st.sampled_from(COMPRESSIONS),
    group=st.sampled_from([1, 2, 3]),
    first=st.integers(0, 7),
    last=st.integers(0, 7),
    blocks_at_once=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_compressed_branch(
    arch: str,
    width: int,
    tokens: int,
    rows: int,
    compression: tuple[int, int],
    group: int,
    first: int,
    last: int,
    blocks_at_once: int,
    seed: int,
) -> None:
    length, stride = compression
    start, stop = chunk(tokens, rows, first, last)
    config = NSAConfig(compress_block_size=length, compress_stride=stride, num_selected_blocks=0, window_size=0)
    inputs = make_inputs(tokens, heads=2 * group, kv_heads=2, dim=4, v_dim=3, seed=seed, requires_grad=True)
    entries = config.num_compressed(stop)
    if entries == 0:
        return
    inputs, of_rows, expected = gradients_of_entries(inputs, config, start, stop)
    sizes = {"width": width, "rows": rows, "num_keys": entries, "rows_from": start, "rows_to": stop}
    build = partial(model.transposed_prefix_lists, 1, 2 * group, Keys(length, stride), **sizes)
    how: dict[str, Any] = {"length": length, "stride": stride, "start": start, "stop": stop, "width": width}
    parts = entry_parts(arch, inputs, of_rows, build, num_keys=entries, blocks_at_once=blocks_at_once, **how)
    assert_gradients(parts, expected, start, stop)


@WIDTHS
@CAUSAL
@settings(max_examples=20)
@given(
    tokens=st.sampled_from(TOKENS) | st.integers(1, 700),
    tile=st.sampled_from(TILES),
    compression=st.sampled_from(COMPRESSIONS),
    parts_of_a_block=st.sampled_from([1, 2]),
    more=st.integers(0, 3),
    group=st.sampled_from([1, 2, 3]),
    first=st.integers(0, 7),
    last=st.integers(0, 7),
    blocks_at_once=st.integers(0, 2),
    seed=st.integers(0, 2**31),
)
def test_chosen_blocks_of_the_compressed_branch(
    arch: str,
    width: int,
    causal: bool,
    tokens: int,
    tile: int,
    compression: tuple[int, int],
    parts_of_a_block: int,
    more: int,
    group: int,
    first: int,
    last: int,
    blocks_at_once: int,
    seed: int,
) -> None:
    start, stop = chunk(tokens, tile, first, last)
    length, stride = compression
    size = width * parts_of_a_block
    config = NSAConfig(
        compress_block_size=length,
        compress_stride=stride,
        num_selected_blocks=0,
        window_size=0,
        q_tile_size=tile,
        n_block_size=size,
        causal=causal,
    )
    config = replace(config, num_cmp_selected_blocks=max(1, config._forced_cmp_blocks()) + more)
    entries = config.num_compressed(tokens)
    if entries == 0:
        return
    inputs = make_inputs(tokens, heads=2 * group, kv_heads=2, dim=4, v_dim=3, seed=seed, requires_grad=True)
    tiles, blocks = -(-tokens // tile), -(-entries // size)
    chosen = {
        "indices": torch.empty((1, 2 * group, tiles, 0), dtype=torch.int32),
        "cmp_indices": random_blocks((1, 2 * group, tiles), blocks, config.num_cmp_selected_blocks or 0, seed),
    }
    inputs, of_rows, expected = gradients_of_entries(inputs, config, start, stop, **chosen)
    bits = model.tile_bits(chosen["cmp_indices"][:, :, start // tile : -(-stop // tile)], blocks)
    sizes = {"size": size, "width": width, "rows": tile, "num_keys": entries, "rows_from": start, "rows_to": stop}
    build = partial(model.transposed_lists, bits, 2 * group, Keys(length, stride, causal), **sizes)
    if not causal:
        length, stride = 1, 0
    how: dict[str, Any] = {"length": length, "stride": stride, "start": start, "stop": stop, "width": width}
    parts = entry_parts(arch, inputs, of_rows, build, num_keys=entries, blocks_at_once=blocks_at_once, **how)
    assert_gradients(parts, expected, start, stop)


def test_tile_bits() -> None:
    indices = torch.full((1, 1, 34, 2), -1, dtype=torch.int32)
    indices[0, 0, 0] = torch.tensor([0, 2])
    indices[0, 0, 31, 0] = 2
    indices[0, 0, 33, 0] = 1
    assert model.tile_bits(indices, 3).tolist() == [[[[1, 0], [0, 2], [1 - 2**31, 0]]]]


def test_transposed_lists_hold_what_causality_leaves() -> None:
    indices = torch.arange(4, dtype=torch.int32).expand(1, 1, 2, 4)
    sizes: dict[str, Any] = {"width": 128, "rows": 256, "num_keys": 500, "rows_to": 500}
    chosen = model.transposed_lists(model.tile_bits(indices, 4), 1, Keys(), size=128, **sizes)
    for lists in (chosen, model.transposed_prefix_lists(1, 1, Keys(), **sizes)):
        assert [lists.listed("mask", 0, 0, block) for block in range(4)] == [[0], [0], [1], [1]]
        assert [lists.listed("full", 0, 0, block) for block in range(4)] == [[1], [1], [], []]


def test_transposed_lists_hold_what_forward_lists_hold() -> None:
    keys, heads = Keys(), 4
    sizes: dict[str, Any] = {"size": 64, "width": 128, "rows": 128, "num_keys": 900, "rows_from": 0, "rows_to": 900}
    indices = random_blocks((2, 2, 8), 15, 5, seed=0)
    forward = model.chosen_lists(indices, heads, keys, **sizes)
    lists = model.transposed_lists(model.tile_bits(indices, 15), heads, keys, **sizes)
    assert forward.bits is not None
    assert lists.bits is not None
    assert torch.equal(lists.bits, forward.bits)
    for kind in ("mask", "full"):
        listed = False
        for batch, head in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
            by_tile = {(t, block) for t in range(8) for block in forward.listed(kind, batch, head, t)}
            by_block = {(t, block) for block in range(8) for t in lists.listed(kind, batch, head, block)}
            assert by_tile == by_block
            listed |= bool(by_tile)
        assert listed


# The model sees mistakes


def pairs(arch: str, lists: Lists, num_rows: int, num_keys: int, **how: Any) -> Tensor:
    """Counts for all three gradients."""
    every, again = model.backward_pairs(arch, lists, 0, 0, num_rows=num_rows, num_keys=num_keys, **how)
    assert not again.any()
    return every


def causal_pairs(tokens: int) -> Tensor:
    return torch.ones((tokens, tokens), dtype=torch.int64).tril()


def past(row: Tensor, key: Tensor) -> Tensor:
    return key <= row


RIGHT = Lists.planted([[0], [0], [1], [1]], [[1], [1], [], []], rows=256, width=128)
"""Causal, for 512 rows and keys."""


@ARCHS
@pytest.mark.parametrize("how", [{"causal": True}, {"mask_mod": past}], ids=["native", "mask_mod"])
def test_right_lists_are_causal(arch: str, how: dict[str, Any]) -> None:
    assert torch.equal(pairs(arch, RIGHT, 512, 512, **how), causal_pairs(512))


@ARCHS
def test_diagonal_blocks_among_full_ones_show_the_future_to_a_mask_mod(arch: str) -> None:
    lists = Lists.planted([[], [0], [1], [1]], [[0, 1], [1], [], []], rows=256, width=128)
    assert torch.equal(pairs(arch, lists, 512, 512, causal=True), causal_pairs(512))
    too_many = pairs(arch, lists, 512, 512, mask_mod=past) - causal_pairs(512)
    assert too_many[:128, :128].equal(torch.ones(128, 128, dtype=torch.int64).triu(1))
    assert int(too_many.sum()) == 128 * 127 // 2


@ARCHS
def test_native_causality_replaces_a_mask_mod(arch: str) -> None:
    def nothing(row: Tensor, key: Tensor) -> Tensor:
        return (row + key) < 0

    assert torch.equal(pairs(arch, RIGHT, 512, 512, causal=True, mask_mod=nothing), causal_pairs(512))
    assert int(pairs(arch, RIGHT, 512, 512, mask_mod=nothing).sum()) == 256 * 256


@ARCHS
def test_native_causality_of_a_slice_ends_with_the_slice(arch: str) -> None:
    """Why a range of keys needs a mask_mod."""
    first_two = Lists.planted([[0], [0]], [[1], [1]], rows=256, width=128)
    got = pairs(arch, first_two, 512, 256, causal=True)
    assert int(got[:256].sum()) == 0
    shifted = model.selected_backward(arch, *rows_of_ones(512, 256), first_two, causal=True, first_row=0, scale=1.0)
    right = model.selected_backward(arch, *rows_of_ones(512, 512), RIGHT, causal=True, first_row=0, scale=1.0)
    torch.testing.assert_close(shifted[2], right[2][:, :256])


def rows_of_ones(rows: int, keys: int) -> tuple[Tensor, ...]:
    """q, k, v, out, dout and lse with which dv of a key is the number of rows that see it."""
    ones = torch.ones(1, max(rows, keys), 1, 1, dtype=torch.float64)
    q, k = 0 * ones[:, :rows], ones[:, :keys]
    return q, k, k, q, q + 1, q[..., 0].mT


@ARCHS
def test_order_does_not_matter_and_every_block_ends_with_the_keys(arch: str) -> None:
    lists = Lists.planted([[2, 0, 1], [], [1, 2]], [[], [1, 0, 2], [0]], rows=128, width=128)
    for how in ({"causal": True}, {"mask_mod": past}):
        got = pairs(arch, lists, 384, 300, **how)
        assert got.shape == (384, 300)
        in_order = Lists.planted([[0, 1, 2], [], [1, 2]], [[], [0, 1, 2], [0]], rows=128, width=128)
        assert torch.equal(got, pairs(arch, in_order, 384, 300, **how))
    assert bool((pairs(arch, lists, 384, 300, mask_mod=past)[:, 128:256] == 1).all())


@ARCHS
@pytest.mark.parametrize(
    ("masks", "fulls"), [([[0, 0], [1]], [[1], []]), ([[0], [1]], [[0, 1], []])], ids=["one list", "both lists"]
)
def test_tile_listed_twice_counts_twice(arch: str, masks: list[list[int]], fulls: list[list[int]]) -> None:
    lists = Lists.planted(masks, fulls, rows=256, width=256 if arch == "sm_100" else 128)
    keys = 2 * lists.width
    q, k, v = make_qkv(512, heads=1, kv_heads=1, dim=4)
    k, v = k[:, :keys], v[:, :keys]
    out, lse = model.attend(q, k, v, lambda *_: torch.ones(512, keys), 0.5)
    dout = torch.randn_like(out)
    how: dict[str, Any] = {"causal": False, "first_row": 0, "scale": 0.5}
    once = Lists.planted([[], []], [[0], []], rows=256, width=lists.width)
    rest = Lists.planted([[], [1]], [[1], []], rows=256, width=lists.width)
    twice, first, others = (
        model.selected_backward(arch, q, k, v, out, dout, lse, which, **how) for which in (lists, once, rest)
    )
    for got, one, other in zip(twice, first, others, strict=True):
        assert one.abs().max() > 0.01
        torch.testing.assert_close(got, 2 * one + other)


@ARCHS
def test_missing_tiles_get_no_gradient(arch: str) -> None:
    lists = Lists.planted([[0], [], [1], [1]], [[1], [1], [], []], rows=256, width=128)
    missing = causal_pairs(512) - pairs(arch, lists, 512, 512, causal=True)
    assert torch.equal(missing[:256, 128:256], causal_pairs(512)[:256, 128:256])
    assert int(missing.sum()) == int(missing[:256, 128:256].sum())


def test_tiles_behind_the_last_row_count_its_rows_again_on_sm_100() -> None:
    """Why sm_100 needs a mask_mod even where nothing is to be masked; 300 rows leave 84 of the second tile unused."""
    lists = Lists.planted([[0, 1], [0, 1], [1]], [[], [], []], rows=256, width=128)
    for how in ({"causal": True}, {}):
        every, again = model.backward_pairs("sm_100", lists, 0, 0, num_rows=300, num_keys=300, **how)
        assert torch.equal(every, pairs("sm_90", lists, 300, 300, **how))
        assert bool((again[256:] == 1).all())
        assert not again[:256].any()
    assert torch.equal(pairs("sm_100", lists, 300, 300, mask_mod=past), causal_pairs(300))
    fulls = Lists.planted([[], [], []], [[0, 1]] * 3, rows=256, width=128)
    assert bool((pairs("sm_100", fulls, 300, 300, mask_mod=past) == 1).all())


def test_tiles_behind_the_last_row_do_not_reach_dq() -> None:
    fulls = Lists.planted([[], [], []], [[0, 1]] * 3, rows=256, width=128)
    every, again = model.backward_pairs("sm_100", fulls, 0, 0, num_rows=300, num_keys=300)
    q, k, v = make_qkv(300, heads=1, kv_heads=1, dim=4)
    out, lse = model.attend(q, k, v, lambda *_: every, 0.5)
    arguments = (q, k, v, out, torch.randn_like(out), lse)
    got, right, extra = (
        model.attend_backward(*arguments, lambda *_, counts=counts: counts, 0.5)
        for counts in ((every, again), (every, 0 * again), (again, 0 * again))
    )
    assert torch.equal(got[0], right[0])
    for i in (1, 2):
        assert extra[i].abs().max() > 0.01
        torch.testing.assert_close(got[i], right[i] + extra[i])


@ARCHS
def test_wide_blocks_without_refinement_reach_what_was_not_chosen(arch: str) -> None:
    indices = torch.tensor([1, 2], dtype=torch.int32).view(1, 1, 1, 2)
    sizes: dict[str, Any] = {"size": 64, "width": 128, "rows": 256, "num_keys": 256, "rows_to": 256}
    lists = model.transposed_lists(model.tile_bits(indices, 4), 1, Keys(causal=False), **sizes)
    assert [lists.listed("mask", 0, 0, block) for block in (0, 1)] == [[0], [0]]
    how: dict[str, Any] = {"causal": False, "first_row": 0, "scale": 1.0}
    of_ones = rows_of_ones(256, 256)
    right = model.selected_backward(arch, *of_ones, lists, **how)[2].flatten()
    wrong = model.selected_backward(arch, *of_ones, replace(lists, bits=None), **how)[2].flatten()
    assert right.tolist() == [0.0] * 64 + [256.0] * 128 + [0.0] * 64
    assert wrong.tolist() == [256.0] * 256


@ARCHS
def test_range_of_keys_that_forgets_where_it_begins_reads_the_bits_of_others(arch: str) -> None:
    indices = torch.tensor([0, 3], dtype=torch.int32).view(1, 1, 1, 2)
    sizes: dict[str, Any] = {"size": 64, "width": 128, "rows": 256, "num_keys": 256, "rows_to": 256}
    lists = model.transposed_lists(model.tile_bits(indices, 4), 1, Keys(causal=False), **sizes, first_block=1)
    how: dict[str, Any] = {"causal": False, "first_row": 0, "scale": 1.0}
    right, wrong = (
        model.selected_backward(arch, *rows_of_ones(256, 128), lists, **how, first_key=first)[2].flatten()
        for first in (128, 0)
    )
    assert right.tolist() == [0.0] * 64 + [256.0] * 64
    assert wrong.tolist() == [256.0] * 64 + [0.0] * 64


@ARCHS
def test_rows_and_blocks_without_each_other_get_zero(arch: str) -> None:
    q, k, v = make_qkv(512, heads=1, kv_heads=1, dim=4)
    forward = Lists.planted([[], [1, 2, 3]], [[], []], rows=256, width=128)
    lists = Lists.planted([[], [1], [1], [1]], [[], [], [], []], rows=256, width=128)
    how: dict[str, Any] = {"causal": False, "first_row": 0, "scale": 0.5}
    out, lse = model.selected(arch, q, k, v, forward, **how)
    assert bool((lse[..., :256] == -math.inf).all())
    dq, dk, dv = model.selected_backward(arch, q, k, v, out, torch.randn_like(out), lse, lists, **how)
    assert not dq[:, :256].any()
    assert not dk[:, :128].any()
    assert not dv[:, :128].any()
    for gradient in (dq[:, 256:], dk[:, 128:], dv[:, 128:]):
        assert bool(torch.isfinite(gradient).all())
        assert bool(gradient.any())


@pytest.mark.parametrize(
    ("arch", "rows", "width", "blocks", "message"),
    [
        ("sm_80", 128, 128, 2, "arch"),
        ("sm_90", 96, 128, 2, "64 rows"),
        ("sm_100", 192, 128, 2, "128 rows"),
        ("sm_90", 128, 256, 1, "64 or 128 keys"),
        ("sm_90", 128, 32, 8, "64 or 128 keys"),
        ("sm_100", 256, 64, 4, "multiple of 128 keys"),
        ("sm_90", 128, 128, 1, "2 blocks"),
    ],
)
def test_what_fa4_does_not_take_is_refused(arch: str, rows: int, width: int, blocks: int, message: str) -> None:
    lists = Lists.planted([[0]] * blocks, [[]] * blocks, rows=rows, width=width)
    with pytest.raises(ValueError, match=message):
        pairs(arch, lists, 256, 256)


@ARCHS
def test_tiles_that_do_not_exist_are_refused(arch: str) -> None:
    for tile in (-1, 2):
        with pytest.raises(ValueError, match="must have rows"):
            pairs(arch, Lists.planted([[tile]], [[]], rows=128, width=128), 256, 128)
    with pytest.raises(ValueError, match="more places"):
        pairs(arch, Lists.planted([[0, 0, 1]], [[]], rows=128, width=128), 256, 128)


MALFORMED: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "in any order": ([[2, 0], [2, 1], [2]], [[1], [], []]),
    "listed twice": ([[0, 0], [1, 1, 2], []], [[1], [], [2, 2]]),
    "in both lists": ([[0, 1], [1], [2]], [[2, 1], [2, 1], [2]]),
    "diagonal and future tiles in full": ([[], [1], []], [[0, 1, 2], [0, 2], [0, 1, 2]]),
    "a tile is missing": ([[0], [1], [2]], [[2], [], []]),
    "a block without tiles": ([[0], [], [2]], [[1, 2], [], []]),
}
"""For blocks of 128 keys and tiles of 128 rows, 300 of either."""


def test_malformed_lists_are_wrong() -> None:
    """All but the first differ from right lists even with native causality, so FA4 agreeing there says something."""
    right = causal_pairs(300)
    for name, (masks, fulls) in MALFORMED.items():
        lists = Lists.planted(masks, fulls, rows=128, width=128)
        differs = [not torch.equal(pairs("sm_90", lists, 300, 300, **how), right) for how in ({"causal": True}, {})]
        assert differs == [name not in ("in any order", "diagonal and future tiles in full"), True], name


# The model against FA4 on sm_90


def assert_predicted(got: Gradients, predict: Callable[..., Gradients], name: str) -> None:
    """FA4's gradients are what the model predicts, to the accuracy of bf16."""
    exact, low = predict(dtype=torch.float64), predict(dtype=torch.bfloat16)
    for which, *gradients in zip(("dq", "dk", "dv"), got, exact, low, strict=True):
        assert_within_budget(*gradients, f"{which} of {name}")


def of_rows(attended: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """What backward takes from forward: out and a dout in bf16, lse in fp32."""
    out, lse = attended
    generator = torch.Generator().manual_seed(out.shape[1])
    dout = torch.randn(out.shape, generator=generator).to(out.device)
    return out.bfloat16(), dout.bfloat16(), lse.float()


@pytest.mark.cuda
@NOISY
@CAUSAL
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("blocks_at_once", [0, 2], ids=["all keys", "ranges of keys"])
@pytest.mark.parametrize(
    ("tile", "size", "width"),
    [(128, 64, 64), (256, 64, 128), (256, 192, 128), (512, 128, 128)],
    ids=str,
)
def test_fa4_selects_backward_what_the_model_predicts(
    dim: int, tile: int, size: int, width: int, blocks_at_once: int, causal: bool
) -> None:
    for tokens in (63, 257, 700):
        q, k, v = low_precision_qkv(tokens, dim)
        indices = random_blocks((2, 2, -(-tokens // tile)), -(-tokens // size), 5, seed=tokens)
        keys = Keys(causal=causal)
        sizes: dict[str, Any] = {"size": size, "width": width, "rows": tile, "num_keys": tokens, "rows_to": tokens}
        forward = model.chosen_lists(indices, 4, keys, rows_from=0, **sizes)
        how: dict[str, Any] = {"causal": causal, "first_row": 0, "scale": dim**-0.5}
        out, dout, lse = of_rows(model.selected("sm_90", q, k, v, forward, **how))
        bits = model.tile_bits(indices, -(-tokens // size))
        for blocks in ranges(-(-tokens // width), blocks_at_once):
            lists = model.transposed_lists(bits, 4, keys, **sizes, **blocks)
            first_key = blocks["first_block"] * width
            there = slice(first_key, first_key + blocks["blocks"] * width)
            arguments, where = (q, k[:, there], v[:, there], out, dout, lse), {**how, "first_key": first_key}
            got = fa4.selected_backward(*arguments, on_device(lists), **where)
            predict = partial(model.selected_backward, "sm_90", *arguments, lists, **where)
            assert_predicted(got, predict, f"{tokens} tokens, keys from {first_key}")


@pytest.mark.cuda
@NOISY
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("length", "stride"), COMPRESSIONS[::2], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(128, 128), (256, 128), (128, 64)], ids=str)
def test_fa4_compresses_backward_what_the_model_predicts(
    dim: int, length: int, stride: int, rows: int, width: int
) -> None:
    for tokens in (257, 700):
        entries = NSAConfig(compress_block_size=length, compress_stride=stride).num_compressed(tokens)
        q, *_ = low_precision_qkv(tokens, dim)
        _, k, v = low_precision_qkv(entries, dim)
        sizes: dict[str, Any] = {"width": width, "rows": rows, "num_keys": entries, "rows_from": 0, "rows_to": tokens}
        keys = Keys(length, stride)
        how: dict[str, Any] = {"length": length, "stride": stride, "first_row": 0, "scale": dim**-0.5}
        forward = model.prefix_lists(2, 4, keys, **sizes)
        arguments = (q, k, v, *of_rows(model.compressed("sm_90", q, k, v, forward, **how)))
        lists = model.transposed_prefix_lists(2, 4, keys, **sizes)
        got = fa4.compressed_backward(*arguments, on_device(lists), **how)
        predict = partial(model.compressed_backward, "sm_90", *arguments, lists, **how)
        assert_predicted(got, predict, f"{tokens} tokens")


@pytest.mark.cuda
@NOISY
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("masked", ["nothing", "causal", "mask_mod"])
@pytest.mark.parametrize("name", MALFORMED)
def test_fa4_does_with_malformed_lists_what_the_model_predicts(name: str, masked: str, dim: int) -> None:
    lists = Lists.planted(*MALFORMED[name], rows=128, width=128)
    q, k, v = low_precision_qkv(300, dim, heads=1, kv_heads=1, batch=1)
    arguments = (q, k, v, *of_rows(model.attend(q, k, v, lambda *_: torch.ones(300, 300), dim**-0.5)))
    how: dict[str, Any] = {"first_row": 0, "scale": dim**-0.5}
    if masked == "mask_mod":  # entries end 30 tokens before their rows at the earliest
        how |= {"length": 31, "stride": 1}
        door, predict = fa4.compressed_backward, model.compressed_backward
    else:
        how |= {"causal": masked == "causal"}
        door, predict = fa4.selected_backward, model.selected_backward
    got = door(*arguments, on_device(lists), **how)
    assert_predicted(got, partial(predict, "sm_90", *arguments, lists, **how), name)


# The kernels that build lists against their twins


@pytest.mark.cuda
@NOISY
@CAUSAL
@pytest.mark.parametrize("tile", [128, 512])
@pytest.mark.parametrize(("size", "width"), [(64, 64), (64, 128), (192, 64), (192, 128), (256, 128)], ids=str)
def test_kernel_lists_tiles_that_chose_blocks(size: int, width: int, tile: int, causal: bool) -> None:
    from cute_kernels import block_lists

    for number, tokens in enumerate([*TOKENS, 6000]):  # the last has more tiles than a word has bits
        batch, select_heads, group = [(1, 1, 1), (2, 2, 1), (1, 2, 4), (3, 1, 2)][number % 4]
        for start, stop in chunks_of(tokens, tile):
            keys = stop if causal else tokens
            tiles = -(-(stop - start) // tile)
            indices = random_blocks((batch, select_heads, tiles), -(-keys // size), 1 + number * 7 % 40, seed=number)
            expected = model.tile_bits(indices, -(-keys // size))
            bits = block_lists.tile_bits(indices.cuda(), -(-keys // size))
            assert torch.equal(bits.cpu(), expected)
            how: dict[str, Any] = {"size": size, "width": width, "rows": tile, "num_keys": keys}
            how |= {"rows_from": start, "rows_to": stop}
            heads = select_heads * group
            for blocks in ranges(-(-keys // width), 3 * (number % 2)):
                got = block_lists.transposed_lists(bits, heads, block_lists.Keys(causal=causal), **how, **blocks)
                twin = model.transposed_lists(expected, heads, Keys(causal=causal), **how, **blocks)
                assert_same_lists(replace(got, bits=None), replace(twin, bits=None))


@pytest.mark.cuda
@NOISY
@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("length", "stride"), COMPRESSIONS, ids=str)
def test_kernel_lists_tiles_that_see_entries(length: int, stride: int, width: int, rows: int) -> None:
    from cute_kernels import block_lists

    config = NSAConfig(compress_block_size=length, compress_stride=stride)
    for tokens in (128, 257, 1000):
        for start, stop in chunks_of(tokens, rows):
            how: dict[str, Any] = {"width": width, "rows": rows, "num_keys": config.num_compressed(stop)}
            how |= {"rows_from": start, "rows_to": stop}
            device = torch.device("cuda")
            got = block_lists.transposed_prefix_lists(2, 3, block_lists.Keys(length, stride), device=device, **how)
            assert_same_lists(got, model.transposed_prefix_lists(2, 3, Keys(length, stride), **how))
