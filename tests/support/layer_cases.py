"""Checks that hold of every attention layer, whatever its op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def check_autocast(layer: nn.Module, width: int, target: str, op: Callable[..., Tensor]) -> None:
    """Under autocast only a layer's projections lose precision: fp32 weights and gradients, 16-bit activations.

    The op gives what it gives outside, for the same q, k, v.

    Args:
        width: of the layer's input.
        target: where the layer's module holds `op`, "module.name".
    """
    received: dict[str, Any] = {}

    def record(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        received.update(keywords, q=q, k=k, v=v)
        received["out"] = op(q, k, v, **keywords)
        return received["out"]

    x = torch.randn(2, 50, width, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(target, record)
        out = layer(x)
    assert out.dtype == received["q"].dtype == torch.bfloat16
    expected = received.pop("out")
    assert torch.equal(op(**received), expected)
    out.float().square().sum().backward()
    for name, parameter in [("x", x), *layer.named_parameters()]:
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.abs().sum() > 0, name
