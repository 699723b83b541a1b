"""NSA's kernels as triton-ascend lowers them: accepted, with products of the inputs' dtype and copies of blocks.

Only lowered, not executed: programs of NSA are not planned for an NPU's grid and memories yet, so dispatch has no row.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ascend_kernels.launch import Launch, recording
from nsa import NSAConfig, block_sparse_attention, indexer_kl_loss, nsa, top_blocks_by_max
from tests.ascend.lowered import gates, proof
from tests.support.helpers import make_qkv

FEW = {"num_selected_blocks": 4, "window_size": 100}
PER_TOKEN, PER_TILE = NSAConfig.paper(**FEW), NSAConfig.per_tile(**FEW, q_tile_size=64)


def qkv(heads: int) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(300, heads, 2, 64, dtype=torch.bfloat16, requires_grad=True)


def layer(config: NSAConfig, heads: int) -> None:
    q, k, v = qkv(heads)
    weight = torch.zeros(heads, 3, 64, dtype=q.dtype)
    nsa(q, k, v, gate_proj_weight=weight, config=config, backend="triton").sum().backward()


def chosen_blocks() -> None:
    q, k, v = qkv(8)
    blocks = top_blocks_by_max(q[:, :, :2], k, block_size=64, k=4, backend="triton")
    blocks = torch.zeros_like(blocks)  # nothing has run
    block_sparse_attention(q, k, v, blocks, block_size=64, backend="triton").sum().backward()
    indexer_kl_loss(q[:, :, :2], k, q, k, blocks, block_size=64, backend="triton").backward()


CALLS: dict[str, Callable[[], None]] = {
    "per token, query-outer": lambda: layer(PER_TOKEN, 32),
    "per token, KV-outer": lambda: layer(PER_TOKEN, 8),
    "per tile": lambda: layer(PER_TILE, 8),
    "given blocks": chosen_blocks,
}
"""Together they launch every kernel."""

LOOPS = {
    "scores.token_kernel": 2,
    "topk.topk_kernel": 1,
    "lists.keys_kernel": 5,
    "kv_outer.forward_kernel": 7,
    "kv_outer.token_backward_kernel": 10,
    "pool.unpool_kernel": 1,
    "block_sparse.statistics_kernel": 3,
    "indexer_loss.lse_kernel": 5,
    "indexer_loss.best_kernel": 4,
    "indexer_loss.dq_kernel": 1,
    "indexer_loss.dk_kernel": 4,
}
"""Most loops over single elements: gathers of rows by their indices, and places that are computed. Others have none."""
PRODUCTS = (
    "interval", "interval_backward", "selected", "kv_outer.forward", "kv_outer.token", "kv_outer.tile", "scores.token",
    "indexer_loss.lse", "indexer_loss.best", "indexer_loss.dk",
)  # fmt: skip


@pytest.mark.ascend
def test_every_kernel_is_lowered() -> None:
    kernels: dict[str, Launch] = {}
    for call in CALLS.values():
        with recording(run=False) as launches:
            call()
        kernels |= {f"{x.kernel.fn.__module__.split('.')[-1]}.{x.kernel.fn.__name__}": x for x in launches}
    assert len(kernels) == 29
    for name, launch in kernels.items():
        linalg = proof.lower(launch).linalg
        assert gates.count(linalg, "ExtractedLoadOrStore") <= LOOPS.get(name, 0), name
        if name.startswith(PRODUCTS):
            gates.assert_matmul_inputs(linalg, "bf16", name)
