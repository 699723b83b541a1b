"""Ops that need only a few tokens next to a rank's own: learned compression and neighborhood attention.

A rank fetches the tokens next to its ranges, computes on both, and autograd sends the gradients of fetched tokens back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.common.derivatives import needs_grad
from nsa.config import NSAConfig
from nsa.distributed.comm import Comm
from nsa.distributed.layout import Layout, Range
from nsa.inputs import NSAInputs
from nsa.neighborhood.api import neighborhood_attention
from nsa.reference import compressed_entries

# Learned compression


def compressed_shard(comm: Comm, layout: Layout, inputs: NSAInputs, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Compute k_cmp and v_cmp of the entries whose last token this rank holds, by `config.compress`; differentiable.

    Ranks agree again after `config.compress`, because it may raise on ranks with entries, and only these ranks know if
    entries need gradients: if those of one rank do, one of k_cmp and v_cmp does on every rank, else none.

    Args:
        inputs: this rank's tensors.
    """
    wanted = [_tokens_of_entries(layout, rank, config) for rank in range(comm.size)]
    k, v = _fetch_pair(comm, inputs.k, inputs.v, layout.ranges, wanted)
    pooled: list[tuple[Tensor, Tensor]] = []

    def facts() -> tuple[dict[str, object], int]:
        pooled.append(_pool_ranges(k, v, inputs, config, wanted[comm.rank]))
        has_some = bool(wanted[comm.rank]) or not any(wanted)  # if no rank has entries, all ranks agree
        return {}, int(has_some and needs_grad(*pooled[0]))

    learned = any(comm.agree("ContextParallel.nsa's compress", facts))
    k_cmp, v_cmp = pooled[0]
    if not learned:
        return k_cmp.detach(), v_cmp.detach()
    if needs_grad(k, v):
        joined: tuple[Tensor, Tensor] = _Joined.apply(k_cmp, v_cmp, k, v)
        return joined
    return (k_cmp if needs_grad(k_cmp, v_cmp) else k_cmp.detach().requires_grad_()), v_cmp


class _Joined(torch.autograd.Function):
    """Entries whose backward always reaches the rows they were pooled from, even if they do not depend on them: the
    ranks that sent these rows wait for it.
    """

    @staticmethod
    def forward(ctx: Any, k_cmp: Tensor, v_cmp: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return k_cmp.view_as(k_cmp), v_cmp.view_as(v_cmp)

    @staticmethod
    def backward(ctx: Any, dk_cmp: Tensor | None, dv_cmp: Tensor | None) -> tuple[Tensor | None, ...]:
        return dk_cmp, dv_cmp, None, None


def _pool_ranges(
    k: Tensor, v: Tensor, inputs: NSAInputs, config: NSAConfig, ranges: Sequence[Range]
) -> tuple[Tensor, Tensor]:
    """Entries of consecutive ranges of tokens with keys k and values v.

    Without ranges there are no entries, but the parameters of `compress` stay in the autograd graph with gradients of
    0.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    weights: dict[str, Any] = {}
    for name in ("w_k_compress", "w_v_compress"):  # cast once, so that gradients of all ranges are rounded once
        weight = getattr(inputs, name)
        weights[name] = None if weight is None else weight.to(wide)
    entries = []
    row, sequences = 0, k.shape[:-3].numel()
    for start, stop in ranges or [(0, 0)]:
        rows = slice(row, row := row + stop - start)
        own_k, own_v = (x[..., rows, :, :].reshape(sequences, stop - start, *x.shape[-2:]) for x in (k, v))
        found = compressed_entries(NSAInputs(own_k[:, :0], own_k, own_v, **weights), config)
        entries.append([x.reshape(*k.shape[:-3], *x.shape[1:]) for x in found])
    k_cmp, v_cmp = (torch.cat(parts, -3) for parts in zip(*entries, strict=True))
    return k_cmp, v_cmp


def _tokens_of_entries(layout: Layout, rank: int, config: NSAConfig) -> list[Range]:
    """Tokens of a rank's entries, one range per piece of a document; ranges overlap if entries do."""
    result = []
    for tokens in layout.ranges[rank]:
        for piece in layout.pieces(tokens):
            first, stop = config.num_compressed(piece.start), config.num_compressed(piece.stop)
            if first < stop:
                last = (stop - 1) * config.stride + config.compress_block_size
                result.append((piece.first + first * config.stride, piece.first + last))
    return result


# Neighborhood attention


def sharded_neighborhood_attention(
    comm: Comm, layout: Layout, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> Tensor:
    """`neighborhood_attention` of this rank's queries `[B,n,H,D]`.

    Each range of tokens is a call with the keys that its windows reach. If causal, queries continue these keys;
    otherwise the fetched tokens become zero queries, whose rows are dropped.
    """
    before, after = window_reach(**{name: options[name] for name in ("kernel_size", "dilation", "boundary", "causal")})
    wanted = layout.with_halo(before, after)
    k, v = _fetch_pair(comm, k, v, layout.ranges, wanted)
    outputs = []
    row = key = 0
    for (start, stop), (first, last) in zip(layout.ranges[comm.rank], wanted[comm.rank], strict=True):
        own_q = q[:, row : (row := row + stop - start)]
        keys = slice(key, key := key + last - first)
        left, right = start - first, last - stop
        if not options["causal"]:
            own_q = pad(own_q, [0, 0, 0, 0, left, right])
        own = neighborhood_attention(own_q, k[:, keys], v[:, keys], **options)
        outputs.append(own if options["causal"] else own[:, left : left + stop - start])
    # A rank without tokens needs a graph, too: others send it gradients
    return torch.cat(outputs, 1) if outputs else q + (k.sum() + v.sum())


def window_reach(kernel_size: int, dilation: int, boundary: str, causal: bool) -> tuple[int, int]:
    """Maximum distance that a window reaches before and after its query; a shifted one may be on one side only."""
    whole = (kernel_size - 1) * dilation
    if causal:
        return whole, 0
    if boundary == "shift":
        return whole, whole
    half = kernel_size // 2 * dilation
    return half, half


def _fetch_pair(
    comm: Comm, k: Tensor, v: Tensor, held: Sequence[list[Range]], wanted: Sequence[list[Range]]
) -> tuple[Tensor, Tensor]:
    """Fetch rows of k and v `[...,rows,heads,D]` in one message."""
    message = torch.cat([k, v], -1).movedim(-3, 0)
    fetched = comm.fetch(message, held, wanted).movedim(0, -3)
    own_k, own_v = fetched.split([k.shape[-1], v.shape[-1]], -1)
    return own_k, own_v
