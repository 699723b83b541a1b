"""Documents of a batch, from padding masks, position_ids or cu_seq_lens, and positions of tokens in them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.unpadding import Unpadding

PACK_ADVICE = "pack documents by position_ids or cu_seq_lens_q, without attention_mask and cache"


def by_positions(position_ids: Tensor, batch: int) -> Unpadding | None:
    """Documents that begin where positions `[B or 1,N]` do not increase by one; None if each row is one. Reads the
    host.
    """
    breaks = position_ids.diff(dim=-1) != 1
    if not bool(breaks.any()):
        return None
    begins = pad(breaks, (1, 0), value=True).expand(batch, -1)
    cu_seqlens = pad(begins.flatten().nonzero().flatten(), (0, 1), value=begins.numel()).to(torch.int32)
    return Unpadding(cu_seqlens, batch, max_seqlen=int(cu_seqlens.diff().max()))


def positions_of_texts(mask: Tensor | None, documents: Unpadding | None, tokens: int) -> Tensor | None:
    """Positions `[B or 1,N]` of tokens in their unpadded rows or in their documents; None if they equal columns.

    Args:
        mask: bool `[B,N]`, True for real tokens.
        documents: documents of one row, in place.
    """
    if documents is not None:
        columns = torch.arange(tokens, device=documents.cu_seqlens.device)
        starts = documents.cu_seqlens.long()
        return (columns - starts[torch.searchsorted(starts, columns, right=True) - 1])[None]
    return None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)


def check_mask(mask: Tensor, position_ids: Tensor | None) -> bool:
    """True if a mask `[B,N_k]` has padding; reads it on the host unless compiling.

    Args:
        mask: bool, True for real tokens.
        position_ids: positions of the last tokens, `[B or 1,N_q]`, if known.

    Raises:
        ValueError: unless padding is only to the left or to the right of each row's tokens, whose positions must
            increase by one.
    """
    holes = (mask.to(torch.int8).diff(dim=1, prepend=mask.new_zeros(len(mask), 1, dtype=torch.int8)) > 0).sum(1) > 1
    restarts = torch.zeros_like(holes)
    if position_ids is not None and position_ids.shape[-1] > 1:
        real = mask[:, mask.shape[1] - position_ids.shape[-1] :]
        restarts = ((position_ids.diff(dim=-1) != 1) & real[:, 1:] & real[:, :-1]).any(1)
    if torch.compiler.is_compiling():
        torch._assert_async(~(holes | restarts).any(), "attention_mask is neither left nor right padding of one text")
        return True
    with_holes, with_restarts, padded = torch.stack([holes.any(), restarts.any(), ~mask.all()]).tolist()
    if with_holes:
        row = int(holes.nonzero()[0])
        raise ValueError(
            f"attention_mask must pad each row to the left or to the right, got tokens on both sides of padding in row "
            f"{row}: {_runs(mask[row])}"
        )
    if with_restarts:
        row = int(restarts.nonzero()[0])
        raise ValueError(
            f"position_ids must increase by one inside a row with attention_mask, got another text beginning "
            f"in row {row}: {PACK_ADVICE}"
        )
    return bool(padded)


def _runs(row: Tensor) -> str:
    """Describe a row of a mask."""
    values, counts = torch.unique_consecutive(row, return_counts=True)
    pairs = zip(values.tolist(), counts.tolist(), strict=True)
    return ", ".join(f"{count} {'real' if value else 'padded'}" for value, count in pairs)
