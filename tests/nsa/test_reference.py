"""nsa.reference against the loop oracle, and the properties that agreement alone does not show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import nsa.reference as reference
from bench import oracles
from nsa import NSAAux, NSAConfig, nsa, nsa_forward, nsa_forward_aux
from nsa.inputs import KEY_NAMES, NSAInputs
from nsa.reference import compressed_entries
from tests.support.cases import product, rest
from tests.support.causality import assert_causal
from tests.support.helpers import SMALL, assert_rounded_once, make_inputs, make_qkv
from tests.support.live_memory import PeakBytes
from tests.support.loop_oracle import nsa_continued, nsa_document
from tests.support.reference_cases import assert_agrees, assert_same_blocks, cases, cuts, documents

# Agreement of two independent implementations


@settings(max_examples=150)
@given(st.booleans(), st.booleans(), st.data())
def test_agrees_with_the_loops(packed: bool, cut: bool, data: st.DataObject) -> None:
    """Sequences or packed documents, whole or continued by some queries; and the shapes of meta tensors."""
    inputs, config = data.draw(cases(packed, batches=(1, 1, 2)).filter(lambda case: case[1].causal or not cut))
    if cut:
        inputs = data.draw(cuts(inputs, config, tensor=data.draw(st.booleans())))
    inputs.check(config)
    out, aux = reference.nsa(inputs, config)
    token = tile = 0
    for document in documents(inputs, config, out, aux):
        loop = (nsa_continued if inputs.continues else nsa_document)(config=config, **document.tensors)
        assert_agrees(document.out, document.aux, loop, config)
        token, tile = token + len(document.out), tile + len(loop.indices[0])
    if packed:
        lengths = inputs.key_bounds.diff().tolist()
        entry = sum(map(config.num_compressed, lengths))
        ends = (1 + inputs.continues) * len(lengths) * (config.q_tile_size - 1)
        assert aux.indices.shape[1] == (len(out) + ends) // config.q_tile_size
        assert not out[token:].any(), "rows past the last document"
        assert (aux.lse_cmp[:, token:] == -math.inf).all()
        assert (aux.indices[:, tile:] == -1).all()
        assert not aux.k_cmp[entry:].any()
    elif isinstance(inputs.q_start, Tensor):
        assert aux.indices.shape[2] == (out.shape[1] + 2 * (config.q_tile_size - 1)) // config.q_tile_size
        assert aux.k_cmp.shape[1] == config.num_compressed(inputs.k.shape[1])
    on_meta = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in vars(inputs).items()}
    shapes, aux_shapes = nsa_forward_aux(**on_meta, config=config)
    for empty, result in zip((shapes, *aux_shapes), (out, *aux), strict=True):
        assert (empty is None) == (result is None)
        assert empty is None or (empty.shape, empty.dtype, empty.device.type) == (result.shape, result.dtype, "meta")


# Rules that random inputs rarely reach


def test_ties_go_to_the_lower_block() -> None:
    q, k, v = make_qkv(64, heads=2, kv_heads=1)
    k = k[:, :1].expand_as(k).contiguous()  # every block scores the same
    for config in (SMALL["seed"], SMALL["paper"]):
        config = replace(config, num_init_blocks=0, num_local_blocks=0)
        _, aux = nsa_forward_aux(q, k, v, config=config)
        assert aux.indices[0, 0, -1].tolist() == list(range(config.num_selected_blocks))


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_the_same_entries_tie_exactly(seed: int) -> None:
    """Select blocks that only the same scored entries cover have equal scores, whatever the order of summation."""
    config = NSAConfig(
        compress_block_size=5,
        compress_stride=1,
        select_block_size=1,
        num_selected_blocks=5,
        num_local_blocks=1,
        window_size=0,
        q_tile_size=8,
    )
    q, k, v = make_qkv(9, 1, 1, 3, seed=seed)
    _, aux = nsa_forward_aux(q, k, v, config=config)
    assert_same_blocks(aux.indices[0], nsa_document(q[0], k[0], v[0], config).indices, 5)


@pytest.mark.parametrize(("name", "causal"), product(SMALL, [True, False]))
def test_chunks_do_not_change_the_result(name: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(SMALL[name], causal=causal)
    inputs = make_inputs(130, requires_grad=True)
    out, aux = reference.nsa(inputs, config)
    grads = torch.autograd.grad(out.square().sum(), (inputs.q, inputs.k, inputs.v))
    monkeypatch.setitem(reference.CHUNK_BYTES, "cpu", 0)  # one tile at a time
    chunked, chunked_aux = reference.nsa(inputs, config)
    chunked_grads = torch.autograd.grad(chunked.square().sum(), (inputs.q, inputs.k, inputs.v))
    torch.testing.assert_close(chunked, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(chunked_grads, grads, rtol=1e-12, atol=1e-12)
    assert torch.equal(chunked_aux.indices, aux.indices)


@pytest.mark.parametrize("name", SMALL)
def test_given_selection_is_used(name: str) -> None:
    config = SMALL[name]
    inputs = make_inputs(100)
    out, aux = reference.nsa(inputs, config)
    again, aux_again = reference.nsa(inputs, config, indices=aux.indices, cmp_indices=aux.cmp_indices)
    assert torch.equal(again, out)
    assert torch.equal(aux_again.indices, aux.indices)
    other = torch.where(aux.indices > 0, aux.indices - 1, aux.indices)  # one block to the left: another result
    assert not torch.equal(reference.nsa(inputs, config, indices=other)[1].o_slc, aux.o_slc)


@pytest.mark.parametrize("name", SMALL)
def test_sampled_tiles_equal_the_whole(name: str) -> None:
    config = SMALL[name]
    inputs = make_inputs(100)
    out, aux = reference.nsa(inputs, config)
    last = -(-100 // config.q_tile_size) - 1
    tiles = torch.tensor([0, 2, last])
    chosen = {"indices": aux.indices[:, :, tiles]}
    if aux.cmp_indices is not None:
        chosen["cmp_indices"] = aux.cmp_indices[:, :, tiles]
    for fixed in ({}, chosen):
        sample, rows = reference.nsa_tiles(inputs, config, tiles, **fixed)
        assert len(rows) < 100
        torch.testing.assert_close(sample, out[:, rows], rtol=1e-13, atol=1e-13)


def test_fewest_blocks_of_entries_that_a_tile_needs() -> None:
    """The rule in closed form, against counting over all tiles of a period."""
    for length, tile, width in itertools.product(range(1, 7), range(2, 12), range(1, 5)):
        for stride in range(1, length + 1):
            counts = []
            for t in range(length // tile + 1, length // tile + 1 + stride * width):
                first = -((length - 1 - t * tile) // stride)
                last = (t * tile + tile - length) // stride
                counts.append(last // width - first // width + 1 if last >= first else 0)
            config = NSAConfig(compress_block_size=length, compress_stride=stride, q_tile_size=tile, n_block_size=width)
            assert config._forced_cmp_blocks() == max(counts)


# Queries that continue a sequence

CAUSAL_BATCHES = cases(packed=False, batches=(1, 2, 3)).filter(lambda case: case[1].causal)


@settings(max_examples=25)
@given(CAUSAL_BATCHES, st.data())
def test_gradients_of_chunks_add_up(case: tuple[NSAInputs, NSAConfig], data: st.DataObject) -> None:
    """dq is the chunks' own, every other gradient the sum of their shares."""
    whole, config = case
    assume(whole.q.shape[1] > 0)
    config = replace(config, compress="mean") if whole.k_cmp is not None else config
    tokens, size = whole.q.shape[1], config.q_tile_size
    inner = data.draw(st.lists(st.integers(0, tokens // size), max_size=3))
    bounds = [0, *sorted(size * tile for tile in inner), tokens]
    leaves = whole.map(lambda tensor: tensor.clone().requires_grad_())
    named = {name: tensor for name, tensor in leaves.tensors().items() if tensor.requires_grad}
    do = torch.randn(*whole.q.shape[:-1], whole.v.shape[-1], dtype=torch.float64)

    def gradients(start: int, stop: int, **first: int) -> dict[str, Tensor]:
        """Gradients of queries start ... stop-1 with all keys."""
        gates = None if leaves.gates is None else leaves.gates[:, start:stop]
        out, _ = reference.nsa(replace(leaves, q=leaves.q[:, start:stop], gates=gates, **first), config, aux=False)
        found = torch.autograd.grad(out, list(named.values()), do[:, start:stop], materialize_grads=True)
        return dict(zip(named, found, strict=True))

    expected = gradients(0, tokens)
    shares = [gradients(a, b, q_start=a) for a, b in pairwise(bounds)]
    for name in named:
        total = sum(share[name] for share in shares)
        torch.testing.assert_close(total, expected[name], rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    for (a, b), share in zip(pairwise(bounds), shares, strict=True):
        for name in KEY_NAMES:
            assert name not in share or not share[name][:, b:].any(), f"{name} past the last query"
        outside = torch.cat([share["q"][:, :a], share["q"][:, b:]], 1)
        assert not outside.any()


@pytest.mark.parametrize("name", SMALL)
def test_as_many_queries_as_keys_is_the_same_call(name: str) -> None:
    config, qkv = SMALL[name], make_qkv(75)
    out = nsa(*qkv, config=config)
    sums = {} if config.token_mode else {"q_sum": torch.full((1, 4, 16), math.nan, dtype=torch.float64)}
    assert torch.equal(nsa(*qkv, config=config, q_start=0, **sums), out)  # a sum of no queries is not read
    longer = [torch.cat([x, torch.full_like(x, math.nan)], 1) for x in qkv[1:]]
    assert torch.equal(nsa(qkv[0], *longer, config=config, q_start=0), out)


@pytest.mark.parametrize("name", SMALL)
def test_the_default_aligns_the_last_query_with_the_last_key(name: str) -> None:
    config, (q, k, v) = SMALL[name], make_qkv(80)
    for rows in (0, 16, 32):
        out = nsa(q[:, 80 - rows :], k, v, config=config)
        for start in (80 - rows, torch.tensor([80 - rows], dtype=torch.int32)):
            assert torch.equal(out, nsa(q[:, 80 - rows :], k, v, config=config, q_start=start))


def test_autocast_leaves_the_sum_in_fp32() -> None:
    q, k, v = make_qkv(40, dtype=torch.float32)
    q_sum = q[:, 16:20].sum(1)
    with torch.autocast("cpu", torch.bfloat16):
        out = nsa(q[:, 20:], k, v, q_sum=q_sum, config=SMALL["seed"])
    low = [x.bfloat16() for x in (q[:, 20:], k, v)]
    assert torch.equal(out, nsa(*low, q_sum=q_sum, config=SMALL["seed"]))


def test_a_tensor_of_starts_takes_more_blocks_than_there_are() -> None:
    """Without memory for them."""
    q, k, v = torch.randn(1, 20, 4, 8), torch.randn(1, 20, 2, 8), torch.randn(1, 20, 2, 8)
    start = torch.tensor([16], dtype=torch.int32)
    for name, config in SMALL.items():
        got, expected = (
            nsa(q[:, 16:], k, v, q_start=start, config=replace(config, num_selected_blocks=count))
            for count in (2**31 - 1, 20)
        )
        assert torch.equal(got, expected), name


# Causality

CAUSAL = {
    **SMALL,
    "seed, overlapping blocks": replace(SMALL["seed"], compress_stride=3, select_block_size=5),
    "paper, no forced blocks": replace(SMALL["paper"], num_init_blocks=0, num_local_blocks=0),
    "tiles of 7": replace(SMALL["seed"], q_tile_size=7, share_heads_in_group=True, num_local_blocks=2),
}


@pytest.mark.parametrize(("name", "dtype"), product(CAUSAL, [torch.float64, torch.bfloat16]))
def test_nothing_depends_on_later_tokens(name: str, dtype: torch.dtype) -> None:
    config = CAUSAL[name]

    def run(q: Tensor, k: Tensor, v: Tensor, **fixed: Tensor | None) -> tuple[Tensor, NSAAux]:
        return reference.nsa(NSAInputs(q, k, v), config, **fixed)

    assert_causal(run, make_qkv(75, dtype=dtype), config, range(0, 75, 2))


# Gradients


@pytest.mark.parametrize(("name", "gate"), product(SMALL, ["given", "projected"]))
def test_gradcheck(name: str, gate: str) -> None:
    """Everything differentiable, with the selection fixed (it is not differentiated, and must not jump under eps)."""
    cmp_blocks = None if SMALL[name].num_cmp_selected_blocks is None else 5
    small = {"compress_block_size": 4, "compress_stride": 2, "select_block_size": 4}
    config = replace(SMALL[name], **small, num_cmp_selected_blocks=cmp_blocks)
    tokens, heads, kv_heads, dim, v_dim = 21, 2, 1, 3, 2
    q, k, v = make_qkv(tokens, heads, kv_heads, dim, v_dim)
    shapes = {
        "w_k_compress": (kv_heads, dim, dim),
        "w_v_compress": (kv_heads, v_dim, v_dim),
        "k_slc": k.shape,
        "v_slc": v.shape,
        "k_win": k.shape,
        "v_win": v.shape,
    }
    shapes["gates" if gate == "given" else "gate_proj_weight"] = (
        (1, tokens, heads, 3) if gate == "given" else (heads, 3, dim)
    )
    tensors = {"q": q, "k": k, "v": v} | {n: torch.randn(s, dtype=torch.float64) for n, s in shapes.items()}
    for tensor in tensors.values():
        tensor.requires_grad_()
    _, aux = reference.nsa(NSAInputs(**tensors), config)

    def run(*values: Tensor) -> Tensor:
        inputs = NSAInputs(**dict(zip(tensors, values, strict=True)))
        return reference.nsa(inputs, config, indices=aux.indices, cmp_indices=aux.cmp_indices)[0]

    assert torch.autograd.gradcheck(run, tuple(tensors.values()), fast_mode=True)


def test_backward_recomputes_chunks_instead_of_keeping_them() -> None:
    """What is kept for backward grows with N, not with the keys that each query sees."""
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    inputs = make_inputs(1024, dtype=torch.float32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        reference.nsa(inputs, NSAConfig.paper(window_size=256))
    assert kept < 30 * inputs.q.numel()  # one branch's probabilities alone are 64 times q here


# Precision, isolation, memory


@pytest.mark.parametrize(("name", "bad", "which"), product(SMALL, [math.nan, math.inf, 1.7e308], [0, 1, 2]))
def test_a_nan_reaches_no_earlier_tile_head_group_or_document(name: str, bad: float, which: int) -> None:
    """Nor does a number whose products are inf."""
    config = SMALL[name]
    q, k, v = make_qkv(120, batch=None, requires_grad=True)
    bounds = torch.tensor([0, 96, 120], dtype=torch.int32)
    clean = nsa_forward(q, k, v, cu_seqlens=bounds, config=config)
    tensors = [t.detach().clone() for t in (q, k, v)]
    at, head = 70, 0
    tensors[which][at, head] = bad
    for tensor in tensors:
        tensor.requires_grad_()
    out = nsa(*tensors, cu_seqlens=bounds, config=config)
    first_tile = at // 16 * 16  # tiles and blocks of these configs divide 16
    touched = torch.zeros_like(out, dtype=torch.bool)
    heads = slice(0, 1) if which == 0 and not config.shares_heads else slice(0, 2)
    touched[first_tile:96, heads] = True
    assert torch.isnan(out[at, 0]).any() or math.isfinite(bad)
    assert torch.equal(out.detach()[~touched], clean[~touched])
    # Backward: the bad row writes into the keys and values it saw, all of its document and head group, nothing else.
    out.sum().backward()
    for i, tensor in enumerate(tensors):
        grad = tensor.grad.clone()  # type: ignore[union-attr]
        group_heads, first = (slice(0, 2), first_tile) if i == 0 else (slice(0, 1), 0)
        grad[first:96, group_heads] = 0
        assert torch.isfinite(grad).all()


@pytest.mark.slow
@pytest.mark.parametrize("preset", [NSAConfig.per_tile, *rest(NSAConfig.paper)])
def test_8k_tokens_run_in_an_eighth_of_a_gib(preset: Callable[[], NSAConfig]) -> None:
    q, k, v = make_qkv(8192, 4, 4, 64, dtype=torch.float32)
    with PeakBytes() as memory:
        assert nsa_forward(q, k, v, config=preset()).isfinite().all()
    assert memory.peak < 2**27


@pytest.mark.parametrize(("dtype", "packed"), [(torch.bfloat16, True), (torch.float16, False)])
def test_gradients_are_rounded_once(packed: bool, dtype: torch.dtype) -> None:
    """Of keys that three branches read, and of weights that all documents share."""
    config = SMALL["paper"]
    weights = {n: torch.randn(2, 16, 16, dtype=dtype) / 4 for n in ("w_k_compress", "w_v_compress")}
    inputs = replace(make_inputs(200, dtype=dtype), **weights, gate_proj_weight=torch.randn(4, 3, 16, dtype=dtype) / 4)
    do = make_qkv(200, dtype=dtype, seed=1)[0]
    bounds = [0, 70, 71, 197] if packed else [0, 200]  # after the last document gradients are 0
    leaves = inputs.map(lambda tensor: tensor.requires_grad_())
    given = leaves.tensors()
    if packed:
        given |= {name: given[name][0] for name in "qkv"} | {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    wanted = list(leaves.tensors().values())
    got = torch.autograd.grad(nsa(**given, config=config), wanted, do[0] if packed else do)

    exact = inputs.map(lambda tensor: tensor.detach().double().requires_grad_())
    # fp64 with entries rounded as the definition says
    totals = [torch.zeros_like(tensor) for tensor in exact.tensors().values()]
    for start, stop in pairwise(bounds):
        one = replace(exact, **{name: getattr(exact, name)[:, start:stop] for name in "qkv"})
        rounded = replace(inputs, **{name: getattr(inputs, name)[:, start:stop] for name in "qkv"}).map(Tensor.detach)
        _, aux = reference.nsa(rounded, config)
        entries = {}
        for name in "kv":
            own = oracles._entries(one, config, name, torch.float64)
            entries[f"{name}_cmp"] = own + (getattr(aux, f"{name}_cmp").double() - own).detach()
        out, _ = oracles.nsa(replace(one, **entries, w_k_compress=None, w_v_compress=None), config, indices=aux.indices)
        sources = list(exact.tensors().values())  # a document shorter than a block does not use all weights
        parts = torch.autograd.grad(out, sources, do[:, start:stop].double(), materialize_grads=True)
        totals = [total + part for total, part in zip(totals, parts, strict=True)]
    for name, mine, truth in zip(exact.tensors(), got, totals, strict=True):
        assert_rounded_once(mine, truth, name)


HUGE = 2**31 - 1


@pytest.mark.parametrize(
    ("near", "far", "causal"),
    [
        ({"num_selected_blocks": 5}, {"num_selected_blocks": HUGE}, True),
        ({"window_size": 600}, {"window_size": HUGE}, False),
        ({"num_cmp_selected_blocks": 3}, {"num_cmp_selected_blocks": HUGE}, True),
        (
            {"num_cmp_selected_blocks": 1, "n_block_size": 5},
            {"num_cmp_selected_blocks": 40, "n_block_size": HUGE},
            True,
        ),
        ({"select_block_size": 300}, {"select_block_size": HUGE}, False),
    ],
    ids=["blocks", "window", "compressed", "compressed blocks", "block size"],
)
def test_options_beyond_the_document_take_no_memory(near: dict[str, int], far: dict[str, int], causal: bool) -> None:
    q, k, v = make_qkv(300, requires_grad=True)
    results, peaks = [], []
    for options in (near, far):
        config = NSAConfig(**{"q_tile_size": 64, "n_block_size": 2, "causal": causal, **options})
        with PeakBytes() as memory:
            out = nsa(q, k, v, config=config)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        peaks.append(memory.peak)
    assert peaks[1] <= 1.01 * peaks[0]  # but for small indices
    for few, many in zip(*results, strict=True):
        torch.testing.assert_close(few, many, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, 8), (torch.bfloat16, 12)])
def test_means_of_the_largest_numbers_are_finite(dtype: torch.dtype, length: int) -> None:
    """Entries and mean queries, of numbers whose sums leave fp32's range: they are those of fp64."""
    largest = torch.finfo(dtype).max
    config = NSAConfig.per_tile(compress_block_size=length, compress_stride=4, q_tile_size=20, window_size=8)
    q, k, v = (x.clamp(-3, 3) * largest / 3 for x in make_qkv(60))
    inputs = NSAInputs(*(x.to(dtype) for x in (q, k, v)))
    entries = compressed_entries(inputs, config)
    for entry, x in zip(entries, (inputs.k, inputs.v), strict=True):
        expected = torch.stack([x.double()[:, at : at + length].mean(1) for at in range(0, 61 - length, 4)], 1)
        assert entry.dtype == dtype
        torch.testing.assert_close(entry.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6 * largest)
    equal = torch.full((1, 60, 2, 16), 5e37, dtype=dtype)
    assert torch.equal(compressed_entries(NSAInputs(equal, equal, equal), config)[0], equal[:, : entries[0].shape[1]])
    # With keys of 5e37 alike and queries so small that logits are finite, every branch gives the value itself
    out = nsa(equal * 1e-38 * 1e-3, equal, equal, config=config, gates=torch.eye(3)[0].expand(1, 60, 2, 3))
    torch.testing.assert_close(out[:, length:], equal[:, length:], rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("continued", [False, True])
def test_a_tile_of_large_queries_selects_by_its_mean(continued: bool) -> None:
    """Twice as large, the queries' sum leaves fp32's range and their mean does not: blocks are the same."""
    config = NSAConfig.per_tile(
        compress_block_size=8, num_selected_blocks=3, window_size=0, q_tile_size=64, num_local_blocks=1
    )
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 256, 1, 16, generator=generator) for _ in range(2))
    q, found = q + 3 * q.mean(1, keepdim=True).sign(), []
    for size in (1.0, 2.0**121):  # powers of two change no bit of a product
        large, small = q * size, k * 2.0**-10
        given: Any = vars(config) | {"softmax_scale": 0.25 / size * 2.0**10}
        assert bool(large[:, :64].sum(1).isfinite().all()) == (size == 1)
        if continued:
            given |= {"q_start": 150, "q_sum": large[:, 128:150].sum(1)}
            large = large[:, 150:]
        found.append(nsa_forward_aux(large, small, small, **given)[1].indices)
    assert torch.equal(*found)
