"""Backward of a backend that is differentiable itself: run it again, and let autograd do it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch
from torch import Tensor

from dispatch import Impl
from nsa.config import NSAConfig
from nsa.tensors import NSAInputs


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
        stream = torch.cuda.stream(torch.cuda.current_stream(do.device)) if do.is_cuda else nullcontext()

        def differentiate() -> dict[str, Tensor]:
            with stream:
                leaves = inputs.map(lambda tensor: tensor.detach().requires_grad_())
                wanted = {name: tensor for name, tensor in leaves.tensors().items() if tensor.requires_grad}
                out, _ = self.run(leaves, config, aux=False)
                gradients = torch.autograd.grad(out, list(wanted.values()), do, materialize_grads=True)
            return {name: tensor.contiguous() for name, tensor in zip(wanted, gradients, strict=True)}

        # An operator runs below autograd, and so does all that its thread does meanwhile
        with ThreadPoolExecutor(1) as other_thread:
            return other_thread.submit(differentiate).result()
