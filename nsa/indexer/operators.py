"""Selection by an indexer, and its loss: their checks, calls, and operators (see nsa/common/operators.py).

q_start of an operator is a tensor; the caller slices the keys for an integer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import dispatch
from dispatch.registry import short_name
from nsa.block_sparse.operators import check_indices
from nsa.common.checks import check_dtype, check_integer, check_tensor, is_finite, is_number
from nsa.common.derivatives import needs_grad
from nsa.common.operators import ResolvedCall, register_backward, register_forward
from nsa.common.resolve import find_impl
from nsa.config import LARGEST_OPTION, NSAConfig
from nsa.inputs import NSAInputs

TOKEN_MODE = NSAConfig.paper()
"""Documents and starts follow the rules of token mode."""
FORWARD = (
    "nsa_kernels::top_blocks_by_max",
    "(Tensor q_idx, Tensor k_idx, Tensor? cu_seqlens, Tensor? cu_seqlens_k, Tensor? q_start, SymInt block_size, "
    "SymInt k, SymInt local, str? backend) -> Tensor",
)
_LOSS_ARGUMENTS = (
    "Tensor q_idx, Tensor k_idx, Tensor q, Tensor k, Tensor block_indices, Tensor? cu_seqlens, Tensor? q_start, "
    "SymInt block_size, float? index_scale, float? softmax_scale, str? backend, bool backward"
)
LOSS = "nsa_kernels::indexer_kl_loss", f"({_LOSS_ARGUMENTS}) -> (Tensor, Tensor[])"
LOSS_BACKWARD = (
    "nsa_kernels::indexer_kl_loss_backward",
    f"(Tensor do, Tensor[] saved, {_LOSS_ARGUMENTS}) -> (Tensor, Tensor)",
)


# Checks


def narrow(q_idx: Tensor, k_idx: Tensor, **where: Any) -> NSAInputs:
    """Check documents and starts, and cut the keys after the last query, as NSA does."""
    inputs = NSAInputs(q_idx, k_idx, k_idx, **where)
    inputs.check(TOKEN_MODE)
    return inputs.narrow(TOKEN_MODE)


def check_index_tensors(q_idx: Tensor, k_idx: Tensor, *, packed: bool, own_bounds: bool = False) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the tensors are as `top_blocks_by_max` says.

    Args:
        own_bounds: True if packed keys have their own bounds (cu_seqlens_k).
    """
    layout, lead = ("[T,heads,D_i]", 1) if packed else ("[B,N,heads,D_i]", 2)
    for name, tensor in (("q_idx", q_idx), ("k_idx", k_idx)):
        check_tensor(name, tensor)
        check_dtype(name, tensor)
        if tensor.dim() != lead + 2:
            raise ValueError(f"{name} must have the layout {layout}, got shape {list(tensor.shape)}")
    if k_idx.dtype != q_idx.dtype:
        own = short_name(q_idx.dtype)
        raise TypeError(f"k_idx must be {own} (q_idx is {own}), got {short_name(k_idx.dtype)}")
    if k_idx.device != q_idx.device:
        raise ValueError(f"k_idx must be on q_idx's device {q_idx.device}, got {k_idx.device}")
    heads, dim = q_idx.shape[-2:]
    if heads == 0 or dim == 0:
        raise ValueError(f"q_idx must have at least one head and D_i >= 1, got shape {list(q_idx.shape)}")
    if k_idx.shape[-2] not in (1, heads) or k_idx.shape[-1] != dim:
        wanted = f"one head or H_i={heads}, and D_i={dim}"
        raise ValueError(f"k_idx must have {wanted}, got shape {list(k_idx.shape)}")
    if lead == 2 and (k_idx.shape[0] != q_idx.shape[0] or k_idx.shape[1] < q_idx.shape[1]):
        wanted = f"B={q_idx.shape[0]} and at least N_q={q_idx.shape[1]} tokens"
        raise ValueError(f"k_idx must have {wanted}, got shape {list(k_idx.shape)}")
    if packed and not own_bounds and k_idx.shape[0] != q_idx.shape[0]:
        wanted = f"q_idx's T={q_idx.shape[0]} tokens, or cu_seqlens_k bounds of its own"
        raise ValueError(f"k_idx must have {wanted}, got shape {list(k_idx.shape)}")


def narrow_loss(
    q_idx: Tensor, k_idx: Tensor, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, q_start: int | Tensor | None
) -> tuple[NSAInputs, Tensor]:
    """Check tensors, documents and starts of the loss, and cut the keys after the last query: q and k, and k_idx."""
    if cu_seqlens is not None and q_start is not None:
        raise ValueError("q_start must be None with cu_seqlens: documents have as many queries as keys here")
    attention = NSAInputs(q, k, k, cu_seqlens=cu_seqlens, q_start=q_start)
    attention.check(TOKEN_MODE)
    check_index_tensors(q_idx, k_idx, packed=cu_seqlens is not None)
    for name, mine, theirs in (("q_idx", q_idx, q), ("k_idx", k_idx, k)):
        if mine.shape[:-2] != theirs.shape[:-2] or mine.device != theirs.device:
            wanted = f"{name[0]}'s tokens {list(theirs.shape[:-2])} on {theirs.device}"
            raise ValueError(f"{name} must have {wanted}, got shape {list(mine.shape)} on {mine.device}")
    if q_idx.shape[-2] != k.shape[-2]:
        raise ValueError(f"q_idx must have a head for each of k's {k.shape[-2]}, got shape {list(q_idx.shape)}")
    attention = attention.narrow(TOKEN_MODE)
    return attention, k_idx[..., : attention.k.shape[-3], :, :]


def checked_scale(name: str, scale: float | None, x: Tensor) -> float:
    if scale is None:
        return float(x.shape[-1] ** -0.5)
    if not is_number(scale):
        raise TypeError(f"{name} must be a number or None, got {scale!r}")
    if not (is_finite(scale) and scale > 0):
        raise ValueError(f"{name} must be finite and greater than 0, got {scale}")
    return float(scale)


# Calls


class IndexerCall(ResolvedCall):
    """q_idx, k_idx, cu_seqlens, cu_seqlens_k and q_start; block_size, k and local."""

    op = "top_blocks_by_max"

    def forward(self) -> Tensor:
        indices: Tensor = self.impl.load()(*self.tensors, **self.options)
        return indices

    def empty(self) -> tuple[Tensor, list[Tensor]]:
        *batch, tokens, heads, _dim = self.tensors[0].shape
        return self.tensors[0].new_empty((*batch, heads, tokens, self.options["k"]), dtype=torch.int32), []


def resolve(
    q_idx: Tensor, k_idx: Tensor, *, block_size: int, k: int, local: int, backend: str | None, **where: Any
) -> IndexerCall:
    """Check all arguments and find a backend; `where` are documents and starts, as in NSAInputs."""
    check_integer("block_size", block_size, 1, LARGEST_OPTION)
    check_integer("k", k, 1, LARGEST_OPTION)
    check_integer("local", local, 0, k)
    check_index_tensors(
        q_idx, k_idx, packed=where["cu_seqlens"] is not None, own_bounds=where["cu_seqlens_k"] is not None
    )
    inputs = narrow(q_idx, k_idx, **where)
    options = {"block_size": block_size, "k": k, "local": local}
    call = dispatch.Call("top_blocks_by_max", q_idx.device, q_idx.dtype, options={"inputs": inputs, **options})
    start = inputs.q_start if isinstance(inputs.q_start, Tensor) else None
    tensors = inputs.q, inputs.k, inputs.cu_seqlens, inputs.cu_seqlens_k, start
    return IndexerCall(find_impl(call, backend), False, tensors, options)


register_forward(*FORWARD, resolve)


class LossCall(ResolvedCall):
    """q_idx, k_idx, q, k, block_indices, cu_seqlens and q_start; block_size, index_scale and softmax_scale."""

    op = "indexer_kl_loss"
    saves_out = False

    @property
    def sources(self) -> tuple[Any, ...]:
        return self.tensors[:2]

    def saving(self) -> tuple[Tensor, list[Tensor]]:
        loss, *saved = self.impl.load()(*self.tensors, **self.options)
        return loss, [] if self.impl.training is None else saved

    def gradients(self, do: Tensor, out: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
        training = self.impl.load_training()
        if training is None:
            return self.recomputed(self.sources, do)
        return [*training.backward(do, *self.tensors, *saved, **self.options)]

    def empty(self) -> tuple[Tensor, list[Tensor]]:
        training, q_idx = self.impl.load_training(), self.tensors[0]
        saved = [] if training is None else [*training.kept_like(self.tensors[4])]
        return q_idx.new_empty((), dtype=torch.promote_types(q_idx.dtype, torch.float32)), saved


def resolve_loss(
    q_idx: Tensor,
    k_idx: Tensor,
    q: Tensor,
    k: Tensor,
    block_indices: Tensor,
    cu_seqlens: Tensor | None,
    q_start: int | Tensor | None,
    block_size: int,
    index_scale: float | None,
    softmax_scale: float | None,
    backend: str | None,
    backward: bool | None = None,
) -> LossCall:
    """Check all arguments and find a backend; `backward` is None if q_idx and k_idx say whether it is needed."""
    check_integer("block_size", block_size, 1, LARGEST_OPTION)
    attention, k_idx = narrow_loss(q_idx, k_idx, q, k, cu_seqlens, q_start)
    check_indices(attention, block_indices)
    options = {
        "block_size": block_size,
        "index_scale": checked_scale("index_scale", index_scale, q_idx),
        "softmax_scale": checked_scale("softmax_scale", softmax_scale, q),
    }
    facts = {"inputs": attention, "q_idx": q_idx, "slots": block_indices.shape[-1], **options}
    backward = needs_grad(q_idx, k_idx) if backward is None else backward
    call = dispatch.Call("indexer_kl_loss", q.device, q.dtype, backward=backward, options=facts)
    start = attention.q_start if isinstance(attention.q_start, Tensor) else None
    tensors = q_idx, k_idx, attention.q, attention.k, block_indices, cu_seqlens, start
    return LossCall(find_impl(call, backend), backward, tensors, options)


register_forward(*LOSS, resolve_loss)
register_backward("indexer_kl_loss", LOSS, LOSS_BACKWARD, resolve_loss, ("q_idx", "k_idx"))
