"""PyTorch twins of the kernels of NSA's forward, so that its steps can be run and checked on a CPU, for sequences.

`install` puts them where cute_kernels.forward calls kernels; everything between the calls is real. Which blocks a tile
or a token selects is computed from the scores of nsa.reference.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import forward, plan
from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4 import rules as fa4_rules
from cute_kernels.fa4.rules import Rules
from cute_kernels.gate.forward import Gating
from cute_kernels.lists.query_to_kv import Keys
from cute_kernels.pool import compress
from cute_kernels.select.topk import Blocks
from nsa import NSAConfig, reference
from tests.support import backward_twins, kv_outer_twins
from tests.support import fa4_model as model


def install(patch: pytest.MonkeyPatch, arch: str, rules: Rules, config: NSAConfig) -> None:
    """Args: `config`: of the calls, which the selection of blocks is told by reference."""
    patch.setattr(fa4_rules, "rules", lambda _: rules)
    patch.setattr(fa4, "compressed", partial(compressed, arch))
    patch.setattr(fa4, "selected", partial(selected, arch))
    patch.setattr(fa4, "window", window)
    patch.setattr(compress, "block_means", backward_twins.block_means)
    patch.setattr(forward, "tile_means", tile_means)
    patch.setattr(forward, "tile_topk", partial(tile_topk, config))
    patch.setattr(forward, "token_topk", token_topk)
    patch.setattr(forward, "kv_outer_forward", token_attention)
    patch.setattr(forward, "query_outer_forward", token_attention)
    patch.setattr(forward, "gated_sum", gated_sum)
    patch.setattr(plan, "chosen_lists", chosen_lists)
    patch.setattr(forward, "prefix_lists", prefix_lists)


# Pooling and selection


def tile_means(q: Tensor, tile: int, documents: None) -> Tensor:
    return torch.stack([part.mean(1) for part in q.split(tile, 1)], 1) if q.shape[1] else q


def tile_topk(
    config: NSAConfig,
    means: Tensor,
    k_cmp: Tensor,
    blocks: Blocks,
    *,
    keys: Keys,
    tile: int,
    tokens: int,
    start: int,
    documents: None,
) -> Tensor:
    tiles = start // tile + torch.arange(means.shape[1])
    rows = tiles[:, None] * tile + torch.arange(tile)
    logits = means.transpose(1, 2) @ k_cmp.repeat_interleave(means.shape[2] // k_cmp.shape[2], 2).permute(0, 2, 3, 1)
    scored = reference.block_end(torch.arange(k_cmp.shape[1]), config) <= reference._last_token(rows, tokens)[:, None]
    scores = logits * config.scale(means.shape[-1])
    if blocks.length != config.compress_block_size:  # of entries, not of tokens
        found = reference.select_cmp_blocks(scores, scored, rows, blocks.count, config)
    else:
        found = reference.select(scores, scored, rows, tokens, means.shape[2], config)
    return torch.nn.functional.pad(found, [0, blocks.count - found.shape[-1]], value=-1).int()


def token_topk(q: Tensor, k_cmp: Tensor, lse: Tensor, config: NSAConfig, *, start: int, documents: None) -> Tensor:
    rows, kv_heads = start + torch.arange(q.shape[1])[:, None], k_cmp.shape[2]
    tokens = start + q.shape[1]
    scores, scored = reference.score(q.transpose(1, 2), k_cmp.transpose(1, 2), rows, tokens, config)
    assert lse.shape == scores.shape[:3]
    found = reference.select(scores, scored, rows, tokens, kv_heads, config)
    return torch.nn.functional.pad(found, [0, config.num_selected_blocks - found.shape[-1]], value=-1).int()


# Lists


def chosen_lists(
    indices: Tensor, heads: int, keys: Keys, *, entries: bool, documents: None, **sizes: int
) -> model.Lists:
    assert entries == (keys.length > 1 or keys.stride > 1)
    return model.chosen_lists(indices, heads, backward_twins.keys_of_model(keys), **sizes)


def prefix_lists(
    batch: int, heads: int, keys: Keys, *, device: torch.device, documents: None, **sizes: int
) -> model.Lists:
    return model.prefix_lists(batch, heads, backward_twins.keys_of_model(keys), **sizes)


# Attention


def compressed(
    arch: str, q: Tensor, k: Tensor, v: Tensor, lists: model.Lists, *, lse: bool, shifts: None, **how: Any
) -> tuple[Tensor, Tensor | None]:
    o, sums = model.compressed(arch, q, k, v, lists, **how)
    return o, sums if lse else None


def selected(
    arch: str, q: Tensor, k: Tensor, v: Tensor, lists: model.Lists, *, lse: bool, shifts: None, **how: Any
) -> tuple[Tensor, Tensor | None]:
    o, sums = model.selected(arch, q, k, v, lists, **how)
    return o, sums if lse else None


def window(
    q: Tensor, k: Tensor, v: Tensor, *, left: int, right: int, scale: float, lse: bool
) -> tuple[Tensor, Tensor | None]:
    row = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1])
    assert max(left, right) + k.shape[1] < 2**31, "FlashAttention-4 adds them in int32"
    pairs = (key >= row - left) & (key <= row + right)
    o, sums = model.attend(q, k, v, lambda *_: pairs.int(), scale)
    return o, sums if lse else None


def token_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    size: int,
    scale: float,
    first_token: int,
    packed: None = None,
    init: int = 0,
    local: int = 0,
    gating: Gating | None = None,
    window: None = None,
) -> tuple[Tensor, Tensor]:
    """Token mode's selected branch, which reads no key behind the last token."""
    tokens, group = first_token + q.shape[1], q.shape[2] // k.shape[2]
    assert k.shape[1] >= tokens
    row, blocks = torch.arange(first_token, tokens)[:, None], -(-tokens // size)
    kept = indices.long().where((indices >= 0) & (indices < blocks), blocks)
    chosen = torch.zeros((*indices.shape[:3], blocks + 1), dtype=torch.bool).scatter_(3, kept, True)[..., :blocks]
    for forced in (torch.arange(blocks) < init, (row // size - torch.arange(blocks)).clamp(min=-1) < local):
        held = (forced & (torch.arange(blocks) <= row // size)).expand_as(chosen)
        assert bool(chosen[held].all()), "forced blocks are selected"
    pairs = chosen.repeat_interleave(size, 3)[..., :tokens] & (torch.arange(tokens) <= row)
    o, lse = model.attend(q, k[:, :tokens], v[:, :tokens], lambda b, h: pairs[b, h // group].int(), scale)
    if gating is None:
        return o, lse
    assert gating.out.shape == o.shape
    gated_sum(
        gating.o_cmp, o, gating.o_win, gating.out, q=q, gate_proj_weight=gating.gate_proj_weight, gates=gating.gates
    )
    if gating.o_slc is not None:
        gating.o_slc.copy_(o)
    return (gating.out if gating.o_slc is None else gating.o_slc), lse


def gated_sum(
    o_cmp: Tensor,
    o_slc: Tensor,
    o_win: Tensor,
    out: Tensor,
    *,
    q: Tensor,
    gate_proj_weight: Tensor | None,
    gates: Tensor | None,
    rows: None = None,
) -> Tensor | None:
    if gate_proj_weight is not None and gates is None:
        gates = torch.empty((*q.shape[:3], 3))
    kv_outer_twins.gated_sum(q, gate_proj_weight, gates, None, o_cmp, o_slc, o_win, out)
    return gates
