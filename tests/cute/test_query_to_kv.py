"""Block lists for FA4: a model of how FA4 reads them, against the oracle and against FA4; the kernels that build them.

The model (fa4_model.py) proves lists of any sizes in fp64. It is itself held against FA4 with lists that are wrong, for
sm_90 on a GPU and for sm_100 interpreted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nsa.reference as reference
from cute_kernels.fa4 import interface as fa4
from nsa import NSAConfig
from nsa.inputs import NSAAux
from tests.support import cases
from tests.support import fa4_model as model
from tests.support.fa4_cases import (
    ARCHS,
    CAUSAL,
    COMPRESSIONS,
    NOISY,
    RULES,
    TILES,
    TOKENS,
    assert_same_lists,
    chunk,
    chunks_of,
    executed_masked,
    gpu,
    low_precision_qkv,
    on_device,
    random_blocks,
)
from tests.support.fa4_model import Keys, Lists
from tests.support.hardware import FA4
from tests.support.helpers import EXP2_ERROR, assert_within_budget, make_inputs, make_qkv


def assert_branch(got: tuple[Tensor, Tensor], aux: NSAAux, branch: str, start: int, stop: int) -> None:
    o, lse = getattr(aux, f"o_{branch}"), getattr(aux, f"lse_{branch}")
    torch.testing.assert_close(got[0], o[:, start:stop], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got[1], lse[..., start:stop], rtol=1e-12, atol=1e-12)


# Lists, read as FA4 reads them, give what the oracle gives


@ARCHS
@CAUSAL
@settings(max_examples=25)
@given(
    tokens=st.sampled_from(TOKENS) | st.integers(1, 700),
    tile=st.sampled_from(TILES),
    size=st.sampled_from([64, 128, 192]),
    count=st.integers(1, 9),
    group=st.sampled_from([1, 2, 3]),
    shared=st.booleans(),
    first=st.integers(0, 7),
    last=st.integers(0, 7),
    seed=st.integers(0, 2**31),
)
def test_selected_branch(
    arch: str,
    causal: bool,
    tokens: int,
    tile: int,
    size: int,
    count: int,
    group: int,
    shared: bool,
    first: int,
    last: int,
    seed: int,
) -> None:
    tile = max(tile, RULES[arch].rows)
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
    inputs = make_inputs(tokens, heads=2 * group, kv_heads=2, dim=4, v_dim=3, seed=seed)
    select_heads = 2 if shared else 2 * group
    indices = random_blocks((1, select_heads, -(-tokens // tile)), -(-keys // size), count, seed)
    _, aux = reference.nsa(inputs, config, indices=indices)
    lists = model.chosen_lists(
        indices[:, :, start // tile : -(-stop // tile)],
        2 * group,
        Keys(causal=causal),
        size=size,
        width=RULES[arch].width(size),
        rows=tile,
        num_keys=keys,
        rows_from=start,
        rows_to=stop,
    )
    q, k, v = inputs.q[:, start:stop], inputs.k[:, :keys], inputs.v[:, :keys]
    got = model.selected(arch, q, k, v, lists, causal=causal, scale=config.scale(q.shape[-1]))
    assert_branch(got, aux, "slc", start, stop)


@ARCHS
@settings(max_examples=25)
@given(
    tokens=st.sampled_from(TOKENS) | st.integers(1, 700),
    compression=st.sampled_from(COMPRESSIONS),
    group=st.sampled_from([1, 2, 3]),
    first=st.integers(0, 7),
    last=st.integers(0, 7),
    seed=st.integers(0, 2**31),
)
def test_compressed_branch(
    arch: str, tokens: int, compression: tuple[int, int], group: int, first: int, last: int, seed: int
) -> None:
    length, stride = compression
    start, stop = chunk(tokens, RULES[arch].rows, first, last)
    config = NSAConfig(compress_block_size=length, compress_stride=stride, num_selected_blocks=0, window_size=0)
    inputs = make_inputs(tokens, heads=2 * group, kv_heads=2, dim=4, v_dim=3, seed=seed)
    _, aux = reference.nsa(inputs, config)
    entries = config.num_compressed(stop)
    if entries == 0:
        assert not aux.o_cmp[:, start:stop].any()
        return
    lists = model.prefix_lists(
        1,
        2 * group,
        Keys(length, stride),
        width=RULES[arch].widths[0],
        rows=RULES[arch].rows,
        num_keys=entries,
        rows_from=start,
        rows_to=stop,
    )
    q, k, v = inputs.q[:, start:stop], aux.k_cmp[:, :entries], aux.v_cmp[:, :entries]
    scale = config.scale(q.shape[-1])
    got = model.compressed(arch, q, k, v, lists, length=length, stride=stride, first_row=start, scale=scale)
    assert_branch(got, aux, "cmp", start, stop)


@ARCHS
@CAUSAL
@settings(max_examples=25)
@given(
    tokens=st.sampled_from(TOKENS) | st.integers(1, 700),
    tile=st.sampled_from(TILES),
    compression=st.sampled_from(COMPRESSIONS),
    width=st.sampled_from([64, 128]),
    more=st.integers(0, 3),
    group=st.sampled_from([1, 2, 3]),
    first=st.integers(0, 7),
    last=st.integers(0, 7),
    seed=st.integers(0, 2**31),
)
def test_chosen_blocks_of_the_compressed_branch(
    arch: str,
    causal: bool,
    tokens: int,
    tile: int,
    compression: tuple[int, int],
    width: int,
    more: int,
    group: int,
    first: int,
    last: int,
    seed: int,
) -> None:
    tile, width = max(tile, RULES[arch].rows), max(width, RULES[arch].backward_widths[-1])
    start, stop = chunk(tokens, tile, first, last)
    length, stride = compression
    config = NSAConfig(
        compress_block_size=length,
        compress_stride=stride,
        num_selected_blocks=0,
        window_size=0,
        q_tile_size=tile,
        n_block_size=width,
        causal=causal,
    )
    config = replace(config, num_cmp_selected_blocks=max(1, config._forced_cmp_blocks()) + more)
    inputs = make_inputs(tokens, heads=2 * group, kv_heads=2, dim=4, v_dim=3, seed=seed)
    entries = config.num_compressed(tokens)
    tiles, blocks = -(-tokens // tile), -(-entries // width)
    cmp_indices = random_blocks((1, 2 * group, tiles), blocks, config.num_cmp_selected_blocks or 0, seed)
    nothing = torch.empty((1, 2 * group, tiles, 0), dtype=torch.int32)
    _, aux = reference.nsa(inputs, config, indices=nothing, cmp_indices=cmp_indices)
    if entries == 0:
        assert not aux.o_cmp.any()
        return
    lists = model.chosen_lists(
        cmp_indices[:, :, start // tile : -(-stop // tile)],
        2 * group,
        Keys(length, stride, causal),
        size=width,
        width=width,
        rows=tile,
        num_keys=entries,
        rows_from=start,
        rows_to=stop,
    )
    if not causal:
        length, stride = 1, 0
    q, scale = inputs.q[:, start:stop], config.scale(inputs.q.shape[-1])
    got = model.compressed(
        arch, q, aux.k_cmp, aux.v_cmp, lists, length=length, stride=stride, first_row=start, scale=scale
    )
    assert_branch(got, aux, "cmp", start, stop)


# The model sees mistakes


def pairs(arch: str, lists: Lists, num_rows: int, num_keys: int, **how: Any) -> Tensor:
    return model.visible_pairs(arch, lists, 0, 0, num_rows=num_rows, num_keys=num_keys, **how)


def causal_pairs(tokens: int) -> Tensor:
    return torch.ones((tokens, tokens), dtype=torch.int64).tril()


@ARCHS
def test_right_lists_are_causal(arch: str) -> None:
    lists = Lists.planted([[0, 1], [2, 3]], [[], [0, 1]], rows=256, width=128)
    assert torch.equal(pairs(arch, lists, 512, 512, causal=True), causal_pairs(512))


def test_diagonal_blocks_among_full_ones_show_the_future_on_sm_100() -> None:
    lists = Lists.planted([[], []], [[0, 1], [0, 1, 2, 3]], rows=256, width=128)
    assert torch.equal(pairs("sm_90", lists, 512, 512, causal=True), causal_pairs(512))
    too_many = pairs("sm_100", lists, 512, 512, causal=True) - causal_pairs(512)
    # Blocks 1 and 3 come first and are masked
    assert too_many[:128, :128].equal(torch.ones(128, 128, dtype=torch.int64).triu(1))
    assert too_many[256:384, 256:384].equal(torch.ones(128, 128, dtype=torch.int64).triu(1))
    assert int(too_many.sum()) == 2 * (128 * 127 // 2)


def test_future_blocks_among_full_ones_show_the_future_on_sm_100() -> None:
    lists = Lists.planted([[0, 1], [2, 3]], [[2, 3], [0, 1]], rows=256, width=128)
    assert torch.equal(pairs("sm_90", lists, 512, 512, causal=True), causal_pairs(512))
    too_many = pairs("sm_100", lists, 512, 512, causal=True) - causal_pairs(512)
    assert bool((too_many[:256, 256:384] == 1).all())
    assert int(too_many.sum()) == 256 * 128


@ARCHS
def test_a_mask_mod_does_not_reach_full_blocks_and_replaces_causality(arch: str) -> None:
    half = Lists.planted([[0]], [[1]], rows=256, width=128)

    def even(row: Tensor, key: Tensor) -> Tensor:
        return (row + key) % 2 == 0

    got = pairs(arch, half, 256, 256, mask_mod=even, causal=True)
    position = torch.arange(128)
    assert torch.equal(got[:128, :128], even(position[:, None], position).long())
    assert bool((got[:, 128:] == 1).all())


@ARCHS
@pytest.mark.parametrize("kind", ["mask", "full"])
def test_ragged_block_that_is_not_visited_first_reads_behind_the_keys(arch: str, kind: str) -> None:
    q, k, v = make_qkv(300, heads=1, kv_heads=1, dim=4)

    def run(blocks: list[int]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        nothing: list[list[int]] = [[], []]
        masks, fulls = ([blocks] * 2, nothing) if kind == "mask" else (nothing, [blocks] * 2)
        lists = Lists.planted(masks, fulls, rows=256, width=128)
        results = model.selected(arch, q, k, v, lists, causal=False, scale=0.5)
        return pairs(arch, lists, 300, 300), results

    right, (o, lse) = run([0, 1, 2])
    assert not right[:, 300:].any()
    assert bool((right[:, :300] == 1).all())
    wrong, (wrong_o, wrong_lse) = run([2, 1, 0])
    assert bool((wrong == 1).all())
    assert wrong.shape == (300, 384)
    # 84 logits of 0 more
    torch.testing.assert_close(wrong_lse, torch.log(torch.exp(lse) + 84))
    torch.testing.assert_close(wrong_o, o * torch.exp(lse - wrong_lse).transpose(1, 2)[..., None])


def test_native_causality_hides_the_wrong_order_from_masked_blocks() -> None:
    """Why the order must be tested without causality too: rows do not see behind themselves."""
    lists = Lists.planted([[2, 1, 0]] * 2, [[]] * 2, rows=256, width=128)
    for arch in RULES:
        got = pairs(arch, lists, 300, 300, causal=True)
        assert torch.equal(got[:, :300], causal_pairs(300))
        assert not got[:, 300:].any()


@ARCHS
def test_each_list_masks_its_own_end(arch: str) -> None:
    got = pairs(arch, Lists.planted([[0, 2]], [[1, 2]], rows=256, width=128), 256, 300)
    assert not got[:, 300:].any()
    assert bool((got[:, 256:300] == 2).all())


@ARCHS
def test_block_listed_twice_counts_twice(arch: str) -> None:
    q, k, v = make_qkv(256, heads=1, kv_heads=1, dim=4)
    lists = Lists.planted([[0]], [[0, 1]], rows=256, width=128)
    got = pairs(arch, lists, 256, 256)
    assert bool((got[:, :128] == 2).all())
    assert bool((got[:, 128:] == 1).all())
    o, lse = model.selected(arch, q, k, v, lists, causal=False, scale=0.5)
    keys, values = (torch.cat([x[0, :128, 0], x[0, :, 0]]) for x in (k, v))
    logits = q[0, :, 0] @ keys.T * 0.5
    torch.testing.assert_close(o[0, :, 0], torch.softmax(logits, -1) @ values)
    torch.testing.assert_close(lse[0, 0], torch.logsumexp(logits, -1))


@ARCHS
def test_rows_without_blocks_give_zero(arch: str) -> None:
    q, k, v = make_qkv(512, heads=1, kv_heads=1, dim=4)
    lists = Lists.planted([[], [1]], [[], []], rows=256, width=128)
    o, lse = model.selected(arch, q, k, v, lists, causal=False, scale=0.5)
    assert not o[:, :256].any()
    assert bool((lse[..., :256] == -math.inf).all())
    assert bool(torch.isfinite(lse[..., 256:]).all())


@pytest.mark.parametrize(
    ("arch", "rows", "width", "tiles", "message"),
    [
        ("sm_80", 128, 128, 2, "arch"),
        ("sm_90", 192, 128, 2, "128 rows"),
        ("sm_100", 128, 128, 2, "256 rows"),
        ("sm_90", 128, 256, 2, "smaller multiple of 16"),
        ("sm_90", 128, 72, 2, "smaller multiple of 16"),
        ("sm_100", 256, 32, 1, "multiple of 64 keys"),
        ("sm_90", 128, 128, 1, "2 tiles"),
    ],
)
def test_what_fa4_does_not_take_is_refused(arch: str, rows: int, width: int, tiles: int, message: str) -> None:
    lists = Lists.planted([[0]] * tiles, [[]] * tiles, rows=rows, width=width)
    with pytest.raises(ValueError, match=message):
        pairs(arch, lists, 256, 256)


def test_negative_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        pairs("sm_90", Lists.planted([[-1, 0]], [[]], rows=128, width=128), 128, 128)


MALFORMED: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "ragged mask block not processed first": ([[2, 1], [2, 0], [2]], [[], [], []]),
    "ragged full block not processed first": ([[], [], []], [[2, 1], [2, 0], [2, 1, 0]]),
    "ragged block in both lists": ([[0, 2], [2], []], [[1, 2], [2, 0], [2]]),
    "listed twice": ([[1, 1], [0, 0, 2], []], [[0], [0, 1], [1, 1, 1]]),
    "diagonal and future blocks in full": ([[], [0], []], [[0, 1, 2], [0, 1, 2], [0, 1, 2]]),
    "a tile without blocks": ([[], [1], [0]], [[], [], [0, 2]]),
}
"""For blocks of 128 keys and tiles of 128 rows, 300 of either; for tiles of 256, the first two lists of either kind."""


def test_malformed_lists_are_wrong() -> None:
    """All but the last two give wrong results without any mask, so FA4 agreeing with the model there says something."""
    for name, (masks, fulls) in list(MALFORMED.items())[:4]:
        got = pairs("sm_90", Lists.planted(masks, fulls, rows=128, width=128), 300, 300)
        assert bool(got[:, 300:].any()) or int(got.max()) > 1, name


# The model against FA4


def assert_predicted(
    got: tuple[Tensor, Tensor | None], predict: Callable[..., tuple[Tensor, Tensor]], name: str, *, slack: float = 0
) -> None:
    """FA4's results are what the model predicts, to the accuracy of bf16. Args: `slack`, of lse."""
    (o, lse), (low_o, low_lse) = predict(dtype=torch.float64), predict(dtype=torch.bfloat16)
    got_o, got_lse = got
    assert got_lse is not None
    assert_within_budget(got_o, o, low_o, f"o of {name}")
    empty = lse == -math.inf
    assert torch.equal(got_lse == -math.inf, empty), f"rows without keys of {name}"
    finite = ~empty
    assert_within_budget(got_lse[finite], lse[finite], low_lse[finite], f"lse of {name}", slack=slack)


@pytest.mark.cuda
@FA4
@NOISY
@CAUSAL
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("tile", "size", "width"),
    [(128, 64, 64), (256, 64, 64), (256, 192, 64), (512, 128, 128)],
    ids=str,
)
def test_fa4_selects_what_the_model_predicts(dim: int, tile: int, size: int, width: int, causal: bool) -> None:
    for tokens in (63, 257, 700):
        q, k, v = low_precision_qkv(tokens, dim)
        indices = random_blocks((2, 2, -(-tokens // tile)), -(-tokens // size), 5, seed=tokens)
        sizes = {"num_keys": tokens, "rows_from": 0, "rows_to": tokens}
        lists = model.chosen_lists(indices, 4, Keys(causal=causal), size=size, width=width, rows=tile, **sizes)
        how: dict[str, Any] = {"causal": causal, "scale": dim**-0.5}
        got = fa4.selected(q, k, v, on_device(lists), **how)
        assert_predicted(got, partial(model.selected, "sm_90", q, k, v, lists, **how), f"{tokens} tokens")


@pytest.mark.cuda
@FA4
@NOISY
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("length", "stride"), COMPRESSIONS[::2], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(128, 128), (256, 128), (128, 64)], ids=str)
def test_fa4_compresses_what_the_model_predicts(dim: int, length: int, stride: int, rows: int, width: int) -> None:
    for tokens in (257, 700):
        config = NSAConfig(compress_block_size=length, compress_stride=stride)
        entries = config.num_compressed(tokens)
        q, *_ = low_precision_qkv(tokens, dim)
        _, k, v = low_precision_qkv(entries, dim)
        sizes = {"num_keys": entries, "rows_from": 0, "rows_to": tokens}
        lists = model.prefix_lists(2, 4, Keys(length, stride), width=width, rows=rows, **sizes)
        how: dict[str, Any] = {"length": length, "stride": stride, "first_row": 0, "scale": dim**-0.5}
        got = fa4.compressed(q, k, v, on_device(lists), **how)
        assert_predicted(got, partial(model.compressed, "sm_90", q, k, v, lists, **how), f"{tokens} tokens")


@executed_masked("mask_mod", "nothing", "causal")
@NOISY
@pytest.mark.interpreted
@pytest.mark.cuda_extra
@pytest.mark.parametrize("dim", [128, *cases.rest(64)])
@pytest.mark.parametrize("name", MALFORMED)
def test_fa4_does_with_malformed_lists_what_the_model_predicts(name: str, masked: str, dim: int, arch: str) -> None:
    rows = RULES[arch].rows
    masks, fulls = (lists[: -(-300 // rows)] for lists in MALFORMED[name])
    lists = Lists.planted(masks, fulls, rows=rows, width=128)
    how: dict[str, Any] = {"scale": dim**-0.5}
    if masked == "mask_mod":  # entries end 30 tokens before their rows at the earliest
        how |= {"length": 31, "stride": 1, "first_row": 0}
        door, predict = fa4.compressed, model.compressed
    else:
        how |= {"causal": masked == "causal"}
        door, predict = fa4.selected, model.selected  # type: ignore[assignment]
    with gpu(arch) as device:
        q, k, v = low_precision_qkv(300, dim, heads=1, kv_heads=1, batch=1, device=device)
        got = door(q, k, v, on_device(lists, device), **how)
    assert_predicted(
        got, partial(predict, arch, q, k, v, lists, **how), name, slack=EXP2_ERROR if arch == "sm_100" else 0
    )


# The kernels that build lists against their twins


@pytest.mark.cuda
@NOISY
@CAUSAL
@pytest.mark.parametrize("tile", [128, 512])
@pytest.mark.parametrize(("size", "width"), [(64, 64), (192, 64), (256, 128)], ids=str)
def test_kernel_lists_chosen_blocks_of_tokens(size: int, width: int, tile: int, causal: bool) -> None:
    from cute_kernels.lists import query_to_kv

    for number, tokens in enumerate([*TOKENS, 3000]):
        batch, select_heads, group = [(1, 1, 1), (2, 2, 1), (1, 2, 4), (3, 1, 2)][number % 4]
        for start, stop in chunks_of(tokens, tile):
            keys = stop if causal else tokens
            tiles = -(-(stop - start) // tile)
            count = 1 + number * 7 % 40
            indices = random_blocks((batch, select_heads, tiles), -(-keys // size), count, seed=number)
            how: dict[str, Any] = {"size": size, "width": width, "rows": tile, "num_keys": keys}
            how |= {"rows_from": start, "rows_to": stop}
            heads = select_heads * group
            kernel_keys = query_to_kv.Keys(causal=causal)
            got = query_to_kv.chosen_lists(indices.cuda(), heads, kernel_keys, entries=False, **how)
            assert_same_lists(got, model.chosen_lists(indices, heads, Keys(causal=causal), **how))


@pytest.mark.cuda
@NOISY
@CAUSAL
@pytest.mark.parametrize(("tile", "width"), [(128, 64), (128, 128), (512, 128)], ids=str)
@pytest.mark.parametrize(("length", "stride"), COMPRESSIONS[:5], ids=str)
def test_kernel_lists_chosen_blocks_of_entries(length: int, stride: int, width: int, tile: int, causal: bool) -> None:
    from cute_kernels.lists import query_to_kv

    config = NSAConfig(compress_block_size=length, compress_stride=stride)
    for number, tokens in enumerate((128, 257, 1000)):
        entries = config.num_compressed(tokens)
        for start, stop in chunks_of(tokens, tile):
            tiles, blocks = -(-(stop - start) // tile), -(-entries // width)
            indices = random_blocks((1, 2, tiles), blocks, 1 + number * 3, seed=number)
            how: dict[str, Any] = {"size": width, "width": width, "rows": tile, "num_keys": entries}
            how |= {"rows_from": start, "rows_to": stop}
            kernel_keys = query_to_kv.Keys(length, stride, causal)
            got = query_to_kv.chosen_lists(indices.cuda(), 2, kernel_keys, entries=True, **how)
            assert_same_lists(got, model.chosen_lists(indices, 2, Keys(length, stride, causal), **how))


@pytest.mark.cuda
@NOISY
@pytest.mark.parametrize("rows", [128, 256])
@pytest.mark.parametrize(("length", "stride"), COMPRESSIONS, ids=str)
def test_kernel_lists_visible_entries(length: int, stride: int, rows: int) -> None:
    from cute_kernels.lists import query_to_kv

    config = NSAConfig(compress_block_size=length, compress_stride=stride)
    for tokens in (128, 257, 1000):
        for start, stop in chunks_of(tokens, rows):
            how: dict[str, Any] = {"width": 128, "rows": rows, "num_keys": config.num_compressed(stop)}
            how |= {"rows_from": start, "rows_to": stop}
            device = torch.device("cuda")
            got = query_to_kv.prefix_lists(2, 3, query_to_kv.Keys(length, stride), device=device, **how)
            assert_same_lists(got, model.prefix_lists(2, 3, Keys(length, stride), **how))
