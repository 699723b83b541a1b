"""Weights of fla's NSA layer load into NSAttention, which then computes what fla's naive functions do."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, pad

from nsa import NSAConfig, NSAttention, PageTable, llama_rope, rotary_table
from nsa.distributed import ContextParallel
from nsa.integrations.fla import FlaRotary, fla_config, layer_from_fla
from tests.support.cases import product

DIM, WIDTH = 16, 32


class Sizes(NamedTuple):
    """Of a case; the last block is ragged. fla's kernels want groups of 16 heads or more, its naive functions any."""

    block: int
    count: int
    window: int
    tokens: int
    heads: int = 16

    @property
    def config(self) -> NSAConfig:
        return fla_config(self.block, self.count, self.window)


SMALL = Sizes(8, 4, 20, 107)
"""Of 14 blocks 4 are selected, 3 of them forced."""
DEFAULTS = Sizes(64, 16, 512, 1100, heads=4)
"""Of 18 blocks 16."""


def fla_state(bias: bool = False, heads: int = 16) -> dict[str, Tensor]:
    sizes = {
        "q_proj": (heads * DIM, WIDTH),
        "k_proj": (DIM, WIDTH),
        "v_proj": (DIM, WIDTH),
        "g_proj": (heads * 3, WIDTH),
    }
    state = {f"{name}.weight": torch.randn(size) * 0.3 for name, size in sizes.items()}
    state["o_proj.weight"] = torch.randn(WIDTH, heads * DIM) * 0.1
    if bias:
        state |= {f"{name}.bias": torch.randn(sizes[name][0]) for name in ("q_proj", "k_proj", "v_proj")}
    return {name: x.double() for name, x in state.items()}


def by_definition(q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor, sizes: Sizes) -> list[Tensor]:
    """Compressed and selected branch `[1,N,H,D]` by fla's definition, over all pairs, for one key/value head."""
    token, block = torch.arange(sizes.tokens), torch.arange(k_cmp.shape[1])
    logits = torch.einsum("bqhd,bkd->bhqk", q, k_cmp[:, :, 0]) * DIM**-0.5
    past = (block + 1) * sizes.block - 1 <= token[:, None]
    p = logits.masked_fill(~past, -torch.inf).softmax(-1).nan_to_num()
    own = token[:, None] // sizes.block
    forced = (block == 0) | (block == own) | (block == own - 1)
    scores = torch.where(forced, 2.0, p.mean(1)[0]).masked_fill(~(past | forced), -1.0)
    chosen = torch.zeros_like(past).scatter(1, scores.topk(sizes.count).indices, True) & (past | forced)
    seen = chosen.repeat_interleave(sizes.block, 1)[:, : sizes.tokens] & (token <= token[:, None])
    weights = (torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * DIM**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    return [torch.einsum("bhqk,bkd->bqhd", p, v_cmp[:, :, 0]), torch.einsum("bhqk,bkd->bqhd", weights, v[:, :, 0])]


def by_fla(q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor, sizes: Sizes) -> list[Tensor]:
    """The same by fla-core's naive functions, which run on a CPU, in fp32; its pooling, and its window, are kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that it would use on a GPU
        from fla.ops.nsa import naive
    scale: Any = DIM**-0.5
    blocks = naive.naive_nsa_topk(q, k_cmp, sizes.count, sizes.block, scale)
    compressed, _ = naive.naive_nsa_compression(q, k_cmp, v_cmp, sizes.block, scale)
    return [compressed, naive.naive_nsa_selection(q, k, v, blocks, sizes.block, scale)]


# Sums of up to 256 numbers of size 1, in another order
ORACLES = {by_definition: 256 * 2.0**-52} | ({by_fla: 256 * 2.0**-23} if find_spec("fla") else {})
"""And how far an output may be from theirs, of its size."""


def rotated(x: Tensor, theta: float) -> Tensor:
    """`[1,N,heads,D]` in fp64: pairs of numbers, one of each half, are turned as complex ones."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * theta ** (-torch.arange(half, dtype=x.dtype) / half)
    turned = torch.complex(*(part.contiguous() for part in x.chunk(2, dim=-1))) * torch.exp(1j * angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def fla_output(x: Tensor, state: dict[str, Tensor], sizes: Sizes, oracle: Any, theta: float | None) -> Tensor:
    """What fla's layer gives for x `[1,N,WIDTH]`."""
    q, k, v = (
        linear(x, state[f"{name}.weight"], state.get(f"{name}.bias")).unflatten(-1, (-1, DIM))
        for name in ("q_proj", "k_proj", "v_proj")
    )
    if theta is not None:
        q, k = rotated(q, theta), rotated(k, theta)
    counts = torch.full((-(-sizes.tokens // sizes.block),), sizes.block)
    counts[-1] = sizes.tokens - sizes.block * (len(counts) - 1)
    room = (0, 0, 0, 0, 0, -sizes.tokens % sizes.block)
    pooled = (pad(y, room).unflatten(1, (-1, sizes.block)).sum(2) / counts[:, None, None] for y in (k, v))
    compressed, selected = oracle(q, k, v, *pooled, sizes)
    distance = torch.arange(sizes.tokens)[:, None] - torch.arange(sizes.tokens)
    logits = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * DIM**-0.5
    weights = logits.masked_fill((distance < 0) | (distance >= sizes.window), -torch.inf).softmax(-1)
    branches = [compressed, selected, torch.einsum("bhqk,bkd->bqhd", weights, v[:, :, 0])]
    gates = linear(x, state["g_proj.weight"]).unflatten(-1, (-1, 3)).sigmoid()
    out = sum(branch * gate[..., None] for branch, gate in zip(branches, gates.unbind(-1), strict=True))
    return linear(out.flatten(-2), state["o_proj.weight"])


CASES: dict[str, tuple[Sizes, bool, dict[str, Any]]] = {
    "rotary": (SMALL, False, {}),
    "biases, another theta": (SMALL, True, {"rope": 500}),
    "no rotary": (SMALL, False, {"rope": None}),
    "fla's sizes": (DEFAULTS, False, {}),
}
"""Sizes, whether there are biases, and what layer_from_fla gets."""


@pytest.mark.parametrize(("case", "oracle"), product(CASES, ORACLES), ids=lambda x: getattr(x, "__name__", x))
@torch.no_grad()
def test_the_layer_computes_what_fla_does(case: str, oracle: Any) -> None:
    sizes, bias, given = CASES[case]
    state, x = fla_state(bias, sizes.heads), torch.randn(1, sizes.tokens, WIDTH, dtype=torch.float64)
    layer = layer_from_fla(state, None if sizes is DEFAULTS else sizes.config, **given)
    assert isinstance(layer, NSAttention)
    theta = given.get("rope", 10000.0)
    expected = fla_output(x, state, sizes, oracle, theta)
    tolerance = ORACLES[oracle] * float(expected.abs().max())
    torch.testing.assert_close(layer(x), expected, atol=tolerance, rtol=0)
    if case == "rotary":  # were nothing rotated, it would show
        other = fla_output(x, state, sizes, oracle, None)
        assert float((other - expected).abs().max()) > 1000 * tolerance


@torch.no_grad()
def test_positions_are_those_of_packs_caches_and_callers() -> None:
    state, lengths = fla_state(), (40, 67)
    layer, x = layer_from_fla(state, SMALL.config), torch.randn(1, 107, WIDTH, dtype=torch.float64)
    whole = layer(x)
    table = PageTable.empty(1, 128)
    cache = layer.new_cache(table)
    parts = []
    for part in x.split((100, 1, 6), dim=1):
        with table.step(part.shape[1]):
            parts.append(layer(part, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    packed = layer(x[0], cu_seqlens=torch.tensor([0, 40, 107], dtype=torch.int32))
    alone = torch.cat([layer(part)[0] for part in x.split(lengths, dim=1)])
    torch.testing.assert_close(packed, alone)
    torch.testing.assert_close(layer(x, torch.arange(9, 116)), whole)  # only differences count
    torch.testing.assert_close(layer(x, torch.arange(9, 116)[None]), whole)
    hook = layer_from_fla(state, SMALL.config, rope=llama_rope)
    torch.testing.assert_close(hook(x, rotary_table(torch.arange(107), DIM, theta=10000.0)), whole, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"must be positions \[107\] or \[1, 107\], got shape \[106\]"):
        layer(x, torch.arange(106))


@pytest.fixture
def alone() -> Iterator[ContextParallel]:
    """Of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ContextParallel(dist.group.WORLD)  # type: ignore[arg-type]
    dist.destroy_process_group()


@torch.no_grad()
def test_a_rank_is_told_its_positions(alone: ContextParallel) -> None:
    layer, x = layer_from_fla(fla_state(), SMALL.config), torch.randn(1, 107, WIDTH, dtype=torch.float64)
    bounds = torch.tensor([0, 40, 107], dtype=torch.int32)
    whole, packed = layer(x), layer(x[0], cu_seqlens=bounds)
    layer.context_parallel = alone
    torch.testing.assert_close(layer(x, alone.positions(107)), whole)
    pack = {"position_embeddings": alone.positions(107, cu_seqlens=bounds), "cu_seqlens": bounds}
    torch.testing.assert_close(layer(x[0], **pack), packed)
    with pytest.raises(ValueError, match=r"position_embeddings must be this rank's .* positions\(N\).*, got None"):
        layer(x)


@pytest.mark.skipif(not find_spec("fla"), reason="fla-core is not installed")
def test_rotary_has_flas_tables_and_rounds_as_its_kernel_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fla.modules.rotary import RotaryEmbedding, rotary_embedding_ref
    fla, x = RotaryEmbedding(DIM, base=777.0), torch.randn(2, 50, 3, DIM).bfloat16()
    fla._update_cos_sin_cache(50, device=x.device, dtype=x.dtype)
    expected = rotary_embedding_ref(x.float(), fla._cos_cached.float(), fla._sin_cached.float(), fla.interleaved)
    torch.testing.assert_close(FlaRotary(777.0)(x), expected.to(x.dtype), rtol=0, atol=0)


def test_sizes_come_from_the_weights() -> None:
    state = fla_state()
    inv_freq = 10000.0 ** (-torch.arange(8.0) / 8)
    layer = layer_from_fla(state | {"rotary.inv_freq": inv_freq.bfloat16()})
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.hidden_size) == (16, 1, DIM, WIDTH)
    assert layer.config == fla_config(64, 16, 512)
    assert (layer.config.num_init_blocks, layer.config.num_local_blocks, layer.config.token_mode) == (1, 2, True)
    assert fla_config(window_size=None).window_size == 0
