"""attn_implementation="nsa": the attention function and the mask function that transformers calls under that name.

The attention function gets rotated q, k, v of one layer, a mask and the call's keywords; it is for models that were not
converted. Their mask is a CausalMask: it marks a layer as causal self-attention, and no other attention can use it.
Documents are found from `attention_mask`, `position_ids` or `cu_seq_lens_q`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from nsa.api import nsa
from nsa.common.checks import is_integer, is_readable
from nsa.common.replace import replace
from nsa.config import NSAConfig
from nsa.integrations.transformers.guards import CausalMask, calls_attention_functions, check_keywords
from nsa.integrations.transformers.options import check_gate_init, options_of
from nsa.integrations.transformers.unpadding import PACK_ADVICE, by_positions, check_mask
from nsa.unpadding import Unpadding

NAME = "nsa"


def check_model(model: Any) -> None:
    """Raise ValueError for a model that would ignore attn_implementation="nsa"."""
    if not calls_attention_functions(model):
        raise ValueError(
            f"attn_implementation='nsa' needs a model whose layers call transformers' attention interface, got "
            f"{type(model).__name__}, which has its own attention code (a class of yours that calls it must set "
            f"_supports_attention_backend = True)"
        )


# Masks


def nsa_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """The mask for `nsa_attention`: a CausalMask, which also records unsupported features; a converted model gets the
    2-D `attention_mask`, or None.

    Raises:
        ValueError: in torch.compile, for a model that was not converted; for a converted model, unless attention is
            causal over all tokens, padded or packed.
    """
    converted, compiling = hasattr(config, "nsa_gates"), torch.compiler.is_compiling()
    if compiling and not converted:
        raise ValueError("attn_implementation='nsa' runs in torch.compile after nsa.integrations.transformers.convert")
    # When compiling, it is always that of a pack: converted models use no other, and call `find_documents`
    parts = () if compiling else (*_parts(mask_function),)
    unsupported = None
    for part in parts:
        if part not in CAUSAL_PARTS:
            unsupported = (
                f"attn_implementation='nsa' is causal attention to a text, its padding or its documents; got a mask by "
                f"{part}"
            )
    if converted:
        if unsupported is not None:
            raise ValueError(unsupported)
        if attention_mask is None or compiling:
            return attention_mask
        # Of a static cache, for which compiled steps need a fixed shape
        return torch.nn.functional.pad(attention_mask, (0, max(0, kv_length - attention_mask.shape[1])))
    static = isinstance(q_offset, Tensor) or kv_offset != 0
    if unsupported is None and (static or (attention_mask is None and kv_length != q_offset + q_length)):
        unsupported = (
            f"attn_implementation='nsa' supports a cache of exactly the earlier tokens, got {kv_length} keys for "
            f"{q_length} queries: use a dynamic cache, or nsa.integrations.transformers.convert, which has static ones"
        )
    shape = (batch_size, 1, q_length, kv_length)
    return CausalMask(shape, device, attention_mask, packed=PACKED in parts, unsupported=unsupported)


PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
CAUSAL_PARTS = {"causal_mask_function", "remap_positions_for_packed_sequence.<locals>.inner_mask", PACKED}
"""Mask functions of transformers that are causal, or separate packed documents."""


def _parts(mask_function: Callable[..., Any]) -> Iterator[str]:
    """Names of the functions whose intersection is a mask function."""
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    if name == "and_masks.<locals>.and_mask":
        cells: Any = mask_function.__closure__
        for part in cells[0].cell_contents:
            yield from _parts(part)
    else:
        yield name


PACK_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""transformers' names for the bounds of documents and the longest one, of queries and of keys."""


def given_documents(kwargs: Mapping[str, Any], device: torch.device) -> Unpadding | None:
    """The documents given by a call's PACK_KEYWORDS on this device, or None.

    Raises:
        TypeError, ValueError: for bounds that are not integers `[documents + 1]`, and for different bounds of keys, if
            that shows without reading a device.
    """
    bounds, of_keys, longest, longest_key = map(kwargs.get, PACK_KEYWORDS)
    for name, given in zip(PACK_KEYWORDS, (bounds, of_keys), strict=False):
        if given is None:
            continue
        if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64):
            got = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise TypeError(f"{name} must be a tensor of int32 or int64, got {got}")
        if given.dim() != 1 or len(given) == 0:
            raise ValueError(f"{name} must have the shape [documents + 1], got {list(given.shape)}")
        if given.device != device:
            raise ValueError(f"{name} must be on the tokens' device {device}, got {given.device}")
    for name, length in zip(PACK_KEYWORDS[2:], (longest, longest_key), strict=True):
        if not (length is None or is_integer(length)):
            raise TypeError(f"{name} must be an integer or None, got {length!r}")
    if bounds is None:
        if of_keys is not None:
            raise ValueError("cu_seq_lens_k must come with cu_seq_lens_q, got only cu_seq_lens_k")
        return None
    if of_keys is not None and (of_keys.shape != bounds.shape or _differ(of_keys, bounds)):
        raise ValueError(
            f"cu_seq_lens_k must be cu_seq_lens_q, since each document's queries are its keys, got {_told(of_keys)} "
            f"and {_told(bounds)}"
        )
    if None not in (longest, longest_key) and longest_key != longest:
        raise ValueError(f"max_length_k must be max_length_q={longest}, got {longest_key}")
    return Unpadding(bounds.to(torch.int32), max_seqlen=longest)


def _differ(one: Tensor, other: Tensor) -> bool:
    """True if values differ; False if reading them would synchronize with a device."""
    return is_readable(one) and bool((one != other).any())


def _told(bounds: Tensor) -> str:
    """Bounds for an error message: values if they can be read, else the shape."""
    return str(bounds.tolist()) if bounds.device.type == "cpu" else f"shape {list(bounds.shape)}"


def find_documents(
    attention_mask: Tensor | Mapping[str, Tensor | None] | None,
    position_ids: Tensor | None,
    given: Unpadding | None,
    shape: tuple[int, int, int],
    max_columns: int | None = None,
) -> tuple[Tensor | None, Unpadding | None]:
    """Return the 2-D mask if there is padding, else None; and the documents if rows are packed.

    Args:
        given: documents from `given_documents`.
        shape: rows of the batch, columns of queries, and columns of keys, including a cache's.
        max_columns: size of a static cache, for which `generate` makes masks of this width.

    Raises:
        ValueError: for a mask that is neither padding on one side nor documents.
    """
    batch, tokens, columns = shape
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, tokens), (1, tokens)):
        wanted = f"[B,N] = {[batch, tokens]} or {[1, tokens]}"
        raise ValueError(f"position_ids must be {wanted} for attn_implementation='nsa', got {list(position_ids.shape)}")
    attention_mask = _of_full_attention(attention_mask)
    if attention_mask is not None and tuple(attention_mask.shape) == (batch, max_columns):
        attention_mask = attention_mask[:, :columns]
    if attention_mask is not None and tuple(attention_mask.shape) != (batch, columns):
        raise ValueError(
            f"attention_mask must be [B,N_k] = {[batch, columns]} for attn_implementation='nsa', cached tokens "
            f"included, got shape {list(attention_mask.shape)}"
        )
    if given is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q bounds the documents of one row, got a batch of {batch}")
        if is_readable(given.cu_seqlens) and given.cu_seqlens[-1] != tokens:
            got = _told(given.cu_seqlens)
            raise ValueError(f"cu_seq_lens_q must end with the number of tokens, {tokens}, got {got}")
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError("cu_seq_lens_q and an attention_mask with padding contradict each other: pass one of them")
        return None, given
    if attention_mask is not None:
        mask = attention_mask.bool()
        if tokens == 1 < columns and mask.device.type != "cpu":
            return mask, None  # decoding steps must not synchronize
        return (mask if check_mask(mask, position_ids) else None), None
    if position_ids is None or position_ids.shape[-1] == 1:
        return None, None
    if torch.compiler.is_compiling():
        raise ValueError(
            "position_ids may hold packed documents, which torch.compile cannot detect: omit them, or also pass "
            "cu_seq_lens_q"
        )
    return None, by_positions(position_ids, batch)


def mask_of_static_cache(attention_mask: Any, shape: tuple[int, int]) -> Tensor | None:
    """The mask of a step in torch.compile, with the same shape in every step: bool, or None.

    Args:
        shape: rows of the batch, and columns of the cache.

    Raises:
        ValueError: for a mask of another shape.
    """
    mask = _of_full_attention(attention_mask)
    if mask is not None and tuple(mask.shape) != shape:
        raise ValueError(
            f"attention_mask must be [B,max_cache_len] = {list(shape)} in torch.compile, as generate makes it, got "
            f"shape {list(mask.shape)}"
        )
    return None if mask is None else mask.bool()


def _of_full_attention(attention_mask: Any) -> Tensor | None:
    """The mask for full attention; `generate` passes a dict by layer type if a model has several."""
    if isinstance(attention_mask, Mapping):
        if "full_attention" not in attention_mask:
            raise ValueError(
                f"attention_mask must have a mask for 'full_attention', which NSA is, got {[*attention_mask]}"
            )
        attention_mask = attention_mask["full_attention"]
    mask: Tensor | None = attention_mask
    return mask


# Attention


def attend(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, config: NSAConfig, mask: Tensor | None, documents: Unpadding | None
) -> Tensor:
    """`nsa` on rows `[B,N,...]` that are padded according to a mask, or packed; returns out `[B,N_q,H,D_v]`.

    Args:
        mask: bool `[B,N_k]`, True for real tokens; the last N_q columns are q's. Rows of padding return 0.
    """
    queries = q.shape[1]
    if mask is None and documents is None:
        return nsa(q, k, v, gates=gates, config=config)
    rows = documents or Unpadding.from_mask(mask[:, -queries:])  # type: ignore[index]
    keys = rows if mask is None or queries == k.shape[1] else Unpadding.from_mask(mask)
    out = nsa(
        rows.unpad(q),
        keys.unpad(k),
        keys.unpad(v),
        gates=rows.unpad(gates),
        config=config,
        cu_seqlens=rows.cu_seqlens,
        cu_seqlens_k=None if keys is rows else keys.cu_seqlens,
        max_seqlen=rows.max_seqlen,
    )
    return rows.pad(out)


def nsa_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """NSA of one layer of a model that was not converted, with constant gates `nsa_gate_init` from the config.

    Args:
        module: the layer's attention; the options are `nsa_config` of its config, or `NSAConfig.paper()`.
        query: `[B,H,N_q,D]`.
        key: `[B,H_kv,N_k,D]`, the first N_k - N_q from a cache.
        value: `[B,H_kv,N_k,D_v]`.
        attention_mask: from `nsa_mask`.
        scaling: scale of the softmax.
        dropout: must be 0.
        position_ids: `[B or 1,N_q]`.
        others: PACK_KEYWORDS such as `cu_seq_lens_q`; every other keyword that could change the result raises.

    Returns:
        out `[B,N_q,H,D_v]`, and None for attention weights.

    Raises:
        ValueError: for a mask that is not from `nsa_mask`, as in cross-attention; for unsupported features.
    """
    refuse(dropout=dropout, is_causal=getattr(module, "is_causal", True), others=others)
    config = options_of(module.config)
    if scaling is not None:
        config = replace(config, softmax_scale=float(scaling))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    shape = (len(q), q.shape[1], k.shape[1])
    causal = _checked_mask(module, attention_mask, shape)
    given = given_documents(others, q.device)
    mask, documents = find_documents(causal.padding, position_ids, given, shape)
    if given is None and (documents is not None) != causal.packed:
        place = "attention" if causal.packed else "mask, as with a cache"
        raise ValueError(
            f"position_ids pack documents, and this model does not pass them to its {place}: give each document a row "
            "of its own, or use_cache=False"
        )
    if documents is not None and shape[1] != shape[2]:
        raise ValueError(f"documents begin among new tokens, and a cache holds earlier ones: {PACK_ADVICE}")
    gates = q.new_tensor(check_gate_init(getattr(module.config, "nsa_gate_init", None))).expand(*q.shape[:-1], 3)
    return attend(q, k, v, gates, config, mask, documents), None


def _checked_mask(module: Any, mask: Any, shape: tuple[int, int, int]) -> CausalMask:
    """The mask of a layer's causal self-attention.

    Raises:
        ValueError: for a mask that NSA does not support, for one that is not from `nsa_mask`, and for None, as in
            cross-attention, where keys may not be those of the queries' sequence.
    """
    batch, queries, keys = shape
    layer = type(module).__name__
    if getattr(module, "is_cross_attention", False):
        raise ValueError(f"attn_implementation='nsa' is causal self-attention, got cross-attention in {layer}")
    if not isinstance(mask, CausalMask):
        got = f"a mask of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"{mask!r}"
        raise ValueError(
            f"attention_mask must be [B,N_k] = {[batch, keys]} for attn_implementation='nsa', and come to {layer} as "
            f"transformers' create_causal_mask makes it: without that, as in cross-attention, nothing says that keys "
            f"are the queries' own sequence; got {got}"
        )
    if mask.unsupported is not None:
        raise ValueError(mask.unsupported)
    if mask.padding is None and tuple(mask.shape) != (batch, 1, queries, keys):
        raise ValueError(
            f"attn_implementation='nsa' is causal self-attention, got {queries} queries and {keys} keys in {layer} "
            f"with a mask of {mask.shape[2]} and {mask.shape[3]}"
        )
    return mask


def refuse(*, dropout: float, is_causal: bool, others: Mapping[str, Any]) -> None:
    """Raise for arguments of an attention function that would change the result.

    Raises:
        ValueError: naming the argument and its value.
    """
    if dropout:
        raise ValueError(f"attention_dropout must be 0 with NSA, got {dropout}")
    if not is_causal:
        raise ValueError("is_causal must be True with attn_implementation='nsa', got False")
    check_keywords(NAME, others, honoured=PACK_KEYWORDS)
