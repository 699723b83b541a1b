"""Choosing for tokens: kernels as the compiler's PTX, interpreted on a CPU (tests/ptx.py), against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.documents import DOCUMENT, ENTRY, LENGTH, ROW
from nsa import NSAConfig, reference
from nsa.tensors import NSAInputs
from tests.helpers import make_qkv
from tests.test_token_blocks import check_chosen
from tests.test_token_selected_ptx import argument, program
from tests.token_selected_twins import Twin

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

CONFIG = NSAConfig.paper(
    compress_block_size=2, compress_stride=1, select_block_size=4, num_selected_blocks=5, window_size=0
)
"""A step covers 188 tokens where three warpgroups multiply, elsewhere 252."""

LONG = replace(CONFIG, compress_block_size=4, select_block_size=192, num_selected_blocks=4)
"""Of so many entries a block that two warpgroups multiply; a step covers one."""


@pytest.fixture(params=["mma.sync, early", "wgmma, late", "wgmma, early"])
def choose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Tensor]:
    """token_blocks interpreted. Parameter: what multiplies, and when copies arrive."""
    instruction, _, copies = request.param.partition(", ")
    from cute_kernels import jit, token_blocks
    from cute_kernels.token_best import WARPS

    monkeypatch.setattr(jit, "OPTIONS", f"{jit.OPTIONS} --gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}")
    real = token_blocks._compiled

    def compiled(*how: Any) -> Twin:
        def run(q: Tensor, k: Tensor, lse: Tensor, scores: Tensor, *x: Any) -> None:
            statics = (3,), (3,), (), ()
            given = [argument(y, static) for y, static in zip((q, k, lse, scores), statics, strict=True)]
            given += [argument(y, (0,)) if isinstance(y, Tensor) else argument(y) for y in x if y is not None]
            tiling = token_blocks.choose_tiling(how[1], how[2], how[3], instruction == "wgmma")
            ctas = -(-q.shape[1] // tiling.tokens) * k.shape[2] * q.shape[0]
            tensors = [y for y in (q, k, lse, scores, *x) if isinstance(y, Tensor)]
            program(real, *how[:-1], instruction == "wgmma").run(given, (ctas, 1, 1), tensors, copies == "late")

        return Twin(run)

    real_best = token_blocks._best

    def best(*how: Any) -> Twin:
        def run(scores: Tensor, indices: Tensor, *x: Any) -> None:
            given = [argument(scores), argument(indices, (3,))]
            given += [argument(y, (0,)) if isinstance(y, Tensor) else argument(y) for y in x if y is not None]
            tensors = [y for y in (scores, indices, *x) if isinstance(y, Tensor)]
            grid = (-(-scores.shape[2] // WARPS), scores.shape[1], scores.shape[0])
            program(real_best, *how).run(given, grid, tensors, copies == "late")

        return Twin(run)

    monkeypatch.setattr(token_blocks, "_compiled", compiled)
    monkeypatch.setattr(token_blocks, "_best", best)
    return token_blocks.token_blocks


def check_interpreted(
    choose: Callable[..., Tensor], config: NSAConfig, inputs: NSAInputs, start: int, most: float = 0.05
) -> None:
    """Args: `most`, share of tokens that may have near ties."""
    k_cmp = reference.pooled(inputs, config)[0].k_cmp
    assert k_cmp is not None
    exact = NSAInputs(*(x.double() for x in (inputs.q, inputs.k, inputs.v)), k_cmp=k_cmp.double(), v_cmp=k_cmp.double())
    _, aux = reference.nsa(exact, config)
    got = choose(inputs.q[:, start:], k_cmp, aux.lse_cmp[:, :, start:].float(), config, start=start)
    full = torch.cat([aux.indices[:, :, :start].int(), got], 2)
    assert check_chosen(full, aux.indices, inputs, config, k_cmp, aux.lse_cmp) <= most * got.shape[2]


@pytest.mark.parametrize(
    ("group", "dim", "tokens", "start", "dtype"),
    [
        (1, 64, 70, 0, torch.bfloat16),
        (2, 64, 60, 700, torch.bfloat16),
        (3, 128, 40, 300, torch.float16),
        (16, 128, 40, 280, torch.bfloat16),
        (64, 128, 9, 300, torch.bfloat16),
    ],
)
def test_interpreted(
    choose: Callable[..., Tensor], group: int, dim: int, tokens: int, start: int, dtype: torch.dtype
) -> None:
    """Few and many steps and parts, an odd and an even number of heads, every tiling."""
    check_interpreted(choose, CONFIG, NSAInputs(*make_qkv(start + tokens, group, 1, dim, dtype=dtype)), start)


@pytest.mark.parametrize(("group", "tokens", "start"), [(8, 20, 600), (3, 70, 370)])
def test_blocks_of_many_entries(choose: Callable[..., Tensor], group: int, tokens: int, start: int) -> None:
    check_interpreted(choose, LONG, NSAInputs(*make_qkv(start + tokens, group, 1, 64, dtype=torch.bfloat16)), start)


@pytest.mark.parametrize("group", [1, 4])
def test_documents(choose: Callable[..., Tensor], group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one, an empty one, a short one and unused rows: as each alone, and the scores of 64 tokens at a time."""
    tile, rows, entries, documents = 64, 8 * 64, 512, ((0, 0, 300), (320, 384, 0), (320, 384, 60))
    q, k, _ = make_qkv(rows, 2 * group, 2, 64, dtype=torch.bfloat16)
    k_cmp, lse = k[:, :entries].contiguous(), torch.randn(1, 2 * group, rows) + 8  # any will do
    expected = torch.full((1, 2, rows, CONFIG.num_selected_blocks), -1, dtype=torch.int32)
    bounds = torch.full((6, len(documents) + 1), -9, dtype=torch.int32)
    bounds[LENGTH] = 0
    for i, (row, entry, length) in enumerate(documents):
        own, keys = slice(row, row + length), slice(entry, entry + max(0, length - 1))
        bounds[[ROW, ENTRY, LENGTH], i] = torch.tensor([row, entry, length], dtype=torch.int32)
        expected[:, :, own] = choose(q[:, own], k_cmp[:, keys], lse[:, :, own], CONFIG)
    tiles = torch.full((2, rows // tile), -9, dtype=torch.int32)
    tiles[DOCUMENT] = torch.tensor([0] * 5 + [2] + [-1] * 2)
    packed: Any = SimpleNamespace(bounds=bounds, tiles=tiles, tile=tile)
    monkeypatch.setattr("cute_kernels.token_blocks.SCORE_BYTES", 1)
    assert torch.equal(choose(q, k_cmp, lse, CONFIG, documents=packed), expected)


def test_scores_of_some_tokens_at_a_time(choose: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, though the last tokens' scores are wider."""
    q, k, _ = make_qkv(200, 4, 2, 64, dtype=torch.bfloat16, batch=2)
    k_cmp, lse = torch.cat([k, k.flip(1)], 1)[:, :249], torch.randn(2, 4, 200) + 8  # any will do
    expected = choose(q, k_cmp, lse, CONFIG, start=50)
    monkeypatch.setattr("cute_kernels.token_blocks.SCORE_BYTES", 1)
    assert torch.equal(choose(q, k_cmp, lse, CONFIG, start=50), expected)
