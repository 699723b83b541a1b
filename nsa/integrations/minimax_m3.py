"""MiniMax-M3 of transformers (>= 5.23, the extra `hf`) with block-sparse attention: `attn_implementation="nsa-blocks"`.

    register registers the name, and replaces the indexer's selection in models that use it unregister undoes both

transformers' own paths for this model need a Blackwell GPU or build dense masks, and its indexer keeps the scores of
all pairs. Here sparse layers select blocks with `nsa.top_blocks_by_max` and attend with `nsa.block_sparse_attention`;
dense layers and the vision tower use PyTorch's scaled_dot_product_attention. The only N^2 memory is the mask of a dense
layer for several new tokens after cached ones.

An indexer does not know which keys are padding, because only attention gets the mask. So the indexer of a patched model
passes on its queries and keys, and attention selects the blocks. A *run* is a contiguous range of tokens of one
sequence or document in a row; its blocks count from its own first token, also after left padding and in packs. Runs
follow from

    attention_mask    2-D: padding on the left, on the right, or both. 4-D masks, and holes, raise.
    position_ids without a mask: documents begin where they do not increase by one (packing); with cached tokens, the
    position of the new ones in the cache

Both are read on the host, once for all layers of a forward. So attention is a graph break in torch.compile, which
`generate` uses by default on a GPU with a static cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

from nsa.block_sparse.api import block_sparse_attention
from nsa.indexer.api import top_blocks_by_max
from nsa.integrations.transformers.guards import CHECKS, check_keywords

__all__ = ["register", "unregister"]

NAME = "nsa-blocks"
"""Name of the attention implementation."""

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
HONOURED = (*BOUNDS, "max_length_q", "max_length_k", "position_ids")
"""Keywords that `attention` reads, or that follow from bounds, such as the longest document."""

_REPLACED: dict[str, Callable[..., Any]] = {}
"""The indexer's original forward, while replaced."""


def register() -> None:
    """Register `attn_implementation="nsa-blocks"` with transformers, for MiniMax-M3.

    The forward of its indexer's class is replaced; models with another `attn_implementation` still run their own. A
    second call changes nothing.

    Examples:
        >>> from nsa.integrations import minimax_m3
        >>> minimax_m3.register()
        >>> # model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="nsa-blocks")
        >>> minimax_m3.unregister()
    """
    if _REPLACED:
        return
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    CHECKS[NAME] = _check_model
    _REPLACED["forward"] = modeling.MiniMaxM3VLIndexer.forward
    modeling.MiniMaxM3VLIndexer.forward = _index


def unregister() -> None:
    """Undo `register`. Models with `attn_implementation="nsa-blocks"` cannot run afterwards."""
    if _REPLACED:
        modeling.MiniMaxM3VLIndexer.forward = _REPLACED.pop("forward")
        for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping, CHECKS):
            mapping.pop(NAME)


def _check_model(model: Any) -> None:
    """Raise ValueError for another model, whose own attention would treat the 2-D mask as a mask of scores."""
    if not isinstance(model, modeling.MiniMaxM3VLPreTrainedModel):
        raise ValueError(f"attn_implementation={NAME!r} is for MiniMax-M3, got {type(model).__name__}")


class IndexStates(NamedTuple):
    """Result of a patched indexer instead of blocks: its queries and all keys, after rotary embeddings."""

    q: Tensor
    """`[B,H_i,S_q,D_i]`."""
    k: Tensor
    """`[B,1,S_k,D_i]`."""


def _index(
    self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], cache: Any, position_ids: Tensor
) -> Tensor | IndexStates:
    """Replacement of MiniMaxM3VLIndexer.forward."""
    if self.config._attn_implementation != NAME:
        blocks: Tensor = _REPLACED["forward"](self, hidden_states, position_embeddings, cache, position_ids)
        return blocks
    q, k = (project(hidden_states).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj))
    q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
    cos, sin = (x[..., : self.head_dim] for x in position_embeddings)
    q, k = modeling.apply_rotary_pos_emb(q, k, cos, sin)
    if cache is not None:
        k = cache.layers[self.layer_idx].update_index(k)
    return IndexStates(q, k)


def padding_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """The mask for attention: 2-D, or None if all tokens are real. Attention finds packed documents itself."""
    return attention_mask


@torch.compiler.disable
def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    block_indices: IndexStates | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers, with its signature: inputs `[B,heads,S,D]`; returns `[B,S,H,D]` and None.

    Raises:
        ValueError: for another model, dropout, masks that are not padding, attention that is not causal, bounds that
            disagree with positions, and keywords that would be ignored.
    """
    if isinstance(module, modeling.MiniMaxM3VLVisionAttention):
        out: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )[0]
        return out, None
    if not isinstance(module, modeling.MiniMaxM3VLAttention):
        raise ValueError(f"attn_implementation={NAME!r} is for MiniMax-M3, got {type(module).__name__}")
    if dropout != 0.0:
        raise ValueError(f"attn_implementation={NAME!r} has no dropout, got attention_dropout={dropout}")
    check_keywords(NAME, kwargs, honoured=HONOURED)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    runs = _runs_of_forward(attention_mask, kwargs.get("position_ids"), (q.shape[0], q.shape[1], k.shape[1]))
    for name in BOUNDS:
        _check_bounds(name, kwargs.get(name), runs, k.shape[1])
    if block_indices is None:
        return _by_run(partial(_dense, scale=scaling), runs, (q,), (k, v)), None
    indexer = module.indexer
    options = {"size": indexer.block_size, "count": indexer.topk_blocks, "local": indexer.local_blocks}
    attend = partial(_sparse, scale=scaling, **options)
    index_q, index_k = (x.transpose(1, 2) for x in block_indices)
    separate = all(run.keys == run.queries for run in runs)
    return (_packed if separate and len(runs) > 1 else _by_run)(attend, runs, (q, index_q), (k, v, index_k)), None


def _dense(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None) -> Tensor:
    """Causal attention to all keys; the queries are the last tokens."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    num_queries, num_keys = q.shape[2], k.shape[2]
    mask = None
    if 1 < num_queries < num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
    causal = num_queries == num_keys
    out: Tensor = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def _sparse(
    q: Tensor,
    index_q: Tensor,
    k: Tensor,
    v: Tensor,
    index_k: Tensor,
    *,
    scale: float | None,
    size: int,
    count: int,
    local: int,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Causal attention to selected blocks; the queries are the last tokens."""
    blocks = top_blocks_by_max(index_q, index_k, block_size=size, k=count, local=local, cu_seqlens=cu_seqlens)
    return block_sparse_attention(q, k, v, blocks, block_size=size, softmax_scale=scale, cu_seqlens=cu_seqlens)


# Runs


class Run(NamedTuple):
    """Contiguous tokens of one sequence or document in a row. The queries are the last of the keys."""

    rows: slice
    """Rows of the batch: one, or all."""
    keys: slice
    queries: slice


def _by_run(
    attend: Callable[..., Tensor], runs: list[Run], queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]
) -> Tensor:
    """Call `attend(*queries, *keys)` for each run; 0 elsewhere. All tensors are `[B,S,heads,D]`."""
    parts = []
    for run in runs:
        own_keys = [x[run.rows, run.keys] for x in keys]
        parts.append(attend(*[x[run.rows, run.queries] for x in queries], *own_keys))
    batch, num_queries, heads, _ = queries[0].shape
    if len(runs) == 1 and parts[0].shape[:2] == (batch, num_queries):
        return parts[0]
    out = queries[0].new_zeros((batch, num_queries, heads, keys[1].shape[-1]))
    for run, part in zip(runs, parts, strict=True):
        out[run.rows, run.queries] = part
    return out


def _packed(
    attend: Callable[..., Tensor], runs: list[Run], queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]
) -> Tensor:
    """The same in one call, for runs whose keys belong to the same tokens as their queries: consecutive documents.

    A static cache's keys may continue after them.
    """
    device, (batch, tokens) = queries[0].device, queries[0].shape[:2]
    spans = [(run.rows.start * tokens + run.keys.start, run.keys.stop - run.keys.start) for run in runs]
    places = torch.cat([torch.arange(first, first + length, device="cpu") for first, length in spans]).to(device)
    bounds = [0, *accumulate(length for _, length in spans)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cpu").to(device)
    packed = attend(*(x[:, :tokens].flatten(0, 1)[places] for x in (*queries, *keys)), cu_seqlens=cu_seqlens)
    out = packed.new_zeros((batch * tokens, *packed.shape[1:])).index_copy(0, places, packed)
    return out.view(batch, tokens, *packed.shape[1:])


Sizes = tuple[int, int, int]
"""B, S_q, S_k."""

_KNOWN = WeakTensorKeyDictionary()
"""Cache keyed by position_ids, which all layers of a forward share: its version, the mask, the sizes, and the runs."""


def _runs_of_forward(mask: Tensor | None, position_ids: Tensor | None, sizes: Sizes) -> list[Run]:
    """The runs, read once for all layers of a forward."""
    if position_ids is None or position_ids.is_inference() or (mask is not None and mask.is_inference()):
        return find_runs(mask, position_ids, sizes)  # inference tensors have no version counter
    facts = position_ids._version, None if mask is None else (id(mask), mask._version), sizes
    known = _KNOWN.get(position_ids)
    if known is None or known[0] != facts:
        # Keep the mask alive while its id is the key
        known = _KNOWN[position_ids] = (facts, mask, find_runs(mask, position_ids, sizes))
    runs: list[Run] = known[2]
    return runs


def _check_bounds(name: str, cu_seqlens: Tensor | None, runs: list[Run], num_keys: int) -> None:
    """Raise ValueError if a keyword's bounds differ from the documents found by positions."""
    if cu_seqlens is None:
        return
    bounds = [*dict.fromkeys(cu_seqlens.tolist())]  # without empty documents
    found = [*(run.keys.start for run in runs), num_keys]
    if bounds != found:
        raise ValueError(f"{name} must bound the documents of position_ids, {found}, got {bounds}")


def find_runs(mask: Tensor | None, position_ids: Tensor | None, sizes: Sizes) -> list[Run]:
    """Find the runs of each row. Reads values on the host.

    Args:
        mask: `[B,S]` of all tokens so far, True or nonzero for real tokens; or None.
        position_ids: `[B or 1,S_q]`, or None.
        sizes: B, S_q and S_k; a static cache may have more keys than tokens so far.

    Raises:
        ValueError: for a mask that is not padding at the ends of rows, and positions beyond the keys.
    """
    batch, num_queries, num_keys = sizes
    if mask is not None:
        bounds = _real_tokens(mask, sizes)
        offset = mask.shape[1] - num_queries
        runs = [(b, first, stop, offset) for b, (first, stop) in enumerate(bounds) if stop > max(first, offset)]
    elif position_ids is not None and num_queries == num_keys:
        ends = (position_ids.diff(dim=-1) != 1).expand(batch, -1).nonzero().tolist()
        starts = sorted([*([b, 0] for b in range(batch if num_keys > 0 else 0)), *([b, i + 1] for b, i in ends)])
        following = [*starts[1:], [batch, 0]]
        runs = [(b, i, j if b == c else num_keys, 0) for (b, i), (c, j) in zip(starts, following, strict=True)]
    else:
        offsets = [num_keys - num_queries] * batch
        if position_ids is not None and num_queries > 0:
            offsets = position_ids[:, 0].expand(batch).tolist()
        if max(offsets, default=0) + num_queries > num_keys or min(offsets, default=0) < 0:
            raise ValueError(
                f"position_ids must begin from 0 to {num_keys - num_queries}, where {num_queries} new tokens fit the "
                f"cache's {num_keys}, got {offsets}"
            )
        runs = [(b, 0, offset + num_queries, offset) for b, offset in enumerate(offsets)]
    spans = [(b, slice(first, stop), slice(max(first - offset, 0), stop - offset)) for b, first, stop, offset in runs]
    if len(spans) == batch and all(span[1:] == spans[0][1:] for span in spans):
        return [Run(slice(None), *spans[0][1:])] if spans else []
    return [Run(slice(b, b + 1), keys, queries) for b, keys, queries in spans]


def _real_tokens(mask: Tensor, sizes: Sizes) -> list[list[int]]:
    """Half-open range [start, stop) of real tokens of each row."""
    batch, num_queries, num_keys = sizes
    if mask.dim() != 2 or mask.shape[0] != batch or not num_queries <= mask.shape[1] <= num_keys:
        wanted = f"[{batch}, {num_queries} to {num_keys}], with attn_implementation={NAME!r}"
        raise ValueError(f"attention_mask must be 2-D, {wanted}, got shape {list(mask.shape)}")
    real = mask.bool().int()
    first, count = real.argmax(1), real.sum(1)
    last = mask.shape[1] - 1 - real.flip(1).argmax(1)
    facts = torch.stack([first, last, count], 1).tolist()
    for b, (start, end, real_tokens) in enumerate(facts):
        if real_tokens not in (0, end - start + 1):
            raise ValueError(
                f"attention_mask must pad the ends of rows only, got {real_tokens} real tokens from {start} to {end} "
                f"in row {b}"
            )
    return [[start, end + 1 if real_tokens else start] for start, end, real_tokens in facts]
