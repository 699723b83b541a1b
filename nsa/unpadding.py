"""Unpadding: converts padded batches to packed documents and back.

Padding is not removed but moved after the documents, where `nsa` computes nothing, so that sizes depend only on shapes
and nothing synchronizes with the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa.common.checks import check_tensor


@dataclass(frozen=True)
class Unpadding:
    """Maps rows `[B,N,...]` of a padded batch to packed documents `[T,...]`, T = B*N, and back.

    The documents come first, padding after them: pass `cu_seqlens` to `nsa`, which computes nothing past the last
    bound. `from_mask` creates one from a padding mask.

    Args:
        cu_seqlens: bounds of the documents, int32 `[documents + 1]`.
        batch: B. Default: 1.
        order: index in `[B*N]` of each row of the pack. Default: None, which means that rows stay in place.
        max_seqlen: tokens of the longest document, if known. Default: None.

    Examples:
        >>> import torch
        >>> from nsa import Unpadding, nsa
        >>> mask = torch.tensor([[False, True, True], [True, True, True]])
        >>> rows = Unpadding.from_mask(mask)
        >>> q, k, v = torch.randn(3, 2, 3, 4, 16)  # each [B,N,H,D]
        >>> out = nsa(*map(rows.unpad, (q, k, v)), cu_seqlens=rows.cu_seqlens)
        >>> rows.cu_seqlens.tolist(), rows.pad(out).shape
        ([0, 2, 5], torch.Size([2, 3, 4, 16]))
    """

    cu_seqlens: Tensor
    batch: int = 1
    order: Tensor | None = None
    max_seqlen: int | None = None

    @classmethod
    def from_mask(cls, mask: Tensor) -> Unpadding:
        """Make one document of the real tokens of each row, wherever its padding is.

        Args:
            mask: `[B,N]`, bool or integers: True or nonzero for real tokens, as returned by tokenizers.

        Returns:
            The mapping of this batch.

        Raises:
            TypeError: for a mask that is not a tensor of bool or integers.
            ValueError: for a mask of another shape.
        """
        check_tensor("mask", mask)
        if mask.is_floating_point() or mask.is_complex():
            raise TypeError(f"mask must be bool or integers, True for real tokens, got {mask.dtype}")
        if mask.dim() != 2:
            raise ValueError(f"mask must have the shape [B,N], got {list(mask.shape)}")
        real = mask.bool()
        order = torch.argsort((~real.flatten()).to(torch.uint8), stable=True)
        bounds = pad(real.sum(1).cumsum(0), (1, 0)).to(torch.int32)
        return cls(bounds, mask.shape[0], order)

    def unpad(self, x: Tensor) -> Tensor:
        """Pack the rows of a batch: documents, then padding.

        Args:
            x: `[B,N,...]`.

        Returns:
            `[T,...]`, T = B*N.

        Raises:
            ValueError: for a tensor of another B or N.
        """
        tokens = x.shape[:2].numel()
        if x.dim() < 2 or x.shape[0] != self.batch or (self.order is not None and tokens != len(self.order)):
            size = "N" if self.order is None else str(len(self.order) // max(self.batch, 1))
            raise ValueError(f"x must have the shape [B,N,...] = [{self.batch},{size},...], got {list(x.shape)}")
        flat = x.flatten(0, 1)
        return flat if self.order is None else flat[self.order]

    def pad(self, x: Tensor) -> Tensor:
        """Return the rows of a pack to their places in the batch: the inverse of `unpad`.

        Args:
            x: `[T,...]`, T = B*N.

        Returns:
            `[B,N,...]`.

        Raises:
            ValueError: for a tensor of another T.
        """
        tokens = x.shape[:1].numel() if self.order is None else len(self.order)
        if x.dim() == 0 or x.shape[0] != tokens:
            raise ValueError(f"x must have the shape [T,...] = [{tokens},...], got {list(x.shape)}")
        flat = x if self.order is None else torch.empty_like(x).index_copy(0, self.order, x)
        return flat.reshape(self.batch, tokens // max(self.batch, 1), *x.shape[1:])
