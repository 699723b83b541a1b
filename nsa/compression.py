"""Blocks of keys and values, and learned pooling of them: what `NSAConfig.compress` takes besides "mean"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nsa.common.checks import check_sizes
from nsa.config import BlockPooling, NSAConfig


def whole_blocks(x: Tensor, config: NSAConfig) -> Tensor:
    """The blocks of x `[B,N,heads,D]`, without a ragged tail: a view `[B,N_cmp,heads,l,D]`."""
    if config.num_compressed(x.shape[1]) == 0:
        return x[:, :0, :, None].expand(-1, -1, -1, config.compress_block_size, -1)
    return x.unfold(1, config.compress_block_size, config.stride).transpose(-1, -2)


def pool_documents(x: Tensor, cu_seqlens: Tensor, pool: BlockPooling, config: NSAConfig) -> Tensor:
    """Entries of packed documents, one document's after the other's, then zeros: `[T//d,heads,D]`.

    The number of rows follows from sizes alone, so nothing waits for the device.

    Args:
        x: `[T,heads,D]`. cu_seqlens: int32 `[B+1]`. pool: from blocks `[T//d,heads,l,D]` to `[T//d,heads,D]`.
    """
    length, stride = config.compress_block_size, config.stride
    counts = ((cu_seqlens.diff() - length) // stride + 1).clamp(min=0)
    ends = counts.cumsum(0)
    places = torch.arange(x.shape[0] // stride, device=x.device)
    document = torch.searchsorted(ends, places, right=True)
    used = document < len(counts)
    # One more column, for places behind the last document
    before = pad(ends - counts, [0, 1])[document]
    first = torch.where(used, cu_seqlens[document] + (places - before) * stride, 0)
    tokens = first[:, None] + torch.arange(length, device=x.device)
    inside = torch.where(used[:, None], tokens, 0)
    used = used[:, None, None]
    of_places = torch.where(used[..., None], x[inside].transpose(1, 2), 0)
    return torch.where(used, pool(of_places), 0)


class LinearCompression(nn.Module):
    """One linear map per head from the l tokens of a block, each with an embedding of its place, to one entry.

        entry[h] = sum over t < l of (block[h, t] + position[h, t]) @ weight[h, t]

    The linear form of the paper's block compression with intra-block positions (arXiv 2502.11089, equation 7). It
    begins as mean pooling: `weight` is the identity / l, `position` is 0.

    Args:
        num_kv_heads: H_kv. block_size: l, `NSAConfig.compress_block_size`. head_dim: D for keys, D_v for values.
    """

    def __init__(
        self,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_kv_heads, block_size, head_dim, head_dim, **place))
        self.position = nn.Parameter(torch.empty(num_kv_heads, block_size, head_dim, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Mean pooling."""
        with torch.no_grad():
            self.weight.zero_()
            self.weight.diagonal(dim1=-2, dim2=-1).fill_(1.0 / self.weight.shape[1])
            self.position.zero_()

    def forward(self, blocks: Tensor) -> Tensor:
        """Entries `[...,H_kv,D]`, in the dtype of the blocks `[...,H_kv,l,D]`: products added in fp32, rounded once.

        Raises:
            ValueError: blocks of another size.
        """
        heads, length, dim = self.position.shape
        if blocks.dim() < 3 or tuple(blocks.shape[-3:]) != (heads, length, dim):
            wanted = f"[...,H_kv,l,D] = [...,{heads},{length},{dim}]"
            raise ValueError(f"blocks must be {wanted}, as this layer was made for, got shape {list(blocks.shape)}")
        *lead, _, _, _ = blocks.shape
        weight = self.weight.to(blocks.dtype)
        # Places contribute the same to every block: one row, instead of a copy of all blocks with them added
        offset = torch.einsum(
            "htd,htde->he",
            self.position.to(torch.promote_types(blocks.dtype, torch.float32)),
            self.weight.to(torch.promote_types(blocks.dtype, torch.float32)),
        ).to(blocks.dtype)
        by_head = blocks.movedim(-3, 0).reshape(heads, -1, length * dim)
        entries = torch.baddbmm(offset[:, None], by_head, weight.flatten(1, 2))
        return entries.movedim(0, 1).reshape(*lead, heads, dim)

    def extra_repr(self) -> str:
        heads, length, dim = self.position.shape
        return f"num_kv_heads={heads}, block_size={length}, head_dim={dim}"
