"""NSA's forward in Triton: pool, attend to entries, select, attend to blocks and to the window, gate.

    nsa        the forward of a call, for inference and for tests
    forward    its steps, from which backward.py saves what it needs

Every call is a pack of documents (layout.py), in rows `[rows,heads,D]`. Everything is asynchronous; no device value is
read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ascend_kernels.nsa import gate, interval, kv_outer, selected
from ascend_kernels.nsa.interval import Interval
from ascend_kernels.nsa.layout import Pack, pack_of, rows_of
from ascend_kernels.nsa.pool import compressed, tile_means
from ascend_kernels.nsa.scores import tile_scores, token_scores
from ascend_kernels.nsa.tiling import attends_by_block
from ascend_kernels.nsa.topk import top_blocks


class Branch(NamedTuple):
    """Output `[rows,H,D_v]` and natural log-sum-exp fp32 `[H,rows]`."""

    o: Tensor
    lse: Tensor


class Results(NamedTuple):
    """The forward's results, with documents as rows."""

    out: Tensor
    cmp: Branch
    slc: Branch
    win: Branch
    k_cmp: Tensor
    v_cmp: Tensor
    indices: Tensor
    """int32 `[S,tiles,k]`."""
    gates: Tensor | None
    """`[rows,H,3]`, given or, if they were asked for, in fp32."""


def prepare(inputs: Any, config: Any) -> Pack:
    """Documents of a call that was accepted (support.py)."""
    return pack_of(
        inputs.q,
        inputs.k,
        inputs.cu_seqlens,
        inputs.cu_seqlens_k,
        inputs.q_start,
        length=config.compress_block_size,
        stride=config.stride,
        tile=config.q_tile_size,
        causal=config.causal,
    )


def branch_kv(inputs: Any, branch: str) -> tuple[Tensor, Tensor]:
    """Keys and values of branch "slc" or "win", as rows: its own, or the shared ones."""
    own = getattr(inputs, f"k_{branch}"), getattr(inputs, f"v_{branch}")
    k, v = (inputs.k, inputs.v) if own[0] is None else own
    return rows_of(k), rows_of(v)


def forward(
    inputs: Any, config: Any, pack: Pack, indices: Tensor | None = None, *, keep_gates: bool = False
) -> Results:
    """All steps. Args: indices: int32 `[S,tiles,k]` to use; None: select."""
    q, entries = rows_of(inputs.q), compressed(inputs, config, pack)
    cmp = attend_compressed(q, *entries, config, pack)
    if indices is None:
        indices = select(q, entries[0], cmp.lse, config, pack)
    slc = attend_selected(q, *branch_kv(inputs, "slc"), indices, config, pack)
    win = attend_window(q, *branch_kv(inputs, "win"), config, pack)
    gates = None if inputs.gates is None else rows_of(inputs.gates)
    weight = None if inputs.gate_proj_weight is None else inputs.gate_proj_weight.contiguous()
    out, kept = gate.forward(q, weight, gates, (cmp.o, slc.o, win.o), pack, keep=keep_gates)
    return Results(out, cmp, slc, win, *entries, indices, kept if gates is None else gates)


def attend_compressed(q: Tensor, k: Tensor, v: Tensor, config: Any, pack: Pack) -> Branch:
    """Attention to all visible compressed entries."""
    seen = Interval.compressed(config.compress_block_size, config.stride, config.causal)
    return Branch(*interval.forward(q, k, v, pack, seen, config.scale(q.shape[-1])))


def attend_selected(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, config: Any, pack: Pack) -> Branch:
    """Attention to the selected blocks."""
    by_block = config.token_mode and attends_by_block(q.shape[1] // k.shape[1], q.device)
    attend = kv_outer.forward if by_block else selected.forward
    how = {"size": config.select_size, "scale": config.scale(q.shape[-1]), "causal": config.causal}
    return Branch(*attend(q, k, v, indices, pack, **how))


def attend_window(q: Tensor, k: Tensor, v: Tensor, config: Any, pack: Pack) -> Branch:
    """Attention to the last tokens."""
    seen = Interval.window(config.window_size, config.causal)
    return Branch(*interval.forward(q, k, v, pack, seen, config.scale(q.shape[-1])))


def select(q: Tensor, k_cmp: Tensor, lse: Tensor, config: Any, pack: Pack) -> Tensor:
    """Selected blocks, int32 `[S,tiles,k]`. Args: lse: of the compressed branch."""
    length, stride = config.compress_block_size, config.stride
    if config.token_mode:
        how = {"length": length, "stride": stride, "scale": config.scale(q.shape[-1])}
        scores = token_scores(q, k_cmp, lse, pack, **how)
    else:
        means = tile_means(q, pack)
        if config.shares_heads:
            means = means.unflatten(1, (k_cmp.shape[1], -1)).sum(2)
        first = Interval.compressed(length, stride, config.causal).first
        scores = tile_scores(means, k_cmp, pack, first=first, stride=stride)
    return top_blocks(
        scores,
        pack,
        size=config.select_size,
        count=config.num_selected_blocks,
        num_init=config.num_init_blocks,
        num_local=config.num_local_blocks,
        causal=config.causal,
        mean=not config.token_mode,
        length=length,
        stride=stride,
    )


def nsa(
    inputs: Any, config: Any, *, indices: Tensor | None = None, aux: bool = True
) -> tuple[Tensor, tuple[Tensor | None, ...] | None]:
    """The whole forward for checked inputs.

    Args:
        inputs, config: nsa.inputs.NSAInputs and nsa.config.NSAConfig.
        indices: use these selections, as in NSAAux, instead of computing them.
        aux: also return the fields of NSAAux, in its order.

    Returns:
        out `[B,N,H,D_v]`, packed `[T,H,D_v]`, and the fields of NSAAux or None.
    """
    pack = prepare(inputs, config)
    if indices is not None:
        indices = indices if indices.dim() == 3 else indices.transpose(0, 1).flatten(1, 2)
        indices = indices.contiguous()
    found = forward(inputs, config, pack, indices, keep_gates=aux)
    out = found.out.view(*inputs.q.shape[:-1], found.out.shape[-1])
    return out, _aux(inputs, config, found) if aux else None


def _aux(inputs: Any, config: Any, found: Results) -> tuple[Tensor | None, ...]:
    """The fields of NSAAux."""
    branches = found.cmp, found.slc, found.win
    outputs, lses = [x.o for x in branches], [x.lse for x in branches]

    def padded(indices: Tensor) -> Tensor:
        """Room for as many tiles as starts that only the device knows may have."""
        return torch.nn.functional.pad(indices, (0, 0, 0, inputs.num_tiles(config) - indices.shape[-2]), value=-1)

    if inputs.packed:
        gates = found.gates
        if inputs.gates is not None:  # which may be anything in rows of no document
            in_document = torch.arange(len(inputs.gates), device=inputs.gates.device) < inputs.cu_seqlens[-1]
            gates = inputs.gates.where(in_document[:, None, None], 0)
        return *outputs, *lses, found.k_cmp, found.v_cmp, gates, padded(found.indices), None
    batch, tokens = inputs.q.shape[:2]

    def by_row(x: Tensor, rows: int) -> Tensor:
        return x.view(batch, rows, *x.shape[1:])

    def by_head(x: Tensor, rows: int) -> Tensor:
        return x.view(x.shape[0], batch, rows, *x.shape[2:]).transpose(0, 1)

    entries = config.num_compressed(inputs.k.shape[1])
    indices = padded(by_head(found.indices, -(-tokens // config.q_tile_size)))
    return (
        *(by_row(x, tokens) for x in outputs),
        *(by_head(x, tokens) for x in lses),
        by_row(found.k_cmp, entries),
        by_row(found.v_cmp, entries),
        None if found.gates is None else by_row(found.gates, tokens),
        indices,
        None,
    )
