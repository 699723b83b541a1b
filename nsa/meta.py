"""NSA on the meta device: shapes and dtypes of the results, the same for every backend."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.common.meta import empty_result
from nsa.config import NSAConfig
from nsa.inputs import NSAAux, NSAInputs
from nsa.reference import with_compressed_entries

FORWARD = "nsa.meta:nsa"


def nsa(inputs: NSAInputs, config: NSAConfig, *, aux: bool) -> tuple[Tensor, NSAAux | None]:
    """Return out and NSAAux, as backends do."""
    if config.compress != "mean":
        inputs, config = with_compressed_entries(inputs, config)
    q, v = inputs.q, inputs.v
    out = empty_result((*q.shape[:-1], v.shape[-1]), q.dtype, *inputs.tensors().values())
    return out, _aux(inputs, config) if aux else None


def _aux(inputs: NSAInputs, config: NSAConfig) -> NSAAux:
    q, v = inputs.q, inputs.v
    *batch, tokens, heads, dim = q.shape
    kv_heads, v_dim = v.shape[-2:]
    tiles, entries = inputs.num_tiles(config), inputs.num_entries(config)
    sums = torch.promote_types(q.dtype, torch.float32)
    gates = sums if inputs.gates is None else inputs.gates.dtype
    select_heads, count = kv_heads if config.shares_heads else heads, config.num_cmp_selected_blocks

    def empty(*shape: int, dtype: torch.dtype = q.dtype) -> Tensor:
        return q.new_empty((*batch, *shape), dtype=dtype)

    return NSAAux(
        o_cmp=empty(tokens, heads, v_dim),
        o_slc=empty(tokens, heads, v_dim),
        o_win=empty(tokens, heads, v_dim),
        lse_cmp=empty(heads, tokens, dtype=sums),
        lse_slc=empty(heads, tokens, dtype=sums),
        lse_win=empty(heads, tokens, dtype=sums),
        k_cmp=empty(entries, kv_heads, dim),
        v_cmp=empty(entries, kv_heads, v_dim),
        gates=empty(tokens, heads, 3, dtype=gates),
        indices=empty(select_heads, tiles, config.num_selected_blocks, dtype=torch.int32),
        cmp_indices=None if count is None else empty(heads, tiles, count, dtype=torch.int32),
    )
