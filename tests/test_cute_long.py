"""Sequences of millions of tokens on one GPU: offsets past 2^31, sampled rows against fp64, bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, nsa_forward
from nsa.tensors import NSAInputs

pytestmark = [pytest.mark.cuda, pytest.mark.slow, pytest.mark.filterwarnings("default")]

HEADS, KV_HEADS, DIM = 8, 2, 128
GIB = 2**30


@pytest.mark.parametrize("num_cmp", [None, 16])
@pytest.mark.parametrize("millions", [4, 16])
def test_millions_of_tokens(millions: int, num_cmp: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_kernels import fa4, forward

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # 200 GB of fills
    tokens = millions << 20
    needed = (2 * HEADS + 2 * KV_HEADS) * tokens * DIM * 2 + 24 * GIB
    assert torch.cuda.mem_get_info()[1] >= needed, f"needs a GPU with {needed / GIB:.0f} GiB"
    config = NSAConfig(num_cmp_selected_blocks=num_cmp)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (_normal(generator, tokens, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    assert q.numel() > 2**31
    weight = _normal(generator, HEADS, 3)[0] / math.sqrt(DIM)

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = nsa_forward(q, k, v, gate_proj_weight=weight, config=config)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - out.numel() * 2
    assert extra <= 12 * GIB, f"{extra / GIB:.1f} GiB beside inputs and output"

    inputs = NSAInputs(q, k, v, gate_proj_weight=weight)
    k_cmp, v_cmp = forward._compress(inputs, config)
    for block in (0, tokens // 64 - 1):
        mean = k[0, block * 64 : block * 64 + 64].double().mean(0)
        assert (k_cmp[0, block] - mean).abs().max() <= 2**-8 * mean.abs().max()
    plan = forward._plan(config, fa4.rules(q.device), DIM, k_cmp.shape[1])
    for tile in (3, tokens // 256 // 2 + 1, tokens // 256 - 1):
        start = tile * 256
        rows = q[:, start : start + 256]
        indices, cmp_indices = forward._select(plan, rows, k_cmp, start, tokens)
        for head in (0, HEADS - 1):
            chosen = None if cmp_indices is None else cmp_indices[0, head, 0].long()
            expected = _rows_in_fp64(inputs, k_cmp, v_cmp, start, head, indices[0, head, 0].long(), chosen)
            got = out[0, start : start + 256, head].double()
            # outputs are means of about 1/sqrt(keys) size; bf16 keeps 8 bits of each branch and of the sum
            assert (got - expected).abs().max() <= 4 * 2**-8 * expected.abs().max(), f"tile {tile}, head {head}"


def _normal(generator: torch.Generator, rows: int, heads: int) -> Tensor:
    """bf16 `[1,rows,heads,DIM]`, filled in parts: one fp32 copy of it all would not fit."""
    tensor = torch.empty(1, rows, heads, DIM, device="cuda", dtype=torch.bfloat16)
    for part in tensor.flatten(0, 1).split(1 << 20):
        part.normal_(generator=generator)
    return tensor


def _rows_in_fp64(
    inputs: NSAInputs, k_cmp: Tensor, v_cmp: Tensor, start: int, head: int, blocks: Tensor, cmp_blocks: Tensor | None
) -> Tensor:
    """One tile of one head, `[256,DIM]`, for given selections, straight from the definition."""
    kv_head = head // (HEADS // KV_HEADS)
    rows = torch.arange(start, start + 256, device="cuda")
    q = inputs.q[0, rows, head].double()

    def attend(keys: Tensor, values: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        k, v = (x[0, positions, kv_head].double() for x in (keys, values))
        logits = (q @ k.T / math.sqrt(DIM)).masked_fill(~visible, -math.inf)
        return torch.softmax(logits, -1).nan_to_num() @ v

    entries = torch.arange(k_cmp.shape[1], device="cuda")
    if cmp_blocks is not None:
        entries = (cmp_blocks[cmp_blocks >= 0][:, None] * 128 + torch.arange(128, device="cuda")).flatten()
        entries = entries[entries < k_cmp.shape[1]]
    tokens = (blocks[blocks >= 0][:, None] * 64 + torch.arange(64, device="cuda")).flatten()
    near = torch.arange(max(0, start - 511), start + 256, device="cuda")
    branches = (
        attend(k_cmp, v_cmp, entries, entries * 64 + 63 <= rows[:, None]),
        attend(inputs.k, inputs.v, tokens, tokens <= rows[:, None]),
        attend(inputs.k, inputs.v, near, (near <= rows[:, None]) & (near > rows[:, None] - 512)),
    )
    assert inputs.gate_proj_weight is not None
    gates = torch.sigmoid(q @ inputs.gate_proj_weight[head].double().T)
    return sum(gates[:, i, None] * branch for i, branch in enumerate(branches))
