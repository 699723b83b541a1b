"""Sequences of millions of tokens on one GPU: offsets past 2^31, sampled rows against fp64, bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAConfig, nsa, nsa_forward
from nsa.inputs import NSAInputs
from tests.support.hardware import EITHER
from tests.support.select_cases import probabilities

pytestmark = [pytest.mark.cuda, pytest.mark.slow, pytest.mark.filterwarnings("default")]

HEADS, KV_HEADS, DIM = 8, 2, 128
TILE, BLOCK, WINDOW, CMP_BLOCK = 256, 64, 512, 128
GIB = 2**30
PER_TOKEN = NSAConfig(q_tile_size=1, num_init_blocks=1, num_local_blocks=2)


def normal(generator: torch.Generator, rows: int, heads: int) -> Tensor:
    """bf16 `[1,rows,heads,DIM]`, filled in parts: one fp32 copy of it all would not fit."""
    tensor = torch.empty(1, rows, heads, DIM, device="cuda", dtype=torch.bfloat16)
    for part in tensor.flatten(0, 1).split(1 << 20):
        part.normal_(generator=generator)
    return tensor


def tile_in_fp64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    weight: Tensor,
    *,
    start: int,
    blocks: Tensor,
    cmp_blocks: Tensor | None,
) -> Tensor:
    """One tile of one head, `[rows,DIM]`, for given selections; differentiable in what is fp64.

    Args:
        q: the tile's queries `[rows,DIM]`: TILE of them, or one that selects alone.
        k, v, k_cmp, v_cmp: of the key/value head, `[tokens,DIM]` and `[entries,DIM]`.
        weight: the head's gate projection `[3,DIM]`.
        start: first token of the tile.
        blocks, cmp_blocks: selected blocks of tokens, and of entries (None: all), padded with -1.
    """
    rows = torch.arange(start, start + len(q), device=q.device)
    q = q.double()

    def attend(keys: Tensor, values: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        logits = (q @ keys[positions].double().T / math.sqrt(DIM)).masked_fill(~visible, -math.inf)
        return torch.softmax(logits, -1).nan_to_num() @ values[positions].double()

    def members(chosen: Tensor, size: int) -> Tensor:
        return (chosen[chosen >= 0][:, None] * size + torch.arange(size, device=q.device)).flatten()

    entries = torch.arange(len(k_cmp), device=q.device)
    if cmp_blocks is not None:
        entries = members(cmp_blocks, CMP_BLOCK)
        entries = entries[entries < len(k_cmp)]
    tokens = members(blocks, BLOCK)
    tokens = tokens[tokens < len(k)]
    near = torch.arange(max(0, start - WINDOW + 1), start + len(q), device=q.device)
    branches = (
        attend(k_cmp, v_cmp, entries, entries * BLOCK + BLOCK - 1 <= rows[:, None]),
        attend(k, v, tokens, tokens <= rows[:, None]),
        attend(k, v, near, (near <= rows[:, None]) & (near > rows[:, None] - WINDOW)),
    )
    gates = torch.sigmoid(q @ weight.double().T)
    return sum((gates[:, i, None] * branch for i, branch in enumerate(branches)), torch.zeros_like(q))


@pytest.fixture(autouse=True)
def _no_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # 200 GB of them


def make_inputs(tokens: int, needed_gib: float) -> NSAInputs:
    assert torch.cuda.mem_get_info()[1] >= needed_gib * GIB, f"needs a GPU with {needed_gib:.0f} GiB"
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (normal(generator, tokens, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    assert q.numel() > 2**31
    return NSAInputs(q, k, v, gate_proj_weight=normal(generator, HEADS, 3)[0] / math.sqrt(DIM))


def rows_of(config: NSAConfig) -> int:
    """Rows that select together."""
    return 1 if config.token_mode else TILE


Selections = Callable[[int], tuple[Tensor, Tensor | None]]
"""Function from the first row of a tile to the blocks it selects, by query head: of tokens, and of entries or None."""


def selected_by(inputs: NSAInputs, config: NSAConfig, kernels: str) -> tuple[Tensor, Tensor, Selections]:
    """Compressed keys and values `[1,entries,KV_HEADS,DIM]`, and the selections."""
    if kernels == "triton":
        return selected_by_triton(inputs, config)
    from cute_kernels import forward
    from cute_kernels.call import prepare

    call = prepare(inputs, config)

    def selections(start: int) -> tuple[Tensor, Tensor | None]:
        first = start // TILE * TILE
        rows = inputs.q[:, first : first + TILE]
        if config.token_mode:
            branches = forward.attend(call, first, first + rows.shape[1], lse=False)
            blocks = branches.indices[0, :, start - first].long()
            return blocks.repeat_interleave(HEADS // KV_HEADS, 0), None
        indices, chosen = forward.select(call, rows, call.k_cmp, start, inputs.q.shape[1])
        return indices[0, :, 0].long(), None if chosen is None else chosen[0, :, 0].long()

    return call.k_cmp, call.v_cmp, selections


def selected_by_triton(inputs: NSAInputs, config: NSAConfig) -> tuple[Tensor, Tensor, Selections]:
    from ascend_kernels.nsa import forward
    from ascend_kernels.nsa.pool import compressed

    pack, q = forward.prepare(inputs, config), inputs.q[0]
    k_cmp, v_cmp = compressed(inputs, config, pack)
    lse = forward.attend_compressed(q, k_cmp, v_cmp, config, pack).lse
    indices = forward.select(q, k_cmp, lse, config, pack).long()
    indices = indices.repeat_interleave(HEADS // len(indices), 0)
    return k_cmp[None], v_cmp[None], lambda start: (indices[:, start // rows_of(config)], None)


@pytest.mark.parametrize(
    ("millions", "num_cmp", "kernels"),
    [(4, None, "sm_90"), (4, 16, "sm_90"), (16, None, "sm_90"), (16, 16, "sm_90"), (4, None, "triton")],
    indirect=["kernels"],
)
def test_millions_of_tokens(millions: int, num_cmp: int | None, kernels: str) -> None:
    tokens = millions << 20
    outputs = 4 if kernels == "triton" else 1  # out and, whole, those of the branches
    inputs = make_inputs(tokens, ((outputs + 1) * HEADS + 2 * KV_HEADS) * tokens * DIM * 2 / GIB + 24)
    config = NSAConfig(num_cmp_selected_blocks=num_cmp)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = nsa_forward(**inputs.tensors(), config=config)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - outputs * out.numel() * 2
    assert extra <= 12 * GIB, f"{extra / GIB:.1f} GiB beside inputs and outputs"

    check_rows(inputs, config, out, tiles_of(tokens), kernels)


@EITHER
def test_millions_of_tokens_that_select_alone(kernels: str) -> None:
    """In 24 GiB; by Triton, which keeps outputs of branches whole, in 36."""
    tokens, most_gib = (2 << 20) + 321, 36 if kernels == "triton" else 24
    torch.cuda.reset_peak_memory_stats()
    inputs = make_inputs(tokens, most_gib)
    out = nsa_forward(**inputs.tensors(), config=PER_TOKEN)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() <= most_gib * GIB
    starts = [777, tokens // 2 + 1, tokens - 1]
    check_rows(inputs, PER_TOKEN, out, starts, kernels)


def check_rows(inputs: NSAInputs, config: NSAConfig, out: Tensor, starts: list[int], kernels: str) -> None:
    """Of the tiles that begin there, for what they select."""
    rows = rows_of(config)
    k_cmp, v_cmp, selections = selected_by(inputs, config, kernels)
    assert inputs.gate_proj_weight is not None
    for start in starts:
        blocks, chosen = selections(start)
        if config.token_mode:
            check_choice(inputs, k_cmp, start, blocks)
        for block in (0, inputs.k.shape[1] // BLOCK - 1):
            mean = inputs.k[0, block * BLOCK : (block + 1) * BLOCK].double().mean(0)
            assert (k_cmp[0, block] - mean).abs().max() <= 2**-8 * mean.abs().max()
        for head in (0, HEADS - 1):
            kv_head = head * KV_HEADS // HEADS
            expected = tile_in_fp64(
                inputs.q[0, start : start + rows, head],
                *(x[0, :, kv_head] for x in (inputs.k, inputs.v, k_cmp, v_cmp)),
                inputs.gate_proj_weight[head],
                start=start,
                blocks=blocks[head],
                cmp_blocks=None if chosen is None else chosen[head],
            )
            got = out[0, start : start + rows, head].double()
            # outputs are means of about 1/sqrt(keys) size; bf16 keeps 8 bits of each branch and of the sum
            assert (got - expected).abs().max() <= 4 * 2**-8 * expected.abs().max(), f"row {start}, head {head}"


def check_choice(inputs: NSAInputs, k_cmp: Tensor, token: int, blocks: Tensor) -> None:
    """A token that selects alone has its forced blocks and, beside them, none that is worse than one it left out.

    Args:
        blocks: `[HEADS,k]`, ascending, padded with -1.
    """
    own = token // BLOCK
    forced = {0, max(0, own - 1), own}
    entries = (token + 1) // BLOCK
    for kv_head in range(KV_HEADS):
        group = slice(kv_head * HEADS // KV_HEADS, (kv_head + 1) * HEADS // KV_HEADS)
        listed = [block for block in blocks[group.start].tolist() if block >= 0]
        chosen = set(listed)
        assert listed == sorted(chosen)
        assert len(chosen) == min(PER_TOKEN.num_selected_blocks, own + 1)
        assert forced <= chosen
        q, keys = inputs.q[0, token, group], k_cmp[0, :, kv_head]
        lse = torch.logsumexp(q.double() @ keys[:entries].double().T / math.sqrt(DIM), -1)
        scores, bound = probabilities(q, keys, lse, PER_TOKEN, token)
        taken, left = sorted(chosen - forced), sorted(set(range(own)) - chosen)
        if taken and left:
            best = scores[left].max()
            assert best - scores[taken].min() <= 2 * bound * best, f"token {token}, group {kv_head}"


@pytest.mark.parametrize("atomic_free", [False, True], ids=["FA4", "atomic-free"])
@pytest.mark.parametrize("num_cmp", [None, 16])
def test_backward_of_millions_of_tokens(
    num_cmp: int | None, atomic_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cute_kernels import backward

    monkeypatch.setattr(backward, "nsa_backward", partial(backward.nsa_backward, atomic_free=atomic_free))
    tokens = 4 << 20
    check_gradients(tokens, NSAConfig(num_cmp_selected_blocks=num_cmp), tiles_of(tokens), "sm_90")


@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_backward_of_millions_of_tokens_in_triton(kernels: str) -> None:
    tokens = 4 << 20
    check_gradients(tokens, NSAConfig(), tiles_of(tokens), kernels)


@EITHER
def test_backward_of_millions_of_tokens_that_select_alone(kernels: str) -> None:
    tokens = (4 << 20) + 321
    check_gradients(tokens, PER_TOKEN, [777, tokens // 2 + 1, tokens - 1], kernels)


def tiles_of(tokens: int) -> list[int]:
    """First tokens of three tiles."""
    return [tile * TILE for tile in (3, tokens // TILE // 2 + 1, tokens // TILE - 1)]


def check_gradients(tokens: int, config: NSAConfig, starts: list[int], kernels: str) -> None:
    """Gradients that follow from the tiles that begin there: do is zero elsewhere, so fp64 can have them all."""
    kv_head, rows = 1, rows_of(config)
    inputs = make_inputs(tokens, 128)
    do = torch.zeros_like(inputs.q)
    for start in starts:
        do[:, start : start + rows].normal_()
    leaves = inputs.map(lambda x: x.requires_grad_())
    out = nsa(**leaves.tensors(), config=config, recompute=True)
    dq, dk, dv = torch.autograd.grad(out, (leaves.q, leaves.k, leaves.v), do)
    del out, leaves
    inputs = inputs.map(Tensor.detach)

    k, v = (x[0, :, kv_head].double().requires_grad_() for x in (inputs.k, inputs.v))
    group = range(kv_head * HEADS // KV_HEADS, (kv_head + 1) * HEADS // KV_HEADS)
    k_cmp, v_cmp, selections = selected_by(inputs, config, kernels)
    k_cmp, v_cmp = (x[0, :, kv_head].double().requires_grad_() for x in (k_cmp, v_cmp))
    assert inputs.gate_proj_weight is not None
    for start in starts:
        blocks, chosen = selections(start)
        for head in group:
            q = inputs.q[0, start : start + rows, head].double().requires_grad_()
            cmp_blocks = None if chosen is None else chosen[head]
            chose: dict[str, Any] = {"start": start, "blocks": blocks[head], "cmp_blocks": cmp_blocks}
            result = tile_in_fp64(q, k, v, k_cmp, v_cmp, inputs.gate_proj_weight[head], **chose)
            result.backward(do[0, start : start + rows, head].double())
            assert_close(dq[0, start : start + rows, head], q.grad, f"dq at {start}, head {head}")
    assert not dq[0, :TILE].any()
    for name, got, whole, pooled in (("dk", dk, k, k_cmp), ("dv", dv, v, v_cmp)):
        assert whole.grad is not None
        assert pooled.grad is not None
        whole.grad[: len(pooled) * BLOCK].unflatten(0, (-1, BLOCK)).add_(pooled.grad[:, None] / BLOCK)
        assert_close(got[0, :, kv_head], whole.grad, name)


def assert_close(got: Tensor, expected: Tensor | None, name: str) -> None:
    """P, dS and each branch's part are rounded to bf16, and so is their sum: four times 2^-8 of the largest."""
    assert expected is not None
    parts = zip(got.split(1 << 20), expected.split(1 << 20), strict=True)
    worst = max(float((part.double() - exact).abs().max()) for part, exact in parts)
    assert worst <= 4 * 2**-8 * float(expected.abs().max()), f"{name}: {worst}"
