"""Attention residual: its checks, its calls, and their operators (see nsa/common/operators.py).

Blocks of an operator are a list; with `stacked`, a list of one tensor `[L,B,N,D]`. Their gradient is one tensor
`[L,B,N,D]`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import dispatch
from dispatch.registry import short_name
from nsa.common.autocast import CASTABLE, autocast_dtype
from nsa.common.checks import check_dense, check_dtype, check_eps
from nsa.common.derivatives import needs_grad
from nsa.common.operators import ResolvedCall, by_member, register_backward, register_forward
from nsa.common.resolve import accepted, find_impl, is_remembered

Blocks = Tensor | Sequence[Tensor]
"""`[L,B,N,D]`, or L tensors `[B,N,D]`."""

_INPUTS = "Tensor[] blocks, Tensor w_query, Tensor? w_norm"
_OPTIONS = "bool stacked, float eps, str? backend, bool backward"
FORWARD = "nsa_kernels::attention_residual", f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)"
BACKWARD = (
    "nsa_kernels::attention_residual_backward",
    f"(Tensor do, Tensor saved, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)


# Checks


def block_tensors(blocks: Blocks) -> tuple[Tensor, ...]:
    """The tensors that hold the blocks: one `[L,B,N,D]`, or L of `[B,N,D]`."""
    return (blocks,) if isinstance(blocks, Tensor) else tuple(blocks)


def with_two_leading_dims(blocks: Blocks) -> tuple[Blocks, torch.Size | None]:
    """Reshape blocks to two leading dimensions, into views if strides allow, and check them before.

    Also return the original shape `[...,D]`, or None for blocks with two, which are not checked.
    """
    stacked = isinstance(blocks, Tensor)
    first = blocks if stacked or not isinstance(blocks, (list, tuple)) or not blocks else blocks[0]
    if not isinstance(first, Tensor) or first.dim() - stacked in (0, 3):
        return blocks, None
    check_blocks(blocks)
    shape = first.shape[1:] if stacked else first.shape
    *lead, tokens, dim = (1, *shape) if len(shape) == 1 else shape
    two = math.prod(lead), tokens, dim
    return blocks.reshape(blocks.shape[0], *two) if isinstance(blocks, Tensor) else [
        x.reshape(two) for x in blocks
    ], shape


def check_layer_blocks(blocks: Any, weight: Tensor) -> None:
    """Raise TypeError or ValueError if blocks do not fit the weight `[D]` of a layer; `resolve` checks the rest."""
    stacked = isinstance(blocks, Tensor)
    first = blocks if stacked or not isinstance(blocks, (list, tuple)) or not blocks else blocks[0]
    if not isinstance(first, Tensor) or first.dim() == 0:
        return
    name, width = "blocks" if stacked else "blocks[0]", weight.shape[0]
    if first.shape[-1] != width:
        raise ValueError(f"{name} must have hidden_size={width}, as this layer has, got shape {list(first.shape)}")
    if first.device != weight.device:
        raise ValueError(f"{name} must be on {weight.device}, as the weights are, got {first.device}")
    same = weight.dtype in (first.dtype, torch.float32)
    if not same and (weight.dtype not in CASTABLE or autocast_dtype(weight.device.type) is None):
        expected = f"{short_name(weight.dtype)}, as the weights are"
        raise TypeError(f"{name} must be {expected}, got {short_name(first.dtype)}")


def check_blocks(blocks: Any) -> tuple[Tensor, int]:
    """Check the blocks; return the first tensor, and L."""
    if isinstance(blocks, Tensor):
        check_dense("blocks", blocks)
        if blocks.dim() < 2:
            raise ValueError(f"blocks must have the layout [L,...,D] or be a list, got shape {list(blocks.shape)}")
        first, size = blocks, blocks.shape[0]
    elif isinstance(blocks, (list, tuple)):
        if not blocks:
            raise ValueError("blocks must have at least one member, got an empty list")
        for i, block in enumerate(blocks):
            if not isinstance(block, Tensor):
                raise TypeError(f"blocks[{i}] must be a torch.Tensor, got {type(block).__name__}")
        first, size = blocks[0], len(blocks)
        check_dense("blocks[0]", first)
        if first.dim() == 0:
            raise ValueError("blocks[0] must have the layout [...,D], got shape []")
        _check_list(blocks, first)
    else:
        raise TypeError(f"blocks must be a torch.Tensor or a list of them, got {type(blocks).__name__}")
    check_dtype("blocks", first)
    if 0 in (size, first.shape[-1]):
        raise ValueError(f"blocks must have at least one block and D >= 1, got shape {list(first.shape)}")
    return first, size


def _check_list(blocks: Sequence[Tensor], first: Tensor) -> None:
    """Raise unless all blocks of a list match the first, whose properties are read once because lists are long."""
    shape, dtype, device, strides = first.shape, first.dtype, first.device, first.stride()
    for i, block in enumerate(blocks[1:], 1):
        if block.shape != shape:
            raise ValueError(f"blocks[{i}] must have blocks[0]'s shape {list(shape)}, got {list(block.shape)}")
        if block.dtype != dtype:
            raise ValueError(f"blocks[{i}] must be {short_name(dtype)} as blocks[0], got {short_name(block.dtype)}")
        if block.device != device:
            raise ValueError(f"blocks[{i}] must be on blocks[0]'s device {device}, got {block.device}")
        check_dense(f"blocks[{i}]", block)
        if block.stride() != strides and any(
            n > 1 and a != b for n, a, b in zip(shape, strides, block.stride(), strict=True)
        ):
            raise ValueError(f"blocks[{i}] must have blocks[0]'s strides {strides}, got {block.stride()}")


def check_weight(name: str, weight: Any, first: Tensor) -> None:
    if not isinstance(weight, Tensor):
        kind = "a torch.Tensor" if name == "w_query" else "a torch.Tensor or None"
        raise TypeError(f"{name} must be {kind}, got {type(weight).__name__}")
    if weight.dtype != first.dtype and weight.dtype != torch.float32:
        wanted = " or ".join(dict.fromkeys((short_name(first.dtype), "float32")))
        raise TypeError(
            f"{name} must be {wanted} (blocks are {short_name(first.dtype)}), got {short_name(weight.dtype)}"
        )
    check_dense(name, weight)
    if weight.device != first.device:
        raise ValueError(f"{name} must be on the blocks' device {first.device}, got {weight.device}")
    if weight.dim() != 1 or weight.shape[0] != first.shape[-1]:
        raise ValueError(f"{name} must have the shape {[first.shape[-1]]}, got {list(weight.shape)}")


# Calls


class ResidualCall(ResolvedCall):
    """The blocks' tensors, w_query, and w_norm if it is given; `num_tensors` hold the blocks, one if `stacked`."""

    op, saves_out = "attention_residual", False

    @property
    def sources(self) -> tuple[Any, ...]:
        return self.tensors

    def arguments(self) -> tuple[Any, Tensor, Tensor | None]:
        """blocks, w_query and w_norm."""
        count, stacked = self.options["num_tensors"], self.options["stacked"]
        w_query, *w_norm = self.tensors[count:]
        return self.tensors[0] if stacked else self.tensors[:count], w_query, w_norm[0] if w_norm else None

    def saving(self) -> tuple[Tensor, list[Tensor]]:
        eps = self.options["eps"]
        if self.impl.training is None:
            return self.impl.load()(*self.arguments(), eps=eps)[0], []
        out, saved = self.impl.load()(*self.arguments(), eps=eps, backend=self.impl.backend)
        return out, [saved]

    def forward(self) -> Tensor:
        return self.saving()[0]

    def empty(self) -> tuple[Tensor, list[Tensor]]:
        first, training = self.tensors[0], self.impl.load_training()
        saved = [] if training is None else [training.kept_like(self.arguments()[0])]
        return first.new_empty(first.shape[-3:]), saved

    def gradients(self, do: Tensor, out: Tensor | None, saved: Sequence[Tensor]) -> list[Tensor]:
        training = self.impl.load_training()
        if training is not None:
            found = training.backward(do, *self.arguments(), *saved, backend=self.impl.backend)
            return [x for x in found if x is not None]
        count, dtensors = self.options["num_tensors"], self.recomputed(self.tensors, do)
        return [dtensors[0] if self.options["stacked"] else torch.stack(dtensors[:count]), *dtensors[count:]]

    def empty_gradients(self) -> list[Tensor]:
        (first, *_), count = self.tensors, self.options["num_tensors"]
        shape = first.shape if self.options["stacked"] else (count, *first.shape)
        return [first.new_empty(shape), *(x.new_empty(x.shape) for x in self.tensors[count:])]

    def by_tensor(self, gradients: list[Tensor]) -> list[Tensor]:
        dblocks, *dweights = gradients
        return [*by_member(dblocks, self.tensors), *dweights]


def resolve(
    blocks: Blocks,
    w_query: Tensor,
    w_norm: Tensor | None,
    eps: float,
    backend: str | None,
    backward: bool | None = None,
) -> ResidualCall:
    """Check all arguments and find a backend; `backward` is None if the tensors say whether they need gradients."""
    first, num_blocks = check_blocks(blocks)
    check_eps(eps)
    check_weight("w_query", w_query, first)
    if w_norm is not None:
        check_weight("w_norm", w_norm, first)
    stacked = isinstance(blocks, Tensor)
    tensors, num_tensors = ((blocks,), 1) if stacked else (blocks, num_blocks)
    given = (*tensors, w_query) if w_norm is None else (*tensors, w_query, w_norm)
    if backward is None:
        backward = needs_grad(*given)
    properties = None
    if is_remembered(first, backend):
        shape = first.shape[-3:]
        properties = "attention_residual", first.device, first.dtype, backward, num_blocks, stacked, shape, backend
    impl = accepted(properties)
    if impl is None:
        options = {"blocks": num_blocks, "stacked": stacked, "shape": tuple(first.shape[-3:])}
        call = dispatch.Call("attention_residual", first.device, first.dtype, backward=backward, options=options)
        impl = find_impl(call, backend, properties)
    return ResidualCall(impl, backward, given, {"stacked": stacked, "num_tensors": num_tensors, "eps": float(eps)})


def _resolve(blocks: Sequence[Tensor], stacked: bool, **others: Any) -> ResidualCall:
    return resolve(blocks[0] if stacked else blocks, **others)


register_forward(*FORWARD, _resolve)
register_backward("attention_residual", FORWARD, BACKWARD, _resolve, ("blocks", "w_query", "w_norm"))
