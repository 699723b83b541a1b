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
from nsa.inputs import ENTRY_NAMES, KEY_NAMES, QUERY_NAMES, NSAAux, NSAInputs
from tests.support.documents import documents as one_by_one
from tests.support.loop_oracle import LoopResult


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

    tensors: dict[str, Any]
    """What `loop_oracle.nsa_document` takes; where the call continues sequences, `nsa_continued`."""
    out: Tensor
    aux: dict[str, Tensor | None]


def documents(inputs: NSAInputs, config: NSAConfig, out: Tensor, aux: NSAAux) -> Iterator[Document]:
    """The documents of a call and what it gave for them; no other entries are but 0."""
    others = aux.k_cmp.clone()
    for one in one_by_one(inputs, config, empty=True):
        own: dict[str, Any] = {
            n: x[0] if n in QUERY_NAMES + KEY_NAMES + ENTRY_NAMES else x for n, x in one.inputs.tensors().items()
        }
        own.pop("q_sum", None)
        if inputs.continues:
            q_sum = None if inputs.q_sum is None else inputs.q_sum[one.number]
            own |= {"q_start": len(own["k"]) - len(own["q"]), "q_sum": q_sum}
        parts = {n: None if x is None else one.part(n, x)[0] for n, x in aux._asdict().items()}
        one.part("k_cmp", others).zero_()
        yield Document(own, one.part("out", out)[0], parts)
    assert not others.any()


@st.composite
def cuts(draw: st.DrawFn, inputs: NSAInputs, config: NSAConfig, *, tensor: bool) -> NSAInputs:
    """Some queries of each sequence or document of a call: what the call with q_start, q_sum and all keys is given.

    Args:
        tensor: q_start as a tensor; else an integer, for all sequences, or of packed documents None.
    """
    packed, q = inputs.packed, inputs.q
    bounds = inputs.cu_seqlens.tolist() if inputs.cu_seqlens is not None else []
    lengths = [stop - start for start, stop in pairwise(bounds)] if packed else [q.shape[1]] * q.shape[0]
    rows = draw(st.integers(0, lengths[0])) if lengths and not packed else 0
    starts, counts = [], []
    for i, length in enumerate(lengths):
        if packed:
            rows = draw(st.integers(0, length))
        same = i > 0 and not packed and not tensor
        bottom_right = packed and not tensor
        starts.append(starts[0] if same else length - rows if bottom_right else draw(st.integers(0, length - rows)))
        counts.append(rows)
    size, sums, chosen = config.q_tile_size, [], []
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        own = q[slice(*bounds[b : b + 2])] if packed else q[b]
        sums.append(own[start // size * size : start].sum(0))
        first = start + (bounds[b] if packed else 0)
        chosen.append(slice(first, first + count))

    def cut(x: Tensor) -> Tensor:
        if packed:
            return torch.cat([x[:0], *(x[part] for part in chosen), x[bounds[-1] :]])
        return torch.stack([x[b, part] for b, part in enumerate(chosen)]) if chosen else x

    changed: dict[str, Any] = {"q": cut(q)}
    if inputs.gates is not None:
        changed["gates"] = cut(inputs.gates)
    if packed:
        changed |= {
            "cu_seqlens": torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            "cu_seqlens_k": inputs.cu_seqlens,
        }
    if size > 1:
        changed["q_sum"] = torch.stack(sums) if sums else q.new_zeros(0, *q.shape[-2:])
    if tensor:
        changed["q_start"] = torch.tensor(starts, dtype=torch.int32)
    elif not packed:
        changed["q_start"] = starts[0] if starts else 0
    return replace(inputs, **changed)
