"""Per-token scoring and selection: weights, layouts and refusals on a CPU, and the kernel on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.select.token import overlap_weights, token_topk
from cute_kernels.select.token_tiling import KEY_TILE, TILINGS, choose_tiling, score_layout
from nsa import NSAConfig
from nsa.inputs import NSAInputs
from tests.support import cases
from tests.support.helpers import make_qkv
from tests.support.select_cases import blocks_of, check_chosen, compressed

PAPER = NSAConfig.paper(num_selected_blocks=6, window_size=16)
SMALL = NSAConfig.paper(
    compress_block_size=8, compress_stride=4, select_block_size=16, num_selected_blocks=5, window_size=0
)
SIZES: dict[str, NSAConfig] = {
    "paper": SMALL,
    "nothing forced": replace(SMALL, num_init_blocks=0, num_local_blocks=0),
    "only forced": replace(SMALL, num_selected_blocks=3),
    "four init": replace(SMALL, num_init_blocks=4, num_local_blocks=0),
    "plain": replace(SMALL, compress_stride=None, select_block_size=None),
    "blocks of one entry": replace(SMALL, compress_stride=None, select_block_size=8),
    "l = l'": replace(SMALL, select_block_size=8),
    "l > l'": replace(SMALL, compress_block_size=24, select_block_size=8),
    "odd ratio": replace(SMALL, compress_block_size=12, select_block_size=20),
    "more blocks than there are": replace(SMALL, num_selected_blocks=40),
    "one slot": replace(SMALL, num_selected_blocks=1, num_init_blocks=0, num_local_blocks=0),
}


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
    blocks = blocks_of(SIZES[name])
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


@pytest.mark.parametrize("name", SIZES)
def test_scores_have_no_bank_conflicts(name: str) -> None:
    """Scores do not overlap; a warp writes 8 entries of 4 pairs of tokens, lanes read consecutive blocks."""
    blocks = blocks_of(SIZES[name])
    ratio = blocks.size // blocks.stride
    columns, stride = score_layout(ratio)

    def word(row: int, entry: int) -> int:
        return row * stride + entry % ratio * columns + entry // ratio

    words = {word(row, entry) for row in range(16) for entry in range(KEY_TILE)}
    assert len(words) == 16 * KEY_TILE
    for first in range(0, KEY_TILE, 8):
        banks = {word(2 * pair, first + i) % 32 for pair in range(4) for i in range(8)}
        assert len(banks) == 32 or 8 % ratio != 0


def test_tilings() -> None:
    chosen = {(dim, group): choose_tiling(dim, group, 16, 4) for dim in (64, 128) for group in range(1, 65)}
    assert None not in chosen.values()
    assert chosen[128, 16] == TILINGS[1]
    assert chosen[128, 64] == TILINGS[3]
    assert choose_tiling(128, 64, 2048, 4) is None


# The kernel, on a GPU

GPU_CASES: dict[str, dict[str, Any]] = {
    "paper": {},
    "nothing forced": {"num_init_blocks": 0, "num_local_blocks": 0},
    "only forced": {"num_selected_blocks": 3},
    "48 blocks": {"num_selected_blocks": 48},
    "more blocks than there are": {"num_selected_blocks": 100},
    "plain": {"compress_block_size": 64, "compress_stride": None},
    "blocks of one entry, many": {"compress_block_size": 16, "compress_stride": None, "select_block_size": 16},
    "l > l'": {"compress_block_size": 96, "compress_stride": 32, "select_block_size": 32},
    "odd ratio": {"compress_block_size": 48, "compress_stride": 16, "select_block_size": 80},
    "scale": {"softmax_scale": 0.5},
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
@pytest.mark.parametrize(
    ("group", "dim", "dtype"),
    cases.product([1, 2, 3, 4, 8, 16, 17, 48, 64], [64, 128], [BF16, FP16], cover=2),
    ids=str,
)
def test_groups(group: int, dim: int, dtype: torch.dtype) -> None:
    check_kernel(on_gpu(1500, 2 * group, 2, dim, dtype=dtype, batch=2))


@on_cuda
@pytest.mark.parametrize("group", [1, 3, 16, 64])
def test_groups_without_wgmma(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_kernels.select.token.has_warpgroups", lambda _: False)
    check_kernel(on_gpu(1500, 2 * group, 2, batch=2))
    check_kernel(on_gpu(9000, 2 * group, 2, 64))


@on_cuda
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 63, 64, 65, 500, 1023, 4096, 4097])
def test_sizes(tokens: int) -> None:
    check_kernel(on_gpu(tokens))


@on_cuda
@pytest.mark.parametrize("name", GPU_CASES)
def test_options(name: str) -> None:
    check_kernel(on_gpu(4500, 8, 2), replace(PAPER, **GPU_CASES[name]))


@on_cuda
def test_many_steps() -> None:
    """Entries of several steps, with large logits."""
    inputs = on_gpu(12000, 4, 1, 64)
    check_kernel(replace(inputs, q=inputs.q * 4))


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
def test_nothing_depends_on_later_tokens() -> None:
    """Bitwise, whatever later queries, entries and lse hold, NaN included."""
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


@on_cuda
def test_repeats_and_pieces_are_bitwise_equal() -> None:
    inputs = on_gpu(5000, 16, 2, batch=2)
    k_cmp, lse, _ = compressed(inputs, PAPER)
    expected = choose(inputs, PAPER, k_cmp, lse)
    for _ in range(10):
        assert torch.equal(choose(inputs, PAPER, k_cmp, lse), expected)
    for start, stop in ((0, 1), (1, 700), (700, 701), (704, 5000)):
        piece = replace(inputs, q=inputs.q[:, start:stop])
        got = choose(piece, PAPER, k_cmp, lse[:, :, start:stop], start=start)
        assert torch.equal(got, expected[:, :, start:stop])


@on_cuda
def test_any_strides() -> None:
    inputs = on_gpu(700, 8, 2, 64, batch=2)
    k_cmp, lse, _ = compressed(inputs, PAPER)
    expected = choose(inputs, PAPER, k_cmp, lse)
    q = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    fused = torch.cat([k_cmp, k_cmp], dim=2)[:, :, 2:]
    other = lse.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(choose(replace(inputs, q=q), PAPER, fused, other), expected)
    shifted = torch.empty(k_cmp.numel() + 1, dtype=BF16, device="cuda")
    shifted[1:] = k_cmp.flatten()
    assert torch.equal(choose(inputs, PAPER, shifted[1:].view(k_cmp.shape), lse), expected)


@on_cuda
def test_no_entries_and_no_tokens() -> None:
    config = replace(PAPER, num_init_blocks=1, num_local_blocks=2)
    q = on_gpu(20, 4, 1).q
    got = token_topk(q, q[:, :0, :1], torch.full((1, 4, 20), -torch.inf, device="cuda"), config)
    expected = torch.full((1, 1, 20, 6), -1, device="cuda")
    expected[..., 0] = 0  # the block of the token itself
    assert torch.equal(got.long(), expected)
    assert token_topk(q[:, :0], q[:, :5, :1], q.new_empty(1, 4, 0, dtype=torch.float32), config).shape == (1, 1, 0, 6)


@on_cuda
@pytest.mark.parametrize("group", [1, 4, 16, 64])
def test_documents_are_what_they_are_alone(group: int) -> None:
    from cute_kernels.pool.compress import block_means
    from cute_kernels.pool.documents import Packed, lay_out

    lengths, unused = (0, 1, 127, 128, 0, 129, 3000, 31, 32, 256, 4113, 0), 41
    heads, tile = 2 * group, 128
    q, k, v = make_qkv(sum(lengths) + unused, heads, 2, 128, dtype=BF16, device="cuda")
    for x in (q, k, v):
        x[:, sum(lengths) :] = torch.nan
    cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    length, stride = PAPER.compress_block_size, PAPER.stride
    documents, (aligned_q, _, _) = lay_out(q, k, v, Packed(cu_seqlens), tile=tile, step=1, length=length, stride=stride)
    k_cmp, _ = block_means(k, v, length, stride, BF16, documents)
    lse = torch.randn(1, heads, aligned_q.shape[1], device="cuda") + 8  # any will do
    expected = torch.full((1, 2, aligned_q.shape[1], 6), -1, dtype=torch.int32, device="cuda")
    row = 0
    for first, tokens in zip(cu_seqlens.tolist(), lengths, strict=False):
        own = [x[:, first : first + tokens] for x in (q, k, v)]
        keys, _ = block_means(own[1], own[2], length, stride, BF16)
        rows = slice(row, row + tokens)
        expected[:, :, rows] = token_topk(own[0], keys, lse[:, :, rows], PAPER)
        row += -(-tokens // tile) * tile
    got = token_topk(aligned_q, k_cmp, lse, PAPER, documents=documents)
    assert torch.equal(got, expected)
