"""Drawn calls of NSA, their documents one by one, and agreement with the loop oracle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from nsa import NSAConfig
from nsa.inputs import NSAAux, NSAInputs
from tests.support.loop_oracle import PER_COMPRESSED, PER_TOKEN, LoopResult


@st.composite
def configs(draw: st.DrawFn) -> NSAConfig:
    length = draw(st.integers(1, 9))
    tile = draw(st.sampled_from([1, 1, 2, 5, 8, 16, 100]))
    selected = draw(st.integers(0, 8))
    init = draw(st.integers(0, selected))
    options: dict[str, Any] = {
        "compress_block_size": length,
        "compress_stride": draw(st.none() | st.integers(1, length)),
        "select_block_size": draw(st.none() | st.integers(1, 12)),
        "num_selected_blocks": selected,
        "window_size": draw(st.sampled_from([0, 1, 2, 7, 30, 1000])),
        "q_tile_size": tile,
        "share_heads_in_group": draw(st.booleans()),
        "num_init_blocks": init,
        "num_local_blocks": draw(st.integers(0, selected - init)),
        "causal": draw(st.booleans()),
        "softmax_scale": draw(st.none() | st.sampled_from([0.1, 2.0])),
        "n_block_size": draw(st.integers(1, 4)),
    }
    config = NSAConfig(**options)
    if tile > 1 and draw(st.booleans()):
        fewest = max(1, config._forced_cmp_blocks())
        config = replace(config, num_cmp_selected_blocks=fewest + draw(st.integers(0, 3)))
    return config


@st.composite
def cases(draw: st.DrawFn, packed: bool, batches: Sequence[int] = (1,)) -> tuple[NSAInputs, NSAConfig]:
    """Inputs in fp64 that fit their config; `batches` are the sizes to draw from where they are not packed."""
    config = draw(configs())
    batch = draw(st.sampled_from(batches))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 8]))
    dim, v_dim = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 5, 17, 30]), min_size=0, max_size=4)) if packed else []
    tail = draw(st.integers(0, 3)) if packed else 0
    tokens = sum(lengths) + tail if packed else draw(st.integers(0, 60))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    lead = (tokens,) if packed else (batch, tokens)
    tensors = {
        "q": normal(*lead, kv_heads * group, dim),
        "k": normal(*lead, kv_heads, dim),
        "v": normal(*lead, kv_heads, v_dim),
    }
    compression = draw(st.sampled_from(["mean", "mean", "projected", "given", "callable", "pair"]))
    if compression == "projected":
        tensors |= {"w_k_compress": normal(kv_heads, dim, dim), "w_v_compress": normal(kv_heads, v_dim, v_dim)}
    elif compression == "given":
        entries = sum(map(config.num_compressed, lengths)) if packed else config.num_compressed(tokens)
        cmp_lead = (entries,) if packed else (batch, entries)
        tensors |= {"k_cmp": normal(*cmp_lead, kv_heads, dim), "v_cmp": normal(*cmp_lead, kv_heads, v_dim)}
    elif compression == "callable":
        config = replace(config, compress=last_of_block)
    elif compression == "pair":
        config = replace(config, compress=(last_of_block, largest_of_block))
    for branch in ("slc", "win"):
        if draw(st.booleans()):
            tensors |= {f"k_{branch}": normal(*lead, kv_heads, dim), f"v_{branch}": normal(*lead, kv_heads, v_dim)}
    gate = draw(st.sampled_from(["third", "given", "projected"]))
    if gate == "given":
        tensors["gates"] = normal(*lead, kv_heads * group, 3)
    elif gate == "projected":
        tensors["gate_proj_weight"] = normal(kv_heads * group, 3, dim)
    if packed:
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        tensors["cu_seqlens"] = bounds
    return NSAInputs(**tensors), config


def last_of_block(blocks: Tensor) -> Tensor:
    return blocks[..., -1, :]


def largest_of_block(blocks: Tensor) -> Tensor:
    return blocks.amax(-2)


def assert_agrees(out: Tensor, aux: Any, loop: LoopResult, config: NSAConfig) -> None:
    """One document's results, without batch dim, against the loops' to 1e-12."""
    for name in ("o_cmp", "o_slc", "o_win", "lse_cmp", "lse_slc", "lse_win", "k_cmp", "v_cmp", "gates"):
        torch.testing.assert_close(
            aux[name], getattr(loop, name), rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    torch.testing.assert_close(out, loop.out, rtol=1e-12, atol=1e-12)
    assert_same_blocks(aux["indices"], loop.indices, config.num_selected_blocks)
    if loop.cmp_indices is None:
        assert aux["cmp_indices"] is None
    else:
        assert_same_blocks(aux["cmp_indices"], loop.cmp_indices, config.num_cmp_selected_blocks)


def assert_same_blocks(indices: Tensor, expected: list[list[set[int]]], width: int | None) -> None:
    assert indices.dtype == torch.int32
    assert indices.shape[-1] == width
    for head, tiles in zip(indices.tolist(), expected, strict=True):
        for row, blocks in zip(head, tiles, strict=True):
            assert row == [*sorted(blocks), *[-1] * (len(row) - len(blocks))]


@dataclass(frozen=True)
class Document:
    """One document's share of a call, without batch dim."""

    tensors: dict[str, Tensor]
    """What `loop_oracle.nsa_document` takes."""
    out: Tensor
    aux: dict[str, Tensor | None]


def documents(inputs: NSAInputs, config: NSAConfig, out: Tensor, aux: NSAAux) -> Iterator[Document]:
    """The documents of a call and what it gave for them."""
    tensors = inputs.tensors()
    per_token = ("q", "k", "v", *PER_TOKEN)
    if inputs.cu_seqlens is None:
        for b in range(inputs.q.shape[0]):
            own = {n: t[b] if n in (*per_token, *PER_COMPRESSED) else t for n, t in tensors.items()}
            yield Document(own, out[b], {n: None if t is None else t[b] for n, t in aux._asdict().items()})
        return
    del tensors["cu_seqlens"]
    entry = tile = 0
    for start, stop in pairwise(inputs.cu_seqlens.tolist()):
        rows = slice(start, stop)
        entries = slice(entry, entry := entry + config.num_compressed(stop - start))
        tiles = slice(tile, tile := tile + -(-(stop - start) // config.q_tile_size))
        parts = dict.fromkeys(per_token, rows) | dict.fromkeys(PER_COMPRESSED, entries)
        one: dict[str, Tensor | None] = {n: getattr(aux, n)[rows] for n in ("o_cmp", "o_slc", "o_win", "gates")}
        one |= {n: getattr(aux, n)[:, rows] for n in ("lse_cmp", "lse_slc", "lse_win")}
        one |= {n: getattr(aux, n)[entries] for n in PER_COMPRESSED}
        one["indices"] = aux.indices[:, tiles]
        one["cmp_indices"] = None if aux.cmp_indices is None else aux.cmp_indices[:, tiles]
        yield Document({n: t[parts[n]] if n in parts else t for n, t in tensors.items()}, out[rows], one)
