"""Backward of a backend that is differentiable itself: run it again, and let autograd do it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from dispatch import Impl
from nsa.common.derivatives import differentiate
from nsa.config import NSAConfig
from nsa.inputs import NSAInputs


class Rerun:
    """What dispatch.Impl.training names, for an implementation without one. Nothing is kept for backward."""

    def __init__(self, impl: Impl) -> None:
        self.run = impl.load()

    def nsa_saving(self, inputs: NSAInputs, config: NSAConfig, *, recompute: bool) -> tuple[Tensor, list[Tensor]]:
        return self.run(inputs, config, aux=False)[0], []

    def nsa_saved_like(self, inputs: NSAInputs, config: NSAConfig, *, recompute: bool) -> list[Tensor]:
        return []

    def nsa_backward(
        self, inputs: NSAInputs, config: NSAConfig, saved: list[Tensor], do: Tensor, *, deterministic: bool
    ) -> dict[str, Tensor]:
        """Gradients of all floating-point inputs, by name."""
        names = [name for name, tensor in inputs.tensors().items() if tensor.is_floating_point()]

        def run(*tensors: Tensor) -> Tensor:
            given: dict[str, Any] = dict(zip(names, tensors, strict=True))
            out: Tensor = self.run(replace(inputs, **given), config, aux=False)[0]
            return out

        gradients = differentiate(run, [getattr(inputs, name) for name in names], do)
        return dict(zip(names, gradients, strict=True))
