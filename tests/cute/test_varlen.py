"""Packed documents, and queries that continue them: each document as it is alone, bit for bit, and against fp64.

Starts are known on the device alone (chunks of an integer `q_start` are in test_q_start.py). Interpreted, and on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import backward, forward
from nsa import NSAAux, NSAConfig, nsa, nsa_forward, nsa_forward_aux
from nsa.inputs import KEY_NAMES, NSAInputs
from tests.support.cases import rest
from tests.support.continued_packs import PACKS, TAIL, Pack, assert_each_as_alone, assert_gradients
from tests.support.cute_cases import OVERLAPPING, assert_same
from tests.support.documents import documents
from tests.support.hardware import with_kernels
from tests.support.interpreted_gpu import GPUS, interpreted_gpu

pytestmark = [pytest.mark.slow, pytest.mark.cuda_extra, pytest.mark.filterwarnings("default")]


def run(inputs: NSAInputs, config: NSAConfig) -> tuple[Tensor, NSAAux]:
    out, aux = forward.nsa(inputs, config)
    assert aux is not None
    return out, NSAAux(*aux)


@pytest.mark.parametrize(("arch", "name"), rest(*[(arch, name) for name in PACKS for arch in GPUS]))
def test_interpreted(arch: str, name: str) -> None:
    pack = PACKS[name]
    inputs, config = pack.inputs, pack.config
    with interpreted_gpu(arch):
        out, aux = assert_each_as_alone(pack, run)
        saved_out, saved = forward.nsa_saving(inputs, config, recompute=False)
        assert torch.equal(saved_out, out)
        like = forward.nsa_saved_like(inputs, config, recompute=False)
        assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in like]
        do = torch.randn_like(out)
        got = backward.nsa_backward(inputs, config, saved, do)
    assert_gradients(pack, aux, do, got)


@pytest.mark.parametrize("arch", rest(*GPUS))
def test_training_from_inside_a_tile(arch: str) -> None:
    """With a start that the host knows: rows are those of the forward alone, which takes other steps."""
    pack = replace(PACKS["sequences, inside a tile"], documents=((200, 90, 0),))
    (document,) = documents(pack.inputs, pack.config)
    with interpreted_gpu(arch):
        expected, aux = run(document.inputs, pack.config)
        out, saved = forward.nsa_saving(document.inputs, pack.config, recompute=False)
        assert torch.equal(out, expected)
        do = torch.randn_like(out)
        got = backward.nsa_backward(document.inputs, pack.config, saved, do)
    assert_gradients(pack, aux, do, got)


# On a GPU

T = 256
LENGTHS = (0, 1, T - 1, T, 0, 0, T + 1, 3000, 37, 2 * T, 2113, 0)
SEED = NSAConfig.seed(num_selected_blocks=4)
TOKEN = NSAConfig.paper(num_selected_blocks=6, window_size=200)
SPARSE = replace(OVERLAPPING, compress_block_size=16, compress_stride=8, num_cmp_selected_blocks=2)
OWN = ("k_slc", "v_slc", "k_win", "v_win")
SIZES: dict[str, Any] = {"heads": 4, "dim": 128, "v_dim": 128, "device": "cuda"}


def whole(config: NSAConfig, lengths: tuple[int, ...] = LENGTHS, **changes: Any) -> Pack:
    """Bounds of documents whose queries and keys are the same tokens."""
    return Pack(tuple((0, tokens, 0) for tokens in lengths), config, **{**SIZES, **changes})


def continued(config: NSAConfig, *parts: tuple[int, int, int], **changes: Any) -> Pack:
    return Pack(parts, config, **{**SIZES, **changes})


def many(count: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, 90, (count,), generator=torch.Generator().manual_seed(count)).tolist())


SHARED = replace(OVERLAPPING, share_heads_in_group=True)
ON_GPU = {
    "seed": whole(SEED),
    "one head a group, D=64": whole(SEED, heads=2, kv_heads=2, dim=64, v_dim=64, tensors=()),
    "D_v=64": whole(SEED, heads=2, kv_heads=2, v_dim=64),
    "overlapping, forced": whole(OVERLAPPING, heads=8, kv_heads=2, tensors=("gates",)),
    "shared": whole(SHARED, heads=8, kv_heads=2, dim=64, v_dim=64, tensors=("w_k_compress", "w_v_compress")),
    "wide blocks": whole(replace(OVERLAPPING, select_block_size=256, q_tile_size=512, num_selected_blocks=3)),
    "short blocks": whole(NSAConfig(compress_block_size=16, select_block_size=64, num_selected_blocks=3)),
    "sparse compressed": whole(SPARSE, heads=8, kv_heads=2),
    # Two blocks of entries, and a first tile that sees one of them
    "sparse compressed, all fit": whole(SPARSE, (1500, 300, 2113), heads=8, kv_heads=2),
    "own keys": whole(replace(SEED, window_size=100), tensors=OWN),
    "own window": whole(SEED, dim=64, v_dim=64, tensors=("k_win", "v_win")),
    "nothing selected": whole(NSAConfig.seed(num_selected_blocks=0, window_size=0)),
    "long blocks": whole(NSAConfig.seed(compress_block_size=256, num_selected_blocks=2)),
    "per token": whole(TOKEN, heads=8, kv_heads=2, tensors=("gates",)),
    "per token, 16 heads a group": whole(TOKEN, heads=16, dim=64, v_dim=64),
    "per token, one head a group": whole(TOKEN, heads=4, kv_heads=4),
    # With 300 FlashAttention-4's own tables, with 2500 several rounds of adding up
    "300 documents": whole(SHARED, many(300), heads=8, kv_heads=2, dim=64, v_dim=64),
    "2500 documents": whole(SHARED, many(2500), heads=8, kv_heads=2, dim=64, v_dim=64),
    "continued per token": continued(
        TOKEN, (700, 300, 0), (0, 1, 9), (5000, 1, 0), (0, 0, 70), (64, 2000, 100), heads=8, kv_heads=2
    ),
    "continued per tile": continued(SEED, (512, 300, 0), (0, 700, 5), (1024, 1, 0)),
    "continued, overlapping": continued(OVERLAPPING, (512, 300, 0), (0, 700, 5), (300, 90, 9), tensors=OWN),
    "continued, sparse compressed": continued(SPARSE, (1280, 300, 0), (300, 700, 5), kv_heads=2),
    "continued inside a tile": continued(SEED, (700, 300, 0), (0, 1, 9), (5000, 3000, 50), heads=8, kv_heads=2),
    "continued sequences": continued(
        TOKEN, (700, 300, 0), (0, 300, 700), (123, 300, 577), heads=16, dim=64, v_dim=64, sequences=True
    ),
    "continued sequences, inside a tile": continued(
        SEED, (700, 300, 0), (0, 300, 700), (123, 300, 577), kv_heads=4, sequences=True
    ),
}


def by_api(inputs: NSAInputs, config: NSAConfig) -> tuple[Tensor, NSAAux]:
    return nsa_forward_aux(**inputs.tensors(), config=config)  # type: ignore[arg-type]


def check(pack: Pack) -> None:
    out, aux = assert_each_as_alone(pack, by_api)
    inputs, config = pack.inputs, pack.config
    how: dict[str, Any] = {"config": config}
    assert torch.equal(nsa_forward(**inputs.tensors(), **how), out)
    given = {name: x for name, x in inputs.tensors().items() if x.is_floating_point() and name != "q_sum"}
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    for recompute in (False, True):
        trained = nsa(**{**inputs.tensors(), **leaves}, **how, recompute=recompute)
        assert torch.equal(trained.detach(), out)
        do = torch.randn_like(out)
        if not pack.continues:
            do[-TAIL:] = torch.nan  # of no document
        got = torch.autograd.grad(trained, list(leaves.values()), do)
        if len(pack.documents) < 100:
            assert_gradients(pack, aux, do, dict(zip(leaves, got, strict=True)))


@pytest.mark.cuda
@with_kernels("name", ON_GPU)
def test_on_a_gpu(name: str) -> None:
    check(ON_GPU[name])


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("tile", [pytest.param(tile, marks=pytest.mark.sm_90(q_tile_size=tile)) for tile in (128, 384)])
def test_tiles_of_sm_90(tile: int, dim: int) -> None:
    check(whole(replace(OVERLAPPING, q_tile_size=tile), dim=dim, v_dim=dim))


@pytest.mark.cuda
@with_kernels("name spare", ["overlapping, forced", "sparse compressed"], [-1, 0, 500])
def test_given_entries(name: str, spare: int) -> None:
    """As they were computed, with no, the same or more rows to spare, they change no bit; spare rows are not read."""
    inputs, config = ON_GPU[name].inputs, ON_GPU[name].config
    out, aux = by_api(inputs, config)
    used = sum(map(config.num_compressed, LENGTHS))
    given = {}
    for field in ("k_cmp", "v_cmp"):
        entries = getattr(aux, field)
        rows = used if spare < 0 else len(entries) + spare
        given[field] = entries.new_full((rows, *entries.shape[1:]), torch.nan)
        given[field][:used] = entries[:used]
    got, got_aux = by_api(replace(inputs, **given), config)
    assert torch.equal(got, out)
    assert torch.equal(got_aux.k_cmp[:used], aux.k_cmp[:used])


REACHED = ("seed", "one head a group, D=64", "overlapping, forced", "sparse compressed", "own keys", "per token")


@pytest.mark.cuda
@with_kernels("name value", REACHED, [3.0, math.nan, math.inf])
def test_no_document_reaches_another(name: str, value: float) -> None:
    """Neither the one before it, whose last tiles of keys may go on behind its end, nor the one behind it.

    Gradients, which FlashAttention-4 adds up in any order: up to rounding.
    """
    inputs, config = ON_GPU[name].inputs, ON_GPU[name].config
    names = [name for name in inputs.tensors() if name in ("q", *KEY_NAMES)]
    do = torch.randn(*inputs.q.shape[:-1], inputs.v.shape[-1], device="cuda", dtype=torch.bfloat16)

    def results(given: NSAInputs, do: Tensor) -> tuple[Tensor, ...]:
        leaves = {name: given.tensors()[name].detach().requires_grad_() for name in names}
        out = nsa(**{**given.tensors(), **leaves}, config=config)  # type: ignore[arg-type]
        return (out.detach(), *torch.autograd.grad(out, list(leaves.values()), do))

    before = results(inputs, do)
    for document in documents(inputs, config):
        spoilt = {name: inputs.tensors()[name].clone() for name in names}
        for x in (*spoilt.values(), other_do := do.clone()):
            x[document.rows] = value
        out, *gradients = results(replace(inputs, **spoilt), other_do)
        rest = torch.ones(sum(LENGTHS) + TAIL, dtype=torch.bool, device="cuda")
        rest[document.rows] = False
        assert torch.equal(out[rest], before[0][rest])
        assert not torch.equal(out[~rest], before[0][~rest])
        for of, old, new in zip(names, before[1:], gradients, strict=True):
            assert_same(new[rest], old[rest], f"d{of} from {document.rows}", exact=False)


@pytest.mark.cuda
@with_kernels("name", ["seed", "sparse compressed", "own keys"])
def test_a_graph_follows_the_bounds(name: str) -> None:
    inputs, config = ON_GPU[name].inputs, ON_GPU[name].config

    def call() -> Tensor:
        return nsa_forward(**inputs.tensors(), config=config)  # type: ignore[arg-type]

    torch.utils.deterministic.fill_uninitialized_memory = False
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    assert inputs.cu_seqlens is not None
    other = torch.linspace(0, sum(LENGTHS), len(LENGTHS) + 1).round().int()
    for bounds in (other, torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32)):
        inputs.cu_seqlens.copy_(bounds)
        graph.replay()
        assert torch.equal(out, call())
