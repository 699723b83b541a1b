"""NSA in eager PyTorch: defines what every option means; kernels are tested against it.

Any dtype from bf16 to fp64, any device, any block and tile size; differentiable by autograd. Scores, softmax and sums,
also those of gradients, run in fp32 (fp64 for fp64 inputs): each input is cast once at the start, so its gradient is
rounded once. Queries are processed in chunks of tiles, and each chunk is recomputed in backward, so memory stays far
below O(N^2). Keys of the selected and window branches are gathered, so their time is O(N). Packed inputs, and sequences
whose starts are a tensor, run in a loop, which reads `cu_seqlens` and `q_start` on the host.

Internal shapes: documents of equal length as `[B, heads, N, D]`; a chunk of n query tiles of T rows as `[B, H, n, T,
D]`. S is the number of heads that select independently: H, or H_kv if the selection is shared in the group. Queries are
the last tokens of their document; tiles and rows are counted from its first token. If positions of queries differ
between sequences, as in nsa/decoding, rows are `[B,1,n,T]` and masks also have the two leading dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, repeat
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from nsa.common.derivatives import needs_grad, round_straight_through
from nsa.common.replace import replace
from nsa.compression import pool_documents, whole_blocks
from nsa.config import BlockPooling, NSAConfig
from nsa.inputs import ENTRY_NAMES, KEY_NAMES, QUERY_NAMES, NSAAux, NSAInputs

CHUNK_BYTES = {"cpu": 32 << 20}
"""Approximate size of a chunk's temporaries by device type; a chunk has at least one tile. On a CPU, larger allocations
are not reused but mapped again each time (measured in docs/experiments.md)."""
DEFAULT_CHUNK_BYTES = 512 << 20


def chunk_bytes(device: torch.device) -> int:
    """Approximate size of a chunk's temporaries on a device."""
    return CHUNK_BYTES.get(device.type, DEFAULT_CHUNK_BYTES)


NOWHERE = torch.iinfo(torch.int64).max
"""Sentinel position that no query can attend to, for keys that do not exist."""
FAR = 1 << 24
"""Bound on distances between tokens, which are compared as fp32 numbers and exact up to here."""

MODERATE = 1e15
"""Magnitude up to which dot products over D are finite in fp32, with room for the softmax scale."""

BY_TOKEN = (*QUERY_NAMES, *KEY_NAMES)


def check(call: Any) -> str | None:
    """Reason why the dispatcher must not choose the reference for this call, or None."""
    if call.device_type == "cpu":
        return None
    if not call.named:
        return f"runs on {call.device_type} only when named: backend='reference' (eager PyTorch, slow)"
    if call.device_type == "meta":
        return "reads values, and meta tensors have none"
    if call.options.get("deterministic") and call.backward:
        return f"its backward on {call.device_type} sums with atomics, so deterministic=True cannot be kept"
    return None


def nsa(
    inputs: NSAInputs,
    config: NSAConfig,
    *,
    indices: Tensor | None = None,
    cmp_indices: Tensor | None = None,
    aux: bool = True,
) -> tuple[Tensor, NSAAux | None]:
    """Compute NSA for checked inputs.

    Args:
        indices: selected blocks to use, as in NSAAux, instead of computing them (not for packed inputs, nor with a
            tensor as q_start).
        cmp_indices: blocks of compressed entries to use, under the same conditions.
        aux: also return NSAAux.

    Returns:
        out `[B,N,H,D_v]` (packed `[T,H,D_v]`) in q's dtype, and NSAAux or None.
    """
    inputs = inputs.narrow(config)
    exact, dtype = in_sum_dtype(inputs), inputs.q.dtype
    if not inputs.packed and not isinstance(inputs.q_start, Tensor):
        out, results = _documents(exact, config, _all_tiles(exact, config), indices, cmp_indices, dtype)
        return out, _pad_selections(results, config) if aux else None
    if indices is not None or cmp_indices is not None:
        got = "cu_seqlens" if inputs.packed else "q_start as a tensor"
        raise ValueError(f"indices and cmp_indices can be given for fixed-length inputs only, got {got} too")
    return _packed(exact, config, dtype, aux=aux) if inputs.packed else _sequences(exact, config, dtype, aux=aux)


def in_sum_dtype(inputs: NSAInputs) -> NSAInputs:
    """Cast the inputs to fp32 (fp64 stays), the dtype of all arithmetic; gates, which are read once, are not cast."""
    dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    return replace(inputs.map(lambda tensor: tensor.to(dtype)), gates=inputs.gates)


def _all_tiles(inputs: NSAInputs, config: NSAConfig) -> Tensor:
    first = inputs.first_token // config.q_tile_size
    return torch.arange(first, first + inputs.num_tiles(config), device=inputs.q.device)


def _pad_selections(aux: NSAAux, config: NSAConfig) -> NSAAux:
    """Pad the selections with -1 to NSAAux's number of columns; computed ones have at most as many as there are
    blocks.
    """

    def padded(indices: Tensor, columns: int) -> Tensor:
        return pad(indices, [0, max(0, columns - indices.shape[-1])], value=-1)

    count, cmp_indices = config.num_cmp_selected_blocks, aux.cmp_indices
    if count is not None and cmp_indices is not None:
        cmp_indices = padded(cmp_indices, count)
    return aux._replace(indices=padded(aux.indices, config.num_selected_blocks), cmp_indices=cmp_indices)


def nsa_tiles(
    inputs: NSAInputs,
    config: NSAConfig,
    tiles: Tensor,
    *,
    indices: Tensor | None = None,
    cmp_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the output of some query tiles only, to check samples of sequences that are too long to compute whole.

    Args:
        tiles: indices of the tiles, int64 `[n]`, ascending. `indices` and `cmp_indices` hold these tiles only.

    Returns:
        out `[B, rows, H, D_v]` and the positions of its rows, int64 `[rows]`.
    """
    if inputs.cu_seqlens is not None:
        raise ValueError("nsa_tiles takes fixed-length inputs only, got cu_seqlens")
    if inputs.continues:
        raise ValueError("nsa_tiles takes as many queries as keys, got q_start or more keys")
    out, _ = _documents(in_sum_dtype(inputs), config, tiles, indices, cmp_indices, inputs.q.dtype)
    rows = _rows(tiles, inputs.q.shape[1], config).flatten()
    return out, rows[rows < inputs.q.shape[1]]


# Packed documents, and sequences with different starts


def _sequences(inputs: NSAInputs, config: NSAConfig, dtype: torch.dtype, *, aux: bool) -> tuple[Tensor, NSAAux | None]:
    """A batch whose q_start is a tensor: each sequence is a separate call, padded to the fixed sizes of NSAAux."""
    starts = inputs.q_start.tolist() if isinstance(inputs.q_start, Tensor) else []
    given = {n: x for n, x in inputs.tensors().items() if n in (*BY_TOKEN, *ENTRY_NAMES, "q_sum")}
    calls = []
    for b, start in enumerate(starts):
        own: dict[str, Any] = {name: tensor[b : b + 1] for name, tensor in given.items()}
        calls.append(replace(inputs, **own, q_start=start).narrow(config))
    calls = calls or [replace(inputs, q_start=None, q_sum=None)]  # B = 0: any start will do
    results = [_documents(one, config, _all_tiles(one, config), None, None, dtype) for one in calls]
    out = torch.cat([out for out, _ in results])
    if not aux:
        return out, None
    auxes = [_pad_selections(own, config) for _, own in results]

    sizes = {name: (1, inputs.num_entries(config), 0.0) for name in ENTRY_NAMES}
    sizes |= {name: (2, inputs.num_tiles(config), -1) for name in ("indices", "cmp_indices")}
    joined: dict[str, Any] = {"cmp_indices": None}
    for name in NSAAux._fields:
        tensors = [getattr(own, name) for own in auxes]
        if name in sizes and tensors[0] is not None:
            tensors = [_extend(tensor, *sizes[name]) for tensor in tensors]
        if tensors[0] is not None:
            joined[name] = torch.cat(tensors)
    return out, NSAAux(**joined)


def _extend(x: Tensor, dim: int, length: int, fill: float) -> Tensor:
    """Pad x at the end of `dim` to at least `length`."""
    missing = max(0, length - x.shape[dim])
    return torch.cat([x, x.new_full((*x.shape[:dim], missing, *x.shape[dim + 1 :]), fill)], dim)


def _packed(inputs: NSAInputs, config: NSAConfig, dtype: torch.dtype, *, aux: bool) -> tuple[Tensor, NSAAux | None]:
    num_tokens = inputs.q.shape[0]
    max_tiles, max_entries = inputs.num_tiles(config), inputs.num_entries(config)
    documents = _split_documents(inputs, config)
    results = [_documents(one, config, _all_tiles(one, config), None, None, dtype) for one in documents]
    out = torch.cat([out[0] for out, _ in results])
    out = pad(out, [0, 0, 0, 0, 0, num_tokens - out.shape[0]])
    if not aux:
        return out, None
    auxes = [_pad_selections(own, config) for _, own in results]
    if isinstance(inputs.q_start, Tensor):  # entries after the last query hold 0
        counts = _entries_of_documents(inputs, config)
        auxes[1:] = [
            own._replace(**{name: _extend(getattr(own, name), 1, count, 0.0) for name in ENTRY_NAMES})
            for own, count in zip(auxes[1:], counts, strict=True)
        ]

    def join(name: str, dim: int, length: int, fill: float) -> Tensor:
        """Concatenate the documents' tensors, without batch dim, along `dim`, and pad to `length` with `fill`."""
        tensors = [getattr(aux, name)[0] for aux in auxes]
        padding = list(tensors[0].shape)
        padding[dim] = length - sum(tensor.shape[dim] for tensor in tensors)
        return torch.cat([*tensors, tensors[0].new_full(padding, fill)], dim)

    branches = ("cmp", "slc", "win")
    outputs = {f"o_{branch}": join(f"o_{branch}", 0, num_tokens, 0.0) for branch in branches}
    lses = {f"lse_{branch}": join(f"lse_{branch}", 1, num_tokens, -math.inf) for branch in branches}
    return out, NSAAux(
        **outputs,
        **lses,
        k_cmp=join("k_cmp", 0, max_entries, 0.0),
        v_cmp=join("v_cmp", 0, max_entries, 0.0),
        gates=join("gates", 0, num_tokens, 0.0),
        indices=join("indices", 1, max_tiles, -1),
        cmp_indices=None if config.num_cmp_selected_blocks is None else join("cmp_indices", 1, max_tiles, -1),
    )


def _split_documents(inputs: NSAInputs, config: NSAConfig) -> list[NSAInputs]:
    """Split into documents, each a batch of one, after an empty one that defines the shapes of padding.

    Rows past the last document attend to nothing.
    """
    bounds, key_bounds = ([] if x is None else x.tolist() for x in (inputs.cu_seqlens, inputs.key_bounds))
    starts = inputs.q_start.tolist() if isinstance(inputs.q_start, Tensor) else [None] * (len(bounds) - 1)
    nothing = slice(0, 0)
    documents = [_slice_document(inputs, nothing, nothing, nothing)]
    first_entry = 0
    parts = zip(pairwise(bounds), pairwise(key_bounds), starts, _entries_of_documents(inputs, config), strict=True)
    for b, (rows, keys, start, count) in enumerate(parts):
        entries = slice(first_entry, first_entry := first_entry + count)
        one = _slice_document(inputs, slice(*rows), slice(*keys), entries)
        q_sum = None if inputs.q_sum is None else inputs.q_sum[b : b + 1]
        documents.append(replace(one, q_start=start, q_sum=q_sum).narrow(config))
    return documents


def _entries_of_documents(inputs: NSAInputs, config: NSAConfig) -> list[int]:
    """Number of compressed entries of each document's keys."""
    bounds = [] if inputs.key_bounds is None else inputs.key_bounds.tolist()
    return [config.num_compressed(stop - start) for start, stop in pairwise(bounds)]


def _slice_document(inputs: NSAInputs, rows: slice, keys: slice, entries: slice) -> NSAInputs:
    parts = dict.fromkeys(QUERY_NAMES, rows) | dict.fromkeys(KEY_NAMES, keys) | dict.fromkeys(ENTRY_NAMES, entries)
    own = {name: tensor[parts[name]][None] for name, tensor in inputs.tensors().items() if name in parts}
    return replace(inputs, **own, cu_seqlens=None, cu_seqlens_k=None, q_start=None, q_sum=None, max_seqlen=None)


# Documents of equal length


class KeySource(Protocol):
    """Source of the keys and values of a branch."""

    @property
    def lead(self) -> tuple[int, int]: ...

    @property
    def count(self) -> int: ...

    def gather(self, positions: Tensor) -> Keys: ...


def is_moderate(x: Tensor) -> bool:
    """True if no element is NaN, inf or beyond MODERATE."""
    return x.numel() == 0 or bool(torch.linalg.vector_norm(x.detach(), math.inf) <= MODERATE)


@dataclass(frozen=True)
class Keys:
    """Keys and values of one branch, `[B, H_kv, entries, D or D_v]`."""

    k: Tensor
    v: Tensor
    moderate: bool | None
    """True if no element of either is NaN, inf or beyond MODERATE; masked keys then need no special handling. None:
    unknown, and must not be read on the host."""

    @staticmethod
    def from_tokens(k: Tensor, v: Tensor) -> Keys:
        """Create from `[B, entries, H_kv, D or D_v]`."""
        moderate = is_moderate(k) and is_moderate(v)
        return Keys(k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous(), moderate)

    @property
    def lead(self) -> tuple[int, int]:
        """B and H_kv."""
        return self.k.shape[0], self.k.shape[1]

    @property
    def count(self) -> int:
        """Number of entries of each sequence."""
        return self.k.shape[2]

    def gather(self, positions: Tensor) -> Keys:
        """Gather entries at positions `[B,S,n,m]` as `[B,S,n,m,D]`; arbitrary for positions outside `[0, entries)`."""
        return Keys(_gather(self.k, positions), _gather(self.v, positions), self.moderate)


def _documents(
    inputs: NSAInputs,
    config: NSAConfig,
    tiles: Tensor,
    indices: Tensor | None,
    cmp_indices: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, NSAAux]:
    """Compute some tiles of a batch of documents of equal length: out, and NSAAux with unpadded selections.

    Args:
        inputs: from `in_sum_dtype`, without q_start: the queries are the last tokens.
        tiles: indices of tiles that hold queries.
        dtype: dtype of q before the cast, and of compressed entries and results.
    """
    q, num_tokens, first = inputs.q, inputs.k.shape[1], inputs.first_token
    k_cmp, v_cmp = _compress(inputs, config, dtype)
    tokens = Keys.from_tokens(inputs.k, inputs.v)
    branches = (
        Keys.from_tokens(k_cmp, v_cmp),
        tokens if inputs.k_slc is None or inputs.v_slc is None else Keys.from_tokens(inputs.k_slc, inputs.v_slc),
        tokens if inputs.k_win is None or inputs.v_win is None else Keys.from_tokens(inputs.k_win, inputs.v_win),
    )
    rows = _rows(tiles, num_tokens, config)
    positions = (rows - first).clamp(0, max(q.shape[1] - 1, 0)).flatten()
    q_tiles = q.index_select(1, positions).unflatten(1, rows.shape).movedim(3, 1)
    tile_size = min(config.q_tile_size, max(num_tokens, 1))
    size = tiles_per_chunk(q, inputs.v, num_tokens, tile_size, config)
    chunks = zip(
        q_tiles.split(size, 2),
        tiles.split(size),
        repeat(None) if indices is None else indices.long().split(size, 2),
        repeat(None) if cmp_indices is None else cmp_indices.long().split(size, 2),
        strict=False,
    )
    recompute = needs_grad(q, *(tensor for branch in branches for tensor in (branch.k, branch.v)))
    run = partial(checkpoint, _tiles, use_reentrant=False, preserve_rng_state=False) if recompute else _tiles
    by_chunk = (run(*chunk, *branches, first, inputs.q_sum, config) for chunk in chunks)
    whole = _join(by_chunk, [len(some) for some in tiles.split(size)], in_place=not recompute)
    rows = rows.flatten()
    before = int((rows < first).sum()) if inputs.continues else 0  # rows of the first tile that are not queries
    rows = rows[(rows >= first) & (rows < num_tokens)]
    present = slice(before, before + len(rows))
    o_cmp, o_slc, o_win = (o[:, :, present].transpose(1, 2) for o in whole[:3])
    lse_cmp, lse_slc, lse_win = (lse[:, :, present] for lse in whole[3:6])
    gates = branch_gates(inputs)[:, rows - first]
    g = gates.to(q.dtype)[..., None]
    out = g[..., 0, :] * o_cmp + g[..., 1, :] * o_slc + g[..., 2, :] * o_win
    aux = NSAAux(
        o_cmp=o_cmp.to(dtype),
        o_slc=o_slc.to(dtype),
        o_win=o_win.to(dtype),
        lse_cmp=lse_cmp,
        lse_slc=lse_slc,
        lse_win=lse_win,
        k_cmp=k_cmp.to(dtype),
        v_cmp=v_cmp.to(dtype),
        gates=gates,
        indices=whole[6].int(),
        cmp_indices=None if config.num_cmp_selected_blocks is None else whole[7].int(),
    )
    # Gates may have permuted strides; out must be contiguous, as in the operators' fakes.
    return out.to(dtype).contiguous(), aux


def _join(chunks: Iterable[tuple[Tensor, ...]], counts: Sequence[int], *, in_place: bool) -> list[Tensor]:
    """Join the results of consecutive chunks, whose third dim has tiles or their rows.

    In place, each is copied into a preallocated result. Otherwise small results between the large temporaries of their
    chunks fragment memory, by several GiB if a tile is a token.

    Args:
        counts: number of tiles of each chunk.
        in_place: True if no gradients are needed.
    """
    if not in_place:
        return [torch.cat(results, dim=2) for results in zip(*chunks, strict=True)]
    whole: list[Tensor] = []
    done = 0
    for results, count in zip(chunks, counts, strict=True):
        rows = [x.shape[2] // max(count, 1) for x in results]  # of a tile
        whole = whole or [
            x.new_empty((*x.shape[:2], sum(counts) * n, *x.shape[3:])) for x, n in zip(results, rows, strict=True)
        ]
        for joined, x, n in zip(whole, results, rows, strict=True):
            joined[:, :, done * n : (done + count) * n] = x
        done += count
    return whole


def tiles_per_chunk(q: Tensor, v: Tensor, num_tokens: int, tile_size: int, config: NSAConfig) -> int:
    """Number of tiles of `tile_size` rows of q `[B,N,H,D]` whose temporaries fit CHUNK_BYTES, for num_tokens keys."""
    (batch, _, heads, dim), (kv_heads, v_dim) = q.shape, v.shape[-2:]
    entries, blocks = config.num_compressed(num_tokens), _num_blocks(num_tokens, config)
    selected = min(config.num_selected_blocks, blocks) * _select_size(num_tokens, config)
    gathered = selected + _window_span(num_tokens, tile_size, config)
    select_heads = kv_heads if config.shares_heads else heads
    # The mask as bool and as numbers, if attention is fused; scores and overlap of all blocks.
    per_tile = 2 * heads * tile_size * (max(entries, gathered) + dim)
    per_tile += select_heads * gathered * (dim + v_dim) + heads * (entries + 4 * blocks)
    return max(1, chunk_bytes(q.device) // max(1, batch * per_tile * q.dtype.itemsize))


def _rows(tiles: Tensor, num_tokens: int, config: NSAConfig) -> Tensor:
    """Tokens of the tiles' rows, `[n, T]`; the first tile may begin before the queries, and the last may end after
    them.
    """
    tile_size = min(config.q_tile_size, max(num_tokens, 1))  # a short document's only tile is no longer than itself
    return tiles[:, None] * tile_size + torch.arange(tile_size, device=tiles.device)


# Step 1: compression


def with_compressed_entries(inputs: NSAInputs, config: NSAConfig) -> tuple[NSAInputs, NSAConfig]:
    """Return the same call with k_cmp and v_cmp, for backends that compress by means only."""
    k_cmp, v_cmp = compressed_entries(inputs, config)
    changed = replace(inputs, k_cmp=k_cmp, v_cmp=v_cmp, w_k_compress=None, w_v_compress=None)
    return changed, replace(config, compress="mean")


def compressed_entries(inputs: NSAInputs, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Compute k_cmp and v_cmp by `config.compress`, in the layout of NSAInputs."""
    dtype, bounds = inputs.q.dtype, inputs.key_bounds
    exact = in_sum_dtype(inputs)
    pools = zip((exact.k, exact.v), pool_functions(exact, config, dtype), strict=True)
    if bounds is None:
        k_cmp, v_cmp = (pool(whole_blocks(tensor, config)) for tensor, pool in pools)
    else:
        k_cmp, v_cmp = (pool_documents(tensor, bounds, pool, config) for tensor, pool in pools)
    return k_cmp.to(dtype), v_cmp.to(dtype)


def _compress(inputs: NSAInputs, config: NSAConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K_cmp, V_cmp `[B, N_cmp, H_kv, D or D_v]`, rounded once to `dtype`; their gradients are not rounded."""
    if inputs.k_cmp is not None and inputs.v_cmp is not None:
        return inputs.k_cmp, inputs.v_cmp
    pools = zip((inputs.k, inputs.v), pool_functions(inputs, config, dtype), strict=True)
    k_cmp, v_cmp = (round_straight_through(pool(whole_blocks(tensor, config)), dtype) for tensor, pool in pools)
    return k_cmp, v_cmp


def pool_functions(inputs: NSAInputs, config: NSAConfig, dtype: torch.dtype) -> tuple[BlockPooling, BlockPooling]:
    """Functions for k and for v from blocks `[...,H_kv,l,D]` to unrounded entries `[...,H_kv,D]`.

    A user's callable gets a copy of the blocks in `dtype`, to which it may write.
    """
    compress_k, compress_v = config.pools

    def pool(name: str, compress: str | BlockPooling, weight: Tensor | None, blocks: Tensor) -> Tensor:
        *shape, _, dim = blocks.shape
        if 0 in shape:
            return blocks.select(-2, 0) + _nothing_of(compress, weight)
        if callable(compress):
            entries = compress(blocks.to(dtype, copy=True, memory_format=torch.contiguous_format))
            if not isinstance(entries, Tensor):
                raise TypeError(f"compress must map blocks of {name} to a torch.Tensor, got {type(entries).__name__}")
            if entries.shape != (*shape, dim):
                wanted = f"compress must map blocks of {name} {list(blocks.shape)} to {[*shape, dim]}"
                raise ValueError(f"{wanted}, got {list(entries.shape)}")
            entries = entries.to(blocks.dtype)
        else:
            scale = below_inverse(blocks.shape[-2])
            entries = (blocks * scale).sum(-2) / (blocks.shape[-2] * scale)
        return entries if weight is None else torch.einsum("...hd,hde->...he", entries, weight)

    return partial(pool, "k", compress_k, inputs.w_k_compress), partial(pool, "v", compress_v, inputs.w_v_compress)


def below_inverse(count: int) -> float:
    """Largest power of two up to 1 / count: scaled by it, `count` finite numbers have a finite sum with the same bits,
    except for subnormal numbers.
    """
    return float(0.5 ** (max(count, 1) - 1).bit_length())


def _nothing_of(compress: str | BlockPooling, weight: Tensor | None) -> Tensor | float:
    """A 0 that keeps the parameters of `compress` in the graph without entries: gradients are 0, as DDP expects, not
    None.
    """
    learned: list[Tensor] = [*compress.parameters()] if isinstance(compress, torch.nn.Module) else []
    learned += [] if weight is None else [weight]
    return sum(x.flatten()[:0].sum() for x in learned)


# Steps 3 to 5, for a chunk of query tiles


def _tiles(
    q: Tensor,
    tiles: Tensor,
    indices: Tensor | None,
    cmp_indices: Tensor | None,
    compressed: Keys,
    selected: Keys,
    window: Keys,
    first: int,
    q_sum: Tensor | None,
    config: NSAConfig,
) -> tuple[Tensor, ...]:
    """Compute o and lse of the three branches, `[B,H,n*T,D_v]` and `[B,H,n*T]`, then the selections, int64.

    Args:
        q: the tiles' queries `[B,H,n,T,D]`.
        tiles: the tiles' indices `[n]`.
        indices: the tiles' selected blocks, or None to select.
        cmp_indices: the tiles' blocks of compressed entries, or None to select.
        compressed, selected, window: keys and values of the branches.
        first: the first row that is a query.
        q_sum: sum of the queries before it in its tile, `[B,H,D]`; None if it begins a tile.
    """
    num_tokens = selected.k.shape[2]
    scale = config.scale(q.shape[-1])
    rows = _rows(tiles, num_tokens, config)

    with torch.no_grad():
        count = config.num_cmp_selected_blocks
        if indices is None or (count is not None and cmp_indices is None):
            means = _mean_queries(q, rows, first, num_tokens, q_sum)
            scores, scored = score(means, compressed.k, rows, num_tokens, config)
            if count is not None and cmp_indices is None:
                cmp_indices = select_cmp_blocks(scores, scored, rows, count, config)
            if indices is None:
                indices = select(scores, scored, rows, num_tokens, compressed.k.shape[1], config)
        # At most one column for each block: padding of given selections would be gathered as keys
        indices = indices[..., : _num_blocks(num_tokens, config)]
        if cmp_indices is None:
            cmp_indices = rows.new_empty((*q.shape[:3], 0))
        cmp_indices = cmp_indices[..., : _num_cmp_blocks(compressed.k.shape[2], config)]

    results = (
        attend_compressed(q, compressed, rows, cmp_indices, scale, config),
        attend_selected(q, selected, rows, indices, scale, config),
        attend_window(q, window, rows, scale, config),
    )
    outputs = [o.flatten(2, 3) for o, _ in results]
    lses = [lse.flatten(2, 3) for _, lse in results]
    return (*outputs, *lses, indices, cmp_indices)


def block_end(entries: Tensor, config: NSAConfig) -> Tensor:
    """Last token of compressed blocks, from which on they are visible."""
    return entries * config.stride + config.compress_block_size - 1


def _last_token(rows: Tensor, num_tokens: int) -> Tensor:
    """Last token e of each tile, `[n]`."""
    return rows[..., -1].clamp(max=num_tokens - 1)


def _mean_queries(q: Tensor, rows: Tensor, first: int, num_tokens: int, q_sum: Tensor | None) -> Tensor:
    """The mean query of each tile, `[B,H,n,D]`, over all its tokens up to the last one."""
    scale = below_inverse(rows.shape[-1])
    present = ((rows >= first) & (rows < num_tokens)).to(q.dtype)[..., None] * scale
    total, count = (q * present).sum(-2), present.sum(-2)
    if q_sum is not None:
        before = (first - rows[:, :1]).clamp(min=0) * scale  # number of earlier queries, 0 except in the first tile
        total = total + torch.where(before > 0, q_sum[:, :, None] * scale, 0.0)
        count = count + before
    return total / count


def score(mean_q: Tensor, k_cmp: Tensor, rows: Tensor, num_tokens: int, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """Scores of compressed entries per tile and query head `[B,H,n,N_cmp]`, and a mask of scored entries, bool
    `[n,N_cmp]`.

    Tile mode: logits of the mean query. Token mode: probabilities, 0 for entries that are not scored.
    """
    batch, heads, n, dim = mean_q.shape
    kv_heads, num_entries = k_cmp.shape[1:3]
    logits = mean_q.reshape(batch, kv_heads, heads // kv_heads * n, dim) @ k_cmp.transpose(-1, -2) * config.scale(dim)
    logits = logits.reshape(batch, heads, n, num_entries)
    entries = torch.arange(num_entries, device=rows.device)
    if config.causal:
        scored = block_end(entries, config) <= _last_token(rows, num_tokens)[..., None]
    else:
        scored = torch.ones((n, num_entries), dtype=torch.bool, device=rows.device)
    if config.token_mode and num_entries > 0:
        logits = _softmax(logits, scored)
    return logits, scored


def _softmax(logits: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed entries of the last dim; zeros if none is allowed."""
    masked = torch.where(allowed, logits, -math.inf)
    top = masked.amax(-1, keepdim=True)
    weights = torch.exp(masked - torch.where(top == -math.inf, 0.0, top))
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)


def _select_size(num_tokens: int, config: NSAConfig) -> int:
    """l', limited to the document's length to bound temporaries; the document is then the only block."""
    return min(config.select_size, max(num_tokens, 1))


def _num_blocks(num_tokens: int, config: NSAConfig) -> int:
    """Number of select blocks of a document."""
    return -(-num_tokens // _select_size(num_tokens, config))


def _cmp_block_width(num_entries: int, config: NSAConfig) -> int:
    """n_block_size, limited to the number of entries to bound temporaries."""
    return min(config.n_block_size, max(num_entries, 1))


def _num_cmp_blocks(num_entries: int, config: NSAConfig) -> int:
    """Number of blocks of compressed entries of a document."""
    return -(-num_entries // _cmp_block_width(num_entries, config))


def select(scores: Tensor, scored: Tensor, rows: Tensor, num_tokens: int, kv_heads: int, config: NSAConfig) -> Tensor:
    """Selected blocks `[B,S,n,m]`, m at most num_selected_blocks, ascending, padded with -1 (steps 3 and 4)."""
    batch, heads, n, num_entries = scores.shape
    if config.shares_heads:
        scores = scores.reshape(batch, kv_heads, heads // kv_heads, n, num_entries).sum(2)
    size, length, stride = _select_size(num_tokens, config), config.compress_block_size, config.stride
    num_blocks = _num_blocks(num_tokens, config)
    blocks = torch.arange(num_blocks, device=rows.device)
    forced = _forced_blocks(blocks, rows, num_tokens, config)
    if num_entries == 0:
        block_scores = torch.where(forced, math.inf, scores.new_full((*scores.shape[:-1], num_blocks), -math.inf))
        return _top_blocks(block_scores, forced, config.num_selected_blocks)

    # Entries that overlap block b: j = first(b) ... first(b) + width - 1, some of them outside [0, N_cmp). Entry j goes
    # to column j % width, so that blocks of the same entries are summed in the same order and tie exactly.
    width = -(-(size + length - 1) // stride)
    first = -((length - 1 - blocks * size) // stride)[:, None]
    entries = first + (torch.arange(width, device=rows.device) - first) % width
    starts = entries * stride
    overlap = torch.minimum(starts + length, (blocks[:, None] + 1) * size) - torch.maximum(
        starts, blocks[:, None] * size
    )
    overlap = torch.where((entries >= 0) & (entries < num_entries), overlap.clamp(min=0), 0).to(scores.dtype)
    clamped = entries.clamp(0, num_entries - 1)
    weights = torch.where(scored[..., clamped], overlap, 0.0)  # [n, blocks, width]
    values = torch.where(weights > 0, scores[..., clamped], 0.0)
    total = weights.sum(-1)
    eligible = total > 0
    divisor = length if config.token_mode else torch.where(eligible, total, 1.0)[..., None]
    block_scores = (values * (weights / divisor)).sum(-1)
    block_scores = torch.where(eligible, block_scores, -math.inf)
    block_scores = torch.where(forced, math.inf, block_scores)
    return _top_blocks(block_scores, eligible | forced, config.num_selected_blocks)


def _forced_blocks(blocks: Tensor, rows: Tensor, num_tokens: int, config: NSAConfig) -> Tensor:
    """The forced blocks of each tile, bool `[n, blocks]`."""
    size, count = _select_size(num_tokens, config), config.num_local_blocks
    last_token = _last_token(rows, num_tokens)[..., None]
    last = last_token // size
    if config.causal:
        exists = blocks * size <= last_token
        first_local = last - count + 1
    else:
        exists = torch.ones_like(blocks, dtype=torch.bool)
        first_local = (rows[..., :1] // size + last + 1 - count) // 2  # as many before the tile as after it
    local = (blocks >= first_local) & (blocks < first_local + count)
    return ((blocks < config.num_init_blocks) | local) & exists


def select_cmp_blocks(scores: Tensor, scored: Tensor, rows: Tensor, count: int, config: NSAConfig) -> Tensor:
    """Selected blocks of compressed entries per tile and query head, `[B,H,n,m]`, m <= c, ascending, padded with -1."""
    num_entries = scores.shape[-1]
    width, num_blocks = _cmp_block_width(num_entries, config), _num_cmp_blocks(num_entries, config)
    ragged = num_blocks * width - num_entries
    weights = pad(scored.to(scores.dtype), [0, ragged]).unflatten(-1, (num_blocks, width))
    values = torch.where(weights > 0, pad(scores, [0, ragged]).unflatten(-1, (num_blocks, width)), 0.0)
    total = weights.sum(-1)
    block_scores = torch.where(total > 0, values.sum(-1) / total.clamp(min=1), -math.inf)
    eligible = total > 0
    if config.causal:
        ends = block_end(torch.arange(num_entries, device=rows.device), config)
        inside_tile = scored & (ends >= rows[..., :1])
        forced = pad(inside_tile, [0, ragged]).unflatten(-1, (num_blocks, width)).any(-1)
        block_scores = torch.where(forced, math.inf, block_scores)
    if count >= num_blocks:
        eligible = torch.ones_like(eligible)
    return _top_blocks(block_scores, eligible, count)


def _top_blocks(scores: Tensor, eligible: Tensor, count: int) -> Tensor:
    """The `count` eligible blocks of highest score (fewer if there are fewer blocks), ascending, padded with -1.

    Ties go to the lower index.
    """
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    top = torch.where(eligible.expand_as(scores).gather(-1, order), order, scores.shape[-1])
    top = top.sort(dim=-1).values
    return torch.where(top < scores.shape[-1], top, -1)


def attend_compressed(
    q: Tensor, keys: Keys, rows: Tensor, cmp_indices: Tensor, scale: float, config: NSAConfig
) -> tuple[Tensor, Tensor]:
    num_entries = keys.k.shape[2]
    if config.num_cmp_selected_blocks is None:
        # All rows of the chunk share one list of entries: those visible to its last row.
        if rows.numel() == 0:
            num_entries = 0
        elif config.causal:
            num_entries = min(num_entries, config.num_compressed(int(rows.max()) + 1))
        ends = block_end(torch.arange(num_entries, device=rows.device), config)
        mask = mask_of(ends, rows.flatten(), q.dtype, causal=config.causal)
        shared = q.flatten(2, 3)[:, :, None]  # all rows as one tile
        common = Keys(keys.k[:, :, None, :num_entries], keys.v[:, :, None, :num_entries], keys.moderate)
        o, lse = attend(shared, common, mask, scale)
        return o.reshape(*q.shape[:-1], keys.v.shape[-1]), lse.reshape(q.shape[:-1])
    width = _cmp_block_width(num_entries, config)
    positions = cmp_indices[..., None] * width + torch.arange(width, device=rows.device)
    exists = ((cmp_indices >= 0)[..., None] & (positions < num_entries)).flatten(-2)
    positions = positions.flatten(-2)
    ends = torch.where(exists, block_end(positions, config), NOWHERE)
    return attend(q, keys.gather(positions), mask_of(ends, rows, q.dtype, causal=config.causal), scale)


def attend_selected(
    q: Tensor, keys: KeySource, rows: Tensor, indices: Tensor, scale: float, config: NSAConfig
) -> tuple[Tensor, Tensor]:
    size = _select_size(keys.count, config)
    positions = indices[..., None] * size + torch.arange(size, device=rows.device)
    exists = (indices >= 0)[..., None] & (positions < keys.count)
    positions = torch.where(exists, positions, NOWHERE).flatten(-2)  # [B,S,n,k*l']
    return attend(q, keys.gather(positions), mask_of(positions, rows, q.dtype, causal=config.causal), scale)


def _reach(num_tokens: int, config: NSAConfig) -> tuple[int, int]:
    """Number of tokens before and after a query in its window, at most N - 1."""
    reach = (config.window_size - 1, 0) if config.causal else (config.window_size // 2,) * 2
    before, after = (min(tokens, max(num_tokens - 1, 0)) for tokens in reach)
    return before, after


def _window_span(num_tokens: int, tile_size: int, config: NSAConfig) -> int:
    """Length of a range of tokens that holds the windows of any tile of this size."""
    return min(tile_size + sum(_reach(num_tokens, config)), num_tokens) if config.window_size > 0 else 0


def attend_window(q: Tensor, keys: KeySource, rows: Tensor, scale: float, config: NSAConfig) -> tuple[Tensor, Tensor]:
    num_tokens = keys.count
    before, after = _reach(num_tokens, config)
    span = _window_span(num_tokens, rows.shape[-1], config)
    first = (rows[..., :1] - before).clamp(0, num_tokens - span)
    positions = first + torch.arange(span, device=rows.device)  # [n, T + w - 1]
    mask = mask_of(positions - after, rows, q.dtype) + mask_of(-positions - before, -rows, q.dtype)
    positions = positions.expand(*keys.lead, *positions.shape[-2:])
    return attend(q, keys.gather(positions), mask, scale)


def mask_of(first: Tensor, rows: Tensor, dtype: torch.dtype, *, causal: bool = True) -> Tensor:
    """Additive attention mask `[...,T,m]`: 0 for visible keys, -inf for others.

    On a CPU, a comparison that returns numbers takes an eighth of the time of one that returns bools.

    Args:
        first: the first token that can attend to each key, `[...,m]`.
        rows: tokens of the queries, `[...,T]`, less than FAR apart.
        causal: if False, all keys are visible except those that are NOWHERE.
    """
    origin = rows[..., :1]
    distances = ((first - origin).clamp(-FAR, FAR) if causal else first == NOWHERE).to(dtype)[..., None, :]
    own = (rows - origin).to(dtype)[..., None] if causal else distances.new_zeros((*rows.shape, 1))
    shape = torch.broadcast_shapes(distances.shape, own.shape)
    seen = torch.le(distances, own, out=distances.new_empty(shape))
    return seen.reciprocal_().neg_().add_(1)  # 1 - 1 / seen


def _gather(entries: Tensor, positions: Tensor) -> Tensor:
    """Gather rows of entries `[B,H_kv,N,D]` at positions `[B,S,n,m]`; arbitrary for positions outside `[0, N)`.

    Head s of S reads key/value head s // (S / H_kv).
    """
    batch, kv_heads, num, dim = entries.shape
    select_heads = positions.shape[1]
    base = torch.arange(batch * kv_heads, device=entries.device).reshape(batch, kv_heads) * num
    base = base.repeat_interleave(select_heads // kv_heads, dim=1)[:, :, None, None]
    flat = (base + positions.clamp(0, num - 1)).flatten()
    return entries.flatten(0, 2).index_select(0, flat).reshape(*positions.shape, dim)


def attend(q: Tensor, keys: Keys, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of each tile's rows over the tile's own keys.

    q `[B,H,n,T,D]`, keys `[B,S,n,m,D]` and `[B,S,n,m,D_v]`; the mask (`mask_of`) broadcasts to `[B,S,n,T,m]`.
    Returns o `[B,H,n,T,D_v]` (0 without keys) and lse `[B,H,n,T]` (-inf without keys); NaN if a visible key or value is
    not finite. Masked keys and values never affect results or gradients.
    """
    k, v = keys.k, keys.v
    batch, select_heads, _, num_keys, _ = k.shape
    if num_keys == 0:
        # 0 * q and empty sums keep the result in the graph, with zero gradients
        o = q[..., :1] * 0 + k.sum() + v.sum()
        return o.expand(*q.shape[:-1], v.shape[-1]), q.new_full(q.shape[:-1], -math.inf)
    while mask.dim() < 5:
        mask = mask[None]
    if keys.moderate is None:
        return _attend_moderate(q, *_without_not_finite(k, v, mask), scale)
    if keys.moderate and is_moderate(q):
        return _attend_moderate(q, k, v, mask, scale)
    # Rows without visible extreme keys must be bitwise unaffected by these; the others are computed separately
    extreme = ~(_largest(k) <= MODERATE) | ~(_largest(v) <= MODERATE)  # also True for NaN
    seeing = ((mask != -math.inf) & extreme[..., None, :]).any(-1).expand(batch, select_heads, -1, -1)
    rows = seeing.repeat_interleave(q.shape[1] // select_heads, 1) | ~(_largest(q) <= MODERATE)
    q_zero, k_zero, v_zero = (torch.where(at[..., None], 0.0, x) for at, x in ((rows, q), (extreme, k), (extreme, v)))
    o, lse = _attend_moderate(q_zero, k_zero, v_zero, torch.where(extreme[..., None, :], -math.inf, mask), scale)
    if not bool(rows.any()):
        return o, lse
    o_extreme, lse_extreme = _attend_in_steps(q, *_without_not_finite(k, v, mask), scale, guarded=True)
    return torch.where(rows[..., None], o_extreme, o), torch.where(rows, lse_extreme, lse)


def _without_not_finite(k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero the keys that are not finite or not visible to any row; set the mask to NaN where the former are visible."""
    finite = torch.isfinite(k).all(-1) & torch.isfinite(v).all(-1)
    used = finite & (mask != -math.inf).any(-2)  # unwritten memory may be finite but give infinite logits
    k, v = (torch.where(used[..., None], x, 0.0) for x in (k, v))
    return k, v, torch.where((mask == 0) & ~finite[..., None, :], math.nan, mask)


def _largest(x: Tensor) -> Tensor:
    """Largest absolute value of each row."""
    return x.detach().abs().amax(-1)


def is_fused(k: Tensor, v: Tensor) -> bool:
    """True if attention is PyTorch's fused operator, which has no second derivative."""
    return k.device.type == "cpu" and k.shape[-1] == v.shape[-1]


def _attend_moderate(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if q.numel() > 0 and is_fused(k, v):
        return _attend_fused(q, k, v, mask, scale)
    return _attend_in_steps(q, k, v, mask, scale)


def _attend_in_steps(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, *, guarded: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention in separate steps. With `guarded`, infinite products with masked keys affect nothing, not even
    gradients.
    """
    batch, heads, n, tile, dim = q.shape
    select_heads, num_keys = k.shape[1], k.shape[3]
    group = heads // select_heads
    grouped = q.reshape(batch, select_heads, group, n, tile, dim).movedim(2, 3).flatten(3, 4)
    logits = (grouped @ k.transpose(-1, -2) * scale).reshape(batch, select_heads, n, group, tile, num_keys)
    mask = mask.unsqueeze(3)
    logits = logits + mask
    if guarded:  # inf - inf is NaN
        logits = torch.where(mask == -math.inf, mask, logits)
    top = logits.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(logits - top)
    if guarded:  # 0 * inf is NaN, in backward
        weights = torch.where(mask == -math.inf, 0.0, weights)
    total = weights.sum(-1, keepdim=True)
    divisor = torch.where(total == 0, 1.0, total)
    o = (weights / divisor).flatten(3, 4) @ v
    o = (
        o.reshape(batch, select_heads, n, group, tile, v.shape[-1])
        .movedim(3, 2)
        .reshape(batch, heads, n, tile, v.shape[-1])
    )
    lse = (top + torch.log(total)).detach()[..., 0].movedim(3, 2).reshape(batch, heads, n, tile)
    return o, lse


def _attend_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same by PyTorch's fused attention for CPUs, which never stores the logits, for D = D_v.

    Tiles are its batch; sequences and select heads are its heads; the rows of a group share their keys.

    Args:
        mask: additive mask `[B,S,n,T,m]`, or 1 in place of B and S, n, T.
    """
    batch, heads, n, tile, dim = q.shape
    select_heads = k.shape[1]
    group = heads // select_heads

    def by_tile(x: Tensor) -> Tensor:
        """Reshape `[B,S,G,n,T,...]` to `[n,B*S,G*T,...]`."""
        return x.movedim(3, 0).flatten(3, 4).flatten(1, 2)

    lead = (1, 1) if mask.shape[:2] == (1, 1) else (batch, select_heads)
    mask = by_tile(mask[:, :, None].expand(*lead, group, -1, tile, -1))
    rows = _unit_stride(by_tile(q.reshape(batch, select_heads, group, n, tile, dim)))
    keys, values = (_unit_stride(x.movedim(2, 0).flatten(1, 2)) for x in (k, v))
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    o, lse = fused(rows, keys, values, attn_mask=mask, scale=scale)
    lse = torch.where(mask.amax(-1) == -math.inf, -math.inf, lse.detach())  # would be 0 in rows without keys
    shape = (n, batch, select_heads, group, tile)
    return o.reshape(*shape, dim).movedim(0, 3).reshape(q.shape), lse.reshape(shape).movedim(0, 3).reshape(q.shape[:-1])


def _unit_stride(x: Tensor) -> Tensor:
    """Return x, or a copy with a contiguous last dim, which PyTorch's fused attention assumes without checking."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Step 6: gates


def branch_gates(inputs: NSAInputs) -> Tensor:
    """Weights of the three branches, `[B,N,H,3]`."""
    if inputs.gates is not None:
        return inputs.gates
    if inputs.gate_proj_weight is None:
        return inputs.q.new_full((1, 1, 1, 1), 1.0 / 3.0).expand(*inputs.q.shape[:-1], 3)
    return torch.sigmoid(torch.einsum("bnhd,hgd->bnhg", inputs.q, inputs.gate_proj_weight))
