"""Training outside of torch.compile: what the operators of nsa/ops.py do, for a call that was checked already.

PyTorch's autograd for operators takes 0.4 ms of host time a call with as many arguments as theirs, and a second check.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.common.autocast import autocast_off
from nsa.common.derivatives import forbid_double_backward
from nsa.inputs import TENSOR_NAMES, NSAInputs
from nsa.ops import Resolved


def train(call: Resolved) -> Tensor:
    """Differentiable out of a backend with a training module."""
    out: Tensor = _Training.apply(call, *(getattr(call.inputs, name) for name in TENSOR_NAMES))
    return out


class _Training(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Resolved, *tensors: Tensor | None) -> Tensor:
        out, saved = call.training.nsa_saving(call.inputs, call.config, recompute=call.recompute)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        # Not the call: its tensors belong to autograd, which frees them
        ctx.training, ctx.config, ctx.deterministic = call.training, call.config, call.deterministic
        ctx.max_seqlen = call.inputs.max_seqlen
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * (1 + len(TENSOR_NAMES))
        kept = ctx.saved_tensors
        given: dict[str, Any] = dict(zip(TENSOR_NAMES, kept, strict=False))
        inputs, saved = NSAInputs(**given, max_seqlen=ctx.max_seqlen), kept[len(TENSOR_NAMES) :]
        with torch.no_grad(), autocast_off(do.device.type):
            by_name = ctx.training.nsa_backward(inputs, ctx.config, saved, do, deterministic=ctx.deterministic)
        _, *needed = ctx.needs_input_grad
        wanted = zip(TENSOR_NAMES, needed, strict=True)
        gradients = [by_name.get(name) if needs else None for name, needs in wanted]
        return (None, *forbid_double_backward("nsa", gradients, do, *inputs.tensors().values()))
