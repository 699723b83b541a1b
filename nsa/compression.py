"""Blocks of keys and values, and LinearCompression, a learned pooling for `NSAConfig.compress`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nsa.common.checks import check_sizes
from nsa.common.parameters import identity_like, local_part, set_values
from nsa.config import BlockPooling, NSAConfig


def whole_blocks(x: Tensor, config: NSAConfig) -> Tensor:
    """View x `[B,N,heads,D]`, without a ragged tail, as blocks `[B,N_cmp,heads,l,D]`."""
    if config.num_compressed(x.shape[1]) == 0:
        return x[:, :0, :, None].expand(-1, -1, -1, config.compress_block_size, -1)
    return x.unfold(1, config.compress_block_size, config.stride).transpose(-1, -2)


def pool_documents(x: Tensor, cu_seqlens: Tensor, pool: BlockPooling, config: NSAConfig) -> Tensor:
    """Entries of packed documents, document after document, then zeros: `[T//d,heads,D]`.

    The number of rows depends only on sizes, so nothing synchronizes with the device.

    Args:
        x: `[T,heads,D]`.
        cu_seqlens: int32 `[B+1]`.
        pool: maps blocks `[T//d,heads,l,D]` to entries `[T//d,heads,D]`.
    """
    length, stride = config.compress_block_size, config.stride
    counts = ((cu_seqlens.diff() - length) // stride + 1).clamp(min=0)
    ends = counts.cumsum(0)
    slots = torch.arange(x.shape[0] // stride, device=x.device)
    document = torch.searchsorted(ends, slots, right=True)
    used = document < len(counts)
    # One extra column, for slots after the last document
    first_slot = pad(ends - counts, [0, 1])[document]
    first_token = torch.where(used, cu_seqlens[document] + (slots - first_slot) * stride, 0)
    tokens = first_token[:, None] + torch.arange(length, device=x.device)
    tokens = torch.where(used[:, None], tokens, 0)
    used = used[:, None, None]
    blocks = torch.where(used[..., None], x[tokens].transpose(1, 2), 0)
    return torch.where(used, pool(blocks), 0)


class LinearCompression(nn.Module):
    """Block compression by one linear map per head, from the l tokens of a block and embeddings of their positions.

        entry[h] = sum over t < l of (block[h, t] + position[h, t]) @ weight[h, t]

    The linear form of the paper's compression with intra-block positions (arXiv 2502.11089, equation 7). It starts as
    mean pooling: `weight` is the identity / l, `position` is 0. For `NSAConfig.compress`; a pair of them compresses
    keys and values.

    Args:
        num_kv_heads: H_kv.
        block_size: l, equal to `NSAConfig.compress_block_size`.
        head_dim: D for keys, D_v for values.
        device: of the parameters, as in nn.Linear. Default: None.
        dtype: of the parameters, as in nn.Linear. Default: None.

    Raises:
        TypeError: naming an argument of the wrong type, what was expected and what came.
        ValueError: naming an argument out of range, what was expected and what came.

    Examples:
        >>> import torch
        >>> from nsa import LinearCompression, NSAConfig, nsa
        >>> pools = tuple(LinearCompression(num_kv_heads=2, block_size=32, head_dim=16) for _ in range(2))
        >>> q, k, v = torch.randn(1, 100, 4, 16), torch.randn(1, 100, 2, 16), torch.randn(1, 100, 2, 16)
        >>> nsa(q, k, v, config=NSAConfig.paper(compress=pools)).shape
        torch.Size([1, 100, 4, 16])
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
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_kv_heads, block_size, head_dim, head_dim, **factory))
        self.position = nn.Parameter(torch.empty(num_kv_heads, block_size, head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to mean pooling."""
        set_values(self.weight, identity_like(self.weight) / self.weight.shape[1])
        nn.init.zeros_(self.position)

    def forward(self, blocks: Tensor) -> Tensor:
        """Compress blocks: products, and the positions' part in the blocks' dtype, are summed in fp32 and rounded once.

        Args:
            blocks: `[...,H_kv,l,D]`.

        Returns:
            Entries `[...,H_kv,D]` in the dtype of the blocks.

        Raises:
            ValueError: for blocks of another size.
        """
        own_weight, position = local_part(self.weight), local_part(self.position)
        heads, length, dim = position.shape
        if blocks.dim() < 3 or tuple(blocks.shape[-3:]) != (heads, length, dim):
            own = f"LinearCompression(num_kv_heads={heads}, block_size={length}, head_dim={dim})"
            wanted = f"[...,H_kv,l,D] = [...,{heads},{length},{dim}]"
            raise ValueError(f"compress is {own}, which expects blocks {wanted}, got shape {list(blocks.shape)}")
        *lead, _, _, _ = blocks.shape
        weight = own_weight.to(blocks.dtype)
        # Positions contribute the same to every block: one row, instead of a copy of all blocks with positions added
        offset = torch.einsum(
            "htd,htde->he",
            position.to(torch.promote_types(blocks.dtype, torch.float32)),
            own_weight.to(torch.promote_types(blocks.dtype, torch.float32)),
        ).to(blocks.dtype)
        by_head = blocks.movedim(-3, 0).reshape(heads, -1, length * dim)
        entries = torch.baddbmm(offset[:, None], by_head, weight.flatten(1, 2))
        # Contiguous before its rows are split: torch.export compares strides, and would reject a batch of one
        return entries.movedim(0, 1).contiguous().reshape(*lead, heads, dim)

    def extra_repr(self) -> str:
        heads, length, dim = self.position.shape
        return f"num_kv_heads={heads}, block_size={length}, head_dim={dim}"
