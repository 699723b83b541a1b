"""Argument checks for block-sparse attention."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from dispatch.registry import short_name
from nsa.common.checks import check_dense
from nsa.inputs import NSAInputs

INDEX_DTYPES = (torch.int32, torch.int64)


def check_indices(inputs: NSAInputs, block_indices: Tensor) -> None:
    """Raise TypeError or ValueError unless block_indices has the type, device and shape for these checked inputs."""
    if not isinstance(block_indices, Tensor):
        raise TypeError(f"block_indices must be a torch.Tensor, got {type(block_indices).__name__}")
    check_dense("block_indices", block_indices)
    if block_indices.dtype not in INDEX_DTYPES:
        raise TypeError(f"block_indices must be int32 or int64, got {short_name(block_indices.dtype)}")
    if block_indices.device != inputs.q.device:
        raise ValueError(f"block_indices must be on q's device {inputs.q.device}, got {block_indices.device}")
    lead = [] if inputs.packed else [inputs.q.shape[0]]
    wanted = [*lead, inputs.k.shape[-2], inputs.q.shape[-3]]
    if list(block_indices.shape[:-1]) != wanted:
        sizes = ", ".join(map(str, wanted))
        layout = "[H_kv,T,k]" if inputs.packed else "[B,H_kv,N_q,k]"
        raise ValueError(f"block_indices must be {layout} = [{sizes}, k], got shape {list(block_indices.shape)}")


def check_values(inputs: NSAInputs, block_indices: Tensor, block_size: int) -> None:
    """Raise unless all blocks exist and those of a token are distinct. Reads values, which synchronizes with the
    device.
    """
    for name, rows, keys in _documents(inputs):
        own = block_indices[..., rows, :]
        blocks = math.ceil(keys / block_size)
        wrong = (own < -1) | (own >= blocks)
        if bool(wrong.any()):
            got = int(own[wrong][0])
            raise ValueError(
                f"block_indices must be from 0 to {blocks - 1}, blocks of {block_size} of the {keys} keys{name}, or -1 "
                f"(debug=True), got {got}"
            )
        ordered = own.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if bool(twice.any()):
            got = int(ordered[..., 1:][twice][0])
            raise ValueError(f"block_indices of a token must differ (debug=True), got block {got} twice{name}")


def _documents(inputs: NSAInputs) -> list[tuple[str, slice, int]]:
    """Name in messages, rows and number of keys of each document."""
    if inputs.cu_seqlens is None or inputs.key_bounds is None:
        return [("", slice(None), inputs.k.shape[-3])]
    bounds = zip(pairwise(inputs.cu_seqlens.tolist()), pairwise(inputs.key_bounds.tolist()), strict=True)
    return [(f" of document {b}", slice(*rows), stop - start) for b, (rows, (start, stop)) in enumerate(bounds)]
