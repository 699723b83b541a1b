"""NeighborhoodCache: the keys and values that causal windows of later tokens can still reach."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dispatch.registry import short_name
from nsa.common.checks import DTYPES, check_integer, check_sizes, is_readable, refuse_shallow_copy
from nsa.common.derivatives import as_to_be_changed, to_be_changed
from nsa.common.one_thread import OneThread, in_one_thread


class NeighborhoodCache:
    """A rolling cache for causal NeighborhoodAttention: the last (kernel_size - 1) * dilation tokens of texts of any
    length.

    All sequences of the batch have equal lengths. Once it is full, sizes are fixed and memory is written in place, so a
    step can be captured in a CUDA graph. Evicted tokens are lost, so there is no truncation.

    Args:
        batch: B.
        heads_kv: H_kv, key/value heads.
        dim: D.
        kernel_size: keys of a window, at least 1.
        dilation: distance between neighbors in tokens, at least 1. Default: 1.
        dtype: dtype of keys and values. Default: torch.float32.
        device: device of keys and values. Default: None, which means the CPU.

    Raises:
        TypeError: naming an argument of the wrong type.
        ValueError: naming an argument out of range.

    Examples:
        >>> import torch
        >>> from nsa import NeighborhoodAttention
        >>> layer = NeighborhoodAttention(hidden_size=64, num_heads=4, kernel_size=5, causal=True)
        >>> cache = layer.new_cache(batch=1)
        >>> with torch.no_grad():
        ...     outs = [layer(torch.randn(1, tokens, 64), cache=cache) for tokens in (100, 1, 1)]
        >>> cache.k.shape, int(cache.length)
        (torch.Size([1, 4, 4, 16]), 102)
    """

    def __init__(
        self,
        batch: int,
        *,
        heads_kv: int,
        dim: int,
        kernel_size: int,
        dilation: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        check_integer("batch", batch, 0)
        check_sizes(heads_kv=heads_kv, dim=dim, kernel_size=kernel_size, dilation=dilation)
        if dtype not in DTYPES:
            raise TypeError(f"dtype must be {', '.join(map(short_name, DTYPES))}, got {dtype!r}")
        self.kernel_size, self.dilation = kernel_size, dilation
        self.reach = (kernel_size - 1) * dilation
        """Number of tokens that are kept."""
        self.thread = OneThread()
        """Context entered by calls of the layer, and by `reorder`."""
        with to_be_changed():
            self.k = torch.empty(batch, 0, heads_kv, dim, dtype=dtype, device=device)
            """Keys of the last tokens, `[B,min(length, reach),H_kv,D]`."""
            self.v = self.k.clone()
            """Values of the last tokens, as k."""
            self.length = torch.zeros((), dtype=torch.int64, device=device)
            """Number of tokens so far, on the device."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(as_to_be_changed(state))

    __copy__ = refuse_shallow_copy

    def positions(self, num_tokens: int) -> Tensor:
        """Positions of the next tokens, equal in all sequences, for rotary embeddings.

        Args:
            num_tokens: new tokens of each sequence.

        Returns:
            int64 `[num_tokens]`, counted from the first token.

        Raises:
            TypeError, ValueError: unless num_tokens is an integer of at least 0.
        """
        check_integer("num_tokens", num_tokens, 0)
        return self.length + torch.arange(num_tokens, device=self.length.device)

    def followed_by(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of the kept tokens followed by new ones, without changing the cache.

        Raises:
            TypeError, ValueError: naming the argument, its value and what was expected.
        """
        for name, x, own in (("k", k, self.k), ("v", v, self.v)):
            if x.dtype != own.dtype:
                raise TypeError(f"{name} must be {short_name(own.dtype)}, as the cache is, got {short_name(x.dtype)}")
            if x.device != own.device or x.shape[:1] + x.shape[2:] != own.shape[:1] + own.shape[2:]:
                wanted = f"the cache's [B,N,H_kv,D] = [{own.shape[0]},N,{own.shape[2]},{own.shape[3]}] on {own.device}"
                raise ValueError(f"{name} must have {wanted}, got {list(x.shape)} on {x.device}")
        return torch.cat([self.k, k], 1), torch.cat([self.v, v], 1)

    def keep(self, k: Tensor, v: Tensor, num_tokens: int) -> None:
        """Advance by `num_tokens` tokens: keep the last of the keys and values returned by `followed_by`."""
        first = max(0, k.shape[1] - self.reach)
        if k.shape[1] - first == self.k.shape[1]:
            self.k.copy_(k[:, first:])
            self.v.copy_(v[:, first:])
        else:
            with to_be_changed():
                self.k, self.v = k[:, first:].clone(), v[:, first:].clone()
        self.length += num_tokens

    @in_one_thread
    def reorder(self, rows: Tensor) -> None:
        """Replace sequence b by sequence rows[b].

        Args:
            rows: int32 or int64 `[B]` on the device.

        Raises:
            TypeError, ValueError: for a wrong type, dtype, shape, device or, on a CPU, row.
        """
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.int32, torch.int64):
            got = short_name(rows.dtype) if isinstance(rows, Tensor) else type(rows).__name__
            raise TypeError(f"rows must be an int32 or int64 tensor, got {got}")
        if rows.shape != self.k.shape[:1] or rows.device != self.k.device:
            wanted = f"[{self.k.shape[0]}] on {self.k.device}"
            raise ValueError(f"rows must be {wanted}, got {list(rows.shape)} on {rows.device}")
        if is_readable(rows) and ((rows < 0) | (rows >= len(self.k))).any():
            raise ValueError(f"rows must be from 0 to {len(self.k) - 1}, got {rows.tolist()}")
        self.k.copy_(self.k[rows])
        self.v.copy_(self.v[rows])
