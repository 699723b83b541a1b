"""Selection by an indexer as a PyTorch operator, for torch.compile (see nsa/common/operators.py).

nsa_kernels::top_blocks_by_max selected blocks; q_start is a tensor, the caller slices the keys for an integer one
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.common.autocast import autocast_off
from nsa.common.operators import register_operator
from nsa.indexer import meta
from nsa.indexer.validate import ResolvedCall, resolve

FORWARD = "nsa_kernels::top_blocks_by_max"
SCHEMA = (
    "(Tensor q_idx, Tensor k_idx, Tensor? cu_seqlens, Tensor? cu_seqlens_k, Tensor? q_start, SymInt block_size, "
    "SymInt k, SymInt local, str? backend) -> Tensor"
)
NAMES = ("cu_seqlens", "cu_seqlens_k", "q_start", "block_size", "k", "local", "backend")


def call_forward(*arguments: Any) -> Tensor:
    """Call top_blocks_by_max's operator; arguments in the order of the schema."""
    indices: Tensor = torch.ops.nsa_kernels.top_blocks_by_max(*arguments)
    return indices


def _resolve(q_idx: Tensor, k_idx: Tensor, *arguments: Any) -> ResolvedCall:
    return resolve(q_idx, k_idx, **dict(zip(NAMES, arguments, strict=True)))


@torch.no_grad()
def _forward(*arguments: Any) -> Tensor:
    call = _resolve(*arguments)
    with autocast_off(call.tensors[0].device.type):
        indices: Tensor = call.impl.load()(*call.tensors, **call.options)
    return indices


def _forward_fake(*arguments: Any) -> Tensor:
    call = _resolve(*arguments)
    return meta.top_blocks_by_max(*call.tensors, **call.options)


register_operator(FORWARD, SCHEMA, _forward, _forward_fake)
