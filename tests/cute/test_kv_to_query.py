"""Transposed block lists for FA4's backward: the model of how FA4 reads them, against the oracle and against FA4; the
kernels that build them. As tests/cute/test_query_to_kv.py does for the forward.
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
from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4.interface import Gradients
from cute_kernels.fa4.masks import Mask
from nsa import NSAConfig
from nsa.inputs import NSAInputs
from tests.support import cases
from tests.support import fa4_model as model
from tests.support.fa4_cases import (
    ARCHS,
    CAUSAL,
    COMPRESSIONS,
    NOISY,
    TILES,
    TOKENS,
    assert_same_lists,
    executed_masked,
    gpu,
    low_precision_qkv,
    on_device,
    random_blocks,
)
from tests.support.fa4_model import Keys, Lists
from tests.support.hardware import FA4
from tests.support.helpers import assert_within_budget, make_inputs, make_qkv

WIDTHS = pytest.mark.parametrize(("arch", "width"), [("sm_90", 64), ("sm_90", 128), ("sm_100", 128), ("sm_100", 256)])
"""Blocks of 64 keys need FA4's tile configuration replaced; those of 256 run with 2-CTA instructions at D = 128."""


def ranges(blocks: int, count: int) -> list[range]:
    """Ranges of at most `count` blocks; 0: one of all."""
    step = count or max(blocks, 1)
    return [range(first, min(first + step, blocks)) for first in range(0, blocks, step)]


def empty_gradients(q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor) -> Gradients:
    return Gradients(q, k, v, o, do, lse, *(torch.full_like(x, math.nan) for x in (q, k, v)))


def assert_gradients(got: tuple[Tensor, Tensor, Tensor], expected: tuple[Tensor, ...]) -> None:
    for gradient, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)


def part(gradients: Gradients, blocks: range, width: int, tile: int, *, causal: bool) -> tuple[Gradients, int, int]:
    """Empty gradients for a range of keys and the rows that may see them, the first of these rows and keys."""
    first_key = blocks.start * width
    first_row = first_key // tile * tile if causal else 0
    q, o, do = (x[:, first_row:] for x in (gradients.q, gradients.o, gradients.do))
    k, v = (x[:, first_key : blocks.stop * width] for x in (gradients.k, gradients.v))
    return empty_gradients(q, k, v, o, do, gradients.lse[..., first_row:]), first_row, first_key


# Lists, read as FA4 reads them, give what autograd of the oracle gives


@WIDTHS
@CAUSAL
@settings(max_examples=12)
@given(
    tokens=st.sampled_from(TOKENS) | st.integers(1, 700),
    tile=st.sampled_from(TILES),
    size=st.sampled_from([64, 128, 192]),
    count=st.integers(1, 9),
    group=st.sampled_from([1, 2, 3]),
    shared=st.booleans(),
    blocks_at_once=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
@example(300, 256, 128, 3, 1, True, 0, 0)  # rows end in the first half of a tile
@example(900, 256, 64, 9, 2, False, 1, 0)  # ranges of keys whose rows begin later
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
    blocks_at_once: int,
    seed: int,
) -> None:
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
    indices = random_blocks((1, select_heads, -(-tokens // tile)), -(-tokens // size), count, seed)
    _, aux = reference.nsa(inputs, config, indices=indices)
    do = torch.randn_like(aux.o_slc)
    expected = torch.autograd.grad(aux.o_slc, (inputs.q, inputs.k, inputs.v), do)

    bits = model.tile_bits(indices, size=size, num_keys=tokens)
    sizes = {"size": size, "width": width, "rows": tile, "num_keys": tokens, "num_rows": tokens}
    whole = empty_gradients(*(x.detach() for x in (inputs.q, inputs.k, inputs.v, aux.o_slc, do, aux.lse_slc)))
    dq, dks, dvs = torch.zeros_like(whole.q), [], []
    for blocks in ranges(-(-tokens // width), blocks_at_once):
        some, first_row, first_key = part(whole, blocks, width, tile, causal=causal)
        keys, first_tile = Keys(causal=causal), first_row // tile
        lists = model.transposed_lists(bits, 2 * group, keys, **sizes, blocks=blocks, first_tile=first_tile)
        where: dict[str, Any] = {"first_row": first_row, "first_key": first_key}
        model.selected_backward(arch, some, lists, causal=causal, scale=config.scale(4), **where)
        dq[:, first_row:] += some.dq
        dks.append(some.dk)
        dvs.append(some.dv)
    assert_gradients((dq, torch.cat(dks, 1), torch.cat(dvs, 1)), expected)


def gradients_of_entries(
    inputs: NSAInputs, config: NSAConfig, **selections: Tensor
) -> tuple[Gradients, tuple[Tensor, ...]]:
    """Empty gradients of the compressed branch with entries of its own, and what they should become."""
    entries = config.num_compressed(inputs.q.shape[1])
    heads, kv_heads, dim = inputs.q.shape[2], *inputs.k.shape[2:]
    _, k, v = make_qkv(entries, heads, kv_heads, dim, inputs.v.shape[-1], seed=entries, requires_grad=True)
    _, aux = reference.nsa(replace(inputs, k_cmp=k, v_cmp=v), config, **selections)
    do = torch.randn_like(aux.o_cmp)
    expected = torch.autograd.grad(aux.o_cmp, (inputs.q, k, v), do)
    return empty_gradients(*(x.detach() for x in (inputs.q, k, v, aux.o_cmp, do, aux.lse_cmp))), expected


@WIDTHS
@settings(max_examples=20)
@given(
    tokens=st.sampled_from(TOKENS) | st.integers(1, 700),
    rows=st.sampled_from([128, 256]),
    compression=st.sampled_from(COMPRESSIONS),
    group=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 2**31),
)
def test_compressed_branch(
    arch: str, width: int, tokens: int, rows: int, compression: tuple[int, int], group: int, seed: int
) -> None:
    length, stride = compression
    config = NSAConfig(compress_block_size=length, compress_stride=stride, num_selected_blocks=0, window_size=0)
    entries = config.num_compressed(tokens)
    if entries == 0:
        return
    inputs = make_inputs(tokens, heads=2 * group, kv_heads=2, dim=4, v_dim=3, seed=seed, requires_grad=True)
    got, expected = gradients_of_entries(inputs, config)
    sizes = {"width": width, "rows": rows, "num_keys": entries, "num_rows": tokens}
    lists = model.transposed_prefix_lists(1, 2 * group, Keys(length, stride), **sizes)
    model.compressed_backward(arch, got, lists, length=length, stride=stride, first_row=0, scale=config.scale(4))
    assert_gradients((got.dq, got.dk, got.dv), expected)


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
    seed: int,
) -> None:
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
    indices = random_blocks((1, 2 * group, tiles), blocks, config.num_cmp_selected_blocks or 0, seed)
    nothing = torch.empty((1, 2 * group, tiles, 0), dtype=torch.int32)
    got, expected = gradients_of_entries(inputs, config, indices=nothing, cmp_indices=indices)
    bits = model.tile_bits(indices, size=size, num_keys=entries)
    sizes = {"size": size, "width": width, "rows": tile, "num_keys": entries, "num_rows": tokens}
    every = range(-(-entries // width))
    lists = model.transposed_lists(bits, 2 * group, Keys(length, stride, causal), **sizes, blocks=every)
    if not causal:
        length, stride = 1, 0
    model.compressed_backward(arch, got, lists, length=length, stride=stride, first_row=0, scale=config.scale(4))
    assert_gradients((got.dq, got.dk, got.dv), expected)


def test_tile_bits() -> None:
    indices = torch.full((1, 1, 34, 2), -1, dtype=torch.int32)
    indices[0, 0, 0] = torch.tensor([0, 2])
    indices[0, 0, 31, 0] = 2
    indices[0, 0, 33, 0] = 1
    assert model.tile_bits(indices, size=64, num_keys=150).tolist() == [[[[1, 0], [0, 2], [1 - 2**31, 0]]]]


def all_lists(indices: Tensor, heads: int, keys: Keys, **sizes: Any) -> Lists:
    """For all blocks, from `[B,S,tiles,k]`."""
    bits = model.tile_bits(indices, size=sizes["size"], num_keys=sizes["num_keys"])
    return model.transposed_lists(bits, heads, keys, **sizes, blocks=range(-(-sizes["num_keys"] // sizes["width"])))


def test_transposed_lists_hold_what_causality_leaves() -> None:
    indices = torch.arange(4, dtype=torch.int32).expand(1, 1, 2, 4)
    sizes: dict[str, Any] = {"width": 128, "rows": 256, "num_keys": 500, "num_rows": 500}
    chosen = all_lists(indices, 1, Keys(), size=128, **sizes)
    for lists in (chosen, model.transposed_prefix_lists(1, 1, Keys(), **sizes)):
        assert [lists.listed("mask", 0, 0, block) for block in range(4)] == [[0], [0], [1], [1]]
        assert [lists.listed("full", 0, 0, block) for block in range(4)] == [[1], [1], [], []]


def test_blocks_that_end_behind_the_keys_can_be_full() -> None:
    indices = torch.arange(3, dtype=torch.int32).expand(1, 1, 2, 3)
    sizes: dict[str, Any] = {"size": 128, "width": 128, "rows": 256, "num_keys": 300, "num_rows": 512}
    for keys, tiles in ((Keys(causal=False), [0, 1]), (Keys(length=2), [])):
        lists = all_lists(indices, 1, keys, **sizes)
        assert lists.listed("full", 0, 0, 2) == tiles
    few = model.transposed_prefix_lists(1, 1, Keys(16, 16), width=128, rows=256, num_keys=10, num_rows=512)
    assert (few.listed("mask", 0, 0, 0), few.listed("full", 0, 0, 0)) == ([0], [1])


def test_tiles_in_a_list_count_from_the_first_one() -> None:
    indices = torch.tensor([[0, -1], [0, 2], [2, 3], [0, 3]], dtype=torch.int32).view(1, 1, 4, 2)
    sizes: dict[str, Any] = {"size": 128, "width": 128, "rows": 128, "num_keys": 500, "num_rows": 500}
    bits = model.tile_bits(indices, size=128, num_keys=500)
    lists = model.transposed_lists(bits, 1, Keys(), **sizes, blocks=range(2, 4), first_tile=2)
    assert [lists.listed("mask", 0, 0, block) for block in range(2)] == [[0], [1]]
    with pytest.raises(AssertionError, match="see a block"):
        model.transposed_lists(bits, 1, Keys(), **sizes, blocks=range(1), first_tile=2)


@pytest.mark.parametrize("size", [64, 256])
def test_transposed_lists_hold_what_forward_lists_hold(size: int) -> None:
    keys, heads, blocks = Keys(), 4, -(-900 // size)
    sizes: dict[str, Any] = {"size": size, "width": 128, "rows": 128, "num_keys": 900}
    indices = random_blocks((2, 2, 8), blocks, 5, seed=0)
    lists = all_lists(indices, heads, keys, num_rows=900, **sizes)
    exact = size % 128 == 0
    assert (lists.bits is None) == exact
    forward = model.chosen_lists(indices, heads, keys, rows_from=0, rows_to=900, **sizes)
    for batch, head in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
        by_tile: dict[str, set[tuple[int, int]]] = {}
        by_block: dict[str, set[tuple[int, int]]] = {}
        for kind in ("mask", "full"):
            by_tile[kind] = {(t, block) for t in range(8) for block in forward.listed(kind, batch, head, t)}
            by_block[kind] = {(t, block) for block in range(8) for t in lists.listed(kind, batch, head, block)}
        if exact:
            assert by_tile == by_block
        else:
            assert by_block == {"mask": by_tile["mask"] | by_tile["full"], "full": set()}
        assert by_block["mask"]


# The model sees mistakes


def pairs(arch: str, lists: Lists, num_rows: int, num_keys: int, **how: Any) -> Tensor:
    """Counts for all three gradients."""
    every, again = model.backward_pairs(arch, lists, 0, 0, num_rows=num_rows, num_keys=num_keys, **how)
    assert not again.any()
    return every


def causal_pairs(tokens: int) -> Tensor:
    return torch.ones((tokens, tokens), dtype=torch.int32).tril()


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
    assert too_many[:128, :128].equal(torch.ones(128, 128, dtype=torch.int32).triu(1))
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
    shifted, right = dv_of_ones(arch, 512, 256, first_two), dv_of_ones(arch, 512, 512, RIGHT)
    assert torch.equal(shifted, right[:256])


def dv_of_ones(arch: str, rows: int, keys: int, lists: Lists, *, causal: bool = True, first_key: int = 0) -> Tensor:
    """How many rows see each key: dv of a selected branch with weights and gradients of 1."""
    ones = torch.ones(1, max(rows, keys), 1, 1, dtype=torch.float64)
    q, k = 0 * ones[:, :rows], ones[:, :keys]
    gradients = empty_gradients(q, k, k, q, q + 1, q[..., 0].mT)
    model.selected_backward(arch, gradients, lists, causal=causal, first_key=first_key, scale=1.0)
    return gradients.dv.flatten()


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
    do = torch.randn_like(out)
    once = Lists.planted([[], []], [[0], []], rows=256, width=lists.width)
    rest = Lists.planted([[], [1]], [[1], []], rows=256, width=lists.width)
    twice, first, others = (empty_gradients(q, k, v, out, do, lse) for _ in range(3))
    for gradients, which in ((twice, lists), (first, once), (others, rest)):
        model.selected_backward(arch, gradients, which, causal=False, scale=0.5)
    for name in ("dq", "dk", "dv"):
        got, one, other = (getattr(gradients, name) for gradients in (twice, first, others))
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
    do = torch.randn_like(out)
    got, right, extra = (empty_gradients(q, k, v, out, do, lse) for _ in range(3))
    for gradients, counts in ((got, (every, again)), (right, (every, 0 * again)), (extra, (again, 0 * again))):
        model.attend_backward(gradients, lambda *_, counts=counts: counts, 0.5)
    assert torch.equal(got.dq, right.dq)
    for name in ("dk", "dv"):
        assert getattr(extra, name).abs().max() > 0.01
        torch.testing.assert_close(getattr(got, name), getattr(right, name) + getattr(extra, name))


@ARCHS
def test_wide_blocks_without_refinement_reach_what_was_not_chosen(arch: str) -> None:
    indices = torch.tensor([1, 2], dtype=torch.int32).view(1, 1, 1, 2)
    sizes: dict[str, Any] = {"size": 64, "width": 128, "rows": 256, "num_keys": 256, "num_rows": 256}
    lists = all_lists(indices, 1, Keys(causal=False), **sizes)
    assert [lists.listed("mask", 0, 0, block) for block in (0, 1)] == [[0], [0]]
    right, wrong = (dv_of_ones(arch, 256, 256, which, causal=False) for which in (lists, replace(lists, bits=None)))
    assert right.tolist() == [0.0] * 64 + [256.0] * 128 + [0.0] * 64
    assert wrong.tolist() == [256.0] * 256


@ARCHS
def test_range_of_keys_that_forgets_where_it_begins_reads_the_bits_of_others(arch: str) -> None:
    indices = torch.tensor([0, 3], dtype=torch.int32).view(1, 1, 1, 2)
    sizes: dict[str, Any] = {"size": 64, "width": 128, "rows": 256, "num_keys": 256, "num_rows": 256}
    bits = model.tile_bits(indices, size=64, num_keys=256)
    lists = model.transposed_lists(bits, 1, Keys(causal=False), **sizes, blocks=range(1, 2))
    right, wrong = (dv_of_ones(arch, 256, 128, lists, causal=False, first_key=first) for first in (128, 0))
    assert right.tolist() == [0.0] * 64 + [256.0] * 64
    assert wrong.tolist() == [256.0] * 64 + [0.0] * 64


@ARCHS
def test_rows_and_blocks_without_each_other_get_zero(arch: str) -> None:
    q, k, v = make_qkv(512, heads=1, kv_heads=1, dim=4)
    forward = Lists.planted([[], [1, 2, 3]], [[], []], rows=256, width=128)
    lists = Lists.planted([[], [1], [1], [1]], [[], [], [], []], rows=256, width=128)
    out, lse = model.selected(arch, q, k, v, forward, causal=False, scale=0.5)
    assert bool((lse[..., :256] == -math.inf).all())
    got = empty_gradients(q, k, v, out, torch.randn_like(out), lse)
    model.selected_backward(arch, got, lists, causal=False, scale=0.5)
    assert not got.dq[:, :256].any()
    assert not got.dk[:, :128].any()
    assert not got.dv[:, :128].any()
    for gradient in (got.dq[:, 256:], got.dk[:, 128:], got.dv[:, 128:]):
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


# The model against FA4


Door = Callable[[Gradients, Any], None]
"""Fills in gradients by lists."""


def assert_predicted(
    given: Gradients, lists: Lists, door: Door, predict: Door, name: str, *, arch: str = "sm_90"
) -> None:
    """FA4's gradients are what the model predicts, to the accuracy of bf16."""
    inputs = given.q, given.k, given.v, given.o, given.do
    got, exact, low = (
        empty_gradients(*(x.to(dtype) for x in inputs), given.lse)
        for dtype in (torch.bfloat16, torch.float64, torch.bfloat16)
    )
    with gpu(arch) as device:
        door(got, on_device(lists, device))
    for gradients in (exact, low):
        predict(gradients, lists)
    for which in ("dq", "dk", "dv"):
        values = (getattr(gradients, which) for gradients in (got, exact, low))
        assert_within_budget(*values, f"{which} of {name}")


def after_forward(q: Tensor, k: Tensor, v: Tensor, attended: tuple[Tensor, Tensor]) -> Gradients:
    """What backward takes from a forward: o and some do in bf16, lse in fp32."""
    o, lse = attended
    generator = torch.Generator().manual_seed(o.shape[1])
    do = torch.randn(o.shape, generator=generator).to(o.device)
    return empty_gradients(q, k, v, o.bfloat16(), do.bfloat16(), lse.float())


@pytest.mark.cuda
@FA4
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
        sizes: dict[str, Any] = {"size": size, "width": width, "rows": tile, "num_keys": tokens}
        exact = {**sizes, "width": math.gcd(size, width)}
        forward = model.chosen_lists(indices, 4, keys, rows_from=0, rows_to=tokens, **exact)
        how: dict[str, Any] = {"causal": causal, "scale": dim**-0.5}
        whole = after_forward(q, k, v, model.selected("sm_90", q, k, v, forward, **how))
        bits = model.tile_bits(indices, size=size, num_keys=tokens)
        for blocks in ranges(-(-tokens // width), blocks_at_once):
            some, first_row, first_key = part(whole, blocks, width, tile, causal=causal)
            lists = model.transposed_lists(
                bits, 4, keys, **sizes, num_rows=tokens, blocks=blocks, first_tile=first_row // tile
            )
            where = {**how, "first_row": first_row, "first_key": first_key}
            door, predict = fa4.selected_backward, partial(model.selected_backward, "sm_90")
            name = f"{tokens} tokens, keys from {first_key}"
            assert_predicted(some, lists, partial(door, **where), partial(predict, **where), name)


@pytest.mark.cuda
@FA4
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
        sizes: dict[str, Any] = {"width": width, "rows": rows, "num_keys": entries}
        keys = Keys(length, stride)
        how: dict[str, Any] = {"length": length, "stride": stride, "first_row": 0, "scale": dim**-0.5}
        forward = model.prefix_lists(2, 4, keys, rows_from=0, rows_to=tokens, **sizes)
        given = after_forward(q, k, v, model.compressed("sm_90", q, k, v, forward, **how))
        lists = model.transposed_prefix_lists(2, 4, keys, num_rows=tokens, **sizes)
        door, predict = fa4.compressed_backward, partial(model.compressed_backward, "sm_90")
        assert_predicted(given, lists, partial(door, **how), partial(predict, **how), f"{tokens} tokens")


def fa4_natively(gradients: Gradients, lists: Any, *, scale: float) -> None:
    fa4.differentiate(gradients, Mask(causal=True, lists=lists), scale=scale)


def fa4_unmasked(gradients: Gradients, lists: Any, *, scale: float) -> None:
    fa4.differentiate(gradients, Mask(lists=lists), scale=scale)


def model_natively(arch: str, gradients: Gradients, lists: Lists, *, scale: float, causal: bool = True) -> None:
    sizes = {"num_rows": gradients.q.shape[1], "num_keys": gradients.k.shape[1]}

    def pairs(batch: int, head: int) -> tuple[Tensor, Tensor]:
        return model.backward_pairs(arch, lists, batch, head, causal=causal, **sizes)

    model.attend_backward(gradients, pairs, scale)


model_unmasked = partial(model_natively, causal=False)


@executed_masked("mask_mod", "nothing", "native causality")
@NOISY
@pytest.mark.interpreted
@pytest.mark.cuda_extra
@pytest.mark.parametrize("dim", [128, *cases.rest(64)])
@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize("name", MALFORMED)
def test_fa4_does_with_malformed_lists_what_the_model_predicts(
    name: str, rows: int, masked: str, dim: int, arch: str
) -> None:
    """Tiles of 256 rows end behind the last one."""
    tiles = -(-300 // rows)
    kinds = [[[tile for tile in listed if tile < tiles] for listed in lists] for lists in MALFORMED[name]]
    lists = Lists.planted(*kinds, rows=rows, width=128)
    q, k, v = low_precision_qkv(300, dim, heads=1, kv_heads=1, batch=1, device="cuda" if arch == "sm_90" else "cpu")
    given = after_forward(q, k, v, model.attend(q, k, v, lambda *_: torch.ones(300, 300), dim**-0.5))
    door: Door
    predict: Door
    if masked == "native causality":  # no door uses it with lists
        door, predict = partial(fa4_natively, scale=dim**-0.5), partial(model_natively, arch, scale=dim**-0.5)
    elif masked == "mask_mod":  # entries end 30 tokens before their rows at the earliest
        how: dict[str, Any] = {"length": 31, "stride": 1, "first_row": 0, "scale": dim**-0.5}
        door, predict = partial(fa4.compressed_backward, **how), partial(model.compressed_backward, arch, **how)
    else:  # nor does one leave out the mask_mod
        door, predict = partial(fa4_unmasked, scale=dim**-0.5), partial(model_unmasked, arch, scale=dim**-0.5)
    assert_predicted(given, lists, door, predict, name, arch=arch)


# The kernels that build lists against their twins


@pytest.mark.cuda
@NOISY
@CAUSAL
@pytest.mark.parametrize("tile", [128, 512])
@pytest.mark.parametrize(("size", "width"), [(64, 64), (64, 128), (192, 64), (192, 128), (256, 128)], ids=str)
def test_kernel_lists_tiles_that_chose_blocks(size: int, width: int, tile: int, causal: bool) -> None:
    from cute_kernels.lists import kv_to_query, query_to_kv

    for number, tokens in enumerate([*TOKENS, 6000]):  # the last has more tiles than a word has bits
        batch, select_heads, group = [(1, 1, 1), (2, 2, 1), (1, 2, 4), (3, 1, 2)][number % 4]
        shape = batch, select_heads, -(-tokens // tile)
        indices = random_blocks(shape, -(-tokens // size), 1 + number * 7 % 40, seed=number)
        expected = model.tile_bits(indices, size=size, num_keys=tokens)
        bits = kv_to_query.tile_bits(indices.cuda(), size=size, num_keys=tokens, entries=False)
        assert torch.equal(bits.cpu(), expected)
        sizes: dict[str, Any] = {"size": size, "width": width, "rows": tile, "num_keys": tokens, "num_rows": tokens}
        heads = select_heads * group
        for blocks in ranges(-(-tokens // width), 3 * (number % 2)):
            first_tile = blocks.start * width // tile if causal else 0
            where: dict[str, Any] = {**sizes, "blocks": blocks, "first_tile": first_tile}
            got = kv_to_query.transposed_lists(bits, heads, query_to_kv.Keys(causal=causal), **where)
            assert_same_lists(got, model.transposed_lists(expected, heads, Keys(causal=causal), **where))


@pytest.mark.cuda
@NOISY
@CAUSAL
@pytest.mark.parametrize(("length", "stride"), COMPRESSIONS, ids=str)
def test_kernel_lists_tiles_that_chose_entries(length: int, stride: int, causal: bool) -> None:
    from cute_kernels.lists import kv_to_query, query_to_kv

    for tokens in (128, 257, 1000):
        entries = NSAConfig(compress_block_size=length, compress_stride=stride).num_compressed(tokens)
        for width, rows in ((64, 128), (128, 256)):
            blocks = -(-entries // width)
            indices = random_blocks((2, 3, -(-tokens // rows)), blocks, 2, seed=tokens)
            expected = model.tile_bits(indices, size=width, num_keys=entries)
            bits = kv_to_query.tile_bits(indices.cuda(), size=width, num_keys=entries, entries=True)
            assert torch.equal(bits.cpu(), expected)
            sizes: dict[str, Any] = {"size": width, "width": width, "rows": rows, "num_keys": entries}
            sizes |= {"num_rows": tokens, "blocks": range(blocks)}
            got = kv_to_query.transposed_lists(bits, 3, query_to_kv.Keys(length, stride, causal), **sizes)
            assert_same_lists(got, model.transposed_lists(expected, 3, Keys(length, stride, causal), **sizes))


@pytest.mark.cuda
@NOISY
@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("length", "stride"), COMPRESSIONS, ids=str)
def test_kernel_lists_tiles_that_see_entries(length: int, stride: int, width: int, rows: int) -> None:
    from cute_kernels.lists import kv_to_query, query_to_kv

    config = NSAConfig(compress_block_size=length, compress_stride=stride)
    for tokens in (128, 257, 1000):
        sizes: dict[str, Any] = {"width": width, "rows": rows, "num_keys": config.num_compressed(tokens)}
        sizes |= {"num_rows": tokens}
        keys = query_to_kv.Keys(length, stride)
        got = kv_to_query.transposed_prefix_lists(2, 3, keys, device=torch.device("cuda"), **sizes)
        assert_same_lists(got, model.transposed_prefix_lists(2, 3, Keys(length, stride), **sizes))
