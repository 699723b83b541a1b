"""Append the tokens of a step to a cache in PyTorch: keys and values, and the compressed entries that they complete.

Any pooling, any number of branches, any device; nothing is read on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.common.replace import replace
from nsa.config import NSAConfig
from nsa.decoding.table import Step
from nsa.inputs import NSAInputs
from nsa.reference import block_end, chunk_bytes, pool_functions

WEIGHTS = ("w_k_compress", "w_v_compress")


def append(inputs: NSAInputs, config: NSAConfig, cache: Any, step: Step) -> None:
    """Write keys and values of the new tokens, and the compressed entries whose last token is among them.

    Arguments are checked; `cache` is an nsa.NSACache inside a step.
    """
    sums = torch.promote_types(cache.dtype, torch.float32)
    weights: dict[str, Any] = {name: None if (w := getattr(inputs, name)) is None else w.to(sums) for name in WEIGHTS}
    pools = pool_functions(replace(inputs, **weights), config, cache.dtype)
    rows = cache.table.rows(step.positions).flatten()
    for name, tensor in inputs.tensors().items():
        if name in cache.pages:
            write_rows(cache.pages[name].flatten(0, 1), rows, tensor.flatten(0, 1), step.new.flatten())
    if config.compress_block_size > cache.table.capacity:
        return  # no block is ever complete
    length, stride = config.compress_block_size, config.stride
    begin = step.positions[:, :1]
    first = (-((length - 1 - begin) // stride)).clamp(min=0)  # the first entry whose last token is not before `begin`
    entries = first + torch.arange(-(-step.num_tokens // stride), device=begin.device)
    complete = block_end(entries, config) < begin + step.counts[:, None]
    per_entry = len(begin) * length * cache.heads_kv * (cache.dim + cache.dim_v) * sums.itemsize
    at_once = max(1, chunk_bytes(begin.device) // max(1, per_entry))
    for part, whole in zip(entries.split(at_once, 1), complete.split(at_once, 1), strict=True):
        tokens = part[..., None] * stride + torch.arange(length, device=begin.device)
        rows = cache.table.rows(tokens).clamp(min=0)
        for name, pool in zip(("k", "v"), pools, strict=True):
            blocks = cache.pages[name].flatten(0, 1)[rows].transpose(2, 3).to(sums)  # [B,n,H_kv,l,D]
            pooled = pool(torch.where(whole[..., None, None, None], blocks, 0.0)).to(cache.dtype)
            target = cache.pages[f"{name}_cmp"].flatten(0, 1)
            write_rows(target, cache.entry_rows(part).flatten(), pooled.flatten(0, 1), whole.flatten())


def write_rows(x: Tensor, rows: Tensor, values: Tensor, wanted: Tensor) -> None:
    """x[rows[i]] = values[i] where wanted[i], for distinct rows, without reading anything on the host.

    An unwanted row repeats the first wanted one; if there is none, row 0 is rewritten with its own values.
    """
    if x.shape[0] == 0 or rows.shape[0] == 0:
        return
    wanted = wanted & (rows >= 0)
    first = wanted.to(torch.uint8).argmax(0, keepdim=True)
    any_wanted = wanted.any()
    idle_row = torch.where(any_wanted, rows.index_select(0, first), 0)
    idle_value = torch.where(any_wanted, values.index_select(0, first).to(x.dtype), x[:1])
    shape = (-1, *[1] * (x.dim() - 1))
    values = torch.where(wanted.reshape(shape), values.to(x.dtype), idle_value)
    x.index_copy_(0, torch.where(wanted, rows, idle_row), values)
