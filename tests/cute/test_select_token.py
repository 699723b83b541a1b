"""Per-token scoring and selection: weights, layouts and refusals on a CPU, and the kernel on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.select.token import overlap_weights, token_topk
from cute_kernels.select.token_tiling import TILINGS, choose_tiling
from cute_kernels.select.topk import Blocks
from nsa import NSAConfig
from nsa.inputs import NSAInputs
from tests.support.helpers import make_qkv
from tests.support.select_cases import check_chosen, compressed

PAPER = NSAConfig.paper(num_selected_blocks=6, window_size=16)
SIZES = {
    "paper": (8, 4, 16),
    "plain": (8, 8, 8),
    "two entries a block": (8, 8, 16),
    "l = l'": (8, 4, 8),
    "l > l'": (24, 4, 8),
    "odd ratio": (12, 4, 20),
}
"""l, d and l'."""


def chosen_among_equals(tokens: int, config: NSAConfig) -> Tensor:
    """`[tokens, k]` where q = 0: all probabilities are 1, so the tokens in visible entries count, then the index."""
    chosen = torch.full((tokens, config.num_selected_blocks), -1)
    length, stride, size = config.compress_block_size, config.stride, config.select_size
    for token in range(tokens):
        counts: dict[int, int] = {}
        for entry in range(config.num_compressed(token + 1)):
            for at in range(entry * stride, entry * stride + length):
                counts[at // size] = counts.get(at // size, 0) + 1
        best = sorted(sorted(counts, key=lambda b: (-counts[b], b))[: config.num_selected_blocks])
        chosen[token, : len(best)] = torch.tensor(best)
    return chosen


@pytest.mark.parametrize("name", SIZES)
def test_overlap_weights_are_those_of_every_block(name: str) -> None:
    blocks = Blocks(*SIZES[name], 5)
    for block in (0, 1, 7):
        expected = {}
        for entry in range(200):
            tokens = range(entry * blocks.stride, entry * blocks.stride + blocks.length)
            overlap = sum(block * blocks.size <= t < (block + 1) * blocks.size for t in tokens)
            if overlap:
                expected[entry] = overlap / blocks.length
        first = block * blocks.size // blocks.stride - blocks.length // blocks.stride + 1
        got = {first + i: weight for i, weight in enumerate(overlap_weights(blocks)) if first + i >= 0}
        assert got == pytest.approx(expected)


def test_tilings() -> None:
    chosen = {(dim, group): choose_tiling(dim, group, 16, 4) for dim in (64, 128) for group in range(1, 65)}
    assert None not in chosen.values()
    assert chosen[128, 16] == TILINGS[1]
    assert chosen[128, 64] == TILINGS[3]
    assert choose_tiling(128, 64, 2048, 4) is None


# The kernel, on a GPU

GPU_CASES: dict[str, dict[str, Any]] = {
    "48 blocks": {"num_selected_blocks": 48},
    "blocks of one entry, many": {"compress_block_size": 16, "compress_stride": None, "select_block_size": 16},
    "l > l'": {"compress_block_size": 96, "compress_stride": 32, "select_block_size": 32},
    "odd ratio": {"compress_block_size": 48, "compress_stride": 16, "select_block_size": 80},
}
BF16, FP16 = torch.bfloat16, torch.float16


def on_gpu(tokens: int, heads: int = 16, kv_heads: int = 1, dim: int = 128, **keywords: Any) -> NSAInputs:
    return NSAInputs(*make_qkv(tokens, heads, kv_heads, dim, **{"dtype": BF16, "device": "cuda", **keywords}))


def choose(inputs: NSAInputs, config: NSAConfig, k_cmp: Tensor, lse: Tensor, **keywords: Any) -> Tensor:
    return token_topk(inputs.q, k_cmp, lse.float(), config, **keywords)


def check_kernel(inputs: NSAInputs, config: NSAConfig = PAPER, *, most: float = 0.01) -> None:
    """Args: `most`, share of rows that may have near ties; random scores hardly ever do."""
    k_cmp, lse, expected = compressed(inputs, config)
    got = choose(inputs, config, k_cmp, lse)
    assert check_chosen(got, expected, inputs, config, k_cmp, lse) <= most * expected[..., 0].numel()


def on_cuda(test: Any) -> Any:
    return pytest.mark.cuda(pytest.mark.filterwarnings("default")(test))


@on_cuda
@pytest.mark.parametrize("group", [1, 3, 17, 48, 64])
@pytest.mark.parametrize("warpgroups", [True, False])
def test_groups(group: int, warpgroups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others, with WGMMA, are those of whole calls."""
    if not warpgroups:
        monkeypatch.setattr("cute_kernels.select.token.has_warpgroups", lambda _: False)
    check_kernel(on_gpu(1500, 2 * group, 2, batch=2))
    check_kernel(on_gpu(9000, 2 * group, 2, 64))  # entries of several steps


@on_cuda
@pytest.mark.parametrize("name", GPU_CASES)
def test_options(name: str) -> None:
    check_kernel(on_gpu(4500, 8, 2), replace(PAPER, **GPU_CASES[name]))


@on_cuda
@pytest.mark.parametrize("sign", [1, -1], ids=["rising", "falling"])
def test_every_order_of_scores(sign: int) -> None:
    """Steps that replace the whole list, and steps that replace nothing; rounded keys tie often."""
    inputs = on_gpu(9000, 4, 1)
    slope = (1 + sign * torch.arange(9000, device="cuda") / 9000)[:, None, None]
    k = (torch.ones_like(inputs.k) * slope).to(BF16)
    check_kernel(replace(inputs, q=inputs.q.abs(), k=k), replace(PAPER, num_init_blocks=0, num_local_blocks=0), most=1)


@on_cuda
@pytest.mark.parametrize("group", [1, 16, 64])
def test_ties_go_to_the_lower_block(group: int) -> None:
    config = replace(PAPER, num_init_blocks=0, num_local_blocks=0)
    inputs = on_gpu(2000, group, 1)
    k_cmp = inputs.k[:, : config.num_compressed(2000)]
    got = token_topk(torch.zeros_like(inputs.q), k_cmp, torch.zeros(1, group, 2000, device="cuda"), config)
    assert torch.equal(got[0, 0].cpu().long(), chosen_among_equals(2000, config))


@on_cuda
def test_later_tokens_and_other_pieces_change_no_bit() -> None:
    """Whatever later queries, entries and lse hold, NaN included; nor does another launch, or one of some queries."""
    inputs = on_gpu(5000, 16, 2)
    k_cmp, lse, _ = compressed(inputs, PAPER)
    expected = choose(inputs, PAPER, k_cmp, lse)
    for at in (0, 30, 31, 32, 1000, 1023, 1024, 4095, 4998):
        later = slice(at + 1, None)
        q, keys, other = inputs.q.clone(), k_cmp.clone(), lse.clone()
        q[:, later] = torch.nan
        keys[:, PAPER.num_compressed(at + 1) :] = torch.nan
        other[:, :, later] = torch.nan
        got = choose(replace(inputs, q=q), PAPER, keys, other)
        assert torch.equal(got[:, :, : at + 1], expected[:, :, : at + 1]), f"perturbed after {at}"
    for start, stop in ((0, 5000), (0, 1), (1, 700), (700, 701), (704, 5000)):
        piece = replace(inputs, q=inputs.q[:, start:stop])
        got = choose(piece, PAPER, k_cmp, lse[:, :, start:stop], start=start)
        assert torch.equal(got, expected[:, :, start:stop])
