"""Neighborhood attention on NVIDIA GPUs: FlashAttention-4's sliding window over strided views, without a copy.

Tokens that attend to each other are in the same residue class modulo C = min(dilation, N): token = row * C + class. In
a class a window is contiguous, rows i - left ... i + right, so FlashAttention-4 gets classes as heads or as batch:

    classes as heads    [B, rows, classes * H, D]   if the heads of a token are adjacent, as in contiguous tensors
    classes as batch    [classes, rows, H, D]       of one sequence, otherwise
    a single class      [B, rows, H, D]             instead, if there are fewer classes than sequences

Query head c * H + h then reads key/value head (c * H + h) // G = c * H_kv + h // G, as it should. If C does not divide
N, the first N mod C classes have one more row than the others, and are separate calls.

Queries that continue a sequence (causal) are its last tokens. Keys before the first window are dropped in whole periods
of C tokens, and fewer than C zero rows are prepended to the queries, up to a multiple of C. Class c of the queries then
meets class c of the keys, and FlashAttention-4 aligns the last row of both.

Windows that are shifted inside at the ends (boundary="shift") are not sliding windows: support.py rejects them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.fa4 import interface as fa4
from cute_kernels.fa4 import rules as fa4_rules
from cute_kernels.limits import MAX_GRID
from cute_kernels.runtime.device import vectorizable

SUMS_SHARE = 12
"""The fp32 sums of one call of backward use at most 1/SUMS_SHARE of all inputs, outputs and gradients ..."""

SUMS_BYTES = 64 << 20
"""... or this, if it is more: splitting small calls costs time and saves little."""

TILE = 128
"""Rows are rounded up to a multiple of this in fp32 sums."""

LSE_ROWS = 4
"""Rows of the LSE are padded to a multiple of this: FlashAttention-4 copies an LSE whose strides are not aligned."""

KV_TENSORS = frozenset(("k", "v", "dk", "dv"))
"""Names of tensors with H_kv heads."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kernel_size: int,
    dilation: int,
    softmax_scale: float | None,
    boundary: str,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Forward for checked inputs that support.py accepts.

    Args:
        q: `[B,N,H,D]`.
        k, v: `[B,N_k,H_kv,D]`; unaligned rows (device.vectorizable) are copied.
        boundary: "truncate", or anything with `causal`.
        backend: "cute".

    Returns:
        out like q, contiguous, and LSE `[B, C, H, rows]` fp32 for `backward`, with C = min(dilation, N_k), and rows at
        least ceil(N / C); rows past the end of a class are uninitialized.
    """
    q, k, v = (vectorizable(tensor) for tensor in (q, k, v))
    left, right = _window(kernel_size, causal, k.shape[1])
    layout, lse = _Layout.of(q, k, dilation), kept_like(q, k, v, dilation=dilation)
    first_key = layout.first_key(left, fa4_rules.WINDOW_ALIGNMENT)
    q = layout.align(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tensors = (q, *(x.narrow(1, first_key, x.shape[1] - first_key) for x in (k, v)), out)
    for chunk in _chunks(tensors, layout.classes):
        *qkv, o = (chunk.view(tensor) for tensor in tensors)
        fa4.window(*qkv, left=left, right=right, scale=_scale(q, softmax_scale), into=(o, chunk.view_lse(lse)))
    return layout.without_front(out), lse


def kept_like(q: Tensor, k: Tensor, v: Tensor, *, dilation: int, **others: Any) -> Tensor:
    """Uninitialized LSE in the layout returned by `forward`."""
    (batch, num_tokens, heads), layout = q.shape[:3], _Layout.of(q, k, dilation)
    rows = -(-(num_tokens + layout.front) // (layout.classes * LSE_ROWS)) * LSE_ROWS
    return q.new_empty((batch, layout.classes, heads, rows), dtype=torch.float32)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    kernel_size: int,
    dilation: int,
    softmax_scale: float | None,
    boundary: str,
    causal: bool,
    backend: str,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous, from the arguments and results of `forward`.

    Args:
        deterministic: sum dq, and dk and dv over the heads of a group, in a fixed order; otherwise FlashAttention-4
            sums them in fp32 with atomics.
    """
    do, q, k, v = (vectorizable(tensor) for tensor in (do, q, k, v))
    left, right = _window(kernel_size, causal, k.shape[1])
    layout = _Layout.of(q, k, dilation)
    first_key = layout.first_key(left, 1)  # from here on every key is in a window, so FlashAttention-4 writes all
    new = torch.zeros if k.shape[1] > q.shape[1] else torch.empty  # some keys may be in no window
    dk, dv = (new(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (k, v))
    q, do, out = (layout.align(tensor) for tensor in (q, do, out))
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tensors = {"q": q, "o": out, "do": do, "dq": dq}
    of_keys = {"k": k, "v": v, "dk": dk, "dv": dv}
    tensors |= {name: x.narrow(1, first_key, x.shape[1] - first_key) for name, x in of_keys.items()}
    most_bytes = max(SUMS_BYTES, sum(tensor.nbytes for tensor in tensors.values()) // SUMS_SHARE)
    for chunk in _chunks(tuple(tensors.values()), layout.classes):
        views = {name: chunk.view(tensor) for name, tensor in tensors.items()}
        for gradients in _head_chunks(fa4.Gradients(lse=chunk.view_lse(lse), **views), most_bytes):
            fa4.window_backward(
                gradients, left=left, right=right, scale=_scale(q, softmax_scale), deterministic=deterministic
            )
    return layout.without_front(dq), dk, dv


def _window(kernel_size: int, causal: bool, num_tokens: int) -> tuple[int, int]:
    """Keys to the left and to the right, as small as possible: FlashAttention-4 counts with 32 bits."""
    left = kernel_size - 1 if causal else kernel_size // 2
    return min(left, num_tokens), min(kernel_size - 1 - left, num_tokens)


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else float(softmax_scale)


def _num_classes(num_tokens: int, dilation: int) -> int:
    """Number of residue classes. With a dilation of N or more, every token is a class of its own."""
    return max(1, min(dilation, num_tokens))


@dataclass(frozen=True)
class _Layout:
    """Alignment of queries, class by class, with the keys of the sequence that they end."""

    classes: int
    first_token: int
    """Token index of the first query; 0 without queries."""

    @classmethod
    def of(cls, q: Tensor, k: Tensor, dilation: int) -> _Layout:
        return cls(_num_classes(k.shape[1], dilation), k.shape[1] - q.shape[1] if q.shape[1] > 0 else 0)

    @property
    def front(self) -> int:
        """Number of rows to prepend to the queries so that they start with class 0."""
        return self.first_token % self.classes

    def first_key(self, left: int, alignment: int) -> int:
        """A token of class 0 before the first query's window. Args: left: keys to its left. alignment: in rows."""
        return max(0, self.first_token // self.classes - left) // alignment * alignment * self.classes

    def align(self, x: Tensor) -> Tensor:
        """All queries, with zero rows in front."""
        return x if self.front == 0 else torch.nn.functional.pad(x, [0, 0, 0, 0, self.front, 0])

    def without_front(self, x: Tensor) -> Tensor:
        return x if self.front == 0 else x[:, self.front :].contiguous()


@dataclass(frozen=True)
class _Chunk:
    """Arguments of one FlashAttention-4 call: all rows of some classes of one length, of some sequences."""

    sequences: range
    classes: range
    rows: int
    """Number of query rows."""
    step: int
    """Tokens from one row to the next: the total number of classes."""
    as_batch: bool
    """True if classes are the batch, False if they are heads."""

    def view(self, tensor: Tensor) -> Tensor:
        """View `[B,N,heads,D]` as this chunk of it, `[batch,rows,heads,D]`; keys have all rows that exist."""
        _, num_tokens, heads, dim = tensor.shape
        sequence_stride, token_stride, head_stride, dim_stride = tensor.stride()
        first = self.sequences.start * sequence_stride + self.classes.start * token_stride
        if self.as_batch:
            batch, batch_stride = len(self.classes), token_stride
        else:
            batch, batch_stride = len(self.sequences), sequence_stride
            # The next class is as many elements ahead as `heads` heads
            head_stride = token_stride if heads == 1 else head_stride
            heads *= len(self.classes)
        return tensor.as_strided(
            (batch, -(-(num_tokens - self.classes.start) // self.step), heads, dim),
            (batch_stride, self.step * token_stride, head_stride, dim_stride),
            tensor.storage_offset() + first,
        )

    def view_lse(self, lse: Tensor) -> Tensor:
        """View `[B,C,H,rows]` as this chunk of it, `[batch,heads,rows]`."""
        _, _, heads, _ = lse.shape
        sequence_stride, class_stride, head_stride, _ = lse.stride()
        first = self.sequences.start * sequence_stride + self.classes.start * class_stride
        if self.as_batch:
            batch, batch_stride = len(self.classes), class_stride
        else:
            batch, batch_stride = len(self.sequences), sequence_stride
            heads *= len(self.classes)
        strides = (batch_stride, head_stride, 1)
        return lse.as_strided((batch, heads, self.rows), strides, lse.storage_offset() + first)


def _chunks(tensors: Sequence[Tensor], num_classes: int) -> Iterator[_Chunk]:
    """As few chunks as the strides of all tensors allow; none if there is nothing to compute."""
    batch, num_tokens, heads, _ = tensors[0].shape
    if batch == 0 or num_tokens == 0:
        return
    rows, num_longer = divmod(num_tokens, num_classes)
    side_by_side = all(_heads_lie_side_by_side(tensor) for tensor in tensors)
    most_classes = max(1, MAX_GRID // heads)
    for start, stop, length in ((0, num_longer, rows + 1), (num_longer, num_classes if rows > 0 else num_longer, rows)):
        for first in range(start, stop, most_classes):
            classes = range(first, min(first + most_classes, stop))
            if side_by_side or len(classes) == 1:
                yield _Chunk(range(batch), classes, length, num_classes, as_batch=False)
            elif len(classes) < batch:
                for number in classes:
                    yield _Chunk(range(batch), range(number, number + 1), length, num_classes, as_batch=False)
            else:
                for number in range(batch):
                    yield _Chunk(range(number, number + 1), classes, length, num_classes, as_batch=True)


def _heads_lie_side_by_side(tensor: Tensor) -> bool:
    """True if the next token's heads follow those of a token at the same stride."""
    return tensor.shape[2] == 1 or tensor.stride(1) == tensor.shape[2] * tensor.stride(2)


def _head_chunks(gradients: fa4.Gradients, most_bytes: int) -> Iterator[fa4.Gradients]:
    """Ranges of key/value heads with their query heads, whose fp32 sums use `most_bytes`, or of one head."""
    batch, rows, kv_heads, dim = gradients.k.shape
    group = gradients.q.shape[2] // kv_heads
    summed = group + 2 * (group > 1)  # dq of each query head, and dk and dv of a group
    per_head = batch * -(-rows // TILE) * TILE * dim * 4 * summed
    num_chunks = -(-kv_heads // max(1, most_bytes // per_head))
    per_chunk = -(-kv_heads // num_chunks)
    for first in range(0, kv_heads, per_chunk):
        count = min(per_chunk, kv_heads - first)
        views = {}
        for name, tensor in vars(gradients).items():
            heads = 1 if name in KV_TENSORS else group
            views[name] = tensor.narrow(1 if name == "lse" else 2, first * heads, count * heads)
        yield fa4.Gradients(**views)
